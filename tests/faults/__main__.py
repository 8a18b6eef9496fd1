"""Run a whole campaign of faults; the suite runs a sample of each.

    python -m tests.faults kill --count 500       # processes killed at random instants
    python -m tests.faults flip --seed 7          # the same flips once more
    python -m tests.faults all                    # every campaign, one after the other; hours

A campaign is a module beside this one with `add_arguments(parser)` and `main(arguments) -> int`. `--count`, `--minutes`
and `--seed` are the same for all; a campaign may add its own, and say these again with a default. The exit code is 1
if anything was found.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

CAMPAIGNS = {
    "kill": "SIGKILL at random instants of real trainings; what is on disk against a replay of them",
    "cut": "shards cut at every byte",
    "power": "power loss: every legal state of the disk after the writer's own operations",
    "stall": "disks that stall; the longest hook that training met",
    "soak": "an hour of recording; memory, descriptors and threads must not grow",
    "flip": "flipped bits in shards, indexes and manifests",
    "fuzz": "mutated files under a memory limit",
    "scale": "50,000 modules, 4,096 ranks",
}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        epilog="\n".join(f"{name:<8}{text}" for name, text in CAMPAIGNS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("campaign", choices=[*CAMPAIGNS, "all"])
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of the campaign; NAME --help lists them")
    chosen = parser.parse_args(words)
    if chosen.campaign != "all":
        return run(chosen.campaign, chosen.rest)
    results = {}
    for name in CAMPAIGNS:
        print(f"== {name}", flush=True)
        start_s = time.monotonic()
        results[name] = run(name, chosen.rest), time.monotonic() - start_s
    print(f"\n{'campaign':<10} {'result':<10} {'seconds':>8}")
    for name, (code, spent_s) in results.items():
        print(f"{name:<10} {'fine' if code == 0 else f'exit {code}':<10} {spent_s:>8.0f}")
    return max(code for code, _ in results.values())


def run(name: str, words: Sequence[str]) -> int:
    """One campaign, with its own options."""
    module: Any = importlib.import_module(f".{name}", __package__)
    # A campaign may say a common option again, to give it a default of its own.
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.faults {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    parser.add_argument("--count", type=int, help="cases to run; by default the full number")
    parser.add_argument("--minutes", type=float, help="end after so long, even if cases are left")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (default 0)")
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
