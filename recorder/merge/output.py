"""Owns the output directory: whose it is, which units it has, and the moment at which readers see them.

While `_run.json` stands, what is published is one whole merge. It goes first and comes back last whenever units are
published or removed, so no reader sees a part. Finished units wait in `_merging`. Must never touch a directory that is
not a merge of this very run with these very options.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import NotARunError, RunError, WriteError
from ..format.rundir import (
    MERGE_MANIFEST,
    RUN_MANIFEST,
    WRITER_MANIFEST,
    parse_rank_dir,
    read_json,
)
from ..format.schema import FORMAT_NAME
from ..read.run import Run
from ..read.which import find_run_around
from ..read.writers import GLOBAL_DIR
from ..write.file import Disk
from ..write.manifest import create_manifest, replace_manifest
from .plan import is_unit_name

_MERGING = "_merging"
_PRIVATE = 0o700
"""Directories are for the owner alone, as those of a recording are."""
_DISK = Disk()
_SOURCE = "source"
"""The writer without rows that says what the source's writers said."""


class Output:
    """The directory of a merged run."""

    def __init__(self, path: Path, call: str | None = None) -> None:
        """Nothing happens yet.

        Args:
            path: where.
            call: what `call` was in the process that has the lock; without, this is that process.
        """
        self.path = path
        self.call = call or f"_{os.getpid()}-{os.urandom(6).hex()}"
        """Name of the folder in which this call's units are built: who comes after it was removed builds nothing."""
        self._merging = path / _MERGING

    @property
    def is_whole(self) -> bool:
        """Whether readers see a run here."""
        return (self.path / RUN_MANIFEST).is_file()

    def units(self) -> set[str]:
        """Names of the units that are finished, published or not."""
        return self._published() | {name for name in _names(self._merging) if self._is_waiting(name)}

    def manifest_of(self, unit: str) -> dict[str, Any]:
        """The manifest of the global rows of a finished unit; empty where it cannot be read."""
        for folder in (self._merging / unit / GLOBAL_DIR, self.path / GLOBAL_DIR / unit):
            with contextlib.suppress(RunError):
                return read_json(folder / WRITER_MANIFEST)
        return {}

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """Let units be built, by any process, until the block ends: a process that outlives it cannot go on."""
        folder = self._merging / self.call
        folder.mkdir(mode=_PRIVATE, parents=True)
        try:
            yield folder
        finally:
            self.stop_building()

    def stop_building(self) -> None:
        """End it: who is at work on a unit fails."""
        gone = self._merging / f"_gone-{os.urandom(6).hex()}"
        with contextlib.suppress(OSError):
            os.rename(self._merging / self.call, gone)  # at one blow: somebody might make new files while these go
        shutil.rmtree(gone, ignore_errors=True)

    def begin(self) -> Path:
        """A new folder to build a unit in; any process, while the merge is `building`."""
        folder = self._merging / self.call / f"{os.uname().nodename}-{os.getpid()}-{os.urandom(6).hex()}"
        folder.mkdir(mode=_PRIVATE)
        return folder

    def finish(self, folder: Path, unit: str) -> None:
        """The unit in `folder` is whole and on the disk: from now on it need not be made again."""
        _DISK.sync_directory(folder)
        try:
            os.rename(folder, self._merging / unit)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._is_waiting(unit):
                raise
            # A worker that was given up has made it after all; what either made is the same.
            shutil.rmtree(folder, ignore_errors=True)
        _DISK.sync_directory(self._merging)

    def clear(self, wanted: Collection[str] | None = None) -> None:
        """Remove what a killed merge has left half done, and finished units that are not `wanted` and not published."""
        for name in _names(self._merging):
            if not self._is_waiting(name) or (wanted is not None and name not in wanted):
                shutil.rmtree(self._merging / name, ignore_errors=True)  # a worker of a killed merge may be at it yet

    def publish(self, wanted: Collection[str], source: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Show readers the finished units `wanted`, and nothing else.

        Args:
            wanted: names of units, all of them finished.
            source: manifest of the writer that speaks for the source's.
            run: the manifest of the run.
        """
        published = self._published()
        waiting = [name for name in wanted if name not in published or self._is_waiting(name)]
        stale = [published - set(wanted), self._debris(wanted)]
        if self.is_whole and not waiting and not any(stale) and self._says(source, run):
            shutil.rmtree(self._merging, ignore_errors=True)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / RUN_MANIFEST)
            _DISK.sync_directory(self.path)
        for name in published - set(wanted):
            self._remove(self.path / GLOBAL_DIR / name)
        for folder in self._debris(wanted):
            self._remove(folder)
        for name in waiting:
            if name in published:  # made again; its global part goes last, so that a kill leaves it to be removed
                for folder in (*self._of_ranks(name), self.path / GLOBAL_DIR / name):
                    self._remove(folder)
            self._publish(name)
        source_folder = self.path / GLOBAL_DIR / _SOURCE
        source_folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        replace_manifest(_DISK, source_folder / WRITER_MANIFEST, source)
        for name in (GLOBAL_DIR, *self._ranks()):
            _DISK.sync_directory(self.path / name)
            with contextlib.suppress(OSError):
                os.rmdir(self.path / name)  # only where nothing is in it any more
        shutil.rmtree(self._merging, ignore_errors=True)
        replace_manifest(_DISK, self.path / RUN_MANIFEST, run)

    def _published(self) -> set[str]:
        return {name for name in _names(self.path / GLOBAL_DIR) if is_unit_name(name)}

    def _is_waiting(self, name: str) -> bool:
        """Whether a name in `_merging` is a finished unit; one whose publication was cut still has its global part."""
        return is_unit_name(name) and (self._merging / name / GLOBAL_DIR).is_dir()

    def _debris(self, wanted: Collection[str]) -> list[Path]:
        """Per-rank parts of units that are not wanted."""
        return [
            self.path / name / unit for name in self._ranks() for unit in _names(self.path / name) if unit not in wanted
        ]

    def _of_ranks(self, unit: str) -> list[Path]:
        """Per-rank parts of a unit that are published."""
        return [self.path / name / unit for name in self._ranks() if (self.path / name / unit).is_dir()]

    def _ranks(self) -> list[str]:
        return [name for name in _names(self.path) if parse_rank_dir(name) is not None]

    def _publish(self, unit: str) -> None:
        """Move the directories of a unit to their places, the global one last: then nothing of it is missing."""
        folder = self._merging / unit
        for name in sorted(_names(folder), key=lambda name: (name == GLOBAL_DIR, name)):
            (self.path / name).mkdir(mode=_PRIVATE, exist_ok=True)
            os.rename(folder / name, self.path / name / unit)
        folder.rmdir()

    def _remove(self, folder: Path) -> None:
        """Remove a published directory; it is gone for readers at once."""
        self._merging.mkdir(mode=_PRIVATE, exist_ok=True)
        gone = self._merging / f"_gone-{os.urandom(6).hex()}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _says(self, source: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
        """Whether the manifests say this already, whenever they were written."""
        try:
            found = read_json(self.path / GLOBAL_DIR / _SOURCE / WRITER_MANIFEST), read_json(self.path / RUN_MANIFEST)
        except RunError:
            return False
        times = ("created_ns", "closed_ns")
        old, new = (
            [{k: v for k, v in one.items() if k not in times} for one in pair] for pair in (found, (source, run))
        )
        return bool(old == json.loads(json.dumps(new)))


@contextlib.contextmanager
def open_output(path: Path, run: Run, options: Mapping[str, Any]) -> Iterator[Output]:
    """Create or take up the directory of a merge, and lock it while it is worked on.

    Args:
        path: where; it may be new, empty, or a merge of this very run with these options, finished or not.
        run: what is merged.
        options: what else decides how.

    Raises:
        WriteError: it is something else, cannot be written, or another merge is at work there. Nothing was touched.
    """
    path = Path(os.path.abspath(path))
    _check_place(path, run)
    identity = {
        "format": "recorder merge",
        "version": [1, 0],
        "run_id": run.run_id,
        "run_created_ns": created if type(created := run.manifest.get("created_ns")) is int else None,
        "options": dict(options),
    }
    found = _find_manifest(path, run)
    if found is not None:
        _check_same(path, found, identity)
    path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    descriptor = _lock(path)
    try:
        if found is None and not create_manifest(
            _DISK, path / MERGE_MANIFEST, identity | {"path": str(run.path.absolute())}
        ):
            _check_same(path, read_json(path / MERGE_MANIFEST), identity)  # another merge came first
        _check_links(path)
        yield Output(path)
    finally:
        os.close(descriptor)


def _check_place(path: Path, run: Run) -> None:
    target = Path(os.path.realpath(path))
    if isinstance(run.path, Path):
        source = Path(os.path.realpath(run.path))
        if target == source:
            raise WriteError(f"{path}: is the run itself; name another directory with -o")
        if source in target.parents:
            raise WriteError(f"{path}: lies inside the run {run.path}, which is never changed; name another directory")
        if target in source.parents:
            raise WriteError(f"{path}: the run {run.path} lies inside it; name another directory")
    if (other := find_run_around(target.parent)) is not None:
        raise WriteError(f"{path}: lies inside the run {other}, which is never changed; name another directory")


def _find_manifest(path: Path, run: Run) -> dict[str, Any] | None:
    """What a directory says of the merge in it; None where there is nothing yet.

    Raises:
        WriteError: there is something that is no merge.
    """
    wanted = "name a directory that does not exist yet"
    if not os.path.lexists(path):
        return None
    if not path.is_dir():
        kind = "a file" if path.is_file() else "a link that leads nowhere" if path.is_symlink() else "no directory"
        raise WriteError(f"{path}: is {kind}; {wanted}")
    names = os.listdir(path)
    if MERGE_MANIFEST in names:
        try:
            return read_json(path / MERGE_MANIFEST)
        except (NotARunError, RunError) as error:
            raise WriteError(f"{error}; {wanted}") from error
    rest = [name for name in names if not (name.startswith(f"{MERGE_MANIFEST}.") and name.endswith(".tmp"))]
    if not rest:
        return None  # empty, or a merge was killed in its first instant
    if RUN_MANIFEST in names:
        with contextlib.suppress(RunError):
            found = read_json(path / RUN_MANIFEST)
            if found.get("format") == FORMAT_NAME:
                raise WriteError(f"{path}: is a recorded run ({found.get('run_id')!r}), no merge; {wanted}")
    some = ", ".join(sorted(rest)[:3]) + (", ..." if len(rest) > 3 else "")
    raise WriteError(f"{path}: exists, holds {some} and is no merge of {run.run_id!r}; {wanted}")


def _check_links(path: Path) -> None:
    """Refuse a directory with a symbolic link in it: what is published or removed there might lie elsewhere."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):
                where = os.path.join(folder, name)
                raise WriteError(f"{where}: is a symbolic link, and a merge has none; name another directory")


def _check_same(path: Path, found: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    wanted = "name another directory, or remove this one"
    if found.get("format") != identity["format"] or found.get("version") != identity["version"]:
        raise WriteError(f"{path}: its {MERGE_MANIFEST} is of another program or version; {wanted}")
    if any(found.get(name) != identity[name] for name in ("run_id", "run_created_ns")):
        raise WriteError(f"{path}: is a merge of another run, {found.get('run_id')!r} ({found.get('path')}); {wanted}")
    if found.get("options") != json.loads(json.dumps(identity["options"])):
        text = json.dumps(found.get("options"), sort_keys=True)
        raise WriteError(f"{path}: is a merge of this run with other options ({text}); {wanted}")


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise WriteError(f"{path}: another merge is at work there; wait for it") from error
        # A file system without locks: whoever starts two merges at once there is on their own.
    return descriptor


def _names(folder: Path) -> list[str]:
    """What is in a directory; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
