"""The ring on two ranks: whoever sees a reason, both write the same steps, equal to a run that recorded everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorder
from recorder.upkeep.verify import verify
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

WHAT = "site=output,grad_output,grad,input"
RING = f"{WHAT} keep=ring; site=scalar keep=stats"
FULL = f"{WHAT} keep=tensor,stats; site=scalar keep=stats"
STEPS = 24
OF_ALL = {"rules": RING, "trigger_signal": "SIGUSR2", "hang_s": 2.0, "triggers": "nonfinite,exception,hang"}
CASES: dict[str, dict[str, Any]] = {
    "full": {"settings": {"rules": FULL}, "events": [[12, 1, "nan"]], "waits": False},
    "off": {"recorded": False, "settings": {"rules": RING}, "events": [[12, 1, "nan"]], "waits": False},
    "nan": {  # a record of step 13 tells rank 1 what it has seen; rank 0 would ask for a NaN of its own with one of 14
        "settings": {**OF_ALL, "triggers": "nonfinite"},
        "events": [[12, 1, "nan"], [14, 0, "told"], [14, 1, "told"]],
    },
    "apart": {
        "apart": True,
        "settings": {**OF_ALL, "triggers": "nonfinite"},
        "events": [[12, 1, "nan"], [14, 0, "told"], [14, 1, "told"]],
    },
    "first": {"events": [[0, 0, "trigger"]]},
    "last": {"events": [[STEPS - 1, 1, "trigger"]]},
    "two": {"events": [[10, 0, "trigger"], [10, 1, "trigger"]]},
    "evaluation": {"events": [[9, 0, "evaluation"], [9, 1, "evaluation"]]},
    "error": {"events": [[15, 1, "error"]]},
    "close": {"events": [], "trigger_at_close": True, "dumps": 0},
    "signal": {"events": [[7, 1, "signal"]]},
    "hang": {"events": [[8, 0, "stop"]]},
    "none": {"events": [], "dumps": 0},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, one after the other in the same two ranks."""
    folder = tmp_path_factory.mktemp("boxed")
    cases = [
        {"steps": STEPS, "seed": 3, "settings": OF_ALL, **case, "folder": str(folder / name)}
        for name, case in CASES.items()
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "boxed.py", folder / "cases.json"))
    return folder


@pytest.fixture(scope="session")
def run_of(folder: Path) -> Callable[[str], recorder.Run]:
    return lambda name: recorder.open_run(folder / name / "recordings")


def values(run: recorder.Run, *, first: int = 0, last: int = STEPS) -> dict[tuple[Any, ...], bytes]:
    """The bytes of every tensor of these steps, by rank and key."""
    found = {}
    frame = run.to_pandas()
    key = ["rank", "step", "module_path", "site", "name", "call", "micro_step", "mode", "repeat", "scope"]
    for row in frame[frame.payload_bytes.notna() & (frame.site != "scalar")].to_dict("records"):
        if first <= row["step"] <= last:
            more = {name: row[name] for name in ("site", "step", "rank", "name", "call", "mode")}
            found[tuple(str(row[name]) for name in key)] = run.array(row["module_path"], **more).tobytes()
    return found


def test_all_ranks_have_the_steps_around_a_nan_of_one_of_them_bit_by_bit(run_of: Callable[[str], Any]) -> None:
    boxed, full = run_of("nan"), run_of("full")
    (dump,) = boxed.dumps
    assert (dump.first_step, dump.last_step, dump.ranks, dump.missed) == (8, 14, (0, 1), ())
    assert dump.reason.startswith("nonfinite: ")
    assert values(boxed) == values(full, first=8, last=14)
    assert len(values(boxed)) == 7 * len(values(full, first=0, last=0))
    first = recorder.first(boxed).nonfinite
    assert first is not None and (first.value.step, first.value.rank) == (12, 1)


def test_so_have_ranks_of_nodes_that_share_no_file_system(folder: Path, run_of: Callable[[str], Any]) -> None:
    full = values(run_of("full"), first=8, last=14)
    found: dict[tuple[Any, ...], bytes] = {}
    for rank in (0, 1):
        run = recorder.open_run(folder / "apart" / f"node{rank}" / "recordings")
        (dump,) = run.dumps
        assert (dump.first_step, dump.last_step, dump.ranks, dump.missed, dump.by) == (8, 14, (rank,), (), "rank 1")
        (writer,) = run.writers
        assert writer.state == "closed" and writer.balance.num_missing == 0
        assert "nodes_apart" in [event.kind for event in writer.manifest.events]
        assert [answer.state for answer in writer.manifest.commands] == ["ended"]
        found |= values(run)
    assert found == full


