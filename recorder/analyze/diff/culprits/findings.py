"""Culprits as they are told: the value, the ranks, and how far the value that shows each is apart.

Reads payloads of culprits alone, to say whose part of a tensor it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ....columns import MEASURED, NONFINITE, note_members, parse_shape, stage_of
from ....errors import RunError
from ....numerics.keys import VALUE_KEY, Integers, holds
from ....numerics.moments import integers
from ..align import Alignment
from ..noise import multiples
from ..pairs import PairedSteps, RunSteps, Verdicts
from .events import StepEvent, differing_ranks, differing_steps, events, of_steps
from .guesses import Read, Scaled, guess_clipping, guess_scaled, guess_steps, norm_of_gradients
from .search import CulpritSearch, Suspect

_LARGEST = float(np.finfo(np.float64).max)
_NAMED_KINDS = ("values", "statistics", "fingerprint", "shape")
"""Kinds of differences that are errors of the training; others are of how it was recorded."""
_OWN_SHARE = 1e-3
"""A rank's part of a tensor differs where it does so by this share of the largest difference."""
_FIGURES = (
    "kind", "max_abs", "of_max", "max_ulp", "cosine", "noise", "statistic", "statistic_a", "statistic_b",
    "nonfinite_a", "nonfinite_b",
)  # fmt: skip


class Culprit(NamedTuple):
    """A stage of the second run that is wrong although all that it is made from agrees with the first."""

    step: int
    phase: str
    """``forward``, ``recompute`` (of a checkpointed block), ``backward``, ``reduction`` (anything between a parameter's
    gradients of the backward and those that the update uses), ``update``, or ``start``: state that differs from its
    first record on."""
    root: str
    module_path: str | None
    """None where all parameters are touched alike."""
    site: str
    """The first value that shows it, with the next ones: a module's input shows what its caller did."""
    name: str
    seen_at: str
    """Module whose value that is."""
    micro_step: int | None
    call: int
    rank: int | None
    """None: of several ranks, or not known."""
    ranks: list[int]
    """The ranks of the second run whose value, or part of the value, differs; empty where that is not known."""
    why: str
    alone_in: str | None
    """``a`` or ``b`` where that run alone has the value."""
    num_params: int
    """Parameters that are touched, where all are alike; 0 where it is not known how many of them are."""
    stages: list[int]
    """In a pipeline, the culprit's stages, or those whose parameters are touched alike; empty where all are."""
    micro_batches: list[int]
    """In a pipeline, the micro-batches whose part of the value differs, where not all of them differ."""
    hint: str
    """What a person would guess of it, where the arithmetic fits to rounding; empty where nothing does."""
    factor: float | None
    """What the value of the first run was multiplied with, where one number says it."""
    kind: str | None
    max_abs: float | None
    of_max: float | None
    max_ulp: int | None
    cosine: float | None
    noise: float | None
    """How far noise alone moves that value; None without noise runs."""
    statistic: str | None
    statistic_a: float | None
    statistic_b: float | None
    nonfinite_a: int | None
    """Elements that are NaN or infinite; where more are in one run alone, the distances are of the others."""
    nonfinite_b: int | None


