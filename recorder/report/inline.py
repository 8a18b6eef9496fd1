"""The page of a run, or of one module, as a notebook shows it: in a frame of its own, below the cell."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from ..globalview.notebook import plain
from ..globalview.run import Run
from ..system.text import size
from .collect import collect
from .page import page

_HEIGHT_PIXELS = 720


@dataclass(frozen=True, slots=True)
class InlinePage:
    """A page that shows itself in a notebook, in a frame without an origin: nothing of it reaches the notebook."""

    title: str
    html: str = field(repr=False)
    """The whole page, as `recorder report` writes it."""
    height_pixels: int = _HEIGHT_PIXELS

    def _repr_html_(self) -> str:
        title, page = html.escape(self.title, quote=True), html.escape(self.html, quote=True)
        style = f"width: 100%; height: {self.height_pixels}px; border: 0"
        return f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        return f"<Page of {self.title}: {size(len(self.html))}; a notebook shows it>"


def inline_page(
    run: Run,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    below: str | None = None,
    view: dict[str, str] | None = None,
    height_pixels: int | None = None,
) -> InlinePage:
    """The page of a run.

    Args:
        run: what is drawn.
        against: another run, to be drawn beside it.
        statistics: those that are drawn; by default as many as there is room for.
        below: draw this module and what is below it, with the panels over steps alone.
        view: what the page shows first: the members of its address.
        height_pixels: of the frame.

    Raises:
        LookupFailedError: there is nothing to draw; the message says what to record the next time.
    """
    title = plain(run.name) if below is None else f"{plain(below)!r} of {plain(run.name)}"
    panels = ("lines", "histograms", "units") if below is not None else ()
    blocks = collect(run, against=against, statistics=statistics, checks=None, below=below)
    pieces = page(f"{title} - recorder", blocks, address=urlencode(view or {}), panels=panels)
    return InlinePage(title, b"".join(pieces).decode(), height_pixels or _HEIGHT_PIXELS)
