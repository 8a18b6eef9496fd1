"""The writer thread: the order of its work, the errors at which it gives up, and its end.

Nothing that training calls here waits, locks or touches a file, except `drain` and `close`, which have deadlines.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..config import Settings
from ..errors import WriteError
from ..records import (
    KEEP_RING,
    KEEP_TENSOR,
    MOST_TOGETHER,
    NUMBERS_TOGETHER,
    SMALL_BYTES,
    Measure,
    Measured,
    MeasuredTogether,
    MeasureSmall,
    Staged,
)
from ..rules import RingWindow
from ..system.log import can_say, say
from .file import FILE_MODES, Disk, SyncThread
from .intake import Intake
from .ledger import ABANDONED, CLOSED, INTERRUPTED, WRITER_DEAD, WRITER_ERROR, Ledger, Notices
from .ring import Due, Dump, Ring, Room
from .writer_directory import RunTarget, WriterDirectory

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_SHORT_NAP_S, _MIDDLE_NAP_S, _LONG_NAP_S = 0.002, 0.02, 0.1
"""The shortest pause of an idle writer, the longest one that nothing ends, and the longest one, in seconds. The writer
does not block on the queue, because each `put` would then cost training 8 us, not 0.1. Only a large record ends a pause
longer than `_MIDDLE_NAP_S`, because waking the thread costs as much as several small records.
"""
_GATHER_S = 0.2
"""The longest wait for more small records, which cost less together. Any other item ends the wait."""
_LOOK_S = 0.1
"""The seconds between two checks of what is due by the clock. An idle writer costs mostly these checks."""
_TELL_S = 1.0
"""The seconds between two updates of a dump's progress in the manifest."""
_MAX_FAILURES = 3
_SEAL_SHARE = 0.25
"""The share of `close`'s deadline that is reserved for the last batch and the seals."""
_LAST_SHARE = 0.125
"""The share of `close`'s deadline that is reserved for the last counts of rows, once hanging syncs are given up."""
_SMALL_KEEPS = (*NUMBERS_TOGETHER, KEEP_TENSOR, *(KEEP_TENSOR | keep for keep in NUMBERS_TOGETHER))


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReport:
    """What the writer wrote until its end, and why it stopped."""

    is_complete: bool
    """True if every record is in a sealed shard, or was dropped with a reason before the end."""
    directory: Path | None
    """The writer's directory; None if it was never made."""
    ledger: Mapping[str, Any]
    """The final counts of rows: ``observed``, ``written``, ``dropped`` by reason, ``retired``."""
    error: WriteError | None
    """The error at which the writer gave up, with the cause chained. None if it did not give up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStats:
    """A snapshot of the writer, for a live display."""

    is_alive: bool
    written_bytes: int
    last_written_step: int | None
    """The highest step of a row that was written."""
    queue_length: int
    last_progress_s: float
    ledger: Mapping[str, Any]


class _Drain:
    """An item of the queue. Once the writer reaches it, all records that were put before it are made durable."""

    def __init__(self) -> None:
        self.is_durable = False
        self.is_done = False


_Item = Staged | MeasuredTogether | Due | _Drain


def _is_small(item: _Item | None) -> TypeGuard[Staged]:
    """Return True if an item is a record that is small or measured, and has arrived. Many are taken with one call."""
    return (
        type(item) is Staged
        and item.keep in _SMALL_KEEPS
        and item.ready is None
        and (item.block.num_bytes <= SMALL_BYTES or (item.measured is not None and item.keep in NUMBERS_TOGETHER))
    )


class Writer:
    """Owns the writer thread, the files of one writer directory, and the ledger (the counts of rows).

    A forked child may drop its copy of the writer: collecting the copy runs no code, takes no lock and flushes nothing.
    """

    def __init__(
        self, *, settings: Settings, measure: Measure, measure_small: MeasureSmall | None = None,
        observed: Callable[[], int], resolve_dir: Callable[[], RunTarget], poll: Callable[[], Mapping[str, Any] | None],
        saw: Callable[[Sequence[Staged], Sequence[Measured]], None] = lambda records, measured: None,
        ending: Callable[[], None] = lambda: None, sealed: Callable[[], None] = lambda: None, disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Prepare the writer. Nothing runs before `start`.

        All functions but `observed` are called on the writer thread. `saw`, `ending` and `sealed` may not raise.

        Args:
            settings: all settings of the recording.
            measure: computes the statistics and fingerprint of a record.
            measure_small: does so for many small records; None to measure each record alone.
            resolve_dir: returns where to write. It is called first, and may take its time.
            poll: is called every 0.2 s, between two records. It may call `close` or `drain`. A manifest that it returns
                is in force until another is set.
            saw: is called with records once they are measured.
            ending: is called in `close` when the queue is empty. It may call `dump`, and is then called again after the
                dump is written.
            sealed: is called in `close` when all rows are safe on the disk, unless its deadline is over by then. It may
                set the last status.
            observed: returns the number of rows so far. It is called on any thread.
            disk: another disk, for tests.
            clock: monotonic, in seconds.
        """
        self.last_progress_s = clock()
        """The time on `clock` at which the writer was last between two records. It stops while the disk hangs."""
        self._resolve_dir = resolve_dir
        self._poll = poll
        self._clock = clock
        self._ledger = Ledger(observed)
        self._notices = Notices(_log, clock)
        self._disk = disk or Disk()
        self._disk.file_mode = FILE_MODES[settings.permissions]
        self._disk.keeps_reserve = True
        self._disk.syncs = self._syncs = SyncThread()
        self._writer_directory = WriterDirectory(settings, self._ledger, self._disk, self._notices, clock)
        self._intake = Intake(
            self._writer_directory, self._ledger, self._notices, clock, measure=measure, measure_small=measure_small,
            saw=saw, tick=self._tick, abandon=self._abandon,
        )  # fmt: skip
        self._take_together, self._record = self._intake.take_together, self._intake.record
        self.refused = self._intake.refused
        """Maps a kind of shard that takes no records now to the reason, such as a full disk. Read on any thread."""
        self._queue: queue.SimpleQueue[Staged | MeasuredTogether | _Drain] = queue.SimpleQueue()
        self._put_back: _Item | None = None
        """The item that came after a group of small records. The writer handles it before the items of the queue."""
        self._settings = settings
        self._ring: Ring | None = None
        self._ending = ending
        self._sealed = sealed
        self._next_told_s = 0.0
        self._manifest: Mapping[str, Any] | None = None
        self._status: Mapping[str, Any] | None = None
        self._shown: Mapping[str, Any] | None = None
        self._refusal: str | None = None
        self._abandon_after_s = float("inf")
        self._is_stopped = False
        self._is_complete = False
        self._failure: BaseException | None = None
        self._num_failures = 0
        self._has_restarted = False
        self._next_look_s = self._next_poll_s = 0.0
        self._nap_s = _SHORT_NAP_S
        self._sleeps = threading.Lock()
        """Is held, except if the writer is to end its pause. `release` takes no lock that a signal handler may hold."""
        self._sleeps.acquire()
        self._report: CloseReport | None = None
        self._close_until_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="recorder-writer", daemon=True)

    @property
    def directory(self) -> Path | None:
        """The writer's directory; None until the writer has claimed it."""
        return self._writer_directory.path

    def start(self) -> None:
        self._thread.start()

    def hold(self, window: RingWindow, room: Room) -> None:
        """Keep records with `KEEP_RING` in memory until a trigger asks for their steps. Called before `start`."""
        settings = self._settings
        self._ring = Ring(
            window=window, room=room, hold_s=settings.ring_hold_s, max_bytes=settings.dump_max_bytes,
            ledger=self._ledger, clock=self._clock,
        )  # fmt: skip
        self._writer_directory.dumps = self._ring.dumps

    def dump(self, dump: Dump) -> None:
        """Write the steps of a trigger, steps that wait and steps still to come. Called on any thread; never waits."""
        if self._ring is not None:
            self._ring.ask(dump)
            self._wake()

    @property
    def dumps(self) -> Sequence[Dump]:
        """The dumps that have begun. Any thread may read them, but must not change them."""
        return () if self._ring is None else self._ring.dumps

    def is_wanted(self, step: int) -> bool:
        """Return True if a trigger has asked for a step of the ring. Called on any thread."""
        return self._ring is not None and self._ring.is_wanted(step)

    def put(self, item: Staged | MeasuredTogether) -> None:
        """Hand over a record, or records measured together, with their block. Called on any thread; never waits."""
        if self._refusal is None:
            self._queue.put(item)
            if item.block.num_bytes > SMALL_BYTES:
                self._wake()
            if not self._is_stopped:
                return
        else:
            self._drop(item)
        if self._is_stopped:
            self._discard_queue()  # the writer thread may have ended between the check and the put

    def count_drop(self, reason: str, num_rows: int = 1) -> None:
        """Count rows as dropped that were numbered but are never put. Called on any thread; re-entrant, never waits."""
        self._ledger.drop(reason, num_rows)

    def set_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Set the members of `_writer.json` that the writer does not know. Any thread. The mapping must not change."""
        self._manifest = manifest

    def set_status(self, status: Mapping[str, Any]) -> None:
        """Set the members of `_status.json` that the writer does not know, among them ``step``. Any thread."""
        self._status = status

    def stats(self) -> WriterStats:
        """Return a snapshot of the writer. Called on any thread."""
        return WriterStats(
            is_alive=self._thread.is_alive(), written_bytes=self._writer_directory.written_bytes,
            last_written_step=self._writer_directory.last_written_step, queue_length=self._queue.qsize(),
            last_progress_s=self.last_progress_s, ledger=self._ledger.snapshot(),
        )  # fmt: skip

    def drain(self, deadline_s: float) -> bool:
        """Wait until every record that was put before this call is on the disk and synced.

        Return False if the deadline passed first, or if the disk refused the last records.
        """
        mark = _Drain()
        self._queue.put(mark)
        self._wake()
        if self._is_on_writer_thread():
            while not mark.is_done and not self._is_stopped:
                self._run_once()
        elif self._is_stopped:
            self._discard_queue()
        self._wait(lambda: mark.is_done, deadline_s)
        return mark.is_durable or (self._is_stopped and self._is_complete)

    def close(self, deadline_s: float) -> CloseReport:
        """Write the queued records, seal the shards and stop the thread. A second call returns the first report.

        Rows that cannot be written before the deadline are counted and logged. `poll` may call `close`, too.
        """
        if self._report is not None:
            return self._report
        self._refusal = self._refusal or CLOSED
        self._close_until_s = self._abandon_after_s = float("inf")
        self.hurry(deadline_s)
        if self._is_on_writer_thread():
            while not self._is_stopped:
                self._run_once()
        else:
            self._wait(lambda: not self._thread.is_alive() or self._clock() > self._close_until_s, deadline_s)
        leftover_reason = INTERRUPTED
        if not self._is_stopped:
            self._is_stopped = True
            self._refusal = leftover_reason = ABANDONED
            self._discard_queue()
        report = CloseReport(
            is_complete=self._is_complete,
            directory=self.directory,
            ledger=self._ledger.close(leftover_reason),
            error=self._error(),
        )
        if not report.is_complete and can_say(_log):
            accounts = report.ledger
            lost = ", ".join(f"{count} {reason}" for reason, count in accounts["dropped"].items())
            say(
                _log, logging.WARNING, "the recording is incomplete: %s of %s rows were written (%s)",
                accounts["written"], accounts["observed"], lost or "shards that could not be sealed are readable, too",
            )  # fmt: skip
        self._report = report
        return report

    def hurry(self, deadline_s: float) -> None:
        """Shorten the deadline of `close`. Rows that miss it are counted. Re-entrant, as signal handlers call it."""
        now = self._clock()
        self._close_until_s = min(self._close_until_s, now + deadline_s)
        self._abandon_after_s = min(self._abandon_after_s, now + (1 - _SEAL_SHARE) * deadline_s)
        self._intake.abandon_after_s = self._abandon_after_s
        self._syncs.hurry(time.monotonic() + (1 - _LAST_SHARE) * (self._close_until_s - now))
        self._wake()

    def hurried_progress_s(self) -> float:
        """End a pause of the writer, and return `last_progress_s`. Called on threads that wait for room in the pool."""
        self._wake()
        return self.last_progress_s

    def _wake(self) -> None:
        """End a long pause of the writer thread. Re-entrant; never waits."""
        try:  # noqa: SIM105  # `contextlib.suppress` would be three more calls for each value
            self._sleeps.release()
        except RuntimeError:  # the writer has been woken already
            pass

    def _nap(self, longest_s: float) -> None:
        """Pause. A pause of more than `_MIDDLE_NAP_S` ends when `_wake` is called, or was called since the last one."""
        if longest_s > _MIDDLE_NAP_S:
            self._sleeps.acquire(timeout=longest_s)
        else:
            time.sleep(longest_s)

    def _wait(self, is_over: Callable[[], bool], deadline_s: float) -> None:
        """Wait by polling, because code that a signal handler has interrupted may hold any lock."""
        until_s = self._clock() + deadline_s
        while not is_over() and self._clock() < until_s:
            time.sleep(_SHORT_NAP_S)

    def _error(self) -> WriteError | None:
        if self._failure is None:
            return None
        error = WriteError(f"the writer gave up: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    # The methods below run on the writer thread, except `_discard_queue` and `_drop`.

    def _run(self) -> None:
        try:
            # The thread has the priority of training. At nice 10 it starves if training uses all cores: the pool fills
            # up, and training waits. A step then takes 1.53 times its time without the recorder, not 1.40 times, and
            # the pool takes 1 GiB, not 0.1.
            target = self._resolve_dir()
            self._take_manifest()
            self._writer_directory.claim(target)
            while not self._is_stopped:
                try:
                    self._run_once()
                except Exception as error:
                    if self._has_restarted:
                        raise
                    self._restart(error)
        except BaseException as error:
            self._failure = error
            self._refusal = WRITER_DEAD
            self._ledger.drop(WRITER_DEAD, self._writer_directory.num_pending_rows)
            problem = f"the writer has stopped, nothing more is recorded ({type(error).__name__}: {error})"
            self._notices.say(WRITER_DEAD, problem, level=logging.ERROR)
            with contextlib.suppress(Exception):
                self._show("failed")
                self._writer_directory.end_status()
        finally:
            self._is_stopped = True
            self._discard_queue()
            with contextlib.suppress(Exception):
                self._writer_directory.abandon_open()
            self._syncs.stop()
            self._disk.keeps_reserve = False
            self._disk.release_reserve()

    def _restart(self, error: Exception) -> None:
        """Begin anew with new shards, because half-done work cannot be trusted any more. Done only once."""
        self._has_restarted = True
        self._num_failures = 0
        problem = f"{type(error).__name__}: {error}"
        self._notices.say("restart", f"the writer failed and begins anew, with new shards ({problem})")
        self._writer_directory.restart(problem)

    def _run_once(self) -> None:
        try:
            if self._tick():
                item = self._next_item()
                if _is_small(item):
                    self._handle_small(item)
                else:
                    self._handle(item)
        except Exception as error:
            self._notices.failed("a record was lost to an error in the recorder", error)
            self._num_failures += 1
            if self._num_failures >= _MAX_FAILURES:
                raise

    def _next_item(self) -> _Item | None:
        if self._put_back is not None:
            item, self._put_back = self._put_back, None
            return item
        if self._ring is not None and self._ring.due:
            return self._ring.due.popleft()
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def _handle_small(self, first: Staged) -> None:
        """Take a small record into its batch, together with the small records that follow it in the queue."""
        records, item = [first], self._next_item()
        waits_s = _GATHER_S if self._ring is None else _MIDDLE_NAP_S  # a ring's dumps begin between two batches
        while len(records) < MOST_TOGETHER:
            if _is_small(item):
                records.append(item)
            elif item is not None or self._refusal is not None or waits_s <= 0:
                break
            else:
                nap_s = min(waits_s, _LONG_NAP_S)
                self._nap(nap_s)
                waits_s -= nap_s
            item = self._next_item()
        self._put_back = item
        try:
            self._nap_s = _LONG_NAP_S
            if self._take_together(records):
                self._num_failures = 0
        finally:
            for staged in records:
                staged.block.release()

    def _handle(self, item: _Item | None) -> None:
        if item is None:
            if self._refusal is not None:
                if not self._ring_ends():
                    self._finish()
            else:
                self._nap(self._nap_s)
                self._nap_s = min(2 * self._nap_s, _LONG_NAP_S)
            return
        self._nap_s = _SHORT_NAP_S
        if isinstance(item, _Drain):
            try:
                is_flushed = self._writer_directory.flush()
                item.is_durable = self._writer_directory.sync() and is_flushed
            finally:
                item.is_done = True
        elif self._clock() > self._abandon_after_s:
            self._abandon()
            self._drop(item.staged if isinstance(item, Due) else item)
        elif isinstance(item, MeasuredTogether):
            try:
                num_left = item.num_rows
                made = item.make()
                num_left = 0
                self._nap_s = _LONG_NAP_S
                if self._take_together(*made):
                    self._num_failures = 0
            finally:
                if num_left:
                    self._ledger.drop(WRITER_ERROR, num_left)
                item.block.release()
        elif isinstance(item, Due):
            assert self._ring is not None, "due records exist only if there is a ring"
            num_bytes = item.staged.block.data.nbytes
            is_written = False
            try:
                is_written = self._record(item.staged, item)
            finally:
                self._ring.done(item, num_bytes, is_written=is_written)
            self._num_failures = 0
        else:
            if item.keep & KEEP_RING and self._ring is not None:
                self._intake.hold(self._ring, item)
            else:
                self._record(item)
            self._num_failures = 0

    def _ring_ends(self) -> bool:
        """End the ring once the queue is empty. Return True if the ring has handed over records to write."""
        self._ending()
        self._begin_dumps()
        return self._ring is not None and (bool(self._ring.due) or self._ring.end())

    def _begin_dumps(self) -> None:
        """Begin the requested dumps, and from time to time write the progress of the dumps to the manifest."""
        ring = self._ring
        if ring is None:
            return
        has_begun = ring.take_asked()
        if ring.has_changed and (has_begun or self._clock() >= self._next_told_s):
            ring.has_changed = False
            self._next_told_s = self._clock() + _TELL_S
            self._writer_directory.mark_stale()

    def _tick(self) -> bool:
        """Show that the thread is alive, do work that is due by the clock, and return whether the writer goes on.

        Not called within a record.
        """
        self.last_progress_s = now = self._clock()
        if now < self._next_look_s:
            return not self._is_stopped
        self._next_look_s = now + _LOOK_S
        self._take_manifest()
        self._begin_dumps()
        self._writer_directory.flush_due()
        for kind in list(self.refused):
            if self._intake.refuses(kind) is None:
                del self.refused[kind]
        if now >= self._next_poll_s and self._refusal is None:
            self._next_poll_s = now + _POLL_S
            if (manifest := self._poll()) is not None:
                self._writer_directory.set_manifest(manifest)
            self._show()
        return not self._is_stopped

    def _abandon(self) -> None:
        self._refusal = ABANDONED

    def _take_manifest(self) -> None:
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            self._writer_directory.set_manifest(manifest)

    def _show(self, state: str = "recording") -> None:
        status, self._status = self._status, None
        if status is None and state == "recording":
            return
        self._shown = status or self._shown
        if self._shown is not None:
            self._writer_directory.show({**self._shown, "queue_length": self._queue.qsize()}, state=state)

    def _finish(self) -> None:
        self._take_manifest()
        is_flushed = self._writer_directory.flush()
        ledger = self._ledger.close(INTERRUPTED)
        is_sealed = self._writer_directory.close(ledger)
        self._is_complete = is_flushed and is_sealed and self._refusal == CLOSED and not ledger.get("suspect")
        self._show("closed")
        self._is_stopped = True
        if self._clock() < self._close_until_s:
            self._sealed()
            self._show("closed")
        self._writer_directory.end_status()

    def _discard_queue(self) -> None:
        while (item := self._next_item()) is not None:
            if isinstance(item, _Drain):
                item.is_done = True
            else:
                self._drop(item.staged if isinstance(item, Due) else item)
        for staged in self._ring.drain() if self._ring is not None else ():
            self._drop(staged)

    def _drop(self, item: Staged | MeasuredTogether) -> None:
        num_rows = item.num_parts if isinstance(item, Staged) else item.num_rows
        self._ledger.drop(self._refusal or CLOSED, num_rows)
        item.block.release()

    def _is_on_writer_thread(self) -> bool:
        return threading.current_thread() is self._thread
