"""Owns the names of a model's state dict, as the manifests of a run tell them. Takes nothing in them for granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..read import untrusted
from ..read.run import Run

_MAX_NAMES = 1_000_000
"""Of a model. A stranger's manifest may say that modules are shared in ways that make no end of names."""

_MAX_STAGES = 1 << 12


class StateDict(NamedTuple):
    """What a model's state dict holds."""

    names: dict[str, str]
    """Each name in its order, and the one under which its rows stand: another one of what is tied or shared."""
    left_out: set[str]
    """Buffers that are not persistent."""


def roots_of(run: Run) -> list[str]:
    """Names of the outermost modules that the manifests know, in their order."""
    return list(dict.fromkeys(untrusted.text(root.get("name")) for root in _roots(run)))


def state_dict_of(run: Run, root: str) -> StateDict:
    """The names of a model's parameters and buffers.

    Raises:
        UnsupportedError: the manifests say that there are too many.
    """
    found = StateDict({}, set())
    aliases: dict[str, str] = {}
    for module in _modules(run, root):
        path = untrusted.text(module.get("path"))
        tied, unsaved = module.get("tied"), untrusted.texts(module.get("non_persistent"))
        for name in untrusted.texts(module.get("params")):
            own = full_name(path, name)
            recorded = tied.get(name) if isinstance(tied, dict) else None
            found.names.setdefault(own, recorded if isinstance(recorded, str) else own)
        for name in untrusted.texts(module.get("buffers")):
            own = full_name(path, name)
            if name in unsaved:
                found.left_out.add(own)
            else:
                found.names.setdefault(own, own)
        aliases |= dict.fromkeys(untrusted.texts(module.get("aliases")), path)
    _add_shared(found.names, aliases)
    return found


def full_name(path: str, name: str) -> str:
    """The name in the model of what a module calls so."""
    return f"{path}.{name}" if path and name else path or name


def _add_shared(names: dict[str, str], aliases: dict[str, str]) -> None:
    """Names below the further paths of shared modules; the innermost first, so that those around them repeat it all."""
    for alias, path in sorted(aliases.items(), key=lambda pair: -pair[1].count(".")):
        for name, recorded in list(names.items()):
            if not path or name.startswith(f"{path}."):
                names.setdefault(full_name(alias, name[len(path) :].removeprefix(".")), recorded)
        if len(names) > _MAX_NAMES:
            raise UnsupportedError(f"its manifests give the model more than {_MAX_NAMES} names")


class Stages(NamedTuple):
    """What the stages of a pipeline hold of a model."""

    owners: dict[str, set[int]]
    """By the name of a parameter or buffer, the stages that have one of that name."""
    missing: list[int]
    """Stages of which no rank left a manifest."""


def stages_of(run: Run) -> Stages:
    """The stages of a run, if it is of a pipeline."""
    owners: dict[str, set[int]] = {}
    seen: set[int] = set()
    num_stages = 0
    for root in _roots(run):
        facts = root.get("pipeline")
        stage, num = (facts.get("stage"), facts.get("num_stages")) if isinstance(facts, dict) else (None, None)
        if type(stage) is not int or type(num) is not int or not 0 <= stage < num <= _MAX_STAGES:
            continue
        seen.add(stage)
        num_stages = max(num_stages, num)
        for module in untrusted.objects(root.get("modules")):
            for name in (*untrusted.texts(module.get("params")), *untrusted.texts(module.get("buffers"))):
                owners.setdefault(full_name(untrusted.text(module.get("path")), name), set()).add(stage)
    return Stages(owners, sorted(set(range(num_stages)) - seen))


def _roots(run: Run) -> Iterator[dict[str, Any]]:
    for writer in run.writers:
        yield from untrusted.objects(writer.manifest.get("roots"))


def _modules(run: Run, root: str) -> Iterator[dict[str, Any]]:
    for found in _roots(run):
        if untrusted.text(found.get("name")) == root:
            yield from untrusted.objects(found.get("modules"))
