"""The map or the loss of a run as a PNG that needs no browser, drawn by Pillow. Never reads a payload."""

from __future__ import annotations

from pathlib import Path

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
_WIDTH, _GUTTER, _ROW, _BAND, _MARGIN, _MAX_ROWS, _MAX_PATH, _MAX_DECADES = 1100, 300, 16, 160, 30, 800, 46, 8.0
_VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_BAD, _HOLE, _LINE = (230, 0, 122), (236, 238, 241), (36, 87, 197)
_Drawn = tuple[str, list[str], npt.NDArray[np.uint8]]
"""A title, the names of the rows, and the pixels of the rows, all of which are equally high."""


def write_picture(run: Run, path: Path, panel: str, *, force: bool = False) -> int:
    """Write the panel ``map`` or ``loss`` of a run as PNG, and return its size in bytes. `force` replaces a file.

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
    draw_rows, cube = (_map, collected.cube) if panel == "map" else (_loss, collected.scalar_cube)
    if not (steps := cube.first_steps):
        raise LookupFailedError(f"{run.name} has no values for --png {panel}")
    at = np.linspace(steps[0] - 0.5, steps[-1] + 0.5, _WIDTH)
    title, names, cells = draw_rows(collected, at)
    image = Image.new("RGB", (_GUTTER + _WIDTH + _MARGIN, len(cells) + 2 * _MARGIN), "white")
    image.paste(Image.fromarray(cells), (_GUTTER, _MARGIN))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)
    texts = [(8.0, _MARGIN / 2, "lm", f"{shortened(run.name, 60)}: {title}, red NaN or infinite")]
    for row, name in enumerate(names):
        name = name if len(name) < _MAX_PATH else f"…{name[-_MAX_PATH:]}"
        texts.append((_GUTTER - 8, _MARGIN + len(cells) / len(names) * (row + 0.5), "rm", name))
    for step in np.unique(np.linspace(steps[0], steps[-1], 8).round()).tolist():
        x = (step - at[0]) / (at[-1] - at[0]) * _WIDTH
        texts.append((_GUTTER + x, _MARGIN * 1.5 + len(cells), "mm", f"step {step:.0f}"))
    for x, y, anchor, text in texts:
        draw.text((x, y), text, fill="black", font=font, anchor=anchor)
    with published_file(path, force=force) as file:
        image.save(file, "PNG")
        return file.tell()


def _map(collected: StatisticsBlocks, at: npt.NDArray[np.float64]) -> _Drawn:
    known = [(key.site, key.mode) for key in collected.series]
    kind = next(((site, "train") for site in _SITES if (site, "train") in known), known[0] if known else None)
    chosen = [index for index, one in enumerate(known) if one == kind][:_MAX_ROWS]
    statistic = "l2" if collected.steps_known()["probed"] and "l2" in collected.names else collected.names[0]
    steps = np.array(collected.cube.first_steps)
    cube = collected.cube.values
    values, num_bad = (
        np.fmax.reduce(np.abs([cube[name][chosen] for name in names]), axis=(0, 2))
        for names in ((statistic,), ("nan_count", "inf_count"))
    )
    with np.errstate(divide="ignore"):
        sizes = np.log10(values.astype(np.float64))
    high = float(sizes[np.isfinite(sizes)].max(initial=-_MAX_DECADES))
    low = float(sizes[np.isfinite(sizes)].min(initial=high, where=sizes[np.isfinite(sizes)] > high - _MAX_DECADES))
    share = (np.clip(sizes, low, high) - low) / max(high - low, 1e-9)
    palette = np.array([[int(color[at : at + 2], 16) for at in (0, 2, 4)] for color in _VIRIDIS], np.float64)
    colors = np.stack([np.interp(share, np.linspace(0, 1, len(palette)), one) for one in palette.T], axis=-1)
    colors[np.isnan(share)], colors[num_bad > 0] = _HOLE, _BAD
    cells = colors.astype(np.uint8)[:, np.searchsorted((steps[1:] + steps[:-1]) / 2, at)].repeat(_ROW, axis=0)
    cells[_ROW - 1 :: _ROW] = 255
    title = f"{statistic} of {counted(len(chosen), 'value')} of {kind[0] if kind else ''}"
    paths = [collected.series[index].module_path or MODEL for index in chosen]
    return f"{title}; dark {number(10**low)}, bright {number(10**high)}", paths, cells


def _loss(collected: StatisticsBlocks, at: npt.NDArray[np.float64]) -> _Drawn:
    cube, lane = collected.scalar_cube, int(collected.lanes.has_spread and not collected.lanes.has_global)
    names, cells = [], np.full((len(collected.scalars), _BAND, _WIDTH, 3), 255, np.uint8)
    steps = np.array(cube.first_steps)
    for index, (key, pixels) in enumerate(zip(collected.scalars, cells, strict=True)):
        values, *counts = (cube.values[name][index, lane] for name in ("mean", "nan_count", "inf_count"))
        low, high, known = np.fmin.reduce(values), np.fmax.reduce(values), np.isfinite(values)
        names.append(f"{key.name}: {low:.4g} to {high:.4g}")
        if known.any():
            parts = (high - values[known]) / (high - low if high > low else 1)
            y = 10 + (_BAND - 20) * np.interp(at, steps[known], parts, np.nan, np.nan)
            rise = np.nan_to_num(np.abs(np.gradient(y)))
            pixels[np.abs(np.arange(_BAND)[:, None] - y) <= 1 + rise / 2] = _LINE
        bars = np.searchsorted(at, steps[np.fmax(*counts) > 0])[:, None] + [-1, 0, 1]
        pixels[:, np.clip(bars, 0, _WIDTH - 1)] = _BAD
        pixels[-1] = _HOLE
    return "the numbers of a step", names, cells.reshape(-1, _WIDTH, 3)
