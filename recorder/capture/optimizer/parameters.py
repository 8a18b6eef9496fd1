"""The rows of a parameter that an optimizer updates: its module, and its position in the global tensor.

Nothing here may keep a parameter alive or read a tensor's values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ...observe.observer import ModuleRows
from ...records import Chunk, Moment
from ..hooks.root import Root
from ..tensors.dtensors import dtensor_chunk, localized_chunk


class ParameterRows(Protocol):
    """The rows of a parameter for an optimizer's hooks: a module's, an FSDP1 flat parameter, or its original."""

    reference: Callable[[], torch.Tensor | None]

    @property
    def root_name(self) -> str | None: ...

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that the update will use."""

    def record(
        self,
        site: str,
        suffix: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        repeat: int,
        *,
        scope: str | None = None,
        note: str | None = None,
    ) -> None:
        """Record the parameter, its gradient or its state; ``suffix`` follows the parameter's name."""


class ModuleParameter:
    """A parameter as its module has registered it: plain, or a DTensor."""

    __slots__ = ("_name", "_watch", "reference")

    def __init__(self, parameter: torch.Tensor, watch: ModuleRows, name: str) -> None:
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self._watch = watch
        self._name = name

    @property
    def root_name(self) -> str:
        return self._watch.root_name

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def record(
        self,
        site: str,
        suffix: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        repeat: int,
        *,
        scope: str | None = None,
        note: str | None = None,
    ) -> None:
        if not self._watch.keeps(site):  # most steps, and most sites
            return
        chunk, name = self._chunk_of(tensor), self._name + suffix
        self._watch.record(site, name, tensor, moment, phase, repeat, scope=scope, chunk=chunk, note=note)

    def _chunk_of(self, tensor: torch.Tensor) -> Chunk | None:
        """Return the chunk of a parameter, gradient or state tensor."""
        if getattr(tensor, "placements", None) is not None:
            return dtensor_chunk(tensor)
        parameter = self.reference()
        return None if parameter is None else localized_chunk(parameter, tensor)


def parameter_rows(root: Root) -> Iterator[tuple[torch.Tensor, ParameterRows]]:
    """Yield every parameter of a root that an optimizer may hold, once, with its rows."""
    for watch, name, parameter in root.parameters():
        yield parameter, ModuleParameter(parameter, watch, name)
    for flat in root.flats:
        rows: ParameterRows
        for rows in flat.originals if flat.uses_original else (flat,):
            if (tensor := rows.reference()) is not None:
                yield tensor, rows
