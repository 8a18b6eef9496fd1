"""Which token each row of an activation belongs to: the sample, and the position in the sample.

A call of the model says it by its own arguments (`input_ids`, `attention_mask`, `position_ids`, `cache_position`,
`cu_seqlens`), or the program says it by `recorder.tokens`. Hashes of the tokens of a sample, up to and with each one,
find the sample of the other run whatever its batches, paddings and orders are. This module must never guess: a call
that goes on from a cache whose beginning was not recorded has no tokens, and is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...columns import parse_shape
from ...errors import LookupFailedError
from ...run.run import Run
from ...run.selection import Selection
from ...sites import SAID_POSITIONS, SAID_SAMPLES
from ..diff.renames import NO_RENAMES, Renames

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

_IDS = ("input_ids", "tokens", "ids", "idx")
"""The names of the argument that has the tokens, best first; else the root's first argument of whole numbers has."""
_POSITIONS = ("position_ids", "positions")
_LENGTHS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q")
_NOT_IDS = ("labels", "attention_mask", "mask", "cache_position", SAID_POSITIONS, SAID_SAMPLES, *_POSITIONS, *_LENGTHS)
_CACHES = ("past_key_values", "past_key_value", "kv_cache", "cache")
_WHOLE = ("int64", "int32", "int16", "uint8")
_MODULUS = 1 << 64
_MAX_POSITION = 1 << 24
"""Positions from here on are no positions of tokens, but of a file that somebody has damaged."""


class ValueName(NamedTuple):
    """A value of the model, whichever call it is of."""

    module_path: str
    site: str
    name: str
    occurrence: int
    """The number of the module's call within a call of the model, from 0."""

    @property
    def is_cache(self) -> bool:
        """Whether the value is a cache of keys and values, which is compared by what attention makes of it."""
        return self.name.partition(".")[0] in _CACHES


class CallKey(NamedTuple):
    """What tells the calls of a model apart."""

    step: int
    mode: str
    micro_step: int | None
    rank: int | None
    """None where the value is of all ranks together."""
    number: int


class TokenRow(NamedTuple):
    """The columns of one row that `align` needs; named as in the registry of columns."""

    at: int
    """The row in the global view."""
    step: int
    mode: str
    micro_step: int | None
    rank: int | None
    call: int
    root: str
    phase: str
    module_path: str
    site: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str | None
    fingerprint: str | None
    l2: float | None


@dataclass(slots=True)
class SampleTokens:
    """The tokens of one sample, as the calls of a run have shown them."""

    name: str | None
    """The name that the program gave; None if it gave none."""
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """The hash of the tokens up to and with each token."""

    def put(self, position: int, token: int) -> None:
        """Set the token at a position, and forget those behind it: speculation that was thrown away."""
        del self.tokens[position:], self.hashes[position:]
        missing = position - len(self.tokens)  # in a sample with a name: an engine found them in the cache of another
        self.tokens += [-1] * missing
        self.hashes += [0] * missing
        before = self.hashes[-1] if self.hashes else 0
        mixed = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % _MODULUS
        self.tokens.append(token)
        self.hashes.append(mixed ^ (mixed >> 29))


