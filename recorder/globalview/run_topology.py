"""Facts about ranks from the manifests: data-parallel groups, modules, attempts, and parameters of one rank alone.

Rows are read only for their steps, and for the first statistics of parameters that may belong to one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..columns import COUNTS, MEASURED, STATISTICS, parse_shape
from ..format.manifest import MAX_RANKS, ParallelRanks, RecordedRoot, Stage
from ..numerics.keys import Integers, column_of, holds
from ..read.writers import RecordedWriter
from ..sites import full_name, values_of
from ..system.text import listed


def find_superseded(winners: Mapping[int, int], sources: Integers, steps: Integers) -> npt.NDArray[np.bool_]:
    """Flag the rows that do not count, because another launch or attempt counts at their step.

    Args:
        winners: for each step, the launch or the attempt whose rows count.
        sources: the launch or the attempt of each row.
        steps: the step of each row.
    """
    if not winners:
        return np.zeros(len(steps), np.bool_)
    known = np.array(sorted(winners), np.int64)
    wins = np.array([winners[step] for step in known.tolist()], np.int64)
    at = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    return np.asarray((known[at] == steps) & (sources != wins[at]))


class Topology:
    """The facts about ranks in the manifests of all writers of a run, such as the ranks that should have a value."""

    def __init__(self, writers: Sequence[RecordedWriter], run_id: str, world_size: int | None) -> None:
        self._writers = writers
        ranks = sorted({writer.rank for writer in writers if writer.rank is not None})
        self._world_size = world_size
        self._world = tuple(range(world_size)) if world_size and world_size <= MAX_RANKS else tuple(ranks)
        self._expected: dict[tuple[int | None, str, int | None, str], DataParallelGroup] = {}
        self._interned: dict[DataParallelGroup, DataParallelGroup] = {}
        self._apart: dict[tuple[int, str], str] = {}
        self.foreign_writers = [
            number for number, writer in enumerate(writers) if writer.manifest.run_id not in (None, run_id)
        ]
        self.launches = self._find_launches()
        """For each writer, the index of its launch (one start of the job on all its ranks) in the order of starts."""
        self.own_parameters = OwnParameters(writers)

    def group(self, root: str, module_path: str, number: int) -> DataParallelGroup:
        """Return the ranks that should have rows of a module of the writer with index `number`.

        Equal groups are one object that lives as long as the topology: callers compare groups by identity.
        """
        world_size = self._world_sizes[number]
        stage = self.stages.get((number, root))
        of_stage = world_size, root, stage.number if stage is not None else None
        key = (*of_stage, module_path)
        if key not in self._expected:
            world = tuple(range(world_size)) if world_size is not None else self._world
            base = self._groups.get(of_stage)
            if stage is not None:
                of_stage_ranks = {
                    self._writers[n].rank for (n, name), one in self.stages.items() if (name, one[0]) == of_stage[1:]
                }
                ranks = tuple(sorted(rank for rank in of_stage_ranks if rank is not None))
                base = base or DataParallelGroup("assumed", ranks)
            elif base is None:
                base = DataParallelGroup("assumed", world, self._why_apart(root, number))
            elif base.model_groups:  # ranks outside the root's meshes should have rows, too
                left_out = (
                    rank
                    for rank in world
                    if rank not in self._modules or any(name == root for name, _ in self._modules[rank])
                )
                base = base._replace(ranks=tuple(dict.fromkeys((*base.ranks, *left_out))))
            modules = self._modules
            has = tuple(
                r for r in base.ranks if not module_path or r not in modules or (root, module_path) in modules[r]
            )
            group = base.of(has or base.ranks)
            self._expected[key] = self._interned.setdefault(group, group)
        return self._expected[key]

    def own_ranks(self, root: str, number: int) -> Ranks:
        """Return the ranks that share a root with a writer: its data-parallel or else its model-parallel ranks."""
        writer = self._writers[number]
        for one in writer.manifest.roots:
            if one.name == root:
                statement = self._statement(writer, one, self._world_sizes[number])
                return statement.data or statement.model
        return ()

    def describe(self, number: int) -> str:
        writer = self._writers[number]
        return f"{writer.name} of rank {writer.rank} (run {writer.manifest.run_id})"

    def winners(self, steps_of: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Return for each step the index (in the order of starts) of the launch whose rows count.

        The newest launch that completed the step counts, or else the newest launch. If the recorder counted the steps
        itself, only the newest launch counts. `steps_of` are the recorded steps by writer number. Empty for one launch.
        """
        if len(set(self.launches)) < 2:
            return {}
        if any(writer.is_counted for writer in self._writers):
            newest = max((self.launches[n] for n, writer in enumerate(self._writers) if writer.num_rows), default=0)
            return {step: newest for steps in steps_of.values() for step in steps}
        best: dict[int, tuple[bool, int]] = {}
        for number, steps in steps_of.items():
            for step in steps:
                rank = step < self._complete_to[self.launches[number]], self.launches[number]
                best[step] = max(best.get(step, rank), rank)
        return {step: launch for step, (_, launch) in best.items()}

    @cached_property
    def _complete_to(self) -> dict[int, int]:
        """For each launch, the first step that some rank did not complete."""
        first_incomplete: dict[int, int] = {}
        for launch, writer in zip(self.launches, self._writers, strict=True):
            if writer.last_step is not None:
                end = writer.last_step + (writer.state == "closed")
                first_incomplete[launch] = min(first_incomplete.get(launch, end), end)
        return first_incomplete

    @cached_property
    def last_steps(self) -> dict[int, int]:
        """By rank, the last step at which the rank has a row. Ranks without rows are missing."""
        last_steps: dict[int, int] = {}
        for writer in self._writers:
            if writer.rank is not None and writer.last_step is not None:
                last_steps[writer.rank] = max(last_steps.get(writer.rank, -1), writer.last_step)
        return last_steps

    @cached_property
    def _world_sizes(self) -> list[int | None]:
        """For each writer, the world size of its launch if it differs from the run's world size; else None."""
        if len(set(self.launches)) < 2:
            return [None] * len(self.launches)
        world_sizes: dict[int, int] = {}
        ranks: dict[int, int] = {}
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
        statements: dict[tuple[int | None, str, int | None], list[RankStatement]] = {}
        for number, root in self._roots:
            world_size = self._world_sizes[number]
            key = world_size, root.name, None if root.stage is None else root.stage.number
            statements.setdefault(key, []).append(self._statement(self._writers[number], root, world_size))
        groups = {key: find_group(some) for key, some in statements.items()}
        return {key: group for key, group in groups.items() if group is not None}

    def _statement(self, writer: RecordedWriter, root: RecordedRoot, world_size: int | None) -> RankStatement:
        kind = root.data_parallel.kind if root.data_parallel else ""
        source = {"ddp": "ddp", "megatron": "marked"}.get(kind, "fsdp")
        of_data, of_model = (self._ranks(one, world_size) for one in (root.data_parallel, root.model_parallel))
        rank = -1 if writer.rank is None else writer.rank
        return RankStatement(rank, source if of_data else "", of_data, of_model if rank in of_model else ())

    def _ranks(self, named: ParallelRanks | None, world_size: int | None) -> Ranks:
        """Return the ranks that a manifest names. Empty if there are more of them than the run has."""
        largest = world_size or self._world_size or MAX_RANKS
        return named.ranks if named is not None and len(named.ranks) <= largest else ()

    @cached_property
    def _modules(self) -> dict[int, set[tuple[str, str]]]:
        modules: dict[int, set[tuple[str, str]]] = {}
        for number, root in self._roots:
            if (rank := self._writers[number].rank) is not None:
                modules.setdefault(rank, set()).update((root.name, module.path) for module in root.modules)
        return modules

    @cached_property
    def _roots(self) -> list[tuple[int, RecordedRoot]]:
        """The roots (modules under hooks) in all manifests, each with the number of its writer."""
        return [(number, root) for number, writer in enumerate(self._writers) for root in writer.manifest.roots]

    @cached_property
    def stages(self) -> dict[tuple[int, str], Stage]:
        """Pipeline stages by writer number and root."""
        return {(number, root.name): root.stage for number, root in self._roots if root.stage is not None}

    def _why_apart(self, root: str, number: int) -> str:
        """Return why the ranks seem to be the stages of a hand-made pipeline. Empty if they do not."""
        key = self.launches[number], root
        if key not in self._apart:
            of_launch = zip(self._writers, self.launches, strict=True)
            self._apart[key] = _find_why_apart((w for w, launch in of_launch if launch == key[0]), root)
        return self._apart[key]

    def is_between(self, stage: Stage, module_path: str, site: str) -> bool:
        """Return True for an activation that one stage hands to the next, within a module that spans several stages."""
        numbers = self._stages_spanned.get(module_path, {stage.number}) if module_path else {0, stage.num_stages - 1}
        wanted = {"input": min(numbers), "output": max(numbers)}
        return stage.number != wanted.get(values_of(site), stage.number)

    @cached_property
    def _stages_spanned(self) -> dict[str, set[int]]:
        """For each path, the stages that the module spans. A module with equal children on all stages spans none."""
        children: dict[str, dict[int, set[str]]] = {}
        for number, root in self._roots:
            for module in root.modules if (number, root.name) in self.stages else ():
                stage = self.stages[number, root.name].number
                parent, _, name = module.path.rpartition(".")
                children.setdefault(module.path, {}).setdefault(stage, set())
                children.setdefault(parent, {}).setdefault(stage, set()).add(name)
        return {path: set(of) for path, of in children.items() if len(set(map(frozenset, of.values()))) > 1}

    def is_linear(self, root: str, module_path: str) -> bool:
        """Return True if the class name of a module ends in ``Linear``."""
        return (root, module_path) in self._linear

    @cached_property
    def _linear(self) -> set[tuple[str, str]]:
        of_roots = ((root.name, module) for _, root in self._roots for module in root.modules)
        return {(root, module.path) for root, module in of_roots if module.class_name.endswith("Linear")}

    def _find_launches(self) -> list[int]:
        """Return each writer's launch. A launch has the n-th writer of each rank, of one attempt and world size."""
        seen: dict[tuple[int | None, int, int], int] = {}
        keys = []
        starts: dict[tuple[int, int, int], int] = {}
        for writer in self._writers:  # the writers of one rank come in the order of their starts
            # A writer whose manifest is lost gets the run's world size, so that it does not count as another launch.
            world_size = writer.manifest.world_size or self._world_size or 0
            of_rank = writer.rank, writer.attempt, world_size
            number = seen.get(of_rank, -1) + 1
            if writer.num_rows:  # a writer without rows replaces no other writer
                seen[of_rank] = number
            key = writer.attempt, world_size, number
            starts[key] = min(filter(None, (starts.get(key), writer.started_ns)), default=0)
            keys.append(key)
        in_order = sorted(starts, key=lambda key: (key[0], starts[key], key))
        return [in_order.index(key) for key in keys]


