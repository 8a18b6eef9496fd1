"""Columns of rows as whole numbers: one number a row that is equal where several columns are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
POSITIVE = np.int64((1 << 63) - 1)
NULL = np.iinfo(np.int64).min + 7
"""Stands for null among the bits of statistics; as a float64 it is a denormal that no statistic is."""


def pack(columns: Sequence[npt.NDArray[Any]]) -> Ints:
    """One number per row, equal where all columns are; numbers count up in the order of the columns."""
    numbers: Ints = np.unique(mix(columns), return_inverse=True)[1].reshape(-1)
    return numbers


def mix(columns: Sequence[npt.NDArray[Any]]) -> Ints:
    """Return one number per row, equal where all columns of whole numbers are, and in their order; there are gaps.

    The result may be one of the columns, so nobody may change it.
    """
    mixed, size = np.zeros(0, np.int64), 1
    for column in columns:
        values = column.astype(np.int64, copy=False)
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        if size > 1 and size * (high - low + 1) >= 1 << 62:
            mixed = np.unique(mixed, return_inverse=True)[1].reshape(-1)
            size = int(mixed.max()) + 1
        if size * (high - low + 1) >= 1 << 62:
            values = np.unique(values, return_inverse=True)[1].reshape(-1)
            low, high = 0, int(values.max())
        values = values - low if low else values
        if size > 1:
            mixed = mixed * (high - low + 1)
            mixed += values
        else:  # what came before is the same in all rows
            mixed = values
        size *= high - low + 1
    return mixed


def bits_of(column: Any) -> Ints:
    """A column of numbers as integers that are equal where the values are, NaN and null included."""
    values = (column.fill_null(0) if column.null_count else column).to_numpy()
    bits: Ints = values.view(np.int64).copy()
    if column.null_count:
        bits[column.is_null().to_numpy()] = NULL
    return bits


def digest(columns: Sequence[Ints]) -> Ints:
    """One number per row out of several, equal where all are (and, one time in 2^64, where they are not)."""
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        total = (total ^ (total >> np.uint64(29)) ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return total.view(np.int64)
