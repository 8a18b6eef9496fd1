"""Finds the runs and modules that a command line names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import LookupFailedError, NotARunError, RunError
from ..rules import hint
from ..run.finding import find_folder, is_same_folder, runs_in
from ..run.run import Run, open_run
from ..run.selection import Selection


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
        if Selection(module=run).chosen("module_path", list(newest.known_paths)):
            return newest, run
        if Path(run).exists():  # the word in `run` is a path
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
            raise LookupFailedError(f"{a} holds 1 run; name a second run, or a folder with two")
        a, b = str(folder / "@-2"), str(folder / "@-1")
    first = open_run(a or "@-2")
    return first, other_run(b or "@-1", {"A": first})


def other_run(typed: str, given: Mapping[str, Run], option: str = "") -> Run:
    """Open a run that is compared with other runs.

    Raise LookupFailedError if the run is one of `given`, whatever path or link leads to it. The keys of `given` are the
    names of those runs in the message. `option` is the option that `typed` belongs to.
    """
    run = open_run(typed)
    for what, one in given.items():
        if is_same_folder(run.path, one.path):
            words = f"{option} {typed}".strip()
            raise LookupFailedError(f"{words}: is {run.name}, the same run as {what}; expected another run")
    return run


def other_runs(option: str, typed: Sequence[str], given: Mapping[str, Run]) -> list[Run]:
    """Open runs that are compared with other runs. Raise LookupFailedError if a run comes twice, or is in `given`."""
    runs: dict[str, Run] = {}
    for one in typed:
        runs[f"{option} {one}"] = other_run(one, {**given, **runs}, option)
    return list(runs.values())
