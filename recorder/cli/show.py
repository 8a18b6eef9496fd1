"""Owns ``recorder show``: what a person looks at first, one module over steps and ranks, or all modules in brief."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.reasons import COLUMNS, WHY, with_why
from ..analyze.selection import Selection
from ..analyze.stats import inner_leaves
from ..errors import LookupFailedError
from ..format.schema import COUNTS, SITES, STATISTICS
from ..patterns import hint
from ..read.lookup import ended_before
from ..read.run import Run
from ..read.which import typed_for
from .ls import jitter_note
from .output import Column, Table, counted, number, print_json, say, span
from .spark import NOT_FINITE, spark_line

_KEY = ("site", "name", "root", "scope", "phase", "mode", "rank")
"""Rows that agree in these are one series."""
_MOMENT = ("attempt", "step", "micro_step", "call", "repeat")
_ALWAYS_SHOWN = ("site", "step", "rank")
_SHOWN_STATISTICS = ("mean", "std", "min", "max", "absmax", "l2")
_DROPS = ("min", "max", "std", "values", "l2", "zero", "micro_step", "repeat", "attempt", "mode", "mean", "inf", "nan")
"""Columns of the long table that a narrow terminal does without, the least important first."""
_SERIES_DROPS = ("dtype", "rows", "shape", "root", "scope", "mode", "phase", "steps")
_MODULE_DROPS = ("class", "rows", "last step", "sites", "inf", "nan")
_MAX_LISTED = 20
_LIBRARY = "site-packages/torch/"
_VALUES_INSIDE = ("values", "_values", "_masked_data")
"""Tensors inside of composite ones that hold these tensors' values as they are."""
_SITES = ("output", *(site for site in SITES if site != "output"))
"""`output` first: it is what most questions are about."""

_NUMBERS = (*STATISTICS, *COUNTS)
_TOLD = tuple(name for name in COLUMNS if name not in _NUMBERS)
Row = dict[str, Any]


class Series(NamedTuple):
    """The rows of one value in time."""

    key: Row
    rows: list[Row]


def show(run: Run, wanted: Selection, *, last: int, statistic: str | None, as_json: bool) -> int:
    """Show the one module that is meant, or a line for each of several, and return the exit code.

    Raises:
        LookupFailedError: there is nothing to show; the message says what there is.
    """
    if statistic not in (None, *_NUMBERS):
        raise LookupFailedError(f"--statistic {statistic}: choose of {', '.join(_NUMBERS)}{hint(statistic, _NUMBERS)}")
    paths = modules_meant(run, wanted)
    if wanted.module is not None and len(paths) == 1:
        return _show_module(run, paths[0], wanted, last=last, statistic=statistic, as_json=as_json)
    return _show_modules(run, wanted, statistic=statistic or "absmax", as_json=as_json)


def modules_meant(run: Run, wanted: Selection) -> list[str]:
    """The modules with rows that are asked for; all where none is.

    Raises:
        LookupFailedError: there is none.
    """
    found = wanted.modules(run.module_paths)
    if not found and wanted.module is not None:
        command = shlex.join(["recorder", "show", typed_for(run.path, run.name)])
        near = hint(wanted.module, run.module_paths, otherwise=f"; {command} lists the modules")
        raise LookupFailedError(f"no module {wanted.module!r} in this run{near}")
    return found


def _show_modules(run: Run, wanted: Selection, *, statistic: str, as_json: bool) -> int:
    """Print a line for each module and return the exit code."""
    bad = _first_bad(run, wanted)
    modules = _describe_modules(run, wanted, bad, statistic)
    if not modules and wanted.columns:
        explain_nothing(run, wanted)
    if as_json:
        print_json({"run": str(run.path), "first_bad": next(iter(bad.values()), None), "modules": modules})
        return int(bool(run.problems))
    has_roots = len({module["root"] for module in modules}) > 1
    lines = [
        [module["root"]] * has_roots
        + [module["module"] or "''", module["class"], " ".join(module["sites"]), str(module["rows"])]
        + [str(module["last_step"]), number(module[f"last_{statistic}"])]
        + [str(module["nan_count"]), str(module["inf_count"]), _text(module["first_bad"]), _text(module[WHY])]
        for module in modules
    ]
    titles = ["root"] * has_roots + [
        "module",
        "class",
        "sites",
        "rows",
        "last step",
        statistic,
        "nan",
        "inf",
        "first bad",
        WHY,
    ]
    counts = counted(len(modules), "module")
    facts = f"{run.name}: {counts}, ranks {span(run.ranks)}, steps {span(run.steps) or 'none'}"
    subtitle = _say_bad(next(iter(bad.values()))) if bad else ""
    texts = ("root", "module", "class", "sites", WHY)
    _print(titles, lines, texts=texts, title=facts, subtitle=subtitle, drops=_MODULE_DROPS)
    if run.jitter:
        say(jitter_note(run))
    return int(bool(run.problems))


