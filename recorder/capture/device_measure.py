"""Statistics and fingerprint of one tensor by torch's kernels, on the device where it lies; the same as `measure`'s.

A few numbers for each piece of the tensor cross the bus, and the writer thread puts them together. Sums are in float64
as there, in another order; counts, extremes and fingerprints are equal. Nothing here may look at a value on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..format.fingerprint import MODULUS, constant, moved
from ..records import KEEP_FINGERPRINT, KEEP_STATS, Chunk, Measured

_PIECE_ITEMS = 1 << 22
"""Elements looked at together: their float64 copies, three at a time, take 100 MB of the device."""
_MAX_WEIGHTS = 1 << 16
"""Weights of one factor of the fingerprint that are kept."""
_MAX_KEPT = 64
_COLUMNS = ("num_nonzero", "num_nan", "num_finite", "low", "high", "total", "deviations", "fingerprint")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Those that torch's kernels turn into float64; others are measured on the host."""

Weights = dict[tuple[tuple[int, int], ...], torch.Tensor]
"""Factors of the fingerprint's weights, for each group of (dim, length). Good on one stream alone."""


class DeviceMeasure:
    """How one tensor is measured on its device: what to launch, and what the results mean."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], keep: int) -> None:
        """Plan it.

        Args:
            dtype: one that `can_measure` knows.
            shape: of the tensor; it has elements.
            keep: bits of KEEP_STATS and KEEP_FINGERPRINT.
        """
        self._item_bytes = dtype.itemsize
        self._keep = keep
        self._pieces = list(_pieces(shape, _PIECE_ITEMS))
        self.nbytes = len(self._pieces) * len(_COLUMNS) * 8
        """Of the results."""

    def launch(self, tensor: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Launch the kernels on the current stream.

        Args:
            tensor: contiguous, of the dtype and shape that were planned; it is not changed.
            weights: those of earlier calls on the same stream, to which others are added.

        Returns:
            The results on the device, int64, one row for each piece.
        """
        flat = tensor.reshape(-1)
        nothing = torch.zeros((), dtype=torch.int64, device=tensor.device)
        results = []
        for start, _, shape in self._pieces:
            values = flat[start : start + math.prod(shape)]
            columns = _statistics(values) if self._keep & KEEP_STATS else [nothing] * 7
            found = _fingerprint(values, shape, weights) if self._keep & KEEP_FINGERPRINT else nothing
            results.append(torch.stack([*columns, found]))
        return torch.stack(results)

    def read(self, data: npt.NDArray[np.uint8], chunk: Chunk | None) -> Measured:
        """What the results say; on the writer thread."""
        rows = data.view(np.int64).reshape(-1, len(_COLUMNS))
        measured = Measured()
        if self._keep & KEEP_STATS:
            numel = sum(math.prod(shape) for _, _, shape in self._pieces)
            measured = _merged([_Piece(*row) for row in rows[:, :-1].view(np.float64).tolist()], numel)
        if self._keep & KEEP_FINGERPRINT:
            found = zip(rows[:, -1].tolist(), self._pieces, strict=True)
            total = sum(moved(value, self._item_bytes, offsets) for value, (_, offsets, _) in found) % MODULUS
            if chunk is not None and chunk.offsets is not None:
                total = moved(total, self._item_bytes, chunk.offsets)
            measured = measured._replace(fingerprint=total)
        return measured


def can_measure(tensor: torch.Tensor, chunk: Chunk | None, keep: int) -> bool:
    """Whether the device can; what it cannot is copied, and measured on the host."""
    is_run = bool(keep & KEEP_FINGERPRINT) and chunk is not None and chunk.flat_start is not None
    return tensor.dtype in _DTYPES and not is_run


class _Piece(NamedTuple):
    """The results of one piece; `low` to `deviations` are over its finite values."""

    num_nonzero: float
    num_nan: float
    num_finite: float
    low: float
    high: float
    total: float
    deviations: float


