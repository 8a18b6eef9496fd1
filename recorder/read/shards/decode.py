"""The way from a row to an array: of any reader, with nothing of a run at hand.

Must never allocate by a number that the row merely claims, and never import torch or pandas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...columns import parse_shape
from ...errors import CorruptError, LookupFailedError
from ...format.payload import codec
from ...format.payload.encodings import target_of
from ...numerics.dtypes import as_array, item_bytes
from ...records import PART_BYTES

_NEEDED = ("encoding", "data", "payload_bytes", "dtype", "shape")


def decode(row: Any) -> npt.NDArray[Any]:
    """The tensor of one row, as numpy array; bfloat16 and the 8-bit floats come in ml_dtypes' types.

    Args:
        row: a dict, a pandas Series, a tuple of `DataFrame.itertuples()`, or a pyarrow table, batch or struct of one
            row; it must hold the columns encoding, data, payload_bytes, dtype and shape.

    Raises:
        LookupFailedError: the row has no payload, or only a part of one.
        CorruptError: payload, dtype and shape do not agree.
        UnsupportedError: the encoding or dtype is unknown to this version.
    """
    fields = _fields(row)
    missing = [name for name in _NEEDED if name not in fields]
    if missing:
        raise LookupFailedError(f"the row lacks the column {missing[0]!r}; decode needs {', '.join(_NEEDED)}")
    encoding = fields["encoding"]
    if not isinstance(encoding, str):
        raise LookupFailedError("the row carries no payload: its rule keeps statistics or fingerprint only")
    dtype, shape = str(fields["dtype"]), parse_shape(fields["shape"])
    try:
        payload_bytes, whole_bytes = int(fields["payload_bytes"]), math.prod(shape) * item_bytes(dtype)
    except (TypeError, ValueError, OverflowError):  # null, which pandas makes a NaN
        raise CorruptError(f"payload_bytes is {fields['payload_bytes']!r}, beside encoding {encoding!r}") from None
    if fields.get("part") or payload_bytes < whole_bytes:
        raise LookupFailedError(
            f"the row holds {payload_bytes} of the tensor's {whole_bytes} bytes; "
            "open_run(...).array(...) joins the parts"
        )
    target = target_of(encoding, fields["data"])
    if target is not None:
        raise LookupFailedError(
            f"the row refers to row seq={target} of its shard; decode that one, or use open_run(...).array(...)"
        )
    return as_array(decode_payload(encoding, fields["data"], payload_bytes, dtype), dtype, shape)


def decode_payload(encoding: str, data: Any, payload_bytes: int, dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of one row's payload (not of a ``ref``), new and writable."""
    payload = check_payload(encoding, data, payload_bytes)
    return codec.decode(encoding, payload, payload_bytes, item_bytes(dtype))


def check_payload(encoding: str, data: Any, payload_bytes: int) -> memoryview:
    """The bytes of a payload column, once what stands beside them can be true.

    Raises:
        CorruptError: there are none, or they claim to be more than a row may hold.
    """
    if type(payload_bytes) is not int or not 0 <= payload_bytes <= PART_BYTES:
        raise CorruptError(f"payload_bytes is {payload_bytes!r}, but a row has at most {PART_BYTES}")
    try:
        return memoryview(data)
    except TypeError:
        raise CorruptError(f"data is of type {type(data).__name__}, but encoding {encoding!r} wants bytes") from None


def _fields(row: Any) -> Mapping[str, Any]:
    """The row as a mapping, whichever reader it comes from."""
    if hasattr(row, "as_py"):  # pyarrow struct scalar, which is a mapping, too, but of scalars
        return _fields(row.as_py())
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "to_pylist"):  # pyarrow table or batch
        rows = row.to_pylist()
        if len(rows) != 1:
            raise LookupFailedError(f"decode takes one row, here are {len(rows)}; slice it: table.slice(i, 1)")
        return _fields(rows[0])
    if hasattr(row, "_asdict"):  # itertuples()
        return _fields(row._asdict())
    if hasattr(row, "to_dict"):  # pandas Series
        return _fields(row.to_dict())
    raise LookupFailedError(f"decode takes one row, not a {type(row).__name__}; see help(recorder.decode)")
