"""The rows of a flat tensor that DeepSpeed's ZeRO updates in place of a model's parameters.

Each rank's optimizer has one tensor of a wider type with this rank's elements of many parameters. DeepSpeed leaves at
each parameter where its elements lie (0.19.8: `utils/tensor_fragment.py`, `runtime/zero/stage3.py`). Only these
attributes are read. DeepSpeed is never imported, and no parameter is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch

from ...records import Chunk, Moment
from ..dtensors import compact
from ..marks import ranks_of
from .module import HookedModule
from .parameter_rows import FlatMesh, FlatParameter, ModuleParameter, OriginalParameter


class ZeroPart(NamedTuple):
    """The elements of a parameter that lie in a rank's flat tensor: `start` in the tensor, `begin` in the parameter."""

    start: int
    begin: int
    numel: int
    shape: tuple[int, ...]
    """The shape of the parameter."""
    ranks: list[int]
    """The ranks that have the parameter's elements, each its own."""

    @property
    def chunk(self) -> Chunk:
        index = self.ranks.index(torch.distributed.get_rank())
        mesh = FlatMesh((len(self.ranks),), None, (index,), self.ranks)
        placements = compact([{"kind": "FlatShard", "offset": self.begin}])
        return Chunk(self.shape, None, placements, mesh.text, "fsdp", self.begin)


class ZeroParameter:
    """The rows of one flat tensor: each value, gradient or state of it becomes a row for each parameter inside it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(flat)
        self._numel = flat.numel()
        self.parts: list[tuple[HookedModule, str, ZeroPart, Chunk]] = []

    @property
    def root_name(self) -> str:
        return self.parts[0][0].root_name

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
        """Split and record a tensor with an element for each of the flat tensor's, or a single number for each part."""
        values = tensor.detach()
        if values.dim() and values.shape != (self._numel,):
            return  # only the optimizer knows how to split state of another shape
        for hooked, name, part, chunk in self.parts:
            piece = values[part.start : part.start + part.numel] if values.dim() else values
            its_chunk = chunk if values.dim() else None
            hooked.record(site, name + suffix, piece, moment, phase, repeat, scope=scope, chunk=its_chunk, note=note)


ParameterRows = ModuleParameter | FlatParameter | OriginalParameter | ZeroParameter
"""The rows of a parameter for the hooks on optimizers. The method `record` appends a suffix to the parameter's name."""


def zero_rows(
    parameters: Iterable[tuple[HookedModule, str, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, ZeroParameter]]:
    """Yield the flat tensors of ZeRO 1 to 3 that have elements of some parameters, with their rows."""
    found: dict[int, tuple[torch.Tensor, ZeroParameter]] = {}
    elsewhere = []
    for hooked, name, parameter in parameters:
        place = _of_stage_3(parameter) if hasattr(parameter, "_z3_optimizer") else _of_stages_1_and_2(parameter)
        if place is not None:
            flat, part = place
            found.setdefault(id(flat), (flat, ZeroParameter(flat)))[1].parts.append((hooked, name, part, part.chunk))
        elif getattr(parameter, "_hp_mapping", 0) is None:  # stages 1 and 2: all its elements lie on other ranks
            part = ZeroPart(0, 0, 0, tuple(parameter.shape), [*ranks_of(cast(Any, parameter)._dp_group)])
            elsewhere.append((hooked, name, part, part.chunk))
    for _, rows in [*found.values()][:1]:
        rows.parts += elsewhere
    yield from found.values()


def _of_stages_1_and_2(parameter: Any) -> tuple[torch.Tensor, ZeroPart] | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None or mapping.hp_fragment is None:
        return None
    flat, address = mapping.hp_fragment._base, mapping.lp_fragment_address
    start = mapping.hp_fragment_address.start
    ranks = [*ranks_of(parameter._dp_group)]
    return flat, ZeroPart(start, address.start, address.numel, tuple(parameter.shape), ranks)


def _of_stage_3(parameter: Any) -> tuple[torch.Tensor, ZeroPart] | None:
    optimizer, size = parameter._z3_optimizer, parameter.ds_tensor.ds_numel
    position = optimizer.grad_position.get(optimizer.get_param_id(parameter))
    if position is None:
        return None  # frozen, or not given to the optimizer
    group, start, _ = position
    ranks = [*ranks_of(parameter.ds_process_group)]
    begin = min(ranks.index(torch.distributed.get_rank()) * size, parameter.ds_numel)
    numel = min(size, parameter.ds_numel - begin)
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return flat, ZeroPart(start, begin, numel, tuple(parameter.ds_shape), ranks)
