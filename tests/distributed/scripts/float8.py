"""torchao's float8 training under FSDP2, with and without a recording, and the same steps in bfloat16.

Weights are gathered in bfloat16 or in float8. Each case trains from the same seeds into a folder of its own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import recorder

STEPS = 3
CASES = ("bfloat16", "float8", "float8_gathered")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.seen: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self._tap("weight", self.up.weight)
        is_float8 = type(self.up) is not nn.Linear
        recorder.tap("cast", x.detach().to(torch.float8_e4m3fn) if is_float8 else x.detach())
        if is_float8:  # a scale of this rank's batch alone
            scale = 448 / x.detach().abs().max().float()
            data = (x.detach() * scale).to(torch.float8_e4m3fn)
            self._tap("scaled", Float8TrainingTensor(data, scale, x.dtype, None))
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]

    def _tap(self, name: str, tensor: Tensor) -> None:
        recorder.tap(name, tensor)
        inside = tensor.__tensor_flatten__()[0] if isinstance(tensor, Float8TrainingTensor) else []
        for field in inside:
            self.seen.setdefault(f"{name}.{field}", []).append(getattr(tensor, field).detach().clone())


def num_collectives() -> int:
    group: Any = dist.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def local(tensor: Tensor) -> dict[str, Tensor]:
    """This rank's values by what follows the tensor's name."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(own, WeightWithDynamicFloat8CastTensor):
        return {"": own.detach().clone()}
    scale = own._precomputed_scale
    more = {} if scale is None else {"._precomputed_scale": scale.clone()}
    return {"": own._tensor.detach().clone(), **more}


def train(case: str, folder: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    model = nn.Sequential(*blocks).to(torch.bfloat16)
    is_gathered = case == "float8_gathered"
    if case != "bfloat16":
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=is_gathered)
        convert_to_float8_training(model, config=config)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, values, before = [], {}, num_collectives()
    rules = "site=* keep=tensor,stats,fingerprint"
    recorded = recorder.attach(model, enabled=True, dir=folder, rules=rules) if folder else contextlib.nullcontext()
    with recorded:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            x = torch.randn(8, 16, generator=generator).to(torch.bfloat16) * (dist.get_rank() + 1)
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in model.named_parameters():
                values.update({("param", name + more, step): value for more, value in local(parameter).items()})
                assert parameter.grad is not None
                values["grad", name, step] = local(parameter.grad)[""]
            optimizer.step()
            optimizer.zero_grad()
            if is_gathered:
                precompute_float8_dynamic_scale_for_fsdp(model)
    for number, block in enumerate(blocks):
        for name, seen in block.seen.items():
            values.update({("tap", f"{number}.{name}", step): value for step, value in enumerate(seen)})
    return {
        "values": values,
        "losses": torch.stack(losses),
        "rng": torch.get_rng_state(),
        "collectives": num_collectives() - before,
    }


def deployed(folder: Path) -> dict[str, Tensor]:
    """A linear layer as it is quantised after training."""
    model = nn.Linear(16, 32)
    quantize_(model, Int8WeightOnlyConfig())
    with recorder.attach(model, enabled=True, dir=folder, rules="site=* keep=tensor", roots="any"), torch.no_grad():
        model(torch.ones(2, 16))
    weight: Any = model.weight
    return {field: getattr(weight, field).detach() for field in weight.__tensor_flatten__()[0]}


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    saved: dict[str, Any] = {}
    for case in CASES:
        saved[case] = {"off": train(case, None), "on": train(case, out / case)}
    if dist.get_rank() == 0:
        saved["deployed"] = deployed(out / "deployed")
    torch.save(saved, out / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
