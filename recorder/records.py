"""The records that go from capture to the writer: `Staged`, a tensor already copied to host memory, with its key.

Capture uses torch, and the writer does not. Nothing here may refer to a tensor, a module or the autograd graph.
The types are named tuples: immutable like frozen dataclasses, and a third of the cost to make on the training thread
(0.5 us against 1.9 us for the fields of `Staged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .sites import PROBE, TOKENS

KEEP_TENSOR = 1
"""The bit in `keep` for the payload."""
KEEP_STATS = 2
"""The bit in `keep` for the statistics columns."""
KEEP_FINGERPRINT = 4
"""The bit in `keep` for the fingerprint column."""
KEEP_HISTOGRAM = 8
"""The bit in `keep` for the histogram column and for the statistics, which count zeros and NaN for the histogram."""
KEEP_REPLAY = 16
"""The bit in `keep` for what a replay of the module's call needs: data at site ``call``, values and gradients."""
KEEP_UNITS = 32
"""The bit in `keep` for the column of sums over each unit (channel or neuron), and for the statistics."""
KEEP_RING = 64
"""The bit in `keep` for a payload that waits in memory until a trigger asks for it. Never with `KEEP_TENSOR`."""
KEEP_PROBE = 128
"""The bit in `keep` for one number of the value at every step, in blocks of steps; see `capture/probe.py`."""
KEEP_TOKENS = 256
"""The bit in `keep` for a sketch of each token, in blocks of calls; see `capture/token_blocks.py`."""
KEEP_VALUES = KEEP_TENSOR | KEEP_RING
"""The bits in `keep` that need the values themselves in host memory."""
KEEP_NUMBERS = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
"""The bits in `keep` for numbers about values. Numbers about the summands of a sum say nothing about the sum."""

SMALL_BYTES = 1 << 12
"""A tensor of at most this size is copied in the hook, and the writer measures many such records with one call."""
MOST_TOGETHER = 256
"""The most small values that are measured with one call, which takes about a millisecond."""
NUMBERS_TOGETHER = (KEEP_STATS, KEEP_STATS | KEEP_FINGERPRINT)
"""The possible values of `keep` for small values that are measured together, apart from the bit for the payload."""
PART_BYTES = 32 << 20
"""The size in bytes above which a payload is written as several rows, so that memory stays bounded."""


def kind_of(keep: int, site: str) -> str:
    """Return the kind of shard for a record. A scalar's payload goes with the statistics, which are kept longest."""
    if site in (PROBE, TOKENS):
        return PROBE
    return "tensors" if keep & KEEP_TENSOR and site != "scalar" else "stats"


class Block(Protocol):
    """A part of the host pool that belongs to one record until it is released."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The raw little-endian C-order bytes of the tensor, shape (num_bytes,)."""

    @property
    def num_bytes(self) -> int:
        """The number of the block's bytes."""

    @property
    def address(self) -> int:
        """The address of the block's first byte."""

    def release(self) -> None:
        """Give the bytes back to the pool. Called once, from any thread; `data` must not be touched afterwards."""


class LostError(Exception):
    """The bytes of a value will never arrive. The error's text is the drop reason; its cause is the original error."""


class Ready(Protocol):
    """A pending copy into a block, which had not ended when the record was made."""

    def wait(self, timeout_s: float) -> bool:
        """Wait on the writer thread; return True once the bytes have arrived, False while they may still come.

        Raises:
            LostError: the bytes will never come.
        """


class ValuePlace(NamedTuple):
    """The place that a value comes from; made once for each name at a site, and shared by all records of it."""

    root: str
    module_path: str
    site: str
    name: str
    unit_dim: int = -1
    """The dim along which the units of the value lie; a negative dim counts from the last dim."""


class StepPosition(NamedTuple):
    """The time at which a value was seen. All records of a micro-step in one mode share one object."""

    step: int
    micro_step: int | None
    mode: str


