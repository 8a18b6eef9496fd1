"""Record a golden run; done once for each version of the format that is released, and its folder is then committed.

    python -m tests.golden.make tests/golden/v1.1

What names the machine is written over, so that the run can be looked at anywhere.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from recorder.format.rundir import STATUS, encode_manifest, encode_status, read_json
from tests.rigs import jobs

TRAIN = Path(__file__).parent / "train.py"


def make(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        finished = jobs.succeeded(
            jobs.torchrun(Path(folder), TRAIN, **jobs.recording(f"{jobs.EVERYTHING},histogram,units,probe"))
        )
        shutil.copytree(finished.run.path, out)
    for i, manifest in enumerate(sorted(out.glob("rank=*/*/_writer.json"))):
        of_no_machine = {"writer": f"20260101-000000-host-{i}", "host": "host", "pid": i, "process": f"boot:0:{i}"}
        written: dict[str, Any] = read_json(manifest) | of_no_machine
        for module in (module for root in written["roots"] for module in root["modules"]):
            module["source"] = module["source"] and Path(module["source"]).name
        manifest.write_bytes(encode_manifest(written))
        status = manifest.with_name(STATUS)
        status.write_bytes(encode_status({**read_json(status), **of_no_machine, "padding": ""}))
        if i:  # derived, and readers must do without
            for index in manifest.parent.glob("_*.index"):
                index.unlink()
        manifest.parent.rename(manifest.parent.with_name(written["writer"]))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
