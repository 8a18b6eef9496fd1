"""Finds the culprits of a training: computations that differ between two runs although all their inputs agree.

A computation is a module's forward, its recomputation or its backward, the way of gradients from a backward to the
update (reduction, accumulation, clipping), or the update of a parameter. A computation whose inputs differ inherits the
difference, and is no culprit. This module must never read a payload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...numerics.keys import by_key
from ...sites import LASTING_SITES, NUMBERS, OF_CALLS, OF_PARAMETERS, values_of
from ...system.text import listed
from .culprit_events import StepEvent

FORWARD, RECOMPUTE, BACKWARD, REDUCTION, UPDATE, START = (
    "forward", "recompute", "backward", "reduction", "update", "start"
)  # fmt: skip
_OF_A_GROUP = "the learning rate of one group only"
OTHER_INPUT = "the root was called with another input"
PHASES = (START, FORWARD, RECOMPUTE, BACKWARD, REDUCTION, UPDATE)
"""The kinds of computations in the order of a step. State that differs in its first record comes first."""
_ALIKE_SHARE = 0.9
_MIN_ALIKE = 3
"""If this many parameters and `_ALIKE_SHARE` of all parameters differ at once, no single parameter is blamed."""
MAX_STEPS = 32
"""The search ends after this many steps with differences. Later steps only show inherited differences."""
_MAX_FOLLOWING = 256
"""If inputs are not recorded, the module that takes an output is sought among this many outputs after it."""

Value = tuple[str, str, str, str]


class Suspect(NamedTuple):
    """A computation that differs between the runs although all values that it was computed from agree."""

    step: int
    phase: str
    root: str
    path: str | None
    """The path of the module at fault; None if all parameters differ in the same way."""
    event: StepEvent
    """The first value that differs because of the fault."""
    num_params: int = 1
    """The number of parameters that differ in the same way, if `path` is None; 0 if unknown."""
    stages: tuple[int, ...] = ()
    """The pipeline stages of which nearly all parameters differ. Empty for one module, or for all stages."""
    why: str = ""


class _Paths:
    """Counts events by module path. Each method takes time in proportion to the depth of the path."""

    def __init__(self, events: Iterable[StepEvent] = ()) -> None:
        self.at: dict[str, int] = {}
        """By module path, the number of events of the module itself."""
        self.below: dict[str, int] = {}
        """By module path, the number of events of the modules below the module."""
        self.last_below: dict[str, float] = {}
        for event in events:
            self.add(event)

    def add(self, event: StepEvent) -> None:
        path = event.path
        self.at[path] = self.at.get(path, 0) + 1
        while path:
            path = path.rpartition(".")[0]
            self.below[path] = self.below.get(path, 0) + 1
            self.last_below[path] = event.order

    def has(self, path: str, *, below: bool = True) -> bool:
        return path in self.at or (below and path in self.below)

    def has_below(self, path: str, *, but: str | None) -> bool:
        """Return whether a module below `path` has an event. Events at or below the module `but` do not count."""
        count = self.below.get(path, 0)
        if but is not None and _is_below(but, path):
            count -= self.at.get(but, 0) + self.below.get(but, 0)
        return count > 0


class _Step:
    def __init__(self, root: str, events: Sequence[StepEvent]) -> None:
        self.root = root
        self.events = events
        self.known = {_value(event) for event in events}
        wrong = [event for event in events if event.differs]
        self.differing = {_value(event) for event in wrong}
        self._wrong = {site: _Paths(e for e in wrong if e.site == site) for site in {event.site for event in wrong}}
        self.has_params = any(event.site == "param" for event in events)
        self.open_state = _Paths(e for e in events if e.is_open and e.site in OF_PARAMETERS)
        """Counts events of parameters, gradients and optimizer states that may differ without an error."""
        self.open_calls = _Paths(e for e in events if e.is_open and e.site in OF_CALLS)
        """Counts events of inputs, outputs and their gradients that may differ without an error."""
        self.wrong_constants = _Paths(event for event in wrong if event.is_constant)
        """Counts events of buffers that differ between the runs although no forward changes them."""
        self.recomputed_from = min((e.order for e in wrong if e.phase == RECOMPUTE), default=math.inf)
        """The `order` of the first recomputed value that differs; infinite if no recomputed value differs."""

    def differs(self, sites: Sequence[str], path: str, *, below: bool = True) -> bool:
        return any(site in self._wrong and self._wrong[site].has(path, below=below) for site in sites)

    def slices(self, phase: str) -> Iterator[list[StepEvent]]:
        # In a pipeline, micro-step 0 is the whole batch. Only values passed between stages have micro-steps.
        some = (event for event in self.events if event.phase == phase and event.site != "scalar")
        yield from by_key(((one.mode, 0 if one.is_handed_on else one.micro_step), one) for one in some).values()


class _Forward:
    """One forward of a root: which modules were called, and with which inputs."""

    def __init__(self, events: Sequence[StepEvent]) -> None:
        self.called = {event.path for event in events}
        self.stage_of = {event.path: event.stage for event in events if event.path}
        self.wrong = _Paths(event for event in events if event.differs)
        self.has_inputs = any(event.site == "input" and event.path for event in events)
        self._outputs = [event for event in events if event.site == "output"]
        self.open_outputs = {event.path: event for event in self._outputs if event.is_open}
        self._output_at = {(event.path, event.name, event.call): n for n, event in enumerate(self._outputs)}
        given = (event for event in events if event.site == "input" and event.signature is not None)
        self._takers = by_key((event.signature, event) for event in given)

    def caller(self, path: str) -> str | None:
        """Return the path of the nearest called parent, whose code calls the module. Return None for the root."""
        while path:
            path = path.rpartition(".")[0]
            if path in self.called or not path:
                return path
        return None

    def consumer(self, event: StepEvent) -> str:
        """Return the module whose backward made the gradient of an output.

        It is the module that took the output as input, if known, or else the module that called the output's module.
        """
        caller = self.caller(event.path) or ""
        number = self._output_at.get((event.path, event.name, event.call))
        if number is None:
            return caller
        output = self._outputs[number]
        given = self._takers.get(output.signature, []) if output.signature is not None else []
        takers = [one.path for one in given if one.order > output.order and not _at(event.path, one.path)]
        if takers:
            return next((path for path in reversed(takers) if _is_below(path, takers[0])), takers[0])
        if self.has_inputs:
            return caller
        following = self._outputs[number + 1 : number + 1 + _MAX_FOLLOWING]
        later = (one.path for one in following if not _at(event.path, one.path))
        return next((path for path in later if self.caller(path) == caller), caller)


class CulpritSearch:
    """Searches one step after another for computations that differ between the runs although their inputs agree."""

    def __init__(self) -> None:
        self.suspects: list[Suspect] = []
        self.groups: list[tuple[Suspect, Suspect]] = []
        """For each suspected learning rate: the suspect, and a new suspect that names the parameters with this rate."""
        self._previous: dict[str, tuple[int, _Step | None]] = {}
        """For each root (model), the number of the last step, and its events. None for events if the runs agreed."""
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """True once `MAX_STEPS` steps were searched, because later steps only show inherited differences."""
        return self._num_steps >= MAX_STEPS

    def equal_step(self, step: int, roots: Iterable[str], *, shows_state: bool = True) -> None:
        """Add a step at which the runs agree. `shows_state` is False if it only has the root's inputs and scalars."""
        for root in roots:
            before = self._previous.get(root)
            if shows_state or before is None or before[1] is None:
                self._previous[root] = step, None

    def step(self, step: int, events: Sequence[StepEvent]) -> list[Suspect]:
        self._num_steps += 1
        suspects: list[Suspect] = []
        for root in dict.fromkeys(event.root for event in events):
            now = _Step(root, [event for event in events if event.root == root])
            before = self._previous.get(root)
            of_root = [*_states(step, now, before), *_forward(step, now, before), *_recompute(step, now)]
            of_root += _backward(step, now)
            suspects += _collapsed([*self._without_groups(step, of_root), *_gradients(step, now)], now)
            self._previous[root] = step, now
        known = {(one.root, one.path, one.phase, one.event.alone) for one in self.suspects}
        fresh = [one for one in suspects if (one.root, one.path, one.phase, one.event.alone) not in known]
        fresh.sort(key=_when)  # a value of one model may be the input of another
        self.suspects += fresh
        return fresh

    def _without_groups(self, step: int, suspects: list[Suspect]) -> list[Suspect]:
        """Remove the suspected updates of parameters whose group has a different learning rate in the two runs."""
        for rate in self.suspects:
            is_of_some = rate.event.site == "scalar" and not rate.num_params
            if rate.step != step - 1 or not is_of_some or rate.root not in {one.root for one in suspects}:
                continue
            held = [one for one in suspects if (one.step, one.phase, one.event.site) == (rate.step, UPDATE, "param")]
            paths = list(dict.fromkeys(repr(one.path) for one in held))
            if held:
                path, why = (held[0].path, rate.why) if len(paths) == 1 else (None, f"{rate.why}: {listed(paths)}")
                self.groups.append((rate, rate._replace(path=path, num_params=len(held), why=why)))
                suspects = [one for one in suspects if one not in held]
        return suspects