def _show_module(
    run: Run, module_path: str, wanted: Selection, *, last: int, statistic: str | None, as_json: bool
) -> int:
    """Print one module's series and the last steps of its first site, and return the exit code."""
    columns = [
        *_KEY,
        *_MOMENT,
        "seq",
        "dtype",
        "shape",
        "global_shape",
        "encoding",
        *STATISTICS,
        *COUNTS,
        "fingerprint",
        *_TOLD,
    ]
    table = rows_of(run, wanted, columns)
    if not table.num_rows:
        explain_nothing(run, wanted)
    table = with_why(table).drop_columns(list(_TOLD))
    series = sorted((Series(*group) for group in _groups(table, _KEY)), key=lambda one: _series_order(one.key))
    if as_json:
        found = [one.key | {"rows": one.rows} for one in series]
        print_json({"run": str(run.path), "module": module_path, "series": found})
        return int(bool(run.problems))
    infos = [info for (_, info_path), info in run.modules.items() if info_path == module_path]
    facts = [
        info.class_name if _LIBRARY in info.source.replace("\\", "/") else f"{info.class_name} {info.source}".strip()
        for info in infos[:1]
    ]
    say(", ".join([f"{run.name}: {module_path!r}", *facts]))
    if run.jitter:
        say(jitter_note(run))
    _print_series(series, statistic)
    first_site = series[0].key["site"]
    shown = _SHOWN_STATISTICS if statistic is None else (statistic,)
    _print_steps([one for one in series if one.key["site"] == first_site], first_site, last, shown)
    return int(bool(run.problems))


def rows_of(run: Run, wanted: Selection, columns: Sequence[str], more: Any = None) -> Any:
    """The rows that are asked for, of whole tensors; Arrow chooses the modules before rows are made."""
    expression = pc.field("part") == 0
    if wanted.module is not None:
        expression &= pc.field("module_path").isin(wanted.modules(run.module_paths))
    if more is not None:
        expression &= more
    return replace(wanted, module=None).narrow(run.table(columns, expression))


def _print_series(series: Sequence[Series], statistic: str | None) -> None:
    """One line a series: its last values, and its course."""
    of_tensors = statistic or "absmax"
    keys = _worth_showing(_KEY, [one.key for one in series])
    lines = []
    for one in series:
        newest = one.rows[-1]
        steps = span(sorted({row["step"] for row in one.rows}))
        bad = [bool(row["nan_count"] or row["inf_count"]) for row in one.rows]
        course = spark_line([row[_course(row, statistic)] for row in one.rows], bad)
        facts = [newest["dtype"], _shape(newest), str(len(one.rows)), steps, number(newest[of_tensors]), course]
        lines.append([_text(one.key[name]) for name in keys] + facts + [_text(newest[WHY])])
    titles = [*keys, "dtype", "shape", "rows", "steps", f"last {of_tensors}", "course", WHY]
    marks = f"; {NOT_FINITE} stands for NaN or infinity" if any(NOT_FINITE in line[-2] for line in lines) else ""
    scalars = ", the value of a scalar" if statistic is None else ""
    title = f"course: {of_tensors} over steps{scalars}{marks}"
    texts = (*_KEY[:-1], "dtype", "shape", "steps", "course", WHY)
    _print(titles, lines, texts=texts, title=title, drops=_SERIES_DROPS)


def _course(row: Row, statistic: str | None) -> str:
    """The statistic that is drawn of a row."""
    return statistic or ("mean" if row["shape"] == "[]" else "absmax")


def _print_steps(series: Sequence[Series], site: str, last: int, statistics: Sequence[str]) -> None:
    """The statistics of one site, a line for each moment and rank."""
    rows = [one.key | row for one in series for row in one.rows]
    steps = sorted({row["step"] for row in rows})
    shown_steps = set(steps[-last:] if last else steps)
    rows = [row for row in rows if row["step"] in shown_steps]
    rows = _as_observed(rows)
    shown = tuple(dict.fromkeys((*statistics, *COUNTS)))
    keys = [name for name in _worth_showing((*_MOMENT, *_KEY), rows) if name != "site"]
    lines = [
        [_text(row[name]) for name in keys]
        + [number(row[name]) for name in shown]
        + ["yes" if row["encoding"] is not None else "no", _text(row[WHY])]
        for row in rows
    ]
    titles = [*keys, *(name.removesuffix("_count") for name in shown), "values", WHY]
    is_cut = len(shown_steps) < len(steps)
    rest = f", the last {len(shown_steps)} of {len(steps)} steps (--last 0 shows all)" if is_cut else ""
    _print(titles, lines, texts=(*_KEY[:-1], "values", WHY), title=f"{site}{rest}", drops=_DROPS, dull=True)


