"""What was normal in sound runs, and what is said of a run that is held against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recorder.checks.book import make_rules
from recorder.checks.engine import Engine, Verdict
from recorder.checks.normal import Normal, phase_of, steps_of
from recorder.checks.rule import Severity
from recorder.checks.rules.comparing import Invariant, Unusual
from tests.checks.rows import Recorded, module_of
from tests.checks.test_rules import OPTIMIZER, noise, subjects

STEPS = 40


def training(seed: int, change: Any = None, ranks: int = 2, steps: int = STEPS) -> Recorded:
    """Outputs, gradients, parameters and a batch of two ranks; `change` makes something else of some of them."""
    recorded = Recorded({"up": "Linear", "": "Net"})
    for step in range(steps):
        for rank in range(ranks):
            made: dict[str, tuple[Any, dict[str, Any]]] = {
                "input": (noise(seed, step, rank), {"site": "input", "name": "x", "module_path": ""}),
                "output": (noise(seed, step, rank, 1) * (1 + step / 20), {"module_path": "up"}),
                "grad": (noise(seed, step, 2), {"site": "grad", "module_path": "up", **OPTIMIZER}),
                "param": (noise(seed) + 0.01 * noise(step), {"site": "param", "module_path": "up", **OPTIMIZER}),
                "frozen": (np.ones(8), {"site": "buffer", "name": "b", "module_path": "up", "phase": "optimizer"}),
                "loss": (2.0 + 0.1 * float(noise(seed, step, rank, shape=())), {
                    "site": "scalar", "name": "loss", "module_path": "",
                }),
            }  # fmt: skip
            for name, (values, more) in made.items():
                found = values if change is None else change(name, step, rank, values)
                if found is not None:
                    recorded.add(step, more.pop("module_path"), found, rank=rank, **more)
    return recorded


def learnt(*sound: Recorded) -> Normal:
    normal = Normal()
    for one in sound:
        learner = normal.learner(one.catalog)
        made = sorted(one._rows, key=lambda row: row[0])
        for start in range(0, len(made), 48):  # whole steps
            learner.add(one.rows(made[start : start + 48]))
    return normal


def judged(recorded: Recorded, normal: Normal | None, rows_a_batch: int = 1_000) -> Verdict:
    engine = Engine(make_rules([Unusual, Invariant], recorded.catalog, {}, normal), recorded.catalog)
    made = sorted(recorded._rows, key=lambda row: (row[0], recorded.catalog.rank_of[row[1]]))
    for start in range(0, len(made), rows_a_batch):
        engine.add(recorded.rows(made[start : start + rows_a_batch]))
    return engine.finish()


@pytest.fixture(scope="module")
def normal() -> Normal:
    return learnt(training(1), training(2))


def test_another_sound_training_is_as_it_was(normal: Normal) -> None:
    for rows_a_batch in (7, 1_000):
        assert judged(training(3), normal, rows_a_batch).findings == []


@pytest.mark.parametrize(
    ("of", "factor", "words"),
    [
        ("output", 12.0, "root mean square is above"),
        ("output", 1 / 12, "root mean square is below"),
        ("grad", 12.0, "root mean square is above"),
        ("loss", 12.0, "loss is above"),
    ],
)
def test_a_statistic_far_from_what_it_was_is_named(normal: Normal, of: str, factor: float, words: str) -> None:
    change = lambda name, step, rank, values: values * factor if name == of and step >= 16 else values  # noqa: E731
    (one,) = [one for one in judged(training(3, change), normal).findings if words in one.what]
    assert (one.rule, one.step, one.ranks) == ("unusual", 18, (0, 1))
    assert one.since == 16
    assert " here, " in one.detail and one.detail.endswith("there at steps 16 to 31")


def test_a_smaller_loss_is_no_finding(normal: Normal) -> None:
    assert (
        judged(training(3, lambda name, step, rank, values: values / 9 if name == "loss" else values), normal).findings
        == []
    )


@pytest.mark.parametrize("rows_a_batch", [7, 1_000])
@pytest.mark.parametrize(
    ("far", "said"),
    [
        ([*range(8, 12)], [(Severity.NOTE, 8)]),
        ([*range(8, 12), *range(30, 40)], [(Severity.WARNING, 30)]),
        ([*range(8, 30)], [(Severity.WARNING, 8)]),
        ([*range(8, 26, 2)], []),
        ([36, 37, 38], []),
    ],
    ids=["a while", "again, and to the end", "most of it", "never for long", "shorter than a tenth of the training"],
)
def test_what_comes_back_is_a_note(normal: Normal, far: list[int], said: Any, rows_a_batch: int) -> None:
    change = lambda name, step, rank, values: values * 30 if name == "output" and step in far else values  # noqa: E731
    found = [one for one in judged(training(3, change), normal, rows_a_batch).findings if "mean square" in one.what]
    assert [(one.severity, one.since) for one in found] == said
    assert all(one.what.endswith("and returned to normal") == (one.severity is Severity.NOTE) for one in found)


def test_one_rank_of_two_that_is_unlike_the_other_is_named(normal: Normal) -> None:
    change = lambda name, step, rank, values: values * 10 if (name, rank) == ("output", 1) else values  # noqa: E731
    found = [one for one in judged(training(3, change), normal).findings if "spread over ranks" in one.what]
    assert subjects(found) == [("up", 2, (1,))]


@pytest.mark.parametrize(
    ("change", "what", "subject", "severity"),
    [
        (
            lambda name, step, rank, values: values + 1e-3 * rank if name == "param" and step > 8 else values,
            "equal on all ranks", ("up", 11, (0, 1)), Severity.ERROR,
        ),
        (
            lambda name, step, rank, values: noise(3, step) if name == "input" else values,
            "different on all ranks", ("", 2, (0, 1)), Severity.WARNING,
        ),
        (
            lambda name, step, rank, values: noise(3) if name == "param" else values,
            "changes from record to record", ("up", 3, (0, 1)), Severity.WARNING,
        ),
        (
            lambda name, step, rank, values: values + step if name == "frozen" else values,
            "never changes", ("up", 3, (0, 1)), Severity.WARNING,
        ),
    ],
)  # fmt: skip
def test_what_always_held_is_expected(normal: Normal, change: Any, what: str, subject: Any, severity: Severity) -> None:
    found = [one for one in judged(training(3, change), normal).findings if what in one.what]
    assert [(one.rule, one.severity) for one in found] == [("invariant", severity)]
    assert subjects(found) == [subject]


def test_a_gradient_that_is_not_there_is_named(normal: Normal) -> None:
    recorded = training(3, lambda name, step, rank, values: None if name == "grad" else values)
    assert [(one.module_path, one.site) for one in judged(recorded, normal).findings] == [("up", "grad")]
    recorded.catalog.modules["model", "up"] = module_of("Linear", ("output", "param"))
    assert judged(recorded, normal).findings == [], "this recording does not ask for gradients"


def test_what_held_by_chance_in_one_run_is_not_expected() -> None:
    still = learnt(training(1), training(2, lambda name, step, rank, values: noise(2) if name == "param" else values))
    assert [one for one in judged(training(3), still).findings if one.rule == "invariant"] == []


def test_without_sound_runs_or_with_others_nothing_is_judged(normal: Normal) -> None:
    verdict = judged(training(3), None)
    assert verdict.findings == [] and {one.why.split(":")[0] for one in verdict.unjudged} == {
        "needs --baseline SOUND_RUN"
    }
    other = Recorded()
    for step in range(8):
        for site in ("output", "param"):
            other.add(step, "other", noise(step), site=site)
    verdict = judged(other, normal)
    assert verdict.findings == [] and all("is in the sound runs" in one.why for one in verdict.unjudged)


def test_a_sound_run_without_a_row_says_nothing() -> None:
    verdict = judged(training(3), learnt(Recorded()))
    assert verdict.findings == [] and all("is in the sound runs" in one.why for one in verdict.unjudged)
    assert len(verdict.unjudged) == 2


def test_phases_are_ranges_of_steps_that_double() -> None:
    steps = np.arange(70)
    for step, phase in zip(steps.tolist(), phase_of(steps).tolist(), strict=True):
        low, high = steps_of(phase)
        assert low <= step <= high
    assert phase_of(np.array([0, 7, 8, 15, 16, 1 << 40])).tolist() == [0, 0, 1, 1, 2, 23]
