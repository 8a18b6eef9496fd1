"""Pairs the rows of two recorded runs, and compares each pair: by fingerprint, else by values, else by statistics.

If one run lacks ranks of a value, a difference is due to the recording, not to the training. Such a difference has the
kind ``partial``. This module must never read the payloads of a pair whose fingerprints are equal.
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

from ...columns import BATCH_OR_ONE, HANDED_ON, NONFINITE, NOT_OF_BATCH, note_members, stage_of
from ...errors import RunError
from ...numerics.distributions import UnitsApart, units_apart, units_of_row
from ...numerics.keys import VALUE_KEY, Integers, by_distinct, common_ids, group_rows, holds, join
from ...numerics.moments import Floats, integers, numbers
from ...run.notes import missing_ranks
from ...run.selection import Selection
from ...sites import GIVEN_SITES
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
"""Sums of the same elements in different orders may differ by this share of the largest magnitude."""

Flags = npt.NDArray[np.bool_]


class RunSteps(NamedTuple):
    """The rows of some steps of one run."""

    rows: Any
    """The `GlobalRows` of these steps, including rows that are not selected."""
    table: Any
    """The selected rows, with a column `at` that has the index of each row in `rows`."""

    @classmethod
    def read(
        cls, view: Any, selection: Selection, first: int | None, last: int | None, renames: Renames = NO_RENAMES
    ) -> RunSteps:
        """Return the rows of a run's steps from `first` up to, but not including, `last`."""
        rows = view.rows(first, last)
        table = renames.apply(rows.table).append_column("at", pa.array(np.arange(rows.table.num_rows)))
        table = table.append_column(PART, _parts_of_batch(view, rows.table))
        # A training loss that the recorder found is left out: in equal trainings it may find different losses.
        left_out = holds(table.column("note"), lambda note: note_members(note).get("found") not in (None, "evaluation"))
        return cls(rows, selection.narrow(table.filter(pa.array(~left_out))))

    def without(self, rows: Flags) -> RunSteps:
        """Return these steps without the flagged rows of `table`."""
        return self._replace(table=self.table.filter(pa.array(~rows))) if rows.any() else self

    def payload_bytes(self, rows: Integers) -> int:
        """Return the payload bytes of the rows `rows` of `table`, each row counted once."""
        return int(self.rows.payload_bytes[integers(self.table.column("at"))[np.unique(rows)]].sum())

    def array(self, row: int) -> npt.NDArray[Any]:
        tensor: npt.NDArray[Any] = self.rows.array(self.table.column("at")[row].as_py())
        return tensor


def _parts_of_batch(view: Any, table: Any) -> Any:
    """Return, for each row, its rank's part of the batch, as a text such as ``1/4``; null if it is not known."""

    def part_of(root: str, rank: int | None, attempt: int) -> str | None:
        part = view.parts_of_batch.get((root, rank, attempt))
        return None if part is None else f"{part[0]}/{part[1]}"

    return pa.array(by_distinct(table, ("root", "rank", "attempt"), part_of, object), pa.string())


class PairedSteps(NamedTuple):
    """The rows of two runs at the same steps, and how the rows are paired."""

    a: RunSteps
    b: RunSteps
    pairs: Alignment


class Verdicts(NamedTuple):
    """The results of comparing pairs of rows."""

    differing: Any
    """`pa.Table` of the pairs that differ, in the order of the pairs."""
    counts: Counter[str]
    """The number of pairs of each class, and of all pairs (``num_pairs``).
    ``by_fingerprint``: equal by fingerprint.
    ``by_values``, ``by_statistics``: compared by values, or by statistics.
    ``by_nothing``: one side has values, statistics or a fingerprint, the other has nothing of the same kind.
    ``bare``: neither side has any of these, or one side cannot have them (a partial sum over ranks without values).
    ``summands``: the bare pairs with a partial sum over ranks.
    ``by_print_alone``: only fingerprints were recorded, and they differ, perhaps by noise.
    """
    partial: Counter[tuple[str, str]]
    """The number of pairs in which one run (``a`` or ``b``) lacks ranks, by the run and the missing ranks."""
    unread: Counter[str]
    """The number of pairs whose values could not be read, by the reason."""
    bare_modules: dict[str, None]
    """The modules of the pairs that are counted as ``summands``."""
    kinds: npt.NDArray[np.object_]
    """The kind of each pair's difference (`Difference.kind`); empty if the pair does not differ."""


