"""Owns the way to the compiled loops of `kernels.c`: found, checked and called here, or done without.

Everything that it offers has a pure Python twin that gives the same bits; whoever calls has that as well. Nothing here
may raise where the library is missing, of another version, or made for another processor.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI = 1
"""That of `kernels.c`; a library that says another number is left alone."""
LEVELS = ("generic", "avx2", "avx512")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Where the table of sections lies, how long an entry is, and how many there are."""
_CHUNK_ITEMS = 1 << 15
_KINDS = ("float32", "float64", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_TABLE_8, _TABLE_16 = len(_KINDS), len(_KINDS) + 1
_NO_STATISTICS = -1
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
        library = ctypes.CDLL(str(path))
        if (abi := library.recorder_native_abi()) != ABI:
            raise ValueError(f"{path} has ABI {abi}: expected {ABI}")
        self.level = LEVELS[library.recorder_native_select(level)]
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._measure = library.recorder_native_measure
        self._measure.argtypes = (pointer, number, ctypes.c_int, pointer, pointer, pointer, pointer)
        self._measure.restype = None
        self._planes = library.recorder_native_planes
        self._planes.argtypes = (pointer, number, number, number, number, pointer, number)
        self._planes.restype = None
        self._local = threading.local()

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
        out = Moments(min=float("inf"), max=float("-inf"))
        self._measure(
            address(data),
            items,
            _NO_STATISTICS if dtype is None else KINDS[dtype],
            None if table is None else table.ctypes.data,
            None if weights is None else ctypes.addressof(weights),
            self._scratch,
            ctypes.addressof(out),
        )
        return out

    def split(self, data: _Bytes, item_bytes: int, planes: range, out: _Bytes) -> None:
        """Copy byte planes (0 is the most significant) of little-endian elements to the front of `out`, end to end."""
        items = len(data) // item_bytes
        if len(out) < items * len(planes):
            raise ValueError(f"out holds {len(out)} bytes: {items * len(planes)} are needed")
        self._planes(address(data), items, item_bytes, planes[0], planes[-1], address(out), items)

    @property
    def _scratch(self) -> int:
        try:
            return self._local.address  # type: ignore[no-any-return]
        except AttributeError:
            self._local.memory = np.empty(3 * _CHUNK_ITEMS, np.float32)
            self._local.address = self._local.memory.ctypes.data
            return self._local.address  # type: ignore[no-any-return]


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins."""
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
