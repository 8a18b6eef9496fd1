"""Some of `python -m tests.campaigns twins`, and that it notices what a recorder could do wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo

from recorder.capture.hooks.module import HookedModule
from tests.campaigns.twins.twins import REFUSALS, Combination, Rig, differences, graphs_so_far, product, train

# Said by torch of its own code, and of what a combination does on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SAMPLE = [
    Combination("mlp", "scaler", "none"),
    Combination("conv", "adamw fused", "checkpoint"),
    Combination("transformer", "double backward", "none"),
    Combination("lstm", "lbfgs", "none"),
    Combination("tied", "two optimizers", "checkpoint reentrant"),
    Combination("tied", "double backward", "checkpoint reentrant"),
    Combination("shared", "accumulation", "instrument fx"),
    Combination("buffers", "clipping", "autocast bf16"),
    Combination("mlp", "sgd", "compile eager"),
    Combination("mlp", "sgd", "tap eager"),
    Combination("buffers", "adamw foreach", "instrument aot_eager"),
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("twins"))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.compiler.reset()  # what an earlier file of tests has compiled may have left no room for another graph
    yield
    torch.set_num_threads(before)
    torch.compiler.reset()


@pytest.mark.parametrize("combination", SAMPLE, ids=lambda one: one.name)
def test_training_is_bit_equal_with_the_recorder_and_without(rig: Rig, combination: Combination) -> None:
    result = rig.compare(combination)
    assert result.problems == []
    assert (result.num_compared > 20 and result.num_rows > 20) or result.refusal in REFUSALS


def test_an_entry_of_dynamos_metrics_without_a_name_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = dynamo.CompilationMetrics(compile_id="0/0", co_name="forward", co_filename="models.py")
    again = dynamo.CompilationMetrics(
        compile_id="0/1", co_name="forward", co_filename="models.py", recompile_reason="size mismatch"
    )
    backward = dynamo.CompilationMetrics(compile_id="0/0", inductor_compile_time_s=7.9)  # its cache did not have it
    monkeypatch.setattr(dynamo, "get_compilation_metrics", lambda: [frame, backward, again])
    graphs = graphs_so_far()
    assert (graphs.frames, graphs.recompiles) == (2, 1)


def _gradient_changes(self: HookedModule, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: gradient * (1 + 1e-6))


def _value_changes(self: HookedModule, output: Any) -> None:
    output.detach().mul_(1 + 1e-6)


def _random_number(self: HookedModule, output: Any) -> None:
    torch.rand(())


def _random_number_of_python(self: HookedModule, output: Any) -> None:
    __import__("random").random()


def _exception(self: HookedModule, output: Any) -> None:
    raise SystemError("of a hook")


@pytest.mark.parametrize(
    "fault", [_gradient_changes, _value_changes, _random_number, _random_number_of_python, _exception]
)
def test_a_hook_that_disturbs_training_is_noticed(
    rig: Rig, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookedModule, "after_forward", fault)
    assert rig.compare(Combination("shared", "sgd", "none")).problems


def test_a_graph_more_is_noticed() -> None:
    once, twice = (
        train(Combination("mlp", "sgd", transform), is_recorded=False) for transform in ("none", "compile eager")
    )
    assert differences(once, twice, with_graphs=False) == []
    (found,) = differences(once, twice, with_graphs=True)
    assert "graphs=2" in found


def test_every_combination_that_torch_refuses_is_one_of_the_product() -> None:
    combinations = set(product())
    for refusal in REFUSALS:
        for model in refusal.models:
            assert {Combination(model, refusal.loop, transform) for transform in refusal.transforms} <= combinations
