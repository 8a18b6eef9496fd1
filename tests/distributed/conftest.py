"""Training jobs that many tests look at: each is run once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import jobs
from .jobs import SCRIPTS, Finished

TRAIN = SCRIPTS / "train.py"
SETTINGS = {
    "off": {},
    "everything": jobs.recording(),
    "default": {"RECORDER": "1"},
    "rank 0": jobs.recording(f"{jobs.EVERYTHING} rank=0"),
}
OPTIONS = {
    "plain": ("--layout=plain",),
    "ddp": ("--layout=ddp",),
    "fsdp1": ("--layout=fsdp1",),
    "fsdp1 orig": ("--layout=fsdp1 orig",),
    "fsdp1 mixed": ("--layout=fsdp1", "--mixed"),
    "fsdp2": ("--layout=fsdp2",),
    "fsdp2 mixed": ("--layout=fsdp2", "--mixed"),
    "compile": ("--layout=compile",),
    "checkpoint": ("--layout=checkpoint",),
}
Train = Callable[..., Finished]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train(layout, recorded, *options)``: `scripts/train.py`, run to its end the first time it is asked for."""
    done: dict[tuple[str, ...], Finished] = {}
    root: Path = tmp_path_factory.mktemp("train")

    def train(layout: str, recorded: str, *options: str) -> Finished:
        key = (layout, recorded, *options)
        if key not in done:
            folder = root / str(len(done))
            launch = jobs.python if "plain" in layout or layout in ("compile", "checkpoint") else jobs.torchrun
            job = launch(folder, TRAIN, *OPTIONS[layout], *options, f"--out={folder / 'out'}", **SETTINGS[recorded])
            done[key] = jobs.succeeded(job)
        return done[key]

    return train
