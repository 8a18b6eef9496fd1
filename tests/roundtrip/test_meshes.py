"""Ranks that share a part of the batch: the global view has what one process with the whole batch has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recorder
from tests.campaigns.roundtrip.meshes import LAYOUTS, NAN, OF_NAN, SITES, compare, train, with_layouts
from tests.rigs.meshes import finger

# On gloo the pipelining of torch 2.9 aborts, without the recorder too.
QUICK = ("tp x ddp", "sp x fsdp1", *(("pp x tp",) if torch.__version__ >= "2.13" else ()))


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [
        pytest.param(4, QUICK, id="4 ranks, a few layouts"),
        *(pytest.param(num, layouts, id=f"{num} ranks", marks=pytest.mark.slow) for num, layouts in LAYOUTS.items()),
    ],
)
def test_every_value_of_one_process_is_in_the_global_view(
    tmp_path: Path, num_ranks: int, layouts: tuple[str, ...]
) -> None:
    out = train(tmp_path, num_ranks, layouts)
    values = torch.load(out / "one.pt")
    assert {key[0] for key in values} == set(SITES)
    for layout in layouts:
        run = with_layouts(out, layout)
        counts, problems = compare(run, values, layout)
        assert problems == [], layout
        assert sum(counts["grad_output"].values()) > 50
        assert _num_fingerprints(run) > 50 or run.is_merged


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=[] if n == 2 else pytest.mark.slow) for n in OF_NAN])
def test_ranks_that_share_a_batch_have_the_same_layout_where_all_is_nan(tmp_path: Path, num_ranks: int) -> None:
    layouts = tuple(NAN + layout for layout in (OF_NAN[num_ranks] if num_ranks != 2 else ("tp",)))
    out = train(tmp_path, num_ranks, layouts)
    values = torch.load(out / "nan.pt")
    assert {step for *_, step in values} == {0, 1, 2}
    for layout in layouts:
        assert compare(recorder.open_run(out / layout), values, layout).problems == [], layout


def _num_fingerprints(run: recorder.Run) -> int:
    """Of parameters, each of which must be that of the whole."""
    rows, num = run.view().rows(), 0
    for i, row in enumerate(rows.table.select(["site", "rank", "fingerprint"]).to_pylist()):
        if row["site"] == "param" and row["rank"] is None and row["fingerprint"] is not None:
            assert row["fingerprint"] == finger(rows.array(i))
            num += 1
    return num
