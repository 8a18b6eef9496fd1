"""Hooks on optimizers: record parameters and final gradients before a step, state and learning rates after it.

Hooks on `torch.optim.Optimizer` see every optimizer of the process. Nothing here may read a device except once at the
start, change an argument except that a closure is wrapped, raise into training, or keep a parameter alive.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..records import Moment
from ..system.processes import live_instances
from .core import Capture
from .hooks.parameter_rows import ModuleParameter, OriginalParameter, ParameterRows
from .hooks.root import Root
from .marks import main_parameter
from .probe import ProbedGroup

_MAX_PROBED = 64
_SMALL = 4096
"""The most elements of the gradient that is compared with the gradient of the next update."""
_ALIKE = 0.9
"""The cosine from which two gradients look alike: a sum of gradients hardly turns."""
_LEAST_ADDED = 0.1
"""The least length of what a backward added, as a share of the gradient before."""
_EARLY_LOOKS = (1, 2, 4, 8)
_LOOK_EVERY = 16
"""The number of steps from one look at what an update leaves out to the next, after the early ones."""
_is_compiling = torch.compiler.is_compiling


def find_live() -> list[Optimizer]:
    """Return every live optimizer of this process. Only types are read, so that no lazy object is loaded."""
    return live_instances(Optimizer)


def last_step(optimizers: list[Optimizer]) -> int | None:
    """Return the largest ``state["step"]`` of optimizers, or None where no state has a step.

    This is the only place that reads a device. It skips a device while a graph is captured, or if the user forbids
    waiting; then the steps on that device are ignored.
    """
    recorded = [
        state["step"]
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict) and "step" in state
    ]
    steps = [int(step) for step in recorded if not _is_on_gpu(step)]
    for device in {step.device for step in recorded if _is_on_gpu(step)}:
        if not torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):
                on_device = [
                    step.detach().reshape(()) for step in recorded if _is_on_gpu(step) and step.device == device
                ]
                steps.append(int(torch.stack(on_device).max()))
    return max(steps, default=None)


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], returned: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of ``Optimizer.step`` with a closure that calls ``returned`` at its end; None if none."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _wrapped(kwargs["closure"], returned)}
    # A positional argument counts as a closure only if the signature calls it so: a user's `step` may take the model
    # there.
    if len(args) > 1 and callable(args[1]) and not isinstance(args[1], torch.nn.Module):
        names = list(inspect.signature(type(args[0]).step).parameters)
        if names[1:2] == ["closure"]:
            return (args[0], _wrapped(args[1], returned), *args[2:]), kwargs
    return None


def _wrapped(closure: Callable[..., Any], returned: Callable[[], None]) -> Callable[..., Any]:
    if not isinstance(closure, (types.FunctionType, types.MethodType)):
        return cast("Callable[..., Any]", _ClosureObject(closure, returned))

    @functools.wraps(closure)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        returned()
        return loss

    return wrapped


class _ClosureObject:
    """A wrapper around a closure that is an object; every use except a call is passed on to the object."""

    def __init__(self, closure: Any, returned: Callable[[], None]) -> None:
        self.__dict__.update(_closure=closure, _returned=returned)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_closure"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.__dict__["_closure"](*args, **kwargs)
        self.__dict__["_returned"]()
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_closure"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_closure"], name, value)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _num_steps_under_way(optimizer: Optimizer) -> int:
    """Return how many calls of this optimizer's step are on the stack: 2 where a subclass calls ``super().step()``.

    A count of hooks would be wrong after a step that raised, because no hook is called then; the stack is right.
    """
    count = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


class LastGradient(NamedTuple):
    """A small gradient as an update found it, with which the gradient of the next update is compared."""

    gradient: weakref.ref[torch.Tensor]
    values: torch.Tensor
    next_version: int
    """The version of the gradient after one more backward, if nothing else is done to the gradient."""

    @classmethod
    def of(cls, parameters: Iterator[torch.Tensor], *, in_ddp: bool) -> LastGradient | None:
        """Return the first small gradient in host memory; None if there is none.

        Args:
            parameters: the parameters of one optimizer.
            in_ddp: DDP averages the gradients. It then copies the average into the gradient after each backward.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if type(gradient) is not torch.Tensor or not gradient.is_cpu or gradient.is_sparse:
                continue
            if in_ddp and gradient._is_view():
                continue  # a view of DDP's bucket has the version of the bucket, which each gradient there counts up
            if 1 < gradient.numel() <= _SMALL:
                version = gradient._version + (2 if in_ddp else 1)
                return cls(weakref.ref(gradient), gradient.detach().clone(), version)
        return None

    def stands_uncleared(self) -> bool:
        """Whether one backward was added to the gradient, and nothing else was done to it, since the last update.

        A gradient that was set to zero in place has another version. One that was set to zero behind the back of
        autograd does not look like the last gradient any more, or, of the same batch, is about the last gradient itself
        and not longer.
        """
        now = self.gradient()
        if now is None or now._version != self.next_version:
            return False
        present, last = now.detach().flatten(), self.values.flatten()
        added = present - last
        is_longer = torch.dot(added, last) >= 0 and added.norm() >= _LEAST_ADDED * last.norm()
        return bool(is_longer and torch.cosine_similarity(present, last, dim=0) > _ALIKE)


