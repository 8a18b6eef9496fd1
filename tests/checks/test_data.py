"""The rule on batches: of two ranks alike, the same again and again, of one value; labels that stay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from recorder.checks.rows import IS_PROBE
from recorder.checks.rule import Severity
from recorder.checks.rules.data import Data
from recorder.sites import LABELS
from recorder.system.text import counted, number
from tests.checks.rows import Recorded, module_of
from tests.checks.test_rules import noise, said, subjects


def batches(make: Any, ranks: int = 1, steps: int = 40, **more: Any) -> Recorded:
    recorded = Recorded()
    for step in range(steps):
        for rank in range(ranks):
            for name, values in make(step, rank).items():
                recorded.add(step, "", values, rank=rank, site="input", name=name, **more)
    return recorded


@pytest.mark.parametrize("period", [1, 3])
def test_a_batch_that_comes_again_and_again_is_named(period: int) -> None:
    found = said(batches(lambda step, rank: {"x": noise(step % period, rank)}, ranks=2), Data)
    step = 19 + period
    assert subjects(found) == [("", step, (0, 1))]
    assert f"that of {counted(period, 'record')} before" in found[0].what and found[0].since == period


@pytest.mark.parametrize(("make", "share"), [
    (lambda step: step // 2, "50%"),
    (lambda step: step // 4, "75%"),
    (lambda step: step - (step % 3 == 1), None),
])  # fmt: skip
@pytest.mark.parametrize("is_probe", [True, False])
def test_batches_that_workers_with_one_seed_draw_are_a_note(make: Any, share: str | None, is_probe: bool) -> None:
    found = said(batches(lambda step, rank: {"x": noise(make(step))}, steps=80, is_probe=is_probe), Data)
    what = f"the batch repeats that of the record before in {share} of the records"
    assert [(one.severity, one.what) for one in found] == [(Severity.NOTE, what)] * (share is not None)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_samples_that_are_normalised_one_by_one_do_not_repeat(is_recorded: bool) -> None:
    """All batches of such samples have the same l2. Where their other statistics are recorded, they differ."""
    recorded = Recorded()
    for step in range(40):
        values = noise(step, shape=(12, 32))
        values = (values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True, ddof=1)
        is_probe = not is_recorded or step >= 10
        numbers = {"l2": math.sqrt(12 * 31)} | ({} if is_probe else {"fingerprint.hash": float(step)})
        recorded.add(step, "", values, site="input", name="x", is_probe=is_probe, numbers=numbers)
    assert len([one for one in said(recorded, Data) if "repeats" in one.what]) == (not is_recorded)


def test_a_longer_cycle_is_a_training_set() -> None:
    (found,) = said(batches(lambda step, rank: {"x": noise(step % 6, rank)}), Data)
    assert (found.severity, found.since) == (Severity.NOTE, 6)
    assert found.what == "the batches come in the same order again in each epoch of 6 steps"


@pytest.mark.parametrize(
    ("make", "since"),
    [
        (lambda step: step, None),
        (lambda step: step % 30, None),  # not a whole epoch has come again
        (lambda step: step if step < 10 else step % 7, 17),
        (lambda step: (step * (1 + step // 8)) % 8, None),  # another order in each epoch
        (lambda step: step % 8 if step != 30 else 1000, None),
    ],
)
def test_epochs_in_the_same_order_are_a_note(make: Any, since: int | None) -> None:
    found = said(batches(lambda step, rank: {"x": noise(make(step), rank)}), Data)
    assert [(one.severity, one.since) for one in found] == ([] if since is None else [(Severity.NOTE, since)])


@pytest.mark.parametrize(
    ("classes", "is_found"),
    [
        (lambda step: [step // 6] * 16, True),
        (lambda step: [step // 6] * 16 if step % 6 else [step // 6] * 8 + [step // 6 + 1] * 8, True),
        (lambda step: [step % 2] * 16, False),  # as of two nets that are trained by turns
        (lambda step: [0] * 16 if step % 4 else [0] * 12 + [3] * 4, False),  # hardly any sample is of a rare class
        (lambda step: noise(step, shape=(16,)).round().clip(0, 3).astype(int), False),
    ],
    ids=["by class", "with borders", "by turns", "rare", "shuffled"],
)
def test_samples_that_are_sorted_by_class_are_named(classes: Any, is_found: bool) -> None:
    made = batches(lambda step, rank: {"labels": np.array(classes(step), np.int64)}, steps=60, dtype="int64")
    found = [one for one in said(made, Data) if "sorted" in one.what]
    assert [(one.name, one.severity, one.first_step) for one in found] == [("labels", Severity.WARNING, 0)] * is_found


def test_an_input_of_equal_elements_is_named() -> None:
    found = said(batches(lambda step, rank: {"x": np.full(8, float(step)), "mask": np.ones(4)}), Data)
    assert [(one.name, one.step, one.since, one.what) for one in found] == [
        ("x", 19, 0, "all elements of the input are equal")
    ]
    (note,) = said(batches(lambda step, rank: {"x": np.full(8, step)}, dtype="int64"), Data)
    assert (note.step, note.what, note.severity) == (19, "all elements of the input are equal", Severity.NOTE)


def test_labels_that_never_change_or_are_all_alike_are_named() -> None:
    for make, words in (
        (lambda step: np.arange(8) % 4, "the labels never change"),
        (lambda step: np.full(8, step % 4), "all labels of a batch are equal"),
        (lambda step: np.full(8, -100), "all labels are -100, which the loss ignores"),
        (
            lambda step: np.where(np.arange(24) < 9 + step % 3, step % 4, -100),
            "all labels of a batch are equal, except labels -100, which the loss ignores",
        ),
        (lambda step: np.where(np.arange(24) < 7, step % 4, -100), None),
        (lambda step: np.r_[np.where(np.arange(24) < 9 + step % 3, step % 4, -100), 1 + step % 4], None),
        (lambda step: noise(step, 1).ravel() > 0, None),
    ):
        found = said(
            batches(lambda step, rank, make=make: {"x": noise(step), "labels": make(step)}, dtype="int64"), Data
        )
        assert [(one.name, one.what) for one in found] == ([("labels", words)] if words else [])


def test_batches_whose_statistics_must_be_equal_are_not_the_same_batch() -> None:
    generator = np.random.default_rng(0)
    for make in (
        lambda: np.eye(6)[generator.integers(0, 6, 16)],
        lambda: generator.choice([-1.0, 1.0], (16, 6)),
        lambda: (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True))(generator.normal(size=(16, 6))),
    ):
        assert said(batches(lambda step, rank, make=make: {"x": make()}, ranks=2), Data) == []


@pytest.mark.parametrize("rows_a_batch", [1, 1_000])
def test_batches_that_are_empty_from_one_step_on_are_named(rows_a_batch: int) -> None:
    emptied = batches(lambda step, rank: {"x": noise(step) * (step < 10), "labels": noise(step, 1)})
    found = emptied.judge(Data, rows_a_batch).findings
    assert [(one.name, one.step, one.since, one.what) for one in found] == [
        ("x", 12, 10, "all elements of the input are zero")
    ]
    two = batches(lambda step, rank: {"x": noise(step) * (step not in (10, 11))}, steps=24)
    assert two.judge(Data, rows_a_batch).findings == [], "the pages say that it takes three in a row"
    half = np.r_[np.nan, np.zeros(7)]
    broken = batches(lambda step, rank: {"x": noise(step) * (1.0 if step < 10 else half)}, steps=24)
    assert broken.judge(Data, rows_a_batch).findings == [], "a NaN is no zero"


@pytest.mark.parametrize("num_steps", [0, 10])
def test_a_condition_or_a_state_may_be_zero(num_steps: int) -> None:
    made = batches(lambda step, rank: {"x": noise(step), "h": noise(step, 1) * (step < num_steps)})
    assert said(made, Data) == []


def probed(recorded: Recorded) -> list[Any]:
    """The findings where only the first records have statistics, and the later ones are numbers of the probe."""
    made = [
        (
            step,
            lane,
            {name: numbers[name] for name in ("numel", "l2", "sum_sq", "nan_count", "inf_count")} | {IS_PROBE: 1},
        )
        if step > 24
        else (step, lane, numbers)
        for step, lane, numbers in recorded._rows
    ]
    recorded._rows = made
    return recorded.judge(Data).findings


def test_labels_that_stay_from_one_step_on_are_named_by_the_numbers_of_each_step() -> None:
    draw = np.random.default_rng(0)
    found = probed(
        batches(
            lambda step, rank: {
                "x": noise(step),
                LABELS: draw.integers(0, 4, 32) if step < 30 else np.arange(32) % 5,
            },
            steps=60, dtype="int64",
        )
    )  # fmt: skip
    assert [(one.name, one.step, one.since, one.what, one.severity) for one in found] == [
        (LABELS, 50, 31, "the labels never change", Severity.WARNING)
    ]


@pytest.mark.parametrize(("steps", "is_said"), [(15, False), (30, True)])
def test_labels_of_several_calls_in_a_step_are_counted_by_step(steps: int, is_said: bool) -> None:
    recorded = Recorded()
    for step in range(steps):
        for _ in range(4):
            recorded.add(step, "", noise(step), site="input", name="x")
            recorded.add(step, "", np.arange(32) % 5, site="input", name=LABELS, dtype="int64")
    recorded.add(steps, "", noise(0), site="input", name="x")
    recorded.add(steps, "", np.arange(32) % 4, site="input", name=LABELS, dtype="int64")
    assert [one.what for one in said(recorded, Data)] == ["the labels never change"] * is_said


def test_rare_classes_are_no_labels_of_one_class() -> None:
    rare = batches(
        lambda step, rank: {"x": noise(step), LABELS: np.r_[np.zeros(31), step > 24 and step % 7 == 0]},
        steps=60, dtype="int64",
    )  # fmt: skip
    assert probed(rare) == [], "a batch that the probe alone has is of two classes"
    ignored = batches(
        lambda step, rank: {"x": noise(step), LABELS: np.r_[np.full(31, -100), 2 + step % 3 if step > 24 else -100]},
        steps=60, dtype="int64",
    )  # fmt: skip
    assert probed(ignored) == [], "a batch that the probe alone has is not ignored"
    alike = batches(lambda step, rank: {"x": noise(step), LABELS: np.full(32, step % 4)}, steps=60, dtype="int64")
    assert [one.what for one in probed(alike)] == ["all labels of a batch are equal"]


@pytest.mark.parametrize("first, distance", [(0, 1), (32, 1), (0, 3)])
def test_labels_that_number_the_samples_never_change_on_purpose(first: int, distance: int) -> None:
    numbered = first + distance * np.arange(32)
    assert probed(batches(lambda step, rank: {"x": noise(step), LABELS: numbered}, steps=60, dtype="int64")) == []


@pytest.mark.parametrize(
    "labels, shapes, is_ranked",
    [
        ((32,), {"0": (32, 4, 64), "1": (32, 4, 1), "": (32, 4, 1)}, True),
        ((32,), {"0": (32, 4, 64), "1": (32, 4, 1), "": (32, 4)}, True),
        ((32,), {"0": (32, 4, 64), "1": (128, 1), "": (128, 1)}, True),
        ((32,), {"0": (32, 16), "": (32, 16), "gradient": (32, 4, 16)}, True),
        ((32,), {"0": (32, 4, 16), "": (32, 4, 16), "gradient": (32, 16)}, True),
        ((32,), {"0": (32, 16), "": (32, 4), "gradient 0": (32, 4, 16)}, True),
        ((32,), {"0": (32, 16), "": (32, 5), "gradient 0": (32, 4, 16)}, False),
        ((32,), {"0": (32, 16), "": (32, 16), "gradient": (32, 16)}, False),
        ((32,), {"0": (32, 16), "": (32, 16), "gradient": (224, 16)}, False),
        ((32,), {"0": (32, 16), "": (32, 4)}, False),
        ((32,), {"0": (32, 19, 1), "": (32, 4)}, False),
        ((32,), {"0": (32, 19, 48), "": (32, 2)}, False),
        ((32,), {"0": (32, 1), "": (32, 1)}, False),
        ((8, 6, 6), {"0": (8, 3, 6, 6), "": (8, 3, 6, 6)}, False),
        ((288,), {"0": (8, 36, 5), "": (8, 36, 5)}, False),
        ((32,), {"0": (32, 5)}, False),
        ((32,), {}, False),
    ],
)
def test_labels_of_one_class_are_a_note_if_they_choose_among_candidates_that_are_scored_one_by_one(
    labels: Any, shapes: Any, is_ranked: bool
) -> None:
    recorded = Recorded()
    for step in range(24):
        recorded.add(step, "", noise(step), site="input", name="x")
        recorded.add(step, "", np.zeros(labels), site="input", name=LABELS, dtype="int64")
        for path, shape in shapes.items():
            if path.startswith("gradient"):
                path = path.removeprefix("gradient").strip()
                recorded.add(step, path, noise(step, shape=shape), site="grad_output", phase="backward")
            else:
                recorded.add(step, path, noise(step, shape=shape))
    (one,) = said(recorded, Data)
    assert one.what.startswith("all labels of a batch are equal")
    assert (one.severity, "several candidates" in one.what) == (
        (Severity.NOTE, True) if is_ranked else (Severity.WARNING, False)
    )


def test_targets_of_one_value_are_a_note_if_they_are_no_classes() -> None:
    ones = batches(lambda step, rank: {LABELS: np.ones(32)})
    assert [(one.what, one.severity.word) for one in said(ones, Data)] == [("all labels of a batch are equal", "note")]


@pytest.mark.parametrize("has_many", [False, True])
def test_labels_of_one_class_beside_others_are_a_note(has_many: bool) -> None:
    recorded = batches(lambda step, rank: {LABELS: np.full(8, step % 2)}, dtype="int64")
    facts = module_of("Net", ("input",), has_many_labels=has_many)
    recorded.catalog.modules["model", ""] = facts
    (one,) = said(recorded, Data)
    assert one.severity is (Severity.NOTE if has_many else Severity.WARNING)


@pytest.mark.parametrize("is_kept", [False, True])
def test_one_batch_at_every_step_may_be_full_batch_training(is_kept: bool) -> None:
    def judged(make: Any) -> list[tuple[str, str, bool]]:
        recorded = batches(make)
        recorded.catalog.modules["model", ""] = module_of("Net", ("input",), given_again=16 if is_kept else None)
        return [(one.name, one.severity.word, "full-batch" in one.what) for one in said(recorded, Data)]

    word = "note" if is_kept else "warning"
    assert judged(lambda step, rank: {"x": noise(1), "y": noise(2)}) == [("x", word, True)]
    assert judged(lambda step, rank: {"x": noise(1), "y": noise(step)}) == [("x", "warning", False)]
    assert judged(lambda step, rank: {"x": noise(max(step, 5))}) == []
    assert judged(lambda step, rank: {"x": noise(min(step, 5))}) == [("x", "warning", False)]
    assert judged(lambda step, rank: {"x": noise(step % 3)}) == [("x", "warning", False)]
    signs = np.sign(noise(1))
    assert judged(lambda step, rank: {"x": signs, "y": noise(1)}) == [("y", word, is_kept)], "nothing tells x apart"


def test_a_number_beside_a_batch_of_which_nothing_is_known_is_no_batch_that_repeats() -> None:
    """As the time and the state `y` of a differential equation, which is taken for labels by its name."""
    recorded = Recorded()
    for step in range(40):
        for call in range(4):
            more: dict[str, Any] = {"site": "input", "is_probe": step > 9}
            if call == 0 or not more["is_probe"]:
                recorded.add(step, "", np.full(4 if more["is_probe"] else 1, 0.3 * call + 0.13), name="t", **more)
                recorded.add(step, "", noise(step, call), name="y", **more)
    assert said(recorded, Data) == []


@pytest.mark.parametrize(
    ("times", "since", "words"),
    [(400.0, 60, "any batch before, 1"), (100.0, 60, ""), (400.0, 20, "most of the first batches, 2")],
)
def test_a_batch_that_is_far_larger_than_all_before_is_named(times: float, since: int, words: str) -> None:
    """Each rank by itself, with its first records and between batches of rows."""
    recorded = batches(
        lambda step, rank: {"x": noise(step, rank) * (times if step == since and rank == 1 else 1 + rank)},
        ranks=3, steps=80, is_probe=True,
    )  # fmt: skip
    found = said(recorded, Data)
    assert [(one.step, one.ranks, one.severity) for one in found] == [(since, (1,), Severity.WARNING)] * bool(words)
    assert all(one.said.startswith(f"the input is far larger than in {words}") for one in found)


@pytest.mark.parametrize("rows_a_batch", [1, 7, 1_000])
def test_a_single_sample_among_batches_hides_no_batch_that_repeats(rows_a_batch: int) -> None:
    recorded = Recorded()
    for step in range(60):
        recorded.add(step, "", np.full(1, 0.7) if step == 45 else noise(1)[:1], site="input", name="x")
    assert [one.first_step for one in recorded.judge(Data, rows_a_batch).findings] == [1]


@pytest.mark.parametrize("num", [4, 5])
@pytest.mark.parametrize("is_new_later", [False, True])
def test_one_batch_of_a_loader_that_has_no_other_is_full_batch_training(is_new_later: bool, num: int) -> None:
    """A loader of 5 samples gives no batch of 4."""
    recorded = batches(lambda step, rank: {"x": noise(max(step - 25, 0) if is_new_later else 0), "y": noise(2)})
    recorded.catalog.modules["model", ""] = module_of("Net", ("input",), whole_sets=(2, num))
    found = [(one.name, one.severity.word, "has one batch" in one.what) for one in said(recorded, Data)]
    assert found[:1] == [("x", "warning", False) if is_new_later or num == 5 else ("x", "note", True)]


@pytest.mark.parametrize(("given", "severity"), [(0, Severity.NOTE), (30, Severity.WARNING), (None, Severity.WARNING)])
def test_tensors_that_the_model_was_given_all_along_are_no_stuck_loader(given: int | None, severity: Severity) -> None:
    """Also where the number of calls in a step changes, as with LBFGS."""
    recorded = Recorded()
    recorded.catalog.modules["model", ""] = module_of("Net", ("input",), given_again=given)
    for step in range(40):
        for call in range(2 if step < 30 else 2 + step % 5):
            recorded.add(step, "", noise(call % 2), site="input", name="x")
    (one,) = said(recorded, Data)
    assert (one.severity, "the very same tensors" in one.what) == (severity, given == 0)


@pytest.mark.parametrize("still", [None, 3, 30])
def test_a_batch_in_another_order_at_each_step_is_full_batch_training(still: int | None) -> None:
    recorded = Recorded()
    for step in range(40):
        is_known = step < 10 or step % 10 == 0 or step in (29, 30)  # the others are numbers of the probe
        order = {"fingerprint.hash": float(step - (step == still))} if is_known else {}
        values = np.random.default_rng(step).permutation(noise(0).ravel())
        recorded.add(step, "", values, site="input", name="x", numbers=order, is_probe=not is_known)
    (one,) = said(recorded, Data)
    assert one.severity is (Severity.NOTE if still is None else Severity.WARNING)
    assert ("in another order" in one.what) is (still is None)


@pytest.mark.parametrize(
    ("labels", "severity"),
    [
        (np.arange(5).repeat(5), Severity.NOTE),
        (np.arange(12) % 3, Severity.NOTE),
        (np.arange(10) // 5, Severity.NOTE),
        (np.arange(5).repeat(5) + 1, Severity.WARNING),
        (2 * np.arange(5).repeat(5), Severity.WARNING),
        (np.r_[np.arange(5).repeat(5)[:-1], 3], Severity.WARNING),
        (np.r_[np.zeros(7), np.ones(5)], Severity.WARNING),
        (np.arange(32) % 5, Severity.WARNING),
    ],
)
def test_labels_of_equally_many_samples_of_each_class_may_stay(labels: Any, severity: Severity) -> None:
    """As those of the episodes of few-shot learning, but not those of a classifier."""
    made = batches(lambda step, rank: {"x": noise(step), LABELS: labels}, steps=60, dtype="int64")
    made.add(0, "encoder", noise(0, shape=(40, 64)))
    assert [(one.what, one.severity) for one in probed(made)] == [("the labels never change", severity)]
    made.add(0, "head", noise(0, shape=(len(labels), int(labels.max()) + 1)))
    assert [one.severity for one in probed(made)] == [Severity.WARNING]


@pytest.mark.parametrize(
    "values, is_said",
    [
        (noise(0).ravel() * 5 + 3, True),
        (noise(0).ravel() * 2_000, True),
        (np.arange(256.0), True),
        (noise(0).ravel(), False),
        (noise(0).ravel() * 1e-2, False),
        (np.linspace(0, 1, 64), False),
        (np.linspace(-1, 1, 64), False),
    ],
)
def test_a_first_argument_that_is_not_normalised_is_a_note(values: Any, is_said: bool) -> None:
    def make(step: int, rank: int) -> Any:
        return {"x": np.roll(values, step) * (1 + 1e-3 * step + 1e-4 * rank), "mask": values * 1e6}

    found = said(batches(make, ranks=2), Data)
    assert [(one.name, one.severity.word, one.ranks) for one in found] == [("x", "note", (0,))] * is_said
    mean, std = values.mean() * 1.002, values.std() * 1.002
    words = f"; its mean is {number(float(mean))} and its standard deviation {number(float(std))}"
    assert all(one.said.endswith(words) for one in found)
    assert said(batches(make, dtype="uint8"), Data) == [], "whole numbers are converted, and may be scaled then"


@pytest.mark.parametrize(
    ("mean", "size", "is_said"),
    [(0, 1e-3, True), (0, 0.1, False), (-1, 1e-3, True), (-1, 0.1, False)],
    ids=["tiny", "small", "even", "varied"],
)
def test_a_first_argument_that_is_tiny_or_hardly_varies_is_a_note(mean: float, size: float, is_said: bool) -> None:
    found = said(batches(lambda step, rank: {"x": mean + noise(step) * size}), Data)
    assert [(one.severity.word, one.measure) for one in found] == [("note", "")] * is_said
    assert all(one.what.startswith("the input is not normalised; its mean is ") for one in found)


@pytest.mark.parametrize(
    ("mean", "size", "is_said"),
    [(100, 2.9, True), (5, 1, False), (0.97, 0.01, False)],
    ids=["far", "near", "of probabilities"],
)
def test_labels_far_from_zero_for_their_spread_are_a_note(mean: float, size: float, is_said: bool) -> None:
    def make(step: int, rank: int) -> Any:
        return {"x": noise(step), LABELS: mean + noise(step, 1, shape=(32,)).clip(-2, 2) * size}

    found = said(batches(make), Data)
    assert [(one.name, one.severity.word) for one in found] == [(LABELS, "note")] * is_said
    assert all(one.what.startswith("the labels are not normalised; their mean is ") for one in found)


@pytest.mark.parametrize(
    ("function", "low", "high", "severity"),
    [
        ("BinaryCrossEntropyWithLogits", 0, 255, Severity.WARNING),
        ("Add of BinaryCrossEntropy summed", 0, 255, Severity.WARNING),
        ("BinaryCrossEntropyWithLogits", -1, 1, Severity.WARNING),
        ("Mean of BinaryCrossEntropyWithLogits by element", 0, 255, Severity.NOTE),
        ("Mean of BinaryCrossEntropyWithLogits by element", -1, 1, None),  # -1 may be left out
        ("BinaryCrossEntropyWithLogits", 0, 1.1, None),
        ("MseLoss", 0, 255, None),
        ("", 0, 255, None),
        ("MseLoss of Sigmoid", 0, 255, Severity.WARNING),
        ("Add of HuberLoss of Tanh", 0, 255, Severity.WARNING),
        ("MseLoss of Softmax by element", 0, 255, Severity.NOTE),
        ("MseLoss of Relu", 0, 255, None),
        ("MseLoss of Relu", -1, 255, None),
        ("MseLoss of Relu", -200, 255, Severity.WARNING),
        ("MseLoss of Tanh", -1, 1.4, None),
    ],
)
def test_labels_beyond_the_bounds_of_what_they_are_compared_with(
    function: str, low: float, high: float, severity: Severity | None
) -> None:
    made = batches(
        lambda step, rank: {"x": noise(step), LABELS: np.where(noise(step, 1) > 0, high, low) * (1 - 1e-6 * step)}
    )
    made.catalog.modules["model", ""] = module_of("Net", ("input",), labels_of=function)
    words = f"the labels are from {low} to {high}, and the "
    expected = [(0, words, severity)] * (severity is not None)
    assert [(one.step, one.what[: len(words)], one.severity) for one in said(made, Data)] == expected


def test_an_input_that_is_not_normalised_on_one_rank_alone_is_a_note_of_this_rank() -> None:
    values = np.arange(8.0) - 3.5
    for is_parallel in (True, False):
        recorded = batches(
            lambda step, rank: {"x": np.roll(values, step) * (1 + 1e-3 * step + rank * 9 - rank**2)}, ranks=3
        )
        recorded.catalog.shared_rates = {("model", "lr.SGD.0")} if is_parallel else set()
        found = said(recorded, Data)
        assert [(one.severity.word, one.ranks) for one in found] == [("note", (1,))] * is_parallel


def test_batches_whose_statistics_are_not_known_are_not_compared() -> None:
    recorded = Recorded()
    for step in range(30):
        for rank in (0, 1):
            unknown = dict.fromkeys(("mean", "std", "absmax", "l2", "sum_sq", "min", "max"), np.nan)
            recorded.add(
                step, "", np.arange(8.0), site="input", name="z", rank=rank, numbers=unknown, dtype="complex64"
            )
    assert said(recorded, Data) == []


@pytest.mark.parametrize("name, is_said", [("BatchNorm1d", False), ("Linear", True)])
def test_a_norm_that_gets_the_input_first_normalises_it(name: str, is_said: bool) -> None:
    recorded = Recorded({"first": name, "norm": "LayerNorm", "": "Net"})
    for step in range(5):
        recorded.add(step, "", noise(step) * 100, site="input", name="x")
        for path in ("first", "norm", ""):
            recorded.add(step, path, noise(step, 1))
    assert bool(said(recorded, Data)) is is_said


def padded(step: int, *, is_inverted: bool = False, ignored: int | None = None, padding: int = 0) -> dict[str, Any]:
    """The arguments of a model of Hugging Face: rows of tokens, of which the last are padding."""
    drawn = np.random.default_rng(step)
    is_token = np.arange(12) < drawn.integers(4, 11, (6, 1))
    tokens = np.where(is_token, drawn.integers(1, 9, (6, 12)), padding)
    labels = tokens if ignored is None else np.where(is_token, tokens, ignored)
    return {"input_ids": tokens, "attention_mask": is_token != is_inverted, "labels": labels}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"ignored": -100}, None),
        ({}, (Severity.NOTE, "labels", "the loss may count padding")),
        ({"is_inverted": True, "ignored": -100}, (Severity.NOTE, "attention_mask", "is 0 where a token")),
        ({"is_inverted": True}, (Severity.NOTE, "attention_mask", "is 0 where a token")),
        ({"padding": 9}, (Severity.NOTE, "labels", "the loss may count padding")),
        ({"padding": 9, "ignored": -100, "is_inverted": True}, None),
    ],
)
def test_padding_that_is_not_left_out_is_named(arguments: Any, expected: tuple[Severity, str, str] | None) -> None:
    found = said(batches(lambda step, rank: padded(step + 99 * rank, **arguments), ranks=2, dtype="int64"), Data)
    assert [(one.severity, one.name) for one in found] == ([expected[:2]] if expected else [])
    assert all(expected and expected[2] in one.what and "padding" in one.detail and one.since == 0 for one in found)


@pytest.mark.parametrize(
    ("large", "expected"), [([0], 0), ([5, 20], 5), ([], None), (list(range(0, 40, 2)), None), ([60], 60)]
)
def test_a_batch_far_larger_than_most_is_named_at_the_beginning_too(large: list[int], expected: int | None) -> None:
    """As of a broken sample, which comes again in each epoch."""

    def of(step: int, rank: int) -> dict[str, Any]:
        return {"x": noise(step, scale=1e3 if step in large else 1.0)}

    found = [one for one in said(batches(of, steps=80), Data) if "far larger" in one.what]
    assert [(one.step, one.severity) for one in found] == (
        [] if expected is None else [(expected, Severity.WARNING)]
    ) and all(one.value > 100 for one in found)


@pytest.mark.parametrize(("kind", "severity"), [("GPT2LMHeadModel", Severity.WARNING), ("Net", Severity.NOTE)])
def test_an_inverted_mask_is_a_warning_where_the_class_tells_what_a_mask_means(kind: str, severity: Severity) -> None:
    recorded = batches(lambda step, rank: padded(step, is_inverted=True, ignored=-100), dtype="int64")
    recorded.catalog.modules["model", ""] = module_of(kind, ("input",))
    (one,) = said(recorded, Data)
    assert (one.severity, "inverted" in one.what) == (severity, severity > Severity.NOTE)


def test_a_mask_that_is_added_to_scores_is_not_inverted() -> None:
    def of(step: int, rank: int) -> dict[str, Any]:
        one = padded(step, ignored=-100)
        return one | {"attention_mask": np.where(one["attention_mask"], 0.0, -1e4)}

    assert said(batches(of, dtype="int64"), Data) == []


@pytest.mark.parametrize(("num_ignored", "is_noted"), [(1, True), (72, False)])
def test_fewer_ignored_labels_than_padding_are_noted(num_ignored: int, is_noted: bool) -> None:
    def of(step: int, rank: int) -> dict[str, Any]:
        one = padded(step)
        at = np.arange(one["labels"].size).reshape(one["labels"].shape)
        return {f"batch.{name}": values for name, values in one.items()} | {
            "batch.labels": np.where(at < num_ignored, -100, one["labels"])
        }

    assert [one.name for one in said(batches(of, dtype="int64"), Data) if "padding" in one.what] == [
        "batch.labels"
    ] * is_noted


@pytest.mark.parametrize("make", [lambda one: one["labels"][:, :8], lambda one: one["labels"][:, 0]])
def test_labels_of_another_length_are_no_padding(make: Any) -> None:
    def of(step: int, rank: int) -> dict[str, Any]:
        return padded(step) | {"labels": make(padded(step))}

    assert said(batches(of, dtype="int64"), Data) == []


def test_batches_without_padding_or_that_disagree_say_nothing() -> None:
    def packed(step: int, rank: int) -> dict[str, Any]:
        return {name: values[:, :4] for name, values in padded(step).items()}

    def mixed(step: int, rank: int) -> dict[str, Any]:
        return padded(step, is_inverted=step != 30, ignored=-100)

    assert said(batches(packed, dtype="int64"), Data) == [] == said(batches(mixed, dtype="int64"), Data)
