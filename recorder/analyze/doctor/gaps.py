"""Why an expected value is not there: one rank's values against its slots and steps, each gap with its reason.

Works in blocks of modules, so that memory stays bounded. Never reads a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...sites import OF_BUFFERS, OF_CALLS, VALUES_OF_CALLS, values_of
from ...system.text import listed
from .accounts import (
    ACCOUNTED,
    CAUSES,
    CUT,
    DAMAGED,
    DROPPED,
    LIVE,
    MISSED,
    RETIRED,
    TOTAL,
    UNACCOUNTED,
    retention,
)
from .accounts import FORWARD as IN_FORWARD
from .observed import RankView
from .slots import HIDDEN, SLOT_SITES, Flags, Slots, WriterSlots, distinct

Integers = npt.NDArray[np.int64]

_MAX_CELLS = 4_000_000
"""Slots x steps of a block."""
_VALUES = [OF_CALLS.index(site) for site in VALUES_OF_CALLS]
"""Sites of a call's values; the others have their gradients."""
_VALUE_OFFSET = np.array([OF_CALLS.index(values_of(site)) for site in OF_CALLS])
"""For each site of calls, that of the values."""


class Reason(NamedTuple):
    """Why a value is not there."""

    key: str
    text: str
    is_loss: bool
    """It was there and is gone, or should have been and was not: somebody should look."""
    is_harmless: bool
    """What was recorded explains it: there was no such value."""


REASONS = (
    Reason("corrupt", "in a damaged shard", True, False),
    Reason("retired", "removed by retention", False, False),
    Reason("trigger_missed", "the rank learned of a trigger too late to have these steps", False, False),
    Reason("dropped", "seen and dropped", True, False),
    Reason("perhaps_dropped", "seen and dropped, or never there: more values lack than rows were dropped", True, False),
    Reason("died", "the process ended without closing", True, False),
    Reason("disarmed", "the recorder's hooks kept failing there, and were disarmed", True, False),
    Reason("live", "not recorded yet", False, False),
    Reason("unaccounted", "rows are missing that no account explains", True, False),
    Reason("absent", "no rows of the rank at all", True, False),
    Reason("ended", "the rank closed its record before the others did", False, False),
    Reason("later", "the rank began to record after the others had", False, False),
    Reason("no_step", "no module's values at these steps", False, True),
    Reason("root_idle", "the root was not called at these steps", False, True),
    Reason("evaluation", "called without gradients only, as in an evaluation", False, True),
    Reason("not_called", "not called at these steps, at others it was", False, True),
    Reason("other_ranks", "called on other ranks, never on this one", False, False),
    Reason("elsewhere", "called on other ranks alone, without gradients, as in an evaluation", False, True),
    Reason("late", "attached after compilation: attach first, or call torch.compiler.reset()", True, False),
    Reason("compiled", "compiled: its hooks step aside; RECORDER_COMPILED=tap puts taps into the graph", False, True),
    Reason("scripted", "scripted or traced by torch.jit, which takes no hooks: instrument it before", False, True),
    Reason("inlined", "in a graph of torch.fx or torch.export, where it has no call of its own", False, True),
    Reason("tapped", "no tap showed it: not tapped, not called, or it hands its argument on as it is", False, True),
    Reason("untapped", "not tapped there: recorder.instrument(model, select='site=input,output'); TorchScript has no "
           "taps on inputs", False, False),
    Reason("dtensor", "no tap showed it: its parameters are DTensors, which pass a graph untapped", False, True),
    Reason("fused", "MultiheadAttention uses its parameters without calling it", False, True),
    Reason("silent", "its module left no rows at all", True, False),
    Reason("bypassed", "its own call was never seen, though its parameters have gradients: used directly, or called as "
           ".forward()", False, True),
    Reason("unused", "never called, and its parameters had no gradient", False, True),
    Reason("children", "its children were called, and itself never, or it returns no tensor", False, True),
    Reason("never_called", "never called at a recorded step", False, False),
    Reason("no_tensor", "called, with no tensor at this site", False, True),
    Reason("no_gradient", "no gradient came to it: not required, not used in the loss, or not tapped in a graph",
           False, True),
    Reason("tied", "another name of a parameter that is recorded once, under its first", False, True),
    Reason("no_update", "no optimizer stepped at these steps", False, True),
    Reason("not_optimized", "not updated by an optimizer that stepped: frozen, or shared and recorded elsewhere",
           False, True),
    Reason("no_param_gradient", "the parameter had no gradient: unused in these steps, or frozen", False, True),
    Reason("param_unseen", "the parameter had no gradient: unused in these steps, or frozen", False, True),
    Reason("no_state", "the optimizer kept no tensors for it", False, True),
    Reason("no_buffer", "it was not there", False, False),
    Reason("not_merged", "not called, or lost: the run that this was merged from has lost rows", False, False),
)  # fmt: skip
_CODE = {reason.key: number + 1 for number, reason in enumerate(REASONS)}
_OF_CAUSE = {DAMAGED: "corrupt", RETIRED: "retired", DROPPED: "dropped", CUT: "died", LIVE: "live"}
_OF_CAUSE |= {UNACCOUNTED: "unaccounted", MISSED: "trigger_missed"}
_OF_MODULE = {
    "not_called", "other_ranks", "elsewhere", *HIDDEN, "silent", "bypassed", "unused", "children", "never_called",
    "untapped", "no_tensor", "no_gradient", "tied", "not_optimized", "no_param_gradient", "param_unseen", "no_state",
    "no_buffer", "disarmed",
}  # fmt: skip
"""Reasons that differ from module to module: sites with the same modules make one gap, others one each."""


