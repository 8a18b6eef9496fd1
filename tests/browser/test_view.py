"""The live page of `recorder view` in a real browser: a run watched to its end, panes kept, a run that goes away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

from recorder.format.rundir import encode_status
from recorder.report.collect import VIEW, read_panes
from recorder.view.server import Watching
from tests.browser.conftest import Opened
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.report_pages import HOSTILE, hostile_run, run_of
from tests.rigs.serving import serving
from tests.rigs.small_runs import make_training

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_WAIT_MS = 90_000
_TRAINING = """
import time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(1)
del model
dist.destroy_process_group()
"""

Look = Callable[..., Opened]


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Open an address of a server. In the end the page has said no error, and asked nobody but that server."""
    contexts, pages = [], []

    def open_it(address: str, *, ready: str = "html[data-drawn]") -> Opened:
        context = browser.new_context(viewport={"width": 1200, "height": 900})
        contexts.append(context)
        opened = Opened(context.new_page())
        pages.append((opened, urlsplit(address).netloc))
        opened.page.goto(address, wait_until="commit")
        opened.page.wait_for_selector(ready, timeout=_WAIT_MS)
        return opened

    yield open_it
    for opened, host in pages:
        assert [text for text in opened.said if "ERR_" not in text and "403" not in text] == []  # a server that ended
        assert {urlsplit(url).netloc for url in opened.asked if not url.startswith("data:")} == {host}
    for context in contexts:
        context.close()


