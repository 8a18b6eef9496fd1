"""The output directory of a merge: its manifests, its units of work, and their publication for readers.

If `_run.json` exists, the published units are one complete merge. The file is removed before units are published or
removed, and it is written last. So no reader finds an incomplete merge. Finished units wait in `_merging`. This module
must never touch a directory that is not a merge of this very run with these very options.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import NotARunError, RunError, WriteError
from ..format.manifest import COUNTED
from ..format.rundir import MERGE_MANIFEST, RUN_MANIFEST, WRITER_MANIFEST, parse_rank_dir, read_json
from ..read.writers import GLOBAL_DIR
from ..run.finding import find_run_around
from ..run.run import Run
from ..sites import FORMAT_NAME, FORMAT_VERSION
from ..system.processes import locked_folder
from ..system.text import for_json, listed
from ..write.file import Disk
from ..write.manifest import create_manifest, replace_manifest
from .unit import is_unit_name

_MERGING = "_merging"
_PRIVATE = 0o700
"""The mode of directories. Only the owner may enter them, as in a recording."""
_DISK = Disk()
_SOURCE = "source"
"""The name of a writer that has no rows, but whose manifest replaces the manifests of the source run's writers."""


class Output:
    """The directory of a merged run. `call` names the folder in which this merge and its workers build units."""

    def __init__(self, path: Path, call: str | None = None) -> None:
        self.path = path
        self.call = call or f"_{os.getpid()}-{os.urandom(6).hex()}"
        """The name of the folder in which this call builds units. A late worker fails once the folder is gone."""
        self._merging = path / _MERGING

    def units(self) -> set[str]:
        """Return the names of the finished units of work, both published and waiting."""
        return self._published() | {name for name in _names(self._merging) if self._is_waiting(name)}

    def manifest_of(self, unit: str) -> dict[str, Any]:
        """Return the manifest of a finished unit's global rows. Return an empty one if it cannot be read."""
        for folder in (self._merging / unit / GLOBAL_DIR, self.path / GLOBAL_DIR / unit):
            with contextlib.suppress(RunError):
                return read_json(folder / WRITER_MANIFEST)
        return {}

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """Let any process build units inside the ``with`` block. After the block, building a unit fails."""
        folder = self._merging / self.call
        folder.mkdir(mode=_PRIVATE, parents=True)
        try:
            yield folder
        finally:
            self.stop_building()

    def stop_building(self) -> None:
        with contextlib.suppress(OSError):
            self._remove(self._merging / self.call)

    def begin(self) -> Path:
        """Make a folder to build a unit in. Called in any process while the merge is `building`."""
        folder = self._merging / self.call / f"{os.uname().nodename}-{os.getpid()}-{os.urandom(6).hex()}"
        folder.mkdir(mode=_PRIVATE)
        return folder

    def finish(self, folder: Path, unit: str) -> None:
        """Keep `folder` as a finished unit. Its files must be complete and synced."""
        _DISK.sync_directory(folder)
        try:
            os.rename(folder, self._merging / unit)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._is_waiting(unit):
                raise
            # A worker that was presumed dead has finished the unit after all. Both workers wrote equal bytes.
            shutil.rmtree(folder, ignore_errors=True)
        _DISK.sync_directory(self._merging)

    def clear(self, wanted: Collection[str] | None = None) -> None:
        """Remove the unfinished units of a killed merge. Remove finished units unless `wanted` or published."""
        for name in _names(self._merging):
            if not self._is_waiting(name) or (wanted is not None and name not in wanted):
                # Errors are ignored: a worker of a killed merge may still write to this folder.
                shutil.rmtree(self._merging / name, ignore_errors=True)

    def publish(self, wanted: Collection[str], source: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """Publish the finished units in `wanted` and no others, with the manifests `source` and `run`."""
        published = self._published()
        waiting = [name for name in wanted if name not in published or self._is_waiting(name)]
        stale = [published - set(wanted), self._debris(wanted)]
        if not waiting and not any(stale) and self._has_manifests(source, run):
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
            if name in published:  # built again: the global directory marks a published unit, and is removed last
                of_ranks = (self.path / rank / name for rank in self._ranks())
                for folder in (*filter(Path.is_dir, of_ranks), self.path / GLOBAL_DIR / name):
                    self._remove(folder)
            self._publish(name)
        source_folder = self.path / GLOBAL_DIR / _SOURCE
        source_folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        replace_manifest(_DISK, source_folder / WRITER_MANIFEST, source)
        for name in (GLOBAL_DIR, *self._ranks()):
            _DISK.sync_directory(self.path / name)
            with contextlib.suppress(OSError):
                os.rmdir(self.path / name)  # `rmdir` removes only an empty folder
        shutil.rmtree(self._merging, ignore_errors=True)
        replace_manifest(_DISK, self.path / RUN_MANIFEST, run)

    def _published(self) -> set[str]:
        return {name for name in _names(self.path / GLOBAL_DIR) if is_unit_name(name)}

    def _is_waiting(self, name: str) -> bool:
        """Return True if a name in `_merging` is a finished unit. It keeps its global directory until published."""
        return is_unit_name(name) and (self._merging / name / GLOBAL_DIR).is_dir()

    def _debris(self, wanted: Collection[str]) -> list[Path]:
        return [
            self.path / name / unit for name in self._ranks() for unit in _names(self.path / name) if unit not in wanted
        ]

    def _ranks(self) -> list[str]:
        return [name for name in _names(self.path) if parse_rank_dir(name) is not None]

    def _publish(self, unit: str) -> None:
        """Move a unit's directories to their final paths. The global directory moves last: it marks completion."""
        folder = self._merging / unit
        for name in sorted(_names(folder), key=lambda name: (name == GLOBAL_DIR, name)):
            (self.path / name).mkdir(mode=_PRIVATE, exist_ok=True)
            os.rename(folder / name, self.path / name / unit)
        folder.rmdir()

    def _remove(self, folder: Path) -> None:
        """Rename a folder, and then remove it: a worker might make new files in it while files are removed."""
        self._merging.mkdir(mode=_PRIVATE, exist_ok=True)
        gone = self._merging / f"_gone-{os.urandom(6).hex()}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _has_manifests(self, source: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
        try:
            paths = self.path / GLOBAL_DIR / _SOURCE / WRITER_MANIFEST, self.path / RUN_MANIFEST
            on_disk = [read_json(path) for path in paths]
        except RunError:
            return False
        times = ("created_ns", "closed_ns")
        old, new = (
            [{k: v for k, v in manifest.items() if k not in times} for manifest in manifests]
            for manifests in (on_disk, (source, run))
        )
        return bool(old == json.loads(json.dumps(new)))


@contextlib.contextmanager
def open_output(path: Path, run: Run, options: Mapping[str, Any]) -> Iterator[Output]:
    """Create or continue the directory of a merge, and lock it inside the ``with`` block.

    Raises WriteError if the directory has other content or cannot be written, or if another merge is running there.
    Then nothing is touched.
    """
    path = Path(os.path.abspath(path))
    _check_path(path, run)
    identity = {
        "format": "recorder merge",
        "version": [1, 0],
        "run_id": run.run_id,
        "run_created_ns": run.manifest.created_ns,
        "options": dict(options),
    }
    manifest = _find_manifest(path, run)
    if manifest is not None:
        _check_same(path, manifest, identity)
    try:
        path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{path}: cannot be made ({error.strerror}); name another directory with -o") from error
    with locked_folder(path, "merge"):
        if manifest is None and not create_manifest(
            _DISK, path / MERGE_MANIFEST, identity | {"path": str(run.path.absolute())}
        ):
            _check_same(path, read_json(path / MERGE_MANIFEST), identity)  # another merge has created it first
        _check_links(path)
        yield Output(path)


def _check_path(path: Path, run: Run) -> None:
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
    advice = "name a directory that does not exist yet"
    if not os.path.lexists(path):
        return None
    if not path.is_dir():
        kind = "a file" if path.is_file() else "a link that leads nowhere" if path.is_symlink() else "no directory"
        raise WriteError(f"{path}: is {kind}; {advice}")
    names = os.listdir(path)
    if MERGE_MANIFEST in names:
        try:
            return read_json(path / MERGE_MANIFEST)
        except (NotARunError, RunError) as error:
            raise WriteError(f"{error}; {advice}") from error
    rest = [name for name in names if not (name.startswith(f"{MERGE_MANIFEST}.") and name.endswith(".tmp"))]
    if not rest:
        return None  # the directory is empty, or a merge was killed right after its start
    if RUN_MANIFEST in names:
        with contextlib.suppress(RunError):
            manifest = read_json(path / RUN_MANIFEST)
            if manifest.get("format") == FORMAT_NAME:
                raise WriteError(f"{path}: is a recorded run ({manifest.get('run_id')!r}), no merge; {advice}")
    raise WriteError(f"{path}: exists, holds {listed(sorted(rest), 3)} and is no merge of {run.run_id!r}; {advice}")


def _check_links(path: Path) -> None:
    """Raise WriteError for symbolic links, through which files outside the directory might be changed or removed."""
    for folder, folders, files in os.walk(path):
        for where in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(where):
                raise WriteError(f"{where}: is a symbolic link, and a merge has none; name another directory")


def _check_same(path: Path, manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    advice = "name another directory, or remove this one"
    if manifest.get("format") != identity["format"] or manifest.get("version") != identity["version"]:
        raise WriteError(f"{path}: its {MERGE_MANIFEST} is of another program or version; {advice}")
    if any(manifest.get(name) != identity[name] for name in ("run_id", "run_created_ns")):
        raise WriteError(
            f"{path}: is a merge of another run, {manifest.get('run_id')!r} ({manifest.get('path')}); {advice}"
        )
    if manifest.get("options") != json.loads(json.dumps(identity["options"])):
        text = json.dumps(manifest.get("options"), sort_keys=True)
        raise WriteError(f"{path}: is a merge of this run with other options ({text}); {advice}")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


_INFORMATIVE = ("versions", "settings", "rules", "optimizers", "autoload")
_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}


def of_run(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `_run.json`, including the path of the source run and the options."""
    merged_from = {"run_id": run.run_id, "created_ns": run.manifest.created_ns, **options}
    return {
        **_FORMAT,
        "run_id": run.run_id,
        "world_size": run.world_size,
        "created_ns": time.time_ns(),
        "asked": for_json(run.manifest.members.get("asked", {})),
        "merged_from": merged_from,
    }


def of_units(run: Run) -> dict[str, Any]:
    """Return what the manifests of all units of work have in common."""
    sources = [source for writer in run.writers if (source := writer.manifest.step_source) is not None]
    # If any writer counted the steps itself, attempts cannot be matched by step.
    source = COUNTED if COUNTED in sources else next(iter(sources), None)
    return {"run_id": run.run_id, "world_size": run.world_size, "step_source": source}


def of_source(run: Run) -> dict[str, Any]:
    """Return the `_writer.json` of the writer without rows: modules, rules, events and row counts of the source."""
    informative = {
        name: next((members[name] for writer in run.writers if name in (members := writer.manifest.members)), None)
        for name in _INFORMATIVE
    }
    run.load_balances()
    ledger = {"observed": 0, "written": 0, "dropped": {}, "retired": {"rows": 0, "bytes": 0}}
    return {
        **_FORMAT,
        **of_units(run),
        "writer": "source",
        "rank": None,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "attempt": min((writer.attempt for writer in run.writers), default=0),
        "started_ns": min((writer.started_ns for writer in run.writers), default=0),
        "closed_ns": time.time_ns(),
        "state": "closed",
        "ledger": ledger,
        **{name: for_json(value) for name, value in informative.items() if value is not None},
        "roots": for_json(_roots(run)),
        "events": for_json(_events(run)),
        **({"dumps": dumps} if (dumps := _dumps(run)) else {}),
        "merged_writers": [_account(writer) for writer in run.writers],
    }


def _roots(run: Run) -> list[dict[str, Any]]:
    """Return the roots (recorded models) of all writers. The stages of a pipeline become one root."""
    roots: dict[str, dict[str, Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    unshared_of: dict[str, dict[str, str]] = {}
    for writer in run.writers:
        for root in writer.manifest.roots:
            known = roots.setdefault(root.name, {})
            unshared = unshared_of.setdefault(root.name, {})
            unshared |= root.unshared
            known |= {**root.members, "name": root.name, **({"unshared": unshared} if unshared else {})}
            of_root = modules.setdefault(root.name, {})
            of_root |= {module.path: dict(module.members) for module in root.modules}
    return [root | {"modules": list(modules[name].values())} for name, root in roots.items()]


def _events(run: Run) -> list[dict[str, Any]]:
    """Return the events of all writers. An event of several ranks appears once, with its ranks."""
    events: dict[tuple[str, str], dict[str, Any]] = {}
    for writer in run.writers:
        for event in writer.manifest.events:
            known = events.setdefault((event.kind, event.message), {**event.members, "ranks": []})
            if writer.rank is not None and writer.rank not in known["ranks"]:
                known["ranks"].append(writer.rank)
    return list(events.values())


def _dumps(run: Run) -> list[dict[str, Any]]:
    plain = ("first_step", "last_step", "reason", "by", "time_ns")
    return [
        {name: getattr(dump, name) for name in plain} | {"rows": dump.num_rows, "bytes": dump.num_bytes}
        for dump in run.dumps
    ]


def _account(writer: Any) -> dict[str, Any]:
    balance = writer.balance
    return {
        "rank": writer.rank,
        "writer": writer.name,
        "attempt": writer.attempt,
        "state": writer.state,
        "ending": writer.ending,
        "observed": balance.observed,
        "written": balance.written,
        "dropped": balance.dropped,
        **({"passed": balance.passed} if balance.passed else {}),
        "retired": {"rows": balance.retired_rows, "bytes": balance.retired_bytes},
    }
