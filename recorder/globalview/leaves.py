"""Infers from rows whether the ranks hold equal values of a leaf, and along which dim the leaf has the batch.

The layout of a leaf is a property of the leaf, so that no step is judged by itself: NaN, constants and slices repeated
along the batch are alike in copies and in batches, and prove nothing. Must never answer by the step that is asked
about: whatever part of a run is looked at, the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..layout.placement import NoPlan, RankChunk
from ..layout.rules import Replication, Unequal
from ..numerics.keys import Integers
from ..read.metadata import NONE
from .row_groups import GroupedRows

_MAX_LOOKED_AT = 6
"""Moments of a leaf whose values are looked at more closely, of those at which equal values might mean something."""
Flags = npt.NDArray[np.bool_]
ChunkKeys = tuple[tuple[int, int], ...]
"""Ranks, each with its micro-batch where a pipeline has one."""


class Leaf(NamedTuple):
    """What is recorded again and again under one name."""

    root: str
    stage: int
    """The stage of a pipeline; `NONE` where there is no pipeline."""
    module_path: str
    site: str
    name: str
    mode: str
    phase: str
    call: int
    num_dims: int


class Observation(Enum):
    """What the values of one moment say of their layout."""

    NOTHING = 0
    """Copies and batches are alike in them."""
    REPEATED = 1
    """They are equal, and each is one slice again and again along what may be the batch."""
    UNEQUAL = 2
    PERHAPS = 3
    """They are equal, and nothing says why a batch should be."""
    EQUAL = 4
    """They are equal, and no batch could be."""


class BatchDims(NamedTuple):
    """What is known of a leaf at one moment, where its batch is known."""

    sizes: tuple[int, ...]
    """Sizes of the ranks' batches."""
    dims: frozenset[int]
    """Along which the ranks' tensors have just these sizes; 0 also for a multiple of them."""


class Sample(NamedTuple):
    """The values of some steps, of all leaves: what is known of each value, which has a number."""

    grouped: GroupedRows
    leaves: Mapping[Leaf, Integers]
    """The values of each leaf, in the order of execution."""
    calls: Integers
    """For each value, a number for the call of a module on a rank that it is of."""
    order: Integers
    """The values in the order of execution."""
    look: Callable[[int, ChunkKeys | None], Observation]
    """At the chunks of one value, or at some of them."""
    moment: Callable[[int], BatchDims | None]
    """None where the batch is not known."""
    cut: Callable[[int, ChunkKeys], int | NoPlan | None]
    """Along which dim the chunks of one value, of ranks that share a batch, are cut; None where some are missing."""


