"""Finds the first number of the probe that differs between two runs.

The probe (``keep=probe``) has one number of each value at every step, so it also sees the steps of which rules keep
nothing else. Numbers are compared rank by rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...errors import CorruptError
from ...numerics.keys import array_of, by_key, column_of, common_ids, group_rows, holds, join
from ...numerics.moments import integers
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import Run
from ...sites import OF_PARAMETERS
from ...sites import UPDATE as UPDATE_SITE
from .culprit_findings import BY_PROBE, Culprit
from .culprit_search import BACKWARD, FORWARD, OTHER_INPUT, START, UPDATE, are_nearly_all
from .step_range import DiffOptions

_PHASES = {"param": START, "input": FORWARD, "output": FORWARD, "grad": BACKWARD, UPDATE_SITE: UPDATE}
"""For each site, the computation at fault if a number of the site differs first. The sites are in the order of a step,
because the number of a parameter is from before its update."""
_OF_ALL = "the loss, the reduction over ranks, or a clip"
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
    try:
        tables = _numbers(a), options.renames.apply(_numbers(b))
    except CorruptError:  # the error counts as damage of the run from now on
        return ProbesCompared()
    one, two = (options.selection.narrow(table) for table in tables)
    rows_a, rows_b = join(*common_ids(one, two, ("rank", "step", *_SERIES)))
    one, two = one.take(column_of(rows_a)), two.take(column_of(rows_b))
    differs = np.zeros(len(rows_a), np.bool_)
    for name in _NUMBERS:  # the numbers in a shard may have only the digits of a float32
        left, right = (array_of(table.column(name)).astype(np.float32) for table in (one, two))
        differs |= left != right
    if not differs.any():
        return ProbesCompared(num_compared=len(rows_a))
    steps = integers(one.column("step"))
    at_step = steps == steps[differs].min()
    sizes = [array_of(table.column("numel"))[at_step] for table in (one, two)]
    if (sizes[0] != sizes[1]).any() or _placements(a) != _placements(b):
        return ProbesCompared()
    sites = pa.array(at_step & differs)
    first_site = min(one.column("site").filter(sites).unique().to_pylist(), key=[*_PHASES].index)
    at = np.flatnonzero(at_step & holds(one.column("site"), first_site.__eq__))
    pairs = zip(*(table.take(column_of(at)).to_pylist() for table in (one, two)), differs[at].tolist(), strict=True)
    wrong = [(row_a, row_b) for row_a, row_b, is_wrong in pairs if is_wrong]
    culprit = _culprit(wrong, len(at), has_ranks=len(a.ranks) > 1)
    return ProbesCompared(len(rows_a), int(differs.sum()), culprit)


def _placements(run: Run) -> set[str | None]:
    """Return how the parts of values lie in the global tensors, as the texts of the column `placements`."""
    batches = (batch for writer in run.writers for shard in writer.shards for batch in shard.columns(["placements"]))
    return {text for batch in batches for text in batch.column("placements").unique().to_pylist()}


def _numbers(run: Run) -> Any:
    """Return the numbers of a run. If several attempts trained a step, those of the last attempt are returned."""
    table = pa.concat_tables(list(probe_tables(run.writers)))
    columns = {name: table.column(name) for name in ("attempt", "rank", "step", *_NUMBERS)}
    table = pa.table(columns | {name: table.column(name).cast(pa.string()) for name in _SERIES})
    groups, attempts = group_rows(table, ("rank", "step")), integers(table.column("attempt"))
    last = np.zeros(groups.num_groups, np.int64)
    np.maximum.at(last, groups.ids, attempts)
    is_known = holds(table.column("site"), _PHASES.__contains__)
    return table.filter(column_of(is_known & (attempts == last[groups.ids])))


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
    other_input = OTHER_INPUT if row["mode"] == "train" else f"{OTHER_INPUT} in an evaluation"
    why = other_input if (site, path) == ("input", "") else _OF_ALL if site == "grad" and is_of_all else ""
    return Culprit(
        step=row["step"], phase=_PHASES[site], root=root, module_path=None if is_of_all else path, site=site, name=name,
        seen_at=path, micro_step=None, call=0, rank=ranks[0] if len(ranks) == 1 else None, ranks=ranks,
        why=why, num_params=len(of_value), kind=BY_PROBE,
        statistic="l2", statistic_a=row["l2"], statistic_b=other["l2"],
        nonfinite_a=_num_nonfinite(row), nonfinite_b=_num_nonfinite(other),
    )  # fmt: skip


def _num_nonfinite(row: dict[str, Any]) -> int:
    return int(row["nan_count"] + row["inf_count"])
