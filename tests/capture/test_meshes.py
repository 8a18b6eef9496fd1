"""The ranks of a mesh, as a row holds them and as a reader has them again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recorder.capture.local_values import compact, written_ranks
from recorder.layout.placement import parse_mesh


def read_again(ranks: list[int], shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    text = compact({"shape": shape, "coordinate": [0] * len(shape), "ranks": written_ranks(ranks, shape)})
    return text, parse_mesh(text).ranks


@pytest.mark.parametrize(
    ("first", "strides", "shape"),
    [(0, (1,), (4096,)), (5, (8,), (32,)), (0, (64, 1), (64, 8)), (3, (0, 64, 4), (1, 8, 16)), (0, (1, 32), (32, 2))],
)
def test_a_large_regular_mesh_is_told_in_few_words(
    first: int, strides: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    ranks = (first + sum(i * n for i, n in zip(np.indices(shape), strides, strict=True))).ravel().tolist()
    text, found = read_again(ranks, shape)
    assert found == tuple(ranks) and len(text) < 100


def test_a_small_mesh_is_listed_and_so_is_one_without_order() -> None:
    small, mixed = [4, 5, 6, 7], np.random.default_rng(0).permutation(64).tolist()
    assert read_again(small, (2, 2)) == ('{"shape":[2,2],"coordinate":[0,0],"ranks":[4,5,6,7]}', tuple(small))
    assert read_again(mixed, (8, 8))[1] == tuple(mixed)


@pytest.mark.parametrize("told", ['{"first":0}', '{"first":0,"strides":[1,1]}', '{"first":-1,"strides":[1]}', "{}"])
def test_what_tells_no_ranks_is_as_if_none_were_told(told: str) -> None:
    assert parse_mesh(f'{{"shape":[4],"coordinate":[0],"ranks":{told}}}').ranks == ()


def test_a_mesh_that_nobody_has_is_not_counted_out() -> None:
    shape = [1 << 20, 1 << 20]
    assert math.prod(shape) > 1 << 30
    text = f'{{"shape":{shape},"coordinate":[0,0],"ranks":{{"first":0,"strides":[1048576,1]}}}}'
    assert parse_mesh(text).ranks == ()
