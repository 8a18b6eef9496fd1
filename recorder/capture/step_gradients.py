"""Wraps the closures of optimizer steps, and finds out whether gradients were cleared between two updates."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

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


_SMALL = 4096
"""A gradient with more elements than this is not compared with the same gradient at the next update."""
_ALIKE = 0.9
"""The cosine above which two gradients look alike. Adding a gradient to a sum hardly turns the sum."""
_LEAST_ADDED = 0.1
"""The least norm of what a backward has added to a gradient, as a fraction of the norm of the gradient before."""


class LastGradient(NamedTuple):
    """A copy of a gradient with few elements, made at an update and compared with the gradient at the next update."""

    parameter: weakref.ref[torch.Tensor]
    gradient: weakref.ref[torch.Tensor]
    values: torch.Tensor
    next_version: int
    """The gradient's version counter after one more backward, if nothing else changes the gradient."""
    version: int
    """The gradient's version counter at the update."""
    thread: int
    """The thread of the update. No other thread may read the gradient, since a backward may be setting it."""
    has_stood: bool | None = None
    """Whether the gradient was there, and not zero, before each backward since the update; None without a backward."""

    @classmethod
    def of(cls, parameters: Iterator[torch.Tensor], *, in_ddp: bool) -> LastGradient | None:
        """Copy the first gradient that has few elements and lies in host memory. Return None if there is none.

        Args:
            parameters: the parameters of one optimizer.
            in_ddp: whether DDP averages the gradients, and copies the average into the gradient after each backward.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or not gradient.is_cpu or gradient.is_sparse:
                continue
            if in_ddp and gradient._is_view():
                continue  # the version is that of DDP's bucket, which every gradient in the bucket counts up
            if 1 < gradient.numel() <= _SMALL:
                version, values = gradient._version, gradient.detach().clone()
                references = weakref.ref(parameter), weakref.ref(gradient)
                return cls(*references, values, version + (2 if in_ddp else 1), version, threading.get_ident())
        return None

    def after_other_step(self) -> LastGradient:
        """Return the gradient as it is now if one backward was added to it, else itself."""
        now = self.gradient()
        if now is None or now._version != self.next_version or not now.any():
            return self
        return self._replace(values=now.detach().clone(), next_version=self.next_version + 1)

    def before_backward(self) -> LastGradient:
        """Return this, with whether the gradient still stands as a backward begins. Called on any thread."""
        if self.thread != threading.get_ident() or self.has_stood is False:
            return self
        parameter, now = self.parameter(), self.gradient()
        stands = parameter is not None and now is not None and parameter.grad is now and bool(now.any())
        return self._replace(has_stood=stands)

    @property
    def has_stood_through(self) -> bool:
        """Whether the gradient stood before each backward since the update, and was changed by one, or by a clip.

        This does not hold for the gradient of a copy of a parameter, to which programs copy the parameter's gradient.
        """
        now = self.gradient()
        return self.has_stood is True and now is not None and now._version > self.version

    def stands_uncleared(self) -> bool:
        """Whether one backward was added to the gradient since the last update, and nothing else changed the gradient.

        A gradient that was set to zero in place has another version. A gradient that was set to zero without autograd's
        notice does not look like the last gradient any more. If the batch is the same, it is about equal to the last
        and not longer.
        """
        now = self.gradient()
        if now is None or now._version != self.next_version:
            return False
        present, last = now.detach().flatten(), self.values.flatten()
        added = present - last
        is_longer = torch.dot(added, last) >= 0 and added.norm() >= _LEAST_ADDED * last.norm()
        return bool(is_longer and torch.cosine_similarity(present, last, dim=0) > _ALIKE)
