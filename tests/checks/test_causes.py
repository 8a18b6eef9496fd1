"""Consequences of a fault are set under their cause."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recorder.checks.causes import with_causes, words_of
from recorder.checks.rows import About, Catalog, SeriesKey
from recorder.checks.rule import Finding, Severity
from recorder.checks.rules.data import ALL_IGNORED
from recorder.checks.rules.losses import WRONG_SIGN
from recorder.checks.rules.no_gradient import NO_INPUT
from recorder.checks.rules.values import BY_PARAMETER

PATHS = ("blocks.0.up", "blocks.0.act", "blocks.1.up", "blocks.1.act")


def finding(rule: str, step: int, path: str = "", ranks: tuple[int, ...] = (0,), **more: Any) -> Finding:
    severity = more.pop("severity", Severity.WARNING)
    one = Finding(rule, severity, step, "model", path, "output", "", ranks, f"{rule}!", "", math.nan, math.nan, "")
    return one._replace(**more)


def catalog() -> Catalog:
    made = Catalog()
    for path in PATHS:
        made.number(SeriesKey("model", path, "output", "", "train", "forward", ""), About("float32", (4,)))
    return made


def causes(*findings: Finding) -> dict[tuple[str, int, tuple[int, ...]], str]:
    return {(one.rule, one.step, one.ranks): one.cause for one in with_causes(findings, catalog())}


def test_a_rate_that_rose_explains_what_is_not_finite_after_it() -> None:
    spike = finding("spike", 61, detail="the learning rate lr.SGD.0 rose 30 times at step 60, from 0.05 to 1.5")
    update, nonfinite, before = finding("update", 60), finding("nonfinite", 66), finding("jump", 40)
    assert causes(spike, update, nonfinite, before) == {
        ("spike", 61, (0,)): "", ("update", 60, (0,)): words_of(spike), ("nonfinite", 66, (0,)): words_of(spike),
        ("jump", 40, (0,)): "",
    }  # fmt: skip
    assert causes(spike._replace(detail=""), nonfinite)["nonfinite", 66, (0,)] == ""


def test_one_batch_is_one_finding() -> None:
    jump, spike, loss = finding("jump", 90, severity=Severity.ERROR), finding("spike", 90), finding("loss", 97)
    assert causes(spike, loss, jump) == {
        ("jump", 90, (0,)): "", ("spike", 90, (0,)): words_of(jump), ("loss", 97, (0,)): words_of(jump),
    }  # fmt: skip


def test_what_comes_before_or_on_another_rank_is_no_consequence() -> None:
    jump = finding("jump", 90)
    assert causes(jump, finding("spike", 80), finding("spike", 90, ranks=(1,))) == {
        ("jump", 90, (0,)): "", ("spike", 80, (0,)): "", ("spike", 90, (1,)): "",
    }  # fmt: skip


def test_a_dead_output_stops_the_gradients_before_it_and_beside_it_alone() -> None:
    dead = finding("dead", 5, "blocks.1.act", since=0)
    of = {
        path: finding("no_gradient", 7, path, since=0, name=path, ranks=(number,), severity=Severity.NOTE)
        for number, path in enumerate(("blocks.0.up", "blocks.1.up", "head"))
    }
    judged = with_causes([*of.values(), dead._replace(ranks=())], catalog())
    assert {one.module_path: bool(one.cause) for one in judged if one.rule == "no_gradient"} == {
        "blocks.0.up": True, "blocks.1.up": True, "head": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("site", "severity", "is_cause"),
    [("grad_output", Severity.ERROR, True), ("grad_output", Severity.NOTE, False), ("output", Severity.ERROR, False)],
)
def test_a_parameter_that_a_gradient_made_nan_spreads_the_nan(site: str, severity: Severity, is_cause: bool) -> None:
    first = finding("nonfinite", 80, "blocks.1.up", site=site, severity=severity)
    after = finding("nonfinite", 90, "blocks.0.up", what=f"not finite{BY_PARAMETER}: weight", severity=Severity.ERROR)
    assert causes(first, after)["nonfinite", 90, (0,)] == (words_of(first) if is_cause else "")


@pytest.mark.parametrize(("path", "is_next"), [("blocks.1.up", True), ("blocks.1.act", False)])
def test_a_module_whose_input_is_zero_follows_from_the_place_where_gradients_become_zero(
    path: str, is_next: bool
) -> None:
    cut = finding("no_gradient", 0, "blocks.0.up", since=0, name="weight")
    cut = cut._replace(what=f"zero; it becomes zero between the outputs of 'blocks.0.up' and {path!r}")
    after = finding("no_gradient", 0, "blocks.1.up", since=0, name="weight", what="zero" + NO_INPUT)
    (judged,) = (one for one in with_causes([after, cut], catalog()) if one.module_path == "blocks.1.up")
    assert judged.cause == (words_of(cut) if is_next else "")


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.NOTE])
def test_the_output_of_a_layer_that_never_had_a_gradient_is_dead_for_it(severity: Severity) -> None:
    of_weight = finding("no_gradient", 0, "blocks.0.up", site="param", name="weight", ranks=(), severity=severity)
    cause = of_weight._replace(what="never had a gradient, though modules that are called after it have")
    (dead,) = (
        one for one in with_causes([cause, finding("dead", 3, "blocks.0.up", since=0)], catalog()) if one.rule == "dead"
    )
    assert bool(dead.cause) is (severity is Severity.WARNING)


@pytest.mark.parametrize(
    ("severity", "root", "follows"),
    [(Severity.NOTE, "model", True), (Severity.NOTE, "critic", False), (Severity.WARNING, "critic", True)],
)
def test_a_parameter_without_a_gradient_explains_the_loss(severity: Severity, root: str, follows: bool) -> None:
    """A note on another model does not: the last bias of a critic never has a gradient."""
    cause = finding("no_gradient", 0, "head", site="grad", name="bias", severity=severity, root=root)
    assert bool(causes(cause, finding("loss", 90))["loss", 90, (0,)]) is follows


def test_the_output_of_a_layer_that_no_optimizer_has_is_dead_for_it() -> None:
    cause = finding("not_optimized", 0, "blocks.0.up", site="param", name="weight", ranks=())
    dead, other = finding("dead", 3, "blocks.0.up", since=0), finding("dead", 4, "blocks.1.up", since=0)
    assert causes(cause, dead, other) == {
        ("not_optimized", 0, ()): "", ("dead", 3, (0,)): words_of(cause), ("dead", 4, (0,)): "",
    }  # fmt: skip


def test_labels_that_are_all_ignored_explain_a_loss_of_nan_and_what_follows_from_it() -> None:
    data = finding("data", 19, site="input", since=0, what=ALL_IGNORED)
    loss, still = finding("nonfinite", 0, site="scalar", severity=Severity.ERROR), finding("unchanged", 1)
    judged = {one.rule: one for one in with_causes([loss, still, data], catalog())}
    assert (judged["data"].severity, judged["data"].cause) == (Severity.ERROR, "")
    assert judged["nonfinite"].cause == judged["unchanged"].cause == words_of(data)
    assert causes(data._replace(since=5), loss)["nonfinite", 0, (0,)] == "", "the loss was NaN before"
    equal = data._replace(what="all labels of a batch are equal")
    assert causes(equal, loss)["nonfinite", 0, (0,)] == "", "a loss of one class is finite"


def test_a_cause_is_as_severe_as_its_worst_consequence_and_stands_first() -> None:
    update = finding("update", 1)
    judged = with_causes([finding("nonfinite", 3, severity=Severity.ERROR), update], catalog())
    assert [(one.rule, one.severity) for one in judged] == [("update", Severity.ERROR), ("nonfinite", Severity.ERROR)]
    assert judged[1].cause == "update of '' at step 1"


def test_findings_of_a_step_are_in_the_order_of_causes() -> None:
    forward, spike = finding("spike", 3, ranks=(1,)), finding("spike", 3, site="grad")
    jump, dead = finding("jump", 3, site="grad"), finding("dead", 2)
    judged = with_causes([spike, jump, forward, dead], catalog())
    assert [(one.rule, one.site) for one in judged] == [
        ("dead", "output"), ("spike", "output"), ("jump", "grad"), ("spike", "grad"),
    ]  # fmt: skip


def test_a_chain_ends_at_its_first_cause() -> None:
    update, nonfinite, spike = finding("update", 1), finding("nonfinite", 3), finding("replica", 4)
    assert set(causes(update, nonfinite, spike).values()) == {"", words_of(update)}


def test_a_nan_that_comes_after_skipped_steps_is_no_consequence_of_them() -> None:
    what = "the value is not finite; GradScaler skipped the update"
    skipped = finding("nonfinite", 0, what=what, severity=Severity.NOTE)
    again = finding("nonfinite", 5, "blocks.0.up", what=what, severity=Severity.NOTE)
    real = finding("nonfinite", 137, severity=Severity.ERROR)
    assert causes(skipped, again, real) == {
        ("nonfinite", 0, (0,)): "", ("nonfinite", 5, (0,)): words_of(skipped), ("nonfinite", 137, (0,)): "",
    }  # fmt: skip


def test_what_came_before_a_wrong_sign_was_found_follows_from_it() -> None:
    sign, early = finding("loss", 55, what=f"the loss falls below zero {WRONG_SIGN}"), finding("spike", 34)
    assert causes(early, sign) == {("loss", 55, (0,)): "", ("spike", 34, (0,)): words_of(sign)}
    assert causes(early, sign._replace(what="the loss has risen"))["spike", 34, (0,)] == ""