class Leaves:
    """The leaves of a run. Nothing is read before the first question."""

    def __init__(self, sample: Callable[[], Sample | None]) -> None:
        """Made of a sample of the run, which is asked for once; None where there are no values."""
        self._make = sample
        self._loaded: tuple[Sample | None, Flags, Flags] | None = None
        self._known: dict[tuple[Leaf, ChunkKeys | None], Replication] = {}
        self._varying: dict[tuple[str, str, str], bool] = {}
        self._dims: dict[Leaf, int | None] = {}
        self._cuts: dict[tuple[Leaf, ChunkKeys], set[int]] = {}

    def replication(self, leaf: Leaf, chunks: ChunkKeys | None) -> Replication:
        """How the tensors of all ranks that have a leaf stand to each other, or those of some of them."""
        key = leaf, chunks
        if key not in self._known:
            self._known[key] = self._judge(leaf, chunks)
        return self._known[key]

    def batch_dim(self, leaf: Leaf) -> int | None:
        """The dim that is the batch wherever that is known; None where nothing tells, or the dims are several."""
        if leaf not in self._dims:
            moments = self._moments(leaf)
            common = frozenset.intersection(*(one.dims for one in moments)) if moments else frozenset()
            self._dims[leaf] = min(common) if common else None
        return self._dims[leaf]

    def cut_dims(self, leaf: Leaf, chunks: ChunkKeys) -> set[int]:
        """Along which dims the chunks of ranks that share a batch are cut, by the moments that tell."""
        key = leaf, chunks
        if key not in self._cuts:
            sample, every = self._values_of(leaf)
            _, is_void, _ = self._load()
            numbers = self._spread([number for number in every if not is_void[number]])
            dims = [sample.cut(number, chunks) for number in numbers] if sample is not None else []
            self._cuts[key] = {dim for dim in dims if isinstance(dim, int)}
        return self._cuts[key]

    def varies(self, root: str, mode: str, name: str) -> bool:
        """Whether ranks were ever given different values for an argument of a root."""
        key = root, mode, name
        if key not in self._varying:
            sample, _, _ = self._load()
            own = (
                []
                if sample is None
                else [
                    numbers
                    for leaf, numbers in sample.leaves.items()
                    if (leaf.module_path, leaf.site) == ("", "input") and (leaf.root, leaf.mode, leaf.name) == key
                ]
            )
            self._varying[key] = any(bool((sample.grouped.equal[some] == 0).any()) for some in own if sample)
        return self._varying[key]

    def _load(self) -> tuple[Sample | None, Flags, Flags]:
        """The sample, which of its values are void, and which are in doubt."""
        if self._loaded is None:
            sample, nothing = self._make(), np.zeros(0, bool)
            self._loaded = sample, *((nothing, nothing) if sample is None else _find_void(sample))
        return self._loaded

    def _values_of(self, leaf: Leaf) -> tuple[Sample | None, list[int]]:
        sample, _, _ = self._load()
        values = None if sample is None else sample.leaves.get(leaf)
        return sample, [] if values is None else values.tolist()

    def _spread(self, numbers: Sequence[int]) -> list[int]:
        """A few of them, the first and the last among these."""
        few = min(len(numbers), _MAX_LOOKED_AT)
        return [numbers[i] for i in dict.fromkeys(np.linspace(0, len(numbers) - 1, few).round().astype(int).tolist())]

    def _moments(self, leaf: Leaf) -> list[BatchDims]:
        sample, numbers = self._values_of(leaf)
        moments = [sample.moment(number) for number in self._spread(numbers)] if sample is not None else []
        return [one for one in moments if one is not None]

    def _judge(self, leaf: Leaf, chunks: ChunkKeys | None) -> Replication:
        sample, every = self._values_of(leaf)
        _, is_void, is_doubtful = self._load()
        if sample is None:
            return Replication.UNKNOWN
        grouped = sample.grouped
        numbers = [number for number in every if not grouped.has_nan[number]]
        observations: set[Observation] = set()
        if chunks is None:
            is_unequal = grouped.equal == 0
            if any(is_unequal[number] for number in numbers):
                observations.add(Observation.UNEQUAL)
            numbers = [number for number in numbers if not is_unequal[number]]
        numbers = [number for number in numbers if not is_void[number]]
        sure = [number for number in numbers if not is_doubtful[number]]
        observations |= {sample.look(number, chunks) for number in self._spread(sure)}
        in_doubt = [number for number in numbers if is_doubtful[number]]
        observations |= {sample.look(number, chunks) for number in self._spread(in_doubt)} - {Observation.PERHAPS}
        if Observation.EQUAL in observations:
            return Replication.REPLICATED
        if Observation.UNEQUAL in observations:
            return Replication.DISTINCT
        if Observation.PERHAPS in observations and Observation.REPEATED not in observations:
            return Replication.DISTINCT if chunks is None and self._follows_the_batch(leaf) else Replication.REPLICATED
        return Replication.UNKNOWN

    def _follows_the_batch(self, leaf: Leaf) -> bool:
        """Whether a dim has always the size of the batch, which was not always the same."""
        moments = self._moments(leaf)
        sizes = {size for one in moments for size in one.sizes}
        return len(sizes) > 1 and bool(frozenset.intersection(*(one.dims for one in moments)))


class _Inputs:
    """What is known of the inputs of one call of a module, as they come."""

    def __init__(self, num_void: int) -> None:
        """Made of how many values were void or in doubt before the first of them."""
        self.num_before = self.num_so_far = num_void
        self.are_void = self.are_equal = True
        self.has_void = False

    def add(self, *, is_void: bool, is_doubtful: bool, is_equal: bool) -> None:
        """One more."""
        self.are_void &= is_void
        self.are_equal &= is_equal or is_void
        self.has_void |= is_void or is_doubtful


