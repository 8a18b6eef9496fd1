"""Copies elements of local tensors into a stretch of the flattened global tensor.

Must never hold more than the stretch and what the caller's `Fetch` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .regions import Ints, Region, flat_boxes, flat_index, intersection

Items = npt.NDArray[Any]
Fetch = Callable[[int, int], Items]
"""Returns the elements of a flattened local tensor from one number up to another; called for ascending stretches."""


class Source(NamedTuple):
    """One local tensor and the region of the global one that it holds."""

    region: Region
    fetch: Fetch


def assemble(out: Items, start: int, global_shape: Ints, sources: Sequence[Source]) -> None:
    """Fill `out`, the elements of the flattened global tensor from `start` on, with what the sources hold of them.

    Args:
        out: 1-D and contiguous; elements of no source stay as they are.
        start: number of the first element of `out` in the flattened tensor.
        global_shape: shape of the global tensor.
        sources: local tensors whose regions do not overlap.
    """
    stop = start + len(out)
    boxed = []
    for source in sources:
        run = source.region.as_run(global_shape)
        if run is None:
            boxed.append(source)
            continue
        low, high = max(start, run[0]), min(stop, run[1])
        if low < high:
            out[low - start : high - start] = source.fetch(low - run[0], high - run[0])
    if not boxed:
        return
    for box_start, box_shape in flat_boxes(global_shape, start, stop):
        offset = flat_index(box_start, global_shape) - start
        target = out[offset : offset + math.prod(box_shape)].reshape(box_shape)
        for source in boxed:
            _copy_boxes(target, box_start, source)


def _copy_boxes(target: Items, target_start: Ints, source: Source) -> None:
    for box in source.region.boxes:
        shared = intersection(target_start, target.shape, box.start, box.shape)
        if shared is None:
            continue
        low, sizes = shared
        local_low = tuple(at + i - first for at, i, first in zip(box.local_start, low, box.start, strict=True))
        view = _local_view(source, local_low, sizes)
        slices = tuple(slice(i - first, i - first + n) for i, first, n in zip(low, target_start, sizes, strict=True))
        target[slices] = view


def _local_view(source: Source, low: Ints, sizes: Ints) -> Items:
    """Return a box of a local tensor, after fetching the stretch from its first to its last element."""
    shape = source.region.local_shape
    first = flat_index(low, shape)
    last = flat_index(tuple(i + n - 1 for i, n in zip(low, sizes, strict=True)), shape)
    items = source.fetch(first - source.region.skipped, last + 1 - source.region.skipped)
    strides, step = [], items.itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return np.lib.stride_tricks.as_strided(items, sizes, strides[::-1], writeable=False)