def judge(a: RunSteps, b: RunSteps, pairs: Alignment, tolerance: Tolerance, report: Callable[[int], None]) -> Verdicts:
    """Compare pairs of rows. `report` is called with the number of payload bytes done since its last call."""
    left, right = a.table.take(pa.array(pairs.a)), b.table.take(pa.array(pairs.b))
    same_dtype, same_shape, same_print = (_same(left, right, name) for name in ("dtype", "shape", "fingerprint"))
    has_prints, has_values, has_numbers = (_both(left, right, n) for n in ("fingerprint", "encoding", "nan_count"))
    is_equal = same_dtype & same_shape & same_print & has_prints
    are_open = [holds(side.column("note"), lambda note: BATCH_OR_ONE in note_members(note)) for side in (left, right)]
    may_be_one = ~same_shape & np.any(are_open, axis=0)
    is_open = (same_shape | may_be_one) & ~is_equal
    # The bits of a NaN mean nothing, and any operation may change them, but the fingerprint depends on them.
    has_nans = _same(left, right, "nan_count") & (numbers(left.column("nan_count")) > 0)
    prints_differ = is_open & same_dtype & has_prints & tolerance.is_exact & ~may_be_one & ~has_nans
    by_values = is_open & has_values
    report(a.payload_bytes(pairs.a[~by_values]) + b.payload_bytes(pairs.b[~by_values]))
    distances, unread = [], Counter[str]()
    for pair in np.flatnonzero(by_values).tolist():
        try:
            one, two = a.array(int(pairs.a[pair])), b.array(int(pairs.b[pair]))
            if may_be_one[pair]:
                one, two = _for_one(one, two, is_gradient=left.column("phase")[pair].as_py() == "backward")
            if one.shape == two.shape:
                distances.append(IDENTICAL if are_identical(one, two) else compare(one, two, tolerance))
            else:
                may_be_one[pair] = by_values[pair] = False
        except RunError as error:  # the statistics and fingerprints may still be readable
            by_values[pair] = has_values[pair] = False
            unread[str(error)] += 1
        report(a.payload_bytes(pairs.a[pair : pair + 1]) + b.payload_bytes(pairs.b[pair : pair + 1]))
    by_statistics = is_open & ~has_values & has_numbers & ~may_be_one
    statistics = _Statistics.compare(left, right, tolerance)
    is_summand = (_has_none(left) | _has_none(right)) & ~has_values
    for pair in np.flatnonzero(is_open & is_summand & ~has_numbers).tolist():
        if (of_ranks := _by_ranks(a, b, int(pairs.a[pair]), int(pairs.b[pair]), tolerance)) is not None:
            by_statistics[pair] = has_numbers[pair] = True
            for known, of_rank in zip(statistics, of_ranks, strict=True):
                known[pair] = of_rank[np.argmax(of_ranks.is_outside)]
    kinds = np.full(left.num_rows, "", object)
    if tolerance.is_exact:
        kinds[is_open & ~same_dtype] = "dtype"
    kinds[prints_differ & ~has_values] = "fingerprint"
    kinds[by_statistics & statistics.is_outside] = "statistics"
    kinds[by_values] = np.where([distance.num_outside > 0 for distance in distances], "values", kinds[by_values])
    kinds[~same_shape & ~may_be_one] = "shape"
    is_unknown = is_open & ~has_values & (~has_numbers | may_be_one) & ~prints_differ
    is_bare = ~(_any(left) | _any(right)) | is_summand | may_be_one
    other_meaning = np.asarray(_is_after_tap(left) != _is_after_tap(right))
    kinds[other_meaning & np.isin(kinds, ("values", "statistics", "fingerprint"))] = "after_tap"
    lacks = _missing_ranks(left, right), _missing_ranks(right, left)
    is_partial = lacks[0] != lacks[1]
    kinds[is_partial & (kinds != "") & (kinds != "dtype")] = "partial"
    judged = _table(left, right, kinds, np.flatnonzero(by_values), distances, statistics, by_statistics)
    for side, ranks in zip("ab", lacks, strict=True):
        texts = ranks[kinds != ""]
        judged = judged.append_column(f"lacks_{side}", pa.array(texts.tolist(), pa.string(), mask=texts == ""))
    counted = {
        "by_fingerprint": is_equal, "by_values": by_values, "by_statistics": by_statistics,
        "by_nothing": is_unknown & ~is_bare, "bare": is_unknown & is_bare, "summands": is_unknown & is_summand,
    }  # fmt: skip
    counts = Counter({name: int(flags.sum()) for name, flags in counted.items()} | {"num_pairs": len(pairs.a)})
    sides = zip("ab", lacks, strict=True)
    partial = Counter((side, text) for side, ranks in sides for text in ranks[is_partial & (ranks != "")].tolist())
    bare_modules = dict.fromkeys(left.column("module_path").filter(pa.array(is_unknown & is_summand)).to_pylist())
    return Verdicts(judged, counts, partial, unread, bare_modules, kinds)


