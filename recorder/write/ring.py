"""The ring: records of the last steps, which wait in memory for a trigger. Used on the writer thread only.

A record leaves the ring in one of two ways. If a trigger asks for its step, the record goes to the shards like any
other record. If its step passes, its pool block becomes free. Nothing here may touch a file or a payload.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..records import KEEP_RING, KEEP_STATS, KEEP_TENSOR, Measured, Staged
from ..rules import RingWindow
from .ledger import DUMP_BYTES, Ledger

MAX_DUMPS = 256
"""The largest number of dumps of a writer, because the writer's manifest lists all of them."""
_MAX_PASSED = 1 << 16
"""The most steps without a dump to remember, so that a late trigger can list the steps that it missed."""
_SET_BACK = 3
"""A record of a step more than this number of steps before the window shows that the program has set its steps back."""
_SPARE_SHARE = 0.25
"""The share of the ring's memory that must be free for steps older than the window to be kept."""
_MAX_LISTED = 64


@dataclass(slots=True, kw_only=True)
class Dump:
    """The steps that a trigger asks for, and what this rank has written of them."""

    first_step: int
    last_step: int
    reason: str
    by: str
    """The source of the trigger, as text: a rank, or a user and a host."""
    command: int | None = None
    """The number of the command that brought the trigger; None if this rank has found the trigger itself."""
    time_ns: int = field(default_factory=time.time_ns)
    num_rows: int = 0
    """The number of written rows, of values that waited in the ring and of values that came later."""
    num_bytes: int = 0
    """The bytes of the written rows' payloads, before they are encoded."""
    missed: list[int] = field(default_factory=list)
    """The steps whose values this rank no longer had when it learned of the trigger."""
    has_begun: bool = False
    """True once the ring has given the waiting records to the shards."""
    is_over: bool = False
    """True once a record of a later step has come: by then all records of the dump were handed over."""
    num_due: int = 0
    """The number of the dump's records that were given to the shards and are not written yet."""
    is_said: bool = False

    @property
    def missed_text(self) -> str:
        if len(self.missed) == 1:
            return f"step {self.missed[0]}"
        whole = self.missed[-1] - self.missed[0] + 1 == len(self.missed)
        return f"steps {self.missed[0]} to {self.missed[-1]}" + ("" if whole else f" ({len(self.missed)} of them)")

    def members(self) -> dict[str, Any]:
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "reason": self.reason,
            "by": self.by,
            **({} if self.command is None else {"command": self.command}),
            "time_ns": self.time_ns,
            "rows": self.num_rows,
            "bytes": self.num_bytes,
            **({"missed": self.missed[:_MAX_LISTED], "num_missed": len(self.missed)} if self.missed else {}),
        }


class Due(NamedTuple):
    """A record that has left the ring, to be written to a shard."""

    staged: Staged
    measured: Measured | None
    """The statistics of the record; None for a record that was not measured yet."""
    dump: Dump | None
    """The dump of the record. None if the record's step has passed, and only its statistics are written."""


class _HeldRecord(NamedTuple):
    staged: Staged
    measured: Measured | None


@dataclass(slots=True)
class _HeldStep:
    records: list[_HeldRecord] = field(default_factory=list)
    last_s: float = 0.0


class Room(NamedTuple):
    """The share of the pool that belongs to the ring."""

    capacity_bytes: int
    used_bytes: Callable[[], int]
    """Returns the bytes of the ring's share that records use now, even records that are not in the ring yet."""


