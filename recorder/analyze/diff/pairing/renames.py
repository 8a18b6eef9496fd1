"""Names of modules that differ between two runs: a file that says which is which, rows under common names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ....errors import LookupFailedError
from ....numerics.keys import encode
from ....system.text import listed


class Rename(NamedTuple):
    """One line: a path of the first run, or the beginning of paths, and what it is in the second."""

    old: str
    new: str
    where: str
    """File and line, for messages."""

    def fits(self, path: str) -> bool:
        """Whether the line names a module of the second run, or one above it."""
        return not self.new or path == self.new or path.startswith(f"{self.new}.")


class Renames:
    """How module paths of the second run are called in the first; the longest that fits wins, others stay."""

    def __init__(self, renames: Iterable[Rename] = ()) -> None:
        self.lines = sorted(renames, key=lambda one: -len(one.new))

    def __bool__(self) -> bool:
        return bool(self.lines)

    def with_lines(self, lines: Iterable[Rename]) -> Renames:
        """Return these renames with further lines."""
        return Renames([*self.lines, *lines])

    def line_of(self, path: str) -> Rename | None:
        """The line that says what a module of the second run is called."""
        return next((line for line in self.lines if line.fits(path)), None)

    def old(self, path: str) -> str:
        """What the first run calls a module of the second."""
        line = self.line_of(path)
        if line is None:
            return path
        return ".".join(filter(None, (line.old, path[len(line.new) :].removeprefix("."))))

    def apply(self, table: Any) -> Any:
        """Rows of the second run under the names of the first."""
        if not self.lines:
            return table
        index = table.schema.get_field_index("module_path")
        ids, texts = encode(table.column("module_path"))
        names = pa.array([self.old(text) for text in texts], pa.string())
        return table.set_column(index, table.schema.field(index), names.take(pa.array(ids)))

    def check_used(self, paths: Iterable[str]) -> None:
        """Refuse a line that fits no module, and lines that make one of two.

        Raises:
            LookupFailedError: there is such a line; the message says where.
        """
        there = sorted(paths)
        for rename in self.lines:
            if not any(map(rename.fits, there)):
                shown = listed(map(repr, there))
                raise LookupFailedError(f"{rename.where}: the second run has no module {rename.new!r}; it has {shown}")
        taken: dict[str, str] = {}
        for path in filter(None, there):
            other = taken.setdefault(self.old(path), path)
            if other != path:
                both = f"{other!r} and {path!r} of the second run would both be {self.old(path)!r}"
                raise LookupFailedError(f"{self.lines[0].where.rpartition(':')[0]}: {both}; rename the other one too")


NO_RENAMES = Renames()


def read_renames(path: Path) -> Renames:
    """Read a file of lines ``old = new``; ``#`` begins a comment, ``''`` is the root.

    Raises:
        LookupFailedError: it cannot be read, or a line says nothing, or two lines contradict each other; the message
            says which line and what is wrong.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LookupFailedError(f"{path}: the file of renamed modules cannot be read: {error}") from None
    renames: list[Rename] = []
    for number, line in enumerate(lines, 1):
        text, where = line.partition("#")[0].strip(), f"{path}:{number}"
        if not text:
            continue
        old, equals, new = (part.strip() for part in text.partition("="))
        if not equals or not old or not new or "=" in new:
            raise LookupFailedError(f"{where}: {text!r} is no line such as encoder.layers = blocks")
        old, new = (name.strip("'\"") for name in (old, new))
        for other in renames:
            if new == other.new or old == other.old:
                twice = new if new == other.new else old
                raise LookupFailedError(f"{where}: {twice!r} stands in {other.where} too, as {other.old} = {other.new}")
        renames.append(Rename(old, new, where))
    if not renames:
        raise LookupFailedError(f"{path}: no line such as encoder.layers = blocks is in it")
    return Renames(renames)
