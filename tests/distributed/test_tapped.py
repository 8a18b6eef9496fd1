"""Under DDP and FSDP2 a compiled model's taps show what plain hooks see of the same training uncompiled, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorder
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

from .scripts.tapped import CASES

# Three jobs serve them all; the others are run by naming them, or with -m slow.
QUICK = ("ddp outside", "ddp flag", "ddp blocks", "fsdp2 outside", "fsdp2 blocks", "fsdp2 checkpointed")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
KEY = ("site", "module_path", "name", "step", "micro_step", "call", "repeat", "mode", "phase")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tapped")
    for i in range(0, len(QUICK), 2):  # each job has a deadline of its own
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "tapped.py", "out", *QUICK[i : i + 2]))
    return folder / "out"


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name = request.param
    if name in QUICK:
        return name, request.getfixturevalue("quick") / name
    jobs.succeeded(jobs.ranks(tmp_path, SCRIPTS / "tapped.py", "out", name))
    return name, tmp_path / "out" / name


def rows(run: recorder.Run, rank: int) -> dict[tuple[Any, ...], Any]:
    """Every row of a rank by its key; one that is there twice fails."""
    frame = run.to_pandas()
    frame = frame[frame["rank"] == rank]
    found: dict[tuple[Any, ...], Any] = {}
    for row in frame.to_dict("records"):
        micro_step = None if row["micro_step"] != row["micro_step"] else row["micro_step"]
        key = tuple(micro_step if name == "micro_step" else row[name] for name in KEY)
        assert key not in found, f"{key} is there twice"
        question = {name: value for name, value in zip(KEY, key, strict=True) if name != "module_path"}
        found[key] = run.array(str(row["module_path"]), rank=rank, root=row["root"], **question)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_each_rank_records_what_plain_hooks_see_uncompiled(case: tuple[str, Path]) -> None:
    name, folder = case
    run = recorder.open_run(folder / "recordings")
    is_exact = CASES[name].backend != "inductor"
    for rank in (0, 1):
        saved = torch.load(folder / f"rank{rank}.pt")
        found = rows(run, rank)
        wanted = saved["values"]
        if CASES[name].checkpointed and CASES[name].compiled == "outside":  # the compiler recomputes what it needs
            wanted = {key: value for key, value in wanted.items() if (key[0], key[-1]) != ("input", "recompute")}
        assert not set(wanted) - set(found), f"lacks {sorted(set(wanted) - set(found), key=str)[:5]}"
        for key in set(found) - set(wanted):  # eagerly a recompute stops at the last value that the backward needs
            assert key[-1] == "recompute", key
            np.testing.assert_array_equal(found[key], found[*key[:-1], "forward"])
        for key, value in wanted.items():
            array = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
            if is_exact:
                np.testing.assert_array_equal(found[key].astype(array.dtype), array, err_msg=str(key))
            else:
                np.testing.assert_allclose(found[key], array, rtol=1e-4, atol=1e-6, err_msg=str(key))
        for one, other in zip(saved["losses"], saved["tapped_losses"], strict=True):
            torch.testing.assert_close(other, one, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
    for writer in run.writers:
        assert writer.balance.dropped == {} and writer.balance.num_missing == 0
