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
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import utils as dynamo
from torch.utils._pytree import tree_flatten_with_path

import recorder
from recorder.errors import RecorderError
from tests.rigs.capturing import flagged

from .trainings import LOOPS, MODELS, TRANSFORMS, Training, state_of

RULES = "site=* keep=tensor"
SEED = 7
ALL_MODELS = tuple(MODELS)


class Combination(NamedTuple):
    model: str
    loop: str
    transform: str

    @property
    def name(self) -> str:
        return f"{self.model} / {self.transform} / {self.loop}"


def product() -> list[Combination]:
    """Twins that share the training that is not recorded come one after the other."""
    return [Combination(*names) for names in itertools.product(MODELS, LOOPS, TRANSFORMS)]


class Refusal(NamedTuple):
    """What torch cannot train, with the recorder and without."""

    models: tuple[str, ...]
    transforms: tuple[str, ...]
    loop: str
    text: str
    """Of torch's error, which has to come; a regular expression."""
    only_with_taps: bool = False
    """Without them there is no graph, so that nothing is refused."""


_AOT = ("compile aot_eager", "compile inductor", "tap aot_eager", "instrument aot_eager")
_IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"
_OTHERS = tuple(name for name in ALL_MODELS if name not in ("lstm", "tied"))
_ONCE = "aot_autograd does not currently support double backward"
REFUSALS = (
    Refusal(ALL_MODELS, ("checkpoint reentrant",), "double backward", "appears to not have been used in the graph"),
    Refusal(_OTHERS, ("compile inductor",), "double backward", f"{_ONCE}|compiled with non-empty donated buffers"),
    Refusal(("tied",), _AOT, "double backward", _IN_PLACE),
    Refusal(("lstm",), ("tap aot_eager", "instrument aot_eager"), "double backward", _IN_PLACE, only_with_taps=True),
    Refusal(_OTHERS, _AOT, "double backward", _ONCE),
)


