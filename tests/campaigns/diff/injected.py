"""Which injected errors `diff` names: `python -m tests.campaigns injected [NAME...]` prints the table.

Each error of `programs/inject.py` is compared with the sound training of the same layout, bit by bit, and with one
process that had the whole batch, beyond the noise that a twin of it shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.result import Diff
from tests.rigs import jobs

from . import injected_pipeline
from .judging import ALL, Error, judge

SCRIPT = Path(__file__).parent / "programs" / "inject.py"
PARALLEL_SCRIPT = Path(__file__).parent / "programs" / "inject_parallel.py"
REPOSITORY = Path(__file__).parents[3]
TWIN = "+jitter=1"

ERRORS = {
    "skipped": Error("blocks.1.mlp.down", "reduction"),
    "left_alone": Error("blocks.1.mlp.down", "reduction"),
    "scale_on_one_rank": Error("", "backward", rank=1),
    "stale_buffer": Error("blocks.1", "forward", 1, rank=1),
    "transposed": Error("blocks.1.attention.out", "forward"),
    "bias_twice": Error("blocks.1.mlp.up", "forward"),
    "mask": Error("blocks.1.attention", "forward"),
    "untied": Error("embed", "backward", 1),
    "reduced_in_bf16": Error(ALL, "reduction"),
    "summed": Error(ALL, "reduction"),
    "no_zero_grad": Error(ALL, "reduction", 1),
    "old_gradient": Error("blocks.1.mlp.down", "reduction", 2),
    "norm_eps": Error("blocks.1.norm2", "forward"),
    "momentum": Error(ALL, "update", 1, rank=1),
    "detached": Error("blocks.1", "backward"),
    "no_residual": Error("blocks.1", "forward"),
    "doubled_loss": Error("", "backward"),
    "activation": Error("blocks.1.mlp.act", "forward"),
    "swapped": Error("blocks.1.attention", "forward"),
    "attention_scale": Error("blocks.1.attention", "forward"),
    "clipping_skipped": Error(ALL, "reduction", base="clipped", rank=1),
    "frozen_trained": Error("frozen", "backward"),
    "label_shift": Error("", "backward"),
    "word_order": Error("", "forward", 1),
    "data": Error("", "forward", 1, rank=1),
    "position_offset": Error("", "forward"),
    "dropout_seed": Error("drop", "forward", rank=1),
    "rate": Error(ALL, "update"),
    "decayed_norm": Error("norm", "update"),
    "not_updated": Error("blocks.1.mlp.up", "update", rank=1),
    "custom_backward": Error("blocks.1.mlp.act", "backward"),
    "gradient_scaled_on_one_rank": Error("blocks.1.mlp.down", "reduction", 1, rank=1),
    "bit_flip": Error("blocks.1.mlp.up", "update", rank=1),
    "nan_on_one_rank": Error("blocks.1.mlp.act", "forward", 1, rank=1),
    "other_recompute": Error("blocks.1.mlp.thin", "recompute", base="checkpointed"),
    "wrong_buffer": Error("blocks.1", "start"),
    "unclipped": Error(ALL, "reduction", base="clipped"),
    "wrong_start": Error("blocks.1.norm1", "start", rank=1),
}
"""By the name in `programs/inject.py`."""

PARALLEL_ERRORS = {
    "dropout_seed": Error("drop", "forward", rank=1),
    "bias_on_each_rank": Error("blocks.1.mlp.down", "forward"),
    "norm_not_summed": Error("blocks.1.mlp_norm", "reduction", 1, base="sound_sequence"),
}
"""By the name in `programs/inject_parallel.py`: of tensor and sequence parallel ranks."""


def record_parallel(folder: Path) -> None:
    """Record those trainings, and what they are compared with."""
    settings: Any = {"PYTHONPATH": str(REPOSITORY)}
    ranks = jobs.ranks(folder / "ranks", PARALLEL_SCRIPT, folder, **settings)
    jobs.succeeded(jobs.python(folder / "process", PARALLEL_SCRIPT, folder, **settings))
    jobs.succeeded(ranks)


def compared_parallel(folder: Path, name: str, *, one: bool) -> Diff:
    """One of those beside the sound training of the same layout, or of one process."""
    error = PARALLEL_ERRORS.get(name)
    run = recorder.open_run(folder / name)
    if not one:
        return diff(recorder.open_run(folder / (error.base if error else name)), run)
    return diff(recorder.open_run(folder / "one"), run, noise=[recorder.open_run(folder / "twin")])


def record(folder: Path, names: list[str]) -> None:
    """Record the trainings of these names, and what they are compared with."""
    bases = dict.fromkeys(["sound", *(ERRORS[name].base for name in names)])
    sound = [f"{start}{base}{end}" for base in bases for start, end in (("", ""), ("one_", ""), ("one_", TWIN))]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *sound, *names]
    subprocess.run(command, check=True, env=jobs.environment({}), stdout=subprocess.DEVNULL, timeout=600)


def opened(folder: Path, name: str) -> recorder.Run:
    """A training that was recorded."""
    return recorder.open_run(folder / name / "recordings")


def compared(folder: Path, name: str, *, one: bool = False) -> Diff:
    """A training beside the sound one of the same layout, or of one process."""
    base = ERRORS[name].base if name in ERRORS else name
    if not one:
        return diff(opened(folder, base), opened(folder, name))
    return diff(opened(folder, f"one_{base}"), opened(folder, name), noise=[opened(folder, f"one_{base}{TWIN}")])


def known_name(text: str) -> str:
    """The name of an error, from the command line."""
    if text not in ERRORS:
        raise argparse.ArgumentTypeError(f"there is no error {text}; there are {', '.join(ERRORS)}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=known_name,
        metavar="NAME",
        help=f"all, and parallel ones, or some of {', '.join(ERRORS)}",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where something is not named correctly."""
    names = arguments.names
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        record(folder, names or list(ERRORS))
        result = show(folder, names or list(ERRORS))
        if not names:
            record_parallel(folder)
            result |= show_parallel(folder)
            injected_pipeline.record(folder / "pipeline")
            result |= injected_pipeline.show(folder / "pipeline") > 0
    return result


