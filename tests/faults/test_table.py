"""The table of faults names, for every fault, tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
NUM_FAULTS = 76
EXCUSES = ("no viewer",)
EXCUSED = {66}


class Fault(NamedTuple):
    """A row of the table."""

    number: int
    priority: str
    tests: str


def faults() -> list[Fault]:
    text = (Path(__file__).parent / "TABLE.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (P\d) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return [Fault(int(number), priority, tests) for number, priority, tests in rows]


def named(text: str) -> list[str]:
    return re.findall(r"[\w/]+\.py::\w+", text)


@cache
def known_in(path: str) -> frozenset[str]:
    """Every test of a file, those of classes among them."""
    tree = ast.parse((TESTS / path).read_text())
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def missing(text: str) -> list[str]:
    """Of the tests that a text names, those that do not exist."""
    found = []
    for test in named(text):
        path, _, name = test.partition("::")
        if not (TESTS / path).is_file() or name not in known_in(path):
            found.append(test)
    return found


def test_every_fault_stands_in_the_table_once() -> None:
    assert [fault.number for fault in faults()] == list(range(1, NUM_FAULTS + 1))


def test_every_fault_of_priority_0_and_1_has_a_test() -> None:
    without = {f.number for f in faults() if f.priority in ("P0", "P1") and not named(f.tests)}
    assert without == EXCUSED
    assert all(fault.tests.strip() in EXCUSES for fault in faults() if fault.number in EXCUSED)


def test_every_test_that_the_table_names_exists() -> None:
    text = (Path(__file__).parent / "TABLE.md").read_text()
    assert len(named(text)) > NUM_FAULTS
    assert missing(text) == []


def test_a_test_that_is_gone_would_be_noticed() -> None:
    here = f"faults/test_table.py::{test_every_fault_stands_in_the_table_once.__name__}"
    gone = ["faults/test_table.py::test_of_nothing", "nowhere/test_it.py::test_it"]
    assert missing(", ".join([here, *gone])) == gone
