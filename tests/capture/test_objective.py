"""`recorder.objective`: the gradient that comes back from one objective alone, in the one backward of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.analyze.doctor.reply import checks_of
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
    cosine = found.run.array("", "scalar", step=0, name="objective.cosine.aux:main")
    assert np.isclose(cosine, torch.cosine_similarity(pulls[0], pulls[1], dim=0), atol=1e-6)
    checked = recorder.check(found.run, rules=["objectives"], thresholds={"objectives": {"records": 2, "ratio": 1.01}})
    assert [(one.rule, one.site) for one in checked.findings] == [("objectives", "tap")]


class Twice(Net):
    """The objectives share two tensors of one module; the second has objectives of other norms."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        main, aux, shared = super().forward(x)
        second = 3 * shared.detach().requires_grad_()
        main = main + recorder.objective("main", second).sum()
        return main, aux + 2 * recorder.objective("aux", second).sum(), shared


def test_two_tensors_that_objectives_share_have_names_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Twice()
    with flagged(tmp_path, "site=scalar keep=stats") as found:
        for _ in range(2):
            main, aux, _ = model(torch.randn(5, 4))
            (main + aux).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    for step in (0, 1):
        cosines = [
            float(found.run.array("", "scalar", step=step, name=f"objective.cosine.aux:main{n}")) for n in ("", "#2")
        ]
        assert cosines[1] == pytest.approx(1) and abs(cosines[0]) < 0.99
        assert float(found.run.array("", "scalar", step=step, name="objective.norm.aux#2")) == pytest.approx(
            2 * 20**0.5
        )


def test_the_objective_whose_loss_turned_nan_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    with flagged(tmp_path, "site=scalar,output keep=stats") as found:
        for step in range(3):
            main, aux, _ = model(torch.randn(5, 4))
            (main + aux * (float("nan") if step == 2 else 1.0)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (bad := recorder.first(found.run).nonfinite) is not None and bad.objectives == ["aux"]
    (one,) = [one for one in recorder.check(found.run).findings if one.rule == "nonfinite"]
    assert one.name == "loss" and one.what.endswith("objective 'aux' alone is not finite")


def test_a_pair_has_one_name_in_whatever_order_its_objectives_are_called(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with flagged(tmp_path, "site=scalar keep=stats") as found:
        for step in range(32):
            shared = model(torch.ones(2, 4))
            names = ("main", "aux") if step % 2 else ("aux", "main")
            losses = {name: recorder.objective(name, shared).sum() for name in names}
            (losses["main"] + (1 if step < 20 else -1) * losses["aux"]).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    cosines = found.rows(site="scalar").query("name.str.startswith('objective.cosine')")
    assert set(cosines["name"]) == {"objective.cosine.aux:main"} and list(cosines["step"]) == [*range(32)]
    flips = [one for one in recorder.check(found.run, rules=["flip"]).findings if one.rule == "flip"]
    assert len(flips) == 1 and flips[0].detail.startswith("cosine about 1.00 before")


def test_an_objective_that_is_named_twice_or_never_used_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with flagged(tmp_path, "site=scalar keep=stats") as found:
        for _ in range(3):
            shared = model(torch.ones(2, 4))
            a, again, b, _ = (recorder.objective(name, shared) for name in ("a", "a", "b", "never"))
            (a.sum() + 3 * again.sum() + b.sum()).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    twice, unused = found.events("objective")
    assert twice.startswith("step 0: one tensor was given twice to objectives named 'a': the norm is a mean of both")
    assert unused.startswith("no gradient came back from the objective 'never', so it has no norm and no cosine")
    notes = [one.state for one in checks_of(found.run) if "event objective" in one.text]
    assert notes == ["note", "note"]


class Checkpointed(Net):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def heads(self, shared: Tensor) -> Tensor:
        main = self.head(recorder.objective("main", shared)).square().mean()
        return main + self.aux(recorder.objective("aux", shared)).exp().mean()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.heads, self.trunk(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_that_runs_again_names_no_objective_twice(tmp_path: Path, use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant=use_reentrant)
    with flagged(tmp_path, "site=scalar keep=stats") as found:
        for _ in range(2):
            model(torch.ones(5, 4)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert found.events("objective") == []
    assert list(found.rows(name="objective.cosine.aux:main")["step"]) == [0, 1]


def test_a_name_that_is_no_text_is_refused() -> None:
    for name in ("", "a:b", "a#2"):
        with pytest.raises(TapError, match="expected letters without ':' and '#'"):
            recorder.objective(name, torch.ones(2))
    recorder.objective("a" * 246, torch.ones(2))
    with pytest.raises(TapError, match="letters"):
        recorder.objective("a" * 247, torch.ones(2))
    with pytest.raises(TapError, match="objective 'a': expected the shared tensor, got NoneType"):
        recorder.objective("a", None)  # type: ignore[arg-type]
    with pytest.raises(TapError, match="objective: the name is int"):
        recorder.objective(3, torch.ones(1))  # type: ignore[arg-type]
