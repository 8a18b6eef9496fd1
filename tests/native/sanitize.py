"""The compiled loops under the address and undefined behaviour sanitizers, over sizes, types and addresses.

    python -m tests.native.sanitize

Builds a library of its own and calls every loop of it with memory that ends where its data does.
Exit code 1 where a sanitizer finds something.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
CHECK = """
import sys, numpy as np
from pathlib import Path
from recorder import native
from recorder.capture.measure import _decoded
from recorder.format.dtypes import item_bytes
from recorder.format.fingerprint import compiled_weights

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
                kernels.measure(data, size, dtype, table, None)
                kernels.measure(data, weights.num_words, None, None, weights)
                if num_bytes > 1:
                    kernels.split(data, num_bytes, range(1, num_bytes), np.empty(size * (num_bytes - 1), np.uint8))
                num_runs += 1
print(f"{num_runs} runs, nothing found")
"""


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from hatch_build import compile_kernels

    name = "_kernels_sanitized.so"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "recorder" / "native"
        copy.mkdir(parents=True)
        for part in ("kernels.c", "kernels.inc"):
            (copy / part).write_bytes((ROOT / "recorder" / "native" / part).read_bytes())
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


if __name__ == "__main__":
    sys.exit(main())
