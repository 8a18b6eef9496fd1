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

from ..records import Moment
from . import hooks, tree
from .clock import RootClock, Slice
from .flat import FlatParameter, find_flat_parameters
from .parallel import DataParallel, find_data_parallel, wrappers_around
from .watch import Watch

if TYPE_CHECKING:
    from .core import Capture

_MAX_LATE_LOOKS = 5
"""Calls of a root in which a data-parallel wrapper is looked for: it may be made by the first of them, or after it."""
_numbers = itertools.count(1)


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
        self._around = [weakref.ref(wrapper) for wrapper in wrappers_around(module)]
        self._learn_data_parallel(module)
        self._install(module)

    def _wrappers_around(self) -> list[nn.Module]:
        return [wrapper for reference in self._around if (wrapper := reference()) is not None]

    def _learn_data_parallel(self, module: nn.Module) -> None:
        try:
            self.data_parallel = find_data_parallel(module, self._wrappers_around())
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
        self.flats = self._find_flats(module)
        self.modules = [self._describe(node, watch) for node, watch in zip(nodes, self.watches, strict=True)]
        """What the manifest says of each module; nothing here keeps the model alive."""

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

    def _flat_ids(self) -> set[int]:
        found = [flat.reference for flat in self.flats]
        found += [original.reference for flat in self.flats for original in flat.originals]
        return {id(parameter) for reference in found if (parameter := reference()) is not None}

    def remove(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        for watch in self.watches:
            watch.remove()
        self.watches.clear()
        hooks.ROOTS.pop(self._number, None)

    def _describe(self, node: tree.Node, watch: Watch) -> dict[str, Any]:
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
            "compiled": node.is_compiled,
        }
