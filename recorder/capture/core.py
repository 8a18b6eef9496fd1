"""Records the values that hooks pass on: the part of recording that runs on the training thread.

`Capture.observe` gives a value a number, copies it into the pool and puts it on the channel. Everything else happens on
the writer thread. Nothing here may open a file, print, issue a collective, sync a device, use a global random
generator, hold a lock while bytes are copied, or raise into training.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config import Settings
from ..native import TOGETHER_KINDS
from ..observe.clock import Clock
from ..observe.selection import NoMasks, RuleSelection
from ..observe.tree import has_compiled_anything
from ..records import (
    KEEP_NUMBERS,
    KEEP_PROBE,
    KEEP_RING,
    KEEP_STATS,
    KEEP_TOKENS,
    KEEP_VALUES,
    MOST_TOGETHER,
    NUMBERS_TOGETHER,
    PART_BYTES,
    SMALL_BYTES,
    Chunk,
    LostError,
    Measured,
    MeasuredTogether,
    ProbedStep,
    SeenValue,
    Staged,
    StepPosition,
    ValuePlace,
    kind_of,
)
from ..system.log import Events
from .hook_errors import HookErrors
from .hooks.callbacks import RootCalls
from .local_values import DTYPES, Inner, UnsupportedKind, inner_tensors, merged_notes, plain, without_masked
from .nonfinite import FirstNonFinite
from .parallel.aliases import Aliases
from .probe.device_probe import TURNED, DeviceProbe, ProbedValue
from .probe.probe import MAX_COLUMNS, Probe, SeenBefore
from .probe.probed_groups import ProbedGroup
from .program_values.objectives import SharedTensors
from .program_values.scalars import Scalars
from .program_values.tap_rows import TapRows
from .roots import Roots
from .rule_commands import RuleCommands
from .staging import copies
from .staging.pool import GRAIN_BYTES, HostMemory, Pool, RingMemory
from .token_blocks import TokenBlocks, is_whole

_as_tuple = functools.lru_cache(4096)(tuple[int, ...])
"""Returns a shape as a cached tuple. New objects in the channel's queue would bring garbage collections nearer."""
_MAX_LEAF_HOOKS = 1 << 16
_MAX_DROPPED_PARTS = 1 << 20
"""The most rows that a dropped tensor counts as, because expanded tensors are huge. Each takes a sequence number."""
_TOGETHER_DTYPES = frozenset(dtype for dtype, name in DTYPES.items() if name in TOGETHER_KINDS)


