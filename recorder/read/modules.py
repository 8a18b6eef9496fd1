"""What manifests say about modules: class, source line, selected sites. Never looks at rows."""

from __future__ import annotations

from collections.abc import Iterable

from ..format.roots import Module
from ..system.text import listed
from .writers import RecordedWriter

_MAX_LISTED = 5
_MAX_DEPTH = 200
"""Levels of a module tree; what is above a deeper path is not listed."""


def read_modules(writers: Iterable[RecordedWriter]) -> dict[tuple[str, str], Module]:
    """Modules by root and path, in the order of `named_modules()`; the newest writer that knows one describes it."""
    return {
        (root.name, module.path): module
        for writer in writers
        for root in writer.manifest.roots
        for module in root.modules
    }


def listed_hooks(modules: Iterable[Module]) -> str:
    """Modules that carry hooks of the program, and which; empty where none does."""
    hooked = (f"{module.path!r} ({', '.join(module.foreign_hooks)})" for module in modules if module.foreign_hooks)
    return listed(hooked, _MAX_LISTED)


def list_paths(known: Iterable[str], recorded: Iterable[str]) -> dict[str, None]:
    """Paths of modules and of what contains them, in the order of the tree."""
    paths: dict[str, None] = {"": None}
    for path in (*known, *recorded):
        if path not in paths:
            parts = path.split(".")
            ends = range(1 if len(parts) <= _MAX_DEPTH else len(parts), len(parts) + 1)
            paths |= dict.fromkeys(".".join(parts[:end]) for end in ends)
    return paths
