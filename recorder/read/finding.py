"""Which run is meant by what was typed: a path, a folder, a name or the beginning of one, `latest` or ``@-2``.

Must never write, and never take a name that a manifest holds for a path.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from ..config import LATEST, load_settings
from ..errors import LookupFailedError, NotARunError, RecorderError, RunError
from ..format.manifest import RunManifest, check_version
from ..format.members import Members
from ..format.rundir import MERGE_MANIFEST, RUN_MANIFEST
from ..storage.locations import LOCAL, Place, place_of, store_of
from ..system.text import counted
from ..system.units import moment
from .fleet import is_fleet
from .writers import find_writers

_LATEST = re.compile(rf"{LATEST}|@-([1-9][0-9]{{0,8}})")
_MAX_LISTED = 8
_logger = logging.getLogger("recorder")


class ListedRun(NamedTuple):
    """A run as its folder and its manifest show it; its rows are not looked at."""

    place: Place
    name: str
    run_id: str
    """Empty in a merged run, whose id is that of the run which it was merged from."""
    created_ns: int

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which the run may be asked for."""
        return self.name, self.place.name, self.run_id


def find_run(path: str | os.PathLike[str] | Place | None = None) -> tuple[Place, RunManifest]:
    """The directory and the manifest of the run that `open_run` would open. It raises the same."""
    place = _meant(default_folder() if path is None else path)
    raw = store_of(place).read_json(place / RUN_MANIFEST)
    check_version(raw, str(place / RUN_MANIFEST))
    return place, RunManifest.read(raw)


def typed_for(place: Place, name: str) -> str:
    """Return what a person types here to mean a run, unquoted: its name, FOLDER/NAME, or else its path.

    Args:
        place: the directory of the run.
        name: the name of the run.
    """
    for typed in (name, place.parent / name):
        with suppress(RecorderError, OSError):
            if _is_same(_meant(typed, warn=lambda *words: None), place):
                return str(typed)
    return str(place)


def find_folder(path: str | None, *, may_be_empty: bool = False) -> Place | None:
    """The folder of runs that is meant; None where it is something else, such as a run.

    Args:
        path: what was typed; None for the folder of `default_folder`.
        may_be_empty: whether a folder is meant, too, that no run is in yet, and that of `default_folder` where it is
            not there yet. Another name that is not there may be that of a run.
    """
    place, default = place_of(default_folder() if path is None else path), place_of(default_folder())
    store = store_of(place)
    if not store.is_directory(place):
        return place if may_be_empty and _is_same(place, default) and not store.exists(place) else None
    if has_manifest(place):
        return None
    if is_fleet(place) or runs_in(place):
        return place
    parents: Sequence[Place] = place.absolute().parents
    is_part = any(has_manifest(parent) for parent in list(parents)[:2]) or command_of_merge(place) is not None
    return place if may_be_empty and not is_part else None


def default_folder() -> str:
    """Where this environment records: what ``RECORDER_DIR`` or the settings file says, else ``recordings``.

    Raises:
        ConfigError: a setting is wrong.
    """
    return load_settings().settings.dir


def runs_in(folder: Place, *, without: Collection[str] = ()) -> list[ListedRun]:
    """The runs in a folder, the newest last.

    Args:
        folder: where to look.
        without: names of directories that need no look.

    Raises:
        NotARunError: the folder cannot be listed.
    """
    store = store_of(folder)
    names = [name for name in store.list_directory(folder, directories=True) if name not in without]
    listed = store.each(lambda name: _look_at(folder / name), names)
    return sorted((run for run in listed if run is not None), key=lambda run: (run.created_ns, run.place.name))


def has_manifest(path: Place) -> bool:
    """Whether a directory says that it is a run, sound or not."""
    return store_of(path).is_file(path / RUN_MANIFEST)


def find_run_around(folder: Path) -> Path | None:
    """The run that a folder is or lies in, links followed; None where there is none."""
    real = Path(os.path.realpath(folder))
    return next((one for one in (real, *real.parents) if LOCAL.is_file(one / RUN_MANIFEST)), None)


def _say_note(*words: object) -> None:
    """Tell a program through logging, and whoever typed a command as a note: nothing is wrong."""
    _logger.warning(*words, extra={"word": "note"})


