"""A model whose linears are cut over ranks and marked as DeepSpeed's AutoTP marks them; none of it is imported.

What is marked was read in DeepSpeed 0.19.8, below `deepspeed`: `mp_group`, `gather_output`, `tensor_model_parallel` and
`ds_autotp_universal_checkpoint_meta` of `LinearLayer` and `LinearAllreduce` in `module_inject/layers.py`, and the
groups in `utils/groups.py`.

Each word of the command line is a training of the same model and batch, recorded into a folder of its name.
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
from tests.distributed.scripts.marked import gathered, identity, mapped, own_part, summed
from tests.rigs.leaving import leave

BATCH, SEQUENCE, DIM, HEADS, HIDDEN, WORDS, STEPS = 4, 3, 6, 2, 7, 10, 2


class Cut(nn.Module):
    """A linear that is cut along a dim of its weight, also where the parts are not equal."""

    def __init__(self, group: Any, inputs: int, outputs: int, dim: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.mp_group, self.gather_output = group, False
        whole = nn.Linear(inputs, outputs)
        self.sizes = sizes or tuple(
            len(part) for part in torch.arange(whole.weight.shape[dim]).tensor_split(group.size())
        )
        self.weight = self.part(whole.weight, dim)
        self.bias = self.part(whole.bias, 0) if dim == 0 else nn.Parameter(whole.bias.detach())

    def part(self, whole: Tensor, dim: int) -> nn.Parameter:
        parameter: Any = nn.Parameter(whole.detach().split(self.sizes, dim)[self.mp_group.rank()].clone())
        parameter.tensor_model_parallel = True
        table = {"partition_dim": dim, "partition_sizes": self.sizes, "logical_shape": tuple(whole.shape)}
        parameter.ds_autotp_universal_checkpoint_meta = table | {"sub_param_sizes": None}
        return parameter  # type: ignore[no-any-return]


class LinearLayer(Cut):
    def __init__(
        self, group: Any, inputs: int, outputs: int, sizes: tuple[int, ...] = (), *, gather_output: bool = False
    ) -> None:
        super().__init__(group, inputs, outputs, 0, sizes)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(mapped(x, identity, summed, self.mp_group), self.weight, self.bias)
        if not self.gather_output:
            return out
        return mapped(out.transpose(0, -1), gathered, own_part, self.mp_group).transpose(0, -1)


class LinearAllreduce(Cut):
    def __init__(
        self, group: Any, inputs: int, outputs: int, sizes: tuple[int, ...] = (), *, reduce: Any = summed
    ) -> None:
        super().__init__(group, inputs, outputs, 1, sizes)
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight)
        return mapped(out, self.reduce, identity, self.mp_group) + self.bias


class Attention(nn.Module):
    """As of Transformers: it gives the weights [batch, heads, queries, keys], too."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.q_proj, self.k_proj = LinearLayer(group, DIM, DIM), LinearLayer(group, DIM, DIM)
        self.o_proj = LinearAllreduce(group, DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (cut(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for cut in (self.q_proj, self.k_proj))
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        return self.o_proj((weights @ k).transpose(1, 2).flatten(2)), weights


class Net(nn.Module):
    def __init__(self, group: Any, reduce: Any, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, DIM), nn.LayerNorm(DIM)
        self.attention = Attention(group)
        self.up = LinearLayer(group, DIM, HIDDEN, sizes)
        self.down = LinearAllreduce(group, HIDDEN, DIM, sizes, reduce=reduce)
        self.head = LinearLayer(group, DIM, WORDS, gather_output=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        x = x + self.attention(x)[0]
        out: Tensor = self.head(x + self.down(self.up(self.norm(x)).tanh()))
        return out.square().mean()


def train(name: str, group: Any, replicas: Any) -> None:
    torch.manual_seed(0)
    net = Net(group, identity if "unsummed" in name else summed, (5, 2) if "heads" in name else ())
    if "fused" in name:  # AutoTP cuts each of several parts of the weight, as those of a fused QKV
        for fused in net.up.parameters():
            fused.ds_autotp_universal_checkpoint_meta["sub_param_sizes"] = (4, 3)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    flag = "; ".join(rule.text for rule in DEFAULT_RULES)
    rules = flag if "flag" in name else "site=* keep=tensor,stats,fingerprint"
    with recorder.attach(net, enabled=True, dir=name, rules=rules):
        for step in range(STEPS):
            words = torch.randint(WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            net(own_part(words, replicas)).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad = summed(parameter.grad, replicas) / replicas.size()
            optimizer.step()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cut = min(size, 2)
    tensor = [dist.new_group([*range(r, r + cut)]) for r in range(0, size, cut)]
    data = [dist.new_group([*range(r, size, cut)]) for r in range(cut)]
    groups = types.ModuleType("deepspeed.utils.groups")
    sys.modules[groups.__name__] = groups
    own = tensor[rank // cut], data[rank % cut]
    vars(groups).update(_TENSOR_MODEL_PARALLEL_GROUP=own[0], _DATA_PARALLEL_GROUP=own[1])
    for name in sys.argv[1:]:
        train(name, *own)


if __name__ == "__main__":
    main()
    leave()