def _for_one(
    one: npt.NDArray[Any], two: npt.NDArray[Any], *, is_gradient: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Bring two tensors into one shape if one of them is a batch of the other; else return them unchanged.

    A batch repeats the single tensor along dims of size 1. Gradients are added up along these dims, because the
    gradient of the single tensor is the sum of the gradients of the batch.
    """
    dims = tuple(dim for dim, sizes in enumerate(zip(one.shape, two.shape, strict=False)) if len({*sizes}) > 1)
    if one.ndim != two.ndim or any(1 not in (one.shape[dim], two.shape[dim]) for dim in dims):
        return one, two
    if is_gradient:
        one, two = (values.astype(np.float64).sum(dims, keepdims=True) for values in (one, two))
    one, two = np.broadcast_arrays(one, two)
    return one, two


def _missing_ranks(table: Any, other: Any) -> npt.NDArray[np.object_]:
    """Return the ranks that each row of `table` lacks, as JSON, if the row stands for all ranks.

    A missing replica usually does not count, because replicas are one value. It counts if the other run has a row for
    each rank, because its replicas differ: then the row of a rank in `other` cannot be compared with a value that was
    made without this rank.
    """
    pairs = table.select(["ranks_present", "ranks_expected"]).append_column("rank", other.column("rank"))
    lost = by_distinct(pairs, ("ranks_present", "ranks_expected", "rank"), _lost, object)
    is_of_rank = ~table.column("rank").is_valid().to_numpy() & other.column("rank").is_valid().to_numpy()
    lost = np.where(is_of_rank, lost, "")
    return np.where(lost != "", lost, missing_ranks(table))


def _lost(present: str | None, expected: str | None, rank: int | None) -> str:
    is_lost = rank in json.loads(expected or "[]") and rank not in json.loads(present or "[]")
    return json.dumps([rank]) if is_lost else ""


def _by_ranks(a: RunSteps, b: RunSteps, row_a: int, row_b: int, tolerance: Tolerance) -> _Statistics | None:
    """Compare two sums over ranks by the statistics of their summands. Return None unless both have the same ranks."""
    tables: list[Any] = []
    ranks: list[list[tuple[int, int]]] = []
    for side, row in ((a, row_a), (b, row_b)):
        parts = side.rows.statistics_of_chunks(side.table.column("at")[row].as_py())
        parts.sort(key=lambda part: (part["rank"], part["micro_step"]))
        ranks.append([(part["rank"], part["micro_step"]) for part in parts if part["nan_count"] is not None])
        tables.append(pa.Table.from_pylist(parts))
    is_alike = ranks[0] == ranks[1] and 0 < len(ranks[0]) == tables[0].num_rows == tables[1].num_rows
    return _Statistics.compare(tables[0], tables[1], tolerance) if is_alike else None


class _Statistics(NamedTuple):
    is_outside: Flags
    name: npt.NDArray[np.object_]
    """For each pair, the statistic that is farthest apart, among the statistics outside the tolerance."""
    left: Floats
    """For each pair, the first run's value of the statistic that is farthest apart."""
    right: Floats
    apart: Floats
    """For each pair, how far this statistic is apart, as a share of the largest magnitude or norm; NaN for a count."""

    @classmethod
    def compare(cls, left: Any, right: Any, tolerance: Tolerance) -> _Statistics:
        length = left.num_rows
        is_outside, apart, farthest = np.zeros(length, np.bool_), np.zeros(length), np.full(length, "", object)
        of_left, of_right = np.full(length, np.nan), np.full(length, np.nan)
        for name in (*_EXACT, *_ROUNDED):
            one, two = numbers(left.column(name)), numbers(right.column(name))
            # If the statistic is null on both sides, neither side has a finite element. If it is null on only one side,
            # the difference counts as the largest possible.
            is_same = (one == two) | (np.isnan(one) & np.isnan(two))
            with np.errstate(invalid="ignore"):  # the difference of two infinities, such as a mask's sums of squares
                far = np.where(is_same, 0.0, np.nan_to_num(np.abs(two - one), nan=np.inf))
            of = "l2" if name == "l2" else "absmax"
            scale = np.fmax(np.abs(numbers(left.column(of))), np.abs(numbers(right.column(of))))
            with np.errstate(invalid="ignore"):
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
    left: Any, right: Any, kinds: npt.NDArray[np.object_], compared: Integers, distances: Sequence[Distance],
    statistics: _Statistics, by_statistics: Flags,
) -> Any:  # fmt: skip
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
    for side in "ab":  # these are counts of rows whose values were not compared
        counts = reduce(pc.add, (columns[f"{name}_{side}"] for name in NONFINITE)).combine_chunks()
        columns[f"nonfinite_{side}"] = pc.coalesce(columns[f"nonfinite_{side}"], counts.cast(pa.int64()))
    says = by_statistics[differs] & (statistics.name[differs] != "")
    columns["statistic"] = pa.array(statistics.name[differs].tolist(), pa.string(), mask=~says)
    for name, known in (("a", statistics.left), ("b", statistics.right), ("rel", statistics.apart)):
        columns[f"statistic_{name}"] = pa.array(known[differs], mask=~says | np.isnan(known[differs]))
    return pa.table(columns)


