"""The rule `restart`: what a restarted training did not restore, and the restarts that restore all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.checks.rule import Finding, Severity
from tests.rigs import jobs

CASES = (
    "sound",
    "sgd",
    "scratch",
    "rounded",
    "model",
    "partial",
    "state",
    "schedule",
    "batches",
    "last",
    "scheduler",
    "nan",
    "end_other",
)
"""The first four are sound."""
OF_THE_END = ("end_sound", "end_frozen", "end_partial", "end_schedule")
SCRIPT = Path(__file__).parents[1] / "scripts" / "restarted.py"
Judged = Callable[[str], list[Finding]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarted")
    options = ("--standalone", "--max-restarts=1", "--nproc-per-node=1")
    jobs.succeeded(jobs.torchrun(folder, SCRIPT, *CASES, options=options))
    return folder


@pytest.fixture(scope="module")
def judged(folder: Path) -> Judged:
    def judge(case: str) -> list[Finding]:
        run = recorder.open_run(folder / case)
        assert [writer.attempt for writer in run.writers] == [0, 1]
        checked = check(run, ["restart"])
        assert checked.unjudged == []
        return checked.findings

    return judge


@pytest.mark.parametrize("case", CASES[:4])
def test_a_restart_that_restores_all_or_nothing_is_sound(judged: Judged, case: str) -> None:
    assert judged(case) == []


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("model", "attempt 1 continues at step 20 with the parameters with which the run began"),
        ("state", "attempt 1 has the parameters of step 20, and Adam counts its updates anew"),
        ("schedule", "attempt 1 has the learning rate 0.01, which was 0.005 at step 20 before"),
        ("scheduler", "attempt 1 has the learning rate"),
        ("end_other", "attempt 1 continues at step 30 with other parameters than the run had by then"),
    ],
)
def test_what_was_not_restored_is_named(judged: Judged, case: str, said: str) -> None:
    (one,) = judged(case)
    assert one.severity == Severity.WARNING and one.what.startswith(said)


def test_a_parameter_that_was_not_restored_is_named_with_their_number(judged: Judged) -> None:
    (one,) = judged("partial")
    assert (one.module_path, one.name, one.step) == ("3", "weight", 20)
    assert one.detail == "it is one of 2 that were not, of 6 parameters; its norm is that with which the run began"


def test_the_parameters_of_the_first_modules_are_named_if_only_the_last_was_restored(judged: Judged) -> None:
    (one,) = judged("last")
    assert (one.module_path, one.name, one.step) == ("0", "weight", 20)
    assert one.detail == "it is one of 4 that were not, of 6 parameters; its norm is that with which the run began"


def test_a_nan_at_a_step_that_a_restart_repeated_is_noted(folder: Path) -> None:
    run = recorder.open_run(folder / "nan")
    (note,) = (one for one in check(run).notes if "before a restart repeated the step" in one)
    assert note.startswith("rank 0, attempt 0, found in training") and "step 25" in note


def test_batches_from_the_beginning_are_noted(judged: Judged) -> None:
    (one,) = judged("batches")
    assert (one.severity, one.site, one.name, one.step) == (Severity.NOTE, "input", "input", 20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of the cases, with two runs each."""
    folder = tmp_path_factory.mktemp("runs")
    for again, code in (("0", 3), ("1", 0)):
        assert jobs.python(folder, SCRIPT, *CASES, *OF_THE_END, AGAIN=again).wait().returncode == code
    return folder


@pytest.mark.parametrize("case", [*CASES[:4], *OF_THE_END[:2]])
def test_a_run_that_continues_another_one_may_restore_all_or_nothing(runs: Path, case: str) -> None:
    run = recorder.open_run(runs / case)
    checked = check(run, ["restart"])
    assert checked.findings == []
    assert bool(checked.unjudged) == (case in ("scratch", "rounded")), "these do not have the bits of another run"
    first = recorder.open_run(runs / case / "@-2")
    note = f"the run began with parameters of {first.name}, of its step 20"
    if case in OF_THE_END:
        note = f"the run seems to continue {first.name} after its last step, 29"
    assert (note in checked.notes) == (case in ("sound", "sgd", *OF_THE_END))
    assert first.run_id != run.run_id and check(first, ["restart"]).unjudged != []


@pytest.mark.parametrize(
    ("case", "severity", "said"),
    [
        ("model", Severity.WARNING, "the run continues at step 20 with the parameters with which {first} began"),
        ("partial", Severity.NOTE, "the run has parameters of step 20 of {first}, and this one was not restored"),
        ("state", Severity.NOTE, "the run has the parameters of step 20 of {first}, and Adam counts its updates anew"),
        ("schedule", Severity.NOTE, "the run has the learning rate 0.01, which was 0.005 at step 20 of {first}"),
        ("batches", Severity.NOTE, "the run reads the batches with which {first} began"),
        (
            "end_partial",
            Severity.NOTE,
            "the run has parameters of step 30 of {first}, and this one was not restored",
        ),
        ("end_schedule", Severity.NOTE, "the run has the learning rate 0.01, which was 0.001753 at step 29 of {first}"),
    ],
)
def test_what_a_run_did_not_restore_of_another_one_is_named(
    runs: Path, case: str, severity: Severity, said: str
) -> None:
    (one,) = check(recorder.open_run(runs / case), ["restart"]).findings
    assert one.severity == severity and one.what.startswith(
        said.format(first=recorder.open_run(runs / case / "@-2").name)
    )
