"""Capture: what hooks do when they fire, on the training thread.

`Capture.observe` numbers a value, copies it into the pool and puts it on the channel; everything else happens on the
writer thread. Nothing here may open a file, print, issue a collective, sync a device, use a global random generator,
hold a lock while bytes are copied, or raise into training.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..config import SITES, Settings
from ..records import KEEP_STATS, KEEP_TENSOR, PART_BYTES, Chunk, Moment, Origin, Staged
from . import hooks, staging, tree
from .clock import Clock, RootClock, Slice
from .events import Events, comes_from_signal_handler
from .parallel import DataParallel, find_data_parallel
from .pool import Pool
from .select import NOTHING, Selection, scalar_keep
from .values import DTYPES, UnsupportedKind, plain

_MAX_HOOK_ERRORS = 10
"""Errors of one module's site after which it is left alone."""
_MAX_LEAF_HOOKS = 4096
_MAX_LEAVES = 4096
_MAX_LATE_LOOKS = 100
"""Calls of a root in which a data-parallel wrapper is looked for: it may be made after an evaluation or an attach."""
_NEVER_TAPPED = (None, -1, False)
_numbers = itertools.count(1)


class Channel(Protocol):
    """Where staged records go; the writer's front door. Neither call blocks."""

    def put(self, staged: Staged) -> None: ...

    def count_drop(self, reason: str, num_rows: int = 1) -> None: ...


class Nesting(threading.local):
    """How deep this thread is inside calls of roots."""

    depth = 0
    outermost: Root | None = None


