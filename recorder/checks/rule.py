"""What a rule is: a name, a sentence, what it reads, its thresholds, and what it says. Knows of no file.

A rule is fed rows of whole steps in the order of steps, and says findings. It must never remember more than a few
numbers for each lane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

import numpy as np

from .normal import Normal, Sizes
from .rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, Streaks, begins


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A threshold of a rule."""

    name: str
    default: float
    unit: str
    source: str
    """Where the default comes from."""


class Finding(NamedTuple):
    """What a rule says of one value, on one rank or on several."""

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
    """What the number is."""
    value: float
    threshold: float
    advice: str
    """What to do next."""
    detail: str = ""
    """Numbers in words that make the finding plainer."""
    since: int | None = None
    """Since which step it holds, where it is said once it has held for some records in a row, at `step`."""

    @property
    def first_step(self) -> int:
        """The first step at which it holds, as far as is known."""
        return self.step if self.since is None else self.since


class Replicas(NamedTuple):
    """What a comparison of the ranks' replicas found: a rule sees numbers, which do not tell whether bits are equal."""

    findings: Sequence[Finding]
    why_not_compared: str
    """Empty where some were compared."""
    notes: Sequence[str] = ()


class Rule(ABC):
    """The base of all rules. A subclass fills in the class variables and `add`."""

    name: ClassVar[str]
    sentence: ClassVar[str]
    """What it finds, in one sentence."""
    severity: ClassVar[Severity] = Severity.WARNING
    sites: ClassVar[tuple[str, ...]]
    """Where the values are seen that it reads."""
    columns: ClassVar[tuple[str, ...]]
    """What it reads of them."""
    keep: ClassVar[str] = "stats"
    """What a rule of recording has to keep for these columns."""
    needs: ClassVar[str] = ""
    """What has to be there, in words, where `sites` and `keep` do not say it."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    advice: ClassVar[str]
    """What to do next."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        """A rule that has seen nothing yet.

        Args:
            catalog: what the lanes of all rows are.
            thresholds: settings that are not the defaults.
        """
        self.catalog = catalog
        self.thresholds = {one.name: one.default for one in self.settings} | dict(thresholds or {})
        self.normal: Normal | None = None
        """What was normal in sound runs, where there are any."""
        self.other_widths: Sequence[Sizes] = ()
        """Runs of the same training at other widths, where there are any."""
        self.replicas: Replicas | None = None
        """What was found of replicas, where somebody looked."""
        self.why_not_judged = ""
        """Why the rule judged nothing although there was what it reads, for example too few records."""

    @classmethod
    def default(cls, setting: str) -> float:
        """The default of a setting."""
        return next(one.default for one in cls.settings if one.name == setting)

    def wants(self, key: SeriesKey) -> bool:
        """Whether it reads the rows of a series."""
        return key.site in self.sites

    @abstractmethod
    def add(self, rows: Rows) -> Iterable[Finding]:
        """Look at the rows of the next whole steps that it wants, at least one."""

    def finish(self) -> Iterable[Finding]:
        """What can be said once there are no more rows."""
        return ()

    def finding(
        self,
        lane: int,
        step: int,
        what: str,
        measure: str,
        value: float,
        threshold: float,
        severity: Severity | None = None,
        since: int | None = None,
    ) -> Finding:
        """A finding on the value of a lane."""
        key = self.catalog.series[int(self.catalog.series_of[lane])]
        rank = int(self.catalog.rank_of[lane])
        return Finding(
            rule=self.name,
            severity=self.severity if severity is None else severity,
            step=int(step),
            root=key.root,
            module_path=key.module_path,
            site=key.site,
            name=key.name,
            ranks=() if rank < 0 else (rank,),
            what=what,
            measure=measure,
            value=float(value),
            threshold=float(threshold),
            advice=self.advice,
            since=since,
        )


class StreakRule(Rule):
    """A rule of which each row alone shows whether something holds; it finds what holds for some records in a row.

    It says so once for each lane.
    """

    what: ClassVar[str]
    measure: ClassVar[str]
    limit: ClassVar[str]
    """The setting that the number is held against."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._streaks, self._counts = Streaks(), Memory(0.0)
        self._most = 0

    @property
    def records(self) -> int:
        """For how many records in a row it has to hold."""
        return int(self.thresholds.get("records", 1))

    @abstractmethod
    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """For each row, whether it holds, and the number; rows stand lane by lane."""

    def severity_of(self, lane: int) -> Severity:
        """How bad it is for the value of a lane."""
        return self.severity

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look at the rows, lane by lane."""
        rows = rows.by_lane()
        flags, values = self.judge(rows)
        self._count(rows.lanes)
        for index, _, since in self._streaks.reached(rows.lanes, rows.steps, flags, self.records):
            lane = int(rows.lanes[index])
            yield self.finding(
                lane, int(rows.steps[index]), self.what, self.measure, values[index],
                self.thresholds[self.limit], self.severity_of(lane), since,
            )  # fmt: skip

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        if self._most < self.records:
            self.why_not_judged = f"it needs {self.records} records of a value, and there are {self._most}"
        yield from ()

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

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._parts = [part(catalog, thresholds) for part in self.parts]

    def wants(self, key: SeriesKey) -> bool:
        """What any of the parts reads."""
        return any(part.wants(key) for part in self._parts)

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Hand each part its rows."""
        for number, part in enumerate(self._parts):
            own = rows.take(self.catalog.mark(f"{self.name} {number}", part.wants)[rows.series])
            if len(own):
                yield from part.add(own)

    def finish(self) -> Iterator[Finding]:
        """Say why no part could judge, where none could."""
        for part in self._parts:
            yield from part.finish()
        why = [part.why_not_judged for part in self._parts]
        self.why_not_judged = why[0] if all(why) else ""