_CERTAIN = np.array([_CODE[key] for key in (
    *HIDDEN, "untapped", "unused", "no_gradient", "tied", "not_optimized", "no_param_gradient", "no_state",
)])  # fmt: skip
"""Reasons that other rows of the same step prove, also where some are lost."""
_EXPLAINED = np.array([_CODE[key] for key in (*HIDDEN, "children")])
_UNCALLED = np.array([_CODE[key] for key in (
    "root_idle", "not_called", "other_ranks", "elsewhere", "bypassed", "children", "never_called", "silent",
)])  # fmt: skip
"""Reasons that are certain where nothing of the step's forward was dropped: a call would have left a row."""

_NEVER_CALLED = np.array([_CODE[key] for key in ("never_called", "silent")])
"""Reasons that nothing proves but that no row is there."""
_GONE = np.array([_CODE[key] for key in ("perhaps_dropped", *_OF_CAUSE.values())])
"""Reasons by which a row may have been there."""


class Gap(NamedTuple):
    """Values that are not there for one reason."""

    reason: Reason
    detail: str
    """What is known beyond the reason: where a record ends, which shard is damaged, why rows were dropped."""
    root: str
    sites: list[str]
    modules: list[str]
    """In the order of the tree."""
    steps: list[int]
    ranks: list[int | None]
    num_missing: int
    """Values; at most modules x sites x steps x ranks, for not each module need lack at each step."""


