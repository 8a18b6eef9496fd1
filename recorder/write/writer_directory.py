"""One writer directory: claims it, writes its manifest and shards, and deletes old shards. Writer thread only.

This module raises no error of the disk: such errors go to the ledger (the counts of rows) and the log. Any other
exception is a bug of the recorder.
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
from ..columns import SCHEMA
from ..config import Settings
from ..errors import RunError, WriteError
from ..format.codec import Encoder
from ..format.manifest import RunManifest
from ..format.rundir import RUN_MANIFEST, WRITER_MANIFEST, index_name, open_name, rank_dir, read_json
from ..records import KEEP_TOKENS
from ..rules import Schedule
from ..sites import FORMAT_NAME, FORMAT_VERSION, PROBE
from ..system.log import tell
from ..system.processes import CoreShare
from .file import Disk, PageMemory
from .ledger import Backoff, Ledger, Notices, drop_reason
from .manifest import StatusFile, create_manifest, replace_manifest
from .quota import DiskFloor, EarlierShard, HeldShard, Quota, find_earlier
from .ring import Dump
from .rotation import RotatingShards
from .rows import MAX_ROWS, RowBatch
from .shard import IpcFormat, StoredShard

_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}
_BATCHES_PER_SHARD = 4
"""The fewest batches per shard. A shard may exceed its size by one batch, so batches are kept small."""
_ROW_BYTES = 512
"""The approximate bytes that a row takes without its payload."""
_MAX_NAMES = 20
"""The most directory names that may be taken before the claim fails with an error."""
_NO_STEPS = Schedule("", ())
_LIGHT_BYTES = 4 << 20
"""The initial bytes of the memory for batches without payloads. The memory grows if a batch needs more."""
_RESTS = "tensors are stored without compression while training uses every core (codec=auto)"
_LOOK_S = 0.2
"""The seconds between checks whether training uses every core."""
_CROWDED, _FREE = 0.75, 0.9
"""Payloads are stored unencoded if the writer's `CoreShare` is below the first, and encoded again above the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """The run, rank and attempt of a writer. `resolve_dir` makes it once the ranks have agreed on the run."""

    run_dir: Path
    run_manifest: dict[str, Any]
    """The content of `_run.json`, which the first writer of the run creates."""
    rank: int
    attempt: int
    named: Callable[[str], None] = lambda name: None
    """A function, called on the writer thread with the name of the run, which the run's first writer decides."""


