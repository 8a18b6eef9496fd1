"""Preloaded by a Dask worker: every unit and every piece takes a while longer, and says in a folder that it has begun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recorder.analyze.stats import _GlobalPieces
from recorder.merge.unit import UnitBuilder

FOLDER, PAUSE_S = Path(os.environ["SLOW_WORKER_FOLDER"]), 0.7


def slow(function: Callable[..., Any]) -> Callable[..., Any]:
    def slowed(*arguments: Any) -> Any:
        found = function(*arguments)  # of a unit all is written by now, under no name of its own
        (FOLDER / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(PAUSE_S)
        return found

    return slowed


UnitBuilder.build = slow(UnitBuilder.build)  # type: ignore[method-assign]
_GlobalPieces.__call__ = slow(_GlobalPieces.__call__)  # type: ignore[method-assign]
