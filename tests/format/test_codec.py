"""Payloads come back bit for bit, and what was tampered with comes back as an error, never as other numbers."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from recorder.errors import CorruptError, UnsupportedError
from recorder.format.codec import CODECS, EncodedPayload, Encoder, check_size, concatenate, decode, max_encoded_bytes
from recorder.format.encodings import ALL_ENCODINGS, target_of
from recorder.numerics.dtypes import ITEM_BYTES

Bytes = npt.NDArray[np.uint8]
_MIB = 1 << 20
_ENCODERS = {codec: Encoder(codec) for codec in CODECS}


def _encode(data: Bytes, item_bytes: int, codec: str = "auto", encoder: Encoder | None = None) -> tuple[str, bytes]:
    guard = 32
    out = np.full(max_encoded_bytes(len(data)) + guard, 0xA5, np.uint8)
    encoding, num_bytes = (encoder or _ENCODERS[codec]).encode(data, item_bytes, out[:-guard])
    assert (out[-guard:] == 0xA5).all(), "wrote beyond the buffer"
    return encoding, out[:num_bytes].tobytes()


def _kind(kind: str, num_bytes: int, seed: int = 0) -> Bytes:
    """Bytes of the kinds that tensors hold; `num_bytes` is a multiple of 16."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(num_bytes // 4).astype(np.float32)
    values: npt.NDArray[Any] = {
        "normal": normal,
        "normal_bfloat16": np.repeat(normal, 2).view(np.uint32) >> 16,
        "random": rng.integers(0, 256, num_bytes, np.uint8),
        "zeros": np.zeros(num_bytes, np.uint8),
        "sparse": np.where(rng.random(normal.size) < 0.05, normal, 0).astype(np.float32),
        "mask": (rng.random(num_bytes) < 0.9).astype(np.uint8),
        "token_ids": rng.integers(0, 50_000, num_bytes // 8),
        "late_surprise": np.r_[np.zeros(num_bytes // 8, np.float32), normal[num_bytes // 8 :]].astype(np.float32),
    }[kind]
    return values.astype(np.uint16).view(np.uint8) if kind == "normal_bfloat16" else values.view(np.uint8)


_KINDS = ("normal", "normal_bfloat16", "random", "zeros", "sparse", "mask", "token_ids", "late_surprise")


@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    kind=st.sampled_from(_KINDS),
    num_items=st.integers(0, 6000),
    seed=st.integers(0, 9),
)
def test_any_tensor_comes_back(codec: str, dtype: str, kind: str, num_items: int, seed: int) -> None:
    num_bytes = num_items * ITEM_BYTES[dtype]
    data = _kind(kind, -(-num_bytes // 16) * 16, seed)[:num_bytes]
    encoding, payload = _encode(data, ITEM_BYTES[dtype], codec)
    assert decode(encoding, payload, num_bytes, ITEM_BYTES[dtype]).tobytes() == data.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_tensors_of_several_frames_come_back(codec: str, kind: str, item_bytes: int) -> None:
    data = _kind(kind, 3 * _MIB + 48)
    encoding, payload = _encode(data, item_bytes, codec)
    assert len(payload) <= len(data) or encoding != "plain"
    assert (decode(encoding, payload, len(data), item_bytes) == data).all()


@pytest.mark.parametrize(
    ("kind", "item_bytes", "encoding", "left"),
    [
        ("normal", 4, "planes_plain", 0.84),
        ("normal_bfloat16", 2, "planes_plain", 0.68),
        ("random", 4, "plain", 1.0),
        ("random", 1, "plain", 1.0),
        ("zeros", 4, "raw", 0.001),
        ("sparse", 4, "raw", 0.09),
        ("mask", 1, "raw", 0.13),
        ("token_ids", 8, "planes", 0.27),
    ],
)
def test_auto_finds_what_pays(kind: str, item_bytes: int, encoding: str, left: float) -> None:
    data = _kind(kind, 1 << 18)
    found, payload = _encode(data, item_bytes)
    assert found == encoding
    assert len(payload) <= left * len(data)


@pytest.mark.parametrize("level", [1, 3])
def test_zstd_compresses_every_plane_at_any_level(level: int) -> None:
    encoding, payload = _encode(_kind("token_ids", 1 << 16), 8, encoder=Encoder("zstd", level))
    assert encoding == "planes"
    assert len(payload) < 0.27 * (1 << 16)


def test_an_unknown_codec_or_a_short_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="lz4"):
        Encoder("lz4")
    with pytest.raises(ValueError, match="holds 8 bytes"):
        Encoder().encode(np.zeros(64, np.uint8), 1, np.empty(8, np.uint8))


def _each_encoding() -> list[tuple[str, bytes, Bytes, int]]:
    cases = [("normal", 4, "auto"), ("normal", 4, "zstd"), ("normal", 4, "none"), ("mask", 1, "auto")]
    made = []
    for kind, item_bytes, codec in cases:
        data = _kind(kind, 1 << 14)
        encoding, payload = _encode(data, item_bytes, codec)
        made.append((encoding, payload, data, item_bytes))
    assert {case[0] for case in made} == {one.name for one in ALL_ENCODINGS if one.write is not None}
    return made


_EACH_ENCODING = _each_encoding()
_BY_ENCODING = pytest.mark.parametrize(
    ("encoding", "payload", "data", "item_bytes"), _EACH_ENCODING, ids=[case[0] for case in _EACH_ENCODING]
)


@_BY_ENCODING
def test_any_buffer_is_accepted_and_the_result_is_writable(
    encoding: str, payload: bytes, data: Bytes, item_bytes: int
) -> None:
    for source in (payload, memoryview(payload), pa.py_buffer(payload), np.frombuffer(payload, np.uint8)):
        decoded = decode(encoding, source, len(data), item_bytes)
        assert (decoded == data).all()
        assert decoded.flags.writeable


@_BY_ENCODING
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_zstd_content_never_gives_other_numbers(
    encoding: str, payload: bytes, data: Bytes, item_bytes: int, share: float, bit: int
) -> None:
    # Plain bytes have no checksum of their own; the batch's covers them.
    num_checked = {"plain": 0, "planes_plain": 8 + int.from_bytes(payload[:8], "little")}.get(encoding, len(payload))
    if not num_checked:
        return
    damaged = bytearray(payload)
    damaged[int(share * num_checked)] ^= 1 << bit
    try:
        decoded = decode(encoding, bytes(damaged), len(data), item_bytes)
    except CorruptError:
        return
    assert (decoded == data).all()


@_BY_ENCODING
@given(cut=st.floats(0, 1, exclude_max=True), extra=st.binary(min_size=1, max_size=16))
def test_a_payload_cut_or_continued_is_corrupt(
    encoding: str, payload: bytes, data: Bytes, item_bytes: int, cut: float, extra: bytes
) -> None:
    for damaged in (payload[: int(cut * len(payload))], payload + extra, payload + payload):
        with pytest.raises(CorruptError):
            decode(encoding, damaged, len(data), item_bytes)


@_BY_ENCODING
def test_another_declared_size_is_corrupt(encoding: str, payload: bytes, data: Bytes, item_bytes: int) -> None:
    for num_bytes in (-item_bytes, 0, len(data) - item_bytes, len(data) + item_bytes, 1 << 60):
        with pytest.raises(CorruptError):
            decode(encoding, payload, num_bytes, item_bytes)
    if item_bytes > 1:
        with pytest.raises(CorruptError, match="multiple of 4"):
            decode(encoding, payload, len(data) - 1, item_bytes)


@given(
    st.sampled_from([one.name for one in ALL_ENCODINGS if one.read is not None]),
    st.binary(max_size=200),
    st.integers(0, 1 << 50),
)
def test_arbitrary_bytes_are_data_or_corrupt(encoding: str, payload: bytes, num_bytes: int) -> None:
    try:
        decoded = decode(encoding, payload, num_bytes, 1)
    except CorruptError:
        return
    assert len(decoded) == num_bytes


def test_frames_without_size_or_checksum_and_skippable_frames_are_refused() -> None:
    content = bytes(5000)
    for payload in (
        zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(content),
        zstandard.ZstdCompressor(write_content_size=True, write_checksum=False).compress(content),
        struct.pack("<II", 0x184D2A50, 5000) + content,
    ):
        with pytest.raises(CorruptError):
            decode("raw", payload, 5000, 1)


def test_frames_of_another_compressor_end_to_end_are_read() -> None:
    content = np.random.default_rng(0).integers(0, 4, 500_000, np.uint8)
    compress = zstandard.ZstdCompressor(level=7, write_checksum=True).compress
    payload = b"".join(compress(piece.tobytes()) for piece in np.array_split(content, 3))
    assert (decode("raw", payload, len(content), 1) == content).all()


def _peak_bytes_of_refusing(payload: bytes, num_bytes: int) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            decode("raw", payload, num_bytes, 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_before_anything_is_allocated() -> None:
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(64 * _MIB))
    assert len(bomb) < 10_000
    assert _peak_bytes_of_refusing(bomb, 1000) < _MIB
    assert _peak_bytes_of_refusing(bomb * 20, 64 * _MIB) < _MIB


def test_a_frame_that_lies_about_its_size_is_corrupt() -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(100_000)))
    assert frame[4] & 0xC0 == 0x80, "a content size of four bytes follows"
    start = 5 if frame[4] & 0x20 else 6
    assert struct.unpack_from("<I", frame, start)[0] == 100_000
    struct.pack_into("<I", frame, start, 50_000)
    with pytest.raises(CorruptError):
        decode("raw", bytes(frame), 50_000, 1)
    assert _peak_bytes_of_refusing(bytes(frame), 1 << 40) < _MIB


def test_a_frame_cannot_declare_more_than_its_blocks_can_hold() -> None:
    size = (1 << 32) - 1
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(100_000)))
    struct.pack_into("<I", frame, 5 if frame[4] & 0x20 else 6, size)
    assert _peak_bytes_of_refusing(bytes(frame), size) < _MIB


