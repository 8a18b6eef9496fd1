"""Files of events that TensorBoard opens, written with its own package. Loaded where they are asked for."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import UnsupportedError, not_installed
from ....numerics.histogram import Histogram
from ....run.run import Run

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from PIL import Image
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto
except ImportError as error:
    raise UnsupportedError(not_installed("--to tensorboard", "tensorboard", "tensorboard")) from error


@contextmanager
def open_board(folder: Path, name: str, run: Run) -> Iterator[_Events]:
    """A run of TensorBoard: a folder of its own, and in it one file of events."""
    events = _Events(folder / name)
    try:
        yield events
    finally:
        events.close()


class _Events:
    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def add(self, step: int, time_s: float, values: Any) -> None:
        """Write what there is of a step."""
        made = [_value(tag, value) for tag, value in values.items()]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=made)))

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


def _value(tag: str, value: Any) -> Any:
    if isinstance(value, Histogram):
        edges, counts = value.buckets()
        rows = np.column_stack((edges[:-1], edges[1:], counts)).astype(np.float64)
        metadata = create_summary_metadata(display_name="", description="The very bins that were recorded.")
        return Summary.Value(tag=tag, tensor=make_tensor_proto(rows), metadata=metadata)
    if isinstance(value, np.ndarray):
        height, width, _ = value.shape
        file = io.BytesIO()
        Image.fromarray(value).save(file, "png")
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
        return Summary.Value(tag=tag, image=image)
    with np.errstate(over="ignore"):
        return Summary.Value(tag=tag, simple_value=float(np.float32(value)))
