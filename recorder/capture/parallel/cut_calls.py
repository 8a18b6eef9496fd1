"""How modules of frameworks that cut plain tensors over ranks cut their inputs and outputs, by the modules' attributes.

Nothing here may import or call a framework, read a value, issue a collective, or keep a module or a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from ..local_values import spec_of
from .marks import (
    Seen,
    Split,
    chunk_sizes,
    cut_chunk,
    is_marked,
    marked_chunk,
    own_index,
    split_of,
    stride_of,
    tensor_ranks,
)

_MAX_KNOWN = 256
_NOTHING = Seen()


@dataclass(eq=False)
class CutCalls:
    """How a module cuts its inputs and outputs over ranks, according to its attributes."""

    ranks: tuple[int, ...]
    """The ranks over which the module cuts its inputs and outputs."""
    sizes: Mapping[tuple[str, int, int], tuple[int, ...]]
    """Maps site, number of dims (0: any) and dim to the sizes that a rank's chunk may have along this dim."""
    stride: int = 1
    """The number of equal blocks along each dim in `sizes`. Each block is cut over the ranks by itself."""
    sequence: str = ""
    """The site where sequence parallel cuts the module's tensors along the sequence. Empty if it cuts none."""
    whole: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    """For a site where all ranks have the same tensor: the size of its last dim, and whether gradients are the same."""
    parts: Sequence[int] = ()
    """Each rank's size along the dims in `sizes`, if the sizes may differ between ranks. Otherwise empty."""
    sequence_dim: int = 0
    _known: dict[tuple[str, torch.Size], Seen] = field(default_factory=dict)

    def chunks(self, site: str, tensor: torch.Tensor) -> Seen:
        """Return the chunks of an input or output of the module, and of the gradient that arrives at the tensor."""
        if not tensor.is_floating_point():
            return _NOTHING
        key = site, tensor.shape
        if key not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._find(site, tensor.shape)
        return self._known[key]

    def _find(self, site: str, shape: torch.Size) -> Seen:
        for (where, num_dims, dim), sizes in self.sizes.items():
            if where == site and shape and num_dims in (0, len(shape)) and shape[dim] in sizes:
                chunk = cut_chunk(shape, dim % len(shape), self.ranks, self.stride, self.parts)
                return Seen(chunk, chunk)
        if len(shape) < 3:
            return _NOTHING
        if site == self.sequence:
            chunk = cut_chunk(shape, self.sequence_dim, self.ranks)
            return Seen(chunk, chunk)
        size, has_whole_gradient = self.whole.get(site, (0, False))
        at = own_index(self.ranks)
        if shape[-1] != size or at is None:
            return _NOTHING
        chunk = marked_chunk(tuple(shape), (0,) * len(shape), {"kind": "Replicate"}, self.ranks, at)
        return Seen(chunk, chunk if has_whole_gradient else None)


def cut_calls(module: nn.Module) -> CutCalls | None:
    """Return how a framework's module cuts its inputs and outputs. Return None for other modules.

    A rank's size is used only if the module or its configuration also names the whole size. The whole size must be the
    rank's size times the number of ranks. Uncut inputs and outputs of these layers are equal on all ranks: replicated.
    """
    layer = getattr(module, "output_layer", None)
    if isinstance(layer, nn.Module) and getattr(module, "parallel_output", False) is True:  # the model returns logits
        ranks = tensor_ranks(layer)
        outputs = _size(layer, len(ranks), "output_size")
        return CutCalls(ranks, {("output", 3, -1): (outputs,)}) if len(ranks) > 1 and outputs else None
    # Transformers returns the weights of eager attention [batch, heads, queries, keys] beside the output.
    query, size = getattr(module, "q_proj", None), getattr(module, "head_dim", 0)  # AutoTP changes `config.num_heads`
    if isinstance(query, nn.Module) and (rows := _rows_of_ranks(query)):
        ranks, parts = rows
        is_by_heads = isinstance(size, int) and size > 0 and not any(part % size for part in parts)
        heads = chunk_sizes([part // size for part in parts]) if is_by_heads and parts else ()
        if (at := own_index(ranks)) is None or len(heads) != len(ranks):
            return None
        return CutCalls(ranks, {("output", 4, 1): (heads[at],)}, parts=heads)
    ranks = tensor_ranks(module)
    if len(ranks) < 2 or getattr(module, "is_expert", False):
        return None
    if (split := split_of(getattr(module, "weight", None))) is not None:
        return _cut_by_weight(module, ranks, split)
    is_sequence = bool(getattr(module, "sequence_parallel", False))
    all_inputs, all_outputs = (getattr(module, name, 0) for name in ("input_size", "output_size"))
    if outputs := _size(module, len(ranks), "output_size"):
        whole = {"input": (all_inputs, getattr(module, "allreduce_dgrad", False)), "output": (all_outputs, False)}
        stride = stride_of(getattr(module, "weight", None))
        return CutCalls(ranks, {("output", 0, -1): (outputs,)}, stride, "input" if is_sequence else "", whole)
    if inputs := _size(module, len(ranks), "input_size"):
        sizes = {("input", 0, -1): (inputs,)} if getattr(module, "input_is_parallel", False) else {}
        return CutCalls(ranks, sizes, 1, "output" if is_sequence else "", {"output": (all_outputs, True)})
    if _size(module, len(ranks), "num_embeddings"):
        is_scattered = getattr(module, "reduce_scatter_embeddings", False)
        whole = {"output": (getattr(module, "embedding_dim", 0), True)}
        return CutCalls(ranks, {}, 1, "output" if is_scattered else "", whole)
    hidden = getattr(module, "hidden_size_per_partition", None)
    if (heads := _heads(module, ranks)) and isinstance(hidden, int):  # the module is the core of attention
        return CutCalls(ranks, {("input", 4, 2): heads, ("output", 0, -1): (hidden,)})
    return _cut_by_marked_weight(module, ranks)


def _rows_of_ranks(linear: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ranks that have rows of a linear's weight, and their numbers of rows. Otherwise return None."""
    weight = getattr(linear, "weight", None)
    if (split := split_of(weight)) is not None:
        return tensor_ranks(linear), split.parts if split.dim == 0 else ()
    spec = spec_of(weight) if isinstance(weight, torch.Tensor) else None
    if spec is None or spec.mesh.ndim != 1 or not spec.placements[0].is_shard(0):
        return None
    ranks, num_rows = tuple(spec.mesh.mesh.tolist()), spec.shape[0]
    ends = [min(-(-num_rows // len(ranks)) * (at + 1), num_rows) for at in range(len(ranks))]  # as torch's `chunk` cuts
    return ranks, tuple(end - start for start, end in pairwise([0, *ends]))


def _cut_by_marked_weight(module: nn.Module, ranks: tuple[int, ...]) -> CutCalls | None:
    """Return how a linear cuts inputs and outputs if only its weight [outputs, inputs] is marked, as in a user's layer.

    It is not known where the program reduces and gathers. So only a comparison of values shows which tensors are whole.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    dim = getattr(weight, "partition_dim", -1)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or dim not in (0, 1) or not is_marked(weight):
        return None
    is_transposed = isinstance(bias, torch.Tensor) and bias.shape != weight.shape[:1]
    if is_transposed or "Embedding" in type(module).__name__ or hasattr(module, "padding_idx"):
        return None
    site, sequence = ("output", "input") if dim == 0 else ("input", "output")
    # A row-parallel linear adds its bias to each rank's section of the sequence, so the bias may be marked.
    is_sequence = any(getattr(one, "sequence_parallel", False) is True for one in (module, bias))
    return CutCalls(ranks, {(site, 0, -1): (weight.shape[dim],)}, stride_of(weight), sequence if is_sequence else "")


def _cut_by_weight(module: nn.Module, ranks: tuple[int, ...], split: Split) -> CutCalls | None:
    """Return what a layer cuts: its outputs if its weight is cut along dim 0, otherwise its inputs.

    Colossal-AI's linears with the attribute `parallel_input` cut inputs, even if the weight is transposed.
    """
    at, parts, (outputs, inputs) = own_index(ranks), split.parts, split.shape if len(split.shape) == 2 else (0, 0)
    if at is None or len(parts) not in (0, len(ranks)) or not inputs:
        return None
    is_row = split.dim == 1 or hasattr(module, "parallel_input")
    if is_row and split.dim == 0:
        outputs, inputs = inputs, outputs
    sequence_dim, is_embedding = _sequence_dim(module), hasattr(module, "padding_idx")
    sequence = "" if sequence_dim is None else "output" if is_row or is_embedding else "input"
    is_gathered = getattr(module, "gather_output", is_embedding) or not getattr(module, "parallel_input", True)
    site = "input" if is_row and not is_embedding else "output"
    whole = {"output": (inputs if is_embedding else outputs, True)} | (
        {} if is_embedding else {"input": (inputs, True)}
    )
    # Rows of the embedding after the first `valid` ones are padding.
    if parts and not is_embedding and (valid := getattr(module, "old_num_embeddings", 0)):
        parts = chunk_sizes([min(max(valid - start, 0), parts[0]) for start in range(0, sum(parts), parts[0])])
        whole["output"] = (valid, True)
    sizes = {(site, 0, -1): (parts[at],)} if parts and not is_gathered else {}
    return CutCalls(ranks, sizes, split.stride, sequence, whole, parts, sequence_dim or 0)


def _sequence_dim(module: nn.Module) -> int | None:
    """Return the dim along which a nanotron or Colossal-AI layer cuts the sequence, or None if it does not."""
    if getattr(getattr(module, "mode", None), "name", "") == "REDUCE_SCATTER":
        return 0
    return getattr(module, "seq_parallel_dim", 1) if getattr(module, "seq_parallel_mode", "") in _SHARED else None


_SHARED = ("split_gather", "ring")
"""Colossal-AI's modes in which the ranks that cut the weights also cut the sequence."""


def _size(module: nn.Module, num_ranks: int, name: str) -> int:
    """Return a rank's size as the module names it. Return 0 unless all ranks' sizes add up to the whole size."""
    own, of_all = getattr(module, f"{name}_per_partition", None), getattr(module, name, None)
    return own if isinstance(own, int) and isinstance(of_all, int) and own * num_ranks == of_all else 0


def cut_inside(module: nn.Module) -> CutCalls | None:
    """Return how modules inside an attention cut inputs and outputs that their own attributes do not describe.

    In the core of the attention these are the scores [batch, heads, sequence, sequence]. Elsewhere they are single
    heads [sequence, batch, heads, size of a head].
    """
    ranks = tensor_ranks(module)
    heads = _heads(module, ranks) if len(ranks) > 1 else ()
    dim = 1 if isinstance(getattr(module, "hidden_size_per_partition", None), int) else 2
    return CutCalls(ranks, {("input", 4, dim): heads, ("output", 4, dim): heads}) if heads else None


def _heads(module: nn.Module, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return a rank's numbers of query and key heads, or () if ranks share a key head or there are no heads."""
    config = getattr(module, "config", None)
    names = {
        "num_attention_heads_per_partition": "num_attention_heads",
        "num_query_groups_per_partition": "num_query_groups",
    }
    sizes = [(getattr(module, own, None), getattr(config, of_all, None)) for own, of_all in names.items()]
    is_whole = all(isinstance(own, int) and own * len(ranks) == of_all for own, of_all in sizes)
    return tuple(own for own, _ in sizes if isinstance(own, int)) if is_whole else ()
