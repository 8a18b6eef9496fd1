"""Tensors in host memory on their way to the writer: copied, or, where training takes all cores, finished in the hook.

There whatever the writer does is missing from training's threads, all of which but one wait while a hook runs. So the
hook measures a tensor, or encodes its payload with all of them, while it is in cache; the writer gets what it has to
write. With ``codec = "none"`` payloads are copied to where they are written from in any case. A small pool has no room
for that where training may not wait for it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import native
from ..config import Settings
from ..format.codec import PLAIN, Encoder, max_encoded_bytes
from ..format.fingerprint import moved
from ..native import KINDS, Kernels, Team
from ..processes import available_cores
from ..records import KEEP_FINGERPRINT, KEEP_STATS, PART_BYTES, Chunk, Measured, Origin, Ready
from . import topology
from .measure import measure
from .pool import Pool, PoolBlock
from .segments import Piece, Segments, segment_bytes
from .values import DTYPES

Reader = Callable[[npt.NDArray[np.uint8], Chunk | None], Measured]
_MEMMOVE_BYTES = 1 << 20
"""Below this memmove wins over the dispatcher (0.3 us a call against 6); above it torch copies with all its threads."""
_STORE_BYTES = 1 << 16
"""Above this the compiled loops copy, past the cache: pages of the pool are seldom there, nor needed there soon."""
_memmove: Callable[[int, int, int], None] = ctypes.PyDLL(None).memmove
"""Unlike `ctypes.memmove` it keeps the interpreter's lock, which the writer would have to give back first."""
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None  # type: ignore[attr-defined]
_ROOMY_BYTES = 1 << 28
"""Of a pool that can spare what a batch holds for as long as `flush_interval_s`."""
_CRC_BYTES = 1 << 16
"""Below this the writer's look at the bytes costs less than one more call here, and a join of checksums there."""
_MEASURE_BYTES = 1 << 16
"""Below this a copy costs training less than measuring."""
_MAX_LEVEL = 1
"""Of zstd, in a hook: higher ones are slower by up to a factor of 200, and how long training waits is bounded. The
writer takes its time."""


class HostStager:
    """Host memory to host memory: all is complete on return."""

    def __init__(
        self,
        pool: Pool,
        kernels: Kernels | None = None,
        settings: Settings | None = None,
        team: Team | None = None,
        *,
        finishes: bool = True,
    ) -> None:
        """Make one.

        Args:
            pool: where copies go.
            kernels: copy, measure and encode with these.
            settings: how to encode; without them nothing is.
            team: the threads that share that work.
            finishes: measure at once; else the writer does.
        """
        self._pool = pool
        self._address = pool.address
        self._alone = kernels
        self._kernels = kernels if kernels is None or team is None else kernels.sharing(team)
        self._finishes = finishes and kernels is not None
        self._encoder = None
        if settings is not None and _is_encoded(settings, pool.capacity_bytes):
            self._encoder = Encoder(settings.codec, settings.codec_level, self._kernels)
        used = settings or Settings()
        self._segments = Segments(pool, segment_bytes(used.max_bytes, used.shard_bytes))
        self._lock = threading.RLock()
        self._is_shared = False
        """Team and segment are in use: training may have several threads, and a signal's handler may train as well."""

    def plan(self, tensor: torch.Tensor, chunk: Chunk | None, keep: int) -> HostMeasure | None:
        if not self._finishes or tensor.numel() * tensor.itemsize < _MEASURE_BYTES or not _is_plain(tensor):
            return None
        return HostMeasure(keep, chunk) if DTYPES.get(tensor.dtype) in KINDS else None

    def measure(self, tensor: torch.Tensor, block: PoolBlock, plan: Any) -> Ready | None:
        self._with_team(lambda kernels: plan.measure(_bytes_of(tensor), tensor, kernels))
        return None

    def encode(
        self, tensor: torch.Tensor, chunk: Chunk | None, keep: int, origin: Origin
    ) -> tuple[Piece, Reader | None] | None:
        if self._encoder is None:
            return None
        is_ours = False
        try:
            with self._lock:
                if self._is_shared:
                    return None
                self._is_shared = is_ours = True
            return self._encode(self._encoder, tensor, chunk, keep, origin)
        finally:
            if is_ours:
                self._is_shared = False

    def _with_team(self, work: Callable[[Kernels], object]) -> None:
        """Call `work` with the kernels that share it, or, where those are in use, with those of one thread."""
        is_ours = False
        try:
            with self._lock:
                if not self._is_shared:
                    self._is_shared = is_ours = True  # plain stores: an interrupt comes before or after both
            kernels = self._kernels if is_ours else self._alone
            if kernels is not None:
                work(kernels)
        finally:
            if is_ours:
                self._is_shared = False

    def _encode(
        self, encoder: Encoder, tensor: torch.Tensor, chunk: Chunk | None, keep: int, origin: Origin
    ) -> tuple[Piece, Reader | None] | None:
        """One thread at a time."""
        nbytes, is_plain = tensor.numel() * tensor.itemsize, _is_plain(tensor)
        is_stored, is_known = encoder.stores(nbytes), DTYPES[tensor.dtype] in KINDS
        has_measures = keep & (KEEP_STATS | KEEP_FINGERPRINT)
        if nbytes > PART_BYTES or (has_measures and not is_known and not is_stored):
            return None
        is_measured = self._finishes and has_measures and is_known and nbytes >= _MEASURE_BYTES
        segment = self._segments.with_room(nbytes if is_stored else max_encoded_bytes(nbytes))
        if segment is None:
            return None
        if is_stored and is_plain and nbytes < _STORE_BYTES:
            _memmove(segment.address + segment.end, _source(tensor, nbytes), nbytes)
            return segment.add(nbytes, PLAIN, nbytes), None
        copied = None if is_plain else self._pool.take(nbytes)
        if not is_plain and copied is None:
            return None
        kernels, crc, read = self._kernels, None, None
        try:
            if copied is not None:
                self.copy(tensor, copied)
            data = _bytes_of(tensor) if copied is None else copied.data
            if is_stored and kernels is not None:
                encoding, num_bytes = PLAIN, nbytes
                crc = kernels.store(native.address(data), nbytes, segment.address + segment.end)
            else:
                encoding, num_bytes = encoder.encode(data, tensor.itemsize, segment.data[segment.end :], origin)
            if is_measured or (has_measures and encoding != PLAIN):  # else the writer has the values
                plan = HostMeasure(keep, chunk)
                plan.measure(data, tensor, kernels)
                read = plan.read
        finally:
            if copied is not None:
                copied.release()
        if crc is None and kernels is not None and num_bytes >= _CRC_BYTES:
            crc = kernels.crc32c(segment.data[segment.end : segment.end + num_bytes])
        return segment.add(num_bytes, encoding, nbytes, crc), read

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        nbytes, target = block.num_bytes, self._address + block.offset
        if nbytes < (_MEMMOVE_BYTES if self._kernels is None else _STORE_BYTES) and _is_plain(tensor):
            _memmove(target, _source(tensor, nbytes), nbytes)
            return None
        if self._kernels is not None and _is_plain(tensor):
            self._with_team(lambda kernels: kernels.stream(_source(tensor, nbytes), nbytes, target))
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            values = tensor.detach()
            if values.dtype == torch.float4_e2m1fn_x2:
                values = values.view(torch.uint8)  # torch 2.9 has no copy of pairs
            block.as_tensor(values.dtype, values.shape).copy_(values)
        return None

    def look(self) -> None:
        """Nothing waits here, nor is there anything to fetch or to close."""

    fetch = close = look


