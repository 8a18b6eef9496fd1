"""Whether `run`, `run.report()` and `run["..."].plot()` show themselves in a notebook that a real Jupyter kernel runs.

    python -m tests.campaigns notebook
    python -m tests.campaigns notebook --out FOLDER     keeps the notebook, its export as HTML, and a picture of it

The kernel executes a notebook over a small run. It is exported as nbconvert exports it, and opened in Chromium. Both
pages inside have to be drawn, with nothing said by their scripts. Needs the extra `notebook` and chromium.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

_CELLS = (
    "import recorder\nrun = recorder.open_run({run!r})\nrun",
    "run.report(height_pixels=700)",
    "run['blocks.0'].plot()",
)
_PANELS = [["Run", "Map", "Lines", "Graph", "Ranks", "Images"], ["Lines"]]
_WAIT_MS = 120_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="where to keep what was made")


def main(args: argparse.Namespace) -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium: apt-get install --no-install-recommends chromium", file=sys.stderr)
        return 2
    try:
        import nbclient
        import nbconvert
        import nbformat
    except ImportError as error:
        print(f"{error}; install with: pip install '.[notebook]'", file=sys.stderr)
        return 2
    from tests.rigs.small_runs import make_training

    with tempfile.TemporaryDirectory() as name:
        out = args.out or Path(name)
        out.mkdir(parents=True, exist_ok=True)
        run = make_training(Path(name) / "run")
        cells = [nbformat.v4.new_code_cell(text.format(run=str(run))) for text in _CELLS]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, timeout=_WAIT_MS // 1000, kernel_name="python3").execute()
        nbformat.write(notebook, out / "notebook.ipynb")
        html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
        (out / "notebook.html").write_text(html, encoding="utf-8")
        panels, said = _look(out / "notebook.html", out / "notebook.png", chromium)
    shown = [list(cell.outputs[-1].get("data", {})) for cell in notebook.cells]
    print(json.dumps({"outputs": shown, "panels": panels, "said": said}))
    return int(panels != _PANELS or bool(said) or any("text/html" not in kinds for kinds in shown))


def _look(path: Path, picture: Path, chromium: str) -> tuple[list[list[str]], list[str]]:
    """The panels of each page inside a page, and what their scripts said; takes a picture of it all."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        # nbconvert's own page asks a network for what draws formulae, of which there are none.
        context = browser.new_context(viewport={"width": 1200, "height": 1900})
        context.route(re.compile("^https?:"), lambda route: route.fulfill(body=""))
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        page.wait_for_function(f"() => window.frames.length === {len(_PANELS)}", timeout=_WAIT_MS)
        for frame in page.frames[1:]:
            frame.wait_for_selector("html[data-drawn]", timeout=_WAIT_MS)
        panels = [frame.locator("nav a").all_inner_texts() for frame in page.frames[1:]]
        page.wait_for_timeout(500)  # for the picture alone: frames below the window are drawn a little later
        page.screenshot(path=str(picture), full_page=True)
        browser.close()
    return panels, said
