"""The options that several commands share, and the refusal of options that would change nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import LookupFailedError


def complete_run(incomplete: str) -> list[str]:
    """Offer runs to the shell; like the other completions, it is imported only when the shell asks."""
    from .completing import complete_run

    return complete_run(incomplete)


def _complete_run_or_module(incomplete: str) -> list[str]:
    from .completing import complete_run_or_module

    return complete_run_or_module(incomplete)


def _complete_module(context: typer.Context, incomplete: str) -> list[str]:
    from .completing import complete_module

    return complete_module(context, incomplete)


_RUNS = (
    "A run's path or name, or its beginning; latest, @-2 (the last but one), FOLDER/@-1; also s3://... A folder stands "
    "for its newest run, and without RUN it is RECORDER_DIR."
)
RunPath = Annotated[  # a text: pathlib would make s3:/bucket of s3://bucket
    str | None, typer.Argument(metavar="RUN", help=_RUNS, autocompletion=complete_run)
]
RunOrModule = Annotated[str | None, typer.Argument(metavar="RUN", help=_RUNS, autocompletion=_complete_run_or_module)]
KeyFile = Annotated[
    str | None,
    typer.Option("--key-file", metavar="FILE", help="For a run in a store: the key that its daemons want."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
_MODULES = "a path, globs or re:... with commas, !... to leave out; '' is the root"
ModulePatterns = Annotated[
    str | None,
    typer.Argument(metavar="MODULE", help=f"Modules: {_MODULES}. Without: all.", autocompletion=_complete_module),
]
ModuleOption = Annotated[
    str | None, typer.Option(help=f"Only these modules: {_MODULES}.", autocompletion=_complete_module)
]
SiteOption = Annotated[str | None, typer.Option(help="Only these sites: output, grad, param,... with commas.")]
NameOption = Annotated[
    str | None, typer.Option(help="Only these names at the site, written like modules: weight, *.exp_avg.")
]
StepOption = Annotated[str | None, typer.Option(help="Steps: 7, 0:100, ::10, 0,5,7 or pow2.")]
RankOption = Annotated[str | None, typer.Option(help="Ranks, written like steps.")]
LossOption = Annotated[
    str,
    typer.Option(
        help="What a rank's loss is of its batch: mean (activation gradients are divided by the ranks), "
        "sum (they are taken as they are) or weighted (mean over ragged batches)."
    ),
]
LayoutOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=LAYOUT",
        help="How the ranks' values of some leaves lie, whatever was inferred: PATTERN is written like modules, and "
        "matches module_path:site:name; LAYOUT is shard(DIM), replicate, partial(sum), "
        "partial(avg) or per_rank. Repeatable.",
    ),
]

SchedulerOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Have the workers of a Dask cluster do it: the address of its scheduler, such as tcp://host:8786. They "
        "need the same file system and the same versions; the result is the same to the last byte.",
    ),
]


def refuse(why: str, **options: object) -> None:
    """Refuse options that would change nothing.

    Raises:
        LookupFailedError: one of the options was given; the message ends with `why`.
    """
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise LookupFailedError(f"{' and '.join(given)}: {why}")


PartialOption = Annotated[
    bool, typer.Option("--partial", help="Take values that lack ranks as the other ranks have them.")
]
