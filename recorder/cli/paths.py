"""Owns the way from what was typed to the run that is meant: a path, a folder with one run, the beginning of a name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..errors import LookupFailedError, NotARunError
from ..read.places import Place, place_of, scheme_of, store_of
from ..read.run import Run, find_run, find_runs, has_manifest, open_place

_MAX_LISTED = 8


def open_typed(path: str, typed: list[str]) -> Run:
    """Open the run that is meant.

    Args:
        path: the argument RUN.
        typed: all arguments of the command line, so that a message can say what to type instead.

    Raises:
        RunError: there is no such run, or there are several, or it cannot be read.
    """
    return open_place(_meant(path, typed))


def find_typed(path: str, typed: list[str]) -> tuple[Place, dict[str, Any]]:
    """The directory and the manifest of the run that is meant; nothing else of it is looked at. Raises the same."""
    return find_run(_meant(path, typed))


def _meant(text: str, typed: list[str]) -> Place:
    path = complete(text)
    store = store_of(path)
    if store.is_directory(path) and not has_manifest(path):
        runs = find_runs(path)
        if len(runs) > 1:
            newest = _retyped(typed, text, runs[0])
            raise NotARunError(f"{path}: holds {len(runs)} runs ({_listed(runs)}); name one, the newest: {newest}")
    if typed[:1] == ["show"] and isinstance(path, Path) and not path.exists() and len(path.parts) == 1:
        hint = f"the run comes before the module: {shlex.join(['recorder', 'show', 'RUN', *typed[1:]])}"
        raise NotARunError(f"{path}: no such directory; {hint}")
    return path


def complete(text: str | Place) -> Place:
    """The run whose name begins with the last part of a path that does not exist; else the path as it is.

    Raises:
        NotARunError: several runs' names begin so, or it is in a kind of store that is not known.
    """
    path = place_of(text)
    store = store_of(path)
    try:
        if store.exists(path) or not path.name or not store.is_directory(path.parent):
            return path
    except OSError:
        return path
    runs = find_runs(path.parent, path.name)
    if len(runs) > 1:
        raise NotARunError(f"{path}: {len(runs)} runs begin so: {_listed(runs)}; type more of the name")
    return runs[0] if runs else path


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


def _retyped(typed: list[str], path: str, run: Place) -> str:
    """The command line with the run in the place of the folder."""
    places = [place for place, text in enumerate(typed) if place and (text == path or Path(text) == Path(path))]
    words = list(typed)
    if places:
        words[places[0]] = str(run)
    return shlex.join(["recorder", *words]) if places else f"recorder ls {shlex.quote(str(run))}"


def _listed(runs: list[Place]) -> str:
    return ", ".join(run.name for run in runs[:_MAX_LISTED]) + (", ..." if len(runs) > _MAX_LISTED else "")
