"""What `diff` says of trainings without an error: `python -m tests.campaigns clean [SEEDS]` prints the table.

Pairs of layouts that differ by rounding alone are compared beyond the noise of a single twin, and nothing may be named.
Then a training goes wrong from a later step on, by when rounding has driven the two apart: that must be.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.rigs import jobs

from .judging import ALL, TWIN, Error, compared, judge

SCRIPT = Path(__file__).parent / "programs" / "clean.py"
PAIRS = (("one", "ddp"), ("one", "fsdp"), ("ddp", "fsdp"), ("ddp", "ddp4"), ("untied", "tp"))
KINDS = (
    "sgd-float32", "adam-float32", "adamw-float32", "clipped-float32", "drifting-float32",
    "sgd-bfloat16", "adamw-bfloat16", "clipped-bfloat16", "drifting-bfloat16",
)  # fmt: skip
"""Optimizer and type of the parameters."""
LATER_ERRORS = {
    "no_decay": Error("blocks.1.mlp.up", "update", 3),
    "betas": Error(ALL, "update", 3),
    "skipped_group": Error("blocks.0.norm1", "update", 3),
    "scaled_gradient": Error("blocks.1.mlp.down", "reduction", 3),
    "scaled_loss": Error("", "backward", 3),
    "rough_activation": Error("blocks.1.mlp.act", "forward", 3),
}
"""By the name in `programs/clean.py`."""
DROWNED = ("scaled_gradient", "rough_activation")
"""Those that are smaller than what has drifted apart, where half a parameter has gradients of roundings alone."""


def record(folder: Path, names: list[str]) -> None:
    jobs.record_trainings(SCRIPT, folder, names)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("seeds", nargs="?", type=int, default=1, help="trainings of each kind (default 1)")


def main(arguments: argparse.Namespace) -> int:
    num_seeds: int = arguments.seeds
    num_bad = 0
    for kind in KINDS:
        counts = dict.fromkeys(PAIRS, 0)
        for seed in range(num_seeds):
            with tempfile.TemporaryDirectory() as scratch:
                names = [(a, b, f"-{kind}-{seed}") for a, b in PAIRS]
                record(Path(scratch), [one for a, b, end in names for one in (a + end, a + end + TWIN, b + end)])
                for pair in PAIRS:
                    found = compared(Path(scratch), *(f"{layout}-{kind}-{seed}" for layout in pair))
                    counts[pair] += not found.is_equal or bool(found.culprits)
        told = ", ".join(f"{a} and {b} {count}" for (a, b), count in counts.items())
        print(f"{kind:18} false alarms in {num_seeds} each: {told}", flush=True)
        num_bad += sum(counts.values())
    for kind in ("adamw-float32", "drifting-float32"):
        with tempfile.TemporaryDirectory() as scratch:
            num_bad += show_errors(Path(scratch), kind)
    return int(num_bad > 0)


def show_errors(folder: Path, kind: str) -> int:
    """Print a line for each later error, and return how many are not named."""
    one = f"one-{kind}-0"
    record(folder, [one, one + TWIN, *(f"ddp-{kind}-0@{name}" for name in LATER_ERRORS)])
    num_bad = 0
    for name, error in LATER_ERRORS.items():
        verdict = judge(compared(folder, one, f"ddp-{kind}-0@{name}"), error)
        is_drowned = kind.startswith("drifting") and name in DROWNED and verdict.word == "not found"
        num_bad += verdict.word != "correctly" and not is_drowned
        print(f"  {kind} {name:18} {verdict.word:10} {verdict.named}", flush=True)
    return num_bad
