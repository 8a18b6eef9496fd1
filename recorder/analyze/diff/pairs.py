"""How far the paired rows of two runs are apart: by fingerprint, else by values, else by statistics.

Where one run lacks ranks of a value, a difference says nothing of the training, and is told apart.
Must never read the payloads of a pair whose fingerprints are equal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import HANDED_ON, NONFINITE, note_members, stage_of
from ...errors import RunError
from ...numerics.distributions import UnitsApart, units_apart, units_of_row
from ...numerics.keys import VALUE_KEY, Integers, common_ids, group_rows, holds
from ...numerics.moments import Floats, integers, numbers
from ...run.notes import missing_ranks
from ...run.selection import Selection
from ...sites import GIVEN
from .align import PART, Alignment, align
from .compare import IDENTICAL, Distance, Tolerance, are_identical, compare
from .renames import NO_RENAMES, Renames

VALUE_COLUMNS = ("step", "root", "module_path", "site", "name", "phase", "mode", "micro_step", "call", "repeat")
_BOTH = ("rank", "dtype", "shape", "mean", "l2", "absmax", *NONFINITE, "zero_count", "histogram")
_DISTANCES = {
    "num_outside": pa.int64(), "max_abs": pa.float64(), "of_max": pa.float64(), "l2_apart": pa.float64(),
    "max_rel": pa.float64(), "max_ulp": pa.uint64(), "cosine": pa.float64(), "nonfinite_a": pa.int64(),
    "nonfinite_b": pa.int64(),
}  # fmt: skip
_UNITS = {name: pa.float64() if "rms" in name else pa.int64() for name in UnitsApart._fields}
_EXACT = ("min", "max", "absmax")
_ROUNDED = ("mean", "std", "l2")
_ROUNDING = 1e-12
"""Sums of the same elements in another order differ by less, of the largest magnitude."""

Flags = npt.NDArray[np.bool_]


class RunSteps(NamedTuple):
    """Some steps of one run."""

    rows: Any
    """`GlobalRows`."""
    table: Any
    """The selected rows, with a column `at`: the index of each in `rows`."""

    @classmethod
    def read(
        cls, view: Any, selection: Selection, first: int | None, last: int | None, renames: Renames = NO_RENAMES
    ) -> RunSteps:
        """The rows of the steps from `first` up to, but not including, `last`."""
        rows = view.rows(first, last)
        table = renames.apply(rows.table).append_column("at", pa.array(np.arange(rows.table.num_rows)))
        table = table.append_column(PART, _parts_of_batch(view, rows.table))
        return cls(rows, selection.narrow(table.filter(pa.array(~_is_found(table)))))

    def payload_bytes(self, rows: Integers) -> int:
        """Bytes of the payloads of some rows of `table`, each counted once."""
        return int(self.rows.payload_bytes[integers(self.table.column("at"))[np.unique(rows)]].sum())

    def array(self, row: int) -> npt.NDArray[Any]:
        """The tensor of a row of `table`."""
        tensor: npt.NDArray[Any] = self.rows.array(self.table.column("at")[row].as_py())
        return tensor


def _parts_of_batch(view: Any, table: Any) -> Any:
    """For each rank's row, on which part of how many of the batch the rank worked; null where that is not known."""
    rows = np.flatnonzero(table.column("rank").is_valid().to_numpy())
    if not len(rows):
        return pa.nulls(table.num_rows, pa.string())
    columns = ("root", "rank", "attempt")
    kinds = group_rows(table.select(columns).take(pa.array(rows)), columns)
    firsts = table.select(columns).take(pa.array(rows[kinds.firsts])).to_pylist()
    texts = [None if (part := view.part_of_batch(**one)) is None else f"{part[0]}/{part[1]}" for one in firsts]
    codes = np.full(table.num_rows, -1, np.int64)
    codes[rows] = kinds.ids
    return pa.array(texts, pa.string()).take(pa.array(codes, mask=codes < 0))


class PairedSteps(NamedTuple):
    """Steps that two runs have in common, in pairs."""

    a: RunSteps
    b: RunSteps
    pairs: Alignment


