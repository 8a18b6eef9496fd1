"""What the command line does without: pandas, which pyarrow would import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rigs.merging import make_small_run


def test_a_command_loads_no_pandas(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run", steps=1)
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('pandas' in sys.modules))\n"
        "from recorder.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "merge", str(run), "-o", str(tmp_path / "out"), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_pandas_that_is_there_already_stays() -> None:
    code = (
        "import pandas, sys\n"
        "from recorder.cli import hide_pandas\n"
        "before = list(sys.meta_path)\n"
        "hide_pandas()\n"
        "assert sys.meta_path == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
