"""Owns how many bytes may be taken of the disk, and which shard goes when they are used up; deletes nothing itself."""

from __future__ import annotations

from pathlib import Path

from ..format.rundir import SHARD_KINDS
from .file import Disk
from .ledger import DISK_FLOOR
from .notices import Notices
from .shard import StoredShard

_SHARDS_PER_QUOTA = 8
"""A kind is cut into at least this many shards, so that there is something to retire."""


class Quota:
    """The bytes of one writer directory. A quarter is for statistics, so that tensors cannot crowd them out."""

    def __init__(self, max_bytes: int) -> None:
        stats_bytes = max_bytes // 4
        self._limits = {"tensors": max_bytes - stats_bytes, "stats": stats_bytes}
        self._used = dict.fromkeys(SHARD_KINDS, 0)
        self._stored: dict[str, list[StoredShard]] = {kind: [] for kind in SHARD_KINDS}

    def max_shard_bytes(self, kind: str) -> int:
        """The size at which a shard of this kind should end."""
        return self._limits[kind] // _SHARDS_PER_QUOTA

    def used_bytes(self, kind: str) -> int:
        return self._used[kind]

    def fits(self, kind: str, num_bytes: int) -> bool:
        return self._used[kind] + num_bytes <= self._limits[kind]

    def could_fit(self, kind: str, num_bytes: int) -> bool:
        """Whether `num_bytes` fit once all that may go has gone."""
        removable = sum(shard.num_bytes for shard in self._stored[kind][1:-1])
        return self._used[kind] - removable + num_bytes <= self._limits[kind]

    def add(self, kind: str, num_bytes: int) -> None:
        """Bytes were written."""
        self._used[kind] += num_bytes

    def keep(self, kind: str, shard: StoredShard) -> None:
        """A shard is not written any more. Its bytes were added already."""
        self._stored[kind].append(shard)

    def retire(self, kind: str) -> StoredShard | None:
        """Take the oldest shard but the first off the books, never the newest; the caller deletes it."""
        if len(self._stored[kind]) < 3:
            return None
        shard = self._stored[kind].pop(1)
        self._used[kind] -= shard.num_bytes
        return shard


class Floor:
    """The bytes of a file system that are left free, for others."""

    def __init__(self, min_free_bytes: int, disk: Disk, notices: Notices) -> None:
        self._min_free_bytes = min_free_bytes
        self._disk = disk
        self._notices = notices

    def refusal(self, directory: Path, num_bytes: int) -> str | None:
        """Why `num_bytes` must not be written there; None where they may.

        Raises:
            OSError: the file system cannot be asked.
        """
        if self._min_free_bytes == 0:
            return None  # no floor was asked for, and some file systems do not know how much is free
        free_bytes = self._disk.free_bytes(directory)
        if free_bytes >= self._min_free_bytes + num_bytes:
            return None
        self._notices.say(
            DISK_FLOOR,
            f"{directory}: {free_bytes >> 20} MiB are free and min_free_bytes keeps {self._min_free_bytes >> 20} MiB; "
            "nothing is recorded until there is more",
        )
        return DISK_FLOOR
