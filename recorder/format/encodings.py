"""The registry of payload encodings, and the Zstandard frames and byte planes of which payloads consist.

FORMAT.md, section 4, specifies them. All code that reads or writes payloads finds the encodings here. To add an
encoding in a minor version, add an entry to `ALL_ENCODINGS` and a line to FORMAT.md. To write it too, choose it in
`codec.Encoder`. Nothing here knows dtypes, rows or files. Sizes are compared before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from ..columns import PLAIN
from ..errors import CorruptError, UnsupportedError
from ..native import Kernels

RAW, PLANES, PLANES_PLAIN, REF = "raw", "planes", "planes_plain", "ref"

Pieces = Sequence[tuple[memoryview, int]]
"""Nonempty payloads of one encoding, each with the size of its decoded bytes (`payload_bytes`)."""


class PayloadWriter:
    """Writes payloads with zstd at one level. Each method returns the bytes written. Not thread-safe."""

    def __init__(self, level: int, kernels: Kernels | None) -> None:
        self.kernels = kernels
        self.compress: Callable[[Any], bytes] = compressor(level).compress
        self.scratch = np.empty(FRAME_BYTES, np.uint8)
        """1 MiB of scratch memory. The next call overwrites it."""

    def copy(self, data: Bytes, out: Bytes) -> int:
        """Write bytes unchanged to the front of `out`."""
        out[: len(data)] = data
        return len(data)

    def put_frames(self, data: Bytes, out: Bytes) -> int:
        num_written = 0
        for start in range(0, len(data), FRAME_BYTES):
            frame = np.frombuffer(self.compress(data[start : start + FRAME_BYTES]), np.uint8)
            out[num_written : num_written + len(frame)] = frame
            num_written += len(frame)
        return num_written

    def put_plane(self, data: Bytes, item_bytes: int, plane: int, out: Bytes) -> int:
        num_written = 0
        for start in range(0, len(data), item_bytes * FRAME_BYTES):
            piece = data[start : start + item_bytes * FRAME_BYTES]
            scratch = self.scratch[: len(piece) // item_bytes]
            split_planes(piece, item_bytes, range(plane, plane + 1), scratch, self.kernels)
            num_written += self.put_frames(scratch, out[num_written:])
        return num_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """One encoding of payloads: its name, and functions to read, check, join and write payloads."""

    name: str
    since: int = 0
    """The minor version of the format that added the encoding."""
    read: Callable[[memoryview, int, int], Bytes] | None
    """Decodes a payload, given `payload_bytes` and the element size, to new, writable bytes. None for a reference."""
    check: Callable[[memoryview, int, int], None]
    """Raises CorruptError if the sizes in the payload's headers disagree with `payload_bytes`."""
    target: Callable[[memoryview], int] | None = None
    """Returns the row (`seq`) of the shard whose content a reference stands for. None for other encodings."""
    join: Callable[[Pieces, int], list[memoryview]] | None = None
    """Joins payloads end to end without decoding them. None if payloads of this encoding cannot be joined."""
    write: Callable[[PayloadWriter, Bytes, int, Bytes, Kernels | None], int] | None = None
    """Encodes a tensor's bytes to the front of a buffer, with zstd or the compiled Huffman code. Returns the number of
    bytes written. None if the package never writes this encoding."""


def _read_plain(source: memoryview, payload_bytes: int, item_bytes: int) -> Bytes:
    expect_bytes("plain payload", len(source), payload_bytes)
    return np.frombuffer(source, np.uint8).copy()


def _check_plain(source: memoryview, payload_bytes: int, item_bytes: int) -> None:
    expect_bytes("plain payload", len(source), payload_bytes)


def _lay_end_to_end(pieces: Pieces, item_bytes: int) -> list[memoryview]:
    return [source for source, _ in pieces]


def _write_plain(writer: PayloadWriter, data: Bytes, item_bytes: int, out: Bytes, huffman: Kernels | None) -> int:
    return writer.copy(data, out)


def _read_raw(source: memoryview, payload_bytes: int, item_bytes: int) -> Bytes:
    return read_frames(source, payload_bytes)


def _check_content(source: memoryview, payload_bytes: int, item_bytes: int) -> None:
    _frames(source, payload_bytes)


