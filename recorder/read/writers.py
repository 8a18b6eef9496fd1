"""The directory of one writer (one process that records): its manifest and its shards.

Nothing here may follow a symbolic link, or interpret a file name in another way than `format.rundir` does.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..columns import SCHEMA, note_members, parse_shape
from ..errors import NotARunError, RunError
from ..format import rundir
from ..format.manifest import COUNTED, Lifetime, RetiredEarlier, RowCounts, WriterManifest
from ..numerics.keys import by_key
from ..sites import PROBE
from ..storage.locations import Location, OpenLocation, store_of
from ..system.text import counted, listed
from .shard_rows import ShardRows, load_open, load_sealed

logger = logging.getLogger(__name__)

GLOBAL_DIR = "global"
_OF_BLOCKS = ("site", "step", "shape", "note")
"""The columns that tell the steps of a row of the probe."""
_NUM_TRIES = 10
"""The most attempts to open a shard. A listed shard may be sealed meanwhile: the next listing has its new name."""
_QUIET_S = 60.0
"""A writer on another host counts as dead after this many seconds without a change to its files."""


class RecordedWriter:
    """What one process recorded: its manifest and its shards."""

    def __init__(
        self, directory: Location, rank: int | None, shards: list[ShardRows], shared: rundir.Shared | None = None
    ) -> None:
        """Read the manifest. Manifests with one `shared` store their equal members only once."""
        self.directory: OpenLocation = directory
        self.name = directory.name
        self.rank = rank
        """The rank of the writer. None in a merged run."""
        self.all_shards = shards
        self.shards = [shard for shard in shards if not shard.is_of_probe]
        """The shards in which each row is one value. Most commands read only these; the others are `probe_shards`."""
        self.manifest = WriterManifest()
        self.manifest_problem: str | None = None
        self._noted: list[str] = []
        self.retired_later: list[RetiredEarlier] = []
        """The notes in which later writers of the rank say which of this writer's shards they deleted."""
        path, store = directory / rundir.WRITER_MANIFEST, store_of(directory)
        try:
            store.look_at(path)
        except OSError:
            return  # without a manifest: the writer has just begun, or was killed early
        try:
            self.manifest = WriterManifest.read(store.read_json(path), shared)
            rundir.check_version(self.manifest.members, str(path))
            self.manifest_problem = as_problem(path, self.manifest.problems)
        except RunError as error:
            self.manifest_problem = str(error)
        if self.manifest_problem:
            logger.warning("%s", self.manifest_problem)

    @property
    def attempt(self) -> int:
        return self.manifest.attempt

    @property
    def started_ns(self) -> int:
        return self.manifest.started_ns

    @property
    def is_counted(self) -> bool:
        """True if the recorder counted steps from 0. Equal steps of two attempts may then be different steps."""
        return self.manifest.step_source == COUNTED

    @property
    def probe_shards(self) -> list[ShardRows]:
        """The shards in which each row has numbers of one value from many steps. `run.probe` reads them."""
        return [shard for shard in self.all_shards if shard.is_of_probe]

    @property
    def num_rows(self) -> int:
        """The number of rows in all shards. Rows of the probe count, as in the writer's ledger (counts of rows)."""
        return sum(shard.num_rows for shard in self.all_shards)

    def column(self, name: str) -> Any:
        batches = [batch for shard in self.shards for batch in shard.columns([name])]
        return pa.chunked_array([batch.column(name) for batch in batches], SCHEMA.field(name).type)

    def unknown_columns(self) -> Counter[str]:
        """Return the columns that this version ignores because it does not know them, each with its number of rows."""
        counts = Counter[str]()
        for shard in self.all_shards:
            counts += Counter(dict.fromkeys(shard.unknown_columns(), shard.num_rows))
        return counts

    @property
    def opened_bytes(self) -> int:
        """The size of the shards when they were opened, with their indexes; `size_bytes` for an ended writer."""
        sealed = [shard.path for shard in self.all_shards if shard.is_sealed]
        indexes = sum(_look(path.with_name(rundir.index_name(path.name)))[1] for path in sealed)
        return indexes + sum(shard.size_bytes for shard in self.all_shards)

    @property
    def size_bytes(self) -> int:
        """The present size of the shards and their indexes, in bytes."""
        return size_of(self.directory)

    @cached_property
    def balance(self) -> RowCounts:
        """The newest counts of recorded and lost rows: from the manifest, shards, status or later writers' notes."""
        balances = [self.manifest.balance]
        balances += [RowCounts.read(rundir.Members(shard.last_ledger())) for shard in self.newest_shards()]
        balances += [note.balance for note in self.retired_later]  # the newest ledger may have been in a deleted shard
        balance = max(balances, key=lambda balance: (balance.observed, balance.written))
        if self._last_words is not None:
            retired = {"rows": balance.retired_rows, "bytes": balance.retired_bytes}
            balance = RowCounts.read(rundir.Members({"retired": retired, **self._last_words}))
        synced = max(one.synced for one in (*balances, RowCounts.read(rundir.Members(self._status))))
        gone = self.retired_shards.values()
        return replace(
            balance,
            synced=synced,
            retired_rows=balance.retired_rows + sum(one.retired_rows for one in gone),
            retired_bytes=balance.retired_bytes + sum(one.retired_bytes for one in gone),
        )

    @cached_property
    def retired_shards(self) -> dict[tuple[str, int], RowCounts]:
        """The writer's shards that later writers deleted, by kind and number, with their counts of rows and bytes."""
        retired = {}
        present = {name[:2] for shard in self.all_shards if (name := shard.name)}
        for note in self.retired_later:
            for text, size in note.shards.items():
                name = rundir.parse_shard_name(text)
                if name is not None and name[:2] not in present:
                    retired[name[:2]] = size
        return retired

    @property
    def steps_around_retired(self) -> list[int]:
        """The last step before, and the first step after, each gap that deleted shards left."""
        around: list[int | None] = []
        for kind in ("tensors", "stats") if self.balance.retired_rows else ():
            shards = [(name.number, one) for one in self.shards if (name := one.name) is not None and name.kind == kind]
            for (number, before), (following, after) in pairwise(shards):
                if following > number + 1:
                    around += [pc.max(_steps(before)).as_py(), pc.min(_steps(after)).as_py()]
        return [step for step in around if step is not None]

    @cached_property
    def state(self) -> str:
        """``closed``, ``recording`` or ``unclosed`` (killed, or without changes on a host that cannot be asked)."""
        if self.manifest.state == "closed" or self._last_words is not None:
            return "closed"
        return "recording" if self._is_alive() else "unclosed"

    @cached_property
    def _status(self) -> dict[str, Any]:
        """The last status of a writer whose manifest does not say that it closed. Empty if there is none."""
        if self.manifest.state == "closed":
            return {}
        raw = self._shown[1]
        with contextlib.suppress(RunError):
            raw = store_of(self.directory).read_json(self.directory / rundir.STATUS, rundir.STATUS_BYTES)
        status, manifest = Lifetime.read(raw), self.manifest
        is_its_own = status.writer == self.name and manifest.pid in (0, status.pid)
        return raw if is_its_own and manifest.started_ns in (0, status.started_ns) else {}

    @cached_property
    def _shown(self) -> tuple[int, dict[str, Any]]:
        statuses = store_of(self.directory).shown_statuses(self.directory.parent.parent)
        return statuses.get(f"{self.directory.parent.name}/{self.name}", (0, {}))

    @property
    def _last_words(self) -> dict[str, Any] | None:
        """The status of a writer that closed, but whose disk refused the last manifest; else None.

        A status is rewritten in place, which may succeed where a new file fails.
        """
        return self._status if self._status.get("state") == "closed" else None

    @cached_property
    def last_step(self) -> int | None:
        """The largest step of the writer's rows. None without rows."""
        steps = [pc.max(_steps(shard)).as_py() for shard in self.shards]
        return max((step for step in steps if step is not None), default=None)

    def probed_blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first step, the last step and the length of each row of the probe. Payloads are not read."""
        for batch in (batch for shard in self.probe_shards for batch in shard.columns(_OF_BLOCKS)):
            for site, step, shape, note in zip(*(batch.column(name).to_pylist() for name in _OF_BLOCKS), strict=True):
                if site == PROBE:
                    length = parse_shape(shape)[-1]
                    yield step, step + (length - 1) * note_members(note).get("every", 1), length

    @property
    def ending(self) -> str:
        """A sentence that says how the record of an ``unclosed`` writer ends. Empty in any other state."""
        if self.state != "unclosed":
            return ""
        who = "global" if self.rank is None else f"rank {self.rank}"
        is_gone = self.manifest.is_running is False
        is_early = is_gone and not (self.num_rows or self.balance.written or self.problems)
        ended = "before its first rows were on disk" if is_early else "without closing"
        how = f"its process ended {ended}" if is_gone else "not closed, out of sight from here and quiet"
        end = "; it left no rows" if self.last_step is None else f"; the record ends in step {self.last_step}"
        num_lost = self.balance.num_missing - max(self._num_synced_gone, 0)
        rows = "1 row not written yet is" if num_lost == 1 else f"{num_lost} rows not written yet are"
        # The ledger (counts of rows) lacks what was observed after the last flush, so more rows may be lost.
        lost = f", and at least {rows} lost" if num_lost > 0 else "; rows of the last steps may be missing"
        end = "" if is_early else end + lost
        probed = max((last for _, last, _ in self.probed_blocks()), default=None)
        numbers = "" if probed is None else f"; the numbers of every step (keep=probe) end in step {probed}"
        return f"{who} (writer {self.name}): {how}{end}{numbers}"

    @property
    def rows_gone(self) -> str:
        """A sentence on rows that are gone, although neither retention nor a kill explains it. Empty if there are none.

        The sentence is also empty while the writer records, or if damaged shards are reported anyway.
        """
        if self._damage:
            return ""
        if self.manifest.state == "closed":
            account = self.manifest.balance
            num_retired = account.retired_rows + sum(one.retired_rows for one in self.retired_shards.values())
            num_gone = account.written - num_retired - self.num_rows
            if num_gone <= 0:
                return ""
            return f"{num_gone} of {counted(account.written, 'row')} that were written are gone{self._files_gone}"
        num_gone = self._num_synced_gone
        if num_gone <= 0 or self.state != "unclosed":
            return ""
        there = f"{self.balance.synced} rows had been synced, {self.balance.retired_rows} of them removed"
        lost = f"{counted(num_gone, 'row')} lost after they were synced, or not shipped yet by a daemon"
        return f"{there}, and {self.num_rows} are there: {lost}{self._files_gone}"

    @property
    def _files_gone(self) -> str:
        """A clause that names the missing shards, which may have held lost rows, or else the last shards present."""
        numbers = by_key((name.kind, name.number) for shard in self.all_shards if (name := shard.name) is not None)
        files: list[str] = []
        with contextlib.suppress(NotARunError):  # the writer's directory was removed since the run was opened
            files = store_of(self.directory).list_directory(self.directory, directories=False)
        gone = [shard for shard in map(rundir.shard_of_index, files) if shard and shard not in files]
        for kind, present in sorted(numbers.items()):
            retired = {number for one, number in self.retired_shards if one == kind}
            for before, after in pairwise([-1, *sorted({*present, *retired})]):
                if after > before + 1:
                    ends = dict.fromkeys((rundir.shard_name(kind, before + 1), rundir.shard_name(kind, after - 1)))
                    gone.append(" to ".join(ends))
        if gone:
            why = ", of which retention may have removed some" if self.balance.retired_rows else ""
            return f"; not here: {listed(sorted(set(gone)))}{why}"
        last = [rundir.shard_name(kind, max(present)) for kind, present in sorted(numbers.items())]
        return f"; the last shards here: {listed(last)}" if last else "; no shard is here"

    @property
    def manifest_fault(self) -> str:
        """A sentence on a damaged manifest, or on rows without a manifest. Empty for a writer that has only begun."""
        if self.manifest_problem or self.manifest.members or not self.num_rows:
            return self.manifest_problem or ""
        return f"{self.directory}: has rows and no manifest, which is lost, or was never written"

    @property
    def _num_synced_gone(self) -> int:
        return self.balance.synced - self.balance.retired_rows - self.num_rows

    @property
    def problems(self) -> list[str]:
        gone = self.rows_gone if self.manifest.state == "closed" else ""
        return self._damage or ([f"{self.directory}: {gone}"] if gone else [])

    @property
    def _damage(self) -> list[str]:
        of_manifest = [self.manifest_fault] if self.manifest_fault else []
        return [*of_manifest, *(damage for shard in self.all_shards for damage in shard.damage), *self._noted]

    def note_damage(self, damage: str) -> None:
        """Add a message on damage that was found while a payload was read."""
        if damage not in self._damage:
            self._noted.append(damage)

    def newest_shards(self) -> Iterator[ShardRows]:
        seen = set()
        for shard in reversed(self.all_shards):
            kind = shard.path.name.lstrip("_").partition("-")[0]
            if kind not in seen:
                seen.add(kind)
                yield shard

    def _is_alive(self) -> bool:
        is_running = self.manifest.is_running
        if is_running is not None:
            return is_running
        signs = (self.directory, self.directory / rundir.STATUS, *(shard.path for shard in self.all_shards))
        return time.time() - max(self._shown[0] / 1e9, *(_look(sign)[0] for sign in signs)) < _QUIET_S


def _steps(shard: ShardRows) -> Any:
    return pa.chunked_array([batch.column("step") for batch in shard.columns(["step"])], SCHEMA.field("step").type)


def find_writers(run: Location) -> list[RecordedWriter]:
    """Return all writers of a run, sorted by rank and start. Raise NotARunError if a directory cannot be listed."""
    store = store_of(run)
    folders = [(run / name / one, rank) for name, rank in writer_folders(run) for one in list_writers(run / name)]
    shared = rundir.Shared()
    writers = list(store.each(lambda one: _load_writer(*one, shared), folders))
    _find_copies(writers)
    _share_notes(writers)
    return sorted(writers, key=lambda w: (-1 if w.rank is None else w.rank, w.attempt, w.started_ns, w.name))


def writer_folders(run: Location) -> list[tuple[str, int | None]]:
    """Return the names and ranks of a run's rank directories (rank None: global rows). A link raises NotARunError."""

    def is_one(name: str) -> bool:
        return name == GLOBAL_DIR or rundir.parse_rank_dir(name) is not None

    names = store_of(run).list_directory(run, directories=True, is_part=is_one)
    return [(name, rundir.parse_rank_dir(name)) for name in names if is_one(name)]


