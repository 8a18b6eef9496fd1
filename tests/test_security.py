"""SECURITY.md: each promise names a test, and the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def _named() -> list[tuple[str, str]]:
    """File and name of each test; a name alone is of the file before it."""
    found, file = [], ""
    for path, name in re.findall(r"`((?:tests/\S+?\.py)?)::(\w+)`", TEXT):
        file = path or file
        found.append((file, name))
    return found


@pytest.mark.parametrize(("file", "name"), _named())
def test_a_promise_names_a_test_that_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_promise_names_one() -> None:
    promised = TEXT.split("## Promised")[1].split("## Not promised")[0]
    rows = [line for line in promised.splitlines() if line.startswith("|") and not line.startswith(("| does", "|---"))]
    assert len(rows) == 8 and all("::test_" in row or "::Test" in row for row in rows)
    assert len(_named()) >= 14
