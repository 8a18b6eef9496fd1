"""Hooks on modules without side effects: a copy does nothing, and hooks keep their positions among the program's hooks.

A user may copy, pickle and compile a model with hooks. A `Hook` is copied and pickled as
`contextlib.nullcontext().__exit__`, which takes anything, returns None, and can be loaded without `recorder`. Code that
dynamo compiled before a hook was registered runs without the hook; the functions at the end return what dynamo has
compiled in this process. They never import dynamo: a program that never imported dynamo has compiled nothing. Nothing
here may raise into training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_FIRST_NUMBER = (1 << 32) + (int.from_bytes(os.urandom(4), "little") << 32)
_DYNAMO_KNOWS_THE_ORDER = torch.__version__ >= "2.13"


class Hook:
    """A callable of the recorder that torch registers; a copy of the callable does nothing."""

    __slots__ = ()
    _why_not_scripted = (
        "torch.jit.script cannot compile the hooks of a model that is being recorded; script it in a process without "
        "RECORDER=1, or before its first call"
    )

    @property
    def __name__(self) -> str:
        """Raise if `torch.jit.script` asks for the name, because it cannot compile a hook."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise RuntimeError(f"recorder: {self._why_not_scripted}")
        return str(type(self).__qualname__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def put_on(register: Callable[..., Any], hook: Hook, **options: bool) -> Any:
    """Register a hook of a module under a key that only this process uses; return torch's handle.

    A pickle of the module keeps the keys of hooks, and the keys whose hooks take kwargs or are always called. A process
    that loads the pickle gives its own hooks keys from 0 on, and a hook with the recorder's key would be called as the
    recorder's.
    """
    handle = register(hook, **options)
    theirs, handle.id = handle.id, _FIRST_NUMBER + handle.id
    registered = handle.hooks_dict_ref()
    for kind in (registered, *(reference() for reference in handle.extra_dict_ref)):
        if theirs in kind:
            kind[handle.id] = kind.pop(theirs)
    registered.move_to_end(handle.id, last=not options.get("prepend", False))
    return handle


def keep_first(registered: dict[int, Any]) -> None:
    """Make a hook that was registered with ``prepend`` the first entry of its dict for dynamo, too.

    Dynamo of torch 2.9 counts the entries in the order in which they were added. As a result it confuses the values of
    two hooks, and fails to compile.
    """
    if not _DYNAMO_KNOWS_THE_ORDER:
        others = list(registered.items())[1:]
        try:
            for number, _ in others:
                del registered[number]
        finally:
            registered.update(others)


def has_compiled(module: nn.Module, wrapper: nn.Module) -> bool:
    """Whether dynamo has compiled a compiled module already, without the hooks that are registered now.

    For torch's own classes dynamo compiles a function around the forward, which all of these classes share.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    functions: list[Any] = [type(module).forward]
    if frames is not None and wrapper is not module:
        functions.append(frames.innermost_fn(wrapper.forward))
    return _have_code(functions)


def has_compiled_anything() -> bool:
    """Whether dynamo has made a graph in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("stats"))


def is_compiled_already(model: nn.Module) -> bool:
    """Whether dynamo has already compiled a forward in this model, so that hooks can no longer become part of it."""
    return _have_code(type(module).forward for module in model.modules())


def _have_code(functions: Iterable[Any]) -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    codes = {function.__code__ for function in functions if hasattr(function, "__code__")}
    return frames is not None and any(bool(frames._debug_get_cache_entry_list(code)) for code in codes)
