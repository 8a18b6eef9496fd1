"""Work that is shared by threads gives what one thread makes of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from crc32c import crc32c

from recorder import native
from recorder.format.codec import PLANES, PLANES_PLAIN, check_size, decode, max_encoded_bytes
from recorder.format.fingerprint import compiled_weights

LIB = Path(torch.__file__).parent / "lib"
pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the compiled loops were not built")
SIZES = (0, 1, 999, 32_768, 65_537, 300_001, 300 * 32_768 + 5)


LEVELS = pytest.mark.parametrize("level", [1, -1])  # checksums are made in different ways


@pytest.fixture(autouse=True)
def widest() -> Iterator[None]:
    yield
    native.Kernels()  # the level is one for the process


def kernels(num_threads: int, level: int = -1) -> native.Kernels:
    return native.Kernels(level=level).sharing(native.find_team(num_threads, LIB))


def activations(items: int) -> npt.NDArray[np.uint8]:
    values = np.random.default_rng(items).standard_normal(items).astype(np.float32)
    values[:: 1 + items // 7] = np.nan
    return values.view(np.uint8)


def test_the_team_is_that_of_torch() -> None:
    torch.ones(1 << 20).sum()
    team = native.find_team(3, LIB)
    assert (team.num_threads, bool(team.run)) == (3, True)


def test_one_thread_and_a_folder_without_openmp_make_a_team_of_the_caller_alone(tmp_path: Path) -> None:
    for team in (native.find_team(1, LIB), native.find_team(4, tmp_path), native.find_team(4, tmp_path / "no")):
        assert (team.num_threads, team.run) == (1, None)


@pytest.mark.parametrize("num_threads", [2, 3, 16])
@pytest.mark.parametrize("items", SIZES)
def test_measures_have_the_bits_of_one_thread(items: int, num_threads: int) -> None:
    data = activations(items)
    weights = compiled_weights(4, (items,))
    found = [k.measure(data, items, "float32", None, weights) for k in (kernels(1), kernels(num_threads))]
    assert bytes(found[0]) == bytes(found[1])


@pytest.mark.parametrize("shape", [(70_000, 9), (3, 5, 40_009), (5, 1 << 17)])
def test_fingerprints_of_chunks_make_that_of_the_whole(shape: tuple[int, ...]) -> None:
    items = int(np.prod(shape))
    data, weights = activations(items), compiled_weights(4, shape)
    alone, shared = (k.measure(data, items, None, None, weights).fingerprint for k in (kernels(1), kernels(4)))
    assert alone == shared != 0


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
def test_planes_are_read_back(num_threads: int, item_bytes: int) -> None:
    for items in (1, 999, 65_536, 300_001):
        data = np.resize(activations(4 * items), items * item_bytes)
        for num_framed in {1, item_bytes}:
            out = np.full(max_encoded_bytes(len(data)) + 64, 7, np.uint8)
            num_bytes = kernels(num_threads).encode(data, item_bytes, num_framed, out[:-64])
            assert (out[-64:] == 7).all()
            encoding = PLANES_PLAIN if num_framed < item_bytes else PLANES
            check_size(encoding, out[:num_bytes], len(data), item_bytes)
            assert (decode(encoding, out[:num_bytes], len(data), item_bytes) == data).all()


def test_nothing_makes_nothing() -> None:
    for num_threads, num_framed in itertools.product((1, 3), (1, 4)):
        out = np.zeros(100, np.uint8)
        assert kernels(num_threads).encode(out[:0], 4, num_framed, out) == (8 if num_framed == 1 else 0)


def test_planes_without_room_are_refused() -> None:
    data = activations(100_000)
    with pytest.raises(ValueError, match="out holds 400000 bytes"):
        kernels(2).encode(data, 4, 1, np.empty(len(data), np.uint8))
    with pytest.raises(ValueError, match="out holds 399999 bytes: 400000 are needed"):
        kernels(2).copy(data, np.empty(len(data) - 1, np.uint8))


@LEVELS
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_copies_and_checksums_are_those_of_the_bytes(num_threads: int, level: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 1_200_001, dtype=np.uint8)
    for num_bytes in (0, 1, 7, 8, 23, 24, 25, 255, 256, 511, 512, 777, 196_608, 196_609, 262_144, 1_200_001):
        data = content[-num_bytes:] if num_bytes else content[:0]
        out = np.zeros(num_bytes + 1, np.uint8)
        kernels(num_threads).copy(data, out)
        assert (out[:-1] == data).all() and not out[-1]
        assert kernels(num_threads, level).crc32c(data) == crc32c(data.data)


@LEVELS
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("offset", [0, 1, 4, 7, 8, 63])
def test_what_is_stored_lies_there_and_its_checksum_is_known(offset: int, num_threads: int, level: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 5_000_001, dtype=np.uint8)
    shared = kernels(num_threads, level)
    for num_bytes in (0, 1, 7, 8, 9, 31, 300, 4096, 196_607, 196_608, 196_617, 393_216, 1_200_001, 5_000_000):
        data = content[1 : 1 + num_bytes]
        out = np.full(num_bytes + 200, 7, np.uint8)
        begin = -out.ctypes.data % 64 + offset
        crc = shared.store(data.ctypes.data, num_bytes, out.ctypes.data + begin)
        assert crc == crc32c(data.tobytes())
        assert (out[begin : begin + num_bytes] == data).all()
        assert (out[:begin] == 7).all() and (out[begin + num_bytes :] == 7).all()
        out[:] = 7
        shared.stream(data.ctypes.data, num_bytes, out.ctypes.data + begin)
        assert (out[begin : begin + num_bytes] == data).all()
        assert (out[:begin] == 7).all() and (out[begin + num_bytes :] == 7).all()


@LEVELS
def test_a_checksum_is_that_of_the_copy_whoever_writes_meanwhile(level: int) -> None:
    data, out, is_done = np.zeros(8 << 20, np.uint8), np.empty(8 << 20, np.uint8), threading.Event()

    def write() -> None:
        while not is_done.is_set():
            data[:] += 1  # without the interpreter's lock, as large stores are made

    writer = threading.Thread(target=write)
    writer.start()
    num_torn, until = 0, time.monotonic() + 60.0
    try:
        while num_torn < 5 and time.monotonic() < until:
            crc = kernels(1, level).store(data.ctypes.data, len(data), out.ctypes.data)
            assert crc == crc32c(out.data)
            num_torn += len(np.unique(out[::4096])) > 1
    finally:
        is_done.set()
        writer.join()
    assert num_torn == 5, "hardly anybody wrote during a copy"


def test_a_processor_without_the_instruction_has_no_checksum() -> None:
    plain = native.Kernels(level=0)
    data, out = activations(100), np.zeros(400, np.uint8)
    assert plain.crc32c(data) is None
    assert plain.store(data.ctypes.data, 400, out.ctypes.data) is None and (out == data).all()


@pytest.mark.parametrize("middle", [0, 1, 1000, 99_999, 100_000])
def test_checksums_of_parts_make_that_of_the_whole(middle: int) -> None:
    data = activations(25_000)
    parts = crc32c(data[:middle].data), crc32c(data[middle:].data)
    assert kernels(1).join_crc32c(*parts, len(data) - middle) == crc32c(data.data)
