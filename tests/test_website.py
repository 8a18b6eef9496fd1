"""The site's reference pages, which are made from the code, and its table of contents. `scripts/docs` builds it."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import pytest

import recorder
from recorder.checks.book import RULES
from recorder.cli.app import load_command
from recorder.cli.commands import COMMANDS
from recorder.config import RANGES, Settings
from scripts.website.__main__ import ROOT, lay_out, lay_out_manual, main, read_chapters
from scripts.website.reference import default_of, make_commands, make_rules, make_settings
from tests.test_pages import find_table


def first_cells(page: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)


def test_the_page_of_settings_has_every_setting_once_and_its_range() -> None:
    page = make_settings()
    assert first_cells(page) == [item.name for item in fields(Settings)]
    for name, low, _ in RANGES:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, flags=re.MULTILINE)
        assert f"| {low:g} to " in row or "iB to " in row, row


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_commands_has_each_option_of_a_command_in_its_section(name: str) -> None:
    section = make_commands().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert f"recorder {name}" in section
    command = load_command(name)
    options = {one for param in command.params for one in param.opts if one.startswith("--")}
    shown = {one for cell in first_cells(section) for one in re.findall(r"--[\w-]+", cell)}
    assert options <= shown


def test_the_page_of_commands_says_what_run_takes() -> None:
    assert "recorder run [NAME=VALUE ...] COMMAND [ARGUMENT ...]" in make_commands()


def test_no_property_of_a_run_begins_with_what_the_site_takes_for_its_type() -> None:
    """Sphinx takes `words: more` at the beginning of a property's docstring for a type and its description."""
    properties = inspect.getmembers(recorder.Run, lambda member: isinstance(member, (property, cached_property)))
    first_lines = {
        name: (inspect.getdoc(member) or "").partition("\n")[0] for name, member in properties if name[0] != "_"
    }
    assert "endings" in first_lines
    assert {name: line for name, line in first_lines.items() if ": " in line} == {}


def test_the_page_of_rules_has_every_rule_and_every_threshold() -> None:
    cells = first_cells(make_rules())
    assert [cell for cell in cells if "." not in cell] == [rule.name for rule in RULES]
    assert [cell for cell in cells if "." in cell] == [
        f"{rule.name}.{one.name}" for rule in RULES for one in rule.settings
    ]


def test_every_page_that_is_laid_out_is_in_the_contents(tmp_path: Path) -> None:
    lay_out(tmp_path)
    laid = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")} - {"index.md"}
    listed = [page for chapter in read_chapters() for page in chapter.pages]
    assert sorted(listed) == sorted(laid)
    assert (
        "](index.md" not in (ROOT / "docs" / "README.md").read_text()
        and "](../index.md)" in (tmp_path / "docs" / "README.md").read_text()
    )


def test_the_manual_page_is_made_of_the_page_of_commands_alone(tmp_path: Path) -> None:
    lay_out_manual(tmp_path)
    (page,) = tmp_path.rglob("*.md")
    assert page.read_text(encoding="utf-8") == make_commands()
    settings = runpy.run_path(str(tmp_path / "conf.py"))
    (manual,) = settings["man_pages"]
    assert tmp_path / f"{manual[0]}.md" == page and manual[1] == "recorder"


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert main([str(tmp_path)]) == 2
    assert "holds something else than a site" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_the_table_of_settings_names_every_setting_and_its_choices() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` (\|.*)$", find_table("| setting | default | what it does |"), flags=re.MULTILINE)
    )
    assert list(rows) == [item.name for item in fields(Settings)]
    for item in fields(Settings):
        assert all(f"`{choice}`" in rows[item.name] for choice in item.metadata["choices"]), item.name
        if not isinstance(item.default, (str, tuple)):
            assert re.match(rf"\| {re.escape(default_of(item).removesuffix('.0'))}(\.0)?[ :]", rows[item.name]), (
                item.name
            )
        elif item.default and isinstance(item.default, str):
            assert rows[item.name].startswith(f"| `{item.default}` |"), item.name
