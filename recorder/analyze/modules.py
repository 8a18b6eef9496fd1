"""Answers `recorder show`: one module over steps and ranks, or a summary of several modules. Never reads a payload."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, STATISTICS, parse_shape
from ..errors import LookupFailedError, RunError
from ..numerics.distributions import HISTOGRAM_LEGEND, NOT_FINITE, histogram_lines, histogram_of_row, spark_line
from ..numerics.keys import by_key
from ..numerics.units import Units
from ..rules import hint
from ..run.finding import shortest_text_of
from ..run.notes import dump_members, dump_note, facts_of, jitter_note, sent_note
from ..run.reply import Reply, Table
from ..run.run import RecordedModule, Run
from ..run.selection import Selection
from ..sites import SITES
from ..system.text import counted, number, span, value_in_words
from .stats import REASON_COLUMNS, WHY, inner_leaves, with_why

_SITES = ("output", *(site for site in SITES if site != "output"))
"""The sites in the order of printing: outputs first, because most questions are about outputs."""
_KEY = ("site", "name", "root", "scope", "phase", "mode", "rank")
"""The columns that identify a series: the rows of one value over time."""
_MOMENT = ("attempt", "step", "micro_step", "call", "repeat")
_ALWAYS_SHOWN = ("site", "step", "rank")
_SHOWN_STATISTICS = ("mean", "std", "min", "max", "absmax", "l2")
_DROPS = ("min", "max", "std", "values", "l2", "zero", "micro_step", "repeat", "attempt", "mode", "mean", "inf", "nan")
"""The columns of the long table that a narrow terminal leaves out, the least important first."""
_SERIES_DROPS = ("dtype", "histogram", "rows", "shape", "root", "scope", "mode", "phase", "steps")
_MODULE_DROPS = ("class", "rows", "last step", "sites", "inf", "nan")
_DEAD = "dead units"
_FACTS = "facts"
_MAX_UNIT_STEPS = 1000
"""Units (channels, neurons) are read only at this many last steps. They are read step by step, to save memory."""
_LIBRARY = "site-packages/torch/"
_VALUES_INSIDE = ("values", "_values", "_masked_data")
"""The names of the inner tensors that hold the elements of a composite tensor unchanged."""

_NUMBERS = (*STATISTICS, *COUNTS)
_OTHERS = tuple(name for name in REASON_COLUMNS if name not in _NUMBERS)
Row = dict[str, Any]


def show_reply(run: Run, wanted: Selection, *, last: int, statistic: str | None) -> Reply:
    """Return the output of `recorder show`, about one module at its `last` steps, or about several modules.

    Raises LookupFailedError if there is no such statistic, no such module, or nothing to show.
    """
    if statistic is not None and statistic not in _NUMBERS:
        raise LookupFailedError(f"--statistic {statistic}: choose of {', '.join(_NUMBERS)}{hint(statistic, _NUMBERS)}")
    paths = modules_meant(run, wanted)
    if wanted.module is not None and len(paths) == 1:
        return _module_reply(run, paths[0], wanted, last=last, statistic=statistic)
    return _modules_reply(run, wanted, statistic or "absmax")


def modules_meant(run: Run, wanted: Selection) -> list[str]:
    """Return the modules with rows that match a selection (by default all). Raise LookupFailedError if none matches."""
    paths = wanted.chosen("module_path", run.module_paths)
    if not paths and wanted.module is not None:
        command = shlex.join(["recorder", "show", shortest_text_of(run.path, run.name)])
        near = hint(wanted.module, run.module_paths, otherwise=f"; {command} lists the modules")
        raise LookupFailedError(f"no module {wanted.module!r} in this run{near}")
    return paths


def rows_of(run: Run, wanted: Selection, columns: Sequence[str], more: Any = None) -> Any:
    """Return the selected rows, one for each tensor. Arrow filters modules before Python filters other columns."""
    expression = pc.field("part") == 0
    if wanted.module is not None:
        expression &= pc.field("module_path").isin(wanted.chosen("module_path", run.module_paths))
    if more is not None:
        expression &= more
    return replace(wanted, module=None).narrow(run.table(columns, expression))


def explain_nothing(run: Run, wanted: Selection) -> NoReturn:
    """Raise LookupFailedError with the most helpful reason why there is nothing to print."""
    subject = "this run" if wanted.module is None else repr(wanted.module)
    rows = rows_of(run, Selection(module=wanted.module), ["root", "site", "name", "step", "rank"])
    step = str(wanted.step)
    ended = run.ended_before(int(step)) if step.isdecimal() else ""
    why = replace(wanted, module=None).explain_nothing(rows, subject, run.lost)
    raise LookupFailedError(f"{why}{'; ' * bool(ended)}{ended}")


def site_order(site: str) -> tuple[int, str]:
    """Return the key that sorts sites: outputs first, then in the order of the format."""
    return (_SITES.index(site) if site in _SITES else len(_SITES), site)


class Series(NamedTuple):
    """The rows of one value over time."""

    key: Row
    rows: list[Row]


def _modules_reply(run: Run, wanted: Selection, statistic: str) -> Reply:
    bad = _first_bad(run, wanted)
    modules = _describe_modules(run, wanted, bad, statistic)
    if not modules and wanted.columns:
        explain_nothing(run, wanted)
    first_bad = next(iter(bad.values()), None)
    known = {"run": str(run.path), "first_bad": first_bad, "dumps": list(map(dump_members, run.dumps))}
    return Reply(
        members=lambda: known | {"modules": modules},
        parts=lambda: _modules_parts(run, modules, first_bad, statistic),
        exit_code=int(bool(run.problems)),
    )


def _modules_parts(run: Run, modules: Sequence[Row], bad: Row | None, statistic: str) -> Iterator[str | Table]:
    has_roots, has_facts = len({module["root"] for module in modules}) > 1, any(module[_FACTS] for module in modules)
    lines = [
        [module["root"]] * has_roots
        + [module["module"] or "''", module["class"], " ".join(module["sites"]), str(module["rows"])]
        + [str(module["last_step"]), number(module[f"last_{statistic}"])]
        + [str(module["nan_count"]), str(module["inf_count"]), _text(module["first_bad"])]
        + ["; ".join(module[_FACTS])] * has_facts
        + [_text(module[WHY])]
        for module in modules
    ]
    titles = ["root"] * has_roots + ["module", "class", "sites", "rows", "last step", statistic]
    titles += ["nan", "inf", "first bad", *[_FACTS] * has_facts, WHY]
    counts = counted(len(modules), "module")
    summary = f"{run.name}: {counts}, ranks {span(run.ranks)}, steps {span(run.steps) or 'none'}"
    subtitle = "" if bad is None else _say_bad(bad, has_models=run.has_models)
    texts = ("root", "module", "class", "sites", _FACTS, WHY)
    yield _table(titles, lines, texts=texts, title=summary, subtitle=subtitle, drops=_MODULE_DROPS)
    if (note := sent_note(run)) is not None:
        yield note
    yield from map(dump_note, run.dumps)
    if run.lost:
        yield run.lost
    if run.jitter:
        yield jitter_note(run)


def _module_reply(run: Run, module_path: str, wanted: Selection, *, last: int, statistic: str | None) -> Reply:
    columns = [*_KEY, *_MOMENT, "seq", "dtype", "shape", "global_shape", "encoding", *STATISTICS, *COUNTS]
    table = rows_of(run, wanted, [*columns, "fingerprint", "histogram", *_OTHERS])
    if not table.num_rows:
        explain_nothing(run, wanted)
    table = with_why(table).drop_columns(list(_OTHERS))

    def order(member: Series) -> tuple[Any, ...]:
        others = ((member.key[name] is not None, member.key[name]) for name in _KEY[1:])
        return site_order(member.key["site"]), *others

    series = sorted((Series(*group) for group in _groups(table, _KEY)), key=order)

    roots = wanted.chosen("root", [root for root, its_path in run.modules if its_path == module_path])
    infos = {root: run.modules[root, module_path] for root in roots}
    has_models = len(infos) > 1
    facts = [f"{root}: " * has_models + fact for root, one in infos.items() for fact in facts_of(one)]

    def members() -> dict[str, Any]:
        for row in (row for member in series for row in member.rows):
            del row["histogram"]  # JSON cannot contain bytes
        described = [member.key | {"rows": member.rows} for member in series]
        return {"run": str(run.path), "module": module_path, _FACTS: facts, "series": described}

    def parts() -> Iterator[str | Table]:
        title = f"{run.name}: {module_path!r}"
        yield ", ".join([title, *dict.fromkeys(map(_class_of, infos.values()))])
        yield from facts
        if run.jitter:
            yield jitter_note(run)
        yield _series_table(series, statistic)
        first_site = series[0].key["site"]
        shown = _SHOWN_STATISTICS if statistic is None else (statistic,)
        rows = [member.key | row for member in series if member.key["site"] == first_site for row in member.rows]
        yield _steps_table(run, module_path, rows, last, shown)

    return Reply(members=members, parts=parts, exit_code=int(bool(run.problems)))


def _class_of(info: RecordedModule) -> str:
    """Return the class of a module, with its source line if the class is the program's own."""
    is_of_torch = _LIBRARY in info.source.replace("\\", "/")
    return info.class_name if is_of_torch else f"{info.class_name} {info.source}".strip()


