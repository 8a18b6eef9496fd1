"""What `recorder diff` costs where nothing differs: two equal runs, with fingerprints, and without.

    python -m scripts.benchmarks diff --gb 4 --dir /dev/shm

The run is written by the real writer; the second one is the same files by another name (hard links). Each time is that
of a fresh process, the start of the interpreter included; its memory is what it has for itself and what it has mapped.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_TENSOR
from scripts.benchmarks import parser_of
from tests.rigs.fakes import fake_staged

from .written import writing

NUM_MODULES = 64


def write_run(run: Path, num_bytes: int, tensor_bytes: int, keep: int) -> int:
    """A run of one rank; the number of its tensors."""
    values = np.random.default_rng(0).standard_normal(tensor_bytes // 4, np.float32).reshape(-1, 64)
    num_tensors = num_bytes // tensor_bytes
    with writing(run, codec="none") as (writer, put):
        for number in range(num_tensors):
            step, module = divmod(number, NUM_MODULES)
            values[0, 0] = number
            if put(fake_staged(values, module_path=f"layers.{module}", step=step, keep=keep)) % 256 == 0:
                assert writer.drain(600.0)
    return num_tensors


def main(arguments: list[str]) -> int:
    """Print a line for each kind of run."""
    parser = parser_of("diff", __doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--kb", type=int, default=256, help="of a tensor")
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args(arguments)
    kinds = {"with fingerprints": KEEP_FINGERPRINT, "values alone": 0}
    for kind, more in kinds.items():
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            one, two = Path(scratch) / "one", Path(scratch) / "two"
            keep = KEEP_TENSOR | KEEP_STATS | more
            num_tensors = write_run(one, int(options.gb * 1e9), options.kb << 10, keep)
            shutil.copytree(one, two, copy_function=os.link)
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, "-m", "recorder", "diff", str(one), str(two)]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            wall_s = time.perf_counter() - begin
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            assert said.splitlines()[-1].startswith("equal: "), said
            print(
                f"{kind}: two runs of {options.gb:g} GB, {num_tensors} tensors: {wall_s:.2f} s, "
                f"{cpu_s:.2f} s of processors, at most {after.ru_maxrss / 1e3:.0f} MB",
                flush=True,
            )
    return 0
