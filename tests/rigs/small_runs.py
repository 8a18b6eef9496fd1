"""Runs by hand for the tests of reading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.read.handmade import HandmadeWriter, Row, make_parts, make_ref, make_row, make_run


def payload_rows(rank: int = 0, first_seq: int = 0) -> list[Row]:
    """Rows of every encoding: steps 0 to 3 plain, 4 and 5 compressed, 6 a ref to 5, 7 in three parts."""
    rng = np.random.default_rng(rank)

    def values() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return rng.standard_normal((3, 5)).astype(np.float32)

    rows = [make_row(first_seq + step, values(), step=step, rank=rank) for step in range(4)]
    rows += [make_row(first_seq + step, values(), step=step, rank=rank, encoding="compressed") for step in (4, 5)]
    rows.append(make_ref(first_seq + 6, rows[-1], step=6))
    return rows + make_parts(first_seq + 7, values(), 3, step=7, rank=rank)


@pytest.fixture
def run_path(tmp_path: Path) -> Iterator[Path]:
    """Two closed ranks, each with an indexed tensor shard of two batches and a statistics shard."""
    run = make_run(tmp_path / "recordings" / "first")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows = payload_rows(rank)
        writer.add_shard([rows[:4], rows[4:]])
        writer.add_shard(
            [[make_row(100 + s, step=s, rank=rank, site="grad", mean=0.5) for s in range(3)]], kind="stats"
        )
        writer.finish()
    yield run
