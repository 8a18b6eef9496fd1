"""Describes culprits for people: computations that differ between two runs although their inputs agree.

A description has the first value that differs, its ranks and its distance. For a wrong gradient it may guess the
mistake; a guess is given only if it explains the numbers up to rounding. This module reads only the payloads of
culprits, to find the ranks whose chunk of a tensor differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import MEASURED, NONFINITE, note_members, parse_shape, stage_of
from ...errors import RunError
from ...numerics.keys import VALUE_KEY, Integers, holds
from ...numerics.moments import integers
from ...run.notes import differing_ranks
from ...sites import is_validation_loss
from .compare import wide
from .culprit_events import StepEvent, differing_steps, events, of_steps
from .culprit_search import START, UPDATE, CulpritSearch, Suspect
from .noise import ROUNDING_OF, multiples
from .pairs import Alignment, PairedSteps, RunSteps, Verdicts

_LARGEST = float(np.finfo(np.float64).max)
_NAMED_KINDS = ("values", "statistics", "fingerprint", "shape")
"""The kinds of differences that are errors of the training. Other kinds result from how a run was recorded."""
BY_PROBE = "probe"
"""The `kind` of a culprit that only the probe (one number of each value at every step) shows."""
ROUNDING_ALONE = "its gradient is only rounding"
_OWN_SHARE = 1e-3
"""A rank's chunk of a tensor counts as different if its distance exceeds this share of the largest chunk distance."""
_FIGURES = (
    "kind", "max_abs", "of_max", "max_ulp", "cosine", "noise", "statistic", "statistic_a", "statistic_b",
    "nonfinite_a", "nonfinite_b",
)  # fmt: skip


class Culprit(NamedTuple):
    """A computation of the second run, such as a module's forward, that differs although its inputs agree."""

    step: int
    phase: str
    """The kind of computation: ``forward``, ``recompute`` (of a checkpointed block), ``backward``, ``reduction`` (from
    the gradients of the backward to the gradients that the update uses), ``update``, or ``start`` (state that differs
    in its first record)."""
    root: str
    module_path: str | None
    """The path of the module at fault; None if all parameters differ in the same way."""
    site: str
    """The site of the first value that differs, such as ``output``. An input is the fault of the module's caller."""
    name: str
    seen_at: str
    """The module of the first value that differs."""
    micro_step: int | None
    call: int
    rank: int | None
    """The rank at fault; None if several ranks are at fault, or if the rank is not known."""
    ranks: list[int]
    """The ranks of the second run whose value, or chunk of the value, differs. Empty if they are not known."""
    why: str
    alone_in: str | None = None
    """``a`` if only the first run has the value, ``b`` if only the second run has it; else None."""
    num_params: int = 0
    """The number of parameters that differ in the same way, if `module_path` is None; 0 if unknown."""
    stages: Sequence[int] = ()
    """The pipeline stages of the culprit, or of the parameters that differ in the same way; empty for all stages."""
    micro_batches: Sequence[int] = ()
    """The pipeline micro-batches in which the value differs; empty if it differs in all."""
    hint: str = ""
    """A text about the likely mistake. Empty unless the mistake explains the numbers up to rounding."""
    factor: float | None = None
    """The second run's tensor divided by the first run's tensor. None if neither is a multiple of the other."""
    kind: str | None = None
    max_abs: float | None = None
    of_max: float | None = None
    max_ulp: int | None = None
    cosine: float | None = None
    noise: float | None = None
    """The distance that noise alone causes; None if the comparison has no noise runs."""
    statistic: str | None = None
    statistic_a: float | None = None
    statistic_b: float | None = None
    nonfinite_a: int | None = None
    """The number of NaN or infinite elements in the first run. The distances leave out elements that are not finite."""
    nonfinite_b: int | None = None


