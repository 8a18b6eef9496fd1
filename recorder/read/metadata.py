"""Reads the metadata rows of a run as columns, sums up the sizes of steps, and finds pipeline stages.

A metadata row has all columns but the payload. The position of a row is its index in all shards of all writers, one
after the other. No loop here runs over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import SCHEMA, TIME_ORDER, note_members
from ..format.manifest import MAX_STAGES, Stage
from ..numerics.keys import Times, array_of, by_key, column_of, encode
from ..sites import NUMBERS
from ..system.text import listed
from .shard_rows import Ranges, ShardRows, Steps, each_of
from .writers import RecordedWriter

Positions = npt.NDArray[np.int64]
NONE = -1
"""The integer for null in columns of counts. The other values of these columns are never negative."""
_FEW_CHUNKS = 64
POSITION_COLUMNS = ("seq", "batch", "row")
"""The columns that must be loaded to find a row's payload."""
TEXT_COLUMNS = frozenset(field.name for field in SCHEMA if pa.types.is_string(field.type))


class Keys(NamedTuple):
    """A column as integers. Equal integers stand for equal values."""

    codes: npt.NDArray[np.int64]
    """For each row, the integer for its value; `NONE` for null."""
    texts: list[str] | None
    """The texts that the codes index. None for a column of integers, whose codes are the values."""

    def code(self, value: Any) -> int:
        """Return the code of a value. A value that does not occur gets a code that no row has."""
        if value is None:
            return NONE
        if self.texts is None:
            return int(value)
        return self.texts.index(value) if value in self.texts else NONE - 1

    def text(self, i: int) -> str:
        """Return the text of the i-th row. Empty for null."""
        code = int(self.codes[i])
        return "" if code == NONE or self.texts is None else self.texts[code]

    def label(self, code: int) -> str:
        if code == NONE:
            return "None"
        return str(code) if self.texts is None else repr(self.texts[code])


