"""Print the evidence that the global view is right where ranks share a part of the batch: layout x ranks x site.

    python -m tests.roundtrip.meshes          # on 2, 4 and 8 ranks; some minutes on two cores
    python -m tests.roundtrip.meshes 4        # on 4

Each layout trains with the recorder, and one process under plain hooks trains the same with the whole batch. `equal`
values have equal bits; `close` ones differ by at most `TOLERANCE` of the largest magnitude in the tensor, as sums in
another order do: the two trainings add up the same products in different orders, over two steps.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import recorder
from recorder.errors import RecorderError
from tests.distributed import jobs

SCRIPT = Path(__file__).parent / "scripts" / "meshes.py"
REPOSITORY = Path(__file__).parents[2]
LAYOUTS = {
    2: ("tp", "sp"),
    4: ("tp", "sp", "tp x ddp", "sp x ddp", "tp x fsdp2", "sp x fsdp2", "tp x hsdp"),
    8: ("tp x ddp", "sp x ddp", "tp x fsdp2", "sp x fsdp2", "tp x hsdp", "sp x hsdp"),
}
SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "optim")
TOLERANCE = 2e-5


class Result(NamedTuple):
    """What became of the values of one run."""

    counts: dict[str, Counter[str]]
    """By site: ``equal``, ``close``, ``missing``, ``wrong``."""
    problems: list[str]


def train(folder: Path, num_ranks: int, layouts: tuple[str, ...]) -> Path:
    """Where the runs are, by layout, and ``one.pt`` beside them."""
    options = ("--standalone", f"--nproc-per-node={num_ranks}")
    settings = {"PYTHONPATH": str(REPOSITORY)}
    finished = jobs.torchrun(folder, SCRIPT, "out", *layouts, options=options, **settings).wait(300)
    assert finished.returncode == 0, finished.output
    return folder / "out"


def compare(run: recorder.Run, values: dict[Any, torch.Tensor]) -> Result:
    """The global tensors of a run with those of one process."""
    counts: dict[str, Counter[str]] = {site: Counter() for site in SITES}
    problems = []
    for (site, path, name, step), value in values.items():
        try:
            found = run.tensor(path, site, step, name, mode="train")
        except RecorderError as error:
            counts[site]["missing"] += 1
            problems.append(str(error))
            continue
        what = _judge(found, value)
        counts[site][what] += 1
        if what == "wrong":
            problems.append(f"{path} {site} {name} at step {step}: {list(found.shape)}, not {list(value.shape)}")
    return Result(counts, problems)


def _judge(found: torch.Tensor, value: torch.Tensor) -> str:
    if found.dtype != value.dtype or found.shape != value.shape:
        return "wrong"
    if torch.equal(found, value):
        return "equal"
    farthest = (found.double() - value.double()).abs().max()
    return "close" if farthest <= TOLERANCE * value.double().abs().max() else "wrong"


def main() -> int:
    wanted = [int(word) for word in sys.argv[1:]] or list(LAYOUTS)
    is_bad = False
    print("| layout | ranks | " + " | ".join(SITES) + " | missing, wrong |\n|" + "---|" * (len(SITES) + 3))
    for num_ranks in wanted:
        with tempfile.TemporaryDirectory() as folder:
            out = train(Path(folder), num_ranks, LAYOUTS[num_ranks])
            values = torch.load(out / "one.pt")
            for layout in LAYOUTS[num_ranks]:
                counts, problems = compare(recorder.open_run(out / layout), values)
                cells = [f"{of['equal']} + {of['close']}" for of in counts.values()]
                bad = [sum(of[what] for of in counts.values()) for what in ("missing", "wrong")]
                print(f"| {layout} | {num_ranks} | {' | '.join(cells)} | {bad[0]}, {bad[1]} |", flush=True)
                for problem in problems:
                    print(f"    {problem}", file=sys.stderr)
                is_bad |= any(bad)
    print("\nof each site: equal + close")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
