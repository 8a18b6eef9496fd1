"""Other tools, each doing what comes nearest to recording every leaf module's output and every gradient at every step.

They are installed by `pip install '.[peers]'`; what cannot be imported is left out, with its reason. Nothing here may
import `recorder`.
"""

from __future__ import annotations

import importlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .recorders import FilePerStep, Installed, attach, attach_gradients, leaves

Install = Callable[[nn.Module, torch.optim.Optimizer, Path], Installed]


class Peer(NamedTuple):
    """A tool, and how it is put in place."""

    package: str
    module: str
    install: Install


class Called:
    """Stands for the model where a tool wants to make the forward itself; all else is the model's."""

    def __init__(self, model: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        self._model = model
        self._forward = forward

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._forward(inputs)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._model.parameters()


def tensorboard(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """A histogram of each tensor."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))
    step = 0

    def end_step(number: int) -> None:
        nonlocal step
        step = number + 1

    attach(model, optimizer, lambda name, tensor: writer.add_histogram(name, tensor.detach(), step))
    return Installed(model, end_step, writer.close)


def wandb(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """A histogram of each tensor, offline."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    run = wandb.init(mode="offline", dir=str(directory), project="bench", settings=settings)
    seen: dict[str, Any] = {}

    def see(name: str, tensor: Tensor) -> None:
        seen[name] = wandb.Histogram(tensor.detach().numpy().ravel())

    def end_step(step: int) -> None:
        run.log(dict(seen), step=step)
        seen.clear()

    attach(model, optimizer, see)
    return Installed(model, end_step, run.finish)


def torchlens(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """A bundle of every operation's output, of which it has more than leaf modules, and a file of the gradients."""
    import torchlens as lens
    from torchlens.options import StreamingOptions

    gradients = _save_gradients(model, optimizer, directory)
    bundles = (directory / f"step-{number:06d}" for number in itertools.count())

    def forward(inputs: Tensor) -> Tensor:
        streaming = StreamingOptions(bundle_path=next(bundles), retain_in_memory=False)
        output: Tensor
        output, _ = lens.record(model, inputs, default_op=True, return_output=True, streaming=streaming)
        return output

    return Installed(Called(model, forward), gradients.end_step)


def nnsight(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """A trace in which every leaf module's output is kept, and a file of them and the gradients."""
    from nnsight import NNsight

    traced = NNsight(model)
    envoys = [(path, traced.get(path)) for path, _ in leaves(model)]
    gradients = _save_gradients(model, optimizer, directory)

    def forward(inputs: Tensor) -> Tensor:
        with traced.trace(inputs):
            kept = dict().save()  # type: ignore[attr-defined]  # noqa: C408 (nnsight gives every object this method)
            for path, envoy in envoys:
                kept[path] = envoy.output
            output: Tensor = traced.output.save()
        for path, value in kept.items():
            gradients.see(f"{path}.output", value)
        return output

    return Installed(Called(model, forward), gradients.end_step)


def msprobe(task: str) -> Install:
    """Inputs, outputs and gradients of every module, more than the others record: it has no choice of leaves."""

    def install(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
        from msprobe.pytorch import PrecisionDebugger

        of_task: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
        if task == "statistics":
            of_task["summary_mode"] = "statistics"
        settings = {"task": task, "dump_path": str(directory), "rank": [], "step": [], "level": "L0", task: of_task}
        path = directory / "config.json"
        path.write_text(json.dumps(settings))
        debugger = PrecisionDebugger(config_path=str(path))
        debugger.start(model=model)

        def end_step(_step: int) -> None:
            debugger.stop()
            debugger.step()
            debugger.start(model=model)

        return Installed(model, end_step, debugger.stop)

    return install


def nvdlfw_inspect(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Installed:
    """Six statistics of each tensor."""
    import nvdlfw_inspect.api as inspect

    config = directory / "config.yaml"
    config.write_text(
        "all:\n  enabled: True\n  layers:\n    layer_name_regex_pattern: .*\n"
        "  LogTensorStats:\n    enabled: True\n    tensors: [value]\n"
        "    stats: [min, max, mean, std, l1_norm, l2_norm]\n    freq: 1\n"
    )
    inspect.initialize(config_file=str(config), log_dir=str(directory), default_logging_enabled=True)

    def see(name: str, tensor: Tensor) -> None:
        inspect.log_tensor_stats(layer_name=name, tensor_name="value", tensor=tensor.detach(), skip_reduction=True)

    attach(model, optimizer, see)
    return Installed(model, lambda _step: inspect.step(), inspect.end_debug)


def _save_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> FilePerStep:
    files = FilePerStep(lambda tensors, step: torch.save(tensors, directory / f"gradients-{step:06d}.pt"))
    attach_gradients(model, optimizer, files.see)
    return files


PEERS = {
    "tensorboard": Peer("tensorboard", "torch.utils.tensorboard", tensorboard),
    "wandb": Peer("wandb", "wandb", wandb),
    "torchlens": Peer("torchlens", "torchlens", torchlens),
    "nnsight": Peer("nnsight", "nnsight", nnsight),
    "msprobe tensor": Peer("mindstudio-probe", "msprobe.pytorch", msprobe("tensor")),
    "msprobe statistics": Peer("mindstudio-probe", "msprobe.pytorch", msprobe("statistics")),
    "nvdlfw-inspect": Peer("nvdlfw-inspect", "nvdlfw_inspect.api", nvdlfw_inspect),
}


def main() -> None:
    """Say of each peer which version is there, or why it cannot be used: one line of JSON."""
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, str]] = {}
    for name, peer in PEERS.items():
        try:
            importlib.import_module(peer.module)
            found[name] = {"package": peer.package, "version": version(peer.package)}
        except Exception as error:  # whatever a stranger's package raises when it is imported
            reason = str(error).strip().splitlines()
            found[name] = {"package": peer.package, "reason": f"{type(error).__name__}: {reason[0] if reason else ''}"}
    print(json.dumps({"peers": found, "end_s": 0.0}))


if __name__ == "__main__":
    main()
