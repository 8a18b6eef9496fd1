"""Owns ``recorder show``: what a person looks at first, one module over steps and ranks, or all modules in brief."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.reasons import COLUMNS, WHY, with_why
from ..analyze.stats import inner_leaves
from ..config import Schedule
from ..errors import LookupFailedError
from ..format.schema import COUNTS, SITES, STATISTICS
from ..read.lookup import ended_before, nearest
from ..read.run import Run
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

_TOLD = tuple(name for name in COLUMNS if name not in (*STATISTICS, *COUNTS))
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options ask for; None asks for all."""

    site: str | None
    name: str | None
    step: str | None
    rank: str | None

    @property
    def is_narrow(self) -> bool:
        """Whether anything is asked for in particular."""
        return any(text is not None for text in (self.site, self.name, self.step, self.rank))

    def filter(self, module_path: str | None = None) -> Any:
        """The part of it that Arrow can do, and only rows that stand for a whole tensor."""
        expression = pc.field("part") == 0
        for column, value in (("module_path", module_path), ("site", self.site), ("name", self.name)):
            if value is not None:
                expression &= pc.field(column) == value
        return expression

    def narrow(self, table: Any) -> Any:
        """Keep the steps and ranks that are asked for."""
        for column, text in (("step", self.step), ("rank", self.rank)):
            if text is not None:
                try:
                    schedule = Schedule.parse(text)
                except ValueError as error:
                    raise LookupFailedError(f"--{column} {text}: {error}; examples: 7  0:100  ::10  0,5,7") from None
                values = table.column(column)
                allowed = [value for value in values.unique().to_pylist() if value is not None and value in schedule]
                table = table.filter(pc.is_in(values, pa.array(allowed, values.type)))
        return table


class Series(NamedTuple):
    """The rows of one value in time."""

    key: Row
    rows: list[Row]


def show_modules(run: Run, wanted: Wanted, *, as_json: bool) -> int:
    """Print a line for each module and return the exit code."""
    bad = _first_bad(run, wanted)
    modules = _describe_modules(run, wanted, bad)
    if not modules and wanted.is_narrow:
        explain_nothing(run, None, wanted)
    if as_json:
        print_json({"run": str(run.path), "first_bad": next(iter(bad.values()), None), "modules": modules})
        return int(bool(run.problems))
    has_roots = len({module["root"] for module in modules}) > 1
    lines = [
        [module["root"]] * has_roots
        + [module["module"] or "''", module["class"], " ".join(module["sites"]), str(module["rows"])]
        + [str(module["last_step"]), number(module["last_absmax"])]
        + [str(module["nan_count"]), str(module["inf_count"]), _text(module["first_bad"]), _text(module[WHY])]
        for module in modules
    ]
    titles = ["root"] * has_roots + [
        "module",
        "class",
        "sites",
        "rows",
        "last step",
        "absmax",
        "nan",
        "inf",
        "first bad",
        WHY,
    ]
    counts = counted(len(modules), "module")
    facts = f"{run.path.name}: {counts}, ranks {span(run.ranks)}, steps {span(run.steps) or 'none'}"
    subtitle = _say_bad(next(iter(bad.values()))) if bad else ""
    texts = ("root", "module", "class", "sites", WHY)
    _print(titles, lines, texts=texts, title=facts, subtitle=subtitle, drops=_MODULE_DROPS)
    if run.jitter:
        say(jitter_note(run))
    return int(bool(run.problems))


def show_module(run: Run, module_path: str, wanted: Wanted, *, last: int, as_json: bool) -> int:
    """Print one module's series and the last steps of its first site, and return the exit code."""
    module_path = "" if module_path == "''" else module_path
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
    table = wanted.narrow(run.table(columns, wanted.filter(module_path)))
    if not table.num_rows:
        explain_nothing(run, module_path, wanted)
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
    say(", ".join([f"{run.path.name}: {module_path!r}", *facts]))
    if run.jitter:
        say(jitter_note(run))
    _print_series(series)
    first_site = series[0].key["site"]
    _print_steps([one for one in series if one.key["site"] == first_site], first_site, last)
    return int(bool(run.problems))


def _print_series(series: Sequence[Series]) -> None:
    """One line a series: its last values, and its course."""
    keys = _worth_showing(_KEY, [one.key for one in series])
    lines = []
    for one in series:
        newest = one.rows[-1]
        steps = span(sorted({row["step"] for row in one.rows}))
        bad = [bool(row["nan_count"] or row["inf_count"]) for row in one.rows]
        course = spark_line([row["mean"] if row["shape"] == "[]" else row["absmax"] for row in one.rows], bad)
        facts = [newest["dtype"], _shape(newest), str(len(one.rows)), steps, number(newest["absmax"]), course]
        lines.append([_text(one.key[name]) for name in keys] + facts + [_text(newest[WHY])])
    titles = [*keys, "dtype", "shape", "rows", "steps", "last absmax", "course", WHY]
    marks = f"; {NOT_FINITE} stands for NaN or infinity" if any(NOT_FINITE in line[-2] for line in lines) else ""
    title = f"course: absmax over steps, the value of a scalar{marks}"
    texts = (*_KEY[:-1], "dtype", "shape", "steps", "course", WHY)
    _print(titles, lines, texts=texts, title=title, drops=_SERIES_DROPS)