class MetadataRows:
    """The rows of some writers, without payloads, by column. With `steps`, only batches that may have these steps."""

    def __init__(self, writers: Sequence[RecordedWriter], steps: Steps | Ranges | None = None) -> None:
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
        """Read and check columns. A query must load all its columns before it uses any position.

        A batch that is damaged in one column is removed from all columns. As positions change, all columns are read
        again.
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

    def has(self, names: Sequence[str]) -> bool:
        return all(name in self._columns for name in names)

    def column(self, name: str) -> Any:
        return self._columns[name]

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        if name not in self._numbers:
            self._numbers[name] = array_of(self._columns[name], NONE).astype(np.int64, copy=False)
        return self._numbers[name]

    def module_paths(self) -> Keys:
        """Return the module paths of all rows as codes. For other text columns, `keys` encodes chosen rows."""
        if self._module_paths is None:
            self._module_paths = Keys(*encode(self._columns["module_path"]))
        return self._module_paths

    def take(self, name: str, positions: Positions) -> Any:
        """Return a metadata column of some rows, as `pa.ChunkedArray`."""
        column = self._columns[name]
        if (positions[1:] < positions[:-1]).any():
            return pc.take(column, column_of(positions))
        if len(positions) == len(column) and (positions[1:] > positions[:-1]).all():
            # The rows of one writer are in time order already. They are copied, because mapped files may change later.
            return pa.chunked_array([pa.concat_arrays([chunk, chunk[:0]]) for chunk in column.chunks], column.type)
        ends = self._chunk_ends[name]
        chunk_numbers = np.searchsorted(ends, positions, side="right")
        used = np.flatnonzero(np.bincount(chunk_numbers))  # `np.unique` takes 7 ms for 200,000 rows
        if len(used) > _FEW_CHUNKS:
            return pc.take(column, column_of(positions))
        # Rows are taken chunk by chunk. Arrow itself would join all chunks first: 0.2 ms for a million short texts.
        starts = [0, *ends]
        pieces = [column.chunk(n).take(column_of(positions[chunk_numbers == n] - starts[n])) for n in used.tolist()]
        return pa.chunked_array(pieces, column.type)

    def keys(self, name: str, positions: Positions) -> Keys:
        if name in TEXT_COLUMNS:
            return Keys(*encode(self.take(name, positions)))
        return Keys(self.numbers(name)[positions], None)

    def text(self, name: str, position: int) -> str | None:
        chunk = int(np.searchsorted(self._chunk_ends[name], position, side="right"))
        start = int(self._chunk_ends[name][chunk - 1]) if chunk else 0
        value: str | None = self._columns[name].chunk(chunk)[position - start].as_py()
        return value

    def shard_of(self, position: int) -> tuple[ShardRows, int]:
        """Return the shard of a row, and the position of the shard's first row."""
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._shards[number], int(self._starts[number])

    def shard_numbers(self, positions: Positions) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, positions, side="right") - 1

    def writer_numbers(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Return the index of each row's writer."""
        return np.searchsorted(self._writer_starts, positions, side="right") - 1

    def in_order(self) -> Positions:
        """Return the positions of all rows, sorted by `TIME_ORDER`. Files may have rows in another order."""
        keys = [self.numbers(name) for name in reversed(TIME_ORDER)]
        return np.lexsort(keys).astype(np.int64, copy=False)


Ints = npt.NDArray[np.int64]
SIZE_COLUMNS = ("step", "units", "payload_bytes")
"""The columns that `StepSizes.of` reads. Without `payload_bytes`, the size of each step is 0 bytes."""
_ROW_BYTES = 350
"""The memory that one row takes without its column `units`, in bytes."""


def _by_step(steps: Ints, *columns: Ints) -> list[Ints]:
    known, indices = np.unique(steps, return_inverse=True)
    sums = [np.zeros(len(known), np.int64) for _ in columns]
    for total, column in zip(sums, columns, strict=True):
        np.add.at(total, indices.reshape(-1), column)
    return [known, *sums]


class StepRange(NamedTuple):
    """A range of steps that are read together."""

    first: int
    end: int
    """The step after the last step of the range."""
    num_rows: int
    num_bytes: int


class StepSizes(NamedTuple):
    """The number of rows and payload bytes of each step. Steps are distinct and ascending."""

    steps: Ints
    rows: Ints
    """The number of rows of each step. A row with a large `units` column counts as several rows, by its memory."""
    bytes: Ints

    @classmethod
    def of(cls, batches: Sequence[Any]) -> StepSizes:
        """Count rows and add up payload bytes by step. The batches must have the columns `SIZE_COLUMNS`."""
        steps = np.concatenate([*(array_of(batch.column("step")) for batch in batches), np.zeros(0, np.int64)])
        num_bytes = unit_bytes = np.zeros(len(steps), np.int64)
        if len(steps) and "payload_bytes" in batches[0].schema.names:
            num_bytes = np.concatenate([array_of(batch.column("payload_bytes")) for batch in batches])
        if any(batch.column("units").null_count < batch.num_rows for batch in batches):
            lengths = [array_of(pc.binary_length(batch.column("units"))) for batch in batches]
            unit_bytes = np.concatenate(lengths)
        known, rows, num_bytes, unit_bytes = _by_step(steps, np.ones(len(steps), np.int64), num_bytes, unit_bytes)
        return cls(known, rows + unit_bytes // _ROW_BYTES, num_bytes)

    @classmethod
    def sum(cls, several: Iterable[StepSizes]) -> StepSizes:
        """Add up several `StepSizes` by step."""
        parts = [cls(*(np.zeros(0, np.int64),) * 3), *several]
        return cls(*_by_step(*(np.concatenate(column) for column in zip(*parts, strict=True))))

    def cut(self, max_rows: int, max_bytes: int | None = None) -> Iterator[StepRange]:
        """Yield ascending half-open ranges of steps within both bounds. Only a range of one step may exceed them."""
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


def missing_stages(stages: Mapping[tuple[int, str], Stage]) -> Iterator[str]:
    """Yield a sentence for each pipeline that has stages without any record. Each stage on a rank has its own root."""
    for num_stages, some in by_key((stage.num_stages, stage.number) for stage in stages.values()).items():
        if gone := sorted(set(range(num_stages)) - {*some}):
            yield f"no rank left a record of stage {listed(gone)} (from 0) of a pipeline of {num_stages}"


def whole_roots(stages: Mapping[tuple[int, str], Stage]) -> dict[str, str]:
    """Map the root of each pipeline stage to the root of the first stage, by which the complete model is named."""
    names = {stage.num_stages: root for (_, root), stage in sorted(stages.items()) if stage.number == 0}
    return {root: names.get(stage.num_stages, root) for (_, root), stage in stages.items()}


def stages_of_rows(rows: MetadataRows, positions: Positions, stages: Mapping[tuple[int, str], Stage]) -> Ints:
    """Return each row's pipeline stage, or `NONE`. Without `stages` (merged run), the rows' notes have the stages."""
    stage_of_row: Ints = np.full(len(positions), NONE)
    writers, roots = rows.writer_numbers(positions), rows.keys("root", positions)
    for (writer, root), stage in stages.items():
        stage_of_row[(writers == writer) & (roots.codes == roots.code(root))] = stage.number
    if not stages:
        rows.load(["note"])
        notes = rows.keys("note", positions)
        stated = [note_members(text).get("stage") for text in notes.texts or ()]
        sound = (stage if type(stage) is int and 0 <= stage < MAX_STAGES else NONE for stage in stated)
        stage_of_row = np.array([*sound, NONE])[notes.codes]
    return stage_of_row


class MicroBatches:
    """The pipeline stage and the micro-batch of each row."""

    def __init__(self, rows: MetadataRows, chosen: Positions, stages: Mapping[tuple[int, str], Stage]) -> None:
        self.stage: Ints = np.full(len(chosen), NONE)
        """The pipeline stage of each row. `NONE` without a pipeline, and for scalars, which belong to no stage."""
        self.micro_step: Ints = np.zeros(len(chosen), np.int64)
        """The micro-batch of each row; 0 without a pipeline."""
        self.key: Ints = rows.numbers("micro_step")[chosen].copy()
        """The micro-step that is part of a value's key. 0 in a pipeline, where all micro-batches form one value."""
        if not stages:
            return
        sites = rows.keys("site", chosen)
        is_number = np.isin(sites.codes, [sites.code(site) for site in NUMBERS])
        self.stage = np.where(is_number, NONE, stages_of_rows(rows, chosen, stages))
        at = (self.stage != NONE) & (self.key != NONE)
        self.micro_step[at] = self.key[at]
        self.key[at] = 0


def in_order(rows: MetadataRows, at: Positions, stage: Ints) -> Ints:
    """Return the indexes that sort values by execution. `at` is each value's first row, and `stage` its stage."""
    phases = rows.keys("phase", at)
    nothing = np.zeros(len(at), np.int64)
    return Times(
        rows.numbers("step")[at],
        rows.keys("mode", at).codes,
        phases.codes == phases.code("forward"),
        np.isin(phases.codes, [phases.code("backward"), phases.code("recompute")]),
        rows.numbers("seq")[at],
        stage,
        micro_step=nothing,
        rank=nothing,
    ).order()


def unseen(ranks: Sequence[int], micro_steps: Sequence[int], known: set[int]) -> str:
    """Return a text that lists, for each rank, the micro-batches without rows of this rank. Empty if there are none."""
    everything = known | set(micro_steps)
    of_rank = by_key(zip(ranks, micro_steps, strict=True))
    lacking = {rank: sorted(gone) for rank, own in of_rank.items() if (gone := everything - {*own})}
    shown = [f"{', '.join(map(str, gone[:8]))} of rank {rank}" for rank, gone in list(lacking.items())[:4]]
    return f"no row of micro-batch {'; '.join(shown)}" if shown else ""
