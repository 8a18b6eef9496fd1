"""The open shards of one writer as the destination has them: complete batches, replaced by more of them.

What was put once is a prefix of what is put next, and nothing is put in place of anything that is no such prefix.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

from crc32c import crc32c

from ...errors import CorruptError
from ...read.messages import FIRST_MESSAGE, block_at
from ..destination import TakenError
from ..watching import Folder, LocalFile, Stamp, sealed_name
from .shipped import ShippedRun

_MAX_AT_ONCE_BYTES = 32 << 20
"""The largest snapshot of an open shard that is replaced in one request."""
_MAX_BESIDE_BYTES = 2 << 20
"""The largest snapshot that is in memory beside others."""


@dataclass(slots=True)
class _Snapshot:
    """An open shard in the state that was put."""

    num_bytes: int
    crc: int
    e_tag: str
    stamp: Stamp
    put_s: float = field(default_factory=time.monotonic)


class OpenShards:
    """The open shards of one writer. One thread at a time for each of them."""

    def __init__(self, there: ShippedRun, below: str) -> None:
        self._run = there
        self._below = below
        self._snapshots: dict[str, _Snapshot] = {}
        self._there: set[str] = set()
        """The open shards that the destination has."""

    def reconciled(self) -> None:
        """Take over what the destination's listing has shown, and keep what was put since it began."""
        opened = {name for name in self._run.held if name.startswith(self._below) and name.endswith(".open")}
        newer = {name for name, one in self._snapshots.items() if one.put_s >= self._run.listed_s}
        self._there = {name.removeprefix(self._below) for name in opened} | (self._there & newer)
        for name in self._snapshots.keys() - self._there:
            del self._snapshots[name]

    def __contains__(self, name: str) -> bool:
        return name in self._snapshots

    def is_put(self, name: str, stamp: Stamp) -> bool:
        """Whether an open shard was put as it is here."""
        snapshot = self._snapshots.get(name)
        return snapshot is not None and snapshot.stamp == stamp

    def put(self, folder: Folder, name: str, stamp: Stamp, *, is_growing: bool) -> None:
        """Put the complete batches of an open shard, in place of fewer of them.

        `stamp` is what the shard was when the directory was listed. Where the shard `is_growing`, its writer will seal
        it, and a shard that is too large for one request waits for that.
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

    def _put_prefix(self, name: str, content: bytes, before: _Snapshot | None, stamp: Stamp) -> None:
        shared = self._run.shared
        if before is not None and crc32c(memoryview(content)[: before.num_bytes]) != before.crc:
            shared.counters.add("conflicts", "open")  # a failed write was cut back: the sealed shard will tell
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

    def _put_large_prefix(self, name: str, file: LocalFile, end: int, stamp: Stamp) -> None:
        """Put what is too large for one request: of a writer that is gone or quiet, so that it happens about once."""
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
        """Remove open shards there whose sealed shards are there."""
        stale = [name for name in self._there if self._run.ledger.get(self._below + sealed_name(name)) is not None]
        if stale:
            self._run.shared.destination.delete([f"{self._run.key}/{self._below}{name}" for name in stale])
            self._there -= set(stale)
            for name in stale:
                self._snapshots.pop(name, None)


def end_of_batches(file: LocalFile, start: int = 0) -> int:
    """Return where the last complete batch of an open shard ends; 0 without any. `start` is an end found earlier."""
    offset, end = start or FIRST_MESSAGE, start
    with contextlib.suppress(CorruptError):
        while (message := block_at(file, offset)) is not None:
            is_schema = offset == FIRST_MESSAGE
            offset = message[0].end
            end = end if is_schema else offset
    return end
