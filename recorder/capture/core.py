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
from torch import nn

from ..config import Settings
from ..native import TOGETHER_KINDS
from ..observe import tree
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
from ..sites import GRADIENT_OF, OF_CALLS, OF_PARAMETERS, PROGRAM_SITES
from ..system.log import Events
from ..system.processes import comes_from_signal_handler
from .hooks.callbacks import RootCalls
from .hooks.root import Root
from .local_values import (
    DTYPES,
    Inner,
    UnsupportedKind,
    inner_tensors,
    local_bytes,
    merged_notes,
    plain,
    without_masked,
)
from .nonfinite import FirstNonFinite
from .parallel.aliases import Aliases
from .probe.device_probe import TURNED, DeviceProbe, ProbedValue
from .probe.probe import MAX_COLUMNS, Probe, SeenBefore
from .probe.probed_groups import ProbedGroup
from .program_values.objectives import SharedTensors
from .program_values.scalars import Scalars
from .program_values.tap_rows import TapRows
from .rule_commands import RuleCommands
from .staging import copies
from .staging.pool import GRAIN_BYTES, Pool, PoolBlock, RingMemory
from .token_blocks import TokenBlocks, is_whole

_as_tuple = functools.lru_cache(4096)(tuple[int, ...])
"""Returns a shape as a cached tuple. New objects in the channel's queue would bring garbage collections nearer."""
_MAX_LEAF_HOOKS = 1 << 16
_MAX_DROPPED_PARTS = 1 << 20
"""The most rows that a dropped tensor counts as, because expanded tensors are huge. Each takes a sequence number."""
_MAX_ERRORS = 20
"""After this many errors of the recorder at one site (such as `output`) of a module, the site is no longer recorded."""
_TOGETHER_DTYPES = frozenset(dtype for dtype, name in DTYPES.items() if name in TOGETHER_KINDS)


