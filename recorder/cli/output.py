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
from typing import Any, Literal

MAX_CELL = 200
_MAX_DEPTH = 50
"""Levels of a JSON document; what a stranger's manifest nests deeper is left out."""
_DASH = "-"
_COLORS = {"ok": "green", "note": "yellow", "missing": "bold red", "fault": "bold red"}
_MIN_PROSE = 24
_MIN_TEXT = 8
"""Characters that a column keeps when it is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    is_number: bool = False
    """Numbers stand right, and are never folded."""
    is_whole: bool = False
    """For a text that says nothing in pieces: never folded."""
    is_prose: bool = False
    """Folded between words before any column is left out."""
    drop: int = 0
    """On a terminal that is too narrow, columns go by this number, largest first; those with 0 stay."""
    dull: str | None = None
    """On a terminal, a column that holds nothing but this is left out."""


@dataclass(slots=True)
class Table:
    """Rows of texts: fitted to the terminal, or as aligned plain text, complete, in a pipe."""

    columns: Sequence[Column]
    rows: list[list[str]]
    title: str = ""
    subtitle: str = ""

    def print(self) -> None:
        """Print to stdout."""
        shown = [[printable(cell) or _DASH for cell in row] for row in self.rows]
        if sys.stdout.isatty():
            from rich.console import Console

            console = Console(highlight=False, soft_wrap=False)
            for piece in self._fitted(shown, console.width):
                console.print(piece)
        else:
            self._print_plain(shown)

    def fitted(self, width: int) -> list[Any]:
        """What rich shows of it on a terminal of this width, piece by piece."""
        return self._fitted([[printable(cell) or _DASH for cell in row] for row in self.rows], width)

    def _fitted(self, rows: list[list[str]], width: int) -> list[Any]:
        """With lines; else without; else without the columns that matter least, which are named."""
        from rich.cells import cell_len
        from rich.text import Text

        natural = [max(map(cell_len, cells)) for cells in zip([c.title for c in self.columns], *rows, strict=True)]
        cells_of = list(zip(*rows, strict=True)) or [()] * len(self.columns)
        dull = [
            number
            for number, column in enumerate(self.columns)
            if cells_of[number] and column.dull is not None and set(cells_of[number]) == {column.dull}
        ]
        kept = [number for number in range(len(self.columns)) if number not in dull]
        words = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for cells in cells_of]
        sizes = [(number, self.columns[number], natural[number], max(words[number], _MIN_PROSE)) for number in kept]
        widths = _fit(sizes, width)
        kept = [number for number in kept if number in widths]
        titles = ((self.title, "bold"), (self.subtitle, ""))
        pieces: list[Any] = [Text(printable_line(title), style=style) for title, style in titles if title]
        fits = sum(natural[number] for number in kept) + 3 * len(kept) - 1 <= width
        has_lines = fits and len(kept) + len(dull) == len(self.columns)
        pieces.append(self._rich_table(rows, kept, widths, has_lines=has_lines))
        dropped = [column.title for number, column in enumerate(self.columns) if number not in (*kept, *dull)]
        left_out = [f"{self.columns[number].title} (all {self.columns[number].dull})" for number in dull] + dropped
        if left_out:
            pieces.append(Text(f"left out: {', '.join(left_out)}; --json has all", style="dim"))
        return pieces

    def _rich_table(self, rows: list[list[str]], kept: list[int], widths: dict[int, int], *, has_lines: bool) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        padding = (0, 1) if has_lines else (0, 2, 0, 0)
        table = RichTable(box=box.SIMPLE_HEAD if has_lines else None, pad_edge=False, padding=padding)
        for number in kept:
            column = self.columns[number]
            justify: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(Text(column.title), justify=justify, overflow="fold", width=widths[number])
        for row in rows:
            table.add_row(*(Text(row[number]) for number in kept))
        return table

    def _print_plain(self, rows: list[list[str]]) -> None:
        for title in (self.title, self.subtitle):
            if title:
                print(printable_line(title))
        lines = [[column.title for column in self.columns], *rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for line in lines:
            cells = [
                cell.rjust(width) if column.is_number else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ]
            print("  ".join(cells).rstrip())


def _fit(columns: Sequence[tuple[int, Column, int, int]], width: int) -> dict[int, int]:
    """Widths by column, for lines with gaps of two: prose is folded, then columns are dropped, then texts folded.

    Args:
        columns: number, column, its natural width, and the least to which prose is folded.
        width: of the terminal.
    """
    kept = list(columns)
    while True:
        widths = {number: natural for number, _, natural, _ in kept}
        _narrow(widths, {number: least for number, column, _, least in kept if column.is_prose}, width)
        droppable = [one for one in kept if one[1].drop]
        if _line_width(widths) <= width or not droppable:
            break
        kept.remove(max(droppable, key=lambda one: one[1].drop))
    texts = {number: _MIN_TEXT for number, column, *_ in kept if not column.is_number and not column.is_whole}
    _narrow(widths, texts, width)
    return widths


def _narrow(widths: dict[int, int], leasts: dict[int, int], width: int) -> None:
    """Take what a line is too long from the widest of some columns, each down to its least."""
    for number in sorted(leasts, key=lambda number: -widths[number]):
        excess = max(_line_width(widths) - width, 0)
        widths[number] = max(widths[number] - excess, min(widths[number], leasts[number]))


def _line_width(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def printable(text: object) -> str:
    """A text of a stranger without anything that a terminal would obey, on one line, of bounded length."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
    return shown if len(shown) <= MAX_CELL else shown[: MAX_CELL - 3] + "..."


def say(text: str) -> None:
    """One line for people on stdout."""
    print(printable_line(text))


def say_state(state: str, text: str) -> None:
    """One line that begins with a state, in the state's colour on a terminal."""
    color = _COLORS.get(state)
    if color is None or not sys.stdout.isatty():
        say(f"{state:8}{text}")
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(f"{state:8}", style=color) + Text(printable_line(text)))


def printable_line(text: object) -> str:
    """Like `printable`, of any length."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def print_json(value: object) -> None:
    """One JSON document on stdout; ASCII only, and without NaN, which JSON does not have."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (dict, list, tuple)) and depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {str(key): _finite(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, depth + 1) for item in value]
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
    return f"{value + 0.0:.4g}"  # turns -0.0 into 0.0


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 fault``, ``2 faults``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(numbers: Sequence[int]) -> str:
    """Numbers as a range: ``0..100 (57)`` where some between are missing."""
    if not numbers:
        return ""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    gaps = "" if last - first + 1 == len(numbers) else f" ({len(numbers)})"
    return f"{first}..{last}{gaps}"
