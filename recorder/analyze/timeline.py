"""Owns the rows of a run in the order of time, and where in the run one of them is. Never reads a payload unasked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import RunError
from ..format.schema import COUNTS, STATISTICS
from ..read.facts import RunFacts
from ..read.run import Run
from ..read.stages import Times
from .events import stage_of
from .keys import SERIES_KEY, VALUE_KEY, Groups, Integers, codes, common_ids, encode, group, holds, join
from .moments import integers

_KEY = ("step", "micro_step", "call", "repeat", "mode", "phase", "rank", "attempt", "scope",
        "root", "module_path", "site", "name")  # fmt: skip
_COLUMNS = (
    *_KEY,
    "seq",
    "dtype",
    "shape",
    "numel",
    "offsets",
    "placements",
    "mesh",
    "note",
    *STATISTICS,
    *COUNTS,
    "fingerprint",
    "encoding",
)

PER_RANK = ("*=per_rank",)
"""The view in which every row is as its rank recorded it."""
_WINDOW_ROWS = 50_000


class Place(NamedTuple):
    """Which value this is, and where it was seen."""

    step: int
    module_path: str
    site: str
    name: str
    rank: int | None
    """None for a value of all ranks, in a merged run."""
    micro_step: int | None
    call: int
    repeat: int
    mode: str
    phase: str
    scope: str | None
    root: str
    attempt: int
    dtype: str
    shape: str
    module_class: str
    """Class of the module, where the run says it."""
    source: str
    """File and line of that class, where the run says it."""


class Timeline:
    """The rows of whole tensors by step, then in each rank's order of execution; of two lives the newer.

    Stages of a pipeline follow one another, micro-batch by micro-batch.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        table = run.table(list(_COLUMNS), pc.field("part") == 0)
        counts = _counting(run, table)
        self.num_superseded = int((~counts).sum())
        """Rows of steps that a restart did again; not in the timeline."""
        if self.num_superseded:
            table = table.filter(pa.array(counts))
        steps, ranks = codes(table.column("step")), codes(table.column("rank"))
        # The table is in each rank's order: a row's place in its rank's step is the time that ranks share.
        starts = np.flatnonzero(np.r_[True, (np.diff(steps) != 0) | (np.diff(ranks) != 0)])
        lengths = np.diff(np.r_[starts, len(steps)])
        places = np.arange(len(steps)) - np.repeat(starts, lengths) if len(steps) else np.zeros(0, np.int64)
        order = _times(run, table, steps, ranks, places).order()
        self.table = table.take(pa.array(order))
        self.places: Integers = places[order]
        """Of each row, how many its rank saw before it in the step."""

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def codes(self) -> dict[str, Integers]:
        """Columns of the key as numbers."""
        return {name: codes(self.table.column(name)) for name in dict.fromkeys((*VALUE_KEY, *SERIES_KEY, "rank"))}

    @cached_property
    def series(self) -> Groups:
        """Rows of the same value on the same rank, over the steps."""
        return group([self.codes[name] for name in (*SERIES_KEY, "rank")])

    def place(self, row: int) -> Place:
        """Where a row is."""
        values = {name: self.table.column(name)[row].as_py() for name in (*_KEY, "dtype", "shape")}
        info = self._run.modules.get((values["root"], values["module_path"]))
        return Place(**values, module_class=info.class_name if info else "", source=info.source if info else "")

    def arrays(self, rows: Integers) -> Iterator[tuple[int, npt.NDArray[Any] | RunError]]:
        """The tensors of many rows, one after the other in their order, or why one cannot be read."""
        table = self.table.take(pa.array(rows))
        steps = integers(table.column("step"))
        view = self._run.view(layouts=PER_RANK)
        for first, last in view.windows(_WINDOW_ROWS):
            inside = np.flatnonzero((steps >= first) & (steps < last))
            if not len(inside):
                continue
            there = view.rows(first, last)
            wanted, found = common_ids(table.take(pa.array(inside)), there.table, ("step", "rank", "attempt", "seq"))
            place_of = dict(zip(*(side.tolist() for side in join(wanted, found)), strict=True))
            for number, row in enumerate(rows[inside].tolist()):
                try:
                    yield row, there.array(place_of[number]) if number in place_of else self.array(row)
                except RunError as error:
                    yield row, error

    def array(self, row: int) -> npt.NDArray[Any]:
        """The tensor of a row.

        Raises:
            RunError: it was not recorded, or cannot be read.
        """
        question = {name: self.table.column(name)[row].as_py() for name in _KEY}
        return self._run.array(question.pop("module_path"), **question)


def _times(run: Run, table: Any, steps: Integers, ranks: Integers, places: Integers) -> Times:
    """When the rows were seen, where a row's place in its rank's step is the time that ranks share."""
    phases = {
        phase: holds(table.column("phase"), {phase}.__contains__) for phase in ("forward", "backward", "recompute")
    }
    return Times(
        steps,
        codes(table.column("mode")),
        phases["forward"],
        phases["backward"] | phases["recompute"],
        places,
        _stages(run, table),
        codes(table.column("micro_step")),
        ranks,
    )


def _stages(run: Run, table: Any) -> Integers:
    """The pipeline stage of each row, -1 where there is none: of a merged run as rows say, else as manifests do."""
    if run.is_merged:
        notes, texts = encode(table.column("note"))
        of_text = np.array([-1 if (stage := stage_of(text)[0]) is None else stage for text in texts] + [-1], np.int64)
        return of_text[notes]
    found = np.full(table.num_rows, -1, np.int64)
    stages = RunFacts(run.writers, run.run_id, run.world_size).stages
    of_root = {(run.writers[number].rank, root): stage.number for (number, root), stage in stages.items()}
    if of_root:
        is_value = ~holds(table.column("site"), {"scalar"}.__contains__)
        ranks, (roots, names) = integers(table.column("rank")), encode(table.column("root"))
        for (rank, root), stage in of_root.items():
            if root in names:
                found[is_value & (ranks == rank) & (roots == names.index(root))] = stage
    return found


def _counting(run: Run, table: Any) -> npt.NDArray[np.bool_]:
    """Which rows count: of several attempts at a step those of the newest that completed it."""
    steps, ranks, attempts = (integers(table.column(name)) for name in ("step", "rank", "attempt"))
    if len(steps) and attempts.min() == attempts.max():
        return np.ones(len(steps), np.bool_)
    facts = RunFacts(run.writers, run.run_id, run.world_size)
    steps_of = {}
    for number, writer in enumerate(run.writers):
        own = (attempts == writer.attempt) & (ranks == (-1 if writer.rank is None else writer.rank))
        steps_of[number] = np.unique(steps[own]).tolist()
    attempt_at = {place: run.writers[number].attempt for number, place in enumerate(facts.launch_places())}
    winners = {step: attempt_at[place] for step, place in facts.winners(steps_of).items()}
    distinct, places = np.unique(steps, return_inverse=True)
    newest = np.array([winners.get(step, -1) for step in distinct.tolist()], np.int64)[places]
    return np.asarray((attempts == newest) | (newest < 0))
