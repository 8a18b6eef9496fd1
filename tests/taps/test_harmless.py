"""A tap changes nothing of what a model computes, and a gradient is of the call that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.capturing import flagged

from .support import RULES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
]
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Views(nn.Module):
    """A view of an argument is changed in place afterwards, and the argument used."""

    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:2]

    def __init__(self) -> None:
        super().__init__()
        self.view = self.View()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.view(y).mul_(2)
        return y


class Flat(nn.Module):
    """Torch's own modules: a view, and an activation in place on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flatten, self.act = nn.Linear(4, 4), nn.Flatten(0), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + self.act(self.flatten(y)).sum()  # type: ignore[no-any-return]


class Cache(nn.Module):
    """A module hands out its buffer, which the caller changes."""

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = nn.Buffer(torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.cache

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keeper = nn.Linear(4, 4), self.Keeper()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.keeper(x).add_(x.detach())
        return x + self.keeper.cache


class Twice(nn.Module):
    """One tensor that an output holds twice."""

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pair = nn.Linear(4, 4), self.Pair()

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.pair(self.linear(x))
        one.mul_(3)
        return other  # type: ignore[no-any-return]


class Keeps(nn.Module):
    """An output is kept by its module, and changed later."""

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.kept: Tensor = self.linear(x) * 1.0
            return self.kept  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.keeper = self.Keeper()

    def forward(self, x: Tensor) -> Tensor:
        self.keeper(x).mul_(2)
        kept: Tensor = self.keeper.kept
        return kept


class Dicts(nn.Module):
    """A module hands on the container that it was given."""

    class Adds(nn.Module):
        def forward(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
            found["b"] = found["a"] * 2
            return found

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.adds = nn.Linear(4, 4), self.Adds()

    def forward(self, x: Tensor) -> Tensor:
        found = {"a": self.linear(x)}
        out = self.adds(found)
        out["c"] = found["b"] + 1
        result: Tensor = found["c"]
        return result


class Lists(nn.Module):
    """The same with a list."""

    class Appends(nn.Module):
        def forward(self, found: list[Tensor]) -> list[Tensor]:
            found.append(found[0] * 2)
            return found

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.appends = nn.Linear(4, 4), self.Appends()

    def forward(self, x: Tensor) -> Tensor:
        found = [self.linear(x)]
        out = self.appends(found)
        out.append(found[1] + 1)
        result: Tensor = found[2]
        return result


def run(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    output = model(x)
    return [output.detach().clone(), *torch.autograd.grad(output.square().sum(), parameters)]


MODELS = [Views, Flat, Cache, Twice, Keeps, Dicts, Lists]


@pytest.mark.parametrize(
    "cls, how",
    # torch.export refuses a tensor that is kept on a module, with taps and without.
    [(cls, how) for cls in MODELS for how in ("eager", "aot_eager", "export") if (cls, how) != (Keeps, "export")],
)
def test_what_shares_memory_is_never_parted(cls: type[nn.Module], how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = cls(), cls()
    model.load_state_dict(plain.state_dict())
    wanted = run(plain, list(plain.parameters()))
    recorder.instrument(model)
    x = torch.zeros(3, 4)
    made: Any
    if how == "export":
        made = torch.export.export(model, (x,)).module()
        found = run(made, list(made.parameters()))
    else:
        made = torch.compile(model, backend=how, fullgraph=True)
        with recorder.attach(made, enabled=True, dir=str(tmp_path), rules=RULES):
            found = run(made, list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_forward_mode_and_second_derivatives_pass_a_tap(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    x, tangent = torch.randn(4), torch.ones(4)

    def ask() -> list[Tensor]:
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(x, tangent))
            by_level = torch.autograd.forward_ad.unpack_dual(dual).tangent
        assert by_level is not None
        return [
            torch.func.jvp(model, (x,), (tangent,))[1],
            torch.func.jacfwd(model)(x),
            torch.func.hessian(lambda x: model(x).sum())(x),
            torch.func.jacrev(torch.func.jacrev(model))(x),
            by_level,
        ]

    wanted = ask()
    recorder.instrument(model)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        found = ask()
    assert wanted[2].abs().max() > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


class Calls(nn.Module):
    """One module called twice, of which the first, the second or both have a gradient."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.f = which, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "first":
            return self.f(x) * self.f(2 * x).detach()  # type: ignore[no-any-return]
        if self.which == "second":
            return self.f(x).detach() * self.f(2 * x)  # type: ignore[no-any-return]
        if self.which == "same":
            return self.f(x) + self.f(x)  # type: ignore[no-any-return]
        return self.f(x) + self.f(2 * x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("which, calls", [("first", [0]), ("second", [1]), ("same", [0, 1]), ("both", [0, 1])])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_gradient_belongs_to_its_call(which: str, calls: list[int], backend: str, tmp_path: Path) -> None:
    model = Calls(which)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with flagged(tmp_path, RULES, compiled="tap") as recording:
        torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(torch.randn(3, 4)).sum().backward()
    rows = recording.rows(module_path="f")
    assert sorted(rows[rows["site"] == "grad_output"]["call"]) == calls
    assert sorted(rows[rows["site"] == "output"]["call"]) == [0, 1]
    assert set(rows["repeat"]) == {0}


def test_models_of_one_class_are_told_apart(tmp_path: Path) -> None:
    one, other = (recorder.instrument(Calls("both")) for _ in range(2))
    with flagged(tmp_path, RULES) as recording:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, other)]
        for model in (one, other):
            model.compile(backend="aot_eager")
        between = one(torch.randn(3, 4))
        (other(between).sum() + other(torch.randn(3, 4)).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    rows = recording.rows(module_path="f", site="grad_output")
    assert rows.groupby("root").size().to_dict() == {"model": 2, "model_1": 4}
    with pytest.raises(recorder.errors.TapError, match="another model is instrumented as 'model'"):
        recorder.instrument(nn.Linear(1, 1), name="model")


@pytest.mark.parametrize("name", ["", 3, "x" * 300])
def test_a_wrong_name_is_refused_and_the_taps_that_were_there_stay(name: Any) -> None:
    model = recorder.instrument(nn.Linear(1, 1))
    with pytest.raises(recorder.errors.TapError, match="name"):
        recorder.instrument(model, name=name)
    assert len(model._forward_hooks) == 1


def test_training_in_eval_mode_and_looks_without_gradients_keep_their_modes(tmp_path: Path) -> None:
    model = recorder.instrument(nn.Sequential(nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules="site=output,grad_output keep=tensor"):
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        for _ in range(3):
            with torch.no_grad():
                model(x)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = recorder.open_run(tmp_path).to_pandas().query("module_path == '0'")
    trained = frame[frame["mode"] == "eval"]
    assert trained.groupby(["step", "site", "call"]).size().to_dict() == {
        (step, site, 0): 1 for step in range(3) for site in ("output", "grad_output")
    }
    assert len(frame[frame["mode"] == "no_grad"]) == 3


def test_a_name_that_nobody_made_is_no_hook() -> None:
    from recorder.taps import module_taps

    for name in ("recorder_tap_x", "recorder_tap_" + "a" * 64, "recorder_tap_"):
        with pytest.raises(AttributeError):
            getattr(module_taps, name)


def test_torchscript_says_which_tap_it_cannot_compile() -> None:
    model = recorder.instrument(nn.Sequential(nn.LSTM(4, 4)))
    with pytest.raises(recorder.errors.TapError, match=r"'0' \(LSTM\): leave it out"):
        torch.jit.script(model)
