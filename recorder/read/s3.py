"""Owns runs in an S3 store: one listing of a run, objects by ranges of bytes, and what is said where a store refuses.

Must never write, never wait without an end, and never show what a store or the environment says of credentials.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from functools import cached_property
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple, NoReturn, Self
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from ..errors import CorruptError, NotARunError, StoreError
from ..format.rundir import MAX_MANIFEST_BYTES, RUN_MANIFEST, parse_json
from .files import check_range
from .places import Found, IsPart, Item, S3Path, Seen

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5
_SILENCE_TIMEOUT_S = 5
"""Without a byte. A request is tried `_NUM_TRIES` times, so that a store that hangs is given up after 20 s."""
_NUM_TRIES = 3
_NUM_AT_ONCE = 16
"""Requests under way: a store takes 20 to 50 ms for each, and a run of 64 ranks needs some 200."""

_WHOLE_BYTES = 512 << 10
"""A smaller object is read at once, and so is what lies so near together: a request takes as long as these bytes."""
_BLOCK_BYTES = 64 << 10
"""Least that is asked for: the schema, the footer and the seal of a shard, or the head of a batch, fit into it."""
_LIGHT_BLOCK_BYTES = 8 << 20
"""The same of objects without payloads, of which most is wanted sooner or later."""
_MAX_KEPT_BLOCKS = 4
"""Of each object, for the next question; larger pieces are payloads, and kept by those who asked for them."""
_NUM_RECENT = 32
"""Objects that are remembered although nobody holds them."""

_REASON = re.compile(r"AWS Error ([A-Z_]+)(?: \(HTTP status (\d+)\))?")
_CURL = re.compile(r"curlCode: (\d+), ([A-Za-z' ]+)")
_UNREACHED = {
    "6": "its host is not known",
    "7": "it takes no connection",
    "28": "it does not answer",
    "35": "it does not speak TLS",
}
"""By curl's numbers; its texts change from version to version."""
_CREDENTIALS = {
    "ACCESS_DENIED": "access is denied",
    "INVALID_ACCESS_KEY_ID": "the access key is unknown",
    "SIGNATURE_DOES_NOT_MATCH": "the secret key does not fit the access key",
    "INVALID_CLIENT_TOKEN_ID": "the session token is not valid",
    "EXPIRED_TOKEN": "the session token has expired",
    "EXPIREDTOKEN": "the session token has expired",
    "INVALID_TOKEN": "the session token is not valid",
    "REQUEST_EXPIRED": "the request's time is not accepted; set this machine's clock",
    "REQUEST_TIME_TOO_SKEWED": "the request's time is not accepted; set this machine's clock",
}
_WHERE_FROM = "AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"


class _Folder(NamedTuple):
    """What is right below a place."""

    folders: dict[str, None]
    files: dict[str, Seen]


_NOTHING = _Folder({}, {})


