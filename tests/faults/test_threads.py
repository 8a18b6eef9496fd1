"""Several threads under one recording: every value is there once, right, under a number of its own."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.capturing import Recording, Tiny, batch, flagged

PAYLOAD = ("data", "encoding", "payload_bytes", "dtype", "shape")
NUM_THREADS, NUM_CALLS = 4, 25


def in_threads(work: Callable[[int], None]) -> None:
    barrier = threading.Barrier(NUM_THREADS)
    problems: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(NUM_THREADS)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change in the middle of everything
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert problems == []


def assert_balanced(recording: Recording) -> None:
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"]
    assert ledger["dropped"] == {}
    rows = recording.rows()
    assert len(rows) == ledger["written"]
    assert sorted(rows["seq"]) == list(range(len(rows)))


def payloads(recording: Recording, **equal: object) -> Counter[bytes]:
    """How often each value was recorded."""
    table = recording.run.table(columns=["module_path", "site", *PAYLOAD])
    found: Counter[bytes] = Counter()
    for row in table.to_pylist():
        if all(row[key] == value for key, value in equal.items()):
            found[recorder.decode(row).tobytes()] += 1
    return found


@pytest.mark.parametrize("with_gradients", [True, False])
def test_threads_that_call_one_model_leave_every_value_once(tmp_path: Path, with_gradients: bool) -> None:
    with flagged(tmp_path, "site=output,grad_output,tap keep=tensor") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
        expected = {i: model(batch(i)).detach().numpy().tobytes() for i in range(1, 1 + NUM_THREADS)}

        def work(i: int) -> None:
            for _ in range(NUM_CALLS):
                with torch.set_grad_enabled(with_gradients):
                    y = model(recorder.tap("into", batch(i + 1)))
                    if with_gradients:
                        torch.autograd.grad(y.sum(), y)

        in_threads(work)
        model(batch()).sum().backward()
        optimizer.step()
    assert_balanced(recording)
    found = payloads(recording, module_path="second", site="output")
    for value in expected.values():
        assert found[value] == NUM_CALLS + 1
    assert sum(payloads(recording, site="tap").values()) == NUM_THREADS * NUM_CALLS
    first = payloads(recording, module_path="first", site="output")
    assert sum(first.values()) == sum(found.values()) == NUM_THREADS * (NUM_CALLS + 1) + 2


def test_threads_with_a_model_each_are_roots_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(NUM_THREADS)]
    twins = [[p.detach().clone() for p in model.parameters()] for model in models]
    with flagged(tmp_path, "site=output,grad keep=tensor") as recording:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

        def work(i: int) -> None:
            for _ in range(NUM_CALLS):
                models[i](batch(i)).sum().backward()
                optimizers[i].step()
                optimizers[i].zero_grad()

        in_threads(work)
    assert_balanced(recording)
    rows = recording.rows(site="output", module_path="0")
    assert sorted(Counter(rows["root"]).values()) == [NUM_CALLS] * NUM_THREADS
    assert Counter(recording.rows(site="grad", name="bias")["root"]) == Counter(rows["root"])
    for model, before in zip(models, twins, strict=True):
        again = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.01)
        for _ in range(NUM_CALLS):
            again(batch(models.index(model))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_no_thread_reads_the_gradients_of_a_model_that_another_thread_trains(tmp_path: Path) -> None:
    """A backward may be setting them: a read breaks the memory of the process, in about one of 40 such trainings."""
    models = {"ours": Tiny(), "theirs": Tiny()}
    with flagged(tmp_path, "site=grad keep=stats") as recording:
        attached = [recorder.attach(model, name=name) for name, model in models.items()]
        optimizers = [torch.optim.SGD([*model.first.parameters(), model.second.bias]) for model in models.values()]
        for _ in range(3):
            thread = threading.Thread(target=lambda: models["theirs"](batch()).sum().backward())
            thread.start()
            thread.join()
            models["ours"](batch()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        del attached
    roots = {
        root["name"]: {module["path"]: module for module in root["modules"]} for root in recording.manifest["roots"]
    }
    assert roots["ours"]["second"]["untrained"] == ["weight"], "no optimizer has it"
    assert "untrained" not in roots["theirs"]["second"]


def test_closing_in_one_thread_while_others_record_loses_no_account(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for i in range(4):
        model = Tiny()
        attachment = recorder.attach(model, enabled=True, dir=tmp_path / str(i), rules="site=*", flush_interval_s=0.01)
        has_begun, is_over = threading.Event(), threading.Event()

        def call(
            model: nn.Module = model, has_begun: threading.Event = has_begun, is_over: threading.Event = is_over
        ) -> None:
            while not is_over.is_set():
                model(recorder.tap("into", batch())).sum().backward()
                recorder.scalar("loss", 1.0)
                has_begun.set()

        threads = [threading.Thread(target=call) for _ in range(2)]
        closer = threading.Thread(target=attachment.close)
        for thread in threads:
            thread.start()
        assert has_begun.wait(30)
        attachment.flush(5)
        closer.start()
        closer.join()
        is_over.set()
        for thread in threads:
            thread.join()
        run = recorder.open_run(tmp_path / str(i))
        (writer,) = run.writers
        balance = writer.balance
        assert writer.state == "closed"
        assert balance.observed == balance.written + sum(balance.dropped.values())
        assert set(balance.dropped) <= {"closed", "interrupted"}
        assert balance.written == writer.num_rows > 0
    assert [t.name for t in set(threading.enumerate()) - before if t.name.startswith("recorder")] == []