class Capture:
    """The training side of one recording: selection by rules, clock, pool and roots (models under hooks)."""

    def __init__(
        self, *, settings: Settings, rank: int, pool: Pool, put: Callable[[Staged | MeasuredTogether], None],
        count_drop: Callable[[str, int], None], refused: Mapping[str, str], events: Events,
        ring: RingMemory | None = None,
    ) -> None:  # fmt: skip
        """Prepare a recording without roots. `Roots.add` puts hooks on a model.

        `put` passes a record to the writer. `count_drop` counts dropped rows, given the reason and their number.
        Neither blocks. `refused` maps each kind of shard whose records would be dropped now to the reason; no value is
        copied for such a kind. The writer may change the mapping at any time.
        """
        self.settings = settings
        self.selection = RuleSelection(settings.rules, rank)
        self.ring = ring
        """The memory for values that are written only if a trigger asks for them. None if no rule uses a ring."""
        self.selection.has_ring = ring is not None
        self.masks: list[int] | NoMasks = self.selection.masks
        """For each rule set, what to keep at the current step, as bits of KEEP_*. All are 0 during a `pause`."""
        self.clock = Clock()
        self.pool = pool
        self._put, self._count_drop, self.refused = put, count_drop, refused
        self.events = events
        self.nonfinite = FirstNonFinite(rank=rank, clock=self.clock)
        self.aliases = Aliases(put)
        # Records that wait for their chunk in `aliases` hold memory of the pool.
        self.memory = memory = HostMemory(pool, ring, settings, events, self.aliases.flush)
        self._take_in_ring, self._take_later = memory.take_in_ring, memory.take_later
        self._say_no_room = memory.say_no_room
        self.roots = Roots(self, self.nonfinite, memory)
        errors = HookErrors(self._drop, events, self.clock, self.roots)
        self.hook_failed, self.site_failed = errors.hook_failed, errors.site_failed
        self.is_disarmed = errors.is_disarmed
        self.root_calls = RootCalls()
        self.objectives = SharedTensors(self)
        self.tap_rows = TapRows(self, self.roots, self.objectives)
        self.is_open = True
        self.every_call_is_a_step = False
        """True in inference: without an optimizer, every call of a root (a model under hooks) counts as a step."""
        self.is_in_stage = False
        """Whether the latest call of a model, which may be under way, is a call of a pipeline stage."""
        self.has_seen_forward = False
        """True once a hook has observed a model's forward with gradients. `torch.compile` may compile hooks away."""
        self.has_stepped = False
        """True once the first step is over. That step shows which modules never ran or were compiled."""
        self._step_in_force: int | None = None
        self._sequence = itertools.count()
        self._stagers: dict[str, copies.Stager] = {}
        self._leaf_hooks: deque[Any] = deque()
        self.lost: Callable[[], object] = self._sequence.__next__
        """Counts a lost value by a sequence number that is never written nor counted as dropped. Needs no memory."""
        self.probe: Probe | None = None
        """The probe, which measures one number of each value at each step. None while no ``keep=probe`` selects one."""
        self._token_blocks: TokenBlocks | None = None
        self.saw_again: Callable[[SeenBefore, torch.Tensor, int], bool] = lambda *_: False
        self.on_probed: Callable[[ProbedStep], None] | None = None
        """Called with the probe's numbers of each finished step. Must be set before the first value is recorded."""
        self.before_forward: Callable[[], None] | None = None
        """Is called as a forward of a root with gradients begins, on its thread."""
        self.scalars = Scalars(self, self.roots)
        self.add_evaluation: Callable[[Any, str], None] = self.scalars.add_evaluation
        self.returned: Callable[[str, str, Any], None] = self.scalars.returned
        self.rule_commands = RuleCommands(
            settings.rules, selection=self.selection, clock=self.clock, roots=self.roots, taps=self.tap_rows
        )
        self.rule_commands.heeded = lambda text: events.add("trouble", text, key=text, whose=f"rank {rank}: ")
        self.step_changed()

    @property
    def observed(self) -> int:
        """Return how many rows were seen. Any thread may call. Reads the counter's repr: `next` would change it."""
        return int(repr(self._sequence)[6:-1])

    @property
    def is_step_in_force(self) -> bool:
        """Whether `step_changed` has run to its end for the current step. An interrupt may have stopped it."""
        return self._step_in_force == self.clock.step

    def step_changed(self) -> None:
        """Apply the rules to the new step, and remove the hooks on leaf tensors of the old step."""
        self._step_in_force, step = None, self.clock.step
        if self.probe is not None:
            with torch._C._DisableFuncTorch():  # the call may be in `torch.func`, which wraps the tensors that are made
                self._ask_probe(self.probe.step_changes, step)
            self._tell_of_probe(self.probe)
            if self.probe.is_blind:
                self.selection.has_probe = False  # Without this check, hooks would stay on at every step for nothing.
        self.scalars.step_changes(step)
        self.rule_commands.step_changes(step)
        if self.ring is not None and (problem := self.ring.judge(step, self.selection.num_ring_steps)) is not None:
            self.selection.has_ring = False
            self.events.add("ring_refused", problem, level=logging.ERROR)
        self.selection.at_step(step)
        # Hooks come off only after the first step, which shows the modules that run, and once a hook on a root can
        # notice a new step. They stay on once anything was compiled, because dynamo would compile every module with and
        # without hooks.
        may_rest = self.has_stepped and self.has_seen_forward and not has_compiled_anything()
        for root in self.roots:
            root.grouped.rest_or_wake(may_rest=may_rest)
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._step_in_force = step
        self.call_begins()

    def _tell_of_probe(self, probe: Probe) -> None:
        if probe.is_full:
            self.events.add("probe_full", _PROBE_FULL)
        if probe.has_missed:
            probe.has_missed = False
            self.events.add("probe_missed", _PROBE_MISSED, level=logging.INFO)

    def call_begins(self) -> None:
        """Let each stager pass its finished copies to the writer. Called when a step or a model's call begins."""
        for stager in list(self._stagers.values()):
            stager.look()

    def fetch(self) -> None:
        """Put the values that the probe and the stagers still hold on the channel. May block."""
        if self.probe is not None:
            self._ask_probe(self.probe.flush)
            self._tell_of_probe(self.probe)
        if self._token_blocks is not None:
            self._token_blocks.flush()
        self.scalars.record_losses()
        self.aliases.flush()
        for stager in list(self._stagers.values()):
            stager.fetch()

    def forward_without_root(self) -> None:
        """Advance the step when a module runs although no hook has observed a forward of the whole model.

        This happens if the program calls the model's ``.forward()`` directly, or if the model runs in a compiled graph.
        """
        if self.every_call_is_a_step or self.root_calls.depth or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1 and self.clock.advance_if_stepped():
            self.step_changed()

    def pause(self) -> None:
        """Record nothing until `resume` is called."""
        self.masks = NoMasks()

    def resume(self) -> None:
        """End a `pause`: record what the rules select."""
        self.masks = self.selection.masks

    def keep_of(self, rule_set: int, micro_step: int | None, call: int) -> int:
        """Return what a rule set keeps at this step, micro-step and call, as bits of KEEP_*.

        In a pipeline a micro-step has only a part of the batch, so rules keep all micro-steps.
        """
        keep = self.masks[rule_set]
        if keep and rule_set in self.selection.limited:
            return self.selection.mask_at_call(rule_set, None if self.is_in_stage else micro_step, call)
        return keep

    def observe(
        self, seen: SeenValue, keep: int, tensor: torch.Tensor, put: Callable[[Staged], None] | None = None
    ) -> None:
        """Copy a tensor's values into the pool and put them on the channel, or count a drop. Called on any thread.

        The tensor may be of any kind. It is read before this method returns, and no reference is kept. `keep` has at
        least one bit of KEEP_*. If `put` is given, the record is passed to `put` instead of the channel.
        """
        origin, moment, phase, call, repeat, scope, chunk, note = seen
        try:
            local, chunk = plain(tensor, chunk)
            if chunk is not None and 'Partial"' in chunk.placements:
                if keep == KEEP_PROBE:
                    return  # the norm of one rank's summand says nothing about the sum
                local, keep, note = self._summand(tensor, local, keep, note)
            if keep & KEEP_TOKENS:
                keep &= ~KEEP_TOKENS
                if phase == "forward" and (chunk is None or is_whole(chunk)):
                    self.token_blocks().saw(origin, moment, local, is_sure=put is None)
                if not keep:
                    return
            if keep & KEEP_PROBE:
                probe, is_alone = self.probe or self._begin_probe(), keep == KEEP_PROBE
                keep = probe.saw(seen if chunk is seen.chunk else seen._replace(chunk=chunk), local, keep)
                if not keep:
                    return
                note = merged_notes(note, TURNED) if is_alone else note
            if (
                self.refused
                and not keep & KEEP_RING
                and (reason := self.refused.get(kind_of(keep, origin.site))) is not None
            ):
                self._drop(reason, min(_num_parts(local.numel() * local.itemsize, keep), _MAX_DROPPED_PARTS))
                return
            kind = "cpu" if local.is_cpu else local.device.type  # this is `stager_of`, inlined
            stager = self._stagers.get(kind) or self._stager(kind)
            # `Tensor.nbytes` wraps at 2^64 bytes, which an expanded tensor can have.
            nbytes = local.numel() * local.itemsize
            plan = None
            if nbytes > stager.copied_bytes and not keep & KEEP_VALUES:
                plan = stager.plan(local, chunk, keep, origin.unit_dim)
                nbytes = nbytes if plan is None else plan.nbytes
        except UnsupportedKind as error:
            for name, inner, its_chunk, why in self._inside(origin, tensor, chunk, str(error)):
                named, its_note = origin._replace(name=name), merged_notes(note, why)
                self.observe(seen._replace(origin=named, chunk=its_chunk, note=its_note), keep, inner)
            return
        except Exception as error:
            self.site_failed(origin, error)
            return
        parts = _num_parts(nbytes, keep)
        if keep & KEEP_RING:
            block = self._take_in_ring(nbytes, moment)
        else:
            block = self.pool.take(nbytes) or self._take_later(nbytes, moment.step)
        if block is None:
            self._drop(self._say_no_room(origin, keep, nbytes), min(parts, _MAX_DROPPED_PARTS))
            return
        try:
            ready = stager.copy(local, block) if plan is None else stager.measure(local, block, plan)
        except LostError as error:
            block.release()
            reason = str(error)
            self._drop(reason, parts)
            where = f"{origin.module_path or origin.root}:{origin.site}"
            self.events.add(reason, f"{where}: {copies.WHY_LOST.get(reason, reason)}", key=reason)
            return
        except Exception as error:
            block.release()
            self.site_failed(origin, error)
            return
        except BaseException:
            block.release()
            raise
        fields = (
            next(self._sequence) if parts == 1 else self._number(parts), parts, origin, moment, phase, call, repeat,
            scope, DTYPES[local.dtype], _as_tuple(local.shape), chunk, keep, block, ready, note, time.time_ns(),
            None if plan is None else plan.read,
        )  # fmt: skip
        # This equals `Staged(*fields)` and takes a third of the time.
        (put or self._put)(tuple.__new__(Staged, fields))

    def observe_known(
        self, group: ProbedGroup, tensors: Sequence[torch.Tensor], repeats: Sequence[int], moment: StepPosition
    ) -> None:
        """Record new tensors of values that `observe` recorded before, without examining each tensor again.

        Each tensor must be plain, have the dtype and shape of its value, and be contiguous if it is in host memory.
        """
        stager, put = self.stager_of(tensors[0]), self._put
        is_simple = tensors[0].is_cpu and not self.refused
        together: list[tuple[int, ProbedValue, int, torch.Tensor, int]] = []
        for value, keep, tensor, repeat in zip(group.values, group.keeps, tensors, repeats, strict=True):
            if not keep:
                continue
            nbytes = value.numel * value.dtype.itemsize
            is_small = is_simple and nbytes <= SMALL_BYTES and not keep & KEEP_RING
            may_join = keep in NUMBERS_TOGETHER and value.chunk is None and value.dtype in _TOGETHER_DTYPES
            if is_small and may_join:
                together.append((next(self._sequence), value, keep, tensor, repeat))
                continue
            block = self.pool.take(nbytes) if is_small else None
            if block is None:
                seen = SeenValue(value.origin, moment, value.phase, 0, repeat, value.scope, value.chunk, value.note)
                self.observe(seen, keep, tensor)
                continue
            try:
                stager.copy(tensor, block)
            except BaseException:
                block.release()
                raise
            fields = (
                next(self._sequence), 1, value.origin, moment, value.phase, 0, repeat, value.scope,
                DTYPES[value.dtype], _as_tuple(value.shape), value.chunk, keep, block, None, value.note,
                time.time_ns(), None,
            )  # fmt: skip
            put(tuple.__new__(Staged, fields))
        for start in range(0, len(together), MOST_TOGETHER):
            self._put_together(together[start : start + MOST_TOGETHER], moment)

    def _put_together(
        self, known: Sequence[tuple[int, ProbedValue, int, torch.Tensor, int]], moment: StepPosition
    ) -> None:
        """Measure small host tensors in place, without copies. Put their statistics on the channel as one item."""
        num = len(known)
        numbers, values, keeps, tensors, repeats = zip(*known, strict=True)
        block = self.pool.take(num * GRAIN_BYTES) or self._take_later(num * GRAIN_BYTES, moment.step)
        if block is None:
            self._count_drop(self._say_no_room(values[0].origin, keeps[0], num * GRAIN_BYTES), num)
            return
        _, dtypes, numels, shapes, origins, phases, scopes, chunks, notes = zip(*values, strict=True)
        shapes, names = tuple(map(_as_tuple, shapes)), [DTYPES[dtype] for dtype in dtypes]
        try:
            on_host = (self.probe or self._begin_probe()).on_host
            measured = on_host.measure_together(tensors, numels, names, shapes, keeps)
        except BaseException:
            block.release()
            self._count_drop("hook_error", num)
            raise
        of_all = (1, moment, 0, block, None, time.time_ns(), None)
        parts, moments, calls, blocks, readies, times, plans = ((one,) * num for one in of_all)
        rows = zip(
            numbers, parts, origins, moments, phases, calls, repeats, scopes, names, shapes, chunks,
            keeps, blocks, readies, notes, times, plans, strict=True,
        )  # fmt: skip

        def make() -> tuple[list[Staged], list[Measured]]:
            return list(map(tuple.__new__, itertools.repeat(Staged), rows)), measured()

        self._put(MeasuredTogether(num, make, block))

    def seen_before(self, origin: ValuePlace, mode: str, tensor: torch.Tensor) -> SeenBefore | None:
        """Return what `saw_again` needs of a forward value, or None if the probe does not measure the value.

        `tensor` is an earlier tensor of the value.
        """
        return None if self.probe is None else self.probe.seen_before(origin, mode, tensor)

    def _begin_probe(self) -> Probe:
        self.probe = Probe(
            self.observe,
            DeviceProbe(self.pool, self.nonfinite, self.stager_of, self.put_measured),
            self.on_probed,
            lambda root, text: self.rule_commands.keep_more(f"{root}: " * self.nonfinite.has_models + text),
            use_native=self.settings.native,
        )
        self.probe.step_changes(self.clock.step)
        self.saw_again = self.probe.saw_again
        return self.probe

    def _ask_probe(self, question: Callable[..., None], *arguments: int) -> None:
        try:
            question(*arguments)
        except Exception as error:
            self.hook_failed("the probe", error)

    def token_blocks(self) -> TokenBlocks:
        """Return the collector of rows with ``keep=tokens``. The first call creates the collector."""
        if self._token_blocks is None:
            self._token_blocks = TokenBlocks(self.observe)
        return self._token_blocks

    def _summand(
        self, tensor: torch.Tensor, local: torch.Tensor, keep: int, note: str | None
    ) -> tuple[torch.Tensor, int, str | None]:
        """Return the values, keep bits and note to record for one rank's summand of a partial sum."""
        masked = without_masked(tensor, local)
        if masked is not None:
            local, note = masked, merged_notes(note, _MASKED)
        keep &= ~KEEP_PROBE
        if keep & KEEP_STATS:  # statistics of one rank's summands say nothing about the sum
            keep, note = keep & ~KEEP_NUMBERS, merged_notes(note, _NO_STATISTICS_OF_PARTIAL)
        return local, keep, note

    def _inside(self, origin: ValuePlace, tensor: torch.Tensor, chunk: Chunk | None, reason: str) -> list[Inner]:
        """Return the tensors inside a composite tensor. Count a drop if there are none."""
        try:
            inside = inner_tensors(origin.name, tensor, chunk)
        except Exception as error:
            self.site_failed(origin, error)
            return []
        if not inside:
            self._drop(reason, 1)
            where = f"{origin.module_path or origin.root}:{origin.site}:{origin.name}"
            self.events.add("unsupported", f"{where}: {reason}", key=reason)
        return inside

    def stager_of(self, tensor: torch.Tensor) -> copies.Stager:
        """Return the stager that copies from the tensor's device. Raise `UnsupportedKind` if there is no stager."""
        kind = "cpu" if tensor.is_cpu else tensor.device.type  # reading `device.type` costs 0.3 us
        return self._stagers.get(kind) or self._stager(kind)

    def _stager(self, device_type: str) -> copies.Stager:
        factory = copies.STAGERS.get(device_type)
        if factory is None:
            raise UnsupportedKind(f"unsupported_device:{device_type}")
        stager = factory(self.pool, self.settings, lambda text: self.events.add("device", text))
        return self._stagers.setdefault(device_type, stager)  # each device has a thread of its own in a backward

    def put_measured(
        self, value: ProbedValue, moment: StepPosition, call: int, note: str | None, its: Measured
    ) -> None:
        """Put a row on the channel with statistics (`its`) that are known already. The value is not copied."""
        block = self.pool.take(0)
        if block is None:
            self._drop("pool_full", 1)
            return
        fields = (
            next(self._sequence), 1, value.origin, moment, value.phase, call, 0, value.scope, DTYPES[value.dtype],
            _as_tuple(value.shape), value.chunk, KEEP_STATS, block, None, note, time.time_ns(), lambda data, chunk: its,
        )  # fmt: skip
        self._put(Staged(*fields))

    def _number(self, num_rows: int) -> int:
        """Return the first of ``num_rows`` consecutive sequence numbers.

        If another thread takes a number in between, count the numbers taken so far as dropped, and start again.
        """
        first = last = next(self._sequence)
        while last - first + 1 < num_rows:
            following = next(self._sequence)
            if following != last + 1:
                self._count_drop("interrupted", last - first + 1)
                first = following
            last = following
        return first

    def _drop(self, reason: str, num_rows: int) -> None:
        for _ in range(num_rows):
            next(self._sequence)
        self._count_drop(reason, num_rows)

    def keep_leaf_hook(self, handle: Any) -> None:
        """Keep the handle of a leaf tensor's hook. The hook is removed at the next step, or if too many are kept."""
        self._leaf_hooks.append(handle)
        if len(self._leaf_hooks) > _MAX_LEAF_HOOKS:
            self._leaf_hooks.popleft().remove()

    def close(self) -> None:
        """Record the values that are still held back, and remove every hook. Records on the channel stay there."""
        if self.probe is not None:
            self._ask_probe(self.probe.close)
        if self._token_blocks is not None:
            self._token_blocks.flush()
        self.scalars.record_losses()
        self.is_open = False
        self.aliases.flush()
        for root in self.roots:
            root.remove()
        self.roots.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        for stager in self._stagers.values():
            stager.close()


def _num_parts(nbytes: int, keep: int) -> int:
    return -(-nbytes // PART_BYTES) if keep & KEEP_VALUES and nbytes > PART_BYTES else 1


_MASKED = '{"masked":true}'
_NO_STATISTICS_OF_PARTIAL = '{"no_statistics":"Partial"}'
_PROBE_FULL = (
    f"the numbers of every step are kept of {MAX_COLUMNS:,} values, and further values have none: select fewer values "
    "in rules with keep=probe, by module= or site=, or give them names that do not change with the data"
)
_PROBE_MISSED = (
    "values came after their step was over, as from a thread that evaluates while another thread trains: the numbers "
    "of every step lack these values"
)
