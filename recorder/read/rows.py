"""Owns the light rows of one shard (everything but payloads) and the way from a row to its batch.

They come from the index where it fits the shard, else from the shard itself. Must never answer a column unchecked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import CorruptError, NotARunError, RunError, UnsupportedError
from ..format.integrity import BatchHeader
from ..format.rundir import index_name, open_name
from ..format.schema import LIGHT_COLUMNS, SCHEMA
from .files import ByteSource, GrowingFile, MappedFile
from .salvage import Salvaged, salvage
from .shard import CheckedBatch, Shard, open_sealed

logger = logging.getLogger(__name__)

PLACE_FIELDS = (pa.field("batch", pa.int32(), nullable=False), pa.field("row", pa.int32(), nullable=False))
"""Columns of an index behind the light ones: number of the batch in the shard, and of the row in the batch."""
INDEX_COLUMNS = (*LIGHT_COLUMNS, *(field.name for field in PLACE_FIELDS))
SHARD_BYTES_KEY = b"recorder_shard_bytes"
_TABLE_SCHEMA = pa.schema([*(SCHEMA.field(name) for name in LIGHT_COLUMNS), *PLACE_FIELDS])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a shard was found."""

    is_sealed: bool
    is_indexed: bool
    size_bytes: int
    num_trailing_bytes: int
    """Bytes behind the last whole batch of a shard that is not sealed; zeros not counted."""
    damage: tuple[str, ...]
    """What could not be read, and so is missing from the rows."""


class ShardRows:
    """The light rows of one shard, in file order."""

    def __init__(
        self,
        path: Path,
        state: State,
        open_shard: Callable[[], Shard],
        num_rows: int,
        *,
        index: Shard | None = None,
        table: Any = None,
        last_header: BatchHeader | None = None,
    ) -> None:
        self.path = path
        self.state = state
        self.num_rows = num_rows
        self._open_shard = open_shard
        self._index = index
        self._table = table
        self._last_header = last_header

    @cached_property
    def shard(self) -> Shard:
        """The batches themselves.

        Raises:
            NotARunError: the shard went, by its writer's retention, after the run was opened.
        """
        try:
            return self._open_shard()
        except FileNotFoundError:
            raise NotARunError(f"{self.path}: is gone (retired) since the run was opened; open it again") from None

    def column(self, name: str) -> list[Any]:
        """One light column (or `batch` or `row`) as checked Arrow arrays."""
        if self._table is None:
            assert self._index is not None
            try:
                return [self._index.read(number, (name,)).batch.column(0) for number in self._index.blocks]
            except CorruptError as error:
                logger.warning("%s; its rows are read from the shard instead", error)
                self._table = self._rebuild()
        return list(self._table.column(name).chunks)

    def last_ledger(self) -> dict[str, Any]:
        """The writer's accounts at the end of this shard; empty where there is none."""
        if self._last_header is None and self.state.is_sealed:
            try:
                self._last_header = open_sealed(self.path)[1]
            except (RunError, FileNotFoundError):
                return {}
        return self._last_header.ledger if self._last_header else {}

    def _rebuild(self) -> Any:
        """The rows from the shard where its index turned out to be damaged: all of them, or none."""
        shard = self.shard
        table = _table([shard.read(number, LIGHT_COLUMNS) for number in shard.blocks])
        if table.num_rows != self.num_rows:
            raise CorruptError(f"{self.path}: has {table.num_rows} rows, its index {self.num_rows}")
        return table


def load_sealed(path: Path) -> ShardRows:
    """The rows of a sealed shard. FileNotFoundError: it is gone."""
    size_bytes = path.stat(follow_symlinks=False).st_size

    def open_shard() -> Shard:
        try:
            return open_sealed(path)[0]
        except CorruptError as error:
            logger.warning("%s; what can be salvaged is read", error)
            return salvage(lambda: MappedFile(path)).shard

    state = State(is_sealed=True, is_indexed=True, size_bytes=size_bytes, num_trailing_bytes=0, damage=())
    indexed = _open_index(path, size_bytes)
    if indexed is not None:
        index, num_rows = indexed
        return ShardRows(path, state, open_shard, num_rows, index=index)
    batches, damage = _read_all(path)
    state = State(is_sealed=True, is_indexed=False, size_bytes=size_bytes, num_trailing_bytes=0, damage=damage)
    table = _table(batches)
    return ShardRows(path, state, open_shard, table.num_rows, table=table)


def load_open(path: Path) -> ShardRows:
    """The rows of a shard `path` (its final name) that is still open. FileNotFoundError: it is not, or not any more."""
    open_path = path.with_name(open_name(path.name))

    def open_source() -> ByteSource:
        try:
            return GrowingFile(open_path)
        except FileNotFoundError:
            return GrowingFile(path)  # sealed since: the batches stand where they stood

    found: Salvaged = salvage(lambda: GrowingFile(open_path))
    shard = Shard(open_source, found.shard.schema, found.shard.blocks)
    state = State(
        is_sealed=False,
        is_indexed=False,
        size_bytes=_size_bytes(open_path, path),
        num_trailing_bytes=found.num_trailing_bytes,
        damage=found.damage,
    )
    last = found.seal or (found.batches[-1] if found.batches else None)
    last_header = last.header if last else None
    table = _table(found.batches)
    return ShardRows(open_path, state, lambda: shard, table.num_rows, table=table, last_header=last_header)


def _open_index(shard: Path, shard_bytes: int) -> tuple[Shard, int] | None:
    """The index of a sealed shard and its number of rows; None where it is missing, damaged or of another file."""
    path = shard.with_name(index_name(shard.name))
    try:
        index = open_sealed(path, extra=PLACE_FIELDS, without=("data",))[0]
        num_rows = sum(index.read(number, ()).batch.num_rows for number in index.blocks)
    except FileNotFoundError:
        return None
    except RunError as error:
        logger.warning("%s; the rows are read from the shard instead", error)
        return None
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % shard_bytes:
        logger.warning("%s: belongs to another file; the rows are read from the shard instead", path)
        return None
    return index, num_rows


def _read_all(path: Path) -> tuple[list[CheckedBatch], tuple[str, ...]]:
    """Light columns of a sealed shard without its index, and what of it is damaged."""
    try:
        shard = open_sealed(path)[0]
    except UnsupportedError as error:
        return [], (str(error),)
    except CorruptError as error:
        found = salvage(lambda: MappedFile(path))
        return found.batches, (str(error), *found.damage)
    batches, damage = [], []
    for number in shard.blocks:
        try:
            batches.append(shard.read(number, LIGHT_COLUMNS))
        except CorruptError as error:
            damage.append(str(error))
    return batches, tuple(damage)


def _table(batches: Sequence[CheckedBatch]) -> Any:
    """Light rows with the place of each."""
    tables = [_TABLE_SCHEMA.empty_table()]
    for batch, header in batches:
        numbers = np.full(batch.num_rows, header.number, np.int32)
        places = [pa.array(numbers), pa.array(np.arange(batch.num_rows, dtype=np.int32))]
        light = batch.select(list(LIGHT_COLUMNS)).columns
        tables.append(pa.Table.from_arrays([*light, *places], schema=_TABLE_SCHEMA))
    return pa.concat_tables(tables).combine_chunks()


def _size_bytes(*paths: Path) -> int:
    for path in paths:
        try:
            return path.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return 0
