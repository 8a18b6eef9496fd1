"""Print the evidence that the global view is right: layout x world size x way to train x site.

    python -m tests.campaigns roundtrip                      # every case, some ten minutes on two cores
    python -m tests.campaigns roundtrip fsdp2 x2             # the cases whose name has all of these words
    python -m tests.campaigns roundtrip --merge ddp          # from the merged run instead

Each case trains on several ranks with the recorder, and in one process with plain hooks and the whole batch.
`expected` values were seen by the latter; each has to be in the global view, with equal bits (`equal`) or within the
bound that rounding has there (`within`; derived in `reference.py`). The exit code is 1 if any is not.
In the ways `dead` and `nan` ranks have values alike that are of the batch, and every other step has statistics alone:
there shape and statistics are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import recorder
from recorder.errors import RecorderError
from recorder.globalview.view import GlobalRows
from tests.rigs import jobs

from .programs import train
from .reference import KEY, Key

SCRIPT = Path(__file__).parent / "programs" / "train.py"
REFERENCE = Path(__file__).with_name("reference.py")
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
        asked: list[str | Path] = [folder / "reference.pt", "--world-size", str(self.world_size), "--", *self.arguments]
        recording = {**jobs.recording(SPARSE if self.way in BLANK_WAYS else jobs.EVERYTHING), "TESTS_RECORDER": "1"}
        return Started(
            job=jobs.ranks(folder, SCRIPT, *self.arguments, num=self.world_size, **recording),
            reference=jobs.program(folder / "one", REFERENCE, *asked),
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
        name=name,
        rank=rank,
        micro_step=micro_step,
        call=call,
        repeat=repeat,
        mode=mode,
        phase=phase,
        partial=partial,
    )


SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "buffer", "optim", "scalar", "tap")


@dataclass
class SiteResult:
    expected: int = 0
    equal: int = 0
    """Bit-equal."""
    within: int = 0
    """Not bit-equal, and within the bound that rounding has there."""
    missing: list[Key] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    extra: list[Key] = field(default_factory=list)
    worst: float = 0.0
    """The largest difference, as a part of its bound."""
    loosest: float = 0.0
    """The largest bound, as a part of the largest magnitude in its tensor."""


def key_of(row: dict[str, object]) -> Key:
    return tuple(row[name] for name in KEY)  # type: ignore[return-value]


def compare(proof: Proof, look_up: Callable[[Key], torch.Tensor] | None = None) -> dict[str, SiteResult]:
    """Return results by site; `look_up` gets a global tensor, by default `Proof.tensor`."""
    found = {site: SiteResult() for site in SITES}
    measured = {}
    for row in proof.table:
        if row["rank"] is None and key_of(row) not in proof.values:
            found[str(row["site"])].extra.append(key_of(row))
        if row["rank"] is None and row["encoding"] is None:
            measured[key_of(row)] = row
    for key, value in proof.values.items():
        result = found[key[0]]
        result.expected += 1
        if key in measured:
            _judge_statistics(result, measured[key], value, proof.bounds[key])
            continue
        try:
            recorded = look_up(key) if look_up is not None else proof.tensor(key)
        except RecorderError:
            result.missing.append(key)
            continue
        if proof.is_early(key) and recorded.dtype == torch.float32:
            recorded = recorded.to(value.dtype)
        _judge(result, key, recorded, value, proof.bounds[key])
    return found


def _judge(result: SiteResult, key: Key, recorded: torch.Tensor, value: torch.Tensor, bound: float) -> None:
    if (recorded.dtype, recorded.shape) != (value.dtype, value.shape):
        result.wrong.append(f"{key}: {recorded.dtype} {list(recorded.shape)}, not {value.dtype} {list(value.shape)}")
        return
    magnitude = float(value.double().abs().nan_to_num(0).max()) if value.numel() else 0.0
    if bound and magnitude:
        result.loosest = max(result.loosest, bound / magnitude)
    if is_same(recorded, value):
        result.equal += 1
        return
    if bool((recorded.isfinite() != value.isfinite()).any()):
        result.wrong.append(f"{key}: finite elsewhere")
        return
    difference = float((recorded.double() - value.double()).abs().nan_to_num(0).max())
    if difference > bound:
        result.wrong.append(
            f"{key}: differs by {difference:.3g}, the bound is {bound:.3g}, the largest {magnitude:.3g}"
        )
        return
    result.within += 1
    result.worst = max(result.worst, difference / bound)


def _judge_statistics(result: SiteResult, row: dict[str, Any], value: torch.Tensor, bound: float) -> None:
    """Judge a row without values by its shape and its statistics, which sums over ranks do not have."""
    wanted: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    found: dict[str, Any] = {"dtype": row["dtype"], "shape": json.loads(row["shape"])}
    if found == wanted and value.is_floating_point() and "no_statistics" not in (row["note"] or ""):
        wide = value.double()
        finite = wide[wide.isfinite()]
        wanted |= {"nan_count": int(wide.isnan().sum()), "inf_count": int(wide.isinf().sum())}
        found |= {name: row[name] for name in ("nan_count", "inf_count")}
        for name in ("min", "max", "mean") if finite.numel() else ():
            number = float(getattr(finite, name)())
            is_near = row[name] is not None and abs(row[name] - number) <= bound + 1e-12 * float(finite.abs().max())
            wanted[name], found[name] = number, number if is_near else row[name]
    if found != wanted:
        result.wrong.append(f"{key_of(row)}: {found}, not {wanted}")
    elif bound:
        result.within += 1
    else:
        result.equal += 1


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are bit-equal, but for the sign of a zero or a NaN."""
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(_plain(one), _plain(two))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in a type that can be compared, without NaNs, which equal nothing."""
    return tensor.double().nan_to_num(nan=1e300) if tensor.is_floating_point() else tensor


_FORMAT = "{:<16} {:>5} {:<10} {:<11} {:>8} {:>6} {:>6} {:>7} {:>5} {:>5} {:>10} {:>8}"
_HEAD = (
    "layout",
    "ranks",
    "way",
    "site",
    "expected",
    "equal",
    "within",
    "missing",
    "wrong",
    "extra",
    "diff/bound",
    "bound",
)


def line(case: Case, site: str, result: SiteResult) -> str:
    numbers = (result.expected, result.equal, result.within, len(result.missing), len(result.wrong), len(result.extra))
    measures = (f"{result.worst:.2g}", f"{result.loosest:.1g}") if result.loosest else ("", "")
    return _FORMAT.format(case.layout, case.world_size, case.way or "plain", site, *numbers, *measures)


def total(results: list[SiteResult]) -> SiteResult:
    return SiteResult(
        expected=sum(r.expected for r in results),
        equal=sum(r.equal for r in results),
        within=sum(r.within for r in results),
        missing=[key for r in results for key in r.missing],
        wrong=[text for r in results for text in r.wrong],
        extra=[key for r in results for key in r.extra],
        worst=max(r.worst for r in results),
        loosest=max(r.loosest for r in results),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help="parts of the names of the cases to run; default all")
    parser.add_argument("--merge", action="store_true", help="read the run that `recorder merge` makes of it")
    parser.add_argument("--by-case", action="store_true", help="one line a case, not one a site")


def main(asked: argparse.Namespace) -> int:
    every_case = [*matrix(), *blank()]
    cases = [case for case in every_case if all(word in str(case).split() or word == str(case) for word in asked.words)]
    if not cases:
        print(f"no case has all of {', '.join(asked.words)}; cases are:", *every_case, sep="\n  ", file=sys.stderr)
        return 2
    print(_FORMAT.format(*_HEAD), flush=True)
    every: list[SiteResult] = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            proof = case.start(Path(folder)).finished()
            results = compare(proof, proof.merged_tensor if asked.merge else None)
        every += results.values()
        shown = {"all": total(list(results.values()))} if asked.by_case else results
        for site in shown:
            print(line(case, site, shown[site]), flush=True)
        for problem in (p for site in SITES for r in [results[site]] for p in (*r.missing, *r.wrong, *r.extra)):
            print(f"    {problem}", file=sys.stderr)
    found = total(every)
    bad = f"{len(found.missing)} missing, {len(found.wrong)} wrong, {len(found.extra)} extra"
    good = f"{found.equal:,} bit-equal, {found.within:,} within their bound (at most {found.worst:.2g} of it)"
    print(f"\n{len(cases)} cases, {found.expected:,} values: {good}, {bad}")
    return 1 if found.missing or found.wrong or found.extra else 0
