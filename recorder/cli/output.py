"""Writes to a terminal or a pipe: replies, tables, JSON, progress bars, one-line errors.

Every text from a file passes `printable`, because untrusted input must never bring control sequences to a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from ..run.reply import Aside, LiveTable, Reply, StateLine, Table
from ..system.text import for_json, printable, printable_line

_DASH = "-"
_COLORS = {"ok": "green", "note": "yellow", "missing": "bold red", "differs": "bold red", "fault": "bold red"}
_MIN_PROSE = 24
_MIN_TEXT = 8
_MAX_JOINT_WIDTH = 24
"""The greatest width of a column whose cells are folded, unless a word of the column's title is wider."""
_JOINTS = re.compile(r"[^\s./_,:=-]+[\s./_,:=-]*|[\s./_,:=-]+")
"""Matches the parts of a path or a name between which it may be folded."""
_PIPE_LINES = 100
_MAX_WIDTH = 10_000
_BESIDE_ROWS = 7
"""The lines of a terminal that a live table leaves for titles and rules."""


def print_table(table: Table) -> None:
    """Print a table. On a terminal, or with ``COLUMNS``, it is fitted to the width. In a pipe it is complete."""
    columns = os.environ.get("COLUMNS", "")
    is_terminal, is_fitted = sys.stdout.isatty(), columns.isdecimal() and 0 < int(columns) < _MAX_WIDTH
    if not is_terminal and not is_fitted:
        _print_plain(table)
        return
    from rich.console import Console

    if is_terminal:
        console = Console(highlight=False, soft_wrap=False)
        for renderable in fitted(table, console.width):
            console.print(renderable)
    else:
        width = int(columns)
        console = Console(highlight=False, soft_wrap=False, width=width, height=_PIPE_LINES)
        with console.capture() as captured:
            for renderable in fitted(table, width):
                console.print(renderable)
        for line in captured.get().splitlines():
            print(line.rstrip())


def fitted(table: Table, width: int) -> list[Any]:
    """Return what rich prints of a table on a terminal of this width.

    If the table is too wide, its ruled lines are dropped first. Then cells are folded, and columns are left out. The
    titles of columns that are left out are named below the table.
    """
    from rich.text import Text

    rows = _printable_cells(table)
    cells_of = list(zip(*rows, strict=True)) or [()] * len(table.titles)
    dull = [number for number, name in enumerate(table.titles) if set(cells_of[number]) == {table.dull.get(name)}]
    measured = {
        number: _ColumnWidths.of(table, name, cells_of[number])
        for number, name in enumerate(table.titles)
        if number not in dull
    }
    widths = _fit(measured, table.drops, width)
    kept = list(widths)
    titles = ((table.title, "bold"), (table.subtitle, ""))
    renderables: list[Any] = [Text(printable_line(title), style=style) for title, style in titles if title]
    fits = sum(measured[number].natural for number in kept) + 3 * len(kept) - 1 <= width
    has_lines = fits and len(kept) + len(dull) == len(table.titles)
    renderables.append(_rich_table(table, rows, widths, has_lines=has_lines))
    dropped = [name for number, name in enumerate(table.titles) if number not in (*kept, *dull)]
    left_out = [f"{table.titles[number]} (all {table.dull[table.titles[number]]})" for number in dull] + dropped
    if left_out:
        renderables.append(Text(f"left out: {', '.join(left_out)}; --json has all", style="dim"))
    return renderables


