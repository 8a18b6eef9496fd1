"""Taps: ops in a model's graph that record values, wherever the graph goes: compiled, exported, traced or scripted."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a hook of a model that was pickled by recorder 0.1, in which hooks were in this module."""
    if name in ("InputTap", "OutputTap") or name.startswith("recorder_tap_"):
        return getattr(import_module(".module_taps", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
