"""What is compared: ways to record every leaf module's output and every parameter's gradient at every step.

All see the same tensors at the same two places: in a forward hook of each module without children, and in a hook just
before the optimizer's update. Nothing here may import `recorder`: its own runs differ by environment alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

See = Callable[[str, Tensor], None]
EndStep = Callable[[int], None]


def no_end(_step: int) -> None:
    """What is called after each step where nothing is left to do."""


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, see: See) -> None:
    """Call `see` with a name and each tensor."""

    def forward_hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _module, _args, output: see(name, output)

    for path, module in model.named_modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(forward_hook(f"{path}.output"))

    parameters = [(f"{path}.grad", parameter) for path, parameter in model.named_parameters()]

    def before_update(*_: object) -> None:
        for name, parameter in parameters:
            if parameter.grad is not None:
                see(name, parameter.grad)

    optimizer.register_step_pre_hook(before_update)


class Counter:
    """Hooks that do nothing but count what they see, which every recorder must then have."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self.num_bytes = 0

    def see(self, _name: str, tensor: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes


class Pool:
    """Copies into one warm buffer, from its start at each step, and drops: the least that recording can cost."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.buffer = torch.zeros(max_bytes, dtype=torch.uint8)
        self.used = 0

    def see(self, _name: str, tensor: Tensor) -> None:
        end = self.used + tensor.nbytes
        if end > len(self.buffer):
            raise MemoryError(f"a step has more than {len(self.buffer)} bytes")
        self.buffer[self.used : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self.used = (end + 63) & ~63

    def end_step(self, _step: int) -> None:
        self.used = 0


class FilePerStep:
    """Clones in the hooks and writes one file when the step is over, as most hand-written recorders do."""

    def __init__(self, directory: Path, suffix: str, save: Callable[[dict[str, Tensor], Path], None]) -> None:
        self.directory = directory
        self.suffix = suffix
        self.save = save
        self.tensors: dict[str, Tensor] = {}

    def see(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def end_step(self, step: int) -> None:
        self.save(self.tensors, self.directory / f"step-{step:06d}.{self.suffix}")
        self.tensors.clear()


def install(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> EndStep:
    """Put the recorder of that name in place; returns what to call after each step."""
    if name == "none":
        return no_end
    if name == "hooks":
        attach(model, optimizer, lambda _name, _tensor: None)
        return no_end
    if name == "pool":
        pool = Pool()
        attach(model, optimizer, pool.see)
        return pool.end_step
    if name == "torch.save":
        files = FilePerStep(directory, "pt", lambda tensors, path: torch.save(tensors, path))
    elif name == "safetensors":
        from safetensors.torch import save_file

        files = FilePerStep(directory, "safetensors", lambda tensors, path: save_file(tensors, path))
    else:
        raise ValueError(f"no recorder is called {name!r}")
    attach(model, optimizer, files.see)
    return files.end_step
