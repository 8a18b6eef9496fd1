"""The fingerprint is the sum that FORMAT.md gives, and adds up however a tensor is cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recorder.format import fingerprint as module
from recorder.format.fingerprint import MODULUS, fingerprint, to_text
from tests.rigs import independent

_ITEM_BYTES = st.sampled_from([1, 2, 4, 8, 16])
_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@pytest.fixture(params=[1, 7, 64])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks so small that every way to split a tensor into them occurs."""
    module._block_weights.cache_clear()
    monkeypatch.setattr(module, "_BLOCK_ITEMS", request.param)
    yield
    module._block_weights.cache_clear()


def _bytes(seed: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def _size(shape: tuple[int, ...], item_bytes: int) -> int:
    return int(np.prod(shape, dtype=int)) * item_bytes


@given(_ITEM_BYTES, _SHAPES, st.integers(0, 1 << 40), st.integers(0, 99))
def test_it_is_the_sum_of_the_specification(item_bytes: int, shape: tuple[int, ...], offset: int, seed: int) -> None:
    data = _bytes(seed, _size(shape, item_bytes))
    offsets = tuple(offset + i for i in range(len(shape)))
    assert fingerprint(data, item_bytes, shape) == independent.fingerprint(data.tobytes(), item_bytes, shape)
    moved = independent.fingerprint(data.tobytes(), item_bytes, shape, offsets)
    assert fingerprint(data, item_bytes, shape, offsets) == moved


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shape", [(), (1,), (33,), (10, 3, 2), (2, 3, 50), (3, 17), (4, 3, 2, 5), (1, 1, 65), (0, 9)])
@pytest.mark.parametrize("item_bytes", [2, 8])
def test_blocks_do_not_show(shape: tuple[int, ...], item_bytes: int) -> None:
    data = _bytes(1, _size(shape, item_bytes))
    assert fingerprint(data, item_bytes, shape) == independent.fingerprint(data.tobytes(), item_bytes, shape)


def test_a_tensor_of_many_blocks_is_the_sum_of_its_rows() -> None:
    shape = (70, 1024)
    values = _bytes(2, 70 * 4096).reshape(70, 4096)
    rows = [fingerprint(row, 4, (1, 1024), (i, 0)) for i, row in enumerate(values)]
    assert fingerprint(values.reshape(-1), 4, shape) == sum(rows) % MODULUS


@given(_ITEM_BYTES, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), st.data())
def test_the_pieces_of_a_tensor_add_up(item_bytes: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = _bytes(3, _size(shape, item_bytes)).reshape(*shape, item_bytes)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = 0
    for start, stop in ((0, cut), (cut, shape[dim])):
        piece = np.ascontiguousarray(whole.take(range(start, stop), dim))
        offsets = tuple(start if i == dim else 0 for i in range(len(shape)))
        total += fingerprint(piece.reshape(-1), item_bytes, piece.shape[:-1], offsets)
    assert total % MODULUS == fingerprint(whole.reshape(-1), item_bytes, shape)


@given(st.binary(min_size=64, max_size=64), st.integers(0, 511), st.sampled_from([1, 2, 4, 8]))
def test_one_flipped_bit_shows(text: bytes, bit: int, item_bytes: int) -> None:
    flipped = bytearray(text)
    flipped[bit // 8] ^= 1 << bit % 8
    shape = (64 // item_bytes,)
    before = fingerprint(np.frombuffer(text, np.uint8), item_bytes, shape)
    assert before != fingerprint(np.frombuffer(bytes(flipped), np.uint8), item_bytes, shape)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1024,), (32, 64, 16)])
def test_a_tensor_negated_as_a_whole_shows(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(4).standard_normal(shape).astype(dtype)
    texts = {
        to_text(fingerprint(np.frombuffer(v.tobytes(), np.uint8), values.itemsize, shape)) for v in (values, -values)
    }
    assert len(texts) == 2


def test_the_text_is_16_digits() -> None:
    assert to_text(5) == "0000000000000005"
    assert to_text(MODULUS - 1) == "f" * 16
