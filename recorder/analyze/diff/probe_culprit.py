"""Finds the first number of the probe that differs between two runs.

The probe (``keep=probe``) has one number of each value at every step, so it also sees the steps of which rules keep
nothing else. Numbers are compared rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...checks.rows import MAX_STEPS
from ...errors import CorruptError
from ...numerics.keys import Integers, array_of, by_distinct, by_key, column_of, common_ids, group, holds, join
from ...numerics.moments import integers
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import Run
from ...run.selection import Selection
from ...sites import OF_PARAMETERS
from ...sites import UPDATE as UPDATE_SITE
from .culprit_findings import BY_PROBE, Culprit
from .culprit_search import BACKWARD, FORWARD, OTHER_INPUT, START, UPDATE, are_nearly_all
from .renames import NO_RENAMES, Renames
from .step_range import DiffOptions

_PHASES = {"param": START, "input": FORWARD, "output": FORWARD, "grad": BACKWARD, UPDATE_SITE: UPDATE}
"""For each site, the computation at fault if a number of the site differs first. The sites are in the order of a step,
because the number of a parameter is from before its update."""
_OF_ALL = "the loss, the reduction over ranks, or a clip"
_OTHER_NUMBER = "the root was called with another number of samples, or another number of times"
_VALUE = ("root", "module_path", "name")
_SERIES = (*_VALUE, "site", "phase", "mode", "scope", "dtype")
_NUMBERS = ("l2", "nan_count", "inf_count", "numel")


class ProbesCompared(NamedTuple):
    """The result of comparing the numbers of the probe of two runs."""

    num_compared: int = 0
    num_differing: int = 0
    culprit: Culprit | None = None
    """The first computation whose number differs. None if all numbers are equal."""


def compare_probes(a: Run, b: Run, options: DiffOptions) -> ProbesCompared:
    """Compare the numbers of the probe that both runs have.

    No number is compared if the runs have different ranks or too many numbers, if their ranks hold different parts of
    the values, or if the options allow differences: a tolerance is for elements, and a number is the norm of a value.
    """
    if a.ranks != b.ranks or options.noise or not options.tolerance.is_exact:
        return ProbesCompared()
    if any((size := probe_size(run.writers)) is None or size.num_numbers > MOST_PROBED for run in (a, b)):
        return ProbesCompared()
    sides = _Side(a, options.selection), _Side(b, options.selection, options.renames)
    try:
        num_compared, num_differing, step = _compare_ranks(*sides)
        if step is None:
            return ProbesCompared(num_compared)
        one, two = (side.at(step) for side in sides)
    except CorruptError:  # the error counts as damage of the run from now on
        return ProbesCompared()
    rows_a, rows_b = join(*common_ids(one, two, ("rank", *_SERIES)))
    one, two = one.take(column_of(rows_a)), two.take(column_of(rows_b))
    is_of_other_parts = one.column("numel") != two.column("numel") and _are_cut(one, two)
    if is_of_other_parts or _placements(a) != _placements(b):
        return ProbesCompared()
    differs = (_values(one) != _values(two)).any(0)
    first_site = min(one.column("site").filter(column_of(differs)).unique().to_pylist(), key=[*_PHASES].index)
    of_forward = (differs & holds(one.column("site"), site.__eq__) for site in ("input", "output"))
    given, made = ({*one.column("root").filter(column_of(them)).to_pylist()} for them in of_forward)
    if first_site == "input" and made - given:  # a model whose own input agrees may have made the other's input
        first_site, differs = "output", differs & holds(one.column("root"), (made - given).__contains__)
    at = np.flatnonzero(holds(one.column("site"), first_site.__eq__))
    pairs = zip(*(table.take(column_of(at)).to_pylist() for table in (one, two)), differs[at].tolist(), strict=True)
    wrong = [(row_a, row_b) for row_a, row_b, is_wrong in pairs if is_wrong]
    return ProbesCompared(num_compared, num_differing, _culprit(wrong, len(at), has_ranks=len(a.ranks) > 1))


def _are_cut(one: Any, two: Any) -> bool:
    """Return whether ranks hold other parts of a parameter in two runs. Batches may well have another size."""
    is_other = array_of(one.column("numel")) != array_of(two.column("numel"))
    return bool((is_other & holds(one.column("site"), (*OF_PARAMETERS, UPDATE_SITE).__contains__)).any())


def _placements(run: Run) -> set[str | None]:
    """Return how the parts of values lie in the global tensors, as the texts of the column `placements`."""
    batches = (batch for writer in run.writers for shard in writer.shards for batch in shard.columns(["placements"]))
    return {text for batch in batches for text in batch.column("placements").unique().to_pylist()}


def _values(table: Any) -> npt.NDArray[np.float32]:
    """Return the numbers of a table as [4, N], one row for each of `_NUMBERS`. A shard may have float32's digits."""
    return np.stack([array_of(table.column(name)).astype(np.float32) for name in _NUMBERS])


