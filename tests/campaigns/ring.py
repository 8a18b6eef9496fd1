"""The ring and its triggers, again and again, on two ranks of gloo: are the steps around a fault there, on all of them?

    python -m tests.campaigns ring                            # all parts
    python -m tests.campaigns ring --only nan --count 100
    python -m tests.campaigns ring --only kill,disks --seed 7

nan      a NaN on rank 1 at a random step: the steps t-4 to t+2 of both ranks are there, equal to a second run that
         recorded everything, and training is bit-equal to a third without a recorder
moments  a trigger in the first step, in the last, in an evaluation, on two ranks at once, as the recording closes, as
         an exception leaves the training
kill     SIGKILL at a random instant of a dump: what is on the disk is whole rows, each equal to the full run's
peers    under torchrun, SIGKILL of one rank: the others write their ring when the launcher ends them, or as the
         collective fails in which they are
disks    a dump while the disk is full, slow or gone: training is bit-equal, and every row is accounted for
memory   thousands of steps with a ring and a trigger now and then: memory does not grow
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import recorder
from recorder.lifecycle import active
from recorder.upkeep.verify import verify
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

WHAT = "site=output,grad_output,grad,input"
RING = f"{WHAT} keep=ring; site=scalar keep=stats"
FULL = f"{WHAT} keep=tensor,stats; site=scalar keep=stats"
STEPS = 30
BEFORE, AFTER = 4, 2
_A_LAUNCH = 10
"""Cases that one launch of two ranks trains."""
_SETTINGS = {"rules": RING, "triggers": "nonfinite,exception"}
_KEY = ("rank", "step", "module_path", "site", "name", "call", "micro_step", "mode", "repeat", "scope")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count", type=int, default=100, help="trainings with a NaN (default 100); others in proportion"
    )
    parser.add_argument("--steps", type=int, default=5000, help="of the part `memory` (default 5000)")
    parser.add_argument(
        "--hold", type=float, default=60.0, help="ring_hold_s of the part `nan`, in seconds (default 60)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (default 0)")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, with commas between")


def main(arguments: argparse.Namespace) -> int:
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        raise SystemExit(f"--only {arguments.only}: {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    num_wrong = 0
    for name in wanted:
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"ring-{name}-", ignore_cleanup_errors=True) as folder:
            problems = list(PARTS[name](Path(folder), arguments))
        for problem in problems:
            print(f"{name}: WRONG: {problem}", flush=True)
        num_wrong += len(problems)
        print(f"{name}: {len(problems)} wrong, {time.monotonic() - begun_s:.0f} s", flush=True)
    return int(num_wrong > 0)


def train(folder: Path, cases: list[dict[str, Any]], *, num: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = jobs.ranks(folder, SCRIPTS / "boxed.py", folder / "cases.json", num=num).wait(600.0)
    if finished.returncode:
        raise SystemExit(f"a training failed:\n{finished.output}")


def values(run: recorder.Run, first: int = 0, last: int = STEPS) -> dict[tuple[str, ...], bytes]:
    """The bytes of every tensor of these steps, by rank and key."""
    found = {}
    frame = run.to_pandas()
    for row in frame[frame.payload_bytes.notna() & (frame.site != "scalar")].to_dict("records"):
        if first <= row["step"] <= last:
            key = {name: row[name] for name in ("site", "step", "rank", "name", "call", "mode")}
            found[tuple(str(row[name]) for name in _KEY)] = run.array(row["module_path"], **key).tobytes()
    return found


def changed(folder: Path, other: Path) -> Iterator[str]:
    """The differences between the trainings of two cases."""
    for path in sorted(other.glob("rank*.pt")):
        one, two = torch.load(folder / path.name), torch.load(path)
        for name, value in one["parameters"].items():
            if not torch.equal(value.view(torch.int32), two["parameters"][name].view(torch.int32)):
                yield f"{path.stem}: parameter {name} differs"
        if not torch.equal(one["losses"].view(torch.int32), two["losses"].view(torch.int32)):
            yield f"{path.stem}: losses differ"
        if not torch.equal(one["rng"], two["rng"]):
            yield f"{path.stem}: the random state differs"


def unbalanced(run: recorder.Run) -> Iterator[str]:
    for writer in run.writers:
        balance = writer.balance
        if writer.state != "closed" or balance.num_missing:
            yield f"rank {writer.rank} is {writer.state}, and {balance.num_missing} rows are in no account"


def _nan(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    chance = random.Random(arguments.seed)
    # The last step is judged as a recording closes, when the other rank may have closed its own.
    steps = [chance.randrange(STEPS - 1) for _ in range(arguments.count)]
    num_values = 0
    held = {**_SETTINGS, "ring_hold_s": arguments.hold}
    for begin in range(0, len(steps), _A_LAUNCH):
        batch = range(begin, min(begin + _A_LAUNCH, len(steps)))
        cases: list[dict[str, Any]] = []
        for number in batch:
            common = {"steps": STEPS, "seed": arguments.seed * 1000 + number, "events": [[steps[number], 1, "nan"]]}
            here, first = folder / str(number), max(steps[number] - BEFORE, 0)
            cases += [
                {**common, "folder": str(here / "ring"), "settings": held, "first_step": first},
                {**common, "folder": str(here / "full"), "settings": {"rules": FULL}, "waits": False},
                {**common, "folder": str(here / "off"), "settings": _SETTINGS, "recorded": False, "waits": False},
            ]
        train(folder, cases)
        for number in batch:
            here, step = folder / str(number), steps[number]
            boxed, full = (recorder.open_run(here / name / "recordings") for name in ("ring", "full"))
            expected = values(full, step - BEFORE, step + AFTER)
            found = values(boxed, step - BEFORE, step + AFTER)
            num_values += len(found)
            lacking = [key for key in expected if key not in found]
            wrong = [key for key in found if found[key] != expected.get(key)]
            if lacking or wrong or not expected:
                of = f"of {len(expected)} values {len(lacking)} lack, {len(wrong)} are wrong"
                dumps = ", ".join(f"{dump.first_step} to {dump.last_step} on {dump.ranks}" for dump in boxed.dumps)
                dropped = {reason: num for writer in boxed.writers for reason, num in writer.balance.dropped.items()}
                yield f"case {number}, step {step}: {of}; dumps: {dumps or 'none'}; dropped: {dropped or 'nothing'}"
            problems = [*changed(here / "ring", here / "off"), *unbalanced(boxed)]
            yield from (f"case {number}: {problem}" for problem in problems)
            shutil.rmtree(here)
        print(f"nan: {batch.stop} of {len(steps)} trainings, {num_values:,} values compared", flush=True)


def _moments(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    chance = random.Random(arguments.seed + 1)
    for round_number in range(max(1, arguments.count // 10)):
        middle, own = chance.randrange(8, STEPS - 5), {"trigger_cooldown_s": 0, **_SETTINGS}
        events: dict[str, dict[str, Any]] = {
            "first": {"events": [[0, chance.randrange(2), "trigger"]]},
            "last": {"events": [[STEPS - 1, chance.randrange(2), "trigger"]]},
            "evaluation": {"events": [[middle, 0, "evaluation"], [middle, 1, "evaluation"]]},
            "two": {"events": [[middle, 0, "trigger"], [middle, 1, "trigger"]]},
            "error": {"events": [[middle, chance.randrange(2), "error"]]},
            "close": {"events": [], "trigger_at_close": True, "dumps": 0},
        }
        seed = arguments.seed * 1000 + round_number
        here = folder / str(round_number)
        cases = [
            {"steps": STEPS, "seed": seed, "settings": own, **case, "folder": str(here / name)}
            for name, case in events.items()
        ]
        train(here, cases)
        for name in events:
            run = recorder.open_run(here / name / "recordings")
            yield from (f"{name}: {problem}" for problem in unbalanced(run))
            lived = middle - 1 if name == "error" else STEPS - 1  # it fails before the forward of its step
            frame = run.to_pandas()
            there = {rank: set(steps) for rank, steps in frame[frame.site == "output"].groupby("rank").step}
            if not run.dumps:
                yield f"{name}: nothing was triggered"
            for dump in run.dumps:
                # Who asks as the recording closes may find the others gone; they are named.
                ranks = dump.ranks if name == "close" else (0, 1)
                wanted = set(range(dump.first_step, min(dump.last_step, lived) + 1))
                lacking = {rank: wanted - there.get(rank, set()) for rank in ranks}
                if any(lacking.values()):
                    yield f"{name}: steps {dump.first_step} to {dump.last_step}: {lacking} lack"
        shutil.rmtree(here)


def _kill(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    chance = random.Random(arguments.seed + 2)
    common = {"steps": 250, "seed": 5, "nap_s": 0.002, "width": 64}
    settings = {**_SETTINGS, "flush_interval_s": 0.01}
    train(folder / "full", [{**common, "folder": str(folder / "full"), "settings": {"rules": FULL}, "events": [],
                             "nap_s": 0.0, "waits": False}], num=1)  # fmt: skip
    expected = values(recorder.open_run(folder / "full" / "recordings"), 50, 70)
    num_rows = []
    for number in range(max(1, arguments.count // 4)):
        here = folder / str(number)
        here.mkdir()
        kill = [60, 0, f"kill {chance.uniform(0.0, 0.5):.4f}"]
        case = {**common, "folder": str(here), "settings": settings, "events": [kill], "waits": False}
        (here / "cases.json").write_text(json.dumps([case]))
        jobs.ranks(here, SCRIPTS / "boxed.py", here / "cases.json", num=1).wait(120.0)
        run = recorder.open_run(here / "recordings")
        found = values(run, 0, 400)  # of a dump around step 59, and of no other step
        num_rows.append(len(found))
        wrong = [key for key in found if found[key] != expected.get(key)]
        if wrong:
            yield f"kill {number}: {len(wrong)} of {len(found)} values are wrong"
        damage = [finding.text for finding in verify(run) if finding.is_fault]
        yield from (f"kill {number}: {text}" for text in damage)
        shutil.rmtree(here)
    print(f"kill: {len(num_rows)} kills left {min(num_rows)} to {max(num_rows)} values of a dump each", flush=True)


def _peers(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    chance = random.Random(arguments.seed + 3)
    reasons: Counter[str] = Counter()
    for number in range(max(1, arguments.count // 20)):
        here, step, dead = folder / str(number), chance.randrange(8, STEPS - 5), chance.randrange(4)
        is_apart = bool(number % 2)
        events: list[list[Any]] = [[step, dead, "die"]]
        if number % 3:  # the others wait for something else than the dead rank
            events += [[step, rank, "survive"] for rank in range(4) if rank != dead]
        settings = {**_SETTINGS, "triggers": "signal,exception", "close_deadline_s": 15}
        case = {"steps": STEPS, "seed": number, "settings": settings, "events": events, "folder": str(here)}
        here.mkdir()
        (here / "cases.json").write_text(json.dumps([{**case, "waits": False, "apart": is_apart}]))
        options = ("--standalone", "--nproc-per-node=4")
        finished = jobs.torchrun(here, SCRIPTS / "boxed.py", here / "cases.json", options=options).wait(180.0)
        if not finished.returncode:
            yield f"peers {number}: the launch came to a good end"
        where = [here / f"node{rank}" for rank in range(4)] if is_apart else [here]
        runs = [recorder.open_run(place / "recordings") for place in where]
        for run in runs:
            frame = run.to_pandas(columns=["rank", "step", "site"])
            for writer in (writer for writer in run.writers if writer.rank != dead):
                who = f"peers {number}: rank {writer.rank}"
                mine = frame[(frame["rank"] == writer.rank) & (frame.site == "output")]
                reasons.update({dump.reason.partition(":")[0] for dump in writer.manifest.dumps})
                if not set(range(step - BEFORE, step)) <= set(mine.step):
                    yield f"{who} has steps {sorted(set(mine.step))}, and {step} was fatal"
                if writer.state != "closed" or writer.balance.num_missing:
                    yield f"{who} is {writer.state}, {writer.balance.num_missing} rows lack"
        shutil.rmtree(here)
    print(
        f"peers: the survivors wrote for {', '.join(f'{reason} ({num})' for reason, num in reasons.items())}",
        flush=True,
    )


def _disks(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    events: dict[str, list[list[Any]]] = {
        "full": [[8, 0, "full"], [9, 0, "trigger"]],
        "full for a while": [[8, 0, "full"], [9, 0, "trigger"], [20, 0, "healthy"]],
        "slow": [[8, 0, "slow"], [9, 0, "trigger"]],
        "gone": [[8, 0, "gone"], [9, 0, "trigger"]],
    }
    for number in range(max(1, arguments.count // 20)):
        common = {"steps": STEPS, "seed": arguments.seed + number, "dumps": 0}
        for name, some in events.items():
            here = folder / f"{number} {name}"
            off = {**common, "folder": str(here / "off"), "settings": _SETTINGS, "events": [], "recorded": False}
            on = {
                **common,
                "folder": str(here / "on"),
                "settings": {**_SETTINGS, "flush_interval_s": 0.01},
                "disk": True,
            }
            train(here, [off, {**on, "events": some, "nap_s": 0.02}])
            yield from (f"{name}: {problem}" for problem in changed(here / "on", here / "off"))
            if name != "gone":
                run = recorder.open_run(here / "on" / "recordings")
                yield from (f"{name}: {problem}" for problem in unbalanced(run))
                reasons = {reason for writer in run.writers for reason in writer.balance.dropped}
                if name == "slow" and reasons:
                    yield f"{name}: rows were dropped for {reasons}"
                if name == "full" and reasons != {"disk_full"}:
                    yield f"{name}: rows were dropped for {reasons or 'nothing'}"
            shutil.rmtree(here)


def _memory(folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """Train in this process and look at its memory; the ring has wrapped around long before the first look."""
    settings: dict[str, Any] = {
        **_SETTINGS,
        "dir": str(folder),
        "ring_hold_s": 0.5,
        "trigger_cooldown_s": 0,
        "min_free_bytes": 0,
    }
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(8, 64)
    looks = []
    with recorder.attach(model, enabled=True, **settings):
        for step in range(arguments.steps):
            if step % 500 == 499:
                recorder.trigger("now and then")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 500 == 0 and step >= arguments.steps // 5:
                looks.append((_resident_bytes(), _touched_bytes()))
    # A page of the pool becomes resident when a step is faster, or the writer slower, than ever before.
    others = [resident - touched for resident, touched in looks]
    grown = others[-1] - others[0]
    for what, sizes in (("resident", [look[0] for look in looks]), ("of these outside of the pool", others)):
        print(f"memory: MB {what}, every 500 steps: {', '.join(f'{one / 1e6:.1f}' for one in sizes)}", flush=True)
    if grown > 16e6:  # what passes in these steps is hundreds of megabytes
        yield f"memory grew by {grown / 1e6:.1f} MB over {arguments.steps} steps"


def _touched_bytes() -> int:
    """The largest part of the pool that records have used."""
    current = active._current
    return sum(pool.peak_bytes for pool in current.capture.memory.pools) if current and current.capture else 0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


PARTS = {"nan": _nan, "moments": _moments, "kill": _kill, "peers": _peers, "disks": _disks, "memory": _memory}
