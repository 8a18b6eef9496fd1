"""What manifests say of pipelines: which stage of a root a writer ran, and which stages nobody recorded.

The stages of a root are one model, and the slices of a step (its micro-batches) one batch. `Times.order` puts the rows
of all ranks, with or without stages, into the order of execution.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..columns import HANDED_ON, note_members
from ..format.roots import MAX_STAGES, Stage
from ..numerics.keys import Times
from ..sites import NUMBERS
from ..system.text import listed
from .metadata import NONE, MetadataRows, Positions

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def mark_stage(stage: Stage, note: str | None) -> str:
    """A row's note, with what says that the row is of a value between stages."""
    return json.dumps({**note_members(note), HANDED_ON: list(stage)}, separators=(",", ":"))


def missing_stages(stages: Mapping[tuple[int, str], Stage]) -> Iterator[str]:
    """A sentence for each pipeline of which stages are missing; a rank with several stages has a root for each."""
    numbers_of: dict[int, set[int]] = {}
    for stage in stages.values():
        numbers_of.setdefault(stage.num_stages, set()).add(stage.number)
    for num_stages, some in numbers_of.items():
        if gone := sorted(set(range(num_stages)) - some):
            yield f"no rank left a record of stage {listed(gone)} (from 0) of a pipeline of {num_stages}"


def whole_roots(stages: Mapping[tuple[int, str], Stage]) -> dict[str, str]:
    """For each root that is a stage the name of the whole model: the root of the first stage."""
    names = {stage.num_stages: root for (_, root), stage in sorted(stages.items()) if stage.number == 0}
    return {root: names.get(stage.num_stages, root) for (_, root), stage in stages.items()}


def stages_of_rows(rows: MetadataRows, positions: Positions, stages: Mapping[tuple[int, str], Stage]) -> Ints:
    """The stage of each of some rows, `NONE` where nothing says one; of a merged run their notes do."""
    stage_of_row: Ints = np.full(len(positions), NONE)
    writers, roots = rows.writer_numbers(positions), rows.keys("root", positions)
    for (writer, root), stage in stages.items():
        stage_of_row[(writers == writer) & (roots.codes == roots.code(root))] = stage.number
    if not stages:
        notes = rows.keys("note", positions)
        told = [note_members(text).get("stage") for text in notes.texts or ()]
        sound = (stage if type(stage) is int and 0 <= stage < MAX_STAGES else NONE for stage in told)
        stage_of_row = np.array([*sound, NONE])[notes.codes]
    return stage_of_row


class MicroBatches:
    """For each of some rows, its stage and its micro-batch."""

    def __init__(self, rows: MetadataRows, chosen: Positions, stages: Mapping[tuple[int, str], Stage]) -> None:
        self.stage: Ints = np.full(len(chosen), NONE)
        """`NONE` for a row of no pipeline, and for the numbers of a step, which are of the whole program."""
        self.micro_step: Ints = np.zeros(len(chosen), np.int64)
        """0 but in a pipeline."""
        self.key: Ints = rows.numbers("micro_step")[chosen].copy()
        """The slice that tells values apart: in a pipeline there is none."""
        if stages:
            self._fill(rows, chosen, stages)

    def _fill(self, rows: MetadataRows, chosen: Positions, stages: Mapping[tuple[int, str], Stage]) -> None:
        writers, roots, sites = rows.writer_numbers(chosen), rows.keys("root", chosen), rows.keys("site", chosen)
        is_value = ~np.isin(sites.codes, [sites.code(site) for site in NUMBERS])
        for (writer, root), stage in stages.items():
            self.stage[(writers == writer) & (roots.codes == roots.code(root)) & is_value] = stage.number
        at = (self.stage != NONE) & (self.key != NONE)
        self.micro_step[at] = self.key[at]
        self.key[at] = 0


def in_order(rows: MetadataRows, at: Positions, stage: Ints) -> Ints:
    """The order of execution of some values.

    Args:
        rows: of a run.
        at: of each value its first row.
        stage: of each value, `NONE` where there is none.
    """
    phases = rows.keys("phase", at)
    nothing = np.zeros(len(at), np.int64)
    return Times(
        rows.numbers("step")[at],
        rows.keys("mode", at).codes,
        phases.codes == phases.code("forward"),
        np.isin(phases.codes, [phases.code("backward"), phases.code("recompute")]),
        rows.numbers("seq")[at],
        stage,
        micro_step=nothing,
        rank=nothing,
    ).order()


def unseen(ranks: Sequence[int], micro_steps: Sequence[int], known: set[int]) -> str:
    """Which micro-batches some rank lacks, of those that any has; empty where none does."""
    everything = known | set(micro_steps)
    of_rank: dict[int, set[int]] = {}
    for rank, micro_step in zip(ranks, micro_steps, strict=True):
        of_rank.setdefault(rank, set()).add(micro_step)
    lacking = {rank: sorted(everything - own) for rank, own in of_rank.items() if everything - own}
    shown = [f"{', '.join(map(str, gone[:8]))} of rank {rank}" for rank, gone in list(lacking.items())[:4]]
    return f"no row of micro-batch {'; '.join(shown)}" if shown else ""
