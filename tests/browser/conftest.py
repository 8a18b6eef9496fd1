"""One real Chromium for all tests of the page, and the pages that it opens."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import recorder
from recorder.analyze.doctor.reply import checks_of
from recorder.report.report import write_report
from tests.rigs.programs import needs
from tests.rigs.small_runs import make_training

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_WAIT_MS = 20_000
_READ_PIXELS = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, copy.width, copy.height), pieces = [];
  for (let at = 0; at < data.length; at += 0x8000) pieces.push(String.fromCharCode(...data.subarray(at, at + 0x8000)));
  return [copy.height, copy.width, btoa(pieces.join(''))];
}"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    path = needs("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The page is ours and nothing else is opened: as root in a container there is no sandbox.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class Opened:
    """A page in the browser, with what it said and what it asked of a network."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def pixels(self, selector: str) -> Any:
        """The colours of a canvas, by row and column, as red, green, blue and opacity."""
        height, width, packed = self.page.locator(selector).first.evaluate(_READ_PIXELS)
        return np.frombuffer(base64.b64decode(packed), np.uint8).reshape(height, width, 4)

    def redrawn(self) -> None:
        """Wait for two frames."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.page.wait_for_timeout(60)


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open a file as from a folder. In the end it has said nothing, and asked for nothing but itself."""
    contexts = []
    pages: list[Opened] = []

    def open_it(path: Path, address: str = "", *, width: int = 1200, dark: bool = False, **more: Any) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True, **more
        )
        contexts.append(context)
        opened = Opened(context.new_page())
        pages.append(opened)
        opened.page.goto(f"{path.as_uri()}{address}")
        opened.page.wait_for_selector("html[data-drawn]", timeout=_WAIT_MS)
        return opened

    yield open_it
    for context in contexts:
        context.close()
    for opened in pages:
        assert opened.said == []
        assert {url.partition("#")[0] for url in opened.asked} == {opened.asked[0].partition("#")[0]}


def write_page(run: Path, path: Path, against: Path | None = None) -> Path:
    """A page as the command writes it."""
    opened = recorder.open_run(run)
    other = None if against is None else recorder.open_run(against)
    write_report(opened, path, against=other, checks=list(checks_of(opened)))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run."""
    folder = tmp_path_factory.mktemp("trained")
    return write_page(make_training(folder / "run"), folder / "r.html")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs that differ from step 10 on."""
    folder = tmp_path_factory.mktemp("pair")
    make_training(folder / "one")
    make_training(folder / "two", factor=1.25)
    return write_page(folder / "one", folder / "r.html", folder / "two")
