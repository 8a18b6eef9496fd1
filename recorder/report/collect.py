"""Collects the blocks of a page about one run or two. Reads and saves the panes (saved pictures) of a run.

The memory that `collect` needs is bounded for any number of ranks and steps.

Panes are stored in `_view.json` in the run's directory, the only file that a page may change. The file is untrusted
input: everything in it that is not a pane is ignored.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..analyze.check.check import check
from ..analyze.diff.diff import diff
from ..analyze.diff.reply import accusation, culprit_notes, unlike_models
from ..analyze.diff.step_range import Diff
from ..analyze.doctor.reply import Check
from ..errors import LookupFailedError, RunError
from ..format.rundir import encode_manifest
from ..numerics.keys import by_key
from ..run.finding import shortest_text_of
from ..run.notes import damage
from ..run.probe import probe_size
from ..run.reply import span
from ..run.run import Run, TensorLayout
from ..run.status import RankNow, RunWatch
from ..storage.locations import Location, store_of
from ..system.text import counted, size
from .axes import Axes, DrawnSeries, SeriesValues, modules_block, step_rows
from .blocks import Cube, PageBlock
from .distributions import ImageFinder, images_block
from .statistics import StatisticsBlocks, check_statistics
from .top import facts_of, found_since, gaps_block, told_by_check, top_block

_MAX_DIFFERING = 200
_OF_CULPRIT = ("step", "module_path", "site", "name", "seen_at", "hint")
_EXPECTED = ("started", "rows")
"""The titles of facts that differ between any two runs, and are not compared."""
Report = Callable[[int], None]


def num_looks(run: Run, against: Run | None) -> int:
    """Return how many rows `collect` will report: each run's rows twice, and the first run's once more for `check`."""
    return 3 * run.num_rows + (2 * against.num_rows if against is not None else 0)


def collect(
    run: Run,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[Check] | None = (),
    below: str | None = None,
    more: Sequence[PageBlock] = (),
    report: Report = lambda num_rows: None,
) -> Iterator[PageBlock]:
    """Yield the blocks of a page about a run, and about a second run if `against` is given.

    `checks` are the answers of `recorder doctor` about the run, or None if the command did not run. `below` draws only
    this module, the modules below it and scalars, and leaves out findings. `more` are further blocks. `report` is
    called with numbers of processed rows, which add up to `num_looks`. Raise LookupFailedError if there is nothing to
    draw. Its message says what to record next time.
    """
    with ExitStack() as stack:
        rows = stack.enter_context(step_rows(run))
        images = ImageFinder(run)

        def seen(table: Any) -> None:
            if below is None:
                images.add(table)
            report(table.num_rows)

        axes, other_axes = Axes(below=below), Axes(below=below)
        probe = axes.read(run, rows, seen)
        others, other_probe, steps = None, list[SeriesValues](), None
        if against is not None:
            others = stack.enter_context(step_rows(against))
            other_probe = other_axes.read(against, others, lambda table: report(table.num_rows))
            steps = sorted(axes.steps | other_axes.steps)
        share = 1.0 if against is None else 0.5
        collected = StatisticsBlocks(run, axes, asked=statistics, steps=steps, share=share)
        collected.collect(rows, probe, report)
        check_statistics(run, axes, collected)
        judged = check(run) if below is None else None
        report(run.num_rows)
        told: dict[str, Any] = {"version": __version__, "against": None if against is None else against.name}
        if checks is None:
            told["verdict"] = "`recorder doctor` did not run; run it for an answer"
            checks = ()
        else:
            checks = [*checks, *found_since(run, checks)]
        probed, rows_text = probe_size(run.writers), f"{run.num_rows:,}"
        if probed is not None:
            rows_text += (
                f", and {run.num_all_rows - run.num_rows:,} of the probe, which hold {probed.num_numbers:,} numbers"
            )
        rows_text += f", {size(run.size_bytes)}"
        facts = facts_of(run, steps=span(run.steps), states=_states(run), rows=rows_text)
        typed = shortest_text_of(run.path, run.name)
        found, notes = (
            ([], [])
            if judged is None
            else (told_by_check(run, judged.findings, typed, judged.num_unjudged), judged.notes)
        )
        yield top_block(run, checks, found, collected, told, list(facts), notes=notes)
        keys: list[DrawnSeries] = [*axes.index, *other_axes.index]
        block, modules = modules_block(run, keys)
        yield block
        yield from collected.blocks(modules)
        yield gaps_block(checks, modules)
        yield ranks_block(run, axes, collected, RunWatch(run.path).look())
        yield images_block(images.images(run))
        yield from more
        if panes := read_panes(run.path):
            yield panes_block(panes)
        if against is not None and others is not None:
            other = StatisticsBlocks(against, other_axes, asked=collected.names, steps=steps, share=share, prefix="b.")
            other.collect(others, other_probe, report)
            pairs = pairs_of(collected, other)
            yield from apart_blocks(collected, other, pairs)
            yield from other.blocks(modules)
            yield _against_block(run, against, diff(run, against), pairs)


def _against_block(a: Run, b: Run, compared: Diff, pairs: list[int]) -> PageBlock:
    damaged = damage(b)
    names = ("step", "module_path", "site", "name", "kind", "max_abs", "of_max", "statistic", "statistic_rel")
    rows = compared.table.slice(0, _MAX_DIFFERING).select(list(names)).to_pylist()
    return PageBlock(
        name="against",
        data={
            "a": f"{a.path.parent.name}/{a.name}",
            "b": f"{b.path.parent.name}/{b.name}",
            "typed_b": shortest_text_of(b.path, b.name),
            "pairs": pairs,
            "verdict": compared.verdict,
            "models": [
                *([f"B is damaged, and its unreadable values were left out: {damaged}"] if damaged else []),
                *unlike_models(a, b),
            ],
            "num_compared": compared.num_compared,
            "num_differing": compared.table.num_rows,
            "facts": _unlike_facts(a, b),
            "culprits": [
                {name: getattr(one, name) for name in _OF_CULPRIT}
                | {
                    "text": accusation(one, compared.culprits[0], has_models=a.has_models or b.has_models),
                    "is_bad": bool(one.nonfinite_a) != bool(one.nonfinite_b),
                }
                for one in compared.culprits[:_MAX_DIFFERING]
            ],
            "notes": list(culprit_notes(compared.culprits)),
            "differing": [[row[name] for name in names] for row in rows],
            "only_a": [list(row.values()) for row in compared.only_a.slice(0, _MAX_DIFFERING).to_pylist()],
            "only_b": [list(row.values()) for row in compared.only_b.slice(0, _MAX_DIFFERING).to_pylist()],
        },
    )


def _unlike_facts(a: Run, b: Run) -> list[tuple[str, str, str]]:
    """Return the facts in which two runs differ, as a title and the text of each run. Each rule has a line."""
    facts = [list(facts_of(run, steps=span(run.steps), states=_states(run), rows="")) for run in (a, b)]
    titles = dict.fromkeys(title for title, _ in [*facts[0], *facts[1]] if title not in _EXPECTED)
    unlike = []
    for title in titles:
        left, right = ([text for name, text in some if name == title] for some in facts)
        if left != right:
            only_left, only_right = (
                [text for text in some if text not in left or text not in right] for some in (left, right)
            )
            unlike.append((title, "\n".join(only_left), "\n".join(only_right)))
    return unlike


def _states(run: Run) -> list[str]:
    return [writer.state for writer in run.writers]


def pairs_of(a: StatisticsBlocks, b: StatisticsBlocks) -> list[int]:
    """Return the index in `b` of each series of `a`, -1 if `b` lacks the series. The root (model) may differ."""
    numbers = {key: number for number, key in enumerate(b.series)}
    of_any_root = by_key((key[1:], number) for number, key in enumerate(b.series))
    pairs = []
    for key in a.series:
        others = of_any_root.get(key[1:], [])
        pairs.append(numbers.get(key, others[0] if len(others) == 1 else -1))
    return pairs


def apart_blocks(a: StatisticsBlocks, b: StatisticsBlocks, pairs: list[int]) -> Iterator[PageBlock]:
    """Yield a block for each statistic. It has the relative differences between the first lanes of two runs."""
    names = [name for name in a.names if name in b.names]
    cube = Cube(
        steps=a.cube.steps.tolist(), num_columns=a.cube.shape[2], num_series=len(a.series), num_lanes=1,
        statistics=names,
    )  # fmt: skip
    own = np.flatnonzero(np.array(pairs, np.int64) >= 0)
    others = np.array(pairs, np.int64)[own]
    for name in names:
        left = a.cube.values[name][own, 0].astype(np.float64)
        right = b.cube.values[name][others, 0].astype(np.float64)
        largest = np.maximum(np.abs(left), np.abs(right))
        share = np.abs(left - right) / np.where(largest > 0, largest, 1.0)
        cube.values[name][own, 0] = share.astype(np.float32)
    cube.has_row[own, 0] = a.cube.has_row[own, 0] & b.cube.has_row[others, 0]
    yield from cube.blocks("apart", 0)


_MAX_LAYOUTS = 24
_MAX_CHUNKS = 128
_MAX_ROWS, _MAX_RANKS = 1_000_000, 256
"""The most rows and ranks of a run whose layouts are drawn. Finding layouts reads all ranks' rows three times more."""
_SHOWN_SITES = ("param", "grad", "output", "grad_output")


