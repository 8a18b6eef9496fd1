"""What one rank was expected to record and what is there of it, by slots and steps. Never asks why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...run.run import RecordedWriter
from ...sites import OF_CALLS
from .observed import SlotRows
from .sequence_gaps import TOTAL
from .slots import Flags, Slots, distinct

Integers = npt.NDArray[np.int64]


class RankView:
    """What one rank was expected to record, and what is there of it, by slots and steps."""

    def __init__(
        self,
        slots: Slots,
        axis: Integers,
        *,
        rank: int | None,
        writers: Sequence[RecordedWriter],
        selected: Flags,
        hidden: Integers,
        disarmed: Integers,
        untapped: Flags,
        tied: Mapping[int, str],
        code: Integers,
        when: Flags,
        is_merged: bool = False,
    ) -> None:
        self._slots = slots
        self.axis = axis
        self.rank = rank
        self.writers = writers
        self.selected = selected
        """For each slot, whether a rule selects its site on this rank."""
        self.hidden = hidden
        """For each module, why hooks see no call of it, as `WriterSlots` says."""
        self.disarmed = disarmed
        """For each slot, the first step at which its hooks were disarmed."""
        self.untapped = untapped
        """For each slot, whether graphs alone show its module, and at other sites."""
        self.tied = tied
        """For each slot of a tied parameter, the other name under which that parameter is recorded."""
        self.code = code
        """For each slot a row of `when`."""
        self.when = when
        """At which steps of the axis a value is expected; row 0 is never."""
        self.is_merged = is_merged
        self.is_lossy = False
        """A merged run whose source had lost rows: at which steps, it does not say."""
        num_roots, num_steps, num_modules = len(slots.roots), len(axis), len(slots.modules)
        self.bits = np.zeros(num_steps, np.uint8)
        """Causes of `losses` by step."""
        self.room = np.zeros((TOTAL + 1, num_steps), np.int64)
        """How many missing values of a step drops can explain, as in `losses`."""
        self.room_taken = np.zeros((TOTAL + 1, num_steps), np.int64)
        """How many they do explain."""
        self.alive = np.zeros(num_steps, bool)
        """Some module's value is there."""
        self.called = np.zeros((num_roots, num_steps), bool)
        self.called_with_grad = np.zeros((num_roots, num_steps), bool)
        self.updated = np.zeros((num_roots, num_steps), bool)
        """An optimizer stepped."""
        self.recorded = np.zeros(0, np.int64)
        """Slot x steps + step of what is there, sorted."""
        self.recorded_with_grad = np.zeros(0, np.int64)
        self.called_ever = np.zeros(num_modules, bool)
        self.graded_ever = np.zeros(num_modules, bool)
        """For each module, whether it ran with gradients."""
        self.first_step: int | None = None
        self.last_step: int | None = None

    def add(self, rows: SlotRows) -> None:
        """Add the rows of one writer."""
        axis, step = self.axis, rows.step
        if not len(step):
            return
        ends = [int(step.min()), int(step.max()), self.first_step, self.last_step]
        self.first_step, self.last_step = (pick(end for end in ends if end is not None) for pick in (min, max))
        if not len(axis):
            return
        index = np.minimum(np.searchsorted(axis, step), len(axis) - 1)
        there = axis[index] == step
        in_tree = there & (rows.slot >= 0)
        self.alive[index[in_tree]] = True
        of_root = there & (rows.root >= 0)
        forward = (rows.site >= 0) & (rows.site < len(OF_CALLS))
        for flags, wanted in (
            (self.called, of_root & forward),
            (self.called_with_grad, of_root & forward & rows.with_grad),
            (self.updated, of_root & rows.is_update),
        ):
            flags[rows.root[wanted], index[wanted]] = True
        keys = rows.slot.astype(np.int64) * len(axis) + index
        self.recorded = _joined(self.recorded, distinct(keys[in_tree]))
        graded = _joined(self.recorded_with_grad, distinct(keys[in_tree & forward & rows.with_grad]))
        self.recorded_with_grad = graded
        slots = self._slots
        self.called_ever[slots.module[rows.slot[in_tree & forward]]] = True
        self.graded_ever[slots.module[graded // len(axis)]] = True

    def cells(self, keys: Integers, low: int, high: int, columns: Integers) -> Flags:
        """Return, for each slot of a block and each of some steps, whether the value is among the sorted `keys`."""
        num_steps = self.when.shape[1]
        has_value = np.zeros((high - low, len(columns)), bool)
        begin, end = np.searchsorted(keys, [low * num_steps, high * num_steps])
        slot, step = np.divmod(keys[begin:end], num_steps)
        column = np.full(num_steps, -1)
        column[columns] = np.arange(len(columns))
        there = column[step] >= 0
        has_value[slot[there] - low, column[step[there]]] = True
        return has_value


def _joined(some: Integers, more: Integers) -> Integers:
    return distinct(np.concatenate([some, more])) if len(some) and len(more) else some if len(some) else more