def _pieces(shape: tuple[int, ...], max_items: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """First element, offsets and shape of boxes that lie in one piece of a contiguous tensor, in order."""
    split = len(shape)
    while split and math.prod(shape[split - 1 :]) <= max_items:
        split -= 1
    if not split:
        yield 0, (0,) * len(shape), shape
        return
    inner = shape[split:]
    num_rows = max(1, max_items // math.prod(inner))
    start = 0
    for outer in product(*map(range, shape[: split - 1])):
        for row in range(0, shape[split - 1], num_rows):
            box = (1,) * (split - 1) + (min(num_rows, shape[split - 1] - row), *inner)
            yield start, (*outer, row) + (0,) * len(inner), box
            start += math.prod(box)


def _statistics(values: torch.Tensor) -> list[torch.Tensor]:
    """Seven numbers of float64, as the bits of int64; see `_Piece`."""
    wide = values.to(torch.float64)
    num_nonzero = (wide != 0).sum(dtype=torch.float64)
    finite = torch.isfinite(wide)
    num_nan, num_finite = torch.isnan(wide).sum(dtype=torch.float64), finite.sum(dtype=torch.float64)
    # Not `torch.where`: it brings a number to the device by a copy, and waits for it.
    others = finite.logical_not_()
    low, high = wide.masked_fill(others, math.inf).amin(), wide.masked_fill(others, -math.inf).amax()
    total = wide.masked_fill(others, 0.0).sum()
    away = (wide - total / num_finite).masked_fill_(others, 0.0)  # `wide` of a float64 is the value itself
    deviations = away.mul_(away).sum()
    found = (num_nonzero, num_nan, num_finite, low, high, total, deviations)
    return [number.view(torch.int64) for number in found]


def _merged(pieces: list[_Piece], numel: int) -> Measured:
    """Statistics of the whole, put together as `measure` does it (Chan, Golub, LeVeque, 1979)."""
    count = 0.0
    mean = deviations = total = sum_sq = 0.0
    low, high = math.inf, -math.inf
    with np.errstate(all="ignore"):
        for piece in pieces:
            if not piece.num_finite:
                continue
            low, high = min(low, piece.low), max(high, piece.high)
            its_mean = piece.total / piece.num_finite
            all_count = count + piece.num_finite
            away = its_mean - mean
            deviations += piece.deviations + away * away * (count * piece.num_finite / all_count)
            mean += away * (piece.num_finite / all_count)
            count = all_count
            total += piece.total
            sum_sq += piece.deviations + its_mean * its_mean * piece.num_finite
    num_nan = int(sum(piece.num_nan for piece in pieces))
    counts = Measured(
        nan_count=num_nan,
        inf_count=numel - num_nan - int(count),
        zero_count=numel - int(sum(piece.num_nonzero for piece in pieces)),
    )
    if not count:
        return counts
    is_constant = low == high
    return counts._replace(
        mean=low if is_constant else _or_inf(total / count),
        std=0.0 if is_constant else _or_inf(math.sqrt(deviations) / math.sqrt(count)),
        min=low,
        max=high,
        absmax=max(-low, high),
        l2=_or_inf(math.sqrt(sum_sq)) if sum_sq == sum_sq else math.inf,
        sum=_or_inf(total),
        sum_sq=_or_inf(sum_sq),
    )


def _or_inf(value: float) -> float:
    """What overflowed is not a missing value."""
    return math.inf if math.isnan(value) else value


def _fingerprint(values: torch.Tensor, shape: tuple[int, ...], weights: Weights) -> torch.Tensor:
    """Of a box at the origin, modulo 2^64, as int64 wraps; FORMAT.md, section "Fingerprint", is the norm."""
    if values.itemsize == 8:
        shape = (*shape, 2)
    found = values.view(_WORDS[values.itemsize])
    dims = list(enumerate(reversed(shape)))
    while dims:
        group = [dims.pop(0)]
        while dims and math.prod(length for _, length in group) * dims[0][1] <= _MAX_WEIGHTS:
            group.append(dims.pop(0))
        factor = _factor(tuple(group), values.device, weights)
        found = (found.view(-1, len(factor)) * factor).sum(-1)
    return found.to(torch.int64).reshape(())


def _factor(group: tuple[tuple[int, int], ...], device: torch.device, kept: Weights) -> torch.Tensor:
    """The weights of all indices along a group of dims, the last dim first."""
    found = kept.get(group)
    if found is not None:
        return found
    found = torch.ones(1, dtype=torch.int64, device=device)
    for dim, length in group:
        found = (_powers(constant(dim), length, device)[:, None] * found).reshape(-1)
    if len(found) <= _MAX_WEIGHTS:
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        kept[group] = found
    return found


def _powers(base: int, length: int, device: torch.device) -> torch.Tensor:
    """1, base, base^2, ... as int64, by doubling: the host hands over no array, which could make it wait."""
    powers = torch.ones(length, dtype=torch.int64, device=device)
    done = 1
    while done < length:
        count = min(done, length - done)
        step = pow(base, done, MODULUS)
        signed = step - MODULUS if step >= MODULUS // 2 else step
        torch.mul(powers[:count], signed, out=powers[done : done + count])
        done += count
    return powers
