"""Measures values in host memory for the probe, where they lie.

Called on training threads. Nothing here may hold a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ... import native
from ...numerics.dtypes import ITEM_BYTES
from ...records import KEEP_FINGERPRINT, KEEP_STATS, Measured
from ..local_values import DTYPES

if TYPE_CHECKING:
    from ..staging.measure import HostMeasure

_MAX_PLANS = 4096
HELD_BYTES = 1 << 22
"""A value of at most this many bytes is measured with the interpreter's lock held, as in `staging.copies`."""


class HostProbe:
    """Measures values by the compiled loops, or by numpy where these cannot or may not measure a value."""

    def __init__(self, *, use_native: bool) -> None:
        """Begin without values. `use_native` says whether the compiled loops may be used."""
        self.kernels = native.load(use_native)
        self.plans: dict[tuple[torch.dtype, int], HostMeasure | None] = {}
        """By dtype and number of elements, how the compiled loops measure such a value."""
        from ...format.fingerprint import compiled_weights
        from ..staging.measure import host_measure, measure  # imported late, because these modules load pyarrow

        self._host_measure, self._measure, self._weights = host_measure, measure, compiled_weights

    def sum_of_squares(self, local: torch.Tensor) -> float:
        """Return the sum of the squares of a tensor's elements. Return NaN if the compiled loops cannot compute it."""
        key = (local.dtype, local.numel())
        plan = self.plans.get(key)
        if plan is None:
            if self.kernels is None or local.dtype not in DTYPES:
                return math.nan
            plan = self._host_measure(DTYPES[local.dtype], (local.numel(),), KEEP_STATS, -1, self.kernels)
            if plan is None:
                return math.nan
            if len(self.plans) >= _MAX_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        if not local.is_contiguous():
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                local = local.detach().contiguous()
        return squares_at(local.data_ptr(), plan)

    def statistics(self, local: torch.Tensor) -> Measured:
        """Return a value's statistics. Used if elements are not finite, or if there are no compiled loops."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            data = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self._measure(data, DTYPES[local.dtype], tuple(local.shape), None, KEEP_STATS, kernels=self.kernels)

    def measure_together(
        self, tensors: Sequence[torch.Tensor], numels: Sequence[int], dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]], keeps: Sequence[int],
    ) -> Callable[[], list[Measured]]:  # fmt: skip
        """Measure statistics of small host tensors that `saw_group` has measured, and fingerprints where `keeps` asks.

        Return a function that gives the statistics. It may be called on any thread.
        """
        assert self.kernels is not None, "groups on the host are measured by the compiled loops"
        weights = [
            self._weights(ITEM_BYTES[dtype], shape) if keep & KEEP_FINGERPRINT else None
            for dtype, shape, keep in zip(dtypes, shapes, keeps, strict=True)
        ]
        return self.kernels.measure_small([tensor.data_ptr() for tensor in tensors], numels, dtypes, weights)


def squares_at(at: int, plan: HostMeasure) -> float:
    """Return the sum of the squares of the elements at an address."""
    return plan.kernels.sum_of_squares(at, plan.loops, num_threads=torch.get_num_threads(), held_bytes=HELD_BYTES)


def without_repeats(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return each element of an expanded tensor once, and the number of repeats. Complex elements become two reals."""
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
