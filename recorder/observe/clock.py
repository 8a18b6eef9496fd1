"""Clocks that give each value a step, and within the step a slice: one forward of a model and its backward.

`step` counts the attempted steps of one optimizer. It advances at the first forward with gradients after such a step. A
slice ends when the model is called again after a gradient has arrived at an output. Nothing here may touch a device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

import torch

from ..records import StepPosition

_MANY_NUMBERS = 5
"""So many different numbers of calls before a backward vary as the lengths of episodes do, and not by a short group."""


class Slice:
    """A slice of a step: a forward of a root (a recorded model) and its backward, or several forwards before one.

    `moment.micro_step` is the index of the slice in its step. A slice counts the calls of modules and of taps (tensors
    that the program names), so that each row has a unique key. The counts are not kept with the hooks, because a
    program switches between slices of a step, as from training to `no_grad` and back. `key` is a module or tap.
    """

    __slots__ = ("_graphless", "_more_calls", "_recomputed", "called", "has_gradient", "moment", "num_calls", "used")

    def __init__(self, moment: StepPosition) -> None:
        self.moment = moment
        self.has_gradient = False
        self.num_calls = 0
        """The number of calls of the model."""
        self.used: set[int] = set()
        """Ids of parameters that the forward has used, for which no local gradient has arrived yet."""
        self.called: dict[Hashable, object] = {}
        """The modules and taps called so far. The values are of a type that the garbage collector skips."""
        self._recomputed: dict[Hashable, object] = {}
        """The modules and taps called so far in a recompute."""
        self._more_calls: defaultdict[tuple[str, Hashable], count[int]] = defaultdict(lambda: count(1))
        """The counters of calls after the first one, by phase and key. Two threads never get equal numbers."""
        self._graphless: dict[Hashable, dict[int, int]] = {}
        """By key, the forward calls that made no graph, and for each key how many recomputes have made a graph."""

    def enter(self, phase: str, key: Hashable) -> int:
        """Count a beginning call of a module or tap, and return its index."""
        mine = object()
        is_first = (self.called if phase == "forward" else self._recomputed).setdefault(key, mine) is mine
        return 0 if is_first else next(self._more_calls[phase, key])

    def new_graph(self, phase: str, key: Hashable, call: int, *, with_grad: bool) -> tuple[int, int] | None:
        """Return the call and repeat indexes of the gradients of a call. Return None if the call makes no new graph.

        A forward under `no_grad`, as in a reentrant checkpoint, makes no graph. Its recompute makes the graph, and the
        gradients get the index of the forward. A non-reentrant checkpoint's recompute has the inputs of the forward,
        and their gradients are recorded already.
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


@dataclass(slots=True, eq=False)
class Clock:
    """The current step. The training thread changes it, and any thread may read it."""

    step: int = 0
    source: str = "counted"
    is_by_hand: bool = False
    has_moved: bool = False
    """Whether an optimizer step has ever advanced `step`."""
    num_optimizer_steps: int = 0
    _num_by_hand: int = 0
    is_over: bool = False
    """Whether the optimizer has stepped since the step began."""
    going_back: Slice | None = None
    """The slice (a forward and its backward) whose backward began last. A pipeline may have begun newer slices."""

    def optimizer_stepped(self) -> None:
        """Note that the optimizer whose steps are counted has attempted a step."""
        self.is_over = True
        self.num_optimizer_steps += 1

    @property
    def num_updates(self) -> int:
        """The number of updates, by optimizers or by a program without one."""
        return self.num_optimizer_steps + self._num_by_hand

    def updated_by_hand(self) -> None:
        """Note that a program without an optimizer has changed the parameters."""
        self.is_over = True
        self._num_by_hand += 1

    def advance_if_stepped(self) -> bool:
        """Begin the next step if the optimizer has stepped since the last step. Return whether a step began."""
        if not self.is_over or self.is_by_hand:
            return False
        self.is_over = False
        self.has_moved = True
        self.step += 1
        return True

    def name(self, step: int) -> None:
        """Set the step to the user's number. After that, only the user changes it."""
        self.is_by_hand = True
        self.source = "user"
        self.step = step


class _ThreadCall(threading.local):
    """The current slice (a forward and its backward) of one thread. Threads may train and evaluate at the same time."""

    active: Slice | None = None


