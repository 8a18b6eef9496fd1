"""Writes rows of the global view as checked shards: batches of some MiB, sealed files, one writer directory.

Must never hold more payload than one batch, and never write outside the directory that it was given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from ..columns import OF_FIRST_PART, SCHEMA
from ..format.integrity import batch_crcs
from ..format.rundir import WRITER_MANIFEST, open_name, shard_name
from ..globalview.assembler import PayloadPart
from ..globalview.global_columns import NO_VALUES, with_member
from ..sites import FORMAT_NAME, FORMAT_VERSION, NUMBERS
from ..write.files.file import Disk, PageMemory
from ..write.files.ipc import IpcFormat, Payload
from ..write.files.manifest import replace_manifest
from ..write.files.shard import BatchFile, Index

BATCH_BYTES = 8 << 20
"""Payload at which a batch is written."""
_BATCH_ROWS = 4096
_SHARD_BYTES = 256 << 20
_SHARD_ROWS = 65536
_LAYOUTS = {"tensors": IpcFormat(SCHEMA), "stats": IpcFormat(SCHEMA, "zstd")}
_LIGHT_BYTES = 256 << 10
"""Payload of scalars, which stand with the statistics, at which a batch is written."""
_SMALL_BYTES = 1024
"""A scalar's payload of up to so many bytes stands with the statistics."""


class WriterMemory:
    """The memory that a process writes from; one directory after the other uses it."""

    def __init__(self) -> None:
        self.payloads = {"tensors": PageMemory(BATCH_BYTES), "stats": PageMemory(_LIGHT_BYTES)}
        self.message = PageMemory(2 << 20)


