"""Why a row has no statistics, or stays with its rank, in words. Never loops over rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import note_members
from ...layout.placement import reduce_op
from ...numerics.keys import codes, group
from ...system.text import listed

WHY = "why"
"""Column of the reason; null where a row has statistics, and is all ranks' or was never to be."""
COLUMNS = ("note", "placements", "nan_count", "mean", "numel")
"""What `with_why` looks at."""
_HAS_ALL, _HAS_COUNTS, _IS_EMPTY, _HAS_NONE = range(4)


def with_why(table: Any) -> Any:
    """A `pa.Table` of rows with a column more: `WHY`."""
    has_counts, has_mean = (table.column(name).is_valid().to_numpy() for name in ("nan_count", "mean"))
    is_empty = pc.equal(table.column("numel"), 0).to_numpy()
    has = np.select([has_mean, ~has_counts, is_empty], [_HAS_ALL, _HAS_NONE, _IS_EMPTY], _HAS_COUNTS)
    groups = group([codes(table.column("note")), codes(table.column("placements")), has.astype(np.int64)])
    firsts = pa.array(groups.firsts)
    notes, placements = (table.column(name).take(firsts).to_pylist() for name in ("note", "placements"))
    texts = [_why(*one) for one in zip(notes, placements, has[groups.firsts].tolist(), strict=True)]
    return table.append_column(WHY, pa.array(texts, pa.string()).take(pa.array(groups.ids)))


def count_without(table: Any) -> Counter[str]:
    """How many rows have no statistics for which reason; of a table that `with_why` gave."""
    without = table.filter(pc.field("nan_count").is_null()).column(WHY).value_counts().to_pylist()
    return Counter({one["values"] or "": one["counts"] for one in without})


def _why(note: str | None, placements: str | None, has: int) -> str | None:
    told = note_members(note)
    reasons = [] if has == _HAS_ALL else [_no_statistics(told, placements, has)]
    if isinstance(told.get("per_rank"), str):
        reasons.append(f"per rank: {told['per_rank']}")
    return "; ".join(filter(None, reasons)) or None  # of a row with counts and no more these tell: nothing is finite


def _no_statistics(told: dict[str, Any], placements: str | None, has: int) -> str:
    reason, missing = told.get("no_statistics"), told.get("partial")
    if reason == "Partial":
        return f"a summand, not yet reduced over ranks ({reduce_op(placements) or 'sum'})"
    if reason == "reduced over ranks":
        return "reduced over ranks: statistics of summands do not add up"
    if reason in ("partial", None) and isinstance(missing, list):
        return f"lacks rank {listed(missing)}"
    if reason == "error":
        return "computing them failed"
    if isinstance(reason, str):
        return reason if " " in reason else f"{reason} has none"
    if has == _HAS_NONE:
        return "not asked for: the rules keep no stats of it"
    return "it has no elements" if has == _IS_EMPTY else ""
