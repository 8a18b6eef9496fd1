"""Runs cheap rules on the writer thread during training: non-finite values, spikes, jumps, and the user's rules.

`LiveChecks` takes the statistics of one record at a time, which the writer measures anyway, and the numbers of the
probe (one number of each value) of one step at a time. It passes each finding to `on_finding` once, on the thread that
calls `saw`, at the first record of a later step. Rules need complete steps, because whether `GradScaler` skips a step
is known only at the end of the step. The writer thread calls `finish` when no record follows, to judge the last step,
too. The last step of a training that is killed is not judged.

`book.read_table(table, where)` makes `thresholds` and `own` from a TOML table. A rule that raises an error is reported
as a finding, and the other rules continue. The rules are those of `recorder check`. This module must never raise an
error, read a tensor or a file, or keep more than the statistics of one step. A record without statistics costs one
comparison. Rules from installed packages are left out: nothing could stop a rule that does not end, and the writer
would wait.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.ma  # numpy imports it at the first `unique`: on the writer thread, where a failing disk fails the import

from ..records import Measured, ProbedSeries, ProbedStep, Staged
from ..system import log
from .book import Thresholds, make_rules
from .causes import order_of
from .engine import Engine
from .rows import IS_PROBE, About, Catalog, Integers, ModuleFacts, Rows, SeriesKey
from .rule import CheckRule, Finding
from .rules.curves import Jump, Spike
from .rules.data import EmptyBatch
from .rules.programs import PROGRAM_RULES, EvaluationMode
from .rules.values import NonFinite

LIVE_RULES: tuple[type[CheckRule], ...] = (NonFinite, Spike, Jump, EmptyBatch)
"""The cheap rules: a rule costs a few additions per record, and remembers a few numbers per value."""
_ALWAYS = ("nan_count", "inf_count", "sum_sq")
_UNWANTED = -1
_MAX_PROBED = 1024
"""The most steps whose numbers from the probe wait for the writer thread. Older steps are dropped."""
_MOST_REPLICAS = 4
"""The most models whose parameters are compared over ranks at the end. A status has room for a few."""
_NONE = np.zeros(0)
_MOST_DUE, _JUDGE_EVERY_S = 64, 2.0
"""Waiting steps are judged as soon as there are this many, or this many seconds after the last judgement."""

_log = logging.getLogger("recorder")


class _DueStep(NamedTuple):
    """A finished step that is not judged yet."""

    probed: ProbedStep
    rows: list[tuple[Any, ...]]
    """For each record, its lane (series on a rank), number of elements and statistics."""


class LiveChecks:
    """Applies rules to the records of one rank, step by step. Only one thread may call it, except for `probed`."""

    def __init__(
        self, *, rank: int, on_finding: Callable[[Finding], None], rules: Sequence[type[CheckRule]] = LIVE_RULES,
        thresholds: Thresholds | None = None, own: Sequence[type[CheckRule]] = (), only_scalars: bool = False,
    ) -> None:  # fmt: skip
        """Take the user's own rules (`own`), each a statistic and a limit. Thresholds of unused rules are ignored.

        With `only_scalars`, only records of scalars are read, and gradients come from the probe alone. The steps of
        some seconds are then judged together, which takes a fifth of the time. Otherwise each step is judged at once.
        """
        made = [*rules, *own]
        self._rank = rank
        self._on_finding = on_finding
        self._catalog = Catalog()
        self._rules = make_rules(made, self._catalog, thresholds or {})
        self._engine = Engine(self._rules, self._catalog)
        names = dict.fromkeys([*_ALWAYS, *(name for rule in made for name in rule.columns)])
        self._names = tuple(name for name in names if name in Measured._fields)
        self._numbers = attrgetter(*self._names)
        self._lanes: dict[tuple[object, ...], int] = {}
        """Maps a series to its lane (the index of the series on this rank); `_UNWANTED` if no rule reads the series."""
        self._step = 0
        self._rows: list[tuple[Any, ...]] = []
        """For each record of the current step, its lane (series on a rank), number of elements and statistics."""
        self._is_off = False
        self._only_scalars = only_scalars
        self._probed: deque[ProbedStep] = deque(maxlen=_MAX_PROBED)
        """The probe's numbers of steps that the writer thread has not reached yet."""
        self._probed_lanes: Integers = np.zeros(0, np.int64)
        """For each series of the probe, its lane (index on this rank); `_UNWANTED` if no rule reads the series."""
        self._last: ProbedStep | None = None
        """The probe's numbers of the last step that is over."""
        self._due: list[_DueStep] = []
        """The finished steps that are not judged yet, in order."""
        self._judged_s = time.monotonic()

    def probed(self, numbers: ProbedStep) -> None:
        """Take the probe's numbers of a step that is over. Called on the training thread."""
        if not self._is_off:
            self._probed.append(numbers)
            self._last = numbers

    def saw(self, staged: Staged, measured: Measured) -> None:
        """Take the statistics of a record. The first record of a later step makes the rules judge the step before."""
        if measured.nan_count is None or self._is_off or (self._only_scalars and staged.origin.site != "scalar"):
            return
        try:
            self._add(staged, measured)
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def look(self) -> None:
        """Judge the probe's steps in a training without records of scalars. Called on the thread that calls `saw`."""
        if self._is_off or not self._only_scalars or self._lanes or len(self._probed) < _MOST_DUE:
            return
        try:
            self._step = self._probed[-1].step
            self._end_steps()
            self._judge()
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def finish(self) -> None:
        """Judge the last step. `CheckRule.finish` is not called, because it expects a complete run."""
        if self._is_off:
            return
        try:
            self._end_steps()
            if self._probed:
                self._step = self._probed[-1].step
                self._end_steps()
            self._judge()
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def replicas(self, roots: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, list[Any]]:
        """Return, for each model that DDP keeps equal on all ranks, the last step, and digests of names and of norms.

        Both are of the model's parameters as the step ended. Ranks are compared if the first two and the names agree.
        """
        found: dict[str, list[Any]] = {}
        for root in roots[:_MOST_REPLICAS]:
            ranks = root.get("data_parallel") or {}
            is_alike = ranks.get("kind") == "ddp" and len(ranks["ranks"]) == world_size and not ranks.get("joins")
            if is_alike and not root.get("unshared") and (digests := self._digests(self._last, root["name"])):
                found[root["name"]] = digests
        return found

    @staticmethod
    def _digests(last: ProbedStep | None, root_name: str) -> list[Any]:
        if last is None:
            return []
        numbers = zip(last.series, last.sums.tolist(), last.numels.tolist(), strict=False)
        parameters = sorted(
            (*one.origin[1:4], numel, total)
            for one, total, numel in numbers
            if one.origin.site == "param" and one.origin.root == root_name and numel
        )
        columns = [one[:-1] for one in parameters], [one[-1] for one in parameters]
        digests = [hashlib.sha256(repr(column).encode()).hexdigest()[:12] for column in columns]
        return [last.step, *digests] if parameters else []

    def revised(self, one: Finding) -> Finding:
        """Return a finding as its rule judges it after the last step: it may be a note."""
        rule = next((rule for rule in self._rules if rule.name == one.rule), None)
        try:
            return one if rule is None or self._is_off else rule.revised(one)
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)
            return one

    def _add(self, staged: Staged, measured: Measured) -> None:
        step = staged.moment.step
        if step > self._step:
            self._end_steps()
            self._step = step
            is_early = len(self._due) < _MOST_DUE and time.monotonic() - self._judged_s < _JUDGE_EVERY_S
            if not (self._only_scalars and is_early):
                self._judge()
        elif step < self._step:
            return  # the rules have judged this step already, and steps must be in order
        key = (staged.origin, staged.moment.mode, staged.phase, staged.scope)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._lane(staged)
        if lane != _UNWANTED:
            self._rows.append((lane, math.prod(staged.shape), *self._numbers(measured)))

    def _lane(self, staged: Staged) -> int:
        """Return the lane of a record (the index of its series on this rank); `_UNWANTED` if no rule reads it."""
        if staged.phase == "recompute":
            return _UNWANTED
        key = SeriesKey(*staged.origin[:4], staged.moment.mode, staged.phase, staged.scope or "")
        number = self._number(key, About(staged.dtype, staged.shape), self._rules)
        return int(self._lanes_of([number])[0])

    def _number(self, key: SeriesKey, about: About, rules: Sequence[CheckRule]) -> int:
        return self._catalog.number(key, about) if any(rule.wants(key) for rule in rules) else _UNWANTED

    def _lanes_of(self, numbers: Sequence[int]) -> Integers:
        """Return the lanes (indexes on this rank) of series, given by number. `_UNWANTED` stays as it is."""
        lanes = np.array(numbers, np.int64)
        is_wanted = lanes != _UNWANTED
        lanes[is_wanted] = self._catalog.lanes(lanes[is_wanted], np.full(is_wanted.sum(), self._rank))
        return lanes

    def _end_steps(self) -> None:
        """Let the current step wait to be judged, and earlier steps that only the probe has measured."""
        while self._probed and self._probed[0].step < self._step:
            self._due.append(_DueStep(self._probed.popleft(), []))
        rows, self._rows = self._rows, []
        if self._probed and self._probed[0].step == self._step:
            self._due.append(_DueStep(self._probed.popleft(), rows))
        elif rows:
            self._due.append(_DueStep(ProbedStep(self._step, [], _NONE, _NONE), rows))

    def _judge(self) -> None:
        due, self._due, self._judged_s = self._due, [], time.monotonic()
        if due and len(rows := self._rows_of(due)):
            self._engine.add(rows)
        self._engine.flush()
        for finding in sorted(self._engine.take(), key=lambda one: order_of(one.step, one.site, one.rule)):
            self._on_finding(finding)

    def _rows_of(self, due: Sequence[_DueStep]) -> Rows:
        """Return the rows of steps: of each step the numbers of the probe that no record has, and then the records."""
        own = [row for one in due for row in one.rows]
        for one in due:
            self._know_series(one.probed)
        numbers_of_steps = np.array([one.probed.step for one in due], np.int64)
        nums = [len(one.probed.sums) for one in due]
        steps, lanes = np.repeat(numbers_of_steps, nums), np.concatenate([self._probed_lanes[:num] for num in nums])
        sums, numels = (np.concatenate(columns) for columns in zip(*(one.probed[2:] for one in due), strict=True))
        is_taken = (lanes != _UNWANTED) & (numels > 0)
        own_steps = np.repeat(numbers_of_steps, [len(one.rows) for one in due])
        own_lanes, own_numels, *columns = zip(*own, strict=True) if own else ((),) * (2 + len(self._names))
        num_lanes = max(lanes.max(initial=0), max(own_lanes, default=0)) + 1
        if is_taken.any():
            is_taken &= ~np.isin(steps * num_lanes + lanes, own_steps * num_lanes + np.array(own_lanes, np.int64))
        steps, lanes, sums, numels = steps[is_taken], lanes[is_taken], sums[is_taken], numels[is_taken]
        ones = np.ones(len(sums))
        numbers = {"sum_sq": sums, "l2": np.sqrt(sums), "numel": numels, IS_PROBE: ones}
        numbers |= {"nan_count": ones * 0, "inf_count": ones * 0}
        if own:
            empty = np.full(len(sums), np.nan)
            known = dict(zip(self._names, columns, strict=True)) | {"numel": own_numels, IS_PROBE: np.zeros(len(own))}
            numbers = {
                name: np.append(numbers.get(name, empty), np.array(column, np.float64))
                for name, column in known.items()
            }
            steps, lanes = np.append(steps, own_steps), np.append(lanes, np.array(own_lanes, np.int64))
        rows = Rows(self._catalog, steps, lanes, numbers)
        return rows.take(np.argsort(steps, kind="stable")) if own and len(due) > 1 else rows

    def _know_series(self, probed: ProbedStep) -> None:
        if len(probed.sums) > len(self._probed_lanes):
            rules = [rule for rule in self._rules if rule.reads_probe]
            new = probed.series[len(self._probed_lanes) : len(probed.sums)]
            more = [self._number_in_probe(one, rules) for one in new]
            self._probed_lanes = np.append(self._probed_lanes, self._lanes_of(more))

    def _number_in_probe(self, one: ProbedSeries, rules: Sequence[CheckRule]) -> int:
        if self._only_scalars and one.origin.site not in ("grad", "input"):
            return _UNWANTED
        key = SeriesKey(*one.origin[:4], one.mode, one.phase, one.scope or "")
        return self._number(key, About(str(one.facts.get("dtype", "")), ()), rules)

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        self._rows = []
        problem = f"{type(error).__name__}: {error}"
        log.say(_log, logging.WARNING, "live checks ended by an error (%s); the recording goes on", problem)


def judge_program(roots: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Apply the rules on the program to the models in a writer's manifest: wrong modes, arguments, optimizers.

    Of modules in evaluation mode, only those of a model that is in evaluation mode as a whole are found.
    """
    facts = {}
    for root in roots:
        for one in root["modules"]:
            known = {name: one[name] for name in ModuleFacts._fields if name in one}
            facts[root["name"], one["path"]] = ModuleFacts(one["class"], **known)
    catalog = Catalog(facts)
    found = [one for rule in PROGRAM_RULES for one in rule(catalog).finish()]
    # Whether some modules are in evaluation mode on purpose is known once all modules were trained.
    evaluated = {root for (root, path), one in facts.items() if not path and one.evaluated is not None}
    return [one for one in found if one.rule != EvaluationMode.name or one.root in evaluated]
