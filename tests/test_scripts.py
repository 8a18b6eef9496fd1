"""Scripts as a person starts them: what is wrong is said plainly, and the demo records and shows a short training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.drawings import DRAWINGS, draw
from tests.rigs.programs import PACKAGES, needs

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "scripts" / "demo"


def demo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DEMO, *arguments], env=os.environ | env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "tensor"], "--layout 'tensor' is none of single, ddp, fsdp2"),
        (["--steps=0"], "--steps '0' is no number from 1"),
        (["--steps"], "--steps needs a value"),
        (["--bogus"], "unknown argument '--bogus'"),
    ],
)
def test_a_wrong_argument_is_said_before_anything_is_installed(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = demo(*arguments, VENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("demo: ")
    assert said in done.stderr


def test_an_environment_that_is_none_is_said(tmp_path: Path) -> None:
    done = demo(VENV=str(tmp_path))
    assert done.returncode == 2
    assert "holds no environment" in done.stderr


@pytest.mark.skipif(
    not Path(sys.prefix, "recorder-installed-test").exists(), reason="only in an environment that scripts/test made"
)
def test_the_demo_trains_records_and_shows(tmp_path: Path) -> None:
    done = demo(
        *["--layout", "ddp", "--steps", "2"],
        VENV=sys.prefix,
        RECORDER_DIR=str(tmp_path),
        RECORDER_RULES="module=blocks.3.* site=output",
    )
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.iterdir()
    training, _, after = done.stdout.partition("The run: recorder ls ")
    assert "held-out loss" in training
    assert "2 of 2 ranks, steps 0..1" in after
    assert "blocks.3.mlp.down" in after
    shown, _, to_type = after.partition("What you would type next")
    assert "absmax" in shown
    commands = [line.strip() for line in to_type.splitlines() if line.strip()]
    assert len(commands) == 3
    name = json.loads((run / "_run.json").read_text())["name"]
    for command in commands[:2]:
        typed = subprocess.run(command, shell=True, cwd=DEMO.parents[1], capture_output=True, text=True, timeout=120)
        assert typed.returncode == 0, typed.stdout + typed.stderr
        assert str(tmp_path / name) in command


def test_where_several_machines_cannot_be_made_the_reason_is_said(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([DEMO.with_name("test-cluster")], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "test-cluster: cannot run here: this is not root\n"


def test_every_test_that_the_oldest_torch_is_spared_is_one() -> None:
    spared = re.findall(
        r"--deselect='?([\w/.]+)::(\w+)", (ROOT / "scripts" / "test-oldest").read_text(encoding="utf-8")
    )
    assert spared
    for file, name in spared:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


@pytest.mark.parametrize("tier", ["quick", "long"])
def test_every_path_of_a_tier_is_there(tier: str) -> None:
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^{tier}=\((.*?)\)$", script, flags=re.MULTILINE | re.DOTALL)
    for path in listed.split():
        assert (ROOT / path.removeprefix("--ignore=")).exists(), path


def test_every_program_that_tests_need_is_installed_on_debian() -> None:
    script = (ROOT / "scripts" / "environment.sh").read_text(encoding="utf-8")
    (listed,) = re.findall(r"for one in (\S+:\S+(?: \S+:\S+)*); do", script)
    assert dict(one.split(":") for one in listed.split()) == PACKAGES


def test_a_program_that_is_missing_skips_a_test_and_fails_it_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    line = "node is not installed: apt-get install --no-install-recommends nodejs"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=line):
        needs("node")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=line):
        needs("node")


def test_the_drawings_are_what_the_script_draws() -> None:
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert drawn == {name: draw(drawing) for name, drawing in DRAWINGS.items()}
