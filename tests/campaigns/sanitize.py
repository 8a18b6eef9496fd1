"""The compiled loops under the address and undefined behaviour sanitizers, over sizes, types and addresses.

    python -m tests.campaigns sanitize

Builds a library of its own and calls every loop of it with memory that ends where its data does.
Exit code 1 where a sanitizer finds something.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CHECK = """
import ctypes, sys, numpy as np, zstandard
from pathlib import Path
from recorder import native
from recorder.capture.staging.measure import _decoded
from recorder.format.codec import decode, max_encoded_bytes
from recorder.numerics.dtypes import item_bytes
from recorder.format.fingerprint import compiled_weights
from recorder.numerics.histogram import NUM_BINS

random = np.random.default_rng(0)
num_runs = 0
for level in range(len(native.LEVELS)):
    kernels = native.Kernels(Path(sys.argv[1]), level)
    for dtype in native.KINDS:
        table = _decoded(dtype) if dtype in native.TABLE_KINDS else None
        for size in (1, 2, 7, 8, 9, 15, 127, 128, 129, 136, 1000, 4095, 4096, 4097, 32767, 32768, 32769, 40000):
            num_bytes = item_bytes(dtype)
            for by in (0, 1, 3):
                # An array of its own for each run: the sanitizer then sees a step beyond its end.
                data = np.ascontiguousarray(random.integers(0, 256, by + size * num_bytes, np.uint8))[by:]
                weights = compiled_weights(num_bytes, (size,))
                kernels.measure(data, size, dtype, table, weights)
                kernels.measure(data, size, dtype, table, None, np.zeros(NUM_BINS[dtype], np.uint64))
                for num in {1, size, min(size, 7)}:
                    inner = 1 if num != 1 else size
                    units = native.UnitAddresses(np.zeros((3, num)), np.zeros(num, np.int64), inner)
                    kernels.measure(data, size, dtype, table, None, None, units)
                kernels.measure(data, weights.num_words, None, None, weights)
                if num_bytes > 1:
                    kernels.split(data, num_bytes, range(1, num_bytes), np.empty(size * (num_bytes - 1), np.uint8))
                num_runs += 1
    for size in (*range(1, 300, 7), 4095, 4096, 131071, 131072, 131073, 262144 + 65, (1 << 20) + 1):
        for num_values in (1, 2, 3, 40, 129, 256):
            shares = random.dirichlet(np.full(num_values, 0.3))
            values = random.permutation(256)[:num_values].astype(np.uint8)[random.choice(num_values, size, p=shares)]
            for by, num_bytes in ((0, 1), (1, 2), (3, 4)):
                data = np.empty(by + size * num_bytes, np.uint8)[by:]
                data[num_bytes - 1 :: num_bytes] = values
                room = size + 13 * (size // (1 << 20) + 1) + 3 * (size // (1 << 17) + 1)
                frames = np.empty(room, np.uint8)
                frames = frames[: kernels.huffman(data, num_bytes, 0, frames)]
                read = zstandard.ZstdDecompressor().stream_reader(frames.tobytes(), read_across_frames=True).read()
                assert read == values.tobytes(), (level, size, num_values)
                num_sampled = min(size, 2048)
                num_items, _ = kernels.sample(data, num_bytes, 8, 256, np.empty(num_sampled * num_bytes, np.uint8))
                assert num_items == num_sampled
                num_runs += 1
    sizes = (0, 1, 7, 24, 255, 257, 777, 4095, 32767, 32768, 32769, 65535, 65537, 196608, 196609, 262145)
    for size in (*sizes, (1 << 20) + 7, 9437185):
        for num_bytes, by in ((2, 0), (4, 1), (8, 3)):
            num_items = size // num_bytes
            data = np.empty(by + num_items * num_bytes, np.uint8)[by:]
            data[:] = random.integers(0, 100, len(data))
            for num_framed, encoding in ((1, "planes_plain"), (num_bytes, "planes")):
                frames = np.empty(max_encoded_bytes(len(data)), np.uint8)
                frames = frames[: kernels.encode(data, num_bytes, num_framed, frames)]
                assert np.array_equal(decode(encoding, frames, len(data), num_bytes), data), (level, size)
                num_runs += 1
print(f"{num_runs} runs, nothing found")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(_arguments: argparse.Namespace) -> int:
    sys.path.insert(0, str(ROOT))
    from hatch_build import compile_kernels

    name = "_kernels_sanitized.so"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "recorder" / "native"
        copy.mkdir(parents=True)
        for part in (ROOT / "recorder" / "native").glob("*.[chi]*"):
            (copy / part.name).write_bytes(part.read_bytes())
        library = compile_kernels(Path(folder), flags=FLAGS, name=name)
        if library is None:
            print(
                "sanitize: nothing was compiled; install gcc with its sanitizers (libasan, libubsan)", file=sys.stderr
            )
            return 2
        runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        }
        command = [sys.executable, "-c", CHECK, str(library)]
        return 1 if subprocess.run(command, cwd=ROOT, env=environment, timeout=900, check=False).returncode else 0
