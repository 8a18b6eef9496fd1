"""Cheap rules that run in the writer thread during training: non-finite values, spikes, jumps, and the user's rules.

`LiveChecks` takes the statistics that the writer measures anyway, one record at a time, and passes on the findings:

    checks = LiveChecks(rank=0, on_finding=print, thresholds=thresholds, own=own)
    checks.saw(staged, measured)  # the writer calls `saw` with each record
    checks.finish()               # on the writer thread, when no record follows: judges the last step, too

`book.read_table(table, where)` makes `thresholds` and `own` from a TOML table. `on_finding` is called on the thread
that calls `saw`, at the first record of a later step: rules need complete steps, because whether `GradScaler` skips a
step is known only at its end. Each finding is reported once. A rule that raises an error is reported as a finding, and
the other rules continue. The last step of a training that is killed is not judged.

The rules are those of `recorder check`. This module must never raise an error, read a tensor or a file, or keep more
than the statistics of one step. A record without statistics costs one comparison. Rules from installed packages are
left out: if a rule did not end, nothing could stop it, and the writer would wait.
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
from .rule import CheckRule, Finding
from .rules.curves import Jump, Spike
from .rules.values import NonFinite

LIVE_RULES: tuple[type[CheckRule], ...] = (NonFinite, Spike, Jump)
"""The cheap rules: each costs a few additions for each record, and remembers a few numbers for each value."""
_ALWAYS = ("nan_count", "inf_count")
_UNWANTED = -1

_log = logging.getLogger("recorder")


class LiveChecks:
    """Applies rules to the records of one rank, step by step. Only one thread may call it."""

    def __init__(
        self, *, rank: int, on_finding: Callable[[Finding], None], rules: Sequence[type[CheckRule]] = LIVE_RULES,
        thresholds: Thresholds | None = None, own: Sequence[type[CheckRule]] = (),
    ) -> None:  # fmt: skip
        """Take the user's own rules (`own`), each a statistic and a limit. Thresholds of unused rules are ignored."""
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
        """The lane of each series, by the names of the series; `_UNWANTED` where no rule reads the series."""
        self._step = 0
        self._rows: list[tuple[object, ...]] = []
        """The lane, number of elements and statistics of each record of the current step."""
        self._is_off = False

    def saw(self, staged: Staged, measured: Measured) -> None:
        """Take the statistics of a record. The first record of a later step makes the rules judge the step before."""
        if measured.nan_count is None or self._is_off:
            return
        try:
            self._add(staged, measured)
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def finish(self) -> None:
        """Judge the last step. `CheckRule.finish` is not called, because it expects a complete run."""
        if self._is_off:
            return
        try:
            self._judge()
            self._engine.flush()
            self._report()
        except Exception as error:  # an error here must not end the recording
            self._turn_off(error)

    def _add(self, staged: Staged, measured: Measured) -> None:
        step = staged.moment.step
        if step > self._step:
            self._judge()
            self._step = step
        elif step < self._step:
            return  # the rules have judged this step already, and steps must be in order
        key = (staged.origin, staged.moment.mode, staged.phase, staged.scope)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._lane(staged)
        if lane != _UNWANTED:
            self._rows.append((lane, math.prod(staged.shape), *self._numbers(measured)))

    def _lane(self, staged: Staged) -> int:
        """Return the lane of the record's series on this rank; `_UNWANTED` where no rule reads the series."""
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
