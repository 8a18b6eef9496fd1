"""The head of the page: what ran, whether its record is complete, and conspicuous values, with links to pictures."""

from __future__ import annotations

import shlex
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from ..analyze.check.check import MAX_FINDINGS, JoinedFindings, command_of, sentence, told_of, where_of
from ..analyze.doctor.reply import Check
from ..checks.rule import Finding, Severity
from ..run.notes import raised
from ..run.run import Run, RunDump
from ..system.text import MODEL, counted, listed, named, site_in_words, value_in_words
from .axes import DrawnSeries
from .blocks import PageBlock
from .statistics import StatisticsBlocks

_MAX_LISTED = 8
_MAX_CHECKS = 200
_MAX_GAPS = 500
_JUMP = 30.0
"""A jump is reported if a value is this many times the value predicted from the records before it."""
_FLOOR = 1e-3
"""A value below this fraction of the median of its site's largest values is near zero. Its jumps mean nothing."""
_NUM_BEFORE = 4
"""The number of earlier records from which the usual size and growth of a series are computed."""
_MIN_STEPS = 8
"""The fewest steps of a series that is searched for jumps. Fewer steps do not show what is usual."""
_MAX_JUMPS = 4
_NO_TENSOR = "No tensor was recorded, only scalars: nothing is known of parameters, activations and gradients"
_MANY = 1e6
"""A ratio of at least this value is written as a power of ten."""


class Highlight(NamedTuple):
    """A sentence at the head of the page about something conspicuous."""

    text: str
    link: Mapping[str, Any]
    """The parameters in the page's address to which the sentence links."""
    mark: str = "wrong"
    """How the sentence is marked: ``wrong``, ``right``, or ``note``."""
    steps: tuple[int, int] | None = None
    """The first and the last step of the finding. None if the finding belongs to no step."""
    ranks: tuple[int, ...] = ()
    about: Mapping[str, str] = MappingProxyType({})
    """The cells of the finding's row in the table: ``what``, ``module``, ``value``, ``step``, ``rank``, ``size``,
    ``advice``, and ``type``, the lines to type. Empty if the sentence is all there is to say."""
    more: tuple[Highlight, ...] = ()
    """The findings that follow from this one."""
    rule: str = ""
    """The rule of `recorder check` that made the finding. Empty if the page itself found it."""


def top_block(
    run: Run, checks: Sequence[Check], judged: Sequence[Highlight], collected: StatisticsBlocks | None,
    numbers: Mapping[str, Any], facts: Sequence[tuple[str, str]] = (), *, notes: Sequence[str] = (),
    is_growing: bool = False,
) -> PageBlock:  # fmt: skip
    """Return the block of the head of the page.

    `checks` say whether the record is complete. `judged` and `notes` are the findings and omissions of `recorder
    check`. `numbers` are further members of the block. While the run `is_growing`, statistics are not searched for
    jumps.
    """
    ended = [Highlight(f"{one[0].upper()}{one[1:]}", {}, "note") for one in raised(run)]
    if ended:  # the training is not right, whatever the rules of check found in its rows
        judged = [*ended, *(one._replace(mark="note") if one.mark == "right" else one for one in judged)]
    listed = [*_of_dumps(run)]
    if collected is not None and not collected.series:
        num_wrong = sum(one.mark == "wrong" for one in judged)
        judged = [*judged[:num_wrong], Highlight(_NO_TENSOR, {}, "note"), *judged[num_wrong:]]
    if collected is not None and not is_growing:
        listed += [*_of_ranks(collected), *_jumps(collected)]
    steps = [] if collected is None else collected.cube.first_steps or collected.scalar_cube.first_steps
    missing = [check for check in checks if check.state == "missing"]
    return PageBlock(
        name="top",
        data={
            "run": run.name,
            "facts": list(facts),
            "checks": [[check.state, check.text] for check in [*missing, *checks] if check.text][:_MAX_CHECKS],
            "num_missing": len(missing),
            "findings": [
                [*_packed(one), [_packed(other) for other in more], {**one.about, "first": one.steps and one.steps[0]}]
                for one, *more in folded(judged, listed, steps)
            ],
            "notes": list(notes[:_MAX_CHECKS]),
            "first": first_nonfinite(judged),
            "dumps": [[dump.first_step, dump.last_step, _of_dump(dump)] for dump in run.dumps],
            **numbers,
        },
    )