def _forward(step: int, now: _Step, before: tuple[int, _Step | None] | None) -> Iterator[Suspect]:
    old = before[1] if before else None
    is_first = before is None or before[0] != step - 1
    for events in now.slices(FORWARD):
        forward = _Forward(events)
        begins: dict[tuple[str, int], float] = {}
        for event in events:
            if event.site == "input":
                begins.setdefault((event.path, event.call), event.order)
        bad, bad_inputs = _Paths(), _Paths()
        is_handed_wrong = False
        for event in (event for event in events if event.differs or (event.is_open and bad.at)):
            is_input = event.site == "input"
            if event.is_open:  # a value of unknown layout may inherit an earlier difference
                bad.add(event)
                if is_input:
                    bad_inputs.add(event)
                continue
            if event.is_handed_on and is_input:
                if not bad.at:
                    yield Suspect(step, FORWARD, now.root, "", event, why=_handed(event))
                is_handed_wrong = True
            if not is_handed_wrong:
                owner = forward.caller(event.path) if is_input else event.path
                if owner is None:
                    if not bad.at:
                        yield Suspect(step, FORWARD, now.root, "", event, why=OTHER_INPUT)
                elif not (
                    _inherits_forward(bad, bad_inputs, owner, begins.get((owner, event.call)), is_input=is_input)
                    or _inherits_state(now, old, owner, is_first=is_first, below=not is_input)
                ):
                    yield Suspect(step, FORWARD, now.root, owner, event)
                if is_input:
                    bad_inputs.add(event)
            bad.add(event)


