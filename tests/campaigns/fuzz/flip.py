"""Flipped bits and bytes in every file of a recorded run: what is read is what was written, or it is said.

    python -m tests.campaigns flip --count 20000

Each damage is done to the sealed shards, their indexes, the open shards and the manifests of two small recordings, and
everything that the reader then gives is compared with what it gave before: metadata columns, payloads, manifests.

    python -m tests.campaigns flip --every

One bit of every byte of all files of a closed recording: `verify` says that there is a fault, or pyarrow, pandas and
polars read what they read before.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.ipc
import torch

import recorder
from recorder.columns import METADATA_COLUMNS
from recorder.errors import RunError
from recorder.format.rundir import STATUS
from recorder.read.metadata import POSITION_COLUMNS, MetadataRows
from recorder.read.payload import Payloads
from recorder.run.run import Run, open_run
from recorder.upkeep.verify import verify
from tests.campaigns.faults.support import Progress, copy_live, deadline_s, memory_folder
from tests.campaigns.fuzz.child import Verdict, contain
from tests.rigs.capturing import Tiny, batch

COUNT = 20_000
_RULES = "site=input,output,grad,param,grad_output keep=tensor,stats,fingerprint; site=* keep=stats"
_VERIFY_EVERY = 10


class Facts(NamedTuple):
    """Everything that a reader returns from a run, by what identifies it."""

    rows: dict[tuple[str, int], tuple[Any, ...]]
    """Metadata columns by writer and seq."""
    payloads: dict[tuple[str, int], bytes]
    manifests: dict[str, Any]
    """Of the run and of each writer, with what is derived from them."""
    accounts: dict[str, Any]
    """Of each writer: the newest there are, which may stand in the last batch of an open shard."""


class Damage(NamedTuple):
    file: Path
    at: int
    old: bytes
    new: bytes


class Flips:
    """Two recordings, one closed and one as a kill leaves it, and what is in them."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.set_num_threads(1)
        pa.set_cpu_count(1)
        logging.getLogger("recorder").setLevel(logging.CRITICAL)
        self.seed = seed
        self.runs = record(folder)
        self._files = [
            path for run in self.runs for path in sorted(run.rglob("*")) if path.is_file() and path.name != STATUS
        ]
        self._content = {path: path.read_bytes() for path in self._files}
        self._facts = {run: read(open_run(run)) for run in self.runs}
        self._findings = {run: _texts(open_run(run)) for run in self.runs}
        self._pid = 0
        self._seen: dict[Path, list[Any]] = {}
        self._paths = [path for path in self._files if self.runs[0] in path.parents]

    @property
    def num_bytes(self) -> int:
        """Of all files of the closed recording."""
        return sum(len(self._content[path]) for path in self._paths)

    def check_byte(self, number: int) -> str:
        """Flip a bit of a byte, numbered through all files of the closed recording; another bit for each.

        Return what a reader sees that `verify` does not.
        """
        at = number
        for path in self._paths:
            if at < len(self._content[path]):
                break
            at -= len(self._content[path])
        old = self._content[path][at : at + 1]
        if path not in self._seen:  # in a child of ours: polars has threads, which a fork does not
            self._seen[path] = _seen_by_others(path)
        _put(path, at, bytes([old[0] ^ 1 << at % 8]))
        try:
            run = open_run(self.runs[0])
            if any(finding.is_fault for finding in verify(run)):
                return ""
            if read(run) != self._facts[self.runs[0]]:
                return f"UNSAID: {path.name}, bit {at % 8} of byte {at}"
            if not _is_same(_seen_by_others(path), self._seen[path]):
                return f"UNSAID: {path.name}, bit {at % 8} of byte {at}: another reader sees it"
        except RunError:
            pass
        finally:
            _put(path, at, old)
        return ""

    def kinds(self) -> Counter[str]:
        """Files by their kind, so that a test can see that none is missing."""
        return Counter(kind_of(path) for path in self._files)

    def damage(self, case: int) -> Damage:
        """What case number `case` is: each file is as likely as any other."""
        chooser = random.Random(f"{self.seed}:{case}")
        file = chooser.choice(self._files)
        data = self._content[file]
        at = chooser.randrange(len(data))
        shape = chooser.random()
        if shape < 0.7:
            new = bytes([data[at] ^ 1 << chooser.randrange(8)])
        elif shape < 0.8:
            new = chooser.randbytes(1)
        elif shape < 0.9:
            new = chooser.randbytes(chooser.choice((2, 4, 8, 64)))
        else:
            new = bytes(chooser.choice((2, 8, 64, 512)))
        new = new[: len(data) - at]
        return Damage(file, at, data[at : at + len(new)], new)

    def check(self, case: int) -> str:
        """Do one damage, read the complete run and undo the damage. Returns what was wrong; empty for nothing."""
        if self._pid != os.getpid():
            self._pid = os.getpid()  # the child before this one may have died over a damaged file
            for path, data in self._content.items():
                path.write_bytes(data)
        damage = self.damage(case)
        run = next(run for run in self.runs if run in damage.file.parents)
        _put(damage.file, damage.at, damage.new)
        try:
            return self._compare(run, damage, is_verified=case % _VERIFY_EVERY == 0)
        finally:
            _put(damage.file, damage.at, damage.old)

    def _compare(self, path: Path, damage: Damage, *, is_verified: bool) -> str:
        where = f"{damage.file.name} at byte {damage.at}: {damage.old.hex()[:40]} to {damage.new.hex()[:40]}"
        try:
            run = open_run(path)
            found, was = read(run), self._facts[path]
        except RunError:
            return ""
        if wrong := [key for key, row in found.rows.items() if was.rows.get(key) != row]:
            return f"WRONG VALUE: {where}: row {wrong[0]} is {found.rows[wrong[0]]}, was {was.rows.get(wrong[0])}"
        if wrong := [key for key, data in found.payloads.items() if was.payloads[key] != data]:
            return f"WRONG VALUE: {where}: payload of row {wrong[0]}"
        if not run.problems:
            if wrong_names := [name for name, fact in was.manifests.items() if found.manifests.get(name) != fact]:
                return f"WRONG VALUE: {where}: {wrong_names[0]} of the manifests"
            is_less = len(found.rows) < len(was.rows) or found.accounts != was.accounts
            if (is_less or is_verified) and found != was and _texts(run) == self._findings[path]:
                return f"UNSAID: {where}: {len(was.rows) - len(found.rows)} rows, and verify says nothing"
        return ""