def test_an_unknown_encoding_is_unsupported_and_a_ref_must_be_resolved_first() -> None:
    for encoding in ("delta", "", "ref"):
        with pytest.raises(UnsupportedError, match="encoding"):
            decode(encoding, b"12345678", 8, 1)
    with pytest.raises(
        UnsupportedError, match="'delta' is unknown to this version of recorder, which reads plain, raw"
    ):
        check_size("delta", b"12345678", 8, 1)
    assert concatenate([EncodedPayload("delta", b"12345678", 8)], 1) is None


@_BY_ENCODING
def test_the_headers_of_a_payload_say_whether_it_may_be_as_long_as_its_row_says(
    encoding: str, payload: bytes, data: Bytes, item_bytes: int
) -> None:
    check_size(encoding, payload, len(data), item_bytes)
    for damaged, num_bytes in ((payload, len(data) - item_bytes), (payload[:-1], len(data))):
        with pytest.raises(CorruptError):
            check_size(encoding, damaged, num_bytes, item_bytes)


@given(st.integers(0, (1 << 63) - 1))
def test_a_ref_names_a_row(seq: int) -> None:
    payload = seq.to_bytes(8, "little")
    assert target_of("ref", payload) == seq
    assert target_of("plain", payload) is None
    for damaged in (payload + b"\0", payload[:-1], None):
        with pytest.raises(CorruptError):
            target_of("ref", damaged)


