"""The files of a run directory other than rows: their names, the version of the format, and their JSON.

Manifests are untrusted input. `Members` reads each member of a JSON object as the type that is expected. A missing or
null member has its default value. So has a member of another type, which is also removed from the object and reported
in a sentence. This module needs neither numpy nor pyarrow. A name found on disk must never be used as a path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from crc32c import crc32c

from ..errors import CorruptError, NotARunError, UnsupportedError, install_line
from ..sites import FORMAT_NAME, FORMAT_VERSION, PROBE
from ..system.text import shortened

RUN_MANIFEST = "_run.json"
WRITER_MANIFEST = "_writer.json"
MERGE_MANIFEST = "_merge.json"
"""The file in the output of a merge that names the source run and the merge's options."""
SHARD_KINDS = ("tensors", "stats", PROBE)
MAX_MANIFEST_BYTES = 64 << 20
"""The most bytes of a manifest. 50,000 modules with their sites need 15 MB; no recorder writes a larger file."""

CHECKSUM = "crc32c"
"""The key of a manifest's first member: the CRC32C of all bytes after the comma behind this member."""

_CHECKSUM = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')
_RANK_DIR = re.compile(r"rank=([0-9]{5,9})")
_WRITER_DIR = re.compile(r"[0-9]{6,}-[0-9a-f]{12}")
"""The names that this recorder gives to writers' directories. Other software may choose any name."""
_SHARD = re.compile(rf"({'|'.join(SHARD_KINDS)})-([0-9]{{6,9}})\.arrow")
_OPEN_PREFIX = "_"
OPEN_SUFFIX = ".open"
"""The suffix of the name of a shard that is being written."""


class ShardName(NamedTuple):
    """The parts of a shard's file name: its kind, its number, and whether it is still being written."""

    kind: str
    number: int
    is_open: bool


def rank_dir(rank: int) -> str:
    """Return the name of a rank's directory, such as `rank=00003`. `pyarrow.dataset` reads it as a hive partition."""
    return f"rank={rank:05d}"


def parse_rank_dir(name: str) -> int | None:
    """Return the rank in a directory name. Return None if `rank_dir` did not make the name."""
    match = _RANK_DIR.fullmatch(name)
    if match is None or rank_dir(int(match[1])) != name:
        return None
    return int(match[1])


def is_writer_dir(name: str, files: Callable[[], Iterable[str]]) -> bool:
    """Return whether a directory in a rank's directory is a writer's. `files` is called if the name does not tell.

    The directory of another program has no file whose name begins with ``_``, and no file with the name of a shard.
    """
    is_named = _WRITER_DIR.fullmatch(name) is not None
    return is_named or any(file.startswith("_") or parse_shard_name(file) for file in files())


def shard_name(kind: str, number: int) -> str:
    """Return the name of a sealed shard, such as `tensors-000012.arrow`."""
    if kind not in SHARD_KINDS:
        raise ValueError(f"shard kind {kind!r}: expected one of {SHARD_KINDS}")
    return f"{kind}-{number:06d}.arrow"


def open_name(shard: str) -> str:
    """Return the name of a shard that is being written, such as `_tensors-000012.arrow.open`."""
    return f"{_OPEN_PREFIX}{shard}{OPEN_SUFFIX}"


def index_name(shard: str) -> str:
    """Return the name of a sealed shard's index file, such as `_tensors-000012.index`."""
    return f"_{shard.removesuffix('.arrow')}.index"


def shard_of_index(name: str) -> str:
    """Return the shard to which an index file belongs. Return an empty text for any other file name."""
    shard = f"{name[1:].removesuffix('.index')}.arrow"
    return shard if name == index_name(shard) and parse_shard_name(shard) else ""


def parse_shard_name(name: str) -> ShardName | None:
    """Parse a name made by `shard_name` or `open_name`. Return None for any other name."""
    is_open = name.startswith(_OPEN_PREFIX) and name.endswith(OPEN_SUFFIX)
    match = _SHARD.fullmatch(name[len(_OPEN_PREFIX) : -len(OPEN_SUFFIX)] if is_open else name)
    if match is None or match[0] != shard_name(match[1], int(match[2])):
        return None
    return ShardName(match[1], int(match[2]), is_open)