Ranks = tuple[int, ...]


class RankStatement(NamedTuple):
    """What one rank's manifest says about a root (a module under hooks): which ranks train the root, and how."""

    rank: int
    source: str
    """The `layout_source` for replicas' rows: ``ddp``, ``fsdp`` or ``marked``. Empty if no wrapper names the ranks."""
    data: Ranks
    """The data-parallel ranks: they share the model and differ in their batches. Empty without a wrapper."""
    model: Ranks
    """The model-parallel ranks: they share the batch and work on parts of the model. Empty if there are none."""


class DataParallelGroup(NamedTuple):
    """Ranks that share one model and differ in their batches."""

    source: str
    """The `layout_source` for rows of replicas: ``ddp``, ``fsdp``, ``marked``, or ``assumed``."""
    ranks: Ranks
    conflict: str = ""
    """Why the ranks of this root do not form one group. Empty if they do."""
    is_sorted: bool = True
    model_groups: tuple[Ranks, ...] = ()
    """The groups of ranks that share a part of the batch, in data-parallel order. Empty if no ranks share a part."""

    def of(self, ranks: Ranks) -> DataParallelGroup:
        """Return the group restricted to some of its ranks."""
        if ranks == self.ranks:
            return self
        wanted = set(ranks)
        some = (tuple(rank for rank in one if rank in wanted) for one in self.model_groups)
        return self._replace(ranks=ranks, model_groups=tuple(one for one in some if one))


