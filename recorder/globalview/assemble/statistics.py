"""The statistics of a global tensor, combined from those of its chunks; no payload is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...format.moments import join, merge
from ...format.payload.fingerprint import MODULUS, moved, to_text
from ...format.schema import COUNTS, MEASURED, NONFINITE, STATISTIC_COLUMNS, STATISTICS, Combine
from ...layout.regions import Ints as Shape

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
"""Statistics by name; NaN stands for null."""


def combine(chunks: Mapping[str, Floats], numels: Floats, factors: Floats, starts: npt.NDArray[np.int64]) -> Columns:
    """Statistics of groups of chunks that share no element.

    Args:
        chunks: each statistic of all chunks, group by group, as float64; counts too; NaN for null.
        numels: elements of each chunk.
        factors: what each chunk's values are multiplied with.
        starts: where each group begins.

    Returns:
        Each statistic of every group; null wherever some chunk has none although it has elements.
    """
    if not len(starts):
        return {name: np.zeros(0) for name in (*STATISTICS, *COUNTS)}
    own_counts = {name: np.where(numels == 0, 0.0, chunks[name]) for name in COUNTS}
    counts = {name: join(Combine.SUM, column, starts) for name, column in own_counts.items()}
    num_finite = numels - np.add.reduce([own_counts[name] for name in NONFINITE])
    is_known = np.logical_and.reduceat(~np.isnan(own_counts[MEASURED]), starts)
    negative = factors < 0
    with np.errstate(all="ignore"):
        scaled = {
            one.name: chunks[one.name] * (factors if one.has_sign else np.abs(factors)) ** one.degree
            for one in STATISTIC_COLUMNS
        }
        lows, highs = scaled["min"], scaled["max"]
        scaled |= {"min": np.where(negative, highs, lows), "max": np.where(negative, lows, highs)}
    merged = merge(scaled, num_finite, num_finite > 0, starts)
    # One chunk alone keeps what was measured, bit by bit: a mean is not always sum / n to the last digit.
    same = (np.diff([*starts, len(numels)]) == 1) & (factors[starts] == 1.0)
    for name in STATISTICS:
        merged[name] = np.where(same, chunks[name][starts], np.where(is_known, merged[name], np.nan))
    return {**merged, **{name: np.where(is_known, values, np.nan) for name, values in counts.items()}}


def combine_fingerprints(
    fingerprints: Sequence[str | None], moves: Sequence[Shape | None], item_bytes: int
) -> str | None:
    """The fingerprint of a whole tensor from those of its chunks; None where one is missing.

    Args:
        fingerprints: of the chunks, as in their rows.
        moves: where each lies, if its fingerprint was taken at the origin; None where it was taken at its position.
        item_bytes: bytes of an element.
    """
    total = 0
    for text, offsets in zip(fingerprints, moves, strict=True):
        if text is None:
            return None
        try:
            value = int(text, 16)
        except ValueError:
            return None
        total += moved(value, item_bytes, offsets) if offsets is not None else value
    return to_text(total % MODULUS)
