"""The fleet (all nodes that ship to one destination): the name of this node, the fleet's index, and prunes.

Host names do not identify a node. Containers share them, and so do machines that were made from one image. A node's
name is chosen at random once, and stored in the folder of its runs. So a restart, a new pod and a renamed host keep the
name. `run.finding` reads the index.

A prune removes runs at the destination. It must never touch a run that may be recording, nor a run with a `_keep` mark.
A pruned run leaves its name in `_pruned`, so that no node ships it again. The run's manifest is removed last, so that
the run is found again if the prune is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..config import read_bytes
from ..errors import ConfigError, LookupFailedError, RunError, StoreError
from ..format.rundir import RUN_MANIFEST, WRITER_MANIFEST, encode_manifest, parse_json
from ..run.finding import FLEET, PRUNED, fleet_runs, runs_in
from ..run.reply import Part, Reply, Table
from ..storage.locations import location_of, store_of
from ..storage.untrusted_files import FileFacts
from ..system.text import counted, listed, moment, size
from .destination import Destination, TakenError, parse_destination
from .settings import duration_s
from .watching import Folder, RefusedError

NODE = ".recorder-node"
"""The file in a watched folder that contains the node's name. Files with a leading dot never count as foreign."""
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}-[0-9a-f]{12}")


def node_name(watched: Sequence[str]) -> str:
    """Return this node's name at the destination: its host's name and a random part.

    The name is stored in a watched folder. If no folder can keep it, the name is derived from the host's name, the
    machine's id and the folders.
    """
    host = re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename)[:100] or "node"
    for is_drawn in (False, True):
        for folder in watched:
            with contextlib.suppress(OSError, RefusedError):
                if is_drawn:
                    _draw(Path(folder) / NODE, host)
                if (name := _kept_name(folder)) is not None:
                    return name
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text()
    return f"{host}-{hashlib.sha256(repr((machine, *watched)).encode()).hexdigest()[:12]}"


def _draw(path: Path, host: str) -> None:
    """Write a new random name of the node. If several daemons create the file at once, the first one wins."""
    temporary = path.with_name(f"{NODE}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        temporary.write_text(f"{host}-{os.urandom(6).hex()}\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            if _kept_name(str(path.parent)) is None:  # else another daemon has drawn a name since this one looked
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _kept_name(folder: str) -> str | None:
    with Folder.root(folder) as opened, contextlib.suppress(FileNotFoundError), opened.open(NODE) as file:
        name = file.bytes(0, min(file.size_bytes, 200)).decode(errors="replace").strip()
        return name if _NODE_NAME.fullmatch(name) else None
    return None


class FleetDocument:
    """This node's document in the fleet's index. It has an entry for each run, even if the run has left the node."""

    def __init__(self, destination: Destination, node: str, clashes: Callable[[str], None]) -> None:
        """Make no request yet. If another daemon writes the node's document, `clashes` gets that daemon's host name."""
        self._destination = destination
        self._key = f"{FLEET}/{node}.json"
        self._clashes = clashes
        self._daemon = os.urandom(8).hex()
        """A random text, new at each start. It tells this daemon's documents from those that another daemon writes."""
        self._has_clashed = self._has_to_answer = False
        self._last: tuple[Any, Any] | None = None
        """The daemon and the time of the document that this daemon has last read or put. A prune changes neither."""
        self._e_tag: str | None = None
        self._runs: dict[str, Any] = {}
        self._has_read = False

    def is_late(self, run: str, is_recording: bool) -> bool:
        """Return True if the document lacks a run, or lists a run that has ended as still recording."""
        summary = self._runs.get(run)
        return not isinstance(summary, dict) or (summary.get("state") == "recording" and not is_recording)

    def put(self, runs: Mapping[str, Any]) -> None:
        """Put the document with these summaries of this node's runs. Do nothing if the document has them already.

        A daemon that has found another daemon's document puts its own all the same, so that the other finds it, too.
        """
        for _ in range(3):
            if not self._has_read:
                self._read()
            merged = {**self._runs, **{run: self._problems_of(run) | one for run, one in runs.items()}}
            if merged == self._runs and not self._has_to_answer:
                return
            host = os.uname().nodename
            members = {"node": host, "daemon": self._daemon, "time_ns": time.time_ns(), "runs": merged}
            try:
                self._e_tag = self._destination.put_if(self._key, encode_manifest(members), self._e_tag)
            except TakenError:  # a prune has changed the document, or another daemon has this name
                self._has_read = False
                continue
            self._runs, self._last = merged, (self._daemon, members["time_ns"])
            self._has_to_answer = False
            return

    def _problems_of(self, run: str) -> dict[str, Any]:
        """Return the damage in a run's earlier entry. Kept, as only a daemon with `--once` looks for damage."""
        before = self._runs.get(run)
        return {"problems": before["problems"]} if isinstance(before, dict) and "problems" in before else {}

    def _read(self) -> None:
        held = self._destination.get(self._key)
        self._e_tag, self._runs, self._has_read = None, {}, True
        if held is not None:
            self._e_tag = held[1]
            with contextlib.suppress(RunError):
                members = parse_json(held[0], self._key)
                runs = members.get("runs")
                self._runs = runs if isinstance(runs, dict) else {}
                before, self._last = self._last, (members.get("daemon"), members.get("time_ns"))
                is_of_another = isinstance(self._last[0], str) and self._last[0] != self._daemon
                if is_of_another and before not in (None, self._last) and not self._has_clashed:
                    self._has_clashed = self._has_to_answer = True
                    self._clashes(str(members.get("node")))


def remove_from_fleet(destination: Destination, run: str) -> None:
    """Remove a pruned run from the documents of all nodes."""
    for key, _ in destination.listing(f"{FLEET}/"):
        for _ in range(5):
            held = destination.get(key)
            if held is None:
                break
            try:
                members = parse_json(held[0], key)
            except RunError:
                break
            runs = members.get("runs")
            if not isinstance(runs, dict) or run not in runs:
                break
            del runs[run]
            with contextlib.suppress(TakenError):
                destination.put_if(key, encode_manifest(members), held[1])
                break


KEEP = "_keep"
_QUIET_S = 3600.0
"""A run with an object younger than this many seconds is not pruned. It may be recording, despite its manifests."""


class KeptRun(NamedTuple):
    """A run at the destination, as found in a listing."""

    key: str
    """The run's directory, relative to the destination."""
    num_bytes: int
    num_objects: int
    changed_s: float
    """The time at which the run's newest object was put. The `_keep` mark does not count."""
    is_kept: bool


class PrunePlan(NamedTuple):
    """What a prune does with one run: whether it is removed, and why."""

    run: KeptRun
    goes: bool
    why: str


def list_runs(destination: Destination) -> list[KeptRun]:
    """Return all runs at a destination, the oldest first, from one complete listing."""
    folders: dict[str, list[tuple[str, FileFacts]]] = {}
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
            max(held.changed_ns for key, held in objects if key != f"{folder}/{KEEP}") / 1e9,
            any(key == f"{folder}/{KEEP}" for key, _ in objects),
        )
        for folder, objects in folders.items()
    ]
    return sorted(runs, key=lambda run: run.changed_s)


