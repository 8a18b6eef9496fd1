"""Models under DDP and FSDP2, compiled with taps in their graphs, beside the same training without a compiler.

For each case: what plain hooks see of the training that is wrapped and not compiled, saved by rank; then the same
training compiled and recorded. ``tapped.py OUT NAME...`` runs the cases of these names one after the other.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.lifecycle import active as recording_side
from tests.rigs.leaving import leave

RULES = "site=input,output,grad_input,grad_output,grad keep=tensor"
SELECT = "site=input,output"
WIDTH = 6
STEPS = 2
Key = tuple[str, str, str, int, int | None, int, int, str, str]
"""Site, path, name, step, micro_step, call, repeat, mode, phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to wrap, to compile and to tap."""

    wrapper: str
    """``ddp`` or ``fsdp2``."""
    compiled: str
    """``outside`` the wrapper or ``inside`` of it; ``blocks``, each in place; ``in place``, the whole model."""
    tapped: str
    """When `recorder.instrument` is called: ``before`` or ``after`` wrapping; ``flag``: no line of code."""
    schedule: str = "once"
    """Forwards and backwards of a step: ``once``; ``twice``, one after the other; ``together``, two forwards and one
    backward of both; ``crossed``, two forwards and then a backward of each, the first first; ``retained``, two
    backwards of one forward."""
    backend: str = "aot_eager"
    checkpointed: bool = False
    mixed: bool = False
    """Whether FSDP2 computes in bfloat16."""
    evaluates: bool = False
    """Whether a forward without gradients, in eval mode, follows each step."""


CASES = {
    "ddp outside": Case(wrapper="ddp", compiled="outside", tapped="before", schedule="crossed"),
    "ddp inside": Case(wrapper="ddp", compiled="inside", tapped="after", schedule="twice"),
    "ddp blocks": Case(wrapper="ddp", compiled="blocks", tapped="before", schedule="together"),
    "ddp flag": Case(wrapper="ddp", compiled="outside", tapped="flag", schedule="twice", evaluates=True),
    "ddp checkpointed": Case(wrapper="ddp", compiled="outside", tapped="before", checkpointed=True),
    "ddp in place": Case(wrapper="ddp", compiled="in place", tapped="after", schedule="twice", evaluates=True),
    "ddp retained": Case(wrapper="ddp", compiled="inside", tapped="before", schedule="retained"),
    "ddp inductor": Case(wrapper="ddp", compiled="blocks", tapped="before", backend="inductor"),
    "fsdp2 outside": Case(wrapper="fsdp2", compiled="outside", tapped="after", schedule="twice"),
    "fsdp2 before": Case(wrapper="fsdp2", compiled="outside", tapped="before", schedule="together"),
    "fsdp2 blocks": Case(wrapper="fsdp2", compiled="blocks", tapped="before", schedule="crossed", mixed=True),
    "fsdp2 flag": Case(wrapper="fsdp2", compiled="blocks", tapped="flag", schedule="twice", evaluates=True),
    "fsdp2 checkpointed": Case(wrapper="fsdp2", compiled="blocks", tapped="before", checkpointed=True),
    "fsdp2 in place": Case(wrapper="fsdp2", compiled="in place", tapped="before"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        out: Tensor = self.head(self.shared(self.shared(x)))
        return out


class Witness:
    """What plain hooks see of every module's output and its gradient, and of gradients just before an update."""

    def __init__(self, net: nn.Module) -> None:
        self.paths = {module: path for path, module in net.named_modules() if not isinstance(module, nn.ModuleList)}
        self.values: dict[Key, Tensor] = {}
        self.step = self.micro_step = 0
        self.mode = "train"
        self._calls: dict[tuple[object, ...], int] = {}

    def install(self) -> None:
        for module in self.paths:
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any) -> None:
        names = list(inspect.signature(module.forward).parameters)
        for name, value in zip(names, args, strict=False):
            self._see(module, "input", name, value)

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._see(module, "output", "", output)

    def _see(self, module: nn.Module, site: str, name: str, value: Tensor) -> None:
        is_again = torch._C._current_graph_task_id() != -1
        phase = "recompute" if is_again else "forward"
        when = module, site, self.step, self.micro_step, self.mode, phase
        call = self._calls[when] = self._calls.get(when, -1) + 1
        path, step, micro_step, mode = self.paths[module], self.step, self.micro_step, self.mode
        self.values[site, path, name, step, micro_step, call, 0, mode, phase] = value.detach().clone()
        if is_again or not value.requires_grad or not torch.is_grad_enabled():
            return

        repeats = itertools.count()

        def arrived(gradient: Tensor) -> None:
            key = f"grad_{site}", path, name, step, micro_step, call, next(repeats), mode, "backward"
            self.values[key] = gradient.detach().clone()

        value.register_hook(arrived)

    def before_update(self, net: nn.Module) -> None:
        for module, path in self.paths.items():
            for name, parameter in module._parameters.items():
                assert parameter is not None and parameter.grad is not None
                gradient: Any = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                self.values["grad", path, name, self.step, None, 0, 0, "train", "optimizer"] = local.detach().clone()


