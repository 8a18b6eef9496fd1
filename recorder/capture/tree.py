"""The module tree as a recording names it: canonical paths, one module a path, and the names of nested values.

A path is what ``named_modules()`` yields without the parts that wrappers add, so that a module has the same path in a
plain, DDP, FSDP, compiled or checkpointed run. Nothing here may run a module or read a tensor's values.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_TRANSPARENT = {"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel"}
_NO_CONTAINERS = (str, bytes, int, float, complex)
_MAX_DEPTH = 32
"""Levels of nesting that are searched for tensors; deeper is a cycle or a mistake."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """One path of the tree."""

    path: str
    module: nn.Module
    """The innermost module of this path, or the compile wrapper around it: what hooks go on."""
    owner: nn.Module
    """The innermost module: what holds parameters and buffers."""
    class_name: str
    is_leaf: bool
    is_callable: bool
    """False for containers without a forward, such as ModuleList."""
    aliases: list[str] = dataclasses.field(default_factory=list)
    is_compiled: bool = False


def class_name(module: nn.Module) -> str:
    """The name of the class that the user wrote; `fully_shard` puts ``FSDP`` in front of it."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
        return cls.__bases__[1].__name__
    return cls.__name__


def source_line(module: nn.Module) -> str | None:
    """``file:line`` of the class's forward, where Python code has one."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _inner_name(module: nn.Module) -> str | None:
    """The name of the child that a wrapper stands for, or None where the module is no wrapper."""
    for name in _TRANSPARENT:
        if name in module._modules:
            return name
    if "module" in module._modules and any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__):
        return "module"
    return None


def walk(model: nn.Module) -> list[Node]:
    """Every path of the model once, parents first, in ``named_modules()`` order; shared modules are aliases."""
    nodes: list[Node] = []
    seen: dict[int, Node] = {}
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        hooked, compiled = None, False
        owner = module
        while (inner := _inner_name(owner)) is not None and owner._modules[inner] is not None:
            if inner == "_orig_mod" and hooked is None:
                hooked = owner
            compiled = compiled or inner == "_orig_mod"
            owner = owner._modules[inner]  # type: ignore[assignment]
        if (known := seen.get(id(owner))) is not None:
            known.aliases.append(path)
            continue
        children = [(name, child) for name, child in owner._modules.items() if child is not None]
        node = Node(
            path=path,
            module=owner if hooked is None else hooked,
            owner=owner,
            class_name=class_name(owner),
            is_leaf=not children,
            is_callable=type(owner).forward is not nn.Module.forward,
            is_compiled=compiled or getattr(owner, "_compiled_call_impl", None) is not None,
        )
        seen[id(owner)] = node
        nodes.append(node)
        prefix = path + "." if path else ""
        stack.extend((prefix + name, child) for name, child in reversed(children))
    return nodes


def tensor_leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested containers with its path, such as ``0.hidden``; a bare tensor keeps ``name``.

    Tuples, lists, dicts, named tuples, dataclasses and whatever is registered as a pytree node are entered, each
    container once: parents that know their children and children that know their parents make no end of paths.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif value is not None and not isinstance(value, _NO_CONTAINERS):
        yield from _nested_leaves(value, name, _MAX_DEPTH, set())


def _nested_leaves(value: Any, name: str, depth: int, entered: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if depth == 0 or id(value) in entered:
        return
    entered.add(id(value))
    for key, item in _children(value):
        path = f"{name}.{key}" if name else str(key)
        if isinstance(item, torch.Tensor):
            yield path, item
        elif item is not None and not isinstance(item, _NO_CONTAINERS):
            yield from _nested_leaves(item, path, depth - 1, entered)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((item.name, getattr(value, item.name, None)) for item in dataclasses.fields(value))
    else:
        yield from _registered_children(value)


def _registered_children(value: Any) -> Iterator[tuple[str, Any]]:
    """Children of a type that the user registered with torch's pytree."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return
    if node.flatten_with_keys_fn is not None:
        for key, item in node.flatten_with_keys_fn(value)[0]:
            yield str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))), item
    else:
        yield from ((str(i), item) for i, item in enumerate(node.flatten_fn(value)[0]))


class Signature:
    """Names the arguments of one module's forward as its signature does."""

    __slots__ = ("_positional", "_rest")

    def __init__(self, module: nn.Module) -> None:
        self._positional: list[str] = []
        self._rest = "args"
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._positional.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor among the arguments with its name and path."""
        for i, value in enumerate(args):
            known = len(self._positional)
            yield from tensor_leaves(value, self._positional[i] if i < known else f"{self._rest}.{i - known}")
        for key, value in kwargs.items():
            yield from tensor_leaves(value, key)
