"""Finds out which token each row of a recorded value belongs to: its sample, and its position in the sample.

This needs what ``keep=tokens`` records: the arguments of each call of the model (`input_ids`, `attention_mask`,
`position_ids`, `cache_position`, `cu_seqlens`, or the places in a paged cache), or what the program says by
`recorder.tokens`. Each token has a hash of all tokens up to and including it. By these hashes a sample is found in the
other run, whatever the batches, padding and order in the other run. This module must never guess: if a call continues
from a cache whose beginning was not recorded, its tokens are unknown, and the call is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LookupFailedError
from ...numerics.keys import by_key
from ...numerics.units import token_rows
from ...rules import Schedule
from ...run.probe import TokenBlock, token_blocks
from ...run.run import Run
from ..diff.renames import NO_RENAMES, Renames

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CallKey(NamedTuple):
    """The numbers that identify one call of the model."""

    attempt: int
    rank: int
    number: int


class Piece(NamedTuple):
    """One value in one call: a sketch for each of the call's tokens, or the value's whole numbers."""

    shape: tuple[int, ...]
    numbers: Array
    dtype: str
    facts: Mapping[str, Any]


@dataclass(slots=True)
class SampleTokens:
    """The tokens of one sample, as far as the calls of a run have shown them."""

    name: str | None
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """For each token, the hash of the tokens up to and including it."""
    num_drafts: int = 0
    """The number of speculative tokens at the end. No later call has continued them, and some may be discarded."""

    @property
    def sure(self) -> list[int]:
        """The tokens of the sample without the speculative ones at the end."""
        return self.tokens[: len(self.tokens) - self.num_drafts]

    def put(self, position: int, token: int) -> None:
        """Set the token at a position. Drop all later tokens, which were speculative and are now discarded."""
        del self.tokens[position:], self.hashes[position:]
        missing = position - len(self.tokens)  # an engine found them in another sample's cache
        self.tokens += [-1] * missing
        self.hashes += [0] * missing
        before = self.hashes[-1] if self.hashes else 0
        mixed = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64)
        self.tokens.append(token)
        self.hashes.append(mixed ^ (mixed >> 29))


class TokensOfCall(NamedTuple):
    """The tokens of one call of the model, without padding. All arrays but `kept` have one element for each token."""

    step: int
    grid: tuple[int, int]
    """The shape (samples, tokens) in which the model got the tokens; flat or packed tokens are all of one sample."""
    kept: Integers
    """The columns of `grid` for which the model computed logits; empty if the call did not choose columns."""
    at: Integers
    """The flat index of the token in `grid`."""
    samples: Integers
    """The index of each token's sample; a run's samples are numbered in the order in which they begin."""
    positions: Integers
    """The position of the token in its sample, from 0; padding does not count."""
    hashes: npt.NDArray[np.uint64]
    """The hash of the sample's tokens up to and including this one. Another one if this was discarded."""
    is_continued: npt.NDArray[np.bool_]
    """Whether the call continues the token's sample from a cache, as a decoding step does."""
    given: Integers
    """The position that the model was given for the token; -1 if no position was recorded."""
    logprobs: Floats
    """The log-probability of the token, from the logits at the token before it; NaN where it is not known."""

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, Integers] | None:
        """Return the number of a value's rows, and each token's row (-1: none). Return None if rows are not tokens."""
        rows = token_rows(shape, self.grid, len(self.kept))
        if rows is None:
            return None
        row, column = np.divmod(self.at, self.grid[1])
        if rows.kind == "kept":
            places = np.full(self.grid[1], -1)
            places[self.kept] = np.arange(len(self.kept))
            return rows.num(shape), places[column]
        if rows.kind == "last":
            own = column - (self.grid[1] - shape[1])
            return rows.num(shape), np.where(own >= 0, row * shape[1] + own, -1)
        return rows.num(shape), column if rows.kind == "columns" else self.at


