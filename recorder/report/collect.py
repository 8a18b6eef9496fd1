"""All blocks of a run's page, or of a page of two runs. Bounded in memory for any number of ranks and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .. import __version__
from ..analyze.diff.diff import diff
from ..analyze.diff.result import Diff
from ..analyze.first.first import first
from ..run.notebook import span
from ..run.run import Run
from ..system.text import size
from .axes import Axes, modules_block
from .blocks import Block
from .images import ImageFinder
from .panes import panes_block, read_panes
from .ranks import ranks_block
from .rows import SeriesKey, StepRows, step_rows
from .series.apart import apart_blocks, pairs_of
from .series.statistics import StatisticsBlocks, check_statistics
from .top import Finding, Told, facts_of, gaps_block, of_first, top_block

_MAX_DIFFERING = 200
Report = Callable[[int], None]


def num_looks(run: Run, against: Run | None) -> int:
    """How many rows `collect` will say that it looked at: `first` looks at those of the run, too."""
    return 3 * run.num_rows + (2 * against.num_rows if against is not None else 0)


def collect(
    run: Run,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[Told] | None = (),
    judged: Sequence[Finding] = (),
    below: str | None = None,
    report: Report = lambda num_rows: None,
) -> Iterator[Block]:
    """The blocks of a page.

    Args:
        run: what is drawn.
        against: another run, to be drawn beside it.
        statistics: those that are drawn; by default as many as there is room for.
        checks: what `recorder doctor` says of the run; None where it was not asked.
        judged: what `recorder check` says of it.
        below: draw this module and what is below it, and the numbers of the step; without: all of the run.
        report: called with how many rows were looked at, `num_looks` in all.

    Raises:
        LookupFailedError: there is nothing to draw; the message says what to record the next time.
    """
    with ExitStack() as stack:
        rows = stack.enter_context(step_rows(run))
        images = ImageFinder(run)
        axes = _axes(rows, report, images, below)
        others, other_axes, steps = None, Axes(), None
        if against is not None:
            others = stack.enter_context(step_rows(against))
            other_axes = _axes(others, report, None, below)
            steps = sorted(axes.steps | other_axes.steps)
        share = 1.0 if against is None else 0.5
        collected = StatisticsBlocks(run, axes, asked=statistics, steps=steps, share=share)
        collected.collect(rows, report)
        check_statistics(run, axes, collected)
        nonfinite = first(run)
        report(run.num_rows)
        told: dict[str, Any] = {"version": __version__, "against": None if against is None else against.name}
        if checks is None:
            told["verdict"] = "`recorder doctor` was not asked; it says so on its own"
            checks = ()
        stands_out = [*of_first(nonfinite), *judged]
        size_text = size(sum(writer.shard_bytes for writer in run.writers))
        facts = facts_of(
            run,
            steps=span(run.steps),
            states=[writer.state for writer in run.writers],
            rows=f"{run.num_rows:,}, {size_text}",
        )
        yield top_block(run, checks, stands_out, nonfinite.notes, collected, told, list(facts))
        keys: list[SeriesKey] = [*axes.index, *other_axes.index]
        block, modules = modules_block(run, keys)
        yield block
        yield from collected.blocks(modules)
        yield gaps_block(checks, modules)
        yield ranks_block(run, axes, collected)
        yield images.block(run)
        if panes := read_panes(run.path):
            yield panes_block(panes)
        if against is not None and others is not None:
            other = StatisticsBlocks(against, other_axes, asked=collected.names, steps=steps, share=share, prefix="b.")
            other.collect(others, report)
            pairs = pairs_of(collected, other)
            yield from apart_blocks(collected, other, pairs)
            yield from other.blocks(modules)
            yield _against_block(run, against, diff(run, against), pairs)


def _axes(rows: StepRows, report: Report, images: ImageFinder | None, below: str | None) -> Axes:
    """Look over all rows once."""
    axes = Axes(below=below)
    for table in rows:
        axes.add(table)
        if images is not None and below is None:
            images.add(table)
        report(table.num_rows)
    return axes


def _against_block(a: Run, b: Run, compared: Diff, pairs: list[int]) -> Block:
    """How two runs compare."""
    names = ("step", "module_path", "site", "name", "kind", "max_abs", "of_max", "statistic", "statistic_rel")
    rows = compared.table.slice(0, _MAX_DIFFERING).select(list(names)).to_pylist()
    return Block(
        name="against",
        data={
            "a": a.name,
            "b": b.name,
            "pairs": pairs,
            "verdict": compared.verdict,
            "num_compared": compared.num_compared,
            "num_differing": compared.table.num_rows,
            "culprits": [_culprit(one._asdict()) for one in compared.culprits],
            "differing": [[row[name] for name in names] for row in rows],
            "only_a": [list(row.values()) for row in compared.only_a.slice(0, _MAX_DIFFERING).to_pylist()],
            "only_b": [list(row.values()) for row in compared.only_b.slice(0, _MAX_DIFFERING).to_pylist()],
            "steps_only_a": compared.steps_only_a[:_MAX_DIFFERING],
            "steps_only_b": compared.steps_only_b[:_MAX_DIFFERING],
            "left_out": [[one.num_values, one.why] for one in compared.left_out],
        },
    )


def _culprit(one: Mapping[str, Any]) -> dict[str, Any]:
    names = ("step", "phase", "module_path", "site", "name", "seen_at", "ranks", "why", "hint", "max_abs", "of_max",
             "statistic", "statistic_a", "statistic_b")  # fmt: skip
    return {name: one[name] for name in names}