class CulpritFinder:
    """Finds the computations that differ between two runs although their inputs agree, one range of steps at a time."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.culprits: list[Culprit] = []
        self._search = CulpritSearch()

    def add(self, steps: RangeSteps, judged: Verdicts, compared: Callable[[], PairedSteps]) -> None:
        """Add the judged pairs of a range of steps. `compared` returns the rows, and is called only if needed."""
        if self._search.is_over:
            return
        differs = np.isin(judged.kinds, _NAMED_KINDS)
        of_step: dict[int, list[StepEvent]] = {}
        if steps.has_alone or differs.any():
            a, b, pairs = compared()
            differs &= ~_are_validation_losses(a.table.take(pa.array(pairs.a)))  # nothing is computed from them
            is_open = differs & _are_unlike(a, b, pairs, judged.kinds == "")
            wrong = differing_steps(a.table, b.table, pairs, differs)
            wanted, kept = of_steps(pairs, a.table, b.table, wrong)
            differs &= ~is_open
            of_step = events(a.table, b.table, wanted, differs[kept], is_open[kept]) if wrong else {}
        for step in sorted({*steps.paired, *of_step}):
            if step not in of_step:
                self._search.equal_step(step, steps.roots, shows_state=step not in steps.stateless)
            elif not self._search.is_over:
                for suspect in self._search.step(step, of_step[step]):
                    told = _told(suspect, a, b, wanted, kept, judged)
                    if self._is_rounding(suspect):
                        told = told._replace(why=ROUNDING_ALONE)
                    self.culprits.append(told._replace(hint=self._guess(told, suspect, a, b, judged)))
        for rate, known in self._search.groups:
            index = self._search.suspects.index(rate)
            rest = self.culprits[index]
            self.culprits[index] = rest._replace(module_path=known.path, num_params=known.num_params, why=known.why)

    def in_order(self) -> list[Culprit]:
        """Return the culprits in the order of time. Updates that rounding alone decides come last."""
        return sorted(self.culprits, key=lambda culprit: culprit.why == ROUNDING_ALONE)

    def _is_rounding(self, suspect: Suspect) -> bool:
        """Return whether both runs' gradients of a suspect are as small as rounding of the module's other gradients."""
        event, step = suspect.event, suspect.step
        if suspect.phase != UPDATE or suspect.path is None or event.site not in ("param", "optim") or event.alone:
            return False
        a, b, _ = self._read(step, step + 1)
        name = event.name if event.site == "param" else event.name.partition(".")[0]
        for side in (a, b):
            rows = _gradients(side, step, None)
            own = rows.get((event.root, event.path, name))
            if own is None:
                return False
            of_module = [own, *(row for one, row in rows.items() if one[:2] == (event.root, event.path))]
            size, *sizes = (side.table.column("absmax")[row].as_py() or 0.0 for row in of_module)
            if not 0 < size <= ROUNDING_OF.get(side.table.column("dtype")[own].as_py(), 0.0) * max(sizes):
                return False
        return True

    def _guess(self, told: Culprit, suspect: Suspect, a: RunSteps, b: RunSteps, judged: Verdicts) -> str:
        """Return a text about the likely mistake behind a wrong gradient. Empty unless it explains all but rounding."""
        event = suspect.event
        is_scaled = told.factor is not None and event.site == "grad"
        if is_scaled and (guess := _guess_scaled(told.factor or 0.0, b, event.step, told.root)):
            return guess
        if (event.site, event.phase) != ("grad", "optimizer") or event.alone:
            return ""
        rows = judged.differing.filter(pc.equal(judged.differing.column("step"), event.step)).to_pylist()
        rows = [
            row for row in rows
            if (row["root"], row["site"], row["phase"]) == (told.root, "grad", "optimizer")
            and row["rank_b"] in (None, told.rank if told.rank is not None else row["rank_b"])
        ]  # fmt: skip
        has_norms = all(row["l2_a"] is not None and row["l2_b"] is not None for row in rows)
        is_common = told.module_path is None and has_norms
        if is_common and (guess := _guess_clipping(_norm_of_gradients(a, event.step, told.root), rows)):
            return guess
        names = {(row["root"], row["module_path"], row["name"]) for row in rows}
        if told.module_path is not None:
            names = {(event.root, event.path, event.name)}
        return _guess_steps(self._read, event.step, sorted(names), told.rank)


class RangeSteps(NamedTuple):
    """Facts about a range of steps that are kept after the rows of the range are dropped."""

    paired: list[int]
    """The steps with a value that both runs have. Learning rates do not count: they do not show the model's state."""
    roots: list[str]
    """The roots (models under hooks) of the first run."""
    stateless: set[int]
    """The steps in `paired` whose only values in both runs are inputs of the root and scalars such as a loss."""
    has_alone: bool
    """Whether only one of the runs has some value that may be a culprit."""

    @classmethod
    def of(cls, compared: PairedSteps) -> RangeSteps:
        a, b, pairs = compared
        both = a.table.select(["step", "module_path", "site", "name"]).take(pa.array(pairs.a))
        is_rate = pc.and_(pc.equal(both["site"], "scalar"), pc.starts_with(both["name"], "lr."))
        paired = both["step"].filter(pc.invert(is_rate)).unique().to_pylist()
        alone = differing_steps(a.table, b.table, pairs, np.zeros(len(pairs.a), np.bool_))
        is_given = pc.and_(pc.equal(both["site"], "input"), pc.equal(both["module_path"], ""))
        shown = set(both["step"].filter(pc.invert(pc.or_(is_given, pc.equal(both["site"], "scalar")))).to_pylist())
        return cls(sorted(paired), a.table.column("root").unique().to_pylist(), {*paired} - shown, bool(alone))


