"""Starting by the flag and by the launcher, beside a user's own ``recorder.py``, with wrong settings or a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

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
End = Callable[[str], Finished]
"""How the job of this name ended."""
STEPS = [f"finished step {i}" for i in range(3)]


def write_script(folder: Path, first: str = "", last: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN.format(first=first) + last)
    return path


def train(
    folder: Path, settings: dict[str, str], first: str = "", last: str = "", *, is_forked: bool = False
) -> jobs.Job:
    """Start the training; fork it where the import of torch is not what is looked at."""
    return (jobs.program if is_forked else jobs.python)(folder, write_script(folder, first, last), **settings)


def train_beside_own(folder: Path, first: str = "") -> jobs.Job:
    (folder / "recorder.py").write_text("OURS = 'my own'\n")
    return train(folder, jobs.recording(), first)


def train_beside_another_model(folder: Path) -> jobs.Job:
    """A rule that the first model has no module for may be for the second."""
    other = "import torch\nother = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
    last = "other(torch.ones(2)).sum().backward()\n"
    return train(folder, jobs.recording(NO_MATCH), other, last, is_forked=True)


def train_beside_file(folder: Path, **settings: str) -> jobs.Job:
    (folder / "a_file").touch()
    return train(folder, jobs.recording(**settings), is_forked=settings.get("dir") != "a_file")


def launch(folder: Path, *command: str | Path, **settings: str) -> jobs.Job:
    return jobs.python(folder, "-m", "recorder", "run", *command, RECORDER_RULES=jobs.EVERYTHING, **settings)


def train_in_child(folder: Path) -> jobs.Job:
    """Somebody edits the file while a job runs, and a worker imports torch."""
    (folder / "recorder.toml").write_text("codec_level = 1\n")
    parent = folder / "parent.py"
    parent.write_text(
        "import pathlib, subprocess, sys, torch\n"
        "pathlib.Path('recorder.toml').write_text('codec_level = 99')\n"
        f"sys.exit(subprocess.run([sys.executable, {str(write_script(folder))!r}]).returncode)\n"
    )
    return jobs.program(folder, parent, RECORDER="1", RECORDER_CONFIG="recorder.toml")


def train_twice(folder: Path) -> jobs.Job:
    script = folder / "train.py"
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
    return jobs.program(folder, script, **jobs.recording("site=grad keep=stats"))


WRONG = {
    "RECORDER_RULES": ("site=outputs", ["site", "'outputs'", "output"]),
    "RECORDER_POOL_BITES": ("1", ["RECORDER_POOL_BITES", "RECORDER_POOL_BYTES"]),
    "RECORDER": ("maybe", ["RECORDER", "maybe"]),
}
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
IS_PANDAS_THERE = "import recorder; recorder._active.flush(10); print('pandas' in sys.modules)\n"
NO_MATCH = "module=blocks.9 site=output; site=grad keep=stats"
JOBS: dict[str, Callable[[Path], jobs.Job]] = {
    "beside own": train_beside_own,
    "beside own, imported": partial(train_beside_own, first="import recorder; print(recorder.OURS)"),
    "launcher": lambda folder: launch(folder, LOOP, "--end=sys_exit", "--steps=3"),
    "launcher, no autoload": lambda folder: launch(folder, write_script(folder), **NO_AUTOLOAD),
    "no autoload": lambda folder: train(folder, NO_AUTOLOAD | jobs.recording()),
    **{
        name: partial(train, settings={"RECORDER": "1", name: value}, is_forked=name != "RECORDER_RULES")
        for name, (value, _) in WRONG.items()
    },
    "in a child": train_in_child,
    "no match": partial(train, settings=jobs.recording(NO_MATCH), is_forked=True),
    "no match in the first": train_beside_another_model,
    "other rank": partial(
        train, settings=jobs.recording("module=0 rank=7 site=output; site=grad keep=stats"), is_forked=True
    ),
    "a file": partial(train_beside_file, dir="a_file"),
    "below a file": partial(train_beside_file, dir="a_file/recordings"),
    "full": partial(train_beside_file, min_free_bytes=str(1 << 60)),
    "modules": partial(train, settings=jobs.recording(), last=IS_PANDAS_THERE),
    "twice": train_twice,
    "off": partial(
        train,
        settings={"RECORDER": "0", "RECORDER_RULES": "nonsense"},
        last="print('recorder' in sys.modules)\n",
    ),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Finished]]]:
    """How each of the jobs ended. Two run at a time: most of each is an interpreter that imports, on one core."""
    root = tmp_path_factory.mktemp("start")

    def run(number: int, start: Callable[[Path], jobs.Job]) -> Finished:
        folder = root / str(number)
        folder.mkdir()
        return start(folder).wait()

    with ThreadPoolExecutor(2) as executor:
        yield {name: executor.submit(run, i, start) for i, (name, start) in enumerate(JOBS.items())}
        executor.shutdown(cancel_futures=True)


@pytest.fixture
def ended(ends: dict[str, Future[Finished]]) -> End:
    return lambda name: ends[name].result()


@pytest.fixture
def succeeded(ended: End) -> End:
    def succeeded(name: str) -> Finished:
        finished = ended(name)
        assert finished.returncode == 0, finished.output
        return finished

    return succeeded


# What takes its time comes first, while none of the other jobs runs beside it.
def test_a_wrong_setting_stops_torchrun_before_any_rank_starts(tmp_path: Path) -> None:
    began = time.monotonic()
    wrong = {"RECORDER": "1", "RECORDER_RULES": "site=outputs"}
    finished = jobs.torchrun(tmp_path, write_script(tmp_path), **wrong).wait()
    assert time.monotonic() - began < 15
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert "'outputs'" in message


@pytest.mark.parametrize(
    "command", [["-m", "torch.distributed.run"], [str(Path(sys.executable).with_name("torchrun"))]]
)
def test_a_launcher_loads_nothing_that_only_a_training_needs(tmp_path: Path, command: list[str]) -> None:
    words = [sys.executable, *command, "--nproc-per-node", "1", "--no-python", "true"]
    env = dict(os.environ, RECORDER="1", RECORDER_DIR=str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    ended = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "recorder.config" in loaded and "recorder.capture" not in loaded


def test_forked_processes_record_nothing_and_disturb_nothing(tmp_path: Path) -> None:
    """Values of theirs would fill the small pool, which nothing empties there, and wait for room."""
    waiting = {"pool_bytes": "1MiB", "wait_s_per_step": "20", "wait_s_stalled": "20"}
    off = jobs.program(tmp_path / "off", WORKERS, tmp_path / "off.pt")
    on = jobs.program(tmp_path / "on", WORKERS, tmp_path / "on.pt", **jobs.recording(**waiting))
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


def assert_recorded(finished: Finished) -> None:
    assert finished.run.steps == [0, 1, 2]
    assert set(finished.run.to_pandas()["site"]) >= {"input", "output", "grad_output", "param", "grad", "optim"}


@pytest.mark.parametrize(("name", "said"), [("beside own", []), ("beside own, imported", ["my own"])])
def test_a_users_own_recorder_py_harms_nothing(succeeded: End, name: str, said: list[str]) -> None:
    finished = succeeded(name)
    assert finished.output.splitlines() == [*said, *STEPS]
    assert_recorded(finished)


def test_the_launcher_records_and_hands_on_arguments_and_exit_code(ended: End) -> None:
    finished = ended("launcher")
    assert finished.returncode == 3
    assert finished.said == ""
    assert_recorded(finished)


def test_the_launcher_records_where_autoload_is_off(succeeded: End) -> None:
    finished = succeeded("launcher, no autoload")
    assert len(finished.lines("TORCH_DEVICE_BACKEND_AUTOLOAD=0")) == 1
    assert_recorded(finished)


def test_without_autoload_nothing_is_recorded_and_nothing_breaks(succeeded: End) -> None:
    finished = succeeded("no autoload")
    assert finished.output.splitlines() == STEPS
    assert not (finished.folder / "recordings").exists()


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_setting_stops_the_launch_with_one_message(ended: End, variable: str) -> None:
    finished, (_, words) = ended(variable), WRONG[variable]
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert all(word in message for word in words), message


def test_in_a_child_process_a_wrong_setting_is_one_line(succeeded: End) -> None:
    finished = succeeded("in a child")
    problem, *rest = finished.output.splitlines()
    assert "not recording" in problem and "codec_level = 99" in problem
    assert rest == STEPS
    assert not (finished.folder / "recordings").exists()


@pytest.mark.parametrize(("name", "word"), [("a file", "a_file': is no directory"), ("below a file", "/a_file is no")])
def test_a_directory_that_can_never_be_written_stops_the_launch_with_one_message(
    ended: End, name: str, word: str
) -> None:
    finished = ended(name)
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert "RECORDER_DIR (environment): dir = 'a_file" in message and word in message
    assert "name a directory that can be written" in message


def test_a_pattern_that_matches_no_module_of_the_only_model_stops_the_launch_with_one_message(ended: End) -> None:
    finished = ended("no match")
    assert finished.returncode == 2
    (message,) = finished.output.splitlines()
    assert message.startswith("recorder: RECORDER_RULES (environment): the rule 'module=blocks.9 site=output' matches")
    assert not (finished.folder / "recordings").exists()


def test_a_pattern_that_may_be_for_another_model_is_one_line_and_training_goes_on(succeeded: End) -> None:
    finished = succeeded("no match in the first")
    problem, *rest = sorted(finished.output.splitlines())
    assert problem.startswith("ERROR recorder: ") and "'module=blocks.9 site=output" in problem
    assert rest == STEPS
    assert set(finished.run.to_pandas()["site"]) == {"grad"}


def test_patterns_are_judged_without_their_rank_clause(succeeded: End) -> None:
    assert succeeded("other rank").output.splitlines() == STEPS


def test_a_disk_that_takes_nothing_is_said_at_once_and_training_goes_on(succeeded: End) -> None:
    finished = succeeded("full")
    problem, *steps, closing = finished.output.splitlines()
    assert problem.split()[0] in ("ERROR", "WARNING") and "free" in problem
    assert steps == STEPS
    assert "incomplete" in closing
    (writer,) = finished.run.writers
    assert writer.balance.written == 0
    assert writer.balance.dropped == {"disk_floor": writer.balance.observed}


def test_recording_loads_no_data_frame_library(succeeded: End) -> None:
    """It takes a second of a training process's interpreter, and 50 MB."""
    assert succeeded("modules").output.splitlines() == [*STEPS, "False"]


def test_a_second_training_in_the_same_process_goes_on_with_the_steps(succeeded: End) -> None:
    rows = succeeded("twice").run.to_pandas()
    rows = rows[rows["name"] == "bias"]
    assert list(zip(rows["root"], rows["step"], strict=True)) == [
        *(("model", step) for step in range(4)),
        *(("model_1", step) for step in range(4, 8)),
    ]


def test_the_flag_off_is_as_no_flag(succeeded: End) -> None:
    assert succeeded("off").output.splitlines() == [*STEPS, "False"]
