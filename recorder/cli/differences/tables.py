"""Tables of what differs between two runs: modules, values, histograms, and what one run has alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from ...analyze.diff.result import Diff
from ...numerics.apart import bins_of, histogram_of_row, share_apart, subnormal_count
from ...numerics.spark import HISTOGRAM_LEGEND, HISTOGRAM_WIDTH, extent, histogram_line
from ...run.reply import Table, TableColumn
from ...system.text import number, span
from ..output import print_table, say
from .cells import beside, cosine_cell, cut_text, pair_cell, percent_cell, rank_cell, statistic_cell, whole_cell

_MODULE_DROPS = ("nonfinite", "cosine", "first value", "compared", "stats apart")
_HISTOGRAM_DROPS = ("infinite", "subnormal", "zero")
_UNITS_DROPS = ("dead", "rank", "units")
_VALUE_DROPS = ("max ulp", "max rel", "cosine", "elements", "type", "rank", "shape", "statistics")
_EMPTY = dict.fromkeys(("max abs", "of max", "cosine", "max rel", "max ulp", "elements", "rank"), "-")
"""The cell of a column without a distance, where only statistics, shapes or one run's ranks differ."""
_OF_MAX = "of max: max abs relative to the largest magnitude in either tensor"
_APART = "apart: the share of values that would have to change sign or power of two for both to be spread alike"
_DEAD = "dead: units with no value but zero; farthest: the unit whose root of the mean square (rms) differs most"
_STATS_APART = "stats apart: where only statistics are there, how far these are apart in the same measure"


def print_modules(result: Diff, limit: int) -> None:
    """Print the modules that differ, in the order in which they do."""
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
    _print(titles, lines, title, _MODULE_DROPS, texts=texts, absent=absent, legend=legend)


def print_values(result: Diff, limit: int) -> None:
    """Print the values that differ, in the order of execution."""
    rows = result.table.slice(0, limit or None).to_pylist()
    titles = ["step", "module", "value", "rank", "kind", "shape", "type", "elements", "max abs", "of max", "statistics"]
    titles += ["cosine", "max rel", "max ulp"]
    lines = [
        [
            str(row["step"]),
            row["module_path"] or "''",
            " ".join(filter(None, (row["site"], row["name"], beside(row)))),
            rank_cell(row["rank_a"], row["rank_b"]),
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
    _print(titles, lines, title, _VALUE_DROPS, texts=texts, absent=absent)


def print_histograms(result: Diff, limit: int) -> None:
    """Print the histograms of the first values that differ and have them in both runs, in the same bins."""
    table = result.table
    table = table.filter(pc.and_(table.column("histogram_a").is_valid(), table.column("histogram_b").is_valid()))
    rows = table.slice(0, limit or None).to_pylist()
    rows_with_histograms = [(row, histogram_of_row(row, "_a"), histogram_of_row(row, "_b")) for row in rows]
    pairs = [(row, a, b) for row, a, b in rows_with_histograms if a is not None and b is not None]
    if not pairs:
        return
    bins = bins_of([one for _, a, b in pairs for one in (a, b)], HISTOGRAM_WIDTH)
    drawn = [histogram_line(shares) for shares in bins.shares]
    titles = ["step", "module", "value", "rank", "A", "B", "apart", "zero", "subnormal", "infinite"]
    lines = []
    for number_of, (row, a, b) in enumerate(pairs):
        of_subnormals = [subnormal_count(one, row[f"dtype_{side}"]) for side, one in (("a", a), ("b", b))]
        lines.append(
            [
                str(row["step"]),
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"], beside(row)))),
                rank_cell(row["rank_a"], row["rank_b"]),
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
    _print(titles, lines, title, _HISTOGRAM_DROPS, texts=texts, absent=absent, legend=f"{_APART}; {HISTOGRAM_LEGEND}")


def print_units(result: Diff, limit: int) -> None:
    """Print how the units of the first values that differ, and have them in both runs, compare."""
    table = result.table.filter(pc.field("units_a").is_valid())
    rows = table.slice(0, limit or None).to_pylist()
    if not rows:
        return
    titles = ["step", "module", "value", "rank", "units", "differ", "dead", "farthest", "its rms"]
    lines = [
        [
            str(row["step"]),
            row["module_path"] or "''",
            " ".join(filter(None, (row["site"], row["name"], beside(row)))),
            rank_cell(row["rank_a"], row["rank_b"]),
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
    _print(titles, lines, title, _UNITS_DROPS, texts=("module", "value", "rank"), absent=absent, legend=_DEAD)


def print_only(run: str, only: Any, steps: list[int], limit: int) -> None:
    """Print what one run has alone: values at steps that both have, and steps."""
    if only.num_rows:
        lines = [
            [
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"]))),
                str(row["rows"]),
                str(row["first_step"])
                if row["first_step"] == row["last_step"]
                else f"{row['first_step']}..{row['last_step']}",
            ]
            for row in only.slice(0, limit or None).to_pylist()
        ]
        title = f"only in {run}, at steps that both have{cut_text(only.num_rows, limit)}"
        columns = [TableColumn(title="module"), TableColumn(title="value"), TableColumn(title="rows", is_number=True)]
        print_table(Table([*columns, TableColumn(title="steps")], lines, title=title))
    if steps:
        say(f"steps only in {run}: {span(steps)} (not compared; no difference by itself)")


def _print(
    titles: list[str], lines: list[list[str]], title: str, drops: tuple[str, ...], *, texts: tuple[str, ...],
    absent: Sequence[str] = (), legend: str = "",
) -> None:  # fmt: skip
    """Print a table without the columns that are `absent`."""
    kept = [i for i, name in enumerate(titles) if name not in absent]
    titles, lines = [titles[i] for i in kept], [[line[i] for i in kept] for line in lines]
    columns = [
        TableColumn(
            title=name,
            is_number=name not in texts,
            is_whole=name in ("kind", "shape"),
            is_prose=name == "statistics",
            drop=len(drops) - drops.index(name) if name in drops else 0,
            dull="0|0" if name == "nonfinite" else _EMPTY.get(name),
        )
        for name in titles
    ]
    print_table(Table(columns, lines, title=title, subtitle=legend))
