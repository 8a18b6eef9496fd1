"""Offers words while a command is typed: names of runs, paths of modules. It never opens a shard.

Only words that mean nothing to any shell are offered, because the shell reads the name of a module, untrusted input.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import RecorderError
from ..run.finding import default_folder, find_run, first_modules, has_manifest, runs_in, scheme_of

_HARMLESS = re.compile(r"[A-Za-z0-9._=+@/-]+")
_MAX_BACK = 9
"""The number of runs that are offered by their age."""


def complete_run(incomplete: str) -> list[str]:
    """Offer runs by name, runs by age where ``@`` was typed, and folders."""
    return _offered(incomplete, _runs)


def complete_run_or_module(incomplete: str) -> list[str]:
    """Offer runs, and modules of the newest run, either of which may be the first word of `show`."""
    return _offered(incomplete, _runs) + _offered(incomplete, lambda _: _modules(None))


def complete_module(context: Any, incomplete: str) -> list[str]:
    """Offer the modules of the run that was typed before."""
    return _offered(incomplete, lambda _: _modules(context.params.get("path")))


def _offered(incomplete: str, words: Callable[[str], Iterable[str]]) -> list[str]:
    before = logging.root.manager.disable
    logging.disable()  # a line of the log would break the line that is typed
    try:
        candidates = dict.fromkeys(words(incomplete))
    except (RecorderError, OSError):
        return []
    finally:
        logging.disable(before)
    return [word for word in candidates if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]


def _runs(incomplete: str) -> Iterator[str]:
    if scheme_of(incomplete) is not None:
        return  # each key would be a request
    folder, slash, _ = incomplete.rpartition("/")
    typed = folder + slash
    for folder_path in dict.fromkeys([Path(typed)] if typed else [Path(default_folder()), Path()]):
        if folder_path.is_dir():
            runs = runs_in(folder_path)[::-1]
            yield from (f"{typed}{run.name}" for run in runs)
            if incomplete.startswith(f"{typed}@"):
                yield from (f"{typed}@-{number + 1}" for number in range(min(len(runs), _MAX_BACK)))
            if runs:
                yield f"{typed}latest"
    yield from (f"{typed}{path.name}/" for path in Path(typed).iterdir() if path.is_dir() and not has_manifest(path))


def _modules(run: str | None) -> Iterator[str]:
    """Yield the modules of a run on a disk."""
    path_of_run, _ = find_run(run)
    if isinstance(path_of_run, Path):
        yield from first_modules(path_of_run)
