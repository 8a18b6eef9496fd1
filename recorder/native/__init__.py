"""Finds, checks and calls the compiled loops of `kernels.c`, if the library can be used.

Each function here also exists in pure Python where it is called, and gives the same bits. The Huffman code is the
exception: without the library, zstd makes other bytes with the same content. Nothing here may raise if the library is
missing, of another version, or made for another processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..numerics.dtypes import item_bytes
from ..records import Measured

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI = 14
"""The ABI number in `kernels.c`. A library with another number is not used."""
LEVELS = ("generic", "avx2", "avx512")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""The fields of an ELF header about the table of sections: its offset, the size of an entry, the number of entries."""
_KINDS = ("float32", "float64", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TABLE_8, _TABLE_16 = len(_KINDS), len(_KINDS) + 1
_NO_STATISTICS = -1
HELD_BYTES = 1 << 15
"""A tensor up to this size is measured with the interpreter's lock held: 5 to 15 us for float32, and 200 us for 8-bit
floats without vector instructions. Python takes the lock away only after 5 ms."""
KINDS = {name: number for number, name in enumerate(_KINDS)} | {"bool": _KINDS.index("uint8"), "float16": _TABLE_16}
KINDS |= {f"float8_{kind}": _TABLE_8 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
"""The dtypes whose statistics the library computes."""
TABLE_KINDS = frozenset(name for name, kind in KINDS.items() if kind in (_TABLE_8, _TABLE_16))
"""The dtypes whose values are looked up in a table."""
TOGETHER_KINDS = KINDS.keys() - TABLE_KINDS
"""The dtypes of which `Kernels.measure_small` measures many tensors with one call."""

MOVED_KINDS = frozenset({"float32", "float64", "bfloat16", "float16"})
"""The dtypes for which `Kernels.moved` works."""
SAMPLED = 1024
"""The most elements of a tensor that `Kernels.moved` compares: 256 evenly spaced groups of 4 adjacent elements."""
_Bytes = npt.NDArray[np.uint8]
_CHUNK_ITEMS = 1 << 15
"""The number of elements in a chunk. Equal to `CHUNK_ITEMS` of `kernels.c`."""
ITEMS_OF_THREAD = 1 << 16
"""From this many elements on, one more thread saves time: two chunks of `kernels.c`."""
_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")
_PID = os.getpid()
"""The id of the process that loaded this module. A forked child has no threads of the OpenMP runtime, and a parallel
region would wait for them for ever."""
_memset: Callable[[int, int, int], None] = ctypes.PyDLL(None).memset
"""The C library's memset. The interpreter's lock is kept."""
_memset.argtypes, _memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), None  # type: ignore[attr-defined]


_STATISTICS = struct.Struct("10d3qQq")
"""The layout of `struct statistics` of `kernels.c`."""
_FINGERPRINT, _COUNTS = 13, slice(10, 13)
"""The positions of the fingerprint and of the counts in `_STATISTICS`. The number of finite values comes last."""
_MEASURING = struct.Struct("PqiPPPP")
"""The layout of `struct measuring` of `kernels.c`: data, items, kind, table, weights, bins, units."""
_MEASURING_ITEMS = np.dtype(
    {
        "names": ["at", "items", "kind", "table", "weights"],
        "formats": ["u8", "i8", "i4", "u8", "u8"],
        "offsets": [0, 8, 16, 24, 32],
        "itemsize": _MEASURING.size,
    }
)
"""The members of `struct measuring` that vary between small tensors."""


class Weights(ctypes.Structure):
    """The weights for the fingerprint of a tensor, as `struct weights` of `kernels.c`. Keeps its arrays alive."""

    word_bytes: int

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("block", "runs")),
        *((name, ctypes.c_int64) for name in ("block_words", "run_words")),
        ("block_step", ctypes.c_uint64),
        ("word_bytes", ctypes.c_int64),
    )

    def __init__(
        self,
        block: npt.NDArray[np.uint64],
        runs: npt.NDArray[np.uint64],
        *,
        run_words: int,
        block_step: int,
        word_bytes: int,
    ) -> None:
        super().__init__(block.ctypes.data, runs.ctypes.data, len(block), run_words, block_step, word_bytes)
        self.address = ctypes.addressof(self)
        self._arrays = block, runs
        self.num_words = len(runs) * run_words


