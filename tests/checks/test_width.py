"""The rule that checks coordinates: outputs that grow with the width after a few steps."""

from __future__ import annotations

import pytest

from recorder.checks.engine import Verdict
from recorder.checks.normal import Sizes
from recorder.checks.rules.comparing import Width
from tests.checks.rows import Recorded
from tests.checks.test_rules import OPTIMIZER, noise


def of_width(width: int, exponent: float, late: float = 1.0) -> Recorded:
    """Outputs that grow as a power of the width from step 5 on, and the weights of a hidden layer."""
    recorded = Recorded()
    for step in range(14):
        scale = (width / 8) ** exponent if step >= 5 else 1.0
        scale *= late if step >= 10 else 1.0
        recorded.add(step, "up", noise(step, shape=(16, width), scale=scale))
        recorded.add(step, "head", noise(step, 1, shape=(16, 4)))
        recorded.add(step, "up", noise(step, shape=(width, 4)), **OPTIMIZER, site="param")
    return recorded


def judged(own: Recorded, *others: Recorded) -> Verdict:
    sizes = []
    for other in others:
        one = Sizes(other.catalog, 10)
        one.add(other.rows(sorted(other._rows, key=lambda row: row[0])))
        sizes.append(one)

    def made(catalog: object) -> Width:
        rule = Width(own.catalog)
        rule.other_widths = sizes
        return rule

    return own.judge(made)


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, ["up"]), (0.5, ["up"]), (0.0, []), (-0.5, [])])
def test_an_output_that_grows_with_the_width_is_named(exponent: float, expected: list[str]) -> None:
    found = judged(of_width(8, exponent), of_width(16, exponent), of_width(64, exponent)).findings
    assert [one.module_path for one in found] == expected
    if found:
        assert found[0].value == pytest.approx(exponent, abs=0.1)
        assert found[0].detail == "widths 1, 2, 8 times this"


def test_later_steps_do_not_count() -> None:
    assert judged(of_width(8, 0.0), of_width(16, 0.0), of_width(64, 0.0, late=1e6)).findings == []


def test_without_runs_of_other_widths_nothing_is_judged() -> None:
    for others, words in (((), "needs --width RUN"), ((of_width(8, 1.0),), "these widths are alike")):
        (one,) = judged(of_width(8, 1.0), *others).unjudged
        assert words in one.why
