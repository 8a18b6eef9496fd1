"""The reply of a command, as a JSON document or as sentences and tables; and the tables that a notebook shows.

A reply is plain data and uses no package of a user interface: `recorder.cli.output` prints it. In the HTML tables of a
notebook, every text that comes from a file is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..sites import SITES
from ..system.text import bytes_of_setting, printable, size

if TYPE_CHECKING:  # imported late, because the command line's help needs neither numpy nor pyarrow
    from ..config import Explained
    from ..read.run import RecordedRun


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts. They are fitted to a terminal or to ``COLUMNS``, and are complete in a pipe.

    The fields from `numbers` to `dull` name columns by their titles.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    _: KW_ONLY
    numbers: Collection[str] = ()
    """The columns of numbers, which are aligned on the right and never folded."""
    whole: Collection[str] = ()
    """The columns of texts that have no meaning when cut. They are never folded."""
    prose: Collection[str] = ()
    """The columns of texts that are folded between words, before any column is left out."""
    drops: Sequence[str] = ()
    """The columns that a narrow terminal leaves out, the first one first."""
    dull: Mapping[str, str] = field(default_factory=dict)
    """For some columns a text: a terminal leaves out the column if all its cells have this text."""
    title: str = ""
    """The line above the table."""
    subtitle: str = ""
    """The line below the title."""


class StateLine(NamedTuple):
    """A line that begins with a state. A terminal shows the state in colour."""

    state: str
    """The state: ``ok``, ``note``, ``missing``, ``fault`` or another word."""
    text: str


class Aside(NamedTuple):
    """A line for people on standard error. Standard output is for the command's result."""

    text: str


class LiveTable(NamedTuple):
    """A table that a terminal redraws until it is complete or interrupted. Elsewhere it is printed once."""

    tables: Callable[[Callable[[], int]], Iterator[Table]]
    """Yields tables as time goes by. Its argument is a function that returns how many rows fit on the terminal."""


Part = str | StateLine | Aside | Table | LiveTable
Report = Callable[[int], None]
"""Takes the number of bytes that were handled since the last call. Several threads may call it."""
Progress = Callable[[str, int], AbstractContextManager[Report]]
"""Makes a `Report` function from a title and the total number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply of a command. Only `members` or `parts` is called; the function that is not called costs nothing."""

    members: Callable[[], object]
    """Returns the JSON document."""
    parts: Callable[[], Iterable[Part]]
    """Returns sentences and tables for people, in order. Each is printed as soon as it is known."""
    exit_code: int | Callable[[], int] = 0
    """0 if nothing is wrong, 1 if the command found something, 2 if it could not do everything. A function if the code
    is known only after `members` or `parts` has been used up."""


def plain(value: Any) -> Any:
    """Convert named tuples in a value, even nested ones, to dicts and lists for JSON."""
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def settings_reply(settings: Sequence[Explained]) -> Reply:
    """Return the reply of `recorder config`: the settings in force, and where each comes from."""
    return Reply(
        members=lambda: {item.name: {"value": item.value, "source": item.source, "doc": item.doc} for item in settings},
        parts=lambda: [_settings_table(settings)],
    )


def _settings_table(settings: Sequence[Explained]) -> Table:
    rows = []
    for item in settings:
        first, *others = _setting_lines(item.value, item.name)
        rows += [[item.name, first, item.source, item.doc], *(["", other, "", ""] for other in others)]
    what = "what it does"
    return Table(("setting", "value", "source", what), rows, prose=("value", what), drops=(what,))


def _setting_lines(value: Any, name: str) -> list[str]:
    """Return the lines that print a setting. A list has a line for each item. Bytes are also in a larger unit."""
    if name.endswith("_bytes") and type(value) is int:
        return ["0 (automatic)" if value == 0 and name == "pool_bytes" else bytes_of_setting(value)]
    if isinstance(value, list):
        return [str(item) for item in value] or ["none"]
    if name == "native":
        from ..native import in_force  # imported late, because few replies need numpy

        return [in_force(bool(value))]
    return [str(value) if value != "" else "(empty)"]


HEIGHT_PIXELS = 720
MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A page that a notebook displays in a sandboxed frame, from which nothing can reach the notebook."""

    title: str
    html: str = field(repr=False)
    """The complete page, as `recorder report` writes it to a file."""
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
    """Return two HTML tables: the facts in `table_rows`, and the sites that `rows` have."""
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
    """Return sites in the order of the format. Sites that the format does not know come last, by name."""
    order = {site: number for number, site in enumerate(SITES)}
    return sorted(sites, key=lambda site: (order.get(site, len(order)), site))


def _shown(text: object) -> str:
    return html.escape(printable(text), quote=True)


def span(numbers: Sequence[int]) -> str:
    """Describe ascending numbers: the first, the last and how many."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