class Verdicts(NamedTuple):
    """What came of some pairs."""

    differing: Any
    """`pa.Table` of the pairs that differ, in their order."""
    num_pairs: int
    by_fingerprint: int
    """Pairs that are equal by it."""
    by_values: int
    """Pairs whose values were compared."""
    by_statistics: int
    by_nothing: int
    """Pairs of which one side has values, statistics or a fingerprint that the other lacks."""
    bare: int
    """Pairs of which neither has any, or one can have none: summands over ranks whose values were not kept."""
    partial: Counter[tuple[str, str]]
    """Pairs of which one run (``a`` or ``b``) lacks ranks that the other has not lost; by the run and these ranks."""
    summands: int
    """Those of `bare` of which both runs kept something on their ranks: summands over ranks."""
    by_print_alone: int
    """Pairs whose fingerprints differ, with nothing else to compare, where noise alone may have made them differ."""
    unread: Counter[str]
    """Pairs of which values could not be read, by what the reading said."""
    kinds: npt.NDArray[np.object_]
    """For each pair how it differs, see `Difference.kind`; an empty text where it does not."""


def judge(a: RunSteps, b: RunSteps, pairs: Alignment, tolerance: Tolerance, report: Callable[[int], None]) -> Verdicts:
    """Compare pairs of rows.

    Args:
        a: rows of the one run.
        b: of the other.
        pairs: which belong together.
        tolerance: what counts as equal.
        report: called with payload bytes done.
    """
    left, right = a.table.take(pa.array(pairs.a)), b.table.take(pa.array(pairs.b))
    same_dtype, same_shape, same_print = (_same(left, right, name) for name in ("dtype", "shape", "fingerprint"))
    has_prints, has_values, has_numbers = (_both(left, right, n) for n in ("fingerprint", "encoding", "nan_count"))
    is_equal = same_dtype & same_shape & same_print & has_prints
    is_open = same_shape & ~is_equal
    prints_differ = is_open & same_dtype & has_prints & tolerance.is_exact
    by_values = is_open & has_values
    report(a.payload_bytes(pairs.a[~by_values]) + b.payload_bytes(pairs.b[~by_values]))
    distances, unread = [], Counter[str]()
    for pair in np.flatnonzero(by_values).tolist():
        try:
            one, two = a.array(int(pairs.a[pair])), b.array(int(pairs.b[pair]))
            distances.append(IDENTICAL if are_identical(one, two) else compare(one, two, tolerance))
        except RunError as error:  # statistics and fingerprints may be whole
            by_values[pair] = has_values[pair] = False
            unread[str(error)] += 1
        report(a.payload_bytes(pairs.a[pair : pair + 1]) + b.payload_bytes(pairs.b[pair : pair + 1]))
    by_statistics = is_open & ~has_values & has_numbers
    statistics = _Statistics.compare(left, right, tolerance)
    kinds = np.full(left.num_rows, "", object)
    if tolerance.is_exact:
        kinds[is_open & ~same_dtype] = "dtype"
    kinds[prints_differ & ~has_values] = "fingerprint"
    kinds[by_statistics & statistics.is_outside] = "statistics"
    kinds[by_values] = np.where([distance.num_outside > 0 for distance in distances], "values", kinds[by_values])
    kinds[~same_shape] = "shape"
    is_unknown = is_open & ~has_values & ~has_numbers & ~prints_differ
    is_summand = (_has_none(left) | _has_none(right)) & ~has_values
    is_bare = ~(_any(left) | _any(right)) | is_summand
    other_meaning = np.asarray(_is_after_tap(left) != _is_after_tap(right))
    kinds[other_meaning & np.isin(kinds, ("values", "statistics", "fingerprint"))] = "after_tap"
    lacks = missing_ranks(left), missing_ranks(right)
    is_partial = lacks[0] != lacks[1]
    kinds[is_partial & (kinds != "") & (kinds != "dtype")] = "partial"
    judged = _table(left, right, kinds, np.flatnonzero(by_values), distances, statistics, by_statistics)
    for side, ranks in zip("ab", lacks, strict=True):
        texts = ranks[kinds != ""]
        judged = judged.append_column(f"lacks_{side}", pa.array(texts.tolist(), pa.string(), mask=texts == ""))
    return Verdicts(
        judged,
        num_pairs=len(pairs.a),
        by_fingerprint=int(is_equal.sum()),
        by_values=int(by_values.sum()),
        by_statistics=int(by_statistics.sum()),
        by_nothing=int((is_unknown & ~is_bare).sum()),
        bare=int((is_unknown & is_bare).sum()),
        summands=int((is_unknown & is_summand).sum()),
        by_print_alone=0,
        unread=unread,
        partial=Counter(
            (side, text)
            for side, ranks in zip("ab", lacks, strict=True)
            for text in ranks[is_partial & (ranks != "")].tolist()
        ),
        kinds=kinds,
    )


