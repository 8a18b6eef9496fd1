"""Hooks on tensors, which record the gradient of a value that was seen, each time one arrives.

Nothing here may raise into training, keep a tensor alive, or read a tensor's values.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ...observe.clock import RootClock, Slice
from ...observe.observer import Observer
from ...records import Chunk, Moment, Origin
from ..parallel.aliases import WRAPPED, made_of, wrapped

_NO_ROOM = (MemoryError, RecursionError)
"""Errors that even the handling of an error may meet, at the end of memory or of the stack."""
_NO_HANDLE = "recorder"
"""The key of a hook that nobody removes, because it goes with its graph. Handles have numbers as keys."""
_is_compiling = torch.compiler.is_compiling


class GradientArrives:
    """Tensor hook that records the gradient of one observed value. It fires once per backward through the value."""

    __slots__ = ("_call", "_capture", "_is_once", "_keep", "_moment", "_origin", "_repeat", "_scope", "chunk", "handle")

    def __init__(
        self,
        capture: Observer,
        origin: Origin,
        moment: Moment,
        call: int,
        keep: int,
        scope: str | None = None,
        repeat: int = 0,
    ) -> None:
        self._capture = capture
        self._origin = origin
        self._moment = moment
        self._call = call
        self._keep = keep
        self._scope = scope
        self._repeat = repeat
        # A zero-bubble schedule goes back twice, for the inputs and then for the weights. On the second way the same
        # gradient passes, or a sum that torch corrects behind this hook.
        self._is_once = capture.is_in_stage
        self.chunk: Chunk | None = None
        """The chunk of a gradient that is a plain tensor."""
        self.handle: Any = None
        """The handle of a hook on a leaf, which outlives the step: the hook is removed once it has fired."""

    def __call__(self, gradient: torch.Tensor | None) -> None:
        try:
            if _is_compiling() or gradient is None:  # DDP passes None for an output that the loss does not use
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
    """Tensor hook on an output of a root, which notes that the slice has had its backward."""

    __slots__ = ("_clock", "_slice")

    def __init__(self, clock: RootClock, slice_: Slice) -> None:
        self._clock = clock
        self._slice = slice_

    def __call__(self, gradient: torch.Tensor) -> None:
        if not _is_compiling():
            self._clock.gradient_arrived(self._slice)


def watch_gradient(
    capture: Observer,
    tensor: torch.Tensor,
    origin: Origin,
    moment: Moment,
    call: int,
    keep: int,
    scope: str | None = None,
    repeat: int = 0,
) -> GradientArrives:
    """Record the gradient that arrives at ``tensor``, each time one does; the first has the number ``repeat``."""
    hook = GradientArrives(capture, origin, moment, call, keep, scope, repeat)
    node = tensor.grad_fn if type(tensor) is torch.Tensor else None
    if node is not None and type(node).__name__ == WRAPPED and (made := wrapped(tensor, node)) is not None:
        if isinstance(made, torch.Tensor):
            tensor, node = made, None
        else:
            node, number = made
            node.register_prehook(lambda gradients: hook(gradients[number]))
            return hook
    if node is not None and tensor._backward_hooks is None:
        # As `register_hook` does, but without the handle, which takes four fifths of its 2.6 us.
        tensor._backward_hooks = registered = OrderedDict()
        node._register_hook_dict(tensor)
        registered[_NO_HANDLE] = hook
        return hook
    with (
        torch._C.DisableTorchFunctionSubclass()
    ):  # a subclass's own `register_hook` may count calls, or refuse this one
        handle = tensor.register_hook(hook)
        is_leaf = tensor.is_leaf
    if is_leaf:
        hook.handle = handle
        capture.keep_leaf_hook(handle)
    return hook


def watch_argument_gradient(
    capture: Observer, tensor: torch.Tensor, origin: Origin, moment: Moment, call: int, keep: int, repeat: int
) -> None:
    """Record the gradient of a DTensor argument; if it was made for one module, that of the tensor it was made of."""
    source = made_of(tensor)
    if source is None:
        watch_gradient(capture, tensor, origin, moment, call, keep, repeat=repeat)
        return
    node, number, chunk = source
    hook = GradientArrives(capture, origin, moment, call, keep, repeat=repeat)
    hook.chunk = chunk
    node.register_prehook(lambda gradients: hook(gradients[number]))
