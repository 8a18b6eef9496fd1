"""Owns what manifests say of parameters that ranks with other batches have as others, and of what is made with them.

Experts work on rows that other ranks sent: what their modules take and give is no part of the rank's own batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import untrusted
from .writers import RecordedWriter

_IGNORED = "ignored"
NOT_SHARED = "each rank has a parameter of its own under this name, as its manifest says"
NOT_OF_BATCH = "its parameters are the rank's own, as experts' are: which rows of the batch it was given is not known"


class Unshared:
    """Parameters of a run that are each rank's own, and the modules that have no others."""

    def __init__(self, writers: Sequence[RecordedWriter]) -> None:
        self._names: set[tuple[str, str]] = set()
        self._said: set[tuple[str, str]] = set()
        """Those of which the program says so itself; the others its wrapper was told to leave alone."""
        shared: set[tuple[str, str]] = set()
        roots = [root for writer in writers for root in untrusted.objects(writer.manifest.get("roots"))]
        for root in roots:
            told = root.get("unshared")
            name = untrusted.text(root.get("name"))
            for full, reason in told.items() if isinstance(told, dict) else ():
                self._names.add((name, full))
                if reason != _IGNORED:
                    self._said.add((name, full))
        for root in roots if self._names else ():
            name = untrusted.text(root.get("name"))
            for module in untrusted.objects(root.get("modules")):
                path = untrusted.text(module.get("path"))
                if any((name, _joined(path, own)) not in self._names for own in untrusted.texts(module.get("params"))):
                    shared |= {(name, above) for above in _with_above(path)}
        self._modules = {(root, path) for root, full in self._names for path in _with_above(_owner(full))} - shared

    def has(self, root: str, module_path: str, name: str) -> bool:
        """Whether a parameter is each rank's own, or that of which a state such as ``weight.exp_avg`` is."""
        if not self._names:
            return False
        full = _joined(module_path, name)
        return any((root, some) in self._names for some in (full, *_with_above(_owner(full))))

    def is_said(self, root: str, module_path: str, name: str) -> bool:
        """Whether the program says it of such a parameter, so that it can be no oversight."""
        full = _joined(module_path, name)
        return any((root, some) in self._said for some in (full, *_with_above(_owner(full))))

    def expert_of(self, root: str, module_path: str) -> str:
        """The outermost module around one that has such parameters and no others; itself where there is none."""
        above = [path for path in _with_above(module_path) if (root, path) in self._modules]
        return above[-1] if above else module_path

    def works_apart(self, root: str, module_path: str) -> bool:
        """Whether a module, or one that it is inside of, has such parameters and no others."""
        return bool(self._modules) and any((root, path) in self._modules for path in _with_above(module_path))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _owner(full: str) -> str:
    return full.rpartition(".")[0]


def _with_above(path: str) -> Iterator[str]:
    """A path and those of the modules that it is inside of, but for the root's."""
    while path:
        yield path
        path = _owner(path)
