"""A module under hooks: which of its values are recorded, and what its hooks do when they fire.

Nothing here may raise into training or keep a module alive.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...observe import tree
from ...observe.clock import Slice
from ...observe.selection import NOTHING, unit_dim_of
from ...records import KEEP_PROBE, KEEP_REPLAY, KEEP_TOKENS, Chunk, SeenValue, StepPosition, ValuePlace
from ...rules import Rule
from ...sites import CALL, GRADIENT_OF, LABELS, OF_CALLS, is_labels
from ..local_values import is_dtensor, requires_gradient
from ..parallel.aliases import Waiting, chunk_of_gradient, has_owner
from ..parallel.cut_calls import CutCalls
from ..parallel.marks import chunk_of_parameter, chunks_of_given, is_marked, split_of, tensor_ranks
from ..parallel.topology import is_distributed
from .callbacks import CalledRoot, GradientArrives, watch_argument_gradient, watch_gradient
from .calls import record_call
from .module_hooks import MODULES, ModuleHooks

_Call = tuple[Slice, str, int, "tuple[int, int] | None"]
"""A call of a module: `Slice` (the model's forward and backward), phase, call index, `Slice.new_graph`'s result."""
_Usual = tuple[int, bool, int, Any]
"""Of an output that is one tensor: its rule set, whether a rule of the set is limited to some calls, the rule set of
its gradient, and what `seen_before` has returned."""
_MAX_LEAVES = 4096
_OVER_TIME = (nn.RNNBase, nn.MultiheadAttention)
"""The modules whose attribute `batch_first` says which dim of the input is the time."""
_graph_task = torch._C._current_graph_task_id


def _first_dims(output: Any) -> tuple[int, int] | None:
    """Return the lengths of the first two of three dims of the first tensor of an output."""
    result = output[0] if isinstance(output, tuple) else None
    return (result.shape[0], result.shape[1]) if isinstance(result, torch.Tensor) and result.dim() == 3 else None


class StateTime(NamedTuple):
    """When a parameter, a buffer, a final gradient or the state of an optimizer is recorded."""

    moment: StepPosition
    phase: str
    repeat: int
    """The index of the row among the rows of the step that have an otherwise equal key."""


class HookedModule:
    """One module under hooks: the rules that select its values, and its calls that are under way."""

    __slots__ = (
        "_again", "_call_key", "_cut", "_disarmed", "_first", "_has_before", "_is_callable", "_is_leaf",
        "_is_time_first", "_leaves", "_open_calls", "_owner", "_signature", "_tapped_slice", "_usual", "_wants_local",
        "capture", "class_name", "has_entered", "has_graph", "has_trained", "hooks", "is_expert", "is_hidden",
        "labels_shape", "module", "node_path", "root", "root_name", "rule_sets", "time_and_batch", "was_called",
    )  # fmt: skip

    def __init__(self, root: CalledRoot, node: tree.Node, *, wants_hooks: bool, cut: CutCalls | None = None) -> None:
        self.capture = root.capture
        self._cut = cut
        """How inputs and outputs are cut over ranks. None if attributes of the module and its parent do not tell."""
        self.root = root
        self.root_name = root.name
        self.node_path = node.path
        self.class_name = node.class_name
        self.module: Callable[[], nn.Module | None] = weakref.ref(node.module)
        self._owner: Callable[[], nn.Module | None] = weakref.ref(node.owner)
        self._call_key = f"{root.name}:{node.path}"
        """The key under which a micro-step counts the module's calls. It names the root: inner roots share counts."""
        self._is_leaf = node.is_leaf
        self.is_expert = node.is_expert
        self._first = node.first
        self._is_callable = node.is_callable or node.hidden is not None
        self._disarmed: tuple[str, ...] = ()
        self.rule_sets = self._find_rule_sets()
        self._leaves: dict[tuple[str, str], tuple[ValuePlace, int]] = {}
        self._again: dict[str, Any] = {}
        """By mode, for an output that is one tensor: what `seen_before` has returned."""
        self._usual: _Usual | None = None
        """What `usual_call` needs. None until a call in training has shown it."""
        self._open_calls: dict[int, list[_Call]] = {}
        """By thread, the module's calls that have begun and not returned: several if the module calls itself."""
        self.has_entered = self.has_graph = self.has_trained = False
        """Whether the module's hooks have run; in a call that makes a graph, or whose recompute would; and in a call of
        the model in training that makes no graph."""
        self._signature: tree.Signature | None = None
        self.time_and_batch: tuple[int, int] | None = None
        """Of a recurrent or attention module without `batch_first`: the lengths of the dims that it took for the time
        and for the batch in its last call in training."""
        self._is_time_first = isinstance(node.module, _OVER_TIME) and not getattr(node.module, "batch_first", True)
        self.labels_shape: tuple[int, tuple[int, ...]] = -1, ()
        """The last step at which the labels of the model's loss were seen, and their shape."""
        self.was_called = False
        """Whether a hook or a tap (a point in a compiled graph) has ever observed a call of the module."""
        self._tapped_slice: Slice | None = None
        """The micro-step in which a tap in a graph recorded the output. The hook around the graph skips this output."""
        self._wants_local = self._asks_for_local(self.rule_sets)
        self.is_hidden = not wants_hooks
        """True if the module has no hooks, because it is compiled or cannot be called."""
        self.hooks = ModuleHooks()
        self._has_before = False
        """Whether the module has the hook that observes the beginning of its calls."""
        if wants_hooks:
            MODULES[self.hooks.number] = self
            self._put_hooks(node.module)

    def _find_rule_sets(self) -> Mapping[str, int]:
        selection = self.capture.selection
        rule_sets = selection.rule_sets(self.node_path, self.class_name, self._is_leaf, is_callable=self._is_callable)
        return {**rule_sets, **dict.fromkeys(self._disarmed, NOTHING)} if self._disarmed else rule_sets

    def _asks_for_local(self, rule_sets: Mapping[str, int]) -> bool:
        has_parameters = any(True for _ in self.own("_parameters"))
        return self.capture.settings.local_gradients and has_parameters and bool(rule_sets["grad"])

    def _put_hooks(self, module: nn.Module) -> None:
        needs_before, needs_after = self._needs(self.rule_sets)
        self._has_before |= needs_before
        self.hooks.put(module, before=needs_before, after=needs_after)

    def _needs(self, rule_sets: Mapping[str, int]) -> tuple[bool, bool]:
        needs_before = bool(rule_sets["input"] or rule_sets["grad_input"] or self._asks_for_local(rule_sets))
        return needs_before, bool(needs_before or rule_sets["output"] or rule_sets["grad_output"])

    def is_meant_by(self, rules: Sequence[Rule]) -> bool:
        """Whether one of the rules selects the module."""
        return any(rule.matches_module(self.node_path, self.class_name, self._is_leaf) for rule in rules)

    def lacks_hooks(self) -> bool:
        """Whether the present rules ask for hooks that are not on the module."""
        needs_before, needs_after = self._needs(self._find_rule_sets())
        return not self.is_hidden and self.hooks.lack(before=needs_before, after=needs_after)

    def reselect(self) -> None:
        """Switch to the present rules, and register the hooks that these rules need. Called between two steps."""
        rule_sets = self._find_rule_sets()
        if rule_sets is self.rule_sets:
            return
        self.rule_sets = rule_sets
        self._forget_leaves()
        self._wants_local = self._asks_for_local(rule_sets)
        if not self.is_hidden and (module := self.module()) is not None:
            self._put_hooks(module)

    def _forget_leaves(self) -> None:
        self._leaves.clear()
        self._again.clear()
        self._usual = None

    def _leaf(self, site: str, name: str) -> tuple[ValuePlace, int]:
        """Return a value's origin (module, site and name), and the rule set that selects the value. Both are cached."""
        key = (site, name)
        leaf = self._leaves.get(key)
        if leaf is None:
            if len(self._leaves) >= _MAX_LEAVES:
                # The cache is limited because names may change with the data: for example, keys of samples.
                self._forget_leaves()
            rule_set = self.capture.selection.narrow(self.rule_sets[site], name)
            origin = ValuePlace(self.root.name, self.node_path, site, name, self.unit_dim(rule_set, site, name))
            leaf = self._leaves[key] = origin, rule_set
            if site in ("param", "grad"):
                self.capture.selection.rule_set_of[origin] = rule_set
        return leaf

    def unit_dim(self, rule_set: int, site: str, name: str) -> int:
        """Return the dim along which a value's units (neurons or channels) lie. A negative dim counts from the end."""
        return unit_dim_of(self.capture.selection, rule_set, self._owner(), site, name)

    def _enter(self) -> _Call:
        slice_, phase = self.root.slice_now()
        call = slice_.enter(phase, self._call_key)
        self.has_entered = True
        if not self.has_graph:
            self.has_graph = torch.is_grad_enabled()
            if not self.has_graph and not self.has_trained and slice_.moment.mode == "train":
                self.has_trained, self.has_graph = True, _is_in_reentrant_checkpoint()
        masks = self.capture.masks
        graph = None
        if masks[self.rule_sets["grad_output"]] or masks[self.rule_sets["grad_input"]]:
            graph = slice_.new_graph(phase, self._call_key, call, with_grad=torch.is_grad_enabled())
        return slice_, phase, call, graph

    @property
    def has_begun(self) -> bool:
        """Whether this thread is in a call of the module whose beginning the module's own hook has observed."""
        return bool(self._open_calls.get(threading.get_ident()))

    def shown_by_tap(self, slice_: Slice, *, is_output: bool) -> None:
        """Remember that the module was called, because a tap in a graph has recorded the module's input or output."""
        self.was_called = True
        if is_output:
            self._tapped_slice = slice_

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments of a module that is about to run."""
        capture = self.capture
        if not capture.has_seen_forward:
            capture.forward_without_root()
        slice_, phase, call, _ = entered = self._enter()
        begun = self._open_calls.setdefault(threading.get_ident(), [])
        if begun and begun[-1][0] is not slice_:
            begun.clear()  # `_open_calls` still contains calls whose forward raised
        begun.append(entered)
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
        if value_mask & KEEP_REPLAY and phase == "forward":
            self._record_call(slice_.moment, call, args, kwargs)
        leaves = self._signature.leaves(args, kwargs)
        if value_mask & KEEP_TOKENS and phase == "forward":
            leaves = list(leaves)
            capture.token_blocks().call_begins(self._leaf("input", "")[0], slice_.moment, leaves)
        if not self.node_path and slice_.moment.mode == "train" and phase == "forward":
            leaves = list(leaves)
            self.root.given.note(leaves, slice_.moment.step)
        for name, tensor in leaves:
            self._see("input", name, tensor, entered, value_mask, gradient_mask)

    def keep_of_labels(self, moment: StepPosition) -> int:
        """Return what to keep of the labels of a loss, as bits of KEEP_*."""
        rule_set = self._leaf("input", LABELS)[1]
        is_asked = self.capture.selection.names_tensors(rule_set)
        return self.capture.keep_of(rule_set, moment.micro_step, 0) & ~(KEEP_REPLAY | KEEP_TOKENS) if is_asked else 0

    def record_labels(self, labels: torch.Tensor, slice_: Slice, keep: int) -> None:
        """Record the labels of a loss, once in a micro-step, unless an argument of the model has the labels."""
        self.labels_shape = slice_.moment.step, tuple(labels.shape)
        if not keep:
            return
        names = (name for site, name in self._leaves if site == "input" and name != LABELS)
        if (
            self.root.given.first() is labels
            or any(map(is_labels, names))
            or slice_.moment.step != self.capture.clock.step
        ):
            return
        origin = self._leaf("input", LABELS)[0]
        if slice_.enter("forward", origin) == 0:
            self.capture.observe(SeenValue(origin, slice_.moment, "forward", 0), keep, labels)

    def _record_call(self, moment: StepPosition, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module, keep = self._owner(), self.capture.keep_of(self.rule_sets["input"], moment.micro_step, call)
        if module is not None and self._signature and keep & KEEP_REPLAY:
            seen = SeenValue(ValuePlace(self.root.name, self.node_path, CALL, ""), moment, "forward", call)
            record_call(self.capture, seen, module, self._signature, args, kwargs)

    def _await_local_gradients(self, slice_: Slice) -> None:
        """Put hooks on the module's own parameters, to record gradients before they are reduced over ranks."""
        for name, parameter in self.own("_parameters"):
            is_plain = type(parameter) in (nn.Parameter, torch.Tensor) and parameter.is_leaf and parameter.requires_grad
            if is_plain and self.root.is_first_use(self.node_path, name, parameter, slice_):
                origin, rule_set = self._leaf("grad", name)
                if keep := self.capture.keep_of(rule_set, slice_.moment.micro_step, 0):
                    hook = GradientArrives(self.capture, origin, slice_.moment, 0, keep, "local")
                    hook.chunk = self.marked_chunk(parameter, parameter)
                    watch_gradient(parameter, hook)

    def after_forward(self, output: Any) -> None:
        """Record the output that the module's forward has returned."""
        self.was_called = True
        if not self.capture.has_seen_forward:
            self.capture.forward_without_root()
        masks = self.capture.masks
        value_mask, gradient_mask = masks[self.rule_sets["output"]], masks[self.rule_sets["grad_output"]]
        if not value_mask and not gradient_mask and not self._has_before:
            self._tapped_slice = None
            return
        begun = self._open_calls.get(threading.get_ident()) if self._has_before else None
        slice_, phase, _, graph = entered = begun.pop() if begun else self._enter()
        tapped, self._tapped_slice = self._tapped_slice, None
        if tapped is not None and tapped is self.root.slice_now()[0]:
            return
        wants_gradient = gradient_mask and graph is not None
        if value_mask or wants_gradient:
            if type(output) is not torch.Tensor:
                if self._is_time_first and slice_.moment.mode == "train":
                    self.time_and_batch = _first_dims(output)
                for name, tensor in tree.tensor_leaves(output):
                    self._see("output", name, tensor, entered, value_mask, gradient_mask)
            elif value_mask == KEEP_PROBE and not wants_gradient and phase == "forward":
                self._see_by_probe(output, entered)
            else:
                self._see("output", "", output, entered, value_mask, gradient_mask)
        if masks[self.rule_sets["input"]] & KEEP_TOKENS and phase == "forward":
            leaves = tree.tensor_leaves(output)
            self.capture.token_blocks().call_ends(self._leaf("input", "")[0], slice_.moment, leaves)

    def _see_by_probe(self, output: torch.Tensor, entered: _Call) -> None:
        """Pass an output that only ``keep=probe`` wants to the probe, by its fast form if it has seen the output."""
        capture, moment, call = self.capture, entered[0].moment, entered[2]
        origin, rule_set = self._leaf("output", "")
        again = self._again.get(moment.mode)
        if again is not None:
            if not capture.keep_of(rule_set, moment.micro_step, call):
                return
            if not self.root.is_over_meshes and capture.saw_again(again, output, moment.step):
                return
        self._see("output", "", output, entered, KEEP_PROBE, 0)
        if self._cut is None and (again := capture.seen_before(origin, moment.mode, output)) is not None:
            self._again[moment.mode] = again
            if moment.mode == "train" and not self._has_before and self.has_graph:
                is_limited = rule_set in capture.selection.limited
                self._usual = rule_set, is_limited, self.rule_sets["grad_output"], again

    def usual_call(self, output: Any) -> bool:
        """Do what `after_forward` does for an output that only the probe wants, as most calls have it in training.

        If the call is another one, or not the first one in a micro-step, do nothing and return False. In a training
        that uses the processor's caches for its own data, each function called here takes 1 to 10 us.
        """
        usual, root, capture = self._usual, self.root, self.capture
        slice_ = root.clock.of_thread.active
        if usual is None or slice_ is None or type(output) is not torch.Tensor:
            return False
        rule_set, is_limited, of_gradient, again = usual
        masks, (step, micro_step, mode) = capture.masks, slice_.moment
        keep = capture.selection.first_calls.get((rule_set, micro_step, 0)) if is_limited else masks[rule_set]
        if (
            keep != KEEP_PROBE
            or mode != "train"
            or capture.is_in_stage
            or root.is_over_meshes
            or _graph_task() != -1  # a backward inside of the forward
            or masks[of_gradient]
            or self._tapped_slice is not None
            or self._call_key in slice_.called
            or not capture.saw_again(again, output, step)
        ):
            return False
        slice_.called[self._call_key] = None
        return True

    def _see(
        self, site: str, name: str, tensor: torch.Tensor, entered: _Call, value_mask: int, gradient_mask: int
    ) -> None:
        capture, (slice_, phase, call, graph) = self.capture, entered
        moment = slice_.moment
        chunk = of_gradient = waiting = None
        if self.root.marked_ranks and type(tensor) is nn.Parameter:
            chunk, of_gradient = chunks_of_given(tensor, self.root.marked_ranks)
        else:
            if self._cut is not None:
                chunk, of_gradient = self._cut.chunks(site, tensor)
            if chunk is None and self.root.is_over_meshes:
                chunk, waiting = self._chunk_or_wait(tensor)
                of_gradient = None if chunk is None else chunk_of_gradient(chunk)
        try:
            if value_mask:
                origin, rule_set = self._leaf(site, name)
                if keep := capture.keep_of(rule_set, moment.micro_step, call):
                    put = None if waiting is None else waiting.put
                    seen = tuple.__new__(SeenValue, (origin, moment, phase, call, 0, None, chunk, None))
                    capture.observe(seen, keep, tensor, put)
            if gradient_mask and graph is not None and requires_gradient(tensor):
                origin, rule_set = self._leaf(GRADIENT_OF[site], name)
                if keep := capture.keep_of(rule_set, moment.micro_step, graph[0]):
                    hook = GradientArrives(capture, origin, moment, graph[0], keep, None, graph[1])
                    if site == "input" and type(tensor) is not torch.Tensor and is_dtensor(tensor):
                        watch_argument_gradient(tensor, hook)
                    else:
                        watch_gradient(tensor, hook)
                        hook.chunk = of_gradient
                        if waiting is not None:
                            waiting.learn = hook.learn
        finally:
            if waiting is not None:
                self.capture.aliases.wait(waiting)

    def _chunk_or_wait(self, tensor: torch.Tensor) -> tuple[Chunk | None, Waiting | None]:
        """Return a plain tensor's chunk in a tensor parallel region, or a `Waiting` that may get the chunk later."""
        aliases = self.capture.aliases
        if is_dtensor(tensor):
            aliases.saw(tensor)
            return None, None
        if not has_owner(tensor):
            return None, None
        chunk = aliases.chunk_of_alias(tensor)
        return chunk, None if chunk is not None else Waiting(tensor)

    @property
    def rule_sets_of_hooks(self) -> frozenset[int]:
        """Return the rule sets for which the module's hooks record values. Without hooks, the set is empty."""
        sites = [*OF_CALLS, *(["grad"] if self._wants_local else [])] if self.hooks else []
        return frozenset(self.rule_sets[site] for site in sites) - {NOTHING}

    def own(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield the module's own parameters or buffers by name. Names of experts are numbered as in the whole model."""
        module = self._owner()
        for name, value in getattr(module, kind).items() if module is not None else ():
            if value is not None:
                base = name.rstrip("0123456789") if self._first else name
                yield f"{base}{int(name[len(base) :]) + self._first}" if base != name else name, value

    def keeps(self, site: str) -> bool:
        """Whether a value of a site (such as `output`) may be kept now. Rules for names or calls may exclude it."""
        return self.capture.masks[self.rule_sets[site]] != 0

    def record_state(self, site: str, at: StateTime, *, without: Container[int] = ()) -> None:
        """Record the module's own parameters or buffers, except those with the ids in `without`."""
        for name, tensor in self.own("_parameters" if site == "param" else "_buffers"):
            if id(tensor) not in without:
                chunk, note = None, None
                if is_marked(tensor):
                    chunk, note = self.marked_chunk(tensor, tensor), self.note_of_mark(tensor, tensor)
                self.record(site, name, tensor, at, chunk=chunk, note=note)

    def note_of_mark(self, parameter: torch.Tensor | None, tensor: torch.Tensor) -> str | None:
        """Return the note for a marked parameter, its gradient or state if the chunk is unknown, otherwise None."""
        module = self._owner() if is_marked(parameter) and is_distributed() else None
        is_known = module is None or self.is_expert or getattr(module, "is_expert", False) or tensor_ranks(module)
        is_known = is_known or getattr(parameter, "allreduce", True) is False or not tensor.dim()
        if is_known and tensor.dim() and (split := split_of(parameter)) is not None and not split.parts:
            return '{"no_layout":"marked"}'
        return None if is_known else '{"no_group":true,"no_layout":"marked"}'

    def tensor_ranks(self) -> tuple[int, ...]:
        """Return the ranks over which the module cuts its tensors. The result is empty if the module cuts nothing."""
        module = self._owner()
        return () if module is None else tensor_ranks(module)

    def marked_chunk(self, parameter: torch.Tensor, tensor: torch.Tensor) -> Chunk | None:
        """Return the chunk of a marked parameter, its gradient or its state. Return None if the chunk is unknown."""
        module = self._owner() if is_marked(parameter) else None
        if module is None or (getattr(parameter, "allreduce", True) is False and not self.is_expert):
            return None  # the parameter is an expert's, and which ranks share the expert is not known
        return chunk_of_parameter(parameter, tensor, tensor_ranks(module))

    def record(
        self, site: str, name: str, tensor: torch.Tensor, at: StateTime, *, scope: str | None = None,
        chunk: Chunk | None = None, note: str | None = None,
    ) -> None:  # fmt: skip
        """Record one named tensor of the module if a rule selects it."""
        if not self.capture.masks[self.rule_sets[site]]:  # `keeps`, inlined because most records come this way
            return
        origin, rule_set = self._leaf(site, name)
        if keep := self.capture.keep_of(rule_set, at.moment.micro_step, 0):
            try:
                seen = tuple.__new__(SeenValue, (origin, at.moment, at.phase, 0, at.repeat, scope, chunk, note))
                self.capture.observe(seen, keep, tensor)
            except Exception as error:
                self.failed(site, error)

    def failed(self, site: str, error: Exception) -> None:
        """Count an error of the recorder. A site (such as `output`) that keeps failing is no longer recorded."""
        self.capture.site_failed(ValuePlace(self.root.name, self.node_path, site, ""), error)

    def disarm(self, sites: tuple[str, ...]) -> None:
        """Record nothing at the given sites (such as `output`) from now on."""
        self._disarmed = (*self._disarmed, *sites)
        self.rule_sets = {**self.rule_sets, **dict.fromkeys(sites, NOTHING)}  # other modules share the old mapping
        self._forget_leaves()

    @property
    def is_silent(self) -> bool:
        """Whether the module has hooks that have never fired."""
        return bool(self.hooks) and not self.was_called


def _is_in_reentrant_checkpoint() -> bool:
    """Whether the current call is that of a reentrant checkpoint, which makes no graph until its recompute.

    If no input of the checkpoint requires a gradient, there is no recompute, and its parameters have no gradient.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.forward":  # of torch, DeepSpeed and Megatron
            return True
        frame = frame.f_back
    return False
