"""Computes the columns whose values in a global tensor's row differ from those in the ranks' rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from ..columns import COLUMN_OF, COUNTS, DETAILS, NONFINITE, PLAIN, STATISTICS, Combine, note_members, parse_shape
from ..errors import CorruptError
from ..format.fingerprint import combine_fingerprints
from ..layout.placement import Plan, Term
from ..numerics.dtypes import ITEM_BYTES, numpy_dtype
from ..numerics.keys import array_of
from ..numerics.moments import ChunkUnits, combine_chunks, join_histograms, joined
from ..numerics.units import Units
from ..read.metadata import MetadataRows
from .assembler import Assembler
from .planner import GlobalValue

NO_VALUES = "no_values"
"""The member of a row's note that says why the row has no payload. Set only if a rank recorded a payload."""
_MEANINGLESS = tuple(column for column in COLUMN_OF.values() if column.combine is Combine.NOTHING)
"""The columns that have no meaning for a tensor of the complete model."""


class GlobalColumns:
    """Computes those columns of global tensors' rows that are not copied from the row of the first chunk."""

    def __init__(self, metadata: MetadataRows, assembler: Assembler, values: Sequence[GlobalValue]) -> None:
        self._metadata = metadata
        self._assembler = assembler
        self._values = values
        self._positions = [value.positions for value in values]
        self._lacking: dict[tuple[int, str], str] = {}
        """Why a value has no histogram or units. The key is the value's index and a member such as ``no_units``."""
        self._plans: list[Plan] = [value.plan for value in values if isinstance(value.plan, Plan)]

    def by_name(self) -> dict[str, list[Any]]:
        values, plans = self._values, self._plans
        firsts = np.array([positions[0] for positions in self._positions], np.int64)
        own: dict[str, list[Any]] = {
            n: self._metadata.take(n, firsts).to_pylist() for n in ("dtype", "encoding", "note")
        }
        dtypes = [plan.dtype or dtype for plan, dtype in zip(plans, own["dtype"], strict=True)]
        has_values = [self._assembler.has_payload(*one) for one in zip(plans, self._positions, strict=True)]
        encodings = [(own["encoding"][i] or PLAIN) if is_there else None for i, is_there in enumerate(has_values)]
        numels = [math.prod(plan.global_shape) for plan in plans]
        columns: dict[str, list[Any]] = {
            **{column.name: [0 if column.is_required else None] * len(values) for column in _MEANINGLESS},
            "dtype": dtypes,
            "shape": [_sizes_text(plan.global_shape) for plan in plans],
            "numel": numels,
            "layout_source": [plan.source for plan in plans],
            "scale": [plan.scale for plan in plans],
            "ranks_present": [_sizes_text(value.present) for value in values],
            "ranks_expected": [_sizes_text(value.expected) for value in values],
            "encoding": encodings,
            "payload_bytes": [
                None if encoding is None else numel * ITEM_BYTES.get(kind, 0)
                for encoding, numel, kind in zip(encodings, numels, dtypes, strict=True)
            ],
            "fingerprint": self._fingerprints(own["dtype"]),
        }
        statistics, missing = self._statistics()
        columns |= statistics
        were_recorded = self._were_recorded(has_values)
        notes = zip(plans, values, missing, has_values, were_recorded, own["note"], strict=True)
        columns["note"] = [_note(*args) for args in notes]
        for (i, member), why in self._lacking.items():
            columns["note"][i] = with_member(columns["note"][i], member, why)
        return columns

    def _were_recorded(self, has_values: Sequence[bool]) -> list[bool]:
        """Return for each value whether any rank recorded its payload. If `has_values` is True, no row is read."""
        rows = [positions for positions, has_own in zip(self._positions, has_values, strict=True) if not has_own]
        at = np.array([position for positions in rows for position in positions], np.int64)
        is_there = iter(self._metadata.take("encoding", at).is_valid().to_pylist() if rows else ())
        return [
            has_own or any(list(islice(is_there, len(positions))))
            for positions, has_own in zip(self._positions, has_values, strict=True)
        ]

    def _fingerprints(self, dtypes: Sequence[str]) -> list[str | None]:
        used = [
            [positions[fill.terms[0].chunk] for fill in plan.fills] if _is_copied(plan) else []
            for plan, positions in zip(self._plans, self._positions, strict=True)
        ]
        texts = self._metadata.take("fingerprint", np.array([at for one in used for at in one], np.int64)).to_pylist()
        fingerprints: list[str | None] = []
        start = 0
        for plan, positions, dtype in zip(self._plans, used, dtypes, strict=True):
            own = texts[start : start + len(positions)]
            start += len(positions)
            # A fingerprint depends on the order in memory, which differs for a strided shard or a contiguous run in it.
            is_strided = any(len(f.region.boxes) > 1 or (f.moved and plan.source == "fsdp") for f in plan.fills)
            if not _is_copied(plan) or is_strided:
                fingerprints.append(None)
            elif len(own) == 1 and plan.fills[0].moved is None:
                fingerprints.append(own[0])
            else:
                moves = [fill.moved for fill in plan.fills]
                fingerprints.append(combine_fingerprints(own, moves, ITEM_BYTES.get(dtype, 1)))
        return fingerprints

    def _statistics(self) -> tuple[dict[str, list[Any]], list[str | None]]:
        metadata, positions, factors, starts = self._metadata, list[int](), list[float](), list[int]()
        reasons: list[str | None] = []
        for plan, value in zip(self._plans, self._values, strict=True):
            starts.append(len(positions))
            reason = None if plan.is_complete else "partial"
            if reason is None and any(len(fill.terms) > 1 for fill in plan.fills):
                numel = math.prod(plan.global_shape)
                reason = None if numel == 1 and plan.op == "sum" else "reduced over ranks"
            reasons.append(reason)
            terms = [fill.terms[0] for fill in plan.fills] or ([] if reason else [Term(0)])
            positions += [value.positions[term.chunk] for term in terms] or [value.positions[0]]
            factors += [term.factor for term in terms] or [1.0]
        at = np.array(positions, np.int64)
        chunks = {name: array_of(metadata.take(name, at).cast(pa.float64()), np.nan) for name in (*STATISTICS, *COUNTS)}
        numels = metadata.numbers("numel")[at].astype(np.float64)
        combined = combine_chunks(chunks, numels, np.array(factors), np.array(starts, np.int64))
        columns: dict[str, list[Any]] = {}
        for name, column in combined.items():
            has_none = np.isnan(column) | np.array([reason is not None for reason in reasons])
            kind: Any = int if name in COUNTS else float
            columns[name] = [
                None if gone else kind(x) for x, gone in zip(column.tolist(), has_none.tolist(), strict=True)
            ]
        columns["histogram"] = [None] * len(starts)
        histograms = metadata.take("histogram", at)
        if histograms.null_count < len(at):
            pieces = list(zip(histograms.to_pylist(), factors, numels.tolist(), strict=True))
            for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(pieces)], strict=True)):
                if reasons[i] is None:
                    columns["histogram"][i] = self._or_reason(i, "histogram", join_histograms(pieces[start:end]))
        columns["units"] = self._units(reasons)
        for i, plan in enumerate(self._plans):
            if reasons[i] is None and any(len(fill.terms) > 1 for fill in plan.fills):
                reasons[i] = self._set_single(columns, i, plan)
        return columns, reasons

    def _or_reason(self, i: int, name: str, value: bytes | str | None) -> bytes | None:
        """Return `value` if it is bytes. A text, why the column is null, goes into the row's note."""
        if isinstance(value, str):
            self._lacking[i, f"no_{name}"] = value
            return None
        return value

    def _units(self, reasons: Sequence[str | None]) -> list[bytes | None]:
        if self._metadata.column("units").null_count == self._metadata.num_rows:
            return [None] * len(self._plans)
        return [
            self._or_reason(i, "units", self._units_of(i, plan)) if reasons[i] is None and plan.fills else None
            for i, plan in enumerate(self._plans)
        ]

    def _units_of(self, i: int, plan: Plan) -> bytes | str | None:
        positions = self._values[i].positions
        terms = [fill.terms[0] for fill in plan.fills]
        at = np.array([positions[term.chunk] for term in terms], np.int64)
        columns = [self._metadata.take(name, at).to_pylist() for name in ("units", "shape", "numel")]
        pieces: list[ChunkUnits] = []
        for fill, term, data, text, numel in zip(plan.fills, terms, *columns, strict=True):
            if data is None:
                if numel:
                    return None
                continue
            if len(terms) == 1 and fill.is_copy:
                return bytes(data)
            try:
                units = Units.from_bytes(data, parse_shape(text))
            except CorruptError:
                return "damaged"
            boxes = fill.region.boxes
            if sum(box.numel for box in boxes) != numel or any(len(box.start) <= units.dim for box in boxes):
                return "a chunk is no box of the tensor"
            ranges = {(box.local_start[units.dim], box.start[units.dim], box.shape[units.dim]) for box in boxes}
            pieces.append(ChunkUnits(units.scaled(term.factor) if term.factor != 1.0 else units, sorted(ranges)))
        if not pieces:
            return None
        try:
            return joined(pieces, plan.global_shape, pieces[0].units.dim).to_bytes()
        except ValueError as error:
            return str(error)

    def _set_single(self, columns: dict[str, list[Any]], i: int, plan: Plan) -> str | None:
        """Set the statistics of a one-element sum over ranks. Return None, or the reason why they are unknown."""
        value, terms = self._values[i], plan.fills[0].terms
        for name in DETAILS:
            if any(self._metadata.take(name, np.array(value.positions)).is_valid().to_pylist()):
                self._lacking[i, f"no_{name}"] = "reduced over ranks"
        for name in (*STATISTICS, *COUNTS, *DETAILS):
            columns[name][i] = None
        at = np.array([value.positions[term.chunk] for term in terms])
        means = self._metadata.take("mean", at).to_pylist()
        known = [mean for mean in means if mean is not None]
        if len(known) < len(means):
            nan_count, inf_count = (sum(filter(None, self._metadata.take(n, at).to_pylist())) for n in NONFINITE)
            if not nan_count and not inf_count:
                return "not measured on some rank"
            sets: dict[str, float] = {
                "nan_count": int(nan_count > 0),
                "inf_count": int(nan_count == 0),
                "zero_count": 0,
            }
        else:
            x = float(sum(mean * term.factor for mean, term in zip(known, terms, strict=True)))
            dtype = plan.dtype or self._metadata.text("dtype", value.positions[0]) or ""
            with np.errstate(over="ignore"):  # the sum may not fit into the row's own dtype
                x = float(np.float64(x).astype(numpy_dtype(dtype)))
            sets = {"nan_count": 0, "inf_count": int(not np.isfinite(x)), "zero_count": int(x == 0)}
            if np.isfinite(x):
                sets |= {"mean": x, "std": 0.0, "min": x, "max": x, "absmax": abs(x), "l2": abs(x), "sum": x}
                sets |= {"sum_sq": x * x, "sum_abs": abs(x), "sum_fourth": (x * x) * (x * x)}
        for name, number in sets.items():
            columns[name][i] = number
        return None


