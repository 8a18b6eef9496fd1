"""What import-linter cannot see: who is loaded when, and how the package imports itself."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import recorder

PACKAGE = Path(recorder.__file__).parent
TESTS = Path(__file__).parent


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


def test_a_program_without_arguments_can_import_what_it_needs() -> None:
    """As in an embedded interpreter. crc32c reads the program's name as it is imported."""
    code = "import sys; sys.argv = []; import recorder.write.writer, recorder.read.shard; assert sys.argv == []"
    assert "crc32c" in loaded_by(code)


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
        ("recorder.report.report", {"duckdb", "obstore", "pandas", "polars", "rich", "torch", "typer"}),
        ("recorder.run.run", {"duckdb", "obstore", "pandas", "polars", "rich", "torch", "typer"}),
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
    directories = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")} - {"."}
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert directories - rooms == BESIDE_THE_ROOMS


def imported_by(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each import in a folder beside the package: the path of the file, and the full name that it imports."""
    for path in sorted(folder.rglob("*.py")):
        yield from ((path.relative_to(TESTS.parent).as_posix(), name) for name in names_imported_by(path))


@cache
def names_imported_by(path: Path) -> list[str]:
    inside, names = path.relative_to(TESTS.parent), []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(inside.parts[: len(inside.parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def crossings(folder: Path, forbidden: str, *allowed: str) -> dict[str, set[str]]:
    """Return what a folder imports below one package, without the packages that are allowed, by file."""
    found: dict[str, set[str]] = {}
    for path, name in imported_by(folder):
        if f"{name}.".startswith(f"{forbidden}.") and not f"{name}.".startswith(tuple(f"{one}." for one in allowed)):
            found.setdefault(path, set()).add(name)
    return found


TESTS_OF_SCRIPTS = {"tests/test_bench.py", "tests/test_messages.py", "tests/test_scripts.py", "tests/test_website.py"}
"""The only files of the tests that import `scripts`: each tests a script itself."""


def test_the_tests_import_no_script_but_to_test_it() -> None:
    assert crossings(TESTS, "scripts").keys() == TESTS_OF_SCRIPTS


def test_scripts_import_of_the_tests_only_the_rigs() -> None:
    assert crossings(TESTS.parent / "scripts", "tests", "tests.rigs") == {}


def test_campaigns_import_of_the_tests_only_the_rigs() -> None:
    allowed = ("tests.campaigns", "tests.rigs", "tests.small_training")
    assert crossings(TESTS / "campaigns", "tests", *allowed) == {}


def test_rigs_import_neither_tests_nor_campaigns() -> None:
    assert crossings(TESTS / "rigs", "tests", "tests.rigs") == {}


CONTRACTS = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PAST_THE_DOOR = {"recorder.analyze": 1, "recorder.cli": 0, "recorder.report": 4, "recorder.view": 6}
"""For each room above `run`, how many imports of a run's files its contract ignores. The numbers may only fall."""


@pytest.mark.parametrize("room", PAST_THE_DOOR)
def test_imports_past_the_one_door_are_those_that_the_contract_ignores(room: str) -> None:
    [contract] = [
        one
        for one in CONTRACTS
        if room in one.get("source_modules", ()) and "recorder.read" in one["forbidden_modules"]
    ]
    past = {
        f"{path.removesuffix('.py').replace('/', '.')} -> {name.rpartition('.')[0]}"
        for path, name in imported_by(PACKAGE / room.rpartition(".")[2])
        if f"{name}.".startswith(tuple(f"{one}." for one in contract["forbidden_modules"]))
    }
    assert past == {one for one in contract.get("ignore_imports", ()) if one.startswith(f"{room}.")}
    assert len(past) == PAST_THE_DOOR[room]


@pytest.mark.parametrize(("question", "num_excepted"), [("doctor", 0), ("prove", 2)])
def test_imports_of_other_questions_are_those_that_the_contract_ignores(question: str, num_excepted: int) -> None:
    room = f"recorder.analyze.{question}"
    [contract] = [one for one in CONTRACTS if room in one.get("source_modules", ())]
    questions = {f"recorder.analyze.{path.stem}" for path in (PACKAGE / "analyze").glob("[!_]*")}
    assert set(contract["forbidden_modules"]) == questions
    others = crossings(PACKAGE / "analyze" / question, "recorder.analyze", room)
    assert len({(path, name.rpartition(".")[0]) for path, names in others.items() for name in names}) == num_excepted
    assert len([one for one in contract["ignore_imports"] if one.startswith(f"{room}.")]) == num_excepted


def test_no_two_classes_of_the_package_have_one_name() -> None:
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    counted = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counted.items() if count > 1] == []
