"""The records that cross from capture to the writer: `Staged`, a tensor already copied to host memory, with its key.

Left of it is torch, right of it none. Nothing here may hold a tensor, a module or anything of the autograd graph.
The types are named tuples: immutable like frozen dataclasses, and a third of the cost to make on the training thread
(0.5 us against 1.9 us for the fields of `Staged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

KEEP_TENSOR = 1
"""The payload is written."""
KEEP_STATS = 2
"""The statistics columns are written."""
KEEP_FINGERPRINT = 4
"""The fingerprint column is written."""
KEEP_HISTOGRAM = 8
"""The histogram column is written, and the statistics, which say how many values are zero or NaN."""
KEEP_REPLAY = 16
"""What a call of the module needs to be run again is written at site ``call``, with its values and gradients."""
KEEP_UNITS = 32
"""The column of sums for each unit is written, and the statistics."""
KEEP_RING = 64
"""The payload waits in memory for a trigger, and is written only then. Never with `KEEP_TENSOR`."""
KEEP_VALUES = KEEP_TENSOR | KEEP_RING
"""What needs the values themselves in host memory."""
KEEP_NUMBERS = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
"""What says something of the values, and so nothing of a sum of which a value is one summand."""

SMALL_BYTES = 1 << 12
"""A tensor of at most this size is copied in the hook, and the writer measures many such records with one call."""
PART_BYTES = 32 << 20
"""A payload above this becomes several rows, so that memory stays bounded (bytes)."""


def kind_of(keep: int, site: str) -> str:
    """Return the kind of shard that a record belongs to. A scalar's payload stays with statistics, kept longest."""
    return "tensors" if keep & KEEP_TENSOR and site != "scalar" else "stats"


class Block(Protocol):
    """A part of the host pool that belongs to one record until it is released."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The raw little-endian C-order bytes of the tensor, shape (num_bytes,)."""

    @property
    def num_bytes(self) -> int:
        """The number of these bytes."""

    @property
    def address(self) -> int:
        """Where they begin in memory."""

    def release(self) -> None:
        """Give the bytes back to the pool. Called once, from any thread; `data` must not be touched afterwards."""


class LostError(Exception):
    """The bytes of a value will never arrive; its text is the drop reason, its cause what happened."""


class Ready(Protocol):
    """The completion of a copy into a block that was not over when the record was made."""

    def wait(self, timeout_s: float) -> bool:
        """Wait on the writer thread; True once the bytes have arrived, False where they may still come.

        Raises:
            LostError: they will never come.
        """


class Origin(NamedTuple):
    """Where a value comes from; made once for a leaf at a site and shared by all its records."""

    root: str
    module_path: str
    site: str
    name: str
    unit_dim: int = -1
    """The dim along which the units of the value lie; a negative one counts from the last."""


class Moment(NamedTuple):
    """When a value was seen; one per slice of a step, shared by all records of it."""

    step: int
    micro_step: int | None
    mode: str


class Chunk(NamedTuple):
    """The part of a global tensor that a rank holds; made once for a parameter. Texts are JSON, as in the row."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Elements, one per dim; None where the chunk is no box of the global tensor."""
    placements: str
    mesh: str
    layout_source: str
    flat_start: int | None = None
    """The number of the first element of a chunk that is a run of the flattened (C order) global tensor."""
    flat_shape: tuple[int, ...] | None = None
    """The shape of the box, at `offsets` of the global tensor, where the chunk is a run of the flattened box."""


class Staged(NamedTuple):
    """One observed tensor in host memory that training can no longer change, and what to keep of it."""

    seq: int
    """Number of its first row in this writer; rows of its further parts follow."""
    num_parts: int
    """The number of rows that it becomes: 1, or where the payload is kept the number of its parts of `PART_BYTES`."""
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
    """Bits of KEEP_*."""
    block: Block
    ready: Ready | None
    """None where the copy is complete already."""
    note: str | None
    """JSON text for the row's ``note``, or None."""
    time_ns: int
    """Wall clock of the capture, nanoseconds since the epoch."""
    measured: Callable[[npt.NDArray[np.uint8], Chunk | None], Measured] | None = None
    """Set where the tensor was measured before. It turns `block.data`, which need not hold the values then, and `chunk`
    into statistics and fingerprint once `ready` is over."""


class Measured(NamedTuple):
    """Statistics of one tensor over its finite values; None where they cannot be had (empty, or no numbers)."""

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
    """Unsigned 64-bit; of the local tensor moved to its position in the global one where offsets are known."""
    note: str | None = None
    """The reason why statistics are missing, such as ``no_statistics:complex64``."""
    histogram: bytes | None = None
    """As the column has it."""
    units: bytes | None = None
    """As the column has it."""


class Measure(Protocol):
    """Computes statistics and fingerprint; runs on the writer thread, handed over by `capture`."""

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
