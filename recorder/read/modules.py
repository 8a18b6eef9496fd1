"""Owns what manifests say about modules: class, source line, selected sites. Never raises over a stranger's JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import untrusted
from .writers import RecordedWriter

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """A module as one root saw it."""

    root: str
    path: str
    class_name: str
    source: str
    """File and line of its class, or empty."""
    sites: tuple[str, ...]
    """Selected by a rule, recorded or not."""
    has_values: bool
    """Whether what is selected can exist: a module without parameters has no gradients of them to record."""
    foreign_hooks: tuple[str, ...]
    """Hooks of the program on it, which run after its values were recorded: when, name, file and line."""
    is_compiled: bool
    """Its hooks step aside, so it leaves no rows."""


def read_modules(writers: Iterable[RecordedWriter]) -> dict[tuple[str, str], ModuleInfo]:
    """Modules by root and path, in the order of `named_modules()`; the newest writer that knows one describes it."""
    found: dict[tuple[str, str], ModuleInfo] = {}
    for writer in writers:
        for root in untrusted.objects(writer.manifest.get("roots")):
            for module in untrusted.objects(root.get("modules")):
                sites = tuple(site for site in untrusted.items(module.get("sites")) if isinstance(site, str))
                info = ModuleInfo(
                    root=untrusted.text(root.get("name")),
                    path=untrusted.text(module.get("path")),
                    class_name=untrusted.text(module.get("class")),
                    source=untrusted.text(module.get("source")),
                    sites=sites,
                    has_values=any(_has_values(site, module) for site in sites),
                    foreign_hooks=tuple(untrusted.texts(module.get("foreign_hooks"))),
                    is_compiled=module.get("compiled") is True,
                )
                found[info.root, info.path] = info
    return found


def _has_values(site: str, module: dict[str, Any]) -> bool:
    if site in ("param", "grad", "optim"):
        return bool(untrusted.items(module.get("params")))
    return bool(untrusted.items(module.get("buffers"))) if site == "buffer" else site not in ("tap", "scalar")


def listed_hooks(modules: Iterable[ModuleInfo]) -> str:
    """Modules that carry hooks of the program, and which; empty where none does."""
    found = [f"{info.path!r} ({', '.join(info.foreign_hooks)})" for info in modules if info.foreign_hooks]
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return ", ".join(found[:_MAX_LISTED]) + more
