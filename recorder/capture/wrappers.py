"""Wraps functions of torch that no hook reports, and the closures of optimizer steps.

A closure is wrapped so that gradients are recorded that it has computed.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, cast

import torch


class Wrappers:
    """The functions of torch that are replaced by wrappers of ours, until `close`."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []
        """The replaced attributes: owner, name, the original function, and our wrapper."""

    def __bool__(self) -> bool:
        return bool(self._made)

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` returns for the original function."""
        original = getattr(owner, name)
        ours = (wrapper for _, _, function, wrapper in self._made if function is original)  # pickle wants one object
        wrapper = next(ours, None) or functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)
        self._made.append((owner, name, original, wrapper))

    def close(self) -> None:
        """Put the functions back. If the program has wrapped a wrapper of ours, its own wrapper keeps working."""
        for owner, name, original, wrapper in self._made:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self._made.clear()


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
