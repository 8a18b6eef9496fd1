"""Looks up what the program has imported, without importing anything."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module_name: str, name: str) -> Any:
    """Return an attribute of a module of torch, or None: a module that was never imported has wrapped nothing."""
    return getattr(sys.modules.get(module_name), name, None)
