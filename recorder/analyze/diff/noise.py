"""Recognises differences that are noise: the first run differs as much from its noise runs.

A noise run repeats the first run, or is a twin run: the same training with slightly perturbed inputs. Noise is measured
for each tensor and step. It counts as at least the median noise of the same site and step, because a tensor may have
little noise by chance, or because a perturbation did not reach the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.keys import Integers, group_rows
from ...numerics.moments import Floats, integers, numbers
from .compare import Tolerance
from .drift import MARGIN, Drift, Pairs
from .pairs import Flags, PairedSteps, RunSteps, Verdicts, align, judge

_BITS = {
    "float64": -52, "float32": -23, "float16": -10, "bfloat16": -7, "complex128": -52, "complex64": -23,
    "complex32": -10, "float8_e4m3fn": -3, "float8_e4m3fnuz": -3, "float8_e5m2": -2, "float8_e5m2fnuz": -2,
}  # fmt: skip
"""For each dtype, log2 of the distance from 1 to the next larger number."""
_MIN_FACTOR = 1e-3
"""A tensor counts as a multiple of another tensor only if the factor differs from 1 by more than this."""
_MAX_REST = 0.02
"""A factor may leave this share of a difference unexplained. A shifted tensor leaves more, and is no multiple."""
_MIN_ITEMS = 16
"""A tensor with fewer elements may nearly be a multiple of any tensor, and its noise at a single step is random."""
_ROUNDINGS = 8
"""A difference of up to this many roundings of the tensor's largest magnitude always counts as noise."""
ROUNDING_OF = {dtype: _ROUNDINGS * 2.0**bits for dtype, bits in _BITS.items()}
"""For each dtype, the share of a tensor's largest magnitude up to which a difference always counts as noise."""
_ALIKE_SHARE = 0.5
_MIN_ALIKE = 3
"""Clipping explains a common factor if at least this many gradients, and `_ALIKE_SHARE` of all gradients, have it."""


_FAR = ("max_abs", "l2_apart", "statistic_rel")
"""The columns of `Verdicts.differing` that say how far the two tensors of a pair are apart."""


class Drifted(NamedTuple):
    """A summary of the parameters that rounding alone drove farther apart than in the twin runs (perturbed repeats)."""

    step: int
    """The first step at which rounding had driven parameters farther apart than in the twin runs."""
    num_params: int
    of_norm: float
    """The largest distance of a drifted parameter at its last step, as a share of the parameter's norm."""
    times_noise: float
    """The factor by which the noise limit rises for values that are computed from drifted parameters."""


class LoudNoise(NamedTuple):
    """A warning that noise runs differ from the first run by more than rounding can explain after one step."""

    step: int
    """The first step at which a noise run differs from the first run."""
    of_norm: float
    """The distance of a noise run from the first run, divided by the norm: the median over the forward's values."""


def measure(judged: Verdicts, compared: PairedSteps, sides: Sequence[RunSteps]) -> NoiseMeasure | None:
    """Measure the noise of the pairs that differ. Return None without noise runs, or if no pair differs.

    `sides` are the rows of the noise runs at the same steps.
    """
    a, rows = compared.a, compared.pairs.a[judged.kinds != ""]
    if not sides or not len(rows):
        return None
    # How far noise moves the tensor of each row of `a`: NaN if no noise run has the value.
    far = {name: np.full(a.table.num_rows, np.nan) for name in _FAR}
    has_other_print = np.zeros(a.table.num_rows, np.bool_)
    for side in sides:
        pairs = align(a.table, side.table)
        kept = np.isin(pairs.a, rows)
        if kept.any():
            pairs = pairs._replace(a=pairs.a[kept], b=pairs.b[kept])
            moved = judge(a, side, pairs, Tolerance(), lambda num_bytes: None)
            equal, differing = pairs.a[moved.kinds == ""], pairs.a[moved.kinds != ""]
            for name, known in far.items():
                known[equal] = np.fmax(known[equal], 0.0)
                np.fmax.at(known, differing, numbers(moved.differing.column(name)))
            has_other_print[differing] = True
    return NoiseMeasure(judged.differing, {name: known[rows] for name, known in far.items()}, has_other_print[rows])


