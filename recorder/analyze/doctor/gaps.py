"""Finds why expected values of a rank are missing. The values that are missing for one reason form a gap.

This module works on one block of modules after another, so that memory stays bounded. It must never read a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numerics.keys import Integers
from ...sites import OF_BUFFERS, OF_CALLS, VALUES_OF_CALLS, values_of
from ...system.text import listed
from .observed import ACCOUNTED, FORWARD, TOTAL, Cause, RankView, retention
from .slots import HIDDEN, SLOT_SITES, Flags, Slots, distinct

_MAX_CELLS = 4_000_000
"""The largest number of slots (sites of modules) times steps in a block."""
_VALUES = [OF_CALLS.index(site) for site in VALUES_OF_CALLS]
"""The indices in `OF_CALLS` of the sites of inputs and outputs. The other sites in `OF_CALLS` are of gradients."""
_VALUE_OFFSET = np.array([OF_CALLS.index(values_of(site)) for site in OF_CALLS])
"""For each site in `OF_CALLS`, the index of the site of the value: for example of ``output`` for ``grad_output``."""


class Reason(NamedTuple):
    """A reason why an expected value is missing."""

    key: str
    text: str
    is_loss: bool
    """True if a person should act: the value existed and is lost, or it should have been recorded."""
    is_harmless: bool
    """True if the recording proves that the value never existed."""


REASONS = (
    Reason("corrupt", "in a damaged shard", True, False),
    Reason("retired", "removed by retention", False, False),
    Reason("trigger_missed", "the rank learned of a trigger after it had dropped these steps", False, False),
    Reason("dropped", "seen and dropped", True, False),
    Reason("perhaps_dropped", "dropped, or never there: more values are missing than rows were dropped", True, False),
    Reason("died", "the process ended without closing", True, False),
    Reason("disarmed", "the recorder's hooks kept failing at this module, and were removed", True, False),
    Reason("live", "not recorded yet", False, False),
    Reason("unaccounted", "rows are missing for an unknown reason", True, False),
    Reason("absent", "no rows of the rank at all", True, False),
    Reason("ended", "the rank closed its record earlier than the others", False, False),
    Reason("later", "the rank began to record later than the others", False, False),
    Reason("no_step", "no module's values at these steps", False, True),
    Reason("root_idle", "the root was not called at these steps", False, True),
    Reason("evaluation", "called without gradients only, as in an evaluation", False, True),
    Reason("not_called", "not called at these steps, but at other steps", False, True),
    Reason("other_ranks", "called on other ranks, never on this one", False, False),
    Reason("elsewhere", "called on other ranks alone, without gradients, as in an evaluation", False, True),
    Reason("late", "attached after compilation: attach first, or call torch.compiler.reset()", True, False),
    Reason("compiled", "compiled: hooks do nothing there; RECORDER_COMPILED=tap puts taps into the graph", False, True),
    Reason("scripted", "scripted or traced by torch.jit, which takes no hooks: instrument it before", False, True),
    Reason("inlined", "in a graph of torch.fx or torch.export, where it has no call of its own", False, True),
    Reason("tapped", "no tap showed it: not tapped, not called, or it returns its argument", False, True),
    Reason("untapped", "not tapped there: recorder.instrument(model, select='site=input,output'); TorchScript has no "
           "taps on inputs", False, False),
    Reason("dtensor", "no tap showed it: its parameters are DTensors, which pass a graph untapped", False, True),
    Reason("fused", "MultiheadAttention uses its parameters without a call", False, True),
    Reason("silent", "its module left no rows at all", True, False),
    Reason("bypassed", "its own call was never seen, though its parameters have gradients: used directly, or called as "
           ".forward()", False, True),
    Reason("unused", "never called, and its parameters had no gradient", False, True),
    Reason("children", "its children were called, but it was never called, or it returns no tensor", False, True),
    Reason("never_called", "never called at a recorded step", False, False),
    Reason("no_tensor", "called, with no tensor at this site", False, True),
    Reason("no_gradient", "no gradient reached it: not required, not used in the loss, or not tapped in a graph",
           False, True),
    Reason("tied", "another name of a parameter that is recorded once, under its first name", False, True),
    Reason("no_update", "no optimizer stepped at these steps", False, True),
    Reason("in_no_optimizer", "in no optimizer that steps, though it has a gradient", False, True),
    Reason("not_optimized", "not updated by an optimizer that stepped: frozen, shared and recorded elsewhere, or "
           "updated through a copy", False, True),
    Reason("no_param_gradient", "the parameter had no gradient: unused in these steps, or frozen", False, True),
    Reason("param_unseen", "the parameter had no gradient: unused in these steps, or frozen", False, True),
    Reason("no_state", "the optimizer kept no tensors for the parameter", False, True),
    Reason("no_buffer", "the buffer did not exist", False, False),
    Reason("not_merged", "not called, or lost: the run that was merged has lost rows", False, False),
)  # fmt: skip
_CODE = {reason.key: number + 1 for number, reason in enumerate(REASONS)}
_OF_CAUSE = {cause: _CODE[str(cause.name).lower()] for cause in Cause}
_OF_MODULE = {
    "not_called", "other_ranks", "elsewhere", *HIDDEN, "silent", "bypassed", "unused", "children", "never_called",
    "untapped", "no_tensor", "no_gradient", "tied", "in_no_optimizer", "not_optimized",
    "no_param_gradient", "param_unseen", "no_state",
    "no_buffer", "disarmed",
}  # fmt: skip
"""Reasons that depend on the module. Sites with such a reason share a gap only if the same modules lack values."""


_CERTAIN = np.array([_CODE[key] for key in (
    *HIDDEN, "untapped", "unused", "no_gradient", "tied", "in_no_optimizer", "not_optimized",
    "no_param_gradient", "no_state",
)])  # fmt: skip
"""Reasons that are certain even if rows of the step were lost, because the step's other rows prove them."""
_EXPLAINED = np.array([_CODE[key] for key in (*HIDDEN, "children")])
_UNCALLED = np.array([_CODE[key] for key in (
    "root_idle", "not_called", "other_ranks", "elsewhere", "bypassed", "children", "never_called", "silent",
)])  # fmt: skip
"""Reasons that are certain if no row of the step's forward was dropped. A call would have left a row of the forward."""

