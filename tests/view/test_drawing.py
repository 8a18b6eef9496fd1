"""What is drawn of a run while it grows is what the page shows that is made of it at once."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch

import recorder
from recorder.numerics.histogram import Histogram
from recorder.read.shard_rows import ShardRows
from recorder.report.blocks import GrowingCube
from recorder.report.collect import collect
from recorder.report.distributions import HistogramCollector
from recorder.run.finding import find_run
from recorder.system.text import size
from recorder.view import drawing
from recorder.view.drawing import Drawing
from tests.rigs.capturing import Tiny, flagged
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run
from tests.rigs.report_pages import Read, unpacked, values_of
from tests.rigs.waiting import wait_until

__all__ = ["cli"]

NUM_STEPS, MODULES = 12, ("a", "b", "b.c")


def rows_of(step: int, rank: int) -> list[Row]:
    rng = np.random.default_rng([step, rank])
    found = []
    for i, path in enumerate(MODULES if step else MODULES[:2]):  # one is first called at step 1
        values = rng.standard_normal((2, 3)).astype(np.float32) * 10**i
        if (step, rank, path) == (7, 1, "b"):
            values[0, 0] = np.nan
        found.append(make_row(10 * step + i, values, step=step, rank=rank, module_path=path, encoding=None))
    loss = np.float64(1 / (step + 1))
    number = {"site": "scalar", "name": "loss", "module_path": "", "encoding": None}
    return [*found, make_row(10 * step + 9, loss, step=step, rank=rank, **number)]


def draw(run: Path) -> Drawing:
    return Drawing(*find_run(run))


def refresh(drawn: Drawing) -> None:
    while drawn.refresh():
        pass


def read(packed: dict[str, str]) -> dict[str, Read]:
    """Blocks as a server sends them."""
    return {name: unpacked(base64.b64decode(text)) for name, text in packed.items()}


def at_once(run: Path) -> dict[str, Read]:
    return {block.name: unpacked(block.encoded()) for block in collect(recorder.open_run(run))}


def same(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> None:
    np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2 * np.nanmax(np.abs(other), initial=1e-9))


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are whole as soon as a later one was seen, and slow blocks are always made anew."""
    monkeypatch.setattr(drawing, "_WHOLE_AFTER_S", 0.0)
    monkeypatch.setattr(drawing, "_SLOW_S", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_what_is_drawn_step_by_step_is_what_is_drawn_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writers = [HandmadeWriter(run, rank) for rank in range(2)]
    drawn = draw(run)
    refresh(drawn)
    assert drawn.collected is None and "axes" not in drawn.blocks()
    pending = []
    for step in range(NUM_STEPS):
        for rank in (0, 1):
            writers[rank].add_shard([rows_of(step, rank)], kind="stats")
            refresh(drawn)
            pending.append(drawn.growing.num_pending)
    assert drawn.state == "live" and max(pending[4:]) <= 3 * 2 * (len(MODULES) + 1)  # what is done with is forgotten
    live = read(drawn.blocks())
    assert live["axes"].data["steps"] == list(range(NUM_STEPS))  # also the last, which may not be whole
    for writer in writers:
        writer.finish(exit_reason="end")
    refresh(drawn)
    assert drawn.state == "over"
    live, whole = read(drawn.blocks()), at_once(run)
    for name in ("steps", "num_steps", "last_step", "lanes", "statistics", "scalars", "scalar_steps", "global_steps"):
        assert live["axes"].data[name] == whole["axes"].data[name], name
    order = [live["axes"].data["series"].index(one) for one in whole["axes"].data["series"]]
    for name in ("absmax", "l2", "mean", "min", "max", "nan_count"):
        same(values_of(live[f"values/{name}"])[0][order], values_of(whole[f"values/{name}"])[0])
    same(values_of(live["scalars/mean"])[0], values_of(whole["scalars/mean"])[0])
    assert any("nonfinite: 'b' output, step 7" in text for text, *_ in live["top"].data["findings"])
    assert live["top"].data["verdict"] is None and live["top"].data["checks"]  # by then doctor was asked


def test_all_that_show_a_closed_run_show_one_size_of_it(tmp_path: Path, cli: Cli) -> None:
    with flagged(tmp_path, "keep=tensor") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    (path,) = recording.folder.iterdir()
    indexes = list(path.glob("rank=*/*/_tensors-*.index"))
    num_bytes = sum(file.stat().st_size for file in [*indexes, *path.glob("rank=*/*/*.arrow")])
    drawn = draw(path)
    refresh(drawn)
    assert indexes and drawn.state == "over"
    for page in (read(drawn.blocks()), at_once(path)):
        assert dict(page["top"].data["facts"])["rows"].endswith(f", {size(num_bytes)}")
    for words in (["ls", path.parent], ["ls", path], ["verify", path], ["top", path]):
        assert size(num_bytes) in cli(*words).out, words
    (listed,) = cli("ls", path.parent, "--json").json["runs"]
    (rank,) = cli("top", path, "--json").json["ranks"]
    assert listed["bytes"] == cli("verify", path, "--json").json["bytes"] == rank["used_bytes"] == num_bytes


@pytest.mark.usefixtures("no_wait")
def test_a_page_that_takes_what_is_new_has_what_a_new_page_gets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writers = [HandmadeWriter(run, rank) for rank in range(2)]
    drawn = draw(run)
    epoch, version, sizes = -1, 0, []
    numbers = np.zeros((0, 0, 0))
    for step in range(NUM_STEPS):
        for rank in (0, 1):
            writers[rank].add_shard([rows_of(step, rank)], kind="stats")
        refresh(drawn)
        if drawn.epoch != epoch:
            numbers = values_of(read(drawn.blocks())["values/absmax"])[0]
        else:
            more = read(drawn.blocks_since(version))["values/absmax"]
            columns = more.data["columns"]
            sizes.append(len(columns))
            wider = np.full((*numbers.shape[:2], max(columns[-1] + 1, numbers.shape[2])), np.nan)
            wider[:, :, : numbers.shape[2]] = numbers
            wider[:, :, columns] = values_of(more)[0]
            numbers = wider
        epoch, version = drawn.epoch, drawn.version
    same(numbers, values_of(read(drawn.blocks())["values/absmax"])[0])
    assert numbers.shape[2] == NUM_STEPS and max(sizes) <= 3  # what is sent grows with what is new
    assert not [name for name in drawn.blocks_since(drawn.version) if name.startswith("values")]


@pytest.mark.usefixtures("no_wait")
def test_a_batch_of_many_steps_is_read_once_and_a_page_is_told_of_each_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[row for step in range(NUM_STEPS) for row in rows_of(step, rank)]], kind="stats")
        writer.finish(exit_reason="end")
    asked: list[tuple[str, ...]] = []
    columns = ShardRows.columns

    def noted(self: ShardRows, names: Sequence[str], *steps: Any) -> Any:
        asked.append(tuple(names))
        return columns(self, names, *steps)

    monkeypatch.setattr(ShardRows, "columns", noted)
    monkeypatch.setattr(drawing, "_WINDOW_ROWS", 8)
    monkeypatch.setattr(drawing, "_READ_ROWS", 8)
    monkeypatch.setattr(drawing, "_CUT_ROWS", 8)
    monkeypatch.setattr(drawing, "_MAX_TOGETHER_ROWS", 0)
    drawn, told, known = draw(run), [], []
    while drawn.refresh():
        told.append(read(drawn.blocks())["top"].data["live"])
        known.append(drawn.collected.cube.num_steps if drawn.collected is not None else 0)
    num_reads = sum("scope" in names and "histogram" in names for names in asked)
    assert num_reads == 2 * 2  # of each rank's batch all steps but the last, which may not be whole, and then this one
    assert [live["state"] for live in told] == ["reading"] * len(told) and told[0]["found"] == "47 of 94 rows are found"
    assert len(set(known)) > NUM_STEPS // 2 and drawn.state == "over"
    live, whole = read(drawn.blocks()), at_once(run)
    order = [live["axes"].data["series"].index(one) for one in whole["axes"].data["series"]]
    for name in ("absmax", "l2", "nan_count"):
        same(values_of(live[f"values/{name}"])[0][order][:, 1:], values_of(whole[f"values/{name}"])[0][:, 1:])
    assert any("nonfinite: 'b' output, step 7" in text for text, *_ in live["top"].data["findings"])


