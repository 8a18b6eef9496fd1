"""Encodes and decodes payloads (the bytes of tensors), and chooses the encoding for each payload.

Encodings are defined in `encodings`. Nothing here knows dtypes, rows or files. Speeds on one core with float32
activations: byte planes are split at 9 to 16 GB/s, and zstd compresses the top plane at 1.1 GB/s. The compiled Huffman
code is twice as fast as zstd, because it writes frames of the same format without a search for matches.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..columns import PLAIN
from ..errors import CorruptError, UnsupportedError
from ..native import Kernels
from .encodings import ENCODING_OF, PLANES, PLANES_PLAIN, RAW, Bytes, PayloadWriter, encoding_of

CODECS = ("auto", "none", "zstd")

_MIN_BYTES = 16384
"""Payloads below this size are stored uncompressed. At 4 KiB, byte planes cost 22 us a row and save only 7 %."""
_SAMPLE_SLICES, _SAMPLE_ITEMS = 8, 256
_PAYS = 0.92
"""A payload is compressed if a sample shrinks below this fraction. Compression takes over 8 % of a write's time."""
_MATCHES_PAY = 1.05
"""zstd is chosen only if it compresses better by this factor than the Huffman code, which is at least twice as fast."""
_SAMPLED_EACH = 16
"""One in this many payloads of a kind is sampled (25 us). If the compression changes by `_ALIKE`, so is the next."""
_ALIKE = 0.04
_MAX_KINDS = 1 << 16


def max_encoded_bytes(nbytes: int) -> int:
    """Return how many bytes `out` of `Encoder.encode` needs for `nbytes` of data. `encode` never writes more."""
    return nbytes + nbytes // 128 + 4096


@dataclass(slots=True)
class _Known:
    choice: tuple[str, Kernels | None]
    share: float
    """The encoded size of the sampled payload as a fraction of the payload's size."""
    num_left: int = _SAMPLED_EACH - 1


class Encoder:
    """Compresses payloads. Not thread-safe, because it owns the zstd context and 1 MiB of scratch."""

    def __init__(self, codec: str = "auto", level: int = 1, kernels: Kernels | None = None) -> None:
        if codec not in CODECS:
            raise ValueError(f"codec {codec!r}: expected one of {CODECS}")
        self._codec = codec
        self._min_bytes: float = {"auto": _MIN_BYTES, "zstd": 1}.get(codec, math.inf)
        self.kernels = kernels
        self._huffman = kernels if codec == "auto" and level == 1 else None
        self._writer = PayloadWriter(level, kernels)
        self._known: dict[tuple[Hashable, int], _Known] = {}
        self.is_hurried = False
        """Set to True while training needs the cores. Payloads are then stored uncompressed."""
        self.has_rested = False
        """True once a payload that is large enough to be compressed was stored uncompressed because of `is_hurried`."""

    def encode(self, data: Bytes, item_bytes: int, out: Bytes, kind: Hashable = None) -> tuple[str, int]:
        """Write the payload of `data` to the front of `out`.

        Args:
            data: the tensor's little-endian C-order bytes, contiguous, a multiple of `item_bytes` long.
            item_bytes: bytes of one element.
            out: at least `max_encoded_bytes(len(data))` long, or as long as `data` if the payload is stored as it is;
                the bytes behind the payload are undefined.
            kind: the source of `data`; payloads of one kind are similar, so only some of them are sampled.

        Returns:
            The encoding, and the number of bytes of `out` that the payload takes.
        """
        num_bytes = len(data)
        is_small = num_bytes < self._min_bytes
        is_stored = is_small or self.is_hurried
        if len(out) < (needed := num_bytes if is_stored else max_encoded_bytes(num_bytes)):
            raise ValueError(f"out holds {len(out)} bytes, {needed} may be needed")
        if is_stored:
            self.has_rested |= not is_small
            return PLAIN, self._writer.copy(data, out)
        known = None if kind is None else self._known.get((kind, item_bytes))
        encoding, huffman = self._choose(data, item_bytes) if known is None else known.choice
        write = ENCODING_OF[encoding].write
        assert write is not None, encoding
        num_written = write(self._writer, data, item_bytes, out, huffman)
        if num_written > num_bytes:
            encoding, num_written = PLAIN, self._writer.copy(data, out)
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

    def _choose(self, data: Bytes, item_bytes: int) -> tuple[str, Kernels | None]:
        """Return the encoding, and the compiled loops if they compress. None instead of the loops means zstd.

        The Huffman code is assumed to take at least one bit per byte, because a plane that is constant in the sample
        may vary elsewhere.
        """
        if self._codec == "zstd":
            return PLANES if item_bytes > 1 else RAW, None
        planes, top_without_matches = self._sample_planes(data, item_bytes)
        top = len(self._writer.compress(planes[0]))
        if item_bytes > 1:
            rest = len(self._writer.compress(planes[1:]))
            if rest < _PAYS * planes[1:].size:
                raw = len(self._writer.compress(planes[::-1].T.copy()))
                if self._huffman is not None:
                    frames = self._writer.scratch[planes.size :]
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
        """Return a sample's byte planes, which the next call overwrites, and plane 0's rough Huffman-coded size."""
        if self.kernels is None:
            return _sample(data, item_bytes).T[::-1].copy(), 0
        scratch = self._writer.scratch
        num_items, num_bytes = self.kernels.sample(data, item_bytes, _SAMPLE_SLICES, _SAMPLE_ITEMS, scratch)
        return scratch[: num_items * item_bytes].reshape(item_bytes, num_items), num_bytes


