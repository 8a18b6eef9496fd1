"""How far values, tokens and log-probabilities of a trainer and an engine are apart."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .calls import Floats, Integers
from .sequences import TokenAt
from .tokens import ValueName

Flags = npt.NDArray[np.bool_]
_SMALL = 0.5
"""A token whose sketch is smaller than this share of the median token's counts as so large: one in 100 is by chance."""


class LogprobsApart(NamedTuple):
    """The log-probabilities of the tokens, the trainer's minus the engine's."""

    num_tokens: int
    mean: float
    mean_abs: float
    k3: float
    """The k3 estimate of the divergence KL(engine | trainer): the mean of (r - 1) - log r, r the trainer's probability
    over the engine's (Schulman, "Approximating KL divergence", 2020)."""
    clipped: float
    largest: TokenAt


class ValueApart(NamedTuple):
    """How far one value of the two sides is apart, over all tokens that both have, by its sketch."""

    module_path: str
    site: str
    name: str
    dtype_trainer: str
    dtype_engine: str
    num_tokens: int
    num_beyond: int
    """The tokens that are farther apart than `bound`."""
    median: float
    largest: float
    bound: float

    @property
    def text(self) -> str:
        """The value as people know it."""
        return " ".join(filter(None, (repr(self.module_path), self.site, self.name)))


class PositionsApart(NamedTuple):
    """How far a value is apart in a range of positions."""

    first: int
    last: int
    num_tokens: int
    mean: float


class Parting(NamedTuple):
    """The first value beyond its bound, and why."""

    value: ValueApart
    class_name: str
    first: TokenAt
    worst: TokenAt
    at_once: tuple[int, int]
    """Of the tokens that the engine ran at once, as a prompt: how many are beyond the bound, of how many."""
    one_by_one: tuple[int, int]
    """The same of those for which it went on from its cache."""
    positions: list[PositionsApart]
    reason: str
    """``weights``, ``inputs``, ``dtype`` or ``module``."""
    text: str
    """The reason as a sentence."""


class ComparedTokens(NamedTuple):
    """How far one value is apart at each token."""

    name: ValueName
    slots: Integers
    apart: Floats
    is_beyond: Flags


class ExpertsApart(NamedTuple):
    """The tokens for which the two sides' routers chose other experts."""

    num_other: int
    num_tokens: int
    load_trainer: list[int]
    """How often each expert was chosen, by its number."""
    load_engine: list[int]


def apart_by_token(a: Floats, b: Floats) -> Floats:
    """Return how far two values are apart at each token: the norm of the difference over the larger norm of the two.

    A token is infinitely far apart where one side has a NaN or an infinity that the other has not.
    """
    is_finite = np.isfinite(a) & np.isfinite(b)
    is_other = ~is_finite & (a != b) & ~(np.isnan(a) & np.isnan(b))
    a, b = np.where(is_finite, a, 0.0), np.where(is_finite, b, 0.0)
    sizes = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    floor = max(_SMALL * float(np.median(sizes)), np.finfo(np.float64).tiny)
    apart: Floats = np.linalg.norm(a - b, axis=1) / np.maximum(sizes, floor)
    apart[is_other.any(axis=1)] = np.inf
    return apart