def _series_table(series: Sequence[Series], statistic: str | None) -> Table:
    """Return a table with a line for each series: the last values, the trend, and the last histogram if recorded."""
    of_tensors = statistic or "absmax"
    keys = _worth_showing(_KEY, [member.key for member in series])
    lines: list[list[str]] = []
    drawn, of_histograms = _histograms(series)
    for member in series:
        newest = member.rows[-1]
        steps = span(sorted({row["step"] for row in member.rows}))
        bad = [bool(row["nan_count"] or row["inf_count"]) for row in member.rows]
        drawn_names = [statistic or ("mean" if row["shape"] == "[]" else "absmax") for row in member.rows]
        trend = spark_line([row[name] for row, name in zip(member.rows, drawn_names, strict=True)], bad)
        cells = [newest["dtype"], _shape(newest), str(len(member.rows)), steps, number(newest[of_tensors]), trend]
        cells += drawn[len(lines) : len(lines) + 1]
        lines.append([_text(member.key[name]) for name in keys] + cells + [_text(newest[WHY])])
    titles = [*keys, "dtype", "shape", "rows", "steps", f"last {of_tensors}", "trend"]
    has_marks = any(NOT_FINITE in line[len(titles) - 1] for line in lines)
    marks = f"; {NOT_FINITE} stands for NaN or infinity" if has_marks else ""
    titles += [*(["histogram"] if drawn else []), WHY]
    scalars = ", the value of a scalar" if statistic is None else ""
    title = f"trend: {of_tensors} over steps{scalars}{marks}"
    texts = (*_KEY[:-1], "dtype", "shape", "steps", "trend", "histogram", WHY)
    return _table(titles, lines, texts=texts, title=title, subtitle=of_histograms, drops=_SERIES_DROPS)


