"""Combines the statistics of recorded rows over steps, ranks and modules. Says why a row has no statistics.

The module also makes the output of `recorder stats`. It must never read a payload.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, STATISTICS, note_members
from ..errors import LookupFailedError, not_installed
from ..layout.placement import reduce_op
from ..numerics.distributions import HISTOGRAM_LEGEND, histogram_lines, histogram_of_row, subnormal_count
from ..numerics.keys import VALUE_KEY, by_key, codes, group, group_rows, holds
from ..numerics.moments import added_by_group, combine_rows, long_form
from ..rules import hint
from ..run.notes import MissingRanks, Problems, without_numbers
from ..run.probe import PROBE_SCHEMA, probe_size, probe_tables
from ..run.reply import Reply, Table
from ..run.run import Run
from ..run.selection import RANKS_OWN, GlobalOptions, Selection
from ..run.step_ranges import Mapper, attempt_step_ranges, global_step_ranges, map_serially
from ..sites import UPDATE
from ..system.text import listed, number, value_in_words

if TYPE_CHECKING:
    import pandas

GROUPS = {"step": ("step",), "module": ("root", "module_path"), "site": ("site",), "rank": ("rank",), "name": ("name",)}
"""For each word of `by`, the columns by which rows are grouped."""
_NEVER_MIXED = ("site", "phase", "mode", "scope")
"""Rows that differ in these columns are never combined, because their numbers have different meanings."""
INNER = "inner"
"""The column of grouped statistics that names an inner tensor, such as the ``indices`` of a sparse tensor. Numbers of
different inner tensors are never combined."""
_VALUE = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "mode", "phase", "scope", "root", "module_path", "site",
    "name", "dtype", "shape", "numel",
)  # fmt: skip
_NUMBERS = (*STATISTICS, *COUNTS)
_PROBED = ("attempt", "rank", "step", "root", "module_path", "site", "name", "phase", "mode", "scope")
"""The columns by which a value of the probe has a row at a step."""
HISTOGRAM = "histogram"
"""The column of histograms, which is read only on request. A group has the sum of the histograms of its rows."""
WHY = "why"
"""The column that says why a row has no statistics or belongs to one rank. Null for all other rows."""
REASON_COLUMNS = ("note", "placements", "nan_count", "mean", "numel")
_HAS_ALL, _HAS_COUNTS, _IS_EMPTY, _HAS_NONE = range(4)
_OTHER_REASONS = tuple(name for name in REASON_COLUMNS if name not in (*_VALUE, *_NUMBERS))
_MAX_NAMED = 3
_LEAF = ("module_path", "site", "name")
LONG_COLUMNS = ("step", "rank", "root", "module_path", "site", "name", "statistic", "value")


class Statistics(NamedTuple):
    """The result of `statistics`."""

    table: Any
    """A `pa.Table`. Without groups, it has one row for each value; `why` says why a row has no statistics or belongs to
    one rank. With groups, it has the keys, `inner` if there are inner tensors, `rows`, `rows_without` (the number of
    rows without statistics, which no other number includes), `numel`, the statistics and the counts."""
    notes: list[str]
    """Notes on rows that are not in the table, with the reason, and on values that lack ranks."""
    problems: Sequence[str] = ()
    """For statistics across ranks, texts about contradictions in the rows, or in the layouts that the caller gave."""
    is_whole: bool = True
    """False if a part of the run is damaged, or if values lack ranks."""
    damage: Sequence[str] = ()
    """Texts about damaged files, whose rows are missing."""


def stats(
    run: Run,
    module: str | None = None,
    *,
    site: str | None = None,
    name: str | None = None,
    step: int | str | None = None,
    rank: int | str | None = None,
    root: str | None = None,
    by: str | Sequence[str] = (),
    across_ranks: bool = False,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    partial: bool = False,
    probe: bool = False,
    long: bool = False,
) -> pandas.DataFrame:
    """Return the statistics of a run as a pandas frame.

    ``frame.attrs["notes"]`` says which rows are left out. ``frame.attrs["problems"]`` has contradictions in the run.
    Without `by`, the column `why` says why a row has no statistics, or belongs to a single rank.

    Args:
        run: from `open_run`.
        module: a module's path, or a glob over paths; None for all modules.
        site: one site, or several with commas.
        name: a name at the site, or a glob.
        step: a step, or several as in rules: ``"0:100"``, ``"::10"``.
        rank: ranks, written like steps.
        root: the name of a model, or a glob, where a run has several models.
        by: what combined rows have in common: ``step``, ``module``, ``site``, ``name``, ``rank``. Rows of different
            phases or modes are never combined, nor rows of different inner tensors, such as the indices and values of
            a sparse tensor (column `inner`), nor rows of several ranks without `across_ranks`.
        across_ranks: whether to return the statistics of the ranks' tensors put together. Replicas count once.
        loss: with `across_ranks`, how activation gradients of the ranks are scaled; see `Run.view`.
        layouts: with `across_ranks`, how the ranks' chunks of some values lie in the global tensor; see `Run.view`.
        partial: whether a value that lacks ranks gets the statistics of the present ranks, or only a reason in `why`.
        probe: whether to return the norms of the probe, too, where no row has the value at the step.
        long: whether to return one row for each number, for plotting, with the columns step, rank, root, module_path,
            site, name, statistic, value, and micro_step, call, repeat, mode, phase where rows differ in them.

    Raises:
        LookupFailedError: nothing is selected; the message lists the choices.
        ImportError: pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise ImportError(not_installed("stats", "pandas", "analysis"))
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank, root=root)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layouts, partial=partial)
    result = statistics(run, selection, options, by=(by,) if isinstance(by, str) else by, with_probe=probe)
    frame: pandas.DataFrame = (as_long(result.table) if long else result.table).to_pandas()
    frame.attrs |= {"notes": result.notes, "problems": list(result.problems)}
    return frame