def _print(
    titles: Sequence[str],
    lines: list[list[str]],
    *,
    texts: Sequence[str],
    title: str,
    subtitle: str = "",
    drops: Sequence[str] = (),
    dull: bool = False,
) -> None:
    """Print a table; `drops` are the columns to do without, first to last, `dull` leaves counts out where all are 0."""
    if titles[-1] == WHY and not any(line[-1] for line in lines):
        titles, lines = titles[:-1], [line[:-1] for line in lines]
    counts = [name.removesuffix("_count") for name in COUNTS]
    columns = [
        Column(
            title=name,
            is_number=name not in texts,
            is_whole=name in ("course", "shape", "steps", "dtype", "site", "phase", "mode", "values"),
            is_prose=name in ("sites", WHY),
            drop=len(drops) - drops.index(name) if name in drops else 0,
            dull="0" if dull and name in counts else None,
        )
        for name in titles
    ]
    Table(columns, lines, title=title, subtitle=subtitle).print()


def _as_observed(rows: Sequence[Row]) -> list[Row]:
    """By step, within a step as the values were seen; the ranks of one value stay together."""
    seen: dict[tuple[Any, ...], int] = {}
    places: dict[tuple[Any, ...], int] = {}
    for row in sorted(rows, key=lambda row: row["seq"]):
        counter = tuple(row[name] for name in ("attempt", "step", "rank"))
        place = seen[counter] = seen.get(counter, -1) + 1
        value = _value(row)
        places[value] = min(place, places.get(value, place))

    def order(row: Row) -> list[tuple[bool, Any]]:
        when = [row["attempt"], row["step"], places[_value(row)], *_value(row), row["rank"]]
        return [(one is not None, one) for one in when]

    return sorted(rows, key=order)


def _value(row: Row) -> tuple[Any, ...]:
    """What is the same on every rank."""
    return tuple(row[name] for name in (*_MOMENT, *_KEY) if name != "rank")


def _shape(row: Row) -> str:
    """A chunk's shape with that of the whole."""
    whole = row["global_shape"]
    return f"{row['shape']} of {whole}" if whole not in (None, row["shape"]) else str(row["shape"])


def _say_bad(bad: Row) -> str:
    where = " ".join(text for text in (repr(bad["module_path"]), bad["site"], bad["name"]) if text)
    rank = "" if bad["rank"] is None else f", rank {bad['rank']}"
    return f"first NaN or infinity: {where}, step {bad['step']}{rank}"


