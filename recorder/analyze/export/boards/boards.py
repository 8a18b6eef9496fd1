"""Runs for the pages of others: statistics, histograms and pictures, for TensorBoard or for Weights & Biases.

What is written is what was recorded. Histograms keep their very bins, and a number that is not there is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ....errors import CorruptError, LookupFailedError, RunError
from ....numerics.dtypes import as_array
from ....numerics.histogram import Histogram
from ....run.problems import Partial
from ....run.run import Run
from ....run.selection import GlobalOptions, Selection
from ....run.step_ranges import Mapper, map_serially
from ..export import Exported
from ..names import NAMING, ROOT, as_level, unusual_levels
from ..publishing import published_folder
from ..tensors import Tensors
from .pictures import is_picture, picture_of

BOARDS = ("tensorboard", "wandb")
MAX_RANKS = 64
"""Ranks that are written, each as a run of its own."""
_STATISTICS = ("mean", "std", "absmax", "l2")
_COUNTS = ("nan_count", "inf_count")
_MAX_TENSOR_BYTES = 64 << 20
_COLUMNS = tuple(dict.fromkeys((*NAMING, *_STATISTICS, *_COUNTS, "zero_count", "histogram", "time_ns", "note")))

Picture = npt.NDArray[np.uint8]
Step = Mapping[str, "float | Histogram | Picture"]
"""What there is of a step, by tag."""


class Board(Protocol):
    """One run on a page of others."""

    def add(self, step: int, time_s: float, values: Step) -> None:
        """Take what there is of a step; steps come in order."""


class BoardExport:
    """An export to the page of others, planned; `write` does it."""

    def __init__(
        self,
        run: Run,
        to: str,
        selection: Selection,
        options: GlobalOptions,
        *,
        payload: bool = False,
        mapper: Mapper = map_serially,
    ) -> None:
        """Find the ranks that are written.

        Raises:
            LookupFailedError: there is no such page, there are too many ranks, or the selection can match nothing.
            UnsupportedError: the package that writes is not installed.
        """
        if payload:
            raise LookupFailedError(f"payload is for parquet: leave it out of an export to {to}")
        self._board_of = _opener(to)
        self._run, self._selection, self._options, self._mapper = run, selection, options, mapper
        self.to = to
        Tensors(run, selection, options, mapper)  # refuses what can match nothing
        self._ranks: list[int | None] = [None] if options.across_ranks else [*selection.ranks(run.ranks)] or [None]
        if len(self._ranks) > MAX_RANKS:
            raise LookupFailedError(
                f"--to {to} writes a run for each rank, and {len(self._ranks)} are more than {MAX_RANKS}: choose some "
                "with --rank, or --global for the whole model"
            )
        self.total_bytes = 0
        """0: how much there is is not known before."""

    def write(self, path: Path, *, force: bool = False, report: Callable[[int], None] = lambda done: None) -> Exported:
        """Write the folder, under its name only once it is whole.

        Raises:
            WriteError: there is something already, or it cannot be written.
        """
        if force:
            raise LookupFailedError(f"--force replaces a file, and {self.to} is a folder: take the old one away first")
        partial, problems, notes, num_values, is_damaged = Partial(), list[str](), list[str](), 0, False
        with published_folder(path) as folder:
            for rank in self._ranks:
                tensors, selection = self._tensors(rank)
                name = self._run.name if rank is None else f"{self._run.name}/rank={rank:05}"
                pictures = self._pictures(selection, notes)
                with self._board_of(folder, name, self._run) as board:
                    for step, time_s, values in _steps(tensors, partial, pictures):
                        board.add(step, time_s, values)
                        num_values += len(values)
                problems += tensors.problems.texts()
                is_damaged |= tensors.is_damaged
            if not num_values:
                raise tensors.explain_nothing()
        file_bytes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        notes += partial.notes(is_taken=self._options.partial)
        is_whole = not (partial or is_damaged or self._run.problems)
        return Exported(path, num_values, sum(file_bytes), notes, problems, is_whole)

    def _tensors(self, rank: int | None) -> tuple[Tensors, Selection]:
        selection = self._selection if rank is None else replace(self._selection, rank=rank)
        return Tensors(self._run, selection, self._options, self._mapper), selection

    def _pictures(self, selection: Selection, notes: list[str]) -> dict[int, dict[str, Picture]]:
        """The pictures of a rank, by step and tag."""
        tensors = Tensors(self._run, selection, self._options, self._mapper)
        try:
            entries = tensors.entries(Partial())
        except LookupFailedError:
            return {}  # nothing has values
        chosen = [
            one
            for one in entries
            if is_picture(str(one.naming["site"]), one.shape) and one.payload_bytes <= _MAX_TENSOR_BYTES
        ]
        pictures: dict[int, dict[str, Picture]] = {}
        in_turn = tensors.in_turn(chosen)
        for entry in chosen:
            try:
                data = np.concatenate([span.data for span in in_turn.spans(entry)])
                array = as_array(data, entry.dtype, entry.shape).astype(np.float32)
            except RunError as error:
                notes.append(f"left out: the picture of {entry.name}, which cannot be read: {error}")
                continue
            made = picture_of(str(entry.naming["site"]), array)
            if made is not None:
                pictures.setdefault(int(entry.naming["step"]), {})[_tag(entry.naming)] = made
        return pictures


def _steps(
    tensors: Tensors, partial: Partial, pictures: Mapping[int, Mapping[str, Picture]]
) -> Iterator[tuple[int, float, Step]]:
    """What there is of each step, in order."""
    for chosen in tensors.chosen(_COLUMNS, partial):
        table = chosen.table.sort_by("step")
        values: dict[str, float | Histogram | Picture] = {}
        last, time_ns = None, 0
        for row in table.to_pylist():
            if row["step"] != last and last is not None:
                yield last, time_ns / 1e9, {**values, **pictures.get(last, {})}
                values = {}
            last, time_ns = row["step"], row["time_ns"]
            _take(row, values)
        if last is not None:
            yield last, time_ns / 1e9, {**values, **pictures.get(last, {})}


def _take(row: Mapping[str, Any], values: dict[str, float | Histogram | Picture]) -> None:
    """Add what a row says."""
    tag = _tag(row)
    if row["site"] == "scalar":
        if row["mean"] is not None:
            values[tag] = row["mean"]
        elif row["nan_count"] or row["inf_count"]:
            values[tag] = float("nan") if row["nan_count"] else float("inf")
        return
    values |= {f"{tag}/{name}": row[name] for name in _STATISTICS if row[name] is not None}
    values |= {f"{tag}/{name}": float(row[name]) for name in _COUNTS if row[name]}
    if row["histogram"] is not None:
        try:
            values[f"{tag}/histogram"] = Histogram.from_bytes(
                row["histogram"], zero_count=row["zero_count"] or 0, nan_count=row["nan_count"] or 0
            )
        except CorruptError:
            return  # `recorder verify` tells of it


def _tag(row: Mapping[str, Any]) -> str:
    """``output/blocks.0.mlp.up``, then the name at the site and what is not the usual case."""
    path = as_level(row["module_path"]) or ("" if row["site"] == "scalar" else ROOT)
    levels = [as_level(row["site"]), path, as_level(row["name"])]
    return "/".join([*filter(None, levels), *unusual_levels({**row, "rank": None})])


def _opener(to: str) -> Callable[[Path, str, Run], AbstractContextManager[Board]]:
    if to == "tensorboard":
        from .tensorboard import open_board

        return open_board
    from .wandb import open_board as open_wandb

    return open_wandb
