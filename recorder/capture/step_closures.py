"""Wraps the closures of optimizer steps, so that gradients are recorded that a closure has computed."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, cast

import torch


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], returned: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return ``Optimizer.step``'s arguments with a closure that also calls `returned`, or None without one."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _wrapped(kwargs["closure"], returned)}
    # A positional argument counts as a closure only if the signature names it ``closure``: a user's `step` may take the
    # model there.
    if len(args) > 1 and callable(args[1]) and not isinstance(args[1], torch.nn.Module):
        names = list(inspect.signature(type(args[0]).step).parameters)
        if names[1:2] == ["closure"]:
            return (args[0], _wrapped(args[1], returned), *args[2:]), kwargs
    return None


def _wrapped(closure: Callable[..., Any], returned: Callable[[], None]) -> Callable[..., Any]:
    if not isinstance(closure, (types.FunctionType, types.MethodType)):
        return cast("Callable[..., Any]", _ClosureObject(closure, returned))

    @functools.wraps(closure)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        returned()
        return loss

    return wrapped


class _ClosureObject:
    """A wrapper around a closure that is an object. Only calls are intercepted; all other uses go to the object."""

    def __init__(self, closure: Any, returned: Callable[[], None]) -> None:
        self.__dict__.update(_closure=closure, _returned=returned)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_closure"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.__dict__["_closure"](*args, **kwargs)
        self.__dict__["_returned"]()
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_closure"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_closure"], name, value)
