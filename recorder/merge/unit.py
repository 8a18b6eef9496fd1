"""Owns the merging of one unit: from the view's rows to closed writer directories in a folder of its own.

Must never write outside that folder, and never hold a unit's payload. What the source cannot give is a finding.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import RunError
from ..format.rundir import rank_dir
from ..read.groups import Finding
from ..read.run import Run
from ..read.view import GlobalRows, GlobalView
from ..read.writers import GLOBAL_DIR
from .findings import CORRUPT, Summary, summarize
from .plan import Inputs, Unit, Window
from .shards import Directory, Memory, as_batch

_ROW_WEIGHT = 1024
"""What a row without a payload counts when a window is cut, in bytes."""
_MAX_DAMAGE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """What became of a unit; stands in its manifest, too. Sizes are in bytes."""

    num_tensors: int
    num_rows: int
    source_bytes: int
    """Payload of all ranks, decoded."""
    written_bytes: int
    """Shards and indexes, without the manifests."""
    findings: Summary
    damage: list[str]
    """What the source's shards of these steps have lost."""

    @property
    def is_damaged(self) -> bool:
        """Whether another try may give more, once the source is mended."""
        return bool(self.damage) or CORRUPT in self.findings


UNKNOWN = UnitReport(num_tensors=0, num_rows=0, source_bytes=0, written_bytes=0, findings={}, damage=["no manifest"])
"""Stands for the report of a unit that has none."""


class _Loaded(NamedTuple):
    window: Window
    rows: GlobalRows
    batch: Any


class UnitBuilder:
    """Merges units of one run, one after the other. Not thread-safe."""

    def __init__(self, run: Run, view: GlobalView, inputs: Inputs, manifest: Mapping[str, Any]) -> None:
        """Nothing happens before `build`.

        Args:
            run: as it was when it was opened.
            view: of that run.
            inputs: of that run.
            manifest: what the manifests of all units say.
        """
        self._run = run
        self._view = view
        self._inputs = inputs
        self._manifest = manifest
        self._memory = Memory()
        self._loaded: _Loaded | None = None

    def is_as_planned(self, unit: Unit) -> bool:
        """Whether this opening of the run holds just what the unit was planned from; one being recorded may not."""
        return self._inputs.units(unit.window)[unit.piece].digest == unit.digest

    def build(self, unit: Unit, folder: Path) -> UnitReport:
        """Fill `folder`, which exists and is empty, with the writer directories of a unit.

        Raises:
            OSError: the disk refused. The folder is for the caller to remove.
        """
        rows, batch = self._load(unit.window)
        piece = _pieces(rows.payload_bytes, unit.window.num_pieces) == unit.piece
        ranks = batch.column("rank").fill_null(-1).to_numpy()
        findings = list(rows.findings) if unit.piece == 0 else []
        num_rows = written_bytes = 0
        done: list[tuple[int | None, Directory]] = []
        # Rank by rank: a directory needs the memory of a batch, and there may be hundreds. Global rows always have one.
        for rank in [-1, *(rank for rank in np.unique(ranks[piece]).tolist() if rank >= 0)]:
            name = GLOBAL_DIR if rank < 0 else rank_dir(rank)
            directory = Directory(folder / name, batch, self._memory)
            try:
                for row in np.flatnonzero(piece & (ranks == rank)).tolist():
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
            num_tensors=int(np.count_nonzero(piece)),
            num_rows=num_rows,
            source_bytes=unit.payload_bytes,
            written_bytes=written_bytes,
            findings=summarize(findings),
            damage=damage[:_MAX_DAMAGE],
        )
        for rank, directory in done:
            merge: dict[str, Any] = {"first": unit.window.first, "last": unit.window.last, "piece": unit.piece}
            if rank is None:
                merge |= report_fields(report)
            directory.describe({**self._manifest, "writer": unit.name, "rank": rank, "merge": merge})
        self._let_go(unit)
        return report

    def _load(self, window: Window) -> tuple[GlobalRows, Any]:
        """The rows of a window; several units may be pieces of it."""
        if self._loaded is None or self._loaded.window != window:
            self._loaded = None
            gc.collect()  # rows hold each other, and the mapped shards, in circles
            rows = self._view.rows(window.first, window.last)
            self._loaded = _Loaded(window, rows, as_batch(rows.table))
        return self._loaded.rows, self._loaded.batch

    def _add(self, directory: Directory, rows: GlobalRows, row: int, findings: list[Finding]) -> None:
        """One row with its payload; without it, or without the rest of it, where it cannot be read."""
        if directory.rows.column("encoding")[row].as_py() is None:
            directory.add(row, None)
            return
        num_parts = 0
        try:
            for part in rows.parts(row):
                directory.add(row, part, num_parts)
                num_parts += 1
        except RunError as error:
            findings.append(_unreadable(directory.rows, row, str(error)))
            if num_parts == 0:
                directory.add(row, None, why="they are damaged, or cannot be read")
                return
        if num_parts == 0:
            directory.add(row, None)

    def _let_go(self, unit: Unit) -> None:
        """Unmap the shards: as long as they are mapped, their pages count as this process's memory."""
        for shard in self._inputs.shards_of(unit.window):
            shard.let_go()


def report_fields(report: UnitReport) -> dict[str, Any]:
    """A report as JSON, for the manifest."""
    return {name: getattr(report, name) for name in UnitReport.__dataclass_fields__}


def read_report(manifest: Mapping[str, Any]) -> UnitReport:
    """A report from the manifest of a unit.

    Raises:
        KeyError: it is none of ours.
    """
    return UnitReport(**{name: manifest["merge"][name] for name in UnitReport.__dataclass_fields__})


def _pieces(payload_bytes: Any, num_pieces: int) -> Any:
    """The piece to which each row belongs: consecutive rows, of about equal payload."""
    weights = np.asarray(payload_bytes, np.int64) + _ROW_WEIGHT
    begins = np.cumsum(weights) - weights
    total = int(weights.sum()) or 1
    return np.minimum(begins * num_pieces // total, num_pieces - 1)


def _unreadable(rows: Any, row: int, text: str) -> Finding:
    values = {name: rows.column(name)[row].as_py() for name in ("step", "module_path", "site", "name", "rank")}
    present = rows.column("ranks_present")[row].as_py()
    ranks = [values["rank"]] if values["rank"] is not None else json.loads(present or "[]")
    return Finding(
        kind=CORRUPT,
        step=values["step"],
        module_path=values["module_path"],
        site=values["site"],
        name=values["name"],
        ranks=tuple(ranks),
        text=text,
    )