class OptimizerHooks:
    """The hooks on all optimizers and on GradScaler, from the first call of a root to the end of the recording."""

    def __init__(
        self, capture: Capture, *, on_step: Callable[[Optimizer], None], on_new: Callable[[Optimizer], None]
    ) -> None:
        """Put the hooks on. `on_step` is called after each optimizer step, and `on_new` when an optimizer is made."""
        self._capture = capture
        self._on_step = on_step
        self._on_new = on_new
        self._rows: dict[int, ParameterRows] = {}
        self._unknown: dict[int, weakref.ref[torch.Tensor]] = {}
        self._probed: weakref.WeakKeyDictionary[Optimizer, dict[Hashable, ProbedGroup | None]]
        self._probed = weakref.WeakKeyDictionary()
        """The values of each optimizer that the probe measures together, by the parameters in their order, by which of
        them have gradients, and by the masks; None where the probe must measure them one by one."""
        self._probed_key: Hashable = None
        """The key under which the values of the step under way become a group."""
        self._late: dict[int, weakref.ref[torch.Tensor]] = {}
        """The parameters that came after this step's scan of the modules; the next scan looks for them."""
        self._learned_at = -1
        self._last_gradient: LastGradient | None = None
        self._has_rescanned = False
        self.known: dict[int, tuple[weakref.ref[Optimizer], str]] = {}
        self.num_named = 0
        self._counting: Callable[[], Optimizer | None] | None = None
        self._active: Callable[[], Optimizer | None] | None = None
        self._scaler_calls: list[dict[str, Any]] = []
        self._repeats: dict[str, dict[int, int]] = {"grad": {}, "optim": {}, "buffer": {}}
        """The last `repeat` in this step, by site and parameter id; all buffers count under the id 0."""
        self._repeats_step = -1
        self.num_steps = 0
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self._scaler_step = GradScaler.step
        self._wrapper = self._wrap_scaler(GradScaler.step)
        GradScaler.step = self._wrapper  # type: ignore[method-assign]
        self._plain_init = Optimizer.__init__
        self._init = self._wrap_init(Optimizer.__init__)
        Optimizer.__init__ = self._init  # type: ignore[method-assign]

    def names(self) -> list[dict[str, str]]:
        """Return every optimizer that was seen, for the manifest."""
        return [
            {"name": name, "class": type(optimizer).__name__}
            for reference, name in self.known.values()
            if (optimizer := reference()) is not None
        ]

    def name_of(self, optimizer: Optimizer) -> str:
        """Return the class name of an optimizer, with a number where several live optimizers share the class name.

        An optimizer that the program makes anew at each step keeps the name of the optimizer before it.
        """
        known = self.known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        self.known = {key: known for key, known in self.known.items() if known[0]() is not None}
        base, used = type(optimizer).__name__, {name for _, name in self.known.values()}
        name, i = base, 0
        while name in used:
            i += 1
            name = f"{base}_{i}"
        self.known[id(optimizer)] = weakref.ref(optimizer), name
        self.num_named += 1
        return name

    def _live(self) -> list[Optimizer]:
        return [optimizer for reference, _ in self.known.values() if (optimizer := reference()) is not None]

    def holds(self, parameters: set[int]) -> bool:
        """Whether a live optimizer updates a parameter with one of these ids."""
        return any(id(parameter) in parameters for live in self._live() for parameter in _parameters(live))

    def all_have_roots(self) -> bool:
        """Whether every parameter of every live optimizer is under a root."""
        return all(self.has_root(optimizer) for optimizer in self._live())

    def has_root(self, optimizer: Optimizer) -> bool:
        """Whether every parameter of an optimizer is under a root."""
        for parameter in _parameters(optimizer):
            rows = self._rows.get(id(parameter))  # `_rows_of` does the same, but its call costs time at every step
            if (rows is None or rows.reference() is not parameter) and self._rows_of(parameter) is None:
                return False
        return True

    def _rows_of(self, parameter: torch.Tensor) -> ParameterRows | None:
        rows = self._rows.get(id(parameter))
        if rows is not None and rows.reference() is parameter:
            return rows
        unknown = self._unknown.get(id(parameter))
        if unknown is not None and unknown() is parameter:
            return None
        if self._learned_at == self.num_steps:  # one scan of all modules a step is enough
            self._late[id(parameter)] = weakref.ref(parameter)
            return None
        self._learn()
        rows = self._rows.get(id(parameter))
        if rows is not None and rows.reference() is parameter:
            return rows
        self._unknown[id(parameter)] = weakref.ref(parameter)
        return None

    def _learn(self) -> None:
        self._learned_at = self.num_steps
        self._unknown |= self._late  # first `_rows_of` looks for the rows of these parameters
        self._late.clear()
        roots = self._capture.roots
        names = {root.name for root in roots}
        # DDP removes the DTensor parameters of tensor parallel modules for good when these modules first run.
        kept = {key: o for key, o in self._rows.items() if o.root_name in names and id(o.reference()) == key}
        self._rows = kept | {id(parameter): rows for root in roots for parameter, rows in parameter_rows(root)}

    def rescan(self) -> None:
        """Find the module of every parameter again, because there is a new root."""
        self._probed.clear()
        self._unknown.clear()
        self._learn()
        self._has_rescanned = False

    def _rescan_after_first_step(self) -> None:
        """Look for wrappers at the first step after a new root, because the model may have been wrapped meanwhile."""
        self._has_rescanned = True
        for root in self._capture.roots:
            root.find_wrappers()
        self._unknown.clear()
        self._learn()

    def _repeats_at(self, site: str) -> dict[int, int]:
        """Return how often this step has recorded each parameter at a site, by parameter.

        The counts belong to parameters and not to optimizers, because optimizers may share parameters, get more
        parameters later, and be made and deleted within a step.
        """
        if self._repeats_step != self._capture.clock.step:
            self._repeats_step = self._capture.clock.step
            for repeats in self._repeats.values():
                repeats.clear()
        return self._repeats[site]

    def _counts(self, optimizer: Optimizer) -> bool:
        if self._counting is None or self._counting() is None:  # no optimizer counts yet, or it was deleted
            wanted = self._capture.settings.step_optimizer
            if wanted and wanted not in (self.name_of(optimizer), type(optimizer).__name__):
                return False
            self._counting = weakref.ref(optimizer)
        return self._counting() is optimizer

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
        if not self._has_rescanned:
            self._rescan_after_first_step()
        capture = self._capture
        if not capture.has_seen_forward and self._counts(optimizer):
            # No forward can move the step: the root's own hooks are compiled away, or the root takes no hooks.
            moved = capture.clock.advance_if_stepped()
            if moved:
                capture.step_changed()
        if self._counts(optimizer):
            self._look_at_update(optimizer)
        self._record_rates(optimizer)
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
            capture.nonfinite.is_told_by_rows = True
            capture.scalars.record("skipped", found_inf)
        elif self._scaler_calls:
            capture.scalars.record("skipped", 0.0)
        wrapped = wrap_closure(args, kwargs, lambda: self.closure_returned(optimizer))
        if wrapped is None:
            capture.root_calls.depth = 0  # a step ends any forward that was interrupted
            self.record_before(optimizer)
        return wrapped

    def _look_at_update(self, optimizer: Optimizer) -> None:
        """At some steps, note what the program leaves out of the update, and whether it cleared the gradients."""
        capture, last = self._capture, self._last_gradient
        self._last_gradient = None
        if last is not None and last.stands_uncleared():
            for root in capture.roots:
                root.inventory.note_uncleared(capture.clock.step)
        if self.num_steps in _EARLY_LOOKS or self.num_steps % _LOOK_EVERY == 0:
            in_ddp = all((root.data_parallel or {}).get("kind") == "ddp" for root in capture.roots)
            self._last_gradient = LastGradient.of(_parameters(optimizer), in_ddp=in_ddp)
            trained = {id(parameter) for live in self._live() for parameter in _parameters(live)}
            for root in capture.roots:
                root.inventory.look_at_update(trained, capture.clock.step)

    def closure_returned(self, optimizer: Optimizer) -> None:
        """Record the gradients that a closure has computed, which the optimizer uses next."""
        try:
            if self._active is None:  # the first root was found inside this very closure
                self._active = weakref.ref(optimizer)
                self._record_rates(optimizer)
            self.record_before(optimizer)
        except Exception as error:
            self._capture.hook_failed("closure", error)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the optimizer's state, and count the step (the post-step hook)."""
        if _is_compiling() or not self._capture.is_open:
            return
        try:
            if self._active is None or self._active() is not optimizer or _num_steps_under_way(optimizer) > 1:
                return
            self._active = None
            self._record_state(optimizer)
            self._count(optimizer)
        except Exception as error:
            self._capture.hook_failed(f"{type(optimizer).__name__}.step", error)

    def _count(self, optimizer: Optimizer) -> None:
        self.name_of(optimizer)
        self.num_steps += 1
        if self._counts(optimizer):
            clock = self._capture.clock
            if clock.source == "counted" and any("step" in s for s in optimizer.state.values() if isinstance(s, dict)):
                clock.source = "optimizer"
            clock.optimizer_stepped()
        self._on_step(optimizer)

    def record_before(self, optimizer: Optimizer) -> None:
        """Record the parameters and final gradients of one optimizer and, once a step, the buffers."""
        capture = self._capture
        moment = Moment(capture.clock.step, None, "train")
        repeats = self._repeats_at("grad")
        note = '{"grad":"scaled"}' if getattr(optimizer, "grad_scale", None) is not None else None
        keeps_param, keeps_grad = capture.selection.keeps("param"), capture.selection.keeps("grad")
        parameters = list(_parameters(optimizer)) if keeps_param or keeps_grad else []
        is_done = self._probe_together(optimizer, parameters, moment.step)
        for parameter in () if is_done else parameters:
            rows = self._rows_of(parameter)
            if rows is None:
                continue
            repeat = repeats[id(parameter)] = repeats.get(id(parameter), -1) + 1
            if keeps_param:
                rows.record("param", "", parameter, moment, "optimizer", repeat)
            if keeps_grad and (gradient := rows.gradient(parameter)) is not None:
                rows.record("grad", "", gradient, moment, "optimizer", repeat, scope="final", note=note)
        self._learn_probed(optimizer, parameters)
        if self._counts(optimizer) and capture.selection.keeps("buffer"):
            repeats = self._repeats_at("buffer")
            repeat = repeats[0] = repeats.get(0, -1) + 1
            for root in capture.roots:
                root.record_state(("buffer",), moment, "optimizer", repeat)

    def _probe_together(self, optimizer: Optimizer, parameters: list[torch.Tensor], step: int) -> bool:
        """Show parameters and gradients to the probe with one call, where it alone keeps something of them.

        The values are those that the probe has seen one by one at an earlier step with the same masks. Return False if
        the parameters must be recorded one by one.
        """
        self._probed_key, probe = None, self._capture.probe
        if probe is None:
            return False
        probe.seen = None
        if not parameters or not self._capture.selection.keeps_probe_alone("param", "grad"):
            return False
        gradients = [parameter.grad for parameter in parameters]
        whose = tuple(map(id, parameters)), tuple(gradient is None for gradient in gradients)
        key = whose, tuple(self._capture.selection.masks)
        groups = self._probed.setdefault(optimizer, {})
        if key not in groups:
            self._probed_key, probe.seen = key, []
            return False
        group = groups[key]
        tensors = [one for pair in zip(parameters, gradients, strict=True) for one in pair if one is not None]
        return group is not None and probe.saw_group(group, tensors, step)

    def _learn_probed(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Make a group of the values that the probe has just seen, if it saw each parameter and gradient once."""
        probe, key, self._probed_key = self._capture.probe, self._probed_key, None
        if key is None or probe is None or probe.seen is None:
            return
        seen, probe.seen = probe.seen, None
        expected = [
            (tensor.dtype, tensor.numel())
            for parameter in parameters
            for tensor in (parameter, parameter.grad)
            if tensor is not None
        ]
        groups = self._probed[optimizer]
        if len(groups) >= _MAX_PROBED:
            groups.clear()
        groups[key] = probe.group(seen) if [one[1:] for one in seen] == expected else None

    def _record_state(self, optimizer: Optimizer) -> None:
        if not self._capture.selection.keeps("optim"):
            return
        moment = Moment(self._capture.clock.step, None, "train")
        repeats = self._repeats_at("optim")
        for parameter, state in optimizer.state.items():
            rows = self._rows_of(parameter) if isinstance(parameter, torch.Tensor) else None
            if rows is None or not isinstance(state, dict):
                continue
            repeat = repeats[id(parameter)] = repeats.get(id(parameter), -1) + 1
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    rows.record("optim", f".{key}", value, moment, "optimizer", repeat)
        if any(flat.originals for root in self._capture.roots for flat in root.flats):
            self._record_empty_state(optimizer, moment, repeats)

    def _record_empty_state(self, optimizer: Optimizer, moment: Moment, repeats: dict[int, int]) -> None:
        """Record empty state for FSDP1 parameters that lie on other ranks, for which the optimizer has no state here.

        The names of the state are taken from the optimizer's other parameters.
        """
        slices = {
            key: value
            for parameter, state in optimizer.state.items()
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == parameter.shape
        }
        for parameter in _parameters(optimizer) if slices else ():
            rows = self._rows_of(parameter) if parameter not in optimizer.state else None
            if isinstance(rows, OriginalParameter) and rows.gradient(parameter) is not None and not parameter.numel():
                repeat = repeats[id(parameter)] = repeats.get(id(parameter), -1) + 1
                for key, value in slices.items():
                    rows.record("optim", f".{key}", value.detach()[:0], moment, "optimizer", repeat)

    def _record_rates(self, optimizer: Optimizer) -> None:
        name = self.name_of(optimizer)
        root = next((o.root_name for o in map(self._rows_of, _parameters(optimizer)) if o is not None), None)
        for i, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if isinstance(rate, (int, float, torch.Tensor)):  # None where the optimizer computes the rate itself
                self._capture.scalars.record(
                    f"lr.{name}.{i}", rate if isinstance(rate, torch.Tensor) else float(rate), root
                )

    def _wrap_scaler(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `GradScaler.step`, because a step that the scaler skips calls no hook of the optimizer."""
        hooks = self

        @functools.wraps(step)
        def wrapped(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not hooks._capture.is_open or not scaler.is_enabled():
                return step(scaler, optimizer, *args, **kwargs)
            call = {"stepped": False}
            hooks._scaler_calls.append(call)
            try:
                hooks._scaler_begins(scaler)
                result = step(scaler, optimizer, *args, **kwargs)
            finally:
                hooks._scaler_calls.remove(call)
            if not call["stepped"]:
                hooks._skipped(optimizer)
            return result

        return wrapped

    def _wrap_init(self, init: Callable[..., None]) -> Callable[..., None]:
        """Wrap `Optimizer.__init__`, because no hook reports a new optimizer before its model's first forward."""
        hooks = self

        @functools.wraps(init)
        def wrapped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not hooks._capture.is_open:
                return
            try:
                hooks.name_of(optimizer)
                hooks._on_new(optimizer)
            except Exception as error:
                hooks._capture.hook_failed(type(optimizer).__name__, error)

        return wrapped

    def _scaler_begins(self, scaler: GradScaler) -> None:
        try:
            scale = getattr(scaler, "_scale", None)
            if scale is not None:
                self._capture.scalars.record("grad_scale", scale)
        except Exception as error:
            self._capture.hook_failed("GradScaler.step", error)

    def _skipped(self, optimizer: Optimizer) -> None:
        """Record that the scaler has skipped a step because of an infinity; the step counts as an attempted step."""
        try:
            self._capture.nonfinite.skipped(self._capture.clock.step)
            self._record_rates(optimizer)
            self._capture.scalars.record("skipped", 1.0)
            self.record_before(optimizer)
            self._count(optimizer)
        except Exception as error:
            self._capture.hook_failed("GradScaler.step", error)

    def close(self) -> None:
        """Remove all hooks. If the program has wrapped one of our wrappers, the program's wrapper keeps working."""
        for handle in self._handles:
            handle.remove()
        if GradScaler.step is self._wrapper:
            GradScaler.step = self._scaler_step  # type: ignore[method-assign]
        if Optimizer.__init__ is self._init:
            Optimizer.__init__ = self._plain_init  # type: ignore[method-assign]


def parameter_rows(root: Root) -> Iterator[tuple[torch.Tensor, ParameterRows]]:
    """Yield every parameter of a root that an optimizer may update, once, with its rows."""
    for hooked, name, parameter in root.parameters():
        yield parameter, ModuleParameter(parameter, hooked, name)
        main = main_parameter(parameter)
        if main is not None:
            yield main, ModuleParameter(main, hooked, name)
    for flat in root.flats:
        rows: ParameterRows
        for rows in flat.originals if flat.uses_original else (flat,):
            if (tensor := rows.reference()) is not None:
                yield tensor, rows
