"""What rounding explains, and what it does not: deep models, 16-bit types, runs of noise, weights that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from recorder.errors import LookupFailedError
from tests.rigs.command_line import Cli
from tests.rigs.rollouts import RULES, aligned, llama, mixtral, prompts, score, whole_mask, write

PRESET: dict[str, Any] = {"rules": "", "preset": "rollout"}
TYPES = {"both in bfloat16": torch.bfloat16, "the engine in bfloat16": torch.float32}


def _pair(folder: Path, dtype: torch.dtype, change: Callable[[Any], object] = lambda engine: None) -> torch.Tensor:
    """Record an engine of eight layers in bfloat16, and a trainer that pads otherwise."""
    (ids, mask), engine = prompts(), llama(num_hidden_layers=8).bfloat16()
    change(engine)
    sequences = write(folder / "engine", engine, ids, mask, **PRESET)
    trainer = llama(num_hidden_layers=8).to(dtype)
    score(folder / "trainer", trainer, sequences, whole_mask(mask), PRESET, position_ids=None)
    return sequences


@pytest.mark.parametrize("types", TYPES)
def test_what_rounding_does_in_many_layers_is_no_fault_and_not_certain(types: str, tmp_path: Path, cli: Cli) -> None:
    _pair(tmp_path, TYPES[types])
    found = aligned(tmp_path)
    assert found.is_fine and found.parting is None, found.told
    assert max(value.largest for value in found.values if value.bound > 0.1) > 0.1, "more than the first bound"
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine")
    assert printed.exit_code == 0 and "note    cannot tell without --noise: " in printed.out
    assert "differs by up to " in printed.out and "the most of 87 values, which may be rounding;" in printed.out


def _other_base(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.9)


def _unmasked(model: Any) -> None:
    attention = model.model.layers[2].self_attn
    own = attention.forward
    attention.forward = lambda *args, **more: own(*args, **{**more, "attention_mask": None})


def _five_percent(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight.mul_(1.05)


FAULTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "another rotary base": (_other_base, "trainer and engine part at 'model.rotary_emb' output 0"),
    "padding that one layer sees": (_unmasked, "trainer and engine part at 'model.layers.2.self_attn.o_proj' output"),
    "a weight that is 5% larger": (_five_percent, "weights differ: model.layers.4.mlp.down_proj.weight equals the"),
}


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_larger_than_rounding_is_named_at_its_module(name: str, types: str, tmp_path: Path) -> None:
    change, words = FAULTS[name]
    _pair(tmp_path, TYPES[types], change)
    found = aligned(tmp_path)
    assert not found.is_fine and words in found.told, found.told


@pytest.mark.parametrize("name", ["", "another rotary base", "a weight that is 5% larger"])
def test_a_repeat_that_rounds_alike_makes_no_fault_and_hides_none(name: str, tmp_path: Path) -> None:
    change, words = FAULTS.get(name, (lambda engine: None, ""))
    (ids, mask), repeat = prompts(), llama(num_hidden_layers=8).bfloat16()
    _pair(tmp_path, torch.bfloat16, change)
    change(repeat)
    write(tmp_path / "noise", repeat, torch.cat([0 * ids, ids], 1), torch.cat([0 * mask, mask], 1), **PRESET)
    found = aligned(tmp_path, noise=[recorder.open_run(tmp_path / "noise")])
    assert found.search.noise and words in found.told and found.is_fine == (not name), found.told
    if not name:  # a processor without AVX-512 rounds the repeat unlike the engine, and the noise is as large as it is
        told = ("which is more than --noise measures, and no more than", "values of the modules agree within noise")
        assert any(one in found.told for one in told), found.told


def test_a_repeat_in_one_type_does_not_measure_what_separates_two(tmp_path: Path) -> None:
    sequences = _pair(tmp_path, torch.float32)
    whole = whole_mask(prompts()[1])
    for name, dtype in (("same", torch.bfloat16), ("wide", torch.float32)):
        score(tmp_path / name, llama(num_hidden_layers=8).to(dtype), sequences, whole, PRESET)
        found = aligned(tmp_path, noise=[recorder.open_run(tmp_path / name)])
        assert found.is_fine, found.told
        asks = any("which --noise measures by a run of the engine in float32" in note for note in found.notes)
        assert asks == (name == "same"), found.notes
        assert found.told.startswith("cannot tell") == (name == "same")


def test_an_expert_that_is_stale_is_the_headline(tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), mixtral()
    experts = engine.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj[1].mul_(1.1)
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    score(tmp_path / "trainer", mixtral(), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path)
    told = "weights differ: model.layers.0.mlp.experts.down_proj equals the trainer's parameter at no recorded step; "
    assert found.told.startswith(f"{told}trainer and engine part from ")


@pytest.mark.parametrize("is_parted", [False, True])
def test_samples_that_are_packed_and_see_each_other_are_named(is_parted: bool, tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    rows = [row[here.bool()].tolist() for row, here in zip(sequences, whole_mask(mask), strict=True)]
    packed = torch.tensor([[token for row in rows for token in row]])
    owner = torch.tensor([number for number, row in enumerate(rows) for _ in row])
    seen = (owner[:, None] == owner).tril()[None, None] if is_parted else None
    attached = recorder.attach(model := llama(), enabled=True, dir=str(tmp_path / "trainer"), roots="any", rules=RULES)
    with attached:
        model(input_ids=packed, attention_mask=seen)
    found = aligned(tmp_path)
    assert found.num_tokens == int(whole_mask(mask).sum()) - len(ids)
    if is_parted:
        assert found.is_fine, found.told  # rotary positions forgive what the mask of the program parts
    else:
        assert found.parting is not None and found.parting.reason == "inputs" and found.parting.first.position > 0
        assert "packed these samples behind other samples without position_ids or cu_seqlens" in found.told


def test_beams_that_change_their_rows_are_refused(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask, {"num_beams": 3})
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    with pytest.raises(LookupFailedError, match="texts change their rows between calls, as beams do"):
        aligned(tmp_path)


def test_a_trainer_of_few_modules_is_said_with_what_to_record(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask)
    rules = {"rules": "module='' site=input,output keep=tokens"}
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask), rules)
    notes = aligned(tmp_path).notes
    wanted = "RECORDER_RULES='leaf=yes site=output keep=tokens; site=param keep=fingerprint'"
    assert any(wanted in note for note in notes), notes
    assert any(note.startswith("1 of ") for note in notes), notes


def _stale(model: Any, layer: int = 4, share: float = 0.16) -> None:
    weight = model.model.layers[layer].self_attn.v_proj.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        other = weight.float() / weight.float().norm() + noise / noise.norm() * share
        weight.copy_(other / other.norm() * weight.float().norm())  # as large as before


UNSURE = {"above rounding": (4, 0.16, "4.self_attn.v_proj' output"), "above noise": (1, 0.05, "")}
"""Where the difference is no larger than rounding may be, the module that differs most depends on the processor."""


@pytest.mark.parametrize(("layer", "share", "path"), UNSURE.values(), ids=UNSURE)
def test_noise_turns_no_fault_at_all_tokens_into_ok(
    layer: int, share: float, path: str, tmp_path: Path, cli: Cli
) -> None:
    sequences = _pair(tmp_path, torch.float32, lambda engine: _stale(engine, layer, share))
    repeat = llama(num_hidden_layers=8).bfloat16()
    _stale(repeat, layer, share)
    score(tmp_path / "noise", repeat.float(), sequences, whole_mask(prompts()[1]), PRESET)
    printed = cli("align", tmp_path / "trainer", tmp_path / "engine", "--noise", tmp_path / "noise")
    told = f"note    cannot tell: 'model.layers.{path}"
    assert printed.exit_code == 0 and told in printed.out, printed.out


def _same(folder: Path, sequences: torch.Tensor) -> None:
    write(folder, llama(num_hidden_layers=8).bfloat16(), *prompts(), **PRESET)


def _other_tokens(folder: Path, sequences: torch.Tensor) -> None:
    ids, mask = prompts()
    write(folder, llama(num_hidden_layers=8).bfloat16(), ids.flip(1), mask.flip(1) * 0 + 1, **PRESET)


def _other_model(folder: Path, sequences: torch.Tensor) -> None:
    model = llama(num_hidden_layers=8).bfloat16()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    score(folder, model, sequences, whole_mask(prompts()[1]), PRESET)


def _other_type(folder: Path, sequences: torch.Tensor) -> None:
    score(folder, llama(num_hidden_layers=8), sequences, whole_mask(prompts()[1]), PRESET)


SET_ASIDE = {
    "the same run": (_same, "equals the engine to the last bit"),
    "other tokens": (_other_tokens, "has no common tokens"),
    "another model": (_other_model, "another model"),
    "another type": (_other_type, "computes in float32, and the trainer does not"),
}


@pytest.mark.parametrize("name", SET_ASIDE)
def test_a_run_that_measures_no_noise_is_set_aside(name: str, tmp_path: Path) -> None:
    record, words = SET_ASIDE[name]
    record(tmp_path / "noise", _pair(tmp_path, torch.bfloat16))
    found = aligned(tmp_path, noise=[recorder.open_run(tmp_path / "noise")])
    assert found.is_fine and found.told.startswith("cannot tell with this --noise (") and words in found.told
    assert any("is set aside: " in note and words in note for note in found.notes), found.notes
    assert found.bounds.startswith("assumed")


@pytest.mark.parametrize("is_linear", [False, True])
def test_what_nothing_follows_is_said_with_positions_where_it_is_of_positions(is_linear: bool, tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), llama(num_hidden_layers=4)
    if is_linear:  # the same shift of all keys of a query, which the softmax cancels
        engine.model.rotary_emb.inv_freq.zero_()
        projection = engine.model.layers[0].self_attn.k_proj
        projection.forward = lambda x, own=projection.forward: own(x) + 1.0
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    trainer = llama(num_hidden_layers=4)
    if is_linear:
        trainer.model.rotary_emb.inv_freq.zero_()
    score(tmp_path / "trainer", trainer, sequences, whole_mask(mask), PRESET, position_ids=None)
    found = aligned(tmp_path)
    notes = [note for note in found.notes if "differs by up to" in note]
    assert found.is_fine and notes, found.told
    for note in notes:
        assert ("whole samples are at other positions" in note) == ("rotary_emb" in note)
    assert any("k_proj" in note for note in notes) == is_linear
    largest = max(value.largest for value in found.values if is_linear or not value.num_beyond)
    assert f"by up to {largest:.2g}" in found.told


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_positions_that_are_handed_on_are_judged_where_they_are_made(factor: float, tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), llama()
    with torch.no_grad():
        engine.model.layers[1].mlp.up_proj.weight.mul_(factor)
    sequences = write(tmp_path / "engine", engine, ids, mask)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask), position_ids=None)
    found = aligned(tmp_path)
    handed = [value for value in found.values if value.name.startswith("position_embeddings")]
    assert any(value.num_beyond for value in handed)
    told = "of the modules agree within noise" if factor == 1 else "part at 'model.layers.1.mlp.up_proj' output"
    assert found.is_fine == (factor == 1) and told in found.told, found.told
