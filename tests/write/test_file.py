"""A file that grows: values go to it from where they lie, whatever the disk refuses on the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from recorder.write.file import GRAIN_BYTES, AppendFile, Disk, PageMemory
from recorder.write.shard import BatchFile, IpcFormat
from tests.rigs.fakes import FaultyDisk
from tests.rigs.writer import read_open, read_sealed

SIZES = (0, 1, GRAIN_BYTES - 1, GRAIN_BYTES, GRAIN_BYTES + 1, 3 * GRAIN_BYTES, 100_001)
ROWS = pa.schema([("text", pa.string()), ("data", pa.large_binary()), ("number", pa.int64())])


class RefusingDisk(Disk):
    """A disk that takes whole blocks, of one piece at a time, and that refuses the writes of some numbers, from 0."""

    def __init__(self) -> None:
        self.refusals: dict[int, int] = {}
        """The errno by number."""
        self.num_writes = 0

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        return True  # as where the file system can; the page cache makes no difference here

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        code = self.refusals.get(self.num_writes)
        self.num_writes += 1
        if code is not None:
            raise OSError(code, os.strerror(code))
        return super().write(descriptor, data, offset)


def random_values(nbytes: int) -> npt.NDArray[np.uint8]:
    """In page memory that may not be written to."""
    values = PageMemory(nbytes + 1).data[:nbytes]
    values[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    values.flags.writeable = False
    return values


def append(file: AppendFile, text: bytes, nbytes: int) -> bytes:
    """Append a piece with so many values in it; what the file must have got."""
    values = random_values(nbytes)
    lead, trail = text + bytes(file.gap(len(text))), text[::-1]
    file.append_around(lead, values, trail)
    return lead + values.tobytes() + trail


def rows(count: int, nbytes: int) -> Any:
    """A batch with a payload of so many bytes in each row."""
    data = [bytes([number % 251]) * nbytes for number in range(count)]
    columns = [pa.array(map(str, range(count))), pa.array(data, pa.large_binary()), pa.array(range(count), pa.int64())]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


@pytest.mark.parametrize("is_direct", [True, False])
def test_values_of_any_size_stand_in_the_file_at_whole_blocks_and_are_left_as_they_were(
    tmp_path: Path, is_direct: bool
) -> None:
    file = AppendFile(Disk(), tmp_path / "file", PageMemory(1), is_direct=is_direct)
    content = b""
    for number, nbytes in enumerate((*SIZES, *reversed(SIZES))):
        memory = PageMemory(nbytes + 2 * GRAIN_BYTES)
        memory.data[:] = np.random.default_rng(number).integers(0, 256, len(memory.data), np.uint8)
        before = memory.data.copy()
        lead = b"lead" * (1 + 3000 * (number % 2))
        lead += bytes(file.gap(len(lead)))
        trail = b"trail" * (number % 3) * 1001
        values = memory.data[GRAIN_BYTES : GRAIN_BYTES + nbytes]
        content += lead
        assert len(content) % GRAIN_BYTES == 0
        content += values.tobytes() + trail
        file.append_around(lead, values, trail)
        assert np.array_equal(memory.data, before)
        assert file.end == len(content)
        written = (tmp_path / "file").read_bytes()
        assert written.startswith(content)
        assert set(written[len(content) :]) <= {0}
        assert len(written) < len(content) + GRAIN_BYTES
        file.append_bytes(b"between")
        content += b"between"
    file.publish(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == content


@pytest.mark.parametrize("nbytes", [GRAIN_BYTES - 1, 5 * GRAIN_BYTES, 100_001])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_disk_that_refuses_direct_writes_half_way_gets_the_rest_through_the_page_cache(
    tmp_path: Path, number: int, nbytes: int
) -> None:
    disk = RefusingDisk()
    file = AppendFile(disk, tmp_path / "file", PageMemory(1), is_direct=True)
    content = append(file, b"first", 10_001)
    disk.refusals = {disk.num_writes + number: errno.EINVAL}
    assert file.is_direct
    content += append(file, b"second", nbytes) + append(file, b"third", 20_003)
    file.append_bytes(b"end")
    assert not file.is_direct
    file.publish(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == content + b"end"


@pytest.mark.parametrize("max_write_bytes", [1000, GRAIN_BYTES, 5000])
def test_short_writes_anywhere_are_continued(tmp_path: Path, max_write_bytes: int) -> None:
    disk = FaultyDisk()
    file = AppendFile(disk, tmp_path / "file", PageMemory(1), is_direct=True)
    content = append(file, b"first" * 2000, 10_001)
    disk.max_write_bytes = max_write_bytes
    content += append(file, b"second" * 2000, 30_001) + append(file, b"third" * 2000, 10_001)
    file.publish(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == content


@pytest.mark.parametrize("codes", [(errno.EIO,), (errno.EINVAL, errno.EIO)])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_piece_that_fails_half_way_counts_as_never_appended(
    tmp_path: Path, number: int, codes: tuple[int, ...]
) -> None:
    disk = RefusingDisk()
    file = AppendFile(disk, tmp_path / "file", PageMemory(1), is_direct=True)
    content = append(file, b"first", 10_001)
    first = disk.num_writes + number
    disk.refusals = dict(zip(range(first, first + len(codes)), codes, strict=True))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        append(file, b"second" * 2000, 50_001)
    assert file.end == len(content)
    assert (tmp_path / "file").read_bytes().startswith(content)
    file.cut_back()
    assert (tmp_path / "file").read_bytes() == content
    content += append(file, b"third", 10_001) + append(file, b"fourth", 10_001)
    file.publish(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == content


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_or_a_kill_within_a_batch_leaves_those_before_it(tmp_path: Path, number: int) -> None:
    disk = RefusingDisk()
    path = tmp_path / "open"
    file = BatchFile(disk, path, IpcFormat(ROWS), PageMemory(1), is_direct=True)
    memory, batches = PageMemory(1), [rows(3, 5000), rows(5, 100)]
    for batch in batches:
        file.append_around(batch, {}, memory)
    disk.refusals = {disk.num_writes + number: errno.EIO}
    before = path.stat().st_size
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        file.append_around(rows(300, 5001), {}, memory)
    assert (path.stat().st_size > before) == (number > 0)
    assert [batch for batch, _ in read_open(path)] == batches  # as after a kill
    left = file.abandon()
    assert left is not None
    assert left.num_bytes == path.stat().st_size
    assert [batch for batch, _ in read_open(path)] == batches


@pytest.mark.parametrize("is_direct", [True, False])
def test_arrow_maps_each_payload_at_the_beginning_of_a_block(tmp_path: Path, is_direct: bool) -> None:
    file = BatchFile(Disk(), tmp_path / "open", IpcFormat(ROWS), PageMemory(1), is_direct=is_direct)
    memory = PageMemory(1)
    batches = [rows(count, nbytes) for count, nbytes in ((1, 1), (3, 4096), (100, 333), (2, 100_001), (7, 8))]
    for batch in batches:
        file.append_around(batch, {}, memory)
    file.seal(tmp_path / "sealed.arrow", {})
    assert [batch for batch, _ in read_sealed(tmp_path / "sealed.arrow")] == batches
    table = pa.ipc.open_file(pa.memory_map(str(tmp_path / "sealed.arrow"))).read_all()
    table.validate(full=True)
    addresses = [chunk.buffers()[2].address for chunk in table.column("data").chunks if len(chunk)]
    assert len(addresses) == len(batches)
    assert [address % GRAIN_BYTES for address in addresses] == [0] * len(batches)


def test_a_payload_that_is_written_directly_and_one_that_is_not_make_the_same_file(tmp_path: Path) -> None:
    for name, is_direct in (("direct", True), ("buffered", False)):
        file = BatchFile(Disk(), tmp_path / f"{name}.open", IpcFormat(ROWS), PageMemory(1), is_direct=is_direct)
        memory = PageMemory(1)
        for number in range(50):
            file.append_around(rows(number % 9 + 1, number * 131), {}, memory)
        file.seal(tmp_path / name, {})
    assert (tmp_path / "direct").read_bytes() == (tmp_path / "buffered").read_bytes()


def test_values_that_begin_within_a_block_of_memory_are_a_mistake(tmp_path: Path) -> None:
    file = AppendFile(Disk(), tmp_path / "file", PageMemory(1), is_direct=True)
    with pytest.raises(AssertionError):
        file.append_around(b"", PageMemory(1).data[8:16], b"")
    assert file.end == 0