def explain_nothing(run: Run, wanted: Selection) -> NoReturn:
    """Raise the most helpful reason why there is nothing to show."""
    what = "this run" if wanted.module is None else repr(wanted.module)
    table = rows_of(run, Selection(module=wanted.module), ["site", "name", "step", "rank"])
    for column, text in (("site", wanted.site), ("name", wanted.name)):
        if text is None:
            continue
        there = sorted(table.column(column).unique().to_pylist())
        table = Selection(**{column: text}).narrow(table)
        if not table.num_rows:
            near = difflib.get_close_matches(text, there, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            more = f" and {len(there) - _MAX_LISTED} more" if len(there) > _MAX_LISTED else ""
            names = ", ".join(name or "''" for name in there[:_MAX_LISTED])
            raise LookupFailedError(f"{what} has no such row; its {column}s are {names}{more}{hint}")
    steps, ranks = (sorted(set(table.column(name).drop_null().to_pylist())) for name in ("step", "rank"))
    there_are = f"it has steps {span(steps) or 'none'} and ranks {span(ranks) or 'none'}"
    step = str(wanted.step)
    ended = ended_before(run.writers, int(step)) if step.isdecimal() else ""
    raise LookupFailedError(f"no row of {what} at these steps and ranks; {there_are}{'; ' if ended else ''}{ended}")


def _first_bad(run: Run, wanted: Selection) -> dict[tuple[str, str], Row]:
    """The first row with a NaN or an infinity, by root and module, the very first one first."""
    columns = ["root", "module_path", "site", "name", "phase", "attempt", "step", "rank", "seq"]
    is_bad = (pc.field("nan_count") > 0) | (pc.field("inf_count") > 0)
    table = rows_of(run, wanted, columns, is_bad)
    found: dict[tuple[str, str], Row] = {}
    for row in table.sort_by([(name, "ascending") for name in ("attempt", "step", "seq", "rank")]).to_pylist():
        found.setdefault((row["root"], row["module_path"]), row)
    return found


def _describe_modules(run: Run, wanted: Selection, bad: dict[tuple[str, str], Row], statistic: str) -> list[Row]:
    """One entry a module, in the order of execution; Arrow does the counting.

    Of several rows of the last step the largest statistic stands for all, of `min` the smallest.
    """
    columns = ["root", "module_path", "site", "name", "step", "rank", statistic, "nan_count", "inf_count"]
    table = rows_of(run, wanted, list(dict.fromkeys([*columns, *COLUMNS])))
    table = _of_values_alone(with_why(table), statistic)
    most = "min" if statistic == "min" else "max"
    keys = ["root", "module_path", "site"]
    counts = table.group_by(keys).aggregate(
        [("step", "count"), ("step", "max"), ("nan_count", "sum"), ("inf_count", "sum")]
    )
    newest = table.group_by([*keys, "step"]).aggregate([(statistic, most)]).join(counts, keys)
    newest = newest.filter(pc.field("step") == pc.field("step_max"))
    order = {module_path: place for place, module_path in enumerate(run.module_paths)}
    whys = _whys(table.filter(pc.field(statistic).is_null()), [*keys, "step"])
    found = []
    for key, sites in _groups(newest, ("root", "module_path")):
        sites.sort(key=lambda site: site_order(site["site"]))
        info = run.modules.get((key["root"], key["module_path"]))
        found.append(
            {
                "root": key["root"],
                "module": key["module_path"],
                "class": info.class_name if info else "",
                "source": info.source if info else "",
                "sites": [site["site"] for site in sites],
                "rows": sum(site["step_count"] for site in sites),
                "last_step": sites[0]["step"],
                f"last_{statistic}": sites[0][f"{statistic}_{most}"],
                WHY: None
                if sites[0][f"{statistic}_{most}"] is not None
                else whys.get((*key.values(), sites[0]["site"], sites[0]["step"])),
                "nan_count": sum(site["nan_count_sum"] or 0 for site in sites),
                "inf_count": sum(site["inf_count_sum"] or 0 for site in sites),
                "first_bad": bad[name]["step"] if (name := (key["root"], key["module_path"])) in bad else None,
            }
        )
    return sorted(found, key=lambda module: (module["root"], order[module["module"]]))


def _whys(table: Any, keys: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """Why rows have no statistic, by what they agree in: of several reasons the first."""
    found: dict[tuple[Any, ...], str] = {}
    for row in (
        table.filter(pc.field(WHY).is_valid()).group_by([*keys, WHY], use_threads=False).aggregate([]).to_pylist()
    ):
        found.setdefault(tuple(row[name] for name in keys), row[WHY])
    return found


def _of_values_alone(table: Any, statistic: str) -> Any:
    """No statistic of what is inside a composite tensor and not its values: indices, scales."""
    leaves = inner_leaves(table)
    is_value = pc.or_(pc.is_null(leaves), pc.is_in(leaves, pa.array(_VALUES_INSIDE)))
    place, numbers = table.column_names.index(statistic), table.column(statistic)
    return table.set_column(place, statistic, pc.if_else(is_value, numbers, pa.scalar(None, numbers.type)))


def _groups(table: Any, names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Rows by key and without its columns, in the order of the table."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in table.to_pylist():
        found.setdefault(tuple(row.pop(name) for name in names), []).append(row)
    return [(dict(zip(names, key, strict=True)), rows) for key, rows in found.items()]


def _worth_showing(names: Sequence[str], keys: Sequence[Row]) -> list[str]:
    """Columns that are always wanted, that hold a name, or that tell lines of one site and name apart."""
    values = {(key["site"], key["name"]) for key in keys}
    always = (*_ALWAYS_SHOWN, *(["name"] if any(name for _, name in values) else []))
    return [
        column
        for column in names
        if column in always or len({(key["site"], key["name"], key[column]) for key in keys}) > len(values)
    ]


def _series_order(key: Row) -> tuple[Any, ...]:
    return (site_order(key["site"]), *((key[name] is not None, key[name]) for name in _KEY[1:]))


def site_order(site: str) -> tuple[int, str]:
    """Sorts sites: outputs first, then as the format lists them."""
    return (_SITES.index(site) if site in _SITES else len(_SITES), site)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
