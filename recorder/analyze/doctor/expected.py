"""Compares the expected values (selected modules x sites x steps x ranks) with the recorded values.

This module reads only manifests (module tree, rules, row counts) and metadata rows, and never a payload.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...numerics.keys import Integers, by_key, pack
from ...records import KEEP_RING
from ...rules import EVERY, Rule
from ...run.notes import absent_ranks
from ...run.run import RecordedWriter, Run
from .gaps import Gap, Gaps, absent, explain
from .observed import MODES, Cause, DroppedTail, RankView, SlotRows, accounted, lost_steps, read_slots
from .slots import SLOT_SITES, Flags, RuleMatch, Slots, WriterSlots, distinct, match_rule, read_rules

Window = tuple[int, int]
"""The first and the last step of which a trigger asked to write the rows."""

_MAX_STEPS = 4_000_000
_MAX_SELECTED_STEPS = 500_000
"""If rules select more steps than this, only the steps with rows are judged."""
_MAX_CELLS = 1 << 30
"""If steps x rules x ranks is larger, only the steps with rows are judged. Each combination may take a byte."""


class SiteTotal(NamedTuple):
    """The numbers of values at one site, such as ``output``. A value counts once for each rank and step."""

    site: str
    expected: int
    found: int
    explained: int
    """The number of missing values that never existed in the training."""
    dropped: int
    """The number of missing values that the writers have counted as dropped."""
    retired: int
    """The number of missing values that retention removed."""
    perhaps_dropped: int
    """The number of missing values that were dropped or never existed. Fewer rows were dropped than are missing, so it
    is not known which values were dropped."""


Uneven = tuple[str, list[int | None], list[int], bool]
LackingRows = tuple[list[int], int, list[int], str]
RuleReach = tuple[str, list[int], list[int]]


class Expectation(NamedTuple):
    """The result of `recorder doctor`: counts of expected and missing values, and every gap with its reason."""

    totals: list[SiteTotal]
    gaps: list[Gap]
    uneven: list[Uneven]
    """Forwards of a mode that ranks ran unevenly: the mode; the ranks whose number of such forwards differs from the
    first rank's at some steps; these steps; and whether the ranks are instead one rank that alone ran any."""
    partial: list[LackingRows]
    """Rows of a merged run that stand for all ranks, but lack some: the missing ranks, the number of rows, their steps,
    and their mode: ``train``, or the mode in which only the present ranks evaluated."""
    reaches: list[RuleReach]
    """The recording rules that are limited to some ranks, each with lists of these ranks and of the other ranks."""
    tails: list[DroppedTail]
    """How many rows each rank dropped after its last recorded row. `totals` does not count these rows."""
    problems: list[str]
    """Texts about rules in manifests that cannot be read or judged."""
    unknown: dict[tuple[str, str], int]
    """The number of rows with a name that this version does not know, by kind (site, encoding, column) and name."""
    num_steps_lived: int
    num_steps_expected: int
    num_steps_passed: int
    """The number of steps whose rows were kept in memory only, because no trigger asked for these steps."""
    num_modules: int
    num_selected: int
    """The number of modules of which a rule selects at least one site."""
    num_filtered: int
    """The number of selected modules of which no value is expected, because rules restrict steps, names or calls."""
    last_steps: dict[int | None, int | None]
    """The last step of each rank that has a row; None for a rank without rows."""
    silent: dict[str, list[tuple[str, str]]]
    """The root and path of each selected module without a row, by the reason."""
    shared: list[tuple[str, str]]
    """Pairs of a module's first path and an alias, for modules that have several paths."""
    num_incomplete: int
    """The number of tensors that were recorded in several rows and lack some of these rows."""
    is_merged: bool
    absent: list[int]


class _Rank(NamedTuple):
    """The writers of one rank; for a merged run, all writers."""

    rank: int | None
    writers: list[RecordedWriter]
    rules: set[str]
    promised: WriterSlots
    rows: list[SlotRows]


