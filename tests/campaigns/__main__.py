"""Runs a campaign: hundreds of trainings, damages or kills, of which the test suite runs a sample.

    python -m tests.campaigns                     # their names
    python -m tests.campaigns kill --count 500    # processes killed at random instants
    python -m tests.campaigns flip --seed 7       # the same flips once more
    python -m tests.campaigns all                 # every campaign of faults, one after the other; hours
    python -m tests.campaigns NAME --help         # what else a campaign takes

A campaign is a module with `add_arguments(parser)` and `main(arguments) -> exit code`; the exit code is 1 if anything
was found. `--count`, `--minutes` and `--seed` are the same for all campaigns of faults; such a campaign may add its
own, and say these again with a default. Campaigns that need machines of their own are started by scripts:
`scripts/test-cluster`, `scripts/test-launchers`, `scripts/test-xla`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

FAULTS = {
    "kill": ("faults.kill", "SIGKILL at random instants of real trainings; what is on disk against a replay of them"),
    "cut": ("faults.cut", "shards cut at every byte"),
    "power": ("faults.power", "power loss: every legal state of the disk after the writer's own operations"),
    "stall": ("faults.stall", "disks that stall; the longest hook that training met"),
    "soak": ("faults.soak", "an hour of recording; memory, descriptors and threads must not grow"),
    "repair": ("faults.repair", "a repair that is killed before each of its changes of the disk, and run again"),
    "daemon": ("faults.daemon", "kills of the daemon over recordings that grow and a store that fails"),
    "daemon-soak": ("faults.daemon_soak", "an hour of shipping; the daemon's memory and descriptors must not grow"),
    "flip": ("fuzz.flip", "flipped bits in shards, indexes and manifests"),
    "fuzz": ("fuzz.fuzz", "mutated files under a memory limit"),
    "scale": ("faults.scale", "50,000 modules, 4,096 ranks"),
}
"""Module and purpose, by name; these have `--count`, `--minutes` and `--seed` in common."""

EVIDENCE = {
    "roundtrip": ("roundtrip.roundtrip", "the global view of every layout against one process, value by value"),
    "meshes": ("roundtrip.meshes", "the global view where ranks share a part of the batch: tensor parallel, pipelines"),
    "merge": ("faults.merge", "a merge that is killed before each of its changes of the disk, and taken up again"),
    "twins": ("twins.twins", "training with the recorder against training without, bit by bit"),
    "injected": ("diff.injected", "silent errors in trainings of two ranks, and which of them `diff` names"),
    "clean": ("diff.clean", "trainings without an error, of which `diff` must name nothing"),
    "unseen": ("diff.unseen", "errors and sound pairs that `diff` was not written against"),
    "check": (
        "check.check",
        "faults in trainings and which rule of `check` names them; sound trainings it is quiet on",
    ),
    "audit": ("replay.audit", "flipped bits in outputs of modules, and whether `replay --audit` names module and rank"),
    "commands": ("faults.commands", "8 ranks that are told what to record, one of them stopped meanwhile"),
    "ring": ("ring", "the ring and its triggers: the steps around a fault on all ranks, kills, sick disks, memory"),
    "notebook": ("notebook", "pages inside a notebook that a real Jupyter kernel runs"),
    "sanitize": ("sanitize", "the compiled loops under the address and undefined behaviour sanitizers"),
}
"""Module and purpose, by name; each has options of its own."""

CAMPAIGNS = FAULTS | EVIDENCE


def main(words: Sequence[str]) -> int:
    names = "\n".join(f"  {name:<10} {text}" for name, (_, text) in CAMPAIGNS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns",
        description=__doc__,
        epilog=f"campaigns:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("campaign", nargs="?", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the campaign; NAME --help lists them")
    chosen = parser.parse_args(words)
    if chosen.campaign is None:
        print(names)
        return 0
    if chosen.campaign != "all":
        return run(chosen.campaign, chosen.rest)
    results = {}
    for name in FAULTS:
        print(f"== {name}", flush=True)
        start_s = time.monotonic()
        results[name] = run(name, chosen.rest), time.monotonic() - start_s
    print(f"\n{'campaign':<10} {'result':<10} {'seconds':>8}")
    for name, (code, spent_s) in results.items():
        print(f"{name:<10} {'fine' if code == 0 else f'exit {code}':<10} {spent_s:>8.0f}")
    return max(code for code, _ in results.values())


def run(name: str, words: Sequence[str]) -> int:
    path, _ = CAMPAIGNS[name]
    module: Any = importlib.import_module(f".{path}", __package__)
    # A campaign may say a common option again, to give it a default of its own.
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.campaigns {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    if name in FAULTS:
        parser.add_argument("--count", type=int, help="cases to run; by default the full number")
        parser.add_argument("--minutes", type=float, help="end after so long, even if cases are left")
        parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (default 0)")
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
