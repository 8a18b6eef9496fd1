"""Finds what a row says of one value beyond its statistics, of one rank or put together from several.

That is its histogram, and the sums over its units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..columns import DETAILS, METADATA_COLUMNS, note_members, parse_shape
from ..errors import CorruptError, LookupFailedError
from ..numerics.histogram import Histogram
from ..numerics.units import Units
from ..read.lookup import TensorRows
from ..read.metadata import MetadataRows
from .assemble.columns import GlobalColumns
from .tensor import plan_of, value_of
from .view import LoadedRows

_COLUMNS = (*DETAILS, "zero_count", "nan_count", "min", "max", "shape", "note")


def histogram_of(
    loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool
) -> Histogram:
    """The histogram of the one value that a question means.

    Args:
        loaded: all rows, where those of all ranks are meant; None where one row is.
        metadata: the run's rows.
        tensor_rows: the rows of the value.
        partial: answer also where ranks are missing.

    Raises:
        LookupFailedError: there is none; the message says why.
        CorruptError: the bytes of a histogram are none.
    """
    row = _row_of(loaded, metadata, tensor_rows, partial)
    _check_recorded(row, "histogram", tensor_rows, "a histogram", "it")
    try:
        counts = Histogram.from_bytes(
            row["histogram"], zero_count=row["zero_count"] or 0, nan_count=row["nan_count"] or 0
        )
    except CorruptError as error:
        raise CorruptError(f"{tensor_rows.what}: {error}") from error
    return replace(counts, min=row["min"], max=row["max"])


def units_of(loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool) -> Units:
    """The sums over the units of the one value that a question means; arguments and errors as for `histogram_of`."""
    row = _row_of(loaded, metadata, tensor_rows, partial)
    _check_recorded(row, "units", tensor_rows, "sums of its units", "them")
    try:
        return Units.from_bytes(row["units"], parse_shape(row["shape"]))
    except CorruptError as error:
        raise CorruptError(f"{tensor_rows.what}: {error}") from error


def _check_recorded(row: dict[str, Any], column: str, tensor_rows: TensorRows, what: str, them: str) -> None:
    """Refuse a row that lacks what is asked for, with the reason."""
    if row[column] is not None:
        return
    note = note_members(row["note"])
    why = note.get(f"no_{column}", note.get("no_statistics"))
    reason = f"it has none ({why})" if why else f"a rule with keep={column} keeps {them}"
    raise LookupFailedError(f"{tensor_rows.what} was recorded without {what}; {reason}")


def _row_of(
    loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool
) -> dict[str, Any]:
    if loaded is None:
        metadata.load(_COLUMNS)
        first = np.array(tensor_rows.positions[:1])
        return {name: metadata.take(name, first)[0].as_py() for name in _COLUMNS}
    value = value_of(loaded.values, tensor_rows)
    plan_of(value, tensor_rows.what, partial=partial)
    metadata.load(METADATA_COLUMNS)
    columns = GlobalColumns(metadata, loaded.assembler, [value]).by_name()
    return {name: columns[name][0] for name in _COLUMNS}
