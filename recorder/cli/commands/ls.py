from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from ...errors import RunError
from ...run import notes
from ...run.finding import FLEET, Location, find_folder, fleet_runs, pruned_note, pruned_runs, runs_in
from ...run.reply import Reply, Table, table_of
from ...run.run import RecordedWriter, Run, open_location, open_run
from ...run.status import find_silent
from ...system.text import counted, moment, printable, size, span
from ..options import run_argument

EPILOG = "Examples: recorder ls recordings    recorder ls @-1 --json"

_STATES = ("unclosed", "recording", "closed")
"""The states of writers, the worst first. A run has the state of its worst writer."""


def command(
    path: Annotated[str | None, run_argument("PATH", "A run, or a folder of runs; without: RECORDER_DIR.")] = None,
) -> Reply:
    """List the runs of a folder, or the writers of a run."""
    folder = find_folder(path)
    return _writers_reply(open_run(path)) if folder is None else _runs_reply(folder)


def _runs_reply(folder: Location) -> Reply:
    rows, summaries, said, exit_code = [], [], list[str](), 0
    known = fleet_runs(folder)
    for path in find_silent(folder, [path for path, one in known.items() if one["state"] == "recording"]):
        known[path]["state"] = "silent"
    for path, fleet_summary in sorted(known.items(), key=lambda item: (item[1]["created_ns"], item[0])):
        sets = {name: sorted(fleet_summary[name]) for name in ("ranks", "findings", "problems")}
        summaries.append(fleet_summary | sets | {"suspect_rows": 0})
        steps = "" if fleet_summary["last_step"] is None else f"up to {fleet_summary['last_step']}"
        rows.append(_row(summaries[-1], steps, fleet_summary["state"], path))
        said += [f"{printable(fleet_summary['name'])}: damaged: {printable(why)}" for why in sets["problems"]]
        exit_code = int(bool(said))
    for listed in runs_in(folder, without={FLEET, *(path.partition("/")[0] for path in known)}):
        try:
            run = open_location(listed.location)
        except RunError as error:
            exit_code = 1
            names = {"run": listed.location.name, "name": listed.name}
            summaries.append({**names, "state": "unreadable", "error": str(error)})
            rows.append([listed.name, "", "", "", "", "", "", f"unreadable: {error}", listed.location.name])
            continue
        summary = _summary(run)
        if why := notes.damage(run):
            exit_code = 1
            said.append(f"{printable(run.name)}: damaged: {why}")
        summaries.append(summary)
        rows.append(_row(summary, span(run.steps), _state(summary), run.path.name))
    titles = ["run", "started", "ranks", "steps", "rows", "size", "dropped", "state", "directory"]
    if all(row[0] == row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    table = table_of(
        titles, rows, numbers=("rows", "size"), whole=("started", "ranks", "steps", "directory"),
        prose=("dropped", "state"), drops=("directory", "size", "rows", "started"),
    )  # fmt: skip
    members: dict[str, Any] = {"folder": str(folder), "runs": summaries}
    if not summaries and (pruned := pruned_runs(folder)):
        members["pruned"] = pruned
        said.append(pruned_note(folder, pruned))
    parts = [*([table] if rows or not said else ()), *said]
    return Reply(members=lambda: members, parts=lambda: parts, exit_code=exit_code)


def _row(summary: dict[str, Any], steps: str, state: str, directory: str) -> list[str]:
    ranks, world_size = str(len(summary["ranks"])), summary["world_size"]
    started_ns, rows = summary["started_ns"] or summary.get("created_ns", 0), str(summary["rows"])
    cells = [moment(started_ns), f"{ranks} of {world_size}" if world_size else ranks, steps, rows]
    return [summary["name"], *cells, size(summary["bytes"]), _lost_rows(summary), state, directory]


def _summary(run: Run) -> dict[str, Any]:
    run.load_balances()
    states = [writer.state for writer in run.writers]
    dropped: Counter[str] = Counter()
    for writer in run.writers:
        dropped.update(writer.balance.dropped)
    num_open_rows, num_open_files = notes.unsealed(run)
    return {
        "run": run.path.name,
        "name": run.name,
        "run_id": run.run_id,
        "path": str(run.path),
        "started_ns": run.started_ns,
        "world_size": run.world_size,
        "ranks": run.ranks,
        "steps": run.steps,
        "rows": run.num_all_rows,
        "probe_rows": run.num_all_rows - run.num_rows,
        "bytes": run.size_bytes,
        "dropped": dict(dropped),
        "suspect_rows": sum(writer.balance.suspect for writer in run.writers),
        "passed_rows": sum(writer.balance.passed for writer in run.writers),
        "dumps": list(map(notes.dump_members, run.dumps)),
        "open_rows": num_open_rows,
        "open_files": num_open_files,
        "state": next((state for state in _STATES if state in states), "empty"),
        "jitter": run.jitter,
        "jitter_moved": run.jitter_moved,
        "commands": [
            notes.command_members(one) | {"answers": notes.answer_members(run, one)} for one in run.commands.sound
        ],
        "proof": None if run.proof is None else {"verdict": run.proof.verdict, "text": run.proof.text},
        "problems": notes.damages(run),
        "endings": run.endings,
    }


def _writers_reply(run: Run) -> Reply:
    summary = _summary(run)
    writers = [_describe(run, writer) for writer in run.writers]
    return Reply(
        members=lambda: summary | {"writers": writers},
        parts=lambda: _writers_parts(run, summary, _folded(writers) if run.is_merged else writers),
        exit_code=int(bool(summary["problems"])),
    )


def _writers_parts(run: Run, summary: dict[str, Any], writers: list[dict[str, Any]]) -> Iterator[str | Table]:
    some = f"{len(run.ranks)} of {counted(run.world_size, 'rank')}" if run.world_size else ""
    ranks = some or counted(len(run.ranks), "rank")
    of_probe = f" ({summary['probe_rows']:,} of the probe)" if summary["probe_rows"] else ""
    num_rows = counted(summary["rows"], "row") + of_probe
    totals = [ranks, f"steps {span(run.steps) or 'none'}", num_rows, size(summary["bytes"])]
    rows = [
        [
            "global" if writer["rank"] is None else str(writer["rank"]), writer["writer"],
            str(writer["attempt"]), moment(writer["started_ns"]), span(writer["steps"]), str(writer["rows"]),
            size(writer["bytes"]), _lost_rows(writer), writer["state"], " ".join(writer["sites"]),
        ]
        for writer in writers
    ]  # fmt: skip
    yield table_of(
        ("rank", "writer", "attempt", "started", "steps", "rows", "size", "dropped", "state", "sites"),
        rows,
        numbers=("rank", "attempt", "rows", "size"),
        whole=("started", "steps", "state"),
        prose=("sites", "dropped"),
        drops=("attempt", "started", "size", "sites", "rows"),
        title=f"{printable(run.name)}: {', '.join(totals)}",
    )
    if run.jitter:
        yield notes.jitter_note(run)
    if run.proof is not None:
        yield f"recorder prove: {run.proof.text}"
    for one in notes.sent_commands(run):
        yield f"command {one.command.number}: {notes.describe(one.command)}: {'; '.join(one.lines)}"
    yield from map(notes.dump_note, run.dumps)
    if note := notes.unsealed_note(run):
        yield note
    if why := notes.damage(run):
        yield f"damaged: {why}"
    yield from run.endings


def _state(summary: dict[str, Any]) -> str:
    words = [str(summary["state"])]
    if summary["dumps"]:
        words.append(counted(len(summary["dumps"]), "dump"))
    if summary["proof"]:
        words.append(f"proved {summary['proof']['verdict']}")
    elif summary["jitter"]:
        effect = " (nothing moved)" if summary["jitter_moved"] == () else ""
        words.append(f"jitter {summary['jitter']}{effect}")
    return ", ".join(words)


def _lost_rows(summary: dict[str, Any]) -> str:
    counts = [f"{reason}={count}" for reason, count in summary["dropped"].items()]
    return " ".join(counts + [f"suspect={summary['suspect_rows']}"] * bool(summary["suspect_rows"])) or "0"


def _folded(writers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for all writers of a rank, because a merge makes a writer for each unit."""
    entries: dict[int | None, dict[str, Any]] = {}
    for writer in writers:
        empty = {**writer, "steps": [], "rows": 0, "bytes": 0, "sites": [], "num": 0}
        entry = entries.setdefault(writer["rank"], empty)
        entry["num"] += 1
        entry["steps"] = sorted({*entry["steps"], *writer["steps"]})
        entry["sites"] = sorted({*entry["sites"], *writer["sites"]})
        for name in ("rows", "bytes"):
            entry[name] += writer[name]
    return [entry | {"writer": f"merged, {counted(entry['num'], 'writer')}"} for entry in entries.values()]


def _describe(run: Run, writer: RecordedWriter) -> dict[str, Any]:
    steps = writer.column("step").to_numpy()
    return {
        "rank": writer.rank,
        "writer": writer.name,
        "host": writer.manifest.host or None,
        "pid": writer.manifest.pid or None,
        "attempt": writer.attempt,
        "started_ns": writer.started_ns,
        "steps": [int(step) for step in np.unique(steps)],
        "rows": writer.num_rows,
        "bytes": writer.size_bytes,
        "dropped": writer.balance.dropped,
        "retired_rows": writer.balance.retired_rows,
        "suspect_rows": writer.balance.suspect,
        "passed_rows": writer.balance.passed,
        "missing_rows": writer.balance.num_missing if writer.state == "unclosed" else 0,
        "state": writer.state,
        "sites": sorted(site for site in writer.column("site").unique().to_pylist() if site),
    }
