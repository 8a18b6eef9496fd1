"""A few cheap rules in the writer thread of a rank, while it trains: non-finite values, spikes, jumps, and the user's.

`LiveChecks` takes the statistics that the writer measures anyway, one record at a time, and calls back with findings:

    checks = LiveChecks(rank=0, on_finding=print, thresholds=thresholds, own=own)
    checks.saw(staged, measured)  # the writer's callback `saw`, with each record
    checks.finish()               # on the writer thread once no record follows: the last step is judged, too

`book.read_table(table, where)` makes `thresholds` and `own` of a table of TOML. `on_finding` is called on the thread
that calls `saw`, at the first record of a later step: rules see complete steps, because only the end of a step shows
whether `GradScaler` skipped it. Each finding is reported once; a rule that raises is a finding of its own, and the
other rules go on. The last step of a training that is killed is not judged.

The rules are those of `recorder check`, and so are pure. This module must never raise, read a tensor or a file, or
keep more than the statistics of one step. A record without statistics costs one comparison. Rules that packages install
are left out: nobody can stop a rule that does not end, and the writer would wait for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from ..records import Measured, Staged
from ..system import log
from .book import Thresholds, make_rules
from .engine import Engine
from .rows import About, Catalog, Rows, SeriesKey
from .rule import Finding, Rule
from .rules.curves import Jump, Spike
from .rules.values import NonFinite

LIVE_RULES: tuple[type[Rule], ...] = (NonFinite, Spike, Jump)
"""Cheap rules: each costs a few additions for each record, and remembers a few numbers for each value."""
_ALWAYS = ("nan_count", "inf_count")
_UNWANTED = -1

_log = logging.getLogger("recorder")


class LiveChecks:
    """Rules over the records of one rank, step by step. One thread calls it."""

    def __init__(
        self, *, rank: int, on_finding: Callable[[Finding], None], rules: Sequence[type[Rule]] = LIVE_RULES,
        thresholds: Thresholds | None = None, own: Sequence[type[Rule]] = (),
    ) -> None:  # fmt: skip
        """`own` are rules of the user's, each with a statistic and a limit; `thresholds` of other rules do nothing."""
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
        """The lane of each series, by its names; `_UNWANTED` where no rule reads it."""
        self._step = 0
        self._rows: list[tuple[object, ...]] = []
        """Lane, number of elements and statistics of each record of the current step."""
        self._is_off = False

    def saw(self, staged: Staged, measured: Measured) -> None:
        """Take in the statistics of a record; if it is the first of a later step, judge the step before it."""
        if measured.nan_count is None or self._is_off:
            return
        try:
            self._add(staged, measured)
        except Exception as error:  # nothing here may end the recording
            self._turn_off(error)

    def finish(self) -> None:
        """Judge the last step. `Rule.finish` is not called: its findings are about complete runs."""
        if self._is_off:
            return
        try:
            self._judge()
            self._engine.flush()
            self._report()
        except Exception as error:  # as above
            self._turn_off(error)

    def _add(self, staged: Staged, measured: Measured) -> None:
        step = staged.moment.step
        if step > self._step:
            self._judge()
            self._step = step
        elif step < self._step:
            return  # the value comes after its step was judged, and rules take steps in order
        key = (staged.origin, staged.moment.mode, staged.phase, staged.scope)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._lane(staged)
        if lane != _UNWANTED:
            self._rows.append((lane, math.prod(staged.shape), *self._numbers(measured)))

    def _lane(self, staged: Staged) -> int:
        """The lane of the record's series on this rank; `_UNWANTED` where no rule reads it."""
        if staged.phase == "recompute":
            return _UNWANTED
        key = SeriesKey(*staged.origin[:4], staged.moment.mode, staged.phase, staged.scope or "")
        if not any(rule.wants(key) for rule in self._rules):
            return _UNWANTED
        number = self._catalog.number(key, About(staged.dtype, staged.shape))
        return int(self._catalog.lanes(np.array([number]), np.array([self._rank]))[0])

    def _judge(self) -> None:
        if not self._rows:
            return
        lanes, numels, *columns = zip(*self._rows, strict=True)
        self._rows = []
        numbers = {name: np.array(column, np.float64) for name, column in zip(self._names, columns, strict=True)}
        numbers["numel"] = np.array(numels, np.float64)
        steps = np.full(len(lanes), self._step, np.int64)
        self._engine.add(Rows(self._catalog, steps, np.array(lanes, np.int64), numbers))
        self._engine.flush()
        self._report()

    def _report(self) -> None:
        for finding in self._engine.take():
            self._on_finding(finding)

    def _turn_off(self, error: Exception) -> None:
        self._is_off = True
        self._rows = []
        problem = f"{type(error).__name__}: {error}"
        log.say(_log, logging.WARNING, "live checks ended by an error (%s); the recording goes on", problem)
