"""Counts the bytes that a rank takes of the disk, and chooses the shards to delete. Deletes none itself."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..format.rundir import SHARD_KINDS
from .earlier import EarlierShard
from .files.file import Disk
from .files.shard import StoredShard
from .ledger import DISK_FLOOR
from .notices import Notices

_SHARDS_PER_QUOTA = 8
"""The least number of shards of a kind within its quota, so that there is something to retire."""
_SHARDS_PER_WINDOW = 8
"""The least number of shards that the steps of `keep_newest` span, so that few old steps stay with newer ones."""


class HeldShard(NamedTuple):
    """A shard that counts in the quota, and is not written any more."""

    shard: StoredShard
    last_step: int
    """The largest step of its rows; 0 for an earlier writer's shard, whose rows were not read."""
    is_kept: bool
    """True where retention must never delete the shard."""
    earlier: EarlierShard | None = None
    """Set where an earlier process has written the shard."""


class Quota:
    """The bytes of one rank. A quarter is for statistics, so that tensors cannot crowd them out."""

    def __init__(self, max_bytes: int, keep_newest: int = 0) -> None:
        stats_bytes = max_bytes // 4
        self._limits = {"tensors": max_bytes - stats_bytes, "stats": stats_bytes}
        self._used = dict.fromkeys(SHARD_KINDS, 0)
        self._held: dict[str, list[HeldShard]] = {kind: [] for kind in SHARD_KINDS}
        self._keep_newest = keep_newest
        self._newest_step = 0

    def max_shard_bytes(self, kind: str) -> int:
        """Return the size at which a shard of this kind should end."""
        return self._limits[kind] // _SHARDS_PER_QUOTA

    @property
    def max_shard_steps(self) -> int | None:
        """Return the most steps that a shard should span; None for any number."""
        return max(1, self._keep_newest // _SHARDS_PER_WINDOW) if self._keep_newest else None

    def used_bytes(self, kind: str) -> int:
        return self._used[kind]

    def fits(self, kind: str, num_bytes: int) -> bool:
        return self._used[kind] + num_bytes <= self._limits[kind]

    def could_fit(self, kind: str, num_bytes: int) -> bool:
        """Whether `num_bytes` fit once all that may go has gone."""
        removable = sum(held.shard.num_bytes for held in self._removable(kind))
        return self._used[kind] - removable + num_bytes <= self._limits[kind]

    def add(self, kind: str, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._used[kind] += num_bytes

    def keep(self, kind: str, held: HeldShard) -> None:
        """Register a shard that is not written any more; its bytes were counted by `add` already."""
        self._held[kind].append(held)

    def saw(self, step: int) -> None:
        """Note the step that training has reached."""
        self._newest_step = step

    def oldest(self, kind: str) -> HeldShard | None:
        """Return the shard to delete first; None where none may be deleted."""
        return next(iter(self._removable(kind)), None)

    def outdated(self, kind: str) -> list[HeldShard]:
        """Return this writer's shards whose steps all lie before the newest, but never its newest shard."""
        first_step = self._newest_step - self._keep_newest + 1
        if not self._keep_newest or first_step <= 0:
            return []
        own = [held for held in self._held[kind] if held.earlier is None]
        return [held for held in own[:-1] if held.last_step < first_step and not held.is_kept]

    def remove(self, kind: str, held: HeldShard) -> None:
        """Take a shard that is about to be deleted out of the accounts."""
        self._held[kind].remove(held)
        self._used[kind] -= held.shard.num_bytes

    def keep_for_good(self, kind: str, held: HeldShard) -> None:
        """Keep a shard that could not be deleted, and never offer it for deletion again."""
        held_of_kind = self._held[kind]
        held_of_kind[held_of_kind.index(held)] = held._replace(is_kept=True)

    def _removable(self, kind: str) -> list[HeldShard]:
        """Return shards that may be deleted: not the first (unless `keep_newest` is set) nor this writer's newest."""
        held = self._held[kind]
        num_own = sum(shard.earlier is None for shard in held)
        stop = len(held) - 1 if num_own else len(held)
        return [shard for shard in held[0 if self._keep_newest else 1 : stop] if not shard.is_kept]


class DiskFloor:
    """The free bytes of a file system that are left for others."""

    def __init__(self, min_free_bytes: int, disk: Disk, notices: Notices) -> None:
        self._min_free_bytes = min_free_bytes
        self._disk = disk
        self._notices = notices

    def refusal(self, directory: Path, num_bytes: int) -> str | None:
        """Return why `num_bytes` must not be written there; None where they may.

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
