"""The global view of a run: its rows as the tensors of the whole model, whatever ranks held them.

A merged run is passed through as it is. Must never show a tensor as whole of which a chunk is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import COLUMN_OF, METADATA_COLUMNS, Combine
from ..errors import LookupFailedError, RunError
from ..format.roots import Stage
from ..layout.rules import LOSSES
from ..read.metadata import NONE, MetadataRows
from ..read.payload import Payloads, is_same
from ..read.run import RecordedRun
from ..read.shards.rows import ShardRows
from ..read.stages import whole_roots
from ..read.step_sizes import SIZE_COLUMNS, StepSizes
from .assemble.assembler import Assembler, as_items
from .assemble.rows import GlobalRows
from .grouping.row_grouper import COLUMNS
from .infer.leaves import Leaves, Sample
from .plan.overrides import parse_overrides
from .plan.sampling import choose_steps, load_sample
from .plan.values import GlobalValues
from .topology.run_topology import Topology

NO_VALUES = "no_values"
"""Member of a note: why a row has no values although ranks recorded some."""
_MEANINGLESS = tuple(column for column in COLUMN_OF.values() if column.combine is Combine.NOTHING)
"""Columns that say nothing of a tensor of the whole model."""


class LoadedRows(NamedTuple):
    """Rows of a run that are loaded, as the values of the whole model."""

    metadata: MetadataRows
    values: GlobalValues
    assembler: Assembler
    """The way to their payloads."""


class GlobalView:
    """How the rows of a run are put together. Made by `Run.view`."""

    def __init__(self, run: RecordedRun, *, loss: str = "mean", layouts: Sequence[str] = ()) -> None:
        """Decide how.

        Args:
            run: recorded or merged.
            loss: what each rank's loss is of its samples: ``mean`` (activation gradients of W ranks are divided by W),
                ``weighted`` (by the ranks' batch sizes) or ``sum`` (not scaled).
            layouts: ``PATTERN=LAYOUT``, where PATTERN is a glob over ``module_path:site:name`` and LAYOUT one of
                ``shard(DIM)``, ``replicate``, ``partial(sum)`` and ``per_rank``; the last that fits wins.

        Raises:
            LookupFailedError: `loss` or a layout is none of these.
        """
        if loss not in LOSSES:
            raise LookupFailedError(f"loss {loss!r}: expected one of {', '.join(LOSSES)}")
        try:
            self._overrides = parse_overrides(layouts)
        except (ValueError, AttributeError, TypeError) as error:
            raise LookupFailedError(str(error)) from error
        self._run = run
        self._loss = loss
        self._topology = Topology(run.writers, run.run_id, run.world_size)
        self.leaves = Leaves(self._sample)
        """What all steps say of each leaf."""
        self.stages: Mapping[tuple[int, str], Stage] = self._topology.stages
        """By writer and root, which stage of a pipeline it ran."""
        self.has_pipeline = bool(self.stages)
        """Whether the stages of a pipeline ran in it: then the micro-batches of a step are one batch."""
        self._kept: tuple[int, LoadedRows] | None = None

    def part_of_batch(self, root: str, rank: int, attempt: int) -> tuple[int, int] | None:
        """Which part of the batch a rank works on, and of how many; None where that is not known."""
        return self._parts_of_batch.get((root, rank, attempt))

    @cached_property
    def _parts_of_batch(self) -> dict[tuple[str, int, int], tuple[int, int] | None]:
        part_of_writer: dict[tuple[str, int, int], tuple[int, int] | None] = {}
        of_models = whole_roots(self.stages)
        parts: dict[int, tuple[dict[int, int], int]] = {}
        """By the group's identity, the part of each rank, and how many parts there are: not anew for each writer."""
        for number, writer in enumerate(self._run.writers):
            for root in writer.manifest.roots:
                group = self._topology.group(root.name, "", number)
                if id(group) not in parts:
                    lines = group.model_groups or tuple((rank,) for rank in group.ranks)
                    parts[id(group)] = {rank: at for at, ranks in enumerate(lines) for rank in ranks}, len(lines)
                part_of, num_parts = parts[id(group)]
                is_unknown = bool(group.conflict) or (writer.rank is None and root.model_parallel is not None)
                own = part_of if writer.rank is None else {writer.rank} & part_of.keys()
                for rank in () if is_unknown else own:
                    part_of_writer[of_models.get(root.name, root.name), rank, writer.attempt] = part_of[rank], num_parts
        return part_of_writer

    def windows(self, max_rows: int = 200_000, max_bytes: int | None = None) -> list[tuple[int, int]]:
        """Half-open ranges of steps that cover every recorded one, in order; found from the indexes.

        Args:
            max_rows: a range of several steps has at most so many rows of all ranks.
            max_bytes: and at most so many bytes of payload, decoded; without, any number.
        """
        columns = [name for name in SIZE_COLUMNS if max_bytes is not None or name != "payload_bytes"]
        sizes = StepSizes.sum(StepSizes.of(shard.columns(columns)) for shard in self._shards())
        return [step_range[:2] for step_range in sizes.cut(max_rows, max_bytes)]

    def rows(
        self,
        first: int | None = None,
        last: int | None = None,
        only: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> GlobalRows:
        """The global rows of the steps from `first` up to, but not including, `last`; of them `only` some, or all."""
        metadata = self._metadata(first, last)
        metadata.load((*METADATA_COLUMNS, *COLUMNS))
        steps = metadata.numbers("step")
        is_wanted = (steps >= (first if first is not None else NONE)) & (
            steps < (last if last is not None else 1 << 62)
        )
        if only is not None:
            is_wanted &= np.isin(steps, only)
        positions = np.flatnonzero(is_wanted)
        if self._run.is_merged:
            return GlobalRows(metadata, None, [], positions)
        _, values, assembler = self.load(metadata)
        planned = list(values.values(positions))
        return GlobalRows(metadata, assembler, planned, positions, values.findings, whole_roots(self.stages))

    def kept(self, metadata: MetadataRows) -> LoadedRows:
        """All rows of the run, kept for the next question as long as no damage has moved them."""
        metadata.load(COLUMNS)
        if self._kept is None or self._kept[0] != metadata.num_rows or self._kept[1].metadata is not metadata:
            self._kept = metadata.num_rows, self.load(metadata)
        return self._kept[1]

    def load(self, metadata: MetadataRows) -> LoadedRows:
        """Some rows as values, and the way to their payloads."""
        metadata.load(COLUMNS)
        payloads = Payloads(metadata, len(self._run.writers))
        assembler = Assembler(metadata, payloads)

        def same(positions: Sequence[int]) -> bool | None:
            tensors = [assembler.tensor(position) for position in positions]
            if any(tensor is None for tensor in tensors):
                return None
            try:
                return is_same(payloads, [tensor.positions for tensor in tensors if tensor is not None])
            except RunError:
                return None  # whoever asks for the values is told what is wrong with them

        def items_of(position: int) -> npt.NDArray[Any] | None:
            tensor = assembler.tensor(position)
            if tensor is None or len(tensor.positions) > 1:
                return None  # nobody expands what takes several parts
            try:
                return as_items(assembler.local(position), tensor.dtype).reshape(tensor.shape)
            except RunError:
                return None

        values = GlobalValues(
            metadata,
            self._topology,
            loss=self._loss,
            overrides=self._overrides,
            is_same=same,
            items_of=items_of,
            leaves=self.leaves,
        )
        return LoadedRows(metadata, values, assembler)

    def sample_batches(self) -> tuple[MetadataRows, list[int] | None]:
        """The batches by which layouts are known, not loaded yet, and the steps whose rows count; None for all.

        They are the same whatever part of the run is looked at.
        """
        steps = choose_steps(self._run.writers)
        ranges = None if steps is None else tuple((step, step + 1) for step in steps)
        return MetadataRows(self._run.writers, ranges), steps

    def _sample(self) -> Sample | None:
        metadata, steps = self.sample_batches()
        positions = load_sample(metadata, steps)
        return self.load(metadata).values.sample(positions)

    def _shards(self) -> Iterator[ShardRows]:
        for writer in self._run.writers:
            yield from writer.shards

    def _metadata(self, first: int | None, last: int | None) -> MetadataRows:
        """The rows of the batches that hold some of these steps: a shard may have thousands of each rank."""
        if first is None and last is None:
            return MetadataRows(self._run.writers)
        return MetadataRows(self._run.writers, (NONE if first is None else first, 1 << 62 if last is None else last))
