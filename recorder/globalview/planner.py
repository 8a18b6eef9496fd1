"""The plan of one value: how the ranks' chunks form one tensor, or why they do not.

`Planner` reads rows and applies all rules in a fixed order. `decide` reads no rows: it picks a rule of `layout` from
chunks, groups of ranks and comparisons. Payloads are compared only if rows do not show whether chunks are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ..columns import HANDED_ON, NOT_OF_BATCH
from ..errors import LookupFailedError
from ..format.manifest import Stage
from ..layout.levels import BatchGroup, Infer, WholeTensors, compose, renumbered, within
from ..layout.placement import RANK_BOUND, TURNED, NoPlan, Plan, RankChunk, named, reduce_op
from ..layout.rules import (
    Batch,
    ChunkValues,
    Replication,
    copies_unless,
    decide_activation,
    decide_gradient,
    decide_local_gradient,
    decide_override,
    decide_scalar,
    decide_state,
    mixed,
    parse_override,
)
from ..read.metadata import unseen
from ..read.run import RecordedRun
from ..rules import hint, matches, parse_patterns
from ..sites import CALL, NUMBERS, RATE, SITES, STATES
from ..system.text import listed
from .leaves import Comparison, LeafAcrossSteps, keys_of
from .row_groups import FORWARD_OF, FindingLog, GroupedRows
from .run_topology import BEGAN_ALIKE, NOT_SHARED
from .value_rows import NO_BATCH, ValueReader, ValueRows

_logger = logging.getLogger("recorder")
_ADDED_UP = (
    "its rows say that they are summands, but they are equal to the last bit, as after a sum in place: --layout "
    "'...=replicate' if they were added up, '...=partial(sum)' if not"
)
_OTHER_INPUTS = (
    "ranks {ranks} have parameters over one mesh, and were given different inputs: the mesh may be that of experts, "
    "whose ranks have batches of their own, and neither DDP nor FSDP was seen, which would tell; "
    "--layout '...=shard(DIM)' or '...=per_rank' can"
)
_TURNED = "it turned NaN or infinite here; other ranks or micro-batches have no row of it at this step"
_ASSUMED = " (assumed to be replicas: neither DDP nor FSDP was seen; --layout '...=per_rank' if they are not)"


class GlobalValue(NamedTuple):
    """One value of the complete model: the rows of the ranks that hold it, in data-parallel order, and its plan."""

    positions: tuple[int, ...]
    """For each rank, the position of the first row of its chunk (the row of part 0)."""
    plan: Plan | NoPlan
    present: tuple[int, ...]
    expected: tuple[int, ...]
    differing: tuple[int, ...] = ()
    """The ranks whose replica differs from the first replica of the same chunk."""
    batch: Batch = Batch(None)
    """The batch sizes from which the layout of an activation was decided."""
    leads: tuple[int, ...] = ()
    """One rank for each part of the batch, in data-parallel order."""
    stage: Stage | None = None

    @property
    def is_between_stages(self) -> bool:
        return isinstance(self.plan, NoPlan) and self.plan.kind == HANDED_ON


class _Differing(NamedTuple):
    """Replicas that differ, and the replicas that they were compared with, as indexes of chunks."""

    copies: tuple[int, ...] = ()
    originals: tuple[int, ...] = ()


class Planner:
    """Plans values one by one, and reuses its decisions for similar values."""

    def __init__(self, reader: ValueReader, overrides: Overrides, loss: str, findings: FindingLog) -> None:
        self._reader = reader
        self._overrides = overrides
        self._loss = loss
        self._findings = findings
        self._decided: dict[Any, tuple[Plan | NoPlan, Batch, Plan | NoPlan | None]] = {}
        """Decisions, keyed by all facts that they depend on. Keeps the forward plan, whose `id` is in the key."""

    def plan(
        self, grouped: GroupedRows, number: int, forward: GlobalValue | None, *, is_gradient: bool, is_micro_batch: bool
    ) -> GlobalValue:
        """Return the value at index `number` of the grouped rows, with its plan.

        Even after a layout was decided, later rules may refuse to join the chunks. `forward` is the activation that a
        gradient belongs to, or None if it was not recorded. With `is_micro_batch` only one micro-batch of a pipeline is
        wanted, so other micro-batches do not count as missing.
        """
        value = self._reader.read(grouped, number)
        override = find_override(self._overrides, value.leaf.module_path, value.leaf.site, value.leaf.name)
        comparison = self._reader.compare(grouped, number, value)
        plan, batch = self._decide(value, comparison, override, forward, is_gradient=is_gradient)
        is_state = value.leaf.site in STATES
        if override is None and not is_state:
            plan = _refuse_equal_summands(plan, value.chunks, comparison)
        if value.stage is not None:
            plan = self._fit_into_pipeline(plan, value, value.stage, is_micro_batch=is_micro_batch)
        differing = _find_differing_copies(plan, value.leaf.site, comparison)
        is_own = self._is_of_own_parameters(value)
        is_shared = is_state and not differing.copies and isinstance(plan, Plan)
        if is_own and override is None and not is_shared:  # parameters of one rank each, or made from such parameters
            plan, differing = NoPlan("per_rank", NOT_SHARED if is_state else NOT_OF_BATCH), _Differing()
        present = dict.fromkeys(value.ranks)
        missing = tuple(rank for rank in value.expected if rank not in present)
        if value.chunks[0].rank_bound == TURNED and (missing or isinstance(plan, NoPlan)):
            plan, differing = NoPlan("per_rank", _TURNED), _Differing()
        elif missing and not is_own:
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
        is_state = value.leaf.site in STATES
        kind = LOCAL_GRADIENT if value.leaf.site == "grad" and value.leaf.phase == "backward" else value.leaf.site
        if is_state:
            batches = NO_BATCH
        elif forward is not None:
            batches = (_batch_of_ranks(forward, value.local_batches.ranks),)
        else:
            batches = self._reader.batches(value, is_later=is_gradient or value.leaf.phase == "recompute")
        forward_plan = forward.plan if forward is not None else None
        of_rows = comparison.known, comparison.pattern() if value.batch_groups is not None else ()
        key = (
            value.codes, id(value.group), value.expected, kind, of_rows, override, batches, id(forward_plan),
            is_gradient, () if is_state else value.leaf,
        )  # fmt: skip
        if key in self._decided:
            return self._decided[key][:2]
        unrecorded = None
        if is_gradient and forward is None and (site := FORWARD_OF.get(value.leaf.site)) is not None:
            leaf = value.leaf._replace(site=site, phase="forward")
            unrecorded = LeafAcrossSteps(self._reader.leaves, leaf, value.chunks)
        infer = partial(self._infer_sharding, value, comparison)
        asked = value, kind, comparison, override, batches, forward_plan, unrecorded, is_gradient, self._loss, infer
        plan, batch = decide(Question(*asked))
        if not comparison.judged_by:
            self._decided[key] = plan, batch, forward_plan
        return plan, batch

    def _infer_sharding(self, value: ValueRows, comparison: Comparison, chunks: Sequence[RankChunk]) -> int | NoPlan:
        # The rows of this step are compared, so the decision is valid only for this step.
        comparison.judged_by.add("other rows")
        dims = self._reader.leaves.cut_dims(value.leaf, keys_of(chunks, range(len(chunks))))
        dim = self._reader.sharding.infer(value.leaf, value.step, chunks, dims)
        if not isinstance(dim, NoPlan):
            text = f"taken for pieces along dim {dim}, by their shapes alone; --layout '...=per_rank' if that is wrong"
            self._add_finding("inferred", value, tuple(chunk.rank for chunk in chunks), text)
        elif value.group.source == "assumed" and self._reader.leaves.inputs_vary(value.leaf.root, value.leaf.mode):
            ranks = listed(sorted({chunk.rank for chunk in chunks}))
            return NoPlan("per_rank", _OTHER_INPUTS.format(ranks=ranks))
        return dim

    def _fit_into_pipeline(
        self, plan: Plan | NoPlan, value: ValueRows, stage: Stage, *, is_micro_batch: bool
    ) -> Plan | NoPlan:
        leaf = value.leaf
        if self._reader.topology.is_between(stage, leaf.module_path, leaf.site):
            return NoPlan(HANDED_ON, f"stage {stage.number} of {stage.num_stages} sends or receives it")
        is_state = leaf.site in STATES and leaf.phase != "backward"
        if is_state or isinstance(plan, NoPlan):
            return plan
        micro_steps = [chunk.micro_step for chunk in value.chunks]
        known = self._reader.root_batches.micro_batches((leaf.root, leaf.mode, value.step), set(value.ranks))
        if not is_micro_batch and (lacking := unseen(value.ranks, micro_steps, known)):
            return NoPlan("partial", lacking)
        if stage.parts_of_loss != 1 and plan.scale is not None and leaf.phase == "backward":
            if len(known) != stage.parts_of_loss:
                why = f"the program does not divide the loss by its {len(known)} micro-batches; --loss sum can say so"
                return NoPlan("per_rank", why)
            plan = plan.times(len(known))
        num_micro_batches = len(set(micro_steps))
        if num_micro_batches == 1:
            return plan
        return plan._replace(note=(*plan.note, ("micro_batches", num_micro_batches)))

    def _is_of_own_parameters(self, value: ValueRows) -> bool:
        root, module_path, site, name = value.leaf[:4]
        if value.chunks[0].global_shape is not None or site in NUMBERS:
            return False
        own = self._reader.topology.own_parameters
        if site in STATES:
            return len(value.expected) > 1 and own.has(root, module_path, name)
        is_assumed = value.group.source == "assumed" and not value.group.model_groups and not value.group.conflict
        return own.works_apart(root, module_path) or (is_assumed and self._reader.leaves.works_apart(value.leaf))

    def _report_missing_ranks(self, value: ValueRows, missing: tuple[int, ...]) -> None:
        root, site, mode = value.leaf.root, value.leaf.site, value.leaf.mode
        when = root, mode, value.step, int(self._reader.rows.numbers("micro_step")[value.first])
        ran_elsewhere = site in STATES or any(self._reader.root_batches.ran(when, rank) for rank in missing)
        lived_on = all(self._reader.topology.last_steps.get(rank, -1) >= value.step for rank in missing)
        if mode != "train" and lived_on and not ran_elsewhere:
            text = f"rank {listed(missing)} of {listed(value.expected)} did not run this (mode {mode})"
            self._add_finding("alone", value, missing, text)
        else:
            text = f"no row of rank {listed(missing)} of {listed(value.expected)}"
            self._add_finding("partial", value, missing, text)

    def _report_differing_copies(
        self, plan: Plan | NoPlan, value: ValueRows, override: Override | None, differing: _Differing
    ) -> Plan | NoPlan:
        copies, originals = (tuple(value.ranks[i] for i in numbers) for numbers in differing)
        text = f"rank {listed(copies)} differs from rank {listed(originals)}"
        if value.group.source == "assumed" and not value.group.model_groups:
            text += _ASSUMED
        root, module_path, site, name = value.leaf[:4]
        if site in STATES and self._reader.topology.own_parameters.began_alike(root, module_path, name):
            text += BEGAN_ALIKE
        kind = "buffers_differ" if site == "buffer" else "replicas_differ"
        if override is not None and override.wanted == "replicate":
            kind = "inconsistent"
            text = f"--layout '{override.rule}' does not fit: {text}: {named(value.chunks, 'shape')}"
        self._add_finding(kind, value, (*originals, *copies), text)
        return plan if kind == "buffers_differ" else NoPlan(kind, text)

    def _add_finding(self, kind: str, value: ValueRows, ranks: tuple[int, ...], text: str) -> None:
        leaf = value.leaf
        self._findings.add(kind, value.first, ranks, text, leaf.module_path, leaf.site, leaf.name)


def _find_differing_copies(plan: Plan | NoPlan, site: str, comparison: Comparison) -> _Differing:
    are_equal, _ = comparison.known
    if isinstance(plan, NoPlan) or are_equal or (plan.source == "inferred" and site not in STATES):
        return _Differing()
    pairs = [
        (original, copy)
        for original, *copies in plan.copies
        for copy in copies
        if comparison.among((original, copy)).are_unequal()
    ]
    return _Differing(tuple(copy for _, copy in pairs), tuple(dict.fromkeys(original for original, _ in pairs)))


def _refuse_equal_summands(plan: Plan | NoPlan, chunks: Sequence[RankChunk], comparison: Comparison) -> Plan | NoPlan:
    """Return a refusal for partial sums of an activation that are equal on all ranks.

    A tensor that a program has reduced in place through ``.data`` still looks like a partial sum.
    """
    if isinstance(plan, NoPlan) or reduce_op(chunks[0].placements) != "sum":
        return plan
    sums = [comparison.among([term.chunk for term in fill.terms]) for fill in plan.fills if len(fill.terms) > 1]
    if not sums or any(values.replication() is not Replication.REPLICATED for values in sums):
        return plan
    return next(filter(None, map(copies_unless, sums)), NoPlan("per_rank", _ADDED_UP))


def _batch_of_ranks(forward: GlobalValue, ranks: tuple[int, ...]) -> Batch:
    batch = forward.batch
    if batch.sizes is None or ranks == forward.leads:
        return batch
    if len(set(forward.leads)) != len(batch.sizes):
        return batch._replace(sizes=None)  # a rank has two rows of the forward value
    sizes = dict(zip(forward.leads, batch.sizes, strict=True))
    return batch._replace(sizes=tuple(sizes[rank] for rank in ranks) if set(ranks) <= set(sizes) else None)


LOCAL_GRADIENT = "local_grad"
"""The layout rules' name for a `grad` in phase `backward`: a gradient before any reduction over ranks."""
KNOWN_SITES = frozenset((*SITES, LOCAL_GRADIENT))
_OF_A_CALL = "it belongs to the call of one rank, which a replay runs again exactly"
_UNKNOWN_SITE = "this version does not know the site: a later version may have added it"
Decided = tuple[Plan | NoPlan, Batch]