def list_writers(folder: Location) -> list[str]:
    """Return the names of the writers' directories in a rank's directory. Empty if `folder` was removed meanwhile.

    A writer's directory may have any name: it is known by its files. NotARunError is raised for a link.
    """
    store = store_of(folder)

    def files(name: str) -> list[str]:
        try:
            return store.list_directory(folder / name, directories=False, is_part=lambda entry: True)
        except NotARunError:
            return [rundir.WRITER_MANIFEST]  # the code that opens the writer reports why it cannot be listed

    try:
        names = store.list_directory(folder, directories=True, is_part=lambda name: True)
    except NotARunError:
        if store.exists(folder):
            raise
        return []
    return [name for name in names if rundir.is_writer_dir(name, partial(files, name))]


def _find_copies(writers: list[RecordedWriter]) -> None:
    """Report each writer's directory that is a copy of another one, because its rows appear twice."""
    manifests = ((writer, writer.manifest) for writer in writers if writer.manifest.writer)
    lifetimes = by_key(((one.rank, its.writer, its.run_id, its.pid, its.started_ns), one) for one, its in manifests)
    for same in lifetimes.values():
        original = next((writer for writer in same if writer.name == writer.manifest.writer), same[0])
        for writer in same:
            if writer is not original and writer.name != writer.manifest.writer and not writer.manifest_problem:
                what = f"is a copy of {original.name} beside it, so its rows exist twice"
                writer.manifest_problem = f"{writer.directory}: {what}; remove the copy"
                logger.warning("%s", writer.manifest_problem)


