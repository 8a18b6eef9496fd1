"""A sample of the campaign `python -m tests.campaigns kill`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.campaigns.faults import support
from tests.rigs.jobs import environment


def test_what_a_killed_training_had_committed_is_readable_and_equal_to_a_replay(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaigns", "kill", "--count=8", "--launched=0", f"--dir={tmp_path}"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    numbers = {name.strip(): int(n) for name, n in re.findall(r"^([a-z ]+?)  +(\d+)$", done.stdout, re.MULTILINE)}
    assert numbers["processes killed alive"] >= 6
    assert numbers["rows compared"] > 100
    assert numbers["problems"] == 0
    assert numbers["open"] > 0


FAILING = """
import os, time
from tests.campaigns.faults import kill
from tests.campaigns.__main__ import main

def missing(command, **how):
    raise FileNotFoundError(f"no such launcher: {command[:3]}")

def no_memory(checker):
    raise MemoryError("of the checker")

kill._LAST_CASE_S = 0.5
run_case = kill.run_case
popen, kill.subprocess.Popen = kill.subprocess.Popen, missing
print("driver", main(["kill", "--count=3", "--launched=3", "--minutes=1"]))
kill.subprocess.Popen = popen
kill.run_case = lambda case, folder: os._exit(3)
print("gone", main(["kill", "--count=3", "--jobs=1"]))
kill.run_case = lambda case, folder: time.sleep(1000)
print("hangs", main(["kill", "--count=3", "--minutes=0.01"]))
kill.run_case, kill.Checker.__init__ = run_case, no_memory
print("checker", main(["kill", "--count=100", "--launched=0", "--jobs=1"]))
"""


def test_a_campaign_of_which_a_process_fails_ends_with_its_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        cwd=Path(__file__).parents[2],
        env=environment({"TMPDIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert re.findall(r"^(\w+) (\d)$", done.stdout, re.MULTILINE) == [
        ("driver", "1"), ("gone", "1"), ("hangs", "1"), ("checker", "1")
    ], done.stdout + done.stderr  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run"]  # a script beside the interpreter may be missing
    assert f"FileNotFoundError: no such launcher: {launcher}" in done.stdout
    for problem in ("a driver ended with 3", "2 processes hang", "MemoryError: of the checker"):
        assert problem in done.stdout


def test_progress_is_shown_once_a_minute_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    progress = support.Progress(300, "kills")
    for done in range(300):
        now_s = float(done)
        progress.show(done, "0 problems")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{at:6d} s  {at} of 300 kills  0 problems" for at in (60, 120, 180, 240)]
