"""Owns the commands' names, options and exit codes; what they do is in a module each.

Exit codes: 0 fine, 1 a finding, 2 misuse or unreadable input, 130 interrupted. An error of ours is one line on stderr,
no traceback, and with --json the document on stdout, too.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .. import __version__
from ..errors import LookupFailedError, RecorderError
from .options import (
    Json,
    LayoutOption,
    LossOption,
    ModuleOption,
    ModulePatterns,
    NameOption,
    PartialOption,
    RankOption,
    RunOrModule,
    RunPath,
    SchedulerOption,
    SiteOption,
    StepOption,
    complete_run,
    refuse,
)
from .output import LineHandler, print_json, printable_line

_PACKAGE = (__package__ or "recorder").partition(".")[0]

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look at what the recorder wrote while a model trained.",
    epilog="Record with: RECORDER=1 torchrun --nproc-per-node 2 train.py",
)

_READER_GONE = 141
"""What a shell says of a program that wrote to a pipe that nobody reads any more."""
_MISUSE = 2
_INTERRUPTED = 130
_COMPLETION = ("--install-completion", "--show-completion")
_SHELL_IS_NAMED = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"
"""With it typer's options for completion take the name of a shell; without it they take none, and would ignore one."""
_UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Of typer's own copy of click, or of click itself where typer has none."""


def run_command(arguments: list[str]) -> NoReturn:
    """Run one command and exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # spark lines, on a terminal without Unicode
    library = logging.getLogger(_PACKAGE)
    library.handlers = [LineHandler()]
    library.propagate = False
    stdout = sys.stdout
    if any(option in _COMPLETION and not word.startswith("-") for option, word in pairwise(arguments)):
        os.environ[_SHELL_IS_NAMED] = "1"
    try:
        sys.exit(app(arguments, prog_name="recorder", standalone_mode=False))
    except SystemExit:
        if sys.stdout is stdout:
            raise
        sys.exit(_READER_GONE)  # the library has put another in its place, and says 1, which would be a finding
    except typer.Abort:
        sys.exit(_INTERRUPTED)
    except _UsageError as error:
        error.show()
        message = error.format_message()
    except (RecorderError, OSError, MemoryError) as error:
        message = str(error) or "out of memory"
        print(f"recorder: {printable_line(message)}", file=sys.stderr)
    if "--json" in arguments:
        print_json({"error": {"message": message, "exit_code": _MISUSE}})
    sys.exit(_MISUSE)


def _local_path(text: str) -> Path:
    from .paths import local_path

    return local_path(text)


def _complete_command(incomplete: str) -> list[str]:
    return [name for name in command_names() if name.startswith(incomplete)]


def command_names() -> list[str]:
    """The commands, as they are typed."""
    return [one.name or str(getattr(one.callback, "__name__", "")) for one in app.registered_commands]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"recorder {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at what the recorder wrote while a model trained."""


