"""`recorder.tap` in code that runs as it is: records a tensor that the program names, and its gradient.

`taps.rows` records what the ops of a graph show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..observe.unit_dims import unit_dim_of
from ..records import Origin
from .hooks.gradients import watch_gradient
from .hooks.recording import Recording
from .hooks.root import Root
from .parallel.aliases import chunk_of_gradient, has_owner
from .tensors.local_values import requires_gradient


class TapRecording(Recording, Protocol):
    """The part of a recording that taps by hand need."""

    @property
    def roots(self) -> Sequence[Root]: ...

    def is_disarmed(self, site: str, name: str) -> bool:
        """Whether a tap has failed too often, and is disarmed."""


class TapsByHand:
    """The taps by hand of a recording. Training threads call it."""

    def __init__(self, capture: TapRecording) -> None:
        self._capture = capture

    def record(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor by name, and the gradient that arrives at it (under the same key with phase ``backward``)."""
        capture = self._capture
        root, path = self._locate(module)
        rule_set = capture.selection.rule_set_of_name("tap", name)
        if not capture.masks[rule_set] or root is None or capture.is_disarmed("tap", name):
            return
        slice_, phase = root.slice_now()
        key = (root.name, path, "tap", name)
        call = slice_.enter(phase, key)
        graph = slice_.new_graph(phase, key, call, with_grad=torch.is_grad_enabled())
        keep = capture.keep_of(rule_set, call)
        if not keep:
            return
        origin = Origin(root.name, path, "tap", name, unit_dim_of(capture.selection, rule_set, None, "tap", name))
        is_in_region = root.model_parallel is not None and has_owner(tensor)
        chunk = capture.aliases.chunk_of_alias(tensor) if is_in_region else None
        capture.observe(origin, slice_.moment, phase, call, 0, keep, tensor, chunk=chunk)
        if graph is not None and requires_gradient(tensor):
            hook = watch_gradient(capture, tensor, origin, slice_.moment, graph[0], keep, repeat=graph[1])
            hook.chunk = None if chunk is None else chunk_of_gradient(chunk)

    def _locate(self, module: nn.Module | None) -> tuple[Root | None, str]:
        """Return the root and path of a module; for an unknown module the first root and its top."""
        for root in self._capture.roots:
            if module is not None and (path := root.path_of(module)) is not None:
                return root, path
        return (self._capture.roots[0], "") if self._capture.roots else (None, "")
