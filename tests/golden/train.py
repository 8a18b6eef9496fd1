"""What the golden runs train: linear, with numbers that float32 holds exactly, so that `values` can tell every one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recorder


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.5, -0.25]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()
        self.head = nn.Linear(3, 1)
        self.register_buffer("num_calls", torch.tensor(0))
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.5, -1.0, 2.0]]))
            self.head.bias.fill_(0.125)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        recorder.tap("half", x.bfloat16())
        recorder.tap("positive", x > 0)
        recorder.tap("extremes", torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, -2.5]))
        y: Tensor = self.head(self.gain(x))
        return y


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    net = Net()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    for step in range(2):
        numbers = torch.arange(12.0).reshape(4, 3) - 2 * step
        loss = net(numbers[2 * rank : 2 * rank + 2] / 8).mean()
        loss.backward()
        recorder.scalar("loss", loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
