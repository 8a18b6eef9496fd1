"""A root: the outermost module of a model under hooks, with its hooks and its calls.

Nothing here may raise into training, keep a model alive, or read a tensor's values.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ...observe import tree
from ...observe.clock import RootClock, Slice
from ...observe.tree import has_compiled, has_compiled_anything
from ...records import StepPosition, ValuePlace
from ...rules import Rule
from ...sites import GRADIENT_OF, HELD_BY_MODULES, VALUES_OF_CALLS, full_name
from ...system.processes import comes_from_signal_handler
from ...taps import module_taps
from ...taps.instrument import has_tap, put_tap
from ...taps.module_taps import Where
from ..local_values import mesh_of, requires_gradient
from ..parallel.cut_calls import CutCalls, cut_calls, cut_inside
from ..parallel.groups import (
    EXPERT,
    DataParallel,
    ModelParallel,
    Pipeline,
    find_data_parallel,
    find_model_parallel,
    find_rank_local,
    stage_call,
    wrappers_around,
)
from ..parallel.marks import marked_model_parallel, marked_ranks
from ..parallel.topology import is_distributed
from . import callbacks
from .callbacks import CaptureForHooks, GradientSeen
from .given import SHIFT_STEPS, GivenArguments
from .inventory import Inventory
from .jitter import JitterInputs, add_jitter
from .module import HookedModule, StateTime
from .module_facts import ids_of
from .parameter_rows import (
    FlatParameter,
    FsdpParameter,
    find_flat_parameters,
    find_megatron_parts,
    find_zero_parameters,
    meshes_of_flat,
)
from .training_notes import TrainingNotes

_Flat = TypeVar("_Flat", bound=FlatParameter)

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
        self,
        capture: CaptureForHooks,
        module: nn.Module,
        name: str,
        *,
        clock: RootClock | None = None,
        is_elsewhere: Callable[[Root, nn.Module], bool],
        inner_roots: Sequence[Root] = (),
    ) -> None:
        """Put hooks on the outermost module of a model.

        `clock` is the clock of an earlier root with this name. Its counts continue, so that no row's key is used twice.
        `is_elsewhere` returns whether a module belongs to another root, which records the module under a path of its
        own. `inner_roots` are the roots that the module contains. Their calls share this root's micro-steps.
        """
        self.capture = capture
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
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
        self.data_parallel: DataParallel | None = None
        """The data-parallel group, which splits the batch, for the manifest. None if no wrapper or mark names it."""
        self.model_parallel: ModelParallel | None = None
        """The ranks with the same part of the batch, for the manifest. None if no parameter or mark names the ranks."""
        self.marked_ranks: tuple[int, ...] = ()
        """The ranks over which the model's plain parameters are cut, by a framework's marks. Empty without marks."""
        self.is_over_meshes = False
        """Whether parameters are or were DTensors. Plain tensors may then share memory with DTensors."""
        self.rank_local: dict[str, str] | None = None
        """By full parameter name, why the parameter differs between ranks with different batches, for the manifest."""
        self.pipeline: Pipeline | None = None
        """The pipeline stage that this root is, for the manifest. None if no stage was observed to call the root."""
        self._named: set[tuple[str, str]] | None = None
        """The pairs of module path and name under which parameters are recorded. None until they are first needed."""
        self.jitter: JitterInputs | None = None
        """The hook that perturbs the root's inputs. None if the setting `jitter` is off."""
        self.moved: dict[str, float] | None = None
        """By kind of value that `jitter` has perturbed, the largest relative change. None before any perturbation."""
        self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]
        self._install(module)
        self._learn_groups(module)

    @property
    def shared_work(self) -> dict[str, dict[str, Any] | None]:
        """Return how the root shares work, by kind, for the manifest. An unknown kind is None. Any thread may call."""
        return {
            "data_parallel": self.data_parallel,
            "model_parallel": self.model_parallel,
            "pipeline": self.pipeline,
            "unshared": self.rank_local,
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

    def _wrappers_around(self) -> list[nn.Module]:
        return [wrapper for reference in self._around if (wrapper := reference()) is not None]

    def _learn_groups(self, module: nn.Module) -> None:
        if not is_distributed():
            return
        try:
            self.data_parallel = find_data_parallel(module, self._wrappers_around())
            around = [*module.modules(), *self._wrappers_around()]
            meshes = [mesh for parameter in module.parameters() if (mesh := mesh_of(parameter)) is not None]
            meshes += meshes_of_flat(around)
            of_meshes = find_model_parallel(meshes, self.data_parallel)
            self.is_over_meshes |= of_meshes is not None
            self.marked_ranks = marked_ranks(module)
            self.model_parallel = of_meshes or marked_model_parallel(self.marked_ranks) or self.model_parallel
            reasons = find_rank_local(around, self.data_parallel)
            self.rank_local = {
                full_name(hooked.node_path, name): reason
                for hooked in self.modules
                for name, parameter in hooked.own("_parameters")
                if (reason := EXPERT if hooked.is_expert else reasons.get(id(parameter)))
            } or None
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            text = f"{self.name}: the ranks that share its batch are not known: {type(error).__name__}: {error}"
            self.capture.events.add("data_parallel_unknown", text, key=self.name, exception=error)

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
        self.flats = self._find_flats(module)
        self.inventory.describe(nodes, self.flats)
        self.notes = TrainingNotes(self.inventory, self.modules, self.module_at, nodes)

    def _find_flats(self, module: nn.Module) -> list[FsdpParameter]:
        modules = {hooked.node_path: hooked for hooked in self.modules}

        def module_of(owner: nn.Module) -> HookedModule | None:
            path = self.path_of(owner)
            return None if path is None else modules.get(path)

        return self._listed(
            find_flat_parameters([*module.modules(), *self._wrappers_around()], module_of), "are recorded whole"
        )

    def updated_parts(self, updated: Iterable[torch.Tensor]) -> list[FlatParameter]:
        """Return the flat tensors of ZeRO and Megatron that optimizers update in place of the root's parameters.

        Args:
            updated: the tensors that the live optimizers have.
        """
        zero = self._listed(find_zero_parameters(self.parameters()), "of ZeRO are not recorded")
        around = [*self._wrappers_around(), *(module.modules() if (module := self.module()) is not None else ())]
        parts = find_megatron_parts(around, self.parameters(), updated)
        return [*zero, *self._listed(parts, "of Megatron's distributed optimizer are not recorded")]

    def _listed(self, flats: Iterator[_Flat], otherwise: str) -> list[_Flat]:
        """Return the flat parameters. If a framework's attributes are not as expected, report this and return none."""
        try:
            return list(flats)
        except Exception as error:
            text = f"{self.name}: flat parameters {otherwise}: {type(error).__name__}: {error}"
            self.capture.events.add("flat_parameters_unknown", text, key=self.name, exception=error)
            return []

    def find_wrappers(self) -> None:
        """Look for wrappers again. A model that was wrapped after `attach` may have other parameters now."""
        module = self.module()
        if module is not None:
            self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]
            self.flats = self._find_flats(module)

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
        self._with_hooks: dict[frozenset[int], list[HookedModule]] = {}
        """The modules with hooks below the root's own, by the rule sets for which the hooks record values."""
        self._resting: set[frozenset[int]] = set()
        """The keys of `_with_hooks` whose modules have their hooks off."""
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
        self._with_hooks = {}
        for hooked in self.modules:
            if hooked.node_path and (rule_sets := hooked.rule_sets_of_hooks):
                self._with_hooks.setdefault(rule_sets, []).append(hooked)

    def is_seen_at_tap(self, hooked: HookedModule) -> bool:
        """Whether a module without hooks is recorded through a tap (a point in a compiled graph)."""
        return any(one is hooked for one in self.modules_by_tap.values())

    def reselect(self, rules: Sequence[Rule]) -> None:
        """Apply new rules to the modules that they select. Called between two steps."""
        for modules in self._with_hooks.values():
            for hooked in modules:
                hooked.hooks.wake()
        self._resting.clear()
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
            self.pipeline = stage.pipeline
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
            if self.data_parallel is None and (outermost := self.module()) is not None:
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
            return self.clock.recomputed(in_pipeline=self.pipeline is not None), "recompute"
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
        flat_ids = ids_of(self.flats)
        for hooked in self.modules:
            for site in sites:
                if hooked.capture.masks[hooked.rule_sets[site]]:
                    hooked.record_state(site, at, without=flat_ids)
        for flat in self.flats if "param" in sites else ():
            if (parameter := flat.reference()) is not None:
                flat.record("param", "", parameter, at)

    def parameters(self) -> Iterator[tuple[HookedModule, str, nn.Parameter]]:
        """Yield every parameter except flat parameters once, with its module and its name in the module."""
        seen = ids_of(self.flats)
        for hooked in self.modules:
            for name, parameter in hooked.own("_parameters"):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield hooked, name, parameter

    def is_first_use(self, path: str, name: str, parameter: torch.Tensor, slice_: Slice) -> bool:
        """Whether a micro-step uses a parameter for the first time. `path` and `name` must be those that rows use."""
        if self._named is None:
            self._named = {(owner.node_path, own) for owner, own, _ in self.parameters()}
        is_first = (path, name) in self._named and id(parameter) not in slice_.used
        slice_.used.add(id(parameter))
        return is_first

    def rest_or_wake(self, *, may_rest: bool) -> None:
        """Remove the hooks of modules whose calls the new step does not record, and put other modules' hooks back.

        The root's own hooks stay, because they count the steps, and one of them has called this method.
        """
        masks = self.capture.selection.masks
        for rule_sets, modules in self._with_hooks.items():
            is_idle = may_rest and not any(masks[rule_set] for rule_set in rule_sets)
            if is_idle == (rule_sets in self._resting):
                continue
            # The key stays in the set until the last module is awake, so that the next call completes an interrupted
            # call.
            self._resting.add(rule_sets)
            for hooked in modules:
                (hooked.hooks.rest if is_idle else hooked.hooks.wake)()
            if not is_idle:
                self._resting.discard(rule_sets)

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
        self._with_hooks.clear()
        self.modules_by_tap.clear()
        callbacks.ROOTS.pop(self._number, None)
