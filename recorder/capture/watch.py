"""One module under hooks: what is selected of it, and what its hooks do when they fire.

Nothing here may raise into training or keep a module alive.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..records import Chunk, Moment, Origin
from . import hooks, tree
from .clock import Slice
from .neighbours import Waiting, chunk_of_gradient, has_owner, is_dtensor
from .select import NOTHING
from .values import requires_gradient

if TYPE_CHECKING:
    from .root import Root

_MAX_LEAVES = 4096
_GRADIENT = {"input": "grad_input", "output": "grad_output"}
_numbers = itertools.count(1)


class Watch:
    """One module under hooks: what is selected of it, and the n-th call it is in."""

    __slots__ = (
        "_calls",
        "_graphless_slice",
        "_handles",
        "_leaves",
        "_number",
        "_open_calls",
        "_owner",
        "_phase_slice",
        "_resting",
        "_signature",
        "_tapped_slice",
        "_wants_local",
        "_was_called",
        "capture",
        "class_name",
        "is_hidden",
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
        is_callable = node.is_callable or node.hidden is not None
        self.rule_sets = selection.rule_sets(node.path, node.class_name, node.is_leaf, is_callable=is_callable)
        self._leaves: dict[tuple[str, str], tuple[Origin, int]] = {}
        self._calls = {"forward": 0, "recompute": 0}
        self._phase_slice: dict[str, Slice | None] = {"forward": None, "recompute": None}
        self._open_calls: dict[int, list[int]] = {}
        """By thread, the calls that have begun and not returned: a module may call itself."""
        self._signature: tree.Signature | None = None
        self._handles: list[Any] = []
        self._resting: list[tuple[Any, hooks.Hook]] = []
        """The hooks that are off between two steps at which they have something to do, with their handles."""
        self._was_called = False
        self._graphless_slice: Slice | None = None
        """The latest slice in which a forward ran without a graph, as a reentrant checkpoint does."""
        self._tapped_slice: Slice | None = None
        """Where the op in a graph has shown this call's output: the hook around the graph leaves it alone."""
        self._number = next(_numbers)
        has_parameters = any(True for _ in self.own("_parameters"))
        self._wants_local = self.capture.settings.local_gradients and has_parameters and bool(self.rule_sets["grad"])
        self.is_hidden = not wants_hooks
        """Where a compiler is to take its module away."""
        self.pre_hook: hooks.BeforeForward | None = None
        if wants_hooks:
            hooks.WATCHES[self._number] = self
            if self.rule_sets["input"] or self.rule_sets["grad_input"] or self._wants_local:
                self.pre_hook = hooks.BeforeForward(self._number)
                self._handles.append(
                    hooks.put_on(node.module.register_forward_pre_hook, self.pre_hook, with_kwargs=True)
                )
            if self.pre_hook or self.rule_sets["output"] or self.rule_sets["grad_output"]:
                after = hooks.AfterForward(self._number)
                self._handles.append(hooks.put_on(node.module.register_forward_hook, after, prepend=True))
                hooks.keep_first(node.module._forward_hooks)

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

    @property
    def has_begun(self) -> bool:
        """Whether this thread is in a call of the module that its hook has seen begin."""
        return bool(self._open_calls.get(threading.get_ident()))

    @property
    def has_entered(self) -> bool:
        """Whether its hooks have run."""
        return self._phase_slice["forward"] is not None or self._phase_slice["recompute"] is not None

    def tapped(self, slice_: Slice, *, is_output: bool) -> None:
        """A graph that was made of the module has shown its input, or its output."""
        self._was_called = True
        if is_output:
            self._tapped_slice = slice_

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to run."""
        capture = self.capture
        if not capture.has_seen_forward:
            capture.forward_without_root()
        slice_, phase = self.root.slice_now()
        call = self._enter(slice_, phase)
        self._open_calls.setdefault(threading.get_ident(), []).append(call)
        masks = capture.masks
        if self._wants_local and phase == "forward" and masks[self.rule_sets["grad"]] and torch.is_grad_enabled():
            self._await_local_gradients(slice_)
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
            self._see("input", name, tensor, slice_.moment, phase, call, value_mask, with_grad)

    def _await_local_gradients(self, slice_: Slice) -> None:
        """Record what this backward adds to the gradients of the module's own parameters, before any reduction."""
        for name, parameter in self.own("_parameters"):
            is_plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.is_leaf and parameter.requires_grad
            if is_plain and self.root.first_here(self, name, parameter, slice_):
                origin, rule_set = self._leaf("grad", name)
                if keep := self.capture.keep_of(rule_set, 0):
                    self.capture.watch_gradient(parameter, origin, slice_.moment, 0, keep, "local")

    def after_forward(self, output: Any) -> None:
        """The module's forward has returned."""
        self._was_called = True
        if not self.capture.has_seen_forward:
            self.capture.forward_without_root()
        masks = self.capture.masks
        value_mask, gradient_mask = masks[self.rule_sets["output"]], masks[self.rule_sets["grad_output"]]
        if not value_mask and not gradient_mask and self.pre_hook is None:
            self._tapped_slice = None
            return
        begun = self._open_calls.get(threading.get_ident()) if self.pre_hook is not None else None
        if begun and not value_mask and not gradient_mask:
            begun.pop()
            self._tapped_slice = None
            return
        slice_, phase = self.root.slice_now()
        call = begun.pop() if begun else self._enter(slice_, phase)
        tapped, self._tapped_slice = self._tapped_slice, None
        if tapped is slice_:
            return
        with_grad = bool(gradient_mask) and self._has_new_graph(slice_, phase)
        if value_mask or with_grad:
            if type(output) is torch.Tensor:
                self._see("output", "", output, slice_.moment, phase, call, value_mask, with_grad)
                return
            for name, tensor in tree.tensor_leaves(output):
                self._see("output", name, tensor, slice_.moment, phase, call, value_mask, with_grad)

    def _see(
        self,
        site: str,
        name: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        call: int,
        value_mask: int,
        with_grad: bool,
    ) -> None:
        capture = self.capture
        chunk = waiting = None
        if self.root.model_parallel is not None:
            chunk, waiting = self._place_of(tensor)
        try:
            if value_mask:
                origin, rule_set = self._leaf(site, name)
                if keep := capture.keep_of(rule_set, call):
                    put = None if waiting is None else waiting.put
                    capture.observe(origin, moment, phase, call, 0, keep, tensor, None, chunk, None, put)
            if with_grad and requires_gradient(tensor):
                origin, rule_set = self._leaf(_GRADIENT[site], name)
                if keep := capture.keep_of(rule_set, call):
                    self._see_gradient(origin, tensor, moment, call, keep, chunk, waiting)
        finally:
            if waiting is not None:
                self.capture.neighbours.wait(waiting)

    def _see_gradient(
        self,
        origin: Origin,
        tensor: torch.Tensor,
        moment: Moment,
        call: int,
        keep: int,
        chunk: Chunk | None,
        waiting: Waiting | None,
    ) -> None:
        if origin.site == "grad_input" and type(tensor) is not torch.Tensor and is_dtensor(tensor):
            self.capture.watch_share(tensor, origin, moment, call, keep)
            return
        hook = self.capture.watch_gradient(tensor, origin, moment, call, keep)
        if chunk is not None:
            hook.chunk = chunk_of_gradient(chunk)
        elif waiting is not None:
            waiting.hook = hook

    def _place_of(self, tensor: torch.Tensor) -> tuple[Chunk | None, Waiting | None]:
        """In a tensor parallel region, where a plain tensor lies; what may yet be learnt is waited for."""
        neighbours = self.capture.neighbours
        if is_dtensor(tensor):
            neighbours.saw(tensor)
            return None, None
        if not has_owner(tensor):
            return None, None
        chunk = neighbours.place_of(tensor)
        return chunk, None if chunk is not None else Waiting(tensor)

    def stay_last(self) -> None:
        """Be the last to see the arguments again, where others have put pre-hooks on the module since."""
        module = self.module()
        if self.pre_hook is not None and module is not None:
            registered = cast("OrderedDict[int, Any]", module._forward_pre_hooks)
            number = next((key for key, hook in registered.items() if hook is self.pre_hook), None)
            if number is not None and next(reversed(registered)) != number:
                registered.move_to_end(number)

    @property
    def rule_sets_of_hooks(self) -> frozenset[int]:
        """Which rules give its hooks something to do; none where it has no hooks."""
        sites = [*_GRADIENT, *_GRADIENT.values(), *(["grad"] if self._wants_local else [])] if self._handles else []
        return frozenset(self.rule_sets[site] for site in sites) - {NOTHING}

    def rest(self) -> None:
        """Take the hooks off until `wake`: a module without any is called straight, which no hook is as cheap as.

        In torch's dicts themselves, at a tenth of what handles take, since this may be done at every other step.
        """
        for handle in self._handles:
            registered = handle.hooks_dict_ref()
            if registered is not None and (hook := registered.get(handle.id)) is not None:
                self._resting.append((handle, hook))  # first: an interrupt may come between the two
                registered.pop(handle.id, None)

    def wake(self) -> None:
        """Put back what `rest` took off, at the places that the hooks had: the first after forward, the last before."""
        for handle, hook in self._resting:
            registered = handle.hooks_dict_ref()
            if registered is not None:
                registered[handle.id] = hook
                if hook is not self.pre_hook:
                    registered.move_to_end(handle.id, last=False)
                    hooks.keep_first(registered)
                if self._number not in hooks.WATCHES:  # closed meanwhile, by a signal's handler or another thread
                    registered.pop(handle.id, None)
        self._resting.clear()

    def own(self, kind: str) -> Iterator[tuple[str, Any]]:
        """The module's own parameters or buffers by name."""
        module = self._owner()
        if module is not None:
            yield from ((name, value) for name, value in getattr(module, kind).items() if value is not None)

    def keeps(self, site: str) -> bool:
        """Whether anything of a site may be kept at this step; the name and the call may still say no."""
        return self.capture.masks[self.rule_sets[site]] != 0

    def record_state(self, site: str, moment: Moment, phase: str, repeat: int, *, without: Container[int] = ()) -> None:
        """Record the module's own parameters or buffers, but not those with these ids."""
        if not self.keeps(site):
            return
        for name, tensor in self.own("_parameters" if site == "param" else "_buffers"):
            if id(tensor) not in without:
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
        if not self.keeps(site):
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
        self.capture.site_failed(Origin(self.root.name, self.node_path, site, ""), error)

    def disarm(self, sites: tuple[str, ...]) -> None:
        """See nothing any more at these sites."""
        self.rule_sets = {**self.rule_sets, **dict.fromkeys(sites, NOTHING)}  # others share the one it had
        self._leaves.clear()

    @property
    def was_called(self) -> bool:
        """Whether its hooks ever saw the module run."""
        return self._was_called

    @property
    def is_silent(self) -> bool:
        """It has hooks, and its module was never seen to run."""
        return bool(self._handles) and not self._was_called

    def remove(self) -> None:
        """Take the hooks off again."""
        hooks.WATCHES.pop(self._number, None)  # first, see `wake`
        for handle in self._handles:
            handle.remove()
