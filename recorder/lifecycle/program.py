"""What a training program calls of the recorder: scalars, taps and steps, also before the recording begins.

Training threads call it. Nothing here may raise into training.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import nn

from ..capture.core import Capture
from ..config import Settings
from ..sites import MAX_COUNT
from ..system.events import Events
from ..system.processes import comes_from_signal_handler
from ..system.text import one_line
from .graph_taps import is_data_worker

_EARLY_EVENT = "before_first_call"
_MAX_SHOWN = 100
"""Letters of a name in a message."""


class Recording(Protocol):
    """The part of the recorder that calls of a program need; it may not have started."""

    settings: Settings
    events: Events
    capture: Capture | None

    @property
    def is_over(self) -> bool: ...


class ProgramCalls:
    """The calls of a program: handed to the capture once there is one, and counted before."""

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self.first_step: int | None = None
        """The step that the program has named before there was a root."""

    def tap(self, name: str, tensor: Any) -> None:
        """Record a tensor for `recorder.tap`, under the module whose forward is running."""
        if torch.compiler.is_compiling() or not isinstance(tensor, torch.Tensor):
            return
        try:
            if (capture := self._recorder.capture) is None:
                self._came_early("tap", name)
            else:
                capture.taps_by_hand.record(name, tensor, self._calling_module())
        except Exception as error:
            self._failed(f"tap {_shown(name)}", error)

    def _calling_module(self) -> nn.Module | None:
        """Return the innermost module of a root on the call stack, so that taps need no bookkeeping in hooks."""
        frame = sys._getframe(3)
        capture = self._recorder.capture
        while frame is not None and capture is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self":
                candidate = frame.f_locals.get("self")
                if isinstance(candidate, nn.Module) and capture.root_of(candidate) is not None:
                    return candidate
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def scalar(self, name: str, value: Any) -> None:
        """Record a number for `recorder.scalar`."""
        if torch.compiler.is_compiling():
            return
        try:
            if (capture := self._recorder.capture) is None:
                self._came_early("scalar", name)
            else:
                capture.scalars.record(name, value)
        except Exception as error:
            self._failed(f"scalar {_shown(name)}", error)

    def _came_early(self, site: str, name: str) -> None:
        """Count what the program gives before the recording begins, if a rule asks for it."""
        recorder = self._recorder
        rules = recorder.settings.rules
        is_asked = any(site in one.site and one.matches_name(str(name)) for one in rules)
        if not is_asked or recorder.is_over or is_data_worker():
            return
        what = f"{site} {_shown(name)}"
        text = f"{what} was given before the model's first call, with which a recording begins: not recorded"
        recorder.events.add(_EARLY_EVENT, f"{text}; recorder.attach(model) begins it earlier", key=what)

    def _failed(self, what: str, error: Exception) -> None:
        """Count an exception of the recorder's own in a call of the program's; training goes on."""
        if (capture := self._recorder.capture) is not None:
            capture.hook_failed(what, error)
            return
        if comes_from_signal_handler(error):
            raise error
        self._recorder.events.add("hook_error", f"{what} failed: {type(error).__name__}: {one_line(error)}", key=what)

    def name_step(self, number: int) -> None:
        """Name the step for `recorder.step`: before the recording begins, the one that it begins with."""
        try:
            step = int(number)
            if abs(step) >= MAX_COUNT:
                raise OverflowError("no reader takes so large a step")
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            text = f"recorder.step was given {_shown(number)}, and the step stays as it is: {one_line(error)[:200]}"
            self._recorder.events.add("hook_error", text, key="step")
            return
        if (capture := self._recorder.capture) is None:
            self.first_step = step
            return
        if step < capture.clock.step:
            text = f"recorder.step was given {step} after step {capture.clock.step}"
            more = (
                "values of a step that is named again have keys that are there already, so nobody can tell them apart"
            )
            self._recorder.events.add("step_went_back", f"{text}: {more}; give numbers that only grow", key="step")
        capture.clock.name(step)
        capture.step_changed()


def _shown(name: object) -> str:
    """Return what the program gave as a message may have it: short, and also where its class cannot show it."""
    text = one_line(name)
    return f"'{text[:_MAX_SHOWN]}{'...' * (len(text) > _MAX_SHOWN)}'"
