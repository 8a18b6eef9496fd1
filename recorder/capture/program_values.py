"""Records values that the program names: the scalars of a step, such as the loss, and tensors given to `recorder.tap`.

A scalar comes from the program, from an optimizer or a clip, or it is the loss at which a backward begins. No device is
synced for a scalar: a tensor of one element is copied as any other value is. This module records `recorder.tap` in
eager code; `recorder/capture/hooks/graph_rows.py` records the taps in a compiled graph.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from ..observe.selection import NOTHING, scalar_keep, unit_dim_of
from ..observe.tree import tensor_leaves
from ..records import SeenValue, StepPosition, ValuePlace
from ..sites import CLIP_LIMIT, CLIP_NORM, EVALUATION_LOSS, LABELS, OBJECTIVE, is_validation_loss
from ..system.processes import loaded
from ..taps.graphs import in_functorch, is_traced
from .aliases import chunk_of_gradient, has_owner
from .hooks.callbacks import CaptureForHooks, GradientArrives, watch_gradient
from .hooks.module import SHIFT_STEPS
from .hooks.objectives import SharedTensors
from .hooks.root import Root
from .local_values import UnsupportedKind, plain, requires_gradient

_ENGINE = "_engine_run_backward"
_is_compiling = torch.compiler.is_compiling

LOSS = "loss"
"""The name of the loss as a scalar. The recorder finds the loss if the program gives no scalar of this name."""
_MAX_LOSSES = 64
"""The most losses of one step that are kept until the step ends."""
_SURE = 16
"""How often the loss of one place in a step must have been that of one model before it is taken for granted."""
_MAX_FACTORS = 4
"""The most nodes from a backward's first one to the loss that a model has returned."""
_MAX_NAME_LENGTH = 1_024
"""The most letters of a scalar's name. A reader rejects a batch with a longer name as damaged."""
_FOUND = {LOSS: '{"found":"backward"}', EVALUATION_LOSS: '{"found":"evaluation"}'}
_OF_LOGITS = ("Softmax", "Sigmoid", "Relu")
_WRONG_BELOW = {
    "LogSoftmax": _OF_LOGITS, "BinaryCrossEntropyWithLogits": _OF_LOGITS,
    "NllLoss": (*_OF_LOGITS, "Addmm", "Convolution"), "NllLoss2D": (*_OF_LOGITS, "Convolution"),
    "CtcLoss": (*_OF_LOGITS, "Addmm", "Mm", "Convolution"),
}  # fmt: skip
"""By the kind of a node of autograd, the kinds of nodes that make an argument which the function does not expect."""
_SHAPES_ALONE = (
    "View", "UnsafeView", "Reshape", "Transpose", "T", "Permute", "Select", "Slice", "Squeeze", "Unsqueeze", "Alias",
    "Clone", "ToCopy", "Index", "IndexSelect",
)  # fmt: skip
"""The kinds of nodes that change only how elements lie, or choose some."""
_OUTPUTS = ("Addmm", "Slice", "Sigmoid", "Tanh", "Relu", "Softplus")
"""The kinds of nodes that make the outputs of a model."""
_OF_DIFFERENCES = ("MseLoss", "SmoothL1Loss", "HuberLoss")
_NEVER_NEGATIVE = (*_OF_DIFFERENCES, "NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")
_MAX_MADE_BY = 64
"""How many nodes are searched for the parameters that have made an argument."""
_EARLY_STEPS = 10
"""At so many steps the labels of a loss are looked for, whether a rule keeps them or not."""
_MOST_SHIFT, _LEAST_SHIFTED, _LEAST_OF_ROW, _WRONG_SHIFTS = 2, 32, 4, {0, 2}
"""The furthest place of a label after its token, the least number of labels, the least of a row that are compared, as
one may agree by the task's nature, and the places that are no next token."""
_MAX_NODES, _MAX_MISSES, _MAX_KINDS = 16, 8, 256
"""How many nodes of a loss's graph are searched for labels, and how many graphs of one kind that have none."""