class _AskedSlots:
    def __init__(self, run: Run, slots: Slots) -> None:
        self.is_merged = run.is_merged
        self.slots = slots
        read = [read_rules(writer.manifest) for writer in run.writers]
        self.rules = list(dict.fromkeys(rule for rules, _ in read for rule in rules))
        self.problems = list(dict.fromkeys(problem for _, problems in read for problem in problems))
        self.ranks = _ranks(run, slots, [{rule.text for rule in rules} for rules, _ in read])
        self.matches: list[RuleMatch] = []
        for rule in self.rules:
            match = match_rule(slots, rule)
            if match is None:
                self.problems.append(f"rule {rule.text!r} cannot be judged here, so nothing is expected by it")
            elif match.slots.any():
                self.matches.append(match)
        sources = (source for writer in run.writers for source in writer.manifest.merged_writers)
        self.is_lossy = self.is_merged and any(source.has_lost for source in sources)
        """Whether rows were lost before the merge of a merged run. Manifests do not say at which steps."""
        self.windows = [] if self.is_lossy else [(dump.first_step, dump.last_step) for dump in run.dumps]
        self.axis, self.num_lived, self.num_passed = _axis(
            [match.rule for match in self.matches], self.ranks, self.windows
        )
        self.masks = [at_steps(match.rule, self.axis, self.windows) for match in self.matches]
        self._seen = np.zeros(slots.num_slots, bool)
        for rows in (rows for one in self.ranks for rows in one.rows):
            self._seen[rows.slot[rows.slot >= 0]] = True
        self._known: dict[Any, tuple[Integers, Flags]] = {}

    def view(self, one: _Rank) -> RankView:
        is_on = [one.rank is None or (m.rule.text in one.rules and one.rank in m.rule.rank) for m in self.matches]
        when = self._when(one.promised.selected, is_on)
        view = RankView(
            self.slots, self.axis, one.promised, *when, one.rank, one.writers, one.rows, self.is_merged, self.is_lossy
        )
        for rows in one.rows:
            view.add(rows)
        view.bits[:], view.room[:] = lost_steps(one.writers, one.rows, self.axis)
        if self.windows and not self.is_merged:
            view.bits[_missed(one, self.axis, self.windows)] |= Cause.TRIGGER_MISSED.value
        return view

    def absent_views(self, missing: Sequence[int], selected: Flags) -> Iterator[tuple[list[int], RankView]]:
        """Yield groups of the ranks `missing` that have the same rules, each with its expected values."""
        groups = by_key((tuple(rank in match.rule.rank for match in self.matches), rank) for rank in missing)
        promised = WriterSlots.joined(self.slots, ())._replace(selected=selected)
        for is_on, group in groups.items():
            yield group, RankView(self.slots, self.axis, promised, *self._when(selected, is_on), rank=group[0])

    def _when(self, selected: Flags, is_on: Sequence[bool]) -> tuple[Integers, Flags]:
        """Group slots (sites of modules) by their expected steps. Return each slot's group, and each group's steps."""
        key = selected.tobytes(), tuple(is_on)
        if key in self._known:
            return self._known[key]
        chosen = [np.zeros(self.slots.num_slots, bool)]
        for match, is_on_rank in zip(self.matches, is_on, strict=True):
            chosen.append(match.slots & (~match.is_limited | self._seen) & selected & is_on_rank)
        code = np.where(np.any(chosen, axis=0), pack(chosen) + 1, 0)
        when = np.zeros((int(code.max(initial=0)) + 1, len(self.axis)), bool)
        for kind, slot in zip(*np.unique(code, return_index=True), strict=True):
            for flags, mask in zip(chosen[1:], self.masks, strict=True):
                if kind and flags[slot]:
                    when[kind] |= mask
        self._known[key] = code, when
        return code, when