class _Side(NamedTuple):
    """One of the two runs, with what is compared of it."""

    run: Run
    selection: Selection
    renames: Renames = NO_RENAMES

    def tables(self, rank: int | None) -> Iterator[Any]:
        """Yield the selected numbers of one rank, or of all, batch by batch. Raise CorruptError for a damaged batch."""
        for table in probe_tables(writer for writer in self.run.writers if rank in (None, writer.rank)):
            columns = {name: table.column(name) for name in ("attempt", "rank", "step", *_NUMBERS)}
            texts = {name: table.column(name).cast(pa.string()) for name in _SERIES}
            table = self.selection.narrow(self.renames.apply(pa.table(columns | texts)))
            yield table.filter(column_of(holds(table.column("site"), _PHASES.__contains__)))

    def of_rank(self, rank: int, series: dict[tuple[str, ...], int]) -> tuple[Integers, npt.NDArray[np.float32]]:
        """Return a key for each number of a rank, and the numbers as [4, N]. Each series is added to `series`."""
        keys, attempts, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros((4, 0), np.float32)]
        for table in self.tables(rank):
            ids = by_distinct(table, _SERIES, lambda *one: series.setdefault(one, len(series)), np.int64)
            keys.append(ids * MAX_STEPS + integers(table.column("step")))
            attempts.append(integers(table.column("attempt")))
            values.append(_values(table))
        key = np.concatenate(keys)
        is_last = _are_of_last_attempt(np.concatenate(attempts), key % MAX_STEPS)
        return key[is_last], np.concatenate(values, axis=1)[:, is_last]

    def at(self, step: int) -> Any:
        """Return the numbers of all ranks at a step as a table."""
        table = pa.concat_tables(
            table.filter(column_of(integers(table.column("step")) == step)) for table in self.tables(None)
        )
        attempts, ranks = (integers(table.column(name)) for name in ("attempt", "rank"))
        return table.filter(column_of(_are_of_last_attempt(attempts, ranks)))


def _are_of_last_attempt(attempts: Integers, numbers: Integers) -> npt.NDArray[np.bool_]:
    """Return which rows are of the last attempt with their number, because several attempts may train a step."""
    if not len(attempts) or attempts.min() == attempts.max():
        return np.ones(len(attempts), np.bool_)
    ids = group([numbers]).ids
    last = np.zeros(int(ids.max()) + 1, np.int64)
    np.maximum.at(last, ids, attempts)
    return np.asarray(attempts == last[ids])


def _compare_ranks(a: _Side, b: _Side) -> tuple[int, int, int | None]:
    """Return how many numbers were compared and how many differ, and the first step at which one does.

    The numbers of one rank are in memory at a time: about 100 bytes for each number of both runs.
    """
    series: dict[tuple[str, ...], int] = {}
    num_compared = num_differing = 0
    first: int | None = None
    for rank in a.run.ranks:
        (keys_a, values_a), (keys_b, values_b) = (side.of_rank(rank, series) for side in (a, b))
        keys, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
        differs = (values_a[:, at_a] != values_b[:, at_b]).any(0)
        num_compared, num_differing = num_compared + len(keys), num_differing + int(differs.sum())
        if differs.any():
            step = int((keys[differs] % MAX_STEPS).min())
            first = step if first is None else min(first, step)
    return num_compared, num_differing, first


def _culprit(pairs: list[tuple[dict[str, Any], dict[str, Any]]], num_series: int, *, has_ranks: bool) -> Culprit:
    """Return the culprit among the pairs of one site and step that differ, in the order of execution of the first run.

    `num_series` is the number of pairs of the site at this step, including the pairs that are equal.
    """
    of_value = by_key((tuple(row[name] for name in _VALUE), (row, other)) for row, other in pairs)
    site = pairs[0][0]["site"]
    # A backward computes the gradients of the last modules first.
    (root, path, name), blamed = [*of_value.items()][-1 if site == "grad" else 0]
    ranks = sorted(row["rank"] for row, _ in blamed) if has_ranks else []
    is_of_all = site in (*OF_PARAMETERS, UPDATE_SITE) and are_nearly_all(len(pairs), num_series)
    row, other = blamed[0]
    statistic = "l2" if row["numel"] == other["numel"] else "numel"
    other_input = OTHER_INPUT if statistic == "l2" else _OTHER_NUMBER
    other_input += "" if row["mode"] == "train" else " in an evaluation"
    why = other_input if (site, path) == ("input", "") else _OF_ALL if site == "grad" and is_of_all else ""
    return Culprit(
        step=row["step"], phase=_PHASES[site], root=root, module_path=None if is_of_all else path, site=site, name=name,
        seen_at=path, micro_step=None, call=0, rank=ranks[0] if len(ranks) == 1 else None, ranks=ranks,
        why=why, num_params=len(of_value), kind=BY_PROBE,
        statistic=statistic, statistic_a=row[statistic], statistic_b=other[statistic],
        nonfinite_a=_num_nonfinite(row), nonfinite_b=_num_nonfinite(other),
    )  # fmt: skip


def _num_nonfinite(row: dict[str, Any]) -> int:
    return int(row["nan_count"] + row["inf_count"])
