"""Tests of README.md and docs/: a snippet runs as it stands there and prints what is shown, a link leads somewhere.

README's own command records the run that the pages ask about; a ```` ```diff ```` block changes its script. The ranks
of the other trainings are forked, and commands of the recorder run in this process, as do snippets that import it: an
interpreter of its own has what must work without the recorder.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.rigs.typed_pages import ROOT, Desk, Launched, assert_printed, run
from tests.rigs.typed_pages import Block as Typable

INDEX = ROOT / "docs" / "README.md"
PAGES = [
    ROOT / "README.md",
    *(INDEX.parent / name for name in re.findall(r"^\| \[.*?\]\((\w[\w-]*\.md)\)", INDEX.read_text(), re.M)),
]
"""README, then the pages of docs/ in the order of their index, which is the order in which their commands are typed."""
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    is_next: bool
    """Nothing but blank lines is between this block and the one before it."""

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types to `recorder`."""
        return [line for line in self.text.splitlines() if self.language == "bash" and line.startswith("recorder ")]

    @property
    def launches(self) -> list[str]:
        """The lines that start a training."""
        return [line for line in self.text.splitlines() if self.language == "bash" and " torchrun " in line]


def find_blocks(page: Path) -> list[Block]:
    blocks: list[Block] = []
    end = 0
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$\n?", TEXT[page], flags=re.MULTILINE | re.DOTALL):
        line = TEXT[page].count("\n", 0, match.start()) + 1
        is_next = bool(blocks) and not TEXT[page][end : match.start()].strip()
        blocks.append(Block(page.name, line, match[1], match[2], is_next))
        end = match.end()
    return blocks


BLOCKS = [block for page in PAGES for block in find_blocks(page)]
CHANGES = [
    (change, asking)
    for change, asking in pairwise(BLOCKS)
    if change.language == "diff" and change.page == asking.page and asking.is_next
]
"""Changes of the training, each with the commands that follow it."""
_CHANGED = {asking for _, asking in CHANGES}
PYTHON = list(dict.fromkeys(block.text for block in BLOCKS if block.language == "python"))
COMMANDS = list(dict.fromkeys(line for block in BLOCKS if block not in _CHANGED for line in block.commands))
LAUNCHES = list(dict.fromkeys(line for block in BLOCKS if block not in _CHANGED for line in block.launches))
SHOWN = [(before, shown) for before, shown in pairwise(BLOCKS) if shown.language == "text"]
"""Each output that a page shows, with the block before it."""


def name_of(block: Block) -> str:
    return f"{block.page}-line{block.line}"


class Typed(NamedTuple):
    """A folder in which everything was typed that the pages say, and what was printed."""

    folder: Path
    printed: dict[str, str]
    snippets: dict[str, str]
    changed: dict[Block, str]
    """What the commands after each change of the training printed."""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    command, others = LAUNCHES[0], [line for line in LAUNCHES if line.startswith("RECORDER_DIR=")]
    assert command.startswith("RECORDER=1 torchrun ")
    assert len(others) == 4  # another run, a twin, one with histograms, and one with a ring
    launched: list[Launched] = []
    desk = Desk(tmp_path_factory.mktemp("pages"), launched)
    run(command, desk.folder)
    for line in others:
        desk.type_line(line)
    changed = {}
    for change, asking in CHANGES:
        beside = Desk(tmp_path_factory.mktemp("changed"), launched)
        (beside.folder / "recordings").symlink_to(desk.folder / "recordings")
        for block in (change, asking):
            changed[asking] = beside.type_block(Typable(block.line, block.language, "", block.text))
    printed = {line: desk.type_line(line) for line in COMMANDS}
    snippets = {snippet: type_snippet(desk, snippet) for snippet in PYTHON}
    return Typed(desk.folder, printed, snippets, changed)


