"""Compares the replicas of a run for the rule `replica`: bit by bit where rows were recorded, else by the probe.

The probe has one number of a parameter at each step. Equal numbers prove nothing; different ones prove that replicas
came apart, and when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...checks.rule import Finding, Replicas, Severity
from ...checks.rules.comparing import Replica
from ...errors import CorruptError
from ...numerics.keys import group_rows
from ...numerics.moments import integers
from ...run.probe import probe_size, probe_tables
from ...run.run import Run
from ...system.text import counted
from ..first.replica_groups import Differing
from ..first.replicas import FINDINGS, compare_replicas
from .reading import MOST_PROBED

_APART = "ranks that share the value hold different ones"
NEVER_EQUAL = "ranks have held different ones from the first record on"
_NAMES = ("root", "module_path", "site", "name")


def replicas_of(run: Run) -> Replicas:
    """Compare the replicas of a run; the first difference at each site is a finding."""
    if len(run.ranks) < 2 and not run.is_merged:
        return Replicas((), Replica.needs)
    search = compare_replicas(run)
    numbers = Counter(value.site for value in search.values.values())
    probed = {one.key[2]: one for one in _apart_by_probe(run, search.equal_values)}
    findings = [_finding(one, numbers[one.value.site], probed.pop(site, None)) for site, one in search.firsts.items()]
    findings += [_probed_finding(one) for one in probed.values()]
    stale = (one for one in search.buffers if one.is_stale)
    findings += [_finding(one, 1, None, "nothing makes the ranks' buffers equal again") for one in stale]
    why = search.why_none() or "there is no parameter, gradient or optimizer state to compare"
    is_compared = bool(findings) or not search.num_compared.keys().isdisjoint(FINDINGS)
    notes = [f"replicas: {note}" for note in search.notes()]
    return Replicas(findings, "" if is_compared else f"{Replica.needs}: {why}", notes)


class _ApartByProbe(NamedTuple):
    """The first value of a site of which ranks have different numbers in the probe."""

    key: tuple[str, str, str, str]
    step: int
    equal_step: int
    """The last step before, at which all ranks had the same number."""
    ranks: tuple[int, ...]
    """The ranks outside the largest group of equal ranks."""


def _apart_by_probe(run: Run, names: set[tuple[str, str, str, str]]) -> list[_ApartByProbe]:
    size = probe_size(run.writers)
    if size is None or size.num_numbers > MOST_PROBED or not names:
        return []
    tables: list[Any] = []
    try:
        for table in probe_tables(run.writers):
            values = group_rows(table, _NAMES)
            is_named = [one in names for one in _names_at(table, values.firsts)]
            is_wanted = np.array(is_named, np.bool_)[values.ids] & table.column("global_numel").is_null().to_numpy()
            tables.append(table.filter(pa.array(is_wanted)))
    except CorruptError:  # the reading of the rows says which part is damaged
        return []
    table = pa.concat_tables(tables).unify_dictionaries()
    steps, ranks = integers(table.column("step")), integers(table.column("rank"))
    sizes = table.column("l2").to_numpy().astype(np.float32)  # a shard may have no more digits
    values = group_rows(table, _NAMES)
    groups = group_rows(table, (*_NAMES, "phase", "scope", "attempt", "step"))
    low, high = np.full(groups.num_groups, np.inf, np.float32), np.zeros(groups.num_groups, np.float32)
    np.minimum.at(low, groups.ids, sizes)
    np.maximum.at(high, groups.ids, sizes)
    value_of, step_of, differs = values.ids[groups.firsts], steps[groups.firsts], low != high
    first = np.full(values.num_groups, np.iinfo(np.int64).max)
    np.minimum.at(first, value_of[differs], step_of[differs])
    last_equal = np.full(values.num_groups, -1)
    is_before = ~differs & (step_of < first[value_of])
    np.maximum.at(last_equal, value_of[is_before], step_of[is_before])
    apart = np.flatnonzero(np.isin(np.arange(values.num_groups), value_of[differs]) & (last_equal >= 0))
    found: dict[str, _ApartByProbe] = {}
    apart = apart[np.argsort(first[apart], kind="stable")]
    for value, key in zip(apart.tolist(), _names_at(table, values.firsts[apart]), strict=True):
        if key[2] not in found:
            rows = np.flatnonzero((values.ids == value) & (steps == first[value]))
            rows = rows[np.argsort(ranks[rows])]
            _, firsts, inverse, counts = np.unique(
                sizes[rows], return_index=True, return_inverse=True, return_counts=True
            )
            most = min(range(len(counts)), key=lambda group: (-counts[group], firsts[group]))
            odd = tuple(ranks[rows][inverse != most].tolist())
            found[key[2]] = _ApartByProbe(key, int(first[value]), int(last_equal[value]), odd)
    return list(found.values())


def _names_at(table: Any, rows: Any) -> list[tuple[str, str, str, str]]:
    return list(zip(*(table.column(name).take(pa.array(rows)).to_pylist() for name in _NAMES), strict=True))


def _finding(one: Differing, number: int, probed: _ApartByProbe | None, what: str = _APART) -> Finding:
    value = one.value
    details = [f"by {one.by}"]
    if probed is not None and probed.step < value.step:
        details.append(f"by the probe apart since step {probed.step}, equal at step {probed.equal_step}")
    elif one.last_equal is not None:
        details.append(f"equal at step {one.last_equal.step}")
    details += [f"the first of {counted(number, 'value')} at this site that differ"] if number > 1 else []
    details += ["neither DDP nor FSDP was seen around this model"] if one.is_assumed else []
    details += [] if value.site in FINDINGS else ["a sum over these ranks may have been left out"]
    severity = Severity.WARNING if one.is_assumed else Replica.severity
    what = NEVER_EQUAL if one.was_never_equal else what
    since = probed.step if probed is not None and probed.step < value.step else None
    return _of(value.step, value.key, (rank for ranks in one.groups[1:] or one.groups for rank in ranks), details,
               severity, what, float(len(one.groups)), since)  # fmt: skip


def _probed_finding(one: _ApartByProbe) -> Finding:
    details = ["by the probe", f"equal at step {one.equal_step}"]
    return _of(one.step, one.key, one.ranks, details, Replica.severity, _APART, 2.0, None)


def _of(
    step: int, key: tuple[str, str, str, str], ranks: Iterable[int], details: list[str], severity: Severity, what: str,
    num_groups: float, since: int | None,
) -> Finding:  # fmt: skip
    return Finding(
        Replica.name, severity, step, *key, ranks=tuple(sorted(ranks)), what=what, measure="groups of equal ranks",
        value=num_groups, threshold=1.0, advice=Replica.advice, detail=", ".join(details), since=since,
    )  # fmt: skip