class Chunk(NamedTuple):
    """The chunk of a global tensor that a rank has; made once per parameter. `placements` and `mesh` are JSON texts."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """The offset in elements along each dim; None if the chunk is no box of the global tensor."""
    placements: str
    mesh: str
    layout_source: str
    flat_start: int | None = None
    """The index of the first element of a chunk that is a run of the flattened (C order) global tensor or box."""
    flat_shape: tuple[int, ...] | None = None
    """The shape of a box at `offsets` of the global tensor, if the chunk is a run of this box, flattened; else None."""


class SeenValue(NamedTuple):
    """A value that a hook has seen, without the tensor itself."""

    origin: ValuePlace
    moment: StepPosition
    phase: str
    call: int = 0
    repeat: int = 0
    """The number of the row among rows whose key is otherwise equal."""
    scope: str | None = None
    """The scope of a gradient or parameter; None where a scope has no meaning."""
    chunk: Chunk | None = None
    """The chunk of a global tensor, if the hook knows the chunk and the tensor does not tell."""
    note: str | None = None
    """The JSON text for the row's ``note``; None without a note."""


class Staged(NamedTuple):
    """One observed tensor in host memory that training can no longer change, and what to keep of it."""

    seq: int
    """The number of the record's first row in this writer; the rows of its further parts have the next numbers."""
    num_parts: int
    """The number of the record's rows: 1, or, if the payload is kept, the number of its parts of `PART_BYTES`."""
    origin: ValuePlace
    moment: StepPosition
    phase: str
    call: int
    repeat: int
    scope: str | None
    dtype: str
    """The element type by torch's name without ``torch.``, such as ``bfloat16``."""
    shape: tuple[int, ...]
    chunk: Chunk | None
    keep: int
    block: Block
    ready: Ready | None
    """The pending copy; None if the copy is complete already."""
    note: str | None
    """The JSON text for the row's ``note``; None without a note."""
    time_ns: int
    """The wall clock time of the capture, in nanoseconds since the epoch."""
    measured: Callable[[npt.NDArray[np.uint8], Chunk | None], Measured] | None = None
    """For a tensor that was measured before its copy, the function that makes statistics and fingerprint from
    `block.data`, which need not be the values then, and `chunk` once `ready` is over; else None."""


class ProbedSeries(NamedTuple):
    """A value of which the probe has one number at each step."""

    origin: ValuePlace
    phase: str
    mode: str
    scope: str | None
    facts: dict[str, Any]
    """Facts for the note of the value's rows: the dtype, and the number of elements of the global tensor."""


class ProbedStep(NamedTuple):
    """The numbers of the probe at one step, one for each value in `series` that was known then. `series` may grow."""

    step: int
    series: list[ProbedSeries]
    sums: npt.NDArray[np.float64]
    """For each value, the sum of the squares of its finite elements."""
    numels: npt.NDArray[np.float64]
    """For each value, the number of elements that were seen at this step; 0 if the value was not seen."""


class Measured(NamedTuple):
    """The statistics of one tensor's finite values. A statistic is None without elements, or if the dtype has none."""

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
    """Records of small values that were measured where they lie, so that no value was copied."""

    num_rows: int
    make: Callable[[], tuple[list[Staged], list[Measured]]]
    """Returns the records and the statistics of each. Called once, on the writer thread: if so many objects waited in
    the queue, the garbage collector would search all objects of the process."""
    block: Block
    """The memory of the pool that bounds how many such records wait; it is also the block of each of the records."""


Measure = Callable[[npt.NDArray[np.uint8], str, tuple[int, ...], Chunk | None, int, int], Measured]
"""Computes statistics and fingerprint on the writer thread; `capture` provides the function. Its arguments are the
bytes of a block, and the dtype, shape, chunk, `keep` and unit dim of a record."""
MeasureSmall = Callable[[Sequence[Staged]], list[Measured]]
"""Computes statistics and fingerprints of many small records with one call; `Measure` does so for one record."""
