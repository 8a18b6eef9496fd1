"""Selects the modules and rows of one run that a command was asked for, and says why there are none."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow.compute as pc

from ..errors import LookupFailedError
from ..rules import hint
from ..run.finding import typed_for
from ..run.run import Run
from ..run.selection import Selection
from ..sites import SITES
from ..system.text import listed, span

_MAX_LISTED = 20
_SITES = ("output", *(site for site in SITES if site != "output"))
"""Sites in the order in which they are shown; most questions are about outputs."""


def modules_meant(run: Run, wanted: Selection) -> list[str]:
    """Return the modules with rows that a selection names; all modules where it names none.

    Raises:
        LookupFailedError: no module matches; the message names the nearest.
    """
    paths = wanted.modules(run.module_paths)
    if not paths and wanted.module is not None:
        command = shlex.join(["recorder", "show", typed_for(run.path, run.name)])
        near = hint(wanted.module, run.module_paths, otherwise=f"; {command} lists the modules")
        raise LookupFailedError(f"no module {wanted.module!r} in this run{near}")
    return paths


def rows_of(run: Run, wanted: Selection, columns: Sequence[str], more: Any = None) -> Any:
    """Return the selected rows, one for each tensor; Arrow chooses the modules before rows are made."""
    expression = pc.field("part") == 0
    if wanted.module is not None:
        expression &= pc.field("module_path").isin(wanted.modules(run.module_paths))
    if more is not None:
        expression &= more
    return replace(wanted, module=None).narrow(run.table(columns, expression))


def explain_nothing(run: Run, wanted: Selection) -> NoReturn:
    """Raise the most helpful reason why there is nothing to show."""
    subject = "this run" if wanted.module is None else repr(wanted.module)
    table = rows_of(run, Selection(module=wanted.module), ["site", "name", "step", "rank"])
    for column, text in (("site", wanted.site), ("name", wanted.name)):
        if text is None:
            continue
        recorded = sorted(table.column(column).unique().to_pylist())
        table = Selection(**{column: text}).narrow(table)
        if not table.num_rows:
            near = difflib.get_close_matches(text, recorded, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = listed((name or "''" for name in recorded), _MAX_LISTED)
            raise LookupFailedError(f"{subject} has no such row; its {column}s are {names}{hint}")
    steps, ranks = (sorted(set(table.column(name).drop_null().to_pylist())) for name in ("step", "rank"))
    extent = f"it has steps {span(steps) or 'none'} and ranks {span(ranks) or 'none'}"
    step = str(wanted.step)
    ended = run.ended_before(int(step)) if step.isdecimal() else ""
    raise LookupFailedError(f"no row of {subject} at these steps and ranks; {extent}{'; ' if ended else ''}{ended}")


def site_order(site: str) -> tuple[int, str]:
    """Return the key that sorts sites: outputs first, then as the format lists them."""
    return (_SITES.index(site) if site in _SITES else len(_SITES), site)
