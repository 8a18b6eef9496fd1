"""Draws panels of the page as a PNG, with Pillow and without a browser. Never reads a payload."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..analyze.check.check import check
from ..analyze.export.files import published_file
from ..errors import LookupFailedError, not_installed
from ..run.run import Run
from ..system.text import MODEL, counted, listed, number, shortened
from .axes import Axes, step_rows
from .statistics import StatisticsBlocks, check_statistics
from .top import first_nonfinite, told_by_check

_WIDTH, _GUTTER, _ROW, _BAND, _TOP, _BOTTOM, _RIGHT = 1100, 300, 16, 160, 50, 30, 30
_MAX_ROWS, _MAX_BANDS, _MAX_PATH, _MAX_LINE, _MAX_DECADES, _BAR, _MARK = 800, 40, 46, 36, 8.0, 160, 11
_VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_PALETTE = np.array([[int(color[at : at + 2], 16) for at in (0, 2, 4)] for color in _VIRIDIS], np.float64)
_BAD, _LATER, _HOLE, _LINE = (230, 0, 122), (247, 195, 223), (236, 238, 241), (36, 87, 197)
_Floats = npt.NDArray[np.float64]
_First = Mapping[str, Any] | None
"""The series, the step and the rank of the run's first value that is not finite. None if all values are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    title: str
    names: Sequence[str]
    """The names of the picture's rows, all of which have the same height."""
    pixels: npt.NDArray[np.uint8]
    scale: tuple[float, float] | None = None
    """The numbers that the darkest and the brightest colour of a map stand for."""
    kinds: Sequence[tuple[tuple[int, int, int], str]] = ()
    """The colours that stand for no number, such as the colour of NaN, each with its meaning."""
    first: tuple[float, float] | None = None
    """The position of the cross in pixels: the middle of the first cell with a nonfinite value."""
    ticks: Sequence[tuple[float, str]] = ()
    """The labels of the vertical axis, each after its distance from the top in pixels."""


