"""What each command asks of a store, and what a daemon puts there: `python -m scripts.benchmarks store_requests`.

Trains two ranks, and prints a table of the commands. Then a daemon ships for a minute the run of eight ranks that show
themselves every second, as a node of a fleet does, and its puts are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recorder.format.rundir import STATUS, encode_status
from recorder.system.processes import own_process
from recorder.system.text import size
from scripts.benchmarks import parser_of
from tests.rigs.handmade import HandmadeWriter, make_run
from tests.rigs.jobs import succeeded, torchrun
from tests.rigs.server import BUCKET, StoreServer

_DEADLINE_S = 300
_NUM_RANKS = 8
_SHIPPED_S = 60
_COMMANDS = (
    "ls RUN",
    "show RUN",
    "show RUN 1.2",
    "top RUN",
    "doctor RUN",
    "first RUN",
    "stats RUN --by step,site --global",
    "export RUN --site grad -o grads.parquet",
    "export RUN --site output --module 1.2 --step 8 --rank 0 -o one.npz",
    "checkpoint RUN --to safetensors --what grad -o grads.safetensors",
    "diff RUN LOCAL",
    "merge RUN -o merged",
    "verify RUN",
)
_RULES = (
    "site=output,grad_output keep=stats; site=param,grad,buffer keep=stats,fingerprint; site=scalar;"
    "module='' site=input keep=stats,fingerprint; site=output,grad steps=pow2 keep=tensor"
)
"""Tensors at many steps, so that one of them is a small share."""


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser_of("store_requests", __doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        succeeded(
            torchrun(folder / "job", Path(__file__).with_name("store_train.py"), RECORDER="1", RECORDER_RULES=_RULES)
        )
        (run,) = (folder / "job" / "recordings").iterdir()
        run_bytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        num_objects = sum(path.is_file() for path in run.rglob("*"))
        server = StoreServer()
        try:
            url = server.upload(run, "runs/one")
            print(f"A run of two ranks: {num_objects} objects, {size(run_bytes)}\n")
            print("| command | LIST | HEAD | GET | bytes | share of the run |")
            print("|---|---|---|---|---|---|")
            for command in _COMMANDS:
                with server.counting() as counts:
                    _recorder(command.replace("RUN", url).replace("LOCAL", str(run)).split(), folder, server)
                numbers = " | ".join(str(counts[kind]) for kind in ("LIST", "HEAD", "GET"))
                share = counts.num_bytes / run_bytes
                print(f"| `{command}` | {numbers} | {size(counts.num_bytes)} | {share:.1%} |", flush=True)
            _ship(folder, server)
        finally:
            server.close()
    return 0


def _ship(folder: Path, server: StoreServer) -> None:
    run = make_run(folder / "node" / "run-a", world_size=_NUM_RANKS)
    writers = [HandmadeWriter(run, rank) for rank in range(_NUM_RANKS)]
    for writer in writers:
        writer.finish(state="recording", **own_process())
    command = [sys.executable, "-m", "recorder", "daemon", f"--watch={run.parent}", f"--to=s3://{BUCKET}/fleet"]
    command += [f"--state={folder / 'state'}", "--listen="]
    env = server.environment(os.environ, folder)
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as daemon:
        for second in range(2 * _SHIPPED_S):
            for rank, writer in enumerate(writers):
                status = {"writer": writer.directory.name, "rank": rank, "attempt": 0, "state": "recording"}
                status |= {"interval_s": 1.0, "step": second, "time_ns": time.time_ns(), **own_process()}
                (writer.directory / STATUS).write_bytes(encode_status(status))
            time.sleep(1)
            if second == _SHIPPED_S - 1:  # the first minute has the puts of a beginning
                before = dict(server.requests)
        puts, lists, gets = (server.requests[kind] - before.get(kind, 0) for kind in ("PUT", "LIST", "GET"))
        daemon.terminate()
    print(f"\nA daemon over {_NUM_RANKS} ranks, in {_SHIPPED_S} s: {puts} PUT, {lists} LIST, {gets} GET", flush=True)


def _recorder(arguments: Sequence[str], folder: Path, server: StoreServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recorder", *arguments],
        cwd=folder,
        env=server.environment(os.environ, folder),
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    assert done.returncode in (0, 1), f"{arguments} ended with {done.returncode}: {done.stderr}"
