"""What import-linter cannot see: who is loaded when, and how the package imports itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recorder

PACKAGE = Path(recorder.__file__).parent


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*{{m.partition('.')[0] for m in sys.modules}})"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert printed.returncode == 0, printed.stderr
    return set(printed.stdout.split())


def test_import_recorder_loads_no_third_party() -> None:
    assert loaded_by("import recorder").isdisjoint({"numpy", "pyarrow", "rich", "torch", "typer", "zstandard"})


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("recorder.config", {"pyarrow", "torch"}),
        (
            "recorder.lifecycle.active",
            {"pandas", "pyarrow", "rich", "typer"},
        ),  # what the flag loads
        ("recorder.lifecycle.launch", {"pyarrow", "rich", "torch", "typer"}),
        ("recorder.globalview.run", {"duckdb", "obstore", "pandas", "polars", "rich", "torch", "typer"}),
        ("recorder.write.writer", {"pandas", "rich", "torch", "typer"}),
    ],
)
def test_a_room_loads_only_what_it_needs(module: str, forbidden: set[str]) -> None:
    assert loaded_by(f"import {module}") & forbidden == set()


def test_the_package_imports_itself_by_relative_names_only() -> None:
    """It may be loaded under another name, and a user's own recorder.py must never be taken for it."""
    absolute = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "startup" in path.parts:
            continue  # a top-level module of its own
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            if any(name.partition(".")[0] == "recorder" for name in names):
                absolute.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert absolute == []


BESIDE_THE_ROOMS = {"browser", "deploy", "distributed", "faults", "golden", "gpu", "models", "roundtrip"}
"""What these directories test is in no one room."""


def test_each_directory_of_tests_is_named_like_a_room_of_the_package() -> None:
    tests = Path(__file__).parent
    directories = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"."}
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert directories - rooms == BESIDE_THE_ROOMS
