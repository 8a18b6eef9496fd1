"""The reply of a command, as one JSON document or as sentences and tables for people; and what a notebook shows.

A reply is plain data and uses no package of a user interface: `recorder.cli.output` prints it. In the HTML tables of a
notebook, every text that comes from a file is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..sites import SITES
from ..system.text import printable, size

if TYPE_CHECKING:
    from ..read.run import RecordedRun  # the import loads pyarrow, which the command line's help does not need


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """One column of a table."""

    title: str
    is_number: bool = False
    """True for numbers, which are aligned on the right and never folded."""
    is_whole: bool = False
    """True for texts that have no meaning when cut, so that they are never folded."""
    is_prose: bool = False
    """True for texts that are folded between words before any column is left out."""
    drop: int = 0
    """The order in which a narrow terminal leaves out columns, the largest number first; columns with 0 stay."""
    dull: str | None = None
    """A terminal leaves the column out if every cell is this text."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts, which are fitted to a terminal or to ``COLUMNS``, and are complete in a pipe."""

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

    `numbers`, `whole`, `prose` and `drops` are titles of columns: columns of numbers, columns that are never folded,
    columns that are folded between words, and columns that a narrow terminal leaves out, the first one first. `dull`
    maps a title to a text: the column is not worth showing if all its cells are this text. `title` is the line above
    the table, and `subtitle` the line below the title.
    """
    columns = [
        TableColumn(
            title=name, is_number=name in numbers, is_whole=name in whole, is_prose=name in prose,
            drop=len(drops) - drops.index(name) if name in drops else 0, dull=(dull or {}).get(name),
        )
        for name in titles
    ]  # fmt: skip
    return Table(columns, rows, title, subtitle)


class StateLine(NamedTuple):
    """A line that begins with a state, which has a colour on a terminal."""

    state: str
    """The state: ``ok``, ``note``, ``missing``, ``fault`` or another word."""
    text: str


class Aside(NamedTuple):
    """A line for people on standard error, because standard output has the command's result."""

    text: str


class LiveTable(NamedTuple):
    """A table that a terminal replaces until it is complete or is interrupted; elsewhere it is printed once."""

    tables: Callable[[Callable[[], int]], Iterator[Table]]
    """A function that yields tables as time goes by. Its argument says how many rows fit on the terminal at present."""


Part = str | StateLine | Aside | Table | LiveTable
Report = Callable[[int], None]
"""A function that takes the number of bytes handled since its last call; several threads may call it."""
Progress = Callable[[str, int], AbstractContextManager[Report]]
"""A function that makes a `Report` from a title and the total number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply of a command. Only one of `members` and `parts` is called, and the other function costs nothing."""

    members: Callable[[], object]
    """A function that returns the JSON document."""
    parts: Callable[[], Iterable[Part]]
    """A function that returns sentences and tables for people, in order; each is printed as soon as it is known."""
    exit_code: int | Callable[[], int] = 0
    """0 if nothing is wrong, 1 if the command found something, 2 if it could not do everything. It is a function if the
    code is known only after `members` or `parts` has been used up.
    """


def plain(value: Any) -> Any:
    """Return a value with its named tuples, even nested ones, converted to dicts and lists for JSON."""
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


HEIGHT_PIXELS = 720
MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A page that a notebook displays in a frame without an origin, from which nothing can reach the notebook."""

    title: str
    html: str = field(repr=False)
    """The complete page, as `recorder report` writes it."""
    height_pixels: int = HEIGHT_PIXELS

    def _repr_html_(self) -> str:
        title, page = html.escape(self.title, quote=True), html.escape(self.html, quote=True)
        style = f"width: 100%; height: {self.height_pixels}px; border: 0"
        return f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        return f"<Page of {self.title}: {size(len(self.html))}; a notebook shows it>"


def run_html(run: RecordedRun) -> str:
    """Return a run as HTML: its facts, and the number of rows of each site."""
    states = [writer.state for writer in run.writers]
    ranks = span(run.ranks) + (f" of {run.world_size}" if run.world_size else "")
    table_rows = {
        "run": run.run_id,
        "path": str(run.path),
        "ranks": ranks,
        "steps": span(run.steps),
        "rows": f"{run.num_rows:,}",
        "modules": f"{len(run.module_paths):,}",
        "writers": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "problems": "; ".join([*run.problems, *run.endings]),
    }
    return as_html(table_rows, run.table(["site", "step"]))


def as_html(table_rows: dict[str, str], rows: Any) -> str:
    """Return facts as an HTML table, followed by an HTML table of the sites that `rows` have."""
    lines = "".join(
        f"<tr><th>{_shown(key)}</th><td>{_shown(value)}</td></tr>" for key, value in table_rows.items() if value
    )
    return f"<table><tbody>{lines}</tbody></table>{_html_sites(rows)}"


def _html_sites(rows: Any) -> str:
    per_site = rows.group_by("site").aggregate([("step", "count"), ("step", "min"), ("step", "max")])
    of = {row["site"]: row for row in per_site.to_pylist()}
    lines = [
        (site, f"{of[site]['step_count']:,}", f"{of[site]['step_min']} to {of[site]['step_max']}")
        for site in in_order_of_sites(of)[:MAX_LISTED]
    ]
    cells = "".join("<tr>" + "".join(f"<td>{_shown(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    head = "".join(f"<th>{title}</th>" for title in ("site", "rows", "steps"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"


def in_order_of_sites(sites: Iterable[str]) -> list[str]:
    """Return sites in the order of the format, followed by sites unknown to the format, by name."""
    order = {site: number for number, site in enumerate(SITES)}
    return sorted(sites, key=lambda site: (order.get(site, len(order)), site))


def _shown(text: object) -> str:
    return html.escape(printable(text), quote=True)


def span(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people: the first, the last and how many."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
