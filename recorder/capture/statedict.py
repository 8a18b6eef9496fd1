"""Owns what the names of a model's rows do not say of its state dict: parameters with two names, buffers left out.

Must never read a tensor's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .flat import FlatParameter
from .watch import Watch

Ties = dict[str, dict[str, str]]
"""By module path and name there: the name of the model's under which the same parameter is recorded."""


def find_ties(watches: Iterable[Watch], flats: Iterable[FlatParameter]) -> Ties:
    """The second and further names of parameters; the first one in the order of modules is that of the rows."""
    ties: Ties = {}
    first_names: dict[int, str] = {}
    for watch in watches:
        for name, parameter in watch.own("_parameters"):
            full = full_name(watch.node_path, name)
            first = first_names.setdefault(id(parameter), full)
            if first != full:
                ties.setdefault(watch.node_path, {})[name] = first
    for flat in flats:
        for watch, name, first_watch, first_name in flat.ties:
            ties.setdefault(watch.node_path, {})[name] = full_name(first_watch.node_path, first_name)
    return ties


def about_state(module: nn.Module, tied: Mapping[str, str] | None) -> dict[str, Any]:
    """What the manifest says of a module's state dict, where there is something to say."""
    unsaved = getattr(module, "_non_persistent_buffers_set", ())  # what scripts and packages make may lack it
    left_out = sorted(name for name in unsaved if name in module._buffers)
    return {**({"tied": dict(tied)} if tied else {}), **({"non_persistent": left_out} if left_out else {})}


def full_name(path: str, name: str) -> str:
    """A parameter as `named_parameters()` calls it."""
    return f"{path}.{name}" if path else name
