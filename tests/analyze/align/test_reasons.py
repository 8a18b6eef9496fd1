"""The reason of a fault is the true one: adapters, routers, dropout, and steps of which few modules were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.align.align import Aligned
from tests.rigs import rollouts
from tests.rigs.rollouts import RULES, aligned, gpt2, llama, mixtral, prompts, score, whole_mask, write

PRESET: dict[str, Any] = {"rules": "", "preset": "rollout"}


class Adapted(nn.Module):
    """A projection with an adapter beside it, as PEFT makes it, scaled by 4."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner.requires_grad_(False)
        self.lora_A = nn.Linear(inner.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base_layer(x) + 4 * self.lora_B(self.lora_A(x)))


def _adapted(folder: Path, times: tuple[float, float], stale: float, dtype: torch.dtype) -> Aligned:
    """Align a trainer with adapters in layer 0 with an engine that has merged those of `q_proj` and `v_proj` so."""
    (ids, mask), engine, trainer = prompts(), llama(), llama()
    trainer.requires_grad_(False)
    theirs, ours = engine.model.layers[0].self_attn, trainer.model.layers[0].self_attn
    for name, of in zip(("q_proj", "v_proj"), times, strict=True):
        setattr(ours, name, adapted := Adapted(getattr(ours, name)))
        with torch.no_grad():
            other = torch.randn(adapted.lora_A.weight.shape)
            getattr(theirs, name).weight += of * adapted.lora_B.weight @ (adapted.lora_A.weight + stale * other)
    sequences = write(folder / "engine", engine.to(dtype), ids, mask, **PRESET)
    score(folder / "trainer", trainer, sequences, whole_mask(mask), PRESET)
    return aligned(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_two_adapters_the_one_that_was_not_merged_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    told = _adapted(tmp_path, (4, 0), 0.0, dtype).told
    assert told.startswith("weights differ: model.layers.0.self_attn.v_proj.lora_A.weight is in the"), told
    assert "merged are the adapters of 'model.layers.0.self_attn.q_proj'; trainer and engine part" in told, told
    assert told.count("q_proj") == 1, told


def test_what_follows_an_adapter_that_was_not_merged_is_not_judged(tmp_path: Path) -> None:
    (ids, mask), engine, trainer = prompts(), llama(), llama()
    trainer.requires_grad_(False)
    for name in ("up_proj", "down_proj"):
        mlp, own = trainer.model.layers[0].mlp, getattr(engine.model.layers[0].mlp, name)
        setattr(mlp, name, adapted := Adapted(getattr(mlp, name)))
        with torch.no_grad():
            own.weight += (4 if name == "down_proj" else 0) * adapted.lora_B.weight @ adapted.lora_A.weight
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    score(tmp_path / "trainer", trainer, sequences, whole_mask(mask), PRESET)
    states = {one.name: one.state for one in aligned(tmp_path).weights if "lora_A" in one.name}
    assert list(states.values()) == ["in the trainer alone", "not comparable"], states


def test_an_adapter_that_was_merged_as_it_was_before_is_no_adapter_that_was_not_merged(tmp_path: Path) -> None:
    told = _adapted(tmp_path, (4, 4), 0.2, torch.float32).told
    assert "merged another adapter than that of model.layers.0.self_attn.q_proj.lora_A.weight" in told, told
    assert "not merged" not in told, told


def test_adapters_that_were_merged_twice_are_said_with_how_often(tmp_path: Path) -> None:
    told = _adapted(tmp_path, (8, 8), 0.0, torch.float32).told
    assert "adapters are merged 8 times (lora_alpha / r?)" in told and "not merged" not in told, told


@pytest.mark.parametrize("num", [1, 2])
def test_a_router_that_chooses_fewer_experts_is_the_reason(num: int, tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), mixtral()
    engine.model.layers[0].mlp.gate.top_k = num
    if num == 2:  # another fault behind the router is not the router's
        engine.model.layers[1].input_layernorm.variance_epsilon = 1e-2
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    score(tmp_path / "trainer", mixtral(), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path)
    assert found.parting is not None and found.parting.value.text == "'model.layers.1.input_layernorm' output"
    router = "'model.layers.0.mlp.gate' chooses 2 experts of a token in the trainer, and 1 in the engine"
    assert (found.parting.text == router) == (num == 1), found.parting.text


class Sorts(nn.Module):
    """A module that hands on whole numbers, of which the engine computes fewer, and is no router."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : self.num].argsort(-1)


class Small(nn.Module):
    """A model with whole numbers inside, and a scale of its own."""

    def __init__(self, num: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.sorts, self.head, self.scale = nn.Embedding(16, 8), Sorts(num), nn.Linear(8, 16), scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        self.sorts(x)
        return torch.as_tensor(self.head(x * self.scale))


def test_whole_numbers_of_a_module_without_experts_choose_none(tmp_path: Path) -> None:
    tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(1))
    for side, model in (("trainer", Small(4, 1.0)), ("engine", Small(2, 1.5))):
        with recorder.attach(model, enabled=True, dir=str(tmp_path / side), roots="any", rules=RULES):
            model(tokens)
    found = aligned(tmp_path).parting
    assert found is not None and "experts" not in found.text and "the root passes on something else" in found.text


@pytest.mark.parametrize("is_inside", [False, True])
def test_dropout_that_is_left_on_is_called_so(is_inside: bool, tmp_path: Path) -> None:
    model = llama if is_inside else gpt2
    (ids, mask), trainer = prompts(), model()
    sequences = write(tmp_path / "engine", model(), ids, mask, **PRESET)
    if is_inside:
        trainer.model.layers[0].self_attn.attention_dropout = 0.3
    else:
        trainer.transformer.h[0].attn.resid_dropout.p = 0.3
        trainer.transformer.drop.p = trainer.transformer.h[0].attn.attn_dropout.p = 0.0
    score(tmp_path / "trainer", trainer.train(), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path).parting
    assert found is not None
    told = found.value.text, found.text
    if is_inside:
        assert told[0] == "'model.layers.0.self_attn.o_proj' output" and "dropout in training mode" in told[1], told
    else:
        assert told[0] == "'transformer.h.0.attn.resid_dropout' output", told
        assert "dropout drops elements on one side, or others on each" in told[1], told


def test_another_scale_of_attention_is_not_called_dropout(tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), llama()
    engine.model.layers[0].self_attn.scaling *= 1.5
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path).parting
    assert found is not None and found.value.text == "'model.layers.0.self_attn.o_proj' output"
    assert "dropout" not in found.text, "a first token, which sees itself alone, agrees"


def test_a_step_of_which_few_modules_were_recorded_names_no_module_as_the_cause(tmp_path: Path) -> None:
    (ids, mask), engine, trainer = prompts(), llama(), llama()
    with torch.no_grad():
        engine.model.embed_tokens.weight.mul_(1.3)
    sequences = write(tmp_path / "engine", engine, ids, mask, rules=PRESET["rules"], preset="rollout")
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.0)
    with recorder.attach(trainer, enabled=True, dir=str(tmp_path / "trainer"), preset="rollout"):
        for step in range(6):
            own, here = (ids, mask) if step < 5 else (sequences, whole_mask(mask))
            positions = (here.cumsum(1) - 1).clamp(min=0)
            trainer(input_ids=own, attention_mask=here, position_ids=positions, labels=own).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = aligned(tmp_path, step="5")
    assert found.parting is not None and found.parting.value.text == "'model.rotary_emb' input x", found.told
    told = "2 of 33 modules were recorded for these tokens on both sides"
    assert f"{told}, so the cause is this module, or any before it" in found.told, found.told
    assert any(f"{told}; record all with RECORDER_RULES='leaf=yes" in note for note in found.notes), found.notes


class WithoutLogits(nn.Module):
    """A model with a head that computes log-probabilities of labels alone, as the one of TRL."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:
        logits = (
            self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits[:, :-1] / self.temperature
        )
        told = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0]
        is_asked = torch.arange(told.shape[1]) >= told.shape[1] - 3
        return {"loss": told.mean(), "log_probs": told.masked_fill(~is_asked, 0.0), "entropy": told}


