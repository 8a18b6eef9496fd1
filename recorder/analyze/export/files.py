"""Writes tensors as npz and as safetensors, and gives files and folders their final names.

Tensors are written span by span, so that no tensor is ever complete in memory. The formats' own libraries want all
tensors in memory at once. A file gets its name once it is complete, and never replaces another file unasked. Ctrl-C and
SIGTERM leave no half-written file behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from ...errors import UnsupportedError, WriteError
from ...numerics.dtypes import item_bytes, numpy_dtype
from ...run.finding import find_run_around
from ...system.processes import sync_directory
from .tensors import Entry, SpansOf

T = TypeVar("T")
Report = Callable[[int], None]
_INDEX = "index.json"
_NO_TIME = (1980, 1, 1, 0, 0, 0)
"""The fixed modification time of each member of an npz archive, so that equal tensors make equal files."""
_MAX_HEADER_BYTES = 100_000_000
"""The largest header that the readers of safetensors accept."""
SAFETENSORS_TYPES: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
_AS_PARTS = {"complex32": "F16", "complex128": "F64"}
"""The complex types that safetensors lacks, with the type of their two parts. The parts lie along one more dim."""
_AS_BYTES = ("float4_e2m1fn_x2",)
"""Types with two elements in a byte, written as bytes because readers disagree on their shape."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


def write_npz(file: BinaryIO, spans_of: SpansOf, entries: Sequence[Entry], report: Report) -> None:
    """Write a file for `numpy.load`.

    numpy has no bfloat16 and no 8-bit floats: these become float32, which represents each of them exactly. The member
    ``index.json`` is a list of objects, one for each tensor, with `tensor` (its name in the file), `dtype`, `step`,
    ..., `ranks_present`, `ranks_expected`, `scale`, `layout_source` and `note`.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for entry in entries:
            is_widened = entry.dtype.startswith("float8") or entry.dtype == "bfloat16"
            kind = np.dtype("<f4") if is_widened else numpy_dtype(entry.dtype)
            with archive.open(zipfile.ZipInfo(f"{entry.name}.npy", _NO_TIME), "w", force_zip64=True) as member:
                header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": entry.shape}
                npy.write_array_header_2_0(member, header)
                for span in spans_of(entry):
                    data: npt.NDArray[Any] = span.data
                    if is_widened:
                        data = data.view(numpy_dtype(entry.dtype)).astype(kind).view(np.uint8)
                    member.write(data.data)
                    report(span.data.nbytes)
        index = [{"tensor": entry.name, "dtype": entry.dtype, **entry.naming, **entry.origin} for entry in entries]
        archive.writestr(zipfile.ZipInfo(_INDEX, _NO_TIME), json.dumps(index))


def write_safetensors(
    file: BinaryIO, spans_of: SpansOf, entries: Sequence[Entry], report: Report, about: Mapping[str, str] = _NOTHING
) -> None:
    """Write a safetensors file: 8 bytes of length, a JSON header, then the bytes of the tensors without a gap.

    The header's metadata contain the texts of `about`, and ``origin of NAME`` as JSON, which says from which ranks'
    values, and how, a tensor was put together. Raises UnsupportedError if the header would be too large for the format.
    """
    in_file_order = widest_first(entries)
    header: dict[str, Any] = {"__metadata__": {"writer": "recorder", **about}}
    end = 0
    for entry in in_file_order:
        dtype, shape = _safetensors_type(entry)
        header[entry.name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + entry.payload_bytes]}
        end += entry.payload_bytes
        if entry.dtype in (*_AS_PARTS, *_AS_BYTES):
            header["__metadata__"][f"dtype of {entry.name}"] = entry.dtype
        origin = {column: value for column, value in entry.origin.items() if value is not None}
        if origin:
            header["__metadata__"][f"origin of {entry.name}"] = json.dumps(origin)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(
            f"{len(entries)} tensors need a header of {len(text)} bytes, and safetensors allows {_MAX_HEADER_BYTES}: "
            "select fewer, or use npz or parquet"
        )
    file.write(struct.pack("<Q", len(text)) + text)
    for entry in in_file_order:
        for span in spans_of(entry):
            file.write(span.data.data)
            report(span.data.nbytes)


def widest_first(entries: Sequence[Entry]) -> list[Entry]:
    """Return the tensors by element size, largest first. So each file offset is a multiple of the element size."""
    return sorted(entries, key=lambda entry: -item_bytes(entry.dtype))


def _safetensors_type(entry: Entry) -> tuple[str, list[int]]:
    if entry.dtype in _AS_PARTS:
        return _AS_PARTS[entry.dtype], [*entry.shape, 2]
    return SAFETENSORS_TYPES.get(entry.dtype, "U8"), list(entry.shape)


_OR_FORCE = ", or --force to replace it"
_TERMINATED = 143
"""The exit code that a shell shows for a program that SIGTERM has ended."""


@contextmanager
def published_file(path: Path, *, force: bool | None = None) -> Iterator[BinaryIO]:
    """Open a new file, and give it its final name at the end of the `with` block.

    If the block raises, the file is removed. `force` replaces a file of the same name; None means that the user cannot
    ask for this. Raises WriteError if the name is taken, or the file cannot be written.
    """
    instead = _OR_FORCE if force is not None else ""
    _check_outside_runs(path)
    if not force and os.path.lexists(path):
        raise WriteError(f"{path}: exists; choose another name{instead}")
    if path.is_dir():
        raise WriteError(f"{path}: is a directory; name the file to write")
    if path.exists() and not path.is_file():  # a rename by root could even replace a device such as /dev/null
        raise WriteError(f"{path}: is a device or a pipe, which is never replaced; name the file to write")
    with _unfinished(path, lambda temporary: temporary.open("xb")) as (temporary, file):
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _name(temporary, path, instead, force=bool(force))


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """Make a new folder, and give it its final name at the end of the `with` block.

    If the block raises, the folder is removed. The block syncs the files. Raises WriteError if the path exists and is
    no empty directory, or cannot be written.
    """
    _check_outside_runs(path)
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        raise WriteError(f"{path}: exists; choose another name")
    with _unfinished(path, Path.mkdir) as (temporary, _):
        yield temporary
        sync_directory(temporary)
        os.rename(temporary, path)  # `rename` replaces only an empty directory


@contextmanager
def _unfinished(path: Path, make: Callable[[Path], T]) -> Iterator[tuple[Path, T]]:
    """Make a file or folder under a temporary name. If the `with` block does not rename it, it is removed."""
    temporary = path.with_name(f".recorder-{os.getpid()}.tmp")
    with _sigterm_raises():
        try:
            made = make(temporary)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror}); choose a folder that exists") from error
        try:
            yield temporary, made
            sync_directory(path.parent)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror})") from error
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the `with` block, to remove unfinished files. A program's own handler stays."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the removal
        raise SystemExit(_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_outside_runs(path: Path) -> None:
    if (run := find_run_around(path.parent)) is not None:
        raise WriteError(f"{path}: lies inside the run {run}, which is never changed; choose another folder")


def _name(temporary: Path, path: Path, instead: str, *, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename, making a link never replaces a file that appeared meanwhile
    except FileExistsError:
        raise WriteError(f"{path}: exists now; choose another name{instead}") from None
    except OSError:  # the file system has no hard links
        os.rename(temporary, path)
