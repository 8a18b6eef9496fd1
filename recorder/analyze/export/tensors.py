"""Selects the tensors of a run to export, names them, and yields their bytes in spans.

The name of a tensor depends only on its row, and is never a path that leads upwards. A span is a bounded number of
elements. A large tensor is read here, span by span; several small tensors may be read at once by another process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...columns import parse_shape
from ...errors import CorruptError, LookupFailedError, RunError
from ...numerics.dtypes import item_bytes
from ...run.notes import MissingRanks, Problems, missing_ranks, without_numbers
from ...run.run import GlobalView, Run
from ...run.selection import PER_RANK, GlobalOptions, Selection
from ...run.step_ranges import Mapper, global_step_ranges, map_serially
from ...sites import SITE_OF

ORIGIN = ("ranks_present", "ranks_expected", "scale", "layout_source", "note")
"""The columns that say from which ranks' values, and how, a tensor was put together."""
BATCH_BYTES = 32 << 20
_BATCH_ITEMS = 65_536

T = TypeVar("T")
RowId = tuple[tuple[int, int], int]
"""Identifies a row: a range of steps, and the index of the row among all rows of the range."""


class Span(NamedTuple):
    """Consecutive elements of one tensor."""

    data: npt.NDArray[np.uint8]
    """The bytes of the elements, at most 32 MiB, little-endian."""
    flat_offset: int
    """The position of the first element in the flattened tensor, in elements."""


class Entry(NamedTuple):
    """One tensor that can be exported."""

    steps: tuple[int, int]
    """The range of steps in which the tensor was found, from the first up to, but not including, the last."""
    row: int
    """The index of the tensor's row among all rows of the range."""
    name: str
    """A unique name, as `tensor_name` makes it."""
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    naming: dict[str, Any]
    origin: dict[str, Any]
    """The columns of `ORIGIN`, with JSON decoded."""


class RangeRows:
    """Reads the rows of a run in ranges of steps: the ranks' own rows, or rows of global tensors."""

    def __init__(self, run: Run, options: GlobalOptions) -> None:
        self._view = view_of(run, options)
        self._held: tuple[tuple[int, int], Any] | None = None

    def all_of(self, first: int, last: int) -> Any:
        """Return the `GlobalRows` of a range of steps. The last result is cached."""
        if self._held is None or self._held[0] != (first, last):
            self._held = None
            self._held = (first, last), self._view.rows(first, last)
        return self._held[1]

    def __call__(self, first: int, last: int, wanted: Sequence[tuple[int, str]]) -> list[list[Span]]:
        rows = self.all_of(first, last)
        return [list(row_spans(rows, at, dtype)) for at, dtype in wanted]


def view_of(run: Run, options: GlobalOptions) -> GlobalView:
    """Return the global view (the tensors of all ranks put together), or a view in which ranks stay separate."""
    return run.view(loss=options.loss, layouts=options.layouts if options.across_ranks else PER_RANK)


class Chosen(NamedTuple):
    """The selected rows of a range of steps."""

    first: int
    last: int
    table: Any
    num_rows: int
    """The number of selected rows, including rows without values that were left out afterwards."""
    partial: MissingRanks
    problems: Problems
    is_damaged: bool
    """Whether anything that was read is damaged, here or in a worker process."""


class Choosing:
    """Finds the selected rows of ranges of steps. The columns `at` and `num_bytes` are a row's index and decoded size.

    `with_values` leaves out rows without values. It also leaves out rows that lack some ranks' chunks, unless the
    options allow those.
    """

    def __init__(
        self, run: Run, selection: Selection, options: GlobalOptions, columns: Sequence[str], with_values: bool
    ) -> None:
        self._run, self._view, self._selection = run, view_of(run, options), selection
        self._is_global, self._takes_partial = options.across_ranks, options.partial
        self._columns, self._with_values = list(columns), with_values

    def __call__(self, first: int, last: int) -> Chosen:
        rows = self._view.rows(first, last)
        table = rows.table.append_column("at", pa.array(np.arange(rows.table.num_rows)))
        table = self._selection.narrow(table.append_column("num_bytes", pa.array(rows.payload_bytes)))
        partial, problems = MissingRanks(), Problems(self._selection)
        partial.add(table)
        if self._is_global:
            problems.add(rows.findings)
        num_rows = table.num_rows
        is_cut = bool(partial) and not self._takes_partial
        if self._with_values:
            table = table.filter(table.column("encoding").is_valid())
            table = table.filter(pa.array(missing_ranks(table) == "")) if is_cut else table
        elif is_cut:
            table = without_numbers(table)
        table = table.select(self._columns)
        return Chosen(first, last, table, num_rows, partial, problems, bool(self._run.problems))


