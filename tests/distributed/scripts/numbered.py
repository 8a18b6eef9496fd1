"""Layers of pipeline stages and experts of expert parallel ranks, which each rank numbers from 0; as in Megatron-Core.

None of Megatron is imported. What is marked was read in Megatron-LM, commit d98e8a6, below `megatron/core`:
`layer_number` in `transformer/transformer_layer.py`, `num_local_experts` and `ep_group` of `SequentialMLP` in
`transformer/moe/experts.py`, `num_gemms` and `weight0`, `weight1`, ... of `TEGroupedLinear` in
`extensions/transformer_engine.py`, `allreduce` in `tensor_parallel/layers.py`, the local variables of `forward_step` in
`pipeline_parallel/schedules.py`, and the groups in `parallel_state.py`.

Each word of the command line is a training of the same global model and batch, recorded into a folder of its name.
"""

from __future__ import annotations

import sys
import types
import zlib
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recorder
from tests.distributed.scripts.marked import gathered, mapped, own_part, scattered_sum, summed
from tests.rigs.leaving import leave

SEQUENCE, BATCH, DIM, WORDS, EXPERTS, LAYERS, MICRO_BATCHES, STEPS = 3, 4, 5, 11, 4, 4, 2, 2
SCHEDULE = """
def forward_step(call, model, config, num_microbatches, vp_stage):
    return call()
"""


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Take [sequence, batch, size], and give [sequence * batch, experts]."""
        return (x @ self.weight.t()).flatten(0, 1).softmax(-1)


class GroupedLinear(nn.Module):
    """The linears of some experts, whose parameters have numbers that each rank counts from 0."""

    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.zeros(DIM, DIM)))

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        parts = zip(tokens.split(counts), self.parameters(), strict=True)
        return torch.cat([nn.functional.linear(part, weight) for part, weight in parts])


class Experts(nn.Module):
    def __init__(self, group: Any, *, is_grouped: bool) -> None:
        super().__init__()
        self.ep_group, self.num_local_experts = group, EXPERTS // group.size()
        self.linear_fc1 = GroupedLinear(self.num_local_experts) if is_grouped else None
        of_each = range(0 if is_grouped else self.num_local_experts)
        self.local_experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in of_each)
        for parameter in self.parameters():
            parameter.allreduce = group.size() == 1  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, choice: Tensor) -> Tensor:
        out, first = torch.zeros_like(tokens), self.ep_group.rank() * self.num_local_experts
        rows = [(choice == first + number).nonzero(as_tuple=True)[0] for number in range(self.num_local_experts)]
        if self.linear_fc1 is not None:
            at = torch.cat(rows)
            return out.index_add(0, at, self.linear_fc1(tokens[at], [len(one) for one in rows]))
        for at, expert in zip(rows, self.local_experts, strict=True):
            out = out.index_add(0, at, expert(tokens[at]))
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, group: Any, *, is_grouped: bool) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts(group, is_grouped=is_grouped)

    def forward(self, x: Tensor) -> Tensor:
        group = self.experts.ep_group
        gate, choice = self.router(x).max(-1)
        tokens = mapped(x.flatten(0, 1) * gate[:, None], gathered, scattered_sum, group)
        out = mapped(self.experts(tokens, gathered(choice, group)), scattered_sum, gathered, group)
        return out.view_as(x)


class WithoutBias(nn.Linear):
    """A linear that gives its bias to the module around it, which adds it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x @ self.weight.t(), self.bias


