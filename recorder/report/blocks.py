"""Blocks and cubes of a page. A block is a named part of the data that the page draws, as JSON and typed arrays.

A page in a file holds its blocks as base64. A server sends the same bytes. This module never reads a run.

A cube holds the statistics of many series over steps, for a few lanes (drawn lines), and becomes blocks. If a run has
more steps than a cube has columns, a column holds the most extreme value of its steps, so that no spike vanishes.

A block stores numbers as codes of one or two bytes. Two bytes keep three or four digits of a number. One byte keeps one
or two digits, which is enough for a screen. Each series is scaled to its own range. The scale is linear, or the inverse
hyperbolic sine if the magnitudes differ by more than `_WIDE`; this function is logarithmic for both signs, and linear
around zero. The codes are stored as differences. First each lane is stored as its difference to the lane before it, so
that replicas cost nothing. Then each column is stored as its difference to the column before it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..numerics.keys import Integers
from ..system.text import for_json

VERSION = 1
"""The version of the blocks. It is raised when older pages cannot read new blocks."""
_LEVEL = 9
_ALIGN_BYTES = 8
_TYPES = {"uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"}
"""The element types for which browsers have a typed array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBlock:
    """A named part of the data that the page draws."""

    name: str
    """A name of letters, digits, ``-``, ``.`` and ``/``. The package chooses it. It is never a text from a run."""
    data: Mapping[str, Any]
    """The part of the block that is sent as JSON. Nonfinite numbers become null."""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the bytes of the block, deflated without a header (`deflate-raw` of a browser).

        The bytes hold the length of a JSON document as a little-endian uint32, the document, zeros up to a multiple of
        8, and the arrays. Each array begins at a multiple of 8. The document names the array's offset.
        """
        entries, pieces, at = [], [], 0
        for name, array in self.arrays.items():
            assert array.dtype.name in _TYPES, f"{self.name}: {name} is {array.dtype}, which browsers do not have"
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            entries.append({"name": name, "type": array.dtype.name, "shape": list(array.shape), "offset": at})
            pieces.append(little.tobytes() + bytes(-little.nbytes % _ALIGN_BYTES))
            at += len(pieces[-1])
        head = {"version": VERSION, "name": self.name, "data": for_json(self.data), "arrays": entries}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        start = len(text).to_bytes(4, "little") + text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        whole = start + bytes(-len(start) % _ALIGN_BYTES) + b"".join(pieces)
        return packer.compress(whole) + packer.flush()


NO_ROW, NO_NUMBER, FIRST = 0, 1, 2
"""The code of a cell without a row, the code of a row without the statistic, and the lowest code of a number."""
FINE, COARSE = 65534, 254
"""How many values a two-byte code and a one-byte code can distinguish."""
_WIDE = 64.0
_MAX_COARSE_SPAN = 1e20
"""With one-byte codes, a value is drawn as zero if the largest value of its series is this many times larger. If the
series has both signs, which share the codes, the square root of this is the limit. With two-byte codes no value is
drawn as zero, so that a run that diverges to 1e38 keeps its healthy values."""
_LARGEST = float(np.finfo(np.float32).max)


class Quantised(NamedTuple):
    """The values of each series, lane and column as codes of one or two bytes, and the scale of each series."""

    codes: npt.NDArray[Any]
    """Differences of codes, as uint8 or uint16. To decode, sum along columns, then along lanes, with wraparound."""
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    unit: npt.NDArray[np.float32]
    """The divisor of each series' values inside the inverse hyperbolic sine. 0 where a series is scaled linearly."""


def quantise(values: npt.NDArray[np.float32], has_row: npt.NDArray[np.bool_], levels: int) -> Quantised:
    """Return the codes of numbers. `values` has the axes series, lane and column. NaN means that there is no number.

    `has_row` is true where a row exists, even a row without this statistic. `levels` is `FINE` or `COARSE`.
    """
    by_series = len(values), math.prod(values.shape[1:])  # a run that has only scalars has no series
    flat = np.clip(values.reshape(by_series).astype(np.float64), -_LARGEST, _LARGEST)
    is_number = ~np.isnan(flat)
    sizes = np.abs(np.where(is_number, flat, 0.0))
    largest = sizes.max(axis=1, initial=0.0)
    smallest = np.where(sizes > 0, sizes, np.inf).min(axis=1, initial=np.inf)
    is_wide = largest > _WIDE * smallest
    has_both_signs = (flat > 0).any(axis=1) & (flat < 0).any(axis=1)
    spans = np.where(has_both_signs, math.sqrt(_MAX_COARSE_SPAN), _MAX_COARSE_SPAN)
    least = largest / spans if levels <= COARSE else 0.0
    unit = np.where(is_wide, np.maximum(smallest, least), 0.0).astype(np.float32)
    divisor = np.where(unit > 0, unit, 1.0).astype(np.float64)[:, None]
    scaled = np.where((unit > 0)[:, None], np.arcsinh(flat / divisor), flat)
    low = np.where(is_number, scaled, np.inf).min(axis=1, initial=np.inf)
    high = np.where(is_number, scaled, -np.inf).max(axis=1, initial=-np.inf)
    low, high = (np.where(np.isfinite(ends), ends, 0.0) for ends in (low, high))
    span = np.where(high > low, high - low, 1.0)[:, None]
    steps = np.rint((np.where(is_number, scaled, 0.0) - low[:, None]) / span * (levels - 1))
    rows = has_row.reshape(by_series)
    codes = np.where(is_number, FIRST + np.clip(steps, 0, levels - 1), np.where(rows, NO_NUMBER, NO_ROW))
    kind = np.uint8 if levels <= COARSE else np.uint16
    by_lane = np.diff(codes.astype(kind).reshape(values.shape), axis=1, prepend=kind(0))
    differences = np.diff(by_lane, axis=2, prepend=kind(0))
    return Quantised(differences, low.astype(np.float32), high.astype(np.float32), unit)