def write_picture(run: Run, path: Path, panel: str, *, model: str | None = None, force: bool = False) -> int:
    """Write one of `PANELS` of a run as PNG. Return the file's size in bytes. `force` replaces an existing file.

    If the values of several models have equal names, only `model` is drawn, by default the first model by name. Raise
    LookupFailedError if there is nothing to draw, and WriteError if the file exists or cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise LookupFailedError(not_installed("recorder report --png", "pillow", "png")) from None
    axes = Axes()
    with step_rows(run) as rows:
        probe = axes.read(run, rows)
        models = [] if panel in _OF_ALL else axes.models_alike
        if model is not None and panel in _OF_ALL:
            raise LookupFailedError(f"--model {model}: --png {panel} shows all models together; leave out --model")
        if models or model is not None:
            if model not in (None, *models):
                raise LookupFailedError(
                    f"--model {model}: expected {listed(models) or 'nothing, as the names of values tell models apart'}"
                )
            model = model or models[0]
            axes = Axes(without={one for one in models if one != model})
            probe = axes.read(run, rows)
        collected = StatisticsBlocks(run, axes)
        collected.collect(rows, probe)
    check_statistics(run, axes, collected)
    first, last = collected.steps_known()["ends"]
    at = np.linspace(first - 0.5, last + 0.5, _WIDTH)
    first_bad = None
    if panel in _MARKED:
        first_bad = first_nonfinite(told_by_check(run, check(run).findings, run.name))
    drawn = PANELS[panel](collected, at, first_bad)
    if drawn is None:
        raise LookupFailedError(f"{run.name} has no values for --png {panel}; {_TO_RECORD[panel]}")
    height = len(drawn.pixels)
    image = Image.new("RGB", (_GUTTER + _WIDTH + _RIGHT, _TOP + height + _BOTTOM), "white")
    image.paste(Image.fromarray(drawn.pixels), (_GUTTER, _TOP))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(12)

    def write(x: float, y: float, text: str, anchor: str, fill: str | tuple[int, int, int] = "black") -> float:
        draw.text((x, y), text, fill=fill, font=font, anchor=anchor)
        return float(x + draw.textbbox((0, 0), text, font=font)[2])

    write(8, 14, f"{shortened(run.name, 60)}: {drawn.title}{f', of {model}' if model else ''}", "lm")
    x = float(_GUTTER)
    if drawn.scale is not None:
        x = write(x, 36, number(drawn.scale[0]), "lm") + 6
        bar = np.broadcast_to(_colors(np.linspace(0, 1, _BAR)), (10, _BAR, 3)).astype(np.uint8)
        image.paste(Image.fromarray(bar), (int(x), 31))
        x = write(int(x) + _BAR + 6, 36, number(drawn.scale[1]), "lm") + 24
    for color, text in drawn.kinds:
        draw.rectangle((x, 31, x + 15, 40), fill=color)
        x = write(x + 21, 36, text, "lm") + 18
    each = height / len(drawn.names)
    for row, name in enumerate(drawn.names):
        if drawn.ticks:
            write(8, _TOP + each * (row + 0.5), "\n".join(wrap(name, _MAX_LINE)), "lm")
        else:
            name = name if len(name) < _MAX_PATH else f"…{name[-_MAX_PATH:]}"
            write(_GUTTER - 8, _TOP + each * (row + 0.5), name, "rm")
    for y, text in drawn.ticks:
        write(_GUTTER - 8, _TOP + y, text, "rm")
    wide = draw.textlength(f"step {last}", font=font)
    most = min(10, last - first + 1, 1 + int(_WIDTH / 1.5 / wide))
    for step in _round_numbers(first, last, most) if last > first else [first]:
        x = _GUTTER + (step - at[0]) / (at[-1] - at[0]) * _WIDTH
        write(min(x, image.width - 2 - wide / 2), _TOP + height + 15, f"step {step:.0f}", "mm")
    if drawn.first is not None:
        left, y = np.clip(drawn.first[0] - _MARK / 2, 0, _WIDTH - _MARK) + _GUTTER, drawn.first[1] + _TOP
        draw.rectangle((left, y - _ROW / 2, left + _MARK, y + _ROW / 2 - 2), fill=_BAD)
        for up in (-3, 3):
            draw.line((left + 3, y - 1 - up, left + _MARK - 2, y - 1 + up), fill="white", width=2)
    with published_file(path, force=force) as file:
        image.save(file, "PNG")
        return file.tell()


def _colors(shares: _Floats) -> _Floats:
    return np.stack([np.interp(shares, np.linspace(0, 1, len(_PALETTE)), one) for one in _PALETTE.T], axis=-1)


def _heat(
    title: str, names: Sequence[str], steps: Sequence[int], at: _Floats, values: npt.NDArray[Any],
    is_bad: npt.NDArray[np.bool_], first: _First = None, first_row: int | None = None, hole: str = "not recorded",
) -> _Drawn:  # fmt: skip
    """Draw a row for each name, coloured by the logarithm of its values. `first_row` has the first nonfinite value."""
    with np.errstate(divide="ignore"):
        sizes = np.log10(values.astype(np.float64))
    high = float(sizes[np.isfinite(sizes)].max(initial=-_MAX_DECADES))
    low = float(sizes[np.isfinite(sizes)].min(initial=high, where=sizes[np.isfinite(sizes)] > high - _MAX_DECADES))
    share = (np.clip(sizes, low, high) - low) / max(high - low, 1e-9)
    colors = _colors(share)
    colors[np.isnan(share)], colors[is_bad] = _HOLE, _BAD if first is None else _LATER
    middles = (np.array(steps[1:]) + np.array(steps[:-1])) / 2
    cross, column = None, -1 if first is None else int(np.searchsorted(steps, first["step"], "right")) - 1
    if first_row is not None and column >= 0 and is_bad[first_row, column]:
        colors[first_row, column] = _BAD
        edges = np.interp([at[0], *middles, at[-1]], at, np.arange(_WIDTH))
        cross = float(edges[column : column + 2].mean()), (first_row + 0.5) * _ROW
    pixels = colors.astype(np.uint8)[:, np.searchsorted(middles, at)].repeat(_ROW, axis=0)
    pixels[_ROW - 1 :: _ROW] = 255
    kinds = [(_HOLE, hole)] if (np.isnan(share) & ~is_bad).any() else []
    if is_bad.any():
        later = [(_LATER, "after it" if cross else "NaN or infinite, after the first of the run")]
        bad = [(_BAD, "the first NaN or infinity" if cross else "NaN or infinite")] if cross or first is None else []
        kinds = bad + (later if first is not None else []) + kinds
    scale = (10**low, 10**high) if np.isfinite(sizes).any() else None
    return _Drawn(title=title, names=names, pixels=pixels, scale=scale, kinds=kinds, first=cross)


def _chosen(collected: StatisticsBlocks, sites: Sequence[str]) -> tuple[str, list[int]]:
    known = [(key.site, key.mode) for key in collected.series]
    kind = next(((site, "train") for site in sites if (site, "train") in known), None)
    chosen = [index for index, one in enumerate(known) if one == kind]
    return kind[0] if kind else "", _as_modules_run(collected, chosen)[:_MAX_ROWS]


def _as_modules_run(collected: StatisticsBlocks, chosen: Sequence[int]) -> list[int]:
    """Return series in the order of the page's rows: as modules ran, each container before what it contains."""
    firsts: dict[str, int] = {}
    for place_of, path in enumerate(collected.paths):
        for prefix in _prefixes(path):
            firsts.setdefault(prefix, place_of)

    def place(index: int) -> list[int]:
        return [firsts[prefix] for prefix in _prefixes(collected.series[index].module_path)]

    return sorted(chosen, key=place)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [""] + [".".join(parts[: end + 1]) for end in range(len(parts)) if path]


