"""When replicas came apart between the steps at which they were recorded, by the probe.

The probe has one number of a parameter at each step. Equal numbers prove nothing; different ones prove that replicas
came apart, and when.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...errors import CorruptError
from ...numerics.keys import group_rows
from ...numerics.moments import integers
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import Run

_NAMES = ("root", "module_path", "site", "name")


class ApartByProbe(NamedTuple):
    """The first value of a site of which ranks have different numbers in the probe."""

    key: tuple[str, str, str, str]
    step: int
    equal_step: int
    """The last step before, at which all ranks had the same number."""
    ranks: tuple[int, ...]
    """The ranks outside the largest group of equal ranks; all ranks where no group is the largest."""
    is_odd: bool
    """Whether a group is the largest: of two ranks nobody can say which of them is right."""


def apart_by_probe(run: Run, names: set[tuple[str, str, str, str]]) -> list[ApartByProbe]:
    """Return, by site, the first of some values whose ranks came apart by the probe after they were equal.

    A run with more than `MOST_PROBED` numbers is not looked at.
    """
    size = probe_size(run.writers)
    if size is None or size.num_numbers > MOST_PROBED or not names:
        return []
    tables: list[Any] = []
    try:
        for table in probe_tables(run.writers):
            values = group_rows(table, _NAMES)
            is_named = [one in names for one in _names_at(table, values.firsts)]
            is_wanted = np.array(is_named, np.bool_)[values.ids] & table.column("global_numel").is_null().to_numpy()
            tables.append(table.filter(pa.array(is_wanted)))
    except CorruptError:  # the reading of the rows says which part is damaged
        return []
    table = pa.concat_tables(tables).unify_dictionaries()
    steps, ranks = integers(table.column("step")), integers(table.column("rank"))
    sizes = table.column("l2").to_numpy().astype(np.float32)  # a shard may have no more digits
    values = group_rows(table, _NAMES)
    groups = group_rows(table, (*_NAMES, "phase", "scope", "attempt", "step"))
    low, high = np.full(groups.num_groups, np.inf, np.float32), np.zeros(groups.num_groups, np.float32)
    np.minimum.at(low, groups.ids, sizes)
    np.maximum.at(high, groups.ids, sizes)
    value_of, step_of, differs = values.ids[groups.firsts], steps[groups.firsts], low != high
    first = np.full(values.num_groups, np.iinfo(np.int64).max)
    np.minimum.at(first, value_of[differs], step_of[differs])
    last_equal = np.full(values.num_groups, -1)
    is_before = ~differs & (step_of < first[value_of])
    np.maximum.at(last_equal, value_of[is_before], step_of[is_before])
    apart = np.flatnonzero(np.isin(np.arange(values.num_groups), value_of[differs]) & (last_equal >= 0))
    found: dict[str, ApartByProbe] = {}
    apart = apart[np.argsort(first[apart], kind="stable")]
    for value, key in zip(apart.tolist(), _names_at(table, values.firsts[apart]), strict=True):
        if key[2] not in found:
            rows = np.flatnonzero((values.ids == value) & (steps == first[value]))
            rows = rows[np.argsort(ranks[rows])]
            _, inverse, counts = np.unique(sizes[rows], return_inverse=True, return_counts=True)
            largest = np.flatnonzero(counts == counts.max())
            is_odd = inverse != largest[0] if len(largest) == 1 else np.ones(len(rows), np.bool_)
            odd = tuple(ranks[rows][is_odd].tolist())
            found[key[2]] = ApartByProbe(key, int(first[value]), int(last_equal[value]), odd, len(largest) == 1)
    return list(found.values())


def _names_at(table: Any, rows: Any) -> list[tuple[str, str, str, str]]:
    return list(zip(*(table.column(name).take(pa.array(rows)).to_pylist() for name in _NAMES), strict=True))
