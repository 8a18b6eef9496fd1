"""The statistics of many series over steps, for a few lanes: ranks, all of them together, or their spread.

Where there are more steps than columns, a column holds the value that stands out most of its steps, so that no spike
vanishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...analyze.keys import Integers
from ..blocks import Block
from .quantised import COARSE, FINE, planes, quantise

_LARGEST = float(np.finfo(np.float32).max)


class Cube:
    """Numbers by statistic, series, lane and column."""

    def __init__(self, *, steps: Sequence[int], num_columns: int, num_series: int, num_lanes: int,
                 statistics: Sequence[str]) -> None:  # fmt: skip
        """An empty one.

        Args:
            steps: those that values may be of, ascending.
            num_columns: into which these steps are put, as many as steps or fewer.
            num_series: whose numbers are from 0.
            num_lanes: whose numbers are from 0.
            statistics: names of columns of rows.
        """
        self.steps = np.array(steps, np.int64)
        self.shape = num_series, num_lanes, num_columns
        self._column = np.arange(len(steps)) * num_columns // max(len(steps), 1)
        self.values = {name: np.full(self.shape, np.nan, np.float32) for name in statistics}
        self.has_row = np.zeros(self.shape, np.bool_)

    @property
    def first_steps(self) -> list[int]:
        """The first step of each column."""
        return self.steps[np.searchsorted(self._column, np.arange(self.shape[2]))].tolist() if self.shape[2] else []

    def columns_of(self, steps: Integers) -> Integers:
        """The column of each step, all of which are known."""
        found: Integers = self._column[np.searchsorted(self.steps, steps)]
        return found

    def put(
        self, series: Integers, lanes: Integers, steps: Integers, numbers: Mapping[str, npt.NDArray[np.float64]]
    ) -> None:
        """Put values in, of which those of one cell may be several; NaN where there is a row without a number."""
        cells = (series * self.shape[1] + lanes) * self.shape[2] + self.columns_of(steps)
        self.has_row.reshape(-1)[cells] = True
        for name, values in self.values.items():
            flat = values.reshape(-1)
            is_known = ~np.isnan(numbers[name])
            at, new = cells[is_known], np.clip(numbers[name][is_known], -_LARGEST, _LARGEST).astype(np.float32)
            old = flat[at]
            stands_out = np.isnan(old) | (_weight(name, new) > _weight(name, old))
            at, new = at[stands_out], new[stands_out]
            order = np.argsort(_weight(name, new), kind="stable")
            flat[at[order]] = new[order]  # of several the last stays

    def keep_lanes(self, num_lanes: int) -> None:
        """Leave out lanes that there was room for, and that nothing was put into."""
        self.shape = self.shape[0], num_lanes, self.shape[2]
        self.values = {name: values[:, :num_lanes] for name, values in self.values.items()}
        self.has_row = self.has_row[:, :num_lanes]

    def blocks(self, prefix: str, max_fine: int) -> list[Block]:
        """A block for each statistic; of no more than `max_fine` cells in all with the finer codes."""
        cells = int(np.prod(self.shape)) * len(self.values)
        levels = FINE if cells <= max_fine else COARSE
        found = []
        for name, values in self.values.items():
            coded = quantise(values, self.has_row, levels)
            found.append(
                Block(
                    name=f"{prefix}/{name}",
                    data={"statistic": name, "shape": list(self.shape), "levels": levels},
                    arrays={"codes": planes(coded.codes), "low": coded.low, "high": coded.high, "unit": coded.unit},
                )
            )
        return found


def _weight(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """By how much a value stands out of those of other steps."""
    if name == "min":
        return -values
    return values if name == "max" else np.abs(values)