def statistics(
    run: Run,
    selection: Selection,
    options: GlobalOptions = RANKS_OWN,
    *,
    by: Sequence[str] = (),
    with_probe: bool = False,
    with_histograms: bool = False,
    mapper: Mapper = map_serially,
) -> Statistics:
    """Return the statistics of each value. With `by`, combine the statistics of all values that agree in `by`.

    `mapper` computes groups of rows in each range of steps. The groups of all ranges are combined in this process. With
    `with_probe` the table has a row for each number of the probe whose value has no row at its step. With
    `with_histograms` the table has the column `HISTOGRAM`.

    Raises:
        LookupFailedError: nothing is selected, or a word in `by` or an option is unknown.
    """
    words = [word.strip() for one in by for word in one.split(",")]
    for word in words:
        if word not in GROUPS:
            raise LookupFailedError(f"by {word!r}: choose of {', '.join(GROUPS)}")
    if options.across_ranks and ("rank" in words or selection.rank is not None):
        raise LookupFailedError(
            "statistics across ranks have no rank: leave out either --global or the rank, in --rank and in --by"
        )
    if with_probe and (words or options.across_ranks):
        raise LookupFailedError(
            "the probe's numbers are those of single ranks and are never combined: leave out --probe, or --global and "
            "--by"
        )
    selection.check(run, more_sites=[UPDATE] if with_probe else [])
    options.check(run)
    keys = _keys(words if options.across_ranks else [*words, "rank"]) if words else []
    more = (HISTOGRAM,) if with_histograms else ()
    view = run.view(loss=options.loss, layouts=options.layouts) if options.across_ranks else None
    ranges: list[tuple[int, ...]] = [*(attempt_step_ranges(run) if view is None else global_step_ranges(view))]
    if with_probe and not ranges:
        ranges = [(0, 0, 0)]  # the probe has numbers of a run whose rules kept nothing else
    answers = list(mapper(_RangeStatistics, (run, selection, options, keys, more), ranges))
    missing, problems = MissingRanks(), Problems(selection)
    for one in answers:
        missing.join(one.partial)
        problems.join(one.problems)
    table = pa.concat_tables([one.table for one in answers]) if answers else None
    probe_notes: list[str] = []
    if with_probe and table is not None:
        table, probe_notes = _with_probe(run, selection, table)
    if table is None or not (table.num_rows or any(one.num_rows for one in answers)):
        columns = ["root", "module_path", "site", "name", "step", "rank"]
        raise selection.explain_nothing(run.table(columns), f"run {run.name}", run.lost)
    notes = [*missing.notes(is_taken=options.partial), *probe_notes]
    damage = sorted({*run.problems, *(text for one in answers for text in one.damage)})
    if words:
        table = _combined(table, keys, more) if len(answers) > 1 else table
        notes += _say_without(table, sum((one.without for one in answers), Counter[str]()))
        stays = [one.left_out for one in answers if one.left_out is not None]
        notes += _say_left_out(pa.concat_tables(stays)) if stays else []
        table = table.drop_columns([INNER]) if table.column(INNER).null_count == table.num_rows else table
    return Statistics(table, notes, problems.texts(), not (missing or damage), damage)


