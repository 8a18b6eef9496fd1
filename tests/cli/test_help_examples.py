"""The examples of every command's help are typed in a folder with two small recordings, and answer."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

import recorder
from recorder.cli.app import load_command
from recorder.cli.commands import COMMANDS
from tests.rigs.command_line import Cli
from tests.small_training import Model

ONLY_READ = {
    "align": "joins runs of language models by their tokens, as in tests/analyze/align",
    "prove": "launches a training two or three times, as tests/analyze/prove does",
    "dump": "tells a run that is under way, as in tests/distributed/test_ring.py",
    "set": "tells a run that is under way, as in tests/distributed/test_set.py",
    "run": "becomes the training, as in the tests of the pages",
    "view": "serves until it is interrupted, as in tests/view/test_server.py",
}
"""Commands whose examples are read and not run, each with the reason."""
RULES = "site=* keep=tensor,stats,fingerprint; module=blocks.0.mlp.up steps=3 keep=replay"


def examples_of(command: str) -> list[str]:
    epilog: str = load_command(command).epilog
    mark, title, *lines = epilog.splitlines()
    assert (mark, title) == ("\b", "Examples:")
    return [line.strip() for line in lines]


ALL = [(command, line) for command in COMMANDS for line in examples_of(command)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recordings of a small training of one process, the second with another learning rate."""
    folder = tmp_path_factory.mktemp("examples")
    for learning_rate, link in ((1e-3, "run-ddp"), (2e-3, "run-fsdp")):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
        before = set((folder / "recordings").glob("*"))
        with recorder.attach(model, enabled=True, dir=str(folder / "recordings"), rules=RULES, local_gradients=True):
            for _ in range(4):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        (made,) = set((folder / "recordings").glob("*")) - before
        (folder / link).symlink_to(made)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_two_examples_of_its_command(command: str) -> None:
    examples = examples_of(command)
    assert len(examples) >= 2
    assert all(f"recorder {command}" in line for line in examples)


@pytest.mark.parametrize(("command", "line"), ALL, ids=[line for _, line in ALL])
def test_an_example_answers(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, line: str) -> None:
    words = shlex.split(line)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "recorder"
    monkeypatch.chdir(folder)
    if command in ONLY_READ:
        load_command(command).make_context(command, words[1:])
        return
    found = cli(*words)
    assert found.exit_code in (0, 1), found.err  # two of the commands have something to find here
    assert found.out.strip()
    assert not [line for line in found.err.splitlines() if "Error" in line]
