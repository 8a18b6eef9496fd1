"""Errors of the recorder's own inside hooks: counted, said once, explained, and never training's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorder.analyze.doctor.expected import compare
from recorder.capture.staging.copies import HostStager
from tests.rigs.capturing import Tiny, batch, flagged

NUM_STEPS = 30


def train(num_steps: int = NUM_STEPS, model: nn.Module | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = model or Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(num_steps):
        model(batch(i)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def break_copies(monkeypatch: pytest.MonkeyPatch, error: BaseException, shape: tuple[int, ...] = (3, 8)) -> None:
    def failing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def fail(self: HostStager, tensor: torch.Tensor, *more: Any) -> Any:
            if tuple(tensor.shape) == shape:
                raise type(error)(*error.args)  # a new one, which holds no frames of training once it is handled
            return plain(self, tensor, *more)

        return fail

    monkeypatch.setattr(HostStager, "copy", failing(HostStager.copy))


def test_a_site_whose_copies_keep_failing_is_disarmed_and_the_hole_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train()
    break_copies(monkeypatch, RuntimeError("injected"))
    with flagged(tmp_path, "module=first,second site=output keep=stats") as recording:
        actual = train()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    ledger = recording.manifest["ledger"]
    assert ledger["dropped"] == {"hook_error": 20}
    assert ledger["written"] == NUM_STEPS == ledger["observed"] - 20
    assert len([r for r in caplog.records if "is not recorded any more" in r.getMessage()]) == 1
    holes = [hole for hole in compare(recording.run).gaps if not hole.reason.is_harmless]
    assert [(hole.reason.key, hole.modules, hole.steps) for hole in holes] == [
        ("disarmed", ["first"], list(range(NUM_STEPS)))
    ]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["host", "device", "torch"],
)
def test_a_copy_without_memory_is_a_counted_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = train(3)
    break_copies(monkeypatch, error)
    with flagged(tmp_path, "site=output,grad keep=tensor") as recording:
        actual = train(3)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    ledger = recording.manifest["ledger"]
    assert ledger["dropped"] == {"no_memory": 6}  # of the first layer and the activation
    assert ledger["observed"] == ledger["written"] + 6


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_copy_passes_and_the_next_step_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    with flagged(tmp_path, "site=output keep=tensor") as recording:
        model = Tiny()
        train(1, model)
        with monkeypatch.context() as patch:
            break_copies(patch, kind())
            with pytest.raises(kind):
                train(1, model)
        train(1, model)
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    assert len(recording.rows(site="output", module_path="second")) == 2


@pytest.mark.parametrize(
    "where",
    [
        "model_search.live_instances",
        "model_search.EarlyOptimizers.take",
        "recorder._last_step",
        "recording.blocked_in_new_threads",
    ],
)
def test_after_an_interrupt_of_the_start_the_next_call_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with flagged(tmp_path, "site=output keep=tensor") as recording:
        model = Tiny()
        with monkeypatch.context() as patch:
            patch.setattr(f"recorder.lifecycle.{where}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(1, model)
        train(2, model)
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] > 0
    assert len(recording.rows(site="output", module_path="second")) == 2


def test_a_root_that_keeps_failing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorder.capture.hooks.root import Root

    expected = train()
    calls = []

    def broken(self: Root, module: nn.Module) -> None:
        calls.append(1)
        raise RuntimeError("always")

    with flagged(tmp_path, "site=output keep=stats") as recording:
        model = Tiny()
        train(1, model)
        monkeypatch.setattr(Root, "begins", broken)
        train(NUM_STEPS, model)
    del expected
    assert len(calls) == 20
    assert recording.manifest["ledger"]["dropped"] == {"hook_error": 20}
    assert {tuple(m["disarmed"]) for m in recording.manifest["roots"][0]["modules"]} != {()}


# Where the model itself has no room, there is none for a hook that torch calls all the same.
@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``")
def test_no_error_at_the_end_of_the_stack_is_ours(tmp_path: Path) -> None:
    """At every depth at which the model runs under hooks that do nothing, it runs under the recorder."""
    model, value = Tiny(), batch()
    limit = sys.getrecursionlimit()

    def run_at(depth: int) -> None:
        if depth > 0:
            run_at(depth - 1)
        else:
            model(value)

    def runs_at(depth: int) -> bool:
        try:
            run_at(depth)
        except RecursionError:
            return False
        return True

    def deepest() -> int:
        here, frame = 0, sys._getframe()
        while frame is not None:
            here, frame = here + 1, frame.f_back  # type: ignore[assignment]
        return max(depth for depth in range(limit - here - 60, limit - here) if runs_at(depth))

    handles = [m.register_forward_hook(lambda *_: None) for m in model.modules()]
    handles += [m.register_forward_pre_hook(lambda *_: None) for m in model.modules()]
    plain = deepest()
    for handle in handles:
        handle.remove()
    with flagged(tmp_path, "site=input,output keep=tensor") as recording:
        train(1, model)
        assert deepest() >= plain
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    assert sum(ledger["dropped"].values()) > 0
