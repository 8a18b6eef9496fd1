"""Writes statistics, histograms and pictures of a run as files for TensorBoard or Weights & Biases.

The packages of these two programs write the files. They are imported only for such an export. The export contains only
what was recorded: histograms keep their bins, and a number that was not recorded is left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import LookupFailedError, RunError, UnsupportedError, not_installed
from ...numerics.distributions import histogram_of_row
from ...numerics.dtypes import as_array
from ...numerics.histogram import Histogram
from ...run.notes import MissingRanks
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from ...run.step_ranges import Mapper, map_serially
from .export import Exported
from .files import published_folder
from .tensors import NAMING, ROOT, Tensors, as_level, unusual_levels

BOARDS = ("tensorboard", "wandb")
MAX_RANKS = 64
"""The most ranks that are written; each rank becomes a run of its own on the board."""
_STATISTICS = ("mean", "std", "absmax", "l2")
_COUNTS = ("nan_count", "inf_count")
_MAX_TENSOR_BYTES = 64 << 20
"""The largest size, in bytes, of a tensor that is drawn as a picture."""
_MAX_TILES, _LEAST_SIDE, _MAX_SIDE, _GAP = 16, 3, 512, 1
"""The most tiles of a picture; in pixels, the smallest and largest side of a tile, and the gap between two tiles."""
_MAX_BUCKETS = 512
"""The most buckets of a histogram that Weights & Biases accepts."""
_COLUMNS = tuple(dict.fromkeys((*NAMING, *_STATISTICS, *_COUNTS, "zero_count", "histogram", "time_ns", "note")))

Picture = npt.NDArray[np.uint8]
Step = Mapping[str, "float | Histogram | Picture"]


Add = Callable[[int, float, Step], None]
"""A function that writes a step, the time in seconds and the values to a run on the board. Steps come in order."""


class BoardExport:
    """A planned export to TensorBoard or W&B, which `write` carries out."""

    def __init__(
        self, run: Run, to: str, selection: Selection, options: GlobalOptions, *, payload: bool = False,
        mapper: Mapper = map_serially,
    ) -> None:  # fmt: skip
        """Find the ranks to write.

        Raises LookupFailedError if there are too many ranks, or the selection can match nothing, and UnsupportedError
        if the package that writes the board's files is not installed.
        """
        if payload:
            raise LookupFailedError(f"payload is for parquet: leave it out of an export to {to}")
        self._board_of = _OPENERS[to]()
        self._run, self._selection, self._options, self._mapper = run, selection, options, mapper
        self.to = to
        Tensors(run, selection, options, mapper)  # `check` raises an error for a selection that can match nothing
        self._ranks: list[int | None] = (
            [None] if options.across_ranks else [*selection.chosen("rank", run.ranks)] or [None]
        )
        if len(self._ranks) > MAX_RANKS:
            raise LookupFailedError(
                f"--to {to} writes a run for each rank, and {len(self._ranks)} are more than {MAX_RANKS}: choose some "
                "with --rank, or --global for the whole model"
            )
        self.total_bytes = 0
        """0, because the size is not known in advance."""

    def write(self, path: Path, *, force: bool = False, report: Callable[[int], None] = lambda done: None) -> Exported:
        """Write the folder. It gets its final name once it is complete."""
        if force:
            raise LookupFailedError(f"--force replaces files only, and {self.to} is a folder: remove the folder first")
        partial, problems, notes, num_values, is_damaged = MissingRanks(), list[str](), list[str](), 0, False
        with published_folder(path) as folder:
            for rank in self._ranks:
                selection = self._selection if rank is None else replace(self._selection, rank=rank)
                tensors = Tensors(self._run, selection, self._options, self._mapper)
                name = self._run.name if rank is None else f"{self._run.name}/rank={rank:05}"
                pictures = self._pictures(selection, notes)
                with self._board_of(folder, name, self._run) as add:
                    for step, time_s, values in _steps(tensors, pictures):
                        add(step, time_s, values)
                        num_values += len(values)
                partial.join(tensors.missing)
                problems += tensors.problems.texts()
                is_damaged |= tensors.is_damaged
            if not num_values:
                raise tensors.explain_nothing()
        file_bytes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        notes += partial.notes(is_taken=self._options.partial)
        is_whole = not (partial or is_damaged or self._run.problems)
        return Exported(path, num_values, sum(file_bytes), notes, problems, is_whole)

    def _pictures(self, selection: Selection, notes: list[str]) -> dict[int, dict[str, Picture]]:
        tensors = Tensors(self._run, selection, self._options, self._mapper)
        try:
            entries = tensors.entries()
        except LookupFailedError:
            return {}  # the rank has no selected row with values
        chosen = [
            one
            for one in entries
            if is_picture(str(one.naming["site"]), one.shape) and one.payload_bytes <= _MAX_TENSOR_BYTES
        ]
        pictures: dict[int, dict[str, Picture]] = {}
        spans_of = tensors.in_turn(chosen)
        for entry in chosen:
            try:
                data = np.concatenate([span.data for span in spans_of(entry)])
                array = as_array(data, entry.dtype, entry.shape).astype(np.float32)
            except RunError as error:
                notes.append(f"left out: the picture of {entry.name}, which cannot be read: {error}")
                continue
            made = picture_of(str(entry.naming["site"]), array)
            if made is not None:
                pictures.setdefault(int(entry.naming["step"]), {})[_tag(entry.naming)] = made
        return pictures


def _steps(tensors: Tensors, pictures: Mapping[int, Mapping[str, Picture]]) -> Iterator[tuple[int, float, Step]]:
    for chosen in tensors.chosen(_COLUMNS):
        for step, rows in groupby(chosen.table.sort_by("step").to_pylist(), lambda row: row["step"]):
            values: dict[str, float | Histogram | Picture] = {}
            for row in rows:
                time_ns = row["time_ns"]
                _take(row, values)
            yield step, time_ns / 1e9, {**values, **pictures.get(step, {})}


def _take(row: Mapping[str, Any], values: dict[str, float | Histogram | Picture]) -> None:
    tag = _tag(row)
    if row["site"] == "scalar":
        if row["mean"] is not None:
            values[tag] = row["mean"]
        elif row["nan_count"] or row["inf_count"]:
            values[tag] = float("nan") if row["nan_count"] else float("inf")
        return
    values |= {f"{tag}/{name}": row[name] for name in _STATISTICS if row[name] is not None}
    values |= {f"{tag}/{name}": float(row[name]) for name in _COUNTS if row[name]}
    if (histogram := histogram_of_row(row)) is not None:  # `recorder verify` reports a damaged one
        values[f"{tag}/histogram"] = histogram


def _tag(row: Mapping[str, Any]) -> str:
    """Return a value's tag: ``site/module/name``, and then ``key=value`` for each column with an unusual value."""
    path = as_level(row["module_path"]) or ("" if row["site"] == "scalar" else ROOT)
    levels = [as_level(row["site"]), path, as_level(row["name"])]
    return "/".join([*filter(None, levels), *unusual_levels({**row, "rank": None})])


