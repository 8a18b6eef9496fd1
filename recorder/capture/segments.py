"""Memory of the pool for payloads that are encoded in the hook: end to end, as a batch will hold them.

Any thread may let go of a piece or a segment; one thread at a time makes them.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from .pool import GRAIN_BYTES, Pool

_LARGEST_BYTES = 32 << 20
"""Where hooks encode, training misses what the writer does, and most of that is done for a batch, not for a byte."""
_LARGE_BYTES = 8 << 20
"""What a batch that copies holds: where shards are small, too."""
_BATCHES_PER_QUOTA = 43
"""Small quotas have small batches: a shard is an eighth of what tensors may take, three quarters, and has four."""
_SPARE_BYTES = 8 << 20
"""Room for the last payload of a segment, unless that or the pool is small."""
_MAX_PIECES = 4096
"""Rows of a batch at most."""
_SHARE_OF_POOL = 8
_PAGE_BYTES = 4096
"""A direct write begins at a multiple of this in memory."""


class Segment:
    """Payloads end to end. The memory goes back to the pool when no piece and no batch refers to the segment."""

    __slots__ = (
        "__del__",
        "__weakref__",
        "_places",
        "_pool",
        "address",
        "data",
        "end",
        "is_closed",
        "max_bytes",
        "num_pieces",
    )

    def __init__(self, pool: Pool, max_bytes: int) -> None:
        """Without memory."""
        self._pool = pool
        self.max_bytes = max_bytes
        """With so much in it, it takes no more, and the batch that borrows it is written."""
        self._places: list[tuple[int, int]] = []
        """Of the memory in the pool."""
        # One of its own, in C: what a signal's handler raises in one of Python's is swallowed, Ctrl-C among that.
        self.__del__ = pool.way_back(self._places)
        self.end = 0
        """Of the last payload."""
        self.num_pieces = 0
        self.is_closed = False
        """Set by the writer once it has written what it had of it: what would follow had to be copied."""

    def take(self, nbytes: int) -> bool:
        """Get memory for so many bytes; False where the pool has no room. An interrupt loses none."""
        block = self._pool.take(nbytes + _PAGE_BYTES)
        if block is None:
            return False
        self._places.append((block.offset, block.size))
        address = self._pool.address + block.offset
        start = -address % _PAGE_BYTES
        self.address = address + start
        self.data: npt.NDArray[np.uint8] = block.data[start:]
        """From a page on."""
        return True

    def end_here(self) -> None:
        """No payload will be added; the rest of the memory goes back, but for a grain a piece, as of other records."""
        ((offset, size),) = self._places
        used_bytes = max(self.address - self._pool.address - offset + self.end, self.num_pieces * GRAIN_BYTES)
        kept = -(-used_bytes // GRAIN_BYTES) * GRAIN_BYTES
        if kept < size:
            rest = self._pool.way_back([(offset + kept, size - kept)])
            self._places[0] = offset, kept  # no call from here to the next line, so no interrupt
            rest()

    def takes(self, nbytes: int) -> bool:
        """Whether one more payload may be put here, of so many bytes at most."""
        return (
            not self.is_closed
            and self.end < self.max_bytes
            and self.num_pieces < min(_MAX_PIECES, max(1, len(self.data) // GRAIN_BYTES))
            and self.end + nbytes <= len(self.data)
        )

    def add(self, num_bytes: int, encoding: str, payload_bytes: int, crc: int | None = None) -> Piece:
        """What was laid out at `end` is a payload."""
        start = self.end
        self.end = stop = start + num_bytes
        self.num_pieces += 1
        return Piece(self, start, stop, encoding, payload_bytes, crc)


class Piece:
    """One payload in a segment."""

    __slots__ = ("crc", "encoding", "payload_bytes", "segment", "start", "stop")

    def __init__(
        self, segment: Segment, start: int, stop: int, encoding: str, payload_bytes: int, crc: int | None
    ) -> None:
        self.segment: Segment | None = segment
        """None once it is released."""
        self.start = start
        self.stop = stop
        self.encoding = encoding
        self.payload_bytes = payload_bytes
        """Before it was encoded."""
        self.crc = crc
        """CRC32C of the encoded bytes, where it is known."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The encoded bytes."""
        assert self.segment is not None, "a piece that was released has no bytes"
        return self.segment.data[self.start : self.stop]

    def release(self) -> None:
        """Let go of the segment."""
        self.segment = None


def segment_bytes(max_bytes: int, shard_bytes: int) -> int:
    """What segments hold where the rank may take `max_bytes` of the disk, and shards end at `shard_bytes`."""
    return min(_LARGEST_BYTES, max_bytes // _BATCHES_PER_QUOTA, max(_LARGE_BYTES, shard_bytes // 4))


class Segments:
    """The segment that takes payloads now; it is only known while somebody uses it."""

    def __init__(self, pool: Pool, max_bytes: int = _LARGEST_BYTES) -> None:
        """Of so many bytes each, fewer in a small pool."""
        self._pool = pool
        self._room_bytes = min(max_bytes + _SPARE_BYTES, pool.capacity_bytes // _SHARE_OF_POOL)
        self._max_bytes = min(max_bytes, self._room_bytes * 4 // 5)
        self._now: weakref.ref[Segment] | None = None

    def with_room(self, nbytes: int) -> Segment | None:
        """A segment that takes a payload of at most `nbytes`; None where the pool has no room for one."""
        segment = None if self._now is None else self._now()
        if segment is None or not segment.takes(nbytes):
            self._now = None  # first: after an interrupt nothing may be put where the rest was
            if segment is not None:
                segment.end_here()
            segment = Segment(self._pool, self._max_bytes)
            if not segment.take(max(self._room_bytes, nbytes)):
                return None
            self._now = weakref.ref(segment)
        return segment
