"""Owns one question: which hooks on a module are the program's, and run after its values were recorded.

The recorder sees an output as the module's forward returned it, before other hooks: styles of tensor parallelism make
a plain tensor of a DTensor there, and with it goes its place. What the program's own hooks make of a value is seen at
the next module alone, so that whoever asks where a value comes from has to know of them. Calls none of them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import hooks

_KNOWN = ("torch", "torchao", "torch_xla", "contextlib", __name__.partition(".")[0])
"""Packages whose hooks are not the program's; an inert copy of one of ours is `contextlib`'s."""


def foreign_hooks(module: nn.Module) -> list[str]:
    """For each hook of the program on a module: when it runs, its name, and file and line where it has code."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # which has hooks of its own, and none of Python's
    after = list(module._forward_hooks.values())
    ours = [place for place, hook in enumerate(after) if isinstance(hook, hooks.AfterForward)]
    after = after[ours[0] + 1 :] if ours else after
    backward = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    return [*_told("forward", after), *_told("backward", backward)]


def _told(when: str, registered: list[Any]) -> Iterator[str]:
    for hook in registered:
        function = _function(hook)
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if home.partition(".")[0] in _KNOWN:
            continue
        code = getattr(function, "__code__", None)
        place = f" {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        yield f"{when} {getattr(function, '__qualname__', type(function).__qualname__)}{place}"


def _function(hook: Any) -> Any:
    """What is called in the end: of an object with a call, that; of a method, its function."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    if isinstance(hook, (types.FunctionType, types.BuiltinFunctionType)):
        return hook
    return type(hook).__call__