class BeyondNoise:
    """Removes the differences that are noise. It takes ranges of steps in the order of steps.

    `eps` is the share by which the inputs of the noise runs were perturbed, according to their manifests.
    """

    def __init__(self, eps: float = 0.0) -> None:
        self._eps = eps
        self._drift = Drift()
        self._factors: dict[str, float] = {}
        """For each root, the largest factor by which parameters began a step farther apart than in the twin run."""
        self._shown: dict[str, tuple[float, float]] = {}
        """For each root, at its last step: how far parameters had drifted, as a share of their norm, and the difference
        of the forward's values, divided by the noise."""
        self._first_drift: int | None = None
        self._off: dict[str, float] = {}
        """For each root, the largest |factor - 1| by which rounding scaled all gradients of a step."""
        self._is_begun = False
        self.loud: LoudNoise | None = None
        """Set if the noise runs probably differ from the first run by more than noise, and so hide errors."""

    @property
    def drifted(self) -> Drifted | None:
        """A summary of the parameters that drifted and so hide smaller errors; None if no parameter drifted."""
        if self._first_drift is None:
            return None
        factor = max(self._factors.values(), default=1.0)
        return Drifted(self._first_drift, self._drift.num_params, self._drift.share(), factor)

    def of(self, judged: Verdicts, measured: NoiseMeasure | None, compared: Callable[[], PairedSteps]) -> Verdicts:
        """Return the verdicts without the pairs that differ by no more than noise. Other pairs get a column `noise`.

        `compared` returns the rows, and is called only if rows are needed.
        """
        table = judged.differing
        if measured is None:
            return judged._replace(differing=table.append_column("noise", pa.nulls(table.num_rows, pa.float64())))
        indices = np.flatnonzero(judged.kinds != "")
        is_noise = measured.are_noise()
        differs = judged.kinds != ""
        differs[indices[is_noise]] = False
        self._follow(Pairs(compared, differs), measured, indices)
        is_noise = ~differs[indices]
        kinds = np.where(differs, judged.kinds, "")
        shown = np.where(measured.kinds == "statistics", measured.noise_of_statistics, measured.noise)
        table = table.append_column("noise", pa.array(shown, mask=np.isnan(shown)))
        alone = Counter(by_print_alone=int((is_noise & (measured.kinds == "fingerprint")).sum()))
        counts, table = judged.counts + alone, table.filter(pa.array(~is_noise))
        return judged._replace(kinds=kinds, differing=table, counts=counts)

    def _follow(self, pairs: Pairs, measured: NoiseMeasure, indices: Integers) -> None:
        steps = np.unique(measured.steps)
        order = np.argsort(measured.steps, kind="stable")
        parts = np.split(order, np.searchsorted(measured.steps[order], steps[1:]))
        for step, of_step in zip(steps.tolist(), parts, strict=True):
            if not self._is_begun:
                self._is_begun = True
                share, limit = measured.typical_share(of_step), measured.loudness(of_step, self._eps)
                self.loud = LoudNoise(step, share) if share > limit else None
            for root in dict.fromkeys(measured.roots[of_step].tolist()):
                self._follow_step(step, root, of_step[measured.roots[of_step] == root], pairs, measured, indices)
            self._drift.end(step, pairs)

    def _follow_step(
        self, step: int, root: str, rows: Integers, pairs: Pairs, measured: NoiseMeasure, indices: Integers
    ) -> None:
        self._unscale(step, root, rows, pairs, measured, indices)
        left = rows[pairs.differs[indices[rows]]]
        is_param = measured.sites[left] == "param"
        params = left[is_param & measured.is_finite[left] & np.isin(measured.kinds[left], ("values", "statistics"))]
        excused = self._drift.begin(step, root, pairs, measured.lines(params, indices))
        pairs.differs[indices[params[excused]]] = False
        if self._first_drift is None and any(excused):
            self._first_drift = step
        share = self._drift.share(root)
        if not share:
            return
        factor = share / measured.typical_share(rows)
        if root in self._shown:  # the forward's factor limits this factor
            share_before, times = self._shown[root]
            factor = min(factor, MARGIN * times * share / share_before)
        factor = max(1.0, factor)
        self._shown[root] = share, measured.typical_times(rows)
        self._factors[root] = max(factor, self._factors.get(root, 1.0))
        rest = left[~is_param]
        rest = rest[~measured.are_multiples(rest)]
        factors = np.where(measured.sites[rest] == "optim", self._factors[root], factor)
        pairs.differs[indices[rest[measured.are_noise_farther(rest, factors)]]] = False

    def _unscale(
        self, step: int, root: str, rows: Integers, pairs: Pairs, measured: NoiseMeasure, indices: Integers
    ) -> None:
        """Accept gradients that rounding scaled by a common factor, and the state computed from these gradients.

        Clipping scales all gradients by their common norm. Each layout adds up the squares for this norm in its own
        order, and so rounds the norm differently. Twin runs do not show this, because they have one layout.
        """
        gradients = rows[(measured.sites[rows] == "grad") & (measured.phases[rows] == "optimizer")]
        if pairs.differs[indices[gradients]].any():
            factor = measured.typical_factor(gradients)
            is_scaled = measured.are_scaled(gradients, factor)
            num_pairs, numel = _final_gradients(pairs, step, root)
            is_common = is_scaled.sum() >= max(_MIN_ALIKE, _ALIKE_SHARE * num_pairs)
            if is_common and abs(factor - 1) <= measured.rounding_of_sum(gradients, numel):
                pairs.differs[indices[gradients[is_scaled]]] = False
                self._off[root] = max(abs(factor - 1), self._off.get(root, 0.0))
        if off := self._off.get(root):
            made = rows[pairs.differs[indices[rows]]]
            is_made = (measured.sites[made] == "optim") | (
                (measured.sites[made] == "param") & (measured.kinds[made] == "statistics")  # `Drift` judges parameters
            )
            made = made[is_made]
            # To first order, a factor 1 + x of gradients changes their squares by the factor 1 + 2x.
            pairs.differs[indices[made[measured.are_noise_farther(made, np.ones(len(made)), 2 * off)]]] = False


