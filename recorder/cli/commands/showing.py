"""Shows runs, what is recorded of their modules, and their ranks while they record."""

from __future__ import annotations

from typing import Annotated

import typer

from ...analyze.layouts import layouts, where_reply
from ...analyze.layouts import reply_of as reply_of_layouts
from ...analyze.modules import show_reply
from ...analyze.stats import reply_of as reply_of_stats
from ...run.listing import ls_reply, top_reply
from ...run.reply import Reply
from ...run.run import open_run
from ...run.selection import GlobalOptions, Selection
from .. import options
from ..paths import run_and_module

EXAMPLES = {
    "ls": ("recorder ls recordings", "recorder ls @-1 --json"),
    "top": ("recorder top recordings", "recorder top @-1 --once"),
    "show": ("recorder show blocks.0.mlp.up", "recorder show @-2 'blocks.*' --statistic l2"),
    "stats": (
        "recorder stats recordings 'blocks.*' --site grad --by module --sort -absmax --top 10",
        "recorder stats recordings --site scalar --last 20",
    ),
    "layouts": ("recorder layouts recordings", "recorder layouts @-2 --json"),
}


def ls_command(
    path: Annotated[
        str | None, options.run_argument("PATH", "A run, or a folder of runs; by default RECORDER_DIR.")
    ] = None,
) -> Reply:
    """List the runs of a folder, or the writers of a run."""
    return ls_reply(path)


def show_command(
    path: options.RunOrModule = None,
    module: options.ModulePatterns = None,
    site: options.SiteOption = None,
    name: options.NameOption = None,
    step: options.StepOption = None,
    rank: options.RankOption = None,
    root: options.RootOption = None,
    last: Annotated[int, typer.Option(min=0, help="The number of last steps in the long table; 0: all.")] = 10,
    statistic: Annotated[
        str | None, typer.Option(help="The statistic to draw and to list: l2, mean, nan_count, ...; by default absmax.")
    ] = None,
    where: Annotated[
        bool,
        typer.Option("--where", help="Draw which rank had which part of a module's values, and how that is known."),
    ] = False,
    layout: options.LayoutOption = None,
    stage: Annotated[
        int | None,
        typer.Option(min=0, help="With --where: the pipeline stage, if several stages have such a module."),
    ] = None,
) -> Reply:
    """Show one module over steps and ranks, or a summary of several.

    A single word is a run or, if no run has this name, a module of the newest run.

    The column why says why rows have no statistics or stay with their rank. In the summary of modules a statistic is
    the largest of the last step's rows; min is the smallest. If histograms were recorded (keep=histogram), the last
    histogram of each value of a module is drawn: the share of the elements in each power of two. If units were recorded
    (keep=units), the long table shows how many units are always zero, at the last 1,000 of its steps.

    --where draws the values of one site, by default the outputs, at one step, by default the last. --layout belongs to
    --where. Exit code 1: a chunk is missing, or chunks contradict each other.
    """
    run, module = run_and_module(path, module)
    wanted = Selection(module=module, site=site, name=name, step=step, rank=rank, root=root)
    if where:
        options.refuse("not with --where, which draws the chunks of all ranks", rank=rank, statistic=statistic)
        return where_reply(run, wanted, layouts=layout or [], stage=stage)
    options.refuse("only with --where", layout=layout, stage=stage)
    return show_reply(run, wanted, last=last, statistic=statistic)


def stats_command(
    path: options.RunOrModule = None,
    module: options.ModulePatterns = None,
    site: options.SiteOption = None,
    name: options.NameOption = None,
    step: options.StepOption = None,
    rank: options.RankOption = None,
    root: options.RootOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Combine rows that agree in these: step, module, site, name, rank, with commas. Sites, phases and "
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
        int | None, typer.Option(min=0, help="The number of first rows to show; 0: all. With --sort: 50.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=0, help="The number of last rows to show; 0: all. Without --sort: 50.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Show the norms of the probe, too, where no row has the value at the step.")
    ] = False,
    scheduler: options.SchedulerOption = None,
) -> Reply:
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
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank, root=root)
    question = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    mapper = options.mapper_for(scheduler)
    return reply_of_stats(
        run, selection, question, by=by or [], with_probe=probe, sort=sort, top=top, last=last, mapper=mapper
    )


def layouts_command(path: options.RunPath = None) -> Reply:
    """Say how values lie over ranks, and how that is known.

    Each line counts values that lie in one way: their placements over the ranks that share a batch, and the dim along
    which the batches of other ranks lie. The ground is what rows or wrappers say (dtensor, fsdp, ddp), what a
    framework's marks and process groups say (marked; of DeepSpeed's ZeRO zero), what equal values or shapes suggest
    (inferred), or what is assumed. `recorder show MODULE --where` draws one value. The command looks at the first
    steps of the run, up to 200,000 rows of all ranks, and says which.

    Exit code 1: the ranks' values contradict a layout, of which the first value is named, or the run is damaged.
    """
    run = open_run(path)
    return reply_of_layouts(run, layouts(run))


def top_command(
    path: options.RunPath = None,
    once: Annotated[bool, typer.Option("--once", help="Show one snapshot, as is always done in a pipe.")] = False,
) -> Reply:
    """Watch a run while it records, one line a rank.

    It ends with the run, or on Ctrl-C. The column pool shows how full the memory for records on their way to disk is,
    and waited how long training waited for room in that memory. A line for several ranks shows the lowest steps/s, the
    fullest pool and the least disk left.

    Exit code 1: a rank was killed, is silent, has given up or has dropped values.
    """
    return top_reply(path, once=once)
