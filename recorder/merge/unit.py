"""Merges one unit: writes the rows of the view as closed writer directories in a folder, and counts the findings.

Must never write outside that folder, and never hold a unit's payload. A row that the source cannot give becomes a
finding.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RunError, UnsupportedError
from ..format.rundir import rank_dir
from ..globalview.row_groups import RowFinding
from ..globalview.view import GlobalRows, GlobalView
from ..read.writers import GLOBAL_DIR
from ..run.run import Run
from .plan import Inputs, Unit, Window
from .shards import MergedDirectory, WriterMemory, as_batch

_ROW_WEIGHT = 1024
"""The weight of a row without a payload when a window is cut, in bytes."""
_MAX_DAMAGE = 20
_DAMAGED = "they are damaged, or cannot be read"
_NOT_UNDERSTOOD = "a later version wrote them in a way that the merging one does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """The result of a unit, which also stands in its manifest. Sizes are in bytes."""

    num_tensors: int
    num_rows: int
    source_bytes: int
    """Decoded payload of all ranks."""
    written_bytes: int
    """Shards and indexes, without the manifests."""
    findings: Summary
    damage: list[str]
    """Texts about the damage in the source's shards of these steps."""

    @property
    def is_damaged(self) -> bool:
        """Whether another merge may give more, once the source is repaired."""
        return bool(self.damage) or CORRUPT in self.findings


UNKNOWN = UnitReport(num_tensors=0, num_rows=0, source_bytes=0, written_bytes=0, findings={}, damage=["no manifest"])
"""The report of a unit whose manifest has none."""


class _Loaded(NamedTuple):
    window: Window
    rows: GlobalRows
    batch: Any


class UnitBuilder:
    """Merges units of one run, one after the other. Not thread-safe."""

    def __init__(self, run: Run, view: GlobalView, inputs: Inputs, manifest: Mapping[str, Any]) -> None:
        """Read nothing before `build`.

        Args:
            run: the source, as it was when it was opened.
            view: the global view of that run.
            inputs: the inputs of that run.
            manifest: the members that the manifests of all units share.
        """
        self._run = run
        self._view = view
        self._inputs = inputs
        self._manifest = manifest
        self._memory = WriterMemory()
        self._loaded: _Loaded | None = None

    def is_as_planned(self, unit: Unit) -> bool:
        """Whether the run, as opened here, holds just what the unit was planned from; a growing run may hold more."""
        return self._inputs.units(unit.window)[unit.share].digest == unit.digest

    def build(self, unit: Unit, folder: Path) -> UnitReport:
        """Fill `folder`, which exists and is empty, with the writer directories of a unit.

        Raises:
            OSError: the disk refused. The folder is for the caller to remove.
        """
        rows, batch = self._load(unit.window)
        is_own = _share_of_rows(rows.payload_bytes, unit.window.num_units) == unit.share
        ranks = batch.column("rank").fill_null(-1).to_numpy()
        findings = list(rows.findings) if unit.share == 0 else []
        num_rows = written_bytes = 0
        done: list[tuple[int | None, MergedDirectory]] = []
        # Rank by rank: a directory needs the memory of a batch, and there may be hundreds. The global directory is made
        # even for a unit without global rows.
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
                merge |= report_fields(report)
            directory.describe({**self._manifest, "writer": unit.name, "rank": rank, "merge": merge})
        self._unmap_shards(unit)
        return report

    def _load(self, window: Window) -> tuple[GlobalRows, Any]:
        """Return the rows of a window, which the units of that window share."""
        if self._loaded is None or self._loaded.window != window:
            self._loaded = None
            gc.collect()  # rows hold each other, and the mapped shards, in circles
            rows = self._view.rows(window.first, window.last)
            self._loaded = _Loaded(window, rows, as_batch(rows.table))
        return self._loaded.rows, self._loaded.batch

    def _add(self, directory: MergedDirectory, rows: GlobalRows, row: int, findings: list[RowFinding]) -> None:
        """Write one row with as much of its payload as can be read."""
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

    def _unmap_shards(self, unit: Unit) -> None:
        """Unmap the shards of a unit, whose pages count as this process's memory as long as they are mapped."""
        for shard in self._inputs.shards_of(unit.window):
            shard.release()


def report_fields(report: UnitReport) -> dict[str, Any]:
    """Return a report as JSON, for the manifest."""
    return {name: getattr(report, name) for name in UnitReport.__dataclass_fields__}


def read_report(manifest: Mapping[str, Any]) -> UnitReport:
    """Return the report in the manifest of a unit.

    Raises:
        KeyError: the manifest has no report, or another version's.
    """
    return UnitReport(**{name: manifest["merge"][name] for name in UnitReport.__dataclass_fields__})


def _share_of_rows(payload_bytes: Any, num_units: int) -> Any:
    """Return the share to which each row belongs; a share has consecutive rows, of about equal payload."""
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
"""The kind of finding where bytes of the source are not those that were written, or are gone."""
UNKNOWN_ENCODING = "unknown_encoding"
"""The kind where a later version encoded the payload, or named the element type, so that it cannot be read here."""
UNKNOWN_COLUMN = "unknown_column"
"""The kind where a later version has a column, which merged rows do without."""
MAX_EXAMPLES = 5
_HARMLESS = ("per_rank", "inferred", "superseded", "buffers_differ", "between_stages", UNKNOWN_COLUMN)
_FIELDS = ("step", "module_path", "site", "name", "text")

Entry = dict[str, Any]
Summary = dict[str, Entry]
"""The summary of each kind: `count`, `num_problems` (findings that make the exit code 1) and `first`, some examples."""


def is_problem(kind: str) -> bool:
    """Whether a finding means that the merged run is less than it should be, or that training was not as it should.

    Buffers are each rank's own until the next forward broadcasts them, so replicas of them may differ.
    """
    return kind not in _HARMLESS


def summarize(findings: Iterable[RowFinding]) -> Summary:
    """Count findings by kind."""
    summary: Summary = {}
    for finding in findings:
        entry = summary.setdefault(finding.kind, {"count": 0, "num_problems": 0, "first": []})
        entry["count"] += finding.num_rows
        entry["num_problems"] += finding.num_rows * is_problem(finding.kind)
        if len(entry["first"]) < MAX_EXAMPLES:
            example = {name: getattr(finding, name) for name in _FIELDS}
            entry["first"].append(example | {"ranks": list(finding.ranks)})
    return summary


def of_damage(texts: Iterable[str]) -> Summary:
    """Summarize texts about damage in the source, each once, under the kind `CORRUPT`."""
    texts = list(dict.fromkeys(texts))
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {CORRUPT: {"count": len(texts), "num_problems": len(texts), "first": first}} if texts else {}


def of_unknown_columns(rows_of: Mapping[str, int]) -> Summary:
    """Summarize the columns that merged rows do without, from the number of rows that have each."""
    if not rows_of:
        return {}
    texts = [f"column {name!r}: this version of recorder does not know it" for name in rows_of]
    first = [dict.fromkeys(_FIELDS) | {"ranks": [], "text": text} for text in texts[:MAX_EXAMPLES]]
    return {UNKNOWN_COLUMN: {"count": max(rows_of.values()), "num_problems": 0, "first": first}}


def combine(summaries: Iterable[Summary]) -> Summary:
    """Add up summaries; of examples that differ in nothing but their step, the first is kept."""
    total: Summary = {}
    for summary in summaries:
        for kind, entry in summary.items():
            into = total.setdefault(kind, {"count": 0, "num_problems": 0, "first": []})
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
