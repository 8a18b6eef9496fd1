"""Records values that the program names: the scalars of a step, such as the loss, and tensors given to `recorder.tap`.

A scalar comes from the program, from an optimizer or a clip, or it is the loss at which a backward begins. No device is
synced for a scalar: a tensor of one element is copied as any other value is. This module records `recorder.tap` in
eager code; `recorder/capture/hooks/graph_rows.py` records the taps in a compiled graph.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from ..observe.selection import NOTHING, scalar_keep, unit_dim_of
from ..observe.tree import tensor_leaves
from ..records import SeenValue, StepPosition, ValuePlace
from ..sites import CLIP_LIMIT, CLIP_NORM, EVALUATION_LOSS, LABELS, OBJECTIVE, is_validation_loss
from ..system.processes import loaded
from ..taps.graphs import in_functorch, is_traced, leave_uncompiled
from .hooks.callbacks import CaptureForHooks, GradientArrives, watch_gradient
from .hooks.given import SHIFT_STEPS
from .hooks.objectives import SharedTensors
from .hooks.root import Root
from .local_values import UnsupportedKind, plain, requires_gradient
from .loss_graph import children_of, is_negative, kind_of, labels_below, parameters_below, wrong_argument
from .parallel.aliases import chunk_of_gradient, has_owner
from .wrappers import Wrappers

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
_EARLY_STEPS = 10
"""At so many steps the labels of a loss are looked for, whether a rule keeps them or not."""
_MOST_SHIFT, _LEAST_SHIFTED, _LEAST_OF_ROW, _WRONG_SHIFTS = 2, 32, 4, {0, 2}
"""The furthest place of a label after its token, the least number of labels, the least of a row that are compared, as
one may agree by the task's nature, and the places that are no next token."""
_MAX_MISSES, _MAX_KINDS = 8, 256
"""How many graphs of one kind that have no labels are searched, and how many kinds are known."""


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
            children = children_of(node)
            if len(children) != 1 or kind_of(node) not in ("Mul", "Div") or is_negative(node):
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
        if type(value) is float:
            value = torch.from_numpy(np.array(value))  # `torch.tensor` takes five times as long
        elif not isinstance(value, torch.Tensor):
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
        self._wrappers = Wrappers()
        self._misses: dict[tuple[str, ...], int] = {}
        """By the names of the first nodes of a graph, in how many such graphs, one after the other, were no labels."""
        self._looks: dict[tuple[str, tuple[str, ...]], int] = {}
        """By root and names of first nodes, how many graphs were searched for arguments that a loss does not expect."""
        self._shifts: list[tuple[Root, str, int, torch.Tensor, torch.cuda.Event | None]] = []
        """Of the first labels: the root, an argument with tokens, the step, how far the labels are shifted against the
        tokens, and the event after which it is known."""
        self.look_at_rules()

    def look_at_rules(self) -> None:
        """Install the wrappers if a rule asks for loss, norms or labels, and the wrappers are not installed yet."""
        selection = self._capture.selection
        wants_labels = selection.names_tensors(selection.rule_set_of_name("input", LABELS))
        if self._wrappers or not (self._scalars.wants(LOSS) or self._scalars.wants(CLIP_NORM) or wants_labels):
            return
        for owner, name in ((clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")):
            if hasattr(owner, name):
                self._wrappers.put(owner, name, functools.partial(self._looking, self._clips, "a clip"))
        if hasattr(torch.autograd, _ENGINE):
            self._wrappers.put(torch.autograd, _ENGINE, functools.partial(self._looking, self._begins, "the loss"))
        sharded = loaded("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        for kind in (GradScaler, sharded):
            if kind is not None and "scale" in vars(kind):
                look = functools.partial(self._looking, self._note, "the loss", with_result=True)
                self._wrappers.put(kind, "scale", look)

    def _looking(self, look: Any, what: str, original: Any, *, with_result: bool = False) -> Callable[..., Any]:
        """Return the original function, with `look` called before it, or after it with its result as first argument."""

        def run(*args: Any, **kwargs: Any) -> Any:
            is_seen = not _is_compiling() and self._capture.is_open
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
                self._capture.hook_failed(what, error)

        leave_uncompiled(run, with_callees=False)
        leave_uncompiled(try_to_look)
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
        kind = (node.name(), *(child.name() for child in children_of(node)))
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
        """Note that labels are not the next tokens of an argument, if all of the first steps' are shifted alike."""
        if not all(event is None or event.query() for *_, event in self._shifts):
            return
        seen: defaultdict[tuple[Root, str], dict[int, int]] = defaultdict(dict)
        for root, name, step, shift, _ in self._shifts:
            seen[root, name][step] = int(shift)
        for (root, name), of_steps in seen.items():
            shifts = set(of_steps.values())
            if shifts <= _WRONG_SHIFTS and len(shifts) == 1 and len(of_steps) == SHIFT_STEPS:
                root.inventory.note_loss_argument(f"Shift of {shifts.pop()} of {name}", min(of_steps))
                break
        self._shifts.clear()

    def _look_at_arguments(self, node: Any) -> None:
        """Note an argument that a loss does not expect, for the model that has made it."""
        found = None
        with suppress(RuntimeError):  # the graph is freed: the backward says so
            found = wrong_argument(node)
        if found is not None:
            ids, step = parameters_below(found[1]), self._capture.clock.step
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
            labels, function, has_more = None, "", False
            with suppress(RuntimeError):  # the graph is freed, or the labels have changed: the backward says so
                is_late = self._capture.clock.step >= _EARLY_STEPS
                labels, function, has_more = labels_below(node, is_first_enough=is_late)
            if has_more:
                root.inventory.note_many_labels()
            if labels is None:
                self._misses[kind] = self._misses.get(kind, 0) + 1
            else:
                self._misses.pop(kind, None)
                if function:
                    whole = kind_of(node)
                    root.inventory.note_labels_of(function if function.startswith(whole) else f"{whole} of {function}")
                hooked.record_labels(labels, slice_, keep)
                if self._capture.clock.step < SHIFT_STEPS and not slice_.moment.micro_step and not has_more:
                    for name, tokens in root.given.tokens.items():
                        if (shift := _shift_of(labels, tokens)) is not None:
                            self._shifts.append((root, name, self._capture.clock.step, *_on_host(shift)))

    def close(self) -> None:
        """Remove the wrappers."""
        self._wrappers.close()
        self._scaled = []


def _leave_own_frame_out(error: BaseException) -> None:
    """Remove a wrapper's frame from the traceback of an error. A bare `raise` does not add the frame again."""
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next


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


def _shift_of(labels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return how many places after each token its label stands in the same row of tokens, from 0 to `_MOST_SHIFT`.

    That is -1 if none of these holds for each label, or more than one does. Labels below zero are ignored. Return None
    for what is no batch of tokens. Nothing here waits for a device.
    """
    are_whole = type(labels) is torch.Tensor and labels.dtype in (torch.int64, torch.int32)
    if not are_whole or not (tokens.is_cpu or tokens.is_cuda):
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


def _may_be_loss(value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.dim() <= 1 and value.numel() == 1
    return is_one and value.is_floating_point()
