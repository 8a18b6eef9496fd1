"""Owns which stages of a training are culprits: where something differs although all that it is made from agrees.

Everything else that differs inherits. A stage is a module's forward, its backward, the way of gradients from a backward
to the update (reduction, accumulation, clipping), or the update of a parameter. Never reads a payload, never prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .events import Event

FORWARD, BACKWARD, REDUCTION, UPDATE, START = "forward", "backward", "reduction", "update", "start"
PHASES = (FORWARD, BACKWARD, REDUCTION, UPDATE, START)
_ALIKE_SHARE = 0.9
_MIN_ALIKE = 3
"""Parameters that must be wrong at once, and which share of all, for an error that is of none of them."""
MAX_STEPS = 32
"""Steps with differences that are looked at: after the first ones everything inherits."""

Value = tuple[str, str, str, str]
"""Root, module path, site, name."""


class Suspect(NamedTuple):
    """A stage that differs although what it is made from agrees."""

    step: int
    phase: str
    root: str
    path: str | None
    """The module at fault; None where all parameters are touched alike."""
    event: Event
    """The first value that shows it."""
    num_params: int = 1
    """Parameters that are touched, where `path` is None."""
    why: str = ""


class _Step:
    """The events of one step of one root."""

    def __init__(self, root: str, events: Sequence[Event]) -> None:
        self.root = root
        self.events = events
        self.differing = {_value(event) for event in events if event.differs}
        self.known = {_value(event) for event in events}
        self.sites = {event.site for event in events}

    def differs(self, sites: Sequence[str], path: str, *, below: bool = True) -> bool:
        """Whether one of these sites differs at a module, or below it."""
        return any(
            site in sites and (one == path or (below and _is_below(one, path))) for _, one, site, _ in self.differing
        )

    def slices(self, phase: str) -> Iterator[list[Event]]:
        """The events of a phase, micro-step by micro-step."""
        found: dict[Any, list[Event]] = {}
        for event in self.events:
            if event.phase == phase and event.site != "scalar":
                found.setdefault((event.mode, event.micro_step), []).append(event)
        yield from found.values()


class CulpritSearch:
    """Goes through the steps in order; what it needs of a step at the next one it keeps."""

    def __init__(self) -> None:
        self.found: list[Suspect] = []
        self._previous: dict[str, tuple[int, _Step | None]] = {}
        """By root: the last step, and its events where something differed."""
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Whether more steps would tell nothing new."""
        return self._num_steps >= MAX_STEPS

    def equal_step(self, step: int, roots: Iterable[str]) -> None:
        """A step at which nothing differs."""
        for root in roots:
            self._previous[root] = step, None

    def step(self, step: int, events: Sequence[Event]) -> list[Suspect]:
        """The culprits of a step."""
        self._num_steps += 1
        found: list[Suspect] = []
        for root in dict.fromkeys(event.root for event in events):
            now = _Step(root, [event for event in events if event.root == root])
            before = self._previous.get(root)
            of_root = [*_states(step, now, before), *_forward(step, now, before), *_backward(step, now)]
            found += _collapsed([*of_root, *_gradients(step, now)], now)
            self._previous[root] = step, now
        known = {(one.root, one.path, one.phase, one.event.alone) for one in self.found}
        fresh = [one for one in found if (one.root, one.path, one.phase, one.event.alone) not in known]
        self.found += fresh
        return fresh


def _forward(step: int, now: _Step, before: tuple[int, _Step | None] | None) -> Iterator[Suspect]:
    old = before[1] if before else None
    for events in now.slices("forward"):
        begins = _beginnings(events, "input")
        bad: list[Event] = []
        for event in events:
            if not event.differs:
                continue
            is_input = event.site == "input"
            owner = _caller(event.path, events) if is_input else event.path
            if owner is None:
                if not bad:
                    yield Suspect(step, FORWARD, now.root, "", event, why="the root was given something else")
            elif not _inside(bad, owner, begins.get((owner, event.call)), event, is_input=is_input) and not (
                now.differs(("param",), owner, below=not is_input)
                or (old is not None and old.differs(("buffer",), owner, below=not is_input))
            ):
                yield Suspect(step, FORWARD, now.root, owner, event)
            bad.append(event)


