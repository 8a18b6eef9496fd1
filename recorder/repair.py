"""Owns the repair of a run whose writers died: their open shards are sealed, indexes made again, remains removed.

Must never touch a writer that may be alive, never overwrite a file, and never remove the only copy of a row: a sealed
shard is on the medium under its final name before the open one goes, and what holds damage is kept under a name that
readers pass over. So it may be killed at any instant and run again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import CorruptError, RunError, WriteError
from .format.rundir import index_name, open_name, parse_shard_name, shard_name
from .format.schema import LIGHT_COLUMNS
from .processes import runs
from .read.files import GrowingFile
from .read.places import LOCAL
from .read.rows import INDEX_COLUMNS, PLACE_FIELDS, SHARD_BYTES_KEY
from .read.run import Run
from .read.salvage import Salvaged, salvage
from .read.shard import Shard, open_sealed
from .read.writers import RecordedWriter
from .write.file import Disk, PageMemory, publish
from .write.ipc import Layout
from .write.shard import BatchFile, Index

_REMAINS = re.compile(r"_.*\.tmp|__.*\.index\.open")
"""What a writer or a repair that was killed leaves beside whole files: half a file, under a name of its own."""
_MEMORY_BYTES = 8 << 20
_QUIET_S = 60.0
"""A writer that has changed a file since then is alive, whatever the user thinks."""

Report = Callable[[int], None]
"""Told how many bytes of shards were dealt with since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One thing that was done, or would be."""

    what: str
    """``sealed``, ``indexed``, ``removed`` or ``kept``; ``skipped``: a writer that may be alive; ``lost``: for good;
    ``failed``: the disk refused."""
    path: Path
    text: str
    """Why, or what of it, for people."""
    rows: int = 0
    num_bytes: int = 0


def repair_run(
    run: Run,
    *,
    is_dry: bool = False,
    assume_dead: bool = False,
    disk: Disk | None = None,
    report: Report = lambda num_bytes: None,
) -> Iterator[Outcome]:
    """Repair what dead writers have left, one outcome after the other.

    Args:
        run: opened a moment ago.
        is_dry: look at everything and change nothing.
        assume_dead: also whoever cannot be asked, or whose process number is in use, if quiet for a minute.
        disk: the seam for tests.
        report: for a progress bar.

    Raises:
        WriteError: another repair is at work there.
    """
    with contextlib.ExitStack() as stack:
        if not is_dry:
            stack.enter_context(_locked(run.path))
        is_over = True
        for writer in run.writers:
            reason = _may_be_alive(writer, assume_dead=assume_dead)
            if reason:
                is_over = False
                yield Outcome(what="skipped", path=writer.directory, text=reason)
            else:
                changed_s = _changed_s(writer.directory)
                yield from _Repair(writer, disk or Disk(), report, is_dry=is_dry).run()
                if not is_dry:
                    _set_back(writer.directory, changed_s)
        if is_over:
            yield from _remove_remains(run.path, disk or Disk(), is_dry=is_dry)


def _may_be_alive(writer: RecordedWriter, *, assume_dead: bool) -> str:
    """Why a writer must be left alone; empty where it has ended."""
    if writer.state == "closed":
        return ""
    host, pid = writer.manifest.get("host"), writer.manifest.get("pid")
    is_running = runs(writer.manifest)
    if is_running is False:
        return ""
    if is_running and writer.manifest.get("process"):
        return f"is alive: process {pid} runs on this host"
    if time.time() - _changed_s(writer.directory) < _QUIET_S:
        if is_running:
            why = f"process {pid} runs on this host"
        elif host:
            why = f"it wrote on host {host!r} within the last minute"
        else:  # it has just begun, or was killed in the instant between its directory and its manifest
            why = "it began within the last minute and has not said on which host"
        return f"may be alive: {why}"
    if assume_dead:
        return ""
    if is_running:
        why = f"process {pid} runs on this host, if it is no other program by now"
    elif host == os.uname().nodename:
        why = f"process {pid} of a host of this name is out of sight: in another container, or before a boot"
    else:
        why = f"host {host!r} cannot be asked from here" if host else "it never said on which host it runs"
    return f"may be alive: {why}; when the job is over, say --assume-dead"


def _changed_s(directory: Path) -> float:
    """When a writer last did anything in its directory, as the file system says."""
    names = LOCAL.list_directory(directory, directories=False)
    return max((directory / name).stat(follow_symlinks=False).st_mtime for name in [".", *names])


def _set_back(directory: Path, changed_s: float) -> None:
    """Nothing here is newer than that: a repair is no sign of life of a writer that cannot be asked."""
    for name in [*LOCAL.list_directory(directory, directories=False), "."]:
        path = directory / name
        if path.stat(follow_symlinks=False).st_mtime > changed_s:
            with contextlib.suppress(OSError):  # another user's
                os.utime(path, (changed_s, changed_s), follow_symlinks=False)


class _Repair:
    """The repair of one writer's directory."""

    def __init__(self, writer: RecordedWriter, disk: Disk, report: Report, *, is_dry: bool) -> None:
        self._directory = writer.directory
        self._disk = disk
        # What is made here may be read by whoever may read the rest.
        self._disk.file_mode = 0o200 | stat.S_IMODE(writer.directory.stat().st_mode) & 0o444
        self._report = report
        self._is_dry = is_dry
        self._memory = PageMemory(_MEMORY_BYTES)
        self._payload = PageMemory(_MEMORY_BYTES)

    def run(self) -> Iterator[Outcome]:
        yield from _remove_remains(self._directory, self._disk, is_dry=self._is_dry)
        names = LOCAL.list_directory(self._directory, directories=False)
        shards = sorted(filter(None, map(parse_shard_name, names)), key=lambda s: (s.number, s.kind, s.is_open))
        for shard in shards:
            name = shard_name(shard.kind, shard.number)
            path = self._directory / (open_name(name) if shard.is_open else name)
            try:
                if shard.is_open:
                    yield from self._end(path, self._directory / name)
                else:
                    yield from self._check_index(path)
            except OSError as error:
                yield Outcome(what="failed", path=path, text=str(error))
            except RunError as error:
                yield Outcome(what="lost", path=path, text=str(error))
        for name in names:  # of a shard that retention removed
            if name.startswith("_tensors-") and name.endswith(".index"):
                shard_path = self._directory / f"{name[1:].removesuffix('.index')}.arrow"
                if index_name(shard_path.name) == name and not os.path.lexists(shard_path):
                    yield self._remove(self._directory / name, "the index of a shard that is gone")

    def _end(self, path: Path, final: Path) -> Iterator[Outcome]:
        """Turn an open shard into a sealed one, or remove it where that has happened."""
        num_bytes = path.stat(follow_symlinks=False).st_size
        found = salvage(lambda: GrowingFile(path))
        self._report(num_bytes)
        is_cut = found.num_trailing_bytes > 0 and not found.tail_damage
        damage = [*found.damage, *filter(None, [found.tail_damage])]
        if os.path.lexists(final):
            yield from self._remove_twin(path, final, found, damage)
            return
        if found.blocks:
            num_rows, unreadable = self._seal(path, final, found)
            damage += unreadable
            text = f"{len(found.blocks)} {'batch' if len(found.blocks) == 1 else 'batches'} of {path.name}"
            yield Outcome(what="sealed", path=final, text=text, rows=num_rows, num_bytes=num_bytes)
        for text in damage:
            yield Outcome(what="lost", path=path, text=text)
        if is_cut:
            text = f"{found.num_trailing_bytes} bytes of a write that was cut"
            yield Outcome(what="lost", path=path, text=text, num_bytes=found.num_trailing_bytes)
        if damage:
            yield self._set_aside(path)
        elif found.blocks:
            self._unlink(path)
        else:
            yield self._remove(path, "an open shard without a whole batch")
        if found.blocks and not self._is_dry:
            yield from self._check_index(final, is_new=True)

    def _remove_twin(self, path: Path, final: Path, found: Salvaged, damage: list[str]) -> Iterator[Outcome]:
        """An open shard whose final name is taken: by itself, by its repair, or by a stranger."""
        if not self._disk.is_same(path, final):
            missing = _rows_missing(path, found, final)
            if missing:
                text = f"{missing} rows of it are not in {final.name}, which is in the way; both are left as they are"
                yield Outcome(what="lost", path=path, text=text, rows=missing)
                return
            shard = Shard(lambda: GrowingFile(path), found.layout, found.blocks)
            if damage or any(_payload_problem(shard, number) for number in found.blocks):
                yield self._set_aside(path)
                return
        yield self._remove(path, f"{final.name} has all of it")

    def _seal(self, path: Path, final: Path, found: Salvaged) -> tuple[int, list[str]]:
        """Copy every batch into a sealed shard; returns its rows, and what could not be copied whole."""
        shard = Shard(lambda: GrowingFile(path), found.layout, found.blocks)
        names = found.layout.schema.names
        damage: list[str] = []
        num_rows = 0
        file = None
        kind = parse_shard_name(final.name)
        layout = Layout(found.layout.schema, "zstd" if kind is not None and kind.kind == "stats" else None)
        if not self._is_dry:
            temporary = final.with_name(f"_{final.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
            file = BatchFile(self._disk, temporary, layout, self._memory, is_direct=False)
        try:
            for number in found.blocks:
                problem = _payload_problem(shard, number)
                batch, header, _ = shard.read(number, [name for name in names if not problem or name != "data"])
                if problem:
                    batch = _without_payloads(batch, found.layout.schema)
                    damage.append(f"{problem}; its rows are kept, without their payloads")
                num_rows += batch.num_rows
                if file is not None and layout.is_compressed:
                    file.append(batch, header.ledger)
                elif file is not None:
                    file.append_around(batch, header.ledger, self._payload)
            if file is not None:
                file.seal(final, found.last_header.ledger if found.last_header is not None else {})
                self._disk.sync_directory(self._directory)
        except BaseException:
            if file is not None:
                file.discard()
            raise
        return num_rows, damage

    def _check_index(self, path: Path, *, is_new: bool = False) -> Iterator[Outcome]:
        """Make the index of a sealed shard where there is none that fits."""
        shard, _ = open_sealed(path)
        num_bytes = path.stat(follow_symlinks=False).st_size
        if not is_new:
            self._report(num_bytes)
        index_path = path.with_name(index_name(path.name))
        problem = _index_problem(index_path, num_bytes)
        if path.name.startswith("stats") or not problem:
            return
        index = Index()
        for number in shard.blocks:
            index.add(shard.read(number, LIGHT_COLUMNS).batch)
        if not self._is_dry:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(index_path)
            index.write(self._disk, path, num_bytes, self._memory)
            self._disk.sync_directory(self._directory)
        if not is_new:
            yield Outcome(what="indexed", path=index_path, text=problem)

    def _set_aside(self, path: Path) -> Outcome:
        """Keep a damaged file where no reader looks, for whoever can make more of it."""
        aside = path.with_name(f"{path.name.removesuffix('.open')}.damaged")
        if not self._is_dry:
            publish(self._disk, path, aside)
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)
            self._disk.sync_directory(self._directory)
        return Outcome(what="kept", path=aside, text="as it was, because it holds damage; readers pass over it")

    def _remove(self, path: Path, why: str) -> Outcome:
        num_bytes = path.stat(follow_symlinks=False).st_size
        self._unlink(path)
        return Outcome(what="removed", path=path, text=why, num_bytes=num_bytes)

    def _unlink(self, path: Path) -> None:
        if not self._is_dry:
            self._disk.unlink(path)
            self._disk.sync_directory(self._directory)


