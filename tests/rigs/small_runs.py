"""Small runs by hand: of every encoding, and one as a training leaves it that a page draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rigs.command_line import module
from tests.rigs.handmade import HandmadeWriter, Row, make_parts, make_ref, make_row, make_run


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


MODULES = ["", "stem", "blocks", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc", "head"]
NUM_STEPS = 20


def make_training(path: Path, *, factor: float = 1.0) -> Path:
    """Two ranks, twenty steps: outputs and gradients, a NaN, a hole, a loss, a filter, a feature map and attention."""
    run = make_run(path)
    for rank in range(2):
        writer = HandmadeWriter(run, rank)
        rng = np.random.default_rng(rank)
        tensors, stats = [], []
        seq = 0
        for step in range(NUM_STEPS):
            for path_of in ("stem", "blocks.0.fc", "blocks.0", "blocks.1.fc", "blocks.1", "head", ""):
                values = (
                    rng.standard_normal((2, 4)).astype(np.float32)
                    * 10.0 ** (len(path_of) % 4)
                    * (factor if step > 9 else 1)
                )
                if (path_of, step, rank) == ("head", 15, 1):
                    values[0, 0] = np.nan
                if (path_of, step) == ("blocks.0.fc", 5):
                    continue
                common: dict[str, Any] = {"step": step, "rank": rank, "module_path": path_of, "encoding": None}
                stats.append(make_row(seq, values, **common))
                stats.append(make_row(seq + 1, values / 7, site="grad", name="weight", phase="optimizer", **common))
                seq += 2
            loss = np.float64(3.0 / (step + 1))
            stats.append(
                make_row(seq, loss, step=step, rank=rank, module_path="", site="scalar", name="loss", encoding=None)
            )
            seq += 1
        filters = np.random.default_rng(2).standard_normal((4, 3, 5, 5)).astype(np.float32)  # the ranks are replicas
        tensors.append(
            make_row(seq, filters, rank=rank, module_path="stem", site="param", name="weight", phase="optimizer")
        )
        maps = rng.standard_normal((2, 6, 12, 16)).astype(np.float32)
        tensors.append(make_row(seq + 1, maps, rank=rank, module_path="stem", site="tap", name="maps"))
        shares = np.exp(rng.standard_normal((2, 3, 9, 9)))
        shares = (shares / shares.sum(-1, keepdims=True)).astype(np.float32)
        tensors.append(make_row(seq + 2, shares, rank=rank, module_path="blocks.1", site="tap", name="attention"))
        writer.add_shard([tensors])
        writer.add_shard([stats], kind="stats")
        modules = [module(one, "Net" if one == "" else "Linear") for one in MODULES]
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}], rules=["site=* keep=stats"])
    return run
