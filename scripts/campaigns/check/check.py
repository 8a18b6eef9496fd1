"""What `check` says of trainings with a fault, and of sound ones: `python -m scripts.campaigns check` prints the table.

Of each fault the right rule has to name the right module. Of a sound training nothing may be said above a note.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import recorder
from recorder.analyze.check.check import Checked, check
from recorder.checks.rule import Severity
from tests.distributed import jobs

from .programs.train import FAULTS, SOUND

SCRIPT = Path(__file__).parent / "programs" / "train.py"
ANY = "*"


class Named(NamedTuple):
    """What has to be said of a fault."""

    rule: str
    module: str
    """`ANY` where all of the model has it."""
    ranks: tuple[int, ...] = (0,)


EXPECTED = {
    "nan_gradient": Named("nonfinite", "blocks.2.down"),
    "nan_weight": Named("nonfinite", "blocks.1.up"),
    "loud_batch": Named("spike", ANY),
    "one_huge_gradient": Named("jump", "blocks.1.up"),
    "rate_of_zero": Named("unchanged", ANY),
    "rate_far_too_high": Named("update", ANY),
    "rate_too_high_sgd": Named("update", ANY),
    "deep_sigmoids": Named("vanishing", "blocks.0.up"),
    "weights_too_large": Named("exploding", ANY),
    "detached_block": Named("no_gradient", "blocks.0.up"),
    "zeroed_gradient": Named("no_gradient", "blocks.2.up"),
    "group_without_rate": Named("unchanged", "blocks.1.down"),
    "frozen_layer": Named("no_gradient", "blocks.2.up"),
    "dead_by_bias": Named("dead", "blocks.1.act"),
    "dead_first": Named("dead", "blocks.0.act"),
    "saturated_tanh": Named("saturated", "blocks.2.act"),
    "one_layer_scaled": Named("initialisation", "blocks.3.down"),
    "constant_weight": Named("initialisation", "blocks.2.up"),
    "odd_rank": Named("outlier_rank", "blocks.0.up", (2,)),
    "same_batches": Named("repeated_batch", "", (1,)),
    "momentum_of_one": Named("running_statistics", "bn1"),
}
"""By the name in `programs/train.py`."""


def record(folder: Path, names: list[str]) -> None:
    """Record trainings of these names."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *names]
    subprocess.run(command, check=True, env=jobs.environment({}), capture_output=True, timeout=1200)


def is_named(checked: Checked, wanted: Named) -> bool:
    """Whether a fault is named by its rule, above a note, at its module and rank."""
    return any(
        (one.rule, one.severity > Severity.NOTE) == (wanted.rule, True)
        and wanted.module in (ANY, one.module_path)
        and set(wanted.ranks) <= set(one.ranks)
        for one in checked.findings
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="trainings; by default all")


def main(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a fault is not named, or something is said of a sound training."""
    names: list[str] = arguments.names or [*SOUND, *FAULTS]
    num_bad = 0
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            record(Path(scratch), [name])
            checked = check(recorder.open_run(Path(scratch) / name / "recordings"))
        loud = sorted({one.rule for one in checked.findings if one.severity > Severity.NOTE})
        if name in SOUND:
            is_right, what = not loud, "quiet" if not loud else "FALSE ALARM"
        else:
            wanted = EXPECTED[name]
            is_right = is_named(checked, wanted)
            module = "any module" if wanted.module == ANY else repr(wanted.module)
            what = f"{'found' if is_right else 'MISSED'}: {wanted.rule} at {module}"
        num_bad += not is_right
        kind = "sound" if name in SOUND else "fault"
        print(f"{kind}  {name:20} {what:46} said: {', '.join(loud) or '-'}", flush=True)
    print(f"{len(names) - num_bad} of {len(names)} as they have to be")
    return int(num_bad > 0)