class UnitAddresses(ctypes.Structure):
    """The addresses of the sums over units (neurons or channels), as `struct units` of `kernels.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "squares", "peaks", "zeros")),
        *((name, ctypes.c_int64) for name in ("num", "inner")),
    )


class LoopsPlan:
    """What the compiled loops compute for tensors of one dtype and one nonempty shape. Immutable."""

    __slots__ = (
        *("_kept", "item_bytes", "items", "kind", "measuring", "num_bins", "num_bytes", "num_units"),
        *("table_address", "unit_inner", "weights_address"),
    )

    def __init__(
        self,
        items: int,
        dtype: str,
        *,
        table: npt.NDArray[np.float32] | None = None,
        weights: Weights | None = None,
        num_bins: int = 0,
        num_units: int = 0,
        unit_inner: int = 0,
        has_statistics: bool = True,
    ) -> None:
        """Choose what to compute for tensors of `items` elements. `dtype` is one of `KINDS`.

        `table` has the value of each bit pattern, for float16 and 8-bit floats. `weights` are for the fingerprint; with
        None there is no fingerprint. For a histogram, `num_bins` is `numerics.histogram.NUM_BINS` of the dtype; else it
        is 0. `unit_inner` is the number of adjacent elements of a unit; without units `num_units` is 0. Without
        `has_statistics` only the fingerprint is computed, and `items` becomes the number of its words.
        """
        self.items, self.kind, self.item_bytes = items, KINDS[dtype], item_bytes(dtype)
        if not has_statistics and weights is not None:
            self.items, self.kind, self.item_bytes = weights.num_words, _NO_STATISTICS, weights.word_bytes
        self.num_bins, self.num_units, self.unit_inner = num_bins, num_units, unit_inner
        self.num_bytes = _STATISTICS.size + 8 * num_bins + 32 * num_units
        self.table_address = 0 if table is None else table.ctypes.data
        self.weights_address = 0 if weights is None else weights.address
        self._kept = table, weights
        self.measuring = _MEASURING.pack(0, self.items, self.kind, self.table_address, 0, 0, 0)
        """What `Kernels.squares_held` takes."""

    def read(self, data: _Bytes) -> tuple[Measured, npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
        """Decode a result's bytes: statistics (with the fingerprint at the origin), bins, and sums over units."""
        end = _STATISTICS.size + 8 * self.num_bins
        numbers = _STATISTICS.unpack(data[: _STATISTICS.size].data)
        is_alone = self.kind == _NO_STATISTICS
        return (
            Measured(fingerprint=numbers[_FINGERPRINT]) if is_alone else _measured(numbers, self._kept[1]),
            data[_STATISTICS.size : end].view(np.uint64),
            data[end:].view(np.float64).reshape(4, -1),
        )


class ManyTensors:
    """The dtypes and sizes of many tensors that are summed together repeatedly. Their addresses may change."""

    def __init__(self, plans: Sequence[LoopsPlan]) -> None:
        """Take one plan per tensor. The plans are kept alive, because the C code reads their tables."""
        self.plans = plans
        self.measuring = np.zeros(len(plans), _MEASURING_ITEMS)
        self.measuring["items"], self.measuring["kind"] = [one.items for one in plans], [one.kind for one in plans]
        self.measuring["table"] = [one.table_address for one in plans]
        self.most_items = max((one.items for one in plans), default=0)
        self.num_bytes = sum(one.items * one.item_bytes for one in plans)