def run_names(destination: Destination, keys: Sequence[str]) -> dict[str, str]:
    """Return the names of runs by their directories, from the fleet's index, or else from the runs' manifests."""
    known = {path: str(one["name"]) for path, one in fleet_runs(location_of(destination.url)).items()}
    for key in (one for one in keys if one not in known):
        held = destination.get(f"{key}/{RUN_MANIFEST}")
        with contextlib.suppress(RunError):
            known[key] = str(parse_json(held[0], key).get("name") or "") if held is not None else ""
    return {key: known.get(key) or key.rpartition("/")[2] for key in keys}


def plan_prune(
    destination: Destination,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    names: Sequence[str] = (),
    now_s: float | None = None,
) -> list[PrunePlan]:
    """Plan a prune of old runs, of the oldest runs while all runs together exceed `max_bytes`, or of named runs."""
    now_s = time.time() if now_s is None else now_s
    runs = list_runs(destination)
    for name in names:
        if name not in {run.key for run in runs}:
            raise _no_such_run(destination, name)
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
            plans.append(PrunePlan(run, False, "may be recording: the run has changed within the last hour"))
        else:
            left_bytes -= run.num_bytes
            plans.append(PrunePlan(run, True, why))
    return plans


def _no_such_run(destination: Destination, key: str) -> LookupFailedError:
    if key and destination.get(f"{PRUNED}/{key}.json") is not None:
        return LookupFailedError(f"{destination.url}/{key}: was pruned: an earlier prune has removed the run")
    return LookupFailedError(f"{destination.url}/{key}: no such run; `recorder ls {destination.url}` lists them")


def prune(destination: Destination, run: KeptRun) -> bool:
    """Remove a run at the destination. Return False, and keep it, if it was changed or marked after its listing."""
    before = dict(destination.listing(f"{run.key}/"))
    changed_s = max((one.changed_ns for one in before.values()), default=0) / 1e9
    if f"{run.key}/{KEEP}" in before or changed_s > run.changed_s:
        return False
    with contextlib.suppress(TakenError):  # an earlier prune of this run was killed before its end
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
    """Return the directory of a run at the destination. `typed` is a directory, a name, or the beginning of either.

    Raise LookupFailedError if several runs match, because the caller may remove the run.
    """
    folder, _, name = typed.rpartition("/")
    if name and destination.get(f"{typed}/{RUN_MANIFEST}") is not None:
        return typed
    above = location_of(f"{destination.url}/{folder}" if folder else destination.url)
    runs = runs_in(above, without=(FLEET, PRUNED)) if name and store_of(above).is_directory(above) else []
    matches = [run for run in runs if name in run.names]
    matches = matches or [run for run in runs if any(one.startswith(name) for one in run.names)]
    if not matches:
        raise _no_such_run(destination, typed)
    keys = [f"{folder}/{run.location.name}" if folder else run.location.name for run in matches]
    if len(keys) > 1:
        raise LookupFailedError(
            f"{destination.url}/{typed}: {len(keys)} runs begin so; type the directory of one: {listed(keys)}"
        )
    return keys[0]


