"""Checks every byte of a run: checksums, seals, footers, indexes, and counts of rows. It must never write."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from ..errors import CorruptError, RunError
from ..format.integrity import FILE_CRC_KEY, NO_DIGITS
from ..format.rundir import index_name
from ..read import messages
from ..read.shard import ARROW_ERRORS, INDEX_ONLY, CheckedBatch, Shard, open_sealed, read_batch, read_layout, salvage
from ..read.shard_rows import SHARD_BYTES_KEY, ShardRows
from ..read.writers import RecordedWriter
from ..run.notes import absence, strays, unsealed_note
from ..run.reply import Progress, Reply, Report
from ..run.run import Run
from ..storage.locations import LOCAL, Location, store_of
from ..storage.untrusted_files import ByteSource
from ..system.processes import available_cores
from ..system.text import counted, plural, size

Each = Callable[[Callable[[ShardRows], list["VerifyResult"]], Iterable[ShardRows]], Iterable[list["VerifyResult"]]]
"""A function like `map`, which may call its function in several threads."""
_MAX_THREADS = 4
"""The most threads that check shards. Half of a batch's time goes into its checksum, which releases the GIL."""


class VerifyResult(NamedTuple):
    """A finding of `verify`: a fault, or a remark for the user."""

    is_fault: bool
    """False if the finding is not damage, such as the cut last write of a killed process, or a missing index."""
    text: str


def verify(run: Run, report: Report = lambda num_bytes: None) -> Iterator[VerifyResult]:
    """Read every byte of a run, and yield the findings. The run may still be recording."""
    is_over = all(writer.state != "recording" for writer in run.writers)
    store = store_of(run.path)
    with _threads() if store is LOCAL else nullcontext(map) as each:  # an object store has threads of its own
        verify_one = partial(_verify_writer, report=report, is_over=is_over, each=each)
        for findings in store.each(lambda writer: list(verify_one(writer)), run.writers):
            yield from findings
    for text in strays(run):
        yield VerifyResult(True, text)
    if note := unsealed_note(run):
        yield VerifyResult(False, note)
    if absent := absence(run):
        yield VerifyResult(False, f"{run.path}: not checked: {absent}")


def verify_reply(run: Run, progress: Progress) -> Reply:
    """Read every byte of a run, and return the reply of `recorder verify`."""
    total_bytes = run.size_bytes
    with progress("verify", total_bytes) as report:
        findings = list(verify(run, report))
    num_faults = sum(finding.is_fault for finding in findings)
    num_shards = sum(len(writer.all_shards) for writer in run.writers)
    checked = f"{counted(num_shards, 'shard')}, {counted(run.num_all_rows, 'row')}, {size(total_bytes)} checked"
    verdict = counted(num_faults, "fault") if num_faults else "no faults"
    return Reply(
        members=lambda: {
            "run": str(run.path),
            "rows": run.num_all_rows,
            "bytes": total_bytes,
            "findings": [{"fault": finding.is_fault, "text": finding.text} for finding in findings],
        },
        parts=lambda: [
            *(f"{'fault' if finding.is_fault else 'note'}: {finding.text}" for finding in findings),
            f"{run.name}: {checked}: {verdict}",
        ],
        exit_code=int(num_faults > 0),
    )


@contextmanager
def _threads() -> Iterator[Each]:
    """Yield a `map` that works in threads. Computing the checksum of a payload releases the interpreter lock."""
    with ThreadPoolExecutor(min(available_cores(), _MAX_THREADS), "recorder-verify") as pool:
        try:
            yield pool.map
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _verify_writer(writer: RecordedWriter, report: Report, is_over: bool, each: Each) -> Iterator[VerifyResult]:
    if writer.manifest_fault:
        yield VerifyResult(True, writer.manifest_fault)
    elif not writer.manifest.members:
        yield VerifyResult(False, f"{writer.directory}: has no manifest; its writer has only begun, or died at once")
    verify_one = partial(_verify_shard, writer=writer, report=report, is_over=is_over)
    for findings in each(verify_one, writer.all_shards):
        yield from findings
    yield from _verify_rows(writer)
    if writer.ending:
        yield VerifyResult(False, writer.ending)


