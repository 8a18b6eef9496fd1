"""What a rule is: a name, a sentence, the statistics it reads, its thresholds, and the findings it makes.

A rule is fed the rows of complete steps in the order of steps, and yields findings. It must never remember more than a
few numbers for each lane. This module knows of no file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

import numpy as np

from .normal import Normal, Sizes
from .rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, Spells, Streaks, begins

_MOST_WAITING = 5_000
"""Findings that wait for the end of the run; no sound training has as many."""


class Severity(IntEnum):
    """How bad a finding is."""

    NOTE = 0
    """Worth knowing; a sound training may have it."""
    WARNING = 1
    """Probably a mistake."""
    ERROR = 2
    """The training is broken."""

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Setting:
    """A threshold of a rule."""

    name: str
    default: float
    unit: str
    source: str
    """Where the default comes from."""


CALIBRATED = "calibrated on sound trainings"
"""The source of a threshold that was measured here."""


class Finding(NamedTuple):
    """One finding of a rule on a value, on one rank or on several."""

    rule: str
    severity: Severity
    step: int
    root: str
    module_path: str
    site: str
    name: str
    ranks: tuple[int, ...]
    """Empty for a value of all ranks."""
    what: str
    """What is wrong, in words, without the number."""
    measure: str
    """What `value` and `threshold` measure."""
    value: float
    threshold: float
    advice: str
    """What to do next."""
    detail: str = ""
    """Further numbers, in words, that make the finding plainer."""
    since: int | None = None
    """The step since which it holds, where a rule waits for some records in a row before it reports at `step`."""

    @property
    def first_step(self) -> int:
        """The first step at which the finding holds, as far as is known."""
        return self.step if self.since is None else self.since


class Replicas(NamedTuple):
    """What a comparison of the ranks' replicas found: a rule sees numbers, which cannot show that bits are equal."""

    findings: Sequence[Finding]
    why_not_compared: str
    """Empty where at least one replica was compared."""
    notes: Sequence[str] = ()


