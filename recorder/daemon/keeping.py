"""Retention at the destination: which runs go, and which never do.

Must never touch a run that may be under way, nor one with a `_keep` mark. A run leaves its name in `_pruned`, so that
no node puts it there again, and its manifest goes last: a prune that is killed finds the run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import LookupFailedError
from ..format.rundir import RUN_MANIFEST, WRITER_MANIFEST, encode_manifest
from ..run.finding import FLEET, runs_in
from ..storage.locations import location_of, store_of
from ..system.text import listed, moment, size
from .destination import Destination, StoredObject, TakenError
from .node import PRUNED, remove_from_fleet

KEEP = "_keep"
_QUIET_S = 3600.0
"""A run with an object that is younger may be under way, whatever its manifests say."""


class KeptRun(NamedTuple):
    """A run at the destination, as its listing shows it."""

    key: str
    num_bytes: int
    num_objects: int
    changed_s: float
    """When its newest object was put."""
    is_kept: bool


class PrunePlan(NamedTuple):
    """What a prune would do: a run, and why it goes or stays."""

    run: KeptRun
    goes: bool
    why: str


def list_runs(destination: Destination) -> list[KeptRun]:
    """Return all runs at a destination, the oldest first; one listing of all of it."""
    folders: dict[str, list[tuple[str, StoredObject]]] = {}
    everything = list(destination.listing(""))
    for key, _ in everything:
        folder, _, name = key.rpartition("/")
        if name == RUN_MANIFEST and folder and not folder.startswith((FLEET, PRUNED)):
            folders[folder] = []
    for key, held in everything:
        names = key.split("/")
        for stop in range(1, len(names)):
            folder = "/".join(names[:stop])
            if folder in folders:
                folders[folder].append((key, held))
                break
    runs = [
        KeptRun(
            folder,
            sum(held.size_bytes for _, held in objects),
            len(objects),
            max(held.changed_s for _, held in objects),
            any(key == f"{folder}/{KEEP}" for key, _ in objects),
        )
        for folder, objects in folders.items()
    ]
    return sorted(runs, key=lambda run: run.changed_s)


def plan_prune(
    destination: Destination,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    names: Sequence[str] = (),
    now_s: float | None = None,
) -> list[PrunePlan]:
    """Return what goes by age, by the bytes that may stay (the oldest go first), or by name.

    Raises:
        LookupFailedError: a name is that of no run.
    """
    now_s = time.time() if now_s is None else now_s
    runs = list_runs(destination)
    for name in names:
        if name not in {run.key for run in runs}:
            raise LookupFailedError(
                f"{destination.url}/{name}: no such run; `recorder ls {destination.url}` lists them"
            )
    left_bytes = sum(run.num_bytes for run in runs)
    plans = []
    for run in runs:
        age = f"changed {moment(int(run.changed_s * 1e9))}"
        if run.key in names:
            why = "named"
        elif older_than_s is not None and now_s - run.changed_s > older_than_s:
            why = age
        elif max_bytes is not None and left_bytes > max_bytes:
            why = f"the oldest of {size(left_bytes)}"
        else:
            plans.append(PrunePlan(run, False, age))
            continue
        if run.is_kept:
            plans.append(PrunePlan(run, False, f"has a {KEEP} mark"))
        elif now_s - run.changed_s < _QUIET_S:
            plans.append(PrunePlan(run, False, "may be under way: it has changed within the last hour"))
        else:
            left_bytes -= run.num_bytes
            plans.append(PrunePlan(run, True, why))
    return plans


def prune(destination: Destination, run: KeptRun) -> bool:
    """Remove a run there; return False where it has changed since it was listed, or was marked, and stays."""
    before = dict(destination.listing(f"{run.key}/"))
    if f"{run.key}/{KEEP}" in before or max((one.changed_s for one in before.values()), default=0) > run.changed_s:
        return False
    with contextlib.suppress(TakenError):  # an earlier prune of it was killed
        destination.put_if(f"{PRUNED}/{run.key}.json", encode_manifest({"time_ns": time.time_ns()}), None)
    last = f"{run.key}/{RUN_MANIFEST}"
    manifests = [key for key in before if key.endswith(f"/{WRITER_MANIFEST}")]
    data = [key for key in before if key != last and key not in manifests]
    for keys in (data, manifests, [last]):
        if keys:
            destination.delete(keys)
    remove_from_fleet(destination, run.key)
    return True


def find_key(destination: Destination, typed: str) -> str:
    """Return the directory of the run that was typed: that directory, or a name or the beginning of one.

    A name of several runs is refused, because what is asked for may remove the run.

    Raises:
        LookupFailedError: no run, or more than one, is called so.
    """
    folder, _, name = typed.rpartition("/")
    if name and destination.get(f"{typed}/{RUN_MANIFEST}") is not None:
        return typed
    above = location_of(f"{destination.url}/{folder}" if folder else destination.url)
    runs = runs_in(above, without=(FLEET, PRUNED)) if name and store_of(above).is_directory(above) else []
    matches = [run for run in runs if name in run.names]
    matches = matches or [run for run in runs if any(one.startswith(name) for one in run.names)]
    if not matches:
        raise LookupFailedError(f"{destination.url}/{typed}: no such run; `recorder ls {destination.url}` lists them")
    keys = [f"{folder}/{run.location.name}" if folder else run.location.name for run in matches]
    if len(keys) > 1:
        raise LookupFailedError(
            f"{destination.url}/{typed}: {len(keys)} runs begin so; type the directory of one: {listed(keys)}"
        )
    return keys[0]


def set_keep(destination: Destination, key: str, *, is_kept: bool) -> None:
    """Put or remove the mark that keeps a run from every prune.

    Raises:
        LookupFailedError: there is no such run.
    """
    if destination.get(f"{key}/{RUN_MANIFEST}") is None:
        raise LookupFailedError(f"{destination.url}/{key}: no such run; `recorder ls {destination.url}` lists them")
    if is_kept:
        with contextlib.suppress(TakenError):  # it is marked
            destination.put_if(f"{key}/{KEEP}", b"", None)
    else:
        destination.delete([f"{key}/{KEEP}"])
