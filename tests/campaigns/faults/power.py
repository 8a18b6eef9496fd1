"""Power loss: every state that the disk may be in after the writer's own operations, and what readers make of it.

    python -m tests.campaigns power

A disk logs what the writer does to it. For every prefix of that log the state is rebuilt that a loss of power there
may leave: data of a file is sure once the file was synced, a name once its directory was; of everything else any part
may have reached the medium, in any order, and a write may be torn at 512 bytes. All of it, none of it, all but one, one
alone, torn ones and random parts are tried. In each state: a final name holds a whole valid shard, a manifest is whole,
what the writer had called durable is there, every value that is read is right, and `repair` loses nothing of it. The
repair's own operations are treated the same way.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import NotARunError, RunError
from recorder.format.codec import decode
from recorder.records import KEEP_STATS, KEEP_TENSOR
from recorder.run.run import Run, open_run
from recorder.upkeep.repair import repair_run
from recorder.upkeep.verify import verify
from recorder.write.file import Disk
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig

from .support import Progress, deadline_s, exit_code, memory_folder

_SECTOR_BYTES = 512
_NAME_CHANGES = ("mkdir", "create", "link", "replace", "unlink")
_DATA_CHANGES = ("write", "truncate")
_RANDOM_PARTS = 6
_TORN_PARTS = 4
_THOROUGH = 4
"""One state of so many is verified after its repair, and repaired once more."""
_LONG_AGO_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation, by paths below the folder that is sure to exist."""

    kind: str
    path: str = ""
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    """Of a write; of a truncate `offset` is the size."""
    old_path: str = ""
    """Of a replace."""
    num_durable: int = 0
    """Of a promise: rows that the writer has called durable."""


