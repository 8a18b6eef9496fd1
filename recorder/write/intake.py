"""Takes records off the channel into the batches of their shards: waits for their bytes, and measures them first.

Everything here runs on the writer thread, except that any thread reads `Intake.refused` and sets `abandon_after_s`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress

from ..records import (
    KEEP_FINGERPRINT,
    KEEP_STATS,
    LostError,
    Measure,
    Measured,
    MeasureSmall,
    Ready,
    Staged,
    kind_of,
)
from .ledger import ABANDONED, WRITER_ERROR, Ledger, Notices
from .ring import Due, Ring
from .rows import NOT_MEASURED
from .writer_directory import WriterDirectory

_WAIT_S = 0.002
"""The seconds of each wait for the bytes of a record. Due work is done between two waits."""
_UNMEASURABLE = Measured(note="no_statistics:error")


class Intake:
    """Takes records until the deadline after which all that is left is abandoned."""

    def __init__(
        self, directory: WriterDirectory, ledger: Ledger, notices: Notices, clock: Callable[[], float], *,
        measure: Measure, measure_small: MeasureSmall | None,
        saw: Callable[[Sequence[Staged], Sequence[Measured]], None], tick: Callable[[], bool],
        abandon: Callable[[], None],
    ) -> None:  # fmt: skip
        """Take nothing yet. `Writer` describes `measure`, `measure_small` and `saw`.

        `tick` does the work that is due by the clock, and returns whether the writer goes on. `abandon` is called when
        a record comes after the deadline.
        """
        self._writer_directory, self._ledger, self._notices, self._clock = directory, ledger, notices, clock
        self._measure, self._measure_small, self._saw = measure, measure_small, saw
        self._tick, self._abandon = tick, abandon
        self.abandon_after_s = float("inf")
        """The time on the clock after which no record is taken any more."""
        self.refused: dict[str, str] = {}
        """Maps a kind of shard that takes no records now to the reason, such as a full disk."""

    def take_together(self, records: Sequence[Staged], measured: Sequence[Measured] | None = None) -> bool:
        """Take small records, each into the batch of its kind of shard. Return whether any could be taken now."""
        kinds = [kind_of(staged.keep, staged.origin.site) for staged in records]
        num_left, drop_reasons = Counter(kinds), dict.fromkeys(kinds, WRITER_ERROR)
        try:
            if self._clock() > self.abandon_after_s:
                self._abandon()
                drop_reasons = dict.fromkeys(kinds, ABANDONED)
                return False
            refusals = {kind: reason for kind in num_left if (reason := self.refuses(kind)) is not None}
            if refusals:
                drop_reasons |= refusals
                is_taken = [kind not in refusals for kind in kinds]
                kinds, records = list(compress(kinds, is_taken)), list(compress(records, is_taken))
                measured = measured and list(compress(measured, is_taken))
                if not records:
                    return False
            measured = measured or self._measured_together(records)
            self._saw(records, measured)
            for kind in dict.fromkeys(kinds):
                is_of_kind = [one == kind for one in kinds]
                its, numbers = list(compress(records, is_of_kind)), list(compress(measured, is_of_kind))
                shards = self._writer_directory.shards_by_kind[kind]
                while num_left[kind]:
                    start = len(its) - num_left[kind]
                    try:
                        num_left[kind] -= shards.add_small(its[start:], numbers[start:])
                    except MemoryError as error:
                        drop_reasons[kind] = shards.ran_out_of_memory(error)
                        break
                    shards.flush_if_full()
            return True
        finally:
            for kind, num in num_left.items():
                if num:
                    self._ledger.drop(drop_reasons[kind], num)

    def _measured_together(self, records: Sequence[Staged]) -> Sequence[Measured]:
        is_to_do = [staged.keep & KEEP_STATS and staged.measured is None for staged in records]
        if self._measure_small is not None:
            with contextlib.suppress(Exception):  # after an error each record is measured alone, which logs the error
                done = iter(self._measure_small(list(compress(records, is_to_do))))
                return [
                    next(done) if is_now else self._measured(one) for one, is_now in zip(records, is_to_do, strict=True)
                ]
        return [self._measured(staged) for staged in records]

    def hold(self, ring: Ring, staged: Staged) -> None:
        """Put a record into the ring (the last steps' records) once its bytes have arrived. Measure it at once."""
        is_held = False
        drop_reason = WRITER_ERROR
        try:
            lost = self._wait_for(staged.ready) if staged.ready is not None else None
            if lost is not None:
                drop_reason = lost
                return
            measured = None
            if staged.keep & (KEEP_STATS | KEEP_FINGERPRINT):
                measured = self._measured(staged)
                self._saw([staged], [measured])
            ring.put(staged, measured)
            is_held = True
        finally:
            if not is_held:
                staged.block.release()
                self._ledger.drop(drop_reason, staged.num_parts)

    def refuses(self, kind: str) -> str | None:
        """Return why records of a kind are dropped now, and publish the reason in `refused`. Return None if not."""
        refusal = self._writer_directory.refusal(kind)
        if refusal is not None:
            self.refused[kind] = refusal
        return refusal

    def record(self, staged: Staged, due: Due | None = None) -> bool:
        """Take one record into its shard's batch, and write the batch if full. Return True if all rows were taken.

        `due` is the record as the ring returned it, measured and passed to `saw`; None if it was not in the ring.
        """
        kind = kind_of(staged.keep, staged.origin.site)
        num_left = staged.num_parts
        drop_reason = WRITER_ERROR
        try:
            lost = self._wait_for(staged.ready) if staged.ready is not None and due is None else None
            if lost is not None:
                drop_reason = lost
                return False
            if (refusal := self.refuses(kind)) is not None:
                drop_reason = refusal
                return False
            shards = self._writer_directory.shards_by_kind[kind]
            measured = (due and due.measured) or self._measured(staged)
            if due is None:
                self._saw([staged], [measured])
            for part in range(staged.num_parts):
                if part:
                    shards.flush_if_full()
                    if not self._tick():
                        return False
                try:
                    shards.add(staged, measured, part)
                except MemoryError as error:
                    drop_reason = shards.ran_out_of_memory(error)
                    return False
                num_left -= 1
        finally:
            staged.block.release()
            if num_left:
                self._ledger.drop(drop_reason, num_left)
        shards.flush_if_full()
        return True

    def _wait_for(self, ready: Ready) -> str | None:
        """Wait for the bytes of a record, and do due work meanwhile. Return the drop reason if the bytes are lost."""
        try:
            while not ready.wait(_WAIT_S):
                if not self._tick() or self._clock() > self.abandon_after_s:
                    self._abandon()
                    return ABANDONED
        except LostError as error:
            if error.__cause__ is not None:
                self._notices.failed("a value did not arrive from its device", error.__cause__)
            return str(error)
        return None

    def _measured(self, staged: Staged) -> Measured:
        if not staged.keep & (KEEP_STATS | KEEP_FINGERPRINT):
            return NOT_MEASURED
        try:
            if staged.measured is not None:
                return staged.measured(staged.block.data, staged.chunk)
            return self._measure(
                staged.block.data, staged.dtype, staged.shape, staged.chunk, staged.keep, staged.origin.unit_dim
            )
        except Exception as error:
            self._notices.failed("statistics could not be computed; rows are written without statistics", error)
            return _UNMEASURABLE
