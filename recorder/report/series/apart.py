"""How far the statistics of two runs are apart, worked out of the numbers before they are rounded for drawing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..blocks import Block
from .cube import Cube
from .statistics import StatisticsBlocks


def pairs_of(a: StatisticsBlocks, b: StatisticsBlocks) -> list[int]:
    """For each series of the first run its number in the second, whatever its root is called; -1 where it has none."""
    numbers = {key: number for number, key in enumerate(b.series)}
    of_any_root: dict[tuple[str, ...], list[int]] = {}
    for number, key in enumerate(b.series):
        of_any_root.setdefault(key[1:], []).append(number)
    pairs = []
    for key in a.series:
        others = of_any_root.get(key[1:], [])
        pairs.append(numbers.get(key, others[0] if len(others) == 1 else -1))
    return pairs


def apart_blocks(a: StatisticsBlocks, b: StatisticsBlocks, pairs: list[int]) -> Iterator[Block]:
    """By statistic, by which share of the larger one the two are apart: of all ranks together, or of the one rank."""
    names = [name for name in a.names if name in b.names]
    cube = Cube(
        steps=a.cube.steps.tolist(), num_columns=a.cube.shape[2], num_series=len(a.series), num_lanes=1,
        statistics=names,
    )  # fmt: skip
    own = np.flatnonzero(np.array(pairs, np.int64) >= 0)
    others = np.array(pairs, np.int64)[own]
    for name in names:
        left = a.cube.values[name][own, 0].astype(np.float64)
        right = b.cube.values[name][others, 0].astype(np.float64)
        largest = np.maximum(np.abs(left), np.abs(right))
        share = np.abs(left - right) / np.where(largest > 0, largest, 1.0)
        cube.values[name][own, 0] = share.astype(np.float32)
    cube.has_row[own, 0] = a.cube.has_row[own, 0] & b.cube.has_row[others, 0]
    yield from cube.blocks("apart", 0)
