"""A run directory made by hand: pyarrow and `recorder.format` alone, so that reading is not tested by writing."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recorder.columns import METADATA_COLUMNS, SCHEMA
from recorder.format.codec import Encoder, max_encoded_bytes
from recorder.format.integrity import batch_metadata, seal_metadata
from recorder.format.rundir import SHARD_KINDS, index_name, open_name, rank_dir, shard_name
from recorder.numerics.dtypes import item_bytes

Row = dict[str, Any]
POSITION_FIELDS = [pa.field("batch", pa.int32(), nullable=False), pa.field("row", pa.int32(), nullable=False)]


def make_row(seq: int, values: npt.ArrayLike | None = None, **columns: Any) -> Row:
    """A row with sensible values; `values` become its payload, unless `encoding=None` asks for statistics alone."""
    array = np.asarray(np.zeros((), np.float32) if values is None else values)
    dtype = columns.pop("dtype", str(array.dtype))
    encoding = columns.pop("encoding", "plain" if values is not None else None)
    row: Row = dict.fromkeys(SCHEMA.names) | {
        "seq": seq,
        "attempt": 0,
        "step": 0,
        "micro_step": 0,
        "call": 0,
        "repeat": 0,
        "mode": "train",
        "phase": "forward",
        "rank": 0,
        "root": "model",
        "module_path": "layers.0",
        "site": "output",
        "name": "",
        "dtype": dtype,
        "shape": json.dumps(list(array.shape), separators=(",", ":")),
        "numel": array.size,
        "part": 0,
        "flat_offset": 0,
        "time_ns": 1_700_000_000_000_000_000 + seq,
    }
    if array.dtype.kind == "f" and array.size:
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        row |= {"nan_count": int(np.isnan(wide).sum()), "inf_count": int(np.isinf(wide).sum())}
        row |= {"zero_count": int((wide == 0).sum())}
        if finite.size:
            row |= {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
            row |= {"absmax": abs(finite).max(), "l2": float(np.sqrt((finite**2).sum()))}
            row |= {"sum": finite.sum(), "sum_sq": (finite**2).sum()}
            row |= {"sum_abs": abs(finite).sum(), "sum_fourth": (finite**4).sum()}
    if encoding is not None:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1) if array.size else np.zeros(0, np.uint8)
        row |= {"encoding": encoding, "payload_bytes": data.size, "data": data.tobytes()}
        if encoding == "compressed":
            out = np.empty(max_encoded_bytes(data.size), np.uint8)
            row["encoding"], num_bytes = Encoder("zstd").encode(data, item_bytes(dtype), out)
            row["data"] = out[:num_bytes].tobytes()
    return row | columns


def make_ref(seq: int, target: Row, **columns: Any) -> Row:
    """A row with the same content as `target`, an earlier row of the same shard."""
    return target | {"seq": seq, "encoding": "ref", "data": target["seq"].to_bytes(8, "little")} | columns


def make_parts(seq: int, values: npt.NDArray[Any], num_parts: int, **columns: Any) -> list[Row]:
    """The rows of one tensor in several parts."""
    whole = make_row(seq, values, **columns)
    rows, flat, offset = [], values.reshape(-1), 0
    for part, piece in enumerate(np.array_split(flat, num_parts)):
        row = make_row(seq + part, piece, **columns)
        for name in ("shape", "numel"):
            row[name] = whole[name]
        rows.append(row | {"part": part, "flat_offset": offset})
        offset += piece.size
    return rows


def ledger(written: int, observed: int | None = None, **dropped: int) -> dict[str, object]:
    observed = written + sum(dropped.values()) if observed is None else observed
    return {"observed": observed, "written": written, "dropped": dropped, "retired": {"rows": 0, "bytes": 0}}


def shard_bytes(
    batches: Sequence[Sequence[Row]],
    *,
    schema: pa.Schema = SCHEMA,
    is_sealed: bool = True,
    compression: str | None = None,
    ledgers: Mapping[int, dict[str, object]] | None = None,
) -> bytes:
    """The bytes of a shard file; an open one ends after the last batch."""
    sink = pa.BufferOutputStream()
    written = 0
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for number, rows in enumerate(batches):
            batch = pa.RecordBatch.from_pylist(list(rows), schema=schema)
            written += len(rows)
            account = (ledgers or {}).get(number, ledger(written))
            writer.write_batch(batch, custom_metadata=batch_metadata(batch, number=number, ledger=account))
        end_of_batches = sink.tell() or 8 + schema.serialize().size  # Arrow writes nothing before the first batch
        number = len(batches)
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        seal = seal_metadata(number=number, ledger=ledger(written))
        writer.write_batch(empty, custom_metadata=seal)
    data: bytes = sink.getvalue().to_pybytes()
    return data if is_sealed else data[:end_of_batches]


def index_bytes(batches: Sequence[Sequence[Row]], num_shard_bytes: int) -> bytes:
    """The bytes of the index of a sealed shard."""
    fields = [SCHEMA.field(name) for name in METADATA_COLUMNS] + POSITION_FIELDS
    metadata = {**(SCHEMA.metadata or {}), b"recorder_shard_bytes": str(num_shard_bytes).encode()}
    rows = [
        {name: value for name, value in row.items() if name != "data"} | {"batch": number, "row": index}
        for number, batch in enumerate(batches)
        for index, row in enumerate(batch)
    ]
    return shard_bytes([rows], schema=pa.schema(fields, metadata=metadata))


class HandmadeWriter:
    """One writer directory: add shards, then `finish`."""

    def __init__(self, run: Path, rank: int = 0, name: str = "20260101-000000-host-1") -> None:
        self.rank = rank
        self.directory = run / rank_dir(rank) / name
        self.directory.mkdir(parents=True)
        _grow_world(run / "_run.json", rank + 1)
        self.num_rows = 0
        self._num_shards = dict.fromkeys(SHARD_KINDS, 0)
        self.manifest: dict[str, Any] = {
            "format": "recorder",
            "version": [1, 0],
            "writer": name,
            "run_id": run.name,
            "rank": rank,
            "local_rank": rank,
            "world_size": 2,
            "host": "host",
            "pid": 1,
            "attempt": 0,
            "started_ns": 1_700_000_000_000_000_000,
            "state": "recording",
            "step_source": "optimizer",
            "settings": {"dir": {"value": "recordings", "source": "default"}},
            "rules": ["site=output keep=tensor"],
            "roots": [],
            "events": [],
            "ledger": ledger(0),
            "autoload": True,
        }
        self.finish(state="recording")

    def add_shard(
        self,
        batches: Sequence[Sequence[Row]],
        *,
        kind: str = "tensors",
        is_sealed: bool = True,
        with_index: bool = True,
        tail: bytes = b"",
    ) -> Path:
        """Write one shard (and its index), and return its path."""
        shard = shard_name(kind, self._num_shards[kind])
        self._num_shards[kind] += 1
        offset = self.num_rows
        self.num_rows += sum(map(len, batches))
        ledgers, written = {}, offset
        for number, rows in enumerate(batches):
            written += len(rows)
            ledgers[number] = ledger(written)
        compression = "zstd" if kind == "stats" else None
        data = shard_bytes(batches, is_sealed=is_sealed, compression=compression, ledgers=ledgers) + tail
        path = self.directory / (shard if is_sealed else open_name(shard))
        path.write_bytes(data)
        if is_sealed and with_index:
            (self.directory / index_name(shard)).write_bytes(index_bytes(batches, len(data)))
        return path

    def finish(self, *, state: str = "closed", **changes: Any) -> None:
        """Write the manifest."""
        self.manifest |= {"state": state, "ledger": ledger(self.num_rows)} | changes
        (self.directory / "_writer.json").write_text(json.dumps(self.manifest))


def make_run(path: Path, **changes: Any) -> Path:
    """An empty run directory, of as many ranks as get writers, if nothing else is said."""
    path.mkdir(parents=True)
    manifest = {"format": "recorder", "version": [1, 0], "run_id": path.name, "world_size": 1, "created_ns": 1}
    (path / "_run.json").write_text(json.dumps(manifest | changes))
    return path


def _grow_world(manifest: Path, world_size: int) -> None:
    try:
        found = json.loads(manifest.read_text())
        if found["world_size"] < world_size:
            manifest.write_text(json.dumps(found | {"world_size": world_size}))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a test of that


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    with io.FileIO(path, "r+") as file:
        file.write(data)
