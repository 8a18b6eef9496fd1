"""Fresh processes for measurements: a clean environment, a deadline, and their figures from their last line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a process, or the ranks of a job together, ended."""

    results: list[dict[str, Any]]
    """The last line of each rank's output, which is JSON and has `end_s`, when its work was over."""
    drain_s: float
    """From the last result to the last end."""
    exit_cpu_s: float
    """CPU seconds of all ranks after their results."""
    peak_rss_bytes: int
    """Of all ranks together."""
    said: str
    """The end of what they said on stderr."""


def progress(text: str) -> None:
    """One line on stderr: in place on a terminal, else one after the other."""
    is_terminal = sys.stderr.isatty()
    print(f"\r{text:79.79}" if is_terminal else text, end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)


def clean_env(**more: str) -> dict[str, str]:
    """The caller's environment without its settings of the recorder."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RECORDER")} | more


def run_fresh(
    module: str, arguments: Sequence[str], env: Mapping[str, str], *, num_ranks: int = 1, timeout_s: float = 900.0
) -> Ended:
    """Run `python -m module` once, or as the ranks of a job on this machine; SystemExit where one fails.

    The ranks find each other by a file in their working directory, whose name is in `BENCH_STORE`.
    """
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder, ExitStack() as files:
        outputs: list[tuple[IO[bytes], IO[bytes]]] = []
        processes: list[Popen[bytes]] = []
        for rank in range(num_ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            more = {**of_rank, "BENCH_STORE": f"{folder}/store"} if num_ranks > 1 else {}
            pair = [files.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2)]
            outputs.append((pair[0], pair[1]))
            processes.append(Popen(command, cwd=ROOT, env={**env, **more}, stdout=pair[0], stderr=pair[1]))
        until_s = time.monotonic() + timeout_s
        ends = []
        try:
            for process, (_, stderr) in zip(processes, outputs, strict=True):
                ends.append(_wait(process, until_s))
                if process.returncode != 0:
                    sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{_text(stderr)[-4000:]}")
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    process.wait()
        results: list[dict[str, Any]] = [json.loads(_text(stdout).splitlines()[-1]) for stdout, _ in outputs]
        said = "".join(_text(stderr)[-4000:] for _, stderr in outputs)
    return Ended(
        results,
        drain_s=max(end[0] for end in ends) - max(result["end_s"] for result in results),
        exit_cpu_s=sum(end[1] for end in ends) - sum(result.get("end_cpu_s", 0.0) for result in results),
        peak_rss_bytes=sum(end[2] for end in ends),
        said=said,
    )


def _wait(process: Popen[bytes], until_s: float) -> tuple[float, float, int]:
    """When it was seen to have ended (seconds since 1970), its CPU seconds and its peak memory."""
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return time.time(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        if time.monotonic() > until_s:
            process.kill()
            process.wait()
            sys.exit(f"{process.args!r} took too long and was ended")
        time.sleep(0.005)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
