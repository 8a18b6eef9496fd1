"""Runs of any size without a training: files as the writer leaves them, a few values a step, and faults to be found.

A data-parallel model of linear layers: every tenth step each layer's output, its weight and the gradient of that, by
their statistics (and fingerprints of what ranks must share), and no payload. Ranks hold the same numbers; columns are
made once for all of them. The rows go through the format's own batches, checksums and seals. Batches are full, as of a
writer whose disk was slower than its rows; one that keeps up writes a batch a second.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recorder import __version__
from recorder.columns import COUNTS, SCHEMA, STATISTICS
from recorder.format.rundir import RUN_MANIFEST, STATUS, WRITER_MANIFEST, encode_status, open_name, rank_dir, shard_name
from recorder.sites import FORMAT_NAME, FORMAT_VERSION
from recorder.write.file import Disk, PageMemory
from recorder.write.manifest import create_manifest, replace_manifest
from recorder.write.shard import BatchFile, IpcFormat

SITES = (
    ("output", "", "forward", None),
    ("param", "weight", "optimizer", None),
    ("grad", "weight", "optimizer", "final"),
)
"""Site, name, phase and scope of what a layer has each time."""
BEGAN_NS = 1_700_000_000_000_000_000
STEP_NS = 1_000_000_000
_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}
_SIDE = 4096
_NUM_NUMBERS = 61
"""Distinct values of a statistic: as many as make rows differ, and few enough for small files."""
_FACTORS = {
    "mean": 1e-3,
    "std": 0.5,
    "min": -2.0,
    "max": 2.0,
    "absmax": 2.0,
    "l2": 2048.0,
    "sum": 16777.0,
    "sum_sq": 4e6,
    "sum_abs": 3e6,
    "sum_fourth": 1e7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is written."""

    ranks: int
    steps: int
    every: int = 10
    """Steps from one that is recorded to the next."""
    modules: int = 6
    batch_rows: int = 4096
    shard_rows: int = 65536
    nan: tuple[int, int] | None = None
    """Step and rank of the one NaN, in an output of the middle layer."""
    differs: tuple[int, int] | None = None
    """Step and rank of the one weight, of the last layer, that is not what its replicas are."""

    @property
    def recorded(self) -> range:
        return range(0, self.steps, self.every)

    @property
    def rows_a_step(self) -> int:
        return self.modules * len(SITES)

    @property
    def rows_a_rank(self) -> int:
        return len(self.recorded) * self.rows_a_step

    @property
    def nan_module(self) -> str:
        return f"blocks.{self.modules // 2}"

    @property
    def differing_module(self) -> str:
        return f"blocks.{self.modules - 1}"


