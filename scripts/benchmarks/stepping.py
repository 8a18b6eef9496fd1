"""A training of small steps in one thread, for so many seconds. Prints one line of JSON: when each step ended.

RECORDER=1 python -m scripts.benchmarks.stepping SECONDS
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

WIDTH = 256
DEPTH = 6
BATCH = 64


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(BATCH, WIDTH)
    until_s, ended_s = time.time() + float(sys.argv[1]), [time.time()]
    while ended_s[-1] < until_s:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended_s.append(time.time())
    print(json.dumps({"ended_s": ended_s}), flush=True)


if __name__ == "__main__":
    main()
