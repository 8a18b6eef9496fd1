"""Tensor and sequence parallel training, alone and under data parallel wrappers, each case beside a plain model.

Every case trains twice, without the recorder and with it, into a folder of its own. All ranks see the same data, so a
plain model in one process, watched by hooks of this script, has the values that the pieces of the ranks make up.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.leaving import leave

STEPS = 2
WORDS, DIM, HEAD, HIDDEN = 12, 8, 2, 12
RULES = "site=* keep=tensor,stats,fingerprint"


class Core(nn.Module):
    """Attention over the heads that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.act = nn.ReLU()
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(recorder.tap("hidden", self.up(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A language model in small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Exchange(torch.autograd.Function):
    """Rows to the ranks that want them, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None = None
    ) -> Tensor:
        ctx.sizes = sent, received
        ctx.group = group
        return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.sizes
        return exchange(gradients[0], received, sent, ctx.group), None, None, None


def exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), received, sent, group)
    return found


class Experts(nn.Module):
    """One expert on each rank; the gate's choice decides on which rank a row is worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, dist.get_world_size())
        self.expert = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights = self.gate(rows).softmax(-1)
        chosen = weights.argmax(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sizes = sent.tolist(), received.tolist()
        worked_on = self.expert(Exchange.apply(rows[order], *sizes))  # type: ignore[no-untyped-call]
        back = Exchange.apply(worked_on, *reversed(sizes))  # type: ignore[no-untyped-call]
        found = torch.empty_like(rows).index_copy(0, order, back) * weights.gather(-1, chosen[:, None])
        rows_back: Tensor = found.unflatten(0, x.shape[:2])
        return rows_back


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {f"blocks.{i}.attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"blocks.{i}.attn.wo": RowwiseParallel()}
        plan |= {f"blocks.{i}.mlp.up": ColwiseParallel(), f"blocks.{i}.mlp.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for i in range(2):
        plan |= {f"blocks.{i}.attn_norm": SequenceParallel(), f"blocks.{i}.mlp_norm": SequenceParallel()}
        plan |= {f"blocks.{i}.attn": whole, f"blocks.{i}.mlp": whole}
        plan |= {f"blocks.{i}.attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"blocks.{i}.attn.wo": RowwiseParallel(output_layouts=Shard(1))}
        plan |= {
            f"blocks.{i}.mlp.up": ColwiseParallel(),
            f"blocks.{i}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(model, mesh, plan)


def mesh_of(*axes: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))


def tp(model: nn.Module) -> nn.Module:
    return tensor_parallel(model, mesh_of(("tp", dist.get_world_size())))


def sp(model: nn.Module) -> nn.Module:
    return sequence_parallel(model, mesh_of(("tp", dist.get_world_size())))


def tp_ddp(model: nn.Module) -> nn.Module:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    return DistributedDataParallel(tensor_parallel(model, mesh["tp"]), device_mesh=mesh["dp"])


def sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def tp_fsdp2(model: nn.Module) -> nn.Module:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    return sharded(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def sp_fsdp2(model: nn.Module) -> nn.Module:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    return sharded(sequence_parallel(model, mesh["tp"]), mesh["dp"])


def tp_hsdp(model: nn.Module) -> nn.Module:
    mesh = mesh_of(("replicate", 1), ("shard", 2), ("tp", 2))
    return sharded(tensor_parallel(model, mesh["tp"]), mesh["replicate", "shard"])


def experts(model: Any) -> nn.Module:
    for block in model.blocks:
        block.mlp = Experts()
    return model  # type: ignore[no-any-return]


CASES: dict[int, tuple[Callable[[nn.Module], nn.Module], ...]] = {
    2: (tp, sp, experts),
    4: (tp_ddp, tp_fsdp2, sp_fsdp2, tp_hsdp),
}


def make() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (3, 9), generator=generator)
    return tokens[:, :8], tokens[:, 1:]


def fit(model: nn.Module, read: Callable[[nn.Module, int], None] | None = None) -> list[Tensor]:
    """Train, and return everything that the recorder must not change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        logits = model(tokens)
        with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        losses.append(loss)
        if read is not None:
            read(model, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        losses.append(model(batch(STEPS)[0]))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [value for values in optimizer.state.values() for value in values.values()]
    return [*map(local, [*losses, *held, *state]), torch.get_rng_state()]


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def num_collectives() -> int:
    backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def counted(model: nn.Module) -> tuple[list[Tensor], int]:
    before = num_collectives()
    return fit(model), num_collectives() - before


def save_twins(folder: Path, without: tuple[list[Tensor], int], recorded: tuple[list[Tensor], int]) -> None:
    """Beside the run: whether two trainings have the same tensors, and how many collectives each had."""
    same = len(recorded[0]) == len(without[0]) and all(map(torch.equal, recorded[0], without[0]))
    twins = {"same": same, "num_collectives": (without[1], recorded[1])}
    torch.save(twins, folder.with_name(f"{folder.name}.twins{dist.get_rank()}"))


def train(case: Callable[[nn.Module], nn.Module], folder: Path, *, late: bool = False) -> None:
    """The same training without and with the recorder; what differed is saved beside the run.

    Args:
        case: what to make of the model.
        folder: where to record to.
        late: whether the model is made parallel when it is recorded already.
    """
    without = counted(case(make()))
    model = make() if late else case(make())
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES):
        model = case(model) if late else model
        recorded = counted(model)
    save_twins(folder, without, recorded)


def watch(
    model: nn.Module, names_of: Callable[[str, nn.Module], Iterable[str]]
) -> tuple[dict[Any, Tensor], Callable[[nn.Module, int], None]]:
    """Plain hooks on every module of a model in one process.

    Args:
        model: a plain model.
        names_of: the names of the arguments of a module, by its path.

    Returns:
        The values so far, by site, path, name and step, and what reads the parameters and gradients before the update
        of a step.
    """
    values: dict[Any, Tensor] = {}
    step = 0

    def keep(site: str, path: str, name: str, tensor: Tensor) -> None:
        values[site, path, name, step] = tensor.detach().clone()
        if tensor.requires_grad:
            key = (f"grad_{site}", path, name, step)
            tensor.register_hook(lambda gradient: values.update({key: gradient.detach().clone()}))

    for path, module in model.named_modules():

        def before(module: nn.Module, args: tuple[Tensor, ...], path: str = path) -> None:
            for name, tensor in zip(names_of(path, module), args, strict=True):
                keep("input", path, name, tensor)

        def after(_: nn.Module, args: Any, output: Tensor, path: str = path) -> None:
            keep("output", path, "", output)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def read(_: nn.Module, at: int) -> None:
        nonlocal step
        for key, parameter in model.named_parameters():
            path, name = key.rpartition(".")[::2]
            values["param", path, name, at] = parameter.detach().clone()
            values["grad", path, name, at] = parameter.grad.detach().clone()  # type: ignore[union-attr]
        step = at + 1

    return values, read


def plain_values() -> dict[Any, Tensor]:
    """What one process with a plain model has, seen by plain hooks: by site, path, name and step."""
    of_torch = dict.fromkeys(("Embedding", "LayerNorm", "Linear", "ReLU"), ("input",))
    names = {"Core": ("q", "k", "v"), "Net": ("tokens",), **of_torch}
    model = make()
    values, read = watch(model, lambda _, module: names.get(type(module).__name__, ("x",)))
    fit(model, read)
    return {key: value for key, value in values.items() if key[3] < STEPS}


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for case in CASES[dist.get_world_size()]:
        train(case, out / case.__name__)
    if dist.get_world_size() == 2:
        train(tp, out / "tp_late", late=True)
    if dist.get_rank() == 0:
        torch.save(plain_values(), out / "plain.pt")
    leave()


if __name__ == "__main__":
    main()