class Layer(nn.Module):
    def __init__(self, number: int, num_stages: int, group: Any, *, is_grouped: bool) -> None:
        super().__init__()
        self.layer_number, self.is_checkpointed = number, False
        self.config = types.SimpleNamespace(pipeline_model_parallel_size=num_stages)
        self.norm, self.mlp = nn.LayerNorm(DIM), MixtureOfExperts(group, is_grouped=is_grouped)
        self.proj = WithoutBias(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            x = x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)
        else:
            x = x + self.mlp(self.norm(x))
        out, bias = self.proj(x)
        return x + out + bias  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The layers of a stage; what another stage hands over is set as an attribute."""

    given: Tensor | None = None

    def __init__(self, stage: int, num_stages: int, num_ranks: int, group: Any, *, is_grouped: bool) -> None:
        super().__init__()
        count = LAYERS // num_stages
        self.layers = nn.ModuleList(
            Layer(stage * count + i + 1, num_ranks, group, is_grouped=is_grouped) for i in range(count)
        )
        self.final = nn.LayerNorm(DIM) if stage == num_stages - 1 else None

    def forward(self, x: Tensor | None) -> Tensor:
        x = self.given if x is None else x
        for layer in self.layers:
            x = layer(x)
        assert x is not None
        return x if self.final is None else self.final(x)


class Net(nn.Module):
    def __init__(self, stage: int, num_stages: int, num_ranks: int, group: Any, *, is_grouped: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM) if stage == 0 else None
        self.decoder = Decoder(stage, num_stages, num_ranks, group, is_grouped=is_grouped)
        self.out = nn.Linear(DIM, WORDS) if stage == num_stages - 1 else None
        first_layer, first_expert = stage * (LAYERS // num_stages), group.rank() * (EXPERTS // group.size())
        for name, parameter in self.named_parameters():
            parts = name.split(".")
            for i, part in enumerate(parts):
                first = {"layers": first_layer, "local_experts": first_expert}.get(parts[i - 1], 0) if i else 0
                parts[i] = str(int(part) + first) if part.isdigit() else part
            if parts[-2] == "linear_fc1":
                parts[-1] = f"weight{int(parts[-1][6:]) + first_expert}"
            torch.manual_seed(zlib.crc32(".".join(parts).encode()))
            parameter.data = torch.randn(parameter.shape) / 2

    def forward(self, words: Tensor) -> Tensor:
        """Take words [batch, sequence]; inside, the sequence is dim 0."""
        x = self.decoder(None if self.embedding is None else self.embedding(words.t()))
        return x if self.out is None else self.out(x).square().mean(-1).t()  # type: ignore[no-any-return]


def go_through(chunks: list[Net], ranks: Any, words: Tensor) -> None:
    """Train one step of a pipeline: all micro-batches forward through a rank's stage, and then back."""
    size, at = ranks.size(), ranks.rank()
    config = types.SimpleNamespace(virtual_pipeline_model_parallel_size=len(chunks))
    peers = dist.get_process_group_ranks(ranks)
    sent: list[Any] = []
    outputs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    parts = words.chunk(MICRO_BATCHES)

    def send(x: Tensor, to: int) -> None:
        sent.append((x, dist.isend(x.detach().contiguous(), peers[to % size])))

    def received(source: int) -> Tensor:
        x = torch.empty(SEQUENCE, len(parts[0]), DIM)
        dist.recv(x, peers[source % size])
        return x

    schedules: Any = sys.modules["megatron.core.pipeline_parallel.schedules"]
    for number, chunk in enumerate(chunks):
        for micro_batch, part in enumerate(parts):
            given = received(at - 1).requires_grad_() if chunk.embedding is None else None
            chunk.decoder.given = given
            out = schedules.forward_step(lambda of=chunk, x=part: of(x), chunk, config, MICRO_BATCHES, number)
            outputs[number, micro_batch] = given, out
            if chunk.out is None:
                send(out, at + 1)
    for number, chunk in reversed([*enumerate(chunks)]):
        for micro_batch in range(MICRO_BATCHES):
            given, out = outputs[number, micro_batch]
            if chunk.out is None:
                out.backward(received(at + 1))
            else:
                (out.mean() / MICRO_BATCHES).backward()
            if given is not None:
                assert given.grad is not None
                send(given.grad, at - 1)
    for _, work in sent:
        work.wait()


def train(name: str, groups: dict[str, Any]) -> None:
    num_ranks, num_chunks = groups["PIPELINE_MODEL_PARALLEL"].size(), 2 if "vpp" in name else 1
    at, num_stages = groups["PIPELINE_MODEL_PARALLEL"].rank(), num_ranks * num_chunks
    experts, replicas = groups["EXPERT_MODEL_PARALLEL"], groups["DATA_PARALLEL"]
    numbers = [at + number * num_ranks for number in range(num_chunks)]
    chunks = [Net(number, num_stages, num_ranks, experts, is_grouped="grouped" in name) for number in numbers]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.05, momentum=0.9)
    with ExitStack() as stack:
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                layer.is_checkpointed = "recompute" in name  # type: ignore[assignment]
            rules = "site=* keep=tensor,stats,fingerprint"
            stack.enter_context(recorder.attach(chunk, enabled=True, dir=name, rules=rules))
        for step in range(STEPS):
            words = torch.randint(WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
            words = own_part(words, replicas)
            optimizer.zero_grad()
            if num_ranks > 1:
                go_through(chunks, groups["PIPELINE_MODEL_PARALLEL"], words)
            else:
                chunks[0](words).mean().backward()
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                group = replicas if getattr(parameter, "allreduce", True) else groups["EXPERT_DATA_PARALLEL"]
                if group is replicas or "forgot" not in name:
                    parameter.grad = summed(parameter.grad, group)
                parameter.grad /= replicas.size()
            optimizer.step()


def groups_of(name: str) -> dict[str, Any]:
    """Return this rank's groups: pipeline ranks are the farthest apart, experts are shared by the nearest two."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = 2 if "pp" in name else 1
    num_replicas = size // num_stages
    num_experts = 2 if "ep" in name else 1
    lines = {
        "PIPELINE_MODEL_PARALLEL": [[*range(r, size, num_replicas)] for r in range(num_replicas)],
        "DATA_PARALLEL": [[*range(r, r + num_replicas)] for r in range(0, size, num_replicas)],
        "EXPERT_MODEL_PARALLEL": [[*range(r, r + num_experts)] for r in range(0, size, num_experts)],
        "EXPERT_DATA_PARALLEL": [
            [*range(first + r, first + num_replicas, num_experts)]
            for first in range(0, size, num_replicas)
            for r in range(num_experts)
        ],
    }
    groups: dict[str, Any] = {}
    for kind, some in lines.items():
        for ranks in some:
            group = dist.new_group(ranks, group_desc=f"{kind}_GROUP")
            if rank in ranks:
                groups[kind] = group
    return groups


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    state = types.ModuleType("megatron.core.parallel_state")
    schedules = types.ModuleType("megatron.core.pipeline_parallel.schedules")
    exec(SCHEDULE, vars(schedules))
    sys.modules |= {module.__name__: module for module in (state, schedules)}
    for name in sys.argv[1:]:
        groups = groups_of(name)
        vars(state).update({f"_{kind}_GROUP": group for kind, group in groups.items()})
        train(name, groups)


if __name__ == "__main__":
    main()
    leave()
