"""Makes rows of the values at taps: points in a compiled graph, and calls of `recorder.tap` in eager code.

A graph contains none of the recorder's hooks and does not know which call it runs in. The op of a tap has only a name
and the text of a `Where`. So this module finds the module and micro-step of each value, and the call of each gradient.
Nothing here may keep a tensor or raise into training.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...observe.selection import unit_dim_of
from ...records import SeenValue, StepPosition, ValuePlace
from ...sites import GRADIENT_OF, OBJECTIVE
from ...taps.module_taps import Where
from ..hooks.callbacks import CaptureForHooks, GradientArrives, watch_gradient
from ..hooks.module import HookedModule
from ..hooks.root import Root
from ..local_values import requires_gradient
from ..parallel.aliases import chunk_of_gradient, has_owner
from .objectives import SharedTensor, SharedTensors

_MAX_CALLS = 1024
"""The most calls of one tap in one graph that are remembered, to tell their gradients apart."""
_MAX_TAPS = 65536
_NOTE = '{"grad":"after_tap"}'
"""The note of a gradient recorded at a tap's result. Gradients from other uses of the tapped value are missing."""
_Key = tuple[str, str, int]
"""The name, the `where` and the index of a tap (a point in a graph whose value is recorded), as its op gets them."""


@dataclass(slots=True)
class _TappedCall:
    tap: _RootTap
    moment: StepPosition
    call: int
    repeat: int
    node: int
    """The sequence number that autograd gave to the tap's node in this call."""
    shared: SharedTensor | None = None
    num_gradients: int = 0


@dataclass(slots=True)
class _RootTap:
    root: Root
    watch: HookedModule | None
    origin: ValuePlace
    rule_set: int
    gradient_rule_set: int
    gradient_origin: ValuePlace = field(init=False)
    key: tuple[str, str, str, str] = field(init=False)
    """The key under which a micro-step counts the tap's calls. A `recorder.tap` in eager code has an equal key."""

    def __post_init__(self) -> None:
        self.gradient_origin = self.origin._replace(site=GRADIENT_OF[self.origin.site])
        self.key = (self.origin.root, self.origin.module_path, self.origin.site, self.origin.name)


