"""Ships the files of one writer in two lanes (queues): a small lane with a deadline, and a large lane without.

The small lane takes statistics, the manifest and the status. The large lane takes tensors. A manifest or a status that
says that its writer has ended is held back until the destination has all files of the writer. So a reader at the
destination finds all rows of a writer that has ended.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from crc32c import crc32c

from ..errors import CorruptError, RunError, StoreError
from ..format.manifest import Lifetime, RowCounts
from ..format.rundir import (
    MAX_MANIFEST_BYTES,
    STATUS,
    STATUS_BYTES,
    WRITER_MANIFEST,
    Members,
    encode_manifest,
    index_name,
    parse_json,
    parse_rank_dir,
)
from ..read.messages import FIRST_MESSAGE, block_at
from ..run.status import LiveFinding
from ..storage.untrusted_files import FileFacts
from .destination import TakenError
from .shipped import LOOK_S, ShippedRun
from .watching import Folder, LocalFile, RefusedError, WriterFiles, list_writer, sealed_name

logger = logging.getLogger("recorder.daemon")

QUIET_LOOK_S = 20.0
"""The seconds between two scans of a writer that cannot be shipped, or may have ended."""
_QUIET_S = 60.0
"""A writer on another host may have ended after this many seconds without changes. Its open shards are then shipped."""


class WriterShipper:
    """Ships the files of one writer's directory."""

    def __init__(self, there: ShippedRun, rank: str, writer: str) -> None:
        self._run = there
        self.names = (rank, writer)
        self.below = f"{rank}/{writer}/"
        self.rank = parse_rank_dir(rank)
        self.files = WriterFiles()
        self.state = "quiet"
        """``alive``, ``closed``, ``dead`` (its process is gone), or ``quiet`` (unknown whether its process lives)."""
        self.status: dict[str, Any] = {}
        self.findings: tuple[LiveFinding, ...] = ()
        """The findings of the rules that run in training, as the writer's status lists them."""
        self.shown: dict[str, Any] | None = None
        """The newest status that may be put, and its time of change. Empty without a status, None before a scan."""
        self.lifetime = Lifetime()
        self.balance = RowCounts()
        """The writer's counts of rows, from its manifest or from its status, whichever is later."""
        self.counted: tuple[int, int | None] | None = None
        """A killed writer's number of rows and last step, read from its shards. Its status is older than the shards."""
        self.step_changed_s = 0.0
        self.path = f"{there.path}/{rank}/{writer}"
        self.unreadable = ""
        """Why the writer's directory, manifest or status cannot be read. Empty if they can be read."""
        self.stuck: set[str] = set()
        """Files that cannot be shipped until somebody intervenes. For example, another object has a file's name."""
        self.is_settled = False
        self.has_looked = False
        self.is_put = False
        """True if the destination has all that the last scan found. Open shards count up to their end at that scan."""
        self.was_repaired = False
        """True if a repair has done what it could. Shards that are still open are then shipped as they are."""
        self.small_since_s = time.time()
        """The wall-clock time of the last scan after which all small files were shipped, at first the creation time."""
        self._ledger: dict[str, Any] = {}
        self._manifest: tuple[FileFacts, bytes] | None = None
        self._opened = OpenShards(there, self.below)
        self._is_busy: set[str] = set()
        self.changed_ns = 0
        """The time of the directory's last change, as of the last scan."""
        self._next_look_s = self._next_snapshot_s = self._next_status_s = 0.0
        self.reconciled()

    def look(self, now_s: float) -> list[tuple[str, Callable[[], None]]]:
        """Return the jobs that are due and not already running. Each has the name of its lane (queue)."""
        jobs: list[tuple[str, Callable[[], None]]] = []
        if self.is_settled and not self.has_changed():
            return jobs
        if "small" not in self._is_busy and now_s >= self._next_look_s:
            self._next_look_s = now_s + (
                QUIET_LOOK_S if self.state == "quiet" and self.is_settled else self._run.shared.look_s
            )
            self._is_busy.add("small")
            jobs.append(("small", lambda: self._done("small", self._ship_small)))
        if "large" not in self._is_busy and self._waits_for_large():
            self._is_busy.add("large")
            jobs.append(("large", lambda: self._done("large", self._ship_large)))
        return jobs

    def look_again(self) -> None:
        self.is_settled = False
        self._next_look_s = 0.0

    def has_changed(self) -> bool:
        """Return True if the directory may have changed. For a quiet writer, return True whenever a scan is due."""
        if self.state == "quiet":
            return time.monotonic() >= self._next_look_s
        try:
            with self._open() as folder:
                return folder.changed_ns() != self.changed_ns
        except OSError:
            return True

    def reconciled(self) -> None:
        """Use the new listing of the destination. Stuck files are then tried again."""
        self.stuck.clear()
        self._opened.reconciled()

    @property
    def has_ended(self) -> bool:
        return self.state in ("closed", "dead")

    @property
    def needs_repair(self) -> bool:
        return self.has_ended and bool(self.files.opened) and not self.was_repaired

    @property
    def backlog(self) -> dict[str, FileFacts]:
        """The sealed files that the destination has not confirmed, by name."""
        files = self.files.sealed | self.files.indexes
        return {name: stamp for name, stamp in list(files.items()) if not self._is_there(name, stamp)}

    def _is_large_lane(self, name: str) -> bool:
        return name.lstrip("_").startswith("tensors")

    @property
    def needs_count(self) -> bool:
        """True if a killed writer's shards are sealed, and the rows in the shards were not counted yet."""
        return self.state == "dead" and self.is_settled and self.counted is None

    @property
    def num_rows(self) -> int:
        if self.counted is not None:
            return self.counted[0]
        return self.balance.written - self.balance.retired_rows

    def summary(self) -> dict[str, Any]:
        state = {"alive": "recording", "closed": "closed"}.get(self.state, "unclosed")
        step = self.status.get("step") if self.counted is None else self.counted[1]
        return {
            "rank": self.rank,
            "state": state,
            "dropped": dict(self.balance.dropped),
            "bytes": self.files.num_bytes,
            "step": step if isinstance(step, int) else None,
            "started_ns": self.lifetime.started_ns,
        }

    def _open(self) -> Folder:
        with self._run.open() as folder:
            return folder.below(*self.names)

    def _done(self, lane: str, job: Callable[[], None]) -> None:
        try:
            job()
            self.unreadable = ""
        except Exception as error:
            self.is_settled, self.is_put, self.shown = False, False, self.shown or {}
            is_denied = isinstance(error, PermissionError)
            if is_denied:
                self.unreadable, self.is_put, self.has_looked = str(error), True, True
            if is_denied or not isinstance(error, (OSError, RunError, StoreError)):
                self._next_look_s = time.monotonic() + QUIET_LOOK_S
            if isinstance(error, RefusedError):
                self._run.shared.refused(error)
            else:
                self._run.shared.failed(error, self._run.key)
        finally:
            self._is_busy.discard(lane)

    @property
    def _is_growing(self) -> bool:
        """True if the writer is expected to seal its open shards. The daemon then waits for the sealed shards."""
        return self.state == "alive" and not self._goes_open

    def _is_there(self, name: str, stamp: FileFacts) -> bool:
        return self._run.ledger.has(self.below + name, stamp)

    def _waits_for_large(self) -> bool:
        return any(self._is_large_lane(name) and name not in self.stuck for name in self.backlog) or any(
            self._is_large_lane(name) and self._goes_open and not self._opened.is_put(name, stamp)
            for name, stamp in list(self.files.opened.items())
        )

    @property
    def _goes_open(self) -> bool:
        """True if open shards of tensors are shipped as they are, because they may never be sealed or shipped later."""
        is_time = self._run.shared.is_once and not self.has_ended
        return self.state == "quiet" or (self.has_ended and self.was_repaired) or is_time

    # The methods below run in jobs, at most one job of each lane at a time.

    def _ship_small(self) -> None:
        now_s, begun_s = time.monotonic(), time.time()
        with self._open() as folder:
            changed_ns = folder.changed_ns()
            manifest, status = self._read_manifest(folder), self._read_status(folder)
            balances = (RowCounts.read(Members(members)) for members in (self._ledger, self.status))
            self.balance = max(balances, key=lambda one: (one.observed, one.written))
            # The files are listed after the manifest was read: if the manifest says closed, no later file comes.
            self.files = list_writer(folder)
            self._judge(self.files)
            self.has_looked = True
            self._put_sealed(folder, manifest)
            if now_s >= self._next_snapshot_s or self.state != "alive":
                fresh_s = self._run.shared.settings.fresh_s
                self._next_snapshot_s = now_s + max(fresh_s - LOOK_S - 1, fresh_s / 2)
                for name, stamp in self.files.opened.items():
                    if name.startswith("_stats") and not self._opened.is_put(name, stamp):
                        self._opened.put(folder, name, stamp, is_growing=self._is_growing)
                self.small_since_s = begun_s
            self._opened.remove_sealed()
            is_whole = not self.backlog and all(
                self._opened.is_put(name, stamp) or (self.state == "alive" and not name.startswith("_stats"))
                for name, stamp in self.files.opened.items()
            )
            has_ended = self.lifetime.state == "closed" or self.status.get("state") == "closed"
            self._put_words(manifest, status, now_s, is_held_back=has_ended and not is_whole)
            for name, stamp in self.files.aside.items():
                if not self._run.is_aside_there(self.below + name, stamp):
                    self._note(name, self._run.put_aside(folder, self.below, name, stamp))
        self._run.put_documents()
        self.changed_ns = changed_ns
        documents = [(WRITER_MANIFEST, manifest), (STATUS, status)]
        self.is_settled = (
            self.state != "alive"
            and is_whole
            and all(one is None or self._run.has_document(self.below + name, one) for name, one in documents)
            and not self.needs_repair
        )
        self.is_put = not (self.backlog.keys() - self.stuck) and all(name in self._opened for name in self.files.opened)

    def _put_sealed(self, folder: Folder, manifest: bytes | None) -> None:
        """Put the sealed small files. A manifest is put first, because readers need it for the rows."""
        if manifest is not None and not self._run.is_document_there(self.below + WRITER_MANIFEST):
            self._put_document(WRITER_MANIFEST, _as_begun(manifest))
        for name, stamp in (self.files.sealed | self.files.indexes).items():
            if not self._is_large_lane(name) and not self._is_there(name, stamp):
                self._put_file(folder, name)

    def _put_words(self, manifest: bytes | None, status: bytes | None, now_s: float, *, is_held_back: bool) -> None:
        """Put the manifest, and the status if it is due. Put neither if `is_held_back`.

        They are held back if they say that the writer has ended while the destination lacks some of its files.
        """
        shown = self.files.status or self.files.manifest
        if shown is None:
            self.shown = self.shown or {}
        if is_held_back:
            return
        if manifest is not None:
            self._put_document(WRITER_MANIFEST, manifest)
        if shown is not None:
            counts = {name: getattr(self.balance, name) for name in ("observed", "written", "dropped")}
            members = self.status or {**asdict(self.lifetime), **counts}
            self.shown = {**members, "changed_ns": shown.changed_ns, "padding": ""}
        is_due = self._run.shared.destination.puts_are_free and now_s >= self._next_status_s
        if status is not None and (is_due or self.state != "alive"):
            self._next_status_s = now_s + self._run.shared.settings.status_s
            self._put_document(STATUS, status, is_noted=self.state != "alive")

    def _ship_large(self) -> None:
        files = self.files
        with self._open() as folder:
            for name in sorted(files.sealed, key=lambda name: files.sealed[name].changed_ns):
                for wanted in (name, index_name(name)):
                    stamp = files.sealed.get(wanted) or files.indexes.get(wanted)
                    if stamp is None or not self._is_large_lane(name) or self._is_there(wanted, stamp):
                        continue
                    if self._run.shared.is_stopping() or not self._run.shared.health.is_open:
                        return
                    self._put_file(folder, wanted)
            for name, stamp in files.opened.items():
                if not name.startswith("_stats") and self._goes_open and not self._opened.is_put(name, stamp):
                    self._opened.put(folder, name, stamp, is_growing=self._is_growing)
        self._next_look_s = 0.0

    def _note(self, name: str, is_ours: bool) -> None:
        """Mark a file as stuck unless `is_ours`: another object at the destination then has its name."""
        if is_ours:
            self.stuck.discard(name)
        else:
            self.stuck.add(name)

    def _put_document(self, name: str, content: bytes, *, is_noted: bool = True) -> None:
        key = self.below + name
        self._note(name, self._run.put_document(key, content, is_ours=self._is_of_it, is_noted=is_noted))

    def _put_file(self, folder: Folder, name: str) -> None:
        if name in self.stuck:
            return
        try:
            with folder.open(name) as file:
                self._note(name, self._run.put_new(self.below + name, file))
        except FileNotFoundError:
            pass  # retention has deleted the file
        except RefusedError as error:
            self.stuck.add(name)
            self._run.shared.refused(error)
        except OSError as error:  # bad permissions or a disk error; the next listing of the store makes it try again
            self.stuck.add(name)
            self._run.shared.failed(error, f"{self.path}/{name}")

    def _read_manifest(self, folder: Folder) -> bytes | None:
        try:
            with folder.open(WRITER_MANIFEST) as file:
                if self._manifest is not None and self._manifest[0] == file.stamp:
                    return self._manifest[1]
                content = file.bytes(0, min(file.size_bytes, MAX_MANIFEST_BYTES))
        except FileNotFoundError:
            return None
        with contextlib.suppress(RunError):
            raw = parse_json(content, folder.path)
            self.lifetime = Lifetime.read(raw)
            ledger = raw.get("ledger")
            self._ledger = ledger if isinstance(ledger, dict) else {}
        self._manifest = file.stamp, content
        return content

    def _read_status(self, folder: Folder) -> bytes | None:
        try:
            with folder.open(STATUS) as file:
                content = file.bytes(0, min(file.size_bytes, STATUS_BYTES))
            raw = parse_json(content, folder.path)
            encode_manifest(raw)  # NaN or an infinity in a document raises ValueError
        except (FileNotFoundError, CorruptError, ValueError, RecursionError):  # the status is being rewritten
            return None
        if raw.get("step") != self.status.get("step"):
            self.step_changed_s = time.time()
        self.status, self.findings = raw, LiveFinding.read_all(raw)
        return content

    def _judge(self, files: WriterFiles) -> None:
        is_running = self.lifetime.is_running if self.lifetime.pid else None
        if self.lifetime.state == "closed" or (
            self.status.get("state") == "closed" and self.status.get("pid") in (self.lifetime.pid, None)
        ):
            self.state = "closed"
        elif is_running is not None:
            self.state = "alive" if is_running else "dead"
        else:
            self.state = "alive" if time.time() - files.changed_s < _QUIET_S else "quiet"

    def _is_of_it(self, there: bytes) -> bool:
        with contextlib.suppress(RunError):
            other = Lifetime.read(parse_json(there, self.below))
            mine = self.lifetime if self.lifetime.writer else Lifetime.read(self.status)
            return (other.writer, other.pid, other.started_ns) == (mine.writer, mine.pid, mine.started_ns)
        return False