@pytest.mark.parametrize("kind", ["normal", "normal_bfloat16", "random", "zeros", "token_ids"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
def test_payloads_laid_side_by_side_are_the_content_end_to_end(kind: str, codec: str, item_bytes: int) -> None:
    pieces = [_kind(kind, num_bytes, seed) for seed, num_bytes in enumerate([1 << 16, 0, 3 << 16, 1 << 20])]
    payloads = []
    for piece in pieces:
        encoding, data = _encode(piece, item_bytes, codec)
        payloads.append(EncodedPayload(encoding, data, len(piece)))
    joined = concatenate(payloads, item_bytes)
    encodings = {payload.encoding for payload in payloads if payload.payload_bytes}
    if joined is None:
        assert len(encodings) > 1
        return
    whole = np.concatenate(pieces)
    encoding, buffers = joined
    assert encodings == {encoding}
    assert np.array_equal(decode(encoding, b"".join(buffers), len(whole), item_bytes), whole)
    assert sum(map(len, buffers)) <= sum(len(payload.data) for payload in payloads)


def test_a_cut_payload_is_not_laid_beside_another() -> None:
    piece = _kind("normal", 1 << 16)
    encoding, data = _encode(piece, 4)
    assert encoding == "planes_plain"
    with pytest.raises(CorruptError):
        concatenate([EncodedPayload(encoding, data[:-1], len(piece))] * 2, 4)


def test_nothing_at_all_is_a_plain_payload() -> None:
    assert concatenate([], 4) == ("plain", [])


def test_payloads_of_one_kind_are_sampled_once_in_a_while_and_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder()
    sampled: list[Any] = []
    choose = encoder._choose

    def choose_(*args: Any) -> Any:
        sampled.append(args)
        return choose(*args)

    monkeypatch.setattr(encoder, "_choose", choose_)
    normal = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)

    def payload(values: npt.NDArray[Any], kind: str | None) -> tuple[str, int]:
        out = np.empty(max_encoded_bytes(values.nbytes), np.uint8)
        encoding, num_bytes = encoder.encode(values.view(np.uint8), values.itemsize, out, kind)
        assert (decode(encoding, out[:num_bytes], values.nbytes, values.itemsize) == values.view(np.uint8)).all()
        return encoding, num_bytes

    expected = payload(normal, None)
    assert [payload(normal, "a") for _ in range(32)] == 32 * [expected]
    assert len(sampled) == 1 + 2
    payload(normal, "b")
    payload(normal.view(np.uint16), "a")
    assert len(sampled) == 1 + 2 + 2
    constant = np.zeros_like(normal)
    first, second = payload(constant, "b"), payload(constant, "b")
    assert second[1] <= first[1] < expected[1] and second[0] != expected[0]
    assert [payload(normal, "b") for _ in range(2)][1] == expected
