"""Writes runs in other formats: statistics as Parquet, tensors as npz or safetensors, and the catalog of a run.

An export overwrites no file unless it is asked to. The catalog is one Parquet file that lists all recorded values of a
run, without the values' bytes. Its rows come in blocks of ranks, and each block is sorted by attempt, step, rank and
seq. So every file of the run is read about once, and memory holds one block. Readers can find both a step and a rank by
the statistics of the row groups.
"""

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
from ...numerics.keys import by_key
from ...run.notes import MissingRanks, missing_ranks, without_numbers
from ...run.reply import Aside, Part, Progress, Reply
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from ...run.step_ranges import Mapper, attempt_step_ranges, map_serially
from ...system.text import counted, size
from .files import published_file, widest_first, write_npz, write_safetensors
from .model import Model, write_model
from .tensors import BATCH_BYTES, Entry, RangeRows, RowId, Tensors, batched, row_spans

FORMATS = ("parquet", "npz", "safetensors")
_ROWS_A_GROUP = 65_536
_MAX_NAMED = 8
_MAX_REFUSED = 20
_WHAT = {"param": "parameters and buffers", "grad": "gradients"}
_WRITERS = {"npz": write_npz, "safetensors": write_safetensors}
_ORDERS: dict[str, Callable[[Sequence[Entry]], list[Entry]]] = {"npz": list, "safetensors": widest_first}
"""For each format, the order in which its writer asks for tensors."""


class Exported(NamedTuple):
    """The result of an export."""

    path: Path
    num_rows: int
    """The number of written rows, or of written tensors."""
    num_bytes: int
    """The size of the file."""
    notes: list[str]
    problems: list[str]
    """Messages about global tensors whose ranks contradict each other: the file has the ranks' own rows instead. Also
    messages about values that are left out because they cannot be read."""
    is_whole: bool
    """False if something that was read is damaged, or if the values of some ranks are missing."""


def reply_of(run: Run, done: Exported, to: str) -> Reply:
    """Return the reply of `recorder export`. The exit code is 1 if something is damaged or missing."""

    def members() -> dict[str, Any]:
        summary = {"path": str(done.path), "format": to, "rows": done.num_rows, "bytes": done.num_bytes}
        return summary | {"problems": [*done.problems, *run.problems], "notes": done.notes}

    def parts() -> Iterator[str | Aside]:
        noun = {"parquet": "row", "npz": "tensor", "safetensors": "tensor"}.get(to, "value")
        yield f"{done.path}: {counted(done.num_rows, noun)}, {size(done.num_bytes)}"
        yield from (Aside(f"finding: {problem}") for problem in done.problems)
        yield from (Aside(f"note: {note}") for note in done.notes)

    return Reply(members=members, parts=parts, exit_code=int(bool(done.problems) or not done.is_whole))


def checkpoint_reply(model: Model, out: Path, to: str, *, is_partial: bool, progress: Progress) -> Reply:
    """Write a model, unless a tensor is refused and not `is_partial`. Return the reply of `recorder checkpoint`."""
    num_bytes = None
    if model.entries and (is_partial or not model.refused):
        with progress("checkpoint", model.total_bytes) as report:
            num_bytes = write_model(model, out, to, report)
    return Reply(
        members=lambda: {
            "path": str(out), "format": to, "what": model.what, "root": model.root, "step": model.step,
            "is_written": num_bytes is not None, "tensors": len(model.entries), "bytes": num_bytes,
            "refused": [refused._asdict() for refused in model.refused], "notes": model.notes,
        },
        parts=lambda: _checkpoint_parts(model, out, num_bytes),
        exit_code=int(bool(model.refused) or num_bytes is None),
    )  # fmt: skip


def _checkpoint_parts(model: Model, out: Path, num_bytes: int | None) -> Iterator[Part]:
    for refused in model.refused[:_MAX_REFUSED]:
        yield Aside(f"finding: {refused.name}: {refused.why}")
    if len(model.refused) > _MAX_REFUSED:
        yield Aside(f"and {len(model.refused) - _MAX_REFUSED} more; --json has them all")
    yield from (Aside(f"note: {note}") for note in model.notes)
    kind = f"{_WHAT[model.what]} of {model.root!r} at step {model.step}"
    tensors = counted(len(model.entries), "tensor")
    if num_bytes is not None:
        without = f", {len(model.refused)} left out" if model.refused else ""
        yield f"{out}: {kind}: {tensors}, {size(num_bytes)}{without}"
    elif model.entries:
        before = "" if model.step_before is None else f", --step {model.step_before} takes the step before"
        of = f"{len(model.refused)} of the {kind} cannot be written"
        yield f"{out}: not written: {of}; --partial writes the other {tensors}{before}"
    else:
        yield f"{out}: not written: none of the {kind} can be written"


