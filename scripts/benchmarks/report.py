"""What a page costs: seconds and memory to make it, its bytes, and how soon a browser draws it.

    python -m scripts.benchmarks report                            synthetic runs: 2x36x60, 2x1000x1000, 64x1000x6
    python -m scripts.benchmarks report --sizes 4096x1000x6        ranks x steps x modules
    python -m scripts.benchmarks report --run RUN                  a run of yours

"First paint" and "map" are milliseconds from the navigation to what the browser first shows, and to the map of modules
and steps: the median of five openings, each in a new window. They need chromium (Debian's).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.scale import measure
from tests.rigs.synthetic import Shape, write_run

SIZES = "2x36x60,2x1000x1000,64x1000x6"
_OPENINGS = 5
_EVERY = 10
_MANY_RANKS = 8
_TIMEOUT_S = 3600.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts.benchmarks report")
    parser.add_argument("--sizes", default=SIZES, help="RANKSxSTEPSxMODULES with commas")
    parser.add_argument("--run", type=Path, help="this run instead")
    given = parser.parse_args(arguments)
    failed = 0
    print("| run | page | seconds | processor s | peak MB | first paint ms | map ms |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, title in [(given.run, given.run.name)] if given.run else _synthetic(folder, given.sizes):
            page = folder / "page.html"
            command = [sys.executable, "-m", "recorder", "report", str(run), "-o", str(page), "--force"]
            cost = measure(command, _TIMEOUT_S)
            if cost.exit_code not in (0, 1):
                print(f"{title}: {cost.output}", file=sys.stderr)
                failed = 1
                continue
            paint, drawn = _paint(page)
            size, peak = page.stat().st_size / 1e3, cost.peak_anon_bytes / 1e6
            seconds = f"{cost.seconds:.1f} | {cost.cpu_s:.1f}"
            print(f"| {title} | {size:,.0f} kB | {seconds} | {peak:,.0f} | {paint} | {drawn} |", flush=True)
    return failed


def _synthetic(folder: Path, sizes: str) -> Iterator[tuple[Path, str]]:
    for size in sizes.split(","):
        ranks, steps, modules = map(int, size.split("x"))
        every = _EVERY if ranks > _MANY_RANKS else 1
        run = folder / size
        write_run(run, Shape(ranks=ranks, steps=steps, every=every, modules=modules, nan=(steps // 20 * 10, 1)))
        yield run, f"{size}, every {every}"
        shutil.rmtree(run)


def _paint(page: Path) -> tuple[str, str]:
    chromium = shutil.which("chromium")
    if chromium is None:
        return "no chromium", "no chromium"
    from playwright.sync_api import sync_playwright

    paints, maps = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(_OPENINGS):
            tab = browser.new_page(viewport={"width": 1200, "height": 900})
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-map]", state="attached")
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"))
            maps.append(float(tab.evaluate("document.documentElement.dataset.map")))
            tab.close()
        browser.close()
    return f"{statistics.median(paints):.0f}", f"{statistics.median(maps):.0f}"