def _share_notes(writers: list[RecordedWriter]) -> None:
    """Give each writer the notes in which later writers of its rank say which of its shards they deleted."""
    for of_rank in by_key((writer.rank, writer) for writer in writers).values():
        members = {writer.name: writer for writer in of_rank}
        for later in of_rank if len(of_rank) > 1 else ():
            manifest = later.manifest
            if later.state == "recording":  # first its manifest has a deletion, and may be newer now
                with contextlib.suppress(RunError):
                    raw = store_of(later.directory).read_json(later.directory / rundir.WRITER_MANIFEST)
                    manifest = WriterManifest.read(raw)
            for name, note in manifest.retired_earlier.items():
                if name in members and name != later.name:
                    members[name].retired_later.append(note)


def _load_writer(directory: Location, rank: int | None, shared: rundir.Shared) -> RecordedWriter:
    store = store_of(directory)
    for is_last_try in [False] * (_NUM_TRIES - 1) + [True]:
        try:
            shards = list(store.each(lambda one: _load_shard(directory, *one), list_shards(directory)))
        except FileNotFoundError as error:
            if is_last_try:
                raise NotARunError(f"{error.filename}: keeps vanishing while it is read; try again") from error
            store.refresh()
            continue
        break
    writer = RecordedWriter(directory, rank, shards, shared)
    for shard in shards:
        if shard.tail_damage:
            shard.note_tail(writer.state == "recording")
    return writer


