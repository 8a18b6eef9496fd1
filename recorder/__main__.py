"""The entry of the command line: `recorder` and ``python -m recorder``.

Nothing here may import a UI package for ``recorder run``, which becomes the user's training process.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run one command, with the exit code 0 for success, 1 for a finding, and 2 for misuse or unreadable input."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        from .lifecycle.launch import launch

        launch(arguments[1:])
    from .cli import hide_pandas
    from .cli.app import run_command

    hide_pandas()
    _open_closed_streams()
    try:
        run_command(arguments)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `recorder ... | head`: nobody reads the rest, and the interpreter must not try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed (``>&-``), before a file gets its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