@dataclass(eq=False, kw_only=True)
class Ring:
    """The records of the last steps. Any thread may call `ask` and `is_wanted`; the writer thread does the rest."""

    window: RingWindow
    """The ring keeps `window.before` steps before the current step. The caller of `ask` names the steps to write."""
    room: Room
    hold_s: float
    """The seconds for which steps before the window are kept, too, if there is `room`."""
    max_bytes: int
    """The largest number of payload bytes that all dumps together may have."""
    ledger: Ledger
    """Counts the rows that leave the ring unwritten."""
    clock: Callable[[], float]
    """A monotonic clock, in seconds."""

    def __post_init__(self) -> None:
        self.due: deque[Due] = deque()
        """The records that have left the ring. The writer writes them before any other record."""
        self.dumps: list[Dump] = []
        self._wanted: list[tuple[int, int]] = []
        """The first and the last step of each window that a trigger has asked for."""
        self._wanted_until = -1
        """The largest step of all windows that triggers have asked for."""
        self.has_changed = False
        """True if the dumps have changed since the manifest was last marked as stale."""
        self._asked: deque[Dump] = deque()
        self._open: list[Dump] = []
        self._steps: dict[int, _HeldStep] = {}
        """The waiting records of each step, in the order in which the steps began."""
        self._now: int | None = None
        self._passed: deque[int] = deque(maxlen=_MAX_PASSED)
        """The last steps whose values were given up without a dump."""
        self._asked_bytes = 0

    def ask(self, dump: Dump) -> None:
        """Request that the steps of a dump are written. Called on any thread; never waits."""
        self._wanted.append((dump.first_step, dump.last_step))
        self._wanted_until = max(self._wanted_until, dump.last_step)
        self._asked.append(dump)

    def is_wanted(self, step: int) -> bool:
        """Return True if a step is in the window of a trigger. A window may begin after the current step."""
        return step <= self._wanted_until and any(first <= step <= last for first, last in self._wanted)

    def put(self, staged: Staged, measured: Measured | None) -> None:
        """Take a record whose bytes are on the host."""
        if self._asked:
            self.take_asked()
        step = staged.moment.step
        if step != self._now:
            self._begin(step)
        record = _HeldRecord(staged, measured)
        if step <= self._wanted_until and (dump := self._dump_of(step)) is not None:
            self._give(record, dump)
            return
        held = self._steps.get(step)
        if held is None:
            held = self._steps[step] = _HeldStep()
        held.records.append(record)
        held.last_s = self.clock()

    def take_asked(self) -> bool:
        """Begin the dumps that were requested since the last call. Return True if there were any."""
        has_begun = False
        while self._asked:
            dump = self._asked.popleft()
            dump.missed = sorted({step for step in self._passed if dump.first_step <= step <= dump.last_step})
            for step in [step for step in self._steps if dump.first_step <= step <= dump.last_step]:
                for record in self._steps.pop(step).records:
                    self._give(record, dump)
            self.dumps.append(dump)
            self._open.append(dump)
            dump.has_begun = True
            self.has_changed = has_begun = True
        self._close_dumps()
        return has_begun

    def end(self) -> bool:
        """Drop the values of all waiting steps; no trigger can come. Return True if rows are left to write."""
        for step in list(self._steps):
            self._pass(step)
        return bool(self.due)

    def done(self, due: Due, num_bytes: int, *, is_written: bool) -> None:
        """Count a record of a dump as done: it was written, or it was dropped and counted."""
        if due.dump is not None:
            due.dump.num_due -= 1
            self.has_changed = True
            if is_written:
                due.dump.num_rows += due.staged.num_parts
                due.dump.num_bytes += num_bytes

    def drain(self) -> Iterator[Staged]:
        """Yield all records and forget them. The caller counts each record as dropped, and releases it."""
        while self.due:
            yield self.due.popleft().staged
        while self._steps:
            for record in self._steps.popitem()[1].records:
                yield record.staged

    def _begin(self, step: int) -> None:
        now = self._now
        if now is not None and step < now:
            if step >= now - self.window.before - _SET_BACK:
                return  # the record is of an earlier step, because it came late
            self.end()  # the program has set its steps back, so that no waiting step would ever be old
        self._now = step
        self._close_dumps()
        self._let_pass(step)

    def _close_dumps(self) -> None:
        for dump in self._open:
            dump.is_over = self._now is not None and dump.last_step < self._now
        self._open = [dump for dump in self._open if not dump.is_over]

    def _let_pass(self, now: int) -> None:
        """Release the steps before the window, except recent steps for which there is room."""
        old = [step for step in self._steps if step + self.window.before < now]
        if not old:
            return
        room, num_held = self.room, len(self._steps)
        used_bytes = room.used_bytes()
        step_bytes = used_bytes // num_held
        spare_bytes = max(2 * step_bytes, int(_SPARE_SHARE * room.capacity_bytes))
        held_until_s = self.clock() - self.hold_s
        for step in old:
            if self._steps[step].last_s > held_until_s and room.capacity_bytes - used_bytes >= spare_bytes:
                continue
            self._pass(step)
            used_bytes -= step_bytes

    def _pass(self, step: int) -> None:
        """Release the values of a step that has passed, but write the statistics that a rule asks for."""
        self._passed.append(step)
        num_rows = 0
        for staged, measured in self._steps.pop(step).records:
            keep = staged.keep & ~KEEP_RING
            if keep:
                num_rows += staged.num_parts - 1
                self.due.append(Due(staged._replace(keep=keep, num_parts=1), measured, None))
            else:
                num_rows += staged.num_parts
                staged.block.release()
        if num_rows:
            self.ledger.add_passed(num_rows)

    def _dump_of(self, step: int) -> Dump | None:
        return next((dump for dump in reversed(self.dumps) if dump.first_step <= step <= dump.last_step), None)

    def _give(self, record: _HeldRecord, dump: Dump) -> None:
        """Pass a record and its statistics to the shards, or drop the record if the dumps have used up `max_bytes`."""
        staged = record.staged
        num_bytes = staged.block.data.nbytes
        if self._asked_bytes + num_bytes > self.max_bytes:
            staged.block.release()
            self.ledger.drop(DUMP_BYTES, staged.num_parts)
            return
        self._asked_bytes += num_bytes
        dump.num_due += 1
        is_summand = staged.chunk is not None and 'Partial"' in staged.chunk.placements
        keep = staged.keep & ~KEEP_RING | KEEP_TENSOR | (0 if is_summand else KEEP_STATS)
        measured = record.measured if staged.keep & KEEP_STATS or is_summand else None
        self.due.append(Due(staged._replace(keep=keep), measured, dump))
