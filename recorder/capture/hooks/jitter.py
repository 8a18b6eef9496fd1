"""Perturbs a model's inputs in the last place, to show how noise changes training.

No other module changes training on purpose. The last place is one machine epsilon of the type in which the model
computes. Under autocast, this type may be shorter than the input's own type. Only the seed and the shape decide how
each element is moved. So a recomputed block gets the same perturbed values as in its forward, ranks with the same batch
get the same values, and the global random state does not change. Each rank moves its own chunk of a DTensor by the
pattern for the chunk's shape. Replicas have the same shape and so stay replicas. Partial sums have the same shape, too,
so their total moves by the same pattern. No collective is issued. The root (the model under hooks) notes which of its
values were moved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...observe.tree import Node
from ...system.processes import loaded
from ..local_values import is_dtensor
from . import callbacks

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUTS, EMBEDDINGS = "inputs", "embeddings"
"""The two kinds of values of a model that `jitter` can perturb."""


def jittered(tensor: torch.Tensor, seed: int, eps: float | None = None) -> torch.Tensor:
    """Return a tensor with each element multiplied by 1 + `eps` or 1 - `eps`. The default is the type's epsilon."""
    return tensor * _factors(tensor, seed, eps)


def _factors(tensor: torch.Tensor, seed: int, eps: float | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    eps = torch.finfo(tensor.dtype).eps if eps is None else eps
    return 1 + signs.to(device=tensor.device, dtype=tensor.dtype, non_blocking=True) * eps


def _working_eps(module: nn.Module, value: torch.Tensor) -> float:
    """Return the machine epsilon of the type in which a module computes with an input.

    Autocast, FSDP2's mixed precision, or parameters that are all of a shorter type round a value before its first use.
    They would round away a change in the last place of a longer type, and the perturbed run would show no noise at all.
    """
    eps = torch.finfo(value.dtype).eps
    device = value.device.type
    if value.dtype != torch.float64 and torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    state = getattr(module, "_get_fsdp_state", None)  # only a module that `fully_shard` has changed has this method
    policy: Any = getattr(state(), "_mp_policy", None) if state is not None else None
    if policy is not None and policy.param_dtype is not None:
        dtypes = [policy.param_dtype]
    return max(eps, min((torch.finfo(dtype).eps for dtype in dtypes), default=eps))


def _can_move(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in _TYPES or value.layout != torch.strided:
        return False
    return type(value) is torch.Tensor or is_dtensor(value) or _is_awaited(value)


def _is_awaited(value: Any) -> bool:
    """Whether a value is the pending result of a collective. Using the value waits, as the next operation would."""
    awaited = loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return awaited is not None and type(value) is awaited


def _moved(value: Any, seed: int, eps: float, *, is_own: bool = False) -> torch.Tensor:
    """Return a perturbed copy of a value that `_can_move` accepts. `eps` is the relative change of each element.

    `is_own` is True for a DTensor that has no other user yet, so that it may be changed in place.
    """
    if not is_dtensor(value):
        return jittered(value, seed, eps)
    # The local values are changed directly, because a product of DTensors may redistribute the DTensors, in forward or
    # backward.
    dtensor: Any = value if is_own else _copied(value)
    with torch.no_grad():
        local = dtensor._local_tensor
        local.mul_(_factors(local, seed, eps))
    moved: torch.Tensor = dtensor
    return moved


def _copied(value: Any) -> Any:
    if not any(placement.is_partial() for placement in value.placements):
        return value.clone()
    # The local tensor is cloned, because torch would reduce the partial sum before it clones the DTensor.
    local = value.to_local().clone()
    mesh, placements = value.device_mesh, value.placements
    return type(value).from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


class JitterInputs(callbacks.NumberedHook):
    """The forward pre-hook that perturbs the floating-point inputs of a root (a model under hooks)."""

    __slots__ = ("is_used", "seed")

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(number)
        self.seed = seed
        self.is_used = False
        """Whether the latest call of the model had a floating-point input."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        root = callbacks.ROOTS.get(self.number)
        if torch.compiler.is_compiling() or root is None or not root.is_entered_at(module):
            return None
        try:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            eps = {id(leaf): _working_eps(module, leaf) for leaf in leaves if _can_move(leaf)}
            self.is_used = bool(eps)
            if not eps:
                return None
            moved = pytree.tree_unflatten(
                [_moved(x, self.seed, eps[id(x)]) if id(x) in eps else x for x in leaves], spec
            )
        except Exception as error:
            root.jitter_failed(error)
            return None
        root.has_moved(INPUTS, max(eps.values()))
        return moved


class JitterEmbedding(callbacks.NumberedHook):
    """The forward hook of an embedding that perturbs its output if the model has no floating-point input."""

    __slots__ = ("_inputs",)

    def __init__(self, inputs: JitterInputs) -> None:
        super().__init__(inputs.number)
        self._inputs = inputs

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        root = callbacks.ROOTS.get(self.number)
        if torch.compiler.is_compiling() or root is None or self._inputs.is_used or not _can_move(output):
            return None
        try:
            eps = _working_eps(module, output)
            moved = _moved(output, self._inputs.seed, eps, is_own=True)
        except Exception as error:
            root.jitter_failed(error)
            return None
        root.has_moved(EMBEDDINGS, eps)
        return moved


def add_jitter(nodes: list[Node], number: int, seed: int) -> tuple[JitterInputs, list[Any]]:
    """Put hooks on a model's embeddings. Return the hook for the model's inputs, and the embedding hooks' handles."""
    inputs = JitterInputs(number, seed)
    embeddings = {id(n.owner): n.owner for n in nodes if isinstance(n.owner, (nn.Embedding, nn.EmbeddingBag))}
    return inputs, [module.register_forward_hook(JitterEmbedding(inputs)) for module in embeddings.values()]
