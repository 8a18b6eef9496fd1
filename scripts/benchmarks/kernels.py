"""What the compiled loops save: GB/s of processor time of one thread, in Python and at each level of the library.

    python -m scripts.benchmarks kernels

16 MiB of normally distributed values of each type, the median of 9 runs; the columns of histogram and units hold the
statistics as well, and the column of squares is what the probe computes; `time.thread_time`, so that what else the
machine does costs caches and memory alone. Then what compresses the top plane: zstd and the Huffman code, GB/s of that
plane and what is left of it; whole payloads with `codec = zstd` and `auto`; and CRC32C, by the package and by the
library, of 64 MiB, which are more than the caches hold. Exit code 2 where no library was built.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from recorder import native
from recorder.capture.staging.measure import host_measure, measure
from recorder.format.codec import Encoder, max_encoded_bytes
from recorder.format.encodings import PayloadWriter
from recorder.numerics.dtypes import item_bytes
from recorder.records import KEEP_FINGERPRINT, KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS

_BYTES = 16 << 20
_KEEPS = (
    KEEP_STATS,
    KEEP_FINGERPRINT,
    KEEP_STATS | KEEP_FINGERPRINT,
    KEEP_STATS | KEEP_HISTOGRAM,
    KEEP_STATS | KEEP_UNITS,
)
"""What a column of the first table computes."""
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


def top_planes() -> Iterator[tuple[str, np.ndarray[tuple[int], np.dtype[np.uint8]], int]]:
    """Activations and gradients: what they are, their bytes, bytes of an element."""
    for dtype in ("float32", "bfloat16", "float16"):
        yield f"{dtype} normal", content(dtype), item_bytes(dtype)
    random = np.random.default_rng(1)
    normal = random.normal(0, 1, _BYTES // 4)
    gelu = normal / (1 + np.exp(-1.702 * normal))
    gradient = normal * np.exp(random.normal(0, 3, len(normal))) * 1e-6
    rows = normal.reshape(-1, 1024) * np.exp2(random.integers(-20, 5, (len(normal) // 1024, 1)))
    for name, values in (("gelu", gelu), ("gradient", gradient), ("rows of any scale", rows)):
        yield f"float32 {name}", values.astype("<f4").reshape(-1).view(np.uint8), 4


def payloads() -> Iterator[tuple[str, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """Payloads of which `codec = auto` compresses one plane, or all."""
    random = np.random.default_rng(2)
    normal = random.normal(0, 1, _BYTES // 4).astype("<f4")
    yield "normal", normal.view(np.uint8)
    yield "after ReLU", np.maximum(normal, 0).view(np.uint8)
    for share in (0.3, 0.7):
        yield f"{share:.0%} zeros", np.where(random.random(len(normal)) < share, 0, normal).astype("<f4").view(np.uint8)


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    if native.load() is None:
        print(f"no library: {native.in_force()}; install with a C compiler: pip install -e .", file=sys.stderr)
        return 2
    head = ("statistics", 12), ("fingerprint", 12), ("both", 8), ("histogram", 11), ("units", 7), ("squares", 9)
    print(f"{'':30}{''.join(f'{name:>{width}}' for name, width in head)}{'payload':>9}   GB/s")
    for name in ("python", *native.LEVELS):
        kernels = None if name == "python" else native.Kernels(level=native.LEVELS.index(name))
        if kernels is not None and kernels.level != name:
            continue
        for dtype in _DTYPES:
            data, size = content(dtype), item_bytes(dtype)
            shape = (len(data) // size // 2048, 2048)
            out, encoder = np.empty(max_encoded_bytes(len(data)), np.uint8), Encoder(kernels=kernels)
            figures = [
                gb_per_s(partial(measure, data, dtype, shape, None, keep, kernels=kernels), _BYTES) for keep in _KEEPS
            ]
            plan = host_measure(dtype, shape, KEEP_STATS, -1, kernels) if kernels is not None else None
            squares = 0.0
            if kernels is not None and plan is not None:
                squares = gb_per_s(partial(kernels.sum_of_squares, native.address(data), plan.loops), _BYTES)
            payload = gb_per_s(partial(encoder.encode, data, size, out), _BYTES)
            shown = "".join(f"{rate:{width}.1f}" for rate, width in zip(figures, (12, 12, 8, 11, 7), strict=True))
            print(f"{name:12}{dtype:18}{shown}{squares:9.1f}{payload:9.1f}")
    levels = ", ".join(native.LEVELS)
    print(f"\n{'top plane':30}{'zstd GB/s':>10}{'left':>8}{f'Huffman GB/s: {levels}':>40}{'left':>8}")
    for name, data, size in top_planes():
        num_items, out, rates = len(data) // size, np.empty(max_encoded_bytes(len(data)), np.uint8), []
        writer = PayloadWriter(1, native.Kernels())
        of_zstd = writer.put_plane(data, size, 0, out)
        rate = gb_per_s(partial(writer.put_plane, data, size, 0, out), num_items)
        for level in range(len(native.LEVELS)):
            kernels = native.Kernels(level=level)
            of_huffman = kernels.huffman(data, size, 0, out)
            rates.append(f"{gb_per_s(partial(kernels.huffman, data, size, 0, out), num_items):.2f}")
        left = of_zstd / num_items, of_huffman / num_items
        print(f"{name:30}{rate:10.2f}{left[0]:8.1%}   {', '.join(rates):>37}{left[1]:8.1%}")
    print(f"\n{'whole payload of float32':30}{'zstd GB/s':>10}{'left':>8}{'Huffman GB/s':>14}{'left':>8}")
    for name, data in payloads():
        out = np.empty(max_encoded_bytes(len(data)), np.uint8)
        print(f"{name:30}", end="")
        for codec in ("zstd", "auto"):
            encoder = Encoder(codec, kernels=native.Kernels())
            encode = partial(encoder.encode, data, 4, out, name)
            num_bytes = encode()[1]
            print(
                f"{gb_per_s(encode, len(data)):{10 if codec == 'zstd' else 14}.2f}{num_bytes / len(data):8.1%}", end=""
            )
        print()
    return 0
