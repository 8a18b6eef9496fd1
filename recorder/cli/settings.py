"""Owns ``recorder config``: every setting in force, where it comes from, what it does."""

from __future__ import annotations

from typing import Any

from ..config import load_settings
from .output import Column, Table, print_json


def show_settings(*, as_json: bool) -> int:
    """Print the settings and return the exit code. A wrong one raises `ConfigError`."""
    settings = load_settings().explain()
    if as_json:
        print_json({one.name: {"value": one.value, "source": one.source, "doc": one.doc} for one in settings})
        return 0
    rows = []
    for one in settings:
        first, *others = lines(one.value)
        rows.append([one.name, first, one.source, one.doc])
        rows += [["", other, "", ""] for other in others]
    Table([Column(title=title) for title in ("setting", "value", "source", "what it does")], rows).print()
    return 0


def lines(value: Any) -> list[str]:
    """A value for people: each rule on a line of its own."""
    if isinstance(value, list):
        return [str(item) for item in value] or ["none"]
    return [str(value) if value != "" else "(empty)"]
