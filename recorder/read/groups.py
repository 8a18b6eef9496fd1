"""Owns which rows of several ranks are one value, and the plan that makes it one tensor. Light rows alone.

Must never mix two launches within a step. Payloads are compared only where rows say nothing that could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.schema import COUNTS, STATISTICS
from ..layout.levels import Block, split
from ..layout.placement import reduce_op
from ..layout.plans import Apart, Piece, Plan, named
from ..layout.rules import Batch, Kinship, copies_unless, parse_override
from ..patterns import matches, parse_patterns
from .batches import NO_BATCH, RootBatches, text_of
from .content import Content, content_by, content_of, is_repeated
from .cuts import Cuts, Wanted
from .deciding import ALONE, LOCAL_GRADIENT, STATE_SITES, Override, Question, decide
from .decode import parse_shape
from .evidence import NULL, POSITIVE, Described, Evidence, Ints, Unrecorded, bits_of, digest, pack
from .experts import BEGAN_ALIKE, NOT_OF_BATCH, NOT_SHARED
from .facts import RunFacts
from .grid import Group
from .leaves import Leaf, Leaves, Moment, OfLeaf, Pieces, Sample, Seen, keys_of, leaf_of
from .light import NONE, Keys, LightRows, Positions
from .parts import Parts, parts_of_batch
from .stages import HANDED_ON, Slices, Stage, in_order, missing_stages, unseen

_FORWARD_OF = {"grad_input": "input", "grad_output": "output", "tap": "tap"}
_KEY = ("root", "module_path", "site", "name", "phase", "mode", "step", "micro_step", "call", "repeat")
_LABELS = ("root", "module_path", "site", "name", "mode", "phase")
_PIECE = ("dtype", "shape", "global_shape", "offsets", "placements", "mesh", "note")
COLUMNS = (
    *_KEY, *_PIECE, *STATISTICS, *COUNTS, "fingerprint", "rank", "seq", "part", "attempt", "encoding", "payload_bytes",
    "numel", "batch", "row",
)  # fmt: skip
"""What must be loaded of the rows."""

_MINUS_ZERO = np.iinfo(np.int64).min
"""The bits of -0.0."""
_MAX_LOOKED_UP = 100_000
"""Rows of which a look-up keeps the values for the next: those of the modules of a step, of some ranks."""
_ADDED_UP = (
    "its rows say that they are summands, and they are equal to the last bit, as if they had been added up in place: "
    "--layout '...=replicate' if so, '...=partial(sum)' if not"
)
_ASSUMED = " (assumed to be replicas: neither DDP nor FSDP was seen; --layout '...=per_rank' if they are not)"


class Finding(NamedTuple):
    """Something about the ranks' rows that the reader should know."""

    kind: str
    """``replicas_differ``, ``buffers_differ``, ``inconsistent``, ``partial``, ``per_rank``, ``superseded``,
    ``stranger``, ``layout_changes``: ranks have it alike at some steps and not at others, or ``alone``: the other
    ranks never ran it."""
    step: int
    """The first step where it shows."""
    module_path: str
    site: str
    name: str
    ranks: tuple[int, ...]
    text: str
    num_rows: int = 1
    """Values of which the same was found."""


class Value(NamedTuple):
    """Rows of several ranks that are one value, in data-parallel order."""

    positions: tuple[int, ...]
    """Of each rank's part 0."""
    plan: Plan | Apart
    present: tuple[int, ...]
    expected: tuple[int, ...]
    differing: tuple[int, ...] = ()
    """Ranks whose replica differs from the first one's."""
    batch: Batch = Batch(None)
    """That decided of an activation."""
    leads: tuple[int, ...] = ()
    """The ranks whose batches `batch` is of; one of each part of the batch."""
    stage: Stage | None = None
    """Of a pipeline, which ran it."""

    @property
    def is_refused(self) -> bool:
        return isinstance(self.plan, Apart)

    @property
    def is_between_stages(self) -> bool:
        """Whether it goes from one stage of a pipeline to another."""
        return isinstance(self.plan, Apart) and self.plan.kind == HANDED_ON


class _Asked(NamedTuple):
    """What rows and manifests say of one value, before anything is decided."""

    first: int
    """Position of its first row."""
    names: tuple[str, ...]
    """As `_LABELS` has them."""
    writer: int
    group: Group
    places: list[int]
    """Of its rows among those described, in data-parallel order; so are all that follow."""
    codes: tuple[int, ...]
    pieces: list[Piece]
    positions: tuple[int, ...]
    expected: tuple[int, ...]
    blocks: tuple[Block, ...] | Apart | None
    parts: Parts