class Export:
    """A planned export, which `write` carries out."""

    def __init__(
        self, run: Run, to: str, selection: Selection, options: GlobalOptions, *, payload: bool = False,
        mapper: Mapper = map_serially,
    ) -> None:  # fmt: skip
        """Find the rows or tensors to write. `mapper` reads ranges of steps, here or in other processes.

        Raises LookupFailedError if nothing is selected or has values, or the format is unknown.
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
        self._unreadable: dict[RowId, tuple[str, str]] = {}
        self._entries: list[Entry] = self._tensors.entries() if to != "parquet" else []
        self.total_bytes = sum(entry.payload_bytes for entry in self._entries)
        """The number of payload bytes that `write` passes to `report` in total; 0 if it is not known in advance."""

    def write(self, path: Path, *, force: bool = False, report: Callable[[int], None] = lambda done: None) -> Exported:
        """Write the file. It gets its final name once it is complete."""
        try:
            num_rows = self._write(path, force, report)
        except RunError:
            self._find_unreadable()
            if not self._unreadable or (self.to != "parquet" and not self._entries):
                raise
            num_rows = self._write(path, force, lambda done: None)
        missing = self._tensors.missing
        notes = missing.notes(is_taken=self._options.partial)
        problems = self._tensors.problems.texts() + self._left_out()
        is_whole = not (missing or self._unreadable or self._run.problems or self._tensors.is_damaged)
        return Exported(path, num_rows, path.stat().st_size, notes, problems, is_whole)

    def _write(self, path: Path, force: bool, report: Callable[[int], None]) -> int:
        with published_file(path, force=force) as file:
            if self.to == "parquet":
                return self._write_parquet(file, report)
            spans_of = self._tensors.in_turn(_ORDERS[self.to](self._entries))
            _WRITERS[self.to](file, spans_of, self._entries, report)
            return len(self._entries)

    def _find_unreadable(self) -> None:
        """Find the values that cannot be read. The file is then written again without these values."""
        entries = self._tensors.entries() if self.to == "parquet" else self._entries
        self._unreadable = self._tensors.unreadable(entries)
        self._entries = [one for one in self._entries if (one.steps, one.row) not in self._unreadable]

    def _left_out(self) -> list[str]:
        lines = []
        for why, names in by_key((why, name) for name, why in self._unreadable.values()).items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"left out: {names[0]}{more}, which cannot be read: {why}")
        more = f"left out: and more for {len(lines) - _MAX_NAMED} further reasons"
        return [*lines[:_MAX_NAMED], *([more] if len(lines) > _MAX_NAMED else [])]

    def _write_parquet(self, file: BinaryIO, report: Callable[[int], None]) -> int:
        num_rows = 0
        names = [*METADATA_COLUMNS, *(["data"] if self._payload else [])]
        metadata = {b"recorder_run_id": self._run.run_id.encode(), **(SCHEMA.metadata or {})}
        schema = pa.schema([SCHEMA.field(name).with_nullable(True) for name in names], metadata=metadata)
        # Payloads hardly compress, and nobody searches for values by payload.
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
        """Yield rows without their values' bytes: of global tensors if asked for, else those of all attempts."""
        if self._options.across_ranks:
            for chosen in self._tensors.chosen(METADATA_COLUMNS):
                yield chosen.table
            return
        self._tensors.missing = MissingRanks()
        arguments = self._run, self._selection, self._options
        for table, partial in self._mapper(_OwnRows, arguments, attempt_step_ranges(self._run)):
            self._tensors.missing.join(partial)
            yield table

    def _with_payload(self) -> Iterator[Any]:
        """Yield rows with their decoded bytes, some megabytes at once. A large tensor has several rows."""
        order: deque[list[tuple[tuple[int, int], int, int]]] = deque()

        def small() -> Iterator[tuple[int, int, list[int]]]:
            """Yield batches of small rows to read together. `order` gets all batches, also those of large rows."""
            for chosen in self._tensors.chosen(("at", "num_bytes")):
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

        arguments = (self._run, self._options, frozenset(self._unreadable))
        reading = _RowsWithPayload(*arguments)
        for batch in self._mapper(_RowsWithPayload, arguments, small()):
            yield from large()
            order.popleft()
            yield batch
        yield from large()


