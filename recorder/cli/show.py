"""Owns ``recorder show``: what a person looks at first, one module over steps and ranks, or all modules in brief."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..config import Schedule
from ..errors import LookupFailedError
from ..format.schema import COUNTS, SITES, STATISTICS
from ..read.lookup import nearest
from ..read.run import Run, open_run
from .output import Column, Table, number, print_json, say, span
from .spark import NOT_FINITE, spark_line

_SERIES = ("root", "site", "name", "scope", "phase", "mode", "rank")
"""Rows that agree in these are one line in time."""
_ALWAYS_SHOWN = ("site", "rank")
_MOMENT = ("attempt", "step", "micro_step", "call", "repeat")
_SHOWN_STATISTICS = ("mean", "std", "min", "max", "absmax", "l2")
_SHOWN_COUNTS = ("nan_count", "inf_count", "zero_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options ask for; None asks for all."""

    site: str | None
    name: str | None
    step: str | None
    rank: str | None

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


def show_modules(path: Path, wanted: Wanted, *, as_json: bool) -> int:
    """Print a line for each module and return the exit code."""
    run = open_run(path)
    modules = _describe_modules(run, wanted)
    if as_json:
        print_json({"run": str(run.path), "modules": modules})
        return int(bool(run.problems))
    has_roots = len({module["root"] for module in modules}) > 1
    rows = [
        [module["root"]] * has_roots
        + [module["module"] or "''", module["class"], " ".join(module["sites"]), str(module["rows"])]
        + [str(module["last_step"]), number(module["last_absmax"])]
        + [str(module["nan_count"]), str(module["inf_count"])]
        for module in modules
    ]
    titles = ["root"] * has_roots + ["module", "class", "sites", "rows", "last step", "absmax", "nan", "inf"]
    numbers = ("rows", "last step", "absmax", "nan", "inf")
    facts = f"{run.path.name}: {len(modules)} modules, ranks {span(run.ranks)}, steps {span(run.steps) or 'none'}"
    Table([Column(title=title, is_number=title in numbers) for title in titles], rows, title=facts).print()
    return int(bool(run.problems))


def show_module(path: Path, module_path: str, wanted: Wanted, *, last: int, as_json: bool) -> int:
    """Print one module's series, the last steps of its first site, and return the exit code."""
    run = open_run(path)
    if module_path == "''":
        module_path = ""
    columns = [*_SERIES, *_MOMENT, "dtype", "shape", "encoding", *STATISTICS, *COUNTS, "fingerprint"]
    everything = run.table(columns, wanted.filter(module_path))
    table = wanted.narrow(everything)
    if not table.num_rows:
        _explain_nothing(run, module_path, everything)
    series = _groups(table, _SERIES)
    ordered = sorted(series, key=_series_order)
    if as_json:
        found = [dict(zip(_SERIES, key, strict=True)) | {"rows": series[key]} for key in ordered]
        print_json({"run": str(run.path), "module": module_path, "series": found})
        return int(bool(run.problems))
    say(_headline(run, module_path))
    _print_series(ordered, series)
    site = wanted.site or ordered[0][_SERIES.index("site")]
    _print_steps([(key, series[key]) for key in ordered if key[_SERIES.index("site")] == site], site, last)
    return int(bool(run.problems))


def _print_series(ordered: list[tuple[Any, ...]], series: dict[tuple[Any, ...], list[dict[str, Any]]]) -> None:
    """One line a series: its last values, and its course."""
    keys = _varying(_SERIES, ordered)
    lines = []
    for key in ordered:
        rows = series[key]
        newest = rows[-1]
        bad = [bool(row["nan_count"] or row["inf_count"]) for row in rows]
        shown = dict(zip(_SERIES, key, strict=True))
        lines.append(
            [_text(shown[name]) for name in keys]
            + [newest["dtype"], newest["shape"], str(len(rows)), span(sorted({row["step"] for row in rows}))]
            + [number(newest["absmax"]), spark_line([_course(row) for row in rows], bad)]
        )
    titles = [*keys, "dtype", "shape", "rows", "steps", "last absmax", "course"]
    numbers = ("rank", "rows", "last absmax")
    marks = f" ({NOT_FINITE}: NaN or infinity)" if any(NOT_FINITE in line[-1] for line in lines) else ""
    title = f"absmax over steps, of a scalar its value{marks}"
    Table([Column(title=title_, is_number=title_ in numbers) for title_ in titles], lines, title=title).print()


