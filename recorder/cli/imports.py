"""Owns what the command line keeps from being imported. Must never be called in a process of somebody else's."""

from __future__ import annotations

import sys


class _Hidden:
    """A finder that finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the command line does without pandas", name=name)


def hide_pandas() -> None:
    """Keep pyarrow from importing pandas, to see whether it was given one of its types: 0.4 s of every command."""
    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _Hidden)
