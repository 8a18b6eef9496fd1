"""What should have been recorded against what was (selected modules x sites x steps x ranks), gap by gap.

Works from the files alone: manifests (module tree, rules, accounts) and metadata rows. Never reads a payload.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...records import KEEP_RING
from ...rules import EVERY, Rule
from ...run.run import RecordedWriter, Run
from .accounts import ACCOUNTED, MISSED, DroppedTail, accounted, dropped_tail, lost_steps
from .gaps import Gap, Gaps, absent, explain
from .observed import MODES, RankView, SlotRows, read_slots
from .slots import NEVER, SLOT_SITES, Flags, RuleMatch, Slots, WriterSlots, distinct, match_rule, read_rules

Integers = npt.NDArray[np.int64]
Window = tuple[int, int]
"""The first and the last step that a trigger asked for."""

_MAX_STEPS = 4_000_000
_MAX_SELECTED_STEPS = 500_000
"""Above, only steps with rows are looked at: somebody named them far apart."""
_MAX_CELLS = 1 << 30
"""Most cells of steps x rules x ranks. Where ranks share nothing, each cell takes a byte of memory."""
_MAX_ABSENT = 1 << 20


class SiteTotal(NamedTuple):
    """One site of the table: values counted once for each rank and step."""

    site: str
    expected: int
    found: int
    explained: int
    """Values that are not there because the training had none."""
    dropped: int
    """Values that are not there and that the accounts call dropped."""
    retired: int
    """Values that are not there because retention removed them."""
    perhaps_dropped: int
    """Values that are not there because they were dropped or never existed. The accounts know of drops at these
    steps, but not of so many."""


class Uneven(NamedTuple):
    """Ranks that ran forwards of one mode a different number of times at the same steps."""

    mode: str
    ranks: list[int | None]
    """Those that differ from the first rank with rows."""
    steps: list[int]
    is_alone: bool
    """One rank ran them, the others none at all."""


class LackingRows(NamedTuple):
    """Global rows of a merged run that lack ranks."""

    missing: list[int]
    num_rows: int
    steps: list[int]
    mode: str
    """``train``, or how the ranks that are there evaluated alone."""


class RuleReach(NamedTuple):
    """A rule that keeps to some ranks."""

    rule: str
    ranks: list[int]
    others: list[int]


class Expectation(NamedTuple):
    """The answer: totals, and every gap with its reason."""

    totals: list[SiteTotal]
    gaps: list[Gap]
    uneven: list[Uneven]
    partial: list[LackingRows]
    reaches: list[RuleReach]
    tails: list[DroppedTail]
    """What ranks whose record ends last dropped behind the end of that record, where the table does not reach."""
    problems: list[str]
    """What of the manifests could not be used."""
    unknown: dict[tuple[str, str], int]
    """What is of a later version of the format: its kind (``site``, ``encoding``, ``column``) and word, and how many
    rows have it."""
    num_steps_lived: int
    num_steps_expected: int
    num_steps_passed: int
    """Steps that the ring alone kept and no trigger asked for."""
    num_modules: int
    num_selected: int
    """Modules of which a rule selects anything that can exist."""
    num_filtered: int
    """Selected modules of which nothing is expected at the steps, names and calls that the rules want."""
    last_steps: dict[int | None, int | None]
    """By rank, the last step of its rows."""
    silent: dict[str, list[tuple[str, str]]]
    """By reason, root and path of modules that are selected and left no row at all."""
    shared: list[tuple[str, str]]
    """Path and alias of modules that stand at several paths."""
    num_incomplete: int
    """Tensors of which some parts were dropped."""
    is_merged: bool


class _Rank(NamedTuple):
    """The writers of one rank; of a merged run, all."""

    rank: int | None
    writers: list[RecordedWriter]
    rules: set[str]
    writer_slots: list[WriterSlots]
    rows: list[SlotRows]


def compare(run: Run) -> Expectation:
    """Compare what a run's manifests promise with its rows."""
    slots = Slots(writer.manifest for writer in run.writers)
    is_merged = run.is_merged
    rules, problems = _rules(run)
    ranks = _ranks(run, slots, rules, is_merged)
    matches: list[RuleMatch] = []
    for rule in rules:
        match = match_rule(slots, rule)
        if match is None:
            problems.append(f"rule {rule.text!r} cannot be judged here, so nothing is expected by it")
        elif match.slots.any():
            matches.append(match)
    seen = np.zeros(slots.num_slots, bool)
    for one in ranks:
        for rows in one.rows:
            seen[rows.slot[rows.slot >= 0]] = True
    windows = [] if run.is_merged and _has_lost(run) else [(dump.first_step, dump.last_step) for dump in run.dumps]
    axis, num_lived, num_passed = _axis([match.rule for match in matches], ranks, windows)
    masks = [at_steps(match.rule, axis, windows) for match in matches]
    gaps = Gaps(slots, axis)
    known: dict[Any, tuple[Integers, Flags]] = {}
    views = [_view(one, slots, matches, masks, seen, axis, known, is_merged, windows) for one in ranks]
    has_rows = np.zeros(len(slots.modules), bool)
    called = np.zeros(len(slots.modules), bool)
    graded = np.zeros(len(slots.modules), bool)
    for one, view in zip(ranks, views, strict=True):
        for rows in one.rows:
            has_rows[rows.module[rows.module >= 0]] = True
        called |= view.called_ever
        graded |= view.graded_ever
    for view in views:
        explain(gaps, view, has_rows=has_rows, called=called, graded=graded)
    missing_ranks = _absent_ranks(run, ranks, is_merged)
    for group, view in _absent_views(missing_ranks, ranks, slots, matches, masks, seen, axis):
        absent(gaps, view, group)
    selected = np.zeros(len(slots.modules), bool)
    selected[slots.module[_any_selected(ranks, slots)]] = True
    wanted = np.zeros(len(slots.modules), bool)
    for view in views:
        has_steps: Flags = np.any(view.when, axis=1)
        wanted[slots.module[has_steps[view.code]]] = True
    known_lost = accounted(gaps.lost, {one.rank: one.writers for one in ranks})
    none = np.zeros(len(SLOT_SITES), np.int64)
    by_account = (known_lost.get(reason, none) for reason in ACCOUNTED)
    columns = (gaps.expected, gaps.found, gaps.explained, *by_account, gaps.perhaps_dropped)
    return Expectation(
        totals=[
            SiteTotal(site, *(int(column[number]) for column in columns))
            for number, site in enumerate(SLOT_SITES)
            if gaps.expected[number]
        ],
        gaps=gaps.collected(),
        uneven=[] if is_merged else _uneven(ranks, views, axis),
        partial=_partial(ranks),
        reaches=_reaches(rules, [one.rank for one in ranks if one.rank is not None] + missing_ranks, is_merged),
        tails=[] if is_merged else _tails(ranks, views),
        problems=problems,
        unknown=dict(sum((rows.unknown for one in ranks for rows in one.rows), Counter[tuple[str, str]]())),
        num_steps_lived=num_lived,
        num_steps_expected=int(np.any(masks, axis=0).sum()) if masks else 0,
        num_steps_passed=num_passed,
        num_modules=len(slots.modules),
        num_selected=int(selected.sum()),
        num_filtered=int((selected & ~wanted).sum()),
        silent=gaps.silent(
            wanted if len(axis) or _is_all_passed(matches, num_lived) else selected,
            has_rows,
            called,
            [writer_slots for one in ranks for writer_slots in one.writer_slots],
        ),
        last_steps={one.rank: view.last_step for one, view in zip(ranks, views, strict=True)},
        shared=[(module.path, alias) for module in slots.modules for alias in module.aliases],
        num_incomplete=sum(rows.num_incomplete for one in ranks for rows in one.rows),
        is_merged=is_merged,
    )


