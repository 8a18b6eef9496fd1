"""What recording costs once it is under way: in one process, blocks of steps with it and without it, in turn.

    python -m scripts.benchmarks blocks --settings spare
    python -m scripts.benchmarks blocks --settings busy --only 'recorder, statistics'

Fresh processes differ by how they begin and by where their memory lies, which is 1 to 3 % of a step on a machine that
others share. Here nothing differs but what the rules select at a step. A ratio is of the median steps of two
neighbouring blocks; the first step of a block, at which hooks are put on or taken off, is not counted. The recorder is
there in both: what that costs, `python -m scripts.benchmarks overhead` says. Where nothing is selected at all the
ratio is noise. Hooks that copy and drop, the least that recording tensors can cost, are in the same table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks import parser_of

from .processes import clean_env, progress, run_fresh
from .stopwatch import THREADS, Stopwatch
from .ways import POOL, SETTINGS, WAYS, Setting

WARMUP = 8
IDLE = "recorder, nothing at these steps"
MEASURED = [POOL, *(name for name, way in WAYS.items() if way.group == "ours")]


def is_recorded(block: int) -> bool:
    """Two rounds are four blocks: with, without, without, with."""
    return block % 4 in (0, 3)


def schedule(num_rounds: int, size: int) -> str:
    """The steps of the warm-up and of the recorded blocks, as rules take them."""
    begins = [WARMUP + block * size for block in range(2 * num_rounds) if is_recorded(block)]
    return ",".join([f"0:{WARMUP}", *(f"{begin}:{begin + size}" for begin in begins)])


def child(workload: str, num_rounds: int, size: int, copies: bool) -> None:
    """The one process: prints for each round its two blocks, the recorded one first.

    Where `copies` is True, hooks copy and drop at the steps that a recorder would record.
    """
    from . import recorders, workloads

    work = workloads.make(workload)
    pool = recorders.Pool()
    is_on = True
    if copies:
        recorders.attach(work.model, work.optimizer, lambda name, tensor: pool.see(name, tensor) if is_on else None)

    def train(num_steps: int) -> list[float]:
        seconds = []
        for _ in range(num_steps):
            inputs, targets = next(work.batches)
            began_s = time.perf_counter()
            work.train_step(work.model, work.optimizer, inputs, targets)
            pool.end_step(0)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    train(WARMUP)
    blocks: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for block in range(2 * num_rounds):
        is_on = is_recorded(block)
        train(1)
        watch = Stopwatch()
        step_s = statistics.median(train(size - 1))
        cpu_s = {name: spent / (size - 1) for name, spent in watch.lap().cpu_s.items()}
        blocks[is_recorded(block)].append({"step_s": step_s, "cpu_s": cpu_s})
    print(json.dumps({"rounds": list(zip(blocks[True], blocks[False], strict=True)), "end_s": time.time()}))


def measure(name: str, setting: Setting, args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The rounds of one way of recording, which must have dropped nothing."""
    env = dict(WAYS[name].env)
    if name not in (IDLE, POOL):
        steps = schedule(args.rounds, args.steps)
        env["RECORDER_RULES"] = "; ".join(f"{rule.strip()} steps={steps}" for rule in env["RECORDER_RULES"].split(";"))
    workload, num_threads, *_ = setting
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-blocks-", ignore_cleanup_errors=True) as folder:
        env |= {"RECORDER_DIR": folder, "RECORDER_MAX_BYTES": "1TB", "OMP_NUM_THREADS": str(num_threads)}
        sizes = [workload, str(args.rounds), str(args.steps), str(int(name == POOL))]
        (result,) = run_fresh("scripts.benchmarks.blocks", sizes, clean_env(**env), timeout_s=3600.0).results
        ledgers = [json.loads(path.read_text())["ledger"] for path in Path(folder).rglob("_writer.json")]
    if name not in (IDLE, POOL) and not sum(ledger["written"] + ledger.get("passed", 0) for ledger in ledgers):
        sys.exit(f"{name}: nothing was recorded")
    if any(ledger["dropped"] for ledger in ledgers):
        sys.exit(f"{name}: dropped {[ledger['dropped'] for ledger in ledgers]}; drops do not count as speed")
    rounds: list[list[dict[str, Any]]] = result["rounds"]
    return rounds


def line(name: str, rounds: list[list[dict[str, Any]]]) -> str:
    """A row of the table."""
    ratios = [on["step_s"] / off["step_s"] for on, off in rounds]
    low, _, high = statistics.quantiles(ratios, n=4)
    beyond = {one: statistics.median(on["cpu_s"][one] - off["cpu_s"][one] for on, off in rounds) for one in THREADS}
    cpu = " | ".join(f"{1e3 * beyond[one]:+.0f}" for one in THREADS)
    return f"| {name} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {cpu} |"


def main(arguments: list[str]) -> int:
    parser = parser_of("blocks", __doc__)
    parser.add_argument("--settings", choices=("busy", "spare"), default="spare", help="default: spare")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of blocks (default 15)")
    parser.add_argument(
        "--steps", type=int, default=5, help="of a block, of which the first does not count (default 5)"
    )
    parser.add_argument("--only", action="append", choices=MEASURED, metavar="NAME", help=f"of {', '.join(MEASURED)}")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    args = parser.parse_args(arguments)
    if args.rounds < 2 or args.steps < 2 or not args.dir.is_dir():
        parser.error("--rounds and --steps must be 2 or more, and --dir a directory")
    print(f"{SETTINGS[args.settings].text}; {args.rounds} rounds of 2 blocks of {args.steps} steps\n")
    print("| | step time, ratio | quartiles | CPU ms a step, beyond: training | writer | others |")
    print("|---|---|---|---|---|---|")
    found = {}
    for name in args.only or MEASURED:
        progress(f"blocks, {args.settings}: {name}")
        found[name] = measure(name, SETTINGS[args.settings], args)
        print(line(name, found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "settings": args.settings, "found": found}) + "\n")
    return 0


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
