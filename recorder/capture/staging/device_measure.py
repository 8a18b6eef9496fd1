"""Computes statistics and fingerprint of one tensor with torch's kernels on its device, as `measure` does on the host.

A tensor is cut into boxes, which are contiguous parts. Only a few numbers for each box are copied to the host, where
the writer thread merges them. Sums are in float64, as on the host, but in another order, so their last bits may differ.
Counts, extremes and fingerprints are equal. Nothing here may read a device value on the host: training would wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...format.fingerprint import MODULUS, constant, moved
from ...numerics.moments import Moments, measured
from ...numerics.units import Sides, packed, sides_of
from ...records import KEEP_FINGERPRINT, KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS, Chunk, Measured

_BOX_ITEMS = 1 << 22
"""The largest number of elements of a box. Up to three float64 copies of a box take 100 MB of device memory."""
_MAX_WEIGHTS = 1 << 16
"""The most fingerprint weights that one tensor has for several dims together. A longer tensor is not cached."""
_MAX_KEPT = 64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""The dtypes that torch's kernels can convert to float64. Tensors of other dtypes are measured on the host."""

Weights = dict[tuple[tuple[int, int], ...], torch.Tensor]
"""A cache of fingerprint weights for one stream. Maps a group of (dim, length) pairs to the weight of each index."""


class DeviceMeasure:
    """Measures one tensor on its device: launches kernels, and later reads the results of these kernels."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], keep: int, unit_dim: int = -1) -> None:
        """Plan to measure one tensor, which has at least one element and a dtype that `can_measure` accepts.

        `keep` has bits of KEEP_STATS, KEEP_UNITS and KEEP_FINGERPRINT. A negative `unit_dim` counts from the last dim.
        """
        self._item_bytes = dtype.itemsize
        self._keep = keep
        self._boxes = list(_cut_boxes(shape, _BOX_ITEMS))
        self._sides = sides_of(shape, unit_dim) if keep & KEEP_UNITS else None
        num_units = self._sides.num if isinstance(self._sides, Sides) else 0
        self.nbytes = (len(self._boxes) * _NUM_COLUMNS + _SUMS_OF_UNIT * num_units) * 8

    def launch(self, tensor: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Launch the kernels that measure a contiguous tensor on the current stream, and return the results.

        The results are a flat int64 tensor on the device: those of each box, then the sums of each unit (neuron or
        channel). `weights` is the stream's cache of fingerprint weights, which grows. The tensor is not changed.
        """
        flat = tensor.reshape(-1)
        nothing = torch.zeros((), dtype=torch.int64, device=tensor.device)
        results = []
        for start, _, shape in self._boxes:
            values = flat[start : start + math.prod(shape)]
            columns = _statistics(values) if self._keep & KEEP_STATS else [nothing] * len(_BoxResult._fields)
            fingerprint = _fingerprint(values, shape, weights) if self._keep & KEEP_FINGERPRINT else nothing
            results.append(torch.stack([*columns, fingerprint]))
        statistics = torch.stack(results).reshape(-1)
        if not isinstance(self._sides, Sides):
            return statistics
        return torch.cat((statistics, self._sum_units(flat, self._sides).view(torch.int64).reshape(-1)))

    def _sum_units(self, flat: torch.Tensor, sides: Sides) -> torch.Tensor:
        """Return, for each unit (neuron or channel), sums of x and x^2, largest magnitude and number of zeros."""
        sums = torch.zeros((_SUMS_OF_UNIT, sides.num), dtype=torch.float64, device=flat.device)
        for start, offsets, shape in self._boxes:
            values = flat[start : start + math.prod(shape)].reshape(shape).movedim(sides.dim, 0)
            wide = values.reshape(shape[sides.dim], -1).to(torch.float64)
            total, squares, peaks, zeros = sums.narrow(1, offsets[sides.dim], shape[sides.dim])
            zeros += (wide == 0).sum(1, dtype=torch.float64)
            known = wide.masked_fill(torch.isfinite(wide).logical_not_(), 0.0)
            total += known.sum(1)
            torch.maximum(peaks, known.abs_().amax(1), out=peaks)
            squares += known.mul_(known).sum(1)
        return sums

    def read(self, data: npt.NDArray[np.uint8], chunk: Chunk | None) -> Measured:
        """Return the statistics. `data` contains the results of `launch`. Called on the writer thread."""
        words = data.view(np.int64)
        num_words = len(self._boxes) * _NUM_COLUMNS
        rows = words[:num_words].reshape(-1, _NUM_COLUMNS)
        statistics = Measured()
        if self._keep & KEEP_STATS:
            numel = sum(math.prod(shape) for _, _, shape in self._boxes)
            statistics = _merged([_BoxResult(*row) for row in rows[:, :-1].view(np.float64).tolist()], numel)
        if isinstance(self._sides, Sides):
            sums = words[num_words:].view(np.float64).reshape(_SUMS_OF_UNIT, -1)
            statistics = statistics._replace(units=packed(self._sides.dim, sums[:3] + 0.0, sums[3].astype(np.int64)))
        elif self._sides is not None:
            statistics = statistics._replace(note=f"no_units:{self._sides}")
        if self._keep & KEEP_FINGERPRINT:
            of_boxes = zip(rows[:, -1].tolist(), self._boxes, strict=True)
            total = sum(moved(value, self._item_bytes, offsets) for value, (_, offsets, _) in of_boxes) % MODULUS
            if chunk is not None and chunk.offsets is not None:
                total = moved(total, self._item_bytes, chunk.offsets)
            statistics = statistics._replace(fingerprint=total)
        return statistics


