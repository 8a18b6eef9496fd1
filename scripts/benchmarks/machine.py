"""What the machine allows: copying, compressing, checksums and writing, on one thread, in the minutes of the bench.

Each figure is the best of a few repetitions: a limit, not a mean. Writes are timed by the clock, all else by the CPU
time of the thread, which others on the machine do not change as much.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from crc32c import crc32c

from recorder import native
from recorder.format.codec import Encoder, max_encoded_bytes

from .stopwatch import Stopwatch

LIMITS = {
    "copy": "copying into a warm buffer",
    "zstd": "zstd 1 of the bytes as they are",
    "codec": "the codec: byte planes, the first of them compressed",
    "crc32c": "CRC32C",
    "write": "buffered write and fsync",
    "direct": "direct write and fsync",
}


def limits(sample: npt.NDArray[Any], folder: Path) -> dict[str, float]:
    """GB of values a second for each of `LIMITS`; `direct` is missing where the file system has none."""
    data = np.resize(sample.view(np.uint8), 32 << 20)  # more than a cache holds
    target = np.ones_like(data)
    out = np.ones(max_encoded_bytes(len(data)), np.uint8)
    view = data.data
    compress, encoder = zstandard.ZstdCompressor(level=1).compress, Encoder(kernels=native.load())
    found = {
        "copy": _best(lambda: np.copyto(target, data), len(data)),
        "zstd": _best(lambda: compress(view), len(data)),
        "codec": _best(lambda: encoder.encode(data, sample.itemsize, out), len(data)),
        "crc32c": _best(lambda: crc32c(view), len(data)),
    }
    with mmap.mmap(-1, len(data)) as aligned:
        aligned[:] = data.tobytes()
        for name, flags in (("write", 0), ("direct", os.O_DIRECT)):
            try:
                found[name] = _best(lambda flags=flags: _write(folder, aligned, flags), len(data), is_wall=True)  # type: ignore[misc]
            except OSError:
                continue  # tmpfs has no direct writes
    return found


def _best(work: Callable[[], object], num_bytes: int, *, is_wall: bool = False, repetitions: int = 3) -> float:
    times = []
    for _ in range(repetitions):
        watch = Stopwatch()
        work()
        lap = watch.lap()
        times.append(lap.wall_s if is_wall else lap.cpu_s["training"])
    return num_bytes / min(times) / 1e9


def _write(folder: Path, data: mmap.mmap, flags: int) -> None:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        descriptor = os.open(file.name, os.O_WRONLY | flags)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, memoryview(data)[done : done + (8 << 20)], done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
