"""The gradient of an input is the total over all who use it, also where FSDP2 has wrapped the input for one module."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

import recorder
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS


def test_a_residual_around_a_sharded_block_is_in_the_gradient_of_its_input(tmp_path: Path) -> None:
    jobs.succeeded(jobs.ranks(tmp_path, SCRIPTS / "residual.py", "out"))  # it finds training equal to the bit
    ddp, fsdp = (recorder.open_run(next((tmp_path / "out" / kind).iterdir())) for kind in ("ddp", "fsdp2"))
    found = recorder.diff(ddp, fsdp, site="grad_input", step=0)  # later steps differ by roundings
    assert found.verdict == "equal"
    table = fsdp.table(["module_path", "site"], pc.field("site") == "grad_input")
    inputs = [f"blocks.{number}{inner}" for number in range(3) for inner in ("", ".norm", ".up")]
    assert set(inputs) <= set(table.column("module_path").to_pylist())
