"""Compares the replicas of a run for the check rule `replica`: by fingerprints and statistics, else by the probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ...checks.rule import ComparisonResult, Finding, Severity
from ...checks.rules.comparing import Replica
from ...run.run import Run
from ...run.step_ranges import Mapper, map_serially
from ...system.text import counted
from ..first.replica_groups import Differing, factor_of
from ..first.replicas import FINDINGS, ApartByProbe, ReplicaFinder, apart_by_probe, compare_replicas

_APART = "ranks that share the value hold different values"
_OWN_BUFFERS = "each rank has a buffer of its own, as DDP has broadcast_buffers=False or forward_sync_buffers=False"
_SYNC = "nothing is wrong if each rank is to have its own; a SyncBatchNorm has the statistics of the whole batch"
_JOIN = "with DDP's join, a step need not be the same update on all ranks: compare the last step of each rank"
NEVER_EQUAL = "ranks have held different values from the first record on"


def replicas_of(run: Run, mapper: Mapper = map_serially) -> ComparisonResult:
    """Return the first difference of replicas at each site, as findings. `mapper` reads ranges of steps."""
    if len(run.ranks) < 2 and not run.is_merged:
        return ComparisonResult((), Replica.needs)
    search = compare_replicas(run, mapper)
    numbers = Counter(value.site for value in search.values.values())
    probed = {one.key[2]: one for one in apart_by_probe(run, search.equal_values)}
    wrappers = {root.name: root.data_parallel for writer in run.writers for root in writer.manifest.roots}
    kinds = {name: wrapper.kind for name, wrapper in wrappers.items() if wrapper is not None}
    findings = [
        _finding(one, numbers[one.value.site], probed.pop(site, None))._replace(advice=_advice(one, search, kinds))
        for site, one in search.firsts.items()
    ]
    findings += [_probed_finding(one) for one in probed.values()]
    stale = (one for one in search.buffers if one.is_stale)
    findings += [_of_buffer(one) for one in stale]
    joined = {name for name, wrapper in wrappers.items() if wrapper is not None and wrapper.joins}
    if joined and len({writer.last_step for writer in run.writers if writer.state == "closed"}) == 1:
        joined = set()
    for i, one in enumerate(findings):
        if one.root in joined:  # ranks count their own steps, and some have made fewer
            findings[i] = one._replace(severity=Severity.NOTE, advice=_JOIN)
    why = search.why_none() or "there is no parameter, gradient or optimizer state to compare"
    is_compared = bool(findings) or not search.num_compared.keys().isdisjoint(FINDINGS)
    notes = [f"replicas: {note}" for note in search.notes()]
    return ComparisonResult(findings, "" if is_compared else f"{Replica.needs}: {why}", notes)


def _of_buffer(one: Differing) -> Finding:
    """Return a finding on a buffer. It is a note if the buffer has running statistics, as the norms of detectors do."""
    found = _finding(one, 1, None, _OWN_BUFFERS)
    is_running = found.name in ("running_mean", "running_var", "num_batches_tracked")
    return found._replace(severity=Severity.NOTE, advice=_SYNC) if is_running else found


def _advice(one: Differing, search: ReplicaFinder, kinds: Mapping[str, str]) -> str:
    """Return what to do about replicas that differ. If no gradient was ever equal, nothing reduces the gradients.

    If one rank's gradients are a multiple of the other's, something scaled them after they were reduced.
    """
    root, _, site, _ = one.value.key
    differing = [name for name in search.values if (name[0], name[2]) == (root, site)]
    were_equal = any((name[0], name[2]) == (root, site) for name in search.equal_values)
    is_unreduced = site == "grad" and len(differing) > 1 and not (were_equal or one.is_assumed or factor_of(one))
    if one.was_never_equal:
        return Replica.advice_unwrapped
    if is_unreduced:
        return Replica.advice_unsharded if kinds.get(root) == "fsdp2" else Replica.advice_unreduced
    return Replica.advice


def _finding(one: Differing, number: int, probed: ApartByProbe | None, what: str = _APART) -> Finding:
    value = one.value
    details = [f"by {one.by}"]
    if probed is not None and probed.step < value.step:
        details.append(f"by the probe apart since step {probed.step}, equal at step {probed.equal_step}")
    elif one.last_equal is not None:
        details.append(f"equal at step {one.last_equal.step}")
    details += filter(None, [factor_of(one) or (probed.factor if probed is not None else "")])
    details += [f"the first of {counted(number, 'value')} at this site that differ"] if number > 1 else []
    details += ["neither DDP nor FSDP was seen around this model"] if one.is_assumed else []
    severity = Severity.WARNING if one.is_assumed else Replica.severity
    what = NEVER_EQUAL if one.was_never_equal else what
    since = probed.step if probed is not None and probed.step < value.step else None
    # The largest group of equal ranks counts as right. If two groups are equally large, neither is known to be right.
    has_odd = len(one.groups) > 1 and len(one.groups[0]) > len(one.groups[1])
    ranks = [rank for ranks in one.groups[has_odd:] for rank in ranks]
    return _of(value.step, value.key, ranks, details, severity, what, float(len(one.groups)), since)


def _probed_finding(one: ApartByProbe) -> Finding:
    details = ["by the probe", f"equal at step {one.equal_step}", *filter(None, [one.factor])]
    return _of(one.step, one.key, one.ranks, details, Replica.severity, _APART, 2.0, None)


def _of(
    step: int, key: tuple[str, str, str, str], ranks: Iterable[int], details: list[str], severity: Severity, what: str,
    num_groups: float, since: int | None,
) -> Finding:  # fmt: skip
    return Finding(
        Replica.name, severity, step, *key, ranks=tuple(sorted(ranks)), what=what, measure="different values",
        value=num_groups, threshold=1.0, advice=Replica.advice, detail=", ".join(details), since=since,
    )  # fmt: skip
