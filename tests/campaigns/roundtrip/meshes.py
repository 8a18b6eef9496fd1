"""Print the evidence that the global view is right where ranks share a part of the batch: layout x ranks x site.

    python -m tests.campaigns meshes          # on 1, 2, 4 and 8 ranks; some minutes on two cores
    python -m tests.campaigns meshes 4        # on 4; pipelines are of 2

Each layout trains with the recorder, and one process under plain hooks trains the same with the whole batch. `equal`
values have equal bits; `close` ones differ by at most `TOLERANCE` of the largest magnitude in the tensor, as sums in
another order do: the two trainings add up the same products in different orders, over two steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import recorder
from recorder.errors import RecorderError
from recorder.merge.merge import merge_run
from tests.rigs import jobs

SCRIPT = Path(__file__).parent / "programs" / "meshes.py"
EXPERTS_SCRIPT = SCRIPT.with_name("experts.py")
PIPELINE = jobs.SCRIPTS / "pipelined.py"
PIPELINES = (
    "gpipe", "one_forward_one_backward", "checkpointed", "interleaved", "looped", "zero_bubble", "zero_bubble_v",
    "dual_pipe_v", "accumulated", "split",
)  # fmt: skip
NUM_MICRO_BATCHES = 4
LAYOUTS = {
    1: ("tp", "sp", "loss", "prepared"),
    2: ("tp", "sp", "loss", "prepared", "cp"),
    4: (
        "tp", "sp", "loss", "prepared", "cp", "tp x ddp", "sp x ddp", "loss x ddp", "tp x fsdp2", "sp x fsdp2",
        "tp x hsdp", "tp x fsdp1", "sp x fsdp1", "tp x fsdp1 flat",
        "pp x ddp", "pp x fsdp2", "pp x tp", "pp x sp", "pp2 x ddp",
    ),
    8: (
        "tp x ddp", "sp x ddp", "tp x fsdp2", "sp x fsdp2", "prepared x fsdp2", "tp x hsdp", "sp x hsdp",
        "tp x fsdp1", "sp x fsdp1", "tp x hsdp1", "sp x hsdp1", "pp x hsdp", "pp x tp x fsdp2", "pp x sp x fsdp2",
    ),
}  # fmt: skip
SAID = {
    "cp": (
        *(f"*:{site}:*=shard(1)" for site in ("input", "output", "grad_input", "grad_output")),
        *(f"*.core:{site}:{name}=shard(2)" for site, name in (("*input", "q"), ("*output", ""))),
        *(f"*.core:{site}:[kv]={how}" for site, how in (("input", "replicate"), ("grad_input", "partial(avg)"))),
    )
}
"""What `--layout` has to say where nothing tells the layout: here that the ranks have slices of the sequence."""
NAN = "nan, "
"""Before a layout: all parameters are NaN from step 1 on, of which statistics alone are kept; step 2 has tensors."""
OF_NAN = {
    1: ("tp", "sp"),
    2: ("tp", "sp", "loss", "prepared"),
    4: ("tp x ddp", "sp x ddp", "loss x ddp", "tp x fsdp2", "sp x fsdp1"),
    8: ("tp x hsdp", "prepared x fsdp2"),
}
"""Layouts that are trained so, too, by the number of ranks."""
EXPERTS = {
    2: ("dtensor x fsdp2", "dtensor x ddp", "own x ddp", "own x fsdp1", "own x fsdp2", "own, marked"),
    4: ("dtensor x fsdp2", "dtensor and sharded x fsdp2", "own x fsdp2"),
    8: ("dtensor x fsdp2", "dtensor and sharded x fsdp2"),
}
"""Experts of each rank's own: pieces of one DTensor, or plain tensors under one name."""
SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "optim")
STATE = ("param", "grad", "optim")
TOLERANCE = 2e-5


class Result(NamedTuple):
    counts: dict[str, Counter[str]]
    """By site: ``equal``, ``close``, ``missing``, ``wrong``; ``per rank`` where nothing can tell how pieces are one."""
    problems: list[str]