class Scalars:
    """Records the scalars, such as the loss and learning rates. Called on training threads."""

    def __init__(self, capture: CaptureForHooks, roots: Sequence[Root]) -> None:
        self.capture = capture
        self.roots = roots
        self._repeats: dict[str, int] = {}
        self._step: int | None = None
        self._losses: deque[tuple[int, int, torch.Tensor, str, str | None]] = deque()
        """The losses found so far, as step, keep bits, value, name and root. They wait: the program may record a loss
        itself."""
        self._is_loss_given = False
        self._waits_for_loss = True
        """True until a step ends in which a loss was found and the program gave no loss. After that step each loss is
        recorded as it is found, so that a process that ends suddenly leaves the loss of its last step."""
        self._roots_of_losses: dict[tuple[str, int], tuple[str, int]] = {}
        """By the model that was called last and the number of the loss in its step: the model that was updated next,
        empty where it was not always the same, and how often it was so."""
        self._not_updated: list[tuple[str, int]] = []
        """The keys of `_roots_of_losses` of the losses that were found since the last update among several models."""
        self._num_losses = 0
        """How many losses of this step were found."""
        self._returned: dict[tuple[str, int], str | None] = {}
        """By root and number of a node, the name of a number that the root has returned in training in this step. None
        if the node has made several."""
        self._names_of_losses: dict[str, set[str]] = {}
        """By root, the names at which it has returned the losses of the training since the last evaluation."""
        self._evaluated: set[str] = set()
        """The roots that were evaluated in this step."""
        self._evaluations: dict[str, tuple[int, int, torch.Tensor, int]] = {}
        """By root, the evaluation that is under way: its step, keep bits, and the mean and number of its losses."""
        self._is_validation_given = False

    def step_changes(self, step: int) -> None:
        """Record the waiting losses before the step changes, while the rules of the old step are still in force."""
        if self._losses and self._losses[0][0] != step:
            self._waits_for_loss = False
        self.record_losses(until=step)
        if step != self._step:  # the program may have named the step that is current already
            self._step, self._num_losses = step, 0
            self._repeats.clear()
            self._returned.clear()
            for root_name in self._evaluated:
                self._names_of_losses.pop(root_name, None)
            self._evaluated.clear()

    def record(self, name: str, value: Any, root_name: str | None = None) -> None:
        """Record a number of this step: a float, or a tensor of one element, which is not synced.

        Raises:
            ValueError: the name is far too long, or is no text, so that no row of the batch could be written.
        """
        if not isinstance(name, str) or len(name) > _MAX_NAME_LENGTH:
            what = f"{len(name):,} letters long" if isinstance(name, str) else f"of type {type(name).__name__}"
            raise ValueError(f"the name is {what}; expected a text of at most {_MAX_NAME_LENGTH:,} letters")
        if name == LOSS:
            self._is_loss_given = True
            self._losses.clear()
        if is_validation_loss("scalar", name):
            self._is_validation_given = True
            self._evaluations.clear()
        if keep := self._keep_of_scalar(name):
            self._record(name, value, keep, self.capture.clock.step, root_name)

    def wants(self, name: str) -> bool:
        """Whether a rule asks for a scalar on this rank at some step."""
        return self.capture.selection.rule_set_of_name("scalar", name) != NOTHING

    def add_loss(self, value: torch.Tensor) -> None:
        """Take a one-element tensor at which a backward begins. It is the loss unless the program gives a loss.

        With several models it is the loss of the one that is updated next. Where this cannot be told from the last
        steps, the loss waits for the update.
        """
        if self._is_loss_given or not (keep := self._keep_of_scalar(LOSS)):
            return
        if (local := _local_loss(value)) is None:
            return
        last = self.capture.root_calls.outermost
        at = last.name if last is not None else "", self._num_losses
        self._num_losses += 1
        if len(self.roots) > 1:
            del self._not_updated[:-_MAX_LOSSES]
            self._not_updated.append(at)
        next_root, num_seen = self._roots_of_losses.get(at, ("", 0))
        root_name = next_root if next_root and num_seen >= _SURE else None
        waits = self._waits_for_loss or (root_name is None and len(self.roots) > 1)
        with torch.no_grad():
            held = local.detach().clone() if waits else local.detach()
        self._losses.append((self.capture.clock.step, keep, held, LOSS, root_name))
        if not waits or len(self._losses) > _MAX_LOSSES:
            self.record_losses()

    @property
    def has_new(self) -> bool:
        """Whether `updates` has anything to do: a loss waits, or was found beside other models. False for one model."""
        return bool(self._losses or self._not_updated)

    def updates(self, root_name: str) -> None:
        """File the losses that were found since the last update under the model that is about to be updated."""
        for at in () if self._waits_for_loss else self._not_updated:  # the first step may end in the middle of a loop
            known, num_seen = self._roots_of_losses.get(at, (root_name, 0))
            self._roots_of_losses[at] = known if known == root_name else "", num_seen + 1
        self._not_updated.clear()
        self._losses = deque((*one[:4], one[4] or root_name) for one in self._losses)
        if not self._waits_for_loss:
            self.record_losses()

    def returned(self, root_name: str, name: str, node: Any) -> None:
        """Take the node of a single number that a model has returned: the next backward may begin there."""
        if name and len(self._returned) < _MAX_LOSSES:
            key = root_name, node._sequence_nr()
            self._returned[key] = None if key in self._returned else name

    def backward_begins(self, node: Any) -> None:
        """Learn at which name a model returns its loss, from the node at which a backward begins."""
        for _ in range(_MAX_FACTORS if self._returned else 0):
            number = node._sequence_nr()
            for (root_name, known), name in self._returned.items():
                if known == number and name is not None:
                    self._names_of_losses.setdefault(root_name, set()).add(name)
            children = _children(node)
            if len(children) != 1 or _kind(node) not in ("Mul", "Div") or _is_negative(node):
                break  # a factor above zero is the number of micro-batches, or a scale
            node = children[0]

    def add_evaluation(self, output: Any, root_name: str) -> None:
        """Take the loss from a model's output in an evaluation, to record the mean over the evaluation."""
        try:
            if self._is_validation_given or not (keep := self._keep_of_scalar(EVALUATION_LOSS)):
                return
            self._evaluated.add(root_name)
            leaves = dict(tensor_leaves(output))
            loss = leaves.get("loss")
            if loss is None and len(names := self._names_of_losses.get(root_name, ())) == 1:
                loss = leaves.get(*names)
                loss = loss if loss is not None and not loss.dim() else None
            if not _may_be_loss(loss) or is_traced() or in_functorch() or (local := _local_loss(loss)) is None:
                return
            step, keep, mean, num = self._evaluations.get(root_name, (self.capture.clock.step, keep, 0.0, 0))
            with torch.no_grad():
                mean = mean + (local.detach().float() - mean) / (num + 1)
            self._evaluations[root_name] = step, keep, mean, num + 1
        except Exception as error:
            self.capture.hook_failed("the loss of an evaluation", error)

    def record_losses(self, until: int | None = None) -> None:
        """Record the losses that were found, and the means of evaluations. Those of the step `until` keep waiting."""
        for root_name in [name for name, one in list(self._evaluations.items()) if one[0] != until]:
            step, keep, mean, _ = self._evaluations.pop(root_name)
            self._losses.appendleft((step, keep, mean, EVALUATION_LOSS, root_name))
        while self._losses and self._losses[0][0] != until:
            step, keep, value, name, of_root = self._losses.popleft()
            try:
                self._record(name, value, keep, step, of_root, note=_FOUND[name])
            except Exception as error:
                self.capture.hook_failed("the loss", error)

    def _keep_of_scalar(self, name: str) -> int:
        keep = scalar_keep(self.capture.masks[self.capture.selection.rule_set_of_name("scalar", name)])
        return 0 if keep and self.capture.is_disarmed("scalar", name) else keep

    def _record(
        self, name: str, value: Any, keep: int, step: int, root_name: str | None = None, note: str | None = None
    ) -> None:
        if not isinstance(value, torch.Tensor):
            kind = torch.int64 if isinstance(value, int) and not isinstance(value, bool) else torch.float64
            value = torch.tensor(value, dtype=kind, device="cpu")
        elif value.dim() and value.numel() == 1:
            value = value.detach().reshape(())
        repeat = self._repeats.get(name, 0)
        self._repeats[name] = repeat + 1
        if root_name is None:
            trained = next((root for root in self.roots if root.clock.is_trained), None)
            root_name = trained.name if trained else self.roots[0].name if self.roots else ""
        origin, moment = ValuePlace(root_name, "", "scalar", name), StepPosition(step, None, "train")
        self.capture.observe(SeenValue(origin, moment, "forward", 0, repeat, note=note), keep, value)


