"""The ring in the writer: what waits, what passes, what a trigger has written, and that every row is accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.records import KEEP_RING, KEEP_STATS, KEEP_TENSOR, PART_BYTES, Chunk
from recorder.rules import RingWindow
from recorder.write.ring import Dump
from tests.rigs.fakes import FakeBlock, FaultyDisk
from tests.rigs.waiting import PATIENCE_S, wait_until
from tests.rigs.writer import Rig

WINDOW = RingWindow(before=2, after=1)


def dump(first: int, last: int, reason: str = "a reason") -> Dump:
    return Dump(first_step=first, last_step=last, reason=reason, by="rank 0")


class Training:
    """Puts one record of some bytes for each step."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def steps(self, first: int, last: int, keep: int = KEEP_RING) -> None:
        for step in range(first, last + 1):
            self.rig.put(np.full(8, step, np.float32), step=step, keep=keep)

    def until_taken(self) -> None:
        """Wait until the writer thread has taken everything off the queue."""
        wait_until(lambda: self.rig.writer.stats().queue_length == 0)
        self.rig.drain()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    rig = Rig(tmp_path / "run", window=WINDOW, ring_hold_s=0.0).start()
    yield Training(rig)
    rig.writer.close(PATIENCE_S)


def held_steps(rig: Rig) -> list[int]:
    blocks = ((staged.moment.step, staged.block) for staged in rig.staged)
    return [step for step, block in blocks if isinstance(block, FakeBlock) and not block.num_releases]


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_what_no_trigger_asks_for_is_given_back_counted_as_passed_and_not_written(training: Training) -> None:
    training.steps(0, 9)
    training.until_taken()
    assert held_steps(training.rig) == [7, 8, 9], "the step under way, and two before it"
    report = training.rig.close()
    assert report.is_complete
    assert report.ledger["passed"] == 10
    assert report.ledger["written"] == 0 and report.ledger["dropped"] == {}
    training.rig.assert_blocks_are_released()
    assert training.rig.rows() == []


def test_a_trigger_has_the_steps_before_and_after_it_written_with_statistics(training: Training) -> None:
    training.steps(0, 9)
    training.until_taken()
    training.rig.writer.dump(dump(7, 10))
    training.steps(10, 14)
    assert training.rig.close().ledger["passed"] == 11
    rows = training.rig.rows()
    assert steps_of(rows) == [7, 8, 9, 10]
    assert [np.frombuffer(row["data"], np.float32)[0] for row in rows if row["encoding"] == "plain"] == [7, 8, 9, 10]
    assert all(row["mean"] == 32.0 for row in rows), "they were measured, though their rule does not ask for it"
    training.rig.assert_blocks_are_released()
    (told,) = training.rig.manifest()["dumps"]
    assert (told["first_step"], told["last_step"], told["reason"], told["by"]) == (7, 10, "a reason", "rank 0")
    assert (told["rows"], told["bytes"]) == (4, 128)
    assert "missed" not in told


def test_two_triggers_at_once_write_a_step_once(training: Training) -> None:
    training.steps(0, 5)
    training.until_taken()
    training.rig.writer.dump(dump(3, 6, "one"))
    training.rig.writer.dump(dump(4, 7, "other"))
    training.steps(6, 9)
    training.rig.close()
    assert steps_of(training.rig.rows()) == [3, 4, 5, 6, 7]
    assert [(told["reason"], told["rows"]) for told in training.rig.manifest()["dumps"]] == [("one", 3), ("other", 2)]


def test_a_window_that_lies_ahead_asks_for_none_of_the_steps_before_it(training: Training) -> None:
    writer = training.rig.writer
    writer.dump(dump(10**14, 10**14 + 3))
    assert [writer.is_wanted(step) for step in (0, 9, 10**14 - 1, 10**14, 10**14 + 3, 10**14 + 4)] == [
        False, False, False, True, True, False,
    ]  # fmt: skip
    training.steps(0, 9)
    training.until_taken()
    assert held_steps(training.rig) == [7, 8, 9]


def test_a_trigger_that_comes_too_late_says_which_steps_it_missed(training: Training) -> None:
    training.steps(0, 9)
    training.until_taken()
    training.rig.writer.dump(dump(4, 7))
    training.rig.close()
    assert steps_of(training.rig.rows()) == [7]
    (told,) = training.rig.manifest()["dumps"]
    assert (told["missed"], told["num_missed"]) == ([4, 5, 6], 3)


def test_a_trigger_in_the_first_step_misses_nothing(training: Training) -> None:
    training.steps(0, 0)
    training.rig.writer.dump(dump(0, 1))
    training.steps(1, 3)
    training.rig.close()
    assert steps_of(training.rig.rows()) == [0, 1]
    assert "missed" not in training.rig.manifest()["dumps"][0]


def test_a_trigger_that_is_found_at_the_very_end_still_has_its_steps(tmp_path: Path) -> None:
    asked: list[Dump] = []

    def ending() -> None:
        if not asked:
            asked.append(dump(3, 6))
            rig.writer.dump(asked[0])

    rig = Rig(tmp_path / "run", window=WINDOW, ring_hold_s=0.0, ending=ending).start()
    Training(rig).steps(0, 5)
    assert rig.close().is_complete
    assert steps_of(rig.rows()) == [3, 4, 5]
    assert rig.manifest()["dumps"][0]["rows"] == 3


