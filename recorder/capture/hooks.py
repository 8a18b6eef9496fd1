"""What torch holds of us: hook objects that carry a number and nothing else.

A model with hooks is copied, pickled and compiled by its user. So a hook holds no lock, no tensor and no recorder: it
looks its `Watch` up by number. A copy or a pickle of it is inert (`contextlib.nullcontext().__exit__`, which takes
anything and returns None, needs no `recorder` where it is loaded), and under `torch.compile` it returns at once.
Nothing here may raise into training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..graphs import in_functorch, is_traced
from ..taps import is_tapped

if TYPE_CHECKING:
    from ..records import Chunk, Moment, Origin
    from .clock import RootClock, Slice
    from .core import Capture
    from .root import Root
    from .watch import Watch

WATCHES: dict[int, Watch] = {}
ROOTS: dict[int, Root] = {}

_NO_ROOM = (MemoryError, RecursionError)
"""What even the handling of an error may meet, at the end of memory or of the stack."""
_is_compiling = torch.compiler.is_compiling
_FIRST_NUMBER = (1 << 32) + (int.from_bytes(os.urandom(4), "little") << 32)
_DYNAMO_KNOWS_THE_ORDER = torch.__version__ >= "2.13"


def keep_first(registered: dict[int, Any]) -> None:
    """A hook was registered with ``prepend``: let it be the first entry of its dict in dynamo's eyes, too.

    That of 2.9 counts entries as they were added, so that it looks for what it read from one hook in another, and
    fails to compile.
    """
    if not _DYNAMO_KNOWS_THE_ORDER:
        others = list(registered.items())[1:]
        try:
            for number, _ in others:
                del registered[number]
        finally:
            registered.update(others)


def put_on(register: Callable[..., Any], hook: Hook, **options: bool) -> Any:
    """Register a hook of a module under a number of this process alone; returns torch's handle.

    A pickle of the module keeps the numbers, and which of them take kwargs or are always called. A process that loads
    it counts from 0, and a hook of its own that got one of ours would be called as ours was.
    """
    handle = register(hook, **options)
    theirs, handle.id = handle.id, _FIRST_NUMBER + handle.id
    registered = handle.hooks_dict_ref()
    for kind in (registered, *(reference() for reference in handle.extra_dict_ref)):
        if theirs in kind:
            kind[handle.id] = kind.pop(theirs)
    registered.move_to_end(handle.id, last=not options.get("prepend", False))
    return handle


def _inert() -> Callable[..., None]:
    return contextlib.nullcontext().__exit__


class Hook:
    """What all of them share: a number, and inert copies."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def __name__(self) -> str:
        """`torch.jit.script` asks for it, and cannot compile what it finds."""
        if sys._getframe(1).f_globals.get("__name__") == "torch.jit._recursive":
            raise RuntimeError(
                "recorder: torch.jit.script cannot compile the hooks of a model that is being recorded; script it in a "
                "process without RECORDER=1, or before its first call"
            )
        return str(type(self).__qualname__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class BeforeForward(Hook):
    """Forward pre-hook with kwargs, registered last: the arguments as the module's forward sees them."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Torch leaves `kwargs` out where the hook was removed since it began to call them."""
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


class AfterForward(Hook):
    """Forward hook, registered first: the output as the module's forward returned it."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if _is_compiling():
                return
            watch = WATCHES.get(self.number)
            if watch is None or watch.module() is not module or is_traced():
                return
            if is_tapped(module) and in_functorch():
                return  # the op sees the plain tensor behind what is seen here
            watch.after_forward(output)
        except Exception as error:
            if (watch := WATCHES.get(self.number)) is None:
                return
            try:
                watch.failed("output", error)
            except _NO_ROOM:
                watch.capture.lost()


class RootBegins(Hook):
    """Forward pre-hook of a root, registered first."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        try:
            if _is_compiling():
                return
            root = ROOTS.get(self.number)
            if root is None or root.module() is not module:
                return
            root.begins(module)
        except Exception as error:
            if (root := ROOTS.get(self.number)) is None:
                return
            try:
                root.failed(error)
            except _NO_ROOM:
                root.capture.lost()


class RootEnds(Hook):
    """Forward hook of a root, always called and registered last."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        try:
            if _is_compiling():
                return
            root = ROOTS.get(self.number)
            if root is None or root.module() is not module:
                return
            root.ends(output)
        except Exception as error:
            if (root := ROOTS.get(self.number)) is None:
                return
            try:
                root.failed(error)
            except _NO_ROOM:
                root.capture.lost()


class GradientArrives:
    """Tensor hook: the gradient of one observed value. Fires once per backward through it."""

    __slots__ = ("_call", "_capture", "_is_once", "_keep", "_moment", "_origin", "_repeat", "_scope", "chunk", "handle")

    def __init__(
        self, capture: Capture, origin: Origin, moment: Moment, call: int, keep: int, scope: str | None = None
    ) -> None:
        self._capture = capture
        self._origin = origin
        self._moment = moment
        self._call = call
        self._keep = keep
        self._scope = scope
        self._repeat = 0
        # A zero-bubble schedule goes back twice, for the inputs and then for the weights; what passes again on that
        # second way is the same gradient, or a sum that torch puts right behind this hook.
        self._is_once = capture.is_in_stage
        self.chunk: Chunk | None = None
        """The place of a gradient that does not know it."""
        self.handle: Any = None
        """Set where the tensor is a leaf, which outlives the step: its hook is removed once it has fired."""

    def __call__(self, gradient: torch.Tensor | None) -> None:
        try:
            if _is_compiling() or gradient is None:  # as DDP hands on for an output that the loss does not use
                return
            capture = self._capture
            if not capture.is_open or (self._is_once and self._repeat):
                return
            capture.observe(
                self._origin,
                self._moment,
                "backward",
                self._call,
                self._repeat,
                self._keep,
                gradient,
                self._scope,
                self.chunk,
            )
            self._repeat += 1
            if self.handle is not None:
                self.handle.remove()
        except Exception as error:
            try:
                self._capture.site_failed(self._origin, error)
            except _NO_ROOM:
                self._capture.lost()


class GradientSeen:
    """Tensor hook on an output of a root: the slice has had its backward."""

    __slots__ = ("_clock", "_slice")

    def __init__(self, clock: RootClock, slice_: Slice) -> None:
        self._clock = clock
        self._slice = slice_

    def __call__(self, gradient: torch.Tensor) -> None:
        if not _is_compiling():
            self._clock.gradient_arrived(self._slice)
