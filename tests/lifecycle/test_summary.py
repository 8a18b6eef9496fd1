"""The last words of a run: two lines of rank 0, seen where nobody configured logging, and never in anybody's way."""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.capture.nonfinite import NonFiniteValue
from recorder.checks.rows import Catalog
from recorder.checks.rule import Finding, Severity
from recorder.lifecycle import description
from recorder.lifecycle.findings import LiveFindings
from recorder.system import log
from tests.rigs import jobs

TRAIN = """
import logging, os, sys, torch
from torch import nn
{before}
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
model = nn.Linear(4, 2)
train(model)
{after}
print("done")
"""
FORK = "if (child := os.fork()) == 0: sys.exit(0)\nos.waitpid(child, 0)"
LEVEL = "logging.basicConfig(level={level}, format='%(levelname)s %(name)s %(message)s', stream=sys.stdout)"
SCRIPTS = {
    "plain": ("", FORK, {}),
    "sparse": ("", "", {"RECORDER_RULES": "site=output keep=stats steps=1"}),
    "other_rank": ("", "", {"RANK": "1", "WORLD_SIZE": "2", "RECORDER_JOIN_DEADLINE_S": "0"}),
    "configured": (LEVEL.format(level="logging.INFO"), "", {}),
    "nothing": ("", "", {"RECORDER_RULES": "site=output steps=1000"}),
    "no_rank": ("", "", {"RECORDER_RULES": "site=output rank=1"}),
    "not_rank_0": (
        "",
        "",
        {"RECORDER_RULES": "site=output rank=1", "WORLD_SIZE": "2", "RECORDER_JOIN_DEADLINE_S": "0"},
    ),
}


NO_MODEL = {
    "program": ("import torch; print('done')", {}),
    "other rank": ("import torch; print('done')", {"RANK": "1", "WORLD_SIZE": "2"}),
    "fails": ("import torch; print('done'); raise SystemError", {}),
    "optimizer": (
        "import torch; p = torch.nn.Parameter(torch.ones(2)); o = torch.optim.SGD([p]); p.sum().backward(); o.step()",
        {},
    ),
    "launcher": ("import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'])", {}),
    "data": (
        "import torch\n"
        "if __name__ == '__main__':\n"
        "    data = torch.utils.data.DataLoader([1.0, 2.0], num_workers=1, multiprocessing_context='spawn')\n"
        "    print(len(list(data)))",
        {},
    ),
    "spawns": (
        "import torch.multiprocessing as mp\n"
        "def train(rank): print('child')\n"
        "if __name__ == '__main__': mp.spawn(train)",
        {},
    ),
}


@pytest.fixture(scope="module")
def without_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of the programs without a model said, run side by side."""
    started = {}
    for name, (script, settings) in NO_MODEL.items():
        folder = tmp_path_factory.mktemp("no-model")
        (folder / "train.py").write_text(script)
        start = jobs.python if name == "program" else jobs.program
        started[name] = start(folder, "train.py", **{**jobs.recording(), **settings})
    started["command"] = jobs.python(tmp_path_factory.mktemp("no-model"), "-c", "import torch", **jobs.recording())
    return {name: job.wait().output for name, job in started.items()}


def test_a_program_without_a_model_says_at_its_end_that_nothing_was_recorded(without_model: dict[str, str]) -> None:
    done, line = without_model["program"].splitlines()
    assert (done, line) == (
        "done",
        "recorder: nothing was recorded: this process called no torch.nn.Module with parameters; RECORDER=1 records "
        "models in the process that trains them",
    )


@pytest.mark.parametrize("name", ["other rank", "fails", "launcher", "data", "spawns", "command"])
def test_a_helper_a_launcher_and_a_program_that_failed_do_not(without_model: dict[str, str], name: str) -> None:
    assert "recorder: " not in without_model[name]


def test_a_program_whose_optimizer_stepped_without_a_model_says_why_once(without_model: dict[str, str]) -> None:
    (line,) = without_model["optimizer"].splitlines()
    assert line.startswith("recorder: not recording: SGD stepped, but no module with its parameters was seen to run")
    assert "a program without a torch.nn.Module cannot be recorded, not even with recorder.scalar" in line


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each of the scripts said, run side by side."""
    started = {}
    for name, (before, after, settings) in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(TRAIN.format(before=before, after=after))
        start = jobs.python if name in ("plain", "configured", "nothing") else jobs.program
        started[name] = start(folder, "train.py", **{**jobs.recording(), "RECORDER_RULES": "", **settings})
    said = {name: jobs.succeeded(job).output.splitlines() for name, job in started.items()}
    # On a busy machine three steps may take long enough for the estimate.
    yield {name: "\n".join(one for one in lines if ": at these rules " not in one) for name, lines in said.items()}
    for job in started.values():
        job.kill()


