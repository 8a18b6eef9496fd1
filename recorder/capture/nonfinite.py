"""Finds the first NaN or infinite value of a recording, logs one warning, and keeps the value for the final summary.

Only statistics that are computed anyway are read, on the writer thread. Nothing here may touch a tensor or raise.

NaN is reported in inputs of a root, in outputs, gradients, parameters, optimizer state and scalars. Infinities are
reported only where no program puts them on purpose (`sites.may_mask`): in gradients, in optimizer state, and in a
scalar that is called a loss. Inputs and buffers may contain masks, and outputs may be masks, so infinities there are no
fault by themselves. But if a step has a value to report, and a value before it is infinite for the first time, that one
is reported. Inputs of inner modules are not checked: each is the output of another module, which is checked, or was
made by the program's own code. `GradScaler` finds its scale by the non-finite gradients of steps that it skips. So the
warning about a gradient waits until the gradient's step is over. Warnings about later values of that step wait, too.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..observe.clock import Clock
from ..records import Measured, Staged
from ..sites import AT_LEAST, GRADIENTS, NUMBERS, UPDATE, UPDATED, is_loss, is_mask, may_mask, may_overflow, tells_skip
from ..system import log
from ..system.text import counted, value_in_words

_logger = logging.getLogger("recorder")
_SITES = ("output", *NUMBERS, *UPDATED, *GRADIENTS, UPDATE)
_MAX_STEPS = 64
"""The most steps that are remembered as skipped or as not skipped. The writer thread may lag behind training."""

_LAG_STEPS = 3
"""The number of steps that the warning waits, because the row of a value on a device may arrive some steps late."""


class NonFiniteValue(NamedTuple):
    """A value with elements that are NaN or infinite."""

    step: int
    where: str
    """The value's module and site, as in ``'blocks.0' output``."""
    counts: str
    """The text that says how many elements are NaN and how many are infinite."""
    module_path: str
    site: str


