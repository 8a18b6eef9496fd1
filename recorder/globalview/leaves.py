"""Infers from rows whether the ranks have equal values of a leaf, and which dim of the leaf is the batch.

A leaf is a tensor that is recorded repeatedly under one name. Its layout is inferred from all sampled steps together. A
single step may prove nothing: NaN, constants and slices repeated along the batch are equal whether the ranks have
copies or parts of the batch. The result must never depend on the step or the part of the run for which it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from enum import Enum
from functools import cache, cached_property
from itertools import accumulate, islice
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ..layout.placement import NoPlan, RankChunk
from ..layout.rules import ChunkValues, Replication
from ..numerics.keys import Integers, by_key
from ..read.metadata import NONE
from .row_groups import GroupedRows, Leaf

_MAX_LOOKED_AT = 6
"""The most moments (step, micro-step, stage) at which the values of a leaf (a named tensor) are compared."""
Flags = npt.NDArray[np.bool_]
ChunkKeys = tuple[tuple[int, int], ...]
"""The rank and the micro-batch of each of some chunks. The micro-batch is 0 without a pipeline."""


class Observation(Enum):
    """What the ranks' values of a leaf (a named tensor) at one moment show: copies, or parts of a batch."""

    NOTHING = 0
    """The values prove nothing: copies and parts of a batch could both have these values."""
    REPEATED = 1
    """The values are equal, and each value is one slice repeated along a dim that may be the batch."""
    UNEQUAL = 2
    PERHAPS = 3
    """The values are equal. Values of different batches could be equal, too, but nothing suggests it."""
    EQUAL = 4
    """The values are equal, and values of different batches could not be equal."""


class BatchDims(NamedTuple):
    """The ranks' batch sizes at one moment, and the dims of a tensor that have these sizes."""

    sizes: tuple[int, ...]
    dims: frozenset[int]
    """The dims that have the sizes of the batches. Dim 0 also counts if its sizes are a multiple of these sizes."""
    first: int | None
    """The first dim whose size on each rank is the size of the rank's batch. None if no such dim is known."""
    are_single: bool
    """True if there are several ranks, each has a batch of one sample, and their samples differ."""


class Sample(Protocol):
    """The values of all leaves (named tensors) at the sampled steps. A value is named by its index here."""

    grouped: GroupedRows
    leaves: Mapping[Leaf, Integers]
    calls: Integers
    """For each value, the index of its moment (step, micro-step, stage) and the index of its module call."""
    apart: Callable[[], Set[tuple[str, int, str]]]
    """Return root, stage and path of each module whose parameters differ from rank to rank."""

    def look(self, number: int, some: ChunkKeys | None) -> Observation:
        """Compare all or some chunks of a value. Return what the comparison says about the layout."""

    def moment(self, number: int) -> BatchDims | None:
        """Return the ranks' batch sizes and the dims of a value with these sizes. None if the batch is unknown."""

    def cut(self, number: int, some: ChunkKeys) -> int | NoPlan | None:
        """Return the dim along which ranks that share a batch cut a value. Return None if a chunk is missing."""


