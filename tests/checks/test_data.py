"""The rule on batches: of two ranks alike, the same again and again, of one value; labels that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recorder.checks.rules.values import Data
from recorder.system.text import counted
from tests.checks.rows import Recorded
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


def test_a_longer_cycle_is_a_training_set() -> None:
    assert said(batches(lambda step, rank: {"x": noise(step % 6, rank)}), Data) == []


def test_an_input_of_equal_elements_is_named() -> None:
    found = said(batches(lambda step, rank: {"x": np.full(8, float(step)), "mask": np.ones(4)}), Data)
    assert [(one.name, one.step, one.since, one.what) for one in found] == [
        ("x", 19, 0, "all elements of the input are equal")
    ]


def test_labels_that_never_change_or_are_all_alike_are_named() -> None:
    for make, words in (
        (lambda step: np.arange(8) % 4, "the labels never change"),
        (lambda step: np.full(8, step % 4), "all labels of a batch are equal"),
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
    half = np.r_[np.nan, np.zeros(7)]
    broken = batches(lambda step, rank: {"x": noise(step) * (1.0 if step < 10 else half)}, steps=24)
    assert broken.judge(Data, rows_a_batch).findings == [], "a NaN is no zero"


@pytest.mark.parametrize("num_steps", [0, 10])
def test_a_condition_or_a_state_may_be_zero(num_steps: int) -> None:
    made = batches(lambda step, rank: {"x": noise(step), "h": noise(step, 1) * (step < num_steps)})
    assert said(made, Data) == []
