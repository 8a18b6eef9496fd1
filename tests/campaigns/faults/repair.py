"""A repair that is killed before its n-th change of the file system, for many n, and each time run again.

    python -m tests.campaigns repair [STRIDE]

Forks from a process that has loaded everything and started no thread. Prints how many repairs were killed.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recorder.records import KEEP_STATS
from recorder.run.run import Run, open_run
from recorder.upkeep.repair import repair_run
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig

from .support import copy_live, is_killed_at, memory_folder


def make_small_run(folder: Path) -> Path:
    """What a dead writer left: a sealed shard, and an open one of each kind with several batches, one damaged."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    rig = Rig(folder / "live", shard_rows=6, sync_interval_s=3600.0).start()
    rig.writer.set_manifest({"host": os.uname().nodename, "pid": ended.pid, "rank": 0})
    for step in range(5):
        rig.put(np.full(50, step, np.float32), step=step)
        rig.put(np.full(50, step, np.float32), step=step, keep=KEEP_STATS)
        rig.put(np.full(9, step, np.float32), step=step)
        assert rig.drain()
    wait_until(lambda: rig.manifest().get("pid") == ended.pid)
    copy_live(folder / "live", folder / "run")
    rig.close()
    (path,) = (folder / "run").glob("rank=*/*/_stats-*.arrow.open")
    content = bytearray(path.read_bytes())
    content[content.index(b'{"number":1')] ^= 0x10
    path.write_bytes(content)
    return folder / "run"


def rows_of(run: Path) -> dict[int, dict[str, Any]]:
    table = open_run(run).table()
    return {row["seq"]: row for row in table.to_pylist()}


def repair_all(run: Run) -> None:
    for _ in repair_run(run):
        pass


def names_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stride", nargs="?", type=int, default=1, help="a kill at every so many changes (default 1)")


def main(arguments: argparse.Namespace) -> int:
    stride = arguments.stride
    logging.getLogger("recorder").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        run = make_small_run(Path(folder))
        before, whole = rows_of(run), Path(shutil.copytree(run, Path(folder) / "whole"))
        outcomes = [outcome.what for outcome in repair_run(open_run(whole))]
        assert outcomes.count("sealed") == 2 and outcomes.count("kept") == 1, outcomes
        assert rows_of(whole) == before
        names = names_of(whole)
        number = num_kills = 0
        while True:
            copy = Path(shutil.copytree(run, Path(folder) / "copy"))
            if not is_killed_at(number, partial(repair_all, open_run(copy))):
                break
            num_kills += 1
            assert rows_of(copy) == before, f"killed at change {number}: other rows"
            list(repair_run(open_run(copy)))
            assert rows_of(copy) == before, f"killed at change {number}: other rows after the repair that went on"
            assert names_of(copy) == names, f"killed at change {number}: {set(names_of(copy)) ^ set(names)}"
            shutil.rmtree(copy)
            number += stride
    print(num_kills)
    return 0