class WriterDirectory:
    """Writes the rows of one writer directory, by kind of shard. Each row is written, or dropped with a reason."""

    def __init__(
        self, settings: Settings, ledger: Ledger, disk: Disk, notices: Notices, clock: Callable[[], float]
    ) -> None:
        self.path: Path | None = None
        self.shards_by_kind: dict[str, RotatingShards] = {}
        """The shards by their kind, once the directory is claimed."""
        self._settings = settings
        self._ledger = ledger
        self._disk = disk
        self._notices = notices
        self._clock = clock
        self._floor = DiskFloor(settings.min_free_bytes, disk, notices)
        self._target: RunTarget | None = None
        self._claiming = Backoff(clock)
        self._manifest: Mapping[str, Any] = {}
        self._is_manifest_stale = True
        self._describing = Backoff(clock)
        keeps_tokens = any(rule.keep & KEEP_TOKENS for rule in settings.rules)
        self._quota = Quota(settings.max_bytes, settings.keep_newest, keeps_tokens=keeps_tokens)
        self._keep_steps = Schedule.parse(settings.keep_steps) if settings.keep_steps else _NO_STEPS
        self._retired_earlier: dict[str, dict[str, Any]] = {}
        """The manifest's entries for deleted shards of earlier writers, by the writers' names."""
        self._restarted: str | None = None
        self.dumps: Sequence[Dump] = ()
        """The dumps that triggers have asked for, which the manifest lists."""
        self._io: str | None = None
        self._encoder: Encoder | None = None
        self._cores = CoreShare()
        self._has_said_rest = False
        self._next_look_s = 0.0
        """The time on the clock at which the writer checks again whether training uses every core."""
        self._num_names_left = _MAX_NAMES
        self._status = StatusFile(disk, clock)

    @property
    def written_bytes(self) -> int:
        return sum(shards.written_bytes for shards in self.shards_by_kind.values())

    @property
    def last_written_step(self) -> int | None:
        steps = [shards.last_written_step for shards in self.shards_by_kind.values()]
        return max((step for step in steps if step is not None), default=None)

    @property
    def num_pending_rows(self) -> int:
        """The number of rows that were taken and are not written yet."""
        return sum(shards.batch.num_rows for shards in self.shards_by_kind.values())

    def claim(self, target: RunTarget) -> None:
        """Claim a directory for `target` now. If the disk refuses, the claim is tried again before later rows."""
        self._target = target
        self._claim()
        if self.path is not None:
            with self._notices.on_error(f"{self.path} cannot be used"):
                self._floor.refusal(self.path, 0)

    def refusal(self, kind: str) -> str | None:
        """Return why rows of this kind are dropped now. Return None if `shards_by_kind[kind]` takes them."""
        if self.path is None and self._claiming.is_over:
            self._claim()
        if self.path is None:
            return self._claiming.reason
        return self.shards_by_kind[kind].refusal

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Set the members of `_writer.json` that this class does not know."""
        self._manifest = manifest
        self._is_manifest_stale = True

    def mark_stale(self) -> None:
        """Make the next `flush_due` write the manifest again."""
        self._is_manifest_stale = True

    def flush_due(self) -> None:
        """Flush, sync, delete shards and write the manifest, each if it is due."""
        for shards in self.shards_by_kind.values():
            shards.flush_due()
        self._retire_outdated()
        self._look_at_io()
        self._look_at_cores()
        if self._is_manifest_stale and self.path is not None and self._describing.is_over:
            self._is_manifest_stale = False
            self._describe()

    def show(self, status: Mapping[str, Any], *, state: str = "recording") -> None:
        """Bring `_status.json` up to date. An error of the disk is ignored."""
        if self.path is None:
            return
        ledger = self._ledger.snapshot()
        own: dict[str, Any] = {
            "writer": self.path.name,
            "state": state,
            **ledger,
            "used_bytes": sum(map(self._quota.used_bytes, self.shards_by_kind)),
            "max_bytes": self._settings.max_bytes,
        }
        with contextlib.suppress(OSError):
            own["free_bytes"] = self._disk.free_bytes(self.path)
        self._status.write(self.path, {**status, **own}, written_bytes=self.written_bytes)

    def end_status(self) -> None:
        """Close `_status.json`. `show` does nothing after that."""
        self._status.close()

    def flush(self) -> bool:
        """Write all pending rows. Return True if no row was dropped."""
        flushed = [shards.flush() for shards in self.shards_by_kind.values()]
        self._retire_outdated()
        return all(flushed)

    def sync(self) -> bool:
        """Make all written rows durable. Return True if all of them are."""
        synced = [shards.sync() for shards in self.shards_by_kind.values()]
        return all(synced)

    def close(self, ledger: Mapping[str, object]) -> bool:
        """Seal the open shards and write the last manifest. Return True if all went well."""
        sealed = [shards.seal(ledger) for shards in self.shards_by_kind.values()]
        self._look_at_io()
        return self._describe(state="closed", closed_ns=time.time_ns()) and all(sealed)

    def restart(self, problem: str) -> None:
        """Begin again after the recorder's own error. Open shards stay readable; pending rows are dropped."""
        self._restarted = problem
        self._is_manifest_stale = True
        for shards in self.shards_by_kind.values():
            shards.restart()

    def abandon_open(self) -> None:
        """Close files that were left open, because the process may live on."""
        for shards in self.shards_by_kind.values():
            shards.abandon_open()
        self._status.close()

    def _claim(self) -> None:
        """Make a directory that only this writer uses, and open its shards."""
        target = self._target
        assert target is not None, "claim comes first"
        try:
            self._make_directories(target.run_dir)
            content = {**_FORMAT, **target.run_manifest}
            manifest = target.run_dir / RUN_MANIFEST
            if not create_manifest(self._disk, manifest, content, unsynced=self._say_unsynced):
                with contextlib.suppress(RunError):  # a manifest that cannot be read names no run
                    content = read_json(manifest)
            if (name := RunManifest.read(content).name) is not None:
                target.named(name)
            parent = target.run_dir / rank_dir(target.rank)
            self._make_directories(parent)
            directory = self._make_own_directory(parent, target.attempt)
            try:
                for made in (parent, target.run_dir, target.run_dir.parent):  # another rank may have made the directory
                    self._sync_directory(made)
                self.shards_by_kind = self._open_shards(directory, target)
            except OSError:
                with contextlib.suppress(OSError):  # the next attempt makes a new directory
                    self._disk.remove_directory(directory)
                raise
        except OSError as error:
            self._claiming.failed(drop_reason(error))
            problem = WriteError(
                f"{target.run_dir} cannot be written: {error}; training goes on and nothing is recorded"
            )
            self._notices.say("claim", str(problem), level=logging.ERROR)
            return
        self._claiming.succeeded()
        self._look_for_others(directory)
        self.path = directory
        self.flush_due()

    def _look_for_others(self, directory: Path) -> None:
        """Log if another process has recorded this rank in this attempt. Two jobs run, or one was launched twice."""
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
        while True:
            directory = parent / f"{attempt:06d}-{os.urandom(6).hex()}"
            try:
                self._disk.make_directory(directory)
            except FileExistsError:
                # NFS also raises FileExistsError if it repeats a request that succeeded. A new name costs nothing.
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
        """Make the names in a directory durable, or log that this failed. The files are usable in both cases."""
        try:
            self._disk.persist_directory(path)
        except OSError as error:
            self._say_unsynced(error)

    def _say_unsynced(self, error: OSError) -> None:
        assert self._target is not None, "claim comes first"
        self._notices.failed(
            f"{self._target.run_dir}: a manifest or a directory cannot be synced; recording goes on, and a loss of "
            f"power may remove the file",
            error,
            is_aside=True,
        )

    def _open_shards(self, directory: Path, target: RunTarget) -> dict[str, RotatingShards]:
        settings, quota, memory = self._settings, self._quota, PageMemory(_LIGHT_BYTES)
        encoder = self._encoder = Encoder(settings.codec, settings.codec_level, native.load(settings.native))

        def open_shards(kind: str, compression: str | None, *, has_index: bool) -> RotatingShards:
            max_batch_bytes = quota.max_shard_bytes(kind) // _BATCHES_PER_SHARD
            return RotatingShards(
                kind=kind,
                directory=directory,
                batch=RowBatch(
                    attempt=target.attempt,
                    rank=target.rank,
                    encoder=encoder,
                    batch_bytes=min(settings.batch_bytes, max_batch_bytes),
                    max_rows=min(MAX_ROWS, max(1, max_batch_bytes // _ROW_BYTES)),
                    # Arrow compresses only a payload inside the batch, and copies it.
                    is_payload_apart=compression is None,
                ),
                layout=IpcFormat(SCHEMA, compression),
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

        # Arrow does not compress tensors. Large payloads are encoded already, or do not get smaller.
        tensors = open_shards("tensors", None, has_index=True)
        opened = {kind: open_shards(kind, "zstd", has_index=False) for kind in ("stats", PROBE)}
        # This comes last: the shards are counted once, even if the disk refuses the first claims.
        with self._notices.on_error(f"what earlier processes left beside {directory} cannot be counted"):
            self._count_earlier(find_earlier(directory, target.attempt))
        return {"tensors": tensors, **opened}

    def _look_at_io(self) -> None:
        """Record in the manifest whether writes bypass the page cache, once the first writes have shown it."""
        seen = {shards.is_direct for shards in self.shards_by_kind.values()} - {None}
        if not seen:
            return
        if self._settings.direct_io == "off":
            io = "page cache (direct_io = off)"
        else:
            io = "page cache (no direct writes here)" if False in seen else "direct"
        if io != self._io:
            self._io, self._is_manifest_stale = io, True

    def _look_at_cores(self) -> None:
        """Store payloads unencoded while training uses every core, because encoding would slow training."""
        if self._encoder is None or self._settings.codec != "auto" or (now := self._clock()) < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        share = self._cores.look()
        if share is not None:
            self._encoder.is_hurried = share < (_FREE if self._encoder.is_hurried else _CROWDED)
        if self._encoder.has_rested and not self._has_said_rest:
            self._has_said_rest = self._is_manifest_stale = True
            # One log line for each run is enough, because the manifest of every rank has this fact.
            if self._target is not None and self._target.rank == 0:
                tell(logging.getLogger(__name__), lambda: [_RESTS], 0.0)

    def _describe(self, *, state: str = "recording", **more: object) -> bool:
        if self.path is None:
            return False
        own = {
            **_FORMAT,
            "writer": self.path.name,
            "state": state,
            "ledger": self._ledger.snapshot(),
            **({"retired_earlier": self._retired_earlier} if self._retired_earlier else {}),
            **({"io": self._io} if self._io else {}),
            **({"codec": _RESTS} if self._has_said_rest else {}),
            **({"restarted": self._restarted} if self._restarted else {}),
            **({"dumps": [dump.members() for dump in self.dumps]} if self.dumps else {}),
            **more,
        }
        try:
            path = self.path / WRITER_MANIFEST
            replace_manifest(self._disk, path, {**self._manifest, **own}, unsynced=self._say_unsynced)
        except OSError as error:
            self._notices.failed(f"{self.path / WRITER_MANIFEST} cannot be written", error, is_aside=True)
            self._is_manifest_stale = True
            self._describing.failed(drop_reason(error))
            return False
        self._describing.succeeded()
        return True

    def _count_earlier(self, shards: Sequence[EarlierShard]) -> None:
        """Count the shards of processes that have ended, because the quota covers all writers of the rank."""
        for shard in shards:
            is_kept = False
            if self._settings.keep_steps:
                content = shard.look(self._keep_steps)
                is_kept = content is None or content.is_kept
            self._quota.add(shard.kind, shard.num_bytes)
            stored = StoredShard(shard.directory / shard.name, 0, shard.num_bytes)
            self._quota.keep(shard.kind, HeldShard(stored, 0, is_kept, shard))

    def _retire_outdated(self) -> None:
        """Delete the shards without any of the newest steps, once the manifest on the disk counts them as retired."""
        if not self._describing.is_over:
            return
        for kind in self.shards_by_kind:
            if outdated := self._quota.outdated(kind):
                self._retire(kind, outdated, is_urgent=False)

    def _retire_for_room(self, kind: str, held: HeldShard) -> None:
        """Delete a shard to make room. An earlier writer's shard is deleted only if the manifest can record it."""
        if held.earlier is None:
            self._retire(kind, [held], is_urgent=True)
        elif self._note_earlier(held.earlier):
            self._delete(kind, held, held.earlier.paths)
        else:
            self._quota.keep_for_good(kind, held)

    def _retire(self, kind: str, shards: Sequence[HeldShard], *, is_urgent: bool) -> None:
        """Delete shards of this writer, once the manifest on the disk counts them as retired.

        If the disk refuses the manifest, shards that are merely outdated are kept. Urgent deletions still happen,
        because the disk may be full; the counts of rows in the next batch include them.
        """
        num_rows = sum(held.shard.num_rows for held in shards)
        num_bytes = sum(held.shard.num_bytes for held in shards)
        self._ledger.add_retired(num_rows, num_bytes)
        if not self._describe() and not is_urgent:
            self._ledger.add_retired(-num_rows, -num_bytes)
            return
        for held in shards:
            # A shard has both names if the directory could not be synced when the shard was published.
            path = held.shard.path
            names = (open_name(path.name), path.name, index_name(path.name))
            self._delete(kind, held, [path.with_name(name) for name in names])

    def _note_earlier(self, shard: EarlierShard) -> bool:
        """Record the deletion of an earlier writer's shard in the manifest. Return True if the manifest was written."""
        content = shard.look(self._keep_steps)
        if content is None:
            return False
        noted = self._retired_earlier.setdefault(shard.directory.name, {"rows": 0, "bytes": 0, "shards": {}})
        if shard.name not in noted["shards"]:
            noted["shards"][shard.name] = {"rows": content.num_rows, "bytes": shard.num_bytes}
            noted["rows"] += content.num_rows
            noted["bytes"] += shard.num_bytes
            if content.ledger.get("observed", -1) > noted.get("ledger", {}).get("observed", -1):
                noted["ledger"] = content.ledger  # the newest ledger of a killed writer may be in this shard alone
        return self._describe()

    def _delete(self, kind: str, held: HeldShard, paths: Sequence[Path]) -> None:
        self._quota.remove(kind, held)
        for path in paths:
            with (
                self._notices.on_error(f"{path} cannot be deleted", is_aside=True),
                contextlib.suppress(FileNotFoundError),
            ):
                self._disk.unlink(path)
