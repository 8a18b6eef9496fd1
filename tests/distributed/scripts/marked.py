"""A transformer whose plain tensors are cut over ranks and marked as Megatron-Core marks them; none of it is imported.

What is marked was read in Megatron-LM, commit d98e8a6, below `megatron/core`:
`set_tensor_model_parallel_attributes` and the three layers in `tensor_parallel/layers.py`, the core of attention in
`transformer/dot_product_attention.py`, the stride of a gated MLP in `transformer/mlp.py`, the groups in
`parallel_state.py`, and, in commit d98e8a6, too, the places of the distributed optimizer's parts in
`distributed/param_and_grad_buffer.py` and its parts in `optimizer/distrib_optimizer.py`.

Each word of the command line is a training of the same global model and batch, recorded into a folder of its name.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recorder
from recorder.config import DEFAULT_RULES
from tests.rigs.leaving import leave

SEQUENCE, BATCH, DIM, HEADS, HIDDEN, WORDS, STEPS = 6, 4, 12, 4, 20, 10, 2


def gathered(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def own_part(x: Tensor, group: Any) -> Tensor:
    part: Tensor = x.chunk(group.size())[group.rank()]
    return part.contiguous()


def scattered_sum(x: Tensor, group: Any) -> Tensor:
    return own_part(summed(x, group), group)


def identity(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


class Mapped(torch.autograd.Function):
    """One function on the way forward, and another on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, group: Any) -> Tensor:
        ctx.backward_of, ctx.group = backward, group
        return forward(x, group)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.backward_of(gradient, ctx.group), None, None, None


def mapped(x: Tensor, forward: Any, backward: Any, group: Any) -> Tensor:
    return Mapped.apply(x, forward, backward, group)  # type: ignore[no-any-return, no-untyped-call]


class Cut(nn.Module):
    """What the three tensor parallel layers have in common."""

    def __init__(self, group: Any, is_sequence: bool) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = group, is_sequence

    def part(self, whole: Tensor, dim: int, stride: int = 1) -> nn.Parameter:
        """Return this rank's part of a whole parameter, marked."""
        pieces = whole.chunk(stride * self.tp_group.size(), dim)[self.tp_group.rank() :: self.tp_group.size()]
        parameter = nn.Parameter(torch.cat(pieces, dim))
        marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
        for name, value in marks.items():
            setattr(parameter, name, value)
        return parameter


class ColumnParallelLinear(Cut):
    def __init__(self, group: Any, is_sequence: bool, size: int, output_size: int, stride: int = 1) -> None:
        super().__init__(group, is_sequence)
        self.input_size, self.allreduce_dgrad = size, not is_sequence
        self.output_size, self.output_size_per_partition = output_size, output_size // group.size()
        self.weight = self.part(torch.randn(output_size, size) / 4, 0, stride)
        self.bias = self.part(torch.randn(output_size) / 4, 0, stride)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        forward, backward = (gathered, scattered_sum) if self.sequence_parallel else (identity, summed)
        return nn.functional.linear(mapped(x, forward, backward, self.tp_group), self.weight, self.bias), None


class RowParallelLinear(Cut):
    input_is_parallel = True

    def __init__(self, group: Any, is_sequence: bool, input_size: int, size: int) -> None:
        super().__init__(group, is_sequence)
        self.output_size, self.reduce = size, summed
        self.input_size, self.input_size_per_partition = input_size, input_size // group.size()
        self.weight = self.part(torch.randn(size, input_size) / 4, 1)
        self.bias = nn.Parameter(torch.randn(size))
        self.bias.sequence_parallel = is_sequence  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        forward, backward = (scattered_sum, gathered) if self.sequence_parallel else (self.reduce, identity)
        return mapped(nn.functional.linear(x, self.weight), forward, backward, self.tp_group), self.bias


class VocabParallelEmbedding(Cut):
    def __init__(self, group: Any, is_sequence: bool, num_embeddings: int, size: int) -> None:
        super().__init__(group, is_sequence)
        self.reduce_scatter_embeddings, self.embedding_dim = is_sequence, size
        self.num_embeddings, self.num_embeddings_per_partition = num_embeddings, num_embeddings // group.size()
        self.weight = self.part(torch.randn(num_embeddings, size), 0)

    def forward(self, words: Tensor) -> Tensor:
        start = self.tp_group.rank() * self.num_embeddings_per_partition
        own = words - start
        is_own = (own >= 0) & (own < self.num_embeddings_per_partition)
        found = self.weight[own.clamp(0, self.num_embeddings_per_partition - 1)] * is_own[..., None]
        forward, backward = (scattered_sum, gathered) if self.sequence_parallel else (summed, identity)
        return mapped(found, forward, backward, self.tp_group)