def wrap(net: Net, case: Case, *, with_compiler: bool) -> Any:
    """What its user would call."""
    options: Any = {"backend": case.backend}
    tapped = case.tapped if with_compiler else ""
    compiled = case.compiled if with_compiler else ""
    if tapped == "before":
        recorder.instrument(net, select=SELECT)
    if compiled == "blocks":
        for block in net.blocks:
            block.compile(**options)
    inner: Any = torch.compile(net, **options) if compiled == "inside" else net
    model: Any
    if case.wrapper == "ddp":
        # So small a bucket that dynamo cuts its graph in several where it compiles the whole wrapper.
        model = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.0005)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if case.mixed else None)
        for block in net.blocks:
            fully_shard(block, mp_policy=policy)
        model = fully_shard(net, mp_policy=policy)
    if tapped == "after":
        recorder.instrument(model, select=SELECT)
    if compiled == "in place":
        model.compile(**options)
    return torch.compile(model, **options) if compiled == "outside" else model


def train(call: Any, net: Net, case: Case, witness: Witness | None) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        if witness is not None:
            witness.step, witness.micro_step, witness.mode = step, 0, "train"
        if case.schedule in ("together", "crossed", "retained"):
            num_calls = 1 if case.schedule == "retained" else 2
            several = [call(torch.randn(3, WIDTH, generator=generator)).square().mean() for _ in range(num_calls)]
            if case.schedule == "together":
                torch.stack(several).sum().backward()
            elif case.schedule == "crossed":
                for loss in several:
                    loss.backward()
            else:
                several[0].backward(retain_graph=True)
                several[0].backward()
            losses += [loss.detach() for loss in several]
        else:
            for micro_step in range(2 if case.schedule == "twice" else 1):
                if witness is not None:
                    witness.micro_step = micro_step
                loss = call(torch.randn(3, WIDTH, generator=generator)).square().mean()
                loss.backward()
                losses.append(loss.detach())
        if witness is not None:
            witness.before_update(net)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluates:
            if witness is not None:
                witness.micro_step, witness.mode = 0, "no_grad"
            call.eval()
            with torch.no_grad():
                losses.append(call(torch.randn(3, WIDTH, generator=generator)).square().mean())
            call.train()
    return losses


@contextmanager
def recorded(model: nn.Module, case: Case, folder: Path) -> Iterator[None]:
    """Under `attach`; where no line of code is to ask for it, as the flag does it in a fresh process."""
    if case.tapped != "flag":
        with recorder.attach(model, enabled=True, dir=folder, rules=RULES):
            yield
        return
    settings = {"RECORDER": "1", "RECORDER_DIR": str(folder), "RECORDER_RULES": RULES, "RECORDER_COMPILED": "tap"}
    os.environ |= settings
    recording_side.start_from_environment()
    current = recording_side._current
    assert current is not None
    try:
        yield
    finally:
        current.close()
        for name in settings:
            del os.environ[name]


def run(case: Case, folder: Path) -> None:
    torch.manual_seed(7)
    net = Net(case.checkpointed)
    witness = Witness(net)
    call = wrap(net, case, with_compiler=False)
    witness.install()
    plain = train(call, net, case, witness)

    torch.compiler.reset()
    torch.manual_seed(7)
    net = Net(case.checkpointed)
    call = wrap(net, case, with_compiler=True)
    with recorded(call, case, folder / "recordings"):
        tapped = train(call, net, case, None)
    saved = {"values": witness.values, "losses": plain, "tapped_losses": tapped}
    torch.save(saved, folder / f"rank{dist.get_rank()}.pt")


def main() -> None:
    dist.init_process_group("gloo")
    dist._DEFAULT_FIRST_BUCKET_BYTES = 512  # type: ignore[attr-defined]
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        run(CASES[name], folder)
    leave()


if __name__ == "__main__":
    main()
