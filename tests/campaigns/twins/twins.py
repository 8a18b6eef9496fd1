"""Print the evidence that training is not changed, in one process: models x transforms x optimizers.

    python -m tests.campaigns twins                               # everything, a quarter of an hour on one core
    python -m tests.campaigns twins --filter lstm --filter tap    # the combinations whose name has all of these texts
    python -m tests.campaigns twins --jobs 2                      # in two processes

Each combination trains twice from the same state, the second time with RECORDER=1, every value selected. Outputs,
losses, parameters, gradients, buffers, states of optimizers and of the random generators have to be equal to the last
bit, and the graphs that dynamo makes as many, but where taps are in them; a recording has to be whole. What torch
itself refuses must be refused alike. Of a compiled graph with taps inductor fuses less, and rounds otherwise: it is
run untapped alone. The exit code is 1 if anything is not as it has to be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby

from .models import MODELS
from .transforms import TRANSFORMS
from .twin import Combination, Graphs, Refusal, Result, prepare, product, run

_ROW = "{:<22}" + " {:>11}" * len(MODELS) + "   {:<20}"


def results(groups: list[list[Combination]], num_jobs: int) -> Iterator[list[Result]]:
    if num_jobs == 1:
        prepare()
        yield from map(run, groups)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=prepare) as pool:
        for future in as_completed([pool.submit(run, group) for group in groups]):
            yield future.result()


def table(found: list[Result]) -> Iterator[str]:
    """Transform by model: optimizers of which all is equal, of how many; then what was refused, and the graphs."""
    yield _ROW.format("equal, of optimizers", *MODELS, "graphs, recompiles")
    for transform in TRANSFORMS:
        row = [result for result in found if result.combination.transform == transform]
        if not row:
            continue
        cells = []
        for model in MODELS:
            here = [result for result in row if result.combination.model == model]
            num_refused = sum(result.refusal is not None for result in here)
            num_equal = sum(not result.problems and result.refusal is None for result in here)
            refused = f" ({num_refused} ref.)" if num_refused else ""
            cells.append(f"{num_equal}/{len(here) - num_refused}{refused}" if here else "-")
        yield _ROW.format(transform, *cells, _counts(row)).rstrip()
    refusals: dict[Refusal, set[str]] = {}
    for result in found:
        if result.refusal is not None:
            refusals.setdefault(result.refusal, set()).add(result.combination.model)
    for refusal, names in refusals.items():
        alike = "once taps have made graphs" if refusal.only_with_taps else "with the recorder and without"
        where = f"{refusal.loop}; {', '.join(refusal.transforms)}; {', '.join(sorted(names))}"
        yield f"ref.: {where}: torch refuses, {alike}: {refusal.text!r}"
    num_compared = sum(result.num_compared for result in found)
    yield f"{num_compared:,} tensors compared, {sum(result.num_rows for result in found):,} rows recorded"


def _counts(row: list[Result]) -> str:
    """Dynamo's counts, without the recorder and with it where they differ."""
    without, recorded = Graphs(0, 0, 0, 0), Graphs(0, 0, 0, 0)
    for result in row:
        without, recorded = without + result.without, recorded + result.recorded
    texts = [f"{graphs.graphs}, {graphs.recompiles}" for graphs in (without, recorded)]
    return "none" if not any(without + recorded) else texts[0] if without == recorded else " -> ".join(texts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", action="append", default=[], help="part of 'model / transform / optimizer'")
    parser.add_argument("--jobs", type=int, default=1, help="processes")


def main(options: argparse.Namespace) -> int:
    chosen = [one for one in product() if all(text in one.name for text in options.filter)]
    if not chosen or options.jobs < 1:
        print(
            "no combination has all of these texts in its name" if not chosen else "--jobs: 1 or more", file=sys.stderr
        )
        return 2
    for name in [name for name in os.environ if name.startswith(("RECORDER", "_RECORDER"))]:
        del os.environ[name]
    began_s, found = time.monotonic(), list[Result]()
    groups = [list(group) for _, group in groupby(chosen, lambda one: (one.model, one.loop))]
    for group in results(groups, options.jobs):
        found += group
        problems = [(result.combination.name, problem) for result in group for problem in result.problems]
        model, loop, _ = group[0].combination
        passed_s = time.monotonic() - began_s
        said = "DIFFERENT" if problems else "equal"
        print(f"{passed_s:6.0f} s  {len(found):4}/{len(chosen)}  {model} / {loop}: {said}", flush=True)
        for name, problem in problems:
            print(f"    {name}: {problem}", flush=True)
    print()
    for line in table(found):
        print(line)
    return 1 if any(result.problems for result in found) else 0
