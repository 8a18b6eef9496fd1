"""The reference: one process, no recorder, plain hooks and plain reads on the unsharded model with the whole batch.

    python -m tests.campaigns.roundtrip.reference OUT.pt --world-size 2 -- --layout ddp

What it writes, by key (`KEY`): the value, and the bound within which a run on several ranks must agree.

**The bound.** Both runs evaluate the same expressions; they differ in the order of sums alone (over the batch, over
ranks, in blocks of a matrix product), and so in rounding. A sum of n products, in whatever order, is the exact sum of
products whose factors were moved by at most gamma_n = n u / (1 - n u) each, u the unit roundoff (Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., section 3.1). So rounding is what happens when every module's inputs, every
gradient that enters a module's backward and every parameter gradient is moved by gamma_n, elementwise: n is the number
of terms of the longest sum there, the rows of the whole batch for a weight's gradient. An update rounds the parameter
itself twice. The reference trains again with values moved like that, in random directions, and the largest change that
this makes to a tensor is its bound: eps x length of the reductions x condition, the condition measured.
Actual errors have random signs and add up to about sqrt(n) u, so a worst case of n u leaves a factor of sqrt(n) for the
directions that `NUM_SAMPLES` samples miss. What no rounding reaches has bound 0: there the recorded bits must be equal.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import recorder
from tests.campaigns.roundtrip.programs import train
from tests.campaigns.roundtrip.programs.train import Energy, Net, Running

Key = tuple[str, str, str, int, int | None, int, int, str, str]
KEY = ("site", "module_path", "name", "step", "micro_step", "call", "repeat", "mode", "phase")
NUM_SAMPLES = 8
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def gamma(num_terms: int, dtype: torch.dtype) -> float:
    """How far each factor of a sum of products may be moved by rounding, relatively.

    In bfloat16 products are summed in float32 and rounded once; the two sides of a comparison each do that.
    """
    u = UNIT_ROUNDOFF[dtype]
    n = 2 if dtype == torch.bfloat16 else num_terms
    return n * u / (1 - n * u)


class Rounding:
    """Moves values as far as rounding may, in random directions."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, tensor: Tensor, num_terms: int) -> Tensor:
        signs = torch.randint(2, tensor.shape, generator=self._generator) * 2 - 1
        return tensor * (1 + gamma(num_terms, tensor.dtype) * signs.to(torch.float64)).to(torch.float64).to(
            torch.float32
        ).to(tensor.dtype)

    def moved(self, value: Any, num_terms: int) -> Any:
        """Move every floating tensor with dims in a nested value."""
        if isinstance(value, Tensor):
            return self(value, num_terms) if value.is_floating_point() and value.dim() else value
        if isinstance(value, dict):
            return {key: self.moved(item, num_terms) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.moved(item, num_terms) for item in value)
        return value


