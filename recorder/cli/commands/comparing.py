"""Compares two runs: value by value, or token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.align.align import align
from ...analyze.align.align import reply_of as reply_of_align
from ...analyze.diff.compare import Tolerance
from ...analyze.diff.diff import compare_runs, payload_bytes
from ...analyze.diff.renames import NO_RENAMES, read_renames
from ...analyze.diff.reply import reply_of as reply_of_diff
from ...analyze.diff.step_range import DiffOptions
from ...run.reply import Reply
from ...run.run import open_run
from ...run.selection import GlobalOptions, Selection
from .. import options
from ..output import progress
from ..paths import other_run, other_runs, two_runs

EXAMPLES = {
    "diff": ("recorder diff run-ddp run-fsdp --rtol 1e-4 --atol 1e-6", "recorder diff @-2 @-1 --site grad --brief"),
    "align": ("recorder align trainer engine", "recorder align trainer engine --weights", "recorder align grpo"),
}


def diff_command(
    a: Annotated[
        str | None,
        options.run_argument(
            "A", "A run, in whose order values are listed. Without B: a folder, whose last two runs are compared."
        ),
    ] = None,
    b: Annotated[str | None, options.run_argument("B", "The run to compare with A.")] = None,
    rtol: Annotated[
        float,
        typer.Option(
            min=0,
            help="Allowed |a - b| of two elements, relative to the larger of |a| and |b|. Elements near zero, which "
            "rounding alone moves by any factor, also need --atol.",
        ),
    ] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Allowed absolute difference |a - b| of two elements.")] = 0.0,
    ulp: Annotated[int, typer.Option(min=0, help="Allowed difference in ulps: steps between adjacent floats.")] = 0,
    noise: Annotated[
        list[str] | None,
        options.run_option(
            help="A repeat of A, or its twin under RECORDER_JITTER=1; may be given again. A difference counts only "
            "where it is more than 10 times what noise does at that tensor and step.",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        options.path_option("FILE", "Modules that have other names in B: lines such as encoder.layers = blocks."),
    ] = None,
    module: options.ModuleOption = None,
    site: options.SiteOption = None,
    name: options.NameOption = None,
    step: options.StepOption = None,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    common: Annotated[
        bool, typer.Option("--common", help="Ignore values that are missing in one run, or not comparable.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Lines of each table, also of single values; 0: all. By default few lines."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Print only the answer, without tables.")] = False,
    scheduler: options.SchedulerOption = None,
) -> Reply:
    """Compare two runs value by value, whatever their layouts.

    The global tensors are compared: one process, DDP and FSDP of any number of ranks. They are compared exactly, unless
    a tolerance is given; an element within any tolerance is equal. --loss and --layout hold for both runs.

    The answer comes first: equal, different, or equal as far as compared, and of how many values. Then come the
    culprits: the stages (forward, recompute, backward, reduction, update) that differ although all their inputs agree.
    The other values inherit their difference; they follow in the order in which they first differ.

    Columns: max abs is the largest difference of two elements; of max is that difference relative to the largest
    magnitude in either tensor; max rel and max ulp are of single elements, so that an element near zero may make them
    large without a meaning. The kind is partial where ranks of a value are missing. If both runs recorded histograms
    (keep=histogram), those of the first values that differ are shown side by side, in the same powers of two. If both
    recorded units (keep=units), the table of units says how many differ or are dead, and which is farthest apart.

    Exit code 1: they differ, rows of a run contradict each other, or values cannot be read. 2: they have nothing in
    common, or a --noise twin moved nothing.
    """
    runs = two_runs(a, b)
    twins = other_runs("--noise", noise or [], {"A": runs[0], "B": runs[1]})
    question = DiffOptions(
        selection=Selection(module=module, site=site, name=name, step=step),
        tolerance=Tolerance(rtol, atol, ulp),
        global_view=GlobalOptions(across_ranks=True, loss=loss, layouts=layout or []),
        noise=twins,
        renames=read_renames(rename) if rename is not None else NO_RENAMES,
        common=common,
    )
    with options.mapper_for(scheduler) as mapper, progress("diff", sum(map(payload_bytes, runs))) as report:
        result = compare_runs(*runs, question, report=report, mapper=mapper)
    return reply_of_diff(*runs, result, question, limit=limit, is_brief=brief)


def align_command(
    trainer: Annotated[str, options.run_argument("TRAINER", "The run of the trainer.")],
    engine: Annotated[
        str | None,
        options.run_argument("ENGINE", "The run that wrote the tokens; without ENGINE, it is TRAINER."),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Show only the parameters: which are stale, and by how many updates.")
    ] = False,
    noise: Annotated[
        list[str] | None,
        options.run_option(
            help="A second run of the engine on the same tokens, as in other batches; may be given again. A difference "
            "counts only where it is more than 10 times what the engine's own runs differ in.",
        ),
    ] = None,
    rename: Annotated[
        Path | None, options.path_option("FILE", "Modules that have other names in ENGINE, as for diff.")
    ] = None,
    step: Annotated[str | None, typer.Option(help="Steps of the trainer: 7, 0:100, ::10, 0,5,7 or pow2.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Lines of each table; 0: all.")] = None,
) -> Reply:
    """Name the module and token at which trainer and engine part.

    The command names the first module that differs by more than noise, with the token, its sample, and the reason.

    Rows are joined by token: by the samples' names and positions where both programs say them (recorder.tokens), else
    by the tokens themselves, whatever the batches, the padding and the order are. A token that only one side has is
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
    return reply_of_align(ours, theirs, found, limit=limit, of_weights=weights)
