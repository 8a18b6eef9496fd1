"""The records that pass from capture to the writer: above all `Staged`, a tensor in host memory with its key.

Capture uses torch, and the writer does not. Nothing here may refer to a tensor, a module or the autograd graph. The
types are named tuples: as immutable as frozen dataclasses, and made in a third of the time on the training thread (0.5
us instead of 1.9 us for the fields of `Staged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .sites import PROBE, TOKENS

KEEP_TENSOR = 1
"""The bit in `keep` for the payload: the tensor's elements."""
KEEP_STATS = 2
"""The bit in `keep` for the statistics columns."""
KEEP_FINGERPRINT = 4
"""The bit in `keep` for the fingerprint column."""
KEEP_HISTOGRAM = 8
"""The bit in `keep` for the histogram, and for the statistics, whose counts of zeros and NaN belong to it."""
KEEP_REPLAY = 16
"""The bit in `keep` for a replay of the module's call. It needs data at site ``call``, values and gradients."""
KEEP_UNITS = 32
"""The bit in `keep` for the sums over units (neurons or channels), and for the statistics."""
KEEP_RING = 64
"""The bit in `keep` for the ring, where a payload waits in memory for a trigger. Never with `KEEP_TENSOR`."""
KEEP_PROBE = 128
"""The bit in `keep` for the probe: one number of the value at every step (see `capture/probe/probe.py`)."""
KEEP_TOKENS = 256
"""The bit in `keep` for a sketch (short digest) of each token, in blocks of calls (see `capture/token_blocks.py`)."""
KEEP_VALUES = KEEP_TENSOR | KEEP_RING
"""The bits in `keep` for which the values must be in host memory."""
KEEP_NUMBERS = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
"""The bits in `keep` for numbers about values. Such numbers of a sum's summands say nothing about the sum."""

SMALL_BYTES = 1 << 12
"""A tensor of at most this size is copied in the hook. The writer measures many such tensors with one call."""
MOST_TOGETHER = 256
"""The most small tensors that are measured with one call, which takes about a millisecond."""
NUMBERS_TOGETHER = (KEEP_STATS, KEEP_STATS | KEEP_FINGERPRINT)
"""The values of `keep`, without the payload's bit, for which small tensors are measured together."""
PART_BYTES = 32 << 20
"""A payload of more bytes is written as several rows, so that memory stays bounded."""


def kind_of(keep: int, site: str) -> str:
    """Return the kind of shard for a record. Scalars go with the statistics, which are kept longest."""
    if site in (PROBE, TOKENS):
        return PROBE
    return "tensors" if keep & KEEP_TENSOR and site != "scalar" else "stats"


class Block(Protocol):
    """Memory of the host pool. It belongs to one record until it is released."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The tensor's little-endian C-order bytes, of shape (num_bytes,)."""

    @property
    def num_bytes(self) -> int:
        """The size of the block in bytes."""

    @property
    def address(self) -> int:
        """The address of the block's first byte."""

    def release(self) -> None:
        """Give the memory back to the pool. Called once, on any thread. `data` must not be used after that."""


class LostError(Exception):
    """A value's bytes will never arrive. The text is the drop reason, and the cause is the original error."""


class Ready(Protocol):
    """A copy into a block that was still running when the record was made."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the bytes on the writer thread. Return True once they are there, and False if they may still come.

        Raises:
            LostError: the bytes will never come.
        """


class ValuePlace(NamedTuple):
    """The place that a value comes from. All records of a name at a site share one object."""

    root: str
    module_path: str
    site: str
    name: str
    unit_dim: int = -1
    """The dim along which the value's units (neurons or channels) lie. A negative dim counts from the last."""


class StepPosition(NamedTuple):
    """The step, micro-step and mode in which a value was seen. Records of one micro-step and mode share an object."""

    step: int
    micro_step: int | None
    mode: str