def _print_steps(series: Sequence[Series], site: str, last: int) -> None:
    """The statistics of one site, a line for each moment and rank."""
    rows = [one.key | row for one in series for row in one.rows]
    steps = sorted({row["step"] for row in rows})
    shown_steps = set(steps[-last:] if last else steps)
    rows = [row for row in rows if row["step"] in shown_steps]
    rows = _as_observed(rows)
    keys = [name for name in _worth_showing((*_MOMENT, *_KEY), rows) if name != "site"]
    lines = [
        [_text(row[name]) for name in keys]
        + [number(row[name]) for name in (*_SHOWN_STATISTICS, *COUNTS)]
        + ["yes" if row["encoding"] is not None else "no", _text(row[WHY])]
        for row in rows
    ]
    titles = [*keys, *_SHOWN_STATISTICS, *(name.removesuffix("_count") for name in COUNTS), "values", WHY]
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


def explain_nothing(run: Run, module_path: str | None, wanted: Wanted) -> NoReturn:
    """Raise the most helpful reason why there is nothing to show."""
    if module_path is not None and module_path not in run.module_paths:
        near = nearest(module_path, run.module_paths)
        hint = (
            f"; nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(repr, near))}"
            if near
            else f"; recorder show {run.path} lists the modules"
        )
        raise LookupFailedError(f"no module {module_path!r} in this run{hint}")
    what = "this run" if module_path is None else repr(module_path)
    is_there = None if module_path is None else pc.field("module_path") == module_path
    table = run.table(["site", "name", "step", "rank"], is_there)
    for column, text in (("site", wanted.site), ("name", wanted.name)):
        if text is None:
            continue
        there = sorted(table.column(column).unique().to_pylist())
        table = table.filter(pc.equal(table.column(column), text))
        if not table.num_rows:
            near = difflib.get_close_matches(text, there, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            more = f" and {len(there) - _MAX_LISTED} more" if len(there) > _MAX_LISTED else ""
            names = ", ".join(name or "''" for name in there[:_MAX_LISTED])
            raise LookupFailedError(f"{what} has no such row; its {column}s are {names}{more}{hint}")
    steps, ranks = (sorted(set(table.column(name).drop_null().to_pylist())) for name in ("step", "rank"))
    there_are = f"it has steps {span(steps) or 'none'} and ranks {span(ranks) or 'none'}"
    is_one_step = wanted.step is not None and wanted.step.isdecimal()
    ended = ended_before(run.writers, int(wanted.step or 0)) if is_one_step else ""
    raise LookupFailedError(f"no row of {what} at these steps and ranks; {there_are}{'; ' if ended else ''}{ended}")


def _first_bad(run: Run, wanted: Wanted) -> dict[tuple[str, str], Row]:
    """The first row with a NaN or an infinity, by root and module, the very first one first."""
    columns = ["root", "module_path", "site", "name", "phase", "attempt", "step", "rank", "seq"]
    is_bad = (pc.field("nan_count") > 0) | (pc.field("inf_count") > 0)
    table = wanted.narrow(run.table(columns, wanted.filter() & is_bad))
    found: dict[tuple[str, str], Row] = {}
    for row in table.sort_by([(name, "ascending") for name in ("attempt", "step", "seq", "rank")]).to_pylist():
        found.setdefault((row["root"], row["module_path"]), row)
    return found


def _describe_modules(run: Run, wanted: Wanted, bad: dict[tuple[str, str], Row]) -> list[Row]:
    """One entry a module, in the order of execution; Arrow does the counting."""
    sums = ["absmax", "nan_count", "inf_count"]
    columns = ["root", "module_path", "site", "name", "step", "rank", *sums]
    table = wanted.narrow(run.table([*columns, *(name for name in COLUMNS if name not in columns)], wanted.filter()))
    table = _without_inner_absmax(with_why(table))
    keys = ["root", "module_path", "site"]
    counts = table.group_by(keys).aggregate(
        [("step", "count"), ("step", "max"), ("nan_count", "sum"), ("inf_count", "sum")]
    )
    newest = table.group_by([*keys, "step"]).aggregate([("absmax", "max")]).join(counts, keys)
    newest = newest.filter(pc.field("step") == pc.field("step_max"))
    order = {module_path: place for place, module_path in enumerate(run.module_paths)}
    whys = _whys(table.filter(pc.field("absmax").is_null()), [*keys, "step"])
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
                "last_absmax": sites[0]["absmax_max"],
                WHY: None
                if sites[0]["absmax_max"] is not None
                else whys.get((*key.values(), sites[0]["site"], sites[0]["step"])),
                "nan_count": sum(site["nan_count_sum"] or 0 for site in sites),
                "inf_count": sum(site["inf_count_sum"] or 0 for site in sites),
                "first_bad": bad[name]["step"] if (name := (key["root"], key["module_path"])) in bad else None,
            }
        )
    return sorted(found, key=lambda module: (module["root"], order[module["module"]]))


def _whys(table: Any, keys: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """Why rows have no absmax, by what they agree in: of several reasons the first."""
    found: dict[tuple[Any, ...], str] = {}
    for row in (
        table.filter(pc.field(WHY).is_valid()).group_by([*keys, WHY], use_threads=False).aggregate([]).to_pylist()
    ):
        found.setdefault(tuple(row[name] for name in keys), row[WHY])
    return found


def _without_inner_absmax(table: Any) -> Any:
    """No absmax of what is inside a composite tensor and not its values: indices, scales."""
    leaves = inner_leaves(table)
    is_value = pc.or_(pc.is_null(leaves), pc.is_in(leaves, pa.array(_VALUES_INSIDE)))
    place = table.column_names.index("absmax")
    absmax = table.column("absmax")
    return table.set_column(place, "absmax", pc.if_else(is_value, absmax, pa.scalar(None, absmax.type)))


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
