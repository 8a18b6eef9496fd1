"""Reads rows of several steps (``keep=probe``: one number of each value at every step) or calls (``keep=tokens``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import note_members, parse_shape
from ..errors import CorruptError
from ..numerics.dtypes import as_array
from ..read.payload import decode_payload
from ..read.shard_rows import ShardRows
from ..read.writers import RecordedWriter
from ..sites import PROBE, TOKENS

MOST_PROBED = 50_000_000
"""The most numbers of the probe that a command reads."""
_OF_ROW = ("attempt", "rank", "root", "module_path", "phase", "mode", "scope")
_OF_NOTE = ("dtype", "global_numel")
_COUNTS = ("nan_count", "inf_count", "numel")
_COLUMNS = (*_OF_ROW, "site", "name", "step", "dtype", "shape", "encoding", "payload_bytes", "note", "batch", "row")
_TEXT = pa.dictionary(pa.int32(), pa.string())
PROBE_SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("attempt", "rank", "step")),
        *((name, _TEXT) for name in ("root", "module_path", "site", "name", "phase", "mode", "scope", "dtype")),
        ("l2", pa.float64()),
        *((name, pa.int64()) for name in (*_COUNTS, "global_numel")),
    ]
)
"""The columns of the probe's table. `l2` and the counts cover all calls of a step. `l2` leaves out NaN and infinite
elements. `global_numel` is the number of elements of the global tensor if the value is a chunk of it, or null."""


def read_probe(writers: Iterable[RecordedWriter]) -> Any:
    """Return what ``keep=probe`` recorded as a `pa.Table`, ordered by writer, block of steps, value and step.

    Raises CorruptError if a payload is damaged, or is no block of the probe.
    """
    return pa.concat_tables([PROBE_SCHEMA.empty_table(), *probe_tables(writers)]).unify_dictionaries()


def probe_tables(writers: Iterable[RecordedWriter]) -> Iterator[Any]:
    """Yield what ``keep=probe`` recorded as tables, one for each batch. The rows are those of `read_probe`.

    Raises CorruptError as `read_probe` does. From then on the damage is among the problems of the run.
    """
    for writer in writers:
        try:
            for shard in writer.probe_shards:
                yield from _tables(shard)
        except CorruptError as error:
            writer.note_damage(str(error))
            raise


class ProbeSize(NamedTuple):
    """How many numbers ``keep=probe`` recorded, and their first and last step."""

    num_numbers: int
    first_step: int
    last_step: int


def probe_size(writers: Iterable[RecordedWriter]) -> ProbeSize | None:
    """Return how many numbers ``keep=probe`` recorded, and their steps. None without any. Payloads are not read."""
    blocks = [block for one in writers for block in one.probed_blocks()]
    if not blocks:
        return None
    firsts, lasts, lengths = zip(*blocks, strict=True)
    return ProbeSize(sum(lengths), min(firsts), max(lasts))


def _tables(shard: ShardRows) -> Iterator[Any]:
    for rows, arrays in _blocks(shard, PROBE):
        notes = [note_members(row["note"]) for row in rows]
        blocks = [
            _numbers(row, values, note, str(shard.path)) for row, values, note in zip(rows, arrays, notes, strict=True)
        ]
        lengths = [block.shape[1] for block in blocks]
        is_there = np.concatenate([block[-1] > 0 for block in blocks])
        of_row = pa.array(np.repeat(np.arange(len(rows)), lengths)[is_there])
        steps = [
            row["step"] + np.arange(length) * note.get("every", 1)
            for row, note, length in zip(rows, notes, lengths, strict=True)
        ]
        names = [row["name"].partition(" ") for row in rows]
        values: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in _OF_ROW}
        values |= {"site": [name[0] for name in names], "name": [name[2] for name in names]}
        values |= {name: [note.get(name) for note in notes] for name in _OF_NOTE}
        numbers = np.concatenate(blocks, axis=1)[:, is_there]
        columns = {name: pa.array(some, PROBE_SCHEMA.field(name).type).take(of_row) for name, some in values.items()}
        columns |= {"step": pa.array(np.concatenate(steps)[is_there]), "l2": pa.array(numbers[0])}
        columns |= {name: pa.array(some.astype(np.int64)) for name, some in zip(_COUNTS, numbers[1:], strict=True)}
        yield pa.table([columns[name] for name in PROBE_SCHEMA.names], schema=PROBE_SCHEMA)


def _blocks(shard: ShardRows, site: str) -> Iterator[tuple[list[dict[str, Any]], list[npt.NDArray[Any]]]]:
    for batch in shard.columns(_COLUMNS):
        rows = [row for row in pa.Table.from_batches([batch]).to_pylist() if row["site"] == site]
        data = {number: shard.read(number, ("data",)).column("data") for number in {row["batch"] for row in rows}}
        arrays = []
        for row in rows:
            payload = data[row["batch"]][row["row"]].as_buffer()
            decoded = decode_payload(row["encoding"], payload, row["payload_bytes"], row["dtype"])
            arrays.append(as_array(decoded, row["dtype"], parse_shape(row["shape"])))
        if rows:
            yield rows, arrays


class TokenBlock(NamedTuple):
    """A row of ``keep=tokens``: the numbers of one value from several calls, one call after the other."""

    attempt: int
    rank: int
    root: str
    module_path: str
    name: str
    dtype: str
    order: int
    """The index of the value among all values of its rank, in the order of execution."""
    calls: list[dict[str, Any]]
    """The facts about each call, such as its number, and how many of the `numbers` it has."""
    numbers: npt.NDArray[Any]


def token_blocks(writers: Iterable[RecordedWriter]) -> Iterator[TokenBlock]:
    """Yield the rows of ``keep=tokens`` of some writers. Raise CorruptError for a damaged payload or note."""
    for writer in writers:
        for shard in writer.probe_shards:
            for rows, arrays in _blocks(shard, TOKENS):
                for row, numbers in zip(rows, arrays, strict=True):
                    note = note_members(row["note"])
                    calls = note.get("calls")
                    if not isinstance(calls, list) or sum(call["num"] for call in calls) != numbers.size:
                        raise CorruptError(f"{shard.path}: the note of a row of tokens does not tell its calls")
                    of = {name: row[name] for name in TokenBlock._fields if name in row}
                    yield TokenBlock(**of, order=note["order"], calls=calls, numbers=numbers)


def _numbers(
    row: Mapping[str, Any], values: npt.NDArray[Any], note: Mapping[str, Any], where: str
) -> npt.NDArray[np.float64]:
    """Return [4, N] for N steps of a block: `l2`, and the counts of NaN, infinite and all elements (0: no value)."""
    values = values.astype(np.float64)
    if values.ndim == 2 and len(values) == 1 + len(_COUNTS):
        return values
    if values.ndim != 1:
        raise CorruptError(f"{where}: a row of the probe has the shape {row['shape']}; expected [N] or [4,N]")
    nothing = np.zeros(len(values))
    return np.stack([values, nothing, nothing, np.where(np.isnan(values), 0, int(note.get("numel", 1)))])
