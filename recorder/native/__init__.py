"""Owns the way to the compiled loops of `kernels.c`: found, checked and called here, or done without.

Everything that it offers has a pure Python twin that gives the same bits; whoever calls has that as well. Where the
Huffman code is missing, zstd gives other bytes of the same content. Nothing here may raise where the library is
missing, of another version, or made for another processor.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI = 5
"""That of `kernels.c`; a library that says another number is left alone."""
LEVELS = ("generic", "avx2", "avx512")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Where the table of sections lies, how long an entry is, and how many there are."""
_KINDS = ("float32", "float64", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TABLE_8, _TABLE_16 = len(_KINDS), len(_KINDS) + 1
_NO_STATISTICS = -1
_HELD_BYTES = 1 << 15
"""Measured in 5 to 15 us of float32, in 200 of 8-bit floats without vector instructions: far below the 5 ms after which
Python takes the lock away."""
_HELD_COPY_BYTES = 1 << 22
"""Copied in 0.2 to 0.5 ms."""
KINDS = {name: number for number, name in enumerate(_KINDS)} | {"bool": _KINDS.index("uint8"), "float16": _TABLE_16}
KINDS |= {f"float8_{kind}": _TABLE_8 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
"""Element types whose statistics it knows, by torch's names."""
TABLE_KINDS = frozenset(name for name, kind in KINDS.items() if kind in (_TABLE_8, _TABLE_16))
"""Those that it looks up."""

_Bytes = npt.NDArray[np.uint8]


class Moments(ctypes.Structure):
    """Statistics in the making, as `struct moments`."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("mean", "deviations", "sum", "sum_sq", "min", "max")),
        *((name, ctypes.c_int64) for name in ("count", "nan_count", "inf_count", "zero_count")),
        ("fingerprint", ctypes.c_uint64),
    )
    mean: float
    deviations: float
    sum: float
    sum_sq: float
    min: float
    max: float
    count: int
    nan_count: int
    inf_count: int
    zero_count: int
    fingerprint: int


_NO_MOMENTS = bytes(Moments(min=float("inf"), max=float("-inf")))


class Weights(ctypes.Structure):
    """How the words of a tensor are weighed, as `struct weights`; holds its arrays."""

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
        self._arrays = block, runs
        self.num_words = len(runs) * run_words


class _Measuring(ctypes.Structure):
    """What is measured, as `struct measuring`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("items", ctypes.c_int64),
        ("kind", ctypes.c_int),
        ("table", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


class Team(ctypes.Structure):
    """Threads that share work, as `struct team`: those of the caller's own OpenMP team, or the caller alone.

    For one call at a time.
    """

    num_threads: int
    scratch: int
    scratch_bytes: int

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
    )

    def __init__(self, num_threads: int = 1, run: int | None = None) -> None:
        """Of so many threads, which the `GOMP_parallel` at the address `run` has; without one the caller is alone."""
        super().__init__(run, num_threads if run is not None else 1)

    def reserve(self, num_bytes: int) -> None:
        """Give each thread so much scratch memory, once."""
        if not self.scratch_bytes:
            self._memory = np.empty((self.num_threads, -(-num_bytes // 64) * 8), np.uint64)
            self.scratch, self.scratch_bytes = address(self._memory), self._memory.strides[0]


def find_team(num_threads: int, folder: Path) -> Team:
    """Training's threads, which wait while a hook runs: those of the one OpenMP library in `folder` that is loaded.

    Without it, or with one thread, the caller alone.
    """
    if num_threads > 1:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
            (path,) = (path for path in folder.glob("*omp*.so*") if str(path) in loaded)
            return Team(num_threads, ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value)
    return Team()


class Kernels:
    """The loaded library. Any thread, with scratch memory of its own, but for what `sharing` gives."""

    def __init__(self, path: Path = LIBRARY, level: int = -1) -> None:
        """Load it and select the widest vectors, or those of `level`.

        Raises:
            OSError: it cannot be loaded.
            AttributeError: it lacks a function.
            ValueError: it is of another version, or cut short.
        """
        _check_whole(path)  # the loader maps what is missing, and a look at it ends the process
        library, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        """Held: with the interpreter's lock, which to hand over takes longer than some of the work."""
        if (abi := library.recorder_native_abi()) != ABI:
            raise ValueError(f"{path} has ABI {abi}: expected {ABI}")
        self.level = LEVELS[library.recorder_native_select(level)]
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._measure = library.recorder_native_measure
        self._measure_held = held.recorder_native_measure
        for measure in (self._measure, self._measure_held):
            measure.argtypes = (pointer, pointer, pointer)
            measure.restype = None
        self._planes = library.recorder_native_planes
        self._planes.argtypes = (pointer, number, number, number, number, pointer, number)
        self._planes.restype = None
        self._huffman = library.recorder_native_huffman
        self._huffman.argtypes = (pointer, number, number, number, pointer, number, pointer)
        self._huffman.restype = number
        self._sample = library.recorder_native_sample
        self._sample.argtypes = (pointer, number, number, number, number, pointer, pointer)
        self._sample.restype = number
        self._copy = library.recorder_native_copy
        self._copy.argtypes = (pointer, number, pointer, pointer)
        self._copy.restype = None
        self._encode = library.recorder_native_encode
        self._encode.argtypes = (pointer, number, number, number, pointer, pointer, number)
        self._encode.restype = number
        self._stream = library.recorder_native_stream
        self._stream_held = held.recorder_native_stream
        for stream in (self._stream, self._stream_held):
            stream.argtypes = (pointer, number, pointer, pointer)
            stream.restype = None
        self._crc32c = library.recorder_native_crc32c
        self._crc32c_held = held.recorder_native_crc32c
        for crc32c in (self._crc32c, self._crc32c_held):
            crc32c.argtypes = (pointer, number, pointer, pointer)
            crc32c.restype = number
        self.join_crc32c: Callable[[int, int, int], int] = library.recorder_native_join_crc32c
        """CRC32C of two runs of bytes from those of each, and the number of bytes of the second."""
        library.recorder_native_join_crc32c.argtypes = (number, number, number)
        library.recorder_native_join_crc32c.restype = number
        library.recorder_native_scratch.restype = number
        self._scratch_bytes = int(library.recorder_native_scratch())
        self._shared: Team | None = None
        self._local = threading.local()

    def sharing(self, team: Team) -> Kernels:
        """The same with all that many threads can do shared by a team, for one call at a time."""
        kernels = copy.copy(self)
        kernels._shared = team
        team.reserve(self._scratch_bytes)
        return kernels

    @property
    def _alone(self) -> Team:
        """This thread and its scratch memory."""
        try:
            return self._local.team  # type: ignore[no-any-return]
        except AttributeError:
            self._local.team = Team()
            self._local.team.reserve(self._scratch_bytes)
            return self._local.team  # type: ignore[no-any-return]

    @property
    def _team(self) -> int:
        return ctypes.addressof(self._shared or self._alone)

    def measure(
        self,
        data: _Bytes,
        items: int,
        dtype: str | None,
        table: npt.NDArray[np.float32] | None,
        weights: Weights | None,
    ) -> Moments:
        """Statistics where there is a `dtype`, and the fingerprint at the origin where there are `weights`.

        Args:
            data: contiguous bytes, at any address.
            items: elements; words, where there is no dtype.
            dtype: one of `KINDS`.
            table: the value of each bit pattern, for float16 and floats of 8 bits.
            weights: for the fingerprint.
        """
        out = Moments.from_buffer_copy(_NO_MOMENTS)
        measuring = _Measuring(
            address(data),
            items,
            _NO_STATISTICS if dtype is None else KINDS[dtype],
            None if table is None else table.ctypes.data,
            None if weights is None else ctypes.addressof(weights),
        )
        measure = self._measure if len(data) > _HELD_BYTES else self._measure_held
        measure(ctypes.addressof(measuring), self._team, ctypes.addressof(out))
        return out

    def split(self, data: _Bytes, item_bytes: int, planes: range, out: _Bytes) -> None:
        """Copy byte planes (0 is the most significant) of little-endian elements to the front of `out`, end to end."""
        items = len(data) // item_bytes
        if len(out) < items * len(planes):
            raise ValueError(f"out holds {len(out)} bytes: {items * len(planes)} are needed")
        self._planes(address(data), items, item_bytes, planes[0], planes[-1], address(out), items)

    def huffman(self, data: _Bytes, item_bytes: int, plane: int, out: _Bytes) -> int:
        """Write a byte plane as Zstandard frames to the front of `out`, by entropy coding alone: no matches are sought.

        Returns:
            How many bytes of `out` they took.
        """
        items = len(data) // item_bytes
        num_written = self._huffman(
            address(data), items, item_bytes, plane, address(out), len(out), self._alone.scratch
        )
        if num_written < 0:
            raise ValueError(f"out holds {len(out)} bytes: frames of {items} may need more")
        return int(num_written)

    def encode(self, data: _Bytes, item_bytes: int, num_framed: int, out: _Bytes) -> int:
        """Write the first planes as `huffman` does, then the others as they are, to the front of `out`.

        That is a payload of encoding ``planes`` (of one byte: ``raw``) where all planes are framed, and otherwise one
        of ``planes_plain``, which begins with the length of the frames.

        Returns:
            How many bytes of `out` it took.
        """
        items = len(data) // item_bytes
        num_written = self._encode(address(data), items, item_bytes, num_framed, self._team, address(out), len(out))
        if num_written < 0:
            raise ValueError(f"out holds {len(out)} bytes: a payload of {len(data)} may need more")
        return int(num_written)

    def copy(self, data: _Bytes, out: _Bytes) -> None:
        """Copy `data` to the front of `out`."""
        if len(out) < len(data):
            raise ValueError(f"out holds {len(out)} bytes: {len(data)} are needed")
        self._copy(address(data), len(data), self._team, address(out))

    def crc32c(self, data: _Bytes) -> int | None:
        """CRC32C of at most 96 MiB; None of more, or where the processor has no instruction for it."""
        crc = self._crc32c(address(data), len(data), self._team, None)
        return None if crc < 0 else int(crc)

    def stream(self, source: int, num_bytes: int, target: int) -> None:
        """Copy bytes from one address to another, past the cache."""
        stream = self._stream if num_bytes > _HELD_COPY_BYTES else self._stream_held
        stream(source, num_bytes, self._team, target)

    def store(self, source: int, num_bytes: int, target: int) -> int | None:
        """The same, and their CRC32C as `crc32c` gives it: that of the copy, even if other threads write meanwhile."""
        store = self._crc32c if num_bytes > _HELD_COPY_BYTES else self._crc32c_held
        crc = store(source, num_bytes, self._team, target)
        return None if crc < 0 else int(crc)

    def sample(self, data: _Bytes, item_bytes: int, slices: int, slice_items: int, out: _Bytes) -> tuple[int, int]:
        """Copy all byte planes of slices spread evenly over the data to the front of `out`, end to end.

        Returns:
            How many elements they are, all where there are no more, and about how many bytes `huffman` makes of the
            first of the planes.
        """
        items = len(data) // item_bytes
        num_items = min(items, slices * slice_items)
        if len(out) < num_items * item_bytes:
            raise ValueError(f"out holds {len(out)} bytes: {num_items * item_bytes} are needed")
        num_bytes = self._sample(
            address(data), items, item_bytes, slices, slice_items, address(out), self._alone.scratch
        )
        return num_items, int(num_bytes)


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins."""
    try:
        # Of what may be written: a quarter of the time.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])


def _check_whole(path: Path) -> None:
    """See that a shared library is as long as its header says: the table of its sections is the last thing in it."""
    with path.open("rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(_ELF_64_LITTLE):
        raise ValueError(f"{path} is no 64-bit ELF library")
    sections, section_bytes, num_sections = _ELF_HEADER.unpack(header)
    if sections + section_bytes * num_sections > size:
        raise ValueError(f"{path} is cut short, to {size} bytes: install again")


class Found(NamedTuple):
    """The library, or why there is none."""

    kernels: Kernels | None
    why_not: str


@lru_cache(maxsize=1)
def find() -> Found:
    """Load the library, once in a process. Never raises."""
    if not LIBRARY.is_file():
        return Found(None, "not built")
    try:
        return Found(Kernels(LIBRARY), "")
    except Exception as error:
        return Found(None, f"{type(error).__name__}: {error}")


def load(wanted: bool = True) -> Kernels | None:
    """The library where it is wanted and there is one."""
    return find().kernels if wanted else None


def in_force(wanted: bool = True) -> str:
    """What the loops are, for people and for the writer's manifest: ``compiled (avx2)``, or ``python`` and why."""
    if not wanted:
        return "python (native = no)"
    found = find()
    return f"python ({found.why_not})" if found.kernels is None else f"compiled ({found.kernels.level})"
