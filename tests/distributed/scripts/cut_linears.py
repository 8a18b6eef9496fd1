"""Linears and an embedding that are cut over ranks and marked as nanotron and Colossal-AI mark them.

Neither is imported. What is marked was read in nanotron 0.4, `parallel/tensor_parallel/nn.py` and
`parallel/sharded_parameters.py`: `pg`, `mode` and `__nanotron_metadata__`; and in Colossal-AI 0.5.0,
`shardformer/layer` and `tensor/d_tensor/api.py`: `process_group`, `gather_output`, `parallel_input`,
`seq_parallel_mode`, `seq_parallel_dim`, `old_num_embeddings`, `dist_layout`, and `shard_fn` of a fused QKV.

Each word of the command line is a training of the framework that the word begins with, recorded into a folder of its
name. nanotron has the sequence as dim 0, Colossal-AI as dim 1.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recorder
from recorder.config import DEFAULT_RULES
from tests.distributed.scripts.marked import gathered, identity, mapped, scattered_sum, summed
from tests.rigs.leaving import train_each

BATCH, SEQUENCE, DIM, HIDDEN, WORDS, ROWS, STEPS = 4, 6, 8, 12, 11, 12, 2
QKV = (8, 4, 4)
Mode = enum.Enum("Mode", ["ALL_REDUCE", "REDUCE_SCATTER"])


class How(NamedTuple):
    is_nanotron: bool
    is_sequence: bool
    group: Any

    def mapped(self, x: Tensor, forward: Any, backward: Any) -> Tensor:
        """Call collectives along the sequence; those without a dim of theirs do not mind."""
        dim = 0 if self.is_nanotron else 1
        return mapped(x.transpose(0, dim), forward, backward, self.group).transpose(0, dim)


class Cut(nn.Module):
    """What the layers have in common: attributes, and marked parts of parameters."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how
        if how.is_nanotron:
            self.pg, self.mode = how.group, Mode.REDUCE_SCATTER if how.is_sequence else Mode.ALL_REDUCE
        else:
            self.process_group, self.seq_parallel_dim = how.group, 1
            self.seq_parallel_mode = "split_gather" if how.is_sequence else None

    def part(self, whole: Tensor, dim: int, sizes: tuple[int, ...] = ()) -> nn.Parameter:
        """Return this rank's part of a whole parameter, or of each of its pieces of the given sizes."""
        pieces = whole.split(sizes or whole.shape[dim], dim)
        rank, size = self.how.group.rank(), self.how.group.size()
        parameter = nn.Parameter(torch.cat([piece.chunk(size, dim)[rank] for piece in pieces], dim))
        if self.how.is_nanotron:
            pairs, start = [], 0
            for length in (piece.shape[dim] for piece in pieces):
                own = [slice(None)] * whole.dim()
                own[dim] = slice(start + rank * length // size, start + (rank + 1) * length // size)
                pairs.append(SimpleNamespace(global_slices=tuple(own)))
                start += length
            ranks = tuple(dist.get_process_group_ranks(self.how.group))
            of_nanotron = SimpleNamespace(
                global_ranks=ranks, local_global_slices_pairs=tuple(pairs), unsharded_shape=tuple(whole.shape)
            )
            marks: dict[str, Any] = {"__nanotron_metadata__": {"sharded": of_nanotron}}
        elif sizes:
            marks = {"shard_fn": identity, "gather_fn": identity}
        else:
            spec, mesh = SimpleNamespace(dim_partition_dict={dim: [0]}), SimpleNamespace(shape=(size,))
            layout = SimpleNamespace(device_mesh=mesh, sharding_spec=spec, global_shape=whole.shape)
            marks = {"dist_layout": layout}
        for name, value in marks.items():
            setattr(parameter, name, value)
        return parameter


class Column(Cut):
    def __init__(self, how: How, inputs: int, outputs: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(how)
        self.gather_output = False
        self.weight = self.part(torch.randn(outputs, inputs) / 4, 0, sizes)
        self.bias = self.part(torch.randn(outputs) / 4, 0, sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.how.mapped(x, *((gathered, scattered_sum) if self.how.is_sequence else (identity, summed)))
        return nn.functional.linear(x, self.weight, self.bias)


class Head(Column):
    """Of Colossal-AI, rows that fill up the vocabulary are cut off from the output."""

    def __init__(self, how: How) -> None:
        super().__init__(how, DIM, ROWS)
        self.num_own = ROWS // how.group.size()
        if not how.is_nanotron:
            self.old_num_embeddings = WORDS
            self.num_own = min(WORDS - how.group.rank() * self.num_own, self.num_own)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : self.num_own]


class Row(Cut):
    """A linear whose inputs are cut; of nanotron only the first rank has a bias, and `is_turned` is Colossal-AI's."""

    def __init__(self, how: How, inputs: int, outputs: int, *, is_turned: bool = False, reduce: Any = summed) -> None:
        super().__init__(how)
        if not how.is_nanotron:
            self.parallel_input = True
        self.is_turned, self.reduce = is_turned, reduce
        whole, bias = torch.randn(outputs, inputs) / 4, torch.randn(outputs)
        self.weight = self.part(whole.t().contiguous(), 0) if is_turned else self.part(whole, 1)
        self.bias = nn.Parameter(bias) if not how.is_nanotron or how.group.rank() == 0 else None
        if self.bias is not None and how.is_nanotron:
            self.bias.__nanotron_metadata__ = {}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.is_turned else self.weight
        out = nn.functional.linear(x, weight, self.bias if self.how.is_nanotron else None)
        out = self.how.mapped(out, *((scattered_sum, gathered) if self.how.is_sequence else (self.reduce, identity)))
        return out if self.how.is_nanotron or self.bias is None else out + self.bias


class Embedding(Cut):
    padding_idx = None

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.weight = self.part(torch.randn(ROWS, DIM), 0)

    def forward(self, words: Tensor) -> Tensor:
        rows = len(self.weight)
        own = words - self.how.group.rank() * rows
        found = self.weight[own.clamp(0, rows - 1)] * ((own >= 0) & (own < rows))[..., None]
        return self.how.mapped(found, *((scattered_sum, gathered) if self.how.is_sequence else (summed, identity)))


class Net(nn.Module):
    def __init__(self, how: How, reduce: Any) -> None:
        super().__init__()
        self.how, is_gated = how, how.is_nanotron
        self.embedding, self.norm = Embedding(how), nn.LayerNorm(DIM)
        self.qkv, self.proj = Column(how, DIM, sum(QKV), QKV), Row(how, QKV[0], DIM)
        self.up = Column(how, DIM, HIDDEN * (1 + is_gated), (HIDDEN, HIDDEN) if is_gated else ())
        self.down = Row(how, HIDDEN, DIM, is_turned=not is_gated, reduce=reduce)
        self.head = Head(how)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words.t() if self.how.is_nanotron else words)
        q, k, v = self.qkv(self.norm(x)).split([size // self.how.group.size() for size in QKV], -1)
        x = x + self.proj((q.unflatten(-1, (-1, 2)) * (k * v)[..., None]).flatten(-2))
        gate, up = self.up(x).chunk(2, -1) if self.how.is_nanotron else (self.up(x),) * 2
        scores = self.head(x + self.down(gate.sigmoid() * up))
        return self.how.mapped(scores.square().sum(-1), summed, identity).mean()


def train(name: str, group: Any) -> None:
    torch.manual_seed(0)
    how = How(name.startswith("nanotron"), "sequence" in name, group)
    net = Net(how, identity if "unsummed" in name else summed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    flag = "; ".join(rule.text for rule in DEFAULT_RULES)
    rules = flag if "flag" in name else "site=* keep=tensor,stats,fingerprint"
    with recorder.attach(net, enabled=True, dir=name, rules=rules):
        for step in range(STEPS):
            net.zero_grad()
            net(torch.randint(WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))).backward()
            own = [*net.norm.parameters()]
            own += [] if how.is_nanotron else [row.bias for row in (net.proj, net.down) if row.bias is not None]
            for parameter in own if how.is_sequence else ():  # each rank had its slice of the sequence
                assert parameter.grad is not None
                parameter.grad = summed(parameter.grad, group)
            optimizer.step()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    train_each(lambda name: train(name, dist.group.WORLD))
