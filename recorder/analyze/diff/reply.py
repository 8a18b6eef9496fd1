"""What `recorder diff` replies: the answer and its reasons, and tables of modules, values, histograms and units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.compute as pc

from ...numerics.distributions import (
    HISTOGRAM_LEGEND,
    HISTOGRAM_WIDTH,
    UnitsApart,
    bins_of,
    extent,
    histogram_line,
    histogram_of_row,
    share_apart,
    subnormal_count,
)
from ...run.reply import Reply, Table, plain, table_of
from ...run.run import Run
from ...system.text import counted, moment, number, span
from .result import (
    Diff,
    accusations,
    beside,
    cosine_cell,
    cut_text,
    describe,
    faults,
    notes,
    pair_cell,
    percent_cell,
    rank_cell,
    reasons,
    rename_lines,
    statistic_cell,
    verdict,
    whole_cell,
)
from .step_range import DiffOptions

_FEW = 5
"""The number of lines of each table, and of culprits, without ``--limit``."""
_JSON_ROWS = 20
_MAX_JSON_BINS = 4096
"""More than there are powers of two."""
_MODULE_DROPS = ("nonfinite", "cosine", "first value", "compared", "stats apart")
_HISTOGRAM_DROPS = ("infinite", "subnormal", "zero")
_UNITS_DROPS = ("dead", "rank", "units")
_VALUE_DROPS = ("max ulp", "max rel", "cosine", "elements", "type", "rank", "shape", "statistics")
_DULL = {"nonfinite": "0|0"} | dict.fromkeys(
    ("max abs", "of max", "cosine", "max rel", "max ulp", "elements", "rank"), "-"
)
"""The cells of a column without information: only statistics, shapes or the ranks of one run differ."""
_OF_MAX = "of max: max abs relative to the largest magnitude in either tensor"
_APART = "apart: the share of values that would have to change sign or power of two for both to have one distribution"
_DEAD = "dead: units with no value but zero; farthest: the unit whose root of the mean square (rms) differs most"
_STATS_APART = "stats apart: where only statistics are there, how far these are apart in the same measure"


def reply_of(a: Run, b: Run, result: Diff, options: DiffOptions, *, limit: int | None, is_brief: bool) -> Reply:
    """Return the reply: the answer first, and without a limit few lines of modules and none of single values.

    The exit code is 1 if the runs differ, or the rows of a run contradict each other.
    """
    return Reply(
        members=lambda: _members(a, b, result, _JSON_ROWS if limit is None else limit),
        parts=lambda: _parts(a, b, result, options, limit=limit, is_brief=is_brief),
        exit_code=int(not result.is_equal or bool(result.problems_a or result.problems_b)),
    )


def _members(a: Run, b: Run, result: Diff, limit: int) -> dict[str, Any]:
    tables = {name: getattr(result, name) for name in ("modules", "table", "only_a", "only_b")}
    shown = {name: table.slice(0, limit or None).to_pylist() for name, table in tables.items()}
    counts = {f"num_{name}": table.num_rows for name, table in tables.items()}
    shown["differing"] = list(map(_with_details, shown.pop("table")))
    counts["num_differing"] = counts.pop("num_table")
    rest = {name: plain(value) for name, value in result._asdict().items() if name not in tables}
    runs: dict[str, object] = {}
    for side, run in (("a", a), ("b", b)):
        runs |= {side: str(run.path), f"name_{side}": run.name, f"started_ns_{side}": run.started_ns}
    return {**runs, **rest, **counts, **shown}


def _with_details(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row that differs with the members `histogram`, instead of bytes, and `units`."""
    a, b = histogram_of_row(row, "_a"), histogram_of_row(row, "_b")
    units = {name: row[name] for name in UnitsApart._fields}
    rest = {name: value for name, value in row.items() if name not in ("histogram_a", "histogram_b", *units)}
    rest["units"] = None if units["units_a"] is None else units
    if a is None or b is None:
        return rest | {"histogram": None}
    bins = bins_of([a, b], _MAX_JSON_BINS)
    histogram: dict[str, Any] = {"first_exponent": bins.first, "exponents_per_bin": bins.exponents_per_bin}
    histogram |= {"apart": share_apart(a, b)}
    for side, one, shares in (("a", a, bins.shares[0]), ("b", b, bins.shares[1])):
        histogram[f"share_{side}"] = shares
        histogram[f"subnormal_count_{side}"] = subnormal_count(one, row[f"dtype_{side}"])
    return rest | {"histogram": histogram}


