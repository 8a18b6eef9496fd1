"""Every byte that a reader uses is covered: whatever changes between writing and reading is an error."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from recorder.errors import CorruptError
from recorder.format.integrity import (
    METADATA_CRC_KEY,
    METADATA_KEY,
    batch_metadata,
    check_batch,
    joined_crc,
    seal_metadata,
)
from recorder.read.messages import parse_message
from recorder.read.shard import Layout

_SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("mean", pa.float64()),
        pa.field("data", pa.large_binary()),
    ]
)
_LEDGER = {"observed": 9, "written": 3, "dropped": {"pool_full": 6}}


def _batch(rows: list[dict[str, Any]]) -> Any:
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


_BATCH = _batch(
    [
        {"seq": 1, "name": "weight", "mean": 0.5, "data": b"\1\2\3"},
        {"seq": 2, "name": None, "mean": None, "data": None},
        {"seq": 3, "name": "é", "mean": -1.5, "data": b"\4" * 40},
    ]
)
_METADATA = batch_metadata(_BATCH, number=4, ledger=_LEDGER)

_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "seq": st.integers(0, 1 << 60),
            "name": st.none() | st.text(st.characters(codec="utf-8"), max_size=5),
            "mean": st.none() | st.floats(),
            "data": st.none() | st.binary(max_size=5),
        }
    ),
    max_size=20,
)


@given(st.binary(max_size=40), st.integers(0, 1 << 21), st.integers(0, 255))
def test_checksums_of_two_parts_join(first: bytes, num_bytes: int, start: int) -> None:
    second = np.arange(start, start + num_bytes).astype(np.uint8).tobytes()
    assert joined_crc(crc32c(first), crc32c(second), num_bytes) == crc32c(first + second)


@given(_ROWS, st.sampled_from([None, "zstd"]), st.sets(st.integers(0, 3), min_size=1))
def test_what_arrow_wrote_and_read_passes(
    rows: list[dict[str, Any]], compression: str | None, fields: set[int]
) -> None:
    batch, sink = _batch(rows), io.BytesIO()
    with pa.ipc.new_file(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch, custom_metadata=batch_metadata(batch, number=0, ledger=_LEDGER))
    reader = pa.ipc.open_file(sink.getvalue())
    assert check_batch(*reader.get_batch_with_custom_metadata(0), where="whole").ledger == _LEDGER
    some = pa.ipc.open_file(sink.getvalue(), options=pa.ipc.IpcReadOptions(included_fields=sorted(fields)))
    assert check_batch(*some.get_batch_with_custom_metadata(0), where="some").number == 0


def test_the_header_says_what_was_written() -> None:
    header = check_batch(_BATCH, _METADATA, where="here")
    assert (header.number, header.ledger, header.is_seal, header.num_batches) == (4, _LEDGER, False, None)


def test_a_seal_says_how_many_batches_there_are() -> None:
    header = check_batch(_batch([]), seal_metadata(number=4, ledger=_LEDGER), where="here")
    assert (header.is_seal, header.num_batches, header.ledger) == (True, 5, _LEDGER)


@pytest.mark.parametrize(
    ("column", "value"),
    [("seq", 4), ("name", "weighs"), ("name", ""), ("mean", 0.25), ("mean", None), ("data", b"\1\2\2"), ("data", b"")],
)
def test_a_changed_value_names_file_and_column(column: str, value: object) -> None:
    rows = _BATCH.to_pylist()
    rows[0][column] = value
    with pytest.raises(CorruptError, match=rf"shard\.arrow.*'{column}'"):
        check_batch(_batch(rows), _METADATA, where="shard.arrow, batch 4")


def test_columns_that_are_not_asked_for_are_not_looked_at() -> None:
    rows = _BATCH.to_pylist()
    rows[0]["mean"] = 7.0
    check_batch(_batch(rows), _METADATA, columns=["seq", "data"], where="here")


def test_a_null_that_became_a_value_shows_although_its_bytes_are_the_same() -> None:
    rows = _BATCH.to_pylist()
    rows[1]["mean"] = 0.0
    with pytest.raises(CorruptError, match="'mean'"):
        check_batch(_batch(rows), _METADATA, where="here")


def test_another_number_of_rows_is_corrupt() -> None:
    for batch in (_batch(_BATCH.to_pylist()[:2]), _batch([])):
        with pytest.raises(CorruptError, match="rows"):
            check_batch(batch, _METADATA, where="here")


@given(st.integers(0, len(_METADATA[METADATA_KEY]) - 1), st.integers(0, 7))
def test_a_flipped_bit_in_the_header_shows(index: int, bit: int) -> None:
    text = bytearray(_METADATA[METADATA_KEY])
    text[index] ^= 1 << bit
    with pytest.raises(CorruptError, match="CRC32C"):
        check_batch(_BATCH, {**_METADATA, METADATA_KEY: bytes(text)}, where="here")


def _forged(text: bytes) -> dict[bytes, bytes]:
    return {METADATA_KEY: text, METADATA_CRC_KEY: b"%08x" % crc32c(text)}


_HEADER = json.loads(_METADATA[METADATA_KEY])


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {METADATA_KEY: b"{}"},
        _forged(b"{}"),
        _forged(b"[]"),
        _forged(b"not JSON"),
        _forged(b"\xff"),
        _forged(b"[" * 100_000),
        *[_forged(json.dumps({**_HEADER, key: None}).encode()) for key in ("number", "rows", "ledger", "crc32c")],
        _forged(json.dumps({**_HEADER, "crc32c": {}}).encode()),
        _forged(json.dumps({**_HEADER, "number": "4"}).encode()),
        _forged(json.dumps({**_HEADER, "num_batches": 5}).encode()),
    ],
)
def test_metadata_that_is_missing_or_forged_is_corrupt(metadata: Mapping[bytes, bytes] | None) -> None:
    with pytest.raises(CorruptError, match="here"):
        check_batch(_BATCH, metadata, where="here")


def test_offsets_beyond_the_bytes_are_corrupt_and_not_read_beyond() -> None:
    written = np.array([0, 3, 3, 43], "<i8").tobytes()
    for last in (44, 1 << 40, -1):
        message = _BATCH.serialize().to_pybytes()
        assert message.count(written) == 1
        forged = message.replace(written, np.array([0, 3, 3, last], "<i8").tobytes())
        batch = pa.ipc.read_record_batch(pa.py_buffer(forged), _SCHEMA)
        with pytest.raises(CorruptError, match="'data'.*cut short" if last != 44 else "'data'"):
            check_batch(batch, _METADATA, columns=["data"], where="here")


def test_a_slice_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="slice"):
        batch_metadata(_BATCH.slice(1), number=0, ledger={})


def test_checksums_off_an_uncompressed_message_are_those_of_its_columns() -> None:
    numbers = pa.array([1, None, 3, 4, 5, 6, 7, 8, 9], pa.int16())
    columns = {
        "numbers": numbers,
        "flags": pa.array([True, None] + 7 * [False]),
        "fixed": pa.array(9 * [b"abc"], pa.binary(3)),
        "texts": pa.array(["é", None, "", "long enough"] + 5 * ["x"]),
        "bytes": pa.array([b"\1\2", b""] + 7 * [None], pa.large_binary()),
        "nothing": pa.array(9 * [None], pa.float64()),
        "all flags": pa.array(9 * [True]),
        "all texts": pa.array(["", "é", *7 * ["word"]]),
        "all bytes": pa.array(9 * [b"\0"], pa.large_binary()),
        "empty": pa.array(9 * [""]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    whole = batch.serialize()
    (_, metadata_bytes) = struct.unpack("<II", whole[:8].to_pybytes())
    message = parse_message(whole.slice(8, metadata_bytes), "here")
    crcs_of = Layout(batch.schema).crcs_of(message, memoryview(whole)[8 + metadata_bytes :])
    written = json.loads(batch_metadata(batch, number=0, ledger={})[METADATA_KEY])["crc32c"]
    assert {name: crcs_of(name) for name in columns} == written
    assert written["numbers"][0] is not None and written["fixed"][0] is None
