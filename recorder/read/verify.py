"""Owns the check of a whole run, byte by byte: checksums, seals, footers, indexes, accounts. Must never write."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import CorruptError, RunError
from ..format.rundir import index_name
from ..format.schema import LIGHT_COLUMNS
from .files import GrowingFile, MappedFile
from .messages import CONTINUATION, PREFIX_BYTES, TAIL_BYTES, Block, footer_blocks, footer_bytes
from .rows import INDEX_COLUMNS, PLACE_FIELDS, SHARD_BYTES_KEY, ShardRows
from .run import Run
from .salvage import salvage
from .shard import ARROW_ERRORS, Shard, open_sealed, read_layout
from .unsealed import unsealed_note
from .writers import RecordedWriter

Report = Callable[[int], None]
"""Told how many bytes were checked since the last call."""


class Finding(NamedTuple):
    """Something that is not as it should be."""

    is_fault: bool
    """False for what is no damage, such as the cut last write of a killed process or a missing index."""
    text: str


def verify(run: Run, report: Report = lambda num_bytes: None) -> Iterator[Finding]:
    """Read every byte of a run again and yield what is wrong. A run that is being written may be verified, too."""
    for writer in run.writers:
        if writer.manifest_problem:
            yield Finding(True, writer.manifest_problem)
        elif not writer.manifest:
            yield Finding(False, f"{writer.directory}: has no manifest; its writer has only begun, or died at once")
        for shard in writer.shards:
            check = _verify_sealed if shard.is_sealed else _verify_open
            try:
                found = list(check(shard, writer, report))
            except FileNotFoundError:
                found = [Finding(False, f"{shard.path}: was sealed or retired meanwhile; not checked")]
            except RunError as error:
                found = [Finding(True, str(error))]
            yield from found
        yield from _verify_rows(writer)
        if writer.ending:
            yield Finding(False, writer.ending)
    if note := unsealed_note(run):
        yield Finding(False, note)


def _verify_sealed(rows: ShardRows, writer: RecordedWriter, report: Report) -> Iterator[Finding]:
    source = MappedFile(rows.path)
    layout, schema_block = read_layout(source)
    blocks = footer_blocks(source)
    shard, _ = open_sealed(rows.path)
    _check_footer(source, layout.schema, schema_block, blocks)
    report(source.size_bytes - sum(block.body_bytes for block in shard.blocks.values()))
    yield from _read_all(shard, report)
    yield from _verify_index(rows, shard)


def _verify_open(rows: ShardRows, writer: RecordedWriter, report: Report) -> Iterator[Finding]:
    found = salvage(lambda: GrowingFile(rows.path))
    shard = Shard(lambda: GrowingFile(rows.path), found.layout, found.blocks)
    for text in found.damage:
        yield Finding(True, text)
    yield from _read_all(shard, lambda num_bytes: None)
    report(rows.size_bytes)
    num_rows = sum(found.rows_of.values())
    rest = f", then {found.num_trailing_bytes} bytes that are no whole batch" if found.num_trailing_bytes else ""
    batches = "1 batch" if len(found.blocks) == 1 else f"{len(found.blocks)} batches"
    readable = f"{batches} with {num_rows} {'row' if num_rows == 1 else 'rows'} can be read"
    text = f"{rows.path}: not sealed, {readable}{rest}"
    if writer.state == "closed":
        yield Finding(False, f"{text}; the disk refused it while its writer went on with another")
    elif writer.state == "unclosed":
        yield Finding(False, f"{text}; its writer was killed or is on another host")
    elif rest:
        yield Finding(False, f"{text}; its writer may be at work on them")


def _read_all(shard: Shard, report: Report) -> Iterator[Finding]:
    for number, block in shard.blocks.items():
        try:
            shard.read(number, shard.schema.names)
        except CorruptError as error:
            yield Finding(True, str(error))
        report(block.body_bytes)


def _check_footer(source: MappedFile, schema: object, schema_block: Block, blocks: list[Block]) -> None:
    """The footer must list the messages that stand in the file, all of them, one after the other."""
    end = schema_block.end
    for block in blocks:
        if block.offset != end:
            raise CorruptError(f"{source.where}: the footer lists a batch at byte {block.offset}, expected at {end}")
        end = block.end
    footer_start = source.size_bytes - TAIL_BYTES - footer_bytes(source)
    end_of_stream = bytes(source.read(end, min(PREFIX_BYTES, source.size_bytes - end)))
    if end_of_stream != struct.pack("<II", CONTINUATION, 0) or footer_start != end + PREFIX_BYTES:
        raise CorruptError(f"{source.where}: the footer does not follow the last batch at byte {end}")
    try:
        schema_of_footer = pa.ipc.open_file(source.read(0, source.size_bytes)).schema
    except ARROW_ERRORS as error:
        raise CorruptError(f"{source.where}: Arrow cannot read the footer ({error})") from error
    if not schema_of_footer.equals(schema, check_metadata=True):
        raise CorruptError(f"{source.where}: the schema in the footer is not the one at the beginning")


def _verify_index(rows: ShardRows, shard: Shard) -> Iterator[Finding]:
    path = rows.path.with_name(index_name(rows.path.name))
    try:
        index, _ = open_sealed(path, extra=PLACE_FIELDS, without=("data",))
        batches = [index.read(number, INDEX_COLUMNS).batch for number in index.blocks]
    except FileNotFoundError:
        if rows.path.name.startswith("tensors"):  # statistics are read as fast from the shard itself
            yield Finding(False, f"{path}: missing; readers do without, more slowly")
        return
    except RunError as error:
        yield Finding(True, f"{error}; it is derived: readers go on without it")
        return
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % rows.size_bytes:
        yield Finding(True, f"{path}: was made for a shard of another size")
        return
    listed = pa.Table.from_batches(batches, pa.schema([index.schema.field(name) for name in INDEX_COLUMNS]))
    start = 0
    for number in shard.blocks:
        try:
            batch = shard.read(number, LIGHT_COLUMNS).batch
        except CorruptError:
            return  # found already
        part = listed.slice(start, batch.num_rows)
        start += batch.num_rows
        places = (np.full(batch.num_rows, number), np.arange(batch.num_rows))
        is_equal = all(_is_same(part.column(name), batch.column(name)) for name in LIGHT_COLUMNS)
        for name, expected in zip(("batch", "row"), places, strict=True):
            is_equal = is_equal and np.array_equal(part.column(name).to_numpy(), expected)
        if not is_equal:
            yield Finding(True, f"{path}: differs from batch {number} of the shard; delete it, it is derived")
            return
    if start != listed.num_rows:
        yield Finding(True, f"{path}: lists {listed.num_rows} rows, the shard has {start}; delete it, it is derived")


def _is_same(listed: Any, column: Any) -> bool:
    """Equality bit by bit: a NaN equals itself."""
    listed = listed.combine_chunks()
    if pa.types.is_floating(column.type):
        listed, column = listed.view(pa.int64()), column.view(pa.int64())
    return bool(listed.equals(column))


def _verify_rows(writer: RecordedWriter) -> Iterator[Finding]:
    """Numbers and accounts of one writer: each row once, from its own rank, and as many as it says."""
    seqs = [np.zeros(0, np.int64)]
    for shard in writer.shards:
        try:
            batches = shard.columns(["seq", "rank"])
        except RunError:
            return  # found already
        seqs += [batch.column("seq").to_numpy() for batch in batches]
        ranks = {rank for batch in batches for rank in batch.column("rank").unique().to_pylist()}
        if ranks - {writer.rank}:
            yield Finding(True, f"{shard.path}: has rows of rank {ranks - {writer.rank}}, not of {writer.rank} alone")
    seq = np.concatenate(seqs)
    if len(np.unique(seq)) != len(seq):
        yield Finding(True, f"{writer.directory}: {len(seq) - len(np.unique(seq))} rows have the number of another")
    balance = writer.balance
    if not balance.is_possible:
        accounts = f"{balance.retired_rows} rows removed by retention, of {balance.written} written"
        yield Finding(True, f"{writer.directory}: the accounts contradict themselves: {accounts}")
        return
    if writer.state == "recording" or writer.problems:
        return
    is_closed = writer.state == "closed"
    if is_closed and balance.num_missing:
        accounts = f"observed {balance.observed}, written {balance.written}, dropped {balance.num_dropped}"
        yield Finding(True, f"{writer.directory}: the accounts do not balance: {accounts}")
    expected = balance.written - balance.retired_rows
    if len(seq) != expected:
        text = f"{writer.directory}: has {len(seq)} rows, expected by its accounts are {expected}"
        yield Finding(is_closed, text)
