"""What was made of an instrumented model in one process records in another that never saw the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.package.package_exporter import PackageExporter

import recorder

from .support import RULES, Seen, assert_same, batch, make, plain_hooks, recorded, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).parent / "scripts" / "call_artefacts.py"
KINDS = ("exported", "scripted", "traced", "packaged", "saved", "inductor")


def make_artefact(kind: str, path: Path, x: torch.Tensor) -> None:
    """An artefact of the instrumented model; its kind is the name of its root."""
    model = recorder.instrument(make(), name=kind)
    if kind == "exported":
        torch.export.save(torch.export.export(model, (x,)), path)
    elif kind == "scripted":
        torch.jit.save(torch.jit.script(model), path)
    elif kind == "traced":
        torch.jit.save(torch.jit.trace(model, x), path)
    elif kind == "packaged":
        with PackageExporter(path) as package:
            package.extern(["recorder.**", "torch.**", "numpy.**"])
            package.intern("tests.**")
            package.save_pickle("model", "model.pkl", model)
    elif kind == "saved":
        torch.save(model, path)
    else:
        program = torch.export.export(model.eval().requires_grad_(False), (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def call(folder: Path, *, recorder_on: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    if recorder_on:
        env |= {"RECORDER": "1", "RECORDER_DIR": str(folder / "runs"), "RECORDER_RULES": RULES}
    command = [sys.executable, str(_SCRIPT), str(folder), str(_ROOT)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefacts")
    x = batch()
    torch.save(x, folder / "batch.pt")
    for kind in KINDS:
        make_artefact(kind, folder / f"{kind}.pt2", x)
    done = call(folder, recorder_on=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wanted() -> Seen:
    return plain_hooks(make(), lambda plain: train(plain, batch()))


def rows(folder: Path, kind: str) -> Seen:
    """What was recorded of one artefact: modules are roots in the order of their calls, a package by its own name."""
    roots = {"exported": "model", "packaged": "model_1", "saved": "model_2", "scripted": "model_3", "traced": "model_4"}
    return recorded(recorder.open_run(folder / "runs"), root=roots.get(kind, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_artefact_records_in_another_process(kind: str, artefacts: Path, wanted: Seen) -> None:
    values = {key: value for key, value in wanted.items() if kind != "inductor" or key[1] == "output"}
    assert_same(rows(artefacts, kind), values, exactly=kind != "inductor")


def test_nothing_is_dropped(artefacts: Path) -> None:
    (writer,) = recorder.open_run(artefacts / "runs").writers
    assert writer.balance.dropped == {}


def test_an_artefact_runs_as_it_is_where_nothing_records_it(artefacts: Path) -> None:
    """The op is registered by ``import recorder``, before torch or after it, and by nothing else."""
    code = (
        "import {first}, {second}, sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "model = torch.export.load(sys.argv[1] + '/exported.pt2').module()\n"
        "out = model(torch.load(sys.argv[1] + '/batch.pt'))\n"
        "assert torch.equal(out.detach(), torch.load(sys.argv[1] + '/exported.pt2.out')); print('same')"
    )
    for first, second in (("recorder", "torch"), ("torch", "recorder")):
        done = _python(code.format(first=first, second=second), artefacts)
        assert done.stdout.strip() == "same", done.stderr
    done = _python(code.format(first="torch", second="os"), artefacts)
    assert done.returncode == 1
    assert "failed to resolve torch.ops.recorder.tap" in done.stderr and "import the custom op" in done.stderr


def test_a_stripped_artefact_needs_no_recorder(tmp_path: Path) -> None:
    program = recorder.strip(torch.export.export(recorder.instrument(make()), (batch(),)))
    torch.export.save(program, tmp_path / "stripped.pt2")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "torch.export.load(sys.argv[1] + '/stripped.pt2').module()(torch.ones(3, 4))\n"
        "assert 'recorder' not in sys.modules; print('fine')"
    )
    done = _python(code, tmp_path)
    assert done.stdout.strip() == "fine", done.stderr


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120, cwd=folder
    )


def test_the_outputs_are_those_of_the_model(artefacts: Path) -> None:
    expected: Any = make()(batch()).detach()
    for kind in KINDS:
        found = torch.load(artefacts / f"{kind}.pt2.out")
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=kind)
