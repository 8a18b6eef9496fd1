"""What a recording says of a fault of the program itself, while the program trains and at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from recorder.checks.rows import Catalog
from recorder.checks.rule import Finding, Severity
from recorder.config import load_settings
from recorder.lifecycle.ring import RingWatch
from tests.rigs import jobs

TRAIN = """
import logging, sys, threading, torch
from torch import nn
told = threading.Event()
class Lines(logging.Handler):
    def emit(self, record):
        line = record.getMessage()
        print(line, flush=True)
        if line.startswith("rank 0: "):
            told.set()
logger = logging.getLogger("recorder")
logger.addHandler(Lines())
logger.setLevel(logging.INFO)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)
        self.other = nn.Dropout(0.1)
    def forward(self, x):
        x = self.head(self.other(self.drop(self.body(x))).relu())
        return {returned}
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD({trained}, lr=0.1)
for step in range(40):
    x = torch.randn(16, 8)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1))
    {clear}
    loss.backward()
    optimizer.step()
    {after}
told.wait({patience})
print("done")
"""
SOUND = {
    "returned": "x", "trained": "model.parameters()", "clear": "optimizer.zero_grad()", "after": "", "patience": "0",
}  # fmt: skip
FAULTS = {
    "loss_argument": {"returned": "x.softmax(-1)"},
    "not_optimized": {"trained": "[*model.body.parameters(), model.head.weight]"},
    "not_cleared": {"clear": ""},
    "evaluation_mode": {"after": "model.eval()"},
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], Path]]:
    """The lines of a sound program and of one with each fault, and the folders of the runs. All run side by side."""
    started = {}
    for name, changes in {"sound": {}, **{name: {**one, "patience": "60"} for name, one in FAULTS.items()}}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "train.py").write_text(TRAIN.format(**{**SOUND, **changes}))
        started[name] = jobs.program(folder, "train.py", RECORDER="1", RECORDER_DIR="runs"), folder / "runs"
    return {name: (jobs.succeeded(job).output.splitlines(), folder) for name, (job, folder) in started.items()}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_of_the_program_is_said_while_it_trains_and_at_its_end(
    outputs: dict[str, tuple[list[str], Path]], rule: str
) -> None:
    lines, folder = outputs[rule]
    found = [one for one in recorder.check(recorder.open_run(folder)).findings if one.severity > Severity.NOTE]
    assert {one.rule for one in found} == {rule}
    at_end, before = lines[lines.index("done") + 1 :], lines[: lines.index("done")]
    (said,) = (one for one in before if one.startswith("rank 0: "))
    text, _, others = said.removeprefix("rank 0: ").partition(" (and in ")
    assert text in [one.text for one in found]
    assert others == ("1 more module)" if rule == "evaluation_mode" else "")
    summary, following = at_end[-2:]  # on a slow machine, the estimate of the bytes may come late
    assert said.replace("rank 0: ", "; ") + "; nothing dropped" in summary
    assert following.startswith("next: recorder check ")


def test_a_sound_program_has_no_such_line(outputs: dict[str, tuple[list[str], Path]]) -> None:
    lines, _ = outputs["sound"]
    assert not [one for one in lines if one.startswith("rank 0: ")]
    assert lines[-2].endswith("up to step 39; nothing dropped")


OTHER_CLASSES = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(160):
    y = torch.arange(32) % 4 + 4 * (step >= 120{until})
    x = nn.functional.one_hot(y % 4, 8) + 0.1 * torch.randn(32, 8)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("until", "is_told"), [("", False), (" and step < 123", True)])
def test_a_leap_with_other_data_for_good_is_told_at_once_and_not_at_the_end(
    tmp_path: Path, until: str, is_told: bool
) -> None:
    (tmp_path / "train.py").write_text(OTHER_CLASSES.format(until=until))
    job = jobs.succeeded(jobs.program(tmp_path, "train.py", RECORDER="1", RECORDER_DIR="runs"))
    spikes = [line for line in job.output.splitlines() if "step 120, " in line and "spikes" in line]
    assert [" rows, " in line for line in spikes] == [False, True][: 1 + is_told]
    found = recorder.check(recorder.open_run(tmp_path / "runs")).findings
    assert {one.severity > Severity.NOTE for one in found if one.rule == "spike" and one.step == 120} == {is_told}


OF_THE_WHOLE_RUN = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.act, self.head = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
    def forward(self, x):
        return self.head({hidden})
torch.manual_seed(0)
model = Model()
class Around(torch.optim.Optimizer):  # as AcceleratedOptimizer
    def __init__(self, inside):
        self.inside = inside
    param_groups = property(lambda self: self.inside.param_groups)
    state = property(lambda self: self.inside.state)
    def zero_grad(self, set_to_none=True):
        self.inside.zero_grad(set_to_none)
    def step(self, closure=None):
        self.inside.step(closure)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
optimizer = {around}
for step in range({steps}):
    torch.manual_seed({seed})
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(-1)).backward()
    optimizer.step()
{after}
print("done", flush=True)
"""
LEARNS = {"hidden": "self.act(self.body(x))", "rate": "0.1", "seed": "step", "steps": "100", "after": ""}
LEARNS |= {"around": "optimizer"}
FAULTS_OF_THE_RUN = {
    "no_gradient": {"hidden": "self.act(self.body(x)).detach()"},
    "unchanged": {"rate": "0.0"},
    "unchanged, its optimizer in another": {"rate": "0.0", "around": "Around(optimizer)"},
    "dead": {"hidden": "self.act(self.body(x) - 100)"},
    "data": {"seed": "0"},
}


