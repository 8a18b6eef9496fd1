"""The map and the loss of a run as one PNG, for a terminal, a script or a mail: no browser is needed, Pillow draws.

It shows what the page shows first: the norm or magnitude of each output, or of what comes next in `_SITES` where no
output was recorded, module by module over steps to scale. Never reads a payload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analyze.export.files import published_file
from ..errors import LookupFailedError, not_installed
from ..run.run import Run
from ..system.text import counted, number, shortened
from .axes import Axes, probe_values, step_rows
from .statistics import StatisticsBlocks, check_statistics
from .top import MODEL

_SITES = ("output", "grad_output", "param", "grad")
_WIDTH, _GUTTER, _ROW, _LOSS, _HEAD, _FOOT = 1400, 300, 16, 110, 44, 30
_MAX_ROWS = 800
_MAX_DECADES = 8.0
_VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_BAD, _HOLE, _DIM = (230, 0, 122), (236, 238, 241), (98, 107, 118)


def write_picture(run: Run, path: Path, *, force: bool = False) -> int:
    """Write the map of a run below its loss as PNG, and return its size in bytes. `force` replaces a file.

    LookupFailedError is raised if there is nothing to draw, and WriteError if the file exists or cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise LookupFailedError(not_installed("recorder report --png", "pillow", "png")) from None
    axes = Axes()
    with step_rows(run) as rows:
        for table in rows:
            axes.add(table)
        probe = probe_values(run, axes)
        collected = StatisticsBlocks(run, axes)
        collected.collect(rows, lambda num_rows: None)
        collected.add_probe(probe)
    check_statistics(run, axes, collected)
    known = {key.site for key in collected.series if key.mode == "train"}
    site = next((one for one in _SITES if one in known), "")
    statistic = "l2" if axes.is_probed and "l2" in collected.names else collected.names[0]
    chosen = [i for i, key in enumerate(collected.series) if (key.site, key.mode) == (site, "train")]
    chosen = sorted(chosen, key=lambda i: axes.index[collected.series[i]])[:_MAX_ROWS]
    losses = [(one, i) for i, one in enumerate(collected.scalars) if (one.name, one.mode) == ("loss", "train")]
    width, top = _WIDTH - _GUTTER, _HEAD + (_LOSS if losses else 0)
    image = Image.new("RGB", (_WIDTH + 20, top + _ROW * len(chosen) + _FOOT), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)

    def write(x: float, y: float, text: str, anchor: str = "lm", fill: tuple[int, int, int] = _DIM) -> None:
        draw.text((x, y), text, fill=fill, font=font, anchor=anchor)

    ends = collected.steps_known()["ends"]

    def pixels(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return _GUTTER + (steps - ends[0] + 0.5) / (ends[1] - ends[0] + 1) * width

    steps = np.array(collected.cube.first_steps, np.float64)
    at = ends[0] - 0.5 + (np.arange(width) + 0.5) / width * (ends[1] - ends[0] + 1)
    columns = np.searchsorted((steps[1:] + steps[:-1]) / 2, at)
    values, is_bad = (_of_ranks(collected, names)[chosen] for names in ((statistic,), ("nan_count", "inf_count")))
    sizes = np.log10(np.where(values > 0, values, np.nan))
    high = float(np.nanmax(sizes, initial=-_MAX_DECADES))
    low = max(float(np.nanmin(sizes, initial=high)), high - _MAX_DECADES)
    share = np.clip((np.where(values == 0, low, sizes) - low) / max(high - low, 1e-9), 0, 1)
    channels = np.array([[int(color[i : i + 2], 16) for i in (0, 2, 4)] for color in _VIRIDIS], float)
    marks = np.linspace(0, 1, len(channels))
    colors = np.stack([np.interp(share, marks, channel) for channel in channels.T], axis=-1)
    colors[np.isnan(share)], colors[is_bad > 0] = _HOLE, _BAD
    cells = np.repeat(colors[:, columns].astype(np.uint8), _ROW, axis=0)
    cells[_ROW - 1 :: _ROW] = 255
    image.paste(Image.fromarray(cells), (_GUTTER, top))
    for row, i in enumerate(chosen):
        name = collected.series[i].module_path or MODEL
        write(_GUTTER - 8, top + _ROW * (row + 0.5), name if len(name) < 46 else f"…{name[-44:]}", "rm")
    title = f"{shortened(run.name, 60)}: {statistic} of {site or 'nothing'}, {counted(len(chosen), 'value')}"
    write(8, 14, f"{title}; dark {number(10**low)}, bright {number(10**high)}, red NaN or infinite", fill=(0, 0, 0))
    for step in np.unique(np.linspace(ends[0], ends[1], 8).round()).tolist():
        write(pixels(step), top + _ROW * len(chosen) + 14, f"{step:.0f}", "mm")
    write(_GUTTER - 8, top + _ROW * len(chosen) + 14, "step", "rm")
    for _, i in losses[:1]:
        scalars = collected.scalar_cube
        losses_of = np.fmax.reduce(scalars.values["mean"][i, :, : len(scalars.first_steps)], axis=0)
        found = np.flatnonzero(~np.isnan(losses_of))
        least, most = float(losses_of[found].min(initial=np.inf)), float(losses_of[found].max(initial=-np.inf))
        x = pixels(np.array(scalars.first_steps, np.float64))
        y = _HEAD + (_LOSS - 20) * (1 - (losses_of - least) / ((most - least) or 1.0))
        draw.line([(x[index], y[index]) for index in found], fill=(0, 114, 178), width=2)
        for text, line in ((f"loss {number(most)}", _HEAD), (number(least), _HEAD + _LOSS - 20)):
            write(_GUTTER - 8, line, text, "rm")
    with published_file(path, force=force) as file:
        image.save(file, "PNG")
        return file.tell()


def _of_ranks(collected: StatisticsBlocks, names: tuple[str, ...]) -> Any:
    """Return the largest magnitude over ranks and names, by series and column; NaN where no rank has a number."""
    values = np.stack([collected.cube.values[name] for name in names])
    return np.fmax.reduce(np.abs(values).astype(np.float64), axis=(0, 2))
