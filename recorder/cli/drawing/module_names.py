"""Shortens lists of module paths for people, as in 'blocks.{0..11}.mlp'. Never leaves a path out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...system.text import span


def grouped(paths: Sequence[str]) -> list[str]:
    """Return quoted paths; those that differ in nothing but numbers are one, where every combination is there."""
    groups: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    for path in paths:
        parts = path.split(".")
        shape = tuple("#" if _is_number(part) else "=" + part for part in parts)
        groups.setdefault(shape, {})[tuple(int(part) for part in parts if _is_number(part))] = path
    texts = []
    for shape, members in groups.items():
        values = [sorted(set(column)) for column in zip(*members, strict=True)]
        if len(members) < 3 or math.prod(map(len, values)) != len(members):
            texts += [repr(path) for path in members.values()]
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
    return f"{{{','.join(map(str, values))}}}"
