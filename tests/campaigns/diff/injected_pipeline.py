"""Which errors of `programs/inject_pipeline.py`, in a pipeline of two stages, `diff` names; see `injected`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.result import Diff
from tests.rigs import jobs

from .judging import ALL, Error, judge

SCRIPT = Path(__file__).parent / "programs" / "inject_pipeline.py"
REPOSITORY = Path(__file__).parents[3]
ERRORS = {
    "rate": Error(ALL, "update", rank=1),
    "stale": Error(ALL, "update", 1, rank=1),
    "momentum": Error(ALL, "update", 1, rank=1),
    "lost_micro_batch": Error("", "backward", 1, rank=1),
    "scaled_micro_batch": Error("", "backward", 1, rank=1),
    "loss_scale": Error(ALL, "reduction"),
    "transposed": Error("", "forward", rank=1),
    "handed_back": Error("", "backward", rank=0),
    "dropout_seed": Error("drop", "forward", rank=1),
    "norm_eps": Error("layers.3.norm", "forward", rank=1),
}
"""By the name in the script."""


def record(folder: Path) -> None:
    """Record those trainings, and what they are compared with."""
    settings: Any = {"PYTHONPATH": str(REPOSITORY)}
    ranks = jobs.ranks(folder / "ranks", SCRIPT, folder, **settings)
    jobs.succeeded(jobs.python(folder / "process", SCRIPT, folder, **settings))
    jobs.succeeded(ranks)


def compared(folder: Path, name: str, *, one: bool) -> Diff:
    """One of those beside the sound pipeline, or beside one process that had the whole batch."""
    run = recorder.open_run(folder / name)
    if not one:
        return diff(recorder.open_run(folder / "sound"), run)
    return diff(recorder.open_run(folder / "one"), run, noise=[recorder.open_run(folder / "twin")])


def show(folder: Path) -> int:
    """Print a line for each error; how many are not named correctly, or are false alarms."""
    num_bad = 0
    for one in (False, True):
        print(f"pipeline, against {'one process' if one else 'the same layout'}:")
        for name, error in ERRORS.items():
            verdict = judge(compared(folder, name, one=one), error)
            num_bad += verdict.word != "correctly"
            print(f"  {name:28} {verdict.word:10} {verdict.named}")
    is_equal = compared(folder, "sound", one=True).is_equal
    print(f"  {'sound':28} {'equal' if is_equal else 'false alarm'}")
    return num_bad + (not is_equal)
