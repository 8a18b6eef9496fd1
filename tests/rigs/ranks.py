"""Ranks of a script, as torchrun launches them, but forked from one process that has imported everything once.

The server of `jobs.ranks`: it forks each job that a line of its standard input asks for. Its argument is a socket, at
which `launcher.py` asks for a job in its own place, with its folder, its variables and its outputs.

For scripts that record by `recorder.attach`, where the launch is not what is tested. A rank that fails ends the others.
Under `TESTS_RECORDER=1` each rank starts to record once it is forked, as it does with `RECORDER=1` at the end of
`import torch`, which would be before all forks here. A job of `launcher.py` records under `RECORDER=1`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch._dynamo  # noqa: F401  # by the first optimizer, and then before all forks
from torch._C._distributed_c10d import TCPStore

import recorder.lifecycle.recorder
import recorder.write.writer  # noqa: F401  # the same

from .forking import fork


def run(script: str, rank: int) -> None:
    """One rank."""
    np.random.seed()  # a state of its own, as after an import; Python's begins anew in each fork
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)})
    if "TESTS_RECORDER" in os.environ:
        if flag := os.environ["TESTS_RECORDER"]:
            os.environ["RECORDER"] = flag
        importlib.import_module("recorder_autoload").start()  # which has no types
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
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


def settle(folder: str, outputs: tuple[int, int], environment: dict[str, str]) -> None:
    """Give a forked process a session, a folder, two outputs and an environment of its own."""
    os.setsid()
    os.chdir(folder)
    for opened, target in ((os.open(os.devnull, os.O_RDONLY), 0), (outputs[0], 1), (outputs[1], 2)):
        os.dup2(opened, target)
    for opened in {*outputs}:
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)


def start(words: list[str], folder: str, outputs: tuple[int, int], environment: dict[str, str]) -> None:
    """One job, in a process of its own: a number of ranks, a script and its arguments."""
    settle(folder, outputs, environment)
    size, *sys.argv = words
    if code := main(int(size), sys.argv[0]):
        sys.exit(code)


def answer(asked: Any) -> int | None:
    """Start a job and return its process id; or return the exit code of a job, None while it runs.

    A job of no ranks is a program as `python` runs it. It returns from here with 0, so that it ends as others do.
    """
    if isinstance(asked, int):
        pid, status = os.waitpid(asked, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    words, folder, environment = asked["words"], asked["folder"], asked["environment"]
    output = os.open(asked["output"], os.O_WRONLY | os.O_APPEND)
    if words[0] != "0":
        pid = fork(functools.partial(start, words, folder, (output, output), environment))
    elif (pid := os.fork()) == 0:
        settle(folder, (output, output), environment)
        _, *sys.argv = words
        return 0
    os.close(output)
    return pid


def launch(client: socket.socket) -> int:
    """Start the job that `launcher.py` asks for, and return its process id."""
    message, outputs, _, _ = socket.recv_fds(client, 1 << 20, 2)
    words, folder, environment = json.loads(message)
    options = list(itertools.takewhile(lambda word: not word.endswith(".py"), words))
    words = [options[-1].rpartition("=")[2], *words[len(options) :]]
    environment["TESTS_RECORDER"] = environment.get("RECORDER", "")
    pid = fork(functools.partial(start, words, folder, (outputs[0], outputs[1]), environment))
    for opened in outputs:
        os.close(opened)
    return pid


def serve(path: str) -> bool:
    """Answer launchers, and lines of the standard input until it ends. True is returned in a program, to be run."""
    gc.freeze()
    jobs: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print(path, flush=True)
        while True:
            ready, _, _ = select.select([sys.stdin, listener, *jobs], [], [], 0.02 if jobs else None)
            if listener in ready:
                client, _ = listener.accept()
                jobs[client] = launch(client)
            if sys.stdin in ready:
                line = sys.stdin.readline()  # the next one comes after the answer
                if not line:
                    return False
                if (answered := answer(asked := json.loads(line))) == 0 and isinstance(asked, dict):
                    return True
                print(json.dumps(answered), flush=True)
            for client, pid in list(jobs.items()):
                if client in ready:  # the launcher was ended
                    with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                        os.killpg(pid, signal.SIGKILL)
                if (code := answer(pid)) is not None:
                    with client, contextlib.suppress(BrokenPipeError):
                        client.send(b"%d" % code)
                    del jobs[client]


if __name__ == "__main__" and serve(sys.argv[1]):
    sys.path[0] = str(Path(sys.argv[0]).parent)
    np.random.seed()
    importlib.import_module("recorder_autoload").start()
    runpy.run_path(sys.argv[0], run_name="__main__")