def test_a_run_ends_with_two_lines_once_and_not_in_a_forked_child(outputs: dict[str, str]) -> None:
    done, first, second = outputs["plain"].splitlines()
    assert done == "done"
    assert first.startswith("recorder: ") and " rows, " in first and first.endswith("up to step 2; nothing dropped")
    assert re.fullmatch(r"recorder: next: recorder check (train-\d{8}-\d{6}); recorder show \1", second)


def test_it_says_the_last_step_that_has_rows(outputs: dict[str, str]) -> None:
    assert ", up to step 1; nothing dropped" in outputs["sparse"]


def test_other_ranks_say_nothing_of_the_end(outputs: dict[str, str]) -> None:
    assert "done" in outputs["other_rank"]
    assert "recorder: next:" not in outputs["other_rank"]


def test_who_configures_logging_decides(outputs: dict[str, str]) -> None:
    configured = outputs["configured"].splitlines()
    assert [line.startswith("INFO recorder ") for line in configured] == [False, True, True]


def test_where_nothing_was_recorded_the_reason_is_said(outputs: dict[str, str]) -> None:
    done, first, second = outputs["nothing"].splitlines()
    assert done == "done"
    assert first == "recorder: 0 rows, 0 B; no value was seen that the rules select"
    assert second.startswith("recorder: next: recorder doctor ")


def test_rules_for_no_rank_of_the_run_are_an_error_as_soon_as_that_is_known(outputs: dict[str, str]) -> None:
    error = (
        "recorder: nothing is recorded: no rule is for a rank of this run ('site=output rank=1'); the only rank is 0"
    )
    assert error in outputs["no_rank"].splitlines()
    assert "nothing is recorded" not in outputs["not_rank_0"]


@pytest.mark.parametrize("name", ["no_rank", "not_rank_0"])
def test_where_rank_0_is_not_to_be_recorded_it_says_so_and_where_the_others_record(
    outputs: dict[str, str], name: str
) -> None:
    lines = outputs[name].splitlines()
    (index,) = [number for number, line in enumerate(lines) if line.endswith("; no rule is for rank 0")]
    assert lines[index].startswith("recorder: 0 rows")
    assert lines[index + 1].startswith("recorder: next: recorder check ")


