"""What a recording says of itself on disk: in the manifests of the run and of the writer, and in the status.

Any thread may ask. Nothing here may read a value of a tensor, or touch a file.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .capture.core import Capture
from .capture.events import Events
from .capture.host import work_of_hooks
from .capture.optimizers import OptimizerWatch
from .capture.root import Root
from .capture.topology import Topology
from .config import Loaded
from .native import in_force


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What stays as it was at the start of a recording, and how to put it into words."""

    topology: Topology
    loaded: Loaded
    process: Mapping[str, Any]
    """As `processes.own_process` says."""
    started_ns: int
    by_flag: bool
    """Whether the environment asked for the recording, and not the program."""

    def run(self, run_id: str) -> dict[str, Any]:
        """What `_run.json` says."""
        return {
            "run_id": run_id,
            "name": self.loaded.settings.name or _default_name(self.started_ns),
            "world_size": self.topology.world_size,
            "created_ns": self.started_ns,
            "asked": {item.name: item.value for item in self.loaded.explain() if item.source != "default"},
        }

    def writer(self, capture: Capture, optimizers: OptimizerWatch | None, events: Events) -> dict[str, Any]:
        """What `_writer.json` says, but for what the writer knows."""
        here = self.topology
        return {
            **self._identity(),
            "local_rank": here.local_rank,
            "node_rank": here.node_rank,
            "world_size": here.world_size,
            "versions": {"recorder": __version__, "python": platform.python_version(), "torch": torch.__version__},
            "step_source": capture.clock.source,
            "settings": {e.name: {"value": e.value, "source": e.source} for e in self.loaded.explain()},
            "native": in_force(self.loaded.settings.native),
            "hooks": work_of_hooks(self.loaded.settings, capture.pool.capacity_bytes),
            "rules": [rule.text for rule in self.loaded.settings.rules],
            "pool_bytes": capture.pool.capacity_bytes,
            "pool_peak_bytes": capture.pool.peak_bytes,
            "waited_s": round(capture.pool.waited_s, 3),
            "roots": [_describe_root(root) for root in capture.past_roots + capture.roots],
            "optimizers": optimizers.names() if optimizers is not None else [],
            "events": events.as_list(),
            "autoload": self.by_flag,
        }

    def status(self, capture: Capture) -> dict[str, Any]:
        """What `_status.json` says, but for what the writer knows."""
        pool = capture.pool
        return {
            **self._identity(),
            "interval_s": self.loaded.settings.status_interval_s,
            "step": capture.clock.step,
            "pool_bytes": pool.capacity_bytes,
            "pool_used_bytes": pool.used_bytes,
            "pool_peak_bytes": pool.peak_bytes,
            "waited_s": round(pool.waited_s, 3),
            "longest_wait_s": round(pool.longest_wait_s, 3),
        }

    def _identity(self) -> dict[str, Any]:
        here = self.topology
        return {
            "rank": here.rank,
            **self.process,
            "attempt": here.attempt,
            "started_ns": self.started_ns,
        }


def _default_name(started_ns: int) -> str:
    """After the program and the time of its start: ``train-20261123-051423``, in local time."""
    script = Path(next(iter(sys.argv), ""))
    stem = script.parent.name if script.stem == "__main__" else script.stem
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", stem).lstrip("._=+-")[:60]
    return f"{plain or 'python'}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_ns / 1e9))}"


def _describe_root(root: Root) -> dict[str, Any]:
    facts = {name: value for name, value in root.facts.items() if value is not None}
    return {"name": root.name, "class": root.class_name, **facts, "modules": root.described}
