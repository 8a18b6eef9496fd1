"""A merged run is a run like any other, and says just what the global view of its source says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

from recorder.errors import CorruptError
from recorder.format.codec import EncodedPayload, Encoder, concatenate, decode, max_encoded_bytes
from recorder.merge.merge import merge_run
from recorder.merge.unit import Inputs
from recorder.read.shard import CheckedBatch, Shard
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter, make_parts, make_ref, make_row, make_run
from tests.rigs.merging import add_steps, assert_is_merge, batch, content, make_small_run, roots, units, weight


def test_a_merged_run_holds_what_the_global_view_shows(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    report = merge_run(open_run(run), out)
    assert_is_merge(out, run)
    assert report.num_problems == 0
    merged = open_run(out)
    for step in range(4):
        both = np.concatenate([batch(step, 0), batch(step, 1)])
        assert np.array_equal(merged.array("layers.0", "output", step=step), both)
        assert np.array_equal(merged.array("layers.0", "grad_output", step=step), both * 2)
        assert np.array_equal(merged.array("layers.0", "param", step=step), weight(step))


def test_order_of_execution_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step is cut into pieces that are merged one by one."""
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 200)
    merge_run(open_run(run), out)
    assert any("-02of" in name for name in units(out))

    def global_rows(path: Path) -> list[tuple[int, str, str, str]]:
        rows = [row for row in content(open_run(path)) if row["rank"] is None]
        return [(row["step"], row["module_path"], row["site"], row["name"]) for row in rows]

    assert global_rows(out) == global_rows(run)


def test_rows_that_stay_per_rank_lie_under_their_rank(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=1), tmp_path / "out"
    merge_run(open_run(run), out)
    # The ranks' losses differ: the global row is their mean, and each rank's own is kept.
    merged = open_run(out)
    assert sorted((writer.rank or 0, writer.num_rows) for writer in merged.writers if writer.rank is not None) == [
        (0, 1),
        (1, 1),
    ]
    assert float(merged.array("", "scalar", name="loss", step=0, rank=1)) == 2.0


def test_the_manifests_say_what_was_merged_and_how(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    merge_run(open_run(run), out, loss="sum", layouts=["layers.0:output:=per_rank"])
    merged = open_run(out)
    assert merged.run_id == "run"
    assert merged.world_size == 2
    said = merged.manifest.members["merged_from"]
    assert (said["run_id"], said["path"], said["loss"]) == ("run", str(run), "sum")
    assert said["layouts"] == ["layers.0:output:=per_rank"]
    assert ("model", "layers.0") in merged.modules
    first = merged.writers[0].manifest.members
    assert first["rules"] == ["site=output keep=tensor"]
    assert first["roots"][0]["data_parallel"]["ranks"] == [0, 1]
    assert [one["rank"] for one in first["merged_writers"]] == [0, 1]
    assert {writer.manifest.members["step_source"] for writer in merged.writers} == {"optimizer"}


def test_options_reach_the_view(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=1), tmp_path / "out"
    merge_run(open_run(run), out, loss="sum", layouts=["layers.0:output:=per_rank"])
    merged = open_run(out)
    assert np.array_equal(merged.array("layers.0", "output", step=0, rank=1), batch(0, 1))
    both = np.concatenate([batch(0, 0), batch(0, 1)])
    assert np.array_equal(merged.array("layers.0", "grad_output", step=0, rank=0), 4 * batch(0, 0)) or np.array_equal(
        merged.array("layers.0", "grad_output", step=0), 4 * both
    )


def test_frames_are_copied_as_they_are_where_nothing_is_assembled(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    rows = [
        [make_row(0, values, rank=rank, site="param", name="weight", encoding="compressed", micro_step=None)]
        for rank in (0, 1)
    ]
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows[rank]])
        writer.finish(roots=roots())
    merge_run(open_run(run), out)
    assert open_run(out).table(["data"]).column("data").to_pylist() == [rows[0][0]["data"]]


def test_parts_and_references_become_rows_of_their_own(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", world_size=1), tmp_path / "out"
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = make_parts(0, values, 3, module_path="layers.0")
    again = make_row(3, values, module_path="layers.1")
    writer = HandmadeWriter(run)
    writer.add_shard([[*parts, again, make_ref(4, again, module_path="layers.2")]])
    writer.finish(roots=roots([0]))
    merge_run(open_run(run), out)
    merged = open_run(out)
    for path in ("layers.0", "layers.1", "layers.2"):
        assert np.array_equal(merged.array(path), values)
    assert_is_merge(out, run)


def test_a_step_that_exceeds_a_unit_is_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 128)
    report = merge_run(open_run(run), out)
    assert report.num_units > 8
    assert_is_merge(out, run)


