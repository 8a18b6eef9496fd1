"""Rules that hold a training against other runs: against sound runs of it, and against runs at other widths.

In a training that is scaled as mu-parametrisation has it, outputs are as large in a wide model as in a narrow one, at
the beginning and after a few steps, and so the best learning rate stays where it is. The rule `width` checks this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from ..normal import HELD, STATISTICS, Measures, Numbers, Ranges, Sizes, phase_of, steps_of
from ..rows import Catalog, Floats, Integers, Rows, SeriesKey, Spells, Streaks
from ..rule import Finding, Rule, Setting, Severity

_NEEDED = "needs --baseline SOUND_RUN: a run of the same training that went well"
_SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.WARNING, Severity.WARNING)
"""By what held: replicas that part company are an error."""
_LEAST_STEPS = 3
_MOST_FOUND = 5_000
"""Findings that wait for the end of the run, which tells whether the value came back."""


class BaselineRule(Rule):
    """The base of rules that know what was normal."""

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self.measures = Measures(catalog)
        self._series: Integers = np.zeros(0, np.int64)
        self._is_known = False

    def numbers(self, rows: Rows) -> Integers:
        """By row, the number that its series has in what was normal."""
        assert self.normal is not None
        new = self.catalog.series[len(self._series) :]
        if new:
            self._series = np.append(self._series, self.normal.numbers(new))
        numbers = self._series[rows.series]
        self._is_known |= bool((numbers >= 0).any())
        return numbers

    def finish(self) -> Iterator[Finding]:
        """Say where there is nothing to compare with."""
        if self.normal is None:
            self.why_not_judged = _NEEDED
        elif not self._is_known:
            self.why_not_judged = "no value of this run is in the sound runs: not the same model, or not the same sites"
        yield from ()


class Unusual(BaselineRule):
    """A statistic that is far from what it was at this phase of sound trainings.

    A sound training passes through the same stages, and may be in one of them when others are in the next. So what is
    said has lasted for a share of the training so far, and what came back to normal later is a note.
    """

    name: ClassVar[str] = "unusual"
    sentence: ClassVar[str] = "A statistic is far outside what it was at these steps of the sound runs."
    sites: ClassVar[tuple[str, ...]] = ("output", "grad_output", "param", "grad", "buffer", "scalar", "tap")
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="spreads", default=4, unit="spreads outside the range", source="calibrated on sound trainings"),
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
        Setting(name="lasting", default=0.1, unit="of the steps so far", source="calibrated on sound trainings"),
    )  # fmt: skip
    advice: ClassVar[str] = "compare this value with that of the sound run"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._spells = [Spells() for _ in STATISTICS]
        self._first_step: int | None = None
        self._found: dict[tuple[int, int], Finding] = {}
        """By statistic and lane; how bad it is the end of the run tells."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Hold each statistic against its range, and count how long it is outside."""
        if self.normal is None:
            return
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
        rows = rows.by_lane()
        series = self.numbers(rows)
        for numbers in self.measures.numbers(rows):
            order = np.argsort(rows.lanes[numbers.rows], kind="stable")
            own = Numbers(numbers.statistic, numbers.rows[order], numbers.values[order])
            if len(own.rows):
                ranges = self.normal.ranges(series[own.rows], own, rows.steps[own.rows], rows["numel"][own.rows])
                for one in self._judge(rows, own, ranges):
                    lane = own.statistic, int(rows.lanes[one.row])
                    if len(self._found) < _MOST_FOUND or lane in self._found:
                        self._found[lane] = one.finding
                    else:  # no sound training has so many
                        yield one.finding

    def finish(self) -> Iterator[Finding]:
        """Say what was found; what came back to normal is a note."""
        yield from super().finish()
        for (statistic, lane), one in self._found.items():
            if self._spells[statistic].has_ended(lane):
                one = one._replace(severity=Severity.NOTE, what=f"{one.what}, and came back")
            yield one

    def _judge(self, rows: Rows, own: Numbers, ranges: Ranges) -> Iterator[_Found]:
        statistic = STATISTICS[own.statistic]
        above, below = (own.values - ranges.high) / ranges.spread, (ranges.low - own.values) / ranges.spread
        far = above if statistic.only_above else np.fmax(above, below)
        lanes, steps = rows.lanes[own.rows], rows.steps[own.rows]
        with np.errstate(invalid="ignore"):
            flags = far > self.thresholds["spreads"]
        lasting = np.asarray(self.thresholds["lasting"] * (steps - (self._first_step or 0)), np.float64)
        begun = self._spells[own.statistic].begun(lanes, steps, flags, self.thresholds["records"], lasting)
        for index, since in begun:
            side = "above" if above[index] > 0 else "below"
            step = int(steps[index])
            one = self.finding(
                int(lanes[index]), step, f"{statistic.name} is {side} what it was in the sound runs",
                "spreads", far[index], self.thresholds["spreads"], since=since,
            )  # fmt: skip
            low, high = steps_of(int(phase_of(np.array([step]))[0]))
            value, least, most = (
                _plain(number, is_log=statistic.is_log)
                for number in (own.values[index], ranges.low[index], ranges.high[index])
            )
            detail = f"{value} here, {least} to {most} there at steps {low} to {high}"
            yield _Found(int(own.rows[index]), one._replace(detail=detail))


