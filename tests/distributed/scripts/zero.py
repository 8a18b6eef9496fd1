"""Data parallel trainings whose optimizer has flat parts of the parameters, marked as DeepSpeed's ZeRO marks them.

None of DeepSpeed is imported. What is marked was read in DeepSpeed 0.19.8, below `deepspeed`: `_hp_mapping` and
`_dp_group` in `utils/mixed_precision_linkage.py` and `utils/tensor_fragment.py` for stages 1 and 2; `ds_shape`,
`ds_numel`, `ds_tensor`, `ds_process_group` and `_z3_optimizer` with its `grad_position` and
`fp32_partitioned_groups_flat` in `runtime/zero/partition_parameters.py` and `runtime/zero/stage3.py` for stage 3.

Each word of the command line is a training of the same model and batches, recorded into a folder of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recorder
from tests.distributed.scripts.redundancy import Net, batch_of_rank
from tests.rigs.leaving import train_each

STEPS = 3


def mark_stage_1(parameters: list[Any]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Cut the parameters, end to end and padded, into equal parts; return this rank's, and what cuts gradients so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.cat([parameter.detach().flatten() for parameter in parameters])
    per_rank = -(-whole.numel() // size)
    first = rank * per_rank
    flat = nn.functional.pad(whole, (0, per_rank * size - whole.numel()))[first : first + per_rank].clone()
    flat.requires_grad_(True)
    start = 0
    for parameter in parameters:
        begin, end = (min(max(edge - start, 0), parameter.numel()) for edge in (first, first + per_rank))
        parameter._dp_group, parameter._hp_mapping = dist.group.WORLD, None
        if begin < end:
            at = start + begin - first
            parameter._hp_mapping = SimpleNamespace(
                lp_fragment_address=SimpleNamespace(start=begin, numel=end - begin),
                hp_fragment_address=SimpleNamespace(start=at, numel=end - begin),
                hp_fragment=flat.narrow(0, at, end - begin),
            )
        start += parameter.numel()

    def cut(values: Tensor) -> Tensor:
        return nn.functional.pad(values, (0, per_rank * size - values.numel()))[first : first + per_rank]

    return flat, cut


def mark_stage_3(parameters: list[Any], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Cut each parameter, padded, into equal parts, and return this rank's end to end, and what cuts gradients so."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numels = [parameter.numel() for parameter in parameters]

    def cut(values: Tensor) -> Tensor:
        parts = []
        for one in values.split(numels):
            per_rank = -(-one.numel() // size)
            parts.append(nn.functional.pad(one, (0, per_rank * size - one.numel())).view(size, per_rank)[rank])
        return torch.cat(parts)

    flat = cut(torch.cat([parameter.detach().flatten() for parameter in parameters])).requires_grad_(True)
    optimizer: Any = SimpleNamespace(fp32_partitioned_groups_flat=[flat], grad_position={})
    optimizer.get_param_id = lambda parameter: parameter.ds_id
    start, frozen = 0, model.get_parameter("norm.bias")
    frozen.ds_id, frozen.ds_tensor, frozen._z3_optimizer = -1, SimpleNamespace(ds_numel=4), optimizer  # type: ignore[attr-defined]
    for number, parameter in enumerate(parameters):
        per_rank = -(-parameter.numel() // size)
        optimizer.grad_position[number] = [0, start, per_rank]
        start += per_rank
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
        parameter.ds_tensor = SimpleNamespace(ds_numel=per_rank)
        parameter.ds_process_group, parameter._z3_optimizer = dist.group.WORLD, optimizer
    return flat, cut


def train(name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    model.norm.bias.requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = dist.get_world_size()
    flat, cut = None, None
    if "groups" in name:
        of_groups = {0: [parameters[:1]], 1: [parameters[1:3], parameters[3:]] if "3" in name else [parameters[1:]]}
        train_groups(name, model, of_groups)
        return
    if name != "whole":
        flat, cut = mark_stage_1(parameters) if "1" in name else mark_stage_3(parameters, model)
    optimizer = torch.optim.Adam(parameters if flat is None else [flat], lr=0.01)
    with recorder.attach(model, enabled=True, dir=name, rules="site=* keep=tensor,stats,fingerprint"):
        for step in range(STEPS):
            model.zero_grad()
            model(batch_of_rank(step)).square().mean().backward()
            whole = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
            if flat is None or cut is None:
                optimizer.step()
                continue
            dist.all_reduce(whole)
            flat.grad = cut(whole / size)
            optimizer.step()
            share(parameters, flat, is_stage_3="3" in name)


def train_groups(name: str, model: Net, of_groups: dict[int, list[list[nn.Parameter]]]) -> None:
    """Train two groups, of which the optimizer is shown one part after the other, as in `_optimizer_step` of ZeRO.

    ZeRO 1 and 2 show one group at a time. ZeRO 3 shows all groups, of which one has a part of its parameters, and the
    others have none.
    """
    size, is_stage_3 = dist.get_world_size(), "3" in name
    parts = [(number, parameters) for number, some in of_groups.items() for parameters in some]
    marks = [
        mark_stage_3(one, model) if is_stage_3 else mark_stage_1(one) for _, one in parts if name != "whole_groups"
    ]
    model.register_buffer("seen", torch.zeros(()))
    updated = [(number, one) for (number, _), (one, _) in zip(parts, marks, strict=False)]
    updated = updated or [(number, one) for number, parameters in parts for one in parameters]
    optimizer = torch.optim.Adam(
        [
            {"params": [one for at, one in updated if at == number], "lr": rate}
            for number, rate in enumerate((0.01, 0.02))
        ]
    )
    groups = optimizer.param_groups
    for group in groups if is_stage_3 else ():
        group["params"] = []
    with recorder.attach(model, enabled=True, dir=name, rules="site=* keep=tensor,stats,fingerprint"):
        for step in range(STEPS):
            model.zero_grad()
            model(batch_of_rank(step)).square().mean().backward()
            for (number, parameters), (flat, cut) in zip(parts, marks, strict=bool(marks)):
                whole = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
                dist.all_reduce(whole)
                flat.grad = cut(whole / size)
                if is_stage_3:
                    groups[number]["params"] = [flat]
                else:
                    optimizer.param_groups = [groups[number]]
                optimizer.step()
                if is_stage_3:
                    groups[number]["params"] = []
            optimizer.param_groups = groups
            if not marks:
                optimizer.step()
            for (_, parameters), (flat, _) in zip(parts, marks, strict=bool(marks)):
                share(parameters, flat, is_stage_3=is_stage_3)


def share(parameters: list[nn.Parameter], flat: Tensor, *, is_stage_3: bool) -> None:
    """Give each rank's model all updated values, as ZeRO does before the next forward."""
    size = dist.get_world_size()
    parts = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(parts, flat.detach())
    start = 0
    for parameter in parameters:
        per_rank = -(-parameter.numel() // size)
        of_all = torch.cat([part[start : start + per_rank] for part in parts]) if is_stage_3 else torch.cat(parts)
        values = of_all[: parameter.numel()] if is_stage_3 else of_all[start : start + parameter.numel()]
        parameter.data.copy_(values.view_as(parameter))
        start += per_rank if is_stage_3 else parameter.numel()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    train_each(train)
