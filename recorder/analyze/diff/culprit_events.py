"""Turns the paired rows of two recorded runs into events, in the order of execution.

An event is one value of a step, with the ranks on which the value differs between the runs. All rows of the value are
one event, even if each rank has a row because their values form no single tensor. This module must never read a
payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import note_members, stage_of
from ...numerics.keys import VALUE_KEY, Integers, by_key, holds
from ...numerics.moments import integers
from ...run.notes import differing_ranks
from ...sites import GRADIENTS
from .pairs import Alignment, Flags

_SIGNATURE = ("shape", "dtype", "mean", "std", "min", "max", "l2")
_COLUMNS = (*VALUE_KEY, "scope", "rank", "fingerprint", "note", *_SIGNATURE)


class StepEvent(NamedTuple):
    """One value of a step, in both runs or in only one of them."""

    order: float
    """The position of the value in the first run's order of execution."""
    step: int
    root: str
    path: str
    site: str
    name: str
    phase: str
    mode: str
    micro_step: int | None
    call: int
    scope: str | None
    signature: Any
    """The value's fingerprint, or else its shape, dtype and statistics. Equal values of a step have equal signatures.
    None if the value's row has neither a fingerprint nor statistics."""
    differs: bool
    ranks: tuple[int, ...]
    """The ranks of the second run whose own value differs from the first run's. Empty if all ranks share one value."""
    pair: int
    """The index of the value's first pair of rows that differ; -1 if the rows of every pair agree."""
    alone: str = ""
    """``a`` if only the first run has the value, ``b`` if only the second run has it; else empty."""
    stage: int | None = None
    """The pipeline stage in the second run, or else in the first run; None if neither run is a pipeline."""
    is_handed_on: bool = False
    """True for a value of one micro-batch that a pipeline stage passes to another stage."""
    is_open: bool = False
    """True if the ranks' values form a single tensor in one run only, so that a difference need not be an error."""
    is_constant: bool = False
    """True for a buffer that no forward changes: each rank of the first run has one value at all compared steps."""


def events(a: Any, b: Any, pairs: Alignment, differs: Flags, is_open: Flags) -> dict[int, list[StepEvent]]:
    """Return the events of each step at which both runs have rows. The keys are steps.

    `differs` flags the pairs of rows that differ. `is_open` flags further pairs, which may differ without an error.
    """
    left, ranks_b = a.take(pa.array(pairs.a)), integers(b.column("rank").take(pa.array(pairs.b)))
    notes_b = b.column("note").take(pa.array(pairs.b)).to_pylist()
    events_by_key: dict[tuple[Any, ...], StepEvent] = {}
    constant = _constant_buffers(a)
    for number, row in enumerate(_rows(left)):
        event = _event(float(pairs.a[number]), row)
        if event.site == "buffer" and (event.root, event.path, event.name) in constant:
            event = event._replace(is_constant=True)
        if (stage := stage_of(notes_b[number])[0]) is not None:
            event = event._replace(stage=stage)
        rank = int(ranks_b[number]) if ranks_b[number] >= 0 else row["rank"]
        if differs[number] or is_open[number]:
            event = event._replace(ranks=() if rank is None else (rank,), pair=number)
            event = event._replace(differs=bool(differs[number]), is_open=bool(is_open[number]))
        _join(events_by_key, row, event)
    for event, row in _alone(a, b, pairs):
        _join(events_by_key, row, event)
    steps = by_key((event.step, event) for event in events_by_key.values())
    return {step: sorted(steps[step], key=lambda event: event.order) for step in sorted(steps)}


def differing_steps(a: Any, b: Any, pairs: Alignment, differs: Flags) -> list[int]:
    """Return the steps of both runs at which a value differs, or at which only one run has a gradient."""
    steps = integers(a.column("step"))
    differing = set(steps[pairs.a[differs]].tolist())
    for table, only in ((a, pairs.only_a), (b, pairs.only_b)):
        alone = table.select(["step", "site", "note"]).take(pa.array(only))
        came_apart = pa.array(holds(alone.column("note"), lambda note: "replicas_differ" in note_members(note)))
        alone = alone.filter(pc.or_(pc.is_in(alone.column("site"), pa.array(GRADIENTS)), came_apart))
        differing.update(alone.column("step").unique().to_pylist())
    return sorted(differing & set(steps[pairs.a].tolist()))


