"""Makes the pictures of docs/ anew: trains, records, draws, and photographs the pages in Chromium; drawings are SVG.

    python -m scripts.pictures              all of them, into docs/pictures; seven minutes
    python -m scripts.pictures --run RUN    the demo's run is there already: recordings/demo_train-...
    python -m scripts.pictures --only map   this one alone, with no more runs than it takes

Needs chromium (Debian's) and the extra `test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.rigs.typed_pages import Desk, find_blocks

from .drawings import DRAWINGS, draw

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
_NAN = """    for step in range(5):
        if (step, dist.get_rank()) == (3, 1):
            model.module.blocks[1].mlp.up.weight.data[0, 0] = float("nan")
"""
_CONVOLUTIONS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 12, 7, 2, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Flatten(),
                    nn.Linear(12 * 256, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
at = torch.linspace(-1, 1, 32)
for step in range(60):
    label = torch.randint(0, 4, (32,))
    label, sign = label[:, None, None], torch.where(label > 1, 1, -1)[:, None, None]
    wave = torch.sin((label + 1) * (at[:, None] + at[None, :] * sign) * 5)
    images = torch.stack([wave, wave.flip(1), wave.flip(2)], 1) + 0.2 * torch.randn(32, 3, 32, 32)
    loss = nn.functional.cross_entropy(net(images), label.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Picture(NamedTuple):
    """One picture: of which run, where on its page, how large."""

    name: str
    run: str
    address: str
    width: int = 1100
    height: int = 640
    is_dark: bool = False
    heading: str = ""
    """The words with which it begins, below the header; without, it begins where the address leads."""


ALL = (
    Picture("map", "demo", "#view=map&site=grad&stat=l2&colors=median", height=700),
    Picture("lines", "demo", "#view=lines&site=grad&stat=l2&module=blocks.2.mlp.up&log=1", is_dark=True),
    Picture("broken", "broken", "#view=top&site=output&each=1", height=980),
    Picture("images", "convolutions", "#view=images", height=640),
    Picture("against", "refactoring", "#view=against", height=640),
    Picture("ranks", "silent", "#view=ranks&site=param", height=680),
    Picture("dumps", "ring", "#view=map&site=output&stat=absmax", height=620),
    Picture("cosine", "objectives", "#view=numbers", height=320, heading="cosine.trunk.2"),
    Picture("tokens", "rollout", "#view=tokens", height=420),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts.pictures", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", type=Path, help="a run of the demo; without, one is recorded")
    parser.add_argument("--only", action="append", choices=[one.name for one in ALL], help="this one; may be repeated")
    parser.add_argument("--out", type=Path, default=PICTURES)
    given = parser.parse_args(arguments)
    chosen = [one for one in ALL if not given.only or one.name in given.only]
    chromium = shutil.which("chromium")
    if chromium is None:
        print(
            "scripts.pictures: no chromium; on Debian: apt-get install --no-install-recommends chromium",
            file=sys.stderr,
        )
        return 2
    given.out.mkdir(exist_ok=True)
    for name, drawing in DRAWINGS.items():
        (given.out / f"{name}.svg").write_text(draw(drawing), encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in dict.fromkeys(one.run for one in chosen):
            desk = folder / run
            desk.mkdir()
            drawn = [str(given.run)] if run == "demo" and given.run else _RUNS[run](desk)
            command = [sys.executable, "-m", "recorder", "report", *drawn, "-o", str(folder / f"{run}.html")]
            subprocess.run(command, cwd=desk, check=True)
        _photograph(chosen, folder, given.out, chromium)
    return 0


def _demo(desk: Path) -> Sequence[str]:
    return _record(desk, str(ROOT / "scripts" / "demo_train.py"), "--layout", "fsdp2")


def _broken(desk: Path) -> Sequence[str]:
    program = desk / "train.py"
    program.write_text((ROOT / "tests" / "small_training.py").read_text().replace("    for _ in range(5):\n", _NAN))
    return _record(desk, str(program))


def _convolutions(desk: Path) -> Sequence[str]:
    program = desk / "net.py"
    program.write_text(_CONVOLUTIONS)
    rules = "site=* keep=stats; site=output,param,input steps=0,59 keep=tensor"
    return _record(desk, str(program), num_ranks=1, rules=rules)


def _job(page: str, *drawn: str) -> Callable[[Path], Sequence[str]]:
    """Return what types a page of docs/jobs from top to bottom, and returns what is drawn of that."""

    def type_page(desk: Path) -> Sequence[str]:
        seat = Desk(desk, [])
        for block in find_blocks((ROOT / "docs" / "jobs" / page).read_text(encoding="utf-8")):
            if block.language not in ("text", "console"):
                seat.type_block(block)
        return drawn or ("recordings",)

    return type_page


_RUNS: dict[str, Callable[[Path], Sequence[str]]] = {
    "demo": _demo,
    "broken": _broken,
    "convolutions": _convolutions,
    "refactoring": _job("02-refactoring.md", "before", "--against", "wrong"),
    "silent": _job("03-silent-rank.md"),
    "ring": _job("06-black-box.md"),
    "objectives": _job("11-objectives.md"),
    "rollout": _job("16-rollout.md", "trainer", "--align", "engine-2"),
}
"""What records a run in a folder, and returns what `recorder report` takes."""


def _record(desk: Path, *program: str, num_ranks: int = 2, rules: str = "") -> Sequence[str]:
    """Train a program under the recorder."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    )
    environment = os.environ | {"RECORDER": "1", "RECORDER_DIR": str(desk / "recordings"), "OMP_NUM_THREADS": "1"}
    if rules:
        environment["RECORDER_RULES"] = rules
    subprocess.run([sys.executable, *launch, *program], cwd=ROOT, check=True, env=environment)
    return ["recordings"]


def _photograph(pictures: Sequence[Picture], pages: Path, out: Path, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for one in pictures:
            page = browser.new_page(
                viewport={"width": one.width, "height": one.height}, color_scheme="dark" if one.is_dark else "light"
            )
            page.goto((pages / f"{one.run}.html").as_uri() + one.address)
            page.wait_for_selector("html[data-drawn]")
            if one.heading:
                heading = page.get_by_text(one.heading).first
                heading.scroll_into_view_if_needed()  # draws the charts above it, which moves it
                page.wait_for_timeout(300)
                heading.evaluate(
                    "one => scrollBy(0, one.getBoundingClientRect().top - 8 "
                    "- document.querySelector('header').offsetHeight)"
                )
            page.wait_for_timeout(300)
            path = out / f"{one.name}.png"
            path.write_bytes(page.screenshot())
            print(f"{path}: {path.stat().st_size // 1000} kB")
            page.close()
        browser.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