def _verify_shard(shard: ShardRows, writer: RecordedWriter, report: Report, is_over: bool) -> list[VerifyResult]:
    check = _verify_sealed if shard.is_sealed else _verify_open
    try:
        return list(check(shard, writer, report))
    except FileNotFoundError:
        why = "is gone, and no writer is at work" if is_over else "was sealed or retired meanwhile; not checked"
        return [VerifyResult(is_over, f"{shard.path}: {why}")]
    except RunError as error:
        return [VerifyResult(True, str(error))]


def _verify_sealed(rows: ShardRows, writer: RecordedWriter, report: Report) -> Iterator[VerifyResult]:
    file = _SealedFile(rows.path)
    report(rows.size_bytes - sum(block.body_bytes for block in file.shard.blocks.values()))
    names = [name for name in file.shard.schema.names if name != "data"]  # also columns that this version does not know
    index, findings = _read_index(rows, names, report)
    metadata: dict[int, Any] = {}
    num_damaged = 0
    for number, checked in _read_all(file.shard, report):
        if isinstance(checked, VerifyResult):
            num_damaged += 1
            yield checked
            continue
        file.pass_batch(checked)
        if index is not None:
            metadata[number] = _apart(checked.batch.select(names), rows.path)
    if not num_damaged:  # after a damaged batch, the file's checksum shows nothing new
        file.check_end()
    yield from findings
    if index is not None:
        yield from _compare(index, list(file.shard.blocks), metadata, rows.path.with_name(index_name(rows.path.name)))


def _verify_open(rows: ShardRows, writer: RecordedWriter, report: Report) -> Iterator[VerifyResult]:
    open_source = partial(store_of(rows.path).open_growing, rows.path)
    salvaged = salvage(open_source)
    shard = Shard(open_source, salvaged.layout, salvaged.blocks)
    for text in salvaged.damage:
        yield VerifyResult(True, text)
    if salvaged.tail_damage and writer.state != "recording":
        yield VerifyResult(True, salvaged.tail_damage)
    for _, checked in _read_all(shard, lambda num_bytes: None):
        if isinstance(checked, VerifyResult):
            yield checked
    report(rows.size_bytes)
    num_rows = sum(salvaged.rows_of.values())
    rest = f", then {salvaged.num_trailing_bytes} bytes that are no whole batch" if salvaged.num_trailing_bytes else ""
    num_batches = len(salvaged.blocks)
    readable = f"{num_batches} {plural('batch', num_batches)} with {num_rows} {plural('row', num_rows)} can be read"
    text = f"{rows.path}: not sealed, {readable}{rest}"
    if writer.state == "closed":
        yield VerifyResult(False, f"{text}; the disk refused the shard, and its writer went on with another one")
    elif writer.state == "unclosed":
        yield VerifyResult(False, f"{text}; its writer was killed or is on another host")
    elif rest:
        yield VerifyResult(False, f"{text}; its writer may be at work on them")


def _read_all(shard: Shard, report: Report) -> Iterator[tuple[int, CheckedBatch | VerifyResult]]:
    """Read each batch of a shard once, and yield it with its number. Yield a finding in place of a damaged batch."""
    for number, block in shard.blocks.items():
        try:
            yield number, shard.read(number, shard.schema.names)
        except CorruptError as error:
            yield number, VerifyResult(True, str(error))
        report(block.body_bytes)


