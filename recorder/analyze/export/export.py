"""Runs in other formats: statistics as Parquet, tensors as npz or safetensors. Never overwrites unasked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...columns import METADATA_COLUMNS, OF_FIRST_PART, PLAIN, SCHEMA
from ...errors import LookupFailedError, RunError
from ...run.notes import MissingRanks, missing_ranks, without_numbers
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from ...run.step_ranges import Mapper, attempt_step_ranges, map_serially
from .files import published_file, widest_first, write_npz, write_safetensors
from .tensors import BATCH_BYTES, Entry, RowId, Rows, Tensors, batched, row_spans

FORMATS = ("parquet", "npz", "safetensors")
_ROWS_A_GROUP = 65_536
_MAX_NAMED = 8
_WRITERS = {"npz": write_npz, "safetensors": write_safetensors}
_ORDERS: dict[str, Callable[[Sequence[Entry]], list[Entry]]] = {"npz": list, "safetensors": widest_first}
"""In which order they ask for tensors."""


class Exported(NamedTuple):
    """What was written."""

    path: Path
    num_rows: int
    """Rows of a table, or tensors."""
    num_bytes: int
    """Size of the file."""
    notes: list[str]
    """Names of the values of which some ranks are missing."""
    problems: list[str]
    """Global tensors of which the ranks' rows contradict each other, so that those rows stand in the file instead. For
    all: values that cannot be read, and so are not in it."""
    is_whole: bool
    """False where something is damaged, or values lack ranks."""


class Export:
    """One export, planned; `write` does it."""

    def __init__(
        self,
        run: Run,
        to: str,
        selection: Selection,
        options: GlobalOptions,
        *,
        payload: bool = False,
        mapper: Mapper = map_serially,
    ) -> None:
        """Find what is to be written; `mapper` works on ranges of steps, here and in `write`.

        Raises:
            LookupFailedError: nothing is selected or has values, or there is no such format.
        """
        if to not in FORMATS:
            raise LookupFailedError(f"format {to!r}: choose of {', '.join(FORMATS)}")
        if payload and to != "parquet":
            raise LookupFailedError(f"{to} holds tensors anyway; payload is for parquet: leave it out")
        self.to = to
        self._run = run
        self._selection = selection
        self._payload = payload
        self._options = options
        self._mapper = mapper
        self._tensors = Tensors(run, selection, options, mapper)
        self._partial = MissingRanks()
        self._unreadable: dict[RowId, str] = {}
        self._names: dict[RowId, str] = {}
        self._entries: list[Entry] = self._tensors.entries(self._partial) if to != "parquet" else []
        self.total_bytes = sum(entry.payload_bytes for entry in self._entries)
        """Payload bytes that `report` will be called with in sum; 0 where that is not known before."""

    def write(self, path: Path, *, force: bool = False, report: Callable[[int], None] = lambda done: None) -> Exported:
        """Write the file, under its name only once it is whole.

        Raises:
            WriteError: the file exists and `force` is not given, or it cannot be written.
        """
        try:
            num_rows = self._write(path, force, report)
        except RunError:
            self._find_unreadable()
            if not self._unreadable or (self.to != "parquet" and not self._entries):
                raise
            num_rows = self._write(path, force, lambda done: None)
        notes = self._partial.notes(is_taken=self._options.partial)
        problems = self._tensors.problems.texts() + self._left_out()
        is_whole = not (self._partial or self._unreadable or self._run.problems or self._tensors.is_damaged)
        return Exported(path, num_rows, path.stat().st_size, notes, problems, is_whole)

    def _write(self, path: Path, force: bool, report: Callable[[int], None]) -> int:
        with published_file(path, force=force) as file:
            if self.to == "parquet":
                return self._write_parquet(file, report)
            tensors = self._tensors.in_turn(_ORDERS[self.to](self._entries))
            _WRITERS[self.to](file, tensors, self._entries, report)
            return len(self._entries)

    def _find_unreadable(self) -> None:
        """Read all that is to be written: a file of which a part cannot be read is begun again without that part."""
        entries = self._entries
        if self.to == "parquet":
            entries = self._tensors.entries(MissingRanks())
        self._unreadable = self._tensors.unreadable((*one.steps, one.row, one.dtype) for one in entries)
        self._names = {row_id: one.name for one in entries if (row_id := (one.steps, one.row)) in self._unreadable}
        self._entries = [one for one in self._entries if (one.steps, one.row) not in self._unreadable]

    def _left_out(self) -> list[str]:
        """Values that cannot be read: one line for each reason, the first few."""
        row_ids: dict[str, list[RowId]] = {}
        for row_id, why in self._unreadable.items():
            row_ids.setdefault(why, []).append(row_id)
        lines = []
        for why, unreadable in row_ids.items():
            more = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
            lines.append(f"left out: {self._names[unreadable[0]]}{more}, which cannot be read: {why}")
        more = f"left out: and more for {len(lines) - _MAX_NAMED} further reasons"
        return [*lines[:_MAX_NAMED], *([more] if len(lines) > _MAX_NAMED else [])]

    def _write_parquet(self, file: BinaryIO, report: Callable[[int], None]) -> int:
        num_rows, self._partial = 0, MissingRanks()
        names = [*METADATA_COLUMNS, *(["data"] if self._payload else [])]
        metadata = {b"recorder_run_id": self._run.run_id.encode(), **(SCHEMA.metadata or {})}
        schema = pa.schema([SCHEMA.field(name).with_nullable(True) for name in names], metadata=metadata)
        # Payloads hardly compress as they lie, and are nothing to look up.
        compression = {name: "NONE" if name == "data" else "ZSTD" for name in names}
        without_data = [name for name in names if name != "data"]
        options = {"compression": compression, "use_dictionary": without_data, "write_statistics": without_data}
        with pq.ParquetWriter(file, schema, **options) as writer:
            for table in self._with_payload() if self._payload else self._light():
                writer.write_table(table.cast(schema), row_group_size=_ROWS_A_GROUP)
                if self._payload:
                    report(pc.sum(table.column("payload_bytes")).as_py() or 0)
                num_rows += table.num_rows
        if not num_rows:
            raise self._tensors.explain_nothing()
        return num_rows

    def _light(self) -> Iterator[Any]:
        """Rows without payloads; without the global view they are those on disk, of all attempts."""
        if self._options.across_ranks:
            for chosen in self._tensors.chosen(METADATA_COLUMNS, self._partial):
                yield chosen.table
            return
        for table, partial in self._mapper(
            _OwnRows, (self._run, self._selection, self._options), attempt_step_ranges(self._run)
        ):
            self._partial.join(partial)
            yield table

    def _with_payload(self) -> Iterator[Any]:
        """Rows with their decoded bytes, some megabytes at once; large tensors in several rows, as on disk."""
        order: deque[list[tuple[tuple[int, int], int, int]]] = deque()

        def small() -> Iterator[tuple[int, int, list[int]]]:
            """Batches that are read at once; `order` holds the large rows between them, too."""
            for chosen in self._tensors.chosen(("at", "num_bytes"), self._partial):
                steps = chosen.first, chosen.last
                columns = (chosen.table.column(name).to_pylist() for name in ("at", "num_bytes"))
                sizes = [(steps, at, num_bytes) for at, num_bytes in zip(*columns, strict=True)]
                for batch in batched(sizes, lambda size: (size[0], size[2])):
                    order.append(batch)
                    if batch[0][2] <= BATCH_BYTES:
                        yield *steps, [at for _, at, _ in batch]

        def large() -> Iterator[Any]:
            while order and order[0][0][2] > BATCH_BYTES:
                yield from reading.one_by_one(*order.popleft()[0][:2])

        arguments = (self._run, self._selection, self._options, frozenset(self._unreadable))
        reading = _RowsWithPayload(*arguments)
        for batch in self._mapper(_RowsWithPayload, arguments, small()):
            yield from large()
            order.popleft()
            yield batch
        yield from large()


class _OwnRows:
    """Rows as the ranks recorded them, without payloads."""

    def __init__(self, run: Run, selection: Selection, options: GlobalOptions) -> None:
        self._run, self._selection = run, selection
        self._takes_partial = options.partial

    def __call__(self, attempt: int, first: int, last: int) -> tuple[Any, MissingRanks]:
        rows = self._run.table(list(METADATA_COLUMNS), pc.field("attempt") == attempt, steps=(first, last))
        table, partial = self._selection.narrow(rows), MissingRanks()
        partial.add(table.filter(pc.field("part") == 0))
        return table if self._takes_partial or not partial else without_numbers(table), partial


class _RowsWithPayload:
    """Rows with their decoded bytes; those that lack ranks without, unless the options take them."""

    def __init__(self, run: Run, selection: Selection, options: GlobalOptions, unreadable: frozenset[RowId]) -> None:
        self._rows = Rows(run, selection, options)
        self._takes_partial = options.partial
        self._unreadable = unreadable

    def __call__(self, first: int, last: int, row_numbers: Sequence[int]) -> Any:
        """Some rows of a range of steps as one table."""
        rows = self._rows.all_of(first, last)
        table = rows.table.take(pa.array(row_numbers))
        rows_with_bytes = zip(
            row_numbers, self._as_rows(table), self._has_bytes(table, (first, last), row_numbers), strict=True
        )
        return _as_table(
            [values for at, row, has in rows_with_bytes for values in _parts(row, rows, at, has_bytes=has)]
        )

    def one_by_one(self, steps: tuple[int, int], row_number: int) -> Iterator[Any]:
        """A large row in several tables."""
        rows = self._rows.all_of(*steps)
        table = rows.table.slice(row_number, 1)
        (has_bytes,) = self._has_bytes(table, steps, [row_number])
        for values in _parts(self._as_rows(table)[0], rows, row_number, has_bytes=has_bytes):
            yield _as_table([values])

    def _as_rows(self, table: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (table if self._takes_partial else without_numbers(table)).to_pylist()
        return rows

    def _has_bytes(self, table: Any, steps: tuple[int, int], row_numbers: Sequence[int]) -> list[bool]:
        is_whole = missing_ranks(table) == ""
        return [
            bool(whole or self._takes_partial) and (steps, at) not in self._unreadable
            for at, whole in zip(row_numbers, is_whole, strict=True)
        ]


def export(
    run: Run,
    path: str | PathLike[str],
    module: str | None = None,
    *,
    to: str | None = None,
    site: str | None = None,
    name: str | None = None,
    step: int | str | None = None,
    rank: int | str | None = None,
    across_ranks: bool = False,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    partial: bool = False,
    payload: bool = False,
    force: bool = False,
) -> Exported:
    """Write a part of a run in another format.

    Args:
        run: from `open_run`.
        path: the file to write; it appears once it is whole.
        module: a module's path, or a glob over paths; all modules without.
        to: ``parquet`` (a row a value, with its statistics), ``npz`` or ``safetensors`` (the tensors, under names such
            as ``step=3/layers.0.mlp/output/rank=1``); by default what the path ends with.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rank: ranks, written like steps.
        across_ranks: the global tensors instead of the ranks' own.
        loss: with `across_ranks`, how activation gradients of the ranks are scaled; see `Run.view`.
        layouts: with `across_ranks`, how the ranks' values of some leaves lie; see `Run.view`.
        partial: give tensors that lack ranks as the other ranks have them; else they are left out.
        payload: parquet with the values, too: column `data` holds each tensor's decoded bytes, so that
            `recorder.decode` takes a row.
        force: replace a file that exists.

    Raises:
        LookupFailedError: nothing is selected or has values; the message says what there is.
        WriteError: the file exists, or cannot be written.
    """
    path = Path(path)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layouts, partial=partial)
    planned = Export(run, to or format_of(path), selection, options, payload=payload)
    return planned.write(path, force=force)


def format_of(path: Path) -> str:
    """The format that a file's name means.

    Raises:
        LookupFailedError: it means none.
    """
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise LookupFailedError(f"{path}: the name does not say which format; choose of {', '.join(FORMATS)}")
    return suffix


def _parts(row: dict[str, Any], rows: Any, at: int, *, has_bytes: bool) -> Iterator[dict[str, Any]]:
    """A row as it is, or with its bytes; a large tensor as several, whose statistics stand in the first."""
    if row["encoding"] is None or not has_bytes:
        yield row | {"encoding": None, "payload_bytes": None, "data": None}
        return
    for part, span in enumerate(row_spans(rows, at, row["dtype"])):
        values = {
            "part": part,
            "flat_offset": span.flat_offset,
            "encoding": PLAIN,
            "payload_bytes": span.data.nbytes,
        }
        rest = dict.fromkeys(OF_FIRST_PART) if part else {}
        yield row | rest | values | {"data": span.data.tobytes()}


def _as_table(rows: list[dict[str, Any]]) -> Any:
    schema = pa.schema(
        [SCHEMA.field(name).with_nullable(True) for name in SCHEMA.names if name in (*METADATA_COLUMNS, "data")]
    )
    return pa.Table.from_pylist(rows, schema).select([*METADATA_COLUMNS, "data"])