def _units(left: Any, right: Any, pairs: Integers) -> dict[str, Any]:
    """Return columns on how the units (channels or neurons) of each pair differ. Single units would be too many."""
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
    """Return the roots (models under hooks) with a value, selected or not, that differs between two runs.

    Values and numbers that the program passes to the recorder, such as seconds, count only without other values.
    """
    pairs = align(a.rows.table, b.rows.table)
    is_made = ~holds(a.rows.table.column("site"), GIVEN_SITES.__contains__)[pairs.a]
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
    """Return a mask of the gradients that cover only uses of a value outside the module that made the value."""
    return holds(table.column("note"), lambda note: note_members(note).get("grad") == "after_tap")


def _any(table: Any) -> Flags:
    are_valid = [table.column(name).is_valid().to_numpy() for name in ("fingerprint", "encoding", "nan_count")]
    return np.asarray(np.any(are_valid, axis=0))


def _has_none(table: Any) -> Flags:
    """Return a mask of the rows without values that can have no statistics, such as partial sums over ranks."""
    is_summand = holds(table.column("note"), lambda note: "no_statistics" in note_members(note))
    return np.asarray(is_summand & ~table.column("encoding").is_valid().to_numpy())


def _both(left: Any, right: Any, name: str) -> Flags:
    return np.asarray(left.column(name).is_valid().to_numpy() & right.column(name).is_valid().to_numpy())


_SLICED = ("step", "root", "mode")
"""The columns with equal values in all micro-steps of one step."""
_WHOLE_KEY = (*(name for name in VALUE_KEY if name != "micro_step"), "rank")
"""The columns that identify a value at one rank, apart from its micro-step."""


def comparable(a: RunSteps, b: RunSteps) -> tuple[RunSteps, RunSteps, list[int], list[int], int]:
    """Leave out the rows of two runs that cannot be compared with each other.

    These are losses of evaluations that the recorder found in one run alone, values that ranks pass to each other,
    recomputed rows and micro-steps of a batch, as the following functions say. Returns the rows of both runs that
    remain, how many rows of each run were passed on and recomputed, and the number of values of the first run that are
    left out with their micro-steps.
    """
    a, b = (side.without(flags) for side, flags in zip((a, b), _found_in_one(a, b), strict=True))
    nums: list[list[int]] = []
    for marked_in in (_handed_on, _recomputed, _in_other_micro_steps):
        marked = marked_in(a, b)
        left_out = a.table.filter(pa.array(marked[0]))
        nums.append([int(flags.sum()) for flags in marked])
        a, b = a.without(marked[0]), b.without(marked[1])
    return a, b, nums[0], nums[1], group_rows(left_out, VALUE_KEY).num_groups