def find_group(statements: Sequence[RankStatement]) -> DataParallelGroup | None:
    """Return the data-parallel group of one root. Return None if no manifest names ranks that share the root."""
    sources = {one.data: one.source for one in statements if one.data}
    models = tuple(dict.fromkeys(one.model for one in statements if len(one.model) > 1))
    if models:
        return _of_model_groups(statements, models, next(iter(sources.values()), "assumed"))
    if not sources:
        return None
    ranks = tuple(dict.fromkeys(rank for some in sources for rank in some))
    conflict = ""
    if len(sources) > 1:
        conflict = f"its ranks belong to {len(sources)} data-parallel groups ({_groups(tuple(sources))})"
    return DataParallelGroup(next(iter(sources.values())), ranks, conflict, _is_sorted(ranks))


def _of_model_groups(statements: Sequence[RankStatement], models: tuple[Ranks, ...], source: str) -> DataParallelGroup:
    taken: dict[int, Ranks] = {}
    conflict = ""
    for ranks in models:
        for rank in ranks:
            if taken.setdefault(rank, ranks) != ranks:
                conflict = f"rank {rank} belongs to several model-parallel meshes ({_groups((taken[rank], ranks))})"
    model_groups = models
    data = {one.rank: one.data for one in statements if one.data}
    if data and not conflict:
        model_groups, conflict = _in_order(models, data)
    elif not conflict:
        model_groups = tuple(sorted(models, key=min))
    ranks = tuple(dict.fromkeys(rank for some in model_groups for rank in some))
    return DataParallelGroup(source, ranks, conflict, _is_sorted(ranks), model_groups)


