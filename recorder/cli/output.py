"""Owns what reaches a terminal or a pipe: tables, JSON, progress bars, one-line errors.

Every text that comes from a file passes `printable`: it must never bring a control sequence, or markup, to a terminal.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAX_CELL = 200
_MAX_DEPTH = 50
"""Levels of a JSON document; what a stranger's manifest nests deeper is left out."""
_DASH = "-"
_COLORS = {"ok": "green", "note": "yellow", "missing": "bold red", "fault": "bold red"}
_MIN_PROSE = 24
_MIN_TEXT = 8
_MAX_PIECE = 24
"""Characters that a column keeps when it is folded."""
_PIECES = re.compile(r"[^\s./_,:=-]+[\s./_,:=-]*|[\s./_,:=-]+")
"""Of a path or a name: where it may be folded."""
_PIPE_LINES = 100
_MAX_WIDTH = 10_000


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
    """Rows of texts: fitted to the terminal or to ``COLUMNS``, else as aligned plain text, complete, in a pipe."""

    columns: Sequence[Column]
    rows: list[list[str]]
    title: str = ""
    subtitle: str = ""

    def print(self) -> None:
        """Print to stdout."""
        shown = [[printable(cell) or _DASH for cell in row] for row in self.rows]
        width = _pipe_width()
        if sys.stdout.isatty():
            from rich.console import Console

            console = Console(highlight=False, soft_wrap=False)
            for piece in self._fitted(shown, console.width):
                console.print(piece)
        elif width:
            from rich.console import Console

            console = Console(highlight=False, soft_wrap=False, width=width, height=_PIPE_LINES)
            with console.capture() as captured:
                for piece in self._fitted(shown, width):
                    console.print(piece)
            for line in captured.get().splitlines():
                print(line.rstrip())
        else:
            self._print_plain(shown)

    def fitted(self, width: int) -> list[Any]:
        """What rich shows of it on a terminal of this width, piece by piece."""
        return self._fitted([[printable(cell) or _DASH for cell in row] for row in self.rows], width)

    def _fitted(self, rows: list[list[str]], width: int) -> list[Any]:
        """With lines; else without; else folded, without the columns that matter least, which are named."""
        from rich.text import Text

        cells_of = list(zip(*rows, strict=True)) or [()] * len(self.columns)
        dull = [
            number
            for number, column in enumerate(self.columns)
            if cells_of[number] and column.dull is not None and set(cells_of[number]) == {column.dull}
        ]
        measured = {
            number: _Measured.of(column, cells_of[number])
            for number, column in enumerate(self.columns)
            if number not in dull
        }
        widths = _fit(measured, width)
        kept = list(widths)
        titles = ((self.title, "bold"), (self.subtitle, ""))
        pieces: list[Any] = [Text(printable_line(title), style=style) for title, style in titles if title]
        fits = sum(measured[number].natural for number in kept) + 3 * len(kept) - 1 <= width
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
            table.add_row(*(Text(_folded(row[number], self.columns[number], widths[number])) for number in kept))
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


class _Measured(NamedTuple):
    """How wide a column may be, in characters."""

    column: Column
    natural: int
    of_words: int
    """With its title folded between words."""
    least: int
    """With its cells folded, too, where they may be."""

    @classmethod
    def of(cls, column: Column, cells: Sequence[str]) -> _Measured:
        from rich.cells import cell_len

        def widest(texts: Iterable[str]) -> int:
            return max(map(cell_len, texts), default=0)

        whole = widest(cells)
        of_words = max(widest(column.title.split()), whole)
        least = of_words
        if column.is_prose:
            least = max(widest(word for cell in cells for word in cell.split()), _MIN_PROSE)
        elif not column.is_number and not column.is_whole:
            pieces = widest(piece.rstrip() for cell in cells for piece in _PIECES.findall(cell))
            least = max(min(pieces, _MAX_PIECE), _MIN_TEXT, widest(column.title.split()))
        return cls(column, max(cell_len(column.title), whole), of_words, min(least, of_words))


def _fit(measured: dict[int, _Measured], width: int) -> dict[int, int]:
    """Widths by column, for lines with gaps of two, which no word or number is broken by.

    Titles are folded, then prose; then columns are left out that may be, then texts are folded; and where all of that
    is not enough columns are left out from the right.
    """
    kept = dict(measured)
    while True:
        widths = {number: one.natural for number, one in kept.items()}
        _narrow(widths, {number: one.of_words for number, one in kept.items()}, width)
        _narrow(widths, {number: one.least for number, one in kept.items() if one.column.is_prose}, width)
        droppable = [number for number, one in kept.items() if one.column.drop]
        if _line_width(widths) <= width or not droppable:
            break
        del kept[max(droppable, key=lambda number: kept[number].column.drop)]
    _narrow(widths, {number: one.least for number, one in kept.items()}, width)
    while _line_width(widths) > width and len(widths) > 1:
        del widths[max(widths)]
    return {number: min(found, width) for number, found in widths.items()}


def _narrow(widths: dict[int, int], leasts: dict[int, int], width: int) -> None:
    """Take what a line is too long from the widest of some columns, each down to its least."""
    for number in sorted(leasts, key=lambda number: -widths[number]):
        excess = max(_line_width(widths) - width, 0)
        widths[number] = max(widths[number] - excess, min(widths[number], leasts[number]))


def _line_width(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _folded(cell: str, column: Column, width: int) -> str:
    """A text on several lines, each at most so wide, cut where a path or a name has its joints."""
    from rich.cells import cell_len

    if column.is_prose or cell_len(cell) <= width:
        return cell
    lines = [""]
    for piece in _PIECES.findall(cell):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _pipe_width() -> int | None:
    """How wide somebody wants what goes into a pipe; None: as wide as it is."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and 0 < int(columns) < _MAX_WIDTH else None


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
        text = printable_line(record.getMessage().removeprefix("recorder: "))  # which a program's own log shows
        print(f"recorder: {record.levelname.lower()}: {text}", file=sys.stderr)


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
