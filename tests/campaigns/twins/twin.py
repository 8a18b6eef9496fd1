"""The same training with the recorder and without, in this process, compared to the last bit."""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
import random
import re
import tempfile
from dataclasses import dataclass
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

from . import models
from .loops import LOOPS, Training
from .transforms import TRANSFORMS

RULES = "site=* keep=tensor"
SEED = 7
ALL_MODELS = tuple(models.MODELS)


class Combination(NamedTuple):
    model: str
    loop: str
    transform: str

    @property
    def name(self) -> str:
        return f"{self.model} / {self.transform} / {self.loop}"


def product() -> list[Combination]:
    """Twins that share the training that is not recorded come one after the other."""
    return [Combination(*names) for names in itertools.product(models.MODELS, LOOPS, TRANSFORMS)]


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
    seen |= {name: value.detach().clone() for name, value in models.state_of(training.model).items()}
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
