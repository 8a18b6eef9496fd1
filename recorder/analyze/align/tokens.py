"""Which token of which sample each row of a run's values belongs to, from the rows of ``keep=tokens``.

A call of the model says it by its own arguments (`input_ids`, `attention_mask`, `position_ids`, `cache_position`,
`cu_seqlens`, the places in a paged cache), or the program says it by `recorder.tokens`. Hashes of the tokens of a
sample, up to and with each one, find the sample of the other run whatever its batches, paddings and orders are. This
module must never guess: a call that goes on from a cache without a recorded beginning has no tokens, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LookupFailedError
from ...numerics.sketch import token_rows
from ...rules import Schedule
from ...run.probe import TokenBlock, token_blocks
from ...run.run import Run
from ..diff.renames import NO_RENAMES, Renames

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MODULUS = 1 << 64
_MAX_POSITION = 1 << 24
"""Positions from here on are no positions of tokens, but of a file that somebody has damaged."""
TRAINER, ENGINE = "trainer", "engine"
"""The parts of a run of one program that trains and generates: calls with gradients, and calls that decode."""


class ValueName(NamedTuple):
    """A value of the model, whichever call it is of."""

    module_path: str
    site: str
    name: str
    occurrence: int
    """The number of the module's call within a call of the model, from 0."""


class CallKey(NamedTuple):
    """What tells the calls of a model apart."""

    attempt: int
    rank: int
    number: int


class Piece(NamedTuple):
    """What one call has of a value: the sketch, or the whole numbers, of its tokens."""

    shape: tuple[int, ...]
    """The shape of the value itself."""
    numbers: Array
    dtype: str
    facts: Mapping[str, Any]


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

    step: int
    mode: str
    grid: tuple[int, int]
    """The samples, and the tokens of each, as the model got them; one sample of all where they are flat or packed."""
    kept: Integers
    """The columns for which the model computed logits, where it was told which."""
    at: Integers
    """The flat index in `grid`."""
    samples: Integers
    """The number of the sample, in the order in which the run's samples have begun."""
    positions: Integers
    """The position of the token in its sample, from 0; padding does not count."""
    given: Integers
    """The position that the model was given; -1 where it was given none that was recorded."""
    logprobs: Floats
    """The log-probability of the token by the logits of the token before it; NaN where it is not known."""

    @property
    def is_continued(self) -> bool:
        """Whether the call goes on from a cache, as a decoding step does."""
        return bool(self.positions.size and self.positions.min())

    def rows_of(self, shape: tuple[int, ...]) -> tuple[int, Integers] | None:
        """Return the number of a value's rows, and the row of each token (-1: none); None if its rows are no tokens."""
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


