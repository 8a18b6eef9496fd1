"""Makes the manifests of a merged run: of the run, of its units, and of the source's writers.

Must never raise over what a manifest of the source holds, which is untrusted input.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from ..format.manifest import COUNTED
from ..run.run import Run
from ..sites import FORMAT_NAME, FORMAT_VERSION

_INFORMATIVE = ("versions", "settings", "rules", "optimizers", "autoload")
_MAX_DEPTH = 50
_FORMAT = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION)}


def of_run(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `_run.json`.

    Args:
        run: the source.
        options: the path of the source, and the options of the merge.
    """
    merged_from = {"run_id": run.run_id, "created_ns": run.manifest.created_ns, **options}
    return {
        **_FORMAT,
        "run_id": run.run_id,
        "world_size": run.world_size,
        "created_ns": time.time_ns(),
        "asked": _rewritable(run.manifest.members.get("asked", {})),
        "merged_from": merged_from,
    }


def of_units(run: Run) -> dict[str, Any]:
    """Return the members that the manifests of all units share."""
    return {"run_id": run.run_id, "world_size": run.world_size, "step_source": _step_source(run)}


def of_source(run: Run) -> dict[str, Any]:
    """Return `_writer.json` of a writer without rows, with the modules, rules, events and accounts of the source."""
    informative = {
        name: next((members[name] for writer in run.writers if name in (members := writer.manifest.members)), None)
        for name in _INFORMATIVE
    }
    run.load_balances()
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
        **{name: _rewritable(value) for name, value in informative.items() if value is not None},
        "roots": _rewritable(_roots(run)),
        "events": _rewritable(_events(run)),
        **({"dumps": dumps} if (dumps := _dumps(run)) else {}),
        "merged_writers": [_account(writer) for writer in run.writers],
    }


def _rewritable(value: Any, depth: int = 0) -> Any:
    """Return untrusted JSON as it may be written again: without NaN, and with a bounded depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list) and depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {key: _rewritable(item, depth + 1) for key, item in value.items()}
    return [_rewritable(item, depth + 1) for item in value] if isinstance(value, list) else value


def _step_source(run: Run) -> str | None:
    """Return how steps were counted; ``counted`` if any writer says so, because then no attempts can be joined."""
    sources = [source for writer in run.writers if (source := writer.manifest.step_source) is not None]
    return COUNTED if COUNTED in sources else next(iter(sources), None)


def _roots(run: Run) -> list[dict[str, Any]]:
    """Return the roots, each with the modules of all writers: a pipeline's stages are one root in several processes."""
    roots: dict[str, dict[str, Any]] = {}
    modules: dict[str, dict[str, Any]] = {}
    unshared_of: dict[str, dict[str, str]] = {}
    for writer in run.writers:
        for root in writer.manifest.roots:
            known = roots.setdefault(root.name, {})
            unshared = unshared_of.setdefault(root.name, {})
            unshared |= root.unshared
            known |= {**root.members, "name": root.name, **({"unshared": unshared} if unshared else {})}
            of_root = modules.setdefault(root.name, {})
            of_root |= {module.path: dict(module.members) for module in root.modules}
    return [root | {"modules": list(modules[name].values())} for name, root in roots.items()]


def _events(run: Run) -> list[dict[str, Any]]:
    """Return the events of all writers; an event of several ranks stands once, with its ranks."""
    events: dict[tuple[str, str], dict[str, Any]] = {}
    for writer in run.writers:
        for event in writer.manifest.events:
            known = events.setdefault((event.kind, event.message), {**event.members, "ranks": []})
            if writer.rank is not None and writer.rank not in known["ranks"]:
                known["ranks"].append(writer.rank)
    return list(events.values())


def _dumps(run: Run) -> list[dict[str, Any]]:
    """Return what triggers asked for, each once for all ranks."""
    return [
        {
            "first_step": dump.first_step,
            "last_step": dump.last_step,
            "reason": dump.reason,
            "by": dump.by,
            "time_ns": dump.time_ns,
            "rows": dump.num_rows,
            "bytes": dump.num_bytes,
        }
        for dump in run.dumps
    ]


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
        **({"passed": balance.passed} if balance.passed else {}),
        "retired": {"rows": balance.retired_rows, "bytes": balance.retired_bytes},
    }