class _Found(NamedTuple):
    """A finding on a row."""

    row: int
    finding: Finding


class Invariant(BaselineRule):
    """What held in each record of every sound run, and does not hold here."""

    name: ClassVar[str] = "invariant"
    sentence: ClassVar[str] = (
        "What always held in the sound runs does not hold: equal replicas, batches of their own, values that change."
    )
    sites: ClassVar[tuple[str, ...]] = ("input", "param", "buffer", "optim", "grad", "grad_output")
    columns: ClassVar[tuple[str, ...]] = ("sum", "sum_sq", "min", "max")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings; TrainCheck"),
    )
    advice: ClassVar[str] = "it held in every record of the sound runs"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._streaks = [Streaks() for _ in HELD]
        self._steps: set[int] = set()

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look whether what always held holds, and count for how long it does not."""
        if self.normal is None:
            return
        if len(self._steps) < _LEAST_STEPS:
            self._steps |= set(np.unique(rows.steps).tolist())
        rows = rows.by_lane()
        series = self.numbers(rows)
        for what, indices, holds in self.measures.held(rows):
            lanes, steps = rows.lanes[indices], rows.steps[indices]
            is_broken = self.normal.always(series[indices], what) & ~holds
            for index, num, since in self._streaks[what].reached(lanes, steps, is_broken, self.thresholds["records"]):
                yield self.finding(
                    int(lanes[index]), int(steps[index]), f"in the sound runs it {_words(what)}",
                    "records in which it does not", num, self.thresholds["records"], _SEVERITIES[what], since,
                )  # fmt: skip

    def finish(self) -> Iterator[Finding]:
        """Name gradients that every sound run has, that the recording asks for, and that are not here."""
        yield from super().finish()
        if self.normal is None or len(self._steps) < _LEAST_STEPS:
            return
        recorded = set(self.catalog.series)
        for key in self.normal.in_every_run():
            module = self.catalog.modules.get((key.root, key.module_path))
            if (
                key not in recorded
                and key.site in ("grad", "grad_output")
                and module is not None
                and key.site in module.sites
            ):
                yield self._missing(key)

    def _missing(self, key: SeriesKey) -> Finding:
        return Finding(
            rule=self.name, severity=Severity.WARNING, step=0, root=key.root, module_path=key.module_path,
            site=key.site, name=key.name, ranks=(), what="in the sound runs it is there, and here it never is",
            measure="records", value=0.0, threshold=1.0, advice=self.advice,
        )  # fmt: skip


def _words(what: int) -> str:
    """What held, as the end of a sentence."""
    return HELD[what] if HELD[what].startswith(("changes", "never")) else f"is {HELD[what]}"


def _plain(value: Floats, *, is_log: bool) -> str:
    return f"{10 ** float(value) if is_log else float(value):.4g}"


_LEAST_SPAN = 2.0
"""Between the narrowest and the widest."""


class Width(Rule):
    """Outputs that grow with the width of the model: another width needs another learning rate."""

    name: ClassVar[str] = "width"
    sentence: ClassVar[str] = "After a few steps an output is larger the wider the model is."
    sites: ClassVar[tuple[str, ...]] = ("output", "param")
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="exponent", default=0.3, unit="of the width", source="mup's coordinate check asks for 0"),
        Setting(name="steps", default=10, unit="steps", source="mup's coordinate check looks at the first few"),
    )
    advice: ClassVar[str] = (
        "scale the learning rate and the initialisation of this layer with its width, as mu-parametrisation does"
    )

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._sizes = Sizes(catalog, int(self.thresholds["steps"]))

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Take in the sizes."""
        if self.other_widths:
            self._sizes.add(rows)
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Fit a power of the width to the sizes of each output."""
        if not self.other_widths:
            self.why_not_judged = "needs --width RUN: runs of the same training at other widths, two at least"
            return
        runs = [self._sizes, *self.other_widths]
        widths = np.array([one.width(self._sizes) for one in runs])
        if widths.max() / widths.min() < _LEAST_SPAN:
            self.why_not_judged = f"it needs runs whose widths are {_LEAST_SPAN:g} times apart, and these are alike"
            return
        outputs = [one.outputs for one in runs]
        for series, key in enumerate(self.catalog.series):
            if not all(key in some for some in outputs):
                continue
            slope = float(np.polyfit(np.log2(widths), [some[key] for some in outputs], 1)[0])
            if slope > self.thresholds["exponent"]:
                lane = int(np.flatnonzero(self.catalog.series_of == series)[0])
                one = self.finding(
                    lane, int(self.thresholds["steps"]) - 1, "the output grows with the width of the model",
                    "exponent of the width", slope, self.thresholds["exponent"],
                )  # fmt: skip
                yield one._replace(
                    ranks=(), detail=f"widths {', '.join(f'{width:g}' for width in sorted(widths))} times this"
                )
