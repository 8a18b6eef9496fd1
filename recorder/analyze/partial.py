"""Which values of all ranks lack some of them, and how that is said. Never loops over rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import OF_FIRST_PART, note_members
from ..numerics.keys import encode
from ..numerics.moments import integers
from ..system.text import named


def missing_ranks(table: Any) -> npt.NDArray[np.object_]:
    """For each row of all ranks those that are missing in it, as JSON; else an empty text."""
    ids, notes = encode(table.column("note"))
    missing = np.array([*map(_missing, notes), ""], object)[ids]
    missing[table.column("rank").is_valid().to_numpy()] = ""
    return missing


def without_numbers(table: Any) -> Any:
    """Rows as they are, but those that lack ranks have no statistics: they would be of the other ranks alone."""
    is_whole = pa.array(missing_ranks(table) == "")
    for name in OF_FIRST_PART.intersection(table.column_names):
        column = table.column(name)
        kept = pc.if_else(is_whole, column, pa.scalar(None, column.type))
        table = table.set_column(table.schema.get_field_index(name), name, kept)
    return table


def _missing(note: str) -> str:
    """What an untrusted note says of missing ranks."""
    ranks = note_members(note).get("partial")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        return ""
    return json.dumps(ranks) if ranks else ""


class Partial:
    """Values that lack ranks, added up over tables of rows."""

    def __init__(self) -> None:
        self._num_values = 0
        self._found: dict[str, tuple[int, int, int]] = {}
        """By the ranks missing: values, first and last step."""

    def add(self, table: Any) -> None:
        """Rows with `rank`, `step` and `note`."""
        missing, steps = missing_ranks(table), integers(table.column("step"))
        self._num_values += table.num_rows
        for ranks in dict.fromkeys(missing[missing != ""].tolist()):
            of = steps[missing == ranks]
            known = self._found.get(ranks, (0, int(of[0]), int(of[0])))
            self._found[ranks] = known[0] + len(of), min(known[1], int(of.min())), max(known[2], int(of.max()))

    def join(self, other: Partial) -> None:
        """What was added to another one, after what was added here."""
        self._num_values += other._num_values
        for ranks, (num, first, last) in other._found.items():
            known = self._found.get(ranks, (0, first, last))
            self._found[ranks] = known[0] + num, min(known[1], first), max(known[2], last)

    def __bool__(self) -> bool:
        return bool(self._found)

    def notes(self, *, is_taken: bool) -> list[str]:
        """One for each set of ranks that is missing, and whether such values were taken as they are."""
        end = "they are of the other ranks alone" if is_taken else "they are left out; --partial takes what there is"
        return [
            f"partial: {num_values} of {self._num_values} values lack {named('rank', json.loads(ranks))}, "
            f"step{_span(first, last)}: {end}"
            for ranks, (num_values, first, last) in self._found.items()
        ]


def _span(first: int, last: int) -> str:
    return f" {first}" if first == last else f"s {first}..{last}"
