"""One small training, written as each framework would have it; none of them knows of a recorder.

Three steps of two slices of the batch, on two ranks. Each rank saves its final parameters, in ``out`` where it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.rigs.kernels import vision  # so that frameworks can import a torchvision that was built for another torch
from tests.rigs.leaving import leave

NUM_STEPS = 3
NUM_SLICES = 2


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def slices(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS * NUM_SLICES):
        yield torch.randn(2, 4, generator=generator)


def save(model: nn.Module, rank: int) -> None:
    Path("out").mkdir(exist_ok=True)
    torch.save([p.detach().clone() for p in model.parameters()], f"out/rank{rank}.pt")


def train(rank: int) -> None:
    """By hand, under DDP; the process group is there."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model)
    for i, x in enumerate(slices(rank)):
        wrapped(x).square().mean().backward()
        if i % NUM_SLICES == NUM_SLICES - 1:
            optimizer.step()
            optimizer.zero_grad()
    save(model, rank)
    leave()


def launched() -> None:
    """By torchrun, or whoever sets its variables."""
    torch.distributed.init_process_group("gloo")
    train(torch.distributed.get_rank())


def by_slurm() -> None:
    """By srun, as programs do that know Slurm: their ranks come from its variables."""
    meet = f"tcp://{os.environ['HEAD']}:29511"
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    train(rank)


def by_mpi() -> None:
    """By mpirun, as programs do that know Open MPI."""
    rank, world_size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    meet = f"tcp://{os.environ['HEAD']}:29512"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    train(rank)


def spawned() -> None:
    torch.multiprocessing.spawn(_spawned, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]


def _spawned(rank: int) -> None:
    meet = f"file://{Path('meet').absolute()}"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    train(rank)


def accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_SLICES)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for x in slices(accelerator.process_index):
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    save(model, accelerator.process_index)
    leave()


class Slices(torch.utils.data.Dataset[Tensor]):
    """Both ranks' examples, in turn."""

    def __init__(self) -> None:
        self.all = [x for pair in zip(slices(0), slices(1), strict=True) for x in pair]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> Tensor:
        return self.all[index]


def lightning() -> None:
    vision()
    from lightning import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]  # no types are looked at
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.model(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: Tensor, _: int) -> None:
            """Have Lightning validate first, after which the training flag of its DDP stays False."""

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 2, "strategy": "ddp", "accumulate_grad_batches": NUM_SLICES},
        **{"max_steps": NUM_STEPS, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    )
    module = Module()
    loader = torch.utils.data.DataLoader(Slices(), shuffle=False)
    trainer.fit(module, loader, loader)
    save(module, trainer.global_rank)
    leave()


def hugging_face() -> None:
    vision()
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):  # type: ignore[misc]  # no types are looked at
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = make_model()
            self.post_init()

        def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"loss": self.model(x).square().mean()}

    arguments = TrainingArguments(
        **{"output_dir": "trainer", "use_cpu": True, "max_steps": NUM_STEPS, "per_device_train_batch_size": 1},
        **{"gradient_accumulation_steps": NUM_SLICES, "report_to": [], "save_strategy": "no", "seed": 7},
    )
    model = Model(PreTrainedConfig())
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"x": x[0]} for x in Slices().all])
    trainer.train()
    save(model, arguments.process_index)
    leave()


def ray() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    folder = Path.cwd()

    def loop() -> None:
        os.chdir(folder)
        rank = torch.distributed.get_rank()
        model = prepare_model(make_model())
        optimizer = torch.optim.AdamW(model.parameters())
        for i, x in enumerate(slices(rank)):
            model(x).square().mean().backward()
            if i % NUM_SLICES == NUM_SLICES - 1:
                optimizer.step()
                optimizer.zero_grad()
        save(model, rank)

    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=str(folder))
    ).fit()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