def test_a_full_pipe_that_nobody_reads_holds_the_end_up_no_longer_than_the_deadline(tmp_path: Path) -> None:
    fill = "os.set_blocking(2, False)\ntry:\n    while os.write(2, b'x' * 4096): pass\nexcept BlockingIOError: pass\n"
    body = TRAIN.format(before="", after=fill + "os.set_blocking(2, True)")
    environment = jobs.environment({**jobs.recording(), "RECORDER_CLOSE_DEADLINE_S": "1"})
    child = subprocess.Popen(
        [sys.executable, "-c", body], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    with child.stdout, child.stderr:
        assert child.stdout.readline() == b"done\n"
        before = time.monotonic()
        assert child.wait(jobs.DEADLINE_S) == 0
        assert time.monotonic() - before < 10
        assert set(child.stderr.read()) == set(b"x")


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Logging as Python has it at the start, and what goes to standard error; tests may set levels."""
    loggers = [logging.getLogger(), logging.getLogger("recorder")]
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    yield stream
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def of_a_run(tmp_path: Path, **changes: object) -> description.Summary:
    ledger: dict[str, object] = {"observed": 12, "written": 10, "dropped": {}, "retired": {"rows": 0, "bytes": 0}}
    facts: dict[str, object] = {
        "run": description.quoted(tmp_path),
        "world_size": 1,
        "last_step": 7,
        "nonfinite": None,
        "written_bytes": 1_500_000,
        "waited_s": 0.0,
        "longest_wait_s": 0.0,
        "is_asked_for": True,
    }
    ledger |= {name: changes.pop(name) for name in ("dropped", "retired") if name in changes}
    return description.Summary(**facts | changes | {"ledger": ledger})  # type: ignore[arg-type]


def test_losses_and_waits_are_told_and_what_to_type_then(tmp_path: Path) -> None:
    first, second = of_a_run(
        tmp_path,
        run=description.quoted(tmp_path / "a run"),
        world_size=4,
        waited_s=3.25,
        longest_wait_s=1.0,
        dropped={"pool_full": 2},
        retired={"rows": 5, "bytes": 9},
    ).lines
    assert first == (
        "10 rows of rank 0 (of 4), 1.5 MB, up to step 7; dropped 2 pool_full; "
        "training waited 3.2 s, at most 1.0 s at once; 5 rows retired"
    )
    assert second == f"next: recorder doctor '{tmp_path}/a run'"


def test_what_is_not_finite_is_told_and_what_to_type_then(tmp_path: Path) -> None:
    bad = NonFiniteValue(3, "'blocks.1' output", "2 NaN of 8 elements", "blocks.1", "output")
    first, second = of_a_run(tmp_path, nonfinite=bad).lines
    assert first == "10 rows, 1.5 MB, up to step 7; not finite since step 3, 'blocks.1' output; nothing dropped"
    assert second == f"next: recorder first {tmp_path}"
    _, second = of_a_run(tmp_path, nonfinite=bad, dropped={"pool_full": 2}).lines
    assert second == f"next: recorder first {tmp_path}; recorder doctor {tmp_path}"


def test_a_finding_of_the_rules_is_told_and_check_is_typed_then(tmp_path: Path) -> None:
    first, second = of_a_run(tmp_path, finding="step 137, '2' grad weight: the norm jumps (norm 1e+04)").lines
    assert "; step 137, '2' grad weight: the norm jumps (norm 1e+04); nothing dropped" in first
    assert second.startswith("next: recorder check ")


def test_a_step_that_never_ended_is_told_and_doctor_is_typed_then(tmp_path: Path) -> None:
    why = "no optimizer stepped, so every value is of step 0"
    first, second = of_a_run(tmp_path, never_moved=why).lines
    assert first.endswith(f"; {why}; nothing dropped")
    assert second == f"next: recorder doctor {tmp_path}"


def test_of_several_ranks_it_is_said_whose_view_it_is(tmp_path: Path) -> None:
    bad = NonFiniteValue(5, "'0' grad weight", "1 NaN of 8 elements", "0", "grad")
    first, _ = of_a_run(tmp_path, world_size=2, nonfinite=bad).lines
    assert "; not finite since step 5, '0' grad weight (of rank 0; recorder first looks at all ranks);" in first


@pytest.mark.parametrize(
    ("folder", "is_default", "taken", "typed"),
    [
        ("recordings", True, [], "big=1"),
        ("recordings", True, ["big=1"], "RUN"),
        ("recordings", True, ["recordings/big=1"], "RUN"),
        ("other", False, ["big=1"], "other/big=1"),
        ("other", False, ["other/big=1"], "RUN"),
    ],
)
def test_the_run_is_called_by_its_name_where_nothing_else_is_called_so(
    tmp_path: Path, folder: str, is_default: bool, taken: list[str], typed: str
) -> None:
    run = tmp_path / folder / "an-id"
    for path in [run, *(tmp_path / name for name in taken)]:
        path.mkdir(parents=True)
    assert description.name_in_commands(run, "big=1", Path(folder), is_default=is_default) == typed.replace(
        "RUN", str(run)
    )


def test_a_recording_of_which_nothing_was_written_names_no_step(tmp_path: Path) -> None:
    first, _ = of_a_run(tmp_path, last_step=None, written_bytes=0, dropped={"disk_floor": 12}).lines
    assert first.endswith(" rows, 0 B; dropped 12 disk_floor")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "two\nlines", "it's \\ \x07", "\u202eb", os.fsdecode(b"\xff")])
def test_a_path_that_would_move_a_terminal_is_escaped_and_a_shell_still_finds_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "it").touch()
    _, line = of_a_run(tmp_path, run=description.quoted(folder)).lines
    assert line.isprintable()
    _, _, quoted = line.partition("; recorder show ")
    assert subprocess.run(["bash", "-c", f"ls {quoted}"], capture_output=True, text=True).stdout == "it\n"


@pytest.mark.parametrize(("level", "num_lines"), [(logging.INFO, 2), (logging.WARNING, 0)])
def test_levels_of_the_user_decide(
    tmp_path: Path, unconfigured: io.StringIO, monkeypatch: pytest.MonkeyPatch, level: int, num_lines: int
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(said)])
    logging.getLogger().setLevel(level)
    log.tell(logging.getLogger("recorder"), lambda: of_a_run(tmp_path).lines, 1.0)
    assert len(said.getvalue().splitlines()) == num_lines
    assert unconfigured.getvalue() == ""


def test_a_level_without_a_handler_counts_as_configured(tmp_path: Path, unconfigured: io.StringIO) -> None:
    logging.getLogger("recorder").setLevel(logging.ERROR)
    log.tell(logging.getLogger("recorder"), lambda: of_a_run(tmp_path).lines, 1.0)
    assert unconfigured.getvalue() == ""


def test_a_standard_error_that_is_closed_or_missing_is_no_error(
    tmp_path: Path, unconfigured: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    unconfigured.close()
    log.tell(logging.getLogger("recorder"), lambda: of_a_run(tmp_path).lines, 1.0)
    monkeypatch.setattr(sys, "stderr", None)
    log.tell(logging.getLogger("recorder"), lambda: of_a_run(tmp_path).lines, 1.0)


def test_a_stream_has_room_until_it_is_full_and_again_once_it_was_read() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb", buffering=0) as incoming, open(writer, "wb", buffering=0) as outgoing:
        assert log.has_room(outgoing, 0.0)
        outgoing.write(b"x" * 4096)
        assert not log.has_room(outgoing, 0.05)
        incoming.read(4096)
        assert log.has_room(outgoing, 0.0)
        incoming.close()
        assert not log.has_room(outgoing, 0.0), "nobody is there to read"


def test_what_a_handler_writes_to_is_looked_at_and_not_what_others_write_to(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "w") as full, (tmp_path / "log").open("w") as file:
        while True:
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        logger = logging.Logger("apart")
        logger.addHandler(logging.StreamHandler(file))
        assert log.can_say(logger)
        logger.addHandler(logging.StreamHandler(full))
        assert not log.can_say(logger)


def test_the_last_line_counts_notes_as_check_does() -> None:
    """Notes that `check` tells as one are one: of several values, or of parameters that stay for several reasons."""
    note = Finding(
        "unchanged", Severity.NOTE, 1, "model", "0", "param", "weight", (0,), "it stays", "", math.nan, math.nan, ""
    )
    others = (
        note._replace(name="bias"),
        note._replace(module_path="2", what="its rate is 0"),
        note._replace(rule="data"),
    )
    findings = LiveFindings()
    findings.end(lambda one: one, [note, *others], Catalog())
    assert findings.num_notes == 2
