"""Units lie along the dim that the module's class has, or that a rule names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recorder
from recorder.errors import ConfigError, LookupFailedError
from recorder.rules import parse_rules
from tests.rigs.capturing import Recording, flagged


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.up = nn.ConvTranspose2d(5, 2, 2)
        self.act = nn.ReLU()
        self.head = nn.Linear(2 * 3 * 3, 7)
        self.layer_norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = self.embed(tokens).reshape(-1, 3, 4, 4)
        hidden = self.act(self.up(self.norm(self.conv(image))))
        recorder.tap("hidden", hidden)
        return self.layer_norm(self.head(hidden.flatten(1))) * self.scale  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    rules = "site=* keep=tensor,units; module=act keep=units unit_dim=1"
    with flagged(tmp_path_factory.mktemp("units"), rules) as found:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(0, 11, (2, 4))).square().mean().backward()
            optimizer.step()
    return found


@pytest.mark.parametrize(
    ("module", "site", "name", "dim"),
    [
        ("embed", "output", "", 2), ("conv", "input", "input", 1), ("conv", "output", "", 1),
        ("conv", "grad_output", "", 1), ("norm", "output", "", 1), ("up", "output", "", 1), ("act", "output", "", 1),
        ("head", "output", "", 1), ("layer_norm", "output", "", 1), ("embed", "param", "weight", 1),
        ("conv", "param", "weight", 0), ("conv", "grad", "weight", 0), ("conv", "param", "bias", 0),
        ("up", "param", "weight", 1), ("up", "param", "bias", 0), ("head", "grad", "weight", 0),
        ("norm", "buffer", "running_mean", 0), ("", "tap", "hidden", 3), ("up", "optim", "weight.exp_avg", 1),
    ],
)  # fmt: skip
def test_each_value_has_the_units_of_what_its_module_gives(
    recording: Recording, module: str, site: str, name: str, dim: int
) -> None:
    phase = "forward" if site == "tap" else None
    found = recording.run.units(module, site, step=1, name=name, phase=phase)
    array = recording.run.array(module, site, step=1, name=name, phase=phase)
    others = tuple(i for i in range(array.ndim) if i != dim)
    assert (found.dim, len(found)) == (dim, array.shape[dim])
    assert found.absmax.tolist() == abs(array).max(others).tolist()
    assert found.sum == pytest.approx(array.astype(float).sum(others), abs=1e-9)
    assert found.zero_count.tolist() == (array == 0).sum(others).tolist()


def test_a_value_without_dims_has_none_and_says_so(recording: Recording) -> None:
    with pytest.raises(LookupFailedError, match="0 dims, none of which is 0"):
        recording.run.units("", "param", step=1, name="scale")


def test_a_rule_that_names_a_dim_is_read_and_written_alike() -> None:
    (rule,) = parse_rules("module=act site=output keep=units unit_dim=-2")
    assert (rule.unit_dim, parse_rules(rule.text)) == (-2, (rule,))


@pytest.mark.parametrize("text", ["keep=units unit_dim=x", "keep=units unit_dim=1.5", "keep=stats unit_dim=1"])
def test_a_dim_that_is_none_or_of_no_units_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unit_dim"):
        parse_rules(text)
