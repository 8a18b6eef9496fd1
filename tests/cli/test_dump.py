"""`recorder dump` has a run write steps out of its memory, and refuses what no ring can hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recorder.format.commands import COMMANDS
from recorder.format.rundir import RUN_MANIFEST, encode_manifest, read_json
from tests.rigs.capturing import Tiny, batch, flagged
from tests.rigs.command_line import Cli

RULES = "site=output keep=ring before=400 after=2; site=grad keep=stats steps=::100"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one process that trains until the tests are over."""
    is_over = threading.Event()

    def train() -> None:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = 0
        while not is_over.wait(0.005):
            model(batch(step)).sum().backward()
            optimizer.step()
            step += 1

    folder = tmp_path_factory.mktemp("live")
    with flagged(folder, RULES, status_interval_s=0.05, ring_hold_s=60) as recording:
        thread = threading.Thread(target=train)
        thread.start()
        try:
            until_s = time.monotonic() + 60
            while not list(recording.folder.glob("*/rank=*/*/_status.json")) and time.monotonic() < until_s:
                time.sleep(0.02)
            (manifest,) = recording.folder.glob("*/_run.json")
            yield manifest.parent
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--step", "x"], "--step 'x': expected a step, such as 120, or so many ahead, such as +20, or steps"),
        (["--step", "+2:9"], "--step '+2:9': expected a step"),
        (["--step", f"+{10**15 - 1}"], f"--step '+{10**15 - 1}': expected a step"),
        (["--step", "7:7"], "--step 7:7: contains no step"),
        (["--step", "0:404"], "--step 0:404: 404 steps, and the ring holds 403 (before=400, the step itself, after=2)"),
    ],
)
def test_what_no_ring_can_hold_is_refused_before_it_is_sent(cli: Cli, live: Path, words: list[str], why: str) -> None:
    found = cli("dump", live, *words)
    assert found.exit_code == 2
    assert why in found.err and found.err.count("\n") == 1 and found.out == ""
    assert not (live / COMMANDS).exists()


def test_the_last_steps_are_written_and_dump_shows_what_was_left(cli: Cli, live: Path) -> None:
    found = cli("dump", live, "--reason", "the reward fell")
    assert found.exit_code == 0, found.out
    sent, answered = found.out.splitlines()
    assert "dump at steps 0 to" in sent and "(the reward fell)" in sent
    assert answered.startswith("ok") and "rank 0: done, from step 0 to " in answered and "rows" in answered
    listed = cli("set", live, "--list")  # at once, though the manifest follows the status
    assert "the reward fell" in listed.out and "1 rank (0): done" in listed.out
    (entry,) = cli("set", live, "--list", "--json").json["commands"]
    assert [answer["state"] for answer in entry["answers"]] == ["ended"]


def test_a_step_so_far_ahead_is_one_that_the_run_reaches(cli: Cli, live: Path) -> None:
    found = cli("dump", live, "--step", "+300", "--json")
    assert found.exit_code == 0, found.out
    first, last = found.json["command"]["from_step"], found.json["command"]["to_step"]
    assert (first, last) >= (0, 302) and last - first <= 402
    assert found.json["ranks"][0]["state"] == "ended"
    shown = cli("top", live, "--once").out
    assert "(dump): 1 done" in shown


def test_ranks_that_are_not_seen_here_are_said_to_be_elsewhere(cli: Cli, live: Path) -> None:
    manifest = live / RUN_MANIFEST
    before = manifest.read_bytes()
    manifest.write_bytes(encode_manifest({**read_json(manifest), "world_size": 4}))
    try:
        found = cli("dump", live, "--reason", "of one node")
    finally:
        manifest.write_bytes(before)
    assert found.exit_code == 0, found.out
    assert "rank 0: done" in found.out and "note    3 of 4 ranks are not seen here" in found.out
