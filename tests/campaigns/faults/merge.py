"""A merge that is killed before its n-th change of the file system, for many n, each time taken up again.

    python -m tests.campaigns merge FOLDER first|grown|mended [START] [STRIDE]

Forks from a process that has loaded everything, so that a kill costs no imports. Prints how many merges were killed.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import recorder.merge.unit
from recorder.errors import NotARunError
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.merging import assert_is_merge, batch, content, grow, make_small_run

from .support import is_killed_at


def visible(out: Path) -> list[Any] | None:
    try:
        return content(open_run(out))
    except NotARunError:
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="an empty one, where the run and its merges are made")
    parser.add_argument("scenario", choices=("first", "grown", "mended"), help="what was merged before")
    parser.add_argument("start", nargs="?", type=int, default=0, help="the first kill (default 0)")
    parser.add_argument("stride", nargs="?", type=int, default=1, help="a kill at every so many changes (default 1)")


def main(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    scenario: str = arguments.scenario
    recorder.merge.unit.UNIT_BYTES = 700  # several units
    run, begun, out = folder / "run", folder / "begun", folder / "out"
    make_small_run(run, steps=4)
    before: list[Any] | None = None
    if scenario == "grown":
        merge_run(open_run(run), begun)
        before = content(open_run(begun))
        grow(run, [3, 4])  # one step is recorded again, by a later attempt
    if scenario == "mended":
        shard = sorted((run / "rank=00001").rglob("tensors-*.arrow"))[0]
        sound = shard.read_bytes()
        at = sound.index((batch(0, 1) * 4).tobytes())
        shard.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        merge_run(open_run(run), begun)
        before = content(open_run(begun))
        shard.write_bytes(sound)
    whole = folder / "whole"
    merge_run(open_run(run), whole)
    after = content(open_run(whole))
    num_kills, number = 0, arguments.start
    while True:
        if begun.exists():
            shutil.copytree(begun, out)
        if not is_killed_at(number, lambda: merge_run(open_run(run), out)):
            break
        num_kills += 1
        seen = visible(out)
        assert seen in (None, before, after), f"killed at {number}: readers see a part"
        merge_run(open_run(run), out)
        assert content(open_run(out)) == after, f"killed at {number}: the merge that went on is another"
        if num_kills % 8 == 0:
            assert_is_merge(out, run)
        shutil.rmtree(out)
        number += arguments.stride
    print(num_kills)
    return 0