class Side:
    """One run, the trainer's or the engine's: its calls with their tokens, and its values by name."""

    def __init__(
        self, run: Run, *, step: str | None = None, renames: Renames = NO_RENAMES, part: str | None = None
    ) -> None:
        """Read the rows of tokens.

        Args:
            run: the run.
            step: the steps of the calls, as in rules; None: all.
            renames: names of the modules.
            part: `TRAINER` or `ENGINE` of a run that has both; None: all calls.
        """
        self.run = run
        self._given: dict[CallKey, Piece] = {}
        self.values: dict[ValueName, dict[CallKey, Piece]] = {}
        """What the calls have of each value, in the order of execution."""
        self.texts: dict[int, str] = {}
        """The text of each token that the program has said one of."""
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
        if part == ENGINE:  # others only score what was written, as for a reference
            written = {int(one) for call in self.calls.values() if call.is_continued for one in call.samples}
            self._join([key for key, call in self.calls.items() if not written.isdisjoint(call.samples.tolist())])

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

    def ran_inside(self, path: str) -> set[str]:
        """Return the modules inside a module of which a call has a value."""
        inside = {name: rows for name, rows in self.values.items() if path and name[0].startswith(f"{path}.")}
        return {name.module_path for name, rows in inside.items() if not self.calls.keys().isdisjoint(rows)}

    def pick(self, name: ValueName) -> tuple[Array, Integers, str, int] | None:
        """Return a value, one row a token; the slot of the token of each row; the dtype; a token's elements.

        Of a token that several calls have shown it is the first. None if no call has the value.
        """
        self._is_taken[:] = False
        pieces: list[Array] = []
        taken: list[Integers] = []
        dtype, width = "", 0
        for key, piece in self.values.get(name, {}).items():
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
        """Add what each call of a block has."""
        first = 0
        for facts in block.calls:
            key = CallKey(block.attempt, block.rank, facts["call"])
            own = block.numbers[first : first + facts["num"]]
            first += facts["num"]
            piece = Piece(tuple(facts.get("shape", ())), own, block.dtype, facts)
            if block.name == "inputs":
                self._given.setdefault(key, piece)
            elif block.name in self._logprobs:
                self._logprobs[block.name].setdefault(key, piece)
            elif "experts" not in block.module_path.split(".")[:-1]:  # inside, rows are in the order of the experts
                site, _, name = block.name.partition(" ")
                value = ValueName(renames.old(block.module_path), site, name, facts["occurrence"])
                self.values.setdefault(value, {}).setdefault(key, piece)

    def _copies(self) -> set[tuple[int, int]]:
        """Return the attempts and ranks that have the tokens of a rank before them, as in tensor parallelism."""
        tokens: dict[tuple[int, int], list[bytes]] = {}
        for key, piece in sorted(self._given.items()):
            tokens.setdefault(key[:2], []).append(piece.numbers.tobytes())
        return {one for one, own in tokens.items() if any(other < one and tokens[other] == own for other in tokens)}

    def _join(self, keys: Sequence[CallKey]) -> None:
        self.samples: list[SampleTokens] = []
        self.padding: set[int] = set()
        """The tokens that stand where a mask hides them."""
        self.calls: dict[CallKey, TokensOfCall] = {}
        self.num_unknown = 0
        """The calls that go on from a cache whose beginning was not recorded."""
        self._named: dict[str, int] = {}
        self._before: list[int] = []
        """The sample of each row of the call before."""
        self._ends: tuple[int, list[tuple[int, int]]] = -1, []
        """The call before, and the sample and the position of each row of logits that it left for the next call."""
        self._num_columns = 0
        self._had_cache = False
        """Whether the call before went on from a cache: then a sample that is repeated is scored anew."""
        self._at_slot: dict[int, tuple[int, int]] = {}
        """The sample and the position of the token at each place of a paged cache."""
        of: tuple[int, int] | None = None
        for key in keys:
            if key[:2] != of:
                of, self._before, self._ends, self._num_columns, self._at_slot = key[:2], [], (-1, []), 0, {}
            call = self._joined(key, self._given[key])
            if call is None:
                self.num_unknown += 1
            else:
                self.calls[key] = call
                self._ends = key.number, _ends(call)

    def _joined(self, key: CallKey, piece: Piece) -> TokensOfCall | None:
        """Return the tokens of a call; None if nobody can tell whose they are."""
        facts, given, first = piece.facts, dict[str, Array](), 0
        for name, shape in facts["shapes"].items():
            size = int(np.prod(shape))
            given[name] = piece.numbers[first : first + size].reshape(shape).astype(np.int64)
            first += size
        grid = given["tokens"].reshape(-1, given["tokens"].shape[-1])
        for ids, texts in zip(grid.tolist(), facts.get("texts") or [], strict=False):
            self.texts |= zip(ids, map(str, texts), strict=False)
        said = given.get("said")
        if said is not None and said.size != grid.size:
            return None
        inside = (rows.get(key) for name, rows in self.values.items() if name[1:3] == ("input", "position_ids"))
        inner = next((one.numbers.reshape(one.shape) for one in inside if one is not None), None)
        positions = _fitted(given.get("positions", inner), grid.shape)
        real = np.ones(grid.shape, bool)
        if "mask" in given:
            real = given["mask"] != 0
        past = 0 if said is not None or "slots" in given else _past(facts, given, positions, grid.shape[1])
        if "seen" in given and past + grid.shape[1] <= given["seen"].shape[1]:
            real = given["seen"][:, past : past + grid.shape[1]] != 0
        if past and (past != self._num_columns or len(self._before) != len(grid)):
            return None
        self._num_columns = past + grid.shape[1]
        self.padding |= set(grid[~real].tolist())
        said = None if said is None else said.reshape(grid.shape)
        names = facts.get("names") or []
        now: list[int] = []
        told: list[tuple[int, int, int]] = []
        for row, columns in self._sequences(grid, real, positions, given):
            name = names[len(now)] if len(now) < len(names) else None
            start = None if said is None or not columns.size else int(said[row, columns[0]])
            sample = self._sample(row, columns, grid, past=past, name=name, start=start, number=len(now), given=given)
            now.append(sample)
            if sample < 0:
                continue
            first = len(self.samples[sample].tokens) if past or "slots" in given else 0
            index = first + np.arange(columns.size) if said is None else said[row, columns]
            for column, position in self._put(sample, columns, index, grid[row]):
                told.append((row * grid.shape[1] + column, sample, position))
                if "slots" in given and column < given["slots"].size:
                    self._at_slot[int(given["slots"].flat[column])] = sample, position
        self._before, self._had_cache = now, past > 0
        at, samples, places = np.array(told, np.int64).reshape(-1, 3).T
        model = np.full(len(at), -1) if positions is None else positions.reshape(-1)[at]
        call = TokensOfCall(
            facts["step"], facts["mode"], (grid.shape[0], grid.shape[1]), given.get("kept", np.zeros(0, np.int64)),
            at, samples, places, model, np.full(len(at), np.nan),
        )  # fmt: skip
        self._add_logprobs(key, call, given.get("lengths", np.zeros(1, np.int64)).reshape(-1))
        return call

    def _sample(
        self, row: int, columns: Integers, grid: Array, *, past: int, name: str | None, start: int | None, number: int,
        given: Mapping[str, Array],
    ) -> int:  # fmt: skip
        """Return the sample that a sequence of a call is of, which may begin with it; -1 if nobody can tell."""
        if name is not None and name in self._named:
            return self._named[name]
        behind = given["goes_on_behind"].flat[number] if number < given.get("goes_on_behind", columns[:0]).size else -1
        if behind >= 0:
            if (owner := self._at_slot.get(int(behind))) is None:
                self.num_unknown += 1
                return -1
            sample, position = owner
            if position == len(self.samples[sample].tokens) - 1:
                return sample
            self.samples.append(SampleTokens(name))  # another sample found these blocks in the cache
            for place, token in enumerate(self.samples[sample].tokens[: position + 1]):
                self.samples[-1].put(place, token)
        elif row < len(self._before) and "slots" not in given and self._before[row] >= 0 and (
            past or (not self._had_cache and self._goes_on(self._before[row], start, grid[row, columns]))
        ):  # fmt: skip
            return self._before[row]
        else:
            self.samples.append(SampleTokens(name))
        if name is not None:
            self._named[name] = len(self.samples) - 1
        return len(self.samples) - 1

    def _goes_on(self, sample: int, start: int | None, tokens: Array) -> bool:
        """Whether tokens go on with a sample by the position that was said, or repeat all of it, as without a cache."""
        known = self.samples[sample].tokens
        return 0 < (start or 0) <= len(known) or (
            0 < len(known) < len(tokens) and tokens[: len(known)].tolist() == known
        )

    def _put(self, number: int, columns: Integers, index: Integers, tokens: Array) -> Iterator[tuple[int, int]]:
        """Add tokens to a sample, and yield the column and the position of each."""
        sample = self.samples[number]
        for place, column in zip(index.tolist(), columns.tolist(), strict=True):
            # Nobody can tell whose token it is where those before it were never shown; a name tells it.
            if 0 <= place < _MAX_POSITION and (place <= len(sample.tokens) or sample.name is not None):
                sample.put(place, int(tokens[column]))
                yield column, place

    def _sequences(
        self, grid: Array, real: Array, positions: Array | None, given: Mapping[str, Array]
    ) -> Iterator[tuple[int, Integers]]:
        """Yield the row and the columns of each sample of a call: several samples of one row where it is packed."""
        lengths = given.get("lengths")
        for row in range(len(grid)):
            columns = np.flatnonzero(real[row])
            cuts: list[int] = []
            if lengths is not None and len(grid) == 1:
                cuts = lengths.reshape(-1)[1:-1].tolist()
            elif positions is not None and columns.size > 1:
                cuts = (np.flatnonzero(positions[row, columns[1:]] != positions[row, columns[:-1]] + 1) + 1).tolist()
            parts = np.split(columns, cuts)
            if len(parts) > 1 and positions is not None and "slots" not in given:
                known = [part for part in parts if part.size == 0 or positions[row, part[0]] == 0]
                self.num_unknown += len(known) < len(parts)  # a part that begins later is of a sample nobody names
                parts = known
            yield from ((row, part) for part in parts)

    def _add_logprobs(self, key: CallKey, call: TokensOfCall, lengths: Integers) -> None:
        """Fill in the log-probabilities of a call's tokens: by its own logits, and by those of the call before."""
        length = call.grid[1]
        row, column = np.divmod(call.at, length)
        by_own, by_last = (self._logprobs[name].get(key) for name in ("logprobs", "chosen"))
        if by_own is not None:
            table = by_own.numbers.reshape(by_own.shape)
            own = column - (length - table.shape[1])
            follows = np.zeros(len(call.at), bool)
            follows[1:] = (np.diff(call.at) == 1) & (np.diff(call.samples) == 0) & (np.diff(call.positions) == 1)
            has = follows & (own >= 0)
            call.logprobs[has] = table[row[has], own[has]]
        if by_last is None or by_last.facts["after"] != self._ends[0]:
            return
        table = by_last.numbers.reshape(by_last.shape)
        ends = {end: number for number, end in enumerate(self._ends[1])}
        for token, (sample, position) in enumerate(zip(call.samples.tolist(), call.positions.tolist(), strict=True)):
            before = ends.get((sample, position - 1))
            if before is None or not np.isnan(call.logprobs[token]):
                continue
            if by_last.facts["packed"]:
                call.logprobs[token] = table[int(np.searchsorted(lengths[1:], column[token], "right")), before]
            elif before == row[token] and column[token] in (0, length - 1):
                call.logprobs[token] = table[int(column[token] > 0), before]