def is_picture(site: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this site and shape can be drawn."""
    if len(shape) != 4 or not all(shape):
        return False
    return site in ("input", "output", "param") and all(_LEAST_SIDE <= side <= _MAX_SIDE for side in shape[2:])


def picture_of(site: str, array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8] | None:
    """Draw a tensor with four dims as a picture of tiles. Return None if no element is finite.

    The picture has shape (height, width, 3). Each tile is a filter of a parameter, or a channel of the first sample of
    another value. Black is the smallest element.
    """
    if array.shape[1] == 3:
        tiles = array[: _MAX_TILES if site == "param" else 1].transpose(0, 2, 3, 1)
    else:
        gray = array[:_MAX_TILES, 0] if site == "param" else array[0, :_MAX_TILES]
        tiles = np.repeat(gray[..., None], 3, axis=3)
    finite = tiles[np.isfinite(tiles)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    scaled = (np.nan_to_num(tiles.astype(np.float64), nan=low, posinf=high, neginf=low) - low) / max(high - low, 1e-300)
    pixels = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
    num, height, width, _ = pixels.shape
    across = int(np.ceil(np.sqrt(num)))
    down = -(-num // across)
    sheet = np.full((down * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP, 3), 128, np.uint8)
    for index, tile in enumerate(pixels):
        y, x = index // across * (height + _GAP), index % across * (width + _GAP)
        sheet[y : y + height, x : x + width] = tile
    return sheet


Opener = Callable[[Path, str, Run], AbstractContextManager[Add]]
"""A function that opens a run on the board. It takes the folder, the name on the board, and the recorded run."""


def _tensorboard() -> Opener:
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

    def as_summary(tag: str, value: Any) -> Any:
        if isinstance(value, Histogram):
            edges, counts = value.buckets()
            rows = np.column_stack((edges[:-1], edges[1:], counts)).astype(np.float64)
            metadata = create_summary_metadata(display_name="", description="Exactly the recorded bins.")
            return Summary.Value(tag=tag, tensor=make_tensor_proto(rows), metadata=metadata)
        if isinstance(value, np.ndarray):
            height, width, _ = value.shape
            file = io.BytesIO()
            Image.fromarray(value).save(file, "png")
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
            return Summary.Value(tag=tag, image=image)
        with np.errstate(over="ignore"):
            return Summary.Value(tag=tag, simple_value=float(np.float32(value)))

    @contextmanager
    def open_folder(folder: Path, name: str, run: Run) -> Iterator[Add]:
        with closing(EventFileWriter(str(folder / name))) as writer:

            def add(step: int, time_s: float, values: Step) -> None:
                summary = Summary(value=[as_summary(tag, value) for tag, value in values.items()])
                writer.add_event(Event(wall_time=time_s, step=step, summary=summary))

            yield add

    return open_folder


def _wandb() -> Opener:
    """Return a function that opens an offline run of Weights & Biases, which ``wandb sync`` can send.

    Nothing is sent anywhere here.
    """
    try:
        import wandb
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(not_installed("--to wandb", "wandb", "wandb")) from error

    def as_value(value: Any) -> Any:
        if isinstance(value, Histogram):
            edges, counts = value.buckets(_MAX_BUCKETS)
            return wandb.Histogram(np_histogram=(counts.tolist(), edges.tolist()))
        return wandb.Image(Image.fromarray(value)) if isinstance(value, np.ndarray) else value

    @contextmanager
    def open_run(folder: Path, name: str, run: Run) -> Iterator[Add]:
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
            x_disable_meta=True,
        )  # fmt: skip
        started = wandb.init(
            mode="offline", dir=str(folder), project="recorder", group=run.name, name=name, reinit="create_new",
            config={"run_id": run.run_id, "world_size": run.world_size}, settings=settings,
        )  # fmt: skip

        def add(step: int, time_s: float, values: Step) -> None:
            logged = {tag: as_value(value) for tag, value in values.items()}
            started.log(logged | {"_timestamp": time_s}, step=step)

        try:
            yield add
        finally:
            started.finish()
            for link in (folder / "wandb").iterdir():
                if link.is_symlink():  # W&B makes a link to the newest run, which is useless for several runs
                    link.unlink()

    return open_run


_OPENERS: dict[str, Callable[[], Opener]] = {"tensorboard": _tensorboard, "wandb": _wandb}
