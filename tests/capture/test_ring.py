"""Values that wait for a trigger: where their memory comes from, what training pays, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorder
from recorder.lifecycle import active as recording_side
from tests.rigs.capturing import Recording, Tiny, batch, flagged

RING = "site=output,grad keep=ring before=2 after=1; site=scalar keep=stats"


def train(model: torch.nn.Module, num_steps: int, *, trigger_at: int = -1, width: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        if step == trigger_at:
            recorder.trigger("now")
        model(batch(step, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_triggered_value_is_what_the_module_gave(tmp_path: Path) -> None:
    model = Tiny()
    given: list[np.ndarray[Any, Any]] = []
    model.register_forward_hook(lambda module, args, output: given.append(output.detach().numpy().copy()))
    with flagged(tmp_path, RING, ring_hold_s=60) as recording:
        train(model, 8, trigger_at=6)
    rows = recording.rows(site="output", module_path="")
    assert rows.step.tolist() == [3, 4, 5, 6], "it was asked for before the forward of step 6, so in step 5"
    for step in rows.step:
        assert np.array_equal(recording.array("", site="output", step=step), given[step])
    assert rows.absmax.notna().all()
    assert len(recording.rows(site="grad")) == 4 * 4


def test_a_window_that_cannot_fit_is_refused_with_the_arithmetic_after_the_first_step(tmp_path: Path) -> None:
    width = 40_000
    model = torch.nn.Linear(width, 8)
    rules = "site=grad,output keep=ring before=4; site=scalar keep=stats"
    with flagged(tmp_path, rules, pool_bytes=8 << 20) as recording:
        train(model, 6, width=width)
        recorder.scalar("loss", 1.0)
    (problem,) = recording.events("ring_refused")
    assert "5 steps x 1.3 MB (before=4, and the step under way) need 6.4 MB; the ring has 4.2 MB of the pool" in problem
    ledger = recording.manifest["ledger"]
    assert ledger["passed"] == 3, "the values of the first step alone: of the others none was copied"
    assert ledger["dropped"] == {} and set(recording.rows().site) == {"scalar"}


def test_what_does_not_fit_later_is_dropped_and_counted_and_training_does_not_wait_for_it(tmp_path: Path) -> None:
    model = Tiny(width=2000)
    rules = "site=output,input keep=ring before=1; site=scalar keep=stats"
    with flagged(tmp_path, rules, pool_bytes=1 << 20, ring_share=0.2, triggers="none") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(0, 2000)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for number in range(100):  # an evaluation, of which the first step knew nothing
                model(batch(number, 2000))
        model(batch(1, 2000)).sum().backward()
        current = recording_side._current
        assert current is not None and current.capture is not None
        assert current.capture.pool.waited_s == 0
    ledger = recording.manifest["ledger"]
    assert set(ledger["dropped"]) == {"ring_full"}
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values()) + ledger["passed"]
    assert "the ring (" in recording.events("ring_full")[0]


def test_the_ring_is_a_part_of_the_one_pool(tmp_path: Path) -> None:
    with flagged(tmp_path, RING, pool_bytes=4 << 20, ring_share=0.25) as recording:
        train(Tiny(), 2)
        current = recording_side._current
        assert current is not None and current.capture is not None and current.capture.ring is not None
        assert current.capture.pool.capacity_bytes == 3 << 20
        assert current.capture.ring.pool.capacity_bytes == 1 << 20
    assert (recording.manifest["pool_bytes"], recording.manifest["ring_bytes"]) == (4 << 20, 1 << 20)


def test_a_value_that_another_rule_keeps_in_full_is_written_at_once(tmp_path: Path) -> None:
    with flagged(tmp_path, f"{RING}; module=first site=output keep=tensor") as recording:
        train(Tiny(), 3)
    assert recording.rows(site="output").module_path.tolist() == ["first"] * 3
    assert recording.manifest["ledger"]["passed"] > 0


def test_an_exception_that_leaves_the_attachment_has_the_last_steps_written(tmp_path: Path) -> None:
    model = Tiny()
    settings: dict[str, Any] = {"rules": RING, "dir": str(tmp_path), "min_free_bytes": 0, "close_deadline_s": 60}
    with pytest.raises(ZeroDivisionError), recorder.attach(model, enabled=True, **settings):
        train(model, 6)
        _ = 1 / 0
    recording = Recording(tmp_path)
    assert recording.rows(site="output", module_path="").step.tolist() == [3, 4, 5]
    (dump,) = recording.run.dumps
    assert dump.reason == "ZeroDivisionError: division by zero" and dump.by == "rank 0"


def test_a_trigger_without_a_recording_or_a_ring_does_nothing(tmp_path: Path) -> None:
    recorder.trigger("nobody records")
    with flagged(tmp_path, "site=output keep=stats") as recording:
        train(Tiny(), 3, trigger_at=1)
    assert recording.run.dumps == []
    assert "passed" not in recording.manifest["ledger"]


def test_rules_of_other_ranks_make_no_ring_here(tmp_path: Path) -> None:
    with flagged(tmp_path, "rank=1 site=output keep=ring; site=scalar keep=stats") as recording:
        train(Tiny(), 3, trigger_at=1)
        recorder.scalar("loss", 1.0)
    assert recording.run.dumps == []
    assert "ring_bytes" not in recording.manifest
    (answer,) = recording.manifest["commands"]
    assert (answer["state"], answer["why"]) == ("ended", "no rule keeps a ring on this rank")