def _are_validation_losses(table: Any) -> npt.NDArray[np.bool_]:
    is_scalar = holds(table.column("site"), "scalar".__eq__)
    return is_scalar & holds(table.column("name"), partial(is_validation_loss, "scalar"))


def _are_unlike(a: RunSteps, b: RunSteps, pairs: Alignment, is_equal: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Flag pairs whose value is one tensor in one run, and one tensor per rank, which cannot be joined, in the other.

    A value is not flagged if the tensor of some rank equals the one tensor, because then all ranks should have it.
    """
    sides = [side.table.select(["rank", "note"]).take(pa.array(at)) for side, at in ((a, pairs.a), (b, pairs.b))]
    is_whole = [side.column("rank").is_null().to_numpy() for side in sides]
    is_apart = [
        holds(side.column("note"), lambda note: "per_rank" in note_members(note) and not differing_ranks(note))
        for side in sides
    ]
    are_unlike = np.zeros(len(pairs.a), np.bool_)
    for whole, apart, at in ((is_whole[0], is_apart[1], pairs.a), (is_whole[1], is_apart[0], pairs.b)):
        unlike = whole & apart
        are_unlike |= unlike & ~np.isin(at, at[unlike & is_equal])
    return are_unlike


def _told(suspect: Suspect, a: RunSteps, b: RunSteps, pairs: Alignment, kept: Integers, judged: Verdicts) -> Culprit:
    event = suspect.event
    row: dict[str, Any] = {}
    factor: float | None = None
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
        if suspect.phase == START and event.site == "param" and not ranks:
            ranks = _ranks_of_output(event, a, b, pairs)
        is_of_statistics = row["kind"] == "statistics"
        factor = _factor_of_statistics(a.table, b.table, row_a, row_b) if is_of_statistics else _factor(row)
    stages = list(suspect.stages)
    if suspect.path is not None and event.stage is not None:
        stages = [event.stage]
    if stages and not ranks:
        ranks = _ranks_of(b, set(stages))
    return Culprit(
        step=suspect.step, phase=suspect.phase, root=suspect.root, module_path=suspect.path, site=event.site,
        name=event.name, seen_at=event.path, micro_step=event.micro_step, call=event.call,
        rank=ranks[0] if len(ranks) == 1 else None, ranks=sorted(ranks), why=suspect.why,
        alone_in=event.alone or None, num_params=suspect.num_params, hint="", factor=factor,
        stages=stages, micro_batches=micro_batches,
        **{name: row.get(name) for name in _FIGURES},
    )  # fmt: skip


def _factor(row: dict[str, Any]) -> float | None:
    if row.get("nonfinite_a") != row.get("nonfinite_b"):
        return None
    # `np.array` turns None into NaN.
    cosine, one, two = (np.array(row.get(name), np.float64) for name in ("cosine", "l2_a", "l2_b"))
    factor = float(multiples(cosine, one, two))
    return None if math.isnan(factor) else factor


def _factor_of_statistics(a: Any, b: Any, row_a: int, row_b: int) -> float | None:
    """Return the factor between two tensors, from statistics. Return None unless norms and extremes agree on it."""
    names = ("l2", "absmax", "min", "max")
    ones, twos = ([table.column(name)[row].as_py() for name in names] for table, row in ((a, row_a), (b, row_b)))
    if None in (*ones, *twos) or not ones[0] or not twos[0]:
        return None
    factor = float(twos[0] / ones[0])
    near = _SAME * twos[1]
    is_alike = all(math.isclose(two, factor * one, abs_tol=near) for one, two in zip(ones, twos, strict=True))
    is_large = a.column("numel")[row_a].as_py() >= _MIN_ITEMS and abs(factor - 1) > _MIN_APART
    return factor if is_alike and is_large else None


def _factor_of_norms(row: dict[str, Any]) -> float | None:
    """Return the factor between two gradients, from values or from norms and largest magnitudes; None without one."""
    if row["cosine"] is not None:
        return _factor(row)
    (one, two), (top, other_top) = ((row[f"{name}_a"], row[f"{name}_b"]) for name in ("l2", "absmax"))
    if not (one and two and top and other_top and math.isclose(two / one, other_top / top, rel_tol=1e-4)):
        return None
    return float(two / one)


def _owners(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> tuple[list[int], list[int]]:
    """Return the ranks, and the micro-batches, whose chunks of a tensor differ in the second run; empty if unknown."""
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


def _ranks_of_output(event: StepEvent, a: RunSteps, b: RunSteps, pairs: Alignment) -> list[int]:
    """Return the ranks of the second run whose chunks of a module's output differ; empty if all chunks differ.

    The statistics of a parameter do not tell on which rank the parameter differs. The output of its module may tell.
    """
    table = a.table.select(["step", "root", "module_path", "site"]).take(pa.array(pairs.a))
    is_its = pc.and_(pc.equal(table.column("step"), event.step), pc.equal(table.column("site"), "output"))
    for name, value in (("root", event.root), ("module_path", event.path)):
        is_its = pc.and_(is_its, pc.equal(table.column(name), value))
    for pair in np.flatnonzero(is_its.to_numpy()).tolist():
        try:
            apart = _distances(a, b, int(pairs.a[pair]), int(pairs.b[pair]))
        except RunError:
            continue
        worst = max(apart.values(), default=0.0)
        ranks = {rank for (rank, _), far in apart.items() if far > worst * _OWN_SHARE}
        if 0 < len(ranks) < len({rank for rank, _ in apart}):
            return sorted(ranks)
    return []


def _distances_of_statistics(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> dict[tuple[int, int], float]:
    """Return how far each chunk of a tensor is apart, by rank and micro-step, from statistics; empty if unknown.

    The distance is infinite for a chunk with a NaN or an infinity that the first run does not have.
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
    """Return how far two chunks are apart by their statistics. Infinite if the counts of NaN or infinities differ."""
    if any(one[name] != two[name] for name in NONFINITE):
        return math.inf
    pairs = [(one[name], two[name]) for name in ("mean", "std", "min", "max", "absmax")]
    return max((abs(y - x) for x, y in pairs if x is not None and y is not None), default=0.0)


def _distances(a: RunSteps, b: RunSteps, row_a: int, row_b: int) -> dict[tuple[int, int], float]:
    """Return how far each chunk of a tensor is apart, by rank and micro-batch. Empty if there is only one chunk."""
    own_a, own_b = _own_rows(a, row_a), _own_rows(b, row_b)
    both = sorted(own_a.keys() & own_b.keys())
    if len(both) > 1:
        return {(rank, 0): _far(a.rows.array(own_a[rank]), b.rows.array(own_b[rank])) for rank in both}
    if not own_a and len(own_b) > 1:  # the ranks agree in the first run, and differ in the second run
        whole = a.array(row_a)
        return {(rank, 0): _far(whole, b.rows.array(own)) for rank, own in sorted(own_b.items())}
    chunks = b.rows.chunk_regions(b.table.column("at")[row_b].as_py())
    if len(chunks) < 2:
        return {}
    one, two = a.array(row_a), b.array(row_b)
    if one.shape != two.shape:  # in another model, the regions are those of the second run's value
        return {}
    distances: dict[tuple[int, int], float] = {}
    for rank, micro_step, region in chunks:
        far = _far(*(_part(values, region) for values in (one, two)))
        distances[rank, micro_step] = max(far, distances.get((rank, micro_step), 0.0))
    return distances


def _of_ranks(a: RunSteps, b: RunSteps, row_a: int, row_b: int, ranks: list[int]) -> dict[str, Any]:
    """Return how far a scalar is apart on `ranks`, as columns. Empty if these ranks disagree within one run."""
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
    is_theirs = holds(b.table.column("note"), lambda note: stage_of(note)[0] in stages)
    texts = b.table.column("ranks_present").filter(pa.array(is_theirs)).unique().to_pylist()
    return sorted({rank for text in texts if text is not None for rank in parse_shape(text)})


def _own_rows(side: RunSteps, row: int) -> dict[int, int]:
    table, at = side.rows.table, side.table.column("at")[row].as_py()
    is_own = table.column("rank").is_valid()
    for column in (table.column(name) for name in VALUE_KEY):
        value = column[at].as_py()
        is_own = pc.and_(is_own, column.is_null() if value is None else pc.fill_null(pc.equal(column, value), False))
    return {table.column("rank")[i].as_py(): i for i in np.flatnonzero(is_own.to_numpy()).tolist()}


def _part(values: npt.NDArray[Any], region: Any) -> npt.NDArray[Any]:
    if region.run is not None:
        return values.reshape(-1)[slice(*region.run)]
    boxes = [values[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))] for box in region.boxes]
    return np.concatenate([box.reshape(-1) for box in boxes]) if boxes else values.reshape(-1)[:0]


