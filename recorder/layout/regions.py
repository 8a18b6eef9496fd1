"""Regions: which elements of a global tensor a rank's local tensor has, and how they are copied.

A region is either a contiguous run of the flattened global tensor (FSDP1), or boxes (DTensor; a strided shard has
several). Nothing here may read values, or trust regions before `overlap` has compared them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..numerics.dtypes import flat_boxes

Ints = tuple[int, ...]
Range = tuple[int, int]
"""The begin and the end (exclusive) of a range, in elements."""


_MAX_COMPARED = 4_000_000
"""The most pairs of boxes that are compared, which takes 10 s. 1,024 ranks with strided shards need 100,000."""


class Box(NamedTuple):
    """A box of the global tensor, and where it begins in the local tensor."""

    start: Ints
    shape: Ints
    local_start: Ints

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Region(NamedTuple):
    """The elements of the global tensor that one local tensor has. Either `run` or `boxes` describes them."""

    run: Range | None
    """The range of the flattened global tensor. None if `boxes` describe the region."""
    boxes: tuple[Box, ...]
    local_shape: Ints
    skipped: int = 0
    """If the local tensor is a slice of a flattened tensor of `local_shape`: the number of elements before it."""

    @property
    def numel(self) -> int:
        return self.run[1] - self.run[0] if self.run is not None else sum(box.numel for box in self.boxes)

    @property
    def start(self) -> Ints | None:
        """The position at which the region's box begins. None unless the region has exactly one box."""
        return self.boxes[0].start if len(self.boxes) == 1 else None

    def as_run(self, global_shape: Ints) -> Range | None:
        """Return the region as a run of the flattened global tensor. Return None if it is not contiguous."""
        if self.run is not None:
            return self.run
        if len(self.boxes) != 1:
            return (0, 0) if not self.boxes else None
        box = self.boxes[0]
        is_free = True
        for size, whole in zip(reversed(box.shape), reversed(global_shape), strict=True):
            if not is_free and size != 1:
                return None
            is_free = is_free and size == whole
        start = flat_index(box.start, global_shape)
        return start, start + math.prod(box.shape)


def whole(shape: Ints) -> Region:
    """Return the region of a tensor that is not cut."""
    return box_region((0,) * len(shape), shape)


def box_region(start: Ints, shape: Ints) -> Region:
    """Return the region of a local tensor that is one box."""
    empty = math.prod(shape) == 0
    return Region(None, () if empty else (Box(start, shape, (0,) * len(shape)),), shape)


def flat_region(start: int, numel: int) -> Region:
    """Return the region of a slice of the flattened global tensor."""
    return Region((start, start + numel), (), (numel,))


def run_in_local(local: Region, start: int, numel: int) -> Region:
    """Return the region of a slice of a flattened local tensor. `local` is the local tensor's own region, of boxes."""
    boxes = []
    for inner, shape in flat_boxes(local.local_shape, start, start + numel):
        for box in local.boxes:
            ends = zip(inner, shape, box.local_start, box.shape, strict=True)
            ranges = [(max(i, k), min(i + n, k + size)) for i, n, k, size in ends]
            if all(low < high for low, high in ranges):
                lows, sizes = tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges)
                places = zip(lows, box.local_start, box.start, strict=True)
                boxes.append(Box(tuple(low - k + first for low, k, first in places), sizes, lows))
    return Region(None, tuple(boxes), local.local_shape, start)