class Gaps:
    """Gaps as they are found, added up over modules, steps and ranks."""

    def __init__(self, slots: Slots, axis: Integers) -> None:
        self._slots = slots
        self._axis = axis
        self.expected = np.zeros(len(SLOT_SITES), np.int64)
        """Values by site."""
        self.found = np.zeros(len(SLOT_SITES), np.int64)
        self.explained = np.zeros(len(SLOT_SITES), np.int64)
        """Values that are not there, and need not be."""
        self.perhaps_dropped = np.zeros(len(SLOT_SITES), np.int64)
        """Values that were dropped, or were never there: the accounts know of drops, and not of so many."""
        self.lost: dict[int | None, dict[str, Integers]] = {}
        """By rank and reason, values by site that the accounts of the rank must know of."""
        self._sums: dict[tuple[int, str, int, int], _Sum] = {}
        self._silent: dict[str, dict[int, None]] = {}

    def add(
        self, code: int, detail: str, root: int, site: int, modules: Integers, steps: Flags, rank: int | None,
        num_missing: int,
    ) -> None:  # fmt: skip
        """Values of one site on one rank."""
        key = code, detail, root, site
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = _Sum(
                np.zeros(len(self._slots.modules), bool), np.zeros(len(self._axis), bool), {}, [0]
            )
        known.modules[modules] = True
        known.steps[:] |= steps
        known.ranks[rank] = None
        known.total[0] += num_missing
        if REASONS[code - 1].is_harmless:
            self.explained[site] += num_missing
        elif code == _CODE["perhaps_dropped"]:
            self.perhaps_dropped[site] += num_missing
        elif REASONS[code - 1].key in ACCOUNTED:
            by_site = self.lost.setdefault(rank, {}).setdefault(
                REASONS[code - 1].key, np.zeros(len(SLOT_SITES), np.int64)
            )
            by_site[site] += num_missing

    def silent(
        self, wanted: Flags, has_rows: Flags, called: Flags, writer_slots: Sequence[WriterSlots]
    ) -> dict[str, list[tuple[str, str]]]:
        """Modules of which rows are expected and that left none on any rank, by the reason."""
        slots = self._slots
        hidden = np.zeros(len(slots.modules), np.int64)
        for one in writer_slots:
            hidden = np.maximum(hidden, one.hidden)
        below = _above(slots, called)
        gone = np.any([one.modules for (code, *_), one in self._sums.items() if code in _GONE], axis=0)
        silent: dict[str, list[tuple[str, str]]] = {}
        for number in np.flatnonzero(wanted & ~has_rows).tolist():
            module = slots.modules[number]
            key = HIDDEN[hidden[number] - 1] if hidden[number] else "children" if below[number] else "never_called"
            if key == "never_called" and gone.any() and gone[number]:
                key = "gone"
            elif key == "never_called" and not module.params:
                key = "without_parameters"
            silent.setdefault(key, []).append((module.root, module.path))
        return silent

    def collected(self) -> list[Gap]:
        """The gaps, harmless ones first; sites that lack for the same reason together."""
        groups: dict[Any, list[tuple[int, _Sum]]] = {}
        for (code, detail, root, site), one in self._sums.items():
            reason = REASONS[code - 1]
            modules = one.modules.tobytes() if reason.key in _OF_MODULE else b""
            groups.setdefault((code, detail, root, modules), []).append((site, one))
        gaps = []
        for (code, detail, root, _), members in groups.items():
            modules = np.any([one.modules for _, one in members], axis=0)
            steps = np.any([one.steps for _, one in members], axis=0)
            ranks = dict.fromkeys(rank for _, one in members for rank in one.ranks)
            gaps.append(
                Gap(
                    reason=REASONS[code - 1],
                    detail=detail,
                    root=self._slots.roots[root],
                    sites=[SLOT_SITES[site] for site, _ in sorted(members, key=lambda member: member[0])],
                    modules=[self._slots.modules[number].path for number in np.flatnonzero(modules).tolist()],
                    steps=self._axis[steps].tolist(),
                    ranks=sorted(ranks, key=lambda rank: -1 if rank is None else rank),
                    num_missing=sum(one.total[0] for _, one in members),
                )
            )
        return sorted(gaps, key=lambda gap: (gap.reason.is_loss, not gap.reason.is_harmless, gap.num_missing))


class _Sum(NamedTuple):
    modules: Flags
    steps: Flags
    ranks: dict[int | None, None]
    total: list[int]


