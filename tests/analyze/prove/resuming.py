"""A training on all ranks that saves a checkpoint after each four steps, and goes on from it where there is one.

The first argument names what the program fails to restore (``nothing`` of it: ``sound``); a second one is the only rank
that fails.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

NUM_SAMPLES, NUM_BATCHES_OF_STEP = 32, 2


class Sampler:
    """Batches of two samples in an order that the epoch decides; `cursor` counts the batches."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.data = torch.randn(NUM_SAMPLES, 4, generator=generator)
        self.rank = rank
        self.cursor = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            epoch, number = divmod(self.cursor, NUM_SAMPLES // 2)
            order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
            self.cursor += 1
            yield self.data[order[2 * number : 2 * number + 2]]


class Augmented(IterableDataset[torch.Tensor]):
    """The batches of a sampler with noise, which a worker process draws."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self._sampler:
            yield batch + 0.1 * torch.randn(batch.shape)


class Training:
    """All that a checkpoint has to hold, and the loop that needs it."""

    def __init__(self, rank: int) -> None:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(rank)
        self.path = Path(f"checkpoint-{rank}.pt")
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.means = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.noise = torch.Generator().manual_seed(rank)
        self.sampler = Sampler(rank)
        self.critic = nn.Linear(2, 1)
        self.second = torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9)
        self.stateful: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler,
            "average": self.average, "critic": self.critic, "second": self.second,
        }  # fmt: skip

    def save(self) -> None:
        saved = {name: one.state_dict() for name, one in self.stateful.items()}
        saved |= {"cursor": self.sampler.cursor, "noise": self.noise.get_state(), "cpu": torch.get_rng_state()}
        saved |= {"numpy": np.random.get_state(), "python": random.getstate(), "means": self.means}
        torch.save(saved, self.path)

    def load(self, fault: str) -> None:
        saved = torch.load(self.path, weights_only=False)
        states = saved["optimizer"]["state"].values()
        if fault == "moments":
            for state in states:
                state["exp_avg"].zero_()
        elif fault == "bfloat16":
            for state in states:
                state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()
        elif fault == "steps":
            for state in states:
                state["step"].zero_()
        elif fault == "weight":
            saved["model"]["3.weight"] = self.model.get_parameter("3.weight").detach().clone()
        elif fault == "statistics":
            for name in ("running_mean", "running_var"):
                saved["model"][f"1.{name}"] = self.model.get_buffer(f"1.{name}").clone()
        elif fault == "lr":
            saved["optimizer"]["param_groups"][0]["lr"] = 1e-2
        elif fault == "settings":
            saved["optimizer"]["param_groups"][0]["weight_decay"] = 0.5
        elif fault == "count":
            saved["average"]["n_averaged"].zero_()
        elif fault == "stale":
            saved["model"] = torch.load(f"{self.path}.earlier", weights_only=False)
        for name, one in self.stateful.items():
            if fault != name and fault != "everything":
                one.load_state_dict(saved[name])
        if fault == "everything":
            return
        self.sampler.cursor = {"sampler": 0, "skips": saved["cursor"] + 2}.get(fault, saved["cursor"])
        if fault != "means":
            self.means = saved["means"]
        if fault != "noise":
            self.noise.set_state(saved["noise"])
        if fault != "cpu":
            torch.set_rng_state(saved["cpu"])
        if fault != "numpy":
            np.random.set_state(saved["numpy"])
        if fault != "python":
            random.setstate(saved["python"])

    def batches(self, *, has_worker: bool) -> Iterator[torch.Tensor]:
        if not has_worker:
            yield from self.sampler
        loader = DataLoader(Augmented(self.sampler), batch_size=None, num_workers=1, generator=torch.Generator())
        for batch in loader:
            self.sampler.cursor += 1  # that of the worker is a copy
            yield batch

    def run(self, num_steps: int, *, saves_in_between: bool, has_worker: bool) -> None:
        step = self.schedule.last_epoch
        for batch in self.batches(has_worker=has_worker):
            is_last = self.sampler.cursor % NUM_BATCHES_OF_STEP == 0
            drawn = 1 + float(np.random.normal(0, 0.01)) + random.gauss(0, 0.01)
            fresh = torch.Generator().manual_seed(step)
            mask = (torch.rand(2, 2, generator=self.noise) + torch.rand(2, generator=fresh) > 0.1) * drawn
            out = self.wrapped(batch)
            self.scaler.scale((out * mask).square().mean()).backward()
            if not is_last:
                if saves_in_between and step == 4:
                    self.save()
                continue
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.critic(out.detach()).square().mean().backward()
            self.second.step()
            self.second.zero_grad()
            self.schedule.step()
            self.average.update_parameters(self.model)
            for name, weight in self.model.named_parameters():
                self.means[name].lerp_(weight.detach(), 0.1)
            step += 1
            if step % 4 == 3:
                torch.save(self.model.state_dict(), f"{self.path}.earlier")
            if step % 4 == 0 and not saves_in_between:
                self.save()
            if step == num_steps:
                return


def main() -> None:
    fault, *only = sys.argv[1:] or ["sound"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(rank)
    if training.path.exists():
        training.load("sound" if only and int(only[0]) != rank else fault)
    training.run(40, saves_in_between=fault == "accumulation", has_worker=fault == "workers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