NO_RATE = "its learning rate is 0, and the parameter does not change"


@pytest.mark.parametrize("rule", [*FAULTS_OF_THE_RUN, ""])
def test_the_last_line_says_what_check_puts_first(tmp_path: Path, rule: str) -> None:
    (tmp_path / "train.py").write_text(OF_THE_WHOLE_RUN.format(**{**LEARNS, **FAULTS_OF_THE_RUN.get(rule, {})}))
    lines = jobs.succeeded(jobs.program(tmp_path, "train.py", RECORDER="1", RECORDER_DIR="runs")).output.splitlines()
    found = [one for one in recorder.check(recorder.open_run(tmp_path / "runs")).findings if not one.cause]
    worst = [one for one in found if one.severity > Severity.NOTE][:1]
    assert [one.rule for one in worst] == [rule.partition(",")[0]] * bool(rule)
    assert [one.what for one in worst if one.rule == "unchanged"] == [NO_RATE] * rule.startswith("unchanged")
    assert [f"; {one.text}" in lines[-2] for one in worst] == [True] * bool(rule)
    assert lines[-2].endswith("; nothing dropped") and ": next: recorder check " in lines[-1]
    assert rule or lines[-2].endswith("up to step 99; nothing dropped")


WAITS = """
import pathlib, time
while not any('"no_gradient"' in one.read_text() for one in pathlib.Path("runs").glob("*/*/*/_status.json")):
    time.sleep(0.05)
"""


def test_a_detached_encoder_is_said_while_the_program_trains(tmp_path: Path) -> None:
    fault = {"hidden": "self.act(self.body(x)).detach()", "steps": "300", "after": WAITS}
    (tmp_path / "train.py").write_text(OF_THE_WHOLE_RUN.format(**{**LEARNS, **fault}))
    settings = {"RECORDER": "1", "RECORDER_DIR": "runs", "RECORDER_STATUS_INTERVAL_S": "0.2"}
    lines = jobs.succeeded(jobs.program(tmp_path, "train.py", **settings)).output.splitlines()
    (said,) = (line for line in lines[: lines.index("done")] if "rank 0: " in line)
    assert "rank 0: since step 0, 'body' param weight: never had a gradient" in said
    assert "; since step 0, 'body' param weight: never had a gradient" in lines[-2]


def test_what_was_found_early_and_is_over_at_the_end_is_in_no_last_line() -> None:
    watch = RingWatch(load_settings(environ={}))
    early = Finding(
        "no_gradient", Severity.WARNING, 0, "model", "head", "param", "weight", ranks=(0,), what="never had a gradient",
        measure="", value=9.0, threshold=1.0, advice="",
    )  # fmt: skip
    for _ in range(2):
        watch.findings.judge_early([early], Catalog())
    assert [(one["rule"], one["number"]) for one in watch.findings.for_status(None)] == [("no_gradient", 1)]
    assert watch.findings.worst == early
    watch.findings.end(lambda one: one, None, Catalog())  # the whole run could not be judged
    assert watch.findings.worst == early
    watch.findings.end(lambda one: one, [], Catalog())
    assert watch.findings.worst is None and not watch.findings.for_status(None)