class TapRows:
    """Makes rows of the values at taps (points in a graph whose values are recorded), and keeps these taps."""

    def __init__(self, capture: CaptureForHooks, roots: Sequence[Root], objectives: SharedTensors) -> None:
        self._capture = capture
        self._roots = roots
        self._objectives = objectives
        self._taps: dict[tuple[str, str, str], _RootTap] = {}
        self._calls: dict[_Key, list[_TappedCall]] = {}
        self._step = -1

    def saw(self, value: torch.Tensor, key: _Key, root: Root, *, with_grad: bool) -> None:
        capture = self._capture
        tap = self._tap(key[0], key[1], root)
        with_grad = with_grad or torch.is_grad_enabled()
        slice_, phase = root.slice_of_tap(with_grad=with_grad)
        watch = tap.watch
        if watch is not None:
            if tap.origin.site == "input" and watch.has_begun:
                return  # the hook in front of the compiled module has recorded the value
            watch.shown_by_tap(slice_, is_output=tap.origin.site == "output")
        call = slice_.enter(phase, tap.key)
        graph = slice_.new_graph(phase, tap.key, call, with_grad=with_grad)
        if phase == "forward":
            graph = call, 0
        elif key in self._calls:
            graph = None  # a recompute: the gradient belongs to the forward's call
        keep = capture.keep_of(tap.rule_set, slice_.moment.micro_step, call)
        if slice_.moment.mode != "no_grad" and graph is not None:
            shared = self._objectives.shared(tap.origin, slice_.moment, phase, value, is_kept=bool(keep))
            self._remember(key, tap, slice_.moment, *graph, shared)
        if keep:
            self._observe(SeenValue(tap.origin, slice_.moment, phase, call), keep, value)

    def record_by_hand(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor that the program has named, and its gradient, of phase ``backward``, when it arrives."""
        capture = self._capture
        root, path = self._locate(module)
        rule_set = capture.selection.rule_set_of_name("tap", name)
        is_kept = capture.masks[rule_set] or name.startswith(OBJECTIVE)
        if not is_kept or root is None or capture.is_disarmed("tap", name):
            return
        slice_, phase = root.slice_now()
        key = (root.name, path, "tap", name)
        call = slice_.enter(phase, key)
        graph = slice_.new_graph(phase, key, call, with_grad=torch.is_grad_enabled())
        keep = capture.keep_of(rule_set, slice_.moment.micro_step, call)
        origin = ValuePlace(root.name, path, "tap", name, unit_dim_of(capture.selection, rule_set, None, "tap", name))
        if graph is not None and requires_gradient(tensor):
            shared = self._objectives.shared(origin, slice_.moment, phase, tensor, is_kept=bool(keep))
            if shared is not None:
                tensor.register_hook(functools.partial(shared.gradient, name.removeprefix(OBJECTIVE)))
        if not keep:
            return
        is_in_region = root.is_over_meshes and has_owner(tensor)
        chunk = capture.aliases.chunk_of_alias(tensor) if is_in_region else None
        capture.observe(SeenValue(origin, slice_.moment, phase, call, chunk=chunk), keep, tensor)
        if graph is not None and requires_gradient(tensor):
            hook = GradientArrives(capture, origin, slice_.moment, graph[0], keep, repeat=graph[1])
            hook.chunk = None if chunk is None else chunk_of_gradient(chunk)
            watch_gradient(tensor, hook)

    def _locate(self, module: nn.Module | None) -> tuple[Root | None, str]:
        for root in self._roots:
            if module is not None and (path := root.path_of(module)) is not None:
                return root, path
        return (self._roots[0], "") if self._roots else (None, "")

    def _remember(
        self, key: _Key, tap: _RootTap, moment: StepPosition, call: int, repeat: int, shared: SharedTensor | None
    ) -> None:
        if moment.step != self._step:
            self._step = moment.step
            kept = {old: [c for c in calls if c.moment.step >= moment.step] for old, calls in self._calls.items()}
            self._calls = {old: calls for old, calls in kept.items() if calls}
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= _MAX_TAPS:
                del self._calls[next(iter(self._calls))]
            calls = self._calls[key] = []
        # Autograd numbers the nodes of each thread. The tap's node, whose forward runs now, has the latest number.
        calls.append(_TappedCall(tap, moment, call, repeat, torch._C._autograd._get_sequence_nr() - 1, shared))
        del calls[:-_MAX_CALLS]

    def saw_gradient(self, gradient: torch.Tensor, key: _Key, *, is_total: bool) -> None:
        calls = self._calls.get(key)
        if not calls:  # the value passed the tap while nothing was recorded
            return
        running = torch._C._current_autograd_node()
        node = running._sequence_nr() if running is not None else -1
        matching = [call for call in calls if call.node == node] or calls
        call = next((call for call in reversed(matching) if not call.num_gradients), matching[-1])
        repeat = call.repeat + call.num_gradients
        call.num_gradients += 1
        tap = call.tap
        tap.root.gradient_at_tap(call.moment)
        if call.shared is not None:
            call.shared.gradient(key[0].removeprefix(OBJECTIVE), gradient)
        keep = self._capture.keep_of(tap.gradient_rule_set, call.moment.micro_step, call.call)
        if keep:
            note = None if is_total else _NOTE
            seen = SeenValue(tap.gradient_origin, call.moment, "backward", call.call, repeat, note=note)
            self._observe(seen, keep, gradient)

    def _observe(self, seen: SeenValue, keep: int, value: torch.Tensor) -> None:
        try:
            self._capture.observe(seen, keep, value)
        except Exception as error:
            if self._capture.site_failed(seen.origin, error):
                self._taps.clear()

    def root_of(self, where: str) -> Root | None:
        """Return the root (model under hooks) that is running on this thread, otherwise the root that has this tap."""
        root_calls = self._capture.root_calls
        if root_calls.depth and root_calls.outermost is not None:
            outermost: Root = root_calls.outermost
            return outermost
        for root in self._roots:
            if root.has_tap(where):
                return root
        return self._roots[0] if self._roots and not where else None

    def has_no_hook(self, where: str) -> bool:
        """Whether the module with this tap has no hooks. Then only the tap records its values, even in eager mode."""
        root = self.root_of(where)
        watch = root.modules_by_tap.get(where) if root is not None else None
        return watch is not None and watch.is_hidden

    def reselect(self) -> None:
        """Make every tap use the current rules. Called between two steps."""
        for (name, where, _), tap in self._taps.items():
            made = self._make(name, where, tap.root)
            tap.rule_set, tap.gradient_rule_set = made.rule_set, made.gradient_rule_set

    def _tap(self, name: str, where: str, root: Root) -> _RootTap:
        known = self._taps.get((name, where, root.name))
        if known is not None and known.root is root:
            return known
        made = self._taps[name, where, root.name] = self._make(name, where, root)
        return made

    def _make(self, name: str, where: str, root: Root) -> _RootTap:
        selection = self._capture.selection
        if not where:
            rule_set = selection.rule_set_of_name("tap", name)
            unit_dim = unit_dim_of(selection, rule_set, None, "tap", name)
            origin = ValuePlace(root.name, root.path_of_tap(name), "tap", name, unit_dim)
            return _RootTap(root, None, origin, rule_set, rule_set)
        watch = root.modules_by_tap.get(where)
        parsed = Where.from_text(where)
        path = parsed.path if watch is None else watch.node_path
        watch = watch or root.module_at(path)
        root.inventory.add_seen_at_tap(parsed, path)
        rule_sets = watch.rule_sets if watch is not None else {}
        if not rule_sets.get(parsed.site):  # this module is a container, but was callable in the instrumented model
            rule_sets = selection.rule_sets(path, parsed.cls, parsed.leaf)
        rule_set = selection.narrow(rule_sets[parsed.site], name)
        if watch is not None:
            unit_dim = watch.unit_dim(rule_set, parsed.site, name)
        else:
            unit_dim = unit_dim_of(selection, rule_set, None, parsed.site, name)
        origin = ValuePlace(root.name, path, parsed.site, name, unit_dim)
        return _RootTap(root, watch, origin, rule_set, selection.narrow(rule_sets[GRADIENT_OF[parsed.site]], name))
