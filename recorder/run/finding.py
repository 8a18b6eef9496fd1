"""Finds the run that a user means by a path, a folder, a name or its beginning, `latest` or ``@-2``.

A folder of runs in an object store may have a fleet index, so that a thousand runs are listed at once: one small
document for each node, beside the runs. The index only repeats facts. A run that no document mentions can still be
opened, and an open run uses nothing from the index. The documents are untrusted. This module must never write, and
never use a name in a manifest as a path.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..config import LATEST, load_settings
from ..errors import LookupFailedError, NotARunError, RecorderError, RunError
from ..format.manifest import RunManifest as RunManifest
from ..format.manifest import WriterManifest
from ..format.rundir import MERGE_MANIFEST, RUN_MANIFEST, WRITER_MANIFEST, Members, check_version, read_json
from ..read.writers import find_writers
from ..storage.locations import LOCAL, ObjectPath, location_of, store_of
from ..storage.locations import Location as Location
from ..storage.locations import scheme_of as scheme_of
from ..system.text import counted, listed, moment

_LATEST = re.compile(rf"{LATEST}|@-([1-9][0-9]{{0,8}})")
_MAX_LISTED = 8
_MAX_PRUNED = 20
_MAX_LOOKED = 100
"""The most subdirectories that are searched for runs, if a folder itself has none."""
_MAX_DEPTH = 5
"""The most parent folders that are searched for a note that a missing run was pruned."""
_logger = logging.getLogger("recorder")


class ListedRun(NamedTuple):
    """A run as its folder and its manifest describe it. No rows are read."""

    location: Location
    name: str
    run_id: str
    """The id of the run. Empty for a merged run, whose manifest has the id of the run that was merged."""
    created_ns: int

    @property
    def names(self) -> tuple[str, ...]:
        """All texts by which a user may name the run."""
        return self.name, self.location.name, self.run_id


def find_run(path: str | os.PathLike[str] | Location | None = None) -> tuple[Location, RunManifest]:
    """Return the directory and the manifest of the run that `open_run` would open. Raises the same errors."""
    location = _meant(default_folder() if path is None else path)
    raw = store_of(location).read_json(location / RUN_MANIFEST)
    check_version(raw, str(location / RUN_MANIFEST))
    return location, RunManifest.read(raw)


def shortest_text_of(location: Location, name: str) -> str:
    """Return the shortest text that names a run in a command: name, FOLDER/NAME or path. The text is not quoted."""

    def refuse(*words: object) -> None:
        raise LookupFailedError("several runs have the name, of which the newest would be taken")

    for typed in (name, location.parent / name):
        with suppress(RecorderError, OSError):
            if is_same_folder(_meant(typed, warn=refuse), location):
                return str(typed)
    return str(location)


def find_folder(path: str | None, *, may_be_empty: bool = False) -> Location | None:
    """Return the folder of runs that `path` names. Return None if `path` names something else, such as a run.

    `path` is the user's text; None means `default_folder()`. With `may_be_empty`, a folder without runs is returned
    too. A missing folder may also be returned then: `default_folder()`, or a folder in an object store whose parent has
    no runs (a store has no empty folders). Any other missing path gives None: it may be a run's name.
    """
    location, default = location_of(default_folder() if path is None else path), location_of(default_folder())
    store = store_of(location)
    if not store.is_directory(location):
        is_awaited = is_same_folder(location, default) or _may_come(location)
        return location if may_be_empty and is_awaited and not store.exists(location) else None
    if has_manifest(location):
        return None
    if is_fleet(location) or runs_in(location) or pruned_runs(location):
        return location
    parents: Sequence[Location] = location.absolute().parents
    is_part = any(has_manifest(parent) for parent in list(parents)[:2]) or command_of_merge(location) is not None
    return location if may_be_empty and not is_part else None


def _may_come(location: Location) -> bool:
    above = location.parent
    is_folder = isinstance(location, ObjectPath) and not _LATEST.fullmatch(location.name)
    return is_folder and not (is_fleet(above) or runs_in(above) or pruned_runs(above))


def default_folder() -> str:
    """Return the folder where this environment records.

    It comes from ``RECORDER_DIR`` or the settings file, or is ``recordings``. Raises ConfigError if a setting is wrong.
    """
    return load_settings().settings.dir


def runs_in(folder: Location, *, without: Collection[str] = ()) -> list[ListedRun]:
    """Return the runs in a folder, the newest last. Directories whose name is in `without` are left out.

    Raises NotARunError if the folder cannot be listed.
    """
    store = store_of(folder)
    names = [name for name in store.list_directory(folder, directories=True) if name not in without]
    listed = store.each(lambda name: _look_at(folder / name), names)
    return sorted((run for run in listed if run is not None), key=lambda run: (run.created_ns, run.location.name))


def has_manifest(path: Location) -> bool:
    """Return whether a directory has the manifest of a run. The manifest may be damaged."""
    return store_of(path).is_file(path / RUN_MANIFEST)


def first_modules(run: Path) -> list[str]:
    """Return the module paths in the first manifest that has any. The run is not opened; a few may be missing."""
    for path in sorted(run.glob(f"*/*/{WRITER_MANIFEST}")):
        roots = WriterManifest.read(read_json(path)).roots
        if paths := [module.path for root in roots for module in root.modules]:
            return paths
    return []


def is_shipped(run: Location) -> bool:
    """Return whether a run lies where daemons upload runs, and not where the run was recorded."""
    return not isinstance(run, Path) or any(store_of(one).is_directory(one / FLEET) for one in run.parents[:2])


def find_run_around(folder: Path) -> Path | None:
    """Return the innermost run that `folder` is or lies in. Links are followed. Return None if there is no such run."""
    real = Path(os.path.realpath(folder))
    return next((one for one in (real, *real.parents) if LOCAL.is_file(one / RUN_MANIFEST)), None)


def _say_note(*words: object) -> None:
    _logger.warning(*words, extra={"word": "note"})


def _meant(typed: str | os.PathLike[str] | Location, warn: Callable[..., None] = _say_note) -> Location:
    location = location_of(typed)
    store = store_of(location)
    try:
        if store.is_directory(location):
            return location if has_manifest(location) else _newest_in(location, warn)
        if store.exists(location):
            raise NotARunError(f"{location}: not a directory; name the directory of a run, or a folder of runs")
        folders = [location.parent] if location.name and store.is_directory(location.parent) else []
    except OSError as error:
        raise NotARunError(f"{location}: cannot be opened ({error.strerror})") from error
    if str(typed) == location.name:  # without a folder in the user's text
        folders += [other for other in _default_folders() if not is_same_folder(other, location.parent)]
    if match := _LATEST.fullmatch(location.name):
        if str(typed) == location.name and not any(map(runs_in, folders[-1:])):
            raise NotARunError(f"no run in {default_folder()} yet; start the training with RECORDER=1 in front")
        return _counted_back(location, folders[-1:], int(match[1] or 1))
    runs = [run for folder in folders for run in runs_in(folder)]
    matches = [run for run in runs if location.name == run.location.name]
    matches = matches or [run for run in runs if location.name in run.names]
    matches = matches or [run for run in runs if any(name.startswith(location.name) for name in run.names)]
    if len({run.name for run in matches}) == 1:  # runs of the same name differ only in their directories
        newest = max(matches, key=lambda run: (run.created_ns, run.location.name))
        if len(matches) > 1:
            text = "%s: took %s, the newest of %d runs called %s"
            warn(text, location, newest.location, len(matches), newest.name)
        return newest.location
    if matches:
        begin = f"{len(matches)} runs begin so: {'; '.join(_described(matches))}"
        raise LookupFailedError(f"{location}: {begin}; type more of the name or the directory")
    _refuse_pruned(location, folders)
    where = " or ".join(map(str, dict.fromkeys(folders)))
    if re.fullmatch(r"@[+-]?\d*", location.name):
        raise NotARunError(f"{location}: no such run; @-1 is the newest run, @-2 the run before")
    raise NotARunError(f"{location}: no such directory{_nearest(location, runs, where)}")


def _refuse_pruned(location: Location, folders: Sequence[Location]) -> None:
    """Raise NotARunError if `recorder daemon prune` has removed the run that the user means."""
    above: Sequence[Location] = location.absolute().parents
    names = [location.name, *(one.name for one in above)]
    places = [(folder, "/".join(reversed(names[: depth + 1]))) for depth, folder in enumerate(list(above)[:_MAX_DEPTH])]
    for folder, key in [*places, *((folder, location.name) for folder in folders)]:
        if store_of(folder).is_file(folder / PRUNED / f"{key}.json"):
            raise NotARunError(f"{location}: was pruned from {folder}: `recorder daemon prune` has removed the run")


def _newest_in(folder: Location, warn: Callable[..., None]) -> Location:
    runs = runs_in(folder)
    if not runs:
        _raise_no_run(folder)
    if len(runs) > 1:
        warn("%s: took %s, the newest of %d runs", folder, runs[-1].name, len(runs))
    return runs[-1].location


def _counted_back(location: Location, folders: Sequence[Location], number: int) -> Location:
    if not folders:
        raise NotARunError(f"{location}: no such directory; name a folder of runs before the @")
    runs = runs_in(folders[0])
    if not runs:
        _raise_no_run(folders[0])
    if number > len(runs):
        raise NotARunError(f"{location}: {folders[0]} holds {counted(len(runs), 'run')}, the oldest is @-{len(runs)}")
    return runs[-number].location


def _default_folders() -> list[Location]:
    folder = location_of(default_folder())
    return [folder] if store_of(folder).is_directory(folder) else []


def is_same_folder(folder: Location, other: Location) -> bool:
    """Return whether two locations are one directory, even if it is written, linked or mounted in two ways."""
    if os.path.realpath(str(folder)) == os.path.realpath(str(other)):
        return True
    with suppress(OSError):
        return os.path.samefile(str(folder), str(other))
    return False


def _described(runs: Sequence[ListedRun]) -> Iterator[str]:
    names = [run.name for run in runs]
    for run in runs[-_MAX_LISTED:]:
        details = [] if names.count(run.name) == 1 else [run.location.name]
        details += filter(None, [moment(run.created_ns), _last_step(run.location)])
        yield f"{run.name} ({', '.join(details)})" if details else run.name
    if len(runs) > _MAX_LISTED:
        yield f"and {len(runs) - _MAX_LISTED} older"


def _last_step(location: Location) -> str:
    with suppress(RunError):
        steps = [writer.last_step for writer in find_writers(location) if writer.last_step is not None]
        return f"up to step {max(steps)}" if steps else "no steps"
    return ""


def _nearest(location: Location, runs: Sequence[ListedRun], where: str) -> str:
    near = difflib.get_close_matches(location.name, [run.name for run in runs], n=3)
    if near:
        return f", and no run of this name in {where}; nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
    return f", and no run of this name in {where}" if where else ""


def _raise_no_run(folder: Location) -> NoReturn:
    parents: Sequence[Location] = folder.absolute().parents
    for parent in list(parents)[:2]:  # the path may be the directory of a rank or of a writer
        if has_manifest(parent):
            raise NotARunError(f"{folder}: is a part of a run; open the run: recorder ls {parent}")
    if (command := command_of_merge(folder)) is not None:
        raise NotARunError(f"{folder}: an unfinished merge; run it again, what is finished is kept: {command}")
    if pruned := pruned_runs(folder):
        raise NotARunError(pruned_note(folder, pruned))
    names = store_of(folder).list_directory(folder, directories=True)[:_MAX_LOOKED]
    if below := [name for name in names if runs_in(folder / name)]:
        raise NotARunError(f"{folder}: no run here, but in {listed(below, _MAX_LISTED)}: name {folder / below[0]}")
    why = "RECORDER=1 in front of a training command records a run; if it does not, `recorder doctor`, without a path"
    why += ", gives the reason"
    raise NotARunError(f"{folder}: no run here ({RUN_MANIFEST} is missing); {why}")


def command_of_merge(folder: Location) -> str | None:
    """Return the command that continues an unfinished merge in a directory. Return None if there is no such merge."""
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


def _look_at(location: Location) -> ListedRun | None:
    """Return the run in a directory, or None. A run with a damaged manifest gets the name of the directory."""
    if not has_manifest(location):
        return None
    manifest = RunManifest()
    with suppress(RunError):
        manifest = RunManifest.read(store_of(location).read_json(location / RUN_MANIFEST))
    return ListedRun(
        location=location,
        name=manifest.name or location.name,
        run_id=manifest.run_id or "" if manifest.merged_from is None else "",
        created_ns=manifest.created_ns or 0,
    )


FLEET = "_fleet"
"""The name of the folder with the documents of a fleet index."""
PRUNED = "_pruned"
"""The name of the folder, in a daemon's destination, that holds one file for each pruned run."""
_MAX_BYTES = 16 << 20
_MAX_TEXT = 300
_STATES = ("unclosed", "silent", "recording", "closed", "empty")
_QUIET_S = 300.0
"""A node is assumed to have stopped recording when its document is this old, in seconds."""


