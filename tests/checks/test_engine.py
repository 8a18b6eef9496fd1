"""The engine: whole steps, rules that raise, rules that lack what they read, thresholds and rules of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from recorder.checks.book import RULES, find_rule, read_assignment, read_table
from recorder.checks.engine import Engine
from recorder.checks.rows import Rows
from recorder.checks.rule import CheckRule, Finding, Severity
from recorder.checks.rules.activations import DeadUnits
from recorder.errors import ConfigError
from tests.checks.rows import Recorded


class Steps(CheckRule):
    """Remembers what it was fed."""

    name: ClassVar[str] = "steps"
    sentence: ClassVar[str] = "It finds nothing."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    advice: ClassVar[str] = ""
    fed: ClassVar[list[list[int]]] = []

    def add(self, rows: Rows) -> Iterator[Finding]:
        self.fed.append(rows.steps.tolist())
        yield from ()


class Raising(Steps):
    name: ClassVar[str] = "raising"

    def add(self, rows: Rows) -> Iterator[Finding]:
        raise ValueError("of mine")


class RaisingAtOnce(Steps):
    name: ClassVar[str] = "unmade"

    def __init__(self, *arguments: Any) -> None:
        raise KeyError("of mine")


class Forgetful(Steps):
    name: ClassVar[str] = "forgetful"

    def __init__(self, *arguments: Any) -> None:
        self.catalog = arguments[0]


class Wrong(Steps):
    name: ClassVar[str] = "wrong"
    columns: ClassVar[tuple[str, ...]] = None  # type: ignore[assignment]


def recorded() -> Recorded:
    made = Recorded()
    for step in range(3):
        for path in ("a", "b"):
            made.add(step, path, np.ones(4) * (step + 1))
    return made


def test_a_rule_sees_whole_steps_however_the_rows_come() -> None:
    for rows_a_batch, expected in (
        (1, [[0, 0], [1, 1], [2, 2]]),
        (3, [[0, 0], [1, 1], [2, 2]]),
        (9, [[0, 0, 1, 1], [2, 2]]),
    ):
        Steps.fed.clear()
        recorded().judge(Steps, rows_a_batch)
        assert [sorted(some) for some in Steps.fed] == [sorted(some) for some in expected]


def test_a_rule_that_raises_is_one_warning_and_the_others_go_on() -> None:
    made = recorded()
    Steps.fed.clear()
    engine = Engine([Raising(made.catalog), Steps(made.catalog)], made.catalog)
    for step in range(3):
        engine.add(made.rows([one for one in made._rows if one[0] == step]))
    (one,) = engine.finish().findings
    assert (one.rule, one.severity) == ("raising", Severity.WARNING) and "ValueError (of mine)" in one.what
    assert len(Steps.fed) == 3


def test_a_rule_without_what_it_reads_is_not_judged_and_says_what_to_record() -> None:
    class Elsewhere(Steps):
        name: ClassVar[str] = "elsewhere"
        sites: ClassVar[tuple[str, ...]] = ("grad",)

    (one,) = recorded().judge(Elsewhere).unjudged
    assert one.setting == "site=grad keep=stats" and "no rows of grad" in one.why
    (later,) = recorded().judge(DeadUnits).unjudged
    assert "needs keep=units" in later.why and later.setting == "site=output keep=units"


def test_ranks_that_say_one_thing_are_one_finding() -> None:
    made = Recorded()
    for rank in (0, 1, 2):
        made.add(0, "up", [np.nan], rank=rank)
    (one,) = made.judge(find_rule("nonfinite", RULES)).findings
    assert one.ranks == (0, 1, 2)


_OF_FACTS = ("replica", "restart", "not_optimized", "not_cleared", "loss_argument", "evaluation_mode", "batch_first")
"""Rules that read no statistics."""


def test_every_rule_says_what_it_reads_and_where_its_thresholds_come_from() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.sentence.endswith(".") and rule.sites and (rule.columns or rule.name in _OF_FACTS) and rule.advice
        assert all(one.unit and one.source for one in rule.settings)


def test_a_threshold_as_it_is_typed() -> None:
    assert read_assignment("spike.sigmas=8", RULES) == ("spike", "sigmas", 8.0)


OWN = {"name": "loud", "site": "output", "statistic": "absmax", "above": 2, "records": 2, "module": "a"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"spike": {"sigma": 8}}, "did you mean 'sigmas'"),
        ({"spikes": {"sigmas": 8}}, "did you mean 'spike'"),
        ({"spike": {"sigmas": "many"}}, "'many' is no number"),
        ({"spike": 8}, "expected a table"),
        ({"rule": OWN}, "[[rule]]"),
        ({"rule": [OWN | {"abve": 3}]}, "did you mean 'above'"),
        ({"rule": [OWN | {"below": 3}]}, "one number, above or below"),
        ({"rule": [OWN | {"statistic": "absmx"}]}, "did you mean 'absmax'"),
        ({"rule": [OWN | {"site": "outputs"}]}, "did you mean 'output'"),
        ({"rule": [OWN | {"name": "spike"}]}, "no rule's name yet"),
        ({"rule": [OWN | {"severity": "bad"}]}, "note, warning, error"),
        ({"rule": [OWN | {"records": 0}]}, "from 1 on"),
        ({"rule": [OWN | {"records": 10**400}]}, "from 1 on"),
        ({"rule": [OWN | {"severity": ["error"]}]}, "note, warning, error"),
        ({"rule": [OWN | {"above": 10**400}]}, "one number, above or below"),
        ({"rule": [OWN | {"above": float("nan")}]}, "one number, above or below"),
        ({"rule": [OWN | {"above": True}]}, "one number, above or below"),
        ({"rule": [OWN, OWN | {"above": 3}]}, "no rule's name yet"),
        ({"spike": {"sigmas": 10**400}}, "is no number"),
        ({"spike": {"sigmas": -1}}, "-1: expected a number of 0 or more"),
        ({"spike": {"least": 0}}, "0: expected a number of 1 to 1,000,000"),
        ({"spike": {"window": 10**9}}, "1000000000: expected a number of 1 to 1,000,000"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_the_nearest_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_table(wrong, "check.toml")
    assert message in str(caught.value) and "check.toml" in str(caught.value)


def test_a_rule_of_the_users_is_a_statistic_and_a_limit() -> None:
    thresholds, (rule,) = read_table({"spike": {"sigmas": 8}, "rule": [OWN | {"severity": "error"}]}, "check.toml")
    assert thresholds == {"spike": {"sigmas": 8.0}}
    made = Recorded()
    for step in range(4):
        for path in ("a", "b"):
            made.add(step, path, np.full(4, 1.0 + step))
    (one,) = made.judge(rule).findings
    assert (one.module_path, one.step, one.value, one.severity) == ("a", 3, 4.0, Severity.ERROR)


class Talking(Steps):
    name: ClassVar[str] = "talking"
    says: ClassVar[Any] = None

    def add(self, rows: Rows) -> Any:
        return self.says


@pytest.mark.parametrize("says", [None, 3, ["nothing"], [None], [{}], [("a", "b")]])
def test_a_rule_that_says_what_is_no_finding_is_one_warning(says: Any) -> None:
    Talking.says = says
    (one,) = recorded().judge(Talking).findings
    assert (one.rule, one.severity) == ("talking", Severity.WARNING)
    assert "raised TypeError" in one.what


def test_a_finding_of_wrong_types_is_none() -> None:
    class Odd(Steps):
        name: ClassVar[str] = "odd"

        def add(self, rows: Rows) -> Iterator[Finding]:
            yield self.finding(0, 1, "w", "m", 1.0, 2.0)._replace(severity=7)  # type: ignore[arg-type]

    (one,) = recorded().judge(Odd).findings
    assert "no Finding" in one.what


@pytest.mark.parametrize(
    ("what", "measure", "numbers", "said"),
    [
        ("it stays", "records without a change", (3, 3), "it stays in 3 records"),
        ("it is unlike", "robust z", (8.04, 6), "it is unlike, at 8.04 times the usual distance"),
        ("the loss spikes", "loss", (9, 2), "the loss spikes: it is 9, where at most 2 was expected"),
        ("it is not finite; a note", "NaN elements", (1, 1), "it is not finite (NaN in 1 of its elements); a note"),
        ("the gradient is zero", "share of zeros", (1, 1), "the gradient is zero"),
        ("it is zero", "share of zeros", (0.995, 0.99), "it is zero (99.5 % of them)"),
        ("still: is its momentum 0?", "records without a change", (3, 3), "still in 3 records: is its momentum 0?"),
        ("mean is below", "mean", (1, 2), "mean is below (the mean is 1, where at least 2 was expected)"),
        ("it is apart", "times the median", (9, 8), "it is apart, 9 times the median"),
        ("no number", "", (float("nan"), 0), "no number"),
    ],
)
def test_a_finding_says_its_number_in_words(what: str, measure: str, numbers: tuple[float, float], said: str) -> None:
    where = "model", "", "input", "x", (0,)
    one = Finding("rule", Severity.WARNING, 7, *where, what, measure, numbers[0], numbers[1], "", since=5)
    assert one.text == f"since step 5, (the model) input x: {said}"


def test_no_rule_says_the_name_of_its_measure_and_its_threshold() -> None:
    for rule in RULES:
        for part in getattr(rule, "parts", (rule,)):
            if hasattr(part, "measure"):
                one = Finding("", Severity.NOTE, 0, "", "", "", "", (), "w", part.measure, 2.0, 3.0, "")
                assert "threshold" not in one.said and f"{part.measure} 2" not in one.said and one.said != "w"


def test_a_rule_that_talks_without_an_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Steps):
        name: ClassVar[str] = "endless"

        def add(self, rows: Rows) -> Iterator[Finding]:
            while True:
                yield self.finding(0, 1, "w", "m", 1.0, 2.0)

    monkeypatch.setattr("recorder.checks.engine._ENDLESS", 10_000)
    verdict = recorded().judge(Endless)
    assert "without an end" in verdict.findings[0].what or "without an end" in verdict.findings[-1].what
    assert verdict.num_more["endless"] == 10_000


def test_rules_that_give_one_name_to_different_questions_get_their_own_answers() -> None:
    recorded = Recorded()
    for path in ("up", "down"):
        recorded.add(0, path, [1.0])
    rows = recorded.rows(recorded._rows)
    assert rows.where("mine", lambda key: key.module_path == "up").tolist() == [True, False]
    assert rows.where("mine", lambda key: key.module_path == "down").tolist() == [False, True]