def _print_steps(chosen: list[tuple[tuple[Any, ...], list[dict[str, Any]]]], site: str, last: int) -> None:
    """The statistics of one site, a line for each moment and rank."""
    lines = [dict(zip(_SERIES, key, strict=True)) | row for key, rows in chosen for row in rows]
    steps = sorted({line["step"] for line in lines})
    shown_steps = set(steps[-last:] if last else steps)
    lines = [line for line in lines if line["step"] in shown_steps]
    lines.sort(key=lambda line: [(line[name] is not None, line[name]) for name in (*_MOMENT, *_SERIES)])
    keys = _varying(_SERIES[1:], [tuple(line[name] for name in _SERIES[1:]) for line in lines])
    moments = _varying(_MOMENT, [tuple(line[name] for name in _MOMENT) for line in lines])
    columns = [name for name in ("step", *moments, *keys) if name != "site"]
    columns = list(dict.fromkeys(columns))
    cells = [
        [_text(line[name]) for name in columns]
        + [number(line[name]) for name in (*_SHOWN_STATISTICS, *_SHOWN_COUNTS)]
        + ["yes" if line["encoding"] is not None else "no"]
        for line in lines
    ]
    texts = {"name", "scope", "phase", "mode", "root", "values"}
    titles = [*columns, *_SHOWN_STATISTICS, *(name.removesuffix("_count") for name in _SHOWN_COUNTS), "values"]
    missing = len(steps) - len(shown_steps)
    rest = f", the last {len(shown_steps)} of {len(steps)} steps (--last 0 shows all)" if missing else ""
    Table([Column(title=t, is_number=t not in texts) for t in titles], cells, title=f"{site}{rest}").print()


def _explain_nothing(run: Run, module_path: str, everything: Any) -> None:
    """Raise the most helpful reason why there is nothing to show."""
    if everything.num_rows:
        steps = span(sorted(set(everything.column("step").to_pylist())))
        raise LookupFailedError(f"no row of {module_path!r} at these steps and ranks; it has steps {steps}")
    if module_path in run.module_paths:
        sites = run.table(["site"], pc.field("module_path") == module_path).column("site").unique().to_pylist()
        raise LookupFailedError(f"{module_path!r} has no such row; its sites are {', '.join(sorted(sites))}")
    near = nearest(module_path, run.module_paths)
    hint = f"; nearest are {', '.join(map(repr, near))}" if near else "; recorder show RUN lists the modules"
    raise LookupFailedError(f"no module {module_path!r} in this run{hint}")


def _headline(run: Run, module_path: str) -> str:
    infos = [info for (_, path), info in run.modules.items() if path == module_path]
    facts = [f"{info.class_name} {info.source}".strip() for info in infos[:1]]
    return ", ".join([f"{run.path.name}: {module_path!r}", *facts])


def _describe_modules(run: Run, wanted: Wanted) -> list[dict[str, Any]]:
    """One entry a module, in the order of execution; Arrow does the counting."""
    sums = ["absmax", "nan_count", "inf_count"]
    table = wanted.narrow(run.table(["root", "module_path", "site", "step", "rank", *sums], wanted.filter()))
    keys = ["root", "module_path", "site"]
    counts = table.group_by(keys).aggregate(
        [("step", "count"), ("step", "max"), ("nan_count", "sum"), ("inf_count", "sum")]
    )
    newest = table.group_by([*keys, "step"]).aggregate([("absmax", "max")]).join(counts, keys)
    newest = newest.filter(pc.field("step") == pc.field("step_max"))
    order = {module_path: place for place, module_path in enumerate(run.module_paths)}
    found = []
    for (root, module_path), sites in _groups(newest, ("root", "module_path")).items():
        sites.sort(key=lambda site: _site_order(site["site"]))
        info = run.modules.get((root, module_path))
        found.append(
            {
                "root": root,
                "module": module_path,
                "class": info.class_name if info else "",
                "source": info.source if info else "",
                "sites": [site["site"] for site in sites],
                "rows": sum(site["step_count"] for site in sites),
                "last_step": sites[0]["step"],
                "last_absmax": sites[0]["absmax_max"],
                "nan_count": sum(site["nan_count_sum"] or 0 for site in sites),
                "inf_count": sum(site["inf_count_sum"] or 0 for site in sites),
            }
        )
    return sorted(found, key=lambda module: (module["root"], order[module["module"]]))


def _groups(table: Any, keys: Iterable[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by key; without the keys' columns, in the order of the table."""
    keys = tuple(keys)
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault(tuple(row.pop(name) for name in keys), []).append(row)
    return found


def _course(row: dict[str, Any]) -> float | None:
    """What a spark line draws of a row."""
    value: float | None = row["mean"] if row["shape"] == "[]" else row["absmax"]
    return value


def _varying(names: tuple[str, ...], keys: Iterable[tuple[Any, ...]]) -> list[str]:
    """Names that tell the keys apart, and those that are always worth a column."""
    columns = {name: set(values) for name, values in zip(names, zip(*keys, strict=True), strict=True)}
    return [
        name
        for name, values in columns.items()
        if name in _ALWAYS_SHOWN or len(values) > 1 or (name == "name" and values != {""})
    ]


def _series_order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    fields = dict(zip(_SERIES, key, strict=True))
    rest = [(fields[name] is not None, fields[name]) for name in ("name", "root", "scope", "phase", "mode", "rank")]
    return (_site_order(fields["site"]), *rest)


def _site_order(site: str) -> tuple[int, str]:
    """`output` first: it is what most questions are about."""
    order = ("output", *(other for other in SITES if other != "output"))
    return (order.index(site) if site in order else len(order), site)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
