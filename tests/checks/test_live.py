"""Rules over what a writer measures, one record at a time, while the training runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recorder.checks.book import read_table
from recorder.checks.live import LiveChecks
from recorder.checks.rule import Finding, Severity
from recorder.checks.seen_steps import NO_RECORDS, KeptSteps, SeenStep
from recorder.records import Measured, ProbedSeries, ProbedStep, ValuePlace
from tests.checks.test_engine import Raising
from tests.rigs.fakes import fake_staged


class Fed:
    """Live rules, and what they said with the step in which it was said."""

    def __init__(self, **more: Any) -> None:
        self.said: list[tuple[int, Finding]] = []
        self.step = 0
        self.checks = LiveChecks(rank=3, on_finding=lambda one: self.said.append((self.step, one)), **more)

    def see(self, step: int, values: Any, module_path: str = "up", *, has_statistics: bool = True, **more: Any) -> None:
        array = np.asarray(values, np.float64)
        finite = array[np.isfinite(array)]
        measured = Measured(
            mean=float(finite.mean()) if finite.size else None,
            absmax=float(np.abs(finite).max(initial=0)),
            sum_sq=float((finite**2).sum()),
            nan_count=int(np.isnan(array).sum()),
            inf_count=int(np.isinf(array).sum()),
            zero_count=int((array == 0).sum()),
        )
        self.step = step
        staged = fake_staged(array, step=step, module_path=module_path, **more)
        self.checks.saw(staged, measured if has_statistics else Measured(fingerprint=1))


def sound(fed: Fed, step: int, loss: float = 1.0) -> None:
    noise = np.random.default_rng(step).normal(size=8)
    fed.see(step, noise)
    fed.see(step, loss + noise[0] / 100, "", site="scalar", name="loss")
    for module_path in ("up", "down"):
        fed.see(step, noise, module_path, site="grad", name="weight", phase="optimizer")


def test_a_value_that_is_not_finite_is_told_at_the_first_record_of_the_next_step() -> None:
    fed = Fed()
    for step in range(6):
        sound(fed, step)
        if step == 3:
            fed.see(3, [1.0, np.nan], "down")
    ((at, one),) = fed.said
    assert at == 4
    assert (one.rule, one.severity, one.step, one.module_path, one.ranks) == (
        "nonfinite", Severity.ERROR, 3, "down", (3,),
    )  # fmt: skip


def test_the_last_step_is_judged_at_the_end() -> None:
    fed = Fed()
    fed.see(0, [np.nan])
    assert fed.said == []
    fed.checks.finish()
    assert [one.rule for _, one in fed.said] == ["nonfinite"]


def test_of_one_step_the_forward_is_told_before_the_gradients() -> None:
    fed = Fed()
    for step in range(130):
        sound(fed, step, 30.0 if step == 120 else 1.0)
        if step == 120:
            fed.see(step, np.full(8, 1e6), "down", site="grad", name="weight", phase="optimizer")
    assert next((one.rule, one.site) for _, one in fed.said) == ("spike", "scalar")
    assert {one.site for _, one in fed.said[1:]} == {"grad"}


def test_a_spike_of_the_loss_and_a_jump_of_the_gradients_are_told_once() -> None:
    fed = Fed()
    for step in range(130):
        sound(fed, step, 30.0 if step == 60 else 1.0)
        if step == 120:
            fed.see(step, np.full(8, 1e6), "down", site="grad", name="weight", phase="optimizer")
    assert [(one.rule, one.step, one.module_path) for _, one in fed.said] == [
        ("spike", 60, ""),
        ("jump", 120, "down"),
        ("spike", 120, "down"),
    ]


def test_rules_and_thresholds_of_a_table_are_judged_live() -> None:
    table = {
        "spike": {"least": 4, "sigmas": 3},
        "rule": [{"name": "loud", "site": "output", "module": "up", "statistic": "absmax", "above": 50, "records": 2}],
    }
    thresholds, own = read_table(table, "check.toml")
    fed = Fed(thresholds=thresholds, own=own)
    for step in range(10):
        sound(fed, step, 9.0 if step == 6 else 1.0)
        fed.see(step, [60.0], "up", name="1")
        fed.see(step, [60.0], "down")
    assert [(one.rule, one.step, one.name) for _, one in fed.said] == [("loud", 1, "1"), ("spike", 6, "loss")]


def test_a_rule_that_raises_is_told_once_and_the_others_go_on() -> None:
    fed = Fed(own=[Raising])
    for step in range(5):
        sound(fed, step)
        if step == 3:
            fed.see(3, [np.inf], "down", site="grad", name="weight", phase="optimizer")
    assert [(one.rule, one.severity) for _, one in fed.said] == [
        ("raising", Severity.WARNING),
        ("nonfinite", Severity.ERROR),
    ]


def test_records_without_statistics_recomputed_and_late_ones_are_left_out() -> None:
    fed = Fed()
    fed.see(1, [np.nan], has_statistics=False)
    fed.see(1, [np.nan], phase="recompute")
    sound(fed, 2)
    fed.see(1, [np.nan])
    sound(fed, 3)
    fed.checks.finish()
    assert fed.said == []


def test_an_error_in_who_is_told_ends_the_checks_and_not_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    def fails(one: Finding) -> None:
        raise OSError("of mine")

    fed = Fed()
    fed.checks = LiveChecks(rank=0, on_finding=fails)
    for step in range(3):
        fed.see(step, [np.nan])
    fed.checks.finish()
    assert len(caplog.records) == 1 and "OSError: of mine" in caplog.text


def probed(step: int, square: float, numel: int = 8) -> ProbedStep:
    series = [
        ProbedSeries(ValuePlace("model", "up", "grad", "weight"), "optimizer", "train", "final", {"dtype": "float32"})
    ]
    return ProbedStep(step, series, np.array([square]), np.array([float(numel)]))


@pytest.mark.parametrize("has_losses", [True, False])
def test_gradients_are_judged_by_the_probe_of_every_step(has_losses: bool) -> None:
    fed = Fed(in_batches=True)
    for step in range(200):
        if has_losses:
            fed.see(step, 1.0, "", site="scalar", name="loss")
        fed.checks.probed(probed(step, 1e6 if step == 150 else 1.0 + step % 3))
    fed.checks.finish()
    assert {(one.rule, one.step, one.module_path) for _, one in fed.said} == {("jump", 150, "up"), ("spike", 150, "up")}


def test_a_step_without_the_value_is_no_sample_and_a_record_counts_once() -> None:
    fed = Fed()
    for step in range(60):
        fed.see(step, np.full(8, 0.5), "up", site="grad", name="weight", phase="optimizer", scope="final")
        fed.checks.probed(probed(step, 1e9, numel=8 if step % 2 else 0))
    fed.checks.finish()
    assert fed.said == []


def test_the_probe_of_a_training_without_scalars_is_judged_and_not_kept() -> None:
    fed = Fed(in_batches=True)
    for step in range(2000):
        fed.checks.probed(probed(step, 1e6 if step == 1500 else 1.0 + step % 3))
        if step % 50 == 0:
            fed.checks.look()
            assert len(fed.checks._probed) < 64
    assert {(one.rule, one.step) for _, one in fed.said} == {("jump", 1500), ("spike", 1500)}


def seen_step(step: int, squares: list[float]) -> SeenStep:
    return SeenStep(ProbedStep(step, [], np.array(squares), np.full(len(squares), 4.0)), NO_RECORDS)


def test_of_a_long_run_some_steps_are_kept_and_those_with_something_new() -> None:
    kept = KeptSteps()
    kept.add(seen_step(step, [1.0, float(step == 2021)]) for step in range(5000))
    steps = [one.probed.step for one in kept.steps]
    assert steps == sorted(set(steps))
    assert {0, 2021, *range(4968, 5000)} <= set(steps)
    assert 500 < len(steps) < 1024 + 100
    assert {step % 2 for step in steps[1:100]} == {0, 1} and {step % 3 for step in steps} == {0, 1, 2}


@pytest.mark.parametrize("is_counted", [True, False])
def test_of_a_large_model_fewer_steps_are_kept(is_counted: bool) -> None:
    kept = KeptSteps()
    kept.add(seen_step(step * is_counted, [1.0] * 60_000) for step in range(100))  # some programs never count steps
    assert 1 <= len(kept.steps) <= 9


def test_a_parameter_with_a_gradient_now_and_then_is_no_finding_of_a_long_run() -> None:
    def judged(every: int) -> set[str]:
        fed = Fed(in_batches=True)
        for step in range(3000):
            fed.checks.probed(probed(step, float(step % every == every - 1)))
            if step % 100 == 0:
                fed.see(step, np.zeros(8), site="grad", name="weight", phase="optimizer", scope="final")
        fed.checks.finish()
        whole = fed.checks.judge_whole([])
        assert whole is not None
        return {one.rule for one in whole if one.severity > Severity.NOTE}

    assert judged(1000) == set() and judged(4000) == {"no_gradient"}
