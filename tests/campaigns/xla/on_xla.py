"""Recording on a lazy device: what it costs there, and that the values are right. Run by `scripts/test-xla`.

pytest finds this file only where it is named, since torch_xla needs an environment of its own.

XLA rounds the last bit of a value otherwise where it fuses other operations, and it fuses otherwise where a graph has
more outputs. So what must be equal to the last bit is compared in two ways: with the same outputs in the graph
(`cloned`, `gathered`), and with fusion switched off (`UNFUSED`), where a run without a recorder and one that reads each
value on the spot (`fetched`) agree.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from tests.campaigns.xla.train import NUM_STEPS, NUM_STEPS_WITHOUT_END

REPOSITORY = Path(__file__).parents[3]
UNFUSED = "--xla_disable_hlo_passes=fusion,cpu-instruction-fusion"
ENDED = ["sync", "mark_step", "step", "optimizer_step", "loader", "accumulate", "item", "autocast"]
"""Ways to end a step."""


class Trained:
    """What a process of `train.py` left."""

    def __init__(self, folder: Path, style: str, watched: str, flags: str = "", **settings: str) -> None:
        self.folder = folder / "recordings"
        out = folder / "out.pt"
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "XLA_FLAGS": flags, **settings}
        environment["RECORDER_DIR"] = str(self.folder)
        if watched == "recorder":
            environment |= {"RECORDER": "1", "RECORDER_RULES": "site=* keep=tensor,stats,fingerprint"}
        command = [sys.executable, "-m", "tests.campaigns.xla.train", style, watched, str(out)]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        for name, value in torch.load(out).items():
            setattr(self, name, value)

    counters: dict[str, int]
    losses: list[float]
    state: dict[str, torch.Tensor]
    values: dict[tuple[int, str, str, str, int], torch.Tensor]

    def assert_trained_like(self, other: Trained) -> None:
        assert self.losses == other.losses
        assert list(self.state) == list(other.state)
        assert all(torch.equal(value, other.state[name]) for name, value in self.state.items())

    def assert_recorded(self, values: dict[tuple[int, str, str, str, int], torch.Tensor]) -> None:
        """Each of these values is there bit for bit, nothing else is at their sites, and nothing was lost."""
        run = recorder.open_run(self.folder)
        ledger = self.ledger()
        assert ledger["dropped"] == {}
        assert ledger["written"] == ledger["observed"] == run.table().num_rows
        sites = {site for _, _, site, _, _ in values}
        rows = sorted((row for row in run.table().to_pylist() if row["site"] in sites), key=lambda row: row["seq"])
        counts: dict[Any, int] = {}
        left = dict(values)
        for row in rows:
            value_key = row["step"], row["module_path"], row["site"], row["name"]
            counts[value_key] = number = counts.get(value_key, -1) + 1
            key = ("step", "site", "name", "rank", "micro_step", "call", "repeat", "mode", "phase")
            found = run.tensor(row["module_path"], **{name: row[name] for name in key if row[name] is not None})
            wanted = left.pop((*value_key, number))
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert as_bytes(found) == as_bytes(wanted), (value_key, number)
        assert not left, "the run lacks what the twin has seen"

    def ledger(self) -> dict[str, Any]:
        (writer,) = recorder.open_run(self.folder).writers
        return dict(writer.manifest.members["ledger"])


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Each of these runs once, whoever asks."""

    @functools.cache
    def train(style: str, watched: str, flags: str = "", **settings: str) -> Trained:
        return Trained(tmp_path_factory.mktemp(f"{style}-{watched}"), style, watched, flags, **settings)

    return train


@pytest.mark.parametrize("style", ENDED)
def test_recording_compiles_and_runs_nothing_more(trained: Callable[..., Trained], style: str) -> None:
    plain, recorded = trained(style, "no"), trained(style, "recorder")
    print(f"{style}, {recorded.ledger()['written']} rows: {recorded.counters}\n{style}, not recorded: {plain.counters}")
    assert recorded.counters == plain.counters
    assert recorded.ledger()["written"] > 0
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(recorded.losses, plain.losses, strict=True))


@pytest.mark.parametrize("style", ENDED)
def test_what_is_recorded_is_what_was_there(trained: Callable[..., Trained], style: str) -> None:
    trained(style, "recorder").assert_recorded(trained(style, "cloned").values)


@pytest.mark.parametrize("style", ["sync", "accumulate"])
def test_training_is_not_changed(trained: Callable[..., Trained], style: str) -> None:
    plain, recorded = trained(style, "no", UNFUSED), trained(style, "recorder", UNFUSED)
    recorded.assert_trained_like(plain)
    assert recorded.counters == plain.counters
    recorded.assert_recorded(trained(style, "fetched", UNFUSED).values)


def test_a_flush_in_the_middle_of_a_step_brings_what_was_seen(trained: Callable[..., Trained]) -> None:
    recorded = trained("sync", "attached", UNFUSED)
    recorded.assert_trained_like(trained("sync", "no", UNFUSED))
    recorded.assert_recorded(trained("sync", "gathered", UNFUSED).values)


def test_without_an_end_of_a_step_a_call_of_the_model_costs_one_graph(trained: Callable[..., Trained]) -> None:
    plain, recorded = trained("never", "no", UNFUSED), trained("never", "recorder", UNFUSED)
    print(f"never: {recorded.counters}\nnever, not recorded: {plain.counters}")
    recorded.assert_trained_like(plain)
    recorded.assert_recorded(trained("never", "gathered", UNFUSED).values)
    more = recorded.counters["ExecuteTime"] - plain.counters["ExecuteTime"]
    assert 0 < more <= NUM_STEPS_WITHOUT_END


def test_inference_that_only_reads_its_outputs_is_recorded(trained: Callable[..., Trained]) -> None:
    plain, recorded = trained("infer", "no"), trained("infer", "recorder", RECORDER_ROOTS="any")
    print(f"infer: {recorded.counters}\ninfer, not recorded: {plain.counters}")
    assert recorded.losses == plain.losses
    recorded.assert_recorded(trained("infer", "cloned").values)
    assert recorded.counters["ExecuteTime"] <= plain.counters["ExecuteTime"] + NUM_STEPS


def test_ops_that_run_at_once_are_recorded(trained: Callable[..., Trained]) -> None:
    trained("eager", "recorder", UNFUSED).assert_recorded(trained("eager", "fetched", UNFUSED).values)


def test_a_full_pool_drops_and_counts(trained: Callable[..., Trained]) -> None:
    plain = trained("wide", "no")
    recorded = trained("wide", "recorder", RECORDER_POOL_BYTES="1MiB", RECORDER_WAIT_S_PER_STEP="0.01")
    ledger = recorded.ledger()
    assert ledger["dropped"].keys() == {"pool_full"}
    assert ledger["observed"] == ledger["written"] + ledger["dropped"]["pool_full"]
    assert recorded.counters["ExecuteTime"] == plain.counters["ExecuteTime"]
