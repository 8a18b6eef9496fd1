"""A root: an outermost module with everything that hangs on it, and its calls.

Nothing here may raise into training, keep a model alive, or read a tensor's values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import taps
from ..config import SITES
from ..records import Moment, Origin
from ..taps import Where
from . import hooks, tree
from .clock import RootClock, Slice
from .discovery import has_compiled, has_compiled_anything
from .events import comes_from_signal_handler
from .flat import FlatParameter, find_flat_parameters, meshes_of_flat
from .foreign import foreign_hooks
from .jitter import JitterInputs, add_jitter
from .neighbours import is_dtensor
from .parallel import DataParallel, ModelParallel, find_data_parallel, find_model_parallel, wrappers_around
from .pipelines import Pipeline, micro_batch_of_backward, stage_call
from .places import mesh_of
from .statedict import Ties, about_state, find_ties, full_name
from .unshared import find_unshared
from .values import requires_gradient
from .watch import Watch

if TYPE_CHECKING:
    from .core import Capture

_MAX_LATE_LOOKS = 5
"""Calls of a root in which a data-parallel wrapper is looked for: it may be made by the first of them, or after it."""
_numbers = itertools.count(1)


_NOTHING_MOVED = (
    "jitter moved nothing: the model was given no floating tensor, and no nn.Embedding of it was seen to run "
    "(compiled, scripted, or of another class); this run differs from one without jitter in nothing, and is no twin"
)
_OTHERS = "parameters, gradients and optimizer state are"
_HIDDEN = {
    "compiled": "values inside compiled modules are not recorded ({}); " + _OTHERS + ". RECORDER_COMPILED=tap, or "
    "recorder.instrument(model) before the first call, puts taps into the compiled graph",
    "late": "attached after compilation, so nothing is seen inside ({}); attach first, with RECORDER_COMPILED=tap, or "
    "call torch.compiler.reset()",
    "scripted": "values inside scripted modules are not recorded ({}); " + _OTHERS + ". recorder.instrument(model) "
    "before torch.jit.script or trace puts taps into the scripted code",
    "root_not_called": "its modules ran, and its own call was never seen ({}): call it, not .forward(); of a model "
    "that torch.fx traced, attach what came out",
}
"""What is said once of modules whose calls nobody sees."""


def _is_below(path: str, above: str) -> bool:
    return above == "" or path.startswith(above + ".")


class Root:
    """An outermost module with everything that hangs on it."""

    def __init__(self, capture: Capture, module: nn.Module, name: str) -> None:
        self.capture = capture
        self.name = name
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.clock = RootClock(capture.clock)
        self.num_calls = 0
        self.attachments: list[Callable[[], Any]] = []
        """Weak references to the handles that were given out for it and not closed."""
        self.is_kept = False
        """A handle was thrown away at once: nobody can ever close it, so it was meant to last."""
        self._number = next(_numbers)
        self._began_late = has_compiled_anything()
        """Something had been compiled when it was attached: perhaps this."""
        self._artefact: str | None = None
        self._is_stand_in = False
        self._by_path: dict[str, Watch] = {}
        self._tap_paths: dict[str, str] = {}
        self.data_parallel: DataParallel | None = None
        """The ranks that share its batch, for the manifest; None where no wrapper says so."""
        self.model_parallel: ModelParallel | None = None
        """The ranks that work on the same part of the batch, for the manifest; None where parameters tell of none."""
        self.unshared: dict[str, str] | None = None
        """Why parameters, by full name, are others on ranks with other batches, for the manifest."""
        self.pipeline: Pipeline | None = None
        """Which stage of a pipeline it is, for the manifest; None where no stage was seen to call it."""
        self._named: set[tuple[str, str]] | None = None
        """Module paths and names by which parameters go, where one has several."""
        self._met_in: Slice | None = None
        self._met: set[int] = set()
        """Parameters, by id, whose local gradients are awaited in that slice."""
        self.jitter: JitterInputs | None = None
        """Moves the root's inputs, where the settings ask for it."""
        self.moved: dict[str, float] | None = None
        """What of the root was moved, and by which share at most; None where that is not known yet, or nobody asked."""
        self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]
        self._install(module)
        self._learn_groups(module)

    @property
    def facts(self) -> dict[str, dict[str, Any] | None]:
        """How it shares its work with other ranks, as the manifest says it; None where nothing tells. Any thread."""
        return {
            "data_parallel": self.data_parallel,
            "model_parallel": self.model_parallel,
            "pipeline": self.pipeline,
            "unshared": self.unshared,
            "jitter": None
            if self.moved is None
            else {"moved": list(self.moved), "eps": max(self.moved.values(), default=0.0)},
        }

    def has_moved(self, what: str, eps: float) -> None:
        """The setting `jitter` has moved something of the root, by this share of its value."""
        if self.moved is None or self.moved.get(what, 0.0) < eps:
            self.moved = {**(self.moved or {}), what: eps}
            self.capture.events.has_changed = True

    def jitter_failed(self, error: Exception) -> None:
        """An error of ours while something was to be moved: it is left as it was."""
        if comes_from_signal_handler(error):
            raise error
        text = f"{self.name}: jitter failed: {type(error).__name__}: {error}"
        self.capture.events.add("jitter_failed", text, key=self.name, exception=error)

    def say_if_nothing_moved(self) -> None:
        """Somebody asked for a twin, and what ran is none."""
        if self.capture.settings.jitter and self.moved is None:
            self.moved = {}
            self.capture.events.add("nothing_moved", f"{self.name}: {_NOTHING_MOVED}", key=self.name)

    def _wrappers_around(self) -> list[nn.Module]:
        return [wrapper for reference in self._around if (wrapper := reference()) is not None]

    def _learn_groups(self, module: nn.Module) -> None:
        try:
            self.data_parallel = find_data_parallel(module, self._wrappers_around())
            around = [*module.modules(), *self._wrappers_around()]
            meshes = [mesh for parameter in module.parameters() if (mesh := mesh_of(parameter)) is not None]
            meshes += meshes_of_flat(around)
            self.model_parallel = find_model_parallel(meshes, self.data_parallel) or self.model_parallel
            reasons = find_unshared(around, self.data_parallel)
            self.unshared = {
                full_name(watch.node_path, name): reasons[id(parameter)]
                for watch in self.watches
                if reasons
                for name, parameter in watch.own("_parameters")
                if id(parameter) in reasons
            } or None
        except Exception as error:
            if comes_from_signal_handler(error):
                raise
            text = f"{self.name}: the ranks that share its batch are not known: {type(error).__name__}: {error}"
            self.capture.events.add("data_parallel_unknown", text, key=self.name, exception=error)

    def _install(self, module: nn.Module) -> None:
        nodes = tree.walk(module)
        self.class_name = nodes[0].class_name
        self.paths = [node.path for node in nodes]
        self._located = {id(m): (weakref.ref(m), n.path) for n in nodes for m in (n.module, n.owner)}
        self._located[id(module)] = weakref.ref(module), ""
        self.watches: list[Watch] = []
        self.tapped: dict[str, Watch] = {}
        """By the text of a `Where`, the modules on which somebody has put a tap."""
        self._seen_at_taps: dict[str, tuple[str, ...]] = {}
        """By path the sites at which graphs have shown modules whose hooks had not run."""
        self._scripted_with_taps: list[str] = []
        self._own_taps: list[Callable[[], nn.Module | None]] = []
        self._handles: list[Any] = []
        hooks.ROOTS[self._number] = self
        self._add_hooks(module, nodes)
        self.flats = self._find_flats(module)
        ties = find_ties(self.watches, self.flats)
        self.modules = [self._describe(node, watch, ties) for node, watch in zip(nodes, self.watches, strict=True)]
        """What is known of each module when it is attached, and of what graphs and steps told later; see `described`.
        Nothing here keeps the model alive."""

    def _find_flats(self, module: nn.Module) -> list[FlatParameter]:
        """FSDP1's flat parameters: their values are split as soon as they are seen."""
        watches = {watch.node_path: watch for watch in self.watches}

        def watch_of(owner: nn.Module) -> Watch | None:
            path = self.path_of(owner)
            return None if path is None else watches.get(path)

        try:
            return list(find_flat_parameters([*module.modules(), *self._wrappers_around()], watch_of))
        except Exception as error:
            text = f"{self.name}: flat parameters are recorded whole: {type(error).__name__}: {error}"
            self.capture.events.add("flat_parameters_unknown", text, key=self.name, exception=error)
            return []

    def find_wrappers(self) -> None:
        """The model was wrapped after it was attached, perhaps: its parameters may be others, or pieces of others."""
        module = self.module()
        if module is not None:
            self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]
            self.flats = self._find_flats(module)

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
        late: list[str] = []
        untapped: list[str] = []
        for node in nodes:
            wrapper = node.module is not node.owner
            inside = any(node.path == path or path == "" or node.path.startswith(path + ".") for path in compiled)
            wants_hooks = node.is_callable and not inside and (wrapper or not node.is_compiled)
            self.watches.append(Watch(self, node, wants_hooks=wants_hooks))
            if node.is_compiled:
                compiled.append(node.path)
                if not inside and has_compiled(node.owner, node.module):
                    late.append(node.path)
            if self.capture.settings.compiled == "tap" and (inside or node.is_compiled):
                self._tap(node, self.watches[-1])
            self.tapped |= {where.text: self.watches[-1] for where in taps.where_tapped(node.owner)}
        self._with_hooks: dict[frozenset[int], list[Watch]] = {}
        """By the rules that give their hooks something to do, the modules below the root that have any."""
        self._resting: set[frozenset[int]] = set()
        """Those whose hooks are off."""
        for watch in self.watches:
            if watch.node_path and (rule_sets := watch.rule_sets_of_hooks):
                self._with_hooks.setdefault(rule_sets, []).append(watch)
        if not isinstance(module, torch.jit.ScriptModule):
            if self.capture.settings.jitter:
                self.jitter, handles = add_jitter(module, nodes, self._number, self.capture.settings.jitter)
                self._handles += handles
            begins, ends = hooks.RootBegins(self._number), hooks.RootEnds(self._number)
            self._handles.append(hooks.put_on(module.register_forward_pre_hook, begins, prepend=True))
            hooks.keep_first(module._forward_pre_hooks)
            self._handles.append(hooks.put_on(module.register_forward_hook, ends, always_call=True))
        self._late = late
        # Where there are taps, the first step tells whether they are in the graph.
        self._say_hidden("late", [path for path in late if not self._is_tapped_below(path)])
        scripted = {node.path: node.owner for node in nodes if node.hidden == "scripted"}
        for path in list(scripted):
            if not any(path != above and _is_below(path, above) for above in scripted):
                (self._scripted_with_taps if tree.has_scripted_tap(scripted[path]) else untapped).append(path)
        self._say_hidden("scripted", untapped)
        self._say_compiled([path for path in compiled if path not in late])

    def _tap(self, node: tree.Node, watch: Watch) -> None:
        """Show what hooks cannot see, as the settings ask: by a tap in the graph that is about to be made."""
        there = {where.site for where in taps.where_tapped(node.owner)}
        if not node.is_callable or there:
            return
        for site, place in (("output", taps.place), ("input", taps.place_inputs)):
            if watch.rule_sets[site] or watch.rule_sets[f"grad_{site}"]:
                place(node.owner, tree.where(node, self.name, site))
                self._own_taps.append(weakref.ref(node.owner))

    def stands_for(self, where: str) -> None:
        """It has no module: a loaded artefact shows this tap, and others that were placed with it."""
        self._artefact = Where.from_text(where).root if where else ""
        self._is_stand_in = True

    @property
    def is_stand_in(self) -> bool:
        """Whether it has no module, and so nobody can close it."""
        return self._is_stand_in

    def has_tap(self, where: str) -> bool:
        """Whether a tap is on one of its modules, in its TorchScript, or of the artefact that it stands for."""
        if where in self.tapped:
            return True
        told = Where.from_text(where) if where else None
        is_scripted = isinstance(self.module(), torch.jit.ScriptModule)  # Python sees no hooks on it
        if self._artefact is None and is_scripted and told is not None and self.watch_at(told.path) is not None:
            self._artefact = told.root
        return self._artefact == (told.root if told is not None else "")

    def watch_at(self, path: str) -> Watch | None:
        """The watch of a path."""
        if path not in self._by_path:
            self._by_path = {watch.node_path: watch for watch in self.watches}
        return self._by_path.get(path)

    def path_of_tap(self, name: str) -> str:
        """Of a tap by hand in a graph, the module's path where one module's code alone has such a tap; else the root.

        The op is told its name; in which module it was called, no graph remembers.
        """
        if name not in self._tap_paths:
            module = self.module()
            nodes = tree.walk(module) if module is not None else []
            found = [node.path for node in nodes if tree.has_tap(node.owner, name)]
            self._tap_paths[name] = found[0] if len(found) == 1 else ""
        return self._tap_paths[name]

    @property
    def described(self) -> list[dict[str, Any]]:
        """What the manifest says of each module. Of what graphs alone show, that is at which sites. Any thread."""
        tapped = dict(self._seen_at_taps)
        if not tapped:
            return self.modules
        for where, watch in list(self.tapped.items()):
            if not watch.has_entered:
                site = Where.from_text(where).site
                tapped[watch.node_path] = tuple(dict.fromkeys((*tapped.get(watch.node_path, ()), site)))
        for described in self.modules:
            path = described["path"]
            if described.get("hidden") == "scripted" and any(_is_below(path, up) for up in self._scripted_with_taps):
                tapped.setdefault(path, ("output",))
        return [
            {**described, "tapped": list(tapped[described["path"]])} if described["path"] in tapped else described
            for described in self.modules
        ]

    def tells_of(self, told: Where, path: str) -> None:
        """A graph shows a module, perhaps one of which the model's tree says nothing, or that it is a container."""
        watch = self.watch_at(path)
        if watch is None or not watch.has_entered:
            known_sites = self._seen_at_taps.get(path, ())
            self._seen_at_taps[path] = tuple(dict.fromkeys((*known_sites, told.site)))
        for i, described in enumerate(self.modules):
            if described["path"] == path:
                if told.site not in described["sites"] or "hidden" in described:
                    self.modules[i] = {**described, **self._of_tap(told)}
                return
        self.paths.append(path)
        fresh = {"path": path, "aliases": [], "params": [], "buffers": [], "compiled": False, **self._of_tap(told)}
        self.modules = [*self.modules, fresh]

    def _of_tap(self, told: Where) -> dict[str, Any]:
        rule_sets = self.capture.selection.rule_sets(told.path, told.cls, told.leaf)
        sites = [site for site in SITES if rule_sets[site]]
        return {"class": told.cls, "source": told.source or None, "sites": sites}

    def _say_compiled(self, paths: list[str]) -> None:
        self._say_hidden("compiled", [path for path in paths if not self._is_tapped_below(path)])

    def _say_hidden(self, why: str, paths: list[str]) -> None:
        if paths:
            paths = [p for p in paths if not any(q != p and _is_below(p, q) for q in paths)]
            shown = ", ".join(repr(path) if path else "the whole model" for path in paths[:3])
            shown += ", ..." * (len(paths) > 3)
            self.capture.events.add(why, f"{self.name}: {_HIDDEN[why].format(shown)}", key=self.name)

    def _is_tapped_below(self, path: str) -> bool:
        return any(watch.node_path == path or _is_below(watch.node_path, path) for watch in self.tapped.values())

    def step_is_over(self, *, has_compiled: bool) -> None:
        """The first one: what never ran in it, though it has hooks, and why that is.

        Where something was compiled and no part of this model says that it was, what has gradients without a call ran
        in a graph of somebody's function, and its hooks with it. A root that never ran, while its modules did, is not
        what was called.
        """
        self.say_if_nothing_moved()
        self.look_for_foreign_hooks()
        seen = [watch.node_path for watch in self.watches if watch.was_called]
        self._say_hidden("late", [path for path in self._late if not any(_is_below(one, path) for one in seen)])
        silent = self._silent()
        if has_compiled and silent and not any(described["compiled"] for described in self.modules):
            why = {"hidden": "late"} if self._began_late and not self._seen_at_taps else {}
            for i, described in enumerate(self.modules):
                if described["path"] in silent:
                    self.modules[i] = {**described, "compiled": True, **why}
            if why:
                self._say_hidden("late", sorted(silent))
            elif not self._seen_at_taps:  # who tapped a part of what is compiled has chosen it
                self._say_compiled(sorted(silent))
        elif self.num_calls == 0 and seen and "" not in seen and self._artefact is None and not self._seen_at_taps:
            self._say_hidden("root_not_called", [""])

    def look_for_foreign_hooks(self) -> None:
        """Hooks that the program has put on modules since it was attached; those that it took off again stay told."""
        for i, (described, watch) in enumerate(zip(self.modules, self.watches, strict=False)):
            told = described.get("foreign_hooks", [])
            module = watch.module()
            more = [hook for hook in foreign_hooks(module) if hook not in told] if module is not None else []
            if more:
                self.modules[i] = {**described, "foreign_hooks": [*told, *more]}
                self.capture.events.has_changed = True

    def _silent(self) -> set[str]:
        """Modules that must have run, and were not seen to, for no reason of their own."""
        told = {described["path"] for described in self.modules if "hidden" in described}
        told |= {watch.node_path for watch in self.tapped.values()} if self._seen_at_taps else set()
        silent = [watch for watch in self.watches if watch.is_silent and watch.node_path not in told]
        if any(watch.was_called for watch in self.watches):
            grads = {w.node_path: [p.grad is not None for _, p in w.own("_parameters")] for w in silent}
            silent = [watch for watch in silent if any(grads[watch.node_path]) or not grads[watch.node_path]]
            is_in_graph = self.num_calls == 0 and bool(self._seen_at_taps)
            if not is_in_graph and not any(map(any, grads.values())):
                return set()
        return {watch.node_path for watch in silent}

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
        stage = stage_call()
        self.capture.is_in_stage = stage is not None
        if stage is not None:
            self.pipeline = stage.pipeline
            if stage.micro_batch is None:
                self.capture.pause()
                self.clock.begin_trial()
                return
        self.capture.resume()
        self.clock.begin(
            with_grad=torch.is_grad_enabled(),
            training=module.training,
            every_call_is_a_step=self.capture.every_call_is_a_step,
            is_first_call=self.num_calls == 0,
            micro_batch=None if stage is None else stage.micro_batch,
        )
        if self.num_calls < _MAX_LATE_LOOKS:
            if self.data_parallel is None:
                self._learn_groups(module)
            for watch in self.watches:
                watch.stay_last()
        self.num_calls += 1
        if torch.is_grad_enabled():
            self.capture.has_seen_forward = True
        if self.capture.is_settled:
            self.capture.call_begins()
        else:
            self.capture.step_changed()

    def ends(self, output: Any) -> None:
        """A call of the root has returned, or raised (then ``output`` is None)."""
        nesting = self.capture.nesting
        if torch._C._current_graph_task_id() != -1 or nesting.depth == 0:
            return
        nesting.depth -= 1
        if nesting.depth:
            return
        if self.model_parallel is not None:
            self.capture.neighbours.end()
        current = self.clock.active
        self.clock.end()
        if current is not None and current.moment.micro_step is None:
            return  # a trial
        if current is not None and torch.is_grad_enabled():
            for _, tensor in tree.tensor_leaves(output):
                if not current.has_gradient and requires_gradient(tensor):
                    with torch._C.DisableTorchFunctionSubclass():
                        handle = tensor.register_hook(hooks.GradientSeen(self.clock, current))
                        is_leaf = tensor.is_leaf
                    if is_leaf:
                        self.capture.keep_leaf_hook(handle)
        if current is not None and self.capture.every_call_is_a_step:
            self.record_state(("param", "buffer"), current.moment, "forward", 0)

    def slice_now(self) -> tuple[Slice, str]:
        """The slice and phase of a value seen now."""
        if torch._C._current_graph_task_id() != -1:
            micro_batch = micro_batch_of_backward() if self.pipeline is not None else None
            return self.clock.recomputed(micro_batch), "recompute"
        if (active := self.clock.active) is not None:
            return active, "forward"
        module = self.module()
        training = module.training if module is not None else True
        return self.clock.current(with_grad=torch.is_grad_enabled(), training=training), "forward"

    def slice_of_tap(self, *, with_grad: bool) -> tuple[Slice, str]:
        """The same for what a tap shows; where the root's own hooks are compiled away, taps alone tell of its calls.

        Args:
            with_grad: whether gradients were enabled around it; compiled code runs without, whatever the mode.
        """
        module = self.module()
        is_hidden = self.num_calls == 0 and self.capture.nesting.depth == 0
        if not is_hidden or module is None or torch._C._current_graph_task_id() != -1:
            return self.slice_now()
        self.clock.begin(with_grad=with_grad, training=module.training, every_call_is_a_step=False, is_first_call=False)
        if not self.capture.is_settled:
            self.capture.step_changed()
        found = self.clock.active
        self.clock.end()
        assert found is not None
        return found, "forward"

    def gradient_at_tap(self, moment: Moment) -> None:
        """A gradient has come to a tap: the next forward is of another slice."""
        slice_ = self.clock.recomputed()
        if self.num_calls == 0 and slice_.moment == moment:
            self.clock.gradient_arrived(slice_)

    def failed(self, error: Exception) -> None:
        """Count an error of ours; a root that keeps failing, and so knows no step any more, is left alone."""
        if self.capture.site_failed(Origin(self.name, "", "root", ""), error):
            step = self.capture.clock.step
            self.modules = [{**described, "disarmed": dict.fromkeys(SITES, step)} for described in self.modules]
            self.remove()

    def disarm(self, path: str, sites: tuple[str, ...], step: int) -> None:
        """See nothing any more at some sites of one module, and tell from which step on."""
        for watch in self.watches:
            if watch.node_path == path:
                watch.disarm(sites)
        for i, described in enumerate(self.modules):
            if described["path"] == path:  # another dict: the writer thread may be reading this one
                self.modules[i] = {
                    **described,
                    "disarmed": {**described.get("disarmed", {}), **dict.fromkeys(sites, step)},
                }

    def record_state(self, sites: tuple[str, ...], moment: Moment, phase: str, repeat: int) -> None:
        """Record parameters or buffers of every module that a rule selects."""
        flat_ids = self._flat_ids()
        for watch in self.watches:
            for site in sites:
                if watch.capture.masks[watch.rule_sets[site]]:
                    watch.record_state(site, moment, phase, repeat, without=flat_ids)
        for flat in self.flats if "param" in sites else ():
            if (parameter := flat.reference()) is not None:
                flat.record("param", "", parameter, moment, phase, repeat)

    def parameters(self) -> Iterator[tuple[Watch, str, nn.Parameter]]:
        """Every parameter once, with the watch of the module that owns it and its name there; flat ones are not."""
        seen = self._flat_ids()
        for watch in self.watches:
            for name, parameter in watch.own("_parameters"):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield watch, name, parameter

    def first_here(self, watch: Watch, name: str, parameter: torch.Tensor, slice_: Slice) -> bool:
        """Whether a parameter is met for the first time in a slice, at the module and name that it goes by."""
        if self._named is None:
            self._named = {(owner.node_path, own) for owner, own, _ in self.parameters()}
        if self._met_in is not slice_:
            self._met_in, self._met = slice_, set()
        is_first = (watch.node_path, name) in self._named and id(parameter) not in self._met
        self._met.add(id(parameter))
        return is_first

    def _flat_ids(self) -> set[int]:
        found = [flat.reference for flat in self.flats]
        found += [original.reference for flat in self.flats for original in flat.originals]
        return {id(parameter) for reference in found if (parameter := reference()) is not None}

    def rest_or_wake(self, *, may_rest: bool) -> None:
        """The step has moved: modules of whose calls nothing is recorded at it have no hooks until they have something.

        The root's own stay: they tell of steps, and one of them has called this.
        """
        masks = self.capture.selection.masks
        for rule_sets, watches in self._with_hooks.items():
            is_idle = may_rest and not any(masks[rule_set] for rule_set in rule_sets)
            if is_idle == (rule_sets in self._resting):
                continue
            self._resting.add(rule_sets)  # until the last one is awake, so that what an interrupt leaves is done again
            for watch in watches:
                (watch.rest if is_idle else watch.wake)()
            if not is_idle:
                self._resting.discard(rule_sets)

    def remove(self) -> None:
        """Take every hook off again."""
        self.modules = self.described
        for handle in self._handles:
            handle.remove()
        for watch in self.watches:
            watch.remove()
        for reference in self._own_taps:
            if (module := reference()) is not None:
                taps.remove(module)
        self.watches.clear()
        self._with_hooks.clear()
        self.tapped.clear()
        self._seen_at_taps.clear()
        hooks.ROOTS.pop(self._number, None)

    def _describe(self, node: tree.Node, watch: Watch, ties: Ties) -> dict[str, Any]:
        flat_ids = self._flat_ids()
        flat_names = [name for flat in self.flats for owner, name in flat.names if owner is watch]
        return {
            "path": node.path,
            "class": node.class_name,
            "source": tree.source_line(node.owner),
            "aliases": node.aliases,
            "sites": [site for site, rule_set in watch.rule_sets.items() if rule_set],
            "params": flat_names + [name for name, value in watch.own("_parameters") if id(value) not in flat_ids],
            "buffers": [name for name, _ in watch.own("_buffers")],
            **about_state(node.owner, ties.get(node.path)),
            **({"dtensor": True} if any(is_dtensor(value) for _, value in watch.own("_parameters")) else {}),
            "compiled": node.is_compiled,
            **({"foreign_hooks": found} if (found := foreign_hooks(node.module)) else {}),
            **({"hidden": hidden} if (hidden := "late" if node.path in self._late else node.hidden) else {}),
        }