class CulpritFinder:
    """Finds culprits, range by range of steps."""

    def __init__(self, read: Read) -> None:
        """Begin.

        Args:
            read: gives the rows of any steps.
        """
        self._read = read
        self.culprits: list[Culprit] = []
        self._search = CulpritSearch()

    def add(self, steps: RangeSteps, judged: Verdicts, compared: Callable[[], PairedSteps]) -> None:
        """What came of the pairs of a range of steps.

        Args:
            steps: what is known of them.
            judged: the pairs.
            compared: gives the rows; only called where they are looked at.
        """
        if self._search.is_over:
            return
        differs = np.isin(judged.kinds, _NAMED_KINDS)
        of_step: dict[int, list[StepEvent]] = {}
        if steps.has_alone or differs.any():
            a, b, pairs = compared()
            is_open = differs & _are_unlike(a, b, pairs, judged.kinds == "")
            wrong = differing_steps(a.table, b.table, pairs, differs)
            wanted, kept = of_steps(pairs, a.table, b.table, wrong)
            differs &= ~is_open
            of_step = events(a.table, b.table, wanted, differs[kept], is_open[kept]) if wrong else {}
        for step in steps.paired:
            if step not in of_step:
                self._search.equal_step(step, steps.roots)
            elif not self._search.is_over:
                for suspect in self._search.step(step, of_step[step]):
                    told = _told(suspect, a, b, wanted, kept, judged)
                    self.culprits.append(told._replace(hint=self._guess(told, suspect, a, b, judged)))
        for rate, known in self._search.groups:
            index = self._search.suspects.index(rate)
            self.culprits[index] = self.culprits[index]._replace(module_path=known.path, num_params=known.num_params)

    def _guess(self, told: Culprit, suspect: Suspect, a: RunSteps, b: RunSteps, judged: Verdicts) -> str:
        """What is most likely wrong with a value, or with all gradients of a step."""
        event = suspect.event
        if (
            told.factor is not None
            and event.site == "grad"
            and (guess := guess_scaled(told.factor, b, event.step, told.root))
        ):
            return guess
        if (event.site, event.phase) != ("grad", "optimizer") or event.alone:
            return ""
        rows = judged.differing.filter(pc.equal(judged.differing.column("step"), event.step)).to_pylist()
        rows = [
            row for row in rows
            if (row["root"], row["site"], row["phase"]) == (told.root, "grad", "optimizer")
            and row["rank_b"] in (None, told.rank if told.rank is not None else row["rank_b"])
        ]  # fmt: skip
        if told.module_path is None and all(row["l2_a"] is not None and row["l2_b"] is not None for row in rows):
            pairs = [Scaled(row["l2_a"], row["l2_b"], _factor_of_norms(row)) for row in rows]
            if guess := guess_clipping(norm_of_gradients(a, event.step, told.root), pairs):
                return guess
        names = {(row["root"], row["module_path"], row["name"]) for row in rows}
        if told.module_path is not None:
            names = {(event.root, event.path, event.name)}
        return guess_steps(self._read, event.step, sorted(names), told.rank)


class RangeSteps(NamedTuple):
    """What is known of a range of steps without its rows."""

    paired: list[int]
    """Those with pairs, ascending."""
    roots: list[str]
    """Names of the roots of the first run."""
    has_alone: bool
    """Whether one run alone has something that may be a culprit."""

    @classmethod
    def of(cls, compared: PairedSteps) -> RangeSteps:
        a, b, pairs = compared
        paired = a.table.column("step").take(pa.array(pairs.a)).unique().to_pylist()
        alone = differing_steps(a.table, b.table, pairs, np.zeros(len(pairs.a), np.bool_))
        return cls(sorted(paired), a.table.column("root").unique().to_pylist(), bool(alone))


