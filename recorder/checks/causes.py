"""Finds which findings are consequences of other findings. One fault often breaks several rules.

A consequence keeps its severity, and names its cause. The cause becomes as severe as its worst consequence, so that no
consequence is sorted before its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from ..sites import GRADIENTS
from ..system.text import module_in_words
from .rows import HARMLESS, Catalog
from .rule import Finding, Severity
from .rules.comparing import OTHER_RATE, is_effect_of_input
from .rules.data import ALL_IGNORED, Data
from .rules.gradients import ONE_ELEMENT
from .rules.leaps import RISEN
from .rules.losses import WRONG_SIGN
from .rules.no_gradient import NO_GRADIENT, NO_INPUT
from .rules.parameters import Unchanged
from .rules.programs import PROGRAM_RULES, LossArgument
from .rules.values import BY_PARAMETER, SKIPS

_MAX_CAUSES = 100
"""The most findings of one rule that are considered as causes, the earliest first."""
_SOON = 10
"""A finding of the rule `loss` may be a consequence of a spike or a jump at most this many steps before it."""
_ANEW = ("nonfinite", "spike", "jump")
"""For these rules, a finding after the end of all spikes is no consequence of a cause before that end."""
_Seen = dict[tuple[str, str], int]
"""By root and module path, the order in which the outputs of modules were first seen."""


def _is_of_same_ranks(cause: Finding, one: Finding) -> bool:
    return not cause.ranks or not one.ranks or bool({*cause.ranks} & {*one.ranks})


def _is_later(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether a finding is at the same step as its cause, or later."""
    return one.first_step >= cause.first_step and _is_of_same_ranks(cause, one)


