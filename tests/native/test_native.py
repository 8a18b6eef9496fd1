"""The compiled loops give the very bits of Python, at every level, and are done without where they cannot be had."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recorder import native
from recorder.capture.staging import measure as measure_module
from recorder.capture.staging.measure import host_measure, measure, measure_small
from recorder.format import fingerprint as fingerprints
from recorder.format.codec import Encoder, decode, max_encoded_bytes
from recorder.format.fingerprint import flat_fingerprint
from recorder.numerics.dtypes import ITEM_BYTES, item_bytes
from recorder.numerics.units import MAX_UNITS
from recorder.records import KEEP_FINGERPRINT, KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS, Chunk, Measured
from tests.rigs import jobs
from tests.rigs.fakes import fake_staged

ROOT = Path(__file__).parents[2]
_HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_library = pytest.mark.skipif(
    not _HAS_COMPILER and not native.LIBRARY.exists(), reason="no C compiler here, so nothing is compiled"
)
_Bytes = npt.NDArray[np.uint8]
_SPECIAL = {
    "float32": [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 1.0],
    "float64": [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.7e308, -1.7e308, 5e-324, 1.0],
}
_SIZES = (0, 1, 7, 8, 9, 127, 128, 129, 1000, 2047, 16384, 32767, 32768, 32769, 65536, 70001)
"""Around what the sums are made of: 8 lanes, leaves of 128, chunks of 32768; pairs are counted from 2048 on."""


@pytest.fixture(scope="module", params=native.LEVELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[native.Kernels]:
    try:
        found = native.Kernels(level=native.LEVELS.index(request.param))
        if found.level != request.param:
            pytest.skip(f"this processor has no {request.param}")
        yield found
    finally:
        if native.LIBRARY.exists():
            native.Kernels()  # the level is one for the process


def _bits(measured: Measured) -> list[object]:
    """Equal where every float has the same bits."""
    return [struct.pack("<d", value) if isinstance(value, float) else value for value in measured]


@cache
def _of_python(dtype: str, shape: tuple[int, ...], kind: str, seed: int, keep: int, dim: int = -1) -> list[object]:
    """What Python measures of some content: the same beside every level and every address."""
    return _bits(measure(_content(dtype, math.prod(shape), kind, seed), dtype, shape, None, keep, dim))


def _content(dtype: str, size: int, kind: str, seed: int) -> _Bytes:
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, size, np.uint8)
    if kind == "bits":
        return random.integers(0, 256, size * item_bytes(dtype), np.uint8)
    if kind == "zeros":
        return np.zeros(size * item_bytes(dtype), np.uint8)
    if dtype == "bfloat16":
        return _top_halves(random.normal(3, 1, size))
    if dtype.startswith("float8") or "int" in dtype:
        return random.integers(1, 100, size * item_bytes(dtype), np.uint8)
    values = random.normal(-2, 1, size)
    if kind == "wide":
        values *= np.exp2(random.integers(-40, 10, size))
    if kind == "special":
        values[:: max(1, size // 50)] = random.choice(_SPECIAL[dtype if dtype == "float64" else "float32"])
    with np.errstate(over="ignore"):
        return values.astype(dtype).view(np.uint8)


def _top_halves(values: npt.NDArray[np.float64]) -> _Bytes:
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)


def _misaligned(data: _Bytes, by: int) -> _Bytes:
    memory = np.empty(len(data) + 64, np.uint8)
    start = -native.address(memory) % 64 + by
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


@needs_library
def test_the_library_is_there_where_a_compiler_is() -> None:
    assert native.in_force() in [f"compiled ({level})" for level in native.LEVELS], native.in_force()
    assert native.load(False) is None
    assert native.in_force(False) == "python (native = no)"


@needs_library
@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if not name.startswith(("complex", "float4"))])
def test_statistics_have_the_bits_of_python(kernels: native.Kernels, dtype: str) -> None:
    assert dtype in native.KINDS
    for number, size in enumerate(_SIZES):
        for kind in ("values", "bits", "zeros", "special", "wide"):
            data = _content(dtype, size, kind, number)
            for by in (0, 1, item_bytes(dtype)):
                keep = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
                found = measure(_misaligned(data, by), dtype, (size,), None, keep, kernels=kernels)
                assert found.histogram is not None and (size > MAX_UNITS or found.units is not None)
                assert _bits(found) == _of_python(dtype, (size,), kind, number, keep), (size, kind, by)


def _with_one(dtype: str, value: float, index: int) -> _Bytes:
    data = np.random.default_rng(index).normal(0, 1, 33400).astype(dtype)
    data[index] = value
    return data.view(np.uint8)


@cache
def _of_python_with_one(dtype: str, value: bytes, index: int) -> list[object]:
    data = _with_one(dtype, struct.unpack("<d", value)[0], index)
    return _bits(measure(data, dtype, (33400,), None, KEEP_STATS | KEEP_HISTOGRAM))


@needs_library
@pytest.mark.parametrize("index", range(0, 32768 + 600, 597))
def test_a_single_special_value_is_seen_wherever_it_is(kernels: native.Kernels, index: int) -> None:
    for dtype, values in _SPECIAL.items():
        for value in values:
            data = _with_one(dtype, value, index)
            found = measure(data, dtype, (33400,), None, KEEP_STATS | KEEP_HISTOGRAM, kernels=kernels)
            assert _bits(found) == _of_python_with_one(dtype, struct.pack("<d", value), index)


@needs_library
@pytest.mark.parametrize("shape", [(40_001, 1), (300, 129), (2, 2, 17_000), (1, 5), (40, 8, 7)], ids=str)
@pytest.mark.parametrize("dtype", [name for name in ITEM_BYTES if not name.startswith(("complex", "float4"))])
def test_sums_of_units_have_the_bits_of_python(kernels: native.Kernels, dtype: str, shape: tuple[int, ...]) -> None:
    keep = KEEP_STATS | KEEP_UNITS
    for dim, kind in itertools.product(range(len(shape)), ("bits", "values")):
        data = _content(dtype, int(np.prod(shape)), kind, 3)
        found = measure(_misaligned(data, 1), dtype, shape, None, keep, dim, kernels=kernels)
        assert found.units is not None or shape[dim] > MAX_UNITS
        assert _bits(found) == _of_python(dtype, shape, kind, 3, keep, dim), (dim, kind)


@needs_library
@given(
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
    factor=st.sampled_from([1, 1, 1, 700, 4099]),
    keep=st.sampled_from([KEEP_STATS, KEEP_FINGERPRINT, *(KEEP_STATS | more for more in (4, 8, 12, 32, 44))]),
    by=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)
def test_all_of_it_together_has_the_bits_of_python(
    kernels: native.Kernels, dtype: str, shape: tuple[int, ...], factor: int, keep: int, by: int, seed: int
) -> None:
    shape = (*shape[:-1], shape[-1] * factor) if shape and np.prod(shape) * factor < 1 << 18 else shape
    data = _content(dtype, int(np.prod(shape, dtype=int)), "bits", seed)
    offsets = tuple(range(3, 3 + len(shape)))
    numel = int(np.prod(shape, dtype=int))
    for chunk in (
        None,
        Chunk(shape, offsets, "", "", ""),
        Chunk((numel + 7, 5), None, "", "", "", flat_start=11),
        Chunk((99, 99), (1, 2), "", "", "", flat_start=4, flat_shape=(numel + 4, 3)),
    ):
        found = measure(_misaligned(data, by), dtype, shape, chunk, keep, kernels=kernels)
        assert _bits(found) == _bits(measure(data, dtype, shape, chunk, keep))


@needs_library
@pytest.mark.parametrize("shape", [(3, 5000), (5000, 3), (2, 3, 4097), (40000,), (2, 2, 2, 9001), (9, 1, 4096)])
@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 16])
def test_fingerprints_of_many_blocks_are_equal(kernels: native.Kernels, shape: tuple[int, ...], num_bytes: int) -> None:
    size = int(np.prod(shape))
    data = np.random.default_rng(size).integers(0, 256, size * num_bytes, np.uint8)
    for offsets in (None, (7,) * len(shape)):
        expected = fingerprints.fingerprint(data, num_bytes, shape, offsets)
        assert fingerprints.fingerprint(data, num_bytes, shape, offsets, kernels) == expected
    half = data[: size // 2 * num_bytes]
    assert flat_fingerprint(half, num_bytes, shape, 3, kernels) == flat_fingerprint(half, num_bytes, shape, 3)


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "float8_e4m3fn"])
def test_the_bits_do_not_depend_on_the_number_of_threads(kernels: native.Kernels, dtype: str) -> None:
    import torch  # its OpenMP runtime is the one whose threads measure

    assert native.parallel_region(), f"torch {torch.__version__} has loaded no OpenMP runtime"
    for size, kind in ((1 << 17, "values"), (300_001, "special"), (300_001, "wide"), (9 * 32768, "bits")):
        if kind == "special" and dtype not in _SPECIAL:
            continue
        data, shape = _content(dtype, size, kind, size), (size,)
        for keep in (KEEP_STATS, KEEP_STATS | KEEP_FINGERPRINT, KEEP_STATS | KEEP_HISTOGRAM):
            expected = _bits(measure(data, dtype, shape, None, keep))
            plan = host_measure(dtype, shape, keep, -1, kernels)
            assert plan is not None
            for num_threads in (1, 2, 3, 7):
                results = np.full(plan.nbytes, 255, np.uint8)
                plan.launch(native.address(data), native.address(results), num_threads)
                assert _bits(plan.read(results, None)) == expected, (size, kind, keep, num_threads)


@needs_library
@pytest.mark.parametrize("dtype", sorted(native.KINDS))
def test_the_sum_of_squares_has_the_same_bits_on_every_processor(dtype: str) -> None:
    import torch  # its OpenMP runtime is the one whose threads measure

    assert torch.get_num_threads()
    every = [native.Kernels(level=level) for level in range(native.LEVELS.index(native.Kernels().level) + 1)]
    for size in (1, 15, 16, 17, 128, 32767, 32768, 32769, 300_001):
        data = _content(dtype, size, "values", size)
        plan = host_measure(dtype, (size,), KEEP_STATS, -1, every[0])
        assert plan is not None
        sums = {
            kernels.sum_of_squares(native.address(data), plan.loops, num_threads=num_threads)
            for kernels in every
            for num_threads in (1, 2, 3, 7)
        }
        sums |= {kernels.squares_held(plan.loops.measuring, native.address(data)) for kernels in every}
        assert len(sums) == 1, (size, sums)
        expected = measure(data, dtype, (size,), None, KEEP_STATS).sum_sq
        assert sums.pop() == pytest.approx(expected, rel=1e-12)


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_sum_of_squares_is_not_finite_where_a_value_is_not(kernels: native.Kernels, dtype: str, bad: float) -> None:
    import torch

    values = torch.ones(40_000, dtype=getattr(torch, dtype))
    plan = host_measure(dtype, (40_000,), KEEP_STATS, -1, kernels)
    assert plan is not None
    for index in (0, 15, 16, 32_767, 32_768, 39_999):
        values[index] = bad
        assert not math.isfinite(kernels.sum_of_squares(values.data_ptr(), plan.loops))
        values[index] = 1


@needs_library
def test_a_forked_child_measures_without_the_threads_of_its_parent() -> None:
    code = """
