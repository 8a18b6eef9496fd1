"""Runs made for a measurement by the real writer, without a training: the writer, and what it says of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recorder.capture.staging.measure import measure
from recorder.records import Staged
from recorder.write.writer import Writer
from recorder.write.writer_directory import RunTarget
from tests.rigs.writer import settings_of_any_size


def gated_writer() -> threading.Event:
    """Let each writer of this process work only while the event that this returns is set; it is, to begin with."""
    gate = threading.Event()
    gate.set()
    turn = Writer._run_once

    def gated(writer: Writer) -> None:
        gate.wait(60.0)
        turn(writer)

    Writer._run_once = gated  # type: ignore[assignment,method-assign]
    return gate


@contextmanager
def writing(
    run: Path, rank: int = 0, world_size: int = 1, **settings: Any
) -> Iterator[tuple[Writer, Callable[..., int]]]:
    """A writer of one rank, and what puts a record with the next number; complete when it is left."""
    observed = 0
    target = RunTarget(run_dir=run, run_manifest=run_manifest(world_size), rank=rank, attempt=0)
    writer = Writer(
        settings=settings_of_any_size(**{"max_bytes": 1 << 50, "direct_io": "off", **settings}),
        measure=measure,
        observed=lambda: observed,
        resolve_dir=lambda: target,
        poll=lambda: None,
    )
    writer.set_manifest(writer_manifest(rank, world_size))
    writer.start()

    def put(record: Staged) -> int:
        nonlocal observed
        record = record._replace(seq=observed)
        observed += record.num_parts
        writer.put(record)
        return observed

    try:
        yield writer, put
    finally:
        report = writer.close(600.0)
    assert report.is_complete, report


def run_manifest(world_size: int) -> dict[str, Any]:
    return {
        "format": "recorder", "version": [1, 0], "run_id": "bench", "world_size": world_size, "created_ns": 1,
    }  # fmt: skip


def writer_manifest(rank: int, world_size: int) -> dict[str, Any]:
    parallel = {"kind": "fsdp2", "ranks": list(range(world_size))}
    roots = [{"name": "model", "class": "Bench", "modules": [], "data_parallel": parallel}]
    return {
        "run_id": "bench", "rank": rank, "local_rank": rank, "world_size": world_size, "host": "bench", "pid": 0,
        "attempt": 0, "started_ns": 1, "step_source": "optimizer", "roots": roots, "rules": [], "events": [],
    }  # fmt: skip
