"""Statistics over steps, ranks and modules, combined from those of the rows, and why a row has none.

Never reads a payload.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, STATISTICS, note_members
from ..errors import LookupFailedError, not_installed
from ..layout.placement import reduce_op
from ..numerics.keys import VALUE_KEY, codes, group, group_rows, holds
from ..numerics.moments import added_by_group, combine_rows
from ..run.notes import MissingRanks, Problems, without_numbers
from ..run.run import Run
from ..run.selection import RANKS_OWN, GlobalOptions, Selection
from ..run.step_ranges import Mapper, attempt_step_ranges, global_step_ranges, map_serially
from ..system.text import listed

if TYPE_CHECKING:
    import pandas

GROUPS = {"step": ("step",), "module": ("root", "module_path"), "site": ("site",), "rank": ("rank",), "name": ("name",)}
"""Columns by the word that groups by them."""
_NEVER_MIXED = ("site", "phase", "mode", "scope")
"""Numbers of different kinds, and those of a value computed twice, are never added up."""
INNER = "inner"
"""Column of grouped statistics, where there are such rows: which tensor inside of composite ones, such as ``indices``.
Numbers of these mean different things too."""
_VALUE = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "mode", "phase", "scope", "root", "module_path", "site",
    "name", "dtype", "shape", "numel",
)  # fmt: skip
_NUMBERS = (*STATISTICS, *COUNTS)
HISTOGRAM = "histogram"
"""Column of the histograms, for those who ask for them: of a group those of its rows, added up."""
WHY = "why"
"""Column of the reason; null where a row has statistics, and is all ranks' or was never to be."""
REASON_COLUMNS = ("note", "placements", "nan_count", "mean", "numel")
"""What `with_why` looks at."""
_HAS_ALL, _HAS_COUNTS, _IS_EMPTY, _HAS_NONE = range(4)
_TOLD = tuple(name for name in REASON_COLUMNS if name not in (*_VALUE, *_NUMBERS))
_MAX_NAMED = 3
_LEAF = ("module_path", "site", "name")
LONG_COLUMNS = ("step", "rank", "root", "module_path", "site", "name", "statistic", "value")


class Statistics(NamedTuple):
    """What `statistics` found."""

    table: Any
    """A `pa.Table`. Ungrouped: one row a value; `why` says why it has no statistics, or no global tensor. Grouped: the
    keys, `inner` where there are tensors inside of composite ones, `rows`, `rows_without` (rows that have none and so
    are not in it), `numel`, the statistics and the counts."""
    notes: list[str]
    """What is not in the table, and why; of which values ranks are missing."""
    problems: Sequence[str] = ()
    """With `across_ranks`: what contradicts itself in the rows, or in the layouts that were given."""
    is_whole: bool = True
    """False where something of the run is damaged, or values lack ranks."""
    damage: Sequence[str] = ()
    """What is damaged on disk, and so missing."""