def can_measure(tensor: torch.Tensor, chunk: Chunk | None, keep: int) -> bool:
    """Return True if the device can measure the tensor. Any other tensor is copied and measured on the host."""
    is_run = bool(keep & (KEEP_FINGERPRINT | KEEP_UNITS)) and chunk is not None and chunk.flat_start is not None
    return tensor.dtype in _DTYPES and not is_run and not keep & KEEP_HISTOGRAM


class _BoxResult(NamedTuple):
    """The statistics of one box of a tensor. The field `low` and the fields after it cover only the finite values."""

    num_nonzero: float
    num_nan: float
    num_finite: float
    low: float
    high: float
    total: float
    deviations: float
    sum_abs: float
    sum_fourth: float


_LOW = _BoxResult._fields.index("low")
_NUM_COLUMNS = len(_BoxResult._fields) + 1
"""The number of int64 results of one box: the fields of `_BoxResult`, and the box's fingerprint."""
_SUMS_OF_UNIT = 4


def _cut_boxes(shape: tuple[int, ...], max_items: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into contiguous boxes. Yield the flat start, the offsets and the shape of each box, in order."""
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
    """Return the fields of `_BoxResult` for a box's values, each as a float64 whose bits are viewed as int64."""
    wide = values.to(torch.float64)
    num_nonzero = (wide != 0).sum(dtype=torch.float64)
    finite = torch.isfinite(wide)
    num_nan, num_finite = torch.isnan(wide).sum(dtype=torch.float64), finite.sum(dtype=torch.float64)
    # `torch.where` would copy a Python number to the device and wait for that copy.
    others = finite.logical_not_()
    low, high = wide.masked_fill(others, math.inf).amin(), wide.masked_fill(others, -math.inf).amax()
    known = wide.masked_fill(others, 0.0)
    total, sum_abs = known.sum(), known.abs_().sum()
    known.mul_(known)
    sum_fourth = known.mul_(known).sum()
    # For a float64 value, `wide` is the value itself, which must not be changed.
    away = (wide - total / num_finite).masked_fill_(others, 0.0)
    deviations = away.mul_(away).sum()
    columns = (num_nonzero, num_nan, num_finite, low, high, total, deviations, sum_abs, sum_fourth)
    return [number.view(torch.int64) for number in columns]


def _merged(results: list[_BoxResult], numel: int) -> Measured:
    """Merge the statistics of all boxes into the statistics of the tensor."""
    moments = Moments()
    with np.errstate(all="ignore"):
        for result in results:
            if result.num_finite:
                moments.merge(int(result.num_finite), *result[_LOW:])
        moments.nan_count = int(sum(result.num_nan for result in results))
        moments.inf_count = numel - moments.nan_count - moments.count
        moments.zero_count = numel - int(sum(result.num_nonzero for result in results))
        return measured(moments)


def _fingerprint(values: torch.Tensor, shape: tuple[int, ...], weights: Weights) -> torch.Tensor:
    """Return the fingerprint (see FORMAT.md) of a box at offset 0. int64 arithmetic wraps, so it is modulo 2^64."""
    if values.itemsize == 8:
        shape = (*shape, 2)
    words = values.view(_WORDS[values.itemsize])
    dims = list(enumerate(reversed(shape)))
    while dims:
        group = [dims.pop(0)]
        while dims and math.prod(length for _, length in group) * dims[0][1] <= _MAX_WEIGHTS:
            group.append(dims.pop(0))
        factor = _factor(tuple(group), values.device, weights)
        words = (words.view(-1, len(factor)) * factor).sum(-1)
    return words.to(torch.int64).reshape(())


def _factor(group: tuple[tuple[int, int], ...], device: torch.device, kept: Weights) -> torch.Tensor:
    """Return the fingerprint weight of each index of a group of dims. Dim 0 is the tensor's last dim."""
    factor = kept.get(group)
    if factor is not None:
        return factor
    factor = torch.ones(1, dtype=torch.int64, device=device)
    for dim, length in group:
        factor = (_powers(constant(dim), length, device)[:, None] * factor).reshape(-1)
    if len(factor) <= _MAX_WEIGHTS:
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        kept[group] = factor
    return factor


def _powers(base: int, length: int, device: torch.device) -> torch.Tensor:
    """Return 1, base, base^2, ... as int64, made on the device. A copy from the host could make the host wait."""
    powers = torch.ones(length, dtype=torch.int64, device=device)
    done = 1
    while done < length:
        count = min(done, length - done)
        step = pow(base, done, MODULUS)
        signed = step - MODULUS if step >= MODULUS // 2 else step
        torch.mul(powers[:count], signed, out=powers[done : done + count])
        done += count
    return powers
