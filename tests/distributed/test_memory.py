"""Recording keeps no graph alive and does not grow."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

MEMORY = SCRIPTS / "memory.py"
WARM_UP = 22
"""Samples of 50 steps: the pool's pages are touched, the first batches written, the allocators settled, and the 1,024
steps that are kept to judge the run are there and were judged."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    # The index of a shard lies in memory until the shard is sealed: small shards, so that many are.
    settings = jobs.recording(shard_bytes="1MiB")
    return jobs.succeeded(jobs.python(tmp_path_factory.mktemp("memory"), MEMORY, **settings))


@pytest.fixture(scope="module")
def found(finished: Finished) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(finished.lines("resident_bytes")[0])
    return result


def test_no_graph_outlives_its_step_while_the_writer_is_stalled(found: dict[str, Any]) -> None:
    assert found["num_contexts"] == 20
    assert found["alive_after_steps"] == 0
    assert found["alive_with_a_graph"] == 1, "the probe sees a graph that lives"
    assert found["alive_after_evaluation"] == 0


def test_memory_does_not_grow_over_two_thousand_steps(found: dict[str, Any]) -> None:
    resident = np.array(found["resident_bytes"], dtype=np.float64)[WARM_UP:]
    steps = 50.0 * np.arange(len(resident))
    slope_bytes = np.polyfit(steps, resident, 1)[0]
    # A busy machine's kernel takes pages back, so that it may shrink.
    assert slope_bytes < 1024, f"{slope_bytes:.0f} bytes a step: {resident.astype(int).tolist()}"


def test_every_row_of_the_long_run_is_there(finished: Finished) -> None:
    (writer,) = finished.run.writers
    assert writer.balance.dropped == {}
    assert writer.balance.written == writer.balance.observed == writer.num_rows
    assert finished.run.steps == list(range(2620))
