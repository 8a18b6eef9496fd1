"""Capture: what hooks do when they fire, on the training thread.

`Capture.observe` numbers a value, copies it into the pool and puts it on the channel; everything else happens on the
writer thread. Nothing here may open a file, print, issue a collective, sync a device, use a global random generator,
hold a lock while bytes are copied, or raise into training.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..config import Settings
from ..records import KEEP_STATS, KEEP_TENSOR, PART_BYTES, Chunk, LostError, Moment, Origin, Staged, kind_of
from . import hooks, staging
from .clock import Clock, Slice
from .discovery import has_compiled_anything
from .events import Events, comes_from_signal_handler
from .flat import merged
from .inner import Inner, inner_tensors
from .neighbours import WRAPPED, Neighbours, chunk_of_gradient, has_owner, made_of, wrapped
from .nonfinite import FirstNonFinite
from .places import without_masked
from .pool import Pool, PoolBlock
from .root import Root
from .segments import Piece
from .select import NOTHING, Selection, scalar_keep
from .tapped import Tapped
from .values import DTYPES, UnsupportedKind, local_bytes, plain, requires_gradient

_MAX_LEAF_HOOKS = 1 << 16
_MAX_DROPPED_PARTS = 1 << 20
"""Rows that one tensor counts for at most where it is dropped: each takes a number, and an expanded one has no end."""
_MAX_ERRORS = 20
"""Errors of ours at one site of one module after which it is left alone."""
_WITH_GRADIENT = {"input": ("input", "grad_input"), "output": ("output", "grad_output")}
"""A hook that sees values also sees to their gradients."""
_NO_HANDLE = "recorder"
"""The key of a hook that nobody removes: it goes with its graph. Handles have numbers."""
_NEVER_TAPPED = (None, -1, False)
LOSS = "loss"
"""The scalar that is found where the program gives none of that name."""
_MAX_LOSSES = 64
"""Losses of one step that wait for its end."""


class Channel(Protocol):
    """Where staged records go; the writer's front door. Neither call blocks."""

    @property
    def refused(self) -> Mapping[str, str]:
        """By kind, why records of it would be dropped unseen for now: they need not be copied."""

    def put(self, staged: Staged) -> None: ...

    def count_drop(self, reason: str, num_rows: int = 1) -> None: ...


class Nesting(threading.local):
    """How deep this thread is inside calls of roots."""

    depth = 0
    outermost: Root | None = None


class _Nothing:
    """Masks that select nothing."""

    def __getitem__(self, rule_set: int) -> int:
        return 0


_NOTHING = _Nothing()


