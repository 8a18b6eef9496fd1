"""What contradicts itself in the ranks' rows, or in what was said of their layout: named, once each.

Missing ranks and replicas that differ are told elsewhere. Must never read payloads but the few by which a layout is
known.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ..globalview.grouping.findings import Finding
from ..globalview.plan.sampling import load_sample
from ..globalview.plan.values import GlobalValues
from ..globalview.run import Run
from ..globalview.topology.run_topology import Topology
from ..read.writers import load_balances
from ..system.text import counted
from .selection import Selection

_CONTRADICTIONS = ("inconsistent", "layout_changes")
_MAX_NAMED = 8
_MAX_LOADED_ROWS = 1_000_000
"""Rows come in batches, of which some lie at other steps; a million take seconds."""


def left_out(run: Run) -> str:
    """Which rows of a run no answer is about, because they are not there, as a sentence; empty where there are none."""
    load_balances(run.writers)
    balances = [writer.balance for writer in run.writers]
    counts = (
        (sum(one.num_dropped for one in balances), "dropped while recording"),
        (sum(one.passed for one in balances), "kept in memory alone, because no trigger asked for their steps"),
        (sum(one.retired_rows for one in balances), "removed for the quota"),
    )
    told = [f"{counted(number, 'row')} {what}" for number, what in counts if number]
    return f"not looked at: {'; '.join(told)} (recorder doctor says of what)" if told else ""


class Problems:
    """Contradictions in what is selected, added up over ranges of steps."""

    def __init__(self, selection: Selection) -> None:
        self._selection = Selection(module=selection.module, site=selection.site, name=selection.name)
        self._found: dict[str, None] = {}

    def add(self, findings: Sequence[Finding]) -> None:
        """What the global view found in some steps."""
        wrong = [one for one in findings if one.kind in _CONTRADICTIONS]
        columns = {name: [getattr(one, name) for one in wrong] for name in ("module_path", "site", "name")}
        texts = [f"{one.module_path!r} {' '.join(filter(None, (one.site, one.name)))}: {one.text}" for one in wrong]
        table = pa.table({name: pa.array(values, pa.string()) for name, values in (columns | {"text": texts}).items()})
        stages = [one.text for one in findings if one.kind == "partial" and not one.site]
        self._found |= dict.fromkeys([*stages, *self._selection.narrow(table).column("text").to_pylist()])

    def join(self, other: Problems) -> None:
        """What was added to another one, after what was added here."""
        self._found |= other._found

    def __bool__(self) -> bool:
        return bool(self._found)

    def texts(self) -> list[str]:
        """One for each, the first few."""
        more = len(self._found) - _MAX_NAMED
        return [*list(self._found)[:_MAX_NAMED], *([f"and {more} more of these"] if more > 0 else [])]


def layout_problems(run: Run) -> list[str] | None:
    """Contradictions in the steps by which the layouts are known; None where these are too many rows.

    What is so at some steps mostly stays so. A merged run has none: they were told when it was merged.
    """
    if run.is_merged:
        return []
    view = run.view()
    metadata, steps = view.sample_batches()
    if metadata.num_rows > _MAX_LOADED_ROWS:
        return None
    positions = load_sample(metadata, steps)
    topology = Topology(run.writers, run.run_id, run.world_size)
    values = GlobalValues(
        metadata, topology, loss="mean", overrides=[], is_same=_unknown, items_of=_unknown, leaves=view.leaves
    )
    for _ in values.values(positions):
        pass
    problems = Problems(Selection())
    problems.add(values.findings)
    return problems.texts()


def _unknown(*_: object) -> None:
    """Stands for payloads, which nobody reads here except where the layout depends on them."""
