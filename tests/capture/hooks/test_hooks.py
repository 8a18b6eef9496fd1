"""Hooks harm nothing: copies and pickles are inert, errors of ours stay ours, a compiler sees no difference."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.optimizer import register_optimizer_step_post_hook

import recorder
from recorder.analyze.doctor.expected import compare
from recorder.capture.core import Capture
from recorder.capture.hooks import callbacks
from recorder.capture.hooks.module_hooks import MODULES
from recorder.errors import ConfigError
from tests.rigs.capturing import EVERYTHING, Tiny, batch, flagged


def train(model: Any, parameters: Any, num_steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for i in range(num_steps):
        model(batch(i)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in parameters]


def test_a_copy_of_an_attached_model_is_not_recorded(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        train(model, list(model.parameters()), 1)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            assert torch.equal(twin(batch(5)), model(batch(5)))
    assert len(recording.rows(site="output", module_path="first", mode="no_grad")) == 1


def test_pickles_of_an_attached_model_load_where_recorder_is_not_installed(tmp_path: Path) -> None:
    with flagged(tmp_path):
        model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        train(model, list(model.parameters()), 1)
        (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
        torch.save(model, tmp_path / "model.pt")
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        expected = model(batch(7)).sum().item()
    script = f"""
        import sys
        sys.modules["recorder"] = None
        import pickle, torch
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))
        with open({str(tmp_path / "model.pickle")!r}, "rb") as file:
            model = pickle.load(file)
        again = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        assert model(x).sum().item() == again(x).sum().item() == {expected!r}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at_rest", [False, True])
