"""Pipeline parallel training on two ranks with one silent error, or none; and the same in one process.

    torchrun --nproc-per-node 2 inject_pipeline.py FOLDER

records each of `ERRORS` and the sound training into ``FOLDER/NAME``. Without torchrun one process trains, with the
whole batch, into ``FOLDER/one``, and its twin for the noise into ``FOLDER/twin``. Wrong is the second stage, on rank 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import recorder
from tests.rigs.trainings import record_as_launched

ERRORS = (
    "rate", "stale", "momentum", "lost_micro_batch", "scaled_micro_batch", "loss_scale", "transposed", "handed_back",
    "dropout_seed", "norm_eps",
)  # fmt: skip
STEPS, MICRO_BATCHES, ROWS, IN, DIM, OUT, LAYERS = 3, 4, 2, 4, 8, 3, 4
BROKEN_STEP, BROKEN_MICRO_BATCH = 1, 2
RULES = "site=* keep=tensor,stats,fingerprint"


class Drop(nn.Module):
    """Dropout whose mask depends on the step and on the index in the batch, so that one process can make it too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.num_rows = seed, 0

    def forward(self, x: Tensor) -> Tensor:
        step, start = divmod(self.num_rows, MICRO_BATCHES * ROWS)
        self.num_rows += len(x)
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        mask = (torch.rand((MICRO_BATCHES * ROWS, DIM), generator=generator) < 0.9) / 0.9
        return x * mask[start : start + len(x)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A model whose forward skips the parts that were taken away."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Linear(IN, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.drop: nn.Module | None = Drop(seed)
        self.head: nn.Module | None = nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.drop is None else self.head(self.drop(x))


def make(what: str) -> Net:
    torch.manual_seed(3)
    return Net(seed=1 if what == "dropout_seed" else 0)


def stage_of(model: Net, stage: int) -> Net:
    for name in list(model.layers):
        if int(name) // (LAYERS // 2) != stage:
            del model.layers[name]
    if stage:
        model.embed = None
    else:
        model.drop = model.head = None
    return model


class Loss:
    """The mean over a micro-batch; with an error, the mean of one micro-batch is multiplied by a factor."""

    def __init__(self, what: str) -> None:
        self.factor = {"lost_micro_batch": 0.0, "scaled_micro_batch": 2.0}.get(what, 1.0)
        self.num_calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        is_wrong = divmod(self.num_calls, MICRO_BATCHES) == (BROKEN_STEP, BROKEN_MICRO_BATCH)
        self.num_calls += 1
        return nn.functional.mse_loss(output, target) * (self.factor if is_wrong else 1.0)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = MICRO_BATCHES * ROWS
    return torch.randn(rows, IN, generator=generator), torch.randn(rows, OUT, generator=generator)


def shapes(rank: int) -> dict[str, Any]:
    """The shapes between stages, given so that no stage runs once more to learn them: dropout counts its calls."""
    between = torch.zeros(ROWS, DIM, requires_grad=True)
    last = torch.zeros(ROWS, OUT, requires_grad=True)
    return {"input_args": between if rank else torch.zeros(ROWS, IN), "output_args": last if rank else between}


def break_stage(stage: Any, model: Net, what: str) -> None:
    """Errors in what stages hand to each other, or in the second stage's own code."""
    if what == "transposed":
        retrieve = stage._retrieve_recv_activations
        stage._retrieve_recv_activations = lambda chunk: tuple(
            one.detach().reshape(DIM, ROWS).t().contiguous().requires_grad_() for one in retrieve(chunk)
        )
    elif what == "handed_back":
        retrieve_back = stage._retrieve_recv_grads
        stage._retrieve_recv_grads = lambda chunk: tuple(-one for one in retrieve_back(chunk))
    elif what == "norm_eps" and dist.get_rank() == 1:
        model.layers["3"].norm.eps = 0.1  # type: ignore[union-attr]


def run(folder: Path, what: str) -> None:
    rank = dist.get_rank()
    model = stage_of(make(what), rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), **shapes(rank))
    if what != "handed_back" or rank == 0:
        break_stage(stage, model, what if what != "transposed" or rank == 1 else "sound")
    is_wrong = rank == 1
    rate = 0.11 if what == "rate" and is_wrong else 0.1
    momentum = 0.8 if what == "momentum" and is_wrong else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=Loss(what), scale_grads=what != "loss_scale")
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES):
        for step in range(STEPS):
            x, target = batch(step)
            schedule.step(*(() if rank else (x,)), target=target if rank else None)
            if what != "stale" or not is_wrong or step != BROKEN_STEP:
                optimizer.step()
            else:  # attempted, with nothing to do
                kept = [parameter.detach().clone() for parameter in model.parameters()]
                optimizer.step()
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), kept, strict=True):
                        parameter.copy_(value)
            optimizer.zero_grad()


def one_process(folder: Path, jitter: int) -> None:
    model = make("sound")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES, jitter=jitter):
        for step in range(STEPS):
            x, target = batch(step)
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    record_as_launched(Path(sys.argv[1]), ("sound", *ERRORS), run, one_process)