@pytest.mark.usefixtures("no_wait")
def test_a_run_that_is_found_at_once_says_how_many_of_its_rows_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([rows_of(step, 0) for step in range(NUM_STEPS)], kind="stats")
    writer.finish(exit_reason="end")
    monkeypatch.setattr(drawing, "_WINDOW_ROWS", 8)
    drawn, told = draw(run), []
    while drawn.refresh():
        blocks = read(drawn.blocks())
        assert "axes" not in blocks or {"ranks", "images", "gaps"} <= blocks.keys()  # without these nothing is shown
        live = blocks["top"].data["live"]
        told.append((live["state"], live["found"]))
    assert told[0] == ("reading", "0 of 47 rows are drawn") and told[-1] == ("reading", "47 of 47 rows are drawn")
    assert len(set(told)) > 2 and read(drawn.blocks())["top"].data["live"]["found"] == ""


@pytest.mark.usefixtures("no_wait")
def test_the_newest_step_is_that_of_the_numbers_of_the_step_where_these_are_ahead(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [row for step in range(27) for row in rows_of(step, 0) if step % 10 == 0 or row["site"] == "scalar"]
    HandmadeWriter(run).add_shard([rows], kind="stats")
    drawn = draw(run)
    refresh(drawn)
    top = read(drawn.blocks())["top"].data
    assert top["live"]["step"] == 26 and dict(top["facts"])["steps"] == "0 to 26 (27)"
    assert read(drawn.blocks())["axes"].data["steps"] == [0, 10, 20]


@pytest.mark.usefixtures("no_wait")
def test_a_restart_at_earlier_steps_draws_what_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = HandmadeWriter(run)
    first.add_shard([[make_row(step, [2.0], step=step, module_path="a") for step in range(6)]])
    drawn = draw(run)
    refresh(drawn)
    second = HandmadeWriter(run, name="20260101-000001-host-2")
    again = [make_row(step, [5.0], step=step, module_path="a", attempt=1) for step in range(3, 6)]
    second.add_shard([again])
    second.finish(attempt=1, started_ns=first.manifest["started_ns"] + 10**9)
    first.finish(state="recording")
    refresh(drawn)
    refresh(drawn)
    numbers = values_of(read(drawn.blocks())["values/absmax"])[0]
    same(numbers[0, 0], np.array([2.0, 2, 2, 5, 5, 5]))


@pytest.mark.usefixtures("no_wait")
def test_a_run_that_is_over_has_the_findings_of_check_in_the_probe(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules="site=output keep=stats; site=grad keep=probe"):
        for step in range(70):
            (model(torch.ones(2, 4)).sum() * (1e4 if step == 60 else 1 + step % 3 / 10)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (run,) = tmp_path.iterdir()
    drawn = draw(run)
    refresh(drawn)
    findings = read(drawn.blocks())["top"].data["findings"]
    assert drawn.state == "over" and any("spike" in text for text, *_ in findings), findings
    assert read(drawn.blocks())["ranks"].data["why_none"] == "There is one rank, and it has everything."


@pytest.mark.usefixtures("no_wait")
def test_the_probe_of_a_run_that_goes_on_is_drawn_and_judged_as_far_as_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    rules = "site=output steps=::20 keep=stats; site=grad keep=probe; site=scalar keep=stats"
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=rules):
        for step in range(140):
            loss = model(torch.ones(2, 4)).sum() * (1e4 if step == 60 else 1 + step % 3 / 10)
            loss.backward()
            recorder.scalar("loss", 1.0)
            optimizer.step()
            optimizer.zero_grad()
        (run,) = tmp_path.iterdir()
        wait_until(lambda: recorder.open_run(run).probe().num_rows)
        shards = list(run.rglob("*probe*"))
        for shard in shards:  # the probe comes after the rows, and no further row comes that would ask for a look
            shard.rename(tmp_path / shard.name)
        drawn = draw(run)
        for _ in range(3):
            refresh(drawn)
        assert drawn.collected is not None and not drawn.axes.is_probed
        for shard in shards:
            (tmp_path / shard.name).rename(shard)
        look = drawn.growing.look
        monkeypatch.setattr(drawn.growing, "look", lambda: look() and False)
        wait_until(lambda: drawn.refresh() or (drawn.collected is not None and drawn.axes.is_probed))
        blocks = read(drawn.blocks())
    assert drawn.state == "live"
    axes, norms = blocks["axes"].data, values_of(blocks["values/l2"])[0]
    (weight,) = [number for number, one in enumerate(axes["series"]) if one[1:3] == ["grad", "weight"]]
    at = axes["steps"].index(60)
    assert norms[weight, 0, at] > 1e3 * norms[weight, 0, at - 1], "the columns between those with statistics"
    assert any("spike" in text for text, *_ in blocks["top"].data["findings"])


@pytest.mark.usefixtures("no_wait")
def test_a_run_that_goes_on_after_its_end_is_judged_anew_at_its_next_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = HandmadeWriter(run)
    first.add_shard([[make_row(step, [2.0], step=step, module_path="a") for step in range(3)]])
    first.finish(exit_reason="end")
    drawn = draw(run)
    refresh(drawn)
    assert drawn.state == "over" and read(drawn.blocks())["top"].data["verdict"] is None  # doctor was asked
    second = HandmadeWriter(run, name="20260101-000001-host-2")
    more = [make_row(step, [np.nan], step=step, module_path="a", attempt=1) for step in range(3, 6)]
    second.add_shard([more])
    second.finish(attempt=1, started_ns=first.manifest["started_ns"] + 10**9, state="recording")
    refresh(drawn)
    top = read(drawn.blocks())["top"].data
    assert drawn.state == "live" and top["verdict"] is not None and dict(top["facts"])["steps"] == "0 to 5 (6)"
    second.finish(attempt=1, started_ns=first.manifest["started_ns"] + 10**9, exit_reason="end")
    refresh(drawn)
    top = read(drawn.blocks())["top"].data
    assert drawn.state == "over" and top["verdict"] is None
    assert any("nonfinite: 'a' output, step 3" in text for text, *_ in top["findings"])


def test_a_deleted_run_stays_on_the_page_and_one_that_comes_back_is_drawn_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).add_shard([[make_row(step, [2.0], step=step, module_path="a") for step in range(3)]])
    drawn = draw(run)
    refresh(drawn)
    run.rename(tmp_path / "elsewhere")
    refresh(drawn)
    assert drawn.state == "gone" and "values/absmax" in drawn.blocks()
    assert "deleted" in read(drawn.blocks())["top"].data["verdict"]
    make_run(tmp_path / "run", created_ns=7)
    HandmadeWriter(run).add_shard([[make_row(step, [4.0], step=step, module_path="z") for step in range(2)]])
    refresh(drawn)
    assert drawn.state == "live"
    assert values_of(read(drawn.blocks())["values/absmax"])[0].max() == pytest.approx(4.0, rel=0.01)


