"""The dumps of a run: what its ranks wrote of their rings when triggers asked, by window and reason.

What manifests say is untrusted input, which `format.manifest` has checked. Opens no shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..format.manifest import RingDump
from .writers import RecordedWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDump:
    """The steps that all ranks were asked for by one trigger."""

    attempt: int
    """The launch that wrote it; a restart may take the same steps again."""
    first_step: int
    last_step: int
    reason: str
    by: str
    """Who pulled the trigger first: a rank, or a user and a host."""
    time_ns: int
    """When the first rank began."""
    ranks: tuple[int, ...]
    """The ranks that learned of the trigger."""
    missed: tuple[int, ...]
    """The ranks that had given up some of these steps by then."""
    num_rows: int
    num_bytes: int
    """Bytes of the payloads, before they were encoded."""


def dumps_of(writers: Sequence[RecordedWriter]) -> list[RunDump]:
    """Return the dumps of a run, by their time. Ranks that see the same at once, and name the same steps, make one."""
    groups: dict[tuple[int, int, int, str], list[tuple[int | None, RingDump]]] = {}
    for writer in writers:
        for dump in writer.manifest.dumps:
            key = (writer.attempt, dump.first_step, dump.last_step, dump.reason)
            groups.setdefault(key, []).append((writer.rank, dump))
    dumps = [
        RunDump(
            attempt=attempt,
            first_step=members[0][1].first_step,
            last_step=members[0][1].last_step,
            reason=members[0][1].reason,
            by=min((dump for _, dump in members), key=lambda dump: dump.time_ns).by,
            time_ns=min(dump.time_ns for _, dump in members),
            ranks=tuple(sorted({rank for rank, _ in members if rank is not None})),
            missed=tuple(sorted({rank for rank, dump in members if rank is not None and dump.num_missed})),
            num_rows=sum(dump.num_rows for _, dump in members),
            num_bytes=sum(dump.num_bytes for _, dump in members),
        )
        for (attempt, *_), members in groups.items()
    ]
    return sorted(dumps, key=lambda dump: (dump.time_ns, dump.first_step))
