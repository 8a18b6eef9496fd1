"""Stand-ins for what the writer meets: pool blocks, staged records, a measuring callable, and disks that misbehave."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recorder.native import address
from recorder.records import (
    KEEP_STATS,
    KEEP_TENSOR,
    KEEP_VALUES,
    PART_BYTES,
    Chunk,
    Measured,
    Staged,
    StepPosition,
    ValuePlace,
)
from recorder.write.file import Disk

Bytes = npt.NDArray[np.uint8]


class FakeBlock:
    """A block that knows how often it was released, and whose bytes are gone afterwards, as in a real pool."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.num_bytes, self.address = len(data), address(data)
        self.num_releases = 0

    def release(self) -> None:
        self.num_releases += 1
        self.data = np.full(len(self.data), 0xEE, np.uint8)


def fake_staged(
    values: npt.NDArray[Any] | None = None,
    *,
    seq: int = 0,
    module_path: str = "blocks.0.mlp",
    site: str = "output",
    name: str = "",
    step: int = 0,
    micro_step: int | None = 0,
    mode: str = "train",
    phase: str = "forward",
    scope: str | None = None,
    dtype: str | None = None,
    chunk: Chunk | None = None,
    keep: int = KEEP_TENSOR | KEEP_STATS,
    ready: Any = None,
    note: str | None = None,
    time_ns: int = 1_700_000_000_000_000_000,
) -> Staged:
    """A record of a copy of `values` (default: 8 float32); several rows where it is large and kept."""
    array = np.arange(8, dtype=np.float32) if values is None else values
    data = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    return Staged(
        seq=seq,
        num_parts=max(1, -(-len(data) // PART_BYTES)) if keep & KEEP_VALUES else 1,
        origin=ValuePlace("model", module_path, site, name),
        moment=StepPosition(step, micro_step, mode),
        phase=phase,
        call=0,
        repeat=0,
        scope=scope,
        dtype=dtype or str(array.dtype),
        shape=array.shape,
        chunk=chunk,
        keep=keep,
        block=FakeBlock(data),
        ready=ready,
        note=note,
        time_ns=time_ns,
    )


def fake_measure(
    data: Bytes, dtype: str, shape: tuple[int, ...], chunk: Chunk | None, keep: int, unit_dim: int = -1
) -> Measured:
    """Numbers that a test can foresee: the mean is the number of bytes, the fingerprint their sum."""
    return Measured(mean=float(len(data)), zero_count=int((data == 0).sum()), fingerprint=int(data.sum(dtype=np.int64)))


class FaultyDisk(Disk):
    """A real disk that fails, stalls or fills up on demand, and remembers what was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.stalled: set[str] = set()
        """Names of methods that wait until `recover`."""
        self.delay_s = 0.0
        """What each write takes longer."""
        self.free_for_writes: int | None = None
        """Bytes that may still be written before ENOSPC; None for any number."""
        self.free_for_others: int | None = None
        """What `free_bytes` answers; None for the truth."""
        self.max_write_bytes: int | None = None
        """Longest write that is done in one go."""
        self.spares_manifests = True
        """Whether trouble is with shards and indexes alone."""
        self._spared: set[int] = set()
        self._recovered = threading.Event()
        self._errors: dict[str, list[OSError]] = {}

    def fail(self, method: str, code: int, times: int = 1) -> None:
        """Let the next calls of a method raise."""
        self._errors.setdefault(method, []).extend(OSError(code, os.strerror(code)) for _ in range(times))

    def recover(self) -> None:
        """End every stall, failure and shortage."""
        self._errors.clear()
        self.stalled.clear()
        self.delay_s = 0.0
        self.free_for_writes = self.free_for_others = self.max_write_bytes = None
        self._recovered.set()

    def _is_spared(self, path: Path) -> bool:
        return self.spares_manifests and ".json" in path.name

    def _enter(self, method: str, *, is_spared: bool = False) -> None:
        if is_spared:
            return
        self.calls[method] += 1
        if method in self.stalled:
            self._recovered.wait()
        errors = self._errors.get(method)
        if errors:
            raise errors.pop(0)

    def make_directory(self, path: Path) -> None:
        self._enter("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._enter("create", is_spared=self._is_spared(path))
        descriptor = super().create(path)
        if self._is_spared(path):
            self._spared.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        if descriptor in self._spared:
            return super().write(descriptor, data, offset, *behind)
        self._enter("write")
        time.sleep(self.delay_s)
        if self.max_write_bytes is not None:
            data, behind = data[: self.max_write_bytes], ()
        if self.free_for_writes is not None:
            data, behind = data[: self.free_for_writes], ()
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.free_for_writes -= len(data)
        return super().write(descriptor, data, offset, *behind)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        self._enter("truncate")
        super().truncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        self._enter("sync", is_spared=descriptor in self._spared)
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._enter("close", is_spared=descriptor in self._spared)
        self._spared.discard(descriptor)

    def link(self, path: Path, final: Path) -> None:
        self._enter("link", is_spared=self._is_spared(path))
        super().link(path, final)

    def rename(self, path: Path, final: Path) -> None:
        self._enter("rename", is_spared=self._is_spared(path))
        super().rename(path, final)

    def replace(self, path: Path, final: Path) -> None:
        self._enter("replace", is_spared=self._is_spared(path))
        super().replace(path, final)

    def unlink(self, path: Path) -> None:
        self._enter("unlink", is_spared=self._is_spared(path))
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._enter("sync_directory")
        super().sync_directory(path)

    def free_bytes(self, path: Path) -> int:
        self._enter("free_bytes")
        return super().free_bytes(path) if self.free_for_others is None else self.free_for_others
