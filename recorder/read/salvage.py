"""The reading of shards without a footer: those that are being written, were left by a kill, or are damaged.

Their bytes after the first 8 are an IPC stream. Must never write: repairing is another tool's job.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..columns import METADATA_COLUMNS, SCHEMA, SCHEMAS
from ..errors import CorruptError, RunError
from ..format.integrity import BatchHeader, read_header
from ..storage.untrusted_files import ByteSource
from .messages import (
    BATCH_MESSAGE,
    CONTINUATION,
    FIRST_MESSAGE,
    MAX_METADATA_BYTES,
    PREFIX_BYTES,
    MessageBlock,
    block_at,
    padding_of,
    parse_message,
)
from .shard import CheckedBatch, Layout, read_batch, read_layout

_SCAN_BYTES = 4 << 20
_MAX_CANDIDATES = 10_000
"""Offsets at which a batch is looked for behind damage; with `_MAX_REREADS` it bounds what hostile bytes can cost."""
_MAX_REREADS = 4
"""How many bytes may be read in vain behind damage, as a multiple of the file's bytes on the disk."""
_MAX_PADDING_BYTES = 64
"""Some writers pad the metadata of a message to a multiple of this."""
_AGAIN_S = 0.01
"""For so long a reader may see half a batch, while the kernel drops the cached page that a direct write replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What could be read of a shard without its footer."""

    layout: Layout
    blocks: dict[int, MessageBlock]
    """Every batch whose metadata columns passed all checks, by number and in file order."""
    rows_of: dict[int, int]
    """Rows of each of them."""
    last_header: BatchHeader | None
    """The header of the last batch, or of the seal."""
    num_trailing_bytes: int
    """Bytes behind the last whole batch that are no zeros and no batch: a write that was cut, or `tail_damage`."""
    damage: list[str]
    """A message for each stretch of bytes that was skipped in front of the last whole batch."""
    tail_damage: str
    """Why the trailing bytes are no write that was cut; empty where they are. Of a writer at work they may be both."""
    end: int
    """Where the last whole batch ends; 0 where nothing was read, not even the schema."""

    @property
    def is_sealed(self) -> bool:
        return self.last_header is not None and self.last_header.is_seal


def salvage(
    open_source: Callable[[], ByteSource], after: Salvaged | None = None, max_batches: int | None = None
) -> Salvaged:
    """Read up to the last whole batch whose metadata columns are as written, past damage that a batch follows.

    Args:
        open_source: opens the file.
        after: what was read of the file before; only batches behind that are read, and are in the answer.
        max_batches: stop behind so many.

    Raises:
        FileNotFoundError: it is gone.
    """
    with open_source() as source:
        walk = _Walk(source, max_batches)
        walk.run(after)
    return Salvaged(
        layout=walk.layout,
        blocks=walk.blocks,
        rows_of=walk.rows_of,
        last_header=walk.last_header,
        num_trailing_bytes=walk.num_trailing_bytes,
        damage=walk.damage,
        tail_damage=walk.tail_damage,
        end=walk.end,
    )


