"""The part of the rule `no_gradient` on accumulation: whether an update gets the gradients of all backward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from ..given import holds_labels, is_of_batch
from ..rows import Catalog, Rows, SeriesKey, grouped
from ..rule import Finding

_ENOUGH = 3
"""The number of records that must agree, while no record contradicts them."""
_SAME, _OTHER = 0.02, 0.1
"""Sums are equal within this part of the largest sum, as gradients of 16 bits are rounded, and differ by the other."""
_ROUNDED = 1e-3
"""A sum below this part of the most that gradients of this length can sum up to may be rounding."""
_CLEARED = "the update gets the gradients of the last of {} backward passes alone: the others are cleared before"
_CLEAR_ONCE = "call optimizer.zero_grad() once for each update, and not before each backward"


class Accumulation:
    """Compares the gradients of biases with the sums of the gradients of their modules' outputs, by micro-step.

    A bias has the sum of the gradients of its module's outputs. Where it has that of the last micro-step alone, those
    of the others were cleared. Programs do so on purpose with one batch, as with a step to the worst point near by
    (SAM): only micro-steps whose labels differ are judged.
    """

    def __init__(self, catalog: Catalog, finding: Callable[..., Finding]) -> None:
        """Take the catalog of the rule, and the method that makes its findings."""
        self._catalog, self._finding = catalog, finding
        self._seen: defaultdict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        """By model and rank, of the first records that agree: step, number of micro-steps, and lane of a bias."""
        self._contradicted: set[tuple[str, int]] = set()
        self._is_uneven = False
        """Whether some steps have one backward pass alone. Then others may have a further one to look at gradients."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "grad_output" or self._is_bias(key) or (is_of_batch(key) and holds_labels(key))

    def _is_bias(self, key: SeriesKey) -> bool:
        return key.site == "grad" and key.name == "bias" and key.scope != "local"

    def add(self, rows: Rows) -> None:
        """Take rows with statistics, of complete steps."""
        micro_steps = np.nan_to_num(rows["micro_step"])
        is_output = rows.at("grad_output")
        if not (is_output & (micro_steps > 0)).any():
            self._is_uneven |= bool(is_output.any())
            return
        rows = rows.take(rows.where("accumulation", self.wants))
        ids = grouped(rows.steps, rows.ranks)[0]
        for at in np.split(np.argsort(ids, kind="stable"), np.flatnonzero(np.diff(np.sort(ids))) + 1):
            self._judge(rows.take(at))

    def _judge(self, rows: Rows) -> None:
        """Judge the rows of one step of one rank."""
        sums: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        most: defaultdict[tuple[str, str], float] = defaultdict(float)
        labels: defaultdict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        biases: dict[tuple[str, str], tuple[int, float]] = {}
        columns = (rows[name].tolist() for name in ("sum", "sum_sq", "numel", "micro_step"))
        for lane, total, square, numel, micro_step in zip(rows.lanes.tolist(), *columns, strict=True):
            key = self._catalog.key_of(lane)
            module, number = (key.root, key.module_path), 0 if micro_step != micro_step else int(micro_step)
            if key.site == "grad":
                biases[module] = lane, total
            elif key.site == "input":
                labels[key.root][number] = total, square
            else:
                sums[module][number] = sums[module].get(number, 0.0) + total
                most[module] = max(most[module], np.sqrt(numel * square))
        for root, of_root in labels.items():
            last, whose = max(of_root), (root, int(rows.ranks[0]))
            self._is_uneven |= len(of_root) == 1
            if len(of_root) > 1 and of_root[last] not in [of_root[one] for one in of_root if one != last]:
                judged = [
                    (lane, self._is_last_alone(total, sums[module], most[module], sorted(of_root)))
                    for module, (lane, total) in biases.items() if module[0] == root and module in sums
                ]  # fmt: skip
                told = [(lane, one) for lane, one in judged if one is not None]
                if told and all(one for _, one in told):
                    if len(self._seen[whose]) < _ENOUGH:
                        self._seen[whose].append((int(rows.steps[0]), len(of_root), told[0][0]))
                elif told:
                    self._contradicted.add(whose)

    @staticmethod
    def _is_last_alone(total: float, sums: dict[int, float], most: float, micro_steps: list[int]) -> bool | None:
        """Return whether a bias has the sum of the last micro-step alone. None if this cannot be told."""
        scale = max(map(abs, sums.values()))
        if sorted(sums) != micro_steps or not scale > _ROUNDED * most:
            return None
        last, everything = sums[micro_steps[-1]], sum(sums.values())
        if abs(everything - last) < _OTHER * scale:
            return None
        return abs(total - last) < _SAME * scale

    def finish(self) -> Iterator[Finding]:
        for whose, seen in self._seen.items():
            if len(seen) == _ENOUGH and whose not in self._contradicted and not self._is_uneven:
                step, num, lane = seen[0]
                one = self._finding(lane, step, _CLEARED.format(num), "", 0.0, 0.0, since=step)
                yield one._replace(module_path="", name="", advice=_CLEAR_ONCE)