class Override(NamedTuple):
    """The layout that the user has requested for the values that match a pattern."""

    wanted: str
    rule: str


class Question(NamedTuple):
    """All facts on which the plan of a value depends."""

    value: ValueRows
    site: str
    comparison: Comparison
    override: Override | None
    batches: tuple[Batch, ...]
    """The batches that the value may belong to, the most likely first."""
    forward: Plan | NoPlan | None
    unrecorded: LeafAcrossSteps | None
    """For a gradient whose activation was not recorded: what other steps show of the activation's layout."""
    is_gradient: bool
    loss: str
    infer: Infer

    @property
    def num_expected(self) -> int:
        """The number of ranks that should have a chunk. If ranks share a part of the batch, the number of parts."""
        return self.value.local_batches.num_expected


def decide(question: Question) -> Decided:
    """Return the plan of a value, and the batch to which the value is assumed to belong."""
    value, override, batch = question.value, question.override, question.batches[0]
    keys = [(chunk.rank, chunk.micro_step) for chunk in value.chunks]
    if len(set(keys)) < len(keys):
        twice = next(key[0] for i, key in enumerate(keys) if key in keys[:i])
        text = f"rank {twice} has several rows with the same key, so the values cannot be told apart"
        return NoPlan("inconsistent", text), batch
    if override is None and (decided := _without_layout_rule(question)) is not None:
        return decided, batch
    if value.batch_groups is not None and not isinstance(value.batch_groups, NoPlan):
        return _of_two_levels(question, value.batch_groups)
    if override is not None:
        return _overridden(question, override), batch
    return _of_one_level(question, value.chunks, question.unrecorded or question.comparison)


def _without_layout_rule(question: Question) -> Plan | NoPlan | None:
    value, site, chunks = question.value, question.site, question.value.chunks
    if site in NUMBERS and len({p.dtype for p in chunks}) == 1 and not any(p.shape for p in chunks):
        if value.leaf.name.startswith(RATE) and len(chunks) > 1 and not question.comparison.are_equal():
            return NoPlan("per_rank", "the ranks have different learning rates, and their mean is the rate of none")
        return decide_scalar(chunks, question.comparison)
    is_plain = chunks[0].global_shape is None
    if value.group.conflict and len(value.group.ranks) > 1 and (is_plain or value.batch_groups is not None):
        return NoPlan("inconsistent" if value.group.model_groups else "per_rank", value.group.conflict)
    if question.num_expected > 1 or len(chunks) > 1:
        bounds = (chunk.rank_bound for chunk in chunks if chunk.rank_bound in RANK_BOUND and chunk.global_shape is None)
        rank_bound = next(bounds, None)
        if rank_bound is not None and (rank_bound != "inner_of" or site not in STATES):
            return NoPlan("per_rank", RANK_BOUND[rank_bound])
        if site not in KNOWN_SITES and is_plain:
            return NoPlan("per_rank", _OF_A_CALL if site == CALL else _UNKNOWN_SITE)
    return value.batch_groups if isinstance(value.batch_groups, NoPlan) else None


def _overridden(question: Question, override: Override) -> Plan | NoPlan:
    chunks, num_expected = question.value.chunks, question.num_expected
    plan = decide_override(chunks, override.wanted, override.rule)
    if question.is_gradient and isinstance(plan, Plan) and plan.dim is not None:  # no layout says how the loss scales
        batch, loss = question.batches[0], question.loss
        own = tuple(chunk.shape[plan.dim] for chunk in chunks)
        is_assumed = question.value.group.source == "assumed"
        if is_assumed and plan.dim and batch.sizes is not None and batch.sizes != own:
            # The override cuts another dim than the batch, on ranks that are only assumed to be data-parallel. So these
            # ranks share one loss, and their gradients are not scaled.
            return plan
        plan = decide_gradient(chunks, plan, batch=batch, loss=loss, num_expected=num_expected)
        plan = plan._replace(source="override") if isinstance(plan, Plan) else plan
    return plan


def _of_one_level(question: Question, chunks: Sequence[RankChunk], values: ChunkValues) -> Decided:
    num_expected, loss = question.num_expected, question.loss
    if question.site == LOCAL_GRADIENT:
        return decide_local_gradient(chunks, num_expected=num_expected), question.batches[0]
    if question.site in STATES:
        plan = decide_state(chunks, source=question.value.group.source, num_expected=num_expected)
        return plan, question.batches[0]
    for batch in question.batches:
        if question.is_gradient:
            of_value = values if question.unrecorded is not None else None
            plan = decide_gradient(
                chunks, question.forward, batch=batch, loss=loss, num_expected=num_expected, values=of_value
            )
        else:
            plan = decide_activation(chunks, batch=batch, values=values, num_expected=num_expected)
            if "statistics" in question.comparison.judged_by and isinstance(plan, Plan) and plan.source == "inferred":
                plan = plan._replace(note=(*plan.note, ("equal_by", "statistics")))
        if isinstance(plan, Plan):
            break
    return plan, batch


