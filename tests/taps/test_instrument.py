"""Where taps are put, what they leave alone, and how they are taken out again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import recorder
from recorder.taps import module_taps, ops
from tests.rigs.capturing import Tiny, flagged
from tests.rigs.capturing import batch as tiny_batch

from .support import RULES, Block, Net, assert_same, batch, make, plain_hooks, recorded, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that runs a graph as it is, and keeps it."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        self.made.append(graph)
        return graph.forward

    @property
    def num_taps(self) -> int:
        return sum("recorder" in str(node.target) for graph in self.made for node in graph.graph.nodes)


class Breaks(nn.Module):
    """A graph before the break and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(4)
        self.second = Block(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]


def attached(model: Any, folder: Path, run: Callable[[], object], rules: str = RULES) -> recorder.Run:
    with recorder.attach(model, enabled=True, dir=str(folder), rules=rules):
        run()
    return recorder.open_run(folder)


def test_graph_breaks_lose_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Breaks(), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    compiled = torch.compile(recorder.instrument(model), backend="aot_eager")
    assert_same(recorded(attached(compiled, tmp_path, lambda: train(compiled, x))), wanted, exactly=True)


def test_a_recompile_keeps_its_taps(tmp_path: Path) -> None:
    model = make()
    compiled = torch.compile(recorder.instrument(model), backend="eager", fullgraph=True, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        for rows in (3, 5, 3):
            train(compiled, batch(rows))
            optimizer.step()
            optimizer.zero_grad()

    run_ = attached(compiled, tmp_path, run)
    for step, rows in enumerate((3, 5, 3)):
        wanted = plain_hooks(model, lambda plain, rows=rows: train(plain, batch(rows)))  # type: ignore[misc]
        assert_same(recorded(run_, step=step), wanted, exactly=True)


@pytest.mark.parametrize("how", ["wrapped", "in place", "block"])
def test_what_runs_eagerly_past_the_limit_of_recompilations_is_recorded(how: str, tmp_path: Path) -> None:
    model = recorder.instrument(make())
    options: Any = {"backend": "aot_eager", "dynamic": False}
    called = torch.compile(model, **options) if how == "wrapped" else model
    if how != "wrapped":
        (model if how == "in place" else model.blocks).compile(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        for rows in (3, 4, 5, 3):
            train(called, batch(rows))
            optimizer.step()
            optimizer.zero_grad()

    with torch._dynamo.config.patch(recompile_limit=2):
        run_ = attached(called, tmp_path, run)
    for step, rows in enumerate((3, 4, 5, 3)):
        wanted = plain_hooks(make(), lambda plain, rows=rows: train(plain, batch(rows)))  # type: ignore[misc]
        assert_same(recorded(run_, step=step), wanted, exactly=True)


def test_what_a_compiler_is_told_to_leave_alone_is_recorded(tmp_path: Path) -> None:
    model, x = make(), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    block: Any = model.blocks[1]
    block.forward = torch.compiler.disable(block.forward)
    compiled = torch.compile(recorder.instrument(model, select="site=output,input"), backend="aot_eager")
    run = attached(compiled, tmp_path, lambda: train(compiled, x), rules="site=output,grad_output,input keep=tensor")
    assert_same(recorded(run), wanted, exactly=True)
    given = run.array("blocks.1.linear", site="input", name="input")
    np.testing.assert_array_equal(given, wanted["blocks.1.norm", "output", "", 0])


def test_compiled_code_has_no_taps_while_nothing_records_and_has_them_again_when_something_does(tmp_path: Path) -> None:
    graphs = Graphs()
    model, x = recorder.instrument(make()), batch()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    train(compiled, x)
    assert graphs.made and graphs.num_taps == 0
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    assert_same(recorded(attached(model, tmp_path, lambda: train(compiled, x))), wanted, exactly=True)
    assert graphs.num_taps > 0


def test_a_model_that_is_compiled_under_the_flag_is_tapped_where_the_setting_asks_for_it(tmp_path: Path) -> None:
    x = tiny_batch()
    torch.manual_seed(0)
    model = Tiny()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    with flagged(tmp_path, "site=output,grad_output keep=tensor", compiled="tap") as recording:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            train(compiled, x)
            optimizer.step()
            optimizer.zero_grad()
    for step in range(3):
        assert_same(recorded(recording.run, step=step), wanted, exactly=True)
    assert not any(module_taps.is_tapped(module) for module in model.modules())  # the recording's own taps go with it


def test_a_model_that_is_attached_before_it_is_compiled_is_tapped_where_the_setting_asks_for_it(tmp_path: Path) -> None:
    x = tiny_batch()
    torch.manual_seed(0)
    model = Tiny()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    rules = "site=output,grad_output keep=tensor"
    with recorder.attach(model, enabled=True, dir=str(tmp_path / "runs"), rules=rules, compiled="tap"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train(compiled, x)
        optimizer.step()
    assert_same(recorded(recorder.open_run(tmp_path / "runs")), wanted, exactly=True)
    assert not any(module_taps.is_tapped(module) for module in model.modules())


def test_an_instrumented_model_that_is_compiled_in_place_is_found_by_its_taps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Tiny(), tiny_batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    with flagged(tmp_path, "site=output,grad_output keep=tensor") as recording:
        recorder.instrument(model)
        model.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.no_grad():
            model.eval()(x)
        model.train()
        for _ in range(2):
            train(model, x)
            optimizer.step()
            optimizer.zero_grad()
    assert set(recording.rows()["root"]) == {"model"}
    for step in range(2):
        assert_same(recorded(recording.run, step=step, mode="train"), wanted, exactly=True)


def test_a_compiled_model_is_left_alone_by_default_and_the_log_says_what_to_do(tmp_path: Path) -> None:
    graphs = Graphs()
    with flagged(tmp_path, "site=output keep=tensor") as recording:
        model = Tiny()
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(compiled, tiny_batch())
        optimizer.step()
    assert graphs.num_taps == 0
    (message,) = recording.events("compiled")
    assert "RECORDER_COMPILED=tap" in message and "recorder.instrument(model)" in message


def test_a_model_that_is_attached_and_instrumented_twice_is_recorded_once(tmp_path: Path) -> None:
    model, x = make(), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    recorder.instrument(recorder.instrument(model))
    assert_same(recorded(attached(model, tmp_path / "eager", lambda: train(model, x))), wanted, exactly=True)
    compiled = torch.compile(model, backend="eager")
    assert_same(recorded(attached(compiled, tmp_path / "graph", lambda: train(compiled, x))), wanted, exactly=True)


def test_an_eager_tap_returns_the_very_output(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    outputs: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    recorder.instrument(layer)
    with recorder.attach(layer, enabled=True, dir=str(tmp_path), rules=RULES):
        assert layer(batch()) is outputs[0]


def test_the_modules_that_a_rule_selects_are_tapped_and_no_others(tmp_path: Path) -> None:
    model, x = make(), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    recorder.instrument(model, select="module=blocks.*.linear; class=Tanh")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = recorded(attached(model, tmp_path, lambda: train(compiled, x)))
    paths = {"blocks.0.linear", "blocks.1.linear", "shared"}
    assert_same(found, {key: value for key, value in wanted.items() if key[0] in paths}, exactly=True)


def test_inputs_are_tapped_on_request(tmp_path: Path) -> None:
    model, x = make(), batch()
    recorder.instrument(model, select="site=input module=head,blocks.0")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    rules = "site=input,grad_input module=head,blocks.0 keep=tensor"
    run = attached(model, tmp_path / "graph", lambda: train(compiled, x), rules)
    plain = recorder.strip(make())
    eager = attached(plain, tmp_path / "eager", lambda: train(plain, x), rules)
    for path in ("head", "blocks.0"):
        for site in ("input", "grad_input"):
            name = "input" if path == "head" else "x"
            found, wanted = (r.array(path, site=site, name=name, rank=0) for r in (run, eager))
            assert (found == wanted).all()


class Scaled(nn.Module):
    """Arguments by name and in containers, one that is handed on, and one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()
        self.act = nn.ReLU(inplace=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *more: Any, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(self.act(self.same(x) * scale["of"])) + more[0]  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Tensors with several uses, so that the share of one module is not the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.scaled = Scaled()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embed(x))
        x = x + self.scaled(x, x.sin(), scale={"of": x.cos()})
        return self.head(x)  # type: ignore[no-any-return]


ALL_SITES = "site=input,output,grad_input,grad_output,param,grad keep=tensor"


def all_values(folder: Path, model: nn.Module, wrap: Callable[[nn.Module], Any], **settings: Any) -> dict[Any, Any]:
    """Every row of two steps by all that tells it apart, with its values."""
    model_ = wrap(model)
    with recorder.attach(model_, enabled=True, dir=str(folder), rules=ALL_SITES, **settings):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            train(model_, batch(seed=step))
            optimizer.step()
            optimizer.zero_grad()
    run, columns = recorder.open_run(folder), ("site", "name", "step", "call", "repeat", "mode", "phase")
    frame = run.to_pandas()
    found = {}
    for row in frame[frame["site"] != "scalar"].to_dict("records"):
        key = row["module_path"], *(row[name] for name in columns)
        assert key not in found, f"{key} is there twice"
        question = dict(zip(columns, key[1:], strict=True))
        found[key] = run.array(str(row["module_path"]), rank=0, **question)
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_has_the_rows_of_an_eager_one(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed()
    wanted = all_values(tmp_path / "eager", copy.deepcopy(model), lambda model: model)
    found = all_values(
        tmp_path / "graph", model, lambda model: torch.compile(model, backend=backend, fullgraph=True), compiled="tap"
    )
    assert sorted(found) == sorted(wanted), f"lacks {set(wanted) - set(found)}, has {set(found) - set(wanted)}"
    for key, value in wanted.items():
        if backend == "inductor":
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=str(key))
        else:
            np.testing.assert_array_equal(found[key], value, err_msg=str(key))


def test_an_exported_program_has_the_inputs_of_an_eager_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed()
    rules = "site=input,output,grad_input,grad_output keep=tensor"
    eager = attached(model, tmp_path / "eager", lambda: train(model, batch()), rules)
    recorder.instrument(model, select="site=input,output")
    made = torch.export.export(model, (batch(),)).module()
    graph = attached(made, tmp_path / "graph", lambda: train(made, batch()), rules)
    columns = ["module_path", "site", "name", "call"]
    keys = [{tuple(row) for row in run.to_pandas()[columns].to_numpy().tolist()} for run in (eager, graph)]
    assert keys[0] == keys[1], keys[0] ^ keys[1]
    for path, site, name, call in keys[0]:
        one, other = (run.array(path, site=site, name=name, call=call, rank=0) for run in (eager, graph))
        np.testing.assert_array_equal(one, other, err_msg=f"{path} {site} {name}")


def test_a_tapped_argument_may_be_changed_in_place_by_its_module(tmp_path: Path) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Sequential(nn.ReLU(inplace=True))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            self.act(x)
            return x

    model = recorder.instrument(Changes(), select="site=input")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs: list[torch.Tensor] = []
    run = attached(model, tmp_path, lambda: outputs.append(compiled(-batch())), "site=input keep=tensor")
    assert torch.equal(outputs[0], torch.relu(-batch() * 2))
    assert (run.array("act", site="input", name="input", rank=0) == -2 * batch().numpy()).all()


def test_a_tap_by_hand_keeps_its_module_path_in_a_graph(tmp_path: Path) -> None:
    model = recorder.strip(make())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    eager = attached(model, tmp_path / "eager", lambda: train(model, batch()), "site=tap keep=tensor")
    graph = attached(model, tmp_path / "graph", lambda: train(compiled, batch()), "site=tap keep=tensor")
    for phase in ("forward", "backward"):
        one, other = (run.array("", site="tap", name="mixed", phase=phase, rank=0) for run in (eager, graph))
        assert (one == other).all()


@pytest.mark.parametrize("name", ["", "x" * 257, 3, None])
def test_a_tap_with_a_name_that_is_none_is_refused_where_it_is_written(name: Any) -> None:
    with pytest.raises(recorder.errors.TapError, match="the name"):
        recorder.tap(name, torch.ones(1))


@pytest.mark.parametrize(
    "make_it, message",
    [
        (lambda: 3, "needs a torch.nn.Module, got int"),
        (lambda: torch.jit.script(nn.Linear(1, 1)), "TorchScript already"),
        (lambda: torch.export.export(nn.Linear(1, 1), (torch.ones(1),)), "before it is exported"),
    ],
)
def test_what_cannot_be_instrumented_is_refused(make_it: Callable[[], Any], message: str) -> None:
    with pytest.raises(recorder.errors.TapError, match=message):
        recorder.instrument(make_it())


@pytest.mark.parametrize(
    "select, message",
    [
        ("module=nowhere", "the rule 'module=nowhere' matches no module; module paths near it: .*embed"),
        ("class=Linaer", "the rule 'class=Linaer' matches no module; class names near it: 'Linear'"),
        ("site=grad", "site=grad: taps show input and output"),
        ("steps=3", "more than module, class, leaf and site"),
        ("", "select is empty"),
    ],
)
def test_a_wrong_selection_is_refused_and_changes_nothing(select: str, message: str) -> None:
    model = make()
    with pytest.raises(recorder.errors.TapError, match=message):
        recorder.instrument(model, select=select)
    assert not any(module_taps.is_tapped(module) for module in model.modules())


def test_a_model_whose_class_was_compiled_already_is_refused() -> None:
    model = make()
    train(torch.compile(model, backend="eager"), batch())
    with pytest.raises(recorder.errors.TapError, match=r"torch\.compiler\.reset"):
        recorder.instrument(model)
    torch.compiler.reset()
    recorder.instrument(model)


def test_stripping_gives_the_original_graphs_back() -> None:
    x = batch()
    plain = make()
    exported = torch.export.export(plain, (x,))
    traced = torch.fx.symbolic_trace(plain)
    model = recorder.instrument(make(), select="site=input,output")
    program = torch.export.export(model, (x,))
    tapped = torch.fx.symbolic_trace(model)
    assert "recorder" in str(program.graph) and "recorder" in tapped.code
    assert recorder.strip(program) is program
    assert str(program.graph) == str(exported.graph)
    assert torch.equal(program.module()(x), plain(x))
    stripped = recorder.strip(tapped)
    assert [node.target for node in stripped.graph.nodes] == [node.target for node in traced.graph.nodes]
    assert all(hooks == {} for module in recorder.strip(model).modules() for hooks in (module._forward_hooks,))


def test_what_cannot_be_stripped_is_refused() -> None:
    for wrong in (torch.jit.script(nn.Linear(1, 1)), 3):
        with pytest.raises(recorder.errors.TapError, match="strip"):
            recorder.strip(wrong)


def test_a_copy_keeps_its_taps_under_the_same_paths(tmp_path: Path) -> None:
    model, x = recorder.instrument(make()), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    assert_same(recorded(attached(compiled, tmp_path, lambda: train(compiled, x))), wanted, exactly=True)


def test_the_op_is_sound_for_every_transform_of_torch() -> None:
    recorder_ops = torch.ops.recorder
    for op in (
        recorder_ops.tap.default,
        recorder_ops.tap_grad.default,
        recorder_ops.watch.default,
        recorder_ops.watch_grad.default,
    ):
        for x in (torch.randn(3, requires_grad=True), torch.randn(2, 3).t(), torch.ones(2, dtype=torch.bool)):
            torch.library.opcheck(op, (x, "name", "where"))


def test_a_sink_that_is_gone_is_asked_nothing() -> None:
    ops.set_sink(None)
    assert torch.equal(torch.ops.recorder.tap(torch.ones(2), "x"), torch.ones(2))


def test_a_module_that_hands_its_argument_on_is_not_parted_from_it() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            self.same(x).mul_(2)
            return x

    model = recorder.instrument(Passes())
    ops.set_sink(_Nobody())
    try:
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 4.0))
    finally:
        ops.set_sink(None)


class _Nobody:
    def tapped(self, *key: object) -> None: ...

    def tapped_gradient(self, *key: object, is_total: bool = False) -> None: ...

    def has_no_hook(self, where: str) -> bool:
        return False


def test_nested_outputs_keep_their_kind(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": (x * 2, [x + 1]), "n": 3, "none": None}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.nested(self.linear(x))
            assert found["n"] == 3 and found["none"] is None
            return found["a"][0] + found["a"][1][0]  # type: ignore[no-any-return]

    model = recorder.instrument(Outer())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run = attached(model, tmp_path, lambda: train(compiled, batch()))
    names = set(run.to_pandas().query("module_path == 'nested'")["name"])
    assert names == {"a.0", "a.1.0"}


class _Lists(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2, x * 3]


class _Perhaps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return x * 2


class _Both(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        return x * 2, {"k": [x * 3, x.sin()]}


class _Dicts(nn.Module):
    """Outputs of all the kinds that TorchScript writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lists = _Lists()
        self.perhaps = _Perhaps()
        self.both = _Both()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.lists(self.linear(x))
        perhaps = self.perhaps(found[0] + found[1])
        assert perhaps is not None
        one, more = self.both(perhaps)
        return {"one": one, "sum": more["k"][0] + more["k"][1]}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_script_shows_what_lies_in_dicts_lists_and_optionals(is_loaded: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _Dicts()

    def run(called: Any) -> Callable[[], None]:
        def step() -> None:
            found = called(batch())
            (found["one"] + found["sum"]).square().sum().backward()

        return step

    eager = attached(model, tmp_path / "eager", run(model))
    made: Any = torch.jit.script(recorder.instrument(copy.deepcopy(model)))
    if is_loaded:
        torch.jit.save(made, tmp_path / "made.pt")
        made = torch.jit.load(tmp_path / "made.pt")
    script = attached(made, tmp_path / "script", run(made))
    columns = ["module_path", "site", "name", "call"]
    keys = [{tuple(row) for row in one.to_pandas()[columns].to_numpy().tolist()} for one in (eager, script)]
    assert keys[0] == keys[1] and ("both", "output", "1.k.0", 0) in keys[0], keys[0] ^ keys[1]
    for path, site, name, call in keys[0]:
        one, other = (run.array(path, site=site, name=name, call=call, rank=0) for run in (eager, script))
        np.testing.assert_array_equal(one, other, err_msg=f"{path} {site} {name}")


def test_vmap_and_gradients_of_functions_are_recorded_whole(tmp_path: Path) -> None:
    model = recorder.instrument(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    x = batch(5)
    params = dict(model.named_parameters())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()  # type: ignore[no-any-return]

    run = attached(model, tmp_path / "vmap", lambda: torch.func.vmap(model)(x))
    assert (run.array("0", site="output", rank=0) == model[0](x).detach().numpy()).all()
    assert run.writers[0].balance.dropped == {}
    run = attached(model, tmp_path / "grad", lambda: torch.func.grad(loss)(params, x))
    first = model[0](x).detach().requires_grad_()
    model[1](first).sum().backward()
    assert first.grad is not None
    assert (run.array("0", site="output", rank=0) == first.detach().numpy()).all()
    assert (run.array("0", site="grad_output", rank=0) == first.grad.numpy()).all()
    run = attached(model, tmp_path / "both", lambda: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x))
    assert (run.array("0", site="grad_output", rank=0) == first.grad.numpy()).all()


def test_inference_mode_autocast_and_a_scaler_are_recorded_in_a_graph(tmp_path: Path) -> None:
    model, x = recorder.instrument(make()), batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def infer() -> None:
        with torch.inference_mode():
            compiled(x)

    wanted = plain_hooks(model, lambda plain: plain(x))
    outputs = {key: value for key, value in wanted.items() if key[1] == "output"}
    assert_same(recorded(attached(compiled, tmp_path / "inference", infer)), outputs, exactly=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()

    def train_scaled() -> None:
        step(compiled)
        scaler.step(optimizer)
        scaler.update()

    run = attached(compiled, tmp_path / "scaled", train_scaled)
    plain = recorder.strip(make())
    eager = attached(plain, tmp_path / "eager", lambda: step(plain))
    frame = run.to_pandas().query("site in ('output', 'grad_output')")
    assert "bfloat16" in set(frame["dtype"]) and len(frame) == len(eager.to_pandas().query("site != 'tap'"))
    for row in frame.to_dict("records"):
        key: dict[str, Any] = {name: row[name] for name in ("site", "name", "call", "rank")}
        path = str(row["module_path"])
        assert (run.array(path, **key) == eager.array(path, **key)).all(), row


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_an_instrumented_process_that_only_infers_is_recorded_where_any_root_is_asked_for(
    how: str, tmp_path: Path
) -> None:
    model, x = make(), batch()
    wanted = {key: value for key, value in plain_hooks(model, lambda plain: plain(x)).items() if key[1] == "output"}
    recorder.instrument(model)
    called = torch.compile(model, backend="eager") if how == "compiled" else model
    with flagged(tmp_path, "site=output keep=tensor", roots="any") as recording, torch.inference_mode():
        for _ in range(2):
            called(x)
    for step in (0, 1):
        assert_same(recorded(recording.run, step=step), wanted, exactly=True)


def test_a_compiled_run_and_an_eager_one_lie_side_by_side_in_a_diff(tmp_path: Path) -> None:
    model, x = recorder.instrument(make()), batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    attached(model, tmp_path / "eager", lambda: train(model, x))
    attached(compiled, tmp_path / "graph", lambda: train(compiled, x))
    found = recorder.diff(recorder.open_run(tmp_path / "eager"), recorder.open_run(tmp_path / "graph"))
    assert found.is_equal and found.num_compared >= 30


def test_tracing_by_fx_under_the_flag_records_nothing_and_the_graph_that_came_out_is_the_root(tmp_path: Path) -> None:
    model, x = recorder.instrument(make()), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    with flagged(tmp_path, RULES) as recording:
        traced = torch.fx.symbolic_trace(model)
        optimizer = torch.optim.SGD(traced.parameters(), lr=0.1)
        train(traced, x)
        optimizer.step()
    assert set(recording.rows()["root"]) == {"model"}
    assert_same(recorded(recording.run), wanted, exactly=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_tap_whose_result_nobody_uses_is_no_dead_code(backend: str, tmp_path: Path) -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorder.tap("ignored", x * 2)
            return self.linear(x)  # type: ignore[no-any-return]

    compiled = torch.compile(Ignores(), backend=backend, fullgraph=True)
    run = attached(compiled, tmp_path, lambda: train(compiled, batch()))
    assert (run.array("", site="tap", name="ignored", rank=0) == 2 * batch().numpy()).all()


class MakesOneOutputOfAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = _Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.pair(x)
        return first + second  # type: ignore[no-any-return]


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.linear(x)
        return first, first * 3


def test_a_gradient_of_the_uses_outside_alone_says_so_and_diff_knows(tmp_path: Path) -> None:
    model, x = recorder.instrument(MakesOneOutputOfAnother()), batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    eager = attached(model, tmp_path / "eager", lambda: train(model, x))
    graph = attached(compiled, tmp_path / "graph", lambda: train(compiled, x))
    total, outside = (run.array("pair", site="grad_output", name="0", rank=0) for run in (eager, graph))
    np.testing.assert_allclose(total, 4 * outside, rtol=1e-6)
    found = recorder.diff(eager, graph)
    assert [(row["module_path"], row["name"], row["kind"]) for row in found.table.to_pylist()] == [
        ("pair", "0", "after_tap")
    ]


def test_net_is_what_the_reference_thinks() -> None:
    assert {path for path, _, _, _ in plain_hooks(make(), lambda plain: train(plain, batch()))} == {
        path for path, _ in Net().named_modules()
    }