def set_keep(destination: Destination, key: str, *, is_kept: bool) -> None:
    """Put or remove the mark that protects a run from every prune. Raise LookupFailedError for an unknown run."""
    if destination.get(f"{key}/{RUN_MANIFEST}") is None:
        raise _no_such_run(destination, key)
    if is_kept:
        with contextlib.suppress(TakenError):  # the run has the mark already
            destination.put_if(f"{key}/{KEEP}", b"", None)
    else:
        destination.delete([f"{key}/{KEEP}"])


def _named(action: str, to: str, runs: Sequence[str]) -> tuple[Destination, list[str]]:
    """Return the destination `to`, and the directories there of the runs that are typed."""
    if not to:
        raise ConfigError(f"{action}: needs --to, the URL of the folder with the runs")
    destination = parse_destination(to)
    if destination.path is not None and not destination.path.is_dir():
        raise LookupFailedError(f"{action}: {destination.path}: no such directory; --to names where the runs are")
    if not runs and action != "prune":
        raise LookupFailedError(f"{action}: name a run below {destination.url}")
    return destination, [find_key(destination, name.removeprefix(destination.url).strip("/")) for name in runs]


def keep_reply(to: str, runs: Sequence[str], *, is_kept: bool) -> Reply:
    """Set or remove the marks that protect runs from every prune, and return the reply of `recorder daemon keep`."""
    destination, keys = _named("keep" if is_kept else "unkeep", to, runs)
    for key in keys:
        set_keep(destination, key, is_kept=is_kept)
    said = f"{listed(keys)}: {'kept: no prune removes it' if is_kept else 'a prune may remove it again'}"
    return Reply(members=lambda: {"runs": keys, "is_kept": is_kept}, parts=lambda: [said])


def prune_reply(to: str, runs: list[str], older_than: str | None, max_bytes: str | None, *, is_wanted: bool) -> Reply:
    """Prune runs if `is_wanted`, and return the reply of `recorder daemon prune`, whose options the texts are."""
    if not (runs or older_than or max_bytes):
        raise LookupFailedError("prune: choose what to remove: --older-than TIME, --max-bytes BYTES or RUN")
    destination, names = _named("prune", to, runs)
    plans = plan_prune(
        destination,
        older_than_s=duration_s("--older-than", older_than) if older_than else None,
        max_bytes=read_bytes("--max-bytes", max_bytes) if max_bytes else None,
        names=names,
    )
    called = run_names(destination, [plan.run.key for plan in plans])
    entries: list[dict[str, Any]] = []
    exit_code = 0
    for run, goes, why in plans:
        state = "would go" if goes else "stays"
        if goes and is_wanted:
            try:
                state = "removed" if prune(destination, run) else "kept: the run was changed or marked meanwhile"
            except StoreError as error:
                state, exit_code = f"failed: {error}", 1
        facts = {"run": run.key, "name": called[run.key], "bytes": run.num_bytes, "objects": run.num_objects}
        entries.append({**facts, "state": state, "why": why})
    nothing = [f"{destination.url}: holds no runs; nothing to remove"]
    parts = partial(_prune_parts, entries, is_wanted) if entries else lambda: nothing
    return Reply(members=lambda: {"runs": entries}, parts=parts, exit_code=exit_code)


def _prune_parts(entries: Sequence[dict[str, Any]], is_wanted: bool) -> Iterator[Part]:
    titles = ["run", "all files", "size of all", "what", "why", "directory"]
    rows = [
        [one["name"], str(one["objects"]), size(one["bytes"]), one["state"], one["why"], one["run"]] for one in entries
    ]
    if all(row[0] == row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    yield Table(titles, rows, numbers=("all files", "size of all"))
    done = "removed" if is_wanted else "would go"
    gone = [one for one in entries if one["state"] == done]
    files, num_bytes = (sum(one[name] for one in gone) for name in ("objects", "bytes"))
    said = f"{counted(len(gone), 'run')} of {len(entries):,} {done}: {counted(files, 'file')} with {size(num_bytes)}"
    yield f"{said}; nothing was removed; --yes removes the runs" if gone and not is_wanted else said