def _are_unlike(a: RunSteps, b: RunSteps, pairs: Alignment, is_equal: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which pairs are of one tensor in the one run, and in the other of ranks that make none, nobody knows how.

    Where a rank has the very tensor, the others should have it, too: these are compared.
    """
    sides = [side.table.select(["rank", "note"]).take(pa.array(at)) for side, at in ((a, pairs.a), (b, pairs.b))]
    is_whole = [side.column("rank").is_null().to_numpy() for side in sides]
    is_apart = [holds(side.column("note"), _is_apart) for side in sides]
    are_unlike = np.zeros(len(pairs.a), np.bool_)
    for whole, apart, at in ((is_whole[0], is_apart[1], pairs.a), (is_whole[1], is_apart[0], pairs.b)):
        unlike = whole & apart
        are_unlike |= unlike & ~np.isin(at, at[unlike & is_equal])
    return are_unlike


def _is_apart(note: str) -> bool:
    return "per_rank" in note_members(note) and not differing_ranks(note)


def _told(suspect: Suspect, a: RunSteps, b: RunSteps, pairs: Alignment, kept: Integers, judged: Verdicts) -> Culprit:
    event = suspect.event
    row: dict[str, Any] = {}
    ranks, micro_batches = list(event.ranks), list[int]()
    if event.pair >= 0:
        at = int(np.searchsorted(np.flatnonzero(judged.kinds != ""), kept[event.pair]))
        row = judged.differing.slice(at, 1).to_pylist()[0]
        row_a, row_b = int(pairs.a[event.pair]), int(pairs.b[event.pair])
        if not ranks:
            ranks, micro_batches = _owners(a, b, row_a, row_b)
        if row["nonfinite_a"] != row["nonfinite_b"] and not row["max_abs"]:
            row |= {"max_abs": None, "of_max": None, "max_ulp": None}
        if event.site == "scalar" and ranks:
            row |= _of_ranks(a, b, row_a, row_b, ranks)
    stages = list(suspect.stages)
    if suspect.path is not None and event.stage is not None:
        stages = [event.stage]
    if stages and not ranks:
        ranks = _ranks_of(b, set(stages))
    return Culprit(
        step=suspect.step, phase=suspect.phase, root=suspect.root, module_path=suspect.path, site=event.site,
        name=event.name, seen_at=event.path, micro_step=event.micro_step, call=event.call,
        rank=ranks[0] if len(ranks) == 1 else None, ranks=sorted(ranks), why=suspect.why,
        alone_in=event.alone or None, num_params=suspect.num_params, hint="", factor=_factor(row),
        stages=stages, micro_batches=micro_batches,
        **{name: row.get(name) for name in _FIGURES},
    )  # fmt: skip


def _factor(row: dict[str, Any]) -> float | None:
    """By what the one tensor is a multiple of the other, if it is one."""
    if row.get("nonfinite_a") != row.get("nonfinite_b"):
        return None
    cosine, one, two = (np.array(row.get(name), np.float64) for name in ("cosine", "l2_a", "l2_b"))  # None is NaN
    factor = float(multiples(cosine, one, two))
    return None if math.isnan(factor) else factor


def _factor_of_norms(row: dict[str, Any]) -> float | None:
    """The factor between two values that were not recorded: norm and largest magnitude must be multiples alike."""
    if row["cosine"] is not None:
        return _factor(row)
    (one, two), (top, other_top) = ((row[f"{name}_a"], row[f"{name}_b"]) for name in ("l2", "absmax"))
    if not (one and two and top and other_top and math.isclose(two / one, other_top / top, rel_tol=1e-4)):
        return None
    return float(two / one)


def _owners(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> tuple[list[int], list[int]]:
    """The ranks of the second run whose part of a tensor differs, and the micro-batches; none where not known."""
    if a.table.column("shape")[row_a].as_py() != b.table.column("shape")[row_b].as_py():
        return [], []
    try:
        apart = _distances(a, b, row_a, row_b)
    except RunError:
        apart = _distances_of_statistics(a, b, row_a, row_b)
    worst = max(apart.values(), default=0.0)
    limit = worst * _OWN_SHARE if math.isfinite(worst) else _LARGEST
    wrong = [key for key, far in apart.items() if far > limit]
    of_all, of_wrong = ({micro_batch for _, micro_batch in chunks} for chunks in (apart, wrong))
    return list(dict.fromkeys(rank for rank, _ in wrong)), sorted(of_wrong) if of_wrong < of_all else []


def _distances_of_statistics(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> dict[tuple[int, int], float]:
    """Distances by statistics, without recorded values: infinite for a part with more NaN or infinities than others.

    Where the one run has the parts as the other has, it says by how much their statistics are apart.
    """
    parts_a, parts_b = (
        {(part["rank"], part["micro_step"]): part for part in side.rows.statistics_of_chunks(at)}
        for side, at in ((a, a.table.column("at")[row_a].as_py()), (b, b.table.column("at")[row_b].as_py()))
    )
    if len(parts_b) < 2 or any(part[MEASURED] is None for part in parts_b.values()):
        return {}
    nonfinite = {key: sum(part[name] for name in NONFINITE) for key, part in parts_b.items()}
    whole = sum(integers(a.table.column(name).slice(row_a, 1), 0)[0] for name in NONFINITE)
    if any(nonfinite.values()) and not whole:
        return {key: math.inf if count else 0.0 for key, count in nonfinite.items()}
    if parts_a.keys() != parts_b.keys() or any(part[MEASURED] is None for part in parts_a.values()):
        return {}
    return {key: _apart(parts_a[key], part) for key, part in parts_b.items()}


def _apart(one: dict[str, Any], two: dict[str, Any]) -> float:
    """How far the statistics of a part are apart; infinite where one alone has NaN or infinities."""
    if any(one[name] != two[name] for name in NONFINITE):
        return math.inf
    pairs = [(one[name], two[name]) for name in ("mean", "std", "min", "max", "absmax")]
    return max((abs(y - x) for x, y in pairs if x is not None and y is not None), default=0.0)


def _distances(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> dict[tuple[int, int], float]:
    """How far the parts of a tensor are apart, by rank and micro-batch of the second run; none where it is one part."""
    own_a, own_b = _own_rows(a, row_a), _own_rows(b, row_b)
    both = sorted(own_a.keys() & own_b.keys())
    if len(both) > 1:
        return {(rank, 0): _far(a.rows.array(own_a[rank]), b.rows.array(own_b[rank])) for rank in both}
    if not own_a and len(own_b) > 1:  # they agreed, and do not any more
        whole = a.array(row_a)
        return {(rank, 0): _far(whole, b.rows.array(own)) for rank, own in sorted(own_b.items())}
    chunks = b.rows.chunk_regions(b.table.column("at")[row_b].as_py())
    if len(chunks) < 2:
        return {}
    one, two = a.array(row_a), b.array(row_b)
    distances: dict[tuple[int, int], float] = {}
    for rank, micro_step, region in chunks:
        far = _far(*(_part(values, region) for values in (one, two)))
        distances[rank, micro_step] = max(far, distances.get((rank, micro_step), 0.0))
    return distances


def _of_ranks(a: RunSteps, b: RunSteps, row_a: int, row_b: int, ranks: list[int]) -> dict[str, Any]:
    """How far a number, whose mean over ranks stands in the row, is apart on the ranks that differ, if they agree."""
    own_a, own_b = _own_rows(a, row_a), _own_rows(b, row_b)
    try:
        before = {float(a.rows.array(own_a[rank]) if rank in own_a else a.array(row_a)) for rank in ranks}
        after = {float(b.rows.array(own_b[rank])) for rank in ranks if rank in own_b}
    except RunError:
        return {}
    if len(before) != 1 or len(after) != 1:
        return {}
    (one,), (two,) = before, after
    far, largest = abs(two - one), max(abs(one), abs(two))
    of_max = far / largest if largest else None
    sides = {"l2_a": abs(one), "l2_b": abs(two), "cosine": math.copysign(1.0, one * two)}
    return {"max_abs": far, "of_max": of_max, "max_ulp": None, **sides}


def _ranks_of(b: RunSteps, stages: set[int]) -> list[int]:
    """The ranks that have values of some stages of a pipeline."""
    is_theirs = holds(b.table.column("note"), lambda note: stage_of(note)[0] in stages)
    texts = b.table.column("ranks_present").filter(pa.array(is_theirs)).unique().to_pylist()
    return sorted({rank for text in texts if text is not None for rank in parse_shape(text)})


def _own_rows(side: RunSteps, row: int) -> dict[int, int]:
    """Where in a run's rows the ranks' own rows of a value are, beside the one of all ranks."""
    table = side.rows.table
    at = side.table.column("at")[row].as_py()
    key = {name: table.column(name)[at].as_py() for name in VALUE_KEY}
    is_own = table.column("rank").is_valid().to_numpy().copy()
    for name, value in key.items():
        column = table.column(name)
        is_own &= np.asarray(
            (column.is_null() if value is None else pc.fill_null(pc.equal(column, value), False))
            .to_numpy()
        )  # fmt: skip
    return {table.column("rank")[i].as_py(): i for i in np.flatnonzero(is_own).tolist()}


def _part(values: npt.NDArray[Any], region: Any) -> npt.NDArray[Any]:
    """The elements of a region, flattened."""
    if region.run is not None:
        return values.reshape(-1)[slice(*region.run)]
    boxes = [values[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))] for box in region.boxes]
    return np.concatenate([box.reshape(-1) for box in boxes]) if boxes else values.reshape(-1)[:0]


def _far(one: npt.NDArray[Any], two: npt.NDArray[Any]) -> float:
    """The largest difference; infinite where the one is finite and the other not, or the shapes differ."""
    if one.shape != two.shape or one.dtype.names or two.dtype.names:
        return np.inf
    one, two = np.atleast_1d(one), np.atleast_1d(two)
    wide = np.complex128 if "c" in (one.dtype.kind, two.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        far = np.abs(two.astype(wide) - one.astype(wide))
    far[np.isnan(far)] = np.where((np.isnan(one.astype(wide)) & np.isnan(two.astype(wide)))[np.isnan(far)], 0, np.inf)
    return float(far.max(initial=0.0))