def train(folder: Path, num_ranks: int, layouts: tuple[str, ...], script: Path = SCRIPT) -> Path:
    """Train these layouts and one process, and return the folder with a run of each."""
    finished = jobs.ranks(folder, script, "out", *layouts, num=num_ranks).wait(300)
    assert finished.returncode == 0, finished.output
    return folder / "out"


def stays_per_rank(layout: str, site: str, path: str) -> bool:
    """Whether a value is the output of a stage of sequence parallel ranks, which is a plain tensor."""
    return layout.startswith("pp") and "sp" in layout.split(" x ") and path == "blocks.0" and site.endswith("output")


def compare(run: recorder.Run, values: dict[Any, torch.Tensor], layout: str = "") -> Result:
    counts: dict[str, Counter[str]] = {site: Counter() for site in SITES}
    problems = []
    measured = {
        tuple(row[column] for column in ("site", "module_path", "name", "step")): row
        for row in run.view().rows().table.to_pylist()
        if row["rank"] is None and row["encoding"] is None and row["mode"] == "train"
    }
    for (site, path, name, step), value in values.items():
        try:
            phase = {"grad_input": "backward", "grad_output": "backward", "input": "forward", "output": "forward"}
            found = run.tensor(path, site, step, name=name, mode="train", phase=phase.get(site))
        except RecorderError as error:
            if (row := measured.get((site, path, name, step))) is not None:
                what = "equal" if _has_statistics_of(row, value) else "wrong"
                counts[site][what] += 1
                if what == "wrong":
                    problems.append(f"{path} {site} {name} at step {step}: {row['shape']}, not {list(value.shape)}")
                continue
            if stays_per_rank(layout, site, path) and "nothing says how they join" in str(error):
                counts[site]["per rank"] += 1
                continue
            counts[site]["missing"] += 1
            problems.append(str(error))
            continue
        what = _judge(found, value)
        counts[site][what] += 1
        if what == "wrong":
            problems.append(f"{path} {site} {name} at step {step}: {list(found.shape)}, not {list(value.shape)}")
    return Result(counts, problems)


def with_layouts(folder: Path, layout: str) -> recorder.Run:
    """The run of a layout, merged where the layout has to be given."""
    run = recorder.open_run(folder / layout)
    if layout not in SAID:
        return run
    merge_run(run, folder / f"{layout} merged", layouts=SAID[layout])
    return recorder.open_run(folder / f"{layout} merged")


def of_experts(out: Path, num_ranks: int, layout: str) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
    """What one process had of the whole, and of the experts what must stay with their ranks: rows that others sent, and
    plain parameters with all that goes with them, here of all experts."""
    values: dict[Any, torch.Tensor] = torch.load(out / f"{num_ranks // 2 if 'sharded' in layout else num_ranks}.pt")
    is_plain = layout.startswith("own")
    own = {
        key: value
        for key, value in values.items()
        if key[1] == "moe.experts" and (is_plain or key[0] not in STATE) and not key[2].endswith(".step")
    }
    return {key: value for key, value in values.items() if key not in own}, own


def of_pipeline(values: dict[Any, torch.Tensor], num_micro_batches: int, *, is_traced: bool) -> dict[Any, torch.Tensor]:
    """What one process had of each micro-batch as values of the whole batch, of whose samples the loss is the mean.

    Args:
        values: of `tests/distributed/scripts/pipelined.py`.
        num_micro_batches: of a step.
        is_traced: whether torch has cut the model, whose modules are then called by position.
    """
    found: dict[Any, torch.Tensor] = {}
    for site, path, step, micro_step in values:
        if site == "optim":
            module, name, state = path.rsplit(".", 2)
            found[site, module, f"{name}.{state}", step] = values[site, path, step, None]
        elif micro_step is None:
            found[site, *path.rpartition(".")[::2], step] = values[site, path, step, None]
        elif micro_step == 0:
            name = "args.0" if is_traced else "input" if path.endswith(("embed", "head", "linear")) else "x"
            of_each = [values[site, path, step, i] for i in range(num_micro_batches)]
            whole = torch.cat(of_each) / (num_micro_batches if site.startswith("grad") else 1)
            found[site, path, name if site.endswith("input") else "", step] = whole
    return found