class _Statistics(NamedTuple):
    """How far the statistics of pairs are apart."""

    is_outside: Flags
    name: npt.NDArray[np.object_]
    """The one that is farthest apart, of those that are outside the tolerance."""
    left: Floats
    """What it is in the one run."""
    right: Floats
    apart: Floats
    """By how much they differ: of the largest magnitude, of a norm the larger one; NaN for a count."""

    @classmethod
    def compare(cls, left: Any, right: Any, tolerance: Tolerance) -> _Statistics:
        length = left.num_rows
        is_outside, apart, farthest = np.zeros(length, np.bool_), np.zeros(length), np.full(length, "", object)
        of_left, of_right = np.full(length, np.nan), np.full(length, np.nan)
        for name in (*_EXACT, *_ROUNDED):
            one, two = numbers(left.column(name)), numbers(right.column(name))
            # Both null: nothing finite on either side. One alone: as far apart as can be.
            far = np.where(np.isnan(one) & np.isnan(two), 0.0, np.nan_to_num(np.abs(two - one), nan=np.inf))
            of = "l2" if name == "l2" else "absmax"
            scale = np.fmax(np.abs(numbers(left.column(of))), np.abs(numbers(right.column(of))))
            relative = np.divide(far, scale, out=np.where(far > 0, np.inf, 0.0), where=scale > 0)
            allowed = max(tolerance.rtol, 0.0 if name in _EXACT else _ROUNDING)
            differs = (far > tolerance.atol) & (relative > allowed)
            is_outside |= differs
            farther = differs & (relative > apart)
            farthest[farther] = name
            for known, values in ((of_left, one), (of_right, two), (apart, relative)):
                known[farther] = values[farther]
        for name in NONFINITE:
            counts = integers(left.column(name)), integers(right.column(name))
            differs = counts[0] != counts[1]
            is_outside |= differs
            farthest[differs], apart[differs] = name, np.nan
            for known, values in zip((of_left, of_right), counts, strict=True):
                known[differs] = values[differs]
        return cls(is_outside, farthest, of_left, of_right, apart)


def _table(
    left: Any,
    right: Any,
    kinds: npt.NDArray[np.object_],
    compared: Integers,
    distances: Sequence[Distance],
    statistics: _Statistics,
    by_statistics: Flags,
) -> Any:
    """The pairs that have a kind, with all that is known of them."""
    differs = np.flatnonzero(kinds != "")
    chosen = pa.array(differs)
    columns = {name: left.column(name).take(chosen) for name in VALUE_COLUMNS}
    columns["kind"] = pa.array(kinds[differs].tolist(), pa.string())
    columns["numel"] = left.column("numel").take(chosen)
    for name in _BOTH:
        for side, table in (("a", left), ("b", right)):
            columns[f"{name}_{side}"] = table.column(name).take(chosen)
    index = np.full(len(kinds), -1, np.int64)
    index[compared] = np.arange(len(compared))
    of_distance = pa.array(index[differs], mask=index[differs] < 0)
    for name, kind in _DISTANCES.items():
        values = pa.array([getattr(distance, name) for distance in distances], kind)
        columns[name] = values.take(of_distance)
    columns |= _units(left, right, differs)
    for side in "ab":  # rows whose values were not compared have counts of their own
        counts = reduce(pc.add, (columns[f"{name}_{side}"] for name in NONFINITE)).combine_chunks()
        columns[f"nonfinite_{side}"] = pc.coalesce(columns[f"nonfinite_{side}"], counts.cast(pa.int64()))
    says = by_statistics[differs] & (statistics.name[differs] != "")
    columns["statistic"] = pa.array(statistics.name[differs].tolist(), pa.string(), mask=~says)
    for name, known in (("a", statistics.left), ("b", statistics.right), ("rel", statistics.apart)):
        columns[f"statistic_{name}"] = pa.array(known[differs], mask=~says | np.isnan(known[differs]))
    return pa.table(columns)