def test_a_training_of_two_ranks_is_watched_to_its_end(look: Look, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINING)
    (tmp_path / "runs").mkdir()
    settings = {
        "RECORDER": "1",
        "RECORDER_DIR": str(tmp_path / "runs"),
        "RECORDER_RULES": "keep=stats",
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with (
        subprocess.Popen(launch, cwd=tmp_path, env={**os.environ, **settings}, stderr=subprocess.PIPE) as job,
        serving(tmp_path / "runs") as server,
    ):
        opened = look(server.address)
        page = opened.page
        page.wait_for_selector(".runs a", timeout=_WAIT_MS)  # the list, which is asked for anew
        page.click(".runs a")
        page.wait_for_selector("html[data-state='live'] #panel-map .heat-chunk", timeout=_WAIT_MS)
        first = int(page.evaluate("() => document.documentElement.dataset.step"))
        page.wait_for_function(f"() => Number(document.documentElement.dataset.step) > {first}", timeout=_WAIT_MS)
        assert "live" in opened.text("#live")
        page.wait_for_selector("html[data-state='over']", timeout=_WAIT_MS)
        assert opened.text("#live") == "over, step 7"
        page.wait_for_function(
            "() => document.querySelector('#panel-top .facts').textContent.includes('0 to 7 (8)')", timeout=_WAIT_MS
        )
        page.wait_for_function(  # recorder doctor is asked once the run is over
            "() => document.querySelector('#verdict').textContent.includes('whole')", timeout=_WAIT_MS
        )
        page.wait_for_selector("#panel-lines .plot canvas")
        assert page.locator("#panel-lines .line-name").all_inner_texts()[:3] == [
            "all ranks together",
            "rank 0",
            "rank 1",
        ]
        job.wait(60)


def test_panes_are_named_arranged_saved_and_there_again_after_a_restart(look: Look, tmp_path: Path) -> None:
    run = make_training(tmp_path / "run")
    with serving(run=run) as server:
        opened = look(server.address)
        page = opened.page
        page.click("#panel-map [data-keep=map]")
        page.click("#panel-lines [data-keep=lines]")
        page.wait_for_selector(".pane .plot canvas")
        name = page.locator(".pane input.pane-name").nth(1)
        name.fill("my <b>lines</b>")
        name.press("Enter")
        page.locator(".pane").nth(1).get_by_title("move forward").click()
        page.wait_for_timeout(100)
        port = urlsplit(server.address).port
        page.wait_for_function("() => document.querySelector('.pane input.pane-name').value === 'my <b>lines</b>'")
        for _ in range(100):
            if [one["kind"] for one in read_panes(run)] == ["lines", "map"]:
                break
            page.wait_for_timeout(100)
    assert [(one["kind"], one["wide"]) for one in read_panes(run)] == [("lines", False), ("map", True)]
    with serving(run=run, port=port or 0) as server:
        again = look(server.address)
        again.page.wait_for_selector(".pane .plot canvas")
        assert again.page.locator(".pane").count() == 2
        assert again.page.locator(".pane input.pane-name").first.input_value() == "my <b>lines</b>"
        again.page.locator(".pane").first.get_by_title("remove").click()
        for _ in range(100):
            if len(read_panes(run)) == 1:
                break
            again.page.wait_for_timeout(100)
    assert [path.name for path in run.iterdir() if path.name.startswith(VIEW)] == [VIEW]


def test_the_list_is_sorted_and_searched(look: Look, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        make_training(tmp_path / name)
    with serving(tmp_path) as server:
        page = look(server.address).page
        names = page.locator(".runs tbody a[href^=run]")
        page.get_by_role("button", name="run").click()
        assert names.all_inner_texts() == ["one", "three", "two"]
        page.get_by_role("button", name="run").click()
        assert names.all_inner_texts() == ["two", "three", "one"]
        page.wait_for_selector(".runs .flag.wrong", timeout=_WAIT_MS)  # the rules were asked meanwhile
        assert "\n" in (page.locator(".runs .flag.wrong").first.get_attribute("title") or "")  # a finding a line
        assert page.locator(".sparkline").count() == 3
        page.locator("#find").fill("three")
        assert names.all_inner_texts() == ["three"]
        page.locator("#find").fill("nonfinite")
        page.wait_for_function("() => document.querySelectorAll('.runs tbody tr').length === 3", timeout=_WAIT_MS)
        page.locator("#find").fill("NaN")
        assert names.count() == 3
        page.locator("#find").fill("zz")
        assert names.count() == 0 and page.locator("#list-note").inner_text().startswith('No run has "zz" in its name')
        page.locator("#find").fill("three")
        page.locator(".runs tbody td[data-name=ranks] a").click()
        page.wait_for_selector("#ranks-note a", timeout=_WAIT_MS)
        assert page.locator("h1").inner_text() == "Ranks of three"
        assert page.locator("#ranks-note a").inner_text().startswith("recorder check has")
        page.set_viewport_size({"width": 400, "height": 800})
        page.go_back()
        page.wait_for_selector(".runs .flag.wrong", timeout=_WAIT_MS)
        assert page.evaluate("() => document.documentElement.scrollWidth") == 400


def test_the_ranks_of_a_run_are_sorted_the_worst_first_and_searched(look: Look, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run-a")
    for rank in range(3):
        writer, found = HandmadeWriter(run, rank), {"rule": "nonfinite", "text": "<b>", "severity": "error"}
        status: dict[str, object] = {
            "state": "failed" if rank == 2 else "recording",
            "step": 9 - rank,
            "interval_s": 3600.0,
        }
        status |= {"host": f"node-{rank // 2}", "findings": [found, found] if rank == 1 else [], "free_bytes": 7 - rank}
        (writer.directory / "_status.json").write_bytes(encode_status(status))
    with serving(tmp_path / "runs") as server:
        opened = look(server.address)
        page = opened.page
        page.locator(".runs a", has_text="3").click()
        page.wait_for_selector("html[data-drawn] #ranks-note", timeout=_WAIT_MS)
        assert opened.text("#ranks-note").startswith(
            "3 ranks on 2 nodes: 2 recording, 1 failed; step 7 to 9; 1 rank with"
        )

        def shown(number: int) -> list[str]:
            return page.locator("table").nth(number).locator("tbody td:first-child").all_inner_texts()

        marks = page.locator("table .flag", has_text="nonfinite").all_inner_texts()
        assert marks == ["nonfinite", "nonfinite"], "once for the node, once for the rank"
        assert (shown(0), shown(1)) == (["1", "2"], ["2", "0", "1"]), "the node and the rank that failed come first"
        page.click("button[data-key='sort rank findings']")
        assert shown(1) == ["1", "0", "2"]
        page.fill("#find", "node-0")
        assert (shown(0), shown(1)) == (["2"], ["1", "0"])
        page.get_by_text("values of the run").click()
        page.wait_for_selector("html[data-live='run']", timeout=_WAIT_MS)


def test_ranks_say_how_far_they_are_behind_as_the_head_says_the_step(look: Look, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(step, np.ones(3, np.float32), step=step, rank=rank) for step in range(9)]])
        status = {"state": "recording", "step": 6 - 4 * rank, "interval_s": 3600.0}
        (writer.directory / "_status.json").write_bytes(encode_status(status))
    with serving(run=run) as server:
        page = look(server.address).page
        page.wait_for_selector("#panel-ranks table", timeout=_WAIT_MS)
        titles = page.locator("#panel-ranks th").all_inner_texts()
        cells = page.locator("#panel-ranks tbody tr").all_inner_texts()
    assert "step" not in titles
    assert [line.split("\t")[titles.index("steps behind")] for line in cells] == ["0", "4"]


def test_what_is_chosen_beside_is_chosen_in_both(look: Look, tmp_path: Path) -> None:
    make_training(tmp_path / "one")
    make_training(tmp_path / "two", factor=1.25)
    with serving(tmp_path) as server:
        opened = look(server.address + "side?run=one&run=two")
        frames = opened.page.frames[1:]
        for frame in frames:
            frame.wait_for_selector("html[data-drawn]", timeout=_WAIT_MS)
        frames[0].select_option("#choose-stat", "l2")
        frames[1].wait_for_function("() => document.querySelector('#choose-stat').value === 'l2'", timeout=_WAIT_MS)


def test_back_undoes_a_click_beside_and_in_a_page_of_its_own(look: Look, tmp_path: Path) -> None:
    make_training(tmp_path / "one")
    make_training(tmp_path / "two", factor=1.25)
    with serving(tmp_path) as server:
        alone = look(f"{server.address}run/one/").page
        alone.select_option("#choose-stat", "l2")
        alone.evaluate("() => history.back()")
        alone.wait_for_function("() => document.querySelector('#choose-stat').value === 'absmax'", timeout=_WAIT_MS)
        opened = look(server.address + "side?run=one&run=two")
        frames = opened.page.frames[1:]
        for frame in frames:
            frame.wait_for_selector("html[data-drawn]", timeout=_WAIT_MS)
        for value in ("l2", "std"):
            frames[0].select_option("#choose-stat", value)
            is_chosen = f"() => document.querySelector('#choose-stat').value === '{value}'"
            frames[1].wait_for_function(is_chosen, timeout=_WAIT_MS)
        opened.page.evaluate("() => history.back()")
        for frame in frames:
            frame.wait_for_function("() => document.querySelector('#choose-stat').value === 'l2'", timeout=_WAIT_MS)


def test_hostile_names_are_text_and_a_run_that_is_deleted_stays_on_the_page(look: Look, tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "<img src=x onerror=alert(1)>")
    with serving(tmp_path) as server:
        listed = look(server.address)
        assert listed.page.locator(".runs a[href^=run]").all_inner_texts() == [run.name]
        opened = look(f"{server.address}run/{quote(run.name)}/")
        assert opened.page.title().startswith(run.name)
        assert opened.page.locator("img").count() == 0
        assert HOSTILE[1] in opened.page.locator("#panel-map .heat-label").all_inner_texts()
        shutil.rmtree(run)
        opened.page.wait_for_selector("html[data-state='gone']", timeout=_WAIT_MS)
        assert "deleted" in opened.text("#live") and opened.page.locator("#panel-map .heat-chunk").count() == 1


def test_a_browser_that_was_cut_off_goes_on_where_it_was(look: Look, tmp_path: Path) -> None:
    run = make_training(tmp_path / "run")
    with serving(run=run) as server:
        opened = look(server.address)
        opened.page.wait_for_selector("#live.over", timeout=_WAIT_MS)
        assert opened.text("#live") == "over, step 19"
        port = urlsplit(server.address).port or 0
    opened.page.wait_for_selector("#live.wrong", timeout=_WAIT_MS)  # the server has ended, and the page says so
    assert "does not answer" in opened.text("#live")
    with serving(run=run, port=port, token=server.token):
        opened.page.wait_for_selector("#live.over", timeout=_WAIT_MS)  # the page has asked again by itself
        assert opened.page.locator("#panel-map .heat-chunk").count() == 1


def test_runs_of_one_name_are_told_apart_and_damage_and_pending_findings_are_said(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"created_s": 1.0, "ranks": 1, "step": 3, "written": 1, "bytes": 9, "found": None}
    listed = [
        {**one, "directory": name, "name": "gpt", "states": {state: 1}, "problems": problems}
        for name, state, problems in (("gpt", "closed", []), ("gpt-2", "killed or silent", ["a shard is short"]))
    ]
    listed.append({**one, "directory": "other-1", "name": "other", "states": {"closed": 1}, "problems": []})
    monkeypatch.setattr(Watching, "listed", lambda self: listed)
    monkeypatch.setattr(Watching, "found", lambda self, run: (None, True))
    HandmadeWriter(make_run(tmp_path / "runs" / "gpt-2", name="gpt")).finish()
    with serving(tmp_path / "runs") as server:
        opened = look(server.address)
        page = opened.page
        names = page.locator(".runs tbody td[data-name=run]")
        assert sorted(names.all_inner_texts()) == ["gpt gpt", "gpt gpt-2", "other"]
        assert page.locator(".runs .flag.wrong").get_attribute("title") == "a shard is short"
        page.screenshot(path=tmp_path / "list.png")
        page.fill("#find", "killed")
        assert names.all_inner_texts() == ["gpt gpt-2"]
        page.locator(".runs tbody td[data-name=ranks] a").click()
        page.wait_for_selector("html[data-drawn] #ranks-note", timeout=_WAIT_MS)
        assert opened.text("#ranks-note").endswith("; the findings of recorder check are being worked out.")
        assert page.locator("table").first.locator("tbody td").all_inner_texts()[3] == "", "no step yet"
        page.screenshot(path=tmp_path / "ranks.png")


def test_a_nan_in_a_column_of_several_steps_begins_at_its_step(look: Look, tmp_path: Path) -> None:
    values = {(0, step): float("nan") if step >= 1001 else 1.0 + step % 7 for step in range(1300)}
    run = run_of(tmp_path / "run", values)
    with serving(run=run) as server:
        opened = look(f"{server.address}#from=990&to=1009")
        opened.page.wait_for_selector("#live.over", timeout=_WAIT_MS)
        opened.redrawn()
        assert "1,300 steps in 650 columns" in opened.text("#panel-map .note")
        row = opened.pixels("#panel-map .heat-chunk")[17 + 1].astype(int)  # "net" is above it
        is_bad = (row[:, 0] > 200) & (row[:, 1] < 210) & (row[:, 2] > 100)
        assert np.flatnonzero(is_bad)[0] == pytest.approx(row.shape[0] * (1001 - 990) / 20, abs=2)
