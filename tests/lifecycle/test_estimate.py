"""The first words of a recording: what the rules will have written by some step, said once by rank 0."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from recorder.lifecycle.description import HISTOGRAM_BYTES, PROBE_BYTES, ROW_BYTES, UNIT_BYTES, Estimate
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS, KEEP_TENSOR, KEEP_UNITS, Staged
from recorder.rules import parse_rules
from tests.rigs import jobs
from tests.rigs.fakes import fake_staged

TRAIN = """
import time, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(64, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.5 if step else 0.0)
"""


def of(rules: str, world_size: int = 1) -> Estimate:
    return Estimate(parse_rules(rules), rank=0, world_size=world_size, max_bytes=16 << 30)


def record(site: str, step: int, num_bytes: int, keep: int = KEEP_TENSOR) -> Staged:
    return fake_staged(np.zeros(num_bytes, np.uint8), site=site, step=step, keep=keep)


def test_it_is_said_once_when_the_first_step_is_over_and_nothing_of_it_follows() -> None:
    estimate = of("site=output keep=tensor")
    assert estimate.look(0) is None
    estimate.saw([record("output", 0, 1_000_000)])
    assert estimate.look(0) is None
    assert estimate.look(1) is None  # the writer may be behind
    estimate.saw([record("output", 0, 1_000_000)])
    estimate.saw([record("output", 1, 1_000_000)])
    assert estimate.look(1) is None
    assert estimate.look(1) == (
        "at these rules about 2.0 MB at step 0, 202.0 MB by step 100 and 2.0 GB by step 1,000; "
        "at most 17.2 GB (max_bytes)"
    )
    assert estimate.look(2) is None


def test_each_site_is_counted_at_the_steps_of_its_rules() -> None:
    estimate = of("site=output keep=tensor steps=::100; site=grad keep=stats; site=param keep=tensor steps=0,1 rank=1")
    estimate.saw([record("output", 0, 1_000_000)])
    estimate.saw([record("grad", 0, 5_000, KEEP_STATS)])
    assert estimate.num_bytes(0, 1) == 1_000_000 + 2 * ROW_BYTES
    assert estimate.num_bytes(0, 101) == 2 * 1_000_000 + 2 * ROW_BYTES + 101 * ROW_BYTES
    assert estimate.num_bytes(0, 1001) == 11 * 1_000_000 + 11 * ROW_BYTES + 1001 * ROW_BYTES


def test_histograms_and_units_are_counted_at_the_steps_of_their_rules() -> None:
    estimate = of("site=output keep=histogram steps=::2; site=output keep=units steps=::5; site=grad keep=stats")
    keep = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
    estimate.saw([fake_staged(np.zeros((64, 10), np.float32), site="output", keep=keep)])
    estimate.saw([fake_staged(np.array(1, np.float32), site="output", keep=keep)])  # no dim, and so no units
    estimate.saw([fake_staged(np.zeros((64, 10), np.float32), site="grad", keep=KEEP_STATS)])
    assert estimate.num_bytes(0, 1) == 3 * ROW_BYTES + 2 * HISTOGRAM_BYTES + 10 * UNIT_BYTES
    rows_at_10_steps = (2 * 6 + 10) * ROW_BYTES  # of outputs at 0, 2, 4, 5, 6, 8
    assert estimate.num_bytes(0, 10) == rows_at_10_steps + 5 * 2 * HISTOGRAM_BYTES + 2 * 10 * UNIT_BYTES


def test_numbers_of_every_step_are_counted_with_those_of_updates_within_their_share() -> None:
    estimate = of("site=param,output keep=stats steps=0; site=param,output keep=probe")
    estimate.saw([record("param", 0, 5_000, KEEP_STATS), record("output", 0, 5_000, KEEP_STATS)])
    assert estimate.num_bytes(0, 1000) == 2 * ROW_BYTES + 1000 * 3 * PROBE_BYTES
    small = Estimate(parse_rules("site=param keep=probe"), rank=0, world_size=1, max_bytes=72_000)
    small.saw([record("param", 0, 5_000, KEEP_STATS)])
    assert small.num_bytes(0, 50) == 50 * 2 * PROBE_BYTES
    assert small.num_bytes(0, 1000) == 1000
    assert estimate.look(1) is None
    said = estimate.look(1)
    assert said is not None
    assert said.endswith("at most 17.2 GB (max_bytes), of which 238.6 MB are for the numbers of every step")


def test_what_begins_later_makes_it_a_lower_bound() -> None:
    estimate = of("site=output keep=tensor; site=grad keep=tensor steps=50", world_size=2)
    estimate.saw([record("output", 0, 1_000)])
    estimate.look(1)
    said = estimate.look(1)
    assert said is not None
    assert said.startswith("at these rules rank 0 (of 2) writes at least 1.1 kB at step 0, ")
    assert said.endswith("; at most 17.2 GB a rank (max_bytes)")


def test_a_training_says_about_what_it_then_writes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    finished = jobs.succeeded(jobs.program(tmp_path, "train.py", RECORDER="1"))
    (line,) = finished.lines("recorder: at these rules about ")
    found = re.search(r"about (\S+) kB at step 0, ", line)
    assert found is not None
    of_step_0 = 1e3 * float(found[1])
    tensors = 3 * 64 * 256 * 4 + 2 * (256 * 256 + 256) * 4
    assert tensors <= of_step_0 <= 1.05 * tensors
