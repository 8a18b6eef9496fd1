"""Commands that were options once: ``merge --to`` is ``checkpoint`` today, and ``merge --catalog`` is ``catalog``."""

from __future__ import annotations

import shlex
import sys

from .output import printable_line


def new_spelling(arguments: list[str]) -> list[str]:
    """Return the command line under today's names of commands, after naming an old spelling in a line on stderr."""
    if arguments[:1] != ["merge"]:
        return arguments
    options = {word.partition("=")[0] for word in arguments}
    if "--catalog" in options:
        old, new = "--catalog", ["catalog", *map(_as_out, arguments[1:])]
    elif "--to" in options:
        old, new = "--to", ["checkpoint", *arguments[1:]]
    else:
        return arguments
    print(printable_line(f"recorder: merge {old} is now: {shlex.join(['recorder', *new])}"), file=sys.stderr)
    return new


def _as_out(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"--out{equals}{value}" if option == "--catalog" else word
