"""How the cost of recording grows, a decade each: tensor size, records a step, modules, ranks; and along a long run.

    python -m scripts.benchmarks curves
    python -m scripts.benchmarks curves --only size length --steps 50

A chain of modules that hand on one tensor, so that hooks and copies are all there is, in a fresh process for each point
and again without a recorder. The cost is the CPU time of the training thread and of the writer a step, the median of
the steps, beyond that without a recorder. Each curve gets a straight line, `fixed + slope x`, and how far from it
the points lie at most. `length` compares the first and the last tenth of one long run: what is recorded
already must not matter.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from scripts.benchmarks import parser_of

from .processes import clean_env, progress, run_fresh
from .stopwatch import Stopwatch


class Point(NamedTuple):
    """What one process does."""

    num_modules: int = 200
    num_recorded: int = 200
    num_values: int = 1024
    """float32 values of the tensor."""
    num_ranks: int = 1
    steps: int = 30


CURVES: dict[str, tuple[str, list[tuple[int, Point]]]] = {
    "size": ("KiB a tensor", [(kib, Point(40, 40, kib * 256)) for kib in (64, 128, 256, 384, 512, 640)]),
    "records": ("records a step", [(n, Point(2000, n)) for n in (200, 400, 800, 1200, 1600, 2000)]),
    "modules": ("modules, of which 200 are recorded", [(n, Point(n, 200)) for n in (1000, 2000, 4000, 7000, 10000)]),
    "ranks": ("ranks", [(n, Point(num_ranks=n)) for n in (1, 2, 4, 7, 10)]),
}
LENGTH = Point(steps=2000)


class Line(NamedTuple):
    """A straight line through the points of a curve."""

    fixed: float
    slope: float
    farthest: float
    """Of the points from the line, as a part of the highest point."""


def line_through(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line of least squares."""
    slope, fixed = np.polyfit(np.array(xs, float), np.array(ys, float), 1).tolist()
    distances = [abs(fixed + slope * x - y) for x, y in zip(xs, ys, strict=True)]
    return Line(fixed, slope, max(distances) / max(max(map(abs, ys)), 1e-12))


def child(arguments: Sequence[str]) -> None:
    """One process: CPU microseconds of the training thread at each step, and of the writer a step, as JSON."""
    import torch
    from torch import Tensor, nn

    import recorder

    class Pass(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    is_recorded = arguments[0] == "recorded"
    point = Point(*map(int, arguments[1:]))
    torch.set_num_threads(1)
    model = nn.Sequential(*[Pass() for _ in range(point.num_modules)])
    tensor = torch.randn(point.num_values)
    with tempfile.TemporaryDirectory(prefix="bench-curves-") as folder:
        attached = None
        if is_recorded:
            is_whole = point.num_recorded == point.num_modules
            paths = "*" if is_whole else ",".join(str(number) for number in range(point.num_recorded))
            rules = f"module={paths} leaf=yes site=output keep=tensor"
            attached = recorder.attach(
                model, enabled=True, dir=folder, rules=rules, codec="none", min_free_bytes=0, max_bytes=1 << 40
            )
        training_us = []
        watch = Stopwatch()
        for step in range(point.steps + 3):
            if step == 3:
                watch = Stopwatch()
            if attached is not None:
                recorder.step(step)
            begun_s = time.thread_time()
            with torch.no_grad():
                model(tensor)
            if step >= 3:
                training_us.append((time.thread_time() - begun_s) * 1e6)
            if attached is not None and (step + 1) % 10 == 0:
                attached.flush(60.0)
        if attached is not None:
            attached.flush(60.0)
        writer_us = watch.lap().cpu_s["writer"] * 1e6 / point.steps
        rows = dropped = 0
        if attached is not None:
            attached.close()
            run = recorder.open_run(folder)
            rows, dropped = run.num_rows, sum(writer.balance.num_dropped for writer in run.writers)
    result = {"training_us": training_us, "writer_us": writer_us, "rows": rows, "dropped": dropped, "end_s": 0.0}
    print(json.dumps(result))


def measure(point: Point, *, is_recorded: bool) -> list[dict[str, Any]]:
    """The results of all ranks of a point."""
    arguments = ["recorded" if is_recorded else "bare", *map(str, point)]
    ended = run_fresh(
        "scripts.benchmarks.curves",
        arguments,
        clean_env(OMP_NUM_THREADS="1"),
        num_ranks=point.num_ranks,
        timeout_s=1800.0,
    )
    if is_recorded:
        expected = point.num_recorded * (point.steps + 3)
        for result in ended.results:
            if result["rows"] != expected or result["dropped"]:
                sys.exit(
                    f"curves: {result['rows']} rows and {result['dropped']} drops, expected {expected} rows; {point}"
                )
    return ended.results


def cost(point: Point) -> tuple[float, float]:
    """CPU us a step of the training thread beyond no recorder, and of the writer, of a rank."""
    recorded, bare = measure(point, is_recorded=True), measure(point._replace(num_ranks=1), is_recorded=False)
    bare_us = statistics.median(bare[0]["training_us"])
    training_us = statistics.median(statistics.median(one["training_us"]) for one in recorded)
    return training_us - bare_us, statistics.median(one["writer_us"] for one in recorded)


def main(arguments: list[str]) -> int:
    names = [*CURVES, "length"]
    parser = parser_of("curves", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CURVE", help=", ".join(names))
    parser.add_argument("--steps", type=int, help="of each process, ten or more (default 30; 2,000 of the long run)")
    args = parser.parse_args(arguments)
    if args.steps is not None and args.steps < 10:
        parser.error("--steps must be 10 or more")
    for name in args.only:
        if name == "length":
            print_length(LENGTH if args.steps is None else LENGTH._replace(steps=args.steps))
        else:
            print_curve(name, args.steps)
    return 0


def print_curve(name: str, steps: int | None) -> None:
    text, points = CURVES[name]
    found: list[tuple[int, Point, float, float]] = []
    for x, point in points:
        progress(f"curves: {name}, {x} {text}")
        found.append((x, point, *cost(point if steps is None else point._replace(steps=steps))))
    print(f"\n| {text} | training us a step | a record | writer us a step | a record |\n|---|---|---|---|---|")
    for x, point, training_us, writer_us in found:
        num = point.num_recorded
        print(f"| {x} | {training_us:.0f} | {training_us / num:.2f} | {writer_us:.0f} | {writer_us / num:.2f} |")
    costs = {"training": [one[2] for one in found], "writer": [one[3] for one in found]}
    for what, of_points in costs.items():
        line = line_through([one[0] for one in found], of_points)
        print(f"- {what}: {line.fixed:.0f} us + {line.slope:.3g} us each; within {line.farthest:.0%} of the line")


def print_length(point: Point) -> None:
    progress(f"curves: length, {point.steps} steps")
    (result,) = measure(point, is_recorded=True)
    times, tenth = result["training_us"], max(1, point.steps // 10)
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    print(
        f"\nlength: {point.steps} steps of {point.num_recorded} records; training thread {first:.0f} us a step in the "
        f"first tenth, {last:.0f} us in the last: {last / first:.2f} times"
    )


if __name__ == "__main__":
    child(sys.argv[1:])
