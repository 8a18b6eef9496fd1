"""Payloads out of a store are brought before they are asked for: several batches at once, within a bound of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recorder.read import payload
from recorder.read.payload import Payloads

NUM_SHARDS, NUM_BATCHES = 50, 2


class Rows:
    """A row in each batch of shards that lie in a store; what was read of these, in order."""

    num_rows = NUM_SHARDS * NUM_BATCHES

    def __init__(self, batch_bytes: int) -> None:
        self.asked: list[int] = []
        batch = SimpleNamespace(nbytes=batch_bytes)
        self._shards = [SimpleNamespace(path=Path("x"), read=lambda *_: batch) for _ in range(NUM_SHARDS)]

    def numbers(self, name: str) -> Any:
        return np.arange(self.num_rows) % NUM_BATCHES if name == "batch" else np.full(self.num_rows, 100)

    def shard_numbers(self, positions: Any) -> Any:
        return positions // NUM_BATCHES

    def shard_of(self, position: int) -> tuple[Any, int]:
        return self._shards[position // NUM_BATCHES], 0

    def each(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        items = list(items)
        self.asked.append(len(items))
        return [function(item) for item in items]


def _prepared(batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, Payloads]:
    rows = Rows(batch_bytes)
    monkeypatch.setattr(payload, "store_of", lambda path: rows)
    monkeypatch.setattr(payload, "_BATCH_BYTES", 10)
    monkeypatch.setattr(payload, "_MAX_REMOTE_BYTES", 10_000)
    return rows, Payloads(rows, num_writers=NUM_SHARDS)  # type: ignore[arg-type]


def test_all_that_fits_is_brought_the_first_of_each_shard_before_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, payloads = _prepared(100, monkeypatch)
    payloads.prepare(range(rows.num_rows))
    assert rows.asked == [16, 16, 16, 2] * 2


def test_what_is_larger_than_thought_ends_it_and_what_is_held_from_before_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, payloads = _prepared(400, monkeypatch)
    for positions, asked in ((range(60), [16, 14]), (range(60, 100), [16, 4, 16])):
        rows.asked.clear()
        payloads.prepare(positions)
        assert rows.asked == asked, "rounds are brought whole, and begin until 25 batches are there"
        assert len(payloads._batches) == 25