class HostMeasure:
    """Statistics or fingerprint of one tensor, taken from its own memory."""

    __slots__ = ("_item_bytes", "_keep", "_measured", "_run", "nbytes")

    def __init__(self, keep: int, chunk: Chunk | None) -> None:
        self.nbytes = 0
        self._keep = keep
        self._run = chunk if chunk is not None and chunk.flat_start is not None else None
        """The place of a run of elements; that of a box may be known only once the record is read."""
        self._item_bytes = 1
        self._measured = Measured()

    def measure(self, data: npt.NDArray[np.uint8], tensor: torch.Tensor, kernels: Kernels | None) -> None:
        """Measure the bytes of a tensor."""
        self._item_bytes = tensor.itemsize
        shape = tuple(tensor.shape)
        self._measured = measure(data, DTYPES[tensor.dtype], shape, self._run, self._keep, kernels=kernels)

    def read(self, data: npt.NDArray[np.uint8], chunk: Chunk | None) -> Measured:
        """What was measured; of a tensor that lies where `chunk` says."""
        measured = self._measured
        if measured.fingerprint is None or self._run is not None or chunk is None or chunk.offsets is None:
            return measured
        return measured._replace(fingerprint=moved(measured.fingerprint, self._item_bytes, chunk.offsets))


def host_stager(pool: Pool, settings: Settings) -> HostStager:
    """One that suits the cores that training leaves."""
    kernels = native.load(settings.native)
    if kernels is None:
        return HostStager(pool)
    team = native.find_team(torch.get_num_threads(), Path(torch.__file__).parent / "lib")
    if _takes_all_cores():
        return HostStager(pool, kernels, settings, team)
    return HostStager(pool, kernels, settings if settings.codec == "none" else None, team, finishes=False)


def work_of_hooks(settings: Settings, pool_bytes: int) -> str:
    """What hooks do with values in host memory, for people: ``copy``, ``measure``, or ``measure and encode``."""
    if native.load(settings.native) is None or not _takes_all_cores():
        return "copy"
    return "measure and encode" if _is_encoded(settings, pool_bytes) else "measure"


def _takes_all_cores() -> bool:
    return torch.get_num_threads() * topology.read().local_world_size >= available_cores()


def _is_encoded(settings: Settings, pool_bytes: int) -> bool:
    """Whether payloads go to where they are written from, which a batch holds until it is full, or training waits."""
    is_given_back = settings.policy == "wait" and settings.wait_s_per_step > 0
    is_cheap = settings.codec == "none" or settings.codec_level <= _MAX_LEVEL
    return is_cheap and (is_given_back or pool_bytes >= _ROOMY_BYTES)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the values in C order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a plain tensor; valid as long as that is."""
    nbytes = tensor.numel() * tensor.itemsize
    memory = (ctypes.c_char * nbytes).from_address(_source(tensor, nbytes))
    return np.frombuffer(memoryview(memory), np.uint8)


def _source(tensor: torch.Tensor, nbytes: int) -> int:
    address = tensor.data_ptr()
    if not address and nbytes:
        raise ValueError("no memory stands behind the tensor")
    return address
