"""Clocks that give a value its time: the step, and in the step the slice (one forward of a root and its backward).

`step` counts the attempted steps of one optimizer. It advances at the first forward with gradients after such a step. A
slice ends when a gradient has arrived at an output and the root is called again. Nothing here may touch a device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from itertools import count

import torch

from ..records import StepPosition


class Slice:
    """A slice of a step: one forward of a root and its backward, or several forwards before one backward.

    `moment.micro_step` is the index of the slice in its step. A slice counts the calls of modules and taps, so that
    rows have unique keys. The counts are kept here and not with the hooks, because a program switches between the
    slices of a step, as from training to `no_grad` and back. In the methods, `key` names one module or one tap.
    """

    __slots__ = ("_first_calls", "_graphless", "_more_calls", "has_gradient", "moment", "used")

    def __init__(self, moment: StepPosition) -> None:
        self.moment = moment
        self.has_gradient = False
        self.used: set[int] = set()
        """The ids of the parameters that the forward has used, and whose local gradients have not arrived yet."""
        self._first_calls: dict[str, dict[Hashable, object]] = {"forward": {}, "recompute": {}}
        """By phase, the keys of modules and taps called so far; the garbage collector need not search the values."""
        self._more_calls: defaultdict[tuple[str, Hashable], count[int]] = defaultdict(lambda: count(1))
        """The counters of the calls after the first one, by phase and key. Two threads never get the same number."""
        self._graphless: dict[Hashable, dict[int, int]] = {}
        """The forward calls that made no graph, by key, with the number of recomputes that made the graph later."""

    def enter(self, phase: str, key: Hashable) -> int:
        """Count a call that begins, and return its index."""
        mine = object()
        is_first = self._first_calls[phase].setdefault(key, mine) is mine
        return 0 if is_first else next(self._more_calls[phase, key])

    def new_graph(self, phase: str, key: Hashable, call: int, *, with_grad: bool) -> tuple[int, int] | None:
        """Return the call and repeat indexes for the gradients of a call's new graph; None if a call makes no graph.

        A forward under `no_grad`, as in a reentrant checkpoint, makes no graph. Its recompute makes the graph, whose
        gradients get the indexes of the forward. The recompute of a non-reentrant checkpoint has the inputs of the
        forward, whose gradients are recorded already.
        """
        if phase == "forward":
            if with_grad:
                return call, 0
            if self.moment.mode != "no_grad":
                self._graphless.setdefault(key, {})[call] = 0
            return None
        recomputed = self._graphless.get(key)
        if not with_grad or not recomputed or _is_for_saved_tensors():
            return None
        call = min(recomputed, key=recomputed.__getitem__)
        repeat = recomputed[call]
        recomputed[call] += 1
        return call, repeat


class Clock:
    """The current step. The training thread writes it, and any thread reads it."""

    __slots__ = ("_has_stepped", "going_back", "has_moved", "is_by_hand", "num_optimizer_steps", "source", "step")

    def __init__(self) -> None:
        self.step = 0
        self.source = "counted"
        self.is_by_hand = False
        self.has_moved = False
        """Whether a step of the optimizer has ever advanced `step`."""
        self.num_optimizer_steps = 0
        self._has_stepped = False
        self.going_back: Slice | None = None
        """The slice (a forward and its backward) whose backward began last; a pipeline may have begun newer slices."""

    def optimizer_stepped(self) -> None:
        """Note that the optimizer whose steps count has attempted a step."""
        self._has_stepped = True
        self.num_optimizer_steps += 1

    def advance_if_stepped(self) -> bool:
        """Begin the next step if the optimizer has stepped since this step began; return whether a step began."""
        if not self._has_stepped or self.is_by_hand:
            return False
        self._has_stepped = False
        self.has_moved = True
        self.step += 1
        return True

    def name(self, step: int) -> None:
        """Set the step that the user names. From now on only the user changes the step."""
        self.is_by_hand = True
        self.source = "user"
        self.step = step


class _ThreadCall(threading.local):
    """The slice (a forward and its backward) under way in one thread; training and evaluation may run at once."""

    active: Slice | None = None


class RootClock:
    """The slices (forwards with their backwards) of one root: the newest slice of each mode."""

    __slots__ = (
        *("_clock", "_latest", "_modes_of_gradients", "_num_optimizer_steps", "_of_thread", "_slices"),
        "_trained_modes",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices: dict[str, Slice] = {}
        self._modes_of_gradients: set[str] = set()
        """The modes, such as ``train``, of forwards that got a gradient since the optimizer was last seen to step."""
        self._trained_modes: set[str] = set()
        """The modes, such as ``train``, of forwards whose gradients the optimizer's last step could use."""
        self._num_optimizer_steps = clock.num_optimizer_steps
        """The number of steps that the optimizer had made when the root was last called."""
        self._latest: Slice | None = None
        self._of_thread = _ThreadCall()

    @property
    def active(self) -> Slice | None:
        """Return the slice (a forward and its backward) that this thread's call of the root is in, or None."""
        return self._of_thread.active

    def begin(
        self,
        *,
        with_grad: bool,
        training: bool,
        every_call_is_a_step: bool,
        is_first_call: bool,
        is_stage: bool = False,
    ) -> None:
        """Begin a call of the root, and perhaps the next step.

        `training` is the training flag of the root's module, inside any wrapper. `is_stage` is True for a call of a
        pipeline stage, where each micro-batch is a slice (a forward and its backward).
        """
        if every_call_is_a_step and not is_first_call and not self._clock.is_by_hand:
            self._clock.step += 1
        mode = _mode(with_grad, training)
        if self._num_optimizer_steps != self._clock.num_optimizer_steps:
            self._num_optimizer_steps = self._clock.num_optimizer_steps
            self._trained_modes, self._modes_of_gradients = self._modes_of_gradients or self._trained_modes, set()
        # A forward in evaluation mode with gradients is mostly a validation, which belongs to the previous step. But a
        # model may be trained in evaluation mode, always or for some steps.
        is_trained = mode == "train" or "train" not in self._trained_modes
        if with_grad and not every_call_is_a_step and is_trained:
            self._clock.advance_if_stepped()
        current = self._slices.get(mode)
        if current is None or current.moment.step != self._clock.step:
            first, latest = StepPosition(self._clock.step, 0, mode), self._latest
            # A recompute may have come before any forward, for example where a pipeline tries a stage: continue the
            # recompute's slice.
            current = latest if latest is not None and latest.moment == first else Slice(first)
        elif is_stage or (current.has_gradient and mode != "no_grad"):
            current = Slice(StepPosition(self._clock.step, (current.moment.micro_step or 0) + 1, mode))
        self._slices[mode] = self._of_thread.active = current
        if with_grad:
            self._latest = current

    def begin_trial(self) -> None:
        """Begin a call of the root that is no part of training; the records of the call have no micro-step."""
        self._of_thread.active = Slice(StepPosition(self._clock.step, None, "train"))

    def gradient_arrived(self, slice_: Slice) -> None:
        """Note that a gradient has reached an output of the root."""
        slice_.has_gradient = True
        self._clock.going_back = slice_
        self._modes_of_gradients.add(slice_.moment.mode)

    def end(self) -> None:
        self._of_thread.active = None

    def current(self, *, with_grad: bool, training: bool) -> Slice:
        """Return the slice (forward and backward) of the root's running call, or else the latest slice of this mode."""
        active = self._of_thread.active
        if active is not None:
            return active
        mode = _mode(with_grad, training)
        current = self._slices.get(mode)
        if current is None or current.moment.step != self._clock.step:
            current = self._slices[mode] = Slice(StepPosition(self._clock.step, 0, mode))
        if with_grad:
            self._latest = current
        return current

    def recomputed(self, *, in_pipeline: bool = False) -> Slice:
        """Return a recompute's slice (forward and backward): in pipelines `Clock.going_back`, else the latest slice."""
        if in_pipeline and self._clock.going_back is not None:
            return self._clock.going_back
        if self._latest is None:
            self._latest = Slice(StepPosition(self._clock.step, 0, "train"))
        return self._latest


def _is_for_saved_tensors() -> bool:
    """Whether a non-reentrant checkpoint recomputes values that the forward's own graph saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _mode(with_grad: bool, training: bool) -> str:
    if not with_grad:
        return "no_grad"
    return "train" if training else "eval"
