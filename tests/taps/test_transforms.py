"""Every transform of an instrumented model records what plain hooks see of the model untransformed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder

from .support import RULES, assert_same, batch, make, plain_hooks, recorded, train

pytestmark = [
    # Said by torch of its own code: dynamo looks at a graph's inputs, inductor and export use what is deprecated.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # torch 2.9 loads so
]
Transform = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _export(**options: Any) -> Transform:
    return lambda model, x: torch.export.export(model, (x,), **options).module()


def _exported_dynamic(model: nn.Module, x: torch.Tensor) -> Any:
    shapes = ({0: torch.export.Dim("rows", min=2)},)
    return torch.export.export(model, (batch(5),), dynamic_shapes=shapes).module()


def _decomposed(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,)).run_decompositions().module()


def _unflattened(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.unflatten(torch.export.export(model, (x,)))


def _exported_and_loaded(model: nn.Module, x: torch.Tensor) -> Any:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()


def _rewritten(model: nn.Module, x: torch.Tensor) -> Any:
    """FX, then a pass that puts another function in place of each ``sin``."""
    traced = torch.fx.symbolic_trace(model)
    for node in traced.graph.nodes:
        if node.op == "call_method" and node.target == "sin":
            node.op, node.target = "call_function", torch.sin
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _scripted(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.script(model)


def _scripted_and_loaded(model: nn.Module, x: torch.Tensor) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(_scripted(model, x), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def _traced(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.trace(model, x)


def _compiled(**options: Any) -> Transform:
    return lambda model, x: torch.compile(model, fullgraph=True, **options)


TRANSFORMS: dict[str, tuple[Transform, bool]] = {
    "eager": (lambda model, x: model, True),
    "compile, eager": (_compiled(backend="eager"), True),
    "compile, aot_eager": (_compiled(backend="aot_eager"), True),
    "compile, inductor": (_compiled(backend="inductor"), False),
    "compile, dynamic shapes": (_compiled(backend="aot_eager", dynamic=True), True),
    "export": (_export(), True),
    "export, strict": (_export(strict=True), True),
    "export, dynamic shapes": (_exported_dynamic, True),
    "export, decomposed": (_decomposed, False),
    "export, unflattened": (_unflattened, True),
    "export, saved and loaded": (_exported_and_loaded, True),
    "jit.script": (_scripted, True),
    "jit.script, saved and loaded": (_scripted_and_loaded, True),
    "jit.trace": (_traced, True),
    "fx": (lambda model, x: torch.fx.symbolic_trace(model), True),
    "fx, rewritten": (_rewritten, True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_records_what_plain_hooks_see_of_the_model_untransformed(name: str, tmp_path: Path) -> None:
    transform, is_exact = TRANSFORMS[name]
    model, x = make(), batch()
    wanted = plain_hooks(model, lambda plain: train(plain, x))
    twin = make()
    twin_loss = train(twin, x)
    recorder.instrument(model)
    made = transform(model, x)
    with recorder.attach(made, enabled=True, dir=str(tmp_path), rules=RULES):
        loss = train(made, x)
    run = recorder.open_run(tmp_path)
    assert_same(recorded(run), wanted, exactly=is_exact)
    assert run.writers[0].balance.dropped == {}
    torch.testing.assert_close(loss, twin_loss, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
