"""Finds the hooks on a module that belong to the program and run after its values were recorded.

The recorder sees an output as the module's forward returned it, before other hooks: styles of tensor parallelism make
a plain tensor of a DTensor there, and with it goes its position in the global tensor. The effect of the program's own
hooks on a value is seen only at the next module, so that whoever asks where a value comes from must know of them.
Nothing here calls a hook.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import callbacks

_KNOWN = ("torch", "torchao", "torch_xla", "contextlib", __name__.partition(".")[0])
"""Packages whose hooks are not the program's; an inert copy of one of ours is `contextlib`'s."""


def foreign_hooks(module: nn.Module) -> list[str]:
    """Return, for each hook of the program on a module, when it runs, its name, and file and line of its code."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # TorchScript has its own hooks, and none of Python's
    after = list(module._forward_hooks.values())
    ours = [i for i, hook in enumerate(after) if isinstance(hook, callbacks.AfterForward)]
    after = after[ours[0] + 1 :] if ours else after
    backward = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    return [*_descriptions("forward", after), *_descriptions("backward", backward)]


def _descriptions(when: str, registered: list[Any]) -> Iterator[str]:
    for hook in registered:
        function = _function(hook)
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if home.partition(".")[0] in _KNOWN:
            continue
        code = getattr(function, "__code__", None)
        source = f" {code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        yield f"{when} {getattr(function, '__qualname__', type(function).__qualname__)}{source}"


def _function(hook: Any) -> Any:
    """Return the function that a hook calls: behind a partial or a method, or the ``__call__`` of an object."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    if isinstance(hook, (types.FunctionType, types.BuiltinFunctionType)):
        return hook
    return type(hook).__call__
