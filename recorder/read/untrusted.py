"""Owns what is taken of JSON that a stranger may have written: of each thing its kind, and nothing of another."""

from __future__ import annotations

import json
from typing import Any


def items(value: Any) -> list[Any]:
    """A list; empty where it is none."""
    return value if isinstance(value, list) else []


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list."""
    return [item for item in items(value) if isinstance(item, dict)]


def texts(value: Any) -> list[str]:
    """The texts of a list."""
    return [item for item in items(value) if isinstance(item, str)]


def text(value: Any) -> str:
    """A text; empty where it is none."""
    return value if isinstance(value, str) else ""


def numbers(value: Any) -> list[int]:
    """The whole numbers of a list."""
    return [item for item in items(value) if type(item) is int]


def members(note: str | None) -> dict[str, Any]:
    """What a row's note says; nothing of what is no JSON object."""
    try:
        found = json.loads(note) if note else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
