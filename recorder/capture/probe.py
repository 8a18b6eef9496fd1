"""The probe: one number of each selected value at every step, in memory, written as one row for a block of steps.

A value is measured in the hook where it lies, and nothing is put on the channel. At the end of a step the numbers of
all values are appended to a block in memory. A full block becomes rows of site ``probe``, one for each value. A value
that turns non-finite gets the row of statistics, too, that a rule with ``keep=stats`` would have kept of it, so that
every question sees the step, the call and the order in which values went wrong.

Nothing here may wait for a device, or hold a tensor.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .. import native
from ..native import ManyTensors
from ..records import KEEP_STATS, KEEP_TENSOR, Chunk, Measured, Moment, Origin, ProbedSeries, ProbedStep
from ..sites import PROBE
from .local_values import DTYPES, PLAIN

if TYPE_CHECKING:
    from .staging.measure import HostMeasure

BLOCK_STEPS = 64
_BLOCK_S = 30.0
"""The time after which a block ends, in seconds; a process that is killed loses the numbers of at most this time."""
_MAX_COLUMNS = 1 << 16
"""The most values; names may change with the data, and further values are not measured."""
_MAX_PLANS = 4096
_HELD_BYTES = 1 << 22
"""The size up to which a value is measured with the interpreter's lock held, as `staging.copies` does."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_L2, _NUM_NAN, _NUM_INF, _NUMEL = range(4)
"""The rows of a block, for each value."""


class ProbedGroup(NamedTuple):
    """Values that are measured together, as the parameters and gradients of an optimizer are."""

    values: list[tuple[int, torch.dtype, int]]
    """Column, dtype and elements of each value."""
    tensors: ManyTensors