def stats(
    run: Run,
    module: str | None = None,
    *,
    site: str | None = None,
    name: str | None = None,
    step: int | str | None = None,
    rank: int | str | None = None,
    by: str | Sequence[str] = (),
    across_ranks: bool = False,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    partial: bool = False,
    long: bool = False,
) -> pandas.DataFrame:
    """Statistics as a pandas frame; see `statistics`. What it leaves out is said in ``frame.attrs["notes"]``.

    What contradicts itself is in ``frame.attrs["problems"]``. Without `by` the column `why` says why a row has none, or
    stays with its rank.

    Args:
        run: from `open_run`.
        module: a module's path, or a glob over paths; all modules without.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rank: ranks, written like steps.
        by: ``step``, ``module``, ``site``, ``name``, ``rank``: combine the rows that agree in these. What is computed
            in another phase or mode is never mixed, nor the tensors inside of composite ones, such as the indices and
            the values of a sparse one (column `inner`), and ranks only with `across_ranks`.
        across_ranks: the statistics of the global tensors, replicas counted once.
        loss: with `across_ranks`, how activation gradients of the ranks are scaled; see `Run.view`.
        layouts: with `across_ranks`, how the ranks' values of some leaves lie; see `Run.view`.
        partial: where values lack ranks, take the numbers of the others; else such values have none, and `why` says so.
        long: one row a number, for plotting: columns step, rank, root, module_path, site, name, statistic, value, and
            micro_step, call, repeat, mode, phase where they tell rows apart.

    Raises:
        LookupFailedError: nothing is selected; the message says what there is.
        ImportError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise ImportError(not_installed("stats", "pandas", "analysis"))
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layouts, partial=partial)
    result = statistics(run, selection, options, by=(by,) if isinstance(by, str) else by)
    frame: pandas.DataFrame = (as_long(result.table) if long else result.table).to_pandas()
    frame.attrs |= {"notes": result.notes, "problems": list(result.problems)}
    return frame


def statistics(
    run: Run,
    selection: Selection,
    options: GlobalOptions = RANKS_OWN,
    *,
    by: Sequence[str] = (),
    with_histograms: bool = False,
    mapper: Mapper = map_serially,
) -> Statistics:
    """The statistics of values, or combined over all values that agree in `by`, as `pa.Table`.

    `mapper` works on ranges of steps: groups of groups combine like groups of rows. With `with_histograms` the table
    has the column `HISTOGRAM`.

    Raises:
        LookupFailedError: nothing is selected, or a word in `by` or an option is none.
    """
    words = [word.strip() for one in by for word in one.split(",")]
    for word in words:
        if word not in GROUPS:
            raise LookupFailedError(f"by {word!r}: choose of {', '.join(GROUPS)}")
    if options.across_ranks and ("rank" in words or selection.rank is not None):
        raise LookupFailedError(
            "statistics across ranks have no rank: leave out either --global or the rank, in --rank and in --by"
        )
    selection.check(run)
    options.check(run)
    keys = _keys(words if options.across_ranks else [*words, "rank"])
    more = (HISTOGRAM,) if with_histograms else ()
    ranges: list[tuple[int, ...]]
    if options.across_ranks:
        ranges = list(global_step_ranges(run.view(loss=options.loss, layouts=options.layouts)))
        joined = _joined(mapper(_GlobalStatistics, (run, selection, options, words, keys, more), ranges), selection)
    else:
        ranges = list(attempt_step_ranges(run))
        joined = _joined(mapper(_RankStatistics, (run, selection, options, words, keys, more), ranges), selection)
    if not joined.num_rows:
        raise selection.explain_nothing(run.table(["module_path", "site", "name", "step", "rank"]), _named(run))
    notes, problems = joined.partial.notes(is_taken=options.partial), joined.problems.texts()
    damage = sorted({*joined.damage, *run.problems})
    is_whole = not (joined.partial or damage)
    table = pa.concat_tables(joined.tables)
    if not words:
        return Statistics(table, notes, problems, is_whole, damage)
    if len(joined.tables) > 1:
        table = _combined(table, keys, more)
    notes += _say_without(table, joined.without)
    if joined.left_out:
        notes += _say_left_out(pa.concat_tables(joined.left_out))
    return Statistics(_without_empty_inner(table), notes, problems, is_whole, damage)


class _RangeStatistics(NamedTuple):
    """What some steps of a run, or all of them, come to."""

    tables: list[Any]
    """Rows, or groups of them."""
    left_out: list[Any]
    """Grouped: values that are in no group, because they stay per rank."""
    without: Counter[str]
    """Grouped: how many rows have no statistics, by the reason."""
    num_rows: int
    partial: MissingRanks
    problems: Problems
    damage: tuple[str, ...] = ()
    """What is damaged of what was read, as this process or a worker has found."""


class _RankStatistics:
    """Statistics of the ranks' own rows, or of a merged run."""

    def __init__(
        self,
        run: Run,
        selection: Selection,
        options: GlobalOptions,
        words: Sequence[str],
        keys: Sequence[str],
        more: Sequence[str],
    ) -> None:
        self._run, self._selection, self._words, self._keys = run, selection, words, keys
        self._more = more
        self._takes_partial = options.partial

    def __call__(self, attempt: int, first: int, last: int) -> _RangeStatistics:
        wanted = (pc.field("part") == 0) & (pc.field("attempt") == attempt)
        rows = self._run.table([*_VALUE, *_NUMBERS, *_TOLD, *self._more], wanted, steps=(first, last))
        table = self._selection.narrow(rows)
        partial = MissingRanks()
        if self._run.is_merged:
            partial.add(table)
            if partial and not self._takes_partial:
                table = without_numbers(table)
        if not self._words:
            combined, without = _told(table, self._more), Counter[str]()
        else:
            without = count_without(with_why(table))
            combined = _combined(_with_inner(table), self._keys, self._more)
        problems, damage = Problems(self._selection), tuple(self._run.problems)
        return _RangeStatistics([combined], [], without, table.num_rows, partial, problems, damage)


