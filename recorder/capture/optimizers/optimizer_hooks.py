"""Records parameters, final gradients and learning rates before an optimizer step, and the optimizer's state after it.

The hooks on `torch.optim.Optimizer` see every optimizer of the process. Nothing here may read a value from a device,
change an argument except to wrap a closure, raise into training, or keep a parameter alive.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...records import StepPosition
from ...taps.graphs import leave_uncompiled
from ..core import Capture
from ..hooks.module import StateTime
from ..hooks.parameter_rows import OriginalParameter
from ..wrappers import Wrappers, wrap_closure
from .known_optimizers import KnownOptimizers, updating
from .probed_together import ProbedOptimizers, next_repeat
from .update_looks import IDLE_UPDATES, UpdateLooks, parameters_of
from .updated_parameters import UpdatedParameters

_FIRST_PARAMETERS = 16
"""The number of parameters of an optimizer that are looked at to find the model that the optimizer trains."""
HERE_ALONE = '{"of_one_rank":true}'
"""The note of optimizer state that only this rank has: ZeroRedundancyOptimizer divides the parameters among ranks."""
_is_compiling = torch.compiler.is_compiling


def _num_steps_under_way(optimizer: Optimizer) -> int:
    """Return how many calls of this optimizer's step are on the stack: 2 if a subclass calls ``super().step()``.

    The stack is read because a count of hooks would be wrong after a step that raised: no hook is called then.
    """
    count = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


class OptimizerHooks:
    """The hooks on all optimizers and on GradScaler, from a model's first call to the end of the recording."""

    def __init__(
        self, capture: Capture, *, on_step: Callable[[Optimizer], None], on_search: Callable[[Optimizer], None]
    ) -> None:
        """Install the hooks.

        `on_step` is called after each optimizer step. `on_search` is called when there may be another model to record:
        an optimizer is made, or steps without any gradient.
        """
        self._capture = capture
        self._on_step = on_step
        self._on_search = on_search
        self.known = KnownOptimizers(capture.settings.step_optimizer)
        self.looks = UpdateLooks(capture, self.known.hold)
        self._parameters = UpdatedParameters(capture, self.known)
        self._rows_of = self._parameters.rows_of
        self._together = ProbedOptimizers(capture)
        self._rates_wait = True
        """Whether the learning rates are recorded once the closure of the step under way has returned."""
        self._active: Callable[[], Optimizer | None] | None = None
        self._scaler_calls: list[dict[str, Any]] = []
        self._repeats: dict[str, dict[int, int]] = {"grad": {}, "optim": {}, "buffer": {}}
        """By site and parameter id, the last `repeat` (index among rows of one key) in this step. Buffers have id 0."""
        self._repeats_step = -1
        self._used_gradient: tuple[Callable[[], torch.Tensor | None], int] = (lambda: None), 0
        """A gradient that the last counted update has used, and its version. A backward makes or changes a gradient."""
        self.num_steps = 0
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self._wrappers = Wrappers()
        self._wrappers.put(GradScaler, "step", self._wrap_scaler)
        self._wrappers.put(Optimizer, "__init__", self._wrap_init)

    def all_have_roots(self) -> bool:
        """Whether every parameter of every live optimizer is in a root (a model under hooks)."""
        return all(self.has_root(optimizer) for optimizer in self.known.live())

    def has_root(self, optimizer: Optimizer) -> bool:
        """Whether every parameter of an optimizer is in a root (a model under hooks)."""
        return self._together.measured_whole == id(optimizer) or self._parameters.have_all(optimizer)

    def rescan(self) -> None:
        """Find the module of every parameter again, because there is a new root (a model under hooks)."""
        self._together.clear()
        self._parameters.rescan()
        self.known.has_noted_rates = False

    def _repeats_at(self, site: str) -> dict[int, int]:
        """Return, by parameter id, the last `repeat` (index among rows of the same key) at a site in this step.

        The repeats belong to parameters and not to optimizers, because optimizers may share parameters, get more
        parameters later, and be made and deleted within a step.
        """
        if self._repeats_step != self._capture.clock.step:
            self._repeats_step = self._capture.clock.step
            self.known.firsts.clear()
            for repeats in self._repeats.values():
                repeats.clear()
        return self._repeats[site]

    def _begins_update(self, optimizer: Optimizer) -> bool:
        """Whether this call begins an update. ZeRO steps group by group, so a call may continue an update."""
        self._repeats_at("grad")
        first = next(map(id, parameters_of(optimizer)), 0)
        return self.known.firsts.setdefault(id(optimizer), first) == first

    @leave_uncompiled
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the values that the update will use, or wrap the closure that computes them (the pre-step hook)."""
        if _is_compiling() or not self._capture.is_open:
            return None
        try:
            return self._begin(optimizer, args, kwargs)
        except Exception as error:
            self._capture.hook_failed(f"{type(optimizer).__name__}.step", error)
            return None

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        active = self._active() if self._active is not None else None
        if active is not None and _num_steps_under_way(active) > (active is optimizer):
            return None  # a nested step: an optimizer inside another optimizer, or a subclass that calls its base class
        self._active = weakref.ref(optimizer)
        for call in self._scaler_calls:
            call["stepped"] = True
        if not self._parameters.has_rescanned:
            self.known.name_of(optimizer)  # its tensors may be views into parameters, which the search looks for
            self._parameters.rescan_after_first_step()
        self.known.groups_of(optimizer)
        if not self.known.has_noted_rates:
            self.known.name_of(optimizer)  # which makes the optimizer known
            self._note_rates()
        capture = self._capture
        # A forward does not advance the step if it is not seen, because hooks are compiled away or the root takes none,
        # or if it looked like a validation.
        may_begin = capture.clock.is_over and self.known.counts(optimizer) and self._has_missed_forward(optimizer)
        if may_begin and capture.clock.advance_if_stepped():
            capture.step_changed()
        self.looks.before_update(optimizer, is_counting=self.known.counts(optimizer), live=self.known.live)
        wrapped = wrap_closure(args, kwargs, lambda: self.closure_returned(optimizer))
        self._file_losses(optimizer)
        self._rates_wait = wrapped is not None  # the forward in the closure begins the step
        if not self._rates_wait:
            self._record_rates(optimizer)
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
            capture.nonfinite.is_told_by_rows = True
            capture.scalars.record("skipped", found_inf)
        elif self._scaler_calls:
            capture.scalars.record("skipped", 0.0)
        if wrapped is None:
            capture.root_calls.depth = 0  # a step ends any forward that was interrupted
            self.record_before(optimizer)
        return wrapped

    def _has_missed_forward(self, optimizer: Optimizer) -> bool:
        """Whether the update that begins is of a forward that may not have been seen."""
        if not self._capture.has_seen_forward or any(root.clock.is_trained_evaluating for root in self._capture.roots):
            return True
        used, version = self._used_gradient
        new = self._begins_update(optimizer) and _first_gradient(optimizer)
        return isinstance(new, torch.Tensor) and (used() is not new or new._version != version)

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Record the gradients that a closure has computed, which the optimizer uses next."""
        try:
            self._active = self._active or weakref.ref(optimizer)  # None: the first root was made in this closure
            self._file_losses(optimizer)
            if self._rates_wait:
                self._rates_wait = False
                self._record_rates(optimizer)
            if not self.known.has_noted_rates:
                self._note_rates()
            self.record_before(optimizer)
        except Exception as error:
            self._capture.hook_failed("closure", error)

    def _file_losses(self, optimizer: Optimizer) -> None:
        """Record the losses that wait for an update, before the learning rates of the update."""
        if self._capture.scalars.has_new:
            firsts = itertools.islice(parameters_of(optimizer), _FIRST_PARAMETERS)
            names = (rows.root_name for one in firsts if (rows := self._rows_of(one)) is not None)
            if root_name := next(filter(None, names), None):
                self._capture.scalars.updates(root_name)

    @leave_uncompiled
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the optimizer's state, and count the step (the post-step hook)."""
        if _is_compiling() or not self._capture.is_open:
            return
        try:
            if self._active is None or self._active() is not optimizer or _num_steps_under_way(optimizer) > 1:
                return
            self._active = None
            self._together.end_update(optimizer)
            self._record_state(optimizer)
            self._count(optimizer)
        except Exception as error:
            self._capture.hook_failed(f"{type(optimizer).__name__}.step", error)

    def _count(self, optimizer: Optimizer) -> None:
        known = self.known
        name = known.name_of(optimizer)
        self.num_steps += 1
        self._parameters.may_learn = True
        if known.counts(optimizer) or known.takes_over(optimizer):
            known.waiting, known.counted = None, (name, known.counted[1] * (known.counted[0] == name) + 1)
            clock = self._capture.clock
            if clock.source == "counted":
                states = updating(optimizer).state.values()
                if any("step" in state for state in states if isinstance(state, dict)):
                    clock.source = "optimizer"
            clock.optimizer_stepped()
            if (used := _first_gradient(optimizer)) is not None:
                self._used_gradient = weakref.ref(used), used._version
        self.looks.after_update(optimizer)
        self._on_step(optimizer)
        if self.looks.num_idle(optimizer) == IDLE_UPDATES:
            self._on_search(optimizer)  # the program may train another model, without an optimizer, by mistake

    def record_before(self, optimizer: Optimizer) -> None:
        """Record the parameters and final gradients of one optimizer. Once a step, also record the buffers."""
        capture = self._capture
        self.looks.at_gradients(optimizer)
        self._together.measured_whole = 0
        at = StateTime(StepPosition(capture.clock.step, None, "train"), "optimizer", 0)
        repeats = self._repeats_at("grad")
        note = '{"grad":"scaled"}' if getattr(optimizer, "grad_scale", None) is not None else None
        keeps_param, keeps_grad = capture.selection.keeps("param"), capture.selection.keeps("grad")
        parameters = list(parameters_of(optimizer)) if keeps_param or keeps_grad else []
        if parameters and self.known.counts(optimizer) and all(self._rows_of(one) is None for one in parameters):
            parameters = self._parameters.copied() or parameters
        with self._together.known(optimizer, parameters, note, at.moment, repeats) as is_done:
            for parameter in () if is_done else parameters:
                rows = self._rows_of(parameter)
                if rows is None:
                    continue
                repeat = next_repeat(repeats, parameter)
                at = at if at.repeat == repeat else at._replace(repeat=repeat)  # nearly always the same
                if keeps_param:
                    rows.record("param", "", parameter, at)
                if keeps_grad and (gradient := rows.gradient(parameter)) is not None:
                    rows.record("grad", "", gradient, at, scope="final", note=note)
        if capture.selection.keeps("buffer") and self.known.counts(optimizer) and self._begins_update(optimizer):
            repeats = self._repeats_at("buffer")
            repeat = repeats[0] = repeats.get(0, -1) + 1
            for root in capture.roots:
                root.record_state(("buffer",), at._replace(repeat=repeat))

    def _record_state(self, optimizer: Optimizer) -> None:
        if not self._capture.selection.keeps("optim"):
            return
        at = StateTime(StepPosition(self._capture.clock.step, None, "train"), "optimizer", 0)
        repeats, updated = self._repeats_at("optim"), {id(parameter) for parameter in parameters_of(optimizer)}
        inside = updating(optimizer)
        note = None if inside is optimizer else HERE_ALONE
        for parameter, state in inside.state.items():
            rows = self._rows_of(parameter) if isinstance(parameter, torch.Tensor) else None
            # ZeRO steps with one group of parameters at a time, and this call leaves the parameter's group out.
            if rows is None or not isinstance(state, dict) or id(parameter) not in updated:
                continue
            repeat = next_repeat(repeats, parameter)
            at = at if at.repeat == repeat else at._replace(repeat=repeat)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    rows.record("optim", f".{key}", value, at, note=note)
        if any(flat.originals for root in self._capture.roots for flat in root.parameters.flats):
            self._record_empty_state(optimizer, at, repeats)

    def _record_empty_state(self, optimizer: Optimizer, at: StateTime, repeats: dict[int, int]) -> None:
        """Record empty optimizer state for FSDP1 parameters whose elements all lie on other ranks.

        The optimizer has no state for them here, so the names of the state are taken from the other parameters.
        """
        slices = {
            key: value
            for parameter, state in optimizer.state.items()
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == parameter.shape
        }
        for parameter in parameters_of(optimizer) if slices else ():
            rows = self._rows_of(parameter) if parameter not in optimizer.state else None
            if isinstance(rows, OriginalParameter) and rows.gradient(parameter) is not None and not parameter.numel():
                at = at._replace(repeat=next_repeat(repeats, parameter))
                for key, value in slices.items():
                    rows.record("optim", f".{key}", value.detach()[:0], at)

    def _note_rates(self) -> None:
        """Note the name of each parameter's learning rate in the manifest. Called for new optimizers and new groups."""
        # An optimizer around another, as of Accelerate, has the groups of the other, by whose name rates are recorded.
        live = sorted(self.known.live(), key=lambda one: "param_groups" in vars(one))
        rates = {
            id(parameter): f"lr.{self.known.name_of(one)}.{number}"
            for one in live
            for number, group in zip(self.known.numbers_of(one), one.param_groups, strict=True)
            for parameter in group["params"]
        }
        self.known.has_noted_rates = True
        for root in self._capture.roots:
            root.notes.note_rates(rates)

    def note_unstepped(self) -> None:
        """Note the parameters of all optimizers if none has stepped. Called at the end, and may wait for a device."""
        if not self.num_steps and self._active is None and self.looks.are_unmoved():
            self._note_rates()
            for root in self._capture.roots:
                root.notes.note_unstepped(self._capture.clock.step)

    def _record_rates(self, optimizer: Optimizer) -> None:
        name = self.known.name_of(optimizer)
        root = next((o.root_name for o in map(self._rows_of, parameters_of(optimizer)) if o is not None), None)
        numbers = self.known.numbers_of(optimizer)
        if len(numbers) == len(self.known.groups_of(optimizer)) and not self._begins_update(optimizer):
            return
        for number, group in zip(numbers, optimizer.param_groups, strict=True):
            rate = group.get("lr")
            if isinstance(rate, (int, float, torch.Tensor)):  # the rate is None if the optimizer computes it
                self._capture.scalars.record(
                    f"lr.{name}.{number}", rate if isinstance(rate, torch.Tensor) else float(rate), root
                )

    def _wrap_scaler(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `GradScaler.step`, because a skipped step calls no hook of the optimizer."""

        def wrapped(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not self._capture.is_open or not scaler.is_enabled():
                return step(scaler, optimizer, *args, **kwargs)
            call = {"stepped": False}
            self._scaler_calls.append(call)
            try:
                self._scaler_begins(scaler)
                result = step(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaler_calls.remove(call)
            if not call["stepped"]:
                self._skipped(optimizer)
            return result

        return wrapped

    def _wrap_init(self, init: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Optimizer.__init__`, because no hook reports a new optimizer before its model's first forward."""

        def wrapped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not self._capture.is_open:
                return
            try:
                if self.num_steps:
                    self.known.made_late(optimizer)
                if updating(optimizer) is not None:
                    self.known.name_of(optimizer)
                self._on_search(optimizer)
            except Exception as error:
                self._capture.hook_failed(type(optimizer).__name__, error)

        return wrapped

    def _scaler_begins(self, scaler: GradScaler) -> None:
        try:
            scale = getattr(scaler, "_scale", None)
            if scale is not None:
                self._capture.scalars.record("grad_scale", scale)
        except Exception as error:
            self._capture.hook_failed("GradScaler.step", error)

    def _skipped(self, optimizer: Optimizer) -> None:
        """Record that the scaler has skipped a step because of an infinity. The step counts as an attempted step."""
        try:
            self._capture.nonfinite.skipped(self._capture.clock.step)
            self._record_rates(optimizer)
            self._capture.scalars.record("skipped", 1.0)
            self.record_before(optimizer)
            self._count(optimizer)
        except Exception as error:
            self._capture.hook_failed("GradScaler.step", error)

    def close(self) -> None:
        """Remove all hooks and wrappers."""
        for handle in self._handles:
            handle.remove()
        self._wrappers.close()


def _first_gradient(optimizer: Optimizer) -> torch.Tensor | None:
    firsts = itertools.islice(parameters_of(optimizer), _FIRST_PARAMETERS)
    return next((one.grad for one in firsts if one.grad is not None), None)
