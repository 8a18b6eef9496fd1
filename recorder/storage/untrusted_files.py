"""`Store`, the one way to what lies in a directory or in an object store, and the opening of files of unknown origin.

Files are untrusted input: only regular files are opened, never through a symbolic link. Must never write, and never
turn text that was read from a file into a path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa

from ..errors import CorruptError, NotARunError
from ..format.rundir import MAX_MANIFEST_BYTES

IsPart = Callable[[str], bool]
Item = TypeVar("Item")
Found = TypeVar("Found")


class FileFacts(NamedTuple):
    """The facts that a listing gives of a file."""

    size_bytes: int
    changed_ns: int
    inode: int = 0
    e_tag: str = ""
    """An object store's name for these bytes; another object under the same key has another ETag."""


class Store(Protocol):
    """Access to the files of one kind of storage. A store shows its content as it was when listed, until `refresh`."""

    @property
    def filesystem(self) -> Any:
        """The file system for `pyarrow.dataset`; None for the local one."""

    def is_directory(self, path: Any) -> bool: ...

    def is_file(self, path: Any) -> bool: ...

    def exists(self, path: Any) -> bool: ...

    def list_directory(self, path: Any, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        """Return the sorted names of the real `directories` in a directory, or else of its regular files; no links.

        `is_part` tells whether a name is that of a part of a run. NotARunError is raised where such a part is a link, a
        pipe or a device, and where the directory cannot be listed.
        """

    def look_at(self, path: Any) -> FileFacts:
        """Return what is known of a file, without following links; raises OSError where there is none."""

    def read_json(self, path: Any, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        """Read a manifest, as `format.rundir.read_json` does."""

    def open_sealed(self, path: Any) -> ByteSource:
        """Open a file that nobody changes any more; raises FileNotFoundError where it is gone."""

    def open_growing(self, path: Any) -> ByteSource:
        """Open a file whose writer may be at work; raises FileNotFoundError where it is gone."""

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """Return the function's results for the items, in order; calls overlap where each waits for an answer."""

    def refresh(self) -> None:
        """Forget the listing, so that the next question lists anew."""

    def arrow_path(self, path: Any) -> str:
        """Return a path as `filesystem` writes it."""


class ByteSource(Protocol):
    """Random access to the bytes of one file, as long as it was when it was opened."""

    where: str
    """The name of this file in messages."""
    size_bytes: int

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return exactly these bytes as a `pa.Buffer`; raises CorruptError where the file has no such range.

        Where only some ranges (counted from `offset`) are `wanted`, the bytes between may come as zeros.
        """

    def data_ranges(self, start: int) -> Iterator[range]:
        """Yield the ranges from `start` on that may hold more than zeros: a sparse file can claim any length."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def open_regular(path: Path) -> int:
    """Open for reading and return the descriptor, which the caller closes.

    FileNotFoundError is raised where the file is gone, or NFS says that its handle is stale (ESTALE): list again.
    NotARunError is raised for a link, a device or another thing that no run holds, and where the file may not be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would block the open
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        _raise_if_gone(error, path)
        raise NotARunError(f"{path}: cannot be opened ({error.strerror}); symbolic links are not followed") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotARunError(f"{path}: not a regular file; a run holds nothing else")
    return descriptor


def _raise_if_gone(error: OSError, path: Path | str) -> None:
    if error.errno == errno.ESTALE:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error


class MappedFile:
    """A file that nobody changes any more (sealed shard, index), mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        descriptor = open_regular(path)
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            self._buffer = _map(descriptor) if self.size_bytes else pa.py_buffer(b"")
        finally:
            os.close(descriptor)

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return a view of the mapping, which costs nothing until it is touched."""
        check_range(self, offset, num_bytes)
        return self._buffer.slice(offset, num_bytes)

    def data_ranges(self, start: int) -> Iterator[range]:
        """Open the file by its name: the mapping keeps no descriptor. Raises FileNotFoundError where it is gone."""
        descriptor = open_regular(Path(self.where))
        try:
            yield from _data_ranges(descriptor, start, self.size_bytes)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: the mapping lives as long as a buffer of it."""


class GrowingFile:
    """An open shard: read by copies, because its writer may cut its zero tail off, and a mapping would fault there."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._descriptor = open_regular(path)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return a copy of the wanted ranges; the memory of the others is never touched."""
        check_range(self, offset, num_bytes)
        out = np.zeros(num_bytes, np.uint8)
        for byte_range in [range(num_bytes)] if wanted is None else wanted:
            start = byte_range.start
            while start < byte_range.stop:
                try:
                    got = os.preadv(self._descriptor, [out.data[start : byte_range.stop]], offset + start)
                except OSError as error:
                    _raise_if_gone(error, self.where)
                    raise CorruptError(
                        f"{self.where}: cannot be read at byte {offset + start} ({error.strerror})"
                    ) from error
                if got == 0:
                    raise CorruptError(f"{self.where}: was cut to {offset + start} bytes while it was read")
                start += got
        return pa.py_buffer(out)

    def data_ranges(self, start: int) -> Iterator[range]:
        """Yield the ranges that the file system knows now."""
        return _data_ranges(self._descriptor, start, self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def _data_ranges(descriptor: int, start: int, size_bytes: int) -> Iterator[range]:
    while start < size_bytes:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
            stop = min(os.lseek(descriptor, start, os.SEEK_HOLE), size_bytes)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a file system that knows no holes
                yield range(start, size_bytes)
            return
        yield range(start, stop)
        start = stop


def _map(descriptor: int) -> Any:
    # Through the checked descriptor, not the path again. The buffer keeps the mapping, and no descriptor, alive.
    with pa.memory_map(f"/dev/fd/{descriptor}") as mapped:
        return mapped.read_buffer()


def check_range(source: ByteSource, offset: int, num_bytes: int) -> None:
    """Raise CorruptError where a file has no such range."""
    if offset < 0 or num_bytes < 0 or offset + num_bytes > source.size_bytes:
        raise CorruptError(
            f"{source.where}: {num_bytes} bytes expected at byte {offset}, but the file ends at {source.size_bytes}"
        )
