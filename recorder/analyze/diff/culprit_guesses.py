"""Likely mistakes behind a wrong gradient, as a person would guess them, if the arithmetic fits to rounding.

Must never guess where the numbers leave more than rounding unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ...columns import parse_shape
from ...errors import RunError
from .pairs import PairedSteps, RunSteps

_MAX_STEPS = 3
"""Earlier steps whose gradients may have been added up."""
_MAX_PARAMS = 8
"""Parameters whose values are read; the other parameters are judged by their means."""
_MIN_ITEMS = 16
_REST = {"float16": 2e-2, "bfloat16": 2e-2}
"""The share of a difference that a guess may leave unexplained, by type."""
_USUAL_REST = 1e-3
_ROUND = 2e-5
"""How far a norm may be from the round number that gradients were clipped to: float32 and torch's own epsilon."""
_SAME = 1e-4
"""How far the factors of parameters that were scaled alike may be apart."""

Read = Callable[[int, int], PairedSteps]
"""Gives the rows of the steps from the first up to, but not including, the last."""


class Scaled(NamedTuple):
    """A pair of gradients that differs."""

    l2_a: float
    l2_b: float
    factor: float | None
    """The factor between the two gradients; None if they are no multiples."""


def guess_scaled(factor: float, side: RunSteps, step: int, root: str) -> str:
    """Explain a factor between two values of a step that is the number of ranks or of micro-steps."""
    table = side.rows.table
    table = table.filter(pc.and_(pc.equal(table.column("step"), step), pc.equal(table.column("root"), root)))
    num_ranks = max(
        (len(parse_shape(text)) for text in table.column("ranks_present").unique().to_pylist() if text), default=1
    )
    num_slices = int(pc.max(table.column("micro_step")).as_py() or 0) + 1
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
    """Say whether gradients that differ by one factor were clipped otherwise, or in only one run.

    `norm_a` is the norm of all gradients of the first run together; `pairs` are all pairs, which must differ.
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
    """Say whether gradients of the second run are sums of several steps of the first run, or those of an earlier step.

    `params` are root, module path and name of the gradients that differ at the step; `rank` is the rank of the second
    run, None for all ranks.
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
    """Whether the rows of the second run are sums of rows of the first: few by values, the rest by their means.

    Each of `sums` is of one parameter: the rows of `a` that are added up, the row of `a` at the step, and the row of
    `b`.
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
    """Return the rows of the gradients that an update used: those of all ranks, else those of one rank."""
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
    """Return the norm of all gradients that an update used; NaN if it is not known."""
    rows = [row for one, row in _gradients(side, step, None).items() if one[0] == root]
    norms = [side.table.column("l2")[row].as_py() for row in rows]
    return math.nan if None in norms or not norms else math.sqrt(math.fsum(norm**2 for norm in norms))


def _wide(side: RunSteps, row: int) -> npt.NDArray[Any]:
    values = side.array(row).reshape(-1)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _round(norm: float) -> bool:
    """Whether a norm is a number of two digits that somebody may have typed."""
    return math.isclose(norm, float(f"{norm:.2g}"), rel_tol=_ROUND)


def _short(number: float) -> str:
    return f"{number:.4g}"
