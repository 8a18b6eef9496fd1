"""Owns ``recorder ls``: runs of a folder, writers of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..errors import RunError
from ..read.places import Place
from ..read.run import Run, open_place, open_run
from ..read.unsealed import unsealed, unsealed_note
from ..read.which import find_folder, runs_in
from ..read.writers import RecordedWriter, load_balances
from ..units import moment, size
from .output import Column, Table, counted, print_json, printable, say, span

_STATES = ("unclosed", "recording", "closed")
"""A run is as bad as its worst writer."""


def list_path(path: str | None, *, as_json: bool) -> int:
    """Print the listing and return the exit code."""
    folder = find_folder(path)
    return _list_writers(open_run(path), as_json=as_json) if folder is None else _list_runs(folder, as_json=as_json)


def _list_runs(folder: Place, *, as_json: bool) -> int:
    """The newest last, where a terminal shows it."""
    rows, found, exit_code = [], [], 0
    for listed in runs_in(folder):
        try:
            run = open_place(listed.place)
        except RunError as error:
            exit_code = 1
            told = {"run": listed.place.name, "name": listed.name}
            found.append({**told, "state": "unreadable", "error": str(error)})
            rows.append([listed.name, "", "", "", "", "", "", f"unreadable: {error}", listed.place.name])
            continue
        summary = _summary(run)
        exit_code = exit_code or int(bool(run.problems))
        found.append(summary)
        ranks = f"{len(run.ranks)} of {run.world_size}" if run.world_size else str(len(run.ranks))
        started = moment(summary["started_ns"] or listed.created_ns)
        facts = [started, ranks, span(run.steps), str(run.num_rows), size(summary["bytes"])]
        rows.append([run.name, *facts, _losses(summary), _state(summary), run.path.name])
    if as_json:
        print_json(found)
        return exit_code
    titles = ["run", "started", "ranks", "steps", "rows", "size", "dropped", "state", "directory"]
    if all(row[0] == row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    drops = {"directory": 4, "size": 3, "rows": 2, "started": 1}
    columns = [
        Column(
            title=title,
            is_number=title in ("rows", "size"),
            is_whole=title in ("started", "ranks", "steps", "directory"),
            is_prose=title in ("dropped", "state"),
            drop=drops.get(title, 0),
        )
        for title in titles
    ]
    Table(columns, rows).print()
    return exit_code


def _summary(run: Run) -> dict[str, Any]:
    load_balances(run.writers)
    states = [writer.state for writer in run.writers]
    dropped: Counter[str] = Counter()
    for writer in run.writers:
        dropped.update(writer.balance.dropped)
    num_open_rows, num_open_files = unsealed(run)
    return {
        "run": run.path.name,
        "name": run.name,
        "run_id": run.run_id,
        "path": str(run.path),
        "started_ns": min((writer.started_ns for writer in run.writers if writer.started_ns), default=0),
        "world_size": run.world_size,
        "ranks": run.ranks,
        "steps": run.steps,
        "rows": run.num_rows,
        "bytes": sum(writer.disk_bytes for writer in run.writers),
        "dropped": dict(dropped),
        "suspect_rows": sum(writer.balance.suspect for writer in run.writers),
        "open_rows": num_open_rows,
        "open_files": num_open_files,
        "state": next((state for state in _STATES if state in states), "empty"),
        "jitter": run.jitter,
        "jitter_moved": run.jitter_moved,
        "problems": run.problems,
        "endings": run.endings,
    }


def _list_writers(run: Run, *, as_json: bool) -> int:
    summary = _summary(run)
    writers = [_describe(run, writer) for writer in run.writers]
    exit_code = int(bool(run.problems))
    if as_json:
        print_json(summary | {"writers": writers})
        return exit_code
    some = f"{len(run.ranks)} of {counted(run.world_size, 'rank')}" if run.world_size else ""
    ranks = some or counted(len(run.ranks), "rank")
    facts = [ranks, f"steps {span(run.steps) or 'none'}", counted(run.num_rows, "row"), size(summary["bytes"])]
    rows = [
        [
            "global" if writer["rank"] is None else str(writer["rank"]),
            writer["writer"],
            str(writer["attempt"]),
            moment(writer["started_ns"]),
            span(writer["steps"]),
            str(writer["rows"]),
            size(writer["bytes"]),
            _losses(writer),
            writer["state"],
            " ".join(writer["sites"]),
        ]
        for writer in (_folded(writers) if run.is_merged else writers)
    ]
    titles = ("rank", "writer", "attempt", "started", "steps", "rows", "size", "dropped", "state", "sites")
    numbers = ("rank", "attempt", "rows", "size")
    drops = {"attempt": 5, "started": 4, "size": 3, "sites": 2, "rows": 1}
    columns = [
        Column(
            title=title,
            is_number=title in numbers,
            is_whole=title in ("started", "steps", "state"),
            is_prose=title in ("sites", "dropped"),
            drop=drops.get(title, 0),
        )
        for title in titles
    ]
    Table(columns, rows, title=f"{printable(run.name)}: {', '.join(facts)}").print()
    if run.jitter:
        say(jitter_note(run))
    if note := unsealed_note(run):
        say(note)
    for ending in run.endings:
        say(ending)
    return exit_code


def jitter_note(run: Run) -> str:
    """That its training was changed on purpose, or was to be."""
    if run.jitter_moved == ():
        return f"note: jitter = {run.jitter} was asked for, and nothing of the model was moved: this run is no twin"
    return f"note: the model's inputs were moved by a last place on purpose (jitter = {run.jitter})"


def _state(summary: dict[str, Any]) -> str:
    if not summary["jitter"]:
        return str(summary["state"])
    what = " (nothing moved)" if summary["jitter_moved"] == () else ""
    return f"{summary['state']}, jitter {summary['jitter']}{what}"


def _losses(found: dict[str, Any]) -> str:
    """Dropped rows by reason, and written ones that the disk may have lost."""
    losses = [f"{reason}={count}" for reason, count in found["dropped"].items()]
    return " ".join(losses + [f"suspect={found['suspect_rows']}"] * bool(found["suspect_rows"])) or "0"


def _folded(writers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for all writers of a rank: a merge makes many, which are its units of work."""
    found: dict[int | None, dict[str, Any]] = {}
    for writer in writers:
        line = found.setdefault(writer["rank"], {**writer, "steps": [], "rows": 0, "bytes": 0, "sites": [], "num": 0})
        line["num"] += 1
        line["steps"] = sorted({*line["steps"], *writer["steps"]})
        line["sites"] = sorted({*line["sites"], *writer["sites"]})
        for name in ("rows", "bytes"):
            line[name] += writer[name]
    return [line | {"writer": f"merged, {counted(line['num'], 'writer')}"} for line in found.values()]


def _describe(run: Run, writer: RecordedWriter) -> dict[str, Any]:
    steps = writer.column("step").to_numpy()
    return {
        "rank": writer.rank,
        "writer": writer.name,
        "host": writer.manifest.get("host"),
        "pid": writer.manifest.get("pid"),
        "attempt": writer.attempt,
        "started_ns": writer.started_ns,
        "steps": [int(step) for step in np.unique(steps)],
        "rows": writer.num_rows,
        "bytes": writer.disk_bytes,
        "dropped": writer.balance.dropped,
        "retired_rows": writer.balance.retired_rows,
        "suspect_rows": writer.balance.suspect,
        "missing_rows": writer.balance.num_missing if writer.state == "unclosed" else 0,
        "state": writer.state,
        "sites": sorted(site for site in writer.column("site").unique().to_pylist() if site),
    }
