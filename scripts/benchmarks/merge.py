"""What merging costs: a run of several writers, then the floor and the merges in turn, in the same minutes.

    python -m scripts.benchmarks merge --gb 4 --writers 4
    python -m scripts.benchmarks merge --gb 5.2 --writers 4 --limit-mb 520   nine times larger than the workers may grow

The run is written by the real writer: activations (batches, float32 and bfloat16) and their gradients, parameters and
gradients sharded along dim 0 and dim 1, replicated buffers, scalars. The floor is what no merge can do without, on one
core: decompress every payload, copy every file. What the second core is worth is seen where two processes decompress
everything between them. Each round measures these, one job and two jobs, so that slow changes of the machine cancel.
Memory is looked at every 20 ms, of each process alone: what it has for itself, and with the mapped pages of the source,
which the kernel takes back when it needs them. Exit code 1 where the merge is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recorder.format.codec import decode
from recorder.numerics.dtypes import item_bytes
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_TENSOR, Chunk, Staged
from recorder.run.run import open_run
from recorder.upkeep.verify import verify
from scripts.benchmarks import parser_of
from tests.rigs.fakes import fake_staged

from .written import writing

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 4
SIZES = {"batch": 4, "sequence": 512, "width": 1024}
MIX = ("stored", "assembled")
"""`stored`: sharded along dim 0, batches, replicas, so that frames can be copied. `assembled`: also what cannot be."""


def write_rank(run: Path, rank: int, world_size: int, steps: int, is_mixed: bool) -> None:
    """One rank's part of the run, through the real writer."""
    rng = np.random.default_rng(rank)
    shape = (SIZES["batch"], SIZES["sequence"], SIZES["width"])
    activation = rng.standard_normal(shape, np.float32)
    weight = rng.standard_normal((1024, 1024), np.float32) * np.float32(0.02)
    same = np.random.default_rng(0).standard_normal((256, 1024), np.float32)
    with writing(run, rank, world_size) as (writer, put):
        for step in range(steps):
            for record in one_step(step, rank, world_size, activation, weight, same, is_mixed):
                put(record)
            assert writer.drain(600.0)


def one_step(
    step: int,
    rank: int,
    world_size: int,
    activation: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
    same: npt.NDArray[np.float32],
    is_mixed: bool,
) -> list[Staged]:
    """What a rank sees at one step, in order."""
    factor = np.float32(1 + step / 64)
    activation, weight, same = activation * factor, weight * factor, same * factor
    all_kept, no_fingerprint = KEEP_TENSOR | KEEP_STATS | KEEP_FINGERPRINT, KEEP_TENSOR | KEEP_STATS
    found = [
        fake_staged(activation[:, :8, :8].copy(), module_path="", site="input", name="x", step=step, keep=all_kept)
    ]
    for layer in range(NUM_LAYERS):
        path = f"layers.{layer}.mlp"
        found.append(fake_staged(activation, module_path=path, step=step, keep=no_fingerprint))
        half = bfloat16(activation)
        found.append(fake_staged(half, module_path=f"layers.{layer}", step=step, keep=no_fingerprint, dtype="bfloat16"))
    found.append(fake_staged(np.array(1 / (step + 1)), module_path="", site="scalar", name="loss", step=step))
    for layer in reversed(range(NUM_LAYERS)):
        path = f"layers.{layer}.mlp"
        update: dict[str, Any] = {"module_path": path, "step": step, "micro_step": None, "phase": "optimizer"}
        if is_mixed:
            gradient: dict[str, Any] = {"module_path": path, "site": "grad_output", "step": step, "phase": "backward"}
            found.append(fake_staged(bfloat16(activation), dtype="bfloat16", keep=no_fingerprint, **gradient))
            other = chunk_of(rank, world_size, (weight.shape[0], weight.shape[1] * world_size), 1)
            found.append(fake_staged(weight, site="param", name="cut", chunk=other, keep=all_kept, **update))
        rows = chunk_of(rank, world_size, (weight.shape[0] * world_size, weight.shape[1]), 0)
        half = bfloat16(weight)
        found.append(
            fake_staged(half, site="param", name="weight", dtype="bfloat16", chunk=rows, keep=all_kept, **update)
        )
        found.append(fake_staged(weight, site="grad", name="weight", chunk=rows, keep=all_kept, **update))
        found.append(fake_staged(same, site="buffer", name="table", keep=all_kept, **update))
    return found


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the values cut to bfloat16."""
    found: npt.NDArray[np.uint16] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return found


def chunk_of(rank: int, world_size: int, global_shape: tuple[int, ...], dim: int) -> Chunk:
    """A rank's equal share along a dim."""
    offsets = tuple(rank * (size // world_size) if d == dim else 0 for d, size in enumerate(global_shape))
    placements = json.dumps([{"kind": "Shard", "dim": dim}], separators=(",", ":"))
    mesh = json.dumps({"shape": [world_size], "dim_names": None, "coordinate": [rank]}, separators=(",", ":"))
    return Chunk(global_shape, offsets, placements, mesh, "dtensor")


def write_run(run: Path, world_size: int, num_bytes: int, is_mixed: bool) -> int:
    """The run; returns the bytes of its payloads, decoded."""
    rng = np.random.default_rng(0)
    activation = rng.standard_normal((SIZES["batch"], SIZES["sequence"], SIZES["width"]), np.float32)
    weight, same = np.zeros((1024, 1024), np.float32), np.zeros((256, 1024), np.float32)
    of_step = sum(len(record.block.data) for record in one_step(0, 0, world_size, activation, weight, same, is_mixed))
    steps = max(1, round(num_bytes / (of_step * world_size)))
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=write_rank, args=(run, rank, world_size, steps, is_mixed)) for rank in range(world_size)
    ]
    for start in range(0, world_size, 2):
        for process in ranks[start : start + 2]:
            process.start()
        for process in ranks[start : start + 2]:
            process.join()
            assert process.exitcode == 0, f"a writer ended with {process.exitcode}"
    return of_step * world_size * steps


