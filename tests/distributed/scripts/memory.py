"""Whether recording keeps graphs alive, and what it does to the memory of a long run. Prints one JSON object."""

from __future__ import annotations

import json
import os
import threading
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import recorder

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Doubled(torch.autograd.Function):
    contexts: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubled.contexts.append(weakref.ref(ctx))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = recorder.tap("doubled", Doubled.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return self.second(hidden.relu_())  # type: ignore[no-any-return]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def num_alive() -> int:
    alive = sum(reference() is not None for reference in Doubled.contexts)
    Doubled.contexts.clear()
    return alive


def main() -> None:
    from recorder.capture.staging import measure

    gate, real = threading.Event(), measure.measure

    def stalled(*args: Any) -> Any:
        gate.wait()
        return real(*args)

    measure.measure = stalled  # type: ignore[assignment]
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    num_contexts, alive_after_steps = len(Doubled.contexts), num_alive()
    loss = model(torch.randn(8, 16)).square().mean()
    alive_with_a_graph = num_alive()
    del loss
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 16))
    model.train()
    alive_after_evaluation = num_alive()
    gate.set()

    resident = []
    for i in range(2600):
        step()
        if i % 50 == 49:
            Doubled.contexts.clear()
            assert recorder._active.flush(60), "what waits for a slow disk is no leak"
            resident.append(resident_bytes())
    print(
        json.dumps(
            {
                "num_contexts": num_contexts,
                "alive_after_steps": alive_after_steps,
                "alive_with_a_graph": alive_with_a_graph,
                "alive_after_evaluation": alive_after_evaluation,
                "resident_bytes": resident,
            }
        )
    )


if __name__ == "__main__":
    main()