class _RangeAnswer(NamedTuple):
    table: Any
    left_out: Any
    """A table of the values that only have rows of single ranks, and so are in no group; None without groups."""
    without: Counter[str]
    """If rows are grouped, the number of rows without statistics, by the reason."""
    num_rows: int
    partial: MissingRanks
    problems: Problems
    damage: tuple[str, ...]


class _RangeStatistics:
    """Computes the statistics of a range of steps, from rows of single ranks or of a merged run, or global tensors."""

    def __init__(
        self, run: Run, selection: Selection, options: GlobalOptions, keys: Sequence[str], more: Sequence[str]
    ) -> None:
        self._run, self._selection, self._keys, self._more = run, selection, keys, more
        self._takes_partial = options.partial
        self._view = run.view(loss=options.loss, layouts=options.layouts) if options.across_ranks else None

    def __call__(self, *steps: int) -> _RangeAnswer:
        """Return the statistics of the steps (first, last), or of (attempt, first, last) for rows of single ranks."""
        problems, partial = Problems(self._selection), MissingRanks()
        if self._view is None:
            attempt, first, last = steps
            wanted = (pc.field("part") == 0) & (pc.field("attempt") == attempt)
            columns = [*_VALUE, *_NUMBERS, *_OTHER_REASONS, *self._more]
            rows = self._run.table(columns, wanted, steps=(first, last))
        else:
            first, last = steps
            loaded = self._view.rows(first, last)
            problems.add(loaded.findings)
            rows = loaded.table
        table = self._selection.narrow(rows)
        num_rows = table.num_rows
        if self._view is not None or self._run.is_merged:
            partial.add(table)
            table = without_numbers(table) if partial and not self._takes_partial else table
        table, stays, without = with_why(table), None, Counter[str]()
        if not self._keys:
            table = table.select([*_VALUE, *_NUMBERS, *self._more, WHY])
        else:
            if self._view is not None:
                table, stays = _without_rank_rows(table)
            counts = table.filter(pc.field("nan_count").is_null()).column(WHY).value_counts().to_pylist()
            without = Counter({one["values"] or "": one["counts"] for one in counts})
            table = _combined(table.append_column(INNER, inner_leaves(table)), self._keys, self._more)
        return _RangeAnswer(table, stays, without, num_rows, partial, problems, tuple(self._run.problems))


def _with_probe(run: Run, selection: Selection, table: Any) -> tuple[Any, list[str]]:
    """Return the rows of single ranks, and a row for each number of the probe whose value has no row at its step.

    Also return notes on steps of which the probe has no numbers.
    """
    size, notes = probe_size(run.writers), []
    if size is None:
        where = "; those of a merged run are in the run that was merged" * run.is_merged
        notes.append(f"this run has no numbers of the probe{where}")
    elif size.last_step < max(run.steps, default=0):
        why = "the last block is not written yet, or was lost with a killed process"
        notes.append(f"the numbers of the probe end at step {size.last_step}: {why}")
    batches = (selection.narrow(batch) for batch in probe_tables(run.writers))  # all numbers may not fit into memory
    probed = pa.concat_tables([PROBE_SCHEMA.empty_table(), *batches]).unify_dictionaries()
    num_bad = pc.add(probed.column("nan_count"), probed.column("inf_count"))
    norm = pc.if_else(pc.less(num_bad, probed.column("numel")), probed.column("l2"), None)  # as that of a row
    probed = probed.set_column(PROBE_SCHEMA.get_field_index("l2"), PROBE_SCHEMA.field("l2"), norm)
    columns = [
        probed.column(one.name).cast(one.type)
        if one.name in probed.column_names
        else pa.nulls(probed.num_rows, one.type)
        for one in table.schema
    ]
    columns[table.schema.get_field_index(WHY)] = pa.repeat("the probe keeps the norm alone", probed.num_rows)
    both = pa.concat_tables([table, pa.table(columns, schema=table.schema)])
    ids = group_rows(both, _PROBED).ids
    is_new = np.concatenate((np.ones(table.num_rows, np.bool_), ~np.isin(ids[table.num_rows :], ids[: table.num_rows])))
    both = both.filter(pa.array(is_new))
    return both.sort_by([("attempt", "ascending"), ("step", "ascending"), ("rank", "ascending")]), notes