def _parts(
    a: Run, b: Run, result: Diff, options: DiffOptions, *, limit: int | None, is_brief: bool
) -> Iterator[str | Table]:
    most = _FEW if limit is None else limit
    yield f"A: {_run(a)}"
    yield f"B: {_run(b)}"
    for run in () if is_brief else options.noise:
        yield f"noise: {_run(run)}{f', jitter {run.jitter}' if run.jitter else ''}"
    yield verdict(result, options)
    yield from reasons(result, common=options.common)
    yield from faults(result, most)
    yield from accusations(result.culprits, most)
    if result.first is not None:
        yield describe(result.first)
    if is_brief:
        return
    yield from rename_lines(result.hints, most)
    yield from notes(result, options)
    if result.first is not None:
        yield _modules_table(result, most)
        if limit is None:
            num = counted(result.table.num_rows, "value")
            yield f"{num} in all: --limit 20 lists the first of them, --limit 0 all; --brief leaves the tables out"
        else:
            yield _values_table(result, limit)
        yield from filter(None, (_histograms_table(result, most), _units_table(result, most)))
    yield from _only_parts("A", result.only_a, result.steps_only_a, most)
    yield from _only_parts("B", result.only_b, result.steps_only_b, most)


def _run(run: Run) -> str:
    """Return the name of a run, its path, and when it began; the path alone where it ends with the name."""
    named = str(run.path) if run.name == run.path.name else f"{run.name} ({run.path})"
    return f"{named}, started {moment(run.started_ns)}" if run.started_ns else named


def _modules_table(result: Diff, limit: int) -> Table:
    modules = result.modules.to_pylist()
    has_roots = len({module["root"] for module in modules}) > 1
    titles = [*(["root"] if has_roots else []), "module", "first step", "first value", "differ", "compared"]
    titles += ["max abs", "of max", "stats apart", "cosine", "nonfinite"]
    has_statistics = any(module["by_statistics"] for module in modules)
    lines = [
        [module["root"]] * has_roots
        + [module["module_path"] or "''", str(module["first_step"])]
        + [" ".join(filter(None, (module["first_site"], module["first_name"])))]
        + [str(module["differing"]), str(module["compared"]), number(module["max_abs"]), number(module["of_max"])]
        + [number(module["statistic_rel"]), cosine_cell(module["min_cosine"])]
        + [f"{module['nonfinite_a']}|{module['nonfinite_b']}"]
        for module in modules[: limit or None]
    ]
    title = f"modules that differ ({len(modules)}), in the order in which they do{cut_text(len(modules), limit)}"
    texts = ("root", "module", "first value")
    absent = () if has_statistics else ("stats apart",)
    legend = f"{_OF_MAX}; {_STATS_APART}" if has_statistics else _OF_MAX
    return _table(titles, lines, title, _MODULE_DROPS, texts=texts, absent=absent, legend=legend)


def _values_table(result: Diff, limit: int) -> Table:
    rows = result.table.slice(0, limit or None).to_pylist()
    titles = ["step", "module", "value", "rank", "kind", "shape", "type", "elements", "max abs", "of max", "statistics"]
    titles += ["cosine", "max rel", "max ulp"]
    lines = [
        [
            *_head(row),
            row["kind"],
            pair_cell(row["shape_a"], row["shape_b"]),
            pair_cell(row["dtype_a"], row["dtype_b"]),
            "" if row["num_outside"] is None else f"{row['num_outside']}/{row['numel']}",
            number(row["max_abs"]),
            number(row["of_max"]),
            "" if row["statistic"] is None else statistic_cell(row),
            cosine_cell(row["cosine"]),
            number(row["max_rel"]),
            whole_cell(row["max_ulp"]),
        ]
        for row in rows
    ]
    num_rows = result.table.num_rows
    title = f"values that differ ({num_rows}), in the order of execution{cut_text(num_rows, limit)}"
    texts = ("module", "value", "rank", "kind", "shape", "type", "statistics")
    absent = () if any(row["statistic"] is not None for row in rows) else ("statistics",)
    return _table(titles, lines, title, _VALUE_DROPS, texts=texts, absent=absent)


