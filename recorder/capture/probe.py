"""The probe: one number of each selected value at every step, in memory, written as one row for a block of steps.

The probe also has the size of each update: how far an optimizer's step has moved a parameter (site ``update``).

A value is measured in the hook where it lies, and nothing is put on the channel. At the end of a step the numbers of
all values are appended to a block in memory. A full block becomes rows of site ``probe``, one for each value (section 3
of FORMAT.md). A value that turns non-finite gets the row of statistics, too, that a rule with ``keep=stats`` would have
kept of it, so that every question sees the step, the call and the order in which values went wrong.

Of a value on a device, a kernel computes the norm. The norms of a step are copied to the host together and arrive a
step or two later, so a value that turned non-finite has a row that says no more than this.

Nothing here may wait for a device, or hold a tensor.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import native
from ..native import MOVED_KINDS, SAMPLED, ManyTensors
from ..numerics.dtypes import ITEM_BYTES
from ..records import (
    KEEP_FINGERPRINT,
    KEEP_PROBE,
    KEEP_STATS,
    KEEP_TENSOR,
    Chunk,
    LostError,
    Measured,
    Moment,
    Origin,
    ProbedSeries,
    ProbedStep,
)
from ..sites import AT_LEAST, GRADIENTS, PROBE, UPDATE, may_mask
from .device_probe import DeviceProbe, NormsOnWay, ProbedValue, SeenOnDevice
from .local_values import DTYPES, PLAIN, is_ordinary

if TYPE_CHECKING:
    from .staging.measure import HostMeasure


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_L2, _NUM_NAN, _NUM_INF, _NUMEL = range(4)
"""The rows of the payload of a value that was not finite, or whose number of elements changed."""
_BAD = slice(_NUM_NAN, _NUM_INF + 1)


class StepNumbers(NamedTuple):
    """The numbers of one step, by column."""

    step: int
    sums: npt.NDArray[np.float64]
    """The sum of the squares of the finite elements; NaN where a value on a device was not finite."""
    numels: npt.NDArray[np.float64]
    """The elements that were seen; 0 where the value was not seen at this step."""
    bad: dict[int, tuple[int, int]]
    """The NaN and the infinite elements of the columns that have some."""


def block_rows(
    columns: Sequence[ProbedSeries], steps: Sequence[StepNumbers]
) -> Iterator[tuple[int, torch.Tensor, str]]:
    """Yield the number of each column that was seen at one of the steps, with the payload and the note of its row."""
    every = steps[1].step - steps[0].step if len(steps) > 1 else 1
    block = np.zeros((4, len(columns), len(steps)))
    for at, one in enumerate(steps):
        block[_L2, : len(one.sums), at] = np.sqrt(one.sums)
        block[_NUMEL, : len(one.sums), at] = one.numels
        for column, counts in one.bad.items():
            block[_BAD, column, at] = counts
    is_there = block[_NUMEL] > 0
    most = block[_NUMEL].max(axis=1)
    has_norm_alone = (np.where(is_there, block[_NUMEL], np.inf).min(axis=1) == most) & ~block[_BAD].any(axis=(0, 2))
    norms = np.where(is_there, block[_L2], np.nan)
    is_narrow = np.fmax.reduce(norms, axis=1) < _FLOAT32_MAX
    with np.errstate(over="ignore"):
        narrow = torch.from_numpy(norms.astype(np.float32)).unbind()
    notes: dict[tuple[Any, ...], str] = {}
    for column in np.flatnonzero(most).tolist():
        facts = columns[column].facts
        if has_norm_alone[column]:
            values = narrow[column] if is_narrow[column] else torch.from_numpy(norms[column])
            facts = facts | {"numel": int(most[column])}
        else:
            values = torch.from_numpy(block[:, column].copy())
            if np.isnan(block[_L2, column]).any():
                facts = facts | {"counts": AT_LEAST}
        key = tuple(facts.items())
        note = notes.get(key)
        if note is None:
            of_row = facts if every == 1 else facts | {"every": every}
            note = notes[key] = json.dumps(of_row, separators=(",", ":"))
        yield column, values, note


BLOCK_STEPS = 64
_BLOCK_S = 30.0
"""The time after which a block ends, in seconds; a process that is killed loses the numbers of at most this time."""
_MAX_COLUMNS = 1 << 16
"""The most values; names may change with the data, and further values are not measured."""
_MAX_PLANS = 4096
_WAIT_S = 5.0
"""The longest wait for numbers on their way, in seconds, at the end of the recording."""
_HELD_BYTES = 1 << 22
"""The size up to which a value is measured with the interpreter's lock held, as `staging.copies` does."""


