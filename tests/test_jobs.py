"""Tests of docs/jobs: each page is typed from top to bottom in a folder of its own, and prints what it shows.

A block with a file's name after its language is saved under that name. A ```` ```diff ```` block changes `train.py`,
which is `tests/small_training.py` at first. Trainings that pages have in common are recorded once, and their ranks
are forked (`tests.ranks`): `torchrun` itself is tested with the other pages.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recorder.cli.app import run_command
from scripts.drawings import DRAWINGS, draw
from tests.programs import needs
from tests.test_pages import INDEX, ROOT, TRAINING, WIDTH, apply_change, assert_printed, run

PAGES = sorted((ROOT / "docs" / "jobs").glob("*.md"))
MAX_LINES = 120
"""Two screens."""


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    file: str
    """The name under which it is saved; may be empty."""
    text: str


class Launched(NamedTuple):
    """A training that was launched: what it was, and the folder of its recording."""

    programs: tuple[tuple[str, str], ...]
    line: str
    recording: Path


def find_blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```(\w+)(?: ([\w.]+))?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, one.start()) + 1, one[1], one[2] or "", one[3]) for one in found]


def typed_lines(block: Block) -> list[str]:
    """The commands of a block; one goes on where a line ends in a backslash."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


class Desk:
    """A folder in which a page is typed."""

    def __init__(self, folder: Path, launched: list[Launched]) -> None:
        self.folder = folder
        self._launched = launched
        (folder / "train.py").write_text(TRAINING)

    def type_block(self, block: Block) -> str:
        """Do what a block says, and return what is printed."""
        if block.file:
            (self.folder / block.file).write_text(block.text)
            return ""
        if block.language == "diff":
            script = self.folder / "train.py"
            script.write_text(apply_change(block.text, script.read_text()))
            return ""
        if block.language == "python":
            with self._sit_down() as out:
                exec(compile(block.text, "snippet", "exec"), {"__name__": "__main__"})
            return out.getvalue()
        assert block.language == "bash", block
        return "\n".join(self._type(line) for line in typed_lines(block))

    def _type(self, line: str) -> str:
        if line.startswith("recorder ") and "--factory" not in line:  # which imports `train`, of this folder
            return self._ask(shlex.split(line.partition(" > ")[0], comments=True)[1:])
        if "RECORDER=1" not in line:
            return run(line, self.folder, allowed=(0, 1))  # of a finding
        programs = tuple((path.name, path.read_text()) for path in sorted(self.folder.glob("*.py")))
        recording = self.folder / dict(re.findall(r"(\w+)=(\S+)", line)).get("RECORDER_DIR", "recordings")
        for other in self._launched:
            if (other.programs, other.line) == (programs, line) and not recording.exists():
                shutil.copytree(other.recording, recording)
                return ""
        ranks = f" TESTS_RECORDER=1 PYTHONPATH={ROOT} {sys.executable} -m tests.ranks "
        printed = run(re.sub(r"(^| )RECORDER=1 torchrun --nproc-per-node ", ranks, line), self.folder)
        kept = self.folder.with_name(f"{self.folder.name}-{len(self._launched)}")
        shutil.copytree(recording, kept)
        self._launched.append(Launched(programs, line, kept))
        return printed

    def _ask(self, words: list[str]) -> str:
        """What a command of the recorder prints."""
        error = io.StringIO()
        with self._sit_down() as out, contextlib.redirect_stderr(error):
            try:
                run_command(words)
            except SystemExit as end:
                assert end.code in (None, 0, 1), f"{words}\n{out.getvalue()}\n{error.getvalue()}"
        return out.getvalue()

    @contextlib.contextmanager
    def _sit_down(self) -> Iterator[io.StringIO]:
        """Be in the folder, in this process, which has imported everything already; what is printed is caught."""
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.chdir(self.folder)
            patch.setenv("COLUMNS", str(WIDTH))
            yield out


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


def test_the_drawings_are_what_the_script_draws() -> None:
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert drawn == {name: draw(drawing) for name, drawing in DRAWINGS.items()}
