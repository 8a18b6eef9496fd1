"""Makes the pictures of docs/ anew: trains, records, draws, and photographs the pages in Chromium.

    python -m scripts.pictures              all of them, into docs/pictures; four minutes
    python -m scripts.pictures --run RUN    the demo's run is there already: recordings/demo_train-...

Needs chromium (Debian's) and the extra `test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

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


ALL = (
    Picture("map", "demo", "#view=map&site=grad&stat=l2", height=700),
    Picture("lines", "demo", "#view=lines&site=grad&stat=l2&module=blocks.2.mlp.up&log=1", is_dark=True),
    Picture("broken", "broken", "#view=top&site=output&each=1", height=720),
    Picture("images", "convolutions", "#view=images", height=1000),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts.pictures", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", type=Path, help="a run of the demo; without, one is recorded")
    parser.add_argument("--out", type=Path, default=PICTURES)
    given = parser.parse_args(arguments)
    chromium = shutil.which("chromium")
    if chromium is None:
        print(
            "scripts.pictures: no chromium; on Debian: apt-get install --no-install-recommends chromium",
            file=sys.stderr,
        )
        return 2
    given.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {"demo": given.run or _record(folder / "demo", "scripts/demo_train.py --layout fsdp2", 2)}
        (folder / "train.py").write_text(
            (ROOT / "tests" / "small_training.py").read_text().replace("    for _ in range(5):\n", _NAN)
        )
        runs["broken"] = _record(folder / "broken", str(folder / "train.py"), 2)
        (folder / "net.py").write_text(_CONVOLUTIONS)
        rules = "site=* keep=stats; site=output,param,input steps=0,59 keep=tensor"
        runs["convolutions"] = _record(folder / "convolutions", str(folder / "net.py"), 1, RECORDER_RULES=rules)
        for run, path in runs.items():
            command = [sys.executable, "-m", "recorder", "report", str(path), "-o", str(folder / f"{run}.html")]
            subprocess.run(command, cwd=ROOT, check=True)
        _photograph(folder, given.out, chromium)
    return 0


def _record(folder: Path, program: str, num_ranks: int, **env: str) -> Path:
    """Train a program under the recorder; its arguments follow it, with spaces between."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks > 1 else []
    )
    environment = os.environ | {"RECORDER": "1", "RECORDER_DIR": str(folder), "OMP_NUM_THREADS": "1"} | env
    subprocess.run([sys.executable, *launch, *program.split()], cwd=ROOT, check=True, env=environment)
    return folder


def _photograph(pages: Path, out: Path, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for one in ALL:
            page = browser.new_page(
                viewport={"width": one.width, "height": one.height}, color_scheme="dark" if one.is_dark else "light"
            )
            page.goto((pages / f"{one.run}.html").as_uri() + one.address)
            page.wait_for_selector("html[data-drawn]")
            page.wait_for_timeout(200)
            path = out / f"{one.name}.png"
            path.write_bytes(page.screenshot())
            print(f"{path}: {path.stat().st_size // 1000} kB")
            page.close()
        browser.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