def _sizes(collected: StatisticsBlocks, statistic: str, chosen: Sequence[int], over: int) -> tuple[Any, Any]:
    """Return the largest magnitudes over series (`over` = 0) or over lanes (1), and a mask of nonfinite values."""
    cube = collected.cube.values
    values, num_bad = (
        np.fmax.reduce(np.abs([cube[name][chosen] for name in names]), axis=(0, over + 1))
        for names in ((statistic,), ("nan_count", "inf_count"))
    )
    return values[:, : len(collected.cube.first_steps)], num_bad[:, : len(collected.cube.first_steps)] > 0


def _statistic(collected: StatisticsBlocks) -> str:
    return "l2" if collected.steps_known()["probed"] and "l2" in collected.names else collected.names[0]


def _map(
    collected: StatisticsBlocks,
    at: _Floats,
    first: _First,
    *,
    sites: Sequence[str],
    modules: str = "",
    statistic: str = "",
) -> _Drawn | None:
    site, chosen = _chosen(collected, sites)
    chosen = [index for index in chosen if re.search(modules, collected.series[index].module_path)]
    if not chosen:
        return None
    statistic, keys = statistic or _statistic(collected), [collected.series[index] for index in chosen]
    row = None
    if first is not None and first["site"] == site:
        same = [key.module_path == first["module"] and key.name == first["name"] for key in keys]
        row = same.index(True) if any(same) else None
    title = f"{'load' if statistic == 'numel' else statistic} of {counted(len(chosen), 'value')} of {site}"
    names = [" ".join(filter(None, (key.module_path or MODEL, key.name))) for key in keys]
    sizes = _sizes(collected, statistic, chosen, over=1)
    return _heat(title, names, collected.cube.first_steps, at, *sizes, first, row)


def _updates(collected: StatisticsBlocks, at: _Floats, first: _First) -> _Drawn | None:
    own, sizes = collected.updates()
    if not own:
        return None
    chosen = _as_modules_run(collected, own)
    values = sizes[[own.index(index) for index in chosen]]
    keys = [collected.series[one] for one in chosen]
    names = [" ".join(filter(None, (key.module_path or MODEL, key.name))) for key in keys]
    title = f"step of the optimizer over the weight, of {counted(len(chosen), 'parameter')}"
    return _heat(title, names, collected.cube.first_steps, at, values, np.zeros(values.shape, np.bool_))


