"""Owns the sound runs that are mutated: small, with a row of every kind that a reader treats in a way of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from recorder.format.integrity import METADATA_CRC_KEY, METADATA_KEY
from recorder.format.rundir import index_name
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter, Row, index_bytes, make_parts, make_ref, make_row, make_run

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "v1.0"
NAMES = ("handmade", "golden", "merged")
_ROOM_BYTES = 400
"""Spaces behind the header of each batch, so that a longer one has room."""


def make_bases(folder: Path) -> dict[str, Path]:
    """One directory for each of `NAMES`."""
    found = {name: folder / name for name in NAMES}
    make_handmade(found["handmade"])
    shutil.copytree(GOLDEN, found["golden"])
    merge_run(open_run(found["handmade"]), found["merged"])
    return found


def make_handmade(path: Path) -> None:
    """Two ranks with all layouts; sealed shards with and without index, an open one, and one of statistics."""
    make_run(path, world_size=2, asked={"rules": ["site=output keep=tensor"]})
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank, name=f"writer-{rank}")
        rows = _tensor_rows(rank)
        shard = writer.add_shard([rows[:9], rows[9:]], with_index=False)
        later = [row | {"seq": row["seq"] + 100, "step": 3} for row in rows[:6]]
        writer.add_shard([later[:2], later[2:]], is_sealed=False)
        writer.add_shard([_light_rows(rank)], kind="stats", with_index=False)
        for file in writer.directory.glob("*.arrow*"):
            file.write_bytes(
                _with_room(file.read_bytes(), is_sealed=file.suffix == ".arrow", is_light="stats" in file.name)
            )
        if rank == 0:
            (shard.parent / index_name(shard.name)).write_bytes(
                _with_room(index_bytes([rows[:9], rows[9:]], shard.stat().st_size), is_sealed=True)
            )
        modules = [
            {"path": p, "class": "Linear", "source": "train.py:7", "aliases": [], "sites": ["output", "grad", "param"],
             "params": ["weight"], "buffers": ["seen"], "compiled": False}
            for p in ("", "layers.0", "layers.1")
        ]  # fmt: skip
        parallel = {"kind": "ddp", "ranks": [0, 1], "broadcast_buffers": True}
        writer.finish(
            state="closed" if rank else "recording",
            host="elsewhere",
            roots=[{"name": "model", "class": "Net", "modules": modules, "data_parallel": parallel}],
            events=[{"kind": "compiled", "message": "not recorded", "count": 1}],
            optimizers=[{"class": "SGD"}],
            versions={"torch": "2.13"},
        )


def _with_room(data: bytes, *, is_sealed: bool, is_light: bool = False) -> bytes:
    """The same file with spaces behind each header, which JSON allows."""
    reader = pa.ipc.open_stream(data[8:])
    sink = pa.BufferOutputStream()
    compression = "zstd" if is_light else None
    end = 0
    with pa.ipc.new_file(sink, reader.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except (StopIteration, OSError, pa.ArrowInvalid):
                break
            header = dict(metadata)[METADATA_KEY] + b" " * _ROOM_BYTES
            crc = b"%08x" % crc32c(header)
            writer.write_batch(batch, custom_metadata={METADATA_KEY: header, METADATA_CRC_KEY: crc})
            end = sink.tell()
    found: bytes = sink.getvalue().to_pybytes()
    return found if is_sealed else found[:end]


def _tensor_rows(rank: int) -> list[Row]:
    rng = np.random.default_rng(rank)
    mesh = json.dumps({"shape": [2], "dim_names": ["dp"], "coordinate": [rank]})
    of: dict[str, Any] = {"rank": rank, "step": 0}
    state: dict[str, Any] = of | {"phase": "optimizer", "micro_step": None, "scope": "final"}
    wide = np.arange(6000, dtype=np.float32).reshape(60, 100) * 1e-3
    pieces = rng.standard_normal((2, 3)).astype(np.float32)
    half = rng.standard_normal((2, 4)).astype(ml_dtypes.bfloat16)
    layout = {"global_shape": "[4,3]", "offsets": f"[{2 * rank},0]", "mesh": mesh, "layout_source": "dtensor"}
    flat = [{"kind": "FlatShard", "offset": 5 * rank}]
    rows = [
        make_row(0, rng.standard_normal((2, 4)).astype(np.float32), module_path="", site="input", name="x", **of),
        make_row(1, rng.standard_normal((2, 5)).astype(np.float32), **of),
        make_row(2, rng.standard_normal((2, 5)).astype(np.float32), site="grad_output", **of | {"phase": "backward"}),
        make_row(3, np.ones((3, 2), np.float32), site="param", name="weight", fingerprint="0" * 16, **state),
        make_row(4, pieces, site="grad", name="weight", placements='[{"kind":"Shard","dim":0}]', **state | layout),
        make_row(5, np.arange(5.0), site="param", name="flat", global_shape="[5,2]", placements=json.dumps(flat),
                 mesh=mesh, layout_source="fsdp", **state),
        make_row(6, np.full((2, 2), rank + 1.0, np.float32), site="grad", name="sum", global_shape="[2,2]",
                 placements='[{"kind":"Partial","reduce_op":"sum"}]', mesh=mesh, **state),
        make_row(7, wide, site="optim", name="weight.exp_avg", encoding="compressed", **state),
        make_row(8, half, module_path="layers.1", encoding="compressed", **of),
        *make_parts(9, np.arange(40, dtype=np.int64), 3, module_path="layers.1", site="buffer", name="seen", **state),
    ]  # fmt: skip
    rows.append(make_ref(12, rows[3], site="param", name="tied"))
    bools = rng.integers(0, 2, (2, 3)).astype(bool)
    rows.append(make_row(13, bools, module_path="layers.1", site="tap", name="mask", **of))
    rows.append(make_row(14, np.zeros((0, 4), np.float32), site="tap", name="empty", **of))
    rows.append(make_row(15, np.array([np.nan, 1.0], np.float32), site="output", name="nan", **of))
    return rows


def _light_rows(rank: int) -> list[Row]:
    rows = []
    for step in range(4):
        of: dict[str, Any] = {"rank": rank, "step": step}
        loss = np.float64(1 / (step + 1 + rank))
        rows.append(make_row(200 + 2 * step, loss, module_path="", site="scalar", name="loss", **of))
        rows.append(make_row(201 + 2 * step, np.ones(4, np.float32), encoding=None, module_path="layers.1", **of))
    return rows
