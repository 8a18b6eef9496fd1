"""The page of a run: as one HTML file, and as what a notebook shows in a frame below the cell.

What draws is imported when the first page is drawn, because every notebook opens runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from ..run import run as runs
from ..run.reply import HEIGHT_PIXELS, InlinePage
from ..run.run import Run
from ..storage.locations import Location
from ..system.text import printable

if TYPE_CHECKING:
    from .top import DoctorLine, Highlight


def write_report(
    run: Run,
    path: Path,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[DoctorLine] = (),
    judged: Sequence[Highlight] = (),
    force: bool = False,
    report: Callable[[int], None] = lambda num_rows: None,
) -> int:
    """Write the page of a run as one HTML file, and return its bytes; other arguments are those of `collect`.

    `force` replaces a file that exists. LookupFailedError is raised where there is nothing to draw, and WriteError
    where the file exists or cannot be written.
    """
    from ..analyze.export.files import published_file
    from .collect import collect
    from .page import page

    num_bytes = 0
    title = f"{run.name} against {against.name}" if against is not None else run.name
    blocks = collect(run, against=against, statistics=statistics, checks=checks, judged=judged, report=report)
    with published_file(path, force=force) as file:
        for piece in page(f"{title} - recorder", blocks):
            num_bytes += file.write(piece)
    return num_bytes


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
    """Return the page of a run for a notebook; other arguments are those of `collect`.

    With `below` the page has the panels over steps alone. `view` holds the members of the page's address: what the page
    shows first. `height_pixels` is the height of the frame.
    """
    from .collect import collect
    from .page import page

    title = printable(run.name) if below is None else f"{printable(below)!r} of {printable(run.name)}"
    panels = ("lines", "histograms", "units") if below is not None else ()
    blocks = collect(run, against=against, statistics=statistics, checks=None, below=below)
    pieces = page(f"{title} - recorder", blocks, address=urlencode(view or {}), panels=panels)
    return InlinePage(title, b"".join(pieces).decode(), height_pixels or HEIGHT_PIXELS)
