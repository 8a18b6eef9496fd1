"""The index of a fleet: one small document a node beside the runs in a store, so that a thousand are listed at once.

It is derived: a run that no document names is opened as any other. Must never be taken for what a run holds. The
documents are untrusted input.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ..errors import RunError
from ..storage.locations import Location, store_of
from ..storage.objects import ObjectPath

FLEET = "_fleet"
"""The folder of the documents."""
_MAX_BYTES = 16 << 20
_STATES = ("unclosed", "recording", "closed", "empty")
_QUIET_S = 300.0
"""A node that has said nothing for so long does not know any more whether a run records."""


def is_fleet(folder: Location) -> bool:
    """Whether a folder of an object store has an index; one listing, which is kept."""
    if not isinstance(folder, ObjectPath):
        return False
    return FLEET in store_of(folder).list_directory(folder, directories=True)


def fleet_runs(folder: Location) -> dict[str, dict[str, Any]]:
    """Return the summaries of the runs below a folder of an object store, by their paths in it; none without an index.

    Nodes that have parts of one run are added up.
    """
    if not is_fleet(folder):
        return {}
    store = store_of(folder)
    there = set(store.list_directory(folder, directories=True))
    location = folder / FLEET
    names = [name for name in store.list_directory(location, directories=False) if name.endswith(".json")]
    summaries: dict[str, dict[str, Any]] = {}

    def read(name: str) -> dict[str, Any]:
        with contextlib.suppress(RunError):
            return store.read_json(location / name, _MAX_BYTES)
        return {}

    for document in store.each(read, names):
        is_stale = time.time() - _count(document.get("time_ns")) / 1e9 > _QUIET_S
        runs = document.get("runs")
        for path, summary in runs.items() if isinstance(runs, dict) else ():
            if isinstance(summary, dict) and path.partition("/")[0] in there:  # else it was pruned a moment ago
                one = _checked(path, summary, is_stale)
                summaries[path] = _added(summaries[path], one) if path in summaries else one
    return summaries


def _checked(path: str, summary: Mapping[str, Any], is_stale: bool) -> dict[str, Any]:
    """Return a summary whose members are of the right kinds, whoever has written it."""
    dropped = summary.get("dropped")
    ranks = summary.get("ranks")
    state = summary.get("state")
    state = "unclosed" if state == "recording" and is_stale else state if state in _STATES else "empty"
    step = summary.get("last_step")
    return {
        "path": path,
        "name": str(summary.get("name") or path.rpartition("/")[2])[:200],
        "run_id": str(summary.get("run_id"))[:200],
        "ranks": {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set(),
        "dropped": {str(reason): _count(count) for reason, count in dropped.items()}
        if isinstance(dropped, dict)
        else {},
        "state": state,
        "last_step": step if isinstance(step, int) else None,
        **{name: _count(summary.get(name)) for name in ("created_ns", "started_ns", "world_size", "rows", "bytes")},
    }


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    reasons = one["dropped"].keys() | other["dropped"].keys()
    steps = [step for step in (one["last_step"], other["last_step"]) if step is not None]
    return {
        **one,
        "ranks": one["ranks"] | other["ranks"],
        "dropped": {reason: one["dropped"].get(reason, 0) + other["dropped"].get(reason, 0) for reason in reasons},
        "state": min(one["state"], other["state"], key=_STATES.index),
        "last_step": max(steps, default=None),
        "started_ns": min(filter(None, (one["started_ns"], other["started_ns"])), default=0),
        "created_ns": min(filter(None, (one["created_ns"], other["created_ns"])), default=0),
        "world_size": max(one["world_size"], other["world_size"]),
        "rows": one["rows"] + other["rows"],
        "bytes": one["bytes"] + other["bytes"],
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
