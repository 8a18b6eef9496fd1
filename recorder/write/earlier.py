"""Finds the shards that earlier processes of the same rank have left on the disk, with their sizes.

Nothing here counts or touches what a process that may still be alive has written, and nothing is deleted here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ..errors import RunError
from ..format.integrity import BatchHeader, check_batch
from ..format.manifest import Lifetime
from ..format.rundir import (
    WRITER_MANIFEST,
    check_version,
    index_name,
    open_name,
    parse_shard_name,
    read_json,
    shard_name,
)
from ..rules import Schedule

_MAGIC_BYTES = 8
_BROKEN = (pa.ArrowException, OSError, ValueError, RunError, MemoryError)


class EarlierShard(NamedTuple):
    """A shard of a process that has ended. It may be sealed, open, or have both names."""

    directory: Path
    kind: str
    number: int
    num_bytes: int
    """The bytes of the shard and of its index."""

    @property
    def name(self) -> str:
        return shard_name(self.kind, self.number)

    @property
    def paths(self) -> list[Path]:
        """Every file that is deleted with the shard."""
        name = self.name
        return [self.directory / each for each in (open_name(name), name, index_name(name))]

    def look(self, keep_steps: Schedule) -> Content | None:
        """Read steps and accounts; None where the shard is damaged, and better left alone."""
        num_rows, is_kept, ledger = 0, False, {}
        try:
            for batch, header in _batches(self.directory / self.name, self.directory / open_name(self.name)):
                num_rows += batch.num_rows
                is_kept = is_kept or any(step in keep_steps for step in batch.column("step").unique().to_pylist())
                ledger = dict(header.ledger)
        except _BROKEN:
            return None
        return Content(num_rows, is_kept, ledger)


class Content(NamedTuple):
    """The content of an earlier process's shard."""

    num_rows: int
    is_kept: bool
    """Whether the shard has a step that retention never deletes."""
    ledger: Mapping[str, Any]
    """The accounts of its writer when its last batch was written."""


def find_earlier(directory: Path, attempt: int) -> list[EarlierShard]:
    """Return the shards of all processes of this rank that have ended, oldest first.

    Args:
        directory: the directory of the calling writer; the others lie beside it.
        attempt: the attempt of the calling writer.

    Raises:
        OSError: the directories cannot be listed.
    """
    writers = []
    for path in _listed(directory.parent, directories=True):
        shards = _shards(path) if path.name != directory.name else []
        if shards:  # a manifest may be large, and after many restarts most have nothing left
            with contextlib.suppress(RunError):
                raw = read_json(path / WRITER_MANIFEST)
                check_version(raw, str(path))
                lifetime = Lifetime.read(raw)
                if _is_over(lifetime, attempt):
                    writers.append(((lifetime.attempt, lifetime.started_ns), path.name, shards))
    return [shard for _, _, shards in sorted(writers) for shard in shards]


def _shards(directory: Path) -> list[EarlierShard]:
    sizes = {path.name: path.stat(follow_symlinks=False).st_size for path in _listed(directory, directories=False)}
    names = {(name.number, name.kind) for each in sizes if (name := parse_shard_name(each))}
    shards = []
    for number, kind in sorted(names):
        sealed = shard_name(kind, number)
        num_bytes = sizes.get(sealed) or sizes.get(open_name(sealed), 0)
        shards.append(EarlierShard(directory, kind, number, num_bytes + sizes.get(index_name(sealed), 0)))
    return shards


def _is_over(lifetime: Lifetime, attempt: int) -> bool:
    """Whether a process cannot write any more; on another host, one of an older attempt cannot."""
    if lifetime.state == "closed":
        return True
    is_running = lifetime.is_running
    return lifetime.attempt < attempt if is_running is None else not is_running


def _batches(sealed: Path, unsealed: Path) -> Iterator[tuple[Any, BatchHeader]]:
    """Yield each batch with rows, checked, with its column `step` only; of an open shard up to the last whole one."""
    try:
        source = pa.OSFile(str(sealed))
    except FileNotFoundError:
        with pa.OSFile(str(unsealed)) as source:
            yield from _open_batches(source)
        return
    with source:
        only_steps = pa.ipc.IpcReadOptions(
            included_fields=[pa.ipc.open_file(source).schema.get_field_index("step")], use_threads=False
        )
        file = pa.ipc.open_file(source, options=only_steps)
        for number in range(file.num_record_batches):
            batch, metadata = file.get_batch_with_custom_metadata(number)
            yield _checked(batch, metadata, sealed)


def _open_batches(source: Any) -> Iterator[tuple[Any, BatchHeader]]:
    with contextlib.suppress(*_BROKEN, StopIteration):
        source.seek(_MAGIC_BYTES)
        step_field = pa.ipc.open_stream(source).schema.get_field_index("step")
        source.seek(_MAGIC_BYTES)
        stream = pa.ipc.open_stream(
            source, options=pa.ipc.IpcReadOptions(included_fields=[step_field], use_threads=False)
        )
        while True:
            batch, metadata = stream.read_next_batch_with_custom_metadata()
            yield _checked(batch, metadata, Path("open shard"))


def _checked(batch: Any, metadata: Any, where: Path) -> tuple[Any, BatchHeader]:
    batch.validate()
    return batch, check_batch(batch, metadata, columns=["step"], where=str(where))


def _listed(path: Path, *, directories: bool) -> list[Path]:
    """Return the real directories, or the regular files, in a directory; links are neither."""
    with os.scandir(path) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if (entry.is_dir(follow_symlinks=False) if directories else entry.is_file(follow_symlinks=False))
        ]
