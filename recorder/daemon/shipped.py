"""One run's copy at the destination: which files are there, in which state, and how further files are put.

An object that this daemon did not put must never be overwritten. It stays, and is logged as a conflict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crc32c import crc32c

from ..errors import RunError, StoreError
from ..format.rundir import MAX_MANIFEST_BYTES, NODES, RUN_MANIFEST, STATUS, WRITER_MANIFEST, parse_json
from ..run.finding import PRUNED
from ..storage.untrusted_files import FileFacts
from .destination import Destination, TakenError
from .settings import DaemonSettings
from .telemetry import Counters, Health
from .watching import Folder, LocalFile, RefusedError

logger = logging.getLogger("recorder.daemon")

_LEDGER_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_LEDGER_BYTES = 1 << 30


class Confirmed(NamedTuple):
    """The size of a file that the store has confirmed, and how it was confirmed."""

    size_bytes: int
    how: str
    """A word that `Destination.put_new` returns. For a document, ``crc:`` and the document's checksum."""


def ledger_name(url: str) -> str:
    """Return the file name of a run's ledger for one destination. A run may have several in turn."""
    return f"_shipped-{hashlib.sha256(url.encode()).hexdigest()[:8]}.jsonl"


class ShippedLedger:
    """A file in a run's directory that lists the files that the store has confirmed. Any thread may call."""

    def __init__(self, folder: Folder, url: str) -> None:
        """Read the earlier confirmations from the file. If the file cannot be read or written, `problem` says why."""
        self.name = ledger_name(url)
        self.problem = ""
        self._lock = threading.Lock()
        self._files: dict[str, Confirmed] = {}
        self._descriptor = -1
        try:
            self._descriptor = os.open(self.name, _LEDGER_FLAGS, 0o600, dir_fd=folder.descriptor)
            self._load()
        except OSError as error:
            self.problem = f"{folder.path}/{self.name}: cannot be kept ({error.strerror}); the store's listing is used"

    def _load(self) -> None:
        size_bytes = min(os.fstat(self._descriptor).st_size, _MAX_LEDGER_BYTES)
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            text = file.read(size_bytes)
        for line in text.split(b"\n"):
            try:
                entry = json.loads(line)
                name, size, how = entry["name"], entry["bytes"], entry["how"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # a kill has cut the last line, or another program has written into the file
            if isinstance(name, str) and isinstance(size, int) and isinstance(how, str):
                self._files[name] = Confirmed(size, how)
        if text and not text.endswith(b"\n"):
            os.write(self._descriptor, b"\n")

    @property
    def age_s(self) -> float:
        """The seconds since the ledger's file was last written. 0 if the file cannot be kept."""
        return max(time.time() - os.fstat(self._descriptor).st_mtime, 0.0) if self._descriptor >= 0 else 0.0

    def get(self, name: str) -> Confirmed | None:
        return self._files.get(name)

    def has(self, name: str, stamp: FileFacts) -> bool:
        """Return True if the store has confirmed a file of this size under this name."""
        confirmed = self.get(name)
        return confirmed is not None and confirmed.size_bytes == stamp.size_bytes

    def names(self) -> dict[str, Confirmed]:
        with self._lock:
            return dict(self._files)

    def add(self, name: str, size_bytes: int, how: str) -> bool:
        """Add a confirmation. Return True in only one thread once `problem` is not empty any more."""
        with self._lock:
            before = self.problem
            self._files[name] = Confirmed(size_bytes, how)
            self._write([name])
            return bool(self.problem and not before)

    def forget(self, names: list[str]) -> None:
        """Remove the confirmations of files that the store has lost."""
        with self._lock:
            for name in names:
                self._files.pop(name, None)
            self._write(self._files, is_anew=True)

    def _write(self, names: Iterable[str], *, is_anew: bool = False) -> None:
        files = ((name, self._files[name]) for name in names)
        entries = ({"name": name, "bytes": one.size_bytes, "how": one.how} for name, one in files)
        text = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries)
        if self._descriptor < 0:
            return
        try:
            if is_anew:
                os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, text.encode())
        except OSError as error:  # for example a full disk; the next listing of the store shows what the ledger misses
            self.problem = f"{self.name}: cannot be written ({error.strerror}); what it lacks is found in the store"

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


LOOK_S = 2.0
"""The seconds between two scans of a recording writer's files, unless `fresh_s` asks for more frequent scans."""


