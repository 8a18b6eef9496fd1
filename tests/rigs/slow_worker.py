"""Preloaded by a Dask worker: every unit, and every range that is read for another process, takes a while longer, and
leaves a mark in a folder once it has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorder.merge.unit import UnitBuilder
from recorder.run.step_ranges import RangeReader

FOLDER, PAUSE_S = Path(os.environ["SLOW_WORKER_FOLDER"]), 0.7


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowed(*arguments: Any) -> Any:
        found = function(*arguments)  # of a unit all is written by now, under no name of its own
        (FOLDER / f"{os.getpid()}-{getattr(arguments[1], 'name', arguments[1])}").touch()
        time.sleep(PAUSE_S)
        return found

    return slowed


if UnitBuilder.build.__name__ != "slowed":  # Dask may load this twice
    UnitBuilder.build = slow(UnitBuilder.build)  # type: ignore[method-assign]
    RangeReader.__call__ = slow(RangeReader.__call__)  # type: ignore[method-assign]
