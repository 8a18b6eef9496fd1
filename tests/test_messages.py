"""What the package says when it refuses: `python -m scripts.messages` lists every message."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from recorder.errors import install_line
from scripts.messages import error_names, find_messages, main

MESSAGES = list(find_messages())


def test_the_list_has_the_message_of_every_error_that_is_raised_by_its_class() -> None:
    listed = {one.kind for one in MESSAGES}
    bases = {"RecorderError", "RunError"}
    assert error_names() - bases <= listed
    assert any("is no setting" in one.text and one.path == "recorder/config.py" for one in MESSAGES)


def test_a_message_says_more_than_a_word() -> None:
    short = [one for one in MESSAGES if one.kind in error_names() and len(one.text.split()) < 3 and "{" not in one.text]
    assert not short


def test_a_message_about_what_is_not_installed_has_the_line_to_type() -> None:
    about = [one for one in MESSAGES if re.search(r"\binstall|\bupgrade", one.text) and one.kind in error_names()]
    assert len(about) >= 4
    assert [one for one in about if not re.search(r"pip install|{install_line|; install ", one.text)] == []


def test_the_command_prints_those_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["StoreError"]) == 0
    printed = capsys.readouterr()
    assert all(": StoreError: " in line for line in printed.out.splitlines())
    assert main(["NoError"]) == 2


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'torch-recorder[view]'"),
        ({"url": "file://{clone}", "dir_info": {}}, "pip install '{clone}[view]'"),
        ({"url": "file://{clone}", "dir_info": {"editable": True}}, "pip install -e '{clone}[view]'"),
        ({"url": "file://{clone}/gone", "dir_info": {}}, "pip install 'torch-recorder[view]'"),
        ({"url": "https://index/torch_recorder.whl", "archive_info": {}}, "pip install 'torch-recorder[view]'"),
    ],
)
def test_the_line_to_type_installs_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, line: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin).replace("{clone}", str(tmp_path))

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    line = line.replace("{clone}", str(tmp_path))
    assert install_line("view") == line
    monkeypatch.chdir(tmp_path)
    assert install_line("view") == line.replace(f"'{tmp_path}[", "'.[")
