"""Models that other people wrote, everything selected: training is the same to the bit, every module accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.doctor.expected import Expectation, compare
from recorder.observe import tree
from tests.models.zoo import CASES, NUM_STEPS, SEED, Trained, train
from tests.rigs.capturing import Recording, flagged
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]
FORWARD = ("input", "output")


class Twins(NamedTuple):
    """One training without the recorder, and the same with it."""

    name: str
    plain: Trained
    recorded: Trained
    recording: Recording
    rows: pd.DataFrame
    found: Expectation


@pytest.fixture(scope="module", params=CASES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    make = CASES[request.param]
    torch.compiler.reset()  # what another test has compiled looks as if it had been of this model
    torch._dynamo.utils.counters.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, whatever else the machine does
    try:
        plain = train(make)
        with flagged(tmp_path_factory.mktemp(request.param), "site=* keep=tensor") as recording:
            recorded = train(make)
    finally:
        torch.set_num_threads(before)
    return Twins(request.param, plain, recorded, recording, recording.rows(), compare(recording.run))


def test_training_is_the_same_to_the_bit(twins: Twins) -> None:
    plain, recorded = twins.plain, twins.recorded
    assert torch.equal(plain.random_state, recorded.random_state)
    assert [loss.item() for loss in plain.losses] == [loss.item() for loss in recorded.losses]
    assert plain.losses[0].item() != plain.losses[1].item(), "it does train"
    for kind in ("params", "grads", "buffers"):
        expected, actual = getattr(plain, kind), getattr(recorded, kind)
        assert expected.keys() == actual.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []


def test_every_module_has_rows_or_a_named_reason(twins: Twins, cli: Cli) -> None:
    torch.manual_seed(SEED)
    callable_paths = {node.path for node in tree.walk(CASES[twins.name]().model) if node.is_callable}
    for step in range(NUM_STEPS):
        rows = twins.rows[(twins.rows.step == step) & twins.rows.site.isin(FORWARD)]
        silent = callable_paths - set(rows.module_path)
        reasons = {
            path: hole.reason.key
            for hole in twins.found.gaps
            if step in hole.steps and "output" in hole.sites
            for path in hole.modules
        }
        assert {path: reasons.get(path) for path in silent} == SILENT.get(twins.name, {})
    assert [hole for hole in twins.found.gaps if not hole.reason.is_harmless] == []
    result = cli("doctor", "--strict", twins.recording.run.path)
    assert result.exit_code == 0, result.out
    for hole in twins.found.gaps:
        assert hole.reason.text in result.out


SILENT = {"t5": {"shared": "bypassed"}}
"""Its weight belongs to the encoder's and the decoder's embedding, which are called in its place."""


def test_nothing_is_dropped_and_the_accounts_balance(twins: Twins) -> None:
    ledger = twins.recording.manifest["ledger"]
    assert ledger["dropped"] == {}
    assert ledger["observed"] == ledger["written"] == len(twins.rows)
    assert twins.recording.manifest["events"] == []


def test_gradients_and_losses_are_recorded_as_they_were(twins: Twins) -> None:
    run, last = twins.recording.run, NUM_STEPS - 1
    grads = twins.rows[(twins.rows.site == "grad") & (twins.rows.step == last)]
    grads = grads.drop_duplicates(["module_path", "name"])  # a large one is several rows
    paths = [f"{row.module_path}.{row.name}".lstrip(".") for row in grads[["module_path", "name"]].itertuples(False)]
    by_tensor = {id(value): name for name, value in twins.recorded.grads.items()}
    assert len(paths) == len(by_tensor), "each once, tied ones under their first module"
    sample = sorted(zip(paths, grads.seq, strict=True))[::7]
    for path, seq in sample:
        row = grads[grads.seq == seq].iloc[0]
        actual = run.tensor(row.module_path, site="grad", name=row["name"], step=last)
        assert torch.equal(actual, twins.plain.grads[path]), path
    names = {
        (row.module_path, row.site, row[-1]) for row in twins.rows[["module_path", "site", "name"]].itertuples(False)
    }
    assert NAMED[twins.name] <= names
    if ("", "output", "loss") in names:
        losses = [run.tensor("", site="output", name="loss", step=step) for step in range(NUM_STEPS)]
        assert [loss.item() for loss in losses] == [loss.item() for loss in twins.plain.losses]


NAMED: dict[str, set[tuple[str, str, str]]] = {
    "resnet18": {("", "output", ""), ("layer1.0.relu", "output", ""), ("bn1", "buffer", "running_mean")},
    "deeplabv3": {("", "output", "out"), ("", "output", "aux"), ("", "grad_output", "aux")},
    "maskrcnn": {
        ("", "input", "targets.0.masks"), ("", "output", "loss_mask"), ("transform", "output", "0.tensors"),
        ("rpn", "input", "images.tensors"), ("backbone", "output", "pool"), ("", "grad_output", "loss_objectness"),
    },
    "llama": {
        ("", "output", "loss"), ("", "output", "past_key_values.layers.1.values"),
        ("model.layers.1.self_attn", "input", "past_key_values.layers.0.keys"),
    },
    "t5": {("encoder", "output", "last_hidden_state"), ("decoder", "input", "encoder_hidden_states"),
           ("", "output", "past_key_values.cross_attention_cache.layers.0.keys")},
    "mixtral": {("", "output", "router_logits.1"), ("model.layers.0.mlp.experts", "grad", "gate_up_proj"),
                ("model.layers.0.mlp.experts", "input", "top_k_index")},
}  # fmt: skip
"""Some of what is particular to each: dicts, lists of dicts, objects that hold tensors, fused experts."""


class Batch:
    """What a data loader of one's own may give: tensors hang on an object, other things too."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.parts = [x + 1, {"deep": x + 2}]
        self.device = x.device
        self.maker = nn.Linear(4, 4)
        self.itself = self
        self.inner: Batch | None = None
        self.words = ["text"] * 10_000
        self.many = [x] * 10_000

    @property
    def computed(self) -> torch.Tensor:
        raise AssertionError("nobody asked for it")


class Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.layer(batch.x)  # type: ignore[no-any-return]


def test_tensors_that_hang_on_an_object_are_recorded_and_what_is_no_data_is_left_alone(tmp_path: Path) -> None:
    top = last = Batch(torch.ones(3, 4))
    for i in range(4):
        last.inner = last = Batch(torch.full((3, 4), float(i)))
    with flagged(tmp_path, "site=input module='' keep=tensor") as recording:
        Over()(top).sum()
    own = ["x", "parts.0", "parts.1.deep"]
    expected = [f"batch.{'inner.' * depth}{name}" for depth in range(3) for name in own]
    assert sorted(recording.rows().name) == sorted(expected)
    assert torch.equal(
        recording.run.tensor("", site="input", name="batch.inner.inner.parts.1.deep"), torch.full((3, 4), 3.0)
    )
    assert recorder.open_run(recording.folder).writers[0].manifest.members["ledger"]["dropped"] == {}