def follow(live: LiveTable) -> None:
    """Show a live table on a terminal, and update it until it is complete."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    # Ctrl-C is the usual way to end a live table.
    with Live(console=console, auto_refresh=False) as shown, suppress(KeyboardInterrupt):
        for table in live.tables(lambda: max(console.height - _BESIDE_ROWS, 1)):
            shown.update(Group(*fitted(table, console.width)), refresh=True)


def _printable_cells(table: Table) -> list[list[str]]:
    return [[printable(cell) or _DASH for cell in row] for row in table.rows]


def _rich_table(table: Table, rows: list[list[str]], widths: dict[int, int], *, has_lines: bool) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    padding = (0, 1) if has_lines else (0, 2, 0, 0)
    shown = RichTable(box=box.SIMPLE_HEAD if has_lines else None, pad_edge=False, padding=padding)
    for number, width in widths.items():
        name = table.titles[number]
        justify: Literal["left", "right"] = "right" if name in table.numbers else "left"
        shown.add_column(Text(name), justify=justify, overflow="fold", width=width)
    for row in rows:
        cells = ((row[number], table.titles[number] in table.prose, width) for number, width in widths.items())
        shown.add_row(*(Text(cell if is_prose else _folded(cell, width)) for cell, is_prose, width in cells))
    return shown


def _print_plain(table: Table) -> None:
    for title in (table.title, table.subtitle):
        if title:
            print(printable_line(title))
    lines = [list(table.titles), *_printable_cells(table)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if name in table.numbers else cell.ljust(width)
            for cell, width, name in zip(line, widths, table.titles, strict=True)
        ]
        print("  ".join(cells).rstrip())


class _ColumnWidths(NamedTuple):
    title: str
    is_prose: bool
    natural: int
    of_words: int
    """The width of the column if its title is folded between words."""
    least: int
    """The width of the column if its cells are folded, too. Equal to `of_words` for columns that must not fold."""

    @classmethod
    def of(cls, table: Table, title: str, cells: Sequence[str]) -> _ColumnWidths:
        from rich.cells import cell_len

        def widest(texts: Iterable[str]) -> int:
            return max(map(cell_len, texts), default=0)

        whole = widest(cells)
        of_words = max(widest(title.split()), whole)
        least = of_words
        is_prose = title in table.prose
        if is_prose:
            least = max(widest(word for cell in cells for word in cell.split()), _MIN_PROSE)
        elif title not in table.numbers and title not in table.whole:
            parts = widest(part.rstrip() for cell in cells for part in _JOINTS.findall(cell))
            least = max(min(parts, _MAX_JOINT_WIDTH), _MIN_TEXT, widest(title.split()))
        return cls(title, is_prose, max(cell_len(title), whole), of_words, min(least, of_words))


def _fit(measured: dict[int, _ColumnWidths], drops: Sequence[str], width: int) -> dict[int, int]:
    """Return the width of each column that is kept. Gaps have two characters. No word and no number is broken.

    First titles are folded, then prose. Then columns in `drops` are left out, and then texts are folded. If the line is
    still too wide, columns are left out from the right.
    """
    kept = dict(measured)
    while True:
        widths = {number: column.natural for number, column in kept.items()}
        _narrow(widths, {number: column.of_words for number, column in kept.items()}, width)
        _narrow(widths, {number: column.least for number, column in kept.items() if column.is_prose}, width)
        droppable = [number for number, column in kept.items() if column.title in drops]
        if _line_width(widths) <= width or not droppable:
            break
        del kept[min(droppable, key=lambda number: drops.index(kept[number].title))]
    _narrow(widths, {number: column.least for number, column in kept.items()}, width)
    while _line_width(widths) > width and len(widths) > 1:
        del widths[max(widths)]
    return {number: min(natural, width) for number, natural in widths.items()}


def _narrow(widths: dict[int, int], leasts: dict[int, int], width: int) -> None:
    """Narrow columns until the line fits. The widest column is first, and each goes down to its least width."""
    for number in sorted(leasts, key=lambda number: -widths[number]):
        excess = max(_line_width(widths) - width, 0)
        widths[number] = max(widths[number] - excess, min(widths[number], leasts[number]))


def _line_width(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _folded(cell: str, width: int) -> str:
    from rich.cells import cell_len

    if cell_len(cell) <= width:
        return cell
    lines = [""]
    for part in _JOINTS.findall(cell):
        if lines[-1] and cell_len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def print_reply(reply: Reply, *, as_json: bool) -> int:
    """Print the reply of a command, as one JSON document or as text, and return the exit code."""
    if as_json:
        print_json(reply.members())
    else:
        for part in reply.parts():
            if isinstance(part, Table):
                print_table(part)
            elif isinstance(part, LiveTable):
                follow(part) if sys.stdout.isatty() else print_table(next(part.tables(lambda: sys.maxsize)))
            elif isinstance(part, StateLine):
                say_state(*part)
            elif isinstance(part, Aside):
                print(printable_line(part.text), file=sys.stderr)
            else:
                say(part)
    return reply.exit_code() if callable(reply.exit_code) else reply.exit_code


def say(text: str) -> None:
    """Print one line of text on stdout at once, also in a pipe."""
    print(printable_line(text), flush=True)


def say_state(state: str, text: str) -> None:
    """Print one line that begins with a state, in the colour of the state on a terminal."""
    color = _COLORS.get(state)
    if color is None or not sys.stdout.isatty():
        say(f"{state:8}{text}")
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(f"{state:8}", style=color) + Text(printable_line(text)))


def print_json(value: object) -> None:
    """Print one JSON document on stdout, in ASCII, with null for NaN and infinities."""
    print(json.dumps(for_json(value), indent=2, allow_nan=False))


@contextmanager
def progress(title: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal. Yield a function that takes the number of bytes, or `unit`s, just done."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich import progress as bars
    from rich.console import Console

    done: list[bars.ProgressColumn] = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    if unit:
        done = [bars.MofNCompleteColumn(), bars.TextColumn(unit)]
    columns = [bars.TextColumn(title), bars.BarColumn(), *done, bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class LineHandler(logging.Handler):
    """Prints each warning and each note of the library as one line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable_line(record.getMessage())
        word = getattr(record, "word", record.levelname.lower())
        print(f"recorder: {word}: {text}", file=sys.stderr)
