"""Owns how a `Run` is used by hand, in a notebook: narrowing to a module, tab completion, HTML, frames for plotting.

Every text out of a file is escaped before it becomes HTML. Must never read a payload unasked, and imports pandas only
where a frame is asked for.
"""

from __future__ import annotations

import difflib
import html
import importlib.util
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import LookupFailedError
from ..format.schema import COUNTS, SITES, STATISTICS
from ..patterns import hint
from ..units import counted

if TYPE_CHECKING:
    import pandas
    import torch

    from .run import MoreQualifiers, Run

LONG_KEY = (
    "step", "rank", "root", "module_path", "site", "name", "micro_step", "call", "repeat", "mode", "phase",
)  # fmt: skip
"""Columns that, with `statistic`, tell the values of a long frame apart."""
_MEASURES = (*STATISTICS, *COUNTS)
_MAX_TEXT = 200
_MAX_LISTED = 50
_MAX_DEPTH = 200
"""Levels of a module tree; what is above a deeper path is not listed."""


class ModuleView:
    """One module of a run: its rows, those of the modules below it, and its tensors. Made by ``run["layers.0.mlp"]``.

    Rows are those of the module and of everything below it, unless ``recurse=False`` asks for its own; `array` and
    `tensor` are of the module itself.
    """

    def __init__(self, run: Run, path: str) -> None:
        self.run = run
        self.path = path

    def __getitem__(self, path: str) -> ModuleView:
        """A module below, by its path relative to this one: ``run["layers.0"]["mlp.down"]``.

        Raises:
            LookupFailedError: there is none; the message names the nearest.
        """
        return narrow(self.run, path, below=self.path)

    def table(self, columns: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True) -> Any:
        """The module's rows, as `Run.table` gives them."""
        return self.run.table(columns, self._and(filter, recurse))

    def to_pandas(
        self, columns: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True
    ) -> pandas.DataFrame:
        """The same as `table`, as a pandas frame."""
        return self.run.to_pandas(columns, self._and(filter, recurse))

    def to_long(
        self, statistics: Sequence[str] | None = None, filter: Any = None, *, recurse: bool = True
    ) -> pandas.DataFrame:
        """The module's statistics, as `Run.to_long` gives them."""
        return to_long(self.run, statistics, self._and(filter, recurse))

    def array(
        self,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        rank: int | None = None,
        micro_step: int | None = None,
        call: int | None = None,
        **more: Unpack[MoreQualifiers],
    ) -> npt.NDArray[Any]:
        """One tensor of the module itself, as `Run.array` gives it."""
        return self.run.array(self.path, site, step, name, rank, micro_step, call, **more)

    def tensor(
        self,
        site: str = "output",
        step: int | None = None,
        name: str | None = None,
        rank: int | None = None,
        micro_step: int | None = None,
        call: int | None = None,
        **more: Unpack[MoreQualifiers],
    ) -> torch.Tensor:
        """The same as `array`, as `Run.tensor` gives it."""
        return self.run.tensor(self.path, site, step, name, rank, micro_step, call, **more)

    @cached_property
    def steps(self) -> list[int]:
        """Steps of which there is a row."""
        return sorted(self.table(["step"]).column("step").unique().to_pylist())

    @cached_property
    def sites(self) -> list[str]:
        """Sites of which there is a row."""
        return _in_order_of_sites(self.table(["site"]).column("site").unique().to_pylist())

    @property
    def children(self) -> list[str]:
        """Relative paths of the modules right below."""
        return list(dict.fromkeys(path.partition(".")[0] for path in self._below))

    @cached_property
    def _below(self) -> list[str]:
        """Relative paths of all modules below."""
        prefix = self.path + "." if self.path else ""
        return [path[len(prefix) :] for path in self.run.known_paths if path != self.path and path.startswith(prefix)]

    def _and(self, expression: Any, recurse: bool) -> Any:
        """A filter for the module's rows, and another one."""
        if not recurse:
            own = pc.field("module_path") == self.path
        elif self.path:
            own = (pc.field("module_path") == self.path) | pc.starts_with(pc.field("module_path"), self.path + ".")
        else:
            return expression
        return own if expression is None else own & expression

    def _ipython_key_completions_(self) -> list[str]:
        return self._below

    @property
    def _class_names(self) -> list[str]:
        return list(dict.fromkeys(info.class_name for (_, path), info in self.run.modules.items() if path == self.path))

    def __repr__(self) -> str:
        name = f" ({', '.join(map(_plain, self._class_names))})" if self._class_names else ""
        parts = [counted(self.table(["step"]).num_rows, "row")]
        if self.steps:
            parts += [f"steps {self.steps[0]} to {self.steps[-1]}", *map(_plain, self.sites)]
        if self._below:
            parts.append(f"{counted(len(self._below), 'module')} below")
        return f"<Module {self.path!r}{name}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        children = self.children[:_MAX_LISTED]
        more = len(self.children) - len(children)
        sources = dict.fromkeys(info.source for (_, path), info in self.run.modules.items() if path == self.path)
        facts = {
            "module": repr(self.path),
            "class": ", ".join(self._class_names),
            "source": ", ".join(sources),
            "run": self.run.run_id,
            "steps": _span(self.steps),
            "children": ", ".join(children) + (f" and {more} more" if more else ""),
        }
        counts = self.table(["site", "step"])
        return _html(facts) + _html_sites(counts)


