"""The probe: the L2 norm of each selected value at every step, kept in memory and written as one row for many steps.

The probe also measures each update: how far an optimizer's step has moved a parameter (site ``update``).

A value is measured in the hook, where it lies, and nothing is put on the channel. At the end of a step the numbers of
all values are appended to a block in memory. A full block becomes rows of site ``probe``, one for each value (section 3
of FORMAT.md). A value that turns NaN or infinite also gets the row of statistics that a rule with ``keep=stats`` would
keep. So a reader sees the step, the call and the order in which values went wrong.

For a value on a device, a kernel computes the norm. The norms of a step are copied to the host together and arrive one
or two steps later. So the row of a value that turned NaN or infinite on a device says only that it did.

Nothing here may wait for a device, or hold a tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...native import ITEMS_OF_THREAD, SAMPLED, ManyTensors
from ...records import KEEP_PROBE, KEEP_STATS, Chunk, ProbedSeries, ProbedStep, SeenValue, StepPosition, ValuePlace
from ...sites import UPDATE
from ..local_values import DTYPES
from .arriving import ArrivingSteps, TurnedValues
from .device_probe import DeviceProbe, ProbedValue, SeenOnDevice
from .host_probe import HELD_BYTES, HostProbe, squares_at, without_repeats
from .probe_rows import ProbeBlock, StepNumbers
from .probed_groups import ProbedGroup

if TYPE_CHECKING:
    from ..staging.measure import HostMeasure


MAX_COLUMNS = 1 << 16
"""The most values that are measured. Names may change with the data, so the number of values may grow without bound."""
_WAIT_S = 5.0
"""The longest wait at a flush, in seconds, for norms that are on their way from a device."""
_QUICK_ITEMS = 2 * ITEMS_OF_THREAD
"""A value with fewer elements is measured by one thread, however many threads there are."""
_sum = np.add.reduce


class SeenBefore(NamedTuple):
    """A forward's value that `Probe.saw` has measured, for `Probe.saw_again`."""

    column: int
    dtype: torch.dtype
    plan: HostMeasure


class SeenAlone(NamedTuple):
    """A value that was measured by itself, in a `Probe.learning` block."""

    value: ProbedValue
    keep: int
    """What else to keep: bits of KEEP_* without KEEP_PROBE."""
    local: torch.Tensor
    """The plain tensor that was measured. It may be a copy of the program's tensor."""


