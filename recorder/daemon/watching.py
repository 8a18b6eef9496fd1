"""Lists the runs, writers and files below the watched folders. It never follows a link.

Every part of a path is opened from its parent's descriptor, so that nobody can replace a checked directory by a link.
Names are checked here, before they become keys in a store. This module must never write.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import pyarrow as pa

from ..format.rundir import (
    RUN_MANIFEST,
    STATUS,
    WRITER_MANIFEST,
    index_name,
    is_writer_dir,
    parse_rank_dir,
    parse_shard_name,
    shard_name,
)
from ..read.writers import GLOBAL_DIR
from ..storage.untrusted_files import ByteSource, FileFacts, check_range

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@-]{0,254}")
"""Matches names that every store keeps unchanged, and that are harmless in every shell, URL and terminal."""
_ASIDE = re.compile(r"_[A-Za-z0-9._=+@-]*\.(json|damaged)")
"""Matches files of a run besides shards, indexes and manifests: documents, and damaged shards from a repair."""
_REMAINS = re.compile(r".*\.tmp|__.*\.open|_shipped-.*|_commands|_keep")
"""Matches files that are not shipped and not counted as foreign: half-written files, ledgers, commands and marks."""
_MAX_DEPTH = 4
"""The most folders between a watched folder and a run."""
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HEADS = {".arrow": b"ARROW1\0\0", ".open": b"ARROW1\0\0", ".index": b"ARROW1\0\0", ".json": b"{"}
"""The first bytes that a file must have, by its extension. Other files, such as hard links, are not shipped."""


class RefusedError(Exception):
    """A file is not what its name says: it is a link, a device or has other content. It is ignored and counted."""


class LocalFile(ByteSource):
    """An open regular file whose first bytes were checked."""

    def __init__(self, descriptor: int, where: str) -> None:
        self.where = where
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.size_bytes = status.st_size
        self.stamp = FileFacts.of(status)

    def bytes(self, offset: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes of the file from `offset` on. Raise OSError if the file has become shorter."""
        parts, wanted = [], num_bytes
        while wanted:
            part = os.pread(self.descriptor, wanted, offset)
            if not part:
                raise OSError(5, "was cut while it was read", self.where)
            parts.append(part)
            offset += len(part)
            wanted -= len(part)
        return b"".join(parts)

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        check_range(self, offset, num_bytes)
        return pa.py_buffer(self.bytes(offset, num_bytes))

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)


@dataclass(slots=True)
class Entries:
    """The entries of one directory. It also sums up the entries of many directories."""

    directories: list[str] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Links, devices, and entries whose names may not become keys in a store."""
    foreign: list[str] = field(default_factory=list)
    """Files and directories that belong to no run."""
    unshipped: dict[str, str] = field(default_factory=dict)
    """The directories that may hold a run and are not shipped, by path, each with the reason."""


@dataclass(slots=True)
class WriterFiles:
    """The files of one writer, by their kinds."""

    sealed: dict[str, FileFacts] = field(default_factory=dict)
    indexes: dict[str, FileFacts] = field(default_factory=dict)
    """The indexes of sealed shards, by their file names."""
    opened: dict[str, FileFacts] = field(default_factory=dict)
    aside: dict[str, FileFacts] = field(default_factory=dict)
    manifest: FileFacts | None = None
    status: FileFacts | None = None
    refused: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        kinds = (self.sealed, self.indexes, self.opened, self.aside)
        return sum(stamp.size_bytes for kind in kinds for stamp in kind.values())

    @property
    def changed_s(self) -> float:
        """The time at which the writer's newest file was changed. 0 if there are no files."""
        kinds = (self.sealed, self.opened)
        stamps = [stamp for kind in kinds for stamp in kind.values()]
        stamps += [stamp for stamp in (self.manifest, self.status) if stamp is not None]
        return max((stamp.changed_ns for stamp in stamps), default=0) / 1e9


class Folder:
    """A directory that is held open. Its entries are opened only from its descriptor."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def root(cls, path: str) -> Folder:
        """Open a watched folder. The path may be a link, because the person who started the daemon named it."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def below(self, *names: str) -> Folder:
        """Open a directory below this one. Raise OSError if one of the names is missing, or is a link."""
        descriptor = os.dup(self.descriptor)
        for name in names:
            try:
                inner = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = inner
        return Folder("/".join((self.path, *names)), descriptor)

    def open(self, name: str) -> LocalFile:
        """Open a regular file. Raise RefusedError if it is another kind of file, or OSError if it cannot be opened."""
        where = f"{self.path}/{name}"
        try:
            descriptor = os.open(name, _OPEN, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == 40:  # ELOOP: the file is a link
                raise RefusedError(f"{where}: is a symbolic link") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RefusedError(f"{where}: is not a regular file")
            head = _HEADS.get(name[name.rfind(".") :], b"")
            content = os.pread(descriptor, len(head), 0)
            if content != head[: len(content)]:  # a file that was just created may be shorter
                raise RefusedError(f"{where}: does not begin as files of this name must")
        except BaseException:
            os.close(descriptor)
            raise
        return LocalFile(descriptor, where)

    def entries(self, *, with_stamps: bool = True) -> Entries:
        """List the directory. Without `with_stamps`, the sizes and times of files are not read."""
        listed = Entries()
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                is_directory, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
                if not (is_directory or is_file) or not _NAME.fullmatch(entry.name):
                    if not entry.name.startswith("."):
                        listed.refused.append(entry.name)
                elif is_directory:
                    listed.directories.append(entry.name)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        listed.files[entry.name] = (
                            FileFacts.of(entry.stat(follow_symlinks=False)) if with_stamps else FileFacts(0, 0, 0)
                        )
        listed.directories.sort()
        return listed

    def changed_ns(self, path: str = ".") -> int:
        """Return when this directory, or one below it, last changed, in nanoseconds. The directory is not opened."""
        return os.stat(path, dir_fd=self.descriptor, follow_symlinks=False).st_mtime_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)


