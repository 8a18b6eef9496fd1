"""A run that is followed: each batch is given once, from open shards, sealed ones, and such as are sealed meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recorder.errors import NotARunError
from recorder.format.rundir import index_name, open_name, shard_name
from recorder.run.finding import find_run
from recorder.run.growing import NEVER, GrowingRun
from tests.rigs.handmade import HandmadeWriter, Row, index_bytes, make_row, make_run, shard_bytes


def batch(step: int, rank: int = 0) -> list[Row]:
    return [make_row(10 * step + i, [1.0], step=step, rank=rank, module_path=f"m{i}") for i in range(3)]


class OpenShard:
    """A shard that grows batch by batch, as its writer leaves it between two flushes."""

    def __init__(self, writer: HandmadeWriter, number: int = 0) -> None:
        self.path = writer.directory / open_name(shard_name("tensors", number))
        self.batches: list[list[Row]] = []

    def add(self, rows: list[Row], tail: bytes = b"") -> None:
        self.batches.append(rows)
        self.path.write_bytes(shard_bytes(self.batches, is_sealed=False) + tail)

    def seal(self) -> None:
        data = shard_bytes(self.batches)
        final = self.path.with_name(self.path.name.removeprefix("_").removesuffix(".open"))
        final.with_name(index_name(final.name)).write_bytes(index_bytes(self.batches, len(data)))
        self.path.write_bytes(data)
        os.rename(self.path, final)


def follow(run: Path) -> GrowingRun:
    return GrowingRun(*find_run(run))


def steps_given(growing: GrowingRun) -> list[int]:
    """The steps of the rows that are given by a look, of which each is done with then."""
    growing.look()
    while growing.advance(1000):
        pass
    found = [
        step
        for writer in growing.writers((0, NEVER))
        for shard in writer.shards
        for one in shard.columns(["step"])
        for step in one.column("step").to_pylist()
    ]
    growing.done(growing.end_pending)
    return found


def test_each_batch_of_an_open_shard_is_given_once_also_when_it_is_sealed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shard = OpenShard(HandmadeWriter(run))
    growing = follow(run)
    assert steps_given(growing) == []
    shard.add(batch(0))
    shard.add(batch(1), tail=b"\xff\xff\xff\xff\x10")  # the writer is at work on the next one
    assert steps_given(growing) == [0, 0, 0, 1, 1, 1]
    assert steps_given(growing) == []
    shard.add(batch(2))
    assert steps_given(growing) == [2, 2, 2]
    shard.add(batch(3))
    shard.seal()
    assert steps_given(growing) == [3, 3, 3]
    assert steps_given(growing) == [] and growing.num_pending == 0


def test_shards_that_come_later_and_were_sealed_before_are_given_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([batch(0), batch(1)])
    growing = follow(run)
    assert steps_given(growing) == [0, 0, 0, 1, 1, 1]
    writer.add_shard([batch(2)])
    shard = OpenShard(writer, 2)
    shard.add(batch(3))
    assert steps_given(growing) == [2, 2, 2, 3, 3, 3]


def test_ranks_advance_together_and_steps_that_one_has_not_reached_are_not_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shards = [OpenShard(HandmadeWriter(run, rank)) for rank in range(2)]
    for step in range(6):
        shards[0].add(batch(step))
    for step in range(3):
        shards[1].add(batch(step, 1))
    growing = follow(run)
    growing.look()
    while growing.advance(1):
        reached = [one.steps[1] for found in growing._followed.values() for one in found.pending]
        assert max(reached) - min(reached) <= 5
    assert growing.horizon == 2  # rank 1 may be in step 2 still
    assert [rank.rank for rank in growing.ranks] == [0, 1] and not growing.is_over


def test_a_rank_that_begins_again_at_earlier_steps_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).add_shard([batch(step) for step in range(4)])
    growing = follow(run)
    steps_given(growing)
    assert not growing.has_again
    second = HandmadeWriter(run, name="20260101-000001-host-2")
    second.add_shard([batch(2)])
    second.finish(state="recording", attempt=1)
    steps_given(growing)
    assert growing.has_again


def test_a_run_that_is_gone_or_another_one_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).add_shard([batch(0)])
    growing = follow(run)
    steps_given(growing)
    (run / "_run.json").rename(tmp_path / "kept")
    with pytest.raises(NotARunError):
        growing.look()
    make_run(tmp_path / "other", created_ns=2)
    (tmp_path / "other/_run.json").rename(run / "_run.json")
    with pytest.raises(NotARunError, match="another run"):
        growing.look()