def encode_manifest(obj: Mapping[str, object]) -> bytes:
    """Return the bytes of a manifest with at least one member: JSON that begins with a checksum of the rest."""
    rest = json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()[1:]
    return b'{"%s":"%08x",%s' % (CHECKSUM.encode(), crc32c(rest), rest)


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """Read the JSON object in a manifest: a regular file of at most `max_bytes`, never through a symbolic link.

    Raises NotARunError if there is no such regular file. Raises CorruptError if the file is too large, contains no JSON
    object, or has a wrong checksum.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotARunError(f"{path}: {error.strerror}; expected a manifest of a run") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotARunError(f"{path}: not a regular file; expected a manifest of a run")
        with open(descriptor, "rb", closefd=False) as file:
            # Python allocates all requested bytes before it reads, so no more than the file's size is requested.
            text = file.read(min(max_bytes, os.fstat(descriptor).st_size) + 1)
    finally:
        os.close(descriptor)
    if len(text) > max_bytes:
        raise CorruptError(f"{path}: larger than the {max_bytes} bytes that a manifest may have")
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a manifest's text. Raises CorruptError if there is none, or its checksum is wrong."""
    head = _CHECKSUM.match(text)
    if head is not None and b"%08x" % crc32c(text[head.end() :]) != head[1]:
        raise CorruptError(f"{where}: its bytes are not those that were written; the checksum differs")
    value = parse_object(text, where)
    if head is None and value.get("format") == FORMAT_NAME:
        match value.get("version"):
            case [1, int(minor)] if minor > 0:
                raise CorruptError(f"{where}: has no checksum, as every version since 1.1 has")
    value.pop(CHECKSUM, None)
    return value


def check_version(raw: Mapping[str, Any], where: str) -> None:
    """Raise NotARunError if a manifest is of another format, and UnsupportedError if of another major version."""
    if raw.get("format") != FORMAT_NAME:
        raise NotARunError(f"{where}: its format is {raw.get('format')!r}, expected {FORMAT_NAME!r}")
    match raw.get("version"):
        case [int(major), int(minor)]:
            if major != FORMAT_VERSION[0]:
                raise UnsupportedError(
                    f"{where}: format version {major}.{minor}, but this reader knows {FORMAT_VERSION[0]}.x; "
                    f"a newer recorder reads it: {install_line(is_upgrade=True)}"
                )
        case version:
            raise CorruptError(f"{where}: version is {version!r}, expected [major, minor]")


NODES = "_nodes"
"""A folder of runs in object stores, with a file for each node, which repeats the statuses of the node's writers."""
STATUS = "_status.json"
STATUS_BYTES = 4096
"""The size of a status file in bytes: one block, which the kernel replaces atomically on most file systems."""
OTHER_REASONS = "other"
"""The reason under which a status file adds up all drops whose reasons do not fit."""
_MAX_REASONS = 24
_MAX_ANSWERS = 8
_MAX_FINDINGS = 8
_MAX_TEXT = 200


def encode_status(facts: Mapping[str, object]) -> bytes:
    """Return the bytes of a status file: a manifest padded with blanks to `STATUS_BYTES`."""
    facts = _short(facts)
    dropped = facts.get("dropped")
    most = (_MAX_REASONS, _MAX_ANSWERS, _MAX_FINDINGS)
    for num_reasons, num_commands, num_findings in (most, (1, *most[1:]), (1, 1, _MAX_FINDINGS), (1, 1, 1), (0, 0, 0)):
        if answers := facts.get("commands"):
            facts["commands"] = list(answers)[-num_commands:] if num_commands else []  # type: ignore[call-overload]
        if findings := facts.get("findings"):
            facts["findings"] = [_short(one) for one in list(findings)[:num_findings]]  # type: ignore[call-overload]
        if isinstance(dropped, dict) and len(dropped) > num_reasons:
            facts["dropped"] = _largest(dropped, num_reasons)
        members = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION), **facts, "padding": ""}
        text = encode_manifest(members)
        if len(text) <= STATUS_BYTES:
            break
    else:
        raise ValueError(f"a status of {len(text)} bytes: at most {STATUS_BYTES} are allowed")
    return encode_manifest({**members, "padding": " " * (STATUS_BYTES - len(text))})