def record(folder: Path) -> tuple[Path, Path]:
    """A closed run, and one of which the open shards were copied while it was recorded."""
    closed, killed = folder / "closed", folder / "killed"
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    with recorder.attach(model, enabled=True, dir=str(folder / "recordings"), rules=_RULES) as attached:
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            attached.flush(10)
        run = next((folder / "recordings").iterdir())
        copy_live(run, killed)
    run.rename(closed)
    return closed, killed


def read(run: Run) -> Facts:
    """Everything that the reader returns without a complaint."""
    light = MetadataRows(run.writers)
    light.load([*METADATA_COLUMNS, *POSITION_COLUMNS])
    everything = np.arange(light.num_rows)
    writers = [run.writers[number].name for number in light.writer_numbers(everything).tolist()]
    keys = list(zip(writers, light.numbers("seq").tolist(), strict=True))
    columns = [_values(light.column(name)) for name in METADATA_COLUMNS]
    payloads = Payloads(light, len(run.writers))
    found = {}
    for position in np.flatnonzero(light.column("encoding").is_valid().to_numpy()).tolist():
        with contextlib.suppress(RunError):
            found[keys[position]] = payloads.decoded(position).tobytes()
    accounts = {writer.name: (writer.balance, writer.state) for writer in run.writers}
    return Facts(dict(zip(keys, zip(*columns, strict=True), strict=True)), found, _manifests(run), accounts)


def _values(column: Any) -> list[Any]:
    """A column as values that are equal where their bits are."""
    if pa.types.is_floating(column.type):
        column = pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _manifests(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"run": (run.manifest, run.run_id, run.version, run.world_size, run.is_merged)}
    for writer in run.writers:
        found[writer.name] = (writer.manifest, writer.rank, writer.attempt, writer.started_ns, writer.is_counted)
    return found


def _texts(run: Run) -> list[str]:
    return [finding.text for finding in verify(run)]


def _seen_by_others(path: Path) -> list[Any]:
    """The contents of a file by readers that do not know this format; None where a reader refuses it."""
    found: list[Any] = []
    if path.suffix == ".json":
        return found
    data = path.read_bytes()
    for reader in (_by_arrow, pd.read_feather, pl.read_ipc):
        try:
            found.append(reader(io.BytesIO(data)))
        except Exception:
            found.append(None)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of polars
                raise
            found.append(None)
    return found


def _by_arrow(file: Any) -> Any:
    return pyarrow.ipc.open_file(file).read_all()


def _is_same(some: list[Any], others: list[Any]) -> bool:
    return all(one is not None and one.equals(other) for one, other in zip(some, others, strict=True))


def _put(file: Path, at: int, data: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, at)
    finally:
        os.close(descriptor)


def kind_of(file: Path) -> str:
    if file.suffix == ".json":
        return file.name
    return f"{file.name.lstrip('_').partition('-')[0]}{'.open' if file.suffix == '.open' else file.suffix}"


def flip(flips: Flips, cases: Sequence[int]) -> Iterator[Verdict]:
    return contain(flips.check, cases, cases_a_child=2000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--every", action="store_true", help="one bit of every byte of a closed recording")
    parser.add_argument("--case", type=int, help="one damage, here and not in a child")


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="flip-", dir=memory_folder()) as folder:
        flips = Flips(Path(folder), arguments.seed)
        if arguments.every:
            count = min(flips.num_bytes, arguments.count or flips.num_bytes)
            chosen = sorted(random.Random(arguments.seed).sample(range(flips.num_bytes), count))
            found = [verdict.finding for verdict in contain(flips.check_byte, chosen, cases_a_child=2000)]
            unsaid = list(filter(None, found))
            print(*unsaid, f"{len(found)} bytes of {flips.num_bytes}, {len(unsaid)} findings", sep="\n")
            return int(bool(unsaid))
        if arguments.case is not None:
            print(flips.damage(arguments.case))
            said = flips.check(arguments.case)
            print(said or "no wrong value, and nothing unsaid")
            return int(bool(said))
        return _campaign(flips, arguments)


def _campaign(flips: Flips, arguments: argparse.Namespace) -> int:
    count = arguments.count or COUNT
    start_s, end_s = time.monotonic(), deadline_s(arguments.minutes)
    progress = Progress(count, "damages")
    done: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    for verdict in flip(flips, range(count)):
        kind = kind_of(flips.damage(verdict.case).file)
        done[kind] += 1
        if verdict.finding:
            findings[kind] += 1
            print(f"\ncase {verdict.case}: {verdict.finding}", flush=True)
        progress.show(done.total(), f"{findings.total()} findings")
        if time.monotonic() > end_s:
            break
    print(f"\n{'file':<24} {'damages':>8} {'findings':>9}")
    for kind, number in sorted(done.items()):
        print(f"{kind:<24} {number:>8} {findings[kind]:>9}")
    spent_s = time.monotonic() - start_s
    print(f"{'all':<24} {done.total():>8} {findings.total():>9}   {spent_s:.0f} s")
    return int(bool(findings))
