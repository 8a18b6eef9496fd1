"""Every way to shard parameters: put where their rows say, the pieces of four ranks are what one process has."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pandas as pd
import pytest
import torch

import recorder
from recorder.format.fingerprint import MODULUS, fingerprint
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

FLAT = ["full", "full_orig", "full_of_one_unit", "grad_op", "grad_op_orig", "frozen_orig", "checkpointed"]
HYBRID = ["hybrid", "hybrid_orig"]
WHOLE = ["no_shard", "no_shard_orig"]
IMAGES = ["images", "images_orig"]
FSDP2 = ["fsdp2", "fsdp2_kept", "fsdp2_by_last_dim"]
HSDP = ["hsdp", "hsdp_kept", "hsdp_by_last_dim"]
TRAINED = [*FLAT, "inside", *HYBRID, *WHOLE, *FSDP2, *HSDP]
INFERRED = ["infer", "infer_orig", "infer_grad_op_orig"]
TENSOR_PARALLEL = ["tensor_parallel", "tensor_parallel_orig"]
NEVER_REDUCED = ["no_sync", "no_sync_orig"]
Key = tuple[str, str, str, int]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("layouts")
    return jobs.succeeded(jobs.ranks(folder, SCRIPTS / "layouts.py", "out", num=4))


class Pieces:
    """What the ranks recorded of one case."""

    def __init__(self, finished: Finished, case: str) -> None:
        self.run = recorder.open_run(finished.folder / "out" / case)
        self.expected: dict[Key, torch.Tensor] = torch.load(finished.folder / "out" / f"{case}.pt")
        frame = self.run.to_pandas()
        self.frame = frame[frame["site"].isin(["param", "grad", "optim"])]
        self.by_key: dict[Key, list[tuple[Any, torch.Tensor]]] = {}
        row: Any
        for row in self.frame.sort_values("rank").itertuples():
            key: Key = (row.site, row.module_path, row.name, row.step)
            question: dict[str, Any] = {"site": row.site, "step": row.step, "rank": row.rank, "name": row.name}
            self.by_key.setdefault(key, []).append((row, self.run.tensor(row.module_path, **question)))

    def whole(self, key: Key) -> torch.Tensor:
        """One replica of the tensor, which all others must equal."""
        replicas: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        pieces = self.by_key[key]
        for row, piece in pieces:
            mesh = json.loads(row.mesh) if isinstance(row.mesh, str) else {"coordinate": [row.rank, 0]}
            replicas.setdefault(mesh["coordinate"][0] if len(mesh["coordinate"]) > 1 else 0, []).append((row, piece))
        wholes = [self._assembled(replica) for replica in replicas.values()]
        assert all(torch.equal(whole, wholes[0]) for whole in wholes)
        return wholes[0]

    def _assembled(self, pieces: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
        row, piece = pieces[0]
        if pd.isna(row.placements):
            (_,) = pieces
            return piece
        shape = json.loads(row.global_shape)
        whole, count = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        for row, piece in pieces:
            assert json.loads(row.global_shape) == shape
            placement = json.loads(row.placements)[-1]
            if placement["kind"] == "FlatShard":
                region: Any = slice(placement["offset"], placement["offset"] + len(piece))
                whole.view(-1)[region], count.view(-1)[region] = piece, count.view(-1)[region] + 1
            else:
                starts = json.loads(row.offsets)
                region = tuple(slice(i, i + size) for i, size in zip(starts, piece.shape, strict=True))
                whole[region], count[region] = piece, count[region] + 1
        assert (count == 1).all()
        marks = sum(int(row.fingerprint, 16) for row, _ in pieces)
        assert marks % MODULUS == fingerprint(whole.reshape(-1).view(torch.uint8).numpy(), 4, tuple(shape))
        return whole


@pytest.fixture(scope="module")
def pieces(finished: Finished) -> Any:
    known: dict[str, Pieces] = {}

    def pieces(case: str) -> Pieces:
        if case not in known:
            known[case] = Pieces(finished, case)
        return known[case]

    return pieces


@pytest.mark.parametrize("case", [*TRAINED, *INFERRED])
def test_the_pieces_make_the_tensors_of_one_process(pieces: Any, case: str) -> None:
    """Not bit by bit: four equal gradients are summed one after the other before they are divided."""
    found = pieces(case)
    assert found.expected
    for key, expected in found.expected.items():
        if not key[2].endswith(".step"):
            torch.testing.assert_close(found.whole(key), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [*TRAINED, *IMAGES])
@pytest.mark.parametrize("site", ["grad", "optim"])
def test_every_rank_has_a_piece_of_everything_and_of_nothing_else(pieces: Any, case: str, site: str) -> None:
    found = pieces(case)
    expected = {key for key in found.expected if key[0] == site and not key[2].endswith(".step")}
    recorded = {key for key in found.by_key if key[0] == site and not key[2].endswith(".step")}
    assert recorded == expected
    for key in expected:
        assert [row.rank for row, _ in found.by_key[key]] == [0, 1, 2, 3]


@pytest.mark.parametrize("case", TRAINED)
def test_steps_of_the_optimizer_are_plain_numbers(pieces: Any, case: str) -> None:
    found = pieces(case)
    steps = {key: rows for key, rows in found.by_key.items() if key[2].endswith(".step")}
    assert set(steps) == {key for key in found.expected if key[2].endswith(".step")}
    for key, rows in steps.items():
        assert {value.item() for _, value in rows} == {key[3] + 1}
        assert all(value.dim() == 0 and pd.isna(row.placements) for row, value in rows)


@pytest.mark.parametrize("case", [*TRAINED, *IMAGES])
def test_training_is_not_changed(finished: Finished, case: str) -> None:
    for rank in range(4):
        twins = torch.load(finished.folder / "out" / f"{case}.twins{rank}")
        assert twins["same"]
        without, recorded = twins["num_collectives"]
        assert without == recorded > 0


@pytest.mark.parametrize("case", [*FLAT, "inside"])
def test_slices_lie_in_a_mesh_of_one_axis(pieces: Any, case: str) -> None:
    rows = pieces(case).frame
    rows = rows[rows["shape"] != "[]"]
    assert set(rows["layout_source"]) == {"fsdp"} and rows["offsets"].isna().all()
    for row in rows.itertuples():
        at = {"coordinate": [row.rank], "ranks": [0, 1, 2, 3]}
        assert json.loads(row.mesh) == {"shape": [4], "dim_names": None} | at
        assert [placement["kind"] for placement in json.loads(row.placements)] == ["FlatShard"]


@pytest.mark.parametrize("case", [*HYBRID, *HSDP])
@pytest.mark.parametrize("kind", ["param", "grad", "optim"])
def test_a_grid_has_two_placements_and_coordinates(pieces: Any, case: str, kind: str) -> None:
    rows = pieces(case).frame
    rows = rows[(rows["site"] == kind) & (rows["shape"] != "[]")]
    shard = "FlatShard" if case in HYBRID else "Shard"
    assert set(rows["layout_source"]) == {"fsdp" if case in HYBRID else "dtensor"}
    for row in rows.itertuples():
        coordinate = [row.rank // 2, row.rank % 2]
        names = ["replicate", "shard"]
        ranks = [0, 1, 2, 3]
        assert json.loads(row.mesh) == {"shape": [2, 2], "dim_names": names, "coordinate": coordinate, "ranks": ranks}
        assert [placement["kind"] for placement in json.loads(row.placements)] == ["Replicate", shard]


@pytest.mark.parametrize("case", ["fsdp2_by_last_dim", "hsdp_by_last_dim"])
def test_parameters_may_be_cut_along_another_dim(pieces: Any, case: str) -> None:
    found = pieces(case)
    for name, dim in (("blocks.0.up", 1), ("blocks.0.down", 0)):
        for row, _ in found.by_key["param", name, "weight", 0]:
            assert json.loads(row.placements)[-1] == {"kind": "Shard", "dim": dim}


@pytest.mark.parametrize("case", WHOLE)
def test_without_sharding_rows_are_plain_replicas(pieces: Any, case: str) -> None:
    rows = pieces(case).frame
    assert rows[["global_shape", "offsets", "placements", "mesh", "layout_source"]].isna().all(axis=None)
    assert rows[rows["site"] == "grad"]["scope"].unique().tolist() == ["final"]


@pytest.mark.parametrize("case", IMAGES)
def test_slices_in_another_memory_format_claim_no_position(pieces: Any, case: str) -> None:
    found = pieces(case)
    rows = found.by_key["param", "conv", "weight", 0]
    assert {row.note for row, _ in rows} == {'{"no_layout":"memory_format"}'}
    assert all(pd.isna(row.global_shape) and pd.isna(row.placements) for row, _ in rows)
    in_memory = found.expected["param", "conv", "weight", 0].permute(0, 2, 3, 1).reshape(-1)
    assert torch.equal(torch.cat([piece for _, piece in rows]), in_memory)
    assert found.whole(("param", "embed", "weight", 0)).shape == (11, 75)


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_slices_of_what_was_a_piece_already_lie_in_its_box(pieces: Any, case: str) -> None:
    rows = pieces(case).frame
    rows = rows[(rows["module_path"] == "up") & ~rows["name"].str.endswith(".step")]
    assert set(rows["site"]) == {"param", "grad", "optim"}
    assert set(rows["layout_source"]) == {"fsdp"} and rows["note"].isna().all()
    for row in rows.itertuples():
        assert [placement["kind"] for placement in json.loads(row.placements)] == ["FlatShard", "Shard"]
        mesh = json.loads(row.mesh)
        assert mesh["ranks"][2 * mesh["coordinate"][0] + mesh["coordinate"][1]] == row.rank


def test_a_recomputed_block_is_recorded_once_more(pieces: Any) -> None:
    frame = pieces("checkpointed").run.to_pandas()
    phases = frame[(frame["site"] == "output") & (frame["module_path"] == "blocks.0.up")].groupby("phase").size()
    assert dict(phases) == {"forward": 16, "recompute": 16}, "four ranks, two steps, two slices"


def test_state_of_a_shape_of_its_own_is_left_whole(pieces: Any) -> None:
    found = pieces("odd")
    paths = {"blocks.0", "blocks.1", ""}
    assert set(found.by_key) == {("optim", path, "_flat_param.odd", 0) for path in paths}
    for rows in found.by_key.values():
        assert all(value.tolist() == [1, 2, 3] and pd.isna(row.placements) for row, value in rows)


@pytest.mark.parametrize("case", NEVER_REDUCED)
def test_gradients_that_were_never_reduced_are_whole_and_local(pieces: Any, case: str) -> None:
    found = pieces(case)
    assert set(found.by_key) == {key for key in found.expected if key[0] == "grad"}
    for key, rows in found.by_key.items():
        assert {row.scope for row, _ in rows} == {"local"}
        assert all(pd.isna(row.placements) for row, _ in rows)
        torch.testing.assert_close(rows[0][1], found.expected[key])
    embedded = found.by_key["grad", "embed", "weight", 0]
    assert not any(torch.equal(a, b) for (_, a), (_, b) in itertools.combinations(embedded, 2))


@pytest.mark.parametrize("case", [*TRAINED, *IMAGES, *INFERRED, *NEVER_REDUCED, *TENSOR_PARALLEL, "odd"])
def test_nothing_was_lost_and_nothing_went_wrong(pieces: Any, case: str) -> None:
    for writer in pieces(case).run.writers:
        assert writer.balance.dropped == {}
        assert {event["kind"] for event in writer.manifest.members["events"]} <= {"step_never_advanced"}
