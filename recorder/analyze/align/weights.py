"""Finds out which step of the trainer each parameter of an engine comes from: by fingerprints, else by values.

An engine may fuse several parameters into one (`qkv_proj`, `gate_up_proj`). The fused parameter's fingerprint is
compared with the sum of the slices' fingerprints, each moved to the slice's offset. So a stale slice is named without
reading any element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...columns import parse_shape
from ...numerics.dtypes import ITEM_BYTES
from ...run.run import Run, moved
from ...run.selection import Selection
from ...system.text import counted
from ..diff.renames import NO_RENAMES, Renames

EQUAL, STALE, DIFFERS, UNKNOWN = "equal", "stale", "differs", "not comparable"
TRAINER_ONLY, ENGINE_ONLY, MERGED, OTHER = "in the trainer alone", "in the engine alone", "merged", "merged otherwise"
WRONG = (STALE, DIFFERS, TRAINER_ONLY, ENGINE_ONLY, OTHER)
_MODULUS = 1 << 64
_ROUNDED = 2**-8
"""The largest relative difference between a tensor's norms in two dtypes: one rounding to bfloat16."""


class WeightState(NamedTuple):
    """How one parameter compares between trainer and engine."""

    name: str
    """The full name in the trainer; the name in the engine if the trainer does not have the parameter."""
    state: str
    """The result of the comparison: one of this module's constants, such as `EQUAL`."""
    step: int | None = None
    """The trainer's step at which the parameter equals the engine's. None if it does so at no recorded step."""
    behind: int | None = None
    """How many updates the engine's parameter is behind the one that the trainer computed with."""
    fused: str = ""
    """The engine's fused parameter of which this parameter is a slice; empty if it is not fused."""

    @property
    def module_path(self) -> str:
        return self.name.rpartition(".")[0]


class ParameterRow(NamedTuple):
    """A parameter's row in the global view (the tensors of all ranks put together); `at` is the row's index."""

    at: int
    step: int
    root: str
    module_path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str | None
    fingerprint: str | None
    l2: float | None


class ModelParameters:
    """The rows of one model's parameters in a run, in the order of the model."""

    def __init__(self, run: Run, root: str, renames: Renames = NO_RENAMES) -> None:
        self.modules = {path: info for (own, path), info in run.modules.items() if own == root}
        self._global = run.view().rows()
        table = renames.apply(self._global.table).append_column("at", pa.array(np.arange(len(self._global))))
        rows = Selection(site="param").narrow(table).select(ParameterRow._fields).to_pylist()
        self.rows = [ParameterRow(**{**row, "shape": parse_shape(row["shape"])}) for row in rows if row["root"] == root]

    def array(self, row: ParameterRow) -> npt.NDArray[Any]:
        return self._global.array(row.at)

    def by_name(self, until: int | None = None) -> dict[str, _Parameter]:
        """Return each parameter by its full name, with its rows up to the step `until`."""
        rows: dict[str, dict[int, ParameterRow]] = {}
        for row in self.rows:
            if until is None or row.step <= until:
                rows.setdefault(".".join(filter(None, (row.module_path, row.name))), {})[row.step] = row
        return {name: _Parameter(own[max(own)], own) for name, own in rows.items()}


class _Parameter(NamedTuple):
    newest: ParameterRow
    rows: Mapping[int, ParameterRow]
    """By step, the newest row of the parameter."""


def compare_weights(
    trainer: ModelParameters, engine: ModelParameters, steps: Mapping[int, int]
) -> tuple[int | None, list[WeightState]]:
    """Return the trainer's step to compare with, and the state of each parameter, in the order of the trainer's model.

    The engine's parameters are those of its last step that recorded parameters and has tokens in common with the
    trainer. `steps` maps each step of the engine to the trainer's step with the same tokens.
    """
    recorded = {row.step for row in engine.rows}
    last = max((step for step in steps if step in recorded), default=None)
    if last is None or not trainer.rows:
        return None, []
    now = steps[last]
    ours, theirs = trainer.by_name(), engine.by_name(until=last)
    fused = {state.name: state for state in _fused(ours, theirs, now)}
    parts = {state.fused for state in fused.values()}
    packed = [name for name, one in theirs.items() if 0 in one.newest.shape]  # the engine has an order of its own
    alone = UNKNOWN if packed else TRAINER_ONLY
    states = []
    for name, one in ours.items():
        if name in theirs:
            states.append(_state(trainer, engine, name, one, theirs[name], now))
        elif name in fused or not _is_tied(one, name, ours):
            states.append(fused.get(name) or WeightState(name, UNKNOWN if ".base_layer." in name else alone))
    rest = [name for name in theirs.keys() - {*ours, *parts, *packed} if not _is_tied(theirs[name], name, theirs)]
    for name in sorted(rest):  # the trainer records only updated parameters; an adapter moves the parameters
        path, _, own = name.rpartition(".")
        info = trainer.modules.get(path)
        is_other = info is not None and (own in info.tied or (bool(info.params) and own not in info.params))
        states.append(WeightState(name, ENGINE_ONLY if is_other else UNKNOWN))
    return now, states


def _is_tied(one: _Parameter, name: str, own: Mapping[str, _Parameter]) -> bool:
    """Return whether another parameter has this fingerprint. The other run may then have only the other name."""
    prints = {other.newest.fingerprint for path, other in own.items() if path != name}
    return one.newest.fingerprint is not None and one.newest.fingerprint in prints


