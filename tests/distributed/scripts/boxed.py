"""Trains a small model under DDP again and again, each time with faults at some steps, recorded as a case says.

    python -m tests.rigs.ranks 2 boxed.py CASES.json

CASES.json is a list of objects: `folder`, where the run goes; `settings` of `attach`; `steps`; `seed`; and `events`, a
list of `[step, rank, what]`; with ``told`` a rank waits until it knows of a trigger. After the last step each rank
waits until it has written what triggers asked it for, so that a slow machine has seconds to spare; a case with
`"waits": false` ends at once. With `"apart": true` each rank has a working directory of its own, as on nodes that share
no file system. Of each rank `folder/rankN.pt` has the losses and the parameters. With `"disk": true` a case has a disk
that its events can make full, slow or healthy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recorder
import recorder.write.writer
from recorder.lifecycle import active
from tests.rigs.fakes import FaultyDisk

PATIENCE_S = 60.0
_disk = FaultyDisk()
_writing: Any = recorder.write.writer
_plain_disk = _writing.Disk


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def happens(what: str, model: nn.Module, x: Tensor) -> None:
    """One event, before the forward of its step."""
    if what == "nan":
        x[0, 0] = float("nan")
    elif what == "trigger":
        recorder.trigger("the program asks")
    elif what == "evaluation":
        model.eval()
        with torch.no_grad():
            for number in range(6):
                model(x + number)
                if number == 2:
                    recorder.trigger("in an evaluation")
        model.train()
    elif what == "error":
        raise ArithmeticError("the program fails")
    elif what == "told":
        waits(1, None)
    elif what == "signal":
        os.kill(os.getpid(), signal.SIGUSR2)
    elif what == "stop":
        time.sleep(3.0)
    elif what.startswith("kill"):  # in the middle of the dump that is asked for here
        recorder.trigger("just before a kill")
        delay_s = float(what.removeprefix("kill "))
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "survive":  # until the launcher ends this rank, too
        time.sleep(PATIENCE_S)
    elif what == "full":
        _disk.free_for_writes = 0
    elif what == "slow":
        _disk.delay_s = 0.05
    elif what == "healthy":
        _disk.recover()
    elif what == "gone":
        current = active._current
        directory = current.run_dir() if current is not None else None
        if directory is not None:
            shutil.rmtree(directory)
    elif what != "end":
        raise ValueError(what)


def waits(num_dumps: int, first_step: int | None) -> None:
    """Until as many dumps were begun, that of a first step among them, and all that was waiting is written."""
    recording = active._current.recording if active._current is not None else None
    writer = recording.writer if recording is not None else None
    until_s = time.monotonic() + PATIENCE_S
    while writer is not None and time.monotonic() < until_s:
        is_there = first_step is None or any(dump.first_step == first_step for dump in writer.dumps)
        if is_there and len(writer.dumps) >= num_dumps and not any(dump.num_due for dump in writer.dumps):
            return
        time.sleep(0.01)


def train(case: dict[str, Any], rank: int) -> None:
    torch.manual_seed(case["seed"])
    width = case.get("width", 8)
    inner = Model(width)
    model: nn.Module = nn.parallel.DistributedDataParallel(inner) if dist.is_initialized() else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    events = {(step, of): what for step, of, what in case["events"]}
    ends = [step for step, _, what in case["events"] if what in ("error", "end")]
    losses = []
    folder = Path(case["folder"])
    generator = torch.Generator().manual_seed(1000 * case["seed"] + rank)
    _writing.Disk = (lambda: _disk) if case.get("disk") else _plain_disk
    settings = {"close_deadline_s": 60, "ring_hold_s": 60, "min_free_bytes": 0, **case["settings"]}
    where = str(folder / "recordings")
    if case.get("apart"):
        where = "recordings"
        (folder / f"node{rank}").mkdir(parents=True, exist_ok=True)
        os.chdir(folder / f"node{rank}")
    with recorder.attach(inner, enabled=case.get("recorded", True), dir=where, **settings):
        for step in range(case["steps"]):
            x = torch.randn(4, width, generator=generator)
            if (what := events.get((step, rank))) is not None:
                happens(what, model, x)
            if step in ends:
                break
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            recorder.scalar("loss", loss.detach())
            losses.append(loss.detach())
            time.sleep(case.get("nap_s", 0.0))
        if case.get("waits", True):
            waits(case.get("dumps", 1), case.get("first_step"))
        if case.get("trigger_at_close"):
            recorder.trigger("as it closes")
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: value.detach().clone() for name, value in inner.named_parameters()}
    found = {"losses": torch.stack(losses), "parameters": parameters, "rng": torch.get_rng_state()}
    torch.save(found, folder / f"rank{rank}.pt")


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            train(case, rank)
        except ArithmeticError as error:
            print(f"rank {rank}: {error}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