@dataclass(slots=True, kw_only=True)
class Shipping:
    """What the shippers of all runs share: the destination, the settings, the counters, and when to stop."""

    destination: Destination
    settings: DaemonSettings
    counters: Counters = field(default_factory=Counters)
    health: Health = field(default_factory=Health)
    node: str = ""
    """The name of this node at the destination. The daemon sets it before the first upload."""
    is_stopping: Callable[[], bool] = lambda: False
    is_over: Callable[[], bool] = lambda: False
    """Returns True once a stop has waited for as long as it may. The processes of errands must then end at once."""
    is_once: bool = False
    """True with ``--once``. Open shards are then shipped as they are, because there may be no later pass."""
    at_once: Any = field(default_factory=threading.Lock)
    """A thread holds this lock while it has a large snapshot (a copy of an open shard) in memory."""
    said: dict[str, str] = field(default_factory=dict)
    """The last logged error of each run. A job that fails again with an equal error is not logged again."""

    @property
    def look_s(self) -> float:
        """The seconds between two scans of a recording writer's files."""
        return min(LOOK_S, self.settings.fresh_s / 5)

    def uploaded(self, kind: str, num_bytes: int) -> None:
        self.counters.add("uploads", kind)
        self.counters.add("uploaded_bytes", kind, num_bytes)

    def refused(self, error: RefusedError) -> None:
        """Count and log a file whose content does not match its name."""
        self.counters.add("refused_contents", "content")
        logger.error("%s; it is not shipped", error)

    def failed(self, error: Exception, where: str) -> None:
        """Count an error of a job and log it once. The job will be tried again."""
        kind = error.kind if isinstance(error, StoreError) else "internal"
        kind = "local" if isinstance(error, (OSError, RunError, RefusedError)) else kind
        self.counters.add("errors", kind)
        if isinstance(error, StoreError):
            is_first = not self.health.problem
            self.health.failed(str(error))
            if kind in ("refused", "anonymous"):
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


_MAX_ASIDE_BYTES = 16 << 20
_RECONCILE_PAUSE_S = 5.0


class PutOver(NamedTuple):
    """The document that is at the destination after `ShippedRun.put_over`."""

    there: bytes
    e_tag: str
    is_new: bool
    """False if nothing was uploaded. The document at the destination was equal, or may not be replaced."""


@dataclass(slots=True)
class _Document:
    crc: int
    e_tag: str


