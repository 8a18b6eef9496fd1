"""A notebook's kernel: cells that run twice, are interrupted, raise, and make the model anew."""

from __future__ import annotations

import _thread
import code
import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import recorder

SETUP = """
import signal, torch, recorder
def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
MODEL = """
model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
ATTACH = "attachment = recorder.attach(model, enabled=True, rules='site=output keep=tensor', dir=folder)"


class Kernel:
    """Runs cells as a kernel does: an error ends the cell, not the kernel."""

    def __init__(self, folder: Path) -> None:
        self.names: dict[str, object] = {"folder": str(folder), "__name__": "__main__"}
        self._interpreter = code.InteractiveInterpreter(self.names)
        self.cell(SETUP)
        self.cell(MODEL)

    def cell(self, source: str) -> None:
        self._interpreter.runcode(compile(source, "<cell>", "exec"))


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path)
    yield started
    started.cell("attachment.close()")


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Ctrl-C, and again until the cell has ended: Python drops one that comes while it frees an object."""
    has_ended = threading.Event()

    def press() -> None:
        while not has_ended.wait(0.3):
            _thread.interrupt_main(signal.SIGINT)

    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def outputs(folder: Path) -> list[tuple[str, int, int]]:
    frame = recorder.open_run(folder).to_pandas()
    rows = frame[frame["module_path"] == "0"].sort_values("seq")
    return list(zip(rows["root"], rows["step"], rows["call"], strict=True))


def test_a_cell_that_attaches_twice_records_once(kernel: Kernel, tmp_path: Path) -> None:
    for _ in range(2):
        kernel.cell(ATTACH)
        kernel.cell("train(model, optimizer, 2)")
    kernel.cell("attachment.flush()")
    assert outputs(tmp_path) == [("model", step, 0) for step in range(4)]


def test_an_interrupted_cell_and_one_that_raises_leave_the_next_step_right(
    kernel: Kernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.cell(ATTACH)
    kernel.cell("train(model, optimizer, 2)")
    kernel.cell("model(torch.ones(3, 5))")
    assert "mat1 and mat2" in capsys.readouterr().err
    with interrupts():
        kernel.cell("while True: model(torch.ones(3, 4))")
    assert "KeyboardInterrupt" in capsys.readouterr().err
    kernel.cell("train(model, optimizer, 3)")
    kernel.cell("attachment.close()")
    found = outputs(tmp_path)
    assert found[:2] == [("model", 0, 0), ("model", 1, 0)]
    assert {step for _, step, _ in found[2:-2]} == {2}
    assert found[-2:] == [("model", 3, 0), ("model", 4, 0)]
    (writer,) = recorder.open_run(tmp_path).writers
    balance = writer.balance
    assert balance.observed == balance.written + sum(balance.dropped.values())


def test_a_model_that_is_made_anew_is_another_root_and_the_old_one_is_let_go(kernel: Kernel, tmp_path: Path) -> None:
    kernel.cell(ATTACH)
    kernel.cell("import weakref; old = weakref.ref(model); train(model, optimizer, 2)")
    kernel.cell(MODEL)
    kernel.cell("import gc; gc.collect(); assert old() is None")
    kernel.cell("second = recorder.attach(model, enabled=True); train(model, optimizer, 2); second.flush()")
    assert {root for root, _, _ in outputs(tmp_path)} == {"model", "model_1"}
    assert len(outputs(tmp_path)) == 4
    kernel.cell("second.close()")


def test_a_cell_that_closes_and_attaches_again_makes_another_run(kernel: Kernel, tmp_path: Path) -> None:
    for i in range(3):
        kernel.names["folder"] = str(tmp_path / str(i))
        kernel.cell(ATTACH)
        kernel.cell("train(model, optimizer, 2); attachment.close(); attachment.close()")
    assert [outputs(tmp_path / str(i)) for i in range(3)] == [[("model", 0, 0), ("model", 1, 0)]] * 3
