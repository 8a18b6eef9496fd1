"""Owns what reaches a terminal or a pipe: tables, JSON, progress bars, one-line errors.

Every text that comes from a file passes `printable`: it must never bring a control sequence, or markup, to a terminal.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

MAX_CELL = 200
_DASH = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    is_number: bool = False
    """Numbers stand right."""


@dataclass(slots=True)
class Table:
    """Rows of texts, shown by rich on a terminal and as aligned plain text in a pipe."""

    columns: Sequence[Column]
    rows: list[list[str]]
    title: str = ""

    def print(self) -> None:
        """Print to stdout."""
        shown = [[printable(cell) or _DASH for cell in row] for row in self.rows]
        if sys.stdout.isatty():
            self._print_rich(shown)
        else:
            self._print_plain(shown)

    def _print_rich(self, rows: list[list[str]]) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for column in self.columns:
            table.add_column(Text(column.title), justify="right" if column.is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console = Console(highlight=False, soft_wrap=False)
        if self.title:
            console.print(Text(printable(self.title), style="bold"))
        console.print(table)

    def _print_plain(self, rows: list[list[str]]) -> None:
        if self.title:
            print(printable(self.title))
        lines = [[column.title for column in self.columns], *rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ]
            print("  ".join(cells).rstrip())


def printable(text: object) -> str:
    """A text of a stranger without anything that a terminal would obey, on one line, of bounded length."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
    return shown if len(shown) <= MAX_CELL else shown[: MAX_CELL - 3] + "..."


def say(text: str) -> None:
    """One line for people on stdout."""
    print(printable_line(text))


def printable_line(text: object) -> str:
    """Like `printable`, of any length."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def print_json(value: object) -> None:
    """One JSON document on stdout; ASCII only, and without NaN, which JSON does not have."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on stderr, where that is a terminal; yields what to call with bytes done."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class LineHandler(logging.Handler):
    """Shows what the library warns of: one line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        print(f"recorder: {record.levelname.lower()}: {printable_line(record.getMessage())}", file=sys.stderr)


def number(value: float | int | None) -> str:
    """A statistic in few characters."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value}"
    return f"{value:.4g}"


def size(num_bytes: int) -> str:
    """Bytes for people: 1.5 MB is 1,500,000."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def moment(time_ns: int) -> str:
    """A wall clock time in local time; empty for none."""
    try:
        return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S") if time_ns > 0 else ""
    except (OverflowError, OSError, ValueError):
        return ""


def span(numbers: Sequence[int]) -> str:
    """Numbers as a range: ``0..100 (57)`` where some between are missing."""
    if not numbers:
        return ""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    gaps = "" if last - first + 1 == len(numbers) else f" ({len(numbers)})"
    return f"{first}..{last}{gaps}"
