"""Recognises parameters that differ between two runs only because rounding decides the sign of gradients near zero.

Adam's first update is the sign of the gradient, so a rounding error in one element can become a full step. A twin run
(the same training again, slightly perturbed) need not have this error in the same element. So each update is judged
element by element, by the values from which the update was computed. If parameters differ as a step begins, their
distance is judged relative to the distance in the twin run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import RunError
from ...numerics.keys import Integers
from ...numerics.moments import integers, numbers
from ...sites import values_of
from .compare import wide
from .pairs import Flags, PairedSteps

MARGIN = 10.0
"""A difference may be this many times the noise, because a twin run (a perturbed repeat) is one sample of the noise."""
_CHUNK_ITEMS = 1 << 18
_COLUMNS = ("root", "module_path", "site", "name", "phase")

Parameter = tuple[str, str, str, int | None]
"""The root, module path and name of a parameter, and its rank in the second run; None if all ranks share the value."""


class Pairs:
    """The pairs of rows of two runs in a range of steps. `differs` flags the pairs that differ by more than noise."""

    def __init__(self, rows: Callable[[], PairedSteps], differs: Flags) -> None:
        self.rows, self.differs = rows, differs

    def of_step(self, step: int) -> Integers:
        a, _, pairs = self.rows()
        return np.flatnonzero(integers(a.table.column("step"))[pairs.a] == step)

    def arrays(self, number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Return the two tensors of a pair as vectors. Return None if a tensor cannot be read, or is complex32."""
        a, b, pairs = self.rows()
        both = [(a, int(pairs.a[number])), (b, int(pairs.b[number]))]
        if any(side.table.column("encoding")[row].as_py() is None for side, row in both):
            return None
        try:
            one, two = (side.array(row).reshape(-1) for side, row in both)
        except RunError:
            return None
        return None if one.dtype.names or two.dtype.names else (one, two)


class Drift:
    """Follows the parameters that rounding alone drives farther apart than in a twin run (a perturbed repeat)."""

    def __init__(self) -> None:
        self._apart: dict[Parameter, tuple[float, float]] = {}
        """For each drifted parameter, the norm of the difference, and this norm divided by the parameter's norm."""
        self._before: tuple[int, Pairs] | None = None
        self._numbers: Integers | None = None
        """The indices of the pairs at the step in `_before`; None until they are needed."""
        self._wrong: dict[str, set[Parameter]] = {}
        """For each root (model), the parameters that differed by more than noise at the last step."""

    def share(self, root: str | None = None) -> float:
        """Return the largest distance of a drifted parameter, divided by its norm. `root` None means all roots."""
        return max((share for (of, *_), (_, share) in self._apart.items() if root in (None, of)), default=0.0)

    @property
    def num_params(self) -> int:
        return len(self._apart)

    def begin(self, step: int, root: str, pairs: Pairs, lines: list[dict[str, Any]]) -> list[bool]:
        """Return, for each line, whether rounding explains the difference of the parameter.

        `lines` are the parameters of `root` that differ at `step` by more than in the twin run. A line has the columns
        of `Verdicts.differing`, the index `number` of the pair, and `allowed`: how far noise may move an element.
        """
        of = [(root, line["module_path"], line["name"], line["rank_b"]) for line in lines]
        wrong = self._wrong.get(root, set())
        size = _typical_size(step, root, pairs) if lines else 0.0
        are_noise = [
            p not in wrong and self._is_noise(step, pairs, p, line, size) for p, line in zip(of, lines, strict=True)
        ]
        self._wrong[root] = {p for p, is_noise in zip(of, are_noise, strict=True) if not is_noise}
        return are_noise

    def end(self, step: int, pairs: Pairs) -> None:
        """Keep this step's values, because the parameters of the next step are computed from them."""
        self._before, self._numbers = (step, pairs), None

    def _is_noise(self, step: int, pairs: Pairs, parameter: Parameter, line: dict[str, Any], size: float) -> bool:
        known = self._apart[parameter][0] if parameter in self._apart else 0.0
        if line["kind"] == "values":
            is_noise = self._is_made_from_noise(step, pairs, parameter, line["number"], line["allowed"])
            if is_noise is None:  # too few of the values that the update was computed from were recorded
                is_noise = bool(line["l2_apart"] <= MARGIN * known)
            if is_noise:
                own = line["l2_a"] or line["max_abs"] / line["of_max"]
                norm = max(own, size * float(np.sqrt(line["numel"])))
                self._apart[parameter] = line["l2_apart"], line["l2_apart"] / norm
            return is_noise
        one, two = line["statistic_a"], line["statistic_b"]  # no statistic can differ by more than this norm
        return one is not None and two is not None and bool(abs(two - one) <= MARGIN * known)

    def _is_made_from_noise(
        self, step: int, pairs: Pairs, parameter: Parameter, number: int, allowed: float
    ) -> bool | None:
        """Return whether a parameter's gradient and optimizer state explain how far the parameter differs.

        Return None if they were not recorded. The updates of an element may differ by the share by which its gradients
        or states differ, times `MARGIN`.
        """
        if self._before is None or self._before[0] != step - 1:
            return None
        before = self._before[1]
        if self._numbers is None:
            self._numbers = before.of_step(step - 1)
        sources = _sources(self._numbers, before, parameter)
        if before.differs[list(sources.values())].any():
            return False
        kept = {value: arrays for value, index in sources.items() if (arrays := before.arrays(index)) is not None}
        now, old = pairs.arrays(number), kept.pop(("param", parameter[2]), None)
        if now is None or old is None or old[0].size != now[0].size or ("grad", parameter[2]) not in kept:
            return None
        made_from = [both for both in kept.values() if both[0].size == both[1].size == now[0].size]
        parts = [slice(at, at + _CHUNK_ITEMS) for at in range(0, now[0].size, _CHUNK_ITEMS)]
        # Weight decay may nearly cancel an element's update. So no update counts as smaller than the mean update.
        least = sum(float(np.nansum(_update(now, old, part))) for part in parts) / max(1, now[0].size)
        return all(_is_open(now, old, made_from, part, least, allowed) for part in parts)


