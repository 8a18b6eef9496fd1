"""The spark line of a histogram: which share of the values is in each power of two."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...numerics.apart import Bins
from .spark import BLOCKS

WIDTH = 24
"""Characters at most."""
_LEAST = 1e-6
SCALE = "the lowest block is one in a million, each higher one 5.6 times more, the full one all"


def histogram_line(shares: Sequence[float]) -> str:
    """Draw shares on a logarithmic scale, so that a single outlier shows; a bin without values is a gap."""
    return "".join(_block(share) for share in shares)


def extent(bins: Bins) -> str:
    """Return which magnitudes the line is of: ``|x| from 2^-20 to 2^4, 2 powers of two a character``."""
    if not any(bins.shares):
        return "of no finite value but zero"
    wide = f", {bins.exponents_per_bin} powers of two a character" if bins.exponents_per_bin > 1 else ""
    return f"|x| from 2^{bins.first} to 2^{bins.last + 1}{wide}"


def _block(share: float) -> str:
    if share <= 0:
        return " "
    height = 1 - math.log(min(share, 1.0)) / math.log(_LEAST)
    return BLOCKS[max(0, min(math.floor(height * len(BLOCKS)), len(BLOCKS) - 1))]