def _packed(one: Highlight) -> list[Any]:
    return [one.text, dict(one.link), one.mark]


def folded(judged: Sequence[Highlight], own: Sequence[Highlight], steps: Sequence[int]) -> list[list[Highlight]]:
    """Return groups of findings. The page shows the first finding of a group, and folds the others below it.

    Below a finding of `recorder check` are the findings that follow from it, and what the page itself found on the same
    rank, or at the same or adjacent steps. Any other finding of the page is a group of its own. `steps` are the
    recorded steps, ascending.
    """
    groups = [[one, *one.more] for one in judged]
    for one in own:
        near = (group for group in groups if any(_are_near(one, other, steps) for other in group))
        group = next(near, None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _are_near(one: Highlight, other: Highlight, steps: Sequence[int]) -> bool:
    if one.steps is None or other.steps is None:
        return not {*one.ranks}.isdisjoint(other.ranks)
    before, after = bisect_left(steps, other.steps[0]), bisect_right(steps, other.steps[1])
    first = steps[before - 1] if before else other.steps[0]
    last = steps[after] if after < len(steps) else other.steps[1]
    return first <= one.steps[1] and one.steps[0] <= last


def gaps_block(checks: Sequence[Check], modules: Mapping[str, int]) -> PageBlock:
    """Return the block of reasons why values are missing. The map of the page shows them as gaps."""
    gaps: list[dict[str, Any]] = []
    for check in checks:
        details = check.members
        if not {"reason", "sites", "modules", "steps", "ranks"} <= details.keys() or len(gaps) >= _MAX_GAPS:
            continue
        module_numbers = sorted(modules[path] for path in details["modules"] if path in modules)
        ranks = sorted(rank for rank in details["ranks"] if rank is not None)
        why = check.text.split(": ", 3)
        gap = {"text": why[2] if len(why) > 3 else check.text, "state": check.state, "sites": list(details["sites"])}
        where = {"modules": module_numbers, "steps": sorted(details["steps"]), "ranks": ranks}
        gaps.append(gap | {name: _ranges(numbers) for name, numbers in where.items()})
    return PageBlock(name="gaps", data={"gaps": gaps})


def _ranges(numbers: Sequence[int]) -> list[int]:
    """Return the contiguous ranges in sorted integers as a flat list: first, last, first, last..."""
    if not numbers:
        return []
    values = np.array(numbers, np.int64)
    breaks = np.flatnonzero(np.diff(values) > 1)
    firsts, lasts = np.r_[values[0], values[breaks + 1]], np.r_[values[breaks], values[-1]]
    return np.stack([firsts, lasts], axis=1).reshape(-1).tolist()


def facts_of(run: Run, *, steps: str, states: Sequence[str], rows: str) -> Iterator[tuple[str, str]]:
    """Yield facts about a run as pairs of a title and a text, from its model and its ranks to its rules."""
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
        is_whole = not run.world_size or len(run.ranks) == run.world_size
        yield "ranks", str(len(run.ranks)) + ("" if is_whole else f" of {run.world_size} ({named('rank', run.ranks)})")
    kinds = dict.fromkeys(root.data_parallel.kind for root in roots if root.data_parallel is not None)
    if kinds:
        yield "layout", ", ".join(list(kinds)[:4])
    yield "steps", steps
    started = [manifest.started_ns for manifest in manifests if 0 < manifest.started_ns < 1 << 62]
    if started:
        yield "started", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(started) / 1e9))
    ended = [f"{counted(len(some), 'rank')} with the exception {text}" for text, some in run.exceptions.items()]
    yield "state", ", ".join([f"{states.count(state)} {state}" for state in dict.fromkeys(states)] + ended)
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


