"""Owns how many bytes may be taken of the disk, and which shard goes when they are used up; deletes nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..format.rundir import SHARD_KINDS
from .earlier import EarlierShard
from .file import Disk
from .ledger import DISK_FLOOR
from .notices import Notices
from .shard import StoredShard

_SHARDS_PER_QUOTA = 8
"""A kind is cut into at least this many shards, so that there is something to retire."""
_SHARDS_PER_WINDOW = 8
"""The same for the steps of `keep_newest`."""


class Held(NamedTuple):
    """A shard on the books, which is not written any more."""

    shard: StoredShard
    last_step: int
    """The largest step of its rows; of an earlier writer's shard nobody has looked, and it is 0."""
    is_kept: bool
    """Whether its steps are among those that retention never deletes."""
    earlier: EarlierShard | None = None
    """Where another process has written it, before."""


class Quota:
    """The bytes of one rank. A quarter is for statistics, so that tensors cannot crowd them out."""

    def __init__(self, max_bytes: int, keep_newest: int = 0) -> None:
        stats_bytes = max_bytes // 4
        self._limits = {"tensors": max_bytes - stats_bytes, "stats": stats_bytes}
        self._used = dict.fromkeys(SHARD_KINDS, 0)
        self._held: dict[str, list[Held]] = {kind: [] for kind in SHARD_KINDS}
        self._keep_newest = keep_newest
        self._newest_step = 0

    def max_shard_bytes(self, kind: str) -> int:
        """The size at which a shard of this kind should end."""
        return self._limits[kind] // _SHARDS_PER_QUOTA

    @property
    def max_shard_steps(self) -> int | None:
        """How many steps a shard should span at most; None for any number."""
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
        """Bytes were written."""
        self._used[kind] += num_bytes

    def keep(self, kind: str, held: Held) -> None:
        """A shard is not written any more. Its bytes were added already."""
        self._held[kind].append(held)

    def saw(self, step: int) -> None:
        """Training is at this step."""
        self._newest_step = step

    def oldest(self, kind: str) -> Held | None:
        """The shard that should go first; None where none may."""
        return next(iter(self._removable(kind)), None)

    def outdated(self, kind: str) -> list[Held]:
        """The shards of this writer whose steps all lie before the newest, but never its newest shard."""
        first_step = self._newest_step - self._keep_newest + 1
        if not self._keep_newest or first_step <= 0:
            return []
        own = [held for held in self._held[kind] if held.earlier is None]
        return [held for held in own[:-1] if held.last_step < first_step and not held.is_kept]

    def take_off(self, kind: str, held: Held) -> None:
        """A shard is about to be deleted."""
        self._held[kind].remove(held)
        self._used[kind] -= held.shard.num_bytes

    def hold_on(self, kind: str, held: Held) -> None:
        """A shard that should have gone cannot: it is not asked for again."""
        held_of_kind = self._held[kind]
        held_of_kind[held_of_kind.index(held)] = held._replace(is_kept=True)

    def _removable(self, kind: str) -> list[Held]:
        """The shards that may go: not the first (a window of steps has none), and never this writer's newest."""
        held = self._held[kind]
        num_own = sum(one.earlier is None for one in held)
        stop = len(held) - 1 if num_own else len(held)
        return [one for one in held[0 if self._keep_newest else 1 : stop] if not one.is_kept]


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