class _SealedFile:
    """One pass over all bytes of a sealed file. It includes the bytes that no column's checksum covers."""

    def __init__(self, path: Location, *, is_index: bool = False) -> None:
        """Read the beginning and the end of the file. Arguments and errors are those of `open_sealed`."""
        with store_of(path).open_sealed(path) as source:
            self._source, self.num_bytes = source, source.size_bytes
            self._layout, schema_block = read_layout(source, is_index=is_index)
            self._blocks = messages.footer_blocks(source)
            self.shard, self._seal = open_sealed(path, is_index=is_index)
            _check_footer(source, self._layout.schema, schema_block, self._blocks)
            self._crc = crc32c(source.read(0, schema_block.end))

    def pass_batch(self, checked: CheckedBatch) -> None:
        self._crc = crc32c(checked.whole, self._crc)

    def check_end(self) -> None:
        """Compare the checksum of the whole file with the checksum in the footer. Raise CorruptError if they differ.

        Files of older writers have no checksum of the whole file. Only `_check_footer` checks the end of such a file.
        """
        with self._source as source:
            end = self._blocks[-1].end
            self.pass_batch(read_batch(source, self._blocks[-1], self._layout, self._layout.names))
            digits = messages.footer_text(source, FILE_CRC_KEY)
            if not self._seal.has_file_crc and digits is None:
                return
            rest = bytearray(source.read(end, source.size_bytes - end))
            digits_slice = slice(0, 0) if digits is None else slice(digits.start - end, digits.stop - end)
            written_digits = bytes(rest[digits_slice])
            rest[digits_slice] = NO_DIGITS[: len(written_digits)]
            if written_digits != b"%08x" % crc32c(rest, self._crc):
                raise CorruptError(f"{source.where}: a byte outside of the rows has changed (CRC32C)")


def _check_footer(
    source: ByteSource, schema: object, schema_block: messages.MessageBlock, blocks: list[messages.MessageBlock]
) -> None:
    end = schema_block.end
    for block in blocks:
        if block.offset != end:
            raise CorruptError(f"{source.where}: the footer lists a batch at byte {block.offset}, expected at {end}")
        end = block.end
    footer_start = source.size_bytes - messages.TAIL_BYTES - messages.footer_bytes(source)
    end_of_stream = bytes(source.read(end, min(messages.PREFIX_BYTES, source.size_bytes - end)))
    if end_of_stream != struct.pack("<II", messages.CONTINUATION, 0) or footer_start != end + messages.PREFIX_BYTES:
        raise CorruptError(f"{source.where}: the footer does not follow the last batch at byte {end}")
    try:
        ends = [range(messages.FIRST_MESSAGE), range(blocks[-1].offset, source.size_bytes)]
        file = pa.ipc.open_file(source.read(0, source.size_bytes, ends))
        schema_of_footer = file.schema
        file.get_batch(len(blocks) - 1).validate(full=True)
    except ARROW_ERRORS as error:
        raise CorruptError(f"{source.where}: Arrow cannot read the seal and the footer ({error})") from error
    if bytes(source.read(0, messages.FIRST_MESSAGE)) != messages.MAGIC.ljust(messages.FIRST_MESSAGE, b"\0"):
        raise CorruptError(f"{source.where}: does not begin with {messages.MAGIC.decode()} and zeros")
    if not schema_of_footer.equals(schema, check_metadata=True):
        raise CorruptError(f"{source.where}: the schema in the footer is not the one at the beginning")


def _read_index(rows: ShardRows, metadata: Sequence[str], report: Report) -> tuple[Any, list[VerifyResult]]:
    """Return a shard's index and the findings about it. The index is a table, or None if missing or damaged."""
    path = rows.path.with_name(index_name(rows.path.name))
    try:
        file = _SealedFile(path, is_index=True)
        index, batches = file.shard, []
        names = [*metadata, *INDEX_ONLY]
        if set(index.schema.names) != set(names):
            raise CorruptError(f"{path}: has other columns than its shard")
        for number in index.blocks:
            checked = index.read(number, index.schema.names)
            file.pass_batch(checked)
            batches.append(checked.batch.select(names))
        file.check_end()
        report(file.num_bytes)
    except FileNotFoundError:
        is_missed = rows.path.name.startswith("tensors")  # only an index of tensors saves time
        return None, [VerifyResult(False, f"{path}: missing; readers are slower without")] if is_missed else []
    except RunError as error:
        return None, [VerifyResult(True, f"{error}; readers work without the index")]
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % rows.size_bytes:
        return None, [VerifyResult(True, f"{path}: was made for a shard of another size")]
    schema = pa.schema([index.schema.field(name) for name in names])
    return pa.Table.from_batches(batches, schema), []


