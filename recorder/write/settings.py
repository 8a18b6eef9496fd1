"""The settings of the writer as plain values, which `recorder.config` reads from their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How and how much to write. The caller has validated the values."""

    flush_interval_s: float = 1.0
    """The most seconds until a row reaches the kernel; lower it to watch a run live."""
    sync_interval_s: float = 1.0
    """The most seconds until a row in the kernel reaches the medium; raise it if syncs are slow."""
    shard_bytes: int = 256 << 20
    """The size at which a shard ends; lower it for finer retention."""
    shard_rows: int = 65536
    """The number of rows at which a shard ends."""
    seal_stats_s: float = 0.0
    """The seconds after which a shard of statistics ends; 0: when it is full. Set it if open shards are uploaded."""
    batch_bytes: int = 8 << 20
    """The payload bytes at which a batch is written."""
    codec: str = "auto"
    """``auto``, ``none`` or ``zstd``; see `format.codec`."""
    codec_level: int = 1
    max_bytes: int = 16 << 30
    """The bytes of disk that the rank may use, including earlier writers; a quarter of them is for statistics."""
    keep_newest: int = 0
    """The number of newest steps whose shards are kept while older shards are deleted; 0 to keep all steps."""
    keep_steps: str = ""
    """A schedule of steps that retention never deletes; empty for none."""
    permissions: str = "owner"
    """Who else may read the files: ``owner`` (nobody else), ``group`` or ``all``."""
    min_free_bytes: int = 2 << 30
    """The bytes of the file system that are left free for other users."""
    on_quota: str = "retire"
    """``retire`` deletes the oldest shards except the first, ``stop`` drops new rows."""
    native: bool = True
    """True to use the compiled loops, if they were built; False to find out whether the loops cause a fault."""
    direct_io: str = "auto"
    """``auto`` writes past the page cache where the file system can, ``off`` never does."""
    ring_hold_s: float = 2.0
    """The seconds that steps stay in the ring if it has room, so that a trigger of another rank finds them."""
    dump_max_bytes: int = 4 << 30
    """The most payload bytes that triggers cause to be written; further payloads are dropped to save the disk."""
    close_deadline_s: float = 5.0
    """The most seconds by which the last flush may delay the end of training."""
