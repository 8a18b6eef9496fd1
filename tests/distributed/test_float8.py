"""torchao's float8 training is not changed and nothing of it is lost: data and scale are leaves of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import recorder
from recorder.analyze.diff.diff import diff
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

CASES = ["bfloat16", "float8", "float8_gathered"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return jobs.succeeded(jobs.ranks(tmp_path_factory.mktemp("float8"), SCRIPTS / "float8.py", "out"))


def run_of(finished: Finished, case: str) -> recorder.Run:
    return recorder.open_run(finished.folder / "out" / case)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_equal_and_not_one_collective_more_is_issued(finished: Finished, case: str) -> None:
    for saved in finished.saved:
        off, on = saved[case]["off"], saved[case]["on"]
        assert off["values"].keys() == on["values"].keys()
        assert [key for key in off["values"] if bits(off["values"][key]) != bits(on["values"][key])] == []
        assert torch.equal(off["losses"], on["losses"]) and torch.equal(off["rng"], on["rng"])
        assert on["collectives"] == off["collectives"] > 10


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_recorded_bit_for_bit_and_accounted_for(finished: Finished, case: str) -> None:
    run = run_of(finished, case)
    for rank, saved in enumerate(finished.saved):
        for (site, name, step), value in saved[case]["on"]["values"].items():
            number, _, rest = name.partition(".")
            module, _, leaf = rest.partition(".")
            path, leaf = (number, rest) if site == "tap" else (f"{number}.{module}", leaf)
            actual = run.tensor(
                path, site=site, name=leaf, step=step, rank=rank, phase="forward" if site == "tap" else None
            )
            assert bits(actual) == bits(value), (site, name, step)
    for writer in run.writers:
        assert writer.balance.dropped == {}
        assert writer.balance.observed == writer.balance.written


def test_data_and_scale_are_leaves_of_their_own(finished: Finished) -> None:
    frame = run_of(finished, "float8_gathered").to_pandas()
    taps = frame[(frame["site"] == "tap") & (frame["phase"] == "forward")]
    dtypes = dict(zip(taps["name"], taps["dtype"], strict=True))
    assert dtypes == {
        "weight._data": "float8_e4m3fn",
        "weight._scale": "float32",
        "scaled._data": "float8_e4m3fn",
        "scaled._scale": "float32",
        "cast": "float8_e4m3fn",
    }
    outer = {json.loads(note)["inner_of"]["dtype"] for note in taps[taps["name"] != "cast"]["note"]}
    assert outer == {"bfloat16"}


def test_a_weight_has_its_position_and_a_scale_has_none(finished: Finished) -> None:
    frame = run_of(finished, "float8_gathered").to_pandas()
    params = frame[(frame["site"] == "param") & (frame["module_path"] == "0.up")].set_index("name")
    assert set(params.index) == {"weight", "bias", "weight._precomputed_scale"}
    assert set(params.loc[["weight"], "global_shape"]) == {"[32,16]"}
    scales = params.loc[["weight._precomputed_scale"]]
    assert scales["global_shape"].isna().all()
    assert {json.loads(note)["no_layout"] for note in scales["note"]} == {"inner_tensor"}


def test_the_global_view_lays_no_ranks_data_beside_anothers_scale(finished: Finished) -> None:
    table = run_of(finished, "float8_gathered").view().rows().table
    whole = {
        (row["module_path"], row["site"], row["name"]): row["rank"] is None
        for row in table.select(["module_path", "site", "name", "rank"]).to_pylist()
    }
    assert whole["0.up", "param", "weight"]
    for name in ("scaled._data", "scaled._scale"):
        assert not whole["0", "tap", name]
    assert not whole["0.up", "param", "weight._precomputed_scale"]


def test_float8_and_bfloat16_of_the_same_steps_are_compared_value_by_value(finished: Finished) -> None:
    found = diff(run_of(finished, "float8_gathered"), run_of(finished, "bfloat16"))
    assert not found.is_equal and found.first is not None
    assert (found.first.step, found.first.module_path, found.first.site) == (0, "0", "tap"), "what was cast"
    rows: list[dict[str, Any]] = found.table.to_pylist()
    (cast,) = [row for row in rows if (row["step"], row["module_path"], row["name"]) == (0, "0", "cast")]
    assert (cast["dtype_a"], cast["dtype_b"]) == ("float8_e4m3fn", "bfloat16")
    assert 0 < cast["of_max"] < 0.07, "three bits of mantissa"
    weights = [row for row in rows if row["site"] == "param" and row["name"] == "weight" and row["step"] == 2]
    assert len(weights) == 4 and all(row["dtype_a"] == row["dtype_b"] == "bfloat16" for row in weights)
    only = {name for name in found.only_a.column("name").to_pylist() if name.startswith("weight.")}
    assert only == {"weight._data", "weight._scale", "weight._precomputed_scale"}


def test_a_weight_quantised_after_training_is_its_numbers_and_their_scale(finished: Finished) -> None:
    saved = finished.saved[0]["deployed"]
    run = run_of(finished, "deployed")
    assert {"qdata", "scale"} <= set(saved)
    for name, value in saved.items():
        assert bits(run.tensor("", site="param", name=f"weight.{name}")) == bits(value)
    assert run.writers[0].balance.dropped == {}
