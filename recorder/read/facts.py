"""Owns what a run's manifests say about its ranks: which are data-parallel, which have a module, which attempt counts.

Must never look at rows beyond the steps they are of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from .writers import RecordedWriter


class Group(NamedTuple):
    """Ranks that share one model and differ in their batches."""

    source: str
    """The row's `layout_source` for replicas: ``ddp``, ``fsdp``, or ``assumed`` where no wrapper was seen."""
    ranks: tuple[int, ...]
    """In data-parallel order."""


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
        self._world = tuple(range(world_size)) if world_size and world_size < 1 << 16 else tuple(ranks)
        self._expected: dict[tuple[str, str], Group] = {}
        self.strangers = [
            number for number, writer in enumerate(writers) if writer.manifest.get("run_id", run_id) != run_id
        ]
        """Numbers of writers that say they belong to another run."""
        self.launches = self._find_launches()
        """By number of the writer."""

    def group(self, root: str, module_path: str) -> Group:
        """The ranks that should have rows of a module."""
        key = root, module_path
        if key not in self._expected:
            base = self._groups.get(root) or Group("assumed", self._world)
            has = tuple(rank for rank in base.ranks if self._has_module(rank, root, module_path))
            self._expected[key] = base._replace(ranks=has or base.ranks)
        return self._expected[key]

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

    @cached_property
    def _groups(self) -> dict[str, Group]:
        found: dict[str, Group] = {}
        for writer in self._writers:
            for root in _objects(writer.manifest.get("roots")):
                parallel = root.get("data_parallel")
                if isinstance(parallel, dict) and isinstance(root.get("name"), str):
                    ranks = parallel.get("ranks")
                    if isinstance(ranks, list) and ranks and all(type(rank) is int and rank >= 0 for rank in ranks):
                        source = "ddp" if parallel.get("kind") == "ddp" else "fsdp"
                        found.setdefault(root["name"], Group(source, tuple(dict.fromkeys(ranks))))
        return found

    @cached_property
    def _modules(self) -> dict[int, set[tuple[str, str]]]:
        """Roots and paths by rank, of the ranks whose manifests tell."""
        found: dict[int, set[tuple[str, str]]] = {}
        for writer in self._writers:
            roots = _objects(writer.manifest.get("roots"))
            if writer.rank is not None and roots:
                known = found.setdefault(writer.rank, set())
                for root in roots:
                    known.update((str(root.get("name")), str(m.get("path"))) for m in _objects(root.get("modules")))
        return found

    def _has_module(self, rank: int, root: str, module_path: str) -> bool:
        known = self._modules.get(rank)
        return known is None or not module_path or (root, module_path) in known

    def _find_launches(self) -> list[Launch]:
        seen: dict[tuple[int | None, int], int] = {}
        found = []
        for writer in self._writers:  # of one rank, in the order of their start
            key = writer.rank, writer.attempt
            number = seen[key] = seen.get(key, -1) + 1
            found.append(Launch(writer.attempt, number))
        return found


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