def _inherits_state(now: _Step, old: _Step | None, owner: str, *, is_first: bool, below: bool) -> bool:
    """Return whether a parameter or buffer that the forward of the module `owner` reads differs, or may differ."""
    if now.differs(("param",), owner, below=below) or now.open_state.has(owner, below=below):
        return True
    if is_first and now.wrong_constants.has(owner, below=below):
        return True
    if old is None:
        return False
    sites = ("buffer",) if now.has_params else ("buffer", "grad", "optim")
    return old.open_state.has(owner, below=below) or old.differs(sites, owner, below=below)


def _recompute(step: int, now: _Step) -> Iterator[Suspect]:
    """Yield suspects whose forward agrees between the runs, but whose recomputation (checkpointing) differs."""
    wrong_before = {_call(event) for event in now.events if event.phase == FORWARD and event.differs}
    for events in now.slices(RECOMPUTE):
        again = _Forward(events)
        bad = _Paths()
        for event in events:
            if not event.differs:
                continue
            is_input = event.site == "input"
            owner = again.caller(event.path) if is_input else event.path
            why = ""
            if owner is None or (is_input and owner not in again.called):  # an outermost block reads its saved input
                owner, why = event.path, "it was called with another input than in its forward"
            inherits = bool(bad.at) if is_input or not again.has_inputs else bad.has(owner)
            if not inherits and _call(event) not in wrong_before:
                yield Suspect(step, RECOMPUTE, now.root, owner, event, why=why)
            bad.add(event)


def _call(event: StepEvent) -> tuple[str, str, str, int | None, int]:
    return event.path, event.site, event.name, event.micro_step, event.call


def _inherits_forward(bad: _Paths, bad_inputs: _Paths, owner: str, begins: float | None, *, is_input: bool) -> bool:
    """Return whether an input of a module call, or an earlier value inside the call, differs between the runs.

    `begins` is the order of the first input of the module `owner`. It is None if the inputs were not recorded; then
    every earlier value may be an input. `is_input` is True for the input of a module that `owner` calls.
    """
    if begins is None and not (owner == "" and is_input):
        return bool(bad.at)
    if owner in bad_inputs.at or (is_input and owner in bad.at):
        return True
    return owner in bad.last_below and (begins is None or bad.last_below[owner] >= begins)


