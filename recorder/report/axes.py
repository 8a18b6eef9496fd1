"""What there is to draw of a run: its modules, series, steps and ranks, as one look over all rows finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..numerics.keys import Integers
from ..numerics.moments import integers
from ..read.manifests import list_paths
from ..run.run import Run
from ..sites import SITE_OF, Kind
from .blocks import Block
from .rows import SeriesKey, keys_of


@dataclass(slots=True)
class Axes:
    """What there is to draw. Numbers of the step, such as the loss, are apart: their steps are others."""

    index: dict[SeriesKey, int] = field(default_factory=dict)
    """By series its number, in the order in which each was first seen."""
    _of_any_root: dict[tuple[str, ...], int] = field(default_factory=dict)
    """By what names a series but its root, the number of the one that is called so; -1 where there are several. Stages
    of a pipeline are roots of their own, and a value of the whole model has the root of one of them, or none."""
    is_scalar: list[bool] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    """Shapes of the whole tensors where rows name them, else as a rank held them, by the first row of each series."""
    dtypes: list[str] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    scalar_steps: set[int] = field(default_factory=set)
    num_steps: int = 0
    """Steps that have a row, of a module or a number of the step."""
    first_step: int | None = None
    last_step: int | None = None
    num_rows: int = 0
    below: str | None = None
    """Only this module and what is below it, and numbers of the step; None: all."""

    def numbers_of(self, table: Any) -> Integers:
        """For each row of a table the number of its series; -1 where it is none of these."""
        ids, keys, _ = keys_of(table)
        of_table = [self.index[key] if key in self.index else self._of_any_root.get(key[1:], -1) for key in keys]
        return np.array([*of_table, -1], np.int64)[ids]

    def _is_wanted(self, key: SeriesKey) -> bool:
        if not self.below or is_number(key.site):
            return True
        return key.module_path == self.below or key.module_path.startswith(f"{self.below}.")

    def add(self, table: Any) -> None:
        """Learn from the rows of a range of steps, which are by rank and `seq`."""
        ids, keys, firsts = keys_of(table)
        steps, sequence = integers(table.column("step")), integers(table.column("seq"))
        self.num_rows += table.num_rows
        scalar = np.array([is_number(key.site) for key in keys] + [False])[ids]
        of_scalars, of_modules = (set(np.unique(steps[some]).tolist()) for some in (scalar, ~scalar))
        found = of_scalars | of_modules
        self.num_steps += len(found - self.steps - self.scalar_steps)
        self.scalar_steps |= of_scalars
        self.steps |= of_modules
        if found:
            self.first_step = min(found) if self.first_step is None else min(self.first_step, *found)
            self.last_step = max(found) if self.last_step is None else max(self.last_step, *found)
        for number in np.argsort(sequence[firsts], kind="stable").tolist():
            key, row = keys[number], int(firsts[number])
            if key in self.index or not self._is_wanted(key):
                continue
            self._of_any_root[key[1:]] = -1 if key[1:] in self._of_any_root else len(self.index)
            self.index[key] = len(self.index)
            whole, own, dtype, numel = (
                table.column(name)[row].as_py() for name in ("global_shape", "shape", "dtype", "numel")
            )
            self.is_scalar.append(is_number(key.site))
            self.shapes.append(whole or own)
            self.dtypes.append(dtype)
            self.numels.append(numel)
            self.first_steps.append(int(steps[row]))


def is_number(site: str) -> bool:
    """Whether the values of a site are numbers of the step, such as the loss."""
    return site in SITE_OF and SITE_OF[site].kind is Kind.NUMBER


def modules_block(run: Run, series: list[SeriesKey]) -> tuple[Block, Mapping[str, int]]:
    """The modules, those that ran in the order of execution, and by path the number of each."""
    order = dict.fromkeys(dict.fromkeys(key.module_path for key in series))
    # What only contains others, or was not recorded, stands behind; the page puts it where its children are.
    known = list_paths((path for _, path in run.modules), order)
    paths = [*order, *(path for path in known if path not in order)]
    infos = {path: info for (_, path), info in run.modules.items()}
    rows = [
        [path, infos[path].class_name if path in infos else "", infos[path].source if path in infos else ""]
        for path in paths
    ]
    block = Block(name="modules", data={"modules": rows, "num_executed": len(order)})
    return block, {path: number for number, path in enumerate(paths)}
