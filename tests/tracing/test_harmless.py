"""A trace changes nothing, whatever the model is wrapped in or returns, and says what it could not see."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.errors import TraceError, TraceKeyError
from recorder.tracing.values import Key, Values
from tests.rigs.capturing import flagged

from .models import EVERY_CALL_SITE, Net, Smooth, batch, hook_counts


def test_a_training_step_is_bit_equal_under_a_trace() -> None:
    def train(traced: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        model, x = Net(), batch()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(5)
        for _ in range(3):
            if traced:
                with recorder.trace(model, select="site=*", keep_graph=True) as values:
                    out = model(x)
                    values.grad("", "blocks.1", torch.ones(5, 1))
                    out.square().sum().backward()
                assert len(values) > 50
            else:
                out = model(x)
                out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert x.grad is not None
        return [out.detach(), x.grad, *model.state_dict().values()], torch.get_rng_state()

    (plain, plain_rng), (traced, traced_rng) = train(False), train(True)
    assert all(map(torch.equal, plain, traced)) and torch.equal(plain_rng, traced_rng)


def test_hooks_are_gone_after_the_block_also_when_it_raises() -> None:
    model = Net()
    with pytest.raises(ZeroDivisionError), recorder.trace(model, select=EVERY_CALL_SITE) as values:
        model(batch())
        assert hook_counts(model) > 10
        raise ZeroDivisionError
    assert hook_counts(model) == 0
    num_seen = len(values)
    model(batch())
    assert num_seen > 20 and len(values) == num_seen


def test_a_forward_that_raises_is_a_call_without_output() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with recorder.trace(model, select="site=input,output") as values:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(5, 3))
        model(torch.ones(5, 4))
    assert ("0", "input") in values and ("0", "output") not in values
    assert values["0", "input", "", 1].shape == values["0", "output", "", 1].shape == (5, 4)


def test_traces_nest_and_one_is_entered_once() -> None:
    model = Net()
    with recorder.trace(model) as outer:
        with recorder.trace(model.blocks[0], select="site=input") as inner:
            model(batch())
        model(batch())
    assert len(inner) == 5 and inner["up", "input"].shape == (5, 4)
    assert ("blocks.0", "output", "", 1) in outer and hook_counts(model) == 0
    once = recorder.trace(model)
    with once, pytest.raises(TraceError, match="entered only once"), once:
        pass
    assert hook_counts(model) == 0


def test_neither_the_model_nor_its_graph_is_kept_alive() -> None:
    model, x = Smooth(), batch()
    with recorder.trace(model, select="site=*", keep_graph=True) as values:
        out = model(x)
    gone = weakref.ref(values)
    del values
    assert gone() is None  # by reference counts: what the graph holds of a trace does not hold the trace
    out.sum().backward()
    with recorder.trace(model, select=EVERY_CALL_SITE) as values:
        model(x)
    reference = weakref.ref(model)
    del model, out
    gc.collect()
    assert reference() is None and len(values) == 8


def test_a_hook_on_a_leaf_is_gone_once_its_gradient_has_arrived() -> None:
    model, x = Smooth(), batch()
    with recorder.trace(model, select="module='' site=grad_input") as values:
        model(x).sum().backward()
    assert not x._backward_hooks
    model(x).sum().backward()
    assert len(values) == 1


def test_a_recording_goes_on_as_without_a_trace(tmp_path: Path) -> None:
    def train(traced: bool) -> Any:
        torch.manual_seed(2)
        with flagged(tmp_path / str(traced)) as recording:
            model = Smooth()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                if traced:
                    with recorder.trace(model, select=EVERY_CALL_SITE) as values:
                        model(batch()).sum().backward()
                    assert len(values) == 16
                else:
                    model(batch()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        columns = ["step", "micro_step", "phase", "module_path", "site", "name", "call", "repeat", "fingerprint"]
        return recording.rows()[columns]

    plain, traced = train(False), train(True)
    assert len(plain) > 50 and plain.equals(traced)


def test_nothing_is_written_and_no_thread_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = threading.enumerate()
    model = Net()
    with recorder.trace(model, select="site=*"):
        model(batch()).sum().backward()
        assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []
    code = "import recorder, sys; recorder.trace; assert 'pyarrow' not in sys.modules; print('ok')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "ok\n"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_is_seen_once_with_its_gradients(use_reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            out: torch.Tensor = self.head(self.norm(x))
            return out

    def seen(model: Net) -> Values:
        torch.manual_seed(4)
        with recorder.trace(model, select="site=output,grad_output") as values:
            model(batch()).sum().backward()
        return values

    plain, checkpointed = seen(Net()), seen(Checkpointed())
    assert set(checkpointed) == set(plain)
    for key in plain:
        assert torch.equal(checkpointed[key], plain[key]), key
    assert not checkpointed.skipped


def test_a_shared_block_in_a_reentrant_checkpoint_has_no_gradients_and_says_why() -> None:
    block = nn.Linear(4, 4)
    with recorder.trace(block, select="site=output,grad_output") as values:
        x: Any = batch()
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=True)
        x.sum().backward()
    assert len(values) == 2
    with pytest.raises(TraceKeyError, match="which of its 2 calls that was is not known; checkpoint with"):
        values["", "grad_output"]


def test_selective_checkpointing_that_keeps_clones_recomputes_what_it_did_without() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    class Clones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second((self.first(x).clone() * 2).sin())
            return out.clone().cos()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE)

    def gradient(traced: bool) -> torch.Tensor:
        model, x = Clones(), batch()
        with recorder.trace(model, select=EVERY_CALL_SITE if traced else "module='' site=param", depth=1) as values:
            out: Any = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        assert len(values) == 12 * traced
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_calls_in_another_thread_are_not_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with recorder.trace(model) as values:
        thread = threading.Thread(target=model, args=(batch(),))
        thread.start()
        thread.join()
    assert len(values) == 0
    assert values.silent[""].startswith("called in another thread only")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_silent_inside_unless_it_is_run_uncompiled(in_place: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model, x = Smooth(), batch().detach()
    expected = model(x)
    if in_place:
        model.compile(backend=counter, fullgraph=True)
        compiled: nn.Module = model
    else:
        compiled = torch.compile(model, backend=counter, fullgraph=True)  # type: ignore[assignment]
    for _ in range(2):  # compiled inside the block, and before it
        with recorder.trace(compiled, select="site=input,output") as values:
            assert torch.equal(compiled(x), expected)
    compiled(x)
    assert counter.frame_count == 1
    assert "set_stance('force_eager')" in values.silent["first"]
    assert ("" in values) == (not in_place)
    with torch.compiler.set_stance("force_eager"), recorder.trace(compiled) as values:
        assert torch.equal(compiled(x), expected)
    assert [key.module_path for key in values] == ["first", "act", "second", ""] and not values.silent
    asked = recorder.trace(compiled)
    with torch.compiler.set_stance("force_eager"), asked as values:
        pass
    assert set(values.silent) == {"", "first", "act", "second"}
    assert not any("force_eager" in why or "compiled graph" in why for why in values.silent.values()), (
        "it was entered so"
    )
    torch._dynamo.reset()


def test_a_function_that_is_compiled_within_blocks_is_compiled_once_more_outside_and_never_again() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model, x = Smooth(), batch().detach()
    expected = model(x) + 1

    def run(x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, model(x) + 1)

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for _ in range(3):
        with recorder.trace(model) as values:
            assert torch.equal(compiled(x), expected)
        assert values.silent["first"].endswith("or only inside a compiled function")
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_wrappers_leave_no_trace_in_the_paths() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.ReLU())
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    with recorder.trace(wrapped) as values:
        wrapped(batch())
    assert [key.module_path for key in values] == ["0", "1", ""]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_sharded_values_stay_sharded_and_ddp_changes_no_key(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = fully_shard(Smooth(), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(model, Smooth)
    with recorder.trace(model, select="site=output,param,grad") as values:
        model(batch()).sum().backward()
    kinds = {site: {type(values[key]) for key in values if key.site == site} for site in ("output", "param", "grad")}
    assert kinds == {"output": {torch.Tensor}, "param": {DTensor}, "grad": {DTensor}}
    assert torch.equal(values["first", "grad", "bias"].to_local(), model.first.bias.grad.to_local())  # type: ignore[attr-defined,union-attr]
    assert "'first', 'param', 'weight'" in repr(values)
    ddp = nn.parallel.DistributedDataParallel(Smooth())
    with recorder.trace(ddp) as values:
        ddp(batch())
    assert [key.module_path for key in values] == ["first", "act", "second", ""]


def test_inference_mode_gives_tensors_for_every_use() -> None:
    model = Smooth()
    with recorder.trace(model) as values, torch.inference_mode():
        out = model(batch())
    assert torch.equal(values[""], out) and not values[""].is_inference()
    (values["first"] * torch.ones(6, requires_grad=True)).sum().backward()


def test_values_inside_function_transforms_are_skipped_with_a_reason() -> None:
    model = Smooth()
    x = batch().detach()
    with recorder.trace(model, select=EVERY_CALL_SITE) as values:
        mapped = torch.func.vmap(model)(x)
        torch.func.grad(lambda x: model(x).sum())(x)
    assert torch.equal(mapped, torch.func.vmap(model)(x))
    assert len(values) == 0 and not values.silent
    assert "inside vmap, grad or another function transform" in values.skipped[Key("first")]
    with pytest.raises(TraceKeyError, match="inside vmap"):
        values["first"]
    with recorder.trace(model, select="site=grad_output") as values:
        torch.autograd.functional.jacobian(model, x, vectorize=True)
    assert len(values) == 0 and "inside vmap" in values.skipped[Key("first", "grad_output")]


class Returns(nn.Module):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self) -> torch.Tensor:
        return self.make()


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)


def warned(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Torch warns of kinds that it is about to give up, or that are new."""

    def quietly() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(quantized tensor creation|in beta state|prototype stage)")
            return make()

    return quietly


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8)