def _load_shard(directory: Location, kind: str, number: int, is_open: bool) -> ShardRows:
    return (load_open if is_open else load_sealed)(directory / rundir.shard_name(kind, number))


def list_shards(directory: Location) -> list[tuple[str, int, bool]]:
    """Return kind, number and whether it is open, for each shard in a writer's directory, sorted by number."""
    is_open_by_key: dict[tuple[int, str], bool] = {}
    store = store_of(directory)
    for name in store.list_directory(
        directory, directories=False, is_part=lambda name: bool(rundir.parse_shard_name(name))
    ):
        if shard := rundir.parse_shard_name(name):
            key = (shard.number, shard.kind)
            # A shard that was just sealed may still be listed under its open name, too.
            is_open_by_key[key] = shard.is_open and is_open_by_key.get(key, True)
    return [(kind, number, is_open) for (number, kind), is_open in sorted(is_open_by_key.items())]


def size_of(directory: Location) -> int:
    """Return the size in bytes of a writer's shards and their indexes. The setting `max_bytes` counts the same."""
    names = store_of(directory).list_directory(directory, directories=False)
    shards = {name for name in names if rundir.parse_shard_name(name)}
    return sum(_look(directory / name)[1] for name in shards | ({*map(rundir.index_name, shards)} & {*names}))


def _look(path: Location) -> tuple[float, int]:
    """Return when a file last changed, in seconds, and its size in bytes. Return zeros for a missing file."""
    try:
        found = store_of(path).look_at(path)
    except OSError:
        return 0.0, 0
    return found.changed_ns / 1e9, found.size_bytes


def as_problem(path: Location, problems: Sequence[str]) -> str | None:
    """Describe the malformed members of a manifest in one sentence. Return None if there are none."""
    if not problems:
        return None
    more = f"; and {len(problems) - 1} more of its members have a wrong type" if len(problems) > 1 else ""
    return f"{path}: {problems[0]}, so it counts as missing{more}"
