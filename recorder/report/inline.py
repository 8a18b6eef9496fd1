"""Runs that draw themselves: the page of a run, or of one module, as a notebook shows it in a frame below the cell.

What draws is imported when the first page is drawn, because every notebook opens runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from urllib.parse import urlencode

from ..run import run as runs
from ..run.notebook import HEIGHT_PIXELS, InlinePage, plain
from ..run.run import Run
from ..storage.locations import Location


def open_run(path: str | PathLike[str] | Location | None = None) -> Run:
    """Open a recorded run for reading, also one that is still being written or was left by a kill.

    Args:
        path: a run directory; or a folder of runs, of which the newest is meant; or in their folder the name of a run
            or its id, or how one of these begins, or ``latest``, or ``@-2``, the last run but one. Without a folder
            they are looked for here and where this environment records (``RECORDER_DIR``). All of this also in an
            object store: ``s3://bucket/path``, ``gs://bucket/path`` or ``az://container/path``. Without a path it is
            the newest run of where this environment records.

    Raises:
        NotARunError: there is no run.
        LookupFailedError: several runs are called so.
        CorruptError: its manifest is damaged. Damage in shards does not raise: see `Run.problems`.
        UnsupportedError: it is of a newer major version.
        StoreError: the store cannot be reached, or refuses.
    """
    run = runs.open_run(path)
    run.draw_page = inline_page
    return run


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
    from .collect import collect
    from .page import page

    title = plain(run.name) if below is None else f"{plain(below)!r} of {plain(run.name)}"
    panels = ("lines", "histograms", "units") if below is not None else ()
    blocks = collect(run, against=against, statistics=statistics, checks=None, below=below)
    pieces = page(f"{title} - recorder", blocks, address=urlencode(view or {}), panels=panels)
    return InlinePage(title, b"".join(pieces).decode(), height_pixels or HEIGHT_PIXELS)
