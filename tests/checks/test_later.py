"""Rules that wait for numbers which no version records."""

from __future__ import annotations

from recorder.checks.book import RULES
from recorder.checks.rules import later
from recorder.rules import KEEPS


def test_a_rule_waits_only_while_nothing_can_record_what_it_reads() -> None:
    waiting = [rule for rule in RULES if issubclass(rule, later._Waiting)]
    assert waiting
    assert [rule.name for rule in waiting if rule.keep in KEEPS] == []
