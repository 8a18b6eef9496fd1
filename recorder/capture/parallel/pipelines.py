"""Pipeline parallel stages: finds the stage and the micro-batch of a module's call.

`torch.distributed.pipelining` has no hooks, so the stack tells: it is looked at once for each call of a root, and only
where the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from ...system.processes import loaded

_MODULE = "torch.distributed.pipelining.stage"

Pipeline = dict[str, int]
"""``stage``, from 0, and ``num_stages``."""


class StageCall(NamedTuple):
    """A call of a stage's module."""

    pipeline: Pipeline
    micro_batch: int | None
    """None where the call is no part of training: a stage may run once more, to learn the shapes that it will send."""


def is_whole_pipe(module: object) -> bool:
    """Whether a module is the pipe of all stages, which nobody calls: each rank runs its own stages."""
    kind = loaded("torch.distributed.pipelining", "Pipe")
    return kind is not None and isinstance(module, kind)


def stage_call() -> StageCall | None:
    """Return the call of a stage that is under way on this thread; None where there is none."""
    for frame, stage in _stage_frames():
        pipeline = {"stage": int(stage.stage_index), "num_stages": int(stage.num_stages)}
        if frame.f_code.co_name == "forward_one_chunk":
            return StageCall(pipeline, int(frame.f_locals["fwd_chunk_id"]))
        if "infer" in frame.f_code.co_name:
            return StageCall(pipeline, None)
    return None


def micro_batch_of_backward() -> int | None:
    """Return the micro-batch whose backward runs on this thread; None where no stage's backward runs on it."""
    for frame, _ in _stage_frames():
        if "bwd_chunk_id" in frame.f_code.co_varnames:
            return int(frame.f_locals["bwd_chunk_id"])
    return None


def _stage_frames() -> Iterator[tuple[FrameType, Any]]:
    kind = loaded(_MODULE, "_PipelineStageBase")
    frame = sys._getframe(2) if kind is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE and isinstance(stage := frame.f_locals.get("self"), kind):
            yield frame, stage
        frame = frame.f_back
