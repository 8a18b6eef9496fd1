"""Which rules are in force at a step is a function of what a manifest says, and pauses win."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recorder.format.commands import IN_FORCE, PAUSE, REFUSED, SET, Answer, Span, rules_in_force
from recorder.rules import Schedule, parse_rules

OWN = parse_rules("site=output steps=::3; site=grad steps=pow2; site=param steps=5,20:40:7")
_STEPS = range(90)


def answer(kind: str, since: int | None, until: int | None, rules: str = "", state: str = IN_FORCE) -> Answer:
    return Answer(number=1, id="", kind=kind, state=state, since=since, until=until, rules=(rules,) if rules else ())


_spans = st.tuples(st.integers(0, 80), st.none() | st.integers(0, 90))


@given(
    st.lists(_spans, max_size=3),
    st.lists(st.tuples(_spans, st.sampled_from(["::1", "::4", "pow2", "7,9"])), max_size=3),
)
def test_rules_are_in_force_between_their_commands_and_outside_of_pauses(
    pauses: list[Span], sets: list[tuple[Span, str]]
) -> None:
    answers = [answer(PAUSE, since, until) for since, until in pauses]
    answers += [answer(SET, since, until, f"site=tap steps={steps}") for (since, until), steps in sets]
    found = rules_in_force(OWN, answers)

    def inside(span: tuple[int, int | None], step: int) -> bool:
        return span[0] <= step and (span[1] is None or step <= span[1])

    for step in _STEPS:
        is_paused = any(inside(span, step) for span in pauses)
        expected = {rule.site for rule in OWN if step in rule.steps and not is_paused}
        if not is_paused and any(inside(span, step) and step in Schedule.parse(steps) for span, steps in sets):
            expected.add(("tap",))
        assert {rule.site for rule in found if step in rule.steps} == expected
        again = parse_rules([rule.text for rule in found])
        assert [step in rule.steps for rule in again] == [step in rule.steps for rule in found]


def test_a_command_that_was_refused_or_never_began_changes_nothing() -> None:
    answers = [answer(SET, 3, None, "site=tap", REFUSED), answer(SET, None, None, "site=tap"), answer(PAUSE, 5, 4)]
    assert rules_in_force(OWN, answers) == list(OWN)


def test_a_rule_that_was_sent_is_shown_with_its_steps() -> None:
    (*_, sent) = rules_in_force(OWN, [answer(SET, 100, 104, "site=output steps=::2 keep=tensor")])
    assert sent.text == "site=output steps=100:105:2 keep=tensor"
