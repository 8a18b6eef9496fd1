"""Slices of the flattened tensor add up to the fingerprint of the whole, as boxes do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recorder.format.fingerprint import MODULUS, fingerprint, flat_fingerprint

_SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)


@settings(max_examples=300)
@given(st.sampled_from([1, 2, 4, 8, 16]), _SHAPES, st.lists(st.integers(0, 3125), max_size=6), st.integers(0, 99))
def test_slices_add_up_to_the_whole(item_bytes: int, shape: tuple[int, ...], cuts: list[int], seed: int) -> None:
    count = math.prod(shape)
    whole = np.random.default_rng(seed).integers(0, 256, count * item_bytes, np.uint8)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    slices = [
        flat_fingerprint(whole[start * item_bytes : stop * item_bytes], item_bytes, shape, start)
        for start, stop in itertools.pairwise(edges)
    ]
    assert sum(slices) % MODULUS == fingerprint(whole, item_bytes, shape)


@pytest.mark.parametrize(
    ("start", "boxes"),
    [
        (4, [((1, 1, 2), (0, 1, 1)), ((1, 1, 3), (0, 2, 0)), ((1, 1, 1), (1, 0, 0))]),
        (9, [((1, 2, 3), (1, 0, 0))]),
    ],
)
def test_a_slice_weighs_as_the_boxes_that_it_covers(
    start: int, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    data, done, total = np.arange(6, dtype=np.uint8) + 1, 0, 0
    for shape, offsets in boxes:
        total += fingerprint(data[done : done + math.prod(shape)], 1, shape, offsets)
        done += math.prod(shape)
    assert flat_fingerprint(data, 1, (2, 3, 3), start) == total % MODULUS


def test_the_same_values_elsewhere_are_another_slice() -> None:
    data = np.ones(8, np.uint8)
    assert len({flat_fingerprint(data, 4, (3, 5), start) for start in range(14)}) == 14