def _is_of_root(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a finding is on the model of its cause, at the same step or later."""
    return cause.root == one.root and _is_later(cause, one, first_seen)


def _is_together(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether a finding is at its cause's step, or within the records that a loss is averaged over."""
    reach = _SOON if one.rule == "loss" else 1
    return cause.step <= one.step <= cause.step + reach and _is_of_same_ranks(cause, one)


def _is_near(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a finding is in a module with the parent of the cause's module, or in one that runs earlier."""
    if cause.root != one.root or not _is_of_same_ranks(cause, one):
        return False
    parent = cause.module_path.rpartition(".")[0]
    if one.module_path.rpartition(".")[0] == parent:
        return True
    at, of_cause = (first_seen.get((some.root, some.module_path)) for some in (one, cause))
    return cause.rule != "initialisation" and at is not None and of_cause is not None and at < of_cause


def _is_same(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether a finding is on the parameter of its cause, or on the output of the parameter's module."""
    is_of_module = (cause.root, cause.module_path) == (one.root, one.module_path)
    return is_of_module and (one.site == "output" or cause.name == one.name)


def _is_untrained(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether the weight of a dead output never had a gradient, so that it stays as it began, such as zero."""
    is_sure = cause.severity > Severity.NOTE and cause.what.startswith(NO_GRADIENT)
    return is_sure and _is_same(cause, one, first_seen)


def _has_no_input(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether an input is zero in the module from which on gradients become zero."""
    is_next = one.what.endswith(NO_INPUT) and cause.what.endswith(f" and {module_in_words(one.module_path)}")
    return is_next and cause.root == one.root and _is_of_same_ranks(cause, one)


def _is_unoptimized(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a finding is on a model of which some parameters that matter have no optimizer."""
    return cause.severity > Severity.NOTE and _is_of_root(cause, one, first_seen)


def _is_unlearnt(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether parameters of a loss's model have no gradient, or those of another model, and not as a note.

    The last bias of a critic has none, which is a note, and does not matter to the loss of the generator.
    """
    return (cause.severity > Severity.NOTE or cause.root == one.root) and _is_later(cause, one, first_seen)


def _are_skipped(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a finding is later than its cause, and GradScaler skipped the updates of both."""
    return all(SKIPS in some.what for some in (cause, one)) and _is_later(cause, one, first_seen)


def _has_spread(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a value is not finite because its parameter is not, which an earlier gradient has made so."""
    is_of_gradient = cause.site in GRADIENTS and cause.severity >= one.severity and BY_PARAMETER in one.what
    return is_of_gradient and _is_of_root(cause, one, first_seen)


def _is_unlabelled(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether a finding is not earlier than labels that the loss ignores: the mean over no label is NaN."""
    return cause.what == ALL_IGNORED and _is_later(cause, one, first_seen)


def _is_by_rate(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether a risen learning rate links two findings. An update shows one step before its loss does."""
    return RISEN in cause.detail and one.first_step >= cause.first_step - 1 and _is_of_same_ranks(cause, one)


def _has_other_rate(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether the cause is another learning rate on one rank, and a finding is later or at the same step."""
    is_later = cause.root == one.root and one.first_step >= cause.first_step
    return cause.what.startswith(OTHER_RATE) and is_later and one.site != "input"


def _has_other_input(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether the cause is an input that differs between ranks, and a finding follows from it."""
    return is_effect_of_input(cause, one)


def _has_no_bound(cause: Finding, one: Finding, first_seen: _Seen) -> bool:
    """Return whether the cause is a loss that falls without bound, as it gets no logarithms of probabilities."""
    return "log-probabilities" in cause.what and _is_of_root(cause, one, first_seen)


def _has_wrong_sign(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether the cause is a loss of the wrong sign, which is found after much of what follows from it."""
    return WRONG_SIGN in cause.what and cause.root == one.root and _is_of_same_ranks(cause, one)


def _passes_nothing(cause: Finding, one: Finding, _: _Seen) -> bool:
    """Return whether the cause is a norm over one element, and a finding is on its model."""
    return cause.what == ONE_ELEMENT and cause.root == one.root


_LINKS: tuple[tuple[str, Callable[[Finding, Finding, _Seen], bool], tuple[str, ...]], ...] = (
    ("not_optimized", _is_same, ("unchanged", "no_gradient", "dead")),
    ("not_optimized", _is_unoptimized, ("loss",)),
    ("initialisation", _is_near, ("saturated", "dead", "dead_units", "vanishing", "exploding", "no_gradient")),
    ("data", _is_later, ("overfitting", "spike", "jump", "loss", "dead", "outlier_rank", "no_gradient", "vanishing")),
    ("loss_argument", _is_of_root, ("loss", "saturated", "vanishing", "dead", "update")),
    ("loss_argument", _has_no_bound, ("nonfinite",)),
    ("evaluation_mode", _is_later, ("overfitting", "evaluation_output")),
    ("evaluation_output", _is_later, ("overfitting",)),
    ("not_cleared", _is_later, ("spike", "jump", "loss", "update", "exploding")),
    ("outlier_rank", _has_other_rate, ("replica", "outlier_rank")),
    ("outlier_rank", _has_other_input, ("outlier_rank",)),
    ("loss", _has_wrong_sign, ("spike", "jump", "update", "exploding", "saturated", "dead", "nonfinite", "unchanged")),
    ("spike", _is_by_rate, ("update", "nonfinite", "jump", "spike", "loss", "exploding")),
    (
        "update", _is_later,
        ("nonfinite", "spike", "jump", "loss", "dead", "dead_units", "no_gradient", "saturated", "attention",
         "unchanged", "exploding", "vanishing", "evaluation_output"),
    ),
    (
        "nonfinite", _is_later,
        ("spike", "jump", "loss", "update", "unchanged", "no_gradient", "dead", "replica", "running_statistics",
         "skipped"),
    ),
    ("nonfinite", _are_skipped, ("nonfinite",)),
    ("nonfinite", _has_spread, ("nonfinite",)),
    ("data", _is_unlabelled, ("nonfinite", "unchanged")),
    ("skipped", _is_later, ("unchanged", "loss")),
    ("clipping", _is_later, ("unchanged", "loss", "vanishing")),
    ("jump", _is_together, ("spike", "loss", "update")),
    ("spike", _is_together, ("spike", "loss")),
    ("jump", _is_later, ("replica",)),
    ("replica", _is_later, ("replica",)),
    ("no_gradient", _is_untrained, ("dead",)),
    ("no_gradient", _is_same, ("unchanged",)),
    ("no_gradient", _has_no_input, ("no_gradient",)),
    ("unchanged", _is_later, ("loss",)),
    ("vanishing", _passes_nothing, ("vanishing", "no_gradient", "loss")),
    ("dead", _is_near, ("no_gradient", "vanishing")),
    ("saturated", _is_near, ("no_gradient", "vanishing")),
    ("no_gradient", _is_unlearnt, ("loss",)),
)  # fmt: skip
"""A cause's rule, whether a finding lies where consequences do, and their rules. Causes are searched in this order."""
_OF_PROGRAM = {rule.name for rule in PROGRAM_RULES}
_RULES = list(dict.fromkeys(rule for rule, is_linked, _ in _LINKS if is_linked is not _is_by_rate))
"""The rules whose findings can be causes, in the order of causes. A risen learning rate does not count here."""


def order_of(step: int, site: str, rule: str) -> tuple[int, bool, int]:
    """Return the key that sorts causes before consequences: by step, forward values before gradients, then by rule."""
    return step, site in GRADIENTS, _RULES.index(rule) if rule in _RULES else len(_RULES)


def with_causes(findings: Sequence[Finding], catalog: Catalog) -> list[Finding]:
    """Return the findings, by severity and in the order of causes. In a consequence, `cause` names the cause."""
    first_seen: _Seen = {}
    for key in catalog.series:
        if key.site == "output":
            first_seen.setdefault((key.root, key.module_path), len(first_seen))
    cause_of: dict[int, Finding] = {}
    by_rule: dict[str, list[Finding]] = {}
    for one in sorted(findings, key=lambda one: one.first_step):
        by_rule.setdefault(one.rule, []).append(one)
    for rule, is_linked, rules in _LINKS:
        candidates = [one for other in rules for one in by_rule.get(other, ())]
        causes = (one for one in by_rule.get(rule, ()) if id(one) not in cause_of and HARMLESS not in one.what)
        causes = (one for one in causes if rule not in (Data.name, LossArgument.name) or one.severity > Severity.NOTE)
        for cause in islice(causes, _MAX_CAUSES if candidates else 0):
            for one in candidates:
                is_free = one is not cause and id(one) not in cause_of and _root_of(cause, cause_of) is not one
                recovered = catalog.recovered_at if one.rule in _ANEW else ()
                others = catalog.trainings if cause.root != one.root else ()
                is_over = any(cause.step < at <= one.first_step for at in (*recovered, *others))
                if is_free and not is_over and is_linked(cause, one, first_seen):
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
    return sorted(raised, key=_order)


def _order(one: Finding) -> tuple[object, ...]:
    """Return the key that sorts findings: the most severe first, then what the program does, then by step.

    What the program does may be seen some steps after it has begun, and after the first numbers that follow from it.
    """
    is_of_numbers = bool(one.cause) or one.rule not in _OF_PROGRAM
    return -one.severity, is_of_numbers, one.step, bool(one.cause), order_of(one.step, one.site, one.rule)


def _root_of(one: Finding, cause_of: dict[int, Finding]) -> Finding:
    while id(one) in cause_of:
        one = cause_of[id(one)]
    return one


def kind_of(one: Finding) -> tuple[str, str, str]:
    """Return what findings have in common that are told as one: the rule, what it says, and the site."""
    # In findings of the rule `unchanged`, `what` is only the reason why a parameter does not change.
    return one.rule, one.what if one.rule != Unchanged.name else "", one.site


def words_of(cause: Finding) -> str:
    """Return the text with which a consequence names its cause."""
    return f"{cause.rule} of '{cause.module_path}'" + (f" at step {cause.first_step}" if cause.first_step >= 0 else "")
