"""The names of a model's state dict, as the manifests of a run tell them. Takes nothing in them for granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...errors import UnsupportedError
from ...run.run import Root, Run

_MAX_NAMES = 1_000_000
"""Most names of a model. An untrusted manifest may say that modules are shared in ways that make no end of names."""


class StateDict(NamedTuple):
    """What a model's state dict holds."""

    names: dict[str, str]
    """Each name in its order, and the one under which its rows stand: another one of what is tied or shared."""
    left_out: set[str]
    """Buffers that are not persistent."""


def roots_of(run: Run) -> list[str]:
    """Names of the outermost modules that the manifests know, in their order."""
    return list(dict.fromkeys(root.name for root in _roots(run)))


def state_dict_of(run: Run, root: str) -> StateDict:
    """The names of a model's parameters and buffers.

    Raises:
        UnsupportedError: the manifests say that there are too many.
    """
    state_dict = StateDict({}, set())
    aliases: dict[str, str] = {}
    for module in (module for known in _roots(run) if known.name == root for module in known.modules):
        for name in module.params:
            own = full_name(module.path, name)
            state_dict.names.setdefault(own, module.tied.get(name, own))
        for name in module.buffers:
            own = full_name(module.path, name)
            if name in module.non_persistent:
                state_dict.left_out.add(own)
            else:
                state_dict.names.setdefault(own, own)
        aliases |= dict.fromkeys(module.aliases, module.path)
    _add_shared(state_dict.names, aliases)
    return state_dict


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
        if root.stage is None:
            continue
        seen.add(root.stage.number)
        num_stages = max(num_stages, root.stage.num_stages)
        for module in root.modules:
            for name in (*module.params, *module.buffers):
                owners.setdefault(full_name(module.path, name), set()).add(root.stage.number)
    return Stages(owners, sorted(set(range(num_stages)) - seen))


def _roots(run: Run) -> Iterator[Root]:
    for writer in run.writers:
        yield from writer.manifest.roots
