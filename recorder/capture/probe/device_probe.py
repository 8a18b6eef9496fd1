"""Measures values on devices for the probe, which has one number of each value at every step.

A kernel computes the norm of each value, and the norms of a step are copied to the host together. They arrive one or
two steps later, when the values may be gone. So a row can say that a value turned NaN or infinite, but not how many
elements are NaN or infinite. Nothing here may wait for a device, or hold a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...records import Block, Chunk, LostError, Measured, Ready, StepPosition, ValuePlace
from ...sites import AT_LEAST
from ..local_values import UnsupportedKind, merged_notes

if TYPE_CHECKING:
    from ..nonfinite import FirstNonFinite
    from ..staging.copies import Stager
    from ..staging.devices import DeviceNorms
    from ..staging.pool import Pool

TURNED = '{"turned":true}'
"""The note of a row that was recorded only because its value turned NaN or infinite."""
COUNTED_AT_LEAST = f'{{"counts":"{AT_LEAST}"}}'
"""The note of a row whose numbers of NaN and infinite elements are lower bounds: 1 stands for one element or more."""


class ProbedValue(NamedTuple):
    """A value that the probe measures, with what `Capture` needs to record a new tensor of the value."""

    column: int
    dtype: torch.dtype
    numel: int
    shape: torch.Size
    origin: ValuePlace
    phase: str
    scope: str | None
    chunk: Chunk | None
    note: str | None


class SeenOnDevice(NamedTuple):
    """A value on a device whose norm was requested and has not reached the host yet."""

    value: ProbedValue
    moment: StepPosition
    call: int
    has_row: bool
    """Whether a row of the value was recorded at this step already."""


class NormsOnWay(NamedTuple):
    """Norms of values of one step that are being copied to the host."""

    norms: DeviceNorms
    seen: list[SeenOnDevice]
    block: Block
    ready: Ready | None

    def has_arrived(self) -> bool:
        """Return whether the norms have arrived. Raise `LostError` if they will never arrive."""
        return not self.norms.is_capturing() and (self.ready is None or self.ready.wait(0.0))

    def read(self) -> npt.NDArray[np.float32]:
        """Return the norms in the order of `seen`. Call this only after the norms have arrived."""
        return self.block.data.view(np.float32)


class DeviceProbe:
    """Measures the values of the current step that lie on devices. Called on training threads."""

    def __init__(
        self, pool: Pool, nonfinite: FirstNonFinite, stager_of: Callable[[torch.Tensor], Stager],
        put_measured: Callable[[ProbedValue, StepPosition, int, str | None, Measured], None],
    ) -> None:  # fmt: skip
        self._pool, self._nonfinite, self._stager_of, self._put_measured = pool, nonfinite, stager_of, put_measured
        self._seen: dict[DeviceNorms, list[SeenOnDevice]] = {}

    def measure(self, seen: SeenOnDevice, local: torch.Tensor) -> bool:
        """Launch the kernel that measures a value. Return False if the value cannot be measured."""
        return self._launch([seen], local, lambda norms: norms.measure(local))

    def measure_many(self, seen: list[SeenOnDevice], tensors: list[torch.Tensor]) -> bool:
        """Launch the kernels that measure values on one device. Return False if the values cannot be measured."""
        return self._launch(seen, tensors[0], lambda norms: norms.measure_many(tensors))

    def is_free(self, tensor: torch.Tensor) -> bool:
        """Whether values on the tensor's device can be measured now. They cannot while the device captures a graph."""
        try:
            norms = self._stager_of(tensor).norms(tensor)
        except (LostError, UnsupportedKind):
            return False
        return norms is not None and not norms.is_capturing()

    def _launch(self, seen: list[SeenOnDevice], tensor: torch.Tensor, measure: Callable[[DeviceNorms], bool]) -> bool:
        try:
            norms = self._stager_of(tensor).norms(tensor)
        except (LostError, UnsupportedKind):
            return False
        if norms is None or not measure(norms):
            return False
        self._seen.setdefault(norms, []).extend(seen)
        self._nonfinite.lags = True
        return True

    def bring(self) -> list[NormsOnWay]:
        """Start to copy the ending step's norms to the host. Return the copies that are under way."""
        of_step, self._seen = self._seen, {}
        on_way = []
        for norms, seen in of_step.items():
            values = norms.take()
            if values is not None and len(values) == len(seen):
                block = self._pool.take(values.nbytes)
                if block is None:
                    continue
                try:
                    ready = self._stager_of(values).copy(values, block)
                except BaseException as error:
                    block.release()
                    if isinstance(error, LostError):
                        continue
                    raise
                on_way.append(NormsOnWay(norms, seen, block, ready))
        return on_way

    def record_turned(self, seen: SeenOnDevice, *, is_nan: bool) -> None:
        """Record a row which says that a value turned NaN or infinite, unless the value has a row at this step."""
        if not seen.has_row:
            note = merged_notes(merged_notes(seen.value.note, TURNED), COUNTED_AT_LEAST)
            its = Measured(nan_count=int(is_nan), inf_count=int(not is_nan))
            self._put_measured(seen.value, seen.moment, seen.call, note, its)