class S3Store:
    """One bucket, as it was when it was listed. Objects are opened by the answer to one request for each."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._lock = Lock()
        self._opened: WeakValueDictionary[str, RemoteFile] = WeakValueDictionary()
        self._recent: deque[RemoteFile] = deque(maxlen=_NUM_RECENT)
        self._threads = local()
        self.refresh()

    def refresh(self) -> None:
        self._runs: set[str] = set()
        """Keys of runs of which all is listed."""
        self._folders: dict[str, _Folder] = {}
        """By their keys."""
        with self._lock:
            self._opened.clear()
            self._recent.clear()
        self._manifests: dict[str, Any] = {}
        """Of runs, opened; None where there is none."""

    @cached_property
    def filesystem(self) -> Any:
        return _connect()

    def is_directory(self, path: S3Path) -> bool:
        return self._has_manifest(path) or any(self._entries(path))

    def is_file(self, path: S3Path) -> bool:
        if path.name == RUN_MANIFEST:
            return self._has_manifest(path.parent)
        return bool(path.parts) and path.name in self._entries(path.parent).files

    def exists(self, path: S3Path) -> bool:
        return self.is_directory(path) or self.is_file(path)

    def list_directory(self, path: S3Path, *, directories: bool, is_part: IsPart = lambda name: False) -> list[str]:
        found = self._entries(path)
        return sorted(found.folders if directories else found.files)

    def look_at(self, path: S3Path) -> Seen:
        found = self._entries(path.parent).files.get(path.name)
        if found is None:
            raise FileNotFoundError(2, "No such object", str(path))
        return found

    def read_json(self, path: S3Path, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
        try:
            file = self._manifests.get(path.parent.key) if path.name == RUN_MANIFEST else None
            file = file or self.open(path)
            num_bytes = file.size()
            if num_bytes > max_bytes:
                raise CorruptError(f"{path}: larger than the {max_bytes} bytes that a manifest may have")
            text = self.get(path, file, 0, num_bytes) if num_bytes else b""
        except FileNotFoundError as error:
            raise NotARunError(f"{path}: no such object; expected a manifest of a run") from error
        return parse_json(bytes(text), str(path))

    def open_sealed(self, path: S3Path) -> RemoteFile:
        """A look at the listing; nothing is asked of the store yet. Who has it open already is given the same."""
        with self._lock:
            found = self._opened.get(path.key)
            if found is None:
                found = self._opened[path.key] = RemoteFile(self, path, self.look_at(path).size_bytes)
                self._recent.append(found)
        return found

    def open_growing(self, path: S3Path) -> RemoteFile:
        """The same: an object never grows, it is replaced by another."""
        return self.open_sealed(path)

    def each(self, function: Callable[[Item], Found], items: Iterable[Item]) -> Iterable[Found]:
        """In threads. Asked by one of these, in that thread: they would wait for each other."""
        items = list(items)
        if len(items) < 2 or getattr(self._threads, "is_ours", False):
            return [function(item) for item in items]

        def begin() -> None:
            self._threads.is_ours = True

        with ThreadPoolExecutor(min(_NUM_AT_ONCE, len(items)), "recorder-s3", initializer=begin) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def arrow_path(self, path: S3Path) -> str:
        return f"{path.bucket}/{path.key}"

    def open(self, path: S3Path) -> Any:
        """An Arrow file: one HEAD. FileNotFoundError: there is no such object."""
        try:
            return self.filesystem.open_input_file(self.arrow_path(path))
        except FileNotFoundError as error:
            raise FileNotFoundError(2, "No such object", str(path)) from error
        except OSError as error:
            if _is_refusal(str(error)):
                self._list(path.parent, is_whole=False)  # the answer to this one, unlike that to a HEAD, says why
            _refuse(error, path)

    def get(self, path: S3Path, file: Any, offset: int, num_bytes: int) -> Any:
        """Some bytes of an open object: one GET."""
        try:
            found = file.read_at(num_bytes, offset)
        except OSError as error:
            if _CURL.search(str(error)) is None:
                self.check_unchanged(path, file)
            _refuse(error, path)
        if len(found) != num_bytes:
            raise _changed(path)
        return found

    def check_unchanged(self, path: S3Path, file: Any) -> None:
        """Ask again what an open object is, once its bytes are not what was expected.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: there is another in its place.
        """
        if _identity(self.open(path)) != _identity(file):
            raise _changed(path)

    def _has_manifest(self, folder: S3Path) -> bool:
        if self._is_listed(folder):
            return RUN_MANIFEST in self._folders.get(folder.key, _NOTHING).files
        if folder.key not in self._manifests:
            try:
                self._manifests[folder.key] = self.open(folder / RUN_MANIFEST)
            except FileNotFoundError:
                self._manifests[folder.key] = None
        return self._manifests[folder.key] is not None

    def _is_listed(self, path: S3Path) -> bool:
        """Whether a place is or lies in a run of which all is listed."""
        return any("/".join(path.parts[:stop]) in self._runs for stop in range(len(path.parts) + 1))

    def _entries(self, folder: S3Path) -> _Folder:
        """What is right below a place. A run is listed as a whole, by a request for each thousand of its objects."""
        if folder.key not in self._folders and not self._is_listed(folder):
            is_run = self._has_manifest(folder)
            self._folders[folder.key] = _Folder({}, {})
            for parts, seen in self._list(folder, is_whole=is_run):
                for stop in range(len(folder.parts), len(parts)):
                    at = self._folders.setdefault("/".join(parts[:stop]), _Folder({}, {}))
                    if stop + 1 < len(parts) or seen is None:
                        at.folders[parts[stop]] = None
                    else:
                        at.files[parts[stop]] = seen
            if is_run:
                self._runs.add(folder.key)
        return self._folders.get(folder.key, _NOTHING)

    def _list(self, folder: S3Path, *, is_whole: bool) -> list[tuple[list[str], Seen | None]]:
        """The parts of the keys of all objects below a place, or of all objects and, as None, directories in it."""
        from pyarrow.fs import FileSelector, FileType

        try:
            found = self.filesystem.get_file_info(FileSelector(self.arrow_path(folder).rstrip("/"), recursive=is_whole))
        except FileNotFoundError:
            return []
        except OSError as error:
            _refuse(error, folder)
        listed = [(info.path.split("/")[1:], info) for info in found if info.type == FileType.File or not is_whole]
        return [
            (parts, Seen(info.size, info.mtime_ns or 0) if info.type == FileType.File else None)
            for parts, info in listed
        ]


class RemoteFile:
    """An object by ranges of its bytes. What was read of it once is kept, but for payloads."""

    def __init__(self, store: S3Store, path: S3Path, size_bytes: int) -> None:
        self.where = str(path)
        self.size_bytes = size_bytes
        self._store = store
        self._path = path
        is_light = path.name.endswith(".index") or path.name.lstrip("_").startswith("stats-")
        self._block_bytes = _LIGHT_BLOCK_BYTES if is_light else _BLOCK_BYTES
        self._file: Any = None
        self._kept: list[tuple[int, Any]] = []
        """Offset and bytes of each range, in order."""

    def read(self, offset: int, num_bytes: int, wanted: Sequence[range] | None = None) -> Any:
        """What is wanted of a range, by as few requests as it takes."""
        check_range(self, offset, num_bytes)
        pieces = [range(num_bytes)] if wanted is None else [piece for piece in wanted if len(piece)]
        have = self._have([range(offset + piece.start, offset + piece.stop) for piece in pieces])
        for start, buffer in have:
            if _holds(start, buffer, offset, offset + num_bytes):
                return buffer.slice(offset - start, num_bytes)
        out = np.zeros(num_bytes, np.uint8)
        for piece in pieces:
            begin, end = offset + piece.start, offset + piece.stop
            start, buffer = next(one for one in have if _holds(*one, begin, end))
            out[piece.start : piece.stop] = np.frombuffer(buffer, np.uint8, len(piece), begin - start)
        return pa.py_buffer(out)

    def data_ranges(self, start: int) -> Iterator[range]:
        """All of it: objects have no holes."""
        yield range(start, self.size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Where the bytes made no sense, see that it is the object that was listed.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it is another.
        """
        if isinstance(exception[1], CorruptError) and self._file is not None:
            self._store.check_unchanged(self._path, self._file)

    def _have(self, wanted: list[range]) -> list[tuple[int, Any]]:
        """Kept ranges and new ones, among which each of the `wanted` lies whole in one."""
        missing = [piece for piece in wanted if not any(_holds(*one, piece.start, piece.stop) for one in self._kept)]
        new = [(piece.start, self._get(piece)) for piece in _joined(map(self._widened, missing))]
        have = self._kept + new
        small = [one for one in new if one[1].size <= max(self._block_bytes, _WHOLE_BYTES)]
        self._kept = (self._kept + small)[-_MAX_KEPT_BLOCKS:]
        return have

    def _widened(self, piece: range) -> range:
        """A range worth a request: a small object as a whole, else no less than a block."""
        if self.size_bytes <= _WHOLE_BYTES:
            return range(self.size_bytes)
        start = max(min(piece.start, self.size_bytes - self._block_bytes), 0)
        return range(start, min(max(piece.stop, start + self._block_bytes), self.size_bytes))

    def _get(self, piece: range) -> Any:
        if self._file is None:
            file = self._store.open(self._path)
            if file.size() != self.size_bytes:
                raise _changed(self._path)
            self._file = file
        return pa.py_buffer(self._store.get(self._path, self._file, piece.start, len(piece)))


