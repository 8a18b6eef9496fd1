"""Facts of a state dict that the names of rows do not show: parameters with two names, buffers left out.

Must never read a tensor's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...observe.observer import ModuleRows
from ..parallel.flat_parameters import FlatParameter

Ties = dict[str, dict[str, str]]
"""The full name under which a tied parameter is recorded, by module path and by its name there."""


def find_ties(watches: Iterable[ModuleRows], flats: Iterable[FlatParameter]) -> Ties:
    """Return the second and further names of parameters; rows have the first name in the order of modules."""
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
    """Return the members that the manifest has of a module's state dict; empty without ties and omissions."""
    unsaved = getattr(module, "_non_persistent_buffers_set", ())  # modules of scripts and packages may lack it
    left_out = sorted(name for name in unsaved if name in module._buffers)
    return {**({"tied": dict(tied)} if tied else {}), **({"non_persistent": left_out} if left_out else {})}


def full_name(path: str, name: str) -> str:
    """Return the name of a parameter as `named_parameters()` has it."""
    return f"{path}.{name}" if path else name
