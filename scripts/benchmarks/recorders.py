"""What is compared: ways to record every leaf module's output and every parameter's gradient at every step.

All see the same tensors from the same two hooks: in a forward hook of each module without children, and in a hook just
before the optimizer's update. Nothing here may import `recorder`: its own runs differ by environment alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

See = Callable[[str, Tensor], None]


class Installed(NamedTuple):
    """A recorder in place."""

    model: Any
    """What the training calls instead of its model; for most it is the model."""
    end_step: Callable[[int], None] = lambda _step: None
    """Called after each step."""
    close: Callable[[], None] = lambda: None
    """Called after the last: waits for what is not written yet."""


def leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules without children, with their paths."""
    return ((path, module) for path, module in model.named_modules() if next(module.children(), None) is None)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, see: See) -> None:
    """Call `see` with a name and each tensor."""

    def forward_hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _module, _args, output: see(name, output)

    for path, module in leaves(model):
        module.register_forward_hook(forward_hook(f"{path}.output"))
    attach_gradients(model, optimizer, see)


def attach_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, see: See) -> None:
    """Call `see` with a name and each parameter's gradient, just before the update."""
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
        self._sample: list[np.ndarray[Any, Any]] = []
        self._sample_bytes = 0

    def see(self, _name: str, tensor: Tensor) -> None:
        self.num_tensors += 1
        self.num_bytes += tensor.nbytes
        if self._sample_bytes < 64 << 20:
            self._sample.append(tensor.detach().numpy().reshape(-1).copy())
            self._sample_bytes += tensor.nbytes

    def save_sample(self, path: Path) -> None:
        """The first 64 MiB of values, for what is measured of the machine."""
        np.save(path, np.concatenate(self._sample))


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

    def __init__(self, save: Callable[[dict[str, Tensor], int], None]) -> None:
        self.save = save
        self.tensors: dict[str, Tensor] = {}

    def see(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def end_step(self, step: int) -> None:
        self.save(self.tensors, step)
        self.tensors = {}


class AsyncSave:
    """torch.distributed.checkpoint's `async_save` of each step; waits for the step before, or they would pile up."""

    def __init__(self, directory: Path, kind: str) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.directory = directory
        self.options: dict[str, Any] = {"no_dist": True}
        if kind == "process":
            if not torch.distributed.is_initialized():  # it asks for a process group, of one rank too
                torch.distributed.init_process_group("gloo", f"file://{directory}.store", rank=0, world_size=1)
            self.options = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        elif kind == "staged":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            options = StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
            self.options["async_stager"] = DefaultStager(options)
        self.pending: Any = None

    def save(self, tensors: dict[str, Tensor], step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.close()
        made = async_save(tensors, checkpoint_id=self.directory / f"step-{step:06d}", **self.options)
        self.pending = getattr(made, "upload_completion", made)

    def close(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def install(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """Put the recorder of that name in place."""
    installed = Installed(model)
    if name == "none":
        return installed
    if name == "hooks":
        attach(model, optimizer, lambda _name, _tensor: None)
        return installed
    if name == "pool":
        pool = Pool()
        attach(model, optimizer, pool.see)
        return installed._replace(end_step=pool.end_step)
    if name == "torch.save":
        files = FilePerStep(lambda tensors, step: torch.save(tensors, directory / f"step-{step:06d}.pt"))
    elif name == "safetensors":
        from safetensors.torch import save_file

        files = FilePerStep(lambda tensors, step: save_file(tensors, directory / f"step-{step:06d}.safetensors"))
    elif name.startswith("async_save"):
        saver = AsyncSave(directory, name.partition(" ")[2])
        files = FilePerStep(saver.save)
        installed = installed._replace(close=saver.close)
    else:
        raise ValueError(f"there is no recorder {name}")
    attach(model, optimizer, files.see)
    return installed._replace(end_step=files.end_step)
