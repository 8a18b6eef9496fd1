"""What manifests say about ranks: which are data-parallel, which have a module, and which attempt counts.

This module must never look at anything of rows but their steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ..format.roots import MAX_RANKS, ParallelRanks, RecordedRoot, Stage
from ..read.writers import RecordedWriter
from ..system.text import listed
from .own_parameters import OwnParameters


class Launch(NamedTuple):
    """One start of the job, over all its ranks."""

    attempt: int
    number: int
    """The number of the launch among several starts of one attempt."""


class Topology:
    """What all writers of a run say together."""

    def __init__(self, writers: Sequence[RecordedWriter], run_id: str, world_size: int | None) -> None:
        self._writers = writers
        ranks = sorted({writer.rank for writer in writers if writer.rank is not None})
        self._world_size = world_size
        self._world = tuple(range(world_size)) if world_size and world_size <= MAX_RANKS else tuple(ranks)
        self._expected: dict[tuple[int | None, str, int | None, str], DataParallelGroup] = {}
        self._interned: dict[DataParallelGroup, DataParallelGroup] = {}
        self.foreign_writers = [
            number for number, writer in enumerate(writers) if writer.manifest.run_id not in (None, run_id)
        ]
        """Numbers of writers that say they belong to another run."""
        self.launches = self._find_launches()
        """By number of the writer."""
        self.own_parameters = OwnParameters(writers)
        """Parameters that are each rank's own."""

    def group(self, root: str, module_path: str, number: int) -> DataParallelGroup:
        """The ranks that should have rows of a module, where a writer of that number has one.

        Equal groups are one object, which lives as long as these facts.
        """
        world_size = self._world_sizes[number]
        stage = self.stages.get((number, root))
        of_stage = world_size, root, stage.number if stage is not None else None
        key = (*of_stage, module_path)
        if key not in self._expected:
            world = tuple(range(world_size)) if world_size is not None else self._world
            base = self._groups.get(of_stage)
            if stage is not None:
                base = base or DataParallelGroup("assumed", self._ranks_of_stage(root, stage))
            elif base is None:
                base = DataParallelGroup("assumed", world)
            elif base.model_groups:  # ranks that its meshes leave out are expected all the same
                left_out = (rank for rank in world if rank not in self._modules or root in self._roots[rank])
                base = base._replace(ranks=tuple(dict.fromkeys((*base.ranks, *left_out))))
            has = tuple(rank for rank in base.ranks if self._has_module(rank, root, module_path))
            group = base.of(has or base.ranks)
            self._expected[key] = self._interned.setdefault(group, group)
        return self._expected[key]

    def own_ranks(self, root: str, number: int) -> Ranks:
        """The ranks that a writer says share a root with it: those of its data-parallel group, else of its mesh."""
        writer = self._writers[number]
        for one in writer.manifest.roots:
            if one.name == root:
                told = self._told(writer, one, self._world_sizes[number])
                return told.data or told.model
        return ()

    def describe(self, number: int) -> str:
        """A writer by its number, for people."""
        writer = self._writers[number]
        return f"{writer.name} of rank {writer.rank} (run {writer.manifest.run_id})"

    def counting(self) -> bool:
        """Whether some writer merely counted its steps, so that those of two launches are not the same."""
        return any(writer.is_counted for writer in self._writers)

    def winners(self, steps_of: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Which launch (its index in the order of starts) counts at a step, where there were several.

        The newest that completed the step, else the newest. Where steps were merely counted, the newest alone.

        Args:
            steps_of: steps of which there are rows, by number of the writer.
        """
        if len(set(self.launches)) < 2:
            return {}
        launch_indices = self.launch_indices()
        if self.counting():
            newest = max((launch_indices[n] for n, writer in enumerate(self._writers) if writer.num_rows), default=0)
            return {step: newest for steps in steps_of.values() for step in steps}
        best: dict[int, tuple[bool, int]] = {}
        for number, steps in steps_of.items():
            for step in steps:
                rank = step < self._complete_to[launch_indices[number]], launch_indices[number]
                best[step] = max(best.get(step, rank), rank)
        return {step: launch for step, (_, launch) in best.items()}

    @cached_property
    def _complete_to(self) -> dict[int, int]:
        """The first step that each launch, by its index in the order of starts, did not complete on all its ranks."""
        first_incomplete: dict[int, int] = {}
        for launch_index, writer in zip(self.launch_indices(), self._writers, strict=True):
            if writer.last_step is not None:
                end = writer.last_step + (writer.state == "closed")
                first_incomplete[launch_index] = min(first_incomplete.get(launch_index, end), end)
        return first_incomplete

    def launch_indices(self) -> list[int]:
        """By number of the writer, the index of its launch in the order of starts."""
        order = sorted(set(self.launches))
        return [order.index(launch) for launch in self.launches]

    def last_step(self, rank: int) -> int:
        """The last step of which a rank left a row; -1 without any."""
        return self._last_steps.get(rank, -1)

    @cached_property
    def _last_steps(self) -> dict[int, int]:
        last_steps: dict[int, int] = {}
        for writer in self._writers:
            if writer.rank is not None and writer.last_step is not None:
                last_steps[writer.rank] = max(last_steps.get(writer.rank, -1), writer.last_step)
        return last_steps

    @cached_property
    def _world_sizes(self) -> list[int | None]:
        """The number of ranks of the job by writer, since relaunches may differ; None where the run says it."""
        if len(set(self.launches)) < 2:
            return [None] * len(self.launches)
        world_sizes: dict[Launch, int] = {}
        ranks: dict[Launch, int] = {}
        for launch, writer in zip(self.launches, self._writers, strict=True):
            world_sizes[launch] = max(world_sizes.get(launch, 0), writer.manifest.world_size)
            ranks[launch] = max(ranks.get(launch, 0), writer.rank or 0)
        is_sound = {launch: ranks[launch] < size <= MAX_RANKS for launch, size in world_sizes.items()}
        return [
            world_sizes[launch] if is_sound[launch] and world_sizes[launch] != self._world_size else None
            for launch in self.launches
        ]

    @cached_property
    def _groups(self) -> dict[tuple[int | None, str, int | None], DataParallelGroup]:
        """The groups of ranks, by size of the world, root and pipeline stage."""
        told: dict[tuple[int | None, str, int | None], list[RankStatement]] = {}
        for world_size, writer in zip(self._world_sizes, self._writers, strict=True):
            for root in writer.manifest.roots:
                key = world_size, root.name, None if root.stage is None else root.stage.number
                told.setdefault(key, []).append(self._told(writer, root, world_size))
        groups = {key: find_group(some) for key, some in told.items()}
        return {key: group for key, group in groups.items() if group is not None}

    def _told(self, writer: RecordedWriter, root: RecordedRoot, world_size: int | None) -> RankStatement:
        source = "ddp" if root.data_parallel and root.data_parallel.kind == "ddp" else "fsdp"
        of_data, of_model = (self._ranks(one, world_size) for one in (root.data_parallel, root.model_parallel))
        rank = -1 if writer.rank is None else writer.rank
        return RankStatement(rank, source if of_data else "", of_data, of_model if rank in of_model else ())

    def _ranks(self, told: ParallelRanks | None, world_size: int | None) -> Ranks:
        """Return the ranks that share a root; no ranks where they are more than this run has."""
        largest = world_size or self._world_size or MAX_RANKS
        return told.ranks if told is not None and len(told.ranks) <= largest else ()

    @cached_property
    def _modules(self) -> dict[int, set[tuple[str, str]]]:
        """Roots and paths by rank, of the ranks whose manifests tell."""
        modules: dict[int, set[tuple[str, str]]] = {}
        for writer in self._writers:
            if writer.rank is not None and writer.manifest.roots:
                known = modules.setdefault(writer.rank, set())
                for root in writer.manifest.roots:
                    known.update((root.name, module.path) for module in root.modules)
        return modules

    @cached_property
    def stages(self) -> dict[tuple[int, str], Stage]:
        """Pipeline stages by number of the writer and root."""
        return {
            (number, root.name): root.stage
            for number, writer in enumerate(self._writers)
            for root in writer.manifest.roots
            if root.stage is not None
        }

    def _ranks_of_stage(self, root: str, stage: Stage) -> tuple[int, ...]:
        writers = [self._writers[number] for (number, name), own in self.stages.items() if (name, own) == (root, stage)]
        return tuple(sorted({writer.rank for writer in writers if writer.rank is not None}))

    def is_linear(self, root: str, module_path: str) -> bool:
        """Whether a module is of a class that is called a linear one."""
        return (root, module_path) in self._linear

    @cached_property
    def _linear(self) -> set[tuple[str, str]]:
        return {
            (root.name, module.path)
            for writer in self._writers
            for root in writer.manifest.roots
            for module in root.modules
            if module.class_name.endswith("Linear")
        }

    @cached_property
    def _roots(self) -> dict[int, set[str]]:
        return {rank: {root for root, _ in modules} for rank, modules in self._modules.items()}

    def _has_module(self, rank: int, root: str, module_path: str) -> bool:
        known = self._modules.get(rank)
        return known is None or not module_path or (root, module_path) in known

    def _find_launches(self) -> list[Launch]:
        """Launches by their start. In one attempt with as many ranks, the n-th writers of all ranks are one launch."""
        seen: dict[tuple[int | None, int, int], int] = {}
        keys = []
        starts: dict[tuple[int, int, int], int] = {}
        for writer in self._writers:  # of one rank, in the order of their start
            # Whose manifest is lost is no launch of its own.
            world_size = writer.manifest.world_size or self._world_size or 0
            of_rank = writer.rank, writer.attempt, world_size
            number = seen.get(of_rank, -1) + 1
            if writer.num_rows:  # one that left nothing supersedes nothing
                seen[of_rank] = number
            key = writer.attempt, world_size, number
            starts[key] = min(filter(None, (starts.get(key), writer.started_ns)), default=0)
            keys.append(key)
        in_order: dict[int, list[tuple[int, int, int]]] = {}
        for key in sorted(starts, key=lambda key: (starts[key], key)):
            in_order.setdefault(key[0], []).append(key)
        return [Launch(key[0], in_order[key[0]].index(key)) for key in keys]


Ranks = tuple[int, ...]


class RankStatement(NamedTuple):
    """What one rank's manifest says of a root."""

    rank: int
    source: str
    """The row's `layout_source` for replicas: ``ddp``, ``fsdp``; empty without a wrapper."""
    data: Ranks
    """Ranks that share the model and differ in their batches; none without a wrapper."""
    model: Ranks
    """Ranks that share the batch and work on parts of the model; none where each works alone."""


class DataParallelGroup(NamedTuple):
    """Ranks that share one model and differ in their batches."""

    source: str
    """The row's `layout_source` for replicas: ``ddp``, ``fsdp``, or ``assumed`` where no wrapper was seen."""
    ranks: Ranks
    """In data-parallel order."""
    conflict: str = ""
    """Why the ranks of this root are no single group."""
    is_sorted: bool = True
    model_groups: tuple[Ranks, ...] = ()
    """Ranks that share a part of the batch, in data-parallel order; none where each rank has a part of its own."""

    def of(self, ranks: Ranks) -> DataParallelGroup:
        """The group with some of its ranks alone."""
        if ranks == self.ranks:
            return self
        wanted = set(ranks)
        some = (tuple(rank for rank in one if rank in wanted) for one in self.model_groups)
        return self._replace(ranks=ranks, model_groups=tuple(one for one in some if one))


def find_group(told: Sequence[RankStatement]) -> DataParallelGroup | None:
    """The group of one root; None where no rank says anything of others."""
    sources = {one.data: one.source for one in told if one.data}
    models = tuple(dict.fromkeys(one.model for one in told if len(one.model) > 1))
    if models:
        return _of_model_groups(told, models, next(iter(sources.values()), "assumed"))
    if not sources:
        return None
    ranks = tuple(dict.fromkeys(rank for some in sources for rank in some))
    conflict = ""
    if len(sources) > 1:
        conflict = f"its ranks belong to {len(sources)} data-parallel groups ({_groups(tuple(sources))})"
    return DataParallelGroup(next(iter(sources.values())), ranks, conflict, _is_sorted(ranks))


def _of_model_groups(told: Sequence[RankStatement], models: tuple[Ranks, ...], source: str) -> DataParallelGroup:
    taken: dict[int, Ranks] = {}
    conflict = ""
    for ranks in models:
        for rank in ranks:
            if taken.setdefault(rank, ranks) != ranks:
                conflict = f"rank {rank} belongs to several model-parallel meshes ({_groups((taken[rank], ranks))})"
    model_groups = models
    data = {one.rank: one.data for one in told if one.data}
    if data and not conflict:
        model_groups, conflict = _in_order(models, data)
    elif not conflict:
        model_groups = tuple(sorted(models, key=min))
    ranks = tuple(dict.fromkeys(rank for some in model_groups for rank in some))
    return DataParallelGroup(source, ranks, conflict, _is_sorted(ranks), model_groups)


def _in_order(models: tuple[Ranks, ...], data: dict[int, Ranks]) -> tuple[tuple[Ranks, ...], str]:
    """The instances by the data-parallel order of their ranks, those included of which no rank left a manifest."""
    known = next((some for some in models if all(rank in data for rank in some)), None)
    if known is None:  # of every instance some rank has left nothing
        first = next(iter(data.values()))
        index_of = {rank: i for i, rank in enumerate(first)}
        return tuple(sorted(models, key=lambda some: min(index_of.get(rank, len(first)) for rank in some))), ""
    groups = [data[rank] for rank in known]
    if len({len(ranks) for ranks in groups}) > 1:
        return models, f"its data-parallel groups are of different sizes ({_groups(groups)})"
    model_groups = tuple(zip(*groups, strict=True))
    wrong = next((some for some in models if some not in model_groups), None)
    if wrong is not None:
        groups_text = _groups(groups)
        return models, f"the model-parallel mesh {list(wrong)} and the data-parallel groups {groups_text} form no grid"
    return model_groups, ""


def _is_sorted(ranks: Ranks) -> bool:
    return ranks == tuple(sorted(ranks))


def _groups(groups: Sequence[Ranks]) -> str:
    return listed(map(list, groups), 4)
