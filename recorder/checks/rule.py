"""The base classes of rules. A rule has a name, a sentence, the statistics that it reads, and its thresholds.

A rule takes the rows of complete steps in the order of steps, and yields findings. It must never remember more than a
few numbers for each lane (a value on one rank). This module must never open a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

import numpy as np

from ..system import text
from .normal import Normal, Sizes
from .rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, Spells, Streaks

MAX_DETAIL = 240
"""The most characters of a finding's detail in a sentence."""
_MOST_WAITING = 5_000
"""The most findings that a rule holds back until the end of the run. No sound training causes as many findings."""


class Severity(IntEnum):
    """The severity of a finding."""

    NOTE = 0
    """A finding that is worth knowing, although a sound training may have it, too."""
    WARNING = 1
    """A finding that a mistake in the training has probably caused."""
    ERROR = 2
    """A finding that proves that the training is broken."""

    @property
    def word(self) -> str:
        return self.name.lower()


_COUNTED = {"records", "steps", "updates", "validations", "evaluations", "layers", "outputs", "ranks"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A threshold of a rule."""

    name: str
    default: float
    unit: str
    source: str
    """The origin of the default: a publication, another tool, or a measurement."""

    @property
    def is_count(self) -> bool:
        """Whether the threshold is a number of records, steps or the like."""
        return not _COUNTED.isdisjoint(self.unit.replace(",", "").split()[:2])


CALIBRATED = "calibrated on sound trainings"
"""The source of a threshold that was measured on trainings known to be sound."""


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
    """The ranks that have the value; empty for a value that is common to all ranks."""
    what: str
    """The fault, in words and without the measured number."""
    measure: str
    """The name of the quantity whose measured number is `value` and whose limit is `threshold`."""
    value: float
    threshold: float
    advice: str
    """The advice to the user on what to do next."""
    detail: str = ""
    """Further numbers, in words, that explain the finding."""
    since: int | None = None
    """The step at which the condition began, for a rule that waits for several records in a row; else None."""
    cause: str = ""
    """The finding of which this finding is a consequence, in words; empty for a cause."""

    @property
    def first_step(self) -> int:
        """The first step at which the finding holds, as far as is known."""
        return self.step if self.since is None else self.since

    @property
    def text(self) -> str:
        """The finding in words, for one line: since when it holds, where it is, what it is, how large, and details."""
        return self.told(has_models=False)

    def told(self, *, has_models: bool) -> str:
        """Return `text`. Where a run `has_models`, it also names the first of them."""
        model = text.model_in_words(self.root, has_models=has_models)
        where = model + text.value_in_words(self.module_path, self.site, self.name)
        return f"{'' if self.since is None else 'since '}step {self.first_step}, {where}: {self.explained}"

    @property
    def explained(self) -> str:
        """The fault in words, with the measured number and with details."""
        detail = f" ({text.fewer_clauses(self.detail, MAX_DETAIL)})" if self.detail else ""
        return (self.said + detail).replace(") (", "; ")

    @property
    def said(self) -> str:
        """The fault in words, with the measured number, and without details."""
        what, end, more = self.what.partition(": is " if ": is " in self.what else "; ")
        return what + self.size + end + more

    @property
    def size(self) -> str:
        """The measured number in words, to be put behind `what`. Empty without a measurement, or if `what` says it."""
        value, threshold = (
            f"{one:,.0f}" if 1e4 <= one < 1e7 else text.number(one) for one in (self.value, self.threshold)
        )
        share = f"{text.number(self.value * 100)} %" if self.value < 10 else f"{value} times"
        if not self.measure or (self.measure in ("share of zeros", "std") and self.value == self.threshold):
            return ""
        limit = f"at {'most' if self.value > self.threshold else 'least'} {threshold} was expected"
        usual = ", {0} {1}" if self.measure.startswith(("records", "times")) else " (the {1} is {0}, where {3})"
        return _SIZES.get(self.measure, usual).format(value, self.measure, share, limit)


_SIZES = {
    "loss": ": it is {0}, where {3}", "update over weight, at least": " (its norm is at least {0} times the weight's)",
    "norm of all gradients": ": it is {0}, where {3}", "larger over smaller root mean square": ", by a factor of {0}",
    "validation over training, less 1": " (it is {2} above the loss in training)", "share of values": " ({2} of them)",
    "NaN elements": " (NaN in {0} of its elements)", "infinite elements": " (infinite in {0} of its elements)",
    "records in which it does not": ", and here it does not in {0} records", "spreads": " ({0} times its usual spread)",
    "NaN and infinite elements": " (not finite in {0} of its elements)", "records without a change": " in {0} records",
    "records": "", "robust z": ", at {0} times the usual distance", "share of elements": " ({2} of its elements)",
    "cosine": "", "of the norm at first": " ({2} is left)", "momentum, at least": " (at least {0})",
    "fall of the loss": " (it fell by {2})", "share of zeros": " ({2} of them)", "different values": " ({0} {1})",
    "median of the last times -1": ": it is at -{0}",
}  # fmt: skip
"""By measure, the text of `Finding.size`, with the value, the measure, the value in per cent and the limit."""
_SIZES |= {f"{measure}, at least": words.replace(" in {0}", " in at least {0}") for measure, words in _SIZES.items()}


class ComparisonResult(NamedTuple):
    """What a comparison of a whole run's values found, for a rule that only reports it: `replica` or `restart`."""

    findings: Sequence[Finding]
    why_not_compared: str
    """Why nothing was compared; empty if something was."""
    notes: Sequence[str] = ()


class CheckRule(ABC):
    """The base of all rules. A subclass fills in the class variables and `add`."""

    name: ClassVar[str]
    sentence: ClassVar[str]
    """The fault that the rule finds, in one sentence."""
    severity: ClassVar[Severity] = Severity.WARNING
    sites: ClassVar[tuple[str, ...]]
    """The sites whose values the rule reads."""
    columns: ClassVar[tuple[str, ...]]
    """The names of the statistics that the rule reads."""
    more_columns: ClassVar[tuple[str, ...]] = ()
    """The names of columns that the rule reads if the run has them."""
    keep: ClassVar[str] = "stats"
    """The `keep` that a recording rule must have so that the run has these columns."""
    reads_probe: ClassVar[bool] = False
    """Whether the rule also reads rows of the probe. These have only `sum_sq`, `l2` and counts of elements."""
    needs: ClassVar[str] = ""
    """What the run must contain, in words; empty if `sites` and `keep` say everything."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    advice: ClassVar[str]
    """The advice to the user on what to do next."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        """Take the catalog of the series, and the thresholds that replace defaults, by setting."""
        self.catalog = catalog
        self.thresholds = {one.name: one.default for one in self.settings} | dict(thresholds or {})
        self.normal: Normal | None = None
        """The normal ranges in sound runs; None if the user named no sound run."""
        self.other_widths: Sequence[Sizes] = ()
        """The sizes of outputs in runs of the same training at other widths; empty if the user named no such run."""
        self.compared: ComparisonResult | None = None
        """What the caller found by a comparison, for a `ComparedRule`; None if the caller compared nothing."""
        self.why_not_judged = ""
        """The reason why the rule judged nothing in a run with its columns, such as too few records; else empty."""
        self.set_up()

    def set_up(self) -> None:  # noqa: B027 (a rule need not remember anything)
        """Create the state of the rule; `catalog` and `thresholds` are set already."""

    @classmethod
    def default(cls, setting: str) -> float:
        return next(one.default for one in cls.settings if one.name == setting)

    def wants(self, key: SeriesKey) -> bool:
        """Return whether the rule reads the rows of a series."""
        return key.site in self.sites

    @abstractmethod
    def add(self, rows: Rows) -> Iterable[Finding]:
        """Judge the next rows: at least one row, of complete steps, and only of series that the rule wants."""

    def finish(self) -> Iterable[Finding]:
        """Return the findings that need the complete run."""
        return ()

    def revised(self, one: Finding) -> Finding:
        """Return a finding that this rule made, as the complete run shows it. Called after `finish`."""
        return one

    def finding(
        self, lane: int, step: int, what: str, measure: str, value: float, threshold: float,
        severity: Severity | None = None, since: int | None = None,
    ) -> Finding:  # fmt: skip
        """Return a finding on the value of a lane (a series on one rank)."""
        rank = int(self.catalog.rank_of[lane])
        return Finding(
            self.name, self.severity if severity is None else severity, int(step), *self.catalog.key_of(lane)[:4],
            ranks=() if rank < 0 else (rank,), what=what, measure=measure, value=float(value),
            threshold=float(threshold), advice=self.advice, since=since,
        )  # fmt: skip


class StreakRule(CheckRule):
    """A rule that reports a value on one rank once its condition has held for some records in a row.

    Each value is reported at most once on each rank.
    """

    what: ClassVar[str]
    measure: ClassVar[str]
    limit: ClassVar[str]
    """The name of the setting whose threshold is compared with the measured number."""
    may_recover: ClassVar[bool] = False
    """Whether a finding becomes a note if its condition is over at the end of the run."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        self._streaks, self._counts = Streaks(), Memory(0.0)
        self._most = 0
        self._lanes: dict[Finding, int] = {}
        """The lane (a series on one rank) of each finding that may become a note."""
        super().__init__(catalog, thresholds)

    @property
    def records(self) -> int:
        """The number of records in a row for which the condition must hold."""
        return int(self.thresholds.get("records", 1))

    @abstractmethod
    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Return, by row, whether the condition holds, and the measured number. Rows are sorted by value and rank."""

    def severity_of(self, lane: int) -> Severity:
        return self.severity

    def what_of(self, lane: int) -> str:
        return self.what

    def add(self, rows: Rows) -> Iterator[Finding]:
        rows = rows.by_lane()
        flags, values = self.judge(rows)
        self._count(rows.lanes)
        for index, _, since in self._streaks.reached(rows.lanes, rows.steps, flags, self.records):
            lane = int(rows.lanes[index])
            one = self.finding(
                lane, int(rows.steps[index]), self.what_of(lane), self.measure, values[index],
                self.thresholds[self.limit], self.severity_of(lane), since,
            )  # fmt: skip
            if self.may_recover and len(self._lanes) < _MOST_WAITING:
                self._lanes[one] = lane
            yield one

    def with_detail(self, one: Finding, detail: str, what: str = "", advice: str = "") -> Finding:
        """Return a finding with a detail, and with other words. It may still become a note at the end of the run."""
        found = one._replace(detail=detail, what=what or one.what, advice=advice or one.advice)
        if (lane := self._lanes.pop(one, None)) is not None:
            self._lanes[found] = lane
        return found

    def finish(self) -> Iterable[Finding]:
        if self._most < self.records:
            self.why_not_judged = f"it needs {self.records} records of a value, and the run has {self._most}"
        return ()

    def revised(self, one: Finding) -> Finding:
        lane = self._lanes.get(one)
        is_over = lane is not None and not self._streaks.length(lane)
        return one._replace(severity=Severity.NOTE, what=f"{one.what}, but not later") if is_over else one

    def _count(self, lanes: Integers) -> None:
        """Update the largest number of records of any value on any rank, until it is as large as the rule needs."""
        if self._most < self.records:
            self._most = int(self._counts.sums(lanes, np.ones(len(lanes))).max(initial=self._most))


class PartsRule(CheckRule):
    """A rule made of parts: rules that detect the fault in different ways. All have one name and the same settings."""

    parts: ClassVar[tuple[type[CheckRule], ...]]

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
        """Set `why_not_judged` if no part could judge the run."""
        for part in self._parts:
            yield from part.finish()
        why = [part.why_not_judged for part in self._parts]
        self.why_not_judged = why[0] if all(why) else ""


class WaitingFindings:
    """Findings held back until the end of the run. A finding whose condition has ended by then becomes a note."""

    def __init__(self, ended: Callable[[int], str], spells: Sequence[Spells]) -> None:
        """Take the words to add if a lane's condition has ended, and the `Spells`, which `keep` selects by `number`."""
        self._ended, self._spells = ended, spells
        self._findings: dict[tuple[int, int], Finding] = {}

    def keep(self, lane: int, one: Finding, number: int = 0) -> Iterator[Finding]:
        """Hold back a finding on a lane (a series on a rank), in place of its last one. If too many wait, yield it."""
        if len(self._findings) < _MOST_WAITING or (number, lane) in self._findings:
            self._findings[number, lane] = one
        else:
            yield one

    def finish(self) -> Iterator[Finding]:
        for (number, lane), one in self._findings.items():
            if self._spells[number].has_ended(lane):
                one = one._replace(severity=Severity.NOTE, what=one.what + self._ended(lane))
            yield one
