"""A real process killed at a random instant: what it was told is durable is there, and all that is there is right."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from recorder.format.codec import decode
from tests.rigs.writer import read_open, read_sealed

_RECORD_FOR_EVER = """
import sys
from pathlib import Path
import numpy as np
from recorder.records import KEEP_STATS, KEEP_TENSOR
from tests.rigs.writer import Rig
rig = Rig(Path(sys.argv[1]), shard_bytes=2_000_000, batch_bytes=300_000, flush_interval_s=0.05).start()
while True:
    for _ in range(20):
        seq = rig.num_observed
        values = np.random.default_rng(seq).standard_normal(seq * 37 % 20_000, dtype=np.float32)
        rig.put(values, keep=KEEP_STATS if seq % 5 == 4 else KEEP_TENSOR | KEEP_STATS)
        rig.staged.clear()
    if rig.drain():
        print(rig.num_observed, flush=True)
"""


@pytest.mark.parametrize("attempt", range(5))
def test_sigkill_leaves_every_durable_row_readable_and_right(tmp_path: Path, attempt: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _RECORD_FOR_EVER, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0.0, 0.4))
        process.kill()
        num_durable = int([first, *process.stdout][-1])
    assert process.returncode == -signal.SIGKILL

    (directory,) = tmp_path.glob("rank=*/*")
    found = [pair for path in directory.glob("*.arrow") for pair in read_sealed(path)]
    for path in directory.glob("_*.arrow.open"):
        if not (directory / path.name[1:].removesuffix(".open")).exists():  # killed between link and unlink
            found += read_open(path)
    rows = {row["seq"]: row for batch, _ in found for row in batch.to_pylist()}
    assert len(rows) == sum(batch.num_rows for batch, _ in found)
    assert set(range(num_durable)) <= set(rows)
    for seq, row in rows.items():
        values = np.random.default_rng(seq).standard_normal(seq * 37 % 20_000, dtype=np.float32)
        assert row["mean"] == values.nbytes
        if seq % 5 != 4:
            assert decode(row["encoding"], row["data"], row["payload_bytes"], 4).tobytes() == values.tobytes()
    ledgers = [header.ledger for _, header in found]
    assert max(ledger["written"] for ledger in ledgers) == len(rows)
    manifest = json.loads((directory / "_writer.json").read_text())
    assert manifest["state"] == "recording"
