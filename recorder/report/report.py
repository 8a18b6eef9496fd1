"""The page of a run, as one HTML file or as a frame below the cell of a notebook.

The modules that draw are imported when the first page is drawn, because every notebook opens runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from ..errors import LookupFailedError
from ..run import run as runs
from ..run.reply import HEIGHT_PIXELS, InlinePage, Progress, Reply
from ..run.run import Run
from ..storage.locations import Location
from ..system.text import printable, size

if TYPE_CHECKING:
    from ..analyze.doctor.reply import Check
    from .blocks import PageBlock

PNG = ".png"


def write_report(
    run: Run,
    path: Path,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[Check] = (),
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


def page_reply(
    run: Run, out: Path, *, against: Run | None, statistics: Sequence[str], more: Sequence[PageBlock], force: bool,
    progress: Progress,
) -> Reply:  # fmt: skip
    """Ask `recorder doctor` about a run, write its page, and return the reply of `recorder report`."""
    from ..analyze.doctor.reply import checks_of
    from .collect import num_looks
    from .top import found_since

    with progress("report", num_looks(run, against) + run.num_rows) as report:
        checks = list(checks_of(run))
        report(run.num_rows)
        num_bytes = write_report(
            run, out, against=against, statistics=statistics, checks=checks, more=more, force=force, report=report
        )
    missing = [check.text for check in [*checks, *found_since(run, checks)] if check.state == "missing"]
    damaged = _damaged(run, against)
    why = [*run.endings, *(text for text in missing if text not in {*run.problems, *run.endings})]
    others = f"; and {len(why) - 1} more, which recorder doctor names" if len(why) > 1 else ""
    return Reply(
        members=lambda: {"run": str(run.path), "path": str(out), "bytes": num_bytes, "missing": len(missing)},
        parts=lambda: [f"{out}: {size(num_bytes)}", *(f"note: {text}{others}" for text in why[:1]), *damaged],
        exit_code=int(bool(missing or damaged)),
    )


def _damaged(*of: Run | None) -> list[str]:
    """Return a line for each damaged run. Damage is known only after the rows and the probe of a run were read."""
    from ..run.notes import damage

    told = [(run.name, damage(run)) for run in of if run is not None]
    return [f"note: {name} is damaged, and what cannot be read was left out: {text}" for name, text in told if text]


def picture_reply(run: Run, panel: str, out: Path, *, model: str | None, force: bool) -> Reply:
    """Write one panel of a run as PNG, and return the reply of `recorder report --png`."""
    from .picture import PANELS, write_picture

    if panel not in PANELS:
        names = ", ".join(PANELS)
        raise LookupFailedError(f"--png {panel}: expected {names}; the buttons of the page save its other panels")
    if out.suffix.lower() not in ("", PNG):
        raise LookupFailedError(f"{out}: --png writes a PNG; name a file that ends in {PNG}")
    num_bytes = write_picture(run, out, panel, model=model, force=force)
    members, damaged = {"run": str(run.path), "path": str(out), "bytes": num_bytes}, _damaged(run)
    parts = [f"{out}: {size(num_bytes)}", *damaged]
    return Reply(members=lambda: members, parts=lambda: parts, exit_code=int(bool(damaged)))


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