def _is_copied(plan: Plan) -> bool:
    return plan.is_complete and all(fill.is_copy for fill in plan.fills)


def _note(
    plan: Plan, value: GlobalValue, reason: str | None, has_values: bool, was_recorded: bool, text: str | None
) -> str | None:
    note = note_members(text)
    note |= {key: list(item) if isinstance(item, tuple) else item for key, item in plan.note}
    if reason is not None:
        note["no_statistics"] = reason
    missing = [rank for rank in value.expected if rank not in value.present]
    if missing and not plan.is_replica:
        note["partial"] = missing
    if value.differing:
        note["replicas_differ"] = list(value.differing)
    if plan.dim is not None:
        note["batch_dim"] = plan.dim
    if value.stage is not None:
        note["stage"] = value.stage.number
    if not has_values and not plan.is_complete:
        note[NO_VALUES] = "pieces of some ranks are missing"
    elif not has_values and was_recorded:
        note[NO_VALUES] = "the values of some ranks were not recorded"
    return as_json(note) if note else None


def with_member(note: str | None, name: str, value: object) -> str:
    """Add one member to a row's note, which is a JSON object, and return the new note."""
    return as_json(note_members(note) | {name: value})


def as_json(value: object) -> str:
    """Return a value as compact JSON, the form in which rows hold JSON."""
    return json.dumps(value, separators=(",", ":"))


_sizes_text = lru_cache(maxsize=4096)(as_json)