def _head(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of step, module, value and rank."""
    value = " ".join(filter(None, (row["site"], row["name"], beside(row))))
    return str(row["step"]), row["module_path"] or "''", value, rank_cell(row["rank_a"], row["rank_b"])


def _histograms_table(result: Diff, limit: int) -> Table | None:
    """Return the histograms of the first values that differ and have them in both runs, in the same bins."""
    table = result.table
    table = table.filter(pc.and_(table.column("histogram_a").is_valid(), table.column("histogram_b").is_valid()))
    rows = table.slice(0, limit or None).to_pylist()
    rows_with_histograms = [(row, histogram_of_row(row, "_a"), histogram_of_row(row, "_b")) for row in rows]
    pairs = [(row, a, b) for row, a, b in rows_with_histograms if a is not None and b is not None]
    if not pairs:
        return None
    bins = bins_of([one for _, a, b in pairs for one in (a, b)], HISTOGRAM_WIDTH)
    drawn = [histogram_line(shares) for shares in bins.shares]
    titles = ["step", "module", "value", "rank", "A", "B", "apart", "zero", "subnormal", "infinite"]
    lines = []
    for number_of, (row, a, b) in enumerate(pairs):
        of_subnormals = [subnormal_count(one, row[f"dtype_{side}"]) for side, one in (("a", a), ("b", b))]
        lines.append(
            [
                *_head(row),
                *drawn[2 * number_of : 2 * number_of + 2],
                percent_cell(share_apart(a, b)),
                f"{a.zero_count}|{b.zero_count}",
                "|".join("-" if count is None else str(count) for count in of_subnormals),
                f"{int(a.infinite.sum())}|{int(b.infinite.sum())}",
            ]
        )
    title = f"histograms of values that differ ({table.num_rows}): {extent(bins)}{cut_text(table.num_rows, limit)}"
    texts = ("module", "value", "rank", "A", "B")
    absent = () if any(line[3] for line in lines) else ("rank",)
    return _table(
        titles, lines, title, _HISTOGRAM_DROPS, texts=texts, absent=absent, legend=f"{_APART}; {HISTOGRAM_LEGEND}"
    )


def _units_table(result: Diff, limit: int) -> Table | None:
    """Return how the units of the first values that differ, and have them in both runs, compare."""
    table = result.table.filter(pc.field("units_a").is_valid())
    rows = table.slice(0, limit or None).to_pylist()
    if not rows:
        return None
    titles = ["step", "module", "value", "rank", "units", "differ", "dead", "farthest", "its rms"]
    lines = [
        [
            *_head(row),
            pair_cell(row["units_a"], row["units_b"]),
            "-" if row["units_apart"] is None else str(row["units_apart"]),
            f"{row['units_dead_a']}|{row['units_dead_b']}",
            "-" if row["unit"] is None else str(row["unit"]),
            "-" if row["unit"] is None else f"{number(row['unit_rms_a'])}|{number(row['unit_rms_b'])}",
        ]
        for row in rows
    ]
    absent = () if any(line[3] for line in lines) else ("rank",)
    title = f"units of values that differ ({table.num_rows}){cut_text(table.num_rows, limit)}"
    return _table(titles, lines, title, _UNITS_DROPS, texts=("module", "value", "rank"), absent=absent, legend=_DEAD)


def _only_parts(run: str, only: Any, steps: list[int], limit: int) -> Iterator[str | Table]:
    """Yield the values that only one run has at steps of both runs, and the steps that only one run has."""
    if only.num_rows:
        rows = [
            [
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"]))),
                str(row["rows"]),
                "..".join(map(str, sorted({row["first_step"], row["last_step"]}))),
            ]
            for row in only.slice(0, limit or None).to_pylist()
        ]
        title = f"only in {run}, at steps that both have{cut_text(only.num_rows, limit)}"
        yield table_of(("module", "value", "rows", "steps"), rows, numbers=("rows",), title=title)
    if steps:
        yield f"steps only in {run}: {span(steps)} (not compared; no difference by itself)"


def _table(
    titles: list[str], lines: list[list[str]], title: str, drops: tuple[str, ...], *, texts: tuple[str, ...],
    absent: Sequence[str] = (), legend: str = "",
) -> Table:  # fmt: skip
    """Return a table without the columns that are `absent`."""
    kept = [i for i, name in enumerate(titles) if name not in absent]
    titles, lines = [titles[i] for i in kept], [[line[i] for i in kept] for line in lines]
    return table_of(
        titles,
        lines,
        numbers=[name for name in titles if name not in texts],
        whole=("kind", "shape"),
        prose=("statistics",),
        drops=drops,
        dull=_DULL,
        title=title,
        subtitle=legend,
    )