def _found_in_one(a: RunSteps, b: RunSteps) -> list[Flags]:
    """Flag the losses of evaluations that the recorder found in one run alone, or in one run as a mean over ranks.

    Such a mean need not be the mean over all samples, because the ranks' batches may have different sizes.
    """
    keys = common_ids(a.table, b.table, ("step", "root", "name", "rank", "note"))
    found = [holds(side.table.column("note"), lambda note: "found" in note_members(note)) for side in (a, b)]
    return [flags & ~np.isin(own, keys[1 - i]) for i, (flags, own) in enumerate(zip(found, keys, strict=True))]


def _handed_on(a: RunSteps, b: RunSteps) -> list[Flags]:
    """Flag the values that ranks pass to each other, unless both runs have the same stages and experts.

    Two runs have the same stages if these values have the same ranks, stages, micro-batches and sizes. A size depends
    on whether ranks share or split a batch. Inputs and outputs of experts are flagged even if one run has them whole.
    """
    marked = [holds(side.table.column("note"), lambda note: stage_of(note)[1]) for side in (a, b)]
    keys = [_keys_between_stages(side.table.filter(pa.array(f))) for side, f in zip((a, b), marked, strict=True)]
    if keys[0] == keys[1]:
        marked = [np.zeros_like(flags) for flags in marked]
    notes = [side.table.column("note") for side in (a, b)]
    dealt_out = [holds(one, lambda note: note_members(note).get("per_rank") == NOT_OF_BATCH) for one in notes]
    experts = common_ids(a.table, b.table, ("module_path", "site", "rank"))
    if {*experts[0][dealt_out[0]]} != {*experts[1][dealt_out[1]]}:
        values = common_ids(a.table, b.table, ("module_path", "site"))
        gone = np.concatenate([ids[flags] for ids, flags in zip(values, dealt_out, strict=True)])
        marked = [flags | np.isin(ids, gone) for ids, flags in zip(values, marked, strict=True)]
    return marked


def _keys_between_stages(table: Any) -> set[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in ("rank", "micro_step", "numel", "note")]
    return {(*key, str(json.loads(note)[HANDED_ON])) for *key, note in zip(*columns, strict=True)}


def _recomputed(a: RunSteps, b: RunSteps) -> list[Flags]:
    """Flag recomputed rows if only one run has any."""
    marked = [holds(side.table.column("phase"), "recompute".__eq__) for side in (a, b)]
    return marked if marked[0].any() != marked[1].any() else [np.zeros_like(flags) for flags in marked]


def _in_other_micro_steps(a: RunSteps, b: RunSteps) -> list[Flags]:
    """Flag the micro-steps of a batch that the two runs divide into different numbers of micro-steps.

    Two runs divide the same batch if some value has equally many elements in both, over all micro-steps of a step. So a
    micro-batch that one run has lost is still a difference.
    """
    slices = common_ids(a.table, b.table, _SLICED)
    num_slices = 1 + max(int(ids.max(initial=-1)) for ids in slices)
    micro_steps = [integers(side.table.column("micro_step"), -1) for side in (a, b)]
    lasts = np.full((2, num_slices), -1, np.int64)
    for last, ids, numbers_of in zip(lasts, slices, micro_steps, strict=True):
        np.maximum.at(last, ids, numbers_of)
    is_uneven = (lasts[0] != lasts[1]) & (lasts >= 0).all(axis=0)
    uneven = [is_uneven[ids] & (number >= 0) for ids, number in zip(slices, micro_steps, strict=True)]
    left, right = (side.table.filter(pa.array(flags)) for side, flags in zip((a, b), uneven, strict=True))
    wholes = common_ids(left, right, _WHOLE_KEY)
    num_wholes = 1 + max(int(ids.max(initial=-1)) for ids in wholes)
    totals = [
        np.bincount(w, integers(t.column("numel"), 0), num_wholes) for w, t in zip(wholes, (left, right), strict=True)
    ]
    is_one_batch = np.zeros(num_slices, np.bool_)
    is_equal = (totals[0] == totals[1]) & (totals[0] > 0)
    is_one_batch[slices[0][uneven[0]][is_equal[wholes[0]]]] = True
    return [is_one_batch[ids] & (number >= 0) for ids, number in zip(slices, micro_steps, strict=True)]


PART = "part_of_batch"
"""The name of the column that says on which part of the batch the rank of a row worked."""