def _units(left: Any, right: Any, pairs: Integers) -> dict[str, Any]:
    """How the units of some pairs compare, as columns: the sums themselves are too many to keep."""
    comparisons: list[UnitsApart | None] = [None] * len(pairs)
    has_both = _both(left, right, "units")[pairs]
    for at in np.flatnonzero(has_both).tolist():
        pair = int(pairs[at])
        sides = (
            units_of_row(table.column("units")[pair].as_py(), table.column("shape")[pair].as_py())
            for table in (left, right)
        )
        comparisons[at] = units_apart(*sides)
    return {
        name: pa.array([None if one is None else one[i] for one in comparisons], kind)
        for i, (name, kind) in enumerate(_UNITS.items())
    }


def moved_roots(a: RunSteps, b: RunSteps) -> set[str]:
    """Roots of which some value is not the same in two runs, whatever is selected of them.

    What the program gave them, and numbers that it reported, such as seconds, are none where there is anything else.
    """
    pairs = align(a.rows.table, b.rows.table)
    is_made = ~holds(a.rows.table.column("site"), GIVEN.__contains__)[pairs.a]
    if is_made.any():
        pairs = pairs._replace(a=pairs.a[is_made], b=pairs.b[is_made])
    left, right = a.rows.table.take(pa.array(pairs.a)), b.rows.table.take(pa.array(pairs.b))
    has_prints, has_numbers, has_values = (_both(left, right, n) for n in ("fingerprint", "nan_count", "encoding"))
    differs = has_prints & ~_same(left, right, "fingerprint")
    differs |= has_numbers & ~np.logical_and.reduce([_same(left, right, name) for name in ("l2", "absmax", "mean")])
    roots = left.column("root")
    moved = set(roots.filter(pa.array(differs)).unique().to_pylist())
    for pair in np.flatnonzero(has_values & ~has_prints & ~has_numbers).tolist():
        if (root := roots[pair].as_py()) not in moved:
            one, two = a.rows.array(int(pairs.a[pair])), b.rows.array(int(pairs.b[pair]))
            moved |= {root} if one.shape != two.shape or not are_identical(one, two) else set()
    return moved


def _same(left: Any, right: Any, name: str) -> Flags:
    one, two = common_ids(left, right, (name,))
    return np.asarray(one == two)


def _is_after_tap(table: Any) -> Flags:
    """Rows with the gradient of the uses outside their module alone."""
    return holds(table.column("note"), lambda note: note_members(note).get("grad") == "after_tap")


def _is_found(table: Any) -> Flags:
    """Losses that the recorder found: one for each backward, of which runs that do the same may have others."""
    return holds(table.column("note"), lambda note: note_members(note).get("found") == "backward")


def _any(table: Any) -> Flags:
    """Rows that say anything of their values."""
    are_valid = [table.column(name).is_valid().to_numpy() for name in ("fingerprint", "encoding", "nan_count")]
    return are_valid[0] | are_valid[1] | are_valid[2]  # type: ignore[no-any-return]


def _has_none(table: Any) -> Flags:
    """Rows that cannot have statistics, such as summands over ranks, and of which no values were kept."""
    is_summand = holds(table.column("note"), lambda note: "no_statistics" in note_members(note))
    return np.asarray(is_summand & ~table.column("encoding").is_valid().to_numpy())


def _both(left: Any, right: Any, name: str) -> Flags:
    return np.asarray(left.column(name).is_valid().to_numpy() & right.column(name).is_valid().to_numpy())