def _short(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: shortened(value, _MAX_TEXT) if isinstance(value, str) else value for name, value in facts.items()}


def _largest(dropped: Mapping[str, int], num_reasons: int) -> dict[str, int]:
    by_count = sorted(dropped.items(), key=lambda item: -item[1])
    kept = {reason[:_MAX_TEXT]: count for reason, count in by_count[:num_reasons]}
    return {**kept, OTHER_REASONS: kept.get(OTHER_REASONS, 0) + sum(count for _, count in by_count[num_reasons:])}


_MAX_PROBLEMS = 100
_MAX_SHOWN = 40
_MAX_SHARED = 8
"""The most distinct values of a member that `Shared` remembers."""
Made = TypeVar("Made")


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises CorruptError, which begins with `where`, if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"not JSON: {error}" if text.strip() else "the file is empty"
        raise CorruptError(f"{where}: {why}") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


class Members:
    """Reads the members of one JSON object of a manifest, and checks their types.

    Each member of an unexpected type adds a sentence to `problems`. The object is the member `key` of `above`.
    """

    __slots__ = ("_above", "_key", "_problems", "raw")

    def __init__(
        self, raw: dict[str, Any], problems: list[str] | None = None, key: str = "", above: Members | None = None
    ) -> None:
        self.raw = raw
        self._problems = problems if problems is not None else []
        self._key = key
        self._above = above

    def text(self, key: str) -> str:
        value: Any = self.raw.get(key)
        if isinstance(value, str):
            return value
        self._refuse(key, value, "a text")
        return ""

    def optional_text(self, key: str) -> str | None:
        """Return a member that is a text. Return None if it is missing, and an empty text if it is of another type."""
        return None if self.raw.get(key) is None else self.text(key)

    def count(self, key: str) -> int:
        """Return a member that is an integer from 0 to 2^63 - 1. Return 0 for any other member."""
        return self.optional_count(key) or 0

    def optional_count(self, key: str) -> int | None:
        value: Any = self.raw.get(key)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        self._refuse(key, value, "a whole number, not negative")
        return None

    def number(self, key: str, below: float = 1e12) -> float:
        """Return a member that is a number from 0 to below a bound. Return 0 for any other member."""
        value: Any = self.raw.get(key)
        if type(value) in (int, float) and math.isfinite(value) and 0 <= value < below:
            return float(value)
        self._refuse(key, value, f"a number from 0 to {below:g}")
        return 0.0

    def flag(self, key: str) -> bool:
        value: Any = self.raw.get(key)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value is True

    def optional_flag(self, key: str) -> bool | None:
        """Return a member that is true or false. Return None for any other member."""
        self.flag(key)
        value: Any = self.raw.get(key)
        return value if isinstance(value, bool) else None

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._chosen(key, lambda one: isinstance(one, str), "a list of texts"))

    def counts(self, key: str) -> tuple[int, ...]:
        expected = "a list of whole numbers, none negative"
        return tuple(self._chosen(key, lambda one: type(one) is int and 0 <= one < 1 << 63, expected))

    def counts_of(self, key: str) -> dict[str, int]:
        """Return the counts inside the object `key`, by name. Counts of 0 are left out."""
        inner = self.inner(key)
        return {} if inner is None else {name: count for name in list(inner.raw) if (count := inner.count(name))}

    def texts_of(self, key: str) -> dict[str, str]:
        """Return the texts inside the object `key`, by name."""
        inner = self.inner(key)
        return {} if inner is None else {name: text for name in list(inner.raw) if (text := inner.optional_text(name))}

    def ranks(self, key: str, max_ranks: int, max_rank: int) -> tuple[int, ...]:
        """Return the distinct ranks in a list. Return an empty tuple if an item is no rank, or for too many."""
        value: Any = self.raw.get(key)
        is_sound = isinstance(value, list) and len(value) <= max_ranks
        if is_sound and all(type(rank) is int and 0 <= rank < max_rank for rank in value):
            return tuple(dict.fromkeys(value))
        self._refuse(key, value, f"a list of at most {max_ranks} ranks")
        return ()

    def inner(self, key: str) -> Members | None:
        """Return a member that is an object. Return None for any other member."""
        value: Any = self.raw.get(key)
        if isinstance(value, dict):
            return Members(value, self._problems, key, self)
        self._refuse(key, value, "an object")
        return None

    def all_inner(self, key: str) -> dict[str, Members]:
        """Return the objects inside the object `key`, by name."""
        inner = self.inner(key)
        objects = {name: inner.inner(name) for name in list(inner.raw)} if inner is not None else {}
        return {name: one for name, one in objects.items() if one is not None}

    def list_inner(self, key: str) -> list[Members]:
        objects = self._chosen(key, lambda one: isinstance(one, dict), "a list of objects")
        return [Members(one, self._problems, f"{key}[{number}]", self) for number, one in enumerate(objects)]

    def plain(self, kind: Any, *but: str) -> dict[str, Any]:
        """Return the values of the plain fields of dataclass `kind`, by name, without the fields named in `but`."""
        get = self.raw.get
        return {
            name: default if get(name) is None else read(self, name) for name, read, default in _plain_fields(kind, but)
        }

    def _chosen(self, key: str, is_sound: Callable[[Any], bool], expected: str) -> list[Any]:
        value: Any = self.raw.get(key)
        if not isinstance(value, list):
            self._refuse(key, value, expected)
            return []
        sound = [one for one in value if is_sound(one)]
        if len(sound) < len(value):
            self._refuse(key, next(one for one in value if not is_sound(one)), f"{expected}, in every item")
            self.raw[key] = sound
        return sound

    def _refuse(self, key: str, value: Any, expected: str) -> None:
        if value is None:
            return
        self.raw.pop(key, None)
        if len(self._problems) < _MAX_PROBLEMS:
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            self._problems.append(f"{self._path(key)} is {shown}, expected {expected}")

    def _path(self, key: str) -> str:
        path, at = key, self
        while at is not None and at._above is not None:
            path, at = f"{at._key}.{path}", at._above
        return path


