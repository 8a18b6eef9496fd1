"""The setting `local_gradients`: each rank's own gradients beside the reduced ones, in DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.analyze.first.first import first
from tests.rigs import jobs

PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4, bias=False))
mesh = init_device_mesh("cpu", (2,))
model = fully_shard(net, mesh=mesh) if sys.argv[1] == "fsdp2" else nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(2):
    for part in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model  # DDP that outlives its process group can block the end of the process
dist.destroy_process_group()
"""


LAYOUTS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    started = {}
    for layout in LAYOUTS:
        folder: Path = tmp_path_factory.mktemp(layout)
        (script := folder / "train.py").write_text(PROGRAM)
        settings = jobs.recording("site=grad,input keep=tensor,stats", local_gradients="1")
        started[layout] = jobs.ranks(folder, script, layout, num=2, TESTS_RECORDER="1", **settings)
    return {layout: jobs.succeeded(job).run for layout, job in started.items()}


@pytest.fixture(params=LAYOUTS)
def run(request: pytest.FixtureRequest, runs: dict[str, recorder.Run]) -> recorder.Run:
    return runs[request.param]


def test_local_gradients_average_to_those_of_the_update(run: recorder.Run) -> None:
    for module, name in (("0", "weight"), ("0", "bias"), ("2", "weight")):
        for step in range(2):
            local = [
                run.array(module, site="grad", name=name, step=step, phase="backward", micro_step=part, rank=rank)
                for part in range(2)
                for rank in range(2)
            ]
            assert not np.array_equal(local[0], local[1])
            final = run.array(module, site="grad", name=name, step=step, phase="optimizer")
            np.testing.assert_allclose(sum(local) / 2, final, rtol=1e-5, atol=1e-7)
            mean = run.array(module, site="grad", name=name, step=step, phase="backward", micro_step=1)
            np.testing.assert_allclose((local[2] + local[3]) / 2, mean, rtol=1e-6)


def test_they_are_no_replicas_that_differ(run: recorder.Run) -> None:
    assert first(run).replica is None
    assert not [finding for finding in run.view().rows().findings if finding.kind == "replicas_differ"]
