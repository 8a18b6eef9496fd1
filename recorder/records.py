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
"""The payload is written."""
KEEP_STATS = 2
"""The statistics columns are written."""
KEEP_FINGERPRINT = 4
"""The fingerprint column is written."""
KEEP_HISTOGRAM = 8
"""The histogram column is written, and the statistics, which say how many values are zero or NaN."""
KEEP_REPLAY = 16
"""The data that a replay of the module's call needs is written at site ``call``, with its values and gradients."""
KEEP_UNITS = 32
"""The column of sums for each unit is written, and the statistics."""
KEEP_RING = 64
"""The payload waits in memory for a trigger, and is written only then. Never with `KEEP_TENSOR`."""
KEEP_PROBE = 128
"""One number of the value at every step is kept, in blocks of steps; see `capture/probe.py`."""
KEEP_TOKENS = 256
"""A sketch of each token is kept, in blocks of calls; see `capture/token_blocks.py`."""
KEEP_VALUES = KEEP_TENSOR | KEEP_RING
"""The bits that need the values themselves in host memory."""
KEEP_NUMBERS = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
"""The bits for numbers about the values, which say nothing about a sum of which the value is one summand."""

SMALL_BYTES = 1 << 12
"""A tensor of at most this size is copied in the hook, and the writer measures many such records with one call."""
MOST_TOGETHER = 256
"""The most small values that are measured with one call; they take about a millisecond."""
NUMBERS_TOGETHER = (KEEP_STATS, KEEP_STATS | KEEP_FINGERPRINT)
"""What may be kept of small values that are measured together, besides their payloads."""
PART_BYTES = 32 << 20
"""The size in bytes above which a payload becomes several rows, so that memory stays bounded."""


def kind_of(keep: int, site: str) -> str:
    """Return the kind of shard that a record belongs to. A scalar's payload stays with statistics, kept longest."""
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
    """The bytes of a value will never arrive; the error's text is the drop reason, its cause the original error."""


class Ready(Protocol):
    """The completion of a copy into a block that was not over when the record was made."""

    def wait(self, timeout_s: float) -> bool:
        """Wait on the writer thread; return True once the bytes have arrived, False while they may still come.

        Raises:
            LostError: the bytes will never come.
        """


class Origin(NamedTuple):
    """The place that a value comes from; made once for a leaf at a site and shared by all its records."""

    root: str
    module_path: str
    site: str
    name: str
    unit_dim: int = -1
    """The dim along which the units of the value lie; a negative dim counts from the last dim."""


class Moment(NamedTuple):
    """The time at which a value was seen; one object per slice of a step, shared by all records of the slice."""

    step: int
    micro_step: int | None
    mode: str


class Chunk(NamedTuple):
    """The part of a global tensor that a rank has; made once for a parameter. Texts are JSON, as in the row."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """The offset in elements along each dim; None if the chunk is no box of the global tensor."""
    placements: str
    mesh: str
    layout_source: str
    flat_start: int | None = None
    """The number of the first element of a chunk that is a run of the flattened (C order) global tensor."""
    flat_shape: tuple[int, ...] | None = None
    """The shape of the box, at `offsets` of the global tensor, if the chunk is a run of the flattened box."""


class Staged(NamedTuple):
    """One observed tensor in host memory that training can no longer change, and what to keep of it."""

    seq: int
    """The number of the record's first row in this writer; the rows of further parts follow."""
    num_parts: int
    """The number of the record's rows: 1, or if the payload is kept the number of its parts of `PART_BYTES`."""
    origin: Origin
    moment: Moment
    phase: str
    call: int
    repeat: int
    scope: str | None
    dtype: str
    """torch's name without the prefix, such as ``bfloat16``."""
    shape: tuple[int, ...]
    chunk: Chunk | None
    keep: int
    block: Block
    ready: Ready | None
    """The pending copy; None if the copy is complete already."""
    note: str | None
    """JSON text for the row's ``note``, or None."""
    time_ns: int
    """The wall clock time of the capture, in nanoseconds since the epoch."""
    measured: Callable[[npt.NDArray[np.uint8], Chunk | None], Measured] | None = None
    """The function that turns `block.data`, which need not be the values then, and `chunk` into statistics and
    fingerprint once `ready` is over; None if the tensor was not measured before."""


class ProbedSeries(NamedTuple):
    """A value of which the probe has one number at each step."""

    origin: Origin
    phase: str
    mode: str
    scope: str | None
    facts: dict[str, Any]
    """Facts about the value, which its rows' note has: its dtype, and the elements of the global tensor."""


class ProbedStep(NamedTuple):
    """The numbers of the probe at one step, one for each value that was known then. `series` may grow."""

    step: int
    series: list[ProbedSeries]
    sums: npt.NDArray[np.float64]
    """The sum of the squares of the finite elements of each value."""
    numels: npt.NDArray[np.float64]
    """The elements of each value that were seen; 0 where the value was not seen at this step."""


class Measured(NamedTuple):
    """The statistics of one tensor over its finite values; None if they do not exist (no elements, or no numbers)."""

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
    """The unsigned 64-bit fingerprint of the local tensor, at its position in the global tensor if that is known."""
    note: str | None = None
    """The reason why statistics are missing, such as ``no_statistics:complex64``."""
    histogram: bytes | None = None
    units: bytes | None = None


class MeasuredTogether(NamedTuple):
    """Records of small values whose statistics were computed where the values lie, so that no values were copied."""

    num_rows: int
    make: Callable[[], tuple[list[Staged], list[Measured]]]
    """Returns the records and the statistics of each. Called once, on the writer thread: so many objects that waited
    in the queue would have the garbage collector search all objects of the process."""
    block: Block
    """The memory of the pool that bounds how many such records wait. The records' own blocks are this one, too."""


class Measure(Protocol):
    """Computes statistics and fingerprint on the writer thread; `capture` provides the function."""

    def __call__(
        self,
        data: npt.NDArray[np.uint8],
        dtype: str,
        shape: tuple[int, ...],
        chunk: Chunk | None,
        keep: int,
        unit_dim: int = -1,
    ) -> Measured: ...


class MeasureSmall(Protocol):
    """Computes statistics and fingerprints of many records of few bytes at once, as `Measure` does of one."""

    def __call__(self, records: Sequence[Staged]) -> list[Measured]: ...