def _far(one: npt.NDArray[Any], two: npt.NDArray[Any]) -> float:
    """Return the largest difference between elements of two arrays. Two equal infinities, or two NaN, do not differ.

    The result is infinite if one element of a pair is not finite, if the shapes differ, or if an array is complex32.
    """
    if one.shape != two.shape or one.dtype.names or two.dtype.names:
        return np.inf
    one, two = (wide(np.atleast_1d(values)) for values in (one, two))
    with np.errstate(all="ignore"):
        far = np.abs(two - one)
    far[np.isnan(far)] = np.inf
    far[(one == two) | (np.isnan(one) & np.isnan(two))] = 0.0
    return float(far.max(initial=0.0))


_MAX_STEPS = 3
"""A guess adds up the gradients of at most this many earlier steps to explain a wrong gradient."""
_MAX_PARAMS = 8
"""A guess reads the gradients of at most this many parameters. It compares the means of further gradients."""
_MIN_ITEMS = 16
_REST = {"float16": 2e-2, "bfloat16": 2e-2}
"""By dtype, the share of a difference that a guessed mistake may leave unexplained."""
_USUAL_REST = 1e-3
_ROUND = 2e-5
"""A clipped norm may differ from a round limit by this share, because of float32 and of the epsilon in torch."""
_SAME = 1e-4
"""The relative distance up to which two factors between the runs' tensors count as equal."""
_MIN_APART = 1e-2
"""If only statistics show the factor between two tensors, the factor must differ from 1 by more than this."""

