"""What stands in one cell of a table of differences, and in the sentences beside it."""

from __future__ import annotations

from typing import Any

from ...system.text import number

_MAX_ULP = 9999
"""The most representable numbers between two floats that are shown; a larger count tells nobody anything."""


def beside(row: dict[str, Any]) -> str:
    """Return what tells a value from others of the same module, site and name."""
    micro_step = f"micro_step={row['micro_step']}" if row["micro_step"] else ""
    call = f"call={row['call']}" if row["call"] else ""
    mode = row["mode"] if row["mode"] != "train" else ""
    return " ".join(filter(None, (micro_step, call, mode, row["phase"] if row["phase"] == "recompute" else "")))


def statistic_cell(row: dict[str, Any]) -> str:
    """Return the statistic that is farthest apart, with enough digits to tell both values apart."""
    a, b = row["statistic_a"], row["statistic_b"]
    digits = (".0f",) if row["statistic"].endswith("_count") else (".4g", ".8g", ".17g")
    texts = [tuple("none" if value is None else format(value, form) for value in (a, b)) for form in digits]
    text_a, text_b = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    apart = "" if row["statistic_rel"] is None else f", {number(row['statistic_rel'])} apart"
    return f"{row['statistic'].removesuffix('_count')} {text_a} | {text_b}{apart}"


def rank_cell(a: int | None, b: int | None) -> str:
    """Return the ranks of a value in both runs; empty where both are of the whole model."""
    return "" if a is None and b is None else pair_cell("all" if a is None else a, "all" if b is None else b)


def pair_cell(a: object, b: object) -> str:
    """Return what both runs have: once where it is the same."""
    return str(a) if a == b else f"{a} | {b}"


def whole_cell(value: float | int | None) -> str:
    """Return a count of representable numbers, of which many tell nobody anything."""
    if value is None:
        return ""
    return f"{int(value)}" if value <= _MAX_ULP else f">{_MAX_ULP}"


def cosine_cell(value: float | None) -> str:
    """Return a cosine, with enough digits for one that is near 1."""
    return "" if value is None else f"{value:.6f}"


def percent_cell(share: float | None) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{share:.3%}" if share < 0.01 else f"{share:.1%}"


def cut_text(count: int, limit: int) -> str:
    """Return what says that a list is cut; empty where it is not."""
    return f"; the first {limit} (--limit 0 shows all)" if limit and count > limit else ""
