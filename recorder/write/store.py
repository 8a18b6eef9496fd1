"""Owns one writer directory: its claim, its manifest, its two lanes and the deletion of old shards. Writer thread only.

Errors of the disk never leave it: they end in the ledger and the log. What it raises is a bug of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WriteError
from ..format.codec import Encoder
from ..format.rundir import (
    RUN_MANIFEST,
    WRITER_MANIFEST,
    create_json,
    index_name,
    rank_dir,
    write_json_atomically,
)
from ..format.schema import FORMAT_NAME, FORMAT_VERSION, SCHEMA
from .backoff import Backoff, drop_reason
from .file import Disk, PageMemory
from .ipc import Layout
from .lane import Lane
from .ledger import Ledger
from .notices import Notices
from .quota import Floor, Quota
from .rows import RowBatch, max_payload_bytes
from .settings import WriteSettings
from .shard import StoredShard

_LIGHT_BYTES = 4 << 20
"""Room for what a batch holds beside its payload; more is found where it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a writer belongs; made by `resolve_dir` once the ranks have agreed on the run."""

    run_dir: Path
    run_manifest: dict[str, Any]
    """The content of `_run.json`, for the first writer to come."""
    rank: int
    attempt: int


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

    @property
    def written_bytes(self) -> int:
        return sum(lane.written_bytes for lane in self.lanes.values())

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
        if self._is_manifest_stale and self.directory is not None and self._describing.is_over:
            self._is_manifest_stale = False
            self._describe()

    def flush(self) -> bool:
        """Write all pending rows. True where none was dropped."""
        flushed = [lane.flush() for lane in self.lanes.values()]
        return all(flushed)

    def sync(self) -> bool:
        """Make all that was written durable. True where it is."""
        synced = [lane.sync() for lane in self.lanes.values()]
        return all(synced)

    def close(self, ledger: Mapping[str, object]) -> bool:
        """Seal what is open and say so in the manifest. True where all went well."""
        sealed = [lane.seal(ledger) for lane in self.lanes.values()]
        return self._describe(state="closed", closed_ns=time.time_ns()) and all(sealed)

    def _claim(self) -> None:
        """Make a directory that no other process can have."""
        place = self._place
        assert place is not None, "settle comes first"
        try:
            self._make_directories(place.run_dir)
            create_json(place.run_dir / RUN_MANIFEST, place.run_manifest)
            parent = place.run_dir / rank_dir(place.rank)
            self._make_directories(parent)
            directory = parent / f"{place.attempt:06d}-{os.urandom(6).hex()}"
            self._disk.make_directory(directory)
            self._disk.sync_directory(parent)
            self._disk.sync_directory(place.run_dir)
        except OSError as error:
            self._claiming.failed(drop_reason(error))
            problem = WriteError(
                f"{place.run_dir} cannot be written: {error}; training goes on and nothing is recorded"
            )
            self._notices.say("claim", str(problem), level=logging.ERROR)
            return
        self._claiming.succeeded()
        self.lanes = self._open_lanes(directory, place)
        self.directory = directory
        self.keep_up()

    def _make_directories(self, path: Path) -> None:
        if not path.is_dir():
            self._make_directories(path.parent)
            with contextlib.suppress(FileExistsError):
                self._disk.make_directory(path)

    def _open_lanes(self, directory: Path, place: RunPlace) -> dict[str, Lane]:
        settings = self._settings
        quota = Quota(settings.max_bytes)
        memory = PageMemory(max_payload_bytes(settings.batch_bytes) + _LIGHT_BYTES)

        encoder = Encoder(settings.codec, settings.codec_level)

        def lane(kind: str, compression: str | None, *, has_index: bool) -> Lane:
            return Lane(
                kind,
                directory=directory,
                batch=RowBatch(
                    attempt=place.attempt, rank=place.rank, encoder=encoder, batch_bytes=settings.batch_bytes
                ),
                layout=Layout(SCHEMA, compression),
                has_index=has_index,
                settings=settings,
                disk=self._disk,
                memory=memory,
                ledger=self._ledger,
                quota=quota,
                floor=self._floor,
                retire=self._retire,
                notices=self._notices,
                clock=self._clock,
            )

        # Large payloads are compressed before, or not worth it.
        tensors = lane("tensors", None, has_index=True)
        return {"tensors": tensors, "stats": lane("stats", "zstd", has_index=False)}

    def _describe(self, *, state: str = "recording", **more: object) -> bool:
        """Write the manifest. True where it is on the disk."""
        if self.directory is None:
            return False
        own = {
            "format": FORMAT_NAME,
            "version": list(FORMAT_VERSION),
            "writer": self.directory.name,
            "state": state,
            "ledger": self._ledger.snapshot(),
            **more,
        }
        try:
            write_json_atomically(self.directory / WRITER_MANIFEST, {**self._manifest, **own})
        except OSError as error:
            self._notices.failed(f"{self.directory / WRITER_MANIFEST} cannot be written", error)
            self._is_manifest_stale = True
            self._describing.failed(drop_reason(error))
            return False
        self._describing.succeeded()
        return True

    def _retire(self, shard: StoredShard) -> None:
        """Delete a shard, after its loss is on the disk."""
        self._ledger.add_retired(shard.num_rows, shard.num_bytes)
        self._describe()
        for path in (shard.path, shard.path.with_name(index_name(shard.path.name))):
            with self._notices.on_error(f"{path} cannot be deleted"), contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)