def test_log_probabilities_of_a_head_without_logits_are_those_of_its_labels(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask, **PRESET)
    score(tmp_path / "trainer", WithoutLogits(llama()), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path).logprobs
    assert found is not None and abs(found.largest.apart) < 1e-4
    assert found.num_tokens == 2 * len(ids), "the last token of a sample has none in the engine"


def test_log_probabilities_that_differ_are_a_finding_where_no_value_parts(tmp_path: Path) -> None:
    ids, mask = prompts()
    sequences = write(tmp_path / "engine", llama(), ids, mask, **PRESET)
    score(tmp_path / "trainer", WithoutLogits(llama(), 0.5), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path)
    assert found.parting is None and not found.is_fine, found.told
    assert found.told.startswith("log-probabilities differ by 0."), found.told
    assert "after the last module (a temperature?)" in found.told, found.told


def test_a_fault_of_calls_without_modules_is_not_said_to_be_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preset records modules at the first calls and then at few; the calls between are at fault."""
    monkeypatch.setattr(rollouts, "NUM_NEW", 12)
    (ids, mask), engine, calls = prompts(), llama(), [0]
    projection = engine.model.layers[0].self_attn.o_proj
    plain = projection.forward

    def late(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.as_tensor(plain(x) * (3 if calls[0] > 6 else 1))

    projection.forward = late
    sequences = write(tmp_path / "engine", engine, ids, mask, **PRESET)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask), PRESET)
    found = aligned(tmp_path)
    assert found.parting is not None and found.parting.value.module_path == ""
    assert (
        "values before this one were recorded for these tokens, so the cause is this module, or any before"
        in found.parting.text
    )
    assert any(f"values before {found.parting.value.text} were recorded for these tokens; record all" in note
               for note in found.notes), "a note that stands alone names the value"  # fmt: skip
    assert not found.search.few_compared, "a fifth of the modules were compared"


def test_a_completion_that_the_engine_did_not_write_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "NUM_NEW", 12)
    (ids, mask), engine = prompts(), llama()
    sequences = write(tmp_path / "engine", engine, ids, mask)
    sequences[0, 6:] = torch.arange(20, 32)
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    (told,) = aligned(tmp_path).tokens
    assert "begins with 6 tokens of one of these, and the engine did not write the rest" in told.text


def test_completions_that_change_their_prompts_are_no_beams(tmp_path: Path) -> None:
    (ids, mask), engine = prompts(), llama()
    sequences = write(tmp_path / "engine", engine, ids, mask)
    sequences[[0, 1], 6:] = sequences[[1, 0], 6:]
    score(tmp_path / "trainer", llama(), sequences, whole_mask(mask))
    told = [one.text for one in aligned(tmp_path).tokens if one.is_finding]
    assert told and all("beams" not in text and "in front" not in text for text in told), told
