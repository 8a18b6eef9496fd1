"""Trains a small model on an XLA device in one of the ways that people end a step, and says what it took.

    python -m tests.campaigns.xla.train STYLE WATCHED OUT.pt

WATCHED is how values are seen: `no` (not at all), `recorder` (what RECORDER=1 in the environment does), `attached`
(`recorder.attach`, with a flush in the middle of each step), or by plain hooks and plain reads: `cloned` (copied on the
device, fetched at the end), `gathered` (the same, fetched together in the middle of each step; in a STYLE without ends
of steps, at its beginning) and `fetched` (each to the host at once, which cuts the graph everywhere).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as loaders
from torch import Tensor, nn

import recorder

NUM_STEPS = 4
NUM_STEPS_WITHOUT_END = 2  # each makes the graph of the next ones larger
TWINS = ("cloned", "gathered", "fetched")
Key = tuple[int, str, str, str, int]
"""Step, module path, site, name, and the n-th with these."""


class Net(nn.Module):
    """A buffer that changes, a random mask, an activation in place, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.mix = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.up(x)))
        x = self.mix(self.drop(self.mix(x)))
        out: Tensor = self.down(x)
        return out


class Twin:
    """Plain hooks and plain reads: what a recording must agree with."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, fetches: bool) -> None:
        self.values: dict[Key, Tensor] = {}
        self.step = 0
        self._fetches = fetches
        self._counts: dict[tuple[int, str, str, str], int] = {}
        self._model = model
        self._names = {parameter: split(name) for name, parameter in model.named_parameters()}
        for path, module in model.named_modules():
            module.register_forward_hook(self._output(path), prepend=True)
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self._before())
            optimizer.register_step_post_hook(lambda *_: self._after(optimizer))

    def see(self, path: str, site: str, name: str, tensor: Tensor) -> None:
        value_key = (self.step, path, site, name)
        number = self._counts[value_key] = self._counts.get(value_key, -1) + 1
        self.values[*value_key, number] = (tensor.detach().cpu() if self._fetches else tensor.detach()).clone()

    def fetch(self) -> None:
        """Copy the values seen so far to the host, with one graph for all of them."""
        self.values |= to_host({key: value for key, value in self.values.items() if value.device.type == "xla"})

    def _output(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.see(path, "output", "", output)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.see(path, "grad_output", "", gradient))

        return hook

    def _before(self) -> None:
        for parameter, (path, name) in self._names.items():
            assert parameter.grad is not None
            self.see(path, "param", name, parameter)
            self.see(path, "grad", name, parameter.grad)
        for full_name, buffer in self._model.named_buffers():
            path, name = split(full_name)
            self.see(path, "buffer", name, buffer)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, (path, name) in self._names.items():
            for key, value in optimizer.state[parameter].items():
                self.see(path, "optim", f"{name}.{key}", value)


def to_host(lazy: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Copy values to the host with one graph for all of them."""
    return dict(zip(lazy, torch_xla._XLAC._xla_get_cpu_tensors(list(lazy.values())), strict=True))


def split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    return path, last


def counters() -> dict[str, int]:
    """Counters of the device so far: known and new graphs, compilations, executions."""
    xm.wait_device_ops()  # an execution is counted when it is over
    timed = {name: met.metric_data(name) for name in ("CompileTime", "ExecuteTime")}
    counted = {name: met.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile")}
    return counted | {name: data[0] if data else 0 for name, data in timed.items()}


def batches(num: int, num_rows: int = 6) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num_rows, 8, generator=generator) for _ in range(num))


def train(style: str, watched: str) -> dict[str, Any]:
    torch.manual_seed(0)
    torch_xla.manual_seed(0)
    device = torch_xla.device()
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    twin = Twin(model, optimizer, fetches=watched == "fetched") if watched in TWINS else None
    attached = recorder.attach(model, enabled=True, rules="site=* keep=tensor") if watched == "attached" else None
    num_slices = 2 if style == "accumulate" else 1
    num_rows = 2048 if style == "wide" else 6
    inputs: Any = (x.to(device) for x in batches(NUM_STEPS * num_slices, num_rows))
    if style == "loader":
        host = [(x,) for x in batches(NUM_STEPS)]
        inputs = (x for (x,) in loaders.MpDeviceLoader(host, device))
    losses = []
    for step in range(NUM_STEPS_WITHOUT_END if style == "never" else NUM_STEPS):
        if twin is not None:
            twin.step = step
            if watched == "gathered" and style == "never":
                twin.fetch()
        with torch_xla.step() if style == "step" else contextlib.nullcontext():
            for _ in range(num_slices):
                with torch.autocast("xla", dtype=torch.bfloat16, enabled=style == "autocast"):
                    loss = model(next(inputs)).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
                if style in ("item", "never"):
                    loss.item()
                if attached is not None:
                    attached.flush(30)
                if twin is not None and watched == "gathered" and style != "never":
                    twin.fetch()
            if style == "optimizer_step":
                xm.optimizer_step(optimizer, barrier=True)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if style == "mark_step":
            xm.mark_step()
        elif style not in ("optimizer_step", "loader", "step", "never"):
            torch_xla.sync()
    next(inputs, None)  # a loader ends the last step
    if twin is not None:
        twin.fetch()
    counted = counters()
    if attached is not None:
        attached.close()
    return {
        "counters": counted,
        "losses": [float(loss) for loss in losses],
        "state": to_host(model.state_dict()),
        "values": {} if twin is None else twin.values,
    }


def infer(watched: str) -> dict[str, Any]:
    """Run a program that never ends a step and only reads its outputs."""
    torch.manual_seed(0)
    model = Net().to(torch_xla.device()).eval()
    twin = Twin(model, None, fetches=False) if watched in TWINS else None
    answers = []
    with torch.no_grad():
        for step, x in enumerate(batches(NUM_STEPS)):
            if twin is not None:
                twin.fetch()
                twin.step = step
            answers.append(float(model(x.to("xla")).cpu().sum()))
    if twin is not None:
        twin.fetch()
    values = {} if twin is None else twin.values
    return {"counters": counters(), "values": values, "losses": answers, "state": {}}


def main(style: str, watched: str, out: str) -> None:
    if style == "eager":
        torch_xla.experimental.eager_mode(True)
    torch.save(infer(watched) if style == "infer" else train(style, watched), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