def _final_gradients(pairs: Pairs, step: int, root: str) -> tuple[int, int]:
    """Return the number of nonzero gradients that the update of a step used, and the elements of all its gradients."""
    columns = ["root", "site", "phase", "l2", "numel"]
    a, _, aligned = pairs.rows()
    table = a.table.select(columns).take(pa.array(aligned.a[pairs.of_step(step)]))
    is_final = (pc.field("site") == "grad") & (pc.field("phase") == "optimizer")
    table = table.filter(is_final & (pc.field("root") == root))
    is_any = pc.fill_null(pc.not_equal(table.column("l2"), 0.0), True)
    return int(pc.sum(is_any).as_py() or 0), int(pc.sum(table.column("numel")).as_py() or 0)


class NoiseMeasure:
    """The pairs of rows that differ, with the noise of each pair."""

    def __init__(self, table: Any, noise: Mapping[str, Floats], has_other_print: Flags) -> None:
        self._table, self._has_other_print = table, has_other_print
        self.steps = integers(table.column("step"))
        self.roots, self.sites, self.kinds, self.phases = (
            np.array(table.column(name).to_pylist(), object) for name in ("root", "site", "kind", "phase")
        )
        self._max_abs, self._l2_apart, self._statistic = (numbers(table.column(name)) for name in _FAR)
        # Rounding may change the fingerprint of a gradient of kind `after_tap` (see `Difference.kind`), so values or
        # statistics judge it.
        compared_by = np.where(table.column("statistic").is_valid().to_numpy(), "statistics", "fingerprint")
        compared_by = np.where(np.isnan(self._max_abs), compared_by, "values")
        self.kinds = np.where(self.kinds == "after_tap", compared_by, self.kinds)
        self._cosine, self._l2_a, self._l2_b = (numbers(table.column(name)) for name in ("cosine", "l2_a", "l2_b"))
        dtypes = (table.column(f"dtype_{side}").to_pylist() for side in "ab")
        self._eps = np.maximum(*(np.array([ROUNDING_OF.get(dtype, 0.0) for dtype in side]) for side in dtypes))
        numel = numbers(table.column("numel"))
        of_max = numbers(table.column("of_max"))
        self._scales = np.divide(self._max_abs, of_max, out=np.zeros_like(of_max), where=of_max > 0)
        # The norm of the first tensor of each pair. Without statistics it is the largest possible norm.
        self._norms = np.where(np.isnan(self._l2_a), self._scales * np.sqrt(numel), self._l2_a)
        num_a, num_b = (np.nan_to_num(numbers(table.column(f"nonfinite_{side}"))) for side in "ab")
        self.is_finite = num_a == num_b
        self.noise = _steadied(_lifted(noise["max_abs"], self._scales, table), table)
        self.noise_of_statistics = noise["statistic_rel"]
        self._lifted_statistics = _lifted(self.noise_of_statistics, np.ones(len(numel)), table)
        self._noise_of_norms = _steadied(_lifted(noise["l2_apart"], self._norms, table), table)
        with np.errstate(invalid="ignore"):
            self._allowed = np.where(self._eps > 0, MARGIN * self.noise + self._eps * self._scales, self.noise)

    def are_noise(self) -> Flags:
        """Return which pairs differ by no more than the twin runs do, or only in their dtype."""
        with np.errstate(invalid="ignore"):
            by_values = self._max_abs <= self._allowed
            by_statistics = self._statistic <= MARGIN * self.noise_of_statistics + self._eps
        are_noise = (self.kinds == "values") & by_values & self.is_finite
        are_noise |= (self.kinds == "statistics") & by_statistics & self.is_finite
        are_noise |= (self.kinds == "fingerprint") & self._has_other_print
        return np.asarray(are_noise | (self.kinds == "dtype"))

    def are_noise_farther(self, rows: Integers, factors: Floats, off: float = 0.0) -> Flags:
        """Return a mask of the rows that differ by no more than noise times `factors`.

        `factors` says how many times farther apart than in the twin run the parameters began the step. Norms are
        compared, because one element that is far apart moves a few elements of every later tensor. A further difference
        by the share `off` of the norm is allowed.
        """
        kinds, eps = self.kinds[rows], self._eps[rows] + off
        with np.errstate(invalid="ignore"):
            limit = MARGIN * factors * self._noise_of_norms[rows] + eps * self._norms[rows]
            by_norm = (self._l2_apart[rows] <= limit) & (eps > 0)
            by_statistics = self._statistic[rows] <= MARGIN * factors * self._lifted_statistics[rows] + eps
        are_noise = ((kinds == "values") & by_norm) | ((kinds == "statistics") & by_statistics)
        return np.asarray((are_noise & self.is_finite[rows]) | (kinds == "fingerprint"))

    def are_multiples(self, rows: Integers) -> Flags:
        """Return in which pairs one tensor is a multiple of the other tensor. Rounding cannot cause this."""
        is_large = numbers(self._table.column("numel"))[rows] >= _MIN_ITEMS
        factors = multiples(self._cosine[rows], self._l2_a[rows], self._l2_b[rows])
        return np.asarray(is_large & ~np.isnan(factors))

    def typical_factor(self, rows: Integers) -> float:
        """Return the median over pairs of the factor that brings the first tensor closest to the second, or NaN."""
        with np.errstate(invalid="ignore", divide="ignore"):
            factors = np.where(np.isnan(self._cosine[rows]), 1.0, self._cosine[rows]) * self._l2_b[rows]
            factors /= self._l2_a[rows]
        known = factors[np.isfinite(factors)]
        return float(np.median(known)) if len(known) else np.nan

    def are_scaled(self, rows: Integers, factor: float) -> Flags:
        """Return in which pairs the second tensor is `factor` times the first tensor, up to noise."""
        kinds, eps, off = self.kinds[rows], self._eps[rows], factor - 1
        one, two, apart = self._l2_a[rows], self._l2_b[rows], self._l2_apart[rows]
        with np.errstate(invalid="ignore", divide="ignore"):
            along = one * (self._cosine[rows] * two - one)  # a . (b - a), the scalar product with the difference
            rest = np.sqrt(np.maximum(0.0, apart**2 - 2 * off * along + (off * one) ** 2))
            by_norm = rest <= MARGIN * self._noise_of_norms[rows] + eps * self._norms[rows]
            noise = MARGIN * self._lifted_statistics[rows] + eps
            by_statistics = (self._statistic[rows] <= abs(off) + noise) & (np.abs(two / one - factor) <= noise)
        are_scaled = ((kinds == "values") & by_norm) | ((kinds == "statistics") & by_statistics)
        return np.asarray(are_scaled & self.is_finite[rows] & (eps > 0))

    def rounding_of_sum(self, rows: Integers, numel: int) -> float:
        """Return how far from 1 rounding may move the ratio of two norms of `numel` elements each.

        The relative error of a sum of n numbers is lambda sqrt(n) times the unit roundoff (Higham and Mary 2019, "A New
        Approach to Probabilistic Rounding Error Analysis"). The error of its square root is half as large, and the
        error of the ratio of two roots is twice that half. Lambda is 2 here; for torch's norm of 10 million elements on
        one thread, 1.6 was measured. Sums of shorter dtypes are kept in float32. The most is half of `_MIN_FACTOR`.
        """
        unit = min(float(self._eps[rows].max()) / _ROUNDINGS, 2.0 ** _BITS["float32"]) / 2
        return min(2 * float(np.sqrt(numel)) * unit, _MIN_FACTOR / 2)

    def typical_times(self, rows: Integers) -> float:
        """Return the difference between the runs divided by the noise: the median over the forward's values."""
        forward = rows[self.phases[rows] == "forward"]
        with np.errstate(invalid="ignore", divide="ignore"):
            times = self._l2_apart[forward] / self._noise_of_norms[forward]
        known = times[np.isfinite(times)]
        return max(1.0, float(np.median(known))) if len(known) else np.inf

    def typical_share(self, rows: Integers) -> float:
        """Return the median noise of the forward's values, as a share of their norm. It is at least one rounding."""
        forward = rows[self.phases[rows] == "forward"]
        chosen = forward if len(forward) else rows
        with np.errstate(invalid="ignore", divide="ignore"):
            norms = self._norms[chosen]
            shares = np.where(norms > 0, self._noise_of_norms[chosen] / norms, np.nan)
        shares = np.where(np.isnan(shares), self.noise_of_statistics[chosen], shares)
        least = float(np.median(self._eps[chosen])) / _ROUNDINGS or 2.0 ** _BITS["float32"]
        known = shares[~np.isnan(shares)]
        return max(float(np.median(known)), least) if len(known) else least

    def loudness(self, rows: Integers, eps: float) -> float:
        """Return the share of the norm above which noise runs differ by more than noise at the first step.

        The limit is far above rounding, and below the effect of a new dropout mask. `eps` is the perturbation of the
        noise runs. It matters under autocast, where it is a rounding of the dtype that the model computes with, and the
        values have a longer dtype.
        """
        return 8 * float(np.sqrt(max(np.median(self._eps[rows]) / _ROUNDINGS, eps)))

    def lines(self, rows: Integers, indices: Integers) -> list[dict[str, Any]]:
        """Return rows as dictionaries. `number` is the pair's index. Noise moves an element by up to `allowed`."""
        lines = self._table.take(pa.array(rows)).to_pylist()
        known = zip(lines, indices[rows].tolist(), np.nan_to_num(self._allowed[rows]).tolist(), strict=True)
        return [{**line, "number": number, "allowed": allowed} for line, number, allowed in known]


