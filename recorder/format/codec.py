"""Payload bytes to and from their encodings; never knows of dtypes, rows or files.

Measured on one core (float32 activations): splitting into byte planes 9 to 16 GB/s, zstd on the top plane 1.1 GB/s, and
the compiled Huffman code, which makes frames of the same format without a search for matches, twice that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from ..errors import CorruptError, UnsupportedError
from ..native import Kernels

Bytes = npt.NDArray[np.uint8]

RAW, PLANES, PLAIN, PLANES_PLAIN, REF = ENCODINGS = ("raw", "planes", "plain", "planes_plain", "ref")
CODECS = ("auto", "none", "zstd")

_FRAME_BYTES = 1 << 20
"""Content of one zstd frame at most: bounds the scratch, and keeps a piece in cache between split and compression."""
_JOIN_ITEMS = 1 << 15
_MIN_BYTES = 16384
"""Below, a payload is stored as it is: at 4 KiB, planes cost 22 us a row and save 7 %."""
_SAMPLE_SLICES, _SAMPLE_ITEMS = 8, 256
_PAYS = 0.92
"""A part is compressed if its sample shrinks below this: zstd and its decompression cost more than 8 % of a write."""
_MATCHES_PAY = 1.05
"""zstd is taken where the Huffman code leaves this times as much of a payload: it takes twice as long, or longer."""
_SAMPLED_EACH = 16
"""Payloads of one kind of which one is sampled, at 25 us, while the others stay within `_ALIKE` of what that left."""
_ALIKE = 0.04
_SHARED_BYTES = 1 << 19
"""A copy from which on threads may share it."""
_MAX_KINDS = 1 << 16
_ZSTD_MAGIC = 0xFD2FB528
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def max_encoded_bytes(nbytes: int) -> int:
    """Bytes of `out` that `Encoder.encode` may ask for; a little more than it ever writes."""
    return nbytes + nbytes // 128 + 4096


class _Known:
    """What was chosen for a kind of payload."""

    __slots__ = ("choice", "num_left", "share")

    def __init__(self, choice: tuple[str, Kernels | None], share: float) -> None:
        self.choice = choice
        self.share = share
        """Bytes that it left, of the bytes that there were."""
        self.num_left = _SAMPLED_EACH - 1
        """Payloads for which it is still good."""


class Encoder:
    """Compresses payloads. Not thread-safe: it holds the zstd context and 1 MiB of scratch."""

    def __init__(self, codec: str = "auto", level: int = 1, kernels: Kernels | None = None) -> None:
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r}: expected one of {CODECS}")
        self._codec = codec
        self._min_bytes: float = {"auto": _MIN_BYTES, "zstd": 1}.get(codec, math.inf)
        self.kernels = kernels
        self._huffman = kernels if codec == "auto" and level == 1 else None
        self._compress: Callable[[Any], bytes] = _compressor(level).compress
        self._plane = np.empty(_FRAME_BYTES, np.uint8)
        self._known: dict[tuple[Hashable, int], _Known] = {}

    def stores(self, num_bytes: int) -> bool:
        """Whether a payload of so many bytes is stored as it is, whatever it holds."""
        return num_bytes < self._min_bytes

    def encode(self, data: Bytes, item_bytes: int, out: Bytes, kind: Hashable = None) -> tuple[str, int]:
        """Write the payload of `data` to the front of `out`.

        Args:
            data: the tensor's little-endian C-order bytes, contiguous, a multiple of `item_bytes` long.
            item_bytes: bytes of one element.
            out: at least `max_encoded_bytes(len(data))` long, or as long as `data` where it `stores` that; what follows
                the payload is undefined.
            kind: what `data` is of; payloads of one kind are alike, so not each of them is sampled.

        Returns:
            The encoding, and how many bytes of `out` it took.
        """
        num_bytes = len(data)
        is_stored = num_bytes < self._min_bytes
        if len(out) < (needed := num_bytes if is_stored else max_encoded_bytes(num_bytes)):
            raise ValueError(f"out holds {len(out)} bytes, {needed} may be needed")
        if is_stored:
            return self._store(data, out)
        known = None if kind is None else self._known.get((kind, item_bytes))
        encoding, huffman = self._choose(data, item_bytes) if known is None else known.choice
        num_written = 0
        if huffman and encoding != PLAIN:
            num_written = huffman.encode(data, item_bytes, 1 if encoding == PLANES_PLAIN else item_bytes, out)
        elif encoding == RAW:
            num_written = self._put_frames(data, out)
        elif encoding == PLANES:
            for plane in range(item_bytes):
                num_written += self._put_plane(data, item_bytes, plane, out[num_written:])
        elif encoding == PLANES_PLAIN:
            num_items = len(data) // item_bytes
            num_compressed = self._put_plane(data, item_bytes, 0, out[8:])
            out[:8] = np.frombuffer(num_compressed.to_bytes(8, "little"), np.uint8)
            num_written = 8 + num_compressed
            self._split(data, item_bytes, range(1, item_bytes), out[num_written:])
            num_written += (item_bytes - 1) * num_items
        if encoding == PLAIN or num_written > num_bytes:
            encoding, num_written = self._store(data, out)
        share = num_written / num_bytes
        if known is not None:
            known.num_left -= 1
            if not known.num_left or not -_ALIKE < share - known.share < _ALIKE:
                del self._known[kind, item_bytes]
        elif kind is not None:
            if len(self._known) == _MAX_KINDS:
                self._known.clear()
            self._known[kind, item_bytes] = _Known((encoding, huffman), share)
        return encoding, num_written

    def _store(self, data: Bytes, out: Bytes) -> tuple[str, int]:
        num_bytes = len(data)
        if num_bytes >= _SHARED_BYTES and self.kernels is not None:
            self.kernels.copy(data, out)
        else:
            out[:num_bytes] = data
        return PLAIN, num_bytes

    def _choose(self, data: Bytes, item_bytes: int) -> tuple[str, Kernels | None]:
        """The encoding, and what compresses it where that is not zstd.

        The Huffman code leaves a bit of each byte: planes that are constant in a sample need not be so elsewhere.
        """
        if self._codec == "zstd":
            return PLANES if item_bytes > 1 else RAW, None
        planes, top_without_matches = self._sample_planes(data, item_bytes)
        top = len(self._compress(planes[0]))
        if item_bytes > 1:
            rest = len(self._compress(planes[1:]))
            if rest < _PAYS * planes[1:].size:
                raw = len(self._compress(planes[::-1].T.copy()))
                if self._huffman is not None:
                    frames = self._plane[planes.size :]
                    without_matches = top_without_matches + self._huffman.huffman(planes[1:].reshape(-1), 1, 0, frames)
                    if max(without_matches, planes.size // 8) <= _MATCHES_PAY * min(raw, top + rest):
                        return PLANES, self._huffman
                return (RAW if raw < top + rest else PLANES), None
        if top >= _PAYS * planes[0].size:
            return PLAIN, None
        others = planes[1:].size
        is_near = max(top_without_matches, planes[0].size // 8) + others <= _MATCHES_PAY * (top + others)
        return PLANES_PLAIN if item_bytes > 1 else RAW, self._huffman if is_near else None

    def _sample_planes(self, data: Bytes, item_bytes: int) -> tuple[Bytes, int]:
        """The planes of a sample, valid until the next call, and about what the Huffman code makes of the first."""
        if self.kernels is None:
            return _sample(data, item_bytes).T[::-1].copy(), 0
        scratch = self._plane
        num_items, num_bytes = self.kernels.sample(data, item_bytes, _SAMPLE_SLICES, _SAMPLE_ITEMS, scratch)
        return scratch[: num_items * item_bytes].reshape(item_bytes, num_items), num_bytes

    def _put_plane(self, data: Bytes, item_bytes: int, plane: int, out: Bytes) -> int:
        num_written = 0
        for start in range(0, len(data), item_bytes * _FRAME_BYTES):
            piece = data[start : start + item_bytes * _FRAME_BYTES]
            scratch = self._plane[: len(piece) // item_bytes]
            self._split(piece, item_bytes, range(plane, plane + 1), scratch)
            num_written += self._put_frames(scratch, out[num_written:])
        return num_written

    def _split(self, data: Bytes, item_bytes: int, planes: range, out: Bytes) -> None:
        """Copy byte planes to the front of `out`, end to end."""
        if self.kernels is not None:
            self.kernels.split(data, item_bytes, planes, out)
            return
        num_items = len(data) // item_bytes
        for number, plane in enumerate(planes):
            _split(data, item_bytes, plane, out[number * num_items : (number + 1) * num_items])

    def _put_frames(self, data: Bytes, out: Bytes) -> int:
        num_written = 0
        for start in range(0, len(data), _FRAME_BYTES):
            frame = np.frombuffer(self._compress(data[start : start + _FRAME_BYTES]), np.uint8)
            out[num_written : num_written + len(frame)] = frame
            num_written += len(frame)
        return num_written


def decode(encoding: str, payload: Any, payload_bytes: int, item_bytes: int) -> Bytes:
    """The tensor's bytes from a payload (any contiguous buffer); nothing is allocated before the sizes agree.

    Args:
        encoding: the row's column, but not ``ref``: resolve that first.
        payload: the row's ``data``.
        payload_bytes: the row's column: how many bytes must come out.
        item_bytes: bytes of one element of the row's dtype.

    Returns:
        A new, writable array of `payload_bytes` bytes.

    Raises:
        CorruptError: the payload is not one of `payload_bytes` bytes.
        UnsupportedError: the encoding is unknown to this version.
    """
    source = memoryview(payload).cast("B")
    if encoding not in ENCODINGS or encoding == REF:
        raise UnsupportedError(
            f"payload encoding {encoding!r}: this reader decodes {RAW}, {PLANES}, {PLAIN}, {PLANES_PLAIN}"
        )
    if payload_bytes < 0 or payload_bytes % item_bytes:
        raise CorruptError(f"payload of {payload_bytes} bytes: expected a multiple of {item_bytes}")
    if encoding == PLAIN:
        _expect_bytes("plain payload", len(source), payload_bytes)
        return np.frombuffer(source, np.uint8).copy()
    if encoding == RAW:
        return _read_frames(source, payload_bytes)
    num_items = payload_bytes // item_bytes
    if encoding == PLANES:
        return _join([_read_frames(source, payload_bytes)], num_items, item_bytes)
    compressed_bytes = int.from_bytes(source[:8], "little")
    _expect_bytes("payload", len(source), 8 + compressed_bytes + payload_bytes - num_items)
    rest = np.frombuffer(source[8 + compressed_bytes :], np.uint8)
    top = _read_frames(source[8 : 8 + compressed_bytes], num_items)
    return _join([top, rest], num_items, item_bytes)


def check_size(encoding: str, payload: Any, payload_bytes: int, item_bytes: int) -> None:
    """See from the headers of a payload that it may decode to `payload_bytes` bytes; nothing is decompressed.

    Raises:
        CorruptError: it cannot.
    """
    source, num_bytes = memoryview(payload).cast("B"), payload_bytes
    if encoding == PLANES_PLAIN:
        num_items = payload_bytes // item_bytes
        compressed_bytes = int.from_bytes(source[:8], "little")
        _expect_bytes("payload", len(source), 8 + compressed_bytes + payload_bytes - num_items)
        source, num_bytes = source[8 : 8 + compressed_bytes], num_items
    elif encoding not in (RAW, PLANES):
        _expect_bytes(f"{encoding} payload", len(source), payload_bytes)
        return
    position = total = 0
    while position < len(source) and total <= num_bytes:
        frame = _measure_frame(source[position:])
        position += frame.frame_bytes
        total += frame.content_bytes
    _expect_bytes("zstd content", total, num_bytes)


class Payload(NamedTuple):
    """An encoded payload: the columns `encoding`, `data` and `payload_bytes` of one row."""

    encoding: str
    data: Any
    """Any contiguous buffer."""
    payload_bytes: int


def concatenate(payloads: Sequence[Payload], item_bytes: int) -> tuple[str, list[memoryview]] | None:
    """The payload of several ones' content end to end, without decoding: frames and planes are laid side by side.

    Returns:
        The encoding, and the pieces of ``data`` in order; None where encodings differ, or are not to be joined so.
    """
    encodings = {payload.encoding for payload in payloads if payload.payload_bytes} or {PLAIN}
    encoding = min(encodings)
    if len(encodings) != 1 or encoding not in (PLAIN, RAW, PLANES, PLANES_PLAIN):
        return None
    sources = [(memoryview(p.data).cast("B"), p.payload_bytes) for p in payloads if p.payload_bytes]
    if encoding in (PLAIN, RAW) or len(sources) == 1:
        return encoding, [source for source, _ in sources]
    if encoding == PLANES:
        planes = [_find_planes(source, payload_bytes, item_bytes) for source, payload_bytes in sources]
        return encoding, [of_one[k] for k in range(item_bytes) for of_one in planes]
    tops, rests = [], []
    for source, payload_bytes in sources:
        top_bytes, num_items = int.from_bytes(source[:8], "little"), payload_bytes // item_bytes
        _expect_bytes("payload", len(source), 8 + top_bytes + payload_bytes - num_items)
        tops.append(source[8 : 8 + top_bytes])
        rests.append([source[8 + top_bytes + k * num_items :][:num_items] for k in range(item_bytes - 1)])
    head = memoryview(sum(map(len, tops)).to_bytes(8, "little"))
    return encoding, [head, *tops, *(rest[k] for k in range(item_bytes - 1) for rest in rests)]


def _find_planes(source: memoryview, payload_bytes: int, item_bytes: int) -> list[memoryview]:
    """The frames of each plane: every plane begins a frame."""
    planes: list[memoryview] = []
    num_items = payload_bytes // item_bytes
    begin = position = total = 0
    while position < len(source) and total < payload_bytes:
        frame = _measure_frame(source[position:])
        position += frame.frame_bytes
        total += frame.content_bytes
        if total == num_items * (len(planes) + 1):
            planes.append(source[begin:position])
            begin = position
    _expect_bytes("zstd content", total, payload_bytes)
    _expect_bytes("payload", len(source), position)
    if len(planes) != item_bytes:
        raise CorruptError(f"payload of {len(planes)} planes that begin a frame: expected {item_bytes}")
    return planes


def encode_ref(seq: int) -> bytes:
    """The payload of encoding ``ref``: the content is that of the row `seq` of the same shard."""
    return seq.to_bytes(8, "little")


def ref_target(payload: Any) -> int:
    """The `seq` that a payload of encoding ``ref`` names.

    Raises:
        CorruptError: the payload is not 8 bytes long.
    """
    source = memoryview(payload).cast("B")
    _expect_bytes("ref payload", len(source), 8)
    return int.from_bytes(source, "little")


def _compressor(level: int) -> zstandard.ZstdCompressor:
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


def _sample(data: Bytes, item_bytes: int) -> Bytes:
    """A few slices spread evenly over the data, of shape (elements, item_bytes)."""
    items = data.reshape(-1, item_bytes)
    if len(items) <= _SAMPLE_SLICES * _SAMPLE_ITEMS:
        return items
    starts = [i * (len(items) - _SAMPLE_ITEMS) // (_SAMPLE_SLICES - 1) for i in range(_SAMPLE_SLICES)]
    return np.concatenate([items[start : start + _SAMPLE_ITEMS] for start in starts])


def _split(data: Bytes, item_bytes: int, plane: int, out: Bytes) -> None:
    """Copy byte plane `plane` (0 is the most significant) of little-endian elements to `out`.

    The low byte of an integer read from a shifted, unaligned address is the byte wanted, and numpy's casts are
    vectorised: 30 to 70 GB/s, against 4 for a copy with strides.
    """
    first, wide = item_bytes - 1 - plane, _UNSIGNED.get(item_bytes)
    if wide is None:
        out[:] = data[first::item_bytes]
    elif len(out):
        out[-1] = data[first - item_bytes]
        np.copyto(out[:-1], data[first : first - item_bytes].view(wide), casting="unsafe")


def _join(runs: list[Bytes], num_items: int, item_bytes: int) -> Bytes:
    """Elements from all their planes, most significant first, of which each run holds some."""
    planes = [run[start : start + num_items] for run in runs for start in range(0, len(run), num_items or 1)]
    if item_bytes in (2, 4):
        return _join_shifted(planes, num_items, item_bytes)
    items = np.empty((num_items, item_bytes), np.uint8)
    for plane, values in enumerate(planes):
        items[:, item_bytes - 1 - plane] = values
    return items.reshape(-1)


def _join_shifted(planes: list[Bytes], num_items: int, item_bytes: int) -> Bytes:
    """The same by shifts within the cache: 10 and 6 GB/s for 2 and 4 bytes, against 4 for a copy with strides."""
    items = np.empty(num_items, _UNSIGNED[item_bytes])
    wide = np.empty(min(num_items, _JOIN_ITEMS), items.dtype)
    for start in range(0, num_items, _JOIN_ITEMS):
        out = items[start : start + _JOIN_ITEMS]
        out[:] = planes[-1][start : start + _JOIN_ITEMS]
        shifted = wide[: len(out)]
        for place, plane in enumerate(planes[-2::-1], start=1):
            shifted[:] = plane[start : start + _JOIN_ITEMS]
            np.left_shift(shifted, 8 * place, out=shifted)
            np.bitwise_or(out, shifted, out=out)
    return items.view(np.uint8)


def _read_frames(source: memoryview, num_bytes: int) -> Bytes:
    """The content of zstd frames laid end to end, which must come to `num_bytes` in all.

    Each frame is measured and its declared content compared with what is still missing before anything is
    decompressed; zstd then checks the content against size and checksum.
    """
    frames = []
    position = total = 0
    while position < len(source):
        frame = _measure_frame(source[position:])
        total += frame.content_bytes
        if total > num_bytes:
            break
        frames.append(source[position : position + frame.frame_bytes])
        position += frame.frame_bytes
    _expect_bytes("zstd content", total, num_bytes)
    content = np.empty(num_bytes, np.uint8)
    decompress, position = zstandard.ZstdDecompressor().decompress, 0
    for frame_source in frames:
        try:
            piece = np.frombuffer(decompress(frame_source, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise CorruptError(f"zstd frame: {error}") from error
        content[position : position + len(piece)] = piece
        position += len(piece)
    _expect_bytes("zstd content", position, num_bytes)
    return content


class _Frame(NamedTuple):
    frame_bytes: int
    content_bytes: int


def _measure_frame(source: memoryview) -> _Frame:
    """The length of the frame at the front of `source`, found through its block headers (RFC 8878, 3.1.1)."""
    try:
        parameters = zstandard.get_frame_parameters(source)
        position = zstandard.frame_header_size(source)
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptError(f"zstd frame: {error}") from error
    if int.from_bytes(source[:4], "little") != _ZSTD_MAGIC or not parameters.has_checksum or parameters.dict_id:
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
    return _Frame(position + 4, parameters.content_size)


def _expect_bytes(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise CorruptError(f"{what} of {found} bytes: expected {expected}")
