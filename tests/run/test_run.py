"""What a `Run` answers for a sound run."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from recorder.columns import METADATA_COLUMNS, SCHEMA
from recorder.errors import LookupFailedError, NotARunError, UnsupportedError
from recorder.format.rundir import encode_manifest
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter, make_parts, make_row, make_run
from tests.rigs.merging import make_small_run
from tests.rigs.small_runs import payload_rows


def expected_array(rank: int, step: int) -> Any:
    rows = payload_rows(rank)
    if step == 7:
        return np.concatenate([np.frombuffer(row["data"], "<f4") for row in rows[7:]]).reshape(3, 5)
    rng = np.random.default_rng(rank)
    arrays = [rng.standard_normal((3, 5)).astype(np.float32) for _ in range(6)]
    return arrays[min(step, 5)]


def test_a_run_names_its_ranks_steps_and_modules(run_path: Path) -> None:
    run = open_run(run_path)
    assert (run.run_id, run.version, run.world_size) == ("first", (1, 0), 2)
    assert (run.ranks, run.steps, run.module_paths) == ([0, 1], list(range(8)), ["layers.0"])
    assert [writer.state for writer in run.writers] == ["closed", "closed"]
    assert run.problems == []
    assert repr(run) == "<Run 'first': 2 ranks, steps 0 to 7, 26 rows>"


@pytest.mark.parametrize("step", range(8))
@pytest.mark.parametrize("rank", [0, 1])
def test_every_encoding_gives_the_recorded_bytes(run_path: Path, rank: int, step: int) -> None:
    found = open_run(run_path).array("layers.0", step=step, rank=rank)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected_array(rank, step))


def test_a_tensor_is_of_the_dtype_that_training_had(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    tensors = {
        "bfloat16": torch.randn(2, 3).bfloat16(),
        "float8_e4m3fn": torch.randn(4).to(torch.float8_e4m3fn),
        "complex64": torch.randn(2, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "int64": torch.tensor(-5),
        "float64": torch.zeros(0, 3, dtype=torch.float64),
    }
    rows = []
    for seq, (dtype, tensor) in enumerate(tensors.items()):
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        shape = {"shape": json.dumps(list(tensor.shape)), "numel": tensor.numel()}
        rows.append(make_row(seq, data, dtype=dtype, name=dtype, **shape))
    HandmadeWriter(run).add_shard([rows])
    opened = open_run(run)
    for dtype, tensor in tensors.items():
        found = opened.tensor("layers.0", name=dtype)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    assert opened.array("layers.0", name="bfloat16").dtype == ml_dtypes.bfloat16
    assert opened.array("layers.0", name="float8_e4m3fn").dtype == ml_dtypes.float8_e4m3fn


def test_a_table_has_the_light_columns_in_the_order_of_time(run_path: Path) -> None:
    table = open_run(run_path).table()
    assert table.column_names == list(METADATA_COLUMNS)
    assert table.schema.equals(pa.schema([SCHEMA.field(name) for name in METADATA_COLUMNS]))
    keys = list(zip(*(table.column(name).to_pylist() for name in ("attempt", "step", "rank", "seq")), strict=True))
    assert keys == sorted(keys)


def test_payloads_are_read_only_when_asked_for(run_path: Path) -> None:
    wanted = (pc.field("rank") == 1) & (pc.field("site") == "output")
    table = open_run(run_path).table(["seq", "data"], wanted)
    expected = {row["seq"]: row["data"] for row in payload_rows(1)}
    assert dict(zip(*table.to_pydict().values(), strict=True)) == expected


@pytest.mark.parametrize(
    "filter_, num_rows",
    [
        (pc.field("step") < 2, 8),
        (pc.field(METADATA_COLUMNS.index("step")) < 2, 8),
        ((pc.field("site") == "grad") & pc.field("mean").is_valid(), 6),
        (pc.scalar(True), 26),
        (pc.field("step") == 99, 0),
    ],
)
def test_a_filter_sees_every_light_column(run_path: Path, filter_: Any, num_rows: int) -> None:
    run = open_run(run_path)
    assert run.table(["seq"], filter_).num_rows == num_rows
    assert len(run.to_pandas(filter=filter_)) == num_rows


@pytest.mark.parametrize(
    "question, text",
    [
        ({"site": "tap", "step": 99}, "has no row with site='tap'; choose site="),
        ({"site": "tap", "step": "x"}, "has no row with site='tap'; choose site="),
        ({"site": "output", "step": 99, "rank": 9}, "site='output' has no row with step=99; choose step="),
        ({"site": "output", "step": "x"}, "step='x': expected a whole number"),
    ],
)
def test_of_what_no_row_has_the_first_is_named(run_path: Path, question: dict[str, Any], text: str) -> None:
    with pytest.raises(LookupFailedError, match=text):
        open_run(run_path).array("layers.0", **question)


def test_a_table_stays_what_it_was_when_files_change(tmp_path: Path) -> None:
    """Also where it is all rows as they stand in files that are mapped."""
    writer = HandmadeWriter(make_run(tmp_path / "run"))
    rows = [make_row(seq, [float(seq)]) for seq in range(40)]
    paths = [writer.add_shard([rows[:20]]), writer.add_shard([rows[20:]])]
    writer.finish()
    table = open_run(tmp_path / "run").table(["seq"])
    for path in (*paths, *writer.directory.glob("_*.index")):
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)
    assert table.column("seq").to_pylist() == list(range(40))


def test_a_filter_that_cannot_be_applied_is_named(run_path: Path) -> None:
    with pytest.raises(LookupFailedError, match="colour"):
        open_run(run_path).table(filter=pc.field("colour") == 1)


def test_an_unknown_column_names_the_nearest(run_path: Path) -> None:
    with pytest.raises(LookupFailedError, match="did you mean 'absmax'"):
        open_run(run_path).table(["abs_max"])


def test_the_dataset_holds_every_sealed_row(run_path: Path) -> None:
    assert open_run(run_path).dataset().count_rows() == 26


def test_rows_are_the_same_without_an_index(run_path: Path) -> None:
    with_index = open_run(run_path).table()
    indexes = list(run_path.glob("rank=*/*/_*.index"))
    assert len(indexes) == 4
    for index in indexes:
        index.unlink()
    run = open_run(run_path)
    assert run.table().equals(with_index)
    np.testing.assert_array_equal(run.array("layers.0", step=6, rank=1), expected_array(1, 6))


def test_an_index_of_another_shard_is_not_used(run_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = open_run(run_path).table()
    index, other = sorted(run_path.glob("rank=00000/*/_*.index"))
    index.write_bytes(other.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert open_run(run_path).table().equals(before)
    assert "belongs to another file" in caplog.text


class TestLookup:
    def test_an_open_question_lists_the_choices(self, run_path: Path) -> None:
        with pytest.raises(LookupFailedError, match=r"choose step=0\|1\|2\|3\|4\|5\|6\|7$"):
            open_run(run_path).array("layers.0")

    def test_many_choices_are_listed_compactly(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        HandmadeWriter(run).add_shard([[make_row(i, [1.0], step=i) for i in range(50)]])
        with pytest.raises(LookupFailedError, match=r"step=0\|1\|2\|3\|4\|5\|\.\.\.\|49 \(50\)"):
            open_run(run).array("layers.0")

    def test_a_missing_step_lists_the_steps(self, run_path: Path) -> None:
        with pytest.raises(LookupFailedError, match=r"no row with step=9; choose step=0\|1"):
            open_run(run_path).array("layers.0", step=9)

    def test_an_unknown_module_names_the_nearest(self, run_path: Path) -> None:
        with pytest.raises(LookupFailedError, match=r"no module 'layer\.0' in this run; nearest is 'layers\.0'"):
            open_run(run_path).array("layer.0")

    def test_statistics_alone_are_no_tensor(self, run_path: Path) -> None:
        with pytest.raises(LookupFailedError, match="keep=tensor"):
            open_run(run_path).array("layers.0", site="grad", step=1, rank=0)

    def test_rows_without_values_do_not_make_a_question_ambiguous(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        HandmadeWriter(run).add_shard([[make_row(0, [1.0], step=0), make_row(1, step=1)]])
        assert open_run(run).array("layers.0").tolist() == [1.0]

    def test_every_qualifier_tells_tensors_apart(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        choices: dict[str, Any] = {"micro_step": 1, "call": 1, "repeat": 1, "mode": "eval", "phase": "recompute"}
        choices |= {"root": "model_1", "scope": "final", "name": "x"}
        rows = [make_row(0, [0.0])] + [make_row(i, [float(i)], **{k: v}) for i, (k, v) in enumerate(choices.items(), 1)]
        HandmadeWriter(run).add_shard([rows])
        opened = open_run(run)
        for seq, (name, value) in enumerate(choices.items(), 1):
            question: dict[str, Any] = {name: value}
            assert opened.array("layers.0", **question).tolist() == [float(seq)]

    def test_the_newest_attempt_answers_and_the_older_stays_reachable(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        for attempt in (0, 1):
            writer = HandmadeWriter(run, name=f"writer-{attempt}")
            steps = range(0, 4) if attempt == 0 else range(2, 6)
            rows = [make_row(s, [attempt * 100.0 + s], step=s, attempt=attempt) for s in steps]
            writer.add_shard([rows])
            writer.finish(attempt=attempt)
        opened = open_run(run)
        found = {step: opened.array("layers.0", step=step).item() for step in range(6)}
        assert found == {0: 0.0, 1: 1.0, 2: 102.0, 3: 103.0, 4: 104.0, 5: 105.0}
        assert opened.array("layers.0", step=2, attempt=0).item() == 2.0

    def test_counted_steps_of_two_attempts_are_not_joined(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        for attempt in (0, 1):
            writer = HandmadeWriter(run, name=f"writer-{attempt}")
            writer.add_shard([[make_row(s, [float(attempt)], step=s, attempt=attempt) for s in range(4 - 2 * attempt)]])
            writer.finish(attempt=attempt, step_source="counted")
        opened = open_run(run)
        assert opened.array("layers.0", step=1).item() == 1.0
        assert opened.array("layers.0", step=3, attempt=0).item() == 0.0

    def test_a_tensor_without_all_its_parts_is_no_tensor(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        parts = make_parts(0, np.arange(9.0), 3)
        HandmadeWriter(run).add_shard([[parts[0], parts[2]]])
        with pytest.raises(LookupFailedError, match=r"only its parts \[0, 2\] were recorded"):
            open_run(run).array("layers.0")

    def test_a_last_part_that_is_missing_is_noticed(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        HandmadeWriter(run).add_shard([make_parts(0, np.arange(9.0), 3)[:2]])
        with pytest.raises(LookupFailedError, match="only 48 of the 72 bytes"):
            open_run(run).array("layers.0")


class TestOpening:
    def test_a_folder_with_one_run_is_that_run(self, run_path: Path) -> None:
        assert open_run(run_path.parent).path == run_path

    def test_of_a_folder_with_several_runs_the_newest_is_meant_and_said(
        self, run_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        newest = make_run(run_path.parent / "second", created_ns=2)
        assert open_run(run_path.parent).path == newest
        assert caplog.messages == [f"{run_path.parent}: took second, the newest of 2 runs"]

    def test_a_part_of_a_run_names_the_run(self, run_path: Path) -> None:
        with pytest.raises(NotARunError, match=f"recorder ls {run_path}$"):
            open_run(run_path / "rank=00000")

    @pytest.mark.parametrize("what", ["missing", "file", "empty"])
    def test_what_is_no_run_is_said(self, tmp_path: Path, what: str) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir()
        with pytest.raises(NotARunError, match=f"{what}: "):
            open_run(tmp_path / what)

    def test_a_newer_version_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match=r"2\.0"):
            open_run(make_run(tmp_path / "run", version=[2, 0]))

    def test_a_newer_minor_version_is_read(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        writer = HandmadeWriter(run)
        writer.add_shard([[make_row(0, [1.0])]])
        newer = json.loads((run / "_run.json").read_text()) | {"version": [1, 7], "colour": "blue"}
        (run / "_run.json").write_bytes(encode_manifest(newer))
        (writer.directory / "_later-000000.thing").write_text("x")
        (run / "later").mkdir()
        assert open_run(run).array("layers.0").tolist() == [1.0]

    def test_an_empty_run_answers_nothing(self, tmp_path: Path) -> None:
        run = open_run(make_run(tmp_path / "run"))
        assert (run.ranks, run.steps, run.module_paths, run.num_rows) == ([], [], [], 0)
        assert run.table().num_rows == 0
        assert run.table(["data"]).num_rows == 0
        assert run.dataset().count_rows() == 0
        assert "no steps" in repr(run)

    def test_a_merged_run_has_no_rank(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run")
        writer = HandmadeWriter(run)
        writer.add_shard([[make_row(0, [1.0], rank=None)]])
        writer.directory.parent.rename(run / "global")
        opened = open_run(run)
        assert opened.ranks == []
        assert opened.array("layers.0").tolist() == [1.0]


def test_modules_come_in_the_order_of_their_first_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [make_row(seq, module_path=path) for seq, path in enumerate(["z", "a", "", "z"])]
    HandmadeWriter(run).add_shard([rows])
    assert open_run(run).module_paths == ["z", "a", ""]


def test_modules_say_their_class_and_source(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    module = {"path": "layers.0", "class": "Linear", "source": "train.py:3", "sites": ["output"], "compiled": True}
    HandmadeWriter(run).finish(roots=[{"name": "model", "modules": [module, "junk"]}, 7])
    (info,) = open_run(run).modules.values()
    assert (info.class_name, info.source, info.sites, info.is_compiled) == ("Linear", "train.py:3", ("output",), True)


def test_reading_loads_no_torch_and_no_pandas() -> None:
    code = "import recorder.run.run, sys; print({'torch', 'pandas', 'ml_dtypes'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_tensors_layouts_and_rows_are_read_without_pandas(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run", steps=2)
    code = (
        "import recorder, sys\n"
        "run = recorder.open_run(sys.argv[1])\n"
        "run.array('layers.0', step=1, rank=1)\n"
        "assert not {'pandas', 'numpy.ma'} & set(sys.modules)\n"
        "run.array('layers.0', step=1)\n"
        "run.layout('layers.0', step=1)\n"
        "run.table(['step', 'l2'], steps=(0, 1))\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, timeout=120)


def test_a_question_about_one_rank_reads_the_rows_of_this_rank_alone(run_path: Path) -> None:
    run = open_run(run_path)
    with pytest.raises(LookupFailedError, match=r"no row with rank=7; choose rank=0\|1"):
        open_run(run_path).array("layers.0", step=3, rank=7)
    shutil.rmtree(run_path / "rank=00001")
    np.testing.assert_array_equal(run.array("layers.0", step=3, rank=0), expected_array(0, 3))