class Observer:
    """Plain hooks on every module, and plain reads around the update."""

    def __init__(self, net: Net, masters: Net, rounding: Rounding | None) -> None:
        self.values: dict[Key, Tensor] = {}
        self.lacking: set[Key] = set()
        """Values in which the last rank has no part."""
        self.is_last_absent = False
        self.step, self.micro_step, self.mode, self.phase = 0, 0, "train", "forward"
        self._parameters = [(*name.rpartition(".")[::2], parameter) for name, parameter in masters.named_parameters()]
        self._rounding = rounding
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._stack: list[tuple[nn.Module, int]] = []
        self._paths = {module: path for path, module in net.named_modules()}
        for module in self._paths:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after, prepend=True)

    def _put(self, site: str, path: str, name: str, tensor: Tensor, call: int, when: tuple[Any, ...]) -> None:
        step, micro_step, mode, phase = when
        repeat = 0
        while (key := (site, path, name, step, micro_step, call, repeat, mode, phase)) in self.values:
            repeat += 1
        assert repeat == 0 or site == "scalar", key
        self.values[key] = tensor.detach().clone()
        if self.is_last_absent:
            self.lacking.add(key)

    def _see(self, site: str, path: str, name: str, tensor: Tensor, call: int) -> None:
        when = self.step, self.micro_step, self.mode, self.phase
        self._put(site, path, name, tensor, call, when)
        if not tensor.requires_grad or self.phase == "recompute":
            return
        gradient_site = site if site == "tap" else f"grad_{site}"
        tensor.register_hook(lambda g: self._put(gradient_site, path, name, g, call, (*when[:3], "backward")))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted = (module, self.step, self.micro_step, self.mode, self.phase)
        call = self._calls[counted]
        self._calls[counted] += 1
        self._stack.append((module, call))
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        for name, tensor in leaves(dict(bound.arguments)):
            self._see("input", self._paths[module], name, tensor, call)
        if self._rounding is None:
            return None
        num_terms = longest_sum([tensor for _, tensor in leaves([args, kwargs])], module)
        return self._rounding.moved(args, num_terms), self._rounding.moved(kwargs, num_terms)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        assert self._stack[-1][0] is module
        _, call = self._stack.pop()
        rounding = self._rounding
        for name, tensor in leaves(output):
            self._see("output", self._paths[module], name, tensor, call)
            if rounding is not None and tensor.requires_grad and tensor.dim() and self.phase == "forward":
                num_terms = longest_sum([tensor], module)
                tensor.register_hook(lambda g, num_terms=num_terms: rounding(g, num_terms))

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        module, call = self._stack[-1]
        self._see("tap", self._paths[module], name, tensor, call)
        return tensor

    def scalar(self, name: str, value: Tensor) -> None:
        self._put("scalar", "", name, value, 0, (self.step, None, "train", "forward"))

    def before_update(self, optimizer: torch.optim.Optimizer, running: Running) -> None:
        when = self.step, None, "train", "optimizer"
        self.scalar("lr.AdamW.0", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))
        for path, name, parameter in self._parameters:
            self._put("param", path, name, parameter, 0, when)
            assert parameter.grad is not None
            self._put("grad", path, name, parameter.grad, 0, when)
        for name, buffer in running.named_buffers():
            self._put("buffer", "running", name, buffer, 0, when)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        for path, name, parameter in self._parameters:
            for key, value in optimizer.state[parameter].items():
                self._put("optim", path, f"{name}.{key}", value, 0, (self.step, None, "train", "optimizer"))


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a nested value, each with its path inside."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))