@app.command(epilog="Example: recorder ls recordings")
def ls(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="A run, or a folder of runs; without: RECORDER_DIR.", autocompletion=complete_run
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the runs of a folder, or the writers of a run."""
    from .ls import list_path

    raise typer.Exit(list_path(path, as_json=as_json))


@app.command(epilog="Examples: recorder show layers.0.mlp    recorder show @-2 'layers.*' --statistic l2")
def show(
    path: RunOrModule = None,
    module: ModulePatterns = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    last: Annotated[int, typer.Option(min=0, help="Steps in the long table, counted from the end; 0: all.")] = 10,
    statistic: Annotated[
        str | None, typer.Option(help="The statistic to draw and to list: l2, mean, nan_count, ...; else absmax.")
    ] = None,
    where: Annotated[
        bool,
        typer.Option("--where", help="Draw which rank had which part of a module's values, and how that is known."),
    ] = False,
    layout: LayoutOption = None,
    stage: Annotated[
        int | None,
        typer.Option(min=0, help="With --where: of a pipeline, this stage's, where several have such a module."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one module over steps and ranks, or a summary of several.

    One word alone is a run, or where there is none of that name a module of the newest run.

    The column why, where there is one, says why rows have no statistics or stay with their rank. In the summary of
    modules a statistic is the largest of the last step's rows; min is the smallest.

    With --where: the values of one site, by default the outputs, at one step, by default the last. --layout belongs to
    it. Exit code 1: a piece is missing, or pieces contradict each other.
    """
    from ..analyze.selection import Selection
    from . import show as command
    from .paths import run_and_module

    run, module = run_and_module(path, module)
    wanted = Selection(module=module, site=site, name=name, step=step, rank=rank)
    if where:
        from .where import show_where

        refuse("not with --where, which draws the pieces of all ranks", rank=rank, statistic=statistic)
        if module is None:
            raise LookupFailedError("--where: name the module whose values to draw; '' is the root")
        raise typer.Exit(show_where(run, wanted, layouts=layout or [], stage=stage, as_json=as_json))
    refuse("only with --where", layout=layout, stage=stage)
    raise typer.Exit(command.show(run, wanted, last=last, statistic=statistic, as_json=as_json))


@app.command(epilog="Example: recorder first recordings")
def first(path: RunPath = None, as_json: Json = False) -> None:
    """Name the first NaN or infinity and the first replica that differs.

    Buffers that differ between ranks count where DDP was told not to broadcast them (broadcast_buffers=False) and they
    still differ at the end; else they are a note.

    Exit code 1: there is one of these, or the run is damaged, so that there may be one.
    """
    from ..read.run import open_run
    from .first import show_first

    raise typer.Exit(show_first(open_run(path), as_json=as_json))


@app.command(epilog="Example: recorder stats 'layers.*' --site grad --by module --sort -absmax --top 10")
def stats(
    path: RunOrModule = None,
    module: ModulePatterns = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Combine over all that agree in these: step, module, site, name, rank, with commas. Sites, phases and "
            "modes are never mixed; ranks only with --global."
        ),
    ] = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="Of the global tensors: all ranks together, replicas counted once.")
    ] = False,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    partial: PartialOption = False,
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
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> None:
    """Show statistics over steps, ranks and modules.

    --by and --global combine them exactly, without reading a tensor; --loss and --layout belong to --global. Where
    they are combined, the column rows is how many rows stand in a line, and without is how many of these have no
    statistics and so are in none of its numbers.

    Values of which ranks are missing have no numbers, or, with --partial, those of the other ranks.

    Exit code 1: something is damaged or missing; with --global also where ranks' rows contradict each other, or
    --layout does not fit them.
    """
    from ..analyze.selection import GlobalOptions, Selection
    from .paths import run_and_module
    from .stats import show_stats

    if top is not None:
        refuse("not with --top, which counts from the start", last=last)
    run, module = run_and_module(path, module)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    shown: dict[str, Any] = {"by": by or [], "sort": sort, "top": top, "last": last}
    raise typer.Exit(show_stats(run, selection, options, **shown, scheduler=scheduler, as_json=as_json))


