"""What training does that a recorder might trip over: each is recorded right or counted, and training never notices."""

from __future__ import annotations

import copy
import logging
import math
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.capture.hooks.module import HookedModule
from recorder.capture.hooks.module_hooks import MODULES
from recorder.capture.hooks.root import Root
from recorder.capture.optimizers.optimizer_hooks import OptimizerHooks
from recorder.observe.clock import Clock, RootClock
from tests.rigs import jobs
from tests.rigs.capturing import Recording, Tiny, batch, flagged
from tests.rigs.command_line import Cli, cli
from tests.rigs.waiting import wait_until

__all__ = ["cli"]
STATS = "site=* keep=stats"


def train(model: nn.Module, num_steps: int = 3, **how: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(num_steps):
        model(batch(i)).square().mean().backward(**how)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def assert_balanced(recording: Recording) -> dict[str, int]:
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    dropped: dict[str, int] = ledger["dropped"]
    return dropped


FUNCTIONS = [
    (Root, "begins"), (Root, "ends"), (Root, "record_state"), (Root, "slice_now"), (RootClock, "begin"),
    (HookedModule, "before_forward"), (HookedModule, "after_forward"), (HookedModule, "record"),
    (HookedModule, "_leaf"),
    (Clock, "advance_if_stepped"), (Clock, "optimizer_stepped"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_of_ours_in_any_function_changes_no_bit_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    expected = train(tiny())
    num_raised = 0

    def fail(*args: Any, **kwargs: Any) -> None:
        nonlocal num_raised
        num_raised += 1
        raise RuntimeError("on purpose")

    monkeypatch.setattr(owner, name, fail)
    with flagged(tmp_path, STATS):
        actual = train(tiny())
    assert num_raised
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_error_in_the_optimizers_hooks_changes_no_bit_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(tiny())
    raised: list[str] = []

    def failing(name: str) -> Callable[..., None]:
        def fail(*args: Any, **kwargs: Any) -> None:
            raised.append(name)
            raise RuntimeError("on purpose")

        return fail

    for name in ("_begin", "record_before", "_record_state", "_record_rates", "_count"):
        monkeypatch.setattr(OptimizerHooks, name, failing(name))
    with flagged(tmp_path, STATS):
        actual = train(tiny())
    assert raised
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class Views(nn.Module):
    """Its children return views, which are then changed in place: what full backward hooks refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.flat = nn.Flatten(0)
        self.shaped = nn.Unflatten(0, (3, 6))
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.shaped(self.flat(self.first(x)))
        hidden += 1.0
        return self.second(self.act(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_views_that_are_changed_in_place_train_as_without_the_recorder(tmp_path: Path, create_graph: bool) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return train(Views(), create_graph=create_graph)

    expected = run()
    with flagged(tmp_path) as recording:
        actual = run()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert assert_balanced(recording) == {}
    first = recording.array("first", site="output", step=0)
    torch.manual_seed(0)
    assert torch.equal(torch.from_numpy(first), Views().first(batch(0)).detach())


@pytest.mark.parametrize("where", ["meta", "inference", "autocast"])
def test_contexts_of_the_user_leave_values_and_positions_alone(tmp_path: Path, where: str) -> None:
    def run() -> list[torch.Tensor]:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for i in range(3):
            x = batch(i)
            if where == "meta":
                with torch.device("meta"):
                    loss = model(x).square().sum()
                    loss.backward()
                    optimizer.step()
            elif where == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(x).square().sum()
                loss.backward()
                optimizer.step()
            else:
                model(x).square().sum().backward()
                optimizer.step()
                with torch.inference_mode():
                    outputs.append(model(x))
            optimizer.zero_grad()
        return outputs + [parameter.detach().clone() for parameter in model.parameters()]

    expected = run()
    with flagged(tmp_path) as recording:
        actual = run()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert assert_balanced(recording) == {}
    rows = recording.rows(site="output", module_path="second")
    assert list(rows.step.unique()) == [0, 1, 2]
    if where == "inference":
        assert list(rows["mode"]) == ["train", "no_grad"] * 3
    if where == "autocast":
        assert set(rows.dtype) == {"bfloat16"}


def test_what_tells_a_recompute_from_a_forward_is_still_there() -> None:
    """A private function of torch: -1 outside of a backward, and not inside one."""
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._current_graph_task_id())
        return x.sin()

    for use_reentrant in (True, False):
        x = torch.ones(2, requires_grad=True)
        out: Any = checkpoint(block, x, use_reentrant=use_reentrant)
        out.sum().backward()
    assert [number == -1 for number in seen] == [True, False, True, False]


@pytest.mark.filterwarnings("ignore:.*grad_sample|.*vmap")
def test_transforms_of_functions_are_counted_and_change_nothing(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call, grad, vmap

    def run() -> Any:
        model = tiny()
        train(model, 1)
        state = {name: value.detach() for name, value in model.named_parameters()}

        def loss(state: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = functional_call(model, state, (x.unsqueeze(0),))
            return out.square().sum()

        gradients = vmap(grad(loss), in_dims=(None, 0))(state, batch(1))
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = model(batch(2)).shape
        train(model, 1)
        return gradients, shape, [parameter.detach().clone() for parameter in model.parameters()]

    expected = run()
    with flagged(tmp_path) as recording:
        actual = run()
    assert all(torch.equal(actual[0][name], value) for name, value in expected[0].items())
    assert actual[1] == expected[1]
    assert all(torch.equal(a, b) for a, b in zip(actual[2], expected[2], strict=True))
    dropped = assert_balanced(recording)
    assert set(dropped) <= {"unsupported_type:functorch", "unsupported_type:FakeTensor", "unsupported_type:meta"}
    assert "unsupported_type:functorch" in dropped


def test_what_is_too_large_is_never_copied_and_shapes_may_change_at_every_step(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output,tap keep=tensor", pool_bytes="8MiB") as recording:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            x = torch.ones(i + 1, 4)
            model(x).sum().backward()
            recorder.tap("huge", torch.ones(1).expand(1 << 40))
            recorder.tap("empty", torch.ones(1).expand(0, 1 << 40))
            optimizer.step()
    assert assert_balanced(recording) == {"too_large": 4 * (1 << 42 >> 25)}, "as many rows as it would have had parts"
    shapes = recording.rows(site="output", module_path="second")["shape"]
    assert list(shapes) == ["[1,2]", "[2,2]", "[3,2]", "[4,2]"]


def test_steps_that_go_back_keep_every_row_apart(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        model = tiny()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        model(batch()).sum().backward()  # the recording begins
        for step in (500, 501, 502, 501, 502, 502):
            recorder.step(step)
            model(batch(step)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert assert_balanced(recording) == {}
    rows = recording.rows(module_path="second", site="output")
    assert list(rows.step)[1:] == [500, 501, 502, 501, 502, 502]
    key = ["root", "module_path", "site", "name", "phase", "mode", "step", "micro_step", "call", "repeat"]
    frame = recording.rows()
    doubled = frame[frame.duplicated(key, keep=False)]
    assert doubled.groupby(key, dropna=False)["seq"].nunique().eq(doubled.groupby(key, dropna=False).size()).all()
    assert frame["seq"].is_unique


def test_without_an_optimizer_step_one_line_says_that_the_step_never_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "recorder")
    with flagged(tmp_path, STATS):
        model = tiny()
        for i in range(3):
            model(batch(i)).sum().backward()
    assert len([r for r in caplog.records if "no optimizer stepped" in r.getMessage()]) == 1


@pytest.mark.parametrize("is_through_data", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_updates_by_hand_count_the_steps_after_the_first_forwards(
    tmp_path: Path, is_held: bool, is_through_data: bool
) -> None:
    """Where an optimizer has the parameters, something else changes the parameters between forwards of one step."""
    with flagged(tmp_path, f"{STATS};site=scalar") as recording:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_held else None
        for i in range(40):
            model(batch(i)).sum().backward()
            if i % 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        (parameter.data if is_through_data else parameter).sub_(0.01 * parameter.grad)
                        parameter.grad = None
    assert optimizer is None or is_held
    rows = recording.rows(module_path="", site="output")
    first = [0] * 16  # the parameters are watched from the 16th backward on
    assert list(rows.step) == ([0] * 40 if is_held else first + [i // 2 - 7 for i in range(16, 40)])


def test_what_is_no_update_by_hand_begins_no_step(tmp_path: Path) -> None:
    """A NaN that stays is no change, and a layer may change its own parameters in its forward."""
    with flagged(tmp_path, STATS) as recording:
        model = nn.Sequential(nn.Embedding(4, 8, max_norm=0.1), nn.Linear(8, 8))
        with torch.no_grad():
            next(model[1].parameters())[0, 0] = math.nan
        for i in range(30):
            model(torch.tensor([i % 4])).sum().backward()
    assert assert_balanced(recording) == {}
    assert set(recording.rows().step) == {0}


def test_a_validation_between_updates_by_hand_belongs_to_the_step_before(tmp_path: Path) -> None:
    with flagged(tmp_path, STATS) as recording:
        model = tiny()
        for i in range(30):
            model(batch(i)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01)
            if i == 25:
                model.eval()(batch(i))
                model.train()
    rows = recording.rows(module_path="", site="output")
    assert list(rows.step) == [0] * 16 + [*range(1, 11), 10, *range(11, 15)]
    assert list(rows[rows["mode"] == "eval"].step) == [10]


def test_a_guard_that_skips_every_optimizer_step_is_told_while_it_trains_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rules keep what they keep of one step for each forward, which would fill the disk without a word."""
    with flagged(tmp_path, "site=output keep=stats") as recording:
        model = tiny()
        torch.optim.SGD(model.parameters(), lr=0.1)

        def is_told() -> bool:
            return any(r.levelname == "WARNING" and "no optimizer stepped" in r.getMessage() for r in caplog.records)

        for i in range(255):
            model(batch(i)).sum().backward()
        time.sleep(0.5)
        assert not is_told()
        model(batch(0)).sum().backward()
        model(batch(1)).sum().backward()
        wait_until(is_told)
    assert assert_balanced(recording) == {}


def test_attach_under_the_flag_records_the_first_input_once(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        model = tiny()
        with recorder.attach(model):
            train(model, 2)
    assert list(recording.rows(module_path="", site="input").step) == [0, 1]


def test_the_fast_path_of_an_encoder_and_modules_that_are_never_called(tmp_path: Path, cli: Cli) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    layer.eval()
    with torch.no_grad():
        expected = layer(x)
    layer.train()
    with flagged(tmp_path, "site=output keep=stats") as recording:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        layer(x).sum().backward()
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            assert torch.allclose(layer(x), expected, atol=1e-5)
    rows = recording.rows()
    assert "self_attn" in set(rows.module_path)
    assert "self_attn.out_proj" not in set(rows.module_path), "torch uses its weights without calling it"
    result = cli("doctor", recording.run.path)
    (line,) = [line for line in result.out.splitlines() if "uses its parameters without a call" in line]
    assert line.endswith("'self_attn.out_proj'"), "doctor names it"


WRAPPED = """
import sys, torch, recorder, torch.distributed as dist
from pathlib import Path
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

def flat(model, **how):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **how)

def sharded(model):
    fully_shard(model[0])
    return fully_shard(model)

dist.init_process_group("gloo")
wraps = {"fsdp1": flat, "orig": lambda model: flat(model, use_orig_params=True), "fsdp2": sharded}
for kind, wrap in wraps.items():
    for when in ("before", "after"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        settings = {"enabled": True, "dir": f"{kind}.{when}", "rules": "site=* keep=stats"}
        if when == "before":
            attached = recorder.attach(model, **settings)
        model = wrap(model)
        if when == "after":
            attached = recorder.attach(model, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(3, 4) * (1 + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        attached.close()
        Path(f"{kind}.{when}.{dist.get_rank()}").write_text(str(attached.run_dir))
dist.destroy_process_group()
"""


def test_attached_before_or_after_it_was_sharded_a_model_leaves_the_same_record(tmp_path: Path) -> None:
    """The rows of two ranks, but for the very first input, which is seen as the caller gave it."""
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    jobs.succeeded(jobs.ranks(tmp_path, Path("wrapped.py"), TESTS_RECORDER=""))
    key = ["site", "module_path", "name", "step", "phase"]
    facts = ["shape", "global_shape", "placements", "offsets", "scope", "sum", "l2"]
    for kind, placement in (("fsdp1", "FlatShard"), ("orig", "FlatShard"), ("fsdp2", "Shard")):
        for rank in (0, 1):
            frames = []
            for when in ("before", "after"):
                run = recorder.open_run((tmp_path / f"{kind}.{when}.{rank}").read_text())
                frame = run.to_pandas()
                frame = frame[frame["rank"] == rank].sort_values(key).reset_index(drop=True)[key + facts]
                frames.append(frame[frame.site.isin(["param", "grad", "optim", "output"])])
            before, after = frames
            assert before.equals(after), (kind, rank)
            pieces = after[after.site.isin(["param", "grad"])]
            assert len(pieces) == 2 * 2 * 4 and pieces.placements.str.contains(f'"{placement}"').all()


class Sick:
    """A standard error on the same sick disk."""

    def write(self, text: str = "") -> int:
        raise OSError(5, "Input/output error")

    flush = write


def test_a_warning_that_cannot_be_written_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(logging.Handler):
        num_raised = 0

        def emit(self, record: logging.LogRecord) -> None:
            Raising.num_raised += 1
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(logging.getLogger(), "handlers", [Raising()])
    monkeypatch.setattr("sys.stderr", Sick())
    with flagged(tmp_path, STATS) as recording:
        model = tiny()
        expected = train(copy.deepcopy(model), 1)
        actual = train(model, 1)
        recorder.tap("odd", torch.empty(3, device="meta"))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert Raising.num_raised
    assert assert_balanced(recording) == {"unsupported_type:meta": 1}


def test_a_model_that_is_gone_is_not_kept_by_what_was_hooked(tmp_path: Path) -> None:
    with flagged(tmp_path, STATS):
        model = tiny()
        train(model, 1)
        gone = weakref.ref(model)
        del model
        assert gone() is None
        train(tiny(), 1)
    assert not MODULES


EXOTIC = (
    *(
        "a/b",
        "/etc/evil",
        "\\evil",
        "new\nline",
        "nul\0",
        "\x1b[2J",
        "\u202egpj",
        "<script>alert(1)</script>",
    ),
    *("a" * 300, "\u00e9" * 200, " ", "%s{}", "CON", "-rf", "~", "*"),
)


def test_any_name_that_torch_allows_is_data_and_never_a_path(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in EXOTIC})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    with flagged(tmp_path, "site=output,grad keep=tensor") as recording:
        model = Named()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
    assert assert_balanced(recording) == {}
    assert set(recording.run.module_paths) == {"", *(f"parts.{name}" for name in EXOTIC)}
    assert recording.array(f"parts.{EXOTIC[1]}", site="output").shape == (3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["recordings"]
    for path in tmp_path.rglob("*"):
        assert path.name.isascii() and len(path.name) < 64, path


def test_a_wall_clock_that_jumps_changes_no_order_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ns = 3600 * 10**9
    now_ns = 1_700_000_000 * 10**9
    jumps = iter([0, -hour_ns, 10 * 365 * 24 * hour_ns, 0, -5 * hour_ns] * 10_000)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + next(jumps))
    with flagged(tmp_path, "site=output keep=tensor", flush_interval_s=0.01, shard_bytes="1MiB") as recording:
        train(tiny(), 20)
    assert assert_balanced(recording) == {}
    table = recording.run.table(columns=["step", "seq", "time_ns"])
    assert table.column("step").to_pylist() == sorted(table.column("step").to_pylist())
    assert table.column("seq").to_pylist() == sorted(table.column("seq").to_pylist())
    assert len(set(table.column("time_ns").to_pylist())) == 4, "the clock did jump"
    assert [writer.state for writer in recording.run.writers] == ["closed"]


@pytest.mark.filterwarnings("ignore")
def test_what_was_compiled_and_run_before_attach_is_said_and_not_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = tiny()
    model.compile(backend="eager")
    expected = train(copy.deepcopy(model), 3)
    model(batch())
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=STATS) as attached:
        actual = train(model, 3)
        assert attached.flush()
        run_dir = attached.run_dir
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert [r for r in caplog.records if "attached after compilation" in r.getMessage()]
    assert run_dir is not None
    run = recorder.open_run(run_dir)
    assert set(run.to_pandas(columns=["site", "step"]).query("site == 'grad'").step) == {0, 1, 2}