def _ranks(run: Run, slots: Slots, rules: Sequence[Rule], is_merged: bool) -> list[_Rank]:
    """Writers by rank; where steps were merely counted, only the newest of a rank, whose steps are its own."""
    groups: dict[int | None, list[int]] = {}
    for number, writer in enumerate(run.writers):
        groups.setdefault(None if is_merged else writer.rank, []).append(number)
    ranks = []
    for rank, numbers in groups.items():
        if not is_merged and any(run.writers[number].is_counted for number in numbers):
            numbers = numbers[-1:]
        writers = [run.writers[number] for number in numbers]
        writer_slots = [slots.writer_slots[number] for number in numbers]
        texts = {rule.text for writer in writers for rule in read_rules(writer.manifest)[0]}
        if not any(writer.manifest.roots for writer in writers):  # lost: then what holds on the others
            writer_slots, texts = slots.writer_slots, {rule.text for rule in rules}
        ranks.append(_Rank(rank, writers, texts, writer_slots, [read_slots(writer, slots) for writer in writers]))
    return ranks


def _rules(run: Run) -> tuple[list[Rule], list[str]]:
    """Every rule of any writer once."""
    rules: dict[Rule, None] = {}
    problems: dict[str, None] = {}
    read: list[Any] = []
    for writer in run.writers:
        sources = writer.manifest.rules, writer.manifest.commands
        if sources in read:
            continue
        read.append(sources)
        some, wrong = read_rules(writer.manifest)
        rules |= dict.fromkeys(some)
        problems |= dict.fromkeys(wrong)
    return list(rules), list(problems)


