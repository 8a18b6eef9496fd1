"""The files of a run directory beside its rows: their names, the version of the format, and the text of JSON files.

Needs neither numpy nor pyarrow. Must never take a name that was found on disk for a path.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from crc32c import crc32c

from ..errors import CorruptError, NotARunError, UnsupportedError, install_line
from ..sites import FORMAT_NAME, FORMAT_VERSION
from .members import parse_object

RUN_MANIFEST = "_run.json"
WRITER_MANIFEST = "_writer.json"
MERGE_MANIFEST = "_merge.json"
"""In the output of a merge, before it is a run: of which run it is, and with which options."""
SHARD_KINDS = ("tensors", "stats")
MAX_MANIFEST_BYTES = 64 << 20
"""50,000 modules with their sites need 15 MB; what is larger was not written by us."""

CHECKSUM = "crc32c"
"""First member of a manifest: CRC32C of all bytes after the comma that follows it."""

_CHECKSUM = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')
_RANK_DIR = re.compile(r"rank=([0-9]{5,9})")
_SHARD = re.compile(rf"({'|'.join(SHARD_KINDS)})-([0-9]{{6,9}})\.arrow")
_OPEN_PREFIX = "_"
OPEN_SUFFIX = ".open"
"""How the name of a shard ends while it is being written."""


class ShardName(NamedTuple):
    """What a shard's file name says."""

    kind: str
    number: int
    is_open: bool


def rank_dir(rank: int) -> str:
    """`rank=00003`: a key that `pyarrow.dataset` can read as a hive partition."""
    return f"rank={rank:05d}"


def parse_rank_dir(name: str) -> int | None:
    """The rank of a directory named by `rank_dir`; None for any other name."""
    match = _RANK_DIR.fullmatch(name)
    if match is None or rank_dir(int(match[1])) != name:
        return None
    return int(match[1])


def shard_name(kind: str, number: int) -> str:
    """`tensors-000012.arrow`: a sealed shard."""
    if kind not in SHARD_KINDS:
        raise ValueError(f"shard kind {kind!r}: expected one of {SHARD_KINDS}")
    return f"{kind}-{number:06d}.arrow"


def open_name(shard: str) -> str:
    """`_tensors-000012.arrow.open`: the shard `shard` while it is being written."""
    return f"{_OPEN_PREFIX}{shard}{OPEN_SUFFIX}"


def index_name(shard: str) -> str:
    """`_tensors-000012.index`: the derived index of the sealed shard `shard`."""
    return f"_{shard.removesuffix('.arrow')}.index"


def parse_shard_name(name: str) -> ShardName | None:
    """What a file name says, for `shard_name` and `open_name` alike; None for any other name."""
    is_open = name.startswith(_OPEN_PREFIX) and name.endswith(OPEN_SUFFIX)
    match = _SHARD.fullmatch(name[len(_OPEN_PREFIX) : -len(OPEN_SUFFIX)] if is_open else name)
    if match is None or match[0] != shard_name(match[1], int(match[2])):
        return None
    return ShardName(match[1], int(match[2]), is_open)


def encode_manifest(obj: Mapping[str, object]) -> bytes:
    """The text of a manifest, which has a member at least: JSON that begins with the checksum of all after it."""
    rest = json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()[1:]
    return b'{"%s":"%08x",%s' % (CHECKSUM.encode(), crc32c(rest), rest)


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """The object in a manifest. Symbolic links, devices and files above `max_bytes` are refused.

    Raises:
        NotARunError: there is no such regular file.
        CorruptError: it is too large, holds no JSON object, or not what its checksum says.
    """
    try:
        # O_NONBLOCK: opening a FIFO would wait for a writer, for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotARunError(f"{path}: {error.strerror}; expected a manifest of a run") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotARunError(f"{path}: not a regular file; expected a manifest of a run")
        with open(descriptor, "rb", closefd=False) as file:
            # Python takes the memory for all that may come, before it reads.
            text = file.read(min(max_bytes, os.fstat(descriptor).st_size) + 1)
    finally:
        os.close(descriptor)
    if len(text) > max_bytes:
        raise CorruptError(f"{path}: larger than the {max_bytes} bytes that a manifest may have")
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """The object in the text of a manifest, which is called `where`.

    Raises:
        CorruptError: it holds no JSON object, or not what its checksum says.
    """
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
    """See that a manifest is ours and of a major version that this package reads.

    Raises:
        NotARunError: the manifest is of another format.
        UnsupportedError: it is of another major version.
    """
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


STATUS = "_status.json"
STATUS_BYTES = 4096
"""The file always has this size: one block, which the kernel replaces as a whole wherever it can."""
OTHER_REASONS = "other"
"""What drops are called whose reasons have no room."""
_MAX_REASONS = 24
_MAX_ANSWERS = 8
_MAX_TEXT = 200


def encode_status(facts: Mapping[str, object]) -> bytes:
    """The whole file: the JSON of a manifest with its checksum in front, made up to its size by a member of blanks."""
    facts = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in facts.items()}
    dropped = facts.get("dropped")
    for num_reasons, num_commands in ((_MAX_REASONS, _MAX_ANSWERS), (1, _MAX_ANSWERS), (1, 1), (0, 0)):
        if answers := facts.get("commands"):
            facts["commands"] = list(answers)[-num_commands:] if num_commands else []  # type: ignore[call-overload]
        if isinstance(dropped, dict) and len(dropped) > num_reasons:
            facts["dropped"] = _largest(dropped, num_reasons)
        members = {"format": FORMAT_NAME, "version": list(FORMAT_VERSION), **facts, "padding": ""}
        text = encode_manifest(members)
        if len(text) <= STATUS_BYTES:
            break
    else:
        raise ValueError(f"a status of {len(text)} bytes: {STATUS_BYTES} are what it may have")
    return encode_manifest({**members, "padding": " " * (STATUS_BYTES - len(text))})


def _largest(dropped: Mapping[str, int], num_reasons: int) -> dict[str, int]:
    by_count = sorted(dropped.items(), key=lambda item: -item[1])
    kept = {reason[:_MAX_TEXT]: count for reason, count in by_count[:num_reasons]}
    return {**kept, OTHER_REASONS: kept.get(OTHER_REASONS, 0) + sum(count for _, count in by_count[num_reasons:])}