def strided() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse_coo"),
        pytest.param(warned(lambda: torch.eye(3).to_sparse_csr()), id="sparse_csr"),
        pytest.param(warned(quantised), id="quantised"),
        pytest.param(warned(strided), id="nested"),
        pytest.param(lambda: torch.empty(0, 3), id="empty"),
        pytest.param(lambda: torch.tensor(2.5), id="scalar"),
        pytest.param(lambda: torch.ones(3, dtype=torch.complex64).conj(), id="conj"),
        pytest.param(lambda: torch.ones(3).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(lambda: torch.ones(3, dtype=torch.bool), id="bool"),
        pytest.param(lambda: torch.ones(1).expand(1000), id="expanded"),
        pytest.param(lambda: torch.ones(3, device="meta"), id="meta"),
        pytest.param(jagged, id="jagged"),
        pytest.param(lambda: nn.Parameter(torch.ones(3)), id="parameter"),
        pytest.param(lambda: torch.ones(3, 3).to_mkldnn(), id="mkldnn"),
    ],
)
def test_every_kind_of_tensor_is_kept_as_it_is(make: Callable[[], torch.Tensor]) -> None:
    model = Returns(make)
    with recorder.trace(model) as values:
        out = model()
    kept = values[""]
    assert (kept.dtype, kept.layout, kept.device, kept.is_nested) == (out.dtype, out.layout, out.device, out.is_nested)
    assert kept is not out and not kept.requires_grad
    if kept.layout is torch.strided and not (kept.is_meta or kept.is_quantized or kept.is_nested):
        assert kept.data_ptr() != out.data_ptr() or not kept.numel()
        assert torch.equal(
            *(tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for tensor in (kept, out))
        )
    assert repr(values).startswith("1 values, ")


