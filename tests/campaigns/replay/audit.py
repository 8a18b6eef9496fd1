"""Flipped bits and what an audit says of them: `python -m tests.campaigns audit`.

Each of 50 steps has one bit of one output of one module on one rank flipped; 50 steps between them are sound.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import recorder
from recorder.analyze.replay.bundle import NOT_REPRODUCED, audit
from tests.rigs import jobs

from .program import NUM_STEPS

PROGRAM = Path(__file__).parent / "program.py"
RULES = "leaf=yes keep=replay; class=MultiheadAttention keep=replay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        finished = jobs.torchrun(folder, PROGRAM, str(arguments.seed), **jobs.recording(RULES)).wait(600)
        if finished.returncode:
            print(finished.output)
            return 1
        wrong = {int(step): tuple(where) for step, where in json.loads((folder / "wrong.json").read_text()).items()}
        num_bad = num_calls = 0
        for step in range(NUM_STEPS):
            found = audit(recorder.open_run(folder / "recordings"), step=step)
            num_calls += len(found)
            said = {(one.module, one.rank) for one in found if one.verdict == NOT_REPRODUCED}
            if said != ({wrong[step]} if step in wrong else set()):
                num_bad += 1
                print(f"step {step}: flipped {wrong.get(step)}, said {sorted(said)}", flush=True)
    print(f"{len(wrong)} steps with a flipped bit and {NUM_STEPS - len(wrong)} sound ones, {num_calls} calls:", end=" ")
    print(f"{num_bad} steps of which the audit says something else")
    return int(num_bad > 0)
