"""Finds taps in a model's code, and says where on a module a new one would stand.

Nothing here may run a module.
"""

from __future__ import annotations

from torch import nn

from ..observe.tree import Node, source_line
from .module_taps import Where


def where_of(node: Node, root: str, site: str) -> Where:
    """Return where a tap on a module says that it stands."""
    return Where(root, node.path, site, node.class_name, node.is_leaf, source_line(node.owner) or "")


def has_tap(module: nn.Module, name: str) -> bool:
    """Whether a method of the module's class holds this very name beside a call of ``tap``."""
    codes = (getattr(value, "__code__", None) for cls in type(module).__mro__ for value in vars(cls).values())
    return any(code is not None and "tap" in code.co_names and name in code.co_consts for code in codes)


def has_scripted_tap(module: nn.Module) -> bool:
    """Whether the code that torch.jit made of a module holds a tap."""
    try:
        return "recorder::" in str(module.inlined_graph)
    except Exception:  # it has no forward
        return False