def test_old_steps_are_held_longer_where_there_is_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", window=WINDOW, ring_hold_s=600.0, ring_bytes=32 * 16).start()
    training = Training(rig)
    for step in range(40):
        training.steps(step, step)
        training.until_taken()
        if step == 9:
            assert held_steps(rig) == list(range(10)), "ten of sixteen"
    held = held_steps(rig)
    assert held == list(range(40 - len(held), 40))
    assert 3 < len(held) <= 13, "a quarter of the ring, and two steps of it, stay free for what comes"
    rig.close()


def test_statistics_of_what_passes_are_written(training: Training) -> None:
    training.steps(0, 5, keep=KEEP_RING | KEEP_STATS)
    training.rig.put(np.zeros(PART_BYTES // 4 + 1, np.float32), step=6, keep=KEEP_RING | KEEP_STATS)
    training.steps(9, 9)
    training.rig.drain()
    training.rig.writer.dump(dump(9, 9))
    report = training.rig.close()
    rows = training.rig.rows()
    assert steps_of(rows) == [0, 1, 2, 3, 4, 5, 6, 9]
    assert [row["encoding"] is None for row in rows] == [True] * 7 + [False]
    assert all(row["mean"] for row in rows)
    assert report.ledger["passed"] == 1, "the second part of the large tensor has no statistics of its own"
    training.rig.assert_blocks_are_released()


def test_a_summand_is_written_without_statistics(training: Training) -> None:
    chunk = Chunk((8,), (0,), '[{"kind":"Partial","reduce_op":"sum"}]', '{"shape":[2]}', "dtensor")
    training.rig.put(step=0, keep=KEEP_RING, chunk=chunk)
    training.rig.writer.dump(dump(0, 0))
    training.rig.close()
    (row,) = training.rig.rows()
    assert row["mean"] is None and row["encoding"] is not None


def test_rows_beyond_the_bound_on_dumps_are_dropped_and_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", window=WINDOW, ring_hold_s=0.0, dump_max_bytes=96).start()
    training = Training(rig)
    training.steps(0, 5)
    training.until_taken()
    rig.writer.dump(dump(3, 6))
    training.steps(6, 9)
    report = rig.close()
    assert steps_of(rig.rows()) == [3, 4, 5]
    assert report.ledger["dropped"] == {"dump_bytes": 1}
    rig.assert_blocks_are_released()


def test_a_full_disk_during_a_dump_costs_rows_with_a_reason_and_the_next_dump_is_whole(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path / "run", disk=disk, window=WINDOW, ring_hold_s=0.0, flush_interval_s=0.01).start()
    training = Training(rig)
    training.steps(0, 5)
    training.until_taken()
    disk.free_for_writes = 0
    rig.writer.dump(dump(3, 6))
    training.steps(6, 9)
    wait_until(lambda: sum(rig.writer.stats().ledger["dropped"].values()))
    disk.recover()
    wait_until(lambda: rig.writer.refused == {} or rig.drain())
    training.steps(10, 19)
    training.until_taken()
    rig.writer.dump(dump(17, 19))
    report = rig.close()
    assert set(report.ledger["dropped"]) == {"disk_full"}
    assert set(steps_of(rig.rows())) >= {17, 18, 19} or report.ledger["dropped"]["disk_full"] > 4
    rig.assert_blocks_are_released()


def test_what_the_deadline_cuts_off_is_counted(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path / "run", disk=disk, window=RingWindow(40, 0), ring_hold_s=0.0, batch_bytes=1).start()
    training = Training(rig)
    training.steps(0, 39)
    training.until_taken()
    disk.delay_s = 0.05
    rig.writer.dump(dump(0, 39))
    report = rig.writer.close(0.4)
    ledger = report.ledger
    disk.recover()
    assert not report.is_complete
    assert ledger["observed"] == 40 == ledger["written"] + sum(ledger["dropped"].values()) + ledger.get("passed", 0)
    assert ledger["dropped"]["abandoned_at_close"] > 0


def test_a_clock_that_the_program_sets_back_keeps_nothing_for_ever(training: Training) -> None:
    training.steps(100, 109)
    training.steps(0, 9)
    training.until_taken()
    assert held_steps(training.rig) == [7, 8, 9]
    training.rig.close()


def test_a_record_that_is_a_little_late_waits_with_its_step(training: Training) -> None:
    training.steps(0, 5)
    training.steps(4, 4)
    training.rig.drain()
    training.rig.writer.dump(dump(4, 4))
    training.rig.close()
    assert steps_of(training.rig.rows()) == [4, 4]


def test_other_records_go_by(training: Training) -> None:
    for step in range(6):
        training.steps(step, step)
        training.rig.put(step=step, keep=KEEP_TENSOR)
    training.rig.close()
    assert steps_of(training.rig.rows()) == list(range(6))


def test_a_writer_that_gives_up_gives_the_ring_back(tmp_path: Path) -> None:
    def broken() -> dict[str, Any] | None:
        raise SystemError("a bug of ours")

    rig = Rig(tmp_path / "run", window=WINDOW, poll=broken)
    Training(rig).steps(0, 5)
    rig.start()
    wait_until(lambda: not rig.writer.stats().is_alive)
    rig.close()
    rig.assert_blocks_are_released()