class MergedDirectory:
    """One writer directory in the making: add rows, finish, describe."""

    def __init__(self, path: Path, rows: Any, memory: WriterMemory) -> None:
        """Create the directory.

        Args:
            path: the directory, which must not exist.
            rows: the view's rows as one record batch.
            memory: memory that nothing else may use before `finish`.
        """
        self.path = path
        self.num_rows = 0
        self.written_bytes = 0
        self.num_written_rows = 0
        self.rows = rows
        self.memory = memory
        self.disk = Disk()
        self._sites = rows.column("site")
        self._attempts = rows.column("attempt").to_numpy()
        self._max_attempt = 0
        self._times_ns = rows.column("time_ns").to_numpy()
        self._first_ns = 0
        self.unit_bytes = pc.binary_length(rows.column("units")).fill_null(0).to_numpy(zero_copy_only=False)
        """By row, the bytes of what it says of each unit."""
        self.disk.make_directory(path)
        self._lanes = {kind: _KindWriter(self, kind) for kind in _LAYOUTS}

    def add(self, row: int, part: PayloadPart | None, number: int = 0, why: str | None = None) -> None:
        """Take one part of a row, or the row without a payload; the payload is copied.

        Args:
            row: the number of the row in the view.
            part: the payload of the row, or a part of it.
            number: the number of the part.
            why: the reason why a row that should have a payload has none.
        """
        is_light = part is None or (part.payload_bytes <= _SMALL_BYTES and self._sites[row].as_py() in NUMBERS)
        self._max_attempt = max(self._max_attempt, int(self._attempts[row]))
        if self.num_rows == 0:
            self._first_ns = int(self._times_ns[row])
        self.num_rows += 1
        self._lanes["stats" if is_light else "tensors"].add(self.num_rows - 1, row, part, number, why)

    def finish(self) -> None:
        """Write what is left, and seal."""
        for lane in self._lanes.values():
            lane.close()

    def describe(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with the accounts; afterwards the names in the directory are durable."""
        own = {
            "format": FORMAT_NAME,
            "version": list(FORMAT_VERSION),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "attempt": self._max_attempt,
            # The time of the first row: readers order the units of a step by it, whenever each was merged.
            "started_ns": self._first_ns,
            "closed_ns": time.time_ns(),
            "state": "closed",
            "ledger": self.ledger(),
        }
        replace_manifest(self.disk, self.path / WRITER_MANIFEST, {**manifest, **own})

    def abandon(self) -> None:
        """Close the open files; the caller removes the directory with what is left of them."""
        for lane in self._lanes.values():
            lane.abandon()

    def ledger(self, about_to_write: int = 0) -> dict[str, Any]:
        """Return the accounts, with the rows of the batch that the ledger itself will stand in."""
        written = self.num_written_rows + about_to_write
        retired = {"rows": 0, "bytes": 0}
        return {"observed": self.num_rows, "written": written, "dropped": {}, "retired": retired}


class _KindWriter:
    """Rows of one kind, on their way into the shards of a directory."""

    def __init__(self, directory: MergedDirectory, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._layout = _LAYOUTS[kind]
        self._payload = directory.memory.payloads[kind]
        self._batch_bytes = BATCH_BYTES if kind == "tensors" else _LIGHT_BYTES
        self._has_index = kind == "tensors"
        self._next_number = 0
        self._file: BatchFile | None = None
        self._index = Index()
        self._clear()

    def add(self, seq: int, row: int, part: PayloadPart | None, number: int, why: str | None) -> None:
        """Take one row for the shard."""
        if why is not None:
            self._whys[len(self._rows)] = why
        if part is None:
            self._note(seq, row, number, 0, None, 0, self._ends[-1])
        else:
            buffers = [np.frombuffer(data, np.uint8) for data in part.data]
            num_bytes = sum(map(len, buffers))
            if self._ends[-1] and self._ends[-1] + num_bytes > self._batch_bytes:
                self._flush()
            start = self._ends[-1]
            if start == 0:
                self._payload.reserve(num_bytes)
            for buffer in buffers:
                self._payload.data[start : start + len(buffer)] = buffer
                start += len(buffer)
            end = self._ends[-1] + num_bytes
            self._note(seq, row, number, part.flat_offset, part.encoding, part.payload_bytes, end)
        is_large = self._ends[-1] >= self._batch_bytes or self._unit_bytes >= BATCH_BYTES
        if is_large or len(self._rows) >= _BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        """Write and seal what there is."""
        self._flush()
        self._seal()

    def abandon(self) -> None:
        """Stop writing."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _note(
        self, seq: int, row: int, number: int, flat_offset: int, encoding: str | None, payload_bytes: int, end: int
    ) -> None:
        self._seqs.append(seq)
        self._rows.append(row)
        self._numbers.append(number)
        self._flat_offsets.append(flat_offset)
        self._encodings.append(encoding)
        self._payload_bytes.append(payload_bytes)
        self._ends.append(end)
        self._unit_bytes += 0 if number else int(self._directory.unit_bytes[row])

    def _clear(self) -> None:
        self._seqs: list[int] = []
        self._rows: list[int] = []
        self._numbers: list[int] = []
        self._flat_offsets: list[int] = []
        self._encodings: list[str | None] = []
        self._payload_bytes: list[int] = []
        self._whys: dict[int, str] = {}
        """The reason why a waiting row has no values, by the number of the row."""
        self._ends = [0]
        self._unit_bytes = 0

    def _flush(self) -> None:
        if not self._rows:
            return
        directory = self._directory
        if self._file is None:
            path = directory.path / open_name(shard_name(self._kind, self._next_number))
            # Through the page cache: the user reads the result next, and the kernel writes it back in the background.
            self._file = BatchFile(directory.disk, path, self._layout, directory.memory.message, is_direct=False)
        payload = None
        if self._kind == "tensors":
            payload = Payload(self._payload.data[: self._ends[-1]], np.array(self._ends, np.int64))
        batch = self._batch(payload)
        crcs = batch_crcs(batch)
        if payload is not None:
            crcs["data"][1:] = [crc32c(payload.ends.data), crc32c(payload.values.data)]
        self._file.append(batch, directory.ledger(about_to_write=batch.num_rows), crcs=crcs, payload=payload)
        directory.num_written_rows += batch.num_rows
        if self._has_index:
            self._index.add(batch)
        self._clear()
        if self._file.num_bytes >= _SHARD_BYTES or self._file.num_rows >= _SHARD_ROWS:
            self._seal()

    def _seal(self) -> None:
        if self._file is None:
            return
        directory, file = self._directory, self._file
        final = directory.path / shard_name(self._kind, self._next_number)
        file.seal(final, directory.ledger())
        directory.written_bytes += file.num_bytes
        if self._has_index:
            directory.written_bytes += self._index.write(
                directory.disk, final, file.num_bytes, directory.memory.message
            )
        self._file, self._index = None, Index()
        self._next_number += 1

    def _batch(self, payload: Payload | None) -> pa.RecordBatch:
        """Return the waiting rows; `data` is empty where the payload is written separately."""
        taken = self._directory.rows.take(_array(pa.int64(), self._rows))
        is_later = np.array(self._numbers) > 0
        own = {
            "seq": _array(pa.int64(), self._seqs),
            "part": _array(pa.int32(), self._numbers),
            "flat_offset": _array(pa.int64(), self._flat_offsets),
            "encoding": _texts(self._encodings),
            "payload_bytes": _array(
                pa.int64(), self._payload_bytes, [encoding is not None for encoding in self._encodings]
            ),
            "data": self._data(payload),
        }
        columns = []
        for field in SCHEMA:
            column = own.get(field.name)
            if column is None:
                column = taken.column(field.name)
                if field.name == "note" and self._whys:
                    column = self._with_reasons(column)
                if field.name in OF_FIRST_PART and is_later.any():
                    column = pa.compute.if_else(_mask(~is_later), column, pa.scalar(None, field.type))
                column = _clean(column)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _with_reasons(self, notes: Any) -> Any:
        """Return the notes, to which the reasons why rows have no values are added."""
        texts = notes.to_pylist()
        for i, why in self._whys.items():
            texts[i] = with_member(texts[i], NO_VALUES, why)
        return _texts(texts)

    def _data(self, payload: Payload | None) -> pa.Array:
        is_there = [encoding is not None for encoding in self._encodings]
        if not any(is_there):
            return pa.nulls(len(is_there), pa.large_binary())
        ends = np.array(self._ends, np.int64) if payload is None else np.zeros_like(payload.ends)
        buffers = [_bits(is_there), pa.py_buffer(ends), pa.py_buffer(self._payload.data[: ends[-1]])]
        return pa.Array.from_buffers(pa.large_binary(), len(is_there), buffers)


def as_batch(table: Any) -> pa.RecordBatch:
    """Return a table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _bits(is_there: Any) -> pa.Buffer | None:
    """Return a validity bitmap whose unused bits are zero; None where all values are there."""
    return None if all(is_there) else pa.py_buffer(np.packbits(is_there, bitorder="little"))


def _array(kind: pa.DataType, values: list[int], is_there: list[bool] | None = None) -> pa.Array:
    data = pa.py_buffer(np.array(values, np.int32 if kind == pa.int32() else np.int64))
    return pa.Array.from_buffers(kind, len(values), [None if is_there is None else _bits(is_there), data])


def _texts(values: list[str | None]) -> pa.Array:
    return pa.array(values, pa.string())


def _mask(values: Any) -> pa.Array:
    return pa.array(values)


def _clean(column: pa.Array) -> pa.Array:
    """Return a column with its validity rewritten: it begins at a byte, and its unused bits are zero."""
    if column.null_count == 0:
        return column
    validity, *rest = column.buffers()
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), count=len(column), bitorder="little")
    return pa.Array.from_buffers(column.type, len(column), [pa.py_buffer(np.packbits(bits, bitorder="little")), *rest])
