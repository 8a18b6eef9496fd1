"""What is installed: the package, and the start-up hook as a top-level module that `import torch` runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[1]


SOURCES = (".gitignore", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml", "recorder")


def pip(*args: str | Path, env: Mapping[str, str] = MappingProxyType({})) -> None:
    words = [sys.executable, "-m", "pip", "-q", *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr


def copy_sources(target: Path) -> Path:
    wanted = {*SOURCES}
    shutil.copytree(ROOT, target, ignore=lambda folder, names: {*names} - wanted if folder == str(ROOT) else set())
    return target


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy, as the library of the checkout is in use. Its compiler does not optimize: that takes half a minute."""
    out = tmp_path_factory.mktemp("wheel")
    env = {}
    if compiler := next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None):
        env["CC"] = str(out / "cc")
        (out / "cc").write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        (out / "cc").chmod(0o755)
    source = copy_sources(out / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source, env=env)
    (path,) = out.glob("torch_recorder-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content as pip lays it out."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_the_wheel_holds_the_package_and_the_startup_hook_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "recorder").rglob("*")
        if path.is_file() and not {"__pycache__", "startup"} & set(path.parts)
    }
    assert {n for n in names if ".dist-info/" not in n} == source | {
        "recorder_autoload.py",
        "recorder_probe.py",
        "recorder_resume_probe.py",
    }


@pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler here, so nothing is compiled",
)
def test_with_a_compiler_the_wheel_is_of_this_platform_and_holds_the_library(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name
    assert "recorder/native/_kernels.so" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_is_small(wheel: Path) -> None:
    """It has 1.3 MB, and 0.1 MB more where the loops are optimized; what nobody meant to ship is larger."""
    assert wheel.stat().st_size < 1.85 * (1 << 20)


def test_the_source_distribution_holds_sources_alone_and_is_small(tmp_path: Path) -> None:
    """It has 2.3 MB."""
    build = "import sys; from hatchling.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("torch_recorder-*.tar.gz")
    assert path.stat().st_size < 4 << 20
    with tarfile.open(path) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {name for name in names if name.endswith((".so", ".pyc", ".whl"))} == set()
    assert {"LICENSE", "README.md", "hatch_build.py", "recorder/__init__.py", "tests/conftest.py"} <= names


def test_there_is_a_pure_wheel_where_it_is_asked_for(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source, env={"RECORDER_PURE": "1"})
    (wheel,) = tmp_path.glob("torch_recorder-*-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def python(installed: Path, code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(installed)} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_torch_runs_the_hook_only_under_the_flag(installed: Path, tmp_path: Path) -> None:
    code = "import torch, sys; print(*sorted({'recorder', 'recorder_autoload'} & set(sys.modules)))"
    assert python(installed, code, tmp_path).stdout.split() == ["recorder_autoload"]
    under_flag = python(installed, code, tmp_path, RECORDER="1")
    assert under_flag.stdout.split() == ["recorder", "recorder_autoload"], under_flag.stderr


def test_the_hook_that_runs_is_the_installed_one(installed: Path, tmp_path: Path) -> None:
    found = python(installed, "import recorder_autoload; print(recorder_autoload.__file__)", tmp_path)
    assert found.stdout.strip() == str(installed / "recorder_autoload.py")


def test_the_console_script_answers_without_a_run(installed: Path, tmp_path: Path) -> None:
    (script,) = (installed / "bin").glob("recorder")
    code = f"import runpy, sys; sys.argv = ['recorder', '--help']; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = python(installed, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "show" in done.stdout
