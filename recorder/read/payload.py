"""Reads the payload of a row, from the row's batch or, for the encoding ``ref``, from the row that it names.

Batches are checked before they are used. `decode` takes a single row and needs no run.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import parse_shape
from ..errors import CorruptError, LookupFailedError, RunError
from ..format import codec
from ..format.codec import EncodedPayload
from ..format.encodings import encoding_of, target_of
from ..numerics.dtypes import as_array, item_bytes
from ..numerics.keys import array_of, column_of
from ..records import PART_BYTES
from ..storage.locations import LOCAL, store_of
from .metadata import MetadataRows
from .shard_rows import ShardRows

_COLUMNS = ("seq", "dtype", "shape", "encoding", "payload_bytes", "data")
_SPARE_BATCHES = 8
_MAX_REMOTE_BYTES = 1 << 30
"""The most bytes of cached batches from an object store. They take memory; batches on a disk are memory-mapped."""
_AT_ONCE = 16
"""The number of batches that are requested from a store together while their sizes are unknown."""
_BATCH_BYTES = 8 << 20
"""The assumed size of a batch before it is read, in bytes. A row that is known to be larger counts instead."""
_Key = tuple[int, int]
"""The key of a batch: the `id` of its shard's `ShardRows` (`MetadataRows` keeps it alive), and the batch's number."""


class Payloads:
    """Reads the payloads of rows, given by position in `MetadataRows`. `POSITION_COLUMNS` must be loaded."""

    def __init__(self, rows: MetadataRows, num_writers: int = 1) -> None:
        self._rows = rows
        self._max_batches = 2 * num_writers + _SPARE_BATCHES
        self._batches: OrderedDict[_Key, Any] = OrderedDict()
        """The batches read last. Rows are read in time order, so a writer's next row is mostly in one of them."""

    def prepare(self, positions: Sequence[int]) -> None:
        """Read and cache the batches of some rows, several at a time. This does nothing for a run on a disk."""
        if not positions or not self._is_remote:
            return
        of_shard: dict[int, list[tuple[_Key, ShardRows]]] = {}
        num_bytes = 0
        for position in positions:
            shard, _ = self._rows.shard_of(position)
            key = id(shard), int(self._rows.numbers("batch")[position])
            known = of_shard.setdefault(key[0], [])
            if key not in self._batches and all(key != one for one, _ in known):
                num_bytes += max(_BATCH_BYTES, int(self._rows.numbers("payload_bytes")[position]))
                if num_bytes > _MAX_REMOTE_BYTES:
                    break
                known.append((key, shard))
        num_brought_bytes = 0
        # Reading a batch opens its shard. So the first batch of each shard is read before all others.
        for wanted in (
            [some[0] for some in of_shard.values() if some],
            [one for some in of_shard.values() for one in some[1:]],
        ):
            for start in range(0, len(wanted), _AT_ONCE):
                if num_brought_bytes > _MAX_REMOTE_BYTES:
                    return  # more batches would evict the batches that were just read
                some = wanted[start : start + _AT_ONCE]
                read = store_of(some[0][1].path).each(_read, some)
                brought = {one[0]: batch for one, batch in zip(some, read, strict=True) if batch is not None}
                num_brought_bytes += sum(batch.nbytes for batch in brought.values())
                self._batches |= brought
                self._shrink()

    def encoded(self, position: int) -> EncodedPayload:
        """Return the stored payload of a row, or that of the row which its ``ref`` names. Raise RunError for damage."""
        source = self._source(position)
        try:
            encoding_of(source["encoding"])
            check_payload(source["encoding"], source["data"], source["payload_bytes"])
        except RunError as error:
            raise self._named(error, position, source) from error
        return EncodedPayload(source["encoding"], source["data"], source["payload_bytes"])

    def described(self, position: int) -> tuple[npt.NDArray[np.uint8], str, str]:
        """Return the decoded payload of one row, and the row's dtype and shape as texts."""
        fields = self._fields(self._rows.shard_of(position)[0], *self._batch_row_seq(position))
        return self.decoded(position), fields["dtype"], fields["shape"]

    def decoded(self, position: int) -> npt.NDArray[np.uint8]:
        """Return the decoded payload of one row as new, writable bytes. Raises what `encoded` raises."""
        source = self._source(position)
        try:
            return decode_payload(source["encoding"], source["data"], source["payload_bytes"], source["dtype"])
        except RunError as error:
            raise self._named(error, position, source) from error

    def _named(self, error: RunError, position: int, source: dict[str, Any]) -> RunError:
        return type(error)(f"{self._rows.shard_of(position)[0].path}, row seq={source['seq']}: {error}")

    def column(self, positions: npt.NDArray[np.int64]) -> list[Any]:
        """Return the payloads, one Arrow array per batch. The last item sorts them in the order of `positions`."""
        batches, rows, seqs = (self._rows.numbers(name)[positions] for name in ("batch", "row", "seq"))
        shards = self._rows.shard_numbers(positions)
        in_file_order = np.lexsort([batches, shards])
        keys = np.stack([shards, batches])[:, in_file_order]
        ends_group = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        pieces: list[Any] = []
        for of_batch in np.split(in_file_order, ends_group) if len(positions) else ():
            shard, _ = self._rows.shard_of(int(positions[of_batch[0]]))
            batch = int(batches[of_batch[0]])
            checked = shard.read(batch, ("seq", "data"))
            wanted = rows[of_batch]
            if wanted.min() >= 0 and wanted.max() < checked.num_rows:
                checked = checked.take(column_of(wanted))
            if not np.array_equal(array_of(checked.column("seq")), seqs[of_batch]):
                raise CorruptError(f"{shard.path}: its index names other rows than batch {batch} holds")
            pieces.append(checked.column("data"))
        return [*pieces, np.argsort(in_file_order)]

    def _source(self, position: int) -> dict[str, Any]:
        """Return the fields of the row that holds the payload: the row that a ``ref`` names, or this row."""
        shard, start = self._rows.shard_of(position)
        batch, row, seq = self._batch_row_seq(position)
        fields = self._fields(shard, batch, row, seq)
        target = target_of(fields["encoding"], fields["data"])
        if target is None:
            return fields
        matches = np.flatnonzero(self._rows.numbers("seq")[start:position] == target)
        if len(matches) == 1:
            source = self._fields(shard, *self._batch_row_seq(start + int(matches[0])))
        else:  # the loaded rows may be only some rows of the shard
            found_at = shard.position_of(target)
            source = self._fields(shard, *found_at, target) if found_at and found_at < (batch, row) else {}
        if any(source.get(name) != fields[name] for name in ("dtype", "payload_bytes")):
            raise CorruptError(
                f"{shard.path}: row seq={seq} refers to row seq={target}, which does not have its content"
            )
        return source

    def _batch_row_seq(self, position: int) -> tuple[int, int, int]:
        batch, row, seq = (int(self._rows.numbers(name)[position]) for name in ("batch", "row", "seq"))
        return batch, row, seq

    def _fields(self, shard: ShardRows, batch: int, row: int, seq: int) -> dict[str, Any]:
        """Return the fields of one row that decoding needs. The payload is not copied."""
        key = id(shard), batch
        rows = self._batches.get(key)
        if rows is None:
            rows = self._batches[key] = shard.read(batch, _COLUMNS)
            self._shrink()
        else:
            self._batches.move_to_end(key)
        if not 0 <= row < rows.num_rows or rows.column("seq")[row].as_py() != seq:
            raise CorruptError(f"{shard.path}: batch {batch} row {row} is not the row that the index names")
        fields = {name: rows.column(name)[row].as_py() for name in _COLUMNS if name != "data"}
        return fields | {"data": _slice(rows.column("data"), row)}

    def _shrink(self) -> None:
        while len(self._batches) > self._max_batches:
            self._batches.popitem(last=False)
        if len(self._batches) > 1 and self._is_remote:
            num_bytes = sum(batch.nbytes for batch in self._batches.values())
            while len(self._batches) > 1 and num_bytes > _MAX_REMOTE_BYTES:
                num_bytes -= self._batches.popitem(last=False)[1].nbytes

    @cached_property
    def _is_remote(self) -> bool:
        return store_of(self._rows.shard_of(0)[0].path) is not LOCAL


