"""A root: the outermost module of a model under hooks, with its hooks and its calls.

Nothing here may raise into training, keep a model alive, or read a tensor's values.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...observe import tree
from ...observe.clock import RootClock, Slice
from ...observe.tree import has_compiled, has_compiled_anything
from ...records import StepPosition, ValuePlace
from ...rules import Rule
from ...sites import GRADIENT_OF, HELD_BY_MODULES, VALUES_OF_CALLS
from ...system.processes import comes_from_signal_handler
from ...taps import module_taps
from ...taps.instrument import has_tap, put_tap
from ...taps.module_taps import Where
from ..local_values import requires_gradient
from ..parallel.cut_calls import CutCalls, cut_calls, cut_inside
from ..parallel.groups import stage_call
from . import callbacks
from .callbacks import CaptureForHooks, GradientSeen
from .given import SHIFT_STEPS, GivenArguments
from .inventory import Inventory
from .jitter import JitterInputs, add_jitter
from .module import HookedModule, StateTime
from .module_facts import ids_of
from .module_hooks import GroupedHooks
from .sharding import RootParameters, SharedWork
from .training_notes import TrainingNotes

_LIKE_VALIDATION = 4
"""Calls without gradients in a row, without an update in between, that look like a validation."""
_MAX_LATE_LOOKS = 5
"""The number of first calls that look for a data-parallel wrapper. The wrapper may be made after the first call."""
_numbers = itertools.count(1)
_calls = itertools.count(1)


_NOTHING_MOVED = (
    "jitter changed nothing: the model got no floating-point tensor, and none of its nn.Embedding modules was seen "
    "to run (compiled, scripted, or of another class); this run equals a run without jitter, and is no twin"
)


class Root:
    """A model under hooks, with its clock and the inventory of its modules."""

    def __init__(
        self, capture: CaptureForHooks, module: nn.Module, name: str, *, clock: RootClock | None = None,
        is_elsewhere: Callable[[Root, nn.Module], bool], inner_roots: Sequence[Root] = (),
    ) -> None:  # fmt: skip
        """Put hooks on the outermost module of a model.

        `clock` is the clock of an earlier root with this name. Its counts continue, so that no row's key is used twice.
        `is_elsewhere` returns whether a module belongs to another root, which records the module under a path of its
        own. `inner_roots` are the roots that the module contains. Their calls share this root's micro-steps.
        """
        self.capture = capture
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.parameters = RootParameters(capture, name, self.module, self.path_of)
        self.is_first_use = self.parameters.is_first_use
        self.work = SharedWork(capture, name, self.parameters)
        self.marked_ranks: tuple[int, ...] = ()  # here and in `work`, because hooks read it for each value
        inner_clock = inner_roots[0].clock if inner_roots else None
        self.clock: RootClock = clock or inner_clock or RootClock(capture.clock)
        self._inner_roots = inner_roots
        self.given = GivenArguments()
        for inner in inner_roots:
            inner.clock = self.clock
        self._is_elsewhere = is_elsewhere
        self._entries: list[weakref.ref[nn.Module]] = []
        """The modules whose outermost calls are calls of the root: the root's own module, and inner modules that the
        program calls directly."""
        self._entered: Callable[[], nn.Module | None] = lambda: None
        """The module at which the latest call of the root, which may be under way, began."""
        self.num_calls = 0
        self.last_call = 0
        """The number of the latest call, among those of all models. 0 if it was without gradients or in evaluation."""
        self.thread: int | None = None
        """The thread that made the last call. None before the first call, and if a compiled model has no hooks."""
        self.attachments: list[Callable[[], Any]] = []
        """Weak references to the root's handles that the program holds and has not closed."""
        self.is_kept = False
        """True if the program threw the root's handle away at once. Nobody can close the root, so the root lasts."""
        self._number = next(_numbers)
        self._began_late = has_compiled_anything()
        """Whether anything in the process, perhaps this model, had been compiled when the root was attached."""
        self.artefact: str | None = None
        """The name of the model in a loaded artefact (exported, scripted) that the root represents. Otherwise None."""
        self.is_stand_in = False
        """Whether the root has no module of the program. Nobody can close the root then."""
        self._tap_paths: dict[str, str] = {}
        self.is_over_meshes = False
        """Whether parameters are or were DTensors. Plain tensors may then share memory with DTensors."""
        self.jitter: JitterInputs | None = None
        """The hook that perturbs the root's inputs. None if the setting `jitter` is off."""
        self.moved: dict[str, float] | None = None
        """By kind of value that `jitter` has perturbed, the largest relative change. None before any perturbation."""
        self._install(module)
        self._learn_groups(module)

    @property
    def shared_work(self) -> dict[str, dict[str, Any] | None]:
        """Return how the root shares work, by kind, for the manifest. An unknown kind is None. Any thread may call."""
        return {
            "data_parallel": self.work.data_parallel,
            "model_parallel": self.work.model_parallel,
            "pipeline": self.work.pipeline,
            "unshared": self.work.rank_local,
            "jitter": None
            if self.moved is None
            else {"moved": list(self.moved), "eps": max(self.moved.values(), default=0.0)},
        }

    def has_moved(self, kind: str, eps: float) -> None:
        """Note that the setting `jitter` has changed inputs or embeddings by the relative amount `eps`."""
        if self.moved is None or self.moved.get(kind, 0.0) < eps:
            self.moved = {**(self.moved or {}), kind: eps}
            self.capture.events.has_changed = True

    def jitter_failed(self, error: Exception) -> None:
        """Report an error of the recorder while it perturbed a value. The value stays unchanged."""
        if comes_from_signal_handler(error):
            raise error
        text = f"{self.name}: jitter failed: {type(error).__name__}: {error}"
        self.capture.events.add("jitter_failed", text, key=self.name, exception=error)

    def say_if_nothing_moved(self) -> None:
        """Warn if the setting `jitter` asks for a perturbed run and nothing was perturbed."""
        if self.capture.settings.jitter and self.moved is None:
            self.moved = {}
            self.capture.events.add("nothing_moved", f"{self.name}: {_NOTHING_MOVED}", key=self.name)

    def _learn_groups(self, module: nn.Module) -> None:
        self.work.learn(module, self.modules)
        self.marked_ranks, self.is_over_meshes = self.work.marked_ranks, self.work.is_over_meshes

    def _install(self, module: nn.Module) -> None:
        nodes = tree.walk(module, lambda inner: self._is_elsewhere(self, inner))
        self.class_name = nodes[0].class_name
        self.modules: list[HookedModule] = []
        self._by_path: dict[str, HookedModule] = {}
        self.modules_by_tap: dict[str, HookedModule] = {}
        """The modules that have a tap (a point whose value a graph records), by the text of the tap's `Where`."""
        self.inventory = Inventory(
            self.capture, self.name, self.modules, self.modules_by_tap, self.module_at, began_late=self._began_late
        )
        self._innermost: Callable[[], nn.Module | None] = weakref.ref(tree.innermost(module))
        self._located = {id(m): (weakref.ref(m), n.path) for n in nodes for m in (*n.wrappers, n.owner)}
        self._located[id(module)] = weakref.ref(module), ""
        self._own_taps: list[Callable[[], nn.Module | None]] = []
        self._handles: list[Any] = []
        callbacks.ROOTS[self._number] = self
        self._add_hooks(module, nodes)
        self.parameters.install(self.modules)
        self.inventory.describe(nodes, self.parameters.flats)
        self.notes = TrainingNotes(self.inventory, self.modules, self.module_at, nodes)

    def renew(self) -> None:
        """Remove the hooks, and put hooks on the modules that the model has now."""
        module = self.module()
        if module is not None:
            before, is_validated = self.inventory, self.notes.is_validated_in_training
            self.remove()
            self._install(module)
            self.inventory.go_on_from(before)
            self.notes.is_validated_in_training = is_validated

    def has_grown(self) -> bool:
        """Whether the model has modules that it did not have when hooks were put on the model."""
        module = self.module()
        return module is not None and any(
            self.path_of(inner) is None and not self._is_elsewhere(self, inner) for inner in module.modules()
        )

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of a module of this root. Return None for a module outside of the root."""
        reference, path = self._located.get(id(module), (None, ""))
        return path if reference is not None and reference() is module else None

    def _add_hooks(self, module: nn.Module, nodes: list[tree.Node]) -> None:
        compiled: list[str] = []
        late: list[str] = []
        cut_below: dict[str, CutCalls | None] = {}
        for node in nodes:
            wrapper = node.module is not node.owner
            inside = any(node.path == path or path == "" or node.path.startswith(path + ".") for path in compiled)
            wants_hooks = node.is_callable and not inside and (wrapper or not node.is_compiled)
            cut_below[node.path] = cut_inside(node.owner)
            cut = cut_calls(node.owner) or cut_below.get(node.path.rpartition(".")[0])
            self.modules.append(HookedModule(self, node, wants_hooks=wants_hooks, cut=cut))
            if node.is_compiled:
                compiled.append(node.path)
                if not inside and has_compiled(node.owner, node.module):
                    late.append(node.path)
            if self.capture.settings.compiled == "tap":  # `torch.compile` may be called later
                self._tap(node, self.modules[-1])
            self.modules_by_tap |= {where.text: self.modules[-1] for where in module_taps.where_tapped(node.owner)}
        self.grouped = GroupedHooks(self.capture)
        self._group_modules()
        if not isinstance(module, torch.jit.ScriptModule):
            if self.capture.settings.jitter:
                self.jitter, handles = add_jitter(nodes, self._number, self.capture.settings.jitter)
                self._handles += handles
            entries = [entry for reference in self._entries if (entry := reference()) not in (None, module)]
            self._entries.clear()
            for entry in (module, *entries):
                self.enter_at(entry)
        self.inventory.say_hidden(nodes, compiled, late)

    def enter_at(self, module: nn.Module) -> None:
        """Treat outermost calls of a module as calls of this root from now on."""
        self._entries.append(weakref.ref(module))
        if self.jitter is not None:
            self._handles.append(module.register_forward_pre_hook(self.jitter, prepend=True, with_kwargs=True))
        begins, ends = callbacks.RootBegins(self._number), callbacks.RootEnds(self._number)
        self._handles.append(tree.put_on(module.register_forward_pre_hook, begins, prepend=True))
        tree.keep_first(module._forward_pre_hooks)
        self._handles.append(tree.put_on(module.register_forward_hook, ends, always_call=True))

    def can_enter_at(self, module: nn.Module) -> bool:
        """Whether `enter_at` can take a module: it is no entry module yet, and its hooks are not inside a graph."""
        path = self.path_of(module)
        hooked = self.module_at(path) if path is not None else None
        outermost = self.module()
        if hooked is None or outermost is None or hooked.is_hidden or self.is_entry(module):
            return False
        is_hooked = hooked.module() is module or len(tree.unwrapped(module)) > 1
        # A module that was removed from the model is still in the inventory, but not among the model's modules.
        return is_hooked and any(inner is module for inner in outermost.modules())

    def go_on_from(self, before: Root) -> None:
        """Take over the entry modules of a root that this root replaces. Their calls are then calls of this root."""
        for entry in [entry() for entry in before._entries]:
            if entry is not None and self.can_enter_at(entry):
                self.enter_at(entry)

    def is_entry(self, module: nn.Module) -> bool:
        """Whether outermost calls of a module are calls of this root."""
        return any(entry() is module for entry in self._entries)

    def is_entered_at(self, module: nn.Module) -> bool:
        """Whether the latest call of the root, which may be under way, began at this module."""
        return self._entered() is module

    def _group_modules(self) -> None:
        self.grouped.group((one.rule_sets_of_hooks, one.hooks) for one in self.modules if one.node_path)

    def is_seen_at_tap(self, hooked: HookedModule) -> bool:
        """Whether a module without hooks is recorded through a tap (a point in a compiled graph)."""
        return any(one is hooked for one in self.modules_by_tap.values())

    def reselect(self, rules: Sequence[Rule]) -> None:
        """Apply new rules to the modules that they select. Called between two steps."""
        self.grouped.wake_all()
        for hooked in self.modules:
            if hooked.is_meant_by(rules):
                hooked.reselect()
        self._group_modules()
        self.inventory.reselect()

    def _tap(self, node: tree.Node, hooked: HookedModule) -> None:
        """Put taps on a module, so that a compiled graph records the values that hooks on the module cannot get."""
        tapped_sites = {where.site for where in module_taps.where_tapped(node.owner)}
        if not node.is_callable or tapped_sites:
            return
        for site in VALUES_OF_CALLS:
            if hooked.rule_sets[site] or hooked.rule_sets[GRADIENT_OF[site]]:
                put_tap(node, self.name, site)
                self._own_taps.append(weakref.ref(node.owner))

    def stands_for(self, where: str) -> None:
        """Make the root, which has no module, represent the loaded artefact (exported, scripted) that has this tap."""
        self.artefact = Where.from_text(where).root if where else ""
        self.is_stand_in = True

    def has_tap(self, where: str) -> bool:
        """Whether a tap is in this root: on a module, in TorchScript, or in the artefact that the root represents."""
        if where in self.modules_by_tap:
            return True
        parsed = Where.from_text(where) if where else None
        is_scripted = isinstance(self.module(), torch.jit.ScriptModule)  # TorchScript calls no Python hooks
        if self.artefact is None and is_scripted and parsed is not None and self.module_at(parsed.path) is not None:
            self.artefact = parsed.root
        return self.artefact == (parsed.root if parsed is not None else "")

    def module_at(self, path: str) -> HookedModule | None:
        """Return the `HookedModule` at a path. Return None if there is no module at the path."""
        if path not in self._by_path:
            self._by_path = {hooked.node_path: hooked for hooked in self.modules}
        return self._by_path.get(path)

    def path_of_tap(self, name: str) -> str:
        """Return the path of the module that calls `recorder.tap` with this name, or "" unless exactly one does.

        The op in the graph has the name of the tap, but not the module that called `recorder.tap`.
        """
        if name not in self._tap_paths:
            module = self.module()
            nodes = tree.walk(module) if module is not None else []
            paths = [node.path for node in nodes if has_tap(node.owner, name)]
            self._tap_paths[name] = paths[0] if len(paths) == 1 else ""
        return self._tap_paths[name]

    def step_is_over(self, *, has_compiled: bool) -> None:
        """Report which modules never ran in the first step. `has_compiled`: whether this process compiled anything."""
        self.say_if_nothing_moved()
        self.inventory.step_is_over(
            num_calls=self.num_calls, is_artefact=bool(self.artefact), has_compiled=has_compiled
        )

    def begins(self, module: nn.Module) -> None:
        """Begin a call of the root. `module` is the entry module, at which the call begins."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.thread = threading.get_ident()
        root_calls = self.capture.root_calls
        if root_calls.depth == 1 and root_calls.outermost is self and self.is_entered_at(module):
            root_calls.depth = 0  # the last call was interrupted, as by Ctrl-C in a notebook
        root_calls.depth += 1
        if root_calls.depth > 1:
            return
        root_calls.outermost = self
        self._entered = weakref.ref(module)
        stage = stage_call()
        self.capture.is_in_stage = stage is not None
        if stage is not None:
            self.work.pipeline = stage.pipeline
            if stage.is_trial:
                self.capture.pause()
                self.clock.begin_trial()
                return
        self.capture.resume()
        if self.capture.before_forward is not None and torch.is_grad_enabled():
            self.capture.before_forward()
        training = self.is_training
        self.clock.begin(
            with_grad=torch.is_grad_enabled(),
            training=training,
            every_call_is_a_step=self.capture.every_call_is_a_step,
            is_first_call=self.num_calls == 0,
            is_stage=stage is not None,
        )
        if self.clock.is_called_unevenly:
            self.notes.note_once("has_uneven_calls")
        is_corrected = self.notes.is_validated_in_training and self.clock.has_evaluated
        if is_corrected or self.clock.num_graphless == _LIKE_VALIDATION:
            self.notes.look_at_validation(self.clock, self.capture.clock.step)
        if self.num_calls < _MAX_LATE_LOOKS:
            if self.work.data_parallel is None and (outermost := self.module()) is not None:
                self._learn_groups(outermost)
            for hooked in self.modules:
                hooked.hooks.stay_last(hooked.module())
        self.num_calls += 1
        if torch.is_grad_enabled():
            self.capture.has_seen_forward = True
            self.last_call = next(_calls) if training else 0
        if self.capture.is_step_in_force:
            self.capture.call_begins()
        else:
            self.capture.step_changed()

    def ends(self, output: Any) -> None:
        """End a call of the root, which has returned or raised. ``output`` is None if the call has raised."""
        root_calls = self.capture.root_calls
        if torch._C._current_graph_task_id() != -1 or root_calls.depth == 0:
            return
        root_calls.depth -= 1
        if root_calls.depth:
            return
        if self.is_over_meshes:
            self.capture.aliases.end()
        current = self.clock.of_thread.active
        self.clock.end()
        if current is not None and current.moment.micro_step is None:
            return  # the call was a trial run of a pipeline stage
        if current is not None and torch.is_grad_enabled():
            for name, tensor in tree.tensor_leaves(output):
                if type(tensor) is torch.Tensor and tensor.grad_fn is not None:
                    if not tensor.dim():
                        self.capture.returned(self.name, name, tensor.grad_fn)
                    if current.moment.step < SHIFT_STEPS:
                        self.given.forget_labels(tensor)
                if not current.has_gradient and requires_gradient(tensor):
                    with torch._C.DisableTorchFunctionSubclass():
                        handle = tensor.register_hook(GradientSeen(self.clock, current))
                        is_leaf = tensor.is_leaf
                    if is_leaf:
                        self.capture.keep_leaf_hook(handle)
        if current is None:
            return
        if current.moment.mode == "no_grad" and not (self.is_training or self.capture.every_call_is_a_step):
            self.capture.add_evaluation(output, self.name)
        if self.capture.every_call_is_a_step:
            repeat = current.enter("forward", HELD_BY_MODULES)  # above 0 if the program has named the step
            for root in (self, *self._inner_roots):
                root.record_state(HELD_BY_MODULES, StateTime(current.moment, "forward", repeat))

    @property
    def is_training(self) -> bool:
        """The training flag of the module inside all wrappers. A wrapper's flag may be out of date."""
        module = self._innermost()
        return module is None or module.training

    def slice_now(self) -> tuple[Slice, str]:
        """Return the `Slice` (a forward of the root and its backward) and the phase of a value that is recorded now."""
        if torch._C._current_graph_task_id() != -1:
            return self.clock.recomputed(in_pipeline=self.work.pipeline is not None), "recompute"
        if (active := self.clock.of_thread.active) is not None:
            return active, "forward"
        return self.clock.current(with_grad=torch.is_grad_enabled(), training=self.is_training), "forward"

    def slice_of_tap(self, *, with_grad: bool) -> tuple[Slice, str]:
        """Return the `Slice` (a forward of the root and its backward) and the phase of a value at a tap in a graph.

        If the root's hooks are compiled away, taps begin the root's calls. The tap gives `with_grad`, because compiled
        code always runs with gradients disabled.
        """
        is_hidden = self.num_calls == 0 and self.capture.root_calls.depth == 0
        if not is_hidden or self.module() is None or torch._C._current_graph_task_id() != -1:
            return self.slice_now()
        training = self.is_training
        self.clock.begin(with_grad=with_grad, training=training, every_call_is_a_step=False, is_first_call=False)
        if not self.capture.is_step_in_force:
            self.capture.step_changed()
        active = self.clock.of_thread.active
        self.clock.end()
        assert active is not None
        return active, "forward"

    def gradient_at_tap(self, moment: StepPosition) -> None:
        """Note that a gradient has reached a tap in a graph, so that the next forward begins another micro-step."""
        slice_ = self.clock.recomputed()
        if self.num_calls == 0 and slice_.moment == moment:
            self.clock.gradient_arrived(slice_)

    def failed(self, error: Exception) -> None:
        """Count an error of the recorder. A root that keeps failing is removed, because it no longer knows the step."""
        if self.capture.site_failed(ValuePlace(self.name, "", "root", ""), error):
            step = self.capture.clock.step
            self.inventory.disarm_all(step)
            self.remove()

    def disarm(self, path: str, sites: tuple[str, ...], step: int) -> None:
        """Stop recording some sites of one module, and note in the inventory the first step without them."""
        for hooked in self.modules:
            if hooked.node_path == path:
                hooked.disarm(sites)
        self.inventory.disarm(path, sites, step)

    def record_state(self, sites: tuple[str, ...], at: StateTime) -> None:
        """Record the parameters or buffers of every module that a rule selects."""
        flat_ids = ids_of(self.parameters.flats)
        for hooked in self.modules:
            for site in sites:
                if hooked.capture.masks[hooked.rule_sets[site]]:
                    hooked.record_state(site, at, without=flat_ids)
        for flat in self.parameters.flats if "param" in sites else ():
            if (parameter := flat.reference()) is not None:
                flat.record("param", "", parameter, at)

    def remove(self) -> None:
        """Remove every hook and tap that the root has put on."""
        self.inventory.close()
        for handle in self._handles:
            handle.remove()
        for hooked in self.modules:
            hooked.hooks.remove()
        for reference in self._own_taps:
            if (module := reference()) is not None:
                module_taps.remove(module)
        self.modules.clear()
        self.grouped.clear()
        self.modules_by_tap.clear()
        callbacks.ROOTS.pop(self._number, None)
