"""What watching a run costs: how soon a step is in the browser, and the server's seconds and memory for large runs.

    python -m scripts.benchmarks view                              60 flushes; 64 ranks x 10,000 steps; 4,096 x 1,000
    python -m scripts.benchmarks view --flushes 10 --sizes 64x1000x6     ranks x steps x modules

The first part trains a small model beside the server, asks the recorder after each step to put all it saw into files,
and takes from then on the time until the page in Chromium shows the step. Halfway the page is frozen for some seconds,
as a browser does with a page that nobody looks at, and has to show all steps afterwards: exit code 1 where it does not,
or where a step took more than two seconds. The second part opens synthetic runs. The server's memory is the most that
was its own (`RssAnon`); of the first run, which is tiny, that is Python and its libraries. Needs chromium (Debian's).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.rigs.synthetic import Shape, write_run

from .processes import clean_env
from .scale import ROOT, anon_bytes

SIZES = "2x10x6,64x10000x6,4096x1000x6"
_MANY_RANKS = 64
_AT_MOST_S = 2.0
_FROZEN_S = 4.0
_WAIT_MS = 600_000
_TRAINING = """
import random, sys, time
import torch
from recorder.lifecycle import active
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert active._current.flush(60)
    print(step, time.time(), flush=True)
    time.sleep(1 + random.random())
"""
_WATCH = """() => {
  window.seen = {};
  const look = () => { window.seen[document.documentElement.dataset.step] ??= Date.now() / 1000; };
  new MutationObserver(look).observe(document.documentElement, { attributes: true, attributeFilter: ["data-step"] });
  look();
}"""


class Server(NamedTuple):
    """A running `recorder view`."""

    address: str
    pid: int


@contextmanager
def serving(run: Path | str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serve a run, or a folder of runs, in a process of its own."""
    command = [sys.executable, "-m", "recorder", "view", str(run), "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=env or clean_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if (at := line.find("http://")) >= 0:
                address = line[at:].split()[0]
                break
        threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield Server(address, process.pid)
        finally:
            process.terminate()
            process.wait(30)


def latencies(browser: Any, folder: Path, num_flushes: int) -> tuple[list[float], int]:
    """Seconds from the end of a flush until the page has its step, and how many steps the page never had."""
    env = clean_env(RECORDER="1", RECORDER_DIR=str(folder), RECORDER_RULES="keep=stats", OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", _TRAINING, str(num_flushes)]
    flushed: dict[int, float] = {}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        first = job.stdout.readline().split()
        flushed[int(first[0])] = float(first[1])
        with serving(next(path for path in folder.iterdir() if path.is_dir())) as server:
            tab = browser.new_page()
            tab.goto(server.address, wait_until="commit")
            tab.wait_for_selector("html[data-drawn]", timeout=_WAIT_MS)
            tab.evaluate(_WATCH)
            session, asleep, begin = tab.context.new_cdp_session(tab), set(), len(flushed)
            for line in job.stdout:
                step, at = line.split()
                flushed[int(step)] = float(at)
                if len(flushed) == num_flushes // 2:
                    session.send("Page.setWebLifecycleState", {"state": "frozen"})
                    time.sleep(_FROZEN_S)
                    session.send("Page.setWebLifecycleState", {"state": "active"})
                    asleep = {int(step) + number for number in range(-1, 2 + int(_FROZEN_S))}
            tab.wait_for_selector("html[data-state='over']", timeout=_WAIT_MS)
            seen = {int(name): at for name, at in tab.evaluate("() => window.seen").items() if name.isdigit()}
            # A page that is told of two steps at once shows the later one.
            shown = {step: min((at for one, at in seen.items() if one >= step), default=None) for step in flushed}
            lost = sum(at is None for at in shown.values())
            tab.close()
    counted = {step: at for step, at in shown.items() if at is not None and step not in asleep and step > begin + 1}
    return [at - flushed[step] for step, at in counted.items()], lost


class Opening(NamedTuple):
    """What opening a run took."""

    drawn_s: float
    whole_s: float
    """Until the page has all steps."""
    server_mb: float
    page_mb: float
    """The browser's heap for the page."""


def opening(browser: Any, run: Path, last_step: int) -> Opening:
    """Open a page on a run."""
    with serving(run) as server:
        peak, is_over = [0], threading.Event()

        def look() -> None:
            while not is_over.wait(0.02):
                peak[0] = max(peak[0], anon_bytes(server.pid))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            tab = browser.new_page()
            began_s = time.monotonic()
            tab.goto(server.address, wait_until="commit")
            tab.wait_for_selector("html[data-drawn] #panel-map canvas", timeout=_WAIT_MS)
            drawn_s = time.monotonic() - began_s
            tab.wait_for_function(
                f"() => Number(document.documentElement.dataset.step) >= {last_step}", timeout=_WAIT_MS
            )
            whole_s = time.monotonic() - began_s
            heap = tab.evaluate("() => performance.memory?.usedJSHeapSize ?? 0")
            tab.close()
        finally:
            is_over.set()
            looking.join()
    return Opening(drawn_s, whole_s, peak[0] / 1e6, heap / 1e6)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks view")
    parser.add_argument("--flushes", type=int, default=60, help="0: not that part (default 60)")
    parser.add_argument("--sizes", default=SIZES, help=f"RANKSxSTEPSxMODULES with commas (default {SIZES})")
    parser.add_argument(
        "--every", type=int, default=10, help=f"steps apart, of more than {_MANY_RANKS} ranks (default 10)"
    )
    given = parser.parse_args(arguments)
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium: apt-get install --no-install-recommends chromium", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    failed = 0
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        if given.flushes:
            (folder := Path(name, "live")).mkdir()
            found, lost = latencies(browser, folder, given.flushes)
            late = sum(one > _AT_MOST_S for one in found)
            print(
                f"{len(found)} steps from their flush to the page: median {statistics.median(found):.2f} s, at most "
                f"{max(found):.2f} s, {late} after more than {_AT_MOST_S:g} s; "
                f"the page was frozen for {_FROZEN_S:g} s on the way, and lacked {lost} steps in the end",
                flush=True,
            )
            failed = int(bool(late or lost))
        print("\n| run | map s | whole s | MB of the server | MB of the page |\n|---|---|---|---|---|")
        for size in filter(None, given.sizes.split(",")):
            ranks, steps, modules = map(int, size.split("x"))
            every = given.every if ranks > _MANY_RANKS else 1
            run = Path(name, size)
            write_run(run, Shape(ranks=ranks, steps=steps, every=every, modules=modules, nan=(steps // 20 * 10, 1)))
            one = opening(browser, run, (steps - 1) // every * every)
            memory = f"{one.server_mb:.0f} | {one.page_mb:.0f}"
            print(f"| {size}, every {every} | {one.drawn_s:.1f} | {one.whole_s:.1f} | {memory} |", flush=True)
            shutil.rmtree(run)
        browser.close()
    return failed
