"""Makes the replies of `recorder ls` (the runs of a folder, the writers of a run) and `recorder top` (the ranks).

`top` opens no shard, so that thousands of ranks cost little.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import RunError
from ..numerics.keys import array_of
from ..system.text import counted, moment, printable, size, span
from . import finding, notes
from .finding import Location, find_folder, find_run
from .reply import LiveTable, Reply, Table
from .run import RecordedWriter, Run, open_location, open_run
from .status import RankNow, RunWatch, Status, find_silent


def ls_reply(path: str | None) -> Reply:
    """Return the reply of `recorder ls` about the runs of a folder, or about the writers of a run."""
    folder = find_folder(path)
    return _writers_reply(open_run(path)) if folder is None else _runs_reply(folder)


def _runs_reply(folder: Location) -> Reply:
    rows, summaries, said, exit_code = [], [], list[str](), 0
    known = finding.fleet_runs(folder)
    for path in find_silent(folder, [path for path, one in known.items() if one["state"] == "recording"]):
        known[path]["state"] = "silent"
    for path, fleet_summary in sorted(known.items(), key=lambda item: (item[1]["created_ns"], item[0])):
        sets = {name: sorted(fleet_summary[name]) for name in ("ranks", "findings", "problems")}
        summaries.append(fleet_summary | sets | {"suspect_rows": 0})
        steps = "" if fleet_summary["last_step"] is None else f"up to {fleet_summary['last_step']}"
        rows.append(_row(summaries[-1], steps, fleet_summary["state"], path))
        said += [f"{printable(fleet_summary['name'])}: damaged: {printable(why)}" for why in sets["problems"]]
        exit_code = int(bool(said))
    for listed in finding.runs_in(folder, without={finding.FLEET, *(path.partition("/")[0] for path in known)}):
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
        state = _state_words(summary) + ", exception" * bool(run.exceptions)
        rows.append(_row(summary, span(run.steps), state, run.path.name))
    titles = ["run", "started", "ranks", "steps", "rows", "size", "dropped", "state", "directory"]
    if all(row[0] == row[-1] for row in rows):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    table = Table(
        titles, rows, numbers=("rows", "size"), whole=("started", "ranks", "steps", "directory"),
        prose=("dropped", "state"), drops=("directory", "size", "rows", "started"),
    )  # fmt: skip
    members: dict[str, Any] = {"folder": str(folder), "runs": summaries}
    if not summaries and (pruned := finding.pruned_runs(folder)):
        members["pruned"] = pruned
        said.append(finding.pruned_note(folder, pruned))
    parts = [*([table] if rows or not said else ()), *said]
    return Reply(members=lambda: members, parts=lambda: parts, exit_code=exit_code)


def _row(summary: dict[str, Any], steps: str, state: str, directory: str) -> list[str]:
    ranks, world_size = str(len(summary["ranks"])), summary["world_size"]
    started_ns, rows = summary["started_ns"] or summary.get("created_ns", 0), str(summary["rows"])
    cells = [moment(started_ns), f"{ranks} of {world_size}" if world_size else ranks, steps, rows]
    return [summary["name"], *cells, size(summary["bytes"]), _lost_rows(summary), state, directory]


def _summary(run: Run) -> dict[str, Any]:
    run.load_balances()
    dropped = sum((Counter(writer.balance.dropped) for writer in run.writers), Counter[str]())
    num_open_rows, num_open_files = notes.unsealed(run)
    return {
        "run": run.path.name, "name": run.name, "run_id": run.run_id, "path": str(run.path),
        "started_ns": run.started_ns, "world_size": run.world_size, "ranks": run.ranks, "steps": run.steps,
        "rows": run.num_all_rows, "probe_rows": run.num_all_rows - run.num_rows, "bytes": run.size_bytes,
        "dropped": dict(dropped), "suspect_rows": sum(writer.balance.suspect for writer in run.writers),
        "passed_rows": sum(writer.balance.passed for writer in run.writers),
        "dumps": list(map(notes.dump_members, run.dumps)), "open_rows": num_open_rows, "open_files": num_open_files,
        "state": state_of(run), "jitter": run.jitter, "jitter_moved": run.jitter_moved,
        "commands": [
            notes.command_members(one) | {"answers": notes.answer_members(run, one)} for one in run.commands.sound
        ],
        "proof": None if run.proof is None else {"verdict": run.proof.verdict, "text": run.proof.text},
        "problems": run.problems, "endings": run.endings,
    }  # fmt: skip


def state_of(run: Run) -> str:
    """Return the worst state of the run's writers."""
    states = {writer.state for writer in run.writers}
    return next((one for one in ("unclosed", "recording", "closed") if one in states), "empty")


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
    yield Table(
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
    yield from notes.raised(run)


def _state_words(summary: dict[str, Any]) -> str:
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
    """Return one entry for each rank of a merged run. A merge makes many writers, one for each unit of work."""
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
    steps = array_of(writer.column("step"))
    return {
        "rank": writer.rank, "writer": writer.name, "host": writer.manifest.host or None,
        "pid": writer.manifest.pid or None, "attempt": writer.attempt, "started_ns": writer.started_ns,
        "steps": [int(step) for step in np.unique(steps)], "rows": writer.num_rows, "bytes": writer.size_bytes,
        "dropped": writer.balance.dropped, "retired_rows": writer.balance.retired_rows,
        "suspect_rows": writer.balance.suspect, "passed_rows": writer.balance.passed,
        "missing_rows": writer.balance.num_missing if writer.state == "unclosed" else 0, "state": writer.state,
        "sites": sorted(site for site in writer.column("site").unique().to_pylist() if site),
    }  # fmt: skip


_REFRESH_S = 1.0
_OVER_AFTER_S = 15.0
"""A run counts as over this many seconds after all ranks have ended. Earlier, a launcher may still restart them."""
_BAR = 10
_BADNESS = {"killed": 0, "failed": 1, "silent": 2, "starting": 4, "recording": 4, "closed": 5}
_DROPPING = 3
_FINDINGS = ("killed", "failed", "silent")
_TITLES = ("rank", "state", "step", "steps/s", "MB/s", "pool", "waited", "dropped", "size", "disk left")


def top_reply(path: str | None, *, once: bool) -> Reply:
    """Return the reply of `recorder top`. A terminal shows it until the run is over, except with `once`."""
    location, manifest = find_run(path)
    top = RanksTop(location, manifest.name or location.name, manifest.world_size or 0)
    return Reply(
        members=top.members,
        parts=lambda: [next(top.tables()) if once else LiveTable(top.tables)],
        exit_code=lambda: int(any(rank.state in _FINDINGS or rank.status.num_dropped for rank in top.ranks)),
    )


class RanksTop:
    """The ranks of a run as they were last seen, and the tables that show them."""

    def __init__(self, run: Location, name: str, world_size: int) -> None:
        self.ranks: list[RankNow] = []
        self._watch, self._name, self._world_size = RunWatch(run), name, world_size

    def members(self) -> dict[str, Any]:
        run, self.ranks = self._watch.run, self._watch.look()
        return {
            "run": run.name, "path": str(run), "world_size": self._world_size or None, "is_over": _is_over(self.ranks),
            "states": _count_states(self.ranks), "ranks": [rank.members() for rank in self.ranks], "name": self._name,
        }  # fmt: skip

    def tables(
        self, max_rows: Callable[[], int] = lambda: sys.maxsize, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[Table]:
        """Yield a table of the ranks now, and then one each second until the run is over."""
        self.ranks = self._watch.look()
        until_s = time.monotonic() if _is_over(self.ranks) else None  # a run that is already over is shown once
        while True:
            yield _table(self._name, self.ranks, self._world_size, max_rows())
            if until_s is not None and time.monotonic() >= until_s:
                return
            sleep(_REFRESH_S)
            self.ranks = self._watch.look()
            if not _is_over(self.ranks):
                until_s = None
            elif until_s is None:
                until_s = time.monotonic() + _OVER_AFTER_S


def _is_over(ranks: Sequence[RankNow]) -> bool:
    return bool(ranks) and not any(rank.num_alive for rank in ranks)


def _table(name: str, ranks: list[RankNow], world_size: int, max_rows: int) -> Table:
    """Return a table of all ranks in order. If they are too many, show the worst and slowest and a summary."""
    shown, rest = ranks, []
    if len(ranks) > max_rows:
        by_trouble = sorted(ranks, key=_trouble)
        shown, rest = by_trouble[: max_rows - 1], by_trouble[max_rows - 1 :]
    rows = [[str(rank.rank), _state(rank), *_line_of([rank])] for rank in shown]
    if rest:
        states = ", ".join(f"{count} {state}" for state, count in _count_states(rest).items())
        rows.append(["...", f"{len(rest)} more: {states}", *_line_of(rest)])
    return Table(
        _TITLES, rows, numbers={*_TITLES} - {"state", "pool", "dropped"}, whole=("state", "pool"), prose=("dropped",),
        drops=("disk left", "size", "pool", "MB/s", "steps/s", "waited"), dull={"waited": "0.0 s", "dropped": "0"},
        title=_headline(name, ranks, world_size), subtitle=_accounts(ranks),
    )  # fmt: skip


def _trouble(rank: RankNow) -> tuple[int, int, float, int]:
    badness = _BADNESS.get(rank.state, 0)
    if rank.status.num_dropped:
        badness = min(badness, _DROPPING)
    return badness, rank.status.step, rank.status.steps_per_s, rank.rank


def _count_states(ranks: Iterable[RankNow]) -> dict[str, int]:
    return dict(Counter(rank.state for rank in sorted(ranks, key=_trouble)))


def _line_of(ranks: Sequence[RankNow]) -> list[str]:
    known = [rank.status for rank in ranks if rank.status.has_step]
    steps = [status.step for status in known]
    alive = [rank.status for rank in ranks if rank.state == "recording" and rank.status.has_step]
    left = [status.free_bytes for status in known if status.free_bytes is not None]
    dropped = sum((Counter(rank.status.dropped) for rank in ranks), Counter[str]())
    return [
        span(range(min(steps), max(steps) + 1)) if known else "",
        f"{min(status.steps_per_s for status in alive):.2f}" if alive else "",
        f"{sum(status.bytes_per_s for status in alive) / 1e6:.1f}" if alive else "",
        _bar(max(map(_fill, alive))) if alive else "",
        f"{max(status.waited_s for status in known):.1f} s" if known else "",
        " ".join(f"{reason}={count}" for reason, count in dropped.items()) or "0",
        size(sum(rank.status.used_bytes for rank in ranks)),
        size(min(left)) if left else "",
    ]


def _state(rank: RankNow) -> str:
    state = rank.state
    if state == "silent":
        state = f"silent for {rank.silent_s:.0f} s"
    if rank.num_alive > 1:
        return f"{state} ({rank.num_alive} at once)"
    return f"{state} (start {rank.num_writers})" if rank.num_writers > 1 else state


def _fill(status: Status) -> float:
    return status.pool_used_bytes / status.pool_bytes if status.pool_bytes else 0.0


def _bar(share: float) -> str:
    filled = min(max(round(share * _BAR), int(share > 0)), _BAR)
    return f"{'#' * filled}{'.' * (_BAR - filled)} {min(share, 9.99):4.0%}"


def _headline(name: str, ranks: Sequence[RankNow], world_size: int) -> str:
    of = f"{len(ranks)} of {counted(world_size, 'rank')}" if world_size else counted(len(ranks), "rank")
    states = ", ".join(f"{count} {state}" for state, count in _count_states(ranks).items())
    return f"{printable(name)}: {of}{': ' if states else ''}{states}"


def _accounts(ranks: Sequence[RankNow]) -> str:
    if not ranks:
        return "no rank has begun yet"
    cells = _line_of(ranks)
    by_title = dict(zip(_TITLES[2:], cells, strict=True))
    rates = f", {by_title['steps/s']} steps/s, {by_title['MB/s']} MB/s" if by_title["steps/s"] else ""
    longest_s = max(rank.status.longest_wait_s for rank in ranks)
    waits = f", waited {by_title['waited']} (longest {longest_s:.1f} s)" if longest_s else ""
    left = f", {by_title['disk left']} left" if by_title["disk left"] else ""
    steps = f"step {by_title['step']}" if by_title["step"] else "steps not shown"
    return f"{steps}{rates}, {by_title['size']}{left}{waits}, dropped {by_title['dropped']}{_told(ranks)}"


def _told(ranks: Sequence[RankNow]) -> str:
    newest = max((answer.number for rank in ranks for answer in rank.status.commands), default=None)
    refused = max((rank.status.num_commands_refused for rank in ranks), default=0)
    text = f", {counted(refused, 'file')} refused that held no command" if refused else ""
    if newest is None:
        return text
    answers = [answer for rank in ranks for answer in rank.status.commands if answer.number == newest]
    states = Counter(notes.state_word(answer.kind, answer.state) for answer in answers)
    said = ", ".join(f"{count} {state}" for state, count in states.items())
    unheard = len(ranks) - len(answers)
    return f"{text}; command {newest} ({answers[0].kind}): {said}{f', {unheard} without an answer' if unheard else ''}"
