"""A batch in the making: a record that fails on its way in leaves no trace; when it is full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from recorder.format.codec import Encoder
from recorder.records import KEEP_STATS, KEEP_TENSOR, Measured, Staged
from recorder.write import rows
from recorder.write.rows import NOT_MEASURED, RowBatch
from tests.rigs.fakes import fake_staged


def _staged(value: int) -> Staged:
    return fake_staged(np.full(8, value, np.uint8), keep=KEEP_TENSOR)


def test_a_record_that_finds_no_memory_leaves_the_batch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise MemoryError

    batch = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=1 << 20)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(rows, "crc32c", refuse)
        batch.add_part(_staged(1), Measured(note="no_statistics"), 0)
    assert batch.add_part(_staged(2), NOT_MEASURED, 0)
    built = batch.build()
    assert built.batch.num_rows == 1
    assert built.payload is not None
    assert built.payload.values.tolist() == [2] * 8
    assert built.crcs["data"][2] == crc32c(built.payload.values.tobytes())


class _EndOfMemory(list[Any]):
    """A list that finds no memory to grow."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # unlike `__add__`, it never returns
        raise MemoryError


@pytest.mark.parametrize("where", ["_cells", "_ends"])
def test_small_records_that_find_no_memory_leave_the_batch_as_it_was(where: str) -> None:
    batch = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=1 << 20)
    small = [fake_staged(np.zeros(2, np.float32), keep=KEEP_STATS, seq=seq) for seq in range(3)]
    batch.add_all(small[:1], [NOT_MEASURED])
    kept = getattr(batch, where)
    setattr(batch, where, _EndOfMemory(kept))
    with pytest.raises(MemoryError):
        batch.add_all(small, [NOT_MEASURED] * 3)
    setattr(batch, where, kept)
    with pytest.raises(ValueError, match="zip"):
        batch.add_all(small, [NOT_MEASURED] * 2)
    batch.add_all(small[1:], [NOT_MEASURED] * 2)
    assert batch.build().batch.column("seq").to_pylist() == [0, 1, 2]


def test_a_batch_is_full_at_its_bytes_and_empty_once_it_is_cleared() -> None:
    batch = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=16)
    for _ in range(2):
        for number in (1, 2):
            assert not batch.is_full
            assert batch.add_part(_staged(number), NOT_MEASURED, 0)
        assert batch.is_full
        batch.clear()
