"""`RecordedRun`: what the ranks of one run recorded, as tables of rows and as tensors of single ranks.

Nothing here may write, or import pandas outside of the methods that return a frame. Commands are untrusted input.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import COUNTS, METADATA_COLUMNS, SCHEMA, STATISTICS, TIME_ORDER, parse_shape
from ..errors import CorruptError, LookupFailedError, RecorderError, not_installed
from ..format.commands import COMMAND_BYTES, COMMANDS, DUMP, Command, command_name, parse_command_name, read_command
from ..format.manifest import EXCEPTION, Jitter, RecordedModule, RecordedRoot, RunManifest
from ..format.rundir import RUN_MANIFEST
from ..numerics.dtypes import item_bytes
from ..numerics.keys import array_of, by_key, column_of
from ..numerics.moments import long_form
from ..rules import did_you_mean
from ..storage.locations import Location, OpenLocation, store_of
from ..system.text import listed
from .metadata import NONE, POSITION_COLUMNS, MetadataRows, Positions
from .payload import Payloads
from .shard_rows import ShardRows, each_of
from .writers import RecordedWriter, as_problem, find_writers

if TYPE_CHECKING:
    import pandas

_logger = logging.getLogger(__name__)
_MAX_HOOKED = 5
LONG_KEY = (
    "step", "rank", "root", "module_path", "site", "name", "micro_step", "call", "repeat", "mode", "phase",
)  # fmt: skip
"""The columns that identify a value in the frames of `to_long`, together with `statistic`."""
_MEASURES = (*STATISTICS, *COUNTS)
_MAX_KEPT_ROWS = 500_000


class RecordedRun:
    """What the ranks of one run recorded: the writers and their rows, as they were when the run was opened.

    `run.run.Run` is the public class. It adds the methods for complete tensors.
    """

    def __init__(self, path: Location, manifest: RunManifest, writers: Sequence[RecordedWriter] | None = None) -> None:
        """Open a run. A growing run gives `writers`: then the run has only the rows of these writers."""
        self.path: OpenLocation = path
        """The run's directory, as a `pathlib.Path`, or as an `ObjectPath` for a run in an object store."""
        self.manifest = manifest
        self.is_merged = manifest.merged_from is not None
        """True if a merge wrote the run. Its rows are global tensors."""
        self._manifest_problem = as_problem(path / RUN_MANIFEST, manifest.problems)
        if self._manifest_problem:
            _logger.warning("%s", self._manifest_problem)
        self.writers: tuple[RecordedWriter, ...] = tuple(find_writers(path) if writers is None else writers)
        """The writers, sorted by rank and start, with the manifests and shards that were there at opening."""
        self._rows = MetadataRows(self.writers)
        self._payloads = Payloads(self._rows, len(self.writers))

    @property
    def run_id(self) -> str:
        return self.path.name if self.manifest.run_id is None else self.manifest.run_id

    @property
    def name(self) -> str:
        """The setting `name` of the recording. Without it, the name of the run's directory."""
        return self.manifest.name or self.path.name

    @property
    def started_ns(self) -> int:
        """When the first writer began, in nanoseconds since the epoch. If unknown, when the run was created, or 0."""
        started_ns = min((writer.started_ns for writer in self.writers if writer.started_ns), default=0)
        return started_ns or self.manifest.created_ns or 0

    @property
    def version(self) -> tuple[int, int]:
        """The major and the minor version of the format."""
        return self.manifest.version

    @property
    def world_size(self) -> int | None:
        """The number of ranks that the run was started with. None if the manifest does not say."""
        return self.manifest.world_size

    @property
    def size_bytes(self) -> int:
        """The present size of the shards and their indexes. Commands print this size for a run that is over."""
        return sum(writer.size_bytes for writer in self.writers)

    @property
    def opened_bytes(self) -> int:
        """The size that the shards had when they were opened, plus the present size of their indexes."""
        return sum(writer.opened_bytes for writer in self.writers)

    @property
    def problems(self) -> list[str]:
        """A message for each damage on disk that makes rows missing. It is also logged when the damage is found.

        Manifests and footers are checked when the run is opened, and a column when it is first read. A payload is
        checked when it is read, and damage of it raises an error. `recorder verify` reads everything.
        """
        of_manifest = [self._manifest_problem] if self._manifest_problem else []
        return of_manifest + [problem for writer in self.writers for problem in writer.problems]

    @property
    def endings(self) -> list[str]:
        """A sentence for each writer that stopped without closing. It names the last step that was recorded."""
        return [writer.ending for writer in self.writers if writer.state == "unclosed"]

    @property
    def lost(self) -> str:
        """Why a run has no rows at all, where processes ended before any were on disk. Empty for any other run."""
        first, *others = ([] if self.num_all_rows else self.endings) or [""]
        return f"{first}; and {len(others)} more writers" if others else first

    @property
    def exceptions(self) -> dict[str, list[int | None]]:
        """Maps the text of each exception that ended the program to the ranks where it was raised."""
        events = ((event, writer.rank) for writer in self.writers for event in writer.manifest.events)
        return by_key((event.message, rank) for event, rank in events if event.kind == EXCEPTION)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    @property
    def num_all_rows(self) -> int:
        """The number of rows, including those of the probe (one number of each value at every step)."""
        return sum(writer.num_rows for writer in self.writers)

    def keep_columns(self) -> None:
        """Keep columns in memory once they are read. Commands that read them often use this. A large run ignores it."""
        for shard in (one for writer in self.writers for one in writer.all_shards):
            shard.kept = {} if self.num_rows <= _MAX_KEPT_ROWS else None

    @cached_property
    def jitter(self) -> int:
        """The seed of the setting `jitter`, which slightly changes the model's inputs on purpose; 0 without jitter."""
        return next(filter(None, (writer.manifest.whole_setting("jitter") for writer in self.writers)), 0)

    @cached_property
    def jitter_moved(self) -> tuple[str, ...] | None:
        """What the setting `jitter` changed, ``inputs`` or ``embeddings``. None if no manifest says so."""
        moved = dict.fromkeys(what for fact in self._jitter_facts for what in fact.moved)
        return tuple(moved) if self._jitter_facts else None

    @cached_property
    def jitter_eps(self) -> float:
        """The largest relative change of an element by the setting `jitter`; 0 if no manifest says so."""
        return max((fact.eps for fact in self._jitter_facts), default=0.0)

    @property
    def dumps(self) -> list[RunDump]:
        """The dumps of the ring (rows kept in memory until a trigger asks for their steps), by time."""
        return dumps_of(self.writers)

    @cached_property
    def commands(self) -> SentCommands:
        return read_commands(self.path)

    @cached_property
    def _jitter_facts(self) -> list[Jitter]:
        roots = [root for writer in self.writers for root in writer.manifest.roots]
        return [root.jitter for root in roots if root.jitter is not None]

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have a writer, even if it has no rows."""
        return sorted({writer.rank for writer in self.writers if writer.rank is not None})

    @cached_property
    def steps(self) -> list[int]:
        """The steps that have a row."""
        self._rows.load(["step"])
        return [int(step) for step in np.unique(self._rows.numbers("step"))]

    @cached_property
    def module_paths(self) -> list[str]:
        """The modules that have a row, in the order of their first rows."""
        self._rows.load(["module_path", "rank", "seq"])
        codes, texts = self._rows.module_paths()
        in_time = codes[np.lexsort([self._rows.numbers("rank"), self._rows.numbers("seq")])]
        present, first = np.unique(in_time, return_index=True)
        return [texts[code] for code in present[np.argsort(first)] if texts and code != NONE]

    @cached_property
    def modules(self) -> dict[tuple[str, str], RecordedModule]:
        """All modules by root and path, even those without rows, as the newest writers describe them."""
        return read_modules(self.writers)

    @cached_property
    def has_models(self) -> bool:
        """Whether the run has several models, such as the two of a GAN, whose modules may have the same paths."""
        return len({root for root, _ in self.modules}) > 1

    @property
    def foreign_hooks(self) -> str:
        """A text that lists the modules on which the program has hooks, with these hooks. Empty if there are none."""
        hooked = (
            f"{one.path!r} ({', '.join(one.foreign_hooks)})" for one in self.modules.values() if one.foreign_hooks
        )
        return listed(hooked, _MAX_HOOKED)

    @cached_property
    def known_paths(self) -> dict[str, None]:
        """The paths of modules that have rows or are in a manifest, and of all their parents, in tree order."""
        return list_paths((path for _, path in self.modules), self.module_paths)

    def table(
        self, columns: Sequence[str] | None = None, filter: Any = None, *, steps: tuple[int, int] | None = None
    ) -> Any:
        """Return the rows as a `pa.Table`, ordered by attempt, step, rank and seq.

        Args:
            columns: names of columns; by default all but `data`, the payload.
            filter: a `pyarrow.compute` expression over metadata columns, such as ``pc.field("step") < 10``.
            steps: only the rows of the steps in [first, last). Batches without these steps are not read.

        Raises:
            LookupFailedError: there is no such column, or the filter cannot be applied.
        """
        names = tuple(METADATA_COLUMNS if columns is None else columns)
        for name in names:
            if name not in SCHEMA.names:
                near = did_you_mean(name, SCHEMA.names, f"; columns are {', '.join(SCHEMA.names)}")
                raise LookupFailedError(f"no column {name!r}{near}")
        # Only columns whose name occurs in the filter are read. A filter may also refer to columns by index; then all
        # are read.
        text = "" if filter is None else _text_of(filter)
        filtered = [name for name in METADATA_COLUMNS if name in text or "FieldPath" in text]
        metadata = [name for name in names if name != "data"]
        rows, payloads = self._rows, self._payloads
        if steps is not None:
            rows = MetadataRows(self.writers, steps)
            payloads = Payloads(rows, len(self.writers))
        rows.load([*metadata, *filtered, *TIME_ORDER, *(POSITION_COLUMNS if "data" in names else ())])
        positions = rows.in_order()
        if steps is not None:
            numbers = rows.numbers("step")[positions]
            positions = positions[(numbers >= steps[0]) & (numbers < steps[1])]
        if filter is not None:
            positions = _filter(rows, positions, filter, filtered)
        columns_of = {name: rows.take(name, positions) for name in metadata}
        if "data" in names:
            *pieces, order = payloads.column(positions)
            columns_of["data"] = pa.chunked_array([*pieces, pa.nulls(0, pa.large_binary())]).take(column_of(order))
        schema = pa.schema([SCHEMA.field(name) for name in names])
        return pa.Table.from_arrays([columns_of[name] for name in names], schema=schema)

    def to_pandas(self, columns: Sequence[str] | None = None, filter: Any = None) -> pandas.DataFrame:
        """Return metadata rows as a pandas frame, with the arguments of `table`. Raise ImportError without pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise ImportError(not_installed("Run.to_pandas", "pandas", "analysis"))
        frame: pandas.DataFrame = self.table(columns, filter).to_pandas()
        return frame

    def to_long(self, statistics: Sequence[str] | None = None, filter: Any = None) -> pandas.DataFrame:
        """Return the statistics as a pandas frame with one value a row, ready for plotting and `pivot_table`.

        Args:
            statistics: names of columns, such as ``["l2", "absmax"]``; by default all statistics and counts.
            filter: as in `table`.

        Returns:
            The columns of `LONG_KEY`, `statistic` and `value`. Rows without the statistic are left out.

        Raises:
            ImportError: pandas is not installed.
            LookupFailedError: there is no such statistic.
        """
        chosen = choose_statistics(statistics)
        frame: pandas.DataFrame = long_form(self.table([*LONG_KEY, *chosen], filter), LONG_KEY, chosen).to_pandas()
        return frame

    def load_balances(self) -> None:
        """Read each writer's counts of recorded and lost rows. In an object store, several are read at once."""
        shards = [shard for writer in self.writers for shard in writer.newest_shards()]
        for _ in each_of(shards, ShardRows.last_ledger):
            pass  # each shard caches its own result

    def unknown_columns(self) -> Counter[str]:
        """Return the columns that this version ignores because it does not know them, each with its number of rows."""
        return sum((writer.unknown_columns() for writer in self.writers), Counter[str]())

    def dataset(self) -> Any:
        """Return the sealed shards as a `pyarrow.dataset`, for streaming scans. Checksums are not checked."""
        import pyarrow.dataset

        store = store_of(self.path)
        paths = [store.arrow_path(shard.path) for writer in self.writers for shard in writer.shards if shard.is_sealed]
        return pyarrow.dataset.dataset(paths, schema=SCHEMA, format="ipc", filesystem=store.filesystem)

    def rank_tensor(self, positions: Positions, what: str) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
        """Return bytes, dtype and shape of one rank's tensor, joined from its parts. Errors call the tensor `what`.

        LookupFailedError is raised if parts were not recorded, and CorruptError if parts are damaged or contradict each
        other.
        """
        parts = [self._payloads.described(position) for position in positions.tolist()]
        _, dtype, shape = parts[0]
        if any(part[1:] != (dtype, shape) for part in parts):
            raise CorruptError(f"{what}: the parts of one tensor differ in dtype or shape")
        data = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts])
        sizes = parse_shape(shape)
        whole_bytes = math.prod(sizes) * item_bytes(dtype)
        if data.nbytes < whole_bytes:
            raise LookupFailedError(
                f"{what}: only {data.nbytes} of the {whole_bytes} bytes of this tensor were recorded"
            )
        return data, dtype, sizes