def compare(run: Run) -> Expectation:
    """Compare the values that a run should have recorded, by its manifests, with the run's rows."""
    slots = Slots(writer.manifest for writer in run.writers)
    asked = _AskedSlots(run, slots)
    axis, is_merged = asked.axis, run.is_merged
    views = [asked.view(one) for one in asked.ranks]
    writer_rows = [rows for view in views for rows in view.rows]
    of_all = WriterSlots.joined(slots, (view.promised for view in views))
    has_rows, called, graded, selected, wanted = np.zeros((5, len(slots.modules)), bool)
    selected[slots.module[of_all.selected]] = True
    for rows in writer_rows:
        has_rows[rows.module[rows.module >= 0]] = True
    for view in views:
        called |= view.called_ever
        graded |= view.graded_ever
        has_steps: Flags = np.any(view.when, axis=1)
        wanted[slots.module[has_steps[view.code]]] = True
    gaps = Gaps(slots, axis)
    for view in views:
        explain(gaps, view, has_rows=has_rows, called=called, graded=graded)
    missing_ranks = absent_ranks(run)
    for group, view in asked.absent_views(missing_ranks, of_all.selected):
        absent(gaps, view, group)
    lost = accounted(gaps.lost, {view.rank: view.writers for view in views})
    columns = (gaps.expected, gaps.found, gaps.explained, *lost.values(), gaps.perhaps_dropped)
    # If all steps were kept in memory only (in a ring) and no trigger came, no step is expected on disk. But the run
    # had steps.
    is_all_passed = asked.num_lived > 0 and any(match.rule.keep == KEEP_RING for match in asked.matches)
    return Expectation(
        totals=[
            SiteTotal(site, *(int(column[number]) for column in columns))
            for number, site in enumerate(SLOT_SITES)
            if gaps.expected[number]
        ],
        gaps=gaps.collected(),
        uneven=[] if is_merged else _uneven(views, axis),
        partial=_partial(writer_rows),
        reaches=[] if is_merged else _reaches(asked.rules, [*run.ranks, *missing_ranks]),
        tails=[] if is_merged else _tails(views),
        problems=asked.problems,
        unknown=dict(sum((rows.unknown for rows in writer_rows), Counter[tuple[str, str]]())),
        num_steps_lived=asked.num_lived,
        num_steps_expected=int(np.any(asked.masks, axis=0).sum()) if asked.masks else 0,
        num_steps_passed=asked.num_passed,
        num_modules=len(slots.modules),
        num_selected=int(selected.sum()),
        num_filtered=int((selected & ~wanted).sum()),
        silent=gaps.silent(wanted if len(axis) or is_all_passed else selected, has_rows, called, of_all.hidden),
        last_steps={view.rank: view.last_step for view in views},
        shared=[(module.path, alias) for module in slots.modules for alias in module.aliases],
        num_incomplete=sum(rows.num_incomplete for rows in writer_rows),
        is_merged=is_merged,
        absent=missing_ranks,
    )


def _ranks(run: Run, slots: Slots, rules_of: Sequence[set[str]]) -> list[_Rank]:
    """Group the writers by rank. If a rank counts steps from 0 in each attempt, keep only its newest writer.

    `rules_of` has the texts of each writer's rules.
    """
    numbered = ((None if run.is_merged else writer.rank, number) for number, writer in enumerate(run.writers))
    ranks = []
    for rank, numbers in by_key(numbered).items():
        if not run.is_merged and any(run.writers[number].is_counted for number in numbers):
            numbers = numbers[-1:]
        writers = [run.writers[number] for number in numbers]
        writer_slots = [slots.writer_slots[number] for number in numbers]
        rules = set[str]().union(*(rules_of[number] for number in numbers))
        if not any(writer.manifest.roots for writer in writers):  # the manifest is lost, so use the other ranks' rules
            writer_slots, rules = slots.writer_slots, set[str]().union(*rules_of)
        rows = [read_slots(writer, slots) for writer in writers]
        ranks.append(_Rank(rank, writers, rules, WriterSlots.joined(slots, writer_slots), rows))
    return ranks


