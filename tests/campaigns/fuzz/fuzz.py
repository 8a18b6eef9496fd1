"""Mutated runs under a memory limit: every command and every door of the API over each, in forked children.

    python -m tests.campaigns fuzz --minutes 60
    python -m tests.campaigns fuzz --case 1234          # one case, in the foreground, with its recipe
    python -m tests.campaigns fuzz --recipe FILE        # an entry of the corpus

Findings print their recipe as one line of JSON: what becomes an entry of `corpus/` once it is mended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.campaigns.faults.support import Progress, deadline_s, memory_folder
from tests.campaigns.fuzz.bases import NAMES, make_bases
from tests.campaigns.fuzz.battery import examine
from tests.campaigns.fuzz.child import Verdict, contain
from tests.campaigns.fuzz.mutate import propose
from tests.campaigns.fuzz.recipe import apply

CORPUS = Path(__file__).parents[3] / "tests" / "faults" / "corpus"
_MINUTES = 60.0
_WEIGHTS = (6, 2, 2)
_SHARE = 0.15
"""Of the commands that run over each case; the corpus gets all."""


class Sandbox:
    """A folder with the sound bases, and the run of the case at hand."""

    def __init__(self, folder: Path, seed: int) -> None:
        import torch  # once, before any fork

        torch.set_num_threads(1)
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self.folder = folder
        self.seed = seed
        self.bases = make_bases(folder / "bases")
        self.run = folder / "case" / "run"
        self.out = folder / "out"

    def recipe(self, case: int) -> dict[str, Any]:
        """What case number `case` is; the same for one seed."""
        chooser = random.Random(f"{self.seed}:{case}")
        base = chooser.choices(NAMES, _WEIGHTS)[0]
        return {"base": base, "steps": propose(self.bases[base], chooser)}

    def check(self, case: int) -> str:
        return self.try_recipe(self.recipe(case), random.Random(f"{self.seed}:{case}:commands"), _SHARE)

    def try_recipe(self, recipe: dict[str, Any], chooser: random.Random, share: float = 1.0) -> str:
        self.prepare(recipe)
        return "\n".join(examine(self.run, self.bases["handmade"], self.out, chooser, share))

    def prepare(self, recipe: dict[str, Any]) -> None:
        for folder in (self.run.parent, self.out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        shutil.copytree(self.bases[recipe["base"]], self.run, symlinks=True)
        apply(self.run, recipe["steps"])


def corpus() -> list[Path]:
    return sorted(CORPUS.glob("*.json"))


def fuzz(sandbox: Sandbox, cases: Sequence[int]) -> Iterator[Verdict]:
    return contain(sandbox.check, cases)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", type=int, help="one case, here and not in a child")
    parser.add_argument("--recipe", type=Path, help="a recipe, here and not in a child")


def main(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory_folder()) as folder:
        sandbox = Sandbox(Path(folder), arguments.seed)
        if arguments.case is not None or arguments.recipe is not None:
            recipe = json.loads(arguments.recipe.read_text()) if arguments.recipe else sandbox.recipe(arguments.case)
            print(as_text(recipe, indent=1))
            found = sandbox.try_recipe(recipe, random.Random(0))
            print(found or "nothing found")
            return int(bool(found))
        return _campaign(sandbox, arguments)


def _campaign(sandbox: Sandbox, arguments: argparse.Namespace) -> int:
    end_s = deadline_s(arguments.minutes or (_MINUTES if arguments.count is None else None))
    progress = Progress(arguments.count or 0, "cases")
    number = done = max_bytes = 0
    findings: Counter[str] = Counter()
    start_s = time.monotonic()
    while time.monotonic() < end_s and (arguments.count is None or done < arguments.count):
        size = 50 if arguments.count is None else min(200, arguments.count - done)
        for verdict in fuzz(sandbox, range(number, number + size)):
            done += 1
            max_bytes = max(max_bytes, verdict.max_bytes)
            if verdict.finding:
                key = signature(verdict.finding)
                findings[key] += 1
                if findings[key] == 1:
                    print(f"\ncase {verdict.case}: {verdict.finding}", flush=True)
                    print(f"recipe: {as_text(sandbox.recipe(verdict.case))}", flush=True)
            progress.show(done, f"{sum(findings.values())} findings")
        number += size
    spent_s = time.monotonic() - start_s
    print(f"\n{done} cases in {spent_s:.0f} s, at most {max_bytes >> 20} MiB, {len(findings)} kinds of findings")
    for key, count in findings.most_common():
        print(f"{count:>6}  {key}")
    return int(bool(findings))


def as_text(recipe: dict[str, Any], indent: int | None = None) -> str:
    """A recipe as JSON, in which bytes are objects that `recipe.value_of` reads."""
    return json.dumps(recipe, indent=indent, default=lambda data: {"$hex": data.hex()})


def signature(finding: str) -> str:
    """A text that findings with one cause share: the last two lines of code and the kind of error."""
    lines = [line.strip() for line in finding.splitlines()]
    frames = [line.split(", line")[0].replace(os.getcwd(), "") + line.rpartition(" in ")[2].join(("::", ""))
              for line in lines if line.startswith('File "')]  # fmt: skip
    kind = next((line for line in reversed(lines) if line and not line.startswith(("^", "File"))), "")
    return f"{' < '.join(frames[-2:][::-1])} {kind[:80]}"
