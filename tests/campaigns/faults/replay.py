"""What `training.py` computes, computed again in one process by plain hooks; it never looks at a recording.

Several ranks are several models in turn: DDP of two ranks adds halves of gradients, which is exact in any order.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recorder.format.codec import decode
from recorder.format.fingerprint import fingerprint, to_text

from .training import batch, make

Array = npt.NDArray[Any]
Key = tuple[str, str, str]
"""Site, module path, name."""
_EXACT = ("min", "max", "absmax", "nan_count", "inf_count", "zero_count")


class Expected(NamedTuple):
    """What a row must say of a value."""

    kind: tuple[str, str, int]
    """Element type, shape and bytes."""
    content: bytes
    fingerprint: str | None
    statistics: dict[str, tuple[float, float]]
    """By name, with how far off they may be: sums may be added up in another order."""


class Replay:
    """The values of every rank at every step, as far as somebody has asked."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._steps: list[list[dict[Key, Array]]] = []
        self._expected: dict[tuple[int, int, Key], Expected] = {}
        self._pairs = [make(rank) for rank in range(world_size)]
        self._seen: list[dict[Key, Array]] = []
        for rank, (net, _) in enumerate(self._pairs):
            for path, module in net.named_modules():
                if type(module).forward is not nn.Module.forward:
                    module.register_forward_pre_hook(partial(self._before, rank, path))
                    module.register_forward_hook(partial(self._after, rank, path))
        self._random_states = []
        for rank in range(world_size):
            make(rank)
            self._random_states.append(torch.get_rng_state())

    def at(self, rank: int, step: int) -> dict[Key, Array]:
        """What a rank had at a step."""
        while len(self._steps) <= step:
            self._advance()
        return self._steps[step][rank]

    def problem(self, row: dict[str, Any]) -> str:
        """Why a row is not what training had; empty where it is."""
        key = (row["site"], row["module_path"], row["name"])
        where = f"rank {row['rank']} step {row['step']} {key}"
        if row["call"] or row["repeat"] or row["mode"] != "train" or row["phase"] == "recompute":
            return f"{where}: call {row['call']}, repeat {row['repeat']}, {row['mode']}, {row['phase']}"
        value = self.at(row["rank"], row["step"]).get(key)
        if value is None:
            return f"{where}: training had no such value"
        expected = self._expected.get((row["rank"], row["step"], key))
        if expected is None:
            expected = self._expected[row["rank"], row["step"], key] = _expect(value, row["site"])
        if (row["dtype"], row["shape"], row["payload_bytes"]) != expected.kind or row["encoding"] is None:
            return f"{where}: is {row['dtype']} {row['shape']} as {row['encoding']}, expected {expected.kind}"
        if decode(row["encoding"], row["data"], row["payload_bytes"], value.itemsize).tobytes() != expected.content:
            return f"{where}: other bytes"
        if row["fingerprint"] != expected.fingerprint:
            return f"{where}: fingerprint {row['fingerprint']}, expected {expected.fingerprint}"
        for name, (number, slack) in expected.statistics.items():
            if row[name] is None or abs(row[name] - number) > slack:
                return f"{where}: {name} is {row[name]}, expected {number}"
        return ""

    def expected_keys(self, rank: int, step: int) -> set[Key]:
        """What the recorder is to have a row of."""
        return set(self.at(rank, step))

    def _advance(self) -> None:
        step = len(self._steps)
        self._seen = [{} for _ in range(self.world_size)]
        nets = [net for net, _ in self._pairs]
        running = nets[0].running.clone()
        for rank, net in enumerate(nets):
            net.running.copy_(running)  # DDP broadcasts the first rank's buffers before each forward
            torch.set_rng_state(self._random_states[rank])
            loss = net(batch(rank, step)).square().mean()
            self._see(rank, "scalar", "", "loss", loss)
            loss.backward()
            self._random_states[rank] = torch.get_rng_state()
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            gradients = [p.grad for p in parameters if p.grad is not None]
            mean = torch.stack([g / self.world_size for g in gradients]).sum(0)
            for p in parameters:
                p.grad = mean.clone()
        for rank, (net, optimizer) in enumerate(self._pairs):
            for group_number, group in enumerate(optimizer.param_groups):
                lr = np.float64(group["lr"])
                self._seen[rank]["scalar", "", f"lr.{type(optimizer).__name__}.{group_number}"] = np.asarray(lr)
            for path, parameter in net.named_parameters():
                module, _, name = path.rpartition(".")
                assert parameter.grad is not None
                self._see(rank, "param", module, name, parameter)
                self._see(rank, "grad", module, name, parameter.grad)
            for path, buffer in net.named_buffers():
                module, _, name = path.rpartition(".")
                self._see(rank, "buffer", module, name, buffer)
            optimizer.step()
            for path, parameter in net.named_parameters():
                module, _, name = path.rpartition(".")
                for key, state in optimizer.state[parameter].items():
                    self._see(rank, "optim", module, f"{name}.{key}", state)
            optimizer.zero_grad()
        self._steps.append(self._seen)

    def _see(self, rank: int, site: str, path: str, name: str, value: Tensor) -> None:
        self._seen[rank][site, path, name] = value.detach().clone().numpy()

    def _before(self, rank: int, path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        name = "input" if type(module).__module__.startswith("torch.") else "x"
        self._see(rank, "input", path, name, args[0])
        self._watch(rank, "grad_input", path, name, args[0])

    def _after(self, rank: int, path: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self._see(rank, "output", path, "", output)
        self._watch(rank, "grad_output", path, "", output)

    def _watch(self, rank: int, site: str, path: str, name: str, value: Tensor) -> None:
        if value.requires_grad:
            value.register_hook(lambda gradient: self._see(rank, site, path, name, gradient))


def _expect(value: Array, site: str) -> Expected:
    content = value.tobytes()
    shape = tuple(value.shape)
    own = None
    if site != "scalar":
        own = to_text(fingerprint(np.frombuffer(content, np.uint8), value.itemsize, shape))
    wide = value.astype(np.float64)
    squares, fourths = float((wide * wide).sum()), float((wide * wide * wide * wide).sum())
    statistics: dict[str, float] = {
        "min": float(wide.min()),
        "max": float(wide.max()),
        "absmax": float(np.abs(wide).max()),
        "nan_count": int(np.isnan(wide).sum()),
        "inf_count": int(np.isinf(wide).sum()),
        "zero_count": int((wide == 0).sum()),
        "sum": float(wide.sum()),
        "sum_sq": squares,
        "sum_abs": float(np.abs(wide).sum()),
        "sum_fourth": fourths,
        "mean": float(wide.mean()),
        "std": float(wide.std()),
        "l2": float(np.sqrt(squares)),
    }
    slack = 1e-9 * (float(np.abs(wide).sum()) + squares + fourths)
    return Expected(
        kind=(str(value.dtype), str(list(shape)).replace(" ", ""), len(content)),
        content=content,
        fingerprint=own,
        statistics={name: (number, 0.0 if name in _EXACT else slack) for name, number in statistics.items()},
    )