def decode(encoding: str, payload: Any, payload_bytes: int, item_bytes: int) -> Bytes:
    """Decode a payload, and return the tensor's bytes in new, writable memory.

    `payload` is any contiguous buffer, and `payload_bytes` is the size of the result. Memory is allocated only after
    the sizes in the payload agree with `payload_bytes`. Raises CorruptError if the sizes disagree, and UnsupportedError
    for an unknown encoding and for a reference, which names another row instead of containing a tensor's bytes.
    """
    source, read = memoryview(payload).cast("B"), encoding_of(encoding).read
    if read is None:
        raise UnsupportedError(f"payload encoding {encoding!r} names another row, whose payload is to be decoded")
    if payload_bytes < 0 or payload_bytes % item_bytes:
        raise CorruptError(f"payload of {payload_bytes} bytes: expected a multiple of {item_bytes}")
    return read(source, payload_bytes, item_bytes)


def check_size(encoding: str, payload: Any, payload_bytes: int, item_bytes: int) -> None:
    """Raise as `decode` does unless the payload's headers agree with `payload_bytes`. Decodes nothing."""
    encoding_of(encoding).check(memoryview(payload).cast("B"), payload_bytes, item_bytes)


class EncodedPayload(NamedTuple):
    """An encoded payload: the columns `encoding`, `data` (any contiguous buffer) and `payload_bytes` of a row."""

    encoding: str
    data: Any
    payload_bytes: int


def concatenate(payloads: Sequence[EncodedPayload], item_bytes: int) -> tuple[str, list[memoryview]] | None:
    """Join payloads end to end without decoding them.

    Return the encoding and the pieces of ``data`` in order. Return None if the payloads have different encodings, or an
    encoding whose payloads cannot be joined.
    """
    sources = [(memoryview(p.data).cast("B"), p.payload_bytes) for p in payloads if p.payload_bytes]
    encodings = {payload.encoding for payload in payloads if payload.payload_bytes} or {PLAIN}
    encoding = min(encodings)
    known = ENCODING_OF.get(encoding)
    if len(encodings) != 1 or known is None or known.join is None:
        return None
    return encoding, [sources[0][0]] if len(sources) == 1 else known.join(sources, item_bytes)


def _sample(data: Bytes, item_bytes: int) -> Bytes:
    """Return evenly spaced slices of the data as an array of shape (elements, item_bytes)."""
    items = data.reshape(-1, item_bytes)
    if len(items) <= _SAMPLE_SLICES * _SAMPLE_ITEMS:
        return items
    starts = [i * (len(items) - _SAMPLE_ITEMS) // (_SAMPLE_SLICES - 1) for i in range(_SAMPLE_SLICES)]
    return np.concatenate([items[start : start + _SAMPLE_ITEMS] for start in starts])
