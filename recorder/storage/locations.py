"""Locations of runs in directories and object stores, and the `Store` that reads each location.

This module must never write. A path in a store, like a path on a disk, is made only from typed text and from names that
`format.rundir` knows. A run in an object store is listed once, and its objects are read by ranges of bytes.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from ..errors import CorruptError, NotARunError, RunError
from ..format.rundir import MAX_MANIFEST_BYTES, NODES, OPEN_SUFFIX, RUN_MANIFEST, Members, parse_json, read_json
from .clients import KINDS, SCHEMES, Client, bare_e_tag, changed
from .untrusted_files import ByteSource, FileFacts, Found, GrowingFile, IsPart, Item, MappedFile, Store, check_range

_NUM_AT_ONCE = 16
"""The most requests at a time. A request takes 20 to 50 ms, and a run of 64 ranks needs about 200."""
_WHOLE_BYTES = 512 << 10
"""Objects and gaps between ranges of up to this size are read completely. Another request would take as long."""
_BLOCK_BYTES = 64 << 10
"""The least bytes of a request. They cover a shard's schema, footer and seal, or the header of a batch."""
_INDEX_BLOCK_BYTES = 8 << 20
"""The least bytes of a request to an object without payloads. Most bytes of such objects are needed later."""
_MAX_KEPT_BYTES = 256 << 20
"""The most bytes that a store keeps for later reads. Larger blocks are payloads, which their readers keep."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ObjectPath:
    """A path in an object store, such as ``s3://bucket/key``. It has the methods of `pathlib.Path` that readers use."""

    scheme: str
    bucket: str
    parts: tuple[str, ...]
    """The parts of the key between the slashes."""
    store: ObjectStore = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> ObjectPath:
        """Parse ``s3://bucket/key``. Raises NotARunError if the bucket or a part of the key is invalid."""
        scheme, _, rest = text.partition("://")
        bucket, *parts = rest.split("/")
        while parts and not parts[-1]:
            parts.pop()
        scheme = scheme.lower()
        if not _BUCKET.fullmatch(bucket):  # the text may contain a password, which a message must not show
            raise NotARunError(f"{scheme}://: expected {scheme}://BUCKET/PATH; credentials and ports are settings")
        if not {"", ".", ".."}.isdisjoint(parts):
            raise NotARunError(f"{text}: expected {scheme}://BUCKET/PATH, without names that are empty, '.' or '..'")
        return cls(scheme, bucket, tuple(parts), ObjectStore(scheme, bucket))

    def anew(self) -> ObjectPath:
        """Return this path in a new `ObjectStore`, which has no listing yet."""
        return ObjectPath.parse(str(self))

    @property
    def key(self) -> str:
        return "/".join(self.parts)

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else self.bucket

    @property
    def parent(self) -> ObjectPath:
        return self._at(self.parts[:-1])

    @property
    def parents(self) -> Sequence[ObjectPath]:
        return [self._at(self.parts[:stop]) for stop in range(len(self.parts) - 1, -1, -1)]

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def absolute(self) -> ObjectPath:
        return self

    resolve = absolute

    def _at(self, parts: tuple[str, ...]) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, parts, self.store)

    def __truediv__(self, name: str) -> ObjectPath:
        return self._at((*self.parts, *name.split("/")))

    def __str__(self) -> str:
        return "/".join((f"{self.scheme}://{self.bucket}", *self.parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPath.parse, (str(self),)  # another process makes its own requests


class _Folder(NamedTuple):
    folders: set[str]
    files: dict[str, FileFacts]


class _Block(NamedTuple):
    start: int
    content: Any

    def holds(self, wanted: range) -> bool:
        return bool(self.start <= wanted.start and wanted.stop <= self.start + self.content.size)


class ObjectStore:
    """Reads one bucket as it was when listed. Each answer is checked to be from the object in the listing."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self._client = Client(scheme, bucket)
        self._lock = Lock()
        self._threads = local()
        self._nodes: dict[str, tuple[FileFacts, dict[str, tuple[int, dict[str, Any]]]]] = {}
        """For each node's status file, by its key: the facts in the listing, and the statuses. `refresh` keeps both."""
        self.refresh()

    def refresh(self) -> None:
        self._runs: set[str] = set()
        """The keys of the runs that are listed completely."""
        self._folders: dict[str, _Folder] = {}
        self._manifests: dict[str, FileFacts | None] = {}
        """For each run, by its key: the facts about its manifest. None without a manifest."""
        self._kept: OrderedDict[str, list[_Block]] = OrderedDict()
        """The kept blocks of bytes, by the key of the object. The object read last comes last."""
        self._kept_bytes = 0
        self._shown: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {}

    @property
    def filesystem(self) -> Any:
        return self._client.filesystem

    def arrow_path(self, path: ObjectPath) -> str:
        return f"{path.bucket}/{path.key}"

    def is_directory(self, path: ObjectPath) -> bool:
        return self._manifest(path) is not None or any(self._entries(path))

    def is_file(self, path: ObjectPath) -> bool:
        return bool(path.parts) and self._file(path) is not None

    def exists(self, path: ObjectPath) -> bool:
        return self.is_directory(path) or self.is_file(path)

    def list_directory(self, path: ObjectPath, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        entries = self._entries(path)
        return sorted(entries.folders if directories else entries.files)

    def look_at(self, path: ObjectPath) -> FileFacts:
        if (seen := self._file(path)) is None:
            raise FileNotFoundError(2, "No such object", str(path))
        return seen

    def _file(self, path: ObjectPath) -> FileFacts | None:
        is_manifest = path.name == RUN_MANIFEST
        return self._manifest(path.parent) if is_manifest else self._entries(path.parent).files.get(path.name)

    def read_json(self, path: ObjectPath, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        """Read a manifest. It may be newer than the listing, because a growing run replaces its manifests."""
        try:
            size_bytes = self.look_at(path).size_bytes
            with self._lock:
                kept = self._kept.get(path.key)
            content = kept[0].content if kept else None
            if kept is None and size_bytes <= max_bytes:
                seen, content = self._get_manifest(path, max_bytes)
                size_bytes = seen.size_bytes
        except FileNotFoundError as error:
            raise NotARunError(f"{path}: no such object; expected a manifest of a run") from error
        if content is None or size_bytes > max_bytes:
            raise CorruptError(f"{path}: larger than the {max_bytes} bytes that a manifest may have")
        return parse_json(bytes(content), str(path))

    def _get_manifest(self, path: ObjectPath, max_bytes: int) -> tuple[FileFacts, Any]:
        def ask(client: Any) -> tuple[FileFacts, Any]:
            answer = client.get(path.key)
            seen = object_facts(answer.meta)
            return seen, pa.py_buffer(bytes(answer.bytes())) if seen.size_bytes <= max_bytes else None

        seen, content = self._client.ask(path, ask)
        if content is not None:
            self._keep(path.key, [_Block(0, content)])
        return seen, content

    def shown_statuses(self, run: ObjectPath) -> dict[str, tuple[int, dict[str, Any]]]:
        if run.key not in self._shown:
            names = [name for name in self.list_directory(run / NODES, directories=False) if name.endswith(".json")]
            found = self.each(lambda name: self._read_node(run / NODES / name), names)
            self._shown[run.key] = {key: status for statuses in found for key, status in statuses.items()}
        return self._shown[run.key]

    def _read_node(self, path: ObjectPath) -> dict[str, tuple[int, dict[str, Any]]]:
        if (seen := self.look_at(path)) == self._nodes.get(path.key, (None,))[0]:
            return self._nodes[path.key][1]
        try:
            shown = Members(self.read_json(path)).all_inner("writers")
        except RunError:  # the next call reads the file again
            return {}
        last_ns = max((one.count("changed_ns") for one in shown.values()), default=0)
        ahead_ns = seen.changed_ns - last_ns  # the store's clock may differ from the node's
        statuses = {key: (one.count("changed_ns") + ahead_ns, one.raw) for key, one in shown.items()}
        self._nodes[path.key] = seen, statuses
        return statuses

    def open_sealed(self, path: ObjectPath) -> RemoteFile:
        """Open an object that was listed. No request is made."""
        return RemoteFile(self, path, self.look_at(path))

    open_growing = open_sealed
    """Opens a shard that is still being written, without a request. A longer version may have replaced the object."""

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """Call the function in threads. To avoid a deadlock, a nested call runs in the calling thread."""
        items = list(items)
        if len(items) < 2 or getattr(self._threads, "is_ours", False):
            return [function(item) for item in items]

        def begin() -> None:
            self._threads.is_ours = True

        with ThreadPoolExecutor(min(_NUM_AT_ONCE, len(items)), "recorder-store", initializer=begin) as pool:
            return list(pool.map(function, items))  # after an error, `map` cancels what has not begun

    def blocks(self, path: ObjectPath, seen: FileFacts, wanted: Sequence[range]) -> list[_Block]:
        """Return blocks of an object, so that each wanted range lies in one block. A new block costs one GET."""
        with self._lock:
            kept = self._kept.get(path.key, [])
        missing = [byte_range for byte_range in wanted if not any(block.holds(byte_range) for block in kept)]
        is_index = path.name.endswith(".index") or path.name.lstrip("_").startswith("stats-")
        least_bytes = _INDEX_BLOCK_BYTES if is_index else _BLOCK_BYTES
        ranges = _joined(_widened(byte_range, seen.size_bytes, least_bytes) for byte_range in missing)
        new = [_Block(byte_range.start, self._get(path, seen, byte_range)) for byte_range in ranges]
        self._keep(path.key, [block for block in new if block.content.size <= max(least_bytes, _WHOLE_BYTES)])
        return kept + new

    def _keep(self, key: str, blocks: list[_Block]) -> None:
        with self._lock:
            self._kept[key] = self._kept.pop(key, []) + blocks
            self._kept_bytes += sum(block.content.size for block in blocks)
            while self._kept_bytes > _MAX_KEPT_BYTES:
                self._kept_bytes -= sum(block.content.size for block in self._kept.popitem(last=False)[1])

    def _get(self, path: ObjectPath, seen: FileFacts, byte_range: range) -> Any:
        def is_longer(meta: Any) -> bool:
            # A shard that is being written is replaced by longer objects with the same beginning. If an object begins
            # otherwise, the checksums of batches fail.
            return path.name.endswith(OPEN_SUFFIX) and meta["size"] >= seen.size_bytes

        def ask(client: Any) -> Any:
            answer = client.get(path.key, options={"range": (byte_range.start, byte_range.stop)})
            content = answer.bytes() if _is_seen(answer.meta, seen) or is_longer(answer.meta) else b""
            return np.frombuffer(content, np.uint8).copy()  # a copy is aligned; the client's bytes may not be

        content = self._client.ask(path, ask)
        if len(content) != len(byte_range):
            raise changed(path)
        return pa.py_buffer(content)

    def _manifest(self, folder: ObjectPath) -> FileFacts | None:
        if self._is_listed(folder):
            return self._folder(folder.key).files.get(RUN_MANIFEST)
        if folder.key not in self._manifests:
            seen = None
            with suppress(FileNotFoundError):
                seen, _ = self._get_manifest(folder / RUN_MANIFEST, MAX_MANIFEST_BYTES)
            self._manifests[folder.key] = seen
        return self._manifests[folder.key]

    def _is_listed(self, path: ObjectPath) -> bool:
        return any("/".join(path.parts[:stop]) in self._runs for stop in range(len(path.parts) + 1))

    def _folder(self, key: str) -> _Folder:
        return self._folders.setdefault(key, _Folder(set(), {}))

    def _entries(self, folder: ObjectPath) -> _Folder:
        """Return the entries directly below a path. A run is listed completely, with a thousand objects per request."""
        if folder.key not in self._folders and not self._is_listed(folder):
            prefix = folder.key or None
            if is_run := folder.name != NODES and self._manifest(folder) is not None:
                objects, folders = self._client.ask(folder, lambda client: client.list(prefix).collect()), []
            else:
                answer = self._client.ask(folder, lambda client: client.list_with_delimiter(prefix))
                objects, folders = answer["objects"], answer["common_prefixes"]
            self._folder(folder.key).folders.update(key.rpartition("/")[2] for key in folders)
            for meta in objects:
                parts = meta["path"].split("/")
                for stop in range(len(folder.parts), len(parts) - 1):
                    self._folder("/".join(parts[:stop])).folders.add(parts[stop])
                if len(parts) > len(folder.parts):  # else an empty object, which web consoles create for a folder
                    self._folder("/".join(parts[:-1])).files[parts[-1]] = object_facts(meta)
            for entries in self._folders.values():
                for name in entries.folders & entries.files.keys():
                    del entries.files[name]
            if is_run:
                self._runs.add(folder.key)
        return self._folder(folder.key)


class RemoteFile(ByteSource):
    """An object that is read by ranges of bytes. The store keeps recent bytes, but no payloads."""

    def __init__(self, store: ObjectStore, path: ObjectPath, seen: FileFacts) -> None:
        self.where = str(path)
        self.size_bytes = seen.size_bytes
        self._store = store
        self._path = path
        self._seen = seen

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """Read a range, or the wanted bytes in it, in few requests. Raises StoreError if the object was replaced."""
        check_range(self, offset, num_bytes)
        whole = range(offset, offset + num_bytes)
        byte_ranges = (
            [whole] if wanted is None else [whole[byte_range.start : byte_range.stop] for byte_range in wanted]
        )
        byte_ranges = [byte_range for byte_range in byte_ranges if len(byte_range)]
        blocks = self._store.blocks(self._path, self._seen, byte_ranges)
        for block in blocks:
            if block.holds(whole):
                return block.content.slice(offset - block.start, num_bytes)
        out = np.zeros(num_bytes, np.uint8)
        for byte_range in byte_ranges:
            block = next(block for block in blocks if block.holds(byte_range))
            content = np.frombuffer(block.content, np.uint8, len(byte_range), byte_range.start - block.start)
            out[byte_range.start - offset : byte_range.stop - offset] = content
        return pa.py_buffer(out)


def _widened(byte_range: range, size_bytes: int, least_bytes: int) -> range:
    """Return the range of bytes to request: all of a small object, and at least a block of a larger one."""
    if size_bytes <= _WHOLE_BYTES:
        return range(size_bytes)
    start = max(min(byte_range.start, size_bytes - least_bytes), 0)
    return range(start, min(max(byte_range.stop, start + least_bytes), size_bytes))


def _joined(byte_ranges: Iterable[range]) -> list[range]:
    joined: list[range] = []
    for byte_range in sorted(byte_ranges, key=lambda byte_range: byte_range.start):
        if joined and byte_range.start - joined[-1].stop <= _WHOLE_BYTES:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, byte_range.stop))
        else:
            joined.append(byte_range)
    return joined


def object_facts(meta: Any) -> FileFacts:
    """Return the facts about an object from its metadata in an answer or a listing of a store."""
    changed_ns = int(meta["last_modified"].timestamp() * 1e9)
    return FileFacts(meta["size"], changed_ns, e_tag=bare_e_tag(meta["e_tag"]))


def _is_seen(meta: Any, seen: FileFacts) -> bool:
    """Return True if an answer is from the listed object. Some stores omit the ETag in answers or in listings."""
    answered = object_facts(meta)
    is_same = answered.e_tag == seen.e_tag or not (answered.e_tag and seen.e_tag)
    return is_same and answered.size_bytes == seen.size_bytes


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CUT = re.compile(rf"({'|'.join(KINDS)}):/(?=[^/])", re.IGNORECASE)
"""The beginning of a URL in which pathlib has replaced the two slashes by one."""
_NUM_TRIES = 3


class LocalStore(Store):
    """Reads directories of this machine: only regular files, never through a symbolic link."""

    is_directory = staticmethod(Path.is_dir)
    is_file = staticmethod(Path.is_file)
    exists = staticmethod(Path.exists)
    open_sealed = staticmethod(MappedFile)
    open_growing = staticmethod(GrowingFile)
    arrow_path = staticmethod(str)

    def list_directory(self, path: Path, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        for is_last_try in [False] * (_NUM_TRIES - 1) + [True]:
            try:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in entries if _is_wanted(entry, directories, is_part))
            except OSError as error:
                if is_last_try or error.errno != errno.ESTALE:
                    raise NotARunError(f"{path}: cannot be listed ({error.strerror})") from error
        raise AssertionError("the last attempt returns or raises")

    def look_at(self, path: Path) -> FileFacts:
        return FileFacts.of(os.stat(path, follow_symlinks=False))

    def read_json(self, path: Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        return read_json(path, max_bytes)


def _is_wanted(entry: os.DirEntry[str], directories: bool, is_part: IsPart) -> bool:
    is_directory, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
    if entry.is_symlink() and is_part(entry.name):
        raise NotARunError(
            f"{entry.path}: is a symbolic link, and links in a run are not followed; replace the link by its target, "
            "or copy the run with `cp -rL`"
        )
    if not is_directory and not is_file and is_part(entry.name):
        raise NotARunError(f"{entry.path}: is a pipe, a socket or a device, where a run has files; remove it")
    return is_directory if directories else is_file


LOCAL = LocalStore()


Location = Path | ObjectPath
"""The path of a run, or of a file in a run."""
OpenLocation = Path | Any
"""The type of a run's location. If it is a directory, callers may use it as a `Path` without a cast."""


def store_of(location: Location) -> Store:
    """Return the store that a location is in."""
    return LOCAL if isinstance(location, Path) else location.store


def location_of(path: str | os.PathLike[str] | Location) -> Location:
    """Return the location of a path, a URL or a path object.

    Raises NotARunError for an empty text, an unknown kind of store, and a URL that names no folder.
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
    """Return the scheme of a URL in lower case. Return None for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else None
