"""The loss that the recorder finds by itself: the tensor whose backward is called, as the scalar ``loss``."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.analyze.diff.diff import diff
from tests.rigs.capturing import flagged

RULES = "site=scalar,output keep=stats"


engine: Any = torch.autograd


def losses(folder: Path, name: str = "loss") -> list[Any]:
    """Step, number within the step and value of each."""
    frame: Any = recorder.open_run(folder).to_pandas(
        columns=["step", "repeat", "site", "name", "mean", "note", "micro_step"]
    )
    found = frame[(frame.site == "scalar") & (frame.name == name)]
    return [(int(row.step), int(row.repeat), float(row.mean)) for row in found.itertuples()]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, after: Callable[[int, torch.Tensor], None] = lambda step, loss: None) -> list[float]:
    """Three steps of two micro-batches each; their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        for part in range(2):
            loss = model(inputs(2 * step + part)).square().mean()
            loss.backward()
            found.append(loss.item())
            loss.detach().zero_()  # the program may reuse it
        optimizer.step()
        optimizer.zero_grad()
        after(step, loss)
    return found


def test_each_backward_is_a_row_of_its_step_and_training_is_not_changed(tmp_path: Path, model: nn.Module) -> None:
    wrapped = engine._engine_run_backward, torch.amp.GradScaler.scale
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = train(model)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        assert wrapped != (engine._engine_run_backward, torch.amp.GradScaler.scale)
        assert train(model) == plain
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    assert losses(tmp_path) == [(number // 2, number % 2, pytest.approx(loss)) for number, loss in enumerate(plain)]
    assert wrapped == (engine._engine_run_backward, torch.amp.GradScaler.scale)
    (array,) = {recorder.open_run(tmp_path).array("", site="scalar", name="loss", step=2, repeat=1).item()}
    assert array == plain[5]


def test_a_loss_that_the_program_gives_stands_alone(tmp_path: Path, model: nn.Module) -> None:
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        train(model, lambda step, loss: recorder.scalar("loss", float(step)))
    assert losses(tmp_path) == [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0)]


def test_without_a_rule_for_it_nothing_is_wrapped(tmp_path: Path, model: nn.Module) -> None:
    plain = engine._engine_run_backward
    for rules in ("site=output keep=stats", "site=scalar name=lr* keep=stats", "site=scalar rank=1"):
        with recorder.attach(model, enabled=True, dir=str(tmp_path / rules[:12]), rules=rules):
            assert engine._engine_run_backward is plain


def test_under_gradscaler_it_is_the_loss_before_it_was_scaled(tmp_path: Path, model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        for step in range(3):
            loss = model(inputs(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append((step, 0, pytest.approx(loss.item())))
    assert losses(tmp_path) == found


class Reentrant(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


def test_a_backward_inside_a_backward_and_gradients_alone_are_no_losses(tmp_path: Path, model: nn.Module) -> None:
    outer = Reentrant(model)
    x = inputs(0).requires_grad_()
    with recorder.attach(outer, enabled=True, dir=str(tmp_path), rules=RULES):
        torch.autograd.grad(outer.inner(x).sum(), x)
        outer(x).backward(torch.ones(3, 2))
        loss = outer(x).square().sum()
        loss.backward()
    assert losses(tmp_path) == [(0, 0, pytest.approx(loss.item()))]


class WithLoss(nn.Module):
    """A model whose output carries a loss, as those of Hugging Face do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.inner(x)
        return {"loss": found.square().mean(), "logits": found}


def evaluate(model: nn.Module, mode: Any = torch.no_grad) -> float:
    """The mean loss of three batches."""
    model.eval()
    with mode():
        found = [model(inputs(100 + number))["loss"] for number in range(3)]
    model.train()
    return float(sum(loss.item() for loss in found)) / 3


def epochs(model: nn.Module, after: Callable[[nn.Module], float]) -> list[float]:
    """Three epochs of two steps each; what `after` returns for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        for step in range(2):
            model(inputs(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(after(model))
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_mean_loss_of_an_evaluation_is_a_scalar_and_changes_nothing(
    tmp_path: Path, model: nn.Module, mode: Any
) -> None:
    outer = WithLoss(model)
    state = {name: value.clone() for name, value in outer.state_dict().items()}
    plain = epochs(outer, lambda model: evaluate(model, mode))
    after = {name: value.clone() for name, value in outer.state_dict().items()}
    outer.load_state_dict(state)
    with recorder.attach(outer, enabled=True, dir=str(tmp_path), rules=RULES):
        assert epochs(outer, lambda model: evaluate(model, mode)) == plain
    assert all(torch.equal(value, after[name]) for name, value in outer.state_dict().items())
    assert losses(tmp_path, "eval_loss") == [
        (2 * epoch + 1, 0, pytest.approx(loss)) for epoch, loss in enumerate(plain)
    ]


class Pair(WithLoss):
    """A model that returns a pair in which no name says what is the loss, with a number that is none."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return found["logits"], (found["loss"].square(), found["loss"])


@pytest.mark.parametrize(
    ("backward", "is_found"),
    [
        (lambda loss, other, step: (2 * (loss / 4.0)).backward(), True),
        (lambda loss, other, step: loss.backward(), True),
        (lambda loss, other, step: (-1 * loss).backward(), False),
        (lambda loss, other, step: (other.backward(retain_graph=True), loss.backward()), False),
        (lambda loss, other, step: (other if step == 0 else loss).backward(), None),
    ],
    ids=["scaled", "as it is", "negative", "two", "another first"],
)
def test_the_loss_of_an_evaluation_stands_where_that_of_the_training_was(
    tmp_path: Path, model: nn.Module, backward: Any, is_found: bool | None
) -> None:
    outer, found = Pair(model), []
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.01)
    with recorder.attach(outer, enabled=True, dir=str(tmp_path), rules=RULES):
        for step in range(6):
            _, (other, loss) = outer(inputs(step))
            backward(loss, other, step)
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                outer.eval()
                with torch.no_grad():
                    found.append((step, 0, pytest.approx(float(sum(outer(inputs(n))[1][1] for n in range(2)) / 2))))
                outer.train()
    assert losses(tmp_path, "eval_loss") == (found[1:] if is_found is None else found if is_found else [])


def test_a_prediction_is_no_loss_of_an_evaluation(tmp_path: Path, model: nn.Module) -> None:
    class Either(WithLoss):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x)["loss"] if self.training else self.inner(x)[0, :1]

    with recorder.attach(outer := Either(model), enabled=True, dir=str(tmp_path), rules=RULES):
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.01)
        for step in range(4):
            outer(inputs(step)).backward()
            optimizer.step()
            outer.eval()
            with torch.no_grad():
                outer(inputs(step))
            outer.train()
    assert losses(tmp_path, "eval_loss") == []


def test_a_loss_without_gradients_in_training_mode_is_no_evaluation(tmp_path: Path, model: nn.Module) -> None:
    def peek(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(inputs(0))["loss"])

    with recorder.attach(outer := WithLoss(model), enabled=True, dir=str(tmp_path), rules=RULES):
        epochs(outer, peek)
    assert losses(tmp_path, "eval_loss") == []


def test_a_validation_loss_that_the_program_gives_stands_alone(tmp_path: Path, model: nn.Module) -> None:
    def told(model: nn.Module) -> float:
        recorder.scalar("val_loss", loss := evaluate(model))
        return loss

    with recorder.attach(outer := WithLoss(model), enabled=True, dir=str(tmp_path), rules=RULES):
        found = epochs(outer, told)
    assert losses(tmp_path, "eval_loss") == []
    assert [loss for _, _, loss in losses(tmp_path, "val_loss")] == pytest.approx(found)


def test_an_error_in_the_loss_of_an_evaluation_costs_only_this_loss(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(value: Any) -> Any:
        raise RuntimeError("no such value")

    with recorder.attach(outer := WithLoss(model), enabled=True, dir=str(tmp_path), rules=RULES):
        monkeypatch.setattr("recorder.capture.program_values.scalars.local_loss", fails)
        epochs(outer, evaluate)
    assert losses(tmp_path, "eval_loss") == []
    frame: Any = recorder.open_run(tmp_path).to_pandas(columns=["step", "site"])
    assert set(frame[frame.site == "output"].step) == set(range(6))


@pytest.fixture
def fresh_dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's own, where a graph goes on after a backward
def test_what_is_compiled_has_the_graphs_that_it_has_without(
    tmp_path: Path, model: nn.Module, fresh_dynamo: Any
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = compiled(x).square().mean()
        loss.backward()
        torch.autograd.backward(compiled(x).mean())
        found: torch.Tensor = loss.detach()
        return found

    counts = []
    for folder in (None, tmp_path):
        torch._dynamo.reset()
        fresh_dynamo.clear()
        compiled = torch.compile(model, backend="aot_eager")
        whole = torch.compile(step, backend="aot_eager")
        settings: dict[str, Any] = {"enabled": folder is not None, "dir": str(folder), "rules": "site=scalar"}
        with recorder.attach(model, **settings):
            found = [whole(inputs(number)).item() for number in range(3)]
        counts.append({kind: dict(fresh_dynamo[kind]) for kind in ("stats", "graph_break", "recompile")})
    assert [counts[0]["stats"].get("unique_graphs")] == [counts[1]["stats"].get("unique_graphs")]
    assert sum(counts[0]["graph_break"].values()) == sum(counts[1]["graph_break"].values())
    assert counts[0]["recompile"] == counts[1]["recompile"]
    assert [value for _, _, value in losses(tmp_path)][::2] == [pytest.approx(value) for value in found]


def test_an_error_of_ours_there_is_counted_and_does_not_reach_training(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no loss today")

    monkeypatch.setattr("recorder.capture.program_values.scalars.Scalars.add_loss", fails)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        train(model)
    run = recorder.open_run(tmp_path)
    assert losses(tmp_path) == []
    assert [writer.balance.dropped for writer in run.writers] == [{"hook_error": 6}]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


def test_an_error_in_the_backward_has_no_frame_of_ours(tmp_path: Path, model: nn.Module) -> None:
    fails: Any = Fails

    def functions() -> list[str]:
        with pytest.raises(ValueError, match="no gradient today") as raised:
            fails.apply(model(inputs(0)).sum()).backward()
        return [entry.name for entry in raised.traceback]

    plain = functions()
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        recorded = functions()
    assert recorded == plain and recorded[-1] == "backward"


def test_a_run_with_losses_equals_one_from_before_there_were_any(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("with", "without"):
        model.load_state_dict(state)
        if name == "without":
            monkeypatch.setattr("recorder.capture.program_values.scalars.Scalars.add_loss", lambda *args: None)
        with recorder.attach(model, enabled=True, dir=str(tmp_path / name), rules="site=* keep=tensor,stats"):
            train(model)
    runs = [recorder.open_run(tmp_path / name) for name in ("with", "without")]
    assert runs[0].num_rows == runs[1].num_rows + 6
    for a, b in (runs, reversed(runs)):
        found = diff(a, b)
        assert found.is_equal and not found.culprits


def clipped(folder: Path, name: str) -> list[float]:
    frame: Any = recorder.open_run(folder).to_pandas(columns=["step", "site", "name", "mean"])
    return [float(value) for value in frame[(frame.site == "scalar") & (frame.name == name)]["mean"]]


def clip_all(model: nn.Module, folder: Path | None, clip: Callable[[Any, float], torch.Tensor]) -> list[float]:
    """Three steps that are clipped; their norms before the clip. The second one has a NaN, and the last no limit."""
    norms, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=folder is not None, dir=str(folder), rules=RULES):
        for step, limit in enumerate((1e-3, 1e-3, float("inf"))):
            model(inputs(step)).square().mean().backward()
            if step == 1:
                next(model.parameters()).grad[0] = torch.nan  # type: ignore[index]
            norms.append(clip(list(model.parameters()), limit).item())
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("how", ["imported before", "by attribute", "in two calls", "compiled"])
def test_the_norm_before_a_clip_is_a_scalar_and_the_clip_is_not_changed(
    tmp_path: Path, model: nn.Module, how: str
) -> None:
    def in_two_calls(parameters: Any, limit: float) -> torch.Tensor:
        parameters = list(parameters)
        norm = nn.utils.get_total_norm([one.grad for one in parameters])
        nn.utils.clip_grads_with_norm_(parameters, limit, total_norm=norm)
        return norm

    kinds: dict[str, Any] = {
        "imported before": clip_grad_norm_,
        "by attribute": lambda parameters, limit: nn.utils.clip_grad_norm_(parameters, limit, foreach=False),
        "in two calls": in_two_calls,
        "compiled": torch.compile(lambda *args: clip_grad_norm_(*args), backend="eager", fullgraph=True),
    }
    wrapped = clip_grad._clip_grads_with_norm_, nn.utils.clip_grads_with_norm_
    state = {name: value.clone() for name, value in model.state_dict().items()}
    norms = clip_all(model, tmp_path, kinds[how])
    assert (clip_grad._clip_grads_with_norm_, nn.utils.clip_grads_with_norm_) == wrapped, "they are put back"
    recorded = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    plain = clip_all(model, None, kinds[how])
    assert norms[::2] == plain[::2]
    assert all(torch.equal(value, recorded[name]) for name, value in model.state_dict().items())
    is_seen = how != "compiled"
    assert clipped(tmp_path, "clip.norm") == pytest.approx([norms[0], 0.0, norms[2]] if is_seen else [])
    assert clipped(tmp_path, "clip.max_norm") == [1e-3, 1e-3][: 2 * is_seen], "no limit is no number"


def test_a_clip_to_an_infinite_tensor_has_a_finite_limit_and_torchs_function_can_be_pickled(
    tmp_path: Path, model: nn.Module
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules="site=scalar keep=stats"):
        model(torch.ones(2, 4)).sum().backward()
        clip_grad_norm_(model.parameters(), cast("float", torch.tensor(math.inf)))
        clip_grad_norm_(model.parameters(), 10**30)
        optimizer.step()
        assert pickle.loads(pickle.dumps(nn.utils.clip_grads_with_norm_)) is nn.utils.clip_grads_with_norm_
    assert all(map(math.isfinite, clipped(tmp_path, "clip.max_norm")))
    assert len(clipped(tmp_path, "clip.max_norm")) == 2


def test_an_error_of_a_clip_has_no_frame_of_ours(tmp_path: Path, model: nn.Module) -> None:
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        model(inputs(0)).square().mean().backward()
        with pytest.raises(TypeError) as raised:
            nn.utils.clip_grads_with_norm_(model.parameters(), object(), torch.ones(()))  # type: ignore[arg-type]
    assert not any("recorder" in str(entry.path) for entry in raised.traceback[1:])


@pytest.mark.parametrize("num_critic_steps", [1, 3])
@pytest.mark.parametrize("by", ["flag", "attach"])
def test_of_two_models_each_loss_is_of_the_one_that_is_updated_next(
    tmp_path: Path, by: str, num_critic_steps: int
) -> None:
    """The generator's loss is computed by the discriminator, which is called last for both losses."""
    makes, judges = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=1e-3) for model in (makes, judges)}
    known: dict[nn.Linear, list[float]] = {makes: [], judges: []}

    def update(model: nn.Linear, loss: torch.Tensor) -> None:
        optimizers[model].zero_grad()
        loss.backward()
        optimizers[model].step()
        known[model].append(loss.item())

    def go() -> None:
        for _ in range(24):
            for _ in range(num_critic_steps):
                update(judges, judges(makes(torch.randn(8, 2)).detach()).square().mean() + 1)
            update(makes, judges(makes(torch.randn(8, 2))).square().mean())

    if by == "flag":
        with flagged(tmp_path, RULES) as recording:
            go()
        run, names = recording.run, {makes: "model", judges: "model_1"}
    else:
        names = {makes: "makes", judges: "judges"}
        with (
            recorder.attach(makes, enabled=True, dir=str(tmp_path), rules=RULES, name="makes"),
            recorder.attach(judges, enabled=True, name="judges"),
        ):
            go()
        run = recorder.open_run(tmp_path)
    frame: Any = run.to_pandas(columns=["seq", "root", "site", "name", "mean"])
    found = frame[(frame.site == "scalar") & (frame.name == "loss")].sort_values("seq")
    for model, losses_of_model in known.items():
        assert found[found.root == names[model]]["mean"].tolist() == pytest.approx(losses_of_model, rel=1e-6)
