"""Runs that are not whole: what can be merged is, the rest is said, nothing gets smaller silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from recorder.errors import LookupFailedError, NotARunError, UnsupportedError
from recorder.format.rundir import encode_manifest
from recorder.merge.merge import MergeReport, merge_run
from recorder.run.run import open_run
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import MODULES, add_steps, assert_is_merge, batch, make_small_run, roots, weight


def merged(run: Path) -> tuple[MergeReport, Path]:
    """Merge, and see that the result is sound."""
    out = run.parent / "out"
    report = merge_run(open_run(run), out)
    assert [finding.text for finding in verify(open_run(out))] == []
    return report, out


def damage(path: Path, content: bytes) -> None:
    """Turn one bit of some content of a file over."""
    data = bytearray(path.read_bytes())
    data[data.index(content)] ^= 1
    path.write_bytes(data)


def test_unsealed_shards_of_a_killed_writer_are_merged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        add_steps(writer, [0, 1], is_sealed=False, tail=b"\xff\xff\xff\xff\x00\x10\x00\x00 half a batch")
        writer.finish(roots=roots(), state="recording", pid=2**22 + 1)
    report, out = merged(run)
    assert report.num_problems == 0
    assert_is_merge(out, run)


def test_a_payload_that_is_corrupt_costs_its_own_row_alone(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    shard = sorted((run / "rank=00001").rglob("tensors-*.arrow"))[0]
    damage(shard, (batch(0, 1) * 4).tobytes())
    report, out = merged(run)
    assert report.num_problems > 0
    entry = report.findings["corrupt"]["first"][0]
    assert str(shard) in entry["text"]
    found = open_run(out)
    with pytest.raises(LookupFailedError):
        found.array("layers.0", "grad_output", step=0)
    of_site = (pc.field("site") == "grad_output") & (pc.field("step") == 0)
    lost = found.table(["encoding", "note", "l2"], of_site & pc.is_valid(pc.field("l2"))).to_pylist()
    assert [row["encoding"] for row in lost] == [None]
    assert json.loads(lost[0]["note"])["no_values"] == "the values are damaged, or cannot be read"
    assert np.array_equal(found.array("layers.0", "param", step=0), weight(0))
    assert np.array_equal(found.array("layers.0", step=2), np.concatenate([batch(2, 0), batch(2, 1)]))


def test_a_shard_whose_footer_and_index_are_gone_is_salvaged_and_said(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    shard = sorted((run / "rank=00001").rglob("tensors-*.arrow"))[0]
    (shard.parent / "_tensors-000000.index").unlink()
    shard.write_bytes(shard.read_bytes()[:-300])
    report, out = merged(run)
    assert report.findings["corrupt"]["num_problems"] > 0
    assert np.array_equal(open_run(out).array("layers.0", step=0), np.concatenate([batch(0, 0), batch(0, 1)]))


def test_a_missing_rank_makes_rows_partial(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    writer = HandmadeWriter(run, 0)
    add_steps(writer, [0])
    writer.finish(roots=roots())
    report, out = merged(run)
    assert report.findings["partial"]["num_problems"] > 0
    table = open_run(out).table(["rank", "site", "ranks_present", "ranks_expected"]).to_pylist()
    outputs = [row for row in table if row["site"] == "output" and row["rank"] is None]
    assert [(row["ranks_present"], row["ranks_expected"]) for row in outputs] == [("[0]", "[0,1]")]


def test_ranks_at_different_steps_are_partial_from_there_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank, last in ((0, 4), (1, 2)):
        writer = HandmadeWriter(run, rank)
        add_steps(writer, range(last))
        writer.finish(roots=roots())
    report, out = merged(run)
    assert report.findings["partial"]["first"][0]["step"] == 2
    found = open_run(out)
    assert np.array_equal(found.array("layers.0", step=1), np.concatenate([batch(1, 0), batch(1, 1)]))
    with pytest.raises(LookupFailedError):
        found.array("layers.0", step=3)


def test_replicas_that_differ_stay_per_rank_and_fail_the_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        common: dict[str, Any] = {"rank": rank, "micro_step": None, "phase": "optimizer", "name": "weight"}
        values = weight(0) + np.float32(rank)
        writer.add_shard([[make_row(0, values, site="grad", **common), make_row(1, weight(0), site="param", **common)]])
        writer.finish(roots=roots())
    report, out = merged(run)
    assert report.findings["replicas_differ"]["num_problems"] == 1
    found = open_run(out)
    assert np.array_equal(found.array("layers.0", "grad", rank=1), weight(0) + 1)
    assert np.array_equal(found.array("layers.0", "param"), weight(0))


def test_buffers_that_differ_are_said_and_fail_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        common: dict[str, Any] = {"rank": rank, "micro_step": None, "phase": "optimizer", "name": "mean"}
        writer.add_shard([[make_row(0, weight(0) + np.float32(rank), site="buffer", **common)]])
        writer.finish(roots=roots())
    report, _ = merged(run)
    assert report.findings["buffers_differ"]["count"] == 1
    assert report.num_problems == 0


def test_pieces_that_do_not_fit_are_refused_and_the_rest_merges(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        layout: dict[str, Any] = {
            "rank": rank, "micro_step": None, "phase": "optimizer", "site": "param", "global_shape": "[6,4]",
            "placements": '[{"kind":"Shard","dim":0}]', "layout_source": "dtensor",
            "mesh": json.dumps({"shape": [2], "dim_names": None, "coordinate": [rank]}, separators=(",", ":")),
        }  # fmt: skip
        rows = [
            make_row(0, weight(rank), name="overlapping", offsets=f"[{2 * rank},0]", **layout),
            make_row(1, weight(rank), name="weight", offsets=f"[{3 * rank},0]", **layout),
        ]
        writer.add_shard([rows])
        writer.finish(roots=roots(kind="fsdp2"))
    report, out = merged(run)
    assert report.findings["inconsistent"]["num_problems"] == 1
    assert report.findings["inconsistent"]["first"][0]["name"] == "overlapping"
    found = open_run(out)
    assert np.array_equal(found.array("layers.0", "param", name="weight"), np.concatenate([weight(0), weight(1)]))
    assert np.array_equal(found.array("layers.0", "param", name="overlapping", rank=1), weight(1))


def test_writers_of_another_run_in_the_directory_are_named_and_left_out(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run", steps=2)
    stranger = HandmadeWriter(run, 1, "stranger")
    add_steps(stranger, [0, 1])
    stranger.finish(run_id="another", roots=roots())
    report, out = merged(run)
    assert report.num_problems > 0
    assert "another run" in report.findings["stranger"]["first"][0]["text"]
    assert np.array_equal(open_run(out).array("layers.0", step=0), np.concatenate([batch(0, 0), batch(0, 1)]))


def test_another_major_version_is_refused(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    manifest = json.loads((run / "_run.json").read_text())
    (run / "_run.json").write_text(json.dumps(manifest | {"version": [2, 0]}))
    with pytest.raises(UnsupportedError, match=r"version 2\.0"):
        open_run(run)


def test_a_later_minor_version_is_merged(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run")
    manifest = json.loads((run / "_run.json").read_text())
    (run / "_run.json").write_bytes(encode_manifest(manifest | {"version": [1, 7], "news": True}))
    _, out = merged(run)
    assert_is_merge(out, run)


def test_a_restart_that_recorded_steps_again_wins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for attempt, factor in ((0, 1), (1, 3)):
        for rank in (0, 1):
            writer = HandmadeWriter(run, rank, f"attempt-{attempt}")
            row = make_row(0, weight(5) * np.float32(factor), site="param", name="weight", rank=rank, step=5)
            writer.add_shard([[row | {"attempt": attempt, "micro_step": None, "phase": "optimizer"}]])
            writer.finish(roots=roots(), attempt=attempt, started_ns=1_700_000_000_000_000_000 + attempt)
    report, out = merged(run)
    assert report.findings["superseded"]["count"] > 0
    assert report.num_problems == 0
    assert np.array_equal(open_run(out).array("layers.0", "param", step=5), weight(5) * np.float32(3))


def test_manifests_of_strangers_cannot_stop_a_merge(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        add_steps(writer, [0])
        odd: list[Any] = [None, 7, {"name": 3, "modules": "none"}, {"name": "model", "modules": [None, *MODULES]}]
        writer.finish(roots=odd, events=[1, {"kind": []}], step_source=5, rules={})
    _, out = merged(run)
    assert open_run(out).num_rows > 0


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_rank_whose_manifest_is_lost_is_no_attempt_of_its_own(tmp_path: Path, content: bytes | None) -> None:
    run = make_small_run(tmp_path / "run")
    sound = tmp_path / "sound"
    merge_run(open_run(run), sound)
    (manifest,) = (run / "rank=00001").rglob("_writer.json")
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    report, out = merged(run)
    assert set(report.findings) <= {"corrupt"}
    assert_is_merge(out, sound)


def test_an_attempt_that_died_within_a_step_does_not_replace_one_that_completed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step is merged alone, and lies at the end of a shard of the first attempt."""
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        for attempt, shards in ((0, [[0, 1], [2, 3]]), (1, [[1]])):
            writer = HandmadeWriter(run, rank, f"attempt-{attempt}")
            for steps in shards:
                rows = [
                    make_row(
                        step,
                        weight(step) * np.float32(1 + attempt),
                        step=step, rank=rank, attempt=attempt, site="param", name="weight", phase="optimizer",
                    )
                    for step in steps
                ]  # fmt: skip
                writer.add_shard([[row | {"micro_step": None} for row in rows]])
            started_ns = 1_700_000_000_000_000_000 + attempt
            writer.finish(roots=roots(), attempt=attempt, started_ns=started_ns, state="recording", pid=2**22 + 1)
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 1)
    _, out = merged(run)
    assert np.array_equal(open_run(out).array("layers.0", "param", step=1), weight(1))
    assert_is_merge(out, run)


def test_a_merge_is_not_merged_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run, 0).add_shard([[make_row(0, weight(0), site="param")]])
    merge_run(open_run(run), tmp_path / "out")
    with pytest.raises(NotARunError, match="is the merge of run run already"):
        merge_run(open_run(tmp_path / "out"), tmp_path / "again")
    assert not (tmp_path / "again").exists()
