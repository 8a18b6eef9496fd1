"""The destination of runs: a bucket or a folder.

A new file is put only if its name is free. A document is replaced only if it is still the version that was last put or
read. A file's put to a bucket is verified: by the returned ETag if that is S3's MD5, else by reading the object back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from crc32c import crc32c

from ..errors import ConfigError, NotARunError, StoreError
from ..run.finding import FLEET
from ..storage.clients import KINDS, SCHEMES, Client, bare_e_tag
from ..storage.locations import location_of, object_facts, scheme_of
from ..storage.untrusted_files import FileFacts
from ..system.processes import sync_directory
from .telemetry import Requests
from .watching import LocalFile

PART_BYTES = 5 << 20
"""The part size of a multipart upload: S3's minimum. A slow link can then send a part within `_SILENCE_S`."""
_PIECE_BYTES = 1 << 18
_SILENCE_S = 30.0
_NUM_TRIES = 2
"""How many times the client tries a request. A job whose request failed is run again while the daemon runs."""
_CRC_KEY = "recordercrc32c"
"""The metadata key under which an object keeps the CRC32C of the bytes that were sent."""
_PROBE = f"{FLEET}/_conditions"
"""The object with which a daemon tests whether a store honours conditional uploads (If-None-Match, If-Match)."""
_JUDGES = b"judged\n"
_MD5 = re.compile(r"[0-9a-f]{32}")
_CUT_SCHEME = re.compile(rf"(file|{'|'.join(KINDS)})(?:[:/]+|$)", re.IGNORECASE)
"""Matches the beginning of a path that was probably meant to be a URL, such as ``s3//bucket``."""

Answer = TypeVar("Answer")


class TakenError(Exception):
    """The condition of an upload does not hold. The name is taken, or the object to replace has changed or is gone."""


class Throttle:
    """Limits the bytes per second that all threads together send. A limit of 0 means no limit."""

    def __init__(self, max_bytes_per_s: int) -> None:
        self.max_bytes_per_s = max_bytes_per_s
        self.taken_bytes = 0
        """The number of bytes that callers have asked to send so far. Shows progress to `Daemon.run_once`."""
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until this number of bytes may be sent."""
        with self._lock:
            self.taken_bytes += num_bytes
            if not self.max_bytes_per_s:
                return
            now = time.monotonic()
            begin_s = max(self._free_at_s, now)
            self._free_at_s = begin_s + num_bytes / self.max_bytes_per_s
        time.sleep(max(begin_s - now, 0))

    def paced(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield each piece as soon as the limit allows the piece to be sent."""
        for piece in pieces:
            self.take(len(piece))
            yield piece