def ranges_region(ranges: Sequence[Sequence[Range]]) -> Region:
    """Return the region of a local tensor that joins, along each dim, ranges of the global tensor end to end."""
    ranges = [_joined(dim) for dim in ranges]
    local_starts = [list(itertools.accumulate((stop - start for start, stop in dim), initial=0)) for dim in ranges]
    boxes = []
    for choice in itertools.product(*(range(len(dim)) for dim in ranges)):
        picked = [dim[i] for dim, i in zip(ranges, choice, strict=True)]
        shape = tuple(stop - start for start, stop in picked)
        if math.prod(shape):
            local = tuple(starts[i] for starts, i in zip(local_starts, choice, strict=True))
            boxes.append(Box(tuple(start for start, _ in picked), shape, local))
    return Region(None, tuple(boxes), tuple(starts[-1] for starts in local_starts))


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def shard(ranges: Sequence[Range], num_chunks: int, index: int) -> list[Range]:
    """Return chunk `index` of `ranges`, cut as `torch.chunk` does: in equal sizes; the last may be shorter or empty."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // num_chunks)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    kept, position = [], 0
    for start, stop in ranges:
        length = stop - start
        low, high = max(begin - position, 0), min(end - position, length)
        if low < high:
            kept.append((start + low, start + high))
        position += length
    return kept


def strided_shard(ranges: Sequence[Range], num_chunks: int, index: int, split_factor: int) -> list[Range]:
    """Cut `ranges` as ``_StridedShard`` does: into `split_factor` parts, of each of which chunk `index` is returned."""
    parts = [shard(ranges, split_factor, i) for i in range(split_factor)]
    return [chunk for part in parts for chunk in shard(part, num_chunks, index)]


def flat_index(index: Ints, shape: Ints) -> int:
    """Return the index in the flattened (C order) tensor of the element at `index`."""
    flat = 0
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return flat


def overlap(regions: Sequence[Region], global_shape: Ints) -> tuple[int, int] | None:
    """Return the indexes of two regions with a common element, or None. Raises OverflowError if this takes too long."""
    runs = [region.as_run(global_shape) for region in regions]
    known = sorted((run[0], run[1], i) for i, run in enumerate(runs) if run is not None and run[0] < run[1])
    for (_, stop, i), (start, _, j) in itertools.pairwise(known):
        if start < stop:
            return i, j
    if len(known) == sum(region.numel > 0 for region in regions):
        return None
    boxes = [(i, box) for i, region in enumerate(regions) for box in _boxes(region, global_shape)]
    # Boxes are sorted along the dim in which they overlap least. Only boxes that overlap in this dim are compared.
    dim = max(range(len(global_shape)), key=lambda d: len({box.start[d] for _, box in boxes}), default=0)
    boxes.sort(key=lambda pair: pair[1].start[dim])
    num_compared = 0
    for at, (i, box) in enumerate(boxes):
        end = box.start[dim] + box.shape[dim]
        for j, other in itertools.islice(boxes, at + 1, None):
            if other.start[dim] >= end:
                break
            num_compared += 1
            if num_compared > _MAX_COMPARED:
                raise OverflowError(f"its {len(boxes)} boxes are too many to be compared with each other")
            if i != j and intersection(box.start, box.shape, other.start, other.shape) is not None:
                return i, j
    return None


def _boxes(region: Region, global_shape: Ints) -> list[Box]:
    if region.run is None:
        return list(region.boxes)
    return [Box(start, shape, ()) for start, shape in flat_boxes(global_shape, *region.run)]


def intersection(start: Ints, shape: Ints, other_start: Ints, other_shape: Ints) -> tuple[Ints, Ints] | None:
    """Return the common box (start, shape) of two boxes. Return None if they have no common element."""
    low = tuple(map(max, start, other_start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True))
    sizes = tuple(end - begin for begin, end in zip(low, ends, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


Items = npt.NDArray[Any]
Fetch = Callable[[int, int], Items]
"""Returns the elements of a flattened local tensor from a start to a stop index. Calls come in ascending order."""


class Source(NamedTuple):
    """One local tensor and its region of the global tensor."""

    region: Region
    fetch: Fetch


def assemble(out: Items, start: int, global_shape: Ints, sources: Sequence[Source]) -> None:
    """Fill `out`, which is the flattened global tensor from index `start` on, from sources that do not overlap.

    `out` is 1-D and contiguous. Elements that no source has stay unchanged.
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
    """Return a view of a box of a local tensor. Fetches all elements from the box's first to its last one."""
    shape = source.region.local_shape
    first = flat_index(low, shape)
    last = flat_index(tuple(i + n - 1 for i, n in zip(low, sizes, strict=True)), shape)
    items = source.fetch(first - source.region.skipped, last + 1 - source.region.skipped)
    strides = [items.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return np.lib.stride_tricks.as_strided(items, sizes, strides, writeable=False)
