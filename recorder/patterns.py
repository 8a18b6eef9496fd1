"""Owns how names are chosen, in rules and in commands alike: globs, regular expressions, exclusions, commas.

Patterns are a tuple of texts. Each is a glob over the whole name, or ``re:`` and a regular expression over the whole
name; a name that is written out is matched, whatever it means as a glob. A leading ``!`` excludes; where all patterns
exclude, everything else is chosen.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

ANY = ("*",)
"""Patterns that match everything."""
EXPRESSION = "re:"
_PIECE = re.compile(r"\\.|\([^)]*\)|\[[^]]*\]|\{[^}]*\}|.", re.DOTALL)
_MAX_COMPARED = 20_000
_MAX_LISTED = 3


def parse_patterns(text: str) -> tuple[str, ...]:
    """Patterns that a person has written with commas between them; ``''`` is the empty name.

    Commas in brackets, such as those of ``re:h{1,2}``, stay.

    Raises:
        ValueError: a regular expression is none.
    """
    words = [""]
    for piece in _PIECE.findall(text):
        if piece == ",":
            words.append("")
        else:
            words[-1] += piece
    return checked(["" if word.strip() == "''" else word.strip() for word in words])


def checked(patterns: Iterable[str]) -> tuple[str, ...]:
    """The same patterns.

    Raises:
        ValueError: a regular expression is none.
    """
    found = tuple(patterns)
    for pattern in found:
        expression = pattern.removeprefix("!")
        if expression.startswith(EXPRESSION):
            try:
                re.compile(expression.removeprefix(EXPRESSION))
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return found


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a name is chosen."""
    if patterns == ANY:
        return True
    wanted, unwanted = sides(patterns)
    return any(_matches_one(p, name) for p in wanted) and not any(_matches_one(p, name) for p in unwanted)


def choose(patterns: tuple[str, ...], names: Collection[str]) -> list[str]:
    """Those of all names that are chosen. A pattern that is one of them means it alone: names may hold brackets."""
    there, (wanted, unwanted) = set(names), sides(patterns)

    def is_hit(pattern: str, name: str) -> bool:
        return name == pattern if pattern in there else _matches_one(pattern, name)

    return [
        name
        for name in names
        if any(is_hit(one, name) for one in wanted) and not any(is_hit(one, name) for one in unwanted)
    ]


@lru_cache(maxsize=256)
def sides(patterns: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Patterns that include, and those that exclude, without their mark."""
    return [p for p in patterns if not p.startswith("!")] or list(ANY), [p[1:] for p in patterns if p.startswith("!")]


def matches_glob(glob: str, name: str) -> bool:
    """Whether a pattern that is no regular expression matches."""
    return glob == name or fnmatchcase(name, glob)


def _matches_one(pattern: str, name: str) -> bool:
    if pattern.startswith(EXPRESSION):
        return re.fullmatch(pattern.removeprefix(EXPRESSION), name) is not None
    return matches_glob(pattern, name)


def nearest(text: str, names: Collection[str], cutoff: float = 0.5) -> list[str]:
    """Up to three names that somebody may have meant: with the same end, or alike."""
    ends = [name for name in names if text and name.endswith("." + text.lstrip("."))]
    return ends[:_MAX_LISTED] or difflib.get_close_matches(
        text, list(names)[:_MAX_COMPARED], n=_MAX_LISTED, cutoff=cutoff
    )


def hint(text: str, names: Collection[str], otherwise: str = "") -> str:
    """The nearest names as the end of a message: ``; nearest is 'layers.0'``. Where there are none, something else."""
    near = nearest(text, names)
    listed = ", ".join(map(repr, near))
    return f"; nearest {'is' if len(near) == 1 else 'are'} {listed}" if near else otherwise
