"""What is taken of the notes of rows, which are untrusted input."""

from __future__ import annotations

import json
from typing import Any


def members(note: str | None) -> dict[str, Any]:
    """Return a row's note; an empty one where the text is no JSON object."""
    try:
        parsed = json.loads(note) if note else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
