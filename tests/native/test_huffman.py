"""Frames of the compiled Huffman code: any zstd decoder reads them, at every level they are the same bytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from recorder import native
from recorder.errors import CorruptError
from recorder.format.codec import EncodedPayload, Encoder, _sample, check_size, concatenate, decode, max_encoded_bytes

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) and not native.LIBRARY.exists(),
    reason="no C compiler here, so nothing is compiled",
)
_Bytes = npt.NDArray[np.uint8]
_BLOCK, _FRAME = 1 << 17, 1 << 20
_SIZES = (1000, 4096, *(near + by for near in (_BLOCK, _FRAME) for by in (-1, 0, 1, 7, 65)), _FRAME + _BLOCK + 1)


@pytest.fixture(autouse=True)
def _widest() -> Iterator[None]:
    try:
        yield
    finally:
        native.Kernels()  # the level is one for the process


def _room(size: int) -> int:
    """What frames take at most: what they hold, and the headers of frames and blocks."""
    return size + 13 * (size // _FRAME + 1) + 3 * (size // _BLOCK + 1)


def _frames(data: _Bytes, item_bytes: int = 1, plane: int = 0) -> bytes:
    """What every level makes, read by two decoders."""
    content = data[item_bytes - 1 - plane :: item_bytes].tobytes()
    made = set()
    for level in range(len(native.LEVELS)):
        out = np.full(_room(len(content)) + 32, 0xA5, np.uint8)
        num_written = native.Kernels(level=level).huffman(data, item_bytes, plane, out[:-32])
        assert (out[-32:] == 0xA5).all(), "wrote beyond the buffer"
        made.add(out[:num_written].tobytes())
    (frames,) = made
    assert decode("raw", frames, len(content), 1).tobytes() == content
    check_size("raw", frames, len(content), 1)
    if content:
        assert pa.Codec("zstd").decompress(frames, len(content)).to_pybytes() == content
    return frames


def _drawn(num_values: int, size: int, evenness: float, seed: int) -> _Bytes:
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(num_values, evenness))
    return random.permutation(256)[random.choice(num_values, size, p=shares)].astype(np.uint8)


def _activations(dtype: str, num_items: int, kind: str = "normal") -> _Bytes:
    random = np.random.default_rng(3)
    values = random.normal(0, 1, num_items)
    if kind == "gradient":
        values *= 1e-5 * np.exp(random.normal(0, 3, num_items))
    elif kind == "rows":
        values *= np.repeat(np.exp2(random.integers(-20, 5, num_items // 512 + 1)), 512)[:num_items]
    elif kind == "parts":
        values *= np.exp2(-2.0 * (np.arange(num_items) * 16 // num_items))
    elif kind == "softmax":
        values = np.exp(3 * values)
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def _with_huffman() -> Encoder:
    return Encoder(kernels=native.Kernels())


def _encode(data: _Bytes, item_bytes: int, encoder: Encoder) -> tuple[str, bytes]:
    out = np.empty(max_encoded_bytes(len(data)), np.uint8)
    encoding, num_written = encoder.encode(data, item_bytes, out)
    return encoding, out[:num_written].tobytes()


@pytest.mark.parametrize("num_values", [1, 2, 40, 256])
def test_planes_of_any_small_size_are_read(num_values: int) -> None:
    for size in range(301):
        _frames(_drawn(num_values, size, 0.5, size))


@pytest.mark.parametrize("size", _SIZES)
def test_planes_around_a_block_and_a_frame_are_read(size: int) -> None:
    assert len(_frames(np.full(size, 77, np.uint8))) < 100
    assert len(_frames(np.random.default_rng(0).integers(0, 256, size, np.uint8))) <= _room(size)
    for dtype in ("float32", "bfloat16", "float16"):
        data = _activations(dtype, size)
        for plane in range(2):
            _frames(data, len(data) // size, plane)
    mixed = np.r_[np.zeros(size // 2, np.uint8), _drawn(200, size - size // 2, 0.2, 0)]
    _frames(mixed)
    _frames(mixed[::-1].copy())


@given(
    st.integers(1, 256), st.integers(0, 3 * _BLOCK), st.sampled_from([0.02, 0.3, 3.0, 100.0]), st.integers(0, 1 << 30)
)
def test_any_histogram_is_read(num_values: int, size: int, evenness: float, seed: int) -> None:
    _frames(_drawn(num_values, size, evenness, seed))


def test_thousands_of_histograms_are_read() -> None:
    random = np.random.default_rng(1)
    kernels, decompress = native.Kernels(), zstandard.ZstdDecompressor().decompress
    for seed in range(3000):
        size = int(random.integers(64, 6000))
        data = _drawn(int(random.integers(2, 257)), size, float(random.choice([0.03, 0.3, 1, 10])), seed)
        out = np.empty(_room(size), np.uint8)
        assert decompress(out[: kernels.huffman(data, 1, 0, out)].tobytes()) == data.tobytes(), seed


def _least_bits(counts: npt.NDArray[np.int_], longest: int = 11) -> int:
    """What the best codes of limited length take (Larmore and Hirschberg's package-merge)."""
    coins = packages = sorted(map(int, counts))
    for _ in range(longest - 1):
        pairs = zip(packages[::2], packages[1::2], strict=False)
        packages = sorted(coins + [one + other for one, other in pairs])
    return sum(packages[: 2 * len(coins) - 2])


@pytest.mark.parametrize("ratio", [1.3, 1.62, 2.0, 4.0])
@pytest.mark.parametrize("num_values", [12, 20, 60, 128, 129, 130, 255, 256])
def test_codes_that_would_be_too_long_are_made_to_fit(ratio: float, num_values: int) -> None:
    counts = np.maximum(1, 60_000 / ratio ** np.arange(num_values)).astype(int)
    data = np.repeat(np.arange(num_values).astype(np.uint8), counts)
    np.random.default_rng(0).shuffle(data)
    assert len(_frames(data)) <= 1.01 * _least_bits(counts) / 8 + 200


@pytest.mark.parametrize("value", [0, 1, 0x12, 0x47, 0x7F, 0x80, 0xFF])
def test_a_value_that_occurs_once_is_coded_wherever_it_is(value: int) -> None:
    plane = _activations("float32", 2 * _BLOCK)[3::4].copy()
    for index in np.random.default_rng(value).integers(0, len(plane), 25):
        changed = plane.copy()
        changed[index] = value
        assert len(_frames(changed)) < 0.36 * len(plane)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("normal", "gradient", "rows", "parts")),
        ("float32", "softmax"),
        ("float16", "normal"),
    ],
)
def test_top_planes_are_about_as_small_as_with_zstd(dtype: str, kind: str) -> None:
    data = _activations(dtype, 2 * _FRAME, kind)
    payloads = [_encode(data, len(data) // (2 * _FRAME), encoder) for encoder in (Encoder(), _with_huffman())]
    assert payloads[0] != payloads[1]
    assert payloads[0][0] == payloads[1][0]
    of_zstd, of_huffman = (int.from_bytes(payload[:8], "little") for _, payload in payloads)
    assert of_huffman <= 1.01 * of_zstd


@pytest.mark.parametrize("room", [0, 8, 10_000])
def test_frames_never_leave_their_room(room: int) -> None:
    with pytest.raises(ValueError, match=f"out holds {room} bytes"):
        native.Kernels().huffman(np.zeros(10_000, np.uint8), 1, 0, np.zeros(room, np.uint8))


def test_matches_and_other_levels_are_left_to_zstd() -> None:
    random, kernels = np.random.default_rng(0), native.Kernels()
    normal = random.normal(0, 1, 1 << 18).astype(np.float32)
    sparse = np.where(random.random(normal.size) < 0.05, normal, 0).astype(np.float32)
    ramp = np.linspace(1, 2, normal.size, dtype=np.float32) ** 30
    for values in (sparse, ramp, np.zeros_like(normal), np.tile(normal[:300], 800)):
        data = values.view(np.uint8)
        assert _encode(data, 4, _with_huffman()) == _encode(data, 4, Encoder())
    data = normal.view(np.uint8)
    for codec, level in (("zstd", 1), ("auto", 3), ("none", 1)):
        assert _encode(data, 4, Encoder(codec, level, kernels)) == _encode(data, 4, Encoder(codec, level))
    assert _encode(data, 4, _with_huffman()) != _encode(data, 4, Encoder())


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_zeros_in_no_order_are_coded_in_every_plane(share: float) -> None:
    of_zstd, of_huffman = (_encode(_with_zeros(share), 4, encoder) for encoder in (Encoder(), _with_huffman()))
    assert of_huffman[0] == "planes"
    assert of_huffman != of_zstd
    assert len(of_huffman[1]) <= 1.01 * len(of_zstd[1])


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0, 0.1, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 1])
def test_nothing_becomes_much_larger_than_with_zstd(share: float, item_bytes: int) -> None:
    data = _with_zeros(share)
    if item_bytes == 1:
        data = (data.view("<f4") != 0).view(np.uint8)
    of_zstd, of_huffman = (_encode(data, item_bytes, encoder) for encoder in (Encoder(), _with_huffman()))
    assert len(of_huffman[1]) <= 1.07 * len(of_zstd[1])


