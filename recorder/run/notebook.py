"""Runs and modules in a notebook: HTML tables, in which every text out of a file is escaped.

Must never read a payload.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..read.run import RecordedRun
from ..sites import SITES
from ..system.text import size

HEIGHT_PIXELS = 720
"""The height of a page inside a notebook."""
_MAX_TEXT = 200
MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A page that shows itself in a notebook, in a frame without an origin: nothing of it reaches the notebook."""

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
    """Return a run as HTML: what it is, and how many rows of which site."""
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
    """Return facts as a table, above a table of the sites of some rows."""
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
    """Return sites as the format lists them; then those that it does not know, by name."""
    order = {site: number for number, site in enumerate(SITES)}
    return sorted(sites, key=lambda site: (order.get(site, len(order)), site))


def _shown(text: object) -> str:
    """Return an untrusted text as HTML in which nothing is markup."""
    return html.escape(plain(text), quote=True)


def plain(text: object) -> str:
    """Return an untrusted text on one line, of bounded length, with nothing in it that a terminal would obey."""
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
    return plain if len(plain) <= _MAX_TEXT else plain[: _MAX_TEXT - 3] + "..."


def span(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people: the first, the last and how many."""
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
