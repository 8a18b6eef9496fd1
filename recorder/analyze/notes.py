"""Which stage of a pipeline a row is of, as the row's note says."""

from __future__ import annotations

from functools import lru_cache

from ..read.shards import untrusted
from ..read.stages import HANDED_ON


@lru_cache(maxsize=4096)
def stage_of(note: str | None) -> tuple[int | None, bool]:
    """The stage that a row is of, None where the note names none, and whether its value goes between stages."""
    known = untrusted.members(note)
    stage, mark = known.get("stage"), known.get(HANDED_ON)
    if isinstance(mark, list) and len(mark) == 2 and type(mark[0]) is int:
        return mark[0], True
    return (stage if type(stage) is int else None), False
