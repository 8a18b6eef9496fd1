"""The plan of one value: how its ranks' chunks make one tensor, or why they make none; rule by rule, in one order.

Payloads are compared only where the rows say nothing that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ..columns import HANDED_ON
from ..format.roots import Stage
from ..layout.placement import NoPlan, Plan, RankChunk, named, reduce_op
from ..layout.rules import Batch, Replication, copies_unless
from ..read.manifests import unseen
from ..read.metadata import NONE
from ..sites import NUMBERS, STATES
from ..system.text import listed
from .decisions import LOCAL_GRADIENT, Override, Overrides, Question, decide, find_override
from .leaves import Comparison, LeafAcrossSteps, UnrecordedValue, keys_of
from .own_parameters import BEGAN_ALIKE, NOT_OF_BATCH, NOT_SHARED
from .row_groups import FORWARD_OF, FindingLog, GroupedRows
from .sharding import NO_BATCH, Wanted
from .value_rows import ValueReader, ValueRows

_ADDED_UP = (
    "its rows say that they are summands, and they are equal to the last bit, as if they had been added up in place: "
    "--layout '...=replicate' if so, '...=partial(sum)' if not"
)
_ASSUMED = " (assumed to be replicas: neither DDP nor FSDP was seen; --layout '...=per_rank' if they are not)"


class GlobalValue(NamedTuple):
    """Rows of several ranks that are one value, in data-parallel order."""

    positions: tuple[int, ...]
    """Positions of the rows of each rank's part 0."""
    plan: Plan | NoPlan
    present: tuple[int, ...]
    expected: tuple[int, ...]
    differing: tuple[int, ...] = ()
    """Ranks whose replica differs from the first one's."""
    batch: Batch = Batch(None)
    """That decided of an activation."""
    leads: tuple[int, ...] = ()
    """The ranks whose batches `batch` is of; one of each part of the batch."""
    stage: Stage | None = None
    """The stage of a pipeline that ran the module."""

    @property
    def is_refused(self) -> bool:
        return isinstance(self.plan, NoPlan)

    @property
    def is_between_stages(self) -> bool:
        """Whether it goes from one stage of a pipeline to another."""
        return isinstance(self.plan, NoPlan) and self.plan.kind == HANDED_ON


class _Differing(NamedTuple):
    """Copies that differ from what they should be copies of."""

    copies: tuple[int, ...] = ()
    """Numbers of the chunks that differ."""
    originals: tuple[int, ...] = ()
    """Numbers of the chunks that they were compared with."""