class _Quick(Disk):
    """The real disk without waiting for the medium."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def write_run(path: Path, shape: Shape, *, jobs: int = 1) -> None:
    """A whole run, by so many processes."""
    path.mkdir(parents=True)
    disk = _Quick()
    manifest = {
        "run_id": path.name,
        "world_size": shape.ranks,
        "created_ns": BEGAN_NS,
        "asked": {"rules": rules(shape)},
    }
    create_manifest(disk, path / RUN_MANIFEST, {**_FORMAT, **manifest})
    if jobs == 1:
        write_ranks(range(shape.ranks), path, shape)
        return
    shares = [range(job, shape.ranks, jobs) for job in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(write_ranks, path=path, shape=shape), shares))


def rules(shape: Shape) -> list[str]:
    steps = f"steps=::{shape.every}"
    return [
        f"class=Linear site=output {steps} keep=stats",
        f"class=Linear site=param,grad {steps} keep=stats,fingerprint",
    ]


def write_ranks(ranks: Sequence[int], path: Path, shape: Shape) -> None:
    """The files of some ranks."""
    batches = list(_batches(shape))
    layout = IpcFormat(SCHEMA, "zstd")
    memory = PageMemory(16 << 20)
    manifest = _manifest(path.name, shape)
    for rank in ranks:
        _write_rank(path / rank_dir(rank), rank, shape, batches, layout, memory, manifest)


def _write_rank(
    parent: Path,
    rank: int,
    shape: Shape,
    batches: Sequence[dict[str, Any]],
    layout: IpcFormat,
    memory: PageMemory,
    manifest: dict[str, Any],
) -> None:
    disk = _Quick()
    directory = parent / f"000000-{rank:012x}"
    directory.mkdir(parents=True)
    num_shards, num_rows = itertools.count(), 0
    file: BatchFile | None = None
    final = directory

    def ledger() -> dict[str, Any]:
        return {"observed": num_rows, "written": num_rows, "dropped": {}, "retired": {"rows": 0, "bytes": 0}}

    for template in batches:
        if file is None:
            final = directory / shard_name("stats", next(num_shards))
            file = BatchFile(disk, directory / open_name(final.name), layout, memory, is_direct=False)
        batch = _of_rank(template, rank, shape)
        num_rows += batch.num_rows
        file.append(batch, ledger())
        if file.num_rows >= shape.shard_rows:
            file.seal(final, ledger())
            file = None
    if file is not None:
        file.seal(final, ledger())
    own = {"rank": rank, "local_rank": rank % 8, "node_rank": rank // 8, "host": f"node{rank // 8:04d}"}
    own |= {"pid": 1000 + rank % 8, "writer": directory.name, "ledger": ledger()}
    replace_manifest(disk, directory / WRITER_MANIFEST, {**manifest, **own})
    (directory / STATUS).write_bytes(
        encode_status({name: manifest[name] for name in ("attempt", "state")} | own | {"step": shape.recorded[-1]})
    )


def _manifest(run_id: str, shape: Shape) -> dict[str, Any]:
    modules = [_module("", "Stack", [], []), _module("blocks", "ModuleList", [], [])]
    modules += [_module(f"blocks.{i}", "Linear", ["weight"], ["output", "param", "grad"]) for i in range(shape.modules)]
    parallel = {"kind": "ddp", "ranks": list(range(shape.ranks)), "broadcast_buffers": True}
    return {
        **_FORMAT,
        "run_id": run_id,
        "attempt": 0,
        "world_size": shape.ranks,
        "started_ns": BEGAN_NS,
        "closed_ns": BEGAN_NS + shape.steps * STEP_NS,
        "state": "closed",
        "step_source": "optimizer",
        "versions": {"recorder": __version__},
        "settings": {"jitter": {"value": 0, "source": "default"}},
        "rules": rules(shape),
        "roots": [{"name": "model", "class": "Stack", "data_parallel": parallel, "modules": modules}],
        "optimizers": [],
        "events": [],
        "autoload": True,
    }


def _module(path: str, name: str, params: list[str], sites: list[str]) -> dict[str, Any]:
    own = {"path": path, "class": name, "source": "train.py:7", "aliases": [], "sites": sites, "params": params}
    return own | {"buffers": [], "compiled": False}


def _batches(shape: Shape) -> Iterator[dict[str, Any]]:
    """Columns of each batch of a rank, but `rank`."""
    steps_a_batch = max(1, shape.batch_rows // shape.rows_a_step)
    recorded = np.array(shape.recorded, np.int64)
    of_value = [(module, *site) for site in SITES[:1] for module in range(shape.modules)]  # forwards, then the update
    of_value += [(module, *site) for module in range(shape.modules) for site in SITES[1:]]
    for first in range(0, len(recorded), steps_a_batch):
        steps = np.repeat(recorded[first : first + steps_a_batch], shape.rows_a_step)
        seq = np.arange(first * shape.rows_a_step, first * shape.rows_a_step + len(steps))
        value = seq % shape.rows_a_step

        def column(index: int, kind: Any, value: Any = value) -> Any:
            """What the values of a step have there, in the order in which they are seen."""
            return pa.array([one[index] for one in of_value], kind).take(pa.array(value))

        modules, (sites, names, phases, scopes) = (
            pa.array([f"blocks.{one[0]}" for one in of_value]).take(pa.array(value)),
            (column(index, pa.string()) for index in range(1, 5)),
        )
        is_output = value < shape.modules
        numbers = 1.0 + ((seq * 31 + value * 7) % _NUM_NUMBERS) / _NUM_NUMBERS
        prints = [f"{(step * 1_000_003 + index) * 0x9E3779B97F4A7C15 % (1 << 64):016x}"
                  for step, index in zip(steps.tolist(), value.tolist(), strict=True)]  # fmt: skip
        columns: dict[str, Any] = dict.fromkeys(SCHEMA.names)
        columns |= {name: numbers.astype(np.float32).astype(np.float64) * _FACTORS[name] for name in STATISTICS}
        columns |= dict.fromkeys(COUNTS, 0)
        columns |= {
            "seq": seq, "attempt": 0, "step": steps, "call": 0, "repeat": 0, "mode": "train", "phase": phases,
            "micro_step": pa.array(np.zeros(len(seq), np.int32), mask=~is_output),
            "root": "model", "module_path": modules, "site": sites, "name": names, "scope": scopes,
            "dtype": "float32", "shape": f"[{_SIDE},{_SIDE}]", "numel": _SIDE * _SIDE, "part": 0, "flat_offset": 0,
            "fingerprint": pa.array(prints, pa.string(), mask=is_output), "time_ns": BEGAN_NS + steps * STEP_NS + value,
        }  # fmt: skip
        yield {
            name: _array(columns[name], SCHEMA.field(name).type, len(seq)) for name in SCHEMA.names if name != "rank"
        }


def _array(values: Any, kind: Any, num_rows: int) -> Any:
    """A column of the batch; what is no array stands in every row."""
    if isinstance(values, pa.Array):
        return values.cast(kind) if values.type != kind else values
    if isinstance(values, np.ndarray):
        return pa.array(values, kind)
    return pa.nulls(num_rows, kind) if values is None else pa.repeat(pa.scalar(values, kind), num_rows)


def _of_rank(template: dict[str, Any], rank: int, shape: Shape) -> Any:
    num_rows = len(template["seq"])
    columns = template | {"rank": pa.array(np.full(num_rows, rank, np.int32))}
    # Each rank has a batch of its own, so its outputs are its own; parameters and gradients are replicas.
    own = 1.0 + rank % _NUM_NUMBERS / 1024 * template["scope"].is_null().to_numpy(zero_copy_only=False)
    columns |= {"l2": pa.array(template["l2"].to_numpy() * own)}
    for fault, site, module, changes in (
        (shape.nan, "output", shape.nan_module, {"nan_count": 1}),
        (shape.differs, "param", shape.differing_module, {"l2": 2100.0, "fingerprint": "00000000deadbeef"}),
    ):
        if fault is not None and fault[1] == rank:
            columns = _changed(columns, {"step": fault[0], "site": site, "module_path": module}, changes)
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _changed(columns: dict[str, Any], where: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The same with other values in the one row that is so, if it is here."""
    import pyarrow.compute as pc

    found = pa.array(np.all([pc.equal(columns[name], value).to_numpy(False) for name, value in where.items()], axis=0))
    if not pc.any(found).as_py():
        return columns
    return columns | {
        name: pc.if_else(found, pa.scalar(value, columns[name].type), columns[name]) for name, value in changes.items()
    }
