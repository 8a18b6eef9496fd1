"""Rules that change in flight: at one step, on modules without hooks so far, and training stays as it is bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from recorder.analyze.doctor.expected import compare
from recorder.capture.program_values.tap_rows import TapRows
from recorder.capture.rule_commands import RuleCommands
from recorder.format.commands import PAUSE, RESUME, SET, UNDO, Command, send
from recorder.lifecycle import active as recording_side
from recorder.observe.clock import Clock
from recorder.observe.selection import RuleSelection
from recorder.rules import Rule
from tests.rigs.capturing import EVERYTHING, Recording, Tiny, batch, flagged

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
At = Mapping[int, Command | list[Command]]
"""What is told during which step."""


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


_NOTHING: At = {}


def rules_at(step: int, *rules: str, to_step: int | None = None, number: int = 1) -> Command:
    return Command(kind=SET, from_step=step, to_step=to_step, rules=rules, number=number, by="me")


def told(command: Command | list[Command]) -> None:
    """Tell training what the writer thread would tell it."""
    current = recording_side._current
    assert current is not None and current.capture is not None
    for one in command if isinstance(command, list) else [command]:
        current.capture.rule_commands.tell(one)


def train(
    num_steps: int = 8, at: At = _NOTHING, *, model: nn.Module | None = None, call: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """Train a model, and return all that training has made."""
    torch.manual_seed(3)
    model = Tiny() if model is None else model
    call = model if call is None else call
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[torch.Tensor] = []
    for step in range(num_steps):
        if step in at:
            told(at[step])
        loss = call(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.zero_grad()
    seen += [p.detach().clone() for p in model.parameters()]
    return [*seen, torch.rand(2)]


def answers(recording: Recording) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = recording.manifest["commands"]
    return found


def assert_exact(recording: Recording) -> None:
    """What the manifest promises is there, and nothing beside it."""
    expectation = compare(recording.run)
    assert expectation.problems == []
    assert {gap.reason.key for gap in expectation.gaps} <= {"no_gradient"}
    assert all(total.expected == total.found + total.explained for total in expectation.totals)
    assert all(total.found > 0 for total in expectation.totals)


def steps(recording: Recording, **key: Any) -> list[int]:
    return sorted(set(recording.rows(**key)["step"]))


@pytest.mark.parametrize("own", ["site=grad steps=::3 keep=stats", EVERYTHING])
def test_training_is_bit_equal_while_rules_are_set_undone_paused_and_resumed(tmp_path: Path, own: str) -> None:
    commands: At = {
        1: rules_at(3, "site=* keep=tensor,stats,fingerprint", to_step=9, number=1),
        4: [Command(kind=PAUSE, from_step=6, number=2), Command(kind=RESUME, from_step=8, number=3)],
        5: Command(kind=UNDO, from_step=9, undoes=1, number=4),
    }
    plain = train(11)
    with flagged(tmp_path, own) as recording:
        recorded = train(11, commands)
    assert len(plain) == len(recorded)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert_exact(recording)
    assert [one["state"] for one in answers(recording)] == ["ended"] * 4


def test_modules_that_had_no_hooks_are_recorded_from_the_step_on_to_the_last(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=param steps=::4 keep=stats") as recording:
        train(8, {1: rules_at(3, "module=second site=input,output,grad_output keep=tensor", to_step=5)})
    for site in ("input", "output", "grad_output"):
        assert steps(recording, site=site) == [3, 4, 5]
        assert set(recording.rows(site=site)["module_path"]) == {"second"}
    assert steps(recording, site="param") == [0, 4]
    assert recording.array("second", site="output", step=4).shape == (3, 2)
    (answer,) = answers(recording)
    assert (answer["state"], answer["since"], answer["until"]) == ("ended", 3, 5)
    assert_exact(recording)


def test_the_outermost_module_is_recorded_too(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=param steps=::4") as recording:
        train(6, {1: rules_at(3, "module='' site=input,output")})
    assert steps(recording, site="input") == steps(recording, site="output") == [3, 4, 5]
    assert_exact(recording)


def test_a_rule_is_in_force_for_whole_steps_and_what_comes_late_says_so(tmp_path: Path) -> None:
    told_late = [rules_at(2, "site=output"), rules_at(1, "site=input", to_step=4, number=2)]
    with flagged(tmp_path, "site=param steps=::4") as recording:
        train(8, {4: told_late})  # taken as step 4 begins
    assert steps(recording, site="output") == [5, 6, 7]
    assert steps(recording, site="input") == []
    late, missed = answers(recording)
    assert (late["state"], late["since"], late["why"]) == ("in force", 5, "learned of it at step 4")
    assert (missed["state"], "since" in missed) == ("missed", False)
    assert_exact(recording)


def test_a_pause_keeps_nothing_and_a_resume_ends_it(tmp_path: Path) -> None:
    pause = [Command(kind=PAUSE, from_step=3, number=1), Command(kind=RESUME, from_step=6, number=2)]
    with flagged(tmp_path) as recording:
        train(8, {1: pause})
    assert steps(recording) == [0, 1, 2, 6, 7]
    assert_exact(recording)


def test_a_pause_has_a_last_step_where_it_names_one(tmp_path: Path) -> None:
    with flagged(tmp_path) as recording:
        train(8, {1: Command(kind=PAUSE, from_step=3, to_step=4, number=1)})
    assert steps(recording) == [0, 1, 2, 5, 6, 7]
    assert_exact(recording)


def test_commands_that_are_heard_in_another_order_mean_the_same(tmp_path: Path) -> None:
    pause, resume = Command(kind=PAUSE, from_step=4, number=1), Command(kind=RESUME, from_step=6, number=2)
    with flagged(tmp_path) as recording:
        train(8, {1: resume, 2: pause})
    assert steps(recording) == [0, 1, 2, 3, 6, 7]
    assert_exact(recording)


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    undo = [Command(kind=UNDO, from_step=3, undoes=9, number=1), Command(kind=UNDO, from_step=3, undoes=1, number=2)]
    with flagged(tmp_path) as recording:
        train(4, {1: undo})
    assert [one["state"] for one in answers(recording)] == ["refused", "refused"]
    assert "no command 9" in answers(recording)[0]["why"]
    assert "is of kind undo" in answers(recording)[1]["why"]


def test_a_run_takes_a_bounded_number_of_rules(tmp_path: Path) -> None:
    commands = [rules_at(3, *["site=output"] * 16, number=number) for number in range(1, 18)]
    with flagged(tmp_path, "site=param") as recording:
        train(5, {1: commands})
    assert [one["state"] for one in answers(recording)] == ["in force"] * 16 + ["refused"]
    assert_exact(recording)


def test_a_command_after_a_refused_one_is_in_force_at_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = rules_at(3, "site=input keep=ring")
    with flagged(tmp_path, "site=param") as recording:
        train(6, {1: refused, 2: rules_at(4, "site=output", number=2)})
    assert [one["state"] for one in answers(recording)] == ["refused", "in force"]
    assert steps(recording, module_path="first", site="output") == [4, 5]
    assert "failed" not in caplog.text
    assert_exact(recording)


def test_the_loss_is_found_from_the_step_on_at_which_it_is_asked_for(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=param") as recording:
        train(6, {1: rules_at(3, "site=scalar name=loss")})
    assert steps(recording, name="loss") == [3, 4, 5]


def test_hooks_that_rest_are_woken_and_a_site_that_was_disarmed_stays_so(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output steps=::5") as recording:
        torch.manual_seed(3)
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(7):
            if step == 2:
                assert recording_side._current is not None and recording_side._current.capture is not None
                recording_side._current.capture.roots[0].disarm("first", ("output", "grad_output"), 2)
                told(rules_at(4, "site=output,grad_output"))
            model(batch(step)).sum().backward()
            optimizer.step()
    assert steps(recording, module_path="second", site="output") == [0, 4, 5, 6]
    assert steps(recording, module_path="second", site="grad_output") == [4, 5, 6]
    assert steps(recording, module_path="first") == [0]


def test_an_error_while_rules_change_refuses_them_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise SystemError("of a change")

    plain = train(6)
    with flagged(tmp_path, "site=param") as recording:
        monkeypatch.setattr("recorder.capture.hooks.root.Root.reselect", fail)
        recorded = train(6, {1: rules_at(3, "site=output")})
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    (answer,) = answers(recording)
    assert answer["state"] == "refused" and "SystemError: of a change" in answer["why"]
    assert steps(recording, site="output") == []


def test_an_interrupt_while_a_command_is_taken_neither_loses_nor_doubles_its_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    own = [Rule(site=("param",))]
    selection, taps = RuleSelection(own, 0), cast("TapRows", SimpleNamespace(reselect=lambda: None))
    commands = RuleCommands(own, selection=selection, clock=Clock(), roots=[], taps=taps)
    commands.tell(rules_at(2, "site=output"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(selection, "reschedule", interrupt)
        commands.step_changes(0)
    commands.step_changes(1)
    kept = []
    for step in (1, 2):
        selection.at_step(step)
        kept.append(selection.keeps("output"))
    assert kept == [False, True] and len(commands.answers()) == 1


class Graphs:
    """A backend for `torch.compile` that runs graphs as they are, and notes at which steps they were made."""

    def __init__(self, model: nn.Module) -> None:
        self.step = -1
        self.made_at: list[int] = []
        self._model = torch.compile(model, backend=self._make)

    def _make(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.made_at.append(self.step)
        return graph.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self._model(x)  # type: ignore[no-any-return]


def test_what_is_compiled_is_not_compiled_again_and_the_refusal_says_why(tmp_path: Path) -> None:
    graphs = Graphs(model := Tiny())
    commands = [rules_at(4, "module=first site=output", number=1), rules_at(4, "site=param keep=tensor", number=2)]
    with flagged(tmp_path, "module=second site=output steps=::2; site=grad steps=::4") as recording:
        train(8, {3: commands}, model=model, call=graphs)
    assert graphs.made_at and max(graphs.made_at) < 3
    refused, done = answers(recording)
    assert refused["state"] == "refused" and "compiled" in refused["why"]
    assert done["state"] == "in force"
    assert steps(recording, site="param") == [4, 5, 6, 7]


def test_hooks_are_not_put_on_where_a_function_was_compiled(tmp_path: Path) -> None:
    model = Tiny()
    other = torch.compile(lambda x: x + 1, backend="eager")
    other(torch.ones(2))
    with flagged(tmp_path, "module=second site=output steps=::2") as recording:
        commands = [
            rules_at(4, "module=first site=output", number=1),
            rules_at(4, "module=second site=output", number=2),
        ]
        train(7, {2: commands}, model=model)
    refused, done = answers(recording)
    assert refused["state"] == "refused" and "hooks on 'first' would make it compile again" in refused["why"]
    assert done["state"] == "in force"
    assert steps(recording, site="output") == [0, 2, 4, 5, 6]


def test_taps_in_a_graph_record_by_new_rules_without_a_new_graph(tmp_path: Path) -> None:
    graphs = Graphs(model := Tiny())
    with flagged(tmp_path, "site=output,grad_output steps=::50", compiled="tap") as recording:
        train(8, {3: rules_at(5, "site=output,grad_output keep=tensor")}, model=model, call=graphs)
    assert graphs.made_at and max(graphs.made_at) < 3
    assert answers(recording)[0]["state"] == "in force"
    assert steps(recording, site="output", module_path="second") == [0, 5, 6, 7]
    assert steps(recording, site="grad_output", module_path="first") == [0, 5, 6, 7]


def test_a_command_in_the_runs_directory_reaches_training_through_the_writer_thread(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=param steps=::4 keep=stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        current = recording_side._current
        assert current is not None
        sent = None
        until_s = time.monotonic() + 60
        step = 0
        last = 1 << 30
        while step <= last and time.monotonic() < until_s:
            model(batch(step)).sum().backward()
            optimizer.step()
            step += 1
            if sent is None and (run_dir := current.run_dir()) is not None:
                sent = send(run_dir, rules_at(0, "module=first site=output", number=0))
            if last == 1 << 30 and current.recording is not None and (told := current.recording.commands.answers()):
                since = told[0].since
                last = last if since is None else since + 3
            time.sleep(0.01)
    (answer,) = answers(recording)
    assert answer["state"] == "in force" and answer["by"] == "me"
    found = steps(recording, site="output")
    assert found[0] == answer["since"] and len(found) >= 3
    assert_exact(recording)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("site=output keep=ring", ""),
        ("site=output keep=ring before=9", "the ring of this run has before=4 after=2, and there is one ring"),
    ],
)
def test_a_rule_may_use_the_ring_of_the_run_with_its_window(tmp_path: Path, rules: str, why: str) -> None:
    with flagged(tmp_path, "site=grad keep=ring; site=scalar keep=stats", triggers="none") as recording:
        train(at={2: rules_at(4, rules)})
    (answer,) = answers(recording)
    assert answer.get("why", "") == why
    assert (answer["state"] == "refused") == bool(why)


def test_a_rule_with_a_ring_is_refused_where_the_run_has_none(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=grad keep=stats") as recording:
        train(at={2: rules_at(4, "site=output keep=ring")})
    (answer,) = answers(recording)
    assert answer["state"] == "refused" and answer["why"].startswith("keep=ring needs a ring")
