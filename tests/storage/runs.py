"""A run whose payloads are most of it, made by hand: two data-parallel ranks, 24 steps, some 30 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run
from tests.rigs.merging import roots

NUM_RANKS = 2
NUM_STEPS = 24
_STEPS_PER_BATCH = 4
_BATCHES_PER_SHARD = 3


def make_large_run(path: Path) -> Path:
    """Each rank with two indexed shards of three batches, each of some 2.5 MB, and a shard of statistics."""
    run = make_run(path)
    for rank in range(NUM_RANKS):
        writer = HandmadeWriter(run, rank)
        rows = [_rows(step, rank) for step in range(NUM_STEPS)]
        steps = range(0, NUM_STEPS, _STEPS_PER_BATCH)
        batches = [[row for some in rows[n : n + _STEPS_PER_BATCH] for row in some] for n in steps]
        for start in range(0, len(batches), _BATCHES_PER_SHARD):
            writer.add_shard(batches[start : start + _BATCHES_PER_SHARD])
        losses: list[Row] = [
            make_row(
                10 * step + 9, np.float64(1 / (step + 1)), encoding=None, step=step, rank=rank, micro_step=None,
                module_path="", site="scalar", name="loss",
            )
            for step in range(NUM_STEPS)
        ]  # fmt: skip
        writer.add_shard([losses], kind="stats")
        writer.finish(roots=roots())
    return run


def _rows(step: int, rank: int) -> list[Row]:
    own: dict[str, Any] = {"step": step, "rank": rank, "fingerprint": f"{step:016x}"}
    apart = own | {"fingerprint": f"{rank + 1:08x}{step:08x}"}
    of_rank, of_all = np.random.default_rng([step, rank]), np.random.default_rng(step)
    activation = of_rank.standard_normal((256, 400), np.float32)
    gradient = of_all.standard_normal((128, 400), np.float32)
    return [
        make_row(10 * step, activation[:, :1].copy(), module_path="", site="input", name="x", **apart),
        make_row(10 * step + 1, activation, **apart),
        make_row(10 * step + 2, gradient, site="grad", name="weight", **own | {"micro_step": None}),
    ]