def explain(gaps: Gaps, view: RankView, *, has_rows: Flags, called: Flags, graded: Flags) -> None:
    """Add one rank's gaps.

    Args:
        gaps: where to.
        view: what the rank was to record and did.
        has_rows: of each module, whether any rank left a row of it.
        called: of each module, whether any rank saw it run.
        graded: of each module, whether any rank saw it run with gradients.
    """
    slots, when = gaps._slots, view.when
    per_slot = when.sum(axis=1)[view.code]
    np.add.at(gaps.expected, slots.site, per_slot)
    details = _details(view)
    usual = np.zeros(slots.num_slots, np.uint8)
    module_reason = _module_reasons(slots, view, has_rows, called, graded)
    first = slots.first
    columns_of = [np.flatnonzero(row & view.alive) for row in when]
    size = max(1, _MAX_CELLS // (10 * max(1, int(view.alive.sum()))))
    for begin in range(0, len(slots.modules), size):
        end = min(begin + size, len(slots.modules))
        low, high = int(first[begin]), int(first[end])
        used = [columns_of[code] for code in distinct(view.code[low:high]).tolist() if len(columns_of[code])]
        if used:
            columns = np.unique(np.concatenate(used))
            _explain_block(gaps, view, details, module_reason, (begin, end), columns, usual)
    _explain_empty_steps(gaps, view, details, usual)


def _explain_block(
    gaps: Gaps, view: RankView, details: dict[int, str], module_reason: Integers, modules: tuple[int, int],
    columns: Integers, usual_of: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    """Add what a block of modules lacks at steps of which there are rows, and note why slots lack that never came."""
    slots = gaps._slots
    begin, end = modules
    low, high = int(slots.first[begin]), int(slots.first[end])
    site, module = slots.site[low:high], slots.module[low:high] - begin
    recorded = view.cells(view.recorded, low, high, columns)
    expected = view.when[view.code[low:high]][:, columns]
    np.add.at(gaps.found, site, (expected & recorded).sum(axis=1))
    missing = expected & ~recorded
    rows = np.flatnonzero(missing.any(axis=1))
    if not len(rows):
        return
    reason = _reasons(view, slots, (low, high), columns, recorded, module_reason, rows)
    free = view.bits[columns] == 0
    some, there = missing[rows], recorded[rows]
    lost = np.zeros(len(columns), np.uint8)
    for cause in reversed(CAUSES):
        lost[view.bits[columns] & cause > 0] = _CODE[_OF_CAUSE[cause]]
    # What never came where nothing was lost would not have come where something was.
    never = (expected[rows] & free).any(axis=1) & ~(expected[rows] & there & free).any(axis=1)
    usual = reason[np.arange(len(rows)), np.argmax(some & free, axis=1)]
    usual_of[low + rows[never]] = usual[never]
    num_found = there.sum(axis=1)
    is_certain = np.isin(reason, _CERTAIN) & (num_found == 0)[:, None]
    is_certain |= np.isin(reason, _UNCALLED) & (view.room[IN_FORWARD, columns] == 0)
    may_drop = ~never[:, None] & ~is_certain
    dropped = lost == _CODE["dropped"]
    by_drop = view.take_room(columns, some & may_drop & dropped, site[rows], num_found)
    is_unsure = some & may_drop & dropped & ~by_drop & np.isin(reason, _NEVER_CALLED)
    reason[is_unsure] = _CODE["perhaps_dropped"]
    reason[by_drop] = _CODE["dropped"]
    lost_otherwise = ~free & ~dropped
    reason[:, lost_otherwise] = lost[lost_otherwise][None, :]
    reason[:, ~free] = np.where(never[:, None], usual[:, None], reason[:, ~free])
    if view.is_lossy:
        reason[there.any(axis=1)] = _CODE["not_merged"]
    reason[~some] = 0
    for code in np.unique(reason[some]).tolist():
        hits = reason == code
        counts = hits.sum(axis=1)
        of = np.flatnonzero(counts)
        groups = slots.root_of[module[rows[of]] + begin] * len(SLOT_SITES) + site[rows[of]]
        for group in np.unique(groups).tolist():
            members = of[groups == group]
            steps = np.zeros(view.when.shape[1], bool)
            steps[columns[hits[members].any(axis=0)]] = True
            root, kind = divmod(group, len(SLOT_SITES))
            numbers = module[rows[members]] + begin
            gaps.add(code, details.get(code, ""), root, kind, numbers, steps, view.rank, int(counts[members].sum()))


def _reasons(
    view: RankView, slots: Slots, block: tuple[int, int], columns: Integers, recorded: Flags,
    module_reason: Integers, rows: Integers,
) -> npt.NDArray[np.uint8]:  # fmt: skip
    """Why some slots x steps would have no value even if nothing had been lost."""
    low, high = block
    site, module = slots.site[low:high][rows], slots.module[low:high][rows]
    root = slots.root_of[module]
    first = slots.first[module] - low
    called = np.any([recorded[first + offset] for offset in range(len(OF_CALLS))], axis=0)
    graded = view.cells(view.recorded_with_grad, low, high, columns)
    with_grad = np.any([graded[first + offset] for offset in range(len(OF_CALLS))], axis=0)
    root_called, root_graded = view.called[root][:, columns], view.called_with_grad[root][:, columns]
    updated = view.updated[root][:, columns]
    codes = np.zeros((len(rows), len(columns)), np.uint8)

    def put(key: str, flags: Flags) -> None:
        codes[(codes == 0) & flags] = _CODE[key]

    is_forward = (site < len(OF_CALLS))[:, None]
    is_value = np.isin(site, _VALUES)[:, None]
    watched = np.any([view.selected[slots.first[module] + offset] for offset in _VALUES], axis=0)[:, None]
    is_hidden = (view.hidden[module] > 0) & ~view.called[root].any(axis=1)
    put("root_idle", is_forward & ~root_called & ~is_hidden[:, None])
    put("disarmed", view.axis[columns][None, :] >= view.disarmed[low:high][rows][:, None])
    put("untapped", (view.untapped[low:high][rows] & (view.hidden[module] > 0))[:, None])
    put("evaluation", is_forward & ~is_value & ~root_graded & ~is_hidden[:, None])
    shown = recorded[first + _VALUE_OFFSET[np.minimum(site, len(OF_CALLS) - 1)]]
    for key in ("tapped", "dtensor"):
        is_hidden = view.hidden[module] == HIDDEN.index(key) + 1
        put(key, is_forward & is_hidden[:, None] & called & ~shown)
    put("no_tensor", is_value & called)
    put("evaluation", is_forward & ~is_value & called & ~with_grad)
    put("no_gradient", is_forward & ~is_value & (called | ~watched))
    of_module = np.broadcast_to(module_reason[module][:, None].astype(np.uint8), codes.shape)
    codes[:] = np.where((codes == 0) & is_forward, of_module, codes)

    def of_site(name: str) -> Flags:
        recorded: Flags = (site == SLOT_SITES.index(name))[:, None]
        return recorded

    def neighbour(name: str, other: str) -> tuple[Flags, Flags]:
        """Whether the parameter's slot of another site is there, and whether it was selected."""
        is_site, distance = site == SLOT_SITES.index(name), SLOT_SITES.index(name) - SLOT_SITES.index(other)
        there, chosen = np.zeros_like(updated), np.zeros((len(rows), 1), bool)
        there[is_site] = recorded[rows[is_site] - distance]
        chosen[is_site, 0] = view.selected[low:high][rows[is_site] - distance]
        return there, chosen

    if view.tied:
        put("tied", np.isin(rows + low, list(view.tied))[:, None])
    put("no_update", ~is_forward & ~updated)
    put("not_optimized", of_site("param"))
    param_there, param_selected = neighbour("grad", "param")
    put("no_param_gradient", of_site("grad") & param_there)
    put("param_unseen", of_site("grad") & ~param_selected)  # no other row proves it: it may have been dropped
    put("not_optimized", of_site("grad"))
    grad_there, grad_selected = neighbour("optim", "grad")
    param_there, param_selected = neighbour("optim", "param")
    put("no_state", of_site("optim") & (grad_there | param_there | ~(grad_selected | param_selected)))
    is_buffer = np.isin(site, [SLOT_SITES.index(name) for name in OF_BUFFERS])[:, None]
    put("no_buffer", is_buffer)
    put("not_optimized", ~is_forward)
    return codes


def _module_reasons(slots: Slots, view: RankView, has_rows: Flags, called: Flags, graded: Flags) -> Integers:
    """For each module, why its call was not seen at a step at which its root was called.

    A module that has parameters and left no row of anything is suspicious; one without any, such as a dropout that its
    owner leaves to a fused function, is merely not called.
    """
    has_param, has_grad, wants_grad = (np.zeros(len(slots.modules), bool) for _ in range(3))
    if len(view.recorded):
        slot = view.recorded // view.when.shape[1]
        has_param[slots.module[slot[slots.site[slot] == SLOT_SITES.index("param")]]] = True
        has_grad[slots.module[slot[slots.site[slot] == SLOT_SITES.index("grad")]]] = True
    wants_grad[slots.module[view.selected & (slots.site == SLOT_SITES.index("grad"))]] = True
    order = (
        ("not_called", view.called_ever),
        *((key, view.hidden == number) for number, key in enumerate(HIDDEN, 1)),
        ("other_ranks", graded),
        ("elsewhere", called),
        ("children", _above(slots, view.called_ever)),
        ("bypassed", has_grad),
        ("unused", has_param & wants_grad),
    )
    reasons = np.full(len(slots.modules), _CODE["never_called"])
    for key, flags in reversed(order):
        reasons[flags] = _CODE[key]
    # What hides a module, or that its children ran without it, explains its values whether or not it left other rows.
    has_params = np.array([bool(module.params) for module in slots.modules], bool)
    reasons[~has_rows & has_params & ~np.isin(reasons, _EXPLAINED)] = _CODE["silent"]
    return reasons


def _above(slots: Slots, flags: Flags) -> Flags:
    """Modules with a flagged one somewhere below them."""
    are_above = np.zeros(len(flags), bool)
    layer = slots.parent_of[flags]
    while len(layer := np.unique(layer[layer >= 0])):
        layer = layer[~are_above[layer]]
        are_above[layer] = True
        layer = slots.parent_of[layer]
    return are_above


def _explain_empty_steps(
    gaps: Gaps, view: RankView, details: dict[int, str], usual: npt.NDArray[np.uint8]
) -> None:  # fmt: skip
    """Steps at which the rank has no module's value: one reason a step, but for what never came at others either."""
    axis = gaps._axis
    codes = np.full(len(axis), _CODE["not_merged" if view.is_merged else "no_step"], np.uint8)
    if not view.is_merged:
        if view.last_step is None or view.first_step is None:
            codes[:] = _CODE["ended"]
        else:
            codes[axis > view.last_step] = _CODE["ended"]
            codes[axis < view.first_step] = _CODE["later"]
    for cause in reversed(CAUSES):
        codes[view.bits & cause > 0] = _CODE[_OF_CAUSE[cause]]
    usual[_perhaps_dropped(view, codes, usual)] = _CODE["perhaps_dropped"]
    _add_steps(gaps, view, codes, ~view.alive, details, [view.rank], usual)


def _perhaps_dropped(view: RankView, codes: npt.NDArray[np.uint8], usual: npt.NDArray[np.uint8]) -> Flags:
    """Slots of which no step tells whether there is such a value, where the drops are too few for all that lack."""
    is_empty = ~view.alive & (codes == _CODE["dropped"])
    per_slot = np.where(usual == 0, view.when[:, is_empty].sum(axis=1)[view.code], 0)
    was_seen = np.zeros(len(usual), bool)
    was_seen[view.recorded // view.when.shape[1]] = True
    rest = sum(writer.balance.num_dropped for writer in view.writers) - int(view.room_taken[TOTAL].sum())
    rest -= int(per_slot[was_seen].sum())
    is_too_little = 0 < rest < int(per_slot[~was_seen].sum())
    return np.asarray(~was_seen & (usual == 0) & is_too_little)


def absent(gaps: Gaps, view: RankView, ranks: Sequence[int]) -> None:
    """Add what was expected of ranks that left nothing, all with the same rules."""
    per_slot = view.when.sum(axis=1)[view.code] * len(ranks)
    np.add.at(gaps.expected, gaps._slots.site, per_slot)
    codes = np.full(len(gaps._axis), _CODE["absent"], np.uint8)
    _add_steps(gaps, view, codes, np.ones(len(codes), bool), {}, ranks, np.zeros(gaps._slots.num_slots, np.uint8))


def _add_steps(
    gaps: Gaps, view: RankView, codes: npt.NDArray[np.uint8], steps: Flags, details: dict[int, str],
    ranks: Sequence[int | None], usual: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    slots = gaps._slots
    group = (view.code * len(slots.roots) + slots.root_of[slots.module]) * len(SLOT_SITES) + slots.site
    group = group * (len(REASONS) + 1) + usual
    for number in distinct(group[view.code > 0]).tolist():
        members = np.flatnonzero(group == number)
        rest, never = divmod(number, len(REASONS) + 1)
        rest, site = divmod(rest, len(SLOT_SITES))
        kind, root = divmod(rest, len(slots.roots))
        wanted = view.when[kind] & steps
        replaced = codes == _CODE["dropped"] if never == _CODE["perhaps_dropped"] else view.bits > 0
        of = np.where(replaced, never, codes) if never else codes
        for code in np.unique(of[wanted]).tolist():
            hits = wanted & (of == code)
            count = int(hits.sum()) * len(members)
            for rank in ranks:
                gaps.add(code, details.get(code, ""), root, site, slots.module[members], hits, rank, count)


def _details(view: RankView) -> dict[int, str]:
    """What the accounts and the shards of a rank say beyond the reason."""
    details: dict[int, str] = {}
    dropped = sorted({reason for writer in view.writers for reason in writer.balance.dropped})
    if dropped:
        details[_CODE["dropped"]] = details[_CODE["perhaps_dropped"]] = ", ".join(dropped)
    details[_CODE["retired"]] = retention(view.writers)
    if view.tied:
        details[_CODE["tied"]] = f"tied to {listed(map(repr, sorted(set(view.tied.values()))))}"
    damaged = [shard.path.name for writer in view.writers for shard in writer.shards if shard.damage]
    if damaged:
        details[_CODE["corrupt"]] = ", ".join(damaged)
    ends = [writer.last_step for writer in view.writers if writer.state == "unclosed"]
    if ends:
        known = [str(end) for end in ends if end is not None]
        details[_CODE["died"]] = f"the record ends in step {', '.join(known)}" if known else "there are no rows"
    if view.last_step is not None:
        details[_CODE["ended"]] = f"its last step is {view.last_step}"
        details[_CODE["later"]] = f"its first step is {view.first_step}"
    return details
