"""Sums over the units of a tensor (neurons or channels), and sketches of tokens.

A unit is all elements at one index along one dim: a neuron, a channel or a head; see "Units" in FORMAT.md. Sums over
units can be added up over chunks, ranks, steps and runs, as histograms can.

A sketch is a digest of a token: eight numbers. The sketches of two values differ by about as much as the values do.
Each number is the sum of the token's elements, with signs that depend on an element's position alone (Achlioptas,
"Database-friendly random projections", 2003). So programs on two machines can compare a token's values without keeping
them. The signs must never change, because recorded sketches depend on them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError
from ..sites import MAX_COUNT

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_UNITS = 1 << 15
"""The most units of a tensor. A longer dim, such as a vocabulary, has no units: its rows would take megabytes."""
_HEAD = struct.Struct("<BBH")
"""The first bytes of the column `units`: the number of bytes of a count of zeros, the dim, and 0."""
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class Sides(NamedTuple):
    """The layout in memory of a tensor's units (neurons or channels)."""

    dim: int
    num: int
    inner: int
    """The number of adjacent elements of one unit."""


def sides_of(shape: Sequence[int], dim: int) -> Sides | str:
    """Return the layout of units along `dim`, which may be negative. If there are no units, return the reason."""
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
        return f"{len(shape)} dims, none of which is {dim}"
    if shape[at] > MAX_UNITS:
        return f"{shape[at]} units, more than {MAX_UNITS}"
    return Sides(at, shape[at], math.prod(shape[at + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The sums over the finite values of each unit (index along a dim) of a tensor, and its zeros. Supports `+`."""

    dim: int
    sum: Floats
    """The sum of each unit's values. `sum`, `sum_sq`, `absmax` and `zero_count` have the shape (units,)."""
    sum_sq: Floats
    absmax: Floats
    """The largest magnitude in each unit; 0 without finite values."""
    zero_count: Ints
    num_values: int = 0
    """The number of elements of each unit, finite or not."""

    def __len__(self) -> int:
        return len(self.sum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Units) and ((self.to_bytes(), self.num_values) == (other.to_bytes(), other.num_values))

    __hash__ = None  # type: ignore[assignment]

    @property
    def mean(self) -> Floats:
        """The mean of each unit. It is correct only if all values of the unit are finite."""
        return self.sum / max(1, self.num_values)

    @property
    def rms(self) -> Floats:
        """The root mean square of each unit. It is correct only if all values of the unit are finite."""
        rms: Floats = np.sqrt(self.sum_sq / max(1, self.num_values))
        return rms

    @property
    def zero_share(self) -> Floats:
        """The fraction of zeros in each unit. It is 1 for a dead unit."""
        return self.zero_count / max(1, self.num_values)

    @property
    def num_dead(self) -> int:
        """The number of dead units, whose values are all zero."""
        return int(((self.zero_count == self.num_values) & (self.num_values > 0)).sum())

    def __str__(self) -> str:
        """Return a line for each of the ten units with the largest magnitudes, and a line with totals."""
        order = np.argsort(-self.absmax, kind="stable")[:10]
        lines = [f"{'unit':>8} {'mean':>11} {'rms':>11} {'absmax':>11} {'zero':>6}"]
        columns = (self.mean, self.rms, self.absmax)
        for unit in order.tolist():
            numbers = " ".join(f"{column[unit]:11.4g}" for column in columns)
            lines.append(f"{unit:8} {numbers} {self.zero_share[unit]:6.1%}")
        rest = f"{len(self)} units of dim {self.dim}, {self.num_values} values each; {self.num_dead} all zero"
        return "\n".join([*lines, rest])

    def __add__(self, other: Units) -> Units:
        """Add the sums of two tensors unit by unit. Raises ValueError for different dims or numbers of units."""
        if (self.dim, len(self)) != (other.dim, len(other)):
            raise ValueError(f"{len(self)} units of dim {self.dim} and {len(other)} of dim {other.dim} do not add up")
        return Units(
            dim=self.dim,
            sum=self.sum + other.sum,
            sum_sq=self.sum_sq + other.sum_sq,
            absmax=np.maximum(self.absmax, other.absmax),
            zero_count=self.zero_count + other.zero_count,
            num_values=self.num_values + other.num_values,
        )

    def scaled(self, factor: float) -> Units:
        """Return the sums over the units of the tensor times a factor."""
        with np.errstate(all="ignore"):
            return replace(
                self, sum=self.sum * factor, sum_sq=self.sum_sq * factor * factor, absmax=self.absmax * abs(factor)
            )

    def to_bytes(self) -> bytes:
        """Encode the sums for the column `units` in the shortest form. Equal sums have equal bytes."""
        return packed(self.dim, np.stack((self.sum, self.sum_sq, self.absmax)), self.zero_count)

    @classmethod
    def from_bytes(cls, data: bytes, shape: Sequence[int]) -> Units:
        """Decode the column `units` for a tensor of this shape. Raises CorruptError for invalid bytes."""
        if len(data) < _HEAD.size:
            raise CorruptError(f"units have {len(data)} bytes: expected at least {_HEAD.size}")
        width, dim, layout = _HEAD.unpack_from(data)
        if width not in _TYPES or layout or dim >= len(shape):
            raise CorruptError(f"units of a tensor of shape {list(shape)} begin with {width}, {dim}, {layout}: none")
        num = shape[dim]
        if len(data) != _HEAD.size + num * (24 + width):
            raise CorruptError(f"{num} units have {len(data)} bytes: expected {_HEAD.size + num * (24 + width)}")
        sums = np.frombuffer(data, "<f8", 3 * num, _HEAD.size).reshape(3, num).astype(np.float64)
        zeros = np.frombuffer(data, _TYPES[width], num, _HEAD.size + 24 * num).astype(np.int64)
        num_values = math.prod(shape) // num if num else 0
        if num and not ((zeros >= 0) & (zeros <= min(num_values, MAX_COUNT))).all():
            raise CorruptError(f"units of {num_values} values each have {zeros.max()} zeros")
        if np.isnan(sums[1:]).any() or (sums[1:] < 0).any():
            raise CorruptError("units have negative or NaN sums of squares or magnitudes")
        return cls(dim=dim, sum=sums[0], sum_sq=sums[1], absmax=sums[2], zero_count=zeros, num_values=num_values)


def packed(dim: int, sums: Floats, zeros: Ints) -> bytes:
    """Encode sums over the units along `dim` for the column `units`.

    `sums` has the shape (3, units): sums, sums of squares, largest magnitudes. `zeros` counts zeros per unit.
    """
    largest = int(zeros.max(initial=0))
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
    return _HEAD.pack(width, dim, 0) + sums.astype("<f8").tobytes() + zeros.astype(_TYPES[width]).tobytes()


NUM_SKETCHED = 8
"""The length of a sketch. With eight numbers, 99 % of tokens show 0.4 to 1.6 times their true difference."""
_SCALE = 0.25
"""The factor of each sign, exact in all dtypes. If float16 can hold a token's norm, it can hold the sketch."""


def signs(width: int) -> npt.NDArray[np.float32]:
    """Return the signs, times `_SCALE`, with which a token's `width` elements are summed. The shape is [width, 8]."""
    mixed = np.arange(width, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the constants of splitmix64
        mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) ^ (mixed >> np.uint64(shift))
        mixed = mixed * np.uint64(factor)
    bits = (mixed[:, None] >> np.arange(24, 24 + NUM_SKETCHED, dtype=np.uint64)) & np.uint64(1)
    return np.where(bits == 1, _SCALE, -_SCALE).astype(np.float32)


class TokenRows(NamedTuple):
    """The tokens of a model's call to which the rows of a tensor belong, by the tensor's shape."""

    kind: str
    """``all``: all tokens in order. ``columns``: one row for each position, which all samples share. ``last``: the last
    K tokens of each sample. ``kept``: the tokens for which the call computed logits."""
    num_dims: int
    """The number of leading dims that index tokens. The other dims index the elements of one token."""

    def num(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows of a tensor of this shape."""
        return math.prod(shape[: self.num_dims])


def token_rows(shape: tuple[int, ...], grid: tuple[int, int], num_kept: int = 0) -> TokenRows | None:
    """Return to which tokens of a call the rows of a tensor belong. Return None if its rows are no tokens.

    Args:
        shape: the tensor's shape.
        grid: the number of samples, and of tokens in each sample; (1, all tokens) for flat tokens.
        num_kept: the number of tokens for which the call was asked for logits; 0 without such a request.
    """
    batch, length = grid
    if len(shape) > 1 and shape[:2] == grid:
        return TokenRows("all", 2)
    if len(shape) > 2 and num_kept and shape[:2] == (1, num_kept):
        return TokenRows("kept", 2)
    if len(shape) > 1 and shape[:2] == (1, length):
        return TokenRows("columns", 2)
    if len(shape) == 3 and shape[0] == batch and 0 < shape[1] < length:
        return TokenRows("last", 2)
    return TokenRows("all", 1) if shape and shape[0] == batch * length else None