def _judge(found: torch.Tensor, value: torch.Tensor) -> str:
    if found.dtype != value.dtype or found.shape != value.shape:
        return "wrong"
    if torch.equal(found.isnan(), value.isnan()):
        found, value = found.nan_to_num(0), value.nan_to_num(0)
    if torch.equal(found, value):
        return "equal"
    farthest = (found.double() - value.double()).abs().max()
    return "close" if farthest <= TOLERANCE * value.double().abs().max() else "wrong"


def _has_statistics_of(row: dict[str, Any], value: torch.Tensor) -> bool:
    """Whether a row without values fits a tensor, by its shape and, except for sums over ranks, its NaN count."""
    if json.loads(row["shape"]) != list(value.shape):
        return False
    return row["nan_count"] in (None, int(value.isnan().sum())) or not value.is_floating_point()


def _row(layout: str, num_ranks: int, result: Result) -> bool:
    """Print a line, and return whether nothing in it is wrong."""
    of_sites = [result.counts[site] for site in SITES]
    missing, wrong, apart = (sum(of[what] for of in of_sites) for what in ("missing", "wrong", "per rank"))
    cells = [f"{of['equal']} + {of['close']}" for of in of_sites]
    print(f"| {layout} | {num_ranks} | {' | '.join(cells)} | {missing}, {wrong}, {apart} |", flush=True)
    for problem in result.problems:
        print(f"    {problem}", file=sys.stderr)
    return not missing and not wrong


def num_ranks_of_layouts(text: str) -> int:
    """A number of ranks on which there are layouts, from the command line."""
    if text not in map(str, LAYOUTS):
        raise argparse.ArgumentTypeError(f"no layout is of {text} ranks; some are of {', '.join(map(str, LAYOUTS))}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ranks", nargs="*", type=num_ranks_of_layouts, help="on so many (default: 1, 2, 4 and 8)")


def main(arguments: argparse.Namespace) -> int:
    wanted = arguments.ranks or list(LAYOUTS)
    is_right = True
    print("| layout | ranks | " + " | ".join(SITES) + " | missing, wrong, per rank |\n|" + "---|" * (len(SITES) + 3))
    for num_ranks in wanted:
        with tempfile.TemporaryDirectory() as folder:
            out = train(Path(folder), num_ranks, LAYOUTS[num_ranks])
            values = torch.load(out / "one.pt")
            for layout in LAYOUTS[num_ranks]:
                is_right &= _row(layout, num_ranks, compare(with_layouts(out, layout), values, layout))
        with tempfile.TemporaryDirectory() as folder:
            of_nan = tuple(NAN + layout for layout in OF_NAN[num_ranks])
            out = train(Path(folder), num_ranks, of_nan)
            values = torch.load(out / "nan.pt")
            for layout in of_nan:
                is_right &= _row(layout, num_ranks, compare(recorder.open_run(out / layout), values, layout))
        if num_ranks in EXPERTS:
            with tempfile.TemporaryDirectory() as folder:
                out = train(Path(folder), num_ranks, EXPERTS[num_ranks], EXPERTS_SCRIPT)
                for layout in EXPERTS[num_ranks]:
                    values, _ = of_experts(out, num_ranks, layout)
                    is_right &= _row(f"experts, {layout}", num_ranks, compare(recorder.open_run(out / layout), values))
    if 2 in wanted:
        with tempfile.TemporaryDirectory() as folder:
            jobs.succeeded(jobs.ranks(Path(folder), PIPELINE, "out"))
            out = Path(folder) / "out"
            for case in PIPELINES:
                values = of_pipeline(torch.load(out / "plain.pt"), NUM_MICRO_BATCHES, is_traced=case == "split")
                is_right &= _row(f"pipeline, {case}", 2, compare(recorder.open_run(out / case), values))
    print("\nof each site: equal + close")
    return int(not is_right)
