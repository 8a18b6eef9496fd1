"""What `run.report()` and `run["..."].plot()` show in a notebook, in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import recorder
from recorder.errors import LookupFailedError
from recorder.run.reply import InlinePage
from recorder.run.run import Run
from tests.rigs.report_pages import HOSTILE, hostile_run
from tests.rigs.small_runs import make_training

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Frame

Show = Callable[[InlinePage], "Frame"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorder.open_run(make_training(tmp_path_factory.mktemp("inline") / "run"))


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Put what a cell shows into a page, as a notebook does. In the end nothing was said, and nothing asked for."""
    context = browser.new_context(viewport={"width": 1100, "height": 900}, offline=True)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))

    def show_it(shown: InlinePage) -> Frame:
        path = tmp_path / "notebook.html"
        path.write_text(f"<!doctype html><title>notebook</title><p>cell</p>{shown._repr_html_()}", encoding="utf-8")
        page.goto(path.as_uri())
        frame = page.frames[1]
        frame.wait_for_selector("html[data-drawn]", timeout=20_000)
        return frame

    yield show_it
    assert (said, page.title(), asked) == ([], "notebook", [(tmp_path / "notebook.html").as_uri()])
    context.close()


def test_a_run_shows_its_page_below_the_cell(show: Show, run: Run) -> None:
    shown = run.report(statistics=["absmax", "l2"])
    assert repr(shown).startswith("<Page of run: ") and len(repr(shown)) < 100
    frame = show(shown)
    assert frame.locator("nav a").all_inner_texts() == ["Run", "Map", "Lines", "By depth", "Graph", "Ranks", "Images"]
    assert frame.locator("#panel-map .heat-chunk").count() == 1
    assert frame.locator("#verdict").inner_text() == "`recorder doctor` did not run; run it for an answer"
    frame.get_by_role("link", name="nonfinite").first.click()
    frame.wait_for_function(
        "() => document.querySelector('#panel-lines .chart-head strong').textContent === 'head output'"
    )
    assert frame.url == "about:srcdoc"  # the link did not lead to what is around the frame


def test_two_runs_show_beside_each_other(show: Show, run: Run) -> None:
    frame = show(run.report(against=run))
    assert frame.locator("#diff-verdict.right").count() == 1


def test_a_module_shows_its_lines(show: Show, run: Run) -> None:
    shown = run["blocks.0"].plot("grad", "l2", height_pixels=500)
    assert 'height: 500px"' not in shown.html and "height: 500px" in shown._repr_html_()[:200]
    frame = show(shown)
    assert frame.locator("section").count() == 2 and frame.locator("nav a").all_inner_texts() == ["Lines", "Numbers"]
    assert frame.locator(".chart-head strong").all_inner_texts() == ["blocks.0 grad weight", "loss"]
    assert frame.locator("#panel-lines datalist option").count() == 2  # the module, and the one below it
    frame.select_option("#choose-site", "output train")
    frame.wait_for_function(
        "() => document.querySelector('#panel-lines .chart-head strong').textContent === 'blocks.0 output'"
    )


def test_what_is_not_there_is_said(run: Run) -> None:
    with pytest.raises(LookupFailedError, match=r"'blocks.0' has no 'buffer'; it has output, grad"):
        run["blocks.0"].plot("buffer")
    with pytest.raises(LookupFailedError, match=r"statistic"):
        run["blocks.0"].plot(statistic="nonsense")


def test_hostile_names_are_text(show: Show, tmp_path: Path) -> None:
    run = recorder.open_run(hostile_run(tmp_path / '"><img src=x onerror=alert(1)>'))
    frame = show(run[HOSTILE[1]].plot())
    assert frame.locator("img").count() == 0
    assert HOSTILE[1] in frame.locator("#panel-lines .chart-head strong").first.inner_text()
