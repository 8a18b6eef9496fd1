"""Makes JSON text for the columns that hold it, such as ``note``, ``mesh`` and ``placements``."""

from __future__ import annotations

import json


def compact(value: object) -> str:
    """Return a value as JSON, as the columns hold it."""
    return json.dumps(value, separators=(",", ":"), default=str)


def merged_notes(note: str | None, more: str | None) -> str | None:
    """Merge the texts of two JSON objects."""
    if note is None or more is None:
        return note or more
    return f"{note[:-1]},{more[1:]}"