def _axis(rules: Sequence[Rule], ranks: Sequence[_Rank], windows: Sequence[Window]) -> tuple[Integers, int, int]:
    """The steps at which a rule wants a module's value, of how many they were taken, and how many the ring passed."""
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
    """How many steps are in the schedule of a rule, but only in the ring, which no trigger had written."""
    return int((_at_any(rules, steps, [(0, int(_LARGEST))]) & ~are_wanted).sum())


def _is_all_passed(matches: Sequence[RuleMatch], num_lived: int) -> bool:
    """Whether no step is wanted because the ring kept all of them and no trigger came, and not for want of steps."""
    return num_lived > 0 and any(match.rule.keep == KEEP_RING for match in matches)


def _at_any(rules: Sequence[Rule], steps: Integers, windows: Sequence[Window]) -> Flags:
    are_wanted = np.zeros(len(steps), bool)
    for rule in rules:
        are_wanted |= at_steps(rule, steps, windows)
    return are_wanted


def at_steps(rule: Rule, steps: Integers, windows: Sequence[Window] = ()) -> Flags:
    """At which steps a rule wants values on the disk: its schedule, and of a ring the windows of triggers."""
    are_wanted = _in_schedule(rule, steps)
    return are_wanted & _in_windows(windows, steps) if rule.keep == KEEP_RING else are_wanted


def _in_windows(windows: Sequence[Window], steps: Integers) -> Flags:
    are_inside = np.zeros(len(steps), bool)
    for first, last in windows:
        are_inside |= (steps >= first) & (steps <= last)
    return are_inside


def _in_schedule(rule: Rule, steps: Integers) -> Flags:
    """`Schedule`'s meaning for many steps at once."""
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


def _wanted(
    slots: Slots, matches: Sequence[RuleMatch], masks: Sequence[Flags], seen: Flags, selected: Flags,
    on_rank: Sequence[bool], num_steps: int,
) -> tuple[Integers, Flags]:  # fmt: skip
    """For each slot a row of the second result, which says at which steps it is expected on a rank; row 0 is never."""
    code = np.zeros(slots.num_slots, np.int64)
    chosen = []
    for match, is_on in zip(matches, on_rank, strict=True):
        chosen.append(match.slots & (~match.is_limited | seen) & selected & is_on)
        code = code * 2 + chosen[-1]
        if len(chosen) % 40 == 0:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
    code = np.unique(code, return_inverse=True)[1].reshape(-1) + 1
    code[~np.any(chosen, axis=0) if chosen else slice(None)] = 0
    when = np.zeros((int(code.max(initial=0)) + 1, num_steps), bool)
    for kind, slot in zip(*np.unique(code, return_index=True), strict=True):
        for flags, mask in zip(chosen, masks, strict=True):
            if kind and flags[slot]:
                when[kind] |= mask
    return code, when


