"""`Store`, the interface for reading directories and object stores, and safe opening of files of unknown origin.

Files are untrusted input. Only regular files are opened, never through a symbolic link. This module must never write,
and must never turn text from a file into a path.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """The facts about a file in a listing. At least one differs if the file was changed or replaced."""

    size_bytes: int
    changed_ns: int
    inode: int = 0
    e_tag: str = ""
    """The object store's ETag. It changes when a new object replaces the old one."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileFacts:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Store(Protocol):
    """Reads the files of one kind of storage. A store may answer from its last listing until `refresh`."""

    @property
    def filesystem(self) -> Any:
        """The file system for `pyarrow.dataset`; None for the local file system."""
        return None

    def is_directory(self, path: Any, /) -> bool: ...

    def is_file(self, path: Any, /) -> bool: ...

    def exists(self, path: Any, /) -> bool: ...

    def list_directory(self, path: Any, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        """Return the sorted names of a directory's subdirectories (`directories`) or regular files, without links.

        `is_part` returns whether a name belongs to a part of a run. Raises NotARunError if such a part is a link, a
        pipe or a device, or if the directory cannot be listed.
        """

    def look_at(self, path: Any) -> FileFacts:
        """Return the facts about a file. Links are not followed. Raises OSError if it is missing."""

    def read_json(self, path: Any, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        """Read a manifest, as `format.rundir.read_json` does."""

    def shown_statuses(self, run: Any) -> Mapping[str, tuple[int, dict[str, Any]]]:
        """Return the statuses in a run's files per node, by RANK/WRITER. Each has the time of its change in ns.

        The result is empty if each status has a file of its own.
        """
        return {}

    def open_sealed(self, path: Any, /) -> ByteSource:
        """Open a file that no longer changes. Raises FileNotFoundError if it is gone."""

    def open_growing(self, path: Any, /) -> ByteSource:
        """Open a file that may still grow. Raises FileNotFoundError if it is gone."""

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """Return the function's results for the items, in order. Calls run in parallel if they wait for a network."""
        return map(function, items)

    def refresh(self) -> None:
        """Forget the listing, if there is one. The next request lists again."""
        return

    def arrow_path(self, path: Any, /) -> str:
        """Return a path in the form that `filesystem` takes."""


class ByteSource(Protocol):
    """Random access to the bytes of one file. Its size is the size at opening."""

    where: str
    """The name of the file in messages."""
    size_bytes: int

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return `num_bytes` bytes at `offset` as a `pa.Buffer`. Raises CorruptError if the file has no such range.

        With `wanted`, only these ranges (relative to `offset`) are read. The bytes between them may be zeros.
        """

    def data_ranges(self, start: int) -> Iterator[range]:
        """Yield the ranges from `start` on that may have nonzero bytes. A sparse file can claim any length."""
        yield range(start, self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file. A source without an open file need not override this method."""
        return


def open_regular(path: Path) -> int:
    """Open a file for reading. Return the descriptor, which the caller closes.

    Raises FileNotFoundError if the file is gone, or if NFS reports a stale handle; the directory must then be listed
    again. Raises NotARunError if the file cannot be read, or is a link, a device or anything else that no run contains.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # without O_NONBLOCK, opening a FIFO would block
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


class MappedFile(ByteSource):
    """A memory-mapped file that no longer changes: a sealed shard or an index. Each buffer keeps the mapping alive."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        descriptor = open_regular(path)
        try:
            self.size_bytes = os.fstat(descriptor).st_size
            self._buffer = _map(descriptor) if self.size_bytes else pa.py_buffer(b"")
        finally:
            os.close(descriptor)

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return a view of the mapping. Nothing is read until the view is used."""
        check_range(self, offset, num_bytes)
        return self._buffer.slice(offset, num_bytes)


class GrowingFile(ByteSource):
    """A shard that is being written, or is damaged, read by copies. Its writer may cut it: a mapping would fault."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._descriptor = open_regular(path)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Return a copy of the wanted ranges. The memory between them is not touched."""
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
        while start < self.size_bytes:
            try:
                start = os.lseek(self._descriptor, start, os.SEEK_DATA)
                stop = min(os.lseek(self._descriptor, start, os.SEEK_HOLE), self.size_bytes)
            except OSError as error:
                if error.errno != errno.ENXIO:  # the file system does not report holes
                    yield range(start, self.size_bytes)
                return
            yield range(start, stop)
            start = stop

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def _map(descriptor: int) -> Any:
    # The mapping uses the checked descriptor, so the path is not opened again. The buffer keeps only the mapping alive.
    with pa.memory_map(f"/dev/fd/{descriptor}") as mapped:
        return mapped.read_buffer()


def check_range(source: ByteSource, offset: int, num_bytes: int) -> None:
    """Raise CorruptError unless the file has `num_bytes` bytes at `offset`."""
    if offset < 0 or num_bytes < 0 or offset + num_bytes > source.size_bytes:
        raise CorruptError(
            f"{source.where}: {num_bytes} bytes expected at byte {offset}, but the file ends at {source.size_bytes}"
        )
