"""Finds the loss at which a backward begins, its labels, and the norms that gradients are clipped to.

Nothing here may read a value, hold a graph, or raise into training.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from ...sites import CLIP_LIMIT, CLIP_NORM, LABELS
from ...system.processes import loaded
from ...taps.graphs import in_functorch, is_traced, leave_uncompiled
from ..hooks.given import SHIFT_STEPS
from ..hooks.root import Root
from ..wrappers import Wrappers
from .loss_graph import children_of, kind_of, labels_below, parameters_below, wrong_argument
from .scalars import LOSS, Scalars, local_loss, may_be_loss

_ENGINE = "_engine_run_backward"
_is_compiling = torch.compiler.is_compiling

_EARLY_STEPS = 10
"""At so many steps the labels of a loss are looked for, whether a rule keeps them or not."""
_MOST_SHIFT, _LEAST_SHIFTED, _LEAST_OF_ROW, _WRONG_SHIFTS = 2, 32, 4, {0, 2}
"""The furthest place of a label after its token, the least number of labels, the least of a row that are compared, as
one may agree by the task's nature, and the places that are no next token."""
_MAX_MISSES, _MAX_KINDS = 8, 256
"""How many graphs of one kind that have no labels are searched, and how many kinds are known."""


class LossFinder:
    """Finds the loss, a tensor of one element whose backward is called, and records it as the scalar ``loss``.

    No hook of torch shows the tensors at which a backward begins, but every backward calls the function with which
    `torch.autograd` starts its engine. So that function and `GradScaler.scale` are wrapped until `close`. So is the
    function to which `torch.nn.utils.clip_grad_norm_`, however it was imported, gives the norm of the gradients. The
    wrapper does nothing while dynamo compiles, while a graph is made, or inside another backward. It ignores
    `torch.autograd.grad` except in the stages of a pipeline, which may use it as their backward.
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
        local = None if is_traced() or in_functorch() else local_loss(total_norm)
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
            (weakref.ref(result), loss.detach()) for result, loss in pairs if may_be_loss(loss) and result is not loss
        ]

    def _begins(self, outputs: Iterable[Any], *_: Any, accumulate_grad: bool = False, **__: Any) -> None:
        if not accumulate_grad and not self._capture.is_in_stage:
            return
        if torch._C._current_graph_task_id() != -1 or is_traced() or in_functorch():
            return
        if accumulate_grad:
            self._on_backward()
        for tensor in outputs:
            if may_be_loss(tensor):
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
                root.notes.note_loss_argument(f"Shift of {shifts.pop()} of {name}", min(of_steps))
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
                if any(id(parameter) in ids for _, _, parameter in root.parameters):
                    root.notes.note_loss_argument(found[0], step)
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
                root.notes.note_once("has_many_labels")
            if labels is None:
                self._misses[kind] = self._misses.get(kind, 0) + 1
            else:
                self._misses.pop(kind, None)
                if function:
                    whole = kind_of(node)
                    root.notes.note_labels_of(function if function.startswith(whole) else f"{whole} of {function}")
                hooked.record_labels(labels, slice_, keep)
                if self._capture.clock.step < SHIFT_STEPS and not slice_.moment.micro_step and not has_more:
                    for name, tokens in root.given.tokens.items():
                        if (shift := _shift_of(labels, tokens)) is not None:
                            self._shifts.append((root, name, self._capture.clock.step, *_begin_to_copy(shift)))

    def close(self) -> None:
        """Remove the wrappers."""
        self._wrappers.close()
        self._scaled = []


def _leave_own_frame_out(error: BaseException) -> None:
    """Remove a wrapper's frame from the traceback of an error. A bare `raise` does not add the frame again."""
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next


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


def _begin_to_copy(value: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy a number of a device to the host. Return the copy, and the event after which it is there."""
    if not value.is_cuda:
        return value, None
    event = torch.cuda.Event()
    host = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    event.record()
    return host, event
