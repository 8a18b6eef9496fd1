"""Finds which findings are consequences of other findings. One fault often breaks several rules.

A consequence keeps its severity, and names its cause. The cause becomes as severe as its worst consequence, so that no
consequence is sorted before its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice

from ..sites import GRADIENTS
from .rows import HARMLESS, Catalog
from .rule import Finding, Severity
from .rules.curves import RISEN
from .rules.values import SKIPS, Data


class Link(Enum):
    """The step and the place at which a consequence must be, relative to its cause."""

    LATER = "at the same step or later"
    TOGETHER = "at the same step, or within the records that a loss is averaged over"
    NEAR = "in a module with the same parent, or in one that runs earlier"
    SAME = "at the same parameter, or at the output of its module"
    SKIPPED = "later, where GradScaler skipped the updates of both"
    RATE = "at the step before or later, where the cause says that the learning rate rose"


_MAX_CAUSES = 100
"""The most findings of one rule that are considered as causes, the earliest first."""
_SOON = 10
"""A finding of the rule `loss` may be a consequence of a spike or a jump at most this many steps before it."""
_ANEW = ("nonfinite", "spike", "jump")
"""For these rules, a finding after the end of all spikes is no consequence of a cause before that end."""
_LINKS: tuple[tuple[str, Link, tuple[str, ...]], ...] = (
    ("not_optimized", Link.SAME, ("unchanged", "no_gradient", "dead")),
    ("initialisation", Link.NEAR, ("saturated", "dead", "dead_units", "vanishing", "exploding", "no_gradient")),
    ("data", Link.LATER, ("overfitting", "spike", "jump", "loss", "dead", "outlier_rank", "no_gradient")),
    ("evaluation_mode", Link.LATER, ("overfitting", "evaluation_output")),
    ("evaluation_output", Link.LATER, ("overfitting",)),
    ("not_cleared", Link.LATER, ("spike", "jump", "loss", "update", "exploding")),
    ("spike", Link.RATE, ("update", "nonfinite", "jump", "spike", "loss", "exploding")),
    (
        "update", Link.LATER,
        ("nonfinite", "spike", "jump", "loss", "dead", "dead_units", "no_gradient", "saturated", "attention",
         "unchanged", "exploding", "vanishing"),
    ),
    (
        "nonfinite", Link.LATER,
        ("spike", "jump", "loss", "update", "unchanged", "no_gradient", "dead", "replica", "running_statistics",
         "skipped"),
    ),
    ("nonfinite", Link.SKIPPED, ("nonfinite",)),
    ("skipped", Link.LATER, ("unchanged", "loss")),
    ("clipping", Link.LATER, ("unchanged", "loss", "vanishing")),
    ("jump", Link.TOGETHER, ("spike", "loss", "update")),
    ("spike", Link.TOGETHER, ("spike", "loss")),
    ("jump", Link.LATER, ("replica",)),
    ("replica", Link.LATER, ("replica",)),
    ("no_gradient", Link.SAME, ("unchanged",)),
    ("unchanged", Link.LATER, ("loss",)),
    ("dead", Link.NEAR, ("no_gradient", "vanishing")),
    ("saturated", Link.NEAR, ("no_gradient", "vanishing")),
    ("no_gradient", Link.LATER, ("loss",)),
)  # fmt: skip
"""A cause's rule, the place of its consequences, and the consequences' rules. Causes are searched in this order."""
_RULES = list(dict.fromkeys(rule for rule, link, _ in _LINKS if link is not Link.RATE))
"""The rules whose findings can be causes, in the order of causes. A risen learning rate does not count here."""


def order_of(step: int, site: str, rule: str) -> tuple[int, bool, int]:
    """Return the key that sorts causes before consequences: by step, forward values before gradients, then by rule."""
    return step, site in GRADIENTS, _RULES.index(rule) if rule in _RULES else len(_RULES)


def with_causes(findings: Sequence[Finding], catalog: Catalog) -> list[Finding]:
    """Return the findings, by severity and in the order of causes. In a consequence, `cause` names the cause."""
    first_seen: dict[tuple[str, str], int] = {}
    for key in catalog.series:
        if key.site == "output":
            first_seen.setdefault((key.root, key.module_path), len(first_seen))
    cause_of: dict[int, Finding] = {}
    by_rule: dict[str, list[Finding]] = {}
    for one in sorted(findings, key=lambda one: one.first_step):
        by_rule.setdefault(one.rule, []).append(one)
    for rule, link, rules in _LINKS:
        candidates = [one for other in rules for one in by_rule.get(other, ())]
        causes = (one for one in by_rule.get(rule, ()) if id(one) not in cause_of and HARMLESS not in one.what)
        causes = (one for one in causes if rule != Data.name or one.severity > Severity.NOTE)
        for cause in islice(causes, _MAX_CAUSES if candidates else 0):
            for one in candidates:
                is_free = one is not cause and id(one) not in cause_of and _root_of(cause, cause_of) is not one
                recovered = catalog.recovered_at if one.rule in _ANEW else ()
                others = catalog.trainings if cause.root != one.root else ()
                is_over = any(cause.step < at <= one.first_step for at in (*recovered, *others))
                if is_free and not is_over and _LINKED[link](cause, one, first_seen):
                    cause_of[id(one)] = cause
    cause_of = {number: _root_of(cause, cause_of) for number, cause in cause_of.items()}
    worst: dict[int, Severity] = {}
    for one in findings:
        cause = cause_of.get(id(one), one)
        worst[id(cause)] = max(worst.get(id(cause), one.severity), one.severity)
    raised = [
        one._replace(
            severity=max(worst.get(id(one), one.severity), one.severity),
            cause=words_of(cause_of[id(one)]) if id(one) in cause_of else "",
        )
        for one in findings
    ]
    return sorted(
        raised, key=lambda one: (-one.severity, one.step, bool(one.cause), order_of(one.step, one.site, one.rule))
    )


def _root_of(one: Finding, cause_of: dict[int, Finding]) -> Finding:
    while id(one) in cause_of:
        one = cause_of[id(one)]
    return one


def words_of(cause: Finding) -> str:
    """Return the text with which a consequence names its cause."""
    return f"{cause.rule} of '{cause.module_path}'" + (f" at step {cause.first_step}" if cause.first_step >= 0 else "")


def _is_of_same_ranks(cause: Finding, one: Finding) -> bool:
    return not cause.ranks or not one.ranks or bool({*cause.ranks} & {*one.ranks})


def _is_later(cause: Finding, one: Finding, _: dict[tuple[str, str], int]) -> bool:
    return one.first_step >= cause.first_step and _is_of_same_ranks(cause, one)


def _is_together(cause: Finding, one: Finding, _: dict[tuple[str, str], int]) -> bool:
    reach = _SOON if one.rule == "loss" else 1
    return cause.step <= one.step <= cause.step + reach and _is_of_same_ranks(cause, one)


def _is_near(cause: Finding, one: Finding, first_seen: dict[tuple[str, str], int]) -> bool:
    if cause.root != one.root or not _is_of_same_ranks(cause, one):
        return False
    parent = cause.module_path.rpartition(".")[0]
    if one.module_path.rpartition(".")[0] == parent:
        return True
    at, of_cause = (first_seen.get((some.root, some.module_path)) for some in (one, cause))
    return cause.rule != "initialisation" and at is not None and of_cause is not None and at < of_cause


def _is_same(cause: Finding, one: Finding, _: dict[tuple[str, str], int]) -> bool:
    is_of_module = (cause.root, cause.module_path) == (one.root, one.module_path)
    return is_of_module and (one.site == "output" or cause.name == one.name)


def _are_skipped(cause: Finding, one: Finding, first_seen: dict[tuple[str, str], int]) -> bool:
    return all(SKIPS in some.what for some in (cause, one)) and _is_later(cause, one, first_seen)


def _is_by_rate(cause: Finding, one: Finding, _: dict[tuple[str, str], int]) -> bool:
    """Return whether a risen learning rate links two findings. An update shows one step before its loss does."""
    return RISEN in cause.detail and one.first_step >= cause.first_step - 1 and _is_of_same_ranks(cause, one)


_LINKED: dict[Link, Callable[[Finding, Finding, dict[tuple[str, str], int]], bool]] = {
    Link.LATER: _is_later, Link.TOGETHER: _is_together, Link.NEAR: _is_near, Link.SAME: _is_same,
    Link.SKIPPED: _are_skipped, Link.RATE: _is_by_rate,
}  # fmt: skip
