"""Owns the options that several commands share, and how those that would change nothing are refused."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import LookupFailedError

RunPath = Annotated[  # a text: pathlib would make s3:/bucket of s3://bucket
    str, typer.Argument(metavar="RUN", help="A run directory, or a folder that holds exactly one; also s3://...")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
ModuleGlob = Annotated[str | None, typer.Argument(metavar="MODULE", help="A module's path or a glob; '' is the root.")]
ModuleOption = Annotated[str | None, typer.Option(help="Only this module, or those that a glob matches.")]
SiteOption = Annotated[str | None, typer.Option(help="Only these sites: output, grad, param,... with commas.")]
NameOption = Annotated[str | None, typer.Option(help="Only this name at the site, or a glob: weight, *.exp_avg.")]
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
        help="How the ranks' values of some leaves lie, whatever was found: PATTERN is a glob over "
        "module_path:site:name, LAYOUT is shard(DIM), replicate, partial(sum) or per_rank. Repeatable.",
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
    """Options that would change nothing.

    Raises:
        LookupFailedError: one of them was given.
    """
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise LookupFailedError(f"{' and '.join(given)}: {why}")