class Capture:
    """One recording's training side: selection, clock, pool and roots."""

    def __init__(self, *, settings: Settings, rank: int, pool: Pool, channel: Channel, events: Events) -> None:
        self.settings = settings
        self.selection = Selection(settings.rules, rank)
        self.masks: list[int] | _Nothing = self.selection.masks
        self.clock = Clock()
        self.pool = pool
        self.channel = channel
        self.events = events
        self.nonfinite = FirstNonFinite(rank=rank, clock=self.clock)
        self.roots: list[Root] = []
        self.past_roots: list[Root] = []
        self.nesting = Nesting()
        self.tapped = Tapped(self)
        self.neighbours = Neighbours(channel.put)
        self.is_open = True
        self.every_call_is_a_step = False
        """Inference: no optimizer counts the steps."""
        self.is_in_stage = False
        """Whether the call of a root that is under way, or was the last, is that of a pipeline's stage."""
        self.has_seen_forward = False
        """Whether a root was ever seen to run with gradients; under compile its own hooks may be compiled away."""
        self.has_stepped = False
        """Whether the first step is over, which tells what of the model never ran, or was compiled."""
        self._settled_step: int | None = None
        self._sequence = itertools.count()
        self._stagers: dict[str, staging.Stager] = {}
        self._leaf_hooks: deque[Any] = deque()
        self._taps: dict[tuple[str, str, str], tuple[Slice | None, int, bool]] = {}
        self._scalar_repeats: dict[str, int] = {}
        self._losses: deque[tuple[int, int, torch.Tensor]] = deque()
        """Found at the first step: the step, what to keep, and the value; the program may yet give one of its own."""
        self._is_loss_given = False
        self._waits_for_loss = True
        """Until a step is over in which a loss was found and the program gave none. From then on a loss is recorded as
        it is found, so that a process that ends suddenly leaves the loss of its last step."""
        self._errors: dict[tuple[str, str, str, str], int] = {}
        self.lost: Callable[[], object] = self._sequence.__next__
        """Number a value that is neither put nor dropped, as the ledger finds at the end. Needs no stack, no memory."""
        self.step_changed()

    @property
    def observed(self) -> int:
        """Rows numbered so far; any thread. Read off the counter's repr, the one way that does not advance it."""
        return int(repr(self._sequence)[6:-1])

    @property
    def is_settled(self) -> bool:
        """Whether `step_changed` has run to its end for this step; an interrupt may come before that, or within."""
        return self._settled_step == self.clock.step

    def step_changed(self) -> None:
        """The step has moved: work out what is kept, and drop what belonged to the old step."""
        self._settled_step, step = None, self.clock.step
        if self._losses and self._losses[0][0] != step:
            self._waits_for_loss = False
            self._record_losses(until=step)
        self.selection.at_step(step)
        # Not before the first step has told what runs, nor where only modules tell that the step has moved, nor once
        # anything was compiled: dynamo would make a graph for modules with hooks and one for those without.
        may_rest = self.has_stepped and self.has_seen_forward and not has_compiled_anything()
        for root in self.roots:
            root.rest_or_wake(may_rest=may_rest)
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._taps.clear()
        self._scalar_repeats.clear()
        self._settled_step = step
        self.call_begins()

    def call_begins(self) -> None:
        """A call of a root begins, or a step: what waited for the end of the last one may be had now."""
        for stager in list(self._stagers.values()):
            stager.look()

    def fetch(self) -> None:
        """Bring what waits for the end of a step, whatever it costs."""
        self._record_losses()
        self.neighbours.flush()
        for stager in list(self._stagers.values()):
            stager.fetch()

    def forward_without_root(self) -> None:
        """A module runs, and no root was ever seen to: it is called by ``.forward()``, or in a graph of its modules.

        Then the step moves with the first module that is seen to run.
        """
        if self.every_call_is_a_step or self.nesting.depth or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1 and self.clock.advance_if_stepped():
            self.step_changed()

    def pause(self) -> None:
        """Keep nothing until `resume`."""
        self.masks = _NOTHING

    def resume(self) -> None:
        """Keep what the rules select."""
        self.masks = self.selection.masks

    def keep_of(self, rule_set: int, call: int) -> int:
        """Bits of KEEP_* for a rule set at this step and call."""
        keep = self.masks[rule_set]
        if keep and rule_set in self.selection.limited:
            return self.selection.mask_at_call(rule_set, call)
        return keep

    def observe(
        self,
        origin: Origin,
        moment: Moment,
        phase: str,
        call: int,
        repeat: int,
        keep: int,
        tensor: torch.Tensor,
        scope: str | None = None,
        chunk: Chunk | None = None,
        note: str | None = None,
        put: Callable[[Staged], None] | None = None,
    ) -> None:
        """Copy a tensor's values into the pool and hand them to the writer, or count why not. Any thread.

        Args:
            origin: where the value comes from.
            moment: step, micro-step and mode.
            phase: ``forward``, ``recompute``, ``backward`` or ``optimizer``.
            call: n-th call of the module within the slice.
            repeat: n-th row with an otherwise equal key.
            keep: bits of KEEP_*; not 0.
            tensor: any kind; it is read before this returns and never held.
            scope: of a gradient or parameter; None where it has no meaning.
            chunk: its place in a global tensor, where the caller knows better than the tensor.
            note: JSON text for the row.
            put: takes the record instead of the channel.
        """
        try:
            local, chunk = plain(tensor, chunk)
            if chunk is not None and 'Partial"' in chunk.placements:
                local, keep, note = self._summand(tensor, local, keep, note)
            if self.channel.refused and (reason := self.channel.refused.get(kind_of(keep, origin.site))) is not None:
                self._drop(reason, min(_num_parts(local.numel() * local.itemsize, keep), _MAX_DROPPED_PARTS))
                return
            kind = "cpu" if local.is_cpu else local.device.type  # to ask for the latter costs 0.3 us
            stager = self._stagers.get(kind) or self._stager(kind)
            plan = encoded = None
            if not keep & KEEP_TENSOR:
                plan = stager.plan(local, chunk, keep)
            elif origin.site != "scalar":  # which is written elsewhere
                encoded = stager.encode(local, chunk, keep, origin)
            # torch's own product wraps at 2^64, as expanded tensors reach
            nbytes = local.numel() * local.itemsize if plan is None else plan.nbytes
        except UnsupportedKind as error:
            for name, inner, its_chunk, why in self._inside(origin, tensor, chunk, str(error)):
                named, note_ = origin._replace(name=name), merged(note, why)
                self.observe(named, moment, phase, call, repeat, keep, inner, scope=scope, chunk=its_chunk, note=note_)
            return
        except Exception as error:
            self.site_failed(origin, error)
            return
        parts = _num_parts(nbytes, keep)
        block: PoolBlock | Piece | None
        if encoded is not None:
            block, read, ready = *encoded, None
        else:
            block = self.pool.take(nbytes) or self._take_later(nbytes, moment.step)
            if block is None:
                reason = "too_large" if nbytes > self.pool.capacity_bytes else "pool_full"
                self._drop(reason, min(parts, _MAX_DROPPED_PARTS))
                where = f"{origin.module_path or origin.root}:{origin.site} {origin.name}".rstrip()
                self.events.add(reason, _NO_ROOM[reason].format(where=where, nbytes=nbytes, pool=self.pool), key=reason)
                return
            try:
                ready = stager.copy(local, block) if plan is None else stager.measure(local, block, plan)
            except LostError as error:
                block.release()
                reason = str(error)
                self._drop(reason, parts)
                where = f"{origin.module_path or origin.root}:{origin.site}"
                self.events.add(reason, f"{where}: {staging.WHY_LOST.get(reason, reason)}", key=reason)
                return
            except Exception as error:
                block.release()
                self.site_failed(origin, error)
                return
            except BaseException:
                block.release()
                raise
            read = None if plan is None else plan.read
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
            tuple(local.shape),
            chunk,
            keep,
            block,
            ready,
            note,
            time.time_ns(),
            read,
            None if encoded is None else block,
        )
        # As `Staged(*fields)` makes it, in a third of the time.
        (put or self.channel.put)(tuple.__new__(Staged, fields))

    def _take_later(self, nbytes: int, step: int) -> PoolBlock | None:
        """The pool has no room now: a block after a wait that the settings bound, or None."""
        self.neighbours.flush()  # what waits there has memory that the writer can give back
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
        """Of a value that is to be added up over ranks, what is recorded."""
        masked = without_masked(tensor, local)
        if masked is not None:
            local, note = masked, merged(note, _MASKED)
        if keep & KEEP_STATS:  # statistics of summands say nothing of the sum
            keep, note = keep & ~KEEP_STATS, merged(note, _NO_STATISTICS_OF_PARTIAL)
        return local, keep, note

    def _inside(self, origin: Origin, tensor: torch.Tensor, chunk: Chunk | None, reason: str) -> list[Inner]:
        """What a composite tensor is made of. What is none, or fails to say, is counted here."""
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

    def _stager(self, device_type: str) -> staging.Stager:
        factory = staging.STAGERS.get(device_type)
        if factory is None:
            raise UnsupportedKind(f"unsupported_device:{device_type}")
        stager = factory(self.pool, self.settings, lambda text: self.events.add("device", text))
        return self._stagers.setdefault(device_type, stager)  # a backward has a thread for each device

    def _number(self, num_rows: int) -> int:
        """Take ``num_rows`` consecutive numbers; where another thread takes one in between, ours are a counted hole."""
        first = last = next(self._sequence)
        while last - first + 1 < num_rows:
            following = next(self._sequence)
            if following != last + 1:
                self.channel.count_drop("interrupted", last - first + 1)
                first = following
            last = following
        return first

    def _drop(self, reason: str, num_rows: int) -> None:
        for _ in range(num_rows):
            next(self._sequence)
        self.channel.count_drop(reason, num_rows)

    def hook_failed(self, where: str, error: Exception) -> None:
        """An exception of ours inside a hook: the value is counted as lost, training goes on.

        Raises:
            Exception: it is the user's, out of a signal handler, and goes on as it would have without us.
        """
        if comes_from_signal_handler(error):
            raise error
        kind = "no_memory" if _is_out_of_memory(error) else "hook_error"
        self._drop(kind, 1)
        self.events.add(kind, f"recording {where} failed: {type(error).__name__}: {error}", key=where, exception=error)

    def site_failed(self, origin: Origin, error: Exception) -> bool:
        """The same at a site of a module, which is disarmed when it has failed too often. True when it is."""
        where = f"{origin.module_path or origin.root}:{origin.site}"
        self.hook_failed(where, error)
        is_named = origin.site in ("tap", "scalar")
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
                root.disarm(origin.module_path, _WITH_GRADIENT.get(origin.site, (origin.site,)), self.clock.step)
        return True

    def _is_disarmed(self, site: str, name: str) -> bool:
        return any(
            count >= _MAX_ERRORS and (key[2], key[3]) == (site, name) for key, count in list(self._errors.items())
        )

    def watch_gradient(
        self,
        tensor: torch.Tensor,
        origin: Origin,
        moment: Moment,
        call: int,
        keep: int,
        scope: str | None = None,
    ) -> hooks.GradientArrives:
        """Record the gradient that arrives at ``tensor``, each time one does."""
        hook = hooks.GradientArrives(self, origin, moment, call, keep, scope)
        node = tensor.grad_fn if type(tensor) is torch.Tensor else None
        if node is not None and type(node).__name__ == WRAPPED and (made := wrapped(tensor, node)) is not None:
            if isinstance(made, torch.Tensor):
                tensor, node = made, None
            else:
                node, number = made
                node.register_prehook(lambda gradients: hook(gradients[number]))
                return hook
        if node is not None and tensor._backward_hooks is None:
            # What `register_hook` does, without the handle, which takes four fifths of its 2.6 us.
            tensor._backward_hooks = registered = OrderedDict()
            node._register_hook_dict(tensor)
            registered[_NO_HANDLE] = hook
            return hook
        with torch._C.DisableTorchFunctionSubclass():  # a subclass's own may count calls, or refuse this one
            handle = tensor.register_hook(hook)
            is_leaf = tensor.is_leaf
        if is_leaf:
            hook.handle = handle
            self.keep_leaf_hook(handle)
        return hook

    def watch_share(self, tensor: torch.Tensor, origin: Origin, moment: Moment, call: int, keep: int) -> None:
        """Record the gradient of a DTensor argument: where it was made for one module, of what it was made of."""
        found = made_of(tensor)
        if found is None:
            self.watch_gradient(tensor, origin, moment, call, keep)
            return
        node, number, chunk = found
        hook = hooks.GradientArrives(self, origin, moment, call, keep)
        hook.chunk = chunk
        node.register_prehook(lambda gradients: hook(gradients[number]))

    def keep_leaf_hook(self, handle: Any) -> None:
        """A hook on a leaf outlives the graph: it is removed at the next step, or when too many wait for one."""
        self._leaf_hooks.append(handle)
        if len(self._leaf_hooks) > _MAX_LEAF_HOOKS:
            self._leaf_hooks.popleft().remove()

    def scalar(self, name: str, value: Any, root_name: str | None = None) -> None:
        """Record a number of this step: a float or a tensor of one element, which is not synced."""
        if name == LOSS:
            self._is_loss_given = True
            self._losses.clear()
        if keep := self._keep_of_scalar(name):
            self._record_scalar(name, value, keep, self.clock.step, root_name)

    def wants_scalar(self, name: str) -> bool:
        """Whether a rule asks for a scalar on this rank, at some step."""
        return self._name_rule_set("scalar", name) != NOTHING

    def found_loss(self, value: torch.Tensor) -> None:
        """A backward begins at a tensor of one element: the loss, unless the program gives one of its own."""
        if self._is_loss_given or not (keep := self._keep_of_scalar(LOSS)):
            return
        if value.is_cuda and torch.cuda.is_current_stream_capturing():  # what is launched joins the graph
            return
        try:
            local, chunk = plain(value)
        except UnsupportedKind:  # a stand-in, say, of which no value can be had
            return
        if chunk is not None and 'Partial"' in chunk.placements:
            return
        with torch.no_grad():
            held = local.detach().clone() if self._waits_for_loss else local.detach()
        self._losses.append((self.clock.step, keep, held))
        if not self._waits_for_loss or len(self._losses) > _MAX_LOSSES:
            self._record_losses()

    def _record_losses(self, until: int | None = None) -> None:
        """Record the losses that were found, but not those of the step `until`."""
        while self._losses and self._losses[0][0] != until:
            step, keep, value = self._losses.popleft()
            try:
                self._record_scalar(LOSS, value, keep, step, note=_FOUND)
            except Exception as error:
                self.hook_failed("the loss", error)

    def _keep_of_scalar(self, name: str) -> int:
        keep = scalar_keep(self.masks[self._name_rule_set("scalar", name)])
        return 0 if self._errors and self._is_disarmed("scalar", name) else keep

    def _record_scalar(
        self, name: str, value: Any, keep: int, step: int, root_name: str | None = None, note: str | None = None
    ) -> None:
        if not isinstance(value, torch.Tensor):
            kind = torch.int64 if isinstance(value, int) and not isinstance(value, bool) else torch.float64
            value = torch.tensor(value, dtype=kind, device="cpu")
        elif value.dim() and value.numel() == 1:
            value = value.detach().reshape(())
        repeat = self._scalar_repeats.get(name, 0)
        self._scalar_repeats[name] = repeat + 1
        root_name = root_name or (self.roots[0].name if self.roots else "")
        origin, moment = Origin(root_name, "", "scalar", name), Moment(step, None, "train")
        self.observe(origin, moment, "forward", 0, repeat, keep, value, note=note)

    def tap(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor by name, and the gradient that arrives at it (the same row with phase ``backward``)."""
        root, path = self.locate(module)
        rule_set = self._name_rule_set("tap", name)
        if not self.masks[rule_set] or root is None or (self._errors and self._is_disarmed("tap", name)):
            return
        slice_, phase = root.slice_now()
        key = (path, name, phase)
        seen, call, _ = self._taps.get(key, _NEVER_TAPPED)
        call = call + 1 if seen is slice_ else 0
        with_graph = torch.is_grad_enabled()
        if phase == "recompute":  # of what the forward saw with a graph, the gradient is watched already
            with_graph = with_graph and not self._taps.get((path, name, "forward"), _NEVER_TAPPED)[2]
        self._taps[key] = (slice_, call, with_graph)
        keep = self.keep_of(rule_set, call)
        if not keep:
            return
        origin = Origin(root.name, path, "tap", name)
        is_in_region = root.model_parallel is not None and has_owner(tensor)
        chunk = self.neighbours.place_of(tensor) if is_in_region else None
        self.observe(origin, slice_.moment, phase, call, 0, keep, tensor, chunk=chunk)
        if with_graph and requires_gradient(tensor):
            hook = self.watch_gradient(tensor, origin, slice_.moment, call, keep)
            hook.chunk = None if chunk is None else chunk_of_gradient(chunk)

    def _name_rule_set(self, site: str, name: str) -> int:
        return self.selection.narrow(self.selection.rule_sets("", "", False)[site], name)

    def locate(self, module: nn.Module | None) -> tuple[Root | None, str]:
        """The root and path of a module; the first root and its top where the module is not known."""
        for root in self.roots:
            if module is not None and (path := root.path_of(module)) is not None:
                return root, path
        return (self.roots[0], "") if self.roots else (None, "")

    def add_root(self, module: nn.Module, name: str | None) -> Root:
        """Put hooks on a model. A root that it contains is taken over, with its name."""
        for gone in [root for root in self.roots if root.module() is None]:
            self.remove_root(gone)
        inside = {id(m) for m in module.modules()}
        taken = [root for root in self.roots if (inner := root.module()) is not None and id(inner) in inside]
        for root in taken:
            self.remove_root(root)
            self.past_roots.remove(root)
        if name is None:
            name = taken[0].name if taken else self._free_name()
        root = Root(self, module, name)
        self.roots.append(root)
        self._look_for_large(module)
        return root

    def _look_for_large(self, module: nn.Module) -> None:
        """Say at the start where parameters that a rule asks for have more bytes than the pool."""
        if not self.selection.asks_for("param", "grad", "optim"):
            return
        sizes = [(local_bytes(parameter), name) for name, parameter in module.named_parameters()]
        nbytes, name = max(sizes, default=(0, ""))
        if nbytes > self.pool.capacity_bytes:
            self.events.add("too_large", _NO_ROOM["too_large"].format(where=name, nbytes=nbytes, pool=self.pool))

    def renew_grown_roots(self) -> bool:
        """Put hooks on modules that joined a model after its first call. True where there were any."""
        grown = [root for root in self.roots if root.has_grown()]
        for root in grown:
            root.renew()
        return bool(grown)

    def remove_root(self, root: Root) -> None:
        """Take a root's hooks off; the manifest still tells of it."""
        root.remove()
        self.roots.remove(root)
        self.past_roots.append(root)

    def _free_name(self) -> str:
        used = {root.name for root in self.roots + self.past_roots}
        return next(n for i in itertools.count() if (n := f"model_{i}" if i else "model") not in used)

    def knows(self, module: nn.Module) -> bool:
        """Whether a module lies in a root already."""
        return any(root.path_of(module) is not None for root in self.roots)

    def close(self) -> None:
        """Remove every hook; what was put on the channel stays there."""
        self._record_losses()
        self.is_open = False
        self.neighbours.flush()
        for root in self.roots:
            root.remove()
        self.roots.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        for stager in self._stagers.values():
            stager.close()


def _num_parts(nbytes: int, keep: int) -> int:
    """How many rows a tensor of so many bytes makes."""
    return -(-nbytes // PART_BYTES) if keep & KEEP_TENSOR and nbytes > PART_BYTES else 1


def _is_out_of_memory(error: Exception) -> bool:
    """Torch's allocator of host memory has no exception of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


_FOUND = '{"found":"backward"}'
_MASKED = '{"masked":true}'
_NO_STATISTICS_OF_PARTIAL = '{"no_statistics":"Partial"}'
_NO_ROOM = {
    "too_large": "{where} has {nbytes} bytes, more than the pool ({pool.capacity_bytes}): no copy of it is recorded; "
    "raise RECORDER_POOL_BYTES or select less",
    "pool_full": "the pool ({pool.capacity_bytes} bytes) is full: values are dropped and counted until half of it is "
    "free; a faster disk, a larger RECORDER_POOL_BYTES or fewer values help",
}