def _meant(typed: str | os.PathLike[str] | Place, warn: Callable[..., None] = _say_note) -> Place:
    place = place_of(typed)
    store = store_of(place)
    try:
        if store.is_directory(place):
            return place if has_manifest(place) else _newest_in(place, warn)
        if store.exists(place):
            raise NotARunError(f"{place}: not a directory; name the directory of a run, or a folder of runs")
        folders = [place.parent] if place.name and store.is_directory(place.parent) else []
    except OSError as error:
        raise NotARunError(f"{place}: cannot be opened ({error.strerror})") from error
    if str(typed) == place.name:  # no folder was typed
        folders += [other for other in _default_folders() if not _is_same(other, place.parent)]
    if match := _LATEST.fullmatch(place.name):
        if str(typed) == place.name and not any(map(runs_in, folders[-1:])):
            raise NotARunError(f"no run in {default_folder()} yet; start the training with RECORDER=1 in front")
        return _counted_back(place, folders[-1:], int(match[1] or 1))
    runs = [run for folder in folders for run in runs_in(folder)]
    matches = [run for run in runs if place.name == run.place.name] or [run for run in runs if place.name in run.names]
    matches = matches or [run for run in runs if any(name.startswith(place.name) for name in run.names)]
    if matches and all(
        run.name == matches[0].name for run in matches
    ):  # their directories tell them apart, if anything
        newest = max(matches, key=lambda run: (run.created_ns, run.place.name))
        if len(matches) > 1:
            warn(
                "recorder: %s: took %s, the newest of %d runs called %s", place, newest.place, len(matches), newest.name
            )
        return newest.place
    if matches:
        listed = "; ".join(_described(matches))
        raise LookupFailedError(
            f"{place}: {len(matches)} runs begin so: {listed}; type more of the name or the directory"
        )
    where = " or ".join(map(str, dict.fromkeys(folders)))
    if re.fullmatch(r"@[+-]?\d*", place.name):
        raise NotARunError(f"{place}: no such run; @-1 is the newest, @-2 the one before")
    raise NotARunError(f"{place}: no such directory{_nearest(place, runs, where)}")


def _newest_in(folder: Place, warn: Callable[..., None]) -> Place:
    runs = runs_in(folder)
    if not runs:
        _raise_no_run(folder)
    if len(runs) > 1:
        warn("recorder: %s: took %s, the newest of %d runs", folder, runs[-1].name, len(runs))
    return runs[-1].place


def _counted_back(place: Place, folders: Sequence[Place], number: int) -> Place:
    """Return the run of a folder that is so many back from the newest."""
    if not folders:
        raise NotARunError(f"{place}: no such directory; name a folder of runs before the @")
    runs = runs_in(folders[0])
    if not runs:
        _raise_no_run(folders[0])
    if number > len(runs):
        raise NotARunError(f"{place}: {folders[0]} holds {counted(len(runs), 'run')}, the oldest is @-{len(runs)}")
    return runs[-number].place


def _default_folders() -> list[Place]:
    folder = place_of(default_folder())
    return [folder] if store_of(folder).is_directory(folder) else []


def _is_same(folder: Place, other: Place) -> bool:
    return os.path.realpath(str(folder)) == os.path.realpath(str(other))


def _described(runs: Sequence[ListedRun]) -> Iterator[str]:
    """Describe runs so that a person tells them apart: name, directory where the name is not enough, time, steps."""
    names = [run.name for run in runs]
    for run in runs[-_MAX_LISTED:]:
        details = [] if names.count(run.name) == 1 else [run.place.name]
        details += filter(None, [moment(run.created_ns), _last_step(run.place)])
        yield f"{run.name} ({', '.join(details)})" if details else run.name
    if len(runs) > _MAX_LISTED:
        yield f"and {len(runs) - _MAX_LISTED} older"


def _last_step(place: Place) -> str:
    with suppress(RunError):
        steps = [writer.last_step for writer in find_writers(place) if writer.last_step is not None]
        return f"up to step {max(steps)}" if steps else "no steps"
    return ""


def _nearest(place: Place, runs: Sequence[ListedRun], where: str) -> str:
    near = difflib.get_close_matches(place.name, [run.name for run in runs], n=3)
    if near:
        return f", and no run of this name in {where}; nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    return f", and no run of this name in {where}" if where else ""


def _raise_no_run(folder: Place) -> NoReturn:
    parents: Sequence[Place] = folder.absolute().parents
    for parent in list(parents)[:2]:  # a rank's or a writer's directory was given
        if has_manifest(parent):
            raise NotARunError(f"{folder}: is a part of a run; open the run: recorder ls {parent}")
    if (command := command_of_merge(folder)) is not None:
        raise NotARunError(f"{folder}: an unfinished merge; run it again, what is finished is kept: {command}")
    why = "RECORDER=1 in front of a training command records one; where it does not, `recorder doctor`, without a path"
    why += ", says what keeps it from it"
    raise NotARunError(f"{folder}: no run here ({RUN_MANIFEST} is missing); {why}")


def command_of_merge(folder: Place) -> str | None:
    """The command that goes on with the merge which has begun in a directory; None where none has."""
    store = store_of(folder)
    if not store.is_file(folder / MERGE_MANIFEST):
        return None
    manifest = Members({})
    with suppress(RunError):
        manifest = Members(store.read_json(folder / MERGE_MANIFEST))
    options = manifest.inner("options") or Members({})
    words = ["recorder", "merge", manifest.text("path") or "RUN", "-o", str(folder)]
    loss = options.text("loss")
    words += ["--loss", loss] if loss not in ("", "mean") else []
    for layout in options.texts("layouts"):
        words += ["--layout", layout]
    return shlex.join(words)


def _look_at(place: Place) -> ListedRun | None:
    """A directory as a run; None where it is none, nameless and old where its manifest is damaged."""
    if not has_manifest(place):
        return None
    manifest = RunManifest()
    with suppress(RunError):
        manifest = RunManifest.read(store_of(place).read_json(place / RUN_MANIFEST))
    return ListedRun(
        place=place,
        name=manifest.name or place.name,
        run_id=manifest.run_id or "" if manifest.merged_from is None else "",
        created_ns=manifest.created_ns or 0,
    )
