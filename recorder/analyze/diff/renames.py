"""Pairs modules that have different names in two runs: reads a file that pairs the names, and renames rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...errors import LookupFailedError
from ...numerics.keys import by_key, encode
from ...sites import GRADIENT_OF, HELD_BY_MODULES
from ...system.text import listed


class Rename(NamedTuple):
    """One line of the file of renamed modules: a path (or prefix) of the first run, and its name in the second run."""

    old: str
    new: str
    where: str
    """The file and the line number, for messages."""

    def fits(self, path: str) -> bool:
        """Return whether the line renames the module `path` of the second run, by its path or by a parent's path."""
        return not self.new or path == self.new or path.startswith(f"{self.new}.")


class Renames:
    """Maps module names of the second run to names of the first run, by the longest line that fits a name."""

    def __init__(self, renames: Iterable[Rename] = ()) -> None:
        self.lines = sorted(renames, key=lambda one: -len(one.new))

    def __bool__(self) -> bool:
        return bool(self.lines)

    def with_lines(self, lines: Iterable[Rename]) -> Renames:
        return Renames([*self.lines, *lines])

    def line_of(self, path: str) -> Rename | None:
        """Return the line that renames a module of the second run; None if no line does."""
        return next((line for line in self.lines if line.fits(path)), None)

    def old(self, path: str) -> str:
        """Return the name that a module of the second run has in the first run."""
        line = self.line_of(path)
        if line is None:
            return path
        return ".".join(filter(None, (line.old, path[len(line.new) :].removeprefix("."))))

    def apply(self, table: Any) -> Any:
        """Return rows of the second run with the module names of the first run."""
        if not self.lines:
            return table
        index = table.schema.get_field_index("module_path")
        ids, texts = encode(table.column("module_path"))
        names = pa.array([self.old(text) for text in texts], pa.string())
        return table.set_column(index, table.schema.field(index), names.take(pa.array(ids)))

    def check_used(self, paths: Iterable[str]) -> None:
        """Raise LookupFailedError for a line that matches no module, and for lines that give two modules one name."""
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
    """Read a file of lines ``old = new``, in which ``#`` begins a comment and ``''`` is the root.

    Raises LookupFailedError if the file cannot be read, a line has no meaning, or two lines contradict each other. The
    message says which line and what is wrong.
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
                raise LookupFailedError(f"{where}: {twice!r} is also in {other.where}, as {other.old} = {other.new}")
        renames.append(Rename(old, new, where))
    if not renames:
        raise LookupFailedError(f"{path}: has no line of the form encoder.layers = blocks")
    return Renames(renames)


_ARGUMENTS = ("input", GRADIENT_OF["input"])
"""The sites whose names are arguments of a forward. These names may change when a module is rewritten."""
_MAX_MODULES = 5_000


class RenameHint(NamedTuple):
    """A line proposed for the file of renamed modules."""

    old: str
    """A module path of the first run, or a prefix of module paths."""
    new: str
    """The likely module path, or prefix of module paths, in the second run."""
    num_modules: int
    """The number of module pairs that the line creates, all with tensors of the same shapes."""
    num_same: int
    """The number of these module pairs whose first recorded parameters and buffers are equal bit by bit."""

    @property
    def line(self) -> str:
        return " = ".join(path or "''" for path in (self.old, self.new))


class UnpairedModules:
    """The modules that one run has and the other run lacks, with the tensors that identify them."""

    def __init__(self, own_names: Mapping[str, str]) -> None:
        self.own_names = own_names
        """Maps the name that a module has after renaming (its common name) to its name in its own run."""
        self._tensors: dict[str, set[tuple[str, str, str]]] = {}
        """For each module, in the order of execution: the site, name and shape of its tensors."""
        self._prints: dict[str, dict[tuple[str, str], str]] = {}

    def add(self, table: Any) -> None:
        """Add rows whose modules have the names after renaming. The rows must be in the order of execution."""
        if not self.own_names:
            return
        rows = table.filter(pc.is_in(table.column("module_path"), pa.array(list(self.own_names), pa.string())))
        kinds = rows.group_by(["module_path", "site", "name", "shape"], use_threads=False)
        for row in kinds.aggregate([("fingerprint", "first")]).to_pylist():
            path, site, name = row["module_path"], row["site"], row["name"]
            self._tensors.setdefault(path, set()).add((site, "" if site in _ARGUMENTS else name, row["shape"]))
            if site in HELD_BY_MODULES and row["fingerprint_first"] is not None:
                self._prints.setdefault(path, {}).setdefault((site, name), row["fingerprint_first"])

    def join(self, other: UnpairedModules) -> None:
        """Add the tensors of `other`, which were recorded later. The earlier fingerprint of a tensor is kept."""
        for path, tensors in other._tensors.items():
            self._tensors.setdefault(path, set()).update(tensors)
        for path, prints in other._prints.items():
            self._prints[path] = prints | self._prints.get(path, {})

    @property
    def sites(self) -> set[str]:
        return {site for tensors in self._tensors.values() for site, _, _ in tensors}

    def by_look(self, sites: set[str]) -> dict[frozenset[Any], list[str]]:
        """Return the modules, in the order of execution, grouped by their tensors at `sites`."""
        looks = ((frozenset(one for one in some if one[0] in sites), path) for path, some in self._tensors.items())
        return by_key((look, path) for look, path in looks if look)

    def state(self, path: str) -> frozenset[Any]:
        """Return the fingerprints of the module's own parameters and buffers in their first record."""
        return frozenset(self._prints.get(path, {}).items())


