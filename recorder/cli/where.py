"""``recorder show --where``: draws where the ranks' chunks of a module's values lie, or prints it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow.compute as pc

from ..errors import LookupFailedError
from ..merge.unit import is_problem
from ..run.reply import Reply
from ..run.run import Run, TensorLayout
from ..run.selection import Selection
from ..system.text import grouped
from .selected import explain_nothing, modules_meant, rows_of, site_order

_VALUE = ("root", "name", "scope", "phase", "mode")
_MOMENT = ("micro_step", "call", "repeat")
_OF_STAGES = ("root", "micro_step")
"""Columns in which the chunks of one value differ where several pipeline stages have them."""


def where_reply(run: Run, wanted: Selection, *, layouts: Sequence[str], stage: int | None) -> Reply:
    """Return the reply about the values of one site at one step, by default outputs at the last.

    The exit code is 1 where a chunk is missing or does not fit. A value that the step has several times is drawn once,
    as it was first seen.
    """
    module_path, *others = modules_meant(run, wanted)
    if others:
        some = grouped([module_path, *others])
        raise LookupFailedError(f"--where draws one module, and {wanted.module!r} means several: {', '.join(some)}")
    table = rows_of(run, wanted, ["site", "step", "rank", "attempt", *_VALUE, *_MOMENT])
    if not table.num_rows:
        explain_nothing(run, wanted)
    site = min(table.column("site").unique().to_pylist(), key=site_order)
    table = table.filter(pc.field("site") == site)
    step = pc.max(table.column("step")).as_py()
    table = table.filter(pc.field("step") == step)
    drawn = [
        run.layout(module_path, site, step, layouts=layouts, stage=stage, **question)
        for question in _questions(table, has_slices=run.view().has_pipeline, is_named=wanted.name is not None)
    ]
    return Reply(
        members=lambda: {"run": str(run.path), "module": module_path, "layouts": [asdict(layout) for layout in drawn]},
        parts=lambda: [
            line for number, layout in enumerate(drawn) for line in [""] * (number > 0) + str(layout).splitlines()
        ],
        exit_code=int(bool(run.problems) or any(map(_is_wrong, drawn))),
    )


def _questions(table: Any, *, has_slices: bool, is_named: bool) -> list[dict[str, Any]]:
    """Return, for each value of a table at its first moment, the columns that tell it from the others.

    `is_named`: the table has only values of some names, and the site has others.
    """
    of_value = [name for name in _VALUE if not (has_slices and name in _OF_STAGES)]
    of_moment = [name for name in _MOMENT if not (has_slices and name in _OF_STAGES)]
    rows = table.group_by([*of_value, *of_moment], use_threads=False).aggregate([]).to_pylist()
    differing = {name for name in (*of_value, *of_moment) if len({row[name] for row in rows}) > 1}
    differing |= {"name"} if is_named else set()
    firsts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: [row[name] or 0 for name in of_moment]):
        firsts.setdefault(tuple(row[name] for name in of_value), row)
    return [{name: row[name] for name in differing} for row in firsts.values()]


def _is_wrong(layout: TensorLayout) -> bool:
    return bool(layout.missing) or (layout.kind != "" and is_problem(layout.kind))