def is_fleet(folder: Location) -> bool:
    """Return whether a folder is in an object store and has a fleet index. The listing that this needs is cached."""
    if not isinstance(folder, ObjectPath):
        return False
    return FLEET in store_of(folder).list_directory(folder, directories=True)


def fleet_runs(folder: Location) -> dict[str, dict[str, Any]]:
    """Return the fleet index's summaries of the runs in a folder, by path. Empty if the folder has no index.

    If several nodes have parts of one run, their summaries of this run are added up.
    """
    if not is_fleet(folder):
        return {}
    store = store_of(folder)
    there = set(store.list_directory(folder, directories=True))
    location = folder / FLEET
    names = [name for name in store.list_directory(location, directories=False) if name.endswith(".json")]
    summaries: dict[str, dict[str, Any]] = {}

    def read(name: str) -> dict[str, Any]:
        with suppress(RunError):
            return store.read_json(location / name, _MAX_BYTES)
        return {}

    for document in store.each(read, names):
        is_stale = time.time() - _count(document.get("time_ns")) / 1e9 > _QUIET_S
        runs = document.get("runs")
        for path, summary in runs.items() if isinstance(runs, dict) else ():
            if isinstance(summary, dict) and path.partition("/")[0] in there:  # otherwise the run was just pruned
                one = _checked(path, summary, is_stale)
                summaries[path] = _added(summaries[path], one) if path in summaries else one
    return summaries


