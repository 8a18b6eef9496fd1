"""The engine: feeds rules with the rows of whole steps, and collects what they say. Knows of no file and no torch.

A whole run, a live page and a writer thread may use it alike. A rule that raises is one warning, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..rules import KEEPS
from .rows import Catalog, Flags, Rows, concatenate
from .rule import Finding, Rule, Severity

_MAX_FINDINGS = 5_000
"""Findings of a rule that are kept, one rank and one value each; the others are counted."""
_ENDLESS = 20_000_000
"""Findings after which a rule is left out: 4,096 ranks with a thousand values each are less than that."""


class Unjudged(NamedTuple):
    """A rule that could not judge the run."""

    rule: str
    why: str
    setting: str
    """What records the next run so that it can; empty where no setting helps."""


class Verdict(NamedTuple):
    """What all rules say."""

    findings: list[Finding]
    """The worst first; findings of several ranks that are alike are one."""
    unjudged: list[Unjudged]
    num_more: dict[str, int]
    """By rule, how many findings were counted and not kept."""


class Engine:
    """Feeds some rules. `add` the rows in the order of steps, then `finish`."""

    def __init__(self, rules: Sequence[Rule], catalog: Catalog) -> None:
        self._rules = list(rules)
        self._catalog = catalog
        self._wanted: dict[str, Flags] = {rule.name: np.zeros(0, np.bool_) for rule in rules}
        """By rule and number of the series."""
        self._pending: list[Rows] = []
        """Rows of the last step, which may not be complete."""
        self._has_rows: set[str] = set()
        self._lacking: dict[str, set[str]] = {rule.name: set(rule.columns) for rule in rules}
        """By rule, the columns of which there was no value yet."""
        self._failed: set[str] = set()
        self._findings: dict[str, list[Finding]] = {rule.name: [] for rule in rules}
        self._num_more: dict[str, int] = {}
        self.last_step = -1
        """The last step that rules have judged."""

    def add(self, rows: Rows) -> None:
        """The next rows, by step; those of the last step wait until a later step is seen."""
        if not len(rows):
            return
        self._pending.append(rows)
        last = int(rows.steps[-1])
        if int(self._pending[0].steps[0]) == last:
            return
        all_rows = concatenate(self._pending)
        num_whole = int(np.searchsorted(all_rows.steps, last))
        self._pending = [all_rows.take(slice(num_whole, None))]
        self._feed(all_rows.take(slice(0, num_whole)))

    def finish(self) -> Verdict:
        """There are no more rows: what was found."""
        self.flush()
        for rule in self._rules:
            if rule.name not in self._failed and not self._lacking[rule.name]:
                self._ask(rule, rule.finish)
        return Verdict(self.take(), list(self._unjudged()), self._num_more)

    def flush(self) -> None:
        """The rows of the last step are all there: rules may judge it."""
        if self._pending:
            self._feed(concatenate(self._pending))
            self._pending = []

    def take(self) -> list[Finding]:
        """What was found since this was last asked, the worst first."""
        findings = [one for some in self._findings.values() for one in some]
        for some in self._findings.values():
            some.clear()
        return merged(findings)

    def _feed(self, rows: Rows) -> None:
        self.last_step = int(rows.steps[-1])
        series = rows.series
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            wanted = self._wanted_by(rule)[series]
            if not wanted.any():
                continue
            own = rows if wanted.all() else rows.take(wanted)
            self._has_rows.add(rule.name)
            lacking = self._lacking[rule.name]
            # An element that is not finite is in no statistic: a row of such elements has none, and lacks nothing.
            is_nan = bool((own["nan_count"] > 0).any())
            lacking -= {name for name in lacking if not np.isnan(own[name]).all() or (is_nan and "." not in name)}
            if not lacking:
                self._ask(rule, partial(rule.add, own))

    def _ask(self, rule: Rule, question: Callable[[], Iterable[Finding]]) -> None:
        """Collect what a rule says."""
        kept = self._findings[rule.name]
        try:
            for one in question():
                if not is_finding(one):
                    raise TypeError(f"it said {str(one)[:50]!r}, which is no Finding")
                if len(kept) < _MAX_FINDINGS:
                    kept.append(one)
                    continue
                num_more = self._num_more[rule.name] = self._num_more.get(rule.name, 0) + 1
                if num_more >= _ENDLESS:
                    raise RuntimeError("it says one thing after the other without an end")
        except Exception as error:  # a rule of a user's may raise anything, and the others go on
            self._fail(rule, error)

    def _fail(self, rule: Rule, error: Exception) -> None:
        if rule.name not in self._failed:
            self._failed.add(rule.name)
            self._findings[rule.name].append(_failure(rule, error))

    def _wanted_by(self, rule: Rule) -> Flags:
        known, keys = self._wanted[rule.name], self._catalog.series
        if len(known) < len(keys):
            new = []
            for key in keys[len(known) :]:
                try:
                    new.append(bool(rule.wants(key)))
                except Exception as error:  # as above
                    self._fail(rule, error)
                    new.append(False)
            known = self._wanted[rule.name] = np.r_[known, np.array(new, np.bool_)]
        return known

    def _unjudged(self) -> Iterator[Unjudged]:
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            lacking = sorted(self._lacking[rule.name])
            if rule.needs and rule.name not in self._has_rows:
                yield Unjudged(rule.name, rule.needs, "")
            elif lacking:
                where = ",".join(rule.sites)
                what = (
                    f"there is no {', '.join(lacking)}"
                    if rule.name in self._has_rows
                    else f"there are no rows of {where}"
                )
                is_known = rule.keep in KEEPS
                why = f"needs keep={rule.keep}" + (
                    f", and {what}" if is_known else ", which this version does not record"
                )
                yield Unjudged(rule.name, why, f"site={where} keep={rule.keep}" if is_known else "")
            elif rule.why_not_judged:
                yield Unjudged(rule.name, rule.why_not_judged, "")


def is_finding(one: object) -> bool:
    """Whether what a rule says is a finding that can be printed: a rule of a user's may say anything."""
    if not isinstance(one, Finding):
        return False
    texts = (one.rule, one.root, one.module_path, one.site, one.name, one.what, one.measure, one.advice, one.detail)
    numbers = (one.step, one.value, one.threshold)
    return (
        isinstance(one.severity, Severity)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, (int, float)) for number in numbers)
        and isinstance(one.since, (int, type(None)))
        and isinstance(one.ranks, tuple)
        and all(isinstance(rank, int) for rank in one.ranks)
    )


def _failure(rule: Rule, error: Exception) -> Finding:
    return Finding(
        rule=rule.name,
        severity=Severity.WARNING,
        step=-1,
        root="",
        module_path="",
        site="",
        name="",
        ranks=(),
        what=f"the rule raised {type(error).__name__} ({error}), and was left out from there on",
        measure="",
        value=float("nan"),
        threshold=float("nan"),
        advice="mend the rule",
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say one thing of one value on several ranks as one; the worst first, then by step."""
    worst_of: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        key = (one.rule, one.severity, one.step, one.since, one.root, one.module_path, one.site, one.name, one.what)
        if key in worst_of:
            known = worst_of[key]
            worse = one if _excess(one) > _excess(known) else known
            worst_of[key] = worse._replace(ranks=tuple(sorted({*known.ranks, *one.ranks})))
        else:
            worst_of[key] = one
    return sorted(worst_of.values(), key=lambda one: (-one.severity, one.step))


def _excess(one: Finding) -> float:
    """How far a number is from its threshold, on either side."""
    return abs(one.value - one.threshold)