class Probe:
    """Measures one rank's values at every step and keeps the numbers. Called on training threads."""

    def __init__(
        self, observe: Callable[..., None], on_device: DeviceProbe, on_step: Callable[[ProbedStep], None] | None,
        on_trouble: Callable[[str, str], None], *, use_native: bool,
    ) -> None:  # fmt: skip
        """Begin empty.

        Args:
            observe: records a tensor, as `Capture.observe` does.
            on_device: measures values on devices.
            on_step: is called with the numbers of each step that is over, on a training thread.
            on_trouble: is called with the name of a root and a sentence about a value of it that has turned NaN or
                infinite, on a training thread.
            use_native: whether the compiled loops may be used.
        """
        self._on_device = on_device
        self._on_step = on_step
        self.on_host = HostProbe(use_native=use_native)
        self._plans, self._sum_of_squares = self.on_host.plans, self.on_host.sum_of_squares
        self._statistics = self.on_host.statistics
        self._turned = TurnedValues(on_trouble)
        self._has_turned = self._turned.has_turned
        self._arriving = ArrivingSteps(on_device, self._turned)
        self._changing = threading.RLock()
        """A lock for adding a column, appending a step and recording a block, because several threads may train."""
        self._columns: list[ProbedSeries] = []
        self._block = ProbeBlock(self._columns, observe)
        self._by_key: dict[tuple[ValuePlace, str, str, torch.dtype], int] = {}
        """The index of each column (one value), by the value's origin, phase, mode and dtype."""
        self._sums: list[float] = []
        """For each column (one value), the sum of the squares of the finite elements at the current step."""
        self._numels: list[int] = []
        """For each column (one value), the number of elements that were seen at the current step."""
        self._together: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]] = []
        """The columns, sums of squares and numbers of elements of values that were measured together at this step."""
        self._bad: dict[int, tuple[int, int]] = {}
        """For each column with non-finite elements at the current step, the numbers of NaN and of infinite elements."""
        self._step = 0
        """The step that is under way. A value of another step is not measured: the numbers of that step are over."""
        self.has_missed = False
        """Whether a value of another step was seen, as from a thread that evaluates while another thread trains."""
        self._has_values = False
        self._has_measured = False
        self._has_refused = False
        self.is_full = False
        """Whether a value is not measured because `MAX_COLUMNS` values are measured already."""
        self._seen: dict[int, list[SeenAlone]] = {}
        """For each thread in a `learning` block, the values that were measured there."""

    def saw(self, value: SeenValue, local: torch.Tensor, keep: int) -> int:
        """Measure a value, and return what else to record of the value, as bits of KEEP_*.

        The result has the bits of `keep` except KEEP_PROBE. KEEP_STATS is added if the value has its first NaN, or a
        larger fraction of infinite elements than before. A recompute is not measured, nor a value that is local to a
        rank before a reduction (`scope`). `local` has the value's plain elements, in host memory or on a device.
        """
        origin, moment, phase, call, _, scope, chunk, note = value
        keep &= ~KEEP_PROBE
        numel = local.numel()
        if phase == "recompute" or scope == "local" or not numel:
            return keep
        if moment.step != self._step:
            self.has_missed = True
            return keep
        key = (origin, phase, moment.mode, local.dtype)
        column = self._by_key.get(key)
        if column is None:
            column = self._add(key, scope, chunk)
            if column is None:
                return keep
        is_on_host = _is_on_host(local)
        seen = self._seen.get(threading.get_ident()) if self._seen else None
        if seen is not None or not is_on_host:
            probed = ProbedValue(column, local.dtype, numel, local.shape, origin, phase, scope, chunk, note)
            if seen is not None:
                seen.append(SeenAlone(probed, keep, local))
            if not is_on_host:
                self._launched(self._on_device.measure(SeenOnDevice(probed, moment, call, keep != 0), local))
                return keep
        local, times = without_repeats(local)
        total = times * self._sum_of_squares(local)
        num_nan = num_inf = 0
        if not total < math.inf:
            its = self._statistics(local)
            if its.nan_count is None or its.inf_count is None:
                return keep  # the dtype has no statistics
            num_nan, num_inf, total = times * its.nan_count, times * its.inf_count, times * (its.sum_sq or 0.0)
        self._sums[column] += total
        self._numels[column] += numel
        self._has_values = self._has_measured = True
        if not num_nan and not num_inf:
            return keep
        nan_before, inf_before = self._bad.get(column, (0, 0))
        self._bad[column] = nan_before + num_nan, inf_before + num_inf
        if not self._has_turned(column, num_nan > 0, num_inf / numel):
            return keep
        self._turned.tell(origin, moment, is_nan=num_nan > 0)
        return keep | KEEP_STATS

    def seen_before(self, origin: ValuePlace, mode: str, tensor: torch.Tensor) -> SeenBefore | None:
        """Return what `saw_again` needs of a forward's value that `saw` has measured, or None for one on a device."""
        column = self._by_key.get((origin, "forward", mode, tensor.dtype))
        plan = self._plans.get((tensor.dtype, tensor.numel()))
        return None if column is None or plan is None else SeenBefore(column, tensor.dtype, plan)

    def saw_again(self, known: SeenBefore, tensor: torch.Tensor, step: int) -> bool:
        """Do what `saw` does, for a new tensor of a value that `saw` has measured in this mode.

        If the tensor does not fit or is not finite, measure nothing and return False.
        """
        column, dtype, plan = known
        loops = plan.loops
        items = loops.items
        try:
            if (
                tensor.dtype is not dtype
                or tensor.numel() != items
                or not tensor.is_cpu
                or tensor.is_nested
                or not tensor.is_contiguous()
                or tensor.storage_offset()  # the storage of a tensor with an offset may have been freed
                or not (at := tensor.data_ptr())
                or self._seen
                or step != self._step
            ):
                return False
        except RuntimeError:  # a sparse tensor, or one of functorch's
            return False
        is_quick = items < _QUICK_ITEMS or (items * loops.item_bytes <= HELD_BYTES and torch.get_num_threads() == 1)
        total = plan.kernels.squares_held(loops.measuring, at) if is_quick else squares_at(at, plan)
        if not total < math.inf:
            return False
        self._sums[column] += total
        self._numels[column] += items
        self._has_values = self._has_measured = True
        return True

    def _launched(self, is_measured: bool) -> bool:
        if is_measured:
            self._has_values = self._has_measured = True
        else:
            self._has_refused = True
        return is_measured

    @contextmanager
    def learning(self) -> Iterator[list[SeenAlone]]:
        """Yield a list of the values that `saw` measures on this thread in the `with` block. It holds tensors."""
        seen: list[SeenAlone] = []
        self._seen[threading.get_ident()] = seen
        try:
            yield seen
        finally:
            del self._seen[threading.get_ident()]

    @property
    def is_blind(self) -> bool:
        """Whether every value so far was on a device where nothing can be measured."""
        return self._has_refused and not self._has_measured

    def group(
        self, seen: list[SeenAlone], tensors: list[torch.Tensor], others: Iterable[ProbedGroup | None]
    ) -> ProbedGroup | None:
        """Return a group of the values that were `seen`, to be measured with one call.

        The group shares memory with the group among `others` that has the same values. Return None if the values do not
        match the tensors one to one, or if the compiled loops cannot measure them.
        """
        values, keeps = [one.value for one in seen], [one.keep for one in seen]
        if not seen or [(one.dtype, one.numel) for one in values] != [(one.dtype, one.numel()) for one in tensors]:
            return None
        for other in others:
            if other is not None and other.values == values:
                return other._replace(keeps=keeps)
        columns, numels = np.array([one.column for one in values]), np.array([one.numel for one in values], np.float64)
        if not _is_on_host(tensors[0]):
            return ProbedGroup(values, keeps, None, columns, numels)
        plans = [plan for one in values if (plan := self._plans.get((one.dtype, one.numel))) is not None]
        if len(plans) != len(seen):
            return None
        return ProbedGroup(values, keeps, ManyTensors([plan.loops for plan in plans]), columns, numels)

    def saw_group(
        self, group: ProbedGroup, tensors: list[torch.Tensor], at: Sequence[int], moment: StepPosition
    ) -> bool:
        """Measure the tensors of a group with one call. Return whether they were counted.

        `at` are the tensors' addresses, from `ProbedGroup.addresses`. The tensors are not counted if a tensor on the
        host is not finite, if no kernel can measure a tensor on a device, or if the step is over. Then call `saw` for
        each tensor.
        """
        if moment.step != self._step:
            return False
        if group.tensors is None:
            seen = [
                SeenOnDevice(value, moment, 0, keep != 0) for value, keep in zip(group.values, group.keeps, strict=True)
            ]
            return self._launched(self._on_device.measure_many(seen, tensors))
        if (kernels := self.on_host.kernels) is None:
            return False
        sums = kernels.sums_of_squares(at, group.tensors, num_threads=torch.get_num_threads(), held_bytes=HELD_BYTES)
        if not math.isfinite(_sum(sums)):
            return False
        self._together.append((group.columns, sums, group.numels))
        self._has_values = True
        return True

    def saw_updates(
        self, values: Sequence[ProbedValue], columns: npt.NDArray[np.int64], sums: npt.NDArray[np.float64],
        numels: npt.NDArray[np.float64], times: npt.NDArray[np.float64], moment: StepPosition,
    ) -> None:  # fmt: skip
        """Count an update. `sums` has the sum of squares of the changes of each parameter's sampled elements.

        `times` says how many elements each sampled element stands for.
        """
        if moment.step != self._step:
            self.has_missed = True
            return
        if not math.isfinite(_sum(sums)):  # the next row of the parameter shows the non-finite update
            is_finite = np.isfinite(sums)
            for i in np.flatnonzero(~is_finite).tolist():
                update = SeenOnDevice(values[i], moment, 0, has_row=False)
                self._turned.spoilt[values[i].column] = update, bool(np.isnan(sums[i]))
            columns, sums, numels, times = columns[is_finite], sums[is_finite], numels[is_finite], times[is_finite]
        self._together.append((columns, sums * times, numels))
        self._has_values = True

    def saw_updates_on_device(
        self, updates: Sequence[ProbedValue], moved: Sequence[torch.Tensor], moment: StepPosition
    ) -> None:
        """Launch the kernels that measure an update on a device. `moved` has the changes of the sampled elements."""
        torch._foreach_mul_(list(moved), [math.sqrt(max(one.numel / SAMPLED, 1.0)) for one in updates])
        seen = [SeenOnDevice(value, moment, 0, has_row=True) for value in updates]
        self._launched(self._on_device.measure_many(seen, list(moved)))

    def is_free(self, tensor: torch.Tensor) -> bool:
        """Whether operations may be launched on a parameter's device now. They may not during a graph capture."""
        return self._on_device.is_free(tensor)

    def updates_of(self, parameters: Iterable[ProbedValue]) -> list[ProbedValue] | None:
        """Return parameters as values of site ``update``. Return None if no columns are left for them."""
        made = []
        for one in parameters:
            origin = one.origin._replace(site=UPDATE)
            key = (origin, one.phase, "train", one.dtype)
            column = self._by_key.get(key)
            if column is None:
                column = self._add(key, one.scope, one.chunk)
            if column is None:
                return None
            made.append(one._replace(column=column, origin=origin))
        return made

    def _add(self, key: tuple[ValuePlace, str, str, torch.dtype], scope: str | None, chunk: Chunk | None) -> int | None:
        origin, phase, mode, dtype = key
        facts: dict[str, Any] = {"dtype": DTYPES[dtype]}
        if chunk is not None:
            facts["global_numel"] = math.prod(chunk.global_shape)
        with self._changing:
            column = len(self._columns)
            if column >= MAX_COLUMNS:
                self.is_full = True
                return None
            self._columns.append(ProbedSeries(origin, phase, mode, scope, facts))
            self._sums.append(0.0)
            self._numels.append(0)
            self._by_key[key] = column
        return column

    def step_changes(self, step: int) -> None:
        """End the previous step if `step` is a new one. Then append the steps whose numbers have all arrived."""
        if self._has_values and step != self._step:
            with self._changing:
                self._end_step()
                self._append_arrived()
        self._step = step

    def _end_step(self) -> None:
        sums, numels = np.array(self._sums), np.array(self._numels, np.float64)
        together, self._together = self._together, []
        for columns, its_sums, its_numels in together:
            np.add.at(sums, columns, its_sums)
            np.add.at(numels, columns, its_numels)
        self._turned.forget_recovered(numels, self._bad)
        self._arriving.add(StepNumbers(self._step, sums, numels, self._bad))
        self._sums, self._numels, self._bad = [0.0] * len(sums), [0] * len(sums), {}
        self._has_values = False

    def _append_arrived(self, until_s: float = 0.0) -> None:
        for numbers in self._arriving.arrived(until_s):
            self._block.make_room(numbers.step)
            if self._on_step is not None:
                self._on_step(ProbedStep(numbers.step, self._columns, numbers.sums, numbers.numels))
            self._block.append(numbers)

    def flush(self) -> None:
        """Record the block, one row for each value; begin a new block. May wait `_WAIT_S` for norms on their way."""
        with self._changing:
            self._append_arrived(time.monotonic() + _WAIT_S)
            self._block.record()

    def flush_old(self) -> None:
        """Record a block that is old. Called on the writer thread, because a step may take long."""
        if self._block.is_old:
            with self._changing:
                self._block.record()

    def close(self) -> None:
        """End the current step, and record the block and the parameters that the last update has spoilt."""
        with self._changing:
            if self._has_values:
                self._end_step()
            self.flush()
            for update, is_nan in self._turned.spoilt.values():
                origin = update.value.origin._replace(site="param")
                parameter = self._by_key.get((origin, update.value.phase, update.moment.mode, update.value.dtype))
                if update.moment.step == self._step and parameter not in self._turned.were_bad:
                    self._on_device.record_turned(update, is_nan=is_nan)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu
