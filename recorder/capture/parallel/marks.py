"""Reads the marks on plain tensors that frameworks cut over ranks: Megatron-Core, AutoTP, nanotron, Colossal-AI.

Such tensors have no placements. The marks are attributes of parameters (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `allreduce`, and the tables in `_READERS`), of layers (`output_size_per_partition` and similar
ones), and of the Python modules that hold the frameworks' process groups, if the program has loaded them. Nothing here
may import or call a framework, read a value, issue a collective, or keep a module, a tensor or a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from ...observe.tree import innermost
from ...records import Chunk
from ..local_values import compact, spec_of, written_ranks
from .topology import is_distributed

_STATES = ("megatron.core.parallel_state", "deepspeed.utils.groups")
"""Python modules of frameworks, whose attributes are process groups, such as ``_TENSOR_MODEL_PARALLEL_GROUP``."""
MEGATRONS_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_MAX_KNOWN = 256


def group_ranks(name: str) -> tuple[int, ...]:
    """Return the ranks of a framework's process group such as ``DATA_PARALLEL``, or () if there is no group."""
    found = (ranks_of(getattr(sys.modules.get(state), f"_{name}_GROUP", None)) for state in _STATES)
    return next(filter(None, found), ())


def process_groups() -> list[dict[str, Any]]:
    """Return the process groups of this process for the manifest, in order of creation. Called on any thread."""
    if not is_distributed():
        return []
    import torch.distributed as dist

    groups = []
    for group in list(dist.distributed_c10d._world.pg_map):
        if ranks := ranks_of(group):
            name, backend = getattr(group, "group_desc", "") or group.group_name, dist.get_backend(group)
            groups.append({"name": name, "ranks": written_ranks([*ranks], (len(ranks),)), "backend": backend})
    return groups


def ranks_of(group: object) -> tuple[int, ...]:
    """Return the global ranks of a process group, in the group's order, or () if it is no process group."""
    if not is_distributed():
        return ()
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else ()


def marked_data_parallel(root: nn.Module) -> dict[str, Any] | None:
    """Return Megatron's data-parallel group as `groups.find_data_parallel` does. Return None if nothing names it.

    A model may have process groups of its own (`pg_collection`), in another grid than the groups of `parallel_state`.
    """
    own = next(filter(None, (getattr(module, "pg_collection", None) for module in root.modules())), None)
    ranks = ranks_of(getattr(own, "dp", None))
    if not ranks and ranks_of(getattr(own, "tp", None)) in ((), group_ranks("TENSOR_MODEL_PARALLEL")):
        ranks = group_ranks("DATA_PARALLEL")
    return {"kind": "megatron", "ranks": list(ranks)} if ranks else None


