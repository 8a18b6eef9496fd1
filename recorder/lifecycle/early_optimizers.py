"""The optimizers of a process before there is a root, which tell whether an outermost module is about to be trained."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..capture.optimizer import find_live, wrap_closure
from ..system.events import Events

_MAX_LIVE_SCANS = 5
"""Scans of all objects for optimizers (0.1 s for 361,000 objects) before a process without one is left alone."""


class EarlyOptimizers:
    """The optimizers that live before the first root. The training thread calls it."""

    def __init__(self, events: Events, *, closure_returned: Callable[[Optimizer], None]) -> None:
        """Look for nothing yet.

        Args:
            events: takes a line where an optimizer steps and nothing was recorded.
            closure_returned: called when the closure of a step returns, in which the first root may have run.
        """
        self.has_stepped = False
        """True once an optimizer has stepped."""
        self.live: list[Optimizer] = []
        """The optimizers that the last scan has found; empty after `take`."""
        self._events = events
        self._closure_returned = closure_returned
        self._num_scans = 0
        self._pid = os.getpid()
        self._handles: list[Any] = []

    def watch_steps(self) -> None:
        """Put hooks on the steps of all optimizers, until `unwatch_steps`."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def unwatch_steps(self) -> None:
        """Take the hooks away. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hold(self, parameters: Collection[int]) -> bool:
        """Whether one of them trains a parameter; parameters are given by their `id`."""
        if not self.live and self._num_scans < _MAX_LIVE_SCANS:
            self._num_scans += 1
            self.live = find_live()
        return any(id(p) in parameters for o in self.live for group in o.param_groups for p in group["params"])

    def take(self) -> list[Optimizer]:
        """Return them to who knows them from now on; none is held here any longer."""
        live, self.live = self.live or find_live(), []
        return live

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the closure of a step: the first forward may run in it."""
        if os.getpid() != self._pid or torch.compiler.is_compiling():
            return None
        return wrap_closure(args, kwargs, lambda: self._closure_returned(optimizer))

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._handles or os.getpid() != self._pid:
            return
        self.has_stepped = True
        self._events.add(
            "no_root",
            f"not recording: {type(optimizer).__name__} stepped, but no module with its parameters was seen to run "
            "(compiled in place or inside a function, or called through .forward()); recorder.instrument(model) before "
            "it is compiled, or recorder.attach(model) before the first step",
        )
        self._events.say()
        self.unwatch_steps()
