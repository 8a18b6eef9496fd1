"""Owns the reading of shards without a footer: those that are being written, were left by a kill, or are damaged.

Their bytes after the first 8 are an IPC stream. Must never write: repairing is another tool's job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import CorruptError, RunError
from ..format.integrity import BatchHeader
from ..format.schema import LIGHT_COLUMNS, SCHEMA
from .files import ByteSource
from .messages import BATCH_MESSAGE, CONTINUATION, FIRST_MESSAGE, MAX_METADATA_BYTES, Block, block_at
from .shard import CheckedBatch, Layout, read_batch, read_layout

_SCAN_BYTES = 4 << 20
_MAX_CANDIDATES = 10_000
"""Places at which a batch is looked for behind damage; with `_MAX_REREADS` it bounds what hostile bytes can cost."""
_MAX_REREADS = 4
"""Bytes read in vain behind damage, in multiples of the file's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What could be read of a shard without its footer."""

    layout: Layout
    blocks: dict[int, Block]
    """Every batch whose light columns passed all checks, by number and in file order."""
    rows_of: dict[int, int]
    """Rows of each of them."""
    last_header: BatchHeader | None
    """Of the last of them, or of the seal."""
    num_trailing_bytes: int
    """Bytes behind the last whole batch that are no zeros and no batch: a write that was cut, or damage."""
    damage: list[str]
    """What was skipped in front of the last whole batch, one message each."""


def salvage(open_source: Callable[[], ByteSource]) -> Salvaged:
    """Read to the last whole batch whose light columns are as written, stepping over damage where a batch follows it.

    Raises:
        FileNotFoundError: it is gone.
    """
    with open_source() as source:
        walk = _Walk(source)
        walk.run()
    return Salvaged(
        layout=walk.layout,
        blocks=walk.blocks,
        rows_of=walk.rows_of,
        last_header=walk.last_header,
        num_trailing_bytes=walk.num_trailing_bytes,
        damage=walk.damage,
    )


class _Walk:
    """One way through the batches of a stream, from its beginning to the seal or to where nothing follows."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.layout = Layout(SCHEMA)
        self.blocks: dict[int, Block] = {}
        self.rows_of: dict[int, int] = {}
        self.last_header: BatchHeader | None = None
        self.damage: list[str] = []
        self.num_trailing_bytes = 0
        self._candidates_left = _MAX_CANDIDATES
        self._bytes_left = _MAX_REREADS * source.size_bytes

    def run(self) -> None:
        offset = FIRST_MESSAGE
        if self.source.size_bytes <= offset:
            return
        try:
            self.layout, block = read_layout(self.source)
            offset = block.end
        except RunError as error:
            following = self._next_batch(offset)  # the schema of this version may still fit: checksums will tell
            if following is None:
                self.num_trailing_bytes = 0 if self._is_zero_from(offset) else self.source.size_bytes - offset
                return
            self.damage.append(str(error))
            offset = following
        while not self._is_sealed and offset < self.source.size_bytes:
            try:
                offset = self._take(offset)
            except CorruptError as error:
                if self._is_zero_from(offset):
                    return
                following = self._next_batch(offset + 8)
                if following is None:
                    self.num_trailing_bytes = self.source.size_bytes - offset
                    return
                self.damage.append(f"{error}; {following - offset} bytes skipped")
                offset = following

    @property
    def _is_sealed(self) -> bool:
        return self.last_header is not None and self.last_header.is_seal

    def _take(self, offset: int) -> int:
        """Keep the batch at `offset` and return where the next one begins."""
        block, checked = self._read(offset)
        self.last_header = checked.header
        if not self._is_sealed:
            self.blocks[checked.header.number] = block
            self.rows_of[checked.header.number] = checked.batch.num_rows
        return block.end

    def _read(self, offset: int) -> tuple[Block, CheckedBatch]:
        found = block_at(self.source, offset)
        if found is None or found[1].kind != BATCH_MESSAGE:
            raise CorruptError(f"{self.source.where}: no batch begins at byte {offset}")
        checked = read_batch(self.source, found[0], self.layout, LIGHT_COLUMNS)
        if self.last_header is not None and checked.header.number <= self.last_header.number:
            raise CorruptError(f"{self.source.where}: batch {checked.header.number} follows {self.last_header.number}")
        return found[0], checked

    def _next_batch(self, offset: int) -> int | None:
        """Where the next whole batch begins at or behind `offset`."""
        for place in self._candidates(offset):
            self._candidates_left -= 1
            if self._candidates_left < 0 or self._bytes_left < 0:
                return None
            try:
                self._bytes_left -= self._read(place)[0].body_bytes
                return place
            except CorruptError:
                self._bytes_left -= _declared_bytes(self.source, place)
        return None

    def _candidates(self, offset: int) -> Iterator[int]:
        """Multiples of 8 at which a message could begin: the continuation mark and a possible length."""
        end = self.source.size_bytes - self.source.size_bytes % 8
        for start in range(offset + -offset % 8, end, _SCAN_BYTES):
            num_bytes = min(_SCAN_BYTES, end - start)
            words = np.frombuffer(self.source.read(start, num_bytes), "<u4").reshape(-1, 2)
            is_mark = (words[:, 0] == CONTINUATION) & (words[:, 1] > 0) & (words[:, 1] <= MAX_METADATA_BYTES)
            for index in np.flatnonzero(is_mark):
                yield start + 8 * int(index)

    def _is_zero_from(self, offset: int) -> bool:
        """Whether nothing but the zero tail of aligned writes follows."""
        for start in range(offset, self.source.size_bytes, _SCAN_BYTES):
            num_bytes = min(_SCAN_BYTES, self.source.size_bytes - start)
            if np.frombuffer(self.source.read(start, num_bytes), np.uint8).any():
                return False
        return True


def _declared_bytes(source: ByteSource, offset: int) -> int:
    try:
        found = block_at(source, offset)
    except CorruptError:
        return 0
    return found[0].body_bytes if found else 0