class Graphs(NamedTuple):
    graphs: int
    breaks: int
    frames: int
    """It looked at, of functions that are not the recorder's."""
    recompiles: int

    def __add__(self, other: tuple[int, ...]) -> Graphs:  # type: ignore[override]
        return Graphs(*(one + another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Trained:
    seen: dict[str, Tensor]
    other: dict[str, object]
    graphs: Graphs
    refusal: str
    """Torch's, where it cannot train this."""


@dataclass(frozen=True)
class Result:
    combination: Combination
    problems: list[str]
    """What differs, or was not recorded."""
    num_compared: int
    """Tensors."""
    num_rows: int
    """Recorded ones."""
    without: Graphs
    recorded: Graphs
    refusal: Refusal | None


class Rig:
    """Trains pairs; a training that several recorded ones are compared with is done once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._latest: dict[Combination, Trained] = {}

    def compare(self, combination: Combination) -> Result:
        without = self._train_without(combination)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            recorded, num_rows, problems = train_recorded(combination, Path(folder))
        transform = TRANSFORMS[combination.transform]
        problems = differences(without, recorded, with_graphs=not transform.has_taps) + problems
        expected = _refusal_of(combination)
        if expected is not None and expected.only_with_taps and not without.refusal:
            problems = []
        else:
            problems += _unexpected("without", without.refusal, expected)
        problems += _unexpected("recorded", recorded.refusal, expected)
        refusal = expected if recorded.refusal else None
        return Result(combination, problems, len(without.seen), num_rows, without.graphs, recorded.graphs, refusal)

    def _train_without(self, combination: Combination) -> Trained:
        twin = combination._replace(transform=TRANSFORMS[combination.transform].without or combination.transform)
        if twin not in self._latest:
            if any((old.model, old.loop) != (twin.model, twin.loop) for old in self._latest):
                self._latest.clear()
            self._latest[twin] = train(twin, is_recorded=False)
        return self._latest[twin]


def train(combination: Combination, *, is_recorded: bool) -> Trained:
    """Train from a fixed state of every generator to the end."""
    torch.compiler.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()
    gc.collect()  # optimizers of earlier trainings
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    training = Training(combination.model, TRANSFORMS[combination.transform], is_recorded=is_recorded)
    refusal = ""
    try:
        LOOPS[combination.loop](training)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    seen = dict(training.seen)
    seen |= {name: value.detach().clone() for name, value in state_of(training.model).items()}
    other: dict[str, object] = {}
    for i, optimizer in enumerate(training.optimizers):
        for path, value in tree_flatten_with_path(optimizer.state_dict())[0]:
            where = "".join(map(str, path))
            if isinstance(value, Tensor):
                seen[f"optimizer {i} {where}"] = value.clone()
            else:
                other[f"optimizer {i} {where}"] = value
    seen["rng torch"] = torch.get_rng_state()
    other["rng numpy"] = pickle.dumps(np.random.get_state())
    other["rng python"] = random.getstate()
    if training.scaler is not None:
        other["scaler"] = training.scaler.state_dict()
    return Trained(seen, other, graphs_so_far(), refusal)


def graphs_so_far() -> Graphs:
    """Return what dynamo has made since its metrics were cleared."""
    package = str(Path(recorder.__file__).parent)
    # An entry without a name is no frame: inductor has compiled the backward, as that ran for the first time. There is
    # none where inductor's cache on the disk has the graph, so only the first training of the two may have one.
    frames = [one for one in dynamo.get_compilation_metrics() if one.co_name is not None]
    metrics = [one for one in frames if not str(one.co_filename).startswith(package)]
    return Graphs(
        graphs=dynamo.counters["stats"]["unique_graphs"],
        breaks=sum(dynamo.counters["graph_break"].values()),
        frames=len(metrics),
        recompiles=sum(bool(metric.recompile_reason) for metric in metrics),
    )


def train_recorded(combination: Combination, folder: Path) -> tuple[Trained, int, list[str]]:
    """The training as the flag records it, the number of rows, and what is wrong with the recording."""
    with flagged(folder, RULES, pool_bytes=1 << 26, **TRANSFORMS[combination.transform].settings) as recording:
        trained = train(combination, is_recorded=True)
    if trained.refusal:
        return trained, 0, []
    problems: list[str] = []
    try:
        (writer,) = recording.run.writers
    except RecorderError as error:
        return trained, 0, [f"recording: {error}"]
    balance = writer.balance
    if balance.dropped or balance.num_missing or not 0 < balance.written == balance.observed:
        problems.append(f"recording: {balance}")
    if TRANSFORMS[combination.transform].has_taps:
        rows = recording.run.to_pandas(columns=["site", "module_path"])
        if {"output", "grad_output"} - set(rows.site[~rows.module_path.isin(["", "inner"])]):
            problems.append("recording: the taps in the graph showed no outputs or no gradients")
    return trained, int(balance.written), problems


def differences(without: Trained, recorded: Trained, *, with_graphs: bool) -> list[str]:
    found = [f"only one has {key!r}" for key in sorted(without.seen.keys() ^ recorded.seen.keys())]
    both = (key for key in without.seen if key in recorded.seen)
    found += [key for key in both if not _is_same(without.seen[key], recorded.seen[key])]
    found += [key for key in without.other if without.other[key] != recorded.other.get(key)]
    if with_graphs and without.graphs != recorded.graphs:
        found.append(f"without: {without.graphs}; recorded: {recorded.graphs}")
    return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal bits, NaNs included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
    )


def _unexpected(who: str, refusal: str, expected: Refusal | None) -> list[str]:
    if expected is None:
        return [f"{who}: {refusal}"] if refusal else []
    return [] if re.search(expected.text, refusal) else [f"{who}: {refusal or 'trained'}; expected {expected.text!r}"]


def _refusal_of(combination: Combination) -> Refusal | None:
    for refusal in REFUSALS:
        if (
            combination.model in refusal.models
            and combination.transform in refusal.transforms
            and combination.loop == refusal.loop
        ):
            return refusal
    return None


def prepare() -> None:
    """Once in each process, before many combinations."""
    torch.set_num_threads(1)
    logging.getLogger("recorder").setLevel(logging.ERROR)
    torch.compile(torch.sin)(torch.ones(2))  # torch loads its compiler, 400,000 objects that need no looking at
    gc.collect()
    gc.freeze()


def run(group: list[Combination]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="twins-") as folder:
        rig = Rig(Path(folder))
        return [rig.compare(combination) for combination in group]


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
