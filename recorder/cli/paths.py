"""Finds the runs, modules and rows that a command line names, and answers ``show --where``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.compute as pc

from ..errors import LookupFailedError, NotARunError, RunError
from ..merge.unit import is_problem
from ..rules import hint
from ..run.finding import find_folder, find_run, is_same_folder, runs_in, typed_for
from ..run.reply import Reply
from ..run.run import Run, open_run
from ..run.selection import Selection
from ..sites import SITES
from ..system.text import grouped

_SITES = ("output", *(site for site in SITES if site != "output"))
"""The sites in the order of printing: outputs first, because most questions are about outputs."""
_VALUE = ("root", "name", "scope", "phase", "mode")
_MOMENT = ("micro_step", "call", "repeat")
_OF_STAGES = ("root", "micro_step")
"""The columns in which chunks of one value may differ between pipeline stages."""


def run_and_module(run: str | None, module: str | None) -> tuple[Run, str | None]:
    """Return the run and the module that are typed. A single word is a run, or else a module of the newest run."""
    if run is None or module is not None:
        return open_run(run), module
    try:
        return open_run(run), None
    except NotARunError as error:
        try:
            newest = open_run()
        except RunError:
            raise error from None
        if Selection(module=run).modules(list(newest.known_paths)):
            return newest, run
        if Path(run).exists():  # `run` is this path
            raise
        near = hint(run, newest.known_paths)
        raise LookupFailedError(f"{error}; and {newest.name}, the newest, has no module {run!r}{near}") from None


def two_runs(a: str | None, b: str | None) -> tuple[Run, Run]:
    """Return the two runs that are typed. A single word is a folder, whose last two runs are compared."""
    if a is not None and b is None:
        folder = find_folder(a)
        if folder is None:
            run = open_run(a)
            raise LookupFailedError(f"{a}: is {run.name}, one run; name a second one, or a folder to take its last two")
        if len(runs_in(folder)) == 1:
            raise LookupFailedError(f"{a} holds 1 run; name a second one, or a folder with two")
        a, b = str(folder / "@-2"), str(folder / "@-1")
    first = open_run(a or "@-2")
    return first, other_run(b or "@-1", {"A": first})


def other_run(typed: str, given: Mapping[str, Run], option: str = "") -> Run:
    """Open a run that is compared with other runs.

    LookupFailedError is raised if the run is one of `given`, whatever path or link leads to it. The keys of `given` are
    the names of those runs in the message, and `option` is the option that `typed` belongs to.
    """
    run = open_run(typed)
    for what, one in given.items():
        if is_same_folder(run.path, one.path):
            words = f"{option} {typed}".strip()
            raise LookupFailedError(f"{words}: is {run.name}, the same run as {what}; expected another run")
    return run


def other_runs(option: str, typed: Sequence[str], given: Mapping[str, Run]) -> list[Run]:
    """Open runs that are compared with other runs, each of them once; raises what `other_run` raises."""
    runs: dict[str, Run] = {}
    for one in typed:
        runs[f"{option} {one}"] = other_run(one, {**given, **runs}, option)
    return list(runs.values())


def opened_runs(path: str | None, problems: list[str]) -> Iterator[Run]:
    """Yield the run, or each run of the folder, that `path` names; `problems` gets texts on runs that cannot be opened.

    Merged runs are left out, because their values are those of the runs that they were merged from.
    """
    folder = find_folder(path)
    if folder is None:
        yield open_run(path)
        return
    for found in runs_in(folder):
        try:
            if found.run_id or not find_run(found.location)[1].merged_from:
                yield open_run(found.location)
        except RunError as error:
            problems.append(str(error))


def modules_meant(run: Run, wanted: Selection) -> list[str]:
    """Return the modules with rows that match a selection, by default all. LookupFailedError: no module matches."""
    paths = wanted.modules(run.module_paths)
    if not paths and wanted.module is not None:
        command = shlex.join(["recorder", "show", typed_for(run.path, run.name)])
        near = hint(wanted.module, run.module_paths, otherwise=f"; {command} lists the modules")
        raise LookupFailedError(f"no module {wanted.module!r} in this run{near}")
    return paths


def rows_of(run: Run, wanted: Selection, columns: Sequence[str], more: Any = None) -> Any:
    """Return the selected rows, one row for each tensor; Arrow filters modules before Python filters other columns."""
    expression = pc.field("part") == 0
    if wanted.module is not None:
        expression &= pc.field("module_path").isin(wanted.modules(run.module_paths))
    if more is not None:
        expression &= more
    return replace(wanted, module=None).narrow(run.table(columns, expression))


def explain_nothing(run: Run, wanted: Selection) -> NoReturn:
    """Raise LookupFailedError with the most helpful reason why there is nothing to print."""
    subject = "this run" if wanted.module is None else repr(wanted.module)
    rows = rows_of(run, Selection(module=wanted.module), ["site", "name", "step", "rank"])
    step = str(wanted.step)
    ended = run.ended_before(int(step)) if step.isdecimal() else ""
    raise LookupFailedError(f"{replace(wanted, module=None).explain_nothing(rows, subject)}{'; ' * bool(ended)}{ended}")


def site_order(site: str) -> tuple[int, str]:
    """Return the key that sorts sites: outputs first, then in the order of the format."""
    return (_SITES.index(site) if site in _SITES else len(_SITES), site)


def where_reply(run: Run, wanted: Selection, *, layouts: Sequence[str], stage: int | None) -> Reply:
    """Return the reply of ``show --where`` about one site at one step, by default outputs at the last step.

    The exit code is 1 if a chunk is missing or does not fit. A value that was recorded several times in the step is
    shown once, as it was first recorded.
    """
    module_path, *others = modules_meant(run, wanted)
    if others:
        some = grouped([module_path, *others])
        raise LookupFailedError(f"--where draws one module, and {wanted.module!r} means several: {', '.join(some)}")
    table = rows_of(run, wanted, ["site", "step", "rank", "attempt", *_VALUE, *_MOMENT])
    if not table.num_rows:
        explain_nothing(run, wanted)
    site = min(table.column("site").unique().to_pylist(), key=site_order)
    table = table.filter(pc.field("site") == site)
    step = pc.max(table.column("step")).as_py()
    table = table.filter(pc.field("step") == step)
    drawn = [
        run.layout(module_path, site, step, layouts=layouts, stage=stage, **question)
        for question in _questions(table, has_slices=run.view().has_pipeline, is_named=wanted.name is not None)
    ]
    return Reply(
        members=lambda: {"run": str(run.path), "module": module_path, "layouts": [asdict(layout) for layout in drawn]},
        parts=lambda: [
            line for number, layout in enumerate(drawn) for line in [""] * (number > 0) + str(layout).splitlines()
        ],
        exit_code=int(bool(run.problems) or any(one.missing or (one.kind and is_problem(one.kind)) for one in drawn)),
    )


def _questions(table: Any, *, has_slices: bool, is_named: bool) -> list[dict[str, Any]]:
    """Return for each value the columns, of its first recording, that distinguish it from the other values.

    `is_named` means that the table was filtered by name, so that the site may have values of other names.
    """
    of_value = [name for name in _VALUE if not (has_slices and name in _OF_STAGES)]
    of_moment = [name for name in _MOMENT if not (has_slices and name in _OF_STAGES)]
    rows = table.group_by([*of_value, *of_moment], use_threads=False).aggregate([]).to_pylist()
    differing = {name for name in (*of_value, *of_moment) if len({row[name] for row in rows}) > 1}
    differing |= {"name"} if is_named else set()
    firsts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: [row[name] or 0 for name in of_moment]):
        firsts.setdefault(tuple(row[name] for name in of_value), row)
    return [{name: row[name] for name in differing} for row in firsts.values()]