def _text_of(filter: Any) -> str:
    """Return a filter expression as text. If Arrow cannot print it, the text makes the caller read all columns.

    Arrow abbreviates a long list of values, and cannot print the list if it cuts a value inside a character.
    """
    try:
        return str(filter)
    except UnicodeDecodeError:
        return "FieldPath"


def _filter(rows: MetadataRows, positions: Positions, expression: Any, names: Sequence[str]) -> Positions:
    columns = {name: rows.take(name, positions) for name in names}
    try:
        passing = pa.table(columns | {"position": column_of(positions)}).filter(expression).column("position")
    except (pa.ArrowException, TypeError) as error:
        raise LookupFailedError(f"filter {expression}: cannot be applied to the metadata columns: {error}") from error
    kept: Positions = array_of(passing).astype(np.int64, copy=False)
    return kept


def choose_statistics(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the chosen statistics without repetition (None: all). Raise LookupFailedError for an unknown one."""
    chosen = tuple(dict.fromkeys(_MEASURES if names is None else names))
    for name in chosen:
        if name not in _MEASURES:
            near = did_you_mean(str(name), _MEASURES, f"; choose of {', '.join(_MEASURES)}")
            raise LookupFailedError(f"no statistic {name!r}{near}")
    if importlib.util.find_spec("pandas") is None:
        raise ImportError(not_installed("to_long", "pandas", "analysis"))
    return chosen


_MAX_LISTED = 5
_MAX_DEPTH = 200
"""The most components of a module path whose parents are listed. A longer path is listed alone."""


def read_modules(writers: Iterable[RecordedWriter]) -> dict[tuple[str, str], RecordedModule]:
    """Return each module by root and path, in the order of `named_modules()`.

    Newer attempts replace older ones. What the program does with a module on one rank of an attempt is kept.
    """
    modules: dict[tuple[str, str], RecordedModule] = {}
    attempts: dict[tuple[str, str], int] = {}
    last: dict[str, tuple[int, RecordedRoot]] = {}
    for writer in writers:
        for root in writer.manifest.roots:
            before, last[root.name] = last.get(root.name), (writer.attempt, root)
            if before is not None and before[0] == writer.attempt and before[1] is root:
                continue  # manifests with equal models share one object
            for module in root.modules:
                key = root.name, module.path
                is_same = attempts.get(key) == writer.attempt
                modules[key] = module.with_facts_of(modules[key]) if is_same else module
                attempts[key] = writer.attempt
    return modules


def list_paths(known: Iterable[str], recorded: Iterable[str]) -> dict[str, None]:
    """Return the paths of modules and of the modules that contain them. Containing modules come first."""
    paths: dict[str, None] = {"": None}
    for path in (*known, *recorded):
        if path not in paths:
            parts = path.split(".")
            ends = range(1 if len(parts) <= _MAX_DEPTH else len(parts), len(parts) + 1)
            paths |= dict.fromkeys(".".join(parts[:end]) for end in ends)
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDump:
    """A dump of the ring (rows kept in memory until asked for): its steps, and how much the ranks wrote."""

    attempt: int
    """The attempt that wrote the dump. A restarted job may record the same steps again."""
    first_step: int
    last_step: int
    reason: str
    by: str
    """Who requested the dump first: a rank, or a user and host, as a text."""
    time_ns: int
    ranks: tuple[int, ...]
    """The ranks that received the request for the dump."""
    missed: tuple[int, ...]
    """The ranks that had already dropped some of the dump's rows from the ring."""
    num_rows: int
    num_bytes: int


def dumps_of(writers: Sequence[RecordedWriter]) -> list[RunDump]:
    """Return the dumps of a run, by time. Requests of several ranks for the same steps and reason are one dump."""
    written = ((writer, dump) for writer in writers for dump in writer.manifest.dumps)
    groups = by_key(
        ((writer.attempt, dump.first_step, dump.last_step, dump.reason), (writer.rank, dump))
        for writer, dump in written
    )
    dumps = [
        RunDump(
            attempt=attempt,
            first_step=first_step,
            last_step=last_step,
            reason=reason,
            by=min((dump for _, dump in members), key=lambda dump: dump.time_ns).by,
            time_ns=min(dump.time_ns for _, dump in members),
            ranks=tuple(sorted({rank for rank, _ in members if rank is not None})),
            missed=tuple(sorted({rank for rank, dump in members if rank is not None and dump.num_missed})),
            num_rows=sum(dump.num_rows for _, dump in members),
            num_bytes=sum(dump.num_bytes for _, dump in members),
        )
        for (attempt, first_step, last_step, reason), members in groups.items()
    ]
    return sorted(dumps, key=lambda dump: (dump.time_ns, dump.first_step))


class SentCommands(NamedTuple):
    """The commands that were sent to a run, by number, and a sentence for each file that could not be read."""

    sound: tuple[Command, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def num_beside_dumps(self) -> int:
        return sum(command.kind != DUMP for command in self.sound)


def read_commands(run: Location) -> SentCommands:
    """Read the command files of a run."""
    store, folder = store_of(run), run / COMMANDS
    sound: list[Command] = []
    problems: list[str] = []
    try:
        names = store.list_directory(folder, directories=False) if store.exists(folder) else []
    except RecorderError as error:
        return SentCommands(problems=(str(error),))
    for number in sorted(number for name in names if (number := parse_command_name(name)) is not None):
        path = folder / command_name(number)
        try:
            sound.append(read_command(store.read_json(path, COMMAND_BYTES), f"{COMMANDS}/{path.name}", number))
        except (RecorderError, OSError) as error:
            problems.append(str(error))
    return SentCommands(tuple(sound), tuple(problems))
