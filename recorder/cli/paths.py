"""Decides what a word of the command line means: a run, a module or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import LookupFailedError, NotARunError, RunError
from ..rules import hint
from ..run.finding import find_folder, is_same_folder, scheme_of
from ..run.run import Run, open_run
from ..run.selection import Selection


def run_and_module(run: str | None, module: str | None) -> tuple[Run, str | None]:
    """Return the run and module that are meant. A single word is a run, or else a module of the newest run.

    Raises:
        RunError: as `open_run`.
        LookupFailedError: a single word is neither.
    """
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
        if Path(run).exists():  # and so was meant
            raise
        near = hint(run, newest.known_paths)
        raise LookupFailedError(f"{error}; and {newest.name}, the newest, has no module {run!r}{near}") from None


def two_runs(a: str | None, b: str | None) -> tuple[Run, Run]:
    """Return the two runs that are meant; a single word is a folder, whose last two are.

    Raises:
        RunError: as `open_run`.
        LookupFailedError: the single word is a run, or both words are one run.
    """
    if a is not None and b is None:
        folder = find_folder(a)
        if folder is None:
            run = open_run(a)
            raise LookupFailedError(f"{a}: is {run.name}, one run; name a second one, or a folder to take its last two")
        a, b = str(folder / "@-2"), str(folder / "@-1")
    first = open_run(a or "@-2")
    return first, other_run(b or "@-1", {"A": first})


def other_run(typed: str, given: Mapping[str, Run], option: str = "") -> Run:
    """Return a run that is compared with others.

    Args:
        typed: the run that is meant.
        given: the runs that it must not be, by what each is called.
        option: the option that it was typed for.

    Raises:
        RunError: as `open_run`.
        LookupFailedError: the run is one of those given, however each is spelled or linked.
    """
    run = open_run(typed)
    for what, one in given.items():
        if is_same_folder(run.path, one.path):
            words = f"{option} {typed}".strip()
            raise LookupFailedError(f"{words}: is {run.name}, the same run as {what}; expected another run")
    return run


def other_runs(option: str, typed: Sequence[str], given: Mapping[str, Run]) -> list[Run]:
    """Return runs that are compared with others, each of which is given once; it raises what `other_run` raises."""
    runs: dict[str, Run] = {}
    for one in typed:
        runs[f"{option} {one}"] = other_run(one, {**given, **runs}, option)
    return list(runs.values())


def local_path(text: str) -> Path:
    """Return the path of a file or directory on a disk.

    Raises:
        LookupFailedError: the path is in an object store, or empty.
    """
    if not text:
        raise LookupFailedError("an empty text is no path; name a file or a directory")
    if (scheme := scheme_of(text)) is not None:
        raise LookupFailedError(
            f"{text}: {scheme}:// is only read from; name a path on a disk, and copy it up afterwards"
        )
    return Path(text)