def type_snippet(desk: Desk, snippet: str) -> str:
    if "import recorder" in snippet:
        return desk.type_block(Typable(0, "python", "", snippet))
    return run([sys.executable, "-W", "error", "-c", snippet], desk.folder)


def name_of_snippet(snippet: str) -> str:
    """The page of a snippet, and the modules that it imports."""
    page = next(block.page for block in BLOCKS if block.text == snippet)
    modules = re.findall(r"^import (\S+)", snippet, flags=re.MULTILINE)
    return f"{page}-{'+'.join(modules)}"


@pytest.mark.parametrize("snippet", PYTHON, ids=map(name_of_snippet, PYTHON))
def test_a_python_snippet_runs_and_prints(typed: Typed, snippet: str) -> None:
    assert typed.snippets[snippet].strip()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_recorder_answers(typed: Typed, line: str) -> None:
    assert typed.printed[line].strip()


@pytest.mark.parametrize(("before", "shown"), SHOWN, ids=[name_of(shown) for _, shown in SHOWN])
def test_what_a_page_shows_is_what_is_printed(typed: Typed, before: Block, shown: Block) -> None:
    assert shown.is_next, "the block before an output has to print it"
    if before in typed.changed:
        printed = typed.changed[before]
    elif before.language == "python":
        printed = typed.snippets[before.text]
    else:
        printed = "\n".join(typed.printed[line] for line in before.commands)
    assert_printed(shown.text, printed)


def test_every_change_of_the_training_is_asked_about() -> None:
    assert [change for change, _ in CHANGES] == [block for block in BLOCKS if block.language == "diff"]


def test_the_answers_are_those_of_a_run_that_is_whole(typed: Typed) -> None:
    answers = {line.split()[1]: said for line, said in typed.printed.items()}
    assert all(line.startswith("ok ") for line in answers["doctor"].splitlines())
    assert "no NaN" in answers["first"]
    assert "180 equal exactly, 0 differ" in typed.printed["recorder diff recordings other"]
    assert "no findings" in typed.printed["recorder merge recordings -o merged"]
    steps = {line.split()[0] for line in answers["stats"].splitlines()[4:] if line[:5].strip().isdecimal()}
    assert steps == {"0", "1", "2", "3", "4"}


def test_what_the_commands_leave_is_ignored_by_git(typed: Typed) -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert {path.name for path in typed.folder.iterdir()} <= ignored
    assert {match for asking in typed.changed for match in re.findall(r"RECORDER_DIR=(\w+)", asking.text)} <= ignored


def test_the_demo_installs_what_the_snippets_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"^prepare (\w+)", (ROOT / "scripts" / "demo").read_text(), flags=re.MULTILINE)
    extras = project["optional-dependencies"]
    own = [name for one in extras[extra] for name in re.findall(r"^torch-recorder\[(\w+)\]$", one)]
    assert {"daemon", "view"} <= set(own)
    installed = project["dependencies"] + [package for name in own for package in extras[name]]
    names = {re.split(r"[<>=\[]", one)[0] for one in installed} | {*project["scripts"]}
    imported = {name for text in PYTHON for name in re.findall(r"^(?:import|from) (\w+)", text, flags=re.MULTILINE)}
    assert imported - set(sys.stdlib_module_names) <= names


def find_table(head: str) -> str:
    """The rows of the one table of all pages with this head."""
    (page,) = [text for text in TEXT.values() if head in text]
    table: str = page.partition(head + "\n")[2].partition("\n\n")[0]
    return table


def test_the_table_of_commands_names_every_command_but_run() -> None:
    from recorder.cli.commands import COMMANDS

    named = {
        name
        for cell in re.findall(r"^\| ([^|]*) \|", find_table("| command | answers |"), flags=re.MULTILINE)
        for name in re.findall(r"\w+", cell)
    }
    assert named - {"recorder"} == COMMANDS.keys() - {"run"}


