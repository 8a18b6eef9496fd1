"""Formats counts, lists, sizes and times for people, and values for JSON.

A long list is cut, and ends with the number of omitted items.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

MODEL = "(the model)"
"""The words that messages use for the root module, whose path is an empty text."""
MAX_CELL = 200
"""The most characters of a text that `printable` returns."""
_MAX_MEMBERS = 8
"""The most numbers in a pattern such as ``{0,2,5}``. From longer patterns the middle is left out."""
_MAX_DEPTH = 50
"""The most levels of JSON. Deeper parts of untrusted input become ``...``."""


def plural(noun: str, number: int) -> str:
    """Return a noun in the singular or plural: ``row``, ``rows``; ``batch``, ``batches``."""
    return noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, such as ``1 row`` or ``2,000 rows``."""
    return f"{number:,} {plural(noun, number)}"


def listed(items: Iterable[object], most: int = 8) -> str:
    """Return ``a, b, c``, or ``a, b and 7 more`` if there are more than `most` items."""
    texts = list(map(str, items))
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def steps_in_words(steps: Sequence[int], noun: str = "step") -> str:
    """Return ascending steps in words, such as ``step 3``, ``steps 0 to 49`` or ``steps 0 to 90 (one in 10)``."""
    if len(steps) < 2:
        return f"{noun} {steps[0]}" if steps else f"no {noun}"
    gap, rest = divmod(steps[-1] - steps[0], len(steps) - 1)
    is_even = not rest and all(b - a == gap for a, b in pairwise(steps))
    some = f" (one in {gap})" if is_even else f" ({len(steps)} of them)"
    return f"{noun}s {steps[0]} to {steps[-1]}{'' if is_even and gap == 1 else some}"


def shortened(text: str, most: int) -> str:
    """Return a text. If it has more than `most` characters, the middle is left out."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def fewer_clauses(text: str, most: int) -> str:
    """Return clauses that are joined by semicolons. Those before the last are left out beyond `most` characters."""
    clauses = text.split("; ")
    while len(clauses) > 2 and len("; ".join(clauses)) > most:
        del clauses[-2]
    return shortened("; ".join(clauses), most)


def one_line(value: object) -> str:
    """Return any object as text on one line without control characters, even if `str` fails for it."""
    try:
        text = str(value)
    except Exception:  # a class of the program may raise anything
        text = f"a {type(value).__name__} that cannot be shown"
    return printable_line(" ".join(text.split()))


def named(noun: str, numbers: Sequence[object], most: int = 8) -> str:
    """Return a noun and its numbers, such as ``rank 3`` or ``ranks 1, 2``."""
    return f"{plural(noun, max(len(numbers), 1))} {listed(numbers, most)}"


def nonfinite_in_words(num_nan: float, num_infinite: float) -> str:
    """Return how many elements are not finite, such as ``3 NaN and 1 infinite``. A number that is 0 is left out."""
    counts = ((num_nan, "NaN"), (num_infinite, "infinite"))
    return " and ".join(f"{num:.0f} {kind}" for num, kind in counts if num)


def size(num_bytes: int) -> str:
    """Return a number of bytes as text, in powers of ten: ``1.5 MB`` is 1,500,000."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def moment(time_ns: int) -> str:
    """Return a wall clock time as text in local time. Empty for 0 and for times out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9)) if time_ns > 0 else ""
    except (OverflowError, OSError, ValueError):
        return ""


def printable_line(text: object) -> str:
    """Return untrusted input on one line of any length, otherwise as `printable` does."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def printable(text: object) -> str:
    """Return untrusted input on one line of bounded length, without control characters for terminals."""
    shown = printable_line(text)
    return shown if len(shown) <= MAX_CELL else shown[: MAX_CELL - 3] + "..."


def number(value: float | int | None) -> str:
    """Return a statistic as a short text."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value}"
    return f"{value + 0.0:.4g}"  # adding 0.0 turns -0.0 into 0.0


def span(numbers: Sequence[int]) -> str:
    """Return sorted numbers as a range, such as ``0..100``. If there are gaps, add the count: ``0..100 (57)``."""
    if not numbers:
        return ""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    gaps = "" if last - first + 1 == len(numbers) else f" ({len(numbers)})"
    return f"{first}..{last}{gaps}"


def module_in_words(path: str) -> str:
    """Return a module path in quotes, or the words for the root."""
    return repr(path) if path else MODEL


def value_in_words(module_path: str, site: str, name: str = "") -> str:
    """Return where a value is, such as ``'up' grad weight``. The root is named in words."""
    return f"{module_in_words(module_path)} {site_in_words(site, name)}"


def site_in_words(site: str, name: str) -> str:
    """Return a site and a name there, such as ``grad weight``. An argument that is called ``input`` is that alone."""
    return site if name in ("", site) else f"{site} {name}"


def model_in_words(root: str, *, has_models: bool = False) -> str:
    """Return the name of a model, to be put before a path. Empty for the first model, unless a run `has_models`."""
    return "" if not root or (root == "model" and not has_models) else f"{root}: "


def grouped(paths: Sequence[str]) -> list[str]:
    """Return paths in quotes. Paths that differ only in numbers, in all combinations, become one pattern."""
    groups: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    for path in paths:
        parts = path.split(".")
        shape = tuple("#" if _is_number(part) else "=" + part for part in parts)
        groups.setdefault(shape, {})[tuple(int(part) for part in parts if _is_number(part))] = path
    texts = []
    for shape, members in groups.items():
        values = [sorted(set(column)) for column in zip(*members, strict=True)]
        if len(members) < 3 or math.prod(map(len, values)) != len(members):
            texts += [module_in_words(path) for path in members.values()]
            continue
        numbers = iter(values)
        texts.append(repr(".".join(_numbers(next(numbers)) if part == "#" else part[1:] for part in shape)))
    return texts


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10 and str(int(part)) == part


def _numbers(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    if values[-1] - values[0] + 1 == len(values):
        return f"{{{span(values)}}}"
    if len(values) > _MAX_MEMBERS:
        return f"{{{','.join(map(str, values[:3]))},...,{values[-1]} ({len(values)})}}"
    return f"{{{','.join(map(str, values))}}}"


def bytes_of_setting(value: int) -> str:
    """Return a number of bytes in its shortest unit: ``16 GiB (17179869184)``, ``4 GB (4000000000)``."""
    units = [(1000**power, name) for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))]
    units += [(1024**power, name) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))]
    count, name = min((value / scale, name) for scale, name in units if scale <= max(value, 1))
    exact = [(value // scale, name) for scale, name in units if scale <= value and value % scale == 0]
    if exact:
        count, name = min(exact)
    return str(value) if name == "B" else f"{count:.4g} {name} ({value})"


def for_json(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can represent. Keys become texts, and NaN and infinities become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): for_json(item, depth + 1) for key, item in value.items()}
    return [for_json(item, depth + 1) for item in value]