class TokensOfCall(NamedTuple):
    """The tokens of one call of the model, without padding; one element of each array for each token."""

    shape: tuple[int, ...]
    """The shape of the tokens as the model got them: batch and sequence, or tokens alone."""
    is_continued: bool
    """True if the call goes on from a cache, as a decoding step does."""
    at: Integers
    """The flat index in `shape`."""
    samples: Integers
    """The number of the sample, in the order in which the run's samples have begun."""
    positions: Integers
    """The position of the token in its sample, from 0; padding does not count."""
    given: Integers
    """The position that the model was given; -1 where it was given none that was recorded."""

    def rows_of(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Integers] | None:
        """Return the trailing shape of a value and the row of each token in it (-1: none); None if it has no tokens."""
        num = math.prod(self.shape)
        batch, length = self.shape if len(self.shape) == 2 else (1, num)
        column = self.at % max(length, 1)
        if len(self.shape) == 2 and shape[:2] == self.shape:
            return shape[2:], self.at
        if len(self.shape) == 2 and len(shape) > 1 and shape[:2] == (1, length):
            return shape[2:], column
        if len(shape) > 2 and length > 1 and shape[:2] == (batch, 1):  # the last position alone, as for the logits
            return shape[2:], np.where(column == length - 1, self.at // length, -1)
        return (shape[1:], self.at) if len(shape) > 1 and shape[0] == num > 0 else None


class Side:
    """One run, the trainer's or the engine's: its calls with their tokens, and its values by name."""

    def __init__(self, run: Run, *, step: str | None = None, renames: Renames = NO_RENAMES) -> None:
        self.run = run
        self._global = run.view().rows()
        table = renames.apply(self._global.table).append_column("at", pa.array(np.arange(len(self._global))))
        table = Selection(site="input,output,param", step=step).narrow(table).select(TokenRow._fields)
        rows = [TokenRow(**{**row, "shape": parse_shape(row["shape"])}) for row in table.to_pylist()]
        self.parameters = [row for row in rows if row.site == "param"]
        rows = [row for row in rows if row.site != "param" and row.phase == "forward"]
        first = self._first_with_tokens(rows)
        self.root, self._anchor = first.root, first.module_path
        self.values: dict[ValueName, dict[CallKey, TokenRow]] = {}
        """The rows of each value by call, in the order of execution."""
        self._add_values([row for row in rows if row.root == self.root])
        self.samples: list[SampleTokens] = []
        self.padding: set[int] = set()
        """The tokens that stand where a mask hides them."""
        self.calls: dict[CallKey, TokensOfCall] = {}
        self.num_unknown = 0
        """The calls that go on from a cache whose beginning was not recorded."""
        self._join()

    def array(self, row: TokenRow) -> Array:
        """Return the tensor of a row."""
        tensor: Array = self._global.array(row.at)
        return tensor

    @property
    def is_named(self) -> bool:
        """Whether the program has named each sample."""
        return bool(self.samples) and all(sample.name is not None for sample in self.samples)

    def name_of(self, sample: int) -> str:
        """Return a sample as people know it: the name that the program gave, or its number in the run."""
        name = self.samples[sample].name
        return f"sample {sample}" if name is None else f"sample {name!r}"

    def number(self, bases: Integers, limits: Integers, num_slots: int) -> None:
        """Give each token a number, its slot, which `pick` returns: the base of its sample and its position.

        Tokens at positions from the sample's limit on have none.
        """
        self.slots = {
            key: np.where(call.positions < limits[call.samples], bases[call.samples] + call.positions, -1)
            for key, call in self.calls.items()
        }
        self._is_taken = np.zeros(num_slots, bool)

    def pick(self, name: ValueName) -> tuple[Array, Integers, str] | None:
        """Return a value, one row a token; the slot of the token of each row; the dtype.

        Of a token that several calls have shown it is the first. None if no call has the value with its elements.
        """
        self._is_taken[:] = False
        pieces: list[Array] = []
        taken: list[Integers] = []
        trailing: tuple[int, ...] | None = None
        dtype = ""
        for key, row in self.values.get(name, {}).items():
            call = self.calls.get(key)
            found = call.rows_of(row.shape) if call is not None and row.encoding is not None else None
            if found is None or 0 in row.shape or (trailing is not None and found[0] != trailing):
                continue
            slots, first = np.unique(np.where(found[1] >= 0, self.slots[key], -1), return_index=True)
            is_new = (slots >= 0) & ~self._is_taken[slots]
            if is_new.any():
                trailing, dtype = found[0], row.dtype
                self._is_taken[slots[is_new]] = True
                taken.append(slots[is_new])
                pieces.append(self.array(row).reshape(-1, math.prod(trailing))[found[1][first[is_new]]])
        return (np.concatenate(pieces), np.concatenate(taken), dtype) if pieces else None

    def _first_with_tokens(self, rows: Sequence[TokenRow]) -> TokenRow:
        """Return a row of the outermost module that was given the tokens."""
        given = [row for row in rows if row.name in (SAID_POSITIONS, SAID_SAMPLES) or _may_be_tokens(row)]
        if all(row.encoding is None for row in given):
            raise LookupFailedError(
                f"{self.run.name}: the tokens were recorded of no call; record the model's inputs "
                "(rules \"module='' site=input keep=tensor\", or preset=rollout), or say them with recorder.tokens"
            )
        return min(given, key=lambda row: (row.module_path != "", row.module_path.count(".")))

    def _add_values(self, rows: Sequence[TokenRow]) -> None:
        distinct = {(row.module_path, row.step, row.mode, row.micro_step, row.rank, row.call) for row in rows}
        calls = Counter(one[:-1] for one in distinct)
        for row in rows:
            moment = (row.step, row.mode, row.micro_step, row.rank)
            of_model, of_module = calls[(self._anchor, *moment)], calls[(row.module_path, *moment)]
            is_permuted = "experts" in row.module_path.split(".")[:-1]  # inside, rows are in the order of the experts
            # A module whose calls do not add up runs outside the model's calls, or in some of them.
            if of_model and of_module % of_model == 0 and not is_permuted:
                number, occurrence = divmod(row.call, of_module // of_model)
                name = ValueName(row.module_path, row.site, row.name, occurrence)
                self.values.setdefault(name, {}).setdefault(CallKey(*moment, number), row)

    def _given(self, key: CallKey, *names: str, anywhere: bool = False) -> Array | None:
        """Return an argument of a call of the model, or, with `anywhere`, of the first module that was given it."""
        for name, rows in self.values.items():
            fits = name.site == "input" and name.name in names and (anywhere or name.module_path == self._anchor)
            if fits and key in rows and rows[key].encoding is not None:
                return self.array(rows[key])
        return None

    def _join(self) -> None:
        inputs = {
            name: rows for name, rows in self.values.items()
            if name.site == "input" and name.module_path == self._anchor
        }  # fmt: skip
        named: dict[str, int] = {}
        before: list[int] = []
        num_columns = 0
        for key in dict.fromkeys(key for rows in inputs.values() for key in rows):
            own = [rows[key] for rows in inputs.values() if key in rows]
            ids = [row for row in own if _may_be_tokens(row) and row.encoding is not None]
            ids.sort(key=lambda row: _IDS.index(row.name) if row.name in _IDS else len(_IDS))
            said = self._given(key, SAID_POSITIONS)
            tokens = self.array(ids[0]) if ids else None if said is None else np.full(said.shape, -1)
            has_grid = tokens is not None and tokens.ndim in (1, 2) and tokens.size > 0
            if tokens is None or not has_grid or (said is not None and said.size != tokens.size):
                self.num_unknown += 1
                continue
            grid = tokens.reshape(-1, tokens.shape[-1])
            mask = _flat(self._given(key, "attention_mask"), grid.shape[1])
            given = self._given(key, *_POSITIONS, anywhere=True)
            past = self._past(key, own, grid.shape[1], mask, given) if said is None else 0
            if past and (past != num_columns or len(before) != len(grid)):
                self.num_unknown += 1
                continue
            num_columns = past + grid.shape[1]
            real = np.ones(grid.shape, bool)
            if mask is not None and mask.ndim == 2 and len(mask) == len(grid) and mask.shape[1] >= grid.shape[1]:
                real = mask[:, -grid.shape[1] :] != 0
                self.padding |= set(grid[~real].tolist())
            given = _fitted(given, grid.shape)
            said = None if said is None else said.reshape(grid.shape)
            names = self._given(key, SAID_SAMPLES)
            texts = [] if names is None or names.ndim != 2 else [row.tobytes().rstrip(b"\0") for row in names]
            now: list[int] = []
            told: list[tuple[int, ...]] = []
            for row, of_row in self._sequences(key, grid, real, given):
                text = texts[len(now)].decode(errors="replace") if len(now) < len(texts) else None
                start = None if said is None or not of_row.size else int(said[row, of_row[0]])
                if text in named:
                    sample = named[text]
                elif row < len(before) and (past or self._goes_on(before[row], start, grid[row, of_row])):
                    sample = before[row]
                else:
                    sample = len(self.samples)
                    self.samples.append(SampleTokens(text))
                if text is not None:
                    named[text] = sample
                now.append(sample)
                first = len(self.samples[sample].tokens) if past else 0
                index = first + np.arange(of_row.size) if said is None else said[row, of_row]
                told += self._put(sample, row, of_row, index, grid, given)
            before = now
            columns = [np.array(one, np.int64) for one in zip(*told, strict=True)] or [np.zeros(0, np.int64)] * 4
            self.calls[key] = TokensOfCall(tokens.shape, bool(columns[2].size and columns[2].min()), *columns)

    def _goes_on(self, sample: int, start: int | None, tokens: Array) -> bool:
        """Whether tokens go on with a sample by the position that was said, or repeat all of it, as without a cache."""
        known = self.samples[sample].tokens
        return 0 < (start or 0) <= len(known) or (
            0 < len(known) < len(tokens) and tokens[: len(known)].tolist() == known
        )

    def _put(
        self, number: int, row: int, columns: Integers, index: Integers, grid: Array, given: Array | None
    ) -> Iterator[tuple[int, ...]]:
        """Add tokens to a sample, and yield the columns of `TokensOfCall` of each."""
        sample = self.samples[number]
        for place, column in zip(index.tolist(), columns.tolist(), strict=True):
            # Nobody can tell whose token it is where those before it were never shown; a name tells it.
            if not 0 <= place < _MAX_POSITION or (place > len(sample.tokens) and sample.name is None):
                continue
            sample.put(place, int(grid[row, column]))
            yield row * grid.shape[1] + column, number, place, -1 if given is None else int(given[row, column])

    def _past(self, key: CallKey, own: Sequence[TokenRow], length: int, mask: Array | None, given: Array | None) -> int:
        """Return the number of tokens, with padding, that a call finds in its cache."""
        if (at := self._given(key, "cache_position")) is not None and at.size:
            return int(at.flat[0])
        if mask is not None and mask.ndim == 2:
            return max(0, int(mask.shape[1]) - length)
        if cached := [row for row in own if row.name.partition(".")[0] in _CACHES and len(row.shape) > 2]:
            return int(cached[0].shape[-2])
        return int(given.min()) if given is not None and given.size and given.ndim == 2 else 0

    def _sequences(self, key: CallKey, grid: Array, real: Array, given: Array | None) -> Iterator[tuple[int, Integers]]:
        """Yield the row and the columns of each sample of a call: several samples of one row where it is packed."""
        lengths = self._given(key, *_LENGTHS, anywhere=True)
        for row in range(len(grid)):
            columns = np.flatnonzero(real[row])
            cuts: list[int] = []
            if lengths is not None and len(grid) == 1:
                cuts = lengths.reshape(-1)[1:-1].tolist()
            elif given is not None and columns.size > 1:
                cuts = (np.flatnonzero(given[row, columns[1:]] != given[row, columns[:-1]] + 1) + 1).tolist()
            parts = np.split(columns, cuts)
            if len(parts) > 1 and given is not None:  # a part that begins later is of a sample that nobody names
                known = [part for part in parts if part.size == 0 or given[row, part[0]] == 0]
                self.num_unknown += len(known) < len(parts)
                parts = known
            yield from ((row, part) for part in parts)


def _fitted(given: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Return positions in the shape of the tokens, where they have it or stand for each row alike."""
    if given is None or given.size == 0:
        return None
    if given.size == math.prod(shape):
        return given.reshape(shape)
    return np.broadcast_to(given.reshape(1, -1), shape) if given.size == shape[1] else None


def _flat(mask: Array | None, length: int) -> Array | None:
    """Return a mask of batch, 1, queries and keys as one of batch and tokens: what is no padding sees itself."""
    if mask is None or mask.ndim != 4 or mask.shape[2] != length:
        return mask
    visible = mask[:, 0] if mask.dtype == np.bool_ else mask[:, 0] == 0  # or numbers that are added to scores
    past = int(np.flatnonzero(visible.any(axis=(0, 1))).max(initial=-1)) + 1 - length
    if past < 0:
        return None
    itself = visible[:, np.arange(length), past + np.arange(length)]
    return np.concatenate([np.ones((len(mask), past), bool), itself], axis=1)


def _may_be_tokens(row: TokenRow) -> bool:
    is_other = row.name in _NOT_IDS or row.name.partition(".")[0] in _CACHES
    if row.site != "input" or row.dtype not in _WHOLE or is_other:
        return False
    return row.name in _IDS or not row.module_path