class Leaves:
    """The layouts of a run's leaves (named tensors), inferred from sampled steps. The first call loads these steps."""

    def __init__(self, sample: Callable[[], Sample | None]) -> None:
        self._make = sample
        # Each method's answer is cached, because it is valid for the complete run.
        self.replication = cache(self._replication)
        self.batch_dim = cache(self._batch_dim)
        self.cut_dims = cache(self._cut_dims)
        self.varies = cache(self._varies)
        self._moments_of_kin = cache(self._find_moments_of_kin)

    def _batch_dim(self, leaf: Leaf) -> int | None:
        """Return the first dim that may be the batch at every moment. Return None if there is no such dim.

        Moments without a known batch do not count. If none is left, the leaf's other modes and calls are used.
        """
        moments = self._moments(leaf) or self._moments_of_kin(leaf._replace(mode="", call=0))
        common = frozenset.intersection(*(one.dims for one in moments)) if moments else frozenset()
        return min(common, default=None)

    def is_sequence_first(self, leaf: Leaf) -> bool:
        """Return True if dim 0 of the module's inputs is not the batch. If unknown, the module around it decides."""
        path = leaf.module_path
        while True:
            given = (leaf.root, path, "input", leaf.mode, leaf.stage)
            leaves = [one for one in self._leaves if (*one[:3], one.mode, one.stage) == given]
            leaves = [one for one in leaves if one.num_dims == leaf.num_dims] or leaves
            firsts = {moment.first for one in leaves for moment in self._moments(one)} - {None}
            if firsts or not path:
                return bool(firsts) and 0 not in firsts
            path = path.rpartition(".")[0]

    def works_apart(self, leaf: Leaf) -> bool:
        """Return True if a leaf's module, or a module that contains it, has different parameters on each rank."""
        paths, sample = accumulate(leaf.module_path.split("."), "{}.{}".format), self._sample
        return sample is not None and any((leaf.root, leaf.stage, path) in sample.apart() for path in paths)

    @cached_property
    def _kin(self) -> dict[Leaf, list[Leaf]]:
        """Leaves (named tensors) that differ only in mode and call, listed by the leaf without mode and call."""
        return by_key((one._replace(mode="", call=0), one) for one in self._leaves)

    def _find_moments_of_kin(self, kin: Leaf) -> list[BatchDims]:
        """Return the batch dims at a few moments of all leaves that differ only in mode and call from a leaf."""
        moments = (moment for one in self._kin.get(kin, ()) for moment in self._moments(one))
        return list(islice(moments, _MAX_LOOKED_AT))

    def _cut_dims(self, leaf: Leaf, chunks: ChunkKeys) -> set[int]:
        """Return the dims along which ranks that share a batch were seen to cut the leaf."""
        if (sample := self._sample) is None:
            return set()
        is_void, _ = self._void
        numbers = _a_few([number for number in self._values_of(leaf) if not is_void[number]])
        return {dim for number in numbers if isinstance(dim := sample.cut(number, chunks), int)}

    def _varies(self, root: str, mode: str, name: str) -> bool:
        """Return True if an argument of a root (a module under hooks) differed between ranks at any sampled step."""
        sample = self._sample
        return sample is not None and any(
            bool((sample.grouped.equal[numbers] == 0).any())
            for leaf, numbers in sample.leaves.items()
            if (leaf.module_path, leaf.site, leaf.root, leaf.mode, leaf.name) == ("", "input", root, mode, name)
        )

    def inputs_vary(self, root: str, mode: str) -> bool:
        """Return True if any argument of a root (a module under hooks) differed between ranks at any sampled step."""
        inputs = (one for one in self._leaves if (one.module_path, one.site) == ("", "input"))
        return any(self.varies(root, mode, one.name) for one in inputs if (one.root, one.mode) == (root, mode))

    @cached_property
    def _sample(self) -> Sample | None:
        return self._make()

    @cached_property
    def _void(self) -> tuple[Flags, Flags]:
        """Flags for the values of the sample that say nothing about their layout (void), and for doubtful values."""
        assert self._sample is not None
        return _find_void(self._sample)

    @property
    def _leaves(self) -> Mapping[Leaf, Integers]:
        return {} if self._sample is None else self._sample.leaves

    def _values_of(self, leaf: Leaf) -> list[int]:
        values = self._leaves.get(leaf)
        return [] if values is None else values.tolist()

    def _moments(self, leaf: Leaf) -> list[BatchDims]:
        moments = (self._sample.moment(number) for number in _a_few(self._values_of(leaf)) if self._sample is not None)
        return [one for one in moments if one is not None]

    def _replication(self, leaf: Leaf, chunks: ChunkKeys | None) -> Replication:
        """Return whether all chunks of a leaf, or only `chunks`, are copies of each other."""
        if (sample := self._sample) is None:
            return Replication.UNKNOWN
        grouped, (is_void, is_doubtful) = sample.grouped, self._void
        numbers = [number for number in self._values_of(leaf) if not grouped.has_nan[number]]
        observations: set[Observation] = set()
        if chunks is None:
            is_unequal = grouped.equal == 0
            if any(is_unequal[number] for number in numbers):
                observations.add(Observation.UNEQUAL)
            numbers = [number for number in numbers if not is_unequal[number]]
        numbers = [number for number in numbers if not is_void[number]]
        sure = [number for number in numbers if not is_doubtful[number]]
        observations |= {sample.look(number, chunks) for number in _a_few(sure)}
        in_doubt = [number for number in numbers if is_doubtful[number]]
        observations |= {sample.look(number, chunks) for number in _a_few(in_doubt)} - {Observation.PERHAPS}
        if Observation.EQUAL in observations:
            return Replication.REPLICATED
        if Observation.UNEQUAL in observations:
            return Replication.DISTINCT
        if Observation.PERHAPS in observations and Observation.REPEATED not in observations:
            moments = self._moments(leaf) if chunks is None else []
            is_resized = len({size for one in moments for size in one.sizes}) > 1
            follows_the_batch = is_resized and frozenset.intersection(*(one.dims for one in moments))
            return Replication.DISTINCT if follows_the_batch else Replication.REPLICATED
        return Replication.UNKNOWN