def _view(
    one: _Rank,
    slots: Slots,
    matches: Sequence[RuleMatch],
    masks: Sequence[Flags],
    seen: Flags,
    axis: Integers,
    known: dict[Any, tuple[Integers, Flags]],
    is_merged: bool,
    windows: Sequence[Window],
) -> RankView:
    selected = np.zeros(slots.num_slots, bool)
    hidden = np.zeros(len(slots.modules), np.int64)
    disarmed = np.full(slots.num_slots, NEVER, np.int64)
    untapped = np.zeros(slots.num_slots, bool)
    tied: dict[int, str] = {}
    for writer_slots in one.writer_slots:
        selected |= writer_slots.selected
        hidden = np.maximum(hidden, writer_slots.hidden)
        disarmed = np.minimum(disarmed, writer_slots.disarmed)
        untapped |= writer_slots.untapped
        tied |= writer_slots.tied
    on_rank = [one.rank is None or (match.rule.text in one.rules and one.rank in match.rule.rank) for match in matches]
    key = (tuple(id(writer_slots) for writer_slots in one.writer_slots), tuple(on_rank))
    if key not in known:
        known[key] = _wanted(slots, matches, masks, seen, selected, on_rank, len(axis))
    code, when = known[key]
    view = RankView(
        slots, axis, rank=one.rank, writers=one.writers, selected=selected, hidden=hidden, disarmed=disarmed,
        untapped=untapped, tied=tied, code=code, when=when, is_merged=is_merged,
    )  # fmt: skip
    for rows in one.rows:
        view.add(rows)
    view.is_lossy = is_merged and any(
        source.has_lost for writer in one.writers for source in writer.manifest.merged_writers
    )
    view.bits[:], view.room[:] = lost_steps(one.writers, [rows.numbered for rows in one.rows], axis)
    if windows and not is_merged:
        view.bits[_missed(one, axis, windows)] |= MISSED
    return view


def _missed(one: _Rank, axis: Integers, windows: Sequence[Window]) -> Flags:
    """Return the steps of windows of which the rank never heard, or heard too late."""
    dumps = [dump for writer in one.writers for dump in writer.manifest.dumps]
    own = _in_windows([(dump.first_step, dump.last_step) for dump in dumps], axis)
    return _in_windows(windows, axis) & ~own | np.isin(axis, [step for dump in dumps for step in dump.missed])


def _has_lost(run: Run) -> bool:
    """Whether a merged run says that its source has lost rows, but not at which steps."""
    return any(source.has_lost for writer in run.writers for source in writer.manifest.merged_writers)


def _any_selected(ranks: Sequence[_Rank], slots: Slots) -> Flags:
    selected = np.zeros(slots.num_slots, bool)
    for one in ranks:
        for writer_slots in one.writer_slots:
            selected |= writer_slots.selected
    return selected


def _absent_ranks(run: Run, ranks: Sequence[_Rank], is_merged: bool) -> list[int]:
    if is_merged or not run.world_size or run.world_size > _MAX_ABSENT or not ranks:
        return []
    return sorted(set(range(run.world_size)) - {one.rank for one in ranks if one.rank is not None})


