"""The size of each update: how far one step of an optimizer has moved each parameter, by samples of its elements.

Called on training threads, around the optimizer's step. Nothing here may wait for a device, or hold a tensor of the
program longer than that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from ...native import MOVED_KINDS, SAMPLED, ManyTensors
from ...records import StepPosition
from ..local_values import DTYPES, are_ordinary
from ..probe.device_probe import ProbedValue
from ..probe.probe import Probe, SeenAlone
from ..probe.probed_groups import ProbedGroup, addresses, is_dense


class Updates:
    """Measures how far one optimizer's updates move its parameters, by comparing samples of the elements.

    The same elements are sampled at every update: all elements of a parameter with at most 1,024, and 256 evenly spaced
    pieces of 4 of a larger parameter. Any other write into a parameter between two updates counts as a move, too.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._group: ProbedGroup | None = None
        self._values: list[ProbedValue] = []
        self._is_param: list[bool] = []
        """For each value of the group, whether it is a parameter that can be sampled."""
        self._columns = np.zeros(0, np.int64)
        self._numels = self._times = np.zeros(0)
        """For each parameter, the number of elements, and how many elements each sampled one stands for."""
        self._many: ManyTensors | None = None
        """The input of the compiled loops that sample parameters in host memory. None for parameters on a device."""
        self._before: npt.NDArray[np.float64] | list[torch.Tensor] | None = None
        """The sampled elements as the last update left them. None before the first sample."""
        self._tensors: list[torch.Tensor] = []
        """The parameters, while the optimizer's step is under way."""
        self._at: list[int] = []
        """The parameters' data addresses when last examined. A tensor at another address is examined again."""
        self._strides: list[tuple[int, ...]] = []
        """The parameters' strides when last examined. A parameter is sampled in memory order."""

    def begin(self, group: ProbedGroup, tensors: Sequence[torch.Tensor], at: Sequence[int]) -> None:
        """Take the tensors of a group before an update. `at` are the tensors' data addresses."""
        if self._group is None or group.values is not self._group.values:
            self._know(group)
        self._tensors = list(compress(tensors, self._is_param))
        self._lie_at(list(compress(at, self._is_param)))
        if self._values and self._tensors and self._before is None:
            self._sample()

    def begin_alone(self, seen: Sequence[SeenAlone], tensors: Sequence[torch.Tensor]) -> None:
        """Take the parameters among values measured one by one, except those that cannot be sampled.

        `tensors` are the optimizer's own tensors. A copy of a parameter would not move.
        """
        own, lie_fit, place = set(map(id, tensors)), None, None
        fit: list[SeenAlone] = []
        for one in seen:
            if one.value.origin.site == "param" and id(one.local) in own and place in (None, one.local.device):
                place, lie_fit = one.local.device, are_ordinary if one.local.is_cpu else None
                if _may_move(one.value, lie_fit is not None) and addresses([one.value], [one.local], lie_fit):
                    fit.append(one)
        locals_ = [one.local for one in fit]
        group = self._probe.group(fit, locals_, [self._group])
        at = None if group is None else group.addresses(locals_)
        self._tensors = []
        if group is not None and at is not None:
            self.begin(group, locals_, at)

    def _lie_at(self, at: list[int]) -> None:
        """Note where the parameters lie now. Forget the last samples if the elements of a parameter change places."""
        if at != self._at:
            self._at, strides = at, list(map(torch.Tensor.stride, self._tensors))
            if strides != self._strides:
                self._before, self._strides = None, strides

    def _know(self, group: ProbedGroup) -> None:
        self._is_param = [_may_move(one, group.tensors is not None) for one in group.values]
        values = self._probe.updates_of(compress(group.values, self._is_param)) or []
        if values != self._values or (group.tensors is None) != (self._many is None):
            self._before, self._at = None, []
        self._group, self._values, self._many = group, values, None
        self._columns = np.array([one.column for one in values], np.int64)
        self._numels = np.array([one.numel for one in values], np.float64)
        self._times = np.maximum(self._numels / SAMPLED, 1.0)
        if group.tensors is not None:
            self._many = ManyTensors(list(compress(group.tensors.plans, self._is_param)))

    def end(self, moment: StepPosition) -> None:
        """Measure how far the update since `begin` has moved the parameters. Do nothing without `begin`."""
        if self._many is not None and self._at != (at := list(map(torch.Tensor.data_ptr, self._tensors))):
            self._lie_at(at)
            if self._tensors and addresses(self._values, self._tensors, are_ordinary) is None:
                self._before = None
        if self._tensors and self._values and self._before is not None:
            self._sample(moment)
        self._tensors = []

    def _sample(self, moment: StepPosition | None = None) -> None:
        """Sample the parameters. If a `moment` is given, give the probe the differences from the last sample."""
        tensors, before, kernels = self._tensors, self._before, self._probe.on_host.kernels
        if self._many is not None and kernels is not None:
            if not isinstance(before, np.ndarray):
                before = self._before = np.zeros(sum(min(one.numel, SAMPLED) for one in self._values))
            sums = kernels.moved(self._at, self._many, before)
            if moment is not None:
                self._probe.saw_updates(self._values, self._columns, sums, self._numels, self._times, moment)
        elif not self._probe.is_free(tensors[0]):
            self._before = None
        else:
            with torch.no_grad():
                after = self._before = list(map(_sampled, tensors))
                if moment is not None and isinstance(before, list):
                    moved = [one.float() for one in torch._foreach_sub(after, before)]
                    self._probe.saw_updates_on_device(self._values, moved, moment)


def _may_move(value: ProbedValue, is_on_host: bool) -> bool:
    """Whether a value is a parameter of a dtype that can be sampled."""
    is_known = DTYPES[value.dtype] in MOVED_KINDS if is_on_host else not value.dtype.is_complex
    return is_known and value.origin.site == "param"


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a device parameter's sampled elements. It is float64 for a float64 parameter, else float32."""
    numel = tensor.numel()
    if numel > SAMPLED and is_dense(tensor):
        tensor = tensor.as_strided((SAMPLED // _LINE, _LINE), ((numel - _LINE) // (SAMPLED // _LINE - 1), 1))
    sample = tensor.reshape(-1)
    sample = sample[:: max(sample.numel() // SAMPLED, 1)][:SAMPLED]
    return sample.to(torch.float64 if sample.dtype is torch.float64 else torch.float32, copy=True)


_LINE = 4
"""The number of neighbouring elements in each sampled piece of a large parameter."""
