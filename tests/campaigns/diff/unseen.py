"""Errors and sound pairs that `diff` was not written against: `python -m tests.campaigns unseen` prints the table.

The model is convolutional and recurrent, the optimizers and most layouts are others than those of
`injected` and `clean`. Each error is compared with the sound training of the same layout
bit by bit, and with one process beyond the noise of a single twin. Sound pairs differ by rounding alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from recorder.analyze.diff.diff import diff
from tests.rigs import jobs

from .judging import ALL, TWIN, Error, compared, judge, one_of, opened

SCRIPT = Path(__file__).parent / "programs" / "unseen.py"


class Case(NamedTuple):
    layout: str
    optimizer: str
    error: Error
    variants: str = ""
    """Each with a dash before it."""


ERRORS = {
    "padding": Case("ddp", "nadam", Error("stages.1.depth", "forward")),
    "norm_groups": Case("fsdp2", "adagrad", Error("stages.1.norm", "forward")),
    "swapped_order": Case("ddp", "radam", Error("stages.1", "forward")),
    "half_point": Case("hsdp", "nadam", Error("stages.1.point", "forward")),
    "gate_detached": Case("ddp", "nesterov", Error("stages.1.squeeze", "backward")),
    "running_rate": Case("ddp", "adamax", Error("stages.1.track", "forward", rank=1)),
    "memory_kept": Case("fsdp2", "radam", Error("", "forward", 1)),
    "kinds_shifted": Case("ddp", "adagrad", Error("", "forward", 1)),
    "same_part": Case("fsdp2", "nesterov", Error("", "forward", 2, rank=1)),
    "unnormalised": Case("ddp", "rmsprop", Error("", "forward", rank=1)),
    "smoothed": Case("fsdp2", "nadam", Error("", "backward", 2)),
    "aux_weight": Case("ddp", "adamax", Error("", "backward")),
    "undivided": Case("ddp", "adagrad", Error("", "backward"), "-halves"),
    "frozen": Case("ddp", "nesterov", Error("stages.0.point", "backward")),
    "never_reduced": Case("ddp", "nadam", Error(ALL, "reduction", 1), "-halves"),
    "part_lost": Case("ddp", "adagrad", Error(ALL, "reduction"), "-halves"),
    "whole_sum": Case("fsdp2", "nesterov", Error(ALL, "reduction")),
    "not_replicated": Case("hsdp", "adagrad", Error(ALL, "reduction", 1)),
    "clamped": Case("ddp", "radam", Error("stages.0.depth", "reduction", 1, rank=0)),
    "clipped_by_value": Case("fsdp2", "nadam", Error(ALL, "reduction"), "-clipped"),
    "betas": Case("ddp", "nadam", Error(ALL, "update", rank=1)),
    "head_rate": Case("fsdp2", "rmsprop", Error("head", "update")),
    "decay": Case("ddp", "nadam", Error("stem", "update")),
    "state_lost": Case("ddp", "nadam", Error("rows", "update", 2)),
    "rows_swapped": Case("fsdp2", "adagrad", Error("condition", "update", 1)),
    "stale_shard": Case("fsdp2", "nesterov", Error("stages.1.point", "update", 1, rank=1)),
}
"""By the name in `programs/unseen.py`."""

PAIRS = (
    ("one-nadam", "ddp-nadam"),
    ("one-nadam", "fsdp2-nadam"),
    ("one-nadam", "hsdp-nadam"),
    ("one-nadam-reduced", "fsdp1-nadam-reduced"),
    ("one-adagrad-halves-dealt", "ddp-adagrad-halves"),
    ("one-radam", "ddp4-radam"),
    ("ddp-nesterov", "ddp4-nesterov"),
    ("ddp-adagrad", "fsdp2-adagrad"),
    ("one-adamax", "fsdp2-adamax"),
    ("one-rmsprop", "ddp-rmsprop"),
    ("one-adadelta", "fsdp2-adadelta"),
    ("one-adamw", "one-adamw-fused"),
    ("one-nadam", "one-nadam-loop"),
    ("one-nesterov", "one-nesterov-channels"),
    ("one-nesterov-still", "one-nesterov-still-halves"),
    ("ddp-radam", "ddp-radam-static-views"),
    ("ddp-adagrad", "ddp-adagrad-unused-zeros"),
    ("one-nadam-bf16", "ddp-nadam-bf16"),
    ("one-radam-checkpointed", "fsdp2-radam-checkpointed"),
    ("one-nadam-clipped", "fsdp2-nadam-clipped"),
    ("one-adamax-reduced", "one-adamax-reduced-tapped"),  # compiled modules have no local gradients
    ("one-lion", "ddp-lion"),
)
"""What differs by rounding alone."""


def show_error(folder: Path, name: str) -> int:
    """Print what `diff` names for an error, and return in how many of the two comparisons it is wrong."""
    case = ERRORS[name]
    kind = f"{case.optimizer}{case.variants}"
    dealt = "-dealt" if "halves" in kind else ""
    sound, one, broken = f"{case.layout}-{kind}", f"one-{kind}{dealt}", f"{case.layout}-{kind}@{name}"
    jobs.record_trainings(SCRIPT, folder, [sound, one, one + TWIN, broken])
    found = {
        "its layout": diff(opened(folder, sound), opened(folder, broken)),
        "one process": compared(folder, one, broken),
    }
    num_bad = 0
    for beside, difference in found.items():
        verdict = judge(difference, case.error)
        num_bad += verdict.word != "correctly"
        print(
            f"  {name:18} {case.layout:6} {kind:18} against {beside:12} {verdict.word:10} {verdict.named}", flush=True
        )
    return num_bad


def show_pair(folder: Path, a: str, b: str) -> int:
    """Print what `diff` names for a sound pair, and return 1 where it names anything."""
    jobs.record_trainings(SCRIPT, folder, [a, a + TWIN, b])
    found = compared(folder, a, b)
    is_bad = not found.is_equal or bool(found.culprits)
    named = ", ".join(f"{one.module_path!r} {one.phase} step {one.step}" for one in found.culprits)
    print(f"  {a:24} {b:28} {f'false alarm: {named}' if is_bad else 'nothing named'}", flush=True)
    return int(is_bad)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", type=one_of(ERRORS), metavar="NAME", help=f"errors alone: {', '.join(ERRORS)}"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the trainings are kept for a second look")


def main(arguments: argparse.Namespace) -> int:
    if arguments.keep:
        return show(arguments.names, arguments.keep)
    with tempfile.TemporaryDirectory() as scratch:
        return show(arguments.names, Path(scratch))


def show(names: list[str], folder: Path) -> int:
    num_wrong = sum(show_error(folder, name) for name in names or ERRORS)
    num_alarms = sum(show_pair(folder, a, b) for a, b in (() if names else PAIRS))
    num_errors, num_pairs = 2 * len(names or ERRORS), 0 if names else len(PAIRS)
    print(f"errors named {num_errors - num_wrong} of {num_errors}, false alarms {num_alarms} of {num_pairs}")
    return int(num_wrong + num_alarms > 0)