def test_columns_that_are_put_together_keep_what_stands_out() -> None:
    cube = GrowingCube(steps=[], num_columns=8, num_series=1, num_lanes=1, statistics=("absmax", "min"))
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1000)
    for step, value in enumerate(values):
        cube.add_steps([step])
        at = np.zeros(1, np.int64)
        cube.put(at, at, np.array([step]), {"absmax": np.array([value]), "min": np.array([value])})
    edges = [*cube.first_steps, 1000]
    assert 4 < len(cube.first_steps) <= 8 and cube.num_steps == 1000 and edges[0] == 0
    assert len(set(np.diff(edges[:-1]))) == 1  # all of one width, but the last
    for column, (first, end) in enumerate(pairwise(edges)):
        some = values[first:end]
        assert cube.values["absmax"][0, 0, column] == np.float32(some[np.abs(some).argmax()])
        assert cube.values["min"][0, 0, column] == np.float32(some.min())


def test_there_is_room_for_histograms_of_any_number_of_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HistogramCollector, "max_collected", 40)
    growing = HistogramCollector([0])
    data = Histogram(counts=np.array([[0], [4]])).to_bytes()
    for step in range(100):
        columns = {"step": [step] * 10, "rank": [0] * 10, "histogram": [data] * 10}
        columns |= dict.fromkeys(("zero_count", "nan_count", "inf_count"), [0] * 10)
        growing.add(pa.table(columns), lambda table: np.arange(table.num_rows))
    block = growing.block("histograms")
    assert block is not None and block.data["steps"] == [0, 64, 99]  # as many as fit, evenly apart, and the newest
    assert block.data["num_steps"] == 100
    assert block.data["shape"][:2] == [10, 3] and block.arrays["codes"].any(axis=2).all()


def test_what_is_not_final_is_taken_out_again() -> None:
    cube = GrowingCube(steps=[0, 1, 2], num_columns=8, num_series=1, num_lanes=1, statistics=("mean",))
    at = np.zeros(2, np.int64)
    cube.save_from(1)
    cube.put(at, at, np.array([1, 2]), {"mean": np.array([9.0, 9.0])})
    cube.restore()
    assert np.isnan(cube.values["mean"]).all() and not cube.has_row.any()
