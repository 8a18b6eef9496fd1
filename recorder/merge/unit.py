"""Units of work of a merge: planning them from the shards' indexes, merging them, and counting findings.

A unit is written as closed writer directories in a folder, and never outside the folder. Planning opens no payload, and
merging never holds all payload of a unit. A source row that cannot be read becomes a finding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import RunError, UnsupportedError
from ..format.rundir import rank_dir
from ..globalview.row_groups import RowFinding
from ..globalview.view import GlobalRows, GlobalView
from ..read.metadata import SIZE_COLUMNS, StepSizes
from ..read.writers import GLOBAL_DIR, RecordedWriter
from ..run.run import Run
from .shards import MergedDirectory, WriterMemory, as_batch

_PARALLEL = ("data_parallel", "model_parallel", "pipeline", "unshared")
"""The parts of a root (a recorded model) in a manifest that say how ranks share the work."""
UNIT_BYTES = 256 << 20
"""The most decoded payload bytes of a unit of work, over all ranks. They take about a second, the most a kill loses."""
UNIT_ROWS = 100_000
"""The most rows of a unit of work, over all ranks. The limit bounds the memory for columns."""
ROWS_PER_WRITER = 4096
"""The rows per writer that a unit of work may always have, even above `UNIT_ROWS`. Shards are read batch by batch."""
UNIT_FORMAT = 3
"""The version of the result that a merge makes from its inputs. Units of an earlier version are built again."""
_NAME = re.compile(r"steps(-?[0-9]+)to(-?[0-9]+)-([0-9]+)of([0-9]+)-([0-9a-f]{16})")

Counts = npt.NDArray[np.int64]


class Window(NamedTuple):
    """Steps that are merged together, `first <= step < last`. Their rows are cut into units of about equal payload."""

    first: int
    last: int
    num_units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of work: a part of a window. It becomes a global writer directory, and one for each rank with rows."""

    window: Window
    share: int
    """The index of this unit among the units of its window."""
    digest: str
    """A hash of all that decides the result: the shards with the window's steps, their writers, and the options."""
    payload_bytes: int

    @property
    def name(self) -> str:
        """The name of the unit's directories. Units with equal names have equal content."""
        first, last, num_units = self.window
        return f"steps{first:09d}to{last:09d}-{self.share + 1:02d}of{num_units:02d}-{self.digest}"


def is_unit_name(name: str) -> bool:
    """Return True if a directory has the name of a unit of work."""
    return _NAME.fullmatch(name) is not None


