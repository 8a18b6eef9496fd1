"""Rules on parameters: their initialisation, and parameters that stay as they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np

from ...sites import tells_skip
from ...system.text import number
from ..normal import EXACT
from ..rows import (
    MAX_STEPS,
    Flags,
    Floats,
    Integers,
    Memory,
    Rows,
    SeriesKey,
    Streaks,
    begins,
    ends,
    previous,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, Setting, Severity, StreakRule
from .gradients import is_weight, template
from .updates import FADED, SCHEDULE

_NARROW = ("bfloat16", "float16", "float8")
"""Types that round small updates away. This is expected and no mistake of the program."""
_OF_NARROW = (
    "its type rounds small updates away: keep the weights in float32 and use autocast, or give the optimizer a copy in "
    "float32"
)
_NO_GRADIENT = (
    "look whether something clears the gradients before the optimizer steps, and whether the graph leads from the loss "
    "to the parameters: detach(), no_grad() and tensors made anew cut it"
)
_LEAST_ELEMENTS = 16
"""The least number of elements of a weight that is judged. The statistics of fewer elements mean little."""
_MAX_SKIPPED = 10_000


_NO_RATE = "its learning rate is 0,"
_FALLEN, _TO_ZERO = "its learning rate has fallen to ", "0 from "


def _tells_skip(key: SeriesKey) -> bool:
    return tells_skip(key.site, key.name)


class Unchanged(StreakRule):
    name = "unchanged"
    sentence = "A parameter has a gradient, and its values do not change."
    sites, columns = ("param", "grad", "scalar"), EXACT
    settings = (
        Setting("records", 3, "records", "smdebug's UnchangedTensor; TrainCheck"),
        Setting(
            "share", 1e-4, "of the largest gradient", "smaller ones are roundings, or the loss has reached its floor"
        ),
        Setting("rounded", 0.5, "of all elements, of a narrow type", CALIBRATED),
        Setting("steps", 20, "steps, of a narrow type", "a warm-up begins with small updates"),
    )
    what = "the parameter has a gradient and does not change"
    measure, limit = "records without a change", "records"
    advice = "look whether the optimizer steps this very parameter, and at its learning rate"
    may_recover = True

    def set_up(self) -> None:
        self._values = {name: Memory() for name in EXACT}
        self._gradient = Memory(0.0)
        """By gradient and rank, the gradient's largest root mean square so far."""
        self._largest = 0.0
        self._step = Memory()
        self._numbers: dict[tuple[str, str, str, int], int] = {}
        """The number of each parameter, by root, module path, name and rank."""
        self._number = Memory()
        """By lane of a parameter or a gradient (the index of its series on one rank), the number of the parameter."""
        self._still = Streaks()
        """As `_streaks`, with the records that stay because their gradient is zero."""
        self._told: Integers = np.zeros(0, np.int64)
        """The steps with rows of gradients, zeros among them, in the current rows and at the last step before."""
        self._had: tuple[Integers, Integers] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """The lanes (series on one rank) and steps of gradients, in the current rows and at the last step before."""
        self._stays: dict[int, int] = {}
        """Maps the lane (a series on one rank) of an unchanged 16- or 8-bit parameter to its last unchanged step."""
        self._with_gradient: set[int] = set()
        """The lanes (series on one rank) of parameters that had a gradient in a record, and did not change."""
        self._numel = Memory()
        """By parameter and rank, the parameter's number of elements."""
        self._skipped: dict[tuple[int, int], None] = {}
        """The last steps that GradScaler skipped, as keys of (rank, step)."""
        self._rates: dict[tuple[str, int], tuple[Integers, Floats, float]] = {}
        """By name and rank: the steps and values of the last learning rates, and the largest rate before them."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site in ("param", "grad") or tells_skip(key.site, key.name) or key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        is_param = rows.at("param")
        self._note_rates(rows.take(rows.where("rate", attrgetter("is_rate"))).by_lane())
        gradients, scalars = rows.take(rows.at("grad")).by_lane(), rows.take(rows.where("skipped", _tells_skip))
        rms, firsts = np.nan_to_num(gradients.rms), np.flatnonzero(begins(gradients.lanes))
        largest = np.maximum(rms, self._gradient[gradients.lanes])
        for its in np.split(largest, firsts[1:]):
            np.maximum.accumulate(its, out=its)
        is_last = ends(gradients.lanes)
        self._gradient[gradients.lanes[is_last]] = largest[is_last]
        self._largest = max(self._largest, float(rms.max(initial=0.0)))
        self._told = np.r_[self._told[self._told == self._told.max(initial=-1)], np.unique(gradients.steps)]
        self._note_gradients(gradients.take(rms > self.thresholds["share"] * largest))
        skipped = scalars.take(np.nan_to_num(scalars["mean"]) > 0)
        self._skipped |= dict.fromkeys(zip(skipped.ranks.tolist(), skipped.steps.tolist(), strict=True))
        for old in list(self._skipped)[:-_MAX_SKIPPED]:
            del self._skipped[old]
        if is_param.any():
            params = rows.take(is_param)
            self._numel[params.lanes] = params["numel"]
            for one in super().add(rows.take(is_param)):
                if self._has_gradient(one):
                    one = self._with_rate(one)
                    yield one._replace(advice=_OF_NARROW) if one.severity == Severity.NOTE else one

    def revised(self, one: Finding) -> Finding:
        """Make a finding a note if the learning rate was zero at first, and the parameter has moved since."""
        lane = self._lanes.get(one)
        had_no_rate = one.what.startswith((_NO_RATE, _FALLEN + _TO_ZERO))
        if lane is None or self._streaks.length(lane) or not had_no_rate:
            return one
        rates = self._rates_of(one)
        if rates is None or not max(float(rates[1].max(initial=0.0)), rates[2]) > 0:
            return one
        return one._replace(severity=Severity.NOTE, what=f"{one.what}; it changes later")

    def _note_rates(self, rows: Rows) -> None:
        """Remember the last learning rates, and the largest rate before these."""
        for start, end in zip(np.flatnonzero(begins(rows.lanes)), np.flatnonzero(ends(rows.lanes)) + 1, strict=True):
            lane = int(rows.lanes[start])
            key = self.catalog.key_of(lane).name, int(self.catalog.rank_of[lane])
            _, before, largest = self._rates.get(key, (rows.steps[:0], np.zeros(0), 0.0))
            largest = max(float(before.max(initial=0.0)), largest)
            self._rates[key] = rows.steps[start:end], rows["mean"][start:end], largest

    def _rates_of(self, one: Finding) -> tuple[Integers, Floats, float] | None:
        """Return what is known of the learning rate of a finding's parameter, as an entry of `_rates`."""
        rate = self.catalog.rate_of(one.root, one.module_path, one.name)
        return self._rates.get((rate, one.ranks[0] if one.ranks else -1))

    def _with_rate(self, one: Finding) -> Finding:
        """Say the learning rate of a parameter at the step of its finding, if it is known."""
        rates = self._rates_of(one)
        if rates is None or not (end := int(np.searchsorted(rates[0], one.step, "right"))):
            return one
        last, largest = float(rates[1][end - 1]), max(float(rates[1][:end].max()), rates[2])
        stays = "and the parameter does not change"
        if not largest:
            return self.with_detail(one, "", f"{_NO_RATE} {stays}")
        if last <= FADED * largest:
            what = f"{_FALLEN}{number(last)} from {number(largest)}, {stays}"
            return self.with_detail(one, "", what, SCHEDULE)
        return self.with_detail(one, f"its learning rate is {number(last)}, and was at most {number(largest)}")

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Flag a parameter's record if it equals the previous record in all statistics, and there was a gradient then.

        If no gradient at all was recorded at the previous record's step, the parameter counts as having one.
        """
        flags = np.ones(len(rows), np.bool_)
        for name, memory in self._values.items():
            flags &= rows[name] == previous(rows.lanes, rows[name], memory)
        flags = rows.over_chunks((~flags).astype(np.float64)) == 0
        before = previous(rows.lanes, rows.steps.astype(np.float64), self._step)
        for index in np.flatnonzero(flags).tolist() if self._skipped else ():
            flags[index] = (int(rows.ranks[index]), before[index]) not in self._skipped  # NaN without a record before
        at, stays = np.flatnonzero(flags), flags
        if len(at):
            steps = np.nan_to_num(before[at], nan=-1).astype(np.int64)
            had = self._numbers_of(self._had[0]) * MAX_STEPS + self._had[1]
            is_judged = np.isin(self._numbers_of(rows.lanes[at]) * MAX_STEPS + steps, had)
            flags[at] = is_judged | ~np.isin(steps, self._had[1])
            stays = flags.copy()
            flags[at] &= is_judged | ~np.isin(steps, self._told)
            self._with_gradient.update(rows.lanes[at[is_judged]].tolist())
        self._still.lengths(rows.lanes, rows.steps, stays)
        for lane, step, is_same in zip(rows.lanes.tolist(), rows.steps.tolist(), stays.tolist(), strict=True):
            if not is_same:
                self._stays.pop(lane, None)
            elif self.severity_of(lane) == Severity.NOTE:
                self._stays[lane] = step
        return flags, np.full(len(rows), float(self.records))

    def finish(self) -> Iterator[Finding]:
        """Report that no parameter ever has a gradient, or that most of a model has a type that rounds updates away."""
        yield from super().finish()
        lanes = [
            lane for lane, step in self._stays.items() if step - self._streaks.since(lane) >= self.thresholds["steps"]
        ]
        is_param = self.catalog.mark("param", lambda key: key.site == "param")[self.catalog.series_of]
        has_zeros = any(key.site == "grad" for key in self.catalog.series)
        none = "every gradient is zero" if has_zeros else "no parameter ever has a gradient"
        for lane in () if self._largest else np.flatnonzero(is_param).tolist():
            key, num, since = self.catalog.key_of(lane), self._still.length(lane), self._still.since(lane)
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = module is not None and "grad" in module.sites and key.name not in module.frozen
            if is_asked and num >= self.records:
                what = f"{none} as the optimizer steps, and the parameter does not change"
                one = self.finding(lane, since, what, self.measure, num, self.records, self.severity_of(lane))
                yield one._replace(advice=_NO_GRADIENT)
        for rank in sorted({int(self.catalog.rank_of[lane]) for lane in lanes}):
            own = np.array([lane for lane in lanes if self.catalog.rank_of[lane] == rank])
            total = float(np.nansum(self._numel[np.flatnonzero(is_param & (self.catalog.rank_of == rank))]))
            share, largest = float(self._numel[own].sum()) / total, int(own[np.argmax(self._numel[own])])
            if share > self.thresholds["rounded"]:
                what = "most of the model does not change: the updates are smaller than its type can resolve"
                since = self._streaks.since(largest)
                one = self.finding(largest, self._stays[largest], what, "share of elements", share,
                                   self.thresholds["rounded"], Severity.WARNING, since)  # fmt: skip
                yield one._replace(advice=_OF_NARROW)

    def _note_gradients(self, rows: Rows) -> None:
        """Remember which parameters have a gradient. An expert without samples has no gradient, and need not change.

        The updates of a parameter whose gradient has become tiny may be too small for the parameter's type.
        """
        lanes, steps = self._had
        is_last = steps == steps.max(initial=-1)
        self._had = np.r_[lanes[is_last], rows.lanes], np.r_[steps[is_last], rows.steps]

    def _numbers_of(self, lanes: Integers) -> Integers:
        known = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(known)]).tolist():
            key = self.catalog.key_of(lane)
            param = key.root, key.module_path, key.name, int(self.catalog.rank_of[lane])
            self._number[np.array([lane])] = float(self._numbers.setdefault(param, len(self._numbers)))
        return self._number[lanes].astype(np.int64)

    def what_of(self, lane: int) -> str:
        if lane in self._with_gradient:
            return self.what
        return "the parameter does not change, and no gradient was recorded at these steps"

    def severity_of(self, lane: int) -> Severity:
        """Return the severity, which is a note for a parameter of a type that rounds small updates away."""
        return Severity.NOTE if self.catalog.about_of(lane).dtype.startswith(_NARROW) else self.severity

    def _has_gradient(self, one: Finding) -> bool:
        rank, least = one.ranks[0] if one.ranks else -1, self._largest * self.thresholds["share"]
        param = one.root, one.module_path, one.name
        keys = (key for key in self.catalog.series if key.site == "grad")
        lanes = [self.catalog.find(key, rank) for key in keys if (key.root, key.module_path, key.name) == param]
        return any(lane is not None and self._gradient.of(lane) > least for lane in lanes)


class Initialisation(CheckRule):
    name = "initialisation"
    sentence = "A weight begins with equal elements, or with another scale than the same weight of other layers."
    sites, columns = ("param",), ("std", "mean", "numel")
    settings = (
        Setting("ratio", 8, "times the median", CALIBRATED),
        Setting("alike", 3, "layers", CALIBRATED),
        Setting("apart", 2, "times the others, which are equal", "gains of torch.nn.init are 1 to 5/3"),
        Setting("sigmas", 6, "standard errors", "within which the others are equal"),
    )  # fmt: skip
    advice = "look at how this layer is initialised"

    def set_up(self) -> None:
        self._first_step: int | None = None
        self._std, self._mean = Memory(), Memory()
        self._lanes: list[int] = []

    def add(self, rows: Rows) -> Iterable[Finding]:
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
            is_judged = is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS)
            first = rows.take(is_judged & (rows.steps == self._first_step))
            self._std[first.lanes], self._mean[first.lanes] = first["std"], first["mean"]
            self._lanes = np.unique(first.lanes).tolist()
        return ()

    def finish(self) -> Iterator[Finding]:
        if self._first_step is None or self._first_step > 1:
            self.why_not_judged = f"the first recorded parameters are of step {self._first_step}, after updates"
            return
        alike: dict[tuple[int, str, str, str, bool], list[int]] = {}
        for lane in self._lanes:
            key, std = self.catalog.key_of(lane), self._std.of(lane)
            if std == 0 and self._mean.of(lane) != 0:
                yield self.finding(lane, self._first_step, "all elements of the weight begin equal", "std", 0.0, 0.0)
            elif std > 0:
                rank, is_table = int(self.catalog.rank_of[lane]), "Embedding" in self.catalog.class_of(key)
                alike.setdefault((rank, key.root, template(key.module_path), key.name, is_table), []).append(lane)
        for lanes in alike.values():
            if len(lanes) >= self.thresholds["alike"]:
                yield from self._odd(lanes, self._first_step)

    def _odd(self, lanes: list[int], step: int) -> Iterator[Finding]:
        fans = [float(max(math.prod(self.catalog.about_of(lane).shape[1:]), 1)) for lane in lanes]
        scales = self._std[np.array(lanes)] * np.sqrt(fans)
        ratios = scales / np.median(scales)
        limit = self.thresholds["ratio"]
        odd = np.flatnonzero((ratios > limit) | (ratios < 1 / limit)).tolist()
        if not odd and len({self.catalog.about_of(lane).shape for lane in lanes}) == 1:
            logs, limit = np.log(scales), self.thresholds["apart"]
            error = self.thresholds["sigmas"] / math.sqrt(2 * math.prod(self.catalog.about_of(lanes[0]).shape))
            for index in (int(np.argmin(logs)), int(np.argmax(logs))):
                others = np.delete(logs, index)
                is_equal = len(others) >= self.thresholds["alike"] and np.ptp(others) <= error
                odd += [index] * bool(is_equal and abs(logs[index] - others.mean()) > max(math.log(limit), error))
        for index in odd:
            what, severity = "the weight begins on another scale than that of other layers", self.severity
            if ratios[index] < 1 and self._is_last(lanes, index):
                what, severity = f"{what}; the last layer of a chain may begin small on purpose", Severity.NOTE
            yield self.finding(lanes[index], step, what, "times the median", ratios[index], limit, severity)

    def _is_last(self, lanes: list[int], index: int) -> bool:
        """Whether a layer is the last one of a chain, such as an `nn.Sequential`, and so perhaps a head."""
        numbers = [self.catalog.key_of(lane).module_path.rpartition(".")[2] for lane in lanes]
        return all(map(str.isdecimal, numbers)) and int(numbers[index]) == max(map(int, numbers))
