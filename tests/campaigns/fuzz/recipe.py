"""Owns recipes: mutations of a run directory as JSON, so that a finding is kept as a few lines and done again.

A recipe is a base (a name of `fuzz_base.NAMES`) and steps. A step that does not fit the run is passed over: what it was
written for may have changed since. Checksums are made right again, where a step says so, so that a forged value is not
refused for its checksum alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from recorder.columns import SCHEMA
from recorder.errors import RunError
from recorder.format.integrity import METADATA_CRC_KEY, METADATA_KEY
from recorder.format.rundir import CHECKSUM, index_name
from recorder.read.messages import PREFIX_BYTES, Message, MessageBlock, block_at
from recorder.storage.untrusted_files import MappedFile
from tests.rigs.handmade import Row, index_bytes, shard_bytes

Step = dict[str, Any]
_UNFIT = (OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, ZeroDivisionError, AssertionError,
          AttributeError, RecursionError, struct.error,
          pa.ArrowException, RunError, MemoryError)  # fmt: skip
"""What a step raises over a run that it does not fit."""


def apply(run: Path, steps: list[Step]) -> None:
    for step in steps:
        with contextlib.suppress(*_UNFIT):
            if "*" in step["file"]:  # a merge names its folders by a digest
                step = step | {"file": str(min(run.glob(step["file"])).relative_to(run))}
            _DO[step["do"]](run, step)


def value_of(value: Any) -> Any:
    """A JSON value in which some objects stand for what JSON cannot say, or for what is long."""
    if isinstance(value, list):
        return [value_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": text}:
            return float(text)
        case {"$hex": text}:
            return bytes.fromhex(text)
        case {"$repeat": text, "times": times}:
            return text * times
        case {"$deep": times}:
            deep: Any = 0
            for _ in range(times):
                deep = [deep]
            return deep
    return {key: value_of(item) for key, item in value.items()}


def _bytes(run: Path, step: Step) -> None:
    path = run / step["file"]
    data = path.read_bytes()
    at = step["at"] % (len(data) + 1)
    path.write_bytes(data[:at] + bytes.fromhex(step.get("hex", "")) * step.get("times", 1) + data[at + step["cut"] :])


def _bit(run: Path, step: Step) -> None:
    path = run / step["file"]
    data = bytearray(path.read_bytes())
    at = step["bit"] % (8 * len(data))
    data[at // 8] ^= 1 << at % 8
    path.write_bytes(data)


def _json(run: Path, step: Step) -> None:
    """Change one value of a manifest; its checksum is right afterwards."""
    path = run / step["file"]
    text = path.read_text()
    found = json.loads(text)
    found.pop(CHECKSUM, None)
    write_manifest(path, _changed(found, step["path"], step))


def write_manifest(path: Path, value: Any) -> None:
    """Write a manifest of version 1.1 of the format with any value, also NaN and others that a sound writer refuses."""
    text = json.dumps(value).encode()
    if text.startswith(b"{") and len(text) > 2:
        text = b'{"%s":"%08x",%s' % (CHECKSUM.encode(), crc32c(text[1:]), text[1:])
    path.write_bytes(text)


def _changed(node: Any, keys: list[Any], step: Step) -> Any:
    if not keys:
        return value_of(step["value"])
    key, *rest = keys
    if isinstance(node, list):
        key = key % max(len(node), 1) if isinstance(key, int) else 0
        if "gone" in step and not rest:
            return node[:key] + node[key + 1 :]
        return [*node[:key], _changed(node[key] if key < len(node) else None, rest, step), *node[key + 1 :]]
    node = dict(node) if isinstance(node, dict) else {}
    if "gone" in step and not rest:
        node.pop(key, None)
        return node
    return node | {key: _changed(node.get(key), rest, step)}


def _rows(run: Path, step: Step) -> None:
    """Change values of rows, drop or repeat rows, and write the shard again with all its checksums."""
    path = run / step["file"]
    batches = read_rows(path)
    for change in step.get("set", ()):
        batch = batches[change["batch"] % len(batches)]
        if batch:
            row = batch[change["row"] % len(batch)]
            row |= {name: value_of(value) for name, value in change["values"].items()}
    for which in step.get("repeat", ()):
        batch = batches[which["batch"] % len(batches)]
        batch += [dict(batch[which["row"] % len(batch)]) for _ in range(which["times"])]
    for which in step.get("drop", ()):
        batch = batches[which["batch"] % len(batches)]
        del batch[which["row"] % len(batch)]
    is_sealed = not path.name.endswith(".open")
    compression = step.get("compression", "zstd" if path.name.startswith("stats") else None)
    data = shard_bytes(batches, is_sealed=is_sealed, compression=compression)
    path.write_bytes(data)
    index = path.parent / index_name(path.name)
    if is_sealed and index.exists() and step.get("index", True):
        for change in step.get("index_set", ()):  # an index that says something else than its shard
            batch = batches[change["batch"] % len(batches)]
            batch[change["row"] % len(batch)] |= {name: value_of(value) for name, value in change["values"].items()}
        index.write_bytes(index_bytes(batches, len(data)))


def read_rows(path: Path) -> list[list[Row]]:
    data = path.read_bytes()
    found: list[list[Row]] = []
    with contextlib.suppress(pa.ArrowException, OSError, EOFError, StopIteration):
        reader = pa.ipc.open_stream(data[8:])
        while True:
            batch = reader.read_next_batch()
            if batch.num_rows:
                found.append(batch.select([name for name in batch.schema.names if name in SCHEMA.names]).to_pylist())
    return found


def messages(path: Path) -> list[tuple[MessageBlock, Message]]:
    """The messages of a sound file: the schema, then the batches."""
    source, found, offset = MappedFile(path), [], 8
    while offset < source.size_bytes and (one := block_at(source, offset)) is not None:
        found.append(one)
        offset = one[0].end
    return found


def _header(run: Path, step: Step) -> None:
    """Change the header of a batch, whose checksum is right afterwards. What is longer than it was does not fit."""
    path = run / step["file"]
    block, message = _batch_of(path, step["batch"])
    old = message.custom_metadata[METADATA_KEY]
    if "text" in step:
        new = value_of(step["text"]).encode("utf-8", "surrogatepass")
    else:
        new = json.dumps(_changed(json.loads(old), step["path"], step), separators=(",", ":")).encode()
    _put_header(path, block, message, new)


def _put_header(path: Path, block: MessageBlock, message: Message, new: bytes) -> None:
    old, old_crc = message.custom_metadata[METADATA_KEY], message.custom_metadata[METADATA_CRC_KEY]
    if len(new) > len(old):
        raise ValueError("no room")
    data = path.read_bytes()
    head = data[block.offset : block.offset + block.metadata_bytes]
    new = new.ljust(len(old))
    head = head.replace(old, new, 1).replace(old_crc, b"%08x" % crc32c(new), 1)
    path.write_bytes(data[: block.offset] + head + data[block.offset + block.metadata_bytes :])


def _batch_of(path: Path, number: int) -> tuple[MessageBlock, Message]:
    found = messages(path)[1:]
    return found[number % len(found)]


def _meta(run: Path, step: Step) -> None:
    """Change bytes of a message's flatbuffer, or, for batch -1, of the footer. Nothing there has a checksum."""
    path = run / step["file"]
    data = path.read_bytes()
    new = bytes.fromhex(step["hex"])
    if step["batch"] == -1:
        (num_bytes,) = struct.unpack("<i", data[-10:-6])
        at = len(data) - 10 - num_bytes + step["at"] % num_bytes
    else:
        found = messages(path)
        block, _ = found[step["batch"] % len(found)]
        at = block.offset + PREFIX_BYTES + step["at"] % (block.metadata_bytes - PREFIX_BYTES)
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def _buffer(run: Path, step: Step) -> None:
    """Change bytes of a batch's body; the checksum of that buffer is right afterwards, as far as it has room."""
    path = run / step["file"]
    block, message = _batch_of(path, step["batch"])
    buffers = [(number, first) for number, first in enumerate(message.buffers) if first[1]]
    number, (start, size) = buffers[step["buffer"] % len(buffers)]
    new = bytes.fromhex(step["hex"])[:size]
    at = block.offset + block.metadata_bytes + start + step["at"] % max(size - len(new) + 1, 1)
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])
    _right_checksum(path, block, message, number)


