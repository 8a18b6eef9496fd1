"""At steps at which nothing of a module's call is recorded modules have no hooks, and nothing else is different."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.capture.core import Capture
from recorder.capture.hooks import callbacks
from recorder.capture.hooks.module_hooks import MODULES, GroupedHooks, ModuleHooks
from recorder.lifecycle import active as recording_side
from recorder.observe import tree
from tests.rigs.capturing import Tiny, batch, flagged

EVERY_THIRD = "steps=0::3 site=* keep=tensor,stats,fingerprint"
OURS = ("BeforeForward", "AfterForward")


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """Other tests of this process may have compiled something."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def ours(module: nn.Module) -> list[str]:
    """The kinds of our hooks on a module, in torch's order, and `user` for each other."""
    registered = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    names = [
        type(hook).__name__ for hook in registered if not isinstance(hook, (callbacks.RootBegins, callbacks.RootEnds))
    ]
    return [name if name in OURS else "user" for name in names]


def train(
    model: nn.Module, num_steps: int, after_step: Callable[[int], object] | None = None, first: int = 0
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(first, first + num_steps):
        model(batch(i)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(i)
    return [p.detach().clone() for p in model.parameters()]


class Checkpointed(Tiny):
    def __init__(self, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self._use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden: torch.Tensor = checkpoint(self.first, x, use_reentrant=self._use_reentrant)
        return self.second(self.act(hidden))  # type: ignore[no-any-return]


class Repeated(nn.Module):
    """A module that is called three times, once by name, with an argument that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(input=self.norm(self.layer(self.layer(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [Tiny, Checkpointed, lambda: Checkpointed(use_reentrant=True), Repeated],
    ids=["tiny", "new", "old", "again"],
)
@pytest.mark.parametrize("local", [False, True])
def test_what_is_recorded_is_what_a_recording_without_rests_has(
    tmp_path: Path, make: Callable[[], nn.Module], local: bool
) -> None:
    found = []
    for i, rules in enumerate((EVERY_THIRD, EVERY_THIRD.replace("0::3", "0::1"))):
        torch.manual_seed(0)
        model = make()
        with flagged(tmp_path / str(i), rules, local_gradients=local) as recording:
            at_rest: list[bool] = []
            train(model, 8, functools.partial(_note_rest, inner(model), at_rest))
        assert at_rest == [i == 0 and n % 3 != 0 for n in range(8)]
        frame = recording.rows()
        found.append(
            frame[frame.step.isin([0, 3, 6])].drop(columns=["seq", "time_ns", "batch", "row"], errors="ignore")
        )
    resting, plain = (frame.reset_index(drop=True) for frame in found)
    assert len(resting) > 30
    assert sorted(set(resting.step)) == [0, 3, 6]
    assert resting.astype(str).equals(plain.astype(str))


def _note_rest(modules: list[nn.Module], at_rest: list[bool], step: int) -> None:
    at_rest.append(not any(map(ours, modules)))


def inner(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module is not model]


def test_it_is_at_rest_only_where_no_site_of_a_call_is_kept(tmp_path: Path) -> None:
    seen: list[bool] = []
    model = Tiny()
    rules = "steps=0::4 site=output keep=stats; steps=0::2 site=grad_input keep=stats; site=grad,param keep=stats"
    with flagged(tmp_path, rules) as recording:
        train(model, 5, lambda _: seen.append(bool(ours(model.first))))
    assert seen == [True, False, True, False, True]
    assert sorted(set(recording.rows(site="grad").step)) == [0, 1, 2, 3, 4]


def test_each_module_rests_by_the_rules_that_select_it(tmp_path: Path) -> None:
    seen: list[tuple[bool, ...]] = []
    model = Tiny()
    rules = "steps=0::4 site=output keep=stats; module=second steps=0::2 site=input keep=stats; module=act keep=stats"
    with flagged(tmp_path, rules) as recording:
        train(model, 5, lambda _: seen.append(tuple(bool(ours(module)) for module in inner(model))))
    every, second, fourth = [True] * 5, [True, False, True, False, True], [True, False, False, False, True]
    assert list(zip(*seen, strict=True)) == [tuple(fourth), tuple(every), tuple(second)]
    found = {path: sorted(set(rows.step)) for path, rows in recording.rows(mode="train").groupby("module_path")}
    assert found == {"": [0, 4], "first": [0, 4], "act": [0, 1, 2, 3, 4], "second": [0, 2, 4]}


@pytest.mark.parametrize("method", ["wake", "rest"])
def test_ctrl_c_half_way_costs_no_row_of_a_step_that_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain, calls = getattr(ModuleHooks, method), []

    def interrupted(self: ModuleHooks) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(ModuleHooks, method, interrupted)
    model, num_interrupts = Tiny(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, EVERY_THIRD) as recording:
        for i in range(8):
            try:
                loss = model(batch(i)).square().sum()
            except KeyboardInterrupt:
                num_interrupts += 1
                loss = model(batch(i)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 3 == 0:
                assert all(map(ours, inner(model)))
    assert num_interrupts == 1
    for path in ("first", "act", "second"):
        assert list(recording.rows(module_path=path, site="output", mode="train").step) == [0, 3, 6]


@pytest.mark.parametrize("step", [2, 3], ids=["rest", "wake"])
def test_ctrl_c_at_any_line_of_the_change_costs_no_hook(tmp_path: Path, step: int) -> None:
    """At each line in turn that the change of the step runs; then the same forward again."""
    line, num_seen, model = 0, 0, Tiny()
    changing = (ModuleHooks.rest, ModuleHooks.wake, GroupedHooks.rest_or_wake, Capture.step_changed)
    watched = {function.__code__ for function in changing}

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal num_seen
        if event == "line":
            num_seen += 1
            if num_seen == line:
                raise KeyboardInterrupt
        return local

    while num_seen == line:  # the last one raised
        line += 1
        num_seen = 0
        with flagged(tmp_path / str(line), "steps=1,3:5 site=input,output keep=stats") as recording:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(5):
                if i == step:
                    before = sys.gettrace()
                    sys.settrace(lambda frame, event, _: local if frame.f_code in watched else None)
                try:
                    with contextlib.suppress(KeyboardInterrupt):
                        model(batch(i))
                finally:
                    if i == step:
                        sys.settrace(before)
                model(batch(i)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for path in ("first", "act", "second"):
            for site in ("input", "output"):
                steps = list(recording.rows(module_path=path, site=site, call=0, mode="train").step)
                assert sorted(set(steps)) == [1, 3, 4], (line, path, site)
    assert line > 10


def test_closing_while_hooks_are_put_back_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(registered: dict[int, Any]) -> None:
        handle.close()

    model = Tiny()
    handle = recorder.attach(model, enabled=True, dir=tmp_path, rules=EVERY_THIRD)
    train(model, 3)
    monkeypatch.setattr(tree, "keep_first", close)
    train(model, 1)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not MODULES


def test_closing_in_the_middle_of_a_call_harms_nothing(tmp_path: Path) -> None:
    def close(module: nn.Module, args: Any) -> None:
        handle.close()

    model = Tiny()
    plain = model(batch(0))
    handle = recorder.attach(model, enabled=True, dir=tmp_path, rules="site=* keep=stats")
    model.register_forward_pre_hook(close, prepend=True)
    assert torch.equal(model(batch(0)), plain)
    assert torch.equal(model(batch(0)), plain)


def test_local_gradients_keep_it_awake(tmp_path: Path) -> None:
    seen: list[bool] = []
    model = Tiny()
    with flagged(
        tmp_path, "steps=0::2 site=output keep=stats; site=grad keep=stats", local_gradients=True
    ) as recording:
        train(model, 4, lambda _: seen.append(bool(ours(model.first))))
    assert seen == [True] * 4
    assert sorted(set(recording.rows(scope="local").step)) == [0, 1, 2, 3]


def test_the_hooks_come_back_to_their_positions_among_others(tmp_path: Path) -> None:
    def add_one(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] + 1,)

    def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def meanwhile(step: int) -> None:
        if step == 1:
            model.second.register_forward_pre_hook(add_one)
            model.second.register_forward_hook(double, prepend=True)
            model.second.register_forward_hook(double)
        orders.append(ours(model.second))

    orders: list[list[str]] = []
    model = Tiny()
    with flagged(tmp_path, EVERY_THIRD) as recording:
        train(model, 4, meanwhile)
    assert orders[1] == orders[2] == ["user"] * 3
    assert orders[3] == ["user", "BeforeForward", "AfterForward", "user", "user"]
    key = {"step": 3, "mode": "train"}
    relu = recording.array("act", site="output", **key)
    seen = recording.array("second", site="input", name="input", **key)
    weight, bias = (recording.array("second", site="param", name=name, step=3) for name in ("weight", "bias"))
    assert torch.equal(torch.tensor(seen), torch.tensor(relu) + 1)
    expected = torch.nn.functional.linear(torch.tensor(seen), torch.tensor(weight), torch.tensor(bias))
    torch.testing.assert_close(torch.tensor(recording.array("second", site="output", **key)), expected)


def test_a_hook_that_somebody_took_away_stays_away(tmp_path: Path) -> None:
    def meanwhile(step: int) -> None:
        if step == 0:
            model.first._forward_hooks.clear()

    model = Tiny()
    with flagged(tmp_path, EVERY_THIRD) as recording:
        train(model, 7, meanwhile)
    assert list(recording.rows(site="output", module_path="first").step) == [0]
    assert list(recording.rows(site="output", module_path="second").step) == [0, 3, 6]


def test_copies_made_at_rest_have_no_hooks_and_closing_leaves_none(tmp_path: Path) -> None:
    model = Tiny()
    with flagged(tmp_path, EVERY_THIRD):
        train(model, 2)
        assert not ours(model.first) and not model.first._forward_hooks
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for module in (model, *twins):
        for part in inner(module):
            assert not part._forward_hooks and not part._forward_pre_hooks
            assert module is not model or not part._forward_pre_hooks_with_kwargs
        assert torch.equal(module(batch(9)), model(batch(9)))
    assert not MODULES


@pytest.mark.parametrize("replaces", [False, True])
def test_a_module_that_joins_at_rest_is_recorded(tmp_path: Path, replaces: bool) -> None:
    """Its parameters come beside the others in the optimizer, or take their place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, EVERY_THIRD) as recording:
        for i in range(8):
            if i == 2:
                model.append(nn.Linear(4, 4))
                parameters = list(model[2].parameters())
                if replaces:
                    optimizer.param_groups[0]["params"][:] = parameters
                else:
                    optimizer.add_param_group({"params": parameters})
            model(batch(i)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert list(recording.rows(site="output", module_path="2").step) == [3, 6]
    assert list(recording.rows(site="output", module_path="0").step) == [0, 3, 6]
    assert set(recording.rows(site="grad", step=6).module_path) == ({"2"} if replaces else {"0", "2"})


def test_a_path_leads_to_the_hooks_that_a_module_has_now(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, EVERY_THIRD):
        for i in range(4):
            model(batch(i)).square().sum().backward()
            optimizer.step()
            assert recording_side._current is not None and recording_side._current.capture is not None
            (root,) = recording_side._current.capture.roots
            assert root.module_at("0") in root.modules
            if i == 1:
                before = root.module_at("0")
                model.append(nn.Linear(4, 4))
                optimizer.add_param_group({"params": list(model[2].parameters())})
    assert root.module_at("0") is not before


def test_where_modules_alone_tell_of_steps_they_keep_their_hooks(tmp_path: Path) -> None:
    class Called(Tiny):
        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.act(self.first(x))).square().sum()  # type: ignore[no-any-return]

    model = Called()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=EVERY_THIRD):
        for i in range(7):
            model.loss(batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert ours(model.first)
    rows = recorder.open_run(tmp_path).to_pandas()
    assert list(rows[(rows.site == "output") & (rows.module_path == "first")].step) == [0, 3, 6]


def test_a_step_named_by_hand_wakes_it(tmp_path: Path) -> None:
    model = Tiny()
    with flagged(tmp_path, "steps=0,100 site=output keep=stats") as recording:
        train(model, 3)
        assert not ours(model.first)
        recorder.step(100)
        assert ours(model.first)
        train(model, 1)
        recorder.step(101)
        assert not ours(model.first)
    assert list(recording.rows(module_path="first").step) == [0, 100]


def test_nothing_rests_once_anything_was_compiled_and_no_graph_is_made_anew(tmp_path: Path) -> None:
    model, counter = Tiny(), CompileCounter()
    with flagged(tmp_path, EVERY_THIRD) as recording:
        train(model, 2)
        assert not ours(model.first)
        compiled = torch.compile(model, backend=counter)
        with torch.no_grad():
            compiled(batch(0))
        num_graphs = [counter.frame_count]
        for i in range(2, 8):
            train(model, 1, first=i)
            assert ours(model.first)
            with torch.no_grad():
                compiled(batch(i))
            num_graphs.append(counter.frame_count)
    # torch 2.14 makes a graph once more when its modules get the hooks back that rested as it was made.
    num_more = 1 if torch.__version__ >= "2.14" else 0
    assert num_graphs[0] == 1
    assert num_graphs[1:] == [1 + num_more] * 6
    assert set(recording.rows(site="output", module_path="first", mode="train").step) == {0, 3, 6}