def _as_begun(manifest: bytes) -> bytes:
    """Return a closed writer's manifest without row counts, as if it were recording. It can be put before the rows."""
    with contextlib.suppress(RunError):
        raw = parse_json(manifest, WRITER_MANIFEST)
        if raw.get("state") == "closed":
            members = {name: value for name, value in raw.items() if name != "ledger"}
            return encode_manifest(members | {"state": "recording"})
    return manifest


_MAX_AT_ONCE_BYTES = 32 << 20
"""The largest snapshot that is put in one request. A snapshot is an open shard up to its last complete batch."""
_MAX_BESIDE_BYTES = 2 << 20
"""Only one snapshot (copy of an open shard) with more bytes than this may be in memory at a time."""


@dataclass(slots=True)
class _Snapshot:
    num_bytes: int
    crc: int
    e_tag: str
    stamp: FileFacts
    put_s: float = field(default_factory=time.monotonic)


class OpenShards:
    """Ships the open shards of one writer. At most one thread at a time may handle a shard."""

    def __init__(self, there: ShippedRun, below: str) -> None:
        self._run = there
        self._below = below
        self._snapshots: dict[str, _Snapshot] = {}
        self._there: set[str] = set()
        """The names of the open shards that the destination has."""

    def reconciled(self) -> None:
        """Use the new listing of the destination. Shards that were put after the listing began are kept."""
        opened = {name for name in self._run.held if name.startswith(self._below) and name.endswith(".open")}
        newer = {name for name, one in self._snapshots.items() if one.put_s >= self._run.listed_s}
        self._there = {name.removeprefix(self._below) for name in opened} | (self._there & newer)
        for name in self._snapshots.keys() - self._there:
            del self._snapshots[name]

    def __contains__(self, name: str) -> bool:
        return name in self._snapshots

    def is_put(self, name: str, stamp: FileFacts) -> bool:
        """Return True if an open shard was put as it is now."""
        snapshot = self._snapshots.get(name)
        return snapshot is not None and snapshot.stamp == stamp

    def put(self, folder: Folder, name: str, stamp: FileFacts, *, is_growing: bool) -> None:
        """Put the complete batches of an open shard, over an earlier put with fewer batches.

        `stamp` is the shard's stamp from the listing of the directory. If the shard `is_growing`, its writer will seal
        it. A growing shard that is too large for one request is put only once it is sealed.
        """
        with contextlib.suppress(FileNotFoundError), folder.open(name) as file:
            before = self._snapshots.get(name)
            end = end_of_batches(file, before.num_bytes if before is not None else 0)
            if before is not None and end <= before.num_bytes:
                before.stamp = stamp
            elif not end:
                self._snapshots[name] = _Snapshot(0, 0, "", stamp)
            elif end <= _MAX_AT_ONCE_BYTES:
                with self._run.shared.at_once if end > _MAX_BESIDE_BYTES else contextlib.nullcontext():
                    self._put_prefix(name, file.bytes(0, end), before, stamp)
            elif not is_growing:
                self._put_large_prefix(name, file, end, stamp)

    def _put_prefix(self, name: str, content: bytes, before: _Snapshot | None, stamp: FileFacts) -> None:
        shared = self._run.shared
        if before is not None and crc32c(memoryview(content)[: before.num_bytes]) != before.crc:
            shared.counters.add("conflicts", "open")  # a failed write was cut back, so wait for the sealed shard
            before.stamp = stamp
            return
        e_tag = before.e_tag or None if before is not None else None
        put = self._run.put_over(self._below + name, content, e_tag, content.startswith)
        if put is None:
            return
        self._snapshots[name] = _Snapshot(len(content), crc32c(content), put.e_tag, stamp)
        if put.there != content:
            shared.counters.add("conflicts", "open")
            return
        self._there.add(name)
        shared.uploaded("open", len(content))
        shared.health.succeeded()

    def _put_large_prefix(self, name: str, file: LocalFile, end: int, stamp: FileFacts) -> None:
        """Put batches that are too large for one request. This happens once, if their writer is gone or quiet."""
        destination, key = self._run.shared.destination, f"{self._run.key}/{self._below}{name}"
        file.size_bytes = end
        if name in self._there:
            destination.delete([key])
        with contextlib.suppress(TakenError):
            destination.put_new(key, file)
        self._snapshots[name] = _Snapshot(end, 0, "", stamp)
        self._there.add(name)
        self._run.shared.uploaded("open", end)

    def remove_sealed(self) -> None:
        """Remove an open shard from the destination once the destination has the sealed shard."""
        stale = [name for name in self._there if self._run.ledger.get(self._below + sealed_name(name)) is not None]
        if stale:
            self._run.shared.destination.delete([f"{self._run.key}/{self._below}{name}" for name in stale])
            self._there -= set(stale)
            for name in stale:
                self._snapshots.pop(name, None)


def end_of_batches(file: LocalFile, start: int = 0) -> int:
    """Return the byte at which an open shard's last complete batch ends, or 0. The search begins at `start`."""
    offset, end = start or FIRST_MESSAGE, start
    with contextlib.suppress(CorruptError):
        while (message := block_at(file, offset)) is not None:
            is_schema = offset == FIRST_MESSAGE
            offset = message[0].end
            end = end if is_schema else offset
    return end
