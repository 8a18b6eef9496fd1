"""What is shipped of one run, and in which order: data, indexes, manifests, and at last that it is a run.

A writer's files go in two lanes. The small one (statistics, manifest, status) has a deadline; the large one (tensors)
has none, and never holds the small one up. A manifest or a status that says that its writer has ended waits until all
that the writer left is there: so who reads there never misses a row that an ended writer has promised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c

from ..errors import CorruptError, RunError, StoreError
from ..format.manifest import Balance, Lifetime
from ..format.members import Members
from ..format.rundir import (
    MAX_MANIFEST_BYTES,
    RUN_MANIFEST,
    WRITER_MANIFEST,
    encode_manifest,
    index_name,
    parse_json,
    parse_rank_dir,
)
from ..format.status import STATUS, STATUS_BYTES
from ..read.shards.messages import FIRST_MESSAGE, block_at
from .counters import Counters, Health
from .destination import DamagedError, Destination, Held, TakenError
from .fleet import catalog_name
from .ledger import ShippedLedger
from .settings import DaemonSettings
from .watching import Entries, Folder, LocalFile, RefusedError, Stamp, WriterFiles, list_run, list_writer, sealed_name

logger = logging.getLogger("recorder.daemon")

PRUNED = "_pruned"
"""The folder of a destination in which each run that was pruned leaves its name."""
_QUIET_S = 60.0
"""A writer that cannot be asked and has changed nothing for so long may have ended: its open shards go as they are."""
_MAX_AT_ONCE_BYTES = 32 << 20
"""The largest snapshot of an open shard that is replaced in one request."""
_MAX_ASIDE_BYTES = 16 << 20
_LOOK_S = 2.0
_QUIET_LOOK_S = 20.0
_SETTLED_LOOK_S = 5.0
"""How often a run of which all is there is asked whether something has come: a restart of its job, say."""
_RECONCILE_PAUSE_S = 5.0


@dataclass(slots=True, kw_only=True)
class Shipping:
    """What all runs share."""

    destination: Destination
    settings: DaemonSettings
    counters: Counters = field(default_factory=Counters)
    health: Health = field(default_factory=Health)
    is_stopping: Callable[[], bool] = lambda: False
    is_once: bool = False
    """Whether open shards go as they are, because there may be no other time."""
    at_once: Any = field(default_factory=threading.Lock)
    """Held while a snapshot of many bytes is in memory."""
    said: dict[str, str] = field(default_factory=dict)
    """The last error of each run, so that a job that fails again and again is said once."""

    @property
    def look_s(self) -> float:
        """How often a writer at work is looked at, seconds."""
        return min(_LOOK_S, self.settings.fresh_s / 5)

    def uploaded(self, kind: str, num_bytes: int) -> None:
        """Count an object that was put."""
        self.counters.add("uploads", kind)
        self.counters.add("uploaded_bytes", kind, num_bytes)

    def failed(self, error: Exception, where: str) -> None:
        """Count an error of a job and log it once; the job is tried again."""
        kind = error.kind if isinstance(error, StoreError) else "internal"
        kind = "local" if isinstance(error, (OSError, RunError, RefusedError)) else kind
        kind = "damaged" if isinstance(error, DamagedError) else kind
        self.counters.add("errors", kind)
        if isinstance(error, StoreError):
            is_first = not self.health.problem
            self.health.failed(str(error))
            if kind == "refused":
                self.destination.renew()
            if is_first:
                logger.warning("the store fails, and is tried again: %s", error, extra={"kind": kind, "where": where})
        elif not isinstance(error, FileNotFoundError):
            text, is_ours = f"{type(error).__name__}: {error}", kind == "internal"
            if self.said.get(where) != text:
                self.said[where] = text
                logger.warning("%s: %s", where, text, exc_info=error if is_ours else None)
            if kind == "damaged":
                self.health.failed(text)


@dataclass(slots=True)
class _Snapshot:
    """An open shard as it was put."""

    num_bytes: int
    crc: int
    e_tag: str
    stamp: Stamp


@dataclass(slots=True)
class _Document:
    """A document as it was put."""

    crc: int
    e_tag: str


class RunShipper:
    """One run below a watched folder. `look` is called by one thread, the jobs that it returns run on others."""

    def __init__(self, root: str, names: tuple[str, ...], shared: Shipping) -> None:
        self.root = root
        self.names = names
        self.key = "/".join(names)
        self.path = "/".join((root, *names))
        self.shared = shared
        self.run_id = ""
        self.facts: dict[str, Any] = {}
        """What the run's manifest says."""
        self.writers: dict[tuple[str, str], WriterShipper] = {}
        self.conflict = ""
        """Why nothing of the run is shipped; empty where it is."""
        self.was_pruned = False
        self.unreadable = ""
        """Why its manifest cannot be read; empty where it can."""
        self.is_settled = False
        self.settled_since_s = 0.0
        """When everything was there for the first time, by the monotonic clock."""
        self._counts = Entries()
        self.next_catalog_s = self.next_check_s = self.next_carry_s = 0.0
        self.is_carrying = False
        self.findings: dict[tuple[str, str], int] = {}
        """Findings of `recorder check` by rule and severity."""
        self.held: dict[str, Held] = {}
        """What the destination held below the run when it was last listed, by names below the run."""
        self._documents: dict[str, _Document] = {}
        self._stamps: dict[str, Stamp] = {}
        self._aside: dict[str, Stamp] = {}
        self._manifest: Stamp | None = None
        """Of the manifest by which the run was found to be the one that the destination has."""
        self._lock = threading.Lock()
        self._next_look_s = self._next_settled_look_s = 0.0
        self._reconcile_at_s = 0.0
        self._has_reconciled = self._has_looked = self._was_removed = False
        self._changes: dict[str, int] = {}
        with Folder.root(root) as top, top.below(*names) as folder:
            self.ledger = ShippedLedger(folder, shared.destination.url)
        cataloged = (
            re.fullmatch(r"rows:(\d+)", confirmed.how) if (confirmed := self.ledger.get(catalog_name())) else None
        )
        self.cataloged_rows = int(cataloged[1]) if cataloged else -1
        """Rows of the run when its catalog was made; -1: none was."""
        if self.ledger.problem:
            logger.warning("%s", self.ledger.problem)

    def open(self) -> Folder:
        with Folder.root(self.root) as top:
            return top.below(*self.names)

    def close(self) -> None:
        self.ledger.close()

    def look(self, now_s: float) -> list[tuple[str, Callable[[], None]]]:
        """Return what is to be done now: pairs of a lane, ``small`` or ``large``, and a job."""
        if self.is_settled and now_s < self._reconcile_at_s:
            if now_s < self._next_settled_look_s:
                return []
            self._next_settled_look_s = now_s + min(_SETTLED_LOOK_S, self.shared.settings.fresh_s / 2)
            if not self._has_changed():
                return []
        if self.conflict or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + self.shared.look_s
        if not self._has_reconciled or now_s >= self._reconcile_at_s:
            return [("small", self._reconcile)]
        self.is_settled = False
        with self.open() as folder:
            writers, self._stamps, counts = list_run(folder)
            if self._stamps.get(RUN_MANIFEST) != self._manifest:  # another run has taken the name
                return [("small", self._reconcile)]
            self._changes = {".": folder.changed_ns()}
            for rank in {rank for rank, _ in writers}:
                self._changes[rank] = folder.changed_ns(rank)
        self._has_looked = True
        self._counts = counts
        for names in writers:
            if names not in self.writers:
                self.writers[names] = WriterShipper(self, *names)
        for names in self.writers.keys() - set(writers):
            del self.writers[names]
        jobs: list[tuple[str, Callable[[], None]]] = []
        for writer in list(self.writers.values()):
            jobs += writer.look(now_s)
        if not jobs and not counts.unshipped and all(writer.is_settled for writer in self.writers.values()):
            if self._are_documents_there():
                self.is_settled = True
                self.settled_since_s = self.settled_since_s or now_s
            else:
                jobs.append(("small", self.ship_documents))
        if not self.is_settled:
            self.settled_since_s = 0.0
        return jobs

    @property
    def num_rows(self) -> int:
        """Return the rows that the run's writers here have written and kept."""
        return sum(writer.num_rows for writer in list(self.writers.values()))

    @property
    def backlog(self) -> list[Stamp]:
        """Return the sealed files that the destination has not confirmed; one that is settled has none."""
        if self.is_settled:
            return []
        return [stamp for writer in list(self.writers.values()) for stamp in writer.backlog.values()]

    @property
    def has_stuck_files(self) -> bool:
        """Whether files cannot be shipped until somebody does something."""
        return bool(self.unshipped) or any(writer.stuck for writer in list(self.writers.values()))

    @property
    def unshipped(self) -> dict[str, str]:
        """Return why something of the run cannot be read, by its path."""
        own = {f"{self.path}/{RUN_MANIFEST}": self.unreadable} if self.unreadable else {}
        writers = list(self.writers.values())
        return own | self._counts.unshipped | {one.path: one.unreadable for one in writers if one.unreadable}

    @property
    def is_recording(self) -> bool:
        """Whether a writer is at work."""
        return any(writer.state == "alive" for writer in list(self.writers.values()))

    @property
    def num_foreign(self) -> int:
        """Return how many files in the run's folders are none of a run."""
        return self._counts.num_foreign + sum(writer.files.num_foreign for writer in list(self.writers.values()))

    @property
    def num_refused(self) -> int:
        """Return how many links, devices and wrong names there are in the run's folders."""
        return self._counts.num_refused + sum(writer.files.num_refused for writer in list(self.writers.values()))

    @property
    def needs_repair(self) -> bool:
        """Whether a writer has ended and has left a shard open."""
        return any(writer.needs_repair for writer in list(self.writers.values()))

    @property
    def has_quiet_writer(self) -> bool:
        """Whether nobody here can tell if a writer has ended."""
        return any(writer.state == "quiet" for writer in list(self.writers.values()))

    @property
    def is_put(self) -> bool:
        """Whether all that was here at the last look is there, also of writers that are at work."""
        writers = list(self.writers.values())
        is_put = self._has_looked and self._are_documents_there() and all(writer.is_put for writer in writers)
        return is_put or bool(self.unreadable)

    @property
    def is_known(self) -> bool:
        """Whether every writer was looked at, so that a summary says something."""
        return self._has_looked and all(writer.has_looked for writer in list(self.writers.values()))

    @property
    def may_go(self) -> bool:
        """Whether the run may be removed here: all is there, and all of its writers have certainly ended."""
        return self.is_settled and not self._was_removed and not self.has_quiet_writer and bool(self.writers)

    def missing_in(self, held: dict[str, Held]) -> str:
        """Return a file that is here and not in a listing of the destination; empty where there is none."""
        for writer in list(self.writers.values()):
            files = writer.files
            for name, stamp in (files.sealed | files.indexes | files.opened).items():
                there = held.get(writer.below + name)
                # An open shard is there up to its last whole batch.
                if there is None or (there.size_bytes != stamp.size_bytes and not name.endswith(".open")):
                    return writer.below + name
            if files.manifest is not None and writer.below + WRITER_MANIFEST not in held:
                return writer.below + WRITER_MANIFEST
        return "" if RUN_MANIFEST in held else RUN_MANIFEST

    def remove(self) -> tuple[int, bool]:
        """Remove what was seen to be there, and nothing else; return its bytes, and whether nothing is left.

        What has come since keeps its directories, and the run stays. A kill in between leaves a run that goes later.
        """
        self._was_removed = True
        num_bytes = sum(writer.files.num_bytes for writer in self.writers.values())
        with self.open() as folder, contextlib.suppress(OSError):
            for writer in list(self.writers.values()):
                with folder.below(*writer.names) as inner:
                    files = writer.files
                    last = [name for name, one in ((STATUS, files.status), (WRITER_MANIFEST, files.manifest)) if one]
                    for name in [*files.opened, *files.sealed, *files.indexes, *files.aside, *last]:
                        os.unlink(name, dir_fd=inner.descriptor)
                with folder.below(writer.names[0]) as rank:
                    os.rmdir(writer.names[1], dir_fd=rank.descriptor)
            for rank_name in {writer.names[0] for writer in self.writers.values()}:
                os.rmdir(rank_name, dir_fd=folder.descriptor)
            self.ledger.close()
            for name in sorted(self._stamps, key=lambda name: name == RUN_MANIFEST):
                os.unlink(name, dir_fd=folder.descriptor)
            os.unlink(self.ledger.name, dir_fd=folder.descriptor)
            with Folder.root(self.root) as top, top.below(*self.names[:-1]) as parent:
                os.rmdir(self.names[-1], dir_fd=parent.descriptor)
            return num_bytes, True
        return num_bytes, False

    def look_again(self) -> None:
        """Look at the run at the next pass."""
        self._next_look_s = 0.0
        self.is_settled = False
        for writer in list(self.writers.values()):
            writer.look_again()

    def suspect(self) -> None:
        """Compare the destination's listing with what it has confirmed: it has lost something."""
        self._reconcile_at_s = min(self._reconcile_at_s, time.monotonic() + _RECONCILE_PAUSE_S)

    def _has_changed(self) -> bool:
        """Whether anything may be new; what has settled costs one look at each directory."""
        writers = list(self.writers.values())
        if any(writer.state == "quiet" and writer.has_changed() for writer in writers):
            return True
        seen = {"/".join(writer.names): writer.changed_ns for writer in writers if writer.state != "quiet"}
        try:
            with self.open() as folder:
                return any(folder.changed_ns(path) != changed_ns for path, changed_ns in (self._changes | seen).items())
        except OSError:
            return True

    def _reconcile(self) -> None:
        """List what the destination has, and forget what it has confirmed and has not any more."""
        try:
            self.unreadable = ""
            is_ours = self._is_ours()
        except (PermissionError, RunError, RefusedError) as error:
            self.unreadable = str(error)
            self._next_look_s = time.monotonic() + _QUIET_LOOK_S
            self.shared.failed(error, self.path)
            return
        if not is_ours:
            return
        self.held = {key[len(self.key) + 1 :]: held for key, held in self.shared.destination.listing(f"{self.key}/")}
        lost = [
            name
            for name, confirmed in self.ledger.names().items()
            if name not in self.held
            or (self.held[name].size_bytes != confirmed.size_bytes and not confirmed.how.startswith("crc"))
        ]
        if lost:
            logger.warning("%s: the store has lost %d files; they are put again", self.key, len(lost))
            self.shared.counters.add("lost_objects", amount=len(lost))
            self.ledger.forget(lost)
            if catalog_name() in lost:
                self.cataloged_rows = -1
        with self._lock:
            for name in [name for name in self._documents if name not in self.held]:
                del self._documents[name]
            self._aside.clear()
        for writer in list(self.writers.values()):
            writer.reconciled()
        self._has_reconciled = True
        self._reconcile_at_s = time.monotonic() + self.shared.settings.recheck_s
        self.shared.health.succeeded()
        self.look_again()

    def _is_ours(self) -> bool:
        """Whether the destination has no other run of this name, and none that was pruned."""
        with self.open() as folder, folder.open(RUN_MANIFEST) as file:
            local = parse_json(file.bytes(0, min(file.size_bytes, MAX_MANIFEST_BYTES)), file.where)
            self._manifest = file.stamp
        self.run_id = str(local.get("run_id"))
        self.facts = local
        there = self.shared.destination.get(f"{self.key}/{RUN_MANIFEST}")
        if there is not None and there[0]:
            other = ""
            with contextlib.suppress(RunError):
                other = str(parse_json(there[0], self.key).get("run_id"))
            if other != self.run_id:
                self.conflict = f"another run has its name there (run_id {other or 'unreadable'})"
        elif there is None and self.shared.destination.get(f"{PRUNED}/{self.key}.json") is not None:
            self.conflict, self.was_pruned = "it was pruned there", True
            logger.info("%s is not shipped: %s", self.path, self.conflict)
            return False
        if self.conflict:
            self.shared.counters.add("conflicts", "run")
            logger.error("%s is not shipped: %s", self.path, self.conflict)
        return not self.conflict

    def _are_documents_there(self) -> bool:
        return self._documents.get(RUN_MANIFEST) is not None and all(
            self.is_aside_there(name, stamp) for name, stamp in self._stamps.items() if name != RUN_MANIFEST
        )

    def ship_documents(self) -> None:
        """Put the run's own documents, its manifest last."""
        with self.open() as folder:
            for name, stamp in sorted(self._stamps.items()):
                if name != RUN_MANIFEST and not self.is_aside_there(name, stamp):
                    self.ship_aside(folder, "", name, stamp)
            if self._documents.get(RUN_MANIFEST) is None:
                with folder.open(RUN_MANIFEST) as file:
                    content = file.bytes(0, min(file.size_bytes, MAX_MANIFEST_BYTES))
                # Nodes with disks of their own have each their own words for one run: the first that arrives stays.
                self.put_document(RUN_MANIFEST, content, stays=lambda there: self._is_same_run(there))

    def _is_same_run(self, there: bytes) -> bool:
        with contextlib.suppress(RunError):
            return str(parse_json(there, self.key).get("run_id")) == self.run_id
        return False

    def ship_aside(self, folder: Folder, below: str, name: str, stamp: Stamp) -> None:
        """Put another file of a run: an informative document, or a damaged shard that was set aside."""
        key = f"{below}{name}"
        with folder.open(name) as file:
            if not name.endswith(".json"):
                self.put_new(key, file)
            elif file.size_bytes <= _MAX_ASIDE_BYTES:
                self.put_document(key, file.bytes(0, file.size_bytes))
        self._aside[key] = stamp

    def is_aside_there(self, key: str, stamp: Stamp) -> bool:
        """Whether such a file is there as it is here, or was refused there."""
        return self._aside.get(key) == stamp

    def put_new(self, name: str, file: LocalFile) -> None:
        """Put an immutable file of the run and note that it is there."""
        shared = self.shared
        try:
            how = shared.destination.put_new(f"{self.key}/{name}", file)
        except TakenError:
            self._note_conflict(name)
            return
        shared.health.succeeded()
        if how != "there":
            shared.uploaded(_kind(name), file.size_bytes)
        shared.counters.add("confirmed", how)
        self.ledger.add(name, file.size_bytes, how)

    def put_document(
        self,
        name: str,
        content: bytes,
        *,
        is_ours: Callable[[bytes], bool] = lambda there: False,
        stays: Callable[[bytes], bool] = lambda there: False,
        is_noted: bool = True,
    ) -> None:
        """Put a document that may change, in place of what was put before.

        Args:
            name: its name below the run.
            content: what it says now.
            is_ours: whether what is there instead is an earlier state of it.
            stays: whether what is there instead is as good.
            is_noted: whether the ledger names it, by its checksum.
        """
        shared, crc, key = self.shared, crc32c(content), f"{self.key}/{name}"
        known = self._documents.get(name)
        if known is not None and known.crc == crc:
            return
        confirmed, held = self.ledger.get(name), self.held.get(name)
        noted = confirmed.how if confirmed is not None else ""
        if known is None and held is not None and noted == f"crc:{crc:08x}":  # as before the last start
            self._documents[name] = _Document(crc, held.e_tag)
            return
        e_tag = known.e_tag if known is not None else None
        for _ in range(3):
            try:
                tag = shared.destination.put_if(key, content, e_tag)
                break
            except TakenError:
                there = shared.destination.get(key)
            if there is None:
                e_tag = None
                self.suspect()
                continue
            if there[0] == content or stays(there[0]):
                self._note_document(name, crc, there[1], len(content) if is_noted else None)
                return
            if there[0] and not (is_ours(there[0]) or noted == f"crc:{crc32c(there[0]):08x}"):
                self._note_conflict(name)
                return
            e_tag = there[1]
        else:
            return  # somebody is faster; the next look tries again
        shared.uploaded(_kind(name), len(content))
        self._note_document(name, crc, tag, len(content) if is_noted else None)

    def _note_document(self, name: str, crc: int, e_tag: str, noted_bytes: int | None) -> None:
        self.shared.health.succeeded()
        with self._lock:
            self._documents[name] = _Document(crc, e_tag)
        if noted_bytes is not None:
            self.ledger.add(name, noted_bytes, f"crc:{crc:08x}")

    def is_document_there(self, name: str) -> bool:
        """Whether the destination has some state of a document."""
        return name in self._documents or name in self.held

    def has_document(self, name: str, content: bytes) -> bool:
        known = self._documents.get(name)
        return known is not None and known.crc == crc32c(content)

    def _note_conflict(self, name: str) -> None:
        self.shared.counters.add("conflicts", _kind(name))
        logger.error("%s/%s: something else is there under this name; it is not touched", self.key, name)
        rank, _, rest = name.partition("/")
        writer = self.writers.get((rank, rest.partition("/")[0]))
        if writer is not None:
            writer.stuck.add(name.removeprefix(writer.below))

    def summary(self) -> dict[str, Any]:
        """Return what the fleet's index says of this node's part of the run."""
        writers = [writer.summary() for writer in list(self.writers.values())]
        states = {writer["state"] for writer in writers}
        dropped: dict[str, int] = {}
        for writer in writers:
            for reason, count in writer["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + count
        steps = [writer["step"] for writer in writers if writer["step"] is not None]
        return {
            "run_id": self.run_id,
            "name": str(self.facts.get("name") or self.names[-1]),
            "created_ns": self.facts.get("created_ns") or 0,
            "started_ns": min((writer["started_ns"] for writer in writers if writer["started_ns"]), default=0),
            "world_size": self.facts.get("world_size") or 0,
            "ranks": sorted({writer["rank"] for writer in writers if writer["rank"] is not None}),
            "last_step": max(steps, default=None),
            "rows": self.num_rows,
            "bytes": sum(writer["bytes"] for writer in writers),
            "dropped": dropped,
            "state": next((state for state in ("unclosed", "recording", "closed") if state in states), "empty"),
        }


class WriterShipper:
    """One writer's directory."""

    def __init__(self, run: RunShipper, rank: str, writer: str) -> None:
        self.run = run
        self.names = (rank, writer)
        self.below = f"{rank}/{writer}/"
        self.rank = parse_rank_dir(rank)
        self.files = WriterFiles()
        self.state = "quiet"
        """``alive``, ``closed``, ``dead`` (its process is gone), or ``quiet``: nobody here can tell."""
        self.status: dict[str, Any] = {}
        self.lifetime = Lifetime()
        self.balance = Balance()
        """Of the manifest or of the status, which is later."""
        self.step_changed_s = 0.0
        self.path = f"{run.path}/{rank}/{writer}"
        self.unreadable = ""
        """Why its directory, its manifest or its status cannot be read; empty where they can."""
        self.stuck: set[str] = set()
        """Files that cannot be shipped, until somebody does something: there or here is something else."""
        self.is_settled = False
        self.has_looked = False
        self.is_put = False
        """Whether all that was here at the last look is there, an open shard up to what it was."""
        self.was_repaired = False
        """Whether a repair has done what it could; what is open still goes as it is."""
        self.small_since_s = 0.0
        """When the small lane was last there as it was here, by the wall clock."""
        self._ledger: dict[str, Any] = {}
        self._manifest: tuple[Stamp, bytes] | None = None
        self._snapshots: dict[str, _Snapshot] = {}
        self._there: set[str] = set()
        """Open shards that the destination has."""
        self._is_busy: set[str] = set()
        self.changed_ns = 0
        """When its directory was changed last, as it was when it was looked at."""
        self._next_look_s = self._next_snapshot_s = self._next_status_s = 0.0
        self.reconciled()

    def look(self, now_s: float) -> list[tuple[str, Callable[[], None]]]:
        """Return the jobs that are due and not under way."""
        jobs: list[tuple[str, Callable[[], None]]] = []
        if self.is_settled and not self.has_changed():
            return jobs
        if "small" not in self._is_busy and now_s >= self._next_look_s:
            self._next_look_s = now_s + (
                _QUIET_LOOK_S if self.state == "quiet" and self.is_settled else self.run.shared.look_s
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
        """Whether anything may be new; a closed writer's directory does not change, that of another may any time."""
        if self.state == "quiet":
            return time.monotonic() >= self._next_look_s
        try:
            with self._open() as folder:
                return folder.changed_ns() != self.changed_ns
        except OSError:
            return True

    def reconciled(self) -> None:
        """Take over what the destination's listing has shown."""
        opened = {name for name in self.run.held if name.startswith(self.below) and name.endswith(".open")}
        self._there = {name.removeprefix(self.below) for name in opened}
        self.stuck.clear()
        for name in self._snapshots.keys() - self._there:
            del self._snapshots[name]

    @property
    def has_ended(self) -> bool:
        return self.state in ("closed", "dead")

    @property
    def needs_repair(self) -> bool:
        return self.has_ended and bool(self.files.opened) and not self.was_repaired

    @property
    def backlog(self) -> dict[str, Stamp]:
        """Return the sealed files that the destination has not confirmed."""
        files = self.files.sealed | self.files.indexes
        return {name: stamp for name, stamp in list(files.items()) if not self._is_there(name, stamp)}

    def _is_large_lane(self, name: str) -> bool:
        return not name.lstrip("_").startswith("stats")

    @property
    def num_rows(self) -> int:
        return self.balance.written - self.balance.retired_rows

    def summary(self) -> dict[str, Any]:
        state = {"alive": "recording", "closed": "closed"}.get(self.state, "unclosed")
        step = self.status.get("step")
        return {
            "rank": self.rank,
            "state": state,
            "dropped": dict(self.balance.dropped),
            "bytes": self.files.num_bytes,
            "step": step if isinstance(step, int) else None,
            "started_ns": self.lifetime.started_ns,
        }

    def _open(self) -> Folder:
        with self.run.open() as folder:
            return folder.below(*self.names)

    def _done(self, lane: str, job: Callable[[], None]) -> None:
        try:
            job()
            self.unreadable = ""
        except (OSError, RunError, StoreError, DamagedError, RefusedError) as error:
            self.is_settled = False
            if isinstance(error, PermissionError):
                self.unreadable, self.is_put, self.has_looked = str(error), True, True
                self._next_look_s = time.monotonic() + _QUIET_LOOK_S
            if isinstance(error, RefusedError):
                self.run.shared.counters.add("refused_files", "content")
                logger.error("%s; it is not shipped", error)
                self._next_look_s = time.monotonic() + _QUIET_LOOK_S
            else:
                self.run.shared.failed(error, self.run.key)
        except Exception as error:
            self.is_settled = False
            self._next_look_s = time.monotonic() + _QUIET_LOOK_S
            self.run.shared.failed(error, self.run.key)
        finally:
            self._is_busy.discard(lane)

    def _is_there(self, name: str, stamp: Stamp) -> bool:
        return self.run.ledger.has(self.below + name, stamp)

    def _waits_for_large(self) -> bool:
        return any(self._is_large_lane(name) and name not in self.stuck for name in self.backlog) or any(
            self._is_large_lane(name) and self._goes_open and not self._is_put(name, stamp)
            for name, stamp in list(self.files.opened.items())
        )

    @property
    def _goes_open(self) -> bool:
        """Whether open shards of tensors go as they are: nobody will seal them, or nobody here knows, or it is time."""
        is_time = self.run.shared.is_once and not self.has_ended
        return self.state == "quiet" or (self.has_ended and self.was_repaired) or is_time

    def _is_put(self, name: str, stamp: Stamp) -> bool:
        snapshot = self._snapshots.get(name)
        return snapshot is not None and snapshot.stamp == stamp

    # What follows runs in jobs: one of each lane at a time.

    def _ship_small(self) -> None:
        now_s = time.monotonic()
        settings, run = self.run.shared.settings, self.run
        begun_s = time.time()
        with self._open() as folder:
            changed_ns = folder.changed_ns()
            manifest = self._read_manifest(folder)
            status = self._read_status(folder)
            balances = (Balance.read(Members(members)) for members in (self._ledger, self.status))
            self.balance = max(balances, key=lambda one: (one.observed, one.written))
            files = list_writer(folder)  # after the manifest: what a closed one promises is in this list
            self.files = files
            self._judge(files)
            self.has_looked = True
            if manifest is not None and not run.is_document_there(self.below + WRITER_MANIFEST):
                run.put_document(self.below + WRITER_MANIFEST, _as_begun(manifest), is_ours=self._is_of_it)
            for name, stamp in (files.sealed | files.indexes).items():
                if not self._is_large_lane(name) and not self._is_there(name, stamp):
                    self._put_file(folder, name)
            if now_s >= self._next_snapshot_s or self.state != "alive":
                self._next_snapshot_s = now_s + max(settings.fresh_s - _LOOK_S - 1, settings.fresh_s / 2)
                for name, stamp in files.opened.items():
                    if name.startswith("_stats") and not self._is_put(name, stamp):
                        self._put_snapshot(folder, name, stamp)
                self.small_since_s = begun_s
            self._remove_stale()
            is_whole = not self.backlog and all(
                self._is_put(name, stamp) or (self.state == "alive" and not name.startswith("_stats"))
                for name, stamp in files.opened.items()
            )
            has_ended = self.lifetime.state == "closed" or status_says_closed(self.status)
            is_held_back = has_ended and not is_whole
            if manifest is not None and not is_held_back:
                run.put_document(self.below + WRITER_MANIFEST, manifest, is_ours=self._is_of_it)
            if status is not None and not is_held_back and (now_s >= self._next_status_s or self.state != "alive"):
                self._next_status_s = now_s + settings.status_s
                run.put_document(self.below + STATUS, status, is_ours=self._is_of_it, is_noted=self.state != "alive")
            for name, stamp in files.aside.items():
                if not run.is_aside_there(self.below + name, stamp):
                    run.ship_aside(folder, self.below, name, stamp)
        run.ship_documents()
        self.changed_ns = changed_ns
        self.is_settled = (
            self.state != "alive"
            and is_whole
            and (manifest is None or run.has_document(self.below + WRITER_MANIFEST, manifest))
            and (status is None or run.has_document(self.below + STATUS, status))
            and not self.needs_repair
        )
        self.is_put = not (self.backlog.keys() - self.stuck) and all(name in self._snapshots for name in files.opened)

    def _ship_large(self) -> None:
        files = self.files
        with self._open() as folder:
            for name in sorted(files.sealed, key=lambda name: files.sealed[name].changed_ns):
                for wanted in (name, index_name(name)):
                    stamp = files.sealed.get(wanted) or files.indexes.get(wanted)
                    if stamp is None or not self._is_large_lane(name) or self._is_there(wanted, stamp):
                        continue
                    if self.run.shared.is_stopping() or not self.run.shared.health.is_open:
                        return
                    self._put_file(folder, wanted)
            for name, stamp in files.opened.items():
                if not name.startswith("_stats") and self._goes_open and not self._is_put(name, stamp):
                    self._put_snapshot(folder, name, stamp)
        self._next_look_s = 0.0

    def _put_file(self, folder: Folder, name: str) -> None:
        if name in self.stuck:
            return
        try:
            with folder.open(name) as file:
                self.run.put_new(self.below + name, file)
        except FileNotFoundError:
            pass  # retention was faster
        except RefusedError as error:
            self.stuck.add(name)
            self.run.shared.counters.add("refused_files", "content")
            logger.error("%s; it is not shipped", error)
        except OSError as error:  # its permissions, or the disk; the next listing of the store tries it again
            self.stuck.add(name)
            self.run.shared.failed(error, f"{self.path}/{name}")

    def _put_snapshot(self, folder: Folder, name: str, stamp: Stamp) -> None:
        """Put the whole batches of an open shard, in place of fewer of them."""
        with contextlib.suppress(FileNotFoundError), folder.open(name) as file:
            self._put_prefix(name, file, stamp)

    def _put_prefix(self, name: str, file: LocalFile, stamp: Stamp) -> None:
        destination, counters = self.run.shared.destination, self.run.shared.counters
        key, before = f"{self.run.key}/{self.below}{name}", self._snapshots.get(name)
        end = end_of_batches(file, before.num_bytes if before is not None else 0)
        if before is not None and end <= before.num_bytes:
            before.stamp = stamp
            return
        if not end:
            self._snapshots[name] = _Snapshot(0, 0, "", stamp)
            return
        if end > _MAX_AT_ONCE_BYTES:
            self._put_large_prefix(name, key, file, end, stamp)
            return
        with self.run.shared.at_once if end > _MAX_AT_ONCE_BYTES // 16 else contextlib.nullcontext():
            content = file.bytes(0, end)
            if before is not None and crc32c(memoryview(content)[: before.num_bytes]) != before.crc:
                counters.add("conflicts", "open")  # a failed write was cut back: the sealed shard will tell
                before.stamp = stamp
                return
            e_tag = before.e_tag or None if before is not None else None
            for _ in range(3):
                try:
                    tag = destination.put_if(key, content, e_tag)
                    break
                except TakenError:
                    there = destination.get(key)
                if there is None:
                    e_tag = None
                    self.run.suspect()
                elif there[0] == content:
                    tag = there[1]
                    break
                elif content.startswith(there[0]):
                    e_tag = there[1]
                else:
                    counters.add("conflicts", "open")
                    self._snapshots[name] = _Snapshot(len(content), crc32c(content), there[1], stamp)
                    return
            else:
                return
            self._snapshots[name] = _Snapshot(end, crc32c(content), tag, stamp)
        self._there.add(name)
        self.run.shared.uploaded("open", end)
        self.run.shared.health.succeeded()

    def _put_large_prefix(self, name: str, key: str, file: LocalFile, end: int, stamp: Stamp) -> None:
        """Put what is too large for one request: of a writer that is gone or quiet, so that it happens about once."""
        if self.state == "alive" and not self._goes_open:
            return  # its writer will seal it
        destination = self.run.shared.destination
        file.size_bytes = end
        if name in self._there:
            destination.delete([key])
        with contextlib.suppress(TakenError):
            destination.put_new(key, file)
        self._snapshots[name] = _Snapshot(end, 0, "", stamp)
        self._there.add(name)
        self.run.shared.uploaded("open", end)

    def _remove_stale(self) -> None:
        """Remove open shards there whose sealed shards are there."""
        stale = [name for name in self._there if self.run.ledger.get(self.below + sealed_name(name)) is not None]
        if stale:
            self.run.shared.destination.delete([f"{self.run.key}/{self.below}{name}" for name in stale])
            self._there -= set(stale)
            for name in stale:
                self._snapshots.pop(name, None)

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
        except (FileNotFoundError, CorruptError):  # it is being rewritten
            return None
        if raw.get("step") != self.status.get("step"):
            self.step_changed_s = time.time()
        self.status = raw
        return content

    def _judge(self, files: WriterFiles) -> None:
        """Decide whether the writer is at work."""
        is_running = self.lifetime.is_running if self.lifetime.pid else None
        if self.lifetime.state == "closed" or (status_says_closed(self.status) and self._is_own(self.status)):
            self.state = "closed"
        elif is_running is not None:
            self.state = "alive" if is_running else "dead"
        else:
            self.state = "alive" if time.time() - files.changed_s < _QUIET_S else "quiet"

    def _is_own(self, status: dict[str, Any]) -> bool:
        return status.get("state") == "closed" and status.get("pid") in (self.lifetime.pid, None)

    def _is_of_it(self, there: bytes) -> bool:
        """Whether a manifest or a status is of this writer."""
        with contextlib.suppress(RunError):
            other = Lifetime.read(parse_json(there, self.below))
            mine = Lifetime.read(self.status) if self.lifetime.pid == 0 else self.lifetime
            return (other.writer, other.pid, other.started_ns) == (mine.writer, mine.pid, mine.started_ns)
        return False


def _as_begun(manifest: bytes) -> bytes:
    """Return a writer's manifest as one that promises no rows yet: it is there before what it speaks of."""
    with contextlib.suppress(RunError):
        raw = parse_json(manifest, WRITER_MANIFEST)
        if raw.get("state") == "closed":
            members = {name: value for name, value in raw.items() if name != "ledger"}
            return encode_manifest(members | {"state": "recording"})
    return manifest


def status_says_closed(status: dict[str, Any]) -> bool:
    """Whether a status is the last word of its writer."""
    return status.get("state") == "closed"


def end_of_batches(file: LocalFile, start: int = 0) -> int:
    """Return where the last whole batch of an open shard ends; 0 without any.

    Args:
        file: the shard.
        start: the end of a batch that was found earlier; bytes before it never change.
    """
    offset, end = start or FIRST_MESSAGE, start
    with contextlib.suppress(CorruptError):
        while (message := block_at(file, offset)) is not None:
            is_schema = offset == FIRST_MESSAGE
            offset = message[0].end
            end = end if is_schema else offset
    return end


def _kind(name: str) -> str:
    """Return the word by which uploads of a file are counted."""
    last = name.rpartition("/")[2]
    if last.endswith(".index"):
        return "index"
    if last == STATUS:
        return "status"
    if last.endswith(".arrow"):
        return "stats" if last.startswith("stats") else "tensors"
    return "manifest" if last in (RUN_MANIFEST, WRITER_MANIFEST) else "document"
