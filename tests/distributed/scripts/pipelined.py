"""Pipeline parallel training under several schedules, each case twice and beside a plain model.

All stages have the paths that their modules have in the whole model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.utils.checkpoint import checkpoint

import recorder
from tests.rigs.leaving import leave
from tests.rigs.parallel import num_collectives, save_twins

STEPS, MICRO_BATCHES, ROWS = 2, 4, 2
IN, DIM, OUT, LAYERS = 4, 8, 3, 4
RULES = "site=* micro_step=0 keep=tensor,stats,fingerprint"
"""A micro-step of a pipeline has a part of the batch, so this rule keeps all of them."""
CPU = torch.device("cpu")
Trained = tuple[list[nn.Module], Any]
"""The modules of this rank's stages, and their schedule."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.linear, x, use_reentrant=False)  # type: ignore[no-any-return]
        return x + self.linear(x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Whatever of it is taken away is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Linear(IN, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def cut(stage: int, num_stages: int) -> Net:
    model, per_stage = make(), LAYERS // num_stages
    for name in list(model.layers):
        if int(name) // per_stage != stage:
            del model.layers[name]
    if stage:
        model.embed = None
    if stage < num_stages - 1:
        model.head = None
    return model


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def one_forward_one_backward() -> Trained:
    module = cut(dist.get_rank(), 2)
    return [module], Schedule1F1B(PipelineStage(module, dist.get_rank(), 2, CPU), MICRO_BATCHES, loss_fn=loss_of)


def checkpointed() -> Trained:
    (module,), schedule = one_forward_one_backward()
    for layer in module.layers.values():  # type: ignore[operator]
        layer.checkpointed = True
    return [module], schedule


def gpipe() -> Trained:
    """Shapes are given, so that no stage runs only to learn them."""
    rank = dist.get_rank()
    module, between = cut(rank, 2), torch.zeros(ROWS, DIM, requires_grad=True)
    shapes: dict[str, Any] = {"input_args": between if rank else torch.zeros(ROWS, IN)}
    shapes |= {"output_args": torch.zeros(ROWS, OUT, requires_grad=True) if rank else between}
    return [module], ScheduleGPipe(PipelineStage(module, rank, 2, CPU, **shapes), MICRO_BATCHES, loss_fn=loss_of)


def of_two_stages(schedule: Any, *numbers: int) -> Trained:
    modules: list[nn.Module] = [cut(stage, 4) for stage in numbers]
    stages = [PipelineStage(module, stage, 4, CPU) for module, stage in zip(modules, numbers, strict=True)]
    return modules, schedule(stages, MICRO_BATCHES, loss_fn=loss_of)


def interleaved() -> Trained:
    return of_two_stages(ScheduleInterleaved1F1B, dist.get_rank(), dist.get_rank() + 2)


def looped() -> Trained:
    return of_two_stages(ScheduleLoopedBFS, dist.get_rank(), dist.get_rank() + 2)


def zero_bubble() -> Trained:
    """The backward goes twice through a stage: for its inputs, and later for its weights."""
    return of_two_stages(ScheduleInterleavedZeroBubble, dist.get_rank(), dist.get_rank() + 2)


def zero_bubble_v() -> Trained:
    """The first stage and the last one are on one rank."""
    return of_two_stages(ScheduleZBVZeroBubble, dist.get_rank(), 3 - dist.get_rank())


def dual_pipe_v() -> Trained:
    return of_two_stages(ScheduleDualPipeV, dist.get_rank(), 3 - dist.get_rank())


def accumulated() -> Trained:
    """The micro-batches of a step go through in two turns of the schedule."""
    module, rank = cut(dist.get_rank(), 2), dist.get_rank()
    stage = PipelineStage(module, rank, 2, CPU)
    return [module], Schedule1F1B(stage, MICRO_BATCHES // 2, loss_fn=loss_of, scale_grads=False)


def split() -> Trained:
    """Torch cuts the model itself, after it has traced it."""
    where = {"layers.2": SplitPoint.BEGINNING}
    whole = pipeline(make(), mb_args=(torch.zeros(ROWS, IN),), split_spec=where)
    stage = whole.build_stage(dist.get_rank(), CPU)
    return [stage.submod], Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)


CASES = (
    one_forward_one_backward, checkpointed, gpipe, interleaved, looped, zero_bubble, zero_bubble_v, dual_pipe_v,
    accumulated, split,
)  # fmt: skip


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = MICRO_BATCHES * ROWS
    return torch.randn(rows, IN, generator=generator), torch.randn(rows, OUT, generator=generator)


def fit(modules: list[nn.Module], schedule: Any) -> tuple[list[Tensor], int]:
    """Train, and return everything that the recorder must not change, and how many collectives there were."""
    before = num_collectives()
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.01)
    losses: list[Tensor] = []
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    num_turns = MICRO_BATCHES // schedule._n_microbatches
    for step in range(STEPS):
        for x, target in zip(*(tensor.chunk(num_turns) for tensor in batch(step)), strict=True):
            given = (x,) if is_first else ()
            schedule.step(*given, target=target if is_last else None, losses=losses if is_last else None)
        for parameter in (p for module in modules for p in module.parameters() if num_turns > 1):
            assert parameter.grad is not None
            parameter.grad /= MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
    kept = [p.detach().clone() for module in modules for p in module.parameters()]
    return [*kept, *(loss.detach() for loss in losses), torch.get_rng_state()], num_collectives() - before


def train(case: Callable[[], Trained], folder: Path) -> None:
    without = fit(*case())
    modules, schedule = case()
    with contextlib.ExitStack() as attached:
        for module in modules:
            attached.enter_context(recorder.attach(module, enabled=True, dir=folder, rules=RULES))
        recorded = fit(modules, schedule)
    save_twins(folder, without, recorded)


def plain_values() -> dict[Any, Tensor]:
    """What one process has: by site, path, step and micro-batch, which is None for parameters and their gradients."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values: dict[Any, Tensor] = {}
    now = (0, 0)

    def keep(site: str, path: str, tensor: Tensor) -> None:
        values[(site, path, *now)] = tensor.detach().clone()
        if tensor.requires_grad:
            key = (f"grad_{site}", path, *now)
            tensor.register_hook(lambda gradient: values.update({key: gradient.detach().clone()}))

    for path, module in model.named_modules():
        if path not in ("", "layers"):
            module.register_forward_pre_hook(lambda _, args, path=path: keep("input", path, args[0]))
            module.register_forward_hook(lambda _, args, output, path=path: keep("output", path, output))
    for step in range(STEPS):
        x, target = batch(step)
        for i in range(MICRO_BATCHES):
            now = (step, i)
            loss_of(model(x[ROWS * i : ROWS * (i + 1)]), target[ROWS * i : ROWS * (i + 1)]).backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad /= MICRO_BATCHES
            values["param", key, step, None] = parameter.detach().clone()
            values["grad", key, step, None] = parameter.grad.clone()
        optimizer.step()
        for key, parameter in model.named_parameters():
            for name, value in optimizer.state[parameter].items():
                values["optim", f"{key}.{name}", step, None] = value.detach().clone()
        optimizer.zero_grad()
    return values


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for case in CASES:
        train(case, out / case.__name__)
    if dist.get_rank() == 0:
        torch.save(plain_values(), out / "plain.pt")
    leave()


if __name__ == "__main__":
    main()
