"""The grid of a model's ranks: which share a part of the batch, and in which order the parts stand, by manifests.

Must never trust one rank's word against another's: what does not fit together is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...system.text import listed

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
