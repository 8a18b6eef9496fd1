"""The hooks on roots (models under hooks) and on tensors, and the members of `Capture` and `Root` that hooks need.

A hook on a module or a root has only a number, by which it finds the module or root. So the hook keeps no lock, no
tensor and no recorder. A hook on a tensor records every gradient that arrives at an observed value. Under
`torch.compile` every hook returns at once. Nothing here may raise into training, keep a tensor alive, or read a
tensor's values.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ...config import Settings
from ...observe.clock import Clock, RootClock, Slice
from ...observe.selection import NoMasks, RuleSelection
from ...observe.tree import Hook
from ...records import Chunk, SeenValue, Staged, StepPosition, ValuePlace
from ...system.log import Events
from ...taps.graphs import leave_uncompiled
from ..parallel.aliases import WRAPPED, Aliases, made_of, wrapped
from ..token_blocks import TokenBlocks
from .given import GivenArguments


class RootCalls(threading.local):
    """The nested calls of roots (models under hooks) that this thread is executing."""

    depth = 0
    outermost: Any = None
    """The `Root` of the outermost call that is under way, or of the last outermost call."""


class CaptureForHooks(Protocol):
    """The members of `Capture` that hooks, roots, scalars and taps use, on any thread. `Capture` describes each."""

    settings: Settings
    selection: RuleSelection
    masks: list[int] | NoMasks
    clock: Clock
    events: Events
    root_calls: RootCalls
    aliases: Aliases
    is_open: bool
    """True until the recording is closed."""
    is_in_stage: bool
    has_seen_forward: bool
    every_call_is_a_step: bool
    before_forward: Callable[[], None] | None
    saw_again: Callable[[Any, torch.Tensor, int], bool]
    """Passes a new tensor of a forward value to the probe, faster than `observe` does. Takes the result of
    `seen_before`, the tensor and the step. Returns False if the probe has not measured it; then call `observe`."""
    lost: Callable[[], object]
    """The function that counts a value as lost. It needs no stack and no memory."""
    add_evaluation: Callable[[Any, str], None]
    returned: Callable[[str, str, Any], None]
    """Takes the root, the name and the node of a single number that a model has returned in training."""

    @property
    def is_step_in_force(self) -> bool: ...
    def keep_of(self, rule_set: int, micro_step: int | None, call: int) -> int: ...
    def observe(
        self, seen: SeenValue, keep: int, tensor: torch.Tensor, put: Callable[[Staged], None] | None = None
    ) -> None: ...
    def seen_before(self, origin: ValuePlace, mode: str, tensor: torch.Tensor) -> Any: ...
    def site_failed(self, origin: ValuePlace, error: Exception) -> bool: ...
    def keep_leaf_hook(self, handle: Any) -> None: ...
    def token_blocks(self) -> TokenBlocks: ...
    def step_changed(self) -> None: ...
    def call_begins(self) -> None: ...
    def forward_without_root(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def hook_failed(self, where: str, error: Exception) -> None: ...
    def is_disarmed(self, site: str, name: str) -> bool: ...


class CalledRoot(Protocol):
    """The members of `Root` that hooks and hooked modules need. `Root` describes each."""

    capture: CaptureForHooks
    clock: RootClock
    given: GivenArguments
    name: str
    marked_ranks: tuple[int, ...]
    is_over_meshes: bool

    def slice_now(self) -> tuple[Slice, str]: ...
    def is_first_use(self, path: str, name: str, parameter: torch.Tensor, slice_: Slice) -> bool: ...
    def is_entry(self, module: nn.Module) -> bool: ...
    def is_entered_at(self, module: nn.Module) -> bool: ...
    def begins(self, module: nn.Module) -> None: ...
    def ends(self, output: Any) -> None: ...
    def failed(self, error: Exception) -> None: ...
    def has_moved(self, kind: str, eps: float) -> None: ...
    def jitter_failed(self, error: Exception) -> None: ...


ROOTS: dict[int, CalledRoot] = {}

NO_ROOM = (MemoryError, RecursionError)
"""The errors that even an error handler may raise, once memory or the stack has run out."""
_is_compiling = torch.compiler.is_compiling


class NumberedHook(Hook):
    """A hook that finds its module or root by a number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class RootBegins(NumberedHook):
    """The forward pre-hook of a root (a model under hooks). It is registered first."""

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
            except NO_ROOM:
                root.capture.lost()


