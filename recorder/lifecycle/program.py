"""Takes the values that a training program gives the recorder: scalars, taps, steps, and values of taps in graphs.

A tap is a point in a model whose value is recorded. The callers are training threads and threads that run a graph.
Nothing here may raise into training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..capture.hooks.root import Root
from ..capture.token_blocks import SAID_TOKENS
from ..sites import MAX_COUNT
from ..system.processes import comes_from_signal_handler
from ..system.text import one_line
from ..taps import module_taps
from ..taps.graphs import is_traced
from .model_search import is_data_worker
from .recorder import Recorder

_EARLY_EVENT = "before_first_call"
_MAX_SHOWN = 100
"""The most characters of a name in a message."""


class ProgramCalls:
    """Passes the program's calls, such as `recorder.tap`, to the recording. Before it begins they are only counted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def tap(self, name: str, tensor: Any) -> None:
        """Record a tensor for `recorder.tap`, under the module whose forward is running."""
        if torch.compiler.is_compiling() or not isinstance(tensor, torch.Tensor):
            return
        try:
            if (capture := self._recorder.capture) is None:
                self._came_early("tap", name)
            else:
                capture.tap_rows.record_by_hand(name, tensor, self._calling_module())
        except Exception as error:
            self._failed(f"tap {_shown(name)}", error)

    def _calling_module(self) -> nn.Module | None:
        """Return the innermost recorded module on the call stack, so that taps need no bookkeeping in hooks."""
        frame = sys._getframe(3)
        capture = self._recorder.capture
        while frame is not None and capture is not None:
            code = frame.f_code
            if code.co_argcount and code.co_varnames[0] == "self":
                candidate = frame.f_locals.get("self")
                if isinstance(candidate, nn.Module) and capture.roots.root_of(candidate) is not None:
                    return candidate
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def scalar(self, name: str, value: Any) -> None:
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
        """Count a value that the program gives before the recording starts, if a rule asks for the value."""
        recorder = self._recorder
        rules = recorder.settings.rules
        is_asked = any(site in one.site and one.matches_name(str(name)) for one in rules)
        if not is_asked or recorder.is_over or is_data_worker():
            return
        what = f"{site} {_shown(name)}"
        text = f"{what} was given before the model's first call, at which a recording begins, and is not recorded"
        recorder.events.add(_EARLY_EVENT, f"{text}; recorder.attach(model) begins the recording earlier", key=what)

    def _failed(self, what: str, error: Exception) -> None:
        if (capture := self._recorder.capture) is not None:
            capture.hook_failed(what, error)
            return
        if comes_from_signal_handler(error):
            raise error
        self._recorder.events.add("hook_error", f"{what} failed: {type(error).__name__}: {one_line(error)}", key=what)

    @contextmanager
    def tokens(self, sample_ids: Any, positions: Any, texts: Any) -> Iterator[None]:
        """Set the samples, positions and texts of tokens in calls inside the ``with`` block, for `recorder.tokens`."""
        before = SAID_TOKENS.names, SAID_TOKENS.positions, SAID_TOKENS.texts
        try:
            ids = sample_ids.tolist() if isinstance(sample_ids, torch.Tensor) else sample_ids
            names = None if ids is None else [str(one) for one in ids]
            said = None if positions is None else torch.as_tensor(positions, dtype=torch.int64)
            words = None if texts is None else [[str(text) for text in row] for row in texts]
            SAID_TOKENS.names, SAID_TOKENS.positions, SAID_TOKENS.texts = names, said, words
        except Exception as error:
            self._failed("tokens", error)
        try:
            yield
        finally:
            SAID_TOKENS.names, SAID_TOKENS.positions, SAID_TOKENS.texts = before

    def name_step(self, number: int) -> None:
        """Set the current step, for `recorder.step`. Before the recording begins, set the step it will begin with."""
        try:
            step = int(number)
            if abs(step) >= MAX_COUNT:
                raise OverflowError("the number is too large for a step")
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            text = f"recorder.step was given {_shown(number)}, and the step is unchanged: {one_line(error)[:200]}"
            self._recorder.events.add("hook_error", text, key="step")
            return
        if (capture := self._recorder.capture) is None:
            self._recorder.first_step = step
            return
        if step < capture.clock.step:
            text = (
                f"recorder.step was given {step} after step {capture.clock.step}: values of a repeated step have the "
                "keys of the earlier values, so readers cannot tell them apart; give numbers that only grow"
            )
            self._recorder.events.add("step_went_back", text, key="step")
        capture.clock.name(step)
        capture.step_changed()


def _shown(name: object) -> str:
    """Return a value from the program as text for a message: short, and safe even if its class fails to print it."""
    text = one_line(name)
    return f"'{text[:_MAX_SHOWN]}{'...' * (len(text) > _MAX_SHOWN)}'"


class GraphTaps:
    """Passes values and gradients of taps in graphs to the recording, and finds or makes the model of each tap."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stand_ins: list[nn.Module] = []
        """Empty modules that stand in for recorded models whose calls no hook sees."""

    def tapped(self, value: torch.Tensor, name: str, where: str, number: int, with_grad: bool) -> None:
        if self._recorder.is_over or is_traced():
            return
        try:
            root = self._recorder.capture.tap_rows.root_of(where) if self._recorder.capture is not None else None
            root = root or self._root_without_module(where)
            if root is not None and self._recorder.capture is not None:
                self._recorder.capture.tap_rows.saw(value, (name, where, number), root, with_grad=with_grad)
        except Exception as error:
            self._tap_failed(name, error)

    def tapped_gradient(
        self, gradient: torch.Tensor, name: str, where: str, number: int, *, is_total: bool = False
    ) -> None:
        if self._recorder.is_over or self._recorder.capture is None:
            return
        try:
            self._recorder.capture.tap_rows.saw_gradient(gradient, (name, where, number), is_total=is_total)
        except Exception as error:
            self._tap_failed(name, error)

    def has_no_hook(self, where: str) -> bool:
        """Return True if the module of the tap `where` has no hooks. Then the tap records even eager calls."""
        if self._recorder.is_over or self._recorder.capture is None:
            return False
        try:
            return self._recorder.capture.tap_rows.has_no_hook(where)
        except Exception as error:
            self._tap_failed("", error)
            return False

    def _tap_failed(self, name: str, error: Exception) -> None:
        if self._recorder.capture is None:
            self._recorder.discovery_failed(error)
        else:
            self._recorder.capture.hook_failed(f"tap {name!r}", error)

    def _root_without_module(self, where: str) -> Root | None:
        """Make a root (a recorded model) for a tap in a loaded artefact, or in a model whose call no hook sees."""
        if is_data_worker():
            return None
        model = module_taps.model_of(where)
        if model is not None and self._recorder.by_flag:  # without ``RECORDER=1``, only `attach` chooses models
            return self._recorder.add_root(model, None) if self._recorder.wants(model) else None
        stand_in, capture = nn.Module(), self._recorder.capture
        used = {root.name for root in capture.roots + capture.roots.past} if capture is not None else set()
        name = module_taps.Where.from_text(where).root if where else None
        root = self._recorder.add_root(stand_in, None if name in used else name)
        self._stand_ins.append(stand_in)
        root.stands_for(where)
        return root