class Destination(Protocol):
    """The place to which a daemon ships runs. Keys are relative to `url`. Any thread may call the methods."""

    url: str
    requests: Requests
    """Counts the requests to the destination. Uploads in parts and files that are read back are not counted."""
    path: Path | None = None
    """The folder of the runs, or None if they are in a bucket."""
    puts_are_free: bool = False
    """False if each put costs a request. The statuses of a node's ranks are then put as one document."""

    def put_new(self, key: str, file: LocalFile) -> str:
        """Put a file that never changes, and return how the destination confirmed the file.

        The result is ``etag`` (the ETag is as expected), ``read`` (the object was read back), ``synced``, or ``there``
        (an equal object was there before). Raise TakenError if another object has the name, and StoreError if the store
        fails. The StoreError is of the kind ``damaged`` if the store has stored other bytes. Then try again.
        """

    def put_if(self, key: str, content: bytes, e_tag: str | None) -> str:
        """Create a document if `e_tag` is None, else replace the document that has this ETag. Return the new ETag.

        Raise TakenError if another document exists or the expected one is gone, and StoreError as `put_new` does.
        """

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return a small document and its ETag, or None if there is none. A damaged document is returned empty."""

    def listing(self, prefix: str) -> Iterator[tuple[str, FileFacts]]: ...
    def delete(self, keys: list[str]) -> None: ...  # an object that is already gone is no error
    def check(self) -> None: ...  # `check` raises StoreError if the destination ignores the conditions of uploads
    def renew(self) -> None:
        """Read the credentials again, if there are any."""
        return


class Bucket(Destination):
    """A destination in an object store, below a prefix in a bucket."""

    def __init__(self, scheme: str, bucket: str, prefix: str, throttle: Throttle) -> None:
        self.url = "/".join(filter(None, (f"{scheme}://{bucket}", prefix)))
        self._prefix = f"{prefix}/" if prefix else ""
        self._throttle = throttle
        self._client = Client(scheme, bucket, silence_s=_SILENCE_S, num_tries=_NUM_TRIES)
        self.requests = Requests()
        self._tag = self._client.kind.version_tag
        self._is_checked = False

    def renew(self) -> None:
        self._client.renew()

    def check(self) -> None:
        """Raise StoreError unless the store honours conditions such as If-Match. Later checks cost one GET."""
        held = self.get(_PROBE)
        if held is None or held[0] != _JUDGES:
            self._try_conditions()
        self._is_checked = True

    def _try_conditions(self) -> None:
        """Test on the object `_PROBE` whether the store honours conditional uploads. Record success in the object."""
        with contextlib.suppress(TakenError):
            self._put_if(_PROBE, b"?", None)
        for wrong in (None, "1" if self._tag == "version" else "0" * 32):
            with contextlib.suppress(TakenError, FileNotFoundError):
                self._put_if(_PROBE, b"?", wrong)
                raise StoreError(
                    f"{self.url}: the store takes puts whose conditions (If-None-Match, If-Match) do not hold, so that"
                    " what is there could be overwritten; nothing is shipped there; name another store"
                )
        held = self.get(_PROBE)
        with contextlib.suppress(TakenError):  # another daemon has just put the object
            self._put_if(_PROBE, _JUDGES, held[1] if held is not None else None)

    def put_new(self, key: str, file: LocalFile) -> str:
        if not self._is_checked:
            self.check()
        crc, e_tag = _digests(file)
        try:
            if file.size_bytes <= PART_BYTES:
                put_e_tag = self._put(key, file.bytes(0, file.size_bytes), "create", "e_tag")
            else:
                if self.head(key) is not None:
                    raise TakenError(key)
                put_e_tag = self._ask(key, lambda store: self._put_parts(store, key, file, crc), is_long=True)
        except TakenError:
            if (held := self.head(key)) is None:
                raise
            facts, claimed = held
            if facts.size_bytes == file.size_bytes and (facts.e_tag == e_tag or self._reads_same(key, file)):
                return "there"
            if claimed == f"{crc:08x}":  # an earlier upload of this file has damaged content
                self._delete_damaged(key)
            raise
        if put_e_tag == e_tag:
            return "etag"
        if not self._reads_same(key, file):
            self._delete_damaged(key)
        return "read"

    def _delete_damaged(self, key: str) -> None:
        self.delete([key])
        raise self._damaged(key)

    def _damaged(self, key: str) -> StoreError:
        text = f"{self.url}/{key}: the store has kept other bytes than were sent; they are sent again"
        return StoreError(text, "damaged")

    def _put_parts(self, store: Any, key: str, file: LocalFile, crc: int) -> str:
        import obstore

        pieces, attributes = self._throttle.paced(_pieces(file)), {_CRC_KEY: f"{crc:08x}"}
        options: dict[str, Any] = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": 2}
        return bare_e_tag(obstore.put(store, self._prefix + key, pieces, attributes=attributes, **options)["e_tag"])

    def put_if(self, key: str, content: bytes, e_tag: str | None) -> str:
        if not self._is_checked:
            self.check()
        return self._put_if(key, content, e_tag)

    def _put_if(self, key: str, content: bytes, e_tag: str | None) -> str:
        mode: Any = "create" if e_tag is None else {self._tag: f'"{e_tag}"' if self._tag == "e_tag" else e_tag}
        tag = self._put(key, content, mode, self._tag)
        if _MD5.fullmatch(tag) is not None and tag != _md5(content):
            there = self.get(key)
            if there is None or there[0] != content:
                raise self._damaged(key)
            return there[1]
        return tag

    def _put(self, key: str, content: bytes, mode: Any, tag: str) -> str:
        """Put an object with its checksum, under a condition, and return the part `tag` of the store's answer."""
        import obstore

        self._throttle.take(len(content))
        attributes, path = {_CRC_KEY: f"{crc32c(content):08x}"}, self._prefix + key
        answer: Any = self._ask(key, lambda store: obstore.put(store, path, content, mode=mode, attributes=attributes))
        return bare_e_tag(answer[tag])

    def get(self, key: str) -> tuple[bytes, str] | None:
        def ask(store: Any) -> tuple[bytes, str]:
            answer = store.get(self._prefix + key)
            content, claimed = bytes(answer.bytes()), dict(answer.attributes).get(_CRC_KEY)
            is_damaged = claimed is not None and claimed != f"{crc32c(content):08x}"
            return b"" if is_damaged else content, bare_e_tag(answer.meta[self._tag])

        return self._ask_if_there(key, ask)

    def head(self, key: str) -> tuple[FileFacts, str | None] | None:
        """Return the facts about an object, and the checksum that was sent with it. Return None if it is missing."""

        def ask(store: Any) -> tuple[FileFacts, str | None]:
            answer = store.get(self._prefix + key, options={"head": True})
            return object_facts(answer.meta), dict(answer.attributes).get(_CRC_KEY)

        return self._ask_if_there(key, ask)

    def listing(self, prefix: str) -> Iterator[tuple[str, FileFacts]]:
        wanted = (self._prefix + prefix).strip("/")
        metas = self._ask(prefix, lambda store: store.list(wanted or None).collect())
        for meta in metas:
            yield meta["path"].removeprefix(self._prefix), object_facts(meta)

    def delete(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):
            paths = [self._prefix + key for key in keys[start : start + 1000]]
            self._ask_if_there(keys[start], lambda store, paths=paths: store.delete(paths))  # type: ignore[misc]

    def _reads_same(self, key: str, file: LocalFile) -> bool:
        def ask(store: Any) -> bool:
            offset = 0
            for piece in store.get(self._prefix + key).stream(min_chunk_size=_PIECE_BYTES):
                content = bytes(piece)
                if offset + len(content) > file.size_bytes or file.bytes(offset, len(content)) != content:
                    return False
                offset += len(content)
            return offset == file.size_bytes

        return bool(self._ask_if_there(key, ask, is_long=True))

    def _ask_if_there(self, key: str, question: Callable[[Any], Answer], *, is_long: bool = False) -> Answer | None:
        try:
            return self._ask(key, question, is_long=is_long)
        except FileNotFoundError:
            return None

    def _ask(self, key: str, question: Callable[[Any], Answer], *, is_long: bool = False) -> Answer:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with contextlib.nullcontext() if is_long else self.requests.one():
                return self._client.ask(f"{self.url}/{key}", question)
        except (AlreadyExistsError, PreconditionError):
            raise TakenError(key) from None


