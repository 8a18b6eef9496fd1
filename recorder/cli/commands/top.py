"""``recorder top``: shows a run while it is recording, one line for each rank.

On a terminal the table is updated until the run is over; elsewhere it is printed once. The command opens no shard, so
that thousands of ranks cost little.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from ...run.finding import Location, RunManifest, find_run
from ...run.notes import state_word
from ...run.reply import Reply, Table, TableColumn
from ...run.status import RankNow, RunWatch, Status
from ...system.text import counted, printable, size
from ..options import RunPath
from ..output import fitted

EPILOG = "Examples: recorder top recordings    recorder top @-1 --once"

_REFRESH_S = 1.0
_OVER_AFTER_S = 15.0
"""The seconds after the end of all ranks at which a run is over: a launcher may be about to restart them."""
_BAR = 10
_BADNESS = {"killed": 0, "failed": 1, "silent": 2, "starting": 4, "recording": 4, "closed": 5}
_DROPPING = 3
_FINDINGS = ("killed", "failed", "silent")
_COLUMNS = (
    TableColumn(title="rank", is_number=True),
    TableColumn(title="state", is_whole=True),
    TableColumn(title="step", is_number=True),
    TableColumn(title="steps/s", is_number=True, drop=2),
    TableColumn(title="MB/s", is_number=True, drop=3),
    TableColumn(title="pool", is_whole=True, drop=4),
    TableColumn(title="waited", is_number=True, drop=1, dull="0.0 s"),
    TableColumn(title="dropped", is_prose=True, dull="0"),
    TableColumn(title="size", is_number=True, drop=5),
    TableColumn(title="disk left", is_number=True, drop=6),
)


def command(
    path: RunPath = None, once: Annotated[bool, typer.Option("--once", help="Show one snapshot, as in a pipe.")] = False
) -> Reply:
    """Watch a run while it records, one line a rank.

    It ends with the run, or on Ctrl-C. The column pool shows how full the memory for records on their way to disk is,
    and waited how long training waited for room in that memory. A line for several ranks shows the lowest steps/s, the
    fullest pool and the least disk left.

    Exit code 1: a rank was killed, is silent, has given up or has dropped values.
    """
    return top_reply(*find_run(path), once=once)


def top_reply(run: Location, manifest: RunManifest, *, once: bool) -> Reply:
    """Return the reply that prints a run once or, on a terminal, until the run is over."""
    watch, name, world_size = RunWatch(run), manifest.name or run.name, manifest.world_size or 0
    ranks: list[RankNow] = []

    def members() -> dict[str, Any]:
        ranks.extend(watch.look())
        return _document(run, ranks, world_size) | {"name": name}

    def parts() -> Iterator[Table]:
        if once or not sys.stdout.isatty():
            ranks.extend(watch.look())
            yield _table(name, ranks, world_size, len(ranks))
        else:
            ranks.extend(_follow(watch, name, world_size, time.sleep))

    return Reply(
        members=members,
        parts=parts,
        exit_code=lambda: int(any(rank.state in _FINDINGS or rank.status.num_dropped for rank in ranks)),
    )


def _follow(watch: RunWatch, name: str, world_size: int, sleep: Callable[[float], None]) -> list[RankNow]:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    ranks = watch.look()
    until_s = time.monotonic() if _is_over(ranks) else None  # a run that is already over is printed once
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                table = _table(name, ranks, world_size, max(console.height - 7, 1))
                live.update(Group(*fitted(table, console.width)), refresh=True)
                if until_s is not None and time.monotonic() >= until_s:
                    break
                sleep(_REFRESH_S)
                ranks = watch.look()
                if not _is_over(ranks):
                    until_s = None
                elif until_s is None:
                    until_s = time.monotonic() + _OVER_AFTER_S
        except KeyboardInterrupt:
            pass  # Ctrl-C is the usual way to end it
    return ranks


def _is_over(ranks: Sequence[RankNow]) -> bool:
    return bool(ranks) and not any(rank.num_alive for rank in ranks)


def _table(name: str, ranks: list[RankNow], world_size: int, max_rows: int) -> Table:
    """Return a table of all ranks in order. If it is too long, it has the worst and slowest and a line for the rest."""
    shown, rest = ranks, []
    if len(ranks) > max_rows:
        by_trouble = sorted(ranks, key=_trouble)
        shown, rest = by_trouble[: max_rows - 1], by_trouble[max_rows - 1 :]
    rows = [[str(rank.rank), _state(rank), *_line_of([rank])] for rank in shown]
    if rest:
        states = ", ".join(f"{count} {state}" for state, count in _count_states(rest).items())
        rows.append(["...", f"{len(rest)} more: {states}", *_line_of(rest)])
    return Table(_COLUMNS, rows, title=_headline(name, ranks, world_size), subtitle=_accounts(ranks))


def _trouble(rank: RankNow) -> tuple[int, int, float, int]:
    badness = _BADNESS.get(rank.state, 0)
    if rank.status.num_dropped:
        badness = min(badness, _DROPPING)
    return badness, rank.status.step, rank.status.steps_per_s, rank.rank


def _count_states(ranks: Iterable[RankNow]) -> dict[str, int]:
    return dict(Counter(rank.state for rank in sorted(ranks, key=_trouble)))


def _line_of(ranks: Sequence[RankNow]) -> list[str]:
    known = [rank.status for rank in ranks if rank.status.has_step]
    alive = [rank.status for rank in ranks if rank.state == "recording" and rank.status.has_step]
    left = [status.free_bytes for status in known if status.free_bytes is not None]
    dropped: Counter[str] = Counter()
    for rank in ranks:
        dropped.update(rank.status.dropped)
    return [
        _between([status.step for status in known]) if known else "",
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


def _between(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return str(first) if first == last else f"{first}..{last}"


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
    by_title = dict(zip((column.title for column in _COLUMNS[2:]), cells, strict=True))
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
    states = Counter(state_word(answer.kind, answer.state) for answer in answers)
    said = ", ".join(f"{count} {state}" for state, count in states.items())
    unheard = len(ranks) - len(answers)
    return f"{text}; command {newest} ({answers[0].kind}): {said}{f', {unheard} without an answer' if unheard else ''}"


def _document(run: Location, ranks: Sequence[RankNow], world_size: int) -> dict[str, Any]:
    return {
        "run": run.name, "path": str(run), "world_size": world_size or None, "is_over": _is_over(ranks),
        "states": _count_states(ranks), "ranks": [rank.members() for rank in ranks],
    }  # fmt: skip