class Grouping:
    """Plans for some rows of a run."""

    def __init__(
        self,
        rows: LightRows,
        facts: RunFacts,
        *,
        loss: str,
        overrides: Sequence[tuple[tuple[str, ...], str]],
        is_same: Callable[[Sequence[int]], bool | None],
        items_of: Callable[[int], npt.NDArray[Any] | None],
        leaves: Leaves | None = None,
    ) -> None:
        """Load what is needed.

        Args:
            rows: of a run or of a window of steps of it.
            facts: of the run.
            loss: see `layout.rules.decide_gradient`.
            overrides: patterns over ``module_path:site:name`` and layout, the last that fits wins.
            is_same: whether the tensors of some rows hold the same values; None where a payload is missing.
            items_of: a row's tensor; None where its payload is missing.
            leaves: what all steps of the run say; by default what these rows do.
        """
        rows.load(COLUMNS)
        self.findings: list[Finding] = []
        self._rows = rows
        self._facts = facts
        self._loss = loss
        self._overrides = overrides
        self._is_same = is_same
        self._items_of = items_of
        self._leaves = leaves or Leaves(self.sample)
        self._decided: dict[Any, tuple[Plan | Apart, Batch, Plan | Apart | None]] = {}
        """Decisions by all that they hang on; with the plan whose identity is a part of the key, so that it lives."""
        self._split: dict[Any, tuple[tuple[Block, ...] | Apart | None, Parts]] = {}
        self._pieces: list[Piece] = []
        self._numbers: dict[Piece, int] = {}
        self._found: dict[Any, int] = {}
        self._looked_up: dict[tuple[bytes, bool], list[Value]] = {}
        self._num_looked_up = 0
        self.counts = self._which_count()
        """By position, whether a row counts: superseded ones and those of another run do not."""
        for text in missing_stages(facts.stages):
            self._note("partial", None, (), text)
        self._roots = RootBatches(rows, self.counts, self._leaves.varies)
        self._cuts = Cuts(rows, self.counts, facts.is_linear)

    def values(self, positions: Positions | None = None, *, is_slice: bool = False) -> Iterator[Value]:
        """The values of some rows (all by default), in the order of execution; rows that do not count are skipped.

        With `is_slice` they are of one micro-batch of a pipeline, and others do not lack.
        """
        chosen = np.flatnonzero(self.counts) if positions is None else positions[self.counts[positions]]
        chosen = chosen[self._rows.numbers("part")[chosen] == 0]
        if not len(chosen):
            return
        described, groups, twins, sequence = self._arrange(chosen)
        is_gradient = twins >= 0
        of_group: dict[int, Value] = {}
        place_of = {int(group): number for number, group in enumerate(groups)}

        def value_of(number: int) -> Value:
            found = of_group.get(number)
            if found is None:
                forward: Value | None = None
                if is_gradient[number] and (twin := place_of.get(int(twins[number]))) is not None:
                    forward = value_of(twin)
                found = of_group[number] = self._value(
                    described, number, forward, is_gradient=bool(is_gradient[number]), is_slice=is_slice
                )
            return found

        for number in sequence.tolist():
            yield value_of(number)

    def _arrange(self, chosen: Positions) -> tuple[Described, Ints, Ints, Ints]:
        """Rows by value: what is known of each, its number and its twin's, and the values' order of execution."""
        rows = self._rows
        slices = Slices(rows, chosen, self._facts.stages)
        groups, twins = self._group_numbers(chosen, slices)
        ranks = rows.numbers("rank")[chosen]
        order = np.lexsort([slices.micro_step, ranks, groups])
        chosen, groups, twins = chosen[order], groups[order], twins[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        described = self._describe(chosen, starts, slices.micro_step[order])
        sequence = in_order(rows, chosen[starts], slices.stage[order][starts])
        return described, groups[starts], twins[starts], sequence

    def sample(self, positions: Positions | None = None) -> Sample | None:
        """The values of these rows but parameters and their like, whose layout hangs on no value; None without any."""
        rows = self._rows
        chosen = np.flatnonzero(self.counts) if positions is None else positions[self.counts[positions]]
        chosen = chosen[rows.numbers("part")[chosen] == 0]
        sites = rows.keys("site", chosen)
        chosen = chosen[~np.isin(sites.codes, [sites.code(site) for site in (*STATE_SITES, "scalar")])]
        if not len(chosen):
            return None
        described, _, _, sequence = self._arrange(chosen)
        firsts = described.chosen[described.starts]
        stages = np.array([self._stage_of(described, number) for number in range(len(firsts))], np.int64)
        labels = [described.labels[name].codes for name in _LABELS]
        calls, steps, micro_steps = (rows.numbers(name)[firsts] for name in ("call", "step", "micro_step"))
        num_dims = np.array([len(piece.shape) for piece in described.pieces], np.int64)
        num_dims = num_dims[described.codes[described.starts]]
        codes = pack([*labels, calls, stages, num_dims])[sequence]
        by_leaf = np.argsort(codes, kind="stable")
        bounds = np.flatnonzero(np.r_[True, np.diff(codes[by_leaf]) > 0])
        leaves = {self._leaf(described, int(some[0])): some for some in np.split(sequence[by_leaf], bounds[1:])}
        of_call = [described.labels[name].codes for name in ("root", "module_path", "mode", "phase")]
        return Sample(
            described,
            leaves,
            np.stack([pack([steps, micro_steps, stages]), pack([*of_call, steps, micro_steps, calls, stages])], axis=1),
            sequence,
            partial(self._look, described),
            partial(self._moment, described),
            partial(self._cut_of, described),
        )

    def _stage_of(self, described: Described, number: int) -> int:
        if not self._facts.stages:
            return NONE
        root = text_of(described.labels["root"], number)
        stage = self._facts.stages.get((int(described.writers[number]), root))
        return NONE if stage is None else stage.number

    def _leaf(self, described: Described, number: int) -> Leaf:
        start = described.starts[number]
        return leaf_of(
            described,
            number,
            stage=self._stage_of(described, number),
            call=int(self._rows.numbers("call")[described.chosen[start]]),
            num_dims=len(described.pieces[described.codes[start]].shape),
        )

    def values_again(self, positions: Positions, *, is_slice: bool) -> list[Value]:
        """The same for one question of many: whoever asks for a tensor asks for others of its module and step."""
        key = positions.tobytes(), is_slice
        found = self._looked_up.get(key)
        if found is None:
            if self._num_looked_up > _MAX_LOOKED_UP:
                self._looked_up.clear()
                self._num_looked_up = 0
            self._num_looked_up += len(positions)
            found = self._looked_up[key] = list(self.values(positions, is_slice=is_slice))
        return found

    def pieces(self, value: Value) -> list[Piece]:
        """What the rows of a value say of it, as its plan numbers them."""
        at = np.array(value.positions, np.int64)
        slices = Slices(self._rows, at, self._facts.stages)
        return [self._piece(int(p), int(m)) for p, m in zip(at, slices.micro_step, strict=True)]

    @cached_property
    def _reporting(self) -> dict[tuple[str, str], set[int]]:
        """Which ranks have rows of a scalar, by root and name."""
        rows, everything = self._rows, np.flatnonzero(self.counts)
        sites = rows.keys("site", everything)
        positions = everything[sites.codes == sites.code("scalar")]
        roots, names = (rows.keys(name, positions) for name in ("root", "name"))
        codes = np.stack([roots.codes, names.codes, rows.numbers("rank")[positions]])
        found: dict[tuple[str, str], set[int]] = {}
        for root, name, rank in np.unique(codes, axis=1).T.tolist():
            found.setdefault(((roots.texts or [])[root], (names.texts or [])[name]), set()).add(rank)
        return found

    def _which_count(self) -> npt.NDArray[np.bool_]:
        """By position: not of a launch whose step a later one recorded again, nor of a writer of another run."""
        rows, facts = self._rows, self._facts
        writers = rows.writer_numbers(np.arange(rows.num_rows, dtype=np.int64))
        counts: npt.NDArray[np.bool_] = ~np.isin(writers, facts.strangers)
        for number in facts.strangers:
            if (writers == number).any():
                text = f"writer {facts.describe(number)} belongs to another run; its rows are left out"
                self._note("stranger", None, (), text)
        steps = rows.numbers("step")
        of_writer = {number: steps[counts & (writers == number)] for number in np.unique(writers[counts]).tolist()}
        winners = facts.winners({number: np.unique(own).tolist() for number, own in of_writer.items()})
        if not winners:
            return counts
        places = np.array(facts.launch_places())[writers]
        known = np.array(sorted(winners))
        wins = np.array([winners[step] for step in known.tolist()])
        is_superseded = counts & (places != wins[np.minimum(np.searchsorted(known, steps), len(known) - 1)])
        if is_superseded.any():
            text = f"{is_superseded.sum()} rows of earlier attempts at steps that a later one recorded are left out"
            self._note("superseded", int(np.flatnonzero(is_superseded)[0]), (), text)
        counts &= ~is_superseded
        return counts

    def _group_numbers(self, chosen: Positions, slices: Slices) -> tuple[Ints, Ints]:
        """The number of each row's value, and of the value that it is the gradient of (-1: none)."""
        keys = {name: self._keys(name, chosen) for name in _KEY}
        columns = {name: key.codes.copy() for name, key in keys.items()}
        columns |= {"micro_step": slices.key, "stage": slices.stage}
        sites = keys["site"]
        forward_site = np.full(len(sites.texts or ()) + 1, NONE)
        for code, site in enumerate(sites.texts or ()):
            if site in _FORWARD_OF:
                forward_site[code] = sites.code(_FORWARD_OF[site])
        backward, forward = keys["phase"].code("backward"), keys["phase"].code("forward")
        is_gradient = (forward_site[columns["site"]] >= 0) & (columns["phase"] == backward) & (forward >= 0)
        at = np.flatnonzero(is_gradient)
        changed = {
            "site": forward_site[columns["site"][at]],
            "phase": np.full(len(at), forward),
            "repeat": np.zeros(len(at)),
        }
        both = [np.concatenate([columns[name], changed.get(name, columns[name][at])]) for name in columns]
        numbers = pack(both)
        twins = np.full(len(chosen), -1)
        twins[at] = numbers[len(chosen) :]
        is_backward = columns["phase"] == backward
        is_backward &= np.isin(columns["site"], [sites.code(s) for s in ("grad_input", "grad_output", "tap")])
        twins[is_backward & (twins < 0)] = np.iinfo(np.int64).max  # a gradient whose value was not recorded
        return numbers[: len(chosen)], twins

    def _keys(self, name: str, positions: Positions) -> Keys:
        return self._rows.keys(name, positions)

    def _describe(self, chosen: Positions, starts: Ints, micro_steps: Ints) -> Described:
        """Per row a number that stands for its piece, and per value whether all its rows are equal."""
        rows = self._rows
        ends = np.r_[starts[1:], len(chosen)]
        columns = [self._keys(name, chosen).codes for name in _PIECE]
        local = pack([*columns, rows.numbers("rank")[chosen], micro_steps])
        _, first_of_code = np.unique(local, return_index=True)
        pieces = (self._piece(int(chosen[at]), int(micro_steps[at])) for at in first_of_code)
        codes = np.array([self._number_of(piece) for piece in pieces], np.int64)[local]
        of_row = np.repeat(np.arange(len(starts)), ends - starts)
        fingerprints = self._keys("fingerprint", chosen).codes
        firsts = starts[of_row]
        has_fingerprint = np.logical_and.reduceat(fingerprints != NONE, starts)
        same_fingerprint = np.logical_and.reduceat(fingerprints == fingerprints[firsts], starts)
        bits = [bits_of(rows.take(name, chosen)) for name in (*STATISTICS, *COUNTS)]
        has_statistics = np.logical_and.reduceat(bits[-1] != NULL, starts)
        digests = digest(bits)
        same_statistics = np.logical_and.reduceat(digests == digests[firsts], starts)
        low, high, nans, infs = (
            bits[[*STATISTICS, *COUNTS].index(n)] for n in ("min", "max", "nan_count", "inf_count")
        )
        low, high = (np.where(column == _MINUS_ZERO, 0, column) for column in (low, high))
        is_measured = bits[-1] != NULL
        has_nan = is_measured & ((nans > 0) | (low == NULL))
        is_constant = is_measured & (low == high) & (infs == 0)
        is_blank = has_nan | is_constant
        return Described(
            chosen=chosen,
            starts=starts,
            ends=ends,
            codes=codes,
            pieces=self._pieces,
            equal=np.where(has_fingerprint, same_fingerprint, np.where(has_statistics & ~same_statistics, False, NONE)),
            has_same_statistics=has_statistics & same_statistics,
            is_blank=np.logical_and.reduceat(is_blank, starts),
            is_zero=np.logical_and.reduceat(is_constant & ~has_nan & (low == 0), starts),
            has_nan=np.logical_or.reduceat(has_nan, starts),
            is_measured=has_statistics,
            fingerprints=fingerprints,
            statistics=np.where(bits[-1] == NULL, NONE, digests & POSITIVE),
            labels={name: self._keys(name, chosen[starts]) for name in _LABELS},
            writers=rows.writer_numbers(chosen[starts]),
        )

    def _number_of(self, piece: Piece) -> int:
        """A number for a piece that holds for every question."""
        number = self._numbers.setdefault(piece, len(self._pieces))
        if number == len(self._pieces):
            self._pieces.append(piece)
        return number

    def _piece(self, position: int, micro_step: int) -> Piece:
        texts = {name: self._rows.text(name, position) for name in _PIECE}
        global_shape, offsets = (texts[name] and parse_shape(texts[name]) for name in ("global_shape", "offsets"))
        return Piece(
            int(self._rows.numbers("rank")[position]),
            texts["dtype"] or "",
            parse_shape(texts["shape"]),
            global_shape or (() if texts["global_shape"] else None),
            offsets or (() if texts["offsets"] else None),
            texts["placements"],
            texts["mesh"],
            next((member for member in ALONE if f'"{member}":' in (texts["note"] or "")), None),
            micro_step,
        )

    def _ask(self, described: Described, number: int) -> _Asked:
        """What rows and manifests say of one value, before anything is decided."""
        start, end = int(described.starts[number]), int(described.ends[number])
        first = int(described.chosen[start])
        names = tuple(text_of(described.labels[label], number) for label in _LABELS)
        root, path, site, name, _, _ = names
        writer = int(described.writers[number])
        group = self._facts.group(root, path, writer)
        places = list(range(start, end))
        if len(places) > 1 and not group.is_sorted:
            order = {rank: i for i, rank in enumerate(group.ranks)}
            places.sort(key=lambda at: order.get(described.pieces[described.codes[at]].rank, len(order)))
        codes = tuple(described.codes[places].tolist())
        pieces = [described.pieces[code] for code in codes]
        ranks = tuple(piece.rank for piece in pieces)
        expected = group.ranks if set(ranks) <= set(group.ranks) else tuple(dict.fromkeys((*group.ranks, *ranks)))
        if site == "scalar":  # the program decides who reports a number
            reports = self._reporting.get((root, name), set())
            step = self._step_of(first)
            expected = tuple(rank for rank in expected if rank in reports or self._facts.last_step(rank) < step)
        elif site == "optim" and group.source == "fsdp" and all(piece.shape == () for piece in pieces):
            expected = ranks  # FSDP1 keeps no step where a rank holds nothing of a parameter
        blocks, parts = self._parts(codes, pieces, group, expected)
        rows_at = tuple(described.chosen[places].tolist())
        return _Asked(first, names, writer, group, places, codes, pieces, rows_at, expected, blocks, parts)

    def _evidence(self, described: Described, number: int, asked: _Asked) -> Evidence:
        of_all_steps = OfLeaf(self._leaves, self._leaf(described, number), asked.pieces)
        is_float = asked.pieces[0].dtype.startswith(("float", "bfloat"))
        return Evidence(described, number, asked.places, self._is_same, of_all_steps, is_float=is_float)

    def _look(self, described: Described, number: int, some: Pieces | None) -> Seen:
        """What the values of one moment say of how the ranks' tensors stand to each other."""
        asked = self._ask(described, number)
        numbers = _numbers_of(asked.pieces, some)
        pieces = [asked.pieces[i] for i in numbers]
        if len(pieces) < 2 or (some is None and len({piece.shape for piece in pieces}) > 1):
            return Seen.NOTHING  # ranks may well have copies of different lengths, as of positions
        if len({piece.shape for piece in pieces}) > 1:
            return Seen.UNEQUAL
        is_equal = self._evidence(described, number, asked).equality(numbers)
        if is_equal is None or (is_equal and described.is_blank[number]):
            return Seen.NOTHING
        if not is_equal:
            return Seen.UNEQUAL
        first = asked.positions[numbers[0]]
        items = None if described.is_measured[number] else self._items_of(first)
        if items is None and not described.is_measured[number]:
            return Seen.NOTHING  # fingerprints alone do not tell whether they are of zeros or of NaN
        content = self._content(first, pieces[0]) if items is None else content_of(items)
        if content is Content.NOTHING:
            return Seen.NOTHING
        is_certain = content is Content.NUMBERS
        if some is not None and _share_a_batch(asked.blocks, numbers):
            return Seen.EQUAL if is_certain else Seen.PERHAPS
        moment, is_shared = self._moment_of(asked)
        if is_shared:
            return Seen.NOTHING
        if moment is not None and not moment.dims:
            return Seen.EQUAL if is_certain else Seen.PERHAPS
        items = self._items_of(first) if items is None else items
        if items is None:
            return Seen.PERHAPS
        dims = range(items.ndim) if moment is None else moment.dims
        if any(items.shape[dim] > 1 and is_repeated(items, dim) for dim in dims):
            return Seen.REPEATED
        is_certain = is_certain and moment is not None and max(moment.sizes) > 1
        return Seen.EQUAL if is_certain else Seen.PERHAPS

    def _content(self, position: int, piece: Piece) -> Content:
        """How much a row's statistics say that its values are no accident."""
        at = np.array([position], np.int64)
        low, high, total = (self._rows.take(name, at)[0].as_py() for name in ("min", "max", "sum"))
        numel = int(self._rows.numbers("numel")[position])
        return content_by(low, high, total, numel, is_float=piece.dtype.startswith(("float", "bfloat")))

    def _moment(self, described: Described, number: int) -> Moment | None:
        return self._moment_of(self._ask(described, number))[0]

    def _moment_of(self, asked: _Asked) -> tuple[Moment | None, bool]:
        """Along which dims the pieces may be the batch, where it is known, and whether all ranks were given one."""
        root, _, _, _, mode, phase = asked.names
        labels = root, mode, phase in ("recompute", "backward")
        batch = self._batches(asked.first, asked.positions, asked.parts, labels, None)[0]
        shapes = [asked.pieces[i].shape for i in asked.parts.pieces]
        if batch.sizes is None or len(batch.sizes) != len(shapes) or len({len(shape) for shape in shapes}) > 1:
            return None, batch.is_shared
        both = list(zip(shapes, batch.sizes, strict=True))
        dims = {d for d in range(len(shapes[0])) if all(shape[d] == size for shape, size in both)}
        if shapes[0] and any(all(shape[0] == size * factor for shape, size in both) for factor in batch.factors):
            dims.add(0)
        return Moment(batch.sizes, frozenset(dims)), batch.is_shared

    def _cut_of(self, described: Described, number: int, some: Pieces) -> int | Apart | None:
        asked = self._ask(described, number)
        numbers = _numbers_of(asked.pieces, some)
        root, path, site, _, _, _ = asked.names
        wanted = Wanted(root, path, site, self._step_of(asked.first))
        return self._cuts.infer(wanted, [asked.pieces[i] for i in numbers]) if numbers else None

    def _value(
        self, described: Described, number: int, forward: Value | None, *, is_gradient: bool, is_slice: bool
    ) -> Value:
        asked = self._ask(described, number)
        first, names, writer, group, places, codes, pieces, rows_at, expected, blocks, parts = asked
        root, path, site, name, mode, phase = names
        ranks = tuple(piece.rank for piece in pieces)
        batches: tuple[Batch, ...] = NO_BATCH
        if site not in STATE_SITES:
            labels = root, mode, is_gradient or phase == "recompute"
            batches = self._batches(first, rows_at, parts, labels, forward)
        override = self._override(path, site, name)
        evidence = self._evidence(described, number, asked)
        leaf = self._leaf(described, number)
        known_of_values = evidence.without_payloads(), evidence.pattern() if blocks is not None else ()
        forward_plan = forward.plan if forward is not None else None
        kind = LOCAL_GRADIENT if site == "grad" and phase == "backward" else site
        own = () if site in STATE_SITES else leaf
        key = codes, id(group), expected, kind, known_of_values, override, batches, id(forward_plan), is_gradient, own
        known = self._decided.get(key)
        if known is None:
            unrecorded = None
            if is_gradient and forward is None and site in _FORWARD_OF:
                value = leaf._replace(site=_FORWARD_OF[site], phase="forward")
                unrecorded = Unrecorded(OfLeaf(self._leaves, value, pieces))
            wanted = Wanted(root, path, site, self._step_of(first))
            question = Question(
                pieces, kind, group, parts.num_expected, evidence, override, batches, forward_plan, unrecorded,
                is_gradient, self._loss, partial(self._infer, evidence, wanted, leaf, first, name),
            )  # fmt: skip
            known = *decide(question, blocks), forward_plan
            if not evidence.has_read:
                self._decided[key] = known
        plan, batch, _ = known
        if override is None and site not in STATE_SITES and isinstance(plan, Plan):
            plan = _unless_added_up(plan, pieces, evidence)
        stage = self._facts.stages.get((writer, root)) if site != "scalar" else None
        if stage is not None:
            plan = self._in_pipeline(plan, pieces, names, first, stage, is_slice=is_slice)
        differing: tuple[int, ...] = ()
        if isinstance(plan, Plan) and plan.copies and (plan.source != "inferred" or site in STATE_SITES):
            differing, originals = self._differing(described, number, places, plan, rows_at)
        present = tuple(dict.fromkeys(ranks))
        is_own = self._is_own(pieces, expected, names)
        if is_own and override is None and (site not in STATE_SITES or differing or isinstance(plan, Apart)):
            plan, differing = Apart("per_rank", NOT_SHARED if site in STATE_SITES else NOT_OF_BATCH), ()
        if not is_own and (missing := tuple(rank for rank in expected if rank not in present)):
            self._missing(first, missing, expected, names)
        differing_ranks = tuple(ranks[i] for i in differing)
        if differing:
            original_ranks = tuple(ranks[i] for i in originals)
            text = f"rank {listed(differing_ranks)} differs from rank {listed(original_ranks)}"
            if group.source == "assumed" and not group.instances:
                text += _ASSUMED
            if site in STATE_SITES and self._facts.unshared.began_alike(root, path, name):
                text += BEGAN_ALIKE
            kind = "buffers_differ" if site == "buffer" else "replicas_differ"
            if override is not None and override.wanted == "replicate":
                kind = "inconsistent"
                text = f"--layout '{override.rule}' does not fit: {text}: {named(pieces, 'shape')}"
            self._note(kind, first, (*original_ranks, *differing_ranks), text, path, site, name)
            if kind != "buffers_differ":
                plan = Apart(kind, text)
        elif isinstance(plan, Apart):
            self._note(plan.kind, first, present, plan.why, path, site, name)
        return Value(rows_at, plan, present, expected, differing_ranks, batch, parts.ranks, stage)

    def _is_own(self, pieces: list[Piece], expected: tuple[int, ...], names: tuple[str, ...]) -> bool:
        """Whether plain pieces are of a parameter that each rank has for itself, or of what it makes with such."""
        root, path, site, name, _, _ = names
        if pieces[0].global_shape is not None or len(expected) < 2 or site == "scalar":
            return False
        unshared = self._facts.unshared
        return unshared.has(root, path, name) if site in STATE_SITES else unshared.works_apart(root, path)

    def _parts(
        self, codes: tuple[int, ...], pieces: list[Piece], group: Group, expected: tuple[int, ...]
    ) -> tuple[tuple[Block, ...] | Apart | None, Parts]:
        """The pieces by the parts of the batch, where several ranks share one, and those parts."""
        key = codes, id(group), expected
        found = self._split.get(key)
        if found is None:
            blocks = split(pieces, () if group.conflict else group.instances, expected)
            found = self._split[key] = blocks, parts_of_batch(pieces, blocks, group, expected)
        return found

    def _step_of(self, position: int) -> int:
        return int(self._rows.numbers("step")[position])

    def _infer(
        self, evidence: Evidence, wanted: Wanted, leaf: Leaf, first: int, name: str, pieces: Sequence[Piece]
    ) -> int | Apart:
        evidence.has_read = True  # other rows, and of that step: no answer for another
        dims = self._leaves.cut_dims(leaf, keys_of(pieces, range(len(pieces))))
        found = self._cuts.infer(wanted, pieces, dims)
        if not isinstance(found, Apart):
            text = (
                f"taken for pieces along dim {found}, by their shapes alone; --layout '...=per_rank' if they are none"
            )
            self._note(
                "inferred", first, tuple(piece.rank for piece in pieces), text, wanted.module_path, wanted.site, name
            )
        return found

    def _differing(
        self, described: Described, number: int, places: list[int], plan: Plan, positions: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the pieces that differ from the one they should be a copy of, and of those."""
        if described.equal_of(number):
            return (), ()
        found, originals = [], []
        for first, *others in plan.copies:
            for other in others:
                at = [places[first], places[other]]
                fingerprints, statistics = described.fingerprints[at], described.statistics[at]
                if (fingerprints != NONE).all():
                    is_same: bool | None = bool(fingerprints[0] == fingerprints[1])
                elif (statistics != NONE).all() and statistics[0] != statistics[1]:
                    is_same = False  # equal ones would prove nothing: the values may stand in another order
                else:
                    is_same = self._is_same((positions[first], positions[other]))
                if is_same is False:
                    found.append(other)
                    originals.append(first)
        return tuple(found), tuple(dict.fromkeys(originals))

    def _override(self, path: str, site: str, name: str) -> Override | None:
        found = None
        for patterns, wanted in self._overrides:
            if matches(patterns, f"{path}:{site}:{name}"):
                found = Override(wanted, f"{','.join(patterns)}={wanted}")
        return found

    def _batches(
        self, first: int, positions: tuple[int, ...], parts: Parts, labels: tuple[str, str, bool],
        forward: Value | None,
    ) -> tuple[Batch, ...]:  # fmt: skip
        """What the root's input says of the batch, likeliest first."""
        root, mode, is_later = labels
        if forward is not None:
            return (_of_ranks(forward, parts.ranks),)
        step = self._step_of(first)
        seqs = None
        if not is_later:
            at = positions if len(parts.pieces) == len(positions) else [positions[i] for i in parts.pieces]
            seqs = self._rows.numbers("seq")[list(at)].tolist()
        if not parts.has_slices:
            when = root, mode, step, int(self._rows.numbers("micro_step")[first])
            return self._roots.of(when, parts.ranks, seqs, parts.expected)
        found = [
            self._roots.of((root, mode, step, micro_step), (rank,), seqs and seqs[i : i + 1], (rank,))[0]
            for i, (rank, micro_step) in enumerate(zip(parts.ranks, parts.micro_steps, strict=True))
        ]
        sizes = [batch.sizes[0] for batch in found if batch.sizes]
        return (found[0]._replace(sizes=tuple(sizes), total=None),) if len(sizes) == len(found) else NO_BATCH

    def _in_pipeline(
        self,
        plan: Plan | Apart,
        pieces: list[Piece],
        names: tuple[str, ...],
        first: int,
        stage: Stage,
        *,
        is_slice: bool,
    ) -> Plan | Apart:
        """What being of a stage makes of a plan: values between stages are no model's, and no micro-batch may lack."""
        root, path, site, _, mode, phase = names
        if stage.is_between(path, site):
            return Apart(HANDED_ON, f"stage {stage.number} of {stage.num_stages} hands it on or is handed it")
        is_state = site in STATE_SITES and phase != "backward"
        if is_state or isinstance(plan, Apart):
            return plan
        ranks, micro_steps = [piece.rank for piece in pieces], [piece.micro_step for piece in pieces]
        known = self._roots.slices((root, mode, self._step_of(first)), set(ranks))
        if not is_slice and (lacking := unseen(ranks, micro_steps, known)):
            return Apart("partial", lacking)
        num = len(set(micro_steps))
        return plan._replace(note=(*plan.note, ("micro_batches", num))) if num > 1 else plan

    def _missing(self, first: int, missing: tuple[int, ...], expected: tuple[int, ...], names: tuple[str, ...]) -> None:
        """Say which ranks lack a row, and whether they ever ran what it is of."""
        root, path, site, name, mode, _ = names
        step, micro_step = (int(self._rows.numbers(column)[first]) for column in ("step", "micro_step"))
        ran_elsewhere = site in STATE_SITES or any(self._roots.ran((root, mode, step, micro_step), r) for r in missing)
        lived_on = all(self._facts.last_step(rank) >= step for rank in missing)
        if mode != "train" and lived_on and not ran_elsewhere:
            text = f"rank {listed(missing)} of {listed(expected)} did not run this (mode {mode})"
            self._note("alone", first, missing, text, path, site, name)
        else:
            text = f"no row of rank {listed(missing)} of {listed(expected)}"
            self._note("partial", first, missing, text, path, site, name)

    def _note(
        self,
        kind: str,
        position: int | None,
        ranks: tuple[int, ...],
        text: str,
        path: str = "",
        site: str = "",
        name: str = "",
    ) -> None:
        """Remember a finding; the same of many values, or of one value at many steps, once."""
        key = (kind, ranks, text) if kind == "partial" else (kind, ranks, text, path, site, name)
        at = self._found.get(key)
        if at is not None:
            self.findings[at] = self.findings[at]._replace(num_rows=self.findings[at].num_rows + 1)
            return
        self._found[key] = len(self.findings)
        step = int(self._rows.numbers("step")[position]) if position is not None else NONE
        self.findings.append(Finding(kind, step, path, site, name, ranks, text))


def parse_overrides(layouts: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """``PATTERN=LAYOUT`` as patterns over ``module_path:site:name`` and layout; without a colon all of a module's.

    Raises:
        ValueError: one of them is not of this form.
    """
    found = []
    for layout in layouts:
        pattern, equals, wanted = layout.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"layout {layout!r}: expected PATTERN=LAYOUT, such as 'layers.*:output:=shard(1)'")
        parse_override(wanted)
        found.append((tuple(one if ":" in one else f"{one}:*" for one in parse_patterns(pattern)), wanted))
    return found


def _unless_added_up(plan: Plan, pieces: Sequence[Piece], evidence: Evidence) -> Plan | Apart:
    """The plan, or why ranks that should have summands of an activation stay apart: they have the same.

    What a program adds up in place through ``.data`` leaves no trace in the tensor that was a summand.
    """
    if reduce_op(pieces[0].placements) != "sum":
        return plan
    sums = [evidence.among([term.piece for term in part.terms]) for part in plan.parts if len(part.terms) > 1]
    if not sums or any(values.kinship() is not Kinship.COPIES for values in sums):
        return plan
    return next(filter(None, map(copies_unless, sums)), Apart("per_rank", _ADDED_UP))


def _numbers_of(pieces: Sequence[Piece], some: Pieces | None) -> list[int]:
    """The numbers of some pieces (all by default) by what names them; none where one is missing."""
    if some is None:
        return list(range(len(pieces)))
    at = {(piece.rank, piece.micro_step): i for i, piece in enumerate(pieces)}
    return [at[key] for key in some] if all(key in at for key in some) else []


def _share_a_batch(blocks: tuple[Block, ...] | Apart | None, numbers: Sequence[int]) -> bool:
    """Whether pieces are of ranks that were given one part of the batch; without blocks, all ranks of a mesh are."""
    if blocks is None or isinstance(blocks, Apart):
        return blocks is None
    return any(set(numbers) <= {i for unit in block.units for i in unit} for block in blocks)


def _of_ranks(forward: Value, ranks: tuple[int, ...]) -> Batch:
    """The batch of a value, for those of its ranks whose gradient was recorded."""
    batch = forward.batch
    if batch.sizes is None or ranks == forward.leads:
        return batch
    if len(set(forward.leads)) != len(batch.sizes):
        return batch._replace(sizes=None)  # a rank had two rows of it
    sizes = dict(zip(forward.leads, batch.sizes, strict=True))
    return batch._replace(sizes=tuple(sizes[rank] for rank in ranks) if set(ranks) <= set(sizes) else None)


def listed(ranks: Sequence[int]) -> str:
    """Ranks for people."""
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:6]))}, ... ({len(ranks)})"
    return ", ".join(map(str, ranks))