def ranks_block(
    run: Run, axes: Axes, collected: StatisticsBlocks, now: Sequence[RankNow],
    layouts: Sequence[Mapping[str, Any]] | None = None,
) -> PageBlock:  # fmt: skip
    """Return the block of the ranks, with their statuses `now`. `layouts` say which rank had which chunk, if known."""
    odd, of_rank = collected.odd, {one.rank: one for one in now}
    newest_s = min((one.silent_s for one in now), default=0.0)
    rows: list[list[Any]] = []
    for writer in run.writers:
        rank, manifest, balance = writer.rank, writer.manifest, writer.balance
        rows.append([rank, manifest.host, manifest.local_rank, manifest.node_rank, writer.attempt, writer.state])
        rows[-1] += [balance.written, balance.num_dropped]
        is_judged = rank is not None and rank < len(odd.far)
        rows[-1] += [int(of[rank]) if is_judged else None for of in (odd.far, odd.alone, odd.compared)]
        rows[-1] += [None, None, odd.farthest(rank, collected.series) if rank is not None and is_judged else ""]
        told = None if rank is None else of_rank.get(rank)
        if told is None or told.status.attempt != writer.attempt:
            continue
        status = told.status
        rows[-1][5:8] = told.state, max(balance.written, status.written), max(balance.num_dropped, status.num_dropped)
        rows[-1][11:13] = status.step if status.has_step else None, round(told.silent_s - newest_s, 1)
    why = ""
    if run.is_merged:
        why = "A merged run has whole tensors. The run that was merged shows which rank had which chunk."
    elif len(run.ranks) < 2:
        why = "There is one rank, and it has everything."
    elif layouts is not None:
        why = "" if layouts else "Not known yet: no parameter, gradient or output of several ranks was recorded."
    elif axes.num_rows > _MAX_ROWS or len(run.ranks) > _MAX_RANKS:
        amount = f"{counted(axes.num_rows, 'row')} of {counted(len(run.ranks), 'rank')}"
        why = f"{amount} are too many for this page; `recorder show --where` shows which rank had what."
    else:
        layouts = layouts_of(run, axes, list(axes.index), set())
    titles = ["rank", "host", "local rank", "node", "attempt", "state", "rows", "dropped", "far", "alone", "compared"]
    titles += ["step", "late", "farthest"]
    return PageBlock(
        name="ranks",
        data={"titles": titles, "rows": rows, "odd": odd.found(), "layouts": list(layouts or ()), "why_none": why},
    )


