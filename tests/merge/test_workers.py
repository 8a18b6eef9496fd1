"""The same merge by any executor, in bounded memory, and by processes that may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from recorder.errors import WriteError
from recorder.merge import merge as merge_module
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter
from tests.rigs.merging import add_steps, assert_is_merge, content, make_small_run, units

ROOT = Path(__file__).parents[2]


class Inline(Executor):
    """Does the work when it is handed over."""

    def __init__(self) -> None:
        self.num_tasks = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_tasks += 1
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 700)


def test_every_executor_makes_the_same_run(tmp_path: Path) -> None:
    run = make_small_run(tmp_path / "run", steps=6)
    merge_run(open_run(run), tmp_path / "alone")
    inline = Inline()
    merge_run(open_run(run), tmp_path / "inline", executor=inline)
    with ThreadPoolExecutor(3) as threads:
        merge_run(open_run(run), tmp_path / "threads", executor=threads, num_workers=3)
    assert 2 < inline.num_tasks < len(units(tmp_path / "alone"))  # this thread does its share
    for name in ("inline", "threads"):
        assert units(tmp_path / name) == units(tmp_path / "alone")
        assert content(open_run(tmp_path / name)) == content(open_run(tmp_path / "alone"))
        assert_is_merge(tmp_path / name, run)


def test_processes_make_the_same_run(tmp_path: Path) -> None:
    """Units are planned here and built by processes that know nothing of this one's settings."""
    run, done = make_small_run(tmp_path / "run", steps=6), list[int]()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        report = merge_run(open_run(run), tmp_path / "out", executor=executor, progress=remembered(done))
    assert report.num_units > 2
    assert sum(done) == report.merged_bytes
    assert_is_merge(tmp_path / "out", run)


def remembered(done: list[int]) -> Callable[[str, int], Any]:
    @contextmanager
    def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        yield done.append

    return progress


def test_a_worker_that_dies_is_one_error_and_the_merge_goes_on_later(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=6), tmp_path / "out"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        executor.submit(os.getpid).result()
        executor.submit(_die)
        with pytest.raises(WriteError, match=r"the merge stopped \(.*terminated abruptly.*same command again"):
            merge_run(open_run(run), out, executor=executor)
    merge_run(open_run(run), out)
    assert_is_merge(out, run)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_in_a_worker_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = make_small_run(tmp_path / "run", steps=6), tmp_path / "out"
    build, calls = merge_module._build, []

    def failing(builder: Any, output: Any, unit: Any) -> None:
        calls.append(unit.name)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        build(builder, output, unit)

    monkeypatch.setattr(merge_module, "_build", failing)
    with ThreadPoolExecutor(1) as executor, pytest.raises(WriteError, match="No space left"):
        merge_run(open_run(run), out, executor=executor)
    assert len(calls) < len(open_run(run).steps)
    monkeypatch.setattr(merge_module, "_build", build)
    assert merge_run(open_run(run), out).num_kept_units >= 1
    assert_is_merge(out, run)


def test_a_run_that_grows_while_it_is_merged_is_merged_as_it_was(tmp_path: Path) -> None:
    """A worker that opens it later finds more rows in a unit than planned; it is built as it was first seen."""
    run, out = make_small_run(tmp_path / "run", steps=4), tmp_path / "out"
    before = open_run(run)
    expected = content(open_run(run))
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank, "late")
        add_steps(writer, [3], is_sealed=False)
        writer.finish(state="recording")
    with ThreadPoolExecutor(2) as executor:
        merge_run(before, out, executor=executor)
    assert content(open_run(out)) == expected


def test_a_merge_needs_no_more_memory_than_a_few_batches(tmp_path: Path) -> None:
    """The run is ten times larger than what the process may take for itself, beside its libraries."""
    code = (
        "import resource, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from recorder.merge.merge import merge_run\n"
        "from recorder.run.run import open_run\n"
        "from tests.rigs.merging import make_small_run\n"
        "warm = make_small_run(Path(sys.argv[2]) / 'warm')\n"
        "merge_run(open_run(warm), Path(sys.argv[2]) / 'warm-out')\n"
        "fields = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)\n"
        "limit = int(fields['VmData'].split()[0]) * 1024 + (int(sys.argv[3]) << 20)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "merge_run(open_run(sys.argv[1]), Path(sys.argv[2]) / 'out')\n"
    )
    run, num_bytes = make_large_run(tmp_path / "run", 330 << 20)
    allowed_mb = 32
    assert num_bytes > 10 * allowed_mb << 20
    command = [sys.executable, "-c", code, str(run), str(tmp_path), str(allowed_mb)]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "out").num_rows == open_run(run).num_rows // 2


def make_large_run(path: Path, num_bytes: int) -> tuple[Path, int]:
    """Two ranks with replicas of a parameter at each step; returns the bytes of its payloads."""
    import numpy as np

    from tests.rigs.handmade import make_row, make_run
    from tests.rigs.merging import roots

    make_run(path)
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    steps = num_bytes // (2 * values.nbytes) + 1
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank)
        common: dict[str, Any] = {"rank": rank, "micro_step": None, "phase": "optimizer", "site": "param"}
        row = make_row(0, values, name="weight", **common)
        for first in range(0, steps, 16):
            batches = [[row | {"seq": step, "step": step}] for step in range(first, min(first + 16, steps))]
            writer.add_shard(batches)
        writer.finish(roots=roots())
    return path, 2 * steps * values.nbytes
