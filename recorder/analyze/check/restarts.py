"""Compares what a restart begins with to what the run had before, for the check rule `restart`.

A launcher starts a training again as another attempt of the same run, and a person as a run of its own. The probe has
the norm of each parameter at each step before the update, so it shows which step's parameters an attempt has loaded:
equal bits have equal norms. Numbers of steps are no proof, because a `GradScaler` skips updates, and a program may
count in its own way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...checks.rule import ComparisonResult, Finding, Severity
from ...checks.rules.comparing import Restart
from ...errors import RecorderError, RunError
from ...numerics.keys import array_of, by_key, column_of, group_rows
from ...run.finding import ListedRun, runs_in
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import RecordedWriter, Run, open_location
from ...sites import RATE
from ...system.text import counted, number

_SAME = 1e-6
"""The relative difference up to which norms, and learning rates, are equal."""
_ROUNDED = 5e-4
"""The relative change of a norm that rounding to 16 bits does not reach."""
_RATES = 3
"""The learning rates in a row that are compared."""
_RECENT = 32
"""How many of the last learning rates tell how fast they rise."""
_MOST_EARLIER = 3
"""The most earlier runs of the program that are read. The last ones may have failed before their first step."""
_MOMENT = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""The end of a run's name that the recorder made. Before it stands the program."""
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
    """Return, as findings, what attempts of a rank did not restore, and what the run did not restore of an earlier run.

    The rank is the first one with several attempts, or the first one.
    """
    attempts = by_key((one.rank, one.attempt) for one in run.writers if one.rank is not None)
    several = [rank for rank, numbers in attempts.items() if len(set(numbers)) > 1]
    rank = min(several or attempts, default=None)
    earlier = _earlier_runs(run)
    if not several and not earlier:
        return ComparisonResult((), Restart.needs)
    findings: list[Finding] = []
    continued = None
    try:
        writers = _attempts(run, rank)
        if why := _why_not_read(writers):
            why = f"after the restart nothing was compared: {why}" if several else Restart.needs
            return ComparisonResult((), why)
        before: _Values = {}
        for writer in writers:
            values = _read(writer)
            if writer is writers[0]:
                continued = _continued(earlier, run.name, rank, values)
                if continued is not None:
                    of_other = (continued.start, continued.values, values, "the run", continued.name)
                    findings += _judge(*of_other, _counting(writer))
            elif start := _Start.of(before, values, is_other_run=False):
                findings += _judge(start, before, values, f"attempt {writer.attempt}", "", _counting(writer))
            before = _replaced(before, values)
    except RunError as error:
        return ComparisonResult(findings, f"the probe cannot be read: {error}")
    if continued is None:
        return ComparisonResult(findings, "" if several else Restart.needs)
    step, end = continued.start.step, continued.start.end
    note = f"the run began with parameters of {continued.name}, of its step {step}"
    if step == end:
        note = f"the run seems to continue {continued.name} after its last step, {end - 1}"
    return ComparisonResult(findings, "", [note])


class _Earlier(NamedTuple):
    name: str
    values: _Values
    start: _Start
    """With what the later run begins, of what this one had."""


def _earlier_runs(run: Run) -> list[ListedRun]:
    """Return the last runs of the program before a run, in the same folder, the newest first."""
    folder, program = run.path.parent, _MOMENT.sub("", run.name)
    if not isinstance(folder, Path):  # a listing of an object store may take long
        return []
    earlier = []
    with suppress(RecorderError):  # a folder that cannot be listed
        earlier = [one for one in runs_in(folder) if one.created_ns < (run.manifest.created_ns or 0)]
    of_program = [
        one for one in earlier if _MOMENT.sub("", one.name) == program and one.run_id
    ]  # a merged run has none
    return of_program[-_MOST_EARLIER:][::-1]


def _continued(earlier: Sequence[ListedRun], run_name: str, rank: int | None, now: _Values) -> _Earlier | None:
    """Return what the first of some runs had whose parameters a run began with. None without one."""
    for one in earlier:
        with suppress(RecorderError):  # a run that cannot be opened has problems of its own
            writers = _attempts(open_location(one.location), rank)
            if not _why_not_read(writers):
                values = functools.reduce(_replaced, (_read(writer) for writer in writers))
                if start := _Start.of(values, now, is_other_run=True):
                    names = [other.name for other in earlier]
                    name = one.name if one.name != run_name and names.count(one.name) == 1 else one.location.name
                    return _Earlier(name, values, start)
    return None