class TapsByHand:
    """Records the values that the program passes to `recorder.tap`. Called on training threads."""

    def __init__(self, capture: CaptureForHooks, roots: Sequence[Root], objectives: SharedTensors) -> None:
        self._capture = capture
        self._roots = roots
        self._objectives = objectives

    def record(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor under a name. Its gradient is recorded in a row of phase ``backward`` when it arrives."""
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


class LossFinder:
    """Finds the loss, a tensor of one element whose backward is called, and records it as the scalar ``loss``.

    No hook of torch shows the tensors at which a backward begins, but every backward calls the function with which
    `torch.autograd` starts its engine. So that function and `GradScaler.scale` are wrapped until `close`. So is the
    function to which `torch.nn.utils.clip_grad_norm_`, however it was imported, gives the norm of the gradients. The
    wrapper does nothing while dynamo compiles, while a graph is made, or inside another backward. It ignores
    `torch.autograd.grad` except in the stages of a pipeline, which may use it as their backward. The wrapper may not
    read a value, hold a graph, or raise into training.
    """

    def __init__(self, scalars: Scalars, *, on_backward: Callable[[], None]) -> None:
        """Call `on_backward` as each backward begins that adds to the gradients of parameters, on its thread."""
        self._scalars = scalars
        self._capture = scalars.capture
        self._on_backward = on_backward
        self._scaled: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        """For each loss that `GradScaler` scaled last: the scaled result, and the unscaled loss without its graph."""
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        """The wrapped attributes: owner, name, the original function, and our wrapper."""
        self._misses: dict[tuple[str, ...], int] = {}
        """By the names of the first nodes of a graph, in how many such graphs, one after the other, were no labels."""
        self._looks: dict[tuple[str, tuple[str, ...]], int] = {}
        """By root and names of first nodes, how many graphs were searched for arguments that a loss does not expect."""
        self._shifts: list[tuple[Root, int, torch.Tensor, torch.cuda.Event | None]] = []
        """Of the first labels: the root, the step, how far they are shifted, and the event after which it is known."""
        self.look_at_rules()

    def look_at_rules(self) -> None:
        """Install the wrappers if a rule asks for loss, norms or labels, and the wrappers are not installed yet."""
        selection = self._capture.selection
        wants_labels = selection.names_tensors(selection.rule_set_of_name("input", LABELS))
        if self._wrapped or not (self._scalars.wants(LOSS) or self._scalars.wants(CLIP_NORM) or wants_labels):
            return
        for owner, name in ((clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")):
            if hasattr(owner, name):
                self._wrap(owner, name, functools.partial(self._looking, self._clips, "a clip"))
        if hasattr(torch.autograd, _ENGINE):
            self._wrap(torch.autograd, _ENGINE, functools.partial(self._looking, self._begins, "the loss"))
        sharded = loaded("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        for kind in (GradScaler, sharded):
            if kind is not None and "scale" in vars(kind):
                self._wrap(kind, "scale", functools.partial(self._looking, self._note, "the loss", with_result=True))

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = (wrapper for _, _, function, wrapper in self._wrapped if function is original)  # pickle wants one object
        wrapper = next(ours, None) or functools.wraps(original)(make(original))
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))

    def _looking(self, look: Any, what: str, original: Any, *, with_result: bool = False) -> Callable[..., Any]:
        """Return the original function, with `look` called before it, or after it with its result as first argument."""
        finder = self

        def run(*args: Any, **kwargs: Any) -> Any:
            is_seen = not _is_compiling() and finder._capture.is_open
            if is_seen and not with_result:
                try_to_look(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                _leave_own_frame_out(error)
                raise
            if is_seen and with_result:
                try_to_look(result, *args, **kwargs)
            return result

        def try_to_look(*args: Any, **kwargs: Any) -> None:
            try:
                look(*args, **kwargs)
            except Exception as error:
                finder._capture.hook_failed(what, error)

        _leave_uncompiled(run, with_callees=False)
        _leave_uncompiled(try_to_look, with_callees=True)
        return run

    def _clips(self, parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None) -> None:
        local = None if is_traced() or in_functorch() else _local_loss(total_norm)
        if local is None:
            return
        with torch.no_grad():  # a NaN would stand before the gradients that it comes from
            self._scalars.record(CLIP_NORM, local.nan_to_num(nan=0.0, posinf=0.0))
            if isinstance(max_norm, torch.Tensor):  # an infinite limit on a device becomes the largest number
                self._scalars.record(CLIP_LIMIT, max_norm.nan_to_num())
            elif math.isfinite(limit := float(max_norm)):
                self._scalars.record(CLIP_LIMIT, limit)

    def _note(self, scaled: Any, _: GradScaler, outputs: Any) -> None:
        if isinstance(outputs, torch.Tensor):
            scaled, outputs = [scaled], [outputs]
        if not isinstance(outputs, (list, tuple)):
            return
        pairs = zip(scaled, outputs, strict=True)
        self._scaled = [
            (weakref.ref(result), loss.detach()) for result, loss in pairs if _may_be_loss(loss) and result is not loss
        ]

    def _begins(self, outputs: Iterable[Any], *_: Any, accumulate_grad: bool = False, **__: Any) -> None:
        if not accumulate_grad and not self._capture.is_in_stage:
            return
        if torch._C._current_graph_task_id() != -1 or is_traced() or in_functorch():
            return
        if accumulate_grad:
            self._on_backward()
        for tensor in outputs:
            if _may_be_loss(tensor):
                unscaled = (loss for result, loss in self._scaled if result() is tensor)
                self._scalars.add_loss(next(unscaled, tensor))
                if tensor.grad_fn is not None and not self._capture.is_in_stage:
                    self._scalars.backward_begins(tensor.grad_fn)
                    self._look_at_graph(tensor.grad_fn)
        self._scaled = []

    def _look_at_graph(self, node: Any) -> None:
        """Record the labels of a loss, and note an argument that it does not expect. `node` is the graph's first."""
        kind = (node.name(), *(child.name() for child in _children(node)))
        root = self._capture.root_calls.outermost
        if root is not None:
            num_looks = self._looks.get((root.name, kind), 0)
            if num_looks < _MAX_MISSES and len(self._looks) < _MAX_KINDS:
                self._looks[root.name, kind] = num_looks + 1
                self._look_at_arguments(node)
        self._look_for_labels(node, kind, root)
        if self._shifts and self._capture.clock.step >= SHIFT_STEPS:
            self._note_shift()

    def _note_shift(self) -> None:
        """Note that labels are not the next tokens, if all of the first steps' are shifted alike."""
        if all(event is None or event.query() for *_, event in self._shifts):
            shifts, steps = {int(one) for *_, one, _ in self._shifts}, [step for _, step, _, _ in self._shifts]
            if shifts <= _WRONG_SHIFTS and len(shifts) == 1 and len(set(steps)) == SHIFT_STEPS:
                self._shifts[0][0].inventory.note_loss_argument(f"Shift of {shifts.pop()}", steps[0])
            self._shifts.clear()

    def _look_at_arguments(self, node: Any) -> None:
        """Note an argument that a loss does not expect, for the model that has made it."""
        found = None
        with suppress(RuntimeError):  # the graph is freed: the backward says so
            found = _wrong_argument(node)
        if found is not None:
            ids, step = _parameters_below(found[1]), self._capture.clock.step
            for root in self._scalars.roots:
                if any(id(parameter) in ids for _, _, parameter in root.parameters()):
                    root.inventory.note_loss_argument(found[0], step)
                    break

    def _look_for_labels(self, node: Any, kind: tuple[str, ...], root: Root | None) -> None:
        """Record the labels that a loss has saved, as an input of the model. At the first steps, note their shape."""
        # With several models, the loss may be that of another model than the one that was called last.
        if root is None or self._scalars.roots != [root] or root.is_over_meshes or root.marked_ranks:
            return
        hooked = root.module_at("")
        if hooked is None or hooked.is_hidden or not hooked.keeps("input"):
            return
        slice_ = root.clock.recomputed()
        keep = hooked.keep_of_labels(slice_.moment)
        if not keep and self._capture.clock.step >= _EARLY_STEPS:
            return
        if len(self._misses) >= _MAX_KINDS:
            self._misses.clear()
        if self._misses.get(kind, 0) < _MAX_MISSES:
            labels, has_more = None, False
            with suppress(RuntimeError):  # the graph is freed, or the labels have changed: the backward says so
                labels, has_more = _labels_below(node, is_first_enough=self._capture.clock.step >= _EARLY_STEPS)
            if has_more:
                root.inventory.note_many_labels()
            if labels is None:
                self._misses[kind] = self._misses.get(kind, 0) + 1
            else:
                self._misses.pop(kind, None)
                hooked.record_labels(labels, slice_, keep)
                if self._capture.clock.step < SHIFT_STEPS and not slice_.moment.micro_step and not has_more:
                    shift = _shift_of(labels, hooked.tokens)
                    if shift is not None:
                        self._shifts.append((root, self._capture.clock.step, *_on_host(shift)))

    def close(self) -> None:
        """Remove the wrappers. If the program has wrapped one of our wrappers, the program's wrapper keeps working."""
        for owner, name, original, wrapper in self._wrapped:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()
        self._scaled = []


def _leave_own_frame_out(error: BaseException) -> None:
    """Remove a wrapper's frame from the traceback of an error. A bare `raise` does not add the frame again."""
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next


def _leave_uncompiled(function: Any, *, with_callees: bool) -> None:
    """Keep dynamo from compiling a function of the recorder that a compiled program's backward calls."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if with_callees else default)
    dynamo.set_code_exec_strategy(function.__code__, strategy)


def _local_loss(value: Any) -> torch.Tensor | None:
    """Return a loss as a plain tensor. Return None if its value is not known here, or cannot be copied now."""
    # A kernel that is launched now would become part of the graph.
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        local, chunk = plain(value)
    except UnsupportedKind:  # the tensor has no values, for example a meta tensor
        return None
    return None if chunk is not None and 'Partial"' in chunk.placements else local


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions[:_MAX_NODES] if child is not None]


def _labels_below(loss: Any, *, is_first_enough: bool) -> tuple[torch.Tensor | None, bool]:
    """Return the labels that one of the first nodes of a loss has saved for the backward, or None.

    Also return whether another node has saved other labels, unless the first labels are enough. Only whole numbers
    count, which may be classes.
    """
    nodes, first = [loss], None
    for node in nodes:
        if (labels := _saved(node, "target")) is None:
            pass
        elif first is None:
            if _compares_samples(node):
                return None, False
            first = labels
            if is_first_enough:
                break
        elif not (labels.is_floating_point() or first.is_floating_point()) and labels.data_ptr() != first.data_ptr():
            return first, True
        nodes += _children(node)[: _MAX_NODES - len(nodes)]
    return first, False


def _shift_of(labels: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Return how many places after each token its label stands in the same row of tokens, from 0 to `_MOST_SHIFT`.

    That is -1 if none of these holds for each label, or more than one does. Labels below zero are ignored. Return None
    for what is no batch of tokens. Nothing here waits for a device.
    """
    are_whole = all(type(one) is torch.Tensor and one.dtype in (torch.int64, torch.int32) for one in (tokens, labels))
    if tokens is None or tokens.dim() != 2 or not are_whole or not (tokens.is_cpu or tokens.is_cuda):
        return None
    num_rows, length = tokens.shape
    num_labels = labels.numel() // max(num_rows, 1)
    is_batch = num_labels * num_rows == labels.numel() and length - num_labels in (0, 1)
    if not is_batch or num_labels < _MOST_SHIFT + _LEAST_OF_ROW or labels.device != tokens.device:
        return None
    if tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        rows, equal = labels.detach().reshape(num_rows, num_labels), []
        vary = ((rows[:, 1:] != rows[:, :-1]) & (rows[:, 1:] >= 0)).sum() >= _LEAST_SHIFTED // 2
        for shift in range(_MOST_SHIFT + 1):
            end = min(num_labels, length - shift)
            compared, meant = rows[:, :end], tokens[:, shift : shift + end]
            is_enough = (compared >= 0).sum() >= _LEAST_SHIFTED
            equal.append(((compared == meant) | (compared < 0)).all() & is_enough & vary)
        hits = torch.stack(equal).long()
        return torch.where(hits.sum() == 1, hits.argmax(), -1)


def _on_host(value: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy a number of a device to the host. Return the copy, and the event after which it is there."""
    if not value.is_cuda:
        return value, None
    event = torch.cuda.Event()
    host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    event.record()
    return host, event


def _wrong_argument(loss: Any) -> tuple[str, Any] | None:
    """Return the first function of a loss that gets what it does not expect, and its node: ``LogSoftmax of Softmax``.

    If the whole loss is the negative of a loss that is never negative, it is ``Neg of NllLoss``, for example.

    A loss of differences whose two arguments are both expanded, one of them along the batch, compares each output with
    all labels. So does one of outputs [n, 1] and of labels that were made [n, n], and the difference of outputs [n, 1]
    and of labels [n] or [n, n].
    """
    if (negated := _negated(loss)) is not None:
        return f"Neg of {_kind(negated)}", negated
    if (made := _in_divergence(loss)) is not None:
        return made
    if (difference := _column_of_square(loss)) is not None:
        return "Sub of Expand", difference
    nodes = [loss]
    for node in nodes:
        kind, below = _kind(node), _first_below(node)
        if kind == "NllLoss" and below is not None and _is_over_batch(below):
            return "NllLoss of Batch", node
        while below is not None and _kind(below) in _SHAPES_ALONE:
            below = _first_below(below)
        if below is not None and _kind(below) in _WRONG_BELOW.get(kind, ()):
            return f"{kind} of {_kind(below)}", node
        if kind == "CtcLoss" and below is not None and _is_over_time(below, node):
            return "CtcLoss of Time", node
        if kind in _OF_DIFFERENCES:
            sizes = [_expanded_dims(node, name) for name in ("self", "target")]
            is_crossed = sizes[0] and sizes[1] and not sizes[0] & sizes[1] and 0 in sizes[0] | sizes[1]
            is_alone = node.next_functions[1:] == ((None, 0),) and below is not None and _kind(below) == "Expand"
            if is_crossed or (is_alone and sizes == [{1}, set()] and _is_square(_shape_of(below))):
                return f"{kind} of Expand", node
        nodes += _children(node)[: _MAX_NODES - len(nodes)]
    return None


def _shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the first result of a node. Empty if autograd does not tell it."""
    known = getattr(node, "_input_metadata", ())
    return tuple(known[0].shape) if known else ()


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] >= _LEAST_OF_ROW


def _column_of_square(loss: Any) -> Any:
    """Return the node of a difference [n, n] of a layer's outputs [n, 1] and a constant, of which a loss is the mean.

    Return None without one. Other functions of such a difference, such as its least element, compare all with all on
    purpose.
    """
    nodes = [loss]
    for node in nodes:
        kind, children, shape = _kind(node), _children(node), _shape_of(node)
        if kind == "Sub" and len(children) == 1 and len(node.next_functions) == 2 and _is_square(shape):
            if _kind(children[0]) in _OUTPUTS and _shape_of(children[0]) == (shape[0], 1):
                return node
        elif kind in ("Mean", "Sum", "Pow", "Abs", "Div", "Add", "Sqrt") or (kind == "Mul" and len(set(children)) == 1):
            nodes += children[: _MAX_NODES - len(nodes)]
    return None


def _is_over_batch(node: Any) -> bool:
    """Return whether a node is a log_softmax of [N, C] over N. A square of similarities, [N, N], has no classes."""
    made = _saved(node, "result") if _kind(node) == "LogSoftmax" else None
    is_of_classes = made is not None and made.dim() == 2 and made.shape[0] != made.shape[1] > 1
    return is_of_classes and _dim_of(node) in (0, -2)


def _is_of_layer(node: Any) -> bool:
    """Return whether a node gets what a linear layer with a bias returned, and no similarities of samples."""
    below = _first_below(node)
    return below is not None and _kind(below) == "Addmm" and hasattr(_first_below(below), "variable")


def _is_beside_classes(node: Any) -> bool:
    """Return whether a node is a log_softmax of what a linear layer returned, and not over the last dim, its units."""
    made, below = (_saved(node, "result") if _kind(node) == "LogSoftmax" else None), _first_below(node)
    while below is not None and _kind(below) in ("Div", "Mul"):  # a temperature
        below = _first_below(below)
    if made is None or made.dim() < 3 or below is None or _kind(below) not in ("View", "UnsafeView"):
        return False
    linear = _first_below(below)
    is_linear = linear is not None and _kind(linear) in ("Addmm", "Mm") and _shape_of(linear)[1:] == made.shape[-1:]
    return is_linear and made.shape[_dim_of(node)] < made.shape[-1]  # scores of few places are compared over the places


def _is_over_time(node: Any, loss: Any) -> bool:
    """Return whether a node is a log_softmax over T or N elements, if a CTC loss gets [T, N, C] and C is another."""
    made, given = (_saved(node, "result") if _kind(node) == "LogSoftmax" else None), _saved(loss, "log_probs")
    if made is None or given is None:
        return False
    num = made.shape[_dim_of(node)]
    return num in given.shape[:-1] and num != given.shape[-1]


def _in_divergence(loss: Any) -> tuple[str, Any] | None:
    """Return what a `kl_div` or a cross-entropy of soft labels gets by mistake, and its node: ``KlDiv of Softmax``.

    `kl_div` computes ``xlogy(target, target) - target * input``, in which only the input has a graph, and programs
    compute ``target * input`` of soft labels themselves.
    """
    nodes = [loss]
    for node in nodes:
        kind, children, function = _kind(node), _children(node), "SoftLabels"
        if kind == "Sub" and _first_below(node) is None and children and _kind(children[0]) == "Mul":
            kind, children, function = "Mul", _children(children[0]), "KlDiv"
        elif kind == "Sub":  # the square of such a difference is no divergence
            continue
        made = children[0] if kind == "Mul" and len(children) == 1 else None
        if made is not None and _kind(made) in ("Softmax", "Sigmoid") and function == "KlDiv":
            return f"KlDiv of {_kind(made)}", made
        if made is not None and _is_over_batch(made) and (function == "KlDiv" or _is_of_layer(made)):
            return f"{function} of Batch", made
        if made is not None and _is_beside_classes(made):
            return f"{function} of Time", made
        if kind in ("Mean", "Sum", "Div", "Add", "Neg") or (kind == "Mul" and len(children) == 1):
            nodes += children[: _MAX_NODES - len(nodes)]
    return None


def _dim_of(node: Any) -> int:
    """Return the dim that a node has saved, which autograd gives as an unsigned number of 64 bits."""
    return int((node._saved_dim + 2**63) % 2**64 - 2**63)


def _negated(loss: Any) -> Any:
    """Return the node of a loss that is never negative, if the whole loss is its negative times a number; else None."""
    is_negative, node = False, loss
    for _ in range(_MAX_NODES):
        kind, children = _kind(node), _children(node)
        if kind in _NEVER_NEGATIVE:
            return node if is_negative else None
        if len(children) != 1 or kind not in ("Neg", "Mul", "Div", "Mean", "Sum", *_SHAPES_ALONE):
            return None
        is_negative ^= kind == "Neg" or (kind in ("Mul", "Div") and _is_negative(node))
        node = children[0]
    return None


def _is_negative(node: Any) -> bool:
    """Return whether the factor of a product is a number below zero, or all of its elements are."""
    factor = _saved(node, "other")
    # A number is saved as a tensor in host memory. A tensor of a device, as of a GradScaler, is not waited for.
    return factor is not None and factor.is_cpu and bool((factor < 0).all())


def _expanded_dims(node: Any, name: str) -> set[int]:
    """Return the dims along which an argument that a node has saved repeats its elements. Empty if it is not known."""
    tensor = _saved(node, name)
    is_known = tensor is not None and tensor.layout is torch.strided
    strides = zip(tensor.shape, tensor.stride(), strict=True) if is_known else ()
    return {dim for dim, (size, stride) in enumerate(strides) if size > 1 and not stride}


def _saved(node: Any, name: str) -> Any:
    """Return a tensor that a node has saved, or None. A hook on saved tensors may compute it anew, or wait."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if not isinstance(saved, torch._C._autograd.SavedTensor) or getattr(saved, "unpack_hook", saved) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def _parameters_below(node: Any) -> set[int]:
    """Return the ids of the parameters that the first nodes below a node lead to."""
    nodes, found = [node], set[int]()
    for one in nodes:
        if hasattr(one, "variable"):
            found.add(id(one.variable))
        nodes += [child for child in _children(one) if child not in nodes][: _MAX_MADE_BY - len(nodes)]
    return found


def _first_below(node: Any) -> Any:
    """Return the node of a function's first argument. None if the argument needs no gradient, or there is none."""
    return node.next_functions[0][0] if node.next_functions else None


def _kind(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def _compares_samples(node: Any) -> bool:
    """Whether the logits of a loss are joined of parts. Then they compare samples, and labels are no classes."""
    for _ in range(_MAX_NODES):
        if len(children := _children(node)) != 1:
            break
        node = children[0]
    return bool(node.name() == "CatBackward0")


def _may_be_loss(value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.dim() <= 1 and value.numel() == 1
    return is_one and value.is_floating_point()
