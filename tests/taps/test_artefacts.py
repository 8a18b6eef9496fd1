"""What was made of an instrumented model in one process records in another that never saw the model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
KINDS = ("exported", "scripted", "traced", "packaged", "saved")


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
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The artefact that takes a C++ compiler's time is made in a process of its own, while the others are looked at."""
    folder = tmp_path_factory.mktemp("inductor")
    torch.save(batch(), folder / "batch.pt")
    code = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.taps.support import batch; from tests.taps.test_artefacts import make_artefact\n"
        "make_artefact('inductor', pathlib.Path(sys.argv[1], 'inductor.pt2'), batch())"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder), str(_ROOT)]
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        yield folder, process
        process.kill()


@pytest.fixture(scope="module")
def artefacts(compiling: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefacts")
    x = batch()
    torch.save(x, folder / "batch.pt")
    for kind in KINDS:
        make_artefact(kind, folder / f"{kind}.pt2", x)
    done = call(folder, recorder_on=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def compiled(compiling: tuple[Path, subprocess.Popen[bytes]]) -> Path:
    folder, process = compiling
    assert process.wait(300) == 0
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
    assert_same(rows(artefacts, kind), wanted, exactly=True)


def test_an_artefact_runs_as_it_is_where_nothing_records_it(artefacts: Path) -> None:
    """The op is registered by ``import recorder``, before torch or after it, and by nothing else."""
    code = (
        "import {first}, {second}, sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "model = torch.export.load(sys.argv[1] + '/exported.pt2').module()\n"
        "out = model(torch.load(sys.argv[1] + '/batch.pt'))\n"
        "assert torch.equal(out.detach(), torch.load(sys.argv[1] + '/exported.pt2.out')); print('same')"
    )
    orders = ("recorder", "torch"), ("torch", "recorder"), ("torch", "os")
    started = [_start(code.format(first=first, second=second), artefacts) for first, second in orders]
    *whole, without = [(process.communicate(timeout=120), process.returncode) for process in started]
    for (said, errors), _ in whole:
        assert said.strip() == "same", errors
    (_, errors), code_without = without
    assert code_without == 1
    assert "failed to resolve torch.ops.recorder.tap" in errors and "import the custom op" in errors


def test_a_stripped_artefact_needs_no_recorder(tmp_path: Path) -> None:
    program = recorder.strip(torch.export.export(recorder.instrument(make()), (batch(),)))
    torch.export.save(program, tmp_path / "stripped.pt2")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "torch.export.load(sys.argv[1] + '/stripped.pt2').module()(torch.ones(3, 4))\n"
        "assert 'recorder' not in sys.modules; print('fine')"
    )
    said, errors = _start(code, tmp_path).communicate(timeout=120)
    assert said.strip() == "fine", errors


def _start(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def test_the_outputs_are_those_of_the_model(artefacts: Path) -> None:
    expected = make()(batch()).detach()
    for kind in KINDS:
        assert_close(artefacts, kind, expected)


def assert_close(folder: Path, kind: str, expected: torch.Tensor) -> None:
    found = torch.load(folder / f"{kind}.pt2.out")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=kind)


def test_what_the_inductor_made_records_outputs_in_another_process(compiled: Path, wanted: Seen) -> None:
    outputs = {key: value for key, value in wanted.items() if key[1] == "output"}
    assert_same(rows(compiled, "inductor"), outputs, exactly=False)
    assert_close(compiled, "inductor", make()(batch()).detach())


def test_nothing_is_dropped(artefacts: Path, compiled: Path) -> None:
    for folder in (artefacts, compiled):
        (writer,) = recorder.open_run(folder / "runs").writers
        assert writer.balance.dropped == {}
