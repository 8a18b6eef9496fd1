"""Every file of a recording cut at every byte: what is read is exactly the whole batches in front of the cut.

    python -m tests.campaigns cut

Sealed and open shards of tensors and of statistics, an open one with the zeros of aligned writes, an index, and the
manifests. Where each batch ends is found by pyarrow alone. The reader must give all rows of the whole batches and no
others, with all values as they were written, and must say how many bytes follow them.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import recorder
from recorder.errors import RunError
from recorder.format.rundir import open_name
from recorder.read.shard_rows import ShardRows, load_open, load_sealed
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_TENSOR
from tests.rigs.writer import Rig

from .support import Progress, copy_live, deadline_s, exit_code

NUM_BATCHES = 3
_MARGIN = 9
_ZEROS = 4096
_SLICE = 400
_LIGHT = ("tensors-000000.arrow", "stats-000000.arrow")


class Victim(NamedTuple):
    name: str
    """For people."""
    path: Path
    final: Path
    """What the shard is called, or the shard of an index; the file itself if it is a manifest."""
    content: bytes
    ends: tuple[int, ...]
    """Where its batches end; the first is where the schema ends."""
    batches: tuple[Any, ...]
    """As they were written; of an index and a manifest those of the run."""


def record(folder: Path) -> list[Victim]:
    """Make small shards, and say what is in them."""
    rig = Rig(folder / "sealed", batch_bytes=1 << 20, codec="auto").start()
    _put_batches(rig, NUM_BATCHES)
    rig.close()
    living = Rig(folder / "live", flush_interval_s=3600.0, sync_interval_s=3600.0).start()
    _put_batches(living, NUM_BATCHES)
    copy_live(living.directory, folder / "open" / "rank=00000" / "writer")
    living.close()
    shutil.copy(folder / "live" / "_run.json", folder / "open" / "_run.json")
    found = []
    opened = folder / "open" / "rank=00000" / "writer"
    for name in _LIGHT:
        sealed = rig.directory / name
        ends, batches = _parse(sealed.read_bytes())
        found.append(Victim(f"sealed {name}", sealed, sealed, sealed.read_bytes(), ends, batches))
        path = opened / open_name(name)
        content = path.read_bytes().rstrip(b"\0")  # of an aligned write
        ends, batches = _parse(content + bytes(8))
        content = content.ljust(ends[-1], b"\0")
        found.append(Victim(f"open {name}", path, opened / name, content, ends, batches))
    path = opened / open_name(_LIGHT[0])
    found.append(found[1]._replace(name="open, with zeros after it", content=found[1].content + bytes(_ZEROS)))
    index = rig.directory / "_tensors-000000.index"
    found.append(Victim("index", index, found[0].path, index.read_bytes(), (), found[0].batches))
    for manifest in (rig.directory / "_writer.json", folder / "sealed" / "_run.json"):
        content = manifest.read_bytes()
        found.append(Victim(manifest.name, manifest, manifest, content, (), found[0].batches + found[2].batches))
    return found


def _put_batches(rig: Rig, count: int) -> None:
    chance = np.random.default_rng(5)
    rig.writer.set_manifest({"rank": 0, "pid": os.getpid(), "host": "elsewhere", "started_ns": 1})
    for batch in range(count):
        for row in range(batch % 3 + 1):
            values = chance.standard_normal(40 + 7 * row, dtype=np.float32)
            values[:3] = (0.0, np.nan, np.inf)
            rig.put(values, step=batch, module_path=f"layers.{row}", keep=KEEP_TENSOR | KEEP_STATS | KEEP_FINGERPRINT)
            rig.put(values[:5], step=batch, module_path=f"norms.{row}", keep=KEEP_STATS)
        assert rig.drain()


def _parse(content: bytes) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The ends of the schema and of the batches, and the batches, all found by pyarrow."""
    source = pa.BufferReader(content[8:])
    stream = pa.ipc.open_stream(source)
    ends, batches = [8 + source.tell()], list[Any]()
    while True:
        try:
            batch = stream.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError):
            return tuple(ends), tuple(batches)
        ends.append(8 + source.tell())
        batches.append(batch)


def boundaries(victim: Victim) -> list[int]:
    """Cuts near every place where something begins or ends in the file."""
    cut_points = (0, 8, *victim.ends, len(victim.content))
    near = {cut_point + d for cut_point in cut_points for d in range(-_MARGIN, _MARGIN + 1)}
    return sorted(cut for cut in near if 0 <= cut < len(victim.content))


def problems_of(victim: Victim, cuts: Iterable[int]) -> list[str]:
    """Cut a copy of the file, again and again, and read it each time."""
    logging.getLogger("recorder").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="cut-") as scratch:
        copy = Path(scratch) / "copy"
        is_shard = bool(victim.ends)
        folder = victim.path.parent if is_shard else victim.final.parent
        if is_shard:
            copy.mkdir()
        else:
            run = next(parent for parent in victim.path.parents if (parent / "_run.json").exists())
            shutil.copytree(run, copy)
            folder = run
        path, final = copy / victim.path.relative_to(folder), copy / victim.final.relative_to(folder)
        path.write_bytes(victim.content)
        found = []
        for cut in sorted(cuts, reverse=True):
            os.truncate(path, cut)
            try:
                problem = _shard_problem(victim, final, cut) if is_shard else _run_problem(victim, copy, final, cut)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                found.append(f"{victim.name}, cut to {cut} of {len(victim.content)} bytes: {problem}")
    return found


