"""Offline runs of Weights & Biases, written with its own package, for ``wandb sync``. Loaded where they are asked for.

Nothing is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import UnsupportedError, not_installed
from ....numerics.histogram import Histogram
from ....run.run import Run

try:
    import wandb
    from PIL import Image
except ImportError as error:
    raise UnsupportedError(not_installed("--to wandb", "wandb", "wandb")) from error

_MAX_BUCKETS = 512
"""The most that W&B takes."""


@contextmanager
def open_board(folder: Path, name: str, run: Run) -> Iterator[_OfflineRun]:
    """An offline run, in the folder ``wandb`` there."""
    settings = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
        x_disable_meta=True,
    )  # fmt: skip
    started = wandb.init(
        mode="offline", dir=str(folder), project="recorder", group=run.name, name=name, reinit="create_new",
        config={"run_id": run.run_id, "world_size": run.world_size}, settings=settings,
    )  # fmt: skip
    try:
        yield _OfflineRun(started)
    finally:
        started.finish()
        for link in (folder / "wandb").iterdir():
            if link.is_symlink():  # to the run of the day, of which there may be one for each rank
                link.unlink()


class _OfflineRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def add(self, step: int, time_s: float, values: Any) -> None:
        """Log what there is of a step."""
        self._run.log({tag: _value(value) for tag, value in values.items()} | {"_timestamp": time_s}, step=step)


def _value(value: Any) -> Any:
    if isinstance(value, Histogram):
        edges, counts = value.buckets(_MAX_BUCKETS)
        return wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
    return wandb.Image(Image.fromarray(value)) if isinstance(value, np.ndarray) else value