def _state(
    trainer: ModelParameters, engine: ModelParameters, name: str, one: _Parameter, two: _Parameter, now: int
) -> WeightState:
    theirs = two.newest
    if one.newest.shape != two.newest.shape:
        return WeightState(name, UNKNOWN if 0 in two.newest.shape else DIFFERS)
    if one.newest.dtype == two.newest.dtype and theirs.fingerprint is not None:
        steps = [step for step, row in one.rows.items() if row.fingerprint == theirs.fingerprint]
        return _told(name, one, steps, now)
    if (ours := one.rows.get(now)) is None:
        return WeightState(name, UNKNOWN)
    if ours.encoding is not None and theirs.encoding is not None:
        a, b = trainer.array(ours), engine.array(theirs)
        narrow = b.dtype if b.dtype.itemsize <= a.dtype.itemsize else a.dtype
        return _told(name, one, [now] if np.array_equal(a.astype(narrow), b.astype(narrow)) else [], now)
    is_near = ours.l2 is None or theirs.l2 is None or math.isclose(ours.l2, theirs.l2, rel_tol=_ROUNDED)
    return WeightState(name, UNKNOWN if is_near else DIFFERS)


def _told(name: str, one: _Parameter, steps: Sequence[int], now: int, fused: str = "") -> WeightState:
    """Return a parameter's state. At `steps` it equals the engine's parameter. It should at the step `now`."""
    if now in steps:
        return WeightState(name, EQUAL, now, 0, fused)
    known = max((step for step in one.rows if step <= now), default=None)  # the trainer may have recorded few steps
    if known is None or (known < now and (known in steps or not steps)):
        return WeightState(name, UNKNOWN, fused=fused)
    if not steps:
        return WeightState(name, DIFFERS, fused=fused)
    nearest = min(steps, key=lambda step: abs(step - now))
    return WeightState(name, STALE, nearest, now - nearest, fused)


def _fused(ours: Mapping[str, _Parameter], theirs: Mapping[str, _Parameter], now: int) -> Iterator[WeightState]:
    """Yield the state of each of the trainer's parameters that is a slice of a fused parameter in the engine."""
    for name, whole in theirs.items():
        row = whole.newest
        if name in ours or not row.shape:
            continue
        parent, own = name.rpartition(".")[0].rpartition(".")[0], name.rpartition(".")[2]
        siblings = [
            other for other, one in ours.items()
            if other not in theirs and one.newest.shape and one.newest.shape[1:] == row.shape[1:]
            and one.newest.dtype == row.dtype and other.rpartition(".")[2] == own
            and other.rpartition(".")[0].rpartition(".")[0] == parent
        ]  # fmt: skip
        if slices := _adding_up(siblings, ours, row.shape[0]):
            yield from _slices(name, slices, ours, whole, now)


def _adding_up(names: Sequence[str], ours: Mapping[str, _Parameter], size: int) -> Sequence[str]:
    for first in range(len(names)):
        for last in range(first + 2, len(names) + 1):
            if sum(ours[name].newest.shape[0] for name in names[first:last]) == size:
                return names[first:last]
    return ()


def _slices(
    fused: str, names: Sequence[str], ours: Mapping[str, _Parameter], whole: _Parameter, now: int
) -> Iterator[WeightState]:
    # First all slices are assumed to be of step `now`, then one slice of another step, then all slices of another step.
    offsets = np.cumsum([0, *(ours[name].newest.shape[0] for name in names)]).tolist()
    row = whole.newest
    places = [
        {
            step: moved(int(one.fingerprint, 16), ITEM_BYTES[row.dtype], (offset, *[0] * (len(row.shape) - 1)))
            for step, one in ours[name].rows.items() if one.fingerprint is not None
        }
        for name, offset in zip(names, offsets, strict=False)
    ]  # fmt: skip
    wanted = whole.newest.fingerprint
    if wanted is None or not all(now in own for own in places):
        yield from (WeightState(name, UNKNOWN, fused=fused) for name in names)
        return
    at = [now] * len(places)
    tries = [at, *([*at[:i], step, *at[i + 1 :]] for i, own in enumerate(places) for step in own)]
    tries += [[step] * len(at) for step in places[0] if all(step in own for own in places)]
    sums = (sum(own[step] for own, step in zip(places, steps, strict=True)) % _MODULUS for steps in tries)
    found = next((steps for steps, total in zip(tries, sums, strict=True) if total == int(wanted, 16)), None)
    for number, name in enumerate(names):
        yield _told(name, ours[name], [] if found is None else [found[number]], now, fused)


def told_weight(state: WeightState) -> str:
    """Return what is wrong with a parameter, as a sentence."""
    name = f"{state.name} (a slice of {state.fused})" if state.fused else state.name
    if state.state == STALE:
        behind = state.behind or 0
        how = f"stale by {counted(behind, 'update')}" if behind > 0 else "later than the compared step"
        return f"{name} is the trainer's of step {state.step}: {how}"
    return {
        DIFFERS: f"{name} equals the trainer's parameter at no recorded step",
        TRAINER_ONLY: f"{name} is in the trainer alone (an adapter that was not merged?)",
        ENGINE_ONLY: f"{name} is in the engine alone (a tie that was lost?)",
        OTHER: f"the engine has merged another adapter than that of {name}, as of an earlier update",
    }.get(state.state, f"{name}: {state.state}")