def as_long(table: Any) -> Any:
    """Return a table with one row for each non-null number of `table`."""
    keys = [name for name in table.column_names if name in (*LONG_COLUMNS, *_NEVER_MIXED, INNER)]
    keys += [name for name in ("micro_step", "call", "repeat") if name in table.column_names]
    return long_form(table, keys, _NUMBERS)


def inner_leaves(table: Any) -> Any:
    """Return the name of each row's inner tensor, such as ``indices`` of a sparse tensor. Null for other rows."""
    is_inner = holds(table.column("note"), lambda note: "inner_of" in note_members(note))
    leaves = pc.replace_substring_regex(table.column("name").cast(pa.string()), pattern=r"^.*\.", replacement="")
    return pc.if_else(pa.array(is_inner), leaves, pa.scalar(None, pa.string()))


def _keys(words: Iterable[str]) -> list[str]:
    wanted = [column for word in GROUPS if word in words for column in GROUPS[word]]
    return list(dict.fromkeys([*wanted, *_NEVER_MIXED, INNER]))


def _combined(table: Any, keys: Sequence[str], more: Sequence[str]) -> Any:
    groups = group_rows(table, keys)
    columns = {name: table.column(name).take(pa.array(groups.firsts)) for name in keys}
    columns |= combine_rows(table, groups.ids, groups.num_groups)
    for name in more:
        columns[name] = pa.array(added_by_group(table.column(name), groups.ids, groups.num_groups), pa.binary())
    return pa.table(columns)


def _without_rank_rows(table: Any) -> tuple[Any, Any]:
    """Return the rows of global tensors, and the values that only have rows of single ranks."""
    is_rank = table.column("rank").is_valid().to_numpy()
    ids = group_rows(table, VALUE_KEY).ids
    stays = table.filter(pa.array(is_rank & ~np.isin(ids, ids[~is_rank]))).select([*_LEAF, WHY])
    return table.filter(pa.array(~is_rank)), stays.group_by([*_LEAF, WHY], use_threads=False).aggregate([])


def _say_without(table: Any, reasons: Counter[str]) -> list[str]:
    without, total = (pc.sum(table.column(name)).as_py() or 0 for name in ("rows_without", "rows"))
    if not without:
        return []
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    return [f"without: {without} of {total} rows have no statistics and are in none of these numbers: {why}"]


def _say_left_out(stays: Any) -> list[str]:
    rows = stays.to_pylist()
    whys = by_key((value_in_words(v["module_path"], v["site"], v["name"]), v[WHY]) for v in rows)
    if not whys:
        return []
    shown = listed((f"{value} ({why})" for value, (why, *_) in whys.items()), _MAX_NAMED)
    return [f"left out, because they stay per rank: {shown}; show them with --by rank"]


def with_why(table: Any) -> Any:
    """Return a table of rows with the added column `WHY`."""
    has_counts, has_mean = (table.column(name).is_valid().to_numpy() for name in ("nan_count", "mean"))
    is_empty = pc.equal(table.column("numel"), 0).to_numpy()
    has = np.select([has_mean, ~has_counts, is_empty], [_HAS_ALL, _HAS_NONE, _IS_EMPTY], _HAS_COUNTS)
    groups = group([codes(table.column("note")), codes(table.column("placements")), has.astype(np.int64)])
    firsts = pa.array(groups.firsts)
    notes, placements = (table.column(name).take(firsts).to_pylist() for name in ("note", "placements"))
    texts = [_why(*one) for one in zip(notes, placements, has[groups.firsts].tolist(), strict=True)]
    return table.append_column(WHY, pa.array(texts, pa.string()).take(pa.array(groups.ids)))


