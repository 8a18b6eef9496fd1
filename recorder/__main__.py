"""The entry point of the command line, `recorder` or ``python -m recorder``.

Nothing here may import a UI package for ``recorder run``, because that process becomes the user's training.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def main() -> None:
    """Run one command. Exit with code 0 for success, 1 for a finding, and 2 for misuse or unreadable input."""
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
    except SystemExit as ending:
        _end(ending.code)


def _end(code: object) -> NoReturn:
    """End the process as the interpreter does, but without the teardown.

    During a teardown, a thread of Arrow's pool may take the interpreter's lock to drop the last reference to a numpy
    array. The interpreter then ends that thread inside a C++ destructor, which aborts the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # the reader of the pipe has ended, as in `recorder ... | head`
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """Open the null device for each closed standard stream (``>&-``), so that no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))


if __name__ == "__main__":
    main()
