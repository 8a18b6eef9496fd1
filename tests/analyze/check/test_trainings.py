"""`check` over trainings, a sample of `python -m tests.campaigns check`: quiet on sound ones, right on faults."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.check.check import check, sentence, told_of
from recorder.checks.rule import Severity
from recorder.config import DEFAULT_RULES
from tests.campaigns.check.check import is_named, judged, loud, record, twins
from tests.campaigns.check.programs.cases import BASE, EXPECTED, FAULTS, FLAG_ALONE, SOUND
from tests.rigs.capturing import Recording, flagged

SOUND_ONES = ["mlp-adamw"]
FAULTY = ["zeroed_gradient", "one_layer_doubled"]
SOUND_BY_DEFAULT = ["scaler-skips", "norms-in-eval"]
FAULTY_BY_DEFAULT = [
    "large_gradient", "stuck_loader", "forgotten_block", "left_in_evaluation", "rounded_away", "empty_on_one_rank",
    "replica_apart_at_the_end", "never_cleared_in_ddp",
]  # fmt: skip
"""Faults that the default rules show, most of them between two steps of which they keep rows."""
EARLY = {
    *SOUND_BY_DEFAULT,
    "forgotten_block",
    "left_in_evaluation",
    "rounded_away",
    "empty_on_one_rank",
    "never_cleared_in_ddp",
}
"""Those that show in the first half of a training."""


def short(name: str) -> str:
    """The name of a training with as few steps as all rules need that judge one of 320 steps."""
    return f"{name}%120"


def by_default(name: str) -> str:
    return f"{FLAG_ALONE}{name}{'%160' if name in EARLY else ''}"


TWINS = [short(name) for name in twins("mlp-adamw")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    defaults = [by_default(name) for name in (*SOUND_BY_DEFAULT, *FAULTY_BY_DEFAULT)]
    record(folder, [*map(short, (*SOUND_ONES, *FAULTY)), *TWINS, *defaults])
    return folder


@pytest.mark.parametrize("name", SOUND_ONES)
def test_nothing_above_a_note_is_said_of_a_sound_training(folder: Path, name: str) -> None:
    checked = judged(folder, short(name), TWINS if name == "mlp-adamw" else [])
    assert loud(checked) == []
    assert checked.num_judged >= 10


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_by_its_rule_at_its_module(folder: Path, name: str) -> None:
    wanted = EXPECTED[name]
    assert is_named(judged(folder, short(name), TWINS if wanted.needs_baseline else []), wanted)


@pytest.mark.parametrize("name", SOUND_BY_DEFAULT)
def test_nothing_is_said_of_a_sound_training_that_the_default_rules_recorded(folder: Path, name: str) -> None:
    assert loud(judged(folder, by_default(name), [])) == []


@pytest.mark.parametrize("name", FAULTY_BY_DEFAULT)
def test_the_default_rules_are_enough_to_name_a_fault_and_one_finding_is_the_cause(folder: Path, name: str) -> None:
    checked = judged(folder, by_default(name), [])
    causes = [one for one in checked.findings if not one.cause]
    assert is_named(checked._replace(findings=causes), EXPECTED[name])
    assert {one.rule for one in causes if one.severity > Severity.NOTE} == {EXPECTED[name].rule}


def test_a_replica_that_comes_apart_between_two_records_is_dated_by_the_probe(folder: Path) -> None:
    (one,) = judged(folder, f"{FLAG_ALONE}replica_apart_at_the_end", []).findings
    assert (one.rule, one.step, one.ranks) == ("replica", 313, (0, 1))
    assert one.detail == "by the probe, equal at step 312"
    answer = recorder.first(recorder.open_run(folder / f"{FLAG_ALONE}replica_apart_at_the_end" / "recordings"))
    assert answer.is_found and answer.replica is None and answer.replica_probed is not None
    assert (answer.replica_probed.step, answer.replica_probed.equal_step, answer.replica_probed.ranks) == (
        313,
        312,
        (0, 1),
    )


def test_the_campaign_expects_something_of_each_fault() -> None:
    assert EXPECTED.keys() == FAULTS.keys() and not FAULTS.keys() & SOUND.keys()
    assert set(BASE.values()) <= SOUND.keys()


DEFAULT = "; ".join(rule.text for rule in DEFAULT_RULES)


def last_step(recording: Recording) -> int:
    return int(recording.rows(site="scalar", name="loss").step.max())


def classes_and_net() -> tuple[torch.Tensor, torch.Tensor, nn.Sequential]:
    """Samples, their classes, and a net that learns these within 60 steps."""
    generator = torch.Generator().manual_seed(0)
    x, map_ = torch.randn(256, 20, generator=generator), torch.randn(20, 5, generator=generator)
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    return x, (x @ map_).argmax(1), net


def go(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, classes: torch.Tensor) -> None:
    net.train()
    for _ in range(60):
        index = torch.randint(0, len(x), (32,))
        loss = nn.functional.cross_entropy(net(x[index]), classes[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(x)


@pytest.mark.parametrize("kept", ["nothing", "models", "all"])
@pytest.mark.parametrize("has_fault", [False, True])
def test_each_training_of_a_process_is_judged_by_itself(tmp_path: Path, kept: str, has_fault: bool) -> None:
    torch.manual_seed(0)
    alive: list[object] = []
    with flagged(tmp_path, DEFAULT) as recording:
        for trial in range(3):
            x, classes, net = classes_and_net()
            trained = net[:4] if has_fault and trial == 1 else net
            optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
            go(net, optimizer, x, classes)
            alive += [] if kept == "nothing" else [net] if kept == "models" else [net, optimizer]
            del net, optimizer, trained
    assert last_step(recording) == (177 if kept == "all" else 179), "the optimizers of all trainings count"
    findings = check(recording.run).findings
    named = {(one.rule, one.root, one.module_path) for one in findings if one.severity > Severity.NOTE}
    assert named == ({("not_optimized", "model_1", "4")} if has_fault else set())
    if has_fault:
        told = [sentence(first) for first, _ in told_of(findings) if first.worst.severity > Severity.NOTE]
        where = "model_1: '4' param weight, bias, since step 64"
        assert told == [f"not_optimized: {where}: it has a gradient, and no optimizer has it"]


@pytest.mark.parametrize("keeps_optimizer", [False, True])
def test_a_model_that_is_trained_for_another_task_begins_another_training(
    tmp_path: Path, keeps_optimizer: bool
) -> None:
    torch.manual_seed(0)
    with flagged(tmp_path, DEFAULT) as recording:
        x, classes, net = classes_and_net()
        before = torch.optim.Adam(net.parameters(), lr=1e-2)
        go(net, before, x, classes)
        if not keeps_optimizer:
            del before
        go(net, torch.optim.Adam(net.parameters(), lr=1e-3), x, (classes + 2) % 5)
    assert last_step(recording) == (118 if keeps_optimizer else 119)
    assert [one for one in check(recording.run).findings if one.severity > Severity.NOTE] == []


def test_a_second_model_that_no_optimizer_got_is_recorded_and_named(tmp_path: Path) -> None:
    """As in a search over settings whose optimizer is made once, before the loop over the settings."""
    gc.collect()  # the optimizers of other tests, in cycles of garbage, are alive until then
    torch.manual_seed(0)
    with flagged(tmp_path, DEFAULT) as recording:
        x, classes, net = classes_and_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for trial in range(2):
            net = net if not trial else classes_and_net()[2]
            for _ in range(60):
                index = torch.randint(0, len(x), (32,))
                loss = nn.functional.cross_entropy(net(x[index]), classes[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    # A process that has compiled anything, as other tests do, looks for models all the time, and loses no step.
    assert last_step(recording) in (117, 119), "the second model is found at the third update without a gradient"
    findings = [one for one in check(recording.run).findings if one.severity > Severity.NOTE]
    causes = {(one.rule, one.root, one.module_path) for one in findings if not one.cause}
    assert causes == {("not_optimized", "model_1", path) for path in "014"}


def test_two_optimizers_of_one_training_take_turns_at_counting_never(tmp_path: Path) -> None:
    """As the critic of a GAN, which is updated five times before the generator is."""
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    with flagged(tmp_path, "site=scalar keep=stats") as recording:
        optimizers = [torch.optim.Adam(one.parameters()) for one in (maker, judge)]
        for _ in range(8):
            judge(maker(torch.randn(4, 4))).mean().backward()
            optimizers[0].step()
            for _ in range(5):
                judge(torch.randn(4, 4)).mean().backward()
                optimizers[1].step()
    assert last_step(recording) == 8
    assert check(recording.run, rules=["spike"]).findings == []
