"""`recorder.tap` in code that runs as it is: records a tensor that the program names, and its gradient.

`taps.rows` records what the ops of a graph show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..observe.clock import Slice
from ..observe.unit_dims import unit_dim_of
from ..records import Origin
from .hooks.gradients import watch_gradient
from .hooks.recording import Recording
from .hooks.root import Root
from .parallel.aliases import chunk_of_gradient, has_owner
from .tensors.local_values import requires_gradient

_NEVER_TAPPED = (None, -1, False)


class TapRecording(Recording, Protocol):
    """The part of a recording that taps by hand need."""

    @property
    def roots(self) -> Sequence[Root]: ...

    def is_disarmed(self, site: str, name: str) -> bool:
        """Whether a tap has failed too often, and is disarmed."""


class TapsByHand:
    """The taps by hand of a recording, with the number of the current call of each. Training threads call it."""

    def __init__(self, capture: TapRecording) -> None:
        self._capture = capture
        self._calls: dict[tuple[str, str, str], tuple[Slice | None, int, bool]] = {}
        """The slice, the call, and whether the value had a graph, by path, name and phase."""

    def step_changed(self) -> None:
        """Count calls from 0 again, since the step has moved."""
        self._calls.clear()

    def record(self, name: str, tensor: torch.Tensor, module: nn.Module | None) -> None:
        """Record a tensor by name, and the gradient that arrives at it (under the same key with phase ``backward``)."""
        capture = self._capture
        root, path = self._locate(module)
        rule_set = capture.selection.rule_set_of_name("tap", name)
        if not capture.masks[rule_set] or root is None or capture.is_disarmed("tap", name):
            return
        slice_, phase = root.slice_now()
        key = (path, name, phase)
        seen, call, _ = self._calls.get(key, _NEVER_TAPPED)
        call = call + 1 if seen is slice_ else 0
        with_graph = torch.is_grad_enabled()
        if phase == "recompute":  # the gradient of a value that had a graph in the forward is watched already
            with_graph = with_graph and not self._calls.get((path, name, "forward"), _NEVER_TAPPED)[2]
        self._calls[key] = (slice_, call, with_graph)
        keep = capture.keep_of(rule_set, call)
        if not keep:
            return
        origin = Origin(root.name, path, "tap", name, unit_dim_of(capture.selection, rule_set, None, "tap", name))
        is_in_region = root.model_parallel is not None and has_owner(tensor)
        chunk = capture.aliases.chunk_of_alias(tensor) if is_in_region else None
        capture.observe(origin, slice_.moment, phase, call, 0, keep, tensor, chunk=chunk)
        if with_graph and requires_gradient(tensor):
            hook = watch_gradient(capture, tensor, origin, slice_.moment, call, keep)
            hook.chunk = None if chunk is None else chunk_of_gradient(chunk)

    def _locate(self, module: nn.Module | None) -> tuple[Root | None, str]:
        """Return the root and path of a module; for an unknown module the first root and its top."""
        for root in self._capture.roots:
            if module is not None and (path := root.path_of(module)) is not None:
                return root, path
        return (self._capture.roots[0], "") if self._capture.roots else (None, "")