def narrow(run: Run, path: str, below: str = "") -> ModuleView:
    """The view of a module, by its path below another.

    Raises:
        TypeError: the path is no text.
        LookupFailedError: there is no such module; the message names the nearest.
    """
    if not isinstance(path, str):
        raise TypeError(f"a module path is text, such as 'layers.0.mlp', not {path!r}")
    whole = f"{below}.{path}" if below and path else below or path
    known = run.known_paths
    if whole not in known:
        prefix = below + "." if below else ""
        there = [one.removeprefix(prefix) for one in known if one.startswith(prefix)]
        where = f"below {below!r}" if below else "in this run"
        near = hint(path, there, otherwise="; module_paths lists those with rows")
        raise LookupFailedError(f"no module {path!r} {where}{near}")
    return ModuleView(run, whole)


def find_known_paths(run: Run) -> dict[str, None]:
    """What `Run.known_paths` says."""
    paths: dict[str, None] = {"": None}
    for path in [*(path for _, path in run.modules), *run.module_paths]:
        if path not in paths:
            parts = path.split(".")
            ends = range(1 if len(parts) <= _MAX_DEPTH else len(parts), len(parts) + 1)
            paths |= dict.fromkeys(".".join(parts[:end]) for end in ends)
    return paths


def to_long(run: Run, statistics: Sequence[str] | None, filter: Any) -> pandas.DataFrame:
    """Statistics of rows as a frame of `LONG_KEY`, `statistic` and `value`; see `Run.to_long`.

    Raises:
        ImportError: pandas is not installed.
        LookupFailedError: there is no such statistic, or the filter cannot be applied.
    """
    chosen = tuple(dict.fromkeys(_MEASURES if statistics is None else statistics))
    for name in chosen:
        if name not in _MEASURES:
            near = difflib.get_close_matches(str(name), _MEASURES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; choose of {', '.join(_MEASURES)}"
            raise LookupFailedError(f"no statistic {name!r}{hint}")
    if importlib.util.find_spec("pandas") is None:
        raise ImportError("to_long needs pandas, and it is not installed: pip install pandas")
    wide = run.table([*LONG_KEY, *chosen], filter)
    pieces = []
    for name in chosen:
        some = wide.filter(wide.column(name).is_valid())
        value = some.column(name).cast(pa.float64())
        statistic = pa.array([name], pa.string()).take(pa.array([0] * some.num_rows, pa.int32()))
        pieces.append(some.select(LONG_KEY).append_column("statistic", statistic).append_column("value", value))
    if not pieces:
        pieces = [wide.select(LONG_KEY).slice(0, 0).append_column("statistic", pa.array([], pa.string()))]
        pieces[0] = pieces[0].append_column("value", pa.array([], pa.float64()))
    frame: pandas.DataFrame = pa.concat_tables(pieces).to_pandas()
    return frame


def run_html(run: Run) -> str:
    """A run as HTML: what it is, and how many rows of which site."""
    states = [writer.state for writer in run.writers]
    ranks = _span(run.ranks) + (f" of {run.world_size}" if run.world_size else "")
    facts = {
        "run": run.run_id,
        "path": str(run.path),
        "ranks": ranks,
        "steps": _span(run.steps),
        "rows": f"{run.num_rows:,}",
        "modules": f"{len(run.module_paths):,}",
        "writers": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "problems": "; ".join([*run.problems, *run.endings]),
    }
    return _html(facts) + _html_sites(run.table(["site", "step"]))


def _html(facts: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{_shown(key)}</th><td>{_shown(value)}</td></tr>" for key, value in facts.items() if value)
    return f"<table><tbody>{rows}</tbody></table>"


def _html_sites(rows: Any) -> str:
    """A table of the sites of some rows."""
    found = rows.group_by("site").aggregate([("step", "count"), ("step", "min"), ("step", "max")])
    of = {row["site"]: row for row in found.to_pylist()}
    lines = [
        (site, f"{of[site]['step_count']:,}", f"{of[site]['step_min']} to {of[site]['step_max']}")
        for site in _in_order_of_sites(of)[:_MAX_LISTED]
    ]
    cells = "".join("<tr>" + "".join(f"<td>{_shown(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    head = "".join(f"<th>{title}</th>" for title in ("site", "rows", "steps"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"


def _in_order_of_sites(sites: Iterable[str]) -> list[str]:
    order = {site: number for number, site in enumerate(SITES)}
    return sorted(sites, key=lambda site: (order.get(site, len(order)), site))


def _shown(text: object) -> str:
    """A text of a stranger as HTML: nothing in it is markup."""
    return html.escape(_plain(text), quote=True)


def _plain(text: object) -> str:
    """A text of a stranger, on one line, of bounded length, with nothing in it that a terminal would obey."""
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
    return plain if len(plain) <= _MAX_TEXT else plain[: _MAX_TEXT - 3] + "..."


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
