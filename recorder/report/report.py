"""The page of a run, as one HTML file or as a frame below the cell of a notebook.

The modules that draw are imported when the first page is drawn, because every notebook opens runs.
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
    from .blocks import PageBlock
    from .top import DoctorLine


def write_report(
    run: Run,
    path: Path,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[DoctorLine] = (),
    more: Sequence[PageBlock] = (),
    force: bool = False,
    report: Callable[[int], None] = lambda num_rows: None,
) -> int:
    """Write the page of a run as one HTML file. Return the file's size in bytes.

    `collect` explains the other arguments. `force` replaces an existing file. Raise LookupFailedError if there is
    nothing to draw, and WriteError if the file exists or cannot be written.
    """
    from ..analyze.export.files import published_file
    from .collect import collect
    from .page import page

    num_bytes = 0
    title = f"{run.name} against {against.name}" if against is not None else run.name
    blocks = collect(run, against=against, statistics=statistics, checks=checks, more=more, report=report)
    with published_file(path, force=force) as file:
        for piece in page(f"{title} - recorder", blocks):
            num_bytes += file.write(piece)
    return num_bytes


def open_run(path: str | PathLike[str] | Location | None = None) -> Run:
    """Open a recorded run for reading, even one that is still being written or was left by a kill.

    Args:
        path: a run directory; or a folder of runs, which means its newest run; or the name or the id of a run in such
            a folder, or the beginning of either, or ``latest``, or ``@-2`` for the last run but one. A name without a
            folder is looked for in the current directory and where this environment records (``RECORDER_DIR``). All
            these forms also work in an object store: ``s3://bucket/path``, ``gs://bucket/path`` or
            ``az://container/path``. None means the newest run where this environment records.

    Raises:
        NotARunError: there is no run.
        LookupFailedError: several runs have this name.
        CorruptError: the manifest is damaged. Damage in shards does not raise: see `Run.problems`.
        UnsupportedError: a newer major version wrote the run.
        StoreError: the store cannot be reached, or refuses access.
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
    """Return the page of a run as a frame for a notebook. `collect` explains the other arguments.

    With `below` the page has only the panels over steps. `view` has the members of the page's address, which choose the
    initial view. `height_pixels` is the height of the frame.
    """
    from .collect import collect
    from .page import page

    title = printable(run.name) if below is None else f"{printable(below)!r} of {printable(run.name)}"
    panels = ("lines", "numbers", "histograms", "units") if below is not None else ()
    blocks = collect(run, against=against, statistics=statistics, checks=None, below=below)
    pieces = page(f"{title} - recorder", blocks, address=urlencode(view or {}), panels=panels)
    return InlinePage(title, b"".join(pieces).decode(), height_pixels or HEIGHT_PIXELS)
