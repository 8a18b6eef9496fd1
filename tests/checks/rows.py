"""Rows by hand, and a run of rules over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recorder.checks.engine import Engine, Verdict
from recorder.checks.rows import IS_PROBE, About, Catalog, Rows, SeriesKey
from recorder.checks.rule import CheckRule
from recorder.format.manifest import RecordedModule

Made = list[tuple[int, int, dict[str, float]]]


def module_of(class_name: str, sites: tuple[str, ...], **facts: Any) -> RecordedModule:
    """What a writer says of a module."""
    return RecordedModule(path="", class_name=class_name, sites=sites, **facts)


class Recorded:
    """Rows of a training: `add` them in any order, and `judge`."""

    def __init__(self, modules: Mapping[str, str] | None = None) -> None:
        self.catalog = Catalog(
            {("model", path): module_of(name, ("output", "grad", "param")) for path, name in (modules or {}).items()}
        )
        self._rows: Made = []

    def add(self, step: int, module_path: str, values: Any, *, rank: int = 0, **more: Any) -> None:
        """A row with the statistics of an array, with `whole`, the elements of all ranks, of a chunk.

        `numbers` are further columns. With `is_probe`, it is a row of the probe, which has the norm alone.
        """
        array = np.asarray(values, np.float64)
        words = {"root": "model", "site": "output", "name": "", "mode": "train", "phase": "forward", "scope": ""}
        key = SeriesKey(module_path=module_path, **(words | {name: more[name] for name in words if name in more}))
        shape = tuple(more.get("shape", array.shape))
        lane = self.catalog.lanes(
            np.array([self.catalog.number(key, About(more.get("dtype", "float32"), shape, more.get("whole", 0)))]),
            np.array([rank]),
        )
        finite = array[np.isfinite(array)]
        numbers = {
            "numel": array.size, "nan_count": np.isnan(array).sum(), "inf_count": np.isinf(array).sum(),
            "zero_count": (array == 0).sum(), "sum": finite.sum(), "sum_sq": (finite**2).sum(),
        }  # fmt: skip
        if finite.size:
            numbers |= {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
            numbers |= {"absmax": np.abs(finite).max(), "l2": np.sqrt((finite**2).sum())}
        if more.get("is_probe"):
            kept = ("numel", "sum_sq", "l2", "nan_count", "inf_count")
            numbers = {name: value for name, value in numbers.items() if name in kept} | {IS_PROBE: 1}
        numbers |= more.get("numbers", {})
        self._rows.append((step, int(lane[0]), {name: float(value) for name, value in numbers.items()}))

    def rows(self, made: Made) -> Rows:
        """Some rows as rules take them."""
        names = dict.fromkeys(name for _, _, numbers in made for name in numbers)
        columns = {name: np.array([numbers.get(name, np.nan) for _, _, numbers in made]) for name in names}
        steps, lanes = (np.array([one[index] for one in made], np.int64) for index in (0, 1))
        return Rows(self.catalog, steps, lanes, columns)

    def judge(
        self, rule: type[CheckRule] | Callable[[Catalog], CheckRule], rows_a_batch: int = 1_000, **thresholds: float
    ) -> Verdict:
        """What a rule says of all rows, given in batches."""
        made = rule(self.catalog, thresholds) if isinstance(rule, type) else rule(self.catalog)
        engine = Engine([made], self.catalog)
        ordered = sorted(self._rows, key=lambda one: (one[0], self.catalog.rank_of[one[1]]))
        for start in range(0, len(ordered), rows_a_batch):
            engine.add(self.rows(ordered[start : start + rows_a_batch]))
        return engine.finish()