class Planner:
    """Plans values one by one, and remembers what it decided of others like them."""

    def __init__(self, reader: ValueReader, overrides: Overrides, loss: str, findings: FindingLog) -> None:
        """Nothing happens before the first value.

        Args:
            reader: of the rows.
            overrides: what the user says of layouts.
            loss: see `layout.rules.decide_gradient`.
            findings: takes what the reader of the plans should know.
        """
        self._reader = reader
        self._overrides = overrides
        self._loss = loss
        self._findings = findings
        self._decided: dict[Any, tuple[Plan | NoPlan, Batch, Plan | NoPlan | None]] = {}
        """Decisions by all that they hang on; with the plan whose identity is a part of the key, so that it lives."""

    def plan(
        self,
        grouped: GroupedRows,
        number: int,
        forward: GlobalValue | None,
        *,
        is_gradient: bool,
        is_micro_batch: bool,
    ) -> GlobalValue:
        """One value. After the layout is decided, each rule may still keep the chunks with their ranks.

        Args:
            grouped: rows grouped by value.
            number: of the value.
            forward: the value that this is the gradient of, where that was recorded.
            is_gradient: whether this is the gradient of an activation.
            is_micro_batch: only one micro-batch of a pipeline is asked for, so that others do not lack.
        """
        value = self._reader.read(grouped, number)
        override = find_override(self._overrides, value.key.module_path, value.key.site, value.key.name)
        comparison = self._reader.compare(grouped, number, value)
        plan, batch = self._decide(value, comparison, override, forward, is_gradient=is_gradient)
        if override is None and value.key.site not in STATES:
            plan = _refuse_equal_summands(plan, value.chunks, comparison)
        if value.stage is not None:
            plan = self._fit_into_pipeline(plan, value, value.stage, is_micro_batch=is_micro_batch)
        differing = self._find_differing_copies(plan, value, grouped, number)
        is_own = self._is_of_own_parameters(value)
        if is_own and override is None:
            plan, differing = _leave_with_ranks(plan, value, differing)
        present = dict.fromkeys(value.ranks)
        missing = tuple(rank for rank in value.expected if rank not in present)
        if missing and not is_own:
            self._report_missing_ranks(value, missing)
        if differing.copies:
            plan = self._report_differing_copies(plan, value, override, differing)
        elif isinstance(plan, NoPlan):
            self._add_finding(plan.kind, value, tuple(present), plan.why)
        return GlobalValue(
            positions=value.positions,
            plan=plan,
            present=tuple(present),
            expected=value.expected,
            differing=tuple(value.ranks[i] for i in differing.copies),
            batch=batch,
            leads=value.local_batches.ranks,
            stage=value.stage,
        )

    def _decide(
        self,
        value: ValueRows,
        comparison: Comparison,
        override: Override | None,
        forward: GlobalValue | None,
        *,
        is_gradient: bool,
    ) -> tuple[Plan | NoPlan, Batch]:
        """The layout by the rules of `decisions`, and the batch that the value was taken to be of."""
        is_state = value.key.site in STATES
        kind = LOCAL_GRADIENT if value.key.site == "grad" and value.key.phase == "backward" else value.key.site
        batches = NO_BATCH if is_state else self._batches(value, forward, is_gradient=is_gradient)
        forward_plan = forward.plan if forward is not None else None
        of_rows = comparison.known, comparison.pattern() if value.batch_groups is not None else ()
        key = (
            value.codes, id(value.group), value.expected, kind, of_rows, override, batches, id(forward_plan),
            is_gradient, () if is_state else value.leaf,
        )  # fmt: skip
        if key in self._decided:
            return self._decided[key][:2]
        question = Question(
            chunks=value.chunks,
            site=kind,
            group=value.group,
            num_expected=value.local_batches.num_expected,
            comparison=comparison,
            override=override,
            batches=batches,
            forward=forward_plan,
            unrecorded=self._unrecorded_value(value) if is_gradient and forward is None else None,
            is_gradient=is_gradient,
            loss=self._loss,
            infer=partial(self._infer_sharding, value, comparison),
        )
        plan, batch = decide(question, value.batch_groups)
        if not comparison.has_read:
            self._decided[key] = plan, batch, forward_plan
        return plan, batch

    def _batches(self, value: ValueRows, forward: GlobalValue | None, *, is_gradient: bool) -> tuple[Batch, ...]:
        if forward is not None:
            return (_batch_of_ranks(forward, value.local_batches.ranks),)
        return self._reader.batches(value, is_later=is_gradient or value.key.phase == "recompute")

    def _unrecorded_value(self, value: ValueRows) -> UnrecordedValue | None:
        """What other steps say of the value that this is the gradient of, which was not recorded at this one."""
        site = FORWARD_OF.get(value.key.site)
        if site is None:
            return None
        forward_leaf = value.leaf._replace(site=site, phase="forward")
        return UnrecordedValue(LeafAcrossSteps(self._reader.leaves, forward_leaf, value.chunks))

    def _infer_sharding(self, value: ValueRows, comparison: Comparison, chunks: Sequence[RankChunk]) -> int | NoPlan:
        """Along which dim plain chunks of ranks that share a batch are cut."""
        comparison.has_read = True  # other rows, and of that step: no answer for another
        dims = self._reader.leaves.cut_dims(value.leaf, keys_of(chunks, range(len(chunks))))
        wanted = Wanted(value.key.root, value.key.module_path, value.key.site, value.step)
        dim = self._reader.sharding.infer(wanted, chunks, dims)
        if not isinstance(dim, NoPlan):
            text = f"taken for pieces along dim {dim}, by their shapes alone; --layout '...=per_rank' if they are none"
            self._add_finding("inferred", value, tuple(chunk.rank for chunk in chunks), text)
        return dim

    def _fit_into_pipeline(
        self, plan: Plan | NoPlan, value: ValueRows, stage: Stage, *, is_micro_batch: bool
    ) -> Plan | NoPlan:
        """What being of a stage makes of a plan: values between stages are no model's, and no micro-batch may lack."""
        key = value.key
        if stage.is_between(key.module_path, key.site):
            return NoPlan(HANDED_ON, f"stage {stage.number} of {stage.num_stages} hands it on or is handed it")
        is_state = key.site in STATES and key.phase != "backward"
        if is_state or isinstance(plan, NoPlan):
            return plan
        micro_steps = [chunk.micro_step for chunk in value.chunks]
        known = self._reader.root_batches.micro_batches((key.root, key.mode, value.step), set(value.ranks))
        if not is_micro_batch and (lacking := unseen(value.ranks, micro_steps, known)):
            return NoPlan("partial", lacking)
        num_micro_batches = len(set(micro_steps))
        if num_micro_batches == 1:
            return plan
        return plan._replace(note=(*plan.note, ("micro_batches", num_micro_batches)))

    def _find_differing_copies(
        self, plan: Plan | NoPlan, value: ValueRows, grouped: GroupedRows, number: int
    ) -> _Differing:
        """Copies that are none; what was inferred to be copies from equal values needs no second look."""
        if isinstance(plan, NoPlan) or (plan.source == "inferred" and value.key.site not in STATES):
            return _Differing()
        if not plan.copies or grouped.equal_of(number):
            return _Differing()
        pairs = [
            (original, copy)
            for original, *copies in plan.copies
            for copy in copies
            if self._is_same(grouped, value, original, copy) is False
        ]
        return _Differing(tuple(copy for _, copy in pairs), tuple(dict.fromkeys(original for original, _ in pairs)))

    def _is_same(self, grouped: GroupedRows, value: ValueRows, one: int, other: int) -> bool | None:
        """Whether two chunks hold the same values; None where nothing tells."""
        rows = [value.indices[one], value.indices[other]]
        fingerprints, statistics = grouped.fingerprints[rows], grouped.statistics[rows]
        if (fingerprints != NONE).all():
            return bool(fingerprints[0] == fingerprints[1])
        if (statistics != NONE).all() and statistics[0] != statistics[1]:
            return False  # equal ones would prove nothing: the values may stand in another order
        return self._reader.is_same((value.positions[one], value.positions[other]))

    def _is_of_own_parameters(self, value: ValueRows) -> bool:
        """Whether plain chunks are of a parameter that each rank has for itself, or of what it makes with such."""
        root, module_path, site, name, _, _ = value.key
        if value.chunks[0].global_shape is not None or len(value.expected) < 2 or site in NUMBERS:
            return False
        own = self._reader.topology.own_parameters
        return own.has(root, module_path, name) if site in STATES else own.works_apart(root, module_path)

    def _report_missing_ranks(self, value: ValueRows, missing: tuple[int, ...]) -> None:
        """Say which ranks lack a row, and whether they ever ran what it is of."""
        root, _, site, _, mode, _ = value.key
        when = root, mode, value.step, int(self._reader.rows.numbers("micro_step")[value.first])
        ran_elsewhere = site in STATES or any(self._reader.root_batches.ran(when, rank) for rank in missing)
        lived_on = all(self._reader.topology.last_step(rank) >= value.step for rank in missing)
        if mode != "train" and lived_on and not ran_elsewhere:
            text = f"rank {listed(missing)} of {listed(value.expected)} did not run this (mode {mode})"
            self._add_finding("alone", value, missing, text)
        else:
            text = f"no row of rank {listed(missing)} of {listed(value.expected)}"
            self._add_finding("partial", value, missing, text)

    def _report_differing_copies(
        self, plan: Plan | NoPlan, value: ValueRows, override: Override | None, differing: _Differing
    ) -> Plan | NoPlan:
        """Say which copies differ. Their chunks stay with their ranks, but for buffers, which may differ."""
        copies, originals = (tuple(value.ranks[i] for i in numbers) for numbers in differing)
        text = f"rank {listed(copies)} differs from rank {listed(originals)}"
        if value.group.source == "assumed" and not value.group.model_groups:
            text += _ASSUMED
        root, module_path, site, name, _, _ = value.key
        if site in STATES and self._reader.topology.own_parameters.began_alike(root, module_path, name):
            text += BEGAN_ALIKE
        kind = "buffers_differ" if site == "buffer" else "replicas_differ"
        if override is not None and override.wanted == "replicate":
            kind = "inconsistent"
            text = f"--layout '{override.rule}' does not fit: {text}: {named(value.chunks, 'shape')}"
        self._add_finding(kind, value, (*originals, *copies), text)
        return plan if kind == "buffers_differ" else NoPlan(kind, text)

    def _add_finding(self, kind: str, value: ValueRows, ranks: tuple[int, ...], text: str) -> None:
        key = value.key
        self._findings.add(kind, value.first, ranks, text, key.module_path, key.site, key.name)