class Capture:
    """One recording's training side: selection, clock, pool and roots."""

    def __init__(self, *, settings: Settings, rank: int, pool: Pool, channel: Channel, events: Events) -> None:
        self.settings = settings
        self.selection = Selection(settings.rules, rank)
        self.masks = self.selection.masks
        self.clock = Clock()
        self.pool = pool
        self.channel = channel
        self.events = events
        self.roots: list[Root] = []
        self.past_roots: list[Root] = []
        self.nesting = Nesting()
        self.is_open = True
        self.every_call_is_a_step = False
        """Inference: no optimizer counts the steps."""
        self.has_seen_forward = False
        """Whether a root was ever seen to run with gradients; under compile its own hooks may be compiled away."""
        self._sequence = itertools.count()
        self._stagers: dict[str, staging.Stager] = {}
        self._leaf_hooks: deque[Any] = deque()
        self._taps: dict[tuple[str, str, str], tuple[Slice | None, int, bool]] = {}
        self._scalar_repeats: dict[str, int] = {}
        self.step_changed()

    @property
    def observed(self) -> int:
        """Rows numbered so far; any thread. Read off the counter's repr, the one way that does not advance it."""
        return int(repr(self._sequence)[6:-1])

    def step_changed(self) -> None:
        """The step has moved: work out what is kept, and drop what belonged to the old step."""
        self.selection.at_step(self.clock.step)
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._taps.clear()
        self._scalar_repeats.clear()

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
        *,
        scope: str | None = None,
        chunk: Chunk | None = None,
        note: str | None = None,
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
        """
        try:
            local, chunk = plain(tensor, chunk)
            nbytes = local.nbytes
            stager = self._stagers.get(local.device.type) or self._stager(local.device.type)
        except UnsupportedKind as error:
            self._drop(str(error), 1)
            self.events.add(
                "unsupported",
                f"{origin.module_path or origin.root}:{origin.site}:{origin.name}: {error}",
                key=str(error),
            )
            return
        if chunk is not None and keep & KEEP_STATS and '"Partial"' in chunk.placements:
            keep &= ~KEEP_STATS  # statistics of summands say nothing of the sum
            note = _NO_STATISTICS_OF_PARTIAL
        parts = -(-nbytes // PART_BYTES) if keep & KEEP_TENSOR and nbytes > PART_BYTES else 1
        settings = self.settings
        block = self.pool.take(nbytes)
        if block is None and settings.policy == "wait":
            block = self.pool.take_or_wait(
                nbytes,
                step=moment.step,
                per_step_s=settings.wait_s_per_step,
                stalled_s=settings.wait_s_stalled,
                per_run_s=settings.wait_s_per_run,
            )
        if block is None:
            reason = "too_large" if nbytes > self.pool.capacity_bytes else "pool_full"
            self._drop(reason, parts)
            self.events.add(reason, _NO_ROOM[reason].format(origin=origin, nbytes=nbytes, pool=self.pool), key=reason)
            return
        try:
            ready = stager.copy(local, block)
        except Exception as error:
            block.release()
            self.hook_failed(f"{origin.module_path or origin.root}:{origin.site}", error)
            return
        except BaseException:
            block.release()
            raise
        sequence = self._number(parts)
        self.channel.put(
            Staged(
                sequence,
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
            )
        )

    def _stager(self, device_type: str) -> staging.Stager:
        factory = staging.STAGERS.get(device_type)
        if factory is None:
            raise UnsupportedKind(f"unsupported_device:{device_type}")
        stager = self._stagers[device_type] = factory(self.pool)  # type: ignore[call-arg]
        return stager

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
        self._drop("hook_error", 1)
        self.events.add(
            "hook_error", f"recording {where} failed: {type(error).__name__}: {error}", key=where, exception=error
        )

    def watch_gradient(self, tensor: torch.Tensor, origin: Origin, moment: Moment, call: int, keep: int) -> None:
        """Record the gradient that arrives at ``tensor``, each time one does."""
        hook = hooks.GradientArrives(self, origin, moment, call, keep)
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:
            hook.handle = handle
            self.keep_leaf_hook(handle)

    def keep_leaf_hook(self, handle: Any) -> None:
        """A hook on a leaf outlives the graph: it is removed at the next step, or when too many wait for one."""
        self._leaf_hooks.append(handle)
        if len(self._leaf_hooks) > _MAX_LEAF_HOOKS:
            self._leaf_hooks.popleft().remove()

    def scalar(self, name: str, value: Any, root_name: str | None = None) -> None:
        """Record a number of this step: a float or a tensor of one element, which is not synced."""
        rule_set = self._name_rule_set("scalar", name)
        keep = scalar_keep(self.masks[rule_set])
        if not keep:
            return
        if not isinstance(value, torch.Tensor):
            kind = torch.int64 if isinstance(value, int) and not isinstance(value, bool) else torch.float64
            value = torch.tensor(value, dtype=kind, device="cpu")
        elif value.dim() and value.numel() == 1:
            value = value.detach().reshape(())
        repeat = self._scalar_repeats.get(name, 0)
        self._scalar_repeats[name] = repeat + 1
        root_name = root_name or (self.roots[0].name if self.roots else "")
        moment = Moment(self.clock.step, None, "train")
        self.observe(Origin(root_name, "", "scalar", name), moment, "forward", 0, repeat, keep, value)

    def tap(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor by name, and the gradient that arrives at it (the same row with phase ``backward``)."""
        root, path = self.locate(module)
        rule_set = self._name_rule_set("tap", name)
        if not self.masks[rule_set] or root is None:
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
        self.observe(origin, slice_.moment, phase, call, 0, keep, tensor)
        if tensor.requires_grad and with_graph:
            self.watch_gradient(tensor, origin, slice_.moment, call, keep)

    def _name_rule_set(self, site: str, name: str) -> int:
        return self.selection.narrow(self.selection.rule_set("", "", False, site), name)

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
        return root

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
        self.is_open = False
        for root in self.roots:
            root.remove()
        self.roots.clear()
        for handle in self._leaf_hooks:
            handle.remove()
        for stager in self._stagers.values():
            stager.close()


_NO_STATISTICS_OF_PARTIAL = '{"no_statistics":"Partial"}'
_NO_ROOM = {
    "too_large": "{origin.module_path}:{origin.site} has {nbytes} bytes, more than the pool ({pool.capacity_bytes}); "
    "raise RECORDER_POOL_BYTES or select less",
    "pool_full": "the pool ({pool.capacity_bytes} bytes) is full: values are dropped and counted until half of it is "
    "free; a faster disk, a larger RECORDER_POOL_BYTES or fewer values help",
}


