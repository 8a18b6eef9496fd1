"""Counts and lists as people read them. A list ends before it is long, and says how much more there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[object], most: int = 8) -> str:
    """``a, b, c``, or ``a, b and 7 more`` where there are more than `most`."""
    texts = list(map(str, items))
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def one_line(value: object) -> str:
    """Return anything as text on one line, with nothing that a terminal would obey; also where it has no text."""
    try:
        text = str(value)
    except Exception:  # of a class of the program
        text = f"a {type(value).__name__} that cannot be shown"
    shown = " ".join(text.split())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


def named(noun: str, numbers: Sequence[object], most: int = 8) -> str:
    """``rank 3``, ``ranks 1, 2``."""
    return f"{noun}{'s' * (len(numbers) > 1)} {listed(numbers, most)}"
