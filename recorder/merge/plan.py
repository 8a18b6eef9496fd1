"""Owns the cut of a run into units of work, found from the indexes alone, and how a unit is known again later.

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
from ..read.facts import PARALLEL
from ..read.run import Run
from ..read.writers import GLOBAL_DIR, RecordedWriter

UNIT_BYTES = 256 << 20
"""Payload of a unit, decoded and of all ranks: a second of work, and what a kill costs at most."""
UNIT_ROWS = 100_000
"""Rows of a unit, of all ranks: what bounds the memory for their columns."""
ROWS_PER_WRITER = 4096
"""Where there are many writers, a unit has at least so many rows of each: shards are read batch by batch."""
UNIT_FORMAT = 2
"""Changes when the same inputs would be merged into something else; units of another number are made again."""
_NAME = re.compile(r"steps(-?[0-9]+)to(-?[0-9]+)-([0-9]+)of([0-9]+)-([0-9a-f]{16})")

Counts = npt.NDArray[np.int64]


class Window(NamedTuple):
    """Steps that are merged together: `first <= step < last`, in so many pieces of about equal payload."""

    first: int
    last: int
    num_pieces: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of a window: what one writer directory of the merged run holds."""

    window: Window
    piece: int
    digest: str
    """Of everything that decides what comes out: the shards of these steps, their writers, the options."""
    payload_bytes: int
    """Decoded, of all ranks; for the progress bar."""

    @property
    def name(self) -> str:
        """The name of its directories, which says all of it: one that exists is this very unit."""
        first, last, num_pieces = self.window
        return f"steps{first:09d}to{last:09d}-{self.piece + 1:02d}of{num_pieces:02d}-{self.digest}"


def is_unit_name(name: str) -> bool:
    """Whether a directory is named like a unit."""
    return _NAME.fullmatch(name) is not None


