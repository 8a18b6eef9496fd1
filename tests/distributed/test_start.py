"""Starting by the flag and by the launcher, beside a user's own ``recorder.py``, with wrong settings or a full disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from . import jobs
from .jobs import SCRIPTS, Finished

LOOP, WORKERS = SCRIPTS / "loop.py", SCRIPTS / "workers.py"
TRAIN = """
import logging, sys
{first}
import torch
from torch import nn
logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("finished step", step, flush=True)
"""
STEPS = [f"finished step {i}" for i in range(3)]


def write_script(folder: Path, first: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN.format(first=first))
    return path


def assert_recorded(finished: Finished) -> None:
    assert finished.run.steps == [0, 1, 2]
    assert set(finished.run.to_pandas()["site"]) >= {"input", "output", "grad_output", "param", "grad", "optim"}


@pytest.mark.parametrize("first", ["import recorder; print(recorder.OURS)", ""])
def test_a_users_own_recorder_py_harms_nothing(tmp_path: Path, first: str) -> None:
    (tmp_path / "recorder.py").write_text("OURS = 'my own'\n")
    finished = jobs.succeeded(jobs.python(tmp_path, write_script(tmp_path, first), **jobs.recording()))
    assert finished.output.splitlines() == [*(["my own"] if first else []), *STEPS]
    assert_recorded(finished)


def test_the_launcher_records_and_hands_on_arguments_and_exit_code(tmp_path: Path) -> None:
    command = ("-m", "recorder", "run", LOOP, "--end=sys_exit", "--steps=3")
    finished = jobs.python(tmp_path, *command, RECORDER_RULES=jobs.EVERYTHING).wait()
    assert finished.returncode == 3
    assert finished.said == ""
    assert_recorded(finished)


def test_the_launcher_records_where_autoload_is_off(tmp_path: Path) -> None:
    command = ("-m", "recorder", "run", write_script(tmp_path))
    settings = {"RECORDER_RULES": jobs.EVERYTHING, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    finished = jobs.succeeded(jobs.python(tmp_path, *command, **settings))
    assert len(finished.lines("TORCH_DEVICE_BACKEND_AUTOLOAD=0")) == 1
    assert_recorded(finished)


def test_without_autoload_nothing_is_recorded_and_nothing_breaks(tmp_path: Path) -> None:
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **jobs.recording()}
    finished = jobs.succeeded(jobs.python(tmp_path, write_script(tmp_path), **settings))
    assert finished.output.splitlines() == STEPS
    assert not (tmp_path / "recordings").exists()


def test_forked_processes_record_nothing_and_disturb_nothing(tmp_path: Path) -> None:
    """Values of theirs would fill the small pool, which nothing empties there, and wait for room."""
    waiting = {"pool_bytes": "1MiB", "wait_s_per_step": "20", "wait_s_stalled": "20"}
    off = jobs.python(tmp_path / "off", WORKERS, tmp_path / "off.pt")
    on = jobs.python(tmp_path / "on", WORKERS, tmp_path / "on.pt", **jobs.recording(**waiting))
    recorded = jobs.succeeded(on)
    jobs.succeeded(off)
    (slowest_s,) = recorded.said.splitlines()
    assert float(slowest_s) < 10
    expected, actual = (torch.load(tmp_path / name) for name in ("off.pt", "on.pt"))
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
    (writer,) = recorded.run.writers
    assert writer.state == "closed"
    assert writer.balance.dropped == {}
    outputs = recorded.run.to_pandas()
    outputs = outputs[(outputs["site"] == "output") & (outputs["module_path"] == "0")]
    found = list(zip(outputs["step"], outputs["mode"], outputs["call"], strict=True))
    assert found == [(step, "train", 0) for step in range(10)]


WRONG = {
    "RECORDER_RULES": ("site=outputs", ["site", "'outputs'", "output"]),
    "RECORDER_POOL_BITES": ("1", ["RECORDER_POOL_BITES", "RECORDER_POOL_BYTES"]),
    "RECORDER": ("maybe", ["RECORDER", "maybe"]),
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_setting_stops_the_launch_with_one_message(tmp_path: Path, variable: str) -> None:
    value, words = WRONG[variable]
    finished = jobs.python(tmp_path, write_script(tmp_path), **{"RECORDER": "1", variable: value}).wait()
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert all(word in message for word in words), message


def test_a_wrong_setting_stops_torchrun_before_any_rank_starts(tmp_path: Path) -> None:
    began = time.monotonic()
    finished = jobs.torchrun(tmp_path, write_script(tmp_path), RECORDER="1", RECORDER_RULES="site=outputs").wait()
    assert time.monotonic() - began < 15
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert "'outputs'" in message


def test_in_a_child_process_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    """Somebody edits the file while a job runs, and a worker imports torch."""
    (tmp_path / "recorder.toml").write_text("codec_level = 1\n")
    child = write_script(tmp_path)
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import pathlib, subprocess, sys, torch\n"
        "pathlib.Path('recorder.toml').write_text('codec_level = 99')\n"
        f"sys.exit(subprocess.run([sys.executable, {str(child)!r}]).returncode)\n"
    )
    finished = jobs.succeeded(jobs.python(tmp_path, parent, RECORDER="1", RECORDER_CONFIG="recorder.toml"))
    problem, *rest = finished.output.splitlines()
    assert "not recording" in problem and "codec_level = 99" in problem
    assert rest == STEPS
    assert not (tmp_path / "recordings").exists()


def test_a_pattern_that_matches_nothing_is_one_line_and_training_goes_on(tmp_path: Path) -> None:
    rules = "module=blocks.9 site=output; site=grad keep=stats"
    finished = jobs.succeeded(jobs.python(tmp_path, write_script(tmp_path), **jobs.recording(rules)))
    problem, *rest = sorted(finished.output.splitlines())
    assert problem.startswith("ERROR recorder: ") and "'module=blocks.9 site=output" in problem
    assert rest == STEPS
    assert set(finished.run.to_pandas()["site"]) == {"grad"}


def test_patterns_are_judged_without_their_rank_clause(tmp_path: Path) -> None:
    rules = "module=0 rank=7 site=output; site=grad keep=stats"
    finished = jobs.succeeded(jobs.python(tmp_path, write_script(tmp_path), **jobs.recording(rules)))
    assert finished.output.splitlines() == STEPS


@pytest.mark.parametrize(
    ("settings", "word", "reason"),
    [
        ({"dir": "a_file/recordings"}, "a_file/recordings", None),
        ({"min_free_bytes": str(1 << 60)}, "free", "disk_floor"),
    ],
    ids=["unwritable", "full"],
)
def test_a_disk_that_takes_nothing_is_said_at_once_and_training_goes_on(
    tmp_path: Path, settings: dict[str, str], word: str, reason: str | None
) -> None:
    (tmp_path / "a_file").touch()
    finished = jobs.succeeded(jobs.python(tmp_path, write_script(tmp_path), **jobs.recording(**settings)))
    problem, *steps, closing = finished.output.splitlines()
    assert problem.split()[0] in ("ERROR", "WARNING") and word in problem
    assert steps == STEPS
    assert "incomplete" in closing
    if reason is not None:
        (writer,) = finished.run.writers
        assert writer.balance.written == 0
        assert writer.balance.dropped == {reason: writer.balance.observed}


def test_recording_loads_no_data_frame_library(tmp_path: Path) -> None:
    """It takes a second of a training process's interpreter, and 50 MB."""
    script = write_script(tmp_path)
    script.write_text(
        script.read_text() + "import recorder; recorder._active.flush(10); print('pandas' in sys.modules)\n"
    )
    finished = jobs.succeeded(jobs.python(tmp_path, script, **jobs.recording()))
    assert finished.output.splitlines() == [*STEPS, "False"]


def test_a_second_training_in_the_same_process_goes_on_with_the_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "for width in (4, 5):\n"
        "    model = torch.nn.Linear(width, 2)\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    for _ in range(4):\n"
        "        model(torch.ones(width)).sum().backward()\n"
        "        optimizer.step()\n"
        "    del model, optimizer\n"
    )
    finished = jobs.succeeded(jobs.python(tmp_path, script, **jobs.recording("site=grad keep=stats")))
    rows = finished.run.to_pandas()
    rows = rows[rows["name"] == "bias"]
    assert list(zip(rows["root"], rows["step"], strict=True)) == [
        *(("model", step) for step in range(4)),
        *(("model_1", step) for step in range(4, 8)),
    ]


def test_the_flag_off_is_as_no_flag(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    script.write_text(script.read_text() + "print('recorder' in sys.modules)\n")
    finished = jobs.succeeded(jobs.python(tmp_path, script, RECORDER="0", RECORDER_RULES="nonsense"))
    assert finished.output.splitlines() == [*STEPS, "False"]