import os, signal
import numpy as np, torch
from recorder import native
from recorder.capture.staging.measure import host_measure
from recorder.records import KEEP_STATS

values = np.ones(1 << 19, np.float32)
plan = host_measure("float32", values.shape, KEEP_STATS, -1, native.Kernels())
results = np.empty(plan.nbytes, np.uint8)
plan.launch(native.address(values), native.address(results), 2)
pid = os.fork()
if not pid:
    signal.alarm(20)
    results[:] = 0
    plan.launch(native.address(values), native.address(results), 2)
    os._exit(plan.read(results, None).mean != 1)
print("ended with", os.waitpid(pid, 0)[1])
"""
    done = _python(code, ROOT)
    assert done.stdout == "ended with 0\n", done.stdout + done.stderr


@needs_library
def test_the_loops_measure_a_run_of_a_flattened_tensor(
    kernels: native.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, keep = _content("float32", 5000, "values", 0), KEEP_STATS | KEEP_FINGERPRINT | KEEP_UNITS
    chunk = Chunk((100, 100), None, "[]", "{}", "fsdp1", 17)
    expected = measure(data, "float32", (5000,), chunk, keep)
    monkeypatch.setattr(measure_module, "_statistics_of", None)  # Python would take several times as long
    assert _bits(measure(data, "float32", (5000,), chunk, keep, kernels=kernels)) == _bits(expected)
    assert expected.note == "no_units:a run of a flattened tensor" and expected.fingerprint is not None


@needs_library
def test_a_tensor_that_does_not_fit_its_shape_is_refused(kernels: native.Kernels) -> None:
    for keep in (KEEP_FINGERPRINT, KEEP_FINGERPRINT | KEEP_STATS):
        with pytest.raises(ValueError, match="no tensor of shape"):
            measure(np.zeros(40, np.uint8), "float32", (11,), None, keep, kernels=kernels)


@needs_library
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("codec", ["auto", "zstd"])
def test_payloads_are_those_of_python_or_as_small(kernels: native.Kernels, num_bytes: int, codec: str) -> None:
    for size in (0, 1, 5000, 4096 * 33 + 1):
        values = np.random.default_rng(size).normal(0, 1, size * max(1, num_bytes // 4)).astype("<f4")
        data = values.view(np.uint8)[: size * num_bytes]
        data = data[: len(data) // num_bytes * num_bytes]
        payloads = []
        for encoder in (Encoder(codec), Encoder(codec, kernels=kernels)):
            out = np.zeros(max_encoded_bytes(len(data)), np.uint8)
            encoding, num_written = encoder.encode(data, num_bytes, out)
            payloads.append((encoding, out[:num_written].tobytes()))
        if codec == "zstd":
            assert payloads[0] == payloads[1]
        assert payloads[0][0] == payloads[1][0]
        assert len(payloads[1][1]) <= 1.01 * len(payloads[0][1])
        assert decode(*payloads[1], len(data), num_bytes).tobytes() == data.tobytes()


@needs_library
def test_planes_never_leave_their_room(kernels: native.Kernels) -> None:
    with pytest.raises(ValueError, match="12 are needed"):
        kernels.split(np.zeros(16, np.uint8), 4, range(1, 4), np.zeros(11, np.uint8))


def test_a_library_that_is_none_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "_kernels.so").write_bytes(b"not a library")
    with pytest.raises(ValueError, match="no 64-bit ELF library"):
        native.Kernels(tmp_path / "_kernels.so")
    code = "import pathlib, recorder.native as n; n.LIBRARY = pathlib.Path({!r}); print(n.load(), n.in_force())"
    for path, expected in (("_kernels.so", "None python (ValueError: "), ("none.so", "None python (not built)")):
        done = _python(code.format(str(tmp_path / path)), ROOT)
        assert done.stdout.startswith(expected), done.stdout + done.stderr


@needs_library
@pytest.mark.parametrize("missing_bytes", [1, 100, 20_000, 100_000])
def test_a_library_that_is_cut_short_is_done_without(tmp_path: Path, missing_bytes: int) -> None:
    (tmp_path / "_kernels.so").write_bytes(native.LIBRARY.read_bytes()[:-missing_bytes])
    with pytest.raises(ValueError, match="is cut short"):
        native.Kernels(tmp_path / "_kernels.so")


@needs_library
def test_a_library_of_another_version_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.raises(ValueError, match="has ABI"):
        native.Kernels()


def _python(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RECORDER")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=120
    )


def _build(folder: Path, path: str) -> Path:
    """The wheel of a copy of the sources, made with these folders of commands."""
    source = folder / "source"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "recorder", source / "recorder", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / ".gitignore", source)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        env={**{name: value for name, value in os.environ.items() if name != "CC"}, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_without_a_compiler_the_wheel_is_pure_and_works(tmp_path: Path) -> None:
    wheel = _build(tmp_path, path=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        "import numpy as np, recorder.native as n; from recorder.capture.staging.measure import measure; "
        "print(n.in_force(), measure(np.ones(4, 'f4').view('u1'), 'float32', (4,), None, 2, kernels=n.load()).sum)"
    )
    done = _python(code, tmp_path, PYTHONPATH=str(target))
    assert done.stdout == "python (not built) 4.0\n", done.stdout + done.stderr


@needs_library
def test_the_writer_says_which_loops_it_uses(tmp_path: Path) -> None:
    code = partial(
        "import torch, recorder\n"
        "model = torch.nn.Linear(3, 3)\n"
        "with recorder.attach(model, enabled=True, dir={!r}, rules='keep=stats'):\n"
        "    model(torch.ones(2, 3)).sum().backward()\n".format
    )
    for value, expected in (("1", '"native":"compiled ('), ("0", '"native":"python (native = no)"')):
        folder, script = tmp_path / value, tmp_path / f"{value}.py"
        script.write_text(code(str(folder)))
        jobs.succeeded(jobs.program(tmp_path / f"{value}-job", script, RECORDER_NATIVE=value))
        (manifest,) = folder.glob("*/rank=*/*/_writer.json")
        assert expected in manifest.read_text()


@pytest.mark.parametrize("keep", [KEEP_STATS, KEEP_STATS | KEEP_FINGERPRINT])
def test_tensors_that_are_measured_together_have_the_bits_of_each_alone(kernels: native.Kernels, keep: int) -> None:
    chunk = Chunk((200,), (3,), '["Shard(0)"]', "[2]", "dtensor")
    records = [
        fake_staged(
            _content(dtype, size, kind, size).view(f"u{item_bytes(dtype)}"), dtype=dtype, keep=keep, chunk=of_global
        )
        for dtype in native.KINDS
        for size in (0, 1, 7, 100)
        for kind in ("bits", "zeros", "normal")
        for of_global in (None, chunk)
    ]
    for loops in (kernels, None):
        alone = [measure(s.block.data, s.dtype, s.shape, s.chunk, keep, kernels=loops) for s in records]
        assert list(map(_bits, measure_small(records, kernels=loops))) == list(map(_bits, alone))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("num", [1, 7, 1024, 1025, 5000])
def test_how_far_a_tensor_has_moved_is_that_of_its_sampled_elements(dtype: str, num: int) -> None:
    kernels = native.load()
    assert kernels is not None
    rng = np.random.default_rng(num)
    first = rng.standard_normal(num).astype(dtype)
    second = (first + rng.standard_normal(num) / 8).astype(dtype)
    table = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32) if dtype == "float16" else None
    many = native.ManyTensors([native.LoopsPlan(num, dtype, table=table)])
    at = (
        np.arange(num)
        if num <= native.SAMPLED
        else np.add.outer(np.arange(256) * ((num - 4) // 255), np.arange(4)).ravel()
    )
    before = np.zeros(min(num, native.SAMPLED))
    assert kernels.moved([native.address(first)], many, before).tolist() == [
        pytest.approx((first[at].astype(float) ** 2).sum())
    ]
    assert before.tolist() == first[at].astype(float).tolist()
    moved = second[at].astype(float) - first[at].astype(float)
    assert kernels.moved([native.address(second)], many, before)[0] == pytest.approx((moved**2).sum())
    second[0] = np.nan
    assert np.isnan(kernels.moved([native.address(second)], many, before)[0])