def _holds(start: int, buffer: Any, begin: int, end: int) -> bool:
    return bool(start <= begin and end <= start + buffer.size)


def _joined(pieces: Iterable[range]) -> list[range]:
    """Ranges in order; those with little between them as one."""
    found: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if found and piece.start - found[-1].stop <= _WHOLE_BYTES:
            found[-1] = range(found[-1].start, max(found[-1].stop, piece.stop))
        else:
            found.append(piece)
    return found


def _identity(file: Any) -> tuple[Any, ...]:
    return file.size(), (file.metadata() or {}).get("ETag")


def _changed(path: S3Path) -> StoreError:
    return StoreError(f"{path}: there is another object in its place since the run was listed; open the run again")


def _connect() -> Any:
    """The client, by the environment and the profile that every AWS tool reads."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    options: dict[str, Any] = {}
    endpoint = endpoint_url(os.environ)
    if endpoint:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc:
            raise StoreError("AWS_ENDPOINT_URL: expected http://HOST:PORT or https://HOST:PORT, without a user")
        options |= {"scheme": url.scheme, "endpoint_override": url.netloc + url.path.rstrip("/")}
    options |= {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "request_timeout": _SILENCE_TIMEOUT_S,
        "retry_strategy": AwsStandardS3RetryStrategy(max_attempts=_NUM_TRIES),
    }
    try:
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            try:
                return S3FileSystem(tls_ca_file_path=bundle, **options)
            except TypeError:
                logger.warning(
                    "AWS_CA_BUNDLE: pyarrow %s does not know it and takes the system's; upgrade it", pa.__version__
                )
        return S3FileSystem(**options)
    except (OSError, ValueError) as error:
        raise StoreError(f"s3://: no client can be made for the endpoint ({type(error).__name__})") from None


def endpoint_url(environ: Mapping[str, str]) -> str:
    """Where the store is, by the environment or the profile; empty for Amazon's. pyarrow does not look for itself."""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    found = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if found:
        return found
    profile = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    config = ConfigParser(interpolation=None)
    try:
        config.read(Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser())
    except (ConfigParserError, OSError, RuntimeError, UnicodeDecodeError):
        return ""  # whoever has the credentials in it is told by the store
    section = "default" if profile == "default" else f"profile {profile}"
    return config.get(section, "endpoint_url", fallback="")


