"""What a document has that a published model of it has not."""

from __future__ import annotations

from typing import Any


def lost(said: Any, kept: Any, at: str = "") -> list[str]:
    """The paths in a document of members that a model dropped or changed."""
    if isinstance(said, dict):
        absent = [f"{at}{name}" for name in said if name not in kept]
        return absent + [hole for name in said if name in kept for hole in lost(said[name], kept[name], f"{at}{name}.")]
    if isinstance(said, list):
        return [hole for i, item in enumerate(said) for hole in lost(item, kept[i], f"{at}{i}.")]
    return [] if said == kept else [at]
