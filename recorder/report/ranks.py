"""Who the ranks were, how odd each is, and who had which chunk of a tensor. Never reads a payload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import LookupFailedError
from ..globalview.explain import TensorLayout
from ..run.run import Run
from ..system.text import counted
from .axes import Axes, is_number
from .blocks import Block
from .rows import SeriesKey
from .series.statistics import StatisticsBlocks

_MAX_LAYOUTS = 24
_MAX_CHUNKS = 128
_MAX_ROWS = 1_000_000
"""Who had which chunk takes long to say for a run with more rows; `recorder show --where` says it."""
_SHOWN_SITES = ("param", "grad", "output", "grad_output")


def ranks_block(
    run: Run, axes: Axes, collected: StatisticsBlocks, layouts: Sequence[Mapping[str, Any]] | None = None
) -> Block:
    """The block of the ranks; `layouts` say who had which chunk, where that is known already."""
    odd = collected.odd
    rows = []
    for writer in run.writers:
        rank, manifest, balance = writer.rank, writer.manifest, writer.balance
        is_judged = rank is not None and rank < len(odd.far)
        rows.append(
            [
                rank,
                manifest.host,
                manifest.local_rank,
                manifest.node_rank,
                writer.attempt,
                writer.state,
                balance.written,
                balance.num_dropped,
                int(odd.far[rank]) if is_judged and rank is not None else None,
                int(odd.alone[rank]) if is_judged and rank is not None else None,
                int(odd.compared[rank]) if is_judged and rank is not None else None,
            ]
        )
    why = ""
    if layouts is not None:
        why = "" if layouts or len(run.ranks) < 2 else "Nothing was recorded yet whose chunks are known."
    elif run.is_merged:
        why = "A merged run has whole tensors. The run that it was merged from knows who had which chunk."
    elif axes.num_rows > _MAX_ROWS:
        why = (
            f"{counted(axes.num_rows, 'row')} are too many to look at here: `recorder show --where` says who had what."
        )
    elif len(run.ranks) < 2:
        why = "There is one rank, and it has everything."
    else:
        layouts = layouts_of(run, axes, list(axes.index), set())
    titles = ["rank", "host", "local rank", "node", "attempt", "state", "rows", "dropped", "far", "alone", "compared"]
    return Block(
        name="ranks",
        data={"titles": titles, "rows": rows, "odd": odd.found(), "layouts": list(layouts or ()), "why_none": why},
    )


def layouts_of(run: Run, axes: Axes, keys: Sequence[SeriesKey], seen: set[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Who had which chunk of the first value of each kind, of some series. Kinds that were `seen` are left out."""
    return [_described(key, layout) for key, layout in _layouts(run, axes, keys, seen)]


def _layouts(
    run: Run, axes: Axes, some: Sequence[SeriesKey], seen: set[tuple[str, ...]]
) -> Iterator[tuple[SeriesKey, TensorLayout]]:
    """The layout of the first value of each kind: the same class, site, name and shape are one kind."""
    classes = {path: info.class_name for (_, path), info in run.modules.items()}
    keys = sorted((key for key in some if key.site in _SHOWN_SITES and not is_number(key.site)), key=_order)
    for key in keys:
        kind = classes.get(key.module_path, ""), key.site, key.name, axes.shapes[axes.index[key]], key.mode
        if kind in seen or len(seen) >= _MAX_LAYOUTS:
            continue
        seen.add(kind)
        step = axes.first_steps[axes.index[key]]
        question = {"name": key.name, "mode": key.mode}
        for more in ({}, {"call": 0}, {"call": 0, "micro_step": 0}):
            try:
                yield key, run.layout(key.module_path, key.site, step, **question, **more)  # type: ignore[arg-type]
            except LookupFailedError:
                continue  # several are meant, or none counts
            break


def _order(key: SeriesKey) -> int:
    return _SHOWN_SITES.index(key.site)


def _described(key: SeriesKey, layout: TensorLayout) -> dict[str, Any]:
    chunks = [
        [chunk.rank, list(chunk.shape), None if chunk.offsets is None else list(chunk.offsets), int(chunk.is_copy),
         chunk.placements, chunk.reduce_op, chunk.micro_step]
        for chunk in layout.pieces[:_MAX_CHUNKS]
    ]  # fmt: skip
    return {
        "module": key.module_path,
        "site": key.site,
        "name": key.name,
        "shape": None if layout.global_shape is None else list(layout.global_shape),
        "source": layout.source,
        "why": layout.why,
        "scale": layout.scale,
        "missing": list(layout.missing),
        "num_chunks": len(layout.pieces),
        "chunks": chunks,
    }
