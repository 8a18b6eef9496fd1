"""Replicas that differ, as findings of the rule `replica`: what `recorder first` says, by rows alone, of whole runs.

Must never read a payload.
"""

from __future__ import annotations

from collections import Counter

from ...checks.rule import Finding, Replicas, Severity
from ...checks.rules.ranks import Replica
from ...run.run import Run
from ...system.text import counted
from ..first.replica_groups import Differing
from ..first.replicas import FINDINGS, compare_replicas


def replicas_of(run: Run) -> Replicas:
    """Compare the replicas of a run: the first that differs of each site is a finding."""
    if len(run.ranks) < 2 and not run.is_merged:
        return Replicas((), Replica.needs)
    search = compare_replicas(run)
    numbers = Counter(value.site for value in search.values)
    findings = [_finding(one, numbers[one.value.site]) for one in search.firsts]
    findings += [
        _finding(one, 1, "nothing makes the ranks' buffers equal again") for one in search.buffers if one.is_stale
    ]
    why = search.why_none or "there is no parameter, gradient or optimizer state to compare"
    is_compared = bool(findings) or not search.num_compared.keys().isdisjoint(FINDINGS)
    return Replicas(
        findings, "" if is_compared else f"{Replica.needs}: {why}", [f"replicas: {n}" for n in search.notes]
    )


def _finding(one: Differing, number: int, what: str = "ranks that share the value hold different ones") -> Finding:
    value = one.value
    told = [f"by {one.by}"]
    told += [f"equal at step {one.last_equal.step}"] if one.last_equal is not None else []
    told += [f"the first of {counted(number, 'value')} at this site that differ"] if number > 1 else []
    told += ["neither DDP nor FSDP was seen around this model"] if one.is_assumed else []
    return Finding(
        rule=Replica.name,
        severity=Severity.WARNING if one.is_assumed else Replica.severity,
        step=value.step,
        root=value.root,
        module_path=value.module_path,
        site=value.site,
        name=value.name,
        ranks=tuple(sorted(rank for ranks in one.groups[1:] or one.groups for rank in ranks)),
        what=what,
        measure="groups of equal ranks",
        value=float(len(one.groups)),
        threshold=1.0,
        advice=Replica.advice,
        detail=", ".join(told),
    )
