"""What manifests say of a run: its modules, its pipeline stages, its triggers, and the commands that were sent to it.

Manifests and commands are untrusted input, which `format.manifest` has checked. This module opens no shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import HANDED_ON, note_members
from ..errors import RecorderError
from ..format.commands import COMMAND_BYTES, COMMANDS, DUMP, Command, command_name, parse_command_name, read_command
from ..format.manifest import RingDump
from ..format.roots import MAX_STAGES, RecordedModule, Stage
from ..numerics.keys import Times
from ..sites import NUMBERS
from ..storage.locations import Location, store_of
from ..system.text import listed
from .metadata import NONE, MetadataRows, Positions
from .writers import RecordedWriter

_MAX_LISTED = 5
_MAX_DEPTH = 200
"""Levels of a module tree; what is above a deeper path is not listed."""


def read_modules(writers: Iterable[RecordedWriter]) -> dict[tuple[str, str], RecordedModule]:
    """Modules by root and path, in the order of `named_modules()`; the newest writer that knows one describes it."""
    return {
        (root.name, module.path): module
        for writer in writers
        for root in writer.manifest.roots
        for module in root.modules
    }


def list_paths(known: Iterable[str], recorded: Iterable[str]) -> dict[str, None]:
    """Paths of modules and of what contains them, in the order of the tree."""
    paths: dict[str, None] = {"": None}
    for path in (*known, *recorded):
        if path not in paths:
            parts = path.split(".")
            ends = range(1 if len(parts) <= _MAX_DEPTH else len(parts), len(parts) + 1)
            paths |= dict.fromkeys(".".join(parts[:end]) for end in ends)
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDump:
    """The steps that all ranks were asked for by one trigger."""

    attempt: int
    """The launch that wrote it; a restart may take the same steps again."""
    first_step: int
    last_step: int
    reason: str
    by: str
    """Who pulled the trigger first: a rank, or a user and a host."""
    time_ns: int
    """When the first rank began."""
    ranks: tuple[int, ...]
    """The ranks that learned of the trigger."""
    missed: tuple[int, ...]
    """The ranks that had given up some of these steps by then."""
    num_rows: int
    num_bytes: int
    """Bytes of the payloads, before they were encoded."""


def dumps_of(writers: Sequence[RecordedWriter]) -> list[RunDump]:
    """Return the dumps of a run, by their time. Ranks that see the same at once, and name the same steps, make one."""
    groups: dict[tuple[int, int, int, str], list[tuple[int | None, RingDump]]] = {}
    for writer in writers:
        for dump in writer.manifest.dumps:
            key = (writer.attempt, dump.first_step, dump.last_step, dump.reason)
            groups.setdefault(key, []).append((writer.rank, dump))
    dumps = [
        RunDump(
            attempt=attempt,
            first_step=members[0][1].first_step,
            last_step=members[0][1].last_step,
            reason=members[0][1].reason,
            by=min((dump for _, dump in members), key=lambda dump: dump.time_ns).by,
            time_ns=min(dump.time_ns for _, dump in members),
            ranks=tuple(sorted({rank for rank, _ in members if rank is not None})),
            missed=tuple(sorted({rank for rank, dump in members if rank is not None and dump.num_missed})),
            num_rows=sum(dump.num_rows for _, dump in members),
            num_bytes=sum(dump.num_bytes for _, dump in members),
        )
        for (attempt, *_), members in groups.items()
    ]
    return sorted(dumps, key=lambda dump: (dump.time_ns, dump.first_step))


class SentCommands(NamedTuple):
    """All commands of a run by number, and a sentence for each file in the place of one that holds none."""

    sound: tuple[Command, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def num_beside_dumps(self) -> int:
        """How many commands asked for something else than a dump of the ring."""
        return sum(command.kind != DUMP for command in self.sound)


def read_commands(run: Location) -> SentCommands:
    """Read the commands of a run; one that was sent none has no directory for them."""
    store, folder = store_of(run), run / COMMANDS
    sound: list[Command] = []
    problems: list[str] = []
    try:
        names = store.list_directory(folder, directories=False) if store.exists(folder) else []
    except RecorderError as error:
        return SentCommands(problems=(str(error),))
    for number in sorted(number for name in names if (number := parse_command_name(name)) is not None):
        path = folder / command_name(number)
        try:
            sound.append(read_command(store.read_json(path, COMMAND_BYTES), f"{COMMANDS}/{path.name}", number))
        except (RecorderError, OSError) as error:
            problems.append(str(error))
    return SentCommands(tuple(sound), tuple(problems))


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