_SLICED = ("step", "root", "mode")
"""What is counted in micro-steps by itself."""
_WHOLE_KEY = (*(name for name in VALUE_KEY if name != "micro_step"), "rank")
"""What names a value over all micro-steps of its step."""


def comparable(a: RunSteps, b: RunSteps) -> tuple[RunSteps, RunSteps, tuple[int, int]]:
    """Leave out what pipeline stages hand to each other, unless both runs have the same stages.

    Returns:
        The sides, and how many rows of each were left out.

    A row of it is known by its rank, its stage, its micro-batch and its size: of ranks that share a batch, or split it.
    """
    marked = [holds(side.table.column("note"), _is_handed_on) for side in (a, b)]
    if not any(flags.any() for flags in marked):
        return a, b, (0, 0)
    handed_on = [_handed_on(side.table.filter(pa.array(flags))) for side, flags in zip((a, b), marked, strict=True)]
    if handed_on[0] == handed_on[1]:
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def without_recomputed(a: RunSteps, b: RunSteps) -> tuple[RunSteps, RunSteps, tuple[int, int]]:
    """Leave out what one run alone recomputed for its backward; return the sides, and how many rows of each went."""
    marked = [holds(side.table.column("phase"), "recompute".__eq__) for side in (a, b)]
    if marked[0].any() == marked[1].any():
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def without_other_micro_steps(a: RunSteps, b: RunSteps) -> tuple[RunSteps, RunSteps, int]:
    """Leave out the micro-steps of a batch that the two runs divide into other numbers of micro-steps.

    Two runs divide one batch where a value has as many elements over all micro-steps of a step in both. A micro-batch
    that one run has lost is therefore still a difference.

    Returns:
        The sides, and how many values of the first one were left out.
    """
    slices = common_ids(a.table, b.table, _SLICED)
    num_slices = 1 + max(int(ids.max(initial=-1)) for ids in slices)
    lasts = [_last_micro_steps(side.table, ids, num_slices) for side, ids in zip((a, b), slices, strict=True)]
    is_uneven = (lasts[0] != lasts[1]) & (lasts[0] >= 0) & (lasts[1] >= 0)
    if not is_uneven.any():
        return a, b, 0
    uneven = [np.flatnonzero(is_uneven[ids] & _has_micro_step(s)) for s, ids in zip((a, b), slices, strict=True)]
    left, right = (side.table.take(pa.array(rows)) for side, rows in zip((a, b), uneven, strict=True))
    wholes = common_ids(left, right, _WHOLE_KEY)
    num_wholes = 1 + max(int(ids.max(initial=-1)) for ids in wholes)
    totals = [
        np.bincount(w, integers(t.column("numel"), 0), num_wholes) for w, t in zip(wholes, (left, right), strict=True)
    ]
    is_one_batch = np.zeros(num_slices, np.bool_)
    is_equal = (totals[0] == totals[1]) & (totals[0] > 0)
    is_one_batch[slices[0][uneven[0]][is_equal[wholes[0]]]] = True
    dropped = [is_one_batch[ids] & _has_micro_step(side) for side, ids in zip((a, b), slices, strict=True)]
    num_values = group_rows(a.table.filter(pa.array(dropped[0])), VALUE_KEY).num_groups
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), dropped, strict=True))
    return one, two, num_values


def _has_micro_step(side: RunSteps) -> Any:
    return side.table.column("micro_step").is_valid().to_numpy()


def _last_micro_steps(table: Any, slices: Integers, num_slices: int) -> Integers:
    """The last micro-step of each step of a root and a mode; -1 where there is none."""
    lasts = np.full(num_slices, -1, np.int64)
    np.maximum.at(lasts, slices, integers(table.column("micro_step"), -1))
    return lasts


def _is_handed_on(note: str) -> bool:
    return stage_of(note)[1]


def _handed_on(table: Any) -> set[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in ("rank", "micro_step", "numel", "note")]
    return {(*key, str(json.loads(note)[HANDED_ON])) for *key, note in zip(*columns, strict=True)}
