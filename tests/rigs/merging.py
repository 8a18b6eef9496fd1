"""Small runs of two data-parallel ranks, and what must hold of every merge of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recorder.columns import METADATA_COLUMNS
from recorder.run.run import Run, open_run
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

MODULE = {"class": "Linear", "source": "train.py:7", "aliases": [], "params": ["weight"], "buffers": ["mean"]}
MODULES = [{**MODULE, "path": path, "sites": ["output"]} for path in ("", "layers.0")]
_OF_STORAGE = ("seq", "encoding", "payload_bytes")
"""Columns that say how a row lies in its writer, not what it is."""


def roots(ranks: Sequence[int] = (0, 1), kind: str = "ddp") -> list[dict[str, Any]]:
    """The manifest's roots of a model that is trained by some ranks together."""
    return [
        {"name": "model", "class": "Net", "modules": MODULES, "data_parallel": {"kind": kind, "ranks": list(ranks)}}
    ]


def weight(step: int) -> npt.NDArray[np.float32]:
    """The parameter, the same on all ranks."""
    return np.random.default_rng(1000 + step).standard_normal((3, 4), np.float32)


def batch(step: int, rank: int) -> npt.NDArray[np.float32]:
    """The output of a rank for its own samples."""
    return np.random.default_rng(10 * step + rank).standard_normal((2, 4), np.float32)


def rows_of(step: int, rank: int, seq: int) -> list[Row]:
    """What a rank records at a step: an input, an output, its gradient, a parameter and its gradient, a loss."""
    own: dict[str, Any] = {"step": step, "rank": rank}
    update: dict[str, Any] = own | {"micro_step": None, "phase": "optimizer", "name": "weight"}
    return [
        make_row(seq, batch(step, rank)[:, :1], module_path="", site="input", name="x", **own),
        make_row(seq + 1, batch(step, rank), encoding="compressed", **own),
        make_row(seq + 2, batch(step, rank) * 4, site="grad_output", **own | {"phase": "backward"}),
        make_row(seq + 3, weight(step), site="param", **update),
        make_row(seq + 4, weight(step) / 8, site="grad", **update),
        make_row(seq + 5, weight(step), site="optim", encoding=None, **update | {"name": "weight.exp_avg"}),
    ]


ROWS_PER_STEP = 7


def loss_of(step: int, rank: int, seq: int) -> Row:
    loss = np.array(1 / (step + 1) + rank)
    return make_row(seq, loss, step=step, rank=rank, micro_step=None, module_path="", site="scalar", name="loss")


def add_steps(writer: HandmadeWriter, steps: Sequence[int], **shard: Any) -> Path:
    """Shards with some steps of a writer; returns the path of the one with the payloads."""
    tensors, stats = [], []
    for step in steps:
        seq = ROWS_PER_STEP * step
        tensors.append(rows_of(step, writer.rank, seq))
        stats.append(loss_of(step, writer.rank, seq + ROWS_PER_STEP - 1))
    path = writer.add_shard(tensors, **shard)
    writer.add_shard([stats], kind="stats", **shard)
    return path


def make_small_run(path: Path, steps: int = 4, ranks: Sequence[int] = (0, 1), per_shard: int = 2) -> Path:
    """A run of two ranks with a shard for every two steps."""
    make_run(path, world_size=len(ranks))
    for rank in ranks:
        writer = HandmadeWriter(path, rank)
        for first in range(0, steps, per_shard):
            add_steps(writer, range(first, min(first + per_shard, steps)))
        writer.finish(roots=roots(ranks))
    return path


def grow(path: Path, steps: Sequence[int], ranks: Sequence[int] = (0, 1), name: str = "20260102-000000-host-2") -> None:
    """More steps, by writers that went on where the first ones stopped."""
    for rank in ranks:
        writer = HandmadeWriter(path, rank, name)
        add_steps(writer, steps)
        writer.finish(roots=roots(ranks), attempt=1, started_ns=1_800_000_000_000_000_000)


def content(run: Run) -> list[Any]:
    """Every row of the global view with its values, in order."""
    rows = run.view().rows()
    names = [name for name in METADATA_COLUMNS if name not in _OF_STORAGE]
    found = rows.table.select(names).to_pylist()
    payloads = rows.table.column("encoding").is_valid().to_pylist()
    values = [rows.array(i).tobytes() if payloads[i] else None for i in range(len(rows))]
    return [_comparable(row) | {"values": value} for row, value in zip(found, values, strict=True)]


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    """A row in which a NaN equals itself."""
    return {name: repr(value) if isinstance(value, float) else value for name, value in row.items()}


def assert_is_merge(out: Path, source: Path) -> None:
    """A merged run is sound, and holds what the global view of its source shows, no more and no less."""
    merged = open_run(out)
    assert [finding.text for finding in verify(merged)] == []
    own, expected = content(merged), content(open_run(source))
    assert sorted(map(_key, own)) == sorted(map(_key, expected))
    by_key = {_key(row): row for row in expected}
    for row in own:
        assert row == by_key[_key(row)]
    assert not (out / "_merging").exists()


def _key(row: dict[str, Any]) -> str:
    names = ("rank", "root", "module_path", "site", "name", "phase", "mode", "step", "micro_step", "call", "repeat")
    return json.dumps([row[name] for name in names])


def units(out: Path) -> list[str]:
    """Names of the published units."""
    return sorted(path.name for path in (out / "global").iterdir() if path.name.startswith("steps"))


_OF_A_MERGE = ("created_ns", "closed_ns", "started_ns", "pid", "host", "process", "checksum", "crc32c")
"""Members of manifests that say when and where a merge was written."""


def files_of_merge(folder: Path) -> dict[str, Any]:
    """Every file of a directory; of manifests without what says when and where they were written."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix == ".json":
            said = json.loads(path.read_text())
            found[str(path.relative_to(folder))] = {k: v for k, v in said.items() if k not in _OF_A_MERGE}
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found