class RootEnds(NumberedHook):
    """The forward hook of a root (a model under hooks). It is registered last and called even if the forward raises."""

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
            except NO_ROOM:
                root.capture.lost()


_NO_HANDLE = "recorder"
"""The key of a hook without a handle in a tensor's dict of hooks. Hooks with a handle have numbers as keys."""


class GradientArrives:
    """The hook on a tensor that records the gradient of an observed value. It fires in each backward of the value."""

    __slots__ = ("_call", "_is_once", "_keep", "_moment", "_origin", "_repeat", "_scope", "capture", "chunk", "handle")

    def __init__(
        self, capture: CaptureForHooks, origin: ValuePlace, moment: StepPosition, call: int, keep: int,
        scope: str | None = None, repeat: int = 0,
    ) -> None:  # fmt: skip
        self.capture = capture
        self._origin = origin
        self._moment = moment
        self._call = call
        self._keep = keep
        self._scope = scope
        self._repeat = repeat
        # A zero-bubble schedule runs the backward twice, for the inputs and then for the weights. The second backward
        # passes the same gradient again, or a wrong gradient (a sum), which torch corrects only after this hook.
        self._is_once = capture.is_in_stage
        self.chunk: Chunk | None = None
        """The chunk of the gradient, if the gradient is a plain tensor and its chunk is known. Otherwise None."""
        self.handle: Any = None
        """The handle of this hook on a leaf. A leaf outlives the step, so the hook then fires only once."""

    def learn(self, chunk: Chunk | None) -> None:
        self.chunk = chunk

    @leave_uncompiled
    def __call__(self, gradient: torch.Tensor | None) -> None:
        try:
            if _is_compiling() or gradient is None:  # DDP passes None for an output that the loss does not use
                return
            capture = self.capture
            if not capture.is_open or (self._is_once and self._repeat):
                return
            # A parameter that a module of a stage passes on gets the gradients of all micro-batches under way.
            back = capture.clock.going_back if self._is_once and self.handle is not None else None
            if back is not None and back.moment != self._moment:
                return
            repeat, scope = self._repeat, self._scope
            seen = SeenValue(self._origin, self._moment, "backward", self._call, repeat, scope, self.chunk)
            capture.observe(seen, self._keep, gradient)
            self._repeat += 1
            if self.handle is not None:
                self.handle.remove()
        except Exception as error:
            try:
                self.capture.site_failed(self._origin, error)
            except NO_ROOM:
                self.capture.lost()


class GradientSeen:
    """The hook on a model's output. It notes that the micro-step of the model's call has had a backward."""

    __slots__ = ("_clock", "_slice")

    def __init__(self, clock: RootClock, slice_: Slice) -> None:
        self._clock = clock
        self._slice = slice_

    def __call__(self, gradient: torch.Tensor) -> None:
        if not _is_compiling():
            self._clock.gradient_arrived(self._slice)


def watch_gradient(tensor: torch.Tensor, hook: GradientArrives) -> None:
    """Register `hook`, which records each gradient that arrives at a tensor."""
    node = tensor.grad_fn if type(tensor) is torch.Tensor else None
    if node is not None and type(node).__name__ == WRAPPED and (made := wrapped(tensor, node)) is not None:
        if isinstance(made, torch.Tensor):
            tensor, node = made, None
        else:
            node, number = made
            node.register_prehook(lambda gradients: hook(gradients[number]))
            return
    if node is not None and tensor._backward_hooks is None:
        # This is what `register_hook` does, without the handle, whose creation takes four fifths of the call's 2.6 us.
        tensor._backward_hooks = registered = OrderedDict()
        node._register_hook_dict(tensor)
        registered[_NO_HANDLE] = hook
        return
    # A subclass may override `register_hook` to count calls or to refuse this call.
    with torch._C.DisableTorchFunctionSubclass():
        handle = tensor.register_hook(hook)
        is_leaf = tensor.is_leaf
    if is_leaf:
        hook.handle = handle
        hook.capture.keep_leaf_hook(handle)


def watch_argument_gradient(tensor: torch.Tensor, hook: GradientArrives) -> None:
    """Register a hook that records the gradient of a DTensor argument.

    If the DTensor was made for one module, the gradient of the tensor from which it was made is recorded instead.
    """
    source = made_of(tensor)
    if source is None:
        watch_gradient(tensor, hook)
        return
    node, number, hook.chunk = source
    node.register_prehook(lambda gradients: hook(gradients[number]))
