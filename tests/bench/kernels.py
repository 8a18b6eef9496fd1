"""What the compiled loops save: GB/s of processor time of one thread, in Python and at each level of the library.

    python -m tests.bench kernels

16 MiB of normally distributed values of each type, the median of 9 runs; `time.thread_time`, so that what else the
machine does costs caches and memory alone. Exit code 2 where no library was built.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from recorder import native
from recorder.capture.measure import measure
from recorder.format.codec import Encoder, max_encoded_bytes
from recorder.format.dtypes import item_bytes
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS

_BYTES = 16 << 20
_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "float8_e4m3fn")


def gb_per_s(run: Callable[[], object], num_bytes: int, rounds: int = 9) -> float:
    run()
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return num_bytes / statistics.median(times) / 1e9


def content(dtype: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    values = np.random.default_rng(0).normal(0, 1, _BYTES // item_bytes(dtype))
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if dtype.startswith("float8"):
        return (values * 20).astype(np.int8).view(np.uint8)
    return (values * 100 if dtype == "int64" else values).astype(dtype).view(np.uint8)


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    if native.load() is None:
        print(f"no library: {native.in_force()}; install with a C compiler: pip install -e .", file=sys.stderr)
        return 2
    print(f"{'':30}{'statistics':>12}{'fingerprint':>12}{'both':>8}{'payload':>9}   GB/s")
    for name in ("python", *native.LEVELS):
        kernels = None if name == "python" else native.Kernels(level=native.LEVELS.index(name))
        if kernels is not None and kernels.level != name:
            continue
        for dtype in _DTYPES:
            data, size = content(dtype), item_bytes(dtype)
            shape = (len(data) // size // 2048, 2048)
            out, encoder = np.empty(max_encoded_bytes(len(data)), np.uint8), Encoder(kernels=kernels)
            figures = [
                gb_per_s(partial(measure, data, dtype, shape, None, keep, kernels=kernels), _BYTES)
                for keep in (KEEP_STATS, KEEP_FINGERPRINT, KEEP_STATS | KEEP_FINGERPRINT)
            ]
            payload = gb_per_s(partial(encoder.encode, data, size, out), _BYTES)
            print(f"{name:12}{dtype:18}{figures[0]:12.1f}{figures[1]:12.1f}{figures[2]:8.1f}{payload:9.1f}")
    return 0
