"""A batch in the making: a record that fails on its way in leaves no trace; when it is full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from recorder.capture.pool import Pool
from recorder.capture.segments import Segments
from recorder.format.codec import PLAIN, Encoder
from recorder.records import KEEP_TENSOR, Measured, Staged
from recorder.write import rows
from recorder.write.rows import NOT_MEASURED, RowBatch
from tests.fakes import fake_staged


def _encoded(value: int, pool: Pool, segments: Segments | None = None) -> Staged:
    """A record whose payload is the first of a segment, or the next of one in use."""
    segment = (segments or Segments(pool)).with_room(8)
    assert segment is not None
    segment.data[segment.end : segment.end + 8] = value
    piece: Any = segment.add(8, PLAIN, 8)
    return fake_staged(np.full(8, value, np.uint8), keep=KEEP_TENSOR)._replace(block=piece, piece=piece)


def _add(batch: RowBatch, staged: Staged, measured: Measured = NOT_MEASURED) -> bool:
    if staged.piece is None:
        return batch.add_part(staged, measured, 0)
    return batch.add_piece(staged, measured, staged.piece)


@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_record_that_finds_no_memory_leaves_the_batch_as_it_was(
    monkeypatch: pytest.MonkeyPatch, is_encoded: bool
) -> None:
    def refuse(*arguments: Any) -> None:
        raise MemoryError

    pool = Pool(1 << 20, progress_s=lambda: 0.0, clock=lambda: 0.0)
    batch = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=1 << 20)
    lost = _encoded(1, pool) if is_encoded else fake_staged(np.full(8, 1, np.uint8))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(rows, "_merge_notes", refuse)
        _add(batch, lost, Measured(note="no_statistics"))
    assert _add(batch, _encoded(2, pool))
    built = batch.build()
    assert built.batch.num_rows == 1
    assert built.payload is not None
    assert built.payload.values.tolist() == [2] * 8
    assert built.crcs["data"][2] == crc32c(built.payload.values.tobytes())


def test_a_batch_that_borrows_its_payload_is_larger_than_one_that_copies() -> None:
    pool = Pool(1 << 20, progress_s=lambda: 0.0, clock=lambda: 0.0)
    batch, segments = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=16), Segments(pool, 24)
    for is_encoded, num_rows in ((True, 3), (False, 2)):
        for number in range(1, num_rows + 1):
            assert not batch.is_full
            plain = fake_staged(np.full(8, number, np.uint8), keep=KEEP_TENSOR)
            assert _add(batch, _encoded(number, pool, segments) if is_encoded else plain)
            assert batch.is_borrowing == is_encoded
        assert batch.is_full
        batch.clear()


def test_a_segment_begins_a_batch_also_after_payloads_that_had_to_be_copied() -> None:
    pool = Pool(1 << 20, progress_s=lambda: 0.0, clock=lambda: 0.0)
    batch, segments = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=100), Segments(pool, 24)
    waiting = [_encoded(number, pool, segments) for number in range(6)]
    assert _add(batch, waiting[0]) and batch.is_borrowing
    batch.clear()  # written because it was old
    for number in (1, 2):
        assert _add(batch, waiting[number]) and not batch.is_borrowing
    assert not _add(batch, waiting[3])
    assert bytes(batch.build().payload.values) == bytes([1] * 8 + [2] * 8)  # type: ignore[union-attr]
    batch.clear()
    for number in (3, 4, 5):
        assert _add(batch, waiting[number]) and batch.is_borrowing
    assert batch.is_full


def test_empty_payloads_at_the_beginning_of_a_segment_end_no_batch() -> None:
    pool = Pool(1 << 20, progress_s=lambda: 0.0, clock=lambda: 0.0)
    batch, segments = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=100), Segments(pool, 24)
    held = segments.with_room(0)
    for num_bytes in (0, 0, 8):
        segment = segments.with_room(num_bytes)
        assert segment is not None and segment is held
        piece: Any = segment.add(num_bytes, PLAIN, num_bytes)
        values = np.zeros(num_bytes, np.uint8)
        assert _add(batch, fake_staged(values, keep=KEEP_TENSOR)._replace(block=piece, piece=piece))
    assert batch.num_rows == 3 and batch.is_borrowing


def test_a_batch_of_payloads_that_were_in_no_segment_is_not_ended_for_one() -> None:
    pool = Pool(1 << 20, progress_s=lambda: 0.0, clock=lambda: 0.0)
    batch = RowBatch(attempt=0, rank=0, encoder=Encoder(), batch_bytes=100)
    for _ in range(3):
        assert _add(batch, fake_staged(np.zeros(8, np.uint8), keep=KEEP_TENSOR))
        assert _add(batch, _encoded(1, pool)) and not batch.is_borrowing
    assert batch.num_rows == 6
