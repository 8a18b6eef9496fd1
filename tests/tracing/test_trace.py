"""A trace shows what plain hooks and torch.autograd.grad show, under the recorder's names."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import recorder
from recorder.errors import AttachError, ConfigError, TraceError, TraceKeyError
from recorder.tracing.values import Key

from .models import EVERY_CALL_SITE, Net, Smooth, batch, hook_counts

PAGE = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text(encoding="utf-8")


def test_values_are_those_of_plain_hooks_in_the_order_of_execution() -> None:
    model, expected = Net(), {}
    x = batch()

    def before(path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        expected[path, "input"] = args[0].detach().clone()

    def after(path: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        expected[path, "output"] = output.detach().clone()
        output.register_hook(lambda gradient: expected.__setitem__((path, "grad_output"), gradient.clone()))

    handles: list[Any] = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, args, path=path: before(path, m, args)))
        handles.append(module.register_forward_hook(lambda m, args, out, path=path: after(path, m, args, out)))
    torch.manual_seed(3)
    model(x).sum().backward()
    for handle in handles:
        handle.remove()

    torch.manual_seed(3)
    with recorder.trace(model, select="site=input,output,grad_output") as values:
        model(x).sum().backward()
    assert [(key.module_path, key.site) for key in values] == list(expected)
    for (path, site), tensor in expected.items():
        assert torch.equal(values[path, site], tensor)
    assert not values.silent and not values.skipped


def test_without_rules_there_is_the_output_of_every_module_that_can_be_called() -> None:
    model = Net()
    with recorder.trace(model) as values:
        out = model(batch())
    assert {key.module_path for key in values} == {path for path, _ in model.named_modules()} - {"blocks"}
    assert {key.site for key in values} == {"output"}
    assert torch.equal(values[""], out) and not values[""].requires_grad
    assert not values.silent


@pytest.mark.parametrize("depth", [0, 1, 2, None])
def test_depth_is_counted_from_the_root(depth: int | None) -> None:
    model = Net()
    with recorder.trace(model, depth=depth) as values:
        model(batch())
    paths = {p for p, m in model.named_modules() if depth is None or (p.count(".") + 1 if p else 0) <= depth}
    assert {key.module_path for key in values} == paths - {"blocks"}


def test_rules_select_by_module_class_leaf_name_and_call() -> None:
    model = Net()
    rules = "class=Linear module=blocks.* site=input,grad_input; module=head site=param name=bias"
    rules += "; class=ReLU site=output call=1"
    with recorder.trace(model, select=rules) as values:
        model(batch()).sum().backward()
        model(batch())
    assert {key.module_path for key in values if key.site == "input"} == {
        f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")
    }
    assert [key for key in values if key.site == "param"] == [Key("head", "param", "bias")]
    assert {key.call for key in values if key.module_path.endswith("act")} == {1}
    with recorder.trace(model, select={"module": ["blocks.0"], "site": "output"}) as values:
        model(batch())
    assert list(values) == [Key("blocks.0")]


@pytest.fixture
def live() -> Iterator[tuple[Smooth, dict[str, torch.Tensor]]]:
    """A model and, from plain hooks, what its modules return, with the graph."""
    model, outputs = Smooth(), {}
    for path, module in model.named_modules():
        module.register_forward_hook(lambda m, args, out, path=path: outputs.update({path: out}))
    yield model, outputs


def test_gradients_are_those_of_autograd_and_arrive_after_the_block_too(
    live: tuple[Smooth, dict[str, torch.Tensor]],
) -> None:
    model, outputs = live
    x = batch()
    with recorder.trace(model, select=EVERY_CALL_SITE) as values:
        loss = model(x).square().sum()
    with pytest.raises(TraceKeyError, match="no gradient has arrived there: there was no backward yet"):
        values["first", "grad_output"]
    expected = torch.autograd.grad(loss, [x, *outputs.values()], retain_graph=True)
    num_seen = len(values)  # autograd.grad runs the hooks of what it passes, as any backward
    loss.backward()
    for path, gradient in zip(outputs, expected[1:], strict=True):
        assert torch.equal(values[path, "grad_output"], gradient)
    assert torch.equal(values["first", "grad_input"], expected[0])
    assert torch.equal(values["second", "grad_input"], values["act", "grad_output"])
    assert len(values) > num_seen


def test_a_second_backward_is_a_repeat() -> None:
    model = Smooth()
    with recorder.trace(model, select="site=grad_output") as values:
        loss = model(batch()).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    assert torch.equal(values["first", "grad_output", "", 0, 1], 2 * values["first", "grad_output"])
    assert len(values) == 2 * len(list(model.modules()))


def test_a_vector_jacobian_product_is_that_of_autograd(live: tuple[Smooth, dict[str, torch.Tensor]]) -> None:
    model, outputs = live
    x = batch()
    with recorder.trace(model, select="site=input,output,param", keep_graph=True) as values:
        model(x).sum()
    v = torch.randn(5, 3)
    wanted: dict[Any, torch.Tensor] = {
        ("", "input"): x,
        "first": outputs["first"],
        ("second", "input"): outputs["act"],
        ("first", "param", "weight"): model.first.weight,
    }
    for key, tensor in wanted.items():
        (expected,) = torch.autograd.grad(outputs["second"], tensor, v, retain_graph=True)
        for _ in range(2):  # it may be asked again
            found = values.grad("second", key, v)
            assert torch.equal(found, expected) and not found.requires_grad
    assert torch.equal(values.grad("second", "second", v), v)
    assert x.grad is None and model.first.weight.grad is None
    assert values.live("first") is outputs["first"]


def test_asking_for_a_product_adds_no_values() -> None:
    model = Smooth()
    with recorder.trace(model, select="site=output,grad_output", keep_graph=True) as values:
        out = model(batch())
        values.grad("second", "first", torch.ones(5, 3))
        assert {key.site for key in values} == {"output"}
        out.sum().backward()
    assert torch.equal(values["second", "grad_output"], torch.ones(5, 3))
    assert {key.repeat for key in values} == {0}


def test_a_product_is_about_the_values_as_they_were_before_an_operation_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True))
    with recorder.trace(model, keep_graph=True) as values:
        model(batch())
    mask = (values["0"] > 0).float()
    assert 0 < mask.mean() < 1
    assert torch.equal(values.grad("1", "0", torch.ones(5, 8)), mask)


def test_a_scalar_needs_no_vector() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    x = torch.ones(1, 4, requires_grad=True)
    with recorder.trace(model, select="module='' site=input,output", keep_graph=True) as values:
        model(x)
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    assert torch.equal(values.grad("", ("", "input")), linear.weight.detach())


def test_a_product_that_cannot_be_had_says_why() -> None:
    model = Smooth()
    with recorder.trace(model, select="site=input,output", keep_graph=True) as values:
        out = model(batch().detach())
    ones = torch.ones(5, 3)
    for y, x, v, message in (
        ("second", "first", None, r"'second' has shape \(5, 3\): give v"),
        (
            "second",
            "first",
            torch.ones(3),
            r"v has to be a tensor of the shape of 'second', \(5, 3\); got shape \(3,\)",
        ),
        ("second", "first", 1.0, "got float"),
        ("first", "second", torch.ones(5, 6), "'first' does not depend on 'second'"),
        ("second", ("", "input"), ones, r"\('', 'input', 'x'\) has no graph.*requires_grad_\(\) on an input"),
        ("third", "first", ones, "no value at 'third'"),
    ):
        with pytest.raises(TraceError, match=message):
            values.grad(y, x, v)  # type: ignore[arg-type]
    out.sum().backward()
    with pytest.raises(TraceError, match="was freed by a backward; ask before it"):
        values.grad("second", "first", ones)
    with recorder.trace(model) as values:
        model(batch())
    with pytest.raises(TraceError, match=r"keep_graph=True"):
        values.grad("second", "first", ones)
    with pytest.raises(TraceError, match=r"keep_graph=True"):
        values.live("second")


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    parts: list[dict[str, torch.Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, mask: Any = None) -> Any:
        hidden = self.inner(input=x)
        return Result(hidden, [{"a": self.norm(hidden)}, {"b": rest[0]}]), (hidden + 1, None, "text")


def test_nested_values_have_the_names_of_a_recording(tmp_path: Path) -> None:
    model, x = Nested(), batch()
    with recorder.trace(model, select="site=input,output") as values:
        model(x, x + 1, mask={"pad": x + 2})
    assert torch.equal(values["", "output", "0.parts.0.a"], values["norm"])
    assert torch.equal(values["", "input", "mask.pad"], x + 2)
    assert torch.equal(values["", "input", "rest.0"], values["", "output", "0.parts.1.b"])
    assert torch.equal(values["inner", "input"], x)
    with pytest.raises(TraceKeyError, match=r"'' has several values, name one: \('', 'output', '0.hidden'\), "):
        values[""]
    rules = "site=input,output keep=tensor"
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=rules):
        model(x, x + 1, mask={"pad": x + 2})
    rows = recorder.open_run(tmp_path).to_pandas(columns=["seq", "module_path", "site", "name", "call"])
    recorded = [Key(*row) for row in rows.sort_values("seq").iloc[:, 1:].itertuples(index=False)]
    assert recorded == list(values)
    run = recorder.open_run(tmp_path)
    for key in values:
        found = run.array(key.module_path, site=key.site, name=key.name)
        assert torch.equal(torch.from_numpy(found.copy()), values[key])


def test_further_calls_of_a_module_have_keys_of_their_own() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    x = batch()
    with recorder.trace(model, select="site=input,output") as values:
        model(x)
    assert torch.equal(values["0"], layer(x))
    assert torch.equal(values["0", "output", "", 1], layer(layer(x).relu()))
    assert torch.equal(values["0", "input", "", 1], values["1"])
    assert torch.equal(values["2"], values["0"])  # another path of the same module
    assert Key("0", call=1) in values and ("0", "output", "", 2) not in values


def test_values_are_copies_that_nothing_changes_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = batch()
    with recorder.trace(model, select="site=output,param,buffer") as values:
        out = model(x)
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[operator]
            out.zero_()
    assert (values["0"] < 0).any() and values["1"].any()
    assert values["0", "param", "weight"].any()
    assert torch.equal(values["1"], values["0"].relu())


def test_state_is_that_of_the_begin_and_gradients_those_of_the_end() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with recorder.trace(model, select="site=param,buffer,grad") as values:
        for _ in range(2):
            model(batch()).sum().backward()
    for name, tensor in before.items():
        path, _, leaf = name.rpartition(".")
        site = "param" if name in dict(model.named_parameters()) else "buffer"
        assert torch.equal(values[path, site, leaf], tensor)
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        assert torch.equal(values[path, "grad", leaf], parameter.grad)  # type: ignore[arg-type]
    with recorder.trace(Net(), select="site=grad") as values:
        pass
    with pytest.raises(TraceKeyError, match="was None"):
        values["head", "grad", "weight"]


def test_what_is_not_called_is_silent_with_a_reason() -> None:
    model = nn.MultiheadAttention(4, 2)
    unused = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(3, 1, 4)
    with recorder.trace(nn.ModuleDict({"a": model, "b": unused})) as values:
        model(x, x, x)
    assert (
        "'a' was (MultiheadAttention): it had nothing to do, or another way took its parameters"
        in values.silent["a.out_proj"]
    )
    assert values.silent["b.0"] == "not called while the trace ran, or only inside a compiled function"
    with pytest.raises(TraceKeyError, match=r"'a.out_proj' is silent: not called, though 'a' was"):
        values["a.out_proj"]
    assert "silent a.out_proj: not called" in repr(values)


def test_arguments_are_seen_as_the_forward_takes_them_and_outputs_as_it_gives_them() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 100)
    x = batch()
    with recorder.trace(model, select="site=input,output") as values:
        out = model(x)
    assert torch.equal(values["", "input"], x * 2)
    assert torch.equal(values[""] + 100, out)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("site=output steps=3", "'steps' makes no sense in a trace"),
        ("site=output keep=stats", "'keep' makes no sense"),
        ([{"rank": 0}], "'rank' makes no sense"),
        ("site=output,tap", "does not see site 'tap', only a recording does; allowed: input, output"),
        ("", "expected rules"),
        (
            "site=outputs",
            "unknown site 'outputs'.*; allowed: input, output, grad_input, grad_output, param, grad, buffer$",
        ),
        ("sites=output", "unknown key 'sites'.*; keys are module, class, leaf, site, name, call$"),
        ("output", "is not of the form key=value; keys are module, class, leaf, site, name, call$"),
        (3, "expected text, a table"),
    ],
)
def test_rules_that_make_no_sense_are_refused(select: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recorder.trace(Net(), select=select)


def test_a_rule_that_matches_nothing_is_refused_before_anything_is_changed() -> None:
    model = Net()
    with pytest.raises(AttachError, match=r"'module=block.0 site=output' matches no module; .* near it: 'blocks.0'"):
        recorder.trace(model, select="module=block.0 site=output")
    with pytest.raises(AttachError, match=r"'class=Linaer' matches no module; class names near it: 'Linear'"):
        recorder.trace(model, select="class=Linaer")
    with pytest.raises(AttachError, match=r"depth=1 leaves out 10 modules"):
        recorder.trace(model, select="module=blocks.0.up", depth=1)
    assert hook_counts(model) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(AttachError, match=r"needs a torch.nn.Module, got function"):
        recorder.trace(batch)  # type: ignore[arg-type]
    for depth in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="depth = "):
            recorder.trace(Net(), depth=depth)  # type: ignore[arg-type]
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(AttachError, match="'1', a TorchScript module"):
        recorder.trace(nn.Sequential(nn.ReLU(), scripted))


def test_what_has_no_call_of_its_own_in_an_exported_graph_is_silent_with_that_reason() -> None:
    model = torch.export.export(Net(), (batch().detach(),)).module()
    with recorder.trace(model) as values:
        model(batch().detach())
    named = {path for path, part in model.named_modules() if type(part) is nn.Module}
    assert named and set(values.silent) == named, "and torch's own helper in it is nobody's module"
    assert set(values.silent.values()) == {"in a graph of torch.fx or torch.export, where it has no call of its own"}
    assert [key.module_path for key in values] == [""]


def test_a_key_that_is_not_there_names_the_nearest() -> None:
    model = Net()
    with recorder.trace(model) as values:
        model(batch())
    with pytest.raises(KeyError, match=r"no value at 'block.0'; nearest: 'blocks.0'"):
        values["block.0"]
    with pytest.raises(KeyError, match="select='site=input' would select it"):
        values["head", "input"]
    for wrong in (3, (), ("head", 1), ("head", "output", "", "x"), ("a", "b", "c", 0, 0, 0)):
        with pytest.raises(KeyError, match="is no key of a trace"):
            values[wrong]
    assert "nope" not in values and values.get("nope") is None
    assert values != {} and len({values}) == 1


def test_a_long_trace_has_a_short_repr() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    model.add_module("x" * 500, nn.Identity())
    with recorder.trace(model) as values:
        model(torch.ones(1, 2))
    lines = repr(values).splitlines()
    assert len(lines) == 43 and all(len(line) < 120 for line in lines)
    assert lines[0] == "102 values, 816 bytes" and any(line.startswith("... 62 more") for line in lines)
    with recorder.trace(model) as values:
        pass
    assert repr(values).splitlines()[0] == "0 values, 0 bytes"
    assert "silent: 97 more in values.silent" in repr(values)


class Documented:
    """What the page on notebooks shows."""

    blocks: ClassVar = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_page_on_notebooks_shows_what_its_example_prints(tmp_path: Path) -> None:
    (at,) = [i for i, (_, text) in enumerate(Documented.blocks) if "recorder.trace(" in text]
    (language, code), (output_language, shown) = Documented.blocks[at : at + 2]
    assert (language, output_language) == ("python", "text")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_a_notebook_shows_values_and_their_trace_and_escapes_names() -> None:
    model = nn.Sequential()
    model.add_module("<b>x</b>", nn.Linear(2, 2))
    traced = recorder.trace(model)
    assert repr(traced) == "<Trace of 2 modules, not entered: with recorder.trace(model) as values>"
    assert "&lt;Trace" in traced._repr_html_()
    with traced as values:
        model(torch.ones(1, 2))
    assert repr(traced) == "<Trace: 2 values>"
    for shown in (values._repr_html_(), traced._repr_html_()):
        assert "<th>absmax</th>" in shown and "&lt;b&gt;x&lt;/b&gt;" in shown and "<b>" not in shown
        assert shown.count("<tr>") == 3 and "2 values, 16 bytes" in shown
    with recorder.trace(model) as nothing:
        pass
    assert "silent" in nothing._repr_html_() and "<td>" not in nothing._repr_html_()