_READERS: dict[Any, tuple[Callable[[Members, str], Any], Any]] = {
    "str": (Members.text, ""),
    "str | None": (Members.optional_text, None),
    "int": (Members.count, 0),
    "int | None": (Members.optional_count, None),
    "bool": (Members.flag, False),
    "bool | None": (Members.optional_flag, None),
    "float": (Members.number, 0.0),
    "tuple[str, ...]": (Members.texts, ()),
    "tuple[int, ...]": (Members.counts, ()),
    "Mapping[str, str]": (Members.texts_of, {}),
}
"""For each type annotation of a field: the function that reads it from JSON, and its default."""


@lru_cache(maxsize=64)
def _plain_fields(kind: Any, but: tuple[str, ...]) -> list[tuple[str, Callable[[Members, str], Any], Any]]:
    plain = [field for field in dataclasses.fields(kind) if field.type in _READERS and field.name not in but]
    return [(field.name, *_READERS[field.type]) for field in plain]


class Shared:
    """Keeps one copy of equal members of several manifests. Each of 4,096 ranks lists all ranks and modules."""

    def __init__(self) -> None:
        self._known: dict[str, list[Any]] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the `id()` of a value: the value, kept alive so that its id stays unique, and the result of `make`."""

    def once(self, key: str, value: Any) -> Any:
        """Return `value`, or an equal value that was given before for the same `key`."""
        known = self._known.setdefault(key, [])
        same = next((one for one in known if one == value), value)
        if same is value:
            known[:] = [value, *known[: _MAX_SHARED - 1]]
        return same

    def made(self, value: Any, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which is called once per object `value`. See `once` for equal values."""
        known = self._made.get(id(value))
        if known is None:
            known = self._made[id(value)] = value, make()
        earlier: Made = known[1]
        return earlier