def planes(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of codes, all low bytes before all high bytes. Similar bytes compress better together."""
    if codes.dtype == np.uint8:
        return codes.reshape(-1)
    return np.concatenate([(codes & 0xFF).reshape(-1), (codes >> 8).reshape(-1)]).astype(np.uint8)


class Cube:
    """Holds a number for each statistic, series, lane (drawn line) and column (range of steps)."""

    def __init__(self, *, steps: Sequence[int], num_columns: int, num_series: int, num_lanes: int,
                 statistics: Sequence[str]) -> None:  # fmt: skip
        """Make an empty cube with columns for the ascending `steps`. There must be at least `num_columns` steps."""
        self.steps = np.array(steps, np.int64)
        self.shape = num_series, num_lanes, num_columns
        self._column = np.arange(len(steps)) * num_columns // max(len(steps), 1)
        self.values = {name: np.full(self.shape, np.nan, np.float32) for name in statistics}
        self.has_row = np.zeros(self.shape, np.bool_)
        columns = np.arange(num_columns if len(steps) else 0)
        self.first_steps: list[int] = self.steps[np.searchsorted(self._column, columns)].tolist()
        """The first step of each column that holds steps."""
        self.num_steps, self.last_step = len(steps), int(self.steps[-1]) if len(steps) else None

    def columns_of(self, steps: Integers) -> Integers:
        """Return the column of each step. The cube must know all of these steps."""
        return np.asarray(self._column[np.searchsorted(self.steps, steps)])

    def put(
        self, series: Integers, lanes: Integers, steps: Integers, numbers: Mapping[str, npt.NDArray[np.float64]]
    ) -> Integers:
        """Add values, possibly several to a cell. Return the changed columns. NaN means a row without a number."""
        cells = (series * self.shape[1] + lanes) * self.shape[2] + self.columns_of(steps)
        has_row = self.has_row.reshape(-1)
        changed = [cells[~has_row[cells]]]
        has_row[cells] = True
        for name, values in self.values.items():
            flat = values.reshape(-1)
            is_known = ~np.isnan(numbers[name])
            at, new = cells[is_known], np.clip(numbers[name][is_known], -_LARGEST, _LARGEST).astype(np.float32)
            old = flat[at]
            stands_out = np.isnan(old) | (_weight(name, new) > _weight(name, old))
            at, new = at[stands_out], new[stands_out]
            order = np.argsort(_weight(name, new), kind="stable")
            flat[at[order]] = new[order]  # if a cell gets several values, the last value stays
            changed.append(at)
        return np.unique(np.concatenate(changed) % max(self.shape[2], 1))

    def keep_lanes(self, num_lanes: int) -> None:
        """Keep only the first `num_lanes` lanes. The other lanes must be empty."""
        self.shape = self.shape[0], num_lanes, self.shape[2]
        self.values = {name: values[:, :num_lanes] for name, values in self.values.items()}
        self.has_row = self.has_row[:, :num_lanes]

    def blocks(self, prefix: str, max_fine: int) -> list[PageBlock]:
        """Return a block for each statistic. The codes have two bytes if the cube has at most `max_fine` cells."""
        num = len(self.first_steps)
        levels = FINE if self.shape[0] * self.shape[1] * num * len(self.values) <= max_fine else COARSE
        has_row = self.has_row[:, :, :num]
        return [_block(prefix, name, values[:, :, :num], has_row, levels, {}) for name, values in self.values.items()]


class GrowingCube(Cube):
    """A cube to which steps are added while a run grows. Its number of columns is fixed.

    Each step has a column of its own while there is room. Whenever all columns are full, pairs of columns are joined.
    """

    def __init__(self, *, steps: Sequence[int], num_columns: int, num_series: int, num_lanes: int,
                 statistics: Sequence[str]) -> None:  # fmt: skip
        super().__init__(
            steps=(), num_columns=max(num_columns, 2), num_series=num_series, num_lanes=num_lanes, statistics=statistics
        )
        self.changed = np.zeros(self.shape[2], np.int64)
        """For each column, the `version` of the cube when the column was changed last."""
        self.version = 0
        """The current version of the cube. Every column that changes is marked with it in `changed`."""
        self.num_halved = 0
        """How many times pairs of columns were joined. Each time, every column has changed."""
        self._width = 1
        self._num_in_last = 0
        self._saved: tuple[int, dict[str, npt.NDArray[np.float32]], npt.NDArray[np.bool_]] | None = None
        self.add_steps(steps)

    def columns_of(self, steps: Integers) -> Integers:
        """Return the column of each step. An unknown step gets the column of the last known step before it."""
        columns = np.searchsorted(np.array(self.first_steps, np.int64), steps, side="right") - 1
        return np.maximum(columns, 0)

    def add_steps(self, steps: Sequence[int]) -> None:
        """Make columns for the steps that are later than all known steps. `steps` must be ascending."""
        for step in steps:
            if self.last_step is not None and step <= self.last_step:
                continue
            self.last_step = step
            self.num_steps += 1
            if len(self.first_steps) == self.shape[2] and self._num_in_last == self._width:
                self._halve()
            if self.first_steps and self._num_in_last < self._width:
                self._num_in_last += 1
            else:
                self.first_steps.append(step)
                self._num_in_last = 1

    def put(
        self, series: Integers, lanes: Integers, steps: Integers, numbers: Mapping[str, npt.NDArray[np.float64]]
    ) -> Integers:
        """Add values, and return the columns that the values change. These columns are marked in `changed`."""
        columns = super().put(series, lanes, steps, numbers)
        self.changed[columns] = self.version
        return columns

    def save_from(self, step: int) -> None:
        """Save the columns from this step on. `restore` then removes the tentative values that are added afterwards."""
        first = int(self.columns_of(np.array([step]))[0])
        values = {name: array[:, :, first:].copy() for name, array in self.values.items()}
        self._saved = first, values, self.has_row[:, :, first:].copy()

    def restore(self) -> None:
        """Remove the values that were added since `save_from`."""
        if self._saved is None:
            return
        first, values, has_row = self._saved
        for name, array in values.items():
            self.values[name][:, :, first:] = array
        self.has_row[:, :, first:] = has_row
        self.changed[first:] = self.version
        self._saved = None

    def adopt(self, older: GrowingCube) -> None:
        """Take over an older cube's values. Its series, lanes and statistics are the first ones of this cube."""
        while len(older.first_steps) > self.shape[2]:
            older._halve()
        num_series, num_lanes, num = older.shape[0], older.shape[1], len(older.first_steps)
        for name, array in self.values.items():
            array[:num_series, :num_lanes, :num] = older.values[name][:, :, :num]
        self.has_row[:num_series, :num_lanes, :num] = older.has_row[:, :, :num]
        for name in ("first_steps", "num_steps", "last_step", "_width", "_num_in_last", "num_halved", "version"):
            setattr(self, name, getattr(older, name))
        self.changed[:] = self.version

    def grown(self, prefix: str, since: int) -> list[PageBlock]:
        """Return a block for each statistic with the columns that changed after the version `since`."""
        columns = np.flatnonzero(self.changed[: len(self.first_steps)] > since)
        if not len(columns) or not self.shape[0]:
            return []
        data, has_row = {"columns": columns.tolist()}, self.has_row[:, :, columns]
        changed = ((name, values[:, :, columns]) for name, values in self.values.items())
        return [_block(prefix, name, values, has_row, FINE, data) for name, values in changed]

    def _halve(self) -> None:
        assert self._saved is None, "values that are not final must be removed first"
        num = len(self.first_steps)
        num_pairs, num_left = num // 2, -(-num // 2)  # with an odd number of columns, the last column is not joined
        for name, array in self.values.items():
            kept, right = array[:, :, 0:num:2].copy(), array[:, :, 1:num:2]
            left = kept[:, :, :num_pairs]
            np.copyto(left, right, where=np.isnan(left) | (_weight(name, right) > _weight(name, left)))
            array[:, :, :num_left], array[:, :, num_left:] = kept, np.nan
        has_row = self.has_row[:, :, 0:num:2].copy()
        has_row[:, :, :num_pairs] |= self.has_row[:, :, 1:num:2]
        self.has_row[:, :, :num_left], self.has_row[:, :, num_left:] = has_row, False
        if num % 2 == 0:
            self._num_in_last += self._width
        self.first_steps = self.first_steps[::2]
        self._width *= 2
        self.num_halved += 1
        self.changed[:] = self.version


def _block(
    prefix: str, name: str, values: npt.NDArray[np.float32], has_row: npt.NDArray[np.bool_], levels: int,
    data: Mapping[str, Any],
) -> PageBlock:  # fmt: skip
    coded = quantise(values, has_row, levels)
    return PageBlock(
        name=f"{prefix}/{name}",
        data={"statistic": name, "shape": list(values.shape), "levels": levels, **data},
        arrays={"codes": planes(coded.codes), "low": coded.low, "high": coded.high, "unit": coded.unit},
    )


def _weight(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if name == "min":
        return -values
    return values if name == "max" else np.abs(values)
