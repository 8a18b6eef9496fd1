"""Owns where a run may lie, a directory or an S3 store, and the one way to what is there: a `Store`.

Must never write. Paths of a store are made from what was typed and from names that `format.rundir` knows, as on a disk.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import NotARunError
from ..format.rundir import MAX_MANIFEST_BYTES, read_json
from .files import ByteSource, GrowingFile, MappedFile

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_S3 = "s3"
_NUM_TRIES = 3
IsPart = Callable[[str], bool]
Item = TypeVar("Item")
Found = TypeVar("Found")


class Seen(NamedTuple):
    """What a listing says of a file."""

    size_bytes: int
    changed_ns: int
    inode: int = 0


class Store(Protocol):
    """The way to files in one kind of place. What is in a store is as it was when it was listed, until `refresh`."""

    @property
    def filesystem(self) -> Any:
        """For `pyarrow.dataset`; None for the local one."""

    def is_directory(self, path: Any) -> bool: ...

    def is_file(self, path: Any) -> bool: ...

    def exists(self, path: Any) -> bool: ...

    def list_directory(self, path: Any, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        """Sorted names of the real directories, or of the regular files, in a directory. Links are neither.

        Args:
            path: of the directory.
            directories: which of the two.
            is_part: whether a name is that of a part of a run, which no link, pipe or device may have.

        Raises:
            NotARunError: it cannot be listed, or holds a part of a run that is a link or of another kind.
        """

    def look_at(self, path: Any) -> Seen:
        """Raise OSError where there is nothing. Links are not followed."""

    def read_json(self, path: Any, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        """As `format.rundir.read_json`."""

    def open_sealed(self, path: Any) -> ByteSource:
        """A file that nobody changes any more. FileNotFoundError: it is gone."""

    def open_growing(self, path: Any) -> ByteSource:
        """A file whose writer may be at work. FileNotFoundError: it is gone."""

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """What a function makes of each item, in order; several at once where every one waits for an answer."""

    def refresh(self) -> None:
        """Forget the listing."""

    def arrow_path(self, path: Any) -> str:
        """What `filesystem` calls a path."""


class LocalStore:
    """Directories of this machine: regular files only, never through a symbolic link."""

    @property
    def filesystem(self) -> Any:
        return None

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def list_directory(self, path: Path, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        for is_last_try in [False] * (_NUM_TRIES - 1) + [True]:
            try:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in entries if _is_wanted(entry, directories, is_part))
            except OSError as error:
                if is_last_try or error.errno != errno.ESTALE:
                    raise NotARunError(f"{path}: cannot be listed ({error.strerror})") from error
        raise AssertionError("the last try returns or raises")

    def look_at(self, path: Path) -> Seen:
        found = os.stat(path, follow_symlinks=False)
        return Seen(found.st_size, found.st_mtime_ns, found.st_ino)

    def read_json(self, path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        return read_json(path, max_bytes)

    def open_sealed(self, path: Path) -> ByteSource:
        return MappedFile(path)

    def open_growing(self, path: Path) -> ByteSource:
        return GrowingFile(path)

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        return map(function, items)

    def refresh(self) -> None:
        """Every question is asked of the disk."""

    def arrow_path(self, path: Path) -> str:
        return str(path)


def _is_wanted(entry: os.DirEntry[str], directories: bool, is_part: IsPart) -> bool:
    is_directory, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
    if entry.is_symlink() and is_part(entry.name):
        raise NotARunError(
            f"{entry.path}: is a symbolic link, and none is followed in a run; put what it leads to in its place, "
            "or copy the run with `cp -rL`"
        )
    if not is_directory and not is_file and is_part(entry.name):
        raise NotARunError(f"{entry.path}: is a pipe, a socket or a device, where a run has files; remove it")
    return is_directory if directories else is_file


LOCAL = LocalStore()


class S3Path:
    """A place in an S3 store, ``s3://bucket/key``, with what is needed of a `pathlib.Path`. Pickled as its text."""

    def __init__(self, bucket: str, parts: Sequence[str], store: Store | None = None) -> None:
        self.bucket = bucket
        self.parts = tuple(parts)
        """Of the key."""
        if store is not None:
            self.__dict__["store"] = store

    @classmethod
    def parse(cls, text: str) -> S3Path:
        """From ``s3://bucket/key``; slashes at the end mean nothing.

        Raises:
            NotARunError: it names no bucket, or holds a name that is none.
        """
        bucket, *parts = text.partition("://")[2].split("/")
        while parts and not parts[-1]:
            parts.pop()
        if not _BUCKET.fullmatch(bucket):  # it may hold a password
            raise NotARunError("s3://: expected s3://BUCKET/PATH; credentials and ports are settings (AWS_...)")
        if not {"", ".", ".."}.isdisjoint(parts):
            raise NotARunError(f"{text}: expected s3://BUCKET/PATH, without names that are empty, '.' or '..'")
        return cls(bucket, parts)

    @cached_property
    def store(self) -> Store:
        """Connected to on the first question."""
        from .s3 import S3Store  # pyarrow.fs is loaded where a run lies in a store, and only there

        return S3Store(self.bucket)

    def anew(self) -> S3Path:
        """The same place, of which nothing is known yet."""
        return S3Path(self.bucket, self.parts)

    @property
    def key(self) -> str:
        return "/".join(self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else self.bucket

    @property
    def parent(self) -> S3Path:
        return S3Path(self.bucket, self.parts[:-1], self.store)

    @property
    def parents(self) -> Sequence[S3Path]:
        return [S3Path(self.bucket, self.parts[:stop], self.store) for stop in range(len(self.parts) - 1, -1, -1)]

    def with_name(self, name: str) -> S3Path:
        return self.parent / name

    def absolute(self) -> S3Path:
        return self

    def resolve(self) -> S3Path:
        return self

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(self.bucket, (*self.parts, name), self.store)

    def __str__(self) -> str:
        return "/".join((f"{_S3}://{self.bucket}", *self.parts))

    def __repr__(self) -> str:
        return f"S3Path({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Path) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Path, (self.bucket, self.parts)


Place = Path | S3Path
"""Where a run, or a file of one, lies."""
OpenPlace = Path | Any
"""The same as an attribute of what was opened: whoever opened a directory has a `Path`, and need not ask."""


def store_of(place: Place) -> Store:
    """The way to what is there."""
    return LOCAL if isinstance(place, Path) else place.store


def place_of(path: str | os.PathLike[str] | Place) -> Place:
    """The place that is meant by what was typed or handed over.

    Raises:
        NotARunError: it is in a kind of store that is not known.
    """
    if isinstance(path, S3Path):
        return path
    text = os.fspath(path)
    if re.match(r"s3:/[^/]", text, re.IGNORECASE) and not os.path.lexists(text[:3]):
        return S3Path.parse(f"{_S3}://{text[4:]}")  # what pathlib makes of s3://bucket
    scheme = scheme_of(text)
    if scheme is None:
        return Path(path)
    if scheme != _S3:
        raise NotARunError(f"{text}: {scheme}:// is not supported; runs are read from directories and from s3://")
    return S3Path.parse(text)


def scheme_of(text: str) -> str | None:
    """What stands before ``://``, in small letters; None for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else None