def _a_few(numbers: Sequence[int]) -> list[int]:
    few = min(len(numbers), _MAX_LOOKED_AT)
    return [numbers[i] for i in dict.fromkeys(np.linspace(0, len(numbers) - 1, few).round().astype(int).tolist())]


class _Inputs:
    def __init__(self, num_void: int) -> None:
        self.num_before = self.num_so_far = num_void
        """The number of void or doubtful values (weak evidence) before the call's first and after its last input."""
        self.are_void = self.are_equal = True
        self.has_void = False

    def add(self, *, is_void: bool, is_doubtful: bool, is_equal: bool) -> None:
        self.are_void &= is_void
        self.are_equal &= is_equal or is_void
        self.has_void |= is_void or is_doubtful


def _find_void(sample: Sample) -> tuple[Flags, Flags]:
    """Return a flag for each value that says nothing about its layout (void), and a flag for each doubtful value.

    A constant is void. An argument of the root (the module under hooks) is void if it is equal on all ranks and each
    rank has one sample: an argument such as positions may have one row for each sample, or one row for all samples. An
    output is void if all inputs of the module are void: behind a dead ReLU the output of a linear layer is its bias, on
    all ranks and for any batch. A function between modules leaves no record of its inputs, so its result may be
    computed from any earlier void value. Such a result is doubtful, and so is a module's output computed from it.
    """
    search = _VoidSearch(sample)
    if search.is_open.any() and search.is_seed.any():
        for number in sample.grouped.order.tolist():
            search.judge(number)
    return search.is_void, search.is_doubtful


class _VoidSearch:
    """Flags void values, which say nothing about their layout, and doubtful values. Values are judged in order."""

    def __init__(self, sample: Sample) -> None:
        """Flag the values that are void (no evidence of a layout) by themselves, such as constants."""
        self._sample = sample
        self._grouped = grouped = sample.grouped
        sites, paths = grouped.labels["site"], grouped.labels["module_path"]
        self._is_input, self._is_output, is_tap = (
            sites.codes == sites.code(site) for site in ("input", "output", "tap")
        )
        self._is_forward = self._is_input | self._is_output | is_tap
        self._is_of_root = paths.codes == paths.code("")
        self._is_equal = grouped.equal != 0
        self.is_void: Flags = grouped.is_blank & self._is_equal
        for number in np.flatnonzero(self._is_input & self._is_of_root & self._is_equal & ~self.is_void).tolist():
            moment = sample.moment(number)
            self.is_void[number] = moment is not None and moment.are_single and bool(moment.dims)
        self.is_doubtful: Flags = np.zeros(len(self.is_void), bool)
        self.is_seed = self.is_void | grouped.is_zero
        """True for void values and for zeros. Zeros may differ in sign, but a module's outputs for them are equal."""
        self.is_open = self._is_equal & ~self.is_void & ~grouped.has_nan
        """True for values that `judge` may still flag, depending on earlier values."""
        dtypes = [grouped.chunks[code].dtype for code in grouped.codes[grouped.starts].tolist()]
        self._is_float = [dtype.startswith(("float", "bfloat", "complex")) for dtype in dtypes]
        self._fingerprints, self._statistics = grouped.fingerprints[grouped.starts], grouped.statistics[grouped.starts]
        self._inputs_of_call: dict[int, _Inputs] = {}
        self._origins: dict[tuple[int, bool, int], tuple[bool, bool]] = {}
        """For a moment and a content: whether values with this content were void, or doubtful."""
        self._num_void: dict[int, int] = {}
        """For each moment: how many float values are void or doubtful. Integers are masks, which no layer computes."""

    def judge(self, number: int) -> None:
        """Flag the value at index `number`, depending on earlier values. Values must come in the order of execution."""
        moment, call = self._sample.calls[number].tolist()
        is_input, is_forward = bool(self._is_input[number]), bool(self._is_forward[number])
        num_before = self._num_void.get(moment, 0)
        of_call = self._inputs_of_call
        inputs = of_call.setdefault(call, _Inputs(num_before)) if is_input else of_call.get(call)
        content = self._content(moment, number)
        if self.is_open[number] and content is not None:
            self._flag(number, self._origins.get(content), inputs, num_before)
        is_nothing, is_doubtful = bool(self.is_void[number] or self.is_seed[number]), bool(self.is_doubtful[number])
        if self._is_equal[number] and content is not None and (is_forward or is_nothing):
            self._origins[content] = is_nothing, is_doubtful
        if is_forward and self._is_float[number]:
            self._num_void[moment] = num_before + (is_nothing or is_doubtful)
        if is_input and inputs is not None:
            is_void = is_nothing or bool(self._grouped.has_nan[number])
            inputs.add(is_void=is_void, is_doubtful=is_doubtful, is_equal=bool(self._is_equal[number]))
            inputs.num_so_far = self._num_void.get(moment, 0)

    def _content(self, moment: int, number: int) -> tuple[int, bool, int] | None:
        has_fingerprint = bool(self._fingerprints[number] != NONE)
        code = int((self._fingerprints if has_fingerprint else self._statistics)[number])
        return None if code == NONE else (moment, has_fingerprint, code)

    def _flag(self, number: int, origin: tuple[bool, bool] | None, inputs: _Inputs | None, num_before: int) -> None:
        """Flag one value. `origin` has the flags (void, doubtful) of an earlier value with equal content, or None."""
        is_void = False
        if self._is_output[number] and inputs is not None:
            is_void = inputs.are_void
            is_made_of_void = (inputs.are_equal and inputs.has_void) or num_before > inputs.num_so_far
        elif self._is_input[number] and self._is_of_root[number] and inputs is not None:
            is_made_of_void = num_before > inputs.num_before  # a root's inputs are not computed inside the root
        else:
            is_made_of_void = num_before > 0
        is_void = is_void or (origin is not None and origin[0])
        self.is_void[number] = is_void
        is_doubtful = origin[1] if origin is not None else self._is_forward[number] and is_made_of_void
        self.is_doubtful[number] = not is_void and is_doubtful