def test_no_hook_of_a_process_that_loads_such_a_pickle_gets_the_number_of_one_of_ours(
    tmp_path: Path, at_rest: bool
) -> None:
    with flagged(tmp_path, "site=* keep=stats" + " steps=0" * at_rest):
        model = Tiny()
        train(model, list(model.parameters()), 2)
        model(batch(0))
        loaded = pickle.loads(pickle.dumps(model))
    kinds = ["_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"]
    numbers = [number for module in loaded.modules() for kind in kinds for number in getattr(module, kind)]
    assert len(numbers) >= 7
    assert min(numbers) > 1 << 32  # torch counts from 0


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, RecursionError, torch.OutOfMemoryError])
def test_an_error_of_ours_is_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    expected = train(model := Tiny(), list(model.parameters()))
    plain, calls = Capture.observe, []

    def fragile(self: Capture, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise kind("injected")
        plain(self, *args, **kwargs)

    monkeypatch.setattr(Capture, "observe", fragile)
    torch.manual_seed(0)
    with flagged(tmp_path) as recording:
        actual = train(model := Tiny(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    ledger = recording.manifest["ledger"]
    reason = "no_memory" if kind in (MemoryError, torch.OutOfMemoryError) else "hook_error"
    assert ledger["dropped"][reason] == len(calls) // 5 > 0
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    assert len([r for r in caplog.records if "injected" in r.getMessage()]) == min(5, len(recording.events(reason)))


def test_a_site_that_keeps_failing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(self: Any) -> Any:
        calls.append(1)
        raise RuntimeError("always")

    from recorder.capture.hooks.module import HookedModule

    monkeypatch.setattr(HookedModule, "_enter", broken)
    with flagged(tmp_path, rules="module=first site=output keep=stats") as recording:
        train(model := Tiny(), list(model.parameters()), 30)
    assert len(calls) == 20
    assert recording.manifest["ledger"]["dropped"] == {"hook_error": 20}


def test_every_hook_is_gone_after_close(tmp_path: Path) -> None:
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.modules import module as nn_module
    from torch.optim import optimizer as optim_module

    plain_step = GradScaler.step
    model = Tiny()
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=EVERYTHING):
        assert model.first._forward_hooks
        assert GradScaler.step is not plain_step
        train(model, list(model.parameters()), 1)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert GradScaler.step is plain_step
    assert not MODULES and not callbacks.ROOTS
    assert not nn_module._global_forward_pre_hooks
    assert not optim_module._global_optimizer_pre_hooks and not optim_module._global_optimizer_post_hooks
    train(model, list(model.parameters()), 1)


def test_attach_twice_records_once_and_close_and_attach_again_makes_another_writer(tmp_path: Path) -> None:
    model = Tiny()
    for _ in range(2):
        with recorder.attach(model, enabled=True, dir=tmp_path, rules="site=output keep=stats") as outer:
            with recorder.attach(model, enabled=True) as inner:
                train(model, list(model.parameters()), 1)
            assert inner.run_dir == outer.run_dir
            train(model, list(model.parameters()), 1)
            assert outer.flush()
            run_dir = outer.run_dir
            assert run_dir is not None
        frame = recorder.open_run(run_dir).to_pandas()
        assert list(frame[frame.module_path == "first"].step) == [0, 1]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_attachment_says_what_it_is_and_where_and_a_notebook_shows_it(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    off = recorder.attach(model)
    assert repr(off) == "<Attachment: not recording; enabled=True or RECORDER=1 turns recording on>"
    folder = tmp_path / "<b>"
    with recorder.attach(model, enabled=True, dir=str(folder), rules="site=output keep=stats") as attachment:
        model(torch.ones(1, 2))
        attachment.flush()
        assert repr(attachment).startswith(f"<Attachment: recording, '{folder}/")
        shown = attachment._repr_html_()
        assert "recording" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert "closed" in repr(attachment)


def test_attach_with_other_settings_during_a_recording_is_refused(tmp_path: Path) -> None:
    with (
        recorder.attach(Tiny(), enabled=True, dir=tmp_path),
        pytest.raises(ConfigError, match="a recording is under way with other settings than dir, rules"),
    ):
        recorder.attach(Tiny(), enabled=True, dir=tmp_path, rules="site=grad")


def test_no_graph_is_kept_alive(tmp_path: Path) -> None:
    class Square(torch.autograd.Function):
        contexts: ClassVar[list[weakref.ref[Any]]] = []

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            Square.contexts.append(weakref.ref(ctx))
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
            return 2 * saved[0] * gradients[0]

    class Squared(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(self.second(self.act(self.first(x))))  # type: ignore[no-any-return, no-untyped-call]

    with flagged(tmp_path):
        model = Squared()
        for i in range(3):
            model(batch(i))  # no backward: hooks on its outputs never fire
        assert [context() for context in Square.contexts] == [None] * 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.layer(x))) + x  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled_run(how: str, counter: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack()
    parameters = list(model.parameters())
    call: Any = model
    if how == "whole":
        call = torch.compile(model, backend=counter, fullgraph=True)
    elif how == "in place":
        model.compile(backend=counter, fullgraph=True)
    elif how == "regional":
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
    elif how == "function":

        def doubled(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = model(x)
            return out * 2

        call = torch.compile(doubled, backend=counter, fullgraph=True)
    if how in ("in place", "function"):
        with recorder.attach(model):  # the call of a compiled function does not show to discovery
            return train(call, parameters, 4)
    return train(call, parameters, 4)


@pytest.mark.parametrize("how", ["whole", "in place", "regional", "function"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_has_the_same_graphs_and_one_warning(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, recorded = CompileCounter(), CompileCounter()
    expected = compiled_run(how, plain)
    caplog.clear()
    with flagged(tmp_path) as recording:
        actual = compiled_run(how, recorded)
    assert (recorded.frame_count, recorded.op_count) == (plain.frame_count, plain.op_count)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len([r for r in caplog.records if r.name == "recorder"]) == 1
    gradients = recording.rows(site="grad", module_path="blocks.3.layer", name="weight")
    assert list(gradients.step) == [0, 1, 2, 3]
    inside = [m for m in recording.manifest["roots"][0]["modules"] if m["compiled"]]
    assert inside


@pytest.mark.filterwarnings("ignore")
def test_a_model_compiled_in_place_is_not_seen_and_one_line_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    with flagged(tmp_path):
        model = Stack()
        model.compile(backend="eager")
        train(model, list(model.parameters()))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "recorder"]
    assert "SGD stepped, but no module with its parameters was seen to run" in line and "attach" in line


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_step_before_the_first_forward_raises_nothing_in_hooks_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lr: float
) -> None:
    """`get_state_dict` of torch makes such a step, with a learning rate of 0, before it loads a checkpoint."""
    steps: list[object] = []
    with flagged(tmp_path):
        handle = register_optimizer_step_post_hook(lambda *words: steps.append(words))
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.zeros(2)
        torch.optim.SGD([weight], lr).step()
        handle.remove()
    assert len(steps) == 1
    lines = [r.getMessage() for r in caplog.records if r.name == "recorder"]
    assert ["SGD stepped, but no module" in line for line in lines] == [True] * (lr > 0)


@pytest.mark.filterwarnings("error")
def test_a_compiled_module_is_called_without_a_warning_of_torch(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with flagged(tmp_path):
        model = Stack()
        compiled: Any = torch.compile(model, backend="eager")
        train(compiled, list(model.parameters()))
        train(compiled, list(model.parameters()))


def test_the_users_own_global_hook_is_still_warned_of(tmp_path: Path) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    torch._dynamo.reset()
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with flagged(tmp_path), pytest.warns(UserWarning, match="global hooks on modules"):
            torch.compile(Stack(), backend="eager")(batch())
    finally:
        handle.remove()


def test_an_exception_of_the_users_signal_handler_is_never_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TimeIsUpError(Exception):
        pass

    num_raised = num_seen = 0
    lost: list[object] = []  # raised while Python freed an object: it drops those, with or without a recorder
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def ring(*args: Any) -> None:
        nonlocal num_raised
        num_raised += 1
        raise TimeIsUpError

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with flagged(tmp_path, rules="site=output keep=stats"):
            model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
            model(batch())
            for number in range(300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.002)
                    while num_raised == number:  # until it rang, also where Python dropped what it raised
                        model(batch())
                except TimeIsUpError:
                    num_seen += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_seen + len(lost) == num_raised == 300
    assert len(lost) < 30


# Said by torch of its own code: dynamo looks at a graph's inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_hooks_of_the_users_are_compiled_beside_ours(tmp_path: Path) -> None:
    class Add:
        def __init__(self, number: float) -> None:
            self.number = number

        def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + self.number

    model = Tiny()
    model.first.register_forward_hook(Add(2.0))
    model.register_forward_hook(Add(3.0))
    expected = model(batch())
    with recorder.attach(model, enabled=True, dir=tmp_path, rules="site=output keep=stats"):
        assert torch.equal(torch.compile(model, backend="eager")(batch()), expected)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, backend="eager")(batch()), expected)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch 2.9 does not say so
def test_scripting_a_recorded_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with flagged(tmp_path):
        train(model := Tiny(), list(model.parameters()), 1)
        with pytest.raises(RuntimeError, match="without RECORDER=1"):
            torch.jit.script(model)


def test_a_model_that_grew_while_attached_is_let_go_with_its_attachment(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=EVERYTHING):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            model(batch(i)).sum().backward()
            if i == 1:
                model.append(nn.Linear(4, 4))
                optimizer.add_param_group({"params": model[1].parameters()})
            optimizer.step()
    assert not MODULES and not callbacks.ROOTS
    assert not any(module._forward_hooks for module in model.modules())
    run = recorder.open_run(tmp_path)
    assert "1" in run.module_paths
    assert [writer.state for writer in run.writers] == ["closed"]


def test_models_that_are_gone_leave_nothing_but_their_description(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="site=grad keep=stats") as recording:
        for _ in range(3):
            train(model := Tiny(), list(model.parameters()), 2)
            del model
        assert len(callbacks.ROOTS) == 1
    assert [root["name"] for root in recording.manifest["roots"]] == ["model", "model_1", "model_2"]


class Sink(torch.autograd.Function):
    """Hands no gradient on to its second argument, as DDP's does for an output that the loss does not use."""

    @staticmethod
    def forward(ctx: Any, used: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return used.clone(), unused.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


class TwoOutputs(Tiny):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {"y": y, "aux": y * 2}


def test_no_gradient_is_neither_recorded_nor_dropped(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = TwoOutputs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            outputs = model(batch(i))
            Sink.apply(outputs["y"], outputs["aux"])[0].square().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    account = recording.manifest["ledger"]
    assert (account["dropped"], account["observed"]) == ({}, account["written"])
    assert list(recording.rows(module_path="", site="grad_output").name) == ["y", "y"]
    assert not recording.manifest["events"]


def test_hooks_of_the_user_on_a_tensor_of_ours_fire_and_can_be_taken_off(tmp_path: Path) -> None:
    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y.register_hook(lambda gradient: seen.append("before ours"))
            return y

    seen: list[str] = []
    model = nn.Sequential(Hooked(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    def after_ours(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: seen.append("after ours"))
        output.register_hook(lambda gradient: seen.append("taken off")).remove()

    for module in model:
        module.register_forward_hook(after_ours)
    with flagged(tmp_path, "leaf=yes site=grad_output,grad_input keep=tensor") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
    assert sorted(seen) == ["after ours"] * 3 + ["before ours"]
    rows = recording.rows()
    assert sorted(rows.site) == ["grad_input"] * 2 + ["grad_output"] * 3
    assert recording.array("2", site="grad_output").tolist() == [[1.0, 1.0]] * 3


def test_the_manifest_says_which_learning_rate_each_parameter_has(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    groups: list[dict[str, Any]] = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 1e-2}]
    adam = torch.optim.AdamW(groups)
    sgd = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with flagged(tmp_path, "site=param,scalar keep=stats") as found:
        for step in range(2):
            model(torch.randn(2, 4)).sum().backward()
            if step == 1:
                sgd.add_param_group({"params": [model[2].weight]})
            adam.step()
            sgd.step()
    rates = {path: dict(module.rates) for (_, path), module in found.run.modules.items() if module.params}
    assert rates == {
        "0": {"weight": "lr.AdamW.0", "bias": "lr.AdamW.1"},
        "1": {"weight": "lr.SGD.0", "bias": "lr.SGD.0"},
        "2": {"weight": "lr.SGD.1"},
        "3": {},
    }


@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "orthogonal"])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_a_parametrisation_that_runs_outside_the_model_is_no_root(
    tmp_path: Path, kind: str, is_read_before: bool
) -> None:
    make = getattr(nn.utils.parametrizations, kind)
    with flagged(tmp_path) as recording:
        model = nn.Sequential(make(nn.Linear(4, 4)), nn.ReLU(), make(nn.Linear(4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            penalty = cast(torch.Tensor, model[0].weight).square().mean() if is_read_before else 0.0
            (model(torch.randn(3, 4)).square().mean() + penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    (root,) = recording.manifest["roots"]
    assert "0.parametrizations.weight" in [module["path"] for module in root["modules"]]
    assert set(recording.rows(module_path="", site="output").step) == {0, 1, 2}
    assert compare(recording.run).problems == []