def _leave_with_ranks(plan: Plan | NoPlan, value: ValueRows, differing: _Differing) -> tuple[Plan | NoPlan, _Differing]:
    """What becomes of the chunks of parameters that each rank has for itself, and of what is made with these.

    A parameter of which all ranks have the same values may be shown as one all the same.
    """
    is_state = value.key.site in STATES
    if is_state and not differing.copies and isinstance(plan, Plan):
        return plan, differing
    return NoPlan("per_rank", NOT_SHARED if is_state else NOT_OF_BATCH), _Differing()


def _refuse_equal_summands(plan: Plan | NoPlan, chunks: Sequence[RankChunk], comparison: Comparison) -> Plan | NoPlan:
    """The plan, or why ranks that should have summands of an activation stay apart: they have the same.

    What a program adds up in place through ``.data`` leaves no trace in the tensor that was a summand.
    """
    if isinstance(plan, NoPlan) or reduce_op(chunks[0].placements) != "sum":
        return plan
    sums = [comparison.among([term.chunk for term in fill.terms]) for fill in plan.fills if len(fill.terms) > 1]
    if not sums or any(values.replication() is not Replication.REPLICATED for values in sums):
        return plan
    return next(filter(None, map(copies_unless, sums)), NoPlan("per_rank", _ADDED_UP))


def _batch_of_ranks(forward: GlobalValue, ranks: tuple[int, ...]) -> Batch:
    """The batch of a value, for those of its ranks whose gradient was recorded."""
    batch = forward.batch
    if batch.sizes is None or ranks == forward.leads:
        return batch
    if len(set(forward.leads)) != len(batch.sizes):
        return batch._replace(sizes=None)  # a rank had two rows of it
    sizes = dict(zip(forward.leads, batch.sizes, strict=True))
    return batch._replace(sizes=tuple(sizes[rank] for rank in ranks) if set(ranks) <= set(sizes) else None)
