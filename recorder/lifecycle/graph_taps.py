"""Hands the values that ops in graphs show to the capture, as the sink of `taps.ops` while a recorder is active.

Called on the thread that runs the graph. Nothing here may raise into training.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import nn

from ..capture.core import Capture
from ..capture.hooks.root import Root
from ..taps import module_taps
from ..taps.graphs import is_traced


class RootMaker(Protocol):
    """The part of the recorder that taps need; it may not have started."""

    @property
    def capture(self) -> Capture | None: ...

    @property
    def by_flag(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    def wants(self, module: nn.Module) -> bool: ...

    def add_root(self, module: nn.Module, name: str | None) -> Root: ...

    def discovery_failed(self, error: Exception) -> None: ...


class GraphTaps:
    """Hands values and gradients of taps to the rows of the capture, and finds or makes their root."""

    def __init__(self, recorder: RootMaker) -> None:
        self._recorder = recorder
        self._stand_ins: list[nn.Module] = []
        """Empty modules that stand for roots whose own module nobody sees."""

    def tapped(self, value: torch.Tensor, name: str, where: str, number: int, with_grad: bool) -> None:
        """Record a value that an op in a graph shows."""
        if self._recorder.is_over or is_traced():
            return
        try:
            root = self._recorder.capture.tap_rows.root_of(where) if self._recorder.capture is not None else None
            root = root or self._root_without_module(where)
            if root is not None and self._recorder.capture is not None:
                self._recorder.capture.tap_rows.saw(value, (name, where, number), root, with_grad=with_grad)
        except Exception as error:
            self._tap_failed(name, error)

    def tapped_gradient(
        self, gradient: torch.Tensor, name: str, where: str, number: int, *, is_total: bool = False
    ) -> None:
        """Record a gradient that an op in a graph shows."""
        if self._recorder.is_over or self._recorder.capture is None:
            return
        try:
            self._recorder.capture.tap_rows.saw_gradient(gradient, (name, where, number), is_total=is_total)
        except Exception as error:
            self._tap_failed(name, error)

    def has_no_hook(self, where: str) -> bool:
        """Whether a module that runs eagerly is seen only through its tap."""
        if self._recorder.is_over or self._recorder.capture is None:
            return False
        try:
            return self._recorder.capture.tap_rows.has_no_hook(where)
        except Exception as error:
            self._tap_failed("", error)
            return False

    def _tap_failed(self, name: str, error: Exception) -> None:
        if self._recorder.capture is None:
            self._recorder.discovery_failed(error)
        else:
            self._recorder.capture.hook_failed(f"tap {name!r}", error)

    def _root_without_module(self, where: str) -> Root | None:
        """Make a root for a tap of a model whose own call nobody sees, or of a loaded artefact."""
        if is_data_worker():
            return None
        model = module_taps.model_of(where)
        if model is not None and self._recorder.by_flag:  # without the flag, `attach` names the models
            return self._recorder.add_root(model, None) if self._recorder.wants(model) else None
        stand_in = nn.Module()
        used = (
            {root.name for root in self._recorder.capture.roots + self._recorder.capture.past_roots}
            if self._recorder.capture is not None
            else ()
        )
        name = module_taps.Where.from_text(where).root if where else None
        root = self._recorder.add_root(stand_in, None if name in used else name)
        self._stand_ins.append(stand_in)
        root.stands_for(where)
        return root


def is_data_worker() -> bool:
    """Whether this process loads data for another one."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
