"""Owns ``recorder top``: a run while it is under way, one line a rank.

Live on a terminal until the run is over, else one snapshot. Opens no shard: thousands of ranks are no matter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ..format.rundir import run_name
from ..read.places import Place
from ..read.status import ENDED, RankNow, RunWatch, Status
from ..units import size
from .output import Column, Table, counted, print_json, printable

_REFRESH_S = 1.0
_OVER_AFTER_S = 15.0
"""All ranks of a run may have ended because the launcher is about to start them again."""
_BAR = 10
_BADNESS = {"killed": 0, "failed": 1, "silent": 2, "starting": 4, "recording": 4, "closed": 5}
_DROPPING = 3
_FINDINGS = ("killed", "failed", "silent")
_COLUMNS = (
    Column(title="rank", is_number=True),
    Column(title="state", is_whole=True),
    Column(title="step", is_number=True),
    Column(title="steps/s", is_number=True, drop=2),
    Column(title="MB/s", is_number=True, drop=3),
    Column(title="pool", is_whole=True, drop=4),
    Column(title="waited", is_number=True, drop=1, dull="0.0 s"),
    Column(title="dropped", is_prose=True, dull="0"),
    Column(title="size", is_number=True, drop=5),
    Column(title="disk left", is_number=True, drop=6),
)


def show_top(
    run: Place,
    manifest: dict[str, Any],
    *,
    once: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show a run until it is over, or once, and return the exit code."""
    watch, name = RunWatch(run), run_name(manifest) or run.name
    world_size = found if type(found := manifest.get("world_size")) is int else 0
    if as_json:
        ranks = watch.look()
        print_json(_document(run, ranks, world_size) | {"name": name})
    elif once or not sys.stdout.isatty():
        ranks = watch.look()
        _table(name, ranks, world_size, len(ranks)).print()
    else:
        ranks = _follow(watch, name, world_size, sleep)
    return int(any(one.state in _FINDINGS or one.status.num_dropped for one in ranks))


def _follow(watch: RunWatch, name: str, world_size: int, sleep: Callable[[float], None]) -> list[RankNow]:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    ranks = watch.look()
    until_s = time.monotonic() if _is_over(ranks) else None  # a run that was over before is shown once
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                table = _table(name, ranks, world_size, max(console.height - 7, 1))
                live.update(Group(*table.fitted(console.width)), refresh=True)
                if until_s is not None and time.monotonic() >= until_s:
                    break
                sleep(_REFRESH_S)
                ranks = watch.look()
                if not _is_over(ranks):
                    until_s = None
                elif until_s is None:
                    until_s = time.monotonic() + _OVER_AFTER_S
        except KeyboardInterrupt:
            pass  # how people leave it
    return ranks


def _is_over(ranks: Sequence[RankNow]) -> bool:
    return bool(ranks) and not any(one.num_alive for one in ranks)


def _table(name: str, ranks: list[RankNow], world_size: int, max_rows: int) -> Table:
    """All ranks in order; where they do not fit the worst and slowest, and a line for the rest."""
    shown, rest = ranks, []
    if len(ranks) > max_rows:
        by_trouble = sorted(ranks, key=_trouble)
        shown, rest = by_trouble[: max_rows - 1], by_trouble[max_rows - 1 :]
    rows = [_line(one) for one in shown]
    if rest:
        states = ", ".join(f"{count} {state}" for state, count in _count_states(rest).items())
        rows.append(["...", f"{len(rest)} more: {states}", *_line_of(rest)])
    return Table(_COLUMNS, rows, title=_headline(name, ranks, world_size), subtitle=_accounts(ranks))


def _trouble(one: RankNow) -> tuple[int, int, float, int]:
    """The worst state first, then who drops, then the slowest."""
    badness = _BADNESS.get(one.state, 0)
    if one.status.num_dropped:
        badness = min(badness, _DROPPING)
    return badness, one.status.step, one.status.steps_per_s, one.rank


def _count_states(ranks: Iterable[RankNow]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in sorted(ranks, key=_trouble):
        found[one.state] = found.get(one.state, 0) + 1
    return found


def _line(one: RankNow) -> list[str]:
    return [str(one.rank), _state(one), *_line_of([one])]


def _line_of(ranks: Sequence[RankNow]) -> list[str]:
    """The cells after the state, of one rank or of several together."""
    known = [one.status for one in ranks if one.status.has_step]
    alive = [one.status for one in ranks if one.state == "recording" and one.status.has_step]
    left = [status.free_bytes for status in known if status.free_bytes is not None]
    dropped: dict[str, int] = {}
    for one in ranks:
        for reason, count in one.status.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return [
        _between([status.step for status in known]) if known else "",
        f"{min(status.steps_per_s for status in alive):.2f}" if alive else "",
        f"{sum(status.bytes_per_s for status in alive) / 1e6:.1f}" if alive else "",
        _bar(max(map(_fill, alive))) if alive else "",
        f"{max(status.waited_s for status in known):.1f} s" if known else "",
        " ".join(f"{reason}={count}" for reason, count in dropped.items()) or "0",
        size(sum(one.status.used_bytes for one in ranks)),
        size(min(left)) if left else "",
    ]


def _state(one: RankNow) -> str:
    state = one.state
    if state == "silent":
        state = f"silent for {one.silent_s:.0f} s"
    if one.num_alive > 1:
        return f"{state} ({one.num_alive} at once)"
    return f"{state} (start {one.num_writers})" if one.num_writers > 1 else state


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
    """A line for the run as a whole."""
    if not ranks:
        return "no rank has begun yet"
    cells = _line_of(ranks)
    by_title = dict(zip((column.title for column in _COLUMNS[2:]), cells, strict=True))
    rates = f", {by_title['steps/s']} steps/s, {by_title['MB/s']} MB/s" if by_title["steps/s"] else ""
    longest_s = max(one.status.longest_wait_s for one in ranks)
    waits = f", waited {by_title['waited']} (longest {longest_s:.1f} s)" if longest_s else ""
    left = f", {by_title['disk left']} left" if by_title["disk left"] else ""
    steps = f"step {by_title['step']}" if by_title["step"] else "steps not shown"
    return f"{steps}{rates}, {by_title['size']}{left}{waits}, dropped {by_title['dropped']}"


def _document(run: Place, ranks: Sequence[RankNow], world_size: int) -> dict[str, Any]:
    return {
        "run": run.name,
        "path": str(run),
        "world_size": world_size or None,
        "is_over": _is_over(ranks),
        "states": _count_states(ranks),
        "ranks": [_describe(one) for one in ranks],
    }


def _describe(one: RankNow) -> dict[str, Any]:
    status = asdict(one.status)
    has_step = status.pop("has_step")
    rates = {"steps_per_s": one.status.steps_per_s, "bytes_per_s": one.status.bytes_per_s}
    return {
        **status,
        **rates,
        "step": one.status.step if has_step else None,
        "rank": one.rank,
        "state": one.state,
        "silent_s": one.silent_s,
        "num_writers": one.num_writers,
        "num_alive": one.num_alive,
        "is_ended": one.state in ENDED,
    }