def _of_two_levels(question: Question, batch_groups: tuple[BatchGroup, ...]) -> Decided:
    chunks = question.value.chunks
    if (problem := mixed(chunks)) is not None and question.override is None:
        return problem, question.batches[0]
    wholes: list[Plan] = []
    for batch_group in batch_groups:
        whole = _of_batch_group(question, batch_group)
        if isinstance(whole, NoPlan):
            return whole, question.batches[0]
        wholes.append(whole)
    tensors = [
        RankChunk(batch_group.ranks[0], chunks[batch_group.units[0][0]].dtype, whole.global_shape)
        for batch_group, whole in zip(batch_groups, wholes, strict=True)
    ]
    forward = question.forward
    if isinstance(forward, Plan) and forward.across is not None:
        forward = forward.across
    values = WholeTensors(wholes, (question.unrecorded or question.comparison).among)
    across, batch = _of_one_level(question._replace(forward=forward), tensors, values)
    return (across if isinstance(across, NoPlan) else compose(across, wholes)), batch


def _of_batch_group(question: Question, batch_group: BatchGroup) -> Plan | NoPlan:
    chunks, override = question.value.chunks, question.override
    if override is not None:
        numbers = tuple(i for unit in batch_group.units for i in unit)
        plan = decide_override([chunks[i] for i in numbers], override.wanted, override.rule)
        return plan if isinstance(plan, NoPlan) else renumbered(plan, numbers)
    is_state = question.site in STATES
    return within(chunks, batch_group, is_state=is_state, among=question.comparison.among, infer=question.infer)


