"""The rules that a writer had in force: its own and those that it was sent while it ran, each with its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..rules import Rule, parse_rules
from .answers import REFUSED, Answer
from .commands import PAUSE, SET


def rules_in_force(rules: Sequence[Rule], answers: Iterable[Answer]) -> list[Rule]:
    """The rules of a writer over all of its steps: its own and those that it was sent, each with its steps.

    Args:
        rules: the writer's own.
        answers: what became of the commands that it was sent.

    Raises:
        ConfigError: a rule that it was sent is none.
    """
    held = [answer for answer in answers if answer.since is not None and answer.state != REFUSED]
    pauses = [span for answer in held if answer.kind == PAUSE and (span := _span(answer)) is not None]
    sets = [(answer, span) for answer in held if answer.kind == SET and (span := _span(answer)) is not None]
    if not pauses and not sets:
        return list(rules)
    in_force = list(rules) if not pauses else [_at(rule, without((0, None), pauses)) for rule in rules]
    for answer, span in sets:
        sent = parse_rules(list(answer.rules), takes_unknown_sites=True)
        in_force += [_at(rule, without(span, pauses)) for rule in sent]
    return [rule for rule in in_force if rule.steps.slices or rule.steps.powers_of_two]


Span = tuple[int, int | None]
"""Steps from a first to a last one; None: without an end."""


def _at(rule: Rule, spans: Sequence[Span]) -> Rule:
    return replace(rule, steps=rule.steps.within(spans), written="")


def _span(answer: Answer) -> Span | None:
    """Return the steps at which a command was done; None where there are none."""
    assert answer.since is not None, "commands without a first step were left out"
    return None if answer.until is not None and answer.until < answer.since else (answer.since, answer.until)


def without(span: Span, pauses: Iterable[Span]) -> list[Span]:
    """Return what is left of a span without pauses."""
    first, last = span
    spans: list[Span] = []
    for begin, end in sorted(pauses, key=lambda pause: pause[0]):
        if last is not None and begin > last:
            break
        if begin > first:
            spans.append((first, begin - 1))
        if end is None:
            return spans
        first = max(first, end + 1)
    if last is None or first <= last:
        spans.append((first, last))
    return spans
