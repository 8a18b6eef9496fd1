"""JSON of unknown origin, member by member: each is read as what it should be, and what is something else is told.

A member that is missing or null has its default. So has one of another kind; it is taken out of the object, and a
sentence says where it was, what it is and what was expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CorruptError

_MAX_PROBLEMS = 100
_MAX_SHOWN = 40
_MAX_SHARED = 8
"""Different values of a member that are compared with each further one."""
Made = TypeVar("Made")


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        CorruptError: there is none; the message begins with `where`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


class Members:
    """One JSON object, and where it stands in its file."""

    __slots__ = ("_above", "_key", "_problems", "raw")

    def __init__(
        self, raw: dict[str, Any], problems: list[str] | None = None, key: str = "", above: Members | None = None
    ) -> None:
        """Nothing is looked at yet.

        Args:
            raw: the object.
            problems: takes a sentence for each member of another kind than was expected.
            key: what the object above calls this one; empty for the outermost.
            above: the object that it is a part of.
        """
        self.raw = raw
        self._problems = problems if problems is not None else []
        self._key = key
        self._above = above

    def text(self, key: str) -> str:
        """A text, or an empty one."""
        value: Any = self.raw.get(key)
        if isinstance(value, str):
            return value
        self._refuse(key, value, "a text")
        return ""

    def optional_text(self, key: str) -> str | None:
        """A text; None where there is none, and an empty one where it is something else."""
        return None if self.raw.get(key) is None else self.text(key)

    def count(self, key: str) -> int:
        """A whole number from 0 on that 63 bits hold, or 0."""
        return self.optional_count(key) or 0

    def optional_count(self, key: str) -> int | None:
        """A `count`; None where there is none."""
        value: Any = self.raw.get(key)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        self._refuse(key, value, "a whole number, not negative")
        return None

    def number(self, key: str, below: float = 1e12) -> float:
        """A finite number from 0 up to a bound, or 0."""
        value: Any = self.raw.get(key)
        if type(value) in (int, float) and math.isfinite(value) and 0 <= value < below:
            return float(value)
        self._refuse(key, value, f"a number from 0 to {below:g}")
        return 0.0

    def flag(self, key: str) -> bool:
        """Whether it is true."""
        value: Any = self.raw.get(key)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value is True

    def optional_flag(self, key: str) -> bool | None:
        """A `flag`; None where it is neither true nor false."""
        self.flag(key)
        value: Any = self.raw.get(key)
        return value if isinstance(value, bool) else None

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of a list."""
        return tuple(self._chosen(key, lambda one: isinstance(one, str), "a list of texts"))

    def counts_of(self, key: str) -> dict[str, int]:
        """The counts of an object that are not 0, by their names."""
        inner = self.inner(key)
        return {} if inner is None else {name: count for name in list(inner.raw) if (count := inner.count(name))}

    def texts_of(self, key: str) -> dict[str, str]:
        """The texts of an object, by their names."""
        inner = self.inner(key)
        return {} if inner is None else {name: text for name in list(inner.raw) if (text := inner.optional_text(name))}

    def ranks(self, key: str, max_ranks: int, max_rank: int) -> tuple[int, ...]:
        """Ranks, each once; none of them where one cannot be a rank, or where there are too many."""
        value: Any = self.raw.get(key)
        is_sound = isinstance(value, list) and len(value) <= max_ranks
        if is_sound and all(type(rank) is int and 0 <= rank < max_rank for rank in value):
            return tuple(dict.fromkeys(value))
        self._refuse(key, value, f"a list of at most {max_ranks} ranks")
        return ()

    def inner(self, key: str) -> Members | None:
        """An object; None where there is none."""
        value: Any = self.raw.get(key)
        if isinstance(value, dict):
            return Members(value, self._problems, key, self)
        self._refuse(key, value, "an object")
        return None

    def all_inner(self, key: str) -> dict[str, Members]:
        """The objects that an object holds, by their names."""
        inner = self.inner(key)
        objects = {name: inner.inner(name) for name in list(inner.raw)} if inner is not None else {}
        return {name: one for name, one in objects.items() if one is not None}

    def list_inner(self, key: str) -> list[Members]:
        """The objects of a list."""
        objects = self._chosen(key, lambda one: isinstance(one, dict), "a list of objects")
        return [Members(one, self._problems, f"{key}[{number}]", self) for number, one in enumerate(objects)]

    def _chosen(self, key: str, is_sound: Callable[[Any], bool], expected: str) -> list[Any]:
        value: Any = self.raw.get(key)
        if not isinstance(value, list):
            self._refuse(key, value, expected)
            return []
        sound = [one for one in value if is_sound(one)]
        if len(sound) < len(value):
            self._refuse(key, next(one for one in value if not is_sound(one)), f"{expected}, in every item")
            self.raw[key] = sound
        return sound

    def _refuse(self, key: str, value: Any, expected: str) -> None:
        if value is None:
            return
        self.raw.pop(key, None)
        if len(self._problems) < _MAX_PROBLEMS:
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
            self._problems.append(f"{self._path(key)} is {shown}, expected {expected}")

    def _path(self, key: str) -> str:
        path, at = key, self
        while at is not None and at._above is not None:
            path, at = f"{at._key}.{path}", at._above
        return path


class Shared:
    """Holds once what several manifests say alike: of 4,096 ranks each lists all ranks, and all modules."""

    def __init__(self) -> None:
        self._known: dict[str, list[Any]] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the identity of a value, the value itself, which so keeps its identity, and what was made of it."""

    def once(self, key: str, value: Any) -> Any:
        """A value, or an equal one that this member had before."""
        known = self._known.setdefault(key, [])
        same = next((one for one in known if one == value), value)
        if same is value:
            known[:] = [value, *known[: _MAX_SHARED - 1]]
        return same

    def made(self, value: Any, make: Callable[[], Made]) -> Made:
        """What `make` makes of a value, made once."""
        known = self._made.get(id(value))
        if known is None:
            known = self._made[id(value)] = value, make()
        earlier: Made = known[1]
        return earlier
