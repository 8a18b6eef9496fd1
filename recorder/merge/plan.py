"""Cuts a run into units of work by its indexes alone, and recognizes a unit later.

Must never open a payload, and never hold more of a run than one small record a shard and step.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.rundir import rank_dir
from ..read.metadata import SIZE_COLUMNS, StepSizes
from ..read.writers import GLOBAL_DIR, RecordedWriter
from ..run.run import Run

_PARALLEL = ("data_parallel", "model_parallel", "pipeline", "unshared")
"""Members of a root that say how its ranks stand to each other."""
UNIT_BYTES = 256 << 20
"""Decoded payload of a unit, of all ranks: a second of work, and the most that a kill costs."""
UNIT_ROWS = 100_000
"""Rows of a unit, of all ranks, which bound the memory for their columns."""
ROWS_PER_WRITER = 4096
"""With many writers, a unit has at least so many rows of each, because shards are read batch by batch."""
UNIT_FORMAT = 3
"""Raised when the same inputs would be merged into something else; units of an older number are made again."""
_NAME = re.compile(r"steps(-?[0-9]+)to(-?[0-9]+)-([0-9]+)of([0-9]+)-([0-9a-f]{16})")

Counts = npt.NDArray[np.int64]


class Window(NamedTuple):
    """Steps that are merged together, `first <= step < last`, cut into units of about equal payload."""

    first: int
    last: int
    num_units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A share of a window: the rows that one writer directory of the merged run holds."""

    window: Window
    share: int
    """The number of this unit among the `num_units` of its window."""
    digest: str
    """A hash of everything that decides the result: the shards of these steps, their writers, the options."""
    payload_bytes: int
    """Decoded bytes of all ranks, for the progress bar."""

    @property
    def name(self) -> str:
        """The name of the unit's directories, which says all of it: a directory of this name holds this very unit."""
        first, last, num_units = self.window
        return f"steps{first:09d}to{last:09d}-{self.share + 1:02d}of{num_units:02d}-{self.digest}"


def is_unit_name(name: str) -> bool:
    """Whether a directory is named like a unit."""
    return _NAME.fullmatch(name) is not None


class Inputs:
    """The rows and bytes of each step in each shard of a run, and what else the global view depends on."""

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
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
                size_bytes = shard.size_bytes if shard.is_sealed else None  # an open one grows with later steps
                self._shards.append((number, shard.path.name, size_bytes))
        self.shards = [shard for writer in run.writers for shard in writer.shards]
        step, rows, num_bytes = map(np.concatenate, zip(*sizes, strict=True))
        order = np.argsort(step, kind="stable")
        self._step, self._shard = step[order], np.concatenate(shards)[order]
        self._rows, self._bytes = rows[order], num_bytes[order]
        # Where steps are merely counted, a later life of a rank replaces the earlier ones as a whole.
        is_counted = any(writer.is_counted for writer in run.writers)
        self._constant.append(self._writers if is_counted else None)

    def windows(self, kept: Sequence[Window] = ()) -> Iterator[Window]:
        """Yield windows that cover every step: those `kept`, and between them as few as the bounds allow."""
        kept = sorted(kept)
        sizes = StepSizes.sum([StepSizes(self._step, self._rows, self._bytes)])
        max_rows = max(UNIT_ROWS, ROWS_PER_WRITER * len(self._writers))
        known = [edge for window in kept for edge in window[:2]]
        edges = [0, *np.searchsorted(sizes.steps, known).tolist(), len(sizes.steps)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            if number % 2:
                yield kept[number // 2]
            else:
                yield from _cut(StepSizes(*(column[begin:end] for column in sizes)), max_rows)

    def units(self, window: Window) -> list[Unit]:
        """Return the units of a window as this run fills it."""
        begin, end = np.searchsorted(self._step, window[:2])
        digest = self._digest(begin, end)
        payload_bytes = int(self._bytes[begin:end].sum())
        return [
            Unit(window=window, share=share, digest=digest, payload_bytes=payload_bytes // window.num_units)
            for share in range(window.num_units)
        ]

    def shards_of(self, window: Window) -> list[Any]:
        """Return the shards with rows of a window's steps."""
        begin, end = np.searchsorted(self._step, window[:2])
        return [self.shards[number] for number in np.unique(self._shard[begin:end]).tolist()]

    def kept_windows(self, names: Collection[str]) -> list[Window]:
        """Return the windows all of whose units are among `names`, merged from just what this run holds."""
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
        # Writers stand by name, not by number: numbers move when an earlier rank starts to write.
        named = sorted([*self._writers[number][:2], *rest] for number, *rest in listed)
        writers = [self._writers[number] for number in sorted({number for number, *_ in listed})]
        text = json.dumps([self._constant, writers, named], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cut(sizes: StepSizes, max_rows: int) -> Iterator[Window]:
    """Yield windows of consecutive steps within the bounds; a step that exceeds them alone becomes several units."""
    for first, end, num_rows, num_bytes in sizes.cut(max_rows, UNIT_BYTES):
        yield Window(first, end, max(1, math.ceil(num_rows / max_rows), -(-num_bytes // UNIT_BYTES)))


def _inputs_of(writer: RecordedWriter) -> list[Any]:
    """Return what the global view takes from a writer beside its rows."""
    groups = [
        [root.name, *(root.members.get(name) for name in _PARALLEL), len(root.modules)]
        for root in writer.manifest.roots
    ]
    folder = GLOBAL_DIR if writer.rank is None else rank_dir(writer.rank)
    run = [writer.manifest.run_id, writer.manifest.world_size, writer.manifest.step_source]
    return [folder, writer.name, writer.attempt, *run, groups]
