"""Files from foreign_writers: refused by name, and nothing allocated, followed or executed on their word."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from recorder.columns import SCHEMA
from recorder.errors import CorruptError, NotARunError, RunError
from recorder.read.messages import MAX_BATCH_BYTES, block_at, footer_blocks, footer_bytes
from recorder.read.shard import open_sealed
from recorder.run.run import open_run
from recorder.storage.untrusted_files import MappedFile
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, make_row, make_run, shard_bytes
from tests.rigs.small_runs import payload_rows


@pytest.fixture
def writer(tmp_path: Path) -> HandmadeWriter:
    return HandmadeWriter(make_run(tmp_path / "run"))


def run_of(writer: HandmadeWriter) -> Path:
    return writer.directory.parents[1]


def patch(path: Path, position: int, data: bytes) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:position] + data + old[position + len(data) :])


class TestLinksAndDevices:
    @pytest.mark.parametrize("name", ["tensors-000000.arrow", "_tensors-000000.arrow.open"])
    def test_a_linked_shard_is_refused(self, writer: HandmadeWriter, tmp_path: Path, name: str) -> None:
        writer.add_shard([payload_rows()]).rename(tmp_path / "elsewhere.arrow")
        (writer.directory / name).symlink_to(tmp_path / "elsewhere.arrow")
        with pytest.raises(NotARunError, match=f"{name}: is a symbolic link"):
            open_run(run_of(writer))

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_linked_directory_is_refused(self, writer: HandmadeWriter, tmp_path: Path, depth: int) -> None:
        writer.add_shard([payload_rows()])
        directory = [writer.directory, writer.directory.parent][depth]
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(NotARunError, match=f"{directory.name}: is a symbolic link"):
            open_run(run_of(writer))

    def test_a_run_may_be_named_by_a_link(self, writer: HandmadeWriter, tmp_path: Path) -> None:
        writer.add_shard([payload_rows()])
        (tmp_path / "link").symlink_to(run_of(writer))
        assert open_run(tmp_path / "link").num_rows == 10

    @pytest.mark.parametrize("name", ["_run.json", "_writer.json"])
    def test_a_linked_manifest_is_refused(self, writer: HandmadeWriter, tmp_path: Path, name: str) -> None:
        (manifest,) = run_of(writer).rglob(name)
        manifest.rename(tmp_path / "elsewhere.json")
        manifest.symlink_to(tmp_path / "elsewhere.json")
        if name == "_run.json":
            with pytest.raises(NotARunError, match=name):
                open_run(run_of(writer))
        else:
            assert name in open_run(run_of(writer)).problems[0]

    def test_a_linked_index_is_not_used(self, writer: HandmadeWriter, tmp_path: Path) -> None:
        shard = writer.add_shard([payload_rows()])
        (index,) = shard.parent.glob("_*.index")
        index.rename(tmp_path / "elsewhere.index")
        index.symlink_to(tmp_path / "elsewhere.index")
        run = open_run(run_of(writer))
        assert (run.num_rows, run.writers[0].shards[0].is_indexed) == (10, False)

    def test_directories_are_no_shards(self, writer: HandmadeWriter) -> None:
        (writer.directory / "tensors-000002.arrow").mkdir()
        assert open_run(run_of(writer)).writers[0].shards == []

    @pytest.mark.parametrize("name", ["tensors-000000.arrow", "_tensors-000001.arrow.open"])
    def test_a_pipe_instead_of_a_shard_is_refused(self, writer: HandmadeWriter, name: str) -> None:
        os.mkfifo(writer.directory / name)
        with pytest.raises(NotARunError, match=f"{name}: is a pipe"):
            open_run(run_of(writer))

    def test_a_pipe_instead_of_a_manifest_does_not_block(self, writer: HandmadeWriter) -> None:
        (writer.directory / "_writer.json").unlink()
        os.mkfifo(writer.directory / "_writer.json")
        assert "not a regular file" in open_run(run_of(writer)).problems[0]

    def test_foreign_names_are_ignored(self, writer: HandmadeWriter) -> None:
        data = shard_bytes([payload_rows()])
        for name in ("tensors-1.arrow", "tensors-000000.arrow\n", "x.arrow", "_tensors-00000x.arrow.open", "\x1b[2J"):
            (writer.directory / name).write_bytes(data)
        (run_of(writer) / "rank=-0001").mkdir()
        assert open_run(run_of(writer)).num_rows == 0


class TestManifests:
    @pytest.mark.parametrize("text", [b"", b"[1]", b"\xff", b"{", b'{"a":' * 100_000, b"null", b'{"format":"other"}'])
    def test_no_manifest_of_ours_is_one_error(self, writer: HandmadeWriter, text: bytes) -> None:
        (run_of(writer) / "_run.json").write_bytes(text)
        with pytest.raises(RunError, match=r"_run\.json"):
            open_run(run_of(writer))

    def test_a_huge_manifest_is_not_read(self, writer: HandmadeWriter) -> None:
        with open(run_of(writer) / "_run.json", "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(CorruptError, match="larger than"):
            open_run(run_of(writer))

    def test_a_lost_writer_manifest_costs_no_row(self, writer: HandmadeWriter) -> None:
        writer.add_shard([payload_rows()])
        (writer.directory / "_writer.json").write_bytes(b"{")
        run = open_run(run_of(writer))
        assert (run.num_rows, len(run.problems), run.modules) == (10, 1, {})
        assert run.array("layers.0", step=3).shape == (3, 5)

    def test_values_of_any_type_are_borne(self, writer: HandmadeWriter) -> None:
        junk: list[object] = [None, -1, "x", [], {}, 1e300, [[1]], {"dropped": 3}]
        for value in junk:
            keys = ("roots", "ledger", "attempt", "started_ns", "pid", "host", "step_source", "events", "settings")
            writer.finish(state="recording", **dict.fromkeys(keys, value))
            run = open_run(run_of(writer))
            (found,) = run.writers
            assert (found.balance.observed, found.attempt if value != -1 else 0, run.modules) == (0, 0, {})
            assert found.state in ("recording", "unclosed")


class TestForgedSizes:
    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("prefix", [(0xFFFFFFFF, -8), (0xFFFFFFFF, 8), (0xFFFFFFFF, 0), (16, 0), (0, 0)])
    def test_a_batch_has_the_length_that_the_footer_says_before_arrow_sees_it(
        self, writer: HandmadeWriter, prefix: tuple[int, int], compression: str | None
    ) -> None:
        path = writer.directory / "tensors-000000.arrow"
        path.write_bytes(shard_bytes([[make_row(0, [1.0])]], compression=compression))
        block = footer_blocks(MappedFile(path))[0]
        mark, change = prefix
        is_whole = (mark, change) == (0xFFFFFFFF, 0)
        patch(path, block.offset, struct.pack("<II", mark, block.metadata_bytes - 8 + change))
        shard, _ = open_sealed(path)
        for columns in (SCHEMA.names, ["seq"]):
            if is_whole:
                assert shard.read(0, columns).batch.num_rows == 1
            else:
                with pytest.raises(CorruptError, match="no message of the length"):
                    shard.read(0, columns)

    def test_a_message_of_an_older_format_is_refused(self, writer: HandmadeWriter) -> None:
        path = writer.directory / "tensors-000000.arrow"
        batch = pa.RecordBatch.from_pylist([make_row(0, [1.0])], schema=SCHEMA)
        options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA, options=options) as file:
            file.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
        path.write_bytes(sink.getvalue())
        with pytest.raises(CorruptError, match="format version 5"):
            open_sealed(path)
        assert open_run(run_of(writer)).num_rows == 0

    def test_a_footer_may_point_anywhere(self, writer: HandmadeWriter) -> None:
        shard = writer.add_shard([payload_rows()[:4], payload_rows()[4:]], with_index=False)
        data = shard.read_bytes()
        source = MappedFile(shard)
        start = len(data) - 10 - footer_bytes(source)
        blocks = footer_blocks(source)
        entry = data.index(
            struct.pack("<qi4xq", blocks[0].offset, blocks[0].metadata_bytes, blocks[0].body_bytes), start
        )
        for layout, shift, values in (("<q", 0, (-8, 0, 1, 8, 1 << 40, -(1 << 63))), ("<i", 8, (-1, 0, 8, 1 << 30))):
            for value in values:
                patch(shard, entry + shift, struct.pack(layout, value))
                run = open_run(run_of(writer))
                assert run.num_rows == 6, value  # the other batch is not touched
                assert len(run.problems) == 1
                shard.write_bytes(data)

    def test_a_footer_that_hides_batches_is_corrupt(self, writer: HandmadeWriter) -> None:
        shard = writer.add_shard([payload_rows()[:4], payload_rows()[4:]], with_index=False)
        data = shard.read_bytes()
        source = MappedFile(shard)
        first = footer_blocks(source)[0]
        entry = data.rindex(struct.pack("<qi4xq", first.offset, first.metadata_bytes, first.body_bytes))
        assert struct.unpack_from("<I", data, entry - 4) == (3,)
        for num_batches in (0, 1, 2):
            patch(shard, entry - 4, struct.pack("<I", num_batches))
            run = open_run(run_of(writer))
            assert run.num_rows == 10  # salvaged as a stream
            assert "footer" in run.problems[0]
            assert any("footer" in finding.text for finding in verify(run))

    def test_a_message_that_claims_a_terabyte_is_refused(self, writer: HandmadeWriter) -> None:
        shard = writer.add_shard([payload_rows()], is_sealed=False)
        source = MappedFile(shard)
        schema_end = block_at(source, 8)[0].end  # type: ignore[index]
        body_bytes = block_at(source, schema_end)[0].body_bytes  # type: ignore[index]
        position = shard.read_bytes().index(struct.pack("<q", body_bytes), schema_end)
        patch(shard, position, struct.pack("<q", 1 << 40))
        run = open_run(run_of(writer))
        assert run.num_rows == 0
        assert run.writers[0].shards[0].num_trailing_bytes > 0

    def test_a_compressed_column_that_claims_a_terabyte_is_refused(self, writer: HandmadeWriter) -> None:
        rows = [make_row(i, encoding=None) for i in range(100)]
        shard = writer.add_shard([rows], kind="stats", with_index=False)
        source = MappedFile(shard)
        block = footer_blocks(source)[0]
        _, message = block_at(source, block.offset)  # type: ignore[misc]
        assert message.is_compressed
        position = block.offset + block.metadata_bytes + max(message.buffers, key=lambda buffer: buffer[1])[0]
        for claim in (1 << 40, MAX_BATCH_BYTES + 1, (1 << 63) - 1):
            patch(shard, position, struct.pack("<q", claim))
            run = open_run(run_of(writer))
            assert run.table().num_rows == 0
            assert "declares" in run.problems[0]

    def test_a_payload_bomb_is_refused_before_it_grows(self, writer: HandmadeWriter) -> None:
        bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 26))
        assert len(bomb) < 10_000
        row = make_row(0, np.zeros(1 << 24, np.float32)) | {"encoding": "raw", "data": bomb, "payload_bytes": 1 << 26}
        honest = make_row(1, [1.0]) | {"encoding": "raw", "data": bomb, "step": 1}
        writer.add_shard([[row], [honest]])
        run = open_run(run_of(writer))
        assert run.steps == [0, 1]
        with pytest.raises(CorruptError, match="payload_bytes"):
            run.array("layers.0", step=0)
        with pytest.raises(CorruptError, match="expected 8"):
            run.array("layers.0", step=1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": "[4611686018427387904,4]"},
            {"shape": "[-1]"},
            {"shape": "[1.0]"},
            {"shape": "[" * 2000},
            {"shape": "[true]"},
            {"shape": "[" + "1," * 2000 + "1]"},
            {"payload_bytes": -8},
            {"payload_bytes": 1 << 60},
            {"payload_bytes": 16},
            {"payload_bytes": 0},
            {"payload_bytes": None},
            {"dtype": "object"},
            {"dtype": "load"},
            {"data": None},
            {"encoding": "ref"},
            {"encoding": "pickle"},
            {"encoding": "planes_plain"},
        ],
    )
    def test_a_row_that_contradicts_itself_is_an_error(
        self, writer: HandmadeWriter, changes: dict[str, object]
    ) -> None:
        writer.add_shard([[make_row(0, [1.0]) | changes]])
        run = open_run(run_of(writer))
        for read in (run.array, run.tensor):
            with pytest.raises(RunError):
                read("layers.0")

    @pytest.mark.parametrize("target", [0, 5, 7, 99, 1 << 63])
    def test_a_ref_that_names_no_earlier_row_is_an_error(self, writer: HandmadeWriter, target: int) -> None:
        ref = make_row(0, [1.0]) | {"encoding": "ref", "data": struct.pack("<Q", target)}
        writer.add_shard([[make_row(7, [1.0, 2.0], step=2), ref, make_row(5, [1.0], step=1)]])
        with pytest.raises(CorruptError, match="refers to row"):
            open_run(run_of(writer)).array("layers.0", step=0)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema], metadata=schema.metadata)


class TestNumbersThatNobodyCounts:
    """Checksums that hold say nothing of a stranger's numbers; `num_others` rows of the same batch are in order."""

    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("num_others", [0, 40])
    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("seq", -1, "holds -1 to"),
            ("seq", 1 << 53, "holds .* to 9007199254740992; expected numbers from 0 to 9007199254740991"),
            ("step", -(1 << 60), ".*expected numbers from -9007199254740992 to 9007199254740991"),
            ("rank", -(1 << 31), "holds -2147483648 to .* expected numbers from 0 to 2147483647"),
            ("payload_bytes", -1, "holds -1 to"),
            ("nan_count", -7, "holds -7 to"),
            ("seq", None, "has nulls, which it must not"),
            ("module_path", None, "has nulls, which it must not"),
        ],
    )
    def test_they_are_refused(
        self,
        writer: HandmadeWriter,
        name: str,
        value: int | None,
        reason: str,
        num_others: int,
        compression: str | None,
    ) -> None:
        rows = [make_row(number, [1.0]) for number in range(num_others)]
        rows.insert(num_others // 2, make_row(num_others, [1.0]) | {name: value})
        path = writer.directory / "tensors-000000.arrow"
        path.write_bytes(shard_bytes([rows], schema=_nullable(SCHEMA), compression=compression))
        with pytest.raises(CorruptError, match=f"batch at byte .*column '{name}' {reason}"):
            open_sealed(path)[0].read(0, SCHEMA.names)
        with pytest.raises(CorruptError, match=f"column '{name}' {reason}"):
            open_sealed(path)[0].read(0, [name])

    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("step", [-(1 << 53), -1, (1 << 53) - 1])
    def test_a_step_may_be_below_zero(self, writer: HandmadeWriter, step: int, compression: str | None) -> None:
        path = writer.directory / "tensors-000000.arrow"
        path.write_bytes(shard_bytes([[make_row(0, [1.0], step=step)]], compression=compression))
        assert open_sealed(path)[0].read(0, SCHEMA.names).batch.column("step").to_pylist() == [step]


class TestForeignSchemas:
    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize(("kind", "value"), [(pa.string(), "first"), (pa.int64(), -1), (pa.int32(), None)])
    def test_a_foreign_column_may_have_the_name_of_one_of_an_index(
        self, writer: HandmadeWriter, kind: pa.DataType, value: object, compression: str | None
    ) -> None:
        schema = SCHEMA.append(pa.field("batch", kind)).append(pa.field("row", pa.bool_()))
        rows = [make_row(0, [1.0]) | {"batch": value, "row": True}]
        path = writer.directory / "tensors-000000.arrow"
        path.write_bytes(shard_bytes([rows], schema=schema, compression=compression))
        assert open_run(run_of(writer)).array("layers.0").tolist() == [1.0]
        assert open_sealed(path)[0].read(0, schema.names).batch.column("batch").to_pylist() == [value]

    @pytest.mark.parametrize("kinds", [(pa.int32(), pa.string()), (pa.string(), pa.int64())])
    @pytest.mark.parametrize("is_first", [True, False])
    def test_two_columns_of_one_name_are_refused(
        self, writer: HandmadeWriter, kinds: tuple[pa.DataType, pa.DataType], is_first: bool
    ) -> None:
        twins = [pa.field("batch", kind) for kind in kinds]
        schema = pa.schema([*twins, *SCHEMA] if is_first else [*SCHEMA, *twins], metadata=SCHEMA.metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema):
            pass
        path = writer.directory / "tensors-000000.arrow"
        path.write_bytes(sink.getvalue())
        with pytest.raises(CorruptError, match="same name"):
            open_sealed(path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda schema: schema.remove(3),
            lambda schema: schema.set(0, pa.field("seq", pa.uint64())),
            lambda schema: schema.append(pa.field("seq", pa.int64())),
            lambda schema: schema.append(pa.field("extra", pa.dictionary(pa.int32(), pa.string()))),
            lambda schema: schema.append(pa.field("extra", pa.list_(pa.int32()))),
        ],
    )
    @pytest.mark.parametrize("is_sealed", [True, False])
    def test_another_schema_is_refused(
        self, writer: HandmadeWriter, change: Callable[[pa.Schema], pa.Schema], is_sealed: bool
    ) -> None:
        path = writer.directory / ("tensors-000000.arrow" if is_sealed else "_tensors-000000.arrow.open")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, change(SCHEMA)):
            pass
        path.write_bytes(sink.getvalue())
        run = open_run(run_of(writer))
        assert run.num_rows == 0
        assert bool(run.problems) == is_sealed

    @pytest.mark.parametrize("word", [b"module_path", b"recorder_format"])
    def test_a_schema_whose_texts_are_no_texts_is_borne(self, writer: HandmadeWriter, word: bytes) -> None:
        shard = writer.add_shard([payload_rows()], with_index=False)
        shard.write_bytes(shard.read_bytes().replace(word, b"\xff" + word[1:], 1))
        run = open_run(run_of(writer))
        assert run.num_rows == 10  # salvaged by the schema of FORMAT.md, if need be
        assert len(run.problems) == (word == b"module_path")
        assert run.array("layers.0", step=3).shape == (3, 5)

    def test_a_further_flat_column_is_ignored(self, writer: HandmadeWriter) -> None:
        schema = SCHEMA.insert(2, pa.field("extra", pa.string())).append(pa.field("more", pa.float32()))
        rows = [row | {"extra": "x", "more": 1.0} for row in payload_rows()]
        for name, is_sealed in (("tensors-000000.arrow", True), ("_tensors-000001.arrow.open", False)):
            (writer.directory / name).write_bytes(shard_bytes([rows], schema=schema, is_sealed=is_sealed))
        run = open_run(run_of(writer))
        assert (run.num_rows, run.problems) == (20, [])
        assert "extra" not in run.table().column_names

    def test_a_batch_without_checksums_is_refused(self, writer: HandmadeWriter) -> None:
        sink = pa.BufferOutputStream()
        batch = pa.RecordBatch.from_pylist(payload_rows(), schema=SCHEMA)
        with pa.ipc.new_file(sink, SCHEMA) as file:
            file.write_batch(batch)
        (writer.directory / "tensors-000000.arrow").write_bytes(sink.getvalue())
        run = open_run(run_of(writer))
        assert run.num_rows == 0
        assert "recorder_batch" in run.problems[0]