def _find_void(sample: Sample) -> tuple[Flags, Flags]:
    """Which values say nothing of their layout, and which others are in doubt: their equality may prove nothing.

    Constants say nothing, nor does what a module makes of nothing but such: behind a dead ReLU the output of a linear
    layer is its bias, again and again, on all ranks and whatever batch they are of. What a function between modules
    makes has no recorded origin, so that it may be made of anything that was void before. Such a value is in doubt,
    and so is what a module makes of it, or with functions of its own.
    """
    grouped = sample.grouped
    is_void: Flags = grouped.is_blank & (grouped.equal != 0)
    is_doubtful: Flags = np.zeros(len(is_void), bool)
    is_seed = is_void | grouped.is_zero  # zeros of unlike signs are unequal, and what is made of them is equal
    is_open = (grouped.equal != 0) & ~is_void & ~grouped.has_nan
    if not is_open.any() or not is_seed.any():
        return is_void, is_doubtful
    sites, paths = grouped.labels["site"], grouped.labels["module_path"]
    is_input, is_output, is_tap = (sites.codes == sites.code(site) for site in ("input", "output", "tap"))
    is_of_root = paths.codes == paths.code("")
    dtypes = [grouped.chunks[code].dtype for code in grouped.codes[grouped.starts].tolist()]
    fingerprints, statistics = grouped.fingerprints[grouped.starts], grouped.statistics[grouped.starts]
    of_call: dict[int, _Inputs] = {}
    origins: dict[tuple[int, bool, int], tuple[bool, bool]] = {}
    """By moment and content, of equal values: whether they are void, and whether they are in doubt."""
    num_void: dict[int, int] = {}
    """By moment, how many values of floats were void or in doubt so far; others are masks, not what a net makes."""
    for number in sample.order.tolist():
        moment, call = sample.calls[number].tolist()
        has_fingerprint = fingerprints[number] != NONE
        content = moment, bool(has_fingerprint), int((fingerprints if has_fingerprint else statistics)[number])
        num_before = num_void.get(moment, 0)
        inputs = of_call.setdefault(call, _Inputs(num_before)) if is_input[number] else of_call.get(call)
        is_forward = bool(is_input[number] or is_output[number] or is_tap[number])
        if is_open[number] and content[2] != NONE:
            origin = origins.get(content)
            if is_output[number] and inputs is not None:
                is_void[number] = inputs.are_void
                is_made_of_void = (inputs.are_equal and inputs.has_void) or num_before > inputs.num_so_far
            else:  # what a root is given is not made in it
                is_given = inputs is not None and is_input[number] and is_of_root[number]
                is_made_of_void = num_before > (inputs.num_before if is_given and inputs is not None else 0)
            is_void[number] |= origin is not None and origin[0]
            is_doubtful[number] = not is_void[number] and (origin[1] if origin else is_forward and is_made_of_void)
        is_nothing = bool(is_void[number] or is_seed[number])
        if grouped.equal[number] != 0 and content[2] != NONE and (is_forward or is_nothing):
            origins[content] = is_nothing, bool(is_doubtful[number])
        if is_forward and dtypes[number].startswith(("float", "bfloat", "complex")):
            num_void[moment] = num_before + bool(is_nothing or is_doubtful[number])
        if is_input[number] and inputs is not None:
            inputs.add(
                is_void=is_nothing or bool(grouped.has_nan[number]),
                is_doubtful=bool(is_doubtful[number]),
                is_equal=bool(grouped.equal[number] != 0),
            )
            inputs.num_so_far = num_void.get(moment, 0)
    return is_void, is_doubtful


class LeafAcrossSteps:
    """What all steps say of the chunks of one value."""

    def __init__(self, leaves: Leaves, leaf: Leaf, chunks: Sequence[RankChunk]) -> None:
        self._leaves = leaves
        self._leaf = leaf
        self._chunks = chunks

    def replication(self, numbers: Sequence[int] | None) -> Replication:
        return self._leaves.replication(self._leaf, None if numbers is None else keys_of(self._chunks, numbers))

    def batch_dim(self) -> int | None:
        return self._leaves.batch_dim(self._leaf)


def keys_of(chunks: Sequence[RankChunk], numbers: Sequence[int]) -> ChunkKeys:
    """Some chunks by what names them at every step."""
    return tuple((chunks[i].rank, chunks[i].micro_step) for i in numbers)


