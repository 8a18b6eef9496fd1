"""Compares what a restart begins with to what the run had before, for the check rule `restart`.

A launcher starts a training again as another attempt of the same run. The probe has the norm of each parameter at each
step before the update, so it shows which step's parameters an attempt has loaded: equal bits have equal norms. Numbers
of steps are no proof, because a `GradScaler` skips updates, and a program may count in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...checks.rule import ComparisonResult, Finding, Severity
from ...checks.rules.comparing import Restart
from ...errors import RunError
from ...numerics.keys import array_of, by_key, column_of, group_rows
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import Run
from ...sites import RATE
from ...system.text import counted, number

_SAME = 1e-6
"""The relative difference up to which norms, and learning rates, are equal."""
_ROUNDED = 5e-4
"""The relative change of a norm that rounding to 16 bits does not reach."""
_RATES = 3
"""The learning rates in a row that are compared."""
_BATCHES = 3
"""The batches in a row that must be those with which the run began."""


class _Key(NamedTuple):
    site: str
    root: str
    module_path: str
    name: str
    numel: int
    """The number of elements. Another number of ranks may give a rank another chunk."""


class _Series(NamedTuple):
    steps: npt.NDArray[np.int64]
    """The steps, ascending, each once."""
    values: npt.NDArray[np.float64]

    def at(self, step: int) -> float:
        """Return the value at a step, or NaN."""
        found = np.searchsorted(self.steps, step)
        is_there = found < len(self.steps) and self.steps[found] == step
        return float(self.values[found]) if is_there else np.nan

    def where(self, value: float) -> npt.NDArray[np.int64]:
        """Return the steps at which the series has a value."""
        return self.steps[np.isclose(self.values, value, rtol=_SAME, atol=0.0)]

    def replaced_by(self, later: _Series) -> _Series:
        """Return the series with the steps of a later attempt."""
        kept = self.steps < later.steps[0]
        return _Series(*(np.concatenate([a[kept], b]) for a, b in zip(self, later, strict=True)))


_Values = dict[_Key, _Series]


def restarts_of(run: Run) -> ComparisonResult:
    """Return what the first rank with several attempts did not restore, as findings."""
    attempts = by_key((one.rank, one.attempt) for one in run.writers if one.rank is not None)
    rank = min((rank for rank, numbers in attempts.items() if len(set(numbers)) > 1), default=None)
    if rank is None:
        return ComparisonResult((), Restart.needs)
    of_rank = sorted((one for one in run.writers if one.rank == rank), key=lambda one: one.started_ns)
    newest = {one.attempt: one for one in of_rank}
    writers = [newest[attempt] for attempt in sorted(newest)]
    size = probe_size(writers)
    if size is None or size.num_numbers > MOST_PROBED:
        why = "the rules keep no number of parameters at every step" if size is None else "the probe is too large"
        return ComparisonResult((), f"after the restart nothing was compared: {why}")
    findings: list[Finding] = []
    before: _Values = {}
    try:
        for writer in writers:
            rows = pa.table({name: writer.column(name) for name in ("site", "name", "step", "mean")})
            values = dict(_values_of(probe_tables([writer]), rows))
            optimizers = writer.manifest.members.get("optimizers") or [{}]
            is_by_state = writer.manifest.step_source == "optimizer"
            counting = str(optimizers[0].get("class", "the optimizer")) if is_by_state else ""
            findings += _judge(before, values, f"attempt {writer.attempt}", counting)
            before |= {key: before[key].replaced_by(one) if key in before else one for key, one in values.items()}
    except RunError as error:
        return ComparisonResult(findings, f"the probe cannot be read: {error}")
    return ComparisonResult(findings, "")


def _values_of(probe: Iterable[Any], rows: Any) -> Iterator[tuple[_Key, _Series]]:
    """Yield the norms of parameters and of the model's inputs, and the learning rates, of one attempt."""
    found: dict[_Key, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]] = {}
    for table in probe:
        is_wanted = pc.or_(
            pc.equal(table["site"], "param"),
            pc.and_(pc.equal(table["site"], "input"), pc.equal(table["module_path"], "")),
        )
        table = table.filter(pc.and_(is_wanted, pc.equal(table["mode"], "train")))
        groups = group_rows(table, _Key._fields)
        cells = (table[name].take(column_of(groups.firsts)).to_pylist() for name in _Key._fields)
        order = np.argsort(groups.ids, kind="stable")
        ends = np.cumsum(np.bincount(groups.ids, minlength=groups.num_groups))[:-1]
        pieces = (np.split(array_of(table[name])[order], ends) for name in ("step", "l2"))
        for key, steps, values in zip(map(_Key, *cells), *pieces, strict=False):  # of no rows there is an empty piece
            found.setdefault(key, []).append((steps, values))
    rows = rows.filter(pc.and_(pc.equal(rows["site"], "scalar"), pc.starts_with(rows["name"].cast(pa.string()), RATE)))
    for row in rows.drop_null().to_pylist():
        key = _Key("scalar", "", "", row["name"], 1)
        found.setdefault(key, []).append((np.array([row["step"]]), np.array([row["mean"]])))
    for key, some in found.items():
        steps, values = map(np.concatenate, zip(*some, strict=True))
        unique, first = np.unique(steps, return_index=True)
        yield key, _Series(unique, values[first])


