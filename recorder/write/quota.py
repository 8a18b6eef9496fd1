"""Counts the bytes that a rank takes on the disk, and chooses the shards to delete, but deletes no shard itself.

The shards that earlier processes of the same rank have left are counted, too. A shard of a process that may still be
alive is neither counted nor touched. One kind of shard is for the probe: one number of each value at every step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ..errors import RunError
from ..format import rundir
from ..format.integrity import BatchHeader, check_batch
from ..format.manifest import Lifetime
from ..rules import Schedule
from ..sites import PROBE
from .file import Disk
from .ledger import DISK_FLOOR, Notices
from .shard import StoredShard

_SHARDS_PER_QUOTA, _PROBE_SHARDS_PER_QUOTA = 8, 32
"""The fewest shards in the quota of a kind, so that some can be deleted. The probe has more, because it is thinned."""
_PROBE_SHARE, _TOKENS_SHARE = 72, 32
"""The probe gets 1/72 of a rank's bytes, so that 8 ranks of 16 GiB keep less than 2 GB. With tokens: 1/32."""
_SHARDS_PER_WINDOW = 8
"""The fewest shards for the `keep_newest` newest steps. With more shards, fewer older steps stay along with them."""


def probe_bytes(max_bytes: int, *, keeps_tokens: bool) -> int:
    """Return how many bytes of a rank's `max_bytes` are for the probe."""
    return max_bytes // (_TOKENS_SHARE if keeps_tokens else _PROBE_SHARE)


class HeldShard(NamedTuple):
    """A shard that counts in the quota and is no longer written."""

    shard: StoredShard
    last_step: int
    """The largest step of the shard's rows; 0 for a shard of an earlier process, whose rows were not read."""
    is_kept: bool
    earlier: EarlierShard | None = None
    """The shard of an earlier process; None for a shard of this writer."""


