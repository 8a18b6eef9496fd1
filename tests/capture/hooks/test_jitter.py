"""The setting `jitter`: inputs are moved by a last place, from the first call on, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.capture.hooks.jitter import jittered
from tests.rigs import jobs

PROGRAM = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x, *, words, more):
        assert words.dtype == torch.int64 and (words == 5).all()
        print("seen", (x != 1).all().item(), (more["y"] != 3).all().item())
        return super().forward(x) + more["y"].mean()
net = Net(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
state = torch.get_rng_state()
for _ in range(2):
    net(torch.ones(3, 4), words=torch.full((3,), 5), more={"y": torch.full((3,), 3.0)}).sum().backward()
    optimizer.step()
print("random state", torch.equal(state, torch.get_rng_state()))
"""


def test_under_the_flag_the_first_call_is_moved_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    finished = jobs.succeeded(jobs.program(tmp_path, "train.py", **jobs.recording(jitter="7")))
    assert finished.lines("seen") == ["seen True True"] * 2
    assert finished.lines("random state") == ["random state True"]
    assert finished.run.jitter == 7
    assert (finished.run.array("", site="input", name="x", step=0) != 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_element_is_moved_by_a_last_place_or_two(dtype: torch.dtype) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    eps = torch.finfo(dtype).eps
    apart = (jittered(values, 1).double() / values.double() - 1).abs()
    assert (apart > 0.4 * eps).all() and (apart < 2.1 * eps).all()
    assert torch.equal(jittered(values, 1), jittered(values, 1))
    assert not torch.equal(jittered(values, 1), jittered(values, 2))


def test_under_autocast_inputs_are_moved_by_a_last_place_of_the_type_in_which_the_model_computes(
    tmp_path: Path,
) -> None:
    net, inputs = nn.Linear(4, 4), torch.linspace(0.1, 2, 12).view(3, 4)
    with recorder.attach(net, enabled=True, dir=str(tmp_path), rules="site=input keep=tensor", jitter=1):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for is_autocast in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                loss = net(inputs).sum()
            loss.backward()
            optimizer.step()
    run = recorder.open_run(tmp_path)
    moved = [torch.from_numpy(run.array("", site="input", step=step)) for step in range(2)]
    assert (moved[0].bfloat16() != inputs.bfloat16()).all()
    assert ((moved[0] / inputs - 1).abs() < 1.1 * torch.finfo(torch.bfloat16).eps).all()
    assert (moved[1] != inputs).all() and ((moved[1] / inputs - 1).abs() < 2.1 * torch.finfo(torch.float32).eps).all()


def test_a_model_of_a_shorter_type_is_given_what_differs_in_that_type(tmp_path: Path) -> None:
    net, inputs = Casting(4, 4).bfloat16(), torch.linspace(0.1, 2, 12).view(3, 4)
    with recorder.attach(net, enabled=True, dir=str(tmp_path), rules="site=input keep=tensor", jitter=1):
        net(inputs).sum().backward()
    moved = torch.from_numpy(recorder.open_run(tmp_path).array("", site="input", step=0))
    assert (moved.bfloat16() != inputs.bfloat16()).all()


class Casting(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.down = nn.Linear(4, 1)
        self.seen: list[torch.Tensor] = []

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, words, use_reentrant=False)  # type: ignore[no-any-return]

    def block(self, words: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.embed(words))
        out: torch.Tensor = self.down(self.seen[-1])
        return out


def test_of_whole_numbers_the_embeddings_are_moved_and_recomputed_alike(tmp_path: Path) -> None:
    net = Words()
    words = torch.arange(5)
    with recorder.attach(net, enabled=True, dir=str(tmp_path), rules="site=output keep=stats", jitter=1):
        net(words).sum().backward()
    forward, recomputed = net.seen
    assert (forward != net.embed.weight[words]).all() and torch.equal(forward, recomputed)
    assert torch.equal(net.embed(words), net.embed.weight[words])  # off with the recording
