"""Training jobs that many tests look at: each is run once."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

TRAIN = SCRIPTS / "train.py"
SETTINGS = {
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
LAUNCHED = (("plain", "everything", "--watch"), ("ddp", "everything", "--watch"))
"""Jobs that are launched as a user launches them; the ranks of the others are forked, which costs a third."""
Train = Callable[..., Finished]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Train:
    """``train(layout, recorded, *options)``: `scripts/train.py`, run to its end the first time it is asked for.

    By all workers of pytest-xdist together, whose folders lie side by side. Tests change nothing in its folder.
    """
    done: dict[tuple[str, ...], Finished] = {}
    base = tmp_path_factory.getbasetemp()
    root: Path = (base.parent if hasattr(request.config, "workerinput") else base) / "train"
    root.mkdir(exist_ok=True)

    def train(layout: str, recorded: str, *options: str) -> Finished:
        key = (layout, recorded, *options)
        if key not in done:
            name = " ".join(key)
            with (root / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
                done[key] = _finished(root / name, layout, recorded, options)
        return done[key]

    return train


def _finished(folder: Path, layout: str, recorded: str, options: tuple[str, ...]) -> Finished:
    said = folder / "succeeded.txt"
    if said.exists():
        return Finished(folder=folder, returncode=0, output=said.read_text())
    words = (*OPTIONS[layout], *options, f"--out={folder / 'out'}")
    if (layout, recorded, *options) in LAUNCHED:
        job = (jobs.python if layout == "plain" else jobs.torchrun)(folder, TRAIN, *words, **SETTINGS[recorded])
    else:
        num = {"plain": 0, "compile": 1, "checkpoint": 1}.get(layout, 2)
        settings = {**SETTINGS[recorded], **({"TESTS_RECORDER": "1"} if num else {})}
        job = jobs.ranks(folder, TRAIN, *words, num=num, **settings)
    finished = jobs.succeeded(job)
    said.write_text(finished.output)
    return finished