def _why(note: str | None, placements: str | None, has: int) -> str | None:
    told = note_members(note)
    reasons = [] if has == _HAS_ALL else [_no_statistics(told, placements, has)]
    if isinstance(told.get("per_rank"), str):
        reasons.append(f"per rank: {told['per_rank']}")
    return "; ".join(filter(None, reasons)) or None  # empty if the counts show that no element is finite


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
        return "no rule keeps statistics of it"
    return "it has no elements" if has == _IS_EMPTY else ""


_KEYS = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "root", "module_path", "site", "name", INNER, "mode",
    "phase", "scope", "dtype", "shape",
)  # fmt: skip
_ALWAYS = ("step", "rank", "module_path", "site", "name", "shape")
_TITLES = {"module_path": "module", "rows_without": "without"}
_SHOWN_ROWS = 50
_SUBNORMAL = "subnormal"
_SHOWN = ("mean", "std", "min", "max", "absmax", "l2")
_TEXTS = ("root", "module_path", "site", "name", INNER, "mode", "phase", "scope", "dtype", "shape", HISTOGRAM, WHY)
_DROPS = (
    "shape", "numel", _SUBNORMAL, "min", "max", "rows", "name", "std", HISTOGRAM, "zero_count", "l2", "inf_count",
    "nan_count", "mean",
)  # fmt: skip
"""The columns that a narrow terminal leaves out, the least important first."""


def reply_of(
    run: Run,
    selection: Selection,
    options: GlobalOptions,
    *,
    by: Sequence[str] = (),
    with_probe: bool = False,
    sort: str | None = None,
    top: int | None = None,
    last: int | None = None,
    mapper: AbstractContextManager[Mapper],
) -> Reply:
    """Return the output of `recorder stats`. The exit code is 1 if something is damaged, missing or contradictory.

    The statistics are computed when the reply is printed, because only a table needs histograms. `sort` is written
    ``l2`` or ``l2:asc``, ``-l2`` or ``l2:desc``. LookupFailedError is raised if `sort` names no column or no direction.
    `top` and `last` are numbers of rows; 0 means all rows. `mapper` is entered only while statistics are computed.
    """
    answers: list[Statistics] = []

    def asked(*, with_histograms: bool) -> tuple[Statistics, Any, str]:
        with mapper as map_ranges:
            answer = statistics(
                run,
                selection,
                options,
                by=by,
                with_probe=with_probe,
                with_histograms=with_histograms,
                mapper=map_ranges,
            )
        answers.append(answer)
        if sort is None:
            return answer, answer.table, ""
        sorted_by, direction = _order(answer.table, sort)
        order = pc.sort_indices(answer.table, [(sorted_by, direction)])  # the sort puts nulls last
        return answer, answer.table.take(order), sorted_by

    def members() -> dict[str, Any]:
        answer, table, _ = asked(with_histograms=False)
        document = {"run": str(run.path), "problems": [*answer.problems, *answer.damage], "notes": answer.notes}
        return document | {"rows": table.slice(0, top or None).to_pylist()}

    def parts() -> Iterator[str | Table]:
        answer, table, sorted_by = asked(with_histograms=True)
        words = {word.strip() for words in by for word in words.split(",")}
        known = [name for name in _KEYS if name in table.column_names]
        keys = [name for name in known if _TITLES.get(name, name) in words or _is_worth_showing(table, name)]
        num_rows = table.num_rows
        is_first = top is not None or (sort is not None and last is None)
        shown = next((limit for limit in (top, last) if limit is not None), _SHOWN_ROWS) or num_rows
        rows = table.slice(0 if is_first else max(num_rows - shown, 0), shown)
        which, option = ("first", "--top") if is_first else ("last", "--last")
        cut = f", the {which} {shown} of {num_rows} rows ({option} 0 shows all)" if rows.num_rows < num_rows else ""
        tensors = "global tensors" if options.across_ranks else "each rank's own"
        title = f"{run.name}: statistics of {tensors}{cut}"
        yield _table_of(rows, keys, sorted_by, title, has_types=not words)
        yield from (f"finding: {problem}" for problem in answer.problems)
        yield from (f"note: {note}" for note in answer.notes)

    return Reply(
        members=members,
        parts=parts,
        exit_code=lambda: int(any(answer.problems or not answer.is_whole for answer in answers)),
    )