def multiples(cosine: Floats, one: Floats, two: Floats) -> Floats:
    """Return the factor between the tensors of each pair, from cosine and norms. NaN if neither is a multiple."""
    with np.errstate(invalid="ignore", divide="ignore"):
        factors = np.where(cosine > 0, 1.0, -1.0) * two / one
        off, rest = np.abs(factors - 1), np.sqrt(np.maximum(0.0, 1 - cosine * cosine))
        is_one = (two > 0) & np.isfinite(factors) & (off > _MIN_FACTOR) & (rest <= _MAX_REST * off)
    return np.where(is_one, factors, np.nan)


def _lifted(values: Floats, scales: Floats, table: Any) -> Floats:
    """Raise the noise of each tensor to at least the median noise of its step and site; NaN stays NaN."""
    groups = group_rows(table, ("step", "root", "site"))
    relative = np.divide(values, scales, out=np.full_like(values, np.nan), where=scales > 0)
    order = np.argsort(groups.ids, kind="stable")
    bounds = np.searchsorted(groups.ids[order], np.arange(groups.num_groups + 1))
    medians = np.zeros(groups.num_groups)
    for number in range(groups.num_groups):
        known = relative[order[bounds[number] : bounds[number + 1]]]
        known = known[~np.isnan(known)]
        medians[number] = np.median(known) if len(known) else 0.0
    return np.maximum(values, medians[groups.ids] * scales)


def _steadied(values: Floats, table: Any) -> Floats:
    """Return the noise of each row. Small tensors get their largest noise of any step, as one step's is random."""
    groups = group_rows(table, ("root", "module_path", "site", "name"))
    most = np.full(groups.num_groups, np.nan)
    np.fmax.at(most, groups.ids, values)
    return np.where(numbers(table.column("numel")) < _MIN_ITEMS, most[groups.ids], values)
