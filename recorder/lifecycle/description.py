"""Describes a recording on disk: the manifests of the run and of the writer, and the status.

Any thread may call. Nothing here may read the elements of a tensor, or touch a file.
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

from ..capture.core import Capture
from ..capture.hooks.root import Root
from ..capture.marks import process_groups
from ..capture.optimizer import OptimizerHooks
from ..capture.topology import JobRank
from ..config import Loaded
from ..native import in_force
from ..system.log import Events
from .commands import Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The facts that a recording keeps from its start, and the manifests made from these facts."""

    version: str
    topology: JobRank
    loaded: Loaded
    process: Mapping[str, Any]
    """The members that `processes.own_process` returns."""
    started_ns: int
    by_flag: bool
    """True if ``RECORDER=1`` asked for the recording, False if the program did."""

    def run(self, run_id: str) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "name": self.loaded.settings.name or _default_name(self.started_ns),
            "world_size": self.topology.world_size,
            "created_ns": self.started_ns,
            "asked": {item.name: item.value for item in self.loaded.explain() if item.source != "default"},
        }

    def writer(
        self, capture: Capture, optimizers: OptimizerHooks | None, events: Events, commands: Commands
    ) -> dict[str, Any]:
        """Return the content of `_writer.json`, to which the writer adds its own members."""
        topology = self.topology
        return {
            **self._identity(),
            "local_rank": topology.local_rank,
            "node_rank": topology.node_rank,
            "world_size": topology.world_size,
            "versions": {"recorder": self.version, "python": platform.python_version(), "torch": torch.__version__},
            "step_source": capture.clock.source,
            "settings": {e.name: {"value": e.value, "source": e.source} for e in self.loaded.explain()},
            "native": in_force(self.loaded.settings.native),
            "rules": [rule.text for rule in self.loaded.settings.rules],
            "pool_bytes": capture.pool.region_bytes,
            **({"ring_bytes": capture.ring.pool.capacity_bytes} if capture.ring is not None else {}),
            "pool_peak_bytes": sum(pool.peak_bytes for pool in capture.pools),
            "waited_s": round(capture.pool.waited_s, 3),
            "roots": [_describe_root(root) for root in capture.past_roots + capture.roots],
            **({"groups": groups} if (groups := process_groups()) else {}),
            "optimizers": optimizers.names() if optimizers is not None else [],
            **self.news(events, commands),
            "autoload": self.by_flag,
        }

    def news(self, events: Events, commands: Commands) -> dict[str, Any]:
        """Return the members of `_writer.json` that may still change before the last row is written."""
        return {"events": events.as_list(), "commands": [answer.members() for answer in commands.answers()]}

    def status(self, capture: Capture, commands: Commands, findings: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the content of `_status.json`, to which the writer adds its own members."""
        pool = capture.pool
        return {
            **self._identity(),
            "interval_s": self.loaded.settings.status_interval_s,
            "step": capture.clock.step,
            "pool_bytes": pool.region_bytes,
            "pool_used_bytes": sum(part.used_bytes for part in capture.pools),
            "pool_peak_bytes": sum(part.peak_bytes for part in capture.pools),
            "waited_s": round(pool.waited_s, 3),
            "longest_wait_s": round(pool.longest_wait_s, 3),
            "commands": [answer.short_members() for answer in commands.newest_answers()],
            "commands_refused": commands.num_refused,
            "findings": findings,
        }

    def _identity(self) -> dict[str, Any]:
        topology = self.topology
        return {"rank": topology.rank, **self.process, "attempt": topology.attempt, "started_ns": self.started_ns}


def _default_name(started_ns: int) -> str:
    """Return a name from the program and the local time of its start, such as ``train-20261123-051423``."""
    script = Path(next(iter(sys.argv), ""))
    stem = script.parent.name if script.stem == "__main__" else script.stem
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", stem).lstrip("._=+-")[:60]
    return f"{plain or 'python'}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started_ns / 1e9))}"


def _describe_root(root: Root) -> dict[str, Any]:
    shared_work = {name: value for name, value in root.shared_work.items() if value is not None}
    return {"name": root.name, "class": root.class_name, **shared_work, "modules": root.inventory.described}