def show_parallel(folder: Path) -> int:
    """The same of tensor and sequence parallel ranks."""
    num_bad = 0
    for one in (False, True):
        print(f"tensor and sequence parallel, against {'one process' if one else 'the same layout'}:")
        for name, error in PARALLEL_ERRORS.items():
            verdict = judge(compared_parallel(folder, name, one=one), error)
            num_bad += verdict.word != "correctly"
            print(f"  {name:28} {verdict.word:10} {verdict.named}")
    for name in ("sound", "sound_sequence"):
        is_equal = compared_parallel(folder, name, one=True).is_equal
        num_bad += not is_equal
        print(f"  {name:28} {'equal' if is_equal else 'false alarm'}")
    return int(num_bad > 0)


def show(folder: Path, names: list[str]) -> int:
    """Print a line for each error, and how many are named."""
    counts = dict.fromkeys(("correctly", "wrongly", "not found", "false alarms"), 0)
    for one in (False, True):
        print(f"against {'one process' if one else 'the same layout'}:")
        for name in names:
            verdict = judge(compared(folder, name, one=one), ERRORS[name])
            counts[verdict.word] += 1
            print(f"  {name:28} {verdict.word:10} {verdict.named}")
        for name in dict.fromkeys(ERRORS[name].base for name in names) if one else ():
            found = compared(folder, name, one=True)
            counts["false alarms"] += not found.is_equal
            print(f"  {name:28} {'equal' if found.is_equal else 'false alarm'}")
    print(", ".join(f"{word} {count}" for word, count in counts.items()))
    return int(counts["correctly"] < 2 * len(names) or counts["false alarms"] > 0)
