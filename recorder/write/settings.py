"""Owns the settings of the writer, as plain values; where they come from is not its business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How and how much to write. The owner has validated the values."""

    flush_interval_s: float = 1.0
    """Rows reach the kernel at most this long after they were taken; lower it to watch a run live."""
    sync_interval_s: float = 1.0
    """What the kernel has is on the medium at most this long after; raise it where syncs are slow."""
    shard_bytes: int = 256 << 20
    """A shard ends at this size; lower it for finer retention."""
    shard_rows: int = 65536
    """A shard ends at this many rows."""
    batch_bytes: int = 8 << 20
    """A batch that copies is written once its payload has this size; one that borrows a segment, once that is full."""
    codec: str = "auto"
    """``auto``, ``none`` or ``zstd``; see `format.codec`."""
    codec_level: int = 1
    """zstd's level."""
    max_bytes: int = 16 << 30
    """What the rank may take of the disk, earlier writers included; a quarter of it is for statistics."""
    keep_newest: int = 0
    """Shards whose steps all lie before the newest so many are deleted; 0 for none."""
    keep_steps: str = ""
    """A schedule of steps that retention never deletes; empty for none."""
    permissions: str = "owner"
    """Who else may read: ``owner`` nobody, ``group``, ``all``."""
    min_free_bytes: int = 2 << 30
    """What it leaves free on the file system, for others."""
    on_quota: str = "retire"
    """``retire`` deletes the oldest shards but the first, ``stop`` drops new rows."""
    native: bool = True
    """Whether to use the compiled loops, where they were built; turn it off to find out whether they are at fault."""
    direct_io: str = "auto"
    """``auto`` writes past the page cache where the file system can, ``off`` never does."""
    close_deadline_s: float = 5.0
    """How long the end of training may be held up by the last flush."""
