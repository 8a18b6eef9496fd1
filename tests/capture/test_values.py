"""Every site against plain hooks of the test's own, bit for bit, at the timings that go wrong."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import recorder
from recorder.capture import local_values
from tests.rigs.capturing import Recording, Tiny, batch, flagged


class Witness:
    """Plain hooks that clone on the spot: what was there, seen without the recorder."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[tuple[int, str, str, str], torch.Tensor] = {}
        self.step = 0
        self._model = model
        for path, module in model.named_modules():
            module.register_forward_hook(self._saw_output(path), prepend=True)
            module.register_forward_pre_hook(self._saw_input(path))

    def _keep(self, site: str, path: str, name: str, tensor: torch.Tensor) -> None:
        self.values[self.step, site, path, name] = tensor.detach().clone()

    def _saw_output(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self._keep("output", path, "", output)
            output.register_hook(lambda gradient: self._keep("grad_output", path, "", gradient))

        return hook

    def _saw_input(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            name = "x" if path == "" else "input"
            self._keep("input", path, name, args[0])
            if args[0].requires_grad:
                args[0].register_hook(lambda gradient: self._keep("grad_input", path, name, gradient))

        return hook

    def before_update(self) -> None:
        for path, module in self._model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._keep("param", path, name, parameter)
                if parameter.grad is not None:
                    self._keep("grad", path, name, parameter.grad)
            for name, buffer in module.named_buffers(recurse=False):
                self._keep("buffer", path, name, buffer)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        owners = {
            id(parameter): (path, name)
            for path, module in self._model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for parameter, state in optimizer.state.items():
            path, name = owners[id(parameter)]
            for key, value in state.items():
                self._keep("optim", path, f"{name}.{key}", value)
        self.step += 1


class Normed(Tiny):
    """Batch statistics in buffers, and a residual added in place after the hook has fired."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden += 1.0
        return self.second(self.act(self.norm(hidden)))  # type: ignore[no-any-return]


def train(model: nn.Module, witness: Witness, num_steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for i in range(num_steps):
        model(batch(i).requires_grad_()).square().mean().backward()
        witness.before_update()
        optimizer.step()
        witness.after_update(optimizer)
        optimizer.zero_grad(set_to_none=False)


def assert_equal(recording: Recording, witness: Witness, sites: set[str]) -> None:
    run = recording.run
    seen = {site for _, site, _, _ in witness.values}
    assert sites <= seen
    for (step, site, path, name), expected in witness.values.items():
        if site in sites:
            actual = run.tensor(path, site=site, step=step, name=name)
            assert actual.dtype == expected.dtype, (step, site, path, name)
            assert torch.equal(actual, expected), (step, site, path, name)


ALL_SITES = {"input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim"}


def test_every_site_equals_plain_hooks(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Normed()
        witness = Witness(model)
        train(model, witness)
    assert_equal(recording, witness, ALL_SITES)


def test_a_slow_writer_changes_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorder.capture.staging import measure

    plain_measure = measure.measure_small
    calls: list[int] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            import time

            time.sleep(0.5)
        calls.append(1)
        return plain_measure(*args, **kwargs)

    monkeypatch.setattr(measure, "measure_small", slow)
    with flagged(tmp_path) as recording:
        model = Normed()
        witness = Witness(model)
        train(model, witness)
    assert calls
    assert_equal(recording, witness, ALL_SITES)


def test_recording_changes_no_bit_of_training(tmp_path: Path) -> None:
    def final() -> tuple[list[torch.Tensor], torch.Tensor, Any]:
        torch.manual_seed(3)
        np.random.seed(3)
        model = nn.Sequential(Normed(), nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(model.parameters())
        for i in range(4):
            model(batch(i)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (
            [p.detach().clone() for p in model.parameters()],
            torch.get_rng_state(),
            np.random.get_state(),
        )

    expected = final()
    with flagged(tmp_path):
        actual = final()
    assert all(torch.equal(a, b) for a, b in zip(actual[0], expected[0], strict=True))
    assert torch.equal(actual[1], expected[1])
    assert repr(actual[2]) == repr(expected[2])


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    score: torch.Tensor
    label: str


def test_every_tensor_of_nested_arguments_and_outputs_has_its_name(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *rest: Any, mask: Any = None, **extra: Any) -> dict[str, Any]:
            y = self.layer(x)
            return {"pair": Pair(y, [y + 1, (y + 2, None)]), "record": Record(y * 2, "cat"), "text": "no tensor"}

    with flagged(tmp_path) as recording:
        model = Nested()
        out = model(batch(0), {"deep": [batch(1)]}, mask=(batch(2), None), more=batch(3))
        (out["pair"].right[1][0].sum() + out["record"].score.sum()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    names = {site: set(recording.rows(site=site, module_path="").name) for site in ("input", "output", "grad_output")}
    assert names["input"] == {"x", "rest.0.deep.0", "mask.0", "more"}
    assert names["output"] == {"pair.left", "pair.right.0", "pair.right.1.0", "record.score"}
    assert names["grad_output"] == {"pair.left", "pair.right.1.0", "record.score"}
    assert np.array_equal(recording.array("", site="input", name="mask.0"), batch(2).numpy())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64,
     torch.int8, torch.uint8, torch.bool],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_a_tapped_tensor_of_any_kind_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    with flagged(tmp_path) as recording:
        model = Tiny()
        model(batch())
        recorder.tap("mine", value)
    actual = recording.run.tensor("", site="tap", name="mine")
    assert actual.dtype == dtype
    assert actual.shape == value.shape
    assert torch.equal(actual.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[0].expand(5, -1), lambda t: torch.complex(t, t).conj(),
     lambda t: torch.complex(t, t).conj().imag],
)  # fmt: skip
def test_a_view_is_recorded_as_the_values_it_shows(tmp_path: Path, view: Callable[[Any], torch.Tensor]) -> None:
    value = view(torch.arange(12.0).reshape(3, 4))
    with flagged(tmp_path) as recording:
        Tiny()(batch())
        recorder.tap("mine", value)
    assert torch.equal(recording.run.tensor("", site="tap", name="mine"), value.resolve_conj().resolve_neg())


def test_a_look_at_an_ordinary_tensor_keeps_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_refuse_kinds` and what follows it call methods of torch that release the lock, for the writer to take."""
    value = torch.arange(12.0)
    local_values.plain(value)
    monkeypatch.setattr(local_values, "_refuse_kinds", lambda tensor: pytest.fail("looked at the kind again"))
    assert local_values.plain(value)[0] is value
    parameter = nn.Parameter(value)
    assert local_values.plain(parameter)[0] is parameter
    for unusual in (torch.complex(value, value).conj().imag, torch._efficientzerotensor(3)):
        with pytest.raises(pytest.fail.Exception):
            local_values.plain(unusual)


def test_a_tap_carries_its_module_its_calls_and_its_gradient(tmp_path: Path) -> None:
    class Tapped(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = recorder.tap("hidden", self.first(x))
            hidden = recorder.tap("hidden", hidden * 2)
            return self.second(hidden)  # type: ignore[no-any-return]

    with flagged(tmp_path) as recording:
        model = nn.Sequential(Tapped())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
    rows = recording.rows(site="tap")
    assert [tuple(r) for r in rows[["module_path", "name", "phase", "call"]].itertuples(index=False)] == [
        ("0", "hidden", "forward", 0),
        ("0", "hidden", "forward", 1),
        ("0", "hidden", "backward", 1),
        ("0", "hidden", "backward", 0),
    ]


@pytest.mark.filterwarnings("ignore")
def test_statistics_of_a_partial_tensor_are_left_out_with_the_reason(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with flagged(tmp_path) as recording:
            Tiny()(batch())
            recorder.tap("summand", DTensor.from_local(batch(), mesh, [Partial()]))
            recorder.tap("piece", DTensor.from_local(batch(), mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()
    rows = recording.rows(site="tap").set_index("name")
    assert rows["mean"].isna()["summand"] and rows["mean"].notna()["piece"]
    assert rows.note["summand"] == '{"no_statistics":"Partial"}'
    assert (rows.global_shape == "[3,4]").all()
    assert torch.equal(recording.run.tensor("", site="tap", name="summand"), batch())


@pytest.mark.filterwarnings("ignore")
def test_the_probe_alone_writes_no_row_of_a_summand(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with flagged(tmp_path, "site=output,tap keep=probe") as recording:
            Tiny()(batch())
            recorder.tap("summand", DTensor.from_local(batch(), mesh, [Partial()]))
    finally:
        dist.destroy_process_group()
    assert recording.run.num_rows == 0 and recording.run.num_all_rows > 0


def test_scalars_are_numbers_of_their_step(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for i in range(2):
            loss = model(batch(i)).sum()
            loss.backward()
            recorder.scalar("loss", loss)
            recorder.scalar("tokens", 512 * i)
            optimizer.step()
    rows = recording.rows(site="scalar", name="loss")
    assert list(rows.step) == [0, 1]
    for i in range(2):
        assert recording.array("", site="scalar", name="loss", step=i) == np.float32(rows["mean"][i])
    assert list(recording.rows(site="scalar", name="tokens")["mean"]) == [0.0, 512.0]
    assert list(recording.rows(site="scalar", name="lr.SGD.0")["mean"]) == [0.25, 0.25]


def test_what_is_given_before_the_models_first_call_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with flagged(tmp_path, "site=scalar keep=stats; site=tap name=x* keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for i in range(3):
            recorder.scalar("tokens", 512 * i)
            recorder.tap("x", batch())
            recorder.tap("unasked", batch())
            if i:
                model(batch(i)).sum().backward()
                optimizer.step()
    for site, name in (("scalar", "tokens"), ("tap", "x")):
        assert any(f"{site} '{name}' was given before the model's first call" in text for text in caplog.messages)
        assert len(recording.rows(site=site, name=name)) == 1
    counts = {event["message"].split("'")[1]: event["count"] for event in recording.manifest["events"]}
    assert counts == {"tokens": 2, "x": 2}


class Unshowable:
    """A class of a program, of which no text can be made."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class UnshowableText(str):
    """A text of which no other can be made."""

    __slots__ = ()

    __repr__ = __str__ = Unshowable.__repr__


WRONG_NAMES = (5, None, b"x", ("a",), Unshowable(), "x" * 3_000_000)


def test_wrong_names_and_steps_cost_themselves_alone_before_the_first_call_and_after_it(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=scalar keep=stats; site=tap keep=stats") as recording:
        model = Tiny()
        for i in range(2):
            for name in (*WRONG_NAMES, UnshowableText("odd")):
                recorder.scalar(name, 1.0)  # type: ignore[arg-type]
            recorder.tap(UnshowableText("odd tap"), batch())
            for number in (None, "three", float("nan"), 2**53, Unshowable(), torch.zeros((), device="meta")):
                recorder.step(number)  # type: ignore[arg-type]
            recorder.scalar("tokens", i)
            recorder.step(7)
            model(batch(i)).sum().backward()
        recorder.scalar("tokens", 2)
    assert list(recording.rows(site="scalar", name="tokens")["mean"]) == [1.0, 2.0]
    assert set(recording.rows(site="scalar").step) == {7}
    assert recording.manifest["ledger"]["dropped"] == {"hook_error": len(WRONG_NAMES)}
    assert max(len(event["message"]) for event in recording.manifest["events"]) < 500


def test_nothing_is_recorded_and_taps_are_the_identity_when_off() -> None:
    value = batch()
    assert recorder.tap("x", value) is value
    recorder.scalar("loss", 1.0)
    recorder.step(3)
    with recorder.attach(Tiny()) as attachment:
        assert attachment.run_dir is None


def test_arguments_with_cycles_are_walked_once(tmp_path: Path) -> None:
    @dataclass
    class Node:
        value: torch.Tensor
        parent: Any = None
        children: Any = None

    class OverTree(Tiny):
        def forward(self, x: Any) -> torch.Tensor:
            return self.second(self.act(self.first(x.value)))  # type: ignore[no-any-return]

    top = Node(batch(0))
    top.children = [Node(batch(i), top) for i in range(1, 9)]
    with flagged(tmp_path, rules="module='' site=input keep=tensor") as recording:
        OverTree()(top)
    names = ["x.value", *(f"x.children.{i}.value" for i in range(8))]
    assert list(recording.rows().name) == names
    assert torch.equal(recording.run.tensor("", site="input", name="x.children.7.value"), batch(8))


def test_zeros_without_memory_are_recorded_as_zeros(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        Tiny()(batch())
        recorder.tap("zeros", torch._efficientzerotensor((2, 3)))
    assert torch.equal(recording.run.tensor("", site="tap", name="zeros"), torch.zeros(2, 3))