class DotProductAttention(nn.Module):
    def __init__(self, group: Any, config: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.hidden_size_per_partition = DIM // group.size()
        self.num_attention_heads_per_partition = self.num_query_groups_per_partition = HEADS // group.size()
        self.softmax = nn.Softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take and give [sequence, batch, heads, size of a head]; the scores are [batch, heads, sequence, sequence]."""
        weights = self.softmax(torch.einsum("sbnh,tbnh->bnst", q, k))
        return torch.einsum("bnst,tbnh->sbnh", weights, v).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, group: Any, is_sequence: bool, config: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.num_attention_heads_per_partition = self.num_query_groups_per_partition = HEADS // group.size()
        self.qkv = ColumnParallelLinear(group, is_sequence, DIM, 3 * DIM)
        self.head_norm = nn.LayerNorm(DIM // HEADS)
        self.core = DotProductAttention(group, config)
        self.proj = RowParallelLinear(group, is_sequence, DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)[0].unflatten(-1, (-1, 3, DIM // HEADS)).unbind(3)
        return self.proj(self.core(self.head_norm(q), k, v))


class Block(nn.Module):
    def __init__(self, group: Any, is_sequence: bool, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = is_sequence  # type: ignore[attr-defined]
        self.attention = SelfAttention(group, is_sequence, config)
        self.up = ColumnParallelLinear(group, is_sequence, DIM, 2 * HIDDEN, stride=2)
        self.down = RowParallelLinear(group, is_sequence, HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        mixed, bias = self.attention(self.norm(x))
        x = x + mixed + bias
        gate, up = self.up(x)[0].chunk(2, -1)
        out, bias = self.down(gate.sigmoid() * up)
        return x + out + bias  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, group: Any, is_sequence: bool, share: float, has_places: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(share)
        self.places = nn.Embedding(SEQUENCE, DIM) if has_places else None
        config = types.SimpleNamespace(num_attention_heads=HEADS, num_query_groups=HEADS)
        self.embedding = VocabParallelEmbedding(group, is_sequence, WORDS, DIM)
        self.block = Block(group, is_sequence, config)
        self.out = ColumnParallelLinear(group, is_sequence, DIM, WORDS)

    def forward(self, words: Tensor, places: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Take words [batch, sequence], and give a number for each; in between the sequence is dim 0.

        The places [batch or 1, sequence] and the mask [1, 1, sequence] are for all samples.
        """
        x = self.drop(self.embedding(words.t()))
        if self.places is not None and mask is not None:
            x = x + (self.places(places) * mask.transpose(1, 2)).transpose(0, 1)
        scores, _ = self.out(self.block(x))
        group = self.out.tp_group
        return mapped(scores.square().sum(-1), summed, identity, group).t()


def main_of(parameter: nn.Parameter) -> Tensor:
    """Return what Megatron's optimizer updates in place of a parameter of 16 bits, and marks as that."""
    main = parameter.detach().clone().requires_grad_()
    main.__dict__.update(vars(parameter))
    parameter.main_param = main  # type: ignore[attr-defined]
    return main


def parts_of(net: Any, replicas: Any, *, has_mains: bool) -> list[tuple[Tensor, slice]]:
    """Give a net what Megatron's DDP has, and return what the distributed optimizer of this rank updates.

    Each parameter has its part, with the elements that are in it, and a part of none where all are on other ranks.
    """
    net.ddp_config = types.SimpleNamespace(use_distributed_optimizer=True)
    parameters = [*net.parameters()][::-1]
    index, buckets, start = {}, list[Any](), 0
    for number, of_bucket in enumerate((parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :])):
        first = start
        for parameter in of_bucket:
            index[parameter] = start, start + parameter.numel(), number
            start += parameter.numel()
        start += -(start - first) % replicas.size()
        buckets.append(types.SimpleNamespace(offset=first, grad_data=torch.empty(start - first)))
    buffer = types.SimpleNamespace(data_parallel_group=replicas, param_index_map=index, buckets=buckets)
    net.buffers, net.expert_parallel_buffers = [buffer], []
    found = {}
    for parameter, (first, last, number) in index.items():
        size = buckets[number].grad_data.numel() // replicas.size()
        begin = buckets[number].offset + replicas.rank() * size
        inside = slice(*(min(max(edge - first, 0), last - first) for edge in (begin, begin + size)))
        part = parameter.data.view(-1)[inside]
        if has_mains and part.numel():
            part = parameter.main_param = part.clone()
            parameter.main_param_sharded = True
        found[parameter] = part.requires_grad_(), inside
    return [found[parameter] for parameter in net.parameters()]


