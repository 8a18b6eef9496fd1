"""The command line in this process, and runs to point it at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from recorder.cli.app import run_command
from tests.rigs.handmade import HandmadeWriter, ledger, make_row, make_run


class Result(NamedTuple):
    """How a command ended."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command as from a shell, into a pipe."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            run_command([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = exit_info.value.code
        return Result(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


def module(path: str, class_name: str, **more: Any) -> dict[str, Any]:
    found = {"path": path, "class": class_name, "source": "train.py:7", "aliases": [], "sites": ["output"]}
    return found | {"params": ["weight"], "buffers": [], "compiled": False} | more


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two ranks, steps 0 to 11: a loss, outputs and gradients of a layer, a NaN at step 9 of rank 1, 3 drops."""
    run = make_run(tmp_path / "recordings" / "run-a")
    rng = np.random.default_rng(0)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        tensors, stats = [], []
        for step in range(12):
            values = rng.standard_normal((2, 4)).astype(np.float32) * (step + 1)
            if (step, rank) == (9, 1):
                values[0, 0] = np.nan
            common: dict[str, Any] = {"step": step, "rank": rank}
            tensors.append(make_row(4 * step, values, **common))
            stats.append(make_row(4 * step + 1, values, encoding=None, site="grad", name="weight", **common))
            stats.append(make_row(4 * step + 2, values, encoding=None, module_path="", **common))
            loss = np.float64(1 / (step + 1))
            stats.append(
                make_row(4 * step + 3, loss, encoding=None, module_path="", site="scalar", name="loss", **common)
            )
        writer.add_shard([tensors])
        writer.add_shard([stats], kind="stats")
        modules = [module("", "Net"), module("layers.0", "Linear"), module("layers.1", "Linear")]
        modules.append(module("layers.2", "Linear", compiled=True))
        modules.append(module("act", "ReLU", sites=["grad"], params=[]))
        writer.finish(
            roots=[{"name": "model", "class": "Net", "modules": modules}],
            ledger=ledger(48, pool_full=3),
            events=[{"kind": "compiled", "message": "values inside compiled modules are not recorded", "count": 1}],
        )
    return run


def on_a_terminal(*arguments: str, width: int = 200, is_plain: bool = False) -> str:
    """What a command writes to a terminal; plain is without colours and carriage returns."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {"TERM": "xterm-256color", "PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    child = subprocess.Popen(
        [sys.executable, "-m", "recorder", *arguments], stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    output, deadline_s = b"", time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if not select.select([own], [], [], 1)[0]:
            continue
        try:
            piece = os.read(own, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        output += piece
    os.close(own)
    child.wait(timeout=60)
    text = output.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r", "") if is_plain else text
