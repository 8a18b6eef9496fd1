"""What one record costs the training thread beyond the copy of its bytes, by site, in microseconds of processor time.

    python -m scripts.benchmarks records              9 rounds of 30 steps
    python -m scripts.benchmarks records --rounds 3

One fresh process trains a chain of small linear layers whose tensors have next to no bytes, again and again: without a
recorder, twice, and with one for each site. The writer rests during a step and works after it (without one the thread
sleeps), so that what is counted is the time of the training thread alone. Each figure is against the training without a
recorder: the median over rounds of the median step, and the least step of all, which other work on the machine disturbs
least.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks import parser_of

from .processes import clean_env, run_fresh

WIDTH = 8
WARMUP = 5
CASES = {
    "no recording": "",
    "no recording, again": "",
    "nothing at these steps": "leaf=yes site=output keep=tensor steps=1000000000",
    "output": "leaf=yes site=output keep=tensor",
    "grad_output": "leaf=yes site=grad_output keep=tensor",
    "input": "leaf=yes site=input keep=tensor",
    "grad_input": "leaf=yes site=grad_input keep=tensor",
    "param": "leaf=yes site=param keep=tensor",
    "grad": "leaf=yes site=grad keep=tensor",
    "output, statistics": "leaf=yes site=output keep=stats",
}


def child(num_modules: int, num_rounds: int, num_steps: int) -> None:
    """The one process: prints for each case its microseconds a step in each round, and how many records a step has."""
    import torch
    from torch import nn

    import recorder

    from .written import gated_writer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    gate = gated_writer()
    inputs = torch.randn(2, WIDTH)

    def measure(rules: str) -> dict[str, Any]:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_modules)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tempfile.TemporaryDirectory(prefix="bench-records-") as folder:
            attached = None
            if rules:
                settings: dict[str, Any] = {"dir": folder, "rules": rules, "min_free_bytes": 0, "codec": "none"}
                attached = recorder.attach(model, enabled=True, pool_bytes=64 << 20, **settings)
            step_us = []
            for _ in range(WARMUP + num_steps):
                gate.clear()
                began_s = time.thread_time()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step_us.append((time.thread_time() - began_s) * 1e6)
                gate.set()
                if attached is not None:
                    assert attached.flush(60.0)
                else:
                    time.sleep(0.01)
            if attached is not None:
                attached.close()
            ledgers = [json.loads(path.read_text())["ledger"] for path in Path(folder).rglob("_writer.json")]
        assert not any(ledger["dropped"] for ledger in ledgers), ledgers
        num_records = sum(ledger["written"] for ledger in ledgers) / (WARMUP + num_steps)
        counted = step_us[WARMUP:]
        return {"step_us": statistics.median(counted), "least_us": min(counted), "num_records": num_records}

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for _ in range(num_rounds):
        for name, rules in CASES.items():
            found[name].append(measure(rules))
    print(json.dumps({"found": found, "end_s": time.time()}))


def main(arguments: list[str]) -> int:
    parser = parser_of("records", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="that are counted, in each round (default 30)")
    parser.add_argument("--modules", type=int, default=200, help="of the chain (default 200)")
    args = parser.parse_args(arguments)
    sizes = [str(args.modules), str(args.rounds), str(args.steps)]
    result = run_fresh("scripts.benchmarks.records", sizes, clean_env(OMP_NUM_THREADS="1")).results[0]["found"]
    print(f"{args.modules} modules, {args.rounds} round(s) of {args.steps} steps\n")
    print("| site | records a step | us a record | least |\n|---|---|---|---|")
    bases = result["no recording"]
    for name, rounds in result.items():
        num_records = rounds[0]["num_records"]
        num = num_records or args.modules
        pairs = zip(rounds, bases, strict=True)
        median = statistics.median(one["step_us"] - base["step_us"] for one, base in pairs) / num
        least = (min(one["least_us"] for one in rounds) - min(base["least_us"] for base in bases)) / num
        print(f"| {name} | {num_records:.0f} | {median:.1f} | {least:.1f} |")
    return 0


if __name__ == "__main__":
    child(*map(int, sys.argv[1:]))
