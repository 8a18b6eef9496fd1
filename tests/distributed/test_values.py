"""Values are right: each recorded row against what plain hooks and reads saw in the same process, bit by bit.

The scripts' models overwrite values after hooks have seen them, zero gradients in place and free FSDP's storage.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
import pytest
import torch

import recorder
from recorder.format.fingerprint import MODULUS, fingerprint
from tests.rigs.jobs import Finished

from .conftest import Train

KEY = ["site", "module_path", "name", "step", "micro_step", "call", "repeat", "mode", "phase"]
SITES = ["input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim", "scalar"]
ROOT_INPUTS = ["batch.features", "batch.more.0", "gain"]
TAPS = {(name, phase) for name in ("given", "residual", "weight") for phase in ("forward", "backward")}
RECORDED = {
    "plain": ("plain", "everything", "--watch"),
    "ddp": ("ddp", "everything", "--watch"),
    "fsdp1": ("fsdp1", "everything", "--watch"),
    "fsdp1 orig": ("fsdp1 orig", "everything", "--watch"),
    "fsdp1 mixed": ("fsdp1 mixed", "everything", "--watch"),
    "fsdp2": ("fsdp2", "everything", "--watch"),
    "fsdp2 mixed": ("fsdp2 mixed", "everything", "--watch"),
    "plain, stalled writer": ("plain", "everything", "--watch", "--tap", "--stall"),
    "fsdp2, stalled writer": ("fsdp2", "everything", "--watch", "--tap", "--stall"),
}


def key_of(row: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(None if pd.isna(value) else value for value in row)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    plain = tensor.detach().contiguous()
    return plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def recorded_keys(finished: Finished, rank: int) -> list[tuple[Any, ...]]:
    frame = finished.run.to_pandas()
    return [key_of(row) for row in frame[frame["rank"] == rank][KEY].itertuples(index=False)]


def tensor_of(run: recorder.Run, key: tuple[Any, ...], rank: int) -> torch.Tensor:
    named = dict(zip(KEY, key, strict=True))
    return run.tensor(named.pop("module_path"), rank=rank, **named)


def is_early(what: str, key: tuple[Any, ...]) -> bool:
    """The very first input of a root is seen while it is discovered, which is before FSDP casts it."""
    roots = {("input", "", name, 0, 0, 0) for name in ROOT_INPUTS}
    return what == "fsdp2 mixed" and key[:6] in roots and key[7] == "train"


@pytest.mark.parametrize("what", RECORDED)
def test_exactly_what_happened_is_recorded(train: Train, what: str) -> None:
    finished = train(*RECORDED[what])
    for rank, saved in enumerate(finished.saved):
        keys = recorded_keys(finished, rank)
        assert len(keys) == len(set(keys))
        assert set(keys) == set(saved["values"])


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("what", RECORDED)
def test_every_value_is_bit_equal(train: Train, what: str, site: str) -> None:
    finished = train(*RECORDED[what])
    for rank, saved in enumerate(finished.saved):
        wanted = {key: value for key, value in saved["values"].items() if key[0] == site and not is_early(what, key)}
        assert wanted
        wrong = [key for key, value in wanted.items() if bits(tensor_of(finished.run, key, rank)) != bits(value)]
        assert wrong == []


@pytest.mark.parametrize("what", ["plain, stalled writer", "fsdp2, stalled writer"])
def test_taps_and_their_gradients_are_bit_equal(train: Train, what: str) -> None:
    finished = train(*RECORDED[what])
    for rank, saved in enumerate(finished.saved):
        wanted = {key: value for key, value in saved["values"].items() if key[0] == "tap"}
        assert {(key[2], key[-1]) for key in wanted} == TAPS
        wrong = [key for key, value in wanted.items() if bits(tensor_of(finished.run, key, rank)) != bits(value)]
        assert wrong == []


@pytest.mark.parametrize("what", ["plain", "fsdp2", "fsdp2 mixed"])
def test_statistics_are_those_of_the_values(train: Train, what: str) -> None:
    finished = train(*RECORDED[what])
    frame = finished.run.to_pandas()
    for rank, saved in enumerate(finished.saved):
        records = frame[frame["rank"] == rank].to_dict("records")
        rows = {key_of(row[name] for name in KEY): row for row in records}
        for key, value in saved["values"].items():
            if is_early(what, key):
                continue
            row, exact = rows[key], value.double().reshape(-1)
            if value.numel() == 0:
                assert pd.isna(row["mean"]) and row["zero_count"] == 0
                continue
            assert row["min"] == exact.min() and row["max"] == exact.max()
            assert row["mean"] == pytest.approx(exact.mean().item(), rel=1e-12, abs=1e-300)
            assert row["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-9, abs=1e-9)
            assert row["zero_count"] == (exact == 0).sum()


@pytest.mark.parametrize("what", ["fsdp2", "fsdp2 mixed", "fsdp2, stalled writer"])
@pytest.mark.parametrize("site", ["param", "grad", "optim"])
def test_local_shards_say_where_they_lie(train: Train, what: str, site: str) -> None:
    """Put where its row says, every shard lies where the assembled tensor holds just those values."""
    finished = train(*RECORDED[what])
    frame = finished.run.to_pandas()
    covered: dict[tuple[Any, ...], torch.Tensor] = {}
    sizes = set()
    for rank, saved in enumerate(finished.saved):
        rows = frame[(frame["rank"] == rank) & (frame["site"] == site)]
        for row in rows.to_dict("records"):
            key = key_of(row[name] for name in KEY)
            if key not in saved["layouts"]:
                assert site == "optim" and key[2].endswith(".step")
                assert pd.isna(row["global_shape"])
                continue
            layout = saved["layouts"][key]
            value, full = saved["values"][key], layout["full"]
            offsets = json.loads(row["offsets"])
            assert json.loads(row["global_shape"]) == list(full.shape)
            assert json.loads(row["shape"]) == list(value.shape)
            assert json.loads(row["placements"]) == [{"kind": kind, "dim": dim} for kind, dim in layout["placements"]]
            mesh = json.loads(row["mesh"])
            at = {"shape": layout["mesh"], "dim_names": ["dp"], "coordinate": list(layout["coordinate"])}
            assert mesh == {**at, "ranks": [0, 1]}
            assert row["layout_source"] == "dtensor"
            region = tuple(slice(start, start + size) for start, size in zip(offsets, value.shape, strict=True))
            assert torch.equal(full[region], value)
            covered.setdefault(key, torch.zeros(full.shape, dtype=torch.int64))[region] += 1
            sizes.add((rank, value.shape[0], full.shape[0]))
    assert covered and all((count == 1).all() for count in covered.values())
    assert {(0, 4, 7), (1, 3, 7), (0, 1, 1), (1, 0, 1)} <= sizes, "uneven and empty shards are among them"


@pytest.mark.parametrize("what", ["fsdp1", "fsdp1 orig", "fsdp1 mixed"])
@pytest.mark.parametrize("site", ["param", "grad", "optim"])
def test_slices_say_where_they_lie(train: Train, what: str, site: str) -> None:
    """Laid end to end by their offsets, the ranks' slices are the parameter, and their fingerprints add up to its."""
    finished = train(*RECORDED[what])
    frame = finished.run.to_pandas()
    frame = frame[frame["site"] == site]
    found: dict[tuple[Any, ...], list[tuple[int, torch.Tensor, int]]] = {}
    sizes = set()
    for rank, saved in enumerate(finished.saved):
        for row in frame[frame["rank"] == rank].to_dict("records"):
            key = key_of(row[name] for name in KEY)
            layout, value = saved["layouts"].get(key), saved["values"][key]
            if value.dim() == 0:
                assert site == "optim" and key[2].endswith(".step") and pd.isna(row["global_shape"])
                continue
            if layout is None:  # with use_orig_params the script reads state as it is
                layout = saved["layouts"]["param", key[1], key[2].split(".")[0], *key[3:]]
            assert row["layout_source"] == "fsdp"
            assert pd.isna(row["offsets"])
            assert json.loads(row["global_shape"]) == layout["shape"]
            assert json.loads(row["shape"]) == list(value.shape)
            mesh = {"shape": [2], "dim_names": None, "coordinate": [rank], "ranks": [0, 1]}
            assert json.loads(row["mesh"]) == mesh
            ((kind, start),) = [(p["kind"], p["offset"]) for p in json.loads(row["placements"])]
            assert kind == "FlatShard"
            assert start == layout["start"] or not value.numel()
            found.setdefault(key, []).append((start, value, int(row["fingerprint"], 16)))
            sizes.add((rank, value.numel(), math.prod(layout["shape"])))
    assert found
    for key, slices in found.items():
        layout = finished.saved[0]["layouts"]["param", key[1], key[2].split(".")[0], *key[3:]]
        starts = [start for start, _, _ in sorted(slices, key=lambda piece: piece[0])]
        assert starts == list(itertools.accumulate((v.numel() for _, v, _ in slices), initial=0))[:-1]
        whole = torch.cat([value for _, value, _ in slices]).reshape(layout["shape"])
        if site == "param":
            assert torch.equal(whole, layout["full"])
        data = whole.reshape(-1).view(torch.uint8).numpy()
        assert sum(mark for _, _, mark in slices) % MODULUS == fingerprint(data, 4, tuple(whole.shape))
    assert {rank for rank, numel, _ in sizes if numel == 0} == {0, 1}, "empty slices are among them"
    assert any(0 < numel < whole for _, numel, whole in sizes), "and parameters that two ranks share"


