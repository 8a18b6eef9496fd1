"""The jobs of the proof: layouts, world sizes, ways to train; each is a recorded run and its reference."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import recorder
from recorder.globalview.view import GlobalRows
from tests.rigs import jobs

from .programs import train
from .reference import Key

SCRIPT = Path(__file__).parent / "programs" / "train.py"
REPOSITORY = Path(__file__).parents[3]
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": ("--layout=ddp",),
    "fsdp1": ("--layout=fsdp1",),
    "fsdp1 flat": ("--layout=fsdp1-flat",),
    "fsdp2": ("--layout=fsdp2",),
    "fsdp2 no reshard": ("--layout=fsdp2", "--keep-unsharded"),
    "fsdp2 Shard(1)": ("--layout=fsdp2", "--columns"),
    "fsdp2 bf16": ("--layout=fsdp2", "--mixed"),
    "hsdp": ("--layout=hsdp",),
    "hsdp Shard(1)": ("--layout=hsdp", "--columns"),
    "hsdp fsdp1": ("--layout=hsdp1",),
}
WAYS: dict[str, tuple[str, ...]] = {
    "": (),
    "accumulate": ("--accumulate",),
    "checkpoint": ("--checkpoint",),
    "ragged": ("--ragged",),
    "square": ("--square",),
    "dead": ("--dead",),
    "nan": ("--nan-from=1",),
}
BLANK_WAYS = ("dead", "nan")
"""In which values are equal on all ranks though they are of the batch: constants, a bias again and again, NaN."""
SPARSE = "steps=::2 site=* keep=tensor,stats,fingerprint; site=* keep=stats"
"""Rules that keep tensors at every other step, and statistics alone at the others."""


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: str
    world_size: int
    way: str = ""
    steps: int = 3

    def __str__(self) -> str:
        return " ".join(filter(None, (self.layout, f"x{self.world_size}", self.way)))

    @property
    def arguments(self) -> list[str]:
        return [*LAYOUTS[self.layout], *WAYS[self.way], f"--steps={self.steps}"]

    @property
    def options(self) -> argparse.Namespace:
        return train.arguments(self.arguments)

    def start(self, folder: Path) -> Started:
        size = str(self.world_size)
        options = ("--standalone", "--nproc-per-node", size)
        asked: list[str | Path] = [folder / "reference.pt", "--world-size", size, "--", *self.arguments]
        settings = {"PYTHONPATH": str(REPOSITORY)}
        rules = SPARSE if self.way in BLANK_WAYS else jobs.EVERYTHING
        return Started(
            job=jobs.torchrun(folder, SCRIPT, *self.arguments, options=options, **jobs.recording(rules)),
            reference=jobs.python(folder / "one", "-m", "tests.campaigns.roundtrip.reference", *asked, **settings),
            case=self,
        )


def matrix() -> list[Case]:
    """Every layout on 2 and on 4 ranks in every way; a 2-D mesh needs 4."""
    return [
        Case(layout=layout, world_size=world_size, way=way)
        for layout in LAYOUTS
        for world_size in (2, 4)
        for way in WAYS
        if way != "square"  # not to be told from shapes; a test of its own says what becomes of it
        if way not in BLANK_WAYS
        if world_size == 4 or not layout.startswith("hsdp")
    ]


def blank() -> list[Case]:
    """Layouts in ways in which values do not show their layout, with tensors at some steps only."""
    layouts = [(layout, 2) for layout in ("ddp", "fsdp1", "fsdp2", "fsdp2 bf16")] + [("ddp", 4), ("hsdp", 4)]
    return [Case(layout=layout, world_size=size, way=way) for layout, size in layouts for way in BLANK_WAYS]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A job and its reference, both running."""

    case: Case
    job: jobs.Job
    reference: jobs.Job

    def finished(self) -> Proof:
        try:
            jobs.succeeded(self.reference)
            finished = jobs.succeeded(self.job)
        finally:
            self.job.kill()
            self.reference.kill()
        return Proof(self.case, finished.folder)


class Proof:
    """A recorded run beside what one process saw."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.options = case.options
        self.folder = folder
        self.run = recorder.open_run(folder / "recordings")
        found = torch.load(folder / "reference.pt", weights_only=False)
        self.values: dict[Key, torch.Tensor] = found["values"]
        """What the reference saw."""
        self.bounds: dict[Key, float] = found["bounds"]
        """How far rounding may move each of them; 0 where the bits must be equal."""
        self.lacking: set[Key] = found["lacking"]
        """Those in which the last rank has no part."""
        self._tensors: dict[Key, torch.Tensor] = {}

    @cached_property
    def rows(self) -> GlobalRows:
        return self.run.view().rows()

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The rows of the global view; rows that stay per rank have a `rank`."""
        rows: list[dict[str, Any]] = self.rows.table.to_pylist()
        return rows

    def tensor(self, key: Key) -> torch.Tensor:
        """The global tensor, by the look-up that users have."""
        if key not in self._tensors:
            self._tensors[key] = tensor_of(self.run, key, partial=key in self.lacking)
        return self._tensors[key]

    @cached_property
    def merged(self) -> recorder.Run:
        out = self.folder / "merged"
        finished = jobs.python(self.folder / "merge", "-m", "recorder", "merge", self.run.path, "-o", out).wait()
        assert finished.returncode == bool(self.lacking), finished.output  # rows that lack a rank are a finding
        return recorder.open_run(out)

    def merged_tensor(self, key: Key) -> torch.Tensor:
        return tensor_of(self.merged, key, partial=key in self.lacking)

    def is_early(self, key: Key) -> bool:
        """Whether a value is a root's first input, which is seen before FSDP casts it."""
        site, path, _, step, micro_step, call, _, mode, _ = key
        is_own_input = (site, path, mode) == ("input", "", "train")
        return self.options.mixed and is_own_input and step == micro_step == call == 0


def tensor_of(run: recorder.Run, key: Key, rank: int | None = None, *, partial: bool = False) -> torch.Tensor:
    site, path, name, step, micro_step, call, repeat, mode, phase = key
    return run.tensor(
        path,
        site,
        step,
        name,
        rank,
        micro_step=micro_step,
        call=call,
        repeat=repeat,
        mode=mode,
        phase=phase,
        partial=partial,
    )
