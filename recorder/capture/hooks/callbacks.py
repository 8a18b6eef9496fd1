"""The hook objects that torch holds, which carry a number and nothing else.

So a hook holds no lock, no tensor and no recorder: it looks its module or root up by number, and under `torch.compile`
it returns at once. Nothing here may raise into training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ...observe.module_hooks import Hook
from ...taps.graphs import in_functorch, is_traced
from ...taps.module_taps import is_tapped


class Loses(Protocol):
    """Counts a value as lost where even the handling of an error fails."""

    @property
    def lost(self) -> Callable[[], object]: ...


class HookedModule(Protocol):
    """The methods that the hooks of a module call."""

    @property
    def capture(self) -> Loses: ...

    @property
    def module(self) -> Callable[[], nn.Module | None]:
        """A weak reference to the module; a copy, or a replica that shares its hooks, is another module."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def after_forward(self, output: Any) -> None: ...

    def failed(self, site: str, error: Exception) -> None: ...


class HookedRoot(Protocol):
    """The methods that the hooks of a root call."""

    @property
    def capture(self) -> Loses: ...

    def is_entry(self, module: nn.Module) -> bool:
        """Whether the module is one whose outermost calls are calls of the root; a copy of it is another module."""

    def is_entered_at(self, module: nn.Module) -> bool: ...

    def begins(self, module: nn.Module) -> None: ...

    def ends(self, output: Any) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def has_moved(self, kind: str, eps: float) -> None: ...

    def jitter_failed(self, error: Exception) -> None: ...


WATCHES: dict[int, HookedModule] = {}
ROOTS: dict[int, HookedRoot] = {}

_NO_ROOM = (MemoryError, RecursionError)
"""Errors that even the handling of an error may meet, at the end of memory or of the stack."""
_is_compiling = torch.compiler.is_compiling


class NumberedHook(Hook):
    """A hook that finds its module or root by a number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class BeforeForward(NumberedHook):
    """Forward pre-hook with kwargs, registered last, which sees the arguments as the module's forward does."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Hand the arguments over. Torch leaves `kwargs` out if the hook was removed while torch called the hooks."""
        try:
            if _is_compiling():
                return
            watch = WATCHES.get(self.number)
            if watch is None or watch.module() is not module or is_traced():
                return
            watch.before_forward(args, kwargs or {})
        except Exception as error:
            if (watch := WATCHES.get(self.number)) is None:
                return
            try:
                watch.failed("input", error)
            except _NO_ROOM:
                watch.capture.lost()


class AfterForward(NumberedHook):
    """Forward hook, registered first, which sees the output as the module's forward returned it."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if _is_compiling():
                return
            watch = WATCHES.get(self.number)
            if watch is None or watch.module() is not module or is_traced():
                return
            if is_tapped(module) and in_functorch():
                return  # the op sees the plain tensor behind this one
            watch.after_forward(output)
        except Exception as error:
            if (watch := WATCHES.get(self.number)) is None:
                return
            try:
                watch.failed("output", error)
            except _NO_ROOM:
                watch.capture.lost()


class RootBegins(NumberedHook):
    """Forward pre-hook of a root, registered first."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            if _is_compiling():
                return
            root = ROOTS.get(self.number)
            if root is None or not root.is_entry(module):
                return
            root.begins(module)
        except Exception as error:
            if (root := ROOTS.get(self.number)) is None:
                return
            try:
                root.failed(error)
            except _NO_ROOM:
                root.capture.lost()


class RootEnds(NumberedHook):
    """Forward hook of a root, always called and registered last."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if _is_compiling():
                return
            root = ROOTS.get(self.number)
            if root is None or not root.is_entry(module):
                return
            root.ends(output)
        except Exception as error:
            if (root := ROOTS.get(self.number)) is None:
                return
            try:
                root.failed(error)
            except _NO_ROOM:
                root.capture.lost()
