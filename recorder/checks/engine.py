"""The engine: feeds rules with the rows of complete steps, and collects their findings. Knows of no file and no torch.

`recorder check`, a live page and a writer thread use it alike. A rule that raises becomes one warning, and the other
rules go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..rules import KEEPS
from .rows import Catalog, Rows, SeriesKey, concatenate
from .rule import Finding, Rule, Severity

_MAX_FINDINGS = 5_000
"""Findings of a rule that are kept, one rank and one value each; the others are counted."""
_ENDLESS = 20_000_000
"""Findings after which a rule is left out: 4,096 ranks with a thousand values each have fewer."""


class Unjudged(NamedTuple):
    """A rule that could not judge the run."""

    rule: str
    why: str
    setting: str
    """The rule of recording with which the next run can be judged; empty where no setting helps."""


class Verdict(NamedTuple):
    """The findings of all rules, and the rules that could not judge."""

    findings: list[Finding]
    """The worst first; equal findings of several ranks are one."""
    unjudged: list[Unjudged]
    num_more: dict[str, int]
    """By rule, how many findings were counted and not kept."""


class Engine:
    """Feeds rules. `add` the rows in the order of steps, then `finish`."""

    def __init__(self, rules: Sequence[Rule], catalog: Catalog) -> None:
        self._rules = list(rules)
        self._catalog = catalog
        self._pending: list[Rows] = []
        """Rows of the last step, which may not be complete."""
        self._has_rows: set[str] = set()
        self._lacking: dict[str, set[str]] = {rule.name: set(rule.columns) for rule in rules}
        """By rule, the columns that have had no value yet."""
        self._failed: set[str] = set()
        self._findings: dict[str, list[Finding]] = {rule.name: [] for rule in rules}
        self._num_more: dict[str, int] = {}
        self.last_step = -1
        """The last step that rules have judged."""

    def add(self, rows: Rows) -> None:
        """Take the next rows, by step; the rows of the last step wait until a row of a later step comes."""
        if not len(rows):
            return
        self._pending.append(rows)
        last = int(rows.steps[-1])
        if int(self._pending[0].steps[0]) == last:
            return
        all_rows = concatenate(self._pending)
        num_complete = int(np.searchsorted(all_rows.steps, last))
        self._pending = [all_rows.take(slice(num_complete, None))]
        self._feed(all_rows.take(slice(0, num_complete)))

    def finish(self) -> Verdict:
        """Judge the last step, as there are no more rows, and return what was found."""
        self.flush()
        for rule in self._rules:
            if rule.name not in self._failed and not self._lacking[rule.name]:
                self._ask(rule, rule.finish)
        return Verdict(self.take(), list(self._unjudged()), self._num_more)

    def flush(self) -> None:
        """Let the rules judge the last step: all its rows are there."""
        if self._pending:
            self._feed(concatenate(self._pending))
            self._pending = []

    def take(self) -> list[Finding]:
        """The findings since this was last called, the worst first."""
        findings = [one for some in self._findings.values() for one in some]
        for some in self._findings.values():
            some.clear()
        return merged(findings)

    def _feed(self, rows: Rows) -> None:
        self.last_step = int(rows.steps[-1])
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            wanted = rows.where(f"wanted by {rule.name}", partial(self._is_wanted, rule))
            if not wanted.any():
                continue
            own = rows if wanted.all() else rows.take(wanted)
            self._has_rows.add(rule.name)
            lacking = self._lacking[rule.name]
            # Statistics leave out elements that are not finite: a row of such elements has none, and lacks nothing.
            is_nan = bool((own["nan_count"] > 0).any())
            lacking -= {name for name in lacking if not np.isnan(own[name]).all() or (is_nan and "." not in name)}
            if not lacking:
                self._ask(rule, partial(rule.add, own))

    def _ask(self, rule: Rule, question: Callable[[], Iterable[Finding]]) -> None:
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
        except Exception as error:  # a user's rule may raise anything, and the other rules go on
            self._fail(rule, error)

    def _is_wanted(self, rule: Rule, key: SeriesKey) -> bool:
        try:
            return bool(rule.wants(key))
        except Exception as error:  # as above
            self._fail(rule, error)
            return False

    def _fail(self, rule: Rule, error: Exception) -> None:
        if rule.name not in self._failed:
            self._failed.add(rule.name)
            what = f"the rule raised {type(error).__name__} ({error}), and was left out from there on"
            self._findings[rule.name].append(
                Finding(
                    rule.name, Severity.WARNING, step=-1, root="", module_path="", site="", name="", ranks=(),
                    what=what, measure="", value=math.nan, threshold=math.nan, advice="mend the rule",
                )
            )  # fmt: skip

    def _unjudged(self) -> Iterator[Unjudged]:
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            lacking, has_rows = sorted(self._lacking[rule.name]), rule.name in self._has_rows
            if rule.needs and not has_rows:
                yield Unjudged(rule.name, rule.needs, "")
            elif lacking and rule.keep not in KEEPS:
                yield Unjudged(rule.name, f"needs keep={rule.keep}, which this version does not record", "")
            elif lacking:
                where = ",".join(rule.sites)
                what = f"there is no {', '.join(lacking)}" if has_rows else f"there are no rows of {where}"
                yield Unjudged(rule.name, f"needs keep={rule.keep}, and {what}", f"site={where} keep={rule.keep}")
            elif rule.why_not_judged:
                yield Unjudged(rule.name, rule.why_not_judged, "")


def is_finding(one: object) -> bool:
    """Whether an object that a rule yielded is a finding that can be printed: a user's rule may yield anything."""
    if not isinstance(one, Finding):
        return False
    texts = (one.rule, one.root, one.module_path, one.site, one.name, one.what, one.measure, one.advice, one.detail)
    return (
        isinstance(one.severity, Severity)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, (int, float)) for number in (one.step, one.value, one.threshold))
        and isinstance(one.since, (int, type(None)))
        and isinstance(one.ranks, tuple)
        and all(isinstance(rank, int) for rank in one.ranks)
    )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with equal findings of several ranks on one value joined; the worst first, then by step."""
    worst_of: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        key = (one.rule, one.severity, one.step, one.since, one.root, one.module_path, one.site, one.name, one.what)
        known = worst_of.get(key, one)
        worse = max(known, one, key=lambda some: abs(some.value - some.threshold))
        worst_of[key] = worse if known is one else worse._replace(ranks=tuple(sorted({*known.ranks, *one.ranks})))
    return sorted(worst_of.values(), key=lambda one: (-one.severity, one.step))
