"""Answers `recorder layouts` and `recorder show --where`: how values are split over ranks, and how this is known.

The module must never read a payload if the rows decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import pyarrow.compute as pc

from ..errors import LookupFailedError, NotARunError
from ..merge.unit import is_problem
from ..run.notes import RowFinding, damage, left_out
from ..run.reply import Reply, Table, plain
from ..run.run import Run
from ..run.selection import Selection
from ..system.text import counted, grouped, value_in_words
from .modules import explain_nothing, modules_meant, rows_of, site_order

_VALUE = ("root", "name", "scope", "phase", "mode")
_MOMENT = ("micro_step", "call", "repeat")
_OF_STAGES = ("root", "micro_step")
"""The columns in which chunks of one value may differ between pipeline stages."""
_CONTRADICTIONS = ("replicas_differ", "inconsistent", "layout_changes")
"""The kinds of findings in which the ranks' values contradict their known layout."""


class SameLayout(NamedTuple):
    """The values that are split over ranks in one way, known from one source."""

    layout: str
    """The placements on the mesh of the ranks that share a batch, and the dim along which batches are joined."""
    ground: str
    """The source of the layout, as in the column `layout_source`, or the reason why the ranks' values stay apart."""
    num_values: int
    """The number of values. A value is a module, a site and a name."""
    example: str


class Layouts(NamedTuple):
    """The result of `recorder layouts`: how values are split over ranks at some steps of a run."""

    first_step: int
    last_step: int
    ways: list[SameLayout]
    """The layouts of the values. The layout that most values have comes first."""
    num_values: int
    """The number of values. A value that changes its layout counts once here, but once in each of its layouts."""
    contradiction: RowFinding | None
    num_contradictions: int


def layouts(run: Run) -> Layouts:
    """Return how the values of a run are split over ranks at the first steps.

    Reads at least one step, and further steps up to 200,000 rows over all ranks. Raises NotARunError if the run is a
    merge, whose tensors are whole.
    """
    if (source := run.manifest.merged_from) is not None:
        raise NotARunError(f"{run.path}: is the merge of run {source.run_id}, with whole tensors; name that run")
    view = run.view()
    first, end = next(iter(view.windows()), (0, 1))
    rows = view.rows(first, end)
    columns = [rows.table.column(name).to_pylist() for name in ("module_path", "site", "name")]
    steps = rows.table.column("step").to_pylist()
    examples: dict[tuple[str, str], dict[str, None]] = {}
    for i, (module_path, site, name) in enumerate(zip(*columns, strict=True)):
        if (how := rows.how_it_lies(i)) is not None:
            examples.setdefault(how, {})[value_in_words(module_path, site, name)] = None
    ways = [SameLayout(*how, len(values), next(iter(values))) for how, values in examples.items()]
    wrong = [one for one in rows.findings if one.kind in _CONTRADICTIONS]
    return Layouts(
        first_step=min(steps, default=first),
        last_step=max(steps, default=first),
        ways=sorted(ways, key=lambda way: -way.num_values),
        num_values=len({value for values in examples.values() for value in values}),
        # If a step has several contradictions, `min` takes the first in the order of execution.
        contradiction=min(wrong, key=lambda one: one.step, default=None),
        num_contradictions=len(wrong),
    )


def reply_of(run: Run, answer: Layouts) -> Reply:
    """Return the reply that prints the layouts as JSON or as a table."""

    def parts() -> Iterator[str | Table]:
        if run.problems:
            yield f"note: the run is damaged, and what cannot be read was left out: {damage(run)}"
        if told := left_out(run):
            yield f"note: {told}"
        steps = f"step {answer.first_step}"
        if answer.last_step > answer.first_step:
            steps = f"steps {answer.first_step} to {answer.last_step}"
        yield Table(
            ("layout", "ground", "values", "for example"),
            [[way.layout, way.ground, f"{way.num_values:,}", way.example] for way in answer.ways],
            numbers=("values",),
            prose=("layout", "ground"),
            title=f"{run.name}: {counted(answer.num_values, 'value')} at {steps}",
        )
        if (more := sum(way.num_values for way in answer.ways) - answer.num_values) > 0:
            yield f"note: {counted(more, 'value')} counted in several lines, because their layout changes"
        found = answer.contradiction
        if found is None:
            num = counted(answer.num_values, "value")
            yield f"none of {num} contradicts its layout at {steps}" if answer.num_values else "no value was judged"
            return
        value = value_in_words(found.module_path, found.site, found.name)
        yield f"contradiction: step {found.step}, {value}: {found.text}"
        if answer.num_contradictions > 1:
            yield f"{answer.num_contradictions - 1} more contradictions; recorder first names replicas that differ"

    return Reply(
        members=lambda: {"run": run.run_id, **plain(answer)},
        parts=parts,
        exit_code=int(bool(run.problems) or answer.contradiction is not None),
    )


def where_reply(run: Run, wanted: Selection, *, layouts: Sequence[str], stage: int | None) -> Reply:
    """Return the output of ``show --where``, about one site at one step: by default the outputs at the last step.

    The exit code is 1 if a chunk is missing or does not fit. If a value was recorded several times in the step, only
    the first record is shown.
    """
    if wanted.module is None:
        raise LookupFailedError("--where: name the module whose values to draw; '' is the root")
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
        parts=lambda: "\n\n".join(map(str, drawn)).splitlines(),
        exit_code=int(bool(run.problems) or any(one.missing or (one.kind and is_problem(one.kind)) for one in drawn)),
    )


def _questions(table: Any, *, has_slices: bool, is_named: bool) -> list[dict[str, Any]]:
    """Return the columns that distinguish each value's first record from the records of the other values.

    `is_named` is True if the table was filtered by name. Then the site may have values of other names.
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