class ProbedGroup(NamedTuple):
    """Values that are measured together, as the parameters and gradients of an optimizer are."""

    values: list[ProbedValue]
    keeps: list[int]
    """For each value the bits of KEEP_* other than KEEP_PROBE."""
    tensors: ManyTensors | None
    """None if the values are on a device."""

    def addresses(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the addresses of tensors of the group's values, as `addresses` does."""
        return addresses(self.values, tensors, are_on_host=self.tensors is not None)


class _ArrivingStep(NamedTuple):
    """A step that is over, with those of its numbers that are still on their way."""

    numbers: StepNumbers
    on_way: list[NormsOnWay]


class KnownValue:
    """A value in the host's memory that the probe has measured, with all that its next tensor need not be asked."""

    __slots__ = ("_column", "_dtype", "_numel", "_plan", "_probe")

    def __init__(self, probe: Probe, column: int, tensor: torch.Tensor, plan: HostMeasure) -> None:
        self._probe, self._column = probe, column
        self._dtype, self._numel, self._plan = tensor.dtype, tensor.numel(), plan

    def saw(self, tensor: torch.Tensor, step: int) -> bool:
        """Measure a tensor; return False, and count nothing, if it is of another kind or has elements not finite."""
        is_known = (
            tensor.dtype is self._dtype
            and tensor.numel() == self._numel
            and tensor.is_cpu
            and is_ordinary(tensor)
            and tensor.is_contiguous()
            and not tensor.storage_offset()  # the storage of one that has an offset may be freed
        )
        at = tensor.data_ptr() if is_known else 0
        return bool(at) and self._probe.saw_again(self._column, at, self._numel, self._plan, step)


class Probe:
    """The numbers of one rank's values. Training threads call it."""

    def __init__(
        self, observe: Callable[..., None], on_device: DeviceProbe, on_step: Callable[[ProbedStep], None] | None,
        on_trouble: Callable[[str], None], *, use_native: bool,
    ) -> None:  # fmt: skip
        """Begin empty.

        Args:
            observe: records a tensor, as `Capture.observe` does.
            on_device: measures values on devices.
            on_step: takes the numbers of a step that is over; training thread.
            on_trouble: takes a sentence about a value that has turned NaN or infinite; training thread.
            use_native: whether the compiled loops may be used.
        """
        self._observe = observe
        self._on_device = on_device
        self._on_step, self._on_trouble = on_step, on_trouble
        self._kernels = native.load(use_native)
        self._changing = threading.RLock()
        """Held while columns are added, a step is appended or a block is recorded; threads may train at once."""
        self._columns: list[ProbedSeries] = []
        self._origins: list[Origin] = []
        """The origin of the rows of each column that was recorded already."""
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
        self._steps: list[StepNumbers] = []
        """The steps of the block, of which the last has the most columns."""
        self._step = 0
        self._has_values = False
        self._arriving: deque[_ArrivingStep] = deque()
        self._has_measured = False
        self._has_refused = False
        self._seen: dict[int, list[tuple[ProbedValue, int]]] = {}
        """By thread, the list to which each value is appended as it is measured, with the bits of its KEEP_*."""
        self._began_s = 0.0
        self._plans: dict[tuple[torch.dtype, int], HostMeasure | None] = {}
        from ..format.fingerprint import compiled_weights
        from .staging.measure import host_measure, measure  # they load pyarrow, and `import torch` need not wait

        self._host_measure, self._measure, self._weights = host_measure, measure, compiled_weights

    def saw(
        self, origin: Origin, moment: Moment, phase: str, call: int, scope: str | None, chunk: Chunk | None,
        note: str | None, local: torch.Tensor, keep: int,
    ) -> int:  # fmt: skip
        """Measure a value, and return which other bits of KEEP_* are in force for it.

        These are the bits of `keep`, and statistics if the value has just turned non-finite, or more so than before. A
        recompute is left out, and so is what is local to a rank before a reduction (`scope`). `local` are the plain
        values, in the host's memory or on a device.
        """
        keep &= ~KEEP_PROBE
        numel = local.numel()
        if phase == "recompute" or scope == "local" or not numel:
            return keep
        key = (origin, phase, moment.mode)
        column = self._by_key.get(key)
        if column is None:
            column = self._add(key, phase, scope, chunk, local.dtype)
            if column is None:
                return keep
        is_on_host = _is_on_host(local)
        seen = self._seen.get(threading.get_ident()) if self._seen else None
        if seen is not None or not is_on_host:
            value = ProbedValue(column, local.dtype, numel, local.shape, origin, phase, scope, chunk, note)
            if seen is not None:
                seen.append((value, keep))
            if not is_on_host:
                self._launched(self._on_device.measure(SeenOnDevice(value, moment, call, keep != 0), local), moment)
                return keep
        local, times = _without_repeats(local)
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
        self._step = moment.step
        if not num_nan and not num_inf:
            return keep
        nan_before, inf_before = self._bad.get(column, (0, 0))
        self._bad[column] = nan_before + num_nan, inf_before + num_inf
        if not self._has_turned(column, num_nan > 0, num_inf / numel):
            return keep
        self._tell_trouble(origin, moment, is_nan=num_nan > 0)
        return keep | KEEP_STATS

    def again(self, origin: Origin, mode: str, tensor: torch.Tensor) -> Callable[[torch.Tensor, int], bool] | None:
        """Return `KnownValue.saw` of a value of the forward that `saw` has measured; None of values on devices."""
        column = self._by_key.get((origin, "forward", mode))
        plan = self._plans.get((tensor.dtype, tensor.numel()))
        return None if column is None or plan is None else KnownValue(self, column, tensor, plan).saw

    def saw_again(self, column: int, at: int, numel: int, plan: HostMeasure, step: int) -> bool:
        """Measure the contiguous elements at an address; return False, and count nothing, if one is not finite."""
        if self._seen:
            return False
        total = self._squares_at(at, plan)
        if not total < math.inf:
            return False
        self._sums[column] += total
        self._numels[column] += numel
        self._has_values = self._has_measured = True
        self._step = step
        return True

    def _has_turned(self, column: int, has_nan: bool, share: float) -> bool:
        """Remember that a value is not finite; return whether it has just turned so, or more so than before."""
        had_nan, share_before = self._were_bad.get(column, (False, 0.0))
        now = self._were_bad[column] = had_nan or has_nan, max(share_before, share)
        return now != (had_nan, share_before)

    def _tell_trouble(self, origin: Origin, moment: Moment, *, is_nan: bool) -> None:
        """Tell of a value that has turned non-finite. `GradScaler` finds its scale by gradients that do."""
        if origin.site not in GRADIENTS and (is_nan or not may_mask(origin.site, origin.name)):
            where = " ".join(filter(None, (repr(origin.module_path), origin.site, origin.name)))
            self._on_trouble(f"{where} turned {'NaN' if is_nan else 'infinite'} at step {moment.step}")

    def _launched(self, is_measured: bool, moment: Moment) -> bool:
        if is_measured:
            self._has_values = self._has_measured = True
            self._step = moment.step
        else:
            self._has_refused = True
        return is_measured

    @contextmanager
    def learning(self) -> Iterator[list[tuple[ProbedValue, int]]]:
        """Yield a list to which each value is appended that this thread shows inside the context."""
        seen: list[tuple[ProbedValue, int]] = []
        self._seen[threading.get_ident()] = seen
        try:
            yield seen
        finally:
            del self._seen[threading.get_ident()]

    @property
    def is_blind(self) -> bool:
        """Whether every value so far was on a device on which nothing can be measured."""
        return self._has_refused and not self._has_measured

    def group(
        self, seen: list[tuple[ProbedValue, int]], tensors: list[torch.Tensor], others: Iterable[ProbedGroup | None]
    ) -> ProbedGroup | None:
        """Return the group of the values that were `seen`, to be measured with one call.

        It shares memory with one of the `others` that has the same values. None if the values were not those of the
        tensors, each once, or if the loops cannot measure them.
        """
        values, keeps = [value for value, _ in seen], [keep for _, keep in seen]
        if not seen or [(one.dtype, one.numel) for one in values] != [(one.dtype, one.numel()) for one in tensors]:
            return None
        for other in others:
            if other is not None and other.values == values:
                return other._replace(keeps=keeps)
        if not _is_on_host(tensors[0]):
            return ProbedGroup(values, keeps, None)
        plans = [plan for one in values if (plan := self._plans.get((one.dtype, one.numel))) is not None]
        return (
            ProbedGroup(values, keeps, ManyTensors([plan.loops for plan in plans])) if len(plans) == len(seen) else None
        )

    def saw_group(self, group: ProbedGroup, tensors: list[torch.Tensor], at: Sequence[int], moment: Moment) -> bool:
        """Measure the tensors of a group with one call, and return whether they were counted; `at` are their addresses.

        They are not if a tensor on the host is not finite, or if no kernel measures one on a device. Then `saw` must
        see each of them. The tensors must fit the group.
        """
        if group.tensors is None:
            seen = [
                SeenOnDevice(value, moment, 0, keep != 0) for value, keep in zip(group.values, group.keeps, strict=True)
            ]
            return self._launched(self._on_device.measure_many(seen, tensors), moment)
        if self._kernels is None:
            return False
        sums = self._kernels.sums_of_squares(
            at, group.tensors, num_threads=torch.get_num_threads(), held_bytes=_HELD_BYTES
        )
        if not math.isfinite(sum(sums)):
            return False
        for total, value in zip(sums, group.values, strict=True):
            self._sums[value.column] += total
            self._numels[value.column] += value.numel
        self._has_values = True
        self._step = moment.step
        return True

    def measure_together(
        self, tensors: Sequence[torch.Tensor], numels: Sequence[int], dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]], keeps: Sequence[int],
    ) -> Callable[[], list[Measured]]:  # fmt: skip
        """Measure small tensors that `saw_group` has just measured, with fingerprints by `keeps`.

        The result returns their statistics, on any thread.
        """
        assert self._kernels is not None, "groups on the host are measured by the compiled loops"
        weights = [
            self._weights(ITEM_BYTES[dtype], shape) if keep & KEEP_FINGERPRINT else None
            for dtype, shape, keep in zip(dtypes, shapes, keeps, strict=True)
        ]
        return self._kernels.measure_small([tensor.data_ptr() for tensor in tensors], numels, dtypes, weights)

    def saw_updates(self, updates: Sequence[ProbedValue], sums: Sequence[float], moment: Moment) -> None:
        """Take the sums of the squares of how far the sampled elements of parameters were moved."""
        for value, total in zip(updates, sums, strict=True):
            if math.isfinite(total):  # else the parameter says that it is not
                self._sums[value.column] += total * max(value.numel / SAMPLED, 1.0)
                self._numels[value.column] += value.numel
        self._has_values = True
        self._step = moment.step

    def saw_updates_on_device(
        self, updates: Sequence[ProbedValue], moved: Sequence[torch.Tensor], moment: Moment
    ) -> None:
        """Launch the kernels that measure how far the sampled elements of parameters on a device were moved."""
        torch._foreach_mul_(list(moved), [math.sqrt(max(one.numel / SAMPLED, 1.0)) for one in updates])
        seen = [SeenOnDevice(value, moment, 0, has_row=True) for value in updates]
        self._launched(self._on_device.measure_many(seen, list(moved)), moment)

    def is_free(self, tensor: torch.Tensor) -> bool:
        """Whether operations on a parameter on a device may be launched now, and become part of no graph."""
        return self._on_device.is_free(tensor)

    @property
    def kernels(self) -> native.Kernels | None:
        return self._kernels

    def updates_of(self, group: ProbedGroup) -> list[ProbedValue] | None:
        """Return the parameters of a group as values of the site of updates; None if there is no room for them."""
        made = []
        for one in group.values:
            if one.origin.site != "param":
                continue
            origin = one.origin._replace(site=UPDATE)
            key = (origin, one.phase, "train")
            column = self._by_key.get(key)
            if column is None:
                column = self._add(key, one.phase, one.scope, one.chunk, one.dtype)
            if column is None:
                return None
            made.append(one._replace(column=column, origin=origin))
        return made

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
        return self._squares_at(local.data_ptr(), plan)

    def _squares_at(self, at: int, plan: HostMeasure) -> float:
        return plan.kernels.sum_of_squares(at, plan.loops, num_threads=torch.get_num_threads(), held_bytes=_HELD_BYTES)

    def _statistics(self, local: torch.Tensor) -> Measured:
        """Return the statistics of a value with elements that are not finite, or of any value without the loops."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self._measure(data, DTYPES[local.dtype], tuple(local.shape), None, KEEP_STATS, kernels=self._kernels)

    def _add(
        self, key: tuple[Origin, str, str], phase: str, scope: str | None, chunk: Chunk | None, dtype: torch.dtype
    ) -> int | None:  # fmt: skip
        facts: dict[str, Any] = {"dtype": DTYPES[dtype]}
        if chunk is not None:
            facts["global_numel"] = math.prod(chunk.global_shape)
        with self._changing:
            column = len(self._columns)
            if column >= _MAX_COLUMNS:
                return None
            self._columns.append(ProbedSeries(key[0], phase, key[2], scope, facts))
            self._sums.append(0.0)
            self._numels.append(0)
            self._by_key[key] = column
        return column

    def step_changes(self, step: int) -> None:
        """End the last step, where `step` is another step, and append the numbers of steps that have arrived."""
        if not self._has_values or step == self._step:
            return
        with self._changing:
            self._end_step()
            self._append_arrived()

    def _end_step(self) -> None:
        sums, numels = np.array(self._sums), np.array(self._numels, np.float64)
        self._forget_recovered(numels, self._bad)
        self._arriving.append(_ArrivingStep(StepNumbers(self._step, sums, numels, self._bad), self._on_device.bring()))
        self._sums, self._numels, self._bad = [0.0] * len(sums), [0] * len(sums), {}
        self._has_values = False

    def _append_arrived(self, until_s: float = 0.0) -> None:
        """Append the steps of which every number has arrived, in their order; wait for others `until_s`."""
        while self._arriving:
            numbers, on_way = self._arriving[0]
            while on_way:
                try:
                    if not on_way[0].has_arrived():
                        if time.monotonic() > until_s:
                            return
                        time.sleep(0.001)
                        continue
                    self._add_norms(on_way[0].seen, on_way[0].read(), numbers)
                except LostError:
                    pass  # the values count as not seen at this step
                on_way.pop(0).block.release()
            self._arriving.popleft()
            self._append(numbers)

    def _add_norms(self, seen: list[SeenOnDevice], norms: npt.NDArray[np.float32], numbers: StepNumbers) -> None:
        squares = np.square(norms.astype(np.float64))
        if not np.isfinite(squares).all():  # of an update that is not finite the parameter says so
            is_counted = np.isfinite(squares) | np.array([one.value.origin.site != UPDATE for one in seen])
            seen, norms, squares = list(compress(seen, is_counted)), norms[is_counted], squares[is_counted]
        columns = np.array([one.value.column for one in seen])
        numels = np.array([one.value.numel for one in seen], np.float64)
        np.add.at(numbers.sums, columns, squares)
        np.add.at(numbers.numels, columns, numels)
        told = set()
        for i in np.flatnonzero(~np.isfinite(squares)).tolist():
            one, is_nan = seen[i], bool(np.isnan(norms[i]))
            column = one.value.column
            had_nan, had_inf = numbers.bad.get(column, (0, 0))
            numbers.bad[column] = max(had_nan, int(is_nan)), max(had_inf, int(not is_nan))
            numbers.sums[column] = np.nan
            if self._has_turned(column, is_nan, float(not is_nan)) and column not in told:
                told.add(column)  # one row a step, as a second one would have the same key
                self._tell_trouble(one.value.origin, one.moment, is_nan=is_nan)
                self._on_device.record_turned(one, is_nan=is_nan)
        there = np.zeros(len(numbers.numels))
        there[columns] = 1
        self._forget_recovered(there, numbers.bad)

    def _forget_recovered(self, numels: npt.NDArray[np.float64], bad: Mapping[int, object]) -> None:
        """Forget that values were not finite that were seen at a step (`numels` is not 0) and were finite then."""
        if self._were_bad:
            self._were_bad = {c: how for c, how in self._were_bad.items() if c in bad or not numels[c : c + 1].any()}

    def _append(self, numbers: StepNumbers) -> None:
        done, step = self._steps, numbers.step
        if (len(done) > 1 and step - done[-1].step != done[1].step - done[0].step) or (done and step <= done[-1].step):
            self._record_block()
        if not self._steps:
            self._began_s = time.monotonic()
        if self._on_step is not None:
            self._on_step(ProbedStep(step, self._columns, numbers.sums, numbers.numels))
        self._steps.append(numbers)
        if len(self._steps) == BLOCK_STEPS or time.monotonic() - self._began_s > _BLOCK_S:
            self._record_block()

    def flush(self) -> None:
        """Record the block, one row for each value, and begin another block. Wait for steps that are on their way."""
        with self._changing:
            self._append_arrived(time.monotonic() + _WAIT_S)
            self._record_block()

    def _record_block(self) -> None:
        steps, self._steps = self._steps, []
        if not steps:
            return
        for its in self._columns[len(self._origins) :]:
            name = f"{its.origin.site} {its.origin.name}".rstrip()
            self._origins.append(its.origin._replace(site=PROBE, name=name))
        for column, values, note in block_rows(self._columns, steps):
            its, origin = self._columns[column], self._origins[column]
            moment = Moment(steps[0].step, None, its.mode)
            self._observe(origin, moment, its.phase, 0, 0, KEEP_TENSOR, values, its.scope, note=note)

    def close(self) -> None:
        """Record what is left."""
        with self._changing:
            if self._has_values:
                self._end_step()
            self.flush()


def addresses(values: Sequence[ProbedValue], tensors: Sequence[torch.Tensor], *, are_on_host: bool) -> list[int] | None:
    """Return the addresses of tensors; None if one is not of the kind of its value, or cannot be measured together.

    On a device all addresses are 0, because kernels take the tensors.
    """
    if len(tensors) != len(values):
        return None
    place, found = tensors[0].device, []
    for tensor, value in zip(tensors, values, strict=True):
        if type(tensor) not in PLAIN or tensor.dtype is not value.dtype or tensor.shape != value.shape:
            return None
        at = 0
        if not are_on_host:
            is_fit = tensor.device == place and tensor.layout is torch.strided and tensor.untyped_storage().nbytes()
        else:
            is_fit = tensor.is_cpu and is_ordinary(tensor) and tensor.is_contiguous() and (at := tensor.data_ptr())
        if not is_fit:
            return None
        found.append(at)
    return found


class Updates:
    """How far one optimizer moves its parameters: a sample of each is compared with that of the update before.

    The sample is the same at every step: of a parameter of at most 1,024 elements each, of others 256 pieces of
    4 elements that lie evenly apart. Whatever else writes into a parameter between two updates counts as moving it.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._group: ProbedGroup | None = None
        self._values: list[ProbedValue] = []
        self._is_param: list[bool] = []
        """For each value of the group, whether it is a parameter."""
        self._many: ManyTensors | None = None
        """The parameters that lie in the host's memory."""
        self._before: npt.NDArray[np.float64] | list[torch.Tensor] | None = None
        """The sample of the update before."""
        self._tensors: list[torch.Tensor] = []
        """The parameters, while the optimizer's step is under way."""
        self._at: list[int] = []
        """The addresses of the parameters when they were last examined; what lies elsewhere may be of another kind."""

    def begin(self, group: ProbedGroup, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> None:
        """Take the tensors of a group that an update will move, which have these `addresses`."""
        if self._group is None or group.values is not self._group.values:
            self._know(group)
        self._tensors, self._at = list(compress(tensors, self._is_param)), list(compress(at, self._is_param))
        if self._values and self._tensors and self._before is None:
            self._sample()

    def _know(self, group: ProbedGroup) -> None:
        values = self._probe.updates_of(group) or []
        if values != self._values or (group.tensors is None) != (self._many is None):
            self._before = None
        self._group, self._values, self._many = group, values, None
        self._is_param = [one.origin.site == "param" for one in group.values]
        if group.tensors is not None and self._probe.kernels is not None:
            self._many = ManyTensors(list(compress(group.tensors.plans, self._is_param)))
            if any(DTYPES[one.dtype] not in MOVED_KINDS for one in values):
                self._values = []

    def end(self, moment: Moment) -> None:
        """Measure the update that has begun, if one has."""
        if self._many is not None and self._at != (at := [one.data_ptr() for one in self._tensors]):
            self._at = at
            if self._tensors and addresses(self._values, self._tensors, are_on_host=True) is None:
                self._before = None
        if self._tensors and self._values and self._before is not None:
            self._sample(moment)
        self._tensors = []

    def _sample(self, moment: Moment | None = None) -> None:
        """Take a sample, and show the probe how it differs from the one before if there is a `moment`."""
        tensors, before, kernels = self._tensors, self._before, self._probe.kernels
        if self._many is not None and kernels is not None:
            if not isinstance(before, np.ndarray):
                before = self._before = np.zeros(sum(min(one.numel, SAMPLED) for one in self._values))
            sums = kernels.moved(self._at, self._many, before)
            if moment is not None:
                self._probe.saw_updates(self._values, sums.tolist(), moment)
        elif not self._probe.is_free(tensors[0]):
            self._before = None
        else:
            with torch.no_grad():
                after = self._before = list(map(_sampled, tensors))
                if moment is not None and isinstance(before, list):
                    moved = [one.float() for one in torch._foreach_sub(after, before)]
                    self._probe.saw_updates_on_device(self._values, moved, moment)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the sampled elements of a parameter on a device, of float32 or float64."""
    numel = tensor.numel()
    if numel > SAMPLED and tensor.is_contiguous():
        tensor = tensor.as_strided((SAMPLED // _LINE, _LINE), ((numel - _LINE) // (SAMPLED // _LINE - 1), 1))
    sample = tensor.reshape(-1)
    sample = sample[:: max(sample.numel() // SAMPLED, 1)][:SAMPLED]
    return sample.to(torch.float64 if sample.dtype is torch.float64 else torch.float32, copy=True)


_LINE = 4
"""The elements of a piece of a large parameter."""


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _without_repeats(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return each element of an expanded tensor once, with its number of repeats; complex elements as their parts."""
    times = 1
    # `dtype.is_complex` keeps the interpreter's lock, and `tensor.is_complex()` may hand the lock to the writer thread.
    is_complex = tensor.dtype.is_complex
    if not is_complex and tensor.is_contiguous():
        return tensor, times
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        values = tensor.detach()
        for dim in reversed(range(values.dim())):
            if not values.stride(dim) and values.size(dim) > 1:
                times *= values.size(dim)
                values = values.select(dim, 0)
        return (torch.view_as_real(values) if is_complex else values), times
