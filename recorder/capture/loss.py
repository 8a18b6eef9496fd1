"""Finds the loss: a tensor of one element whose backward is called. It is recorded as the scalar ``loss``.

Every such call passes the function with which `torch.autograd` starts its engine; no hook of
torch tells what a backward begins from. It stands aside where dynamo compiles, where a graph is made, inside another
backward, and for `torch.autograd.grad`, but for a pipeline's stages, whose backward that may be. Nothing here may read
a value, hold a graph, or raise into training.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from ..system.processes import loaded
from ..taps.graphs import in_functorch, is_traced
from .core import Capture
from .program_values import LOSS

_NAME = "_engine_run_backward"
_is_compiling = torch.compiler.is_compiling


class LossFinder:
    """Wrappers around the start of autograd's engine and `GradScaler.scale`, until `close`."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._scaled: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        """The losses that `GradScaler` scaled last: the results, and the losses themselves without their graphs."""
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        """The wrapped attributes: owner, name, the function that was there, and our wrapper."""
        self.look_at_rules()

    def look_at_rules(self) -> None:
        """Put the wrappers on, where a rule asks for the scalar and they are not on yet."""
        if self._wrapped or not self._capture.scalars.wants(LOSS):
            return
        if hasattr(torch.autograd, _NAME):
            self._wrap(torch.autograd, _NAME, self._run)
        sharded = loaded("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        for kind in (GradScaler, sharded):
            if kind is not None and "scale" in vars(kind):
                self._wrap(kind, "scale", self._scale)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name)
        wrapper = functools.wraps(plain)(make(plain))
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, plain, wrapper))

    def _run(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        hooked = self

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if hooked._capture.is_open:
                look(outputs, accumulates=kwargs.get("accumulate_grad", False))
            try:
                return plain(outputs, *args, **kwargs)
            except BaseException as error:
                _leave_own_frame_out(error)
                raise

        def look(outputs: Any, *, accumulates: bool) -> None:
            try:
                hooked._begins(outputs, accumulates=accumulates)
            except Exception as error:
                hooked._capture.hook_failed("the loss", error)

        _leave_uncompiled(run, with_callees=False)
        _leave_uncompiled(look, with_callees=True)
        return run

    def _scale(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        hooked = self

        def scale(scaler: Any, outputs: Any) -> Any:
            try:
                result = plain(scaler, outputs)
            except BaseException as error:
                _leave_own_frame_out(error)
                raise
            if not _is_compiling() and hooked._capture.is_open:
                try:
                    hooked._note(result, outputs)
                except Exception as error:
                    hooked._capture.hook_failed("the loss", error)
            return result

        return scale

    def _note(self, scaled: Any, outputs: Any) -> None:
        """Note what the scaler has made of a loss, or of several."""
        if isinstance(outputs, torch.Tensor):
            scaled, outputs = [scaled], [outputs]
        if not isinstance(outputs, (list, tuple)):
            return
        pairs = zip(scaled, outputs, strict=True)
        self._scaled = [
            (weakref.ref(result), loss.detach()) for result, loss in pairs if _may_be_loss(loss) and result is not loss
        ]

    def _begins(self, outputs: Iterable[Any], *, accumulates: bool) -> None:
        """Record the losses among the tensors at which a backward begins."""
        capture = self._capture
        if not accumulates and not capture.is_in_stage:
            return
        if torch._C._current_graph_task_id() != -1 or is_traced() or in_functorch():
            return
        for tensor in outputs:
            if _may_be_loss(tensor):
                unscaled = (loss for result, loss in self._scaled if result() is tensor)
                capture.scalars.add_loss(next(unscaled, tensor))
        self._scaled = []

    def close(self) -> None:
        """Take the wrappers off; a wrapper that somebody put around one of ours keeps working through it."""
        for owner, name, plain, wrapper in self._wrapped:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, plain)
        self._wrapped.clear()
        self._scaled = []


def _leave_own_frame_out(error: BaseException) -> None:
    """Take the frame that caught an error of training out of its traceback; a bare `raise` does not put it back."""
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next


def _leave_uncompiled(function: Any, *, with_callees: bool) -> None:
    """Let dynamo run a function uncompiled, where a backward is called between two of its graphs."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, skip if with_callees else default)
    dynamo.set_code_exec_strategy(function.__code__, strategy)


def _may_be_loss(value: Any) -> bool:
    is_one = isinstance(value, torch.Tensor) and value.dim() <= 1 and value.numel() == 1
    return is_one and value.is_floating_point()
