"""A sample of the campaign `power`, and that it would notice a writer with another order."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaigns.faults import power, support
from tests.campaigns.faults.power import Op, Scenario

NAMES = ("record", "record, retire", "second rank", "repair")
NUM_PREFIXES, NUM_STATES = 6, 2


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="power-", dir=support.memory_folder()) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def scenarios(memory: Path) -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in power.scenarios(memory)}


def problems_of(scenario: Scenario, folder: Path, seed: int, num_prefixes: int = NUM_PREFIXES) -> list[str]:
    lengths = range(scenario.num_sure + 1, len(scenario.ops) + 1)
    chosen = random.Random(seed).sample(lengths, min(num_prefixes, len(lengths)))
    directory = Path(tempfile.mkdtemp(dir=folder))
    results = [power.check_prefix(scenario, length, seed, directory, limit=NUM_STATES) for length in chosen]
    assert sum(result.num_states for result in results) >= num_prefixes
    return [problem for result in results for problem in result.problems]


@pytest.mark.parametrize("name", NAMES)
def test_after_a_loss_of_power_what_was_durable_is_there_and_nothing_is_wrong(
    scenarios: dict[str, Scenario], memory: Path, name: str
) -> None:
    assert set(scenarios) == set(NAMES)
    assert problems_of(scenarios[name], memory, seed=3) == []


def is_durable_promise(op: Op) -> bool:
    return op.kind == "promise" and op.num_durable > 0


WORSE: dict[str, Callable[[Op], bool]] = {
    "without syncs of files": lambda op: op.kind == "sync",
    "without syncs of directories": lambda op: op.kind == "sync_directory",
    "without the sync of what holds the run": lambda op: op.kind == "sync_directory" and op.path in (".", "made"),
}


@pytest.mark.parametrize("worse", WORSE)
def test_a_writer_that_syncs_less_would_be_noticed(scenarios: dict[str, Scenario], memory: Path, worse: str) -> None:
    record = scenarios["record"]
    harmed = replace(record, ops=[op for op in record.ops if not WORSE[worse](op)])
    end = next(number for number, op in enumerate(harmed.ops) if is_durable_promise(op)) + 1
    directory = Path(tempfile.mkdtemp(dir=memory))
    nothing_pending = [op for op, sure in zip(harmed.ops[:end], power.is_sure(harmed.ops[:end]), strict=True) if sure]
    power.lay_out(nothing_pending, directory / "state")
    assert power.problems_of(directory / "state", harmed.ops[:end], harmed, is_thorough=False) != []


def test_a_final_name_before_the_sync_would_be_noticed(scenarios: dict[str, Scenario], memory: Path) -> None:
    record = scenarios["record"]
    link = next(n for n, op in enumerate(record.ops) if op.kind == "link" and op.path.endswith(".arrow"))
    inode = record.ops[link].inode
    sync = max(n for n, op in enumerate(record.ops[:link]) if op.kind == "sync" and op.inode == inode)
    early = [op for number, op in enumerate(record.ops[: link + 2]) if number != sync]
    directory = Path(tempfile.mkdtemp(dir=memory))
    part = [op for op, sure in zip(early, power.is_sure(early), strict=True) if sure or op.kind != "write"]
    power.lay_out(part, directory / "state")
    assert power.problems_of(directory / "state", early, record, is_thorough=False) != []


def test_a_name_is_sure_by_its_directory_and_data_by_its_file() -> None:
    ops = [
        Op(kind="create", path="d/a", inode=1),
        Op(kind="write", inode=1, data=b"x"),
        Op(kind="sync", inode=1),
        Op(kind="write", inode=1, offset=1, data=b"y"),
        Op(kind="link", path="d/b", inode=1),
    ]
    assert power.is_sure(ops) == [False, True, True, False, False]
    assert power.is_sure([*ops, Op(kind="sync_directory", path="d")]) == [True, True, True, False, True, True]
