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
from ..layout.rules import Batch, parse_override
from ..patterns import matches, parse_patterns
from .batches import NO_BATCH, RootBatches, text_of
from .cuts import Cuts, Wanted
from .deciding import ALONE, LOCAL_GRADIENT, STATE_SITES, Override, Question, decide
from .decode import parse_shape
from .evidence import NULL, POSITIVE, Described, Evidence, Ints, bits_of, digest, pack
from .experts import BEGAN_ALIKE, NOT_OF_BATCH, NOT_SHARED
from .facts import RunFacts
from .grid import Group
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

_NO_BITS = "0" * 16
"""The fingerprint of zeros."""
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
    ``stranger``, or ``alone``: the other ranks never ran it."""
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
        is_repeated: Callable[[int, int], bool | None],
    ) -> None:
        """Load what is needed.

        Args:
            rows: of a run or of a window of steps of it.
            facts: of the run.
            loss: see `layout.rules.decide_gradient`.
            overrides: patterns over ``module_path:site:name`` and layout, the last that fits wins.
            is_same: whether the tensors of some rows hold the same values; None where a payload is missing.
            is_repeated: whether a row's tensor is one slice repeated along a dim; None where its payload is missing.
        """
        rows.load(COLUMNS)
        self.findings: list[Finding] = []
        self._rows = rows
        self._facts = facts
        self._loss = loss
        self._overrides = overrides
        self._is_same = is_same
        self._is_repeated = is_repeated
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
        self._roots = RootBatches(rows, self.counts)
        self._cuts = Cuts(rows, self.counts, facts.is_linear)

    def values(self, positions: Positions | None = None, *, is_slice: bool = False) -> Iterator[Value]:
        """The values of some rows (all by default), in the order of execution; rows that do not count are skipped.

        With `is_slice` they are of one micro-batch of a pipeline, and others do not lack.
        """
        rows = self._rows
        chosen = np.flatnonzero(self.counts) if positions is None else positions[self.counts[positions]]
        chosen = chosen[rows.numbers("part")[chosen] == 0]
        if not len(chosen):
            return
        slices = Slices(rows, chosen, self._facts.stages)
        groups, twins = self._group_numbers(chosen, slices)
        ranks = rows.numbers("rank")[chosen]
        order = np.lexsort([slices.micro_step, ranks, groups])
        chosen, groups, twins = chosen[order], groups[order], twins[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        described = self._describe(chosen, starts, slices.micro_step[order])
        sequence = in_order(rows, chosen[starts], slices.stage[order][starts])
        is_gradient = twins[starts] >= 0
        of_group: dict[int, Value] = {}
        place_of = {int(groups[start]): number for number, start in enumerate(starts)}

        def value_of(number: int) -> Value:
            found = of_group.get(number)
            if found is None:
                forward: Value | None = None
                if is_gradient[number] and (twin := place_of.get(int(twins[starts[number]]))) is not None:
                    forward = value_of(twin)
                found = of_group[number] = self._value(
                    described, number, forward, is_gradient=bool(is_gradient[number]), is_slice=is_slice
                )
            return found

        for number in sequence.tolist():
            yield value_of(number)

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
        constant = (low == high) & (low != NULL) & (nans == 0) & (infs == 0) & (low == low[firsts])
        return Described(
            chosen=chosen,
            starts=starts,
            ends=ends,
            codes=codes,
            pieces=self._pieces,
            equal=np.where(has_fingerprint, same_fingerprint, np.where(has_statistics & ~same_statistics, False, NONE)),
            has_same_statistics=has_statistics & same_statistics,
            constant=np.logical_and.reduceat(constant, starts),
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

    def _value(
        self, described: Described, number: int, forward: Value | None, *, is_gradient: bool, is_slice: bool
    ) -> Value:
        start, end = int(described.starts[number]), int(described.ends[number])
        first = int(described.chosen[start])
        names = tuple(text_of(described.labels[label], number) for label in _LABELS)
        root, path, site, name, mode, phase = names
        writer = int(described.writers[number])
        group = self._facts.group(root, path, writer)
        places = list(range(start, end))
        if len(places) > 1 and not group.is_sorted:
            order = {rank: i for i, rank in enumerate(group.ranks)}
            places.sort(key=lambda at: order.get(described.pieces[described.codes[at]].rank, len(order)))
        codes = tuple(described.codes[places].tolist())
        pieces = [described.pieces[code] for code in codes]
        rows_at = tuple(described.chosen[places].tolist())
        ranks = tuple(piece.rank for piece in pieces)
        expected = group.ranks if set(ranks) <= set(group.ranks) else tuple(dict.fromkeys((*group.ranks, *ranks)))
        if site == "scalar":  # the program decides who reports a number
            reports = self._reporting.get((root, name), set())
            step = self._step_of(first)
            expected = tuple(rank for rank in expected if rank in reports or self._facts.last_step(rank) < step)
        elif site == "optim" and group.source == "fsdp" and all(piece.shape == () for piece in pieces):
            expected = ranks  # FSDP1 keeps no step where a rank holds nothing of a parameter
        blocks, parts = self._parts(codes, pieces, group, expected)
        batches: tuple[Batch, ...] = NO_BATCH
        if site not in STATE_SITES:
            labels = root, mode, is_gradient or phase == "recompute"
            batches = self._batches(first, rows_at, parts, labels, forward)
        override = self._override(path, site, name)
        is_float = pieces[0].dtype.startswith(("float", "bfloat"))
        evidence = Evidence(described, number, places, self._is_same, self._is_repeated, is_float=is_float)
        known_of_values = evidence.without_payloads(), evidence.pattern() if blocks is not None else ()
        forward_plan = forward.plan if forward is not None else None
        kind = LOCAL_GRADIENT if site == "grad" and phase == "backward" else site
        key = codes, id(group), expected, kind, known_of_values, override, batches, id(forward_plan), is_gradient
        known = self._decided.get(key)
        if known is None:
            question = Question(
                pieces, kind, group, parts.num_expected, evidence, override, batches, forward_plan, is_gradient,
                self._loss, partial(self._infer, evidence, Wanted(root, path, site, self._step_of(first)), first, name),
            )  # fmt: skip
            known = *decide(question, blocks), forward_plan
            if not evidence.has_read:
                self._decided[key] = known
        plan, batch, _ = known
        if override is None and self._looks_added_up(plan, pieces, site, rows_at):
            plan = Apart("per_rank", _ADDED_UP)
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

    def _infer(self, evidence: Evidence, wanted: Wanted, first: int, name: str, pieces: Sequence[Piece]) -> int | Apart:
        evidence.has_read = True  # other rows, and of that step: no answer for another
        found = self._cuts.infer(wanted, pieces)
        if not isinstance(found, Apart):
            text = (
                f"taken for pieces along dim {found}, by their shapes alone; --layout '...=per_rank' if they are none"
            )
            self._note(
                "inferred", first, tuple(piece.rank for piece in pieces), text, wanted.module_path, wanted.site, name
            )
        return found

    def _looks_added_up(self, plan: Plan | Apart, pieces: list[Piece], site: str, positions: tuple[int, ...]) -> bool:
        """Whether ranks that should have summands of an activation have the same, other than zeros.

        What a program adds up in place through ``.data`` leaves no trace in the tensor that was a summand.
        """
        if isinstance(plan, Apart) or site in STATE_SITES or reduce_op(pieces[0].placements) != "sum":
            return False
        sums = [part.terms for part in plan.parts if len(part.terms) > 1]
        texts = [{self._rows.text("fingerprint", positions[term.piece]) for term in terms} for terms in sums]
        return bool(texts) and all(len(some) == 1 and not some & {None, _NO_BITS} for some in texts)

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