def _with_zeros(share: float) -> npt.NDArray[np.uint8]:
    is_zero = np.random.default_rng(0).random(1 << 18) < share
    return np.where(is_zero, 0, _activations("float32", 1 << 18).view("<f4")).astype("<f4").view(np.uint8)


@pytest.mark.parametrize("num_items", [1, 7, 2047, 2048, 2049, 5000, 70_000])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
def test_the_sample_is_that_of_python_and_its_estimate_about_right(num_items: int, item_bytes: int) -> None:
    for data in (
        _activations("float32", num_items * item_bytes // 4 + 4)[: num_items * item_bytes],
        np.full(num_items * item_bytes, 5, np.uint8),
    ):
        expected = _sample(data, item_bytes).T[::-1]
        out = np.empty(expected.size, np.uint8)
        for level in range(len(native.LEVELS)):
            kernels = native.Kernels(level=level)
            num_sampled, estimate = kernels.sample(data, item_bytes, 8, 256, out)
            assert num_sampled == expected.shape[1]
            assert (out.reshape(expected.shape) == expected).all()
        frames = np.empty(_room(num_sampled), np.uint8)
        made = kernels.huffman(expected[0].copy(), 1, 0, frames)
        assert made - 50 <= estimate <= 1.02 * made + 300
    with pytest.raises(ValueError, match="are needed"):
        kernels.sample(data, item_bytes, 8, 256, out[:-1])


def test_payloads_of_both_are_laid_side_by_side() -> None:
    data = _activations("float32", 3 * _FRAME // 2)
    pieces = np.split(data, [4 * 5000, 4 * 40_000])
    encoders = (_with_huffman(), Encoder(), _with_huffman())
    payloads = []
    for piece, encoder in zip(pieces, encoders, strict=True):
        encoding, payload = _encode(piece, 4, encoder)
        assert encoding == "planes_plain"
        check_size(encoding, payload, len(piece), 4)
        payloads.append(EncodedPayload(encoding, payload, len(piece)))
    joined = concatenate(payloads, 4)
    assert joined is not None
    encoding, buffers = joined
    assert decode(encoding, b"".join(buffers), len(data), 4).tobytes() == data.tobytes()


@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_gives_other_numbers(share: float, bit: int) -> None:
    plane = _activations("float32", 5000)[3::4].copy()
    out = np.empty(_room(len(plane)), np.uint8)
    frames = out[: native.Kernels().huffman(plane, 1, 0, out)]
    frames[int(share * len(frames))] ^= 1 << bit
    try:
        decoded = decode("raw", frames, len(plane), 1)
    except CorruptError:
        return
    assert (decoded == plane).all()