Read = Callable[[int, int], PairedSteps]
"""A function of (first, last) that returns both runs' rows of the steps from `first` up to `last`, without `last`."""


def _guess_scaled(factor: float, side: RunSteps, step: int, root: str) -> str:
    """Return a guess if `factor` or 1 / `factor` is the number of ranks or of micro-steps; else an empty text."""
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
                    return f"B's value is {factor:.4g} times A's: {text}?"
    return ""


def _guess_clipping(norm_a: float, rows: Sequence[dict[str, Any]]) -> str:
    """Return a guess if clipping explains why all gradients differ by one factor; else an empty text.

    `norm_a` is the norm of all gradients of the first run together. `rows` are the pairs of gradients that differ. The
    text is empty if some gradient does not differ.
    """
    factors = list(map(_factor_of_norms, rows))
    factor = factors[0] if factors else None
    if factor is None or factor <= 0 or not norm_a > 0:
        return ""
    differing_a, norm_b = (math.sqrt(math.fsum(row[name] ** 2 for row in rows)) for name in ("l2_a", "l2_b"))
    is_complete = math.isclose(differing_a, norm_a, rel_tol=_SAME)
    is_alike = all(one is not None and math.isclose(one, factor, rel_tol=_SAME) for one in factors)
    if not is_complete or not is_alike:
        return ""
    clipped_a, clipped_b = _round(norm_a), _round(norm_b)
    both = f"the norm of all gradients is {norm_a:.4g} in A and {norm_b:.4g} in B"
    if clipped_a and clipped_b:
        return f"{both}: clipped to another norm?"
    if clipped_a and factor > 1:
        return f"{both}, {factor:.4g} times as much: not clipped?"
    if clipped_b and factor < 1:
        return f"{both}, {factor:.4g} times as much: clipped only in B?"
    return ""


