"""What a command replies: the members of one JSON document, and sentences and tables for people.

A reply is plain data and uses no package of a user interface: `recorder.cli.output` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One column of a table."""

    title: str
    is_number: bool = False
    """Numbers are aligned on the right, and are never folded."""
    is_whole: bool = False
    """True for texts that mean nothing when cut, which are never folded."""
    is_prose: bool = False
    """True for texts that are folded between words before any column is left out."""
    drop: int = 0
    """A terminal that is too narrow leaves columns out by this number, the largest first; columns with 0 stay."""
    dull: str | None = None
    """A terminal leaves the column out where every cell is this text."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts, which are fitted to a terminal or to ``COLUMNS`` and are complete in a pipe."""

    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str]]
    title: str = ""
    subtitle: str = ""


def table_of(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    whole: Collection[str] = (),
    prose: Collection[str] = (),
    drops: Sequence[str] = (),
    dull: Mapping[str, str] | None = None,
    title: str = "",
    subtitle: str = "",
) -> Table:
    """Return a table whose columns are described by their titles.

    Args:
        titles: the title of each column.
        rows: the cells.
        numbers: titles of columns of numbers.
        whole: titles of columns that are never folded.
        prose: titles of columns that are folded between words.
        drops: titles of columns that a narrow terminal leaves out, the first one first.
        dull: for each title, the text that is not worth showing where all cells are it.
        title: the line above the table.
        subtitle: the line below the title.
    """
    columns = [
        TableColumn(
            title=name,
            is_number=name in numbers,
            is_whole=name in whole,
            is_prose=name in prose,
            drop=len(drops) - drops.index(name) if name in drops else 0,
            dull=(dull or {}).get(name),
        )
        for name in titles
    ]
    return Table(columns, rows, title, subtitle)


class StateLine(NamedTuple):
    """A line that begins with a state, which has a colour on a terminal."""

    state: str
    """``ok``, ``note``, ``missing``, ``fault`` or another word."""
    text: str


class Aside(NamedTuple):
    """A line for people that goes to standard error: standard output says what was written."""

    text: str


Part = str | StateLine | Aside | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a command replies. Only one of `members` and `parts` is called, so that the other costs nothing."""

    members: Callable[[], object]
    """Returns the JSON document."""
    parts: Callable[[], Iterable[Part]]
    """Returns the sentences and tables for people, from top to bottom; each is printed as soon as it is known."""
    exit_code: int | Callable[[], int] = 0
    """0 where nothing is wrong, 1 where the command found something, 2 where it could not do all it was asked for.

    A function where that is known only after `members` or `parts` has been worked through.
    """


def plain(value: Any) -> Any:
    """Return a value with its named tuples, also nested ones, as the dicts and lists that JSON has."""
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