def _axis(rules: Sequence[Rule], ranks: Sequence[_Rank], windows: Sequence[Window]) -> tuple[Integers, int, int]:
    """Return the steps at which rules want values, the number of all steps, and how many were kept only in memory."""
    recorded = [np.unique(rows.step) for one in ranks for rows in one.rows if len(rows.step)]
    if not recorded:
        return np.zeros(0, np.int64), 0, 0
    steps = np.unique(np.concatenate(recorded))
    first, last = int(steps[0]), int(steps[-1])
    by_hand = any(writer.manifest.step_source == "user" for one in ranks for writer in one.writers)
    if not by_hand and last - first < _MAX_STEPS:
        every = np.arange(first, last + 1)
        wanted = _at_any(rules, every, windows)
        if wanted.sum() <= min(_MAX_SELECTED_STEPS, _MAX_CELLS // (len(rules) + 1) // len(ranks)):
            return every[wanted], len(every), _num_passed(rules, every, wanted)
    wanted = _at_any(rules, steps, windows)
    return steps[wanted], len(steps), _num_passed(rules, steps, wanted)


def _num_passed(rules: Sequence[Rule], steps: Integers, are_wanted: Flags) -> int:
    return int((_at_any(rules, steps, [(0, int(_LARGEST))]) & ~are_wanted).sum())


def _at_any(rules: Sequence[Rule], steps: Integers, windows: Sequence[Window]) -> Flags:
    are_wanted = np.zeros(len(steps), bool)
    for rule in rules:
        are_wanted |= at_steps(rule, steps, windows)
    return are_wanted


def at_steps(rule: Rule, steps: Integers, windows: Sequence[Window] = ()) -> Flags:
    """Return a mask of the steps at which a rule writes values to disk.

    A rule writes the steps of its schedule. If it keeps values in memory (`KEEP_RING`), it writes only steps in
    `windows`, for which triggers asked.
    """
    are_wanted = _in_schedule(rule, steps)
    return are_wanted & _in_windows(windows, steps) if rule.keep == KEEP_RING else are_wanted


def _in_windows(windows: Sequence[Window], steps: Integers) -> Flags:
    are_inside = np.zeros(len(steps), bool)
    for first, last in windows:
        are_inside |= (steps >= first) & (steps <= last)
    return are_inside


def _in_schedule(rule: Rule, steps: Integers) -> Flags:
    schedule = rule.steps
    are_chosen = np.zeros(len(steps), bool)
    for start, stop, stride in schedule.slices:
        if start > _LARGEST:
            continue
        chosen = (steps >= start) & ((steps - start) % min(stride, _LARGEST) == 0)
        are_chosen |= chosen if stop is None or stop > _LARGEST else chosen & (steps < stop)
    if schedule.powers_of_two:
        are_chosen |= (steps >= 0) & (steps & (steps - 1) == 0)
    return are_chosen


_LARGEST = np.iinfo(np.int64).max


def _missed(one: _Rank, axis: Integers, windows: Sequence[Window]) -> Flags:
    dumps = [dump for writer in one.writers for dump in writer.manifest.dumps]
    own = _in_windows([(dump.first_step, dump.last_step) for dump in dumps], axis)
    return _in_windows(windows, axis) & ~own | np.isin(axis, [step for dump in dumps for step in dump.missed])


def _uneven(views: Sequence[RankView], axis: Integers) -> list[Uneven]:
    uneven = []
    for mode, number in MODES.items():
        counts = [_num_forwards(view.rows, number, axis) for view in views]
        differing: list[int | None] = []
        steps = np.zeros(len(axis), bool)
        for view, own in list(zip(views, counts, strict=True))[1:]:
            sound = view.alive & views[0].alive & (view.bits == 0) & (views[0].bits == 0)
            sound &= np.array_equal(view.code, views[0].code)
            differs = (own != counts[0]) & sound
            if differs.any():
                differing.append(view.rank)
                steps |= differs
        if differing:
            able = [view.rank for view, own in zip(views, counts, strict=True) if own.any()]
            alone = len(able) == 1
            uneven.append((mode, able if alone else differing, axis[steps].tolist(), alone))
    return uneven


def _num_forwards(rows: Sequence[SlotRows], mode: int, axis: Integers) -> Integers:
    steps = np.concatenate([np.zeros(0, np.int64), *(one.step[one.is_forward & (one.mode == mode)] for one in rows)])
    return np.bincount(np.searchsorted(axis, steps[np.isin(steps, axis)]), minlength=len(axis))


def _tails(views: Sequence[RankView]) -> list[DroppedTail]:
    """Count the rows that each rank's newest writer has dropped after its last row, if that row is of the last step."""
    end = max((view.last_step for view in views if view.last_step is not None), default=None)
    tails = []
    for view in views:
        newest, last_seq = view.writers[-1], int(view.rows[-1].seq.max(initial=-1))
        rest = min(newest.balance.observed - last_seq - 1, newest.balance.num_dropped)
        # After rows that were kept in memory alone, numbers without a row belong mostly to such rows.
        is_told = newest.state == "closed" and not newest.balance.passed
        if view.last_step is not None and view.last_step == end and is_told and rest > 0:
            tails.append(DroppedTail(view.rank, end, rest))
    return tails


def _partial(writer_rows: Sequence[SlotRows]) -> list[LackingRows]:
    partial = (partial for rows in writer_rows for partial in rows.partial)
    steps_of = by_key(
        ((tuple(sorted(_rank_list(expected) - _rank_list(present))), mode), steps)
        for present, expected, mode, steps in partial
    )
    return [
        (list(missing), sum(map(len, steps)), distinct(np.concatenate(steps)).tolist(), mode)
        for (missing, mode), steps in steps_of.items()
    ]


def _rank_list(text: str | None) -> set[int]:
    try:
        parsed = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return set()
    return {item for item in parsed if type(item) is int} if isinstance(parsed, list) else set()


def _reaches(rules: Sequence[Rule], ranks: Sequence[int]) -> list[RuleReach]:
    reaches = []
    for rule in rules:
        if rule.rank != EVERY:
            inside = sorted(rank for rank in ranks if rank in rule.rank)
            reaches.append((rule.text, inside, sorted(set(ranks) - set(inside))))
    return reaches