class _OfThread(threading.local):
    """The scratch memory of one Python thread."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate the memory. Python calls this in each thread that reads an attribute."""
        self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        self._memory = np.empty(-(-num_bytes // 8), np.uint64)
        self.scratch = address(self._memory)

    def at_least(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes` of memory. The thread keeps the memory."""
        if self._memory.nbytes < num_bytes:
            self._take(num_bytes)
        return self.scratch


class Kernels:
    """The loaded library of compiled loops. Called on any thread; each thread has its own scratch memory."""

    def __init__(self, path: Path = LIBRARY, level: int = -1) -> None:
        """Load the library and select the processor's widest vectors, or those of `level`.

        Raises:
            OSError: the library cannot be loaded.
            AttributeError: the library lacks a function.
            ValueError: the library is of another version, or cut short.
        """
        _check_whole(path)  # the loader maps even missing parts of a file, and reading them ends the process
        library, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        """Calls of `held` keep the interpreter's lock, because to hand it over takes longer than some of the work."""
        if (abi := library.recorder_native_abi()) != ABI:
            raise ValueError(f"{path} has ABI {abi}: expected {ABI}")
        self.level = LEVELS[library.recorder_native_select(level)]
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double

        def both(name: str, *arguments: type, result: type | None = None) -> tuple[Any, Any]:
            """Declare a function, and return it as it lets go of the interpreter's lock, and as it keeps the lock."""
            functions = library[f"recorder_native_{name}"], held[f"recorder_native_{name}"]
            for function in functions:
                function.argtypes, function.restype = arguments, result
            return functions

        self._measure, self._measure_held = both("measure", pointer, number, pointer, pointer)
        self._measure_parallel, self._measure_parallel_held = both(
            "measure_parallel", pointer, number, number, pointer, pointer, pointer
        )
        self._squares, self._squares_held = both("squares", pointer, number, pointer, pointer, result=real)
        self._squares_of_many, self._squares_of_many_held = both(
            "squares_of_many", pointer, number, number, pointer, pointer, pointer
        )
        self._planes, _ = both("planes", pointer, number, number, number, number, pointer, number)
        self._huffman, _ = both("huffman", pointer, number, number, number, pointer, number, pointer, result=number)
        self._sample, _ = both("sample", pointer, number, number, number, number, pointer, pointer, result=number)
        self._encode, _ = both("encode", pointer, number, number, number, pointer, number, pointer, result=number)
        _, self._moved = both("moved", pointer, number, pointer, pointer)
        _, self._scratch_bytes = both("scratch", number, number, result=number)
        self.squares_held: Callable[[bytes, int], float]
        _, self.squares_held = both("squares_at", pointer, pointer, result=real)
        """Takes the `measuring` of a plan and an address, and returns what `sum_of_squares` does, in half of the time.
        It runs on one thread, with the interpreter's lock held."""
        self._of_thread = _OfThread(int(self._scratch_bytes(0, 1)))

    def fingerprint(self, data: _Bytes, num_words: int, weights: Weights) -> int:
        """Return the fingerprint at the origin of contiguous bytes, read as words. The bytes need no alignment."""
        measuring = _MEASURING.pack(address(data), num_words, _NO_STATISTICS, 0, weights.address, 0, 0)
        out = bytearray(_STATISTICS.size)
        measure = self._measure if len(data) > HELD_BYTES else self._measure_held
        measure(measuring, 1, self._of_thread.scratch, ctypes.addressof(ctypes.c_char.from_buffer(out)))
        return int(_STATISTICS.unpack(out)[13])

    def measure_at(
        self, at: int, plan: LoopsPlan, out: int, *, num_threads: int = 1, held_bytes: int = HELD_BYTES
    ) -> None:
        """Measure a tensor as `plan` says. Its contiguous elements lie at address `at`; results go to address `out`.

        At `out`, `plan.num_bytes` bytes are overwritten: `struct statistics`, the bins, and for units (neurons or
        channels) the sums, sums of squares, peaks and counts of zeros. `num_threads` threads of the loaded OpenMP
        runtime measure; their number does not change the bits. A tensor of at most `held_bytes` is measured with the
        interpreter's lock held.
        """
        bins = out + _STATISTICS.size
        sums = bins + 8 * plan.num_bins
        if plan.num_bytes > _STATISTICS.size:
            _memset(bins, 0, plan.num_bytes - _STATISTICS.size)
        units = None
        if plan.num_units:
            row = 8 * plan.num_units
            units = UnitAddresses(sums, sums + row, sums + 2 * row, sums + 3 * row, plan.num_units, plan.unit_inner)
        measuring = _MEASURING.pack(
            at,
            plan.items,
            plan.kind,
            plan.table_address,
            plan.weights_address,
            bins if plan.num_bins else 0,
            0 if units is None else ctypes.addressof(units),
        )
        is_held = plan.items * plan.item_bytes <= held_bytes
        is_shared = units is None and plan.items >= 2 * ITEMS_OF_THREAD
        num_threads = min(num_threads, plan.items // ITEMS_OF_THREAD) if is_shared else 1
        run = parallel_region() if num_threads > 1 and os.getpid() == _PID else 0
        if run:
            scratch = self._of_thread.at_least(self._scratch_bytes(plan.items, num_threads))
            parallel = self._measure_parallel_held if is_held else self._measure_parallel
            parallel(measuring, plan.num_bins, num_threads, run, scratch, out)
        else:
            (self._measure_held if is_held else self._measure)(measuring, 1, self._of_thread.scratch, out)

    def sum_of_squares(self, at: int, plan: LoopsPlan, *, num_threads: int = 1, held_bytes: int = HELD_BYTES) -> float:
        """Return the sum of the squares of a tensor's values. It is not finite if a value is not.

        The arguments are those of `measure_at`. The bits depend neither on the processor's vectors nor on the number of
        threads. The sum that `measure_at` computes may differ in the last places.
        """
        measuring = _MEASURING.pack(at, plan.items, plan.kind, plan.table_address, 0, 0, 0)
        squares = self._squares_held if plan.items * plan.item_bytes <= held_bytes else self._squares
        num_threads = min(num_threads, plan.items // ITEMS_OF_THREAD)
        run = parallel_region() if num_threads > 1 and os.getpid() == _PID else 0
        scratch = self._of_thread.at_least(plan.items // _CHUNK_ITEMS * 8 + 8) if run else 0
        return float(squares(measuring, num_threads, run, scratch))

    def sums_of_squares(
        self, at: Sequence[int], tensors: ManyTensors, *, num_threads: int = 1, held_bytes: int = HELD_BYTES
    ) -> npt.NDArray[np.float64]:
        """Return the sum of the squares of each of many tensors, as `sum_of_squares` does, with one call.

        `at` has the address of each tensor in `tensors`. The interpreter's lock is held if the tensors have at most
        `held_bytes` together.
        """
        tensors.measuring["at"] = at
        run = parallel_region() if num_threads > 1 and os.getpid() == _PID else 0
        scratch = self._of_thread.at_least(tensors.most_items // _CHUNK_ITEMS * 8 + 8)
        out = np.empty(len(at))
        squares = self._squares_of_many_held if tensors.num_bytes <= held_bytes else self._squares_of_many
        squares(address(tensors.measuring), len(at), num_threads, run, scratch, address(out))
        return out

    def moved(
        self, at: Sequence[int], tensors: ManyTensors, before: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return how much each tensor's sampled elements have changed since the call before, as sums of squares.

        `at` has the address of each tensor. `before` has the elements sampled by the call before, at most `SAMPLED` of
        a tensor, one tensor after the other; they are overwritten with new ones. The tensors are of `MOVED_KINDS`. The
        interpreter's lock is held. A sum is not finite if a change is not.
        """
        tensors.measuring["at"] = at
        out = np.empty(len(at))
        self._moved(address(tensors.measuring), len(at), address(before), address(out))
        return out

    def measure_small(
        self, at: Sequence[int], items: Sequence[int], dtypes: Sequence[str], weights: Sequence[Weights | None]
    ) -> Callable[[], list[Measured]]:
        """Measure many small tensors in one call. Tensors with weights also get the fingerprint at the origin.

        Return a function that returns the statistics of each tensor, also after the tensors are gone. The interpreter's
        lock is held during the call, so all tensors together should have about `HELD_BYTES`. Only the arguments take a
        Python statement per tensor: `at` has the addresses, `items` the numbers of elements, and `dtypes` are of
        `TOGETHER_KINDS`.
        """
        measuring = np.zeros(len(at), _MEASURING_ITEMS)
        measuring["at"], measuring["items"], measuring["kind"] = at, items, [KINDS[dtype] for dtype in dtypes]
        out = np.empty((len(at), _STATISTICS.size // 8), np.float64)
        has_weights = any(weights)
        if has_weights:
            measuring["weights"] = [0 if one is None else one.address for one in weights]
        self._measure_held(address(measuring), len(at), self._of_thread.scratch, address(out))

        def make() -> list[Measured]:
            fingerprints: Iterable[int | None] = repeat(None)
            if has_weights:
                known = out.view(np.uint64)[:, _FINGERPRINT].tolist()
                fingerprints = [None if one is None else value for one, value in zip(weights, known, strict=True)]
            numbers = out[:, : _COUNTS.start].T.tolist()
            counts = out.view(np.int64)[:, _COUNTS].T.tolist()
            rows = zip(*numbers, *counts, fingerprints, repeat(None), repeat(None), repeat(None))
            made = list(map(tuple.__new__, repeat(Measured), rows))
            for number in np.flatnonzero(out.view(np.int64)[:, -1] == 0).tolist():
                made[number] = Measured(*(None,) * 10, *made[number][10:])
            return made

        return make

    def split(self, data: _Bytes, item_bytes: int, planes: range, out: _Bytes) -> None:
        """Copy byte planes (0 is the most significant) of little-endian elements to the front of `out`, end to end."""
        items = len(data) // item_bytes
        if len(out) < items * len(planes):
            raise ValueError(f"out holds {len(out)} bytes: {items * len(planes)} are needed")
        self._planes(address(data), items, item_bytes, planes[0], planes[-1], address(out), items)

    def huffman(self, data: _Bytes, item_bytes: int, plane: int, out: _Bytes) -> int:
        """Write a byte plane to `out` as Zstandard frames, by entropy coding alone. Return the bytes taken."""
        items = len(data) // item_bytes
        num_written = self._huffman(
            address(data), items, item_bytes, plane, address(out), len(out), self._of_thread.scratch
        )
        if num_written < 0:
            raise ValueError(f"out holds {len(out)} bytes: frames of {items} may need more")
        return int(num_written)

    def encode(self, data: _Bytes, item_bytes: int, num_framed: int, out: _Bytes) -> int:
        """Write the first planes to `out` as `huffman` does, then the other planes unchanged. Return the bytes taken.

        If all planes are framed, this is a payload of encoding ``planes`` (``raw`` for elements of one byte). Otherwise
        it is one of ``planes_plain``, which begins with the length of the frames.
        """
        items = len(data) // item_bytes
        num_written = self._encode(
            address(data), items, item_bytes, num_framed, address(out), len(out), self._of_thread.scratch
        )
        if num_written < 0:
            raise ValueError(f"out holds {len(out)} bytes: a payload of {len(data)} may need more")
        return int(num_written)

    def sample(self, data: _Bytes, item_bytes: int, slices: int, slice_items: int, out: _Bytes) -> tuple[int, int]:
        """Copy the byte planes of evenly spaced slices of the data to the front of `out`, end to end.

        Return the number of elements in the slices (of short data, all elements), and about how many bytes `huffman`
        makes of the first plane.
        """
        items = len(data) // item_bytes
        num_items = min(items, slices * slice_items)
        if len(out) < num_items * item_bytes:
            raise ValueError(f"out holds {len(out)} bytes: {num_items * item_bytes} are needed")
        num_bytes = self._sample(
            address(data), items, item_bytes, slices, slice_items, address(out), self._of_thread.scratch
        )
        return num_items, int(num_bytes)


def _measured(statistics: tuple[Any, ...], weights: Weights | None) -> Measured:
    fingerprint, count = statistics[13:]
    known = statistics[:13] if count else (*(None,) * 10, *statistics[10:13])
    # This makes the tuple that `Measured(...)` makes, in a third of the time.
    return tuple.__new__(Measured, (*known, None if weights is None else fingerprint, None, None, None))


@lru_cache(maxsize=1)
def parallel_region() -> int:
    """Return the address of `GOMP_parallel` in the OpenMP runtime that torch has loaded. Return 0 without one.

    Training's threads wait in this runtime between two operations, so a measurement needs no threads of its own. The
    runtimes of LLVM and Intel have the function, too. If several runtimes are loaded, only one in a folder of torch
    counts, because another one would start more threads.
    """
    with contextlib.suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if _OPENMP.search(line)}
        paths = {path for path in paths if "/torch" in path} or paths
        if len(paths) == 1:
            library = ctypes.CDLL(paths.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array."""
    try:
        # For writable memory this takes a quarter of the time that `__array_interface__` takes.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])


def _check_whole(path: Path) -> None:
    """Raise ValueError if a library file is cut short. Its header says where its last part, the sections, ends."""
    with path.open("rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(_ELF_64_LITTLE):
        raise ValueError(f"{path} is no 64-bit ELF library")
    sections, section_bytes, num_sections = _ELF_HEADER.unpack(header)
    if sections + section_bytes * num_sections > size:
        raise ValueError(f"{path} is cut short, to {size} bytes: install again")


class LoadedKernels(NamedTuple):
    """The loaded library of compiled loops, or the reason why there is none."""

    kernels: Kernels | None
    why_not: str


@lru_cache(maxsize=1)
def find() -> LoadedKernels:
    """Load the library of compiled loops, once per process. Never raises."""
    if not LIBRARY.is_file():
        return LoadedKernels(None, "not built")
    try:
        return LoadedKernels(Kernels(LIBRARY), "")
    except Exception as error:
        return LoadedKernels(None, f"{type(error).__name__}: {error}")


def load(wanted: bool = True) -> Kernels | None:
    """Return the library of compiled loops. Return None if it is not wanted or cannot be used."""
    return find().kernels if wanted else None


def in_force(wanted: bool = True) -> str:
    """Say which code computes, for people and the manifest: ``compiled (avx2)``, or ``python`` and the reason."""
    if not wanted:
        return "python (native = no)"
    library = find()
    return f"python ({library.why_not})" if library.kernels is None else f"compiled ({library.kernels.level})"
