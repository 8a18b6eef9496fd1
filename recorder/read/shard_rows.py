"""The metadata rows of one shard (all columns but the payload), with the number of each row's batch.

Rows are read from the shard's index if it fits the shard, else from the shard. No column is returned unchecked.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COLUMN_OF, METADATA_COLUMNS, SCHEMA
from ..errors import CorruptError, NotARunError, RunError, UnsupportedError
from ..format.integrity import BatchHeader
from ..format.rundir import ShardName, index_name, open_name, parse_shard_name
from ..numerics.keys import array_of, column_of
from ..sites import PROBE
from ..storage.locations import Location, OpenLocation, store_of
from ..storage.untrusted_files import ByteSource, Found
from .shard import INDEX_ONLY, Layout, Salvaged, Shard, open_sealed, salvage

logger = logging.getLogger(__name__)

SHARD_BYTES_KEY = b"recorder_shard_bytes"
Steps = tuple[int, int]
"""A half-open range of steps: the first step, and the step after the last one."""
Ranges = tuple[Steps, ...]
_KEPT = (*METADATA_COLUMNS, *INDEX_ONLY)
_MAX_KEPT_ROW_BYTES = 1000
_MAX_CHUNKS = 32
"""A column in more chunks than this gets them joined, because Arrow needs time for each chunk."""


class ShardRows:
    """The metadata rows of one shard, by column and in file order. `num_rows` shrinks if damage is found."""

    def __init__(self, path: Location, *, is_sealed: bool, size_bytes: int) -> None:
        self.path: OpenLocation = path
        self.is_sealed = is_sealed
        self.size_bytes = size_bytes
        self.num_trailing_bytes = 0
        """The number of bytes after the last complete batch of a shard without a footer; 0 if all are zeros."""
        self.tail_damage = ""
        """Why the trailing bytes are damage. Empty if they may be an unfinished write or the writer is at work."""
        self.damage: list[str] = []
        """A message for each damaged part of the shard, whose rows are missing. The list grows as columns are read."""
        self._index: Shard | None = None
        self._shard: Shard | None = None
        self._last_header: BatchHeader | None = None
        self._rows_of: dict[int, int] = {}
        """The number of rows of each batch: in the index if the index is used, else in the shard."""
        self._spans: dict[int, Steps | None] = {}
        """The range of steps of each batch. None for a batch whose steps cannot be read."""
        self.kept: dict[int, Any] | None = None
        """A cache of batches by number. None turns it off. Damage, or a batch with large rows, also turns it off."""
        self._salvaged: Salvaged | None = None

    @property
    def name(self) -> ShardName | None:
        """The parts of the file's name. None if it is not the name of a shard."""
        return parse_shard_name(self.path.name)

    @property
    def is_of_probe(self) -> bool:
        """True for a shard of the probe. Each of its rows has numbers of one value from many steps."""
        return self.name is not None and self.name.kind == PROBE

    @property
    def num_rows(self) -> int:
        return sum(self._rows_of.values())

    @property
    def is_indexed(self) -> bool:
        return self._index is not None

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """Return checked columns of a batch, read from the shard and not from its index. They may include the payload.

        Raises CorruptError if the batch is damaged, and NotARunError if the shard is gone.
        """
        with self._said_if_gone():
            return self._itself().read(number, columns).batch

    def num_rows_of(self, steps: Steps | Ranges | None) -> int:
        """Return the number of rows in the batches that `columns` returns for the same steps."""
        return self.num_rows if steps is None else sum(self._rows_of[number] for number in self._batches_of(steps))

    def position_of(self, seq: int) -> tuple[int, int] | None:
        """Return the batch of the row with `seq`, and its index there. None unless exactly one row has `seq`."""
        for batch in self.columns(("seq", "batch", "row")):
            (at,) = np.nonzero(array_of(batch.column("seq")) == seq)
            if len(at):
                batches, rows = (array_of(batch.column(name))[at] for name in ("batch", "row"))
                return (int(batches[0]), int(rows[0])) if len(at) == 1 else None
        return None

    def columns(self, names: Sequence[str], steps: Steps | Ranges | None = None) -> list[Any]:
        """Return metadata columns, or `batch` and `row`, as checked Arrow batches. `steps` may leave out batches.

        A batch that is damaged in one of these columns is dropped. Raises NotARunError if the shard is gone.
        """
        with self._said_if_gone():
            if self._index is not None:
                try:
                    return [self._metadata_batch(number, names) for number in self._batches_of(steps)]
                except CorruptError as error:
                    logger.warning("%s; the rows are read from the shard instead", error)
                    self._use_shard()
            batches = []
            for number in self._batches_of(steps):
                try:
                    batches.append(self._metadata_batch(number, names))
                except CorruptError as error:
                    self._rows_of.pop(number)
                    self._note(str(error))
        if len(batches) <= _MAX_CHUNKS:
            return batches
        return pa.Table.from_batches(batches).combine_chunks().to_batches()  # type: ignore[no-any-return]

    def unknown_columns(self) -> list[str]:
        """Return the columns that this version ignores as unknown. Raise NotARunError if the shard is gone."""
        with self._said_if_gone():
            names = (self._index or self._itself()).schema.names
        return [name for name in names if name not in COLUMN_OF and name not in INDEX_ONLY]

    def release(self) -> None:
        """Unmap a sealed shard until it is read again. Mapped pages count as memory of the process."""
        if self.is_sealed:
            self._shard = None

    def last_ledger(self) -> dict[str, Any]:
        """Return the writer's ledger (its counts of rows) at the end of this shard. Empty if it cannot be read."""
        if self._last_header is None and self.is_sealed:
            try:
                self._last_header = open_sealed(self.path)[1]
            except (RunError, FileNotFoundError):
                return {}
        return self._last_header.ledger if self._last_header else {}

    def find_sealed(self) -> None:
        """Find the batches of a sealed shard. Raise FileNotFoundError if the shard is gone."""
        why = ""
        try:
            self._index = _open_index(self.path, self.size_bytes)
            if self._index is not None:
                self._rows_of = {number: self._index.read(number, ()).batch.num_rows for number in self._index.blocks}
                return
        except RunError as error:
            why = str(error)
        self._use_shard()
        if why and not self.damage:  # an index never fits a shard that was cut, so only one problem is reported
            logger.warning("%s; the rows are read from the shard instead", why)

    def find_open(self, final: Location, max_batches: int | None = None) -> None:
        """Find the batches of an open shard, at most `max_batches`. `final` is the shard's path once it is sealed."""
        store = store_of(self.path)

        def open_source() -> ByteSource:
            try:
                return store.open_growing(self.path)
            except FileNotFoundError:
                return store.open_growing(final)  # the shard was sealed meanwhile, with the batches at the same offsets

        salvaged = salvage(lambda: store.open_growing(self.path), max_batches=max_batches)
        self._shard = Shard(open_source, salvaged.layout, salvaged.blocks)
        self._rows_of = salvaged.rows_of
        self._salvaged = salvaged
        self._last_header = salvaged.last_header
        self.num_trailing_bytes = salvaged.num_trailing_bytes
        self.tail_damage = salvaged.tail_damage
        self._note(*salvaged.damage)

    @property
    def is_complete(self) -> bool:
        """True if all batches that will ever be in the shard were found."""
        return self.is_sealed or (self._salvaged is not None and self._salvaged.is_sealed)

    def grow(self, max_batches: int) -> list[int]:
        """Find up to `max_batches` further batches of an open shard, and return their numbers.

        A shard sealed meanwhile is complete once its last batch is found. FileNotFoundError: the shard is gone.
        """
        assert self._salvaged is not None and self._shard is not None
        salvaged = self._salvaged = salvage(self._shard.open_source, self._salvaged, max_batches)
        kept = {number: self._shard.blocks[number] for number in self._rows_of}
        self._shard = Shard(self._shard.open_source, salvaged.layout, kept | salvaged.blocks)
        self._rows_of |= salvaged.rows_of
        self._note(*salvaged.damage)
        return list(salvaged.blocks)

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the batches whose rows are known, in file order."""
        return list(self._rows_of)

    def steps_of(self, number: int) -> Steps | None:
        with self._said_if_gone():
            return self._span(number)

    def only(self, numbers: Sequence[int]) -> ShardRows:
        part = copy.copy(self)
        part._rows_of = {number: self._rows_of[number] for number in numbers if number in self._rows_of}
        return part

    def forget(self, number: int) -> None:
        """Forget a batch that a reader of a growing run no longer needs."""
        self._rows_of.pop(number, None)
        self._spans.pop(number, None)

    def note_tail(self, is_at_work: bool) -> None:
        """Report the trailing bytes as damage, unless the writer is at work and may still write them."""
        if self.tail_damage and is_at_work:
            self.tail_damage = ""
        elif self.tail_damage:
            self._note(self.tail_damage)

    def _batches_of(self, steps: Steps | Ranges | None) -> list[int]:
        if steps is None:
            return list(self._rows_of)
        ranges: Ranges = (steps,) if isinstance(steps[0], int) else steps
        spans = {number: self._span(number) for number in self._rows_of}
        return [
            number
            for number, span in spans.items()
            if span is None or any(span[0] < last and first < span[1] for first, last in ranges)
        ]

    def _span(self, number: int) -> Steps | None:
        if number not in self._spans:
            try:
                steps = self._metadata_batch(number, ("step",)).column("step")
                extremes = pc.min_max(steps).as_py()
                self._spans[number] = (extremes["min"], extremes["max"] + 1) if len(steps) else (0, 0)
            except CorruptError:
                self._spans[number] = None
        return self._spans[number]

    def _metadata_batch(self, number: int, names: Sequence[str]) -> Any:
        if self.kept is not None and names != _KEPT and set(names) <= set(_KEPT):
            with suppress(CorruptError):  # the damage may be in a column that no query reads
                batch = self.kept.get(number) or self._metadata_batch(number, _KEPT)
                if batch.nbytes <= _MAX_KEPT_ROW_BYTES * batch.num_rows:
                    self.kept[number] = batch
                    return batch.select(list(names))
            self.kept = None
        if self._index is not None:
            return self._index.read(number, names).batch
        checked = self._itself().read(number, [name for name in names if name not in INDEX_ONLY]).batch
        rows = np.arange(checked.num_rows, dtype=np.int32)
        positions = {"batch": column_of(np.full_like(rows, number)), "row": column_of(rows)}
        arrays = [positions[name] if name in positions else checked.column(name) for name in names]
        return pa.RecordBatch.from_arrays(arrays, list(names))

    def _use_shard(self) -> None:
        self._index = None
        self._rows_of, self._spans = {}, {}
        shard = self._itself()
        for number in shard.blocks:
            try:
                self._rows_of[number] = shard.read(number, ()).batch.num_rows
            except CorruptError as error:
                self._note(str(error))

    def _itself(self) -> Shard:
        if self._shard is None:
            store = store_of(self.path)
            open_source = partial(store.open_sealed, self.path)
            try:
                self._shard = open_sealed(self.path)[0]
            except UnsupportedError as error:
                self._shard = Shard(open_source, Layout(SCHEMA), {})
                self._note(str(error))
            except CorruptError as error:
                salvaged = salvage(partial(store.open_growing, self.path))
                self._shard = Shard(open_source, salvaged.layout, salvaged.blocks)
                self.num_trailing_bytes = salvaged.num_trailing_bytes
                rest = f"; {salvaged.num_trailing_bytes} bytes that are no batch follow the last whole batch"
                first = f"{error}{rest if salvaged.num_trailing_bytes else ''}"
                self._note(first, *(each for each in salvaged.damage if each != str(error)))
        return self._shard

    def _note(self, *damage: str) -> None:
        for text in damage:
            if text not in self.damage:  # when a shard is mapped again, the same damage is found again
                logger.warning("%s", text)
                self.damage.append(text)

    @contextmanager
    def _said_if_gone(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotARunError(f"{self.path}: is gone (retired) since the run was opened; open it again") from None


def each_of(shards: Sequence[ShardRows], function: Callable[[ShardRows], Found]) -> Iterable[Found]:
    """Call a function for each shard, and return the results in order. Calls to an object store run in parallel."""
    return store_of(shards[0].path).each(function, shards) if shards else ()


def load_sealed(path: Location) -> ShardRows:
    """Return the rows of a sealed shard. Raise FileNotFoundError if the shard is gone."""
    rows = ShardRows(path, is_sealed=True, size_bytes=store_of(path).look_at(path).size_bytes)
    rows.find_sealed()
    return rows


def load_open(path: Location, max_batches: int | None = None) -> ShardRows:
    """Return the rows of the open shard that will be sealed as `path`.

    With `max_batches`, only the first batches are read; `ShardRows.grow` finds the next ones. FileNotFoundError is
    raised if the shard was sealed or is gone.
    """
    open_path = path.with_name(open_name(path.name))
    rows = ShardRows(open_path, is_sealed=False, size_bytes=store_of(open_path).look_at(open_path).size_bytes)
    rows.find_open(path, max_batches)
    return rows


def _open_index(shard: Location, shard_bytes: int) -> Shard | None:
    """Return a sealed shard's index, or None. Raise RunError if the index is damaged or belongs to another file."""
    path = shard.with_name(index_name(shard.name))
    try:
        index = open_sealed(path, is_index=True)[0]
    except FileNotFoundError:
        return None
    if (index.schema.metadata or {}).get(SHARD_BYTES_KEY) != b"%d" % shard_bytes:
        raise CorruptError(f"{path}: belongs to another file")
    return index
