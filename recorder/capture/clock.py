"""When a value was seen: the step, and within it the slice of a root's forward and backward.

`step` counts attempted steps of one optimizer and advances at the first forward with gradients after it; a slice ends
when a gradient has arrived at an output of it and the root is called again. Nothing here may touch a device.
"""

from __future__ import annotations

from ..records import Moment


class Slice:
    """One forward of a root (or several before a backward): what `micro_step` numbers."""

    __slots__ = ("has_gradient", "moment")

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.has_gradient = False


class Clock:
    """The step in hand. Written by the training thread, read by anyone."""

    __slots__ = ("_has_stepped", "is_by_hand", "source", "step")

    def __init__(self, step: int = 0, source: str = "counted") -> None:
        self.step = step
        self.source = source
        self.is_by_hand = False
        self._has_stepped = False

    def optimizer_stepped(self) -> None:
        """The optimizer that counts has attempted a step."""
        self._has_stepped = True

    def advance_if_stepped(self) -> bool:
        """A training forward begins: move to the next step if the optimizer has stepped since. True where it moved."""
        if not self._has_stepped or self.is_by_hand:
            return False
        self._has_stepped = False
        self.step += 1
        return True

    def name(self, step: int) -> None:
        """The user names the step; from now on only the user does."""
        self.is_by_hand = True
        self.source = "user"
        self.step = step


class RootClock:
    """The slices of one root, one for each mode."""

    __slots__ = ("_by_micro_batch", "_clock", "_latest", "_slices", "_trained_mode", "active")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slices: dict[str, Slice] = {}
        self._by_micro_batch: dict[int, Slice] = {}
        """Of a pipeline's stage, the latest of each micro-batch: its backward comes when others have begun."""
        self._trained_mode: str | None = None
        """The mode of the first forward that a gradient came back to; a look at shapes in eval mode is none."""
        self._latest: Slice | None = None
        self.active: Slice | None = None
        """The slice of the call of the root that is running, or None between calls."""

    def begin(
        self,
        *,
        with_grad: bool,
        training: bool,
        every_call_is_a_step: bool,
        is_first_call: bool,
        micro_batch: int | None = None,
    ) -> None:
        """A call of the root begins; the step may have moved with it.

        Args:
            with_grad: whether gradients are enabled.
            training: the root's training flag.
            every_call_is_a_step: there is no optimizer.
            is_first_call: of the root.
            micro_batch: its number, of a pipeline's stage: each is a slice.
        """
        if every_call_is_a_step and not is_first_call and not self._clock.is_by_hand:
            self._clock.step += 1
        mode = _mode(with_grad, training)
        if with_grad and not every_call_is_a_step and self._trained_mode in (None, mode):
            self._clock.advance_if_stepped()
        current = self._slices.get(mode)
        if current is None or current.moment.step != self._clock.step:
            current = Slice(Moment(self._clock.step, 0, mode))
        elif micro_batch is not None or (current.has_gradient and mode != "no_grad"):
            current = Slice(Moment(self._clock.step, (current.moment.micro_step or 0) + 1, mode))
        self._slices[mode] = self.active = current
        if with_grad:
            self._latest = current
            if micro_batch is not None:
                self._by_micro_batch[micro_batch] = current

    def begin_trial(self) -> None:
        """A call of the root begins that is no part of training: its slice is no other's."""
        self.active = Slice(Moment(self._clock.step, None, "train"))

    def gradient_arrived(self, slice_: Slice) -> None:
        """A gradient has come back to an output of the root."""
        slice_.has_gradient = True
        if self._trained_mode is None:
            self._trained_mode = slice_.moment.mode

    def end(self) -> None:
        """The call of the root has returned or raised."""
        self.active = None

    def current(self, *, with_grad: bool, training: bool) -> Slice:
        """The slice of a submodule's call: the running one, or the latest of its mode between calls of the root."""
        if self.active is not None:
            return self.active
        mode = _mode(with_grad, training)
        found = self._slices.get(mode)
        if found is None or found.moment.step != self._clock.step:
            found = self._slices[mode] = Slice(Moment(self._clock.step, 0, mode))
        return found

    def recomputed(self, micro_batch: int | None = None) -> Slice:
        """The slice that a recompute in a backward belongs to: the micro-batch's where that is known, or the latest."""
        if micro_batch is not None and micro_batch in self._by_micro_batch:
            return self._by_micro_batch[micro_batch]
        if self._latest is None:
            self._latest = Slice(Moment(self._clock.step, 0, "train"))
        return self._latest


def _mode(with_grad: bool, training: bool) -> str:
    if not with_grad:
        return "no_grad"
    return "train" if training else "eval"