def _histograms(series: Sequence[Series]) -> tuple[list[str], str]:
    """Return lines that draw the last histogram of each series, all in the same powers of two, and a legend."""
    newest = [
        next((one for row in reversed(member.rows) if (one := histogram_of_row(row)) is not None), None)
        for member in series
    ]
    drawn, magnitudes = histogram_lines(newest)
    return drawn, f"histogram: the last of each, {magnitudes}; {HISTOGRAM_LEGEND}" if drawn else ""


def _steps_table(run: Run, module_path: str, rows: list[Row], last: int, statistics: Sequence[str]) -> Table:
    """Return a table of one site's statistics, with a line for each call and rank, and with dead units if recorded."""
    site = rows[0]["site"]
    steps = sorted({row["step"] for row in rows})
    shown_steps = set(steps[-last:] if last else steps)
    rows = [row for row in rows if row["step"] in shown_steps]
    rows = _as_observed(rows)
    shown = tuple(dict.fromkeys((*statistics, *COUNTS)))
    keys = [name for name in _worth_showing((*_MOMENT, *_KEY), rows) if name != "site"]
    dead = _dead_units(run, module_path, site, sorted(shown_steps))
    lines = [
        [_text(row[name]) for name in keys]
        + [number(row[name]) for name in shown]
        + [dead.get(_key_of(row), "")] * bool(dead)
        + ["yes" if row["encoding"] is not None else "no", _text(row[WHY])]
        for row in rows
    ]
    titles = [*keys, *(name.removesuffix("_count") for name in shown)]
    titles += [*([_DEAD] if dead else []), "values", WHY]
    is_cut = len(shown_steps) < len(steps)
    rest = f", the last {len(shown_steps)} of {len(steps)} steps (--last 0 shows all)" if is_cut else ""
    return _table(titles, lines, texts=(*_KEY[:-1], "values", WHY), title=f"{site}{rest}", drops=_DROPS, dull=True)


