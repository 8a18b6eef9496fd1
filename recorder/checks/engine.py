"""The engine passes the rows of complete steps to rules, and collects their findings. It uses no file and no torch.

`recorder check`, a live page and a writer thread all use the engine. A rule that raises an error becomes one warning,
and the other rules continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..rules import KEEPS
from ..sites import UPDATE
from .rows import IS_PROBE, Catalog, Rows, SeriesKey, concatenate
from .rule import CheckRule, Finding, Severity

_MAX_FINDINGS = 5_000
"""The most findings of one rule that are kept, each on one value on one rank. Further findings are only counted."""
_ENDLESS = 20_000_000
"""The number of findings after which a rule is stopped. A thousand bad values on each of 4,096 ranks are fewer."""


class Unjudged(NamedTuple):
    """A rule that could not judge the run."""

    rule: str
    why: str
    setting: str
    """The recording rule with which the next run could be judged; empty if no recording rule would help."""


class Verdict(NamedTuple):
    """The findings of all rules, and the rules that could not judge the run."""

    findings: list[Finding]
    """The findings, the most severe first. Equal findings of several ranks are joined into one."""
    unjudged: list[Unjudged]
    num_more: dict[str, int]
    """By rule, the number of its findings that were counted but not kept."""


class Engine:
    """Passes rows to rules. Call `add` with the rows in the order of steps, and then `finish`."""

    def __init__(self, rules: Sequence[CheckRule], catalog: Catalog) -> None:
        self._rules = list(rules)
        self._catalog = catalog
        self._pending: list[Rows] = []
        """The rows of the last step so far, which may not be complete yet."""
        self._has_rows: set[str] = set()
        self._lacking: dict[str, set[str]] = {rule.name: set(rule.columns) for rule in rules}
        """By rule, the columns of the rule that have had no value so far."""
        self._failed: set[str] = set()
        self._findings: dict[str, list[Finding]] = {rule.name: [] for rule in rules}
        self._num_more: dict[str, int] = {}
        self.last_step = -1

    def add(self, rows: Rows) -> None:
        """Take the next rows, ordered by step. The last step's rows wait until a row of a later step comes."""
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
        """Judge the last step, and return the findings and the rules that could not judge. No rows may follow."""
        self._catalog.is_at_end = True
        self._flush()
        self._catalog.is_at_end = False
        for rule in self._rules:
            if rule.name not in self._failed and not self._lacking[rule.name]:
                self._ask(rule, rule.finish)
                self._revise(rule)
        return Verdict(self.take(), list(self._unjudged()), self._num_more)

    def add_complete(self, rows: Rows) -> None:
        """Take the next rows, and judge all of them at once. The caller knows that the last step is complete."""
        if len(rows):
            self._pending.append(rows)
            self._flush()

    def take(self) -> list[Finding]:
        """Return the findings since the last call of this method, the most severe first."""
        findings = [one for some in self._findings.values() for one in some]
        for some in self._findings.values():
            some.clear()
        return merged(findings)

    def _flush(self) -> None:
        """Judge all rows that have come, the last step's too."""
        if self._pending:
            self._feed(concatenate(self._pending))
            self._pending = []

    def _feed(self, rows: Rows) -> None:
        self.last_step = int(rows.steps[-1])
        self._catalog.note_trainings(rows)
        all_rows, recorded = rows, rows.without_probe()
        for rule in self._rules:
            if rule.name in self._failed:
                continue
            rows = all_rows if rule.reads_probe else recorded
            wanted = rows.where(f"wanted by {rule.name}", partial(self._is_wanted, rule))
            if not wanted.any():
                continue
            own = rows if wanted.all() else rows.take(wanted)
            self._has_rows.add(rule.name)
            lacking = self._lacking[rule.name]
            # A tensor without a finite element has no statistics, but the run may still have the column.
            is_nan = bool((own["nan_count"] > 0).any())
            if rule.reads_probe and (own[IS_PROBE] == 1).any():
                lacking.clear()  # a number of the probe counts as a value
            lacking -= {name for name in lacking if not np.isnan(own[name]).all() or (is_nan and "." not in name)}
            if not lacking:
                self._ask(rule, partial(rule.add, own))

    def _ask(self, rule: CheckRule, question: Callable[[], Iterable[Finding]]) -> None:
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
                    raise RuntimeError("it yields findings without an end")
        except Exception as error:  # a user's rule may raise anything, and the other rules must still run
            self._fail(rule, error)

    def _revise(self, rule: CheckRule) -> None:
        try:
            self._findings[rule.name][:] = [rule.revised(one) for one in self._findings[rule.name]]
        except Exception as error:  # a user's rule may raise anything here, too
            self._fail(rule, error)

    def _is_wanted(self, rule: CheckRule, key: SeriesKey) -> bool:
        try:
            return bool(rule.wants(key))
        except Exception as error:  # a user's rule may raise anything here, too
            self._fail(rule, error)
            return False

    def _fail(self, rule: CheckRule, error: Exception) -> None:
        if rule.name not in self._failed:
            self._failed.add(rule.name)
            what = f"the rule raised {type(error).__name__} ({error}), and was not run after that"
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
                where = ",".join(site for site in rule.sites if site != UPDATE)  # no rule selects an update
                what = f"there is no {', '.join(lacking)}" if has_rows else f"there are no rows of {where}"
                yield Unjudged(rule.name, f"needs keep={rule.keep}, and {what}", f"site={where} keep={rule.keep}")
            elif rule.why_not_judged:
                yield Unjudged(rule.name, rule.why_not_judged, "")


def is_finding(one: object) -> bool:
    """Return whether an object is a finding that can be printed. A user's rule may yield any object."""
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
    """Join equal findings of several ranks on one value. Sort by severity, the worst first, then by step."""
    worst_of: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        key = (one.rule, one.severity, one.step, one.since, one.root, one.module_path, one.site, one.name, one.what)
        known = worst_of.get(key, one)
        worse = max(known, one, key=lambda some: abs(some.value - some.threshold))
        worst_of[key] = worse if known is one else worse._replace(ranks=tuple(sorted({*known.ranks, *one.ranks})))
    return sorted(worst_of.values(), key=lambda one: (-one.severity, one.step))
