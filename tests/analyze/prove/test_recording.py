"""Tests of `recorder prove`: what it says of programs that train soundly, that differ by themselves, that look."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import recorder
from recorder.analyze.prove import recording
from recorder.analyze.prove.launches import Launches, Look, Observed, RankSeen, reply_of
from recorder.analyze.prove.recording import judge
from recorder.run.status import PROOF, Proof
from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli, recorded
from tests.rigs.handmade import HandmadeWriter, make_run
from tests.rigs.report_pages import read_page

__all__ = ["cli", "recorded"]
HERE = Path(__file__).parent
STATE = {"param w": "a", "grad w": "b", "rng cpu": "c", "rng python": "d"}


def launched(
    *changes: tuple[int, int, str, str], steps: int = 4, lines: tuple[str, ...] = (), code: int = 0
) -> Observed:
    """Two ranks; each change is a rank, a step, a key and its digest there."""
    ranks = {}
    for rank in (0, 1):
        looks = []
        for step in range(steps):
            own = {key: digest for its, at, key, digest in changes if (its, at) == (rank, step)}
            looks.append(Look(step, STATE | own))
        ranks[rank] = RankSeen(pid=rank, looks=tuple(looks), printed=("loss 1", *lines))
    return Observed(exit_code=code, ranks=ranks)


PLAIN = launched()
NOISE = launched((0, 2, "grad w", "x"), (0, 2, "param w", "y"))


@pytest.mark.parametrize(
    ("again", "recorded", "verdict", "text", "first_step"),
    [
        (PLAIN, PLAIN, "unchanged", "4 steps of 2 ranks, 32 values and 2 printed lines", None),
        (PLAIN, launched((1, 3, "param w", "x")), "changed", "from step 3 on: parameter w on rank 1", 3),
        (NOISE, PLAIN, "cannot tell", "by itself from step 2 on: gradient w on rank 0; parameter w on rank 0", 2),
        (NOISE, launched((1, 1, "rng cpu", "x")), "changed", "from step 1 on: random state of the CPU on rank 1", 1),
        (NOISE, launched((1, 2, "rng cpu", "x")), "cannot tell", "by itself from step 2 on", 2),
        (PLAIN, launched(steps=3, code=1), "changed", "rank 0 took 4 steps, then 3 (exit codes 0 and 1)", None),
        (launched(steps=3), PLAIN, "cannot tell", "rank 0 took 4 steps, then 3", None),
        (PLAIN, launched(lines=("recorded!",)), "changed", "rank 0 prints 'recorded!' under the recorder", None),
        (PLAIN, Observed(exit_code=1, ranks={}), "changed", "ranks 0, 1 trained, then none", None),
    ],
)
def test_a_difference_is_the_recorders_only_before_the_program_differs_by_itself(
    again: Observed, recorded: Observed, verdict: str, text: str, first_step: int | None
) -> None:
    proof = judge(PLAIN, again, recorded, num_steps=4)
    assert (proof.verdict, proof.first_step) == (verdict, first_step)
    assert text in proof.text


def test_what_nobody_seeds_and_what_tells_the_time_is_left_out_and_said() -> None:
    first, second, third = (
        launched(*((rank, step, "rng python", text) for rank in (0, 1) for step in range(4)), lines=(f"took {text}",))
        for text in ("a", "b", "c")
    )
    proof = judge(first, second, third, num_steps=9)
    assert proof.verdict == "unchanged"
    assert proof.notes == (
        "not compared, because the program does not seed: random state of Python",
        "not compared, because two launches without the recorder differ there, too, as in times: 2 printed lines",
        "the program ended by itself after 4 steps of 9",
    )


def test_a_program_without_a_step_is_no_proof() -> None:
    nothing = Observed(exit_code=3, ranks={})
    proof = judge(nothing, nothing, nothing, num_steps=4)
    assert proof.verdict == "cannot tell"
    assert "no step of an optimizer was seen before the program ended with exit code 3" in proof.text


@pytest.mark.parametrize("has_run", [True, False])
def test_a_program_that_records_nothing_proves_nothing(
    has_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: object, what: str, *more: object) -> Observed:
        if what == "with the recorder" and has_run:
            HandmadeWriter(make_run(tmp_path / "run"), 0).finish(pid=1)
        return PLAIN

    monkeypatch.setattr(Launches, "launch", launch)
    with Launches({"RECORDER_DIR": str(tmp_path)}, 4, print) as launches:
        found = recording.prove(launches, ["program"])
    assert found.proof.verdict == "cannot tell"
    assert "left no row" in found.proof.text
    assert [run.proof for run in found.runs] == [found.proof] * has_run


def test_a_launch_of_which_no_run_was_recorded_is_named(tmp_path: Path) -> None:
    """A process that is killed early has made no run directory yet."""
    killed, resumed = (replace(PLAIN, what=what) for what in ("to be killed at the end of step 3", "resumed"))
    late = replace(resumed, ranks={rank: replace(seen, pid=rank + 8) for rank, seen in resumed.ranks.items()})
    verdict = Proof(subject="resume", verdict="unchanged", text="unchanged: so it is")
    with Launches({"RECORDER_DIR": str(tmp_path)}, 4, print) as launches:
        HandmadeWriter(make_run(tmp_path / "run"), 0).finish(pid=8)
        assert launches.proven(verdict, late).proof.notes == ()
        found = launches.proven(verdict, killed, late)
    note, said, kept = map(str, reply_of(found).parts())
    assert "launch 'to be killed at the end of step 3': no run was recorded, so that it keeps no certificate" in note
    assert "ask for more than 4 steps with --steps" in note and "so it is" in said and kept.startswith("kept with run")
    assert [run.proof for run in found.runs] == [found.proof]


def run_prove(folder: Path, *words: str, code: int) -> Any:
    """What `recorder prove` answers in a forked process, as JSON."""
    done = jobs.program(folder, jobs.COMMAND, "prove", "--json", *words, RECORDER_CLOSE_DEADLINE_S="60").wait(240)
    assert done.returncode == code, done.output
    return json.loads(done.output[done.output.index("{") :])


def test_a_program_that_looks_whether_it_is_recorded_is_found_out(tmp_path: Path, cli: Cli) -> None:
    line = shlex.join([*jobs.forking_torchrun(), "--nproc-per-node=2", str(HERE / "suspect.py"), "looks"])
    found = run_prove(tmp_path, "--steps", "4", "--", "sh", "-c", line, code=1)
    assert found["verdict"] == "changed"
    assert found["text"] == "changed from step 2 on: parameter 3.weight on rank 1"
    run = recorder.open_run(tmp_path / "recordings")
    assert found["runs"] == [str(run.path)]
    assert run.steps == [0, 1, 2, 3]
    assert run.proof is not None
    assert run.proof.text == found["text"]
    assert "proved changed" in cli("ls", tmp_path / "recordings").out
    told = cli("doctor", run.path)
    assert told.exit_code == 1
    assert f"missing recorder prove: {found['text']}" in told.out


def test_a_sound_program_is_unchanged(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = ["RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]
    found = run_prove(tmp_path, "--steps", "2", *environment, "--", str(HERE / "suspect.py"), "sound", code=0)
    # gloo of torch 2.9 prints a line of its own
    assert re.fullmatch(
        r"unchanged: 2 steps of 1 rank, [78]\d values and [12] printed lines?, bit by bit", found["text"]
    )


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints(tmp_path: Path) -> None:
    page = (HERE.parents[2] / "docs" / "prove.md").read_text(encoding="utf-8")
    block = re.search(r"```console\n\$ (recorder prove .*)\n((?:.*\n)*?)```", page)
    assert block is not None
    (tmp_path / "train.py").write_text((HERE.parents[1] / "small_training.py").read_text())
    launcher = str(Path(sys.executable).parent / "torchrun")
    words = [launcher if word == "torchrun" else word for word in shlex.split(block[1])[2:]]
    found = run_prove(tmp_path, *words, code=0)
    assert found["text"] in block[2]
    for note in found["notes"]:
        assert note in block[2]
    assert recorder.open_run(tmp_path / "recordings").steps == [0, 1, 2, 3, 4]


def test_a_damaged_verdict_is_no_verdict(recorded: Path, cli: Cli) -> None:
    assert recorder.open_run(recorded).proof is None
    text = Proof(verdict="unchanged", text="unchanged: so it is").encode()
    (recorded / PROOF).write_bytes(text)
    assert "closed, proved unchanged" in cli("ls", recorded.parent).out
    page = recorded.parent / "report.html"
    cli("report", recorded, "-o", page)
    assert ["recorder prove", "unchanged: so it is"] in read_page(page)["top"].data["facts"]
    (recorded / PROOF).write_bytes(text.replace(b"so it is", b"so it was"))
    proof = recorder.open_run(recorded).proof
    assert proof is not None
    assert proof.verdict == "cannot tell"
    assert "checksum differs" in proof.text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["RECORDER_POLICY=wait"], "needs a command"),
        (["RECORDER_POLICY=never", "train.py"], "allowed is wait or drop"),
        (["no-such-launcher", "train.py"], "no such program"),
        ([], "Missing argument"),
    ],
)
def test_misuse_is_one_line_and_launches_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli("prove", "--", *words)
    assert found.exit_code == 2
    assert problem in found.err
    assert list(tmp_path.iterdir()) == []


def test_of_ranks_that_fail_the_first_ones_words_are_shown(tmp_path: Path) -> None:
    words = "[rank2]: FileNotFoundError: random-2.pt\n[rank0]: RuntimeError: Connection closed by peer\n"
    with Launches({**os.environ, "RECORDER_DIR": str(tmp_path)}, 4, print) as launches:
        launches.launch("fails", ["sh", "-c", f"printf '{words}'; exit 1"])
        assert launches.proven(Proof(verdict="cannot tell", text="")).said == words.splitlines()[0]