def stage_of_schedule(given: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the stage that Megatron's `forward_step` runs, by its local variables, or None without pipeline."""
    model, config = innermost(given["model"]), given["config"]
    ranks = ranks_of(getattr(getattr(model, "pg_collection", None), "pp", None))
    ranks = ranks or group_ranks("PIPELINE_MODEL_PARALLEL")
    at, num_chunks = _index(ranks), getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    if at is None or len(ranks) < 2:
        return None
    return {
        "stage": at + len(ranks) * (given.get("vp_stage") or 0),
        "num_stages": len(ranks) * num_chunks,
        "parts_of_loss": 0 if getattr(config, "calculate_per_token_loss", False) else given["num_microbatches"],
    }


def marked_ranks(root: nn.Module) -> tuple[int, ...]:
    """Return the ranks over which the modules of a model are cut, by marks. The result is empty if no module is cut."""
    ranks = max((tensor_ranks(module) for module in root.modules()), key=len)
    return ranks if len(ranks) > 1 else ()


def marked_model_parallel(ranks: tuple[int, ...]) -> dict[str, Any] | None:
    """Return the ranks with the same part of the batch, or None. The form is that of `find_model_parallel`.

    Ranks of context parallel count, too: they have the same samples, and each has another section of every sequence.

    Args:
        ranks: what `marked_ranks` returns for the root.
    """
    name = "tensor"
    if set(wider := group_ranks("TENSOR_AND_CONTEXT_PARALLEL")) > {*ranks}:
        ranks, name = wider, "tensor_context"
    return {"ranks": list(ranks), "shape": [len(ranks)], "dim_names": [name]} if len(ranks) > 1 else None


def tensor_ranks(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks over which a module cuts its tensors. The result is empty if the module cuts nothing."""
    if not is_distributed():
        return ()
    splits = [split_of(parameter) for parameter in module._parameters.values()]
    if ranks := next((split.ranks for split in splits if split is not None and split.ranks), ()):
        return ranks
    is_cut = any(splits) or any(map(is_marked, module._parameters.values()))
    if not is_cut and not any(isinstance(getattr(module, size, None), int) for size in _SIZES):
        return ()
    name = "EXPERT_TENSOR_PARALLEL" if getattr(module, "is_expert", False) else "TENSOR_MODEL_PARALLEL"
    own = (ranks_of(getattr(module, group, None)) for group in ("tp_group", "mp_group", "process_group"))
    return next(filter(None, own), ()) or group_ranks(name)


_SIZES = (
    "output_size_per_partition",
    "input_size_per_partition",
    "num_embeddings_per_partition",
    "num_attention_heads_per_partition",
)
"""The attributes of Megatron's layers that have the size of one rank's chunk."""


def is_marked(parameter: object) -> bool:
    """Whether a parameter is marked as one rank's chunk of a larger parameter."""
    return getattr(parameter, "tensor_model_parallel", False) is True or split_of(parameter) is not None


def chunk_of_parameter(parameter: torch.Tensor, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Chunk | None:
    """Return the chunk of a marked parameter, its gradient or its state. Return None if the marks do not tell it.

    Args:
        parameter: the parameter whose marks are read.
        tensor: the parameter, its gradient, or a state of an optimizer.
        ranks: what `tensor_ranks` returns for the parameter's module.
    """
    if not is_marked(parameter) or tensor.shape != parameter.shape:
        return None
    if (split := split_of(parameter)) is not None:
        is_known = len(split.parts) == len(ranks) > 1
        return _cut(tensor.shape, split.dim, ranks, split.stride, split.parts) if is_known else None
    dim = getattr(parameter, "partition_dim", -1)
    is_cut = isinstance(dim, int) and 0 <= dim < parameter.dim()
    return _cut(tensor.shape, dim, ranks, _stride(parameter)) if is_cut and len(ranks) > 1 else None


def main_parameter(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the wider copy of a parameter that Megatron's optimizer updates instead. Return None if there is no copy.

    None is also returned if a distributed optimizer has only a part of the copy. `parameter_rows` finds the part.
    """
    main = getattr(parameter, "main_param", None)
    return main if isinstance(main, torch.Tensor) and main.shape == parameter.shape else None


def _stride(parameter: object) -> int:
    stride = getattr(parameter, "partition_stride", 1)
    return stride if isinstance(stride, int) and stride > 1 else 1


class Split(NamedTuple):
    """How a parameter is cut over ranks, as read from a framework's table on the parameter."""

    dim: int = -1
    parts: tuple[int, ...] = ()
    """Each rank's size along `dim`. Empty if the parameter is cut in a way for which no chunk is derived."""
    shape: tuple[int, ...] = ()
    """The shape of the whole parameter. Empty if it is not known."""
    stride: int = 1
    ranks: tuple[int, ...] = ()
    """The ranks over which the parameter is cut. Empty if the table does not name them."""


def split_of(parameter: object) -> Split | None:
    """Return how a parameter is cut over ranks, from a framework's table. Return None if there is no table."""
    for name, table in getattr(parameter, "__dict__", {}).items():
        if name in _READERS:
            try:
                return _READERS[name](parameter, table)
            except Exception:  # another version or program has made this table in another form
                return Split()
    return None


def _by_autotp(parameter: Any, table: Any) -> Split | None:
    """Read DeepSpeed's AutoTP table (0.19.8, `module_inject/layers.py`). Pieces of a weight may be cut one by one."""
    if getattr(parameter, "tensor_model_parallel", False) is not True:
        return None
    names = ("partition_dim", "partition_sizes", "logical_shape", "sub_param_sizes")
    dim, parts, shape, several = (table.get(name) for name in names)
    return Split(int(dim), () if several else _as_chunks(parts), tuple(shape))


def _as_chunks(parts: Sequence[int]) -> tuple[int, ...]:
    """Return `parts` if torch would cut a dim into chunks of these sizes. Otherwise return ()."""
    size = -(-sum(parts) // len(parts))
    ends = [sum(parts[: number + 1]) for number in range(len(parts))]
    return tuple(parts) if all(end == min(size * (at + 1), ends[-1]) for at, end in enumerate(ends)) else ()


def _by_nanotron(parameter: Any, table: Any) -> Split | None:
    """Read nanotron's table (0.4, `parallel/sharded_parameters.py`). A rank has one part of each piece of a weight."""
    if (info := table.get("sharded")) is None:
        return None
    ranks, split = tuple(info.global_ranks), _by_shape(parameter, info.unsharded_shape)
    if split is None or not split.parts:
        return split
    pieces = [pair.global_slices[split.dim] for pair in info.local_global_slices_pairs]
    size = split.parts[0] // len(pieces)
    is_even = all(
        piece.start // size % len(ranks) == _index(ranks) and piece.stop - piece.start == size for piece in pieces
    )
    return split._replace(stride=len(pieces), ranks=ranks, parts=split.parts if is_even else ())


def _by_shape(parameter: Any, shape: Sequence[int]) -> Split | None:
    """Return how a parameter is cut, given the shape of the whole parameter. Return None if it is not cut."""
    dims = [dim for dim, size in enumerate(parameter.shape) if size != shape[dim]]
    if len(dims) != 1:
        return Split() if dims else None
    own, whole = parameter.shape[dims[0]], tuple(map(int, shape))
    return Split(dims[0], (own,) * (whole[dims[0]] // own), whole)


_READERS: Mapping[str, Callable[[Any, Any], Split | None]] = {
    "ds_autotp_universal_checkpoint_meta": _by_autotp,
    "__nanotron_metadata__": _by_nanotron,
    "dist_layout": lambda parameter, table: _by_shape(parameter, table.global_shape),
    "shard_fn": lambda *_: Split(),
}
"""Maps each attribute in which a framework says how it has cut a parameter to the function that reads the attribute.

`dist_layout` and `shard_fn` (a fused QKV, whose parts are cut one by one) are Colossal-AI's (0.5.0, `tensor/d_tensor`).
"""


def _cut(
    shape: Sequence[int], dim: int, ranks: tuple[int, ...], stride: int = 1, parts: Sequence[int] = ()
) -> Chunk | None:
    """Return this rank's chunk of a tensor that ranks have cut along a dim, evenly or into the sizes `parts`.

    If `stride` is above 1, the dim consists of this many blocks, and each rank has a part of every block. An example is
    the weight with gate and up projection of a gated MLP. DTensor calls this a strided shard.
    """
    at = _index(ranks)
    if at is None:
        return None
    kind: dict[str, Any] = {"kind": "Shard", "dim": dim}
    if stride > 1:
        kind = {"kind": "StridedShard", "dim": dim, "split_factor": stride}
    parts = parts or (shape[dim],) * len(ranks)
    if parts[at] != shape[dim]:
        return None
    whole = tuple(sum(parts) if d == dim else size for d, size in enumerate(shape))
    offsets = tuple(sum(parts[:at]) if d == dim else 0 for d in range(len(shape))) if stride == 1 else None
    return _chunk(whole, offsets, kind, ranks, at)


def _chunk(
    shape: tuple[int, ...], offsets: tuple[int, ...] | None, placement: dict[str, Any], ranks: tuple[int, ...], at: int
) -> Chunk:
    mesh = {
        "shape": [len(ranks)],
        "dim_names": ["tensor"],
        "coordinate": [at],
        "ranks": written_ranks([*ranks], (len(ranks),)),
    }
    return Chunk(shape, offsets, compact([placement]), compact(mesh), "marked")


def _index(ranks: tuple[int, ...]) -> int | None:
    import torch.distributed as dist

    rank = dist.get_rank()
    return ranks.index(rank) if rank in ranks else None


class Seen(NamedTuple):
    """The chunks of a value and of its gradient. A chunk is None if no mark tells it."""

    value: Chunk | None = None
    gradient: Chunk | None = None


_NOTHING = Seen()


def chunks_of_given(parameter: torch.Tensor, ranks: tuple[int, ...]) -> Seen:
    """Return the chunks of a parameter that a module gets as an argument, and of the gradient that arrives there.

    If each rank uses the parameter with its own section of a sequence, a rank's gradient is only a summand.
    """
    is_shared = getattr(parameter, "allreduce", True) is not False
    chunk, at = chunk_of_parameter(parameter, parameter, ranks) if is_shared else None, _index(ranks)
    if chunk is not None or at is None or getattr(parameter, "sequence_parallel", False) is not True:
        return Seen(chunk, chunk)
    summand = {"kind": "Partial", "reduce_op": "sum"}
    return Seen(None, _chunk(tuple(parameter.shape), None, summand, ranks, at))


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
                chunk = _cut(shape, dim % len(shape), self.ranks, self.stride, self.parts)
                return Seen(chunk, chunk)
        if len(shape) < 3:
            return _NOTHING
        if site == self.sequence:
            chunk = _cut(shape, self.sequence_dim, self.ranks)
            return Seen(chunk, chunk)
        size, has_whole_gradient = self.whole.get(site, (0, False))
        at = _index(self.ranks)
        if shape[-1] != size or at is None:
            return _NOTHING
        chunk = _chunk(tuple(shape), (0,) * len(shape), {"kind": "Replicate"}, self.ranks, at)
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
        heads = _as_chunks([part // size for part in parts]) if is_by_heads and parts else ()
        if (at := _index(ranks)) is None or len(heads) != len(ranks):
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
        stride = _stride(getattr(module, "weight", None))
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
    return CutCalls(ranks, {(site, 0, -1): (weight.shape[dim],)}, _stride(weight), sequence if is_sequence else "")


def _cut_by_weight(module: nn.Module, ranks: tuple[int, ...], split: Split) -> CutCalls | None:
    """Return what a layer cuts: its outputs if its weight is cut along dim 0, otherwise its inputs.

    Colossal-AI's linears with the attribute `parallel_input` cut inputs, even if the weight is transposed.
    """
    at, parts, (outputs, inputs) = _index(ranks), split.parts, split.shape if len(split.shape) == 2 else (0, 0)
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
        parts = _as_chunks([min(max(valid - start, 0), parts[0]) for start in range(0, sum(parts), parts[0])])
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