def of_steps(pairs: Alignment, a: Any, b: Any, steps: list[int]) -> tuple[Alignment, Integers]:
    """Return the pairs and the unpaired rows at `steps`, and the index in `pairs` of each pair returned."""
    is_a, is_b = (np.isin(integers(table.column("step")), steps) for table in (a, b))
    kept = np.flatnonzero(is_a[pairs.a])
    only_a, only_b = pairs.only_a[is_a[pairs.only_a]], pairs.only_b[is_b[pairs.only_b]]
    return Alignment(pairs.a[kept], pairs.b[kept], only_a, only_b), kept


def _rows(table: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(list(_COLUMNS)).to_pylist()
    return rows


def _event(order: float, row: dict[str, Any]) -> StepEvent:
    stage, is_handed_on = stage_of(row["note"])
    signature = row["fingerprint"] or (row["l2"] is not None and tuple(row[name] for name in _SIGNATURE)) or None
    return StepEvent(
        order, row["step"], row["root"], row["module_path"], row["site"], row["name"], row["phase"], row["mode"],
        row["micro_step"], row["call"], row["scope"], signature, differs=False, ranks=(), pair=-1,
        stage=stage, is_handed_on=is_handed_on,
    )  # fmt: skip


def _constant_buffers(table: Any) -> set[tuple[str, str, str]]:
    rows = _rows(table.filter(pc.equal(table.column("site"), "buffer")))
    pairs = ((_event(0.0, row), row["rank"]) for row in rows)
    known = by_key(((event.root, event.path, event.name), (event.signature, rank)) for event, rank in pairs)
    return {name for name, values in known.items() if len({*values}) == len({rank for _, rank in values})}


def _join(events_by_key: dict[tuple[Any, ...], StepEvent], row: dict[str, Any], event: StepEvent) -> None:
    key = (*(row[name] for name in VALUE_KEY), event.stage if event.is_handed_on else None)
    known = events_by_key.get(key)
    if known is None or (event.differs and not known.differs):
        events_by_key[key] = event if known is None else event._replace(order=known.order)
    elif event.differs or event.is_open:
        events_by_key[key] = known._replace(ranks=tuple(dict.fromkeys((*known.ranks, *event.ranks))))


def _alone(a: Any, b: Any, pairs: Alignment) -> Iterator[tuple[StepEvent, dict[str, Any]]]:
    """Yield an event and its row for each gradient that only one run has, at steps and sites that both runs recorded.

    A value that is one tensor in the first run is yielded, too, if its replicas differ on ranks of the second run.
    """
    common = set(zip(*(a.column(name).take(pa.array(pairs.a)).to_pylist() for name in ("step", "site")), strict=True))
    order = np.argsort(pairs.b, kind="stable")
    alone_a = a.select([*VALUE_KEY, "rank"]).take(pa.array(pairs.only_a)).to_pylist()
    keys_a = {tuple(row[name] for name in VALUE_KEY) for row in alone_a}
    whole = {tuple(row[name] for name in VALUE_KEY) for row in alone_a if row["rank"] is None}
    alone_b = b.select(list(VALUE_KEY)).take(pa.array(pairs.only_b)).to_pylist()
    # The values that are one tensor in `a`, and one tensor per rank in `b`.
    in_both = keys_a & {tuple(row[name] for name in VALUE_KEY) for row in alone_b}
    for side, table, only in (("a", a, pairs.only_a), ("b", b, pairs.only_b)):
        for row_index, row in zip(only.tolist(), _rows(table.take(pa.array(only))), strict=True):
            key = tuple(row[name] for name in VALUE_KEY)
            came_apart = differing_ranks(row["note"]) if side == "b" and key in whole else ()
            if not came_apart and (
                key in in_both or row["site"] not in GRADIENTS or (row["step"], row["site"]) not in common
            ):
                continue
            if row["scope"] == "local":  # sharded parameters have no local gradient, so the final gradient is judged
                continue
            when = float(row_index)
            if side == "b":  # the event comes directly after the row that precedes it in b
                at = int(np.searchsorted(pairs.b[order], row_index)) - 1
                when = float(pairs.a[order[at]]) + 0.5 if at >= 0 else -0.5
            ranks = () if row["rank"] is None else (row["rank"],)
            yield (
                _event(when, row)._replace(differs=True, ranks=came_apart or ranks, alone="" if came_apart else side),
                row,
            )