def _read(wanted: tuple[_Key, ShardRows]) -> Any:
    (_, batch), shard = wanted
    try:
        return shard.read(batch, _COLUMNS)
    except RunError:
        return None


def _slice(column: Any, row: int) -> Any:
    """Return one row of a binary column. Return None for null. Arrow's own scalar would copy the bytes."""
    if not column.is_valid()[row].as_py():
        return None
    _, offsets, content = column.buffers()
    begin, end = np.frombuffer(offsets, np.int64, 2, 8 * (column.offset + row)).tolist()
    return pa.py_buffer(b"") if content is None else content.slice(begin, end - begin)


def is_same(payloads: Payloads, tensors: Sequence[Sequence[int]]) -> bool:
    """Return whether several tensors have equal bytes. Each tensor is given by the positions of its parts."""
    payloads.prepare([position for tensor in tensors for position in tensor])
    first, *others = tensors
    return all(
        len(first) == len(other)
        and all(np.array_equal(payloads.decoded(a), payloads.decoded(b)) for a, b in zip(first, other, strict=True))
        for other in others
    )


_NEEDED = ("encoding", "data", "payload_bytes", "dtype", "shape")


def decode(row: Any) -> npt.NDArray[Any]:
    """Return the tensor of one row as a numpy array; bfloat16 and the 8-bit floats have the types of ml_dtypes.

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
    except (TypeError, ValueError, OverflowError):  # the value is null, which pandas turns into NaN
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
    """Decode the payload of one row to new, writable bytes. A ``ref`` to another row is not resolved."""
    payload = check_payload(encoding, data, payload_bytes)
    return codec.decode(encoding, payload, payload_bytes, item_bytes(dtype))


def check_payload(encoding: str, data: Any, payload_bytes: int) -> memoryview:
    """Return a payload's bytes. Raise CorruptError if `data` is not bytes or `payload_bytes` is impossible."""
    if type(payload_bytes) is not int or not 0 <= payload_bytes <= PART_BYTES:
        raise CorruptError(f"payload_bytes is {payload_bytes!r}, but a row has at most {PART_BYTES}")
    try:
        return memoryview(data)
    except TypeError:
        raise CorruptError(f"data is of type {type(data).__name__}, but encoding {encoding!r} wants bytes") from None


def _fields(row: Any) -> Mapping[str, Any]:
    if hasattr(row, "as_py"):  # the row is a pyarrow struct scalar, which is a mapping of scalars, too
        return _fields(row.as_py())
    if isinstance(row, Mapping):
        return row
    if hasattr(row, "to_pylist"):  # the row is a pyarrow table or batch
        rows = row.to_pylist()
        if len(rows) != 1:
            raise LookupFailedError(f"decode takes one row, here are {len(rows)}; slice it: table.slice(i, 1)")
        return _fields(rows[0])
    if hasattr(row, "_asdict"):  # the row comes from itertuples()
        return _fields(row._asdict())
    if hasattr(row, "to_dict"):  # the row is a pandas Series
        return _fields(row.to_dict())
    raise LookupFailedError(f"decode takes one row, not a {type(row).__name__}; see help(recorder.decode)")
