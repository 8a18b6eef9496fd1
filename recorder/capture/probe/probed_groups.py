"""Groups of values that the probe measures with one call, and which tensors fit into them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...native import ManyTensors
from ..local_values import are_ordinary, are_plain, lie_strided
from .device_probe import ProbedValue

_strided = torch.strided
_dtype, _shape, _is_cpu = map(operator.attrgetter, ("dtype", "shape", "is_cpu"))


class ProbedGroup(NamedTuple):
    """Values that are measured with one call, such as the parameters and gradients of an optimizer."""

    values: list[ProbedValue]
    keeps: list[int]
    """For each value, what else to keep: bits of KEEP_* without KEEP_PROBE."""
    tensors: ManyTensors | None
    """The input of the compiled loops that measure the values. None if the values are on a device."""
    columns: npt.NDArray[np.int64]
    """For each value, the index of its column in the probe."""
    numels: npt.NDArray[np.float64]
    """For each value, the number of elements."""

    def may_record(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `Capture.observe_known` can record what the group keeps. It reads host tensors in memory order."""
        return not any(self.keeps) or self.tensors is None or all(map(torch.Tensor.is_contiguous, tensors))

    def addresses(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Return the data addresses of the group's tensors. Return None if they do not fit the group's values."""
        # Without rows, only squares of the elements are summed, and lazy negative and conjugate bits do not matter.
        lie_fit = are_ordinary if any(self.keeps) else lie_strided
        return addresses(self.values, tensors, lie_fit if self.tensors is not None else None)


def addresses(
    values: Sequence[ProbedValue],
    tensors: Sequence[torch.Tensor],
    lie_fit: Callable[[Sequence[torch.Tensor]], bool] | None,
) -> list[int] | None:
    """Return the tensors' data addresses, or None if a tensor does not fit its value or one call cannot measure all.

    Host tensors fit if their elements fill their memory in any order, as those of ``channels_last`` do.
    `lie_fit` tells whether host tensors lie as the compiled loops read them. It is None for values on a device: there
    all addresses are 0, because kernels take the tensors themselves. The tensors are not visited in Python, because
    there may be thousands of them at each step.
    """
    # No list of dtypes or shapes is made: its many small objects would make the garbage collector run.
    if (
        len(tensors) != len(values)
        or not are_plain(tensors)
        or not all(map(operator.is_, map(_dtype, tensors), map(_dtype, values)))
        or not all(map(operator.eq, map(_shape, tensors), map(_shape, values)))
    ):
        return None
    if lie_fit is None:
        place = tensors[0].device
        is_fit = all(
            one.device == place and one.layout is _strided and one.untyped_storage().nbytes() for one in tensors
        )
        return [0] * len(tensors) if is_fit else None
    if not (all(map(_is_cpu, tensors)) and lie_fit(tensors)):
        return None
    if not all(map(torch.Tensor.is_contiguous, tensors)) and not all(map(is_dense, tensors)):
        return None
    found = list(map(torch.Tensor.data_ptr, tensors))
    return found if all(found) else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill a stretch of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return [stride for stride, _ in sizes] == [1, *accumulate((size for _, size in sizes[:-1]), operator.mul)]