def measure_floor(run: Path, into: Path) -> dict[str, float]:
    """Seconds to decompress every payload, and to copy every file and have it on the disk."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    num_bytes = 0
    for writer in open_run(run).writers:
        for shard in writer.shards:
            num_bytes += decode_shard(shard)
            shard.release()
    decoded = time.perf_counter()
    shutil.copytree(run, into)
    copied, cpu_s = time.perf_counter(), time.process_time() - begin_cpu
    for path in into.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    synced = time.perf_counter()
    shutil.rmtree(into)
    return {
        "decode_s": decoded - begin, "copy_s": copied - decoded, "sync_s": synced - copied,
        "cpu_s": cpu_s, "decoded_bytes": num_bytes,
    }  # fmt: skip


def decode_share(run: Path, number: int, of: int, ready: Barrier, took: SimpleQueue[float]) -> None:
    """Decompress every so manieth of the run's shards, by size, once all are ready; seconds to `took`."""
    shards = [shard for writer in open_run(run).writers for shard in writer.shards]
    shards.sort(key=lambda shard: -shard.size_bytes)
    ready.wait(60)
    begin = time.perf_counter()
    for shard in shards[number::of]:
        decode_shard(shard)
        shard.release()
    took.put(time.perf_counter() - begin)


def measure_together(run: Path, num: int) -> float:
    """Seconds until so many processes have decompressed every payload between them."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(num)
    took: SimpleQueue[float] = context.SimpleQueue()
    shares = [context.Process(target=decode_share, args=(run, number, num, ready, took)) for number in range(num)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
        assert share.exitcode == 0, f"a process that decompresses ended with {share.exitcode}"
    return max(took.get() for _ in shares)


def decode_shard(shard: Any) -> int:
    """Decompress what a shard holds, batch by batch; the checks of a reader are not counted as floor."""
    import pyarrow as pa

    num_bytes = 0
    with pa.memory_map(str(shard.path)) as source:
        file = pa.ipc.open_file(source)
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            if batch.num_rows == 0:
                continue
            columns = [batch.column(name).to_pylist() for name in ("encoding", "payload_bytes", "dtype")]
            _, offsets, content = batch.column("data").buffers()
            ends = np.frombuffer(offsets, np.int64, batch.num_rows + 1).tolist()
            for row, (encoding, payload_bytes, dtype) in enumerate(zip(*columns, strict=True)):
                if encoding is not None:
                    data = content.slice(ends[row], ends[row + 1] - ends[row])
                    num_bytes += len(decode(encoding, data, payload_bytes, item_bytes(dtype)))
    return num_bytes


def measure_merge(run: Path, out: Path, jobs: int, limit_bytes: int | None) -> dict[str, Any]:
    """The figures of one merge by the command line, in processes of its own."""
    command = [sys.executable, "-m", "recorder", "merge", str(run), "-o", str(out), "--jobs", str(jobs), "--json"]

    def prepare() -> None:
        if jobs == 1:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=prepare)
    peaks: dict[int, tuple[int, int]] = {}
    ended = 0
    while ended == 0:
        for pid in (process.pid, *children(process.pid)):
            own, resident = memory(pid)
            known = peaks.get(pid, (0, 0))
            peaks[pid] = max(own, known[0]), max(resident, known[1])
        time.sleep(0.02)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stdout is not None
    with process.stdout as stdout:
        said = stdout.read()
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {said.decode()}")
    report: dict[str, Any] = json.loads(said)
    return {
        "seconds": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "bytes_out": report["bytes_out"],
        "peaks": list(peaks.values()),
    }


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory(pid: int) -> tuple[int, int]:
    """Bytes that a process has for itself, and all that is resident of it."""
    try:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
    except OSError:
        return 0, 0
    own, all_of_it = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return own, all_of_it


def check(out: Path) -> list[str]:
    """What is wrong with a merged run."""
    return [finding.text for finding in verify(open_run(out)) if finding.is_fault]


def parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("merge", __doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="payload of the run, decoded (default 4)")
    parser.add_argument("--writers", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mix", choices=MIX, default="assembled")
    parser.add_argument("--limit-mb", type=int, help="memory that each merging process may take for itself")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the runs lie")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    args = parser.parse_args(arguments)
    if args.writers < 1 or args.rounds < 1 or args.gb <= 0:
        parser.error("--writers, --rounds and --gb must be positive")
    if not args.dir.is_dir() or shutil.disk_usage(args.dir).free < 3e9 * args.gb:
        parser.error(f"--dir {args.dir} must be a directory with {3 * args.gb:.0f} GB free")
    return args


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    limit_bytes = None if args.limit_mb is None else args.limit_mb << 20
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-merge-") as folder:
        run = Path(folder) / "run"
        run.mkdir()
        begin = time.perf_counter()
        payload_bytes = write_run(run, args.writers, int(args.gb * 1e9), args.mix == "assembled")
        file_bytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        took_s = time.perf_counter() - begin
        print(
            f"run: {args.writers} writers, {payload_bytes / 1e9:.2f} GB of values, {file_bytes / 1e9:.2f} GB of files "
            f"(written in {took_s:.0f} s)"
        )
        rounds: list[dict[str, Any]] = []
        faults: list[str] = []
        for number in range(args.rounds):
            found: dict[str, Any] = {"floor": on_one_core(lambda: measure_floor(run, Path(folder) / "copy"))}
            found["together_s"] = measure_together(run, 2)
            for jobs in (1, 2):
                out = Path(folder) / f"merged-{jobs}"
                found[str(jobs)] = measure_merge(run, out, jobs, limit_bytes)
                if number == 0:
                    faults += check(out)
                shutil.rmtree(out)
            rounds.append(found)
        print_figures(rounds, payload_bytes)
        for fault in faults:
            print(f"FINDING {fault}")
        if args.json:
            args.json.write_text(json.dumps({"payload_bytes": payload_bytes, "rounds": rounds}, indent=1) + "\n")
    return 1 if faults else 0


def on_one_core(work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run something on one core alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return work()
    finally:
        os.sched_setaffinity(0, cores)


def ratio(rounds: list[dict[str, Any]], jobs: str, of_floor: tuple[str, ...], of_merge: str) -> float:
    """How fast a merge is against the floor of the same round; above 1 is faster than it."""
    ratios = [sum(one["floor"][name] for name in of_floor) / one[jobs][of_merge] for one in rounds]
    return float(statistics.median(ratios))


def print_figures(rounds: list[dict[str, Any]], payload_bytes: int) -> None:
    def median(pick: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(pick(one) for one in rounds)

    def rate(seconds: float) -> str:
        return f"{seconds:6.2f} s  {payload_bytes / 1e6 / seconds:6.0f} MB/s"

    assert all(one["floor"]["decoded_bytes"] == payload_bytes for one in rounds)
    floor_s = median(lambda one: one["floor"]["decode_s"] + one["floor"]["copy_s"])
    for name in ("decode_s", "copy_s", "sync_s"):
        print(f"  {name[:-2]:22} {rate(median(lambda one, name=name: one['floor'][name]))}")  # type: ignore[misc]
    print(f"  floor: decode + copy   {rate(floor_s)}")
    for jobs in ("1", "2"):
        seconds = median(lambda one, jobs=jobs: one[jobs]["seconds"])  # type: ignore[misc]
        ratios = {
            "the floor": ratio(rounds, jobs, ("decode_s", "copy_s"), "seconds"),
            "it with sync": ratio(rounds, jobs, ("decode_s", "copy_s", "sync_s"), "seconds"),
            "its CPU time": ratio(rounds, jobs, ("cpu_s",), "cpu_s"),
        }
        of_floor = ", ".join(f"{value:.2f} of {name}" for name, value in ratios.items())
        print(f"  merge --jobs {jobs}         {rate(seconds)}  {of_floor}")
        peaks = [f"{own / 1e6:.0f} ({resident / 1e6:.0f})" for own, resident in rounds[-1][jobs]["peaks"]]
        print(f"    peak MB of each process, its own (with mapped files): {', '.join(peaks)}")
    scale = statistics.median(one["1"]["seconds"] / one["2"]["seconds"] for one in rounds)
    print(f"  two jobs against one   {scale:.2f}")
    scale = statistics.median(one["floor"]["decode_s"] / one["together_s"] for one in rounds)
    print(f"  decode, two against one {scale:.2f}")
    print(f"  merged run             {rounds[-1]['1']['bytes_out'] / 1e9:.2f} GB")
