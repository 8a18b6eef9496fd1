"""Training in pipelines whose stages are data, tensor or sequence parallel: the layouts ``pp ...`` of `meshes.py`.

Stages lie along the first axis of the mesh; the model and its cuts are `tests/rigs/parallel.py`'s.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel

import recorder
from tests.rigs import parallel
from tests.rigs.parallel import mesh_of, sequence_parallel, tensor_parallel

MICRO_BATCHES, NUM_RANKS = 2, 2
CUTS = {"tp": tensor_parallel, "sp": sequence_parallel}
UNITS = (("embed",), ("blocks.0",), ("blocks.1",), ("norm", "head"))


class Stage(parallel.Net):
    """A part of the model under the paths of the complete model; its forward skips what was taken away."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for path in (path for unit in UNITS for path in unit):
            with contextlib.suppress(AttributeError):
                x = self.get_submodule(path)(x)
        return x


def cut(whole: Any, stage: int, num_stages: int) -> Any:
    per_stage = len(UNITS) // num_stages
    kept = {path for unit in UNITS[stage * per_stage : (stage + 1) * per_stage] for path in unit}
    whole.__class__ = Stage
    whole.blocks = nn.ModuleDict(dict(whole.blocks.named_children()))
    for path in (path for unit in UNITS for path in unit):
        if path not in kept:
            above, _, name = path.rpartition(".")
            del whole.get_submodule(above)._modules[name]
    return whole


def wrapped(stage: Any, around: str, mesh: DeviceMesh) -> nn.Module:
    if around == "ddp":
        return nn.parallel.DistributedDataParallel(stage, device_mesh=mesh["dp"])
    if around in ("fsdp2", "hsdp"):
        over = mesh["replicate", "shard"] if around == "hsdp" else mesh["dp"]
        for block in stage.blocks.values():
            fully_shard(block, mesh=over)
        fully_shard(stage, mesh=over)
    return stage  # type: ignore[no-any-return]


def mesh_for(words: list[str], num_others: int) -> DeviceMesh:
    """The pipeline outside, data parallel ranks within it, tensor parallel ones innermost."""
    axes = [("pp", NUM_RANKS)]
    num_data = num_others // (2 if "tp" in words or "sp" in words else 1)
    if "hsdp" in words:
        axes += [("replicate", 2), ("shard", num_data // 2)]
    elif num_data > 1:
        axes += [("dp", num_data)]
    return mesh_of(*axes, *([("tp", 2)] if num_others > num_data else []))


def shapes_of(words: list[str], stage: int, num_stages: int, batch: Any) -> dict[str, Any]:
    """The shapes of a micro-batch on two data parallel ranks. If DDP ran to learn them, torch 2.13 would miscount."""
    if words[-1] != "ddp":
        return {}
    tokens = batch(0)[0].chunk(2)[0].chunk(MICRO_BATCHES)[0]
    between = torch.zeros(*tokens.shape, parallel.DIM, requires_grad=True)
    last = torch.zeros(*tokens.shape, parallel.WORDS, requires_grad=True)
    return {"input_args": between if stage else tokens, "output_args": last if stage == num_stages - 1 else between}


def train(layout: str, folder: Path, batch: Any, steps: int) -> None:
    """Train and record.

    Args:
        layout: ``pp``, ``tp`` or ``sp``, and what is around it, between ``x``; ``pp2`` has two stages on each rank.
        folder: where to record to.
        batch: of a step, inputs and targets.
        steps: how many.
    """
    words = layout.split(" x ")
    mesh = mesh_for(words, dist.get_world_size() // NUM_RANKS)
    here, pp_rank = mesh.get_coordinate(), mesh["pp"].get_local_rank()
    assert here is not None
    num_stages = NUM_RANKS * (2 if words[0] == "pp2" else 1)
    modules: list[nn.Module] = []
    for stage in range(pp_rank, num_stages, NUM_RANKS):
        whole = parallel.make()
        inner = next((word for word in words if word in CUTS), None)
        if inner is not None:
            whole = CUTS[inner](whole, mesh["tp"])
        modules.append(wrapped(cut(whole, stage, num_stages), words[-1], mesh))
    group = mesh["pp"].get_group()
    stages: list[Any] = [
        PipelineStage(
            module, number, num_stages, torch.device("cpu"), group=group, **shapes_of(words, number, num_stages, batch)
        )
        for number, module in zip(range(pp_rank, num_stages, NUM_RANKS), modules, strict=True)
    ]
    schedule: Any
    if len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_of)
    axes = [axis for axis, name in enumerate(mesh.mesh_dim_names or ()) if name not in ("pp", "tp")]
    slice_, num_slices = 0, 1
    for axis in axes:
        slice_, num_slices = slice_ * mesh.size(axis) + here[axis], num_slices * mesh.size(axis)
    with contextlib.ExitStack() as attached:
        for module in modules:
            attached.enter_context(recorder.attach(module, enabled=True, dir=folder, rules=RULES))
        optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.01, eps=1e-3)
        for step in range(steps):
            tokens, targets = (tensor.chunk(num_slices)[slice_] for tensor in batch(step))
            with loss_parallel() if "sp" in words else contextlib.nullcontext():
                schedule.step(*((tokens,) if pp_rank == 0 else ()), **({"target": targets} if pp_rank else {}))
            optimizer.step()
            optimizer.zero_grad()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


RULES = "site=* keep=tensor,stats,fingerprint"
