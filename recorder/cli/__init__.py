"""The command line, which prints results for people and programs. No other part of the package prints.

The command line needs no pandas, and keeps pyarrow from importing pandas. `hide_pandas` must never be called in the
process of a user's program.
"""

from __future__ import annotations

import sys


class _Hidden:
    """An import finder that raises ModuleNotFoundError for pandas, as if pandas were not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the command line does not use pandas", name=name)


def show_pandas() -> None:
    """Undo `hide_pandas`. Call this before importing a package that uses pandas if installed, such as torch."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Hidden]


def hide_pandas() -> None:
    """Keep pyarrow from importing pandas, which it does to check the types of arguments. The import takes 0.4 s."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _Hidden)