class Inputs:
    """What each shard of a run holds of each step, and what else the global view depends on."""

    def __init__(self, run: Run, options: dict[str, Any]) -> None:
        self._constant = [UNIT_FORMAT, options]
        self._facts: list[Any] = []
        self._shards: list[tuple[int, str, int | None]] = []
        steps, shards, rows, nbytes = ([np.zeros(0, np.int64)] for _ in range(4))
        for number, writer in enumerate(run.writers):
            self._facts.append(_facts(writer))
            for shard in writer.shards:
                of_steps = _count_steps(shard)
                steps.append(of_steps[0])
                shards.append(np.full(len(of_steps[0]), len(self._shards), np.int64))
                rows.append(of_steps[1])
                nbytes.append(of_steps[2])
                size_bytes = shard.size_bytes if shard.is_sealed else None  # an open one grows with later steps
                self._shards.append((number, shard.path.name, size_bytes))
        self.shards = [shard for writer in run.writers for shard in writer.shards]
        step = np.concatenate(steps)
        order = np.argsort(step, kind="stable")
        self._step, self._shard = step[order], np.concatenate(shards)[order]
        self._rows, self._bytes = np.concatenate(rows)[order], np.concatenate(nbytes)[order]
        # Where steps are merely counted, a later life of a rank replaces the earlier ones as a whole.
        is_counted = any(writer.is_counted for writer in run.writers)
        self._constant.append(self._facts if is_counted else None)

    def windows(self, kept: Sequence[Window] = ()) -> Iterator[Window]:
        """Windows that cover every step: those `kept`, and between them as few as the bounds allow."""
        kept = sorted(kept)
        steps, starts = np.unique(self._step, return_index=True)
        rows = np.add.reduceat(self._rows, starts) if len(steps) else self._rows
        nbytes = np.add.reduceat(self._bytes, starts) if len(steps) else self._bytes
        max_rows = max(UNIT_ROWS, ROWS_PER_WRITER * len(self._facts))
        edges = [0, *np.searchsorted(steps, [edge for window in kept for edge in window[:2]]).tolist(), len(steps)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            if number % 2:
                yield kept[number // 2]
            else:
                yield from _cut(steps[begin:end], rows[begin:end], nbytes[begin:end], max_rows)

    def units(self, window: Window) -> list[Unit]:
        """The pieces of a window as this run fills it."""
        begin, end = np.searchsorted(self._step, window[:2])
        digest = self._digest(begin, end)
        payload_bytes = int(self._bytes[begin:end].sum())
        return [
            Unit(window=window, piece=piece, digest=digest, payload_bytes=payload_bytes // window.num_pieces)
            for piece in range(window.num_pieces)
        ]

    def shards_of(self, window: Window) -> list[Any]:
        """The shards with rows of these steps."""
        begin, end = np.searchsorted(self._step, window[:2])
        return [self.shards[number] for number in np.unique(self._shard[begin:end]).tolist()]

    def kept_windows(self, names: Collection[str]) -> list[Window]:
        """Windows of which all pieces are among `names`, merged from just what this run holds."""
        found: set[Window] = set()
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None:
                found.add(Window(int(match[1]), int(match[2]), int(match[4])))
        kept: list[Window] = []
        for window in sorted(found):
            is_apart = not kept or kept[-1].last <= window.first
            if is_apart and window.first < window.last and all(unit.name in names for unit in self.units(window)):
                kept.append(window)
        return kept

    def _digest(self, begin: int, end: int) -> str:
        shards, places = np.unique(self._shard[begin:end], return_inverse=True)
        rows = np.zeros(len(shards), np.int64)
        np.add.at(rows, places.reshape(-1), self._rows[begin:end])
        listed = [(*self._shards[shard], count) for shard, count in zip(shards.tolist(), rows.tolist(), strict=True)]
        # A writer by its name, not its number: numbers move when an earlier rank starts to write.
        named = sorted([*self._facts[number][:2], *rest] for number, *rest in listed)
        facts = [self._facts[number] for number in sorted({number for number, *_ in listed})]
        text = json.dumps([self._constant, facts, named], separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cut(steps: Counts, rows: Counts, nbytes: Counts, max_rows: int) -> Iterator[Window]:
    """Consecutive steps in windows within the bounds; a step that exceeds them alone is cut into pieces."""
    begin = 0
    total_rows = total_bytes = 0
    for place in range(len(steps)):
        step_rows, step_bytes = int(rows[place]), int(nbytes[place])
        if place > begin and (total_rows + step_rows > max_rows or total_bytes + step_bytes > UNIT_BYTES):
            yield _window(steps[begin], steps[place - 1], total_rows / max_rows, total_bytes)
            begin, total_rows, total_bytes = place, 0, 0
        total_rows += step_rows
        total_bytes += step_bytes
    if begin < len(steps):
        yield _window(steps[begin], steps[-1], total_rows / max_rows, total_bytes)


def _window(first: np.int64, last: np.int64, share_of_rows: float, num_bytes: int) -> Window:
    return Window(int(first), int(last) + 1, max(1, math.ceil(share_of_rows), -(-num_bytes // UNIT_BYTES)))


def _count_steps(shard: Any) -> tuple[Counts, Counts, Counts]:
    """The steps of a shard, with rows and decoded bytes of each."""
    batches = shard.columns(["step", "payload_bytes"])
    if not batches:
        return (np.zeros(0, np.int64),) * 3
    step = np.concatenate([batch.column("step").to_numpy() for batch in batches])
    nbytes = np.concatenate([batch.column("payload_bytes").fill_null(0).to_numpy() for batch in batches])
    steps, places, rows = np.unique(step, return_inverse=True, return_counts=True)
    total = np.zeros(len(steps), np.int64)
    np.add.at(total, places.reshape(-1), nbytes)
    return steps, rows, total


def _facts(writer: RecordedWriter) -> list[Any]:
    """What the global view takes from a writer beside its rows."""
    roots = writer.manifest.get("roots")
    groups = [
        [
            root.get("name"),
            *(root.get(name) for name in PARALLEL),
            len(found) if isinstance(found := root.get("modules"), list) else 0,
        ]
        for root in (roots if isinstance(roots, list) else ())
        if isinstance(root, dict)
    ]
    where = GLOBAL_DIR if writer.rank is None else rank_dir(writer.rank)
    manifest = writer.manifest
    run = [manifest.get("run_id"), manifest.get("world_size"), manifest.get("step_source")]
    return [where, writer.name, writer.attempt, *run, groups]