def _remove_remains(folder: Path, disk: Disk, *, is_dry: bool) -> Iterator[Outcome]:
    for name in LOCAL.list_directory(folder, directories=False):
        if _REMAINS.fullmatch(name):
            path = folder / name
            try:
                num_bytes = path.stat(follow_symlinks=False).st_size
                if not is_dry:
                    disk.unlink(path)
            except OSError as error:
                yield Outcome(what="failed", path=path, text=str(error))
            else:
                yield Outcome(what="removed", path=path, text="half a file that a kill left", num_bytes=num_bytes)


def _rows_missing(path: Path, found: Salvaged, final: Path) -> int:
    """Rows of an open shard that are not in the sealed one of its name."""
    there = np.zeros(0, np.int64)
    with contextlib.suppress(RunError):
        there = _seqs(open_sealed(final)[0])
    return int((~np.isin(_seqs(Shard(lambda: GrowingFile(path), found.layout, found.blocks)), there)).sum())


def _seqs(shard: Shard) -> npt.NDArray[np.int64]:
    """Numbers of the rows of all batches."""
    found = [shard.read(number, ("seq",)).batch.column("seq").to_numpy() for number in shard.blocks]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _payload_problem(shard: Shard, number: int) -> str:
    """What is wrong with the payloads of a batch; empty where they are as they were written."""
    try:
        shard.read(number, ("data",))
    except CorruptError as error:
        return str(error)
    return ""


