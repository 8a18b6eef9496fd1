"""What one call of a model was given of samples: their tokens, where they stand, and the rows that values have of them.

A call says it by its arguments: `input_ids`, `attention_mask`, `position_ids`, `cache_position`, `cu_seqlens`, or the
places in a paged cache. This module must know of no other call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numerics.sketch import token_rows

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class CallKey(NamedTuple):
    """What tells the calls of a model apart."""

    attempt: int
    rank: int
    number: int


class Piece(NamedTuple):
    """What one call has of a value: the sketch, or the whole numbers, of its tokens."""

    shape: tuple[int, ...]
    numbers: Array
    dtype: str
    facts: Mapping[str, Any]


@dataclass(slots=True)
class SampleTokens:
    """The tokens of one sample, as the calls of a run have shown them."""

    name: str | None
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """The hash of the tokens up to and with each token."""
    num_drafts: int = 0
    """The last tokens that no later call has gone on from: speculation, of which some may be thrown away."""

    @property
    def sure(self) -> list[int]:
        """The tokens without the drafts."""
        return self.tokens[: len(self.tokens) - self.num_drafts]

    def put(self, position: int, token: int) -> None:
        """Set the token at a position, and forget those behind it: speculation that was thrown away."""
        del self.tokens[position:], self.hashes[position:]
        missing = position - len(self.tokens)  # in a sample with a name: an engine found them in the cache of another
        self.tokens += [-1] * missing
        self.hashes += [0] * missing
        before = self.hashes[-1] if self.hashes else 0
        mixed = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % (1 << 64)
        self.tokens.append(token)
        self.hashes.append(mixed ^ (mixed >> 29))


class TokensOfCall(NamedTuple):
    """The tokens of one call of the model, without padding; one element of each array for each token."""

    step: int
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
    hashes: npt.NDArray[np.uint64]
    """The hash of the sample's tokens up to and with this one; the sample has another one where it was thrown away."""
    is_continued: npt.NDArray[np.bool_]
    """Whether the call goes on with the sample from a cache, as a decoding step does."""
    given: Integers
    """The position that the model was given; -1 where it was given none that was recorded."""
    logprobs: Floats
    """The log-probability of the token by the logits of the token before it; NaN where it is not known."""

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


def sequences_of(
    grid: Array, real: Array, positions: Array | None, lengths: Array | None, names: Sequence[str]
) -> Iterator[tuple[int, Integers]]:
    """Yield the row and the columns of each sample of a call: several samples of one row where it is packed."""
    labels = np.array(names, object)
    for row in range(len(grid)):
        columns = np.flatnonzero(real[row])
        if lengths is not None and len(grid) == 1:  # behind the last one, an engine pads its batch
            yield from ((row, part) for part in np.split(columns, lengths.reshape(-1)[1:])[:-1])
            continue
        ends = np.zeros(max(columns.size - 1, 0), bool)
        if positions is not None:
            ends |= np.diff(positions[row, columns]) != 1
        if names:
            ends |= labels[columns[1:]] != labels[columns[:-1]]
        yield from ((row, part) for part in np.split(columns, 1 + np.flatnonzero(ends)))


def fitted(given: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Return positions in the shape of the tokens, where they have it or stand for each row alike."""
    if given is None or given.size == 0:
        return None
    if given.size == shape[0] * shape[1]:
        return given.reshape(shape)
    return np.broadcast_to(given.reshape(1, -1), shape) if given.size == shape[1] else None


def past_of(facts: Mapping[str, Any], given: Mapping[str, Array], positions: Array | None, length: int) -> int:
    """Return the number of tokens, with padding, that a call finds in its cache."""
    if "cache_position" in given and given["cache_position"].size:
        return int(given["cache_position"].flat[0])
    if facts["past"] is not None:
        return int(facts["past"])
    if "seen" in given:
        return max(0, int(np.flatnonzero(given["seen"].any(axis=0)).max(initial=-1)) + 1 - length)
    return int(positions.min()) if positions is not None else 0