def _backward(step: int, now: _Step) -> Iterator[Suspect]:
    forwards = {(events[0].mode, events[0].micro_step): events for events in now.slices("forward")}
    for events in now.slices("backward"):
        forward = _Forward(forwards.get((events[0].mode, events[0].micro_step), []))
        gradients = [event for event in events if event.site == "grad_output" and not event.is_handed_on]
        of_output = {event.path for event in gradients}
        wrong_output = {event.path for event in gradients if event.differs}
        bad = _Paths()
        is_handed_wrong = False
        for event in events:
            if not event.differs or event.alone == "b":  # `_gradients` reports a gradient that only b has
                continue
            if event.is_handed_on and event.site == "grad_output":
                if not bad.at and not forward.wrong.at:
                    yield Suspect(step, BACKWARD, now.root, "", event, why=_handed(event))
                is_handed_wrong = True
            if is_handed_wrong:
                bad.add(event)
                continue
            is_loss = event.path == "" and event.site == "grad_output"
            owner = forward.consumer(event) if event.site == "grad_output" and event.path else event.path
            if is_loss:
                inherits = "" in bad.at
            elif bad.has_below(owner, but=event.path if event.path != owner else None):
                # The module's gradients from outside differ.
                inherits = True
            else:
                inherits = owner in wrong_output if owner in of_output else bool(bad.at)
            if not inherits and not forward.wrong.has(owner) and event.order < now.recomputed_from:
                why = "the loss" if is_loss else ""
                if owner and event.stage != forward.stage_of.get(owner, event.stage):
                    owner, why = "", _handed(event)  # another stage has sent the module's gradient
                if (made := forward.open_outputs.get(owner)) is None:
                    yield Suspect(step, BACKWARD, now.root, owner, event, why=why)
                elif not now.differs(("param",), owner):  # no other event explains the difference on these ranks
                    yield Suspect(step, FORWARD, now.root, owner, made)
            bad.add(event)


def _handed(event: StepEvent) -> str:
    stage = event.stage or 0
    return f"stage {stage} got something else from stage {stage + (1 if event.phase == BACKWARD else -1)}"


def _gradients(step: int, now: _Step) -> Iterator[Suspect]:
    """Yield a suspect for each gradient used by the update that differs, unless its backward is known to differ."""
    of_local = [event for event in now.events if event.site == "grad" and event.scope == "local"]
    local = {(event.path, event.name) for event in of_local}
    wrong_local = {(event.path, event.name) for event in of_local if event.differs}
    has_flow = {event.path for event in now.events if values_of(event.site) == "output"}
    any_flow = any(event.differs and event.phase in (FORWARD, RECOMPUTE, BACKWARD) for event in now.events)
    is_again = now.recomputed_from < math.inf
    for event in now.events:
        if event.site != "grad" or event.phase != "optimizer" or not event.differs:
            continue
        if event.alone == "b":
            yield Suspect(step, BACKWARD, now.root, event.path, event, why="it had no gradient")
        elif now.differs(("param",), event.path, below=False):
            continue
        elif (event.path, event.name) in local:
            if (event.path, event.name) not in wrong_local:
                yield Suspect(step, REDUCTION, now.root, event.path, event)
        elif not any_flow or (
            event.path in has_flow
            and event.path != ""
            and not is_again
            and not now.differs(OF_CALLS, event.path, below=False)
            and not now.open_calls.has(event.path, below=False)
        ):
            yield Suspect(step, REDUCTION if event.ranks else BACKWARD, now.root, event.path, event)