def found_since(run: Run, checks: Sequence[Check]) -> list[Check]:
    """Return lines for the damage that was found after `recorder doctor` answered, for example in a payload."""
    told = {check.text for check in checks}
    return [Check("missing", problem) for problem in run.problems if problem not in told]


def told_by_check(run: Run, findings: Sequence[Finding], typed: str, num_unjudged: str = "") -> list[Highlight]:
    """Return the findings on a run in the words of `recorder check`, each with the findings that follow from it.

    `typed` names the run in the commands on the page. `num_unjudged` says in words how many rules were not judged.
    """
    told = list(told_of(findings, has_models=run.has_models))
    highlights = [
        _highlight(one, typed)._replace(more=tuple(_highlight(other, typed) for other in under))
        for one, under in told[:MAX_FINDINGS]
    ]
    if len(told) > MAX_FINDINGS:
        more = f"and {len(told) - MAX_FINDINGS} more findings: `recorder check --json` lists them"
        highlights.append(Highlight(more, {}, "note"))
    command = shlex.join(["recorder", "check", typed])
    rest = f"{num_unjudged} were not judged: {command} says why" if num_unjudged else f"{command} says what was judged"
    nothing = f"The rules of recorder check found nothing in these rows; {rest}"
    return highlights or [Highlight(nothing, {}, "right")]


def _highlight(one: JoinedFindings, typed: str) -> Highlight:
    worst = one.worst
    link = _link(worst) | ({"step": one.first_step} if worst.step >= 0 else {})
    lines = [command_of(typed, one)]
    if worst.rule == "nonfinite":
        steps = f"{max(one.first_step - 1, 0)}:{one.first_step + 1}"
        rule = shlex.quote(f"module={worst.module_path or '*'} site=* steps={steps} keep=tensor")
        keep = f"RECORDER_PRESET=default RECORDER_RULES={rule}   # the next time, for its tensors"
        lines = [shlex.join(["recorder", "first", typed]), *lines, keep]
    return Highlight(
        sentence(one),
        link if worst.site else {},
        "note" if worst.severity is Severity.NOTE else "wrong",
        steps=(one.first_step, one.last_step) if worst.step >= 0 else None,
        ranks=tuple(one.ranks),
        about=where_of(one) | {"advice": worst.advice, "type": "\n".join(filter(None, lines))},
        rule=worst.rule,
    )


def first_nonfinite(judged: Sequence[Highlight]) -> dict[str, Any] | None:
    """Return the place of the first value that is not finite, which the map marks. None if all are finite."""
    known = [one for group in judged for one in (group, *group.more) if one.steps and one.rule == "nonfinite"]
    first = min(known, key=lambda one: one.steps or (0, 0), default=None)
    if first is None:
        return None
    return {**first.link, "rank": first.ranks[0] if len(first.ranks) == 1 else None}


def _of_dumps(run: Run) -> Iterator[Highlight]:
    for dump in run.dumps[:_MAX_LISTED]:
        link = {"view": "map", "from": dump.first_step, "to": dump.last_step}
        yield Highlight(f"{_of_dump(dump)}; {counted(dump.num_rows, 'row')}", link, "note")
    if (num_more := len(run.dumps) - _MAX_LISTED) > 0:
        yield Highlight(f"and {counted(num_more, 'more dump')}: `recorder ls` lists them", {}, "note")


def _of_dump(dump: RunDump) -> str:
    return f"dump of steps {dump.first_step} to {dump.last_step}: {dump.reason} ({dump.by})"


def _of_ranks(collected: StatisticsBlocks) -> Iterator[Highlight]:
    odd = collected.odd
    for rank in odd.found()[:_MAX_LISTED]:
        told = []
        if odd.far[rank]:
            told.append(f"{odd.far[rank]} of its {odd.compared[rank]} values are far from the median of all ranks")
            told[-1] += f", most of all {odd.farthest(rank, collected.series)}"
        if odd.alone[rank]:
            told.append(f"{counted(int(odd.alone[rank]), 'value')} not finite where most ranks' are")
        yield Highlight(
            f"Rank {rank} is odd: {'; '.join(told)}", {"view": "ranks", "rank": rank}, "note", ranks=(rank,)
        )