class _GlobalStatistics:
    """Statistics of the global tensors."""

    def __init__(
        self,
        run: Run,
        selection: Selection,
        options: GlobalOptions,
        words: Sequence[str],
        keys: Sequence[str],
        more: Sequence[str],
    ) -> None:
        self._run, self._view = run, run.view(loss=options.loss, layouts=options.layouts)
        self._selection, self._words, self._keys = selection, words, keys
        self._more = more
        self._takes_partial = options.partial

    def __call__(self, first: int, last: int) -> _RangeStatistics:
        rows = self._view.rows(first, last)
        problems, partial = Problems(self._selection), MissingRanks()
        problems.add(rows.findings)
        table = self._selection.narrow(rows.table)
        num_rows = table.num_rows
        partial.add(table)
        if partial and not self._takes_partial:
            table = without_numbers(table)
        damage = tuple(self._run.problems)
        if not self._words:
            return _RangeStatistics([_told(table, self._more)], [], Counter(), num_rows, partial, problems, damage)
        table, stays = _without_rank_rows(with_why(table))
        without = count_without(table)
        combined = _combined(_with_inner(table), self._keys, self._more)
        return _RangeStatistics([combined], [stays], without, num_rows, partial, problems, damage)


def _joined(ranges: Iterable[_RangeStatistics], selection: Selection) -> _RangeStatistics:
    """Put the ranges together in their order."""
    total = _RangeStatistics([], [], Counter(), 0, MissingRanks(), Problems(selection))
    for one_range in ranges:
        total.tables.extend(one_range.tables)
        total.left_out.extend(one_range.left_out)
        total.without.update(one_range.without)
        total.partial.join(one_range.partial)
        total.problems.join(one_range.problems)
        damage = tuple(dict.fromkeys([*total.damage, *one_range.damage]))
        total = total._replace(num_rows=total.num_rows + one_range.num_rows, damage=damage)
    return total


def _named(run: Run) -> str:
    return f"run {run.name}"


def as_long(table: Any) -> Any:
    """One row a number, without those that are null."""
    keys = [name for name in table.column_names if name in (*LONG_COLUMNS, *_NEVER_MIXED, INNER)]
    keys += [name for name in ("micro_step", "call", "repeat") if name in table.column_names]
    tables = []
    for statistic in _NUMBERS:
        known = table.filter(pc.field(statistic).is_valid())
        values = known.column(statistic).cast(pa.float64())
        named = pa.chunked_array([pa.DictionaryArray.from_arrays(np.zeros(known.num_rows, np.int32), [statistic])])
        table_of_one = (
            known.select(keys).append_column("statistic", named.cast(pa.string())).append_column("value", values)
        )
        tables.append(table_of_one)
    return pa.concat_tables(tables)


def inner_leaves(table: Any) -> Any:
    """Which tensor inside a composite one each row with `name` and `note` is, such as ``indices``; else null."""
    is_inner = holds(table.column("note"), lambda note: "inner_of" in note_members(note))
    leaves = pc.replace_substring_regex(table.column("name").cast(pa.string()), pattern=r"^.*\.", replacement="")
    return pc.if_else(pa.array(is_inner), leaves, pa.scalar(None, pa.string()))


def _told(table: Any, more: Sequence[str]) -> Any:
    return with_why(table).select([*_VALUE, *_NUMBERS, *more, WHY])


def _with_inner(table: Any) -> Any:
    return table.append_column(INNER, inner_leaves(table))


def _without_empty_inner(table: Any) -> Any:
    return table.drop_columns([INNER]) if table.column(INNER).null_count == table.num_rows else table


def _keys(words: Iterable[str]) -> list[str]:
    wanted = [column for word in GROUPS if word in words for column in GROUPS[word]]
    return list(dict.fromkeys([*wanted, *_NEVER_MIXED, INNER]))