class _Walk:
    """One way through the batches of a stream, from its beginning to the seal or to where nothing follows."""

    def __init__(self, source: ByteSource, max_batches: int | None) -> None:
        self.source = source
        self.end = 0
        self.layout = Layout(SCHEMA)
        self.blocks: dict[int, MessageBlock] = {}
        self.rows_of: dict[int, int] = {}
        self.last_header: BatchHeader | None = None
        self.damage: list[str] = []
        self.num_trailing_bytes = 0
        self.tail_damage = ""
        self._max_batches = max_batches
        self._candidates_left = _MAX_CANDIDATES
        self._bytes_left = _MAX_REREADS * sum(map(len, source.data_ranges(0)))

    def run(self, after: Salvaged | None = None) -> None:
        if after is not None and after.end:
            self.layout, self.last_header, self.end = after.layout, after.last_header, after.end
        elif not self._read_schema():
            return
        offset, looked_again_at = self.end, -1
        while not self._is_sealed and not self._is_enough and offset < self.source.size_bytes:
            try:
                self.end = offset = self._take(offset)
            except CorruptError as error:
                if self._is_zero_from(offset):
                    return
                following = self._next_batch(offset + 8)
                if following is None and not is_cut_write(self.source, offset) and looked_again_at != offset:
                    looked_again_at = offset
                    time.sleep(_AGAIN_S)
                    continue
                if following is None:
                    self._end_at(offset, error)
                    return
                self.damage.append(f"{error}; {following - offset} bytes skipped")
                offset = following

    def _read_schema(self) -> bool:
        """Find the schema, or the first batch where that is damaged; False where nothing follows."""
        offset = FIRST_MESSAGE
        if self.source.size_bytes <= offset:
            return False
        try:
            self.layout, block = read_layout(self.source)
            self.end = block.end
        except RunError as error:
            following = None
            for schema in SCHEMAS:  # that of this or an earlier version may still fit: checksums will tell
                self.layout = Layout(schema)
                if (following := self._next_batch(offset)) is not None:
                    break
            if following is None:
                if not self._is_zero_from(offset):
                    self._end_at(offset, error)
                return False
            self.damage.append(str(error))
            self.end = following
        return True

    def _end_at(self, offset: int, error: RunError) -> None:
        """Nothing but what stands at `offset` follows, and that is no batch."""
        self.num_trailing_bytes = self.source.size_bytes - offset
        if not is_cut_write(self.source, offset):
            self.tail_damage = f"{error}; no batch follows, and these {self.num_trailing_bytes} bytes are no cut write"

    @property
    def _is_sealed(self) -> bool:
        return self.last_header is not None and self.last_header.is_seal

    @property
    def _is_enough(self) -> bool:
        return self._max_batches is not None and len(self.blocks) >= self._max_batches

    def _take(self, offset: int) -> int:
        """Keep the batch at `offset` and return where the next one begins."""
        block, checked = self._read(offset)
        self.last_header = checked.header
        if not self._is_sealed:
            self.blocks[checked.header.number] = block
            self.rows_of[checked.header.number] = checked.batch.num_rows
        return block.end

    def _read(self, offset: int) -> tuple[MessageBlock, CheckedBatch]:
        message = block_at(self.source, offset)
        if message is None or message[1].kind != BATCH_MESSAGE:
            raise CorruptError(f"{self.source.where}: no batch begins at byte {offset}")
        checked = read_batch(self.source, message[0], self.layout, METADATA_COLUMNS)
        if self.last_header is not None and checked.header.number <= self.last_header.number:
            raise CorruptError(f"{self.source.where}: batch {checked.header.number} follows {self.last_header.number}")
        return message[0], checked

    def _next_batch(self, offset: int) -> int | None:
        """Where the next whole batch begins at or behind `offset`."""
        for candidate in self._candidates(offset):
            self._candidates_left -= 1
            if self._candidates_left < 0 or self._bytes_left < 0:
                return None
            try:
                self._bytes_left -= self._read(candidate)[0].body_bytes
                return candidate
            except CorruptError:
                self._bytes_left -= _declared_bytes(self.source, candidate)
        return None

    def _candidates(self, offset: int) -> Iterator[int]:
        """Multiples of 8 at which a message could begin: the continuation mark and a possible length."""
        for start, num_bytes in self._pieces(offset + -offset % 8):
            num_bytes -= num_bytes % 8
            words = np.frombuffer(self.source.read(start, num_bytes), "<u4").reshape(-1, 2)
            is_mark = (words[:, 0] == CONTINUATION) & (words[:, 1] > 0) & (words[:, 1] <= MAX_METADATA_BYTES)
            for index in np.flatnonzero(is_mark):
                yield start + 8 * int(index)

    def _is_zero_from(self, offset: int) -> bool:
        """Whether nothing but the zero tail of aligned writes follows."""
        pieces = self._pieces(offset)
        return not any(np.frombuffer(self.source.read(*piece), np.uint8).any() for piece in pieces)

    def _pieces(self, offset: int) -> Iterator[tuple[int, int]]:
        """Offset and size of pieces of what is on the disk from `offset` on, which is a multiple of 8 or the start."""
        for extent in self.source.data_ranges(offset):
            for start in range(extent.start, extent.stop, _SCAN_BYTES):
                yield start, min(_SCAN_BYTES, extent.stop - start)


def is_cut_write(source: ByteSource, offset: int) -> bool:
    """Whether the file ends inside the message that begins at `offset`, and what is there of it is sound."""
    rest_bytes: int = source.size_bytes - offset
    prefix = bytes(source.read(offset, min(PREFIX_BYTES, rest_bytes)))
    if rest_bytes < PREFIX_BYTES:
        return prefix[:4] == struct.pack("<I", CONTINUATION)[: len(prefix)]
    mark, metadata_bytes = map(int, struct.unpack("<II", prefix))
    if mark != CONTINUATION or metadata_bytes > MAX_METADATA_BYTES:
        return False
    held_bytes = min(metadata_bytes, rest_bytes - PREFIX_BYTES)
    metadata = source.read(offset + PREFIX_BYTES, held_bytes)
    try:
        message = parse_message(metadata, source.where)
        if message.kind != BATCH_MESSAGE:
            return held_bytes < metadata_bytes
        read_header(message.custom_metadata, source.where)
    except CorruptError:
        return held_bytes < metadata_bytes
    # All that the metadata says is there. A length that says more was not cut, it is damaged.
    padding = padding_of(metadata)
    last = max((start + size for start, size in message.buffers), default=0)
    is_sound = not any(padding) and metadata_bytes - (held_bytes - len(padding)) < _MAX_PADDING_BYTES
    is_sound = is_sound and message.body_bytes == last + -last % 8
    return is_sound and PREFIX_BYTES + metadata_bytes + message.body_bytes > rest_bytes


def _declared_bytes(source: ByteSource, offset: int) -> int:
    try:
        message = block_at(source, offset)
    except CorruptError:
        return 0
    return message[0].body_bytes if message else 0
