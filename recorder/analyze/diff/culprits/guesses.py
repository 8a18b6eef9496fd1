"""What a person would guess at once of a gradient that is wrong, where the arithmetic fits to rounding.

A guess is said beside a culprit. Must never be made where the numbers leave more than rounding unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ....columns import parse_shape
from ....errors import RunError
from ..pairs import PairedSteps, RunSteps

_MAX_STEPS = 3
"""Steps before, of which gradients may have been added up."""
_MAX_PARAMS = 8
"""Parameters whose values are read; of the rest the means tell."""
_MIN_ITEMS = 16
_REST = {"float16": 2e-2, "bfloat16": 2e-2}
"""What a guess leaves unexplained of a difference, by type."""
_USUAL_REST = 1e-3
_ROUND = 2e-5
"""How far a norm is from a round number to which gradients were clipped: float32 and torch's own epsilon."""
_SAME = 1e-4
"""How far the factors of parameters that were scaled alike are apart."""

Read = Callable[[int, int], PairedSteps]
"""Gives the rows of the steps from the first up to, but not including, the last."""


class Scaled(NamedTuple):
    """A pair of gradients that differs: by its row among `Verdicts.differing`."""

    l2_a: float
    l2_b: float
    factor: float | None
    """By what the second is a multiple of the first; None where it is none."""


def guess_scaled(factor: float, side: RunSteps, step: int, root: str) -> str:
    """What a factor between two values of a step is, if it is the number of ranks or of micro-steps."""
    num_ranks, num_slices = _num_ranks(side, step, root), _num_micro_steps(side, step, root)
    for count, missing, twice in (
        (num_ranks, f"added up over {num_ranks} ranks, not averaged", f"divided by {num_ranks} ranks once more"),
        (num_slices, f"not divided by {num_slices} micro-steps", f"divided by {num_slices} micro-steps once more"),
    ):
        if count > 1:
            for text, wanted in ((missing, float(count)), (twice, 1 / count)):
                if math.isclose(factor, wanted, rel_tol=_USUAL_REST):
                    return f"B's value is {_short(factor)} times A's: {text}?"
    return ""


def guess_clipping(norm_a: float, pairs: Sequence[Scaled]) -> str:
    """Whether gradients that differ by one factor were clipped in one run, and otherwise, or not, in the other.

    Args:
        norm_a: of all gradients of the first run together.
        pairs: all of these, which must differ.
    """
    factors = [pair.factor for pair in pairs]
    factor = factors[0] if factors else None
    if factor is None or not norm_a > 0:
        return ""
    if not all(one is not None and math.isclose(one, factor, rel_tol=_SAME) for one in factors):
        return ""
    norm_b = math.sqrt(math.fsum(pair.l2_b**2 for pair in pairs))
    is_whole = math.isclose(math.sqrt(math.fsum(pair.l2_a**2 for pair in pairs)), norm_a, rel_tol=_SAME)
    clipped_a, clipped_b = _round(norm_a), _round(norm_b)
    if not is_whole or factor <= 0:
        return ""
    both = f"the norm of all gradients is {_short(norm_a)} in A and {_short(norm_b)} in B"
    if clipped_a and clipped_b:
        return f"{both}: clipped to another norm?"
    if clipped_a and factor > 1:
        return f"{both}, {_short(factor)} times as much: as without clipping?"
    if clipped_b and factor < 1:
        return f"{both}, {_short(factor)} times as much: clipped in B alone?"
    return ""


def guess_steps(read: Read, step: int, params: Sequence[tuple[str, str, str]], rank: int | None) -> str:
    """Whether gradients of the second run are those of several steps of the first, added up, or of an earlier one.

    Args:
        read: gives rows.
        step: at which they differ.
        params: root, module path and name of these.
        rank: whose value it is in the second run; None for all ranks.
    """
    first = max(0, step - _MAX_STEPS)
    a, b, _ = read(first, step + 1)
    of_a = {at: _gradients(a, at, None) for at in range(first, step + 1)}
    of_b = _gradients(b, step, rank)
    now = [one for one in params if one in of_b and one in of_a[step]]
    for number in range(1, step - first + 1):
        earlier = range(step - number, step)
        known = [one for one in now if all(one in of_a[at] for at in earlier)]
        if not known:
            break
        added, again = ([*earlier, step], [step - number])
        for steps, text in ((added, "added: not zeroed?"), (again, "again: is it computed, or reduced, anew?")):
            if _fit(a, b, [([of_a[at][one] for at in steps], of_a[step][one], of_b[one]) for one in known]):
                some = ", ".join(map(str, steps[:-1])) + " and " * (len(steps) > 1) + str(steps[-1])
                return f"B's gradient is A's of step{'s' * (len(steps) > 1)} {some} {text}"
    return ""