class Alignment(NamedTuple):
    """The pairs of rows of two tables, and the rows without a partner, as row indices."""

    a: Integers
    """For each pair, the index of the first run's row, ascending."""
    b: Integers
    only_a: Integers
    """The first run's rows whose values the second run lacks."""
    only_b: Integers
    on_other_parts: Integers = np.zeros(0, np.int64)
    """The first run's rows of single ranks that cannot be compared, although the second run has them, too. The ranks
    worked on different parts of the batch, and neither run has a row for all ranks."""


def align(a: Any, b: Any) -> Alignment:
    """Pair the rows of two tables by all columns that identify a value.

    A row for all ranks is paired with a row for all ranks. If the other run has the value only rank by rank (replicas
    differ, or no layout fits), the row is paired with each rank's row of the same shape. A row of a single rank is
    paired with the row of this rank in the other run, if the rank worked on the same part of the batch in both. It is
    redundant where its run also has a row for all ranks, and may stay without a partner.
    """
    id_a, id_b = common_ids(a, b, VALUE_KEY)
    rank_a, rank_b = (integers(table.column("rank")) for table in (a, b))
    num_ids = int(max(id_a.max(initial=-1), id_b.max(initial=-1))) + 1
    width = int(max(rank_a.max(initial=-1), rank_b.max(initial=-1))) + 2
    left, right = join(id_a * width + rank_a + 1, id_b * width + rank_b + 1)
    is_same = _have_one_part(a, b, left, right) | (rank_a[left] < 0)
    has_whole_a, has_whole_b = (_flags(ids[ranks < 0], num_ids) for ids, ranks in ((id_a, rank_a), (id_b, rank_b)))
    # These rows are of values that have a row for all ranks in one run, and only rows of single ranks in the other.
    whole_a = np.flatnonzero((rank_a < 0) & ~has_whole_b[id_a])
    whole_b = np.flatnonzero((rank_b < 0) & ~has_whole_a[id_b])
    pieces_a = np.flatnonzero((rank_a >= 0) & ~has_whole_a[id_a] & has_whole_b[id_a])
    pieces_b = np.flatnonzero((rank_b >= 0) & ~has_whole_b[id_b] & has_whole_a[id_b])
    one, two = join(id_a[whole_a], id_b[pieces_b])
    three, four = join(id_a[pieces_a], id_b[whole_b])
    cross_a = np.concatenate([whole_a[one], pieces_a[three]])
    cross_b = np.concatenate([pieces_b[two], whole_b[four]])
    is_alike = _same(a.select(["shape"]).take(pa.array(cross_a)), b.select(["shape"]).take(pa.array(cross_b)), "shape")
    pairs_a = np.concatenate([left[is_same], cross_a[is_alike]])
    pairs_b = np.concatenate([right[is_same], cross_b[is_alike]])
    order = np.lexsort((pairs_b, pairs_a))
    is_other = _flags(id_a[left[~is_same]], num_ids)  # if one rank's part differs, assume that all ranks' parts differ
    is_said_a = _flags(pairs_a, len(id_a)) | ((rank_a >= 0) & (has_whole_a | is_other)[id_a])
    is_said_b = _flags(pairs_b, len(id_b)) | ((rank_b >= 0) & (has_whole_b | is_other)[id_b])
    is_on_other_part = (rank_a >= 0) & (is_other & ~has_whole_a & ~has_whole_b)[id_a] & ~_flags(pairs_a, len(id_a))
    rest = (np.flatnonzero(flags) for flags in (~is_said_a, ~is_said_b, is_on_other_part))
    return Alignment(pairs_a[order], pairs_b[order], *rest)


def _have_one_part(a: Any, b: Any, rows_a: Integers, rows_b: Integers) -> npt.NDArray[np.bool_]:
    """Return a mask of the pairs whose ranks worked on the same part of the batch, or on an unknown part."""
    if PART not in a.column_names or PART not in b.column_names:
        return np.ones(len(rows_a), np.bool_)
    parts_a, parts_b = common_ids(a, b, (PART,))
    is_open_a, is_open_b = (table.column(PART).is_null().to_numpy() for table in (a, b))
    return np.asarray((parts_a[rows_a] == parts_b[rows_b]) | is_open_a[rows_a] | is_open_b[rows_b])


def _flags(indices: Integers, length: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(length, np.bool_)
    flags[indices] = True
    return flags
