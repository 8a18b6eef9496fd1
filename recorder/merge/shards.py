"""Writes the rows of a merge into sealed shards of a writer directory, in batches of some MiB with checksums.

The writer must never hold more payload than one batch, and never write outside the given directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from ..write.file import Disk, PageMemory
from ..write.manifest import replace_manifest
from ..write.shard import BatchFile, Index, IpcFormat, Payload

BATCH_BYTES = 8 << 20
_BATCH_ROWS = 4096
_SHARD_BYTES = 256 << 20
_SHARD_ROWS = 65536
_LAYOUTS = {"tensors": IpcFormat(SCHEMA), "stats": IpcFormat(SCHEMA, "zstd")}
_LIGHT_BYTES = 256 << 10
"""A batch of statistics is written once its payloads reach this many bytes. Only scalars have such payloads."""
_SMALL_BYTES = 1024
"""A scalar's payload of at most this many bytes is stored with the statistics."""


class WriterMemory:
    """The buffers from which a process writes shards. Its writer directories use them one after the other."""

    def __init__(self) -> None:
        self.payloads = {"tensors": PageMemory(BATCH_BYTES), "stats": PageMemory(_LIGHT_BYTES)}
        self.message = PageMemory(2 << 20)


class MergedDirectory:
    """Builds a writer directory. Call `add` for some rows of the batch `rows`, then `finish`, then `describe`."""

    def __init__(self, path: Path, rows: Any, memory: WriterMemory) -> None:
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
        """For each row, the number of bytes in the column `units`."""
        self.disk.make_directory(path)
        self._lanes = {kind: _KindWriter(self, kind) for kind in _LAYOUTS}

    def add(self, row: int, part: PayloadPart | None, number: int = 0, why: str | None = None) -> None:
        """Add a row with part `number` of its payload. If a row has no payload, `why` goes to its note."""
        is_light = part is None or (part.payload_bytes <= _SMALL_BYTES and self._sites[row].as_py() in NUMBERS)
        self._max_attempt = max(self._max_attempt, int(self._attempts[row]))
        if self.num_rows == 0:
            self._first_ns = int(self._times_ns[row])
        self.num_rows += 1
        self._lanes["stats" if is_light else "tensors"].add(self.num_rows - 1, row, part, number, why)

    def finish(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()  # lanes refer to the directory, and a reference cycle would keep the rows in memory

    def describe(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest with the row counts. After that, the names in the directory are durable."""
        own = {
            "format": FORMAT_NAME,
            "version": list(FORMAT_VERSION),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "attempt": self._max_attempt,
            # Readers order the writer directories of a step by their start, so the start is the time of the first row.
            "started_ns": self._first_ns,
            "closed_ns": time.time_ns(),
            "state": "closed",
            "ledger": self.ledger(),
        }
        replace_manifest(self.disk, self.path / WRITER_MANIFEST, {**manifest, **own})

    def abandon(self) -> None:
        """Close the open files. The caller may then remove the directory."""
        for lane in self._lanes.values():
            lane.abandon()

    def ledger(self, about_to_write: int = 0) -> dict[str, Any]:
        """Return the row counts as they will be after the next batch, of `about_to_write` rows."""
        written = self.num_written_rows + about_to_write
        retired = {"rows": 0, "bytes": 0}
        return {"observed": self.num_rows, "written": written, "dropped": {}, "retired": retired}


class _WaitingRow(NamedTuple):
    seq: int
    row: int
    number: int
    flat_offset: int
    encoding: str | None
    payload_bytes: int | None
    why: str | None


class _KindWriter:
    def __init__(self, directory: MergedDirectory, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._layout = _LAYOUTS[kind]
        self._payload = directory.memory.payloads[kind]
        self._is_of_tensors = kind == "tensors"
        self._batch_bytes = BATCH_BYTES if self._is_of_tensors else _LIGHT_BYTES
        self._next_number = 0
        self._file: BatchFile | None = None
        self._index = Index()
        self._clear()

    def _clear(self) -> None:
        self._waiting: list[_WaitingRow] = []
        self._ends = [0]
        """The byte offset at which each waiting row's payload ends, after a leading 0."""
        self._payload_crc = 0
        self._unit_bytes = 0

    def add(self, seq: int, row: int, part: PayloadPart | None, number: int, why: str | None) -> None:
        if part is None:
            self._waiting.append(_WaitingRow(seq, row, number, 0, None, None, why))
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
                self._payload_crc = crc32c(buffer.data, self._payload_crc)
                start += len(buffer)
            payload = part.flat_offset, part.encoding, part.payload_bytes
            self._waiting.append(_WaitingRow(seq, row, number, *payload, why))
        self._ends.append(self._ends[-1] if part is None else start)
        self._unit_bytes += 0 if number else int(self._directory.unit_bytes[row])
        is_large = self._ends[-1] >= self._batch_bytes or self._unit_bytes >= BATCH_BYTES
        if is_large or len(self._waiting) >= _BATCH_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._seal()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _flush(self) -> None:
        if not self._waiting:
            return
        directory = self._directory
        if self._file is None:
            path = directory.path / open_name(shard_name(self._kind, self._next_number))
            # The file is written through the page cache, because the user reads it next. The kernel writes it to disk
            # later.
            self._file = BatchFile(directory.disk, path, self._layout, directory.memory.message, is_direct=False)
        payload = None
        if self._is_of_tensors:
            payload = Payload(self._payload.data[: self._ends[-1]], np.array(self._ends, np.int64), self._payload_crc)
        batch = self._batch(payload)
        crcs = batch_crcs(batch)
        if payload is not None:
            crcs["data"][1:] = [crc32c(payload.ends.data), payload.crc]
        self._file.append(batch, directory.ledger(about_to_write=batch.num_rows), crcs=crcs, payload=payload)
        directory.num_written_rows += batch.num_rows
        if self._is_of_tensors:
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
        if self._is_of_tensors:
            memory = directory.memory.message
            directory.written_bytes += self._index.write(directory.disk, final, file.num_bytes, memory)
        self._file, self._index = None, Index()
        self._next_number += 1

    def _batch(self, payload: Payload | None) -> pa.RecordBatch:
        seqs, rows, numbers, flat_offsets, encodings, payload_bytes, whys = zip(*self._waiting, strict=True)
        taken = self._directory.rows.take(pa.array(rows, pa.int64()))
        is_later = np.array(numbers) > 0
        has_payload = [encoding is not None for encoding in encodings]
        own = {
            "seq": pa.array(seqs, pa.int64()),
            "part": pa.array(numbers, pa.int32()),
            "flat_offset": pa.array(flat_offsets, pa.int64()),
            "encoding": pa.array(encodings, pa.string()),
            "payload_bytes": pa.array(payload_bytes, pa.int64()),
            "data": self._data(has_payload, payload),
        }
        columns = []
        for field in SCHEMA:
            column = own.get(field.name)
            if column is None:
                column = taken.column(field.name)
                if field.name == "note" and any(whys):
                    notes = zip(column.to_pylist(), whys, strict=True)
                    texts = [with_member(note, NO_VALUES, why) if why else note for note, why in notes]
                    column = pa.array(texts, pa.string())
                if field.name in OF_FIRST_PART and is_later.any():
                    column = pc.if_else(pa.array(~is_later), column, pa.scalar(None, field.type))
                column = _clean(column)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _data(self, has_payload: list[bool], payload: Payload | None) -> pa.Array:
        if not any(has_payload):
            return pa.nulls(len(has_payload), pa.large_binary())
        ends = np.array(self._ends, np.int64) if payload is None else np.zeros_like(payload.ends)
        validity = None if all(has_payload) else pa.py_buffer(np.packbits(has_payload, bitorder="little"))
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(self._payload.data[: ends[-1]])]
        return pa.Array.from_buffers(pa.large_binary(), len(has_payload), buffers)


def as_batch(table: Any) -> pa.RecordBatch:
    """Return a table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _clean(column: pa.Array) -> pa.Array:
    """Return a column whose validity bitmap starts at a whole byte and has zeros in its unused bits."""
    if column.null_count == 0:
        return column
    validity, *rest = column.buffers()
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), count=len(column), bitorder="little")
    return pa.Array.from_buffers(column.type, len(column), [pa.py_buffer(np.packbits(bits, bitorder="little")), *rest])
