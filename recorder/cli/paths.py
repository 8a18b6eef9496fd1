"""Owns what a word of the command line means where it may be one of several things: a run, a module, a file."""

from __future__ import annotations

from pathlib import Path

from ..analyze.selection import Selection
from ..errors import LookupFailedError, NotARunError, RunError
from ..patterns import hint
from ..read.places import scheme_of
from ..read.run import Run, open_run


def run_and_module(run: str | None, module: str | None) -> tuple[Run, str | None]:
    """What RUN and MODULE mean. One word alone is a run, or where there is none of that name a module of the newest.

    Raises:
        RunError: as `open_run`.
        LookupFailedError: one word alone is neither.
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
        near = hint(run, newest.known_paths)
        raise LookupFailedError(f"{error}; and {newest.name}, the newest, has no module {run!r}{near}") from None


def local_path(text: str) -> Path:
    """Where something is written, or a file of the user's is.

    Raises:
        LookupFailedError: that is in a store.
    """
    if (scheme := scheme_of(text)) is not None:
        raise LookupFailedError(
            f"{text}: {scheme}:// is only read from; name a path on a disk, and copy it up afterwards"
        )
    return Path(text)
