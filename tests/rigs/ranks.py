"""Ranks of a script, as torchrun launches them, but forked from one process that has imported everything once.

    python -m tests.rigs.ranks 4 SCRIPT ARGUMENT...

Without arguments it is the server of `jobs.ranks`: it forks each job that a line of its standard input asks for.

For scripts that record by `recorder.attach`, where the launch is not what is tested. A rank that fails ends the others.
Under `TESTS_RECORDER=1` each rank starts to record once it is forked, as it does with `RECORDER=1` at the end of
`import torch`, which would be before all forks here.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # by the first optimizer, and then before all forks
from torch._C._distributed_c10d import TCPStore

import recorder.lifecycle.recorder
import recorder.write.writer  # noqa: F401  # the same

from .forking import fork


def run(script: str, rank: int) -> None:
    """One rank."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)})
    if "TESTS_RECORDER" in os.environ:
        os.environ["RECORDER"] = "1"
        importlib.import_module("recorder_autoload").start()  # which has no types
    runpy.run_path(script, run_name="__main__")
    atexit._run_exitfuncs()


def main(num_ranks: int, script: str) -> int:
    """The exit code: 1 where a rank failed."""
    sys.path[0] = str(Path(script).parent)
    if "TESTS_RECORDER" not in os.environ:
        runpy.run_path(script, run_name="imported")
    server = socket.create_server(("127.0.0.1", 0))
    size, port = str(num_ranks), server.getsockname()[1]
    os.environ.update({"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_RANK": "0"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    os.environ.update({"TORCHELASTIC_RUN_ID": str(uuid.uuid4()), "TORCHELASTIC_RESTART_COUNT": "0"})
    gc.freeze()  # an attach looks through all objects: not through those that were imported by now
    left = {fork(functools.partial(run, script, rank)) for rank in range(num_ranks)}
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    code = 0
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not code:
            code = 1
            for other in left:
                os.kill(other, signal.SIGKILL)
    del store
    return code


def start(words: list[str], folder: str, output: str, environment: dict[str, str]) -> None:
    """One job, in a process of its own: a session, a folder, an output, and the words of the command."""
    os.setsid()
    os.chdir(folder)
    for file, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_APPEND, (1, 2))):
        opened = os.open(file, flags)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    size, *sys.argv = words
    if code := main(int(size), sys.argv[0]):
        sys.exit(code)


def serve() -> None:
    """Start a job, and answer with its process id; or answer with the exit code of a job, None while it runs."""
    gc.freeze()
    for line in sys.stdin:
        asked: Any = json.loads(line)
        if isinstance(asked, int):
            pid, status = os.waitpid(asked, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        else:
            print(fork(functools.partial(start, **asked)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        _, size, *sys.argv = sys.argv
        sys.exit(main(int(size), sys.argv[0]))
    serve()