class Inputs:
    """The inputs of a merge: rows and bytes of each step in each shard, and all else that decides the global rows."""

    def __init__(self, run: Run, options: Mapping[str, Any]) -> None:
        self._constant = [UNIT_FORMAT, options]
        self._writers: list[Any] = []
        self._shards: list[tuple[int, str, int | None]] = []
        sizes = [StepSizes.sum([])]
        shards = [np.zeros(0, np.int64)]
        for number, writer in enumerate(run.writers):
            self._writers.append(_inputs_of(writer))
            for shard in writer.shards:
                sizes.append(StepSizes.of(shard.columns(SIZE_COLUMNS)))
                shards.append(np.full(len(sizes[-1].steps), len(self._shards), np.int64))
                size_bytes = shard.size_bytes if shard.is_sealed else None  # only later steps make an open shard grow
                self._shards.append((number, shard.path.name, size_bytes))
        self.shards = [shard for writer in run.writers for shard in writer.shards]
        step, rows, num_bytes = map(np.concatenate, zip(*sizes, strict=True))
        order = np.argsort(step, kind="stable")
        self._step, self._shard = step[order], np.concatenate(shards)[order]
        self._rows, self._bytes = rows[order], num_bytes[order]
        # If the recorder counted the steps itself, a rank's later process replaces all earlier ones.
        is_counted = any(writer.is_counted for writer in run.writers)
        self._constant.append(self._writers if is_counted else None)

    def windows(self, kept: Sequence[Window] = ()) -> Iterator[Window]:
        """Yield windows that cover every step: the `kept` ones, and as few others as the bounds allow."""
        kept = sorted(kept)
        sizes = StepSizes.sum([StepSizes(self._step, self._rows, self._bytes)])
        max_rows = max(UNIT_ROWS, ROWS_PER_WRITER * len(self._writers))
        known = [edge for window in kept for edge in window[:2]]
        edges = [0, *np.searchsorted(sizes.steps, known).tolist(), len(sizes.steps)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            if number % 2:
                yield kept[number // 2]
            else:
                some = StepSizes(*(column[begin:end] for column in sizes))
                for first, last, num_rows, num_bytes in some.cut(max_rows, UNIT_BYTES):
                    num_units = max(1, math.ceil(num_rows / max_rows), -(-num_bytes // UNIT_BYTES))
                    yield Window(first, last, num_units)

    def units(self, window: Window) -> list[Unit]:
        """Return the units of a window. Their digests and sizes follow from this run's rows in the window."""
        begin, end = np.searchsorted(self._step, window[:2])
        digest = self._digest(begin, end)
        payload_bytes = int(self._bytes[begin:end].sum())
        return [
            Unit(window=window, share=share, digest=digest, payload_bytes=payload_bytes // window.num_units)
            for share in range(window.num_units)
        ]

    def shards_of(self, window: Window) -> list[Any]:
        begin, end = np.searchsorted(self._step, window[:2])
        return [self.shards[number] for number in np.unique(self._shard[begin:end]).tolist()]

    def kept_windows(self, names: Collection[str]) -> list[Window]:
        """Return the windows whose units are all among `names` and were merged from the rows that this run has."""
        candidates: set[Window] = set()
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None:
                candidates.add(Window(int(match[1]), int(match[2]), int(match[4])))
        kept: list[Window] = []
        for window in sorted(candidates):
            is_apart = not kept or kept[-1].last <= window.first
            if is_apart and window.first < window.last and all(unit.name in names for unit in self.units(window)):
                kept.append(window)
        return kept

    def _digest(self, begin: int, end: int) -> str:
        shards, index = np.unique(self._shard[begin:end], return_inverse=True)
        rows = np.zeros(len(shards), np.int64)
        np.add.at(rows, index.reshape(-1), self._rows[begin:end])
        listed = [(*self._shards[shard], count) for shard, count in zip(shards.tolist(), rows.tolist(), strict=True)]
        # Writers are identified by name, because their indexes change when a lower rank starts to write.
        named = sorted([*self._writers[number][:2], *rest] for number, *rest in listed)
        writers = [self._writers[number] for number in sorted({number for number, *_ in listed})]
        text = json.dumps([self._constant, writers, named], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _inputs_of(writer: RecordedWriter) -> list[Any]:
    groups = [
        [root.name, *(root.members.get(name) for name in _PARALLEL), len(root.modules)]
        for root in writer.manifest.roots
    ]
    folder = GLOBAL_DIR if writer.rank is None else rank_dir(writer.rank)
    run = [writer.manifest.run_id, writer.manifest.world_size, writer.manifest.step_source]
    return [folder, writer.name, writer.attempt, *run, groups]


_ROW_WEIGHT = 1024
_MAX_DAMAGE = 20
_DAMAGED = "the values are damaged, or cannot be read"
_NOT_UNDERSTOOD = "a later version wrote the values in a way that this version does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """The result of a unit of work. It is also written to the unit's manifest. Sizes are in bytes."""

    num_tensors: int
    num_rows: int
    source_bytes: int
    written_bytes: int
    findings: Summary
    damage: list[str]
    """Messages about damage in the source shards that contain the unit's steps."""

    @property
    def is_damaged(self) -> bool:
        """True if another merge may find more rows once the source is repaired."""
        return bool(self.damage) or CORRUPT in self.findings


UNKNOWN = UnitReport(num_tensors=0, num_rows=0, source_bytes=0, written_bytes=0, findings={}, damage=["no manifest"])


class _Loaded(NamedTuple):
    window: Window
    rows: GlobalRows
    batch: Any


class UnitBuilder:
    """Merges units of one run. `manifest` has what all units' manifests share. Not thread-safe."""

    def __init__(self, view: GlobalView, inputs: Inputs, manifest: Mapping[str, Any]) -> None:
        self._view = view
        self._inputs = inputs
        self._manifest = manifest
        self._memory = WriterMemory()
        self._loaded: _Loaded | None = None

    def is_as_planned(self, unit: Unit) -> bool:
        """Return True if the run, as opened here, has the rows from which the unit was planned."""
        return self._inputs.units(unit.window)[unit.share].digest == unit.digest

    def build(self, unit: Unit, folder: Path) -> UnitReport:
        """Write a unit's writer directories into the empty `folder`. If it raises, the caller removes the folder."""
        rows, batch = self._load(unit.window)
        is_own = _share_of_rows(rows.payload_bytes, unit.window.num_units) == unit.share
        ranks = batch.column("rank").fill_null(-1).to_numpy()
        findings = list(rows.findings) if unit.share == 0 else []
        num_rows = written_bytes = 0
        done: list[tuple[int | None, MergedDirectory]] = []
        # Directories are filled one by one, because each needs the memory of a batch and a unit may have hundreds. The
        # global directory is made even if a unit has no global rows.
        for rank in [-1, *(rank for rank in np.unique(ranks[is_own]).tolist() if rank >= 0)]:
            name = GLOBAL_DIR if rank < 0 else rank_dir(rank)
            directory = MergedDirectory(folder / name, batch, self._memory)
            try:
                for row in np.flatnonzero(is_own & (ranks == rank)).tolist():
                    self._add(directory, rows, row, findings)
                directory.finish()
            except BaseException:
                directory.abandon()
                raise
            done.append((None if rank < 0 else rank, directory))
            num_rows += directory.num_rows
            written_bytes += directory.written_bytes
        damage = [text for shard in self._inputs.shards_of(unit.window) for text in shard.damage]
        report = UnitReport(
            num_tensors=int(np.count_nonzero(is_own)),
            num_rows=num_rows,
            source_bytes=unit.payload_bytes,
            written_bytes=written_bytes,
            findings=summarize(findings),
            damage=damage[:_MAX_DAMAGE],
        )
        for rank, directory in done:
            merge: dict[str, Any] = {"first": unit.window.first, "last": unit.window.last, "piece": unit.share}
            if rank is None:
                merge |= {name: getattr(report, name) for name in UnitReport.__dataclass_fields__}
            directory.describe({**self._manifest, "writer": unit.name, "rank": rank, "merge": merge})
        for shard in self._inputs.shards_of(unit.window):
            shard.release()  # the pages of a mapped shard count as memory of the process
        return report

    def _load(self, window: Window) -> tuple[GlobalRows, Any]:
        if self._loaded is None or self._loaded.window != window:
            self._loaded = None
            rows = self._view.rows(window.first, window.last)
            self._loaded = _Loaded(window, rows, as_batch(rows.table))
        return self._loaded.rows, self._loaded.batch

    def _add(self, directory: MergedDirectory, rows: GlobalRows, row: int, findings: list[RowFinding]) -> None:
        if directory.rows.column("encoding")[row].as_py() is None:
            directory.add(row, None)
            return
        num_parts = 0
        try:
            for part in rows.parts(row):
                directory.add(row, part, num_parts)
                num_parts += 1
        except RunError as error:
            findings.append(_unreadable(directory.rows, row, error))
            if num_parts == 0:
                is_unknown = isinstance(error, UnsupportedError)
                directory.add(row, None, why=_NOT_UNDERSTOOD if is_unknown else _DAMAGED)
                return
        if num_parts == 0:
            directory.add(row, None)


def read_report(manifest: Mapping[str, Any]) -> UnitReport:
    """Return the report in a unit's manifest. Return `UNKNOWN` if it is missing or of another version."""
    try:
        return UnitReport(**{name: manifest["merge"][name] for name in UnitReport.__dataclass_fields__})
    except (KeyError, TypeError):
        return UNKNOWN


def _share_of_rows(payload_bytes: Any, num_units: int) -> Any:
    """Return the index of the unit of each row. A unit has consecutive rows, and units have about equal payloads."""
    weights = np.asarray(payload_bytes, np.int64) + _ROW_WEIGHT
    begins = np.cumsum(weights) - weights
    total = int(weights.sum()) or 1
    return np.minimum(begins * num_units // total, num_units - 1)


def _unreadable(rows: Any, row: int, error: RunError) -> RowFinding:
    values = {name: rows.column(name)[row].as_py() for name in ("step", "module_path", "site", "name", "rank")}
    present = rows.column("ranks_present")[row].as_py()
    ranks = [values["rank"]] if values["rank"] is not None else json.loads(present or "[]")
    return RowFinding(
        kind=UNKNOWN_ENCODING if isinstance(error, UnsupportedError) else CORRUPT,
        step=values["step"],
        module_path=values["module_path"],
        site=values["site"],
        name=values["name"],
        ranks=tuple(ranks),
        text=str(error),
    )


CORRUPT = "corrupt"
"""The kind of finding for bytes of the source run that changed or are missing."""
UNKNOWN_ENCODING = "unknown_encoding"
"""The kind of finding for an encoding or dtype of a later version, which cannot be read here."""
UNKNOWN_COLUMN = "unknown_column"
"""The kind of finding for a column of a later version. Merged rows lack it."""
MAX_EXAMPLES = 5
_HARMLESS = ("per_rank", "inferred", "superseded", "buffers_differ", "between_stages", UNKNOWN_COLUMN)
_FIELDS = ("step", "module_path", "site", "name", "text")

Entry = dict[str, Any]
Summary = dict[str, Entry]
"""For each kind of finding: `count`, `num_problems` (those that make the exit code 1), and `first`, a few examples."""


def is_problem(kind: str) -> bool:
    """Return True if a finding means that the merged run is incomplete, or that the training was faulty.

    Replicas of buffers may differ: each rank keeps its own values until the next forward broadcasts the first rank's.
    """
    return kind not in _HARMLESS


def summarize(findings: Iterable[RowFinding]) -> Summary:
    """Count findings by kind."""
    summary: Summary = {}
    for finding in findings:
        entry = summary.setdefault(finding.kind, _of_run((), 0, 0))
        entry["count"] += finding.num_rows
        entry["num_problems"] += finding.num_rows * is_problem(finding.kind)
        if len(entry["first"]) < MAX_EXAMPLES:
            example = {name: getattr(finding, name) for name in _FIELDS}
            entry["first"].append(example | {"ranks": list(finding.ranks)})
    return summary


def of_damage(texts: Iterable[str]) -> Summary:
    """Summarize messages about damage in the source run. Equal messages count once."""
    texts = list(dict.fromkeys(texts))
    return {CORRUPT: _of_run(texts, len(texts), len(texts))} if texts else {}


def of_unknown_columns(rows_of: Mapping[str, int]) -> Summary:
    """Summarize the columns that merged rows lack. `rows_of` has the number of source rows with each column."""
    texts = [f"column {name!r}: this version of recorder does not know it" for name in rows_of]
    return {UNKNOWN_COLUMN: _of_run(texts, max(rows_of.values()), 0)} if texts else {}


def _of_run(texts: Sequence[str], count: int, num_problems: int) -> Entry:
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {"count": count, "num_problems": num_problems, "first": first}


def combine(summaries: Iterable[Summary]) -> Summary:
    """Add up summaries. If examples differ only in the step, the first one is kept."""
    total: Summary = {}
    for summary in summaries:
        for kind, entry in summary.items():
            into = total.setdefault(kind, _of_run((), 0, 0))
            into["count"] += entry["count"]
            into["num_problems"] += entry["num_problems"]
            known = [_content(example) for example in into["first"]]
            into["first"] += [example for example in entry["first"] if _content(example) not in known]
            del into["first"][MAX_EXAMPLES:]
    return total


def _content(example: Entry) -> Entry:
    return {name: value for name, value in example.items() if name != "step"}


def num_problems(summary: Summary) -> int:
    """Return the number of findings that make the exit code 1."""
    return sum(int(entry["num_problems"]) for entry in summary.values())
