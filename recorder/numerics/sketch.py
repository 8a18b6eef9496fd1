"""The sketch of a value: eight numbers for each token, whose differences are as large as those of the value itself.

Each number is the sum of a token's elements with signs that depend on the place of the element alone (Achlioptas,
"Database-friendly random projections", 2003). So two programs on two machines compare a token's values without keeping
them. The signs must never change: they are part of what a recording means.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_SKETCHED = 8
"""The numbers of a token. With eight, a difference seems 0.4 to 1.6 times as large as it is, in 99 tokens of 100."""
_SCALE = 0.25
"""The size of each sign, exact in every type; float16 holds the sketch of what it holds the norm of."""


def signs(width: int) -> npt.NDArray[np.float32]:
    """Return the signs, times a constant, by which the elements of a token are added up: shape [width, 8]."""
    mixed = np.arange(width, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the constants of splitmix64
        mixed = (mixed + np.uint64(0x9E3779B97F4A7C15)) ^ (mixed >> np.uint64(shift))
        mixed = mixed * np.uint64(factor)
    bits = (mixed[:, None] >> np.arange(24, 24 + NUM_SKETCHED, dtype=np.uint64)) & np.uint64(1)
    return np.where(bits == 1, _SCALE, -_SCALE).astype(np.float32)


class TokenRows(NamedTuple):
    """Which rows a value has for the tokens of a call, by its shape."""

    kind: str
    """``all`` tokens in their order; ``columns`` of a batch, which all samples share; the ``last`` K tokens of each
    sample; or the tokens that the call ``kept``."""
    num_dims: int
    """The leading dims that are tokens; the others are the elements of one token."""

    def num(self, shape: tuple[int, ...]) -> int:
        """Return the number of the value's rows."""
        return math.prod(shape[: self.num_dims])


def token_rows(shape: tuple[int, ...], grid: tuple[int, int], num_kept: int = 0) -> TokenRows | None:
    """Return which rows a value of a call has; None if they are no tokens.

    Args:
        shape: the value's shape.
        grid: the samples and the tokens of each sample that the call was given; 1 and all where they are flat.
        num_kept: the tokens that the call was told to compute logits for, where it was told their numbers; else 0.
    """
    batch, length = grid
    if len(shape) > 1 and shape[:2] == grid:
        return TokenRows("all", 2)
    if len(shape) > 2 and num_kept and shape[:2] == (1, num_kept):
        return TokenRows("kept", 2)
    if len(shape) > 1 and shape[:2] == (1, length):
        return TokenRows("columns", 2)
    if len(shape) == 3 and shape[0] == batch and 0 < shape[1] < length:
        return TokenRows("last", 2)
    return TokenRows("all", 1) if shape and shape[0] == batch * length else None
