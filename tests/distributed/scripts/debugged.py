"""Trains under DDP with torch's debug server, whose recorder page rank 0 fetches, and on which it asks for a dump.

debugged.py --port=25999 --out=FOLDER
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.debug import start_debug_server, stop_debug_server
from torch.nn.parallel import DistributedDataParallel

import recorder
from recorder.lifecycle.debug_page import RecorderHandler


def fetch(url: str) -> str:
    """Fetch a page of a server that may not have begun to listen."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    page = RecorderHandler()
    start_debug_server(port=options.port, handlers=[page], dump_dir=str(options.out), enabled_dumps={"recorder"})
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    recorder.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(16):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.scalar("loss", loss.detach() * (float("nan") if rank == 1 and step == 5 else 1))
        if step == 9:
            dist.barrier()
            if rank == 0:
                time.sleep(1.0)  # the writer threads look at the losses
                for query in ("", "?dump=1"):
                    text = fetch(f"http://localhost:{options.port}/recorder{query}")
                    (options.out / f"page{query[1:]}.html").write_text(text)
                time.sleep(1.0)
            dist.barrier()
    dist.barrier()
    if rank == 0:
        stop_debug_server()
    del model  # DDP that outlives its process group can block the end of the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