def _combined(table: Any, keys: Sequence[str], more: Sequence[str]) -> Any:
    """One row a group, in the order in which they first appear."""
    groups = group_rows(table, keys)
    columns = {name: table.column(name).take(pa.array(groups.firsts)) for name in keys}
    columns |= combine_rows(table, groups.ids, groups.num_groups)
    for name in more:
        columns[name] = pa.array(added_by_group(table.column(name), groups.ids, groups.num_groups), pa.binary())
    return pa.table(columns)


def _without_rank_rows(table: Any) -> tuple[Any, Any]:
    """The rows of global values, and of those without one the values that stay per rank."""
    is_rank = table.column("rank").is_valid().to_numpy()
    groups = group_rows(table, VALUE_KEY)
    has_global = np.zeros(groups.num_groups, np.bool_)
    has_global[groups.ids[~is_rank]] = True
    stays = table.filter(pa.array(is_rank & ~has_global[groups.ids])).select([*_LEAF, WHY])
    return table.filter(pa.array(~is_rank)), stays.group_by([*_LEAF, WHY], use_threads=False).aggregate([])


def _say_without(table: Any, reasons: Counter[str]) -> list[str]:
    without, total = (pc.sum(table.column(name)).as_py() or 0 for name in ("rows_without", "rows"))
    if not without:
        return []
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    return [f"without: {without} of {total} rows have no statistics and are in none of these numbers: {why}"]


def _say_left_out(stays: Any) -> list[str]:
    values: dict[str, str] = {}
    for v in stays.to_pylist():
        values.setdefault(" ".join(filter(None, (repr(v["module_path"]), v["site"], v["name"]))), v[WHY])
    if not values:
        return []
    shown = listed((f"{value} ({why})" for value, why in values.items()), _MAX_NAMED)
    return [f"left out, because they stay per rank: {shown}; show them with --by rank"]


def with_why(table: Any) -> Any:
    """A `pa.Table` of rows with a column more: `WHY`."""
    has_counts, has_mean = (table.column(name).is_valid().to_numpy() for name in ("nan_count", "mean"))
    is_empty = pc.equal(table.column("numel"), 0).to_numpy()
    has = np.select([has_mean, ~has_counts, is_empty], [_HAS_ALL, _HAS_NONE, _IS_EMPTY], _HAS_COUNTS)
    groups = group([codes(table.column("note")), codes(table.column("placements")), has.astype(np.int64)])
    firsts = pa.array(groups.firsts)
    notes, placements = (table.column(name).take(firsts).to_pylist() for name in ("note", "placements"))
    texts = [_why(*one) for one in zip(notes, placements, has[groups.firsts].tolist(), strict=True)]
    return table.append_column(WHY, pa.array(texts, pa.string()).take(pa.array(groups.ids)))


def count_without(table: Any) -> Counter[str]:
    """How many rows have no statistics for which reason; of a table that `with_why` gave."""
    without = table.filter(pc.field("nan_count").is_null()).column(WHY).value_counts().to_pylist()
    return Counter({one["values"] or "": one["counts"] for one in without})


def _why(note: str | None, placements: str | None, has: int) -> str | None:
    told = note_members(note)
    reasons = [] if has == _HAS_ALL else [_no_statistics(told, placements, has)]
    if isinstance(told.get("per_rank"), str):
        reasons.append(f"per rank: {told['per_rank']}")
    return "; ".join(filter(None, reasons)) or None  # of a row with counts and no more these tell: nothing is finite


def _no_statistics(told: dict[str, Any], placements: str | None, has: int) -> str:
    reason, missing = told.get("no_statistics"), told.get("partial")
    if reason == "Partial":
        return f"a summand, not yet reduced over ranks ({reduce_op(placements) or 'sum'})"
    if reason == "reduced over ranks":
        return "reduced over ranks: statistics of summands do not add up"
    if reason in ("partial", None) and isinstance(missing, list):
        return f"lacks rank {listed(missing)}"
    if reason == "error":
        return "computing them failed"
    if isinstance(reason, str):
        return reason if " " in reason else f"{reason} has none"
    if has == _HAS_NONE:
        return "not asked for: the rules keep no stats of it"
    return "it has no elements" if has == _IS_EMPTY else ""
