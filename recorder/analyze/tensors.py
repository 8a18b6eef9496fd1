"""Owns the tensors of a run one after the other: which are selected, and their bytes in bounded pieces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import CorruptError, LookupFailedError
from ..format.dtypes import item_bytes
from ..read.decode import count, decode_payload, parse_shape
from ..read.run import Run
from .names import NAMING, tensor_name
from .partial import Partial
from .problems import Problems
from .selection import GlobalOptions, Selection
from .timeline import PER_RANK

ORIGIN = ("ranks_present", "ranks_expected", "scale", "layout_source", "note")
"""Columns that say of which ranks' values a tensor was made, and how."""


class Piece(NamedTuple):
    """Consecutive elements of one tensor."""

    data: npt.NDArray[np.uint8]
    """At most 32 MiB, little-endian."""
    flat_offset: int
    """Of the first element, in the flattened tensor."""


class Entry(NamedTuple):
    """One tensor."""

    window: int
    row: int
    name: str
    """Unique; see `names`."""
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    place: dict[str, Any]
    """The columns of `NAMING`."""
    origin: dict[str, Any]
    """The columns of `ORIGIN`, what is JSON in them as what it says."""


class Tensors:
    """The selected rows of a run, as the ranks recorded them or of the global view, window by window of steps."""

    def __init__(self, run: Run, selection: Selection, options: GlobalOptions) -> None:
        """Nothing is read yet.

        Raises:
            LookupFailedError: the selection can match nothing in any run, or an option is none.
        """
        if options.across_ranks and selection.rank is not None:
            raise LookupFailedError("the global view has no ranks; leave one of the two out")
        selection.check()
        options.check(run)
        self._run = run
        self._selection = selection
        layouts = options.layouts if options.across_ranks else PER_RANK
        self._view = run.view(loss=options.loss, layouts=layouts)
        self._windows = self._view.windows()
        self._is_global = options.across_ranks
        self.problems = Problems(selection)
        """What contradicts itself in the windows that were read of the global view."""
        self._held: tuple[int, Any] | None = None

    @property
    def num_windows(self) -> int:
        return len(self._windows)

    def rows(self, window: int) -> Any:
        """`GlobalRows` of a window; the last one asked for is kept."""
        if self._held is None or self._held[0] != window:
            self._held = None
            self._held = window, self._view.rows(*self._windows[window])
            if self._is_global:
                self.problems.add(self._held[1].findings)
        return self._held[1]

    def table(self, window: int) -> Any:
        """The selected rows of a window, with the column `at`: their place in `rows`."""
        table = self.rows(window).table
        return self._selection.narrow(table.append_column("at", pa.array(np.arange(table.num_rows))))

    def entries(self, partial: Partial) -> list[Entry]:
        """The selected tensors that have values, in the order of execution.

        Args:
            partial: told of every row that is selected.

        Raises:
            LookupFailedError: nothing is selected, or nothing of it has values.
        """
        found: list[Entry] = []
        times: Counter[str] = Counter()
        num_selected = 0
        for window in range(self.num_windows):
            table = self.table(window)
            num_selected += table.num_rows
            partial.add(table)
            table = table.filter(table.column("encoding").is_valid())
            for row in table.select([*NAMING, *ORIGIN, "at", "dtype", "shape"]).to_pylist():
                origin = {column: _read(column, row.pop(column)) for column in ORIGIN}
                at, dtype, shape = row.pop("at"), row.pop("dtype"), parse_shape(row.pop("shape"))
                name = tensor_name(row)
                times[name] += 1
                if times[name] > 1:  # rows that no key tells apart, as of a damaged run
                    name = f"{name}/again={times[name]}"
                found.append(Entry(window, at, name, dtype, shape, count(shape) * item_bytes(dtype), row, origin))
        if not num_selected:
            raise self.explain_nothing()
        if not found:
            raise LookupFailedError(
                f"none of the {num_selected} selected rows has values, only statistics: export them with --to parquet, "
                "or record with keep=tensor"
            )
        return found

    def explain_nothing(self) -> LookupFailedError:
        """The error for a selection that matches nothing."""
        names = ["module_path", "site", "name", "step", "rank"]
        return self._selection.explain_nothing(self._run.table(names), f"run {self._run.path.name}")

    def pieces(self, entry: Entry) -> Iterator[Piece]:
        """The bytes of one tensor.

        Raises:
            CorruptError: the bytes are not those that were written.
        """
        num_bytes = 0
        for piece in row_pieces(self.rows(entry.window), entry.row, entry.dtype):
            num_bytes += piece.data.nbytes
            yield piece
        if num_bytes != entry.payload_bytes:
            raise CorruptError(f"{entry.name}: {num_bytes} bytes are not a {entry.dtype} tensor of {list(entry.shape)}")


def _read(column: str, text: str | None) -> Any:
    """A column of JSON as what it says; a stranger's that is none as it is."""
    if text is None or column in ("scale", "layout_source"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def row_pieces(rows: Any, row: int, dtype: str) -> Iterator[Piece]:
    """The bytes of one row of `GlobalRows`, decoded."""
    for part in rows.parts(row):
        data = part.data[0] if len(part.data) == 1 else b"".join(part.data)
        yield Piece(decode_payload(part.encoding, data, part.payload_bytes, dtype), part.flat_offset)
