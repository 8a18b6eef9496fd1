"""Owns what a shell offers while a command is typed: names of runs, paths of modules. It never opens a shard.

Only words that mean nothing to any shell are offered: what a stranger called a module is read by the shell.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import RecorderError
from ..format.rundir import WRITER_MANIFEST, read_json
from ..read import untrusted
from ..read.places import scheme_of
from ..read.which import default_folder, find_run, has_manifest, runs_in

_HARMLESS = re.compile(r"[A-Za-z0-9._=+@/-]+")
_MAX_BACK = 9
"""Runs that are offered by their age."""


def complete_run(incomplete: str) -> list[str]:
    """Runs: by name, by age where that was begun, and folders."""
    return _offered(incomplete, _runs)


def complete_run_or_module(incomplete: str) -> list[str]:
    """Runs, and modules of the newest one: what the first word of `show` may be."""
    return _offered(incomplete, _runs) + _offered(incomplete, lambda _: _modules(None))


def complete_module(context: Any, incomplete: str) -> list[str]:
    """Modules of the run that was typed before."""
    return _offered(incomplete, lambda _: _modules(context.params.get("path")))


def _offered(incomplete: str, words: Callable[[str], Iterable[str]]) -> list[str]:
    before = logging.root.manager.disable
    logging.disable()  # a line between what is typed would be in the way
    try:
        found = dict.fromkeys(words(incomplete))
    except (RecorderError, OSError):
        return []
    finally:
        logging.disable(before)
    return [word for word in found if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]


def _runs(incomplete: str) -> Iterator[str]:
    if scheme_of(incomplete) is not None:
        return  # each key would be a request
    folder, slash, _ = incomplete.rpartition("/")
    typed = folder + slash
    for place in dict.fromkeys([Path(typed)] if typed else [Path(default_folder()), Path()]):
        if place.is_dir():
            runs = runs_in(place)[::-1]
            yield from (f"{typed}{run.name}" for run in runs)
            if incomplete.startswith(f"{typed}@"):
                yield from (f"{typed}@-{number + 1}" for number in range(min(len(runs), _MAX_BACK)))
            if runs:
                yield f"{typed}latest"
    yield from (f"{typed}{path.name}/" for path in Path(typed).iterdir() if path.is_dir() and not has_manifest(path))


def _modules(run: str | None) -> Iterator[str]:
    """Those that the first manifest knows, which is about all: one file instead of a run."""
    place, _ = find_run(run)
    if not isinstance(place, Path):
        return
    for path in sorted(place.glob(f"*/*/{WRITER_MANIFEST}")):
        roots = untrusted.objects(read_json(path).get("roots"))
        found = [
            untrusted.text(module.get("path")) for root in roots for module in untrusted.objects(root.get("modules"))
        ]
        if found:
            yield from found
            return