def layouts_of(run: Run, axes: Axes, keys: Sequence[DrawnSeries], seen: set[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return which rank had which chunk of a value, for the first series of each kind that is not in `seen`.

    Series with equal class, site, name, shape and mode are one kind. The kinds are added to `seen`.
    """
    classes = {path: info.class_name for (_, path), info in run.modules.items()}
    layouts = []
    for key in sorted((one for one in keys if one.site in _SHOWN_SITES), key=lambda one: _SHOWN_SITES.index(one.site)):
        kind = classes.get(key.module_path, ""), key.site, key.name, axes.shapes[axes.index[key]], key.mode
        if kind in seen or len(seen) >= _MAX_LAYOUTS:
            continue
        seen.add(kind)
        step = axes.first_steps[axes.index[key]]
        question = {"name": key.name, "mode": key.mode}
        for more in ({}, {"call": 0}, {"call": 0, "micro_step": 0}):
            with suppress(LookupFailedError):  # several values match the query, or no value counts
                layout = run.layout(key.module_path, key.site, step, **question, **more)  # type: ignore[arg-type]
                layouts.append(_described(key, layout))
                break
    return layouts


def _described(key: DrawnSeries, layout: TensorLayout) -> dict[str, Any]:
    chunks = [
        [chunk.rank, list(chunk.shape), None if chunk.offsets is None else list(chunk.offsets), int(chunk.is_copy),
         chunk.placements, chunk.reduce_op, chunk.micro_step]
        for chunk in layout.pieces[:_MAX_CHUNKS]
    ]  # fmt: skip
    return {
        "module": key.module_path, "site": key.site, "name": key.name,
        "shape": None if layout.global_shape is None else list(layout.global_shape),
        "source": layout.source, "why": layout.why, "scale": layout.scale, "missing": list(layout.missing),
        "num_chunks": len(layout.pieces), "chunks": chunks,
    }  # fmt: skip


VIEW = "_view.json"
KINDS = ("map", "lines", "numbers", "histograms", "units", "graph")
MAX_PANES = 40
MAX_BYTES = 256 << 10
_MAX_NAME = 200
_STATES = ("site", "mode", "name", "stat", "lane", "axes", "log", "each", "from", "to", "step", "module")
_LISTS = ("pins", "open", "shut")


def read_panes(run: Location) -> list[dict[str, Any]]:
    """Return the panes (saved pictures) of a run. Empty if their file is missing or unreadable."""
    store = store_of(run)
    with suppress(RunError, OSError):
        if store.is_file(run / VIEW):
            return checked_panes(store.read_json(run / VIEW, MAX_BYTES).get("panes"))
    return []


def checked_panes(document: object) -> list[dict[str, Any]]:
    """Return the valid panes (saved pictures) in a JSON value, each with name, kind, width and state."""
    panes: list[dict[str, Any]] = []
    for one in document if isinstance(document, list) else ():
        if not isinstance(one, Mapping) or one.get("kind") not in KINDS or len(panes) >= MAX_PANES:
            continue
        name, state = one.get("name"), one.get("state")
        name = name[:_MAX_NAME] if isinstance(name, str) else ""
        state = _state(state if isinstance(state, Mapping) else {})
        panes.append({"name": name, "kind": one["kind"], "wide": one.get("wide") is True, "state": state})
    return panes


def _state(pane: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: pane[name] for name in _STATES if isinstance(pane.get(name), (str, int, float))}
    lists = {name: pane[name] for name in _LISTS if isinstance(pane.get(name), list)}
    return {name: value for name, value in (plain | lists).items() if len(json.dumps(value)) < MAX_BYTES // 8}


def panes_block(panes: list[dict[str, Any]], why_not_saved: str | None = None) -> PageBlock:
    """Return the block of the panes (saved pictures). `why_not_saved` is None in a file, or if a server saves them."""
    return PageBlock(name="panes", data={"panes": panes, "why_not_saved": why_not_saved})


def why_not_saved(run: Location) -> str | None:
    """Return why panes (saved pictures) cannot be saved with a run, or None if they can be saved."""
    if not isinstance(run, Path):
        return "the run lies in an object store, which recorder view never writes to"
    if not os.access(run, os.W_OK):
        return "the directory of the run is not writable"
    return None


def save_panes(run: Location, panes: list[dict[str, Any]]) -> str | None:
    """Save all panes (saved pictures) of a run. Return None, or why no pane could be saved."""
    why = why_not_saved(run)
    if why is not None:
        return why
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f"{VIEW}.", suffix=".tmp", dir=str(run))
        try:
            with open(descriptor, "wb") as file:
                file.write(encode_manifest({"panes": panes}))
            Path(temporary).replace(Path(str(run)) / VIEW)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        return f"the panes could not be written ({error.strerror})"
    return None
