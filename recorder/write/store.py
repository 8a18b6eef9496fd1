"""Owns one writer directory: its claim, its manifest, its two lanes and the deletion of old shards. Writer thread only.

Errors of the disk never leave it: they end in the ledger and the log. What it raises is a bug of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import native
from ..config import Schedule
from ..errors import RunError, WriteError
from ..format.codec import Encoder
from ..format.rundir import (
    RUN_MANIFEST,
    WRITER_MANIFEST,
    index_name,
    open_name,
    rank_dir,
    read_json,
    run_name,
)
from ..format.schema import FORMAT_NAME, FORMAT_VERSION, SCHEMA
from .backoff import Backoff, drop_reason
from .earlier import EarlierShard, find_earlier
from .file import Disk, PageMemory
from .ipc import Layout
from .lane import Lane
from .ledger import Ledger
from .manifest import create_manifest, replace_manifest
from .notices import Notices
from .quota import Floor, Held, Quota
from .rows import MAX_ROWS, RowBatch
from .settings import WriteSettings
from .shard import StoredShard
from .status import StatusFile

_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}
_BATCHES_PER_SHARD = 4
"""Where the quota is small batches are, too: the last of a shard lies beyond the size at which shards end."""
_ROW_BYTES = 512
"""About what a row takes without its payload."""
_MAX_NAMES = 20
"""Names of a directory that were found taken, before that counts as trouble."""
_NO_STEPS = Schedule("", ())
_LIGHT_BYTES = 4 << 20
"""Room for a batch without payloads; more is found where it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a writer belongs; made by `resolve_dir` once the ranks have agreed on the run."""

    run_dir: Path
    run_manifest: dict[str, Any]
    """The content of `_run.json`, for the first writer to come."""
    rank: int
    attempt: int
    named: Callable[[str], None] = lambda name: None
    """Told on the writer thread what the run is called, which is for the first writer to say."""


class Store:
    """Leaves rows in shards, or drops them with a reason."""

    def __init__(
        self, settings: WriteSettings, ledger: Ledger, disk: Disk, notices: Notices, clock: Callable[[], float]
    ) -> None:
        self.directory: Path | None = None
        """The writer's own directory, once it is claimed."""
        self.lanes: dict[str, Lane] = {}
        """By kind of shard, once the directory is claimed."""
        self._settings = settings
        self._ledger = ledger
        self._disk = disk
        self._notices = notices
        self._clock = clock
        self._floor = Floor(settings.min_free_bytes, disk, notices)
        self._place: RunPlace | None = None
        self._claiming = Backoff(clock)
        self._manifest: Mapping[str, Any] = {}
        self._is_manifest_stale = True
        self._describing = Backoff(clock)
        self._quota: Quota | None = None
        self._keep_steps = Schedule.parse(settings.keep_steps) if settings.keep_steps else _NO_STEPS
        self._retired_earlier: dict[str, dict[str, Any]] = {}
        """What was deleted of earlier writers, by their names, as the manifest says it."""
        self._restarted: str | None = None
        self._io: str | None = None
        self._num_names_left = _MAX_NAMES
        self._status = StatusFile(disk, clock)

    @property
    def written_bytes(self) -> int:
        return sum(lane.written_bytes for lane in self.lanes.values())

    @property
    def last_written_step(self) -> int | None:
        """The highest step of a row that was written."""
        steps = [lane.last_written_step for lane in self.lanes.values()]
        return max((step for step in steps if step is not None), default=None)

    @property
    def num_pending_rows(self) -> int:
        """Rows taken but not written."""
        return sum(lane.num_pending_rows for lane in self.lanes.values())

    def settle(self, place: RunPlace) -> None:
        """Claim a directory in `place`, now or, where the disk refuses, again before later rows."""
        self._place = place
        self._claim()
        if self.directory is not None:
            with self._notices.on_error(f"{self.directory} cannot be used"):
                self._floor.refusal(self.directory, 0)

    def refusal(self, kind: str) -> str | None:
        """Why rows of this kind are dropped unseen for now; None where `lanes[kind]` takes them."""
        if self.directory is None and self._claiming.is_over:
            self._claim()
        if self.directory is None:
            return self._claiming.reason
        return self.lanes[kind].refusal

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """What `_writer.json` says beside what is known here."""
        self._manifest = manifest
        self._is_manifest_stale = True

    def keep_up(self) -> None:
        """Flush, sync and describe what is due."""
        for lane in self.lanes.values():
            lane.keep_up()
        self._retire_outdated()
        self._look_at_io()
        if self._is_manifest_stale and self.directory is not None and self._describing.is_over:
            self._is_manifest_stale = False
            self._describe()

    def show(self, facts: Mapping[str, Any], *, state: str = "recording") -> None:
        """Bring `_status.json` up to date, without a word where the disk refuses."""
        if self.directory is None or self._quota is None:
            return
        ledger = self._ledger.snapshot()
        own: dict[str, Any] = {
            "writer": self.directory.name,
            "state": state,
            **ledger,
            "used_bytes": sum(map(self._quota.used_bytes, self.lanes)),
            "max_bytes": self._settings.max_bytes,
        }
        with contextlib.suppress(OSError):
            own["free_bytes"] = self._disk.free_bytes(self.directory)
        self._status.write(self.directory, {**facts, **own}, written_bytes=self.written_bytes)
        if state != "recording":
            self._status.close()

    def give_back(self) -> None:
        """Write what is pending and holds memory that training waits for."""
        for lane in self.lanes.values():
            lane.give_back()

    def flush(self) -> bool:
        """Write all pending rows. True where none was dropped."""
        flushed = [lane.flush() for lane in self.lanes.values()]
        self._retire_outdated()
        return all(flushed)

    def sync(self) -> bool:
        """Make all that was written durable. True where it is."""
        synced = [lane.sync() for lane in self.lanes.values()]
        return all(synced)

    def close(self, ledger: Mapping[str, object]) -> bool:
        """Seal what is open and say so in the manifest. True where all went well."""
        sealed = [lane.seal(ledger) for lane in self.lanes.values()]
        self._look_at_io()
        return self._describe(state="closed", closed_ns=time.time_ns()) and all(sealed)

    def begin_anew(self, problem: str) -> None:
        """After an error of ours: leave the open shards as they are, and the rows that wait for good."""
        self._restarted = problem
        self._is_manifest_stale = True
        for lane in self.lanes.values():
            lane.begin_anew()

    def let_go(self) -> None:
        """Close what is open, where no orderly end has: the process may live on."""
        for lane in self.lanes.values():
            lane.let_go()
        self._status.close()

    def _claim(self) -> None:
        """Make a directory that no other process can have."""
        place = self._place
        assert place is not None, "settle comes first"
        try:
            self._make_directories(place.run_dir)
            content = {**_FORMAT, **place.run_manifest}
            manifest = place.run_dir / RUN_MANIFEST
            if not create_manifest(self._disk, manifest, content, unsynced=self._say_unsynced):
                with contextlib.suppress(RunError):  # one that cannot be read names nothing
                    content = read_json(manifest)
            if (name := run_name(content)) is not None:
                place.named(name)
            parent = place.run_dir / rank_dir(place.rank)
            self._make_directories(parent)
            directory = self._make_own_directory(parent, place.attempt)
            try:
                for made in (parent, place.run_dir, place.run_dir.parent):  # another rank may have made it just now
                    self._sync_directory(made)
                self.lanes = self._open_lanes(directory, place)
            except OSError:
                with contextlib.suppress(OSError):  # the next attempt makes another
                    self._disk.remove_directory(directory)
                raise
        except OSError as error:
            self._claiming.failed(drop_reason(error))
            problem = WriteError(
                f"{place.run_dir} cannot be written: {error}; training goes on and nothing is recorded"
            )
            self._notices.say("claim", str(problem), level=logging.ERROR)
            return
        self._claiming.succeeded()
        self._look_for_others(directory)
        self.directory = directory
        self.keep_up()

    def _look_for_others(self, directory: Path) -> None:
        """Say so where another process has recorded this rank of this very attempt: two jobs, or one launched twice."""
        mark = f"{directory.name.partition('-')[0]}-"
        with contextlib.suppress(OSError):
            others = [name for name in os.listdir(directory.parent) if name.startswith(mark) and name != directory.name]
            if others:
                self._notices.say(
                    "shared",
                    f"{directory.parent} has {len(others)} more of this attempt: the job was launched again with the "
                    "same run id, or two jobs share it; nothing is overwritten, and of a step the newest counts",
                )

    def _make_own_directory(self, parent: Path, attempt: int) -> Path:
        """A directory that this writer has made."""
        while True:
            directory = parent / f"{attempt:06d}-{os.urandom(6).hex()}"
            try:
                self._disk.make_directory(directory)
            except FileExistsError:
                # NFS says so, too, when it repeats a request that has succeeded; another name costs nothing.
                if self._num_names_left == 0:
                    raise
                self._num_names_left -= 1
                with contextlib.suppress(OSError):
                    self._disk.remove_directory(directory)
            else:
                return directory

    def _make_directories(self, path: Path) -> None:
        if not path.is_dir():
            self._make_directories(path.parent)
            with contextlib.suppress(FileExistsError):
                self._disk.make_directory(path)
            self._sync_directory(path.parent)

    def _sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable, or say that they are not: what they name is usable all the same."""
        try:
            self._disk.persist_directory(path)
        except OSError as error:
            self._say_unsynced(error)

    def _say_unsynced(self, error: OSError) -> None:
        assert self._place is not None, "settle comes first"
        self._notices.failed(
            f"{self._place.run_dir}: a manifest or a directory cannot be synced; recording goes on, and a loss of "
            "power may take it",
            error,
            is_aside=True,
        )

    def _open_lanes(self, directory: Path, place: RunPlace) -> dict[str, Lane]:
        settings = self._settings
        quota = self._quota = Quota(settings.max_bytes, settings.keep_newest)
        with self._notices.on_error(f"what earlier processes left beside {directory} cannot be counted"):
            self._count_earlier(quota, find_earlier(directory, place.attempt))
        memory = PageMemory(_LIGHT_BYTES)

        encoder = Encoder(settings.codec, settings.codec_level, native.load(settings.native))

        def lane(kind: str, compression: str | None, *, has_index: bool) -> Lane:
            max_batch_bytes = quota.max_shard_bytes(kind) // _BATCHES_PER_SHARD
            return Lane(
                kind,
                directory=directory,
                batch=RowBatch(
                    attempt=place.attempt,
                    rank=place.rank,
                    encoder=encoder,
                    batch_bytes=min(settings.batch_bytes, max_batch_bytes),
                    max_rows=min(MAX_ROWS, max(1, max_batch_bytes // _ROW_BYTES)),
                    is_payload_apart=compression is None,  # else Arrow compresses it, into a copy
                ),
                layout=Layout(SCHEMA, compression),
                has_index=has_index,
                settings=settings,
                disk=self._disk,
                memory=memory,
                ledger=self._ledger,
                quota=quota,
                floor=self._floor,
                keep_steps=self._keep_steps,
                retire=self._retire_for_room,
                notices=self._notices,
                clock=self._clock,
            )

        # Large payloads are compressed before, or not worth it.
        tensors = lane("tensors", None, has_index=True)
        return {"tensors": tensors, "stats": lane("stats", "zstd", has_index=False)}

    def _look_at_io(self) -> None:
        """What became of `direct_io`, once a file system has had its say."""
        seen = {lane.is_direct for lane in self.lanes.values()} - {None}
        if not seen:
            return
        if self._settings.direct_io == "off":
            io = "page cache (direct_io = off)"
        else:
            io = "page cache (no direct writes here)" if False in seen else "direct"
        if io != self._io:
            self._io, self._is_manifest_stale = io, True

    def _describe(self, *, state: str = "recording", **more: object) -> bool:
        """Write the manifest. True where it is on the disk."""
        if self.directory is None:
            return False
        own = {
            **_FORMAT,
            "writer": self.directory.name,
            "state": state,
            "ledger": self._ledger.snapshot(),
            **({"retired_earlier": self._retired_earlier} if self._retired_earlier else {}),
            **({"io": self._io} if self._io else {}),
            **({"restarted": self._restarted} if self._restarted else {}),
            **more,
        }
        try:
            path = self.directory / WRITER_MANIFEST
            replace_manifest(self._disk, path, {**self._manifest, **own}, unsynced=self._say_unsynced)
        except OSError as error:
            self._notices.failed(f"{self.directory / WRITER_MANIFEST} cannot be written", error, is_aside=True)
            self._is_manifest_stale = True
            self._describing.failed(drop_reason(error))
            return False
        self._describing.succeeded()
        return True

    def _count_earlier(self, quota: Quota, shards: Sequence[EarlierShard]) -> None:
        """Put the shards of processes that are over on the books; the bound is one of the rank."""
        for shard in shards:
            is_kept = False
            if self._settings.keep_steps:
                content = shard.look(self._keep_steps)
                is_kept = content is None or content.is_kept
            quota.add(shard.kind, shard.num_bytes)
            stored = StoredShard(shard.directory / shard.name, 0, shard.num_bytes)
            quota.keep(shard.kind, Held(stored, 0, is_kept, shard))

    def _retire_outdated(self) -> None:
        """Delete what lies before the newest steps, once its loss is on the disk."""
        if self._quota is None or not self._describing.is_over:
            return
        for kind in self.lanes:
            if outdated := self._quota.outdated(kind):
                self._retire(kind, outdated, is_urgent=False)

    def _retire_for_room(self, kind: str, held: Held) -> None:
        """Delete the shard that is in the way; an earlier writer's only where its loss could be noted."""
        if held.earlier is None:
            self._retire(kind, [held], is_urgent=True)
        elif self._note_earlier(held.earlier):
            self._delete(kind, held, held.earlier.paths)
        else:
            assert self._quota is not None, "lanes have a quota"
            self._quota.hold_on(kind, held)

    def _retire(self, kind: str, shards: Sequence[Held], *, is_urgent: bool) -> None:
        """Delete shards of this writer, after their loss is on the disk.

        Where the disk refuses the manifest, those in the way go all the same (it may be full, and the next batch says
        so); those that are merely old wait.
        """
        num_rows = sum(held.shard.num_rows for held in shards)
        num_bytes = sum(held.shard.num_bytes for held in shards)
        self._ledger.add_retired(num_rows, num_bytes)
        if not self._describe() and not is_urgent:
            self._ledger.add_retired(-num_rows, -num_bytes)
            return
        for held in shards:
            path = held.shard.path  # a shard that was published while the directory could not be synced has both names
            names = (open_name(path.name), path.name, index_name(path.name))
            self._delete(kind, held, [path.with_name(name) for name in names])

    def _note_earlier(self, shard: EarlierShard) -> bool:
        """Say in the manifest that a shard of an earlier writer goes. False where nobody could know."""
        content = shard.look(self._keep_steps)
        if content is None:
            return False
        noted = self._retired_earlier.setdefault(shard.directory.name, {"rows": 0, "bytes": 0, "shards": {}})
        if shard.name not in noted["shards"]:
            noted["shards"][shard.name] = {"rows": content.num_rows, "bytes": shard.num_bytes}
            noted["rows"] += content.num_rows
            noted["bytes"] += shard.num_bytes
            if content.ledger.get("observed", -1) > noted.get("ledger", {}).get("observed", -1):
                noted["ledger"] = content.ledger  # the newest accounts of a killed writer may go with its shard
        return self._describe()

    def _delete(self, kind: str, held: Held, paths: Sequence[Path]) -> None:
        assert self._quota is not None, "lanes have a quota"
        self._quota.take_off(kind, held)
        for path in paths:
            with (
                self._notices.on_error(f"{path} cannot be deleted", is_aside=True),
                contextlib.suppress(FileNotFoundError),
            ):
                self._disk.unlink(path)
