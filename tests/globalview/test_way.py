"""The way of one global tensor can be read in one sitting: it is no longer than docs/architecture.md says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch  # noqa: F401 (its import calls the recorder, and is no part of the way)

import recorder
from recorder.run.run import open_run

REPOSITORY = Path(__file__).parents[2]
RUN = REPOSITORY / "tests" / "golden" / "v1.3"
"""Two ranks under FSDP2, each with a part of every parameter."""
PACKAGE = str(Path(recorder.__file__).parent) + "/"
LIMITS = {
    part: (int(functions), int(files))
    for part, functions, files in re.findall(
        r"^\| ([^|]+?) \|[^|]*\| (\d+) \| (\d+) \|$",
        (REPOSITORY / "docs" / "architecture.md").read_text(),
        re.MULTILINE,
    )
}
"""Functions and files of each part of the way, as the page says them."""


class Way:
    """The functions of the package that were passed. A comprehension or a lambda counts as the function around it."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    def __enter__(self) -> Way:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_qualname.endswith(">"):
            self.functions.add((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    def __str__(self) -> str:
        of_file: dict[str, list[str]] = {}
        for file, name in sorted(self.functions):
            of_file.setdefault(file, []).append(name)
        return "\n".join(f"{file}: {', '.join(names)}" for file, names in of_file.items())


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    """The parts of the way, gone one after the other."""
    ways = {part: Way() for part in LIMITS}
    with ways["`open_run`"]:
        run = open_run(RUN)
    with ways["the first question"]:
        first = run.tensor("gain", site="param", name="weight", step=0)
    with ways["another value"]:
        another = run.tensor("gain", site="param", name="weight", step=1)
    with ways["the same value again"]:
        again = run.tensor("gain", site="param", name="weight", step=1)
    assert first.shape == (3,) and not first.equal(another) and another.equal(again)
    return ways


@pytest.mark.parametrize("part", LIMITS)
def test_no_part_of_the_way_is_longer_than_the_page_says(ways: dict[str, Way], part: str) -> None:
    functions = ways[part].functions
    num_functions, num_files = LIMITS[part]
    assert 0 < len(functions) <= num_functions and len({file for file, _ in functions}) <= num_files, str(ways[part])