class LoggingDisk(Disk):
    """A real disk that writes down what is done to it."""

    def __init__(self, root: Path, first_inode: int = 0) -> None:
        self.log: list[Op] = []
        self._root = root
        self._next_inode = first_inode
        self._inode_of_descriptor: dict[int, int] = {}
        self._inode_of_path: dict[str, int] = {}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    def promise(self, num_rows: int) -> None:
        """The writer has just said that so many rows are durable."""
        self.log.append(Op(kind="promise", num_durable=num_rows))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.log.append(Op(kind="mkdir", path=self._name(path)))

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self._inode_of_descriptor[descriptor] = self._inode_of_path[self._name(path)] = inode
        self.log.append(Op(kind="create", path=self._name(path), inode=inode))
        return descriptor

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        return True  # whole blocks are written, as where the file system can; the page cache makes no difference here

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        num_bytes = super().write(descriptor, data, offset, *behind)
        content = b"".join([data, *behind])[:num_bytes]
        self.log.append(Op(kind="write", inode=self._inode_of_descriptor[descriptor], offset=offset, data=content))
        return num_bytes

    def truncate(self, descriptor: int, nbytes: int) -> None:
        super().truncate(descriptor, nbytes)
        self.log.append(Op(kind="truncate", inode=self._inode_of_descriptor[descriptor], offset=nbytes))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.log.append(Op(kind="sync", inode=self._inode_of_descriptor[descriptor]))

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._inode_of_descriptor.pop(descriptor, None)

    def link(self, path: Path, final: Path) -> None:
        super().link(path, final)
        inode = self._inode_of_path[self._name(final)] = self._inode_of_path[self._name(path)]
        self.log.append(Op(kind="link", path=self._name(final), inode=inode))

    def replace(self, path: Path, final: Path) -> None:
        super().replace(path, final)
        inode = self._inode_of_path[self._name(final)] = self._inode_of_path.pop(self._name(path))
        self.log.append(Op(kind="replace", path=self._name(final), old_path=self._name(path), inode=inode))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._inode_of_path.pop(self._name(path), None)
        self.log.append(Op(kind="unlink", path=self._name(path)))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.log.append(Op(kind="sync_directory", path=self._name(path)))

    def know(self, path: Path) -> Op:
        """Take up a file that exists; the operation that would have made it as it is."""
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self._inode_of_path[self._name(path)] = inode
        return Op(kind="create", path=self._name(path), inode=inode)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A log, and what must be found after it."""

    name: str
    ops: list[Op]
    num_sure: int = 0
    """Operations at the beginning that are sure to be on the medium."""
    may_retire: bool = False


def values_of(seq: int) -> Any:
    """What a row of that number holds."""
    return np.random.default_rng(seq).standard_normal(20 + seq % 7 * 30).astype(np.float32)


def record(root: Path, disk: LoggingDisk, *, rank: int = 0, steps: int = 6, **settings: Any) -> None:
    """Record some rows, with batches that nobody syncs for a while, and seals in between."""
    options = {"shard_rows": 7, "batch_bytes": 900, "flush_interval_s": 3600.0, "sync_interval_s": 3600.0} | settings
    rig = Rig(root / "made" / "run", disk=disk, rank=rank, **options).start()
    with subprocess.Popen(["true"]) as ended:
        pass
    rig.writer.set_manifest({"rank": rank, "host": os.uname().nodename, "pid": ended.pid, "started_ns": 1})
    wait_until(lambda: rig.writer.directory is not None)
    for step in range(steps):
        for _ in range(4):
            seq = rig.num_observed
            rig.put(values_of(seq), step=step, keep=KEEP_STATS if seq % 4 == 3 else KEEP_TENSOR | KEEP_STATS)
        if step % 2:
            assert rig.drain()
            disk.promise(rig.num_observed)
    rig.close()
    disk.promise(rig.num_observed)


def scenarios(folder: Path) -> Iterator[Scenario]:
    """Recordings and repairs, each with the log of what it did."""
    disk = LoggingDisk(folder / "plain")
    disk_root = folder / "plain"
    disk_root.mkdir()
    record(disk_root, disk)
    yield Scenario(name="record", ops=disk.log)

    root = folder / "retention"
    root.mkdir()
    quota = LoggingDisk(root)
    record(root, quota, steps=7, keep_newest=2)
    assert any(op.kind == "unlink" and op.path.endswith(".arrow") for op in quota.log), "nothing was retired"
    yield Scenario(name="record, retire", ops=quota.log, may_retire=True)

    # A second rank that finds what the first has only begun: the first one's next sync never comes.
    root = folder / "ranks"
    root.mkdir()
    first = LoggingDisk(root)
    record(root, first, steps=1)
    link = next(number for number, op in enumerate(first.log) if op.kind == "link" and op.path.endswith("_run.json"))
    second = LoggingDisk(root, first_inode=1_000_000)
    record(root, second, rank=1, steps=3)
    yield Scenario(name="second rank", ops=first.log[: link + 1] + second.log)

    # The repair of a run that was killed just before its first shard got its final name.
    until = next(n for n, op in enumerate(disk.log) if op.kind == "link" and op.path.endswith(".arrow"))
    root = folder / "repair"
    lay_out(disk.log[:until], root)
    make_old(root)
    before = LoggingDisk(root, first_inode=2_000_000)
    sure = []
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            sure.append(Op(kind="mkdir", path=str(path.relative_to(root))))
        else:
            made = before.know(path)
            sure += [made, Op(kind="write", inode=made.inode, data=path.read_bytes())]
    num_rows = sum(1 for _ in rows_of(open_run(root / "made" / "run")))
    for outcome in repair_run(open_run(root / "made" / "run"), assume_dead=True, disk=before):
        assert outcome.what not in ("failed", "skipped"), outcome
    ops = [*sure, Op(kind="promise", num_durable=num_rows), *before.log]
    yield Scenario(name="repair", ops=ops, num_sure=len(sure) + 1)


def is_sure(ops: Sequence[Op], num_sure: int = 0) -> list[bool]:
    """Which operations have reached the medium for certain once all these are done."""
    found = [True] * len(ops)
    files: set[int] = set()
    folders: set[str] = set()
    for number in range(len(ops) - 1, -1, -1):
        op = ops[number]
        if op.kind == "sync":
            files.add(op.inode)
        elif op.kind == "sync_directory":
            folders.add(op.path)
        elif op.kind in _DATA_CHANGES:
            found[number] = op.inode in files
        elif op.kind in _NAME_CHANGES:
            found[number] = str(Path(op.path).parent) in folders
        found[number] = found[number] or number < num_sure
    return found


def parts(ops: Sequence[Op], num_sure: int, chance: random.Random) -> Iterator[list[Op]]:
    """What may have reached the medium of these operations, bounded."""
    sure = is_sure(ops, num_sure)
    pending = [number for number, one in enumerate(sure) if not one]
    yield list(ops)
    if not pending:
        return

    def with_these(chosen: set[int]) -> list[Op]:
        return [op for number, op in enumerate(ops) if sure[number] or number in chosen]

    yield with_these(set())
    for number in pending:
        yield with_these({number})
        yield with_these(set(pending) - {number})
    for _ in range(_RANDOM_PARTS):
        share = chance.random()
        yield with_these({number for number in pending if chance.random() < share})
    writes = [number for number in pending if ops[number].kind == "write"]
    for _ in range(_TORN_PARTS if writes else 0):
        torn = chance.choice(writes[-2:])
        others = {number for number in pending if chance.random() < 0.7} | {torn}
        pieces = _torn(ops[torn], chance)
        yield [
            piece
            for number, op in enumerate(ops)
            if sure[number] or number in others
            for piece in (pieces if number == torn else [op])
        ]


def _torn(op: Op, chance: random.Random) -> list[Op]:
    """Some sectors of a write: a front, or any."""
    starts = range(-(op.offset % _SECTOR_BYTES), len(op.data), _SECTOR_BYTES)
    sectors = [range(max(start, 0), min(start + _SECTOR_BYTES, len(op.data))) for start in starts]
    if chance.random() < 0.5:
        chosen = sectors[: chance.randrange(len(sectors) + 1)]
    else:
        chosen = [sector for sector in sectors if chance.random() < 0.5]
    return [replace(op, offset=op.offset + s.start, data=op.data[s.start : s.stop]) for s in chosen]


def lay_out(ops: Sequence[Op], root: Path) -> str:
    """Make the files that these operations leave, and return a digest of them."""
    folders = {"."}
    names: dict[str, int] = {}
    contents: dict[int, bytearray] = {}
    for op in ops:
        if op.kind == "mkdir":
            folders.add(op.path)
        elif op.kind in ("create", "link", "replace"):
            names[op.path] = op.inode
            names.pop(op.old_path, None)
            contents.setdefault(op.inode, bytearray())
        elif op.kind == "unlink":
            names.pop(op.path, None)
        elif op.kind == "write":
            content = contents.setdefault(op.inode, bytearray())
            content.extend(bytes(max(0, op.offset - len(content))))
            content[op.offset : op.offset + len(op.data)] = op.data
        elif op.kind == "truncate":
            content = contents.setdefault(op.inode, bytearray())
            content[:] = content[: op.offset].ljust(op.offset, b"\0")
    digest = hashlib.sha256()
    root.mkdir(exist_ok=True)
    for folder in sorted(folders, key=lambda name: name.count("/")):
        if (root / folder).parent.is_dir():
            (root / folder).mkdir(exist_ok=True)
            digest.update(folder.encode())
    made: dict[int, Path] = {}
    for name, inode in sorted(names.items()):
        path = root / name
        if path.parent.is_dir():
            digest.update(f"{name}:{inode}".encode())
            if inode in made:
                os.link(made[inode], path)
            else:
                path.write_bytes(contents[inode])
                digest.update(contents[inode])
                made[inode] = path
    return digest.hexdigest()


def make_old(root: Path) -> None:
    """As if the power had been off for long."""
    for path in root.rglob("*"):
        os.utime(path, (_LONG_AGO_S, _LONG_AGO_S))


def rows_of(run: Run) -> Iterator[dict[str, Any]]:
    """Every row that the package reads, with its payload where that can be read."""
    for writer in run.writers:
        for shard in writer.shards:
            for numbers in shard.columns(("batch",)):
                for number in numbers.column("batch").unique().to_pylist():
                    yield from shard.read(number, COLUMNS).to_pylist()


COLUMNS = ("seq", "rank", "step", "mean", "zero_count", "encoding", "payload_bytes", "data", "module_path", "dtype")


def wrong_value(row: dict[str, Any]) -> str:
    """How a row differs from what was put; empty where it does not."""
    values = values_of(row["seq"])
    wanted = {"step": row["seq"] // 4, "mean": float(values.nbytes), "module_path": "blocks.0.mlp", "dtype": "float32"}
    for name, value in wanted.items():
        if row[name] != value:
            return f"row {row['seq']}: {name} is {row[name]!r}, expected {value!r}"
    if row["seq"] % 4 == 3:
        return "" if row["encoding"] is None else f"row {row['seq']}: has a payload"
    found = decode(row["encoding"], row["data"], row["payload_bytes"], 4).tobytes()
    return "" if found == values.tobytes() else f"row {row['seq']}: other bytes"


def problems_of(root: Path, ops: Sequence[Op], scenario: Scenario, *, is_thorough: bool) -> list[str]:
    """What is wrong with the state laid out in `root`, before and after its repair.

    `ops` are all operations before the loss of power, whether they have reached the medium or not. `is_thorough`: also
    verify what was repaired, and repair it once more.
    """
    num_durable = max((op.num_durable for op in ops if op.kind == "promise"), default=0)
    path = root / "made" / "run"
    make_old(root)
    try:
        run = open_run(path)
    except NotARunError as error:
        return [f"{num_durable} durable rows are gone with their run: {error}"] if num_durable else []
    except RunError as error:
        return [f"the run cannot be opened: {error}"]
    found: list[str] = []
    seqs = _check(run, found, scenario, num_durable)
    for manifest in root.rglob("*.json"):
        if manifest.name != "_status.json" and any(str(manifest) in text for text in run.problems):
            found.append(f"{manifest}: is not whole")
    found += [finding.text for finding in verify(run) if finding.is_fault and ".arrow.open" not in finding.text]
    outcomes = list(repair_run(open_run(path), assume_dead=True))
    found += [f"repair: {o.what} {o.path} {o.text}" for o in outcomes if o.what in ("failed", "skipped")]
    repaired = open_run(path)
    after = _check(repaired, found, scenario, num_durable)
    left = [str(one) for one in root.rglob("*") if one.name.endswith((".open", ".tmp"))]
    found += [f"repair left {name}" for name in left]
    if after != seqs:
        found.append(f"repair lost rows {sorted(seqs - after)[:5]}, and made rows {sorted(after - seqs)[:5]}")
    if not is_thorough:
        return found
    found += [f"after repair: {finding.text}" for finding in verify(repaired) if finding.is_fault]
    make_old(root)
    if again := list(repair_run(open_run(path), assume_dead=True)):
        found.append(f"a second repair found {again[0]}")
    return found


def _check(run: Run, found: list[str], scenario: Scenario, num_durable: int) -> set[int]:
    """Check every row that is there, and that what was durable is; returns the numbers of the rows."""
    seqs: list[int] = []
    for row in rows_of(run):
        seqs.append(row["seq"])
        if problem := wrong_value(row):
            found.append(problem)
    if len(set(seqs)) != len(seqs):
        found.append("rows are there twice")
    missing = sorted(set(range(num_durable)) - set(seqs))
    num_retired = sum(writer.balance.retired_rows for writer in run.writers) if scenario.may_retire else 0
    if scenario.name == "repair":
        missing = missing[:0] if len(seqs) >= num_durable else missing
    if len(missing) > num_retired:
        found.append(
            f"{len(missing)} of {num_durable} durable rows are gone, {num_retired} were retired: {missing[:5]}"
        )
    return set(seqs)


@dataclass
class Result:
    num_states: int = 0
    problems: list[str] = field(default_factory=list)


def check_prefix(
    scenario: Scenario, length: int, seed: int, folder: Path, limit: int | None = None, seen: set[object] | None = None
) -> Result:
    """Check the states that a loss of power after the first `length` operations may leave.

    They are laid out in `folder`, at most `limit` of them; those that were `seen` need not be checked again.
    """
    logging.getLogger("recorder").setLevel(logging.CRITICAL)
    ops = scenario.ops[:length]
    chance = random.Random(f"{seed} {scenario.name} {length}")
    result = Result()
    seen = set() if seen is None else seen
    num_durable = max((op.num_durable for op in ops), default=0)
    chosen = list(parts(ops, scenario.num_sure, chance))
    if limit is not None:
        chosen = chance.sample(chosen, min(limit, len(chosen)))
    for part in chosen:
        root = folder / "state"
        digest = lay_out(part, root)
        if (digest, num_durable) not in seen:
            seen.add((digest, num_durable))
            result.num_states += 1
            try:
                problems = problems_of(root, ops, scenario, is_thorough=result.num_states % _THOROUGH == 1)
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            last = ops[-1]
            where = f"{scenario.name}, after operation {length} ({last.kind} {last.path})"
            lost = [f"{op.kind} {op.path or op.inode}" for op in ops if op not in part]
            result.problems += [f"{where}, without {lost[:6]}: {text}" for text in problems]
        shutil.rmtree(root)
    return result


def _check_slice(work: tuple[Scenario, list[int], int]) -> Result:
    scenario, lengths, seed = work
    total = Result()
    seen: set[object] = set()
    with tempfile.TemporaryDirectory(prefix="power-", dir=memory_folder()) as folder:
        for length in lengths:
            found = check_prefix(scenario, length, seed, Path(folder), seen=seen)
            total.num_states += found.num_states
            total.problems += found.problems
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, help="prefixes of each log, at random; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")


def main(arguments: argparse.Namespace) -> int:
    start_s, until_s = time.monotonic(), deadline_s(arguments.minutes)
    print(f"{'scenario':<16} {'operations':>10} {'prefixes':>9} {'states':>8} {'problems':>9}")
    problems: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="power-", dir=memory_folder()) as folder,
        ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        for scenario in scenarios(Path(folder)):
            lengths = list(range(scenario.num_sure + 1, len(scenario.ops) + 1))
            if arguments.count:
                lengths = random.Random(arguments.seed).sample(lengths, min(arguments.count, len(lengths)))
            lengths.sort()  # neighbours have states in common
            size = -(-len(lengths) // 16)
            slices = [lengths[start : start + size] for start in range(0, len(lengths), size)]
            progress = Progress(len(slices), f"slices of {scenario.name}")
            total = Result()
            work = [(scenario, some, arguments.seed) for some in slices]
            for number, found in enumerate(pool.map(_check_slice, work)):
                if time.monotonic() > until_s:
                    print(f"{arguments.minutes:g} minutes are over: only {number} of {len(work)} slices were looked at")
                    pool.shutdown(cancel_futures=True)
                    break
                total.num_states += found.num_states
                total.problems += found.problems
                progress.show(number + 1)
            counts = f"{len(scenario.ops):>10} {len(lengths):>9} {total.num_states:>8} {len(total.problems):>9}"
            print(f"{scenario.name:<16} {counts}", flush=True)
            problems += total.problems
            if time.monotonic() > until_s:
                break
    print(f"{time.monotonic() - start_s:.0f} s")
    return exit_code(problems)
