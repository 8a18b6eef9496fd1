"""The longest hook that training meets while the disk hangs: every call of the hooks' way to the writer is timed.

The system calls of the writer hang in the kernel, held by a filter, from a step on until training is over. For each
setting a child trains for at least twice the time that the setting allows it to wait, so that what is bounded a step
and what is bounded for good both show. It must never count a step before the disk hangs: the first ones load libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import seccomp

SLACK_S = 0.25
"""What a busy machine may add to a wait: a nap of 2 ms that the scheduler makes longer."""
WARM_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    policy: str = "wait"
    wait_s_per_step: float = 1.0
    wait_s_stalled: float = 10.0
    wait_s_per_run: float = 0.0

    @property
    def bound_s(self) -> float:
        """The longest wait of one step, and so of one hook."""
        if self.policy == "drop":
            return 0.0
        bounds = [self.wait_s_per_step, self.wait_s_stalled]
        return min(bounds + [self.wait_s_per_run] * (self.wait_s_per_run > 0))

    @property
    def text(self) -> str:
        if self.policy == "drop":
            return "drop"
        per_run = f" run {self.wait_s_per_run:g}" if self.wait_s_per_run else ""
        return f"wait step {self.wait_s_per_step:g} stalled {self.wait_s_stalled:g}{per_run}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one setting came to. Times without the recorder's share are training's own."""

    longest_step_s: float
    usual_step_s: float
    """The median of the steps before the disk hung."""
    longest_hook_s: float
    longest_close_s: float
    waited_s: float
    num_steps: int
    observed: int
    written: int
    dropped: dict[str, int]

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def is_balanced(self) -> bool:
        return self.observed == self.written + self.num_dropped


SETTINGS = (
    Setting(policy="drop"),
    Setting(wait_s_per_step=0.0),
    Setting(wait_s_per_step=0.1),
    Setting(wait_s_per_step=0.5),
    Setting(),
    Setting(wait_s_per_step=3.0, wait_s_stalled=1.0),
    Setting(wait_s_per_step=0.5, wait_s_per_run=0.2),
)
CLOSE_DEADLINE_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="steps while the disk hangs (default 150)")


def main(arguments: argparse.Namespace) -> int:
    if not seccomp.is_possible():
        print("system calls can be held on x86_64 Linux only")
        return 1
    settings = SETTINGS[: arguments.count] if arguments.count else SETTINGS
    print(
        f"{'setting':<32} {'bound':>6} {'longest':>8} {'longest':>8} {'usual':>7} {'close':>6} {'waited':>7} ", end=""
    )
    print(f"{'steps':>6} {'dropped':>8} ledger")
    print(f"{'':<32} {'s':>6} {'hook s':>8} {'step s':>8} {'step s':>7} {'s':>6} {'s':>7}")
    num_findings = 0
    began_s = time.monotonic()
    for setting in settings:
        if arguments.minutes and time.monotonic() - began_s > 60 * arguments.minutes:
            break
        found = measure(setting, arguments.steps)
        problems = judge(setting, found)
        num_findings += len(problems)
        print(
            f"{setting.text:<32} {setting.bound_s:>6.2f} {found.longest_hook_s:>8.3f} {found.longest_step_s:>8.3f} "
            f"{found.usual_step_s:>7.3f} {found.longest_close_s:>6.2f} {found.waited_s:>7.2f} {found.num_steps:>6} "
            f"{found.num_dropped:>8} {'balances' if found.is_balanced else 'DOES NOT BALANCE'}",
            flush=True,
        )
        for problem in problems:
            print(f"  FOUND: {problem}")
    print(f"{num_findings} findings" if num_findings else "no step waited longer than it was allowed to")
    return int(num_findings > 0)


def judge(setting: Setting, found: Found) -> list[str]:
    problems = []
    if found.longest_hook_s > setting.bound_s + SLACK_S:
        problems.append(f"a hook took {found.longest_hook_s:.3f} s, allowed are {setting.bound_s} s")
    if found.longest_step_s > setting.bound_s + 10 * found.usual_step_s + SLACK_S:
        problems.append(f"a step took {found.longest_step_s:.3f} s, allowed to wait are {setting.bound_s} s")
    if found.longest_close_s > CLOSE_DEADLINE_S + 4 * SLACK_S:
        problems.append(f"the end took {found.longest_close_s:.3f} s, allowed are {CLOSE_DEADLINE_S} s")
    if not found.is_balanced:
        problems.append(f"observed {found.observed}, written {found.written}, dropped {found.dropped}")
    if not found.dropped.get("pool_full"):
        problems.append("nothing was dropped: the disk did not hang, or the pool was too large for this test")
    return problems


def measure(setting: Setting, num_steps: int) -> Found:
    """Train in a process of its own whose disk hangs."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {f"RECORDER_{name.upper()}": str(value) for name, value in asdict(setting).items()}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RECORDER", "_RECORDER"))}
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(num_steps)],
            env={**kept, **_CHILD, **variables, "RECORDER_DIR": folder},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=60 + num_steps * max(setting.bound_s, 0.05) + 10,
        )
    if child.returncode != 0:
        raise RuntimeError(f"{setting.text}: the training itself failed:\n{child.stderr}")
    return Found(**json.loads(child.stdout.splitlines()[-1]))


_CHILD = {
    "RECORDER": "1",
    "RECORDER_RULES": "site=output,grad_output,grad keep=tensor,stats",
    "RECORDER_POOL_BYTES": "4MiB",
    "RECORDER_MIN_FREE_BYTES": "0",
    "RECORDER_FLUSH_INTERVAL_S": "0.05",
    "RECORDER_CLOSE_DEADLINE_S": str(CLOSE_DEADLINE_S),
    "OMP_NUM_THREADS": "1",
}


def child(num_steps: int) -> dict[str, Any]:
    """The training, with a clock around each observation and each step."""
    import torch
    from torch import nn

    from recorder.capture.core import Capture
    from recorder.lifecycle import active as training_side

    hooks_s: list[float] = []
    plain = Capture.observe

    def observe(self: Capture, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        plain(self, *args, **kwargs)
        hooks_s.append(time.perf_counter() - began)

    Capture.observe = observe  # type: ignore[method-assign]
    stall = seccomp.Stall(["pwritev", "pwritev2", "fsync", "ftruncate"])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    steps_s: list[float] = []
    for step in range(WARM_STEPS + num_steps):
        if step == WARM_STEPS:
            current = training_side._current
            assert current is not None and current.flush(30)
            stall.begin()
            hooks_s.clear()
        began = time.perf_counter()
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps_s.append(time.perf_counter() - began)
    current = training_side._current
    assert current is not None and current.capture is not None
    longest_hook_s, waited_s = max(hooks_s), current.capture.pool.waited_s
    began = time.perf_counter()
    current.close()
    longest_close_s = time.perf_counter() - began
    assert current.recording is not None
    ledger = current.recording.writer.close(0).ledger
    return {
        "longest_step_s": max(steps_s[WARM_STEPS:]),
        "usual_step_s": sorted(steps_s[1:WARM_STEPS])[WARM_STEPS // 2 - 1],
        "longest_hook_s": longest_hook_s,
        "longest_close_s": longest_close_s,
        "waited_s": waited_s,
        "num_steps": num_steps,
        **{key: ledger[key] for key in ("observed", "written", "dropped")},
    }


if __name__ == "__main__":
    print(json.dumps(child(int(sys.argv[1]))))
