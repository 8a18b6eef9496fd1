"""A training by two optimizers in evaluation mode: a critic is updated twice for each update of a generator.

It saves a checkpoint after each two updates of the generator, and goes on from it where there is one. The first
argument names what it does wrong then, or ``sound``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR


def main() -> None:
    fault = sys.argv[1]
    path = Path("checkpoint.pt")
    torch.manual_seed(0)
    critic, generator = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).eval().requires_grad_() for _ in range(2)
    )
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.SGD(generator.parameters(), 0.1, momentum=0.9)
    schedule = SequentialLR(second, [LinearLR(second, 0.1, 1.0, 2), ExponentialLR(second, 0.9)], [2])
    stateful: dict[str, Any] = {
        "critic": critic,
        "generator": generator,
        "first": first,
        "second": second,
        "schedule": schedule,
    }
    step = num_read = 0
    scale = 1.0
    if path.exists():
        saved = torch.load(path, weights_only=False)
        for name, one in stateful.items():
            one.load_state_dict(saved[name])
        step, num_read = saved["step"], saved["num_read"]
        num_read *= fault != "sampler"
        scale = 0.5 if fault == "gradients" else 1.0
        if fault == "lr":
            second.param_groups[0]["lr"] = 0.05
        if fault == "frozen":
            generator[0].requires_grad_(False)
        if fault == "mode":
            critic.train()
    while step < 20:
        for optimizer, model in ((first, critic), (first, critic), (second, generator)):
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(num_read))
            num_read += 1
            loss = model(batch).square().mean() * (scale if model is generator else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        step += 1
        if step % 2 == 0:
            saved = {name: one.state_dict() for name, one in stateful.items()}
            torch.save({**saved, "step": step, "num_read": num_read}, path)


if __name__ == "__main__":
    main()
