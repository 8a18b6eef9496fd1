"""The rows of a run cut into ranges of steps: each batch is read once, and lies on a disk until its steps come.

A batch of a rank may span many ranges. Without the files it would be read, checked and decoded for each of them. Must
never hold many more rows than it was told while it cuts, and leaves no file behind.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...globalview.run import Run

_PENDING_ROWS = 250_000
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
_BYTES_A_ROW = 500
"""More than what a row was seen to take in a file."""

Steps = tuple[int, int]


@contextmanager
def cut_rows(
    run: Run,
    ranges: Sequence[Steps],
    tables: Callable[[Sequence[Any], Steps], Iterator[Any]],
    max_pending_rows: int = _PENDING_ROWS,
) -> Iterator[Callable[[Steps], Iterator[Any]]]:
    """Make a function that gives the tables of a range, as `tables` would make them of that range alone.

    Args:
        run: whose rows.
        ranges: half-open, ascending, apart from each other.
        tables: makes tables of writers and a range of steps, all of one schema, with a column ``step``.
        max_pending_rows: rows that are in memory together while they are cut, twice, and those of one table more.
    """
    with ExitStack() as stack:
        folder = None
        if len(ranges) > 1:
            with suppress(OSError):  # there may be no room for temporary files
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recorder-")))
        if folder is not None and not (_has_room(folder, run) and _fill(folder, run, ranges, tables, max_pending_rows)):
            folder = None
        if folder is None:
            yield lambda steps: tables(run.writers, steps)
        else:
            yield lambda steps: _read(folder / str(ranges.index(steps)))


def _has_room(folder: Path, run: Run) -> bool:
    return shutil.disk_usage(folder).free >= run.num_rows * _BYTES_A_ROW


def _fill(
    folder: Path,
    run: Run,
    ranges: Sequence[Steps],
    tables: Callable[[Sequence[Any], Steps], Iterator[Any]],
    max_pending_rows: int,
) -> bool:
    """Write the tables of all ranges; False where the disk refuses."""
    starts = np.array([first for first, _ in ranges], np.int64)
    pending: list[Any] = []
    num_pending = 0
    try:
        for table in tables(run.writers, (ranges[0][0], ranges[-1][1])):
            pending.append(table)
            num_pending += table.num_rows
            if num_pending >= max_pending_rows:
                _append(folder, starts, pending)
                num_pending = 0
        _append(folder, starts, pending)
    except OSError:
        return False
    return True


def _append(folder: Path, starts: npt.NDArray[np.int64], pending: list[Any]) -> None:
    """Write the rows that wait behind what the files of their ranges have, as one more stream each."""
    if not pending:
        return
    table = pa.concat_tables(pending).unify_dictionaries().combine_chunks()
    pending.clear()
    indices = np.searchsorted(starts, table.column("step").to_numpy(), side="right") - 1
    order = np.argsort(indices, kind="stable")
    table, indices = table.take(pa.array(order)), indices[order]
    found, firsts = np.unique(indices, return_index=True)
    for index, first, last in zip(found.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(indices)], strict=True):
        with (
            (folder / str(index)).open("ab") as file,
            pa.ipc.new_stream(file, table.schema, options=_COMPRESSED) as stream,
        ):
            stream.write_table(table.slice(first, last - first))


def _read(path: Path) -> Iterator[Any]:
    """The tables in a file; a range without whole tensors has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            yield pa.ipc.open_stream(file).read_all()