def _ranks(collected: StatisticsBlocks, at: _Floats, first: _First) -> _Drawn | None:
    site, chosen = _chosen(collected, (*([first["site"]] if first else ()), "grad", "grad_output", *_SITES))
    cube, lanes, ranks = collected.rank_steps, collected.lanes, collected.lanes.ranks
    if not chosen or len(ranks) < 2:
        return None
    if cube is not None:
        bins = cube.shape[1]
        rows, steps = [ranks[-(-one * len(ranks) // bins)] for one in range(bins)], cube.first_steps
        values, *bad = (np.fmax.reduce(cube.values[name], axis=0)[:, : len(steps)] for name in cube.values)
        values, is_bad = np.fmax(values, 1), np.fmax(*bad) > 0
        title = "quartile ranges from the median of the ranks, up to one is usual"
    else:
        own = [index for index, lane in enumerate(lanes.described) if lane["kind"] == "rank"]
        rows = [lanes.described[index]["rank"] for index in own]
        steps, statistic = collected.cube.first_steps, _statistic(collected)
        values, is_bad = (some[own] for some in _sizes(collected, statistic, chosen, over=0))
        title = f"largest {statistic} of {site} of each rank"
    row = None
    if first is not None and first["rank"] is not None and (cube is not None or first["site"] == site):
        row = int(np.searchsorted(rows, first["rank"], "right")) - 1
    return _heat(title, [f"rank {rank}" for rank in rows], steps, at, values, is_bad, first, row)


def _histograms(collected: StatisticsBlocks, at: _Floats, first: _First) -> _Drawn | None:
    block = collected.histograms.block("histograms")
    if block is None:
        return None
    data, key = block.data, collected.series[block.data["series"][0]]
    codes = block.arrays["codes"][0]
    steps = np.flatnonzero(codes.any(axis=1) | (block.arrays["nonfinite"][0] > 0))
    bins = np.flatnonzero(codes.any(axis=0))[::-1]
    shares = np.where(codes > 0, data["least"] ** (1 - (codes - 1.0) / (data["levels"] - 1)), np.nan)[
        np.ix_(steps, bins)
    ].T
    names = []
    for bin in (data["first"] + bins - data["zero"]).tolist():
        exponent = abs(bin) - 1 + data["lowest"]
        names.append(
            "0" if bin == 0 else f"{'-' if bin < 0 else ''}2^{exponent} to {'-' if bin < 0 else ''}2^{exponent + 1}"
        )
    title = f"share of the values of {key.module_path or MODEL} {key.site} by sign and power of two"
    bad = block.arrays["nonfinite"][0][steps] > 0
    is_bad = np.vstack([bad, np.zeros(shares.shape, np.bool_)]) if bad.any() else np.zeros(shares.shape, np.bool_)
    if bad.any():
        names, shares = ["not finite", *names], np.vstack([np.full(len(steps), np.nan), shares])
    return _heat(title, names, [data["steps"][one] for one in steps], at, shares, is_bad, hole="none")


def _numbers(collected: StatisticsBlocks, at: _Floats, first: _First, *, of_objectives: bool = False) -> _Drawn | None:
    cube, lanes, rows, known = collected.scalar_cube, collected.lanes.described, [], collected.steps_known()
    steps = np.array(cube.first_steps)
    for index, key in enumerate(collected.scalars):
        if key.name.startswith("objective.") is not of_objectives:
            continue
        of_lanes = cube.values["mean"][index, :, : len(steps)]
        lane = 1 if collected.lanes.has_spread and not collected.lanes.has_global else 0
        if np.isnan(of_lanes[lane]).all():
            lane = int((~np.isnan(of_lanes)).any(axis=1).argmax())  # the ranks' numbers cannot be combined into one
        is_bad = np.fmax(*(cube.values[name][index, lane, : len(steps)] for name in ("nan_count", "inf_count"))) > 0
        order = 0 if key.name in known["losses"] else _order(key.name, key.mode)
        name = ", ".join(filter(None, (key.name, collected.note_of(key))))
        rows.append((order, name, steps, np.where(is_bad, np.nan, of_lanes[lane]), is_bad))
    is_told = of_objectives or any(order == 1 for order, *_ in rows)
    for lane, own_norms in () if is_told else known["gradient_norms"].items():
        norms = np.array([np.nan if one is None else one for one in own_norms])
        rank, is_bad = lanes[lane]["rank"] if len(lanes) > 1 else None, norms < 0
        name = "gradient norm" + (f" of rank {rank}" if rank is not None else "")
        name += ", of all models" if known["is_of_models"] else ""
        rows.append((1, name, np.array(collected.cube.first_steps), np.where(is_bad, np.nan, norms), is_bad))
    if not rows:
        return None
    names, bands, ticks = [], list[npt.NDArray[np.uint8]](), list[tuple[float, str]]()
    for _, name, own, values, is_bad in sorted(rows, key=lambda row: row[0])[:_MAX_BANDS]:
        pixels, of_band = _band(own, values, is_bad, at, is_cosine=of_objectives and ".cosine." in name)
        ticks += [(len(bands) * _BAND + middle, text) for middle, text in of_band]
        names.append(name.removeprefix("objective."))
        bands.append(pixels)
    num_more = len(rows) - len(bands)
    title = "gradients of objectives" if of_objectives else "the numbers of a step"
    kinds = [(_BAD, "NaN or infinite")] if any(row[-1].any() for row in rows) else []
    more = f"; {counted(num_more, 'more number')} not drawn" if num_more else ""
    return _Drawn(title=title + more, names=names, pixels=np.concatenate(bands), kinds=kinds, ticks=ticks)


def _band(
    steps: npt.NDArray[np.int64], values: _Floats, is_bad: npt.NDArray[np.bool_], at: _Floats, *, is_cosine: bool
) -> tuple[npt.NDArray[np.uint8], list[tuple[float, str]]]:
    """Draw one number over steps. Return the band of pixels, and the labels of its axis by distance from the top."""
    is_known = ~np.isnan(values) | is_bad
    xs, values = steps[is_known].astype(np.float64), values[is_known]
    pixels = np.full((_BAND, _WIDTH, 3), 255, np.uint8)
    low, high = (float(end(values)) if (~np.isnan(values)).any() else 0.0 for end in (np.nanmin, np.nanmax))
    if is_cosine:
        low, high = -1.0, 1.0
    elif low == high:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)

    def height(value: Any) -> Any:
        return 10 + (_BAND - 20) * (high - value) / (high - low)

    ticks = [(height(tick), f"{tick:.4g}") for tick in _round_numbers(low, high)]
    for middle, _ in ticks:
        pixels[round(middle)] = _HOLE
    if len(xs) == 1:
        xs, values = np.array([xs[0] - 0.2, xs[0] + 0.2]), values.repeat(2)
    y = np.interp(at, xs, height(values), np.nan, np.nan) if len(xs) else np.full(_WIDTH, np.nan)
    rise = np.nan_to_num(np.abs(np.gradient(y)))
    pixels[np.abs(np.arange(_BAND)[:, None] - y) <= 1 + rise / 2] = _LINE
    bars = np.searchsorted(at, steps[is_bad])[:, None] + [-1, 0, 1]
    pixels[:, np.clip(bars, 0, _WIDTH - 1)] = _BAD
    pixels[-1] = _HOLE
    return pixels, ticks


def _order(name: str, mode: str) -> int:
    """Return a scalar's place in the page's order: loss, gradient norms, other losses, other scalars, rates."""
    if name.startswith("lr."):
        return 4
    if mode != "train":
        return 3
    return 0 if name == "loss" else 1 if re.search("grad.*norm", name) else 2 if name.endswith("loss") else 3


def _round_numbers(low: float, high: float, most: int = 5) -> list[float]:
    """Return up to `most` round numbers between two ends. They are whole if the ends are, and if `most` suffices."""
    power = 10.0 ** np.floor(np.log10((high - low) / (most - 1)) - 1e-9)
    step = next(one * power for one in (1, 2, 5, 10, 20) if (high - low) / (one * power) <= most - 1)
    return [float(one * step) for one in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)]


_SITES = ("output", "grad_output", "param", "grad")
PANELS: Mapping[str, Callable[[StatisticsBlocks, _Floats, _First], _Drawn | None]] = {
    "map": partial(_map, sites=_SITES),
    "loss": _numbers,
    "gradients": partial(_map, sites=("grad", "grad_output")),
    "updates": _updates,
    "objectives": partial(_numbers, of_objectives=True),
    "histograms": _histograms,
    "ranks": _ranks,
    "experts": partial(_map, sites=("output",), modules=r"(^|\.)experts\.\d+$", statistic="numel"),
}
"""The functions that draw the panels, by name for `recorder report --png`. They return None if nothing can be drawn."""
_RULES = "the next time record it with RECORDER=1 RECORDER_PRESET=default RECORDER_RULES="
_TO_RECORD: Mapping[str, str] = {
    "map": f"{_RULES}'site=output keep=stats'",
    "loss": "type recorder.scalar('loss', loss) into the program",
    "gradients": f"{_RULES}'site=grad,grad_output keep=stats'",
    "updates": "it needs matrices whose updates the probe measures, on at most 8 ranks; "
    f"{_RULES}'site=param keep=stats,probe'",
    "objectives": "type recorder.objective('main', hidden) into the model, for each objective",
    "histograms": f"{_RULES}'site=output,grad keep=histogram'",
    "ranks": "it needs several ranks: RECORDER=1 torchrun --nproc-per-node 2 train.py",
    "experts": f"it needs modules that are called experts.0, experts.1, ...; {_RULES}'site=output keep=stats'",
}
"""For each panel, a text that says how to record the values that the panel draws."""
_OF_ALL = ("loss", "objectives")
"""The panels that draw all models together, and therefore take no `--model`."""
_MARKED = ("map", "gradients", "experts", "ranks")
"""The panels that mark the first value that is not finite, which the rules of `recorder check` find."""
