"""Numbers that rules read out of histograms and sums of units: what is in the bytes of a row, as a few numbers.

A rule is fed columns of numbers alone. Each number here is null where the row lacks the bytes, or where they say
nothing of it. Bytes that are damaged are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...errors import RunError
from ...format.numbers.histogram import NORMAL_EXPONENTS, Histogram
from ...format.numbers.units import Units
from ...read.shards.decode import parse_shape

ACTIVE = 0.01
"""A unit that is not zero in a smaller share of its values is dead."""
LEAST_VALUES = 32
"""Of fewer values of a unit, nobody can say that it is dead."""


class Detail(NamedTuple):
    """A number out of the bytes of a row."""

    column: str
    """Which bytes."""
    number_of: Callable[[bytes, str, str], float | None]
    """Makes the number of bytes, dtype and shape as the row has them."""


def _dead_share(data: bytes, dtype: str, shape: str) -> float | None:
    units = Units.from_bytes(data, parse_shape(shape))
    if "float" not in dtype or units.num_values < LEAST_VALUES or not len(units):
        return None
    return float(np.mean(1 - units.zero_share < ACTIVE))


def _largest(data: bytes, dtype: str, shape: str) -> float | None:
    """The largest magnitude of a unit, in the root mean squares of the median of the units that are not dead."""
    units = Units.from_bytes(data, parse_shape(shape))
    sizes = units.rms[units.rms > 0]
    if "float" not in dtype or len(sizes) < 2 or not np.isfinite(sizes).all():
        return None
    return float(units.absmax.max() / np.median(sizes))


def _subnormal_share(data: bytes, dtype: str, shape: str) -> float | None:
    """Which share of the values that are not zero lies below the least normal number of the type."""
    counted = _counted(data, dtype)
    if counted is None:
        return None
    histogram, (lowest, _), total = counted
    return float(histogram.counts[:, histogram.exponents < lowest].sum() / total)


def _top_share(data: bytes, dtype: str, shape: str) -> float | None:
    """Which share of the values that are not zero lies in the highest power of two of the type, or is infinite.

    Of positive values alone: the negative ones may be a mask.
    """
    counted = _counted(data, dtype)
    if counted is None:
        return None
    histogram, (_, highest), total = counted
    return float((histogram.counts[1, histogram.exponents >= highest].sum() + histogram.infinite[1]) / total)


def _counted(data: bytes, dtype: str) -> tuple[Histogram, tuple[int, int], int] | None:
    ends = NORMAL_EXPONENTS.get(dtype)
    if ends is None:
        return None
    histogram = Histogram.from_bytes(data)
    return (histogram, ends, histogram.num_values) if histogram.num_values else None


DETAILS = {
    "units.dead_share": Detail("units", _dead_share),
    "units.largest": Detail("units", _largest),
    "histogram.subnormal_share": Detail("histogram", _subnormal_share),
    "histogram.top_share": Detail("histogram", _top_share),
}
"""By the name that rules give it."""


def columns_of(names: Iterable[str], table: Any) -> list[Any]:
    """These numbers of each row of a table, which has the bytes and the columns `dtype` and `shape`."""
    return [_column(DETAILS[name], table) for name in names]


def _column(detail: Detail, table: Any) -> Any:
    numbers = np.full(table.num_rows, math.nan)
    data = table.column(detail.column)
    places = np.flatnonzero(data.is_valid().to_numpy(zero_copy_only=False)) if data.null_count < len(data) else ()
    rows = table.select([detail.column, "dtype", "shape"]).take(pa.array(places, pa.int64()))
    texts = zip(*(column.to_pylist() for column in rows.columns), strict=True)
    for place, (own, dtype, shape) in zip(places, texts, strict=True):
        with suppress(RunError):
            number = detail.number_of(own, dtype, shape)
            numbers[place] = math.nan if number is None else number
    return pa.array(numbers)