def fitted(given: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Return positions in the tokens' shape. Return None if their number fits neither all tokens nor one row."""
    if given is None or given.size == 0:
        return None
    if given.size == shape[0] * shape[1]:
        return given.reshape(shape)
    return np.broadcast_to(given.reshape(1, -1), shape) if given.size == shape[1] else None


def past_of(facts: Mapping[str, Any], given: Mapping[str, Array], positions: Array | None, length: int) -> int:
    """Return the number of tokens, including padding, that a call finds in its cache."""
    if "cache_position" in given and given["cache_position"].size:
        return int(given["cache_position"].flat[0])
    if facts["past"] is not None:
        return int(facts["past"])
    if "seen" in given:
        return max(0, int(np.flatnonzero(given["seen"].any(axis=0)).max(initial=-1)) + 1 - length)
    return int(positions.min()) if positions is not None else 0


class _Sequence(NamedTuple):
    """The tokens of one sample in one call of the model."""

    row: int
    columns: list[int]
    tokens: list[int]
    name: str | None
    at: list[int] | None
    """The position of each token in the sample, if the program or an engine says it; else None."""
    before: tuple[int, ...] | None
    """The place in the cache of the token before the sequence. None if the sequence does not go on."""


class _CallArguments:
    """The arguments of one call of the model: tokens, and what says to which samples and positions they belong."""

    def __init__(self, piece: Piece, inner: Array | None) -> None:
        """Read the arguments. `inner` has the positions that a submodule was given."""
        given, first = dict[str, Array](), 0
        for name, shape in piece.facts["shapes"].items():
            size = int(np.prod(shape))
            given[name] = piece.numbers[first : first + size].reshape(shape).astype(np.int64)
            first += size
        self.given, self._names = given, piece.facts.get("names") or []
        self.tokens = given["tokens"].reshape(-1, given["tokens"].shape[-1])
        self.grid = num, length = self.tokens.shape
        self.positions = fitted(given.get("positions", inner), self.grid)
        said, self.is_paged = given.get("said"), "slots" in given
        self.is_misfit = said is not None and said.size != self.tokens.size
        """Whether the program gave positions for a number of tokens that is not the number of the call's tokens."""
        is_known = said is not None or self.is_paged
        self.past = 0 if is_known else past_of(piece.facts, given, self.positions, length)
        self._is_flat = num == 1 and len(self._names) == length
        """Whether the tokens lie in one row, each with the name of its sample, as in some engines."""
        self._index = said if said is not None else self.positions if self._is_flat else None
        self._slots = [*given.get("slots", np.zeros(0)).flat, *[-1] * length][:length]
        seen, until, mask = given.get("seen"), self.past + length, given.get("mask", np.ones(self.grid, bool))
        self.is_real = (mask if seen is None or until > seen.shape[1] else seen[:, self.past : until]) != 0

    def place(self, row: int, column: int) -> tuple[int, ...]:
        """Return a token's place in the cache. Without pages, the place before column 0 is column -1."""
        return (self._slots[column],) if self.is_paged else (self.grid[0], row, self.past + column + 1)

    def sequences(self) -> Iterator[_Sequence]:
        """Yield the tokens of each sample."""
        names, index = self._names, None if self._index is None else self._index.reshape(self.grid)
        parts = list(self._parts())
        is_pack = len(parts) > self.grid[0] and index is None
        behind = [*self.given.get("goes_on_behind", np.zeros(0)).flat, *[-1] * len(parts)]
        for number, (row, columns) in enumerate(parts):
            own = self.tokens[row, columns].tolist()
            before = self.place(row, -1) if self.past else None
            if self.is_paged:
                before = None if behind[number] < 0 else (behind[number],)
            elif is_pack and self.positions is not None and own:
                before = (-1,) if self.positions[row, columns[0]] else None  # unknown which sample of a pack goes on
            named = int(columns[0]) if self._is_flat and own else number
            name = names[named] if named < len(names) else None
            at = None if index is None else index[row, columns].tolist()
            yield _Sequence(row, columns.tolist(), own, name, at, before)

    def _parts(self) -> Iterator[tuple[int, Integers]]:
        """Yield the row and the columns of each sample of a call; a packed row has several samples."""
        labels, lengths = np.array(self._names if self._is_flat else [], object), self.given.get("lengths")
        for row in range(self.grid[0]):
            columns = np.flatnonzero(self.is_real[row])
            if lengths is not None and self.grid[0] == 1:  # behind the last sample, an engine pads its batch
                yield from ((row, part) for part in np.split(columns, lengths.reshape(-1)[1:])[:-1])
                continue
            ends = np.zeros(max(columns.size - 1, 0), bool)
            if self.positions is not None:
                ends |= np.diff(self.positions[row, columns]) != 1
            if labels.size:
                ends |= labels[columns[1:]] != labels[columns[:-1]]
            yield from ((row, part) for part in np.split(columns, 1 + np.flatnonzero(ends)))


_MAX_POSITION = 1 << 24
"""Positions are smaller. A position of this size or more is taken for damage in the file."""
TRAINER, ENGINE = "trainer", "engine"
"""The two parts of the run of a program that both trains and generates: calls with gradients, and calls that decode."""


class ValueName(NamedTuple):
    """The name of a value of the model, the same in every call."""

    module_path: str
    site: str
    name: str
    occurrence: int
    """The number of the module's call within one call of the model, counted from 0."""


class AlignedRun:
    """One run, the trainer's or the engine's: its calls with their tokens, and its values by name."""

    def __init__(
        self, run: Run, *, step: str | None = None, renames: Renames = NO_RENAMES, part: str | None = None
    ) -> None:
        """Read the tokens of the steps in `step`. `part` selects `TRAINER` or `ENGINE` calls if a run has both."""
        self.run = run
        self._given: dict[CallKey, Piece] = {}
        self.values: dict[ValueName, dict[CallKey, Piece]] = {}
        """For each value, in the order of execution, what each call recorded."""
        self.texts: dict[int, str] = {}
        self._logprobs: dict[str, dict[CallKey, Piece]] = {"logprobs": {}, "chosen": {}}
        blocks = sorted(token_blocks(run.writers), key=lambda block: block.order)
        self.root = next((block.root for block in blocks if block.name == "inputs"), "")
        if not self.root:
            raise LookupFailedError(
                f"{run.name}: the tokens were recorded of no call; record with preset=rollout, "
                'or rules "site=input,output keep=tokens", and say tokens with recorder.tokens'
            )
        for block in blocks:
            if block.root == self.root:
                self._add(block, renames)
        steps = Schedule.parse(step) if step is not None else None
        copies = self._copies()
        keys = [
            key for key, given in sorted(self._given.items())
            if key[:2] not in copies and (steps is None or given.facts["step"] in steps)
            and (part is None or (given.facts["mode"] == "no_grad") == (part == ENGINE))
        ]  # fmt: skip
        self._join(keys)
        if part == ENGINE:  # other models only score written tokens, as a reference model does
            written = {int(one) for call in self.calls.values() for one in call.samples[call.is_continued]}
            self._join([key for key, call in self.calls.items() if not written.isdisjoint(call.samples.tolist())])

    def name_of(self, sample: int) -> str:
        """Return the name of a sample for messages: the name that the program gave, or its number in the run."""
        name = self.samples[sample].name
        return f"sample {sample}" if name is None else f"sample {name!r}"

    def like(self, name: ValueName) -> ValueName | None:
        """Return this run's name for another run's value. Return None if this run's module computes something else.

        A module of an engine may name its input differently, or return a bias or a residual as well. It may leave the
        residual to the next module, which adds it.
        """
        info = self.run.modules.get((self.root, name.module_path))
        if info is not None and info.class_name.endswith("AndMul"):  # the module gets two projections in one tensor
            return None
        if name.site == "input":
            own = [one for one in self.values if one[:2] == name[:2] and one.occurrence == name.occurrence]
            has_residual = any(one.name == "residual" for one in own)
            if has_residual or name in self.values or len(own) != 1:
                return None if has_residual else name
            of_own = next(iter(self.values[own[0]].values())).dtype  # a tensor of token ids is no mask
            return name if "int" in of_own or of_own == "bool" else own[0]
        is_first = not name.name and name not in self.values and not self.ran_inside(name.module_path)
        return name._replace(name="0") if is_first else name

    def number(self, bases: Integers, limits: Integers, num_slots: int) -> None:
        """Give each token a slot, which is a number: the base of its sample plus its position. `pick` returns slots."""
        hashes = np.array([one for sample in self.samples for one in sample.hashes], np.uint64)
        lengths = np.array([len(sample.hashes) for sample in self.samples], np.int64)
        begins = np.cumsum(lengths) - lengths
        self.slots: dict[CallKey, Integers] = {}
        for key, call in self.calls.items():
            has_slot = call.positions < np.minimum(limits, lengths)[call.samples]
            at = np.where(has_slot, begins[call.samples] + call.positions, 0)
            has_slot &= hashes[at] == call.hashes
            self.slots[key] = np.where(has_slot, bases[call.samples] + call.positions, -1)
        self._is_taken = np.zeros(num_slots, bool)

    def ran_inside(self, path: str) -> set[str]:
        """Return the paths of the submodules of a module that have a value in at least one call."""
        inside = {name: rows for name, rows in self.values.items() if path and name[0].startswith(f"{path}.")}
        return {name.module_path for name, rows in inside.items() if not self.calls.keys().isdisjoint(rows)}

    def pick(self, name: ValueName | None) -> tuple[Array, Integers, str, int] | None:
        """Return a value with one row per token, the rows' slots, the dtype, and the number of elements per token."""
        self._is_taken[:] = False
        pieces: list[Array] = []
        taken: list[Integers] = []
        dtype, width = "", 0
        for key, piece in (self.values.get(name, {}) if name else {}).items():
            call = self.calls.get(key)
            found = call.rows_of(piece.shape) if call is not None else None
            if found is None or not piece.numbers.size:
                continue
            numbers = piece.numbers.reshape(found[0], -1)
            own_width = math.prod(piece.shape) // found[0]
            if pieces and (own_width, piece.dtype) != (width, dtype):
                continue
            slots, first = np.unique(np.where(found[1] >= 0, self.slots[key], -1), return_index=True)
            is_new = (slots >= 0) & ~self._is_taken[slots]
            if is_new.any():
                dtype, width = piece.dtype, own_width
                self._is_taken[slots[is_new]] = True
                taken.append(slots[is_new])
                pieces.append(numbers[found[1][first[is_new]]])
        return (np.concatenate(pieces), np.concatenate(taken), dtype, width) if pieces else None

    def _add(self, block: TokenBlock, renames: Renames) -> None:
        first = 0
        for facts in block.calls:
            key = CallKey(block.attempt, block.rank, facts["call"])
            own = block.numbers[first : first + facts["num"]]
            first += facts["num"]
            piece = Piece(tuple(facts.get("shape", ())), own, block.dtype, facts)
            if block.name == "inputs":
                self._given.setdefault(key, piece)
                texts = (text for row in facts.get("texts") or [] for text in row)
                self.texts |= zip(own.tolist(), map(str, texts), strict=False)
            elif block.name in self._logprobs:
                self._logprobs[block.name].setdefault(key, piece)
            elif "experts" not in block.module_path.split(".")[:-1]:  # rows inside are in the experts' order
                site, _, name = block.name.partition(" ")
                value = ValueName(renames.old(block.module_path), site, name, facts["occurrence"])
                self.values.setdefault(value, {}).setdefault(key, piece)

    def _copies(self) -> set[tuple[int, int]]:
        """Return each (attempt, rank) whose tokens equal those of an earlier rank, as in tensor parallelism."""
        tokens = by_key((key[:2], piece.numbers.tobytes()) for key, piece in sorted(self._given.items()))
        return {one for one, own in tokens.items() if any(other < one and tokens[other] == own for other in tokens)}

    def _join(self, keys: Sequence[CallKey]) -> None:
        self.samples: list[SampleTokens] = []
        self.padding: set[int] = set()
        """The ids of tokens that a mask has hidden, such as padding."""
        self.calls: dict[CallKey, TokensOfCall] = {}
        self.num_unknown = 0
        """The number of calls with unknown tokens, for example if the beginning of a cache was not recorded."""
        self._named: dict[str, int] = {}
        for _, of_rank in itertools.groupby(keys, lambda key: key[:2]):
            self._last: tuple[int, TokensOfCall] | None = None
            """The number of the last call whose tokens are known, and these tokens."""
            self._cache: dict[tuple[int, ...], tuple[int, int]] = {}
            """By place in the cache (a slot, or a row and a column), the token's sample and its position there."""
            self._shown: list[int] = []
            """The samples of the previous call; empty after a call with a cache: a repeat is then another sample."""
            for key in of_rank:
                self._join_call(key, self._given[key])

    def _join_call(self, key: CallKey, piece: Piece) -> None:
        inside = (rows.get(key) for name, rows in self.values.items() if name[1:3] == ("input", "position_ids"))
        inner = next((one.numbers.reshape(one.shape) for one in inside if one is not None), None)
        call = _CallArguments(piece, inner)
        if call.is_misfit:
            self.num_unknown += 1
            return
        self.padding |= set(call.tokens[~call.is_real].tolist())
        if not call.is_paged and not call.past:
            self._cache = {}
        shown, told, is_unknown = list[int](), list[tuple[int, int, int, int, bool]](), False
        for number, sequence in enumerate(call.sequences()):
            sample, first = self._find_sample(call, number, sequence)
            shown.append(sample)
            is_unknown |= sample < 0 < len(sequence.tokens)
            if sample >= 0:
                told += self._put(call, sequence, sample, first)
        self.num_unknown += is_unknown
        self._shown = [] if call.past else shown
        table = np.array(told, np.uint64).reshape(-1, 5)
        flat, samples, places = table[:, :3].astype(np.int64).T
        model = np.full(len(flat), -1) if call.positions is None else call.positions.reshape(-1)[flat]
        self.calls[key] = joined = TokensOfCall(
            piece.facts["step"], call.grid, call.given.get("kept", np.zeros(0, np.int64)), flat, samples, places,
            table[:, 3], table[:, 4] > 0, model, np.full(len(flat), np.nan),
        )  # fmt: skip
        self._add_logprobs(key, joined, call.given.get("lengths", np.zeros(1, np.int64)).reshape(-1))
        self._last = key.number, joined

    def _find_sample(self, call: _CallArguments, number: int, sequence: _Sequence) -> tuple[int, int]:
        """Return the sample of a sequence (-1: unknown) and the position of the sequence's first token."""
        if not call.is_paged:
            start = sequence.at[0] if sequence.at else 0
            other = self._repeated(number, start, sequence.tokens)
        elif not sequence.tokens:
            return -1, 0
        else:
            place = call.place(sequence.row, sequence.columns[0])
            other = self._cache.get(place) if sequence.before is not None else None
        return self._sample(sequence.name, sequence.before, other)

    def _put(
        self, call: _CallArguments, sequence: _Sequence, sample: int, first: int
    ) -> Iterator[tuple[int, int, int, int, bool]]:
        """Add a sequence to its sample and to the cache.

        Yields for each token: flat index, sample, position, hash, and whether the token continues a sample.
        """
        own, of, row = sequence.tokens, self.samples[sample], sequence.row
        at = range(first, first + len(own)) if sequence.at is None else sequence.at
        is_continued = bool(own) and at[0] > 0
        for column, position, token in zip(sequence.columns, at, own, strict=True):
            # After tokens that were never shown, a token can be placed only in a sample with a name.
            if 0 <= position < _MAX_POSITION and (position <= len(of.tokens) or of.name is not None):
                of.put(position, token)
                self._cache[call.place(row, column)] = sample, position
                yield row * call.grid[1] + column, sample, position, of.hashes[-1], is_continued
        of.num_drafts = len(own) - 1 if is_continued else 0
        if not call.is_paged:
            self._cache[call.place(row, call.grid[1] - 1)] = sample, len(of.tokens) - 1

    def _repeated(self, number: int, start: int, tokens: list[int]) -> tuple[int, int] | None:
        """Return (sample, -1) if a sequence repeats a sample of the previous call or continues it; else None."""
        sample = self._shown[number] if number < len(self._shown) else -1
        known = self.samples[sample].tokens if sample >= 0 else []
        repeats = 0 < len(known) < len(tokens) and tokens[: len(known)] == known  # this happens without a cache
        return (sample, -1) if 0 < start <= len(known) or repeats else None

    def _sample(
        self, name: str | None, place: tuple[int, ...] | None, other: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the sample of a sequence, a new one if it begins here, and the position of the sequence's first token.

        The sample is -1 if unknown. `place` is the cache's place of the token before the sequence. `other` is the token
        (sample, position) that the cache has at the place of the first token, or the sample that is repeated.
        """
        owner, position = self._cache.get(place, (-1, -1)) if place is not None else other or (-1, -1)
        if name is not None and name in self._named:
            return self._named[name], 0 if place is None else len(self.samples[self._named[name]].tokens)
        if place is not None and owner < 0:
            return -1, 0
        of = self.samples[owner] if owner >= 0 else SampleTokens(None)
        is_own = place is None or len(place) > 1 or position == len(of.tokens) - 1
        is_draft = other == (owner, position + 1) and position + 1 >= len(of.sure)  # those tokens are discarded
        if owner >= 0 and (is_own or is_draft):
            return owner, position + 1
        self.samples.append(SampleTokens(name))
        if name is not None:
            self._named[name] = len(self.samples) - 1
        for token in of.tokens[: position + 1]:  # another sample has filled these blocks of the cache
            self.samples[-1].put(len(self.samples[-1].tokens), token)
        return len(self.samples) - 1, position + 1

    def _add_logprobs(self, key: CallKey, call: TokensOfCall, lengths: Integers) -> None:
        """Fill in the log-probabilities of a call's tokens, from its own logits and the logits of the call before."""
        length = call.grid[1]
        row, column = np.divmod(call.at, length)
        by_own, by_last = (self._logprobs[name].get(key) for name in ("logprobs", "chosen"))
        if by_own is not None:
            own = column - (length - by_own.shape[1])
            follows = np.zeros(len(call.at), bool)
            follows[1:] = (np.diff(call.at) == 1) & (np.diff(call.samples) == 0) & (np.diff(call.positions) == 1)
            has = follows & (own >= 0)
            call.logprobs[has] = by_own.numbers.reshape(by_own.shape)[row[has], own[has]]
        if by_last is None or self._last is None or by_last.facts["after"] != self._last[0]:
            return
        last, chosen = self._last[1], by_last.numbers.reshape(by_last.shape)
        columns = last.kept if last.kept.size else np.arange(1, last.grid[0] + 1) * last.grid[1] - 1
        rows = dict(zip(columns.tolist(), range(len(columns)), strict=True))
        placed = zip(last.samples.tolist(), last.positions.tolist(), last.at.tolist(), strict=True)
        ends = {(sample, position): rows[at] for sample, position, at in placed if at in rows}
        for token, (sample, position) in enumerate(zip(call.samples.tolist(), call.positions.tolist(), strict=True)):
            before = ends.get((sample, position - 1))
            if before is None or not np.isnan(call.logprobs[token]):
                continue
            if by_last.facts["packed"]:
                first = int(np.searchsorted(lengths[1:], column[token], "right"))
                call.logprobs[token] = chosen[first, before]
            elif before == row[token] and column[token] in (0, length - 1):
                call.logprobs[token] = chosen[int(column[token] > 0), before]
