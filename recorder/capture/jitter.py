"""The one thing that changes training on purpose: inputs of a root moved by a last place, to see what noise does.

What is moved and how hangs on the seed and the shape alone: a recomputed block sees what its forward saw, ranks that
share a batch see the same, and the global random state is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import hooks
from .tree import Node

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def jittered(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor whose every element is multiplied with 1 + or - the machine epsilon of its type."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8) * 2 - 1
    factors = 1 + signs.to(device=tensor.device, dtype=tensor.dtype, non_blocking=True) * torch.finfo(tensor.dtype).eps
    return tensor * factors


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.dtype in _TYPES and value.layout == torch.strided


class JitterInputs(hooks.Hook):
    """Forward pre-hook of a root with kwargs: its floating inputs, moved."""

    __slots__ = ("is_used", "seed")

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(number)
        self.seed = seed
        self.is_used = False
        """Whether the latest call had a floating input."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or self.number not in hooks.ROOTS:
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self.is_used = any(map(_is_plain, leaves))
        return pytree.tree_unflatten([jittered(x, self.seed) if _is_plain(x) else x for x in leaves], spec)


class JitterEmbedding(hooks.Hook):
    """Forward hook of an embedding, where the root was given whole numbers alone."""

    __slots__ = ("_inputs",)

    def __init__(self, inputs: JitterInputs) -> None:
        super().__init__(inputs.number)
        self._inputs = inputs

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if torch.compiler.is_compiling() or self.number not in hooks.ROOTS or self._inputs.is_used:
            return None
        return jittered(output, self._inputs.seed) if _is_plain(output) else None


def add_jitter(root: nn.Module, nodes: list[Node], number: int, seed: int) -> tuple[JitterInputs, list[Any]]:
    """Put the hooks on, before all others of a root; the first of them, and handles that take them off."""
    inputs = JitterInputs(number, seed)
    handles: list[Any] = [root.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)]
    embeddings = {id(n.owner): n.owner for n in nodes if isinstance(n.owner, (nn.Embedding, nn.EmbeddingBag))}
    handles += [module.register_forward_hook(JitterEmbedding(inputs)) for module in embeddings.values()]
    return inputs, handles