def _inside(bad: Sequence[Event], owner: str, begins: float | None, event: Event, *, is_input: bool) -> bool:
    """Whether something that a call is made from differs: its own inputs, or what ran inside it before.

    Args:
        bad: what differs so far.
        owner: whose call it is.
        begins: when its inputs were seen; None where they were not recorded, so that all before it may be its input.
        event: what is looked at.
        is_input: whether it is the input of a module that the owner calls.
    """
    if begins is None and not (owner == "" and is_input):
        return bool(bad)
    return any(
        (one.path == owner and one.site == "input") or _is_below(one.path, owner) or (one.path == owner and is_input)
        for one in bad
        if begins is None or one.order >= begins or one.path == owner
    )


def _beginnings(events: Sequence[Event], site: str) -> dict[tuple[str, int], float]:
    """When each call's first value at a site was seen, by module and call."""
    found: dict[tuple[str, int], float] = {}
    for event in events:
        if event.site == site:
            found.setdefault((event.path, event.call), event.order)
    return found


def _caller(path: str, events: Sequence[Event]) -> str | None:
    """The module whose code calls another: the nearest one above it that was itself called; None above the root."""
    called = {event.path for event in events}
    while path:
        path = path.rpartition(".")[0]
        if path in called:
            return path
        if not path:
            return ""
    return None


def _backward(step: int, now: _Step) -> Iterator[Suspect]:
    forwards = {(events[0].mode, events[0].micro_step): events for events in now.slices("forward")}
    for events in now.slices("backward"):
        forward = forwards.get((events[0].mode, events[0].micro_step), [])
        of_output = {event.path for event in events if event.site == "grad_output"}
        bad: list[Event] = []
        for event in events:
            if not event.differs or event.alone == "b":  # which parameters have gradients now, these say themselves
                continue
            owner = event.path
            if event.site == "grad_output" and event.path:
                owner = _consumer(event, forward)
            is_made_right = not _wrong_output_gradient(events, bad, owner, of_output, event)
            if is_made_right and not any(one.differs and _at(one.path, owner) for one in forward):
                why = "the loss" if event.path == "" and event.site == "grad_output" else ""
                yield Suspect(step, BACKWARD, now.root, owner, event, why=why)
            bad.append(event)


def _wrong_output_gradient(
    events: Sequence[Event], bad: Sequence[Event], owner: str, of_output: set[str], event: Event
) -> bool:
    """Whether the gradient that came into a module's backward differs, or something inside it did before."""
    if owner == "" and event.path == "" and event.site == "grad_output":
        return any(one.site == "grad_output" and one.path == "" for one in bad)
    behind = event.path if event.path != owner else None  # what is made from this very gradient
    if any(_is_below(one.path, owner) and (behind is None or not _at(one.path, behind)) for one in bad):
        return True
    if owner in of_output:
        return any(one.differs and one.path == owner and one.site == "grad_output" for one in events)
    return bool(bad)


def _consumer(event: Event, forward: Sequence[Event]) -> str:
    """The module in whose backward the gradient of an output was made.

    It is the one that was given the output, if that is known; else the one whose code called the module.
    """
    output = next(
        (one for one in forward if one.site == "output" and _same_place(one, event)),
        None,
    )
    caller = _caller(event.path, forward)
    if output is None:
        return caller or ""
    later = [one for one in forward if one.order > output.order and not _at(event.path, one.path)]
    takers = [one.path for one in later if one.site == "input" and one.signature == output.signature is not None]
    if takers:
        outermost = takers[0]
        inside = [path for path in takers if _is_below(path, outermost)]
        return inside[-1] if inside else outermost
    if not any(one.site == "input" and one.path for one in forward):
        following = next(
            (one.path for one in later if one.site == "output" and _caller(one.path, forward) == caller), None
        )
        return following if following is not None else caller or ""
    return caller or ""


def _same_place(one: Event, other: Event) -> bool:
    return (one.path, one.name, one.call) == (other.path, other.name, other.call)


