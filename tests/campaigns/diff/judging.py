"""What a campaign of silent errors expects `diff` to name, and whether it did."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.step_range import Diff
from recorder.globalview.view import GlobalRows, GlobalView
from recorder.run.run import Run

ALL = None
"""All parameters alike."""
TWIN = "+jitter=1"
"""The end of the name of a training that `jitter` has moved."""


@functools.cache
def open_run(path: Path) -> recorder.Run:
    return recorder.open_run(path)


def opened(folder: Path, name: str) -> recorder.Run:
    return open_run(folder / name / "recordings")


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Many trainings are compared with few sound ones, whose rows and tensors are read once meanwhile."""
    view = functools.cache(Run.view)
    with (
        mock.patch.object(Run, "view", lambda run, loss="mean", layouts=(): view(run, loss, tuple(layouts))),
        mock.patch.object(GlobalView, "rows", functools.cache(GlobalView.rows)),
        mock.patch.object(GlobalRows, "array", functools.cache(GlobalRows.array)),
    ):
        yield
    open_run.cache_clear()


def compared(folder: Path, a: str, b: str) -> Diff:
    """Two trainings, beyond the noise of a twin of the first."""
    return diff(opened(folder, a), opened(folder, b), noise=[opened(folder, a + TWIN)])


class Error(NamedTuple):
    module: str | None
    phase: str
    step: int = 0
    base: str = "sound"
    """The training that it is compared with."""
    rank: int | None = None
    """The only one that is wrong."""


class Verdict(NamedTuple):
    word: str
    """``correctly``, ``wrongly``, ``not found``."""
    named: str


def judge(found: Diff, error: Error) -> Verdict:
    """Judge whether the first culprit is the error."""
    if not found.culprits:
        return Verdict("not found", "")
    first = found.culprits[0]
    named = f"{first.module_path!r} {first.phase} step {first.step} ranks {first.ranks}"
    is_right = (first.module_path, first.phase, first.step) == (error.module, error.phase, error.step)
    is_right = is_right and (error.rank is None or first.rank == error.rank)
    others = [f"{one.module_path!r} {one.phase} {one.step}" for one in found.culprits[1:]]
    return Verdict("correctly" if is_right else "wrongly", named + "".join(f" + {one}" for one in others))


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A type for `argparse` that takes one of these names."""

    def known_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"there is no error {text}; there are {', '.join(names)}")
        return text

    return known_name