class FolderDestination(Destination):
    """A destination that is a folder, maybe on another machine. Each put is synced to the disk."""

    puts_are_free = True

    def __init__(self, path: Path, throttle: Throttle) -> None:
        self.url = f"file://{path}"
        self.requests = Requests()
        self.path: Path = path
        self._throttle = throttle

    def check(self) -> None:
        self.get(_PROBE)

    def put_new(self, key: str, file: LocalFile) -> str:
        with self._written(key, self._throttle.paced(_pieces(file))) as (temporary, final):
            try:
                os.link(temporary, final)
            except FileExistsError:
                if not _is_same_file(final, file):
                    raise TakenError(key) from None
                return "there"
        return "synced"

    def put_if(self, key: str, content: bytes, e_tag: str | None) -> str:
        with self._written(key, [content]) as (temporary, final):
            if e_tag is None:
                try:
                    os.link(temporary, final)
                except FileExistsError:
                    raise TakenError(key) from None
            else:
                held = self.get(key)
                if held is None or held[1] != e_tag:
                    raise TakenError(key)
                os.replace(temporary, final)
        return _md5(content)

    @contextlib.contextmanager
    def _written(self, key: str, pieces: Iterable[bytes]) -> Iterator[tuple[Path, Path]]:
        """Write and sync a temporary file. Yield its path and the final path, then remove the temporary name."""
        final = self.path / key
        temporary = final.with_name(f"_{final.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as out:
                out.writelines(pieces)
                out.flush()
                os.fsync(out.fileno())
            yield temporary, final
            sync_directory(final.parent)
        except OSError as error:
            raise _refused(error, final) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def get(self, key: str) -> tuple[bytes, str] | None:
        try:
            content = (self.path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _refused(error, self.path / key) from error
        return content, _md5(content)

    def listing(self, prefix: str) -> Iterator[tuple[str, FileFacts]]:
        for folder, _, names in os.walk(self.path / prefix):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and not name.endswith(".tmp"):
                        yield str(path.relative_to(self.path)), FileFacts.of(status)

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                (self.path / key).unlink(missing_ok=True)
            except OSError as error:
                raise _refused(error, self.path / key) from error
            folder = (self.path / key).parent
            while folder != self.path:
                try:
                    folder.rmdir()
                except OSError:  # `rmdir` refuses a folder that is not empty
                    break
                folder = folder.parent


def parse_destination(text: str, throttle: Throttle | None = None) -> Destination:
    """Return the destination that a URL or a path names. Make no request. Raise ConfigError for any other text."""
    throttle = throttle or Throttle(0)
    if scheme_of(text) not in (None, "file", *KINDS):
        raise ConfigError(f"to = {text!r}: expected a folder, or one of {SCHEMES}")
    try:
        location = location_of(text)
    except NotARunError as error:
        raise ConfigError(f"to = {error}") from None
    if isinstance(location, Path):
        if scheme_of(text) is None and (cut := _CUT_SCHEME.match(text)):
            url = f"{cut[1].lower()}://{'/' * (cut[1].lower() == 'file')}{text[cut.end() :].lstrip('/')}"
            raise ConfigError(f"to = {text!r}: is no URL; write {url!r}, or for the folder of this name './{text}'")
        return FolderDestination(Path(os.path.realpath(location)), throttle)
    return Bucket(location.scheme, location.bucket, location.key, throttle)


def _pieces(file: LocalFile) -> Iterator[bytes]:
    for offset in range(0, file.size_bytes, _PIECE_BYTES):
        yield file.bytes(offset, min(_PIECE_BYTES, file.size_bytes - offset))


def _digests(file: LocalFile) -> tuple[int, str]:
    """Return the CRC32C of a file, and the ETag that S3 gives it after an upload in parts of `PART_BYTES`."""
    crc, parts = 0, [hashlib.md5(usedforsecurity=False)]
    for number, piece in enumerate(_pieces(file)):
        if number and number * _PIECE_BYTES % PART_BYTES == 0:
            parts.append(hashlib.md5(usedforsecurity=False))
        crc = crc32c(piece, crc)
        parts[-1].update(piece)
    if len(parts) == 1:
        return crc, parts[0].hexdigest()
    return crc, f"{_md5(b''.join(part.digest() for part in parts))}-{len(parts)}"


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _is_same_file(path: Path, file: LocalFile) -> bool:
    try:
        with open(path, "rb") as other:
            if os.fstat(other.fileno()).st_size != file.size_bytes:
                return False
            return all(other.read(len(piece)) == piece for piece in _pieces(file))
    except FileNotFoundError:
        return False


def _refused(error: OSError, path: Path) -> StoreError:
    return StoreError(f"{path}: the destination refuses ({error.strerror or error})", "failed")
