"""The metadata rows of a whole run as columns, gathered from the shards on first use; and the sizes of its steps.

A row is known by its position: shards in the order of their writers, rows in file order. No Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import SCHEMA, TIME_ORDER
from .shard_rows import Ranges, ShardRows, Steps, each_of
from .writers import RecordedWriter

Positions = npt.NDArray[np.int64]
NONE = -1
"""Stands for null in columns of counts, none of which is negative."""
_FEW_CHUNKS = 64
POSITION_COLUMNS = ("seq", "batch", "row")
"""What leads from a row to its payload."""
TEXT_COLUMNS = frozenset(field.name for field in SCHEMA if pa.types.is_string(field.type))


class Keys(NamedTuple):
    """A column as numbers that are equal where the values are."""

    codes: npt.NDArray[np.int64]
    """`NONE` for null."""
    texts: list[str] | None
    """What the codes stand for in a column of texts; None where they are the values."""

    def code(self, value: Any) -> int:
        """Return the code of a value; a code that no row has where the value does not occur."""
        if value is None:
            return NONE
        if self.texts is None:
            return int(value)
        return self.texts.index(value) if value in self.texts else NONE - 1

    def text(self, i: int) -> str:
        """The text of the i-th row; empty for null."""
        code = int(self.codes[i])
        return "" if code == NONE or self.texts is None else self.texts[code]

    def label(self, code: int) -> str:
        """A value for people, by its number."""
        if code == NONE:
            return "None"
        return str(code) if self.texts is None else repr(self.texts[code])


class MetadataRows:
    """Every column but the payload, over all shards of a run."""

    def __init__(self, writers: Sequence[RecordedWriter], steps: Steps | Ranges | None = None) -> None:
        """Rows of a run.

        Args:
            writers: all of them.
            steps: the batches with rows of these alone; all by default.
        """
        self._steps = steps
        self._shards_of = [writer.shards for writer in writers]
        self._shards = [shard for shards in self._shards_of for shard in shards]
        self._forget()

    def _forget(self) -> None:
        num_rows = [[shard.num_rows_of(self._steps) for shard in shards] for shards in self._shards_of]
        self._starts = np.cumsum([0, *(rows for of_writer in num_rows for rows in of_writer)])
        self._writer_starts = np.cumsum([0, *map(sum, num_rows)])
        self._columns: dict[str, Any] = {}
        self._chunk_ends: dict[str, Positions] = {}
        self._numbers: dict[str, npt.NDArray[np.int64]] = {}
        self._module_paths: Keys | None = None

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    def load(self, names: Iterable[str]) -> None:
        """Read and check columns. To be called for all that a question needs, before its first position is computed.

        A damaged batch goes, in all columns, once one of them shows it: then positions move, and all is read again.
        """
        names = list(dict.fromkeys(names))
        while missing := [name for name in names if name not in self._columns]:
            batches_by_shard = each_of(self._shards, lambda shard: shard.columns(missing, self._steps))
            batches = [batch for of_shard in batches_by_shard for batch in of_shard]
            for name in missing:
                kind = SCHEMA.field(name).type if name in SCHEMA.names else pa.int32()
                self._columns[name] = pa.chunked_array([batch.column(name) for batch in batches], kind)
                self._chunk_ends[name] = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)
            if sum(shard.num_rows_of(self._steps) for shard in self._shards) != self.num_rows:
                self._forget()

    def column(self, name: str) -> Any:
        """A loaded column as `pa.ChunkedArray`."""
        return self._columns[name]

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """An integer column as numpy."""
        if name not in self._numbers:
            column = self._columns[name]
            filled = column.fill_null(NONE) if column.null_count else column
            self._numbers[name] = filled.to_numpy().astype(np.int64, copy=False)
        return self._numbers[name]

    def module_paths(self) -> Keys:
        """The module path of every row; other texts are looked at only for the rows of one module."""
        if self._module_paths is None:
            self._module_paths = text_keys(self._columns["module_path"])
        return self._module_paths

    def take(self, name: str, positions: Positions) -> Any:
        """Some rows of a metadata column, as `pa.ChunkedArray`."""
        column = self._columns[name]
        if (positions[1:] < positions[:-1]).any():
            return pc.take(column, pa.array(positions))
        if len(positions) == len(column) and (positions[1:] > positions[:-1]).all():
            # One writer's rows in file order are in the order of time. A copy: a mapped file may change later.
            return pa.chunked_array([pa.concat_arrays([chunk, chunk[:0]]) for chunk in column.chunks], column.type)
        ends = self._chunk_ends[name]
        chunk_numbers = np.searchsorted(ends, positions, side="right")
        used = np.flatnonzero(np.bincount(chunk_numbers))  # numpy 2.4's `unique` hashes: 7 ms for 200,000
        if len(used) > _FEW_CHUNKS:
            return pc.take(column, pa.array(positions))
        # Arrow joins all chunks of a column before it takes a row of it: 0.2 ms for a short text of a million rows.
        starts = [0, *ends]
        pieces = [column.chunk(n).take(pa.array(positions[chunk_numbers == n] - starts[n])) for n in used.tolist()]
        return pa.chunked_array(pieces, column.type)

    def keys(self, name: str, positions: Positions) -> Keys:
        """Some rows of a column of texts or whole numbers."""
        if name in TEXT_COLUMNS:
            return text_keys(self.take(name, positions))
        return Keys(self.numbers(name)[positions], None)

    def text(self, name: str, position: int) -> str | None:
        """One value of a column of texts."""
        chunk = int(np.searchsorted(self._chunk_ends[name], position, side="right"))
        start = int(self._chunk_ends[name][chunk - 1]) if chunk else 0
        value: str | None = self._columns[name].chunk(chunk)[position - start].as_py()
        return value

    def shard_of(self, position: int) -> tuple[ShardRows, int]:
        """The shard of a row, and the position of its first row."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._shards[number], int(self._starts[number])

    def shard_numbers(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Which shard each row is of; equal numbers mean one shard."""
        return np.searchsorted(self._starts, positions, side="right") - 1

    def writer_numbers(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Which writer each row is of, as index into the writers."""
        return np.searchsorted(self._writer_starts, positions, side="right") - 1

    def in_order(self) -> Positions:
        """All positions by `TIME_ORDER`: file order is no order of time."""
        keys = [self.numbers(name) for name in reversed(TIME_ORDER)]
        return np.lexsort(keys).astype(np.int64, copy=False)


def text_keys(column: Any) -> Keys:
    """A column of texts (`pa.ChunkedArray`) as numbers that are equal where the texts are."""
    encoded = column.dictionary_encode().unify_dictionaries()
    texts = encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else []
    codes = [chunk.indices.fill_null(NONE).to_numpy(zero_copy_only=False) for chunk in encoded.chunks]
    return Keys(np.concatenate([*codes, np.zeros(0, np.int64)]).astype(np.int64, copy=False), texts)


Ints = npt.NDArray[np.int64]
SIZE_COLUMNS = ("step", "units", "payload_bytes")
"""The columns that `StepSizes.of` looks at; without `payload_bytes` every step has 0 bytes."""
_ROW_BYTES = 350
"""Bytes of a row in memory, without what it says of each unit."""


class StepRange(NamedTuple):
    """Steps that are read at once."""

    first: int
    end: int
    """The step behind the last one."""
    num_rows: int
    num_bytes: int


class StepSizes(NamedTuple):
    """The steps of some rows, ascending, with how many rows and bytes each of them has."""

    steps: Ints
    rows: Ints
    """A row with sums of its units counts as so many rows as take as much memory."""
    bytes: Ints
    """Bytes of the payloads, decoded."""

    @classmethod
    def of(cls, batches: Sequence[Any]) -> StepSizes:
        """The sizes of the rows of some batches, which have `SIZE_COLUMNS`."""
        every = np.concatenate([*(batch.column("step").to_numpy() for batch in batches), np.zeros(0, np.int64)])
        steps, indices, counts = np.unique(every, return_inverse=True, return_counts=True)
        num_bytes = np.zeros(len(steps), np.int64)
        if len(every) and "payload_bytes" in batches[0].schema.names:
            payloads = [batch.column("payload_bytes").fill_null(0).to_numpy() for batch in batches]
            np.add.at(num_bytes, indices.reshape(-1), np.concatenate(payloads))
        if any(batch.column("units").null_count < batch.num_rows for batch in batches):
            lengths = [pc.binary_length(batch.column("units")).fill_null(0).to_numpy() for batch in batches]
            unit_bytes = np.zeros(len(steps), np.int64)
            np.add.at(unit_bytes, indices.reshape(-1), np.concatenate(lengths))
            counts = counts + unit_bytes // _ROW_BYTES
        return cls(steps, counts, num_bytes)

    @classmethod
    def sum(cls, several: Iterable[StepSizes]) -> StepSizes:
        """The sizes of the rows of several together."""
        parts = [cls(*(np.zeros(0, np.int64),) * 3), *several]
        steps, indices = np.unique(np.concatenate([one.steps for one in parts]), return_inverse=True)
        rows, num_bytes = np.zeros((2, len(steps)), np.int64)
        np.add.at(rows, indices.reshape(-1), np.concatenate([one.rows for one in parts]))
        np.add.at(num_bytes, indices.reshape(-1), np.concatenate([one.bytes for one in parts]))
        return cls(steps, rows, num_bytes)

    def cut(self, max_rows: int, max_bytes: int | None = None) -> Iterator[StepRange]:
        """Half-open ranges that cover the steps, ascending; only a range of one step may exceed the bounds."""
        first, end, num_rows, num_bytes = None, 0, 0, 0
        for step, more_rows, more_bytes in zip(*(column.tolist() for column in self), strict=True):
            is_full = num_rows + more_rows > max_rows or (max_bytes is not None and num_bytes + more_bytes > max_bytes)
            if first is not None and is_full:
                yield StepRange(first, step, num_rows, num_bytes)
                first, num_rows, num_bytes = None, 0, 0
            first = step if first is None else first
            end, num_rows, num_bytes = step + 1, num_rows + more_rows, num_bytes + more_bytes
        if first is not None:
            yield StepRange(first, end, num_rows, num_bytes)