class Capture:
    """The training side of one recording: selection by rules, clock, pool and roots (models under hooks)."""

    def __init__(
        self,
        *,
        settings: Settings,
        rank: int,
        pool: Pool,
        put: Callable[[Staged | MeasuredTogether], None],
        count_drop: Callable[[str, int], None],
        refused: Mapping[str, str],
        events: Events,
        ring: RingMemory | None = None,
    ) -> None:
        """Prepare a recording without roots. `add_root` puts hooks on a model.

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
        self.roots: list[Root] = []
        self.past_roots: list[Root] = []
        self.root_calls = RootCalls()
        self.objectives = SharedTensors(self)
        self.tap_rows = TapRows(self, self.roots, self.objectives)
        self.aliases = Aliases(put)
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
        self._errors: dict[tuple[str, str, str, str], int] = {}
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
    def pools(self) -> list[Pool]:
        """Return the pool of the values that will be written and, if there is a ring, the ring's pool."""
        return [self.pool] if self.ring is None else [self.pool, self.ring.pool]

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
            next(self._sequence) if parts == 1 else self._number(parts),
            parts,
            origin,
            moment,
            phase,
            call,
            repeat,
            scope,
            DTYPES[local.dtype],
            _as_tuple(local.shape),
            chunk,
            keep,
            block,
            ready,
            note,
            time.time_ns(),
            None if plan is None else plan.read,
        )
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

    def _take_in_ring(self, nbytes: int, moment: StepPosition) -> PoolBlock | None:
        """Take a block of the ring. If the ring is full and a trigger asked for the step, take a block of the pool."""
        ring = self.ring
        if ring is None:
            return None
        block = ring.take(nbytes, moment)
        if block is None and ring.is_wanted(moment.step):
            return self.pool.take(nbytes) or self._take_later(nbytes, moment.step)
        return block

    def _say_no_room(self, origin: ValuePlace, keep: int, nbytes: int) -> str:
        """Report that no memory is free for a value, and return the drop reason."""
        pool, reason = self.pool, "too_large" if nbytes > self.pool.capacity_bytes else "pool_full"
        if keep & KEEP_RING and self.ring is not None:
            pool, reason = self.ring.pool, "ring_full"
        where = f"{origin.module_path or origin.root}:{origin.site} {origin.name}".rstrip()
        self.events.add(reason, _NO_ROOM[reason].format(where=where, nbytes=nbytes, pool=pool), key=reason)
        return reason

    def _take_later(self, nbytes: int, step: int) -> PoolBlock | None:
        """Wait for a free block of the pool, as long as the settings allow. Return None if no block becomes free."""
        self.aliases.flush()  # records that wait for their chunk hold memory of the pool
        settings = self.settings
        if settings.policy != "wait":
            return None
        return self.pool.take_or_wait(
            nbytes,
            step=step,
            per_step_s=settings.wait_s_per_step,
            stalled_s=settings.wait_s_stalled,
            per_run_s=settings.wait_s_per_run,
        )

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

    def hook_failed(self, where: str, error: Exception) -> None:
        """Count a value as dropped because the recorder raised an exception in a hook. Training goes on.

        Raises:
            Exception: `error` itself, if a signal handler of the user raised it.
        """
        if comes_from_signal_handler(error):
            raise error
        kind = "no_memory" if _is_out_of_memory(error) else "hook_error"
        self._drop(kind, 1)
        self.events.add(kind, f"recording {where} failed: {type(error).__name__}: {error}", key=where, exception=error)

    def site_failed(self, origin: ValuePlace, error: Exception) -> bool:
        """Count an error at a module's site (such as `output`). Return True if this error ends the site's recording."""
        where = f"{origin.module_path or origin.root}:{origin.site}"
        self.hook_failed(where, error)
        is_named = origin.site in PROGRAM_SITES
        key = (origin.root, "" if is_named else origin.module_path, origin.site, origin.name if is_named else "")
        self._errors[key] = num_errors = self._errors.get(key, 0) + 1
        if num_errors != _MAX_ERRORS:
            return False
        self.events.add(
            "disarmed",
            f"{where}{f':{origin.name}' if is_named else ''} is not recorded any more, from step {self.clock.step} on: "
            f"{_MAX_ERRORS} errors of the recorder there; the last was {type(error).__name__}: {error}",
            key=repr(key),
        )
        for root in self.roots:
            if root.name == origin.root:
                # The hook that records a value also registers the hook on the value's gradient, so the recording of the
                # gradient ends, too.
                with_gradient = origin.site in OF_CALLS and origin.site in GRADIENT_OF
                sites = (origin.site, GRADIENT_OF[origin.site]) if with_gradient else (origin.site,)
                root.disarm(origin.module_path, sites, self.clock.step)
        return True

    def is_disarmed(self, site: str, name: str) -> bool:
        """Whether a tap (a tensor that the program names) or a scalar is no longer recorded after too many errors."""
        return bool(self._errors) and any(
            count >= _MAX_ERRORS and (key[2], key[3]) == (site, name) for key, count in list(self._errors.items())
        )

    def keep_leaf_hook(self, handle: Any) -> None:
        """Keep the handle of a leaf tensor's hook. The hook is removed at the next step, or if too many are kept."""
        self._leaf_hooks.append(handle)
        if len(self._leaf_hooks) > _MAX_LEAF_HOOKS:
            self._leaf_hooks.popleft().remove()

    def add_root(self, module: nn.Module, name: str | None) -> Root:
        """Put hooks on a model, which may contain roots (models under hooks) already.

        If the model wraps a root, as DDP does, and leaves the paths of modules unchanged, the new root replaces that
        root and takes the name. Every other root stays. The new root leaves out modules that are in another root,
        unless the model itself lies inside another root.
        """
        for gone in [root for root in self.roots if root.module() is None]:
            self.remove_root(gone)
        inside, wrapped = {id(m) for m in module.modules()}, tree.unwrapped(module)[-1]
        contained = {root: inner for root in self.roots if (inner := root.module()) is not None and id(inner) in inside}
        taken = next((root for root, inner in contained.items() if tree.unwrapped(inner)[-1] is wrapped), None)
        if taken is not None:
            self.remove_root(taken)
            self.past_roots.remove(taken)
        if name is None:
            name = taken.name if taken is not None else self._free_name()
        others = (*self.roots, *self.past_roots)
        earlier = taken or next((root for root in others if root.name == name), None)
        is_part = self.root_of(wrapped) is not None
        root = Root(
            self,
            module,
            name,
            clock=earlier.clock if earlier is not None else None,
            is_elsewhere=lambda own, inner: not is_part and self._is_elsewhere(own, inner),
            inner_roots=[root for root in contained if root is not taken],
        )
        if taken is not None:
            root.go_on_from(taken)
        self.roots.append(root)
        self.nonfinite.has_models = len({one.name for one in (*others, root)}) > 1
        self._look_for_large(module)
        return root

    def _look_for_large(self, module: nn.Module) -> None:
        """Warn if rules select parameters and the largest parameter has more bytes than the pool."""
        if not self.selection.asks_for(*OF_PARAMETERS):
            return
        sizes = [(local_bytes(parameter), name) for name, parameter in module.named_parameters()]
        nbytes, name = max(sizes, default=(0, ""))
        if nbytes > self.pool.capacity_bytes:
            self.events.add("too_large", _NO_ROOM["too_large"].format(where=name, nbytes=nbytes, pool=self.pool))

    def renew_grown_roots(self) -> bool:
        """Put hooks on modules that were added to a model after its first call. Return whether there were any."""
        grown = [root for root in self.roots if root.has_grown()]
        for root in grown:
            root.renew()
        return bool(grown)

    def remove_root(self, root: Root) -> None:
        """Remove the hooks of a root (a model under hooks). The manifest keeps the root's description."""
        root.remove()
        self.roots.remove(root)
        self.past_roots.append(root)

    def _free_name(self) -> str:
        used = {root.name for root in self.roots + self.past_roots}
        return next(n for i in itertools.count() if (n := f"model_{i}" if i else "model") not in used)

    def root_of(self, module: nn.Module) -> Root | None:
        """Return the root (a model under hooks) that contains a module. Return None if no root contains it."""
        return next((root for root in self.roots if root.path_of(module) is not None), None)

    def _is_elsewhere(self, root: Root, module: nn.Module) -> bool:
        return any(other is not root and other.path_of(module) is not None for other in self.roots)

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


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory has run out. For host memory, torch raises only a `RuntimeError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


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
_NO_ROOM = {
    "too_large": "{where} has {nbytes} bytes, more than the pool ({pool.capacity_bytes}): no copy of it is recorded; "
    "raise RECORDER_POOL_BYTES or select less",
    "pool_full": "the pool ({pool.capacity_bytes} bytes) is full: values are dropped and counted until half of it is "
    "free; a faster disk, a larger RECORDER_POOL_BYTES or fewer values help",
    "ring_full": "the ring ({pool.capacity_bytes} bytes) is full: values that no trigger has asked for are dropped and "
    "counted until steps have passed; a larger RECORDER_POOL_BYTES or RECORDER_RING_SHARE, a smaller before=, or fewer "
    "values (call=0:4 leaves most of an evaluation out) help",
}