@pytest.mark.parametrize(
    ("name", "window", "reason"),
    [
        ("first", (0, 2), "the program asks"),
        ("last", (STEPS - 5, STEPS + 1), "the program asks"),
        ("two", (6, 12), "the program asks"),
        ("evaluation", (5, 11), "in an evaluation"),
        ("error", (11, 17), "ArithmeticError: the program fails"),
        ("signal", (3, 9), "signal SIGUSR2"),
        ("hang", (4, 10), "hang: step 7 has not ended in 2 s"),
    ],
)
def test_each_trigger_has_its_window_on_both_ranks(
    run_of: Callable[[str], Any], name: str, window: tuple[int, int], reason: str
) -> None:
    run = run_of(name)
    assert reason in [dump.reason for dump in run.dumps]
    dump = next(dump for dump in run.dumps if dump.reason == reason)
    shift = dump.first_step - window[0]
    assert abs(shift) <= 1 and dump.last_step - window[1] == shift, "a signal or a hang may come a step later"
    assert dump.missed == ()
    steps = run.to_pandas(columns=["rank", "step", "site"]).query("site == 'output'").groupby("rank").step.unique()
    lived = 15 if name == "error" else STEPS
    for rank in (0, 1):
        assert set(range(dump.first_step, min(dump.last_step + 1, lived))) <= set(steps[rank].tolist()), rank


def test_a_trigger_as_the_recording_closes_is_still_written_by_who_asks(run_of: Callable[[str], Any]) -> None:
    (dump, *_) = run_of("close").dumps
    assert dump.first_step == STEPS - 5 and dump.num_rows > 0


def test_without_a_trigger_nothing_but_scalars_is_written_and_all_else_passed(run_of: Callable[[str], Any]) -> None:
    run = run_of("none")
    assert run.dumps == []
    assert run.to_pandas().site.unique().tolist() == ["scalar"]
    for writer in run.writers:
        balance = writer.balance
        assert balance.passed > 0 and balance.observed == balance.written + balance.passed
        assert not list(writer.directory.glob("tensors-*"))


@pytest.mark.parametrize("name", CASES)
def test_the_accounts_of_every_case_balance(run_of: Callable[[str], Any], name: str) -> None:
    if name in ("off", "apart"):
        return
    for writer in run_of(name).writers:
        assert writer.state == "closed"
        assert writer.balance.num_missing == 0 and not writer.balance.dropped


@pytest.mark.parametrize("name", ["nan", "apart"])
@pytest.mark.parametrize("rank", [0, 1])
def test_training_is_bit_equal_with_a_ring_and_a_trigger(folder: Path, rank: int, name: str) -> None:
    without, boxed = (torch.load(folder / of / f"rank{rank}.pt") for of in ("off", name))
    assert np.array_equal(without["losses"], boxed["losses"], equal_nan=True)
    assert torch.equal(without["rng"], boxed["rng"])
    for key, value in without["parameters"].items():
        assert torch.equal(value.view(torch.int32), boxed["parameters"][key].view(torch.int32)), key


CRASHES = """
import torch, recorder

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    if step == 12:
        raise KeyError("what is wrong")
"""


# -- the end of a process: its ring is written where any of its code still runs ---------------------------------------


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Three processes side by side: one is terminated, one killed in the middle of a dump, one crashes."""
    folder = tmp_path_factory.mktemp("ended")
    cases = {"terminate": ("terminate", 8), "kill": ("kill 0.05", 64)}
    started = {}
    for name, (what, width) in cases.items():
        case = {"steps": 400, "seed": 3, "settings": {**OF_ALL, "triggers": "signal", "flush_interval_s": 0.01}}
        case |= {"width": width, "events": [[12, 0, what]], "folder": str(folder / name), "nap_s": 0.002}
        (folder / f"{name}.json").write_text(json.dumps([case]))
        started[name] = jobs.program(folder / name, SCRIPTS / "boxed.py", folder / f"{name}.json")
    settings = jobs.recording(RING, min_free_bytes="0")
    started["crash"] = jobs.python(folder / "crash", "-c", CRASHES, **settings)
    return {name: job.wait() for name, job in started.items()}


def test_a_signal_from_a_launcher_has_the_ring_written(ended: dict[str, Finished]) -> None:
    run = ended["terminate"].run
    assert ended["terminate"].returncode == -15
    assert [dump.reason for dump in run.dumps] == ["the process was ended by SIGTERM"]
    assert sorted(run.to_pandas().query("site == 'output'").step.unique()) == [7, 8, 9, 10, 11]
    (writer,) = run.writers
    assert writer.state == "closed" and writer.balance.num_missing == 0


def test_an_exception_that_nobody_catches_has_the_ring_written(ended: dict[str, Finished]) -> None:
    run = ended["crash"].run
    assert ended["crash"].returncode == 1
    assert [dump.reason for dump in run.dumps] == ["KeyError: 'what is wrong'"]
    assert sorted(run.to_pandas().query("site == 'output'").step.unique()) == [8, 9, 10, 11, 12]


def test_a_kill_in_the_middle_of_a_dump_leaves_whole_rows(ended: dict[str, Finished]) -> None:
    assert ended["kill"].returncode == -9
    run = ended["kill"].run
    assert [finding.text for finding in verify(run) if finding.is_fault] == []
    found = values(run, last=400)
    assert {int(key[1]) for key in found} <= set(range(7, 15))
    for dump in run.dumps:
        assert (dump.reason, dump.first_step) == ("just before a kill", 7)
