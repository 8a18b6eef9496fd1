"""Each rule finds its fault at the right value, and says nothing of values as they should be."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recorder.checks.causes import with_causes, words_of
from recorder.checks.rule import CheckRule, Finding, Severity
from recorder.checks.rules import gradients as gradient_rules
from recorder.checks.rules.activations import Attention, Dead, Saturated
from recorder.checks.rules.comparing import OutlierRank, RunningStatistics
from recorder.checks.rules.curves import CurveRule
from recorder.checks.rules.data import Data
from recorder.checks.rules.evaluation import EvaluationOutput
from recorder.checks.rules.gradients import Exploding, Flip, Objectives, Vanishing
from recorder.checks.rules.leaps import Jump, Spike
from recorder.checks.rules.losses import LossStuck
from recorder.checks.rules.no_gradient import NoGradient
from recorder.checks.rules.parameters import Initialisation, Unchanged
from recorder.checks.rules.programs import Clipping
from recorder.checks.rules.updates import Update
from recorder.checks.rules.validations import Overfitting
from recorder.checks.rules.values import NonFinite, Skipped
from recorder.sites import LABELS, UPDATE
from tests.checks.rows import Recorded, module_of

LAYERS = [f"blocks.{number}" for number in range(8)]
BATCHES = (1, 7, 1_000)
"""Rows of a batch: what is found must not depend on it."""
OPTIMIZER: dict[str, Any] = {"name": "weight", "phase": "optimizer"}


def noise(*seed: int, scale: float = 1.0, shape: tuple[int, ...] = (4, 8)) -> Any:
    return np.random.default_rng(seed).normal(size=shape) * scale


def said(recorded: Recorded, rule: type[CheckRule], **thresholds: float) -> list[Finding]:
    """The findings, which are the same however the rows are cut into batches."""
    first, *others = [recorded.judge(rule, rows, **thresholds).findings for rows in BATCHES]
    for other in others:
        assert [one._replace(value=0.0) for one in other] == [one._replace(value=0.0) for one in first]
        assert [one.value for one in other] == pytest.approx([one.value for one in first])
    return first


def subjects(found: list[Finding]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.module_path, one.step, one.ranks) for one in found]


def outputs(change: Any = None, ranks: int = 1, steps: int = 8) -> Recorded:
    """Outputs of layers, and what `change` makes of one of them."""
    recorded = Recorded()
    for step in range(steps):
        for rank in range(ranks):
            for number, path in enumerate(LAYERS):
                values = noise(step, rank, number)
                recorded.add(step, path, values if change is None else change(step, rank, path, values), rank=rank)
    return recorded


def test_a_nan_is_named_once_at_the_module_that_made_it() -> None:
    def change(step: int, rank: int, path: str, values: Any) -> Any:
        return np.where(values > 1, np.nan, values) if step >= 3 and path >= "blocks.5" and rank == 1 else values

    (one,) = said(outputs(change, ranks=2), NonFinite)
    assert subjects([one]) == [("blocks.5", 3, (1,))]
    assert one.severity is Severity.ERROR and one.measure == "NaN elements"


def test_of_a_value_that_was_not_counted_at_least_one_element_is_said_to_be_nan() -> None:
    for sum_sq, words in ((np.nan, "NaN in at least 1 of its elements"), (4.0, "NaN in 1 of its elements")):
        recorded = Recorded()
        recorded.add(0, "up", [np.nan, 1.0, 2.0])
        recorded.add(0, "up", [np.nan, 1.0, 2.0], site="param", name="weight")
        for _, _, numbers in recorded._rows:
            numbers["sum_sq"] = sum_sq
        (one,) = recorded.judge(NonFinite).findings
        assert words in one.said
        assert one.detail == f"weight holds {'at least ' * (sum_sq != 4.0)}1 NaN"


def test_a_nan_that_comes_back_is_named_again() -> None:
    def change(step: int, rank: int, path: str, values: Any) -> Any:
        return values * np.nan if step in (2, 3, 6) and path == "blocks.1" else values

    assert subjects(said(outputs(change), NonFinite)) == [("blocks.1", 2, (0,)), ("blocks.1", 6, (0,))]


def test_the_rule_says_whether_the_module_made_it_or_was_given_it() -> None:
    for site, spoiled, words, detail in (
        ("input", np.ones(4), "the module made the value", ""),
        ("param", [1, np.nan], "neither is a parameter of the module: weight", "weight holds 1 NaN"),
    ):
        recorded = Recorded()
        recorded.add(0, "up", np.full(4, np.nan))
        recorded.add(0, "up", spoiled, site=site, name="weight")
        (one,) = recorded.judge(NonFinite).findings
        assert words in one.what and one.site == "output" and one.detail == detail


def test_the_rank_with_the_bad_chunk_of_a_parameter_is_named_alone() -> None:
    recorded = Recorded()
    for rank in range(2):
        recorded.add(0, "up", np.full(4, np.nan), rank=rank)
        recorded.add(0, "up", [1.0, np.nan if rank else 2.0], rank=rank, whole=4, **OPTIMIZER, site="param")
    (one,) = said(recorded, NonFinite)
    assert one.ranks == (1,) and one.detail == "weight holds 1 NaN"


@pytest.mark.parametrize("is_training_bad", [False, True])
def test_a_nan_in_an_evaluation_says_so_where_training_is_finite(is_training_bad: bool) -> None:
    recorded = outputs(lambda step, rank, path, values: values * np.nan if is_training_bad else values)
    recorded.add(3, "up", [np.nan, 1.0], mode="no_grad")
    told = "; this is an evaluation (no_grad), and all recorded values of training at this step are finite"
    assert [told in one.what for one in said(recorded, NonFinite)] == [not is_training_bad]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_nan_loss_that_the_program_skips_is_said_to_touch_no_parameter(is_used: bool) -> None:
    with_gradients, with_another_loss = Recorded(), Recorded()
    for step in range(4):
        for recorded in (with_gradients, with_another_loss):
            recorded.add(step, "", np.nan if step == 2 else 1.0, site="scalar", name="loss")
        gradient = np.full(4, np.nan if is_used and step == 2 else 1.0)
        with_gradients.add(step, "up", gradient, **OPTIMIZER, site="grad")
    with_another_loss.add(2, "", 1.0, site="scalar", name="loss")
    if is_used:
        with_another_loss.add(2, "up", [np.nan], **OPTIMIZER, site="grad")
    for recorded in (with_gradients, with_another_loss):
        (one,) = said(recorded, NonFinite)
        assert ("; it did not reach any gradient or parameter recorded at this step" in one.what) == (not is_used)


@pytest.mark.parametrize(("last", "is_said"), [(-100, True), (3, False)])
def test_a_nan_loss_of_labels_that_are_all_ignored_says_so(last: int, is_said: bool) -> None:
    recorded = Recorded()
    for step in range(4):
        recorded.add(step, "", [-100, -100, last if step == 2 else 1], site="input", name="labels", dtype="int64")
        recorded.add(step, "", np.nan if step == 2 else 1.0, name="loss")
    (one,) = said(recorded, NonFinite)
    assert ("; all labels are -100, which the loss ignores" in one.what) is is_said


def test_a_mask_is_no_finding_and_one_that_grows_is() -> None:
    def mask(count: int) -> Any:
        values = np.zeros(8)
        values[:count] = -np.inf
        return values

    recorded = outputs(lambda step, rank, path, values: mask(3) if path == "blocks.2" else values)
    assert said(recorded, NonFinite) == []
    growing = outputs(lambda step, rank, path, values: mask(3 + (step == 5)) if path == "blocks.2" else values)
    assert subjects(said(growing, NonFinite)) == [("blocks.2", 5, (0,))]


def test_a_mask_that_grows_is_a_note_where_all_after_it_is_finite() -> None:
    def padded(step: int, path: str, values: Any, bad_step: int | None) -> Any:
        if path == "blocks.4" and step == bad_step:
            return values * np.nan
        return np.where(np.arange(8) < (0, 0, 2, 1, 3, 2, 3, 5)[step], -np.inf, 0.0) if path == "blocks.2" else values

    for bad_step, error in ((None, []), (5, [("blocks.4", 5, (0,))]), (7, [("blocks.2", 7, (0,))])):
        recorded = outputs(lambda step, rank, path, values, bad=bad_step: padded(step, path, values, bad))
        findings = said(recorded, NonFinite)
        assert subjects([one for one in findings if one.severity is Severity.ERROR]) == error
        notes = [one.step for one in findings if one.severity is Severity.NOTE]
        assert notes == [2, 4, 7][: 2 if bad_step == 7 else 3]


def test_a_note_on_a_mask_is_no_cause() -> None:
    recorded = outputs(lambda step, rank, path, values: values * (np.inf if (path, step) == ("blocks.1", 3) else 1.0))
    (note,) = recorded.judge(NonFinite).findings
    later = note._replace(rule="loss", severity=Severity.ERROR, step=5, what="the loss rises")
    assert [(one.severity, one.cause) for one in with_causes([note, later], recorded.catalog)][-1] == (
        Severity.NOTE,
        "",
    )


def test_a_gradient_may_hold_no_infinity_from_its_first_record_on() -> None:
    recorded = Recorded()
    recorded.add(0, "up", [np.inf, 1.0], site="grad", name="weight", phase="optimizer")
    assert subjects(recorded.judge(NonFinite).findings) == [("up", 0, (0,))]


def test_a_step_that_grad_scaler_skipped_is_a_note_and_hides_nothing() -> None:
    recorded = Recorded()
    for step in range(4):
        recorded.add(step, "up", [np.inf if step in (1, 2) else 1.0], **OPTIMIZER, site="grad")
        recorded.add(step, "", float(step == 1), site="scalar", name="skipped")
    assert [(one.step, one.severity) for one in said(recorded, NonFinite)] == [(2, Severity.ERROR), (1, Severity.NOTE)]


@pytest.mark.parametrize("bad", ["", "grad", "output", "loss", "no final"])
def test_a_backward_that_the_program_threw_away_is_a_note(bad: str) -> None:
    recorded = Recorded()
    for step in range(3):
        for micro_step, is_thrown in enumerate([True, False] if step == 1 else [False]):
            value = np.nan if is_thrown and bad == "output" else 1.0
            recorded.add(step, "up", [value], micro_step=micro_step)
            recorded.add(step, "", np.nan if is_thrown and bad == "loss" else 1.0, site="scalar", name="loss")
            recorded.add(
                step,
                "up",
                [np.inf * is_thrown if is_thrown else 1.0],
                site="grad_output",
                phase="backward",
                micro_step=micro_step,
            )
        if bad != "no final" or step != 1:
            recorded.add(step, "up", [np.inf if (bad, step) == ("grad", 1) else 1.0], **OPTIMIZER, site="grad")
    (one,) = said(recorded, NonFinite)
    assert (one.step, one.severity) == (1, Severity.ERROR if bad else Severity.NOTE)


def gradients(scale: Any, steps: int = 150) -> Recorded:
    recorded = Recorded()
    for step in range(steps):
        for number, path in enumerate(LAYERS):
            recorded.add(step, path, noise(step, number, scale=scale(step, path)), **OPTIMIZER, site="grad")
        recorded.add(step, "", 2 + noise(step, shape=(), scale=0.1), site="scalar", name="loss")
    return recorded


def test_a_loss_that_reached_zero_does_not_spike() -> None:
    for floor, is_spike in ((1e-6, False), (0.1, True)):
        recorded = Recorded()
        for step in range(200):
            value = 2.0 if step < 5 else floor * (8 if step == 190 else 1)
            recorded.add(step, "", value + noise(step, shape=(), scale=1e-3 * floor), site="scalar", name="loss")
        assert [one.step for one in said(recorded, Spike)] == [190] * is_spike


@pytest.mark.parametrize(("rise", "is_spike"), [(1e-3, False), (3.0, True)])
def test_a_loss_that_was_zero_for_long_is_compared_with_what_it_was_before(rise: float, is_spike: bool) -> None:
    recorded = Recorded()
    for step in range(200):
        value = 2.0 if step < 5 else rise if step == 190 else 0.0
        recorded.add(step, "", np.array(value), site="scalar", name="loss")
    assert [one.step for one in said(recorded, Spike)] == [190] * is_spike


@pytest.mark.parametrize(
    ("loss", "severity"),
    [
        (lambda step: 0.3**step, Severity.NOTE),
        (lambda step: 1.0, Severity.WARNING),
        (lambda step: 0.0, Severity.WARNING),
    ],
    ids=["little by little", "at once", "always"],
)
def test_a_loss_that_has_fallen_to_zero_has_no_gradient(loss: Any, severity: Severity) -> None:
    recorded = Recorded()
    for step in range(40):
        value = loss(step) if step < 5 else 0.0
        recorded.add(step, "", np.array(value), site="scalar", name="loss")
        recorded.add(step, "up", np.full(4, value), **OPTIMIZER, site="grad")
    assert [(one.module_path, one.severity) for one in said(recorded, NoGradient)] == [("up", severity)]


def test_a_gradient_of_zeros_explains_why_a_parameter_stays() -> None:
    for gradient, expected in ((0.0, []), (0.5, [("up", 3, (0,))])):
        recorded = Recorded()
        for step in range(12):
            recorded.add(step, "up", np.full(4, 1.0 + max(step - 4, 0)), **OPTIMIZER, site="param")
            recorded.add(step, "up", np.full(4, 1.0 if step > 4 else gradient), **OPTIMIZER, site="grad")
        assert subjects(said(recorded, Unchanged)) == expected


@pytest.mark.parametrize(
    ("part", "rate", "since", "severity"),
    [
        (0.02, "lr.AdamW.0", 0, Severity.WARNING),
        (0.02, "lr.AdamW.0", 90, None),
        (0.3, "lr.Adam.0", 0, Severity.NOTE),
        (0.3, "lr.Adam.0", 90, None),  # it goes on from a checkpoint
        (0.9, "lr.Adam.0", 0, None),
        (0.02, "lr.SGD.0", 0, None),
        (0.02, "lr.Adamax.0", 0, None),
    ],
)
def test_an_adam_whose_updates_are_far_below_its_rate_is_named(
    part: float, rate: str, since: int, severity: Severity | None
) -> None:
    found = said(small_updates(part, rate, since), Update)
    assert [one.severity for one in found] == [severity] * (severity is not None)
    words = f"no update of {rate.split('.')[1]} moves a parameter by more than {100 * part:.0f} % of its learning rate"
    assert all(one.what.startswith(words) for one in found)


def small_updates(part: float, rate: str, since: int = 0, *, num_rows: int = 64) -> Recorded:
    """Updates of two parameters by at most `part` of the learning rate. `num_rows` of 64 elements have a gradient."""
    recorded = Recorded()
    for path in ("up", "down"):
        recorded.catalog.modules["model", path] = module_of("Linear", ("param",), rates={"weight": rate})
    for step in range(since, since + 40):
        recorded.add(step, "", 1e-3, site="scalar", name=rate)
        for path, size in (("up", part), ("down", part / 10)):
            gradient = noise(step, shape=(64,)) * (np.arange(64) < num_rows)
            recorded.add(step, path, gradient, site="grad", name="weight")
            moved = np.full(64, 1e-3 * size * (1 if step == since + 5 else 0.3))
            recorded.add(step, path, moved, site=UPDATE, name="weight", is_probe=True)
    return recorded


def test_an_adam_that_moves_a_few_rows_of_a_table_is_not_judged() -> None:
    assert said(small_updates(0.02, "lr.Adam.0", num_rows=6), Update) == []


def test_a_gradient_that_jumps_is_named_with_the_module_that_grew_most() -> None:
    recorded = gradients(lambda step, path: 1000.0 if (step, path) == (120, "blocks.3") else 1.0)
    assert subjects(said(recorded, Jump)) == [("blocks.3", 120, (0,))]
    assert subjects(said(recorded, Spike)) == [("blocks.3", 120, (0,))]


@pytest.mark.parametrize("unfrozen", [None, 258])
def test_a_layer_without_a_gradient_that_was_frozen_until_now_is_a_note(unfrozen: int | None) -> None:
    recorded = Recorded()
    for step in range(10):
        for path in ("0", "2", "4"):
            recorded.add(step, path, noise(step), **OPTIMIZER, site="param")
        for path in ("2", "4"):
            recorded.add(step, path, noise(step), **OPTIMIZER, site="grad")
    recorded.catalog.modules["model", "0"] = module_of("Linear", ("grad", "param"), unfrozen=unfrozen)
    severity = Severity.WARNING if unfrozen is None else Severity.NOTE
    assert [(one.module_path, one.severity) for one in said(recorded, NoGradient)] == [("0", severity)]


@pytest.mark.parametrize("since", [100, 0])
def test_a_part_that_is_unfrozen_is_no_spike(since: int) -> None:
    recorded = Recorded({"trunk": "Linear", "head": "Linear"})
    for step in range(200):
        for module_path, size in (("trunk", 30.0), ("head", 1.0)):
            if module_path == "head" or step >= since:
                late = 400.0 if (module_path, step) == ("head", 180) else 1.0
                recorded.add(step, module_path, late * size * (1 + noise(step) / 20), site="grad", name="weight")
    assert [(one.rule, one.step) for one in recorded.judge(Spike).findings] == [("spike", 180)]


@pytest.mark.parametrize("has_head", [True, False])
def test_a_loss_that_leaps_as_a_head_gets_its_first_gradient_is_a_note(has_head: bool) -> None:
    recorded = Recorded({"trunk": "Linear", "head": "Linear"})
    for step in range(200):
        for module_path in ("trunk", "head") if has_head and step >= 100 else ("trunk",):
            recorded.add(step, module_path, 1 + noise(step) / 20, site="grad", name="weight")
        loss = 5.0 if step >= 100 else 0.5
        recorded.add(step, "", loss + noise(step, shape=(), scale=0.05), site="scalar", name="loss")
    first, *_ = said(recorded, Spike)
    assert (first.step, first.severity) == (100, Severity.NOTE if has_head else Severity.WARNING)
    assert ("their first gradient" in first.detail) == has_head


def test_a_spike_shortly_after_a_small_new_gradient_is_named() -> None:
    """Of many experts, rare ones get their first gradients late."""
    recorded = Recorded({f"experts.{number}": "Linear" for number in range(16)})
    for step in range(200):
        for number in range(16):
            if step >= 12 * number:
                size = 100.0 if step == 150 else 1.0
                recorded.add(step, f"experts.{number}", size * (1 + noise(step) / 20), site="grad", name="weight")
    assert [(one.rule, one.step) for one in recorded.judge(Spike).findings] == [("spike", 150)]


def test_noise_neither_spikes_nor_jumps() -> None:
    recorded = gradients(lambda step, path: 1.0)
    assert said(recorded, Spike) == [] and said(recorded, Jump) == []


def test_gradients_that_leave_a_plateau_slowly_do_not_jump() -> None:
    slow = gradients(lambda step, path: 1.05 ** max(step - 100, 0) * (1.0 if step < 200 else 30.0), steps=201)
    assert [one.step for one in said(slow, Jump)] == [200]


@pytest.mark.parametrize(
    ("high", "severities"),
    [
        ({50: 3.2}, [Severity.NOTE]),
        ({50: 3.2, 51: 3.1}, [Severity.WARNING, Severity.NOTE]),
        ({50: 3.2, 52: 3.1}, [Severity.NOTE]),
        ({50: 9.0}, [Severity.WARNING]),
    ],
    ids=["one hard batch", "it stays up", "another within the first", "a large one"],
)
def test_a_small_spike_of_a_loss_is_a_note_unless_it_stays_up(high: dict[int, float], severities: Any) -> None:
    found = said(losses(lambda step: high.get(step, 2 + noise(step, shape=(), scale=0.05)), steps=60), Spike)
    assert [one.severity for one in found] == severities
    assert [one.what.endswith("and stays up") for one in found] == [len(severities) == 2, False][: len(found)]


@pytest.mark.parametrize(("leap", "is_spike"), [(0.6, False), (1.5, True)])
def test_a_loss_that_varies_by_factors_has_no_small_spike(leap: float, is_spike: bool) -> None:
    """As one of samples that are known by heart. The largest of the 128 records before is 0.33, the median 0.02."""
    found = said(losses(lambda step: leap if step in (250, 251) else 0.02 * np.exp(noise(step, shape=())), 300), Spike)
    assert bool(found) is is_spike


@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_step_with_one_of_two_losses_is_no_spike(is_last: bool, num_losses: int) -> None:
    """The last micro-batch of an epoch may be alone, and the program divides each loss by their number."""
    recorded = Recorded()
    for step in range(60 + (not is_last)):
        for loss in [3.0] * num_losses if step == 59 else [0.5, 3.0]:
            recorded.add(step, "", loss + noise(step, shape=(), scale=0.05), site="scalar", name="loss")
    assert bool(said(recorded, Spike)) is (num_losses == 2)


def test_a_loss_that_joins_begins_another_curve() -> None:
    recorded = Recorded()
    for step in range(200):
        late = 40.0 if step == 190 else 0.0
        for loss in [0.5, 3.0 + late] if step >= 100 else [0.5]:
            recorded.add(step, "", loss + noise(step, shape=(), scale=0.05), site="scalar", name="loss")
    found = [(one.step, one.what) for one in said(recorded, Spike)]
    assert found == [(190, "the loss (the mean of 2 in a step) spikes over the mean of the records before")]
    assert said(recorded, LossStuck) == []


@pytest.mark.parametrize("are_rivals", [True, False])
def test_the_losses_of_two_models_are_judged_alone_and_are_notes_where_both_train(are_rivals: bool) -> None:
    recorded = Recorded()
    for step in range(200):
        for root, loss in (("judges", 0.5 + 20.0 * (step == 190)), ("makes", 3.0)):
            if are_rivals or (root == "makes") == (step < 100):
                value = np.array(loss + noise(step, shape=(), scale=0.05))
                recorded.add(step, "", value, site="scalar", name="loss", root=root)
    (one,) = said(recorded, Spike)
    assert (one.root, one.step) == ("judges", 190) and one.value == pytest.approx(20.5, abs=0.2)
    assert one.severity == (Severity.NOTE if are_rivals else Severity.WARNING)
    assert ("other models have losses" in one.detail) == are_rivals


@pytest.mark.parametrize("rows_a_batch", BATCHES)
@pytest.mark.parametrize(
    ("change", "until", "words"),
    [
        ("longer", 200, "the inputs of a step have 48 elements, not 32"),
        ("classes", 200, "the labels are of other classes: the root mean square of their numbers is 7.1"),
        ("longer", 105, ""),
        ("classes", 105, ""),
        ("tokens", 200, ""),
        ("noise", 200, ""),
        ("none", 200, ""),
    ],
)
def test_a_leap_at_which_other_data_come_for_good_is_a_note(
    change: str, until: int, words: str, rows_a_batch: int
) -> None:
    """As in a curriculum or with a new task. A few such batches are none, nor are other tokens, nor louder inputs."""
    recorded = Recorded()
    for step in range(200):
        is_other = 100 <= step < until
        length = 12 if change == "longer" and is_other else 8
        classes = 5 * (change in ("classes", "tokens") and is_other) + np.arange(64) % 5
        batch = noise(step, shape=(4, length)) * (20.0 if change == "noise" and is_other else 1.0)
        tokens = {"x": classes, LABELS: classes} if change == "tokens" else {"x": batch, LABELS: classes}
        for name, values in tokens.items():
            dtype = "float32" if values is batch else "int64"
            recorded.add(step, "", values, site="input", name=name, dtype=dtype, is_probe=step % 10 > 0)
        loss = 3.0 if step >= 100 else 0.3
        recorded.add(step, "", loss + noise(step, shape=(), scale=0.01), site="scalar", name="loss")
    (one,) = recorded.judge(Spike, rows_a_batch).findings[:1]
    assert (one.step, one.severity) == (100, Severity.NOTE if words else Severity.WARNING)
    assert words in one.detail and bool(words) == ("from step 100 on" in one.detail)


@pytest.mark.parametrize("falls", [True, False])
def test_a_loss_that_stands_still_in_a_warm_up_and_then_falls_is_not_stuck(falls: bool) -> None:
    recorded = losses(lambda step: 2.0 - 0.01 * max(step - 30, 0) * falls + noise(step, shape=(), scale=1e-5), steps=80)
    assert [one.what for one in said(recorded, LossStuck)] == ["the loss stands still where it began"] * (not falls)


def test_a_run_too_short_for_a_rule_is_not_judged() -> None:
    recorded = gradients(lambda step, path: 1.0, steps=20)
    for rule, number in ((Spike, "32"), (Jump, "100")):
        (one,) = recorded.judge(rule).unjudged
        assert number in one.why and "20" in one.why


@pytest.mark.parametrize("rows_a_batch", [1_000, 7])
@pytest.mark.parametrize("growth", [2.0, 1.0])
@pytest.mark.parametrize(
    ("begins", "what"), [(0.6, "has leapt above the records before, and stays up"), (0.1, "risen")]
)
def test_a_loss_that_leaps_as_its_targets_do_is_a_note(
    growth: float, rows_a_batch: int, begins: float, what: str
) -> None:
    """As the loss of a DQN whose target network is renewed every 50 steps. A loss above its beginning may diverge."""
    recorded = Recorded()
    for step in range(80):
        targets = noise(step, shape=(32,), scale=growth if step >= 50 else 1.0)
        recorded.add(step, "", targets, site="input", name="loss.labels")
        loss = begins if step < 20 else 0.1 if step < 50 else 0.6
        recorded.add(step, "", loss + 1e-3 * noise(step, shape=()), site="scalar", name="loss")
    (one,) = recorded.judge(LossStuck, rows_a_batch).findings
    assert what in one.what
    assert one.severity == (Severity.NOTE if growth > 1 and begins > 0.1 else Severity.WARNING)
    assert ("the targets of the loss went from" in one.detail) is (growth > 1)


@pytest.mark.parametrize(
    ("targets", "dtype", "leap", "is_note"),
    [
        (lambda step: 1 + step / 20, "float32", 25.0, True),
        (lambda step: 1 + step / 20, "float32", 5e4, False),
        (lambda step: 1 + step / 20, "int64", 50.0, False),
        (lambda step: 1.0, "float32", 50.0, False),
        (lambda step: 1e3 if step == 180 else 1.0, "float32", 50.0, False),
    ],
    ids=["grow", "grow less", "classes in order", "stay", "one bad step"],
)
@pytest.mark.parametrize("num_micro_steps", [1, 64])
def test_a_leap_of_a_training_whose_targets_have_grown_is_a_note(
    targets: Any, dtype: str, leap: float, is_note: bool, num_micro_steps: int
) -> None:
    """As those of a DQN, which are sums of its own outputs: the scale of the first steps holds no longer."""
    recorded = gradients(lambda step, path: leap if step == 180 else 1.0, steps=200)
    for step in range(200):
        for part in range(num_micro_steps):
            values = np.abs(noise(step, part, shape=(32,), scale=targets(step)))
            recorded.add(step, "", values, site="input", name=LABELS, dtype=dtype, numbers={"micro_step": part})
    for rule in (Spike, Jump):
        (one,) = said(recorded, rule)
        assert one.step == 180
        assert (one.severity == Severity.NOTE) is is_note
        assert ("the targets of the loss went from" in one.detail) is is_note


def test_a_loss_that_is_nan_from_the_first_step_on_is_not_said_to_stand_still() -> None:
    verdict = losses(lambda step: np.nan).judge(LossStuck)
    assert verdict.findings == [] and "20 records of a loss" in verdict.unjudged[0].why


def losses(value: Any, steps: int = 40) -> Recorded:
    recorded = Recorded()
    for step in range(steps):
        recorded.add(step, "", value(step), site="scalar", name="train/loss")
        recorded.add(step, "", 1.0, site="scalar", name="lr")
    return recorded


@pytest.mark.parametrize("rule", [LossStuck, Spike, Jump, Overfitting], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    "curve",
    [
        lambda step: 3 * 0.98**step + 0.1,
        lambda step: 2.0 + (step >= 70) * 20,
        lambda step: 2.0,
        lambda step: 2.0 if step < 50 else 1.0,
        lambda step: 1.0 + 0.1 * max(step - 40, 0),
        lambda step: -(1.2**step),
        lambda step: np.inf if step % 30 == 9 else 1.0,
        lambda step: math.exp(noise(step, 1, shape=(), scale=2.0)),
        lambda step: 2.0 if step in (90, 150, 151) else 1.0,
    ],
    ids=[
        "falls",
        "leaps",
        "stands",
        "falls late",
        "rises",
        "falls below zero",
        "is infinite",
        "varies by factors",
        "spikes",
    ],
)
def test_samples_of_many_steps_at_once_are_judged_as_step_by_step(
    rule: type[CurveRule], curve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Recorded:
        values = [float(curve(step) * (1 + 1e-4 * noise(step, shape=()))) for step in range(300)]
        recorded = losses(values.__getitem__, 300)
        for step, value in enumerate(values):
            recorded.add(step, "head", [value], site="grad", name="weight")
            if step % 25 == 0:
                recorded.add(step, "", 2 + step / 100, site="scalar", name="validation/loss")
        return recorded

    at_once = [made().judge(rule, rows).findings for rows in BATCHES]
    monkeypatch.setattr(rule, "has_passed", lambda *_: False)
    assert at_once == [made().judge(rule).findings] * len(BATCHES)


def test_a_loss_that_is_always_zero_does_not_stand_still() -> None:
    """As that of advantages over the mean of their group, whose gradients are not zero."""
    assert said(with_updates(losses(lambda step: 0.0, 200), 1e-3, 200), LossStuck) == []


def with_updates(recorded: Recorded, size: float, steps: int) -> Recorded:
    """Add a weight of norm 1, and updates of this norm."""
    for step in range(steps):
        recorded.add(step, "head", np.full((4, 4), 0.25), site="param", **OPTIMIZER)
        recorded.add(step, "head", np.full((4, 4), size / 4), site=UPDATE, **OPTIMIZER)
    return recorded


def clips(norm: Any, size: float = 1e-8, steps: int = 60, ranks: int = 1, limit: float = 1.0) -> Recorded:
    recorded = Recorded()
    for step in range(steps):
        for rank in range(ranks):
            recorded.add(step, "", norm(step), rank=rank, site="scalar", name="clip.norm")
            recorded.add(step, "", limit, rank=rank, site="scalar", name="clip.max_norm")
    return with_updates(recorded, size, steps)


@pytest.mark.parametrize(
    ("norm", "since"),
    [
        (lambda step: 1e4, 0),
        (lambda step: 1e4 if step > 11 else 2.0, 12),
        (lambda step: 1.0 if step % 15 == 3 else 1e4, 4),
        (lambda step: 0.0 if step % 2 else 1e4, 0),
        (lambda step: 1e4 if step < 50 else 2.0, None),
        (lambda step: 1e4 if step > 45 else 2.0, None),
        (lambda step: 30.0, None),
        (lambda step: 1.0 if step % 5 == 0 else 1e4, None),
    ],
    ids=["always", "later", "nearly always", "not finite between", "no longer", "too late", "usual", "often"],
)
def test_clipping_that_always_cuts_to_nothing_is_named(norm: Any, since: int | None) -> None:
    found = said(clips(norm, ranks=2), Clipping)
    assert [(one.since, one.severity, one.name) for one in found] == (
        [] if since is None else [(since, Severity.WARNING, "clip.norm")]
    )
    assert all(one.value == pytest.approx(1e4) for one in found)


@pytest.mark.parametrize(
    ("norm", "is_said"),
    [(lambda step: 0.0, True), (lambda step: 0.0 if step else 1.0, False), (lambda step: float(step == 59), False)],
)
def test_clipping_that_finds_no_gradient_is_named(norm: Any, is_said: bool) -> None:
    found = said(clips(norm), Clipping)
    assert [(one.since, one.severity) for one in found] == [(0, Severity.WARNING)] * is_said
    assert all("finds a norm of 0" in one.what for one in found)
    assert said(clips(norm, steps=19), Clipping) == [] == said(clips(norm, size=0.0), Clipping)


def test_clipping_is_a_note_where_the_weights_move_all_the_same() -> None:
    (one,) = said(clips(lambda step: 1e4, size=1e-3), Clipping)
    assert one.severity == Severity.NOTE and "the weights move all the same" in one.said


def test_clipping_without_a_call_or_without_a_limit_finds_nothing() -> None:
    assert "clip_grad_norm_" in with_updates(Recorded(), 1e-8, 60).judge(Clipping).unjudged[0].why
    recorded = with_updates(Recorded(), 1e-8, 60)
    for step in range(60):
        recorded.add(step, "", 1e4, site="scalar", name="clip.norm")
    assert recorded.judge(Clipping) == ([], [], {})


@pytest.mark.parametrize(
    ("loss", "size", "expected"),
    [
        (lambda step, e: 1.4 + 0.2 * e, 1e-8, Severity.WARNING),
        (lambda step, e: 1.4 + 0.2 * e, 1e-3, Severity.NOTE),
        (lambda step, e: 1.4 + 0.05 * e, 1e-3, Severity.NOTE),
        (lambda step, e: 1.4 - 0.3 * step / 200 + 0.2 * e, 1e-3, None),
        (lambda step, e: 0.5 + 0.9 * 0.8**step + 0.05 * e, 1e-3, None),
        (lambda step, e: 1.4 + 0.3 * np.sin(step / 12) + 0.1 * e, 1e-3, None),
        (lambda step, e: 1.4 * (step % 10 == 0) + 0.1 * e, 1e-3, None),
        (lambda step, e: 0.01 + e, 1e-3, None),
        (lambda step, e: 0.5 + step / 200 + 0.1 * e, 1e-3, None),
    ],
    ids=["no weight moves", "noise", "less noise", "slow", "early", "swings", "sparse", "around zero", "curriculum"],
)
def test_a_loss_that_never_falls_beyond_its_noise_is_named(loss: Any, size: float, expected: Severity | None) -> None:
    recorded = losses(lambda step: float(loss(step, noise(3, step, shape=()))), steps=200)
    found = said(with_updates(recorded, size, 200), LossStuck)
    assert [(one.name, one.severity) for one in found] == ([("train/loss", expected)] if expected is not None else [])
    assert all("has not fallen beyond its noise" in one.what for one in found)


@pytest.mark.parametrize(("num_classes", "is_said"), [(4, True), (5, False), (1, False)])
def test_a_loss_that_is_the_logarithm_of_the_number_of_classes_is_said_to_be_so(
    num_classes: int, is_said: bool
) -> None:
    recorded = losses(lambda step: math.log(4) + float(noise(3, step, shape=(), scale=0.02)), steps=200)
    recorded.add(0, "", noise(0, shape=(8, num_classes)))
    recorded.add(0, "", [0, 1, 2, 3], site="input", name=LABELS, dtype="int64")
    (one,) = said(with_updates(recorded, 1e-3, 200), LossStuck)
    assert ("each of 4 classes the same probability" in one.detail) == is_said


@pytest.mark.parametrize(
    ("fall", "num_steps", "what"),
    [(0.015, 200, "has hardly left that of a model"), (0.5, 40, "stays at that of a model"), (0.1, 200, "")],
)
def test_a_loss_that_falls_and_stays_the_logarithm_of_the_number_of_classes_is_a_note(
    fall: float, num_steps: int, what: str
) -> None:
    def of_step(step: int) -> float:
        return math.log(4) + fall * max(1 - step / num_steps, 0) + float(noise(3, step, shape=(), scale=0.002))

    recorded = losses(of_step, steps=200)
    recorded.add(0, "", noise(0, shape=(8, 4)))
    recorded.add(0, "", [0, 1, 2, 3], site="input", name=LABELS, dtype="int64")
    found = said(with_updates(recorded, 1e-3, 200), LossStuck)
    assert [one.severity for one in found] == [Severity.NOTE] * bool(what) and all(what in one.what for one in found)


@pytest.mark.parametrize(
    ("ends_at", "function", "is_said"),
    [
        (1.41, "NllLoss of 4 classes", True),
        (1.41, "Add of NllLoss of 4 classes", False),
        (1.41, "NllLoss of 4 classes summed", False),
        (1.3, "NllLoss of 4 classes", False),
        (4.0, "NllLoss of 4 classes", False),
    ],
    ids=["never below", "of several terms", "a sum over samples", "below", "far above"],
)
def test_a_cross_entropy_that_never_gets_below_that_of_a_guess_is_a_note(
    ends_at: float, function: str, is_said: bool
) -> None:
    recorded = losses(lambda step: ends_at + 6 * 0.95**step + float(noise(3, step, shape=(), scale=0.005)), steps=200)
    recorded.add(0, "", noise(0, shape=(8, 4)))
    recorded.add(0, "", np.arange(8) % 4, site="input", name=LABELS, dtype="int64")
    recorded.catalog.modules["model", ""] = module_of("Net", ("output",), labels_of=function)
    found = said(with_updates(recorded, 1e-3, 200), LossStuck)
    words = "the loss never gets below that of a model that gives each of 4 classes the same probability"
    assert [(one.severity, one.what) for one in found] == [(Severity.NOTE, words)] * is_said


@pytest.mark.parametrize(
    ("labels", "is_said"),
    [(np.arange(64), True), (np.arange(64).repeat(2), False), (np.arange(64) + 64, False), (np.arange(64.0), False)],
    ids=["pairs", "twice", "second rank", "numbers"],
)
def test_a_contrastive_loss_that_stays_the_logarithm_of_the_number_of_samples_is_a_note(
    labels: Any, is_said: bool
) -> None:
    recorded = losses(lambda step: math.log(64) + 0.8**step + float(noise(3, step, shape=(), scale=0.005)), steps=200)
    for step in range(0, 200, 10):
        recorded.add(step, "", labels, site="input", name=LABELS, dtype=str(labels.dtype))
    found = said(with_updates(recorded, 1e-3, 200), LossStuck)
    words = "stays at that of a model that gives each of 64 samples of the batch the same probability"
    assert [(one.severity, words in one.what) for one in found] == [(Severity.NOTE, True)] * is_said


@pytest.mark.parametrize(
    ("labels", "stays_at", "words"),
    [
        (lambda e: 3 + 2 * e, 4.1, "each sample the mean of the labels"),
        (lambda e: 3 + 2 * e, 3.0, ""),
        (lambda e: (e > 0.67).astype(float), 0.5623, "each sample the same probability"),
        (lambda e: (e > 0.67).astype(float), 0.1875, ""),
        (lambda e: (3 + 2 * e).reshape(32, 2), 4.1, "the mean of the labels everywhere"),
        (lambda e: np.where(e > 0, 0.95, 0.05), 0.2025, ""),
        (lambda e: (e > 1.5).astype(float), 0.213, ""),
        (lambda e: 3 + 2 * e[:0], 4.1, ""),
    ],
    ids=[
        "numbers",
        "learnt",
        "of two classes",
        "learnt classes",
        "two numbers a sample",
        "smoothed",
        "rare",
        "empty",
    ],
)
def test_a_loss_that_stays_that_of_one_answer_for_all_samples_is_a_note(
    labels: Any, stays_at: float, words: str
) -> None:
    recorded = losses(
        lambda step: stays_at * (1 + 5 * 0.8**step) + float(noise(3, step, shape=(), scale=0.01)), steps=200
    )
    for step in range(0, 200, 10):
        recorded.add(step, "", labels(noise(4, step, shape=(64,))), site="input", name=LABELS)
    found = said(with_updates(recorded, 1e-3, 200), LossStuck)
    assert [(one.severity, f"stays at that of a model that gives {words}" in one.what) for one in found] == [
        (Severity.NOTE, True)
    ] * bool(words)


def test_a_loss_is_not_judged_within_its_noise_where_that_says_nothing() -> None:
    def stays(step: int) -> float:
        return 1.4 + float(noise(3, step, shape=(), scale=0.1))

    few, unknown = with_updates(losses(stays, steps=90), 1e-3, 90), losses(stays, steps=200)
    validated, resumed, falling = Recorded(), Recorded(), with_updates(losses(stays, steps=200), 1e-3, 200)
    for step in range(200):
        validated.add(step, "", stays(step), site="scalar", name="val/loss")
        resumed.add(step + 900, "", stays(step), site="scalar", name="loss")
        falling.add(step, "", 1.4 * 0.99**step, site="scalar", name="aux/loss")
    for recorded in (few, unknown, with_updates(validated, 1e-3, 200), with_updates(resumed, 1e-3, 1_200), falling):
        assert said(recorded, LossStuck) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda step: 2.3026, "stands still"),
        (lambda step: 2.3 * 1.1**step, "risen"),
        (lambda step: 2.3 * 0.9**step, None),
        (lambda step: 2.3 + float(noise(step, shape=(), scale=0.2)), None),
        (lambda step: 3 * 0.8**step if step < 20 else 0.03 * 21, "leapt"),
        (lambda step: max(4 - 0.2 * step, 1.4) if step < 27 else 3.4 + 0.1 * (step % 2), "leapt"),
        (lambda step: max(4 - 0.2 * step, 1.4) if step < 27 else 2.4, None),
        (lambda step: max(4 - 0.2 * step, 1.4) + (step % 2) if step < 27 else 3.4, None),
        (lambda step: 3 * 0.5**step if step < 20 else 1e-4, None),
        (lambda step: 3 * 0.8**step if step < 20 else 0.03 * 21 * 0.7 ** (step - 20), None),
    ],
    ids=[
        "still",
        "rising",
        "falling",
        "noise",
        "a leap of 21 times",
        "a leap beyond the last range",
        "a small leap",
        "a leap within the last range",
        "a leap of almost nothing",
        "a spike that falls",
    ],
)
def test_a_loss_that_stands_still_or_rises_is_named(value: Any, words: str | None) -> None:
    found = said(losses(value), LossStuck)
    assert [one.name for one in found] == (["train/loss"] if words else [])
    assert words is None or words in found[0].what


@pytest.mark.parametrize("rows_a_batch", BATCHES)
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_loss_that_leaps_and_comes_back_is_a_note(comes_back: bool, rows_a_batch: int) -> None:
    """As where a task becomes harder."""
    recorded = losses(
        lambda step: 3 * 0.8**step if step < 20 else 0.7 * (0.8 if comes_back else 1) ** max(0, step - 30)
    )
    (one,) = recorded.judge(LossStuck, rows_a_batch).findings
    assert one.severity is (Severity.NOTE if comes_back else Severity.WARNING)
    assert one.what == "the loss has leapt above the records before" + (
        ", and comes back later" if comes_back else ", and stays up"
    )


@pytest.mark.parametrize(("at", "severity"), [(0, Severity.WARNING), (3, Severity.NOTE), (7, Severity.WARNING)])
def test_a_gradient_that_passes_a_weight_by_is_a_note(at: int, severity: Severity) -> None:
    recorded = Recorded()
    for step in range(5):
        for path in LAYERS:
            recorded.add(step, path, noise(step))
        for path in LAYERS[::-1]:
            recorded.add(step, path, noise(step, scale=1e-9 if path == LAYERS[at] else 1.0), site="grad", **OPTIMIZER)
    (one,) = said(recorded, Vanishing)
    assert (one.module_path, one.severity) == (LAYERS[at], severity)


def test_a_gradient_that_vanishes_is_named() -> None:
    recorded = gradients(lambda step, path: 1e-9 if path == "blocks.0" else 1.0, steps=5)
    assert subjects(said(recorded, Vanishing)) == [("blocks.0", 2, (0,))]
    assert said(gradients(lambda step, path: 1e-9, steps=5), Vanishing) == [], "a training that is done has none left"


@pytest.mark.parametrize("recovers", [False, True])
def test_a_gradient_that_vanishes_only_at_the_start_is_a_note(recovers: bool) -> None:
    """As behind a LayerScale of 1e-6, and in attention whose scores begin equal."""
    recorded = gradients(lambda step, path: 1e-9 if path == "blocks.0" and (step < 5 or not recovers) else 1.0, steps=8)
    recorded.add(8, "blocks.0", np.full((4, 8), np.nan), **OPTIMIZER, site="grad")  # does not show that it is back
    (one,) = said(recorded, Vanishing)
    assert one.severity is (Severity.NOTE if recovers else Severity.WARNING)
    assert one.what.endswith(", but not later") is recovers


@pytest.mark.parametrize("is_of_differences", [False, True])
def test_a_bias_of_which_only_differences_enter_the_loss_has_no_gradient_and_that_is_a_note(
    is_of_differences: bool,
) -> None:
    """As of the last layer of a reward model, which is called twice and whose scores are subtracted."""
    recorded = Recorded()
    for step in range(6):
        for call in range(2):
            gradient = noise(step, shape=(16, 1)) * (-1 if call and is_of_differences else 1)
            recorded.add(step, "score", gradient, site="grad_output", phase="backward")
        recorded.add(step, "score", noise(step, 1), **OPTIMIZER, site="grad")
        recorded.add(step, "score", np.zeros(4), **OPTIMIZER | {"name": "bias"}, site="grad")
    (one,) = said(recorded, NoGradient)
    assert one.name == "bias"
    assert one.severity is (Severity.NOTE if is_of_differences else Severity.WARNING)
    assert ("only differences of these outputs enter the loss" in one.what) is is_of_differences


@pytest.mark.parametrize("is_of_differences", [False, True])
@pytest.mark.parametrize(("is_in_two", "penalty"), [(False, 1), (True, 1), (False, 2)])
def test_what_others_send_back_through_a_critic_is_no_gradient_of_its_bias(
    is_of_differences: bool, is_in_two: bool, penalty: int
) -> None:
    """The loss of a WGAN: in two backwards or in one, after those of a penalty and of the generator, at each fifth
    step, and at the end of the training once more. The penalty may be a part of the loss."""

    def scores(recorded: Recorded, step: int, micro_step: int, values: Any) -> None:
        numbers = {"micro_step": micro_step}
        recorded.add(step, "score", values, site="grad_output", phase="backward", numbers=numbers)

    recorded = Recorded()
    for step in range(20):
        if step % 5 == 4 or step == 19:
            scores(recorded, step, 0, np.full(16, 1 / 16))
        if step == 19:
            break
        scores(recorded, step, penalty, np.ones(16))
        for call in range(2):
            gradient = noise(step, shape=(16, 1)) * (-1 if call and is_of_differences else 1)
            scores(recorded, step, 2 + call * is_in_two, gradient)
        recorded.add(step, "score", noise(step, 1), **OPTIMIZER, site="grad")
        recorded.add(step, "score", np.zeros(1), **OPTIMIZER | {"name": "bias"}, site="grad")
    (one,) = said(recorded, NoGradient)
    assert one.severity is (Severity.NOTE if is_of_differences else Severity.WARNING)
    assert ("only differences of these outputs enter the loss" in one.what) is is_of_differences
    assert one.advice.startswith("nothing is wrong") is is_of_differences


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_that_are_zeroed_behind_the_backward_are_said_to_be(flows: bool, has_bias: bool) -> None:
    """Where only weights have gradients of zeros, their inputs may be zeros."""
    recorded = Recorded()
    for step in range(6):
        for path in ("up", "down"):
            gradient = noise(step, scale=1.0 if flows else 0.0)
            recorded.add(step, path, gradient, site="grad_output", phase="backward")
            for name in ("weight", "bias")[: 1 + has_bias]:
                recorded.add(step, path, np.zeros(4), **OPTIMIZER | {"name": name}, site="grad")
        recorded.add(step, "up", noise(step), **OPTIMIZER, site="grad", scope="local")
    found = said(recorded, NoGradient)
    assert len(found) == 2 + 2 * has_bias
    for one in found:
        assert one.severity is Severity.WARNING
        assert ("between the backward and the update" in one.what) is (flows and has_bias)
        assert ("zero_grad" in one.advice) is (flows and has_bias)
    recorded.add(6, "other", noise(6), **OPTIMIZER, site="grad")
    assert not any("between the backward" in one.what for one in said(recorded, NoGradient))


@pytest.mark.parametrize("between", [0.0, 1.0])
def test_a_gradient_that_flows_between_two_records_is_not_zero_since_the_first(between: float) -> None:
    """As with a loss that has a margin."""
    recorded = Recorded({"norm": "BatchNorm2d"})
    for step in range(40):
        is_zero, is_probe = step % 10 == 0 and step > 0, step % 10 > 0
        values = noise(step, scale=0.0 if is_zero else between if step > 9 else 1.0)
        recorded.add(step, "up", values, **OPTIMIZER, site="grad", is_probe=is_probe)
        channels = noise(step, 1, shape=(8,)) * (np.arange(8) >= 7)
        recorded.add(step, "norm", channels, **OPTIMIZER | {"name": "bias"}, site="grad", is_probe=is_probe)
    found = {one.module_path: (one.since, one.severity) for one in said(recorded, NoGradient)}
    expected = {"norm": (0, Severity.WARNING)} | ({} if between else {"up": (10, Severity.WARNING)})
    assert found == expected, "a norm does not tell how many channels are dead"


@pytest.mark.parametrize(("is_rare", "words"), [(True, " in most records"), (False, ", but not later")])
def test_a_gradient_that_is_there_now_and_then_is_said_to_be_zero_in_most_records(is_rare: bool, words: str) -> None:
    recorded = Recorded()
    for step in range(40):
        values = noise(step, scale=float(step > 5 and (step % 8 == 0 or not is_rare)))
        recorded.add(step, "up", values, **OPTIMIZER, site="grad", is_probe=step % 10 > 0 and step > 5)
    (one,) = said(recorded, NoGradient)
    assert (one.what, one.severity) == (f"the gradient is zero in all elements{words}", Severity.NOTE)


def test_a_sparse_gradient_is_a_gradient_and_its_indices_are_none() -> None:
    recorded = Recorded()
    for step in range(6):
        for path in ("items", "users"):
            recorded.add(step, path, noise(1), **OPTIMIZER, site="param")
            recorded.add(step, path, noise(step), **OPTIMIZER | {"name": "weight.values"}, site="grad")
            recorded.add(step, path, np.zeros((1, 4)), **OPTIMIZER | {"name": "weight.indices"}, site="grad")
    assert said(recorded, NoGradient) == []


def test_a_learning_rate_below_zero_is_named() -> None:
    """As of a linear schedule that goes on falling past its end."""
    recorded = Recorded()
    for step in range(10):
        recorded.add(step, "", 1e-3 * (1 - step / 5), site="scalar", name="lr.AdamW.0")
    (one,) = said(recorded, Update)
    assert (one.step, one.name) == (6, "lr.AdamW.0")
    assert one.said.startswith("the learning rate is below zero: each update follows the gradient uphill")


@pytest.mark.parametrize(
    ("rate", "num_rises"),
    [
        (lambda step: 1 + np.cos(np.pi * step / 10), 5),
        (lambda step: 1 + np.cos(np.pi * step / 2), 24),
        (lambda step: 1 + np.cos(np.pi * step / 80), 1),
        (lambda step: min(step / 10, 1) * (1 + np.cos(np.pi * step / 100)), 0),
        (lambda step: 1 + np.cos(np.pi * (step % 25) / 25), 0),
        (lambda step: 0.5 ** (step // 25) * (1 + np.cos(np.pi * (step % 25) / 25)), 0),
        (lambda step: 1.1 + np.cos(np.pi * step / 10), 0),
        (lambda step: float(step > 50), 0),
        (lambda step: 0.0, 0),
    ],
    ids=[
        "a wave",
        "a short wave",
        "past the end",
        "one fall",
        "restarts",
        "lower restarts",
        "cyclical",
        "late",
        "zero",
    ],
)
def test_a_learning_rate_that_rises_again_from_almost_nothing_is_a_note(rate: Any, num_rises: int) -> None:
    recorded = Recorded()
    for step in range(100):
        for rank in range(2):
            recorded.add(step, "", 1e-3 * float(rate(step)), site="scalar", name="lr.AdamW.0", rank=rank)
    found = said(recorded, Update)
    assert [one.severity for one in found] == [Severity.NOTE] * bool(num_rises)
    assert all(f"{num_rises} times" in one.what or num_rises == 1 for one in found)


@pytest.mark.parametrize(
    ("rate", "is_said"),
    [
        (lambda step: step // 20 / 100, True),
        (lambda step: (step + 7) // 20 / 100, False),
        (lambda step: step / 1000, False),
        (lambda step: min(step // 20, 3) / 3, False),
        (lambda step: step // 40 / 100, False),
        (lambda step: 0.5 ** (step // 20), False),
        (lambda step: (1, 3, 2, 4, 5)[step // 20], False),
        (lambda step: (step // 20 % 3 + 1) / 3, False),
    ],
    ids=["by epoch", "uneven", "by step", "at its top", "two rises", "falls", "falls once", "cyclical"],
)
def test_a_learning_rate_that_still_rises_from_epoch_to_epoch_is_a_note(rate: Any, is_said: bool) -> None:
    recorded = Recorded()
    for step in range(100):
        recorded.add(step, "", float(rate(step)), site="scalar", name="lr.AdamW.0")
    found = said(recorded, Update)
    assert [(one.severity, one.step) for one in found] == [(Severity.NOTE, 80)] * is_said
    expected = "the learning rate still rises at the end, from 0 to 0.04, once in 20 steps"
    assert [one.what for one in found] == [expected] * is_said


@pytest.mark.parametrize(
    ("rate", "since"),
    [
        (lambda step: 0.9**step, 110),
        (lambda step: max(1 - step / 100, 0.0), 100),
        (lambda step: 0.1 ** (step // 20), -120),
        (lambda step: 1 - step / 200, None),
        (lambda step: max(1 - step / 190, 0.0), None),
        (lambda step: 1.0 * (step < 100), None),
        (lambda step: 0.9 ** (step % 150), None),
        (lambda step: step / 200 if step > 50 else 0.0, None),
        (lambda step: 0.0, None),
    ],
    ids=["by batch", "linear, too short", "stairs", "linear", "its end", "frozen", "restart", "warm-up", "zero"],
)
def test_a_learning_rate_that_has_fallen_to_nothing_for_long_is_found(rate: Any, since: int | None) -> None:
    """A negative step is that of a note."""
    recorded = Recorded()
    for step in range(200):
        recorded.add(step, "", 1e-3 * float(rate(step)), site="scalar", name="lr.AdamW.0")
    found = [one for one in said(recorded, Update) if "the learning rate has fallen to " in one.what]
    assert [one.step if one.severity > Severity.NOTE else -one.step for one in found] == [since] * (since is not None)


def test_gradients_that_grow_backwards_explode() -> None:
    for factor, expected in ((10.0, ["blocks.0"]), (2.0, [])):
        recorded = Recorded()
        for step in range(4):
            for number, path in reversed(list(enumerate(LAYERS))):
                recorded.add(
                    step, path, noise(step, number, scale=factor**-number), site="grad_output", phase="backward"
                )
        assert [one.module_path for one in said(recorded, Exploding)] == expected


def test_a_gradient_of_zeros_is_named_and_one_that_is_never_there() -> None:
    recorded = Recorded()
    for step in range(4):
        for number, path in enumerate(LAYERS):
            recorded.add(step, path, noise(number), **OPTIMIZER, site="param")
            if path != "blocks.6":
                scale = 0.0 if path == "blocks.2" else 1.0
                recorded.add(step, path, noise(step, number, scale=scale), **OPTIMIZER, site="grad")
    found = said(recorded, NoGradient)
    assert {one.module_path: one.what.partition(",")[0] for one in found} == {
        "blocks.2": "the gradient is zero in all elements",
        "blocks.6": "never had a gradient",
    }
    assert all(one.severity is Severity.WARNING for one in found)


@pytest.mark.parametrize(
    ("frozen", "expected", "num_behind"),
    [([2], ["blocks.2"], 1), ([0], [], 0), ([0, 1], [], 0), ([2, 5], [], 2), ([0, 1, 4], [], 1), ([7], [], 1)],
)
@pytest.mark.parametrize("has_rows", [True, False])
def test_a_layer_that_alone_is_frozen_between_layers_alike_is_named(
    frozen: list[int], expected: list[str], num_behind: int, has_rows: bool
) -> None:
    """A frozen parameter has rows where an optimizer has it. Behind a layer that is trained, it is noted without."""
    recorded = Recorded(dict.fromkeys(LAYERS, "Linear"))
    for number, path in enumerate(LAYERS):
        is_frozen = number in frozen
        module = recorded.catalog.modules["model", path]
        recorded.catalog.modules["model", path] = replace(module, frozen=("weight",) if is_frozen else ())
        for step in range(4):
            if has_rows or not is_frozen:
                recorded.add(step, path, noise(number), **OPTIMIZER, site="param")
            if not is_frozen:
                recorded.add(step, path, noise(step, number), **OPTIMIZER, site="grad")
    found = said(recorded, NoGradient)
    assert [one.module_path for one in found if one.severity > Severity.NOTE] == expected
    assert len(found) == (len(frozen) if has_rows else num_behind)
    assert sum("alike, is True" in one.what for one in found) == num_behind


@pytest.mark.parametrize(
    ("frozen", "expected"), [(["head"], ["head"]), (["head", "blocks.0"], []), (["blocks.7"], ["blocks.7"])]
)
def test_a_last_layer_that_is_frozen_is_a_note(frozen: list[str], expected: list[str]) -> None:
    recorded = Recorded(dict.fromkeys([*LAYERS, "head"], "Linear"))
    for number, path in enumerate([*LAYERS, "head"]):
        module = recorded.catalog.modules["model", path]
        recorded.catalog.modules["model", path] = replace(module, frozen=("weight",) if path in frozen else ())
        for step in range(4 if path not in frozen else 0):
            recorded.add(step, path, noise(number), **OPTIMIZER, site="param")
            recorded.add(step, path, noise(step, number), **OPTIMIZER, site="grad")
    found = said(recorded, NoGradient)
    assert [(one.module_path, one.severity) for one in found] == [(path, Severity.NOTE) for path in expected]


@pytest.mark.parametrize(
    ("num_dead", "kind", "last", "severities"),
    [
        (6, "BatchNorm2d", 6, [Severity.WARNING]),
        (5, "BatchNorm2d", 5, []),
        (6, "Linear", 6, []),
        (6, "BatchNorm2d", 5, [Severity.NOTE]),
    ],
    ids=["most channels", "fewer channels", "no norm", "one opens again"],
)
def test_channels_of_a_batch_norm_without_a_gradient_are_dead(
    num_dead: int, kind: str, last: int, severities: list[Severity]
) -> None:
    recorded = Recorded({"layer": kind})
    for step in range(6):
        values = noise(step, shape=(8,)) * (np.arange(8) >= (num_dead if step < 5 else last))
        recorded.add(step, "layer", values, site="grad", name="bias", phase="optimizer")
    assert [one.severity for one in said(recorded, NoGradient)] == severities


def test_a_gradient_of_zeros_that_becomes_nan_is_still_named() -> None:
    recorded = Recorded()
    for step in range(6):
        recorded.add(step, "up", np.zeros(8) if step < 4 else np.full(8, np.nan), **OPTIMIZER, site="grad")
    assert [one.severity for one in said(recorded, NoGradient)] == [Severity.WARNING]


def test_chunks_of_one_gradient_are_judged_together() -> None:
    half = noise(0).size
    cases: list[tuple[float, int, list[str]]] = [
        (1.0, 2 * half, []),
        (0.0, 2 * half, ["zeros", "tiny"]),
        (0.0, 3 * half, []),  # one chunk is missing
    ]
    for scale, whole, expected in cases:
        recorded = Recorded()
        for step in range(5):
            for rank in (0, 1):
                chunk = {**OPTIMIZER, "rank": rank, "whole": whole}
                recorded.add(step, "zeros", noise(step, rank, scale=scale * rank), **chunk, site="grad")
                recorded.add(step, "tiny", noise(step, rank, scale=scale if rank else 1e-9), **chunk, site="grad")
                recorded.add(step, "like", noise(step, rank), **chunk, site="grad")
                recorded.add(step, "like", noise(0, scale=1 + rank * step * scale), **chunk, site="param")
        found = [one.module_path for rule in (NoGradient, Vanishing) for one in said(recorded, rule)]
        assert found == expected
        assert [one.ranks for one in said(recorded, Unchanged)] == ([(0, 1)] if expected else [])


def test_an_unused_layer_unlike_all_others_is_a_note() -> None:
    recorded = Recorded()
    for step in range(4):
        recorded.add(step, "used", noise(step), **OPTIMIZER, site="grad")
        recorded.add(step, "pooler", noise(0), **OPTIMIZER, site="param")
    assert [(one.module_path, one.severity) for one in said(recorded, NoGradient)] == [("pooler", Severity.NOTE)]


@pytest.mark.parametrize("rows_a_batch", [7, 1_000])
def test_an_expert_that_is_idle_for_a_while_or_for_ever_is_a_note(rows_a_batch: int) -> None:
    recorded = Recorded({f"blocks.{number}": "Linear" for number in range(4)})
    for step in range(60):
        for number in range(4):
            path, is_busy = f"blocks.{number}", number == 0 or (number != 3 and step % 20 > 12) or number == 2
            moved = sum(number in (0, 2) or at % 20 > 12 for at in range(step)) if number != 3 else 0
            recorded.add(step, path, noise(number) * (1 + 0.01 * moved), **OPTIMIZER, site="param")
            if is_busy:
                recorded.add(step, path, noise(step))
            if number != 3:
                gone = number == 2 and step >= 40
                recorded.add(
                    step, path, noise(step, scale=0.0 if gone or not is_busy else 1.0), **OPTIMIZER, site="grad"
                )
    found = recorded.judge(NoGradient, rows_a_batch).findings
    assert {(one.module_path, one.severity, one.since) for one in found} == {
        ("blocks.1", Severity.NOTE, 40), ("blocks.2", Severity.WARNING, 40), ("blocks.3", Severity.NOTE, 0),
    }  # fmt: skip
    assert "its module is never called" in next(one.what for one in found if one.module_path == "blocks.3")
    assert recorded.judge(Unchanged, rows_a_batch).findings == [], "it has no gradient while it stays as it is"


def parameters(value: Any, gradient: float = 1.0, dtype: str = "float32", steps: int = 6) -> Recorded:
    recorded = Recorded()
    for step in range(steps):
        for number, path in enumerate(LAYERS):
            recorded.add(step, path, value(step, number), **OPTIMIZER, site="param", dtype=dtype)
            recorded.add(step, path, noise(step, number, scale=gradient), **OPTIMIZER, site="grad")
    return recorded


def moving(step: int, number: int) -> Any:
    return noise(number) + noise(step, number, scale=1e-3)


def test_a_parameter_with_a_gradient_that_does_not_change_is_named() -> None:
    recorded = parameters(lambda step, number: moving(0 if number == 3 else step, number))
    assert subjects(said(recorded, Unchanged)) == [("blocks.3", 3, (0,))]
    without = parameters(lambda step, number: moving(0, number), gradient=0.0)
    assert said(without, Unchanged) == [], "no_gradient says that"
    narrow = parameters(lambda step, number: moving(0 if number == 3 else step, number), dtype="bfloat16")
    assert [one.severity for one in said(narrow, Unchanged)] == [Severity.NOTE]


@pytest.mark.parametrize(
    ("gradients", "outputs", "weight", "said_of_it"),
    [
        ((0.0, 1.0), {"up": 1.0, "": 1.0}, 1.0, "that of the bias is not: the input of the module is zero"),
        ((0.0, 0.0), {"up": 1.0, "": 1.0}, 0.0, "a product of factors that are all zero has no gradient"),
        ((0.0, 0.0), {"up": 0.0, "down": 1.0, "": 1.0}, 1.0, "between the outputs of 'up' and 'down'"),
        ((0.0, 0.0), {"up": 0.0, "down": 0.0, "": 1.0}, 1.0, "between the outputs of 'down' and (the model)"),
        ((0.0, 0.0), {"up": 0.0, "down": 1.0, "side": 0.0, "": 1.0}, 1.0, "zero in all elements"),
        ((0.0, 0.0), {"up": 1.0, "": 1.0}, 1.0, "zero in all elements"),
    ],
    ids=["no input", "zero factors", "cut", "cut at the end", "branches", "unknown"],
)
def test_where_a_gradient_becomes_zero_is_said(
    gradients: tuple[float, float], outputs: dict[str, float], weight: float, said_of_it: str
) -> None:
    recorded = Recorded(dict.fromkeys(["up", "down", "side", "head"], "Linear"))
    for step in range(6):
        for path, size in outputs.items():
            recorded.add(step, path, noise(step))
            recorded.add(step, path, noise(step, scale=size), site="grad_output", phase="backward")
        for name, size in zip(("weight", "bias"), gradients, strict=True):
            recorded.add(step, "up", np.full(4, weight), name=name, phase="optimizer", site="param")
            recorded.add(step, "up", noise(step, scale=size), name=name, phase="optimizer", site="grad")
        recorded.add(step, "head", noise(step), **OPTIMIZER, site="grad")
    found = said(recorded, NoGradient)
    assert found and all(one.severity == Severity.WARNING and one.what.endswith(said_of_it) for one in found)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_module_whose_output_enters_no_loss_is_said_to_be_unused(is_used: bool) -> None:
    recorded = Recorded()
    sites = ("output", "grad_output", "param", "grad")
    recorded.catalog.modules["model", "b"] = module_of("Linear", sites)
    for step in range(6):
        for path in ("a", "b", ""):
            recorded.add(step, path, noise(step))
            if path != "b" or is_used:
                recorded.add(step, path, noise(step), site="grad_output", phase="backward")
        for path in ("a", "b"):
            recorded.add(step, path, noise(step), **OPTIMIZER, site="param")
        recorded.add(step, "a", noise(step), **OPTIMIZER, site="grad")
    (found,) = said(recorded, NoGradient)
    assert (found.module_path, found.severity) == ("b", Severity.NOTE)
    assert found.what == "never had a gradient" + ", nor had the module's output: the loss does not depend on it" * (
        not is_used
    )


@pytest.mark.parametrize(("last", "is_named"), [(9, True), (90, False)])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_parameter_that_was_frozen_while_its_optimizer_goes_on_is_a_note(
    last: int, is_named: bool, goes_on: bool
) -> None:
    """A teacher that was trained, and then frozen, has an optimizer that steps no more."""
    recorded = Recorded()
    rates = {"weight": "lr.SGD.0"}
    recorded.catalog.modules["model", "up"] = module_of("Linear", ("param", "grad"), frozen=("weight",), rates=rates)
    for step in range(100):
        if goes_on or step <= last:
            recorded.add(step, "", 0.1, site="scalar", name="lr.SGD.0")
        for path in ("up", "down")[step > last :]:
            recorded.add(step, path, noise(step), **OPTIMIZER, site="grad", is_probe=step > 5)
    found = said(recorded, NoGradient)
    what = "its last gradient was at step 9: its requires_grad is False"
    assert [(one.module_path, one.severity, one.what) for one in found] == [("up", Severity.NOTE, what)] * (
        is_named and goes_on
    )


def test_a_parameter_whose_gradient_is_rounding_may_stay() -> None:
    recorded = Recorded()
    for step in range(5):
        for path, scale in (("conv", 1e-9), ("head", 1.0)):
            recorded.add(step, path, noise(1 if path == "conv" else step), **OPTIMIZER, site="param")
            recorded.add(step, path, noise(step, scale=scale), **OPTIMIZER, site="grad")
    assert said(recorded, Unchanged) == []


@pytest.mark.parametrize("rows_a_batch", BATCHES)
@pytest.mark.parametrize(("gradient", "is_named"), [(1e-6, False), (1e-2, True)])
def test_a_parameter_at_the_floor_of_the_loss_may_stay(gradient: float, is_named: bool, rows_a_batch: int) -> None:
    recorded = Recorded()
    for step in range(12):
        recorded.add(step, "up", noise(min(step, 5)), **OPTIMIZER, site="param")
        recorded.add(step, "up", noise(step, scale=1.0 if step < 4 else gradient), **OPTIMIZER, site="grad")
    found = recorded.judge(Unchanged, rows_a_batch).findings
    assert [(one.module_path, one.since) for one in found] == [("up", 6)] * is_named


def test_an_update_as_large_as_the_weight_is_named() -> None:
    recorded = parameters(
        lambda step, number: (
            moving(step, number) * (3.0 if (number, step) >= (5, 2) and number == 5 and step >= 2 else 1.0)
        )
    )
    (one,) = said(recorded, Update)
    assert subjects([one]) == [("blocks.5", 2, (0,))] and one.value == pytest.approx(2, rel=0.1)
    assert one.since is None and one.first_step == 2, "a single record holds for no more than itself"
    from_zero = parameters(lambda step, number: noise(number) * 1e-3 * step)
    assert said(from_zero, Update) == []
    for step in range(6):
        recorded.add(step, "", 0.1 if step >= 2 else 0.01, site="scalar", name="lr.SGD.0")
    (one,) = said(recorded, Update)
    assert one.detail == "the learning rate lr.SGD.0 rose 10 times at step 2, from 0.01 to 0.1"


@pytest.mark.parametrize(
    ("later", "severity"),
    [
        (lambda step: np.clip(moving(step, 5), -0.1, 0.1), Severity.NOTE),
        (lambda step: np.clip(moving(2, 5), -0.1, 0.1), Severity.WARNING),
        (lambda step: np.clip(moving(step, 5), -0.1, 0.2), Severity.WARNING),
        (lambda step: 0.05 * moving(step, 5), Severity.WARNING),
    ],
    ids=["clipped", "still", "clipped at unlike ends", "small"],
)
def test_a_weight_that_the_program_clips_is_a_note(later: Any, severity: Severity) -> None:
    recorded = parameters(lambda step, number: later(step) if number == 5 and step >= 2 else moving(step, number))
    assert [(one.module_path, one.severity) for one in said(recorded, Update)] == [("blocks.5", severity)]


@pytest.mark.parametrize(
    ("inward", "across", "every", "is_named"),
    [(0.02, 0.01, 1, True), (0.02, 0.03, 1, False), (0.002, 0.001, 1, False), (0.02, 0.01, 2, False)],
    ids=["decay", "the gradient has more", "not yet half", "steps are missing"],
)
def test_a_weight_that_its_updates_only_shrink_is_named(
    inward: float, across: float, every: int, is_named: bool
) -> None:
    recorded, weight = Recorded(), noise(0)
    for step in range(80):
        turned = noise(step, 1) - weight * np.vdot(weight, noise(step, 1)) / np.vdot(weight, weight)
        turned *= np.linalg.norm(weight) / np.linalg.norm(turned)
        update = -inward * weight + across * turned
        if step % every == 0:
            recorded.add(step, "up", weight, **OPTIMIZER, site="param")
            recorded.add(step, "up", update, **OPTIMIZER, site=UPDATE)
        weight = weight + update
    assert [(one.module_path, one.measure) for one in said(recorded, Update)] == (
        [("up", "of the norm at first")] if is_named else []
    )


def test_a_weight_that_is_not_finite_is_no_large_update() -> None:
    def written(step: int, number: int) -> Any:
        weight = moving(step, number) + 3.0
        if number == 5 and step >= 2:
            weight[: None if step > 2 else 2] = np.inf
        return weight

    assert said(parameters(written), Update) == []


def test_a_weight_that_begins_on_another_scale_or_constant_is_named() -> None:
    def begin(step: int, number: int) -> Any:
        return np.full((4, 8), 0.1) if number == 1 else moving(step, number) * (30.0 if number == 4 else 1.0)

    recorded = parameters(begin)
    assert sorted(subjects(said(recorded, Initialisation))) == [("blocks.1", 0, (0,)), ("blocks.4", 0, (0,))]
    assert said(parameters(moving), Initialisation) == []


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([1, 1, 1, 2.5], ["blocks.3"]),
        ([1, 1 / 2.5, 1, 1], ["blocks.1"]),
        ([1, 1, 1, 5 / 3], []),
        ([1, 1, 2.5], []),
        ([1, 2, 3, 4], []),
        ([1, 1, 2.5, 2.5], []),
    ],
    ids=["larger", "smaller", "a gain", "too few", "by depth", "two kinds"],
)
def test_a_weight_unlike_equal_others_is_named(scales: list[float], expected: list[str]) -> None:
    recorded = Recorded()
    for number, scale in enumerate(scales):
        weight = noise(number, shape=(16, 32), scale=scale)
        recorded.add(0, f"blocks.{number}", weight, **OPTIMIZER, site="param")
    assert [one.module_path for one in said(recorded, Initialisation)] == expected


def test_an_embedding_in_a_chain_is_not_compared_with_its_layers() -> None:
    recorded = Recorded({"0": "Embedding", "2": "Linear", "4": "Linear", "6": "Linear"})
    for path, scale in (("0", 1.0), ("2", 0.05), ("4", 0.05), ("6", 0.05)):
        recorded.add(0, path, noise(int(path), shape=(64, 32), scale=scale), **OPTIMIZER, site="param")
    assert said(recorded, Initialisation) == []


@pytest.mark.parametrize("is_larger", [False, True])
def test_a_larger_weight_in_the_place_of_another_is_no_update(is_larger: bool) -> None:
    recorded = Recorded()
    for step in range(40):
        weight = np.ones((8, 8) if step < 20 or not is_larger else (16, 8)) * (3.0 if step >= 20 else 1.0)
        recorded.add(step, "head", weight, **OPTIMIZER, site="param")
    assert [one.module_path for one in said(recorded, Update)] == ([] if is_larger else ["head"])


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_gradients_of_a_loss_that_does_not_depend_on_the_model_are_told_from_cleared_ones(gradient: float) -> None:
    recorded = Recorded()
    for step in range(8):
        recorded.add(step, "up", np.full(8, gradient), site="grad_output", phase="backward")
        recorded.add(step, "up", np.zeros(8), **OPTIMIZER, site="grad")
    (found,) = said(recorded, NoGradient)
    assert ("does not depend on the model's outputs" in found.what) is (gradient == 0)


@pytest.mark.parametrize(
    ("paths", "scale", "severity"),
    [
        (["pi.0", "pi.2", "pi.4", "pi.6"], 0.01, Severity.NOTE),
        (["pi.0", "pi.2", "pi.4", "pi.6"], 100.0, Severity.WARNING),
        (["pi.6", "pi.4", "pi.2", "pi.0"], 0.01, Severity.WARNING),
        ([f"blocks.{number}.up" for number in range(4)], 0.01, Severity.WARNING),
    ],
    ids=["last", "large", "first", "block"],
)
def test_the_last_layer_of_a_chain_may_begin_small(paths: list[str], scale: float, severity: Severity) -> None:
    recorded = Recorded()
    for number, path in enumerate(paths):
        weight = noise(number, shape=(16, 32), scale=scale if number == 3 else 1.0)
        recorded.add(0, path, weight, **OPTIMIZER, site="param")
    assert [(one.module_path, one.severity) for one in said(recorded, Initialisation)] == [(paths[3], severity)]


def test_a_dead_output_is_named_after_five_records() -> None:
    def change(step: int, rank: int, path: str, values: Any) -> Any:
        return values * 0 if path == "blocks.7" and step >= 2 else np.maximum(values, 0)

    found = said(outputs(change), Dead)
    assert subjects(found) == [("blocks.7", 6, (0,))] and found[0].since == found[0].first_step == 2
    beginning = outputs(lambda step, rank, path, values: values * (step > 0))
    assert said(beginning, Dead) == [], "a branch that begins at zero"


@pytest.mark.parametrize(
    ("name", "extra", "value", "severity"),
    [
        ("TopK", 0, 0.5, Severity.NOTE),
        ("TopK", 1, 0.5, Severity.WARNING),
        ("Router", 0, 1.0, Severity.NOTE),
        ("Block", 0, 0.5, Severity.WARNING),
    ],
)
def test_as_many_zeros_at_each_record_are_meant(name: str, extra: int, value: float, severity: Severity) -> None:
    recorded = Recorded({"act": name})
    for step in range(12):
        values = np.zeros(400)
        values[np.random.default_rng(step).permutation(400)[: 2 + extra * (step % 2)]] = value
        recorded.add(step, "act", values)
    assert [one.severity for one in said(recorded, Dead)] == [severity]


def test_a_mask_of_zeros_is_not_dead() -> None:
    recorded = Recorded()
    for step in range(6):
        recorded.add(step, "mask", np.zeros(64), dtype="bool")
        recorded.add(step, "router", np.zeros(()))
    assert said(recorded, Dead) == []


@pytest.mark.parametrize("names", [("0", "1", "2"), ("loss", "logits", "bias")])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_zeros_beside_the_first_output_are_dead_only_if_they_have_a_gradient(names: Any, has_gradient: bool) -> None:
    recorded, is_dict = Recorded(), names[0] == "loss"
    for step in range(6):
        made = (np.ones(()) if is_dict else noise(step), *np.zeros((2, 64)))
        for name, values in zip(names, made, strict=True):
            recorded.add(step, "block", values, name=name)
        if has_gradient:
            recorded.add(step, "block", noise(step), name=names[1], site="grad_output", phase="backward")
    severity = Severity.WARNING if is_dict else Severity.NOTE  # T5 makes such zeros where activations are checkpointed
    expected = [(names[1], severity)] * (has_gradient or is_dict)
    assert [(one.name, one.severity) for one in said(recorded, Dead)] == expected


def test_a_further_output_that_turns_zero_is_dead() -> None:
    recorded = Recorded()
    for step in range(8):
        for name, values in (("0", noise(step)), ("1", noise(step) * (step < 2))):
            recorded.add(step, "block", values, name=name)
            recorded.add(step, "block", noise(step), name=name, site="grad_output", phase="backward")
    assert [(one.name, one.severity) for one in said(recorded, Dead)] == [("1", Severity.WARNING)]


def test_a_validation_on_the_same_samples_repeats_no_batch() -> None:
    recorded = Recorded()
    for step in range(5):
        for rank in range(2):
            recorded.add(step, "", noise(step), rank=rank, site="input", name="x", mode="eval")
            recorded.add(step, "", noise(step, rank), rank=rank, site="input", name="x")
    assert said(recorded, Data) == []


def test_a_tanh_at_its_ends_is_named_and_another_module_of_such_values_is_not() -> None:
    recorded = Recorded({"tanh": "Tanh", "sigmoid": "Sigmoid", "sign": "Sign", "sound": "Tanh"})
    for step in range(6):
        ends = np.sign(noise(step))
        for path, values in (
            ("tanh", ends),
            ("sigmoid", (ends + 1) / 2),
            ("sign", ends),
            ("sound", np.tanh(noise(step))),
        ):
            recorded.add(step, path, values)
    assert {one.module_path for one in said(recorded, Saturated)} == {"tanh", "sigmoid"}


@pytest.mark.parametrize("recovers", [True, False])
def test_a_sigmoid_that_leaves_its_ends_again_is_a_note(recovers: bool) -> None:
    recorded = Recorded({"act": "Sigmoid"})
    for step in range(20):
        recorded.add(step, "act", np.full((4, 8), 0.5 if recovers and step > 12 else 0.001))
    (one,) = said(recorded, Saturated)
    assert one.severity is (Severity.NOTE if recovers else Severity.WARNING)


@pytest.mark.parametrize(
    ("labels", "severity"),
    [
        (np.arange(16) % 2, Severity.NOTE),
        (np.arange(16) % 4 == 0, Severity.WARNING),
        (np.arange(16) / 16, Severity.WARNING),
        (np.arange(8) % 2, Severity.WARNING),
    ],
    ids=["right", "wrong", "no classes", "of another output"],
)
def test_a_classifier_may_be_sure_of_what_is_right(labels: Any, severity: Severity) -> None:
    recorded = Recorded({"out": "Sigmoid"})
    for step in range(10):
        recorded.add(step, "out", np.where(np.arange(16) % 2, 0.999, 0.001))
        recorded.add(step, "", labels, site="input", name=LABELS)
    assert [one.severity for one in said(recorded, Saturated)] == [severity]


def test_a_rank_unlike_its_peers_is_named() -> None:
    recorded = outputs(lambda step, rank, path, values: values * (20 if rank == 2 else 1), ranks=6)
    found = said(recorded, OutlierRank)
    assert {one.ranks for one in found} == {(2,)} and {one.module_path for one in found} == set(LAYERS)
    assert all(
        re.fullmatch(r"root mean square [12]\d.* on rank 2, and .* in the middle of its peers", one.detail)
        for one in found
    )
    assert said(outputs(ranks=6), OutlierRank) == []
    (few,) = outputs(ranks=2).judge(OutlierRank).unjudged
    assert "4 data-parallel ranks" in few.why


@pytest.mark.parametrize(("ranks", "named"), [(2, (0, 1)), (3, (2,))])
def test_a_rank_unlike_one_or_two_others_is_named_by_how_far_apart_they_usually_move(
    ranks: int, named: tuple[int, ...]
) -> None:
    def change(step: int, rank: int, path: str, values: Any) -> Any:
        return values * (10 if rank == ranks - 1 and path == "blocks.5" else 1)

    found = said(outputs(change, ranks, steps=24), OutlierRank)
    assert {(one.module_path, one.step, one.since) for one in found} == {("blocks.5", 15, 0)}
    assert tuple(rank for one in found for rank in one.ranks) == named
    assert ("two data-parallel ranks" in found[0].what) == (ranks == 2)
    verdict = outputs(ranks=ranks, steps=24).judge(OutlierRank)
    assert (verdict.findings, verdict.unjudged) == ([], [])


@pytest.mark.parametrize("has_norm", [False, True])
def test_the_input_of_a_rank_that_is_far_larger_stands_above_the_outputs_that_follow(has_norm: bool) -> None:
    recorded = Recorded()
    recorded.catalog.shared_rates = {("model", "lr.SGD.0")}
    for step in range(24):
        for rank in range(2):
            for _ in range(1 + 2 * rank):  # calls of a step
                values = noise(step, rank, 1) * (50 if rank else 1)
                recorded.add(step, "", values, site="input", name="x", rank=rank)
                recorded.add(step, "", values, site="input", name="mask", rank=rank)
                recorded.add(step, "up", noise(step, rank, 2) if has_norm else values, rank=rank)
    found = with_causes(said(recorded, OutlierRank), recorded.catalog)
    detail = "root mean square 1.03 on rank 0, 46.22 on rank 1"
    severity = Severity.NOTE if has_norm else Severity.WARNING
    assert (found[0].site, found[0].severity, found[0].ranks, found[0].detail) == ("input", severity, (0, 1), detail)
    follow = [(one.site, one.cause) for one in found[1:]]
    assert follow == ([] if has_norm else [("output", "outlier_rank of '' at step 0")])


@pytest.mark.parametrize(
    ("labels", "is_said"),
    [
        (lambda draw, rank: draw.integers(0, 5, 32) + 5 * rank, True),
        (lambda draw, rank: draw.integers(0, 10, 32), False),
        (lambda draw, rank: np.arange(32) + 32 * rank, False),
        (lambda draw, rank: np.where(np.arange(32) < 8 + 16 * rank, -100, draw.integers(0, 10, 32)), False),
    ],
    ids=["classes of its own", "all classes", "numbers of samples", "ignored labels"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_labels_unlike_each_others_are_a_note(ranks: int, labels: Any, is_said: bool) -> None:
    recorded = Recorded()
    recorded.catalog.shared_rates = {("model", "lr.SGD.0")}
    for step in range(60):
        for rank in range(ranks):
            given = labels(np.random.default_rng([step, rank]), int(rank == ranks - 1))
            recorded.add(step, "", given, site="input", name=LABELS, rank=rank, dtype="int64")
            recorded.add(step, "up", noise(step, rank), rank=rank)
    found = said(recorded, OutlierRank)
    named = (0, 1) if ranks == 2 else (3,)
    assert [(one.severity, one.ranks, one.name) for one in found] == [(Severity.NOTE, named, LABELS)] * is_said
    assert all(one.what.startswith("the labels of the ") for one in found)


def test_two_ranks_whose_sizes_scatter_as_far_are_not_named() -> None:
    def change(step: int, rank: int, path: str, values: Any) -> Any:
        return values * np.exp(3 * np.random.default_rng([step, rank]).normal()) * (2 if rank else 1)

    assert said(outputs(change, 2, steps=24), OutlierRank) == []


def test_two_ranks_with_one_batch_are_named() -> None:
    for same, expected in ((True, [("", 2, (3,))]), (False, [])):
        recorded = Recorded()
        for step in range(5):
            for rank in range(4):
                recorded.add(
                    step, "", noise(step, 1 if same and rank == 3 else rank), rank=rank, site="input", name="x"
                )
        found = said(recorded, Data)
        assert subjects(found) == expected and all(one.since == 0 for one in found)


def test_a_running_variance_that_leaps_is_named() -> None:
    for factor, expected in ((10.0, ["bn"]), (1.01, [])):
        recorded = Recorded()
        for step in range(30):
            values = np.ones(8) * (factor if step % 2 else 1)
            recorded.add(step, "bn", values, site="buffer", name="running_var", phase="optimizer")
        assert [one.module_path for one in said(recorded, RunningStatistics)] == expected


@pytest.mark.parametrize(
    ("momentum", "every", "is_named"),
    [(1.0, 1, True), (0.7, 1, True), (0.3, 1, False), (None, 1, False), (1.0, 10, False)],
)
def test_a_running_variance_of_the_last_batch_alone_is_named(
    momentum: float | None, every: int, is_named: bool
) -> None:
    """One batch that takes more than half away shows it, whatever is recorded before."""
    recorded, variance = Recorded(), 1.0
    for step in range(5):
        share = momentum or 1 / (step + 1)
        variance += share * ((100.0 if step % 2 else 1.0) - variance)
        for name, value in (("running_var", np.full(8, variance)), ("num_batches_tracked", every * (step + 1.0))):
            recorded.add(step * every, "bn", value, site="buffer", name=name, phase="optimizer")
    found = said(recorded, RunningStatistics)
    assert [(one.module_path, one.step) for one in found] == [("bn", 2)] * is_named


def test_a_running_variance_of_one_rank_alone_is_named_by_few_records() -> None:
    recorded = Recorded()
    for step in range(0, 60, 10):
        for rank in range(3):
            values = np.ones(8) * (3 if rank == 2 else 1)
            recorded.add(step, "bn", values, rank=rank, site="buffer", name="running_var", phase="optimizer")
    assert subjects(said(recorded, RunningStatistics)) == [("bn", 40, (2,))]


def test_a_running_variance_of_one_rank_alone_is_named() -> None:
    for factor, expected in ((3.0, [("bn", 22, (2,))]), (1.2, [])):
        recorded = Recorded()
        for step in range(30):
            for rank in range(3):
                values = np.ones(8) * (factor if rank == 2 else 1)
                recorded.add(step, "bn", values, rank=rank, site="buffer", name="running_var", phase="optimizer")
        assert subjects(said(recorded, RunningStatistics)) == expected


def test_a_validation_that_rises_far_above_the_training_is_named() -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [("validation/loss", {}), ("val_loss", {}), ("loss", {"mode": "eval"})]
    for name, more in kinds:
        for rise, expected in ((0.02, [70]), (-0.02, [])):
            recorded = Recorded()
            for step in range(100):
                recorded.add(step, "", 2 * 0.98**step, site="scalar", name="train/loss")
                if step % 10 == 0:
                    recorded.add(step, "", 1 + rise * max(step - 20, 0) / 2, site="scalar", name=name, **more)
            assert [one.step for one in said(recorded, Overfitting)] == expected


@pytest.mark.parametrize(
    ("validations", "severities"),
    [
        ([9, 5, 3, 6, 6, 6, 2, 4, 4, 4], [Severity.NOTE]),
        ([9, 5, 3, 6, 6, 6, 2, 5, 5, 5], [Severity.WARNING]),
        ([9, 5, 3, 6, 2, 1, 1.5, 1.5, 1.5, 1.5], []),
        ([9, 5, 3, 2, 1, 1.5, 1.5, 1.5, 1.5, 1.5], [Severity.WARNING]),
    ],
    ids=["it got better", "then farther than before", "no farther than before", "at once"],
)
def test_a_validation_that_goes_up_and_down_has_to_rise_farther_than_before(validations: Any, severities: Any) -> None:
    recorded = Recorded()
    for step, value in enumerate(validations):
        recorded.add(step, "", 0.5, site="scalar", name="train/loss")
        recorded.add(step, "", value, site="scalar", name="validation/loss", mode="eval")
    assert [one.severity for one in said(recorded, Overfitting)] == severities


@pytest.mark.parametrize(
    ("trained", "validated", "expected"),
    [
        (lambda step: 1.4 * 0.97**step, lambda step: 1.4, [Severity.WARNING]),
        (lambda step: 1.4 * 0.998**step, lambda step: 1.4, [Severity.NOTE]),
        (lambda step: 1.4 * 0.97**step, lambda step: 140.0, [Severity.NOTE]),
        (lambda step: 1.4 * 0.97**step, lambda step: 0.4 + 0.97**step, []),
        (lambda step: 1.4 * 0.97**step, lambda step: max(1.4 * 0.97**step, 0.9), []),
        (lambda step: 1.4, lambda step: 1.4, []),
    ],
    ids=["other labels", "training fell little", "another kind of loss", "both fall", "it fell at first", "none falls"],
)
def test_a_validation_that_never_falls_while_training_does_is_named(
    trained: Any, validated: Any, expected: list[Severity]
) -> None:
    recorded = Recorded()
    for step in range(100):
        value = trained(step) + noise(step, shape=(), scale=0.01)
        recorded.add(step, "", value, site="scalar", name="loss")
        if step % 10 == 9:
            value = validated(step) + noise(step, 1, shape=(), scale=0.005)
            recorded.add(step, "", value, site="scalar", name="eval_loss")
    found = said(recorded, Overfitting)
    assert [one.severity for one in found] == expected
    assert [(one.step, one.since, "never fell" in one.what) for one in found] == [(99, 9, True)] * len(expected)


@pytest.mark.parametrize("are_divided", [False, True])
def test_the_losses_of_micro_steps_may_be_parts_of_one_loss(are_divided: bool) -> None:
    recorded = Recorded()
    for step in range(100):
        for repeat in range(4):
            value = 2 * 0.98**step / (4 if are_divided else 1)
            recorded.add(step, "", value, site="scalar", name="loss", repeat=repeat)
        if step % 10 == 0:
            recorded.add(step, "", 2 + 0.01 * max(step - 20, 0), site="scalar", name="eval_loss")
    (one,) = said(recorded, Overfitting)
    assert (one.step, one.since, one.severity) == (90, 0, Severity.WARNING)
    assert one.value == pytest.approx(2.7 / np.mean([2 * 0.98**step for step in range(81, 91)]) - 1)


def test_overfitting_needs_a_validation() -> None:
    (one,) = losses(lambda step: 1.0).judge(Overfitting).unjudged
    assert "validation loss" in one.why


def test_steps_that_are_skipped_one_after_the_other_are_named() -> None:
    recorded = Recorded()
    for step in range(60):
        recorded.add(step, "", float(step < 16 or step > 30), site="scalar", name="skipped")
    assert [(one.step, one.since, one.severity) for one in said(recorded, Skipped)] == [(50, 31, Severity.ERROR)]


def attention(weights: Any, logits: Any, path: str = "layers.0.attention.softmax") -> list[str]:
    recorded = Recorded({path: "Softmax"})
    for step in range(5):
        recorded.add(step, path, logits, site="input", name="input")
        recorded.add(step, path, weights)
    return [one.measure for one in said(recorded, Attention)]


def test_attention_on_single_positions_and_logits_that_are_too_large_are_named() -> None:
    even, sharp = np.full((4, 8), 1 / 8), np.eye(8)[:4]
    masked = np.where(np.eye(8) > 0, -np.inf, 3.0)
    assert attention(even, masked) == []
    assert attention(sharp, masked) == ["entropy of order 2"]
    assert attention(even, np.full((4, 8), 120.0)) == ["largest logit"]
    assert attention(sharp, masked, "classifier.softmax") == [], "a classifier may well be sure"


def test_taps_of_attention_are_judged_by_their_names() -> None:
    recorded = Recorded()
    for step in range(5):
        recorded.add(step, "layers.0", np.eye(8), site="tap", name="attention")
        recorded.add(step, "layers.0", np.full(8, 200.0), site="tap", name="attn_logits")
        recorded.add(step, "layers.0", np.eye(8) * 200, site="tap", name="other")
    assert {one.name for one in said(recorded, Attention)} == {"attention", "attn_logits"}


def test_a_run_without_attention_is_not_judged() -> None:
    (one,) = outputs().judge(Attention).unjudged
    assert "recorder.tap" in one.why and not one.setting


@pytest.mark.parametrize(
    ("mean", "std", "is_said"),
    [(0.3, 0.4, True), (1.0, 1.0, True), (0.1, 0.9, False), (0.0, 1.0, False)],
    ids=["half the scale", "shifted", "augmented", "equal"],
)
def test_an_input_in_evaluation_unlike_that_in_training_is_a_note(mean: float, std: float, is_said: bool) -> None:
    recorded = Recorded()
    for step in range(40):
        recorded.add(step, "", noise(step, shape=(64, 8)), site="input", name="x")
        if step % 5 == 4:
            values = mean + noise(step, 1, shape=(64, 8), scale=std)
            recorded.add(step, "", values, site="input", name="x", mode="eval")
    found = said(recorded, EvaluationOutput)
    assert [(one.severity, one.name, one.step) for one in found] == [(Severity.NOTE, "x", 39)] * is_said
    assert all(one.what.startswith("the input in evaluation is unlike that in training: its mean is ") for one in found)


@pytest.mark.parametrize(("first", "expected"), [(1.0, []), (50.0, [5])])
def test_an_output_in_evaluation_is_compared_with_training_up_to_its_step(first: float, expected: list[int]) -> None:
    """Outputs of a training may grow a hundredfold after an evaluation, such as one before the first step."""
    recorded = Recorded()
    for step in range(40):
        if step in (0, 5):
            for _ in range(2):
                recorded.add(step, "head", np.full(8, first * 1.1**step), mode="no_grad")
        recorded.add(step, "head", np.full(8, 1.2**step))
    assert [one.step for one in said(recorded, EvaluationOutput)] == [0] * len(expected)


@pytest.mark.parametrize(("trained", "expected"), [(np.array(0.01), []), (np.full((2, 4), 0.01), ["head"])])
def test_a_loss_in_training_is_not_compared_with_logits_in_an_evaluation(trained: Any, expected: list[str]) -> None:
    recorded = Recorded()
    for step in range(8):
        recorded.add(step, "head", trained)
        if step % 4 == 3:
            recorded.add(step, "head", np.full((8, 4), 1.0), mode="no_grad")
    assert [one.module_path for one in said(recorded, EvaluationOutput)] == expected


@pytest.mark.parametrize("settles", [True, False])
def test_an_output_in_evaluation_that_settles_is_a_note(settles: bool) -> None:
    recorded = Recorded()
    for step in range(20):
        recorded.add(step, "norm", noise(step))
        if step % 4 == 3:
            recorded.add(step, "norm", noise(step, scale=1.0 if settles and step > 10 else 50.0), mode="eval")
    (one,) = said(recorded, EvaluationOutput)
    assert one.severity is (Severity.NOTE if settles else Severity.WARNING)
    assert one.what.endswith(", but not later") is settles


def test_an_input_in_evaluation_of_another_size_is_named_as_an_input() -> None:
    recorded = Recorded()
    for step in range(20):
        recorded.add(step, "", noise(step), site="input", name="x")
        if step % 4 == 3:
            recorded.add(step, "", noise(step, scale=100.0), site="input", name="x", mode="eval")
    one = said(recorded, EvaluationOutput)[0]
    assert one.what == "the input in evaluation has another size than in training"
    assert one.advice.startswith("prepare the samples of the evaluation as those of the training")


def test_a_spike_says_what_moved_before_it() -> None:
    recorded = Recorded()
    for step in range(60):
        recorded.add(step, "", 2 + noise(step, shape=(), scale=0.05) + (step == 50), site="scalar", name="loss")
        for path in LAYERS:
            scale = 20.0 if step in (48, 49, 50) and path >= "blocks.5" else 1.0
            recorded.add(step, path, noise(step, 1, scale=scale))
    (one,) = said(recorded, Spike)
    assert one.step == 50 and one.detail == "'blocks.5' output moved first, at step 48"


def test_a_spike_names_the_learning_rate_that_rose_before_it() -> None:
    recorded = Recorded()
    for step in range(60):
        loss = 2 + noise(step, shape=(), scale=0.05) + (step == 50)
        recorded.add(step, "", loss, site="scalar", name="loss")
        rate = 1e-3 * (1 + step / 60)  # a warm-up is no leap
        recorded.add(step, "", 0.3 if step == 49 else rate, site="scalar", name="lr.AdamW.0")
    (one,) = said(recorded, Spike)
    assert one.step == 50 and one.site == "scalar"
    assert one.detail == "the learning rate lr.AdamW.0 rose 166.7 times at step 49, from 0.0018 to 0.3"


@pytest.mark.parametrize(("first_bad", "is_consequence"), [(57, True), (66, True), (90, False)])
@pytest.mark.parametrize("rows_a_batch", BATCHES)
def test_a_nan_long_after_a_spike_is_over_is_a_finding_of_its_own(
    first_bad: int, is_consequence: bool, rows_a_batch: int
) -> None:
    recorded = Recorded()
    for step in range(95):
        loss = 2 + noise(step, shape=(), scale=0.05) + 20.0 * (50 <= step < 60)
        recorded.add(step, "", loss, site="scalar", name="loss")
        recorded.add(step, "", 0.3 if step in (49, 50) else 1e-3, site="scalar", name="lr.AdamW.0")
        recorded.add(step, "blocks.1", np.full(4, np.nan if step >= first_bad else 1.0))
    found = [one for rule in (Spike, NonFinite) for one in recorded.judge(rule, rows_a_batch).findings]
    spike, nonfinite = sorted(with_causes(found, recorded.catalog), key=lambda one: one.step)
    assert (spike.rule, spike.step, nonfinite.rule, nonfinite.step) == ("spike", 50, "nonfinite", first_bad)
    assert nonfinite.cause == (words_of(spike) if is_consequence else "")


@pytest.mark.parametrize(("after", "every", "recovered"), [(2.0, 1, [60]), (np.nan, 1, []), (2.0, 10, [])])
def test_a_spike_is_over_once_its_own_curve_has_been_below_for_ten_records(
    after: float, every: int, recovered: list[int]
) -> None:
    """A loss that is NaN from then on, or is recorded every ten steps, is not below because the gradients are."""
    recorded = Recorded()
    for step in range(95):
        if step <= 50 or step % every == 0:
            loss = 60.0 if step == 50 else 2 + noise(step, shape=(), scale=0.05) if step < 50 else after
            recorded.add(step, "", loss, site="scalar", name="loss")
        recorded.add(step, "blocks.1", noise(step), site="grad", name="weight")
    assert [one.step for one in recorded.judge(Spike, 64).findings] == [50]
    assert recorded.catalog.recovered_at == recovered


def test_a_local_gradient_that_jumps_on_one_rank_is_named_there() -> None:
    recorded = Recorded()
    for step in range(120):
        for rank in range(2):
            scale = 50.0 if (step, rank) == (110, 1) else 1.0
            for scope in ("local", "global"):
                values = noise(step, rank, scale=scale if scope == "local" else 1.0)
                recorded.add(step, "up", values, rank=rank, site="grad", name="weight", scope=scope)
    assert [(one.step, one.ranks) for one in said(recorded, Jump)] == [(110, (1,))]


def objectives(main: float, aux: float) -> list[Finding]:
    recorded = Recorded()
    for step in range(12):
        for name, scale in (("main", main), ("aux", aux)):
            for phase in ("forward", "backward"):
                values = noise(step, shape=(8,), scale=scale if phase == "backward" else 1.0)
                recorded.add(step, "trunk", values, site="tap", name=f"objective.{name}", phase=phase)
        recorded.add(step, "trunk", noise(step, scale=1e9), site="tap", name="hidden", phase="backward")
    return said(recorded, Objectives)


def test_an_objective_that_drowns_another_is_named() -> None:
    assert objectives(1.0, 5.0) == []
    for main, aux, expected in ((1.0, 50.0, "objective.aux"), (1.0, 0.0, "objective.main")):
        assert [(one.name, one.step) for one in objectives(main, aux)] == [(expected, 9)]


@pytest.mark.parametrize(
    ("before", "since", "expected"),
    [(0.6, -0.4, [(59, 50)]), (0.6, 0.1, []), (0.0, 0.0, []), (-0.4, 0.6, []), (0.05, -0.6, [])],
)
def test_objectives_that_agreed_and_oppose_each_other_are_named(
    before: float, since: float, expected: list[tuple[int, int]]
) -> None:
    recorded = Recorded()
    for step in range(120):
        cosine = (before if step < 50 else since) + noise(step, shape=(), scale=0.1)
        recorded.add(step, "trunk", cosine, site="scalar", name="objective.cosine.main:aux")
    found = said(recorded, Flip)
    assert [(one.step, one.since) for one in found] == expected
    assert all("'main' and 'aux'" in one.what and one.detail.startswith("cosine about 0.6") for one in found)


def test_however_long_objectives_oppose_each_other_a_few_numbers_are_remembered() -> None:
    sizes = []
    for num_records in (20, 20_000):
        pair = gradient_rules._Agreement(0)
        for step in range(num_records):
            pair.add(step, 0.5 if step < 10 else -0.5, 100)
        assert (pair.num, pair.cosine, pair.positive, pair.since) == (10, 0.5, 1.0, 10)
        sizes.append(len(pickle.dumps(pair)))
    assert sizes[1] < sizes[0] + 20


@pytest.mark.parametrize(("cosine", "steps", "is_told"), [(-0.4, 60, True), (-0.4, 20, False), (0.0, 60, False)])
def test_objectives_that_oppose_each_other_all_the_while_are_a_note(cosine: float, steps: int, is_told: bool) -> None:
    recorded = Recorded()
    for step in range(steps):
        values = cosine + noise(step, shape=(), scale=0.1)
        recorded.add(step, "trunk", values, site="scalar", name="objective.cosine.main:aux#2")
    found = said(recorded, Flip)
    assert [(one.severity, one.step) for one in found] == [(Severity.NOTE, 0)] * is_told
    assert all("'main' and 'aux' at tensor #2 oppose each other from the first" in one.what for one in found)


@pytest.mark.parametrize(
    ("bad", "words"), [(["aux"], "; objective 'aux' alone is not finite"), ([], ""), (["main", "aux"], "")]
)
def test_a_loss_that_is_not_finite_names_the_objective_that_is_not(bad: list[str], words: str) -> None:
    recorded = Recorded()
    for step in range(4):
        recorded.add(step, "", np.nan if step == 2 else 1.0, site="scalar", name="loss")
        for name in ("main", "aux"):
            is_bad = step == 2 and name in bad
            recorded.add(step, "", np.nan if is_bad else 1.0, site="scalar", name=f"objective.norm.{name}")
    (one,) = said(recorded, NonFinite)
    assert one.what == f"the value is not finite{words}"


def test_the_weights_of_losses_are_no_gradients_that_drown_others() -> None:
    recorded = Recorded()
    for step in range(12):
        for name, weight in (("main", 1.0), ("aux", 1e4)):
            recorded.add(step, "", np.float64(weight), site="tap", name=f"objective.{name}", phase="backward")
    verdict = recorded.judge(Objectives, 100)
    assert verdict.findings == []
    assert [one.why for one in verdict.unjudged] == [
        "needs the tensor that the objectives share: they got only single numbers"
    ]
