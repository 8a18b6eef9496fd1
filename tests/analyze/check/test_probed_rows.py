"""Rules get the numbers of the probe as rows, where a value has no row of statistics at a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.check import reading
from recorder.analyze.check.check import check
from recorder.analyze.check.reading import RunRows
from recorder.checks.rows import IS_PROBE, Rows
from recorder.run.probe import probe_tables
from recorder.run.run import RecordedWriter, Run
from tests.rigs.capturing import flagged

NUM_STEPS = 80
RULES = "site=output,grad,param keep=probe; site=grad steps=::5 keep=stats; site=scalar keep=stats"
Numbers = dict[tuple[str, str, str, int], tuple[bool, float]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with flagged(tmp_path_factory.mktemp("probed"), RULES) as recording:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(NUM_STEPS):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording.run


def numbers_of(batches: list[Rows]) -> Numbers:
    """Whether a row is of the probe, and its sum of squares, by value and step; each value has one row a step."""
    found: Numbers = {}
    for rows in batches:
        for lane, step, is_probe, square in zip(
            rows.lanes.tolist(), rows.steps.tolist(), rows[IS_PROBE].tolist(), rows["sum_sq"].tolist(), strict=True
        ):
            key = rows.catalog.key_of(lane)
            named = (key.module_path, key.site, key.name, step)
            assert named not in found
            found[named] = is_probe == 1, square
    return found


def test_a_value_has_one_row_a_step_and_statistics_come_before_the_probe(run: Run) -> None:
    rows = RunRows(run)
    found = numbers_of(list(rows))
    gradients = {key: one for key, one in found.items() if key[1] == "grad"}
    assert len(gradients) == 4 * NUM_STEPS
    assert all(is_probe == (key[3] % 5 != 0) for key, (is_probe, _) in gradients.items())
    assert Counter(key[1] for key, (is_probe, _) in found.items() if is_probe) == {
        "grad": 4 * NUM_STEPS * 4 // 5, "param": 4 * NUM_STEPS, "output": 4 * NUM_STEPS, "update": 4 * NUM_STEPS,
    }  # fmt: skip
    assert (rows.num_rows, rows.num_probed) == (run.num_rows, sum(is_probe for is_probe, _ in found.values()))
    steps = np.array([square for key, (_, square) in gradients.items() if key[:3] == ("0", "grad", "weight")])
    frame = run.probe().to_pandas()
    own = frame[(frame.module_path == "0") & (frame.site == "grad") & (frame.name == "weight")]
    assert steps == pytest.approx(own.l2.to_numpy() ** 2, rel=1e-6)


def test_ranges_of_steps_have_the_same_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers_of(list(RunRows(run)))
    monkeypatch.setattr(reading, "RANGE_ROWS", 100)
    batches = list(RunRows(run))
    assert len(batches) > 5
    assert numbers_of(batches) == whole


def test_of_a_very_large_probe_the_last_steps_are_read_and_this_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_PROBED", 16 * 20)
    checked = check(run)
    assert "only the probe's steps from 60 on were judged, because the probe is very large" in checked.notes
    assert 0 < checked.num_probed <= 16 * 20


def test_a_probe_that_names_no_type_of_its_values_stops_no_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flagged(tmp_path, f"{RULES}; site=output steps=::5 keep=stats") as recording:
        model = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(NUM_STEPS):
            model(torch.ones(4, 4)).square().mean().backward()
            optimizer.step()

    def without_types(writers: Iterable[RecordedWriter]) -> Iterator[Any]:
        for table in probe_tables(writers):
            at = table.column_names.index("dtype")
            yield table.set_column(at, table.field(at), pa.nulls(table.num_rows, table.field(at).type))

    monkeypatch.setattr(reading, "probe_tables", without_types)
    checked = check(recording.run, ["dead"])
    assert checked.num_probed and not [one for one in checked.findings if "raised" in one.what]


def test_a_damaged_probe_leaves_the_other_rows_and_this_is_said(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(NUM_STEPS):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (writer,) = recording.run.writers
    path = Path(str(writer.probe_shards[0].path))
    data = bytearray(path.read_bytes())
    for position in range(64, len(data) // 2, 16):
        data[position] ^= 0xFF
    path.write_bytes(data)
    checked = check(recorder.open_run(recording.run.path))
    assert checked.num_rows == recording.run.num_rows
    assert checked.num_probed == 0
    assert any("damaged" in note for note in checked.notes)