def _write_raw(writer: PayloadWriter, data: Bytes, item_bytes: int, out: Bytes, huffman: Kernels | None) -> int:
    if huffman is not None:
        return huffman.encode(data, item_bytes, item_bytes, out)
    return writer.put_frames(data, out)


def _read_planes(source: memoryview, payload_bytes: int, item_bytes: int) -> Bytes:
    return join_planes([read_frames(source, payload_bytes)], payload_bytes // item_bytes, item_bytes)


def _join_planes(pieces: Pieces, item_bytes: int) -> list[memoryview]:
    planes_of = [_find_planes(source, payload_bytes, item_bytes) for source, payload_bytes in pieces]
    return [of_one[k] for k in range(item_bytes) for of_one in planes_of]


def _find_planes(source: memoryview, payload_bytes: int, item_bytes: int) -> list[memoryview]:
    """Return the frames of each byte plane of a payload. A plane always begins with a new frame."""
    planes: list[memoryview] = []
    num_items = payload_bytes // item_bytes
    begin = position = total = 0
    for frame, content_bytes in _frames(source, payload_bytes):
        position += len(frame)
        total += content_bytes
        if total == num_items * (len(planes) + 1):
            planes.append(source[begin:position])
            begin = position
    if len(planes) != item_bytes:
        raise CorruptError(f"payload of {len(planes)} planes that begin a frame: expected {item_bytes}")
    expect_bytes("payload", len(source), begin)
    return planes


def _write_planes(writer: PayloadWriter, data: Bytes, item_bytes: int, out: Bytes, huffman: Kernels | None) -> int:
    if huffman is not None:
        return huffman.encode(data, item_bytes, item_bytes, out)
    num_written = 0
    for plane in range(item_bytes):
        num_written += writer.put_plane(data, item_bytes, plane, out[num_written:])
    return num_written


def _top_and_rest(source: memoryview, payload_bytes: int, item_bytes: int) -> tuple[memoryview, memoryview]:
    top_bytes, num_items = int.from_bytes(source[:8], "little"), payload_bytes // item_bytes
    expect_bytes("payload", len(source), 8 + top_bytes + payload_bytes - num_items)
    return source[8 : 8 + top_bytes], source[8 + top_bytes :]


def _read_planes_plain(source: memoryview, payload_bytes: int, item_bytes: int) -> Bytes:
    num_items = payload_bytes // item_bytes
    top, rest = _top_and_rest(source, payload_bytes, item_bytes)
    runs = [read_frames(top, num_items), np.frombuffer(rest, np.uint8)]
    return join_planes(runs, num_items, item_bytes)


def _check_planes_plain(source: memoryview, payload_bytes: int, item_bytes: int) -> None:
    top, _ = _top_and_rest(source, payload_bytes, item_bytes)
    _frames(top, payload_bytes // item_bytes)


def _join_planes_plain(pieces: Pieces, item_bytes: int) -> list[memoryview]:
    tops, rests = [], []
    for source, payload_bytes in pieces:
        num_items = payload_bytes // item_bytes
        top, rest = _top_and_rest(source, payload_bytes, item_bytes)
        tops.append(top)
        rests.append([rest[k * num_items :][:num_items] for k in range(item_bytes - 1)])
    head = memoryview(sum(map(len, tops)).to_bytes(8, "little"))
    return [head, *tops, *(rest[k] for k in range(item_bytes - 1) for rest in rests)]


def _write_planes_plain(
    writer: PayloadWriter, data: Bytes, item_bytes: int, out: Bytes, huffman: Kernels | None
) -> int:
    if huffman is not None:
        return huffman.encode(data, item_bytes, 1, out)
    top_bytes = writer.put_plane(data, item_bytes, 0, out[8:])
    out[:8] = np.frombuffer(top_bytes.to_bytes(8, "little"), np.uint8)
    split_planes(data, item_bytes, range(1, item_bytes), out[8 + top_bytes :], writer.kernels)
    return 8 + top_bytes + (item_bytes - 1) * (len(data) // item_bytes)


def _check_ref(source: memoryview, payload_bytes: int, item_bytes: int) -> None:
    expect_bytes("ref payload", len(source), 8)


def _target_of_ref(source: memoryview) -> int:
    expect_bytes("ref payload", len(source), 8)
    return int.from_bytes(source, "little")


ALL_ENCODINGS = (
    Encoding(name=PLAIN, read=_read_plain, check=_check_plain, join=_lay_end_to_end, write=_write_plain),
    Encoding(name=RAW, read=_read_raw, check=_check_content, join=_lay_end_to_end, write=_write_raw),
    Encoding(name=PLANES, read=_read_planes, check=_check_content, join=_join_planes, write=_write_planes),
    Encoding(
        name=PLANES_PLAIN,
        read=_read_planes_plain,
        check=_check_planes_plain,
        join=_join_planes_plain,
        write=_write_planes_plain,
    ),
    Encoding(name=REF, read=None, check=_check_ref, target=_target_of_ref),
)
"""All encodings, in the order of FORMAT.md, which specifies them."""

ENCODINGS = tuple(encoding.name for encoding in ALL_ENCODINGS)
ENCODING_OF: Mapping[str, Encoding] = {encoding.name: encoding for encoding in ALL_ENCODINGS}


def encoding_of(name: str) -> Encoding:
    """Return the encoding with this name. Raises UnsupportedError if this version does not know it."""
    encoding = ENCODING_OF.get(name)
    if encoding is None:
        raise UnsupportedError(
            f"payload encoding {name!r} is unknown to this version of recorder, which reads {', '.join(ENCODINGS)}; "
            "a later version reads it, and all other columns of the row can be read"
        )
    return encoding


def target_of(name: str, payload: object) -> int | None:
    """Return the `seq` of the row that a reference names, or None. Raises CorruptError for a damaged reference."""
    encoding = ENCODING_OF.get(name)
    if encoding is None or encoding.target is None:
        return None
    try:
        source = memoryview(payload)  # type: ignore[arg-type]
    except TypeError:
        raise CorruptError(f"data is of type {type(payload).__name__}, but encoding {name!r} wants bytes") from None
    return encoding.target(source.cast("B"))


Bytes = npt.NDArray[np.uint8]

FRAME_BYTES = 1 << 20
"""The most content bytes of a Zstandard frame. So scratch memory is bounded, and a frame's content fits the cache."""
_JOIN_ITEMS = 1 << 15
"""The number of elements that are joined from byte planes at a time. These elements fit in the cache."""
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_MAGIC = 0xFD2FB528


def compressor(level: int) -> zstandard.ZstdCompressor:
    """Return a compressor whose frames contain their content size and a checksum.

    Level 1 is tuned for byte planes, which shrink by entropy coding and hardly by matches. It finds only long matches,
    with a table of 64 entries. It compresses to 33.5 % at 1.15 GB/s; zstd's own level 1 reaches 36.6 % at 0.39 GB/s.
    """
    if level != 1:
        return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True)
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        window_log=19,
        chain_log=6,
        hash_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        write_content_size=True,
        write_checksum=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def read_frames(source: memoryview, num_bytes: int) -> Bytes:
    """Decompress frames that lie end to end. Raises CorruptError unless the content is `num_bytes` long and undamaged.

    The declared sizes are added up before anything is decompressed. zstd checks the size and checksum of each frame.
    """
    frames = _frames(source, num_bytes)
    content = np.empty(num_bytes, np.uint8)
    decompress, position = zstandard.ZstdDecompressor().decompress, 0
    for frame, _ in frames:
        try:
            piece = np.frombuffer(decompress(frame, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise CorruptError(f"zstd frame: {error}") from error
        content[position : position + len(piece)] = piece
        position += len(piece)
    expect_bytes("zstd content", position, num_bytes)
    return content


def _frames(source: memoryview, num_bytes: int) -> list[tuple[memoryview, int]]:
    """Split data into its frames, whose declared content sizes must add up to `num_bytes`."""
    frames = []
    position = total = 0
    while position < len(source) and total <= num_bytes:
        frame = measure_frame(source[position:])
        frames.append((source[position : position + frame.frame_bytes], frame.content_bytes))
        position += frame.frame_bytes
        total += frame.content_bytes
    expect_bytes("zstd content", total, num_bytes)
    return frames


class Frame(NamedTuple):
    """The size in bytes of a Zstandard frame, and of its decompressed content."""

    frame_bytes: int
    content_bytes: int


def measure_frame(source: Any) -> Frame:
    """Return the sizes of the Zstandard frame at the start of `source`, from its block headers (RFC 8878, 3.1.1)."""
    try:
        parameters = zstandard.get_frame_parameters(source)
        position = zstandard.frame_header_size(source)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptError(f"zstd frame: {error}") from error
    if int.from_bytes(source[:4], "little") != _MAGIC or not parameters.has_checksum or parameters.dict_id:
        raise CorruptError("zstd frame: expected a frame with a checksum and without a dictionary")
    is_last, max_content_bytes = False, 0
    while not is_last:
        header = int.from_bytes(source[position : position + 3], "little")
        is_last, is_run, num_bytes = bool(header & 1), header & 6 == 2, header >> 3
        position += 3 + (1 if is_run else num_bytes)
        max_content_bytes += zstandard.BLOCKSIZE_MAX
        if position + 4 > len(source):
            raise CorruptError("zstd frame: cut short")
    if parameters.content_size > max_content_bytes:
        raise CorruptError(f"zstd frame: declares {parameters.content_size} bytes, its blocks hold {max_content_bytes}")
    return Frame(position + 4, parameters.content_size)


def expect_bytes(what: str, num_bytes: int, expected: int) -> None:
    """Raise CorruptError if `num_bytes` differs from `expected`. The message begins with `what`."""
    if num_bytes != expected:
        raise CorruptError(f"{what} of {num_bytes} bytes: expected {expected}")


def split_planes(data: Bytes, item_bytes: int, planes: range, out: Bytes, kernels: Kernels | None) -> None:
    """Copy byte planes (0 is the most significant) of little-endian elements to the front of `out`, end to end."""
    if kernels is not None:
        kernels.split(data, item_bytes, planes, out)
        return
    num_items = len(data) // item_bytes
    for number, plane in enumerate(planes):
        _split_plane(data, item_bytes, plane, out[number * num_items : (number + 1) * num_items])


def join_planes(runs: Sequence[Bytes], num_items: int, item_bytes: int) -> Bytes:
    """Join elements from all their byte planes, most significant first. Each item of `runs` has one or more planes."""
    planes = [run[start : start + num_items] for run in runs for start in range(0, len(run), num_items or 1)]
    if item_bytes in (2, 4):
        return _join_by_shifts(planes, num_items, item_bytes)
    items = np.empty((num_items, item_bytes), np.uint8)
    for plane, values in enumerate(planes):
        items[:, item_bytes - 1 - plane] = values
    return items.reshape(-1)


def _split_plane(data: Bytes, item_bytes: int, plane: int, out: Bytes) -> None:
    """Copy one byte plane to `out`.

    The wanted byte becomes the low byte of an integer that is read from a shifted, unaligned address. numpy's casts
    from integers to bytes are vectorised: they run at 30 to 70 GB/s, and a copy with strides runs at 4 GB/s.
    """
    first, wide = item_bytes - 1 - plane, _UNSIGNED.get(item_bytes)
    if wide is None:
        out[:] = data[first::item_bytes]
    elif len(out):
        out[-1] = data[first - item_bytes]
        np.copyto(out[:-1], data[first : first - item_bytes].view(wide), casting="unsafe")


def _join_by_shifts(planes: list[Bytes], num_items: int, item_bytes: int) -> Bytes:
    """Join elements of 2 or 4 bytes from byte planes, by shifts of blocks that fit in the cache.

    Elements of 2 bytes are joined at 10 GB/s and elements of 4 bytes at 6 GB/s; a copy with strides runs at 4 GB/s.
    """
    items = np.empty(num_items, _UNSIGNED[item_bytes])
    wide = np.empty(min(num_items, _JOIN_ITEMS), items.dtype)
    for start in range(0, num_items, _JOIN_ITEMS):
        out = items[start : start + _JOIN_ITEMS]
        out[:] = planes[-1][start : start + _JOIN_ITEMS]
        shifted = wide[: len(out)]
        for index, plane in enumerate(planes[-2::-1], start=1):
            shifted[:] = plane[start : start + _JOIN_ITEMS]
            np.left_shift(shifted, 8 * index, out=shifted)
            np.bitwise_or(out, shifted, out=out)
    return items.view(np.uint8)