def test_a_rule_with_many_findings_hides_no_other_rule_in_the_status() -> None:
    watch = RingWatch(load_settings(environ={}))
    modules = [{"path": f"m.{number}", "class": "Linear", "sites": [], "untrained": ["weight"]} for number in range(12)]
    for _ in range(2):  # what is known already is not counted again
        watch.findings.judge_program([{"name": "model", "modules": modules}])
    spike = Finding(
        "spike", Severity.WARNING, 100, "model", "head", "grad", "weight", ranks=(0,), what="it spikes", measure="",
        value=9.0, threshold=1.0, advice="",
    )  # fmt: skip
    watch._found(spike)
    first, second, *others = watch.findings.for_status(None)
    assert [(one["rule"], one["module"], one["number"]) for one in (first, second)] == [
        ("not_optimized", "m.0", 1),
        ("spike", "head", 1),
    ]
    assert sum(one["number"] for one in (first, *others)) == 12
    worst = watch.findings.worst
    assert worst is not None and worst.rule == "not_optimized"
    watch.findings.judge_program([{"name": "model", "modules": []}])  # an optimizer has the parameters now
    assert watch.findings.worst == spike


@pytest.mark.parametrize("num_models", [1, 2])
def test_a_finding_names_its_model_where_several_are_recorded(
    num_models: int, caplog: pytest.LogCaptureFixture
) -> None:
    watch = RingWatch(load_settings(environ={}))
    module = {"path": "up", "class": "Linear", "sites": []}
    roots = [{"name": f"model_{number}" if number else "model", "modules": [module]} for number in range(num_models)]
    watch.findings.judge_program([{**roots[0], "modules": [{**module, "untrained": ["weight"]}]}, *roots[1:]])
    watch.findings.say()
    (told,) = watch.findings.for_status(None)
    assert ("model: 'up' param" in told["text"]) is (num_models == 2) and "'up' param" in told["text"]
    assert caplog.messages == [f"rank 0: {told['text']}"]


RANKS = """
import pathlib, time, torch
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(30):
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(-1)
    if rank == {bad_rank} and step >= 20:
        x.zero_()
    if step == {apart_at}:
        next(model.parameters()).data.add_(1e-3 * rank)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
statuses = "*/rank=00001/*/_status.json"
while rank == 0 and not any("closed" in one.read_text() for one in pathlib.Path("runs").glob(statuses)):
    time.sleep(0.05)
"""


@pytest.mark.parametrize("bad_rank", [1, None])
def test_rank_0_ends_with_what_another_rank_alone_has_found(tmp_path: Path, bad_rank: int | None) -> None:
    (tmp_path / "train.py").write_text(RANKS.format(bad_rank=bad_rank, apart_at=None))
    job = jobs.torchrun(tmp_path, "--nproc-per-node", "2", "train.py", RECORDER="1", RECORDER_DIR="runs")
    lines = jobs.succeeded(job).output.splitlines()
    (summary,) = (line for line in lines if "rows of rank 0 (of 2)" in line)
    found = "rank 1: since step 20, (the model) input: all elements of the input are zero, 3 records in a row"
    assert (f"; {found}; nothing dropped" in summary) is (bad_rank == 1)
    assert any(line.endswith(found) for line in lines if line is not summary) is (bad_rank == 1)


def test_rank_0_ends_with_ranks_whose_parameters_are_apart(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS.format(bad_rank=None, apart_at=12))
    job = jobs.torchrun(tmp_path, "--nproc-per-node", "2", "train.py", RECORDER="1", RECORDER_DIR="runs")
    (summary,) = (line for line in jobs.succeeded(job).output.splitlines() if "rows of rank 0 (of 2)" in line)
    found = "ranks 0, 1 have different parameters of model after step 29, which DDP keeps equal"
    assert f"; {found}; nothing dropped" in summary
    (one, *_) = recorder.check(recorder.open_run(tmp_path / "runs")).findings
    assert (one.rule, one.ranks) == ("replica", (0, 1))