def _in_order(models: tuple[Ranks, ...], data: dict[int, Ranks]) -> tuple[tuple[Ranks, ...], str]:
    """Return the model-parallel groups in data-parallel order, and why they form no grid (empty if they do)."""
    known = next((some for some in models if all(rank in data for rank in some)), None)
    if known is None:  # each instance of the model has a rank without a manifest
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


_CONTENT = ("step", *STATISTICS, *COUNTS)
_ENDS = ("root", "module_path", "site", *_CONTENT)


def _find_why_apart(writers: Iterable[RecordedWriter], root: str) -> str:
    """Return why modules of one name are not one module on all ranks. Empty if nothing suggests this.

    The signs are different classes, and an input of a rank's root that is the output of another rank's root.
    """
    classes: dict[str, tuple[int | None, str]] = {}
    given: dict[int | None, set[Any]] = {}
    givers: dict[Any, int | None] = {}
    for writer in writers:
        given[writer.rank] = set()
        for module in (module for one in writer.manifest.roots if one.name == root for module in one.modules):
            rank, name = classes.setdefault(module.path, (writer.rank, module.class_name))
            if name != module.class_name:
                what = f"{module.path!r} is a {name} and a {module.class_name}"
                return f"ranks {rank} and {writer.rank} have different modules of one name: {what}"
        text = root.encode("utf-8", "backslashreplace").decode()  # the writer escapes names in this way
        firsts = writer.shards[:2]  # a shard of payloads, and one of statistics alone
        for batch in (batch for shard in firsts for batch in shard.columns(_ENDS)):
            is_end = holds(batch.column("module_path"), "".__eq__) & holds(batch.column("root"), text.__eq__)
            differ = pc.less(batch.column("min"), batch.column("max"))
            for row in batch.filter(pc.and_(column_of(is_end), differ)).to_pylist():
                if row["site"] == "input":
                    given[writer.rank].add(tuple(row[name] for name in _CONTENT))
                elif row["site"] == "output":
                    givers.setdefault(tuple(row[name] for name in _CONTENT), writer.rank)
    for rank, contents in given.items():
        for content in contents:
            other = givers.get(content, rank)
            if other != rank and content not in given[other]:
                return f"rank {rank} is given what rank {other} gives: their modules of one name are different stages"
    return ""


def _is_sorted(ranks: Ranks) -> bool:
    return ranks == tuple(sorted(ranks))


def _groups(groups: Sequence[Ranks]) -> str:
    return listed(map(list, groups), 4)


_IGNORED = "ignored"
_EXPERT = "expert"
NOT_SHARED = "each rank has a parameter of its own under this name, as its manifest says"
BEGAN_ALIKE = (
    "; its wrapper was told to leave it alone, and it began equal on all ranks: --layout '...=per_rank' if each rank "
    "has its own"
)


_FIRSTS = ("root", "module_path", "name", "site", "step", "rank", "ranks_present", "fingerprint", *STATISTICS, *COUNTS)
_Names = set[tuple[str, str]]
"""Parameters or modules. Each is the name of its root (a module under hooks) and its full name."""