_NEVER_CALLED = np.array([_CODE[key] for key in ("never_called", "silent")])
"""Reasons whose only evidence is that a row is missing."""
_GONE = np.array([_CODE["perhaps_dropped"], *_OF_CAUSE.values()])
"""Reasons that leave open whether the missing value existed."""


class Gap(NamedTuple):
    """Values that are missing for one reason."""

    reason: Reason
    detail: str
    """Facts besides the reason: where a record ends, which shard is damaged, or why rows were dropped."""
    root: str
    sites: list[str]
    modules: list[str]
    """The paths of the modules that lack values, in the order of the module tree."""
    steps: list[int]
    ranks: list[int | None]
    num_missing: int
    """The number of missing values, at most modules x sites x steps x ranks."""


@dataclass(slots=True)
class _Sum:
    """The values of one site and one root (model) that are missing for one reason."""

    modules: Flags
    steps: Flags
    ranks: set[int | None]
    num_missing: int = 0


class Gaps:
    """Collects missing values with their reasons, and joins them into gaps over modules, steps and ranks."""

    def __init__(self, slots: Slots, axis: Integers) -> None:
        self.slots = slots
        self.axis = axis
        self.expected, self.found, self.explained, self.perhaps_dropped = np.zeros((4, len(SLOT_SITES)), np.int64)
        """Four counts for each site: expected values; recorded values; missing values that need not exist; and missing
        values that were dropped or never existed, as fewer rows were dropped than are missing."""
        self.lost: dict[int | None, dict[str, Integers]] = {}
        """The number of missing values by rank, reason and site. It is compared with the rank's counts of lost rows."""
        self._sums: dict[tuple[int, str, int, int], _Sum] = {}

    def add(
        self, code: int, detail: str, root: int, site: int, modules: Integers, steps: Flags, rank: int | None,
        num_missing: int,
    ) -> None:  # fmt: skip
        """Add missing values of one site on one rank."""
        key, reason = (code, detail, root, site), REASONS[code - 1]
        if key not in self._sums:
            self._sums[key] = _Sum(np.zeros(len(self.slots.modules), bool), np.zeros(len(self.axis), bool), set())
        known = self._sums[key]
        known.modules[modules] = True
        known.steps |= steps
        known.ranks.add(rank)
        known.num_missing += num_missing
        if reason.is_harmless:
            self.explained[site] += num_missing
        elif reason.key == "perhaps_dropped":
            self.perhaps_dropped[site] += num_missing
        elif reason.key in ACCOUNTED:
            lost = self.lost.setdefault(rank, {})
            lost.setdefault(reason.key, np.zeros(len(SLOT_SITES), np.int64))[site] += num_missing

    def silent(
        self, wanted: Flags, has_rows: Flags, called: Flags, hidden: Integers
    ) -> dict[str, list[tuple[str, str]]]:
        """Return the root and path of the modules with expected rows that left no row on any rank, by the reason.

        `hidden` says for each module why hooks cannot observe its calls, as in `WriterSlots`.
        """
        slots = self.slots
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
        """Return the gaps, harmless gaps first. Sites that lack values for the same reason share a gap."""
        groups: dict[Any, list[tuple[int, _Sum]]] = {}
        for (code, detail, root, site), one in self._sums.items():
            reason = REASONS[code - 1]
            modules = one.modules.tobytes() if reason.key in _OF_MODULE else b""
            groups.setdefault((reason, detail, root, modules), []).append((site, one))
        gaps = []
        for (reason, detail, root, _), members in groups.items():
            sums = [one for _, one in members]
            modules, steps = (np.any([getattr(one, name) for one in sums], axis=0) for name in ("modules", "steps"))
            ranks = set[int | None]().union(*(one.ranks for one in sums))
            gaps.append(
                Gap(
                    reason=reason,
                    detail=detail,
                    root=self.slots.roots[root],
                    sites=[SLOT_SITES[site] for site in sorted(site for site, _ in members)],
                    modules=[self.slots.modules[number].path for number in np.flatnonzero(modules).tolist()],
                    steps=self.axis[steps].tolist(),
                    ranks=sorted(ranks, key=lambda rank: -1 if rank is None else rank),
                    num_missing=sum(one.num_missing for one in sums),
                )
            )
        return sorted(gaps, key=lambda gap: (gap.reason.is_loss, not gap.reason.is_harmless, gap.num_missing))


