"""Finds the first value that is not finite, and the last finite values before it.

A value that is infinite from its first record on, with no more infinities later, is taken for a mask and only noted. A
value whose infinities reach no later value of the step is taken for a mask, too: an overflow becomes a NaN, an infinite
loss or an infinite gradient. This module must never read a payload if the counts in the rows are enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...checks.rows import HARMLESS, harmless, thrown_away
from ...errors import RunError
from ...numerics.keys import SERIES_KEY, VALUE_KEY, codes, group, holds
from ...numerics.moments import count_nonfinite, integers, numbers
from ...run.run import Run
from ...sites import NUMBERS, OBJECTIVE_NORM, is_loss, is_mask, may_mask, may_overflow, objectives_in, tells_skip
from ...system.text import steps_in_words, value_in_words
from .timeline import NAME, FirstRows, RecordedValue, Timeline, is_counted_at_least

_HAVE_NO_INFINITY = ("bool", "int", "uint", "float4")
_MAX_NOTED = 5
_MAX_PROBLEMS = 3


class OtherNonFinite(NamedTuple):
    """A loss, or a parameter or input of the module, that is not finite at the step of the first NaN or infinity."""

    site: str
    name: str
    nan_count: int
    inf_count: int


class ProbedHealth(NamedTuple):
    """Finite values before the first NaN or infinity, from the probe, which has one number of each value and step."""

    before: tuple[str, str, str] | None
    """The module, site and name of the last finite value on the rank before the NaN or infinity, in the same step."""
    calls: str
    """The number of the module's calls in a step that the probe measures, in words; empty if it measures all."""
    last_step: int | None
    """The last earlier step at which the value that is now NaN or infinite was finite on the rank."""
    model: str
    """The name of the model of `before` with a colon. Empty for the only model of a run."""


class NonFiniteTensor(NamedTuple):
    """The first tensor with NaN or infinite elements."""

    value: RecordedValue
    nan_count: int
    is_counted_at_least: bool
    """True if a count of 1 means "at least 1". The probe on a device only tells whether any element is not finite."""
    inf_count: int
    numel: int
    num_before: int
    """The number of values that the rank recorded in this step before this value."""
    before: RecordedValue | None
    """The last value without NaN or infinity that the rank recorded before this value, in the order of execution."""
    last_healthy: RecordedValue | None
    """The last finite record of this value at an earlier step, on the same rank or for all ranks."""
    num_steps_healthy: int
    """The number of earlier steps at which this value was recorded without NaN or infinity."""
    is_skipped: bool
    """Whether GradScaler skipped the update of this step, as it does if gradients overflow."""
    probed: ProbedHealth | None
    """The finite values that the probe saw before this value. None if the probe lacks this value at this step."""
    num_gradients: int
    """The number of non-finite parameter gradients at this step on all ranks. 0 if this value is no gradient."""
    beside: list[OtherNonFinite]
    """Parameters and inputs of the module, and losses, that hold NaN or infinities at this step on this rank."""
    objectives: list[str]
    """The objectives (losses) with a non-finite gradient at this step on this rank; empty if all of them have."""


