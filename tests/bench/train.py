"""One measured process: the demo's training on one rank, under the recorder that is asked for. Prints one line of JSON.

Each step is timed inside the process, so that start-up, imports and the reading of the text enter no figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import time
from pathlib import Path
from types import ModuleType

import torch

from tests.bench import recorders

DEMO = Path(__file__).parents[2] / "scripts" / "demo_train.py"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_train", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recorder")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    args = parser.parse_args()

    demo = load_demo()
    torch.manual_seed(1234)
    model = demo.GPT()
    optimizer = demo.make_optimizer(model)
    batches = demo.batches(demo.load_text(max_bytes=2 << 20), seed=0)
    counter = recorders.Counter()
    end_step: recorders.EndStep = recorders.no_end
    if args.recorder == "count":
        recorders.attach(model, optimizer, counter.see)
    else:
        end_step = recorders.install(args.recorder, model, optimizer, args.directory)

    step_s: list[float] = []
    cpu_s = 0.0
    loss = float("nan")
    for step in range(args.steps):
        if step == args.warmup:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s = -(usage.ru_utime + usage.ru_stime)
        inputs, targets = next(batches)
        started = time.perf_counter()
        loss = demo.train_step(model, optimizer, inputs, targets)
        end_step(step)
        step_s.append(time.perf_counter() - started)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s += usage.ru_utime + usage.ru_stime
    result = {
        "step_s": step_s,
        "cpu_s_per_step": cpu_s / (args.steps - args.warmup),
        "loss": loss,
        "num_tensors": counter.num_tensors,
        "num_bytes": counter.num_bytes,
        "end_s": time.time(),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