def _right_checksum(path: Path, block: MessageBlock, message: Message, number: int) -> None:
    """Give the header the checksum of a buffer's present content, over as many bytes as the old one covered."""
    schema = pa.ipc.open_stream(path.read_bytes()[8:]).schema
    header = json.loads(message.custom_metadata[METADATA_KEY])
    first = 0
    for field in schema:
        kinds = pa.types.is_string, pa.types.is_binary, pa.types.is_large_binary
        width = 3 if any(is_kind(field.type) for is_kind in kinds) else 2
        if first <= number < first + width:
            begin = block.offset + block.metadata_bytes
            offset, size = message.buffers[number]
            content = path.read_bytes()[begin + offset : begin + offset + size]
            crcs = header["crc32c"][field.name]
            crcs[number - first] = crc32c(content[: _used(field.type, number - first, header["rows"], size)])
        first += width
    _put_header(path, block, message, json.dumps(header, separators=(",", ":")).encode())


def _used(kind: Any, buffer: int, num_rows: int, size: int) -> int:
    if buffer == 0:
        return (num_rows + 7) // 8
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 4 * (num_rows + 1) if buffer == 1 else size
    if pa.types.is_large_binary(kind):
        return 8 * (num_rows + 1) if buffer == 1 else size
    return int(num_rows * kind.bit_width // 8)


def _name(run: Path, step: Step) -> None:
    path = run / step["file"]
    path.rename(path.with_name(value_of(step["to"])))


def _link(run: Path, step: Step) -> None:
    """Put a symbolic link in the place of a file or a directory."""
    path = run / step["file"]
    if "keep" in step and path.exists():
        path.rename(run.parent / "linked")
        path.symlink_to(run.parent / "linked")
        return
    _gone(run, step)
    path.symlink_to(step["to"])


def _hard(run: Path, step: Step) -> None:
    _gone(run, step)
    os.link(run / step["to"], run / step["file"])


def _fifo(run: Path, step: Step) -> None:
    _gone(run, step)
    os.mkfifo(run / step["file"])


def _directory(run: Path, step: Step) -> None:
    _gone(run, step)
    (run / step["file"]).mkdir(parents=True)


def _gone(run: Path, step: Step) -> None:
    path = run / step["file"]
    if path.is_dir() and not path.is_symlink():
        path.rename(run.parent / f"gone-{len(os.listdir(run.parent))}")
    else:
        path.unlink(missing_ok=True)


def _copy(run: Path, step: Step) -> None:
    target = run / value_of(step["to"])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((run / step["file"]).read_bytes())


_DO: dict[str, Callable[[Path, Step], None]] = {
    "bytes": _bytes, "bit": _bit, "json": _json, "rows": _rows, "header": _header, "meta": _meta, "buffer": _buffer,
    "name": _name, "link": _link, "hard": _hard, "fifo": _fifo, "directory": _directory, "gone": _gone, "copy": _copy,
}  # fmt: skip
