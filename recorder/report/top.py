"""The head of the page: what ran, whether its record is whole, and what stands out, with links into the pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..analyze.first.first import First
from ..analyze.first.timeline import RecordedValue
from ..read.dumps import RunDump
from ..run.notebook import span
from ..run.run import Run
from ..system.text import counted, listed
from .blocks import Block
from .rows import SeriesKey
from .series.statistics import StatisticsBlocks

_MAX_LISTED = 8
_MAX_CHECKS = 200
_MAX_GAPS = 500
_SPIKE = 30.0
"""A value so many times the median of its series is told."""
_MIN_STEPS = 8
"""Fewest steps: nobody can say what is usual with fewer."""
_MAX_SPIKES = 4
_MANY = 1e6
"""From here on a ratio is told by its power of ten."""


class Told(NamedTuple):
    """One answer of `recorder doctor`."""

    state: str
    """``ok``, ``note`` or ``missing``."""
    text: str
    facts: Mapping[str, Any]
    """Sites, modules, steps, ranks and reason of a gap."""


class Finding(NamedTuple):
    """Something that stands out."""

    text: str
    link: Mapping[str, Any]
    """What the page shows where it is followed: the members of its address."""
    mark: str = "wrong"
    """``wrong``, ``right``, or ``note``."""


def top_block(
    run: Run,
    checks: Sequence[Told],
    stands_out: Sequence[Finding],
    notes: Sequence[str],
    collected: StatisticsBlocks | None,
    numbers: Mapping[str, Any],
    facts: Sequence[tuple[str, str]] = (),
) -> Block:
    """The block of the head.

    Args:
        run: what is drawn.
        checks: whether it is whole.
        stands_out: what others found.
        notes: what they left out.
        collected: the statistics, in which more may stand out.
        numbers: facts of the page itself.
        facts: what `facts_of` says of the run.
    """
    listed = [*stands_out, *_of_dumps(run)]
    if collected is not None:
        listed += [*_of_ranks(collected), *_of_series(collected)]
    missing = [check for check in checks if check.state == "missing"]
    return Block(
        name="top",
        data={
            "run": run.name,
            "facts": list(facts),
            "checks": [[check.state, check.text] for check in [*missing, *checks] if check.text][:_MAX_CHECKS],
            "num_missing": len(missing),
            "findings": [[one.text, dict(one.link), one.mark] for one in listed],
            "notes": list(notes[:_MAX_CHECKS]),
            "dumps": [[dump.first_step, dump.last_step, _of_dump(dump)] for dump in run.dumps],
            **numbers,
        },
    )


def gaps_block(checks: Sequence[Told], modules: Mapping[str, int]) -> Block:
    """Why values are not there, for the holes of the map."""
    gaps: list[dict[str, Any]] = []
    for check in checks:
        details = check.facts
        if not {"reason", "sites", "modules", "steps", "ranks"} <= details.keys() or len(gaps) >= _MAX_GAPS:
            continue
        module_numbers = sorted(modules[path] for path in details["modules"] if path in modules)
        ranks = sorted(rank for rank in details["ranks"] if rank is not None)
        why = check.text.split(": ", 3)
        gaps.append(
            {
                "text": why[2] if len(why) > 3 else check.text,
                "state": check.state,
                "sites": list(details["sites"]),
                "modules": _ranges(module_numbers),
                "steps": _ranges(sorted(details["steps"])),
                "ranks": _ranges(ranks),
            }
        )
    return Block(name="gaps", data={"gaps": gaps})


def _ranges(numbers: Sequence[int]) -> list[int]:
    """Whole numbers as ends of the ranges that they fill: first, last, first, last..."""
    if not numbers:
        return []
    values = np.array(numbers, np.int64)
    breaks = np.flatnonzero(np.diff(values) > 1)
    firsts, lasts = np.r_[values[0], values[breaks + 1]], np.r_[values[breaks], values[-1]]
    return np.stack([firsts, lasts], axis=1).reshape(-1).tolist()


def facts_of(run: Run, *, steps: str, states: Sequence[str], rows: str) -> Iterator[tuple[str, str]]:
    """What ran, for people; which steps there are, how many ranks are in which state, and how much was written."""
    manifests = [writer.manifest for writer in run.writers]
    roots = [root for manifest in manifests for root in manifest.roots]
    models: dict[str, int] = {}
    for root in roots:
        models.setdefault(root.class_name, len(root.modules))
    if models:
        yield "model", ", ".join(f"{name} ({counted(number, 'module')})" for name, number in list(models.items())[:4])
    if (source := run.manifest.merged_from) is not None:
        yield "merged from", source.path
    else:
        yield "ranks", span(run.ranks) + (f" of {run.world_size}" if run.world_size else "")
    kinds = dict.fromkeys(root.data_parallel.kind for root in roots if root.data_parallel is not None)
    if kinds:
        yield "layout", ", ".join(list(kinds)[:4])
    yield "steps", steps
    started = [manifest.started_ns for manifest in manifests if 0 < manifest.started_ns < 1 << 62]
    if started:
        yield "started", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(started) / 1e9))
    yield "state", ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    yield "rows", rows
    if run.proof is not None:
        yield "recorder prove", run.proof.text
    hosts = list(dict.fromkeys(manifest.host for manifest in manifests if manifest.host))
    if hosts:
        yield "hosts", listed(hosts, _MAX_LISTED)
    versions = next((manifest.versions for manifest in manifests if manifest.versions), {})
    told = [f"{name} {version}" for name, version in versions.items()]
    yield "versions", ", ".join([*told, f"format {run.version[0]}.{run.version[1]}"][:_MAX_LISTED])
    rules = next((manifest.rules for manifest in manifests if manifest.rules), ())
    for rule in rules[:_MAX_LISTED]:
        yield "rule", rule


def of_first(search: First) -> Iterator[Finding]:
    """What `recorder first` says."""
    if (bad := search.nonfinite) is not None:
        value = bad.value
        what = " and ".join(f"{n} {word}" for n, word in ((bad.nan_count, "NaN"), (bad.inf_count, "infinite")) if n)
        where = f"step {value.step}, {_named(value)}" + ("" if value.rank is None else f", rank {value.rank}")
        rest = f"{counted(search.num_nonfinite, 'value')} of {counted(search.num_nonfinite_modules, 'module')}"
        yield Finding(f"First NaN or infinity: {where} ({what} of {counted(bad.numel, 'element')})", _link(value))
        if search.num_nonfinite > 1:
            yield Finding(f"From there on {rest} are not finite", {"view": "map", "site": value.site})
    if (differing := search.replica) is not None:
        groups = " | ".join(span(sorted(ranks)) for ranks in differing.groups[:_MAX_LISTED])
        where = f"step {differing.value.step}, {_named(differing.value)}, ranks {groups}"
        yield Finding(f"First replica that differs: {where}", _link(differing.value))
    for one in search.buffers[:_MAX_LISTED]:
        if one.is_stale:
            yield Finding(f"Ranks hold different buffers: step {one.value.step}, {_named(one.value)}", _link(one.value))
    if not search.is_found:
        for told in filter(None, (search.all_finite, search.replicas_agree)):
            yield Finding(told[0].upper() + told[1:], {}, "right")
        if search.why_none_compared:
            yield Finding(f"Replicas were not compared: {search.why_none_compared}", {}, "note")


def _of_dumps(run: Run) -> Iterator[Finding]:
    """What triggers had the ranks write, with a link to these steps."""
    for dump in run.dumps[:_MAX_LISTED]:
        link = {"view": "map", "from": dump.first_step, "to": dump.last_step}
        yield Finding(f"{_of_dump(dump)}; {counted(dump.num_rows, 'row')}", link, "note")
    if (num_more := len(run.dumps) - _MAX_LISTED) > 0:
        yield Finding(f"and {counted(num_more, 'more dump')}: `recorder ls` says them", {}, "note")


def _of_dump(dump: RunDump) -> str:
    return f"dump of steps {dump.first_step} to {dump.last_step}: {dump.reason} ({dump.by})"


def _of_ranks(collected: StatisticsBlocks) -> Iterator[Finding]:
    odd = collected.odd
    for rank in odd.found()[:_MAX_LISTED]:
        told = []
        if odd.far[rank]:
            told.append(f"{odd.far[rank]} of its {odd.compared[rank]} values are far from the median of all ranks")
        if odd.alone[rank]:
            told.append(f"{counted(int(odd.alone[rank]), 'value')} not finite where most ranks' are")
        yield Finding(f"Rank {rank} is odd: {'; '.join(told)}", {"view": "ranks", "rank": rank})


def _of_series(collected: StatisticsBlocks) -> Iterator[Finding]:
    """Values that jump, and outputs that are nothing but zeros."""
    cube = collected.cube
    name = next((name for name in ("l2", "absmax") if name in cube.values), None)
    if name is None or not cube.shape[2]:
        return
    values = np.abs(cube.values[name][:, 0].astype(np.float64))
    known = (~np.isnan(values)).sum(axis=1)
    order = np.sort(values, axis=1)  # NaN stands last
    median = order[np.arange(len(values)), np.maximum((known - 1) // 2, 0)] if len(values) else np.zeros(0)
    largest = np.where(np.isnan(values), -1.0, values)
    at = largest.argmax(axis=1)
    ratio = np.where(
        (known >= _MIN_STEPS) & (median > 0),
        largest[np.arange(len(values)), at] / np.where(median > 0, median, 1.0),
        0.0,
    )
    steps = cube.first_steps
    num_told = 0
    for number in np.argsort(-ratio, kind="stable").tolist():
        if ratio[number] < _SPIKE or num_told == _MAX_SPIKES:
            break
        before = values[number, : at[number]]
        before = before[~np.isnan(before)]
        if not before.size or largest[number, at[number]] < _SPIKE * np.median(before):
            continue  # it was as large from the start, and fell as training went on
        num_told += 1
        key, step = collected.series[number], steps[int(at[number])]
        times = f"{ratio[number]:,.0f}" if ratio[number] < _MANY else f"{ratio[number]:.1e}"
        text = f"{_of_key(key)} jumps: its {name} at step {step} is {times} times its median"
        yield Finding(text, _link_of(key, step, name))


def _of_key(key: SeriesKey) -> str:
    return " ".join(filter(None, (repr(key.module_path), key.site, key.name)))


def _named(value: RecordedValue) -> str:
    return " ".join(filter(None, (repr(value.module_path), value.site, value.name)))


def _link(value: RecordedValue) -> dict[str, Any]:
    link = {"view": "lines", "module": value.module_path, "site": value.site, "name": value.name, "step": value.step}
    return link if value.rank is None else {**link, "rank": value.rank}


def _link_of(key: SeriesKey, step: int, statistic: str) -> dict[str, Any]:
    where = {"module": key.module_path, "site": key.site, "name": key.name}
    return {"view": "lines", **where, "step": step, "stat": statistic}