def _compare(index: Any, numbers: list[int], metadata: dict[int, Any], path: Location) -> Iterator[VerifyResult]:
    """Compare a shard's index with the metadata columns of its batches, up to the first unreadable batch."""
    start = 0
    for number in numbers:
        if number not in metadata:
            return  # the damage of the batch was reported already
        batch = metadata[number]
        if not _is_same(index.slice(start, batch.num_rows), _as_listed(number, batch)):
            yield VerifyResult(True, f"{path}: differs from batch {number} of the shard; delete the index")
            return
        start += batch.num_rows
    if start != index.num_rows:
        text = f"{path}: lists {index.num_rows} rows, the shard has {start}; delete the index"
        yield VerifyResult(True, text)


def _apart(batch: Any, path: Location) -> Any:
    """Return the batch without its payload's memory. A batch from a store is copied, so that its message is freed."""
    if store_of(path) is LOCAL:  # the file is mapped, so nothing has to be copied
        return batch
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def _as_listed(number: int, batch: Any) -> Any:
    """Return the rows of a batch as the index of its shard lists them, with the positions of the rows."""
    rows = np.arange(batch.num_rows, dtype=np.int32)
    listed = pa.Table.from_batches([batch]).append_column("batch", pa.array(np.full_like(rows, number)))
    return listed.append_column("row", pa.array(rows))


def _is_same(table: Any, other: Any) -> bool:
    return all(_bits(table.column(name)).equals(_bits(other.column(name))) for name in table.column_names)


def _bits(column: Any) -> Any:
    if not pa.types.is_floating(column.type):
        return column
    return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())


def _verify_rows(writer: RecordedWriter) -> Iterator[VerifyResult]:
    seqs = [np.zeros(0, np.int64)]
    for shard in writer.all_shards:
        try:
            batches = shard.columns(["seq", "rank"])
        except RunError:
            return  # the damage of the batch was reported already
        seqs += [batch.column("seq").to_numpy() for batch in batches]
        ranks = {rank for batch in batches for rank in batch.column("rank").unique().to_pylist()}
        if ranks - {writer.rank}:
            yield VerifyResult(
                True, f"{shard.path}: has rows of rank {ranks - {writer.rank}}, not of {writer.rank} alone"
            )
    seq = np.concatenate(seqs)
    seq.sort()
    num_repeated = int(np.count_nonzero(seq[1:] == seq[:-1]))
    if num_repeated:
        yield VerifyResult(True, f"{writer.directory}: {num_repeated} rows have the number of another")
    balance = writer.balance
    if not balance.is_possible:
        accounts = f"{balance.retired_rows} rows removed by retention, of {balance.written} written"
        yield VerifyResult(True, f"{writer.directory}: the accounts contradict themselves: {accounts}")
        return
    if writer.state == "recording" or (writer.problems and not writer.rows_gone):
        return
    is_closed = writer.state == "closed"
    if is_closed and balance.num_missing:
        accounts = f"observed {balance.observed}, written {balance.written}, dropped {balance.num_dropped}"
        accounts += f", passed {balance.passed}" if balance.passed else ""
        yield VerifyResult(True, f"{writer.directory}: the accounts do not balance: {accounts}")
    expected = balance.written - balance.retired_rows
    if gone := writer.rows_gone:
        yield VerifyResult(True, f"{writer.directory}: {gone}")
    elif expected < len(seq) <= balance.written:
        kept = counted(len(seq) - expected, "row")
        yield VerifyResult(False, f"{writer.directory}: has {kept} that retention removed where the run was recorded")
    elif len(seq) != expected:
        text = f"{writer.directory}: has {len(seq)} rows, expected by its accounts are {expected}"
        yield VerifyResult(is_closed, text)