def _guess_steps(read: Read, step: int, params: Sequence[tuple[str, str, str]], rank: int | None) -> str:
    """Return a guess if gradients equal the first run's gradients of an earlier step, or their sum over steps.

    `params` are the root, module path and name of each gradient that differs at the step. `rank` is the rank of the
    second run; None means all ranks. The text is empty if no earlier step explains the gradients.
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
        again = "again: is the gradient not computed, or not reduced, anew?"
        for steps, text in (([*earlier, step], "added: not zeroed?"), ([step - number], again)):
            if _fit(a, b, [([of_a[at][one] for at in steps], of_a[step][one], of_b[one]) for one in known]):
                some = ", ".join(map(str, steps[:-1])) + " and " * (len(steps) > 1) + str(steps[-1])
                return f"B's gradient is A's of step{'s' * (len(steps) > 1)} {some} {text}"
    return ""


def _fit(a: RunSteps, b: RunSteps, sums: Sequence[tuple[list[int], int, int]]) -> bool:
    """Return whether gradients of the second run are sums of gradients of the first run.

    Each element of `sums` belongs to one parameter: the rows of `a` that are added up, the row of `a` at the step, and
    the row of `b`. Values are compared for the largest parameters, and means for further parameters.
    """
    sums = sorted(sums, key=lambda rows: -int(b.table.column("numel")[rows[2]].as_py()))
    is_read = False
    for terms, beside, row in sums[:_MAX_PARAMS]:
        try:
            now, then = (wide(side.array(at).reshape(-1)) for side, at in ((a, beside), (b, row)))
            total = sum(wide(a.array(at).reshape(-1)) for at in terms)
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
    """Return the row index of each gradient that an update used, of `rank` if there is one, or else of all ranks."""
    table = side.table
    is_wanted = pc.and_(pc.equal(table.column("site"), "grad"), pc.equal(table.column("phase"), "optimizer"))
    at = np.flatnonzero(pc.fill_null(pc.and_(is_wanted, pc.equal(table.column("step"), step)), False).to_numpy())
    row_of: dict[tuple[str, str, str], int] = {}
    for row in at.tolist():
        of, *one = (table.column(name)[row].as_py() for name in ("rank", "root", "module_path", "name"))
        if of == rank or (of is None and (one[0], one[1], one[2]) not in row_of):
            row_of[one[0], one[1], one[2]] = row
    return row_of


def _norm_of_gradients(side: RunSteps, step: int, root: str) -> float:
    rows = [row for one, row in _gradients(side, step, None).items() if one[0] == root]
    norms = [side.table.column("l2")[row].as_py() for row in rows]
    return math.nan if None in norms or not norms else math.sqrt(math.fsum(norm**2 for norm in norms))


def _round(norm: float) -> bool:
    """Return whether a norm is close to a number of two digits, which a person may have chosen as the limit."""
    return math.isclose(norm, float(f"{norm:.2g}"), rel_tol=_ROUND)