SpansOf = Callable[[Entry], Iterator[Span]]
"""A function that yields the bytes of one tensor, in order."""


class Tensors:
    """The selected tensors of a run, one after the other."""

    def __init__(self, run: Run, selection: Selection, options: GlobalOptions, mapper: Mapper = map_serially) -> None:
        """Check the selection and the options. Nothing is read yet.

        Raises LookupFailedError if the selection can match nothing in any run, or an option is unknown.
        """
        if options.across_ranks and selection.rank is not None:
            raise LookupFailedError("the global view has no ranks: leave out either --global or --rank")
        selection.check(run)
        options.check(run)
        self._run = run
        self._selection = selection
        self._options = options
        self._mapper = mapper
        self._large = RangeRows(run, options)
        self.problems = Problems(selection)
        """Contradictions between ranks, in the part of the global view that was read."""
        self.missing = MissingRanks()
        """The ranks whose chunks are missing in the rows that were chosen last."""
        self.is_damaged = False
        """Whether anything that was read is damaged, here or in a worker process."""

    def chosen(self, columns: Sequence[str], *, with_values: bool = False) -> Iterator[Chosen]:
        """Yield the selected rows, one range of steps after the other. `with_values` is as in `Choosing`."""
        self.missing = MissingRanks()
        arguments = (self._run, self._selection, self._options, tuple(columns), with_values)
        step_ranges = global_step_ranges(view_of(self._run, self._options))
        for one in self._mapper(Choosing, arguments, step_ranges):
            self.missing.join(one.partial)
            self.problems.join(one.problems)
            self.is_damaged |= one.is_damaged
            yield one

    def entries(self) -> list[Entry]:
        """Return the selected tensors with values, in order.

        Raises LookupFailedError if nothing is selected, or no selected row has values.
        """
        entries: list[Entry] = []
        times: Counter[str] = Counter()
        num_selected = 0
        columns = [*NAMING, *ORIGIN, "at", "dtype", "shape"]
        for chosen in self.chosen(columns, with_values=True):
            num_selected += chosen.num_rows
            for row in chosen.table.to_pylist():
                origin = {column: _read(column, row.pop(column)) for column in ORIGIN}
                at, dtype, shape = row.pop("at"), row.pop("dtype"), parse_shape(row.pop("shape"))
                name = tensor_name(row)
                times[name] += 1
                if times[name] > 1:  # rows may have equal keys, as in a damaged run
                    name = f"{name}/again={times[name]}"
                num_bytes = math.prod(shape) * item_bytes(dtype)
                entries.append(Entry((chosen.first, chosen.last), at, name, dtype, shape, num_bytes, row, origin))
        if not num_selected:
            raise self.explain_nothing()
        if not entries and self.missing and not self._options.partial:
            raise LookupFailedError(f"{' '.join(self.missing.notes(is_taken=False))}, and nothing else is selected")
        if not entries:
            raise LookupFailedError(
                f"none of the {num_selected} selected rows has values, only statistics: export them with --to parquet, "
                "or record with keep=tensor"
            )
        return entries

    def explain_nothing(self) -> LookupFailedError:
        names = ["module_path", "site", "name", "step", "rank"]
        return self._selection.explain_nothing(self._run.table(names), f"run {self._run.name}", self._run.lost)

    def unreadable(self, entries: Iterable[Entry]) -> dict[RowId, tuple[str, str]]:
        """Return the name of each tensor whose values cannot be read, and the reason, by the tensor's row."""
        unreadable: dict[RowId, tuple[str, str]] = {}
        for one in entries:
            try:
                for _ in row_spans(self._large.all_of(*one.steps), one.row, one.dtype):
                    pass
            except RunError as error:
                unreadable[one.steps, one.row] = one.name, str(error)
        return unreadable

    def in_turn(self, entries: Sequence[Entry]) -> SpansOf:
        """Return a function that yields a tensor's bytes. It must be called for the tensors in exactly this order.

        Several small tensors are read at once, large ones span by span. The spans raise CorruptError if the bytes are
        not those that were written.
        """
        batches = [list(batch) for batch in batched(entries, lambda entry: (entry.steps, entry.payload_bytes))]
        ranges = [
            (*batch[0].steps, [(entry.row, entry.dtype) for entry in batch])
            for batch in batches
            if batch[0].payload_bytes <= BATCH_BYTES
        ]
        read = self._mapper(RangeRows, (self._run, self._options), ranges)
        waiting: deque[list[Span]] = deque()

        def spans_of(entry: Entry) -> Iterator[Span]:
            if entry.payload_bytes > BATCH_BYTES:
                return whole(entry, row_spans(self._large.all_of(*entry.steps), entry.row, entry.dtype))
            if not waiting:
                waiting.extend(next(read))
            return whole(entry, waiting.popleft())

        return spans_of