def _attempts(run: Run, rank: int | None) -> list[RecordedWriter]:
    """Return the newest writer of each attempt of a rank, the first attempt first."""
    of_rank = sorted((one for one in run.writers if one.rank == rank), key=lambda one: one.started_ns)
    newest = {one.attempt: one for one in of_rank}
    return [newest[attempt] for attempt in sorted(newest)]


def _why_not_read(writers: Sequence[RecordedWriter]) -> str:
    size = probe_size(writers)
    if size is None:
        return "the rules keep no number of parameters at every step"
    return "the probe is too large" if size.num_numbers > MOST_PROBED else ""


def _read(writer: RecordedWriter) -> _Values:
    """Return the norms of parameters, updates and the model's inputs, and the learning rates, of one attempt."""
    found: dict[_Key, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]] = {}
    for table in probe_tables([writer]):
        is_wanted = pc.or_(
            pc.is_in(table["site"].cast(pa.string()), pa.array(["param", "update"])),
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
    rows = pa.table({name: writer.column(name) for name in ("site", "name", "step", "mean")})
    rows = rows.filter(pc.and_(pc.equal(rows["site"], "scalar"), pc.starts_with(rows["name"].cast(pa.string()), RATE)))
    for row in rows.drop_null().to_pylist():
        key = _Key("scalar", "", "", row["name"], 1)
        found.setdefault(key, []).append((np.array([row["step"]]), np.array([row["mean"]])))
    read: _Values = {}
    for key, some in found.items():
        steps, values = map(np.concatenate, zip(*some, strict=True))
        unique, first = np.unique(steps, return_index=True)
        read[key] = _Series(unique, values[first])
    return read


def _replaced(before: _Values, later: _Values) -> _Values:
    """Return what several attempts had, of which the later one replaces steps of those before."""
    return before | {key: before[key].replaced_by(one) if key in before else one for key, one in later.items()}


def _counting(writer: RecordedWriter) -> str:
    """Return the optimizer whose state counts the steps. Empty if none does."""
    optimizers = writer.manifest.members.get("optimizers") or [{}]
    return str(optimizers[0].get("class", "the optimizer")) if writer.manifest.step_source == "optimizer" else ""


class _Start(NamedTuple):
    """With what an attempt begins."""

    moving: dict[_Key, _Series]
    """The parameters that changed before the attempt and that it has at its first step, as they were before."""
    loaded: dict[_Key, float]
    """What these are at the first step."""
    first: int
    """The first step of the attempt."""
    begin: int
    """The first step before the attempt."""
    end: int
    """The step after the last one before the attempt."""
    hits: dict[_Key, npt.NDArray[np.int64]]
    """The steps before that a parameter may be of."""
    restored: list[int]
    """The steps before whose parameters were loaded: several if updates were skipped, and none if unknown."""

    @property
    def step(self) -> int:
        """The step of `restored` that is nearest to the first one."""
        return min(self.restored, key=lambda step: abs(step - self.first))

    @classmethod
    def of(cls, before: _Values, now: _Values, *, is_other_run: bool) -> _Start | None:
        """Return None if parameters tell nothing, or if nothing shows that a run continues another one."""
        parameters = [key for key in now if key.site == "param"]
        shared = {key: before[key] for key in parameters if key in before}
        moving = {key: one for key, one in shared.items() if np.ptp(one.values) > 0}
        if not moving or (is_other_run and 2 * len(shared) < len(parameters)):
            return None
        first = min(int(now[key].steps[0]) for key in moving)
        moving = {key: one for key, one in moving.items() if int(now[key].steps[0]) == first}
        loaded = {key: float(now[key].values[0]) for key in moving}
        begin = min(int(one.steps[0]) for one in moving.values())
        end = max(int(one.steps[-1]) for one in moving.values()) + 1
        hits = {key: one.where(loaded[key]) for key, one in moving.items()}
        least = max(len(hits) / 2, 2) if is_other_run else 0
        restored = _restored_steps([*hits.values()], first, begin, least)
        # What the last update did not move has the norm of the last step, too.
        num = max((sum(step in steps for steps in hits.values()) for step in restored), default=0)
        after, is_at_end = _after(before, moving, loaded, end)
        is_end = first == end or (first == begin and is_other_run and sum(is_at_end) >= least)
        most, num_after = num - (first == end or end - 1 in restored[1:]), sum(map(len, after.values()))
        if is_end and num_after > most and num_after >= max(least, len(hits) / 2):
            hits, restored = after, [end]
        # Some programs count from 1.
        if is_other_run and not (restored and (first > begin + 1 or max(restored) > begin)):
            return None
        return cls(moving, loaded, first, begin, end, hits, restored)


def _after(
    before: _Values, moving: Mapping[_Key, _Series], loaded: Mapping[_Key, float], end: int
) -> tuple[dict[_Key, npt.NDArray[np.int64]], list[bool]]:
    """Return which parameters may be those after the last update, and which are no others.

    These were not recorded. An update changes the norm of a parameter by at most the norm of the update.
    """
    hits, is_at_end = {}, []
    for key, one in moving.items():
        update = before.get(key._replace(site="update"), one)
        last = one.at(end - 1)
        reach = max((1 + _ROUNDED) * update.at(end - 1), _SAME * last)
        is_near = abs(loaded[key] - last) <= reach
        hits[key] = np.array([end] * bool(is_near))
        is_at_end.append(bool(is_near and abs(one.values[0] - last) > 2 * reach))
    return hits, is_at_end


def _judge(start: _Start, before: _Values, now: _Values, attempt: str, other: str, counting: str) -> list[Finding]:
    """Return what an attempt did not restore, or what a run did not of another one.

    Args:
        start: with what the attempt begins.
        before: what the attempts before had, or the other run.
        now: what the attempt has.
        attempt: the attempt in words.
        other: the name of the other run; empty for an attempt.
        counting: the optimizer whose state counts the steps of the attempt, if one does.
    """
    if not start.restored:
        what = f"{attempt} continues at step {start.first} with other parameters than the run had by then: "
        is_far = not other and _are_far(start)
        return [_on_model(start.first, what + "other weights were loaded, or none", _LOAD)] if is_far else []
    at = start.step
    of_other, earlier = (f" of {other}", other) if other else ("", "the run")
    findings = [*_parameters(start, at, attempt, of_other, earlier)]
    if at > start.begin:
        if start.first == start.begin and counting:
            what = f"{attempt} has the parameters of step {at}{of_other}, and {counting} counts its updates anew: "
            findings.append(_on_model(start.first, what + "the state of the optimizer was not restored", _SAVE_STATE))
        elif at == start.end:
            findings += _risen_rates(before, now, start, attempt, of_other)
        else:
            findings += _rates(before, now, start, attempt, of_other)
        findings += _batches(before, now, attempt, earlier)
    # Another run may be continued with other parameters, or at another rate, on purpose.
    is_sure = not other or at == start.begin
    return [one if is_sure else one._replace(severity=Severity.NOTE) for one in findings]


def _parameters(start: _Start, at: int, attempt: str, of_other: str, earlier: str) -> Iterator[Finding]:
    """Yield parameters that are not of the step `at`, of which others are."""
    others = [key for key, steps in start.hits.items() if at not in steps]
    if others and at > start.begin:
        is_new = _are_same(float(start.moving[others[0]].values[0]), start.loaded[others[0]])
        detail = f"it is one of {len(others)} that were not, of {counted(len(start.moving), 'parameter')}"
        detail += f"; its norm is that with which {earlier} began" if is_new else ""
        what = f"{attempt} has parameters of step {at}{of_other}, and this one was not restored"
        yield _on(others[0], start.first, what, _LOAD, detail)
    if at == start.begin < start.first:
        what = f"{attempt} continues at step {start.first} with the parameters with which {earlier} began: "
        yield _on_model(start.first, what + "the model was not restored", _LOAD)


_LOAD = "load the checkpoint before the first step; load_state_dict with strict=True says which names do not match"
_SAVE_STATE = "save and load optimizer.state_dict() with the model"
_RATES_ADVICE = f"{_SAVE_STATE}, and that of the learning-rate scheduler, unless a new schedule is meant"


def _restored_steps(hits: list[npt.NDArray[np.int64]], first: int, begin: int, least: float) -> list[int]:
    """Return the steps of which an attempt has parameters.

    Args:
        hits: for each parameter, the steps at which its norm was what it is now.
        first: the first step of the attempt. If the run had any of the parameters then, that is the step.
        begin: the first step of the run. If the steps begin anew, so may the training. Then a later step counts only if
            more than one parameter is of this step, because the norm of one may be the same by chance.
        least: how many parameters must be of one step. 0 for an attempt, of which it is known that it continues.
    """
    if first == begin:  # a parameter that did not change at once, such as a bias, is of the first step
        hits = [steps[:1] if begin in steps else steps for steps in hits]
    steps, counts = np.unique(np.concatenate(hits), return_counts=True)
    if first > begin and first in steps:
        all_restored = steps[counts == len(hits)].tolist()
        return all_restored if first in all_restored else [first] if counts[steps == first] >= least else []
    if first == begin:
        if (counts[steps == begin] == len(hits)).any():
            return [begin]
        steps, counts, least = steps[steps > begin], counts[steps > begin], least or min(len(hits), 2)
    most = counts.max(initial=0)
    return steps[counts == most].tolist() if most >= (least or max(len(hits) / 2, 1)) else []


def _are_same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=_SAME, atol=0.0))