def _absent_views(
    missing: Sequence[int], ranks: Sequence[_Rank], slots: Slots, matches: Sequence[RuleMatch],
    masks: Sequence[Flags], seen: Flags, axis: Integers,
) -> list[tuple[list[int], RankView]]:  # fmt: skip
    """What was expected of ranks that left nothing; those for which the same rules hold together."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for rank in missing:
        groups.setdefault(tuple(rank in match.rule.rank for match in matches), []).append(rank)
    selected = _any_selected(ranks, slots)
    hidden = np.zeros(len(slots.modules), np.int64)
    disarmed = np.full(slots.num_slots, NEVER, np.int64)
    views = []
    for on_rank, group in groups.items():
        code, when = _wanted(slots, matches, masks, seen, selected, on_rank, len(axis))
        view = RankView(
            slots, axis, rank=group[0], writers=[], selected=selected, hidden=hidden, disarmed=disarmed,
            untapped=np.zeros(slots.num_slots, bool), tied={}, code=code, when=when,
        )  # fmt: skip
        views.append((group, view))
    return views


def _uneven(ranks: Sequence[_Rank], views: Sequence[RankView], axis: Integers) -> list[Uneven]:
    uneven = []
    for mode, number in MODES.items():
        reference: Integers | None = None
        first: RankView | None = None
        differing: list[int | None] = []
        steps = np.zeros(len(axis), bool)
        totals = []
        for one, view in zip(ranks, views, strict=True):
            counts = np.zeros(len(axis), np.int64)
            for rows in one.rows:
                chosen = rows.step[rows.is_forward & (rows.mode == number)]
                at = np.searchsorted(axis, chosen)
                at = at[(at < len(axis)) & (axis[np.minimum(at, len(axis) - 1)] == chosen)] if len(axis) else at[:0]
                counts += np.bincount(at, minlength=len(axis))
            totals.append(int(counts.sum()))
            if reference is None or first is None:
                reference, first = counts, view
                continue
            sound = view.alive & first.alive & (view.bits == 0) & (first.bits == 0)
            sound &= (view.code.shape == first.code.shape) and bool((view.code == first.code).all())
            differs = (counts != reference) & sound
            if differs.any():
                differing.append(one.rank)
                steps |= differs
        if differing:
            alone = sum(total > 0 for total in totals) == 1
            who = [one.rank for one, total in zip(ranks, totals, strict=True) if total] if alone else differing
            uneven.append(Uneven(mode, who, axis[steps].tolist(), alone))
    return uneven


def _tails(ranks: Sequence[_Rank], views: Sequence[RankView]) -> list[DroppedTail]:
    end = max((view.last_step for view in views if view.last_step is not None), default=None)
    tails = []
    for one, view in zip(ranks, views, strict=True):
        if view.last_step is not None and view.last_step == end:
            last_seq = int(one.rows[-1].numbered.seq.max(initial=-1))
            tails.append(dropped_tail(one.rank, one.writers, last_seq, view.last_step))
    return [tail for tail in tails if tail is not None]


def _partial(ranks: Sequence[_Rank]) -> list[LackingRows]:
    steps_of: dict[tuple[tuple[int, ...], str], list[Integers]] = {}
    for one in ranks:
        for rows in one.rows:
            for present, expected, mode, steps in rows.partial:
                missing = sorted(_rank_list(expected) - _rank_list(present))
                steps_of.setdefault((tuple(missing), mode), []).append(steps)
    return [
        LackingRows(list(missing), sum(map(len, steps)), distinct(np.concatenate(steps)).tolist(), mode)
        for (missing, mode), steps in steps_of.items()
    ]


def _rank_list(text: str | None) -> set[int]:
    try:
        parsed = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return set()
    return {item for item in parsed if type(item) is int} if isinstance(parsed, list) else set()


def _reaches(rules: Sequence[Rule], ranks: Sequence[int], is_merged: bool) -> list[RuleReach]:
    reaches = []
    for rule in rules:
        if rule.rank != EVERY and not is_merged:
            inside = sorted(rank for rank in ranks if rank in rule.rank)
            reaches.append(RuleReach(rule.text, inside, sorted(set(ranks) - set(inside))))
    return reaches