class RootClock:
    """The slices (a forward and its backward each) of one recorded model. The newest slice of each mode is kept."""

    __slots__ = (
        *("_clock", "_graphless_since", "_latest", "_modes_of_gradients", "_nums_of_calls"),
        *("_num_updates", "_slices", "_trained", "_trained_modes"),
        *("has_evaluated", "is_called_unevenly", "num_graphless", "num_updates_before", "of_thread"),
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices: dict[str, Slice] = {}
        self._modes_of_gradients: set[str] = set()
        """The modes, such as ``train``, of forwards that got a gradient since the optimizer's last known step."""
        self._trained_modes: set[str] = set()
        """The modes, such as ``train``, of forwards whose gradients the optimizer's last step may have used."""
        self._num_updates = clock.num_updates
        """The number of updates at the last call of the model."""
        self._latest: Slice | None = None
        self._trained: Slice | None = None
        """The latest slice in training."""
        self._nums_of_calls: set[int] = set()
        """The numbers of calls of the model in the slices in training."""
        self.is_called_unevenly = False
        """Whether these numbers are far apart, as those of the steps of episodes."""
        self.has_evaluated = False
        """Whether the model was ever called in evaluation mode."""
        self.num_graphless = 0
        """How many calls in training mode without gradients there were in a row, without an update in between."""
        self.num_updates_before = 0
        """How many updates there were between the first of these calls and the last such call before it."""
        self._graphless_since = 0
        """The number of updates at the last call in training mode without gradients."""
        self.of_thread = _ThreadCall()
        """`active` is the slice (a forward and its backward) of this thread's running call of the model, or None."""

    @property
    def num_slices(self) -> int:
        """The number of slices (a forward and its backward each) in the newest step that has one."""
        return 0 if self._latest is None else (self._latest.moment.micro_step or 0) + 1

    @property
    def is_trained(self) -> bool:
        """Whether the model's last forward with gradients is of the current step, or none was seen (as in a graph)."""
        return self._latest is None or self._latest.moment.step >= self._clock.step or self.is_trained_evaluating

    @property
    def is_trained_evaluating(self) -> bool:
        """Whether a forward in evaluation mode got a gradient since the optimizer's last step: it was no validation."""
        return self._num_updates == self._clock.num_updates and "eval" in self._modes_of_gradients

    def begin(
        self,
        *,
        with_grad: bool,
        training: bool,
        every_call_is_a_step: bool,
        is_first_call: bool,
        is_stage: bool = False,
    ) -> None:
        """Begin a call of the root (the recorded model), and perhaps the next step.

        `training` is the training flag of the module inside all wrappers. `is_stage` is True for a pipeline stage,
        where each micro-batch is a slice (a forward and its backward).
        """
        if every_call_is_a_step and not is_first_call and not self._clock.is_by_hand:
            self._clock.step += 1
        mode = _mode(with_grad, training)
        self._count_graphless(with_grad=with_grad, training=training)
        if self._num_updates != self._clock.num_updates:
            self._num_updates = self._clock.num_updates
            self._trained_modes, self._modes_of_gradients = self._modes_of_gradients or self._trained_modes, set()
        # A forward in evaluation mode with gradients is mostly a validation, which belongs to the previous step. But
        # some models are trained in evaluation mode, always or for some steps.
        is_trained = mode == "train" or "train" not in self._trained_modes
        if with_grad and not every_call_is_a_step and is_trained:
            self._clock.advance_if_stepped()
        current = self._slices.get(mode)
        if current is None or current.moment.step != self._clock.step:
            first, latest = StepPosition(self._clock.step, 0, mode), self._latest
            # A recompute may have come before any forward, for example where a pipeline tries a stage. Continue its
            # slice.
            current = latest if latest is not None and latest.moment == first else Slice(first)
        elif is_stage or (current.has_gradient and mode != "no_grad"):
            current = Slice(StepPosition(self._clock.step, (current.moment.micro_step or 0) + 1, mode))
        if mode == "train":
            if current is not self._trained:
                self._look_at_calls(self._trained)
                self._trained = current
            current.num_calls += 1
        self._slices[mode] = self.of_thread.active = current
        if with_grad:
            self._latest = current

    def _look_at_calls(self, over: Slice | None) -> None:
        if over is not None and over.has_gradient and not self.is_called_unevenly:
            self._nums_of_calls.add(over.num_calls)
            most = max(self._nums_of_calls)
            self.is_called_unevenly = len(self._nums_of_calls) >= _MANY_NUMBERS and most >= 2 * min(self._nums_of_calls)

    def _count_graphless(self, *, with_grad: bool, training: bool) -> None:
        if with_grad or not training:
            self.has_evaluated |= not training
            self.num_graphless = 0
            return
        num_updates = self._clock.num_updates - self._graphless_since
        if num_updates or not self.num_graphless:
            self.num_graphless, self.num_updates_before = 0, num_updates
        self._graphless_since += num_updates
        self.num_graphless += 1

    def begin_trial(self) -> None:
        """Begin a call of the model outside of training. Records of the call have no micro-step."""
        self.of_thread.active = Slice(StepPosition(self._clock.step, None, "train"))

    def gradient_arrived(self, slice_: Slice) -> None:
        """Note that a gradient has reached an output of the model."""
        slice_.has_gradient = True
        self._clock.going_back = slice_
        self._modes_of_gradients.add(slice_.moment.mode)

    def end(self) -> None:
        self.of_thread.active = None

    def current(self, *, with_grad: bool, training: bool) -> Slice:
        """Return the slice (forward and backward) of the model's running call, or else the latest one of this mode."""
        active = self.of_thread.active
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
        """Return the slice (forward and backward) of a recompute: `Clock.going_back` in pipelines, else the latest."""
        if in_pipeline and self._clock.going_back is not None:
            return self._clock.going_back
        if self._latest is None:
            self._latest = Slice(StepPosition(self._clock.step, 0, "train"))
        return self._latest


def _is_for_saved_tensors() -> bool:
    """Whether a non-reentrant checkpoint is recomputing the values that the graph of its forward needs."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _mode(with_grad: bool, training: bool) -> str:
    if not with_grad:
        return "no_grad"
    return "train" if training else "eval"
