"""Draws a series, or the histogram of a tensor, as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .apart import Bins

BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
"""The mark where a tensor held a NaN or an infinity."""
_LOG_RATIO = 1000.0


def spark_line(values: Sequence[float | None], bad: Sequence[bool], width: int = 24) -> str:
    """Draw a series, the largest value of each bucket where it is longer than `width`.

    Args:
        values: the series; None and non-finite values leave a gap.
        bad: True where a mark stands instead; as long as `values`.
        width: characters at most.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    largest = max(map(abs, known), default=0.0) or 1.0
    is_log = bool(known) and min(known) > 0 and largest > _LOG_RATIO * min(known)
    scaled = [_scale(value, largest, is_log) for value in values]
    low = min((value for value in scaled if value is not None), default=0.0)
    high = max((value for value in scaled if value is not None), default=0.0)
    line = []
    for start, stop in _buckets(len(values), width):
        bucket = [value for value in scaled[start:stop] if value is not None]
        if any(bad[start:stop]):
            line.append(NOT_FINITE)
        elif not bucket:
            line.append(" ")
        else:
            share = (max(bucket) - low) / (high - low) if high > low else 0.0
            line.append(BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)])
    return "".join(line)


def _scale(value: float | None, largest: float, is_log: bool) -> float | None:
    """Scale a value to -1 to 1, so that no difference overflows; or return its logarithm."""
    if value is None or not math.isfinite(value):
        return None
    return math.log(value) if is_log else value / largest


def _buckets(length: int, width: int) -> list[tuple[int, int]]:
    count = min(length, width)
    return [(length * i // count, length * (i + 1) // count) for i in range(count)]


HISTOGRAM_WIDTH = 24
"""Characters at most."""
_LEAST = 1e-6
HISTOGRAM_LEGEND = "the lowest block is one in a million, each higher one 5.6 times more, the full one all"


def histogram_line(shares: Sequence[float]) -> str:
    """Draw shares on a logarithmic scale, so that a single outlier shows; a bin without values is a gap."""
    return "".join(_block(share) for share in shares)


def extent(bins: Bins) -> str:
    """Return which magnitudes the line is of: ``|x| from 2^-20 to 2^4, 2 powers of two a character``."""
    if not any(bins.shares):
        return "of no finite value but zero"
    wide = f", {bins.exponents_per_bin} powers of two a character" if bins.exponents_per_bin > 1 else ""
    return f"|x| from 2^{bins.first} to 2^{bins.last + 1}{wide}"


def _block(share: float) -> str:
    if share <= 0:
        return " "
    height = 1 - math.log(min(share, 1.0)) / math.log(_LEAST)
    return BLOCKS[max(0, min(math.floor(height * len(BLOCKS)), len(BLOCKS) - 1))]