def _has_credentials() -> bool:
    """Whether anything says where credentials are."""
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    )
    path = Path(os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"))
    return any(os.environ.get(name) for name in names) or path.is_file()


def _is_refusal(text: str) -> bool:
    """Whether a store has answered, and not that it is out of order."""
    found = _REASON.search(text)
    return found is not None and (found[1] == "ACCESS_DENIED" or (found[2] or "").startswith("4"))


def _refuse(error: OSError, path: S3Path) -> NoReturn:
    """Say in our own words what went wrong: what the store sends back may hold an access key.

    Raises:
        StoreError: always.
    """
    text = str(error)
    what = f"s3://{path.bucket}"
    where = endpoint_url(os.environ) or "Amazon S3"
    if curl := _CURL.search(text):
        reason = _UNREACHED.get(curl[1], curl[2].strip().lower())
        advice = "; AWS_ENDPOINT_URL says where the store is" if curl[1] in _UNREACHED else ""
        raise StoreError(f"{what}: the store at {where} cannot be reached: {reason}{advice}") from None
    found = _REASON.search(text)
    code, status = (found[1], found[2] or "") if found else ("", "")
    if "ExceptionName: " in text:
        code = text.partition("ExceptionName: ")[2].partition(" ")[0].upper()
    if code == "NO_SUCH_BUCKET":
        raise StoreError(f"{what}: no such bucket in the store at {where}") from None
    if code == "RESOURCE_NOT_FOUND":
        raise StoreError(f"{what}: no such bucket at {where}, or that is no S3 store") from None
    if code in _CREDENTIALS or status in ("401", "403"):
        reason = _CREDENTIALS.get(code, "access is denied")
        if not _has_credentials():
            raise StoreError(f"{what}: no credentials were found, and {where} wants some: set {_WHERE_FROM}") from None
        raise StoreError(f"{what}: {where} refuses the credentials: {reason}; see {_WHERE_FROM}") from None
    if status == "301" or code == "PERMANENTREDIRECT":
        raise StoreError(f"{what}: the bucket is in another region; set AWS_REGION to it") from None
    shown = " ".join(part for part in (code if code != "UNKNOWN" else "", f"HTTP {status}" if status else "") if part)
    raise StoreError(f"{path}: {where} failed ({shown or 'no reason given'}); try again") from None