class OwnParameters:
    """The parameters that belong to one rank alone (such as experts), and the modules with only such parameters.

    A parameter that a wrapper was told to ignore belongs to one rank if it differed between ranks at its first record.
    If it began equal on all ranks, it is no expert: it is a mistake that its gradients are not reduced. The inputs and
    outputs of an expert are no part of the rank's own batch, because other ranks have sent rows to the expert.
    """

    def __init__(self, writers: Sequence[RecordedWriter]) -> None:
        self._writers = writers
        shared = [writer.manifest for writer in writers if writer.manifest.world_size != 1]
        roots = [root for manifest in shared for root in manifest.roots]
        reasons = {(root.name, full, reason) for root in roots for full, reason in root.unshared.items()}
        self._experts: _Names = {(root, full) for root, full, reason in reasons if reason == _EXPERT}
        """Parameters of experts whose names include the expert's number: equal names on two ranks mean one expert."""
        self._claimed: _Names = {(root, full) for root, full, _ in reasons} - self._experts
        """Parameters that a manifest says belong to one rank alone."""
        self._stated: _Names = {(root, full) for root, full, reason in reasons if reason != _IGNORED}
        """Parameters that the program itself says belong to one rank. Those that a wrapper ignores do not count."""

    @cached_property
    def _names(self) -> _Names:
        return self._claimed - self._alike

    @cached_property
    def _modules(self) -> _Names:
        return self._apart(self._names | self._experts)

    @cached_property
    def _alike(self) -> _Names:
        """Parameters that a wrapper ignores, and whose expert or module began with equal parameters on all ranks."""
        is_open = self._claimed - self._stated
        if not is_open:
            return set()
        apart = self._apart(self._claimed)
        owners = {(root, full): (root, _expert_of(apart, root, _owner(full))) for root, full in is_open}
        contents = _first_contents(self._writers, is_open)
        alike = {
            one: len(of_ranks) > 1 and len(set(of_ranks.values())) == 1 and None not in of_ranks.values()
            for one, of_ranks in contents.items()
        }
        others = {owners[one] for one in is_open if alike.get(one) is False}
        known = {owners[one] for one in is_open if alike.get(one)}
        return {one for one, owner in owners.items() if owner in known - others}

    def _apart(self, names: _Names) -> _Names:
        shared: _Names = set()
        for writer in self._writers if names else ():
            for root in writer.manifest.roots:
                for module in root.modules:
                    if any((root.name, full_name(module.path, own)) not in names for own in module.params):
                        shared |= {(root.name, above) for above in _with_above(module.path)}
        return {(root, path) for root, full in names for path in _with_above(_owner(full))} - shared

    def has(self, root: str, module_path: str, name: str) -> bool:
        """Return True if a parameter belongs to one rank alone. `name` may be its state, such as ``weight.exp_avg``."""
        return bool(self._claimed) and _is_of(self._names, root, module_path, name)

    def began_alike(self, root: str, module_path: str, name: str) -> bool:
        """Return True if a wrapper ignores a parameter, and the parameter began equal on all ranks."""
        return bool(self._claimed) and _is_of(self._alike, root, module_path, name)

    def works_apart(self, root: str, module_path: str) -> bool:
        """Return True if a module, or a module around it, has only parameters that are experts or of one rank alone."""
        return any((root, path) in self._modules for path in _with_above(module_path))


def _first_contents(writers: Sequence[RecordedWriter], names: _Names) -> dict[tuple[str, str], dict[int, Any]]:
    """Return a key of each parameter's first record, by rank. Equal tensors have equal keys. An unknown key is None."""
    first_contents: dict[tuple[str, str], tuple[int, dict[int, Any]]] = {}
    ends = {full.rpartition(".")[2] for _, full in names}
    for shard in (shard for writer in writers for shard in writer.shards):
        for batch in shard.columns(_FIRSTS):
            is_asked = holds(batch.column("site"), "param".__eq__) & holds(batch.column("name"), ends.__contains__)
            for row in batch.filter(column_of(is_asked)).to_pylist():
                one = row["root"], full_name(row["module_path"], row["name"])
                if one not in names or row["step"] > first_contents.get(one, (row["step"],))[0]:
                    continue
                if row["step"] < first_contents.setdefault(one, (row["step"], {}))[0]:
                    first_contents[one] = row["step"], {}
                number = tuple(repr(row[name]) for name in (*STATISTICS, *COUNTS))
                word = row["fingerprint"] or (number if row[MEASURED] is not None else None)
                ranks = [row["rank"]]
                if row["rank"] is None and row["ranks_present"]:
                    ranks = list(parse_shape(row["ranks_present"]))
                first_contents[one][1].update((rank, word) for rank in ranks if rank is not None)
    return {one: words for one, (_, words) in first_contents.items()}


def _expert_of(modules: _Names, root: str, module_path: str) -> str:
    """Return the outermost path in `modules` that is or contains `module_path`, or `module_path` if there is none."""
    above = [path for path in _with_above(module_path) if (root, path) in modules]
    return above[-1] if above else module_path


def _is_of(names: _Names, root: str, module_path: str, name: str) -> bool:
    full = full_name(module_path, name)
    return any((root, some) in names for some in (full, *_with_above(_owner(full))))


def _owner(full: str) -> str:
    return full.rpartition(".")[0]


def _with_above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = _owner(path)