class _OwnRows:
    def __init__(self, run: Run, selection: Selection, options: GlobalOptions) -> None:
        self._run, self._selection = run, selection
        self._takes_partial = options.partial

    def __call__(self, attempt: int, first: int, last: int) -> tuple[Any, MissingRanks]:
        rows = self._run.table(list(METADATA_COLUMNS), pc.field("attempt") == attempt, steps=(first, last))
        table, partial = self._selection.narrow(rows), MissingRanks()
        partial.add(table.filter(pc.field("part") == 0))
        return table if self._takes_partial or not partial else without_numbers(table), partial


class _RowsWithPayload:
    """Reads rows with their decoded bytes. Rows that lack ranks' chunks get none, unless options allow it."""

    def __init__(self, run: Run, options: GlobalOptions, unreadable: frozenset[RowId]) -> None:
        self._rows = RangeRows(run, options)
        self._takes_partial = options.partial
        self._unreadable = unreadable

    def __call__(self, first: int, last: int, numbers: Sequence[int]) -> Any:
        return _as_table(list(self._values((first, last), numbers)))

    def one_by_one(self, steps: tuple[int, int], number: int) -> Iterator[Any]:
        yield from (_as_table([values]) for values in self._values(steps, [number]))

    def _values(self, steps: tuple[int, int], numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        rows = self._rows.all_of(*steps)
        table = rows.table.take(pa.array(numbers))
        is_whole = missing_ranks(table) == ""
        values = (table if self._takes_partial else without_numbers(table)).to_pylist()
        for at, row, whole in zip(numbers, values, is_whole, strict=True):
            has_bytes = bool(whole or self._takes_partial) and (steps, at) not in self._unreadable
            yield from _parts(row, rows, at, has_bytes=has_bytes)


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
    root: str | None = None,
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
        path: the file to write; it appears once it is complete.
        module: a module's path, or a glob over paths; None for all modules.
        to: ``parquet`` (a row for each value, with its statistics), ``npz`` or ``safetensors`` (tensors, under names
            such as ``step=3/layers.0.mlp/output/rank=1``); by default the suffix of the path.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rank: ranks, written like steps.
        root: the name of a model, or a glob, where a run has several models.
        across_ranks: whether to write the global tensors instead of the ranks' own.
        loss: with `across_ranks`, how activation gradients of the ranks are scaled; see `Run.view`.
        layouts: with `across_ranks`, how chunks of some tensors lie on the ranks; see `Run.view`.
        partial: whether to write tensors of which the chunks of some ranks are missing; else these are left out.
        payload: whether to write the values into Parquet, too: column `data` has each tensor's decoded bytes, so that
            `recorder.decode` takes a row.
        force: whether to replace a file that exists.

    Raises:
        LookupFailedError: nothing is selected or has values; the message says what there is.
        WriteError: the file exists, or cannot be written.
    """
    path = Path(path)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank, root=root)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layouts, partial=partial)
    planned = Export(run, to or format_of(path), selection, options, payload=payload)
    return planned.write(path, force=force)


def format_of(path: Path) -> str:
    """Return the format that the suffix of a file's name stands for.

    Raises LookupFailedError if the suffix stands for no format.
    """
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise LookupFailedError(f"{path}: the name does not say which format; choose of {', '.join(FORMATS)}")
    return suffix


def _parts(row: dict[str, Any], rows: Any, at: int, *, has_bytes: bool) -> Iterator[dict[str, Any]]:
    """Yield a row with its bytes or without. A large tensor gives several rows; the first has the statistics."""
    if row["encoding"] is None or not has_bytes:
        yield row | {"encoding": None, "payload_bytes": None, "data": None}
        return
    for part, span in enumerate(row_spans(rows, at, row["dtype"])):
        values = {"part": part, "flat_offset": span.flat_offset, "encoding": PLAIN, "payload_bytes": span.data.nbytes}
        rest = dict.fromkeys(OF_FIRST_PART) if part else {}
        yield row | rest | values | {"data": span.data.tobytes()}


def _as_table(rows: list[dict[str, Any]]) -> Any:
    schema = pa.schema(
        [SCHEMA.field(name).with_nullable(True) for name in SCHEMA.names if name in (*METADATA_COLUMNS, "data")]
    )
    return pa.Table.from_pylist(rows, schema).select([*METADATA_COLUMNS, "data"])
