"""Locations of runs in directories and object stores, and the `Store` for each location.

This module must never write. Paths in a store are made only from typed text and from names that `format.rundir` knows,
like paths on a disk.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..errors import NotARunError
from ..format.rundir import MAX_MANIFEST_BYTES, read_json
from .clients import KINDS, SCHEMES
from .objects import ObjectPath
from .untrusted_files import ByteSource, FileFacts, Found, GrowingFile, IsPart, Item, MappedFile, Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CUT = re.compile(rf"({'|'.join(KINDS)}):/(?=[^/])", re.IGNORECASE)
"""The beginning of a URL in which pathlib has replaced two slashes by one."""
_NUM_TRIES = 3


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

    def look_at(self, path: Path) -> FileFacts:
        status = os.stat(path, follow_symlinks=False)
        return FileFacts(status.st_size, status.st_mtime_ns, status.st_ino)

    def read_json(self, path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        return read_json(path, max_bytes)

    def shown_statuses(self, run: Path) -> dict[str, tuple[int, dict[str, Any]]]:
        return {}

    def open_sealed(self, path: Path) -> ByteSource:
        return MappedFile(path)

    def open_growing(self, path: Path) -> ByteSource:
        return GrowingFile(path)

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        return map(function, items)

    def refresh(self) -> None:
        """Do nothing, because the disk answers every request."""

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


Location = Path | ObjectPath
"""The path of a run, or of a file in a run."""
OpenLocation = Path | Any
"""The type of an opened run's location. If it is a directory, callers may use it as a `Path` without a cast."""


def store_of(location: Location) -> Store:
    """Return the store that a location is in."""
    return LOCAL if isinstance(location, Path) else location.store


def location_of(path: str | os.PathLike[str] | Location) -> Location:
    """Return the location that a typed path, a URL or a path object names.

    NotARunError is raised for an empty text, an unknown kind of store, and a URL that names no folder.
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    if not text:  # for example "$RUN" without a value; as a path it would be the current folder
        raise NotARunError("an empty text is no run; name a run, or a folder of runs")
    if (cut := _CUT.match(text)) and not os.path.lexists(text[: cut.end()]):
        text = f"{cut[1]}://{text[cut.end() :]}"  # pathlib has turned the URL into a path
    scheme = scheme_of(text)
    if scheme is None:
        return Path(path)
    if scheme == "file":  # a daemon's destination may be such a folder
        folder = unquote(text[len("file://") :])
        if not folder.startswith("/"):
            raise NotARunError(f"{text}: expected file:///FOLDER, with three slashes")
        return Path(folder)
    if scheme not in KINDS:
        raise NotARunError(f"{text}: {scheme}:// is not supported; runs are read from directories and from {SCHEMES}")
    return ObjectPath.parse(text)


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else None