def _judge(before: _Values, now: _Values, attempt: str, counting: str) -> Iterator[Finding]:
    """Yield what an attempt did not restore. `counting` is the optimizer whose state counts its steps, if one does."""
    known = {key: before[key] for key in now if key in before}
    moving = {key: one for key, one in known.items() if key.site == "param" and np.ptp(one.values) > 0}
    if not moving:
        return
    first = min(int(now[key].steps[0]) for key in moving)
    moving = {key: one for key, one in moving.items() if int(now[key].steps[0]) == first}
    loaded = {key: float(now[key].values[0]) for key in moving}
    begin = min(int(one.steps[0]) for one in moving.values())
    restored = _restored_steps([one.where(loaded[key]) for key, one in moving.items()], first, begin)
    if not restored:
        if _are_far(moving, loaded, first, begin):
            what = f"{attempt} continues at step {first} with other parameters than the run had at this step: "
            yield _on_model(first, what + "other weights were loaded, or none", _LOAD)
        return
    at = min(restored, key=lambda step: abs(step - first))
    others = [key for key, one in moving.items() if not _are_same(one.at(at), loaded[key])]
    if others and at > begin:
        is_new = _are_same(float(moving[others[0]].values[0]), loaded[others[0]])
        detail = f"it is one of {len(others)} that were not, of {counted(len(moving), 'parameter')}"
        detail += "; its norm is that with which the run began" if is_new else ""
        what = f"{attempt} has parameters of step {at}, and this one was not restored"
        yield _on(others[0], first, what, _LOAD, detail)
    if at == begin < first:
        what = f"{attempt} continues at step {first} with the parameters with which the run began: "
        yield _on_model(first, what + "the model was not restored", _LOAD)
    elif at > begin:
        if first == begin and counting:
            what = f"{attempt} has the parameters of step {at}, and {counting} counts its updates anew: "
            yield _on_model(first, what + "the state of the optimizer was not restored", _SAVE_STATE)
        else:
            yield from _rates(known, now, (first, at), range(min(restored) - 1, max(restored) + 2), attempt)
        yield from _batches(known, now, attempt)


_LOAD = "load the checkpoint before the first step; load_state_dict with strict=True says which names do not match"
_SAVE_STATE = "save and load optimizer.state_dict() with the model"


def _restored_steps(hits: list[npt.NDArray[np.int64]], first: int, begin: int) -> list[int]:
    """Return the steps of which an attempt has parameters: several if updates were skipped, and none if unknown.

    Args:
        hits: for each parameter, the steps at which its norm was what it is now.
        first: the first step of the attempt. If the run had any of the parameters then, that is the step.
        begin: the first step of the run. If the steps begin anew, so may the training. Then a later step counts only if
            more than one parameter is of this step, because the norm of one may be the same by chance.
    """
    steps, counts = np.unique(np.concatenate(hits), return_counts=True)
    if first > begin and first in steps:
        all_restored = steps[counts == len(hits)].tolist()
        return all_restored if first in all_restored else [first]
    least = max(len(hits) / 2, 1)
    if first == begin:
        if (counts[steps == begin] == len(hits)).any():
            return [begin]
        steps, counts, least = steps[steps > begin], counts[steps > begin], min(len(hits), 2)
    most = counts.max(initial=0)
    return steps[counts == most].tolist() if most >= least else []


def _are_same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=_SAME, atol=0.0))


def _are_far(moving: Mapping[_Key, _Series], loaded: Mapping[_Key, float], first: int, begin: int) -> bool:
    """Return whether the parameters are far from those that the run had at the first step of the restart.

    They are near if the checkpoint rounded them, or if an attempt was killed after the checkpoint of a step that it did
    not record. If the steps begin anew, the training may do so, too, with other random numbers.
    """
    there = {key: one.at(first) for key, one in moving.items()}
    is_far = [
        abs(loaded[key] - there[key]) > max(abs(one.values[0] - there[key]) / 2, _ROUNDED * loaded[key])
        for key, one in moving.items()
    ]
    return first > begin and 2 * sum(is_far) > len(moving)


def _rates(known: _Values, now: _Values, first: tuple[int, int], near: range, attempt: str) -> Iterator[Finding]:
    """Yield learning rates that differ. The optimizer's state brings the first one, and a scheduler those after it.

    Args:
        known: what the run had before.
        now: what the attempt has.
        first: the first step of the attempt, and the step that it has restored.
        near: the steps whose learning rates the first step may have.
        attempt: the attempt in words.
    """
    for key, one in known.items():
        for more in range(_RATES) if key.site == "scalar" else ():
            here, step = first[0] + more, first[1] + more
            rate, was = now[key].at(here), one.at(step)
            around = [value for other in near if np.isfinite(value := one.at(other + more))]
            if np.isfinite([rate, was]).all() and not min(around) * (1 - _SAME) <= rate <= max(around) * (1 + _SAME):
                what = f"{attempt} has the learning rate {number(rate)}, which was {number(was)} at step {step} before"
                advice = f"{_SAVE_STATE}, and that of the learning-rate scheduler, unless a new schedule is meant"
                yield _on(key, here, what, advice)
                break


def _batches(known: _Values, now: _Values, attempt: str) -> Iterator[Finding]:
    for key, one in known.items():
        if key.site == "input":
            begun, again = one.values[:_BATCHES], now[key].values[:_BATCHES]
            is_same = len(again) == len(begun) == _BATCHES and np.allclose(begun, again, rtol=_SAME, atol=0.0)
            if is_same and len(np.unique(begun)) == _BATCHES:
                what = f"{attempt} reads the batches with which the run began"
                advice = "restore the position in the data, unless the training is to see these batches again"
                yield _on(key, int(now[key].steps[0]), what, advice)._replace(severity=Severity.NOTE)
                return


def _on_model(step: int, what: str, advice: str) -> Finding:
    return _on(_Key("", "", "", "", 0), step, what, advice)


def _on(key: _Key, step: int, what: str, advice: str, detail: str = "") -> Finding:
    where = (step, key.root, key.module_path, key.site, key.name)
    return Finding(Restart.name, Restart.severity, *where, (), what, "", 0.0, 0.0, advice, detail)
