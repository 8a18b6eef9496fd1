"""Launchers and frameworks: an unchanged program is one run, and trains the same. By `scripts/test-launchers`.

pytest finds this file only where it is named, since the frameworks are no part of the suite's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recorder
from recorder.analyze.align.align import align

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).with_name("programs.py")
BIN = Path(sys.prefix) / "bin"
TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node=2", PROGRAMS)
ACCELERATE = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
LAUNCHERS: dict[str, tuple[str | Path, ...]] = {
    "torchrun": (*TORCHRUN, "launched"),
    "torch.multiprocessing.spawn": (sys.executable, PROGRAMS, "spawned"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, PROGRAMS, "by_mpi"),
    "accelerate launch": (BIN / "accelerate", "launch", *ACCELERATE, PROGRAMS, "accelerated"),
    "Lightning": (sys.executable, PROGRAMS, "lightning"),
    "Hugging Face Trainer": (*TORCHRUN, "hugging_face"),
    "Ray Train": (sys.executable, PROGRAMS, "ray"),
}


def environment(folder: Path, **settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER", "SLURM", "RAY"))}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {"HEAD": "localhost", "PYTHONPATH": str(ROOT)}
    return {**kept, **quiet, "HOME": str(folder), "RAY_TMPDIR": "/tmp", **settings}


RECORDING = {
    "RECORDER": "1",
    "RECORDER_RULES": "site=* keep=tensor,stats,fingerprint",
    "RECORDER_FLUSH_INTERVAL_S": "0.05",  # Ray kills its workers once they are done
}


def assert_one_run(on: Path, off: Path) -> None:
    """Two ranks, three steps of two slices each, and the parameters as without the recorder."""
    run = recorder.open_run(on / "recordings")
    assert (run.world_size, run.ranks, run.steps) == (2, [0, 1], [0, 1, 2])
    frame = run.to_pandas(columns=["rank", "step", "micro_step", "site", "module_path", "mode"])
    outputs = frame[(frame.site == "output") & (frame.module_path == "")]
    found = sorted(zip(outputs["rank"], outputs.step, outputs.micro_step, strict=True))
    assert found == [(rank, step, slice_) for rank in range(2) for step in range(3) for slice_ in range(2)]
    assert set(outputs["mode"]) == {"train"}
    manifests = [json.loads(path.read_text()) for path in on.glob("recordings/*/*/*/_writer.json")]
    assert sorted((m["rank"], m["local_rank"], m["world_size"]) for m in manifests) == [(0, 0, 2), (1, 1, 2)]
    for rank in range(2):
        expected, trained = (torch.load(folder / "out" / f"rank{rank}.pt") for folder in (off, on))
        assert all(map(torch.equal, expected, trained))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_unchanged_program_is_one_run_and_trains_the_same(tmp_path: Path, name: str) -> None:
    for folder, settings in ((tmp_path / "off", {}), (tmp_path / "on", RECORDING)):
        folder.mkdir()
        done = subprocess.run(
            [*map(str, LAUNCHERS[name])],
            cwd=folder,
            env=environment(tmp_path, **settings),
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert_one_run(tmp_path / "on", tmp_path / "off")


@pytest.mark.parametrize("how", ["", "off"])
def test_grpo_of_trl_with_an_adapter_is_aligned_with_its_own_generation(tmp_path: Path, how: str) -> None:
    settings = {"RECORDER": "1", "RECORDER_PRESET": "rollout", "RECORDER_ROOTS": "any"}
    program = Path(__file__).with_name("grpo.py")
    subprocess.run(
        [sys.executable, program, "out", how], cwd=tmp_path, env=environment(tmp_path, **settings), check=True
    )
    found = align(recorder.open_run(tmp_path / "recordings"))
    assert found.num_samples == 12 and found.num_tokens > 90 and found.logprobs is not None
    if how:
        assert found.parting is not None and found.parting.value.module_path.endswith("layers.0.self_attn.o_proj")
        assert "q_proj.lora_A.default' runs in the trainer alone (an adapter that was not merged" in found.parting.text
    else:
        assert found.is_fine and abs(found.logprobs.largest.apart) < 1e-4
