"""Owns what the manifests of a merged run say: of the run, of its units, and of the source's writers.

Must never raise over what a stranger's manifest holds.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from ..format.schema import FORMAT_NAME, FORMAT_VERSION
from ..read import untrusted
from ..read.run import Run
from ..read.writers import load_balances

_INFORMATIVE = ("versions", "settings", "rules", "optimizers", "autoload")
_MAX_DEPTH = 50
_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}


def of_run(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """`_run.json`.

    Args:
        run: the source.
        options: where it lies, and how it was merged.
    """
    merged_from = {"run_id": run.run_id, "created_ns": _sound(run.manifest.get("created_ns")), **options}
    return {
        **_FORMAT,
        "run_id": run.run_id,
        "world_size": run.manifest.get("world_size"),
        "created_ns": time.time_ns(),
        "asked": _sound(run.manifest.get("asked", {})),
        "merged_from": merged_from,
    }


def of_units(run: Run) -> dict[str, Any]:
    """What the manifests of all units share."""
    return {"run_id": run.run_id, "world_size": run.manifest.get("world_size"), "step_source": _step_source(run)}


def of_source(run: Run) -> dict[str, Any]:
    """`_writer.json` of a writer without rows that speaks for all of the source's: modules, rules, events, accounts."""
    informative = {
        name: next((writer.manifest[name] for writer in run.writers if name in writer.manifest), None)
        for name in _INFORMATIVE
    }
    load_balances(run.writers)
    ledger = {"observed": 0, "written": 0, "dropped": {}, "retired": {"rows": 0, "bytes": 0}}
    return {
        **_FORMAT,
        **of_units(run),
        "writer": "source",
        "rank": None,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "attempt": min((writer.attempt for writer in run.writers), default=0),
        "started_ns": min((writer.started_ns for writer in run.writers), default=0),
        "closed_ns": time.time_ns(),
        "state": "closed",
        "ledger": ledger,
        **{name: _sound(value) for name, value in informative.items() if value is not None},
        "roots": _sound(_roots(run)),
        "events": _sound(_events(run)),
        "merged_writers": [_account(writer) for writer in run.writers],
    }


def _sound(value: Any, depth: int = 0) -> Any:
    """A stranger's JSON as it may be written again: without NaN, and no deeper than anybody writes."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {key: _sound(item, depth + 1) for key, item in value.items()}
    return [_sound(item, depth + 1) for item in value] if isinstance(value, list) else value


def _step_source(run: Run) -> str | None:
    """How steps were counted; ``counted`` if any writer says so, because then no attempts can be joined."""
    found = [source for writer in run.writers if isinstance(source := writer.manifest.get("step_source"), str)]
    return "counted" if "counted" in found else next(iter(found), None)


def _roots(run: Run) -> list[dict[str, Any]]:
    """Roots by name, each with the modules of all writers: a pipeline's stages are one root in several processes."""
    roots: dict[str, dict[str, Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    for writer in run.writers:
        for root in untrusted.objects(writer.manifest.get("roots")):
            name = str(root.get("name"))
            known = roots.get(name, {})
            unshared = [one["unshared"] for one in (known, root) if isinstance(one.get("unshared"), dict)]
            roots[name] = (
                known | root | ({"unshared": {k: v for one in unshared for k, v in one.items()}} if unshared else {})
            )
            of_root = modules.setdefault(name, {})
            of_root |= {str(module.get("path")): module for module in untrusted.objects(root.get("modules"))}
    return [root | {"modules": list(modules[name].values())} for name, root in roots.items()]


def _events(run: Run) -> list[dict[str, Any]]:
    """What the recorder had to say, the same on several ranks once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for writer in run.writers:
        for event in untrusted.objects(writer.manifest.get("events")):
            known = found.setdefault((str(event.get("kind")), str(event.get("message"))), event | {"ranks": []})
            if writer.rank is not None and writer.rank not in known["ranks"]:
                known["ranks"].append(writer.rank)
    return list(found.values())


def _account(writer: Any) -> dict[str, Any]:
    balance = writer.balance
    return {
        "rank": writer.rank,
        "writer": writer.name,
        "attempt": writer.attempt,
        "state": writer.state,
        "ending": writer.ending,
        "observed": balance.observed,
        "written": balance.written,
        "dropped": balance.dropped,
        "retired": {"rows": balance.retired_rows, "bytes": balance.retired_bytes},
    }