def _states(step: int, now: _Step, before: tuple[int, _Step | None] | None) -> Iterator[Suspect]:
    """Yield a suspect for each parameter, buffer, optimizer state or scalar that differs although its sources agree."""
    old = before[1] if before else None
    is_next = before is not None and before[0] == step - 1
    for event in now.events:
        if not event.differs or event.site not in (*LASTING_SITES, *NUMBERS):
            continue
        if old is not None and _value(event) in old.differing:
            continue
        if event.site == "scalar":
            if event.name.startswith("lr."):
                rates = {value for value in now.known if value[2] == "scalar" and value[3].startswith("lr.")}
                num_differ = len(rates & now.differing)
                of_groups = f"the learning rates of {num_differ} of {len(rates)} groups"
                of_some = _OF_A_GROUP if num_differ == 1 else of_groups
                why, num_params = ("the learning rate", 1) if num_differ == len(rates) else (of_some, 0)
                yield Suspect(step, UPDATE, now.root, None, event, num_params, why=why)
        elif event.site == "buffer":
            is_made = not is_next and not event.is_constant and now.differs(("output",), event.path, below=False)
            is_given = is_made or now.differs(("input", "param"), event.path)
            if not is_given or (event.is_constant and not is_next):
                yield Suspect(step, FORWARD if is_next else START, now.root, event.path, event)
        elif event.site == "optim":
            made_from = [(now.root, event.path, site, event.name.partition(".")[0]) for site in ("grad", "param")]
            if not any(one in now.differing for one in made_from):
                yield Suspect(step, UPDATE, now.root, event.path, event)
        elif not is_next:
            if old is None or not old.differing:  # otherwise unrecorded steps between may have spread the difference
                yield Suspect(step, START, now.root, event.path, event)
        elif old is None or not _inherits_update(event, old):
            yield Suspect(step - 1, UPDATE, now.root, event.path, event)


def _inherits_update(event: StepEvent, old: _Step) -> bool:
    if (event.root, event.path, "grad", event.name) in old.known:
        if any((event.root, event.path, site, event.name) in old.differing for site in ("grad", "param")):
            return True
        return old.differs(("optim",), event.path, below=False) and any(
            (path, site) == (event.path, "optim") and name.startswith(f"{event.name}.")
            for _, path, site, name in old.differing
        )
    return bool(old.differing)


def _collapsed(suspects: list[Suspect], now: _Step) -> list[Suspect]:
    """Keep one suspect for each module and phase, or one for all parameters if nearly all of a run or stage differ."""
    stage_of = {(event.path, event.name): event.stage for event in now.events if values_of(event.site) == "param"}
    params = {(path, name) for _, path, site, name in now.known if site == "grad"}
    params = params or {(path, name) for _, path, site, name in now.known if site == "param"}
    has_way = any(event.site == "grad_output" for event in now.events)
    result: list[Suspect] = []
    for phase in (REDUCTION, BACKWARD, UPDATE, START):
        of_params = [one for one in suspects if one.phase == phase and one.event.site in OF_PARAMETERS]
        touched = {(one.path or "", one.event.name.partition(".")[0]) for one in of_params}
        stages: tuple[int, ...] = ()
        if not are_nearly_all(len(touched), len(params)):
            stages = _stages_alike(touched, params, stage_of)
            of_params = [one for one in of_params if one.event.stage in stages]
            touched = {param for param in touched if param in stage_of and stage_of[param] in stages}
        if of_params:
            suspects = [one for one in suspects if one not in of_params]
            if not any(one.path is None and one.phase == phase for one in suspects):
                # No backward is wrong in all modules at once. If gradients agree during the backward, the reduction is
                # at fault.
                is_behind = has_way and phase == BACKWARD and not any(one.event.alone for one in of_params)
                shown = REDUCTION if is_behind and of_params[0].event.phase == "optimizer" else phase
                result.append(of_params[0]._replace(path=None, phase=shown, num_params=len(touched), stages=stages))
    result += [some[0] for some in by_key(((one.path, one.phase), one) for one in suspects).values()]
    return sorted(result, key=_when)


def _when(suspect: Suspect) -> tuple[int, int, float]:
    return suspect.step, PHASES.index(suspect.phase), suspect.event.order


def are_nearly_all(num_touched: int, num_params: int) -> bool:
    """Return whether so many of the parameters differ at once that no single parameter is blamed."""
    return num_touched >= max(_MIN_ALIKE, _ALIKE_SHARE * num_params)


def _stages_alike(
    touched: set[tuple[str, str]], params: set[tuple[str, str]], stage_of: Mapping[tuple[str, str], int | None]
) -> tuple[int, ...]:
    stages = []
    for stage in sorted({stage for stage in stage_of.values() if stage is not None}):
        own = {param for param in params if stage_of.get(param) == stage}
        if are_nearly_all(len(touched & own), len(own)):
            stages.append(stage)
    return tuple(stages)


def _value(event: StepEvent) -> Value:
    return event.root, event.path, event.site, event.name


def _at(path: str, owner: str) -> bool:
    return path == owner or _is_below(path, owner)


def _is_below(path: str, owner: str) -> bool:
    return path.startswith(f"{owner}.") if owner else path != ""
