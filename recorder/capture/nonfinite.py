"""Owns the first value of a recording that is not finite: one warning when it happens, and the last words' word on it.

Looks at statistics that are there anyway, on the writer thread. Nothing here may touch a tensor or raise.

Said of are NaN in what a root is given, in outputs, gradients, parameters, optimizer state and scalars, and infinities
where no program means them: in gradients, and in a scalar that is called a loss. Inputs and buffers may hold masks, and
an output may be one. What modules inside a root are given came from an output, or from the program between two modules.
Gradients of a step that `GradScaler` skips are how it finds its scale: so what is to be said of a gradient waits until
the step is over, and so does what comes after it in the step.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from typing import NamedTuple

from .. import voice
from ..records import LOSS_NAME, Measured, Staged
from .clock import Clock

_logger = logging.getLogger("recorder")
_GRADIENTS = ("grad_output", "grad_input", "grad")
_UPDATED = ("param", "optim")
_SITES = ("output", "scalar", "param", "optim", *_GRADIENTS)
_SKIPPED = "skipped"
_MAX_STEPS = 64
"""Steps that are remembered: of a finding the next one is waited for, and the writer may be behind by some."""


class Found(NamedTuple):
    """A value with elements that are not finite."""

    step: int
    where: str
    """Its module and site, as in ``'blocks.0' output``."""
    what: str
    """How many of its elements are what."""


class FirstNonFinite:
    """What is not finite first on this rank. Its methods are called by the writer thread, but for those that say so."""

    def __init__(self, *, rank: int, clock: Clock) -> None:
        self.first: Found | None = None
        """What was said, or is about to be."""
        self._rank = rank
        self._clock = clock
        self._is_said = False
        self._waiting: Found | None = None
        """A gradient of a step that may yet be skipped."""
        self._next: Found | None = None
        """What came after that gradient in its step, and is no gradient: the first value, if the step is skipped."""
        self._loss = ""
        """The name of a loss of that step which came after the gradient and is not finite."""
        self._skipped: deque[int] = deque(maxlen=_MAX_STEPS)
        self._taken: deque[int] = deque(maxlen=_MAX_STEPS)
        """Steps that were not skipped, where that is known from rows alone."""
        self.is_told_by_rows = False
        """An optimizer finds out on its device whether a step is skipped. Set by the training thread."""

    def skipped(self, step: int) -> None:
        """`GradScaler` has left the optimizer alone at a step. Training thread."""
        self._skipped.append(step)

    def saw(self, staged: Staged, measured: Measured) -> None:
        """A record was measured."""
        origin, step = staged.origin, staged.moment.step
        if self._waiting is not None and step > self._waiting.step:
            self._decide(self._waiting)
        is_told_of = origin.site in _SITES or (origin.site == "input" and not origin.module_path)
        if self.first is not None or not is_told_of or staged.phase == "recompute":
            return
        if origin.site == "scalar" and origin.name == _SKIPPED:
            (self._skipped if measured.mean else self._taken).append(step)
            return
        num_nan, num_inf = measured.nan_count or 0, measured.inf_count or 0
        if not num_nan and not num_inf:
            return
        is_gradient = origin.site in _GRADIENTS
        is_loss = origin.site == "scalar" and LOSS_NAME.fullmatch(origin.name) is not None
        if not num_nan and not is_gradient and not is_loss:
            return
        found = Found(step, _where(staged), _counts(num_nan, num_inf, math.prod(staged.shape)))
        if self._waiting is None and not is_gradient:
            self.first = found
        elif self._waiting is None:
            self._waiting = found
        elif not is_gradient:
            self._next = self._next or found
            self._loss = self._loss or (_where(staged) if is_loss else "")
            if origin.site in _UPDATED:  # so the step was not skipped
                self._taken.append(step)

    def _decide(self, waiting: Found) -> None:
        """The step of a gradient is over."""
        is_taken = waiting.step in self._taken or not (self.is_told_by_rows or waiting.step in self._skipped)
        if is_taken and self._loss:
            waiting = waiting._replace(what=f"{waiting.what}; {self._loss} of this step is not finite, either")
        self.first = waiting if is_taken else self._next
        self._waiting, self._next, self._loss = None, None, ""

    def look(self, command: str | None, *, is_last: bool = False) -> None:
        """Say what is to be said and can be now.

        Args:
            command: what to type to learn more; None where there is no run.
            is_last: no step follows, and the writer thread is over.
        """
        waiting = self._waiting
        if waiting is not None and (is_last or (not self.is_told_by_rows and self._clock.step > waiting.step)):
            self._decide(waiting)
        if self.first is None or self._is_said or not voice.can_say(_logger):
            return
        self._is_said = True
        with contextlib.suppress(Exception):  # a handler of the program may fail
            voice.log(
                _logger,
                logging.WARNING,
                "recorder: rank %d: the first value that is not finite: step %d, %s (%s)%s",
                self._rank,
                *self.first,
                f"; {command} tells where it comes from" if command else "",
            )


def _where(staged: Staged) -> str:
    origin = staged.origin
    name = origin.name if origin.name.isprintable() else repr(origin.name)  # keys of somebody's samples
    if origin.site == "scalar":
        return f"scalar {name}"
    return " ".join(filter(None, (repr(origin.module_path), origin.site, name)))


def _counts(num_nan: int, num_inf: int, numel: int) -> str:
    counts = [f"{count:,} {word}" for count, word in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    return f"{' and '.join(counts)} of {numel:,} element{'s' * (numel != 1)}"