def _are_far(start: _Start) -> bool:
    """Return whether the parameters are far from those that the run had at the first step of the restart, or last.

    They are near if the checkpoint rounded them, or if an attempt was killed after the checkpoint of a step that it did
    not record. If the steps begin anew, the training may do so, too, with other random numbers.
    """
    num_far = 0
    for key, one in start.moving.items():
        loaded = start.loaded[key]
        there = float(one.values[-1]) if start.first > one.steps[-1] else one.at(start.first)
        num_far += abs(loaded - there) > max(abs(one.values[0] - there) / 2, _ROUNDED * loaded)
    return start.first > start.begin and 2 * num_far > len(start.moving)


def _rates(before: _Values, now: _Values, start: _Start, attempt: str, of: str) -> Iterator[Finding]:
    """Yield learning rates that differ. The optimizer's state brings the first one, and a scheduler those after it.

    The first step may have a rate of any step beside those that were restored. `of` is as in `_other_rate`.
    """
    near = range(min(start.restored) - 1, max(start.restored) + 2)
    for key in (key for key in now if key.site == "scalar" and key in before):
        one = before[key]
        for more in range(_RATES):
            here, step = start.first + more, start.step + more
            rate, was = now[key].at(here), one.at(step)
            around = [value for other in near if np.isfinite(value := one.at(other + more))]
            if np.isfinite([rate, was]).all() and not min(around) * (1 - _SAME) <= rate <= max(around) * (1 + _SAME):
                yield _other_rate(key, here, rate, was, step, attempt, of)
                break