def train(name: str, group: Any, replicas: Any) -> None:
    is_sequence = "sp" in name
    torch.manual_seed(0)
    net = Net(group, is_sequence, 0.5 if "drop" in name else 0.0, "single" in name)
    if "bare" in name:  # as in a program of its own, which marks the parameters alone
        for module in net.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                for size in ("input_size", "output_size", "input_size_per_partition", "output_size_per_partition"):
                    module.__dict__.pop(size, None)
    if "own_groups" in name:
        net.pg_collection = types.SimpleNamespace(tp=group, dp=replicas)  # type: ignore[assignment]
    of_heads = [] if name == "fault" else [*net.block.attention.head_norm.parameters()]
    mains = [main_of(parameter) for parameter in net.parameters()] if name == "mains" else [*net.parameters()]
    parts = parts_of(net, replicas, has_mains="mains" in name) if "parts" in name else []
    updated = [part for part, _ in parts if part.numel()] if parts else mains
    optimizer = torch.optim.SGD(updated, lr=0.05, momentum=0.9)
    rules = "site=* keep=tensor,stats,fingerprint"
    if "flag" in name:
        rules = "; ".join(rule.text for rule in DEFAULT_RULES)
    if "unsummed" in name:
        net.block.down.reduce = identity
    if name == "turned":
        rules = "site=output keep=probe; site=output keep=stats steps=1"
        net.block.up.bias.data[0] += torch.nan if group.rank() else 0
    with recorder.attach(net, enabled=True, dir=name, rules=rules):
        for step in range(STEPS):
            words = torch.randint(WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step + (dist.get_rank() if "seed" in name else 0))
            if "single" in name:
                words, places = words[: int(name[-1])], torch.arange(SEQUENCE).expand(int(name[-1]), -1)
                places = places[:1] if "row" in name else own_part(places, replicas)
                loss = net(own_part(words, replicas), places, torch.linspace(0, 1, SEQUENCE)[None, None]).mean()
            else:
                loss = net(own_part(words, replicas)).mean()
            net.zero_grad()
            loss.backward()
            for number, parameter in enumerate(net.parameters()):
                assert parameter.grad is not None
                is_summand = is_sequence and getattr(parameter, "sequence_parallel", False)
                if (is_summand and "forgot" not in name) or any(parameter is one for one in of_heads):
                    parameter.grad = summed(parameter.grad, group)
                parameter.grad = summed(parameter.grad, replicas) / replicas.size()
                for part, inside in parts[number : number + 1]:
                    part.grad = parameter.grad.flatten()[inside]
            for main, parameter in zip(mains, net.parameters(), strict=True):
                main.grad = parameter.grad
            optimizer.step()
            for (part, inside), parameter in zip(parts, net.parameters(), strict=bool(parts)):
                values = torch.zeros(parameter.numel())
                values[inside] = part.detach()
                parameter.data.copy_(summed(values, replicas).view_as(parameter))
            for main, parameter in zip(mains, net.parameters(), strict=True):
                parameter.data.copy_(main.detach())


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cut = min(size, 2)
    state = types.ModuleType("megatron.core.parallel_state")
    sys.modules[state.__name__] = state
    tensor = [
        dist.new_group([*range(r, r + cut)], group_desc="TENSOR_MODEL_PARALLEL_GROUP") for r in range(0, size, cut)
    ]
    data = [dist.new_group([*range(r, size, cut)], group_desc="DATA_PARALLEL_GROUP") for r in range(cut)]
    group, replicas = tensor[rank // cut], data[rank % cut]
    crossed = [dist.new_group([*range(r, size, size // cut)], group_desc="tp") for r in range(size // cut)]
    beside = [dist.new_group([*range(r, r + size // cut)], group_desc="dp") for r in range(0, size, size // cut)]
    others = crossed[rank % (size // cut)], beside[rank // (size // cut)]
    alone = [dist.new_group([r]) for r in range(size)][rank]
    for name in sys.argv[1:]:
        named = (alone, dist.group.WORLD) if "dp_single" in name or name == "parts" else (group, replicas)
        vars(state).update(_TENSOR_MODEL_PARALLEL_GROUP=named[0], _TENSOR_AND_CONTEXT_PARALLEL_GROUP=named[0])
        vars(state).update(_DATA_PARALLEL_GROUP=named[1])
        train(name, *(others if "own_groups" in name else named))


if __name__ == "__main__":
    main()
    leave()
