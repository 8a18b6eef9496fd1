"""The spark line: a series in one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