class AcrossSteps(Protocol):
    """What all steps say of one value; see `leaves.Leaves`."""

    def replication(self, numbers: Sequence[int] | None) -> Replication:
        """How all chunks of the value, or those with some numbers, are replicated."""

    def batch_dim(self) -> int | None:
        """See `layout.rules.Values`."""


class Comparison:
    """What rows, and where they must be read payloads, say of the values of one group."""

    def __init__(
        self,
        grouped: GroupedRows,
        number: int,
        rows: Sequence[int],
        is_same: Callable[[Sequence[int]], bool | None],
        across_steps: AcrossSteps,
        *,
        is_float: bool,
    ) -> None:
        """Hold what is known of one value.

        Args:
            grouped: rows grouped by value.
            number: of the value.
            rows: the indices of its rows among those described, in data-parallel order.
            is_same: whether the tensors of rows at some positions are equal; None where a payload is missing.
            across_steps: what other steps say.
            is_float: whether equal sums tell that values are equal.
        """
        self.has_read = False
        self.is_by_statistics = False
        """Whether equality was judged by statistics alone."""
        self._grouped = grouped
        self._rows = rows
        self._is_float = is_float
        self.known = grouped.equal_of(number), bool(grouped.has_same_statistics[number])
        """What the rows say of all chunks: whether they are equal, None where nothing tells, and their statistics."""
        self._is_same = is_same
        self._across_steps = across_steps
        self._equal: dict[tuple[int, ...], bool | None] = {}

    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """Which rows have the same fingerprint, and which the same statistics: of each the first of its like."""
        patterns = []
        for column in (self._grouped.fingerprints, self._grouped.statistics):
            numbers = column[self._rows].tolist()
            first: dict[int, int] = {}
            patterns.append(tuple(NONE if n == NONE else first.setdefault(n, i) for i, n in enumerate(numbers)))
        return tuple(patterns)

    def replication(self) -> Replication:
        return self._across_steps.replication(None)

    def are_equal(self) -> bool:
        return self.equality() is True

    def are_unequal(self) -> bool:
        return self.equality() is False

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> ComparisonOfSome:
        """What is known of some of the chunks."""
        return ComparisonOfSome(self, numbers, self._across_steps)

    def equality(self, numbers: Sequence[int] | None = None) -> bool | None:
        """Whether all chunks, or some of them, are equal; None where nothing tells.

        By fingerprint, else by value, else by statistics: of floats, whose sums tell, and the row says so. Whole
        numbers are indices, masks and permutations often enough, which have equal statistics in any order.
        """
        rows = self._rows if numbers is None else [self._rows[i] for i in numbers]
        key = tuple(rows)
        if key not in self._equal:
            self._equal[key] = self._judged(rows)
        return self._equal[key]

    def _judged(self, rows: Sequence[int]) -> bool | None:
        fingerprints, statistics = self._grouped.fingerprints[rows], self._grouped.statistics[rows]
        if (fingerprints != NONE).all():
            return bool((fingerprints == fingerprints[0]).all())
        is_measured = bool((statistics != NONE).all())
        if is_measured and (statistics != statistics[0]).any():
            return False
        self.has_read = True
        is_same = self._is_same(self._grouped.chosen[list(rows)].tolist())
        if is_same is None and is_measured and self._is_float:
            self.is_by_statistics = is_same = True
        return is_same


class ComparisonOfSome:
    """What is known of some chunks of a value."""

    def __init__(self, comparison: Comparison, numbers: Sequence[int], across_steps: AcrossSteps) -> None:
        self._comparison = comparison
        self._numbers = numbers
        self._across_steps = across_steps

    def replication(self) -> Replication:
        return self._across_steps.replication(self._numbers)

    def are_equal(self) -> bool:
        return self._comparison.equality(self._numbers) is True

    def are_unequal(self) -> bool:
        return self._comparison.equality(self._numbers) is False

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()


class UnrecordedValue(Unequal):
    """What other steps say of a value that was not recorded at this one."""

    def __init__(self, across_steps: AcrossSteps, numbers: Sequence[int] | None = None) -> None:
        self._across_steps = across_steps
        self._numbers = numbers

    def replication(self) -> Replication:
        return self._across_steps.replication(self._numbers)

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> UnrecordedValue:
        """The value with some of its chunks alone."""
        return UnrecordedValue(self._across_steps, numbers)
