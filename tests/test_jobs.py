"""Tests of docs/jobs: each page is typed from top to bottom in a folder of its own, and prints what it shows.

A block with a file's name after its language is saved under that name. A ```` ```diff ```` block changes `train.py`,
which is `tests/small_training.py` at first. Trainings that pages have in common are recorded once, and their ranks
are forked (`tests.rigs.ranks`): `torchrun` itself is tested with the other pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.programs import needs
from tests.rigs.typed_pages import ROOT, Desk, Launched, assert_printed, find_blocks
from tests.test_pages import INDEX

PAGES = sorted((ROOT / "docs" / "jobs").glob("*.md"))
MAX_LINES = 120
"""Two screens."""


@pytest.fixture(scope="module")
def launched() -> list[Launched]:
    return []


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_of_a_job_is_typed_from_top_to_bottom(page: Path, tmp_path: Path, launched: list[Launched]) -> None:
    folder = tmp_path / "desk"
    folder.mkdir()
    desk, printed = Desk(folder, launched), ""
    for block in find_blocks(page.read_text(encoding="utf-8")):
        if block.language == "text":
            assert_printed(block.text, printed)
        elif block.language != "console":
            if "\nnode " in "\n" + block.text:
                needs("node")
            printed = desk.type_block(block)


def test_the_index_lists_the_jobs_in_their_order_and_each_has_a_picture_and_two_screens_at_most() -> None:
    listed = re.findall(r"^\| \[.*?\]\(jobs/([\w-]+\.md)\)", INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert listed == [page.name for page in PAGES]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_LINES, page.name
        assert re.search(r"^!\[.+\]\(\.\./pictures/", text, flags=re.MULTILINE), page.name
