"""What was made of an instrumented model in one process records in another that never saw the model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.package.package_exporter import PackageExporter

import recorder
from tests.rigs import jobs

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


def call(folder: Path) -> None:
    """Record what is in a folder in a process that knows nothing of the model."""
    jobs.succeeded(jobs.program(folder, _SCRIPT, folder, _ROOT, **jobs.recording(RULES, dir="runs")))


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jobs.Job]:
    """The artefact that takes a C++ compiler's time is made in a process of its own, while the others are looked at."""
    folder = tmp_path_factory.mktemp("inductor")
    torch.save(batch(), folder / "batch.pt")
    script = folder / "compile.py"
    script.write_text(
        "import pathlib, warnings; warnings.simplefilter('ignore')\n"
        "from tests.taps.support import batch; from tests.taps.test_artefacts import make_artefact\n"
        "make_artefact('inductor', pathlib.Path('inductor.pt2').absolute(), batch())"
    )
    job = jobs.program(folder, script)
    yield job
    job.kill()


@pytest.fixture(scope="module")
def artefacts(compiling: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefacts")
    x = batch()
    torch.save(x, folder / "batch.pt")
    for kind in KINDS:
        make_artefact(kind, folder / f"{kind}.pt2", x)
    call(folder)
    return folder


@pytest.fixture(scope="module")
def compiled(compiling: jobs.Job) -> Path:
    finished = compiling.wait(300)
    assert finished.returncode == 0, finished.output
    call(finished.folder)
    return finished.folder


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


@pytest.fixture(scope="module")
def without(artefacts: Path) -> tuple[str, str, int]:
    """What a process says that never imports the recorder, and its exit code: it loads a stripped artefact first."""
    (artefacts / "stripped").mkdir()
    program = recorder.strip(torch.export.export(recorder.instrument(make()), (batch(),)))
    torch.export.save(program, artefacts / "stripped" / "model.pt2")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "torch.export.load(sys.argv[1] + '/stripped/model.pt2').module()(torch.ones(3, 4))\n"
        "assert 'recorder' not in sys.modules; print('fine', flush=True)\n"
        "torch.export.load(sys.argv[1] + '/exported.pt2')"
    )
    process = _start(code, artefacts)
    said, errors = process.communicate(timeout=120)
    return said, errors, process.returncode


def test_an_artefact_runs_as_it_is_where_nothing_records_it(artefacts: Path, without: tuple[str, str, int]) -> None:
    """The op is registered by ``import recorder``, before torch or after it, and by nothing else."""
    code = (
        "import {first}, {second}, sys, warnings; warnings.simplefilter('ignore'); import torch\n"
        "model = torch.export.load(sys.argv[1] + '/exported.pt2').module()\n"
        "out = model(torch.load(sys.argv[1] + '/batch.pt'))\n"
        "assert torch.equal(out.detach(), torch.load(sys.argv[1] + '/exported.pt2.out')); print('same')"
    )
    orders = ("recorder", "torch"), ("torch", "recorder")
    started = [_start(code.format(first=first, second=second), artefacts) for first, second in orders]
    for said, errors in [process.communicate(timeout=120) for process in started]:
        assert said.strip() == "same", errors
    _, errors, code_without = without
    assert code_without == 1
    assert "failed to resolve torch.ops.recorder.tap" in errors and "import the custom op" in errors


def test_a_stripped_artefact_needs_no_recorder(without: tuple[str, str, int]) -> None:
    said, errors, _ = without
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
