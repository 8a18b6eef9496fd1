"""Steps, micro-steps, calls, repeats, modes and phases, for each way that people train."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.capture.core import Capture
from recorder.lifecycle.description import Description
from tests.rigs.capturing import EVERYTHING, Tiny, batch, flagged
from tests.rigs.waiting import PATIENCE_S, wait_until


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def keys(frame: object, *columns: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in frame[list(columns)].itertuples(index=False)]  # type: ignore[index]


def test_each_optimizer_step_is_a_step(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(3):
            train_step(model, optimizer, i)
    outputs = recording.rows(site="output", module_path="first")
    assert keys(outputs, "step", "micro_step", "call", "mode", "phase") == [
        (i, 0, 0, "train", "forward") for i in range(3)
    ]
    assert list(recording.rows(site="grad", module_path="first", name="weight").step) == [0, 1, 2]
    assert set(recording.rows(site="grad_output").phase) == {"backward"}
    assert recording.manifest["step_source"] == "optimizer"


def test_sgd_has_no_step_in_its_state_so_steps_are_counted(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            train_step(model, optimizer, i)
    assert recording.manifest["step_source"] == "counted"
    assert list(recording.rows(site="output", module_path="").step) == [0, 1]


def test_gradient_accumulation_numbers_its_micro_steps(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(3):
                model(batch(step * 3 + micro)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for site in ("output", "grad_output"):
        rows = recording.rows(site=site, module_path="second")
        assert keys(rows, "step", "micro_step", "call") == [(s, m, 0) for s in range(2) for m in range(3)]
    gradients = recording.rows(site="grad", module_path="second", name="bias")
    assert list(gradients.step) == [0, 1]
    assert gradients.micro_step.isna().all()


def test_several_forwards_before_one_backward_are_calls_of_one_micro_step(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            first, second = model(batch(step)), model(batch(step + 10))
            (first * second).sum().backward()
            optimizer.step()
    rows = recording.rows(site="output", module_path="first")
    assert keys(rows, "step", "micro_step", "call") == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    gradients = recording.rows(site="grad_output", module_path="first", step=0)
    assert sorted(gradients.call) == [0, 1]


def test_evaluation_before_training_is_recorded_at_the_first_step(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        model.eval()
        with torch.no_grad():
            model(batch(0))
            model(batch(1))
        model.train()
        train_step(model, optimizer)
    rows = recording.rows(site="output", module_path="first")
    assert keys(rows, "step", "mode", "micro_step", "call") == [
        (0, "no_grad", 0, 0),
        (0, "no_grad", 0, 1),
        (0, "train", 0, 0),
    ]


@pytest.mark.parametrize("with_grad", [False, True])
def test_evaluation_between_steps_keeps_the_step(tmp_path: Path, with_grad: bool) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(2):
            train_step(model, optimizer, i)
            model.eval()
            with torch.set_grad_enabled(with_grad):
                model(batch(9))
            model.train()
    rows = recording.rows(site="output", module_path="first")
    other = "eval" if with_grad else "no_grad"
    assert keys(rows, "step", "mode") == [(0, "train"), (0, other), (1, "train"), (1, other)]


def gan_step(generator: nn.Module, critic: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    real, fake = batch(seed), generator(batch(seed + 50))
    (critic(real).mean() - critic(fake.detach()).mean()).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    critic(fake).mean().backward()
    optimizers[1].step()
    optimizers[1].zero_grad()


@pytest.mark.parametrize(("named", "second_half"), [("", 1), ("SGD", 0)])
def test_in_a_gan_the_named_optimizer_decides_where_a_step_ends(tmp_path: Path, named: str, second_half: int) -> None:
    with flagged(tmp_path, step_optimizer=named) as recording:
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(critic.parameters()),
            torch.optim.SGD(generator.parameters(), lr=0.1),
        ]
        for i in range(2):
            gan_step(generator, critic, optimizers, i)
    assert recording.run.steps[:2] == [0, 1]
    roots = {root["name"] for root in recording.manifest["roots"]}
    assert roots == {"model", "model_1"}
    critic_calls = recording.rows(site="output", root="model_1")
    assert list(critic_calls.step) == [0, 0, second_half, 1, 1, 1 + second_half]


def test_two_optimizers_that_step_together_share_the_step(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizers = [
            torch.optim.SGD(model.first.parameters(), lr=0.1),
            torch.optim.SGD(model.second.parameters(), lr=0.2),
        ]
        for i in range(3):
            model(batch(i)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert list(recording.rows(site="output", module_path="").step) == [0, 1, 2]
    for path in ("first", "second"):
        assert list(recording.rows(site="grad", module_path=path, name="bias").step) == [0, 1, 2]
    assert set(recording.rows(site="scalar").name) == {"loss", "lr.SGD.0", "lr.SGD_1.0"}


def test_what_several_optimizers_update_in_a_step_has_a_row_for_each(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
            for part in (model.first, model.second, model, model.second)
        ]
        for i in range(3):
            model(batch(i)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    for site, num_before in (("grad", {"first": 2, "second": 3}), ("optim", {"first": 2, "second": 3})):
        for path, num in num_before.items():
            rows = recording.rows(site=site, module_path=path)
            rows = rows[rows.name.str.startswith("bias")]
            assert list(rows.groupby("step").size()) == [num] * 3
            assert not rows.duplicated(["step", "repeat"]).any()


def test_optimizers_that_share_a_parameter_later_or_for_one_step_have_rows_of_their_own(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        first, second = (
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.first, model.second)
        )
        for i in range(3):
            model(batch(i)).sum().backward()
            if i == 1:
                second.add_param_group({"params": [model.first.bias]})
            first.step()
            second.step()
            second.step()
            if i == 2:
                for _ in range(2):
                    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
    for site in ("grad", "optim"):
        for path, nums in (("first", [1, 3, 5]), ("second", [2, 2, 4])):
            rows = recording.rows(site=site, module_path=path)
            rows = rows[rows.name.str.startswith("bias")].sort_values(["step", "repeat"])
            assert keys(rows, "step", "repeat") == [(step, i) for step, num in enumerate(nums) for i in range(num)]


def test_an_optimizer_that_is_made_anew_each_step_keeps_its_name(tmp_path: Path) -> None:
    class Other:
        pass

    others: list[Other] = []
    with flagged(tmp_path) as recording:
        model = Tiny()
        for i in range(5):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(batch(i)).sum().backward()
            optimizer.step()
            del optimizer
            others += [Other() for _ in range(100)]  # of its size, so that the next has another address
    assert list(recording.rows(site="scalar", name="lr.SGD.0").step) == [0, 1, 2, 3, 4]
    assert {name for name in recording.rows(site="scalar").name if name.startswith("lr.")} == {"lr.SGD.0"}


def test_an_optimizer_that_is_made_anew_counts_though_a_schedule_keeps_the_first_one(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        for i in range(6):
            train_step(model, optimizer, i)
            schedule.step()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sorted(set(recording.rows(site="grad").step)) == [0, 1, 2, 3, 4], "the second one is known by the third"


def test_a_second_optimizer_of_the_same_parameters_that_steps_now_and_then_does_not_count(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, first)
        second = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(1, 9):
            train_step(model, first, i)
            if i % 4 == 0:
                second.step()
    assert sorted(set(recording.rows(site="param").step)) == list(range(9))


def test_a_container_of_optimizers_counts_once(tmp_path: Path) -> None:
    class Both(torch.optim.Optimizer):
        def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
            super().__init__([p for o in parts for g in o.param_groups for p in g["params"]], {})
            self.parts = parts

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for part in self.parts:
                part.step()

    with flagged(tmp_path) as recording:
        model = Tiny()
        both = Both([torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.first, model.second)])
        for i in range(2):
            model(batch(i)).sum().backward()
            both.step()
    gradients = recording.rows(site="grad", module_path="first", name="bias")
    assert keys(gradients, "step", "repeat") == [(0, 0), (1, 0)]


def test_a_resumed_optimizer_gives_the_first_step(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(7):
        train_step(model, optimizer, i)
    with flagged(tmp_path) as recording:
        train_step(model, optimizer)
        train_step(model, optimizer)
    assert list(recording.rows(site="output", module_path="").step) == [7, 8]
    assert recording.manifest["step_source"] == "optimizer"


@pytest.mark.parametrize("is_first", [True, False], ids=["its optimizer first", "attached first"])
def test_the_steps_of_another_model_are_not_the_first_step_of_this_one(tmp_path: Path, is_first: bool) -> None:
    before = Tiny()
    done = torch.optim.AdamW(before.parameters())
    for i in range(7):
        train_step(before, done, i)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters()) if is_first else None
    with recorder.attach(model, enabled=True, dir=tmp_path, rules="site=output") as attachment:
        train_step(model, optimizer or torch.optim.AdamW(model.parameters()))
    assert attachment.run_dir is not None
    assert set(recorder.open_run(attachment.run_dir).to_pandas()["step"]) == {0}


def test_an_optimizer_of_main_parameters_is_the_models_own(tmp_path: Path) -> None:
    model = Tiny()
    for parameter in model.parameters():
        parameter.main_param = parameter.detach().clone()  # type: ignore[attr-defined]
        parameter.main_param.grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW([p.main_param for p in model.parameters()])  # type: ignore[attr-defined]
    for _ in range(7):
        optimizer.step()
    with recorder.attach(model, enabled=True, dir=tmp_path, rules="site=output") as attachment:
        train_step(model, optimizer)
    assert attachment.run_dir is not None
    assert set(recorder.open_run(attachment.run_dir).to_pandas()["step"]) == {7}


def test_a_step_named_by_hand_overrules(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer)
        for number in (100, 90):
            recorder.step(number)
            train_step(model, optimizer)
    assert list(recording.rows(site="output", module_path="").step) == [0, 100, 90]
    assert recording.manifest["step_source"] == "user"


def test_a_step_named_before_the_first_call_of_the_model_is_the_first_one(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer)
    with flagged(tmp_path) as recording:
        for number in (100, 101):
            recorder.step(number)
            train_step(model, optimizer)
    assert list(recording.rows(site="output", module_path="").step) == [100, 101]
    assert recording.manifest["step_source"] == "user"


def test_a_step_that_the_scaler_skips_is_counted_with_its_gradients(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(3):
            loss = model(batch(i)).sum() * (float("inf") if i == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    skipped = recording.rows(site="scalar", name="skipped")
    assert keys(skipped, "step", "mean") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert list(recording.rows(site="scalar", name="grad_scale")["mean"]) == [1024.0, 1024.0, 512.0]
    gradients = recording.rows(site="grad", module_path="second", name="bias")
    assert list(gradients.step) == [0, 1, 2]
    assert gradients.nan_count[1] + gradients.inf_count[1] == 2
    assert gradients["mean"][0] == 3.0, "gradients are unscaled when they are read"


def test_gradients_of_a_closure_are_read_each_time_it_returns(tmp_path: Path) -> None:
    def minimise() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        model = Tiny()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        losses: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch(len(losses) % 2)).square().sum()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return losses, model.first.weight.detach().clone()

    expected = minimise()
    with flagged(tmp_path) as recording:
        actual = minimise()
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    gradients = recording.rows(site="grad", module_path="first", name="weight")
    assert len(gradients) == len(actual[0])
    assert set(gradients.step) == {0, 1}
    first = gradients[gradients.step == 0]
    assert list(first.repeat) == list(range(len(first)))


def test_the_learning_rate_of_a_closures_step_stands_at_the_step_of_its_forward(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch()).square().sum()
        loss.backward()
        return loss

    with flagged(tmp_path) as recording:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.step(closure)
    rates = recording.rows(site="scalar", name="lr.SGD.0")
    assert list(zip(rates.step, rates["mean"].round(6), strict=True)) == [(0, 0.01), (1, 0.02), (2, 0.03), (3, 0.04)]


def test_a_second_backward_of_a_retained_graph_is_a_repeat(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    rows = recording.rows(site="grad_output", module_path="first")
    assert keys(rows, "step", "micro_step", "call", "repeat") == [(0, 0, 0, 0), (0, 0, 0, 1)]


def test_several_steps_without_a_forward_are_repeats(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.step()
        train_step(model, optimizer)
    assert keys(recording.rows(site="grad", module_path="first", name="bias"), "step", "repeat") == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]


def test_a_frozen_teacher_that_runs_first_is_no_root(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        teacher, transform, model = Tiny().requires_grad_(False), nn.Flatten(), Tiny()
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(2):
            target = teacher(transform(batch(i)))
            (model(batch(i)) - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (root,) = recording.manifest["roots"]
    assert root["name"] == "model"
    assert len(recording.rows(site="output", module_path="")) == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_block_is_marked_and_its_gradient_recorded_once(tmp_path: Path, use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.block, self.embed(x), use_reentrant=use_reentrant)
            return self.head(hidden)  # type: ignore[no-any-return]

    with flagged(tmp_path) as recording:
        model = Checkpointed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            train_step(model, optimizer, i)
    rows = recording.rows(site="output", module_path="block.0")
    assert keys(rows, "step", "micro_step", "call", "mode", "phase") == [
        (step, 0, 0, "train", phase) for step in range(2) for phase in ("forward", "recompute")
    ]
    assert rows.fingerprint[0] == rows.fingerprint[1]
    gradients = recording.rows(site="grad_output", module_path="block.0")
    assert keys(gradients, "step", "call", "repeat") == [(0, 0, 0), (1, 0, 0)]
    assert len(recording.manifest["roots"]) == 1


def test_without_an_optimizer_nothing_is_a_root_and_the_exit_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with flagged(tmp_path), torch.no_grad():
        Tiny()(batch())
    assert not (tmp_path / "recordings").exists()
    assert "Tiny ran, but no optimizer trains it; RECORDER_ROOTS=any" in caplog.text


def test_in_inference_each_call_is_a_step_where_asked_for(tmp_path: Path) -> None:
    with flagged(tmp_path, roots="any") as recording, torch.no_grad():
        model = Tiny().eval()
        for i in range(3):
            model(batch(i))
    rows = recording.rows(site="output", module_path="second")
    assert keys(rows, "step", "mode", "call") == [(i, "no_grad", 0) for i in range(3)]
    assert list(recording.rows(site="param", module_path="first", name="bias").step) == [0, 1, 2]


def test_an_exception_in_a_forward_leaves_no_drift(tmp_path: Path) -> None:
    class Fragile(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            if x.isnan().any():
                raise ArithmeticError("bad batch")
            return self.second(self.act(hidden))  # type: ignore[no-any-return]

    with flagged(tmp_path) as recording:
        model = Fragile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            if i == 1:
                with pytest.raises(ArithmeticError, match="bad batch"):
                    model(batch(i) * float("nan"))
            train_step(model, optimizer, i)
    rows = recording.rows(site="output", module_path="second")
    assert keys(rows, "step", "micro_step", "call") == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    whole = recording.rows(site="output", module_path="")
    assert list(whole.step) == [0, 1, 2]


def test_a_look_that_is_late_does_not_undo_what_the_end_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = Description.writer

    def late(self: Description, capture: Capture, *args: Any) -> dict[str, Any]:
        if capture.roots and threading.current_thread() is not threading.main_thread():
            looking.set()
            wait_until(lambda: not capture.roots)
        return describe(self, capture, *args)

    looking = threading.Event()
    monkeypatch.setattr(Description, "writer", late)
    with flagged(tmp_path) as recording:
        model = Tiny()
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert looking.wait(10)
    assert [root["name"] for root in recording.manifest["roots"]] == ["model"]


def test_a_module_used_three_times_has_three_calls_and_lists_its_aliases(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.again = self.layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.layer(self.layer(x)))  # type: ignore[no-any-return]

    with flagged(tmp_path) as recording:
        model = Shared()
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(recording.rows(site="output", module_path="layer").call) == [0, 1, 2]
    (layer,) = (m for m in recording.manifest["roots"][0]["modules"] if m["path"] == "layer")
    assert layer["aliases"] == ["again"]


def test_a_look_at_shapes_in_eval_mode_before_training_does_not_stop_the_steps(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        model(batch())
        model.train()
        for i in range(3):
            train_step(model, optimizer, i)
            model.eval()
            model(batch(9))
            model.train()
    assert list(recording.rows(site="output", module_path="", mode="train").step) == [0, 1, 2]
    assert list(recording.rows(site="output", module_path="", mode="eval").step) == [0, 0, 1, 2]


@pytest.mark.parametrize("name", ["probe before training", "warm-up in evaluation mode", "probes between steps"])
def test_gradients_in_evaluation_mode_do_not_stop_the_steps(tmp_path: Path, name: str) -> None:
    with flagged(tmp_path, "site=output keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def probe() -> None:
            model.eval()
            model(batch(0)).square().sum().backward()
            optimizer.zero_grad()
            model.train()

        if name == "probe before training":
            probe()
        for step in range(6):
            model.train(not (name == "warm-up in evaluation mode" and step < 3))
            train_step(model, optimizer, step)
            if name == "probes between steps":
                probe()
                probe()
    frame = recording.rows(site="output", module_path="first")
    trained = frame[frame["mode"] == "train"] if name != "warm-up in evaluation mode" else frame
    assert trained["step"].tolist() == list(range(6))
    probes = frame[frame["mode"] == "eval"]
    if name == "probes between steps":
        assert probes["step"].tolist() == [step for step in range(6) for _ in range(2)]


def test_an_evaluation_in_another_thread_has_its_own_mode_and_moves_no_step(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=* keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer)
        is_inside, is_over = threading.Event(), threading.Event()

        def evaluate() -> None:
            with torch.no_grad():
                model(batch(0))

        def meet(module: nn.Module, args: object) -> None:
            if torch.is_grad_enabled():  # training is in its forward: an evaluation begins, and ends behind it
                thread.start()
                is_inside.wait(PATIENCE_S)
            else:
                is_inside.set()
                is_over.wait(PATIENCE_S)

        thread = threading.Thread(target=evaluate)
        handle = model.first.register_forward_pre_hook(meet)
        train_step(model, optimizer)
        is_over.set()
        thread.join()
        handle.remove()
        train_step(model, optimizer)
    frame = recording.rows(site="output", module_path="second")
    assert frame[frame["mode"] == "train"]["step"].tolist() == [0, 1, 2]
    assert len(frame[frame["mode"] == "no_grad"]) == 1
    assert set(recording.rows(site="grad_output")["mode"]) == {"train"}


def test_a_call_with_lent_parameters_does_not_rule_a_model_out(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        teacher = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for step in range(3):
            torch.func.functional_call(model, teacher, (batch(step),))
            train_step(model, optimizer, step)
    assert recording.rows(site="output", module_path="first")["step"].max() == 2


class OwnSGD(torch.optim.Optimizer):
    """An optimizer whose step takes what its author liked."""

    def __init__(self, parameters: Any, lr: float | None = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self, model: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("no step")
        assert model is None or isinstance(model, nn.Module)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.1 * parameter.grad


def test_a_step_that_takes_the_model_is_given_the_model_and_a_rate_of_none_is_no_rate(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = OwnSGD(model.parameters(), lr=None)
        for i in range(2):
            model(batch(i)).sum().backward()
            optimizer.step(model)
            optimizer.zero_grad()
    assert list(recording.rows(site="grad", module_path="first", name="bias").step) == [0, 1]
    assert recording.manifest["ledger"]["dropped"] == {}


def test_a_closure_that_is_an_object_keeps_all_that_it_has(tmp_path: Path) -> None:
    class Closure:
        num_calls = 0

        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def __call__(self) -> torch.Tensor:
            self.num_calls += 1
            loss: torch.Tensor = self.model(batch()).square().sum()
            loss.backward()
            return loss

    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert isinstance(closure, Closure)
            closure.model.zero_grad()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer, closure = Asks(model.parameters(), lr=0.1), Closure(model)
        for _ in range(2):
            optimizer.step(closure)
    assert closure.num_calls == 2
    gradients = recording.rows(site="grad", module_path="first", name="bias")
    assert keys(gradients, "step", "repeat") == [(0, 0), (1, 0)]


def test_an_optimizer_whose_step_raised_does_not_hide_another(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        first, second = OwnSGD(model.first.parameters()), torch.optim.SGD(model.second.parameters(), lr=0.1)
        for i in range(4):
            model(batch(i)).sum().backward()
            first.fails = i == 1
            if i <= 1:
                with contextlib.suppress(ArithmeticError):
                    first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    assert len(recording.rows(site="grad", module_path="second", name="bias")) == 4


def test_a_module_that_calls_itself_numbers_each_call(tmp_path: Path) -> None:
    class Countdown(Tiny):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.first(x).sum() * depth + (self(x + 1, depth - 1) if depth else 0)  # type: ignore[no-any-return]

    with flagged(tmp_path, rules="module='' site=input,output keep=tensor") as recording:
        Countdown()(batch())
    for call in range(3):
        assert torch.equal(recording.run.tensor("", site="input", name="x", call=call), batch() + call)
    inner = recording.run.tensor("", site="output", call=2)
    assert inner == 0


def test_a_module_that_joins_later_is_recorded_once_it_is_trained(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer)
        model.append(nn.Linear(4, 2))
        optimizer.add_param_group({"params": model[1].parameters()})
        for i in range(3):
            train_step(model, optimizer, i)
    assert list(recording.rows(site="output", module_path="0").step) == [0, 1, 2, 3]
    assert list(recording.rows(site="output", module_path="1").step) == [2, 3]
    assert list(recording.rows(site="grad", module_path="1", name="bias").step) == [2, 3]


def test_the_run_stays_where_the_program_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("RECORDER", "1")
    monkeypatch.setenv("RECORDER_DIR", "relative")
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model):
        train_step(model, optimizer)
        monkeypatch.chdir(tmp_path / "elsewhere")
        train_step(model, optimizer)
    assert recorder.open_run(tmp_path / "relative").steps == [0, 1]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_interrupted_forward_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    class Interrupted(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            if x.isnan().any():
                raise KeyboardInterrupt
            return self.second(hidden)  # type: ignore[no-any-return]

    with flagged(tmp_path) as recording:
        model = Interrupted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer)
        with pytest.raises(KeyboardInterrupt):
            model(batch() * float("nan"))
        with torch.no_grad():
            model(batch(5))
        train_step(model, optimizer)
    rows = recording.rows(site="output", module_path="second")
    assert keys(rows, "step", "mode", "call") == [(0, "train", 0), (1, "no_grad", 0), (1, "train", 0)]


def test_calls_of_an_attached_engine_are_steps_beside_the_optimizer_of_another_model(tmp_path: Path) -> None:
    trainer, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    with recorder.attach(engine, enabled=True, dir=tmp_path / "run", roots="any", rules=EVERYTHING), torch.no_grad():
        for _ in range(3):
            engine(torch.ones(1, 2))
    assert optimizer.param_groups
    rows = recorder.open_run(tmp_path / "run").table(columns=["site", "step"]).to_pydict()
    steps = {(site, step) for site, step in zip(rows["site"], rows["step"], strict=True)}
    assert {("output", 0), ("output", 2), ("param", 0)} <= steps


def test_a_training_that_goes_on_in_evaluation_mode_has_a_step_for_each_update(tmp_path: Path) -> None:
    """The first forward in this mode looks like a validation, and is of the step before."""
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            train_step(model, optimizer, step)
            if step == 2:
                model.eval()
                with torch.no_grad():
                    model(batch(9))
    grads = recording.rows(site="grad", module_path="first", name="weight")
    assert grads["step"].tolist() == list(range(6))
    outputs = recording.rows(site="output", module_path="first")
    assert outputs[outputs["mode"] == "eval"]["step"].tolist() == [2, 4, 5]