def _index_problem(path: Path, shard_bytes: int) -> str:
    """Why an index cannot be used; empty where it can."""
    try:
        index, _ = open_sealed(path, extra=PLACE_FIELDS, without=("data",))
        for number in index.blocks:
            index.read(number, INDEX_COLUMNS)
    except FileNotFoundError:
        return "was missing"
    except RunError as error:
        return f"was damaged ({error})"
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % shard_bytes:
        return "was of another shard"
    return ""


def _without_payloads(batch: Any, schema: Any) -> pa.RecordBatch:
    """The batch with its payload columns null, and a note in each row that says so."""
    notes = []
    for text in batch.column("note").to_pylist():
        note = None
        with contextlib.suppress(ValueError, RecursionError):
            note = json.loads(text or "{}")
        note = note if isinstance(note, dict) else {}  # a stranger may have written anything
        notes.append(json.dumps({**note, "no_payload": "damaged"}, separators=(",", ":")))
    columns = []
    for field in schema:
        if field.name in ("encoding", "payload_bytes", "data"):
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(pa.array(notes, field.type) if field.name == "note" else batch.column(field.name))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise WriteError(f"{folder}: another repair is at work there; wait for it") from error
            # A file system without locks: whoever starts two repairs at once there is on their own.
        yield
    finally:
        os.close(descriptor)