class NonFiniteFinder:
    """Finds the first NaN or infinity by step and order of execution. It takes one range of steps after another."""

    def __init__(self) -> None:
        self.first: NonFiniteTensor | None = None
        self.num_values = 0
        """The number of rows with NaN or infinities, without masks."""
        self.num_known = 0
        """The number of rows that were checked for NaN and infinity."""
        self.modules: set[tuple[str, str]] = set()
        """The modules that have a row with NaN or infinities. Masks do not count."""
        self.masks: dict[tuple[str, ...], str] = {}
        """A note on each value that is taken for a mask."""
        self._overflow: NonFiniteTensor | None = None
        """The first gradient that is not finite at a step whose update GradScaler skipped."""
        self._overflow_steps: set[tuple[bool, int]] = set()
        """The steps with such gradients, each with whether the program threw the backward away."""
        self._is_skipping = False
        """Whether GradScaler skipped the update of the last step that was added."""
        self._num_unchecked = 0
        self._problems: list[str] = []

    def add(self, timeline: Timeline) -> FirstRows:
        """Add the next range of steps. Return the first records of values, which the next `Timeline` takes."""
        state = _Counts(timeline)
        first = state.search() if self.first is None else None
        bad = np.flatnonzero(state.bad())
        if first is not None:
            self.first = _describe(timeline, state, _with_parameter(timeline, state, first))
        overflows = np.flatnonzero(state.overflows())
        if len(overflows):
            if self._overflow is None:
                self._overflow = _describe(timeline, state, int(overflows[0]))
            steps = timeline.table.column("step").take(pa.array(overflows)).to_pylist()
            self._overflow_steps |= set(zip(state.is_thrown[overflows].tolist(), steps, strict=True))
        if len(state.is_skipped):
            self._is_skipping = bool(state.is_skipped[-1])
        modules = group([timeline.codes[name][bad] for name in NAME[:2]])
        self.modules |= timeline.texts(NAME[:2], bad[modules.firsts])
        self.num_values += len(bad)
        self.masks |= {key: text for key, text in state.masks() if key not in self.masks}
        self.num_known += int(np.count_nonzero(state.is_known[timeline.num_firsts :]))
        self._num_unchecked += state.unchecked
        self._problems += state.problems
        return state.firsts()

    def found(self) -> NonFiniteTensor | None:
        """Return the first value that is not finite; None if all values are finite.

        A gradient of a step whose update GradScaler skipped counts only if no other value is NaN or infinite, and if
        the last update was skipped, too. GradScaler finds its scale by overflows, but a training that ends in them has
        a fault.
        """
        return self.first or (self._overflow if self._is_skipping else None)

    def notes(self) -> list[str]:
        """Return notes on the values that do not count, and on the values that could not be read."""
        notes = sorted(self.masks.values(), key=lambda text: HARMLESS not in text)[:_MAX_NOTED]
        if self._overflow is not None and self.found() is not self._overflow:
            for is_thrown, why in (
                (False, "whose updates GradScaler skipped"),
                (True, "and the program threw them away"),
            ):
                if steps := sorted(step for its, step in self._overflow_steps if its is is_thrown):
                    words = f"gradients overflowed at {steps_in_words(steps)}, {why}"
                    notes.append(f"{words}; not counted as a finding")
        if len(self.masks) > _MAX_NOTED:
            notes.append(f"{len(self.masks) - _MAX_NOTED} more values are infinite, as masks are")
        if self._num_unchecked:
            why = "have neither statistics nor values, and were not checked; keep=stats records statistics"
            notes.append(f"{self._num_unchecked} rows {why}")
        notes += [f"could not be checked: {problem}" for problem in self._problems[:_MAX_PROBLEMS]]
        if len(self._problems) > _MAX_PROBLEMS:
            notes.append(f"{len(self._problems) - _MAX_PROBLEMS} more values could not be read")
        return notes