def _dead_units(run: Run, module_path: str, site: str, steps: Sequence[int]) -> dict[tuple[Any, ...], str]:
    """Return, by the key of each row, how many of the row's units (channels) are always zero, such as ``3/64``."""
    num_dead_of_all = {}
    is_wanted = (pc.field("part") == 0) & (pc.field("module_path") == module_path) & (pc.field("site") == site)
    for step in steps[-_MAX_UNIT_STEPS:]:
        table = run.table([*_MOMENT, *_KEY, "shape", "units"], is_wanted, steps=(step, step + 1))
        for row in table.filter(pc.field("units").is_valid()).to_pylist():
            with suppress(RunError):  # `recorder verify` reports damage
                units = Units.from_bytes(row["units"], parse_shape(row["shape"]))
                num_dead_of_all[_key_of(row)] = f"{units.num_dead}/{len(units)}"
    return num_dead_of_all


def _key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*_MOMENT, *_KEY))


def _table(
    titles: Sequence[str], lines: list[list[str]], *, texts: Sequence[str], title: str, subtitle: str = "",
    drops: Sequence[str] = (), dull: bool = False,
) -> Table:  # fmt: skip
    """Return a table. A last column of empty reasons is left out. With `dull`, columns of only zero counts are, too."""
    if titles[-1] == WHY and not any(line[-1] for line in lines):
        titles, lines = titles[:-1], [line[:-1] for line in lines]
    return Table(
        titles, lines, numbers=[name for name in titles if name not in texts],
        whole=("trend", "histogram", "shape", "steps", "dtype", "site", "phase", "mode", "values"),
        prose=("sites", _FACTS, WHY), drops=drops, title=title, subtitle=subtitle,
        dull={name.removesuffix("_count"): "0" for name in COUNTS} if dull else {},
    )  # fmt: skip