def _risen_rates(before: _Values, now: _Values, start: _Start, attempt: str, of: str) -> Iterator[Finding]:
    """Yield, as notes, learning rates that rise after the last step by more than in the steps before it."""
    for key, one in before.items():
        if key.site == "scalar" and key in now:
            rises = np.diff(one.values[-_RECENT:]).max(initial=0)
            was = one.at(start.end - 1)
            for step in range(start.first, start.first + _RATES):
                rate, last = now[key].at(step), now[key].at(step - 1) if step > start.first else was
                if rate - last > (1 + _SAME) * rises and rate > 1.1 * was:
                    detail = "as at the first step" if _are_same(rate, one.at(start.begin)) else ""
                    found = _other_rate(key, step, rate, was, start.end - 1, attempt, of)
                    # A cycle of a schedule may end there.
                    yield found._replace(severity=Severity.NOTE, detail=detail)
                    break


def _other_rate(key: _Key, step: int, rate: float, was: float, then: int, attempt: str, of: str) -> Finding:
    """Return a finding on a learning rate. `of` names the run that it was of at the step `then`, if another one."""
    had = f"{number(was)} at step {then}{of or ' before'}"
    return _on(key, step, f"{attempt} has the learning rate {number(rate)}, which was {had}", _RATES_ADVICE)


def _batches(before: _Values, now: _Values, attempt: str, earlier: str) -> Iterator[Finding]:
    for key, one in before.items():
        if key.site == "input" and key in now:
            begun, again = one.values[:_BATCHES], now[key].values[:_BATCHES]
            is_same = len(again) == len(begun) == _BATCHES and np.allclose(begun, again, rtol=_SAME, atol=0.0)
            if is_same and len(np.unique(begun)) == _BATCHES:
                what = f"{attempt} reads the batches with which {earlier} began"
                advice = "restore the position in the data, unless the training is to see these batches again"
                yield _on(key, int(now[key].steps[0]), what, advice)._replace(severity=Severity.NOTE)
                return


def _on_model(step: int, what: str, advice: str) -> Finding:
    return _on(_Key("", "", "", "", 0), step, what, advice)


def _on(key: _Key, step: int, what: str, advice: str, detail: str = "") -> Finding:
    where = (step, key.root, key.module_path, key.site, key.name)
    return Finding(Restart.name, Restart.severity, *where, (), what, "", 0.0, 0.0, advice, detail)
