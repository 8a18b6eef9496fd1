"""Sums the values of one tensor unit by unit; never calls torch.

The compiled loops add to the same arrays to the same bits. `numerics.units` says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...numerics.units import Sides

_LANES = 8


class UnitSums:
    """Sums over the finite values of each unit, and how many values are zero."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.sums = np.zeros((3, sides.num))
        """Of x and x^2, and the largest magnitude."""
        self.zeros = np.zeros(sides.num, np.int64)

    def add_all(self, chunks: Iterable[npt.NDArray[Any]]) -> None:
        """Take in a whole tensor, chunk by chunk."""
        first = 0
        for values in chunks:
            self.add(values, first)
            first += len(values)

    def add(self, values: npt.NDArray[Any], first: int) -> None:
        """Take in a chunk of the flattened tensor, of which `first` elements come before it.

        `bincount` adds in the order of the elements: the values of a unit that lie side by side in eight partial sums,
        which are joined by halves, and what that makes to the unit's sum.
        """
        num, inner = self.sides.num, self.sides.inner
        is_zero = np.equal(values, 0)
        wide = values.astype(np.float64)
        wide[~np.isfinite(wide)] = 0.0
        at = first + np.arange(len(values))
        units = at // inner % num
        terms = wide, wide * wide
        of_terms = units
        if inner > 1:
            runs = at // inner - first // inner
            lanes = np.where(runs == 0, at - first, at % inner) % _LANES
            num_runs = int(runs[-1]) + 1
            terms = tuple(_joined(runs * _LANES + lanes, term, num_runs) for term in terms)  # type: ignore[assignment]
            of_terms = (first // inner + np.arange(num_runs)) % num
        order = np.concatenate((np.arange(num), of_terms))
        for total, term in zip(self.sums, terms, strict=False):
            total[:] = np.bincount(order, np.concatenate((total, term)), num)
        np.maximum.at(self.sums[2], units, np.abs(wide))
        self.zeros += np.bincount(units[is_zero], minlength=num)


def _joined(lanes: npt.NDArray[np.int64], term: npt.NDArray[np.float64], num_runs: int) -> npt.NDArray[np.float64]:
    r = np.bincount(lanes, term, num_runs * _LANES).reshape(num_runs, _LANES).T
    sums: npt.NDArray[np.float64] = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
    return sums