def _as_observed(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by step, and in each step by the order of execution. The ranks of one value stay together."""
    seen: dict[tuple[Any, ...], int] = {}
    positions: dict[tuple[Any, ...], int] = {}
    for row in sorted(rows, key=lambda row: row["seq"]):
        counter = tuple(row[name] for name in ("attempt", "step", "rank"))
        position = seen[counter] = seen.get(counter, -1) + 1
        value = _value(row)
        positions[value] = min(position, positions.get(value, position))

    def order(row: Row) -> list[tuple[bool, Any]]:
        when = [row["attempt"], row["step"], positions[_value(row)], *_value(row), row["rank"]]
        return [(part is not None, part) for part in when]

    return sorted(rows, key=order)


def _value(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*_MOMENT, *_KEY) if name != "rank")


def _shape(row: Row) -> str:
    whole = row["global_shape"]
    return f"{row['shape']} of {whole}" if whole not in (None, row["shape"]) else str(row["shape"])


def _say_bad(bad: Row, *, has_models: bool) -> str:
    where = f"{bad['root']}: " * has_models + value_in_words(bad["module_path"], bad["site"], bad["name"])
    rank = "" if bad["rank"] is None else f", rank {bad['rank']}"
    return f"first NaN or infinity: {where}, step {bad['step']}{rank}"


def _first_bad(run: Run, wanted: Selection) -> dict[tuple[str, str], Row]:
    columns = ["root", "module_path", "site", "name", "phase", "attempt", "step", "rank", "seq"]
    is_bad = (pc.field("nan_count") > 0) | (pc.field("inf_count") > 0)
    table = rows_of(run, wanted, columns, is_bad)
    first_rows: dict[tuple[str, str], Row] = {}
    for row in table.sort_by([(name, "ascending") for name in ("attempt", "step", "seq", "rank")]).to_pylist():
        first_rows.setdefault((row["root"], row["module_path"]), row)
    return first_rows


def _describe_modules(run: Run, wanted: Selection, bad: dict[tuple[str, str], Row], statistic: str) -> list[Row]:
    """Return an entry for each module, in the order of execution. Arrow does the counting.

    An entry has the largest statistic in the rows of the last step. For the statistic `min` it has the smallest.
    """
    columns = ["root", "module_path", "site", "name", "step", "rank", statistic, "nan_count", "inf_count"]
    table = rows_of(run, wanted, list(dict.fromkeys([*columns, *REASON_COLUMNS])))
    table = _of_values_alone(with_why(table), statistic)
    most = "min" if statistic == "min" else "max"
    keys = ["root", "module_path", "site"]
    counts = table.group_by(keys).aggregate(
        [("step", "count"), ("step", "max"), ("nan_count", "sum"), ("inf_count", "sum")]
    )
    newest = table.group_by([*keys, "step"]).aggregate([(statistic, most)]).join(counts, keys)
    newest = newest.filter(pc.field("step") == pc.field("step_max"))
    order = {module_path: position for position, module_path in enumerate(run.module_paths)}
    whys = _whys(table.filter(pc.field(statistic).is_null()), [*keys, "step"])
    entries = []
    for key, sites in _groups(newest, ("root", "module_path")):
        sites.sort(key=lambda site: site_order(site["site"]))
        name = key["root"], key["module_path"]
        info, last_value = run.modules.get(name), sites[0][f"{statistic}_{most}"]
        why = whys.get((*name, sites[0]["site"], sites[0]["step"])) if last_value is None else None
        entries.append(
            {
                "root": key["root"], "module": key["module_path"],
                "class": info.class_name if info else "", "source": info.source if info else "",
                "sites": [site["site"] for site in sites], "rows": sum(site["step_count"] for site in sites),
                "last_step": max(site["step"] for site in sites), f"last_{statistic}": last_value, WHY: why,
                "nan_count": sum(site["nan_count_sum"] or 0 for site in sites),
                "inf_count": sum(site["inf_count_sum"] or 0 for site in sites),
                "first_bad": bad[name]["step"] if name in bad else None,
                _FACTS: list(facts_of(info)) if info else [],
            }
        )  # fmt: skip
    return sorted(entries, key=lambda module: (module["root"], order[module["module"]]))


def _whys(table: Any, keys: Sequence[str]) -> dict[tuple[Any, ...], str]:
    known = table.filter(pc.field(WHY).is_valid()).group_by(keys, use_threads=False).aggregate([(WHY, "first")])
    return {tuple(row[name] for name in keys): row[f"{WHY}_first"] for row in known.to_pylist()}


def _of_values_alone(table: Any, statistic: str) -> Any:
    leaves = inner_leaves(table)
    is_value = pc.or_(pc.is_null(leaves), pc.is_in(leaves, pa.array(_VALUES_INSIDE)))
    position, numbers = table.column_names.index(statistic), table.column(statistic)
    return table.set_column(position, statistic, pc.if_else(is_value, numbers, pa.scalar(None, numbers.type)))


def _groups(table: Any, names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    groups = by_key((tuple(row.pop(name) for name in names), row) for row in table.to_pylist())
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in groups.items()]


def _worth_showing(names: Sequence[str], keys: Sequence[Row]) -> list[str]:
    """Return the columns to print: the columns always shown, and columns that tell lines of one value apart."""
    values = {(key["site"], key["name"]) for key in keys}
    always = (*_ALWAYS_SHOWN, *(["name"] if any(name for _, name in values) else []))
    return [
        column
        for column in names
        if column in always or len({(key["site"], key["name"], key[column]) for key in keys}) > len(values)
    ]


def _text(value: Any) -> str:
    return "" if value is None else str(value)