def pruned_runs(folder: Location) -> list[str]:
    """Return the paths of the runs that `recorder daemon prune` has removed from a folder that daemons ship to."""
    store = store_of(folder)
    found: list[str] = []
    below = [""] if store.is_directory(folder / PRUNED) else []
    while below:
        path = below.pop()
        inner = folder / PRUNED / path
        found += [path + name[:-5] for name in store.list_directory(inner, directories=False) if name.endswith(".json")]
        below += [f"{path}{name}/" for name in store.list_directory(inner, directories=True)]
    return sorted(found)


def pruned_note(folder: Location, pruned: Sequence[str]) -> str:
    """Return a sentence that a folder has no run left, with the runs that were pruned from it."""
    were = "run was" if len(pruned) == 1 else "runs were"
    return f"{folder}: no run is left here; {len(pruned):,} {were} pruned: {listed(pruned, _MAX_PRUNED)}"


def _checked(path: str, summary: Mapping[str, Any], is_stale: bool) -> dict[str, Any]:
    dropped, ranks, state = (summary.get(name) for name in ("dropped", "ranks", "state"))
    texts = {name: one if isinstance(one := summary.get(name), list) else [] for name in ("findings", "problems")}
    dropped = dropped if isinstance(dropped, dict) else {}
    state = "silent" if state == "recording" and is_stale else state if state in _STATES else "empty"
    step = summary.get("last_step")
    return {
        "path": path,
        "name": str(summary.get("name") or path.rpartition("/")[2])[:200],
        "run_id": str(summary.get("run_id"))[:200],
        "ranks": {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set(),
        "dropped": {str(reason): _count(count) for reason, count in dropped.items()},
        **{name: {str(one)[:_MAX_TEXT] for one in its} for name, its in texts.items()},
        "state": state,
        "last_step": step if isinstance(step, int) else None,
        **{name: _count(summary.get(name)) for name in ("created_ns", "started_ns", "world_size", "rows", "bytes")},
    }


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    reasons = one["dropped"].keys() | other["dropped"].keys()
    steps = [step for step in (one["last_step"], other["last_step"]) if step is not None]
    return {
        **one,
        **{name: one[name] | other[name] for name in ("ranks", "findings", "problems")},
        "dropped": {reason: one["dropped"].get(reason, 0) + other["dropped"].get(reason, 0) for reason in reasons},
        "state": min(one["state"], other["state"], key=_STATES.index),
        "last_step": max(steps, default=None),
        "world_size": max(one["world_size"], other["world_size"]),
        **{name: min(filter(None, (one[name], other[name])), default=0) for name in ("started_ns", "created_ns")},
        **{name: one[name] + other[name] for name in ("rows", "bytes")},
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
