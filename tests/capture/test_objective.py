"""`recorder.objective`: the gradient that comes back from one objective alone, in the one backward of the program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recorder
from recorder.errors import TapError
from tests.rigs.capturing import flagged


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = self.trunk(x)
        main = self.head(recorder.objective("main", shared)).square().mean()
        aux = self.aux(recorder.objective("aux", shared)).exp().mean()
        return main, aux, shared


def trained(steps: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        main, aux, _ = model(torch.randn(5, 4))
        (main + 0.3 * aux).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def test_each_objective_has_its_own_gradient_and_training_stays_as_it_is(tmp_path: Path) -> None:
    plain = trained()
    with flagged(tmp_path, "site=tap,grad_output keep=tensor,stats") as found:
        recorded = trained()
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    torch.manual_seed(0)
    model = Net()
    main, aux, shared = model(torch.randn(5, 4))
    pulls = []
    for name, loss in (("main", main), ("aux", 0.3 * aux)):
        (expected,) = torch.autograd.grad(loss, shared, retain_graph=True)
        gradient = found.run.array("", "tap", step=0, name=f"objective.{name}", phase="backward")
        assert np.array_equal(gradient, expected.numpy())
        pulls.append(expected.flatten())
        norm = found.run.array("", "scalar", step=0, name=f"objective.norm.{name}")
        assert np.isclose(norm, expected.norm())
    cosine = found.run.array("", "scalar", step=0, name="objective.cosine.main:aux")
    assert np.isclose(cosine, torch.cosine_similarity(pulls[0], pulls[1], dim=0), atol=1e-6)
    checked = recorder.check(found.run, rules=["objectives"], thresholds={"objectives": {"records": 2, "ratio": 1.01}})
    assert [(one.rule, one.site) for one in checked.findings] == [("objectives", "tap")]


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(TapError, match="objective: the name is int"):
        recorder.objective(3, torch.ones(1))  # type: ignore[arg-type]
