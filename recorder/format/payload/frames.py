"""Zstandard frames laid end to end, and the byte planes of elements (FORMAT.md, section 4).

Must never know which encoding a payload has: `encodings` puts frames and planes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from ...errors import CorruptError
from ...native import Kernels

Bytes = npt.NDArray[np.uint8]

FRAME_BYTES = 1 << 20
"""Content of one frame at most: bounds the scratch, and keeps a piece in cache between split and compression."""
_JOIN_ITEMS = 1 << 15
"""Elements joined at a time, within the cache."""
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_MAGIC = 0xFD2FB528


def compressor(level: int) -> zstandard.ZstdCompressor:
    """A compressor whose frames carry their content size and a checksum.

    Level 1 is tuned for byte planes, whose gain is in the entropy coder and not in matches: long matches alone, found
    through a table of 64 entries. Against zstd's own level 1: 1.15 for 0.39 GB/s, and 33.5 for 36.6 % left.
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
    """The content of frames laid end to end, which must come to `num_bytes` in all.

    Each frame is measured and its declared content compared with what is still missing before anything is
    decompressed; zstd then checks the content against size and checksum.

    Raises:
        CorruptError: it does not.
    """
    frames = []
    position = total = 0
    while position < len(source):
        frame = measure_frame(source[position:])
        total += frame.content_bytes
        if total > num_bytes:
            break
        frames.append(source[position : position + frame.frame_bytes])
        position += frame.frame_bytes
    expect_bytes("zstd content", total, num_bytes)
    content = np.empty(num_bytes, np.uint8)
    decompress, position = zstandard.ZstdDecompressor().decompress, 0
    for frame_source in frames:
        try:
            piece = np.frombuffer(decompress(frame_source, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise CorruptError(f"zstd frame: {error}") from error
        content[position : position + len(piece)] = piece
        position += len(piece)
    expect_bytes("zstd content", position, num_bytes)
    return content


def check_frames(source: memoryview, num_bytes: int) -> None:
    """See from their headers that frames may come to `num_bytes`; nothing is decompressed.

    Raises:
        CorruptError: they cannot.
    """
    position = total = 0
    while position < len(source) and total <= num_bytes:
        frame = measure_frame(source[position:])
        position += frame.frame_bytes
        total += frame.content_bytes
    expect_bytes("zstd content", total, num_bytes)


class Frame(NamedTuple):
    """How long a frame is, and what it holds."""

    frame_bytes: int
    content_bytes: int


def measure_frame(source: Any) -> Frame:
    """The length of the frame at the front of `source`, found through its block headers (RFC 8878, 3.1.1).

    Raises:
        CorruptError: there is no whole frame of the kind that FORMAT.md allows.
    """
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
    """Refuse a number of bytes that is not the expected one.

    Raises:
        CorruptError: it is not; the message begins with `what`.
    """
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
    """Return elements from all their planes, the most significant plane first; each run holds one plane or several."""
    planes = [run[start : start + num_items] for run in runs for start in range(0, len(run), num_items or 1)]
    if item_bytes in (2, 4):
        return _join_by_shifts(planes, num_items, item_bytes)
    items = np.empty((num_items, item_bytes), np.uint8)
    for plane, values in enumerate(planes):
        items[:, item_bytes - 1 - plane] = values
    return items.reshape(-1)


def _split_plane(data: Bytes, item_bytes: int, plane: int, out: Bytes) -> None:
    """Copy one plane to `out`.

    The low byte of an integer read from a shifted, unaligned address is the byte wanted, and numpy's casts are
    vectorised: 30 to 70 GB/s, against 4 for a copy with strides.
    """
    first, wide = item_bytes - 1 - plane, _UNSIGNED.get(item_bytes)
    if wide is None:
        out[:] = data[first::item_bytes]
    elif len(out):
        out[-1] = data[first - item_bytes]
        np.copyto(out[:-1], data[first : first - item_bytes].view(wide), casting="unsafe")


def _join_by_shifts(planes: list[Bytes], num_items: int, item_bytes: int) -> Bytes:
    """Return elements from planes, by shifts within the cache.

    Measured for 2 and 4 bytes an element: 10 and 6 GB/s, against 4 GB/s for a copy with strides.
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
