"""Reads the marks on plain tensors that frameworks cut over ranks: Megatron-Core, AutoTP, nanotron, Colossal-AI.

Such tensors have no placements. The marks are attributes of parameters (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `allreduce`, and the tables in `_READERS`), of layers (`output_size_per_partition` and similar
ones), and of the Python modules that hold the frameworks' process groups, if the program has loaded them. Nothing here
may import or call a framework, read a value, issue a collective, or keep a module, a tensor or a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...observe.tree import innermost
from ...records import Chunk
from ..local_values import compact, written_ranks
from .topology import is_distributed

_STATES = ("megatron.core.parallel_state", "deepspeed.utils.groups")
"""Python modules of frameworks, whose attributes are process groups, such as ``_TENSOR_MODEL_PARALLEL_GROUP``."""
MEGATRONS_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


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
    at, num_chunks = own_index(ranks), getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
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
        return cut_chunk(tensor.shape, split.dim, ranks, split.stride, split.parts) if is_known else None
    dim = getattr(parameter, "partition_dim", -1)
    is_cut = isinstance(dim, int) and 0 <= dim < parameter.dim()
    return cut_chunk(tensor.shape, dim, ranks, stride_of(parameter)) if is_cut and len(ranks) > 1 else None


def main_parameter(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the wider copy of a parameter that Megatron's optimizer updates instead. Return None if there is no copy.

    None is also returned if a distributed optimizer has only a part of the copy. `parameter_rows` finds the part.
    """
    main = getattr(parameter, "main_param", None)
    return main if isinstance(main, torch.Tensor) and main.shape == parameter.shape else None


def stride_of(parameter: object) -> int:
    """Return of how many blocks a marked parameter consists that are cut one by one."""
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
    return Split(int(dim), () if several else chunk_sizes(parts), tuple(shape))


def chunk_sizes(parts: Sequence[int]) -> tuple[int, ...]:
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
        piece.start // size % len(ranks) == own_index(ranks) and piece.stop - piece.start == size for piece in pieces
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


def cut_chunk(
    shape: Sequence[int], dim: int, ranks: tuple[int, ...], stride: int = 1, parts: Sequence[int] = ()
) -> Chunk | None:
    """Return this rank's chunk of a tensor that ranks have cut along a dim, evenly or into the sizes `parts`.

    If `stride` is above 1, the dim consists of this many blocks, and each rank has a part of every block. An example is
    the weight with gate and up projection of a gated MLP. DTensor calls this a strided shard.
    """
    at = own_index(ranks)
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
    return marked_chunk(whole, offsets, kind, ranks, at)


def marked_chunk(
    shape: tuple[int, ...], offsets: tuple[int, ...] | None, placement: dict[str, Any], ranks: tuple[int, ...], at: int
) -> Chunk:
    """Return the chunk at `offsets` of a tensor of the whole `shape`, on the rank that is number `at` of `ranks`."""
    mesh = {
        "shape": [len(ranks)],
        "dim_names": ["tensor"],
        "coordinate": [at],
        "ranks": written_ranks([*ranks], (len(ranks),)),
    }
    return Chunk(shape, offsets, compact([placement]), compact(mesh), "marked")


def own_index(ranks: tuple[int, ...]) -> int | None:
    """Return this rank's place among `ranks`, or None if it is not among them."""
    import torch.distributed as dist

    rank = dist.get_rank()
    return ranks.index(rank) if rank in ranks else None


class Seen(NamedTuple):
    """The chunks of a value and of its gradient. A chunk is None if no mark tells it."""

    value: Chunk | None = None
    gradient: Chunk | None = None


def chunks_of_given(parameter: torch.Tensor, ranks: tuple[int, ...]) -> Seen:
    """Return the chunks of a parameter that a module gets as an argument, and of the gradient that arrives there.

    If each rank uses the parameter with its own section of a sequence, a rank's gradient is only a summand.
    """
    is_shared = getattr(parameter, "allreduce", True) is not False
    chunk, at = chunk_of_parameter(parameter, parameter, ranks) if is_shared else None, own_index(ranks)
    if chunk is not None or at is None or getattr(parameter, "sequence_parallel", False) is not True:
        return Seen(chunk, chunk)
    summand = {"kind": "Partial", "reduce_op": "sum"}
    return Seen(None, marked_chunk(tuple(parameter.shape), None, summand, ranks, at))