def _shard_problem(victim: Victim, final: Path, cut: int) -> str:
    is_sealed = victim.path == victim.final
    shard = (load_sealed if is_sealed else load_open)(final)
    data = [one for end, one in zip(victim.ends[1:], victim.batches, strict=True) if end <= cut]
    wanted = [batch for batch in data if batch.num_rows]
    if problem := _wrong_rows(shard, wanted):
        return problem
    num_rows = sum(batch.num_rows for batch in wanted)
    if shard.num_rows != num_rows:
        return f"says {shard.num_rows} rows, expected {num_rows}"
    # Behind a seal come the footer and the magic, which are no batch that was cut.
    last = max((end for end in (8, *victim.ends) if end <= cut), default=cut)
    has_seal = len(data) > len(wanted)
    rest = 0 if has_seal or not any(victim.content[last:cut]) else cut - last
    if shard.num_trailing_bytes != rest:
        return f"says that {shard.num_trailing_bytes} bytes follow, expected {rest}"
    if is_sealed and not any("cut" in text or "too few" in text for text in shard.damage):
        return f"does not say that it was cut: {shard.damage}"
    if is_sealed and rest and not any(f"{rest} bytes" in text for text in shard.damage):
        return f"does not say how many bytes follow: {shard.damage}"
    return ""


def _wrong_rows(shard: ShardRows, wanted: Sequence[Any]) -> str:
    cut_points = [batch.column("batch").unique().to_pylist() for batch in shard.columns(("batch",))]
    numbers = [number for some in cut_points for number in some]
    if numbers != list(range(len(wanted))):
        return f"has batches {numbers}, expected {len(wanted)}"
    for number, batch in enumerate(wanted):
        found = shard.read(number, batch.schema.names)
        if not _same_bits(found, batch):
            return f"batch {number} is not what was written"
    return ""


def _same_bits(found: Any, batch: Any) -> bool:
    if found.schema.names != batch.schema.names or found.num_rows != batch.num_rows:
        return False
    for one, other in zip(found.columns, batch.columns, strict=True):
        if pa.types.is_floating(one.type):
            one, other = one.view(pa.int64()), other.view(pa.int64())  # a NaN equals itself
        if not one.equals(other):
            return False
    return True


def _run_problem(victim: Victim, copy: Path, final: Path, cut: int) -> str:
    """Check that without its index or manifest a run is read as before or refused, and never read differently."""
    if victim.path != victim.final:
        shard = load_sealed(final)
        if shard.is_indexed:
            return "the index is believed"
        return _wrong_rows(shard, [batch for batch in victim.batches if batch.num_rows])
    try:
        run = recorder.open_run(copy)
    except RunError as error:
        return "" if final.name in str(error) else f"the error does not name it: {error}"
    if final.name == "_run.json":
        return "is believed"
    if not any(final.name in text for text in run.problems):
        return f"nothing is said of it: {run.problems}"
    rows = sum(batch.num_rows for batch in victim.batches)
    found = sum(writer.num_rows for writer in run.writers)
    return "" if found == rows else f"has {found} rows, expected {rows}"


def sample(victims: Sequence[Victim], per_file: int, seed: int) -> list[tuple[Victim, list[int]]]:
    chance = random.Random(seed)
    return [
        (victim, sorted({*boundaries(victim), *(chance.randrange(len(victim.content)) for _ in range(per_file))}))
        for victim in victims
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")


def main(arguments: argparse.Namespace) -> int:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cut-") as folder:
        victims = record(Path(folder))
        if arguments.count:
            chosen = sample(victims, -(-arguments.count // len(victims)), arguments.seed)
        else:
            chosen = [(victim, list(range(len(victim.content)))) for victim in victims]
        print(f"{'file':<28} {'bytes':>8} {'batches':>8} {'cuts':>8} {'problems':>9}", flush=True)
        problems = _cut_all(chosen, arguments.jobs, arguments.minutes)
    num_cuts = sum(len(cuts) for _, cuts in chosen)
    print(f"{num_cuts} cuts in {time.monotonic() - start_s:.0f} s, {len(problems)} problems")
    return exit_code(problems)


def _cut_all(chosen: list[tuple[Victim, list[int]]], jobs: int, minutes: float | None) -> list[str]:
    """The problems of all files; the cuts of each file are divided into slices."""
    problems: list[str] = []
    progress = Progress(sum(len(cuts) for _, cuts in chosen), "cuts")
    until_s = deadline_s(minutes)
    num_done = 0
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for victim, cuts in chosen:
            slices = [cuts[start : start + _SLICE] for start in range(0, len(cuts), _SLICE)]
            found: list[str] = []
            for piece, some in zip(slices, pool.map(problems_of, [victim] * len(slices), slices), strict=True):
                found += some
                num_done += len(piece)
                progress.show(num_done)
            num_batches = max(0, len(victim.ends) - 1)
            counts = f"{len(victim.content):>8} {num_batches:>8} {len(cuts):>8} {len(found):>9}"
            print(f"{victim.name:<28} {counts}", flush=True)
            problems += found
            if time.monotonic() > until_s:
                return [*problems, f"not all cuts were made in {minutes} minutes"]
    return problems