def _fit(a: RunSteps, b: RunSteps, sums: Sequence[tuple[list[int], int, int]]) -> bool:
    """Whether the rows of the second run are sums of rows of the first: by values, of most by their means.

    Args:
        a: the one run.
        b: the other.
        sums: of each parameter rows of `a` that are added up, the one that it is beside, and the row of `b`.
    """
    sums = sorted(sums, key=lambda rows: -int(b.table.column("numel")[rows[2]].as_py()))
    is_read = False
    for terms, beside, row in sums[:_MAX_PARAMS]:
        try:
            total, now, then = sum(_wide(a, at) for at in terms), _wide(a, beside), _wide(b, row)
        except RunError:
            break
        apart = float(np.linalg.norm(then - now))
        rest = _REST.get(b.table.column("dtype")[row].as_py(), _USUAL_REST)
        if now.size >= _MIN_ITEMS and not float(np.linalg.norm(then - total)) <= rest * apart:
            return False
        is_read |= now.size >= _MIN_ITEMS and apart > 0
    by_mean = list(_by_mean(a, b, sums[_MAX_PARAMS:] if is_read else sums))
    return all(by_mean) and (is_read or len(by_mean) >= _MAX_PARAMS // 2)


def _by_mean(a: RunSteps, b: RunSteps, sums: Sequence[tuple[list[int], int, int]]) -> Iterator[bool]:
    for terms, _, row in sums:
        means = [a.table.column("mean")[at].as_py() for at in terms]
        mean, rest = b.table.column("mean")[row].as_py(), _REST.get(b.table.column("dtype")[row].as_py(), _USUAL_REST)
        if mean is not None and None not in means:
            sizes = [a.table.column("absmax")[at].as_py() or 0.0 for at in terms]
            yield abs(mean - math.fsum(means)) <= rest * max(map(abs, means)) + 1e-7 * math.fsum(sizes)


def _gradients(side: RunSteps, step: int, rank: int | None) -> dict[tuple[str, str, str], int]:
    """Rows of the gradients that an update of a step used: of all ranks, else those of one."""
    table = side.table
    is_wanted = pc.and_(pc.equal(table.column("site"), "grad"), pc.equal(table.column("phase"), "optimizer"))
    at = np.flatnonzero(pc.fill_null(pc.and_(is_wanted, pc.equal(table.column("step"), step)), False).to_numpy())
    row_of: dict[tuple[str, str, str], int] = {}
    for row in at.tolist():
        of, *one = (table.column(name)[row].as_py() for name in ("rank", "root", "module_path", "name"))
        if of == rank or (of is None and (one[0], one[1], one[2]) not in row_of):
            row_of[one[0], one[1], one[2]] = row
    return row_of


def norm_of_gradients(side: RunSteps, step: int, root: str) -> float:
    """The norm of all gradients that an update used; NaN where it is not known."""
    rows = [row for one, row in _gradients(side, step, None).items() if one[0] == root]
    norms = [side.table.column("l2")[row].as_py() for row in rows]
    return math.nan if None in norms or not norms else math.sqrt(math.fsum(norm**2 for norm in norms))


def _wide(side: RunSteps, row: int) -> npt.NDArray[Any]:
    values = side.array(row).reshape(-1)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _num_ranks(side: RunSteps, step: int, root: str) -> int:
    """Ranks with other parts of the batch, as far as rows of all ranks tell."""
    table = side.rows.table
    is_here = pc.and_(pc.equal(table.column("step"), step), pc.equal(table.column("root"), root))
    texts = table.column("ranks_present").filter(is_here).unique().to_pylist()
    return max((len(parse_shape(text)) for text in texts if text), default=1)


def _num_micro_steps(side: RunSteps, step: int, root: str) -> int:
    table = side.rows.table
    is_here = pc.and_(pc.equal(table.column("step"), step), pc.equal(table.column("root"), root))
    return int(pc.max(table.column("micro_step").filter(is_here)).as_py() or 0) + 1


def _round(norm: float) -> bool:
    """Whether a norm is a number of two digits that somebody may have typed."""
    return math.isclose(norm, float(f"{norm:.2g}"), rel_tol=_ROUND)


def _short(number: float) -> str:
    return f"{number:.4g}"
