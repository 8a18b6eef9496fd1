"""One global tensor: the value that a question means, and its bytes, histogram or units, put together from chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..columns import DETAILS, METADATA_COLUMNS, note_members, parse_shape
from ..errors import CorruptError, LookupFailedError, RunError
from ..layout.plans import Plan
from ..numerics.dtypes import item_bytes
from ..numerics.histogram import Histogram
from ..numerics.units import Units
from ..read.lookup import TensorRows, several_stages
from ..read.metadata import MetadataRows, Positions
from ..system.text import listed
from .assemble.columns import GlobalColumns
from .plan.planner import GlobalValue
from .plan.values import GlobalValues
from .view import LoadedRows


def is_partial(metadata: MetadataRows, positions: Positions) -> bool:
    """Whether a row of a merged run says that ranks are missing in it."""
    metadata.load(["note"])
    note = metadata.text("note", int(positions[0]))
    return "partial" in note_members(note)


def global_tensor(
    loaded: LoadedRows, tensor_rows: TensorRows, *, partial: bool
) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
    """Bytes, dtype and shape of the one global tensor that some ranks' rows are.

    Args:
        loaded: all rows of the run.
        tensor_rows: those of that value, of all ranks.
        partial: answer also where ranks are missing.

    Raises:
        LookupFailedError: they make no single tensor, or ranks are missing; the message says why.
        CorruptError: the bytes are not those that were written.
    """
    _, values, assembler = loaded
    if not values.counts[tensor_rows.positions].any():
        why = "a later attempt recorded this step again; rank= gives what one rank had"
        raise LookupFailedError(f"{tensor_rows.what}: {why}")
    value = value_of(values, tensor_rows)
    plan = plan_of(value, tensor_rows.what, partial=partial)
    if not assembler.has_payload(plan, value.positions):
        ranks = zip(value.present, value.positions, strict=False)
        lacking = [rank for rank, position in ranks if assembler.tensor(position) is None]
        raise LookupFailedError(
            f"{tensor_rows.what}: of rank {listed(lacking)} there are no values; a rule with keep=tensor keeps them"
        )
    dtype = assembler.dtype(plan, value.positions)
    item_bytes(dtype)
    try:
        return assembler.array(plan, value.positions), dtype, plan.global_shape
    except RunError as error:
        raise type(error)(f"{tensor_rows.what}: {error}") from error


def value_of(values: GlobalValues, tensor_rows: TensorRows) -> GlobalValue:
    """The one value that some ranks' rows are.

    Raises:
        LookupFailedError: they are several.
    """
    chosen = values.values_of(tensor_rows.positions, tensor_rows.related, is_micro_batch=tensor_rows.is_micro_batch)
    if len(chosen) > 1:  # what stages hand on has the same name as the input and the output of the model
        chosen = [value for value in chosen if not value.is_between_stages]
    numbers = [value.stage.number for value in chosen if value.stage is not None]
    if len(chosen) > 1 and len(set(numbers)) == len(chosen):
        raise LookupFailedError(several_stages(tensor_rows.what, numbers))
    if len(chosen) != 1:
        raise LookupFailedError(f"{tensor_rows.what}: {len(chosen)} values of the newest attempt are meant")
    return chosen[0]


def plan_of(value: GlobalValue, what: str, *, partial: bool) -> Plan:
    """The plan that makes one tensor of a value.

    Raises:
        LookupFailedError: there is none, or a rank that it needs is missing.
    """
    plan = value.plan
    if not isinstance(plan, Plan):
        raise LookupFailedError(
            f"{what} makes no single tensor: {plan.why}; ask for one of rank={listed(value.present)}"
        )
    missing = [rank for rank in value.expected if rank not in value.present]
    if not plan.is_complete:
        raise LookupFailedError(f"{what}: the chunks of rank {listed(missing)} are missing; rank= gives one rank's")
    if missing and not plan.is_replica and not partial:
        raise LookupFailedError(
            f"{what} was recorded on rank {listed(value.present)} alone, not on rank {listed(missing)}; "
            f"partial=True gives what there is, rank= one rank's"
        )
    return plan


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
