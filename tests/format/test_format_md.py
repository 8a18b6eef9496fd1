"""FORMAT.md says what the code does: a shard made by the package is read by a reader that knows the page alone."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from recorder import columns as columns_registry
from recorder.columns import SCHEMA
from recorder.format.codec import Encoder, max_encoded_bytes
from recorder.format.encodings import ALL_ENCODINGS, ENCODINGS
from recorder.format.fingerprint import fingerprint, to_text
from recorder.format.integrity import batch_metadata, seal_metadata
from recorder.numerics import dtypes
from recorder.sites import ALL_SITES, FORMAT_VERSION, SITE_OF
from tests.rigs import independent

_RNG = np.random.default_rng(7)
_NORMAL = _RNG.standard_normal((160, 60)).astype(np.float32)
_NORMAL_BFLOAT16 = (_NORMAL.view(np.uint32) >> 16).astype(np.uint16)
_MASK = np.tile(np.arange(8192, dtype=np.uint8) % 7 == 0, 2)
_SMALL = np.arange(6, dtype=np.int64).reshape(2, 3)
_VALUES: list[tuple[str, str, npt.NDArray[Any]]] = [
    ("auto", "planes_plain", _NORMAL),
    ("auto", "planes_plain", _NORMAL_BFLOAT16),
    ("zstd", "planes", _NORMAL),
    ("auto", "raw", _MASK),
    ("auto", "plain", _SMALL),
    ("none", "plain", _NORMAL),
    ("auto", "plain", np.zeros((0, 4), np.float32)),
]


def _row(seq: int, values: npt.NDArray[Any], encoding: str, data: bytes) -> dict[str, Any]:
    filled: dict[str, Any] = {field.name: None for field in SCHEMA}
    for field in SCHEMA:
        if not field.nullable:
            filled[field.name] = "" if field.type == pa.string() else 0
    bits = fingerprint(np.frombuffer(values.tobytes(), np.uint8), values.itemsize, values.shape)
    filled |= {"seq": seq, "shape": json.dumps(values.shape), "numel": values.size, "fingerprint": to_text(bits)}
    return filled | {"encoding": encoding, "payload_bytes": values.nbytes, "data": data, "module_path": "blocks.0"}


def _shard(compression: str | None = None) -> bytes:
    rows = []
    for seq, (codec, encoding, values) in enumerate(_VALUES):
        out = np.empty(max_encoded_bytes(values.nbytes), np.uint8)
        found, num_bytes = Encoder(codec).encode(np.frombuffer(values.tobytes(), np.uint8), values.itemsize, out)
        assert found == encoding
        rows.append(_row(seq, values, encoding, out[:num_bytes].tobytes()))
    rows.append(_row(len(rows), _NORMAL, "ref", (2).to_bytes(8, "little")))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for number, part in enumerate((rows[:3], rows[3:])):
            batch = pa.RecordBatch.from_pylist(part, schema=SCHEMA)
            writer.write_batch(batch, custom_metadata=batch_metadata(batch, number=number, ledger={"written": 8}))
        empty = pa.RecordBatch.from_pylist([], schema=SCHEMA)
        writer.write_batch(empty, custom_metadata=seal_metadata(number=2, ledger={"written": 8}))
    return sink.getvalue()


def _rows(shard: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.ipc.open_file(shard).read_all().to_pylist()
    return rows


@pytest.mark.parametrize("index", range(len(_VALUES) + 1))
def test_the_pages_own_lines_decode_every_encoding(index: int) -> None:
    rows = _rows(_shard())
    values = _VALUES[index][2] if index < len(_VALUES) else _NORMAL
    assert independent.payload(rows[index], rows, values.itemsize) == values.tobytes()


def test_the_shard_of_this_test_holds_every_encoding_of_the_page() -> None:
    documented = [row[0].strip("`") for row in independent.table(independent.section("Payloads"))]
    assert sorted({row["encoding"] for row in _rows(_shard())}) == sorted(documented)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_checksum_is_the_one_that_the_page_describes(compression: str | None) -> None:
    reader = pa.ipc.open_file(_shard(compression))
    for number in range(2):
        batch, metadata = reader.get_batch_with_custom_metadata(number)
        header = independent.header(metadata)
        assert (header["number"], header["rows"]) == (number, batch.num_rows)
        assert header["crc32c"] == {name: independent.checksums(batch.column(name)) for name in SCHEMA.names}


def test_the_seal_says_how_many_batches_there_are() -> None:
    reader = pa.ipc.open_file(_shard())
    batch, metadata = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    header = independent.header(metadata)
    assert (batch.num_rows, header["num_batches"], header["number"]) == (0, reader.num_record_batches, 2)


def test_the_header_shown_on_the_page_is_what_the_code_writes() -> None:
    shown = re.search(r"```json\n(.*?)```", independent.section("Batches and integrity"), re.DOTALL)
    assert shown is not None
    fields = json.loads(shown[1])
    columns = [SCHEMA.field("seq"), SCHEMA.field("scope")]
    batch = pa.RecordBatch.from_pylist([{"seq": 0}, {"seq": 1}], schema=pa.schema(columns))
    written = json.loads(batch_metadata(batch, number=0, ledger=fields["ledger"])[b"recorder_batch"])
    assert written == fields


def test_the_fingerprints_in_the_file_are_those_of_the_pages_formula() -> None:
    rows = _rows(_shard())
    for row, (_, _, values) in zip(rows, _VALUES, strict=False):
        if values.size < 5000:
            expected = independent.fingerprint(values.tobytes(), values.itemsize, values.shape)
            assert row["fingerprint"] == f"{expected:016x}"


def test_the_columns_of_the_page_are_those_of_the_schema() -> None:
    documented = []
    for names, kind, _ in independent.table(independent.section("Rows"))[: len(SCHEMA)]:
        documented += [(name, kind.split(",")[0], kind.endswith(", null")) for name in independent.words(names)]
    types = {"double": "float64"}
    assert documented == [(field.name, types.get(str(field.type), str(field.type)), field.nullable) for field in SCHEMA]


def test_the_words_of_the_page_are_those_of_the_code() -> None:
    rows = {row[0].strip("`"): independent.words(row[2]) for row in independent.table(independent.section("Rows"))}
    assert tuple(rows["mode"]) == columns_registry.MODES
    assert tuple(rows["phase"]) == columns_registry.PHASES
    assert tuple(rows["scope"]) == columns_registry.SCOPES
    assert tuple(row[0].strip("`") for row in independent.table(independent.section("Sites"))) == tuple(SITE_OF)
    assert tuple(row[0].strip("`") for row in independent.table(independent.section("Payloads"))) == ENCODINGS
    types = independent.section("Element types").split(". ")[0].split("Bytes per")[0]
    assert set(independent.words(types)) == set(dtypes.ITEM_BYTES)
    assert SCHEMA.metadata == {b"recorder_format": b"%d.%d" % FORMAT_VERSION}


def test_what_a_minor_version_added_says_so_on_the_page() -> None:
    rows = [row for name in ("Rows", "Sites", "Payloads") for row in independent.table(independent.section(name))]
    entries: list[Any] = [*columns_registry.COLUMNS, *ALL_SITES, *ALL_ENCODINGS]
    for entry in entries:
        if entry.since:
            texts = [" ".join(rest) for first, *rest in rows if entry.name in independent.words(first)]
            assert any(f"since version 1.{entry.since}" in text for text in texts), entry.name
        assert entry.since <= FORMAT_VERSION[1], f"{entry.name} is of a later version than FORMAT_VERSION"


def test_the_constants_and_examples_of_the_page_are_right() -> None:
    tables = independent.table(independent.section("Fingerprint"))
    for first, c_first, second, c_second in (row for row in tables if len(row) == 4):
        assert c_first == f"`{independent.constant(int(first)):016x}`"
        assert c_second == f"`{independent.constant(int(second)):016x}`"
    examples: list[tuple[Any, int, tuple[int, ...], tuple[int, ...] | None]] = [
        (np.float32(1), 4, (), None),
        (np.array([1, 2], np.float32), 4, (2,), None),
        (np.array([1, -1], np.float64), 8, (2,), None),
        (np.array([0x3F80, 0x4000], np.uint16), 2, (2,), None),
        (np.arange(6, dtype=np.int8), 1, (2, 3), None),
        (np.arange(3, 6, dtype=np.int8), 1, (1, 3), (1, 0)),
    ]
    *documented, of_a_run = [row[1].strip("`") for row in tables if len(row) == 2]
    assert documented == [
        f"{independent.fingerprint(values.tobytes(), item_bytes, shape, offsets):016x}"
        for values, item_bytes, shape, offsets in examples
    ]
    boxes = [(b"\2", (1, 1), (0, 2)), (b"\3\4", (1, 2), (1, 0))]
    assert of_a_run == f"{sum(independent.fingerprint(data, 1, *index) for data, *index in boxes) % (1 << 64):016x}"
