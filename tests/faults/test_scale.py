"""A sample of the campaign `scale`: large models and many ranks work, and leave few files."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.records import KEEP_STATS, KEEP_TENSOR
from recorder.run.status import RunWatch
from tests.campaigns.faults import scale
from tests.rigs.command_line import Cli, cli
from tests.rigs.writer import Rig

__all__ = ["cli"]
NUM_MODULES = 2000
NUM_RANKS = 64


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ranks") / "run"
    scale.write_ranks(run, NUM_RANKS)
    return run


def test_thousands_of_modules_are_recorded_and_asked_about(tmp_path: Path, cli: Cli) -> None:
    trained = scale.measure("train", [sys.executable, "-c", scale._TRAIN, str(NUM_MODULES), tmp_path])
    assert trained.exit_code == 0, trained.output
    took = json.loads(trained.output.splitlines()[-1])
    run = recorder.open_run(took["run"])
    num_outputs = NUM_MODULES + math.ceil(NUM_MODULES / scale._CHAIN / 50) + 1
    frame = run.to_pandas(columns=["step", "site"])
    assert (frame[frame.site == "output"].groupby("step").size() == num_outputs).all()
    (manifest,) = tmp_path.glob("*/rank=*/*/_writer.json")
    assert manifest.stat().st_size < 600 * NUM_MODULES, "the tree of modules is written once, and briefly"
    for command in (["show", run.path], ["doctor", run.path]):
        result = cli(*command)
        assert result.exit_code == 0, result.out[-2000:] + result.err


@pytest.mark.parametrize(("command", "exit_code"), [("ls", 0), ("doctor", 1), ("verify", 0), ("first", 1), ("top", 0)])
def test_every_command_reads_a_run_of_many_ranks(
    ranks: Path, cli: Cli, command: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.run.status._GRACE_S", 3600.0)  # one rank was never closed, however long ago
    result = cli(command, ranks)
    assert result.exit_code == exit_code, result.out[-2000:] + result.err
    assert len(recorder.open_run(ranks).ranks) == NUM_RANKS == len(RunWatch(ranks).look())


def test_a_rank_leaves_a_handful_of_files(ranks: Path) -> None:
    for writer in ranks.glob("rank=*/*"):
        names = os.listdir(writer)
        assert len(names) <= 5, names
        assert sum(name.endswith(".open") for name in names) <= 2


def test_a_writer_has_two_open_shards_at_most_and_as_many_sealed_ones_as_its_bytes_ask_for(tmp_path: Path) -> None:
    shard_bytes = 1 << 20
    rig = Rig(tmp_path / "run", shard_bytes=shard_bytes, batch_bytes=1 << 18, codec="none").start()
    rng = np.random.default_rng(0)
    for step in range(24):
        for module in range(4):
            values = rng.standard_normal(1 << 14).astype(np.float32)
            rig.put(values, module_path=f"layers.{module}", step=step, keep=KEEP_TENSOR | KEEP_STATS)
            rig.put(values, module_path=f"layers.{module}", step=step, site="grad", keep=KEEP_STATS)
        assert rig.drain()
        names = os.listdir(rig.directory)
        assert sum(name.endswith(".open") for name in names) <= 2
        links = [Path(os.readlink(path)) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        held = [link.name for link in links if link.parent == rig.directory and ".arrow" in link.name]
        assert len(held) <= 2, held
    rig.close()
    num_bytes = sum(path.stat().st_size for path in rig.files("tensors-*.arrow"))
    assert num_bytes > 5 * shard_bytes
    assert len(rig.files("tensors-*.arrow")) <= math.ceil(num_bytes / shard_bytes) + 1
    assert len(rig.files("stats-*.arrow")) == 1
