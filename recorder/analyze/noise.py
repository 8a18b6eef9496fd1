"""Owns which differences noise alone would make: where a repeat of the first run, or a perturbed twin, differs as much.

Noise is looked up tensor by tensor and step by step; where there is hardly any, by chance or because a perturbation did
not reach the tensor, the median of the same site and step stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .align import Alignment, align
from .compare import Tolerance
from .keys import Integers, group_rows
from .moments import Floats, numbers
from .pairs import Judged, Side, judge

MARGIN = 10.0
"""How many times the noise a difference may be: a twin is one sample of it, at one place."""
_BITS = {
    "float64": -52, "float32": -23, "float16": -10, "bfloat16": -7, "complex128": -52, "complex64": -23,
    "complex32": -10, "float8_e4m3fn": -3, "float8_e4m3fnuz": -3, "float8_e5m2": -2, "float8_e5m2fnuz": -2,
}  # fmt: skip
"""How far the number after 1 is away, as a power of two."""
_ROUNDINGS = 8
"""Roundings of the largest magnitude that are never more than noise."""


class _Noise:
    """How far noise moves the rows of the first run; NaN where that is not known."""

    def __init__(self, a: Side, rows: Integers, sides: Sequence[Side]) -> None:
        num_rows = a.table.num_rows
        self.values: Floats = np.full(num_rows, np.nan)
        """Largest absolute distance."""
        self.statistics: Floats = np.full(num_rows, np.nan)
        """How far the statistic that is farthest apart is, of the largest magnitude."""
        self.has_other_print = np.zeros(num_rows, np.bool_)
        for side in sides:
            pairs = align(a.table, side.table)
            kept = np.isin(pairs.a, rows)
            if kept.any():
                self._add(a, side, pairs._replace(a=pairs.a[kept], b=pairs.b[kept]))

    def _add(self, a: Side, side: Side, pairs: Alignment) -> None:
        judged = judge(a, side, pairs, Tolerance(), lambda num_bytes: None)
        is_equal = judged.kinds == ""
        for known in (self.values, self.statistics):
            known[pairs.a[is_equal]] = np.fmax(known[pairs.a[is_equal]], 0.0)
        rows = pairs.a[~is_equal]
        for known, column in ((self.values, "max_abs"), (self.statistics, "statistic_rel")):
            np.fmax.at(known, rows, numbers(judged.differing.column(column)))
        self.has_other_print[rows] = True


def without_noise(judged: Judged, a: Side, pairs: Alignment, sides: Sequence[Side]) -> Judged:
    """The same without the pairs that are apart by no more than noise; the others have a column `noise`.

    Args:
        judged: exactly, or by a tolerance.
        a: rows of the first run.
        pairs: what was judged.
        sides: the same steps of runs that differ from the first by noise alone.
    """
    places = np.flatnonzero(judged.kinds != "")
    if not sides or not len(places):
        nothing = pa.nulls(judged.differing.num_rows, pa.float64())
        return judged._replace(differing=judged.differing.append_column("noise", nothing))
    table, rows = judged.differing, pairs.a[places]
    noise = _Noise(a, rows, sides)
    scales, eps = _scales(table), _roundings(table)
    of_values = _lifted(noise.values[rows], scales, table)
    kinds = judged.kinds[places]
    with np.errstate(invalid="ignore"):
        by_values = numbers(table.column("max_abs")) <= np.where(eps > 0, MARGIN * of_values + eps * scales, of_values)
        of_statistics = noise.statistics[rows]
        by_statistics = numbers(table.column("statistic_rel")) <= MARGIN * of_statistics + eps
    is_finite = _counts(table, "nonfinite_a") == _counts(table, "nonfinite_b")
    is_noise = (kinds == "values") & by_values & is_finite
    is_noise |= (kinds == "statistics") & by_statistics & is_finite
    is_noise |= (kinds == "fingerprint") & noise.has_other_print[rows]
    is_noise |= kinds == "dtype"
    found = judged.kinds.copy()
    found[places[is_noise]] = ""
    shown = np.where(kinds == "statistics", of_statistics, of_values)
    table = table.append_column("noise", pa.array(shown, mask=np.isnan(shown)))
    return judged._replace(kinds=found, differing=table.filter(pa.array(~is_noise)))


def _scales(table: Any) -> Floats:
    """The largest magnitude of each pair's two tensors."""
    far, of_max = (numbers(table.column(name)) for name in ("max_abs", "of_max"))
    return np.divide(far, of_max, out=np.zeros_like(far), where=of_max > 0)


def _roundings(table: Any) -> Floats:
    """How far roundings move a number of each pair's coarser type, relatively; 0 of whole numbers."""
    pairs = zip(*(table.column(f"dtype_{side}").to_pylist() for side in "ab"), strict=True)
    known: dict[tuple[str, str], float] = {}
    return np.array([known.setdefault(pair, max(map(_eps, pair))) for pair in pairs], np.float64)


def _eps(dtype: str) -> float:
    return _ROUNDINGS * 2.0 ** _BITS[dtype] if dtype in _BITS else 0.0


def _lifted(values: Floats, scales: Floats, table: Any) -> Floats:
    """Noise, or what the median tensor of the same step and site has of it where that is more; NaN stays."""
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


def _counts(table: Any, name: str) -> npt.NDArray[np.float64]:
    return np.nan_to_num(numbers(table.column(name)))
