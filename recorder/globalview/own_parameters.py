"""What manifests say of parameters that ranks with other batches have as others, and of what is made with them.

Experts work on rows that other ranks sent: what their modules take and give is no part of the rank's own batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, MEASURED, STATISTICS, parse_shape
from ..read.writers import RecordedWriter

_IGNORED = "ignored"
NOT_SHARED = "each rank has a parameter of its own under this name, as its manifest says"
BEGAN_ALIKE = (
    "; its wrapper was told to leave it alone, and it began equal on all ranks: --layout '...=per_rank' if each rank "
    "has its own"
)
NOT_OF_BATCH = "its parameters are the rank's own, as experts' are: which rows of the batch it was given is not known"


_FIRSTS = ("root", "module_path", "name", "site", "step", "rank", "ranks_present", "fingerprint", *STATISTICS, *COUNTS)
_Names = set[tuple[str, str]]
"""Parameters, or modules: root and full name."""


class OwnParameters:
    """Parameters of a run that are each rank's own, and the modules that have no others.

    What a wrapper was merely told to leave alone must have been others from its first record on: where a whole expert
    was equal on all ranks, it is no expert, and that nobody reduces its gradients is an oversight.
    """

    def __init__(self, writers: Sequence[RecordedWriter]) -> None:
        self._writers = writers
        self._told: _Names = set()
        """What the manifests call so."""
        self._said: _Names = set()
        """Those of which the program says so itself; the others its wrapper was told to leave alone."""
        for root in (root for writer in writers for root in writer.manifest.roots):
            for full, reason in root.unshared.items():
                self._told.add((root.name, full))
                if reason != _IGNORED:
                    self._said.add((root.name, full))

    @cached_property
    def _names(self) -> _Names:
        """Parameters that are each rank's own."""
        return self._told - self._alike

    @cached_property
    def _modules(self) -> _Names:
        """Modules that have no others."""
        return self._apart(self._names)

    @cached_property
    def _alike(self) -> _Names:
        """Parameters that a wrapper leaves alone, of experts of which all began equal on all ranks."""
        is_open = self._told - self._said
        if not is_open:
            return set()
        apart = self._apart(self._told)
        owners = {(root, full): (root, _expert_of(apart, root, _owner(full))) for root, full in is_open}
        alike = {one: _are_alike(words) for one, words in _first_words(self._writers, is_open).items()}
        others = {owners[one] for one in is_open if alike.get(one) is False}
        known = {owners[one] for one in is_open if alike.get(one)}
        return {one for one, owner in owners.items() if owner in known - others}

    def _apart(self, names: _Names) -> _Names:
        """The modules that have parameters of these names alone."""
        shared: _Names = set()
        for writer in self._writers if names else ():
            for root in writer.manifest.roots:
                for module in root.modules:
                    if any((root.name, _joined(module.path, own)) not in names for own in module.params):
                        shared |= {(root.name, above) for above in _with_above(module.path)}
        return {(root, path) for root, full in names for path in _with_above(_owner(full))} - shared

    def has(self, root: str, module_path: str, name: str) -> bool:
        """Whether a parameter is each rank's own, or that of which a state such as ``weight.exp_avg`` is."""
        return bool(self._told) and _is_of(self._names, root, module_path, name)

    def began_alike(self, root: str, module_path: str, name: str) -> bool:
        """Whether its wrapper was told to leave such a parameter alone, although it began equal on all ranks."""
        return bool(self._told) and _is_of(self._alike, root, module_path, name)

    def works_apart(self, root: str, module_path: str) -> bool:
        """Whether a module, or one that it is inside of, has such parameters and no others."""
        return bool(self._told) and any((root, path) in self._modules for path in _with_above(module_path))


def _first_words(writers: Sequence[RecordedWriter], names: _Names) -> dict[tuple[str, str], dict[int, Any]]:
    """What each rank says of parameters at the first step at which one is recorded: equal words where they are equal.

    None where it says nothing. A merged row of several ranks says it for all of them.
    """
    first_words: dict[tuple[str, str], tuple[int, dict[int, Any]]] = {}
    ends = pa.array(sorted({full.rpartition(".")[2] for _, full in names}))
    for shard in (shard for writer in writers for shard in writer.shards):
        for batch in shard.columns(_FIRSTS):
            is_asked = pc.and_(pc.equal(batch.column("site"), "param"), pc.is_in(batch.column("name"), ends))
            for row in batch.filter(pc.fill_null(is_asked, False)).to_pylist():
                one = row["root"], _joined(row["module_path"], row["name"])
                if one not in names or row["step"] > first_words.get(one, (row["step"],))[0]:
                    continue
                if row["step"] < first_words.setdefault(one, (row["step"], {}))[0]:
                    first_words[one] = row["step"], {}
                number = tuple(repr(row[name]) for name in (*STATISTICS, *COUNTS))
                word = row["fingerprint"] or (number if row[MEASURED] is not None else None)
                ranks = [row["rank"]]
                if row["rank"] is None and row["ranks_present"]:
                    ranks = list(parse_shape(row["ranks_present"]))
                first_words[one][1].update((rank, word) for rank in ranks if rank is not None)
    return {one: words for one, (_, words) in first_words.items()}


def _are_alike(words: dict[int, Any]) -> bool:
    """Whether several ranks say the same."""
    return len(words) > 1 and len(set(words.values())) == 1 and None not in words.values()


def _expert_of(modules: _Names, root: str, module_path: str) -> str:
    """The outermost of some modules around one; itself where there is none."""
    above = [path for path in _with_above(module_path) if (root, path) in modules]
    return above[-1] if above else module_path


def _is_of(names: _Names, root: str, module_path: str, name: str) -> bool:
    full = _joined(module_path, name)
    return any((root, some) in names for some in (full, *_with_above(_owner(full))))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _owner(full: str) -> str:
    return full.rpartition(".")[0]


def _with_above(path: str) -> Iterator[str]:
    """A path and those of the modules that it is inside of, but for the root's."""
    while path:
        yield path
        path = _owner(path)
