"""Finds, checks and calls the compiled loops of `kernels.c`, or does without.

Everything that it offers has a pure Python twin that gives the same bits; whoever calls has that as well. Where the
Huffman code is missing, zstd gives other bytes of the same content. Nothing here may raise where the library is
missing, of another version, or made for another processor.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..records import Measured

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI = 10
"""The ABI number in `kernels.c`; a library with another number is not used."""
LEVELS = ("generic", "avx2", "avx512")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""The header's fields for the table of sections: its offset, the size of an entry, and their number."""
_KINDS = ("float32", "float64", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TABLE_8, _TABLE_16 = len(_KINDS), len(_KINDS) + 1
_NO_STATISTICS = -1
_HELD_BYTES = 1 << 15
"""Measured in 5 to 15 us of float32, in 200 of 8-bit floats without vector instructions: far below the 5 ms after which
Python takes the lock away."""
KINDS = {name: number for number, name in enumerate(_KINDS)} | {"bool": _KINDS.index("uint8"), "float16": _TABLE_16}
KINDS |= {f"float8_{kind}": _TABLE_8 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
"""Element types whose statistics the library computes, by torch's names."""
TABLE_KINDS = frozenset(name for name, kind in KINDS.items() if kind in (_TABLE_8, _TABLE_16))
"""Element types whose values are looked up in a table."""

_Bytes = npt.NDArray[np.uint8]


_STATISTICS = struct.Struct("10d3qQq")
"""The statistics of a tensor, as `struct statistics`."""
_MEASURING = struct.Struct("PqiPPPP")
"""The input of a measurement, as `struct measuring`: data, items, kind, table, weights, bins, units."""


class Weights(ctypes.Structure):
    """The weights of a tensor's words, as `struct weights`; it keeps its arrays alive."""

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


class Units(ctypes.Structure):
    """Sums over the values of each unit, as `struct units`; it keeps its arrays alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "squares", "peaks", "zeros")),
        *((name, ctypes.c_int64) for name in ("num", "inner")),
    )

    def __init__(self, sums: npt.NDArray[np.float64], zeros: npt.NDArray[np.int64], inner: int) -> None:
        """Take the arrays that the loops add to.

        Args:
            sums: contiguous, of shape (3, units): of x and x^2, and the largest magnitude.
            zeros: how many values are zero.
            inner: how many elements of one unit lie side by side.
        """
        super().__init__(*(address(row) for row in (*sums, zeros)), len(zeros), inner)
        self._arrays = sums, zeros


class _OfThread(threading.local):
    """The scratch memory of one thread."""

    def __init__(self, num_bytes: int) -> None:
        """Take the memory; Python calls this in each thread that looks at an attribute."""
        self._memory = np.empty(-(-num_bytes // 8), np.uint64)
        self.scratch = address(self._memory)


SmallTensor = tuple[int, int, str, Weights | None]


class Kernels:
    """The loaded library. Any thread; each has scratch memory of its own."""

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
            measure.argtypes = (pointer, number, pointer, pointer)
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
        self._encode = library.recorder_native_encode
        self._encode.argtypes = (pointer, number, number, number, pointer, number, pointer)
        self._encode.restype = number
        library.recorder_native_scratch.restype = number
        self._of_thread = _OfThread(int(library.recorder_native_scratch()))

    def measure(
        self,
        data: _Bytes,
        items: int,
        dtype: str | None,
        table: npt.NDArray[np.float32] | None,
        weights: Weights | None,
        bins: npt.NDArray[np.uint64] | None = None,
        units: Units | None = None,
    ) -> Measured:
        """Statistics where there is a `dtype`, and the fingerprint at the origin where there are `weights`.

        Args:
            data: contiguous bytes, at any address.
            items: elements; words, where there is no dtype.
            dtype: one of `KINDS`.
            table: the value of each bit pattern, for float16 and floats of 8 bits.
            weights: for the fingerprint.
            bins: where values are counted for the histogram, added to what is there; of a length as
                `numerics.histogram.NUM_BINS` says, and only with a dtype.
            units: to whose sums the values of each unit are added; only with a dtype.
        """
        measuring = _MEASURING.pack(
            address(data),
            items,
            _NO_STATISTICS if dtype is None else KINDS[dtype],
            0 if table is None else table.ctypes.data,
            0 if weights is None else weights.address,
            0 if bins is None else address(bins),
            0 if units is None else ctypes.addressof(units),
        )
        out = bytearray(_STATISTICS.size)
        measure = self._measure if len(data) > _HELD_BYTES else self._measure_held
        measure(measuring, 1, self._of_thread.scratch, ctypes.addressof(ctypes.c_char.from_buffer(out)))
        return _measured(_STATISTICS.unpack(out), weights)

    def measure_small(self, tensors: Sequence[SmallTensor]) -> list[Measured]:
        """Statistics, and the fingerprint at the origin where there are weights, of many tensors in one call.

        The interpreter's lock is held meanwhile: the tensors have `_HELD_BYTES` together, or not many more.

        Args:
            tensors: of each the address, the number of elements, the dtype and the weights. The dtype is one of `KINDS`
                and none of `TABLE_KINDS`.
        """
        measuring = b"".join(
            [
                _MEASURING.pack(at, items, KINDS[dtype], 0, 0 if weights is None else weights.address, 0, 0)
                for at, items, dtype, weights in tensors
            ]
        )
        out = bytearray(_STATISTICS.size * len(tensors))
        at = ctypes.addressof(ctypes.c_char.from_buffer(out))
        self._measure_held(measuring, len(tensors), self._of_thread.scratch, at)
        return [
            _measured(statistics, tensor[3])
            for statistics, tensor in zip(_STATISTICS.iter_unpack(out), tensors, strict=True)
        ]

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
            address(data), items, item_bytes, plane, address(out), len(out), self._of_thread.scratch
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
        num_written = self._encode(
            address(data), items, item_bytes, num_framed, address(out), len(out), self._of_thread.scratch
        )
        if num_written < 0:
            raise ValueError(f"out holds {len(out)} bytes: a payload of {len(data)} may need more")
        return int(num_written)

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
            address(data), items, item_bytes, slices, slice_items, address(out), self._of_thread.scratch
        )
        return num_items, int(num_bytes)


def _measured(statistics: tuple[Any, ...], weights: Weights | None) -> Measured:
    """Make a row's statistics of a `struct statistics`."""
    fingerprint, count = statistics[13:]
    known = statistics[:13] if count else (*(None,) * 10, *statistics[10:13])
    # As `Measured(...)` makes it, in a third of the time.
    return tuple.__new__(Measured, (*known, None if weights is None else fingerprint, None, None, None))


def address(array: npt.NDArray[Any]) -> int:
    """Return the address at which a contiguous array begins."""
    try:
        # For writable memory this takes a quarter of the time.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])


def _check_whole(path: Path) -> None:
    """Check that a shared library is as long as its header says: the table of its sections comes last in it."""
    with path.open("rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(_ELF_64_LITTLE):
        raise ValueError(f"{path} is no 64-bit ELF library")
    sections, section_bytes, num_sections = _ELF_HEADER.unpack(header)
    if sections + section_bytes * num_sections > size:
        raise ValueError(f"{path} is cut short, to {size} bytes: install again")


class Loaded(NamedTuple):
    """The loaded library, or the reason why there is none."""

    kernels: Kernels | None
    why_not: str


@lru_cache(maxsize=1)
def find() -> Loaded:
    """Load the library, once in a process. Never raises."""
    if not LIBRARY.is_file():
        return Loaded(None, "not built")
    try:
        return Loaded(Kernels(LIBRARY), "")
    except Exception as error:
        return Loaded(None, f"{type(error).__name__}: {error}")


def load(wanted: bool = True) -> Kernels | None:
    """Return the library where it is wanted and there is one."""
    return find().kernels if wanted else None


def in_force(wanted: bool = True) -> str:
    """Return what computes, for people and the manifest: ``compiled (avx2)``, or ``python`` and why."""
    if not wanted:
        return "python (native = no)"
    library = find()
    return f"python ({library.why_not})" if library.kernels is None else f"compiled ({library.kernels.level})"
