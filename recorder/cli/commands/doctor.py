from __future__ import annotations

from typing import Annotated

import typer

from ...analyze.doctor.reply import checks_of, environment_checks, reply_of
from ...run.reply import Reply
from ...run.run import open_run
from ..options import run_argument

EPILOG = "Examples: recorder doctor    recorder doctor recordings --strict"


def command(
    path: Annotated[str | None, run_argument("RUN", "A run; without: this environment.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 also where something may be a loss; see above.")
    ] = False,
) -> Reply:
    """Say why something was not, or will not be, recorded.

    For a run, it compares what rules and modules promise with what is there, for all ranks and steps, and gives the
    reason for each gap. Without a run, it checks this environment.

    Exit code 1: something is lost or was never recorded (lines that begin with "missing"). With --strict also: a gap
    that nothing recorded explains, values removed for the quota, a rank that ends in another step than the others, a
    writer that is still recording.
    """
    run = None if path is None else open_run(path)
    checks = environment_checks() if run is None else checks_of(run)
    return reply_of(run, checks, is_strict=strict)