class Root:
    """An outermost module with everything that hangs on it."""

    def __init__(self, capture: Capture, module: nn.Module, name: str) -> None:
        self.capture = capture
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.clock = RootClock(capture.clock)
        self.num_calls = 0
        self.num_attached = 0
        self._number = next(_numbers)
        self.data_parallel: DataParallel | None = None
        """The ranks that share its batch, for the manifest; None where no wrapper says so."""
        self._learn_data_parallel(module, thorough=True)
        self._install(module)

    def _learn_data_parallel(self, module: nn.Module, *, thorough: bool = False) -> None:
        try:
            self.data_parallel = find_data_parallel(module, thorough=thorough)
        except Exception as error:
            text = f"{self.name}: the ranks that share its batch are not known: {type(error).__name__}: {error}"
            self.capture.events.add("data_parallel_unknown", text, key=self.name, exception=error)

    def _install(self, module: nn.Module) -> None:
        nodes = tree.walk(module)
        self.class_name = nodes[0].class_name
        self.paths = [node.path for node in nodes]
        self._located = {id(m): (weakref.ref(m), n.path) for n in nodes for m in (n.module, n.owner)}
        self._located[id(module)] = weakref.ref(module), ""
        self.watches: list[Watch] = []
        self._handles: list[Any] = []
        hooks.ROOTS[self._number] = self
        self._add_hooks(module, nodes)
        self.modules = [_describe(node, watch) for node, watch in zip(nodes, self.watches, strict=True)]
        """What the manifest says of each module; nothing here keeps the model alive."""

    def renew(self) -> None:
        """Take the hooks off and put them on again, on the modules that there are now."""
        module = self.module()
        if module is not None:
            self.remove()
            self._install(module)

    def has_grown(self) -> bool:
        """Whether the model has modules that it had not when it was attached."""
        module = self.module()
        return module is not None and any(self.path_of(inner) is None for inner in module.modules())

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module of this root, or None."""
        reference, path = self._located.get(id(module), (None, ""))
        return path if reference is not None and reference() is module else None

    def _add_hooks(self, module: nn.Module, nodes: list[tree.Node]) -> None:
        compiled: list[str] = []
        for node in nodes:
            wrapper = node.module is not node.owner
            inside = any(node.path == path or path == "" or node.path.startswith(path + ".") for path in compiled)
            wants_hooks = node.is_callable and not inside and (wrapper or not node.is_compiled)
            self.watches.append(Watch(self, node, wants_hooks=wants_hooks))
            if node.is_compiled:
                compiled.append(node.path)
        self._handles.append(module.register_forward_pre_hook(hooks.RootBegins(self._number), prepend=True))
        self._handles.append(module.register_forward_hook(hooks.RootEnds(self._number), always_call=True))
        self._say_compiled(compiled)

    def _say_compiled(self, paths: list[str]) -> None:
        if paths:
            paths = [p for p in paths if not any(q != p and (q == "" or p.startswith(q + ".")) for q in paths)]
            shown = ", ".join(repr(path) if path else "the whole model" for path in paths[:3])
            self.capture.events.add(
                "compiled",
                f"{self.name}: values inside compiled modules are not recorded ({shown}{', ...' * (len(paths) > 3)}); "
                "parameters, gradients and optimizer state are",
                key=self.name,
            )

    def mark_silent_as_compiled(self) -> None:
        """Something was compiled, so a module with hooks that never fired in a whole step was compiled with them."""
        silent = {watch.node_path for watch in self.watches if watch.is_silent}
        for described in self.modules:
            described["compiled"] = described["compiled"] or described["path"] in silent
        self._say_compiled(sorted(silent))

    def begins(self, module: nn.Module) -> None:
        """A call of the root begins."""
        if torch._C._current_graph_task_id() != -1:
            return
        nesting = self.capture.nesting
        if nesting.depth == 1 and nesting.outermost is self:
            nesting.depth = 0  # its last call was interrupted, as by Ctrl-C in a notebook, and told nobody
        nesting.depth += 1
        if nesting.depth > 1:
            return
        nesting.outermost = self
        moved = self.clock.begin(
            with_grad=torch.is_grad_enabled(),
            training=module.training,
            every_call_is_a_step=self.capture.every_call_is_a_step,
            is_first_call=self.num_calls == 0,
        )
        if self.data_parallel is None and self.num_calls < _MAX_LATE_LOOKS:
            self._learn_data_parallel(module)
        self.num_calls += 1
        if torch.is_grad_enabled():
            self.capture.has_seen_forward = True
        if moved:
            self.capture.step_changed()

    def ends(self, output: Any) -> None:
        """A call of the root has returned, or raised (then ``output`` is None)."""
        nesting = self.capture.nesting
        if torch._C._current_graph_task_id() != -1 or nesting.depth == 0:
            return
        nesting.depth -= 1
        if nesting.depth:
            return
        current = self.clock.active
        self.clock.end()
        if current is not None and torch.is_grad_enabled():
            for _, tensor in tree.tensor_leaves(output):
                if tensor.requires_grad and not current.has_gradient:
                    handle = tensor.register_hook(hooks.GradientSeen(self.clock, current))
                    if tensor.is_leaf:
                        self.capture.keep_leaf_hook(handle)
        if current is not None and self.capture.every_call_is_a_step:
            self.record_state(("param", "buffer"), current.moment, "forward", 0)

    def slice_now(self) -> tuple[Slice, str]:
        """The slice and phase of a value seen now."""
        if torch._C._current_graph_task_id() != -1:
            return self.clock.recomputed(), "recompute"
        module = self.module()
        training = module.training if module is not None else True
        return self.clock.current(with_grad=torch.is_grad_enabled(), training=training), "forward"

    def failed(self, error: Exception) -> None:
        self.capture.hook_failed(self.name, error)

    def record_state(self, sites: tuple[str, ...], moment: Moment, phase: str, repeat: int) -> None:
        """Record parameters or buffers of every module that a rule selects."""
        for watch in self.watches:
            for site in sites:
                if watch.capture.masks[watch.rule_sets[site]]:
                    watch.record_state(site, moment, phase, repeat)

    def parameters(self) -> Iterator[tuple[Watch, str, nn.Parameter]]:
        """Every parameter once, with the watch of the module that owns it and its name there."""
        seen: set[int] = set()
        for watch in self.watches:
            for name, parameter in watch.own("_parameters"):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield watch, name, parameter

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        for watch in self.watches:
            watch.remove()
        self.watches.clear()
        hooks.ROOTS.pop(self._number, None)


def _describe(node: tree.Node, watch: Watch) -> dict[str, Any]:
    return {
        "path": node.path,
        "class": node.class_name,
        "source": tree.source_line(node.owner),
        "aliases": node.aliases,
        "sites": [site for site, rule_set in watch.rule_sets.items() if rule_set],
        "params": [name for name, _ in watch.own("_parameters")],
        "buffers": [name for name, _ in watch.own("_buffers")],
        "compiled": node.is_compiled,
    }


class Watch:
    """One module under hooks: what is selected of it, and the n-th call it is in."""

    __slots__ = (
        "_calls",
        "_errors",
        "_graphless_slice",
        "_handles",
        "_leaves",
        "_number",
        "_open_calls",
        "_owner",
        "_phase_slice",
        "_signature",
        "_was_called",
        "capture",
        "class_name",
        "module",
        "node_path",
        "pre_hook",
        "root",
        "rule_sets",
    )

    def __init__(self, root: Root, node: tree.Node, *, wants_hooks: bool) -> None:
        self.capture = root.capture
        self.root = root
        self.node_path = node.path
        self.class_name = node.class_name
        self.module: Callable[[], nn.Module | None] = weakref.ref(node.module)
        self._owner: Callable[[], nn.Module | None] = weakref.ref(node.owner)
        selection = self.capture.selection
        self.rule_sets = {
            site: selection.rule_set(node.path, node.class_name, node.is_leaf, site)
            if node.is_callable or site in ("param", "grad", "buffer", "optim")
            else NOTHING
            for site in SITES
        }
        self._leaves: dict[tuple[str, str], tuple[Origin, int]] = {}
        self._calls = {"forward": 0, "recompute": 0}
        self._phase_slice: dict[str, Slice | None] = {"forward": None, "recompute": None}
        self._open_calls: dict[int, list[int]] = {}
        """By thread, the calls that have begun and not returned: a module may call itself."""
        self._signature: tree.Signature | None = None
        self._errors: dict[str, int] = {}
        self._handles: list[Any] = []
        self._was_called = False
        self._graphless_slice: Slice | None = None
        """The latest slice in which a forward ran without a graph, as a reentrant checkpoint does."""
        self._number = next(_numbers)
        self.pre_hook: hooks.BeforeForward | None = None
        if wants_hooks:
            hooks.WATCHES[self._number] = self
            if self.rule_sets["input"] or self.rule_sets["grad_input"]:
                self.pre_hook = hooks.BeforeForward(self._number)
                self._handles.append(node.module.register_forward_pre_hook(self.pre_hook, with_kwargs=True))
            if self.pre_hook or self.rule_sets["output"] or self.rule_sets["grad_output"]:
                self._handles.append(node.module.register_forward_hook(hooks.AfterForward(self._number), prepend=True))

    def _leaf(self, site: str, name: str) -> tuple[Origin, int]:
        """The origin of a leaf and the rules that select it; made at its first sight."""
        key = (site, name)
        found = self._leaves.get(key)
        if found is None:
            if len(self._leaves) >= _MAX_LEAVES:
                self._leaves.clear()  # names that change with the data, such as keys of samples
            origin = Origin(self.root.name, self.node_path, site, name)
            found = self._leaves[key] = origin, self.capture.selection.narrow(self.rule_sets[site], name)
        return found

    def _enter(self, slice_: Slice, phase: str) -> int:
        """The number of the call that begins, within its slice."""
        if self._phase_slice[phase] is not slice_:
            self._phase_slice[phase] = slice_
            self._calls[phase] = -1
            if phase == "forward":
                self._open_calls.clear()  # left behind by forwards that raised
        self._calls[phase] += 1
        return self._calls[phase]

    def _has_new_graph(self, slice_: Slice, phase: str) -> bool:
        """Whether gradients of this call's values are seen here for the first time.

        Without reentry, a recompute is given the very inputs of the forward, whose gradients are watched already.
        """
        with_grad = torch.is_grad_enabled()
        if phase == "forward":
            if not with_grad:
                self._graphless_slice = slice_
            return with_grad
        return with_grad and self._graphless_slice is slice_

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to run."""
        capture = self.capture
        slice_, phase = self.root.slice_now()
        call = self._enter(slice_, phase)
        self._open_calls.setdefault(threading.get_ident(), []).append(call)
        masks = capture.masks
        value_mask, gradient_mask = masks[self.rule_sets["input"]], masks[self.rule_sets["grad_input"]]
        if not value_mask and not gradient_mask:
            return
        if self._signature is None:
            module = self._owner()
            if module is None:
                return
            self._signature = tree.Signature(module)
        with_grad = bool(gradient_mask) and self._has_new_graph(slice_, phase)
        for name, tensor in self._signature.leaves(args, kwargs):
            self._see("input", "grad_input", name, tensor, slice_.moment, phase, call, with_grad)

    def after_forward(self, output: Any) -> None:
        """The module's forward has returned."""
        self._was_called = True
        masks = self.capture.masks
        value_mask, gradient_mask = masks[self.rule_sets["output"]], masks[self.rule_sets["grad_output"]]
        if not value_mask and not gradient_mask and self.pre_hook is None:
            return
        slice_, phase = self.root.slice_now()
        begun = self._open_calls.get(threading.get_ident()) if self.pre_hook is not None else None
        call = begun.pop() if begun else self._enter(slice_, phase)
        with_grad = bool(gradient_mask) and self._has_new_graph(slice_, phase)
        if value_mask or with_grad:
            for name, tensor in tree.tensor_leaves(output):
                self._see("output", "grad_output", name, tensor, slice_.moment, phase, call, with_grad)

    def _see(
        self,
        site: str,
        gradient_site: str,
        name: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        call: int,
        with_grad: bool,
    ) -> None:
        keep_of = self.capture.keep_of
        origin, rule_set = self._leaf(site, name)
        if keep := keep_of(rule_set, call):
            self.capture.observe(origin, moment, phase, call, 0, keep, tensor)
        if with_grad and tensor.requires_grad:
            origin, rule_set = self._leaf(gradient_site, name)
            if keep := keep_of(rule_set, call):
                self.capture.watch_gradient(tensor, origin, moment, call, keep)

    def own(self, kind: str) -> Iterator[tuple[str, Any]]:
        """The module's own parameters or buffers by name."""
        module = self._owner()
        if module is not None:
            yield from ((name, value) for name, value in getattr(module, kind).items() if value is not None)

    def record_state(self, site: str, moment: Moment, phase: str, repeat: int) -> None:
        """Record the module's own parameters or buffers."""
        for name, tensor in self.own("_parameters" if site == "param" else "_buffers"):
            self.record(site, name, tensor, moment, phase, repeat)

    def record(
        self,
        site: str,
        name: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        repeat: int,
        *,
        scope: str | None = None,
        chunk: Chunk | None = None,
        note: str | None = None,
    ) -> None:
        """Record one named tensor of the module where a rule selects it."""
        if self.rule_sets[site] == NOTHING:
            return
        origin, rule_set = self._leaf(site, name)
        if keep := self.capture.keep_of(rule_set, 0):
            try:
                self.capture.observe(
                    origin, moment, phase, 0, repeat, keep, tensor, scope=scope, chunk=chunk, note=note
                )
            except Exception as error:
                self.failed(site, error)

    def failed(self, site: str, error: Exception) -> None:
        """Count an error of ours; a site that keeps failing is left alone."""
        self.capture.hook_failed(f"{self.node_path or self.root.name}:{site}", error)
        self._errors[site] = self._errors.get(site, 0) + 1
        if self._errors[site] == _MAX_HOOK_ERRORS:
            gradient_site = {"input": "grad_input", "output": "grad_output"}.get(site, site)
            self.rule_sets[site] = self.rule_sets[gradient_site] = NOTHING
            self._leaves.clear()

    @property
    def is_silent(self) -> bool:
        """It has hooks, and its module was never seen to run."""
        return bool(self._handles) and not self._was_called

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        hooks.WATCHES.pop(self._number, None)
