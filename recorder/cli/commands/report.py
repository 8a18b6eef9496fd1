from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...analyze.align.align import Aligned
from ...analyze.align.align import align as compare_tokens_of
from ...analyze.check.check import MAX_FINDINGS, ToldFindings, check, command_of, sentence, told_of, where_of
from ...analyze.doctor.reply import checks_of
from ...checks.rule import Finding, Severity
from ...errors import LookupFailedError
from ...report.collect import num_looks
from ...report.report import write_report
from ...report.tokens import tokens_block
from ...report.top import MODEL, DoctorLine, Highlight
from ...run.reply import Reply
from ...run.run import Run, open_run
from ...system.text import size
from ..options import RunPath, out_option, run_option
from ..output import progress
from ..paths import other_run

EPILOG = "Examples: recorder report recordings -o report.html    recorder report @-2 --against @-1 -o against.html"


def command(
    path: RunPath = None,
    out: Annotated[Path | None, out_option("PATH", "The file; without: report.html.")] = None,
    against: Annotated[str | None, run_option(help="A second run, to be drawn beside the first.")] = None,
    align: Annotated[
        str | None,
        run_option(help="The run of the engine that wrote the tokens, or RUN itself: a map of its tokens."),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Which to draw, with commas: absmax, l2, mean, std, min, max; by default as many as there is room for."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> Reply:
    """Draw a run as one HTML file: the loss, maps, lines, ranks.

    The file needs no network and runs no scripts but its own: send it, or keep it beside the job's other results.

    It holds numbers and small pictures for drawing, and no tensors. In a long run, a column of the map stands for
    several steps. With many ranks, the file shows the lowest, the median and the highest rank, and ranks that are odd.

    Exit code 1: something of the run is damaged or missing, as recorder doctor says.
    """
    run = open_run(path)
    other = None if against is None else other_run(against, {"the run to draw": run}, "--against")
    more = [] if align is None else [tokens_block(_aligned(run, align))]
    out = out or Path("report.html")
    names = [name.strip() for name in statistics.split(",")] if statistics is not None else []
    if "" in names:
        raise LookupFailedError(f"--statistics {statistics}: expected names with commas between")
    with progress("report", num_looks(run, other) + 2 * run.num_rows, unit="rows") as report:
        checks = told_by_doctor(run)
        report(run.num_rows)
        judged = told_by_check(check(run).findings, run.name)
        report(run.num_rows)
        num_bytes = write_report(
            run, out, against=other, statistics=names, checks=checks, judged=judged, more=more, force=force,
            report=report,
        )  # fmt: skip
    num_missing = sum(check.state == "missing" for check in checks)
    return Reply(
        members=lambda: {"run": str(run.path), "path": str(out), "bytes": num_bytes, "missing": num_missing},
        parts=lambda: [f"{out}: {size(num_bytes)}"],
        exit_code=int(num_missing > 0),
    )


def _aligned(run: Run, engine: str) -> Aligned:
    other = open_run(engine)
    return compare_tokens_of(run, None if str(other.path) == str(run.path) else other)


def told_by_doctor(run: Run) -> list[DoctorLine]:
    """Return the answers of `recorder doctor` about a run."""
    return [DoctorLine(check.state, check.text, check.members) for check in checks_of(run)]


def told_by_check(findings: Sequence[Finding], typed: str) -> list[Highlight]:
    """Return the findings as `recorder check` tells them, each with those that follow from it.

    `typed` is the run in the commands that the page says.
    """
    told = list(told_of(findings))
    highlights = [
        _highlight(one, typed)._replace(more=tuple(_highlight(other, typed) for other in under))
        for one, under in told[:MAX_FINDINGS]
    ]
    if len(told) > MAX_FINDINGS:
        more = f"and {len(told) - MAX_FINDINGS} more findings: `recorder check --json` says them"
        highlights.append(Highlight(more, {}, "note"))
    return highlights or [Highlight("The rules of recorder check found nothing in these rows", {}, "right")]


def _highlight(one: ToldFindings, typed: str) -> Highlight:
    """Return a finding with a link to the picture of its worst value."""
    worst = one.worst
    link: dict[str, Any] = {"view": "lines", "module": worst.module_path, "site": worst.site, "name": worst.name}
    link |= {"step": worst.step} if worst.step >= 0 else {}
    lines = [command_of(typed, one)]
    if worst.rule == "nonfinite":
        steps = f"{max(one.first_step - 1, 0)}:{one.first_step + 1}"
        rule = shlex.quote(f"module={worst.module_path or '*'} site=* steps={steps} keep=tensor")
        keep = f"RECORDER_PRESET=default RECORDER_RULES={rule}   # the next time, for its tensors"
        lines = [shlex.join(["recorder", "first", typed]), *lines, keep]
    about = {name: text.replace("''", MODEL) for name, text in where_of(one).items()}
    return Highlight(
        sentence(one).replace("''", MODEL),
        link if worst.site else {},
        "note" if worst.severity is Severity.NOTE else "wrong",
        steps=(one.first_step, one.last_step) if worst.step >= 0 else None,
        ranks=tuple(one.ranks),
        about=about | {"advice": worst.advice, "type": "\n".join(filter(None, lines))},
    )
