"""One file: plain Arrow reads it sealed, and reads it as a stream while it is open, wherever it is cut."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c

from recorder.columns import SCHEMA
from recorder.upkeep.verify import _SealedFile
from recorder.write.file import Disk, PageMemory
from recorder.write.shard import BatchFile, FooterBlock, IpcFormat
from tests.rigs.handmade import make_row
from tests.rigs.writer import read_open, read_sealed

NUMBERS = pa.schema([pa.field("number", pa.int64()), pa.field("text", pa.string())], metadata={b"a": b"b"})


def numbers(count: int, start: int = 0) -> Any:
    values = range(start, start + count)
    return pa.RecordBatch.from_arrays([pa.array(values, pa.int64()), pa.array(map(str, values))], schema=NUMBERS)


def open_file(path: Path, *, is_direct: bool = True, compression: str | None = None) -> BatchFile:
    return BatchFile(Disk(), path, IpcFormat(NUMBERS, compression), PageMemory(1 << 16), is_direct=is_direct)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 5, 300])
def test_a_sealed_file_is_what_arrow_itself_would_read(
    tmp_path: Path, num_batches: int, compression: str | None
) -> None:
    file = open_file(tmp_path / "open", compression=compression)
    batches = [numbers(number * 7 % 50 + 1, number) for number in range(num_batches)]
    for batch in batches:
        file.append(batch, {})
    file.seal(tmp_path / "sealed.arrow", {"written": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["sealed.arrow"]
    assert (tmp_path / "sealed.arrow").stat().st_size == file.num_bytes
    assert [batch for batch, _ in read_sealed(tmp_path / "sealed.arrow")] == batches
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / "sealed.arrow"))).read_all()
    table.validate(full=True)
    assert table.schema.equals(NUMBERS, check_metadata=True)
    assert table.num_rows == sum(batch.num_rows for batch in batches)
    # A stream reader sees the same batches, and stops before the footer.
    with pa.OSFile(str(tmp_path / "sealed.arrow")) as source:
        source.seek(8)
        assert pa.ipc.open_stream(source).read_all() == table


def test_a_footer_of_the_rows_schema_lists_each_batch_where_arrow_would_have(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([], schema=SCHEMA)
    file = BatchFile(Disk(), tmp_path / "open", IpcFormat(SCHEMA), PageMemory(1 << 20), is_direct=True)
    file.seal(tmp_path / "ours.arrow", {})
    with pa.OSFile(str(tmp_path / "ours.arrow")) as source:
        metadata = pa.ipc.open_file(source).get_batch_with_custom_metadata(0).custom_metadata
    options = pa.ipc.IpcWriteOptions(use_threads=False)
    with pa.ipc.new_file(tmp_path / "arrow.arrow", SCHEMA, options=options) as theirs:
        theirs.write_batch(batch, custom_metadata=metadata)
    ours, theirs_content = ((tmp_path / name).read_bytes() for name in ("ours.arrow", "arrow.arrow"))
    footer_bytes = int.from_bytes(theirs_content[-10:-6], "little")
    body = len(theirs_content) - 10 - footer_bytes
    assert ours[:body] == theirs_content[:body]


def test_direct_and_buffered_writes_make_the_same_file(tmp_path: Path) -> None:
    for name, is_direct in (("direct", True), ("buffered", False)):
        file = open_file(tmp_path / f"{name}.open", is_direct=is_direct)
        for number in range(50):
            file.append(numbers(number * 131 % 2000 + 1), {})
        file.seal(tmp_path / name, {})
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "buffered").read_bytes()


def test_after_the_last_batch_an_open_file_holds_nothing_but_zeros(tmp_path: Path) -> None:
    file = open_file(tmp_path / "open")
    for count in (2000, 1, 500, 3):
        file.append(numbers(count), {})
        content = (tmp_path / "open").read_bytes()
        assert set(content[file.num_bytes :]) <= {0}
        assert file.num_bytes <= len(content) < file.num_bytes + 4096


def test_the_blocks_of_a_footer_are_aligned_whatever_comes_before(tmp_path: Path) -> None:
    for num_letters in range(0, 64, 4):
        layout = IpcFormat(NUMBERS.with_metadata({b"a": b"x" * num_letters}))
        blocks = [FooterBlock(8 * number, 64, 128) for number in range(3)]
        ending = layout.ending(blocks, 0)
        footer_bytes = int.from_bytes(ending[-10:-6], "little")
        footer = ending[-10 - footer_bytes : -10]
        assert (footer_bytes - 24 * len(blocks)) % 8 == 0
        assert [FooterBlock(*fields) for fields in struct.iter_unpack("<qi4xq", footer[-24 * len(blocks) :])] == blocks


def test_an_open_file_reads_as_a_stream_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "open"
    file = open_file(path)
    ends = []
    for number in range(4):
        file.append(numbers(5, number), {})
        ends.append(file.num_bytes)
    content = path.read_bytes()
    assert len(content) % 4096 == 0
    assert set(content[file.num_bytes :]) == {0}
    cut = tmp_path / "cut"
    for nbytes in range(0, len(content) + 1, 7):
        cut.write_bytes(content[:nbytes])
        assert len(read_open(cut)) == sum(end <= nbytes for end in ends)


def test_an_abandoned_file_keeps_its_batches_and_loses_what_a_failed_write_left(tmp_path: Path) -> None:
    path = tmp_path / "open"
    file = open_file(path)
    file.append(numbers(3), {})
    with path.open("ab") as behind:
        behind.write(b"torn" * 3000)
    left = file.abandon()
    assert left is not None
    assert (left.path, left.num_rows, left.num_bytes) == (path, 3, path.stat().st_size)
    assert [batch for batch, _ in read_open(path)] == [numbers(3)]


def test_an_abandoned_file_without_rows_is_removed(tmp_path: Path) -> None:
    assert open_file(tmp_path / "open").abandon() is None
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_or_a_link_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            open_file(tmp_path / name)
    assert (tmp_path / "there").read_bytes() == b"x"
    assert not (tmp_path / "elsewhere").exists()


def test_a_batch_above_the_memory_finds_room(tmp_path: Path) -> None:
    file = open_file(tmp_path / "open")
    file.append(numbers(3), {})
    file.append(numbers(200_000), {})
    file.append(numbers(2), {})
    file.seal(tmp_path / "sealed.arrow", {})
    assert [batch.num_rows for batch, _ in read_sealed(tmp_path / "sealed.arrow")] == [3, 200_000, 2]


@pytest.mark.parametrize("is_direct", [True, False])
def test_any_number_of_rows_may_stand_around_a_payload(tmp_path: Path, is_direct: bool) -> None:
    """Whoever wrote an open shard may have put more rows into a batch than ours have, with longer names."""
    schema = pa.schema([("text", pa.string()), ("data", pa.large_binary()), ("number", pa.int64())])
    file = BatchFile(Disk(), tmp_path / "open", IpcFormat(schema), PageMemory(1 << 16), is_direct=is_direct)
    memory, batches = PageMemory(1 << 10), []
    for num_rows in (3, 20_000, 1, 9_000):
        data = [bytes([number % 251]) * (number % 7) for number in range(num_rows)]
        texts = ["x" * (number % 500) for number in range(num_rows)]
        columns = [pa.array(texts), pa.array(data, pa.large_binary()), pa.array(range(num_rows), pa.int64())]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
        file.append_around(batches[-1], {}, memory)
    file.seal(tmp_path / "sealed.arrow", {})
    assert [batch for batch, _ in read_sealed(tmp_path / "sealed.arrow")] == batches


@pytest.mark.parametrize("num_bytes", [5, 3 << 20])
def test_the_footer_has_the_checksum_of_the_whole_file_whoever_looks(tmp_path: Path, num_bytes: int) -> None:
    """By FORMAT.md alone: the digits count as zeros."""
    data = np.random.default_rng(0).bytes(num_bytes)
    batch = pa.RecordBatch.from_pylist([make_row(0) | {"encoding": "plain", "data": data}], schema=SCHEMA)
    file = BatchFile(Disk(), tmp_path / "open", IpcFormat(SCHEMA), PageMemory(1 << 20), is_direct=False)
    file.append_around(batch, {}, PageMemory(1 << 20))
    file.append(batch, {})
    file.seal(tmp_path / "tensors-000000.arrow", {})
    content = (tmp_path / "tensors-000000.arrow").read_bytes()
    key = content.rindex(b"recorder_file_crc32c")
    digits = next(at for at in range(key + 20, key + 40) if content[at : at + 8].isalnum())
    assert content[digits : digits + 8] == b"%08x" % crc32c(content[:digits] + b"0" * 8 + content[digits + 8 :])
    check = _SealedFile(tmp_path / "tensors-000000.arrow")
    for number in check.shard.blocks:
        check.pass_batch(check.shard.read(number, SCHEMA.names))
    check.check_end()


def test_arrow_shows_the_checksum_of_a_file(tmp_path: Path) -> None:
    file = open_file(tmp_path / "open")
    file.append(numbers(3), {})
    file.seal(tmp_path / "sealed.arrow", {})
    with pa.OSFile(str(tmp_path / "sealed.arrow")) as source:
        opened = pa.ipc.open_file(source)
        if not hasattr(opened, "metadata"):
            pytest.skip("pyarrow shows it since version 21")
        assert re.fullmatch(rb"[0-9a-f]{8}", opened.metadata[b"recorder_file_crc32c"])