class FirstNonFinite:
    """Finds the first non-finite value of this rank. Methods that name no thread run on the writer thread."""

    def __init__(self, *, rank: int, clock: Clock) -> None:
        self.first: NonFiniteValue | None = None
        """The value to warn of. It is kept after the warning was logged."""
        self._rank = rank
        self._clock = clock
        self._is_scalar = False
        """Whether `first` is a scalar, such as the loss."""
        self._is_said = False
        self._waiting: NonFiniteValue | None = None
        """A non-finite gradient of a step that `GradScaler` may still skip."""
        self._next: NonFiniteValue | None = None
        """The first non-finite value after `_waiting` that is no gradient. Reported if the step is skipped."""
        self._infinite: dict[str, NonFiniteValue] = {}
        """The values that may be masks and are infinite in the last step that has any, in their order."""
        self._masks: set[str] = set()
        """The values that were infinite in the first step, or in an earlier step without a value to report."""
        self._first_step: int | None = None
        self._loss = ""
        """The name of a non-finite loss seen after the gradient `_waiting`, in the same step; empty without a loss."""
        self._skipped: deque[int] = deque(maxlen=_MAX_STEPS)
        self._taken: deque[int] = deque(maxlen=_MAX_STEPS)
        """The steps that the optimizer did not skip, as rows of these steps have shown."""
        self.has_models = False
        """Whether several models are recorded, so that a value is named with its model. Set by the training thread."""
        self.lags = False
        """True if rows of values on a device may come some steps late. Set by the training thread."""
        self.is_told_by_rows = False
        """True if an optimizer decides on its device whether to skip a step. Set by the training thread."""

    def skipped(self, step: int) -> None:
        """Note that `GradScaler` has skipped a step. Called on the training thread."""
        self._skipped.append(step)

    def saw(self, records: Sequence[Staged], measured: Sequence[Measured]) -> None:
        if self._first_step is None and records:
            self._first_step = records[0].moment.step
        for staged, its in zip(records, measured, strict=True):
            if its.nan_count or its.inf_count or self._waiting is not None or staged.origin.site == "scalar":
                self._saw(staged, its)

    def _saw(self, staged: Staged, measured: Measured) -> None:
        origin, step = staged.origin, staged.moment.step
        if self._waiting is not None and step > self._waiting.step:
            self._decide(self._waiting)
        is_told_of = origin.site in _SITES or (origin.site == "input" and not origin.module_path)
        is_late = staged.note is not None and AT_LEAST in staged.note
        if self.first is not None and is_late and self._is_scalar and step <= self.first.step and not self._is_said:
            self.first = None  # the scalar `first` was computed from this value
        if self.first is not None or not is_told_of or staged.phase == "recompute":
            return
        if tells_skip(origin.site, origin.name):
            (self._skipped if measured.mean else self._taken).append(step)
            return
        num_nan, num_inf = measured.nan_count or 0, measured.inf_count or 0
        if not num_nan and not num_inf:
            if self._waiting is not None and self._is_proof_of_a_skip(staged, self._waiting):
                self._skipped.append(step)
            return
        is_gradient = may_overflow(origin.site)
        counts = ("at least " if is_late else "") + _counts(num_nan, num_inf, math.prod(staged.shape))
        model = f"{origin.root}: " * self.has_models
        value = NonFiniteValue(step, model + _where(staged), counts, origin.module_path, origin.site)
        if is_mask(num_nan, num_inf, may_mask(origin.site, origin.name)):
            self._note_infinite(f"{origin.root} {value.where}", value)
        elif self._waiting is None and not is_gradient:
            self.first, self._is_scalar = self._cause_of(value), origin.site == "scalar"
        elif self._waiting is None:
            self._waiting = value
        elif not is_gradient:
            self._next = self._next or value
            self._loss = self._loss or (_where(staged) if is_loss(origin.site, origin.name) else "")
            if origin.site in UPDATED:  # an update shows that the step was not skipped
                self._taken.append(step)

    def _note_infinite(self, key: str, value: NonFiniteValue) -> None:
        """Keep a value that may be a mask. A value of an earlier step did no harm, since nothing was reported."""
        if any(one.step != value.step for one in self._infinite.values()):
            self._masks.update(self._infinite)
            self._infinite.clear()
        if value.step == self._first_step:
            self._masks.add(key)
        if key not in self._masks:
            self._infinite.setdefault(key, value)

    def _cause_of(self, value: NonFiniteValue | None) -> NonFiniteValue | None:
        """Return the first value of the same step that is infinite and no mask; else the value."""
        causes = (one for one in self._infinite.values() if value is not None and one.step == value.step)
        return next(causes, value)

    def _is_proof_of_a_skip(self, staged: Staged, waiting: NonFiniteValue) -> bool:
        """Whether a finite value shows that no update used the gradient `waiting` of an output of the same module."""
        is_final = staged.origin.site == "grad" and staged.scope == "final"
        return is_final and waiting.site != "grad" and staged.origin.module_path == waiting.module_path

    def _decide(self, waiting: NonFiniteValue) -> None:
        """Choose the value to warn of, once the step of a non-finite gradient is over."""
        is_taken = waiting.step in self._taken or not (self.is_told_by_rows or waiting.step in self._skipped)
        if is_taken and self._loss:
            waiting = waiting._replace(counts=f"{waiting.counts}; {self._loss} of this step is not finite, either")
        self.first = self._cause_of(waiting if is_taken else self._next)
        self._waiting, self._next, self._loss = None, None, ""

    def look(self, command: str | None, *, is_last: bool = False) -> None:
        """Log the warning if there is a value to warn of and the log can take a line.

        `command` is the shell command that shows where the value comes from, or None if there is no run. `is_last` is
        True if no step follows and the writer thread has ended.
        """
        waiting = self._waiting
        if waiting is not None and (is_last or (not self.is_told_by_rows and self._clock.step > waiting.step)):
            self._decide(waiting)
        if self.first is None or self._is_said or not log.can_say(_logger):
            return
        if self.lags and not is_last and self._clock.step <= self.first.step + _LAG_STEPS:
            return
        self._is_said = True
        log.say(
            _logger, logging.WARNING, "rank %d: the first value that is not finite: step %d, %s (%s)%s", self._rank,
            *self.first[:3], f"; {command} tells where it comes from" if command else "",
        )  # fmt: skip


def _where(staged: Staged) -> str:
    origin = staged.origin
    name = origin.name if origin.name.isprintable() else repr(origin.name)  # the name may be a key of a user's sample
    if origin.site == "scalar":
        return f"scalar {name}"
    return value_in_words(origin.module_path, origin.site, name)


def _counts(num_nan: int, num_inf: int, numel: int) -> str:
    counts = [f"{count:,} {word}" for count, word in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    return f"{' and '.join(counts)} of {counted(numel, 'element')}"
