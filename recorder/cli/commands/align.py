from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.align.align import align, reply_of
from ...analyze.diff.renames import NO_RENAMES, read_renames
from ...run.reply import Reply
from ...run.run import open_run
from .. import options
from ..paths import other_run, other_runs

EPILOG = "Examples: recorder align trainer engine    recorder align trainer engine --weights    recorder align grpo"


def command(
    trainer: Annotated[str, options.run_argument("TRAINER", "The run of the trainer.")],
    engine: Annotated[
        str | None,
        options.run_argument("ENGINE", "The run of what wrote the tokens; without it TRAINER generates, too."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Show the parameters alone: which are stale, and by how many updates.")
    ] = False,
    noise: Annotated[
        list[str] | None,
        options.run_option(
            help="A second run of the engine on the same tokens, as in other batches; may be given again. A difference "
            "counts only where it is more than 10 times what the engine's own runs differ in.",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=options.local_path, help="Modules that have other names in ENGINE, as for diff."
        ),
    ] = None,
    step: Annotated[str | None, typer.Option(help="Steps of the trainer: 7, 0:100, ::10, 0,5,7 or pow2.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Lines of each table; 0: all.")] = None,
) -> Reply:
    """Name the module and token at which trainer and engine part.

    The module is the first one beyond noise, with the token, its sample, and the reason.

    Rows are joined by token: by the samples' names and positions where both programs say them (recorder.tokens), else
    by the tokens themselves, whatever the batches, the padding and the order are. A token that one side alone has is
    left out.

    The reasons are tried in turn: weights, inputs (positions), type, and then the module itself.

    Where values differ by no more than rounding may, the answer is "cannot tell": see --noise.

    Exit code 1: they part, or tokens or weights differ. 2: they have no token in common.
    """
    ours = open_run(trainer)
    theirs = None if engine is None else other_run(engine, {"TRAINER": ours})
    others = other_runs("--noise", noise or [], {"TRAINER": ours} | ({} if theirs is None else {"ENGINE": theirs}))
    renames = read_renames(rename) if rename is not None else NO_RENAMES
    found = align(ours, theirs, noise=others, renames=renames, step=step)
    return reply_of(ours, theirs, found, limit=limit, of_weights=weights)