def keys_of(chunks: Sequence[RankChunk], numbers: Sequence[int]) -> ChunkKeys:
    """Return the rank and micro-step of each chosen chunk, which identify the chunk at every step."""
    return tuple((chunks[i].rank, chunks[i].micro_step) for i in numbers)


class LeafAcrossSteps(ChunkValues):
    """What the sampled steps say about the layout of a value, even if the value itself was not recorded."""

    def __init__(self, leaves: Leaves, leaf: Leaf, chunks: Sequence[RankChunk]) -> None:
        self.leaves, self.leaf, self.chunks = leaves, leaf, chunks
        self.numbers: Sequence[int] | None = None
        """The indexes of the chunks that are compared; None to compare all chunks."""

    def replication(self) -> Replication:
        return self.leaves.replication(self.leaf, None if self.numbers is None else keys_of(self.chunks, self.numbers))

    def batch_dim(self) -> int | None:
        return self.leaves.batch_dim(self.leaf)

    def is_sequence_first(self) -> bool:
        return self.leaves.is_sequence_first(self.leaf)

    def among(self, numbers: Sequence[int]) -> Self:
        some = copy(self)
        some.numbers = numbers
        return some


class Comparison(LeafAcrossSteps):
    """What the sampled steps and one value's rows say about the value's layout. Payloads are read only if needed."""

    def __init__(
        self,
        leaves: Leaves,
        leaf: Leaf,
        chunks: Sequence[RankChunk],
        grouped: GroupedRows,
        number: int,
        rows: Sequence[int],
        is_same: Callable[[Sequence[int]], bool | None],
    ) -> None:
        """Read nothing yet. `rows` are the indexes in `grouped` of value `number`'s rows, in data-parallel order."""
        super().__init__(leaves, leaf, chunks)
        self.judged_by: set[str] = set()
        """The evidence, besides the value's own rows, that was used: ``payloads``, ``statistics`` or ``other rows``."""
        self._grouped = grouped
        self._rows = rows
        are_equal = None if grouped.equal[number] == NONE else bool(grouped.equal[number])
        self.known = are_equal, bool(grouped.has_same_statistics[number])
        """From the rows, whether all chunks are equal (None: unknown), and whether all statistics are."""
        self._is_same = is_same
        self._equal: dict[tuple[int, ...], bool | None] = {}

    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each row, the index of the first row with the same fingerprint, and with the same statistics."""
        patterns = []
        for column in (self._grouped.fingerprints, self._grouped.statistics):
            numbers = column[self._rows].tolist()
            first: dict[int, int] = {}
            patterns.append(tuple(NONE if n == NONE else first.setdefault(n, i) for i, n in enumerate(numbers)))
        return tuple(patterns)

    def are_equal(self) -> bool:
        return self.equality() is True

    def are_unequal(self) -> bool:
        return self.equality() is False

    def equality(self) -> bool | None:
        """Return whether the chunks are equal, by fingerprints, payloads or float statistics. None if unknown."""
        rows = self._rows if self.numbers is None else [self._rows[i] for i in self.numbers]
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
        self.judged_by.add("payloads")
        is_same = self._is_same(self._grouped.chosen[list(rows)].tolist())
        if is_same is None and is_measured and self.chunks[0].dtype.startswith(("float", "bfloat")):
            self.judged_by.add("statistics")
            return True
        return is_same
