"""Whatever hides a module from the recorder: `recorder doctor` names the module, the reason and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import recorder
from recorder.taps import module_taps
from tests.rigs.capturing import flagged
from tests.rigs.command_line import Cli

EVERYTHING = "site=* keep=stats"


class Net(nn.Module):
    """One module is never called, one is called by its forward; the others as they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.direct = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.direct.forward(self.blocks(self.first(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x[None])  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Told(NamedTuple):
    """What the doctor said of a run."""

    exit_code: int
    out: str
    checks: list[dict[str, Any]]
    run: recorder.Run

    def modules_by_reason(self) -> dict[str, set[str]]:
        """Of each reason why a call was not seen, the modules."""
        found: dict[str, set[str]] = {}
        for check in self.checks:
            if "reason" in check and ("output" in check.get("sites", ["output"])):
                found.setdefault(check["reason"], set()).update(check["modules"])
        return found


Calls = Callable[[torch.Tensor], torch.Tensor]


def train(calls: Calls, model: nn.Module, num_steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        calls(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(cli: Cli, folder: Path) -> Told:
    plain, as_json = cli("doctor", folder), cli("doctor", folder, "--json")
    return Told(plain.exit_code, plain.out, as_json.json["checks"], recorder.open_run(folder))


def recorded(cli: Cli, folder: Path, model: nn.Module, calls: Calls | None = None) -> Told:
    """Attach, train, ask."""
    with recorder.attach(model, enabled=True, dir=folder, rules=EVERYTHING):
        train(model if calls is None else calls, model)
    return told(cli, folder)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


OUTSIDE = {"bypassed": {"direct"}, "unused": {"spare"}}
"""What the others never explain."""
INSIDE = {"first", "blocks", "blocks.0", "blocks.1", "direct", "last", "spare"}


def assert_told(
    found: Told, modules: dict[str, set[str]], *lines: str, exit_code: int, steps: tuple[int, ...] = (0, 1)
) -> None:
    """The reasons, module by module, and the very words."""
    actual = found.modules_by_reason()
    actual.pop("silent", None)  # the same modules, told as a whole
    assert actual == modules, found.out
    for line in lines:
        assert line in found.out
    assert found.exit_code == exit_code, found.out
    rows = found.run.to_pandas(columns=["site", "step"])
    assert tuple(sorted(set(rows[rows.site == "grad"].step))) == steps, "of every step, whatever hid the calls"


COMPILED = "compiled: hooks do nothing there; RECORDER_COMPILED=tap puts taps into the graph: "
LATE = "attached after compilation: attach first, or call torch.compiler.reset(): "


def test_never_called_and_called_by_forward(cli: Cli, tmp_path: Path) -> None:
    found = recorded(cli, tmp_path, Net())
    assert_told(
        found,
        OUTSIDE,
        "never called, and its parameters had no gradient: 'spare'",
        "though its parameters have gradients: used directly, or called as .forward(): 'direct'",
        exit_code=0,
    )


@pytest.mark.parametrize("in_place", [False, True], ids=["compile(model)", "model.compile()"])
def test_hooks_that_a_compiler_removed(cli: Cli, tmp_path: Path, in_place: bool) -> None:
    model = Net()
    if in_place:
        model.compile(backend="eager")
        found, hidden = recorded(cli, tmp_path, model), INSIDE | {""}
    else:
        graph = compiled(model)
        found, hidden = recorded(cli, tmp_path, graph), INSIDE
    assert_told(found, {"compiled": hidden}, COMPILED, "event compiled (rank 0): model: ", exit_code=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by dynamo
@pytest.mark.parametrize("in_place", [False, True], ids=["compile(model)", "model.compile()"])
def test_hooks_that_a_compiler_removed_from_a_part_leave_the_rest_explained_by_itself(
    cli: Cli, tmp_path: Path, in_place: bool
) -> None:
    model = Net()
    if in_place:
        model.blocks.compile(backend="eager")
        hidden = {"blocks", "blocks.0", "blocks.1"}
    else:
        model.blocks = compiled(model.blocks)
        hidden = {"blocks.0", "blocks.1"}
    assert_told(
        recorded(cli, tmp_path, model),
        OUTSIDE | {"compiled": hidden},
        "values inside compiled modules are not recorded ('blocks')",
        exit_code=0,
    )


def test_a_model_inside_a_compiled_function(cli: Cli, tmp_path: Path) -> None:
    model = Net()
    found = recorded(cli, tmp_path, model, compiled(lambda x: model(x)))
    assert_told(found, {"compiled": INSIDE | {""}}, COMPILED, exit_code=0)


@pytest.mark.parametrize("how", ["wrapper", "inner", "in place", "function"])
def test_attached_after_the_first_compiled_call(cli: Cli, tmp_path: Path, how: str) -> None:
    model = Net()
    calls: Any = model
    if how == "in place":
        model.compile(backend="eager")
    else:
        calls = compiled(model if how != "function" else lambda x: model(x))
    calls(torch.ones(3, 4))
    found = recorded(cli, tmp_path, calls if how == "wrapper" else model, calls)
    hidden = INSIDE if how == "wrapper" else INSIDE | {""}
    event = "event late (rank 0): model: attached after compilation, so no hook runs inside (the whole model)"
    assert_told(found, {"late": hidden}, LATE, event, exit_code=1)


def test_found_by_the_flag_after_the_first_compiled_call(cli: Cli, tmp_path: Path) -> None:
    model = Net()
    calls = compiled(model)
    with torch.no_grad():
        calls(torch.ones(3, 4))
    with flagged(tmp_path, EVERYTHING) as recording:
        train(calls, model)
    assert_told(told(cli, recording.folder), {"late": INSIDE}, LATE, exit_code=1)


def test_what_was_compiled_elsewhere_is_no_reason(cli: Cli, tmp_path: Path) -> None:
    compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))(torch.ones(3, 4))
    assert_told(recorded(cli, tmp_path, Attention()), {"fused": {"encoder.self_attn.out_proj"}}, exit_code=0)


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_part_that_torch_jit_made_takes_no_hooks(cli: Cli, tmp_path: Path, how: str) -> None:
    model = Net()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        part: Any = model.blocks
        model.blocks = torch.jit.script(part) if how == "script" else torch.jit.trace(part, torch.ones(3, 8))
    assert_told(
        recorded(cli, tmp_path, model),
        OUTSIDE | {"scripted": {"blocks", "blocks.0", "blocks.1"}},
        "scripted or traced by torch.jit, which takes no hooks: instrument it before: ",
        "values inside scripted modules are not recorded ('blocks')",
        exit_code=0,
    )


def test_a_scripted_model_has_parameters_and_gradients_of_every_step(cli: Cli, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert_told(recorded(cli, tmp_path, model), {"scripted": {"", "0", "1"}}, exit_code=0)


def test_containers_in_a_graph_of_fx_have_no_call(cli: Cli, tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(Net())
    assert_told(
        recorded(cli, tmp_path, graph),
        {"inlined": {"blocks", "direct"}},
        "in a graph of torch.fx or torch.export, where it has no call of its own: ",
        exit_code=0,
    )


def test_an_exported_model_is_a_graph_in_which_nothing_is_called(cli: Cli, tmp_path: Path) -> None:
    model = torch.export.export(Net(), (torch.ones(3, 4),)).module()
    found = recorded(cli, tmp_path, model)
    assert found.modules_by_reason()["inlined"] == INSIDE - {"blocks.1"}, "an activation is no module any more"
    assert found.exit_code == 0, found.out


@pytest.mark.parametrize("how", ["traced by torch.fx", "called by .forward()"])
def test_a_root_whose_own_call_is_gone(cli: Cli, tmp_path: Path, how: str) -> None:
    model = Net()
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=EVERYTHING):
        train(torch.fx.symbolic_trace(model) if how == "traced by torch.fx" else model.forward, model)
    found = told(cli, tmp_path)
    gone = {"", "blocks"} if how == "traced by torch.fx" else {""}
    reasons = found.modules_by_reason()
    assert reasons["children"] == gone
    assert reasons["bypassed"] == {"direct"}
    assert "event root_not_called (rank 0): model: its modules ran, but no hook saw its own call" in found.out
    assert found.exit_code == 1
    rows = found.run.to_pandas(columns=["site", "module_path", "step"])
    assert list(rows[(rows.site == "output") & (rows.module_path == "first")].step) == [0, 1], "each in its step"


def test_what_attention_uses_without_calling_it(cli: Cli, tmp_path: Path) -> None:
    assert_told(
        recorded(cli, tmp_path, Attention()),
        {"fused": {"encoder.self_attn.out_proj"}},
        "MultiheadAttention uses its parameters without a call: 'encoder.self_attn.out_proj'",
        exit_code=0,
    )


def test_the_fast_path_in_evaluation_is_off_where_there_are_hooks_and_else_bypasses_what_nobody_selected(
    cli: Cli, tmp_path: Path
) -> None:
    model = Attention()
    for rules, called in ((EVERYTHING, {"", "encoder", "encoder.linear1"}), ("module='' site=output", {""})):
        folder = tmp_path / str(len(called))
        model.eval()
        with recorder.attach(model, enabled=True, dir=folder, rules=rules, roots="any"), torch.no_grad():
            model(torch.ones(3, 4))
        found = told(cli, folder)
        rows = found.run.to_pandas(columns=["site", "module_path"])
        assert set(rows[rows.site == "output"].module_path) & {"", "encoder", "encoder.linear1"} == called
        lacking = [check["text"] for check in found.checks if check["state"] == "missing"]
        assert not [text for text in lacking if "step_never_advanced" not in text], "there may be others' optimizers"


class Handing(nn.Module):
    """A container that nothing calls, and modules that hand their argument on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(how: str, model: nn.Module) -> tuple[Any, Calls | None]:
    """What is attached, and what is called if it is something else."""
    if how == "compile(model)":
        return compiled(model), None
    if how == "model.compile()":
        model.compile(backend="eager")
        return model, None
    if how == "in a compiled function":
        return model, compiled(lambda x: model(x))
    if how == "export":
        return torch.export.export(model, (torch.ones(3, 4),)).module(), None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        return (torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.ones(3, 4))), None


def sites_of(found: Told) -> dict[str, tuple[int, int]]:
    """By site of a call, how many values were expected and found."""
    return {
        check["site"]: (check["expected"], check["found"])
        for check in found.checks
        if check.get("site") in ("input", "output", "grad_input", "grad_output")
    }


UNTAPPED = (
    "not tapped there: recorder.instrument(model, select='site=input,output'); TorchScript has no taps on inputs: "
)
HANDS_ON = {"blocks.0.1", "blocks.1.1"}


LEAF_GRADIENTS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""Torch's own, where dynamo looks at the tensors inside of a graph."""


@LEAF_GRADIENTS
@pytest.mark.parametrize("how", ["model.compile()", "in a compiled function"])
def test_sites_without_a_tap_are_told_and_no_finding_but_a_strict_one(cli: Cli, tmp_path: Path, how: str) -> None:
    found = recorded(cli, tmp_path, *made(how, recorder.instrument(Handing())))
    assert f"input, grad_input: 28 values missing, rank 0, steps 0..1: {UNTAPPED}" in found.out
    assert found.exit_code == 0 and cli("doctor", tmp_path, "--strict").exit_code == 1
    shown = {"output": (14, 14), "grad_output": (14, 14)}
    assert sites_of(found) == {"input": (14, 0), "grad_input": (14, 0), **shown}, "the root, two blocks, four modules"
    assert "called, with no tensor" not in found.out and "event " not in found.out


@LEAF_GRADIENTS
def test_of_a_compiled_wrapper_the_hooks_see_the_inputs_and_taps_the_outputs_inside(cli: Cli, tmp_path: Path) -> None:
    found = recorded(cli, tmp_path, *made("compile(model)", recorder.instrument(Handing())))
    assert f"input, grad_input: 24 values missing, rank 0, steps 0..1: {UNTAPPED}" in found.out and found.exit_code == 0
    assert sites_of(found) == {"input": (14, 2), "output": (14, 14), "grad_input": (14, 0), "grad_output": (14, 14)}


@LEAF_GRADIENTS
def test_taps_show_what_a_module_hands_on_as_it_is_with_its_gradient(cli: Cli, tmp_path: Path) -> None:
    model, _ = made("model.compile()", recorder.instrument(Handing(), select="site=input,output"))
    found = recorded(cli, tmp_path, model)
    # The first three modules are given the batch, which needs no gradient.
    shown = {"input": (14, 14), "output": (14, 14), "grad_input": (14, 8), "grad_output": (14, 14)}
    assert sites_of(found) == shown
    assert "called, with no tensor" not in found.out and found.exit_code == 0
    assert cli("doctor", tmp_path, "--strict").exit_code == 0


def test_containers_in_torchscript_and_what_torch_puts_into_exported_programs_are_not_expected(
    cli: Cli, tmp_path: Path
) -> None:
    for how in ("script", "trace", "export"):
        found = recorded(cli, tmp_path / how, *made(how, recorder.instrument(Handing())))
        reasons = found.modules_by_reason()
        assert reasons.pop("tapped", HANDS_ON) == HANDS_ON, "where a trace leaves out what does nothing"
        assert reasons == ({"inlined": {"blocks"}} if how == "export" else {}), found.out
        assert found.exit_code == 0 and "_guards_fn" not in found.out
    assert "_guards_fn" in [module["path"] for module in found.run.writers[0].manifest.members["roots"][0]["modules"]]


@LEAF_GRADIENTS
@pytest.mark.parametrize("how", ["compile(model)", "model.compile()", "in a compiled function"])
def test_modules_that_were_left_without_a_tap_are_compiled_and_no_finding(cli: Cli, tmp_path: Path, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = recorded(cli, tmp_path, *made(how, recorder.instrument(model, select="class=Linear")))
    assert_told(found, {"compiled": {"1"} if how == "compile(model)" else {"", "1"}}, COMPILED, exit_code=0)
    assert "event " not in found.out


def test_an_artefact_without_its_model_is_expected_to_show_what_is_tapped(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = torch.export.export(recorder.instrument(Handing(), name="shipped"), (torch.ones(3, 4),))
    graph, state = program.graph_module, list(program.state_dict.values())
    monkeypatch.setattr(module_taps, "model_of", lambda where: None)  # as where its model was another process's
    with flagged(tmp_path, EVERYTHING) as recording:
        for step in range(2):
            recorder.step(step)
            graph(*state, torch.ones(3, 4))
    found = told(cli, recording.folder)
    assert sites_of(found)["output"] == (14, 14), "at two steps the root, two blocks and four modules"
    assert sites_of(found)["input"] == (14, 0) and UNTAPPED in found.out and found.exit_code == 0
    assert "called, with no tensor" not in found.out


def test_what_a_compiler_hides_is_explained_and_told_once(cli: Cli, tmp_path: Path) -> None:
    found = recorded(cli, tmp_path, compiled(Handing()))
    assert found.exit_code == 0, "the event explains, and nothing is lost"
    assert "left no rows" not in found.out
    assert found.out.count(COMPILED) == 1 and found.out.count("event compiled") == 1
    totals = {check["site"]: check for check in found.checks if "expected" in check}
    for site in ("input", "output", "grad_input", "grad_output"):
        assert totals[site]["missing"] == totals[site]["explained"] and totals[site]["state"] == "ok", site
    (hole,) = (check for check in found.checks if check.get("reason") == "compiled" and "sites" in check)
    assert hole["missing"] == 2 * 4 * 6, "at two steps four sites of six modules, those without parameters too"


def test_how_a_recording_was_started_is_a_sentence(cli: Cli, tmp_path: Path) -> None:
    with flagged(tmp_path, EVERYTHING) as recording:
        model = Handing()
        train(model, model)
    assert "started by RECORDER=1; steps are counted from 0" in told(cli, recording.folder).out
    by_hand = recorded(cli, tmp_path / "attached", Handing())
    assert "started by attach(); steps are counted from 0" in by_hand.out