class Chunk(NamedTuple):
    """A rank's chunk of a global tensor. Made once per parameter. `placements` and `mesh` are JSON texts."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """The offset along each dim, in elements. None if the chunk is no box of the global tensor."""
    placements: str
    mesh: str
    layout_source: str
    flat_start: int | None = None
    """If the chunk is a run of the flattened (C order) global tensor or of a box: the index of its first element."""
    flat_shape: tuple[int, ...] | None = None
    """If the chunk is a run of a flattened box at `offsets` of the global tensor: the shape of the box. Else None."""


class SeenValue(NamedTuple):
    """What a hook knows about a value, apart from the tensor itself."""

    origin: ValuePlace
    moment: StepPosition
    phase: str
    call: int = 0
    repeat: int = 0
    """The number of the row among rows with otherwise equal keys."""
    scope: str | None = None
    """The scope of a gradient or parameter. None for other values."""
    chunk: Chunk | None = None
    """The chunk of a global tensor, if only the hook knows it and not the tensor."""
    note: str | None = None
    """The JSON text for the row's ``note``; None without a note."""


class Staged(NamedTuple):
    """One observed tensor in host memory, and what to keep of it. Training can no longer change it."""

    seq: int
    """The number of the record's first row in this writer. Rows of further parts have the next numbers."""
    num_parts: int
    """The number of the record's rows: 1, or the number of parts of `PART_BYTES` if the payload is kept."""
    origin: ValuePlace
    moment: StepPosition
    phase: str
    call: int
    repeat: int
    scope: str | None
    dtype: str
    """The dtype by torch's name, such as ``bfloat16``."""
    shape: tuple[int, ...]
    chunk: Chunk | None
    keep: int
    block: Block
    ready: Ready | None
    """The copy that is still running. None if the copy is complete."""
    note: str | None
    """The JSON text for the row's ``note``; None without a note."""
    time_ns: int
    """The wall clock time of the capture in nanoseconds since the epoch."""
    measured: Callable[[npt.NDArray[np.uint8], Chunk | None], Measured] | None = None
    """For a tensor that was measured before its copy: returns statistics and fingerprint. Called with `block.data`,
    which need not be the values then, and with `chunk`, once `ready` is over. None for other tensors."""


class ProbedSeries(NamedTuple):
    """One value that the probe measures: one number of it at every step."""

    origin: ValuePlace
    phase: str
    mode: str
    scope: str | None
    facts: dict[str, Any]
    """Facts for the note of the value's rows: dtype, and number of elements of the global tensor."""


class ProbedStep(NamedTuple):
    """The probe's numbers at one step: one for each value that was then in `series`. `series` may grow."""

    step: int
    series: list[ProbedSeries]
    sums: npt.NDArray[np.float64]
    """For each value, the sum of squares of its finite elements."""
    numels: npt.NDArray[np.float64]
    """For each value, the number of elements seen at this step; 0 if the value was not seen."""


class Measured(NamedTuple):
    """The statistics of one tensor's finite values. A statistic is None if there are none, or if the dtype has none."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    l2: float | None = None
    sum: float | None = None
    sum_sq: float | None = None
    sum_abs: float | None = None
    sum_fourth: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    zero_count: int | None = None
    fingerprint: int | None = None
    """The unsigned 64-bit fingerprint of the local tensor, at its position in the global tensor if it has one."""
    note: str | None = None
    """The reason why statistics are missing, such as ``no_statistics:complex64``."""
    histogram: bytes | None = None
    units: bytes | None = None


class MeasuredTogether(NamedTuple):
    """Records of small tensors that were measured in place, without a copy."""

    num_rows: int
    make: Callable[[], tuple[list[Staged], list[Measured]]]
    """Returns the records and the statistics of each. Called once, on the writer thread. Otherwise so many objects
    would wait in the queue that the garbage collector would search all objects of the process."""
    block: Block
    """Memory of the pool, which bounds how many such records wait. It is the block of each of the records."""


Measure = Callable[[npt.NDArray[np.uint8], str, tuple[int, ...], Chunk | None, int, int], Measured]
"""Computes statistics and fingerprint of one record. Called on the writer thread; `capture` provides it. The arguments
are the bytes of a block, and the dtype, shape, chunk, `keep` and unit dim of a record."""
MeasureSmall = Callable[[Sequence[Staged]], list[Measured]]
"""Computes statistics and fingerprints of many small records with one call. `Measure` does so for one record."""