Overrides = list[tuple[tuple[str, ...], str]]
"""Layout overrides: patterns over ``module_path:site:name``, each with a layout. The last matching pattern is used."""
_LEAF = ["module_path", "site", "name"]


def check_overrides(layouts: Sequence[str], *runs: RecordedRun) -> None:
    """Raise LookupFailedError for a layout that is not ``PATTERN=LAYOUT``, or whose pattern matches no value.

    If two overrides with different layouts match one value, a warning is logged.
    """
    overrides = parse_overrides(layouts)
    if not overrides:
        return
    leaves = [leaf for run in runs for leaf in run.table(_LEAF).group_by(_LEAF).aggregate([]).to_pylist()]
    there = list(dict.fromkeys(":".join(leaf[name] or "" for name in _LEAF) for leaf in leaves))
    fitting: dict[str, Override] = {}
    replaced: dict[tuple[str, str], list[str]] = {}
    for patterns, wanted in overrides:
        pattern = ",".join(patterns)
        fits = [leaf for leaf in there if matches(patterns, leaf)]
        if not fits:
            near = hint(patterns[0], there)
            raise LookupFailedError(
                f"--layout '{pattern}={wanted}': no value fits {pattern!r}, patterns over module_path:site:name{near}"
            )
        for leaf in fits:
            earlier = fitting.get(leaf)
            if earlier is not None and earlier.wanted != wanted:
                replaced.setdefault((earlier.rule, f"{pattern}={wanted}"), []).append(leaf)
            fitting[leaf] = Override(wanted, f"{pattern}={wanted}")
    for (earlier_rule, rule), leaves_of_both in replaced.items():
        _logger.warning(
            "--layout '%s' and --layout '%s' both fit %d values, such as %s: of several that fit a value, the last one "
            "that was given holds",
            earlier_rule,
            rule,
            len(leaves_of_both),
            leaves_of_both[0],
        )


def parse_overrides(layouts: Sequence[str]) -> Overrides:
    """Parse ``PATTERN=LAYOUT`` texts. A pattern without a colon is for modules.

    Raise LookupFailedError for a wrong text, and for an object that is no text.
    """
    overrides = []
    try:
        for layout in layouts:
            pattern, equals, wanted = layout.rpartition("=")
            if not equals or not pattern:
                raise ValueError(f"layout {layout!r}: expected PATTERN=LAYOUT, such as 'layers.*:output:=shard(1)'")
            parse_override(wanted)
            overrides.append((tuple(one if ":" in one else f"{one}:*" for one in parse_patterns(pattern)), wanted))
    except (ValueError, AttributeError, TypeError) as error:
        raise LookupFailedError(str(error)) from error
    return overrides


def find_override(overrides: Overrides, module_path: str, site: str, name: str) -> Override | None:
    """Return the last override whose pattern matches a value. Return None if no pattern matches."""
    for patterns, wanted in reversed(overrides):
        if matches(patterns, f"{module_path}:{site}:{name}"):
            return Override(wanted, f"{','.join(patterns)}={wanted}")
    return None
