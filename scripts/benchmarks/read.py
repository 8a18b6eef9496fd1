"""What reading costs: opening, one tensor, listing and statistics of a million rows, and `verify` against a checksum.

    python -m scripts.benchmarks read                       1 GB of tensors, 1,000,000 rows of statistics
    python -m scripts.benchmarks read --gb 10 --rows 100000

The runs are written by the real writer. `verify` and the `crc32c` package alone over the same files take turns, the
best of three each, so that a slow minute of the machine strikes both; so are listing and statistics the best of three,
each with a run that it opens. Seconds are those of the clock, and in brackets those of the processor, which say more
where others are at work. Files come from the page cache, but for tensors of which it says otherwise.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_TENSOR
from recorder.run.run import open_run
from recorder.upkeep.verify import verify
from scripts.benchmarks import parser_of
from tests.rigs.fakes import fake_staged

from .processes import ROOT, clean_env, progress
from .stopwatch import Lap, Stopwatch
from .written import writing

NUM_MODULES = 100


def write_run(run: Path, num_rows: int, values_of_row: np.ndarray[Any, Any], keep: int, **settings: Any) -> None:
    """A run of one rank: each module once a step; `settings` of the writer."""
    paths = [f"layers.{module}" for module in range(NUM_MODULES)]
    per_drain = max(1, (256 << 20) // max(values_of_row.nbytes, 16 << 10))
    with writing(run, codec="none", **settings) as (writer, put):
        for row in range(num_rows):
            step, module = divmod(row, NUM_MODULES)
            values_of_row[0] = row
            if put(fake_staged(values_of_row, module_path=paths[module], step=step, keep=keep)) % per_drain == 0:
                progress(f"read: {row + 1:,} of {num_rows:,} rows written")
                assert writer.drain(600.0)


def lap_of(work: Callable[[], object]) -> Lap:
    watch = Stopwatch()
    work()
    return watch.lap()


def seconds(work: Callable[[], object]) -> float:
    return lap_of(work).wall_s


def checksum(run: Path) -> int:
    """Read every byte of a run once; how many there are."""
    num_bytes = 0
    for path in run.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                crc32c(content)
                num_bytes += len(content)
    return num_bytes


def forget(run: Path) -> None:
    """Take the files out of the page cache."""
    for path in run.rglob("*.arrow"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def of_tensors(folder: Path, gb: float, tensor_bytes: int, batch_bytes: int) -> dict[str, float]:
    """The figures of a run of tensors."""
    run_dir = folder / "tensors"
    num_rows = max(NUM_MODULES, int(gb * 1e9) // tensor_bytes)
    values = np.random.default_rng(0).standard_normal(tensor_bytes // 4, np.float32)
    write_run(run_dir, num_rows, values, KEEP_TENSOR | KEEP_STATS | KEEP_FINGERPRINT, batch_bytes=batch_bytes)
    opened = Stopwatch()
    run = open_run(run_dir)
    first_row = int(run["layers.0"].array(site="output", step=0, rank=0)[0])
    assert first_row == 0, first_row
    found = {"open_and_first_s": opened.lap().wall_s, "tensors": float(num_rows)}

    def another(seed: int) -> list[Lap]:
        laps = []
        for row in np.random.default_rng(seed).integers(0, num_rows, 50).tolist():
            step, module = divmod(row, NUM_MODULES)
            watch = Stopwatch()
            array = run[f"layers.{module}"].array(site="output", step=step, rank=0)
            laps.append(watch.lap())
            assert array[0] == np.float32(row) and len(array) == len(values)
        return laps

    forget(run_dir)
    from_disk = another(1)
    num_bytes = checksum(run_dir)  # and now all of it is in memory
    laps = another(2)
    found |= {
        "disk_ms": statistics.median(lap.wall_s for lap in from_disk) * 1e3,
        "tensor_ms": statistics.median(lap.wall_s for lap in laps) * 1e3,
        "tensor_max_ms": max(lap.wall_s for lap in laps) * 1e3,
        "tensor_cpu_ms": statistics.median(lap.total_cpu_s for lap in laps) * 1e3,
    }
    crc: list[Lap] = []
    verified: list[Lap] = []
    for _ in range(3):
        progress("read: verify")
        crc.append(lap_of(lambda: checksum(run_dir)))
        verified.append(lap_of(lambda: _verified(run_dir)))
    found |= {
        "bytes": float(num_bytes),
        "checksum_gb_s": num_bytes / 1e9 / min(lap.wall_s for lap in crc),
        "verify_gb_s": num_bytes / 1e9 / min(lap.wall_s for lap in verified),
        "verify_cpu_times": min(lap.total_cpu_s for lap in verified) / min(lap.total_cpu_s for lap in crc),
    }
    return found


def _verified(run_dir: Path) -> None:
    findings = list(verify(open_run(run_dir)))
    assert not findings, findings


def of_rows(folder: Path, num_rows: int) -> dict[str, float]:
    """The figures of a run of many rows."""
    run_dir = folder / "rows"
    write_run(run_dir, num_rows, np.ones(8, np.float32), KEEP_STATS)
    found = {"rows": float(num_rows)}
    keys = ["step", "rank", "module_path", "site", "name"]
    columns = ["step", "module_path", "mean", "std", "min", "max", "l2", "nan_count"]
    assert len(open_run(run_dir).to_pandas(columns=columns)) == num_rows  # and pandas is imported
    works: dict[str, Callable[[], object]] = {
        "open": lambda: open_run(run_dir),
        "list": lambda: open_run(run_dir).table(columns=keys),
        "pandas": lambda: open_run(run_dir).to_pandas(columns=columns),
    }
    for name, work in works.items():
        progress(f"read: {name}")
        laps = [lap_of(work) for _ in range(3)]
        found |= {f"{name}_s": min(lap.wall_s for lap in laps), f"{name}_cpu_s": min(lap.total_cpu_s for lap in laps)}
    for name in ("ls", "show"):
        command = [sys.executable, "-m", "recorder", name, str(run_dir)]
        progress(f"read: recorder {name}")
        found[f"command_{name}_s"] = seconds(
            lambda command=command: subprocess.run(  # type: ignore[misc]
                command, cwd=ROOT, env=clean_env(), check=True, stdout=subprocess.DEVNULL, timeout=600
            )
        )
    return found


def main(arguments: list[str]) -> int:
    parser = parser_of("read", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="of tensors, up to 10 (default 1)")
    parser.add_argument("--kb", type=int, default=256, help="of a tensor (default 256)")
    parser.add_argument("--batch-mb", type=int, default=8, help="MiB of a batch (default 8)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of statistics (default 1,000,000)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the runs lie")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures")
    args = parser.parse_args(arguments)
    if not 0 < args.gb <= 10 or args.kb < 1 or args.batch_mb < 1 or args.rows < 1:
        parser.error("--gb must be above 0 and at most 10, --kb, --batch-mb and --rows 1 or more")
    if not args.dir.is_dir() or shutil.disk_usage(args.dir).free < args.gb * 1.3e9 + args.rows * 500:
        parser.error(f"--dir {args.dir} must be a directory with {args.gb * 1.3 + args.rows * 5e-7:.1f} GB free")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-read-") as folder:
        tensors = of_tensors(Path(folder), args.gb, args.kb << 10, args.batch_mb << 20)
        shutil.rmtree(Path(folder) / "tensors")
        rows = of_rows(Path(folder), args.rows)
    print(f"{tensors['bytes'] / 1e9:.2f} GB, {tensors['tensors']:,.0f} tensors of {args.kb} KiB")
    print(f"  open and the first tensor   {tensors['open_and_first_s']:.2f} s")
    print(
        f"  another tensor              {tensors['tensor_ms']:.1f} ms ({tensors['tensor_cpu_ms']:.1f}), "
        f"at most {tensors['tensor_max_ms']:.1f} ms of 50; {tensors['disk_ms']:.0f} ms from the disk"
    )
    part = tensors["verify_gb_s"] / tensors["checksum_gb_s"]
    print(
        f"  verify                      {tensors['verify_gb_s']:.2f} GB/s, the checksum alone "
        f"{tensors['checksum_gb_s']:.2f} GB/s: {part:.2f} of it; "
        f"{tensors['verify_cpu_times']:.2f} times its CPU time"
    )
    print(f"{rows['rows']:,.0f} rows of statistics")
    texts = {"open": "open", "list": "open, list step to name", "pandas": "open, statistics into pandas"}
    for name, text in texts.items():
        print(f"  {text:36} {rows[f'{name}_s']:.2f} s ({rows[f'{name}_cpu_s']:.2f})")
    print(f"  recorder ls, a fresh process         {rows['command_ls_s']:.2f} s; show {rows['command_show_s']:.2f} s")
    if args.json:
        args.json.write_text(json.dumps({"tensors": tensors, "rows": rows}, indent=1) + "\n")
    return 0