def rename_hints(
    a: UnpairedModules, b: UnpairedModules, renames: Renames, paths_b: Mapping[str, str]
) -> list[RenameHint]:
    """Propose a few lines of a file of renamed modules. They pair modules of two runs with equal tensor shapes.

    Modules are paired only if both runs have equally many modules with these shapes. No module is in two lines. `a` are
    the modules that only the first run has. `b` are the modules that only the second run has, under the names after
    renaming. `paths_b` maps the second run's own names to the names after renaming.
    """
    pairs = {b.own_names[new]: old for old, new in _pairs(a, b) if not set("=#") & set(old + new)}
    if not pairs or len(pairs) > _MAX_MODULES:
        return []
    unpaired = set(b.own_names.values())
    fixed = {own: name for own, name in paths_b.items() if own not in unpaired}
    ways = _in_few_lines(pairs, fixed, renames), [Rename(old, new, "") for new, old in pairs.items()]
    lines = next((some for some in ways if _are_sound(some, pairs, fixed, paths_b, renames)), [])
    common = {own: name for name, own in b.own_names.items()}
    hints = []
    for line in lines:
        chosen = [new for new in pairs if Renames(lines).line_of(new) == line]
        same = sum(b.state(common[new]) == a.state(pairs[new]) != frozenset() for new in chosen)
        hints.append(RenameHint(line.old, line.new, len(chosen), same))
    return hints


def _pairs(a: UnpairedModules, b: UnpairedModules) -> Iterator[tuple[str, str]]:
    """Yield pairs of modules with equal tensor shapes: with equal parameters and buffers, else in execution order."""
    sites = a.sites & b.sites
    of_b = b.by_look(sites)
    for look, olds in a.by_look(sites).items():
        news = of_b.get(look, [])
        if len(olds) != len(news):
            continue
        states = Counter(b.state(new) for new in news)
        by_state = {b.state(new): new for new in news if b.state(new) and states[b.state(new)] == 1}
        taken = {old: by_state.pop(state) for old in olds if (state := a.state(old)) in by_state}
        others = iter([new for new in news if new not in taken.values()])
        yield from ((old, taken[old] if old in taken else next(others)) for old in olds)


def _in_few_lines(pairs: Mapping[str, str], fixed: Mapping[str, str], renames: Renames) -> list[Rename]:
    """Return lines that cover all pairs: first the most frequent path prefixes, then complete paths."""
    lines: list[Rename] = []
    told, left = dict(fixed), dict(pairs)
    while left:
        votes = Counter(line for new, old in left.items() for line in _beginnings(old, new))
        exact = next((Rename(old, new, "") for new, old in left.items()))
        wide = (
            line for line, count in votes.most_common()
            if count > 1 and all(renames.with_lines([*lines, line]).old(path) == told[path]
                                 for path in told if line.fits(path))
        )  # fmt: skip
        line = next(wide, exact)
        lines.append(line)
        done = {new: old for new, old in left.items() if Renames([line]).old(new) == old and line.fits(new)}
        told |= done
        left = {new: old for new, old in left.items() if new not in done}
    return lines


def _beginnings(old: str, new: str) -> Iterator[Rename]:
    """Yield prefixes of both paths: first without their common last components, then with one more each time."""
    one, two = old.split("."), new.split(".")
    ends = zip(reversed(one), reversed(two), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    for cut in range(same, -1, -1):
        yield Rename(".".join(one[: len(one) - cut]), ".".join(two[: len(two) - cut]), "")


def _are_sound(
    lines: Sequence[Rename], pairs: Mapping[str, str], fixed: Mapping[str, str], paths_b: Iterable[str],
    renames: Renames,
) -> bool:  # fmt: skip
    """Return whether the lines pair all modules of `pairs`, change no name in `fixed`, and give no name twice."""
    for name in ("old", "new"):
        told = [getattr(line, name) for line in (*lines, *renames.lines)]
        if len(set(told)) < len(told):
            return False
    together = renames.with_lines(lines)
    if any(together.old(path) != name for path, name in (*pairs.items(), *fixed.items())):
        return False
    try:
        together.check_used(paths_b)
    except LookupFailedError:
        return False
    return True