def whole(entry: Entry, spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of a tensor. Raise CorruptError at the end if bytes are missing or too many."""
    num_bytes = 0
    for span in spans:
        num_bytes += span.data.nbytes
        yield span
    if num_bytes != entry.payload_bytes:
        raise CorruptError(f"{entry.name}: {num_bytes} bytes are not a {entry.dtype} tensor of {list(entry.shape)}")


def batched(items: Iterable[T], size_of: Callable[[T], tuple[Any, int]]) -> Iterator[list[T]]:
    """Yield batches of consecutive items with equal keys, of at most `BATCH_BYTES`. `size_of` returns key and bytes."""
    batch: list[T] = []
    last, total_bytes = None, 0
    for item in items:
        key, num_bytes = size_of(item)
        if batch and (key != last or total_bytes + num_bytes > BATCH_BYTES or len(batch) >= _BATCH_ITEMS):
            yield batch
            batch, total_bytes = [], 0
        batch.append(item)
        last, total_bytes = key, total_bytes + num_bytes
    if batch:
        yield batch


def _read(column: str, text: str | None) -> Any:
    """Decode the text of a column of JSON. A text that is no JSON is returned unchanged."""
    if text is None or column in ("scale", "layout_source"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def row_spans(rows: Any, row: int, dtype: str) -> Iterator[Span]:
    """Yield the decoded bytes of one row of `GlobalRows`."""
    for part in rows.parts(row):
        yield Span(part.decoded(dtype), part.flat_offset)


_MAX_CHARS = 200
_DEFAULTS: dict[str, Any] = {
    "micro_step": 0, "call": 0, "repeat": 0, "mode": "train", "root": "model", "scope": None, "rank": None
}  # fmt: skip
ROOT = "(root)"
"""The part of a tensor's name that stands for the empty module path. A module of this name is spelled %28root%29."""
NAMING = (*_DEFAULTS, "phase", "site", "name", "module_path", "step")
"""The columns from which the name of a tensor is derived."""


def tensor_name(row: Mapping[str, Any]) -> str:
    """Return a tensor's name, as ``step=3/layers.0.mlp/output``. The name at the site and unusual columns follow."""
    levels = [f"step={row['step']}", as_level(row["module_path"]) or ROOT, as_level(row["site"])]
    if row["name"]:
        levels.append(as_level(row["name"]))
    return "/".join([*levels, *unusual_levels(row)])


def unusual_levels(row: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` for each column with an unusual value. The row has the columns of `NAMING`."""
    levels = []
    for column, usual in _DEFAULTS.items():
        # The usual scope of a gradient or a parameter is "final".
        if row[column] not in (usual, None) and (column, row[column]) != ("scope", "final"):
            levels.append(f"{column}={as_level(row[column])}")
    if row["site"] not in SITE_OF or row["phase"] != SITE_OF[row["site"]].phase:
        levels.append(f"phase={as_level(row['phase'])}")
    return levels


def as_level(value: Any) -> str:
    """Return an untrusted text as one level of a path, without separators. A long text ends with a digest."""
    text = quote(str(value), safe="", errors="surrogatepass")
    if text.strip(".") == "":
        text = text.replace(".", "%2E")
    if len(text) > _MAX_CHARS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        text = f"{text[: _MAX_CHARS - 17]}~{digest}"
    return text
