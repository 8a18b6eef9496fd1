"""Whole payloads made by the compiled loops are read back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from recorder import native
from recorder.format.codec import check_size, decode, max_encoded_bytes
from recorder.format.encodings import PLANES, PLANES_PLAIN

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the compiled loops were not built")


def activations(items: int) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(items).standard_normal(items).astype(np.float32)
    values[:: 1 + items // 7] = np.nan
    return values.view(np.uint8)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
def test_planes_are_read_back(item_bytes: int) -> None:
    for items in (1, 999, 65_536, 300_001):
        data = np.resize(activations(4 * items), items * item_bytes)
        for num_framed in {1, item_bytes}:
            out = np.full(max_encoded_bytes(len(data)) + 64, 7, np.uint8)
            num_bytes = native.Kernels().encode(data, item_bytes, num_framed, out[:-64])
            assert (out[-64:] == 7).all()
            encoding = PLANES_PLAIN if num_framed < item_bytes else PLANES
            check_size(encoding, out[:num_bytes], len(data), item_bytes)
            assert (decode(encoding, out[:num_bytes], len(data), item_bytes) == data).all()


@pytest.mark.parametrize("num_framed", [1, 4])
def test_nothing_makes_nothing(num_framed: int) -> None:
    out = np.zeros(100, np.uint8)
    assert native.Kernels().encode(out[:0], 4, num_framed, out) == (8 if num_framed == 1 else 0)


def test_planes_without_room_are_refused() -> None:
    data = activations(100_000)
    with pytest.raises(ValueError, match="out holds 400000 bytes"):
        native.Kernels().encode(data, 4, 1, np.empty(len(data), np.uint8))