def test_the_rules_of_the_pages_record_what_they_say(tmp_path: Path) -> None:
    (command,) = [line for line in LAUNCHES if line.startswith("RECORDER_RULES=")]
    Desk(tmp_path, []).type_line(command)
    import recorder

    rows = recorder.open_run(tmp_path / "recordings").table(columns=["site", "module_path", "step", "encoding"])
    found = {(r["site"], r["step"], r["encoding"] is not None) for r in rows.to_pylist()}
    assert found == {("output", 0, True), ("grad", 0, True)} | {("param", step, False) for step in range(5)}
    outputs = {r["module_path"] for r in rows.to_pylist() if r["site"] == "output"}
    assert outputs == {f"blocks.{i}{end}" for i in range(2) for end in ("", ".mlp", ".mlp.up", ".mlp.down")}


@pytest.mark.parametrize(
    "line", [line for line in LAUNCHES[1:] if not line.startswith(("RECORDER_DIR=", "RECORDER_RULES="))]
)
def test_every_other_way_to_start_the_training_records_it(line: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "small_training.py", tmp_path / "train.py")
    run(line, tmp_path)
    assert "2 of 2" in run("recorder ls recordings", tmp_path)


def test_every_reader_has_a_snippet() -> None:
    text = "".join(PYTHON)
    for call in ("pd.read_feather", "ds.dataset", "pl.scan_ipc", "duckdb.sql", "recorder.open_run", "recorder.decode"):
        assert call in text


def test_the_table_of_rules_names_every_key() -> None:
    from recorder.rules import Rule

    table = find_table("| key | value |")
    named = [key for line in table.splitlines()[1:] for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(Rule.KEYS)


def test_the_table_of_floors_is_that_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["recorder"]]
    floors: dict[int, set[str]] = {}
    for line in find_table("| floor | room | holds | third party |").splitlines()[1:]:
        _, floor, rooms, *_ = line.split("|")
        floors.setdefault(int(floor), set()).update(re.findall(r"`(\w+)`", rooms))
    assert [floors[floor] for floor in range(len(floors))] == [
        set(re.findall(r"\w+", rooms)) for rooms in layers[:0:-1]
    ]


def test_settings_that_the_pages_state_are_the_defaults() -> None:
    from recorder.config import Settings

    defaults, text = Settings(), " ".join(" ".join(TEXT.values()).split())
    assert f"{defaults.max_bytes >> 30} GiB a rank on disk" in text
    assert f"less than {defaults.min_free_bytes >> 30} GiB free" in text
    assert (defaults.on_quota, defaults.wait_s_per_step) == ("retire", 1.0)


def test_readme_is_short_and_the_index_names_every_page() -> None:
    assert len(TEXT[ROOT / "README.md"].splitlines()) <= 250
    assert sorted(PAGES[1:]) == sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
    assert len(set(PAGES)) == len(PAGES)


MARKDOWN = sorted(
    {
        *ROOT.glob("*.md"),
        *(path for room in ("docs", "deploy", "recorder", "scripts", "tests") for path in (ROOT / room).rglob("*.md")),
    }
)


ROOMS = sorted(path.parent.name for path in (ROOT / "recorder").glob("*/__init__.py"))


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", prose_of(page), flags=re.MULTILINE)
    anchors: list[str] = []
    for head in heads:
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        num_before = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in anchors)
        anchors.append(f"{slug}-{num_before}" if num_before else slug)
    return set(anchors)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: outside of the repository"
        if anchor:
            assert anchor in anchors_of(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_module_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:recorder|tests|scripts|deploy|docs)/[\w./-]*\w/?)`", text):
        assert (ROOT / name).exists(), name
    drawn = "\n".join(line for line in text.splitlines() if line.startswith(" "))
    for name in re.findall(rf"(?<![\w/])(?:{'|'.join(ROOMS)})/\w+\.py", drawn):
        assert (ROOT / "recorder" / name).exists(), name
    for name in re.findall(r"python -m ((?:tests|scripts)[\w.]*\w)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