class _Counts:
    """The NaN and infinity counts of all rows of a timeline. Payloads are read only as far as the search needs."""

    def __init__(self, timeline: Timeline) -> None:
        table = timeline.table
        self._timeline = timeline
        self.nan, self.inf = (integers(table.column(name)).copy() for name in ("nan_count", "inf_count"))
        self.is_known: npt.NDArray[np.bool_] = (self.nan >= 0) & (self.inf >= 0)
        is_float = ~holds(table.column("dtype"), lambda dtype: dtype.startswith(_HAVE_NO_INFINITY))
        numel = integers(table.column("numel"))
        has_payload = table.column("encoding").is_valid().to_numpy()
        lacks = ~self.is_known & is_float & (numel > 0)
        lacks[: timeline.num_firsts] = False
        self.is_known |= ~lacks
        self.unchecked = int((lacks & ~has_payload).sum())
        self.problems: list[str] = []
        self._todo = np.flatnonzero(lacks & has_payload)
        self.nan[self.nan < 0] = 0
        self.inf[self.inf < 0] = 0
        if timeline.firsts is not None:
            self.nan[: timeline.num_firsts], self.inf[: timeline.num_firsts] = timeline.firsts[1:]
        self._may_mask = holds(table.column("site"), lambda site: may_mask(site, "")) & ~_is_loss(table)
        self._is_trained = self._of_trained()
        series = timeline.series
        is_skip = holds(table.column("site"), "scalar".__eq__)
        is_skip &= holds(table.column("name"), lambda name: tells_skip("scalar", name))
        is_skip[: timeline.num_firsts] = False
        skips = np.flatnonzero(is_skip)
        self.is_skipped = numbers(table.column("mean"))[skips] > 0
        """For each update with a row of `GradScaler`, whether the update was skipped."""
        when = timeline.codes["step"] * (timeline.codes["rank"].max(initial=0) + 2) + timeline.codes["rank"]
        self.is_of_skipped_step = np.isin(when, when[skips[self.is_skipped]])
        self._may_overflow = holds(table.column("site"), may_overflow) & self.is_of_skipped_step
        is_passed = holds(table.column("site"), ("grad_output", "grad_input").__contains__)
        self.is_thrown = np.zeros(table.num_rows, np.bool_)
        """Whether each row is not finite and belongs to a backward that the program threw away."""
        if (is_passed & self.nonfinite() & ~self._may_overflow).any():  # grouping the rows costs time
            is_number = holds(table.column("site"), "scalar".__eq__) & ~_is_loss(table)
            is_bad = self.nonfinite() & ~is_number & ~self._may_overflow
            is_final = holds(table.column("site"), "grad".__eq__) & self.is_known & ~self.nonfinite()
            is_final[: timeline.num_firsts] = False
            modules = group([when, *(timeline.codes[name] for name in NAME[:2])]).ids
            self.is_thrown = thrown_away(is_bad, is_passed, is_final, when, modules)
            self._may_overflow |= self.is_thrown
        self._same_shape = group([series.ids, codes(table.column("shape"))])
        self._begins = series.firsts[series.ids]
        self._begins_in_shape = self._same_shape.firsts[self._same_shape.ids]
        is_masked = is_mask(self.nan, self.inf, self._may_mask)
        is_told = holds(table.column("site"), ("output", "grad_output").__contains__) | _is_loss(table)
        ids = group([timeline.codes[name] for name in ("step", "rank", "mode")]).ids
        is_bad = self.nonfinite() & ~self._may_overflow
        self.is_harmless = harmless(is_masked, is_bad, is_told & self.is_known & ~self.nonfinite(), ids)
        self.is_harmless[: timeline.num_firsts] = is_masked[: timeline.num_firsts]
        self._most_before, most = np.zeros(table.num_rows, np.int64), np.zeros(len(self._same_shape.firsts), np.int64)
        """For each row with infinities, the most infinities of an earlier harmless row of its value and shape."""
        for row, same in zip(rows := np.flatnonzero(self.inf), self._same_shape.ids[rows], strict=True):
            self._most_before[row] = most[same]
            most[same] = max(most[same], self.inf[row] * self.is_harmless[row])

    def _of_trained(self) -> npt.NDArray[np.bool_]:
        """Return which rows are no masks just because they began so.

        These are infinite parameters that an optimizer has, and infinite outputs of their modules at the same step.
        """
        timeline, flags = self._timeline, np.zeros(len(self.inf), np.bool_)
        params = np.flatnonzero((self.inf > 0) & timeline.is_equal("site", "param"))
        names = (timeline.table.column(name).take(pa.array(params)).to_pylist() for name in NAME)
        for at, (root, path, _, name) in zip(params.tolist(), zip(*names, strict=True), strict=True):
            module = timeline.run.modules.get((root, path))
            flags[at] = module is not None and name in module.rates
        place = [timeline.codes[name] for name in ("step", "rank", *NAME[:2])]
        outputs = np.flatnonzero((self.inf > 0) & timeline.is_equal("site", "output"))
        holders = set(zip(*(one[flags].tolist() for one in place), strict=True))
        for at, of in zip(outputs.tolist(), zip(*(one[outputs].tolist() for one in place), strict=True), strict=True):
            flags[at] = of in holders
        return flags

    def nonfinite(self) -> npt.NDArray[np.bool_]:
        is_nonfinite = (self.nan > 0) | (self.inf > 0)
        is_nonfinite[: self._timeline.num_firsts] = False
        return np.asarray(is_nonfinite)

    def bad(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of these steps with NaN or infinities that are no mask and no skipped overflow."""
        return np.asarray(self.nonfinite() & ~self.excused() & ~self._may_overflow)

    def overflows(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the gradients of these steps with NaN or infinities whose update GradScaler skipped."""
        return np.asarray(self.nonfinite() & self._may_overflow)

    def firsts(self) -> FirstRows:
        was_infinite = is_mask(self.nan, self.inf, self._may_mask)
        shapes = self._same_shape.firsts
        rows = np.union1d(self._timeline.series.firsts, shapes[was_infinite[self._begins[shapes]]])
        rows = np.union1d(rows, np.flatnonzero(self.is_harmless & (self.inf > self._most_before)))
        return FirstRows(self._timeline.table.take(pa.array(rows)), self.nan[rows], self.inf[rows])

    def excused(self, rows: slice = slice(None)) -> npt.NDArray[np.bool_]:
        """Return a boolean array of the rows that are taken for masks, such as attention masks.

        A mask is infinite from its first record on, and has no more infinities than its first record of the same shape,
        or than an earlier record whose infinities did no harm. A row whose own infinities do no harm is excused, too.
        This alone excuses the rows of `_of_trained`.
        """
        begins, most = self._begins[rows], self.inf[self._begins_in_shape[rows]]
        began_as_mask = is_mask(self.nan[begins], self.inf[begins], self._may_mask[rows]) & ~self._is_trained[rows]
        most = np.maximum(np.where(began_as_mask, most, 0), self._most_before[rows])
        return np.asarray(self.is_harmless[rows] | is_mask(self.nan[rows], self.inf[rows], self._may_mask[rows], most))

    def search(self) -> int | None:
        """Return the first row in `bad`, or None. Reads the payload of each earlier row that has no counts."""
        while True:
            bad_rows = np.flatnonzero(self.bad())
            limit = int(bad_rows[0]) if len(bad_rows) else self._timeline.table.num_rows
            num_before = int(np.searchsorted(self._todo, limit))
            if not num_before:
                return limit if len(bad_rows) else None
            for row, values in self._timeline.arrays(self._todo[:num_before]):
                last = row
                if self._is_bad(row, values):
                    break
            self._todo = self._todo[self._todo > last]

    def _is_bad(self, row: int, values: npt.NDArray[Any] | RunError) -> bool:
        if isinstance(values, RunError):
            self.problems.append(str(values))
            return False
        self.nan[row], self.inf[row] = count_nonfinite(values)
        self.is_known[row] = True
        is_bad = bool(self.nan[row] or self.inf[row]) and not self._may_overflow[row]
        return is_bad and not self.excused(slice(row, row + 1))[0]

    def complete(self, rows: npt.NDArray[np.int64]) -> None:
        lacks = rows[np.isin(rows, self._todo)]
        for row, values in self._timeline.arrays(lacks) if len(lacks) else ():
            self._is_bad(row, values)

    def masks(self) -> Iterator[tuple[tuple[str, ...], str]]:
        timeline = self._timeline
        excused = np.flatnonzero(self.excused())
        excused = excused[excused >= timeline.num_firsts]
        for number in group([timeline.codes[name][excused] for name in NAME]).firsts.tolist():
            row = int(excused[number])
            value = timeline.value(row)
            since = int(timeline.table.column("step")[int(timeline.series.firsts[timeline.series.ids[row]])].as_py())
            what = value_in_words(value.module_path, value.site, value.name)
            when = f"from its first record on (step {since}), as masks do"
            if self.is_harmless[row] and not self.inf[self._begins[row]]:
                when = f"at step {value.step}; {HARMLESS}"
            text = f"holds {int(self.inf[row])} infinite values {when}"
            yield value.key, f"{what} {text}; not counted as a finding"


def _with_parameter(timeline: Timeline, state: _Counts, row: int) -> int:
    """Return the row of the same value on the rank whose chunk of a parameter of the module is bad; else `row`."""
    same = {name: timeline.codes[name] == timeline.codes[name][row] for name in VALUE_KEY}
    is_holder = same["step"] & same["root"] & same["module_path"] & timeline.is_equal("site", "param") & state.bad()
    ranks = timeline.codes["rank"]
    twins = np.flatnonzero(np.all([*same.values(), state.bad(), np.isin(ranks, ranks[is_holder])], axis=0))
    return int(twins[0]) if len(twins) else row


def _describe(timeline: Timeline, state: _Counts, row: int) -> NonFiniteTensor:
    values = {name: timeline.table.column(name)[row].as_py() for name in (*SERIES_KEY, "rank")}
    before, last, num_steps = _healthy(timeline, state, values, row)
    if timeline.num_firsts:  # the value also has records before these steps
        history = timeline.before(values["rank"])
        known = _Counts(history)
        known.search()
        long_before, longer_ago, num_more = _healthy(history, known, values)
        before, last, num_steps = before or long_before, last or longer_ago, num_steps + num_more
    is_gradient = timeline.is_equal("site", "grad") & (timeline.codes["step"] == timeline.codes["step"][row])
    is_gradient &= state.nonfinite()
    return NonFiniteTensor(
        value=timeline.value(row), nan_count=int(state.nan[row]), inf_count=int(state.inf[row]),
        is_counted_at_least=is_counted_at_least(timeline.table.column("note")[row].as_py()),
        numel=int(timeline.table.column("numel")[row].as_py()), num_before=int(timeline.num_before[row]),
        before=before, last_healthy=last, num_steps_healthy=num_steps, is_skipped=bool(state.is_of_skipped_step[row]),
        probed=None,
        num_gradients=int(np.count_nonzero(is_gradient)) if is_gradient[row] else 0,
        beside=list(_beside(timeline, state, row)), objectives=_objectives(timeline, state, row),
    )  # fmt: skip


def _healthy(
    timeline: Timeline, state: _Counts, values: dict[str, Any], row: int | None = None
) -> tuple[RecordedValue | None, RecordedValue | None, int]:
    """Find the finite values before a row. If `row` is None, the whole timeline lies before the row.

    `values` are the columns that identify the row's value, and its rank. Returns the last finite value on this rank,
    the last finite record of the row's value at an earlier step, and the number of earlier steps at which the row's
    value was finite.
    """
    is_healthy = state.is_known & (state.nan == 0) & (state.inf == 0)
    is_healthy[: timeline.num_firsts] = False
    is_before = np.ones(timeline.table.num_rows, np.bool_)  # `is_before` flags the rows of earlier steps
    if row is not None:
        is_healthy &= np.arange(timeline.table.num_rows) < row
        is_before = timeline.codes["step"] < timeline.codes["step"][row]
    # A merged run has a row of a single rank only where this rank differs. Elsewhere the row for all ranks counts.
    of_all = is_before & timeline.is_equal("rank", None)
    on_rank = is_healthy & (timeline.is_equal("rank", values["rank"]) | of_all)
    # A learning rate is finite in any training. Of the numbers that the program gives, only a loss shows health.
    is_number = holds(timeline.table.column("site"), NUMBERS.__contains__)
    before = np.flatnonzero(on_rank & (~is_number | _is_loss(timeline.table)))
    is_same = np.all([timeline.is_equal(name, values[name]) for name in SERIES_KEY], axis=0)
    same = np.flatnonzero(on_rank & is_same & is_before)
    last, last_same = (timeline.value(int(some[-1])) if len(some) else None for some in (before, same))
    return last, last_same, len(np.unique(timeline.codes["step"][same]))


def probed_health(run: Run, bad: RecordedValue) -> ProbedHealth | None:
    """Return the finite values that the probe has before `bad`, or None if it lacks `bad`. Reads the rank's probe."""
    try:
        table = run.probe(bad.rank) if bad.rank is not None else None
    except RunError:  # `recorder verify` reports the damage, and the answer is valid without the probe
        return None
    if table is None or not table.num_rows:
        return None
    table = table.filter(pc.equal(table.column("attempt"), bad.attempt))
    steps = integers(table.column("step"))
    is_finite = (integers(table.column("nan_count")) == 0) & (integers(table.column("inf_count")) == 0)
    names = ("root", "module_path", "site", "name", "phase", "mode")
    is_same = np.all([holds(table.column(name), getattr(bad, name).__eq__) for name in names], axis=0)
    (here,) = np.nonzero(is_same & (steps == bad.step))
    if not len(here):
        return None
    last = steps[is_same & is_finite & (steps < bad.step)]
    is_before = is_finite & (steps == bad.step) & (np.arange(len(steps)) < here[0])
    is_before &= (bad.phase != "forward") | holds(table.column("phase"), "forward".__eq__)
    # A value that was first seen later comes last in the table, whenever it runs.
    (before,) = np.nonzero(is_before & (is_same & (steps == steps.min())).any())
    last_step = int(last.max()) if len(last) else None
    if not len(before):
        return ProbedHealth(before=None, calls="", last_step=last_step, model="")
    root, *path = table.select(names[:4]).slice(int(before[-1]), 1).to_pylist()[0].values()
    calls, model = _calls_left_out(run, bad.rank, path[0]), f"{root}: " if run.has_models else ""
    return ProbedHealth(before=(path[0], path[1], path[2]), calls=calls, last_step=last_step, model=model)


def _calls_left_out(run: Run, rank: int | None, module_path: str) -> str:
    num_calls, probing = 0, []
    for writer in (writer for writer in run.writers if writer.rank == rank):
        calls = integers(writer.column("call"))[holds(writer.column("module_path"), module_path.__eq__)]
        num_calls = max(num_calls, 1 + int(calls.max(initial=0)))
        probing += [re.search(r"call=0?:(\d+)\b|$", text) for text in writer.manifest.rules if "keep=probe" in text]
    num_seen = max((int(found[1] or num_calls) for found in probing if found), default=num_calls)
    return f", of the first {num_seen} of its {num_calls} calls in a step" if num_seen < num_calls else ""


def _beside(timeline: Timeline, state: _Counts, row: int) -> Iterator[OtherNonFinite]:
    step, root, module, rank = (timeline.codes[name] for name in ("step", "root", "module_path", "rank"))
    same_step = (step == step[row]) & ((rank == rank[row]) | timeline.table.column("rank").is_null().to_numpy())
    of_module = holds(timeline.table.column("site"), ("param", "input").__contains__)
    of_module &= (root == root[row]) & (module == module[row])
    losses = _is_loss(timeline.table)
    is_other = np.arange(timeline.table.num_rows) != row
    rows = np.flatnonzero(same_step & (of_module | (losses & ~losses[row])) & is_other)
    state.complete(rows)
    bad = rows[(state.nan[rows] > 0) | (state.inf[rows] > 0)]
    bad = bad[~state.excused()[bad]]
    for first in bad[group([timeline.codes[name][bad] for name in ("site", "name")]).firsts].tolist():
        site, name = (timeline.table.column(column)[first].as_py() for column in ("site", "name"))
        yield OtherNonFinite(site, name, int(state.nan[first]), int(state.inf[first]))


def _objectives(timeline: Timeline, state: _Counts, row: int) -> list[str]:
    is_one = holds(timeline.table.column("site"), "scalar".__eq__)
    is_one &= holds(timeline.table.column("name"), lambda name: (name or "").startswith(OBJECTIVE_NORM))
    for name in ("step", "rank"):
        is_one &= timeline.codes[name] == timeline.codes[name][row]
    rows = np.flatnonzero(is_one)
    state.complete(rows)
    states: dict[str, bool] = {}
    for one in rows.tolist():
        name = objectives_in(timeline.table.column("name")[one].as_py(), OBJECTIVE_NORM)[0]
        states[name] = states.get(name, False) or bool(state.nan[one] or state.inf[one])
    bad = [name for name, is_bad in states.items() if is_bad]
    return bad if len(bad) < len(states) else []


def _is_loss(table: Any) -> npt.NDArray[np.bool_]:
    is_so_called = holds(table.column("name"), lambda name: is_loss("scalar", name))
    return np.asarray(holds(table.column("site"), "scalar".__eq__) & is_so_called)
