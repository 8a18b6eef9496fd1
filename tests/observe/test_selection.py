"""Rules: what they match, what they keep, and what is said of a rule that matches nothing."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Pipe

import recorder
from recorder.errors import AttachError, ConfigError
from recorder.observe.selection import RuleSelection
from recorder.records import KEEP_PROBE, KEEP_TENSOR
from tests.rigs.capturing import Tiny, batch, flagged


def train(model: nn.Module, num_steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(num_steps):
        model(batch(i)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_what_a_rule_selects_is_recorded(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="module=fir* site=output,grad steps=1:4:2 keep=tensor name=,weight") as recording:
        train(Tiny())
    rows = recording.rows()
    found = {(r.module_path, r.site, r.name, r.step) for r in rows.itertuples()}
    assert found == {("first", site, name, s) for site, name in (("output", ""), ("grad", "weight")) for s in (1, 3)}
    assert rows["mean"].isna().all()
    assert rows.payload_bytes.notna().all()


def test_a_record_gets_all_that_its_rules_ask_for(tmp_path: Path) -> None:
    rules = "site=output keep=stats; module=second site=output keep=tensor; class=ReLU site=output keep=fingerprint"
    with flagged(tmp_path, rules=rules) as recording:
        train(Tiny(), 1)
    rows = recording.rows(site="output").set_index("module_path")
    assert rows["mean"].notna().all()
    assert list(rows.index[rows.payload_bytes.notna()]) == ["second"]
    assert list(rows.index[rows.fingerprint.notna()]) == ["act"]


def test_a_pattern_can_exclude_and_the_root_has_an_empty_path(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="module=!act,!'' site=output; module='' site=input") as recording:
        train(Tiny(), 1)
    assert {(r.module_path, r.site) for r in recording.rows().itertuples()} == {
        ("first", "output"),
        ("second", "output"),
        ("", "input"),
    }


def test_a_rule_selects_micro_steps_and_always_what_belongs_to_the_whole_step(tmp_path: Path) -> None:
    model, rules = Tiny(), "module=first site=output,grad_output,grad micro_step=1:3 keep=stats"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, rules=rules) as recording:
        for step in range(2):
            for i in range(4 + 16 * step):
                model(batch(i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = recording.rows()
    for step in range(2):
        for site in ("output", "grad_output"):
            assert list(rows[(rows.site == site) & (rows.step == step)].micro_step) == [1, 2], site
        assert set(rows[(rows.site == "grad") & (rows.step == step)].name) == {"weight", "bias"}


def test_leaf_selects_modules_without_children(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="leaf=yes site=output") as recording:
        train(Tiny(), 1)
    assert set(recording.rows().module_path) == {"first", "act", "second"}


def test_a_rule_for_another_rank_selects_nothing_and_is_no_mistake(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="module=first rank=3 site=output; module=second site=output") as recording:
        train(Tiny(), 1)
    assert set(recording.rows().module_path) == {"second"}
    assert recording.events("pattern_unmatched") == []


def test_a_rule_of_parameters_for_modules_without_any_is_told_after_the_first_step(tmp_path: Path) -> None:
    rules = "module=act site=grad; module='' site=param,optim; module=act,second site=grad; module=act site=grad,output"
    with flagged(tmp_path, rules=rules) as recording:
        train(Tiny(), 3)
    told = recording.events("pattern_unmatched")
    assert [one.partition(" holds a parameter of its own")[0] for one in told] == [
        "the rule 'module=act site=grad' selects no value: none of 'act'",
        "the rule \"module='' site=param,optim\" selects no value: none of ''",
    ]


class Whole(Pipe):
    """What `pipeline` returns, without the tracing, which takes seconds."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.submod_pp_0 = Tiny()


def test_attach_refuses_a_whole_pipe_and_names_its_stages(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"a whole Pipe, which no rank calls; attach its stages: pipe.build_stage"):
        recorder.attach(Whole(), enabled=True, dir=tmp_path)


def test_attach_refuses_a_pattern_that_matches_nothing_and_names_the_nearest(tmp_path: Path) -> None:
    model = Tiny()
    with pytest.raises(AttachError, match=r"'module=frist .*matches no module; module paths near it: 'first'"):
        recorder.attach(model, enabled=True, dir=tmp_path, rules="module=frist site=output")
    with pytest.raises(AttachError, match=r"'class=Linaer' matches no module; class names near it: 'Linear'"):
        recorder.attach(model, enabled=True, dir=tmp_path, rules="class=Linaer")
    assert not model.first._forward_hooks
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_two_models_have_is_named_once(tmp_path: Path) -> None:
    models = Tiny(), Tiny()
    with flagged(tmp_path, rules="module=frist site=output; module=second site=output") as recording:
        for model in models:
            train(model, 3)
    (told,) = recording.events("pattern_unmatched")
    assert told.endswith("matches no module; module paths near it: 'first'")