def _gradients(step: int, now: _Step) -> Iterator[Suspect]:
    """Final gradients that are wrong although the backward was right, or is not known to be wrong."""
    local = {(event.path, event.name) for event in now.events if event.site == "grad" and event.scope == "local"}
    has_flow = {event.path for event in now.events if event.site in ("output", "grad_output")}
    any_flow = any(event.differs and event.phase in ("forward", "backward") for event in now.events)
    for event in now.events:
        if event.site != "grad" or event.phase != "optimizer" or not event.differs:
            continue
        if event.alone == "b":
            yield Suspect(step, BACKWARD, now.root, event.path, event, why="it had no gradient")
        elif now.differs(("param",), event.path, below=False):
            continue
        elif (event.path, event.name) in local:
            is_local = any(
                one.differs and one.scope == "local" and (one.path, one.name) == (event.path, event.name)
                for one in now.events
            )
            if not is_local:
                yield Suspect(step, REDUCTION, now.root, event.path, event)
        elif not any_flow or (
            event.path in has_flow
            and event.path != ""
            and not now.differs(("input", "output", "grad_input", "grad_output"), event.path, below=False)
        ):
            yield Suspect(step, REDUCTION if event.ranks else BACKWARD, now.root, event.path, event)


def _states(step: int, now: _Step, before: tuple[int, _Step | None] | None) -> Iterator[Suspect]:
    """Parameters, buffers and optimizer state that differ although they did not before, nor what they are made from."""
    old = before[1] if before else None
    is_next = before is not None and before[0] == step - 1
    for event in now.events:
        if not event.differs or event.site not in ("param", "optim", "buffer", "scalar"):
            continue
        if old is not None and _value(event) in old.differing:
            continue
        if event.site == "scalar":
            if event.name.startswith("lr."):
                yield Suspect(step, UPDATE, now.root, None, event, why="the learning rate")
        elif event.site == "buffer":
            if not now.differs(("input", "param"), event.path):
                yield Suspect(step, FORWARD if is_next else START, now.root, event.path, event)
        elif event.site == "optim":
            made_from = [(now.root, event.path, site, event.name.partition(".")[0]) for site in ("grad", "param")]
            if not any(one in now.differing for one in made_from):
                yield Suspect(step, UPDATE, now.root, event.path, event)
        elif not is_next:
            yield Suspect(step, START, now.root, event.path, event)
        elif old is None or not _inherits_update(event, old):
            yield Suspect(step - 1, UPDATE, now.root, event.path, event)


def _inherits_update(event: Event, old: _Step) -> bool:
    """Whether what a parameter was updated with differed."""
    if (event.root, event.path, "grad", event.name) in old.known:
        return any(
            path == event.path and (name == event.name or (site == "optim" and name.startswith(f"{event.name}.")))
            for _, path, site, name in old.differing
            if site in ("grad", "optim", "param")
        )
    return bool(old.differing)


def _collapsed(found: list[Suspect], now: _Step) -> list[Suspect]:
    """One suspect for each module and phase, and one for all parameters where they are touched alike."""
    params = {(path, name) for _, path, site, name in now.known if site in ("grad",)}
    params = params or {(path, name) for _, path, site, name in now.known if site == "param"}
    result: list[Suspect] = []
    for phase in (REDUCTION, BACKWARD, UPDATE, START):
        of_params = [one for one in found if one.phase == phase and one.event.site in ("grad", "param", "optim")]
        touched = {(one.path, one.event.name.partition(".")[0]) for one in of_params}
        if len(touched) >= max(_MIN_ALIKE, _ALIKE_SHARE * len(params)):
            found = [one for one in found if one not in of_params]
            if not any(one.path is None and one.phase == phase for one in found):
                result.append(of_params[0]._replace(path=None, num_params=len(touched)))
    seen: set[tuple[str | None, str]] = set()
    for one in found:
        if (one.path, one.phase) not in seen:
            seen.add((one.path, one.phase))
            result.append(one)
    return sorted(result, key=lambda one: (one.step, _time(one)))


def _time(one: Suspect) -> tuple[int, float]:
    return PHASES.index(one.phase) if one.phase != START else -1, one.event.order


def _value(event: Event) -> Value:
    return event.root, event.path, event.site, event.name


def _at(path: str, owner: str) -> bool:
    return path == owner or _is_below(path, owner)


def _is_below(path: str, owner: str) -> bool:
    return path.startswith(f"{owner}.") if owner else path != ""
