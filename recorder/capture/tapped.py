"""What the ops of graphs show, as rows: whose value it is, in which slice, and which gradient belongs to which call.

A graph has no hooks of ours and knows no call: an op is handed a name and the text of a `Where`. Nothing here may keep
a tensor or raise into training.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from ..records import Moment, Origin
from ..taps import Where
from .clock import Slice

if TYPE_CHECKING:
    from .core import Capture
    from .root import Root
    from .watch import Watch

_MAX_CALLS = 1024
"""Calls at one tap of one graph whose gradients can be told apart."""
_MAX_TAPS = 65536
_GRADIENT = {"output": "grad_output", "input": "grad_input", "tap": "tap"}
_NOTE = '{"grad":"after_tap"}'
"""The gradient of a tap's result: of the uses outside the module, and not of those inside, as a tensor hook adds."""
_Key = tuple[str, str, int]
"""Name, where and number of a tap, as the ops are handed them."""


class _Call:
    """One call of a module whose gradient may come."""

    __slots__ = ("call", "moment", "node", "num_gradients", "place")

    def __init__(self, place: _Place, moment: Moment, call: int, node: int) -> None:
        self.place = place
        self.moment = moment
        self.call = call
        self.node = node
        """The number in autograd's graph of the node whose forward ran."""
        self.num_gradients = 0


class _Place:
    """One tap under one root."""

    __slots__ = (
        "_calls",
        "_slices",
        "gradient_origin",
        "gradient_rule_set",
        "graphless_slice",
        "origin",
        "root",
        "rule_set",
        "watch",
    )

    def __init__(self, root: Root, watch: Watch | None, origin: Origin, rule_set: int, gradient_rule_set: int) -> None:
        self.root = root
        self.watch = watch
        self.origin = origin
        self.rule_set = rule_set
        self.gradient_origin = origin._replace(site=_GRADIENT[origin.site])
        self.gradient_rule_set = gradient_rule_set
        self.graphless_slice: Slice | None = None
        """The latest slice in which a forward ran without a graph, as a reentrant checkpoint does."""
        self._slices: dict[str, Slice | None] = {"forward": None, "recompute": None}
        self._calls = {"forward": -1, "recompute": -1}

    def enter(self, slice_: Slice, phase: str) -> int:
        """The number of this call within its slice."""
        if self._slices[phase] is not slice_:
            self._slices[phase] = slice_
            self._calls[phase] = -1
        self._calls[phase] += 1
        return self._calls[phase]


class Tapped:
    """All taps that have shown a value."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._places: dict[tuple[str, str, str], _Place] = {}
        self._calls: dict[_Key, list[_Call]] = {}
        self._step = -1

    def saw(self, value: torch.Tensor, key: _Key, root: Root, *, with_grad: bool) -> None:
        """A value passes a tap."""
        capture = self._capture
        place = self._place(key[0], key[1], root)
        with_grad = with_grad or torch.is_grad_enabled()
        slice_, phase = root.slice_of_tap(with_grad=with_grad)
        watch = place.watch
        if watch is not None:
            if place.origin.site == "input" and watch.has_begun:
                return  # the hook in front of the compiled module has seen it
            watch.tapped(slice_, is_output=place.origin.site == "output")
        call = place.enter(slice_, phase)
        if phase == "forward" and not with_grad:
            place.graphless_slice = slice_
        # Of what the forward saw with a graph, the gradient is that of the first time.
        is_known = phase == "recompute" and (key in self._calls or place.graphless_slice is not slice_)
        if slice_.moment.mode != "no_grad" and not is_known:
            self._remember(key, place, slice_.moment, call)
        keep = capture.keep_of(place.rule_set, call)
        if keep:
            self._observe(place.origin, slice_.moment, phase, call, 0, keep, value, None)

    def _remember(self, key: _Key, place: _Place, moment: Moment, call: int) -> None:
        if moment.step != self._step:
            self._step = moment.step
            kept = {old: [one for one in calls if one.moment.step >= moment.step] for old, calls in self._calls.items()}
            self._calls = {old: calls for old, calls in kept.items() if calls}
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= _MAX_TAPS:
                del self._calls[next(iter(self._calls))]
            calls = self._calls[key] = []
        # The node whose forward runs is the last that this thread has numbered.
        calls.append(_Call(place, moment, call, torch._C._autograd._get_sequence_nr() - 1))
        del calls[:-_MAX_CALLS]

    def saw_gradient(self, gradient: torch.Tensor, key: _Key, *, is_total: bool) -> None:
        """A gradient passes a tap, on its way back."""
        calls = self._calls.get(key)
        if not calls:  # its value passed while nothing recorded
            return
        running = torch._C._current_autograd_node()
        node = running._sequence_nr() if running is not None else -1
        matching = [one for one in calls if one.node == node] or calls
        found = next((one for one in reversed(matching) if not one.num_gradients), matching[-1])
        repeat, found.num_gradients = found.num_gradients, found.num_gradients + 1
        place = found.place
        place.root.gradient_at_tap(found.moment)
        keep = self._capture.keep_of(place.gradient_rule_set, found.call)
        if keep:
            note = None if is_total else _NOTE
            self._observe(place.gradient_origin, found.moment, "backward", found.call, repeat, keep, gradient, note)

    def _observe(
        self,
        origin: Origin,
        moment: Moment,
        phase: str,
        call: int,
        repeat: int,
        keep: int,
        value: torch.Tensor,
        note: str | None,
    ) -> None:
        try:
            self._capture.observe(origin, moment, phase, call, repeat, keep, value, note=note)
        except Exception as error:
            if self._capture.site_failed(origin, error):
                self._places.clear()

    def root_of(self, where: str) -> Root | None:
        """The root whose call runs, else the one whose model has this tap."""
        capture = self._capture
        nesting = capture.nesting
        if nesting.depth and nesting.outermost is not None:
            return nesting.outermost
        for root in capture.roots:
            if root.has_tap(where):
                return root
        return capture.roots[0] if capture.roots and not where else None

    def _place(self, name: str, where: str, root: Root) -> _Place:
        known = self._places.get((name, where, root.name))
        if known is not None and known.root is root:
            return known
        made = self._places[name, where, root.name] = self._make(name, where, root)
        return made

    def _make(self, name: str, where: str, root: Root) -> _Place:
        selection = self._capture.selection
        if not where:
            rule_set = selection.narrow(selection.rule_sets("", "", False)["tap"], name)
            return _Place(root, None, Origin(root.name, root.path_of_tap(name), "tap", name), rule_set, rule_set)
        watch = root.tapped.get(where)
        told = Where.from_text(where)
        path = told.path if watch is None else watch.node_path
        watch = watch or root.watch_at(path)
        root.tells_of(told, path)
        rule_sets = watch.rule_sets if watch is not None else {}
        if not rule_sets.get(told.site):  # a container in this model's tree, a module where it was instrumented
            rule_sets = selection.rule_sets(path, told.cls, told.leaf)
        return _Place(
            root,
            watch,
            Origin(root.name, path, told.site, name),
            selection.narrow(rule_sets[told.site], name),
            selection.narrow(rule_sets[_GRADIENT[told.site]], name),
        )


def is_compiled_already(model: torch.nn.Module) -> bool:
    """Whether dynamo has made code of a forward in this model, which no hook can enter any more."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    return any(code is not None and bool(_debug_get_cache_entry_list(code)) for code in codes)