@app.command(epilog="Example: recorder diff run-ddp run-fsdp --rtol 1e-4 --atol 1e-6")
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run; its order of execution counts.", autocompletion=complete_run)
    ] = "@-2",
    b: Annotated[
        str, typer.Argument(metavar="B", help="The run to compare with it.", autocompletion=complete_run)
    ] = "@-1",
    rtol: Annotated[
        float,
        typer.Option(
            min=0,
            help="Allowed |a - b| of two elements, relative to the larger of |a| and |b|. Elements near zero, which "
            "rounding alone moves by any factor, need --atol beside it.",
        ),
    ] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Allowed |a - b| of two elements, as it is.")] = 0.0,
    ulp: Annotated[int, typer.Option(min=0, help="Allowed representable numbers between two floats.")] = 0,
    noise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            autocompletion=complete_run,
            help="A repeat of A, or its twin under RECORDER_JITTER=1; may be given again. A difference counts only "
            "where it is more than 10 times what noise does at that tensor and step.",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=_local_path,
            help="Modules that are called otherwise in B: lines such as encoder.layers = blocks.",
        ),
    ] = None,
    module: ModuleOption = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    common: Annotated[
        bool, typer.Option("--common", help="What only one has, or nothing comparable of, does not count.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Lines of each table, those of single values too; 0: all. Else few, of modules."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The answer alone, without tables.")] = False,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> None:
    """Compare two runs value by value, whatever their layouts.

    The global tensors are compared: one process, DDP and FSDP of any number of ranks. Exactly, unless a tolerance is
    given; an element within any of them is equal. --loss and --layout hold for both runs.

    The answer comes first: equal, different, or equal as far as compared, and of how many values. Then the culprits:
    the stages (forward, recompute, backward, reduction, update) that differ although all that they are made from
    agrees. The rest inherits, in the order in which it differs first.

    Columns: max abs is the largest difference of two elements; of max the same, relative to the largest magnitude in
    either tensor; max rel and max ulp are of single elements, so that one near zero may make them large and mean
    nothing. Of values of which a run lacks ranks the kind is partial.

    Exit code 1: they differ, rows of a run contradict each other, or values cannot be read. 2: they have nothing in
    common, or a --noise twin moved nothing.
    """
    from ..analyze.compare import Tolerance
    from ..analyze.renames import NO_RENAMES, read_renames
    from ..analyze.selection import GlobalOptions, Selection
    from ..read.run import open_run
    from .diff import show_diff

    selection = Selection(module=module, site=site, name=name, step=step)
    runs = (open_run(a), open_run(b))
    tolerance = Tolerance(rtol, atol, ulp)
    options = GlobalOptions(across_ranks=True, loss=loss, layouts=layout or [])
    renames = read_renames(rename) if rename is not None else NO_RENAMES
    twins = [open_run(path) for path in noise or []]
    found = show_diff(
        *runs,
        selection,
        tolerance,
        options,
        noise=twins,
        renames=renames,
        common=common,
        limit=limit,
        is_brief=brief,
        scheduler=scheduler,
        as_json=as_json,
    )
    raise typer.Exit(found)


@app.command(epilog="Example: recorder export recordings -o grads.parquet --site grad")
def export(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="PATH", help="The file to write.", parser=_local_path)],
    path: RunPath = None,
    to: Annotated[str | None, typer.Option(help="parquet, npz or safetensors; by default what PATH ends with.")] = None,
    module: ModuleOption = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="The global tensors instead of each rank's own.")
    ] = False,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    partial: PartialOption = False,
    payload: Annotated[
        bool, typer.Option("--payload", help="Parquet with the tensors' bytes, too, in the column data.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> None:
    """Write statistics as Parquet, tensors as npz or safetensors.

    Tensors have names such as step=3/layers.0.mlp/output. --loss and --layout belong to --global. A file with a model's
    own names, for load_state_dict, is written by recorder merge --to.

    numpy has no bfloat16 and no 8-bit floats: in npz they are float32, which holds them exactly.

    A tensor of which ranks are missing is left out, or, with --partial, given as the other ranks have it. So are values
    that cannot be read, and each is named.

    Exit code 1: something is damaged or missing; with --global also where ranks' rows contradict each other, or
    --layout does not fit them, and the file holds the ranks' own.
    """
    from ..analyze.selection import GlobalOptions, Selection
    from ..read.run import open_run
    from .export import export_typed

    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    run = open_run(path)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    raise typer.Exit(
        export_typed(
            run, out, selection, options, to=to, payload=payload, force=force, scheduler=scheduler, as_json=as_json
        )
    )


@app.command(epilog="Example: recorder top recordings")
def top(
    path: RunPath = None,
    once: Annotated[bool, typer.Option("--once", help="One snapshot; in a pipe always so.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a run while it records, one line a rank.

    Until the run is over or Ctrl-C. pool is how full the host memory is on its way to disk, waited how long training
    stood still for room in it. Of several ranks in one line, steps/s is the slowest's, pool the fullest's, disk left
    the least.

    Exit code 1: a rank was killed, is silent, has given up or has dropped values.
    """
    from ..read.which import find_run
    from .top import show_top

    raise typer.Exit(show_top(*find_run(path), once=once, as_json=as_json))


@app.command(epilog="Example: recorder verify recordings")
def verify(path: RunPath = None, as_json: Json = False) -> None:
    """Check every byte of a run.

    Checksums, seals, footers, indexes and accounts. Exit code 1: something is wrong.
    """
    from ..read.run import open_run
    from .verify import verify_run

    raise typer.Exit(verify_run(open_run(path), as_json=as_json))


@app.command(epilog="Example: recorder repair recordings --dry-run")
def repair(
    path: RunPath = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    assume_dead: Annotated[
        bool,
        typer.Option(
            "--assume-dead",
            help="The job is over: also writers on other hosts, or with a pid that is in use, if quiet for a minute.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Seal what killed processes left open.

    Their newest rows are in shards that only recorder reads; afterwards every Arrow reader does. Indexes that are
    missing or damaged are made again, half-written files go. A writer that may be alive is left alone. It can be
    interrupted, and run again.

    Exit code 1: something is lost for good, such as a write that was cut. 2: a file could not be repaired.
    """
    from ..read.run import open_run
    from .repair import check_place, repair_typed

    check_place(path)
    raise typer.Exit(repair_typed(open_run(path), is_dry=dry_run, assume_dead=assume_dead, as_json=as_json))


@app.command(
    epilog="Example: recorder merge recordings -o merged    Another: recorder merge recordings --to dcp -o checkpoint"
)
def merge(
    path: RunPath = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            parser=_local_path,
            help="Where: a new or empty directory, or an earlier merge of this run, which is brought up to date. With "
            "--to a new file for safetensors, a new or empty directory for dcp.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Instead of a run, one step's parameters or gradients as torch loads them: dcp (a directory for "
            "torch.distributed.checkpoint) or safetensors."
        ),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(
            help="With --to: param (the state dict: parameters and persistent buffers, the default) or grad (gradients "
            "under their parameters' names)."
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="With --to: the step; by default the last one whose tensors were recorded.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="With --to: which model, where several were recorded.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="With --to: write the rest where some tensors cannot be given.")
    ] = False,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default the cores that this one may use.")
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=_local_path,
            help="Instead of a run, one new Parquet file with all rows of all ranks, without their values.",
        ),
    ] = None,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> None:
    """Write the global view as a run or checkpoint, or a table of rows.

    As a run: every command reads it like any other. A merge that was interrupted goes on where it was, and one of a run
    that has grown adds what is new: type the same command again. Rows that cannot be assembled stay per rank.

    Exit code 1: merged, but something is wrong or missing. Pieces that do not fit, parameters, gradients or optimizer
    states that differ between replicas, ranks missing at a step, damaged shards. Not: buffers that differ (the next
    forward broadcasts them), rows that stay per rank, older attempts. Exit code 2: nothing was published.

    With --to: under the names of the unwrapped model's state dict, whatever the layout was. Parameters of step n are
    those that its forwards used, before the update. Exit code 1: a tensor of the model is missing, lacks a rank's piece
    or has replicas that differ; each is named, and without --partial nothing is written.

    With --catalog: the rows as the ranks wrote them, those of the attempt that counts at each step, for DuckDB, Spark,
    Trino or pandas. Exit code 1: something is damaged, and is not in it.
    """
    from ..read.run import open_run

    if catalog is not None:
        from .catalog import catalog_typed

        refuse(
            "not with --catalog, which writes the rows as they are, and that file alone",
            out=out,
            to=to,
            what=what,
            step=step,
            root=root,
            partial=partial or None,
            loss=None if loss == "mean" else loss,
            layout=layout,
            jobs=jobs,
            scheduler=scheduler,
        )
        raise typer.Exit(catalog_typed(open_run(path), catalog, as_json=as_json))
    if out is None:
        raise LookupFailedError("merge: say where with -o OUT, or with --catalog FILE for a table of all rows")
    if to is None:
        from .merge import merge_typed

        refuse("only for --to dcp and --to safetensors", what=what, step=step, root=root, partial=partial or None)
        if scheduler is not None:
            refuse("not with --scheduler, whose workers do the work", jobs=jobs)
        run = open_run(path)
        options: dict[str, Any] = {"loss": loss, "layouts": layout or [], "jobs": jobs, "scheduler": scheduler}
        raise typer.Exit(merge_typed(run, out, **options, as_json=as_json))
    from .model import Wanted, write_typed

    refuse(
        "not for --to, which writes one step's parameters or gradients in this process",
        loss=None if loss == "mean" else loss,
        jobs=jobs,
        scheduler=scheduler,
    )
    wanted = Wanted(to=to, what=what or "param", step=step, root=root, layouts=layout or [], partial=partial)
    raise typer.Exit(write_typed(open_run(path), out, wanted, as_json=as_json))


@app.command(epilog="Example: RECORDER_MAX_BYTES=4GB recorder config --show")
def config(
    show: Annotated[bool, typer.Option("--show", help="Print the settings in force (the default).")] = True,
    as_json: Json = False,
) -> None:
    """Print the settings in force, and where each comes from."""
    from .settings import show_settings

    raise typer.Exit(show_settings(as_json=as_json))


@app.command(epilog="Examples: recorder init    recorder init slow-disk.toml")
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path("recorder.toml"),
) -> None:
    """Write a TOML file of all settings, each with its default."""
    from .settings import write_example

    raise typer.Exit(write_example(path))


@app.command(epilog="Examples: recorder doctor    recorder doctor recordings --strict")
def doctor(
    context: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run; without: this environment.", autocompletion=complete_run),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 also for what only may be a loss; see above.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say why something was not, or will not be, recorded.

    Of a run: what its rules and modules promise against what is there, for all ranks and steps, and why each hole is.

    Exit code 1: something is lost or was never recorded (lines that begin with "missing"). With --strict also: a hole
    that nothing recorded explains, values removed for the quota, a rank that ends in another step than the others, a
    writer that is still recording.
    """
    from ..read.run import open_run
    from .doctor import examine

    run = None if path is None else open_run(path)
    raise typer.Exit(examine(run, as_json=as_json, is_strict=strict))


@app.command("help", epilog="Example: recorder help diff")
def show_help(
    context: typer.Context,
    command: Annotated[str | None, typer.Argument(metavar="COMMAND", autocompletion=_complete_command)] = None,
) -> None:
    """Show what a command does, with its options."""
    app([*([command] if command else []), "--help"], prog_name="recorder", standalone_mode=False)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Example: recorder run torchrun --nproc-per-node 2 train.py",
)
def run(context: typer.Context) -> None:
    """Run a training command with recording on.

    For where entry points are not loaded.
    """
    from ..launch import launch

    launch(context.args)
