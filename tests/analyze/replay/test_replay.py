"""Tests of `recorder replay`: a recorded call runs again, alone, and what cannot be reproduced is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recorder
from recorder.analyze.replay import alone
from recorder.analyze.replay.bundle import (
    CANNOT_TELL,
    NOT_REPRODUCED,
    REPRODUCED,
    WITHIN_ROUNDING,
    Audited,
    audit,
    audit_reply,
    recorded_calls,
    write_bundle,
)
from recorder.errors import ConfigError, LookupFailedError, WriteError
from recorder.rules import parse_rules
from recorder.run.reply import StateLine
from tests.rigs.command_line import Cli, cli

from . import models

__all__ = ["cli"]
FACTORY = "tests.analyze.replay.models:make"
RULES = "keep=replay steps=1"


def record(folder: Path, model: nn.Module, rules: str = RULES) -> recorder.Run:
    with recorder.attach(model, enabled=True, rules=rules, dir=folder, close_deadline_s=60, local_gradients=True):
        models.train(model, 2)
    return recorder.open_run(folder)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[recorder.Run]:
    yield record(tmp_path_factory.mktemp("zoo"), models.make())


@pytest.fixture
def bundle(zoo: recorder.Run, tmp_path: Path) -> Path:
    (call,) = recorded_calls(zoo, step=1, module="down")
    assert write_bundle(zoo, call, tmp_path / "bundle") == []
    return tmp_path / "bundle"


def test_training_is_not_changed_by_what_a_replay_needs(zoo: recorder.Run, tmp_path: Path) -> None:
    plain, recorded = models.make(), models.make()
    losses = models.train(plain, 2)
    state = torch.get_rng_state()
    with recorder.attach(recorded, enabled=True, rules=RULES, dir=tmp_path, close_deadline_s=60):
        assert models.train(recorded, 2) == losses
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), recorded.parameters(), strict=True))


def test_every_call_of_a_step_is_had_again(zoo: recorder.Run) -> None:
    found = {one.module: one for one in audit(zoo, step=1, factory=FACTORY)}
    assert {name for name, module in models.make().named_modules() if not name.endswith(".out_proj")} == found.keys()
    verdicts = {name: one.verdict for name, one in found.items() if one.verdict != REPRODUCED}
    assert set(verdicts.values()) <= {WITHIN_ROUNDING}, verdicts
    assert {"attention", "lstm", "conv", "drop", "act", "embedding"}.isdisjoint(verdicts)
    assert int(found["down"].why.split()[0]) == 4  # the output, gradients of the input, of weight and of bias


def test_without_a_factory_a_class_of_ones_own_is_not_judged(zoo: recorder.Run) -> None:
    verdicts = {one.module: (one.verdict, one.why) for one in audit(zoo, step=1)}
    assert {name for name, (verdict, _) in verdicts.items() if verdict == "cannot tell"} == {"", "scaled"}
    assert "give --factory" in verdicts["scaled"][1]


def test_an_audit_counts_what_it_cannot_judge_and_fails_where_that_is_all(zoo: recorder.Run, cli: Cli) -> None:
    some = cli("replay", zoo.path, "--step", 1, "--audit")
    assert (some.exit_code, some.err) == (0, "")
    assert some.out.splitlines()[-1].startswith("2 of ") and "could not be judged" in some.out
    for words in ([], ["--json"]):
        none = cli("replay", zoo.path, "scaled", "--step", 1, "--audit", *words)
        assert none.exit_code == 2, none
        assert "none of the 1 call could be judged; the first:" in none.err and "give --factory" in none.err
        assert "cannot tell" in none.out


def test_an_audit_says_a_reason_once_and_which_call_it_means(zoo: recorder.Run) -> None:
    one = Audited("up", 1, 0, 0, 0, CANNOT_TELL, "give --factory")
    reply = audit_reply(zoo, [one, one._replace(call=1), one._replace(module="down")])
    (line,) = [part.text for part in reply.parts() if isinstance(part, StateLine)]
    calls = "'up', rank 0, micro-step 0, call 0, 'up', rank 0, micro-step 0, call 1, 'down', rank 0 (3 calls)"
    assert line == f"{calls}: cannot tell: give --factory"


def test_a_flipped_bit_in_an_output_is_named_with_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, right = models.make(), [], nn.functional.linear
    weight_of_down = model.get_parameter("down.weight")

    def broken(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = right(x, weight, bias)
        if weight is weight_of_down:
            calls.append(out)
            if len(calls) == 2:
                out.data.view(torch.int32)[1, 2, 3] ^= 1 << 20
        return out

    monkeypatch.setattr(nn.functional, "linear", broken)
    run = record(tmp_path, model)
    monkeypatch.undo()
    found = [one for one in audit(run, step=1, factory=FACTORY) if one.verdict == NOT_REPRODUCED]
    assert {one.module for one in found} == {"", "down"}  # the module, and the whole model, whose call it is a part of
    assert "output: 1 of 96 elements differ" in next(one.why for one in found if one.module == "down")


def test_what_does_not_repeat_itself_here_is_not_judged(zoo: recorder.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right, noise = nn.functional.linear, iter((0.5, 0.25, 0.125, 0.0625))
    monkeypatch.setattr(nn.functional, "linear", lambda *args: right(*args) + next(noise))
    (one,) = audit(zoo, step=1, module="down")
    assert one.verdict == "cannot tell"
    assert "the call is not deterministic here" in one.why


def test_a_bundle_runs_alone(bundle: Path, tmp_path: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {"README", "bundle.json", "replay.py", "tensors.safetensors"}
    elsewhere = shutil.copytree(bundle, tmp_path / "elsewhere")
    code = (
        f"import sys; sys.modules['recorder'] = None; sys.argv = ['replay.py']; sys.path.insert(0, {str(elsewhere)!r})"
    )
    command = [sys.executable, "-c", f"{code}; import replay; sys.exit(replay.main([]))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["output", "bit-equal"],
        ["grad.bias", "bit-equal"],
        ["grad.weight", "bit-equal"],
        ["grad_input.input", "bit-equal"],
    ]


def test_float64_is_the_arbiter_and_other_values_are_told(bundle: Path) -> None:
    compared, _ = alone.replay(bundle, alone.Options(dtype="float64"))
    assert {one.verdict for one in compared} == {alone.ROUNDED}
    path = bundle / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    offset = json.loads(data[8:head])["param.weight"]["data_offsets"][0] + head
    data[offset + 3] ^= 0x08
    path.write_bytes(data)
    compared, _ = alone.replay(bundle, alone.Options())
    assert compared[0].name == "output"
    assert compared[0].verdict == alone.DIFFERENT


def test_another_class_changed_code_and_a_cut_bundle_are_refused(
    zoo: recorder.Run, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (call,) = recorded_calls(zoo, step=1, module="scaled")
    write_bundle(zoo, call, tmp_path / "own")
    compared, notes = alone.replay(tmp_path / "own", alone.Options(factory=FACTORY))
    assert not notes
    assert compared[0].verdict == alone.EQUAL
    right = models.Scaled.forward
    monkeypatch.setattr(models.Scaled, "forward", lambda self, pair, *, scale, flags: {"value": pair[0] * 2})
    with pytest.raises(alone.CannotReplay, match="the code of Scaled is not the recorded code"):
        alone.replay(tmp_path / "own", alone.Options(factory=FACTORY))
    compared, notes = alone.replay(tmp_path / "own", alone.Options(factory=FACTORY, anyway=True))
    assert compared[0].verdict == alone.DIFFERENT
    assert len(notes) == 1
    monkeypatch.setattr(models.Scaled, "forward", right)
    with pytest.raises(alone.CannotReplay, match="expected MODULE:FUNCTION"):
        alone.replay(bundle, alone.Options(factory="no_such_module:make"))
    (tmp_path / "trains_on_import.py").write_text("raise RuntimeError('no process group')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(alone.CannotReplay, match=r"importing trains_on_import raised RuntimeError: no .* __name__"):
        alone.replay(tmp_path / "own", alone.Options(factory="trains_on_import:make"))
    with pytest.raises(alone.CannotReplay, match=r"--device nowhere: .* name a device of this machine"):
        alone.replay(bundle, alone.Options(device="nowhere"))
    path = bundle / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(alone.CannotReplay, match="cut short or damaged"):
        alone.replay(bundle, alone.Options())


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("class", "os:system"),
        ("class", "torch.nn.modules.module:namedtuple"),
        ("constructor", {"in_features": "all"}),
        ("args", [{"tensor": "no such"}]),
        ("args", 7),
        ("rng", {"cpu": "?"}),
        ("tensors", {"input.input": {"stride": [1 << 60, 1], "offset": 0, "requires_grad": False}}),
    ],
)
def test_a_bundle_that_contradicts_itself_is_refused(bundle: Path, member: str, value: object) -> None:
    path = bundle / "bundle.json"
    document = json.loads(path.read_text())
    document["facts"][member] = value
    path.write_text(json.dumps(document))
    with pytest.raises(alone.CannotReplay):
        alone.replay(bundle, alone.Options())


def test_parts_of_parameters_are_not_replayed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "make", lambda: nn.ModuleDict({"down": nn.Linear(16, 9)}))
    with pytest.raises(alone.CannotReplay, match=r"param.bias.*another shape"):
        alone.replay(bundle, alone.Options(factory=FACTORY))


def test_freed_memory_is_never_read(tmp_path: Path) -> None:
    class Freed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.bias

    model = Freed(4, 4)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    model.weight.requires_grad_(False).untyped_storage().resize_(0)
    with recorder.attach(model, enabled=True, rules="keep=replay", dir=tmp_path, close_deadline_s=60):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (one,) = audit(recorder.open_run(tmp_path), step=0)
    assert one.verdict == "cannot tell"
    assert "param.weight: it has no row" in one.why


def test_the_command_writes_a_bundle_and_refuses_in_one_line(zoo: recorder.Run, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "b"
    assert cli("replay", zoo.path, "up", "--step", 1, "-o", out).exit_code == 0
    assert "python replay.py" in (out / "README").read_text()
    own = cli("replay", zoo.path, "scaled", "--step", 1, "-o", tmp_path / "own", "--factory", FACTORY)
    assert own.out.splitlines()[-1].endswith(f"python {tmp_path / 'own' / 'replay.py'} --factory {FACTORY}")
    quoted = cli("replay", zoo.path, "up", "--step", 1, "-o", tmp_path / "my own")
    assert quoted.out.splitlines()[-1].endswith(f"python '{tmp_path / 'my own' / 'replay.py'}'")
    last = zoo.steps[-1]
    refused = {
        ("replay", zoo.path, "up", "--step", 1, "-o", out): "exists; choose another name",
        ("replay", zoo.path, "upp", "--step", 1, "-o", tmp_path / "c"): "nearest are 'up'",
        ("replay", zoo.path, "up", "--step", 7, "-o", tmp_path / "c"): "no call with step=7",
        ("replay", zoo.path, "up", "--step", 1, "--rank", 3, "-o", tmp_path / "c"): "no call with rank=3",
        ("replay", zoo.path, "up", "--step", 1, "--call", 3, "-o", tmp_path / "c"): "no call 3",
        ("replay", zoo.path, "up", "--step", 1): "needs a module and a folder to write",
        ("replay", zoo.path): f"needs the step: --step {last}; there is",
        ("replay", zoo.path, "up"): f"needs the step: --step {last}; there is",
        ("replay", zoo.path, "--audit"): f"needs the step: --step {last}; there is",
        ("replay", zoo.path, "--step", 1, "--audit", "-o", out): "writes no folder",
    }
    for words, problem in refused.items():
        found = cli(*words)
        assert found.exit_code == 2, words
        assert problem in found.err, words
    assert not (tmp_path / "c").exists()


def test_a_class_of_ones_own_is_said_to_need_a_factory_before_the_script_is_run(
    zoo: recorder.Run, tmp_path: Path, cli: Cli
) -> None:
    told = cli("replay", zoo.path, "scaled", "--step", 1, "-o", tmp_path / "own")
    note, command = told.out.splitlines()
    assert note.startswith("note") and "cannot make the class Scaled" in note and "--factory" in note
    assert command.endswith("replay.py --factory MODULE:FUNCTION")
    assert "replay.py --factory MODULE:FUNCTION" in (tmp_path / "own" / "README").read_text()
    for module, needs in (("scaled", True), ("up", False)):
        found = cli("replay", zoo.path, module, "--step", 1, "-o", tmp_path / f"json-{module}", "--json")
        assert found.json["needs_factory"] is needs
    assert "--factory" not in cli("replay", zoo.path, "up", "--step", 1, "-o", tmp_path / "up").out


def test_a_run_without_the_rule_says_which_to_write(tmp_path: Path) -> None:
    run = record(tmp_path, models.make(), "module=up keep=tensor")
    with pytest.raises(LookupFailedError, match="keep=replay"):
        recorded_calls(run, step=1)


def test_the_rule_takes_its_sites_itself() -> None:
    (rule,) = parse_rules("module=up steps=3 keep=replay")
    assert rule.site == ("input", "output", "grad_input", "grad_output", "grad")
    assert parse_rules(rule.text) == (rule,)
    with pytest.raises(ConfigError, match="leave site out"):
        parse_rules("site=param keep=replay")


def test_nobody_but_a_replay_sees_the_rows_of_calls(zoo: recorder.Run, cli: Cli, tmp_path: Path) -> None:
    record(tmp_path, models.make())
    found = cli("diff", zoo.path, tmp_path, "--json")
    assert found.exit_code == 0
    assert "call" not in {row.get("site") for row in found.json.get("only_a", [])}
    assert cli("doctor", zoo.path).exit_code == 0
    assert cli("verify", zoo.path).exit_code == 0
    with pytest.raises(WriteError):
        (call,) = recorded_calls(zoo, step=1, module="up")
        write_bundle(zoo, call, zoo.path / "bundle")