def _ends(call: TokensOfCall) -> list[tuple[int, int]]:
    """Return the sample and the position of each token whose logits wait for the next call; -1 for none."""
    columns = call.kept if call.kept.size else np.arange(1, call.grid[0] + 1) * call.grid[1] - 1
    tokens = zip(call.at.tolist(), call.samples.tolist(), call.positions.tolist(), strict=True)
    by_place = {place: (sample, position) for place, sample, position in tokens}
    return [by_place.get(int(column), (-1, -1)) for column in columns]


def _fitted(given: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Return positions in the shape of the tokens, where they have it or stand for each row alike."""
    if given is None or given.size == 0:
        return None
    if given.size == shape[0] * shape[1]:
        return given.reshape(shape)
    return np.broadcast_to(given.reshape(1, -1), shape) if given.size == shape[1] else None


def _past(facts: Mapping[str, Any], given: Mapping[str, Array], positions: Array | None, length: int) -> int:
    """Return the number of tokens, with padding, that a call finds in its cache."""
    if "cache_position" in given and given["cache_position"].size:
        return int(given["cache_position"].flat[0])
    if facts["past"] is not None:
        return int(facts["past"])
    if "seen" in given:
        return max(0, int(np.flatnonzero(given["seen"].any(axis=0)).max(initial=-1)) + 1 - length)
    return int(positions.min()) if positions is not None else 0
