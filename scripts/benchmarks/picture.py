"""Draws ratios as plain SVG: a dot for the median, a bar for the quartiles, a line from the least to the most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .pairs import Spread

LABELS, PLOT, ROW, HEAD, FOOT = 270, 470, 22, 34, 34
"""Pixels: the width of names and plot, the heights of a row, a title and an axis."""
TICKS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 20, 50)
OURS, OTHER, INK = "#1d4ed8", "#6b7280", "#111827"


class Bar(NamedTuple):
    """One recorder."""

    name: str
    ratio: Spread
    is_ours: bool


class Panel(NamedTuple):
    """One setting."""

    title: str
    noise: float
    """Ratios nearer to 1 than this cannot be told from 1; drawn as a band."""
    bars: list[Bar]


def draw(panels: Sequence[Panel]) -> str:
    """The picture; panels one below the other on one logarithmic axis."""
    least = min([0.9, *(min(bar.ratio.least, 1 - panel.noise) for panel in panels for bar in panel.bars)])
    most = max([1.25, *(max(bar.ratio.most, 1 + panel.noise) for panel in panels for bar in panel.bars)])
    low, high = math.log(max(least, 0.05) * 0.98), math.log(most * 1.03)

    def x(ratio: float) -> float:
        return LABELS + PLOT * (math.log(max(ratio, 0.05)) - low) / (high - low)

    parts: list[str] = []
    top = 0
    for panel in panels:
        bottom = top + HEAD + ROW * len(panel.bars)
        parts.append(_text(8, top + 20, panel.title, anchor="start", weight="bold"))
        left, right = x(1 - panel.noise), x(1 + panel.noise)
        parts.append(
            f'<rect x="{left:.1f}" y="{top + HEAD}" width="{right - left:.1f}" height="{bottom - top - HEAD}" '
            'fill="#e5e7eb"/>'
        )
        for tick in TICKS:
            if low <= math.log(tick) <= high:
                parts.append(_line(x(tick), top + HEAD, x(tick), bottom, "#d1d5db", 1))
                parts.append(_text(x(tick), bottom + 14, f"{tick:g}", anchor="middle"))
        for number, bar in enumerate(panel.bars):
            y, color = top + HEAD + ROW * number + ROW / 2, OURS if bar.is_ours else OTHER
            parts.append(_text(LABELS - 8, y + 4, bar.name, anchor="end", color=color))
            parts.append(_line(x(bar.ratio.least), y, x(bar.ratio.most), y, color, 1))
            parts.append(_line(x(bar.ratio.low), y, x(bar.ratio.high), y, color, 5))
            parts.append(f'<circle cx="{x(bar.ratio.median):.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>')
        top = bottom + FOOT
    legend = "step time against no recording: median, quartiles, extremes; grey: where two trainings without it lie"
    parts.append(_text(8, top + 4, legend, anchor="start"))
    width, height = LABELS + PLOT + 30, top + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: int) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, anchor: str, color: str = INK, weight: str = "normal") -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f"<text {attributes}>{escape(text)}</text>"
