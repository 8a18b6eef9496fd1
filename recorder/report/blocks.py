"""A block: a named piece of what the page draws, as JSON and typed arrays, and its bytes. Never reads a run.

The page of a file holds its blocks as base64; a server sends the same bytes.

Numbers are codes of one or two bytes: with two bytes a number has three or four digits, with one byte one or two, and a
screen shows no more. A series is scaled to its own range: linearly, or by the inverse hyperbolic sine where its
magnitudes span more than `_WIDE`, which is a logarithm for both signs, and linear around zero. What is stored are
differences of the codes, first between a lane and the lane before it, so that replicas cost nothing, then between a
column and the column before it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VERSION = 1
"""Raised where a page of an older version could not read a block."""
_LEVEL = 9
_ALIGN_BYTES = 8
_TYPES = {"uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"}
"""The element types that have a typed array in a browser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBlock:
    """A named piece of what is drawn."""

    name: str
    """The name has letters, digits, ``-``, ``.`` and ``/``; the package chooses it, and it never holds a text from a
    run."""
    data: Mapping[str, Any]
    """The part that becomes JSON; numbers that are not finite become null."""
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the bytes of the block, deflated without a header (`deflate-raw` of a browser).

        Inside: the length of a JSON document as a little-endian uint32, the document, zeros up to a multiple of 8, and
        the arrays one after the other, each from such a multiple on, where the document says.
        """
        entries, pieces, at = [], [], 0
        for name, array in self.arrays.items():
            assert array.dtype.name in _TYPES, f"{self.name}: {name} is {array.dtype}, which browsers do not have"
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            entries.append({"name": name, "type": array.dtype.name, "shape": list(array.shape), "offset": at})
            pieces.append(little.tobytes() + bytes(-little.nbytes % _ALIGN_BYTES))
            at += len(pieces[-1])
        head = {"version": VERSION, "name": self.name, "data": _finite(self.data), "arrays": entries}
        text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        start = len(text).to_bytes(4, "little") + text
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        whole = start + bytes(-len(start) % _ALIGN_BYTES) + b"".join(pieces)
        return packer.compress(whole) + packer.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


NO_ROW, NO_NUMBER, FIRST = 0, 1, 2
"""Codes of a cell of which nothing was recorded, and of one whose row has no such statistic; numbers begin behind."""
FINE, COARSE = 65534, 254
"""How many numbers a code tells apart: with two bytes, and with one."""
_WIDE = 64.0
_MAX_SPAN = 1e9
"""A value that is this many times smaller than the largest value of its series is drawn as zero."""
_LARGEST = float(np.finfo(np.float32).max)


class Quantised(NamedTuple):
    """Codes of an array of series, lanes and columns, and how each series is scaled."""

    codes: npt.NDArray[Any]
    """uint8 or uint16; differences, to be summed along columns and then along lanes, modulo their width."""
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    unit: npt.NDArray[np.float32]
    """The unit of the values of which the inverse hyperbolic sine is taken; 0 where a series is linear."""


def quantise(values: npt.NDArray[np.float32], has_row: npt.NDArray[np.bool_], levels: int) -> Quantised:
    """Return the codes of numbers.

    Args:
        values: by series, lane and column; NaN where there is none.
        has_row: where something was recorded, if not this statistic.
        levels: `FINE` or `COARSE`.
    """
    by_series = len(values), math.prod(values.shape[1:])  # there may be no series, as in a run of scalars alone
    flat = np.clip(values.reshape(by_series).astype(np.float64), -_LARGEST, _LARGEST)
    is_number = ~np.isnan(flat)
    sizes = np.abs(np.where(is_number, flat, 0.0))
    largest = sizes.max(axis=1, initial=0.0)
    smallest = np.where(sizes > 0, sizes, np.inf).min(axis=1, initial=np.inf)
    is_wide = largest > _WIDE * smallest
    unit = np.where(is_wide, np.maximum(smallest, largest / _MAX_SPAN), 0.0).astype(np.float32)
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
    differences = _differences(codes.astype(kind).reshape(values.shape))
    return Quantised(differences, low.astype(np.float32), high.astype(np.float32), unit)


def _differences(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    differences = codes.copy()
    differences[:, 1:] -= codes[:, :-1]
    along = differences.copy()
    along[:, :, 1:] -= differences[:, :, :-1]
    return along


def planes(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of codes, all low bytes first: similar bytes stand together, which deflates better."""
    if codes.dtype == np.uint8:
        return codes.reshape(-1)
    return np.concatenate([(codes & 0xFF).reshape(-1), (codes >> 8).reshape(-1)]).astype(np.uint8)