def longest_sum(tensors: list[Tensor], module: nn.Module) -> int:
    """Terms of the longest sum in a module's forward and backward: a row, or all rows; of a mean all elements."""
    with_dims = [tensor for tensor in tensors if tensor.dim()]
    if isinstance(module, Energy):
        return max((tensor.numel() for tensor in with_dims), default=1)
    return max((max(t.shape[-1], t.numel() // max(t.shape[-1], 1)) for t in with_dims), default=1)


class MeanOfShares(Energy):
    """The mean of the 0-dim values of several ranks, which is not the value of the complete batch."""

    def __init__(self, sizes: list[int], *, is_called_without_batch: bool) -> None:
        super().__init__()
        self._sizes = sizes
        self._without_last = sizes[:-1] + [0] * is_called_without_batch

    def forward(self, x: Tensor) -> Tensor:
        # A rank that is not called has no value; one with an empty batch has the mean of nothing, which is NaN.
        pieces = x.split(self._sizes if len(x) == sum(self._sizes) else self._without_last)
        return torch.stack([piece.square().mean() for piece in pieces]).mean()


class FirstRank(Running):
    """The buffers of the first rank, which DDP broadcasts to all ranks."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples

    def forward(self, x: Tensor) -> None:
        super().forward(x[: self._num_samples])


class Reference:
    def __init__(self, options: argparse.Namespace, world_size: int, rounding: Rounding | None) -> None:
        self._options = options
        self._rounding = rounding
        self._sizes = train.shares(world_size, options)
        torch.manual_seed(7)
        self._masters = Net()
        train.deaden(self._masters, options)
        self._masters.running = FirstRank(self._sizes[0])
        if options.ragged:
            self._masters.energy = MeanOfShares(self._sizes, is_called_without_batch=options.layout != "ddp")
        self._net = copy.deepcopy(self._masters) if options.mixed else self._masters
        for parameter in self._net.parameters() if options.mixed else ():
            parameter.data = parameter.data.bfloat16()
        self.observer = Observer(self._net, self._masters, rounding)
        if options.checkpoint:
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            for i, block in enumerate(self._net.blocks):
                self._net.blocks[i] = checkpoint_wrapper(block)
        self._optimizer = train.make_optimizer(self._masters)

    def train(self) -> Observer:
        recorder.tap = self.observer.tap
        for step in range(self._options.steps):
            is_short = self._options.ragged and self._options.layout == "ddp" and step == self._options.steps - 1
            self._step(step, self._sizes[:-1] if is_short else self._sizes)
        return self.observer

    def _step(self, step: int, sizes: list[int]) -> None:
        observer, masters, net = self.observer, self._masters, self._net
        num_slices = 2 if self._options.accumulate else 1
        observer.step, observer.mode, observer.is_last_absent = step, "train", len(sizes) < len(self._sizes)
        for observer.micro_step in range(num_slices):
            losses = self._losses(step, observer.micro_step, sizes)
            # The loss of data parallelism: the mean of each rank's mean; a rank without a batch adds nothing.
            observer.phase = "recompute"
            (torch.stack(losses).sum() / len(self._sizes) / num_slices).backward()
            observer.phase = "forward"
            observer.scalar("loss", torch.stack(losses).mean())
            if self._options.mixed:
                for master, computed in zip(masters.parameters(), net.parameters(), strict=True):
                    assert computed.grad is not None
                    gradient = computed.grad.float()
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    computed.grad = None
        if self._rounding is not None:
            for parameter in masters.parameters():
                assert parameter.grad is not None
                parameter.grad = self._rounding(parameter.grad, num_slices * len(self._sizes))
        observer.before_update(self._optimizer, net.running)
        self._optimizer.step()
        observer.after_update(self._optimizer)
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, computed in zip(masters.parameters(), net.parameters(), strict=True):
                if self._rounding is not None:
                    master.copy_(self._rounding(master, 2))
                if self._options.mixed:
                    computed.copy_(master)
        self._evaluate(step, sizes)

    def _losses(self, step: int, slice_: int, sizes: list[int]) -> list[Tensor]:
        """Each rank's loss, from one forward of the complete batch."""
        batch, target = train.make_batch(step, slice_, sum(self._sizes))
        output = self._forward(train.take(train.spoil(batch, step, self._options), 0, sum(sizes)))
        if self._rounding is not None:  # the loss is a sum too
            output = self._rounding.moved(output, sum(sizes) * train.LENGTH)
        losses, start = [], 0
        for size in sizes:
            part = slice(start, start + size)
            piece = {"prediction": output["prediction"][part], "logits": output["logits"][part]}
            piece["energy"] = output["energy"]
            loss = train.loss_of(piece, batch["tokens"][part], target[part], with_energy=not self._options.ragged)
            losses.append(loss)
            start += size
        return losses

    def _evaluate(self, step: int, sizes: list[int]) -> None:
        observer = self.observer
        observer.mode, observer.micro_step = "no_grad", 0
        self._net.eval()
        num_present = [sum(sizes), sum(self._sizes[:-1])] if self._options.ragged else [sum(sizes)]
        with torch.no_grad():
            for slice_, num_samples in enumerate(num_present):
                observer.is_last_absent = num_samples < sum(self._sizes) and self._options.layout == "ddp"
                batch, _ = train.make_batch(step, slice_, sum(self._sizes), is_training=False)
                self._forward(train.take(batch, 0, num_samples))
        self._net.train()

    def _forward(self, batch: dict[str, Tensor]) -> Any:
        index, fixed = train.constants()
        if self._options.mixed:
            batch = {**batch, "features": batch["features"].bfloat16()}
            fixed = {**fixed, "scale": fixed["scale"].bfloat16()}
        return self._net(batch, index, **fixed)


def largest_change(moved: Tensor, value: Tensor) -> float:
    if moved.numel() == 0 or not moved.is_floating_point():
        return 0.0
    return float((moved.double() - value.double()).abs().nan_to_num(0).max())


def observe(options: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """The values by key, the bounds that sampling finds, and the keys of values without a part of the last rank."""
    seen = Reference(options, world_size, None).train()
    values = seen.values
    bounds = dict.fromkeys(values, 0.0)
    for seed in range(NUM_SAMPLES):
        for key, moved in Reference(options, world_size, Rounding(seed)).train().values.items():
            bounds[key] = max(bounds[key], largest_change(moved, values[key]))
    return {"values": values, "bounds": bounds, "lacking": seen.lacking}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--world-size", type=int, required=True)
    ours, theirs = sys.argv[1:], []
    if "--" in ours:
        ours, theirs = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    asked = parser.parse_args(ours)
    torch.save(observe(train.arguments(theirs), asked.world_size), asked.out)


if __name__ == "__main__":
    main()
