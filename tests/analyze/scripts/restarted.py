"""Trains a small model in several cases. The second attempt restores all, or all but what the name of the case says.

With `AGAIN` set to 0 or 1, the attempts are runs of their own. In a case `end_...`, the checkpoint is that of the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import recorder

STEPS, CHECKPOINT, END = 40, 20, 30


def train(case: str, attempt: int) -> None:
    torch.manual_seed(attempt if case == "end_other" else 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if case == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    batches = torch.Generator().manual_seed(1)
    first = 0
    if attempt and case != "scratch":
        known = torch.load(f"{case}.pt")
        first = known["step"]
        if case == "rounded":
            known["model"] = {name: one.bfloat16().float() for name, one in known["model"].items()}
        if case in ("partial", "end_partial"):
            known["model"] = {name.replace("3.", "head."): one for name, one in known["model"].items()}
        if case == "last":
            known["model"] = {name: one for name, one in known["model"].items() if name.startswith("3.")}
        if case not in ("model", "end_other"):
            model.load_state_dict(known["model"], strict=False)
        if case != "state":
            optimizer.load_state_dict(known["optimizer"])
        if case != "scheduler":
            schedule.load_state_dict(known["schedule"])
        if case in ("schedule", "end_schedule"):
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            optimizer.param_groups[0]["lr"] = 1e-2
        if case != "batches":
            batches.set_state(known["batches"])
    with recorder.attach(model, enabled=True, dir=Path(case)):
        for step in range(first, STEPS if attempt else END):
            inputs = torch.randn(32, 8, generator=batches)
            if case == "nan" and step == 25 and not attempt:
                inputs[0, 0] = torch.nan
            if case == "end_frozen" and step == 15:
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
            optimizer.step()
            schedule.step()
            if step + 1 == (END if case.startswith("end") else CHECKPOINT):
                states: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
                saved = {name: one.state_dict() for name, one in states.items()}
                torch.save({**saved, "batches": batches.get_state(), "step": step + 1}, f"{case}.pt")


if __name__ == "__main__":
    attempt = int(os.environ.get("AGAIN") or os.environ["TORCHELASTIC_RESTART_COUNT"])
    for case in sys.argv[1:]:
        train(case, attempt)
    sys.exit(0 if attempt else 3)
