from __future__ import annotations

from typing import Annotated

import typer

from ...analyze.stats import reply_of, statistics
from ...run.selection import GlobalOptions, Selection
from .. import options
from ..output import print_reply
from ..paths import run_and_module

EPILOG = (
    "Examples: recorder stats recordings 'blocks.*' --site grad --by module --sort -absmax --top 10    "
    "recorder stats recordings --site scalar --last 20"
)


def command(
    path: options.RunOrModule = None,
    module: options.ModulePatterns = None,
    site: options.SiteOption = None,
    name: options.NameOption = None,
    step: options.StepOption = None,
    rank: options.RankOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Combine over all that agree in these: step, module, site, name, rank, with commas. Sites, phases and "
            "modes are never mixed; ranks only with --global."
        ),
    ] = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="Show the global tensors: all ranks together, replicas counted once.")
    ] = False,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    partial: options.PartialOption = False,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Sort by a column: l2 or l2:asc, or -l2 or l2:desc, the largest first."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=0, help="Rows to show, counted from the start; 0: all. With --sort 50.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=0, help="Rows to show, counted from the end; 0: all. Without --sort 50.")
    ] = None,
    scheduler: options.SchedulerOption = None,
    as_json: options.Json = False,
) -> int:
    """Show statistics over steps, ranks and modules.

    --by and --global combine statistics exactly, without reading a tensor; --loss and --layout belong to --global. Then
    the column rows counts the rows that a line combines, and the column without counts those of them that have no
    statistics, and are in none of the numbers.

    Histograms that a rule with keep=histogram kept are drawn: the share of the values in each power of two. A line of
    several rows shows the sum of their histograms.

    A value with missing ranks has no numbers or, with --partial, the numbers of the other ranks.

    Exit code 1: something is damaged or missing; with --global also where ranks' rows contradict each other, or
    --layout does not fit them.
    """
    if top is not None:
        options.refuse("not with --top, which counts from the start", last=last)
    run, module = run_and_module(path, module)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    question = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    with options.mapper_for(scheduler) as mapper:
        answer = statistics(run, selection, question, by=by or [], with_histograms=not as_json, mapper=mapper)
    reply = reply_of(run, answer, by=by or [], across_ranks=across_ranks, sort=sort, top=top, last=last)
    return print_reply(reply, as_json=as_json)
