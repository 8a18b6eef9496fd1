"""Which injected errors `diff` names: `python -m tests.campaigns injected [NAME...]` prints the table.

Each error of `programs/inject.py` is compared with the sound training of the same layout, bit by bit, and with one
process that had the whole batch, beyond the noise that a twin of it shows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.step_range import Diff
from tests.rigs import jobs

from . import judging
from .judging import ALL, TWIN, Error, judge, one_of, open_run, opened

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[3]

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


class Launched(NamedTuple):
    """Trainings of two ranks that are launched for themselves, compared with one process and with a sound layout."""

    title: str
    script: Path
    errors: dict[str, Error]
    """By the name in the script."""
    sound: tuple[str, ...]

    def record(self, folder: Path) -> None:
        settings: Any = {"PYTHONPATH": str(REPOSITORY)}
        ranks = jobs.ranks(folder / "ranks", self.script, folder, **settings)
        jobs.succeeded(jobs.program(folder / "process", self.script, folder, **settings))
        jobs.succeeded(ranks)

    def compared(self, folder: Path, name: str, *, one: bool) -> Diff:
        """A training against the sound one of the same layout, or against one process that had the whole batch."""
        run = open_run(folder / name)
        if not one:
            base = self.errors[name].base if name in self.errors else name
            return diff(open_run(folder / base), run)
        return diff(open_run(folder / "one"), run, noise=[open_run(folder / "twin")])

    def show(self, folder: Path) -> int:
        """Print a line for each error, and return how many are named wrongly or are false alarms."""
        self.record(folder)
        num_bad = 0
        for one in (False, True):
            print(f"{self.title}, against {'one process' if one else 'the same layout'}:")
            for name, error in self.errors.items():
                verdict = judge(self.compared(folder, name, one=one), error)
                num_bad += verdict.word != "correctly"
                print(f"  {name:28} {verdict.word:10} {verdict.named}")
        for name in self.sound:
            is_equal = self.compared(folder, name, one=True).is_equal
            num_bad += not is_equal
            print(f"  {name:28} {'equal' if is_equal else 'false alarm'}")
        return num_bad


PARALLEL = Launched(
    "tensor and sequence parallel",
    PROGRAMS / "inject_parallel.py",
    {
        "dropout_seed": Error("drop", "forward", rank=1),
        "bias_on_each_rank": Error("blocks.1.mlp.down", "forward"),
        "norm_not_summed": Error("blocks.1.mlp_norm", "reduction", 1, base="sound_sequence"),
    },
    ("sound", "sound_sequence"),
)
PIPELINE = Launched(
    "pipeline",
    PROGRAMS / "inject_pipeline.py",
    {
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
    },
    ("sound",),
)


def record(folder: Path, names: list[str]) -> None:
    bases = dict.fromkeys(["sound", *(ERRORS[name].base for name in names)])
    sound = [f"{start}{base}{end}" for base in bases for start, end in (("", ""), ("one_", ""), ("one_", TWIN))]
    jobs.record_trainings(PROGRAMS / "inject.py", folder, [*sound, *names])


def compared(folder: Path, name: str, *, one: bool = False) -> Diff:
    """A training compared with the sound one of the same layout, or of one process."""
    base = ERRORS[name].base if name in ERRORS else name
    if not one:
        return diff(opened(folder, base), opened(folder, name))
    return judging.compared(folder, f"one_{base}", name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=one_of(ERRORS),
        metavar="NAME",
        help=f"all, and parallel ones, or some of {', '.join(ERRORS)}",
    )


def main(arguments: argparse.Namespace) -> int:
    names = arguments.names
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        record(folder, names or list(ERRORS))
        result = show(folder, names or list(ERRORS))
        if not names:
            result |= PARALLEL.show(folder / "parallel") + PIPELINE.show(folder / "pipeline") > 0
    return result


def show(folder: Path, names: list[str]) -> int:
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