class ShippedRun:
    """One run below a watched folder and its copy at the destination. Any thread may put."""

    def __init__(self, root: str, names: tuple[str, ...], shared: Shipping) -> None:
        self.root = root
        self.names = names
        self.key = "/".join(names)
        self.path = "/".join((root, *names))
        self.shared = shared
        self.run_id = ""
        self.facts: dict[str, Any] = {}
        self.manifest: FileFacts | None = None
        """The stamp (size, time, inode) of the local manifest when it was last compared with the destination's."""
        self.conflict = ""
        """Why nothing of the run is shipped. Empty if the run is shipped."""
        self.was_pruned = self.has_shipped = False
        """`was_pruned`: a prune removed the run there. `has_shipped`: this daemon has confirmed a file of the run."""
        self.stamps: dict[str, FileFacts] = {}
        """The stamps of the run's own documents (not of its writers' files) on this disk at the last scan."""
        self.held: dict[str, FileFacts] = {}
        """The objects in the last listing of the destination, by their names below the run."""
        self.listed_s = 0.0
        """The monotonic time at which the last listing of the destination began."""
        self.list_at_s = 0.0
        """The monotonic time at which the destination will be listed again."""
        self._documents: dict[str, _Document] = {}
        self._aside: dict[str, FileFacts] = {}
        self._conflicting: set[str] = set()
        self._lock = threading.Lock()
        with self.open() as folder:
            self.ledger = ShippedLedger(folder, shared.destination.url)
        if self.ledger.problem:
            logger.warning("%s", self.ledger.problem)

    def open(self) -> Folder:
        with Folder.root(self.root) as top:
            return top.below(*self.names)

    # The methods that look at the destination.

    def identify(self) -> bool:
        """Return True unless the destination has another run of this run's name, or has pruned the run."""
        with self.open() as folder, folder.open(RUN_MANIFEST) as file:
            local = parse_json(file.bytes(0, min(file.size_bytes, MAX_MANIFEST_BYTES)), file.where)
            self.manifest = file.stamp
        self.run_id = str(local.get("run_id"))
        self.facts = local
        there = self.shared.destination.get(f"{self.key}/{RUN_MANIFEST}")
        if there is not None and there[0]:
            if (other := self._run_id_in(there[0])) != self.run_id:
                self.conflict = f"another run at the destination has its name (run_id {other or 'unreadable'})"
        elif there is None and self.shared.destination.get(f"{PRUNED}/{self.key}.json") is not None:
            self.conflict, self.was_pruned = "the run was pruned at the destination", True
            logger.info("%s is not shipped: %s", self.path, self.conflict)
            return False
        if self.conflict:
            self.shared.counters.add("conflicts", "run")
            logger.error("%s is not shipped: %s", self.path, self.conflict)
        return not self.conflict

    def is_listing_due(self, now_s: float) -> bool:
        return now_s >= self.list_at_s or self.listed_s < self.shared.health.recovered_s

    def listed(self) -> dict[str, FileFacts]:
        prefix = f"{self.key}/"
        return {key[len(prefix) :]: held for key, held in self.shared.destination.listing(prefix)}

    def reconcile(self) -> list[str]:
        """List the run's objects at the destination. Return the confirmed files that are not there, and forget them."""
        # Other threads may put files during the listing. Such a file may be missing from the listing, but is not lost.
        is_first, self.listed_s = not self.listed_s, time.monotonic()
        confirmed_before, documents = self.ledger.names(), list(self._documents)
        # With an empty ledger no listing is needed yet: a put, or the next listing, shows which files are there.
        is_new = is_first and not (confirmed_before or self.ledger.problem or self.shared.is_once)
        self.held = {} if is_new else self.listed()
        lost = [
            name
            for name, confirmed in confirmed_before.items()
            if name not in self.held
            or (self.held[name].size_bytes != confirmed.size_bytes and not confirmed.how.startswith("crc"))
        ]
        if lost:
            logger.warning("%s: the store has lost %d files; they are put again", self.key, len(lost))
            self.shared.counters.add("lost_objects", amount=len(lost))
            self.ledger.forget(lost)
        with self._lock:
            for name in documents:
                if name not in self.held:
                    self._documents.pop(name, None)
            self._aside.clear()
            self._conflicting.clear()
        self.list_at_s = time.monotonic() + self.shared.settings.recheck_s
        if not self.shared.health.problem:  # a store that lists objects may still refuse puts
            self.shared.health.succeeded()
        return lost

    def suspect(self) -> None:
        """Have the destination listed soon, and compared with the ledger, because a file may be lost."""
        self.list_at_s = min(self.list_at_s, time.monotonic() + _RECONCILE_PAUSE_S)

    @property
    def are_documents_there(self) -> bool:
        """True if the destination has the run's own documents as this node had them at the last scan."""
        return self._documents.get(RUN_MANIFEST) is not None and all(
            self.is_aside_there(name, stamp) for name, stamp in self.stamps.items() if name != RUN_MANIFEST
        )

    def is_aside_there(self, key: str, stamp: FileFacts) -> bool:
        """Return True if this file was put as it is now, or if its put failed because of a conflict."""
        return self._aside.get(key) == stamp

    def is_document_there(self, name: str) -> bool:
        """Return True if the destination has a document of this name, whatever the document contains."""
        return name in self._documents or name in self.held

    def has_document(self, name: str, content: bytes) -> bool:
        """Return True if the destination has a document of this name with exactly this content."""
        known = self._documents.get(name)
        return known is not None and known.crc == crc32c(content)

    # The methods that put files. A method that returns a bool returns False if another object has the name.

    def put_documents(self) -> None:
        """Put the run's own documents, its manifest last."""
        with self.open() as folder:
            for name, stamp in sorted(self.stamps.items()):
                if name != RUN_MANIFEST and not self.is_aside_there(name, stamp):
                    self.put_aside(folder, "", name, stamp)
            if self._documents.get(RUN_MANIFEST) is None:
                with folder.open(RUN_MANIFEST) as file:
                    content = file.bytes(0, min(file.size_bytes, MAX_MANIFEST_BYTES))
                # Nodes with separate disks have different manifests of one run. The first one that arrives is kept.
                self.put_document(RUN_MANIFEST, content, stays=lambda there: self._run_id_in(there) == self.run_id)

    def _run_id_in(self, manifest: bytes) -> str:
        with contextlib.suppress(RunError):
            return str(parse_json(manifest, self.key).get("run_id"))
        return ""

    def put_aside(self, folder: Folder, below: str, name: str, stamp: FileFacts) -> bool:
        """Put a file that is no shard, index or manifest: an informative document, or a shard set aside as damaged."""
        key, is_ours = f"{below}{name}", True
        with folder.open(name) as file:
            if not name.endswith(".json"):
                is_ours = self.put_new(key, file)
            elif file.size_bytes <= _MAX_ASIDE_BYTES:
                is_ours = self.put_document(key, file.bytes(0, file.size_bytes))
        self._aside[key] = stamp
        return is_ours

    def put_new(self, name: str, file: LocalFile) -> bool:
        """Put an immutable file of the run, and record that the destination has it."""
        shared = self.shared
        try:
            how = shared.destination.put_new(f"{self.key}/{name}", file)
        except TakenError:
            return self._conflicts(name)
        shared.health.succeeded()
        if how != "there":
            shared.uploaded(_kind(name), file.size_bytes)
        shared.counters.add("confirmed_files", how)
        self.note(name, file.size_bytes, how)
        return True

    def put_document(
        self,
        name: str,
        content: bytes,
        *,
        is_ours: Callable[[bytes], bool] = lambda there: False,
        stays: Callable[[bytes], bool] = lambda there: False,
        is_noted: bool = True,
    ) -> bool:
        """Put a document over its earlier version. Return False if another object has the document's name.

        `is_ours` returns True for content that is an earlier version of the document. `stays` returns True for content
        that must be kept. With `is_noted` the ledger (the list of confirmed files) records the document's checksum.
        """
        shared, crc = self.shared, crc32c(content)
        known = self._documents.get(name)
        if known is not None and known.crc == crc:
            return True
        confirmed, held = self.ledger.get(name), self.held.get(name)
        noted = confirmed.how if confirmed is not None else ""
        # The document has not changed since the last start.
        if known is None and held is not None and noted == f"crc:{crc:08x}":
            self._documents[name] = _Document(crc, held.e_tag)
            return True
        put = self.put_over(
            name, content, known.e_tag if known is not None else None,
            lambda there: not there or (
                not stays(there) and (is_ours(there) or noted == f"crc:{crc32c(there):08x}")
            ),
        )  # fmt: skip
        if put is None:
            return True  # another daemon was faster; the next scan tries again
        if not put.is_new and put.there != content and not stays(put.there):
            return self._conflicts(name)
        if put.is_new:
            shared.uploaded(_kind(name), len(content))
        shared.health.succeeded()
        with self._lock:
            self._documents[name] = _Document(crc, put.e_tag)
        if is_noted:
            self.note(name, len(content), f"crc:{crc:08x}")
        return True

    def put_over(
        self, name: str, content: bytes, e_tag: str | None, may_replace: Callable[[bytes], bool]
    ) -> PutOver | None:
        """Put a document over the existing one if that has this ETag, or if `may_replace` accepts its content.

        Return the document that is there afterwards. Return None if another daemon was faster at each try.
        """
        destination, key = self.shared.destination, f"{self.key}/{name}"
        for _ in range(3):
            try:
                return PutOver(content, destination.put_if(key, content, e_tag), True)
            except TakenError:
                there = destination.get(key)
            if there is None:
                self.suspect()
            elif there[0] == content or not may_replace(there[0]):
                return PutOver(*there, False)
            e_tag = None if there is None else there[1]
        return None

    def note(self, name: str, size_bytes: int, how: str) -> None:
        """Record in the ledger that the destination has a file. A problem of the ledger is logged once."""
        self.has_shipped = True
        if self.ledger.add(name, size_bytes, how):
            logger.warning("%s/%s", self.path, self.ledger.problem)

    def _conflicts(self, name: str) -> bool:
        """Count and log a conflict once between two listings, because each scan tries again. Return False."""
        if name not in self._conflicting:
            self._conflicting.add(name)
            self.shared.counters.add("conflicts", _kind(name))
            logger.error("%s/%s: another object has this name; it is not overwritten", self.key, name)
        return False


def _kind(name: str) -> str:
    last = name.rpartition("/")[2]
    if last.endswith(".index"):
        return "index"
    if last == STATUS or name.startswith(NODES):
        return "status"
    if last.endswith(".arrow"):
        return last.partition("-")[0]
    return "manifest" if last in (RUN_MANIFEST, WRITER_MANIFEST) else "document"