def _jumps(collected: StatisticsBlocks) -> Iterator[Highlight]:
    """Yield findings of values that jump. Jumps at the same step or at adjacent steps are one finding."""
    cube = collected.cube
    name = next((name for name in ("l2", "absmax") if name in cube.values), None)
    if name is None or not cube.shape[2]:
        return
    steps, sizes = np.array(cube.first_steps), np.abs(cube.values[name][:, 0].astype(np.float64))
    sites = np.array([key.site for key in collected.series])
    largest = np.nan_to_num(np.fmax.reduce(sizes, axis=1))
    floors = {site: _FLOOR * float(np.median(largest[sites == site])) for site in set(sites.tolist())}
    jumps = [
        _Jump(column, number, ratio)
        for number, values in enumerate(sizes)
        for column, ratio in _jumps_of(values, steps)
        if values[column] >= floors[sites[number]]
    ]
    groups: list[list[_Jump]] = []
    for jump in sorted(jumps):
        if not groups or jump.column > groups[-1][-1].column + 1:
            groups.append([])
        groups[-1].append(jump)
    for group in sorted(groups, key=lambda some: -max(one.ratio for one in some))[:_MAX_JUMPS]:
        first, last = group[0], group[-1]
        key, step = collected.series[first.series], int(steps[first.column])
        times = f"{first.ratio:,.0f}" if first.ratio < _MANY else f"{first.ratio:.1e}"
        times = f"{times} times the largest of the records before it"
        value = value_in_words(key.module_path, key.site, key.name)
        text, with_it = f"{value} jumps: its {name} at step {step} is {times}", ""
        if num_more := len({one.series for one in group}) - 1:
            with_it = f"{counted(num_more, 'more value')} {'jump' if num_more > 1 else 'jumps'} with it"
            text += f"; {with_it}"
        its_steps = step, int(steps[last.column])
        about = {
            "what": f"{name} jumps",
            "module": key.module_path or MODEL,
            "value": site_in_words(key.site, key.name),
        }
        about |= {"step": str(step), "size": times, "advice": with_it}
        yield Highlight(text, _link(key) | {"step": step, "stat": name}, "note", its_steps, about=about)


class _Jump(NamedTuple):
    column: int
    series: int
    """The index of the series, in the order of execution."""
    ratio: float
    """The value divided by the largest of the `_NUM_BEFORE` values recorded before it."""


def _jumps_of(values: npt.NDArray[np.float64], steps: npt.NDArray[np.int64]) -> Iterator[tuple[int, float]]:
    known = np.flatnonzero(~np.isnan(values))
    values, at = values[known], steps[known]
    if len(values) < _MIN_STEPS or values.max() < _JUMP * values.min():
        return
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        largest = sliding_window_view(values, _NUM_BEFORE)[:-1].max(axis=1)
        slopes = np.maximum(np.nan_to_num(np.diff(np.log(values)) / np.diff(at), nan=0.0, posinf=np.inf), 0.0)
        slope = sliding_window_view(slopes[:-1], _NUM_BEFORE - 1).max(axis=1)
        until = np.minimum(at[_NUM_BEFORE:] - at[_NUM_BEFORE - 1 : -1], at[_NUM_BEFORE - 1 : -1] - at[:-_NUM_BEFORE])
        ratio = values[_NUM_BEFORE:] / largest
        is_jump = (largest > 0) & (ratio >= _JUMP * np.exp(slope * until))
    for index in np.flatnonzero(is_jump).tolist():
        yield int(known[index + _NUM_BEFORE]), float(ratio[index])


def _link(value: Finding | DrawnSeries) -> dict[str, Any]:
    return {"view": "lines", "root": value.root, "module": value.module_path, "site": value.site, "name": value.name}