def test_batches_and_shards_end_at_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    monkeypatch.setattr("recorder.merge.shards.BATCH_BYTES", 64)
    monkeypatch.setattr("recorder.merge.shards._SHARD_ROWS", 3)
    merge_run(open_run(run), out)
    assert len(list(out.rglob("tensors-*.arrow"))) > 3
    assert_is_merge(out, run)


def test_general_readers_open_a_merged_run(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    merge_run(open_run(run), out)
    table = ds.dataset(out, format="ipc").to_table()
    assert table.num_rows == open_run(out).num_rows


def test_a_run_without_rows_becomes_one_without_rows(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    assert merge_run(open_run(run), out).num_units == 0
    assert open_run(out).num_rows == 0


def test_steps_that_were_merely_counted_are_read_from_all_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        add_steps(writer, range(4))
        writer.finish(roots=roots(), step_source="counted")
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 600)
    merge_run(open_run(run), out)
    assert len(units(out)) > 1
    for step in range(4):
        assert np.array_equal(open_run(out).array("layers.0", "param", step=step), weight(step))


def test_a_plan_covers_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(make_small_run(tmp_path / "run", steps=9))
    monkeypatch.setattr("recorder.merge.unit.UNIT_ROWS", 40)
    monkeypatch.setattr("recorder.merge.unit.ROWS_PER_WRITER", 10)
    windows = list(Inputs(run, {}).windows())
    assert [step for first, last, _ in windows for step in range(first, last)] == list(range(9))
    assert len(windows) == 5


def test_windows_that_were_merged_before_stay_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_small_run(tmp_path / "run", steps=4)
    inputs = Inputs(open_run(path), {})
    names = {unit.name for window in inputs.windows() for unit in inputs.units(window)}
    add_steps(HandmadeWriter(path, 0, "another"), [7])
    grown = Inputs(open_run(path), {})
    kept = grown.kept_windows(names)
    assert kept == list(inputs.windows())
    assert [window[:2] for window in grown.windows(kept)] == [(0, 4), (7, 8)]
    assert Inputs(open_run(path), {"loss": "sum"}).kept_windows(names) == []


@pytest.mark.parametrize("codec", ["zstd", "auto", "none"])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_payloads_are_joined_without_decoding_them(codec: str, item_bytes: int) -> None:
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 5, size * item_bytes, dtype=np.uint8) for size in (70_000, 1_200_000, 0, 90_000)]
    encoder = Encoder(codec)
    payloads = []
    for piece in pieces:
        out = np.empty(max_encoded_bytes(len(piece)), np.uint8)
        encoding, num_bytes = encoder.encode(piece, item_bytes, out)
        payloads.append(EncodedPayload(encoding, out[:num_bytes], len(piece)))
    joined = concatenate(payloads, item_bytes)
    assert joined is not None
    whole = np.concatenate(pieces)
    data = b"".join(joined[1])
    assert np.array_equal(decode(joined[0], data, len(whole), item_bytes), whole)
    assert len(data) <= sum(len(payload.data) for payload in payloads) + 8


def test_planes_whose_frames_do_not_end_with_them_are_corrupt() -> None:
    values = np.zeros(80_000, np.uint8)
    out = np.empty(max_encoded_bytes(len(values)), np.uint8)
    _, num_bytes = Encoder("zstd").encode(values, 1, out)  # one frame, so no plane but the first begins one
    payload = EncodedPayload("planes", out[:num_bytes], len(values))
    with pytest.raises(CorruptError, match="planes"):
        concatenate([payload, payload], 4)


def test_a_reference_into_another_window_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that it means stands in an earlier batch of the shard, with rows of an earlier step."""
    run, out = make_run(tmp_path / "run", world_size=1), tmp_path / "out"
    values = np.arange(12, dtype=np.float32)
    rows = [make_row(0, values, step=0), make_ref(1, make_row(0, values), step=5)]
    writer = HandmadeWriter(run)
    writer.add_shard([[row] for row in rows])
    writer.finish(roots=roots([0]))
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 1)
    merge_run(open_run(run), out)
    assert np.array_equal(open_run(out).array("layers.0", step=5), values)
    assert_is_merge(out, run)


def test_a_window_reads_only_the_batches_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path / "run", world_size=1)
    writer = HandmadeWriter(path)
    writer.add_shard([[make_row(step, weight(step), step=step)] for step in range(8)], with_index=False)
    writer.finish(roots=roots([0]))
    view = open_run(path).view()
    assert view.rows(3, 5).table.column("step").to_pylist() == [3, 4]  # now the steps of the batches are known
    numbers: list[int] = []
    read = Shard.read

    def counted(self: Shard, number: int, columns: Sequence[str]) -> CheckedBatch:
        numbers.append(number)
        return read(self, number, columns)

    monkeypatch.setattr(Shard, "read", counted)
    assert view.rows(4, 6).table.column("step").to_pylist() == [4, 5]
    assert set(numbers) == {4, 5}