class Quota:
    """The bytes of one rank, divided among the kinds of shards, so that no kind can crowd another one out.

    Statistics have a quarter of the bytes, and the probe has a part of this quarter. Half of the probe's shards have
    the newest steps. The other half are spread evenly over all steps before.
    """

    def __init__(self, max_bytes: int, keep_newest: int = 0, *, keeps_tokens: bool = False) -> None:
        of_stats, of_probe = max_bytes // 4, probe_bytes(max_bytes, keeps_tokens=keeps_tokens)
        self._limits = {"tensors": max_bytes - of_stats, "stats": of_stats - of_probe, PROBE: of_probe}
        self._used = dict.fromkeys(rundir.SHARD_KINDS, 0)
        self._held: dict[str, list[HeldShard]] = {kind: [] for kind in rundir.SHARD_KINDS}
        self._keep_newest = keep_newest
        self._newest_step = 0

    def max_shard_bytes(self, kind: str) -> int:
        """Return the size in bytes at which a shard of this kind should end."""
        return self._limits[kind] // (_PROBE_SHARDS_PER_QUOTA if kind == PROBE else _SHARDS_PER_QUOTA)

    @property
    def max_shard_steps(self) -> int | None:
        """Return the most steps that a shard should span. Return None for any number."""
        return max(1, self._keep_newest // _SHARDS_PER_WINDOW) if self._keep_newest else None

    def used_bytes(self, kind: str) -> int:
        return self._used[kind]

    def fits(self, kind: str, num_bytes: int) -> bool:
        return self._used[kind] + num_bytes <= self._limits[kind]

    def could_fit(self, kind: str, num_bytes: int) -> bool:
        """Return True if `num_bytes` fit after the deletion of every shard that may be deleted."""
        removable = sum(held.shard.num_bytes for held in self._removable(kind))
        return self._used[kind] - removable + num_bytes <= self._limits[kind]

    def add(self, kind: str, num_bytes: int) -> None:
        """Count bytes that were written to shards of a kind."""
        self._used[kind] += num_bytes

    def keep(self, kind: str, held: HeldShard) -> None:
        """Register a shard that is no longer written. `add` has counted its bytes already."""
        self._held[kind].append(held)

    def saw(self, step: int) -> None:
        """Record the step that training has reached."""
        self._newest_step = step

    def most_dispensable(self, kind: str) -> HeldShard | None:
        """Return the shard to delete first. Return None if no shard may be deleted."""
        removable = self._removable(kind)
        if kind != PROBE or self._keep_newest or not removable or removable[0].earlier is not None:
            return next(iter(removable), None)
        held = self._held[kind]
        num_older = max(1, len(removable) // 2)

        def gap(shard: HeldShard) -> int:
            at = held.index(shard)
            return held[at + 1].last_step - held[at - 1].last_step if 0 < at < len(held) - 1 else 0

        return min(removable[:num_older], key=gap)

    def outdated(self, kind: str) -> list[HeldShard]:
        """Return this writer's shards without any of the `keep_newest` newest steps, except the newest shard."""
        first_step = self._newest_step - self._keep_newest + 1
        if not self._keep_newest or first_step <= 0:
            return []
        own = [held for held in self._held[kind] if held.earlier is None]
        return [held for held in own[:-1] if held.last_step < first_step and not held.is_kept]

    def remove(self, kind: str, held: HeldShard) -> None:
        """Stop counting a shard that is about to be deleted."""
        self._held[kind].remove(held)
        self._used[kind] -= held.shard.num_bytes

    def keep_for_good(self, kind: str, held: HeldShard) -> None:
        """Keep a shard that could not be deleted, and never return it for deletion again."""
        held_of_kind = self._held[kind]
        held_of_kind[held_of_kind.index(held)] = held._replace(is_kept=True)

    def _removable(self, kind: str) -> list[HeldShard]:
        """Return the deletable shards: not this writer's newest, and the oldest only if `keep_newest` is set."""
        held = self._held[kind]
        num_own = sum(shard.earlier is None for shard in held)
        stop = len(held) - 1 if num_own else len(held)
        return [shard for shard in held[0 if self._keep_newest else 1 : stop] if not shard.is_kept]


class DiskFloor:
    """Refuses writes that would leave too few free bytes on a file system for other users."""

    def __init__(self, min_free_bytes: int, disk: Disk, notices: Notices) -> None:
        self._min_free_bytes = min_free_bytes
        self._disk = disk
        self._notices = notices

    def refusal(self, directory: Path, num_bytes: int) -> str | None:
        """Return why `num_bytes` must not be written to a directory. Return None if they may be written.

        Raises:
            OSError: the free bytes of the file system cannot be read.
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


_MAGIC_BYTES = 8
_BROKEN = (pa.ArrowException, OSError, ValueError, RunError, MemoryError)


class EarlierShard(NamedTuple):
    """A shard of a process that has ended. It may have its final name, its open name, or both."""

    directory: Path
    kind: str
    number: int
    num_bytes: int
    """The size in bytes of the shard and its index together."""

    @property
    def name(self) -> str:
        return rundir.shard_name(self.kind, self.number)

    @property
    def paths(self) -> list[Path]:
        """The paths of all files that are deleted with the shard; some may not exist."""
        name = self.name
        return [self.directory / each for each in (rundir.open_name(name), name, rundir.index_name(name))]

    def look(self, keep_steps: Schedule) -> Content | None:
        """Read the shard's steps and counts of rows. Return None for a damaged shard, which is better left alone."""
        num_rows, is_kept, ledger = 0, False, {}
        try:
            for batch, header in _batches(self.directory / self.name, self.directory / rundir.open_name(self.name)):
                num_rows += batch.num_rows
                is_kept = is_kept or any(step in keep_steps for step in batch.column("step").unique().to_pylist())
                ledger = dict(header.ledger)
        except _BROKEN:
            return None
        return Content(num_rows, is_kept, ledger)


class Content(NamedTuple):
    """Facts about an earlier process's shard, read from its batches."""

    num_rows: int
    is_kept: bool
    """True if the shard has a step that is kept for good. Such a shard is not deleted to make room."""
    ledger: Mapping[str, Any]
    """The counts of rows of the shard's writer, as of the shard's last batch."""


def find_earlier(directory: Path, attempt: int) -> list[EarlierShard]:
    """Return the shards that processes of this rank left before they ended, oldest first.

    `directory` is the calling writer's directory; the directories of other writers lie next to it. Raises OSError if a
    directory cannot be listed.
    """
    writers = []
    for path in _listed(directory.parent, directories=True):
        shards = _shards(path) if path.name != directory.name else []
        if shards:  # manifests may be large, and after many restarts most directories have no shards
            with contextlib.suppress(RunError):
                raw = rundir.read_json(path / rundir.WRITER_MANIFEST)
                rundir.check_version(raw, str(path))
                lifetime = Lifetime.read(raw)
                if _is_over(lifetime, attempt):
                    writers.append(((lifetime.attempt, lifetime.started_ns), path.name, shards))
    return [shard for _, _, shards in sorted(writers) for shard in shards]


def _shards(directory: Path) -> list[EarlierShard]:
    sizes = {path.name: path.stat(follow_symlinks=False).st_size for path in _listed(directory, directories=False)}
    names = {(name.number, name.kind) for each in sizes if (name := rundir.parse_shard_name(each))}
    shards = []
    for number, kind in sorted(names):
        sealed = rundir.shard_name(kind, number)
        num_bytes = sizes.get(sealed) or sizes.get(rundir.open_name(sealed), 0)
        shards.append(EarlierShard(directory, kind, number, num_bytes + sizes.get(rundir.index_name(sealed), 0)))
    return shards


def _is_over(lifetime: Lifetime, attempt: int) -> bool:
    """Return True if a process has ended. On another host only a process of an older attempt counts as ended."""
    if lifetime.state == "closed":
        return True
    is_running = lifetime.is_running
    return lifetime.attempt < attempt if is_running is None else not is_running


def _batches(sealed: Path, unsealed: Path) -> Iterator[tuple[Any, BatchHeader]]:
    """Yield each checked batch with its column `step` alone. An open shard ends at its last complete batch."""
    try:
        source = pa.OSFile(str(sealed))
    except FileNotFoundError:
        with pa.OSFile(str(unsealed)) as source:
            yield from _open_batches(source)
        return
    with source:
        only_steps = pa.ipc.IpcReadOptions(
            included_fields=[pa.ipc.open_file(source).schema.get_field_index("step")], use_threads=False
        )
        file = pa.ipc.open_file(source, options=only_steps)
        for number in range(file.num_record_batches):
            batch, metadata = file.get_batch_with_custom_metadata(number)
            yield _checked(batch, metadata, sealed)


def _open_batches(source: Any) -> Iterator[tuple[Any, BatchHeader]]:
    with contextlib.suppress(*_BROKEN, StopIteration):
        source.seek(_MAGIC_BYTES)
        step_field = pa.ipc.open_stream(source).schema.get_field_index("step")
        source.seek(_MAGIC_BYTES)
        stream = pa.ipc.open_stream(
            source, options=pa.ipc.IpcReadOptions(included_fields=[step_field], use_threads=False)
        )
        while True:
            batch, metadata = stream.read_next_batch_with_custom_metadata()
            yield _checked(batch, metadata, Path("open shard"))


def _checked(batch: Any, metadata: Any, where: Path) -> tuple[Any, BatchHeader]:
    batch.validate()
    return batch, check_batch(batch, metadata, columns=["step"], where=str(where))


def _listed(path: Path, *, directories: bool) -> list[Path]:
    """Return the subdirectories, or the regular files, of a directory. Symbolic links are left out."""
    with os.scandir(path) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if (entry.is_dir(follow_symlinks=False) if directories else entry.is_file(follow_symlinks=False))
        ]