class Rule(ABC):
    """The base of all rules. A subclass fills in the class variables and `add`."""

    name: ClassVar[str]
    sentence: ClassVar[str]
    """What the rule finds, in one sentence."""
    severity: ClassVar[Severity] = Severity.WARNING
    sites: ClassVar[tuple[str, ...]]
    """The sites whose values the rule reads."""
    columns: ClassVar[tuple[str, ...]]
    """The statistics that the rule reads of each value."""
    keep: ClassVar[str] = "stats"
    """What the recording has to keep so that there are these columns."""
    needs: ClassVar[str] = ""
    """What the run has to contain, in words, where `sites` and `keep` do not say it."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    advice: ClassVar[str]
    """What to do next."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        """`catalog` says what the lanes of all rows are; `thresholds` has the settings that are not the defaults."""
        self.catalog = catalog
        self.thresholds = {one.name: one.default for one in self.settings} | dict(thresholds or {})
        self.normal: Normal | None = None
        """What was normal in sound runs, where the user named any."""
        self.other_widths: Sequence[Sizes] = ()
        """Runs of the same training at other widths, where the user named any."""
        self.replicas: Replicas | None = None
        """What the comparison of the replicas found, where somebody compared them."""
        self.why_not_judged = ""
        """Why the rule judged nothing although the run has its columns, for example too few records."""
        self.set_up()

    def set_up(self) -> None:  # noqa: B027 (a rule need not remember anything)
        """Make what the rule remembers; `catalog` and `thresholds` are there."""

    @classmethod
    def default(cls, setting: str) -> float:
        """The default of a setting."""
        return next(one.default for one in cls.settings if one.name == setting)

    def wants(self, key: SeriesKey) -> bool:
        """Whether the rule reads the rows of a series."""
        return key.site in self.sites

    @abstractmethod
    def add(self, rows: Rows) -> Iterable[Finding]:
        """Look at the next rows of series that the rule wants: complete steps, and at least one row."""

    def finish(self) -> Iterable[Finding]:
        """The findings that can be made once there are no more rows."""
        return ()

    def finding(
        self, lane: int, step: int, what: str, measure: str, value: float, threshold: float,
        severity: Severity | None = None, since: int | None = None,
    ) -> Finding:  # fmt: skip
        """A finding on the value of a lane."""
        rank = int(self.catalog.rank_of[lane])
        return Finding(
            self.name, self.severity if severity is None else severity, int(step), *self.catalog.key_of(lane)[:4],
            ranks=() if rank < 0 else (rank,), what=what, measure=measure, value=float(value),
            threshold=float(threshold), advice=self.advice, since=since,
        )  # fmt: skip


class StreakRule(Rule):
    """A rule with a condition that each row fulfils or not; some records in a row that do are a finding.

    It reports each lane once.
    """

    what: ClassVar[str]
    measure: ClassVar[str]
    limit: ClassVar[str]
    """The setting that the number is compared with."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        self._streaks, self._counts = Streaks(), Memory(0.0)
        self._most = 0
        super().__init__(catalog, thresholds)

    @property
    def records(self) -> int:
        """For how many records in a row the condition has to hold."""
        return int(self.thresholds.get("records", 1))

    @abstractmethod
    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """For each row, whether the condition holds, and the number; rows come lane by lane."""

    def severity_of(self, lane: int) -> Severity:
        """How bad a finding is for the value of a lane."""
        return self.severity

    def add(self, rows: Rows) -> Iterator[Finding]:
        rows = rows.by_lane()
        flags, values = self.judge(rows)
        self._count(rows.lanes)
        for index, _, since in self._streaks.reached(rows.lanes, rows.steps, flags, self.records):
            lane = int(rows.lanes[index])
            yield self.finding(
                lane, int(rows.steps[index]), self.what, self.measure, values[index],
                self.thresholds[self.limit], self.severity_of(lane), since,
            )  # fmt: skip

    def finish(self) -> Iterable[Finding]:
        if self._most < self.records:
            self.why_not_judged = f"it needs {self.records} records of a value, and there are {self._most}"
        return ()

    def _count(self, lanes: Integers) -> None:
        """Note the largest number of records of a lane, up to as many as are needed."""
        if self._most < self.records:
            starts = np.flatnonzero(begins(lanes))
            counts = np.diff(np.r_[starts, len(lanes)]) + self._counts[lanes[starts]]
            self._counts[lanes[starts]] = counts
            self._most = int(counts.max(initial=self._most))


class PartsRule(Rule):
    """A rule that finds one thing in several ways, each of which is a rule of the same name and settings."""

    parts: ClassVar[tuple[type[StreakRule], ...]]

    def set_up(self) -> None:
        self._parts = [part(self.catalog, self.thresholds) for part in self.parts]

    def wants(self, key: SeriesKey) -> bool:
        return any(part.wants(key) for part in self._parts)

    def add(self, rows: Rows) -> Iterator[Finding]:
        for number, part in enumerate(self._parts):
            own = rows.take(rows.where(f"{self.name} {number}", part.wants))
            if len(own):
                yield from part.add(own)

    def finish(self) -> Iterator[Finding]:
        """Explain why no part could judge, where none could."""
        for part in self._parts:
            yield from part.finish()
        why = [part.why_not_judged for part in self._parts]
        self.why_not_judged = why[0] if all(why) else ""


class WaitingFindings:
    """Findings on spells that wait for the end of the run, which tells whether the spell ended; if so, it is a note."""

    def __init__(self, ended: str, spells: Sequence[Spells]) -> None:
        """`ended` is what a finding says further where its spell ended; `keep` is given the number of a spell."""
        self._ended, self._spells = ended, spells
        self._findings: dict[tuple[int, int], Finding] = {}

    def keep(self, lane: int, one: Finding, number: int = 0) -> Iterator[Finding]:
        """Let a finding on a lane wait, in place of an earlier one; where too many wait, yield it now."""
        if len(self._findings) < _MOST_WAITING or (number, lane) in self._findings:
            self._findings[number, lane] = one
        else:
            yield one

    def finish(self) -> Iterator[Finding]:
        """All findings that waited."""
        for (number, lane), one in self._findings.items():
            if self._spells[number].has_ended(lane):
                one = one._replace(severity=Severity.NOTE, what=one.what + self._ended)
            yield one