def explain(gaps: Gaps, view: RankView, *, has_rows: Flags, called: Flags, graded: Flags) -> None:
    """Add the gaps of one rank, whose expected and recorded values are in `view`.

    For each module, `has_rows` says whether any rank has a row of the module, `called` whether the module ran on any
    rank, and `graded` whether it ran with gradients on any rank.
    """
    slots, first = view.slots, view.slots.first
    np.add.at(gaps.expected, slots.site, view.when.sum(axis=1)[view.code])
    details = _details(view)
    usual = np.zeros(slots.num_slots, np.uint8)  # the reason if the slot never has a value, else 0
    module_reason = _module_reasons(view, has_rows, called, graded)
    columns_of = [np.flatnonzero(row & view.alive) for row in view.when]
    size = max(1, _MAX_CELLS // (10 * max(1, int(view.alive.sum()))))
    for begin in range(0, len(slots.modules), size):
        low, high = int(first[begin]), int(first[min(begin + size, len(slots.modules))])
        used = [columns_of[code] for code in distinct(view.code[low:high]).tolist() if len(columns_of[code])]
        if not used:
            continue
        block = _SlotBlock(view, low, high, np.unique(np.concatenate(used)))
        np.add.at(gaps.found, slots.site[low:high], (block.expected & block.recorded).sum(axis=1))
        if len(block.rows):
            reason = _with_losses(block, _reasons(block, module_reason), usual)
            _add_block(gaps, block, reason, details)
    _explain_empty_steps(gaps, view, details, usual)


class _SlotBlock:
    """Which values of some modules at some steps are expected, recorded and missing. A slot is a site of a module."""

    def __init__(self, view: RankView, low: int, high: int, columns: Integers) -> None:
        slots = view.slots
        self.view, self.low, self.high = view, low, high
        self.columns = columns
        """The steps of the block, as indices into the axis of all steps."""
        self.recorded = view.cells(view.recorded, low, high, columns)
        self.expected = view.when[view.code[low:high]][:, columns]
        missing = self.expected & ~self.recorded
        self.rows = np.flatnonzero(missing.any(axis=1))
        """The slots (sites of modules) that lack a value, as indices from `low`. They are the rows of `missing`."""
        self.missing = missing[self.rows]
        self.slots = low + self.rows
        self.site, self.module = slots.site[self.slots], slots.module[self.slots]
        self.root = slots.root_of[self.module]


def _with_losses(
    block: _SlotBlock, reason: npt.NDArray[np.uint8], usual_of: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Return the reason of each missing value. Where rows were lost, the loss may be the reason.

    `reason` says why a value would be missing if no row had been lost. For each slot (a site of a module) that never
    has a value, `usual_of` is set to the reason that holds without losses.
    """
    view, missing, columns = block.view, block.missing, block.columns
    without_losses = reason.copy()
    there, expected = block.recorded[block.rows], block.expected[block.rows]
    is_free = view.bits[columns] == 0
    lost = np.zeros(len(columns), np.uint8)
    for cause, code in reversed(_OF_CAUSE.items()):
        lost[view.bits[columns] & cause > 0] = code
    # A slot (a site of a module) without values at all steps without losses would have no values at other steps either.
    never = (expected & is_free).any(axis=1) & ~(expected & there & is_free).any(axis=1)
    usual = reason[np.arange(len(reason)), np.argmax(missing & is_free, axis=1)]
    usual_of[block.slots[never]] = usual[never]
    num_found = there.sum(axis=1)
    is_certain = np.isin(reason, _CERTAIN) & (num_found == 0)[:, None]
    is_certain |= np.isin(reason, _UNCALLED) & (view.room[FORWARD, columns] == 0)
    is_drop = lost == _CODE["dropped"]
    may_drop = missing & is_drop & ~never[:, None] & ~is_certain
    by_drop = view.take_room(columns, may_drop, block.site, num_found)
    reason[may_drop & ~by_drop & np.isin(reason, _NEVER_CALLED)] = _CODE["perhaps_dropped"]
    reason[by_drop] = _CODE["dropped"]
    lost_otherwise = ~is_free & ~is_drop
    reason[:, lost_otherwise] = lost[lost_otherwise][None, :]
    of_step = np.where(is_certain, without_losses, usual[:, None])
    reason[:, ~is_free] = np.where(never[:, None], of_step, reason)[:, ~is_free]
    if view.is_lossy:
        reason[there.any(axis=1)] = _CODE["not_merged"]
    reason[~missing] = 0
    return reason


def _add_block(gaps: Gaps, block: _SlotBlock, reason: npt.NDArray[np.uint8], details: dict[int, str]) -> None:
    groups = block.root * len(SLOT_SITES) + block.site
    for code in np.unique(reason[block.missing]).tolist():
        hits = reason == code
        counts = hits.sum(axis=1)
        for group in np.unique(groups[counts > 0]).tolist():
            members = np.flatnonzero((groups == group) & (counts > 0))
            steps = np.zeros(len(gaps.axis), bool)
            steps[block.columns[hits[members].any(axis=0)]] = True
            root, site = divmod(group, len(SLOT_SITES))
            total = int(counts[members].sum())
            gaps.add(code, details.get(code, ""), root, site, block.module[members], steps, block.view.rank, total)


def _reasons(block: _SlotBlock, module_reason: Integers) -> npt.NDArray[np.uint8]:
    """Return why each slot (site of a module) would lack a value at each step if no row had been lost."""
    codes = np.zeros(block.missing.shape, np.uint8)

    def put(key: str, flags: Flags) -> None:
        codes[(codes == 0) & flags] = _CODE[key]

    _put_reasons_of_calls(block, put)
    is_of_call = (block.site < len(OF_CALLS))[:, None]
    of_module = np.broadcast_to(module_reason[block.module][:, None].astype(np.uint8), codes.shape)
    codes[:] = np.where((codes == 0) & is_of_call, of_module, codes)
    _put_reasons_of_states(block, put)
    return codes


_Put = Callable[[str, Flags], None]


def _put_reasons_of_calls(block: _SlotBlock, put: _Put) -> None:
    view, site, module, columns = block.view, block.site, block.module, block.columns
    promised, first = view.promised, view.slots.first[module]
    offsets = range(len(OF_CALLS))
    graded = view.cells(view.recorded_with_grad, block.low, block.high, columns)
    called, with_grad = (
        np.any([cells[first - block.low + offset] for offset in offsets], axis=0) for cells in (block.recorded, graded)
    )
    root_called, root_graded = (flags[block.root][:, columns] for flags in (view.called, view.called_with_grad))
    is_of_call = (site < len(OF_CALLS))[:, None]
    is_value = np.isin(site, _VALUES)[:, None]
    is_gradient = is_of_call & ~is_value
    is_watched = np.any([promised.selected[first + offset] for offset in _VALUES], axis=0)[:, None]
    hidden = promised.hidden[module]
    is_seen = ((hidden == 0) | view.called[block.root].any(axis=1))[:, None]
    put("root_idle", is_of_call & ~root_called & is_seen)
    put("disarmed", view.axis[columns][None, :] >= promised.disarmed[block.slots][:, None])
    put("untapped", (promised.untapped[block.slots] & (hidden > 0))[:, None])
    put("evaluation", is_gradient & ~root_graded & is_seen)
    shown = block.recorded[first - block.low + _VALUE_OFFSET[np.minimum(site, len(OF_CALLS) - 1)]]
    for key in ("tapped", "dtensor"):
        put(key, is_of_call & (hidden == HIDDEN.index(key) + 1)[:, None] & called & ~shown)
    put("no_tensor", is_value & called)
    put("evaluation", is_gradient & called & ~with_grad)
    put("no_gradient", is_gradient & (called | ~is_watched))


def _put_reasons_of_states(block: _SlotBlock, put: _Put) -> None:
    view, site = block.view, block.site
    is_updated = view.updated[block.root][:, block.columns]

    def is_of(*names: str) -> Flags:
        return np.isin(site, [SLOT_SITES.index(name) for name in names])[:, None]

    def neighbour(name: str, other: str) -> tuple[Flags, Flags]:
        """Return masks of the slots at site `name` whose parameter is recorded, and selected, at site `other`."""
        is_site, distance = site == SLOT_SITES.index(name), SLOT_SITES.index(name) - SLOT_SITES.index(other)
        there, chosen = np.zeros_like(is_updated), np.zeros((len(site), 1), bool)
        there[is_site] = block.recorded[block.rows[is_site] - distance]
        chosen[is_site, 0] = view.promised.selected[block.slots[is_site] - distance]
        return there, chosen

    is_state = (site >= len(OF_CALLS))[:, None]
    if view.promised.tied:
        put("tied", np.isin(block.slots, list(view.promised.tied))[:, None])
    put("no_update", is_state & ~is_updated)
    if view.promised.untrained:
        put("in_no_optimizer", np.isin(block.slots, list(view.promised.untrained))[:, None])
    put("not_optimized", is_of("param"))
    param_there, param_selected = neighbour("grad", "param")
    put("no_param_gradient", is_of("grad") & param_there)
    put("param_unseen", is_of("grad") & ~param_selected)  # no row proves that the gradient never existed
    put("not_optimized", is_of("grad"))
    grad_there, grad_selected = neighbour("optim", "grad")
    param_there, param_selected = neighbour("optim", "param")
    put("no_state", is_of("optim") & (grad_there | param_there | ~(grad_selected | param_selected)))
    put("no_buffer", is_of(*OF_BUFFERS))
    put("not_optimized", is_state)


def _module_reasons(view: RankView, has_rows: Flags, called: Flags, graded: Flags) -> Integers:
    """Return, for each module, why no call was recorded at a step at which its root (model) was called.

    A module with parameters that left no row at all is suspicious. A module without parameters is merely not called: an
    example is a dropout whose owner calls a fused function.
    """
    slots, hidden = view.slots, view.promised.hidden
    has_param, has_grad, wants_grad = (np.zeros(len(slots.modules), bool) for _ in range(3))
    if len(view.recorded):
        slot = view.recorded // view.when.shape[1]
        has_param[slots.module[slot[slots.site[slot] == SLOT_SITES.index("param")]]] = True
        has_grad[slots.module[slot[slots.site[slot] == SLOT_SITES.index("grad")]]] = True
    wants_grad[slots.module[view.promised.selected & (slots.site == SLOT_SITES.index("grad"))]] = True
    order = (
        ("not_called", view.called_ever),
        *((key, hidden == number) for number, key in enumerate(HIDDEN, 1)),
        ("other_ranks", graded),
        ("elsewhere", called),
        ("children", _above(slots, view.called_ever)),
        ("bypassed", has_grad),
        ("unused", has_param & wants_grad),
    )
    reasons = np.select([flags for _, flags in order], [_CODE[key] for key, _ in order], _CODE["never_called"])
    # Hooks cannot see a hidden module, and only children of some modules ran. Such modules may leave no row at all.
    has_params = np.array([bool(module.params) for module in slots.modules], bool)
    reasons[~has_rows & has_params & ~np.isin(reasons, _EXPLAINED)] = _CODE["silent"]
    return reasons


def _above(slots: Slots, flags: Flags) -> Flags:
    are_above = np.zeros(len(flags), bool)
    layer = slots.parent_of[flags]
    while len(layer := np.unique(layer[layer >= 0])):
        layer = layer[~are_above[layer]]
        are_above[layer] = True
        layer = slots.parent_of[layer]
    return are_above


def _explain_empty_steps(gaps: Gaps, view: RankView, details: dict[int, str], usual: npt.NDArray[np.uint8]) -> None:
    """Add gaps for the steps at which no module has a value.

    There is one reason for each step. But where rows were lost, a slot (a site of a module) that never has a value gets
    its own reason.
    """
    axis = gaps.axis
    codes = np.full(len(axis), _CODE["not_merged" if view.is_merged else "no_step"], np.uint8)
    if not view.is_merged:
        if view.last_step is None or view.first_step is None:
            codes[:] = _CODE["ended"]
        else:
            codes[axis > view.last_step] = _CODE["ended"]
            codes[axis < view.first_step] = _CODE["later"]
    for cause, code in reversed(_OF_CAUSE.items()):
        codes[view.bits & cause > 0] = code
    usual[_perhaps_dropped(view, codes, usual)] = _CODE["perhaps_dropped"]
    _add_steps(gaps, view, codes, ~view.alive, details, [view.rank], usual)


def _perhaps_dropped(view: RankView, codes: npt.NDArray[np.uint8], usual: npt.NDArray[np.uint8]) -> Flags:
    """Return a mask of the slots (sites of modules) without any value, if dropped rows explain only some of them."""
    is_empty = ~view.alive & (codes == _CODE["dropped"])
    per_slot = np.where(usual == 0, view.when[:, is_empty].sum(axis=1)[view.code], 0)
    was_seen = np.isin(np.arange(len(usual)), view.recorded // view.when.shape[1])
    rest = sum(writer.balance.num_dropped for writer in view.writers) - int(view.room_taken[TOTAL].sum())
    rest -= int(per_slot[was_seen].sum())
    is_too_little = 0 < rest < int(per_slot[~was_seen].sum())
    return np.asarray(~was_seen & (usual == 0) & is_too_little)


def absent(gaps: Gaps, view: RankView, ranks: Sequence[int]) -> None:
    """Add gaps for all expected values of `ranks`, which left no record. The ranks have the same rules."""
    per_slot = view.when.sum(axis=1)[view.code] * len(ranks)
    np.add.at(gaps.expected, gaps.slots.site, per_slot)
    codes = np.full(len(gaps.axis), _CODE["absent"], np.uint8)
    _add_steps(gaps, view, codes, np.ones(len(codes), bool), {}, ranks, np.zeros(gaps.slots.num_slots, np.uint8))


def _add_steps(
    gaps: Gaps, view: RankView, codes: npt.NDArray[np.uint8], steps: Flags, details: dict[int, str],
    ranks: Sequence[int | None], usual: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    slots = gaps.slots
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
    details: dict[int, str] = {}
    dropped = sorted({reason for writer in view.writers for reason in writer.balance.dropped})
    if dropped:
        details[_CODE["dropped"]] = details[_CODE["perhaps_dropped"]] = ", ".join(dropped)
    details[_CODE["retired"]] = retention(view.writers)
    if view.promised.tied:
        details[_CODE["tied"]] = f"tied to {listed(map(repr, sorted(set(view.promised.tied.values()))))}"
    damaged = [shard.path.name for writer in view.writers for shard in writer.all_shards if shard.damage]
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
