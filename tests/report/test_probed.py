"""The page has a column for each step of the probe, on each rank and on all ranks together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.report.report import write_report
from tests.rigs import jobs
from tests.rigs.report_pages import read_page, values_of

_TRAINING = """
import torch
import torch.distributed as dist
from torch import nn
import recorder
from tests.rigs.leaving import leave

RULES = "site=output,grad keep=probe; site=output,grad steps=::4 keep=stats"

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recorder.attach(model, enabled=True, dir="recordings", rules=RULES):
        for step in range(12):
            if (step, dist.get_rank()) == (9, 1):
                model.module[0].weight.data[0, 0] = float("nan")
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    leave()

if __name__ == "__main__":
    main()
"""


def test_the_probe_fills_the_steps_between_those_with_statistics(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINING)
    jobs.succeeded(jobs.ranks(tmp_path, tmp_path / "train.py"))
    run = recorder.open_run(tmp_path / "recordings")
    write_report(run, tmp_path / "r.html")
    blocks = read_page(tmp_path / "r.html")
    axes = blocks["axes"].data
    assert axes["steps"] == list(range(12)) and axes["probed"]
    probe = run.probe().to_pandas()
    rows = dict(blocks["top"].data["facts"])["rows"]
    assert rows.startswith(f"{run.num_rows:,}, and ") and f"of the probe, which hold {len(probe):,} numbers, " in rows
    norms = {}
    for site, name, join in (("output", "", np.linalg.norm), ("grad", "weight", np.mean)):
        number = next(n for n, one in enumerate(axes["series"]) if one[1:3] == [site, name])
        path = blocks["modules"].data["modules"][axes["series"][number][0]][0]
        own = probe[(probe.module_path == path) & (probe.site == site) & (probe.name == name)]
        by_rank = np.stack([own[own["rank"] == rank].l2.to_numpy() for rank in range(2)])
        drawn = values_of(blocks["values/l2"])[0][number]
        assert drawn[1:] == pytest.approx(by_rank, rel=1e-3, abs=1e-3)
        assert drawn[0, :9] == pytest.approx(join(by_rank[:, :9], axis=0), rel=1e-2)  # parts add up, replicas are one
        norms[site] = values_of(blocks["values/nan_count"])[0][number, 0]
    assert (norms["output"][8] == 0) and norms["output"][9] > 0
    assert all(norm > 0 for norm in axes["gradient_norms"]["0"][:9]) and axes["gradient_norms"]["0"][10] == -1
