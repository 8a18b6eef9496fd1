"""Records the scalars of a step, such as the loss, learning rates and norms.

A scalar comes from the program, from an optimizer or a clip, or it is the loss at which a backward begins. No device is
synced for a scalar: a tensor of one element is copied as any other value is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...observe.selection import NOTHING, scalar_keep
from ...observe.tree import tensor_leaves
from ...records import SeenValue, StepPosition, ValuePlace
from ...sites import EVALUATION_LOSS, is_validation_loss
from ...taps.graphs import in_functorch, is_traced
from ..hooks.callbacks import CaptureForHooks
from ..hooks.root import Root
from ..local_values import UnsupportedKind, plain
from .loss_graph import children_of, is_negative, kind_of

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
        if (local := local_loss(value)) is None:
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
            if not may_be_loss(loss) or is_traced() or in_functorch() or (local := local_loss(loss)) is None:
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


def local_loss(value: Any) -> torch.Tensor | None:
    """Return a loss as a plain tensor. Return None if its value is not known here, or cannot be copied now."""
    # A kernel that is launched now would become part of the graph.
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        local, chunk = plain(value)
    except UnsupportedKind:  # the tensor has no values, for example a meta tensor
        return None
    return None if chunk is not None and 'Partial"' in chunk.placements else local


def may_be_loss(value: Any) -> bool:
    """Whether a value may be a loss: a tensor of one floating-point element."""
    is_one = isinstance(value, torch.Tensor) and value.dim() <= 1 and value.numel() == 1
    return is_one and value.is_floating_point()