def _order(table: Any, sort: str) -> tuple[str, str]:
    """Return the column of ``--sort`` and the direction as Arrow names it. ``-l2`` and ``l2:desc`` are descending."""
    column, _, order = sort.removeprefix("-").partition(":")
    column = next((name for name, title in _TITLES.items() if title == column), column)
    column = f"{column}_count" if f"{column}_count" in COUNTS else column
    if order not in ("", "asc", "desc") or (order and sort.startswith("-")):
        raise LookupFailedError(f"--sort {sort}: expected COLUMN, COLUMN:asc, COLUMN:desc or -COLUMN")
    names = [name for name in table.column_names if name != HISTOGRAM]  # histograms are bytes, which are not sortable
    if column not in names:
        near = hint(column, names, otherwise=f"; columns are {', '.join(names)}")
        raise LookupFailedError(f"--sort {sort}: there is no column {column!r}{near}")
    return column, "descending" if order == "desc" or sort.startswith("-") else "ascending"


def _is_worth_showing(table: Any, name: str) -> bool:
    distinct = table.column(name).unique().to_pylist()
    return len(distinct) > 1 or (name in _ALWAYS and distinct not in ([None], [""]))


def _table_of(table: Any, keys: Sequence[str], sorted_by: str, title: str, *, has_types: bool) -> Table:
    """Return the table to print. `has_types` is True if each row is one value, which has one dtype."""
    drawn, subtitle = _drawn(table, has_types=has_types)
    counts = [name for name in ("rows", "rows_without", "numel") if name in table.column_names]
    has_why = WHY in table.column_names and table.column(WHY).null_count < table.num_rows
    numbers = [*_SHOWN, *COUNTS, *drawn, *([WHY] if has_why else [])]
    shown = list(dict.fromkeys([*keys, *([sorted_by] if sorted_by else []), *counts, *numbers]))
    rows = table.select([name for name in shown if name not in drawn]).to_pylist()
    cells = [
        [drawn[name][index] if name in drawn else _cell(name, row[name]) for name in shown]
        for index, row in enumerate(rows)
    ]
    return Table(
        list(map(_title, shown)), cells, numbers=[_title(name) for name in shown if name not in _TEXTS],
        whole=("site", "shape", "dtype", HISTOGRAM), prose=(WHY,),
        drops=[_title(name) for name in _DROPS if name != sorted_by],
        dull={_title(name): "0" for name in (*COUNTS, "rows_without", _SUBNORMAL)}, title=title, subtitle=subtitle,
    )  # fmt: skip


def _title(name: str) -> str:
    return _TITLES.get(name, name.removesuffix("_count"))


def _drawn(table: Any, *, has_types: bool) -> tuple[dict[str, list[str]], str]:
    """Return cells by column name: each row's histogram and count of subnormal values. Also return the legend."""
    histograms = [
        histogram_of_row({"histogram": data, "zero_count": 0, "nan_count": 0})
        for data in (table.column(HISTOGRAM).to_pylist() if HISTOGRAM in table.column_names else ())
    ]
    lines, magnitudes = histogram_lines(histograms)
    if not lines:
        return {}, ""
    drawn = {HISTOGRAM: lines}
    if has_types:
        of_rows = zip(histograms, table.column("dtype").to_pylist(), strict=True)
        counts = (None if one is None else subnormal_count(one, dtype) for one, dtype in of_rows)
        drawn[_SUBNORMAL] = ["" if count is None else str(count) for count in counts]
    return drawn, f"histogram: of the values that are not zero, {magnitudes}; {HISTOGRAM_LEGEND}"


def _cell(name: str, value: Any) -> str:
    if name == "module_path":
        return value or "''"
    return number(value) if name in STATISTICS else "" if value is None else str(value)