def test_under_the_flag_an_unmatched_pattern_is_one_error_and_training_goes_on_where_another_model_may_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    another = Tiny()
    with flagged(tmp_path, rules="module=frist site=output; module=second site=output") as recording:
        train(Tiny(), 3)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 1 and "'first'" in errors[0]
    assert recording.events("pattern_unmatched") == errors
    assert len(recording.rows()) == 3
    del another


def test_under_the_flag_a_pattern_that_matches_no_module_of_the_only_model_stops_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tiny()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    all_objects = {0: [*model.modules(), *optimizers]}  # no other test's
    monkeypatch.setattr(gc, "get_objects", lambda generation: all_objects.get(generation, []))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SystemExit) as stopped, flagged(tmp_path, rules="module=frist rank=3; site=grad"):
        model(batch())
    assert stopped.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("recorder: RECORDER_RULES (environment): the rule 'module=frist rank=3' matches no module")
    assert "'first'" in line
    assert all(map(torch.equal, before, model.parameters()))
    assert not (tmp_path / "recordings").exists()
    model(batch())  # and nothing is left on it


@pytest.mark.parametrize("what", ["a second optimizer", "a second model", "no optimizer", "any root"])
def test_where_another_model_may_come_an_unmatched_pattern_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model, second = Tiny(), Tiny()
    alive: list[object] = [*model.modules()]
    if what != "no optimizer":
        alive.append(torch.optim.SGD(model.parameters(), 0.1))
    if what == "a second optimizer":
        alive.append(torch.optim.SGD(second.parameters(), 0.1))
    if what == "a second model":
        alive += second.modules()
    monkeypatch.setattr(gc, "get_objects", lambda generation: [] if generation else alive)
    roots = "any" if what == "any root" else "optimizer"
    with flagged(tmp_path, rules="module=frist; site=grad", roots=roots):
        model(batch()).sum().backward()


def test_attach_refuses_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'pool_byts' .*did you mean 'pool_bytes'"):
        recorder.attach(Tiny(), enabled=True, dir=tmp_path, pool_byts=1)


def test_attach_refuses_a_directory_that_can_never_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Tiny()
    with pytest.raises(ConfigError, match=r"dir \(argument\): dir = '.*/file': is no directory"):
        recorder.attach(model, enabled=True, dir=tmp_path / "file")
    assert not model.first._forward_hooks


def test_the_default_keeps_statistics_often_at_first_and_the_tensors_of_one_step(tmp_path: Path) -> None:
    from recorder.config import DEFAULT_RULES

    rules = "; ".join(rule.text for rule in DEFAULT_RULES)
    with flagged(tmp_path, rules=rules) as recording:
        train(Tiny(), 32)
    outputs = recording.rows(site="output", module_path="first")
    assert list(outputs.step) == [*range(5), 10, 20, 30]
    assert list(outputs.step[outputs.payload_bytes.notna()]) == [0]
    assert set(recording.rows().site) == {"input", "output", "grad_output", "param", "grad", "scalar"}


def test_the_default_keeps_the_outputs_of_four_micro_steps_and_of_one_with_the_first_nan(tmp_path: Path) -> None:
    from recorder.config import DEFAULT_RULES

    model, rules = Tiny(), "; ".join(rule.text for rule in DEFAULT_RULES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, rules=rules) as recording:
        for i in range(8):
            model(batch(i) * (math.nan if i == 6 else 1)).sum().backward()
        optimizer.step()
    rows = recording.rows(module_path="first")
    assert list(rows[rows.site == "output"].micro_step) == [0, 1, 2, 3, 6]
    assert list(rows[rows.site == "grad_output"].micro_step) == [0, 1, 2, 3]
    assert list(recording.rows(site="scalar", name="loss").repeat) == [*range(8)]


@pytest.mark.parametrize(("num_steps", "num_looked_at", "num_in_full"), [(36, 8, 1), (6_000, 132, 3)])
def test_the_default_looks_at_few_steps(num_steps: int, num_looked_at: int, num_in_full: int) -> None:
    from recorder.config import DEFAULT_RULES

    selection = RuleSelection(DEFAULT_RULES, rank=0)
    of_outputs = selection.rule_sets("blocks.0", "Block", False)["output"]
    kept = []
    for step in range(num_steps):
        selection.at_step(step)
        kept.append(selection.masks[of_outputs])
    assert all(keep & KEEP_PROBE for keep in kept)
    assert sum(keep != KEEP_PROBE for keep in kept) == num_looked_at
    assert sum(keep & KEEP_TENSOR != 0 for keep in kept) == num_in_full
