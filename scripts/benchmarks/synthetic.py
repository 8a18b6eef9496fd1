"""Makes a run of any size without a training, for `scale`: the files are those of `tests/rigs/synthetic.py`.

python -m scripts.benchmarks synthetic OUT --ranks 4096 --steps 10000
python -m scripts.benchmarks synthetic OUT --ranks 8 --steps 100 --nan-step 40 --nan-rank 5
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path

from scripts.benchmarks import parser_of
from tests.rigs.synthetic import Shape, write_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in (("every", 10), ("modules", 6), ("batch-rows", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that write")


def main(arguments: list[str]) -> int:
    parser = parser_of("synthetic", __doc__)
    parser.add_argument("out", type=Path, help="the run; a folder that does not exist")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    add_arguments(parser)
    for name in ("nan-step", "nan-rank", "differs-step", "differs-rank"):
        parser.add_argument(f"--{name}", type=int, metavar="N")
    given = parser.parse_args(arguments)
    if min(given.ranks, given.steps, given.every, given.jobs) < 1 or given.out.exists():
        parser.error("numbers are 1 or more, and OUT is a folder that does not exist")
    faults = [(given.nan_step, given.nan_rank), (given.differs_step, given.differs_rank)]
    for (step, rank), name in zip(faults, ("nan", "differs"), strict=True):
        if (step is None) != (rank is None):
            parser.error(f"--{name}-step and --{name}-rank belong together")
        if step is not None and (step not in range(0, given.steps, given.every) or not 0 <= rank < given.ranks):
            parser.error(f"--{name}-step {step}, --{name}-rank {rank}: no row is recorded there")
    nan, differs = (fault if fault[0] is not None else None for fault in faults)
    shape = Shape(
        ranks=given.ranks, steps=given.steps, every=given.every, modules=given.modules, batch_rows=given.batch_rows,
        nan=nan, differs=differs,
    )  # fmt: skip
    began_s = time.monotonic()
    write_run(given.out, shape, jobs=given.jobs)
    num_bytes = sum(path.stat().st_size for path in given.out.rglob("*") if path.is_file())
    rows = shape.ranks * shape.rows_a_rank
    print(f"{given.out}: {rows:,} rows, {num_bytes / 1e6:,.0f} MB, {time.monotonic() - began_s:.0f} s; {asdict(shape)}")
    return 0