@pytest.mark.parametrize("what", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_activations_have_no_global_position(train: Train, what: str) -> None:
    frame = train(*RECORDED[what]).run.to_pandas()
    activations = frame[frame["site"].isin(["input", "output", "grad_input", "grad_output"])]
    assert activations[["global_shape", "offsets", "placements", "mesh"]].isna().all(axis=None)


def test_mixed_precision_shows_in_the_dtypes(train: Train) -> None:
    frame = train(*RECORDED["fsdp2 mixed"]).run.to_pandas()
    dtypes = {site: set(rows["dtype"]) for site, rows in frame[frame["module_path"] == "blocks.0.up"].groupby("site")}
    assert dtypes["output"] == dtypes["grad_output"] == dtypes["input"] == {"bfloat16"}
    assert dtypes["param"] == dtypes["grad"] == dtypes["optim"] == {"float32"}


def test_the_very_first_input_is_the_one_that_the_script_gave(train: Train) -> None:
    finished = train(*RECORDED["fsdp2 mixed"])
    for rank, saved in enumerate(finished.saved):
        early = [key for key in saved["values"] if is_early("fsdp2 mixed", key)]
        assert sorted(key[2] for key in early) == ROOT_INPUTS
        for key in early:
            given = tensor_of(finished.run, key, rank)
            assert given.dtype == torch.float32
            assert torch.equal(given.bfloat16(), saved["values"][key])


@pytest.mark.parametrize("what", RECORDED)
def test_final_gradients_say_so(train: Train, what: str) -> None:
    frame = train(*RECORDED[what]).run.to_pandas()
    assert set(frame[frame["site"] == "grad"]["scope"]) == {"final"}


@pytest.mark.parametrize("what", RECORDED)
def test_nothing_was_dropped(train: Train, what: str) -> None:
    finished = train(*RECORDED[what])
    for writer, saved in zip(finished.run.writers, finished.saved, strict=True):
        assert writer.state == "closed"
        assert writer.balance.dropped == {}
        assert writer.balance.written == writer.balance.observed == len(saved["values"]) == writer.num_rows
    assert finished.run.problems == []
