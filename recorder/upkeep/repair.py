"""Repairs a run whose writers died: seals open shards, rebuilds indexes, and removes half-written files.

A repair must never touch a writer that may be alive, never overwrite a file, and never remove the only copy of a row. A
sealed shard is on the disk under its final name before the open shard is removed. A damaged file is kept under a name
that readers ignore. So a repair may be killed at any instant and run again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import PAYLOAD
from ..errors import CorruptError, LookupFailedError, RunError
from ..format.rundir import index_name, open_name, parse_shard_name, shard_name
from ..globalview.global_columns import with_member
from ..read.shard import INDEX_ONLY, Salvaged, Shard, open_sealed, salvage
from ..read.shard_rows import SHARD_BYTES_KEY
from ..read.writers import RecordedWriter
from ..run.finding import scheme_of
from ..run.reply import Progress, Reply, Report, Table
from ..run.run import Run, open_run
from ..storage.locations import LOCAL
from ..storage.untrusted_files import GrowingFile
from ..system.processes import locked_folder
from ..system.text import counted, plural, size
from ..write.file import Disk, PageMemory, publish
from ..write.shard import BatchFile, Index, IpcFormat

_REMAINS = re.compile(r"_.*\.tmp|__.*\.index\.open")
"""Matches the names of half-written files that a killed writer or a killed repair leaves."""
_MEMORY_BYTES = 8 << 20
_QUIET_S = 60.0
"""A writer that changed a file within this many seconds may be alive, even under `assume_dead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One action of a repair, done or only planned."""

    what: str
    """The action: ``sealed``, ``indexed``, ``removed``, ``kept`` (set aside), ``skipped`` (the writer may be alive),
    ``lost`` (for good) or ``failed`` (the disk refused)."""
    path: Path
    text: str
    """For people: the reason for the action, or the part of the file that the action concerns."""
    rows: int = 0
    num_bytes: int = 0


def repair_run(
    run: Run,
    *,
    is_dry: bool = False,
    assume_dead: bool = False,
    disk: Disk | None = None,
    report: Report = lambda num_bytes: None,
) -> Iterator[Outcome]:
    """Repair the files of dead writers, and yield an outcome for each action.

    With `is_dry` nothing is changed. With `assume_dead` a writer that was quiet for a minute is repaired, even if it
    ran on another host, or if its process id is in use. `report` is called with the bytes of shards handled. Raise
    WriteError if another repair of the run is under way.
    """
    with contextlib.ExitStack() as stack:
        if not is_dry:
            stack.enter_context(locked_folder(run.path, "repair"))
        is_over = True
        for writer in run.writers:
            reason = _may_be_alive(writer, assume_dead=assume_dead)
            if reason:
                is_over = False
                yield Outcome(what="skipped", path=writer.directory, text=reason)
            else:
                changed_s = _changed_s(writer.directory)
                yield from _Repair(writer, disk or Disk(), report, is_dry=is_dry).run()
                if not is_dry:
                    _set_back(writer.directory, changed_s)
        if is_over:
            yield from _remove_remains(run.path, disk or Disk(), is_dry=is_dry)


def _may_be_alive(writer: RecordedWriter, *, assume_dead: bool) -> str:
    """Return why a writer must not be touched. Empty if the writer may be repaired."""
    if writer.state == "closed":
        return ""
    host, pid = writer.manifest.host, writer.manifest.pid
    is_running = writer.manifest.is_running
    if is_running is False:
        return ""
    if is_running and writer.manifest.process:
        return f"is alive: process {pid} runs on this host"
    if time.time() - _changed_s(writer.directory) < _QUIET_S:
        if is_running:
            why = f"process {pid} runs on this host"
        elif host:
            why = f"it wrote on host {host!r} within the last minute"
        else:  # without a manifest, the writer has just begun, or was killed before it wrote one
            why = "it began within the last minute, on an unknown host"
        return f"may be alive: {why}"
    if assume_dead:
        return ""
    if is_running:
        why = f"process {pid} runs on this host, if it is no other program by now"
    elif host == os.uname().nodename:
        why = f"process {pid} of a host of this name is out of sight: in another container, or before a boot"
    else:
        why = f"host {host!r} cannot be asked from here" if host else "its host is unknown"
    return f"may be alive: {why}; when the job is over, say --assume-dead"


def _changed_s(directory: Path) -> float:
    names = LOCAL.list_directory(directory, directories=False)
    return max((directory / name).stat(follow_symlinks=False).st_mtime for name in [".", *names])


def _set_back(directory: Path, changed_s: float) -> None:
    """Set file times after `changed_s` back to `changed_s`, so that a remote writer does not seem to be active."""
    for name in [*LOCAL.list_directory(directory, directories=False), "."]:
        path = directory / name
        if path.stat(follow_symlinks=False).st_mtime > changed_s:
            with contextlib.suppress(OSError):  # the file belongs to another user
                os.utime(path, (changed_s, changed_s), follow_symlinks=False)


class _Repair:
    def __init__(self, writer: RecordedWriter, disk: Disk, report: Report, *, is_dry: bool) -> None:
        self._directory = writer.directory
        self._disk = disk
        # The new files get the directory's read permissions.
        self._disk.file_mode = 0o200 | stat.S_IMODE(writer.directory.stat().st_mode) & 0o444
        self._report = report
        self._is_dry = is_dry
        self._memory = PageMemory(_MEMORY_BYTES)
        self._payload = PageMemory(_MEMORY_BYTES)

    def run(self) -> Iterator[Outcome]:
        yield from _remove_remains(self._directory, self._disk, is_dry=self._is_dry)
        names = LOCAL.list_directory(self._directory, directories=False)
        shards = sorted(filter(None, map(parse_shard_name, names)), key=lambda s: (s.number, s.kind, s.is_open))
        for shard in shards:
            name = shard_name(shard.kind, shard.number)
            path = self._directory / (open_name(name) if shard.is_open else name)
            try:
                if shard.is_open:
                    yield from self._end(path, self._directory / name)
                else:
                    yield from self._check_index(path)
            except OSError as error:
                yield Outcome(what="failed", path=path, text=str(error))
            except RunError as error:
                yield Outcome(what="lost", path=path, text=str(error))
        for name in names:  # the remaining indexes are those of shards that retention removed
            if name.startswith("_tensors-") and name.endswith(".index"):
                shard_path = self._directory / f"{name[1:].removesuffix('.index')}.arrow"
                if index_name(shard_path.name) == name and not os.path.lexists(shard_path):
                    yield self._remove(self._directory / name, "the index of a shard that is gone")

    def _end(self, path: Path, final: Path) -> Iterator[Outcome]:
        num_bytes = path.stat(follow_symlinks=False).st_size
        salvaged = salvage(lambda: GrowingFile(path))
        self._report(num_bytes)
        is_cut = salvaged.num_trailing_bytes > 0 and not salvaged.tail_damage
        damage = [*salvaged.damage, *filter(None, [salvaged.tail_damage])]
        if os.path.lexists(final):
            yield from self._remove_twin(path, final, salvaged, damage)
            return
        if salvaged.blocks:
            num_rows, unreadable = self._seal(path, final, salvaged)
            damage += unreadable
            text = f"{len(salvaged.blocks)} {plural('batch', len(salvaged.blocks))} of {path.name}"
            yield Outcome(what="sealed", path=final, text=text, rows=num_rows, num_bytes=num_bytes)
        for text in damage:
            yield Outcome(what="lost", path=path, text=text)
        if is_cut:
            text = f"{salvaged.num_trailing_bytes} bytes of a write that was cut"
            yield Outcome(what="lost", path=path, text=text, num_bytes=salvaged.num_trailing_bytes)
        if damage:
            yield self._set_aside(path)
        elif salvaged.blocks:
            self._unlink(path)
        else:
            yield self._remove(path, "an open shard without a whole batch")
        if salvaged.blocks and not self._is_dry:
            yield from self._check_index(final, is_new=True)

    def _remove_twin(self, path: Path, final: Path, salvaged: Salvaged, damage: list[str]) -> Iterator[Outcome]:
        """Handle an open shard whose final name is taken: by a link to it, an earlier repair or a foreign file."""
        if not self._disk.is_same(path, final):
            missing = _rows_missing(path, salvaged, final)
            if missing:
                text = f"{missing} of its rows are not in {final.name}, which has the final name; both files stay"
                yield Outcome(what="lost", path=path, text=text, rows=missing)
                return
            shard = Shard(lambda: GrowingFile(path), salvaged.layout, salvaged.blocks)
            if damage or any(_payload_problem(shard, number) for number in salvaged.blocks):
                yield self._set_aside(path)
                return
        yield self._remove(path, f"{final.name} has all of its rows")

    def _seal(self, path: Path, final: Path, salvaged: Salvaged) -> tuple[int, list[str]]:
        """Copy an open shard's batches into a sealed shard. Return the number of rows, and texts on lost payloads."""
        shard = Shard(lambda: GrowingFile(path), salvaged.layout, salvaged.blocks)
        names = salvaged.layout.schema.names
        damage: list[str] = []
        num_rows = 0
        file = None
        kind = parse_shard_name(final.name)
        layout = IpcFormat(salvaged.layout.schema, None if kind is None or kind.kind == "tensors" else "zstd")
        if not self._is_dry:
            temporary = final.with_name(f"_{final.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
            file = BatchFile(self._disk, temporary, layout, self._memory, is_direct=False)
        try:
            for number in salvaged.blocks:
                problem = _payload_problem(shard, number)
                batch, header, _ = shard.read(number, [name for name in names if not problem or name != "data"])
                if problem:
                    batch = _without_payloads(batch, salvaged.layout.schema)
                    damage.append(f"{problem}; its rows are kept, without their payloads")
                num_rows += batch.num_rows
                if file is not None and layout.is_compressed:
                    file.append(batch, header.ledger)
                elif file is not None:
                    file.append_around(batch, header.ledger, self._payload)
            if file is not None:
                file.seal(final, salvaged.last_header.ledger if salvaged.last_header is not None else {})
                self._disk.sync_directory(self._directory)
        except BaseException:
            if file is not None:
                file.discard()
            raise
        return num_rows, damage

    def _check_index(self, path: Path, *, is_new: bool = False) -> Iterator[Outcome]:
        shard, _ = open_sealed(path)
        num_bytes = path.stat(follow_symlinks=False).st_size
        if not is_new:
            self._report(num_bytes)
        index_path = path.with_name(index_name(path.name))
        metadata = [
            name for name in shard.schema.names if name != "data"
        ]  # also columns that this version does not know
        problem = _index_problem(index_path, num_bytes, metadata)
        if not path.name.startswith("tensors") or not problem:
            return
        index = Index(shard.schema)
        for number in shard.blocks:
            index.add(shard.read(number, metadata).batch)
        if not self._is_dry:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(index_path)
            index.write(self._disk, path, num_bytes, self._memory)
            self._disk.sync_directory(self._directory)
        if not is_new:
            yield Outcome(what="indexed", path=index_path, text=problem)

    def _set_aside(self, path: Path) -> Outcome:
        """Keep a damaged file under a name that readers ignore, so that more of the file may be recovered later."""
        aside = path.with_name(f"{path.name.removesuffix('.open')}.damaged")
        if not self._is_dry:
            publish(self._disk, path, aside)
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(path)
            self._disk.sync_directory(self._directory)
        return Outcome(what="kept", path=aside, text="as it was, because it is damaged; readers ignore the file")

    def _remove(self, path: Path, why: str) -> Outcome:
        num_bytes = path.stat(follow_symlinks=False).st_size
        self._unlink(path)
        return Outcome(what="removed", path=path, text=why, num_bytes=num_bytes)

    def _unlink(self, path: Path) -> None:
        if not self._is_dry:
            self._disk.unlink(path)
            self._disk.sync_directory(self._directory)


def _remove_remains(folder: Path, disk: Disk, *, is_dry: bool) -> Iterator[Outcome]:
    for name in LOCAL.list_directory(folder, directories=False):
        if _REMAINS.fullmatch(name):
            path = folder / name
            try:
                num_bytes = path.stat(follow_symlinks=False).st_size
                if not is_dry:
                    disk.unlink(path)
            except OSError as error:
                yield Outcome(what="failed", path=path, text=str(error))
            else:
                yield Outcome(what="removed", path=path, text="half a file that a kill left", num_bytes=num_bytes)


def _rows_missing(path: Path, salvaged: Salvaged, final: Path) -> int:
    sealed_seqs = np.zeros(0, np.int64)
    with contextlib.suppress(RunError):
        sealed_seqs = _seqs(open_sealed(final)[0])
    return int((~np.isin(_seqs(Shard(lambda: GrowingFile(path), salvaged.layout, salvaged.blocks)), sealed_seqs)).sum())


def _seqs(shard: Shard) -> npt.NDArray[np.int64]:
    seqs = [shard.read(number, ("seq",)).batch.column("seq").to_numpy() for number in shard.blocks]
    return np.concatenate([np.zeros(0, np.int64), *seqs])


def _payload_problem(shard: Shard, number: int) -> str:
    try:
        shard.read(number, ("data",))
    except CorruptError as error:
        return str(error)
    return ""


def _index_problem(path: Path, shard_bytes: int, metadata: Sequence[str]) -> str:
    try:
        index, _ = open_sealed(path, is_index=True)
        names = [*metadata, *INDEX_ONLY]
        if set(index.schema.names) != set(names):
            return "had other columns than its shard"
        for number in index.blocks:
            index.read(number, names)
    except FileNotFoundError:
        return "was missing"
    except RunError as error:
        return f"was damaged ({error})"
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % shard_bytes:
        return "was of another shard"
    return ""


def _without_payloads(batch: Any, schema: Any) -> pa.RecordBatch:
    notes = [with_member(note, "no_payload", "damaged") for note in batch.column("note").to_pylist()]
    columns = []
    for field in schema:
        if field.name in PAYLOAD:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            columns.append(pa.array(notes, field.type) if field.name == "note" else batch.column(field.name))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def repair_reply(path: str | None, *, is_dry: bool, assume_dead: bool, progress: Progress) -> Reply:
    """Repair a run as `repair_run` does, and return the reply of `recorder repair`."""
    if path is not None and scheme_of(path) is not None:  # this check comes before any request to the store
        raise LookupFailedError(f"{path}: repair writes, and runs in a store are only read; repair a copy on a disk")
    run = open_run(path)
    open_bytes = sum(shard.size_bytes for writer in run.writers for shard in writer.all_shards)
    with progress("repair", open_bytes) as report:
        outcomes = list(repair_run(run, is_dry=is_dry, assume_dead=assume_dead, report=report))
    counts = Counter(outcome.what for outcome in outcomes)
    entries = [
        {"what": one.what, "path": str(one.path), "rows": one.rows, "bytes": one.num_bytes, "text": one.text}
        for one in outcomes
    ]
    verdict = f"{run.name}: {_verdict(outcomes, counts)}{' (dry run: nothing was changed)' if is_dry else ''}"
    return Reply(
        members=lambda: {"run": str(run.path), "dry_run": is_dry, "outcomes": entries},
        parts=lambda: [*([_table(run, outcomes)] if outcomes else []), verdict],
        exit_code=2 if counts["failed"] else int(counts["lost"] > 0),
    )


def _table(run: Run, outcomes: list[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        path = outcome.path.relative_to(run.path) if outcome.path.is_relative_to(run.path) else outcome.path
        num_rows = f"{outcome.rows:,}" if outcome.rows else ""
        num_bytes = size(outcome.num_bytes) if outcome.num_bytes else ""
        rows.append([outcome.what, str(path), num_rows, num_bytes, outcome.text])
    titles = ("what", "file", "rows", "size", "why")
    return Table(titles, rows, numbers=("rows", "size"), prose=("why",), drops=("rows", "size"))


def _verdict(outcomes: list[Outcome], counts: Counter[str]) -> str:
    rows = sum(outcome.rows for outcome in outcomes if outcome.what == "sealed")
    they = "it" if counts["skipped"] == 1 else "they"
    texts = {
        "sealed": f"{counted(counts['sealed'], 'shard')} sealed with {counted(rows, 'row')}",
        "indexed": f"{counted(counts['indexed'], 'index file')} made",
        "removed": f"{counted(counts['removed'], 'file')} removed",
        "skipped": f"{counted(counts['skipped'], 'writer')} left alone, because {they} may be alive",
        "lost": f"{counts['lost']} lost for good",
        "failed": f"{counted(counts['failed'], 'file')} not repaired, because the disk refused",
    }
    return ", ".join(text for what, text in texts.items() if counts[what]) or "nothing to repair"
