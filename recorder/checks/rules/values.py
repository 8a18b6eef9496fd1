"""Rules on NaN and infinities, and on the steps that are skipped because of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ... import sites
from ...system.text import listed, named, nonfinite_in_words
from ..given import IGNORED, holds_labels
from ..rows import (
    HARMLESS,
    THROWN_AWAY,
    Flags,
    Floats,
    Memory,
    Rows,
    SeriesKey,
    grouped,
    harmless,
    thrown_away,
)  # fmt: skip
from ..rule import CheckRule, Finding, Setting, Severity, StreakRule
from .data import ALL_IGNORED

_MOST_SKIPPED = 20
"""The number of skipped steps that halve a scale of 2^16 to 1. Further halving cannot help."""

BY_PARAMETER = ", and neither is a parameter of the module"
SKIPS = "GradScaler skipped the update"
"""The words in a finding that say that its non-finite values changed no parameter."""


_DIVIDES_BY_EPS = re.compile(r"lr\.(N?Adam|RAdam|RMSprop|Adamax|Adagrad)").match
_NO_EPS = "an eps of 1e-8 is 0 in float16, and the optimizer divides by it: keep the weights in float32, or raise eps"


class NonFinite(CheckRule):
    name = "nonfinite"
    sentence = "A value has NaN, or infinities that are no mask."
    severity = Severity.ERROR
    sites, columns = (*sites.SITES, "update"), ("nan_count", "inf_count", "numel")
    more_columns = ("min", "max")
    settings = (Setting("elements", 1, "elements", "smdebug's ExplodingTensor"),)
    advice = "recorder first names the last healthy values, and recorder stats shows the value"

    def set_up(self) -> None:
        self._masks: dict[tuple[int, float], float] = {}
        """By value, rank and number of elements, the most infinities in the first record or in harmless ones."""
        self._is_known = Memory(0.0)
        """By value and rank: 0 before its first record, 2 if this record had infinities and no NaN, else 1."""
        self._bad_step: int | None = None
        """The last step that had a non-finite value, and that GradScaler did not skip."""
        self._last_skipped: int | None = None
        """The last step with a finding on a non-finite value, whether it was skipped or not."""
        self._num_skipped = 0
        """The number of consecutive steps that GradScaler skipped for a non-finite value."""
        self._last_step: int | None = None

    def add(self, rows: Rows) -> Iterator[Finding]:
        nan, inf = np.nan_to_num(rows["nan_count"]), np.nan_to_num(rows["inf_count"])
        is_excused, is_noted = self._excused(rows, nan, inf)
        if (is_bad := (nan + inf >= self.thresholds["elements"]) & ~is_excused).any():
            is_thrown = self._thrown_away(rows, is_bad)
            if (is_left := is_bad & ~is_thrown).any():
                yield from self._spells(rows, is_left, nan, inf)
            for index in np.flatnonzero(is_thrown)[:1].tolist():
                at, what = (
                    (int(rows.lanes[index]), int(rows.steps[index])),
                    f"the value is not finite, but {THROWN_AWAY}",
                )
                number = float(nan[index] + inf[index])
                yield self.finding(*at, what, "NaN and infinite elements", number, 1.0, Severity.NOTE)
        for index in np.flatnonzero(is_noted).tolist():
            at, what = (int(rows.lanes[index]), int(rows.steps[index])), f"the value is infinite, but {HARMLESS}"
            yield self.finding(*at, what, "infinite elements", float(inf[index]), 1.0, Severity.NOTE)
        self._last_step = int(rows.steps[-1])

    def _excused(self, rows: Rows, nan: Floats, inf: Floats) -> tuple[Flags, Flags]:
        """Return which rows may have infinities, as attention masks do, and which of them have more than before.

        The row must have no NaN. The first record of the row's value must have infinities and no NaN, and the row no
        more infinities, and the row may not be one of `_of_trained`. Or the row, or an earlier one with as many
        infinities, is followed by finite values alone.
        """
        lanes, firsts = np.unique(rows.lanes, return_index=True)
        began = np.where(sites.is_mask(nan[firsts], inf[firsts], True), 2.0, 1.0)
        self._is_known[lanes] = np.where(self._is_known[lanes] == 0, began, self._is_known[lanes])
        is_masked = sites.is_mask(nan, inf, rows.where("may_mask", lambda key: sites.may_mask(key.site, key.name)))
        if not is_masked.any():
            return is_masked, is_masked  # most rows need no grouping, which costs time
        is_told = rows.where("by batch", lambda key: key.differs_by_batch) & (rows["nan_count"] >= 0)
        is_training = rows.where("in training", lambda key: key.mode == "train").astype(np.int64)
        is_harmless = harmless(is_masked, nan + inf > 0, is_told, grouped(rows.steps, rows.ranks, is_training)[0])
        known, began_as_mask = np.zeros(len(rows)), (self._is_known[rows.lanes] == 2) & ~self._of_trained(rows, inf)
        for index in np.flatnonzero(is_masked).tolist():
            key = int(rows.lanes[index]), float(rows["numel"][index])
            known[index] = self._masks.setdefault(key, float(inf[index] * began_as_mask[index]))
            self._masks[key] = max(known[index], float(inf[index] * is_harmless[index]))
        return is_masked & (is_harmless | (inf <= known)), is_harmless & (inf > known)

    def _of_trained(self, rows: Rows, inf: Floats) -> Flags:
        """Return which rows are parameters of an optimizer, or outputs of modules whose such parameter is infinite."""

        def is_trained(key: SeriesKey) -> bool:
            return key.site == "param" and bool(self.catalog.rate_of(key.root, key.module_path, key.name))

        def place(row: int) -> tuple[int, int, str, str]:
            key = self.catalog.key_of(int(rows.lanes[row]))
            return int(rows.steps[row]), int(rows.ranks[row]), key.root, key.module_path

        flags = rows.where("trained", is_trained)
        if not (is_infinite := flags & (inf > 0)).any():
            return flags
        holders, flags = set(map(place, np.flatnonzero(is_infinite).tolist())), flags.copy()
        for row in np.flatnonzero(rows.at("output") & (inf > 0)).tolist():
            flags[row] = place(row) in holders
        return flags

    def _thrown_away(self, rows: Rows, is_bad: Flags) -> Flags:
        is_bad = is_bad & ~rows.where("scalar, no loss", lambda one: one.site == "scalar" and not one.is_loss)
        is_final = rows.at("grad") & (rows["nan_count"] + rows["inf_count"] == 0)
        steps, numbers = grouped(rows.steps, rows.ranks)[0], dict[tuple[str, str], int]()
        modules = np.array([numbers.setdefault(one[:2], len(numbers)) for one in self.catalog.series], np.int64)
        ids = grouped(steps, modules[rows.series])[0]
        return thrown_away(is_bad, rows.at("grad_output", "grad_input"), is_final, steps, ids)

    def _spells(self, rows: Rows, is_bad: Flags, nan: Floats, inf: Floats) -> Iterator[Finding]:
        """Report consecutive bad steps once, on the value that was bad first. Yield a finding for each such rank."""
        steps = np.unique(rows.steps)
        for step in np.unique(rows.steps[is_bad]).tolist():
            at = int(np.searchsorted(steps, step))
            before = int(steps[at - 1]) if at else self._last_step
            if before is not None and self._bad_step == before:
                self._bad_step = step
                continue
            if before is None or self._last_skipped != before:
                self._num_skipped = 0
            start, end = np.searchsorted(rows.steps, [step, step + 1])
            one_step = rows.take(slice(start, end))
            firsts = np.flatnonzero(np.r_[True, np.diff(one_step.ranks) != 0])
            indices = np.arange(end - start) - np.repeat(firsts, np.diff(np.r_[firsts, end - start]))
            bad = np.flatnonzero(is_bad[start:end])
            first = bad[np.argmin(indices[bad])]
            earliest = bad[(indices[bad] == indices[first]) & (one_step.series[bad] == one_step.series[first])]
            now, nans, infs = is_bad[start:end], nan[start:end], inf[start:end]
            found = [self._found(one_step, now, index, nans[index], infs[index]) for index in earliest.tolist()]
            # One rank's bad chunk of a parameter makes all ranks' values bad.
            for one in [one for one in found if one.detail] or found:
                if one.severity > Severity.NOTE:  # a skipped step does not affect later values
                    self._bad_step = step
                yield one

    def _found(self, rows: Rows, is_bad: Flags, index: int, nan: float, inf: float) -> Finding:
        lane, step = int(rows.lanes[index]), int(rows.steps[index])
        key, same_step = self.catalog.key_of(lane), (rows.steps == step) & (rows.ranks == rows.ranks[index])
        series = self.catalog.series
        is_of_module = np.array([one[:2] == key[:2] for one in series], np.bool_)[rows.series] & same_step
        inputs, params = (is_of_module & rows.at(site) for site in ("input", "param"))
        skipped = same_step & rows.where("skipped", lambda one: sites.tells_skip(one.site, one.name))
        # The norm alone of a value on a device was computed.
        is_open = np.isnan(rows["sum_sq"]) & (rows["nan_count"] + rows["inf_count"] < rows["numel"])
        what, detail = "the value is not finite", ""
        if (params & is_bad).any() and key.site != "param":
            bad = rows.take(params & is_bad)
            names = [series[number].name for number in bad.series.tolist()]
            what += f"{BY_PARAMETER}: {listed(list(dict.fromkeys(names)), 4)}"
            nans, infs = (np.nan_to_num(bad[count]).tolist() for count in ("nan_count", "inf_count"))
            least = ["at least " * one for one in is_open[params & is_bad].tolist()]
            counts = zip(names, least, nans, infs, strict=True)
            detail = "; ".join(f"{name} holds {some}{nonfinite_in_words(n, i)}" for name, some, n, i in counts)
        elif key.site == "input" and not key.module_path and not holds_labels(key):
            what += ", and the model was given it; look at the data, or at what makes this argument"
        elif key.site == "output" and (inputs & is_bad).any():
            what += ", and neither is its input"
        elif key.site == "output" and inputs.any():
            what += ", although the input of the module is: the module made the value"
        elif key.site in ("output", "tap"):
            what += ", and all values recorded before it in this step are finite"
        is_label = same_step & rows.where("labels", holds_labels) & rows.at("input")
        if is_label.any() and (rows["min"][is_label] == IGNORED).all() and (rows["max"][is_label] == IGNORED).all():
            what += f"; {ALL_IGNORED}"
        what += self._objectives(rows.take(same_step), is_bad[same_step])
        evaluated = rows.where("evaluated", lambda one: one.mode != "train" and one.site in sites.VALUES_OF_CALLS)
        if not (is_bad & ~evaluated).any():
            what += f"; this is an evaluation ({key.mode}), and all recorded values of training at this step are finite"
        elif (same_step & ~is_bad & (rows.at("grad") | (rows.lanes == lane))).any():
            is_skipped = not (is_bad & rows.at("grad", "param", "optim")).any()
            what += "; it did not reach any gradient or parameter recorded at this step" * is_skipped
        severity = self.severity
        if (np.nan_to_num(rows["mean"][skipped]) > 0).any():
            self._num_skipped += self._last_skipped != step
            what += f"; {SKIPS}"
            if self._num_skipped < _MOST_SKIPPED:
                severity = Severity.NOTE
            else:
                what += f", as it did {_MOST_SKIPPED} times in a row"
        self._last_skipped = step
        measure = "NaN and infinite elements" if nan and inf else "NaN elements" if nan else "infinite elements"
        measure += ", at least" * bool(is_open[index])
        found = self.finding(lane, step, what, measure, nan + inf, self.thresholds["elements"], severity)
        own = is_bad & (params | (rows.lanes == lane))
        return found._replace(detail=detail, advice=_NO_EPS if self._has_no_eps(rows.take(own)) else found.advice)

    def _has_no_eps(self, rows: Rows) -> bool:
        """Return whether a row is of a parameter of float16 whose optimizer divides by a moment plus its eps."""
        numbers = np.unique(rows.series[rows.at("param")]).tolist()
        keys = [self.catalog.series[one] for one in numbers if self.catalog.about[one].dtype == "float16"]
        return any(_DIVIDES_BY_EPS(self.catalog.rate_of(key.root, key.module_path, key.name)) for key in keys)

    def _objectives(self, rows: Rows, is_bad: Flags) -> str:
        """Name the objectives with non-finite values. Return an empty string if all objectives have some, or none."""
        keys = [self.catalog.series[series] for series in rows.series.tolist()]
        states: dict[str, bool] = {}
        for key, is_bad_one in zip(keys, is_bad.tolist(), strict=True):
            start = {"scalar": sites.OBJECTIVE_NORM, "tap": sites.OBJECTIVE}.get(key.site)
            if start is not None and key.name.startswith(start):
                name = sites.objectives_in(key.name, start)[0]
                states[name] = states.get(name, False) or is_bad_one
        bad = [repr(name) for name, is_bad_one in states.items() if is_bad_one]
        text = f"; {named('objective', bad, 4)} alone {'is' if len(bad) == 1 else 'are'} not finite"
        return text if 0 < len(bad) < len(states) else ""


class Skipped(StreakRule):
    name = "skipped"
    sentence = "GradScaler skips one step after the other: the parameters do not change."
    severity = Severity.ERROR
    sites, columns = ("scalar",), ("mean",)
    settings = (Setting("records", _MOST_SKIPPED, "records", "after so many halvings a scale of 2^16 is 1"),)
    needs = "no GradScaler tells which steps are skipped"
    what = "GradScaler skips one step after the other"
    measure, limit = "records in a row", "records"
    advice = "begin with a smaller scale, and look for what overflows at any scale"

    def wants(self, key: SeriesKey) -> bool:
        return sites.tells_skip(key.site, key.name)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        return rows["mean"] > 0, np.full(len(rows), float(self.records))
