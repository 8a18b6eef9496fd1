"""The settings of the writer as plain values; `recorder.config` says where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How and how much to write. The caller has validated the values."""

    flush_interval_s: float = 1.0
    """Rows reach the kernel at most this long after they were taken; lower it to watch a run live."""
    sync_interval_s: float = 1.0
    """Rows reach the medium at most this long after they reached the kernel; raise it where syncs are slow."""
    shard_bytes: int = 256 << 20
    """A shard ends at this size; lower it for finer retention."""
    shard_rows: int = 65536
    """A shard ends at this many rows."""
    seal_stats_s: float = 0.0
    """A shard of statistics ends after this time; 0: when it is full. Set it where open shards are sent elsewhere."""
    batch_bytes: int = 8 << 20
    """A batch is written once its payload has this size."""
    codec: str = "auto"
    """``auto``, ``none`` or ``zstd``; see `format.codec`."""
    codec_level: int = 1
    """zstd's level."""
    max_bytes: int = 16 << 30
    """The bytes of disk that the rank may use, earlier writers included; a quarter of it is for statistics."""
    keep_newest: int = 0
    """Shards whose steps all lie before the newest so many are deleted; 0 for none."""
    keep_steps: str = ""
    """A schedule of steps that retention never deletes; empty for none."""
    permissions: str = "owner"
    """The other users who may read: ``owner`` for none, ``group``, ``all``."""
    min_free_bytes: int = 2 << 30
    """The bytes of the file system that are left free for others."""
    on_quota: str = "retire"
    """``retire`` deletes the oldest shards but the first, ``stop`` drops new rows."""
    native: bool = True
    """Whether to use the compiled loops, where they were built; turn it off to find out whether they are at fault."""
    direct_io: str = "auto"
    """``auto`` writes past the page cache where the file system can, ``off`` never does."""
    ring_hold_s: float = 2.0
    """Steps stay in the ring for this long where it has room, so that a trigger of another rank finds them."""
    dump_max_bytes: int = 4 << 30
    """The bytes of all payloads that triggers may have written; more are dropped, so that a bad night fills no disk."""
    close_deadline_s: float = 5.0
    """The longest time that the last flush may hold up the end of training."""