class Probe:
    """The numbers of one rank's values. Training threads call it."""

    def __init__(
        self, observe: Callable[..., None], on_step: Callable[[ProbedStep], None] | None = None, *, use_native: bool
    ) -> None:
        """Begin empty.

        Args:
            observe: records a tensor, as `Capture.observe` does.
            on_step: takes the numbers of a step that is over; training thread.
            use_native: whether the compiled loops may be used.
        """
        self._observe = observe
        self._on_step = on_step
        self._kernels = native.load(use_native)
        self._changing = threading.RLock()
        """Held while columns are added, a step is appended or a block is recorded; threads may train at once."""
        self._columns: list[ProbedSeries] = []
        self._by_key: dict[tuple[Origin, str, str], int] = {}
        """The number of each column, by its origin, its phase and its mode."""
        self._sums: list[float] = []
        """The sum of the squares of the finite elements of each column at the current step."""
        self._numels: list[int] = []
        """The elements that each column has seen at the current step."""
        self._bad: dict[int, tuple[int, int]] = {}
        """The NaN and the infinite elements of the columns that have some at the current step."""
        self._were_bad: dict[int, tuple[bool, float]] = {}
        """For each column that was not finite when it was last seen: whether a NaN was there, and the largest share of
        infinite elements."""
        self._block = np.zeros((4, 0, BLOCK_STEPS))
        self._step = 0
        self._has_values = False
        self._has_seen_device = False
        self.seen: list[tuple[int, torch.dtype, int]] | None = None
        """If it is a list, column, dtype and elements of each value are appended to it as the value is measured."""
        self._steps: list[int] = []
        self._began_s = 0.0
        self._plans: dict[tuple[torch.dtype, int], HostMeasure | None] = {}
        from .staging.measure import host_measure, measure  # they load pyarrow, and `import torch` need not wait

        self._host_measure, self._measure = host_measure, measure

    def saw(
        self, origin: Origin, moment: Moment, phase: str, scope: str | None, chunk: Chunk | None, local: torch.Tensor
    ) -> bool:
        """Measure a value, and return whether the value has just turned non-finite, or more so than before.

        A recompute is left out, and so is what is local to a rank before a reduction (`scope`). `local` are the plain
        values, of which only those in host memory are measured.
        """
        numel = local.numel()
        if phase == "recompute" or scope == "local" or not numel:
            return False
        if not _is_on_host(local):
            self._has_seen_device = True
            return False
        key = (origin, phase, moment.mode)
        column = self._by_key.get(key)
        if column is None:
            column = self._add(key, origin, moment, phase, scope, chunk, local)
            if column is None:
                return False
        local, times = _without_repeats(local)
        total = times * self._sum_of_squares(local)
        num_nan = num_inf = 0
        if not total < math.inf:
            its = self._statistics(local)
            if its.nan_count is None or its.inf_count is None:
                return False  # the dtype has no statistics
            num_nan, num_inf, total = times * its.nan_count, times * its.inf_count, times * (its.sum_sq or 0.0)
        if self.seen is not None:
            self.seen.append((column, local.dtype, numel))
        self._sums[column] += total
        self._numels[column] += numel
        self._has_values = True
        self._step = moment.step
        if not num_nan and not num_inf:
            return False
        nan_before, inf_before = self._bad.get(column, (0, 0))
        self._bad[column] = nan_before + num_nan, inf_before + num_inf
        had_nan, share = self._were_bad.get(column, (False, 0.0))
        self._were_bad[column] = had_nan or num_nan > 0, max(share, num_inf / numel)
        return self._were_bad[column] != (had_nan, share)

    @property
    def is_blind(self) -> bool:
        """Whether every value so far was on a device, where nothing is measured."""
        return self._has_seen_device and not self._columns

    def group(self, seen: list[tuple[int, torch.dtype, int]]) -> ProbedGroup | None:
        """Return the group of values that were `seen`, to be measured with one call; None if the loops cannot."""
        plans = [plan for _, dtype, numel in seen if (plan := self._plans.get((dtype, numel))) is not None]
        if len(plans) < len(seen) or not plans:
            return None
        return ProbedGroup(seen, ManyTensors([plan.loops for plan in plans]))

    def saw_group(self, group: ProbedGroup, tensors: list[torch.Tensor], step: int) -> bool:
        """Measure the tensors of a group with one call, and return whether they were counted.

        They are not if a tensor is not finite, or of another kind than when the group was made: then `saw` must see
        each of them.
        """
        if len(tensors) != len(group.values) or self._kernels is None:
            return False
        for tensor, (_, dtype, numel) in zip(tensors, group.values, strict=True):
            if (
                type(tensor) not in PLAIN
                or not tensor.is_cpu
                or tensor.dtype is not dtype
                or tensor.numel() != numel
                or tensor.layout is not torch.strided
                or not tensor.is_contiguous()
            ):
                return False
        at = [tensor.data_ptr() for tensor in tensors]
        if not all(at):
            return False
        sums = self._kernels.sums_of_squares(
            at, group.tensors, num_threads=torch.get_num_threads(), held_bytes=_HELD_BYTES
        )
        if not math.isfinite(sum(sums)):
            return False
        for total, (column, _, numel) in zip(sums, group.values, strict=True):
            self._sums[column] += total
            self._numels[column] += numel
        self._has_values = True
        self._step = step
        return True

    def _sum_of_squares(self, local: torch.Tensor) -> float:
        """Return the sum of the squares of all elements; NaN where the compiled loops cannot compute it."""
        key = (local.dtype, local.numel())
        plan = self._plans.get(key)
        if plan is None:
            if self._kernels is None or local.dtype not in DTYPES:
                return math.nan
            plan = self._host_measure(DTYPES[local.dtype], (local.numel(),), KEEP_STATS, -1, self._kernels)
            if plan is None:
                return math.nan
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        if not local.is_contiguous():
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                local = local.detach().contiguous()
        return plan.kernels.sum_of_squares(
            local.data_ptr(), plan.loops, num_threads=torch.get_num_threads(), held_bytes=_HELD_BYTES
        )

    def _statistics(self, local: torch.Tensor) -> Measured:
        """Return the statistics of a value with elements that are not finite, or of any value without the loops."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self._measure(data, DTYPES[local.dtype], tuple(local.shape), None, KEEP_STATS, kernels=self._kernels)

    def _add(
        self, key: tuple[Origin, str, str], origin: Origin, moment: Moment, phase: str, scope: str | None,
        chunk: Chunk | None, local: torch.Tensor,
    ) -> int | None:  # fmt: skip
        """Add a column, and return its number; None if there are too many."""
        facts: dict[str, Any] = {"dtype": DTYPES[local.dtype]}
        if chunk is not None:
            facts["global_numel"] = math.prod(chunk.global_shape)
        with self._changing:
            column = len(self._columns)
            if column >= _MAX_COLUMNS:
                return None
            if column >= self._block.shape[1]:
                self._block = np.pad(self._block, ((0, 0), (0, max(256, column)), (0, 0)))
            self._columns.append(ProbedSeries(origin, phase, moment.mode, scope, facts))
            self._sums.append(0.0)
            self._numels.append(0)
            self._by_key[key] = column
        return column

    def step_changes(self, step: int) -> None:
        """Append the numbers of the last step to the block, where `step` is another step."""
        if not self._has_values or step == self._step:
            return
        with self._changing:
            self._append()
            if len(self._steps) == BLOCK_STEPS or time.monotonic() - self._began_s > _BLOCK_S:
                self.flush()

    def _append(self) -> None:
        done = self._steps
        if (len(done) > 1 and self._step - done[-1] != done[1] - done[0]) or (done and self._step <= done[-1]):
            self.flush()
        if not self._steps:
            self._began_s = time.monotonic()
        num, at = len(self._columns), len(self._steps)
        sums, numels = np.array(self._sums), np.array(self._numels, np.float64)
        self._block[_L2, :num, at] = np.sqrt(sums)
        self._block[_NUMEL, :num, at] = numels
        if self._were_bad:
            self._were_bad = {
                column: how for column, how in self._were_bad.items() if column in self._bad or not self._numels[column]
            }
        if self._on_step is not None:
            self._on_step(ProbedStep(self._step, self._columns, sums, numels))
        for column, counts in self._bad.items():
            self._block[_NUM_NAN : _NUM_INF + 1, column, at] = counts
        self._sums, self._numels, self._bad = [0.0] * num, [0] * num, {}
        self._steps.append(self._step)
        self._has_values = False

    def flush(self) -> None:
        """Record the block, one row for each value, and begin another block."""
        with self._changing:
            self._record_block()

    def _record_block(self) -> None:
        steps, self._steps = self._steps, []
        if not steps:
            return
        every = steps[1] - steps[0] if len(steps) > 1 else 1
        for column, its in enumerate(self._columns):
            numbers = self._block[:, column, : len(steps)]
            is_there = numbers[_NUMEL] > 0
            if not is_there.any():
                continue
            numel = numbers[_NUMEL, is_there]
            facts = its.facts if every == 1 else its.facts | {"every": every}
            if numel[0] == numel.min() == numel.max() and not numbers[_NUM_NAN : _NUM_INF + 1].any():
                facts = facts | {"numel": int(numel[0])}
                values = np.where(is_there, numbers[_L2], np.nan)
                if values[is_there].max() < _FLOAT32_MAX:
                    values = values.astype(np.float32)
            else:
                values = numbers.copy()
            name = f"{its.origin.site} {its.origin.name}".rstrip()
            self._observe(
                its.origin._replace(site=PROBE, name=name), Moment(steps[0], None, its.mode), its.phase, 0, 0,
                KEEP_TENSOR, torch.from_numpy(values), its.scope, note=json.dumps(facts, separators=(",", ":")),
            )  # fmt: skip
        self._block[:, : len(self._columns), : len(steps)] = 0

    def close(self) -> None:
        """Record what is left."""
        with self._changing:
            if self._has_values:
                self._append()
            self._record_block()


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _without_repeats(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return each element of an expanded tensor once, with its number of repeats; complex elements as their parts."""
    times = 1
    if tensor.is_contiguous() and not tensor.is_complex():
        return tensor, times
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        values = tensor.detach()
        for dim in reversed(range(values.dim())):
            if not values.stride(dim) and values.size(dim) > 1:
                times *= values.size(dim)
                values = values.select(dim, 0)
        return (torch.view_as_real(values) if values.is_complex() else values), times