def test_memory_that_was_freed_is_skipped_and_not_read() -> None:
    def freed() -> torch.Tensor:
        tensor = torch.ones(8)
        tensor.untyped_storage().resize_(0)
        return tensor

    model = Returns(freed)
    with recorder.trace(model) as values:
        model()
    assert values.skipped == {Key(""): "its memory was freed, as FSDP does between uses"}


def test_an_uninitialised_parameter_is_skipped() -> None:
    model = nn.LazyLinear(3)
    with recorder.trace(model, select="site=param,output") as values:
        out = model(torch.ones(2, 4))
    assert torch.equal(values[""], out)
    assert values.skipped[Key("", "param", "weight")] == "not initialised yet"


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError("broken mapping")


class ReturnsBroken(nn.Module):
    def forward(self) -> Any:
        return Broken()


def test_an_error_in_a_hook_does_not_reach_the_model() -> None:
    model = ReturnsBroken()
    with recorder.trace(model) as values:
        assert type(model()) is Broken
    assert values.skipped == {Key(""): "ValueError: broken mapping"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_copies_pickles_and_tracings_within_the_block_are_inert(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with recorder.trace(model) as values:
        copy.deepcopy(model)(x)
        pickle.loads(pickle.dumps(model))(x)
        torch.fx.symbolic_trace(model)(x)
        torch.export.export(model, (x,))
    assert len([key for key in values if key.module_path == ""]) == 0
    with recorder.trace(model), pytest.raises(RuntimeError, match="script the model outside its block"):
        torch.jit.script(model)


def test_a_replica_that_shares_the_hooks_is_not_seen() -> None:
    model = nn.ReLU()
    with recorder.trace(model, select="site=input,output") as values:
        replica: Any = model._replicate_for_data_parallel()
        assert len(replica._forward_hooks) == 1
        replica(torch.ones(2, 4))
    assert len(values) == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_jit_traces_within_the_block_holds_nothing_of_ours() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with recorder.trace(model, select="site=input,output") as values:
        traced = torch.jit.trace(model, (torch.ones(2, 4),), check_trace=False)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]  # the text holds paths of files, and any words
    assert "aten::linear" in kinds and not [kind for kind in kinds if "clone" in kind]
    assert len(values) == 0
