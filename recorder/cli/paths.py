"""Decides what a word of the command line means: a run, a module or a file."""

from __future__ import annotations

from pathlib import Path

from ..analyze.selection import Selection
from ..errors import LookupFailedError, NotARunError, RunError
from ..globalview.run import Run, open_run
from ..rules import hint
from ..storage.locations import scheme_of


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