def find_runs(folder: Folder, counts: Entries, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield each run below a folder, as the names of the directories that lead there. Add other entries to `counts`."""
    entries = folder.entries(with_stamps=False)
    if RUN_MANIFEST in entries.files and names:
        yield names
        return
    counts.refused += [f"{folder.path}/{name}" for name in entries.refused]
    counts.foreign += [f"{folder.path}/{name}" for name in entries.files]
    for name in entries.directories:
        if len(names) == _MAX_DEPTH or name.startswith("_"):
            counts.foreign.append(f"{folder.path}/{name}")
            continue
        try:
            with folder.below(name) as inner:
                yield from find_runs(inner, counts, (*names, name))
        except PermissionError as error:
            counts.unshipped[f"{folder.path}/{name}"] = closed_to_us(error)
        except OSError:  # the directory is gone, or was replaced by a link
            continue
    for name in entries.refused:  # only directories can be opened
        with contextlib.suppress(OSError), folder.below(name) as inner:
            os.stat(RUN_MANIFEST, dir_fd=inner.descriptor, follow_symlinks=False)
            counts.unshipped[f"{folder.path}/{name}"] = "its name is not of letters, digits and . _ = + @ -: rename it"


def closed_to_us(error: PermissionError) -> str:
    """Return the reason that is shown for a directory that the daemon may not read."""
    return f"the daemon has no permission to read it ({error.strerror})"


def list_run(folder: Folder) -> tuple[list[tuple[str, str]], dict[str, FileFacts], Entries]:
    """Return a run's writers (pairs of directory names), the run's own documents, and the ignored entries."""
    entries = folder.entries()
    counts = Entries(refused=entries.refused)
    documents = {name: stamp for name, stamp in entries.files.items() if _ASIDE.fullmatch(name)}
    counts.foreign += [name for name in entries.files if name not in documents and not _REMAINS.fullmatch(name)]
    writers = []
    for name in entries.directories:
        if parse_rank_dir(name) is not None or name == GLOBAL_DIR:
            try:
                with folder.below(name) as inner:
                    below = inner.entries(with_stamps=False)
                    own = [one for one in below.directories if is_writer_dir(one, partial(_files_of, inner, one))]
            except PermissionError as error:
                counts.unshipped[f"{folder.path}/{name}"] = closed_to_us(error)
                continue
            except OSError:  # the directory is gone, or was replaced by a link
                continue
            writers += [(name, writer) for writer in own]
            counts.refused += [f"{name}/{one}" for one in below.refused]
            counts.foreign += [f"{name}/{one}" for one in (*below.directories, *below.files) if one not in own]
        elif not name.startswith("_"):
            counts.foreign.append(name)
    return writers, documents, counts


def _files_of(folder: Folder, name: str) -> Iterable[str]:
    try:
        with folder.below(name) as inner:
            return inner.entries(with_stamps=False).files
    except OSError:
        return [WRITER_MANIFEST]  # the code that opens the writer reports why it cannot be listed


def list_writer(folder: Folder) -> WriterFiles:
    """List the directory of a writer, and return its files by kind."""
    entries = folder.entries()
    files = WriterFiles(refused=entries.refused)
    files.foreign = [name for name in entries.directories if not name.startswith("_")]
    indexes: dict[str, FileFacts] = {}
    for name, stamp in entries.files.items():
        shard = parse_shard_name(name)
        if shard is not None:
            (files.opened if shard.is_open else files.sealed)[name] = stamp
        elif name == WRITER_MANIFEST:
            files.manifest = stamp
        elif name == STATUS:
            files.status = stamp
        elif name.endswith(".index") and name.startswith("_"):
            indexes[name] = stamp
        elif _ASIDE.fullmatch(name):
            files.aside[name] = stamp
        elif not _REMAINS.fullmatch(name):
            files.foreign.append(name)
    files.indexes = {
        index_name(name): indexes[index_name(name)] for name in files.sealed if index_name(name) in indexes
    }
    files.foreign += indexes.keys() - files.indexes.keys()
    return files


def sealed_name(name: str) -> str:
    """Return the name that an open shard gets when it is sealed."""
    shard = parse_shard_name(name)
    assert shard is not None, "callers pass only names of shards"
    return shard_name(shard.kind, shard.number)
