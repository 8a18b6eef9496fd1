"""Owns what a run's manifests say about its ranks: which are data-parallel, which have a module, which attempt counts.

Must never look at rows beyond the steps they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from . import untrusted
from .experts import Unshared
from .grid import Group, Ranks, Told, find_group
from .stages import Stage, read_stage
from .writers import RecordedWriter, count

PARALLEL = ("data_parallel", "model_parallel", "pipeline", "unshared")
"""Members of a root that say how its ranks stand to each other."""
_MAX_RANKS, _MAX_RANK = 1 << 14, 1 << 24


class Launch(NamedTuple):
    """One start of the job, over all its ranks."""

    attempt: int
    number: int
    """Of several starts of the same attempt."""


class RunFacts:
    """What all writers of a run say together."""

    def __init__(self, writers: Sequence[RecordedWriter], run_id: str, world_size: int | None) -> None:
        self._writers = writers
        ranks = sorted({writer.rank for writer in writers if writer.rank is not None})
        self._world_size = world_size
        self._world = tuple(range(world_size)) if world_size and world_size <= _MAX_RANKS else tuple(ranks)
        self._expected: dict[tuple[int | None, str, int | None, str], Group] = {}
        self._interned: dict[Group, Group] = {}
        self._ranks_of: dict[tuple[int, int | None], Ranks] = {}
        """By the identity of a list in a manifest: writers share those that are equal."""
        self.strangers = [
            number for number, writer in enumerate(writers) if writer.manifest.get("run_id", run_id) != run_id
        ]
        """Numbers of writers that say they belong to another run."""
        self.launches = self._find_launches()
        """By number of the writer."""
        self.unshared = Unshared(writers)
        """Parameters that are each rank's own."""

    def group(self, root: str, module_path: str, number: int) -> Group:
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
                base = base or Group("assumed", self._ranks_of_stage(root, stage))
            elif base is None:
                base = Group("assumed", world)
            elif base.instances:  # ranks that its meshes leave out are expected all the same
                left_out = (rank for rank in world if rank not in self._modules or root in self._roots[rank])
                base = base._replace(ranks=tuple(dict.fromkeys((*base.ranks, *left_out))))
            has = tuple(rank for rank in base.ranks if self._has_module(rank, root, module_path))
            group = base.of(has or base.ranks)
            self._expected[key] = self._interned.setdefault(group, group)
        return self._expected[key]

    def own_ranks(self, root: str, number: int) -> Ranks:
        """The ranks that a writer says share a root with it: those of its data-parallel group, else of its mesh."""
        writer = self._writers[number]
        for one in untrusted.objects(writer.manifest.get("roots")):
            if one.get("name") == root:
                told = self._told(writer, one, self._world_sizes[number])
                return told.data or told.model
        return ()

    def describe(self, number: int) -> str:
        """A writer by its number, for people."""
        writer = self._writers[number]
        return f"{writer.name} of rank {writer.rank} (run {writer.manifest.get('run_id')})"

    def counting(self) -> bool:
        """Whether some writer merely counted its steps, so that those of two launches are not the same."""
        return any(writer.is_counted for writer in self._writers)

    def winners(self, steps_of: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Which launch (its place in the order of starts) counts at a step, where there were several.

        The newest that completed the step, else the newest. Where steps were merely counted, the newest alone.

        Args:
            steps_of: steps of which there are rows, by number of the writer.
        """
        if len(set(self.launches)) < 2:
            return {}
        place = self.launch_places()
        if self.counting():
            newest = max((place[n] for n, writer in enumerate(self._writers) if writer.num_rows), default=0)
            return {step: newest for steps in steps_of.values() for step in steps}
        found: dict[int, tuple[bool, int]] = {}
        for number, steps in steps_of.items():
            for step in steps:
                rank = step < self._complete_to[place[number]], place[number]
                found[step] = max(found.get(step, rank), rank)
        return {step: launch for step, (_, launch) in found.items()}

    @cached_property
    def _complete_to(self) -> dict[int, int]:
        """The first step that a launch did not complete on all its ranks, by its place in the order of starts."""
        found: dict[int, int] = {}
        for place, writer in zip(self.launch_places(), self._writers, strict=True):
            if writer.last_step is not None:
                end = writer.last_step + (writer.state == "closed")
                found[place] = min(found.get(place, end), end)
        return found

    def launch_places(self) -> list[int]:
        """By number of the writer, the place of its launch in the order of starts."""
        order = sorted(set(self.launches))
        return [order.index(launch) for launch in self.launches]

    def last_step(self, rank: int) -> int:
        """The last step of which a rank left a row; -1 without any."""
        return self._last_steps.get(rank, -1)

    @cached_property
    def _last_steps(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for writer in self._writers:
            if writer.rank is not None and writer.last_step is not None:
                found[writer.rank] = max(found.get(writer.rank, -1), writer.last_step)
        return found

    @cached_property
    def _world_sizes(self) -> list[int | None]:
        """How many ranks the job had, by number of the writer: a relaunch may have others. None: as the run says."""
        if len(set(self.launches)) < 2:
            return [None] * len(self.launches)
        found: dict[Launch, int] = {}
        ranks: dict[Launch, int] = {}
        for launch, writer in zip(self.launches, self._writers, strict=True):
            found[launch] = max(found.get(launch, 0), count(writer.manifest.get("world_size")))
            ranks[launch] = max(ranks.get(launch, 0), writer.rank or 0)
        is_sound = {launch: ranks[launch] < size <= _MAX_RANKS for launch, size in found.items()}
        return [
            found[launch] if is_sound[launch] and found[launch] != self._world_size else None
            for launch in self.launches
        ]

    @cached_property
    def _groups(self) -> dict[tuple[int | None, str, int | None], Group]:
        """By size of the world, root and pipeline stage."""
        told: dict[tuple[int | None, str, int | None], list[Told]] = {}
        for world_size, writer in zip(self._world_sizes, self._writers, strict=True):
            for root in untrusted.objects(writer.manifest.get("roots")):
                if isinstance(root.get("name"), str):
                    stage = read_stage(root)
                    key = world_size, root["name"], None if stage is None else stage.number
                    told.setdefault(key, []).append(self._told(writer, root, world_size))
        found = {key: find_group(some) for key, some in told.items()}
        return {key: group for key, group in found.items() if group is not None}

    def _told(self, writer: RecordedWriter, root: dict[str, Any], world_size: int | None) -> Told:
        data, model = (parallel if isinstance(parallel := root.get(name), dict) else {} for name in PARALLEL[:2])
        source = "ddp" if data.get("kind") == "ddp" else "fsdp"
        of_data, of_model = (self._as_ranks(one.get("ranks"), world_size) for one in (data, model))
        rank = -1 if writer.rank is None else writer.rank
        return Told(rank, source if of_data else "", of_data, of_model if rank in of_model else ())

    def _as_ranks(self, value: Any, world_size: int | None) -> tuple[int, ...]:
        """Ranks out of a manifest; none where they cannot be those of this run."""
        if not isinstance(value, list) or len(value) > min(_MAX_RANKS, world_size or self._world_size or _MAX_RANKS):
            return ()
        key = id(value), world_size
        if key not in self._ranks_of:
            is_sound = all(type(rank) is int and 0 <= rank < _MAX_RANK for rank in value)
            self._ranks_of[key] = tuple(dict.fromkeys(value)) if is_sound else ()
        return self._ranks_of[key]

    @cached_property
    def _modules(self) -> dict[int, set[tuple[str, str]]]:
        """Roots and paths by rank, of the ranks whose manifests tell."""
        found: dict[int, set[tuple[str, str]]] = {}
        for writer in self._writers:
            roots = untrusted.objects(writer.manifest.get("roots"))
            if writer.rank is not None and roots:
                known = found.setdefault(writer.rank, set())
                for root in roots:
                    known.update(
                        (str(root.get("name")), str(m.get("path"))) for m in untrusted.objects(root.get("modules"))
                    )
        return found

    @cached_property
    def stages(self) -> dict[tuple[int, str], Stage]:
        """Pipeline stages by number of the writer and root."""
        return {
            (number, root["name"]): stage
            for number, writer in enumerate(self._writers)
            for root in untrusted.objects(writer.manifest.get("roots"))
            if isinstance(root.get("name"), str) and (stage := read_stage(root)) is not None
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
            (str(root.get("name")), str(module.get("path")))
            for writer in self._writers
            for root in untrusted.objects(writer.manifest.get("roots"))
            for module in untrusted.objects(root.get("modules"))
            if str(module.get("class")).endswith("Linear")
        }

    @cached_property
    def _roots(self) -> dict[int, set[str]]:
        return {rank: {root for root, _ in modules} for rank, modules in self._modules.items()}

    def _has_module(self, rank: int, root: str, module_path: str) -> bool:
        known = self._modules.get(rank)
        return known is None or not module_path or (root, module_path) in known

    def _find_launches(self) -> list[Launch]:
        """Of one attempt with as many ranks, the n-th writers of all ranks are one launch; launches by their start."""
        seen: dict[tuple[int | None, int, int], int] = {}
        keys = []
        starts: dict[tuple[int, int, int], int] = {}
        for writer in self._writers:  # of one rank, in the order of their start
            # Whose manifest is lost is no launch of its own.
            world_size = count(writer.manifest.get("world_size")) or count(self._world_size)
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