Vectors = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _update(now: Vectors, old: Vectors, part: slice) -> npt.NDArray[Any]:
    """Return how far an update moves each element of the slice `part`, in the run with the larger move."""
    now_a, now_b, old_a, old_b = (wide(values[part]) for values in (*now, *old))
    return np.asarray(np.maximum(np.abs(now_a - old_a), np.abs(now_b - old_b)))


def _is_open(now: Vectors, old: Vectors, made_from: list[Vectors], part: slice, least: float, allowed: float) -> bool:
    """Return whether the update explains how far the elements of the slice `part` are apart.

    An element may differ by as much as before the update, plus the most that the update may add. The update of an
    element counts as at least `least`. `allowed` is the difference that noise and rounding may add.
    """
    now_a, now_b, old_a, old_b = (wide(values[part]) for values in (*now, *old))
    share = np.zeros(now_a.shape)
    for both in made_from:
        one, two = (wide(values[part]) for values in both)
        size = np.maximum(np.abs(one), np.abs(two))
        np.maximum(share, np.divide(np.abs(two - one), size, out=np.zeros_like(share), where=size > 0), out=share)
    update = np.maximum(_update(now, old, part), least)
    is_open = np.abs(now_b - now_a) <= np.abs(old_b - old_a) + MARGIN * share * update + allowed
    return bool((is_open | (np.isnan(now_a) & np.isnan(now_b))).all())


def _sources(numbers_of: Integers, pairs: Pairs, parameter: Parameter) -> dict[tuple[str, str], int]:
    root, path, name, rank = parameter
    a, b, aligned = pairs.rows()
    rows = a.table.select(list(_COLUMNS)).take(pa.array(aligned.a[numbers_of]))
    ranks = b.table.column("rank").take(pa.array(aligned.b[numbers_of]))
    wanted = pc.and_(pc.equal(rows.column("root"), root), pc.equal(rows.column("module_path"), path))
    wanted = pc.and_(wanted, pc.equal(rows.column("phase"), "optimizer"))
    sources = {}
    for index in np.flatnonzero(wanted.to_numpy()).tolist():
        site, of = (rows.column(column)[index].as_py() for column in ("site", "name"))
        is_its = of == name if values_of(site) == "param" else site == "optim" and of.startswith(f"{name}.")
        if is_its and ranks[index].as_py() in (None, rank):
            sources[site, of] = int(numbers_of[index])
    return sources


def _typical_size(step: int, root: str, pairs: Pairs) -> float:
    wanted = (pc.field("step") == step) & (pc.field("root") == root) & (pc.field("site") == "param")
    rows = pairs.rows().a.table.select(["step", "root", "site", "l2", "numel"])
    rows = rows.filter(wanted & pc.field("l2").is_valid())
    num = numbers(rows.column("numel")).sum()
    return float(np.sqrt(np.square(numbers(rows.column("l2"))).sum() / num)) if num else 0.0
