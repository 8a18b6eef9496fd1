"""How large outputs are over the first steps of a training, by which runs of several widths are compared."""

from __future__ import annotations

import statistics

import numpy as np

from .rows import Catalog, Rows, SeriesKey


class Sizes:
    """How large outputs were over the first steps of a run, and the shapes of its parameters."""

    def __init__(self, catalog: Catalog, steps: int) -> None:
        self._catalog = catalog
        self._steps = steps
        self._first: int | None = None
        self._sums: dict[SeriesKey, tuple[float, int]] = {}

    def add(self, rows: Rows) -> bool:
        """Take in the next rows, by step; whether later ones may count, too.

        Of the first steps the second half counts: at the beginning weights have not moved.
        """
        if self._first is None:
            self._first = int(rows.steps[0])
        at = rows.steps - self._first
        is_output = self._catalog.mark("trained output", lambda key: (key.site, key.mode) == ("output", "train"))
        with np.errstate(all="ignore"):
            sizes = np.log2(rows.rms)
        chosen = np.flatnonzero(
            is_output[rows.series] & (at < self._steps) & (at >= self._steps // 2) & np.isfinite(sizes)
        )
        for series in np.unique(rows.series[chosen]).tolist():
            own = sizes[chosen[rows.series[chosen] == series]]
            total, num = self._sums.get(self._catalog.series[series], (0.0, 0))
            self._sums[self._catalog.series[series]] = total + float(own.sum()), num + len(own)
        return bool(at[-1] < self._steps)

    @property
    def outputs(self) -> dict[SeriesKey, float]:
        """By output, the mean of the binary logarithms of its root mean squares."""
        return {key: total / num for key, (total, num) in self._sums.items()}

    @property
    def shapes(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        """By root, module and name of a parameter."""
        series = zip(self._catalog.series, self._catalog.about, strict=True)
        return {(key.root, key.module_path, key.name): about.shape for key, about in series if key.site == "param"}

    def width(self, base: Sizes) -> float:
        """How wide the model is beside another: the ratio that most dims of parameters have, of those that differ."""
        shapes = base.shapes
        ratios = [
            size / shapes[key][index]
            for key, shape in self.shapes.items()
            if len(shapes.get(key, ())) == len(shape)
            for index, size in enumerate(shape)
            if size != shapes[key][index] > 0
        ]
        return statistics.mode(ratios) if ratios else 1.0
